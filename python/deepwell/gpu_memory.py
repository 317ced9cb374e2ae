"""The memory of a training step on a GPU, where every tensor and every segment of the arena is PyTorch's.

The blocks that PyTorch's allocator holds are listed for each phase of the step, in the order in which
``deepwell.runtime`` and the optimizer make and free them. Their sizes are what is asked of the allocator; it rounds
them up. docs/dryrun.md says which counters of PyTorch the sums are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Sequence

import torch

from deepwell import _deepwell
from deepwell.errors import UnsupportedError
from deepwell.optim import DTYPES as ADAMW_DTYPES

# PyTorch's allocator rounds a block up to a multiple of this.
_ROUNDING = 512
# A block above this size may be larger by up to as much again, if it was a free block before that is not worth a split.
_LARGE = 1 << 20
# Fields of a moment, in its dict's order. "library" is what libraries allocate by themselves: nothing on a GPU.
FIELDS = (
    "parameters",
    "constants",
    "inputs",
    "optimizer",
    "arena",
    "outputs",
    "output_gradients",
    "gradients",
    "temporaries",
    "library",
    "resident",
)
_SCALAR = 4  # bytes of a count of steps, of the token and of the norm of gradients
_SEED = 16

Blocks = list[int]


def rounded(size: int) -> int:
    """Returns the bytes that a block takes in PyTorch's allocator."""
    return -(-size // _ROUNDING) * _ROUNDING


def _moment(phase: str, part: int, held: dict[str, Blocks]) -> dict[str, Any]:
    blocks = [size for field in FIELDS for size in held.get(field, ())]
    allocated = sum(map(rounded, blocks))
    return {
        "phase": phase,
        "part": part,
        **{field: sum(held.get(field, ())) for field in FIELDS},
        "total": sum(blocks),
        "allocated": allocated,
        "allocated_most": allocated + sum(_LARGE for size in blocks if rounded(size) > _LARGE),
        "blocks": sum(1 for size in blocks if size),
    }


@dataclass(frozen=True)
class Update:
    """What an optimizer holds: always, and while it updates."""

    states: Blocks
    temporaries: Blocks


def _workspace(parameters: Sequence[tuple[int, torch.dtype]], max_norm: float | None) -> int:
    """Returns the bytes of deepwell.AdamW's workspace."""
    somewhere = 1 << 20  # the size depends on no address
    groups = []
    for dtype in {dtype for _, dtype in parameters}:
        flat = [
            value
            for size, kind in parameters
            if kind is dtype
            for value in (*[somewhere] * 5, size // dtype.itemsize, 0, 0, 0)
        ]
        name = ADAMW_DTYPES[dtype]
        groups.append(
            (name, name, name, "", flat, 1e-3, 0, 0.9, 0.999, 1e-8, 0.01, False, False, 0)
        )
    norm = somewhere if max_norm else 0
    needed = _deepwell.adamw_gpu("plan:sm_90a", groups, max_norm or 0.0, 0, 0, norm, 0, 0, 0, 0)
    if not isinstance(needed, int):
        raise UnsupportedError(f"the workspace of deepwell.AdamW is not known: {needed}")
    return needed


def update_of(
    name: str, parameters: Sequence[tuple[int, torch.dtype]], max_norm: float | None = None
) -> Update:
    """Returns what an optimizer holds on a GPU for parameters of these bytes and types, which have gradients."""
    if name == "none" or not parameters:
        return Update([], [])
    averages = [size for size, _ in parameters for _ in range(2)]
    counts = [_SCALAR] * len(parameters)
    if name == "adamw_fused":
        return Update(averages + counts, [])
    if name == "adamw_dw":
        norm = [_SCALAR] if max_norm else []
        return Update([*averages, *counts, *norm, _workspace(parameters, max_norm)], [])
    # torch.optim.AdamW by its foreach functions, whose counts of steps are on the host. The roots of the second averages
    # exist at once for all parameters of a type, and those of the type before it.
    by_type: dict[torch.dtype, Blocks] = {}
    for size, dtype in parameters:
        by_type.setdefault(dtype, []).append(size)
    largest = sorted(by_type.values(), key=sum)[-2:]
    return Update(averages, [size for blocks in largest for size in blocks])


@dataclass
class Leaves:
    """The memory of a graph's leaves: the storages by field of a moment, and the bytes of leaves that a run copies
    because its kernels cannot read them where they lie. ``cloned``: outputs of which the module returns a copy."""

    storages: dict[str, Blocks]
    copied: dict[int, int]
    cloned: tuple[int, ...] = ()


def _misaligned(tensor: torch.Tensor, alignment: int) -> bool:
    return tensor.numel() > 1 and tensor.storage_offset() * tensor.itemsize % alignment != 0


def leaves_of(
    tensors: dict[int, torch.Tensor],
    roles: Sequence[str],
    rest: Sequence[torch.Tensor],
    alignment: int,
    arrives: bool,
) -> Leaves:
    """``tensors`` by leaf; ``rest``: what else the caller holds. Each storage counts once, and each tensor if it
    ``arrives``: if it is elsewhere now, and moving it to the GPU gives it a storage of its own."""
    fields = {"parameter": "parameters", "constant": "constants"}
    storages: dict[str, Blocks] = {}
    seen: set[int] = set()
    for field, tensor in [
        *((fields.get(roles[i], "inputs"), tensor) for i, tensor in tensors.items()),
        *(("resident", tensor) for tensor in rest),
    ]:
        storage = tensor.untyped_storage()
        moved = arrives and tensor.device.type != "cuda"
        at = id(tensor) if moved else storage._cdata
        if at not in seen:
            seen.add(at)
            storages.setdefault(field, []).append(tensor.nbytes if moved else storage.nbytes())
    copied = {
        i: tensor.nbytes
        for i, tensor in tensors.items()
        if not tensor.is_contiguous() or (not arrives and _misaligned(tensor, alignment))
    }
    return Leaves(storages, copied)


def moments_of(
    program: Any,
    variant: Any,
    sizes: tuple[int, ...],
    leaves: Leaves,
    optimizer: str,
    accumulate: bool,
    kept: bytes,
    max_norm: float | None = None,
    released: int | None = None,
) -> list[dict[str, Any]]:
    """Returns what is held in forward, in each part of backward and in the update. ``kept``: for each output, whether
    the caller keeps it. ``released``: gradients are updated and freed after the part that completes them, except for as
    many bytes, at most, which wait for others."""
    prepared = variant.prepared(sizes)
    outputs = [math.prod(shape) * dtype.itemsize for shape, dtype in prepared.outputs]
    segments = prepared.plan.segments  # (bytes, saved bytes, last part, first part)
    shared = [prepared.kept_bytes] if prepared.kept_bytes else []  # by all micro-batches
    always = {field: list(blocks) for field, blocks in leaves.storages.items()}
    passing = dict(leaves.copied)  # operands that live from forward to their last reader
    if program.seed_leaf is not None:
        passing[program.seed_leaf] = _SEED
    forward = {
        **always,
        "arena": [size for size, _, _, first in segments if first == 0] + shared,
        "outputs": outputs + [outputs[i] for i in leaves.cloned],
        "inputs": [*always.get("inputs", ()), *passing.values()],
    }
    if not variant.wrt:
        return [_moment("forward", 0, forward)]
    if prepared.part_count > 1 or not variant.outputs_read:
        always["resident"] = [*always.get("resident", ()), _SCALAR]  # the token

    made = _gradients(prepared)
    everything = [size for size, _, _ in made]
    trained = []
    for leaf, has in zip(variant.wrt, variant.has_grad):
        if has and program.leaf_roles[leaf] == "parameter":
            dims = math.prod(program.leaf_shape(leaf, sizes))
            trained.append((dims * program.leaf_dtypes[leaf].itemsize, program.leaf_dtypes[leaf]))
    update = update_of(optimizer, trained, max_norm)
    always["optimizer"] = update.states
    earlier = everything if accumulate else []
    moments = [
        _moment(
            "forward",
            0,
            {
                **always,
                **{field: forward[field] for field in ("arena", "outputs", "inputs")},
                "gradients": earlier,
            },
        )
    ]
    clones = [outputs[i] for i in leaves.cloned if kept[i]]
    read = {leaf: prepared.leaf_parts[leaf] for leaf in passing if leaf in set(variant.leaves_read)}
    for part in range(prepared.part_count):
        held = {
            **always,
            "arena": [size for size, _, last, first in segments if first <= part <= last] + shared,
            "outputs": [
                size
                for i, size in enumerate(outputs)
                if kept[i] or (i in variant.outputs_read and prepared.output_parts[i] >= part)
            ]
            + clones,
            "inputs": [
                *always.get("inputs", ()),
                *(passing[leaf] for leaf, last in read.items() if last >= part),
            ],
            "output_gradients": [outputs[i] for i in variant.grad_outputs],
            "gradients": [
                *earlier,
                *(
                    size
                    for size, first, handed_on in made
                    if first <= part
                    and not ((accumulate or released is not None) and handed_on < part)
                ),
                *_waiting(made, part, released),
            ],
        }
        moments.append(_moment("backward", part, held))
    moments.append(
        _moment(
            "update",
            0,
            {
                **always,
                "arena": [segments[0][0], *shared],
                "outputs": [size for i, size in enumerate(outputs) if kept[i]] + clones,
                "gradients": everything if released is None else [],
                "temporaries": update.temporaries,
            },
        )
    )
    return moments


def _waiting(made: list[tuple[int, int, int]], part: int, released: int | None) -> Blocks:
    """Returns the most bytes of complete gradients that wait for an update while a part runs."""
    complete = sum(size for size, _, handed_on in made if handed_on < part)
    return [min(complete, released)] if released and complete else []


def _gradients(prepared: Any) -> list[tuple[int, int, int]]:
    """Returns the allocations of gradients: bytes, the part that begins to write them, and the part after which autograd
    has them."""
    handed_on = {
        position: part
        for part, positions in enumerate(prepared.grads_by_part)
        for position in positions
    }
    made = []
    for part, allocations in enumerate(prepared.begun):
        for position, shape, dtype in allocations.alone:
            made.append((math.prod(shape) * dtype.itemsize, part, handed_on[position]))
        for size, dtype, _ in allocations.blocks:
            made.append((size * dtype.itemsize, part, part))
    return made
