"""Hugging Face's models: registers "deepwell" among transformers' attention functions and masks.

A model that uses transformers' AttentionInterface names its implementation in its configuration. optimize() replaces
"sdpa" there by "deepwell_sdpa", which computes the same, and "eager" by "deepwell_eager" in models with a soft cap,
which support only eager attention. "deepwell" is for users who name it in the configuration. A causal mask, possibly
with a sliding window, is not materialised, because transformers' own flags describe it. A mask with padding is
materialised, because models may use it in any way. The attention function recognises it and then runs without it. Any
other mask goes to PyTorch's attention as a tensor.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from typing import Any, Iterator

import torch

from deepwell.attention import functional, padding
from deepwell.attention.functional import attention, visible

PLAIN = "deepwell"
AS_SDPA = "deepwell_sdpa"
AS_EAGER = "deepwell_eager"
BEFORE = {AS_SDPA: "sdpa", AS_EAGER: "eager"}


def register() -> bool:
    """Registers these names with transformers. Returns False if its version has no masks to register."""
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError:
        return False
    functions = {
        PLAIN: attention_forward,
        AS_SDPA: _attention_as_sdpa,
        AS_EAGER: _attention_as_eager,
    }
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    return True


# ---- masks -----------------------------------------------------------------------------------------------


def mask(
    batch_size: int,
    q_length: Any,
    kv_length: Any,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """Returns None for a causal or a full mask that flags of the attention function describe. Otherwise returns sdpa's
    boolean mask; ``_padded`` records whether it is the causal or full mask with padding.

    transformers forbids the skip (``allow_...``) if anything has been added to the mask: packed sequences, blocks of
    images, functions of the user's. ``local_size`` is a sliding window. The layer passes it to the attention function
    as well, unless the model has chunks.
    """
    from transformers.masking_utils import sdpa_mask

    if torch.compiler.is_compiling() and attention_mask is None and not others.get("use_vmap"):
        # transformers cannot look for packed sequences in the positions here, and assumes that there are some.
        if _noted.config is config and not _noted.positions:
            allow_is_causal_skip = True
    chunked = getattr(config, "attention_chunk_size", None) is not None
    # A static cache has a tensor as its offset, which must not be read here.
    begins = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0
    window = None  # the window that the mask would have without padding
    if allow_is_causal_skip and (local_size is None or not chunked):
        if begins and q_length == kv_length:
            window = (-1 if local_size is None else local_size - 1, 0)
    if allow_is_bidirectional_skip and local_size is None:
        if attention_mask is None:
            return None
        if isinstance(kv_offset, int) and kv_offset == 0:
            window = (-1, -1)
    kept = None
    if window is not None:
        if attention_mask is None:
            return None
        kept = _read(attention_mask, kv_length)
        if kept is not None and kept.keeps_all:
            return None
    # Tensors of inference mode do not record writes, so nothing can be cached about them.
    with torch.inference_mode(False) if kept is not None else contextlib.nullcontext():
        made = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip and kept is None,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip and kept is None,
            config=config,
            **others,
        )
    if made is not None and kept is not None:
        _padded.put(made, (kept, window))
    return made


# For masks made above: the keys that they keep, and their window.
_padded = padding.Known()


def _read(mask_of_keys: torch.Tensor, kv_length: Any) -> padding.Padding | None:
    """Returns what a padding mask (True: kept) keeps, or None if the host must not read it."""
    if padding.why_not_read(mask_of_keys) or mask_of_keys.dim() != 2 or mask_of_keys.numel() == 0:
        return None
    if mask_of_keys.dtype != torch.bool or mask_of_keys.shape[-1] != kv_length:
        return None
    return padding.of_keys_kept(mask_of_keys)


class _Noted:
    """The arguments of a model that is being compiled, for the masks that it makes."""

    config: Any = None
    positions = True


_noted = _Noted()


class NotePositions:
    """A forward pre-hook of a module that makes causal masks. It records whether positions are given."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            given = args[self.place] if len(args) > self.place else kwargs.get("position_ids")
            _noted.config, _noted.positions = module.config, given is not None


# A module that names one of these adds to its causal masks, so none may be skipped.
_ADDITIONS = {"block_sequence_ids", "or_mask_function", "and_mask_function", "allow_is_causal_skip"}


def note_positions(module: Any) -> None:
    """Puts the hook on modules that make causal masks and add nothing to them."""
    kind = type(module)
    names = _names_in(kind)
    if not names & {"create_causal_mask", "create_sliding_window_causal_mask"}:
        return
    if (names | _constants_in(kind)) & _ADDITIONS:
        return
    parameters = list(inspect.signature(kind.forward).parameters)
    if "position_ids" in parameters:
        hook = NotePositions(parameters.index("position_ids") - 1)
        module.register_forward_pre_hook(hook, with_kwargs=True)


def forget_positions(module: torch.nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, NotePositions):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


# ---- attention -------------------------------------------------------------------------------------------


def _without_mask(query, key, value, mask, dropout, scaling, softcap=None) -> torch.Tensor | None:
    """Runs attention with a mask that is only padding. Returns None for other masks and unsupported calls."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    found = _padded.get(mask) if type(mask) is torch.Tensor else None
    if found is None:
        return None
    kept, window = found
    if not (query.shape[0] == key.shape[0] == kept.batch and key.shape[2] == kept.rows):
        return None
    if padding.why_not(kept, query.shape[2], window):
        return None
    made = padding.attend(
        query, key, value, kept, dropout, scaling, window=window, softcap=softcap or 0.0
    )
    return None if made is None else made.transpose(1, 2).contiguous()


def _count_mask() -> None:
    if not torch.compiler.is_compiling():
        functional.fallbacks["a mask is given as a tensor"] += 1


def _attend(module, query, key, value, dropout, scaling, is_causal, window, softcap):
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows_q, rows_k = query.shape[2], key.shape[2]
    # As sdpa: one query sees all keys, and keys after the last query are free room of a static cache.
    if causal and rows_q > 1:
        if rows_k > rows_q:
            key, value = key[:, :, :rows_q], value[:, :, :rows_q]
        span = (-1 if window is None else window - 1, 0)
    else:
        span = (-1, -1)
    made = attention(
        query, key, value, None, dropout, scale=scaling, window=span, softcap=softcap or 0.0
    )
    return made.transpose(1, 2).contiguous(), None


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """ "deepwell": everything that a layer passes to its attention function is honoured or refused."""
    for name in ("position_bias", "s_aux"):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"attn_implementation='deepwell' does not support {name}, which {type(module).__name__} uses: load "
                "the model with attn_implementation='eager'"
            )
    if attention_mask is None:
        return _attend(
            module, query, key, value, dropout, scaling, is_causal, sliding_window, softcap
        )
    made = _without_mask(query, key, value, attention_mask, dropout, scaling, softcap)
    if made is not None:
        return made, None
    made = attention(
        query, key, value, attention_mask, dropout, scale=scaling, softcap=softcap or 0.0
    )
    return made.transpose(1, 2).contiguous(), None


def _attention_as_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """ "deepwell_sdpa": computes what sdpa does. It has no soft cap."""
    if attention_mask is None and position_bias is None:
        return _attend(module, query, key, value, dropout, scaling, is_causal, sliding_window, None)
    if position_bias is None:
        made = _without_mask(query, key, value, attention_mask, dropout, scaling)
        if made is not None:
            return made, None
    _count_mask()
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if position_bias is not None:
        others["position_bias"] = position_bias
    return sdpa_attention_forward(
        *(module, query, key, value, attention_mask, dropout, scaling, is_causal), **others
    )


def _attention_as_eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ "deepwell_eager": if the probabilities are requested, the model's own eager function runs."""
    asked = others.get("output_attentions", getattr(module.config, "output_attentions", False))
    if not asked and attention_mask is None:
        return attention_forward(
            *(module, query, key, value, None, dropout, scaling, None, sliding_window), **others
        )
    if not asked:
        made = _without_mask(
            query, key, value, attention_mask, dropout, scaling, others.get("softcap")
        )
        if made is not None:
            return made, None
    rows_q, rows_k = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) and rows_q > 1
        window = (
            -1 if sliding_window is None or not causal else sliding_window - 1,
            0 if causal else -1,
        )
        attention_mask = visible(rows_q, rows_k, window, False, query.device)[None, None]
    elif not asked:
        _count_mask()
    if attention_mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        attention_mask = torch.where(attention_mask, 0.0, least).to(query.dtype)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(
        *(module, query, key, value, attention_mask),
        dropout=dropout,
        scaling=scaling,
        sliding_window=sliding_window,
        **others,
    )


# ---- models ----------------------------------------------------------------------------------------------


def models(root: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the transformers models inside ``root`` that have their own configuration."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:  # no module can be one of its models
        return
    seen: set[int] = set()
    for path, module in root.named_modules():
        if isinstance(module, library.PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield path, module


def attention_modules(model: torch.nn.Module, prefix: str) -> dict[str, torch.nn.Module]:
    """Returns the modules of ``model`` whose forward gets its attention function from transformers, without a position
    bias (T5); PyTorch runs every call with one."""
    return {
        f"{prefix}.{path}".strip("."): module
        for path, module in model.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in _names_in(type(module))
        and "position_bias" not in _constants_in(type(module))
    }


def replacement(model: Any) -> str | None:
    """Returns the name that replaces the one in the model's configuration, or None."""
    chosen = model.config._attn_implementation
    if chosen == "sdpa":
        return AS_SDPA
    # Eager attention also returns its probabilities. It is replaced only if the model supports nothing else.
    if chosen == "eager" and getattr(model.config, "attn_logit_softcapping", None):
        return AS_EAGER
    return None


def why_not(model: Any) -> str:
    """Returns "" if replacing the implementation in the configuration changes the backend and nothing else, else why
    not."""
    chosen = model.config._attn_implementation
    if chosen == PLAIN or chosen in BEFORE:
        return "it has Deepwell's attention already"
    if replacement(model) is None:
        return f"its attn_implementation is {chosen!r}: load it with 'sdpa', or name 'deepwell' yourself"
    if not register():
        return "this transformers has no AttentionMaskInterface: use 4.53 or later"
    for module in model.modules():
        # A class that compares the name itself would behave differently with a new name.
        if type(module).__module__.startswith("transformers.models.") and "sdpa" in _constants_in(
            type(module)
        ):
            return f"{type(module).__name__} compares with the name 'sdpa'"
    if not attention_modules(model, ""):
        return "none of its modules uses transformers' AttentionInterface without a position bias"
    config = model.config
    told = getattr(config, "sliding_window", None) or getattr(
        config, "attn_logit_softcapping", None
    )
    if told and not getattr(model, "_supports_flash_attn", False):
        return "it does not pass its sliding window or soft cap to its attention function"
    return ""


def _functions_of(kind: type) -> Iterator[types.CodeType]:
    for owner in kind.__mro__:
        if owner is torch.nn.Module or owner.__module__ == "transformers.modeling_utils":
            continue
        for value in vars(owner).values():
            function = getattr(value, "__func__", value)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(function, types.FunctionType):
                yield function.__code__


def _names_in(kind: type) -> set[str]:
    return {name for code in _functions_of(kind) for name in code.co_names}


def _constants_in(kind: type) -> set[str]:
    found: set[str] = set()
    for code in _functions_of(kind):
        for value in code.co_consts:
            # Names of keyword arguments are tuples of strings.
            found.update(
                v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, str)
            )
    return found
