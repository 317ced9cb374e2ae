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
        n_layer=2, n_embd=48, n_head=3, vocab_size=211, n_positions=128, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    options.update(changes)
    return GPT2LMHeadModel(GPT2Config(**options))


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = dict(
        hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=199, max_position_embeddings=128, bos_token_id=0,
        eos_token_id=0, pad_token_id=0,
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


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(37, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 53), nn.SiLU(),
        nn.RMSNorm(53), nn.Linear(53, 11), nn.Tanh(), nn.Linear(11, 3), nn.Softmax(-1),
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
        lambda: llama(tie_word_embeddings=True),
        language_model_arguments(199),
    ),
    "llama-mha-bias": (
        lambda: llama(num_key_value_heads=4, attention_bias=True, mlp_bias=True),
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
CASES = [Case(name, *made) for name, made in {**_LANGUAGE, **_HIDDEN}.items()]
BY_NAME = {case.name: case for case in CASES}
