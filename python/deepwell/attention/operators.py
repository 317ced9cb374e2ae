"""The operators deepwell::attention_forward and deepwell::attention_backward of PyTorch's dispatcher.

CUDA tensors go to libdeepwell, through kernels registered from C (python/ext/attention_operators.c). CPU tensors go to
the definition below, in FP32 or wider: slow, but the same function. Both share the schema, the strides of the results
and the meaning of every argument (deepwell/attention.h).

q, k, v are [batch, heads, rows, head_dim], or packed [total rows, heads, head_dim] with offsets. lse is FP32,
[batch, heads, rows] or packed [heads, total rows]. ``seed`` is two int64 on the tensors' device.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, Iterator

import torch

from deepwell import _deepwell

_OPTIONS = (
    "float scale, float softcap, int window_left, int window_right, bool bottom_right, float dropout, "
    "Tensor? seed, Tensor? offsets_q, Tensor? offsets_k, int longest_q, int longest_k"
)
_FORWARD = f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)"
_BACKWARD = (
    "attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_OPTIONS}, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)"
)

_library = torch.library.Library("deepwell", "FRAGMENT")
_library.define(_FORWARD, tags=(torch.Tag.pt2_compliant_tag,))
_library.define(_BACKWARD, tags=(torch.Tag.pt2_compliant_tag,))

forward = torch.ops.deepwell.attention_forward.default
backward = torch.ops.deepwell.attention_backward.default


# ---- shapes ----------------------------------------------------------------------------------------------


def empty_beside(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor of the shape of ``tensor``: without gaps, with batch, heads and rows in its order. An
    axis of size 1 keeps its place; an expanded tensor has no order. attention_strides_like in C has the same rule."""
    if tensor.dim() != 4:
        return tensor.new_empty(tensor.shape)
    order = [0, 1, 2]
    if all(tensor.shape[i] == 1 or tensor.stride(i) > 0 for i in order):
        places = [i for i in order if tensor.shape[i] != 1]
        for place, axis in zip(places, sorted(places, key=lambda i: -tensor.stride(i))):
            order[place] = axis
    made = tensor.new_empty([tensor.shape[i] for i in order] + [tensor.shape[3]])
    return made.permute(*[order.index(i) for i in range(3)], 3)


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    shape = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    return q.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("deepwell::attention_forward", lib=_library)
def _forward_shapes(q, k, v, *options):
    return empty_beside(q), empty_lse(q)


@torch.library.register_fake("deepwell::attention_backward", lib=_library)
def _backward_shapes(d_o, q, k, v, *options):
    return empty_beside(q), empty_beside(k), empty_beside(v)


# ---- gradients -------------------------------------------------------------------------------------------


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, scale, softcap, left, right, bottom_right, dropout, seed, *packed = inputs
    o, lse = output
    offsets_q, offsets_k, longest_q, longest_k = packed
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, o, lse, seed, offsets_q, offsets_k)
    ctx.options = (scale, softcap, left, right, bottom_right, dropout)
    ctx.longest = (longest_q, longest_k)


def gradients(ctx: Any, d_o: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, o, lse, *given = ctx.saved_tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    return backward(d_o, q, k, v, o, lse, *ctx.options, *given, *ctx.longest, deterministic)


def _forward_backward(ctx: Any, d_o: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    return (*gradients(ctx, d_o), *[None] * 11)


torch.library.register_autograd(
    "deepwell::attention_forward",
    _forward_backward,
    setup_context=lambda ctx, inputs, output: save_for_backward(ctx, inputs, output),
    lib=_library,
)


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "deepwell attention has no second derivative (backward was run with create_graph=True): call "
        "deepwell.restore(model) and use PyTorch's math attention for it, with "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which activate_sdpa() leaves to PyTorch as well"
    )


torch.library.register_autograd("deepwell::attention_backward", _no_second_derivative, lib=_library)


# ---- the definition, on the CPU --------------------------------------------------------------------------

_LOW = 0xFFFFFFFF


def _kept(
    seed: torch.Tensor, dropout: float, shape: tuple[int, int, int, int], batch: int
) -> torch.Tensor:
    """Returns what dropout keeps of sequence ``batch``, [heads, rows_q, rows_k], by Philox4x32-10 (number/philox.h)."""
    _, heads, rows_q, rows_k = shape
    key, offset = (int(word) for word in seed.tolist())
    first = batch * heads * rows_q * rows_k
    index = torch.arange(first, first + heads * rows_q * rows_k, dtype=torch.int64)
    block = index >> 2
    words = [
        block & _LOW,
        ((block >> 32) << 20) & _LOW,
        torch.full_like(block, offset & _LOW),
        torch.full_like(block, (offset >> 32) & _LOW),
    ]
    key0, key1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        even, odd = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            ((odd >> 32) & _LOW) ^ words[1] ^ key0,
            odd & _LOW,
            ((even >> 32) & _LOW) ^ words[3] ^ key1,
            even & _LOW,
        ]
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    bits = torch.stack(words).gather(0, (index & 3)[None])[0]
    uniform = (bits >> 8).float() * 2.0**-24
    return (uniform >= torch.tensor(dropout, dtype=torch.float32)).view(heads, rows_q, rows_k)


def _sequences(tensors, offsets_q, offsets_k) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yields number and tensors [heads, rows, ...] of each sequence. Names end in q or k by the rows that they have."""
    if offsets_q is None:
        for index in range(tensors[0][1].shape[0]):
            yield index, [tensor[index] for _, tensor in tensors]
        return
    ends = {"q": offsets_q.tolist(), "k": offsets_k.tolist()}
    for index in range(len(ends["q"]) - 1):
        parts = []
        for rows, tensor in tensors:
            span = slice(ends[rows][index], ends[rows][index + 1])
            parts.append(tensor[:, span] if tensor.dim() == 2 else tensor[span].transpose(0, 1))
        yield index, parts


def _scores(q, k, options) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns masked scores, and the derivative of the soft cap."""
    scale, softcap, left, right, bottom_right, _ = options
    scores = scale * (q @ k.mT)
    slope = torch.ones_like(scores)
    if softcap > 0:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent * bent
    rows_q, rows_k = q.shape[-2], k.shape[-2]
    row = torch.arange(rows_q)[:, None] + (rows_k - rows_q if bottom_right else 0)
    column = torch.arange(rows_k)[None, :]
    hidden = torch.zeros(rows_q, rows_k, dtype=torch.bool)
    if left >= 0:
        hidden |= column < row - left
    if right >= 0:
        hidden |= column > row + right
    return scores.masked_fill(hidden, -math.inf), slope


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Returns softmax, and zeros for rows that see no key."""
    none = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(none, 0)


def _wide(tensor: torch.Tensor, group: int = 1) -> torch.Tensor:
    """Returns [heads, rows, dim] in FP32 or FP64, with each head repeated ``group`` times."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide if group == 1 else wide.repeat_interleave(group, 0)


def _sizes(q, k, offsets_q, longest_q: int, longest_k: int) -> tuple[int, int, int, int]:
    """Returns [batch, heads, rows_q, rows_k] of the probabilities, over which dropout is indexed."""
    if offsets_q is None:
        return q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    return offsets_q.shape[0] - 1, q.shape[1], longest_q, longest_k


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets_q: Any) -> None:
    rank = 4 if offsets_q is None else 3
    if not (q.dim() == k.dim() == v.dim() == rank):
        raise RuntimeError(f"attention: q, k and v must have {rank} axes")
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise RuntimeError(
            f"attention: shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)} disagree"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise RuntimeError(
            f"attention: {q.shape[1]} query heads over {k.shape[1]} key heads: expected a multiple"
        )


def _forward_cpu(q, k, v, *given):
    *options, seed, offsets_q, offsets_k, longest_q, longest_k = given
    _check(q, k, v, offsets_q)
    o, lse = empty_beside(q), empty_lse(q)
    group = q.shape[1] // k.shape[1]
    sizes = _sizes(q, k, offsets_q, longest_q, longest_k)
    dropout = options[5]
    tensors = [("q", q), ("k", k), ("k", v), ("q", o), ("q", lse)]
    for index, parts in _sequences(tensors, offsets_q, offsets_k):
        q_, k_, v_, o_, lse_ = parts
        scores, _ = _scores(_wide(q_), _wide(k_, group), options)
        p = _probabilities(scores)
        if dropout > 0:
            kept = _kept(seed, dropout, sizes, index)[:, : p.shape[1], : p.shape[2]]
            p = p * kept / (1 - dropout)
        o_.copy_(p @ _wide(v_, group))
        lse_.copy_(torch.logsumexp(scores, -1))
    return o, lse


def _backward_cpu(d_o, q, k, v, o, lse, *given):
    *options, seed, offsets_q, offsets_k, longest_q, longest_k, _ = given
    dq, dk, dv = empty_beside(q), empty_beside(k), empty_beside(v)
    group = q.shape[1] // k.shape[1]
    sizes = _sizes(q, k, offsets_q, longest_q, longest_k)
    scale, dropout = options[0], options[5]
    tensors = [("q", d_o), ("q", q), ("k", k), ("k", v), ("q", dq), ("k", dk), ("k", dv)]
    for index, parts in _sequences(tensors, offsets_q, offsets_k):
        d_o_, q_, k_, v_, dq_, dk_, dv_ = parts
        d_o_, q_, k_, v_ = _wide(d_o_), _wide(q_), _wide(k_, group), _wide(v_, group)
        scores, slope = _scores(q_, k_, options)
        p = _probabilities(scores)
        factor = torch.ones_like(p)
        if dropout > 0:
            kept = _kept(seed, dropout, sizes, index)[:, : p.shape[1], : p.shape[2]]
            factor = kept / (1 - dropout)
        d_p = (d_o_ @ v_.mT) * factor
        d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * slope
        dq_.copy_(scale * (d_s @ k_))
        dk_.copy_((scale * (d_s.mT @ q_)).unflatten(0, (-1, group)).sum(1))
        dv_.copy_(((p * factor).mT @ d_o_).unflatten(0, (-1, group)).sum(1))
    return dq, dk, dv


def _as_defined(function: Any) -> Any:
    """Disables autocast, which would round the matmuls of the definition."""

    def run(*given: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*given)

    return run


_library.impl("attention_forward", _as_defined(_forward_cpu), "CPU")
_library.impl("attention_backward", _as_defined(_backward_cpu), "CPU")


# ---- the GPU ---------------------------------------------------------------------------------------------


def _not_here(*_: Any) -> None:
    raise RuntimeError(
        "deepwell attention cannot run on CUDA tensors with this PyTorch "
        f"({torch.__version__}): it lacks functions of the stable interface; use PyTorch 2.9 or later"
    )


def _register_cuda() -> bool:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    cuda = os.path.join(folder, "libtorch_cuda.so")
    return _deepwell.attention_register(
        os.path.join(folder, "libtorch_cpu.so"), cuda if os.path.exists(cuda) else None, "CUDA"
    )


# PyTorch's CUDA builds install NVIDIA's run-time compiler among the packages, where no loader looks.
_packages = [os.path.dirname(os.path.dirname(torch.__file__))]
_packages += [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
for _folder in _packages[:16]:
    _deepwell.jit_search(_folder)

# Whether CUDA tensors are supported.
CUDA_READY = _register_cuda()
if not CUDA_READY:
    _library.impl("attention_forward", _not_here, "CUDA")
    _library.impl("attention_backward", _not_here, "CUDA")


def _prepare_direct() -> bool:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # PyTorch 2.10 and later
    if not CUDA_READY or capsule is None or not torch.cuda.is_available():
        return False
    python = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_python.so")
    return _deepwell.attention_wrapping(python) and _deepwell.attention_exchange(capsule)


# Whether CUDA tensors can be read, and results created, without the dispatcher.
DIRECT = _prepare_direct()


# The dispatcher takes more than half of a small call's time on the host. It may be skipped if all of these return
# nothing. Modes that count, fake or cache operators must see the call; transforms, tracers, compilers and autocast
# change it.
WATCHERS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._are_functorch_transforms_active,
    torch._C._is_any_autocast_enabled,
    torch._C._get_tracing_state,
)


def forward_below_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """forward() of plain tensors; the caller handles the gradient."""
    if DIRECT and not any(watcher() for watcher in WATCHERS):
        made = _deepwell.attention_call(q, k, v, *options)
        if made is not None:
            return made
    with torch._C._AutoDispatchBelowAutograd():
        return forward(q, k, v, *options)
