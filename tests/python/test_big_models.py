"""Llama-3 405B and DeepSeek-V3 671B without weights: compared with counts in closed form, within a
laptop's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "capture_models.py"
BATCH, LENGTH = 2, 4096


def attention_flops(layers: int, heads: int, key: int, value: int) -> int:
    """Counts q k^T and p v, 2 FLOPs for a multiply-add, over the pairs with key <= query."""
    pairs = LENGTH * (LENGTH + 1) // 2
    return BATCH * layers * heads * pairs * 2 * (key + value)


def llama() -> tuple[int, int]:
    """Returns (parameters, FLOPs of all matmuls) of a forward over BATCH x LENGTH tokens."""
    layers, width, heads, groups, hidden, words = 126, 16384, 128, 8, 53248, 128256
    head = width // heads
    matrices = 2 * width * width + 2 * width * groups * head + 3 * width * hidden
    parameters = 2 * words * width + layers * (matrices + 2 * width) + width
    used = layers * matrices + words * width  # the embedding is a look-up
    return parameters, 2 * used * BATCH * LENGTH + attention_flops(layers, heads, head, head)


def deepseek() -> tuple[int, int]:
    """The same for latent attention and mixtures of experts, where a token uses a few experts."""
    layers, dense, width, heads, words = 61, 3, 7168, 128, 129280
    query, latent, plain, rotated, value = 1536, 512, 128, 64, 128
    experts, chosen, hidden = 256, 8, 2048
    attention = width * query + query * heads * (plain + rotated)
    attention += width * (latent + rotated) + latent * heads * (plain + value)
    attention += heads * value * width
    expert, router, mlp = 3 * width * hidden, experts * width, 3 * width * 18432
    norms = query + latent + 2 * width

    def matrices(experts_each: int) -> int:
        mixture = router + (experts_each + 1) * expert  # one is shared by all tokens
        return layers * attention + dense * mlp + (layers - dense) * mixture

    parameters = 2 * words * width + matrices(experts) + layers * norms + width
    used = matrices(chosen) + words * width
    scores = attention_flops(layers, heads, plain + rotated, value)
    return parameters, 2 * used * BATCH * LENGTH + scores


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, closed_form, copied",
    [("llama-405b", llama, 124), ("deepseek-671b", deepseek, 57)],
)
def test_capture_without_weights(name, closed_form, copied):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--one", name],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    parameters, matmuls = closed_form()
    assert found["parameters"] == found["captured_parameters"] == parameters
    # Norms, rotations, activations and routing are at most a thousandth of the matmuls.
    assert matmuls < found["flops"] < matmuls * 1.001
    # Each parameter is read once, plus the activations. Gathering a token's experts would move hundreds of
    # times as much.
    assert 4 * parameters < found["bytes"] < 4 * 4 * parameters
    assert found["symbols"] == ["B", "S"]
    assert found["copied_layers"] == copied
    assert found["peak_mib"] < 2048  # PyTorch and transformers included
