"""``deepwell.checkpoints`` and `deepwell reshard`: to torch.distributed.checkpoint and back, on any number of ranks."""

import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import deepwell
import pytest
import reshard_runs
import torch
import torch.distributed.checkpoint as dcp
import train_runs
from deepwell import _deepwell, checkpoints, reshard_command
from program import run
from safetensors.torch import load_file, save_file


def start(*arguments: object) -> str:
    words = [sys.executable, Path(__file__).with_name("reshard_runs.py"), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    return done.stdout


def trainer(**options) -> deepwell.Trainer:
    options = {"steps": 3, "optimize": False, "progress": False, "lr": 1e-2, **options}
    model = options.pop("model", None) or reshard_runs.model()
    return deepwell.Trainer(model, options.pop("data", None) or reshard_runs.batches(), **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of a model whose head is its embedding."""
    folder = tmp_path_factory.mktemp("saved") / "ck"
    made = trainer()
    made.fit()
    made.save(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(saved) -> Path:
    folder = saved.parent / "sharded"
    found = checkpoints.to_distributed(saved, folder)
    assert found.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert not found.dropped and found.step == 3
    return folder


def optimizer_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "optimizer.safetensors")


def same(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, each in wanted.items():
        assert ours[name].dtype == each.dtype, name
        assert torch.equal(ours[name], each), name


def check_whole(folder: Path, wanted: dict) -> None:
    """A checkpoint of Deepwell against the state dicts that a run gathered."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    same(weights, wanted["model"])
    averages = {
        f"{kind}.{name}": each
        for name, state in wanted["optim"]["state"].items()
        for kind, each in state.items()
        if each.dim() > 0
    }
    same(optimizer_of(folder), averages)


# ---- bits ------------------------------------------------------------------------------------------


def test_there_and_back_gives_the_same_files(saved, sharded, tmp_path):
    found = checkpoints.from_distributed(sharded, tmp_path / "back")
    assert reshard_runs.bytes_of(tmp_path / "back") == reshard_runs.bytes_of(saved)
    sizes = [
        each.nbytes for path in saved.glob("*.safetensors") for each in load_file(path).values()
    ]
    assert (found.tensors, found.bytes) == (len(sizes), sum(sizes))


def test_a_tied_tensor_is_written_once(saved, sharded):
    data = (sharded / "__0_0.distcp").stat().st_size
    embedding = reshard_runs.VOCABULARY * 24 * 4
    tensors = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    numbers = 200 * 2048  # PyTorch's framing of each entry
    assert data < tensors + numbers
    state = {"model.lm_head.weight": torch.empty(reshard_runs.VOCABULARY, 24)}
    dcp.load(state, checkpoint_id=sharded)
    wanted = load_file(saved / "model.safetensors")["transformer.wte.weight"]
    assert wanted.nbytes == embedding and torch.equal(state["model.lm_head.weight"], wanted)


def test_memory_holds_few_tensors(tmp_path):
    """36 tensors of 8 MiB: 288 MiB, of which the limit on the process leaves room for less than a half."""
    (tmp_path / "hf").mkdir()
    save_file(
        {f"t{i}": torch.full((2, 1 << 20), float(i)) for i in range(36)}, tmp_path / "hf" / "model.safetensors"
    )  # fmt: skip
    (tmp_path / "hf" / "config.json").write_text("{}")
    start("limited", tmp_path / "hf", tmp_path / "dcp", tmp_path / "back", 140 << 20)
    same(
        load_file(tmp_path / "back" / "model.safetensors"),
        load_file(tmp_path / "hf" / "model.safetensors"),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_element_types(dtype, tmp_path):
    state = {
        "w": torch.randn(3, 5, 7).to(dtype),
        "empty": torch.empty(0, 4),
        "count": torch.tensor(9),
    }
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    checkpoints.to_distributed(tmp_path / "hf", tmp_path / "dcp")
    found = checkpoints.from_distributed(tmp_path / "dcp", tmp_path / "back")
    same(load_file(tmp_path / "back" / "model.safetensors"), state)
    assert found.step == 0 and not (tmp_path / "back" / "manifest.json").exists()


def test_a_checkpoint_of_deepwell_train(tmp_path):
    """One count for all parameters and no trainer.json: the groups are those that the command has."""
    model = train_runs.save_model(tmp_path / "model", "llama")
    tokens = train_runs.save_tokens(tmp_path / "tokens.bin", train_runs.random_tokens(2000))
    train_runs.run(
        "--model", model, "--data", tokens, "--steps", 2, "--sequence", 16, "--batch", 2, "--checkpoint", tmp_path / "ck",
        "--token-type", "uint16",
    )  # fmt: skip
    (saved,) = (tmp_path / "ck").glob("step-*")
    checkpoints.to_distributed(saved, tmp_path / "dcp")
    checkpoints.from_distributed(tmp_path / "dcp", tmp_path / "back")
    assert reshard_runs.bytes_of(tmp_path / "back") == reshard_runs.bytes_of(saved)
    loaded = train_runs.load_model(model)
    updates = reshard_runs.optimizer(loaded)
    reshard_runs.load(tmp_path / "dcp", loaded, updates, flat=False)
    same(
        {n: each for n, each in loaded.state_dict().items()}, load_file(saved / "model.safetensors")
    )
    averages = optimizer_of(saved)
    for name, param in loaded.named_parameters():
        assert torch.equal(updates.state[param]["exp_avg"], averages[f"exp_avg.{name}"])
        assert updates.state[param]["step"] == 2
    options = json.loads((saved / "manifest.json").read_text())["options"]
    assert [group["weight_decay"] for group in updates.param_groups] == [options["weight_decay"], 0]
    assert updates.param_groups[0]["betas"] == (options["beta1"], options["beta2"])


def test_checkpoints_of_the_version_before(saved, sharded, tmp_path):
    """Their trainer.json does not name the parameters of each group."""
    older = copied(saved, tmp_path / "older", "manifest.json")
    trainer = json.loads((older / "trainer.json").read_text())
    for group in trainer["optimizer"]["groups"]:
        group.pop("params")
    trainer.pop("tied")
    (older / "trainer.json").write_text(json.dumps(trainer))
    manifest = json.loads((saved / "manifest.json").read_text())
    run_of = json.dumps({key: manifest[key] for key in ("random", "options", "data")})
    _deepwell.checkpoint_seal(older, run_of, manifest["step"], manifest["updates"], 3)
    checkpoints.to_distributed(older, tmp_path / "dcp")
    models = []
    for folder in (sharded, tmp_path / "dcp"):
        model = reshard_runs.model()
        updates = reshard_runs.optimizer(model)
        reshard_runs.load(folder, model, updates, flat=False)
        models.append((model, updates))
    for one, other in zip(models[0][0].parameters(), models[1][0].parameters()):
        assert torch.equal(one, other)
        same(models[0][1].state[one], models[1][1].state[other])
    trainer["optimizer"]["groups"].append(trainer["optimizer"]["groups"][0])
    (older / "trainer.json").write_text(json.dumps(trainer))
    (older / "manifest.json").unlink()
    _deepwell.checkpoint_seal(older, run_of, manifest["step"], manifest["updates"], 3)
    with pytest.raises(deepwell.UnsupportedError, match="resume it once with this version"):
        checkpoints.to_distributed(older, tmp_path / "dcp")


def test_muon_and_states_in_eight_bits(tmp_path):
    for name, make in (
        ("muon", lambda model: deepwell.Muon(model, lr=1e-3)),
        ("8bit", lambda model: deepwell.AdamW(model.parameters(), lr=1e-3, state_dtype="8bit")),
    ):
        model = reshard_runs.model()
        made = trainer(model=model, optimizer=make(model), steps=2, lr=None)
        made.fit()
        made.save(tmp_path / name)
        checkpoints.to_distributed(tmp_path / name, tmp_path / f"{name} dcp")
        checkpoints.from_distributed(tmp_path / f"{name} dcp", tmp_path / f"{name} back")
        ours, wanted = tmp_path / f"{name} back", tmp_path / name
        assert reshard_runs.bytes_of(ours) == reshard_runs.bytes_of(wanted)


# ---- ranks -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_folders_of_other_numbers_of_ranks(saved, sharded, tmp_path):
    """One process to two ranks, theirs to a checkpoint, that to three ranks, whose groups have flat names."""
    one, flat, last = json.loads(start("ranks", saved, sharded, tmp_path))
    two, three = torch.load(tmp_path / "two.pt"), torch.load(tmp_path / "three.pt")
    check_whole(saved, two["before"])
    check_whole(tmp_path / "one", two["after"])
    check_whole(tmp_path / "one", three["before"])
    check_whole(tmp_path / "last", three["after"])
    assert len(list((tmp_path / "two").glob("*.distcp"))) == 2
    assert one["step"] == 4 and one["dropped"] == ["odd"]
    assert sorted(one["kept"]) == sorted(flat["kept"]) == ["run.name", "run.tokens", "seen"]
    assert one["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    assert last["step"] == 70
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"config.json", "extra.json", "extra.safetensors", "manifest.json"} <= names
    kept = json.loads((tmp_path / "one" / "trainer.json").read_text())["optimizer"]
    assert [group["lr"] for group in kept["groups"]] == [1e-2, 1e-2]
    state = {"seen": torch.zeros(5, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=tmp_path / "flat")
    assert torch.equal(state["seen"], torch.arange(5))
    # A run of another program's checkpoint: its weights, its averages and its count, and the data from their beginning.
    resumed = trainer(resume=tmp_path / "one", steps=5)
    with pytest.warns(UserWarning, match="begins anew"):
        resumed.fit()
    assert resumed.step == 5 and resumed.updates == 5
    artifact = deepwell.export(tmp_path / "one", tmp_path / "model.engine")
    assert artifact.config["model_type"] == "gpt2"


def test_entries_with_the_names_of_model_and_optimizer(saved, tmp_path):
    """Another program calls its model "net" and has other things under "model" and "optim". They take nobody's place, and
    come back with their names."""
    model = reshard_runs.model()
    updates = reshard_runs.optimizer(model)
    for batch in reshard_runs.batches(1):
        model(**batch).loss.backward()
        updates.step()
    whole = reshard_runs.whole(model, updates)
    ema = torch.arange(6, dtype=torch.float32).view(2, 3)
    odd = {"model": "gpt2", "optim": [1, 2], "extra.x": 5, "model.ema": ema, "optim.ema": ema + 1}
    state = {"net": whole["model"], "opt": whole["optim"], **odd}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    first, back = tmp_path / "first", tmp_path / "back"
    made = checkpoints.from_distributed(tmp_path / "theirs", first, like=saved, model_key="net")
    assert sorted(made.kept) == sorted(odd) and not made.dropped
    checkpoints.to_distributed(first, tmp_path / "ours")
    loaded = {"model": dict.fromkeys(whole["model"]), "extra.model": "", "extra.model.ema": ema * 0}
    loaded["model"] = {name: torch.zeros_like(each) for name, each in whole["model"].items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "ours", no_dist=True)
    same(loaded["model"], whole["model"])
    assert loaded["extra.model"] == "gpt2" and torch.equal(loaded["extra.model.ema"], ema)
    again = checkpoints.from_distributed(tmp_path / "ours", back)
    assert sorted(again.kept) == sorted(odd)
    assert reshard_runs.bytes_of(back) == reshard_runs.bytes_of(first)
    assert json.loads((back / "extra.json").read_text()) == {
        name: value for name, value in odd.items() if not isinstance(value, torch.Tensor)
    }
    same(load_file(back / "extra.safetensors"), {"model.ema": ema, "optim.ema": ema + 1})


def test_a_guard_and_losses_stay_in_the_manifest(saved, tmp_path):
    """A run that resumes from a converted checkpoint has the limits for spikes and the fallbacks of before."""
    folder = copied(saved, tmp_path / "run", "manifest.json")
    kept = json.loads((saved / "manifest.json").read_text())
    state = {
        "losses": [[3, 2.5], [4, 2.25]],
        "precision_changes": [{"from_step": 4, "layer": "h"}],
        "precision_failed": {"h": 2},
    }
    run = {key: kept[key] for key in ("random", "options", "data")}
    counts = kept["step"], kept["updates"], kept["schedule_steps"]
    _deepwell.checkpoint_seal(folder, json.dumps({**run, **state}), *counts)
    checkpoints.to_distributed(folder, tmp_path / "dcp")
    checkpoints.from_distributed(tmp_path / "dcp", tmp_path / "back")
    for name in ("dcp", "back"):
        found = json.loads((tmp_path / name / "manifest.json").read_text())
        assert {key: found[key] for key in state} == state
    assert reshard_runs.bytes_of(tmp_path / "back") == reshard_runs.bytes_of(folder)


def test_trainer_resumes_from_a_sharded_folder(saved, sharded, tmp_path):
    results = []
    for folder in (saved, sharded):
        made = trainer(resume=folder, steps=6)
        made.fit()
        made.save(tmp_path / f"from {folder.name}")
        results.append(reshard_runs.bytes_of(tmp_path / f"from {folder.name}"))
    assert results[0] == results[1]


# ---- what goes wrong -------------------------------------------------------------------------------


def copied(folder: Path, to: Path, *left_out: str) -> Path:
    return Path(shutil.copytree(folder, to, ignore=lambda *_: left_out))


def test_folders_that_are_damaged(saved, sharded, tmp_path):
    loose = copied(sharded, tmp_path / "loose", "manifest.json", "trainer.json")
    (data,) = loose.glob("*.distcp")

    def fails(words: str, folder: Path = loose, **options) -> None:
        with pytest.raises(deepwell.DeepwellError, match=words):
            checkpoints.from_distributed(folder, tmp_path / "out", **options)
        assert not list(tmp_path.glob("out*"))

    content = data.read_bytes()
    data.write_bytes(content[:-1])
    fails("distcp.* has [0-9]+ bytes, but .metadata expects at least")
    data.write_bytes(bytes(len(content)))
    fails("cannot read")
    data.unlink()
    fails("distcp.* is missing")
    metadata = (loose / ".metadata").read_bytes()
    (loose / ".metadata").write_bytes(metadata[:-9])
    fails("damaged")
    (loose / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    fails("not metadata")
    (loose / ".metadata").unlink()
    fails("no file .metadata")
    fails("there is no folder", tmp_path / "none")
    changed = copied(sharded, tmp_path / "changed")
    (data,) = changed.glob("*.distcp")
    data.write_bytes(content[:-5] + b"x" + content[-4:])
    fails("not what was written.*another program has saved", changed)
    loose = copied(sharded, tmp_path / "no config", "manifest.json", "config.json")
    fails("has no config.json; give like", loose)
    other = train_runs.save_model(tmp_path / "llama", "llama")
    fails("different models", loose, like=other)
    (other / "model.safetensors").write_bytes(b"damaged")
    fails("model.safetensors", loose, like=other)
    fails("step is 2, but the optimizer has counted 3", loose, like=saved, step=2)
    fails("no tensors below", loose, like=saved, model_key="wrong")


class Runs:
    """Makes a folder when it is read by a program that runs what files name."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_metadata_run_no_code(sharded, tmp_path):
    loose = copied(sharded, tmp_path / "loose", "manifest.json")
    (loose / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "was-run")))
    with pytest.raises(deepwell.DeepwellError, match="names .*mkdir"):
        checkpoints.from_distributed(loose, tmp_path / "out")
    assert not (tmp_path / "was-run").exists()
    state = {"model": {"w": torch.zeros(2)}, "bad": Runs(tmp_path / "was-run")}
    dcp.save(state, checkpoint_id=tmp_path / "value")
    (tmp_path / "value" / "config.json").write_text("{}")
    assert checkpoints.from_distributed(tmp_path / "value", tmp_path / "out").dropped == ["bad"]
    assert not (tmp_path / "was-run").exists()


def test_folders_that_cannot_be_converted(saved, sharded, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    for convert, folder in (
        (checkpoints.to_distributed, saved),
        (checkpoints.from_distributed, sharded),
    ):
        with pytest.raises(_deepwell.Error, match="holds files, but no checkpoint"):
            convert(folder, tmp_path / "full")
        with pytest.raises(deepwell.DeepwellError, match="is the folder to convert"):
            convert(folder, folder)
    with pytest.raises(deepwell.DeepwellError, match='another name of "b"'):
        checkpoints.to_distributed(saved, tmp_path / "out", tied={"a": "b"})
    with pytest.raises(deepwell.DeepwellError, match="are not the same, although"):
        checkpoints.from_distributed(
            sharded, tmp_path / "out", tied={"transformer.wpe.weight": "transformer.wte.weight"}
        )
    with pytest.raises(deepwell.DeepwellError, match="of another program; convert it"):
        trainer(resume=copied(sharded, tmp_path / "loose", "manifest.json")).fit()
    dcp.save({"a": torch.zeros(2, dtype=torch.complex64)}, checkpoint_id=tmp_path / "complex")
    (tmp_path / "complex" / "config.json").write_text("{}")
    with pytest.raises(deepwell.UnsupportedError, match='"a" has the type torch.complex64'):
        checkpoints.from_distributed(tmp_path / "complex", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_model_of_another_shape(sharded):
    wide = reshard_runs.model()
    wide.transformer.ln_f = torch.nn.LayerNorm(25)
    with pytest.raises(
        deepwell.DeepwellError, match=r'"model.transformer.ln_f.weight".*\[24\].*\[25\]'
    ):
        trainer(model=wide, resume=sharded).fit()


def test_a_disk_that_is_full(saved, sharded, tmp_path):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = reshard_runs.bytes_of(sharded)
    for convert, folder in (
        (checkpoints.to_distributed, saved),
        (checkpoints.from_distributed, sharded),
    ):
        copied(sharded, tmp_path / "out")
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (9000, unlimited[1]))
            with pytest.raises(deepwell.DeepwellError, match="was not written.*File too large"):
                convert(folder, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert reshard_runs.bytes_of(tmp_path / "out") == before
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills, saved, tmp_path):
    died, _ = start("kill", saved, tmp_path, kills, 1).split()
    assert int(died) == kills


# ---- the command -----------------------------------------------------------------------------------


def test_the_command(saved, tmp_path, capsys):
    done = run("reshard", saved, "-o", tmp_path / "dcp", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(tmp_path / "dcp")
    assert reshard_command.main([str(tmp_path / "dcp"), "-o", str(tmp_path / "back")]) == 0
    printed = capsys.readouterr().out
    assert "step 3" in printed and "lm_head.weight is another name" in printed
    assert reshard_runs.bytes_of(tmp_path / "back") == reshard_runs.bytes_of(saved)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("{saved}",), 2, "-o/--output"),
        (("{saved}", "-o", "{out}", "--like", "x"), 2, "--like is for conversions from"),
        (("{sharded}", "-o", "{out}", "--flat"), 2, "--flat is for"),
        (("{saved}", "-o", "{out}", "--tied", "x"), 2, "NAME=NAME"),
        (("{out}", "-o", "{out}"), 1, "there is no folder"),
        (("{saved}", "-o", "{saved}"), 1, "is the folder to convert"),
    ],
)
def test_statuses_of_the_command(arguments, status, words, saved, sharded, tmp_path, capsys):
    places = {"saved": saved, "sharded": sharded, "out": tmp_path / "out"}
    try:
        found = reshard_command.main([each.format(**places) for each in arguments])
    except SystemExit as error:
        found = error.code
    assert found == status and words in capsys.readouterr().err


def test_the_page(saved, monkeypatch, tmp_path):
    """Runs each block of Python in docs/reshard.md, in one namespace."""
    page = (Path(__file__).parents[2] / "docs" / "reshard.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    copied(saved, tmp_path / "trained")
    names = {"model": reshard_runs.model()}
    for block in blocks:
        exec(block, names)
    assert reshard_runs.bytes_of(tmp_path / "whole") == reshard_runs.bytes_of(saved)
    weights = load_file(saved / "model.safetensors")
    assert all(torch.equal(each, weights[name]) for name, each in names["model"].named_parameters())
