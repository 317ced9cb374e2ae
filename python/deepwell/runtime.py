"""Running a captured graph behind a module: binding, autograd, arenas.

One autograd.Function stands for the whole graph. Its forward leases an arena, in which the engine keeps
what backward needs; its backward hands each parameter its gradient. PyTorch's own rules stay in force:
inputs and parameters are saved through autograd, so that changing one in place between forward and
backward, or a second backward, is the error it always was.
"""

from __future__ import annotations

import json
import threading
from typing import Any, Sequence

import torch
from torch.autograd.function import once_differentiable

from deepwell import _deepwell
from deepwell.arena import ArenaPool, Lease

# Tensors from this size on are asked for in huge pages.
_LARGE = 4 << 20

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
    """A function of (input shapes, sizes) that is true where every dim is what the graph says."""
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


class _Variant:
    """The engine for one choice of gradients: which leaves want one, which outputs receive one."""

    def __init__(
        self, graph: _deepwell.Graph, wrt: tuple[int, ...], grad_outputs: tuple[int, ...]
    ) -> None:
        self.wrt = wrt
        self.grad_outputs = grad_outputs
        self.engine = _deepwell.Engine(graph, grad_outputs, wrt)
        self.has_grad = [self.engine.has_grad(index) for index in range(len(wrt))]
        self.leaves_read = self.engine.backward_leaves
        self.outputs_read = self.engine.backward_outputs
        self._plans: dict[tuple[int, ...], _deepwell.Plan] = {}

    def plan(self, sizes: tuple[int, ...]) -> _deepwell.Plan:
        """The plan at these sizes and the present number of threads: kernels' scratch is per thread."""
        key = (_deepwell.get_threads(), *sizes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= 32:
                self._plans.pop(next(iter(self._plans)), None)
            plan = self._plans[key] = self.engine.plan(sizes)
        return plan


class Program:
    """A captured graph, ready to run on tensors: one engine for each way it is differentiated."""

    def __init__(self, graph_json: str, pool: ArenaPool) -> None:
        self.graph = _deepwell.Graph(graph_json)
        parsed = json.loads(graph_json)
        self.symbols: list[str] = parsed["symbols"]
        self.leaf_roles = [leaf["role"] for leaf in parsed["leaves"]]
        self.leaf_dtypes = [DTYPES[leaf["dtype"]] for leaf in parsed["leaves"]]
        self.seed_leaf = self.leaf_roles.index("seed") if "seed" in self.leaf_roles else None
        self._check = _shape_check([leaf["shape"] for leaf in parsed["leaves"]], self.symbols)
        self._leaf_shapes = [leaf["shape"] for leaf in parsed["leaves"]]
        self._pool = pool
        self._lock = threading.Lock()
        self._variants: dict[tuple[tuple[int, ...], tuple[int, ...]], _Variant] = {}
        # Outputs that received gradients last time; None until a backward has told.
        self._expected: tuple[int, ...] | None = None
        self.output_count = len(parsed["outputs"])

    def accepts(self, leaves: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> bool:
        """Whether these tensors have the shapes and dtypes that the graph was captured for."""
        shapes = []
        for leaf, dtype, shape in zip(leaves, self.leaf_dtypes, self._leaf_shapes):
            if leaf is None:  # the seed is made at each run
                shapes.append(shape)
            elif leaf.dtype != dtype or leaf.dim() != len(shape):
                return False
            else:
                shapes.append(leaf.shape)
        return self._check(shapes, sizes)

    def variant(self, wrt: tuple[int, ...], grad_outputs: tuple[int, ...]) -> _Variant:
        key = (wrt, grad_outputs)
        variant = self._variants.get(key)
        if variant is None:
            with self._lock:
                variant = self._variants.get(key)
                if variant is None:
                    variant = self._variants[key] = _Variant(self.graph, wrt, grad_outputs)
        return variant

    def expect(self, grad_outputs: tuple[int, ...]) -> None:
        """The outputs that the last backward was called on: the next forward prepares for them."""
        self._expected = grad_outputs

    def _expected_outputs(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Outputs that backward will probably be called on.

        What the last backward used; before the first, the loss where there is one (a floating-point
        scalar), else every floating-point output. A wrong guess costs one more forward, no gradient.
        """
        if self._expected is None:
            outputs = self.variant((), ()).plan(sizes).outputs
            floating = [i for i, (dtype, _) in enumerate(outputs) if DTYPES[dtype].is_floating_point]
            scalars = [i for i in floating if len(outputs[i][1]) == 0]
            self._expected = tuple(scalars[:1] or floating)
        return self._expected

    def lease(self, plan: _deepwell.Plan) -> Lease:
        return self._pool.lease(plan.arena_bytes)

    def _wrt(self, leaves: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
        """Leaves that want a gradient now."""
        if not torch.is_grad_enabled():
            return ()
        return tuple(
            [i for i, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad]
        )

    def prepare(self, leaves: list[torch.Tensor], sizes: tuple[int, ...]) -> None:
        """Engine and plan for a run on such leaves, made now rather than then."""
        _deepwell.set_threads(torch.get_num_threads())
        wrt = self._wrt(leaves)
        self.variant(wrt, self._expected_outputs(sizes) if wrt else ()).plan(sizes)

    def run(self, leaves: list[torch.Tensor], sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Forward on ``leaves`` (one tensor per leaf, in graph order), differentiable."""
        _deepwell.set_threads(torch.get_num_threads())
        wrt = self._wrt(leaves)
        if not wrt:
            variant = self.variant((), ())
            leaves = [leaf.contiguous() for leaf in leaves]
            return tuple(self._forward(variant, variant.plan(sizes), leaves)[0])
        variant = self.variant(wrt, self._expected_outputs(sizes))
        return _Run.apply(self, variant, sizes, *leaves)

    def _forward(
        self, variant: _Variant, plan: _deepwell.Plan, leaves: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Lease]:
        outputs = [_empty(shape, DTYPES[dtype]) for dtype, shape in plan.outputs]
        lease = self.lease(plan)
        plan.forward(lease.arena.address, _addresses(leaves), _addresses(outputs))
        return outputs, lease


class _Run(torch.autograd.Function):
    """Forward and backward of a Program. What backward reads is saved through autograd."""

    @staticmethod
    def forward(ctx, program: Program, variant: _Variant, sizes: tuple[int, ...], *leaves):
        plan = variant.plan(sizes)
        contiguous = [leaf.contiguous() for leaf in leaves]
        outputs, ctx.lease = program._forward(variant, plan, contiguous)
        ctx.program, ctx.variant, ctx.plan, ctx.sizes = program, variant, plan, sizes
        ctx.threads = _deepwell.get_threads()
        # Copies made for contiguity are ours alone; everything else goes through autograd, which
        # notices when it is changed in place before backward.
        ctx.copies = {
            index: copy
            for index, (copy, leaf) in enumerate(zip(contiguous, leaves))
            if copy is not leaf
        }
        ctx.saved_leaves = [index for index in variant.leaves_read if index not in ctx.copies]
        ctx.save_for_backward(
            *[leaves[index] for index in ctx.saved_leaves],
            *[outputs[index] for index in variant.outputs_read],
        )
        # Kept to run forward again, when gradients arrive that nobody expected. References only.
        ctx.leaves = [None if index in ctx.copies else leaf for index, leaf in enumerate(leaves)]
        ctx.versions = [leaf._version for leaf in leaves]
        ctx.shapes = [leaf.shape for leaf in leaves]
        ctx.mark_non_differentiable(
            *[output for output in outputs if not output.dtype.is_floating_point]
        )
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *output_grads):
        saved = ctx.saved_tensors  # a second backward without retain_graph fails here
        program, variant, plan = ctx.program, ctx.variant, ctx.plan
        nothing = (None,) * (3 + len(ctx.versions))
        used = tuple([index for index, grad in enumerate(output_grads) if grad is not None])
        if not used or ctx.lease is None:
            return nothing
        program.expect(used)
        _deepwell.set_threads(ctx.threads)  # what the plan has room for
        keeps_graph = _keeps_graph()
        if set(used) <= set(variant.grad_outputs):
            leaves: list[torch.Tensor | None] = [None] * len(ctx.versions)
            for index, tensor in zip(ctx.saved_leaves, saved):
                leaves[index] = tensor
            for index, copy in ctx.copies.items():
                leaves[index] = copy
            outputs: list[torch.Tensor | None] = [None] * program.output_count
            for index, tensor in zip(variant.outputs_read, saved[len(ctx.saved_leaves) :]):
                outputs[index] = tensor
            lease = ctx.lease
            if keeps_graph:
                # Backward overwrites what forward saved; keep the original for the next backward.
                lease = program.lease(plan)
                lease.arena.copy_from(ctx.lease.arena, plan.saved_bytes)
        else:
            # Gradients arrived that this engine does not take: run forward again with one that does.
            leaves = _unchanged_leaves(ctx)
            variant = program.variant(variant.wrt, used)
            plan = variant.plan(ctx.sizes)
            outputs, lease = program._forward(variant, plan, leaves)
        if not keeps_graph:
            ctx.leaves = None
            if lease is not ctx.lease:
                ctx.lease.release()
            ctx.lease = None
        seeds = [output_grads[index] for index in variant.grad_outputs]
        seeds = [None if seed is None else seed.contiguous() for seed in seeds]
        wanted = ctx.needs_input_grad[3:]
        grads = [
            _empty(ctx.shapes[leaf], program.leaf_dtypes[leaf])
            if has and wanted[leaf]
            else None
            for leaf, has in zip(variant.wrt, variant.has_grad)
        ]
        plan.backward(lease.arena.address, *map(_addresses, (leaves, outputs, seeds, grads)))
        lease.release()
        result: list[Any] = [None] * len(ctx.versions)
        for leaf, grad in zip(variant.wrt, grads):
            result[leaf] = grad
        return (None, None, None, *result)


def _unchanged_leaves(ctx) -> list[torch.Tensor]:
    """Every leaf of the forward, or an error where one has been changed in place since."""
    leaves = []
    for index, (leaf, version) in enumerate(zip(ctx.leaves, ctx.versions)):
        if leaf is not None and leaf._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(leaf.shape)} is at version {leaf._version}, and "
                f"backward needs version {version}"
            )
        leaves.append(ctx.copies[index] if leaf is None else leaf.detach())
    return leaves


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that the engine is about to fill."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= _LARGE:
        _deepwell.advise(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _keeps_graph() -> bool:
    """Whether the backward under way was asked to keep the graph (assumed, where PyTorch can't say)."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else ask()


def fresh_seed() -> torch.Tensor:
    """Philox key and offset of one call, from PyTorch's CPU generator: torch.manual_seed repeats it."""
    return torch.empty(2, dtype=torch.int64).random_()


