"""A PyTorch module and the arguments of one call to a Deepwell graph.

torch.export traces the forward with symbolic sizes (nothing is computed: modules on the meta device
and modules made of fake tensors are traced as well); make_fx is behind it, and fixed sizes behind
symbolic ones. The traced ATen operations are then lowered (deepwell.lowering) to the graph's JSON.

The module is not touched: no parameter, gradient, buffer, flag or random state changes.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree

from deepwell.errors import CaptureError
from deepwell.lowering import Builder, LoweringError, NotPolynomial, Translator, Value
from deepwell.lowering import dims
from deepwell.lowering.builder import DTYPES
from deepwell.lowering.dims import Dim
from deepwell.lowering.graph import (
    GraphLowering,
    MutationError,
    NoLowering,
    NotUniform,
    OperationError,
)

__all__ = ["Captured", "CaptureError", "Guards", "Leaf", "capture_graph"]

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


# ---- what a capture is --------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """Where a leaf of the graph gets its tensor from, in the order of the graph's leaves."""

    name: str
    kind: str  # parameter, buffer, input, constant, seed
    target: str = ""  # parameter, buffer: dotted name in the module; input: its key path
    position: int = -1  # input: index among the flattened (args, kwargs)
    value: Optional[torch.Tensor] = None  # constant: the tensor itself


@dataclass(frozen=True)
class Output:
    """Where one flat output of the module comes from."""

    kind: str  # graph, input, parameter, buffer, size, constant
    index: int = -1  # graph: which output; input: position among the flattened (args, kwargs)
    target: str = ""  # parameter, buffer: dotted name in the module
    value: Any = None  # constant: the object; size: the dimension


@dataclass(frozen=True)
class Guards:
    """What the capture took for granted. The graph is the module's forward while these hold.

    `arguments` has one entry for each leaf of the flattened (args, kwargs): ("tensor", dtype, shape)
    with the shape's dimensions over the symbols, or ("value", v). `training` has one flag for each
    module of `module.modules()`. `grad_enabled` is None where the grad mode makes no difference.
    """

    structure: Any
    arguments: Tuple[Tuple[Any, ...], ...]
    training: Tuple[bool, ...]
    grad_enabled: Optional[bool]
    relations: Tuple[sympy.Expr, ...]  # over the symbols, by name; all must be true

    def sizes_hold(self, names: Sequence[str], sizes: Sequence[int]) -> bool:
        """Whether the graph is valid at these sizes of the symbols. Sizes 0 and 1 never are:
        PyTorch treats such axes apart, and so each is a capture of its own."""
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
    _module: Any = None  # weak reference, for parameters that are returned as they are

    @property
    def training_flags(self) -> Tuple[bool, ...]:
        return self.guards.training

    def accepts_sizes(self, sizes: Sequence[int]) -> bool:
        return self.guards.sizes_hold([name for name, _, _ in self.symbols], sizes)

    def rebuild_outputs(self, results: Sequence[torch.Tensor], flat: Sequence[Any]) -> Any:
        """The module's result from the graph's outputs and the flattened (args, kwargs)."""
        values = [self._output(output, results, flat) for output in self.outputs]
        return pytree.tree_unflatten(values, self.output_spec)

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
            sizes = {
                name: flat[position].shape[axis]
                for (name, _, _), (position, axis) in zip(self.symbols, self.symbol_sources)
            }
            return dims.evaluate(output.value, sizes)
        return output.value


# ---- capturing ----------------------------------------------------------------------------------


def capture_graph(
    module: torch.nn.Module,
    args: Tuple[Any, ...] = (),
    kwargs: Optional[Dict[str, Any]] = None,
    *,
    dynamic: bool = True,
) -> Captured:
    """Captures `module(*args, **kwargs)` as a graph.

    Args:
        args, kwargs: arguments of one call. Of tensors only shape, dtype and device matter, so they
            may be fake or on the meta device; other arguments become part of the graph.
        dynamic: sizes of input axes other than 0 and 1 become symbols where the forward allows it.

    Raises:
        CaptureError: names the operation and the module that cannot be captured, and what to do.
    """
    return _Capture(module, tuple(args), dict(kwargs or {})).run(dynamic)


@dataclass
class _Traced:
    """A traced forward: what its placeholders and its outputs stand for."""

    graph_module: torch.fx.GraphModule
    inputs: List[Tuple[str, Any]]  # (kind, target): as Leaf's; constant: (kind, tensor or value)
    output_spec: Any
    method: str
    functional: Optional[Callable[[], "_Traced"]] = None  # the same, with no operation in place


_WRAPPER = "module"  # where _Call keeps the module: the first part of every dotted name in a trace


def _without_wrapper(name: str) -> str:
    return name[len(_WRAPPER) + 1 :] if name.startswith(_WRAPPER + ".") else name


class _Call(torch.nn.Module):
    """The module as a function from tensors to the flat list of its outputs.

    Tracers see no keyword argument, container or constant: all of these are settled here.
    """

    def __init__(self, module: torch.nn.Module, leaves: Sequence[Any], at: Sequence[int],
                 spec: Any) -> None:
        super().__init__()
        self.module = module
        results: List[Any] = []

        def call(tensors: Sequence[torch.Tensor]) -> List[Any]:
            values = list(leaves)
            for position, tensor in zip(at, tensors):
                values[position] = tensor
            args, kwargs = pytree.tree_unflatten(values, spec)
            outputs, output_spec = pytree.tree_flatten(self.module(*args, **kwargs))
            results.append(output_spec)
            return outputs

        self._call = call
        self.output_spec = lambda: results[-1]

    def forward(self, *tensors: torch.Tensor) -> List[Any]:
        return self._call(tensors)


# Which axes of the arguments get symbolic sizes. Some operations need a fixed size of features, which
# nothing but the arguments may fix: so all axes come first, then all but the last of numbers.
_ALL, _LEADING, _NONE = "all", "leading", "none"


def _varying(example: torch.Tensor, axes: str) -> range:
    if axes == _NONE:
        return range(0)
    fixed = axes == _LEADING and example.dtype.is_floating_point and example.dim() > 1
    return range(example.dim() - (1 if fixed else 0))


def _symbolic(mode: FakeTensorMode, example: torch.Tensor, axes: range) -> torch.Tensor:
    sizes = [DimDynamic.DYNAMIC if a in axes else DimDynamic.STATIC for a in range(example.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(example, symbolic_context=context)


def _is_final(error: Exception) -> bool:
    """Whether no other way of tracing can help."""
    if isinstance(error, OperationError):
        return isinstance(error.__cause__, NoLowering)
    return type(error).__name__ == "GuardOnDataDependentSymNode"


class _Capture:
    def __init__(self, module: torch.nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]):
        register_cache_types()
        self.module = module
        _check_arguments(module, args, kwargs)
        paths, self.spec = pytree.tree_flatten_with_path((args, kwargs))
        self.flat = [leaf for _, leaf in paths]
        self.paths = [pytree.keystr(path) for path, _ in paths]
        for path, value in zip(self.paths, self.flat):
            _check_argument(path, value)
        on_meta = any(p.is_meta for p in module.parameters())
        self.placeholders = [
            _placeholder(v, on_meta) if isinstance(v, torch.Tensor) else v for v in self.flat
        ]

    def run(self, dynamic: bool) -> Captured:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise CaptureError("autocast is on; a graph has the dtypes of the module itself")
        grad_enabled = torch.is_grad_enabled()
        attempts: List[Tuple[Callable[[str], _Traced], str]] = [
            (self._export, _ALL), (self._export, _LEADING), (self._make_fx, _LEADING),
            (self._export, _NONE), (self._make_fx, _NONE),
        ]  # fmt: skip
        if not dynamic:
            attempts = attempts[3:]
        failures: List[Exception] = []
        with _quiet_tracing(), _unchanged(self.module), _watched() as observed, _settled_rope(
            self.module, observed, self._names_positions()
        ):
            self._observed = observed
            for trace, axes in attempts:
                observed.limits.clear()
                try:
                    captured = self._lower_in_either_form(trace(axes))
                    break
                except CaptureError:
                    raise
                except Exception as error:  # tracing runs arbitrary code of the module
                    failures.append(error)
                    if _is_final(error):
                        raise self._explain(failures) from error
            else:
                raise self._explain(failures)
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

    def _names_positions(self) -> bool:
        """Whether the call says where its tokens stand."""
        return any(
            isinstance(v, torch.Tensor) and "position_ids" in path
            for path, v in zip(self.paths, self.flat)
        )

    def _explain(self, failures: Sequence[Exception]) -> CaptureError:
        """The one message for all attempts: what the graph lacks, else what tracing objected to."""
        name = type(self.module).__name__
        for error in failures:
            if isinstance(error, OperationError):
                where = f"'{error.module_path}'" if error.module_path else f"the model ({name})"
                return CaptureError(
                    f"{error.operation} in {where} cannot be captured: {error.reason}. "
                    "Write that part with other operations, or leave it: the module runs in "
                    "PyTorch, and the modules inside it that can be captured still do",
                    error.operation, error.module_path,
                )  # fmt: skip
        for error in failures:
            if isinstance(error, MutationError):
                return CaptureError(
                    f"{name} changes a buffer or an input in place ({error}); a graph has no such "
                    "effects. Return the new value instead, or leave it: the module runs in PyTorch",
                    str(error),
                )
        error = failures[0]
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CaptureError(
            f"{name} cannot be traced: {type(error).__name__}: {first_line[:300]}. Make its control "
            "flow depend on sizes and configuration only, or leave it: the module runs in PyTorch"
        )

    # ---- tracing --------------------------------------------------------------------------------

    def _call(self) -> Tuple["_Call", List[torch.Tensor]]:
        """The module as a function of its tensor arguments, and examples of these. Each example is
        an object of its own: torch.export takes inputs that are one object for one input."""
        at = self._tensor_positions()
        call = _Call(self.module, self.placeholders, at, self.spec)
        return call, [_placeholder(self.placeholders[i], False) for i in at]

    def _tensor_positions(self) -> List[int]:
        return [i for i, v in enumerate(self.placeholders) if isinstance(v, torch.Tensor)]

    def _export(self, axes: str) -> _Traced:
        call, examples = self._call()
        shapes = None
        if axes != _NONE:
            auto = torch.export.Dim.AUTO
            shapes = {"tensors": tuple({a: auto for a in _varying(e, axes)} for e in examples)}
        program = torch.export.export(call, tuple(examples), dynamic_shapes=shapes, strict=False)
        traced = self._from_program(program, call.output_spec())
        traced.functional = lambda: self._from_program(
            program.run_decompositions({}), traced.output_spec
        )
        return traced

    def _from_program(self, program: Any, output_spec: Any) -> _Traced:
        signature = program.graph_signature
        for name in ("buffers_to_mutate", "parameters_to_mutate", "user_inputs_to_mutate"):
            changed = getattr(signature, name, None)
            if changed:
                raise MutationError(f"'{_without_wrapper(next(iter(changed.values())))}'")
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
        return _Traced(program.graph_module, inputs, output_spec, "export")

    def _make_fx(self, axes: str) -> _Traced:
        """Parameters and buffers become arguments, with fixed sizes, of a function that is traced."""
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
            traced = make_fx(forward, pre_dispatch=True)(*fakes)
        inputs: List[Tuple[str, Any]] = [("input", i) for i in self._tensor_positions()]
        parameters = dict(self.module.named_parameters())
        for name in map(_without_wrapper, state):
            inputs.append(("parameter" if name in parameters else "buffer", name))
        return _Traced(traced, inputs, call.output_spec(), "make_fx")

    # ---- lowering -------------------------------------------------------------------------------

    def _lower_in_either_form(self, traced: _Traced) -> Captured:
        try:
            return self._lower(traced)
        except MutationError:
            if traced.functional is None:
                raise
        return self._lower(traced.functional())

    def _lower(self, traced: _Traced) -> Captured:
        placeholders = [n for n in traced.graph_module.graph.nodes if n.op == "placeholder"]
        examples = [node.meta.get("val") for node in placeholders]
        symbols = _Symbols(
            [
                (position, value)
                for (kind, position), value in zip(traced.inputs, examples)
                if kind == "input" and isinstance(value, torch.Tensor)
            ],
            self.placeholders,
        )
        translator = Translator(symbols.names)
        builder = Builder()
        lowering = GraphLowering(builder, translator)
        leaves = _Leaves(self, builder, lowering, translator)
        inputs = [
            leaves.bind(kind, target, value)
            for (kind, target), value in zip(traced.inputs, examples)
        ]
        results = lowering.run(traced.graph_module, inputs)
        leaves.check_written(lowering)
        results, _ = pytree.tree_flatten(results)
        if len(results) != traced.output_spec.num_leaves:
            raise LoweringError("the traced program has other outputs than the module")

        outputs, graph_outputs = self._outputs(results, leaves)
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
                relations=symbols.relations(translator, self._observed.limits, builder.at_least_zero),
            ),
            symbol_sources=[source for _, source in sources],
            method=traced.method,
            dynamic=bool(sources),
            _module=weakref.ref(self.module),
        )

    def _outputs(self, results: Sequence[Any], leaves: "_Leaves") -> Tuple[List[Output], List[Value]]:
        outputs: List[Output] = []
        graph_outputs: List[Value] = []
        at: Dict[str, int] = {}
        for result in results:
            if isinstance(result, Value):
                passed = leaves.passed_through(result)
                if passed is not None:
                    outputs.append(passed)
                    continue
                if result.name not in at:
                    at[result.name] = len(graph_outputs)
                    graph_outputs.append(result)
                outputs.append(Output("graph", at[result.name]))
            elif isinstance(result, dims.Poly):
                outputs.append(Output("size", value=result))
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


def _with(guards: Guards, **changes: Any) -> Guards:
    return Guards(**{**guards.__dict__, **changes})


# ---- symbols ------------------------------------------------------------------------------------


class _Symbols:
    """Names for the symbolic sizes of the inputs' axes.

    PyTorch gives each axis its own symbol unless the forward compared them. Symbols that stand on
    the same axis of different inputs with the same size in this call get one name (the batch of
    input_ids and of attention_mask), unless one input has both as different axes. That takes more for
    granted than the trace did, and leaf shapes say so: a call where they differ is another capture.
    """

    def __init__(self, inputs: Sequence[Tuple[int, torch.Tensor]], examples: Sequence[Any]):
        self.names: Dict[sympy.Symbol, str] = {}
        self.sources: List[Tuple[str, Tuple[int, int]]] = []
        self._shape_env: Any = None
        found: List[Tuple[sympy.Symbol, int, int, int]] = []  # symbol, position, axis, size
        together: Dict[sympy.Symbol, set] = {}
        for position, tensor in inputs:
            here = []
            for axis, size in enumerate(tensor.shape):
                if not isinstance(size, torch.SymInt):
                    continue
                self._shape_env = size.node.shape_env
                expr = size.node.expr
                if expr.is_Symbol:
                    here.append(expr)
                    found.append((expr, position, axis, examples[position].shape[axis]))
            for expr in here:
                together.setdefault(expr, set()).update(here)
        for expr, position, axis, size in found:
            if expr in self.names:
                continue
            name = self._same_axis(expr, axis, size, found, together)
            if name is None:
                name = self._new_name(axis)
                self.sources.append((name, (position, axis)))
            self.names[expr] = name

    def _same_axis(self, expr: sympy.Symbol, axis: int, size: int, found: Sequence[Tuple],
                   together: Dict[sympy.Symbol, set]) -> Optional[str]:
        for other, _, other_axis, other_size in found:
            name = self.names.get(other)
            if name is None or other_axis != axis or other_size != size:
                continue
            if not any(self.names.get(e) == name for e in together[expr]):
                return name
        return None

    def _new_name(self, axis: int) -> str:
        taken = {name for name, _ in self.sources}
        if axis == 0 and "B" not in taken:
            return "B"
        if "S" not in taken:
            return "S"
        count = 2
        while f"D{count}" in taken:
            count += 1
        return f"D{count}"

    def relations(self, translator: Translator,
                  limits: Sequence[Tuple[Any, int, int]],
                  at_least_zero: Sequence[Dim]) -> Tuple[sympy.Expr, ...]:
        """What the trace assumed about sizes and the graph's shapes do not say by themselves.

        Further assumptions: `limits`, (size, lowest, highest), and dimensions `at_least_zero`.
        """
        if self._shape_env is None or not self.names:
            return ()
        plain = {
            symbol: sympy.Symbol(name, integer=True, positive=True)
            for symbol, name in self.names.items()
        }
        kept: List[sympy.Expr] = []
        assumed = [guard.expr for guard in self._shape_env.guards]
        for size, low, high in limits:
            if isinstance(size, torch.SymInt):
                assumed += [sympy.Ge(size.node.expr, low), sympy.Le(size.node.expr, high)]
        for relation in assumed:
            if isinstance(relation, sympy.Rel) and _holds_always(relation, translator):
                continue
            relation = self._shape_env.replace(relation).xreplace(plain)
            if relation == sympy.true:
                continue
            if relation not in kept:
                kept.append(relation)
        for symbol, low, high in self._ranges():
            if high is not None:
                kept.append(sympy.Le(plain[symbol], high))
            if low > 2:
                kept.append(sympy.Ge(plain[symbol], low))
        named = {name: symbol for symbol, name in zip(plain.values(), self.names.values())}
        for dim in at_least_zero:
            if not _at_least_one(dim + 1):
                terms = dim.terms.items() if isinstance(dim, dims.Poly) else [((), dim)]
                kept.append(sympy.Ge(sum(c * sympy.prod([named[n] for n in m]) for m, c in terms), 0))
        return tuple(kept)

    def _ranges(self) -> Iterator[Tuple[sympy.Symbol, int, Optional[int]]]:
        ranges = getattr(self._shape_env, "var_to_range", {})
        for symbol in self.names:
            bounds = ranges.get(symbol)
            if bounds is None:
                continue
            high = int(bounds.upper) if bounds.upper.is_Integer else None
            if high is not None and high >= 1 << 61:
                high = None
            low = int(bounds.lower) if bounds.lower.is_Integer else 2
            yield symbol, low, high


def _holds_always(relation: sympy.Rel, translator: Translator) -> bool:
    """True for relations that are settled for all sizes of at least 2."""
    try:
        left, right = translator.expression(relation.lhs), translator.expression(relation.rhs)
    except NotPolynomial:
        return False
    difference = left - right
    if difference == 0:
        return relation.rel_op in ("==", "<=", ">=")
    if isinstance(difference, int):
        return bool(relation.func(difference, 0))
    if not isinstance(difference, int) and relation.rel_op in ("!=", ">", ">="):
        return _at_least_one(difference)
    return relation.rel_op in ("<", "<=") and _at_least_one(-difference)


def _at_least_one(difference: Dim) -> bool:
    """Whether the polynomial is positive wherever every symbol is at least 2."""
    if isinstance(difference, int):
        return difference >= 1
    rising = [c for monomial, c in difference.terms.items() if monomial]
    if any(c < 0 for c in rising):
        return False
    names = {name for monomial in difference.terms for name in monomial}
    return dims.evaluate(difference, {name: 2 for name in names}) >= 1


# ---- leaves -------------------------------------------------------------------------------------


class _Leaves:
    """The graph's leaves and where their tensors come from."""

    def __init__(self, capture: _Capture, builder: Builder, lowering: GraphLowering,
                 translator: Translator) -> None:
        self._capture = capture
        self._builder = builder
        self._lowering = lowering
        self._translator = translator
        self._records: Dict[str, Leaf] = {}  # by name of the value
        self._values: Dict[Tuple[str, Any], Value] = {}
        self._shapes: Dict[int, Tuple[Dim, ...]] = {}
        module = capture.module
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
        try:
            return self._lowering.constant_tensor(tensor)
        except NotUniform:
            value = self._leaf("constant", len(self._records), "constant", example)
            record = self._records[value.name]
            kept = tensor.detach().clone()
            self._records[value.name] = Leaf(record.name, "constant", value=kept)
            return value

    def _input_name(self, position: int) -> str:
        """The last key of the argument's path: "input_ids", or "input" with its number."""
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
        """A buffer that each forward overwrites before reading it, and that no checkpoint holds, is
        scratch space: leaving it as it was changes nothing. Any other write is an effect."""
        for value in lowering.written:
            record = self._records.get(value.name)
            if record is None:
                continue
            owner, _, name = record.target.rpartition(".")
            scratch = (
                record.kind == "buffer"
                and name in self._capture.module.get_submodule(owner)._non_persistent_buffers_set
                and id(value) not in lowering.read
            )
            if not scratch:
                raise MutationError(f"'{record.target}'")

    def record(self, leaf: Any) -> Leaf:
        return self._records.get(leaf.value.name) or Leaf(leaf.value.name, leaf.role)

    def position(self, value: Value) -> int:
        record = self._records.get(value.name)
        return record.position if record is not None else -1

    def input_shape(self, position: int) -> Optional[Tuple[Dim, ...]]:
        return self._shapes.get(position)

    def passed_through(self, value: Value) -> Optional[Output]:
        """The output that is a leaf itself."""
        record = self._records.get(value.name)
        if record is None:
            return None
        if record.kind == "input":
            return Output("input", record.position)
        if record.kind == "constant":
            return Output("constant", value=record.value)
        return Output(record.kind, target=record.target)


# ---- arguments ----------------------------------------------------------------------------------


def _check_arguments(module: torch.nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    for value in [*args, *kwargs.values()]:
        if any(kind.__name__ == "Cache" for kind in type(value).__mro__):
            raise CaptureError(
                f"{type(module).__name__} is called with a key-value cache, which it updates in "
                "place; decoding with a cache runs in PyTorch"
            )


def _check_argument(path: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise CaptureError(f"the argument {path} is a sparse or nested tensor; pass a dense one")
        if value.dtype not in DTYPES:
            raise CaptureError(f"the argument {path} has dtype {value.dtype}, which is not supported")
    elif not isinstance(value, _CONSTANTS):
        raise CaptureError(
            f"the argument {path} is a {type(value).__name__}; tensors, numbers, strings and "
            "containers of them are supported"
        )


def _placeholder(tensor: torch.Tensor, on_meta: bool) -> torch.Tensor:
    """A tensor like `tensor` with nothing in it."""
    device = tensor.device
    if on_meta:
        device = torch.device("meta")
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad and tensor.dtype.is_floating_point)


# ---- the world while tracing --------------------------------------------------------------------


_tracing = threading.RLock()


@contextlib.contextmanager
def _quiet_tracing() -> Iterator[None]:
    """Tracing on the plain code paths, one at a time, leaving global state as it was.

    The fused inference paths of nn.TransformerEncoderLayer and nn.MultiheadAttention compute what
    the plain ones do. nn.TransformerEncoder reads its mask to find out whether it is causal, only
    to take a faster path: a graph does not, and applies the mask.
    """
    transformer = torch.nn.modules.transformer
    detect = getattr(transformer, "_detect_is_causal_mask", None)

    def declared_causal(mask: Any, is_causal: Optional[bool] = None, size: Any = None) -> bool:
        return is_causal is True

    with contextlib.ExitStack() as stack:
        stack.enter_context(_tracing)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of tracers, about code that is not the user's to change
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        if detect is not None:
            transformer._detect_is_causal_mask = declared_causal
        try:
            yield
        finally:
            if detect is not None:
                transformer._detect_is_causal_mask = detect
            torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Undoes what a forward that is being traced assigns to its modules: those are fake tensors."""
    saved = [(m, dict(m.__dict__), dict(m._buffers)) for m in module.modules()]
    try:
        yield
    finally:
        for m, attributes, buffers in saved:
            for name in [n for n in m.__dict__ if n not in attributes]:
                del m.__dict__[name]
            m.__dict__.update(attributes)
            m._buffers.clear()
            m._buffers.update(buffers)


@dataclass
class _Observed:
    """What was seen while the forward was traced."""

    pads_with_zeros: bool = False
    limits: List[Tuple[Any, int, int]] = field(default_factory=list)  # (size, lowest, highest)
    refusal: Optional[CaptureError] = None


@contextlib.contextmanager
def _watched() -> Iterator[_Observed]:
    """Notices nn.TransformerEncoder where it would use nested tensors."""
    observed = _Observed()
    forward = torch.nn.TransformerEncoder.forward

    def watched(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None,
                is_causal: Optional[bool] = None) -> Any:
        nested = getattr(self, "use_nested_tensor", False) and not self.training
        if nested and src_key_padding_mask is not None:
            observed.pads_with_zeros = True
        return forward(self, src, mask, src_key_padding_mask, is_causal)

    torch.nn.TransformerEncoder.forward = watched
    try:
        yield observed
    finally:
        torch.nn.TransformerEncoder.forward = forward


@contextlib.contextmanager
def _settled_rope(module: torch.nn.Module, observed: _Observed,
                  positions_given: bool) -> Iterator[None]:
    """Hugging Face's RoPE of type "dynamic" without its look at the largest position.

    It computes new frequencies once a sequence is longer than any before, and the first ones again
    for short sequences after that. Between the two limits it uses the frequencies it has: that is what
    a graph can say, for positions that count from 0, and the limits become relations on the size.
    """
    for m in module.modules():
        kind = getattr(m, "rope_type", None)
        plain = inspect.unwrap(type(m).forward)
        if not (isinstance(kind, str) and "dynamic" in kind) or plain is type(m).forward:
            continue
        longest, original = int(m.max_seq_len_cached), int(m.original_max_seq_len)
        shortest = original if longest > original else 0

        def forward(x: Any, position_ids: Any, *rest: Any, _m: Any = m, _plain: Any = plain,
                    _limits: Tuple[int, int] = (shortest, longest), **named: Any) -> Any:
            if positions_given:
                observed.refusal = CaptureError(
                    "RoPE of type 'dynamic' depends on the values of position_ids; call the model "
                    "without them, or choose another rope_type"
                )
            size, (low, high) = position_ids.shape[-1], _limits
            if isinstance(size, int) and not low <= size <= high:
                observed.refusal = CaptureError(
                    f"RoPE of type 'dynamic' computes new frequencies for {size} tokens; it keeps "
                    f"those it has from {low} to {high}"
                )
            observed.limits.append((size, low, high))
            with torch.no_grad():
                return _plain(_m, x, position_ids, *rest, **named)

        m.__dict__["forward"] = forward  # _unchanged takes it away again
    yield


@contextlib.contextmanager
def _module_paths(module: torch.nn.Module) -> Iterator[None]:
    """Writes the calling modules into the nodes that make_fx records, as torch.export does."""
    from torch.fx import traceback as fx_traceback

    names = {id(m): name for name, m in module.named_modules()}
    stack: List[torch.nn.Module] = []

    def describe() -> None:
        entries = {
            names.get(id(m), ""): (names.get(id(m), ""), type(m)) for m in stack
        }
        fx_traceback.current_meta["nn_module_stack"] = entries

    def enter(m: torch.nn.Module, _inputs: Any) -> None:
        stack.append(m)
        describe()

    def leave(m: torch.nn.Module, _inputs: Any, _result: Any) -> None:
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


_registered = False


def register_cache_types() -> None:
    """Makes Hugging Face's DynamicCache a pytree node, once, when transformers is in use."""
    global _registered
    if _registered:
        return
    import sys

    if "transformers" not in sys.modules:
        return
    _registered = True
    try:
        from transformers.cache_utils import DynamicCache
    except ImportError:
        return
    if DynamicCache in pytree.SUPPORTED_NODES:
        return
    try:
        from transformers.integrations.executorch import register_dynamic_cache_export_support
    except ImportError:
        return
    with contextlib.suppress(ValueError):  # registered by someone else meanwhile
        register_dynamic_cache_export_support()


