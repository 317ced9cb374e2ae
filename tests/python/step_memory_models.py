"""Models whose steps test_step_memory.py predicts and measures: the zoo, and two models that are
large enough to show in a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn
from zoo import CASES, gpt2, language_model_arguments, llama


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    arguments: Callable[[torch.Generator], Any]


def _sized(build, arguments, batch: int, length: int) -> Model:
    return Model(build, lambda generator: arguments(batch, length, generator))


ZOO = {case.name: _sized(case.build, case.arguments, 3, 33) for case in CASES}
# The backward has several parts, and arenas are mapped.
PARTS = {
    "llama-parts": _sized(
        lambda: llama(
            hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=4000,
        ),
        language_model_arguments(4000), 2, 64,
    ),
    "gpt2-parts": _sized(
        lambda: gpt2(n_layer=4, n_embd=384, n_head=6, vocab_size=5003),
        language_model_arguments(5003), 3, 96,
    ),
}  # fmt: skip
LARGE = {
    "gpt2-124m": _sized(
        lambda: gpt2(n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024),
        language_model_arguments(50257), 2, 512,
    ),
    "llama-110m": _sized(
        lambda: llama(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=4, vocab_size=32000, max_position_embeddings=1024,
        ),
        language_model_arguments(32000), 2, 512,
    ),
}  # fmt: skip
MODELS = {**ZOO, **PARTS, **LARGE}
