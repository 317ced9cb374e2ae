"""`deepwell-lab evaluate` and `deepwell-lab calibrate`: their output for a small table, and the
tables that they reject."""

import csv
import json
import subprocess
from pathlib import Path

import pytest

LAB = Path(__file__).parents[2] / "build" / "release" / "bin" / "deepwell-lab"
pytestmark = pytest.mark.skipif(not LAB.exists(), reason="deepwell-lab is not built: run make")

COLUMNS = (
    "id group tier model layers hidden ffn_hidden heads vocab seq_len global_batch_seqs micro_batch gpus gpu_type "
    "tp pp cp dp recompute precision tokens_per_s_per_gpu peak_mem_gb notes"
).split()


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([LAB, *arguments], capture_output=True, text=True, timeout=60)


def row(
    name: str, source: str, gpu: str, tp: int, micro: int, speed: float, **other: str
) -> dict[str, str]:
    values = dict(
        id=name, group=source, tier="A", model="GPT", layers=24, hidden=2048, ffn_hidden=8192, heads=16,
        vocab=51200, seq_len=2048, global_batch_seqs=64, micro_batch=micro, gpus=8, gpu_type=gpu, tp=tp, pp=1, cp=1,
        dp=8 // tp, recompute="none", precision="BF16", tokens_per_s_per_gpu=speed,
    )  # fmt: skip
    return {key: str(value) for key, value in (values | other).items()}


@pytest.fixture
def table(tmp_path):
    """The table has three sources, a layout that cannot be expressed, and a note with a comma and
    quotes."""
    rows = [
        row("a1", "a", "A100-80GB", 1, 1, 15000),
        row(
            "a2", "a", "A100-80GB", 2, 2, 13000, peak_mem_gb="30", notes='said "nvidia-smi", in GiB'
        ),
        row("b1", "b", "H100-80GB", 1, 2, 33000),
        row("b2", "b", "H100-80GB", 4, 2, 23000),
        row("c1", "c", "H200-141GB", 1, 2, 36000),
        row("c2", "c", "abacus", 1, 2, 1),
    ]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_evaluate_predicts_every_row_or_says_why_not(table):
    result = run("evaluate", str(table), "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert [entry["id"] for entry in report["rows"]] == ["a1", "a2", "b1", "b2", "c1"]
    assert [entry["id"] for entry in report["not_predicted"]] == ["c2"]
    assert "abacus" in report["not_predicted"][0]["reason"]
    for entry in report["rows"]:
        assert sum(entry["parts"].values()) == pytest.approx(entry["step_s"], rel=0.01)
        assert entry["predicted"] * entry["step_s"] == pytest.approx(64 * 2048 / 8, rel=1e-3)
        assert entry["error"] == pytest.approx(
            abs(entry["predicted"] / entry["measured"] - 1), abs=1e-3
        )
    assert report["errors"]["all"]["rows"] == 5
    assert report["errors"]["gpu"]["H100-80GB"]["rows"] == 2
    assert report["memory"]["a"]["meaning"] == "used"
    assert report["choice"]["published"]["tasks"] == 2
    text = run("evaluate", str(table)).stdout
    assert "5 rows predicted, 1 not" in text and "abacus" in text


def test_calibrated_constants_can_be_loaded(table, tmp_path):
    file = tmp_path / "constants.json"
    result = run("calibrate", str(table), "--write", str(file), "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["left_out"]["all"]["rows"] == report["fitted"]["all"]["rows"] == 5
    assert report["fitted"]["all"]["median"] <= report["baseline"]["all"]["median"]
    again = run("evaluate", str(table), "--constants", str(file), "--json")
    errors = json.loads(again.stdout)["errors"]["all"]
    assert errors["median"] == pytest.approx(report["fitted"]["all"]["median"], abs=1e-3)


def test_table_without_runs_is_rejected(tmp_path):
    """A file without the columns of a run, and one whose rows all lack values, end with status 1."""
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    for command in ("evaluate", "calibrate"):
        result = run(command, str(other))
        assert result.returncode == 1 and result.stdout == ""
        assert '"layers"' in result.stderr and "gpu_type" in result.stderr
    empty = tmp_path / "empty.csv"
    with empty.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow(row("a1", "a", "abacus", 1, 1, 15000))
    result = run("evaluate", str(empty))
    assert result.returncode == 1
    assert "0 rows predicted, 1 not" in result.stdout and "abacus" in result.stdout
    assert "median" not in result.stdout  # without runs there are no errors
    result = run("evaluate", str(empty), "--json")
    assert result.returncode == 1 and json.loads(result.stdout)["rows"] == []


def test_wrong_usage_and_wrong_files(table, tmp_path):
    assert run("evaluate").returncode == 2
    assert run("evaluate", str(table), "--failures").returncode == 2
    missing = run("evaluate", str(tmp_path / "missing.csv"))
    assert missing.returncode == 1 and "missing.csv" in missing.stderr
    broken = tmp_path / "broken.csv"
    broken.write_text('a,b\n1,"2')
    result = run("evaluate", str(broken))
    assert result.returncode == 1 and "line 2" in result.stderr
    constants = tmp_path / "constants.json"
    constants.write_text('{"constants": {"speed_of_light": 3e8}}')
    result = run("evaluate", str(table), "--constants", str(constants))
    assert result.returncode == 1 and "speed_of_light" in result.stderr
    few = run("calibrate", str(broken))
    assert few.returncode == 1
