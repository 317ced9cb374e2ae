"""deepwell.Trainer against a loop written by hand, its data, reports, and the state that it keeps."""

import copy
import json
import random
import re
import types
import warnings
from pathlib import Path

import deepwell
import numpy as np
import pytest
import torch
import train_runs
import transformers
from deepwell import optim
from deepwell.trainer import StepReport
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from train_runs import SEQUENCE, VOCABULARY, losses, read_log


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and token files."""
    place = tmp_path_factory.mktemp("trainer")
    train_runs.save_model(place / "model", "gpt2")
    train_runs.save_tokens(place / "tokens.bin", train_runs.random_tokens(600))
    return place


class Small(torch.nn.Module):
    """A model that is quick to make, with dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.dropout = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, y):
        self.calls += 1
        guess = self.last(self.dropout(torch.relu(self.first(x))))
        return {"loss": torch.nn.functional.mse_loss(guess, y)}


def small_model() -> Small:
    torch.manual_seed(3)
    return Small()


class Rows(Dataset):
    def __init__(self, count: int = 22) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 6, generator=generator)
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        self.loaded.append(i)
        noise = torch.randn(6) + random.random() + float(np.random.rand())  # an augmentation
        return {"x": self.x[i] + 0.01 * noise, "y": self.x[i].sum().reshape(1)}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def quiet(model, data, **options) -> deepwell.Trainer:
    options = {"progress": False, "optimize": False, "lr": 1e-2, **options}
    return deepwell.Trainer(model, data, **options)


class Losses:
    """A callback that keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, trainer, report) -> None:
        self.reports.append(report)

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]


# ---- against a loop by hand ------------------------------------------------------------------------


def by_hand(model, batches, steps, accumulate=1, **adamw) -> list[float]:
    """AdamW at a constant rate, without clipping; weight decay of matrices alone."""
    decayed = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = deepwell.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **adamw)
    model.train()
    found, batches = [], iter(batches)
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(accumulate):
            loss = model(**next(batches))["loss"]
            if accumulate > 1:
                loss = loss / accumulate
            loss.backward()
            total = loss.detach() + total
        optimizer.step()
        found.append(float(total))
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_bits_of_a_loop_by_hand(always, accumulate):
    wanted_model = deepwell.optimize(small_model(), verbose=False)
    given = copy.deepcopy(small_model())
    loader = DataLoader(Rows(), batch_size=5, shuffle=True)

    def epochs():
        while True:
            yield from loader

    seed_all(11)
    wanted = by_hand(wanted_model, epochs(), 9, accumulate)
    seen = Losses()
    trainer = quiet(given, loader, optimize=True, steps=9, accumulate=accumulate, clip=0,
                    schedule="constant", callbacks=[seen])  # fmt: skip
    seed_all(11)
    result = trainer.fit()
    assert seen.losses == wanted and result.loss == wanted[-1] and result.steps == 9
    for a, b in zip(wanted_model.state_dict().values(), given.state_dict().values()):
        assert torch.equal(a, b)


def test_clipping_and_schedule_as_pytorch(folder):
    """The norm is summed in F64, so it is compared with a tolerance: each F32 sum of n squares is off by at most n
    roundings, and here n is below 2,000."""
    model, other = (
        train_runs.load_model(folder / "model").eval(),
        train_runs.load_model(folder / "model").eval(),
    )
    tokens = train_runs.random_tokens(600)
    seen = Losses()
    options = {
        "sequence": SEQUENCE,
        "batch": 4,
        "steps": 5,
        "lr": 1e-3,
        "warmup_steps": 2,
        "seed": 7,
        "clip": 0.5,
    }
    for dropout in (
        each for each in (*model.modules(), *other.modules()) if isinstance(each, torch.nn.Dropout)
    ):
        dropout.p = 0.0
    deepwell.Trainer(model, folder / "tokens.bin", optimize=False, progress=False, schedule="linear",
                     callbacks=[seen], **options).fit()  # fmt: skip
    decayed = [each for each in other.parameters() if each.dim() >= 2]
    others = [each for each in other.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    other.train()
    for step in range(1, 6):
        rows = train_runs.batch(tokens, step, 4, 7)
        rate = 1e-3 * step / 2 if step <= 2 else 1e-3 * (1 - 0.9 * (step - 2) / 3)
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = other(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        report = seen.reports[step - 1]
        assert report.lr == pytest.approx(rate, rel=1e-12)
        assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert report.gradient_norm == pytest.approx(float(norm), rel=1e-4)
        assert report.tokens == 4 * SEQUENCE


# ---- resuming ------------------------------------------------------------------------------------


class WithState(IterableDataset):
    """An iterable that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        rows = Rows()
        while self.at < len(rows):
            self.at += 1
            yield rows[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class WithoutState(IterableDataset):
    def __iter__(self):
        rows = Rows()
        return (rows[i] for i in range(len(rows)))


LOADERS = {
    "shuffled": lambda: DataLoader(Rows(), batch_size=5, shuffle=True),
    "generator": lambda: DataLoader(
        Rows(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "sampler": lambda: DataLoader(
        Rows(), batch_size=5, sampler=DistributedSampler(Rows(), 2, 1, seed=8)
    ),
    "dataset": Rows,
    # Without a generator the end of an epoch draws from the global one, and such a dataset does not tell that end.
    "stateful": lambda: DataLoader(WithState(), batch_size=5, generator=torch.Generator()),
    "replayed": lambda: DataLoader(WithoutState(), batch_size=5),
    "list": lambda: [batch for batch in DataLoader(Rows(), batch_size=5)],
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_resumed_run_has_the_same_bits(kind, stop, tmp_path):
    """Epochs have 5 batches (3 with the sampler); the run is stopped within one, at its end, and in the second."""

    def run(seen, **options):
        model = small_model()
        seed_all(2)
        trainer = quiet(model, LOADERS[kind](), steps=11, batch=5, accumulate=1, callbacks=[seen],
                        **options)  # fmt: skip
        return model, trainer

    whole, first, second = Losses(), Losses(), Losses()
    wanted, trainer = run(whole)
    trainer.fit()
    _, trainer = run(first, checkpoint=tmp_path / "ck")
    first.on_step = lambda trainer, report: (
        first.reports.append(report),
        report.step == stop and trainer.stop(),
    )  # noqa: E501
    trainer.fit()
    torch.manual_seed(77)  # the state of this process is another one
    model, trainer = run(second, checkpoint=tmp_path / "ck", resume=True)
    seed_all(78)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit()
    replays = any("makes the first" in str(each.message) for each in caught)
    assert replays == (kind == "replayed")
    assert first.losses + second.losses == whole.losses
    for a, b in zip(wanted.state_dict().values(), model.state_dict().values()):
        assert torch.equal(a, b)


def test_rows_before_the_position_are_not_loaded_again(tmp_path):
    def run(**options):
        rows = Rows()
        quiet(
            small_model(), DataLoader(rows, batch_size=2), checkpoint=tmp_path / "ck", **options
        ).fit()
        return rows.loaded

    assert run(steps=8) == list(range(16))
    assert run(steps=9, resume=True) == [16, 17]


def test_save_and_resume_from_a_folder_of_any_name(tmp_path):
    trainer = quiet(small_model(), Rows(), steps=3, batch=4)
    trainer.fit()
    trainer.save(tmp_path / "deep" / "kept")
    names = {path.name for path in (tmp_path / "deep" / "kept").iterdir()}
    assert names == {
        "config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "trainer.json",
    }  # fmt: skip
    trainer.fit(steps=5)
    other = quiet(
        small_model(), Rows(), steps=5, batch=4, schedule_steps=3, resume=tmp_path / "deep" / "kept"
    )
    assert other.fit().steps == 5
    assert other.last_report.loss == trainer.last_report.loss
    trainer.save(tmp_path / "deep" / "kept")  # replaces a checkpoint
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(RuntimeError, match="no checkpoint"):
        trainer.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "x"


def test_differences_from_the_checkpoint_are_named(tmp_path):
    quiet(small_model(), Rows(), steps=2, batch=4, checkpoint=tmp_path / "ck").fit()

    def again(**options):
        options = {"steps": 3, "batch": 4, "checkpoint": tmp_path / "ck", "resume": True, **options}
        quiet(options.pop("model", small_model()), options.pop("data", Rows()), **options).fit()

    with pytest.raises(RuntimeError, match=r"lr is 0.02 \(checkpoint: 0.01\)"):
        again(lr=0.02)
    with pytest.raises(RuntimeError, match="optimizer is .*SGD"):
        again(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), lr=None)
    with pytest.raises(RuntimeError, match="holds checkpoints of an earlier run"):
        again(resume=False)
    with pytest.raises(RuntimeError, match="steps is 1"):
        again(steps=1)
    with pytest.raises(RuntimeError, match='data position is of kind "map"'):
        again(data=[{"x": torch.zeros(1, 6), "y": torch.zeros(1, 1)}])
    wide = small_model()
    wide.last = torch.nn.Linear(8, 2)
    with pytest.raises(ValueError, match="another model, shape or element type"):
        again(model=wide)
    again()


def test_a_damaged_checkpoint_is_refused(tmp_path):
    quiet(small_model(), Rows(), steps=2, batch=4, checkpoint=tmp_path / "ck").fit()
    file = tmp_path / "ck" / "step-000000000002" / "trainer.json"
    file.write_text(file.read_text().replace("map", "mop"))
    with pytest.raises(RuntimeError, match="trainer.json.* is not what was written"):
        quiet(
            small_model(), Rows(), steps=3, batch=4, checkpoint=tmp_path / "ck", resume=True
        ).fit()


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
        lambda groups: torch.optim.Adagrad(groups, lr=0.01),
        "adamw",
    ],
    ids=["sgd", "amsgrad", "adagrad", "name"],
)
def test_other_optimizers_resume(make, tmp_path):
    def run(steps, **options):
        model, seen = small_model(), Losses()
        options = {"optimizer": make, "lr": None, "schedule_steps": 6, **options}
        trainer = quiet(model, Rows(), steps=steps, batch=4, callbacks=[seen], **options)
        seed_all(1)
        trainer.fit()
        return seen.losses

    whole = run(6)
    assert (
        run(4, checkpoint=tmp_path / "ck") + run(6, checkpoint=tmp_path / "ck", resume=True)
        == whole
    )


# ---- one implementation with `deepwell train` --------------------------------------------------------


def arguments(folder, where, steps) -> list:
    return [
        *("--model", folder / "model", "--data", folder / "tokens.bin", "--sequence", SEQUENCE),
        *("--steps", steps, "--batch", 4, "--micro-batch", 2, "--lr", 1e-3, "--warmup", 3),
        *("--schedule-steps", 12, "--seed", 5, "--val", folder / "tokens.bin", "--val-batches", 3),
        *("--checkpoint", where / "ck", "--log", where / "log.jsonl", "--save-every", 4),
    ]


def as_trainer(folder, where, steps, **options) -> deepwell.Trainer:
    return deepwell.Trainer(
        train_runs.load_model(folder / "model"), folder / "tokens.bin", sequence=SEQUENCE, batch=4,
        accumulate=2, steps=steps, lr=1e-3, warmup_steps=3, schedule_steps=12, seed=5, progress=False,
        eval_dataloader=folder / "tokens.bin", eval_batches=3, checkpoint=where / "ck", save_every=4,
        log=where / "log.jsonl", **options,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mistral"])
def test_the_command_and_the_trainer_resume_each_other(always, family, tmp_path_factory):
    """Both compute in F32, in different orders, so losses agree to a few roundings times the steps."""
    folder = tmp_path_factory.mktemp("both")
    made = train_runs.config(family)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(made, name):
            setattr(made, name, 0.0)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder / "model")
    train_runs.save_tokens(folder / "tokens.bin", train_runs.random_tokens(600))
    logs = {}
    orders = ("command", "trainer", "both") if family == "gpt2" else ("command", "both")
    for order in orders:
        where = tmp_path_factory.mktemp(order)
        for part, steps in enumerate((7, 12, 14)):
            resume = ["--resume"] if part else []
            if order == "command" or (order == "both" and part != 1):
                train_runs.run(*arguments(folder, where, steps), *resume)
            else:
                engine = family == "gpt2"  # capturing takes seconds
                as_trainer(folder, where, steps, resume=part > 0, optimize=engine).fit()
        logs[order] = read_log(where / "log.jsonl")
        last = sorted((where / "ck").glob("step-*"))[-1]
        manifest = json.loads((last / "manifest.json").read_text())
        assert (manifest["step"], manifest["updates"], manifest["schedule_steps"]) == (14, 14, 12)
        if order != "command":
            train_runs.load_model(last)
    wanted = logs["command"]
    for log in logs.values():
        assert [list(line) for line in log] == [list(line) for line in wanted]
        for line, other in zip(log, wanted):
            assert line["step"] == other["step"] and line.get("lr") == other.get("lr")
            for key in {"loss", "gradient_norm", "validation_loss"} & line.keys():
                assert line[key] == pytest.approx(other[key], rel=1e-4)


def test_the_command_names_what_it_cannot_resume(folder, tmp_path):
    quiet(small_model(), Rows(), steps=2, batch=4, checkpoint=tmp_path / "ck").fit()
    error = train_runs.run(*arguments(folder, tmp_path, 4), "--resume", status=1).stderr
    assert "the data are 1 files (checkpoint: 0)" in error
    where = tmp_path / "sgd"
    where.mkdir()
    trainer = deepwell.Trainer(
        train_runs.load_model(folder / "model"), folder / "tokens.bin", sequence=SEQUENCE, batch=4, steps=1,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), checkpoint=where / "ck", progress=False,
        optimize=False,
    )  # fmt: skip
    trainer.fit()
    error = train_runs.run(*arguments(folder, where, 4), "--resume", status=1).stderr
    assert 'optimizer is "adamw" (checkpoint: "torch.optim.sgd.SGD")' in error


# ---- divergence --------------------------------------------------------------------------------------


class Poisoned(Rows):
    """Rows whose batches (of 2) at some positions give NaN."""

    def __init__(self, bad) -> None:
        super().__init__(40)
        self.bad = bad

    def __getitem__(self, i):
        row = super().__getitem__(i)
        if i // 2 + 1 in self.bad:
            row["y"] = row["y"] * float("nan")
        return row


def test_a_bad_batch_is_skipped(tmp_path):
    seen = Losses()
    trainer = quiet(small_model(), Poisoned([4]), batch=2, shuffle=False, steps=8, callbacks=[seen],
                    log=tmp_path / "log.jsonl")  # fmt: skip
    before = None

    def on_step(trainer, report):
        nonlocal before
        now = copy.deepcopy(trainer.module.first.weight)
        if report.step == 4:
            assert (
                torch.equal(now, before) and not report.applied and report.not_finite == "the loss"
            )
        before = now

    trainer.callbacks.append(types.SimpleNamespace(on_step=on_step))
    trainer.fit()
    assert [report.applied for report in seen.reports] == [step != 4 for step in range(1, 9)]
    assert trainer.updates == 7
    line = read_log(tmp_path / "log.jsonl")[3]
    assert line["loss"] is None and line["not_finite"] == "the loss" and not line["applied"]


def test_a_bad_gradient_is_named():
    model = small_model()
    model.last.bias.register_hook(lambda grad: grad * float("inf"))
    trainer = quiet(model, Rows(), batch=2, steps=3, max_bad_steps=2)
    with pytest.raises(deepwell.DivergenceError, match="2 steps in a row.*last.bias"):
        trainer.fit()


def test_a_diverged_run_goes_back_to_its_checkpoint(tmp_path):
    seen, backs = Losses(), []
    seen.on_rollback = lambda trainer, step: backs.append((trainer.step, step))
    trainer = quiet(small_model(), Poisoned([6, 7, 8]), batch=2, shuffle=False, steps=12, max_bad_steps=3,
                    checkpoint=tmp_path / "ck", save_every=4, keep=9, callbacks=[seen],
                    log=tmp_path / "log.jsonl")  # fmt: skip
    trainer.fit()
    # Step 5 is lost; the data after the bad batches follow.
    assert backs == [(8, 4)]
    assert [report.applied for report in seen.reports] == [
        not 6 <= step <= 8 for step in range(1, 13)
    ]
    assert trainer.step == 12 and trainer.updates == 8
    manifest = json.loads((tmp_path / "ck" / "step-000000000012" / "manifest.json").read_text())
    assert manifest["step"] == 12 and manifest["updates"] == 8
    assert {"step": 8, "rollback_to": 4} in read_log(tmp_path / "log.jsonl")


def test_going_back_again_and_again_ends(tmp_path):
    trainer = quiet(small_model(), Poisoned(range(4, 40)), batch=2, shuffle=False, steps=20, max_bad_steps=2,
                    max_rollbacks=2, checkpoint=tmp_path / "ck", save_every=1)  # fmt: skip
    with pytest.raises(deepwell.DivergenceError, match="up to step 9"):
        trainer.fit()
    # Step 4 was bad, so the checkpoint that step 3's would replace is there, too.
    assert len(list((tmp_path / "ck").glob("step-*"))) >= 2


@pytest.mark.parametrize("bad", [[], [4], [4, 5], [5]])
def test_a_step_on_a_gpu_is_judged_while_the_next_one_runs(tmp_path, monkeypatch, bad):
    """Weights, logs and checkpoints are those of a run that waits for each step, as a callback makes it do."""
    monkeypatch.setattr(optim, "emulated", "emulator:sm_90a")
    behind: list[int] = []
    judge = deepwell.Trainer._report_of

    def watched(trainer, queued, **named):
        behind.append(trainer.step - queued.step)
        return judge(trainer, queued, **named)

    monkeypatch.setattr(deepwell.Trainer, "_report_of", watched)
    runs = []
    for name, callbacks in (("queued", []), ("waits", [Losses()])):
        behind.clear()
        seed_all(4)
        trainer = quiet(small_model(), Poisoned(bad), batch=2, shuffle=False, steps=12, clip=0.5, save_every=5,
                        checkpoint=tmp_path / name, callbacks=callbacks, log=tmp_path / f"{name}.jsonl")  # fmt: skip
        result = trainer.fit()
        lines = read_log(tmp_path / f"{name}.jsonl")
        assert [line["applied"] for line in lines] == [step not in bad for step in range(1, 13)]
        assert trainer.updates == 12 - len(bad) and result.steps == 12
        timed = ("seconds", "tokens_per_second")
        runs.append([{k: v for k, v in line.items() if k not in timed} for line in lines])
        runs.append([each.detach().clone() for each in trainer.model.parameters()])
        runs.append(sorted(path.name for path in (tmp_path / name).iterdir()))
        if callbacks:
            assert not any(behind)
        else:
            waits = {5, 10, 12} | {step + 1 for step in bad if step < 12}
            assert behind == [int(step not in waits) for step in range(1, 13)]
    assert runs[0] == runs[3] and runs[2] == runs[5]
    assert all(map(torch.equal, runs[1], runs[4]))


# ---- what is reported --------------------------------------------------------------------------------


def test_lines_and_events(folder, tmp_path, capsys):
    events = []
    heard = types.SimpleNamespace(
        on_start=lambda trainer: events.append("start"),
        on_evaluate=lambda trainer, step, loss: events.append(("evaluate", step)),
        on_checkpoint=lambda trainer, step, path: events.append(("checkpoint", step)),
        on_end=lambda trainer: events.append("end"),
        state_dict=lambda: {"seen": 3},
        load_state_dict=lambda state: events.append(state),
    )
    options = {"batch": 4, "checkpoint": tmp_path / "ck", "callbacks": [heard], "progress": True}
    trainer = quiet(small_model(), Rows(), steps=4, eval_dataloader=[{"x": torch.zeros(2, 6), "y": torch.ones(2, 1)}],
                    eval_every=2, **options)  # fmt: skip
    result = trainer.fit()
    assert events == ["start", ("evaluate", 2), ("evaluate", 4), ("checkpoint", 4), "end"]
    said = capsys.readouterr().out
    assert "step 1/4  loss" in said and "step 4  validation loss" in said and "\033" not in said
    assert f"step 4  checkpoint {tmp_path / 'ck' / 'step-000000000004'}" in said
    assert result.checkpoint.endswith("step-000000000004")
    assert result.validation_loss == trainer.validation_loss
    quiet(small_model(), Rows(), steps=5, schedule_steps=4, resume=True, **options).fit()
    assert {"seen": 3} in events
    assert "resumed from" in capsys.readouterr().out


def test_validation_changes_nothing(tmp_path):
    """Neither the random state nor the modes of modules."""

    def run(**options):
        model, seen = small_model(), Losses()
        model.first.eval()
        seed_all(1)
        quiet(model, Rows(), steps=6, batch=4, callbacks=[seen], **options).fit()
        assert not model.first.training and model.last.training
        return seen.losses

    assert run() == run(
        eval_dataloader=DataLoader(Rows(), batch_size=4, shuffle=True), eval_every=1
    )


def test_tensorboard(monkeypatch, tmp_path):
    written = []
    board = types.SimpleNamespace(
        add_scalar=lambda *values: written.append(values), close=lambda: written.append("closed")
    )
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = lambda folder, purge_step: board
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", fake)
    quiet(small_model(), Rows(), steps=2, batch=4, tensorboard=tmp_path).fit()
    assert [each[0] for each in written[:3]] == ["loss", "gradient_norm", "lr"] and written[
        -1
    ] == "closed"


# ---- what is given -----------------------------------------------------------------------------------


def test_an_engine(folder, tmp_path):
    """What deepwell.compile returns: an optimized module, its plan and its precision."""
    model = deepwell.optimize(train_runs.load_model(folder / "model"), verbose=False)
    plan = types.SimpleNamespace(to_json=lambda: '{"a": 1}')
    policy = types.SimpleNamespace(to_dict=lambda: {"default_compute": "MXFP8"})
    engine = types.SimpleNamespace(model=model, plan=plan, precision=policy)
    rows = torch.randint(0, VOCABULARY, (8, SEQUENCE), generator=torch.Generator().manual_seed(0))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)
    trainer = deepwell.Trainer.from_engine(
        engine, optimizer="adamw_dw", dataloader=loader, elastic=True, progress=False
    )
    assert trainer.fit().steps == 4 and type(trainer.optimizer) is deepwell.AdamW
    trainer.save(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == {"a": 1}
    kept = json.loads((tmp_path / "run" / "trainer.json").read_text())
    assert kept["precision"] == {"default_compute": "MXFP8"}
    train_runs.load_model(tmp_path / "run")


def test_muon_trains_a_compiled_engine(folder, tmp_path):
    """What deepwell.compile itself returns; a run that is resumed has the bits of a whole one."""
    rows = torch.randint(0, VOCABULARY, (8, SEQUENCE), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    weights = []
    for name, parts in (("whole", [4]), ("parts", [2, 4])):
        for steps in parts:
            model = train_runs.load_model(folder / "model")
            torch.manual_seed(0)  # the model has dropout
            engine = deepwell.compile(deepwell.capture(model, (rows[:2],)))
            trainer = deepwell.Trainer.from_engine(
                engine, optimizer="muon", dataloader=DataLoader(data, batch_size=2), steps=steps,
                schedule_steps=4, lr=1e-3, checkpoint=tmp_path / name, save_every=2, resume=True, progress=False,
            )  # fmt: skip
            assert trainer.fit().steps == steps and type(trainer.optimizer) is deepwell.Muon
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (None, {}, "dataloader is missing"),
        (iter([]), {}, "an iterator"),
        (7, {}, "is a int"),
        ([(1, 2)], {"steps": 1}, "loss_fn="),
        ([{"x": torch.zeros(1, 6), "y": torch.zeros(1, 1)}], {"optimizer": "adam"}, "use one of adamw, adamw_dw"),
        ([{}], {"optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1), "lr": 0.1}, "lr is given with an optimizer"),
        ([{}], {"schedule": "sine"}, 'schedule is "sine"'),
        ([{}], {"accumulate": 0}, "accumulate is 0"),
        ([{}], {"accumulate": 2}, "the run has 0 steps"),
        ([{}], {"steps": 1, "epochs": 1}, "not both"),
        ([{}], {"lr": 2.0}, "lr is 2"),
        ([{}], {"resume": True}, "needs checkpoint="),
        (DataLoader(WithoutState()), {}, "has no length"),
        ("tokens.txt", {}, "vocab_size"),
        ("tokens.txt", {"vocabulary": 9}, "tokens.txt"),
        ([], {"steps": 1}, "gave no batch"),
    ],
)  # fmt: skip
def test_wrong_use_is_explained(data, options, message):
    options = {"lr": None, **options}
    with pytest.raises((ValueError, RuntimeError), match=message):
        quiet(small_model(), data, **options).fit()


def test_a_loss_function():
    model = torch.nn.Linear(3, 1)
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    trainer = quiet(
        model, DataLoader(data, batch_size=4), steps=2,
        loss_fn=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        autocast=torch.bfloat16,
    )  # fmt: skip
    assert trainer.fit().steps == 2


def test_losses_reads_the_log_of_a_trainer(folder, tmp_path):
    as_trainer(folder, tmp_path, 3, optimize=False).fit()
    assert len(losses(tmp_path / "log.jsonl")) == 3


def test_the_page(always, monkeypatch, tmp_path):
    """Runs each block of Python in docs/trainer.md, in one namespace."""
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    train_runs.save_tokens(tmp_path / "tokens.bin", train_runs.random_tokens(600))
    torch.manual_seed(0)
    config = train_runs.config("gpt2")
    config.n_layer = 1
    model = transformers.AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (4, 8))]
    names = {
        "torch": torch,
        "model": model,
        "loader": DataLoader(rows, batch_size=2),
        "engine": types.SimpleNamespace(model=model, plan=None, precision="fp32"),
    }
    for block in blocks:
        exec(block, names)
        assert names["trainer"].fit().steps == names["trainer"].step > 0
    assert (tmp_path / "trained" / "manifest.json").exists()
