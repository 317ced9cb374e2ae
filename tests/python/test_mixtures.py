"""Mixtures of experts: captured whole, with the same results, and without a copied matrix per
token."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import deepwell
import mixtures
import pytest
import torch
from compare import assert_same_function, error_of, rounding
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
    "qwen2-moe": mixtures.qwen2_moe,
    "qwen2-moe-normalised": lambda: mixtures.qwen2_moe(norm_topk_prob=True, decoder_sparse_step=2),
    "olmoe": mixtures.olmoe,
    "deepseek-v2": mixtures.deepseek_v2,
    "deepseek-v2-one-mixture": lambda: mixtures.deepseek_v2(num_hidden_layers=2),
    "deepseek-v2-greedy": lambda: mixtures.deepseek_v2(topk_method="greedy", q_lora_rank=None),
    "gpt-oss": mixtures.gpt_oss,
    "llama4": mixtures.llama4,
    "llama4-two-experts": lambda: mixtures.llama4(num_experts_per_tok=2, use_qk_norm=False),
}
QUICK = ("mixtral", "deepseek-v3-one-mixture", "gpt-oss")


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
@pytest.mark.parametrize(
    "name",
    [
        *[
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("mixtral", "qwen2-moe", "olmoe", "gpt-oss")
        ],
        "qwen3-moe",
    ],
)
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


@pytest.mark.parametrize("build", [mixtures.mixtral, mixtures.gpt_oss])
def test_gemms_per_expert_with_symbolic_sizes(build) -> None:
    model = build()
    before = model.config._experts_implementation
    captured = capture_graph(model, (), arguments(2, 17))
    assert model.config._experts_implementation == before
    assert [name for name, _, _ in captured.symbols] == ["B", "S"]
    graph = _deepwell.Graph(captured.json)
    graph.run_pass("recognize")
    operations = [node["op"] for node in json.loads(graph.json())["nodes"]]
    assert operations.count("grouped_linear") == 4
    assert "take" not in operations  # no operand has a matrix per token


@pytest.mark.parametrize("dtype, device", [("f32", "cpu"), ("bf16", "plan:sm_90a")])
def test_gradients_of_gate_and_up_are_not_concatenated(
    dtype: str, device: str, monkeypatch
) -> None:
    """One elementwise program writes both into their halves of the matrix that the GEMMs of backward read: on a GPU
    over the gates that it has read, behind the product that it reads. No instruction of backward only moves elements."""
    monkeypatch.delenv("DEEPWELL_EPILOGUES")
    of_torch = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = mixtures.mixtral(num_hidden_layers=1, intermediate_size=128).to(of_torch)
    captured = capture_graph(model.model.layers[0].mlp, (torch.randn(2, 17, 48, dtype=of_torch),))
    graph = _deepwell.Graph(captured.json)
    leaves = range(len(json.loads(captured.json)["leaves"]))
    plan = _deepwell.Engine(graph, (0,), leaves, device=device).plan(
        [{"B": 2, "S": 17}[name] for name, _, _ in captured.symbols]
    )
    listing = [line.split() for line in plan.describe().splitlines()[1:]]
    moves = ("concat", "pad", "permute", "reshape", "slice")
    assert not [line for line in listing if line[1] == "B" and line[2] in moves]
    halves = rf"{dtype}\[68,128\]@arena:(\d+)s?~ {dtype}\[68,128\]@arena:\1s?\+128~"
    (line,) = [
        " ".join(line)
        for line in listing
        if line[1] == "B" and re.search("-> " + halves, " ".join(line))
    ]
    assert (" segment_linear " in line) == (" | epilogue " in line) == (device != "cpu")
    program = line.split(" | epilogue ")[-1]
    written = re.search("-> " + halves, program).group(1)
    assert (f"@arena:{written}s+128~ " in program.split("->")[0]) == (device != "cpu")


FORMS = ("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")


def test_forms_are_those_of_transformers() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert set(ALL_EXPERTS_FUNCTIONS.valid_keys()) | {"eager"} == set(FORMS)


def test_every_form_of_the_experts_is_one_graph() -> None:
    """Mixtral has all forms. The choice is the user's again after the capture."""
    model = mixtures.mixtral(num_hidden_layers=1)
    block = model.model.layers[0].mlp
    graphs = set()
    for form in FORMS:
        model.config._experts_implementation = form
        graphs.add(capture_graph(block, (torch.randn(2, 17, 48),)).json)
        assert model.config._experts_implementation == form
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "name", ["mixtral", pytest.param("deepseek-v3-one-mixture", marks=pytest.mark.slow)]
)
def test_ties(name: str, always) -> None:
    """Pairs of experts are equal, so their scores tie for every token. PyTorch does not define which of two equal experts
    it chooses; the outputs are the same, and so is the sum of both experts' gradients."""
    torch.manual_seed(3)
    plain = mixtures.spread(BUILDS[name]().train())
    paired = []
    with torch.no_grad():
        for parameter_name, parameter in plain.named_parameters():
            if (
                "experts." in parameter_name
                and parameter.dim() == 3
                or "gate.weight" in parameter_name
            ):
                parameter[1::2] = parameter[0 : 2 * (len(parameter) // 2) : 2]
                paired.append(parameter_name)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    kwargs = arguments(2, 17)
    exact_model = copy.deepcopy(plain).double()
    losses, summed = [], []
    for model in (exact_model, plain, ours):
        loss = model(**kwargs).loss
        loss.backward()
        losses.append(loss.item())
        parameters = dict(model.named_parameters())
        summed.append([pairs(parameters[each].grad) for each in paired])
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)
    assert abs(losses[2] - losses[0]) <= 1e-4 * abs(losses[0])
    largest = max(exact.norm().item() for exact in summed[0])
    for each, exact, own, our in zip(paired, *summed):
        bound = max(1e-4 * exact.norm().item(), 2 * error_of(own, exact), rounding(plain) * largest)
        assert error_of(our, exact) <= bound, each


def pairs(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the pairs of equal experts; a last expert may be without a partner."""
    whole = gradient[: 2 * (len(gradient) // 2)].double()
    return torch.cat(
        [
            (whole[::2] + whole[1::2]).flatten(),
            gradient[2 * (len(gradient) // 2) :].double().flatten(),
        ]
    )


@pytest.mark.slow
def test_random_inputs_of_routers_stay_with_pytorch(always) -> None:
    """Mixtral's router_jitter_noise; the engine runs attention and experts."""
    torch.manual_seed(3)
    plain = mixtures.spread(mixtures.mixtral(router_jitter_noise=0.1).train())
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    losses = []
    for model in (plain, ours):
        torch.manual_seed(5)
        loss = model(**arguments(2, 17, use_cache=False)).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # PyTorch draws the same numbers
    assert engine_calls(ours)[0] == 4 and "uniform" in deepwell.summary(ours), deepwell.summary(
        ours
    )


def test_page_lists_the_variants() -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    part = page.partition("## Mixtures of experts")[2].partition("\n## ")[0]
    rows = [
        line.split(" | ")[-1].strip("| ") for line in part.splitlines() if "ForCausalLM" in line
    ]
    assert sorted("; ".join(rows).split("; ")) == sorted(BUILDS)
