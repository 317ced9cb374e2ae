"""Measurements choose the attention backend: on a fake driver, with entries and a clock that return given times."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A libcuda.so.1 that reports a Hopper GPU, so that there is a store for it."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = _ROOT / "tests" / "c" / "fake" / "fake_cuda.c"
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-pthread"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    return library


def run(driver, cache, *command, **more):
    path = os.pathsep.join([str(_ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    environment = dict(
        os.environ, LD_PRELOAD=str(driver), PYTHONPATH=path, DEEPWELL_CACHE=str(cache), **more
    )
    if "DEEPWELL_AUTOTUNE" not in more:
        environment.pop("DEEPWELL_AUTOTUNE", None)
    made = subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def scenario(driver, cache, name, **more):
    out = run(driver, cache, sys.executable, _HERE / "attention_tune_run.py", name, **more)
    assert "all right" in out, out
    return out


def test_every_decision(driver, tmp_path):
    scenario(driver, tmp_path, "decisions")


def test_later_process_decides_the_same(driver, tmp_path):
    scenario(driver, tmp_path, "first")
    scenario(driver, tmp_path, "second")
    # The program explains the same numbers and the same choice.
    program = _ROOT / ".venv" / "bin" / "deepwell"
    if not program.exists():
        program = shutil.which("deepwell") or pytest.skip("the program is not installed")
    shape = "2,4,64,16,causal,kv=2"
    report = json.loads(
        run(driver, tmp_path, program, "explain", "attention", shape, "--backward", "--json")
    )
    assert report["gpu"] == "Fake GPU 0" and report["chosen"] == "cudnn"
    assert report["because"] == "cuDNN is faster here: 3.5 ms against 4, forward and backward"
    measured = {c["name"]: c["measured_seconds"] for c in report["candidates"]}
    assert measured["deepwell"] == 3e-3 and measured["cudnn"] == 2.5e-3


def test_tuning_can_be_disabled(driver, tmp_path):
    scenario(driver, tmp_path, "off", DEEPWELL_AUTOTUNE="0")
    assert not (tmp_path / "tune").exists()
