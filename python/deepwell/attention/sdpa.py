"""activate_sdpa(): runs torch.nn.functional.scaled_dot_product_attention in Deepwell, for the whole process.

PyTorch picks one of its kernels (cuDNN, flash, efficient, math) inside the operator aten::scaled_dot_product_attention,
by flags and its own order. A kernel registered for one of them (register_flash_attention_impl) runs only if PyTorch
picks that one. Therefore the operator itself gets another kernel for CUDA tensors, above that choice. Calls that
Deepwell supports go there, all others to PyTorch's own operator as before. The dispatcher uses it for every caller:
Python, C++, compiled graphs.
"""

from __future__ import annotations

import torch

from deepwell.attention import functional

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
_KEYS = {"cuda": ("CUDA", "AutogradCUDA"), "cpu": ("CPU", "AutogradCPU")}
_libraries: dict[str, torch.library.Library] = {}


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    # Heads are shared only if enable_gqa is set; PyTorch handles calls with unequal heads, including their errors.
    if (
        attn_mask is None
        and (enable_gqa or query.shape[-3:-2] == key.shape[-3:-2])
        and _wants_fused()
    ):
        made = functional.if_ours(query, key, value, dropout_p, is_causal, scale)
        if made is not None:
            return made
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    # PyTorch's kernel of the operator, which is composed of other operators and differentiates through them.
    return _OPERATOR._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd,
        *given,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _wants_fused() -> bool:
    """Returns whether any of PyTorch's fused kernels is allowed. If none is, the user requested unfused attention (for
    second derivatives, or as a reference) or an error."""
    return (
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
    )


def activate_sdpa() -> None:
    """Runs scaled_dot_product_attention in Deepwell from now on, for every call that Deepwell supports.

    This holds for the whole process, whichever fused kernel PyTorch would prefer. ``torch.nn.attention.sdpa_kernel``
    chooses among PyTorch's own kernels and does not affect calls that Deepwell supports. If it allows no fused kernel
    (``SDPBackend.MATH``), PyTorch runs the call. Calls with a mask, other dtypes or devices run in PyTorch as before.
    ``deactivate_sdpa()`` undoes this.
    """
    for device in functional.devices:
        if device in _libraries:
            continue
        library = torch.library.Library("aten", "IMPL")
        for key in _KEYS[device]:
            library.impl("scaled_dot_product_attention", _attention, key)
        _libraries[device] = library
    _forget_dispatch()


def deactivate_sdpa() -> None:
    """Restores PyTorch's scaled_dot_product_attention. Does nothing if activate_sdpa() was not called."""
    while _libraries:
        _, library = _libraries.popitem()
        library._destroy()
    _forget_dispatch()


def _forget_dispatch() -> None:
    """Clears the operator's cache of kernels, which torch.compile may have filled."""
    _OPERATOR._dispatch_cache.clear()
