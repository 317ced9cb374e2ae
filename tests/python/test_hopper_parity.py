"""bench/hopper_parity.py spreads its runs over several GPUs and collects their records, without a GPU."""

import argparse
import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "bench" / "hopper_parity.py"
HEAD = '{"setup": 1}\n'


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("hopper_parity", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.sys, "argv", ["hopper_parity.py", "--gpus", "2"])
    return module


def record_of(folder: Path) -> list[str]:
    return (folder / "runs.jsonl").read_text().splitlines()


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.jsonl").write_text(text)


def test_records_are_collected(script, monkeypatch, tmp_path, capsys):
    """Of this call and of those before it, of a process that failed in the middle of a line and of one that did not, and
    none with other settings."""
    write(tmp_path, HEAD + '{"run": "a"}\n')
    write(tmp_path / "gpu1", HEAD + '{"run": "b"}\n')  # of a call that was interrupted
    write(tmp_path / "earlier", HEAD + '{"run": "c"}\n')
    starts = []

    class Process:
        def __init__(self, command, env):
            value = {command[i]: command[i + 1] for i in range(2, len(command) - 1)}
            reused = record_of(Path(value["--reuse"]))
            starts.append((env["CUDA_VISIBLE_DEVICES"], value["--only"], reused))
            self.failed = env["CUDA_VISIBLE_DEVICES"] == "0"
            ending = '{"run": "d"}\n{"ru' if self.failed else '{"run": "e"}\n'
            write(Path(value["--output"]), "\n".join(reused) + "\n" + ending)

        def wait(self):
            return -9 if self.failed else 0

    monkeypatch.setattr(script.subprocess, "Popen", Process)
    options = argparse.Namespace(
        output=tmp_path, reuse=tmp_path / "earlier", only="bf16:0,fp8:0", gpus=2, tokens=Path("t")
    )
    script.run_on_gpus(options)
    known = ['{"setup": 1}', '{"run": "a"}', '{"run": "b"}', '{"run": "c"}']
    assert starts == [("0", "bf16:0", known), ("1", "fp8:0", known)]
    assert record_of(tmp_path) == [*known, '{"run": "d"}', '{"run": "e"}']
    assert "gpu0 ended with -9" in capsys.readouterr().err
    write(tmp_path / "gpu0", '{"setup": 2}\n{"run": "f"}\n')
    script.merge_into(tmp_path, script.records_of_gpus(tmp_path))
    assert record_of(tmp_path) == [*known, '{"run": "d"}', '{"run": "e"}']
    assert "has other settings and is left out" in capsys.readouterr().err
