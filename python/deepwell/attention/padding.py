"""Padding: reads once per mask which keys of a batch are kept, and runs attention without the others.

If the kept keys of every row are contiguous, none is moved: the batch is one packed call, whose sequences are each
row's queries with its kept keys, and the gaps between them, which no query sees. Kept keys that are not contiguous
are gathered first.

The contents of a tensor decide here, so the host waits for the GPU, once per mask. Where it must not wait (while a
graph is traced or captured), the mask is not read and stays a tensor.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.weak import TensorWeakRef

from deepwell.attention import functional

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_KNOWN = 64


# ---- what is known about tensors -------------------------------------------------------------------------


class Known:
    """A cache of facts about tensors, valid while they live and are not written to. A view of the same memory, as
    checkpoints make of their arguments, counts as the same tensor. Nothing is cached about tensors of inference mode,
    because they do not record writes."""

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[TensorWeakRef, Any]] = {}

    @staticmethod
    def _key(tensor: torch.Tensor) -> Any:
        layout = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        return tensor.data_ptr(), tensor._version, *layout

    def get(self, tensor: torch.Tensor) -> Any:
        if tensor.is_inference():
            return None
        found = self._entries.get(self._key(tensor))
        return None if found is None or found[0]() is None else found[1]

    def put(self, tensor: torch.Tensor, value: Any) -> None:
        if tensor.is_inference():
            return
        if len(self._entries) >= _MOST_KNOWN:
            kept = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
            self._entries = kept if len(kept) < _MOST_KNOWN else {}
        self._entries[self._key(tensor)] = (TensorWeakRef(tensor), value)

    def get_or_make(self, tensor: torch.Tensor, make: Callable[[], Any]) -> Any:
        value = self.get(tensor)
        if value is None:
            value = make()
            self.put(tensor, value)
        return value


_ignored, _kept, _causal = Known(), Known(), Known()


def why_not_read(*tensors: torch.Tensor) -> str:
    """Returns "" if the host may read the tensors, else the reason."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "a mask cannot be read while a graph is traced"
    if torch.jit.is_tracing() or get_proxy_mode() is not None:
        return "a mask cannot be read while a graph is traced"
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return f"a mask is a {type(tensor).__name__}"
        if tensor.requires_grad:
            return "a mask has a gradient"
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a mask cannot be read while a CUDA graph is captured"
    return ""


# ---- padding ---------------------------------------------------------------------------------------------


class Padding:
    """Which keys of each row of a batch are kept."""

    def __init__(self, kept: torch.Tensor, device: torch.device, strange: bool = False) -> None:
        """``kept`` is [batch, rows], boolean, on the host; the mask was on ``device``. ``strange``: the mask had values
        other than "kept" and "ignored"."""
        self.batch, self.rows = kept.shape
        self.strange = strange
        self._host, self._device = kept, device
        self._made: dict[Any, Any] = {}
        self.keeps_all = bool(kept.all())
        if self.keeps_all:  # the usual case
            self.has_empty_row, self.is_solid, self.is_led = False, True, False
            return
        place = torch.arange(self.rows)
        first = self._first = torch.where(kept, place, self.rows).amin(1)
        end = self._end = torch.where(kept, place + 1, 0).amax(1)
        self._counts = kept.sum(1)
        self.has_empty_row = bool((self._counts == 0).any())
        # Whether the kept keys of each row are contiguous, and whether some row's first kept key is not its first key.
        self.is_solid = bool((end - first == self._counts).all())
        self.is_led = bool((first > 0).any())

    @property
    def kept(self) -> torch.Tensor:
        """[batch, rows], boolean, on the mask's device."""
        return self._once("kept", lambda: self._sent(self._host))

    def sequences(self, rows_q: int, placed: bool) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Returns offsets of queries and keys in place, gaps included, and the greatest lengths. ``placed``: a row's
        first query is aligned with its first kept key; queries before it see nothing."""
        return self._once(("sequences", rows_q, placed), lambda: self._sequences(rows_q, placed))

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns the indices of the kept keys in [batch * rows], their offsets by row, and the greatest length."""
        return self._once("gathered", self._gathered)

    def whole_rows(self, rows_q: int) -> torch.Tensor:
        """Returns the offsets of all queries, by row."""
        return self._once(rows_q, lambda: self._offsets(torch.full((self.batch,), rows_q)))

    def _sequences(self, rows_q: int, placed: bool):
        base = torch.arange(self.batch)
        first, end = base * self.rows + self._first, base * self.rows + self._end
        begin_q, end_q = base * rows_q, (base + 1) * rows_q
        if placed and self.is_led:
            # For each row: the end of the keys before it, of the queries before it, of the row itself.
            after_q = torch.stack([begin_q, begin_q + self._first, end_q], 1)
            after_k = torch.stack([first, first, end], 1)
        else:
            after_q, after_k = torch.stack([begin_q, end_q], 1), torch.stack([first, end], 1)
        made = []
        for after, total in ((after_q, self.batch * rows_q), (after_k, self.batch * self.rows)):
            # The last sequence is everything after the last row.
            made.append(torch.cat([after.flatten(), torch.tensor([total])]).diff(prepend=base[:1]))
        longest = [int(lengths.max()) for lengths in made]
        return *[self._offsets(lengths) for lengths in made], *longest

    def _gathered(self):
        counts = torch.full((self.batch,), self.rows) if self.keeps_all else self._counts
        order = self._host.flatten().nonzero().flatten()
        return self._sent(order), self._offsets(counts), int(counts.max())

    def _offsets(self, lengths: torch.Tensor) -> torch.Tensor:
        return self._sent(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int())

    def _once(self, name: Any, make: Callable[[], Any]) -> Any:
        found = self._made.get(name)
        if found is None:
            with torch.inference_mode(False):  # a later call may keep it for a backward
                found = self._made[name] = make()
        return found

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return tensor.clone()
        return tensor.pin_memory().to(self._device, non_blocking=True)


class Sequences(NamedTuple):
    """Rows of several lengths that follow one another: their offsets, and the greatest length."""

    offsets: torch.Tensor
    longest: int


def of_keys_ignored(mask: torch.Tensor) -> Padding:
    """Reads a key_padding_mask of PyTorch: boolean, True where a key is ignored, or added to the scores."""

    def look() -> Padding:
        host = mask.detach().cpu()  # the host waits here
        if host.dtype == torch.bool:
            return Padding(~host, mask.device)
        kept = host == 0
        return Padding(kept, mask.device, not bool((kept | (host == -torch.inf)).all()))

    return _ignored.get_or_make(mask, look)


def of_keys_kept(mask: torch.Tensor) -> Padding:
    """Reads a boolean mask, True where a key is kept."""
    return _kept.get_or_make(mask, lambda: Padding(mask.to("cpu", copy=True), mask.device))


def is_causal(mask: torch.Tensor) -> bool:
    """Returns whether an attn_mask [rows, rows] hides from each row the keys after it, and nothing else."""

    def look() -> bool:
        behind = torch.ones(mask.shape, dtype=torch.bool, device=mask.device).triu(1)
        if mask.dtype == torch.bool:
            return torch.equal(mask, behind)
        return torch.equal(mask, torch.zeros_like(mask).masked_fill_(behind, -torch.inf))

    return _causal.get_or_make(mask, look)


# ---- attention -------------------------------------------------------------------------------------------


def why_not(padding: Padding, rows_q: int, window: tuple[int, int]) -> str:
    """Returns "" if attend() gives PyTorch's result with this padding as a mask, else the reason."""
    if padding.strange:
        return "a padding mask holds numbers other than 0 and -inf"
    if padding.has_empty_row:
        return "all keys of a row are padded"
    if padding.keeps_all or window == (-1, -1):
        return ""
    if rows_q != padding.rows:
        return "keys are padded, and the numbers of queries and keys differ"
    if window[1] != 0 or not (padding.is_solid or window[0] < 0):
        return "padding with holes, or at the start of a row, is combined with a window"
    return ""


class _Gather(torch.autograd.Function):
    """Gathers rows of a tensor, each at most once. The gradient of index_select would use atomics."""

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
    """Returns the inverse of gathering, with zeros elsewhere."""
    return rows.new_zeros((count, *rows.shape[1:])).index_copy_(0, order, rows)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns [batch, heads, rows, dim] as [batch * rows, heads, dim]."""
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
    """Runs attention() of [batch, heads, rows, head_dim] on the kept keys. Returns None if Deepwell does not support
    it.

    Queries that see no key get zeros. Padded queries get PyTorch's results, except in a causal call with holes, where
    they get zeros.
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
