"""CUTLASS's kernels (`make cutlass`), where they have been built: on the emulator, against sums in double."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_LIB = _ROOT / "build" / "release" / "lib"
_PROVIDER = _LIB / "libdeepwell_cutlass.so"
_PROGRAM = _ROOT / "build" / "release" / "bin" / "deepwell"


def _explain(*words: str, library: str) -> list[dict] | dict:
    environment = {**os.environ, "DEEPWELL_CUTLASS": library}
    run = subprocess.run(
        [str(_PROGRAM), "explain", *words, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("library", "words"),
    [("/nowhere/libnone.so", "`make cutlass` builds them"), ("libm.so.6", "of another version")],
)
def test_without_the_library_it_is_said(library, words):
    assert not [k for k in _explain("kernels", library=library) if "cutlass" in k["name"]]
    plan = _explain("product", "512,512,512", "--target", "sm_100a", library=library)
    (row,) = (c for c in plan["candidates"] if c["name"] == "cutlass")
    assert not row["runs"] and words in row["reason"]


needs_provider = pytest.mark.skipif(not _PROVIDER.exists(), reason="make cutlass has not been run")


@needs_provider
def test_kernels_are_listed_as_what_they_are():
    rows = [
        k
        for k in _explain("kernels", library=str(_PROVIDER))
        if k["name"].startswith("cutlass.sm100")
    ]
    assert rows and all(k["proof"] == "proven on the emulator, not run on hardware" for k in rows)
    plan = _explain("product", "512,512,512", "--target", "sm_100a", library=str(_PROVIDER))
    (row,) = (c for c in plan["candidates"] if c["name"] == "cutlass")
    assert row["runs"] and row["source"] == "cutlass.sm100.bf16.control"
    odd = _explain("product", "512,500,512", "--target", "sm_100a", library=str(_PROVIDER))
    assert not odd["candidates"][2]["runs"] and "n is 500" in odd["candidates"][2]["reason"]


@pytest.mark.slow
@needs_provider
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_kernels_are_right_on_the_emulator(architecture, tmp_path):
    """What the checker says of CUTLASS's own code: docs/emulator.md."""
    report = tmp_path / "findings.json"
    environment = {
        **os.environ,
        "DEEPWELL_EMULATE_ARCH": architecture,
        "DEEPWELL_EMULATE_REPORT": str(report),
        "LD_LIBRARY_PATH": str(_LIB / "emulate"),
    }
    script = _ROOT / "tests" / "gpu" / "cutlass_smoke.py"
    run = subprocess.run(
        [sys.executable, str(script), "--lib", str(_PROVIDER)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert "refused: 6 of 6" in run.stdout
    findings = json.loads(report.read_text())["findings"] if report.exists() else []
    kinds = {finding["kind"] for finding in findings}
    assert kinds <= (set() if architecture == "sm_90a" else {"too early", "race"})
    for finding in findings:
        if finding["kind"] == "race":
            assert "uses the mbarrier" in finding["text"] and "initialised" in finding["text"]
