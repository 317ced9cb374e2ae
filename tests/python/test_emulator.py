"""The attention kernels of sm_90a on the emulated GPU: the cases and bounds of the check on hardware."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_LIB = _ROOT / "build" / "release" / "lib"


def _smoke(*arguments: str) -> str:
    environment = dict(
        os.environ, DEEPWELL_EMULATE_ARCH="sm_90a", LD_LIBRARY_PATH=str(_LIB / "emulate")
    )
    script = _ROOT / "tests" / "gpu" / "attention_smoke.py"
    library = ["--lib", str(_LIB / "libdeepwell.so")]
    run = subprocess.run(
        [sys.executable, str(script), *library, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert "deepwell emulate: " not in run.stderr, run.stderr
    if "run-time compiler" in run.stdout:
        pytest.skip("no kernel was compiled into the library, and there is no NVRTC")
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_attention_forward_is_right_on_the_emulator():
    assert "1 right, 0 wrong" in _smoke("--forward", "-k", "bf16-d64-b1-h1-s128")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["d64-b1-h1-s128", "d128-b1-h1-s128"])
def test_attention_backward_is_right_on_the_emulator(case):
    assert "1 right, 0 wrong" in _smoke("-k", case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["d64-b1-h12-s1024-causal-qkv", "d128-b1-h8/2-s2048-causal-bshd"])
def test_attention_of_awkward_layouts_is_right_on_the_emulator(case):
    assert "1 right, 0 wrong" in _smoke("--forward", "-k", case)
