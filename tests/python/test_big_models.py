"""Llama-3 405B without weights: counted in closed form, within the memory of a laptop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "capture.py"
BATCH, LENGTH = 2, 4096


def attention_flops(layers: int, heads: int, key: int, value: int) -> int:
    """q k^T and p v, 2 FLOPs for a multiply-add, over the pairs with key <= query."""
    pairs = LENGTH * (LENGTH + 1) // 2
    return BATCH * layers * heads * pairs * 2 * (key + value)


def llama() -> tuple[int, int]:
    """(parameters, FLOPs of all products) of a forward over BATCH x LENGTH tokens."""
    layers, width, heads, groups, hidden, words = 126, 16384, 128, 8, 53248, 128256
    head = width // heads
    matrices = 2 * width * width + 2 * width * groups * head + 3 * width * hidden
    parameters = 2 * words * width + layers * (matrices + 2 * width) + width
    used = layers * matrices + words * width  # the embedding is a look-up
    return parameters, 2 * used * BATCH * LENGTH + attention_flops(layers, heads, head, head)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, closed_form, copied",
    [("llama-405b", llama, 124)],
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
    parameters, products = closed_form()
    assert found["parameters"] == found["captured_parameters"] == parameters
    # Norms, rotations, activations and routing are a thousandth of the products, or less.
    assert products < found["flops"] < products * 1.001
    assert found["symbols"] == ["B", "S"]
    assert found["copied_layers"] == copied
    assert found["peak_mib"] < 2048  # PyTorch and transformers included
