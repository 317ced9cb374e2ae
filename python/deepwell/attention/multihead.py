"""torch.nn.MultiheadAttention with attention of ours, by a forward of the instance.

Where a call asks for what only PyTorch's forward does (weights, masks as tensors, added keys), that one runs: the
same module, the same parameters.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

from deepwell.attention import functional
from deepwell.attention.functional import attention


class MultiheadForward:
    """The forward of one nn.MultiheadAttention. It does not keep its module alive."""

    def __init__(self, module: torch.nn.MultiheadAttention) -> None:
        self._module = weakref.ref(module)
        self.previous = module.__dict__.get("forward")
        self.fallbacks: Counter[str] = Counter()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return run(
            *(self._module(), self.fallbacks, query, key, value, key_padding_mask, need_weights),
            *(attn_mask, average_attn_weights, is_causal),
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(torch.nn.MultiheadAttention.forward.__get__(self._module()))

    def __reduce__(self):
        return (_make, (self._module(), self.previous))

    def __deepcopy__(self, memo: dict[int, Any]) -> "MultiheadForward":
        return _make(copy.deepcopy(self._module(), memo), copy.deepcopy(self.previous, memo))


def run(
    module: torch.nn.MultiheadAttention,
    fallbacks: Counter[str],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    padding: torch.Tensor | None,
    need_weights: bool,
    mask: torch.Tensor | None,
    average: bool,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    reason = _why_not(module, query, key, value, padding, need_weights, mask, is_causal)
    if not reason:
        return _forward(module, query, key, value, is_causal), None
    if not torch.compiler.is_compiling():
        fallbacks[reason] += 1
    return torch.nn.MultiheadAttention.forward(
        *(module, query, key, value, padding, need_weights, mask, average, is_causal)
    )


def _make(module: torch.nn.MultiheadAttention, previous: Any) -> MultiheadForward:
    forward = MultiheadForward(module)
    forward.previous = previous
    return forward


def why_not_module(module: torch.nn.MultiheadAttention) -> str:
    """ "" where a forward of ours can stand for this module's."""
    if type(module).forward is not torch.nn.MultiheadAttention.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in module.__dict__:
        return "its forward has been replaced already"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds keys of its own (add_bias_kv, add_zero_attn)"
    return ""


def _why_not(module, query, key, value, padding, need_weights, mask, is_causal) -> str:
    """Why PyTorch's forward runs a call."""
    if module.bias_k is not None or module.add_zero_attn:
        return "keys of the module's own are added (add_bias_kv, add_zero_attn)"
    if need_weights:
        return "attention weights are asked for (need_weights=True)"
    if padding is not None:
        return "a key_padding_mask is given"
    if (mask is not None) != bool(is_causal):
        # With the hint, PyTorch does not look at the mask either; without a mask the hint is an error of its own.
        return (
            "an attn_mask is given" if mask is not None else "is_causal is given without attn_mask"
        )
    if query.device.type not in functional.devices:
        return f"the tensors are on {query.device.type}"
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 3:
        return "the tensors have no batch axis"
    if query.is_nested or key.is_nested or value.is_nested:
        return "the tensors are nested"
    for tensor in (query, key, value):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            if not torch.compiler.is_compiling():
                return f"a tensor is a {type(tensor).__name__}"
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if device == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {dtype}"
    if key.shape[:2] != value.shape[:2] or query.shape[-1] != module.embed_dim:
        return "the shapes are unusual"
    batch = 0 if module.batch_first else 1
    if query.shape[batch] != key.shape[batch]:
        return "the shapes are unusual"
    return ""


def _projected(module, query, key, value) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values [.., .., embed_dim] each."""
    size, bias = module.embed_dim, module.in_proj_bias
    if not module._qkv_same_embed_dim:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return tuple(
            F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
    weight = module.in_proj_weight
    if query is key and key is value:
        return F.linear(query, weight, bias).chunk(3, -1)
    first = None if bias is None else bias[:size]
    if key is value:
        rest = None if bias is None else bias[size:]
        pair = F.linear(key, weight[size:], rest).chunk(2, -1)
        return F.linear(query, weight[:size], first), *pair
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(
        F.linear(x, w, b)
        for x, w, b in zip((query, key, value), weight.chunk(3), biases, strict=True)
    )


def _forward(module, query, key, value, is_causal: bool) -> torch.Tensor:
    order = (0, 2, 1, 3) if module.batch_first else (1, 2, 0, 3)
    heads = (module.num_heads, module.head_dim)
    # [batch, heads, rows, head_dim], as views of what the projections gave.
    q, k, v = (x.unflatten(-1, heads).permute(order) for x in _projected(module, query, key, value))
    dropout = module.dropout if module.training else 0.0
    made = attention(q, k, v, None, dropout, is_causal=is_causal)
    back = (0, 2, 1, 3) if module.batch_first else (2, 0, 1, 3)
    joined = made.permute(back).flatten(-2)
    return F.linear(joined, module.out_proj.weight, module.out_proj.bias)
