"""docs/recipes.md: its commands print what the page shows. `python tests/python/test_recipes.py` writes it anew."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import train_runs
from page_blocks import run_command
from test_program import ROOT

PAGE = ROOT / "docs/recipes.md"


def shown(block: str, folder: Path) -> str:
    """Returns the block of commands with what they print now, but for the line with the time of the search."""
    made = ""
    for line in re.findall(r"^\$ (.*)$", block, re.M):
        ended = run_command(line, folder)
        assert ended.returncode == 0, (line, ended.stderr)
        lines = [each.rstrip() for each in ended.stdout.rstrip().splitlines()]
        made += "\n".join([f"$ {line}", *(x for x in lines if not x.startswith("Searched"))]) + "\n"
    return made


def renewed(page: str, folder: Path) -> str:
    def replace(match: re.Match) -> str:
        return f"```console\n{shown(match[1], folder)}```"

    return re.sub(r"^```console\n(.*?)^```", replace, page, flags=re.M | re.S)


def test_the_commands_print_what_the_page_shows(tmp_path, monkeypatch, capsys):
    page = PAGE.read_text()
    assert page.count("```console\n") == 5
    now = renewed(page, tmp_path)
    assert now == page, "run `python tests/python/test_recipes.py`, and read what has changed"
    for file in ("llama3-70b.html", "llama3-70b-trace.json", "mixtral.html"):
        assert (tmp_path / file).stat().st_size > 0
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "--global-batch-size 512" in printed and "--expert-model-parallel-size" in printed
    layout = names["dw"].Plan.load("llama3-70b.json").layout
    assert f"--tensor-model-parallel-size {layout.tp}" in printed or layout.tp == 1


@pytest.mark.slow  # test_trainer_checkpoints.py changes the ranks of a sharded run
def test_sharded_training_in_two_processes(tmp_path):
    """The page's last command, and the same run again on one process, which goes on."""
    train_runs.save_model(tmp_path / "model", "llama")
    train_runs.save_tokens(tmp_path / "train.bin", train_runs.random_tokens(2000))
    for processes, steps in ((2, 3), (1, 4)):
        words = f"--nproc-per-node {processes} {ROOT}/examples/train_sharded.py --model model --data train.bin"
        words += f" --sequence 16 --batch 8 --accumulate 2 --steps {steps} --checkpoint sharded"
        ended = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *words.split()],
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        assert (tmp_path / f"sharded/step-{steps:012}/manifest.json").exists()
    assert "resumed from" in ended.stdout and train_runs.load_model(
        tmp_path / "sharded/step-000000000004"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(renewed(PAGE.read_text(), Path(folder)))
