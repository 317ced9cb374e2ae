"""Helpers of the `deepwell train` tests: small models, tokens, the order of sequences, a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import torch
import transformers
from test_program import find_program

VOCABULARY, SEQUENCE = 101, 16


def config(family: str) -> transformers.PretrainedConfig:
    small = {"vocab_size": VOCABULARY, "initializer_range": 0.1}
    rotary = {
        **small,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    # an end-of-text token inside the small vocabulary: transformers checks it when it saves
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        return transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=24, **small, **ends
        )
    if family == "llama":
        return transformers.LlamaConfig(**rotary, **ends)
    if family == "qwen3":
        return transformers.Qwen3Config(head_dim=16, tie_word_embeddings=True, **rotary, **ends)
    assert family == "mistral"
    return transformers.MistralConfig(sliding_window=7, **rotary, **ends)


def save_model(folder: Path, family: str, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(family))
    model.save_pretrained(folder)
    return folder


def load_model(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    """Returns tokens that are not uniform, so that there is something to learn: each mostly follows
    from the previous one."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCABULARY, count)
    for i in range(1, count):
        if generator.random() < 0.7:
            tokens[i] = (3 * tokens[i - 1] + 1) % VOCABULARY
    return tokens


def save_tokens(path: Path, tokens: np.ndarray, kind: str = "<u2") -> Path:
    tokens.astype(kind).tofile(path)
    return path


# ---- order, as src/train/permutation.h states it ------------------------------------------------


def philox(counter: list[int], key: tuple[int, int]) -> list[int]:
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (p1 >> 32) ^ counter[1] ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ counter[3] ^ k1,
            p0 & 0xFFFFFFFF,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def permute(index: int, count: int, seed: int, epoch: int) -> int:
    half = 1
    while half < 31 and 4**half < count:
        half += 1
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round in range(8):
            counter = [right, round, epoch & 0xFFFFFFFF, epoch >> 32]
            left, right = right, left ^ (philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[0] & mask)
        index = left << half | right
        if index < count:
            return index


def batch(
    tokens: np.ndarray, step: int, size: int, seed: int, shuffle: bool = True
) -> torch.Tensor:
    """Yields [size, SEQUENCE + 1] for step 1, 2, ..."""
    count = (len(tokens) - 1) // SEQUENCE
    rows = []
    for sample in range((step - 1) * size, step * size):
        index, epoch = sample % count, sample // count
        if shuffle:
            index = permute(index, count, seed, epoch)
        rows.append(tokens[index * SEQUENCE : index * SEQUENCE + SEQUENCE + 1].astype(np.int64))
    return torch.tensor(np.stack(rows))


# ---- runs ----------------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [str(find_program()), "train", *map(str, arguments)]


def run(*arguments: object, status: int = 0, **options) -> subprocess.CompletedProcess[str]:
    """Runs to the end; the exit status must be `status`."""
    environment = {**os.environ, **options.pop("environment", {})}
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, env=environment, **options
    )
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    if status not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        errors = [line for line in done.stderr.splitlines() if line.startswith("deepwell: ")]
        assert len(errors) == 1, done.stderr
    return done


def read_log(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in read_log(path) if "loss" in line]
