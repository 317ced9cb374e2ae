"""Helpers of the attention tests, which run Deepwell's operators on CPU tensors, with the reference
in libdeepwell's place.
"""

import contextlib

import torch
from deepwell.attention import functional
from torch.utils._python_dispatch import TorchDispatchMode

FORWARD, BACKWARD = "deepwell.attention_forward.default", "deepwell.attention_backward.default"


@contextlib.contextmanager
def served_on_cpu():
    functional.devices.add("cpu")
    functional.forget()
    functional.fallbacks.clear()
    try:
        yield
    finally:
        functional.devices.discard("cpu")
        functional.forget()


class Seen(TorchDispatchMode):
    """Counts the attention operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "attention" in name:
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))

    @property
    def ours(self) -> int:
        return self.counts.get(FORWARD, 0)

    @property
    def others(self) -> int:
        return sum(n for name, n in self.counts.items() if not name.startswith("deepwell"))


def seen(function) -> Seen:
    mode = Seen()
    with mode:
        function()
    return mode


def compiled(function, graphs: list):
    """torch.compile(fullgraph=True) that stores the forward and backward graphs in ``graphs``."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(function, fullgraph=True, backend=backend)


def attention_nodes(graphs: list) -> list[str]:
    return [
        str(node.target)
        for graph in graphs
        for node in graph.graph.nodes
        if node.op == "call_function" and "attention" in str(node.target)
    ]


def apart(ours, theirs) -> float:
    """Returns the largest difference between the tensors of each pair (None matches None)."""
    most = 0.0
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype
            most = max(most, (a - b).abs().max().item() if a.numel() else 0.0)
    return most


def rounding(theirs, terms: int = 64) -> float:
    """Returns a bound on the difference of two F32 computations of `theirs`. Each sums `terms`
    products in its own order and rounds about six more times: a random walk of 2^-24 of the largest
    element, or of 1.
    """
    largest = max((t.abs().max().item() for t in theirs if t is not None and t.numel()), default=0)
    return (terms**0.5 + 6) * 2.0**-24 * max(largest, 1.0)


def said(options) -> str:
    """Names a test's parameters: tensors by shape and type, so that every process uses the same name."""
    if not isinstance(options, dict):
        return str(options)
    return ",".join(
        f"{name}={f'{v.dtype} {list(v.shape)}' if isinstance(v, torch.Tensor) else v}"
        for name, v in options.items()
    )
