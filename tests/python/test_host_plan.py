"""deepwell.autoplan without a GPU: finds the largest batch that fits, by the engine's own
placement."""

import json

import deepwell as dw
import program
import pytest
import torch
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.machine import Hardware
from zoo import small_gpt2

SIZES = dict(seq_len=32, global_batch=12)
DIVISORS = (12, 4, 1)  # all figures: see tests/c/test_step_memory.c


def host(memory: float) -> Hardware:
    """Returns this machine without its GPUs, with the given memory."""
    described = json.loads(dw.probe().to_json())
    described.update(gpus=0, gpus_per_node=0, gpus_per_domain=0)
    described["host_memory"] = {"value": memory, "kind": "given", "source": "test"}
    return Hardware(json.dumps(described))


@pytest.fixture(scope="module")
def empty():
    with torch.device("meta"):
        return small_gpt2().train()


def needed(model, micro_batch: int) -> int:
    """Returns the memory that dryrun states for autoplan's call of a language model: ids and
    labels."""
    ids = torch.zeros(micro_batch, SIZES["seq_len"], dtype=torch.long, device="meta")
    call = {"input_ids": ids, "labels": ids}
    accumulate = micro_batch < SIZES["global_batch"]
    return dw.dryrun(model, call, accumulate=accumulate)["peak_bytes"]


def test_largest_batch_that_fits(empty) -> None:
    before = None
    for micro_batch in DIVISORS:
        enough = needed(empty, micro_batch)
        assert before is None or enough < before  # the sizes distinguish the divisors
        before = enough
        plan = dw.autoplan(empty, hw=host(enough), reserve_gb=0, **SIZES)
        assert plan.fits and plan.peak_bytes == enough and plan.layout.micro_batch == micro_batch
        assert plan.layout.micro_batches == SIZES["global_batch"] // micro_batch
    short = dw.autoplan(empty, hw=host(before - 1), reserve_gb=0, **SIZES)
    assert not short.fits and short.layout.micro_batch == 1 and short.tightest in short.peak
    assert "does not fit" in str(short)
    # A twentieth stays free unless stated otherwise.
    assert not dw.autoplan(empty, hw=host(enough / 0.96), **SIZES).fits


def test_by_name_by_capture_and_fixed(empty) -> None:
    plenty = host(2**40)
    assert dw.autoplan("llama3-8b", hw=plenty, **SIZES).layout.micro_batch == 12
    named = dw.autoplan("gpt2", hw=plenty, precision="mxfp8", **SIZES)
    assert named.model_name == "gpt2" and named.layout.precision == "mxfp8"
    assert 124e6 * 4 < named.peak["parameters"] < 125e6 * 4 and named.step_time_ms is None
    captured = dw.autoplan(dw.capture(empty), hw=plenty, **SIZES)
    assert captured.peak["parameters"] == sum(4 * p.numel() for p in empty.parameters())
    fixed = dw.autoplan(empty, hw=plenty, constraints={"micro_batch": 3}, **SIZES)
    assert fixed.layout.micro_batch == 3 and fixed.peak_bytes == needed(empty, 3)
    assert json.loads(fixed.to_json())["layout"]["micro_batches"] == 4


@pytest.mark.parametrize(
    ("what", "changes", "error", "message"),
    [
        (None, dict(constraints=["tp=2"]), UnsupportedError, "tp=2.*micro_batch"),
        (None, dict(constraints=["micro_batch=5"]), DeepwellError, "5.*12"),
        (None, dict(precision="fp7"), ValueError, "fp7.*mxfp8"),
        (None, dict(global_batch=0), DeepwellError, "global_batch 0"),
        ({"layers": 3}, {}, DeepwellError, "module.*dict"),
        ("nonsense", {}, DeepwellError, "nonsense"),
        (torch.nn.Linear(3, 3), {}, UnsupportedError, "dryrun"),
    ],
)
def test_bad_input(empty, what, changes, error, message) -> None:
    with pytest.raises(error, match=message):
        dw.autoplan(empty if what is None else what, hw=host(2**40), **{**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe": {"experts": 8, "capacity_factor": 1.25}}, "moe replaces.*hw=.*arch="),
        ({"moe": {"capacity_factor": 1.25}}, "moe replaces.*has no GPUs"),
    ],
)
def test_gpu_options_are_rejected_by_name(empty, changes, message) -> None:
    with pytest.raises(DeepwellError, match=message):
        dw.autoplan(empty, hw=host(2**40), **SIZES, **changes)


def test_an_arch_that_is_not_here_is_planned_for_its_profile(empty) -> None:
    arch = "blackwell-sm100"
    moe = {"experts": 8, "capacity_factor": 1.25}
    with pytest.warns(UserWarning, match='this machine has no GPUs.*"b200:8"'):
        plan = dw.autoplan(empty, hw=host(2**40), **SIZES, arch=arch, moe=moe, what_ifs=False)
    assert (plan.hardware.name, plan.layout.gpus, plan.model.experts) == ("b200", 8, 8)
    described = json.loads(host(2**40).to_json())
    del described["machine"]  # some other machine
    with pytest.raises(DeepwellError, match="arch is 'blackwell-sm100'.*has no GPUs.*b200:8"):
        dw.autoplan(empty, hw=Hardware(json.dumps(described)), **SIZES, arch=arch)
    with pytest.raises(DeepwellError, match="arch is 'sm75'.*has no GPUs"):
        dw.autoplan(empty, hw=host(2**40), **SIZES, arch="sm75")


def test_the_program_plans_for_a_machine_without_gpus(tmp_path) -> None:
    """`deepwell plan --hardware` for such a machine agrees with Python's autoplan."""
    file = tmp_path / "here.json"
    words = ("plan", "--hardware", file, "--seq-len", 32, "--global-batch", 12, "--model", "gpt2")
    for memory in (2**34, 5 * 2**29):
        file.write_text(host(memory).to_json())
        plan = dw.autoplan("gpt2", hw=dw.hardware(file), **SIZES)
        done = program.run(*map(str, words), "--json")
        assert done.returncode == (0 if plan.fits else 1), done.stderr
        found = json.loads(done.stdout)
        assert found["micro_batch"] == plan.layout.micro_batch and found["fits"] == plan.fits
    done = program.run(*map(str, words))
    assert "no GPU" in done.stdout and f"x {plan.layout.micro_batch} sequences" in done.stdout
    done = program.run(*map(str, words), "--set", "tp=2")
    assert done.returncode == 2 and "h100:8" in done.stderr


def test_host_plan_is_not_simulated(empty) -> None:
    plan = dw.autoplan(empty, hw=host(2**40), **SIZES)
    with pytest.raises(UnsupportedError, match="dryrun"):
        dw.dryrun(plan)
