"""Captures a PyTorch module and the arguments of one call as a Deepwell graph.

torch.export traces the forward with symbolic sizes. Nothing is computed, so modules on the meta device and modules made
of fake tensors are traced as well. If that fails, make_fx traces it, and then both are tried with fixed sizes. The
traced ATen operations are lowered (deepwell.lowering) to the graph's JSON.

The module does not change: parameters, gradients, buffers, flags and random states stay as they are.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Tuple

import sympy
import torch
from torch.utils import _pytree as pytree

from deepwell import routing
from deepwell.caches import is_cache
from deepwell.contents import Reads
from deepwell.errors import CaptureError
from deepwell.guards import HOOKS, Effects, named_tensors
from deepwell.lowering import Builder, LoweringError, Translator, Value, dims
from deepwell.lowering.aliases import Sharing, sharing
from deepwell.lowering.builder import DTYPES, FLOATS
from deepwell.lowering.complex_numbers import Complex
from deepwell.lowering.copies import Copies
from deepwell.lowering.dims import Dim
from deepwell.lowering.expert_loops import replace_loops
from deepwell.lowering.forget import forget_results
from deepwell.lowering.graph import (
    GraphLowering,
    MutationError,
    NoLowering,
    NotUniform,
    OperationError,
)
from deepwell.lowering.quiet import (
    batched_experts,
    no_fake_cache,
    quiet_tracing,
    settled_rope,
    unchanged,
    watched_autograd,
    watched_encoder,
)
from deepwell.lowering.repeat import NotRepeatable, Repeats
from deepwell.lowering.symbols import Symbols
from deepwell.lowering.trace import ALL, LEADING, NONE, Traced, Tracer, placeholder
from deepwell.observe import Recorder
from deepwell.standin import Strayed, bound_to, stand_in

__all__ = ["Captured", "CaptureError", "Guards", "Leaf", "capture_graph"]

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


_AS_IT_IS = object()

# ---- the result of a capture --------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """The source of the tensor for one leaf of the graph, in the order of the graph's leaves."""

    name: str
    kind: str  # parameter, buffer, input, constant, seed
    target: str = ""  # parameter, buffer: dotted name in the module; input: its key path
    position: int = -1  # input: index among the flattened (args, kwargs)
    value: Optional[torch.Tensor] = None  # constant: the tensor itself


@dataclass(frozen=True)
class Output:
    """The source of one flat output of the module."""

    kind: str  # graph, input, parameter, buffer, size, constant, view
    # graph: which output; input: position among the flattened (args, kwargs); view: position among the outputs
    index: int = -1
    target: str = ""  # parameter, buffer: dotted name in the module
    value: Any = (
        None  # constant: the object; size: the dimension; view: how it views output `index`
    )
    copied: bool = False  # a tensor of its own, apart from its source


@dataclass(frozen=True)
class Guards:
    """The assumptions of the capture. The graph is the module's forward while these hold.

    `arguments` has one entry per leaf of the flattened (args, kwargs): ("tensor", dtype, shape) with dimensions over
    the symbols, or ("value", v). `training` has one flag per module of `module.modules()`. `grad_enabled` is None if
    the grad mode makes no difference.
    """

    structure: Any
    arguments: Tuple[Tuple[Any, ...], ...]
    training: Tuple[bool, ...]
    grad_enabled: Optional[bool]
    relations: Tuple[sympy.Expr, ...]  # over the symbols, by name; all must be true
    plain_layout: bool = (
        False  # True: the arguments must be contiguous, because the forward queries their layout
    )

    def sizes_hold(self, names: Sequence[str], sizes: Sequence[int]) -> bool:
        """Returns whether the graph is valid at these sizes of the symbols. It never is for sizes 0 and 1,
        because PyTorch treats such axes differently; each of them has its own capture."""
        if any(size < 2 for size in sizes):
            return False
        if not self.relations:
            return True
        values = {sympy.Symbol(n, integer=True, positive=True): s for n, s in zip(names, sizes)}
        return all(relation.subs(values) == sympy.true for relation in self.relations)


@dataclass
class Captured:
    json: str
    leaves: List[Leaf]
    symbols: List[Tuple[str, str, int]]  # (name, name of an input leaf, axis)
    output_spec: Any  # pytree of the module's result
    outputs: List[Output]
    guards: Guards
    symbol_sources: List[Tuple[int, int]] = field(default_factory=list)  # (input position, axis)
    method: str = "export"  # how the forward was traced: export or make_fx
    dynamic: bool = True  # False: captured for fixed sizes
    # For each output of the graph, the leaves (by position) by which it can be differentiated.
    depends: List[FrozenSet[int]] = field(default_factory=list)
    # For each output of the graph, its element type and shape.
    output_types: List[Tuple[str, Tuple[Dim, ...]]] = field(default_factory=list)
    # Tensors that the forward reads and whose values became part of the graph, with their versions.
    folded: List[Tuple[torch.Tensor, int]] = field(default_factory=list)
    copied_layers: int = 0  # layers that were not traced but copied from an equal one
    reads: Reads = field(
        default_factory=Reads
    )  # globals and attributes that the forward's code names
    codes: Dict[Any, str] = field(
        default_factory=dict
    )  # the user's code objects that ran, and their names
    _module: Any = None  # weak reference, for parameters that are returned as they are

    @property
    def training_flags(self) -> Tuple[bool, ...]:
        return self.guards.training

    def inside(self, path: str) -> Captured:
        """Returns the capture with the names that its modules have in a model in which it is the module ``path``."""
        if not path:
            return self
        graph = json.loads(self.json)
        for node in graph["nodes"]:
            node["module"] = ".".join(filter(None, (path, node.get("module"))))
        return replace(self, json=json.dumps(graph))

    def accepts_sizes(self, sizes: Sequence[int]) -> bool:
        return self.guards.sizes_hold([name for name, _, _ in self.symbols], sizes)

    def rebuild_outputs(self, results: Sequence[torch.Tensor], flat: Sequence[Any]) -> Any:
        """Returns the module's result from the graph's outputs and the flattened (args, kwargs)."""
        values = [self._output(output, results, flat) for output in self.outputs]
        for position, output in enumerate(self.outputs):
            if output.copied:
                values[position] = values[position].clone()
            elif output.kind == "view":
                values[position] = output.value.of(values[output.index], self._sizes(flat))
        return routing.delivered(self._module(), pytree.tree_unflatten(values, self.output_spec))

    def _sizes(self, flat: Sequence[Any]) -> Dict[str, int]:
        """Returns the sizes of the symbols in a call."""
        return {
            name: flat[position].shape[axis]
            for (name, _, _), (position, axis) in zip(self.symbols, self.symbol_sources)
        }

    def _output(self, output: Output, results: Sequence[torch.Tensor], flat: Sequence[Any]) -> Any:
        if output.kind == "graph":
            return results[output.index]
        if output.kind == "input":
            return flat[output.index]
        if output.kind == "parameter":
            return self._module().get_parameter(output.target)
        if output.kind == "buffer":
            return self._module().get_buffer(output.target)
        if output.kind == "size":
            return dims.evaluate(output.value, self._sizes(flat))
        return output.value


# ---- capturing ----------------------------------------------------------------------------------


def capture_graph(
    module: torch.nn.Module,
    args: Tuple[Any, ...] = (),
    kwargs: Optional[Dict[str, Any]] = None,
    *,
    dynamic: bool = True,
    repeat: bool = False,
    without_hooks: bool = False,
    forward: Any = _AS_IT_IS,
) -> Captured:
    """Captures `module(*args, **kwargs)` as a graph.

    Args:
        args, kwargs: arguments of one call. Only shape, dtype and device of tensors matter, so they may be fake or on
            the meta device. Other arguments become part of the graph. Under torch.autocast the graph casts where
            autocast does.
        dynamic: sizes of input axes other than 0 and 1 become symbols if the forward allows it.
        repeat: equal layers are traced twice and copied (lowering/repeat.py), or all traced if that fails.
        without_hooks: the hooks of the module itself are not part of the graph.
        forward: traced in place of the module's attribute ``forward``, which may be wrapped; None means its class's.

    Raises:
        CaptureError: names the operation and the module that cannot be captured, and what to do.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    traced = stand_in(module)
    if traced is not None and forward is not _AS_IT_IS:
        traced.__dict__.pop("forward", None)
        if forward is not None:
            traced.__dict__["forward"] = bound_to(forward, module, traced)
    with batched_experts(module):
        if traced is not None:
            with contextlib.suppress(Strayed):
                return _capture(module, traced, args, kwargs, dynamic, repeat, without_hooks)
        return _capture(module, module, args, kwargs, dynamic, repeat, without_hooks)


def _capture(
    module: torch.nn.Module,
    traced: torch.nn.Module,
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    dynamic: bool,
    repeat: bool,
    without_hooks: bool,
) -> Captured:
    with _hooks_away(traced) if without_hooks else contextlib.nullcontext():
        if repeat and Repeats(traced).possible:
            with contextlib.suppress(CaptureError):
                return _Capture(module, traced, args, kwargs, True).run(dynamic)
        return _Capture(module, traced, args, kwargs, False).run(dynamic)


@contextlib.contextmanager
def _hooks_away(module: torch.nn.Module) -> Iterator[None]:
    attributes = module.__dict__
    kept = {name: attributes[name] for name in HOOKS if attributes[name]}
    try:
        attributes.update({name: OrderedDict() for name in kept})
        yield
    finally:
        attributes.update(kept)


def _is_final(error: Exception) -> bool:
    """Returns whether no other way of tracing can help."""
    if isinstance(error, OperationError):
        return isinstance(error.__cause__, NoLowering)
    return type(error).__name__ == "GuardOnDataDependentSymNode"


def _without_frames(error: BaseException) -> Any:
    """Returns the error without tracebacks, which would keep alive the module, among others."""
    for part in (error, error.__cause__, error.__context__):
        if part is not None:
            part.__traceback__ = None
    return error


class _Capture:
    def __init__(
        self,
        module: torch.nn.Module,
        traced: torch.nn.Module,
        args: Tuple[Any, ...],
        kwargs: Dict[str, Any],
        repeat: bool,
    ) -> None:
        self.users = module
        self.module = traced  # the module itself, or its stand-in
        self._repeat = repeat
        _check_arguments(module, args, kwargs)
        self._positions_given = self._names_positions(args, kwargs)
        paths, self.spec = pytree.tree_flatten_with_path((args, kwargs))
        self.flat = [leaf for _, leaf in paths]
        self.paths = [pytree.keystr(path) for path, _ in paths]
        for path, value in zip(self.paths, self.flat):
            _check_argument(path, value)
        on_meta = any(p.is_meta for p in module.parameters())
        self.placeholders = [
            placeholder(v, on_meta) if isinstance(v, torch.Tensor) else v for v in self.flat
        ]

    def run(self, dynamic: bool) -> Captured:
        grad_enabled = torch.is_grad_enabled()
        captured, recorder, observed = self._trace(dynamic, True)
        if recorder.asks_grad_mode:
            if not grad_enabled:
                captured, recorder, observed = self._trace(dynamic, False)
            captured.guards = _with(captured.guards, grad_enabled=grad_enabled)
        if recorder.asks_layout:
            captured.guards = _with(captured.guards, plain_layout=True)
        captured.reads, captured.codes = recorder.reads, recorder.codes
        if observed.refusal is not None:
            raise observed.refusal
        sizes = [self.placeholders[i].shape[axis] for i, axis in captured.symbol_sources]
        if not captured.accepts_sizes(sizes):
            raise CaptureError(
                f"{type(self.module).__name__} was traced under assumptions about sizes that this "
                f"call breaks: {', '.join(map(str, captured.guards.relations))}"
            )
        if observed.pads_with_zeros and not grad_enabled:
            raise CaptureError(
                "nn.TransformerEncoder turns padded batches into nested tensors when it evaluates "
                "without gradients, and its output is then zero at padded positions; construct it "
                "with enable_nested_tensor=False",
                "aten._nested_tensor_from_mask",
            )
        if observed.pads_with_zeros:
            captured.guards = _with(captured.guards, grad_enabled=True)
        return captured

    def _trace(self, dynamic: bool, grad: bool) -> Tuple[Captured, Recorder, Any]:
        """Returns the graph and what was observed of the forward, which runs in this grad mode."""
        effects = Effects(self.module)
        self._refuse(effects.seen)  # effects that tracing would already cause
        strangers = set() if self.module is self.users else set(map(id, self.users.modules()))
        recorder = Recorder(effects.learn, effects.tensors, strangers)

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            effects.begin()
            with recorder.watching():
                yield
            effects.look()

        first: Dict[int, int] = {}
        same = [first.setdefault(id(value), i) for i, value in enumerate(self.flat)]
        tracer = Tracer(self.module, self.placeholders, self.spec, self.paths, same, around)
        attempts: List[Tuple[Callable[[str], Traced], str]] = [
            (tracer.export, ALL), (tracer.export, LEADING), (tracer.make_fx, LEADING),
            (tracer.export, NONE), (tracer.make_fx, NONE),
        ]  # fmt: skip
        if not dynamic:
            attempts = attempts[3:]
        failures: Dict[str, List[Exception]] = {"export": [], "make_fx": []}
        with (
            quiet_tracing(grad),
            contextlib.closing(tracer),
            contextlib.closing(recorder),
            contextlib.closing(effects),
            watched_autograd() as autograd,
            unchanged(effects),
            watched_encoder() as observed,
        ):
            self._effects, self._observed, self._recorder = effects, observed, recorder
            for trace, axes in attempts:
                try:
                    captured = self._attempt(trace, axes)
                    break
                except CaptureError:
                    raise
                except Exception as error:  # tracing runs arbitrary code of the module
                    if recorder.strayed or isinstance(error, Strayed):
                        raise Strayed from None
                    if recorder.seen:
                        break
                    failures[trace.__name__].append(_without_frames(error))
                    if _is_final(error):
                        raise self._explain(failures) from None
            else:
                raise self._explain(failures)
        self._refuse([*effects.seen, *recorder.seen, *autograd])
        return captured, recorder, observed

    def _refuse(self, seen: Sequence[str]) -> None:
        for what in seen:
            raise CaptureError(
                f"{type(self.module).__name__} {what}; a graph has no such effects. You can leave it as it is: the module "
                "then runs in PyTorch, and the modules inside it may still be captured",
                of_effect=True,
            )

    def tensors(self) -> List[torch.Tensor]:
        """Returns the user's tensors that the forward can reach, except its parameters and buffers."""
        return list(self._effects.tensors.values())

    def _names_positions(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        """Returns whether the call passes the positions of its tokens."""
        try:
            bound = inspect.signature(self.module.forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            bound = kwargs
        return isinstance(bound.get("position_ids"), torch.Tensor)

    def _explain(self, failures: Dict[str, List[Exception]]) -> CaptureError:
        """Returns one error for all attempts: the operation that the graph lacks, else the tracer's error. The last
        attempt, with fixed sizes, says most, and export's errors say more than make_fx's."""
        name = type(self.module).__name__
        loops = "".join(f"; {reason}" for reason in self._loops)
        ordered = failures["export"][::-1] + failures["make_fx"][::-1]
        for error in ordered:
            if isinstance(error, OperationError):
                where = f"'{error.module_path}'" if error.module_path else f"the model ({name})"
                picks = "nonzero" in error.operation or "index" in error.operation
                return CaptureError(
                    f"{error.operation} in {where} cannot be captured: {error.reason}"
                    f"{loops if picks else ''}. Write that "
                    "part with other operations, or leave it: the module runs in PyTorch, and the "
                    "modules inside it may still be captured",
                    error.operation,
                    error.module_path,
                )
            if isinstance(error, MutationError):
                return CaptureError(
                    f"{name} changes {error} in place; a graph has no such effects. Return the new "
                    "value instead, or leave it: the module runs in PyTorch"
                )
        error = ordered[0]
        first_line = (str(error).strip().splitlines() or [""])[0]
        return CaptureError(
            f"{name} cannot be traced: {type(error).__name__}: {first_line[:300]}{loops}. Make its "
            "control flow depend on sizes and configuration only, or leave it: the module runs in "
            "PyTorch"
        )

    # ---- lowering -------------------------------------------------------------------------------

    def _attempt(self, trace: Callable[[str], Traced], axes: str) -> Captured:
        """Captures with copies of equal layers, or the whole module if that fails or no layers are equal."""
        repeats = Repeats(self.module)
        if self._repeat and repeats.possible:
            try:
                with self._module_as_it_was(), repeats.tracing(), no_fake_cache():
                    captured = self._lower_in_either_form(trace(axes), repeats)
                if repeats.copies > 0 and self._recorder.tells_objects_apart():
                    raise NotRepeatable(
                        "the layers may read something that depends on their identity"
                    )
                captured.copied_layers = repeats.copies
                return captured
            except Exception as error:
                if _is_final(error):
                    raise
        cache = contextlib.nullcontext if repeats.possible else no_fake_cache
        with self._module_as_it_was(), cache():
            return self._lower_in_either_form(trace(axes), None)

    @contextlib.contextmanager
    def _module_as_it_was(self) -> Iterator[None]:
        """Restores the module for one trace. torch.export leaves copies in place of the containers that attributes
        hold, and the next trace detects changes by comparing with the module before the first trace."""
        self._effects.undo()
        self._observed.limits.clear()
        routing.observe_routers(self.users, self.module)
        self._loops = replace_loops(self.module)
        with settled_rope(self.module, self._observed, self._positions_given):
            yield

    def _lower_in_either_form(self, traced: Traced, repeats: Optional[Repeats]) -> Captured:
        try:
            return self._lower(traced, repeats)
        except MutationError:
            if traced.functional is None:
                raise
        return self._lower(traced.functional(), repeats)

    def _lower(self, traced: Traced, repeats: Optional[Repeats]) -> Captured:
        placeholders = [n for n in traced.graph_module.graph.nodes if n.op == "placeholder"]
        examples = [node.meta.get("val") for node in placeholders]
        symbols = Symbols(
            [
                (position, value)
                for (kind, position), value in zip(traced.inputs, examples)
                if kind == "input" and isinstance(value, torch.Tensor)
            ],
            self.placeholders,
        )
        translator = Translator(symbols.names)
        builder = Builder()
        leaves = _Leaves(self, builder, translator)
        copies = None
        if repeats is not None:
            copies = Copies(repeats.sites, dict(zip(placeholders, traced.inputs)), leaves.bind)
        lowering = leaves.lowering = GraphLowering(builder, translator, copies)
        lowering.autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        inputs = [
            leaves.bind(kind, target, value)
            for (kind, target), value in zip(traced.inputs, examples)
        ]
        results = lowering.run(traced.graph_module, inputs)
        self._check_devices(traced, examples)
        leaves.check_written(lowering)
        results, _ = pytree.tree_flatten(results)
        if len(results) != traced.output_spec.num_leaves:
            raise LoweringError("the traced program and the module have different outputs")

        shared = sharing(traced, inputs, results, translator, type(self.module).__name__)
        outputs, graph_outputs = self._outputs(results, leaves, shared)
        nodes = builder.live_nodes(graph_outputs)
        used = {v.name for v in graph_outputs}
        used.update(v.name for node in nodes for v in node.inputs if v is not None)
        sources = symbols.sources
        needed = {position for _, (position, _) in sources}
        kept = [
            leaf for leaf in builder.leaves
            if leaf.value.name in used or leaves.position(leaf.value) in needed
        ]  # fmt: skip
        records = [leaves.record(leaf) for leaf in kept]
        name_at = {record.position: record.name for record in records if record.kind == "input"}
        forget_results(examples)
        return Captured(
            json=builder.to_json([name for name, _ in sources], kept, nodes, graph_outputs),
            leaves=records,
            symbols=[(name, name_at[position], axis) for name, (position, axis) in sources],
            output_spec=traced.output_spec,
            outputs=outputs,
            guards=Guards(
                structure=self.spec,
                arguments=self._argument_guards(leaves),
                training=tuple(m.training for m in self.module.modules()),
                grad_enabled=None,
                relations=symbols.relations(
                    translator, self._observed.limits, builder.at_least_zero
                ),
            ),
            symbol_sources=[source for _, source in sources],
            method=traced.method,
            dynamic=bool(sources),
            depends=_differentiable_by(kept, nodes, graph_outputs),
            output_types=[(value.dtype, value.shape) for value in graph_outputs],
            folded=leaves.folded,
            _module=weakref.ref(self.users),
        )

    def _check_devices(self, traced: Traced, examples: Sequence[Any]) -> None:
        """Refuses results on a device that no operand is on: a graph runs on one device."""
        given = {value.device for value in examples if isinstance(value, torch.Tensor)}
        (output,) = [node for node in traced.graph_module.graph.nodes if node.op == "output"]
        for node in output.all_input_nodes:
            value = node.meta.get("val")
            if given and isinstance(value, torch.Tensor) and value.device not in given:
                raise CaptureError(
                    f"{type(self.module).__name__} returns a tensor on {value.device}, and its operands are on "
                    f"{', '.join(sorted(map(str, given)))}; move the result outside of the module"
                )

    def _outputs(
        self, results: Sequence[Any], leaves: "_Leaves", shared: Sequence[Sharing]
    ) -> Tuple[List[Output], List[Value]]:
        outputs: List[Output] = []
        graph_outputs: List[Value] = []
        at: Dict[str, int] = {}
        for result, share in zip(results, shared):
            if share.view is not None:
                outputs.append(Output("view", share.view.base, value=share.view))
            elif isinstance(result, Value):
                passed = leaves.passed_through(result)
                if passed is not None:
                    outputs.append(replace(passed, copied=share.copied))
                    continue
                if result.name not in at:
                    at[result.name] = len(graph_outputs)
                    graph_outputs.append(result)
                outputs.append(Output("graph", at[result.name], copied=share.copied))
            elif isinstance(result, dims.Poly):
                outputs.append(Output("size", value=result))
            elif isinstance(result, Complex):
                raise CaptureError(
                    f"{type(self.module).__name__} returns a complex tensor, and a graph has none; return "
                    "torch.view_as_real of it, or leave it: the module runs in PyTorch"
                )
            else:
                outputs.append(Output("constant", value=result))
        return outputs, graph_outputs

    def _argument_guards(self, leaves: "_Leaves") -> Tuple[Tuple[Any, ...], ...]:
        guards: List[Tuple[Any, ...]] = []
        for position, value in enumerate(self.flat):
            if isinstance(value, torch.Tensor):
                shape = leaves.input_shape(position)
                guards.append(("tensor", value.dtype, shape))
            else:
                guards.append(("value", value))
        return tuple(guards)


def _differentiable_by(
    leaves: Sequence[Any], nodes: Sequence[Any], outputs: Sequence[Value]
) -> List[FrozenSet[int]]:
    """Returns for each output the leaves from which a path of floating-point values leads to it."""
    reach: Dict[str, FrozenSet[int]] = {
        leaf.value.name: frozenset((i,)) if leaf.value.dtype in FLOATS else frozenset()
        for i, leaf in enumerate(leaves)
    }
    for node in nodes:
        inputs = [
            reach[v.name] for v in node.inputs if v is not None and node.op != "stop_gradient"
        ]
        for value in node.outputs:
            floating = value.dtype in FLOATS
            reach[value.name] = frozenset().union(*inputs) if floating else frozenset()
    return [reach[value.name] for value in outputs]


def _tracks_versions(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that autograd may save, which one made under torch.inference_mode is not."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def _memory(tensor: torch.Tensor) -> Tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _with(guards: Guards, **changes: Any) -> Guards:
    return Guards(**{**guards.__dict__, **changes})


# ---- leaves -------------------------------------------------------------------------------------


class _Leaves:
    """The graph's leaves and the sources of their tensors."""

    lowering: GraphLowering

    def __init__(self, capture: _Capture, builder: Builder, translator: Translator) -> None:
        self._capture = capture
        self._builder = builder
        self._translator = translator
        self._records: Dict[str, Leaf] = {}  # by the name of the value
        self._values: Dict[Tuple[str, Any], Value] = {}
        self._shapes: Dict[int, Tuple[Dim, ...]] = {}
        module = capture.module
        self._attributes = {
            _memory(v): v
            for v in capture.tensors()
            if type(v) is torch.Tensor and not v.is_meta and v.layout is torch.strided
        }
        # The module's tensors, which a forward may also reach in another way than through the module.
        self._registered = {
            _memory(v): ("parameter" if isinstance(v, torch.nn.Parameter) else "buffer", name)
            for name, v in named_tensors(module).items()
            if not v.is_meta and v.layout is torch.strided
        }
        self.folded: List[Tuple[torch.Tensor, int]] = []
        self._first_name: Dict[str, str] = {}
        first: Dict[int, str] = {}
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._first_name[name] = first.setdefault(id(tensor), name)

    def bind(self, kind: str, target: Any, example: Any) -> Any:
        if kind in ("parameter", "buffer"):
            name = self._first_name.get(target, target)
            return self._leaf(kind, name, name, example)
        if kind == "constant":
            return self._constant(target, example)
        value = self._capture.flat[target]
        if not isinstance(value, torch.Tensor):
            return value
        return self._leaf("input", target, self._input_name(target), example)

    def _constant(self, tensor: torch.Tensor, example: Any) -> Value:
        """Binds a tensor that the forward made of Python numbers, or that an attribute or a global holds. The latter
        stays the user's, who may change it in place."""
        registered = self._registered.get(_memory(tensor)) if not tensor.is_meta else None
        owned = self._attributes.get(_memory(tensor)) if not tensor.is_meta else None
        if registered is not None:
            if self._capture.module is not self._capture.users:
                raise Strayed
            if owned is None:
                return self.bind(*registered, example)
            raise CaptureError(
                f"{type(self._capture.module).__name__} uses '{registered[1]}' and a tensor that shares its memory: "
                "clone one of them"
            )
        if (tensor if owned is None else owned).requires_grad:
            raise CaptureError(
                f"{type(self._capture.module).__name__} uses a tensor of shape {list(tensor.shape)} that "
                "requires gradients and is not one of its parameters: register it with register_parameter, or "
                "its module with add_module"
            )
        if owned is None and tensor.is_meta and tensor.numel() > 1:
            owned = tensor.detach()  # several numbers with unknown values
        elif owned is None:
            try:
                value = self.lowering.constant_tensor(tensor)
                if not tensor.is_inference():
                    self.folded.append((tensor, tensor._version))
                return value
            except NotUniform:
                owned = _tracks_versions(tensor.detach())
        value = self._leaf("constant", len(self._records), "constant", example)
        self._records[value.name] = Leaf(value.name, "constant", value=owned)
        return value

    def _input_name(self, position: int) -> str:
        """Returns the last key of the argument's path: "input_ids", or "input" with its number."""
        path = self._capture.paths[position]
        name = path.rsplit("[", 1)[-1].strip("]'\"")
        name = name.rsplit(".", 1)[-1]
        return f"input_{name}" if name.isdigit() or not name.isidentifier() else name

    def _leaf(self, kind: str, key: Any, name: str, example: Any) -> Value:
        known = self._values.get((kind, key))
        if known is not None:
            return known
        dtype = DTYPES.get(example.dtype)
        if dtype is None:
            raise CaptureError(f"'{name}' has dtype {example.dtype}, which is not supported")
        role = {"buffer": "constant"}.get(kind, kind)
        shape = self._translator.shape(example.shape)
        value = self._builder.leaf(role, name, dtype, shape)
        position = key if kind == "input" else -1
        if kind == "input":
            self._shapes[key] = shape
        target = self._capture.paths[key] if kind == "input" else str(key)
        self._records[value.name] = Leaf(value.name, kind, target, position)
        self._values[(kind, key)] = value
        return value

    def check_written(self, lowering: GraphLowering) -> None:
        """Raises MutationError if the forward writes to a leaf. A buffer that each forward overwrites before it reads
        it, and that no checkpoint holds, is scratch space, and need not be written at all."""
        leaves = {id(value) for value in self._values.values()}
        for value in lowering.written:
            if id(value) not in leaves:  # a copy of a leaf has its name
                continue
            record = self._records[value.name]
            owner, _, name = record.target.rpartition(".")
            scratch = (
                record.kind == "buffer"
                and name in self._capture.module.get_submodule(owner)._non_persistent_buffers_set
                and id(value) not in lowering.read
            )
            if not scratch:
                kind = "the argument " if record.kind == "input" else ""
                raise MutationError(f"{kind}'{record.target}'")

    def record(self, leaf: Any) -> Leaf:
        return self._records.get(leaf.value.name) or Leaf(leaf.value.name, leaf.role)

    def position(self, value: Value) -> int:
        record = self._records.get(value.name)
        return record.position if record is not None else -1

    def input_shape(self, position: int) -> Optional[Tuple[Dim, ...]]:
        return self._shapes.get(position)

    def passed_through(self, value: Value) -> Optional[Output]:
        """Returns the output for a value that is itself a leaf, else None."""
        record = self._records.get(value.name)
        if record is None:
            return None
        if record.kind == "input":
            return Output("input", record.position)
        if record.kind == "constant":
            return Output("constant", value=record.value)
        return Output(record.kind, target=record.target)


# ---- arguments ----------------------------------------------------------------------------------


def _check_arguments(
    module: torch.nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> None:
    for value in [*args, *kwargs.values()]:
        if is_cache(value):
            raise CaptureError(
                f"{type(module).__name__} is called with a key-value cache, which it updates in "
                "place; decoding with a cache runs in PyTorch",
                of_call=True,
            )


def _check_argument(path: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise CaptureError(
                f"the argument {path} is sparse or nested; pass a dense tensor", of_call=True
            )
        if value.dtype not in DTYPES:
            raise CaptureError(
                f"the argument {path} has the unsupported dtype {value.dtype}", of_call=True
            )
    elif not isinstance(value, _CONSTANTS):
        raise CaptureError(
            f"the argument {path} is a {type(value).__name__}; tensors, numbers, strings and "
            "containers of them are supported",
            of_call=True,
        )
