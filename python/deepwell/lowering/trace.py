"""Traces a module's forward as an fx graph of ATen operations, by torch.export or by make_fx."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Sequence, Tuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx as trace_function
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree

from deepwell import routing
from deepwell.caches import flatten_outputs

from .builder import LoweringError
from .graph import MutationError
from .quiet import no_stderr


@dataclass
class Traced:
    """A traced forward, and what its placeholders and outputs stand for."""

    graph_module: torch.fx.GraphModule
    inputs: List[Tuple[str, Any]]  # (kind, target): as Leaf's; constant: (kind, tensor or value)
    output_spec: Any
    method: str
    functional: Optional[Callable[[], "Traced"]] = None  # the same, with no operation in place


_WRAPPER = "module"  # where _Call keeps the module: the first part of every dotted name in a trace


def _without_wrapper(name: str) -> str:
    return name[len(_WRAPPER) + 1 :] if name.startswith(_WRAPPER + ".") else name


class _Call(torch.nn.Module):
    """The module as a function from tensors to the flat list of its outputs.

    Tracers see no keyword arguments, containers or constants; this class fixes all of them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        leaves: Sequence[Any],
        at: Sequence[int],
        same: Sequence[int],
        spec: Any,
        around: Callable[[], ContextManager[None]],
    ) -> None:
        super().__init__()
        self.module = module
        results: List[Any] = []

        def call(tensors: Sequence[torch.Tensor]) -> List[Any]:
            values = list(leaves)
            given = dict(zip(at, tensors))
            for position in at:
                values[position] = given[same[position]]
            args, kwargs = pytree.tree_unflatten(values, spec)
            with around(), routing.collecting() as collected:
                returned = module(*args, **kwargs)
            outputs, output_spec = flatten_outputs(
                routing.with_records(module, returned, collected)
            )
            results.append(output_spec)
            return outputs

        self._call = call
        self.output_spec = lambda: results[-1]

    def release(self) -> None:
        """Drops the module, because tracers leave cycles that would keep it alive."""
        self._modules.clear()
        self._call = None

    def forward(self, *tensors: torch.Tensor) -> List[Any]:
        return self._call(tensors)


# Which axes of the arguments get symbolic sizes. Some operations need a fixed number of features, which only the
# arguments may fix. Therefore all axes are tried first, then all but the last axis of floating-point arguments.
ALL, LEADING, NONE = "all", "leading", "none"


def _varying(example: torch.Tensor, axes: str) -> range:
    if axes == NONE:
        return range(0)
    fixed = axes == LEADING and example.dtype.is_floating_point and example.dim() > 1
    return range(example.dim() - (1 if fixed else 0))


def _symbolic(mode: FakeTensorMode, example: torch.Tensor, axes: range) -> torch.Tensor:
    sizes = [DimDynamic.DYNAMIC if a in axes else DimDynamic.STATIC for a in range(example.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(example, symbolic_context=context)


class Tracer:
    """Traces `module` called with `leaves` (empty tensors, constants) in the structure `spec`."""

    def __init__(
        self,
        module: torch.nn.Module,
        leaves: Sequence[Any],
        spec: Any,
        paths: Sequence[str],
        same: Sequence[int],
        around: Callable[[], ContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`same` has for each leaf the position of the first leaf that is the same object. The forward runs in the
        context that `around` returns."""
        self.module = module
        self.same = same
        self.around = around
        self.placeholders = leaves
        self.spec = spec
        self.paths = paths
        self._calls: List[_Call] = []

    def _call(self) -> Tuple["_Call", List[torch.Tensor]]:
        """Returns the module as a function of its tensor arguments, and examples of these. The examples are
        distinct objects, because torch.export merges inputs that are the same object."""
        at = self._tensor_positions()
        call = _Call(self.module, self.placeholders, at, self.same, self.spec, self.around)
        self._calls.append(call)
        return call, [placeholder(self.placeholders[i], False) for i in at]

    def close(self) -> None:
        """Drops the module after tracing."""
        for call in self._calls:
            call.release()
        self.module = self.around = None

    def _tensor_positions(self) -> List[int]:
        return [i for i, v in enumerate(self.placeholders) if isinstance(v, torch.Tensor)]

    def export(self, axes: str) -> Traced:
        call, examples = self._call()
        shapes = None
        if axes != NONE:
            auto = torch.export.Dim.AUTO
            shapes = {"tensors": tuple({a: auto for a in _varying(e, axes)} for e in examples)}
        with no_stderr():  # a failure prints its partial graph there
            program = torch.export.export(
                call, tuple(examples), dynamic_shapes=shapes, strict=False
            )
        output_spec = call.output_spec()
        traced = self._from_program(program, output_spec)
        if not _stops_gradients(traced):  # the effect of torch.no_grad() would be lost
            traced.functional = lambda: self._from_program(
                program.run_decompositions({}), output_spec
            )
        return traced

    def _from_program(self, program: Any, output_spec: Any) -> Traced:
        signature = program.graph_signature
        for name in ("buffers_to_mutate", "parameters_to_mutate", "user_inputs_to_mutate"):
            changed = getattr(signature, name, None)
            if changed:
                raise MutationError(self._written_name(next(iter(changed.values()))))
        positions = iter(self._tensor_positions())
        inputs: List[Tuple[str, Any]] = []
        for spec in signature.input_specs:
            kind = spec.kind.name
            if kind == "PARAMETER":
                inputs.append(("parameter", _without_wrapper(spec.target)))
            elif kind == "BUFFER":
                inputs.append(("buffer", _without_wrapper(spec.target)))
            elif kind == "CONSTANT_TENSOR":
                inputs.append(("constant", program.constants[spec.target]))
            elif kind == "USER_INPUT":
                inputs.append(("input", next(positions)))
            else:
                raise LoweringError(f"an input of kind {kind}")
        return Traced(program.graph_module, inputs, output_spec, "export")

    def _written_name(self, name: str) -> str:
        """Returns the user's name for a name in the traced program."""
        prefix, _, number = name.rpartition("_")
        if prefix == "tensors" and number.isdigit():
            return f"the argument {self.paths[self._tensor_positions()[int(number)]]}"
        return f"'{_without_wrapper(name)}'"

    def make_fx(self, axes: str) -> Traced:
        """Traces a function whose last arguments are the parameters and buffers."""
        call, examples = self._call()
        state = {f"{_WRAPPER}.{n}": t for n, t in self.module.named_parameters()}
        state.update((f"{_WRAPPER}.{n}", t) for n, t in self.module.named_buffers())

        def forward(*tensors: torch.Tensor) -> Any:
            held = dict(zip(state, tensors[len(examples) :]))
            return torch.func.functional_call(call, held, tensors[: len(examples)])

        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        fakes = [_symbolic(mode, e, _varying(e, axes)) for e in examples]
        fakes += [mode.from_tensor(t.detach(), static_shapes=True) for t in state.values()]
        with mode, _module_paths(self.module):
            traced = trace_function(forward, pre_dispatch=True)(*fakes)
        inputs: List[Tuple[str, Any]] = [("input", i) for i in self._tensor_positions()]
        parameters = dict(self.module.named_parameters())
        for name in map(_without_wrapper, state):
            inputs.append(("parameter" if name in parameters else "buffer", name))
        return Traced(traced, inputs, call.output_spec(), "make_fx")


def _stops_gradients(traced: Traced) -> bool:
    """Returns whether a part under torch.no_grad() reads a tensor that has a gradient."""
    nodes = list(traced.graph_module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    carrying = {
        n for n, (kind, _) in zip(placeholders, traced.inputs) if kind in ("parameter", "input")
    }
    for node in nodes:
        if not any(_is_floating(n) and n in carrying for n in node.all_input_nodes):
            continue
        if getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
            if not node.args[0]:
                return True
        elif getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            written = node.args[0]
            while isinstance(written, torch.fx.Node) and written not in carrying:
                carrying.add(written)  # and the tensor that it views
                written = written.args[0] if written.args else None
        carrying.add(node)
    return False


def _is_floating(node: torch.fx.Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in leaves)


def placeholder(tensor: torch.Tensor, on_meta: bool) -> torch.Tensor:
    """Returns an empty tensor like `tensor`."""
    device = tensor.device
    if on_meta:
        device = torch.device("meta")
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad and tensor.dtype.is_floating_point)


@contextlib.contextmanager
def _module_paths(module: torch.nn.Module) -> Iterator[None]:
    """Writes the calling modules into the nodes that make_fx records, as torch.export does."""
    from torch.fx import traceback as fx_traceback

    names = {id(m): name for name, m in module.named_modules()}
    stack: List[torch.nn.Module] = []
    tracing = threading.get_ident()

    def describe() -> None:
        entries = {names.get(id(m), ""): (names.get(id(m), ""), type(m)) for m in stack}
        fx_traceback.current_meta["nn_module_stack"] = entries

    def enter(m: torch.nn.Module, _inputs: Any) -> None:
        if threading.get_ident() != tracing:
            return
        stack.append(m)
        describe()

    def leave(m: torch.nn.Module, _inputs: Any, _result: Any) -> None:
        if threading.get_ident() != tracing:
            return
        if stack and stack[-1] is m:
            stack.pop()
        describe()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        with fx_traceback.preserve_node_meta():
            yield
    finally:
        for hook in hooks:
            hook.remove()
