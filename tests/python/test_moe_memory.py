"""What a layer with experts saves from forward for backward, counted from plans for a Hopper GPU, against the formula of
docs/moe.md."""

from __future__ import annotations

import deepwell as dw
import mixtures
import pytest
import torch
from deepwell.targets import PlannedGpu

BATCH, LENGTH, WIDTH, HEADS = 2, 64, 256, 4
TOKENS = BATCH * LENGTH
_SIZES = dict(hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS)
_ALIGNMENT = 256  # of a buffer in an arena


def rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def saved_by_a_layer(build, **sizes) -> int:
    """Returns how much more a model of three layers saves than one of two."""
    found = []
    for layers in (2, 3):
        with torch.device("meta"):
            model = build(**_SIZES, **sizes, num_hidden_layers=layers).bfloat16().train()
            ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        report = dw.dryrun(model, {"input_ids": ids, "labels": ids}, target="sm_90a")
        found.append(report["arena"]["saved_bytes"])
    return found[1] - found[0]


def of_experts(top_k: int, experts: int, inner: int, router: list[int]) -> int:
    """Returns the bytes that the experts save in BF16: gate and up of each row, and of the down projection the rows, if
    experts are wider than the model. ``router``: bytes for each token beside the indices."""
    rows = TOKENS * top_k
    gate_up = 2 * rows * 2 * inner
    down = 2 * rows * WIDTH if inner > WIDTH else 0
    indices = [
        8 * rows,
        4 * rows,
        4 * (experts + 1),
    ]  # as chosen; sorted places; where each expert's rows begin
    return sum(map(rounded, [gate_up, down, *indices, *(TOKENS * size for size in router)]))


@pytest.fixture(autouse=True)
def _one_segment(monkeypatch) -> None:
    monkeypatch.setattr(PlannedGpu, "arena_segments", 1)  # saved buffers then lie one after another


@pytest.mark.parametrize("inner", [64, 512], ids=["narrow", "wide"])
def test_olmoe(inner: int) -> None:
    top_k, experts = 2, 8
    found = saved_by_a_layer(
        mixtures.olmoe, num_experts=experts, num_experts_per_tok=top_k, intermediate_size=inner
    )
    # Both residuals, the rows before the norms of queries and keys, values, and attention's result.
    rows = 6 * rounded(2 * TOKENS * WIDTH)
    logsumexp = rounded(4 * TOKENS * HEADS)
    # The router saves the probabilities of all experts in F32, and the weights of the chosen ones in BF16.
    router = [4 * experts, 2 * top_k]
    assert found == rows + logsumexp + of_experts(top_k, experts, inner, router)
