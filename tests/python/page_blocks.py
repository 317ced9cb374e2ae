"""Runs the blocks of a document in their order, as a reader pastes them: Python in one namespace, commands in a folder."""

import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

from test_program import ROOT, find_program


def run_command(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of a document: the program of this build, or `python`, which is this interpreter."""
    words = shlex.split(line)
    programs = {"deepwell": str(find_program()), "python": sys.executable}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [programs[words[0]], *words[1:]],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "python"), "NO_COLOR": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_page(page: Path, folder: Path, namespace: dict) -> list[str]:
    """Runs the page's ```python and ```console blocks. Returns what the commands printed, one text for each."""
    printed = []
    for kind, block in re.findall(
        r"^```(python|console)\n(.*?)^```", page.read_text(), re.M | re.S
    ):
        if kind == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(block, str(page), "exec"), namespace)
            continue
        for line in re.findall(r"^\$ (.*)$", block, re.M):
            ended = run_command(line, folder)
            assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
            printed.append(ended.stdout)
    return printed
