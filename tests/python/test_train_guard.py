"""`deepwell train` obeys the guard of a precision policy: the samples and the rule are those of deepwell.Trainer, the last
steps are repaired, and a run resumes bit for bit, also where the other one began it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepwell as dw
import pytest
import torch
import train_runs
import transformers
from deepwell import _deepwell
from test_precision_guard import guarded, manifest, plain
from test_trainer import as_trainer
from train_runs import SEQUENCE, read_log, run

LAYER = "transformer.h.1.mlp.c_fc"
BATCH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without dropout, and tokens."""
    made = tmp_path_factory.mktemp("both")
    config = train_runs.config("gpt2")
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made / "model")
    train_runs.save_tokens(made / "tokens.bin", train_runs.random_tokens(900))
    return made


def one_layer(**guard) -> dw.PrecisionPolicy:
    """FP8 in one layer alone. No operand in E5M2 reaches 28 dB, so the layer fails each sample."""
    guard = dw.PrecisionGuard(**{"every": 2, "snr_db": 28.0, **guard})
    return dw.PrecisionPolicy("bf16", [], layers={LAYER: "fp8"}, guard=guard)


def command(folder: Path, where: Path, policy, steps: int, *more, **options):
    """The run of ``as_trainer``, with a policy."""
    where.mkdir(exist_ok=True)
    policy.save(where / "policy.json")
    return run(
        *("--model", folder / "model", "--data", folder / "tokens.bin", "--sequence", SEQUENCE),
        *("--steps", steps, "--batch", BATCH, "--micro-batch", 2, "--lr", 1e-3, "--warmup", 3),
        *("--schedule-steps", 12, "--seed", 5, "--checkpoint", where / "ck", "--keep", 99),
        *("--log", where / "log.jsonl", "--precision", where / "policy.json", *more),
        **options,
    )  # fmt: skip


def lines_of(where: Path) -> list[dict]:
    return [plain(line) for line in read_log(where / "log.jsonl")]


def changes_of(where: Path) -> list[dict]:
    return [each["precision_change"] for each in lines_of(where) if "precision_change" in each]


def test_a_layer_falls_back(folder, tmp_path):
    policy = one_layer()
    done = command(folder, tmp_path, policy, 8, "--save-every", 1)
    (change,) = changes_of(tmp_path)
    # Steps 2 and 4 failed, so the step after the next one is the first in BF16.
    assert (change["layer"], change["sampled_step"], change["from_step"]) == (LAYER, 4, 6)
    assert change["operand"] in ("dgrad_dy", "wgrad_dy") and change["bound_db"] == 28.0
    assert change["reason"] == f"SNR {change['snr_db']:.1f} dB, bound 28.0 dB"
    assert f"step 4  {LAYER} falls back to BF16 from step 6 on: " in done.stdout
    sampled = [each for each in lines_of(tmp_path) if "snr_db" in each]
    assert [each["step"] for each in sampled] == [2, 4]  # then no layer is observed
    assert {each["snr_layer"] for each in sampled} == {LAYER}
    for step in range(1, 9):
        found = manifest(tmp_path, step)
        assert found.get("precision_changes") == ([change] if step >= 4 else None)
        assert found.get("precision_failed") == (
            None if step < 2 else {LAYER: 1} if step < 4 else {LAYER: 2}
        )
        kept = dw.PrecisionPolicy.load(tmp_path / "ck" / f"step-{step:012}" / "precision.json")
        assert kept == (policy.with_fallen_back([LAYER]) if step >= 5 else policy)
    # From step 6 on the run is that of BF16 alone, from the same weights.
    events = command(folder, tmp_path / "json", policy, 5, "--json").stdout.splitlines()
    told = [json.loads(each) for each in events]
    assert [each for each in told if each["event"] == "precision_change"] == [
        {"event": "precision_change", "step": 4, "precision_change": change}
    ]


def alone(folder: Path, where: Path, step: int, policy) -> float:
    """Returns the loss of one step of a run without a shuffle, from the checkpoint before it, with a policy of its own."""
    where.mkdir()
    tokens = train_runs.random_tokens(900)[(step - 1) * BATCH * SEQUENCE :]
    train_runs.save_tokens(where / "tokens.bin", tokens)
    policy.save(where / "policy.json")
    run(
        *("--model", folder / "ck" / f"step-{step - 1:012}", "--data", where / "tokens.bin"),
        *("--sequence", SEQUENCE, "--steps", 1, "--batch", BATCH, "--micro-batch", 2),
        *("--no-shuffle", "--precision", where / "policy.json", "--log", where / "log.jsonl"),
        *("--output", where / "out"),
    )  # fmt: skip
    return lines_of(where)[0]["loss"]


def test_the_policy_of_each_step(folder, tmp_path):
    """A fallback and the repair apply to the steps that they name and to no other: the losses around them are those of
    single steps in FP8 or BF16 from the checkpoints."""
    policy = guarded("fp8", every=2, samples=2, snr_db=28.0, repair=1 / 6)
    command(folder, tmp_path, policy, 12, "--save-every", 1, "--no-shuffle", "--lr", 1e-2)
    fallen = {each["layer"] for each in changes_of(tmp_path) if each["from_step"] == 6}
    assert len(fallen) == 8  # all layers, because their gradients are E5M2
    repairs = [each for each in changes_of(tmp_path) if "repair" in each]
    assert repairs == [{"from_step": 11, "repair": True}]
    kept = manifest(tmp_path, 12)["precision_changes"]
    assert kept == changes_of(tmp_path) and kept[-1] == repairs[0]
    losses = {each["step"]: each["loss"] for each in lines_of(tmp_path) if "loss" in each}
    fp8 = dw.PrecisionPolicy("fp8", [], bf16_share=0.0)
    bf16 = dw.PrecisionPolicy("bf16", [])
    for step, ours, other in ((5, fp8, bf16), (6, bf16, fp8), (11, bf16, fp8)):
        same = alone(tmp_path, tmp_path / f"{step}-same", step, ours)
        differs = alone(tmp_path, tmp_path / f"{step}-other", step, other)
        assert losses[step] == same != differs


def test_the_repair_alone(folder, tmp_path):
    """No step is sampled; the last quarter is BF16, whatever the run resumes from."""
    policy = guarded("mxfp4", every=0, repair=0.25)
    command(folder, tmp_path / "whole", policy, 8, "--save-every", 1)
    done = command(folder, tmp_path / "cut", policy, 8, "--save-every", 1)
    assert "step 7  every layer is BF16 from here on (repair)" in done.stdout
    for step in (8, 7):  # the run stops there and goes on
        os.rename(tmp_path / "cut" / "ck" / f"step-{step:012}", tmp_path / f"gone-{step}")
    command(folder, tmp_path / "cut", policy, 8, "--save-every", 1, "--resume")
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")
    assert changes_of(tmp_path / "cut") == [{"from_step": 7, "repair": True}]
    assert manifest(tmp_path / "cut", 8)["precision_changes"] == changes_of(tmp_path / "cut")
    assert "precision_changes" not in manifest(tmp_path / "cut", 6)


@pytest.mark.parametrize("stops", [(3,), (4, 5)], ids=["between", "after"])
def test_a_resumed_run_has_the_same_bits(stops, folder, tmp_path):
    """It stops between two failed samples, or after the second one, before its layer is BF16."""
    policy = one_layer()
    validation = ["--val", folder / "tokens.bin", "--val-batches", 2, "--val-every", 5]
    command(folder, tmp_path / "whole", policy, 9, *validation)
    for part, steps in enumerate((*stops, 9)):
        resume = ["--resume"] if part else []
        command(folder, tmp_path / "cut", policy, steps, *validation, *resume)
    lines = [lines_of(tmp_path / each) for each in ("whole", "cut")]
    # The cut run validates at each of its ends.
    assert lines[0] == [
        each for each in lines[1] if "validation_loss" not in each or each["step"] in (5, 9)
    ]
    found = [
        (tmp_path / each / "ck" / "step-000000000009" / "model.safetensors").read_bytes()
        for each in ("whole", "cut")
    ]
    assert found[0] == found[1] and len(changes_of(tmp_path / "cut")) == 1


def test_the_command_and_the_trainer_agree(always, folder, tmp_path):
    """The statistics of both are of the same operands, so a run of one and a run of both by turns fall back alike."""
    guard = dw.PrecisionGuard(every=2, snr_db=27.0, repair=0.15)
    policy = dw.PrecisionPolicy("fp8", guard=guard)
    for order in ("command", "both"):
        where = tmp_path / order
        where.mkdir()
        for part, steps in enumerate((3, 7, 12)):
            # The share of repaired steps is of the whole run.
            if order == "command" or (order == "both" and part != 1):
                command(folder, where, policy, steps, *(["--resume"] if part else []))
            else:
                as_trainer(folder, where, steps, resume=part > 0, precision=policy).fit()
    wanted = [each for each in lines_of(tmp_path / "command") if "validation_loss" not in each]
    assert any("snr_db" in each for each in wanted)
    lines = [each for each in lines_of(tmp_path / "both") if "validation_loss" not in each]
    assert [list(each) for each in lines] == [list(each) for each in wanted]
    for ours, theirs in zip(lines, wanted):
        assert ours["step"] == theirs["step"]
        for key in {"loss", "gradient_norm"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3)
        if "snr_db" in ours:
            # Single elements are rounded to a neighbour because the runs sum in other orders.
            assert ours["snr_layer"] == theirs["snr_layer"]
            assert ours["snr_db"] == pytest.approx(theirs["snr_db"], abs=0.05)
            assert ours["underflow"] == pytest.approx(theirs["underflow"], rel=0.02, abs=5)
        if "precision_change" in ours:
            change, other = ours["precision_change"], theirs["precision_change"]
            for key in ("layer", "from_step", "sampled_step", "operand", "scheme", "repair"):
                assert change.get(key) == other.get(key)
    found = [manifest(tmp_path / each, 12) for each in ("command", "both")]
    names = [[each.get("layer") for each in x["precision_changes"]] for x in found]
    assert names[0] == names[1] and len(names[0]) > 1
    assert found[0].get("precision_failed") == found[1].get("precision_failed")


def test_an_emulated_gpu_obeys_too(folder, tmp_path):
    """The statistics of two micro-batches are copied out between them, and work is recorded anew for the other policy."""
    if not _deepwell.jit_compiler():
        pytest.skip("elementwise programs need NVRTC")
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    policy = one_layer(every=1, samples=1)
    small = ["--sequence", 8, "--batch", 2, "--micro-batch", 1]
    done = command(
        folder, tmp_path / "gpu", policy, 4, *small, "--device", "emulator:sm_90a", "--json",
        environment=environment,
    )  # fmt: skip
    command(folder, tmp_path / "cpu", policy, 4, *small)
    gpu, cpu = lines_of(tmp_path / "gpu"), lines_of(tmp_path / "cpu")
    assert [list(each) for each in gpu] == [list(each) for each in cpu]
    for ours, theirs in zip(gpu, cpu):
        if "snr_db" in ours:
            assert ours["snr_db"] == pytest.approx(theirs["snr_db"], abs=0.1)
            assert ours["underflow"] == pytest.approx(theirs["underflow"], rel=0.05, abs=5)
    (change,) = changes_of(tmp_path / "gpu")
    assert (change["layer"], change["from_step"]) == (LAYER, 3)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    peaks = [event["memory_peak"] for event in events if event["event"] == "step"]
    assert peaks[-1] == events[0]["memory"]["predicted_peak"]


def test_a_guards_state_in_a_manifest():
    """What is read from a checkpoint is checked before it is used."""
    watch = _deepwell.precision_watch(guarded("fp8", every=2).to_json())
    state = {
        "precision_changes": [{"from_step": 6, "layer": "a"}, {"from_step": 9, "repair": True}],
        "precision_failed": {"b": 1},
    }
    _deepwell.precision_watch_restore(watch, json.dumps({**state, "step": 7}))
    assert json.loads(_deepwell.precision_watch_state(watch)) == state
    assert [_deepwell.precision_watch_phase(watch, step, 20) for step in (5, 6)] == [0, 1]
    for bad, message in (
        ({"precision_changes": {}}, '"precision_changes" is an object; expected a list'),
        ({"precision_changes": [{"layer": "a"}]}, r'"precision_changes"\[0\] has no integer'),
        ({"precision_changes": [{"from_step": 3}]}, r'"precision_changes"\[0\] has no integer'),
        ({"precision_failed": [1]}, '"precision_failed" is an array; expected an object'),
        ({"precision_failed": {"a": -1}}, 'an entry of "precision_failed" is'),
    ):
        with pytest.raises(_deepwell.Error, match=message):
            _deepwell.precision_watch_restore(watch, json.dumps(bad))
        assert json.loads(_deepwell.precision_watch_state(watch)) == state  # it is as it was
    with pytest.raises(_deepwell.Error, match="no guard to obey"):
        _deepwell.precision_watch(dw.PrecisionPolicy("fp8").to_json())
    with pytest.raises(_deepwell.Error, match="lacks a member"):
        _deepwell.precision_watch_judge(watch, 4, json.dumps([{"layer": "a"}]))
    with pytest.raises(_deepwell.Error, match="layers are 0, and the statistics are of 2"):
        _deepwell.precision_operands("[]", 2, 0)
