"""Runs the C tests of the engine on this machine's GPU (tests/c/test_engine_gpu.c): whole models, forward and backward,
against the interpreter in FP64, by launches and by replayed CUDA graphs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def program() -> Path | None:
    """Returns the newest test program of the build folders, or the one in DEEPWELL_TEST_ENGINE."""
    if named := os.environ.get("DEEPWELL_TEST_ENGINE"):
        return Path(named)
    built = list(ROOT.glob("build/*/bin/test_engine_gpu"))
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def test_models_train_on_the_gpu():
    found = program()
    if not found:
        pytest.skip("test_engine_gpu is not built: cmake --build build/release -t test_engine_gpu")
    run = subprocess.run(
        [found],
        env={**os.environ, "DEEPWELL_TEST_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "[       OK ] gpt_agrees" in run.stdout, run.stdout
