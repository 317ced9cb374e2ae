"""The probabilities of attention, for callers that request them (nn.MultiheadAttention's need_weights).

The attention output does not depend on them, so they are often computed and never used. Backward recomputes what it
needs from q and k. Unused weights therefore cost only their forward, and nothing in a compiled graph.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    masks: tuple[torch.Tensor, ...] = (),
    average: bool = False,
) -> torch.Tensor:
    """Returns softmax(q k^T / sqrt(head_dim)) of q and k [batch, heads, rows, head_dim]: [batch, heads, rows_q,
    rows_k], or the mean over the heads, [batch, rows_q, rows_k].

    ``masks`` broadcast to [batch, heads, rows_q, rows_k]: boolean, True where a key is hidden, or added to the scores.
    """
    by_function = (
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and type(q) in _PLAIN
        and type(k) in _PLAIN
    )
    if by_function:
        return _Weights.apply(q, k, average, *masks)
    return _weights(q, k, masks, average)


def _weights(q, k, masks, average):
    """Computes the weights in the dtypes that PyTorch uses, whatever autocast does."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    for mask in masks:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(mask, -torch.inf)
        else:
            scores = scores + mask.to(scores.dtype)
    p = torch.softmax(scores, -1)
    return p.mean(1) if average else p


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, average, *masks):
        ctx.save_for_backward(q, k, *masks)
        ctx.average = average
        device = q.device.type
        ctx.autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return _weights(q, k, masks, average)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        q, k, *masks = ctx.saved_tensors
        dtype, enabled = ctx.autocast
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(q.device.type, dtype, enabled):
            made = _weights(q, k, masks, ctx.average)
        dq, dk = torch.autograd.grad(made, (q, k), gradient)
        return dq, dk, None, *[None] * len(masks)
