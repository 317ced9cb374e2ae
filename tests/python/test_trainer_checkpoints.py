"""Checkpoints of deepwell.Trainer: killed at any moment, on a full disk, beside training, by signals, on several ranks."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import deepwell
import pytest
import torch
import trainer_runs
from deepwell.training import writer


def start(*arguments: object) -> str:
    words = [sys.executable, Path(__file__).with_name("trainer_runs.py"), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    return done.stdout


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills, tmp_path):
    assert json.loads(start(tmp_path, kills, 1))["died"] == kills


# ---- signals ---------------------------------------------------------------------------------------


class Sends:
    """Sends signals to this process during a step, as a callback."""

    def __init__(self, step: int, *numbers: int) -> None:
        self.step, self.numbers = step, numbers

    def on_step(self, trainer, report) -> None:
        if report.step == self.step:
            for number in self.numbers:
                os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    trainer_runs.trainer(folder, save_every=None).fit()
    return trainer_runs.result(folder)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_with_a_checkpoint(number, raised, whole, tmp_path):
    before = signal.getsignal(number)
    with pytest.raises(raised) as caught:
        trainer_runs.trainer(tmp_path, save_every=None, callbacks=[Sends(7, number)]).fit()
    if raised is SystemExit:
        assert caught.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert [path.name for path in (tmp_path / "ck").glob("step-*")] == ["step-000000000007"]
    trainer_runs.trainer(tmp_path, save_every=None).fit()
    assert trainer_runs.result(tmp_path) == whole


def test_the_newest_checkpoints_are_kept(tmp_path):
    """At most one more than `keep`, which goes when a step has been applied to the newest one's weights."""
    most = []
    count = lambda: len(list((tmp_path / "ck").glob("step-*")))  # noqa: E731
    callback = type("Callback", (), {"on_step": lambda self, trainer, report: most.append(count())})
    trainer_runs.trainer(tmp_path, steps=9, keep=2, callbacks=[callback()]).fit()
    assert max(most) <= 3 and count() == 2


def test_a_second_signal_acts_at_once(tmp_path):
    class Now(Exception):
        pass

    def handler(number, frame):
        raise Now

    before = signal.signal(signal.SIGTERM, handler)
    try:
        trainer = trainer_runs.trainer(
            tmp_path, save_every=None, callbacks=[Sends(3, signal.SIGTERM, signal.SIGTERM)]
        )
        with pytest.raises(Now):
            trainer.fit()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list((tmp_path / "ck").glob("step-*"))


# ---- the disk --------------------------------------------------------------------------------------


class Limits:
    """Limits the size of files after the first checkpoint, so that the next one fails in the middle of writing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def on_checkpoint(self, trainer, step, path) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, hard))


def test_a_disk_that_is_full(whole, tmp_path):
    """One error, the earlier checkpoints, no leftovers; and the same Trainer goes on when there is room."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Larger than the log and trainer.json, smaller than the averages.
    limit = trainer_runs.WIDTH**2 * 4 + 1000
    trainer = trainer_runs.trainer(tmp_path, save_every=10, callbacks=[Limits(limit)], resume=False)
    try:
        with pytest.raises(
            deepwell.DeepwellError, match="step 20 was not written.*File too large"
        ) as caught:
            trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert str(caught.value).count("not written") == 1
    assert 20 <= trainer.step <= 30
    names = sorted(path.name for path in (tmp_path / "ck").iterdir())
    assert names == [".lock", "step-000000000010"]
    trainer.callbacks.clear()
    trainer.fit()
    assert trainer_runs.result(tmp_path) == whole


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    trainer = trainer_runs.trainer(tmp_path, steps=1)
    trainer.folder = tmp_path / "file" / "below"
    with pytest.raises(RuntimeError, match="file"):
        trainer.fit()
    with pytest.raises(RuntimeError, match="file"):
        trainer.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_two_runs_in_one_folder(tmp_path):
    (tmp_path / "other").mkdir()
    other = trainer_runs.trainer(tmp_path / "other", steps=1)
    other.folder = tmp_path / "ck"
    seen = []

    def on_step(trainer, report):
        if report.step == 2:
            with pytest.raises(RuntimeError, match="another process is writing"):
                other.fit()
            seen.append(report.step)

    callback = type("Callback", (), {"on_step": staticmethod(on_step)})
    trainer_runs.trainer(tmp_path, steps=3, callbacks=[callback]).fit()
    assert seen == [2]


# ---- beside training ---------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(whole, monkeypatch, tmp_path):
    """Step 10's checkpoint is held until step 15 is done, and has the weights of step 10."""
    go, wrote = threading.Event(), writer.write_into
    held, kept = [], {}

    def slow(folder, snapshot):
        if snapshot.step == 10:
            held.append(threading.current_thread() is not threading.main_thread())
            assert go.wait(60)
        wrote(folder, snapshot)

    def on_step(trainer, report):
        if report.step == 10:
            kept.update({name: each.clone() for name, each in trainer.module.state_dict().items()})
        if report.step == 15:
            assert not list((tmp_path / "ck").glob("step-*"))
            go.set()

    monkeypatch.setattr(writer, "write_into", slow)
    callback = type("Callback", (), {"on_step": staticmethod(on_step)})
    trainer_runs.trainer(tmp_path, save_every=10, keep=9, callbacks=[callback]).fit()
    assert held == [True] and trainer_runs.result(tmp_path) == whole
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "ck" / "step-000000000010" / "model.safetensors")
    assert stored.keys() == kept.keys()
    assert all(torch.equal(stored[name], kept[name]) for name in kept)


def test_checkpoints_by_time(tmp_path):
    trainer_runs.trainer(tmp_path, save_every=None, save_minutes=0.0, keep=99, steps=4).fit()
    assert len(list((tmp_path / "ck").glob("step-*"))) == 4


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    trainer = trainer_runs.trainer(tmp_path, save_every=None, steps=2)
    trainer.fit()
    with torch.no_grad():
        trainer.module.last.bias.fill_(float("inf"))
    with pytest.raises(deepwell.DeepwellError, match='"last.bias" is not finite'):
        trainer.save(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


# ---- ranks -----------------------------------------------------------------------------------------


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_an_elastic_run_changes_its_ranks(tmp_path):
    """Two ranks share each batch, so the losses are those of one rank, rounded differently."""
    start("--ranks", tmp_path)
    wanted = log_of(tmp_path / "one")
    for kind in ("ddp", "fsdp"):
        found = log_of(tmp_path / kind)
        assert [line["step"] for line in found] == list(range(1, 10))
        for line, other in zip(found, wanted):
            for key in ("loss", "gradient_norm", "lr"):
                assert line[key] == pytest.approx(other[key], rel=1e-4)


def test_other_ranks_need_elastic(tmp_path):
    trainer = trainer_runs.trainer(tmp_path, steps=2)
    trainer.fit()
    (step,) = (tmp_path / "ck").glob("step-*2")
    trainer.ranks, trainer.elastic = 2, False
    kept = json.loads((step / "trainer.json").read_text())
    with pytest.raises(
        deepwell.DeepwellError, match="1 ranks, and this one has 2; give elastic=True"
    ):
        trainer._check_ranks(str(step), kept)
