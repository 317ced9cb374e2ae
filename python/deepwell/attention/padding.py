"""Padding: which keys of a batch count, found out once per mask, and attention without the others.

Where the keys that count lie next to each other in every row, none is moved: the batch is one packed call, whose
sequences are each row's queries with those keys, and the gaps in between, which no query sees. Keys with holes between
them are gathered first.

What a tensor holds decides here, so the host waits for the GPU: once per mask. Where it must not (a graph is being
traced or captured), nothing is found out, and the mask stays a tensor.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from deepwell.attention import functional

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_KNOWN = 64


# ---- what is known about tensors -------------------------------------------------------------------------


class _Known:
    """What was found out about tensors, while they live and nothing is written to them. Another view of the same
    memory, as checkpoints make them of their arguments, counts as the same tensor."""

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[TensorWeakRef, Any]] = {}

    @staticmethod
    def _key(tensor: torch.Tensor) -> Any:
        version = -1 if tensor.is_inference() else tensor._version
        layout = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        return tensor.data_ptr(), version, *layout

    def get(self, tensor: torch.Tensor) -> Any:
        found = self._entries.get(self._key(tensor))
        return None if found is None or found[0]() is None else found[1]

    def put(self, tensor: torch.Tensor, value: Any) -> None:
        if len(self._entries) >= _MOST_KNOWN:
            kept = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
            self._entries = kept if len(kept) < _MOST_KNOWN else {}
        self._entries[self._key(tensor)] = (TensorWeakRef(tensor), value)

    def get_or_make(self, tensor: torch.Tensor, make: Callable[[], Any]) -> Any:
        if tensor.is_inference():  # writes to it leave no trace
            return make()
        value = self.get(tensor)
        if value is None:
            value = make()
            self.put(tensor, value)
        return value


_paddings, _causal = _Known(), _Known()


def why_not_read(*tensors: torch.Tensor) -> str:
    """ "" where the host may look into tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "a mask cannot be looked into while a graph is traced"
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return f"a mask is a {type(tensor).__name__}"
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a mask cannot be looked into while a CUDA graph is captured"
    return ""


# ---- padding ---------------------------------------------------------------------------------------------


class Padding:
    """Of each row of a batch, which keys count. ``kept`` is [batch, rows], boolean."""

    def __init__(self, kept: torch.Tensor, strange: torch.Tensor | None = None) -> None:
        """``strange``, a boolean, says that the mask holds other than "counts" and "does not"."""
        self.batch, self.rows = kept.shape
        place = torch.arange(self.rows, device=kept.device)
        self.kept = kept
        self._first = torch.where(kept, place, self.rows).amin(1)
        self._end = torch.where(kept, place + 1, 0).amax(1)
        self._counts = kept.sum(1)
        facts = [self._first, self._end, self._counts]
        if strange is not None:
            facts.append(strange.expand(self.batch).long())
        first, end, counts, *odd = torch.stack(facts).tolist()  # the host waits here
        self.strange = bool(odd and odd[0][0])
        self.has_empty_row = min(counts) == 0
        self.keeps_all = min(counts) == self.rows
        # Whether the keys of each row lie next to each other, and whether some row's begin behind its first.
        self.is_solid = all(e - f == n for f, e, n in zip(first, end, counts, strict=True))
        self.is_led = max(first) > 0
        self._longest, self._total = max(counts), sum(counts)
        ends = [0] + [i * self.rows + e for i, e in enumerate(end)]
        begins = [i * self.rows + f for i, f in enumerate(first)] + [self.batch * self.rows]
        self._widest_gap = max(b - e for b, e in zip(begins, ends, strict=True))
        self._made: dict[Any, Any] = {}

    def sequences(self, rows_q: int, placed: bool) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Offsets of queries and keys, and the greatest lengths. Both lie as they are, gaps included. ``placed``: a
        row's first query stands at its first key; those before it see nothing."""
        found = self._made.get((rows_q, placed))
        if found is None:
            found = self._made[rows_q, placed] = self._sequences(rows_q, placed)
        return found

    def _sequences(self, rows_q, placed):
        base = torch.arange(self.batch, device=self._first.device)
        first, end = base * self.rows + self._first, base * self.rows + self._end
        begin_q, end_q = base * rows_q, (base + 1) * rows_q
        if placed and self.is_led:
            # Of each row: the keys before it, the queries before it, itself.
            after_q = torch.stack([begin_q, begin_q + self._first, end_q], 1)
            after_k = torch.stack([first, first, end], 1)
        else:
            after_q, after_k = torch.stack([begin_q, end_q], 1), torch.stack([first, end], 1)

        def offsets(after: torch.Tensor, total: int) -> torch.Tensor:
            begin = after.new_zeros(1)
            return torch.cat([begin, after.flatten(), torch.full_like(begin, total)]).int()

        longest_k = max(self._longest, self._widest_gap)
        return (
            *(offsets(after_q, self.batch * rows_q), offsets(after_k, self.batch * self.rows)),
            *(rows_q, longest_k),
        )

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Where in [batch * rows] the keys that count are, their offsets by row, the greatest length."""
        found = self._made.get("gathered")
        if found is None:
            # Those that count first, in their order: without the wait of nonzero().
            order = torch.argsort(~self.kept.flatten(), stable=True)[: self._total]
            found = self._made["gathered"] = (order, self._offsets_kept(), self._longest)
        return found

    def whole_rows(self, rows_q: int) -> torch.Tensor:
        """Offsets of all queries, by row."""
        found = self._made.get(rows_q)
        if found is None:
            device = self._first.device
            base = torch.arange(self.batch + 1, device=device, dtype=torch.int32)
            found = self._made[rows_q] = base * rows_q
        return found

    def _offsets_kept(self) -> torch.Tensor:
        total = self._counts.cumsum(0)
        return torch.cat([total.new_zeros(1), total]).int()


class Sequences(NamedTuple):
    """Rows of several lengths that lie behind one another: their offsets, and the greatest length."""

    offsets: torch.Tensor
    longest: int


def of_keys_ignored(mask: torch.Tensor) -> Padding:
    """Of a key_padding_mask as PyTorch has it: boolean, True where a key is ignored, or added to the scores."""

    def look() -> Padding:
        if mask.dtype == torch.bool:
            return Padding(~mask)
        kept = mask == 0
        return Padding(kept, ~(kept | (mask == -torch.inf)).all())

    return _paddings.get_or_make(mask, look)


def is_causal(mask: torch.Tensor) -> bool:
    """Whether an attn_mask [rows, rows] hides from each row what lies behind it, and nothing else."""

    def look() -> bool:
        behind = torch.ones(mask.shape, dtype=torch.bool, device=mask.device).triu(1)
        if mask.dtype == torch.bool:
            return torch.equal(mask, behind)
        return torch.equal(mask, torch.zeros_like(mask).masked_fill_(behind, -torch.inf))

    return _causal.get_or_make(mask, look)


# ---- attention -------------------------------------------------------------------------------------------


def why_not(padding: Padding, rows_q: int, window: tuple[int, int]) -> str:
    """ "" where attend() gives what PyTorch gives with this padding as a mask."""
    if padding.strange:
        return "a mask for padding holds other numbers than 0 and -inf"
    if padding.has_empty_row:
        return "all keys of a row are padded"
    if padding.keeps_all or window == (-1, -1):
        return ""
    if rows_q != padding.rows:
        return "keys are padded, and queries and keys differ in number"
    if window[1] != 0 or not (padding.is_solid or window[0] < 0):
        return "padding with holes, or before a row, meets a window"
    return ""


class _Gather(torch.autograd.Function):
    """Rows of a tensor, each at most once. index_select's own gradient adds, by atomics."""

    @staticmethod
    def forward(ctx, rows, order):
        ctx.save_for_backward(order)
        ctx.count = rows.shape[0]
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient):
        (order,) = ctx.saved_tensors
        return spread(gradient, order, ctx.count), None


def spread(rows: torch.Tensor, order: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of gathering, zeros elsewhere."""
    return rows.new_zeros((count, *rows.shape[1:])).index_copy_(0, order, rows)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads, rows, dim] as [batch * rows, heads, dim]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    padding: Padding,
    dropout_p: float = 0.0,
    scale: float | None = None,
    *,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor | None:
    """attention() of [batch, heads, rows, head_dim], on the keys that count; None where Deepwell does not run it.

    Queries that see no key get zeros. Those that are padded see what PyTorch shows them, but for a causal call with
    holes: there they get zeros.
    """
    options = dict(window=window, softcap=softcap)
    if padding.keeps_all:
        return functional.if_ours(q, k, v, dropout_p, False, scale, **options)
    batch, _, rows_q, _ = q.shape
    q, k, v = _rows(q), _rows(k), _rows(v)
    placed = window != (-1, -1)
    order = None
    if padding.is_solid:
        sequences = padding.sequences(rows_q, placed)
    else:
        order, offsets_k, longest_k = padding.gathered()
        k, v = _Gather.apply(k, order), _Gather.apply(v, order)
        if placed:
            q, sequences = _Gather.apply(q, order), (offsets_k, offsets_k, longest_k, longest_k)
        else:
            sequences = (padding.whole_rows(rows_q), offsets_k, rows_q, longest_k)
    made = functional.packed_if_ours(q, k, v, *sequences, dropout_p, False, scale, **options)
    if made is None:
        return None
    if order is not None and placed:
        made = spread(made, order, batch * rows_q)
    return made.unflatten(0, (batch, rows_q)).transpose(1, 2)
