"""`deepwell parity` and deepwell.parity: what is compared, the verdict, kept runs, messages. Models are tiny: their losses
show that the parts work together, not that a format trains well."""

import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import deepwell
import pytest
import torch
import train_runs
import transformers
from deepwell import parity_command
from program import PROGRAM

ROOT = Path(__file__).parents[2]
SMALL = {"sequence": 16, "batch": 8, "lr": 1e-2, "progress": False}
STEPS = 20


def small_model():
    config = train_runs.config("gpt2")
    config.n_layer, config.use_cache = 1, False
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, token files and a policy."""
    place = tmp_path_factory.mktemp("parity")
    torch.manual_seed(0)
    small_model().save_pretrained(place / "model")
    train_runs.save_tokens(place / "tokens.bin", train_runs.random_tokens(3000))
    deepwell.PrecisionPolicy("mxfp8").save(place / "policy.json")
    return place


@pytest.fixture(scope="module")
def compared(place):
    """The precisions, and BF16 under another name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPWELL_MEASURE", "0")
        return deepwell.parity(
            small_model,
            [place / "tokens.bin"],
            {**{name: name for name in ("fp8", "mxfp8", "nvfp4")}, "again": "bf16"},
            STEPS,
            2,
            output=place / "out",
            **SMALL,
        )


@pytest.mark.slow
def test_runs_have_equal_weights_and_data(compared):
    """BF16 again has the same losses bit for bit. Rounding operands alone changes the first loss by little, and the
    second seed has other weights."""
    reference = compared.of("bf16")
    assert [run.seed for run in reference] == [0, 1]
    assert compared.of("again")[0].losses == reference[0].losses
    for name, most in (("fp8", 2e-3), ("mxfp8", 2e-3), ("nvfp4", 1e-2)):
        (run,) = compared.of(name)
        assert len(run.losses) == STEPS and run.losses != reference[0].losses
        assert run.losses[0] == pytest.approx(reference[0].losses[0], rel=most)
        assert run.losses[-1] < 0.95 * run.losses[0]  # it learns
    assert reference[1].losses[0] != reference[0].losses[0]


def test_verdict(compared):
    """Gap, noise, perplexity and verdict, computed here once more from the losses of the runs."""
    losses = [run.held_out[-1][1] for run in compared.of("bf16")]
    assert compared.noise == pytest.approx(statistics.stdev(losses) / statistics.mean(losses))
    bars = {"fp8": 0.0025, "mxfp8": 0.0025, "nvfp4": 0.015, "again": 0.0025}
    rows = {row.precision: row for row in compared.rows}
    assert list(rows) == ["bf16", *bars]
    assert rows["bf16"].loss == pytest.approx(statistics.mean(losses))
    for name, bar in bars.items():
        row, (run,) = rows[name], compared.of(name)
        assert row.bar == bar and row.loss == run.held_out[-1][1]
        assert row.gap == pytest.approx(row.loss / losses[0] - 1)
        assert row.perplexity == pytest.approx(math.exp(row.loss))
        assert row.verdict == ("within" if abs(row.gap) <= bar else "apart")
    assert rows["again"].gap == 0.0
    written = json.loads(compared.to_json())
    assert written["precisions"][1]["gap"] == rows["fp8"].gap
    assert "standard deviation of the BF16 loss over 2 seeds" in str(compared)


def test_bars(compared):
    """A bar below every gap makes all but BF16 again apart, and one above them none."""
    module = sys.modules["deepwell.parity"]
    names = ["fp8", "mxfp8", "nvfp4"]
    for bar, verdict, status in ((1e-9, "apart", 1), (1.0, "within", 0)):
        variants = module.variants_of({**{name: name for name in names}, "again": "bf16"}, bar)
        result = module.ParityResult(compared.setup, variants, compared.runs, {})
        assert (result.verdict, result.exit_status) == (verdict, status)
        assert [row.verdict for row in result.rows] == ["", *[verdict] * 3, "within"]
        assert re.search(rf"nvfp4 .* {bar:.2%} .* {verdict}", str(result))
        assert f"Verdict: <b>{verdict}</b>" in result.html()
    four = {"mxfp4": 0.015, "nvfp4": 0.015, "mxfp6": 0.0025, "fp8": 0.0025}
    assert {v.name: v.bar for v in module.variants_of(list(four))[1:]} == four
    mixed = deepwell.PrecisionPolicy("fp8", layers={"*.mlp.*": "mxfp4"})
    assert module.variants_of({"mixed": mixed})[1].bar == 0.015


def test_page_and_picture(compared, place, monkeypatch):
    page = (place / "out" / "parity.html").read_text()
    assert page == compared.html() and page.count("<polyline") == 6 + 4
    assert "http" not in page
    assert json.loads((place / "out" / "parity.json").read_text()) == json.loads(compared.to_json())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(deepwell.UnsupportedError, match="pip install matplotlib"):
        compared.png(place / "picture.png")


def test_picture(compared, tmp_path):
    pytest.importorskip("matplotlib")
    compared.png(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def again(place, compared, monkeypatch, precisions="fp8", **changed):
    """Asks for runs of the folder. Returns the result and the runs that were made."""
    made = []

    def train(self, variant, seed):
        made.append(f"{variant.name}:{seed}")
        return deepwell.parity_run_of_test(variant, seed)

    known = {run.seed: run for run in compared.of("bf16")}

    def copy_of(variant, seed):
        fields = {**vars(known[0]), "precision": variant.name, "seed": seed}
        fields["policy"] = sys.modules["deepwell.parity"]._text(variant.policy)
        return type(known[0])(**fields)

    monkeypatch.setattr(deepwell, "parity_run_of_test", copy_of, raising=False)
    monkeypatch.setattr(sys.modules["deepwell.parity"].Comparison, "_train", train)
    seeds = changed.pop("seeds", 2)
    settings = {**SMALL, "output": place, **changed}
    data = place.parent / "tokens.bin"
    return deepwell.parity(small_model, [data], precisions, STEPS, seeds, **settings), made


@pytest.fixture
def kept(compared, place):
    """A copy of the record, which a test may change."""
    folder = place / "copy"
    folder.mkdir(exist_ok=True)
    (folder / "runs.jsonl").write_text((place / "out" / "runs.jsonl").read_text())
    return folder


def test_finished_runs_are_reused(kept, compared, monkeypatch):
    result, made = again(kept, compared, monkeypatch, ["fp8", "nvfp4"])
    assert made == [] and result.of("fp8")[0].losses == compared.of("fp8")[0].losses
    policy = deepwell.PrecisionPolicy("fp8", bf16_share=0.5)
    _, made = again(kept, compared, monkeypatch, {"fp8": policy}, seeds=3)
    assert made == ["fp8:0", "bf16:2"]  # another policy of the same name, another seed
    _, made = again(kept, compared, monkeypatch, fresh=True)
    assert made == ["bf16:0", "fp8:0", "bf16:1"]


def test_records_that_do_not_fit(kept, compared, monkeypatch):
    record = kept / "runs.jsonl"
    with pytest.raises(deepwell.DeepwellError, match=r"settings.lr was 0.01 and is 0.02.*--fresh"):
        again(kept, compared, monkeypatch, lr=2e-2)
    whole = record.read_text()
    record.write_text(whole[:-7])  # killed while it wrote the last run
    _, made = again(kept, compared, monkeypatch)
    assert made == ["bf16:1"] and record.read_text().endswith("\n")
    record.write_text(whole.replace('"losses"', '"lost"', 1))
    with pytest.raises(deepwell.DeepwellError, match=r"runs.jsonl, line 2: not a run"):
        again(kept, compared, monkeypatch)
    record.write_text("{}\n")
    with pytest.raises(deepwell.DeepwellError, match="not a record"):
        again(kept, compared, monkeypatch)


def test_divergence(place):
    """Losses that become infinite: behind the BF16 run, then in it."""
    calls = []

    def loss_fn(model, batch):
        calls.append(model.training)
        bad = calls.count(True) > good
        return model(**batch).loss * (math.inf if bad else 1.0)

    arguments = (small_model, place / "tokens.bin", ["mxfp8"], 3)
    good = 3
    result = deepwell.parity(*arguments, loss_fn=loss_fn, **SMALL)
    assert (result.rows[1].verdict, result.exit_status) == ("diverged", 1)
    assert "diverged" in result.rows[1].why and result.rows[1].why in result.html()
    json.loads(result.to_json(), parse_constant=lambda name: pytest.fail(name))
    calls.clear()
    good = 1
    with pytest.raises(deepwell.DeepwellError, match="the BF16 run of seed 0 diverged"):
        deepwell.parity(*arguments, loss_fn=loss_fn, **SMALL)


def test_unsupported(place, monkeypatch, capsys):
    real = deepwell.optimize

    def refuses(model, precision="auto", **options):
        if precision != "auto":
            assert precision.fallback == "strict"  # otherwise BF16 would be compared with itself
            raise deepwell.UnsupportedError("this GPU is not supported")
        return real(model, precision=precision, **options)

    monkeypatch.setattr(deepwell, "optimize", refuses)
    monkeypatch.chdir(place)
    command = (
        "--model model --data tokens.bin --precision mxfp8 --steps 2 --sequence 16 --output none"
    )
    assert parity_command.main(command.split()) == 3
    assert "mxfp8: this GPU is not supported" in capsys.readouterr().out


COMMAND = "--model model --data tokens.bin --precision mxfp8 --steps 2 --sequence 16 --output bad"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("--precision mxfp9", 2, "no precision 'mxfp9'"),
        ("--precision bf16", 2, "no precision to compare"),
        ("--precision policy.json,./policy.json", 2, "two precisions are called 'policy'"),
        ("--precision none.json", 1, "none.json"),
        ("--precision broken.json", 2, "broken.json: "),
        ("--steps 0", 2, "steps is 0"),
        ("--seeds 0", 2, "seeds is 0"),
        ("--batch 3 --micro-batch 2", 2, "--micro-batch is 2"),
        ("--sequence 30", 2, "the model has 24 positions"),
        ("--data nothing.bin", 1, "nothing.bin"),
        ("--data words.txt", 3, "words.txt"),
        ("--batch 500", 1, "a batch needs 500 of both"),
        ("--model gpt9", 1, "gpt9"),
        ("--model mixtral-8x7b", 3, "mixtral"),
        ("--device cuda", 3, "finds no GPU"),
    ],
)
def test_messages(place, monkeypatch, capsys, arguments, status, words):
    monkeypatch.chdir(place)
    (place / "words.txt").write_text("words " * 100)
    (place / "broken.json").write_text('{"format": "deepwell.precision", "version": 1}')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parity_command.main(COMMAND.split() + arguments.split()) == status
    told = capsys.readouterr()
    assert words in told.err and told.out == "" and told.err.count("\n") <= 2


@pytest.mark.slow
def test_models_and_data(place, monkeypatch, capsys):
    """A folder's weights and a module's, a name's sizes, batches with held-out ones; JSON of the command."""
    monkeypatch.chdir(place)
    parity = sys.modules["deepwell.parity"]
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    weights = model.state_dict()["transformer.wte.weight"].clone()
    source = parity._model_source("model", init=False, no_dropout=False)
    assert torch.equal(source.make(5).state_dict()["transformer.wte.weight"], weights)
    source = parity._model_source("model", init=True, no_dropout=False)
    drawn = [source.make(seed).state_dict()["transformer.wte.weight"] for seed in (5, 5, 6)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    source = parity._model_source("gpt2", init=False, no_dropout=True)
    with torch.device("meta"):
        made = source.make(0)
    assert sum(p.numel() for p in made.parameters()) == 124439808
    assert made.config.resid_pdrop == made.config.attn_pdrop == 0.0
    rows = torch.randint(0, train_runs.VOCABULARY, (6, 4, 8))
    batches = [{"input_ids": row, "labels": row} for row in rows]
    with pytest.raises(ValueError, match="held_out is missing"):
        deepwell.parity(model, batches, ["fp8"], 2, progress=False)
    result = deepwell.parity(model, batches[:4], ["fp8"], 2, held_out=batches[4:], progress=False)
    assert result.rows[1].gap is not None and result.noise is None
    assert torch.equal(model.transformer.wte.weight, weights)  # runs train copies
    command = f"{COMMAND} --bar 100 --json".replace("bad", "good")
    assert parity_command.main(command.split()) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "within"


def test_policies():
    """The files of examples/policies, and the parts of the NVFP4 recipe that they name."""
    folder = ROOT / "examples" / "policies"
    made = {path.stem: deepwell.PrecisionPolicy.load(path) for path in folder.glob("*.json")}
    parts = ("all-layers", "nearest", "plain", "recipe", "rows", "unrotated")
    assert sorted(made) == ["mxfp8-floor", "mxfp8-rceil", *(f"nvfp4-{part}" for part in parts)]
    assert made["nvfp4-recipe"] == deepwell.PrecisionPolicy("nvfp4")
    assert made["mxfp8-rceil"] == deepwell.PrecisionPolicy("mxfp8")
    assert made["mxfp8-floor"].microscaling.scale_rule == "floor"
    assert set(made["nvfp4-plain"].default_compute.values()) == {"nvfp4"}
    assert made["nvfp4-plain"].bf16_share == 0.0
    recipe = json.loads((folder / "nvfp4-recipe.json").read_text())["default"]
    for name, part in (("rows", "+square"), ("unrotated", "+hadamard"), ("nearest", "+stochastic")):
        without = {operand: scheme.replace(part, "") for operand, scheme in recipe.items()}
        assert made[f"nvfp4-{name}"].default_compute == without != recipe
        assert made[f"nvfp4-{name}"].bf16_share == 0.15
    assert made["nvfp4-all-layers"].default_compute == deepwell.Precision.NVFP4
    assert made["nvfp4-all-layers"].bf16_share == 0.0


def test_the_page(place, monkeypatch):
    """Runs the commands and the code of docs/parity.md, on a small model."""
    page = (ROOT / "docs" / "parity.md").read_text()
    (commands,) = re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(place)
    for line in commands.splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "deepwell" and words[0] == "parity"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ran = subprocess.run(
            [PROGRAM, *words],
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "python")},
            capture_output=True,
            text=True,
        )
        assert ran.returncode in (0, 1), ran.stderr
        assert ran.stdout.startswith("precision") and "parity.html has the curves" in ran.stdout
    names = {"dw": deepwell, "make_model": small_model}
    for block in blocks:
        exec(block, names)
    assert names["result"].verdict in ("within", "apart")
