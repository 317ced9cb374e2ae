"""Attention on tensors: Deepwell's if libdeepwell supports the call, else PyTorch's.

The choice depends on devices, dtypes, shapes and options of a call, never on the contents of its tensors. Decisions are
cached, so a known kind of call costs one look-up.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import has_static_value

from deepwell import _deepwell
from deepwell.attention import operators, tune

# Devices whose tensors go through deepwell's operators. Tests add "cpu", where the operators run the definition.
devices = {"cuda"}
_DTYPES = (torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_DECISIONS = 4096
_CONSTANTS = tuple(range(1025))

# Calls that PyTorch ran, by reason (in eager mode; a compiled graph decides once).
fallbacks: Counter[str] = Counter()
# "": Deepwell runs it; a reason: PyTorch does, by its own choice; else the entry that was measured to be faster.
_decisions: dict[Any, str | tune.Alternative] = {}


# ---- which backend runs a call ---------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def why_not_kernels(device: str, index: int, sizes: tune.Sizes) -> str:
    """Returns "" if libdeepwell runs such a call on such a device, else the reason why not."""
    if device != "cuda":
        return ""
    if not operators.CUDA_READY:
        return "this PyTorch lacks functions of its stable interface"
    with torch.cuda.device(index):
        *_, refusal = _deepwell.attention_decide(True, None, *sizes)
        return refusal


@torch.compiler.assume_constant_result
def _recorded(device: str, index: int, sizes: tune.Sizes) -> str:
    return tune.tuner.recorded(torch.device(device, index), sizes)


def _described(q, lengths, window, bottom_right, softcap, dropout, packed, grad) -> tune.Sizes:
    """Returns the call's description for the extension."""
    name = "bf16" if q.dtype == torch.bfloat16 else "f16"
    return (
        *(name, *lengths, packed, 1.0 if softcap > 0 else 0.0, *window, bottom_right),
        *(0.1 if dropout > 0 else 0.0, grad, torch.are_deterministic_algorithms_enabled()),
    )


def _decide(q, k, v, window, bottom_right, softcap, dropout, packed) -> str:
    """Returns "" if Deepwell runs the call, else the reason for PyTorch."""
    device = q.device
    if device.type not in devices:
        return f"the tensors are on {device.type}"
    if type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN:
        if not _is_traced(q):
            return f"the tensors are {type(q).__name__}s"
    if k.device != device or v.device != device:
        return "the tensors are on several devices"
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype:
        return "q, k and v differ in dtype"
    if dtype not in _DTYPES and device.type == "cuda":
        return f"the dtype is {dtype}"
    rank = 3 if packed else 4
    if q.dim() != rank or k.dim() != rank or v.dim() != rank:
        return f"the tensors do not have {rank} axes"
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        return "the head dimensions or lengths of q, k and v differ"
    heads_q, heads_kv, dim = q.shape[1], k.shape[1], q.shape[-1]
    if heads_kv == 0 or heads_q % heads_kv != 0:
        return "the number of query heads is not a multiple of the number of key heads"
    if q.numel() == 0 or k.numel() == 0:
        return "a tensor has no elements"
    if not packed and q.shape[0] != k.shape[0]:
        return "the batches of q and k differ"
    if q.is_nested or q.layout != torch.strided:
        return "the tensors are not dense"
    if torch.compiler.is_compiling():
        # Sizes may be symbols here. Looking up the heads and their dimension makes them constants of the graph. Lengths
        # may stay symbolic, because libdeepwell supports any.
        if heads_q >= len(_CONSTANTS) or dim >= len(_CONSTANTS):
            return "there are more or larger heads than Deepwell compiles for"
        lengths = (1, _CONSTANTS[heads_q], _CONSTANTS[heads_kv], 1024, 1024, _CONSTANTS[dim])
    elif packed:
        lengths = (1, heads_q, heads_kv, q.shape[0], k.shape[0], dim)
    else:
        lengths = _lengths(q, k)
    grad = _needs_grad(q, k, v)
    sizes = _described(q, lengths, window, bottom_right, softcap, dropout, packed, grad)
    return why_not_kernels(device.type, device.index or 0, sizes)


def _lengths(q, k) -> tuple[int, ...]:
    return (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])


def _needs_grad(q, k, v) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _is_traced(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor stands for a plain tensor in a graph that is being traced."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def _whose(
    q, k, v, window, bottom_right, softcap, dropout, packed, scale=1.0
) -> str | tune.Alternative:
    """Returns an entry of _decisions for the call."""
    if torch.compiler.is_compiling():
        return _decide(q, k, v, window, bottom_right, softcap, dropout, packed)
    if torch._C._are_functorch_transforms_active():
        fallbacks["called inside a torch.func transform"] += 1
        return "called inside a torch.func transform"
    if type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN:
        return _decide(q, k, v, window, bottom_right, softcap, dropout, packed)
    grad = _needs_grad(q, k, v)
    key = (
        (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
        + (window, bottom_right, softcap, dropout > 0, grad, packed, q.layout)
        + (torch.are_deterministic_algorithms_enabled(),)
    )
    known = _decisions.get(key)
    if known is None:
        if len(_decisions) >= _MOST_DECISIONS:
            _decisions.clear()
        known = _decide(q, k, v, window, bottom_right, softcap, dropout, packed)
        if known == "" and not packed:
            given = (q, _lengths(q, k), window, bottom_right, softcap, dropout, packed, grad)
            known = tune.tuner.decide(q, k, scale, _described(*given)) or ""
        _decisions[key] = known
    if known and isinstance(known, str):
        fallbacks[known] += 1
    return known


def _reason(*call) -> str:
    """Returns why PyTorch chooses the backend of a call, "" if Deepwell does."""
    whose = _whose(*call)
    return whose if isinstance(whose, str) else ""


def _recorded_entry(q, k, v, window, bottom_right, softcap, dropout) -> str:
    """Returns the entry that was measured to be faster than Deepwell's, while a graph with fixed lengths is traced."""
    for size in (q.shape[0], q.shape[2], k.shape[2]):
        if not has_static_value(size):
            return ""
    grad = _needs_grad(q, k, v)
    sizes = _described(q, _lengths(q, k), window, bottom_right, softcap, dropout, False, grad)
    return _recorded(q.device.type, q.device.index or 0, sizes)


def forget() -> None:
    """Drops all decisions: for tests, and after a kernel was disabled."""
    _decisions.clear()


# ---- Deepwell's attention --------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Wraps the operators, so that one call is one node. The operators are differentiable by themselves, but at a
    higher cost per call."""

    @staticmethod
    def forward(ctx, q, k, v, *options):
        o, lse = operators.forward_below_autograd(q, k, v, *options)
        ctx.save_for_backward(q, k, v, o, lse, *options[6:9])
        ctx.options, ctx.longest = options[:6], options[9:]
        return o

    @staticmethod
    def backward(ctx, d_o):
        return (*operators.gradients(ctx, d_o), *_NO_GRADIENTS)


class _Usual(torch.autograd.Function):
    """The same without dropout and packing, for tensors that a kernel reads in place: forward is all C. It returns None
    without side effects if it does not support a call."""

    forward = staticmethod(_deepwell.attention_node)

    @staticmethod
    def backward(ctx, d_o):
        saved = ctx.saved_tensors
        made = _deepwell.attention_gradients(d_o, saved, ctx.options)
        if made is not None:
            return (*made, None)
        q, k, v, o, lse = saved
        deterministic = torch.are_deterministic_algorithms_enabled()
        given = (*ctx.options, None, None, None, 0, 0, deterministic)
        return (*operators.backward(d_o, q, k, v, o, lse, *given), None)


_NO_GRADIENTS = (None,) * 11


def _apply_of(function: type[torch.autograd.Function]):
    """Returns the function's apply without its Python wrapper, which only functions with setup_context need."""
    return super(torch.autograd.Function, function).apply


_apply = _apply_of(_Attention)
if operators.DIRECT:
    _deepwell.attention_prepare(
        *(torch.Tensor, torch.nn.Parameter, operators.WATCHERS, torch.is_grad_enabled),
        *(torch.are_deterministic_algorithms_enabled, _apply_of(_Usual)),
    )


def _ours(q, k, v, *options) -> torch.Tensor:
    if torch.compiler.is_compiling() or type(q) not in _PLAIN:
        return operators.forward(q, k, v, *options)[0]
    if _needs_grad(q, k, v):
        return _apply(q, k, v, *options)
    return operators.forward(q, k, v, *options)[0]


def fresh_seed(device: torch.device) -> torch.Tensor:
    """Returns key and offset of a dropout mask, drawn on the device from PyTorch's generator. They are new at each
    replay of a CUDA graph, and the same again if a checkpoint restores the generator."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts as autocast does for PyTorch's own attention."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


# ---- the interface ---------------------------------------------------------------------------------------


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v, differentiable.

    Args:
        q: [batch, heads_q, seq_len_q, head_dim] with any strides. A transposed [batch, seq_len, heads, head_dim] is
            read in place, and the result has the same layout.
        k, v: [batch, heads_kv, seq_len_kv, head_dim]; heads_q must be a multiple of heads_kv.
        attn_mask: as for scaled_dot_product_attention: boolean (True: seen) or added. PyTorch runs such calls.
        dropout_p: dropout of the probabilities. Pass 0 in evaluation; the call does not know the module's mode.
        is_causal: a query sees no key after its own position: window (any, 0).
        scale: 1 / sqrt(head_dim) if None.
        window: how many keys before and after its own position a query sees; negative: all.
        bottom_right: aligns the last query with the last key, instead of the first with the first.
        softcap: scores become softcap * tanh(scores / softcap); 0: off.
        return_lse: returns (result, lse). lse is the natural logarithm of the sum of the exponentials of the masked and
            scaled scores, FP32 [batch, heads_q, seq_len_q], without a gradient; -inf if no key is seen.
    """
    left, right = window
    if is_causal:
        right = 0
    if attn_mask is None:
        if dropout_p == 0.0 and not return_lse and not torch.compiler.is_compiling():
            made = _deepwell.attention_direct(q, k, v, scale, softcap, left, right, bottom_right)
            if made is not None:
                return made
        made = _by_operators(
            *(q, k, v, dropout_p, scale, (left, right), bottom_right, softcap, return_lse)
        )
        if made is not None:
            return made
    elif not torch.compiler.is_compiling():
        fallbacks["a mask is given as a tensor"] += 1
    q, k, v = _autocast(q, k, v)
    window = (left, right)
    o = _pytorch(q, k, v, attn_mask, dropout_p, scale, window, bottom_right, softcap)
    if return_lse:
        return o, _lse(q, k, attn_mask, scale, window, bottom_right, softcap)
    return o


def if_ours(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    *,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    softcap: float = 0.0,
) -> torch.Tensor | None:
    """Runs attention() if Deepwell supports the call, else returns None."""
    left, right = window
    if is_causal:
        right = 0
    if dropout_p == 0.0 and not torch.compiler.is_compiling():
        made = _deepwell.attention_direct(q, k, v, scale, softcap, left, right, bottom_right)
        if made is not None:
            return made
    return _by_operators(q, k, v, dropout_p, scale, (left, right), bottom_right, softcap)


def _by_operators(
    q, k, v, dropout_p, scale, window, bottom_right: bool, softcap: float, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Runs the call through the dispatcher, for calls that the direct path does not support."""
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0
    if not 0.0 <= scale < math.inf:
        if not torch.compiler.is_compiling():
            fallbacks["the scale is negative or not a number"] += 1
        return None
    q, k, v = _autocast(q, k, v)
    whose = _whose(q, k, v, window, bottom_right, softcap, dropout_p, False, scale)
    if isinstance(whose, tune.Alternative):
        made = _by_alternative(whose, q, k, v, window, bottom_right, scale)
        if made is not None:
            return made
    elif whose:
        return None
    elif torch.compiler.is_compiling():
        name = _recorded_entry(q, k, v, window, bottom_right, softcap, dropout_p)
        if name:
            entry = tune.tuner.entries[name]
            return entry.run(q, k, v, window[1] == 0, scale, _needs_grad(q, k, v))
    seed = fresh_seed(q.device) if dropout_p > 0 else None
    run = operators.forward if return_lse else _ours
    return run(
        *(q, k, v, scale, softcap, *window, bottom_right, dropout_p, seed),
        *(None, None, 0, 0),
    )


def _by_alternative(
    alternative: tune.Alternative, q, k, v, window, bottom_right, scale
) -> torch.Tensor | None:
    """Returns None if the entry fails. It is then not used again."""
    grad = _needs_grad(q, k, v)
    fallbacks[alternative.because] += 1
    try:
        return alternative.entry.run(q, k, v, window[1] == 0, scale, grad)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        sizes = _described(q, _lengths(q, k), window, bottom_right, 0.0, 0.0, False, grad)
        tune.tuner.give_up(alternative, q.device, sizes, error)
        forget()
        return None


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets_q: torch.Tensor,
    offsets_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """attention() over sequences of several lengths that follow one another.

    q is [total rows, heads_q, head_dim], k and v [total rows, heads_kv, head_dim]. Sequence i has the rows offsets[i]
    to offsets[i + 1] (int32, on the tensors' device, the first 0). ``longest`` are the greatest lengths. lse is
    [heads_q, total rows].
    """
    options = dict(window=window, bottom_right=bottom_right, softcap=softcap, return_lse=return_lse)
    sequences = (offsets_q, offsets_k, longest_q, longest_k)
    made = packed_if_ours(q, k, v, *sequences, dropout_p, is_causal, scale, **options)
    if made is not None:
        return made
    if is_causal:
        window = (window[0], 0)
    q, k, v = _autocast(q, k, v)
    parts, norms = [], []
    ends_q, ends_k = offsets_q.tolist(), offsets_k.tolist()
    for i in range(len(ends_q) - 1):
        rows_q, rows_k = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        one = [t[rows].transpose(0, 1)[None] for t, rows in ((q, rows_q), (k, rows_k), (v, rows_k))]
        made = _pytorch(*one, None, dropout_p, scale, window, bottom_right, softcap)
        parts.append(made[0].transpose(0, 1))
        if return_lse:
            norms.append(_lse(*one[:2], None, scale, window, bottom_right, softcap)[0])
    if return_lse:
        return torch.cat(parts), torch.cat(norms, 1)
    return torch.cat(parts)


def packed_if_ours(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets_q: torch.Tensor,
    offsets_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    *,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Runs packed_attention() if Deepwell supports the call, else returns None."""
    if is_causal:
        window = (window[0], 0)
    q, k, v = _autocast(q, k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if not 0.0 <= scale < math.inf:
        return None
    if _reason(q, k, v, window, bottom_right, softcap, dropout_p, True):
        return None
    seed = fresh_seed(q.device) if dropout_p > 0 else None
    run = operators.forward if return_lse else _ours
    return run(
        *(q, k, v, scale, softcap, *window, bottom_right, dropout_p, seed),
        *(offsets_q, offsets_k, longest_q, longest_k),
    )


def why_pytorch(
    q, k, v, window: tuple[int, int], bottom_right: bool, softcap: float = 0.0, packed: bool = False
) -> str:
    """Returns why attention() or packed_attention() leaves such a call to PyTorch, "" if it does not."""
    return _reason(q, k, v, window, bottom_right, softcap, 0.0, packed)


# ---- PyTorch's attention ---------------------------------------------------------------------------------


def visible(rows_q: int, rows_k: int, window, bottom_right: bool, device) -> torch.Tensor:
    """Returns [rows_q, rows_k]: which keys each query sees."""
    row = torch.arange(rows_q, device=device)[:, None] + (rows_k - rows_q if bottom_right else 0)
    column = torch.arange(rows_k, device=device)[None, :]
    seen = torch.ones(rows_q, rows_k, dtype=torch.bool, device=device)
    if window[0] >= 0:
        seen = seen & (column >= row - window[0])
    if window[1] >= 0:
        seen = seen & (column <= row + window[1])
    return seen


def by_pytorch(
    q, k, v, *, window: tuple[int, int] = (-1, -1), bottom_right: bool = False
) -> torch.Tensor:
    """attention() without Deepwell."""
    return _pytorch(q, k, v, None, 0.0, None, window, bottom_right, 0.0)


def _pytorch(q, k, v, mask, dropout, scale, window, bottom_right, softcap) -> torch.Tensor:
    shared = q.dim() >= 3 and k.shape[-3] != q.shape[-3]
    if softcap == 0 and window == (-1, -1):
        return _sdpa(q, k, v, mask, dropout, False, scale, shared)
    rows_q, rows_k = q.shape[-2], k.shape[-2]
    if (
        softcap == 0
        and mask is None
        and window == (-1, 0)
        and (not bottom_right or rows_q == rows_k)
    ):
        return _sdpa(q, k, v, None, dropout, True, scale, shared)
    mask = _narrowed(mask, q, k, window, bottom_right)
    begin, end = _seeing(rows_q, rows_k, window, bottom_right)
    if (begin, end) != (0, rows_q):
        # PyTorch's kernels differ in the result for a row that sees nothing; here it is zeros.
        q = q[..., begin:end, :]
        mask = None if mask is None else mask[..., begin:end, :]
    if softcap == 0:
        o = _sdpa(q, k, v, mask, dropout, False, scale, shared)
    else:
        o = _bounded(q, k, v, mask, dropout, scale, softcap)
    return o if end - begin == rows_q else F.pad(o, (0, 0, begin, rows_q - end))


def _seeing(rows_q: int, rows_k: int, window, bottom_right: bool) -> tuple[int, int]:
    """Returns begin and end of the rows that see a key. The other rows lie wholly before or after the keys."""
    first = rows_k - rows_q if bottom_right else 0
    begin = max(0, -first - window[1]) if window[1] >= 0 else 0
    end = min(rows_q, rows_k - first + window[0]) if window[0] >= 0 else rows_q
    return min(begin, rows_q), max(end, min(begin, rows_q))


def _narrowed(mask, q, k, window, bottom_right) -> torch.Tensor | None:
    """Returns the mask with everything outside of the window hidden."""
    if window == (-1, -1):
        return mask
    seen = visible(q.shape[-2], k.shape[-2], window, bottom_right, q.device)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def _sdpa(q, k, v, mask, dropout, causal, scale, shared) -> torch.Tensor:
    if shared:
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, causal, scale=scale, enable_gqa=True
        )
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale)


def _lse(q, k, mask, scale, window, bottom_right, softcap) -> torch.Tensor:
    """Computes the lse for PyTorch's attention, which does not return it, from all scores at once."""
    with torch.no_grad():
        q, k = q.detach(), k.detach()
        if q.dtype in _DTYPES:
            q, k = q.float(), k.float()
        scores = _scores(q, k, _narrowed(mask, q, k, window, bottom_right), scale, softcap)
        return torch.logsumexp(scores, -1).float()


def _scores(q, k, mask, scale, softcap) -> torch.Tensor:
    if k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap != 0:
        scores = softcap * torch.tanh((q @ k.mT).float() * (scale / softcap))
    else:
        scores = (q @ k.mT) * scale
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _bounded(q, k, v, mask, dropout, scale, softcap) -> torch.Tensor:
    """Attention with a soft cap, which PyTorch's attention does not have."""
    scores = _scores(q, k, mask, scale, softcap)
    if k.shape[-3] != q.shape[-3]:
        v = v.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    p = torch.softmax(scores, -1)
    p = torch.where(torch.isneginf(scores).all(-1, keepdim=True), 0.0, p).to(v.dtype)
    return F.dropout(p, dropout) @ v
