"""The predicted memory of a training step equals the memory that the step uses: counted in a
separate process for every model of the zoo, and for large models compared with the growth of the
process.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import deepwell as dw
import pytest
import torch
from deepwell.errors import UnsupportedError
from step_memory_models import LARGE, MODELS, PARTS, ZOO

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
BOUND = 0.02
# small tensors that tracing makes and frees
WHILE_PREDICTING = 1 << 14

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """The library that counts allocations."""
    library = tmp_path_factory.mktemp("counter") / "count.so"
    flags = ["-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    source = _HERE / "count_allocations.c"
    subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    return library


def measured(counter: Path, tasks: list[str], timeout: int, **more: str) -> dict[str, dict]:
    path = os.pathsep.join([str(_ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, LD_PRELOAD=str(counter), PYTHONPATH=path, **more)
    run = subprocess.run(
        [sys.executable, str(_HERE / "step_memory_run.py"), *tasks],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [one["task"] for one in found] == tasks, run.stderr[-4000:]
    return {one["task"]: one for one in found}


def check(one: dict) -> None:
    assert one["engine"], one  # one engine serves all of the model's calls
    assert one["arenas_predicting"] == 0 and one["while_predicting"] < WHILE_PREDICTING, one
    assert 0 <= one["arena"][0] - one["arena"][1] < 64, one
    assert one["arena"][0] == one["arena"][1] or "accumulate:mxfp8" in one["task"], one
    assert abs(one["predicted"] - one["measured"]) <= BOUND * one["measured"], one


@needs_compiler
def test_counted_memory_of_quick_models(counter) -> None:
    """Cases: with a loss and without; several parts of backward; both optimizers; accumulated
    gradients; outputs that are kept; codes of weights that micro-batches share."""
    tasks = ["mlp:adamw", "llama-parts:adamw_dw:accumulate:keep", "llama:adamw_dw:accumulate:mxfp8"]
    for one in measured(counter, tasks, timeout=300).values():
        check(one)
        assert one["parts"] > 1 or one["task"].split(":")[0] in ZOO


@needs_compiler
@pytest.mark.slow
def test_counted_for_every_model(counter) -> None:
    tasks = [f"{name}:adamw_dw" for name in [*ZOO, *PARTS]]
    tasks += [f"{name}:{how}" for name in ("gpt2", "llama", *PARTS) for how in
              ("adamw", "adamw_dw:accumulate", "adamw_dw:keep", "adamw_dw:bf16", "adamw_dw:mxfp8",
               "adamw_dw:nvfp4")]  # fmt: skip
    for one in measured(counter, tasks, timeout=1200).values():
        check(one)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw_dw", "adamw"])
@pytest.mark.parametrize("name", LARGE)
def test_growth_of_the_process(counter, name, optimizer) -> None:
    """Measures with two threads, and memory as the system counts it. glibc keeps up to 64 MiB of
    freed memory, unless it is told to map larger blocks separately."""
    task = f"{name}:{optimizer}:t2"
    one = measured(counter, [task], timeout=900, MALLOC_MMAP_THRESHOLD_=str(1 << 20))[task]
    check(one)
    assert one["predicted"] > 1 << 30
    assert abs(one["predicted"] - one["resident"]) <= BOUND * one["resident"], one


def test_report() -> None:
    made = MODELS["gpt2"]
    with torch.device("meta"):
        model = made.build().train()
    arguments = made.arguments(torch.Generator().manual_seed(1))
    report = dw.dryrun(model, arguments, optimizer=torch.optim.AdamW)
    parameters = sum(4 * p.numel() for p in model.parameters())
    phases = [moment["phase"] for moment in report["moments"]]
    assert phases == ["forward", "backward", "update"] and report["optimizer"] == "adamw"
    totals = [moment["total"] for moment in report["moments"]]
    assert report["peak_bytes"] == max(totals) == report["peak"]["total"]
    assert report["memory_gb"] == max(totals) / 10**9 and report["fits"]
    assert report["memory_gib"] == max(totals) / 2**30
    assert report["sizes"] == {"B": 3, "S": 33}
    if platform.machine() == "x86_64":
        assert report["library_known"] and report["peak"]["library"] >= 0
    for moment in report["moments"]:
        parts = [v for k, v in moment.items() if k not in ("phase", "part", "total")]
        assert sum(parts) == moment["total"]
        assert moment["parameters"] == parameters and moment["arena"] == report["arena"]["bytes"]
    forward, backward, update = report["moments"]
    assert forward["gradients"] == 0 and backward["gradients"] == update["gradients"] == parameters
    tensors = len(list(model.parameters()))
    assert update["optimizer"] == 2 * parameters + 4 * tensors
    assert update["temporaries"] == 2 * 4 * max(p.numel() for p in model.parameters())
    alive = report["arena"]["alive"]
    assert 0.5 * report["arena"]["bytes"] < max(alive) < report["arena"]["bytes"] + 64
    assert 0 < report["arena"]["first_backward"] < len(alive)
    assert report["step_time_ms"] is None


def test_meta_device_makes_no_difference() -> None:
    made = MODELS["llama"]
    with torch.device("meta"):
        empty = made.build().train()
    arguments = made.arguments(torch.Generator().manual_seed(1))
    assert dw.dryrun(empty, arguments) == dw.dryrun(made.build().train(), arguments)


def test_memory_grows_with_sizes_and_threads() -> None:
    """Sizes, threads and frozen parameters have the expected effect."""
    made = MODELS["gpt2"]
    model = made.build().train()
    (args, kwargs) = made.arguments(torch.Generator().manual_seed(1))
    one = dw.dryrun(model, kwargs, threads=1)
    four = dw.dryrun(model, kwargs, threads=4)
    assert four["threads"] == 4 and four["arena"]["bytes"] > one["arena"]["bytes"]
    larger = {name: value.repeat(2, 1) for name, value in kwargs.items()}
    assert dw.dryrun(model, larger)["arena"]["bytes"] > 1.5 * one["arena"]["bytes"]
    none = dw.dryrun(model, kwargs, optimizer=None)
    assert none["peak"]["optimizer"] == 0
    model.transformer.wte.weight.requires_grad_(False)
    frozen = dw.dryrun(model, kwargs)["moments"][-1]
    table = 4 * model.transformer.wte.weight.numel()
    assert frozen["gradients"] == one["moments"][-1]["gradients"] - table
    assert frozen["parameters"] == one["moments"][-1]["parameters"]
    evaluation = dw.dryrun(model.requires_grad_(False), kwargs)
    assert [moment["phase"] for moment in evaluation["moments"]] == ["forward"]


def test_does_not_fit() -> None:
    with torch.device("meta"):
        model = MODELS["gpt2-124m"].build().train()
    ids = torch.zeros(512, 1024, dtype=torch.long, device="meta")
    arguments = {"input_ids": ids, "labels": ids}
    report = dw.dryrun(model, arguments, target="cpu", hw={"profile": "h100", "gpus": 1})
    assert report["memory_gb"] > 50 and report["capacity_gb"] > 0
    assert report["fits"] == (report["memory_gb"] <= report["capacity_gb"])


def test_bad_input() -> None:
    model, arguments = MODELS["mlp"].build(), (torch.randn(2, 5, 37),)
    with pytest.raises(UnsupportedError, match="SGD.*adamw_dw"):
        dw.dryrun(model, arguments, optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match="fp7"):
        dw.dryrun(model, arguments, precision="fp7")
    with pytest.raises(UnsupportedError, match="moments"):
        dw.dryrun(model, arguments, trace="trace.json")
    with pytest.raises(TypeError, match="example_inputs.*threads"):
        dw.dryrun("plan.json", arguments, threads=2)
    with pytest.raises(dw.CaptureError, match="example_inputs"):
        dw.dryrun(torch.nn.MultiheadAttention(8, 2))
