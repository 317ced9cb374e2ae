"""activate_sdpa(): Deepwell under torch.nn.functional.scaled_dot_product_attention, for the whole process.

PyTorch picks one of its kernels (cuDNN, flash, efficient, math) inside of the operator aten::scaled_dot_product_
attention, by flags and an order of its own. Registering kernels for one of those (register_flash_attention_impl) is
reached only where the choice falls on it. So the operator itself gets another kernel, for CUDA tensors, above that
choice: calls that Deepwell runs go there, all others to PyTorch's own operator as before. The dispatcher finds it
from wherever the operator is called: Python, C++, compiled graphs.
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
    # Heads are shared only on request; calls with unequal ones are PyTorch's, errors included.
    if (
        attn_mask is None
        and (enable_gqa or query.shape[-3:-2] == key.shape[-3:-2])
        and _wants_fused()
    ):
        made = functional.if_ours(query, key, value, dropout_p, is_causal, scale)
        if made is not None:
            return made
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    # PyTorch's kernel of the operator, which is made of others and differentiates through them.
    return _OPERATOR._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd,
        *given,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _wants_fused() -> bool:
    """Whether any of PyTorch's fused kernels is allowed. Where none is, unfused attention was asked for by name (for
    second derivatives, or as a reference), or an error."""
    return (
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
    )


def activate_sdpa() -> None:
    """From now on scaled_dot_product_attention runs in Deepwell wherever Deepwell runs the call.

    Process-wide, whichever fused kernel PyTorch would prefer: ``torch.nn.attention.sdpa_kernel`` chooses among its own
    kernels and has no say for calls that Deepwell runs, but where it allows no fused one (``SDPBackend.MATH``)
    PyTorch runs the call. Calls with a mask, other dtypes or devices are PyTorch's as before. ``deactivate_sdpa()``
    ends it.
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
    """PyTorch's scaled_dot_product_attention again; does nothing where activate_sdpa() was not called."""
    while _libraries:
        _, library = _libraries.popitem()
        library._destroy()
    _forget_dispatch()


def _forget_dispatch() -> None:
    """What torch.compile traced before has left in the operator which kernel it runs."""
    _OPERATOR._dispatch_cache.clear()
