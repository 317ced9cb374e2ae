"""The program `deepwell`: exit statuses, output forms, and that its documents name its commands."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def find_program() -> Path:
    """Returns the program beside this interpreter, or the one in the build tree."""
    for path in (Path(sys.executable).parent / "deepwell", ROOT / "build/release/bin/deepwell"):
        if path.exists():
            return path
    pytest.skip("the program deepwell is not built: run make")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [find_program(), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def commands() -> list[str]:
    listing = run("--help").stdout.split("Commands:\n")[1].split("\n\n")[0]
    return re.findall(r"^  (\S+)", listing, re.MULTILINE)


def header_version() -> str:
    text = (ROOT / "include/deepwell/version.h").read_text()
    return re.search(r'DW_VERSION "([^"]+)"', text)[1]


def test_version_is_the_headers():
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout == f"deepwell {header_version()}\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        ([], 2),
        (["no-such-command"], 2),
        (["--no-such-option"], 2),
        (["doctor", "--help"], 0),
        (["doctor", "--no-such-option"], 2),
    ],
)
def test_exit_status(arguments, status):
    result = run(*arguments)
    assert result.returncode == status
    if status == 2 and arguments:
        assert arguments[-1] in result.stderr
        assert result.stdout == ""


def test_lost_output_is_a_failure():
    with open("/dev/full", "w") as full:
        for arguments in (["--version"], ["--help"], ["doctor"], ["doctor", "--json"]):
            result = subprocess.run([find_program(), *arguments], stdout=full, timeout=60)
            assert result.returncode == 1


def test_early_loss_of_output_is_detected(tmp_path):
    """The output exceeds stdout's buffer, so that a write long before the last one fails."""
    nodes = "".join(f"%y{i} = exp(%{'x' if i == 0 else f'y{i - 1}'})\n" for i in range(400))
    file = tmp_path / "long.dwg"
    file.write_text(f"deepwell graph 1\ninput %x: f32[4]\n{nodes}return %y399\n")
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [find_program(), "graph", file],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 1
    assert result.stderr.startswith("deepwell: cannot write to standard output: ")
    told = result.stderr.split(": ", 2)[2]
    assert told.startswith(("No space left on device", "a part of it was not written"))


def test_doctor_describes_this_machine():
    result = run("doctor", "--json", DEEPWELL_THREADS="3")
    assert result.returncode == 0
    report = json.loads(result.stdout)
    assert report["deepwell"] == header_version()
    assert report["threads"] == 3
    assert report["cpu"]["usable"] == len(os.sched_getaffinity(0))
    assert report["cpu"]["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert isinstance(report["gpu"]["devices"], list)
    assert all(set(entry) == {"what", "next"} for entry in report["advice"])


def test_doctor_names_the_instruction_sets_in_use():
    """Deepwell's and oneDNN's, each with its own limit."""
    report = json.loads(run("doctor", "--json", DEEPWELL_ISA="baseline").stdout)
    assert report["cpu"]["isa"] == "baseline"
    if "oneDNN" in report["gemm"] and platform.machine() == "x86_64":
        report = json.loads(run("doctor", "--json", ONEDNN_MAX_CPU_ISA="SSE41").stdout)
        assert report["gemm"].endswith("(sse41)")


def test_doctor_without_python_says_so(tmp_path):
    # A copy in another folder has no interpreter beside it, and the search path is empty.
    copy = tmp_path / "deepwell"
    copy.write_bytes(find_program().read_bytes())
    copy.chmod(0o755)
    result = subprocess.run(
        [copy, "doctor", "--json"],
        env={"PATH": str(tmp_path), "LD_LIBRARY_PATH": str(ROOT / "build/release/lib")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    report = json.loads(result.stdout)
    assert report["python"] is None
    assert any("Python" in entry["what"] for entry in report["advice"])


def test_text_has_no_colours_outside_a_terminal():
    result = run("doctor")
    assert result.returncode == 0
    assert "\033" not in result.stdout
    assert "GEMM" in result.stdout


def test_manual_and_completion_name_every_command():
    manual = (ROOT / "docs/man/deepwell.1").read_text()
    completion = (ROOT / "cli/completion/deepwell.bash").read_text()
    assert commands()
    for command in commands():
        assert f".B {command}" in manual
        assert re.search(rf"\b{command}\b", completion)
