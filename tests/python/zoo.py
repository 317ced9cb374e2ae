"""Small models of every kind that must train the same with and without Deepwell.

Each entry makes a module and a function from (batch, length, generator) to its call's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    arguments: Callable[[int, int, torch.Generator], Arguments]
    sizes: tuple[tuple[int, int], ...] = ((2, 17), (3, 33), (1, 5))


def _ids(batch: int, length: int, generator: torch.Generator, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def language_model_arguments(vocabulary: int, *, padded: bool = False, labels: bool = True):
    def arguments(batch: int, length: int, generator: torch.Generator) -> Arguments:
        ids = _ids(batch, length, generator, vocabulary)
        kwargs: dict[str, Any] = {"input_ids": ids}
        if labels:
            kwargs["labels"] = ids.clone()
            kwargs["labels"][:, 0] = -100
        if padded:
            mask = torch.ones(batch, length, dtype=torch.long)
            for row in range(batch):
                mask[row, length - (row * 3) % max(length - 1, 1) :] = 0
            kwargs["attention_mask"] = mask
            if labels:
                kwargs["labels"][mask == 0] = -100
        return (), kwargs

    return arguments


def hidden_arguments(width: int, **extra: Any):
    def arguments(batch: int, length: int, generator: torch.Generator) -> Arguments:
        return (torch.randn(batch, length, width, generator=generator),), dict(extra)

    return arguments


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    options = dict(
        n_layer=2,
        n_embd=48,
        n_head=3,
        vocab_size=211,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    options.update(changes)
    return GPT2LMHeadModel(GPT2Config(**options))


def small_gpt2(**changes: Any) -> nn.Module:
    """For tests that do not depend on the number of layers: a capture takes half the time."""
    return gpt2(**{"n_layer": 1, "n_embd": 24, **changes})


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = dict(
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=199,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    options.update(changes)
    return LlamaForCausalLM(LlamaConfig(**options))


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over one input, in a residual block."""

    def __init__(self, width: int, heads: int, call: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, **options)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out, weights = self.attention(y, y, y, **self.call)
        return x + out if weights is None else x + out + weights.mean()


class CrossAttention(nn.Module):
    """nn.MultiheadAttention with separate queries, keys and values."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, **options)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any):
        return self.attention(q, k, v, **call)


def attention_arguments(
    width: int,
    *,
    kdim: int | None = None,
    vdim: int | None = None,
    batch_first: bool = False,
    batched: bool = True,
    mask: str | None = None,
    padding: str | None = None,
    heads: int = 1,
    **call: Any,
):
    """Makes the arguments of a call with S queries and S + 3 keys. Masks: "bool", "float", "bool3"
    (one for each batch and head), "causal"; padding: "bool" or "float". Every query sees some
    key."""

    def arguments(batch: int, length: int, generator: torch.Generator) -> Arguments:
        keys = length if mask == "causal" else length + 3

        def sequence(count: int, size: int) -> torch.Tensor:
            if not batched:
                return torch.randn(count, size, generator=generator)
            shape = (batch, count, size) if batch_first else (count, batch, size)
            return torch.randn(shape, generator=generator)

        kwargs = dict(call)
        if mask in ("bool", "bool3", "float"):
            shape = (batch * heads, length, keys) if mask == "bool3" else (length, keys)
            hidden = torch.rand(shape, generator=generator) < 0.3
            hidden[..., 0] = False
            kwargs["attn_mask"] = hidden
            if mask == "float":
                kwargs["attn_mask"] = torch.randn(shape, generator=generator)
        elif mask == "causal":
            kwargs["attn_mask"] = torch.triu(torch.ones(length, keys, dtype=torch.bool), 1)
            kwargs["is_causal"] = True
        if padding is not None:
            padded = torch.zeros(batch, keys, dtype=torch.bool)
            padded[:, -2:] = True
            kwargs["key_padding_mask"] = padded
            if padding == "float":
                kwargs["key_padding_mask"] = padded.float() * -3.0
        return (
            sequence(length, width),
            sequence(keys, kdim or width),
            sequence(keys, vdim or width),
        ), kwargs

    return arguments


def encoder_arguments(width: int, heads: int, *, padding: bool = False, causal: bool = False):
    def arguments(batch: int, length: int, generator: torch.Generator) -> Arguments:
        kwargs: dict[str, Any] = {}
        if padding:
            padded = torch.zeros(batch, length, dtype=torch.bool)
            padded[:, -1:] = length > 1
            kwargs["src_key_padding_mask"] = padded
        if causal:
            kwargs["mask"] = nn.Transformer.generate_square_subsequent_mask(length)
            kwargs["is_causal"] = True
        return (torch.randn(batch, length, width, generator=generator),), kwargs

    return arguments


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(37, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, 53),
        nn.SiLU(),
        nn.RMSNorm(53),
        nn.Linear(53, 11),
        nn.Tanh(),
        nn.Linear(11, 3),
        nn.Softmax(-1),
    )


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        40, 4, dim_feedforward=72, dropout=0.0, batch_first=True, **options
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


_LANGUAGE = {
    "gpt2": (gpt2, language_model_arguments(211)),
    "gpt2-padded": (gpt2, language_model_arguments(211, padded=True)),
    "gpt2-no-labels": (gpt2, language_model_arguments(211, labels=False)),
    "llama": (llama, language_model_arguments(199)),
    "llama-padded": (llama, language_model_arguments(199, padded=True)),
    "llama-tied": (
        lambda: llama(num_hidden_layers=1, tie_word_embeddings=True),
        language_model_arguments(199),
    ),
    "llama-mha-bias": (
        lambda: llama(
            num_hidden_layers=1, num_key_value_heads=4, attention_bias=True, mlp_bias=True
        ),
        language_model_arguments(199),
    ),
}
_HIDDEN = {
    "mlp": (mlp, hidden_arguments(37)),
    "encoder-post-relu": (encoder, hidden_arguments(40)),
    "encoder-pre-gelu": (
        lambda: encoder(norm_first=True, activation="gelu"),
        hidden_arguments(40),
    ),
    "mha": (lambda: SelfAttention(36, 3, {"need_weights": False}), hidden_arguments(36)),
    "mha-weights": (lambda: SelfAttention(36, 3, {}), hidden_arguments(36)),
    "mha-bias-kv": (
        lambda: SelfAttention(36, 3, {"need_weights": False}, add_bias_kv=True, add_zero_attn=True),
        hidden_arguments(36),
    ),
}
_ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def longrope_branches_on_data() -> bool:
    """Before some version, transformers chose between long and short factors by an `if` on a
    tensor: no graph can express that forward, so its modules are optimized one by one."""
    import inspect

    from transformers import modeling_rope_utils

    source = inspect.getsource(modeling_rope_utils.dynamic_rope_update)
    chooser = source.partition("def longrope_frequency_update")[2].partition("    def ")[0]
    return "if seq_len >" in chooser


def _rope_case(kind: str):
    def build() -> nn.Module:
        scaling = {"rope_theta": 10000.0, **_ROPE[kind]}
        return llama(num_hidden_layers=1, rope_parameters=scaling)

    return build, language_model_arguments(199)


def _attention_case(options: dict[str, Any], **call: Any):
    sizes = {name: options[name] for name in ("kdim", "vdim", "batch_first") if name in options}
    return (
        lambda: CrossAttention(24, 3, **options),
        attention_arguments(24, heads=3, **sizes, **call),
    )


_OPTIONS = {
    **{
        f"llama-rope-{kind}": _rope_case(kind)
        for kind in _ROPE
        if kind != "longrope" or not longrope_branches_on_data()
    },
    "mha-cross": _attention_case({}),
    "mha-batch-first": _attention_case({"batch_first": True}, need_weights=False),
    "mha-no-bias": _attention_case({"bias": False}, need_weights=False),
    "mha-kdim-vdim": _attention_case({"kdim": 20, "vdim": 28}),
    "mha-each-heads-weights": _attention_case({}, average_attn_weights=False),
    "mha-bool-mask": _attention_case({}, mask="bool", need_weights=False),
    "mha-bool-mask-per-head": _attention_case({"batch_first": True}, mask="bool3"),
    "mha-float-mask": _attention_case({}, mask="float", need_weights=False),
    "mha-causal": _attention_case({}, mask="causal", need_weights=False),
    "mha-padding": _attention_case({"batch_first": True}, padding="bool", need_weights=False),
    "mha-padding-and-mask": _attention_case({}, padding="float", mask="float"),
    "mha-unbatched": _attention_case({}, batched=False),
    "mha-bias-kv-zero-cross": _attention_case({"add_bias_kv": True, "add_zero_attn": True}),
    "encoder-padding": (encoder, encoder_arguments(40, 4, padding=True)),
    "encoder-causal": (lambda: encoder(norm_first=True), encoder_arguments(40, 4, causal=True)),
}
CASES = [Case(name, *made) for name, made in {**_LANGUAGE, **_HIDDEN, **_OPTIONS}.items()]
BY_NAME = {case.name: case for case in CASES}
