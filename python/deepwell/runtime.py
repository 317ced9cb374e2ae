"""Runs a captured graph behind a module: binding, autograd, arenas.

One autograd.Function stands for the whole graph. Its forward leases an arena, in which the engine keeps what backward
needs. Its backward returns the gradient of each parameter. PyTorch's own rules apply: inputs and parameters are saved
through autograd, so changing one in place between forward and backward, or a second backward, raises the usual error.
"""

from __future__ import annotations

import json
import math
import os
import threading
from typing import Any, Callable, Mapping, Sequence

import torch

from deepwell import _deepwell
from deepwell.arena import ArenaPool, Lease
from deepwell.kept import Block, KeptValues
from deepwell.lazy_logits import Deferred, Layer, LazyLogits
from deepwell.precision import OPERANDS, PrecisionPolicy
from deepwell.targets import Target

DTYPES = {
    "bool": torch.bool,
    "i32": torch.int32,
    "i64": torch.int64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
}


def _shape_check(shapes: Sequence[Sequence[Any]], symbols: Sequence[str]):
    """Returns a function of (input shapes, sizes) that is true if every dim is as the graph says."""
    fixed: list[tuple[int, int, int]] = []
    named: list[tuple[int, int, int]] = []
    computed: list[tuple[int, int, Any]] = []
    index = {name: position for position, name in enumerate(symbols)}
    for position, shape in enumerate(shapes):
        for axis, dim in enumerate(shape):
            if isinstance(dim, int):
                fixed.append((position, axis, dim))
            elif dim in index:
                named.append((position, axis, index[dim]))
            else:
                computed.append((position, axis, compile(dim, "<dim>", "eval")))

    def check(found: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
        for position, axis, dim in fixed:
            if found[position][axis] != dim:
                return False
        for position, axis, symbol in named:
            if found[position][axis] != sizes[symbol]:
                return False
        if computed:
            scope = dict(zip(symbols, sizes))
            for position, axis, code in computed:
                if found[position][axis] != eval(code, {"__builtins__": {}}, scope):
                    return False
        return True

    return check


def _evaluated(
    dims: Sequence[Any], symbols: Sequence[str], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the shape at these sizes of the symbols."""
    scope = dict(zip(symbols, sizes))
    return tuple(
        [dim if isinstance(dim, int) else eval(dim, {"__builtins__": {}}, scope) for dim in dims]
    )


# In an allocation that gradients share (Target.shared_gradients).
_SHARED_ALIGNMENT = 256

# PyTorch's own generated code makes its views in this way. Unlike a view of autograd's, the result has a version of its
# own.
_view: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided
)


class _Allocations:
    """How new gradients are allocated, by their positions among the gradients."""

    def __init__(
        self,
        shared: Sequence[tuple[int, tuple[int, ...], torch.dtype]],
        alone: Sequence[tuple[int, tuple[int, ...], torch.dtype]],
        target: Target,
    ) -> None:
        self.target = target
        self.alone = [*alone, *shared] if len(shared) == 1 else list(alone)
        self.blocks: list[tuple[int, torch.dtype, list[Any]]] = []
        for dtype in {dtype for _, _, dtype in shared} if len(shared) > 1 else ():
            views = []
            size = 0
            for position, shape, kind in shared:
                if kind is dtype:
                    views.append((position, shape, size))
                    step = _SHARED_ALIGNMENT // dtype.itemsize
                    size += -(-math.prod(shape) // step) * step
            self.blocks.append((size, dtype, views))
        # The same for the extension; None if it cannot make PyTorch's tensors.
        self._prepared = _deepwell.allocations(
            target.device.type,
            target.device.index or 0,
            [
                *[(_name(dtype), 0, [(at, shape, 0)]) for at, shape, dtype in self.alone],
                *[(_name(dtype), size, views) for size, dtype, views in self.blocks],
            ],
        )

    def make(self, grads: list[torch.Tensor | None]) -> None:
        if self._prepared and _deepwell.allocate_gradients(self._prepared, grads):
            return
        # If there is no memory, PyTorch's own error says so here.
        for position, shape, dtype in self.alone:
            grads[position] = self.target.new(shape, dtype)
        for size, dtype, views in self.blocks:
            block = self.target.new((size,), dtype)
            for position, shape, offset in views:
                grads[position] = _view(block, shape, _strides(shape), offset)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


class _Prepared:
    """A plan and everything that its runs need, read from it once. Gradients have the positions of their leaves in
    ``variant.wrt``."""

    def __init__(self, variant: _Variant, plan: _deepwell.Plan, sizes: tuple[int, ...]) -> None:
        self.plan = plan
        # None for segments that begin late.
        self.segment_bytes = [None if first else size for size, _, _, first in plan.segments]
        self.saved_bytes = [saved for _, saved, _, _ in plan.segments]
        self.kept_bytes: int = plan.kept_bytes
        self.kept_layout: int = plan.kept_layout
        self.outputs = [(shape, DTYPES[dtype]) for dtype, shape in plan.outputs]
        self.constant_outputs = [
            index
            for index, (_, dtype) in enumerate(self.outputs)
            if index in variant.constant_outputs or not dtype.is_floating_point
        ]
        self.part_count: int = plan.part_count
        # For each part, the segments of the arena that no later part uses. Segment 0 is kept to the end.
        self.freed: list[list[int]] = [[] for _ in range(self.part_count)]
        # For each part, the index and the bytes of segments that begin with it.
        self.late: list[list[tuple[int, int]]] = [[] for _ in range(self.part_count)]
        for index, (size, _, part, first) in enumerate(plan.segments):
            if first:
                self.late[first].append((index, size))
            if index:
                self.freed[part].append(index)
        self.output_parts: tuple[int, ...] = plan.output_parts
        self.leaf_parts: tuple[int, ...] = plan.leaf_parts
        # Leaves whose gradients are returned after each part: once they are complete and no later part reads the leaf,
        # because a hook may update the leaf as soon as it has its gradient. Leaves without gradients belong to part 0.
        self.leaves_by_part: list[list[int]] = [[] for _ in range(self.part_count)]
        self.grads_by_part: list[list[int]] = [[] for _ in range(self.part_count)]
        shared: list[list[Any]] = [[] for _ in range(self.part_count)]
        alone: list[list[Any]] = [[] for _ in range(self.part_count)]
        for position, (leaf, has, (first, last)) in enumerate(
            zip(variant.wrt, variant.has_grad, plan.grad_parts)
        ):
            handed_on = max(last, self.leaf_parts[leaf]) if has else 0
            self.leaves_by_part[handed_on].append(leaf)
            self.grads_by_part[handed_on].append(position)
            if has:
                dims, dtype = variant.leaves[leaf]
                shape = _evaluated(dims, variant.symbols, sizes)
                small = math.prod(shape) * dtype.itemsize < variant.target.shared_gradients
                kept = shared if small and handed_on == first else alone
                kept[first].append((position, shape, dtype))
        # The gradients that each part starts to write.
        self.begun = [_Allocations(*each, variant.target) for each in zip(shared, alone)]
        # The leaves that a part and those after it read, and those that no part after it reads.
        self.read_from = [
            [leaf for leaf in variant.leaves_read if self.leaf_parts[leaf] >= part]
            for part in range(self.part_count)
        ]
        self.read_last = [
            [leaf for leaf in variant.leaves_read if self.leaf_parts[leaf] == part]
            for part in range(self.part_count)
        ]


def _prepare_extension() -> None:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    _deepwell.tensors_prepare(
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),  # PyTorch 2.10 and later
        torch.Tensor,
        torch.nn.Parameter,
        os.path.join(folder, "libtorch_cpu.so"),
        os.path.join(folder, "libtorch_python.so"),
    )


_prepare_extension()


class _Variant:
    """The engine for one choice of gradients: which leaves need one, which outputs receive one. With ``keeps`` it leaves
    what depends on parameters alone to calls of its own."""

    def __init__(
        self,
        graph: _deepwell.Graph,
        wrt: tuple[int, ...],
        grad_outputs: tuple[int, ...],
        policy: PrecisionPolicy | None,
        constant_outputs: list[int],
        target: Target,
        leaves: Sequence[tuple[Sequence[Any], torch.dtype]],
        symbols: Sequence[str],
        keeps: bool = False,
    ) -> None:
        """``leaves``: their shapes, by ``symbols``, and dtypes."""
        self.wrt = wrt
        self.leaves, self.symbols = leaves, symbols
        self.target = target
        self.constant_outputs = constant_outputs
        self.grad_outputs = grad_outputs
        self.engine = target.engine(graph, grad_outputs, wrt, policy=policy, keep_values=keeps)
        self.kept_leaves: list[int] = self.engine.kept_leaves
        self.has_grad = [self.engine.has_grad(index) for index in range(len(wrt))]
        self.leaves_read = self.engine.backward_leaves
        self.outputs_read = self.engine.backward_outputs
        self._prepared: dict[tuple[int, ...], _Prepared] = {}

    def prepared(self, sizes: tuple[int, ...]) -> _Prepared:
        """Returns what a run needs at these sizes, and by what else the target's plans depend on: on a CPU the current
        number of threads, because kernels' scratch is per thread, on a GPU whether PyTorch multiplies F32 as TF32."""
        key = (self.target.plan_key(), *sizes)
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= 32:
                self._prepared.pop(next(iter(self._prepared)), None)
            with self.target.current():
                plan = self.engine.plan(sizes, self.target.tf32())
            prepared = self._prepared[key] = _Prepared(self, plan, sizes)
        return prepared

    def plan(self, sizes: tuple[int, ...]) -> _deepwell.Plan:
        return self.prepared(sizes).plan


def _with_leaves(graph: dict[str, Any], role: str, dtype: str, size: int, count: int) -> str:
    """Appends leaves to the parsed graph, which it changes, under names that are free. Returns the graph as JSON."""
    names = {leaf["name"] for leaf in graph["leaves"]}
    for node in graph["nodes"]:
        for output in node["outputs"]:
            names.add(output if isinstance(output, str) else output["name"])
    for index in range(count):
        name = role if count == 1 else f"{role}.{index}"
        while name in names:
            name += "_"
        names.add(name)
        graph["leaves"].append({"name": name, "role": role, "dtype": dtype, "shape": [size]})
    return json.dumps(graph)


STATISTICS = 5  # numbers of an operand: signal, noise, elements other than 0, underflow, saturated


class Program:
    """A captured graph, ready to run on the tensors of a target. It has one engine for each way in which it is
    differentiated.

    A precision with stochastic rounding needs a seed. A graph without one gets it as its last leaf. With ``observed``
    more leaves follow, one for each layer with short operands: their gradients are the statistics of the operands.
    """

    def __init__(
        self,
        graph_json: str,
        pool: ArenaPool,
        policy: PrecisionPolicy | None = None,
        target: Target | None = None,
        deferred: Mapping[int, Deferred] | None = None,
        observed: bool = False,
    ) -> None:
        self.target = target or Target()
        # Outputs that hold the input of a linear layer. Callers get the layer's result, which is made when it is used.
        self.deferred = dict(deferred or {})
        parsed = json.loads(graph_json)
        needs_seed = policy is not None and policy.needs_seed
        if needs_seed and all(leaf["role"] != "seed" for leaf in parsed["leaves"]):
            graph_json = _with_leaves(parsed, "seed", "i64", 2, 1)
        self.graph = _deepwell.Graph(graph_json)
        # The layers whose operands are observed, in the order of their leaves, which are the last ones.
        self.observed: list[dict[str, Any]] = []
        if observed and policy is not None:
            self.observed = [each for each in policy.choices(self.graph) if "bounds" in each]
            numbers = STATISTICS * len(OPERANDS)
            graph_json = _with_leaves(parsed, "statistics", "f64", numbers, len(self.observed))
            self.graph = _deepwell.Graph(graph_json)
        self.policy = policy  # None: the graph's own precision
        self.symbols: list[str] = parsed["symbols"]
        self.leaf_roles = [leaf["role"] for leaf in parsed["leaves"]]
        self.leaf_dtypes = [DTYPES[leaf["dtype"]] for leaf in parsed["leaves"]]
        self.seed_leaf = self.leaf_roles.index("seed") if "seed" in self.leaf_roles else None
        self._leaf_shapes = [leaf["shape"] for leaf in parsed["leaves"]]
        made = ("seed", "statistics")
        self.check_inputs([i for i, role in enumerate(self.leaf_roles) if role not in made])
        self.pool = pool
        self._lock = threading.Lock()
        self._variants: dict[tuple[tuple[int, ...], tuple[int, ...], bool], _Variant] = {}
        # Outputs that received gradients in the last backward; None before the first one.
        self._expected: tuple[int, ...] | None = None
        self._last_wrt: tuple[int, ...] = ()
        self.output_count = len(parsed["outputs"])
        self._depends: list[frozenset[int]] = []
        self._constant_outputs: dict[tuple[int, ...], list[int]] = {}

    def set_dependencies(self, depends: Sequence[frozenset[int]]) -> None:
        """Sets for each output the leaves by which it can be differentiated."""
        self._depends = list(depends)

    def constant_outputs(self, wrt: tuple[int, ...]) -> list[int]:
        """Returns the outputs that do not depend on the leaves ``wrt``; they require no gradient."""
        found = self._constant_outputs.get(wrt)
        if found is None:
            wanted = frozenset(wrt)
            found = [i for i, leaves in enumerate(self._depends) if not leaves & wanted]
            self._constant_outputs[wrt] = found
        return found

    def check_inputs(self, inputs: Sequence[int]) -> None:
        """Checks only these leaves at each call; the caller guarantees the others."""
        self._inputs = [(i, self.leaf_dtypes[i], len(self._leaf_shapes[i])) for i in inputs]
        self._check = _shape_check([self._leaf_shapes[i] for i in inputs], self.symbols)

    def accepts(self, leaves: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> bool:
        """Returns whether the inputs have the shapes and dtypes that the graph was captured for."""
        shapes = []
        for index, dtype, rank in self._inputs:
            leaf = leaves[index]
            if leaf.dtype != dtype or leaf.dim() != rank:
                return False
            shapes.append(leaf.shape)
        return self._check(shapes, sizes)

    def leaf_shape(self, leaf: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that a leaf has at these sizes of the symbols."""
        return _evaluated(self._leaf_shapes[leaf], self.symbols, sizes)

    def call_bytes(self, leaves: list[torch.Tensor | None], sizes: tuple[int, ...]) -> int:
        """Returns the bytes of arena and outputs of a call at these sizes, with the gradients that ``leaves``
        require."""
        wrt = self._wrt(leaves)
        plan = self.variant(wrt, self._expected_outputs(sizes) if wrt else ()).plan(sizes)
        return plan.arena_bytes + sum(
            math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in plan.outputs
        )

    def variant(
        self, wrt: tuple[int, ...], grad_outputs: tuple[int, ...], keeps: bool = False
    ) -> _Variant:
        key = (wrt, grad_outputs, keeps)
        variant = self._variants.get(key)
        if variant is None:
            with self._lock:
                variant = self._variants.get(key)
                if variant is None:
                    variant = self._variants[key] = _Variant(
                        self.graph,
                        wrt,
                        grad_outputs,
                        self.policy,
                        self.constant_outputs(wrt),
                        self.target,
                        list(zip(self._leaf_shapes, self.leaf_dtypes)),
                        self.symbols,
                        keeps,
                    )
        return variant

    def precisions(self) -> list[dict[str, Any]]:
        """Returns the precision of each linear layer, and why; empty without a policy."""
        return [] if self.policy is None else self.policy.choices(self.graph)

    def code_products(self) -> tuple[int, int, str]:
        """Returns how many products of operands with scales of blocks are multiplied as codes and how many are simulated,
        by the engine with the most, and why the first one is simulated; "" if the target has no tensor cores for it."""
        found = [variant.engine.code_products for variant in self._variants.values()]
        return max(found, key=lambda each: each[0] + each[1], default=(0, 0, ""))

    def expect(self, grad_outputs: tuple[int, ...]) -> None:
        """Sets the outputs of the last backward, for which the next forward prepares."""
        self._expected = grad_outputs

    def _expected_outputs(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the outputs that backward will probably be called on.

        They are those of the last backward. Before the first one they are the loss if there is one (a floating-point
        scalar), else every floating-point output. A wrong guess costs one more forward and changes no gradient.
        """
        if self._expected is None:
            outputs = self.variant((), ()).plan(sizes).outputs
            floating = [
                i for i, (dtype, _) in enumerate(outputs) if DTYPES[dtype].is_floating_point
            ]
            scalars = [i for i in floating if len(outputs[i][1]) == 0]
            self._expected = tuple(scalars[:1] or floating)
        return self._expected

    def plans(self) -> list[_deepwell.Plan]:
        """Returns the plans that runs use now, of those that were made so far."""
        now = self.target.plan_key()
        return [
            prepared.plan
            for variant in list(self._variants.values())
            for key, prepared in list(variant._prepared.items())
            if key[0] == now
        ]

    def lease(self, prepared: _Prepared) -> Lease:
        return self.pool.lease(prepared.segment_bytes, self.target)

    def _wrt(self, leaves: list[torch.Tensor | None]) -> tuple[int, ...]:
        """Returns the leaves that require a gradient now."""
        if not torch.is_grad_enabled():
            return ()
        found = self._last_wrt = _deepwell.differentiable(leaves, self._last_wrt)
        return found

    def run(
        self,
        leaves: list[torch.Tensor],
        sizes: tuple[int, ...],
        replay: Replay | None = None,
        kept: KeptValues | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs forward on ``leaves`` (one tensor per leaf, in graph order), differentiably. ``replay`` computes the
        same outputs in PyTorch, for backwards that the engine cannot run. ``kept`` has, or gets, the values that depend
        on parameters alone."""
        self.target.begin()
        wrt = self._wrt(leaves)
        if not wrt:
            variant = self.variant((), ())
            outputs, lease = self._forward(variant.prepared(sizes), self.target.operands(leaves))
            lease.release()
            return tuple(self.presented(outputs, self.layers(outputs, leaves, sizes)))
        if kept is not None and (self.policy is None or self.target.is_recorded()):
            kept = None  # a CUDA graph of the caller's would not compute the values again
        variant = self.variant(wrt, self._expected_outputs(sizes), kept is not None)
        return _apply(_Pass(self, variant, sizes, replay, leaves, kept))

    def _forward(
        self,
        prepared: _Prepared,
        leaves: Sequence[torch.Tensor],
        keep: Callable[[Lease], None] | None = None,
    ) -> tuple[list[torch.Tensor], Lease]:
        outputs = [self.target.new(shape, dtype) for shape, dtype in prepared.outputs]
        lease = self.lease(prepared)
        if keep is not None:
            keep(lease)
        self.target.forward(prepared.plan, lease, leaves, outputs)
        return outputs, lease

    def layers(
        self,
        outputs: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        sizes: tuple[int, ...],
    ) -> dict[int, Layer]:
        """Returns the layers of deferred outputs, by output."""
        return {
            index: Layer(
                deferred,
                outputs[index],
                leaves,
                None if deferred.shape is None else _evaluated(deferred.shape, self.symbols, sizes),
            )
            for index, deferred in self.deferred.items()
        }

    @staticmethod
    def presented(outputs: list[torch.Tensor], layers: Mapping[int, Layer]) -> list[torch.Tensor]:
        """Returns the outputs as callers get them."""
        if not layers:
            return outputs
        presented = list(outputs)
        for index, layer in layers.items():
            presented[index] = LazyLogits.of(layer)
        return presented

    def dense(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Returns an output's gradient as a plan reads it."""
        if grad is None:
            return None
        if grad.layout is not torch.strided or grad.is_neg():
            grad = grad.resolve_neg().to_dense()
        return self.target.operand(grad)


# Computes the graph's outputs in PyTorch, with autograd's graph.
Replay = Callable[[], "list[torch.Tensor]"]


class _Pass:
    """One forward and its backward, which runs in parts: the state that their autograd functions share.

    Part 0 belongs to the function that made the outputs (_Run). Each later part belongs to a function of its own
    (_Part); tokens chain them. Autograd runs them in order and accumulates the gradients of each part before it runs
    the next one. The new gradients therefore never all exist beside those in ``.grad``, and DistributedDataParallel can
    send the first ones while the others are computed.
    """

    __slots__ = (
        "program", "variant", "sizes", "prepared", "lease", "replay", "leaves", "operands", "copied", "keeps_graph",
        "bound", "versions", "grads", "more", "running", "all_at_once", "differentiated_again", "kept",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        variant: _Variant,
        sizes: tuple[int, ...],
        replay: Replay | None,
        leaves: list[torch.Tensor],
        kept: KeptValues | None,
    ) -> None:
        self.program, self.variant, self.sizes = program, variant, sizes
        self.kept = kept  # None, unless the variant keeps values
        self.prepared = variant.prepared(sizes)
        self.lease: Lease | None = None  # the arena of forward
        self.replay = replay
        self.leaves = leaves
        self.more: dict[int, torch.Tensor] = {}  # gradients beside the engine's

    def forward(self) -> list[torch.Tensor]:
        """Runs forward and returns the graph's outputs."""
        leaves = self.leaves
        # The operands are kept for backward, and to run forward again if unexpected gradients arrive.
        self.operands = operands = self.program.target.operands(leaves)
        keep = self.share_kept if self.prepared.kept_bytes else None
        outputs, self.lease = self.program._forward(self.prepared, operands, keep)
        self.versions = _deepwell.versions(leaves)
        # Copies belong to this pass: a change of the original does not matter.
        self.copied = frozenset(
            [i for i, leaf in enumerate(leaves) if operands[i] is not leaf]
            if operands is not leaves
            else ()
        )
        return outputs

    def share_kept(self, lease: Lease) -> None:
        """Gives forward's arena the values that depend on parameters alone, which this or an earlier pass computes."""
        prepared, variant, target = self.prepared, self.variant, self.program.target
        read = set(variant.kept_leaves)
        leaves = [leaf if i in read else None for i, leaf in enumerate(self.operands)]

        def compute(block: Block) -> None:
            target.keep(prepared.plan, [*lease.addresses, block.segment.address], leaves)

        assert self.kept is not None
        state = _deepwell.states(self.leaves, variant.kept_leaves)
        key = variant, prepared.kept_layout
        lease.share(self.kept.lease(key, prepared.kept_bytes, state, target, compute))
        self.kept = None

    def through_layers(
        self, layers: Mapping[int, Layer], output_grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of the graph's outputs from those that the caller gives, and adds to ``more`` those of
        the parameters of deferred layers."""
        grads = list(output_grads)
        self.more = {}
        for index, layer in layers.items():
            if grads[index] is not None:
                grads[index], found = layer.backward(grads[index], self.variant.wrt)
                for leaf, grad in found.items():
                    known = self.more.get(leaf)
                    self.more[leaf] = grad if known is None else known + grad
        return grads

    def begin_with_layers_alone(self) -> None:
        """Handles gradients that reach nothing but the parameters of deferred layers."""
        self.keeps_graph = _keeps_graph()
        self.grads = [None] * len(self.variant.wrt)
        self.bound = self.running = None
        self.all_at_once = True

    def begin(self, outputs, output_grads) -> None:
        """Stores what all parts read, before part 0."""
        self.keeps_graph = _keeps_graph()
        leaves: list[torch.Tensor | None] = [None] * len(self.operands)
        for index in self.variant.leaves_read:
            leaves[index] = self.operands[index]
        self.bound = leaves, outputs, output_grads
        self.grads: list[torch.Tensor | None] = [None] * len(self.variant.wrt)
        self.running = self.lease
        if self.keeps_graph:
            # Backward overwrites what forward saved, so this one runs on a copy and the original stays for the next.
            self.running = self.program.lease(self.prepared)
            self.running.copy_from(self.lease, self.prepared.saved_bytes)
            if self.lease.kept is not None:
                self.running.share(self.lease.kept.use())
        self.all_at_once = False

    def begin_again(self, leaves: list[torch.Tensor], used: tuple[int, ...], output_grads) -> None:
        """Handles gradients that this engine does not expect: runs forward again with an engine that does, and its
        whole backward."""
        self.keeps_graph = _keeps_graph()
        variant = self.program.variant(self.variant.wrt, used)
        prepared = variant.prepared(self.sizes)
        outputs, lease = self.program._forward(prepared, leaves)
        seeds = [self.program.dense(output_grads[index]) for index in used]
        target = self.program.target
        self.grads = [None] * len(variant.wrt)
        for allocations, late in zip(prepared.begun, prepared.late):
            allocations.make(self.grads)
            for index, size in late:
                lease.begin(index, target.arena(size))
        target.backward(prepared.plan, -1, lease, leaves, outputs, seeds, self.grads)
        self.bound = self.running = None
        self.all_at_once = True

    def begin_in_pytorch(self, leaves, used: tuple[int, ...], output_grads) -> None:
        """Handles a backward that is itself differentiated, or that runs on batches of gradients: runs forward again in
        PyTorch, and PyTorch's backward."""
        self.keeps_graph = _keeps_graph()
        if self.replay is None or self.program.seed_leaf is not None:
            raise RuntimeError(
                "this backward needs PyTorch's own graph (a second derivative, or gradients in batches), but "
                "the forward that Deepwell ran drew random numbers that PyTorch cannot repeat: call "
                "deepwell.restore(model) first, or model.eval()"
            )
        if self.program.policy is not None:
            raise RuntimeError(
                "this backward needs PyTorch's own graph (a second derivative, or gradients in batches), which "
                f"has no precision {self.program.policy.name!r}: call deepwell.restore(model) first"
            )
        with torch.enable_grad():
            outputs = self.replay()
            self.grads = list(
                torch.autograd.grad(
                    [outputs[index] for index in used],
                    [leaves[leaf] for leaf in self.variant.wrt],
                    [output_grads[index] for index in used],
                    create_graph=self.differentiated_again,
                    allow_unused=True,
                )
            )
        self.bound = self.running = None
        self.all_at_once = True

    def run(self, part: int) -> list[torch.Tensor | None]:
        """Runs one part. Returns the gradients of the leaves in ``prepared.leaves_by_part``."""
        prepared = self.prepared
        if not self.all_at_once:
            if part > 0:  # hooks of the user have run since the last part
                self.check_unchanged(self.bound[0], prepared.read_from[part])
            for index, size in prepared.late[part]:
                self.running.begin(index, self.program.target.arena(size))
            prepared.begun[part].make(self.grads)
            self.program.target.backward(prepared.plan, part, self.running, *self.bound, self.grads)
            self.running.free(prepared.freed[part])
            # Frees what only the parts so far have read (mostly the logits).
            leaves, outputs, _ = self.bound
            for leaf in prepared.read_last[part]:
                leaves[leaf] = None
            for index, last in enumerate(prepared.output_parts):
                if last <= part:
                    outputs[index] = None
        if part == prepared.part_count - 1:
            if self.running is not None:
                self.running.release()
            self.bound = self.running = None
            if not self.keeps_graph and self.lease is not None:
                self.lease.release()
                self.lease = None
        return self._taken(part)

    def _taken(self, part: int) -> list[torch.Tensor | None]:
        """Returns the gradients that a part hands on, and keeps no reference: autograd then stores them without a
        copy."""
        grads, taken = self.grads, []
        for position in self.prepared.grads_by_part[part]:
            taken.append(grads[position])
            grads[position] = None
        if self.more:
            for index, leaf in enumerate(self.prepared.leaves_by_part[part]):
                more, grad = self.more.pop(leaf, None), taken[index]
                if more is not None:
                    taken[index] = more if grad is None else grad.add_(more)
        return taken

    def check_unchanged(self, leaves: list[torch.Tensor], read: Sequence[int]) -> None:
        """Raises an error if one of the leaves ``read`` has been changed in place since forward."""
        if _deepwell.same_versions(leaves, self.versions, read):
            return
        versions = memoryview(self.versions).cast("q")
        for leaf in read:
            found = leaves[leaf]
            if found._version != versions[leaf] and leaf not in self.copied:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a tensor of shape {list(found.shape)} is at version {found._version}, and "
                    f"backward needs version {versions[leaf]}"
                )

    def unchanged_operands(self) -> list[torch.Tensor]:
        """Returns every operand of forward, outside of autograd's graph. Raises an error if one has been changed in
        place since."""
        self.check_unchanged(self.leaves, range(len(self.leaves)))
        return [operand.detach() for operand in self.operands]

    def unchanged_leaves(self) -> list[torch.Tensor]:
        """Returns every leaf of forward, as part of autograd's graph. Raises an error if one has been changed in place
        since."""
        self.check_unchanged(self.leaves, range(len(self.leaves)))
        return self.leaves


class _Function(torch.autograd.Function):
    @classmethod
    def call(cls, *arguments):
        """Is ``apply`` without its loop over the arguments for torch.func, under which no engine runs."""
        return super(torch.autograd.Function, cls).apply(*arguments)


class _Run(_Function):
    """Forward, and part 0 of backward. Its arguments are the leaves of part 0, whose gradients it returns.

    Outputs that backward reads are saved through autograd, and leaves are compared with their versions: changing either
    in place before backward is an error, as in PyTorch."""

    @staticmethod
    def forward(ctx, shared: _Pass, token, *own):
        del own
        program = shared.program
        outputs = shared.forward()
        ctx.layers = program.layers(outputs, shared.leaves, shared.sizes)
        presented = program.presented(outputs, ctx.layers)
        ctx.shared, ctx.token = shared, token is not None
        # Without anything saved, autograd would let a second backward through.
        read = [outputs[index] for index in shared.variant.outputs_read]
        ctx.save_for_backward(*read or [program.target.token()])
        if shared.prepared.constant_outputs:
            constant = [presented[index] for index in shared.prepared.constant_outputs]
            ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return tuple(presented)

    @staticmethod
    def backward(ctx, *output_grads):
        saved = ctx.saved_tensors  # a second backward without retain_graph fails here
        shared, program = ctx.shared, ctx.shared.program
        used = tuple([index for index, grad in enumerate(output_grads) if grad is not None])
        if not used:
            return (None, None, *[None] * len(shared.prepared.leaves_by_part[0]))
        shared.check_unchanged(shared.leaves, shared.variant.leaves_read)
        # Grad mode is on in a backward that is itself differentiated (create_graph).
        shared.differentiated_again = torch.is_grad_enabled()
        if shared.differentiated_again or not _all_plain(output_grads):
            shared.begin_in_pytorch(shared.unchanged_leaves(), used, output_grads)
            return _Run._hand_on(ctx)
        if ctx.layers:
            output_grads = shared.through_layers(ctx.layers, output_grads)
            used = tuple([index for index in used if output_grads[index] is not None])
            if not used:
                shared.begin_with_layers_alone()
                return _Run._hand_on(ctx)
        program.expect(used)
        if set(used) <= set(shared.variant.grad_outputs):
            outputs: list[torch.Tensor | None] = [None] * program.output_count
            for index, tensor in zip(shared.variant.outputs_read, saved):
                outputs[index] = tensor
            seeds = [program.dense(output_grads[index]) for index in shared.variant.grad_outputs]
            shared.begin(outputs, seeds)
        else:
            shared.begin_again(shared.unchanged_operands(), used, output_grads)
        return _Run._hand_on(ctx)

    @staticmethod
    def _hand_on(ctx):
        shared = ctx.shared
        if not shared.keeps_graph:
            shared.leaves = shared.operands = shared.replay = None
            # Whoever keeps the loss keeps ``ctx``, and the layers keep the input of the head.
            ctx.layers = {}
        grads = shared.run(0)
        return (None, shared.program.target.token() if ctx.token else None, *grads)


class _Part(_Function):
    """A later part of backward. Its forward only makes the token that links it to the previous part."""

    @staticmethod
    def forward(ctx, shared: _Pass, part: int, token, *own):
        del own
        ctx.shared, ctx.part, ctx.token = shared, part, token is not None
        return shared.program.target.token()

    @staticmethod
    def backward(ctx, grad):
        del grad
        shared = ctx.shared
        grads = shared.run(ctx.part)
        return (None, None, shared.program.target.token() if ctx.token else None, *grads)


def _apply(shared: _Pass) -> tuple[torch.Tensor, ...]:
    """Applies the functions of one pass, last part first, and returns the outputs."""
    leaves, parts = shared.leaves, shared.prepared.leaves_by_part
    token = None
    for part in range(len(parts) - 1, 0, -1):
        token = _Part.call(shared, part, token, *[leaves[leaf] for leaf in parts[part]])
    return _Run.call(shared, token, *[leaves[leaf] for leaf in parts[0]])


def _all_plain(grads: Sequence[torch.Tensor | None]) -> bool:
    """Returns whether these tensors have memory of their own: no batches of vmap, no fake tensors."""
    for grad in grads:
        if grad is not None:
            try:
                grad.data_ptr()
            except RuntimeError:
                return False
            if type(grad) not in (torch.Tensor, torch.nn.Parameter):
                return False
    return True


def _keeps_graph() -> bool:
    """Returns whether the current backward keeps the graph; True if PyTorch does not report it."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else ask()
