"""The load of experts that Trainer logs: DeepwellMoE and routers of transformers, against a loop written by hand."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import deepwell
import mixtures
import pytest
import torch
from deepwell import optim, routing
from deepwell.expert_load import ExpertLoads, load_line
from deepwell.moe import DeepwellMoE
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from users import engine_calls

STEPS, BATCH, LENGTH = 3, 4, 8


class Model(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(23, 12), nn.Linear(12, 23)
        self.first = DeepwellMoE(12, 8, 6, 2, load_balance_loss=0.5, **options)
        self.second = DeepwellMoE(12, 8, 4, 1, z_loss=0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        x = x + self.first(x)
        x = self.head(x + self.second(x))
        return {"loss": F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def rows(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(
        0, vocabulary, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(2)
    )
    return [{"input_ids": row, "labels": row} for row in ids]


def loader(vocabulary: int, batch: int = BATCH) -> DataLoader:
    return DataLoader(rows(vocabulary), batch_size=batch)


def trained(model: nn.Module, vocabulary: int, batch: int = BATCH, **options):
    """Returns the reports of a run."""
    reports = []
    callback = types.SimpleNamespace(on_step=lambda trainer, report: reports.append(report))
    deepwell.Trainer(
        model, loader(vocabulary, batch), steps=STEPS, schedule="constant", clip=0.0, weight_decay=0.0,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2), progress=False, callbacks=[callback],
        **options,
    ).fit()  # fmt: skip
    return reports


def by_hand(model: nn.Module, accumulate: int = 1):
    """Returns for each step the loss, and of both mixtures tokens, share of dropped choices, and entropy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data, found = rows(23), []
    size = BATCH // accumulate
    for step in range(STEPS):
        optimizer.zero_grad()
        total, seen = 0.0, [[] for _ in range(2)]
        for micro in range(accumulate):
            at = step * BATCH + micro * size
            ids = torch.stack([row["input_ids"] for row in data[at : at + size]])
            loss = model(ids, ids)["loss"] + DeepwellMoE.losses_of(model)
            (loss / accumulate).backward()
            total += loss.item() / accumulate
            for each, moe in zip(seen, (model.first, model.second)):
                each.append(moe.statistics())
        optimizer.step()
        tokens = [[sum(n) for n in zip(*(told["tokens"] for told in each))] for each in seen]
        dropped = [sum(told["dropped"] for told in each) / accumulate for each in seen]
        entropy = [sum(told["entropy"] for told in each) / accumulate for each in seen]
        found.append((total, tokens, dropped, entropy))
    return found


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_against_a_loop(accumulate: int, tmp_path, monkeypatch, always) -> None:
    written = []
    board = types.SimpleNamespace(
        add_scalar=lambda *values: written.append(values), close=lambda: None
    )
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = lambda folder, purge_step: board
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    model = Model(capacity_factor=1.0)
    wanted = by_hand(copy.deepcopy(model), accumulate)
    log = tmp_path / "log.jsonl"
    reports = trained(
        model, 23, batch=BATCH // accumulate, accumulate=accumulate, log=log, tensorboard=tmp_path
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(reports) == len(lines) == STEPS
    for (loss, tokens, dropped, entropy), report, line in zip(wanted, reports, lines):
        assert report.loss == pytest.approx(loss, rel=1e-5)  # with the auxiliary losses
        assert [each.layer for each in report.experts] == ["first", "second"]
        assert [each.tokens for each in report.experts] == tokens
        assert [each.dropped for each in report.experts] == pytest.approx(dropped)
        assert [each.entropy for each in report.experts] == pytest.approx(entropy, rel=1e-5)
        first = line["experts"]["first"]
        assert first["imbalance"] == max(tokens[0]) * 6 / sum(tokens[0]) and first["dropped"] > 0.0
        assert line["experts"]["second"]["dropped"] == 0.0
        assert ("experts/first/imbalance", first["imbalance"], report.step) in written


def test_loads_are_those_of_all_ranks(tmp_path) -> None:
    """Two ranks with two micro-batches each: tokens and dropped choices are sums over all four, entropies their mean. Both
    ranks report the same; the first writes it to the log and to TensorBoard."""
    words = [sys.executable, Path(__file__).with_name("expert_load_ranks.py"), tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert ranks[0]["reported"] == ranks[1]["reported"] and len(lines) == STEPS
    assert all(rank["programs"] for rank in ranks)  # the engine runs the model
    # The last forwards are those of the steps; before them an engine may be compared with PyTorch.
    told = [rank["told"][-2 * STEPS :] for rank in ranks]
    assert told[0] != told[1]
    for step, (reported, line) in enumerate(zip(ranks[0]["reported"], lines)):
        calls = [call for rank in told for call in rank[2 * step : 2 * step + 2]]
        for mixture, (layer, tokens, dropped, entropy) in enumerate(reported):
            each = [call[mixture] for call in calls]
            wanted = [sum(counts) for counts in zip(*(one["tokens"] for one in each))]
            lost = sum(one["dropped"] * sum(one["tokens"]) for one in each)
            assert tokens == wanted and sum(tokens) == 4 * LENGTH * (2 if mixture == 0 else 1)
            assert dropped == pytest.approx(lost / sum(wanted))
            assert entropy == pytest.approx(sum(one["entropy"] for one in each) / 4, rel=1e-5)
            logged = line["experts"][layer]
            imbalance = max(tokens) * len(tokens) / sum(tokens)
            assert logged == {"imbalance": imbalance, "dropped": dropped, "entropy": entropy}
            for name, value in logged.items():
                assert [f"experts/{layer}/{name}", value, step + 1] in ranks[0]["board"]
    assert any(reported[0][2] > 0.0 for reported in ranks[0]["reported"])
    assert not ranks[1]["board"]


def test_validation_has_no_auxiliary_losses(always) -> None:
    model = Model()
    trainer = deepwell.Trainer(
        model, loader(23), steps=1, progress=False, eval_dataloader=loader(23)
    )
    with torch.no_grad():
        losses = [model(**batch)["loss"].item() for batch in loader(23)]
    assert trainer.evaluate() == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize(
    "build", [mixtures.mixtral, pytest.param(mixtures.deepseek_v3, marks=pytest.mark.slow)]
)
def test_routers_of_transformers(build, always) -> None:
    """The loads are what hooks on the routers see in PyTorch. The layers are in one graph, and a fourth layer like the
    others is copied during capture and has its own load."""
    torch.manual_seed(1)
    model = build(num_hidden_layers=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_()
    plain, seen = copy.deepcopy(model), []
    plain.config._experts_implementation = "eager"
    for name, module in plain.named_modules():
        if routing.is_router(module):
            module.register_forward_hook(
                lambda module, args, result, name=name: seen.append((name, result[0], result[2]))
            )
    ids = torch.stack([row["input_ids"] for row in rows(mixtures.VOCABULARY)[:BATCH]])
    plain(input_ids=ids, labels=ids)
    report = trained(model, mixtures.VOCABULARY)[0]
    assert [each.layer for each in report.experts] == [name for name, _, _ in seen] and seen
    for each, (_, logits, chosen) in zip(report.experts, seen):
        assert each.tokens == torch.bincount(chosen.flatten(), minlength=logits.shape[1]).tolist()
        entropy = torch.distributions.Categorical(logits=logits.float()).entropy().mean().item()
        assert each.entropy == pytest.approx(entropy, rel=1e-4) and each.dropped == 0.0
    assert engine_calls(model) == (STEPS, 0), deepwell.summary(model)


def test_a_step_that_a_gpu_judges() -> None:
    """Its numbers come in one copy: the loss, the outcome of the update, and the loads."""
    trainer = deepwell.Trainer(Model(), loader(23), steps=1, progress=False, accumulate=2)
    loads = torch.tensor([4, 0, 1, 3, 0, 0, 2, 2, 2, 2, 2, 3.0, 0, 1.5], dtype=torch.float64)
    numbers = torch.cat([torch.tensor([0.5, 2.25, 1.0], dtype=torch.float64), loads])
    report = trainer._report_of(trainer._queue(1e-3, 5, numbers, None, [], len(loads)))
    assert (report.loss, report.gradient_norm) == (0.5, optim.outcome_of(numbers[1:3])[0])
    first, second = report.experts
    assert first.tokens == [4, 0, 1, 3, 0, 0] and second.tokens == [2, 2, 2, 2]
    assert (first.dropped, first.entropy, second.entropy) == (0.25, 1.5, 0.75)


def test_a_plan_beside_a_log(tmp_path) -> None:
    options = {"hw": deepwell.hardware("b200:8"), "seq_len": 4096, "global_batch": 64}
    plan = deepwell.autoplan("mixtral-8x7b", moe={"experts": 8, "imbalance": 1.4}, **options)
    log = tmp_path / "log.jsonl"
    lines = [{"step": 1, "loss": 3.0}]
    for step in range(120):
        loads = {"first": {"imbalance": 9.0 if step < 20 else 1.5}, "second": {"imbalance": 1.25}}
        lines.append({"step": step + 2, "experts": loads})
    lines[-1]["experts"]["second"]["imbalance"] = 2.5
    log.write_text("\n".join(map(json.dumps, lines)))
    found = deepwell.dryrun(plan, log=log)["expert_load"]
    each = 8 // plan.layout.ep  # experts of a rank
    assert found == {
        "planned": 1.4, "mean": pytest.approx(1.51), "largest": 2.5, "steps": 100,
        "rank": pytest.approx(1 + 0.51 / each**0.5),
    }  # fmt: skip
    assert "expert_load" not in deepwell.dryrun(plan)
    # By chance: 8,192 rows of each of 8 ranks.
    options["moe"] = {"experts": 8}
    plan = deepwell.autoplan(
        "mixtral-8x7b", constraints=["ep=8", "micro_batch=1", "tp=1"], **options
    )
    chance = (2 * math.log(8) * 7 / 8 / 8192) ** 0.5
    assert deepwell.dryrun(plan, log=log)["expert_load"]["planned"] == pytest.approx(
        1 + chance, rel=1e-4
    )
    log.write_text('{"step": 1, "loss": 3.0}')
    with pytest.raises(deepwell.DeepwellError, match="has no load of experts"):
        deepwell.dryrun(plan, log=log)
    log.write_text("step 1")
    with pytest.raises(deepwell.DeepwellError, match="cannot read the log"):
        deepwell.dryrun(plan, log=log)
    with pytest.raises(deepwell.UnsupportedError, match="log needs a plan"):
        deepwell.dryrun(nn.Linear(2, 2), log=log)


def test_no_mixture_no_load(always) -> None:
    model = nn.Linear(3, 3)
    loads = ExpertLoads(routing.watch(model))
    assert not loads and loads.numbers() is None and load_line(None) == {}


def test_a_mixture_that_was_not_called_is_left_out() -> None:
    first, second = DeepwellMoE(4, 4, 3, 1), DeepwellMoE(4, 4, 2, 1)
    loads = ExpertLoads([("first", first), ("second", second)])
    second(torch.randn(5, 4))
    loads.begin_step()
    loads.begin_batch()  # forgets the call before it
    first(torch.randn(6, 4))
    loads.end_batch(torch.device("cpu"))
    (found,) = loads.loads(loads.numbers().tolist(), 1)
    assert found.layer == "first" and sum(found.tokens) == 6
    assert 1.0 <= found.imbalance <= 3.0 and 0.0 < found.entropy <= math.log(3)
