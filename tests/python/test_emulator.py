"""Compares the emulator with hardware: an H200's answers to the probes, and sm_90a's attention
kernels with the check of tests/gpu.
"""

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PROBES = _ROOT / "tests" / "probes"
_LIB = _ROOT / "build" / "release" / "lib"
pytestmark = pytest.mark.skipif(not _LIB.exists(), reason="there is no build tree: run make")


def _environment() -> dict[str, str]:
    emulated = {"DEEPWELL_EMULATE_ARCH": "sm_90a", "LD_LIBRARY_PATH": str(_LIB / "emulate")}
    return {**os.environ, **emulated}


def _probes(*arguments: str) -> str:
    program = _ROOT / "build" / "release" / "bin" / "run_probes"
    command = [str(program), str(_PROBES / "hopper.ptx"), *arguments]
    run = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=300, check=True
    )
    return run.stdout


def _sections(text: str) -> dict[str, list[int]]:
    """Returns the words of each probe by name."""
    made: dict[str, list[int]] = {}
    words: list[int] = []
    for line in text.splitlines():
        if all(len(word) == 8 for word in line.split()):
            words += [int(word, 16) for word in line.split()]
        else:
            words = made.setdefault(line, [])
    return made


def test_probes_give_an_h200s_answers():
    ours = _sections(_probes())
    theirs = _sections((_PROBES / "hopper_h200.txt").read_text())
    assert list(ours) == list(theirs)
    for name in theirs:
        if name != "functions":
            assert ours[name] == theirs[name], name


def test_mmas_round_like_an_h200():
    theirs = (_PROBES / "hopper_rounding_h200.txt").read_text()
    assert len(_sections(theirs)) == 20
    assert _sections(_probes("rounding")) == _sections(theirs)


def _float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


# Largest errors that the PTX ISA (9.7.3) states for ex2, lg2, rcp, rsqrt, tanh, sqrt, sin and
# division; they are relative, except for lg2 and sin. Ours are within half a unit of the last
# place, 2^-24.
_APPROXIMATE = (2**-22, 2**-22, 2**-23, 2**-22.4, 2**-10.987, 2**-22, 2**-20.9, 2**-22)


def test_approximate_functions_are_within_their_bounds_of_an_h200s():
    ours = _sections(_probes())["functions"]
    theirs = _sections((_PROBES / "hopper_h200.txt").read_text())["functions"]
    for at, (mine, other) in enumerate(zip(map(_float, ours), map(_float, theirs))):
        which = at % len(_APPROXIMATE)
        if math.isnan(other) or math.isinf(other) or which == 6:  # sin has no bound beyond pi
            assert which == 6 or str(mine) == str(other), (at, mine, other)
            continue
        scale = max(1.0, abs(other)) if which == 1 else abs(other)
        bound = (_APPROXIMATE[which] + 2**-24) * scale
        assert abs(mine - other) <= bound, (at, which, mine, other)


def _beside_an_h200(*arguments: str) -> str:
    """Compares the library's kernels with the words that they gave on an H200 (tests/machines)."""
    program = _ROOT / "build" / "release" / "bin" / "compare_machines"
    answers = _ROOT / "tests" / "machines" / "h200.txt"
    run = subprocess.run(
        [str(program), "check", str(answers), *arguments],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    if "run-time compiler" in run.stderr:
        pytest.skip("no kernel was compiled into the library, and there is no NVRTC")
    assert "deepwell emulate: " not in run.stderr, run.stderr
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_kernels_give_an_h200s_words():
    said = _beside_an_h200("--quick")
    assert "10 cases; 26 outputs compared" in said
    # Sums that are exact in any order have the same bits (the program checks that), and so do most
    # others.
    assert said.count("\nequal") >= 20, said


def _compilers() -> list[Path]:
    """NVRTC of this Python's packages."""
    return [path for part in sys.path for path in Path(part).glob("nvidia/*/lib/libnvrtc.so.1[23]")]


def _compile_cases(folder: Path, cases: str):
    """Compiles to PTX the kernels of compare_machines' cases whose names contain this text."""
    program = _ROOT / "build" / "release" / "bin" / "compare_machines"
    compilers = _compilers()
    if not compilers:
        pytest.skip("this Python has no NVRTC")
    compiled = subprocess.run(
        [str(program), "ptx", str(folder), "-k", cases],
        env={**os.environ, "DEEPWELL_NVRTC": str(compilers[0])},
        capture_output=True,
        text=True,
    )
    assert compiled.returncode == 0, compiled.stderr


@pytest.mark.slow
def test_quantization_equals_the_codecs(tmp_path):
    _compile_cases(tmp_path, "quantize")
    program = _ROOT / "build" / "release" / "bin" / "compare_machines"
    words = ["record", str(tmp_path / "words.txt"), "--kernels", str(tmp_path), "-k", "quantize"]
    run = subprocess.run(
        [str(program), *words], env=_environment(), capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "48 cases" in run.stdout


@pytest.mark.slow
def test_every_variant_gives_an_h200s_words(tmp_path):
    _compile_cases(tmp_path, "attention")
    said = _beside_an_h200("--kernels", str(tmp_path), "-k", "attention")
    assert "123 cases; 316 outputs compared" in said
    assert said.count("\nequal") >= 200, said


def _smoke(*arguments: str, **more: str) -> str:
    script = _ROOT / "tests" / "gpu" / "attention_smoke.py"
    library = ["--lib", str(_LIB / "libdeepwell.so")]
    environment = {**_environment(), **more}
    if found := _compilers():
        environment["DEEPWELL_NVRTC"] = str(found[0])
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


# Each case also runs twice and compares the bits. The first has tiles of queries that see no key.
@pytest.mark.slow
@pytest.mark.parametrize("case", ["d64-b2-h4-s300x100-causal-br", "d64-b2-h4-s321x450-window40,30"])
def test_deterministic_attention_backward_is_right_on_the_emulator(case):
    assert "1 right, 0 wrong" in _smoke("--backward", "-k", case, "-k", "deterministic")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["d64-b1-h12-s1024-causal-qkv", "d128-b1-h8/2-s2048-causal-bshd"])
def test_attention_of_awkward_layouts_is_right_on_the_emulator(case):
    # On 5 multiprocessors, so that thread blocks take tiles in pairs, and then sorted ones of begun and of whole heads.
    few = {"DEEPWELL_EMULATE_MULTIPROCESSORS": "5"}
    assert "1 right, 0 wrong" in _smoke("--forward", "-k", case, **few)
