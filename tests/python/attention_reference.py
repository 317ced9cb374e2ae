"""Attention in FP64, and bounds of the error of a fused kernel.

Written from the definition, independently of all code that it tests. Each result has:

- exact: FP64;
- rounded: the same with P, dS, O and the gradients rounded to the element type, as in a fused kernel (tensor cores
  read them in that type, and backward reads the rounded O);
- sigma: the standard deviation of those roundings for each element, to first order. A rounding is uniform within
  half a unit in the last place, so of variance (u x)^2 / 3; roundings of different elements are independent;
- slack: FP32 arithmetic inside of the kernel. A score q k is a sum of D products; its error is at most 2^-22 of the
  sum of their magnitudes (tensor cores drop bits of partial sums), which is the relative error of exp(score).

A result is right when, for every element,  |result - exact| <= 2 max|rounded - exact| + 4 max(sigma) + slack  (the
second term is for calls so small that the reference may be exact by luck), and when every element is within
8 sigma + slack of its exact value. Without the second condition, the large rows of a long causal call would hide an
error in its small rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

_UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-25}
_TINY = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}
_FP32 = 2.0**-22
_FLUSHED = 2.0**-126
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Call:
    """The arguments of a call, apart from its tensors. Windows and offsets are those of
    deepwell/attention.h."""

    scale: float
    softcap: float = 0.0
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    dropout: float = 0.0
    seed: int = 0
    seed_offset: int = 0
    dropout_stream: int = 0
    lengths_q: tuple[int, ...] | None = None  # packed
    lengths_k: tuple[int, ...] | None = None


@dataclass
class Result:
    exact: torch.Tensor
    rounded: torch.Tensor
    sigma: torch.Tensor
    slack: torch.Tensor

    def judge(self, got: torch.Tensor) -> tuple[float, float, str]:
        """Returns the largest error, its ratio to the allowed error (at most 1 is right), and the worst element."""
        error = (got.double() - self.exact).abs()
        error = torch.where(
            got.double() == self.exact, torch.zeros_like(error), error
        )  # Equal infinities do not differ.
        if error.numel() == 0:
            return 0.0, 0.0, ""
        reference = (self.rounded - self.exact).abs()
        reference = torch.where(self.rounded == self.exact, 0.0, reference).max()
        twice = 2 * reference + 4 * self.sigma.max() + self.slack
        own = 8 * self.sigma + self.slack
        allowed = torch.minimum(twice, own) if bool(torch.isfinite(twice).all()) else twice
        share = torch.where(error == 0, torch.zeros_like(error), error / allowed)
        share = torch.nan_to_num(share, nan=math.inf)
        worst = int(share.argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
        wrong = int((share > 1).sum())
        value, right = got.flatten()[worst].item(), self.exact.flatten()[worst].item()
        where = f"{wrong} of {error.numel()} off, worst at {index}: {value:.6g} for {right:.6g}"
        return float(torch.nan_to_num(error, nan=math.inf).max()), float(share.max()), where


def uniform(seed: int, offset: int, index: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Returns the Philox uniforms of elements ``index`` (number.h), F32 values as FP64."""
    block, word = index >> 2, index & 3
    c0, c1 = block & _LOW, ((block >> 32) << 20 ^ stream) & _LOW
    c2 = torch.full_like(block, offset & _LOW)
    c3 = torch.full_like(block, (offset >> 32) & _LOW)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # modulo 2^64, which gives the bits of the unsigned product
        high0, high1 = (p0 >> 32) & _LOW, (p1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _LOW, high0 ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    bits = torch.stack([c0, c1, c2, c3]).gather(0, word[None])[0]
    return (bits >> 8).double() * 2.0**-24


def kept(call: Call, batch: int, heads: int, rows_q: int, rows_k: int, device) -> torch.Tensor:
    """Returns the elements that dropout keeps as booleans [batch, heads, rows_q, rows_k]."""
    total = batch * heads * rows_q * rows_k
    index = torch.arange(total, device=device, dtype=torch.int64)
    # Compares in FP32, like a kernel.
    p = torch.tensor(call.dropout, dtype=torch.float32).double().item()
    random = uniform(call.seed, call.seed_offset, index, call.dropout_stream)
    return (random >= p).view(batch, heads, rows_q, rows_k)


def visible(call: Call, rows_q: int, rows_k: int, device) -> torch.Tensor:
    """Returns booleans [rows_q, rows_k]: whether the query sees the key."""
    i = torch.arange(rows_q, device=device)[:, None]
    j = torch.arange(rows_k, device=device)[None, :]
    i = i + (rows_k - rows_q if call.bottom_right else 0)
    seen = torch.ones(rows_q, rows_k, dtype=torch.bool, device=device)
    if call.window_left >= 0:
        seen &= j >= i - call.window_left
    if call.window_right >= 0:
        seen &= j <= i + call.window_right
    return seen


def _empty(like: torch.Tensor) -> Result:
    return Result(
        *[torch.zeros(like.shape, dtype=torch.float64, device=like.device) for _ in range(4)]
    )


def attention(call: Call, q, k, v, d_o=None) -> dict[str, Result]:
    """Returns results "o", "lse" and, with ``d_o``, "dq", "dk", "dv" for tensors [batch, heads,
    rows, head_dim]. In packed calls tensors are [heads, total, head_dim], and lse is [heads,
    total].
    """
    if call.lengths_q is not None:
        return _packed(call, q, k, v, d_o)
    results = {"o": _empty(q), "lse": _empty(q[..., 0])}
    if d_o is not None:
        results |= {"dq": _empty(q), "dk": _empty(k), "dv": _empty(v)}
    keep = None
    if call.dropout > 0:
        keep = kept(call, q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    _fill(call, q, k, v, d_o, keep, results)
    return results


def _packed(call: Call, q, k, v, d_o) -> dict[str, Result]:
    results = {"o": _empty(q), "lse": _empty(q[..., 0])}
    if d_o is not None:
        results |= {"dq": _empty(q), "dk": _empty(k), "dv": _empty(v)}
    longest_q, longest_k = max(call.lengths_q), max(call.lengths_k)
    keep = None
    if call.dropout > 0:
        keep = kept(call, len(call.lengths_q), q.shape[0], longest_q, longest_k, q.device)
    begin_q = begin_k = 0
    plain = replace(call, lengths_q=None, lengths_k=None)
    for sequence, (n, m) in enumerate(zip(call.lengths_q, call.lengths_k)):
        rows_q, rows_k = slice(begin_q, begin_q + n), slice(begin_k, begin_k + m)
        begin_q, begin_k = begin_q + n, begin_k + m

        def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, rows_k if name in ("dk", "dv") else rows_q][None]

        inner = {
            name: Result(*[part(name, t) for t in (r.exact, r.rounded, r.sigma, r.slack)])
            for name, r in results.items()
        }
        own = None if keep is None else keep[sequence : sequence + 1, :, :n, :m]
        inputs = [q[:, rows_q][None], k[:, rows_k][None], v[:, rows_k][None]]
        inputs.append(None if d_o is None else d_o[:, rows_q][None])
        _fill(plain, *inputs, own, inner)  # this writes through the views
    return results


def _fill(call: Call, q, k, v, d_o, keep, results: dict[str, Result]) -> None:
    group = q.shape[1] // k.shape[1]
    seen = visible(call, q.shape[2], k.shape[2], q.device)
    for b in range(q.shape[0]):
        for h in range(k.shape[1]):
            heads = slice(h * group, (h + 1) * group)
            made = _heads(
                call,
                q[b, heads],
                k[b, h],
                v[b, h],
                None if d_o is None else d_o[b, heads],
                seen,
                None if keep is None else keep[b, heads],
            )
            for name, parts in made.items():
                place = h if name in ("dk", "dv") else heads
                result = results[name]
                for tensor, part in zip(
                    (result.exact, result.rounded, result.sigma, result.slack), parts
                ):
                    tensor[b, place] = part


def _heads(call: Call, q, k, v, d_o, seen, keep) -> dict[str, tuple[torch.Tensor, ...]]:
    """Computes the query heads [G, rows_q, D] that share one key-value head [rows_k, D]."""
    dtype, unit, tiny = q.dtype, _UNIT[q.dtype], _TINY[q.dtype]
    third = 1 / math.sqrt(3)

    def half(x: torch.Tensor) -> torch.Tensor:  # half a unit in the last place of x
        power = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent)
        return (unit * power).clamp_min(tiny) * (x != 0)

    def round_(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).double()

    q, k, v = q.double(), k.double(), v.double()
    keys = k.shape[0]
    scores = call.scale * (q @ k.T)
    magnitude = abs(call.scale) * (q.abs() @ k.abs().T)
    slope = torch.ones_like(scores)
    if call.softcap > 0:
        t = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * t, 1 - t * t
        # The derivative is 1 - t^2 of an FP32 t, so its error is absolute.
        slope_error = 4 * _FP32 * (1 + magnitude / call.softcap)
        magnitude = (magnitude * slope).clamp(max=call.softcap) + call.softcap
    # This is a relative error of a probability. If it nears 1, only the sum of probabilities is
    # certain.
    spread = (_FP32 * (magnitude + scores.abs())).masked_fill(~seen, 0)
    spread = (spread.amax(-1, keepdim=True) if keys else spread.sum(-1, keepdim=True)) + 4 * _FP32
    scores = scores.masked_fill(~seen, -math.inf)
    top = (
        scores.amax(-1, keepdim=True)
        if keys
        else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    )
    above = torch.exp(scores - top.clamp_min(-1e300))
    total = above.sum(-1, keepdim=True)
    lse = (top + torch.log(total)).squeeze(-1)
    inverse = torch.where(total > 0, 1 / total.clamp_min(1e-300), 0)
    p = above * inverse
    expand = 1.0
    mask = torch.ones_like(p)
    if keep is not None:
        expand, mask = 1 / (1 - call.dropout), keep.double()

    o = expand * ((p * mask) @ v)
    o_rounded = round_(expand * inverse * (round_(above * mask) @ v))
    o_sigma = third * torch.sqrt(
        (half(above * mask) ** 2 @ v**2) * (expand * inverse) ** 2 + half(o) ** 2
    )
    lost = _FLUSHED * seen  # exponentials below the normal numbers of FP32 become 0
    o_slack = expand * inverse * (lost * mask @ v.abs()) + 2 * spread.clamp(max=1) * expand * (
        (p * mask) @ v.abs() + p @ v.abs()
    )
    made = {"o": (o, o_rounded, o_sigma, o_slack)}
    made["lse"] = (lse, lse, torch.zeros_like(lse), (2 * spread.squeeze(-1) + _FP32 * lse.abs()))
    if d_o is None:
        return made

    d_o = d_o.double()
    d_p = expand * mask * (d_o @ v.T)
    d_p_error = _FP32 * expand * mask * (d_o.abs() @ v.abs().T)
    delta = (d_o * o).sum(-1, keepdim=True)
    delta_rounded = (d_o * o_rounded).sum(-1, keepdim=True)
    delta_sigma = (d_o * half(o)).square().sum(-1, keepdim=True).sqrt() * third
    # The kernel computes delta from the O that it stored, which includes the roundings of P.
    delta_sigma = delta_sigma + (d_o.square() * o_sigma.square()).sum(-1, keepdim=True).sqrt()
    delta_slack = (d_o.abs() * (o_slack + _FP32 * o.abs())).sum(-1, keepdim=True)
    d_s = p * (d_p - delta) * slope
    d_s_rounded = round_(p * (d_p - delta_rounded) * slope)
    loose = spread.clamp(max=1)
    d_s_slack = lost * slope * (d_p.abs() + delta.abs()) + p * slope * (
        2 * loose * (d_p.abs() + delta.abs()) + d_p_error + delta_slack
    )
    if call.softcap > 0:
        d_s_slack = d_s_slack + p * (d_p - delta).abs() * slope_error
    row = p * slope

    d_v = expand * torch.einsum("gij,gid->jd", p * mask, d_o)
    d_v_rounded = round_(expand * torch.einsum("gij,gid->jd", round_(p * mask), d_o))
    variance = expand**2 * torch.einsum("gij,gid->jd", half(p * mask) ** 2, d_o**2)
    d_v_sigma = third * torch.sqrt(variance + half(d_v) ** 2)
    doubt = mask * (2 * p * loose + lost)
    d_v_slack = expand * torch.einsum("gij,gid->jd", doubt, d_o.abs())
    made["dv"] = (d_v, d_v_rounded, d_v_sigma, d_v_slack)

    scale = call.scale
    d_q = scale * (d_s @ k)
    d_q_rounded = round_(scale * (d_s_rounded @ k))
    variance = half(d_s) ** 2 @ k**2 / 3 + (delta_sigma * (row @ k)) ** 2
    d_q_sigma = torch.sqrt(scale**2 * variance + half(d_q) ** 2 / 3)
    d_q_slack = abs(scale) * ((d_s_slack + _FP32 * d_s.abs()) @ k.abs())
    made["dq"] = (d_q, d_q_rounded, d_q_sigma, d_q_slack)

    d_k = scale * torch.einsum("gij,gid->jd", d_s, q)
    d_k_rounded = round_(scale * torch.einsum("gij,gid->jd", d_s_rounded, q))
    variance = torch.einsum("gij,gid->jd", half(d_s) ** 2 / 3 + (row * delta_sigma) ** 2, q**2)
    d_k_sigma = torch.sqrt(scale**2 * variance + half(d_k) ** 2 / 3)
    d_k_slack = abs(scale) * torch.einsum("gij,gid->jd", d_s_slack + _FP32 * d_s.abs(), q.abs())
    made["dk"] = (d_k, d_k_rounded, d_k_sigma, d_k_slack)
    return made
