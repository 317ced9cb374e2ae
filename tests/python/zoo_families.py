"""The transformer families of docs/models.md: tiny models of each, in the variants that matter.

A variant is a change of configuration, of attention implementation or of the arguments of the call. The
first variant of a family is part of the quick tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import nn

try:
    import transformers
except ImportError:  # without it, tests of the families are skipped
    transformers = None

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
VOCABULARY = 199
WINDOW = 8

_TINY = dict(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
_GROUPED = dict(_TINY, num_key_value_heads=2)
_STILL = dict(hidden_dropout=0.0, attention_dropout=0.0)


@dataclass(frozen=True)
class Family:
    """Describes how to build a family, and the expected graph of its plain variant: nodes of each
    composite in two layers, and the attributes of each attention.
    """

    name: str
    model: str
    config: str
    options: dict[str, Any]
    composites: dict[str, int]
    attention: tuple[dict[str, Any], ...] = ()
    why: str = ""  # the arguments of the configuration that differ from the default


FAMILIES = [
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        _GROUPED,
        dict(attention=2, rms_norm=5, rope=4, swiglu=2),
        (dict(causal=1, mask=False),) * 2,
        "biases of queries, keys and values; grouped heads",
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "Qwen3Config",
        dict(_GROUPED, head_dim=24),
        dict(attention=2, rms_norm=9, rope=4, swiglu=2),  # with norms of queries and keys
        (dict(causal=1, mask=False),) * 2,
        "norms of queries and keys; grouped heads of a size of their own",
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        "MistralConfig",
        dict(_GROUPED, sliding_window=WINDOW),
        dict(attention=2, rms_norm=5, rope=4, swiglu=2),
        (dict(causal=1, window=WINDOW, mask=False),) * 2,
        "sliding window; shorter and longer sequences",
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        "GemmaConfig",
        dict(_GROUPED, head_dim=24),
        dict(attention=2, rms_norm=5, rope=4, gelu=2),
        (dict(causal=1, mask=False),) * 2,
        "scaled embeddings, norms that multiply by 1 + w",
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        dict(
            _GROUPED,
            head_dim=24,
            sliding_window=WINDOW,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=0.4,  # so low that it affects the scores of a random model
            final_logit_softcapping=0.3,
            attn_implementation="eager",
        ),
        dict(attention=2, rms_norm=9, rope=4, gelu=2),
        (
            dict(causal=1, window=WINDOW, softcap=0.4, mask=False),
            dict(causal=1, window=None, softcap=0.4, mask=False),
        ),
        "soft caps, windows in every other layer",
    ),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        dict(
            _GROUPED,
            head_dim=24,
            sliding_window=WINDOW,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "full_attention"],
        ),
        dict(attention=2, rms_norm=13, rope=4, gelu=2),
        (dict(causal=1, window=WINDOW, mask=False), dict(causal=1, window=None, mask=False)),
        "windows in some layers, two rotary bases, norms of queries and keys",
    ),
    Family(
        "phi",
        "PhiForCausalLM",
        "PhiConfig",
        dict(_TINY, partial_rotary_factor=0.5),
        dict(attention=2, layer_norm=3, rope=4, gelu=2),
        (dict(causal=1, mask=False),) * 2,
        "parallel block; rotary positions on the first part of each head",
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        "Phi3Config",
        dict(_GROUPED),
        dict(attention=2, rms_norm=5, rope=4, swiglu=2),
        (dict(causal=1, mask=False),) * 2,
        "queries, keys and values from one matmul; gate and up likewise",
    ),
    Family(
        "gpt-neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _TINY,
        dict(attention=2, layer_norm=5, rope=4, gelu=2),
        (dict(causal=1, mask=False),) * 2,
        "parallel block; rotary positions on the first part of each head",
    ),
    Family(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        dict(
            {k: v for k, v in _TINY.items() if k != "intermediate_size"},
            ffn_dim=112,
            word_embed_proj_dim=64,
            dropout=0.0,
        ),
        dict(attention=2, layer_norm=5),
        (dict(causal=1, mask=False),) * 2,
        "learned positions, counted from the mask",
    ),
    Family(
        "bert",
        "BertForMaskedLM",
        "BertConfig",
        dict(_TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        dict(attention=2, layer_norm=6, gelu=3),
        (dict(causal=0, mask=True),) * 2,
        "bidirectional; masked-token head",
    ),
    Family(
        "bert-classes",
        "BertForSequenceClassification",
        "BertConfig",
        dict(_TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3),
        dict(attention=2, layer_norm=5, gelu=2),
        (dict(causal=0, mask=True),) * 2,
        "bidirectional; sequence classification",
    ),
    Family(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        dict(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=24,
            d_ff=112,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        dict(attention=6, rms_norm=12),  # each decoder layer has two attentions
        # encoder: bias and padding; decoder: bias, causal; cross-attention: padding
        (
            dict(causal=0, mask=True),
            dict(causal=0, mask=True),
            dict(causal=1, mask=True),
            dict(causal=0, mask=True),
            dict(causal=1, mask=True),
            dict(causal=0, mask=True),
        ),
        "encoder and decoder, learned relative bias",
    ),
    Family(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        dict(
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=33,  # a row and a column of pixels that no patch covers
            patch_size=8,
            num_labels=5,
        ),
        dict(attention=2, layer_norm=5, gelu=2),
        (dict(causal=0, mask=False),) * 2,
        "images; the patch embedding is a linear layer",
    ),
]
BY_FAMILY = {family.name: family for family in FAMILIES}


def available(family: Family) -> bool:
    return hasattr(transformers, family.model) and hasattr(transformers, family.config)


def build(name: str, **changes: Any) -> nn.Module:
    family = BY_FAMILY[name]
    options = {**family.options, **changes}
    implementation = options.pop("attn_implementation", None)
    config = getattr(transformers, family.config)(**options)
    if implementation is not None:
        config._attn_implementation = implementation
    model = getattr(transformers, family.model)(config)
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


# ---- arguments of a call ------------------------------------------------------------------------


def padding(batch: int, length: int, side: str) -> torch.Tensor:
    """Row i lacks its last (or first) 3i tokens, or so many that one is left."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        lacking = min(row * 3, length - 1)
        if lacking:
            mask[row, slice(length - lacking, None) if side == "right" else slice(lacking)] = 0
    return mask


def _square(batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """A causal mask [B, 1, S, S] with holes; every query sees itself."""
    holes = torch.rand(batch, 1, length, length, generator=generator) < 0.3
    mask = torch.ones(length, length, dtype=torch.bool).tril() & ~holes
    return mask | torch.eye(length, dtype=torch.bool)


def text_arguments(
    *, pad: str | None = None, labels: str | None = "tokens", extra: str | None = None
) -> Callable[[int, int, torch.Generator], Arguments]:
    def arguments(batch: int, length: int, generator: torch.Generator) -> Arguments:
        ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
        kwargs: dict[str, Any] = {"input_ids": ids}
        if pad is not None:
            kwargs["attention_mask"] = padding(batch, length, pad)
        if labels == "tokens":
            kwargs["labels"] = ids.clone()
            if length > 1:
                kwargs["labels"][:, 0] = -100
            if pad is not None:
                kwargs["labels"][kwargs["attention_mask"] == 0] = -100
        elif labels == "classes":
            kwargs["labels"] = torch.randint(0, 3, (batch,), generator=generator)
        elif labels == "answers":  # of a different length, with padding at the end
            kwargs["labels"] = torch.randint(
                1, VOCABULARY, (batch, length + 2), generator=generator
            )
            kwargs["labels"][0, -1] = -100
        if extra == "positions":
            kwargs["position_ids"] = (
                torch.arange(length).expand(batch, -1) + torch.arange(batch)[:, None]
            )
        elif extra == "bool mask":
            kwargs["attention_mask"] = _square(batch, length, generator)
        elif extra == "float mask":
            mask = _square(batch, length, generator)
            kwargs["attention_mask"] = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        elif extra == "segments":
            kwargs["token_type_ids"] = torch.randint(0, 2, (batch, length), generator=generator)
        elif extra == "decoder mask":
            kwargs["decoder_attention_mask"] = padding(batch, length + 2, "right")
        elif extra == "embeddings":
            del kwargs["input_ids"]
            kwargs["inputs_embeds"] = torch.randn(batch, length, 64, generator=generator)
        elif extra == "no cache":
            kwargs["use_cache"] = False
        return (), kwargs

    return arguments


def image_arguments(*, labels: bool = True) -> Callable[[int, int, torch.Generator], Arguments]:
    def arguments(batch: int, length: int, generator: torch.Generator) -> Arguments:
        kwargs = {"pixel_values": torch.randn(batch, 3, 33, 33, generator=generator)}
        if labels:
            kwargs["labels"] = torch.randint(0, 5, (batch,), generator=generator)
        return (), kwargs

    return arguments


# ---- variants -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    family: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    arguments: Callable[[int, int, torch.Generator], Arguments] = text_arguments()
    sizes: tuple[tuple[int, int], ...] = ((2, 17), (3, 33), (1, 5))

    def build(self) -> nn.Module:
        return build(self.family, **self.changes)


_EAGER = {"attn_implementation": "eager"}
_EDGES = ((1, 1), (3, 1), (1, 12))
_AROUND_WINDOW = ((2, WINDOW - 1), (2, WINDOW), (2, WINDOW + 1))


def _decoder(family: str, *more: Variant) -> list[Variant]:
    """Returns the variants that every decoder supports."""
    return [
        Variant(family, "plain"),
        Variant(family, "left padding", arguments=text_arguments(pad="left")),
        Variant(family, "right padding", arguments=text_arguments(pad="right")),
        Variant(family, "eager", _EAGER),
        Variant(family, "eager, left padding", _EAGER, text_arguments(pad="left")),
        Variant(family, "one token, one row", arguments=text_arguments(labels=None), sizes=_EDGES),
        *more,
    ]


def _masks(family: str) -> list[Variant]:
    return [
        Variant(family, "positions", arguments=text_arguments(extra="positions")),
        Variant(family, "bool mask", arguments=text_arguments(extra="bool mask")),
        Variant(family, "float mask", arguments=text_arguments(extra="float mask")),
        Variant(family, "eager, float mask", _EAGER, text_arguments(extra="float mask")),
    ]


def _answers(**options: Any):
    return text_arguments(labels="answers", **options)


def _classes(**options: Any):
    return text_arguments(labels="classes", **options)


VARIANTS: list[Variant] = [
    *_decoder("qwen2", Variant("qwen2", "tied", {"tie_word_embeddings": True})),
    *_decoder(
        "qwen3",
        *_masks("qwen3"),
        Variant("qwen3", "tied", {"tie_word_embeddings": True}),
        Variant("qwen3", "embeddings given", arguments=text_arguments(extra="embeddings")),
        Variant(
            "qwen3",
            "window in the second layer",
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
    ),
    *_decoder(
        "mistral",
        Variant("mistral", "around the window", sizes=_AROUND_WINDOW),
        Variant("mistral", "eager, around the window", _EAGER, sizes=_AROUND_WINDOW),
        Variant("mistral", "no window", {"sliding_window": None}),
        Variant("mistral", "no cache", arguments=text_arguments(extra="no cache")),
    ),
    *_decoder("gemma", Variant("gemma", "untied", {"tie_word_embeddings": False})),
    *_decoder(
        "gemma2",
        Variant("gemma2", "around the window", sizes=_AROUND_WINDOW),
        Variant(
            "gemma2", "no caps", {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        ),
        Variant("gemma2", "float mask", arguments=text_arguments(extra="float mask")),
    ),
    *_decoder("gemma3", Variant("gemma3", "around the window", sizes=_AROUND_WINDOW)),
    *_decoder(
        "phi",
        Variant("phi", "norms of queries and keys", {"qk_layernorm": True}),
        Variant("phi", "grouped heads", {"num_key_value_heads": 2}),
    ),
    *_decoder(
        "phi3",
        Variant("phi3", "window", {"sliding_window": WINDOW}),
        Variant("phi3", "positions", arguments=text_arguments(extra="positions")),
    ),
    *_decoder(
        "gpt-neox",
        Variant("gpt-neox", "one after the other", {"use_parallel_residual": False}),
        Variant("gpt-neox", "no attention bias", {"attention_bias": False}),
    ),
    *_decoder(
        "opt",
        Variant(
            "opt",
            "norms after, projected embeddings",
            {"do_layer_norm_before": False, "word_embed_proj_dim": 40},
        ),
        Variant("opt", "no biases", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ),
    Variant("bert", "plain", arguments=text_arguments(pad="right")),
    Variant("bert", "no padding"),
    Variant("bert", "left padding", arguments=text_arguments(pad="left")),
    Variant("bert", "eager", _EAGER, text_arguments(pad="right")),
    Variant("bert", "segments", arguments=text_arguments(extra="segments")),
    Variant("bert", "positions", arguments=text_arguments(extra="positions")),
    Variant("bert", "bool mask", arguments=text_arguments(extra="bool mask")),
    Variant("bert", "untied", {"tie_word_embeddings": False}),
    Variant("bert", "decoder", {"is_decoder": True}),
    Variant("bert", "one token, one row", arguments=text_arguments(labels=None), sizes=_EDGES),
    Variant("bert-classes", "plain", arguments=_classes(pad="right")),
    Variant("bert-classes", "eager", _EAGER, _classes(pad="right")),
    Variant("bert-classes", "no labels", arguments=text_arguments(labels=None, pad="right")),
    Variant("t5", "plain", arguments=_answers(pad="right"), sizes=((2, 17), (3, 33))),
    Variant("t5", "one row", arguments=_answers(pad="right"), sizes=((1, 5), (1, 9))),
    Variant("t5", "no padding", arguments=_answers()),
    Variant("t5", "eager", _EAGER, _answers(pad="right")),
    Variant("t5", "decoder mask", arguments=_answers(pad="right", extra="decoder mask")),
    Variant(
        "t5",
        "gated, untied",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        _answers(pad="right"),
    ),
    Variant("t5", "no cache", arguments=_answers(extra="no cache")),
    Variant("t5", "one token, one row", arguments=_answers(), sizes=_EDGES),
    Variant("vit", "plain", arguments=image_arguments()),
    Variant("vit", "eager", _EAGER, image_arguments()),
    Variant("vit", "no labels", arguments=image_arguments(labels=False)),
    Variant("vit", "no query bias", {"qkv_bias": False}, image_arguments()),
]


# ---- docs/models.md -----------------------------------------------------------------------------


def document() -> str:
    """Returns the table of families and variants in docs/models.md. The tests run each variant as
    one engine."""
    lines = ["| family | class | what is special | variants | how |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        names = "; ".join(v.name for v in VARIANTS if v.family == family.name)
        lines.append(f"| {family.name} | `{family.model}` | {family.why} | {names} | whole |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
