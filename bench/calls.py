"""Measures the overhead of a call through an optimized module, in microseconds, by part.

    python bench/calls.py [--rows N] [--width N]

The module is small (two linear layers and a GELU) and runs on one thread, so that the wrapper shows. Each figure is the
minimum over many short loops, in CPU time of the thread. Parts are timed alone, so they do not add up exactly.
PyTorch's own forward, and its forward with backward, are measured too.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
import timeit

os.environ["DEEPWELL_MEASURE"] = "0"

import deepwell  # noqa: E402
import torch  # noqa: E402
from deepwell.guards import unusual_mode  # noqa: E402
from deepwell.optimize import _autocast_types, _flattened, _signature  # noqa: E402


def microseconds(function) -> float:
    function()
    return min(timeit.repeat(function, number=200, repeat=40, timer=time.thread_time)) / 200 * 1e6


class Nothing(torch.autograd.Function):
    """An autograd function that does nothing, to measure autograd's own time."""

    @staticmethod
    def forward(ctx, output, *leaves):
        ctx.save_for_backward(*leaves)
        return output.detach()

    @staticmethod
    def backward(ctx, grad):
        return (grad, *[None] * len(ctx.saved_tensors))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    width = options.width
    plain = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)
    )
    model = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(options.rows, width)

    def without_gradients(module):
        def run():
            with torch.no_grad():
                module(x)

        return run

    def step(module):
        parameters = list(module.parameters())

        def run():
            module(x).sum().backward()
            for parameter in parameters:
                parameter.grad = None

        return run

    step(model)()
    forward = model.forward
    flat, spec = _flattened((x,), {})
    state = forward._state()
    key = _signature(flat, spec, forward.session.target, _autocast_types())[0]
    key = key, state.module.training
    entry, (leaves, sizes) = forward._find(state, key, flat, (x,), {})
    program = entry.program
    wrt = program._wrt(leaves)
    prepared = program.variant(wrt, program._expected_outputs(sizes)).prepared(sizes)
    outputs, lease = program._forward(prepared, leaves)
    target = program.target
    grads = [torch.empty_like(leaf) for leaf in leaves if leaf.requires_grad]

    def run_forward():
        target.forward(prepared.plan, lease, leaves, outputs)

    def run_backward():
        target.backward(prepared.plan, -1, lease, leaves, outputs, outputs, grads)

    rows = [
        ("forward without gradients, PyTorch", without_gradients(plain)),
        ("forward without gradients, Deepwell", without_gradients(model)),
        ("forward, PyTorch", lambda: plain(x)),
        ("forward, Deepwell", lambda: model(x)),
        ("forward + backward, PyTorch", step(plain)),
        ("forward + backward, Deepwell", step(model)),
        ("  of it: PyTorch's modes", unusual_mode),
        (
            "  arguments flattened, kind of call",
            lambda: _signature(*_flattened((x,), {}), target, _autocast_types()),
        ),
        ("  guards: the module is unchanged", forward._state),
        ("  capture found, leaves bound", lambda: forward._find(state, key, flat, (x,), {})),
        ("  arena leased", lambda: program.lease(prepared)),
        ("  outputs allocated", lambda: [target.new(*output) for output in prepared.outputs]),
        ("  an autograd function that does nothing", lambda: Nothing.apply(x, *leaves)),
        ("  the engine's forward", run_forward),
        ("  gradients allocated", lambda: [torch.empty(grad.shape) for grad in grads]),
        ("  the engine's backward", run_backward),
    ]
    for label, function in rows:
        print(f"{label:44}{microseconds(function):8.1f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
