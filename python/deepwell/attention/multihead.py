"""torch.nn.MultiheadAttention with Deepwell's attention, through a forward of the instance.

PyTorch's forward runs calls that only it supports (masks of any kind, weights after dropout, added keys), with the same
module and the same parameters.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

from deepwell.attention import functional, padding
from deepwell.attention.functional import attention, packed_attention
from deepwell.attention.instance import InstanceForward
from deepwell.attention.padding import Padding, Sequences
from deepwell.attention.weights import attention_weights


class MultiheadForward(InstanceForward):
    """The forward of one nn.MultiheadAttention."""

    def __init__(self, module: torch.nn.MultiheadAttention) -> None:
        super().__init__(module)
        self.fallbacks: Counter[str] = Counter()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | Padding | Sequences | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(key_padding_mask, Sequences):
            return _packed(self._module(), query, key_padding_mask), None
        return run(
            *(self._module(), self.fallbacks, query, key, value, key_padding_mask, need_weights),
            *(attn_mask, average_attn_weights, is_causal),
        )


def run(
    module: torch.nn.MultiheadAttention,
    fallbacks: Counter[str],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask_of_keys: torch.Tensor | Padding | None,
    need_weights: bool,
    mask: torch.Tensor | None,
    average: bool,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(mask_of_keys, Padding):  # Deepwell's encoder layer has already read it
        kept, reason = mask_of_keys, ""
    else:
        given = (query, key, value, mask_of_keys, need_weights, mask, is_causal)
        kept, reason = look_at(module, *given)
    if not reason:
        return _forward(module, query, key, value, kept, need_weights, mask, average)
    if not torch.compiler.is_compiling():
        fallbacks[reason] += 1
    return torch.nn.MultiheadAttention.forward(
        *(module, query, key, value, mask_of_keys, need_weights, mask, average, is_causal)
    )


def look_at(
    module, query, key, value, mask_of_keys, need_weights, mask=None, is_causal=False
) -> tuple[Padding | None, str]:
    """Returns what a key_padding_mask keeps, and why PyTorch's forward must run a call ("": Deepwell runs it)."""
    reason = _why_not(module, query, key, value, need_weights, mask, is_causal)
    # If only the is_causal hint is given, PyTorch does not read the mask either.
    if reason or (mask_of_keys is None and (mask is None or (is_causal and not need_weights))):
        return None, reason
    return _read(module, query, key, mask_of_keys, mask)


def is_ours(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), MultiheadForward)


def fallbacks_of(module: torch.nn.Module) -> Counter[str]:
    return module.__dict__["forward"].fallbacks


def why_not_module(module: torch.nn.MultiheadAttention) -> str:
    """Returns "" if Deepwell's forward can replace this module's, else the reason."""
    if type(module).forward is not torch.nn.MultiheadAttention.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in module.__dict__:
        return "its forward has been replaced already"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds its own keys (add_bias_kv, add_zero_attn)"
    return ""


def _why_not(module, query, key, value, need_weights, mask, is_causal) -> str:
    """Returns why PyTorch's forward must run a call, apart from the contents of its tensors."""
    if module.bias_k is not None or module.add_zero_attn:
        return "the module adds its own keys (add_bias_kv, add_zero_attn)"
    if need_weights and module.training and module.dropout > 0:
        return "attention weights are requested (need_weights=True), and dropout changes them"
    if is_causal and mask is None:  # PyTorch raises an error
        return "is_causal is given without attn_mask"
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


def _read(module, query, key, mask_of_keys, mask) -> tuple[Padding | None, str]:
    """Returns what a key_padding_mask keeps, and why the contents of the masks need PyTorch's forward."""
    batch, rows = (0, 1) if module.batch_first else (1, 0)
    rows_q, rows_k = query.shape[rows], key.shape[rows]
    if mask is not None and not (mask.shape == (rows_q, rows_k) and rows_q == rows_k):
        return None, "an attn_mask is given that is not causal"
    reason = padding.why_not_read(*[t for t in (mask_of_keys, mask) if t is not None])
    if reason:
        return None, reason
    if mask is not None and not padding.is_causal(mask):
        return None, "an attn_mask is given that is not causal"
    if mask_of_keys is None:
        return None, ""
    if mask_of_keys.shape != (key.shape[batch], rows_k) or mask_of_keys.numel() == 0:
        return None, "the shapes are unusual"
    if mask_of_keys.dtype != torch.bool and not mask_of_keys.is_floating_point():
        return None, f"the key_padding_mask is of {mask_of_keys.dtype}"
    if mask_of_keys.device != key.device:
        return None, f"the key_padding_mask is on {mask_of_keys.device}"
    kept = padding.of_keys_ignored(mask_of_keys)
    if mask is not None and not kept.strange and (kept.is_led or not kept.is_solid):
        return None, "a causal mask is combined with padding that is not at the end of the rows"
    return kept, padding.why_not(kept, rows_q, (-1, -1 if mask is None else 0))


def _projected(module, query, key, value) -> tuple[torch.Tensor, ...]:
    """Returns queries, keys and values, [.., .., embed_dim] each."""
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


def _forward(
    module, query, key, value, kept, need_weights, mask, average
) -> tuple[torch.Tensor, torch.Tensor | None]:
    order = (0, 2, 1, 3) if module.batch_first else (1, 2, 0, 3)
    heads = (module.num_heads, module.head_dim)
    # [batch, heads, rows, head_dim], as views of the projections' results.
    q, k, v = (x.unflatten(-1, heads).permute(order) for x in _projected(module, query, key, value))
    dropout = module.dropout if module.training else 0.0
    causal = mask is not None
    if kept is None:
        made = attention(q, k, v, None, dropout, is_causal=causal)
    else:
        made = padding.attend(q, k, v, kept, dropout, window=(-1, 0 if causal else -1))
        if made is None:
            seen = None if kept.keeps_all else kept.kept[:, None, None]
            made = attention(q, k, v, seen, dropout, is_causal=causal)
    back = (0, 2, 1, 3) if module.batch_first else (2, 0, 1, 3)
    joined = made.permute(back).flatten(-2)
    out = F.linear(joined, module.out_proj.weight, module.out_proj.bias)
    if not need_weights:
        return out, None
    hidden = [] if kept is None else [~kept.kept[:, None, None]]
    if mask is not None:
        hidden.append(mask)
    return out, attention_weights(q, k, tuple(hidden), average)


def _packed(module, query: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Self-attention of sequences that follow one another: ``query`` is [1, total rows, embed_dim]."""
    heads = (module.num_heads, module.head_dim)
    q, k, v = (x[0].unflatten(-1, heads) for x in _projected(module, query, query, query))
    dropout = module.dropout if module.training else 0.0
    offsets, longest = sequences
    made = packed_attention(q, k, v, offsets, offsets, longest, longest, dropout)
    return F.linear(made.flatten(-2)[None], module.out_proj.weight, module.out_proj.bias)
