"""nn.TransformerEncoderLayer and nn.TransformerEncoder in evaluation without gradients.

In this case PyTorch runs a fused layer with its own attention, and with padding it runs the encoder's layers on nested
tensors. Deepwell's forwards run such calls layer by layer through Deepwell's attention instead, and padded batches as
packed sequences. Every other call runs the class's own forward.
"""

from __future__ import annotations

import torch

from deepwell.attention import functional, multihead, padding
from deepwell.attention.instance import InstanceForward


def _may_be_fused(layer: torch.nn.TransformerEncoderLayer, src: torch.Tensor) -> bool:
    """Returns whether PyTorch's fused layer may run."""
    if layer.training:
        return False
    if not torch.is_grad_enabled():
        return True
    return not (src.requires_grad or any(p.requires_grad for p in layer.parameters()))


def _has_hooks(layer: torch.nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


def _is_served(attention: torch.nn.MultiheadAttention, src: torch.Tensor, window, packed) -> bool:
    """Returns whether Deepwell runs attention over projections of ``src``, [.., .., embed_dim]."""
    rows = src.unflatten(-1, (attention.num_heads, attention.head_dim))
    if packed:
        rows = rows.flatten(0, 1)
    else:
        rows = rows.permute(0, 2, 1, 3) if attention.batch_first else rows.permute(1, 2, 0, 3)
    return not functional.why_pytorch(rows, rows, rows, window, False, packed=packed)


class LayerForward(InstanceForward):
    """The forward of one nn.TransformerEncoderLayer."""

    def __call__(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        layer = self._module()
        if isinstance(src_key_padding_mask, padding.Sequences):
            return _by_parts(layer, src, None, src_key_padding_mask, False)
        # Hooks would see intermediate tensors; with hooks PyTorch runs the layer's parts anyway.
        if not _may_be_fused(layer, src) or _has_hooks(layer):
            return type(layer).forward(layer, src, src_mask, src_key_padding_mask, is_causal)
        given = (src, src, src, src_key_padding_mask, False, src_mask, is_causal)
        kept, reason = multihead.look_at(layer.self_attn, *given)
        causal = src_mask is not None  # any other mask was a reason not to get here
        window = (-1, 0 if causal else -1)
        if not reason and _is_served(layer.self_attn, src, window, kept is not None):
            return _by_parts(layer, src, src_mask, kept, causal)
        counted = multihead.fallbacks_of(layer.self_attn)
        before = counted.total()
        made = type(layer).forward(layer, src, src_mask, src_key_padding_mask, is_causal)
        if reason and counted.total() == before and not torch.compiler.is_compiling():
            counted[reason] += 1
        return made


def _by_parts(layer, src, mask, kept, is_causal) -> torch.Tensor:
    """Runs the layer part by part, as in training."""

    def attended(x: torch.Tensor) -> torch.Tensor:
        return layer._sa_block(x, mask, kept, is_causal=is_causal)

    if layer.norm_first:
        x = src + attended(layer.norm1(src))
        return x + layer._ff_block(layer.norm2(x))
    x = layer.norm1(src + attended(src))
    return layer.norm2(x + layer._ff_block(x))


class EncoderForward(InstanceForward):
    """The forward of one nn.TransformerEncoder."""

    def __call__(
        self,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        encoder = self._module()
        if mask is None and src_key_padding_mask is not None:
            made = _packed(encoder, src, src_key_padding_mask)
            if made is not None:
                return made
        return type(encoder).forward(encoder, src, mask, src_key_padding_mask, is_causal)


def _packed(encoder, src, mask_of_keys) -> torch.Tensor | None:
    """Computes what PyTorch would on nested tensors: padded rows are left out, and are zeros after the last layer."""
    first = encoder.layers[0]
    if torch.compiler.is_compiling() or not torch.backends.mha.get_fastpath_enabled():
        return None
    if not getattr(encoder, "use_nested_tensor", False) or torch.is_autocast_enabled():
        return None
    if not all(is_ours(layer) and layer.self_attn.batch_first for layer in encoder.layers):
        return None
    if not _may_be_fused(first, src) or any(_has_hooks(layer) for layer in encoder.layers):
        return None
    kept, reason = multihead.look_at(first.self_attn, src, src, src, mask_of_keys, False)
    if reason or kept.is_led or not kept.is_solid:
        return None
    order, *sequences = kept.gathered()
    rows = src.flatten(0, 1).index_select(0, order)[None]
    if not _is_served(first.self_attn, rows, (-1, -1), True):
        return None
    for layer in encoder.layers:
        rows = layer(rows, src_key_padding_mask=padding.Sequences(*sequences))
    made = padding.spread(rows[0], order, src.shape[0] * src.shape[1]).view(src.shape)
    return made if encoder.norm is None else encoder.norm(made)


# ---- modules ---------------------------------------------------------------------------------------------


def is_ours(layer: torch.nn.Module) -> bool:
    return isinstance(layer.__dict__.get("forward"), LayerForward)


def install(module: torch.nn.Module) -> None:
    """Gives an encoder or a layer Deepwell's forward, if its attention has one and its own has not been replaced."""
    if "forward" in module.__dict__:
        return
    layer = torch.nn.TransformerEncoderLayer
    if type(module).forward is layer.forward:
        # PyTorch's fused layer ignores parts that a subclass changed. Such a layer keeps its forward.
        same = (
            type(module)._sa_block is layer._sa_block and type(module)._ff_block is layer._ff_block
        )
        if same and multihead.is_ours(module.self_attn):
            module.__dict__["forward"] = LayerForward(module)
    elif type(module).forward is torch.nn.TransformerEncoder.forward:
        if len(module.layers) > 0 and all(is_ours(layer) for layer in module.layers):
            module.__dict__["forward"] = EncoderForward(module)
