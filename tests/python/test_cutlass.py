"""CUTLASS's kernels (`make cutlass`), if they have been built: runs them on the emulator and
compares with sums in double."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from program import PROGRAM

_ROOT = Path(__file__).parents[2]
_LIB = _ROOT / "build" / "release" / "lib"
_PROVIDER = _LIB / "libdeepwell_cutlass.so"


def _explain(*words: str, library: str) -> list[dict] | dict:
    environment = {**os.environ, "DEEPWELL_CUTLASS": library}
    run = subprocess.run(
        [str(PROGRAM), "explain", *words, "--json"],
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
def test_missing_library_is_reported(library, words):
    assert not [k for k in _explain("kernels", library=library) if "cutlass" in k["name"]]
    for call in (["gemm", "512,512,512"], ["attention", "2,8,512,64"]):
        plan = _explain(*call, "--target", "sm_100a", library=library)
        (row,) = (c for c in plan["candidates"] if c["name"] == "cutlass")
        assert not row["runs"] and words in row["reason"]


@pytest.mark.parametrize(
    ("targets", "machine", "available"),
    [
        ([], "h100:8", False),  # CUTLASS's library was not built
        (["sm_90a (H100, H200)"], "h100:8", True),
        (["sm_90a (H100, H200)"], "b200:8", False),
        (["sm_90a (H100, H200)", "sm_100a (B200)"], "b200:8", True),
        (["sm_100a (B200)"], "b300:8", False),
        (["sm_90a (H100, H200)"], None, False),  # there is no GPU
    ],
)
def test_available_requires_the_library_and_its_gpu(monkeypatch, targets, machine, available):
    from deepwell import cutlass_kernels, hardware
    from deepwell.kernels import cutlass_bindings

    rows = [{"name": "cutlass.product", "architectures": target} for target in targets]
    rows.append({"name": "sm90_attention_forward", "architectures": "sm_90a (H100, H200)"})
    monkeypatch.setattr(cutlass_bindings._deepwell, "gpu_kernels", lambda: json.dumps(rows))
    here = SimpleNamespace(gpus=[] if machine is None else hardware(machine).gpus)
    monkeypatch.setattr(cutlass_bindings, "probe", lambda: here)
    cutlass_bindings._fits_a_gpu.cache_clear()
    try:
        assert cutlass_bindings.CUTLASS_AVAILABLE is available
        assert cutlass_kernels.CUTLASS_AVAILABLE is available
    finally:
        cutlass_bindings._fits_a_gpu.cache_clear()


def test_help_of_the_build_script_builds_nothing():
    """--help builds nothing: it succeeds even with a compiler that cannot run."""
    script = _ROOT / "scripts" / "cutlass.sh"
    environment = {**os.environ, "NVCC": "/bin/false"}
    for word, code in (("--help", 0), ("-h", 0), ("--colour", 2)):
        done = subprocess.run(
            ["bash", str(script), word], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stderr
        assert ("Usage: scripts/cutlass.sh" in done.stdout) == (code == 0)
    assert "--colour" in done.stderr


needs_provider = pytest.mark.skipif(not _PROVIDER.exists(), reason="make cutlass has not been run")


@needs_provider
def test_kernels_are_listed_with_their_proof():
    rows = [
        k
        for k in _explain("kernels", library=str(_PROVIDER))
        if k["name"].startswith("cutlass.sm100")
    ]
    assert rows and all(k["proof"] == "proven on the emulator, not run on hardware" for k in rows)
    plan = _explain("gemm", "512,512,512", "--target", "sm_100a", library=str(_PROVIDER))
    (row,) = (c for c in plan["candidates"] if c["name"] == "cutlass")
    assert row["runs"] and row["source"] == "cutlass.sm100.bf16.control"
    assert row["source"] in row["expected_from"]  # the option that requests it
    odd = _explain("gemm", "512,500,512", "--target", "sm_100a", library=str(_PROVIDER))
    assert not odd["candidates"][2]["runs"] and "n is 500" in odd["candidates"][2]["reason"]


@needs_provider
def test_attention_is_a_candidate():
    target = "--target", "sm_100a"
    plan = _explain("attention", "2,8,512,64,kv=2,causal", *target, library=str(_PROVIDER))
    (row,) = (c for c in plan["candidates"] if c["name"] == "cutlass")
    assert row["runs"] and row["source"] == "cutlass.sm100.attention.bf16"
    assert row["proof"] == "proven on the emulator, not run on hardware"
    assert plan["chosen"] not in ("cutlass", "deepwell")
    for shape, words in (
        ("2,8,512,96", "head dimension 96"),
        ("2,8,512,64,k=600,causal", "causal attention of 512 queries to 600 keys"),
    ):
        plan = _explain("attention", shape, *target, library=str(_PROVIDER))
        assert not plan["candidates"][-1]["runs"] and words in plan["candidates"][-1]["reason"]


def _smoke(script: str, architecture: str, *words: str, report: Path, **settings: str) -> str:
    """Runs the program on the emulator. docs/emulator.md lists the checker's findings in CUTLASS's
    own code."""
    environment = {
        **os.environ,
        "DEEPWELL_EMULATE_ARCH": architecture,
        "DEEPWELL_EMULATE_REPORT": str(report),
        "LD_LIBRARY_PATH": str(_LIB / "emulate"),
        **settings,
    }
    run = subprocess.run(
        [sys.executable, str(_ROOT / "tests" / "gpu" / script), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    findings = json.loads(report.read_text())["findings"] if report.exists() else []
    kinds = {finding["kind"] for finding in findings}
    assert kinds <= (set() if architecture == "sm_90a" else {"too early", "race"})
    unwaited = r"stored there at PTX line (\d+), and no tcgen05.wait::st"
    stores = {line for finding in findings for line in re.findall(unwaited, finding["text"])}
    for finding in findings:
        if finding["kind"] == "race" and "uses the mbarrier" in finding["text"]:
            assert "initialised" in finding["text"]
        elif finding["kind"] == "race":  # without the wait, nothing after it is ordered either
            (store,) = re.findall(r"at PTX line (\d+) \(tcgen05.st\.", finding["text"])
            assert store in stores, finding["text"]
    return run.stdout


@pytest.mark.slow
@needs_provider
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_kernels_are_right_on_the_emulator(architecture, tmp_path):
    said = _smoke(
        "cutlass_smoke.py", architecture, "--lib", str(_PROVIDER), report=tmp_path / "findings"
    )
    assert "refused: 6 of 6" in said


_OURS = "--lib", str(_LIB / "libdeepwell.so")


@pytest.mark.slow
@needs_provider
@pytest.mark.parametrize(("architecture", "cases"), [("sm_90a", 12), ("sm_100a", 26)])
def test_gemms_by_name_are_right_on_the_emulator(architecture, cases, tmp_path):
    """Runs dw_gemm_run and dw_grouped_gemm_run; every kernel is compared at its first use."""
    said = _smoke("gemm_smoke.py", architecture, *_OURS, report=tmp_path / "findings")
    assert len(said.splitlines()) == cases, said


@pytest.mark.slow
@needs_provider
@pytest.mark.parametrize(("architecture", "kernels"), [("sm_90a", 2), ("sm_100a", 5)])
def test_wrong_gemms_are_rejected_on_the_emulator(architecture, kernels, tmp_path):
    """A library with changed PTX is rejected: BF16 read as F16, multiplications of the epilogue replaced by
    additions.
    """
    code, wrong = _PROVIDER.read_bytes(), tmp_path / "libwrong.so"
    for right, instead in ((b".f32.bf16.bf16 ", b".f32.f16.f16   "), (b"mul.f32", b"add.f32")):
        assert right in code
        code = code.replace(right, instead)
    wrong.write_bytes(code)
    said = _smoke(
        "gemm_smoke.py",
        architecture,
        *_OURS,
        "--quick",
        "--refused",
        "disagrees with the reference",
        report=tmp_path / "findings",
        DEEPWELL_CUTLASS=str(wrong),
    )
    lines = [line for line in said.splitlines() if line.endswith(" refused")]
    assert len(lines) == kernels and "NOT" not in said, said


def _attention_calls(architecture: str, *words: str, cutlass: Path, report: Path) -> str:
    compilers = [
        path for part in sys.path for path in Path(part).glob("nvidia/*/lib/libnvrtc.so.1[23]")
    ]
    if not compilers:
        pytest.skip("attention by definition is compiled at first use, and there is no NVRTC")
    return _smoke(
        "cutlass_attention.py",
        architecture,
        *_OURS,
        "--cutlass",
        str(cutlass),
        *words,
        report=report,
        DEEPWELL_CUTLASS=str(cutlass),
        DEEPWELL_NVRTC=str(compilers[0]),
    )


@pytest.mark.slow
@needs_provider
def test_attention_by_name_is_right_on_the_emulator(tmp_path):
    """Runs dw_attention_forward; every kernel is compared at its first use."""
    said = _attention_calls("sm_100a", cutlass=_PROVIDER, report=tmp_path / "findings")
    assert said.count("cutlass.sm100.attention.bf16 ") == 8 and "refused: 5 of 5" in said


@pytest.mark.slow
@needs_provider
def test_wrong_attention_is_rejected_on_the_emulator(tmp_path):
    """A library whose PTX replaces exponentials by logarithms is rejected."""
    code, wrong = _PROVIDER.read_bytes(), tmp_path / "libwrong.so"
    assert b"ex2.approx.f32" in code
    wrong.write_bytes(code.replace(b"ex2.approx.f32", b"lg2.approx.f32"))
    refused = "disagrees with the reference"
    said = _attention_calls(
        "sm_100a", "--refused", refused, cutlass=wrong, report=tmp_path / "findings"
    )
    assert said.splitlines() == ["cutlass.sm100.attention.bf16 refused"]
