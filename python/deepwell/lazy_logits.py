"""Logits that are made when they are first looked at.

Hugging Face models that are called with labels return the loss and the logits, [B, S, V], and training reads the loss
alone. ``defer`` takes such logits out of a captured graph: the graph returns the input of the last linear layer
instead, [B, S, H], and the module returns a ``LazyLogits`` in place of the logits. It is a tensor with the shape, type
and gradient of the logits and without memory. The first operation that reads its elements makes PyTorch compute them.
"""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import dataclass, field, replace
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from deepwell import _deepwell
from deepwell.capture import Captured, Output
from deepwell.lowering import dims
from deepwell.lowering.builder import FLOATS, TORCH_DTYPES
from deepwell.precision import PrecisionPolicy
from deepwell.routing import Recorded

# Logits are deferred if they have at least this many times as many elements as the layer's input. Llama-2 70B has 3.9
# times as many.
_LEAST_RATIO = 2
# Operations of one tensor and constants, which may follow the layer where logits are left out.
_ELEMENTWISE = frozenset(("mul", "div", "add", "sub", "neg", "tanh"))


# ---- in the graph -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deferred:
    """The linear layer of logits that are not an output of the graph. The layer's input is, in their place."""

    weight: int  # leaf
    bias: int | None  # leaf
    transposed: bool  # the weight is [H, V]
    dtype: torch.dtype
    shape: tuple[Any, ...] | None  # None: the input's, with V as its last dim
    reaches: frozenset[int]  # leaves by which the layer's input can be differentiated


@dataclass
class _Graph:
    """A captured graph's nodes and leaves by the names of their values."""

    parsed: dict[str, Any]
    makers: dict[str, dict[str, Any]] = field(init=False)
    leaves: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.makers = {name: node for node in self.parsed["nodes"] for name in node["outputs"]}
        self.leaves = {leaf["name"]: i for i, leaf in enumerate(self.parsed["leaves"])}

    def parameter(self, name: str) -> int | None:
        """Returns the leaf of a parameter, or of one that autocast casts."""
        maker = self.makers.get(name)
        while maker is not None and maker["op"] == "cast":
            name = maker["inputs"][0]
            maker = self.makers.get(name)
        leaf = self.leaves.get(name)
        if leaf is None or self.parsed["leaves"][leaf]["role"] != "parameter":
            return None
        return leaf

    def layer_of(self, name: str, elementwise: bool) -> dict[str, Any] | None:
        """Returns the linear layer whose result the value is, perhaps reshaped and cast. ``elementwise``: scaled or
        capped too."""
        while True:
            node = self.makers.get(name)
            if node is None or node["op"] == "linear":
                return node
            inputs = node["inputs"]
            if elementwise and node["op"] in _ELEMENTWISE:
                inputs = [x for x in inputs if not self._is_constant(x)]
                if len(inputs) != 1:
                    return None
            elif node["op"] not in ("reshape", "cast"):
                return None
            name = inputs[0]

    def _is_constant(self, name: str) -> bool:
        maker = self.makers.get(name)
        while maker is not None and maker["op"] in ("broadcast", "reshape", "cast"):
            maker = self.makers.get(maker["inputs"][0])
        return maker is not None and maker["op"] == "constant"

    def is_large(self, layer: dict[str, Any]) -> bool:
        """Returns whether the layer has a parameter as its weight, and a result that is larger than its input."""
        leaf = self.parameter(layer["inputs"][1])
        if leaf is None:
            return False
        shape = self.parsed["leaves"][leaf]["shape"]
        wide, narrow = shape if layer["attrs"].get("transpose_w", 1) else shape[::-1]
        return isinstance(wide, int) and isinstance(narrow, int) and wide >= _LEAST_RATIO * narrow

    def behind(self, name: str) -> set[str]:
        """Returns the values that are computed from a value, and itself."""
        found = {name}
        for node in self.parsed["nodes"]:
            if not found.isdisjoint(node["inputs"]):
                found.update(node["outputs"])
        return found

    def reaches(self, name: str) -> frozenset[int]:
        """Returns the leaves from which a gradient's path may lead to the value."""
        needed = {name}
        for node in reversed(self.parsed["nodes"]):
            if node["op"] != "stop_gradient" and not needed.isdisjoint(node["outputs"]):
                needed.update(x for x in node["inputs"] if x is not None)
        return frozenset(leaf for value, leaf in self.leaves.items() if value in needed)


def defer(
    captured: Captured, logits: bool | str, policy: PrecisionPolicy | None = None
) -> tuple[Captured, dict[int, Deferred]]:
    """Returns the capture for a way of returning logits, and the deferred ones by output of the graph.

    An output is deferred if it is the result of a linear layer whose weight is a parameter, it is larger than the
    layer's input, a scalar output (the loss) depends on it, and no other output does. ``logits``: "lazy" defers such
    outputs, False replaces them and the output called "logits" by None, and True changes nothing.
    """
    losses = [dtype in FLOATS and not shape for dtype, shape in captured.output_types]
    if logits is True or not any(losses):
        return captured, {}
    graph = _Graph(json.loads(captured.json))
    if logits is False:
        return _without_logits(captured, graph, losses), {}
    names = graph.parsed["outputs"]
    deferred: dict[int, Deferred] = {}
    for index in range(len(names)):
        found = None if losses[index] else _deferred(captured, graph, index, losses, policy)
        if found is not None:
            deferred[index], names[index] = found
    if not deferred:
        return captured, {}
    return replace(captured, json=json.dumps(graph.parsed)), deferred


def _deferred(
    captured: Captured,
    graph: _Graph,
    index: int,
    losses: Sequence[bool],
    policy: PrecisionPolicy | None,
) -> tuple[Deferred, str] | None:
    """Returns how an output of the graph can be deferred, and the name of the layer's input."""
    names = graph.parsed["outputs"]
    dtype, shape = captured.output_types[index]
    layer = graph.layer_of(names[index], False) if dtype in FLOATS else None
    if layer is None or not graph.is_large(layer) or not _is_alone(captured, index):
        return None
    if policy is not None and not _keeps(policy, captured, layer["module"]):
        return None  # PyTorch, which computes them later, would not round their operands
    given, weight, bias = layer["inputs"]
    if given not in graph.makers or given in names:
        return None
    biased = None if bias is None else graph.parameter(bias)
    if bias is not None and biased is None:
        return None
    behind = graph.behind(layer["outputs"][0])
    others = [loss for i, loss in enumerate(losses) if i != index and names[i] in behind]
    if not others or not all(others):
        return None
    reshaped = names[index]
    while graph.makers[reshaped]["op"] == "cast":
        reshaped = graph.makers[reshaped]["inputs"][0]
    return (
        Deferred(
            weight=graph.parameter(weight),
            bias=biased,
            transposed=not layer["attrs"].get("transpose_w", 1),
            dtype=TORCH_DTYPES[dtype],
            shape=tuple(map(dims.json_form, shape)) if reshaped != layer["outputs"][0] else None,
            reaches=graph.reaches(given),
        ),
        given,
    )


def _keeps(policy: PrecisionPolicy, captured: Captured, module: str) -> bool:
    """Returns whether the linear layers of a module keep the model's precision."""
    choices = policy.choices(_deepwell.Graph(captured.json))
    return not any(layer["module"] == module and "operands" in layer for layer in choices)


def _is_alone(captured: Captured, index: int) -> bool:
    """Returns whether one output of the module is this output of the graph, and no other is a copy or a view of it."""
    places = [
        i for i, output in enumerate(captured.outputs)
        if output.kind == "graph" and output.index == index
    ]  # fmt: skip
    return len(places) == 1 and not any(
        output.copied and i in places or output.kind == "view" and output.index in places
        for i, output in enumerate(captured.outputs)
    )


def _without_logits(captured: Captured, graph: _Graph, losses: Sequence[bool]) -> Captured:
    """Returns the capture with None in place of the logits."""
    names = graph.parsed["outputs"]
    result = pytree.tree_unflatten(range(len(captured.outputs)), captured.output_spec)
    named = _logits_in(result.result if isinstance(result, Recorded) else result)
    dropped = set()
    for place, output in enumerate(captured.outputs):
        if output.kind != "graph" or losses[output.index] or not _is_alone(captured, output.index):
            continue
        layer = graph.layer_of(names[output.index], True)
        large = layer is not None and graph.is_large(layer)
        if large:
            behind = graph.behind(layer["outputs"][0])
            large = any(loss and name in behind for loss, name in zip(losses, names))
        if large or place == named:
            dropped.add(output.index)
    if not dropped:
        return captured
    kept = [i for i in range(len(names)) if i not in dropped]
    position = {index: at for at, index in enumerate(kept)}
    graph.parsed["outputs"] = [names[i] for i in kept]
    return replace(
        captured,
        json=json.dumps(graph.parsed),
        outputs=[
            output if output.kind != "graph"
            else Output("constant", value=None) if output.index in dropped
            else replace(output, index=position[output.index])
            for output in captured.outputs
        ],
        output_types=[captured.output_types[i] for i in kept],
        depends=[captured.depends[i] for i in kept],
    )  # fmt: skip


def _logits_in(result: Any) -> Any:
    """Returns the entry "logits" of a mapping that has a loss too, else None."""
    if isinstance(result, Mapping) and result.get("loss") is not None:
        return result.get("logits")
    return None


def without_logits(result: Any) -> Any:
    """Returns a result of the original forward with None in place of the logits."""
    if _logits_in(result) is None:
        return result
    return type(result)(**{**result, "logits": None})


# ---- in a call ----------------------------------------------------------------------------------


class Layer:
    """The last linear layer in one call: its operands, and their versions at that time."""

    __slots__ = ("deferred", "hidden", "weight", "bias", "shape", "state")

    def __init__(
        self,
        deferred: Deferred,
        hidden: torch.Tensor,
        leaves: Sequence[torch.Tensor],
        shape: Sequence[int] | None,
    ) -> None:
        self.deferred, self.hidden = deferred, hidden
        self.weight = weight = leaves[deferred.weight]
        self.bias = None if deferred.bias is None else leaves[deferred.bias]
        if shape is None:
            shape = (*hidden.shape[:-1], weight.shape[1 if deferred.transposed else 0])
        self.shape = shape
        self.state = self._state()

    def _state(self) -> list[Any]:
        """Returns what changes if an operand does. Parameters may get other memory: model.to does that."""
        state: list[Any] = [_version(self.hidden)]
        for tensor in (self.weight, self.bias):
            if tensor is not None:
                state += _version(tensor), tensor.data_ptr()
        return state

    def check(self) -> None:
        """Raises an error if an operand is no longer what it was in forward."""
        if self.state != self._state():
            what = "input" if self.state[0] != _version(self.hidden) else "parameters"
            raise RuntimeError(
                f"logits of shape {list(self.shape)} are looked at for the first time, and the {what} of their linear "
                "layer (a weight of shape "
                f"{list(self.weight.shape)}) changed after the forward: look at the logits before optimizer.step() or any "
                "other change of the parameters, or use deepwell.optimize(model, logits=True)"
            )

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the weight, [V, H], and the bias in the input's type."""
        dtype = self.hidden.dtype
        weight = self.weight.detach().to(dtype)
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        return weight.t() if self.deferred.transposed else weight, bias

    def make(self) -> torch.Tensor:
        """Returns the logits, without autograd's graph."""
        self.check()
        with _plainly(self.hidden):
            made = functional.linear(self.hidden, *self._operands())
            return made.reshape(self.shape).to(self.deferred.dtype)

    def backward(
        self, grad: torch.Tensor, wrt: Sequence[int]
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Returns the gradients of the layer's input, None if no leaf in ``wrt`` reaches it, and of its parameters by
        leaf, from the gradient of the logits."""
        self.check()
        hidden, deferred = self.hidden, self.deferred
        with _plainly(hidden):
            weight, _ = self._operands()
            grad = grad.to(hidden.dtype).reshape(*hidden.shape[:-1], weight.shape[0])
            rows = grad.reshape(-1, grad.shape[-1])
            found: dict[int, torch.Tensor] = {}
            if deferred.weight in wrt:
                inputs = hidden.reshape(-1, hidden.shape[-1])
                product = inputs.t() @ rows if deferred.transposed else rows.t() @ inputs
                found[deferred.weight] = product.to(self.weight.dtype)
            if deferred.bias is not None and deferred.bias in wrt:
                found[deferred.bias] = rows.sum(0).to(self.bias.dtype)
            if deferred.reaches.isdisjoint(wrt):
                return None, found
            return grad @ weight, found


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def _plainly(hidden: torch.Tensor) -> Iterator[None]:
    """Inside the context there is no autograd, no autocast, and inference mode as when ``hidden`` was made."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(hidden.is_inference()))
        stack.enter_context(torch.no_grad())
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Cell:
    """The elements of logits, which several tensors may share, once they are made."""

    __slots__ = ("layer", "casts", "value")

    def __init__(
        self,
        layer: Layer | None,
        casts: tuple[torch.dtype, ...] = (),
        value: torch.Tensor | None = None,
    ) -> None:
        self.layer, self.casts, self.value = layer, casts, value

    def get(self) -> torch.Tensor:
        if self.value is None:
            value = self.layer.make()
            for dtype in self.casts:
                value = value.to(dtype)
            self.value, self.layer = value, None
        return self.value


_detach = torch.ops.aten.detach.default
_to_copy = torch.ops.aten._to_copy.default


class LazyLogits(torch.Tensor):
    """Logits whose elements are computed when an operation first reads them.

    Autograd treats it as any tensor: its ``grad_fn`` is the module's. The elements are made below autograd, where
    PyTorch hands operations to ``__torch_dispatch__``; all results are plain tensors. Shape, type, device, gradient
    and hooks need no elements, and neither do ``detach`` and a conversion to another type, which give lazy logits
    again. torch.compile does not trace the class: operations on lazy logits run outside of its graphs.
    """

    _cell: _Cell

    @staticmethod
    def __new__(cls, cell: _Cell, shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._cell = cell
        return made

    @classmethod
    def of(cls, layer: Layer) -> "LazyLogits":
        return cls(_Cell(layer), layer.shape, layer.deferred.dtype, layer.hidden.device)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _detach or func is _to_copy and set(kwargs) == {"dtype"}:
            given = args[0]
            cell = given._cell
            if cell.value is None:
                if func is _detach:
                    return cls(cell, given.shape, given.dtype, given.device)
                dtype = kwargs["dtype"]
                cell = _Cell(cell.layer, (*cell.casts, dtype))
                return cls(cell, given.shape, dtype, given.device)
        if torch.Tag.inplace_view in func.tags:
            raise RuntimeError(
                f"{func} would change the shape of logits in place: call the operation that returns a new tensor, or "
                "use deepwell.optimize(model, logits=True)"
            )
        lazy: dict[int, LazyLogits] = {}

        def made(tensor: LazyLogits) -> torch.Tensor:
            value = tensor._cell.get()
            lazy[id(value)] = tensor
            return value

        args, kwargs = pytree.tree_map_only(cls, made, (args, kwargs))
        result = func(*args, **kwargs)
        # An operation in place returns its operand.
        return pytree.tree_map_only(torch.Tensor, lambda x: lazy.get(id(x), x), result)

    # ---- uses of elements that are no operation -----------------------------------------------------

    def plain(self) -> torch.Tensor:
        """Returns the logits as a plain tensor of the same memory, with their gradient."""
        with torch.enable_grad():
            return self.view(self.shape)

    def numpy(self, *args, **kwargs):
        return self.plain().numpy(*args, **kwargs)

    def tolist(self):
        return self.plain().tolist()

    def data_ptr(self) -> int:
        return self._cell.get().data_ptr()

    def untyped_storage(self):
        return self._cell.get().untyped_storage()

    def _typed_storage(self):
        return self._cell.get()._typed_storage()

    def storage(self):
        return self._cell.get().storage()

    def is_shared(self) -> bool:
        return self._cell.get().is_shared()

    def share_memory_(self):
        self._cell.get().share_memory_()
        return self

    def __dlpack__(self, **kwargs):
        return self.plain().__dlpack__(**kwargs)

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol):
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        return self.plain().__repr__(tensor_contents=tensor_contents)
