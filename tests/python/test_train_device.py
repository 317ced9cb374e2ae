"""`deepwell train --device`: on an emulated GPU, and on a machine without a GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import train_runs
import transformers
from deepwell import _deepwell
from train_runs import losses, run
from transformers import GPT2Config

EMULATED = "emulator:sm_90a"
STEPS = 4
OPTIONS = ["--init", "--batch", 2, "--sequence", 8, "--lr", 1e-3, "--no-dropout", "--warmup", 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = GPT2Config(
        n_embd=32, n_layer=1, n_head=2, n_positions=8, vocab_size=train_runs.VOCABULARY,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tokens.bin"
    return train_runs.save_tokens(path, train_runs.random_tokens(90))


@pytest.fixture
def compiler():
    """The environment of a run that compiles elementwise programs: the program looks for NVRTC in the packages of the
    python3 on PATH."""
    if not _deepwell.jit_compiler():
        pytest.skip("elementwise programs need NVRTC")
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


# tests/c/test_trainer_gpu.c derives tolerances; this test shows that the program runs.
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [pytest.param(["--precision", "fp32"], 1e-4, marks=pytest.mark.slow), ([], 2e-2)],
)
def test_an_emulated_gpu_trains_and_resumes(precision, tolerance, model, data, compiler, tmp_path):
    log, output, kept = tmp_path / "log.jsonl", tmp_path / "out", tmp_path / "checkpoints"
    whole = ["--model", model, "--data", data, *OPTIONS, "--schedule-steps", STEPS]
    on_gpu = [*whole, *precision, "--device", EMULATED, "--checkpoint", kept, "--resume"]
    run(*on_gpu, "--steps", 2, "--log", log, environment=compiler)
    done = run(*on_gpu, "--steps", STEPS, "--log", log, "--output", output, "--json",
               environment=compiler)  # fmt: skip
    run(*whole, "--steps", STEPS, "--log", tmp_path / "cpu.jsonl", "--output", tmp_path / "cpu")
    np.testing.assert_allclose(losses(log), losses(tmp_path / "cpu.jsonl"), rtol=tolerance)
    assert len(losses(log)) == STEPS
    assert sum(p.numel() for p in transformers.GPT2LMHeadModel.from_pretrained(output).parameters())
    events = [json.loads(line) for line in done.stdout.splitlines()]
    plan = events[0]
    assert (plan["event"], plan["device"]) == ("plan", EMULATED)
    assert plan["precision"] == (precision[1] if precision else "bf16")
    peaks = [event["memory_peak"] for event in events if event["event"] == "step"]
    assert peaks[-1] == plan["memory"]["predicted_peak"]
    # The CPU would give other bits.
    refused = run(*whole, "--steps", STEPS, "--checkpoint", kept, "--resume", status=1)
    assert f'device is "cpu" (checkpoint: "{EMULATED}")' in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--device", "gpu"], 2, '"gpu"'),
        (["--device", EMULATED, "--precision", "fp8-row"], 3, "fp8-row"),
        (["--device", EMULATED, "--dry-run"], 0, None),
    ],
)
def test_other_devices(arguments, status, named, model, data, compiler, tmp_path):
    done = run("--model", model, "--data", data, *OPTIONS, *arguments, "--output", tmp_path / "o",
               status=status, environment=compiler)  # fmt: skip
    assert named in done.stderr if named else EMULATED in done.stdout


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named(model, data, tmp_path):
    done = run("--model", model, "--data", data, *OPTIONS, "--device", "cuda",
               "--output", tmp_path / "o", status=3)  # fmt: skip
    assert "cuda" in done.stderr.lower()
    assert not (tmp_path / "o").exists()
