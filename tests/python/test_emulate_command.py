"""`deepwell emulate`: runs CUDA programs on the emulated GPU. nvcc builds them if it is
installed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from program import PROGRAM

_ROOT = Path(__file__).parents[2]
_SOURCES = _ROOT / "tests" / "emulate"
_FOUND = 99


def _emulate(*arguments, timeout=120) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(PROGRAM), "emulate", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("there is no nvcc to build CUDA programs with")
    folder = tmp_path_factory.mktemp("programs")

    def built(name: str, *options: str) -> Path:
        program = folder / "-".join([name, *options]).replace("/", "_")
        if not program.exists():
            flags = options or ("-cudart", "shared", "--compress-mode=none", "-arch=sm_90a")
            source = _SOURCES / f"{name}.cu"
            run = subprocess.run(
                [nvcc, "-lineinfo", *flags, str(source), "-o", str(program)],
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, run.stderr
        return program

    return built


@pytest.mark.parametrize("name", ["add", "block_sum", "cluster", "groups"])
def test_programs_run_without_findings(build, name):
    run = _emulate("--", build(name))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("right\n")
    assert "no findings" in run.stderr


def test_output_of_kernels_is_printed(build):
    printed = _emulate(build("add")).stdout.splitlines()[0]
    assert printed.startswith("[add] thread   3 of 256: ")
    assert printed.endswith(" -1234567890123 q beef  99.5%")


def test_any_seed_gives_the_same_result(build):
    for seed in (2, 3, 2**63):
        run = _emulate("--seed", seed, "--", build("cluster"))
        assert (run.returncode, run.stdout) == (0, "right\n"), run.stderr


def test_architecture_and_size_can_be_chosen(build):
    run = _emulate(
        *("--threads", 1, "--multiprocessors", 4, "--endless", 10**7), "--", build("cluster")
    )
    assert (run.returncode, run.stdout) == (0, "right\n"), run.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--threads", "0", "must be a number from 1 to 256"),
        ("--multiprocessors", "1025", "must be a number from 1 to 1024"),
        ("--endless", "-1", "must be a whole number"),
        ("--seed", "1x", "must be a whole number"),
        ("--endless", str(2**64), "must be a whole number"),
    ],
)
def test_invalid_numbers_are_rejected(option, value, message):
    run = _emulate(option, value, "--", "true")
    assert run.returncode == 2
    assert f"{option} '{value}': {message}" in run.stderr


def test_a_write_out_of_bounds_names_the_line(build, tmp_path):
    report = tmp_path / "findings.json"
    run = _emulate("--report", report, "--", build("beyond"))
    assert run.returncode == 1
    assert run.stdout == "cudaErrorIllegalAddress\n"
    assert "1 finding: 1 out of bounds" in run.stderr
    told = json.loads(report.read_text())
    assert (told["architecture"], told["launches"]) == ("sm_90a", 1)
    assert told["lane_instructions"] >= 32
    (finding,) = told["findings"]
    lines = (_SOURCES / "beyond.cu").read_text().splitlines()
    assert "the mistake" in lines[finding["source_line"] - 1]
    assert finding["source"].endswith("beyond.cu")
    assert (finding["warp"], finding["lane"]) == (3, 4)
    assert finding["text"] in run.stderr


def test_findings_are_a_failure_even_if_the_program_succeeds(build):
    assert _emulate("--", build("beyond"), "quiet").returncode == _FOUND


def test_a_kernel_that_is_not_supported_is_a_failure(build, tmp_path):
    report = tmp_path / "findings.json"
    run = _emulate("--report", report, "--", build("texture"))
    assert run.returncode == _FOUND
    assert "no findings; device code that was not run: 1" in run.stderr
    (why,) = json.loads(report.read_text())["unsupported"]
    assert "tex.1d" in why and "PTX line" in why and why in run.stderr


def test_an_assertion_is_a_finding_with_its_text(build):
    run = _emulate("--", build("beyond"), "assert")
    assert run.returncode == 1
    assert run.stdout == "cudaErrorAssert\n"
    assert 'assertion "i < n && in[i] == 0" failed' in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-arch=sm_90a", "--compress-mode=none"), "-cudart shared"),
        (("-cudart", "shared", "-arch=sm_90a", "--compress-mode=size"), "--compress-mode=none"),
    ],
)
def test_message_says_how_to_build_a_program_for_the_emulator(build, options, message):
    run = _emulate("--", build("block_sum", *options))
    assert run.returncode == 3
    assert message in run.stderr
    assert run.stdout == ""


def test_program_for_another_gpu_is_rejected_with_a_message(build):
    only = ("-gencode", "arch=compute_90a,code=compute_90a")
    program = build("block_sum", "-cudart", "shared", "--compress-mode=none", *only)
    run = _emulate("--arch", "sm_100a", "--", program)
    assert run.returncode not in (0, _FOUND)
    assert "PTX for sm_90a, none of which sm_100 can run" in run.stderr
    assert "arch=compute_100a,code=compute_100a" in run.stderr
    careless = _emulate(
        "--arch",
        "sm_100a",
        "--",
        build("texture", "-cudart", "shared", "--compress-mode=none", *only),
    )
    assert careless.returncode == _FOUND
    assert "device code that was not run: 1" in careless.stderr


def test_exit_status_of_the_program_is_kept():
    run = _emulate("--", "/bin/sh", "-c", "echo $DEEPWELL_EMULATE_ARCH; exit 7")
    assert (run.returncode, run.stdout) == (7, "sm_90a\n")
    assert "has not used the GPU" in run.stderr
    assert _emulate("--", "/bin/sh", "-c", "kill -TERM $$").returncode == 128 + 15
    assert _emulate("--", "./no-such-program").returncode == 127


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs a program"),
        (("--arch",), "--arch needs a value"),
        (("--seed", "x", "--", "true"), "'x'"),
        (("--colour", "--", "true"), "'--colour'"),
    ],
)
def test_wrong_usage(arguments, message):
    run = _emulate(*arguments)
    assert run.returncode == 2
    assert message in run.stderr


def test_an_unknown_gpu_is_named():
    run = _emulate("--arch", "sm_75", "--", "true")
    assert run.returncode == 1
    assert "sm_75" in run.stderr
    assert "sm_100a" in run.stderr
