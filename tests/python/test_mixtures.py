"""Mixtures of experts: captured whole, with the same results, and without a copied matrix per
token."""

from __future__ import annotations

import copy
import json

import deepwell
import mixtures
import pytest
import torch
from compare import assert_same_function
from deepwell import _deepwell
from deepwell.capture import capture_graph
from users import engine_calls

BUILDS = {
    "mixtral": mixtures.mixtral,
    "mixtral-window": lambda: mixtures.mixtral(sliding_window=5),
    "qwen3-moe": mixtures.qwen3_moe,
    "qwen3-moe-dense-layer": lambda: mixtures.qwen3_moe(mlp_only_layers=[0], norm_topk_prob=False),
    "deepseek-v3-one-mixture": lambda: mixtures.deepseek_v3(num_hidden_layers=2),
    "deepseek-v3": mixtures.deepseek_v3,
    "deepseek-v3-direct": lambda: mixtures.deepseek_v3(q_lora_rank=None, rope_interleave=False),
}
QUICK = ("mixtral", "qwen3-moe", "deepseek-v3-one-mixture")


def arguments(batch: int, length: int, **extra):
    ids = torch.randint(
        0, mixtures.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length)
    )
    return {"input_ids": ids, "labels": ids.clone(), **extra}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in BUILDS]
)
def test_same_function(name: str, always) -> None:
    same_function(name, ((2, 17), (3, 9)))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_a_batch_of_one(name: str, always) -> None:
    """A capture fixes sizes of one, so they need another capture."""
    same_function(name, ((1, 5),))


def same_function(name: str, sizes) -> None:
    torch.manual_seed(3)
    plain = mixtures.spread(BUILDS[name]().train())
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    for batch, length in sizes:
        assert_same_function(plain, ours, (), arguments(batch, length))
    calls, fallbacks = engine_calls(ours)
    assert calls == len(sizes) and fallbacks == 0, deepwell.summary(ours)


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", [pytest.param("mixtral", marks=pytest.mark.slow), "qwen3-moe"])
def test_load_balancing_loss(name: str, padded: bool, always) -> None:
    torch.manual_seed(3)
    plain = mixtures.spread(BUILDS[name]().train())
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    kwargs = arguments(2, 13, output_router_logits=True)
    if padded:
        kwargs["attention_mask"] = torch.ones(2, 13, dtype=torch.long)
        kwargs["attention_mask"][1, 9:] = 0
    assert_same_function(plain, ours, (), kwargs)
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)


def test_gemms_per_expert_with_symbolic_sizes() -> None:
    model = mixtures.mixtral()
    before = model.config._experts_implementation
    captured = capture_graph(model, (), arguments(2, 17))
    assert model.config._experts_implementation == before
    assert [name for name, _, _ in captured.symbols] == ["B", "S"]
    graph = _deepwell.Graph(captured.json)
    graph.run_pass("recognize")
    operations = [node["op"] for node in json.loads(graph.json())["nodes"]]
    assert operations.count("grouped_linear") == 4
    assert "take" not in operations  # no operand has a matrix per token


@pytest.mark.slow
def test_complex_rotary_embeddings_stay_with_pytorch(always) -> None:
    """DeepSeek-V2 multiplies complex numbers in each of its layers."""
    torch.manual_seed(3)
    plain = mixtures.spread(mixtures.deepseek_v2().train())
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    assert_same_function(plain, ours, (), arguments(2, 17, use_cache=False))
    assert engine_calls(ours)[0] == 0
    assert "unsupported dtype torch.complex64" in deepwell.summary(ours)
