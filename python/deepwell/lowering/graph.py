"""Lowers a traced fx graph of ATen operations into the builder, node by node."""

from __future__ import annotations

import copy
import operator
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from . import complex_numbers, regions
from .builder import DTYPES, FLOATS, Builder, LoweringError, Origin, Value
from .complex_numbers import Complex
from .copies import Copies
from .dims import NotPolynomial, Translator
from .table import Context, find, find_functional

# Operations that assert facts about a traced program and compute nothing.
_DROPPED = frozenset(
    (
        "_assert_tensor_metadata",
        "_assert_async",
        "_assert_scalar",
        "_functional_assert_async",
        "_functional_assert_scalar",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "_functional_sym_constrain_range",
        "record_stream",
    )
)
_DECOMPOSITION_DEPTH = 4


class OperationError(Exception):
    """An operation that cannot be lowered."""

    def __init__(self, operation: str, module_path: str, reason: str) -> None:
        super().__init__(reason)
        self.operation = operation
        self.module_path = module_path
        self.reason = reason


class MutationError(Exception):
    """A write with visible effects, which a graph of values cannot have. The message names what is written."""


class _Unknown:
    """A number that is not a polynomial of the symbols. It is reported if an operation uses it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


# By operation that returns a view of a part: the operation that replaces the part, and the names of its arguments
# behind the tensors.
_REPLACED_BY = {
    torch.ops.aten.slice.Tensor: (
        torch.ops.aten.slice_scatter.default, "dim", "start", "end", "step",
    ),
    torch.ops.aten.select.int: (torch.ops.aten.select_scatter.default, "dim", "index"),
}  # fmt: skip


class GraphLowering:
    """Lowers fx graphs that share one builder and one translation of symbolic sizes."""

    def __init__(
        self, builder: Builder, translator: Translator, copies: Optional[Copies] = None
    ) -> None:
        self.builder = builder
        self._translator = translator
        self._copies = copies
        self._context = Context(builder)
        self._origins: Dict[Tuple, Origin] = {}
        self._root_origin = Origin()
        self._grad_enabled = True
        # Whether PyTorch's autocast may have cast operands of an operation, which a trace does not show.
        self.autocast = False
        self._depth = 0
        # In-place writes. A Value stands for a tensor object; `_now` maps a tensor that was
        # written to its contents since then.
        self._now: Dict[int, Value] = {}
        self._base: Dict[int, Value] = {}  # by id of a view: the tensor that it views
        # By id of a slice, or of one index of an axis: the tensor of which it is a part (itself maybe a part), the operation
        # that replaces the part, and that operation's further arguments.
        self._parts: Dict[int, Tuple[Value, Any, Dict[str, Any]]] = {}
        self._stale: Dict[int, Value] = {}  # views of tensors that were written later
        self.written: List[Value] = []
        self.read: Dict[int, Value] = {}  # before any write
        self._complex_memory: Set[int] = (
            set()
        )  # ids of real tensors that share memory with complex ones
        self._writes = False
        self._kept: List[Value] = []  # keeps tensors alive, so that ids stay unique

    def run(self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """`inputs` are the values of the placeholders. Returns the value of the output node."""
        env: Dict[torch.fx.Node, Any] = {}
        supplied = iter(inputs)
        if not self._writes:
            self._writes = any(
                writes_to_operand(n.target) for m in _nested(graph_module) for n in m.graph.nodes
            )
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(supplied)
            elif node.op == "output":
                return self._map(node.args[0], env)
            else:
                env[node] = self.node(node, env)
        return None

    def node(self, node: torch.fx.Node, env: Dict[torch.fx.Node, Any]) -> Any:
        """Returns the value of one node that is neither a placeholder nor an output."""
        if node.op == "get_attr":
            return self._attribute(node.graph.owning_module, node)
        if node.op == "call_function":
            return self._call(node, env)
        raise LoweringError(f"fx node {node.op} {node.target}")

    # ---- operands -------------------------------------------------------------------------------

    def _attribute(self, graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
        found: Any = graph_module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return self.constant_tensor(found) if isinstance(found, torch.Tensor) else found

    def constant_tensor(self, tensor: torch.Tensor) -> Value:
        """Returns a tensor that the program holds as a constant, which must be one repeated number."""
        dtype = DTYPES.get(tensor.dtype)
        if dtype is not None and tensor.numel() == 0:
            return self.builder.constant(dtype, tuple(tensor.shape), 0)
        if dtype is None or tensor.is_meta or isinstance(tensor, FakeTensor):
            raise LoweringError(
                f"a constant of {tensor.dtype} on {tensor.device} inside the forward"
            )
        first = tensor.flatten()[0].item()
        if tensor.numel() > 1 and not bool((tensor == first).all()):
            raise NotUniform(tensor)
        return self.builder.constant(dtype, tuple(tensor.shape), first)

    def _map(self, argument: Any, env: Mapping[torch.fx.Node, Any]) -> Any:
        if isinstance(argument, torch.fx.Node):
            found = env[argument]
            if isinstance(found, _Unknown):
                raise found.error
            return self._current(found) if self._writes else found
        if isinstance(argument, (list, tuple)):
            return [self._map(a, env) for a in argument]
        if isinstance(argument, dict):
            return {key: self._map(a, env) for key, a in argument.items()}
        if isinstance(argument, torch.SymInt):
            return self._translator.dim(argument)
        return argument

    # ---- nodes ----------------------------------------------------------------------------------

    def _call(self, node: torch.fx.Node, env: Dict[torch.fx.Node, Any]) -> Any:
        target = node.target
        if self._copies is not None and self._copies.concerns(target):
            return self._copies.lower(node, env, self)
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._number(node, value)
        if target is operator.getitem:
            return self._map(node.args[0], env)[node.args[1]]
        if target is torch.amp.autocast_mode._enter_autocast:
            self.autocast = True
            return None
        if target is torch._C._set_grad_enabled:
            self._grad_enabled = bool(node.args[0])
            return None
        origin = self._origin(node)
        name = _name(target)
        if regions.is_loss(name):
            origin = Origin("loss", origin.layer, origin.module)
        self.builder.origin = origin
        try:
            return self._result(node, target, name, env)
        except LoweringError as error:
            raise OperationError(_display(target), origin.module, str(error)) from error

    def _result(
        self, node: torch.fx.Node, target: Any, name: str, env: Dict[torch.fx.Node, Any]
    ) -> Any:
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(node, name, env)
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(value := node.meta.get("val"), (bool, int, float)):
                return value
            return _Unknown(NotPolynomial(f"{name} in the traced program"))
        if target._opname in _DROPPED:
            return None
        if writes_to_operand(target):
            return self._write(node, target, env)
        lower = find(target)
        args, kwargs = self._map(node.args, env), self._map(node.kwargs, env)
        self._describe_results(node.meta.get("val"))
        if complex_numbers.concerns(args, kwargs, node.meta.get("val")):
            return self._complex(target, args, kwargs)
        if lower is None:
            result = self._decompose(node, target, args, kwargs)
        else:
            kwargs = {key: v for key, v in kwargs.items() if key not in _PLACEMENT}
            if target._opname in _OVERWRITES and not all(map(_puts_back, node.users)):
                self._check_overwritten(args[0])
            result = self._lowered(lower, args, kwargs)
            self._check(result, node)
        if not self._grad_enabled:
            result = self._without_gradient(result)
        return self._note_views(target, args, kwargs, result) if self._writes else result

    def _complex(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Lowers an operation on complex tensors. Their memory, and real tensors that share it, may not be written."""
        kwargs = {key: v for key, v in kwargs.items() if key not in _PLACEMENT}
        result = complex_numbers.lower(self._context, target, args, kwargs)
        if not self._grad_enabled:
            result = self._without_gradient(result)
        if not self._writes:
            return result
        if isinstance(result, Value):
            result = copy.copy(result)
        for value in (*args, result):
            if isinstance(value, Value):
                self._kept.append(value)
                self._complex_memory.add(id(self._base.get(id(value), value)))
        return result

    def _lowered(self, lower: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Lowers one operation. Under autocast the trace has the operation before the casts of its operands, and the
        element type of its result shows to which type they were cast."""
        wanted = next((t for t in self._context.result_dtypes if t is not None), None)
        if not self.autocast or wanted not in FLOATS:
            return lower(self._context, *args, **kwargs)
        cast_args, cast_kwargs = self._cast(args, wanted), self._cast(kwargs, wanted)
        try:
            result = lower(self._context, *args, **kwargs)
        except LoweringError:
            return lower(self._context, *cast_args, **cast_kwargs)
        first = next((v for v in _listed(result) if isinstance(v, Value)), None)
        if first is None or first.dtype == wanted:
            return result
        return lower(self._context, *cast_args, **cast_kwargs)

    def _cast(self, operand: Any, dtype: str) -> Any:
        """Returns an operand, or all operands in it, with floating-point tensors in this type."""
        if isinstance(operand, (list, tuple)):
            return [self._cast(o, dtype) for o in operand]
        if isinstance(operand, dict):
            return {key: self._cast(o, dtype) for key, o in operand.items()}
        if isinstance(operand, Value) and operand.dtype in FLOATS:
            return self.builder.cast(operand, dtype)
        return operand

    def _number(self, node: torch.fx.Node, value: Any) -> Any:
        """Returns a Python number that the program computes from sizes, or else from tensors' elements."""
        if _name(node.target) in ("item", "_local_scalar_dense"):
            return _Unknown(
                OperationError(
                    _display(node.target),
                    self._origin(node).module,
                    "a tensor's element becomes a Python number, which may differ at each call",
                )
            )
        try:
            return self._translator.dim(value)
        except NotPolynomial as error:
            return _Unknown(error)

    def _origin(self, node: torch.fx.Node) -> Origin:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return self._root_origin
        origin = regions.origin_of(stack, self._origins)
        moved = self._copies.moved if self._copies is not None else None
        return regions.moved(origin, *moved) if moved is not None else origin

    def _describe_results(self, value: Any) -> None:
        values = value if isinstance(value, (list, tuple)) else (value,)
        dtypes: List[Optional[str]] = []
        shapes: List[Any] = []
        for v in values:
            tensor = isinstance(v, torch.Tensor)
            dtypes.append(DTYPES.get(v.dtype) if tensor else None)
            shapes.append(self._shape(v) if tensor else None)
        self._context.result_dtypes, self._context.result_shapes = tuple(dtypes), tuple(shapes)

    def _shape(self, tensor: torch.Tensor) -> Any:
        try:
            return self._translator.shape(tensor.shape)
        except NotPolynomial:
            return None

    def _check(self, result: Any, node: torch.fx.Node) -> None:
        """Checks that the result has the shape and dtype that PyTorch gives for the node."""
        results = _listed(result)
        context = self._context
        for value, dtype, shape in zip(results, context.result_dtypes, context.result_shapes):
            if not isinstance(value, Value):
                continue
            if dtype is None:
                raise LoweringError(f"dtype {node.meta['val'].dtype} is not supported")
            if value.dtype != dtype or (shape is not None and value.shape != shape):
                raise LoweringError(
                    f"shapes do not follow from symbolic sizes: {value.dtype}{list(value.shape)} "
                    f"here, {dtype}{list(shape or ())} in PyTorch"
                )

    def _without_gradient(self, result: Any) -> Any:
        if isinstance(result, Value):
            return self.builder.stop_gradient(result)
        if isinstance(result, Complex):
            return complex_numbers.map_parts(self._context, self.builder.stop_gradient, result)
        if isinstance(result, (list, tuple)):
            return [self._without_gradient(r) for r in result]
        return result

    # ---- writes in place ------------------------------------------------------------------------

    def _current(self, found: Any) -> Any:
        """Returns the current contents of a tensor."""
        if isinstance(found, (list, tuple)):
            return [self._current(f) for f in found]
        if not isinstance(found, Value):
            return found
        if id(found) not in self._now:
            self.read[id(found)] = found
        while id(found) in self._now:
            found = self._now[id(found)]
        if id(found) in self._stale:
            raise MutationError(f"a view of '{found.name}'")
        return found

    def _note_views(self, target: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Records which results share memory with which operands. A copy becomes a separate tensor, and so does a
        creation: two calls of `zeros` are two tensors, though one constant of the graph."""
        operand = next((a for a in args if isinstance(a, Value)), None)
        returns = target._schema.returns
        aliases = bool(returns) and returns[0].alias_info is not None
        view = operand is not None and (aliases or target._opname == "dropout")

        def note(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [note(v) for v in value]
            if not isinstance(value, Value):
                return value
            value = copy.copy(value)
            if view:
                self._base[id(value)] = self._base.get(id(operand), operand)
                replaceable = id(operand) not in self._base or id(operand) in self._parts
                if target in _REPLACED_BY and replaceable:
                    replace, *names = _REPLACED_BY[target]
                    place = dict(zip(names, args[1:]))
                    self._parts[id(value)] = operand, replace, {**place, **kwargs}
            self._kept.append(value)
            return value

        return note(result)

    def _write(self, node: torch.fx.Node, target: Any, env: Dict[torch.fx.Node, Any]) -> Value:
        """Lowers `x.f_(...)` as x = x.f(...). If x is a part of y, y becomes y with that part replaced. Other tensors that
        share the memory must not be read afterwards."""
        operand = node.args[0] if node.args else None
        lower = find_functional(target)
        if lower is None or not isinstance(operand, torch.fx.Node):
            raise MutationError(_display(target))
        tensor = env[operand]
        if isinstance(tensor, Complex):
            raise MutationError("a complex tensor")
        unread = target._opname in ("copy_", "zero_", "fill_") and id(tensor) not in self.read
        args, kwargs = self._map(node.args, env), self._map(node.kwargs, env)
        if unread:
            self.read.pop(id(tensor), None)
        old = args[0]
        base = self._base.get(id(old))
        if base is not None and id(old) not in self._parts:
            raise MutationError(f"{_display(target)} on a view")
        self._describe_results(node.meta.get("val"))
        new = self.builder.cast(lower(self._context, *args, **kwargs), old.dtype)
        new = copy.copy(self.builder.broadcast(new, old.shape))
        whole = old if base is None else base
        if id(whole) in self._complex_memory:
            raise MutationError("the memory of a complex tensor")
        if whole is old and target._opname.removesuffix("_") in _OVERWRITES:
            self._check_overwritten(old)
        if not self._grad_enabled:
            if whole.differentiable:
                # PyTorch's gradient is then that of the tensor before the write.
                raise NoLowering("it writes under torch.no_grad() to a tensor that has a gradient")
            new = copy.copy(self._without_gradient(new))
        self._replace(whole, old, new)
        self.written.append(tensor if base is None else base)
        return new

    def _check_overwritten(self, old: Value) -> None:
        """Refuses a gradient that PyTorch would define as zeros: that of a tensor's earlier contents, overwritten
        whole."""
        if self._grad_enabled and old.differentiable:
            raise NoLowering("it overwrites the whole of a tensor that has a gradient")

    def _replace(self, base: Value, part: Value, new: Value) -> None:
        """Sets `part`, which is `base` or a part of it, to `new`."""
        for identity, other in self._base.items():
            if other is base:
                self._stale[identity] = base
        parts = []
        while True:
            self._now[id(part)] = new
            self._kept += [part, new]
            if part is base:
                break
            part, replace, place = self._parts[id(part)]
            whole = copy.copy(find(replace)(self._context, part, new, **place))
            self._parts[id(new)] = whole, replace, place
            parts.append(new)
            new = whole
        self._base.update((id(value), new) for value in parts)

    # ---- nested graphs --------------------------------------------------------------------------

    def _higher_order(self, node: torch.fx.Node, name: str, env: Dict[torch.fx.Node, Any]) -> Any:
        # The nested graph reads the operands themselves and may write to them.
        operands = [env[a] if isinstance(a, torch.fx.Node) else a for a in node.args]
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inputs = operands
        elif name == "wrap_with_autocast":
            _device, _dtype, autocast, _cache, body, *inputs = operands
            enabled = self._grad_enabled
            self.autocast = self.autocast or bool(autocast)
        else:
            raise LoweringError("this kind of nested program is not supported")
        outer, self._grad_enabled = self._grad_enabled, bool(enabled)
        try:
            return self.run(body, inputs)
        finally:
            self._grad_enabled = outer

    def _decompose(self, node: torch.fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        """Traces one operation into simpler ones, by PyTorch's own decompositions."""
        if self._depth >= _DECOMPOSITION_DEPTH:
            raise NoLowering("no decomposition into supported operations exists")
        examples, spec = pytree.tree_flatten((node.args, node.kwargs))
        samples = [e.meta.get("val") if isinstance(e, torch.fx.Node) else e for e in examples]
        at = [i for i, s in enumerate(samples) if isinstance(s, torch.Tensor)]

        def call(*tensors: torch.Tensor) -> Any:
            leaves = list(samples)
            for i, tensor in zip(at, tensors):
                leaves[i] = tensor
            call_args, call_kwargs = pytree.tree_unflatten(leaves, spec)
            return target(*call_args, **call_kwargs)

        traced = _trace_pieces(call, [samples[i] for i in at], target)
        if traced is None:
            raise NoLowering("no lowering and no decomposition into supported operations exists")
        flat, _ = pytree.tree_flatten((args, kwargs))
        outer, self._root_origin = self._root_origin, self.builder.origin
        self._depth += 1
        try:
            return self.run(traced, [flat[i] for i in at])
        finally:
            self._depth -= 1
            self._root_origin = outer


def _listed(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (list, tuple)) else (result,)


class NoLowering(LoweringError):
    """An operation without a lowering for any operands."""


class NotUniform(LoweringError):
    """A constant tensor that needs a leaf of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(f"a constant tensor of shape {list(tensor.shape)} inside the forward")
        self.tensor = tensor


# Operations whose result does not depend on their first operand.
_OVERWRITES = frozenset(("copy", "fill", "zero"))


def _puts_back(user: torch.fx.Node) -> bool:
    """Returns whether `user` writes its operand, a slice, back into the tensor that it was taken from."""
    return _name(user.target).endswith("_scatter")


_PLACEMENT = frozenset(("device", "layout", "pin_memory", "memory_format", "requires_grad"))


def _trace_pieces(
    call: Callable[..., Any], samples: List[torch.Tensor], target: Any
) -> Optional[torch.fx.GraphModule]:
    mode = next((m for m in (getattr(s, "fake_mode", None) for s in samples) if m), None)
    table = {**core_aten_decompositions(), **get_decompositions([target])}
    try:
        if mode is None:
            traced = make_fx(call, decomposition_table=table, tracing_mode="fake")(*samples)
        else:
            with mode:
                traced = make_fx(call, decomposition_table=table)(*samples)
    except Exception:  # if tracing fails in any way, the operation has no decomposition here
        return None
    nodes = [n for n in traced.graph.nodes if n.op == "call_function"]
    return None if [n.target for n in nodes] == [target] else traced


def _nested(graph_module: torch.fx.GraphModule) -> List[torch.fx.GraphModule]:
    return [m for m in graph_module.modules() if isinstance(m, torch.fx.GraphModule)]


def writes_to_operand(target: Any) -> bool:
    """Returns whether the operation changes a tensor's elements. `detach_` changes no element."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target._schema.is_mutable
        and target._opname != "detach_"
    )


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._opname
    return getattr(target, "__name__", str(target))


def _display(target: Any) -> str:
    """ "aten.add.Tensor" """
    return str(target) if isinstance(target, torch._ops.OpOverload) else _name(target)
