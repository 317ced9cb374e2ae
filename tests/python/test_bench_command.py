"""`deepwell bench`: its results, its exit statuses, its fronts, and the commands of its document. Small and quick: no
test depends on a time."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepwell import bench, bench_models

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "build/release/bin/deepwell"
QUICK = ["--device", "cpu", "--iterations", "2"]
STEP = ["--seq-len", "16", "--batch-size", "1", *QUICK]


def result_of(capsys, *arguments):
    assert bench.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check(result):
    for label in ("pytorch", "deepwell"):
        row = result[label]
        assert row["ms"] > 0 and row["efficiency"] is None  # a CPU's peak is not known
        assert row["peak_memory_bytes"] is None or row["peak_memory_bytes"] > 10**6
    ratio = result["pytorch"]["ms"] / result["deepwell"]["ms"]
    assert result["speedup"] == pytest.approx(ratio)


@pytest.mark.parametrize("kind", ["step", "memory"])
def test_step(capsys, kind):
    result = result_of(capsys, kind, "--model", "tiny", *STEP)
    check(result)
    row = result["deepwell"]
    assert row["tokens_per_s"] == pytest.approx(16 / (row["ms"] / 1e3))
    sizes = bench_models.sizes_of("tiny")
    assert row["tflops"] == pytest.approx(bench_models.step_flops(sizes, 1, 16) / row["ms"] / 1e9)
    # Four steps of AdamW from the same weights, in FP32 on both sides.
    assert result["accuracy"]["loss_difference"] < 1e-4


def test_gemm(capsys):
    result = result_of(capsys, "gemm", "--size", "24,40,64", "--precision", "mxfp8", *QUICK)
    check(result)
    assert "simulated: MXFP8" in result["deepwell"]["backend"]
    # E4M3 with a scale of its block: half a unit in the last place is 2^-4, for both operands.
    assert 0 < result["accuracy"]["relative_difference"] < 2 * 2**-4
    result = result_of(capsys, "gemm", "--size", "24,40,64", "--num-experts", "3", *QUICK)
    check(result)
    assert result["accuracy"]["relative_difference"] < 64 * 2**-23


def test_attention_and_text(capsys):
    arguments = ["attention", "--seq-len", "32", "--heads", "2", *QUICK]
    assert bench.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("attention on cpu: ") and "speedup" in text and "\033" not in text
    result = result_of(capsys, *arguments)
    check(result)
    assert result["accuracy"]["relative_difference"] < 1e-5


@pytest.fixture
def one_thread():
    """Small operations of two threads wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_moe(capsys, one_thread):
    result = result_of(capsys, "moe", "--num-experts", "4", "--hidden", "16", *STEP)
    check(result)
    assert result["num_experts"] == 4
    assert result["accuracy"]["relative_difference"] < 1e-5


@pytest.mark.parametrize("load", ["even", "skewed"])
def test_parts_of_a_mixture(capsys, load, one_thread):
    words = "--num-experts 8 --top-k 2 --hidden 16 --width 24 --capacity-factor 0.75 --tokens 64"
    arguments = ["moe", *words.split(), "--load", load, *QUICK]
    result = result_of(capsys, *arguments)
    check(result)
    rows = result["rows"]
    if load == "even":  # the capacity is 12, and each expert has about 16 of 128 choices
        assert rows["imbalance"] < 1.5 and rows["computed"] > 80
    else:
        assert rows["imbalance"] > 2.0 and rows["dropped"] > 0.25
    assert rows["most"] <= 12 and rows["computed"] <= 96
    assert rows["dropped"] == pytest.approx(1 - rows["computed"] / 128)
    # Two matrices of 48 x 16 and 16 x 24 for each row, three GEMMs of each; and the router.
    flops = 3 * 2 * 16 * (rows["computed"] * 3 * 24 + 64 * 8)
    assert result["deepwell"]["tflops"] == pytest.approx(flops / result["deepwell"]["ms"] / 1e9)
    assert len(result["products"]) == 6
    for name, product in result["products"].items():
        size = 2 * rows["computed"] * (48 * 16 if name.startswith("first") else 16 * 24)
        for label in ("pytorch", "deepwell"):
            row = product[label]
            assert row["tflops"] == pytest.approx(size / row["ms"] / 1e9)
        assert "torch.matmul" in product["deepwell"]["backend"]
        assert product["relative_difference"] < 48 * 2**-23
    assert set(result["parts"]["pytorch"]) == {"routing", "sort", "spread", "combine"}
    ours = result["parts"]["deepwell"]
    assert len(ours) == 8 and all(ms > 0 for ms in ours.values())
    assert any("grouped_mm" in why for why in result["not_run"])
    if load == "even":
        return
    assert bench.main(arguments) == 0
    text = capsys.readouterr().out
    assert "second, weight gradient" in text and "experts, data gradient" in text
    assert "not run: torch.nn.functional.grouped_mm" in text


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["gemm", "--size", "3,4"], 2, "3,4"),
        (["gemm", "--iterations", "0"], 2, "--iterations is 0"),
        (["step", "--model", "gpt2", "--seq-len", "2048"], 2, "1024 positions"),
        (["step", "--model", "nothing"], 1, "nothing"),
        (["step", "--model", "mixtral-8x7b"], 3, "mixture"),
        (["step", "--model", "llama3-405b"], 3, "deepwell plan"),
        (["attention", "--precision", "nvfp4"], 3, "nvfp4"),
        (["moe", "--tokens", "8", "--seq-len", "8"], 2, "one or the other"),
        (["moe", "--top-k", "9"], 2, "--num-experts, 8"),
        (["moe", "--capacity-factor", "-1"], 2, "--capacity-factor is -1"),
    ],
)
def test_exit_statuses(capsys, arguments, status, words):
    assert bench.main(["--device", "cpu", *arguments]) == status
    told = capsys.readouterr()
    assert words in told.err and told.out == ""


def test_models_have_the_counted_parameters():
    for name in ("tiny", "gpt2", "llama3-8b"):
        sizes = bench_models.sizes_of(name)
        with torch.device("meta"):
            model = bench_models.Decoder(sizes)
        assert sum(p.numel() for p in model.parameters()) == bench_models.parameter_count(sizes)


FRONTS = {
    "examples/automatic_optimization_prototype.py": ["step"],
    "benchmarks/blackwell_speedup.py": ["step"],
    "benchmarks/memory_test.py": ["memory"],
    "benchmarks/moe_benchmark.py": ["moe"],
    "benchmarks/comprehensive_benchmark.py": ["attention", "gemm", "gemm", "moe", "step"],
    "benchmarks/blackwell_cutlass_benchmark.py": ["gemm", "gemm", "gemm", "gemm", "step"],
}


@pytest.mark.parametrize("front", FRONTS)
def test_fronts(front, monkeypatch, capsys):
    """Each front runs its benchmarks with the documented options, here on a model of one layer."""
    seen = []
    run = bench.run

    def noted(arguments):
        options = bench.parser().parse_args(arguments)
        assert (options.model, options.precision, options.batch_size) == ("tiny", "mxfp8", 2)
        result = run(arguments)
        seen.append(options.kind)
        return result

    tiny = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 64, "vocabulary": 128}
    monkeypatch.setitem(bench_models._SMALL, "tiny", tiny)
    monkeypatch.setattr(bench, "run", noted)
    words = "--model tiny --precision mxfp8 --batch-size 2 --seq-len 16 --num-experts 2 --size 32,32,32 --iterations 1 --device cpu --json"
    monkeypatch.setattr(sys, "argv", [front, *words.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / front), run_name="__main__")
    told = capsys.readouterr()
    # MXFP8 is no precision of attention, nor of a mixture.
    ran = [kind for kind in FRONTS[front] if kind not in ("attention", "moe")]
    assert seen == ran and ended.value.code == (0 if ran else 3)
    assert ("moe" in FRONTS[front]) == ("moe in mxfp8 is not supported" in told.err)
    if front.startswith("examples"):
        ours, theirs = re.findall(r"losses: (.*)", told.out)
        values = [[float(x) for x in losses.split(", ")] for losses in (ours, theirs)]
        assert len(values[0]) == 4 and values[0] == pytest.approx(values[1], abs=1e-3)


def test_a_model_that_does_not_fit_is_refused(capsys):
    words = ["--model", "llama-70b", "--batch-size", "128", "--device", "cpu"]
    assert bench.main(["memory", *words]) == 3
    assert "llama-70b is not supported here: its training needs" in capsys.readouterr().err


def test_fronts_of_several_benchmarks_skip_what_is_not_supported(monkeypatch, capsys):
    statuses = iter([3, 0, 1, 3])
    monkeypatch.setattr(bench, "main", lambda arguments: next(statuses))
    assert bench.main_of_all([["moe"], ["gemm"], ["step"]], []) == 1
    assert bench.main_of_all([["moe"]], []) == 3
    assert "== moe" in capsys.readouterr().out


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program deepwell is not built: run make")
def test_the_program_runs_it(tmp_path):
    """The program finds this interpreter, passes arguments and exit statuses on, and says what is missing."""
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for arguments, status, path in (
        (["--size", "8,8,8", "--iterations", "1", "--json"], 0, python),
        (["--size", "8"], 2, python),
        ([], 3, str(tmp_path / "none")),
        (["--help"], 0, str(tmp_path / "none")),
    ):
        ended = subprocess.run(
            [PROGRAM, "bench", "gemm", *arguments],
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "python")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == status, ended.stderr
        if "--json" in arguments:
            assert json.loads(ended.stdout)["size"] == [8, 8, 8]
        elif status == 3:
            assert "bench needs Python with PyTorch" in ended.stderr


def test_the_document_runs(capsys):
    """Runs the commands of docs/bench.md; those of scripts only up to their options, which test_fronts runs."""
    text = (ROOT / "docs/bench.md").read_text()
    lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    assert len(lines) == 8
    for line in lines:
        words = shlex.split(line)
        if words[0] == "python":
            assert words[1] in FRONTS
            bench.parser().parse_args([FRONTS[words[1]][0], *words[2:]])
        else:
            assert words[:2] == ["deepwell", "bench"]
            assert bench.main([*words[2:], "--device", "cpu"]) == 0
    assert "speedup" in capsys.readouterr().out
