"""Checkpoints of `deepwell train`: killed at any moment, resumed bit for bit, damaged, on a full disk."""

import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import train_runs
from train_runs import SEQUENCE, command, read_log, run


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Makes a model and data, and the arguments of a run of 60 steps in micro-batches, with
    dropout."""
    folder = tmp_path_factory.mktemp("start")
    train_runs.save_model(folder / "model", "gpt2")
    train_runs.save_tokens(folder / "tokens.bin", train_runs.random_tokens(600))
    return [
        *("--model", folder / "model", "--data", folder / "tokens.bin", "--sequence", SEQUENCE),
        *(
            "--steps",
            60,
            "--batch",
            4,
            "--micro-batch",
            2,
            "--lr",
            1e-3,
            "--warmup",
            7,
            "--seed",
            5,
        ),
    ]


def whole(folder) -> dict[str, bytes]:
    """Returns the result of a run: the model, and AdamW's averages in its last checkpoint."""
    (last,) = (folder / "ck").glob("step-000000000060")
    files = [
        folder / "out" / "model.safetensors",
        last / "model.safetensors",
        last / "optimizer.safetensors",
    ]
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


def kept(folder) -> list[str]:
    return sorted(path.name for path in (folder / "ck").iterdir() if path.name != ".lock")


def completed(folder) -> list[str]:
    return (
        [name for name in kept(folder) if name.startswith("step-")]
        if (folder / "ck").exists()
        else []
    )


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(*start, *places(folder), "--save-every", 1)
    return folder


def places(folder) -> list:
    return [
        "--checkpoint",
        folder / "ck",
        "--output",
        folder / "out",
        "--log",
        folder / "log.jsonl",
    ]


def log_of(folder) -> list[dict]:
    lines = read_log(folder / "log.jsonl")
    for line in lines:
        line.pop("tokens_per_second", None)
    return lines


def kill_and_resume(start, folder, kills: int, seed: int, uninterrupted) -> None:
    """Kills the run at random moments until `kills` processes died; each time the newest checkpoint must be
    complete.
    """
    chance = random.Random(seed)
    died = 0
    arguments = command(*start, *places(folder), "--save-every", 1, "--resume")
    (folder / "timed").mkdir()
    began = time.monotonic()
    subprocess.run(command(*start, *places(folder / "timed"), "--save-every", 1), check=True,
                   capture_output=True, timeout=60)  # fmt: skip
    length = time.monotonic() - began
    newest_before = -1
    while died < kills:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            # A third of the kills happen during the start and the first steps, where the most can go wrong.
            process.wait(chance.uniform(0, length / (20 if chance.random() < 1 / 3 else 4)))
        except subprocess.TimeoutExpired:
            process.kill()
        error = process.communicate()[1]
        assert process.returncode in (0, -signal.SIGKILL), error
        died += process.returncode == -signal.SIGKILL
        complete = completed(folder)
        newest = int(complete[-1][5:]) if complete else -1
        assert newest >= newest_before, "a checkpoint was lost"
        newest_before = newest
        if complete:
            check_whole(folder / "ck" / complete[-1])
        if process.returncode == 0:
            compare(folder, uninterrupted)
            for name in ("ck", "out"):
                shutil.rmtree(folder / name)
            (folder / "log.jsonl").unlink()
            newest_before = -1
    run(*start, *places(folder), "--save-every", 1, "--resume")
    compare(folder, uninterrupted)


def check_whole(checkpoint) -> None:
    from safetensors.numpy import load_file

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["step"] == int(checkpoint.name[5:])
    for file in manifest["files"]:
        assert (checkpoint / file["name"]).stat().st_size == file["bytes"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert all(np.isfinite(tensor).all() for tensor in load_file(checkpoint / name).values())


def compare(folder, uninterrupted) -> None:
    assert whole(folder) == whole(uninterrupted)
    assert log_of(folder) == log_of(uninterrupted)
    assert kept(folder) == ["step-000000000059", "step-000000000060"]  # no leftovers


def test_killed_a_hundred_times(start, uninterrupted, tmp_path):
    kill_and_resume(start, tmp_path, 100, 1, uninterrupted)


def heed_signals() -> None:
    """A shell makes programs that it runs in the background ignore SIGINT, which their children
    inherit."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def signal_after_step_3(words, number) -> tuple[int, str]:
    """Returns status and stderr. Stdout has the smallest buffer that a socket can have, and nobody
    reads between step 3 and the signal. The run waits there, so it cannot have ended before the
    signal arrives."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    room = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    process = subprocess.Popen(
        words,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    theirs.close()
    # Reads no byte after the line that it returns.
    with ours, ours.makefile("rb", buffering=0) as lines:
        while json.loads(lines.readline()).get("step", 0) < 3:
            pass
        process.send_signal(number)
        after = lines.readall()
    _, error = process.communicate(timeout=60)
    assert number or len(after) > room, "the steps after the third fit into the buffer"
    return process.returncode, error


def test_signals_end_with_a_checkpoint(start, uninterrupted, tmp_path):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        folder = tmp_path / number.name
        folder.mkdir()
        words = command(*start, *places(folder), "--json")
        status, error = signal_after_step_3(words, number)
        assert status == 128 + number, error
        assert "--resume" in error
        (step,) = kept(folder)
        assert 3 <= int(step[5:]) < 60
        assert not (folder / "out").exists()
        run(*start, *places(folder), "--resume")
        assert whole(folder) == whole(uninterrupted)
        assert log_of(folder) == log_of(uninterrupted)
    (tmp_path / "none").mkdir()
    assert signal_after_step_3(command(*start, *places(tmp_path / "none"), "--json"), 0)[0] == 0


def test_checkpoint_is_a_model_that_transformers_loads(uninterrupted):
    model = train_runs.load_model(uninterrupted / "ck" / "step-000000000060")
    other = train_runs.load_model(uninterrupted / "out")
    for a, b in zip(model.parameters(), other.parameters()):
        assert (a == b).all()


def test_keep_and_save_every(start, tmp_path):
    run(*start, *places(tmp_path), "--save-every", 25, "--keep", 3)
    assert kept(tmp_path) == [f"step-{step:012}" for step in (25, 50, 60)]


def test_resume_where_there_is_nothing_yet(start, uninterrupted, tmp_path):
    said = run(*start, *places(tmp_path), "--save-every", 1, "--resume").stdout
    assert "no checkpoint yet" in said
    compare(tmp_path, uninterrupted)


def test_resume_of_a_finished_run_changes_nothing(start, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "copy")
    run(*start, *places(tmp_path / "copy"), "--save-every", 1, "--resume")
    compare(tmp_path / "copy", uninterrupted)


# ---- rejected runs
# ---------------------------------------------------------------------------------


@pytest.fixture
def half(start, tmp_path):
    """Makes a run that stopped in the middle: its last checkpoint is of step 40."""
    run(*start, *places(tmp_path), "--save-every", 20)
    shutil.rmtree(tmp_path / "ck" / "step-000000000060")
    shutil.rmtree(tmp_path / "out")
    return tmp_path


def test_differences_from_the_checkpoint_are_named(start, half):
    def refused(*changes, status=1):
        return run(*start, *places(half), "--resume", *changes, status=status).stderr

    before = whole_tree(half)
    for changes, named in {
        ("--batch", 8): ["batch is 8 (checkpoint: 4)"],
        ("--lr", 2e-3, "--seed", 6): [
            "lr is 0.002 (checkpoint: 0.001)",
            "seed is 6 (checkpoint: 5)",
        ],
        ("--steps", 39): ["step 40", "steps is 39"],
        ("--micro-batch", 4): ["micro_batch"],
        ("--no-dropout",): ["dropout is false (checkpoint: true)"],
        ("--no-shuffle",): ["shuffle"],
        ("--data", start[3]): ["the data are 2 files (checkpoint: 1)"],
    }.items():
        error = refused(*changes)
        assert all(text in error for text in named), error
    other = train_runs.save_tokens(half / "other.bin", train_runs.random_tokens(600, seed=9))
    error = run(
        "--model", start[1], "--data", other, *start[4:], *places(half), "--resume", status=1
    ).stderr
    assert "other.bin" in error and "tokens.bin" in error
    train_runs.config("gpt2").save_pretrained(half / "narrow")
    altered = json.loads((half / "narrow" / "config.json").read_text())
    altered["layer_norm_epsilon"] = 1e-3
    (half / "narrow" / "config.json").write_text(json.dumps(altered))
    error = run("--model", half / "narrow", *start[2:], *places(half), "--resume", status=1).stderr
    assert "narrow" in error and "config.json" in error
    shutil.rmtree(half / "narrow")
    other.unlink()
    assert whole_tree(half) == before


def whole_tree(folder) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def end_of(folder) -> dict[str, bytes]:
    """The same as whole() for a run of any length: the result without the number of the last
    step."""
    newest = folder / "ck" / completed(folder)[-1]
    files = [folder / "out" / "model.safetensors", newest / "model.safetensors"]
    files.append(newest / "optimizer.safetensors")
    return {str(place): file.read_bytes() for place, file in enumerate(files)}


def test_a_run_is_extended(start, half, tmp_path_factory):
    """Extends a run from the middle of its schedule or from its end: the schedule stays the same, and the
    result equals a run that had so many steps from the start.
    """
    at_once, ended = tmp_path_factory.mktemp("at_once"), tmp_path_factory.mktemp("ended")
    run(*start, "--steps", 90, "--schedule-steps", 60, *places(at_once))
    wanted, log = end_of(at_once), log_of(at_once)
    rates = [line["lr"] for line in log]
    assert rates[59:] == [rates[59]] * 31 and rates[58] > rates[59] > 0
    run(*start, *places(ended))
    for folder in (half, ended):
        said = run(*start, "--steps", 90, *places(folder), "--resume").stdout
        assert "schedule ends at step 60; the steps after it, up to 90, keep 0.0001" in said
        assert end_of(folder) == wanted and log_of(folder) == log
    # Running it again changes nothing, and the first command is rejected again.
    run(*start, "--steps", 90, *places(half), "--resume")
    assert end_of(half) == wanted
    error = run(*start, *places(half), "--resume", status=1).stderr
    assert "step 90" in error and "steps is 60" in error


def test_the_schedule_of_an_extended_run_may_be_stretched(start, half):
    more = [*start, "--steps", 90, "--schedule-steps", 90, *places(half), "--resume"]
    events = [json.loads(line) for line in run(*more, "--json").stdout.splitlines()]
    assert not [event for event in events if event["event"] == "schedule"]
    rates = {line["step"]: line["lr"] for line in log_of(half)}

    def cosine(step: int, last: int) -> float:
        return 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 7) / (last - 7))) / 2)

    for step, last in ((40, 60), (41, 90), (75, 90), (90, 90)):
        assert abs(rates[step] - cosine(step, last)) < 1e-12
    # The new checkpoints record the schedule, so it also applies without the option.
    (event,) = [
        event
        for line in run(
            *start, "--steps", 91, *places(half), "--resume", "--json"
        ).stdout.splitlines()
        if (event := json.loads(line))["event"] == "schedule"
    ]
    assert event["schedule_steps"] == 90


def test_an_extended_run_needs_a_learning_rate(start, tmp_path):
    """A cosine that ended at 0 would train nothing. The message states the option to give, and with
    it the run continues."""
    zero = [*start, "--min-lr-ratio", 0, *places(tmp_path), "--resume"]
    run(*zero, "--steps", 8)
    error = run(*zero, "--steps", 12, status=1).stderr
    assert "steps 9 to 12 would be 0" in error and "schedule_steps" in error
    run(*zero, "--steps", 12, "--schedule-steps", 12)
    assert len(log_of(tmp_path)) == 12


def test_data_may_move(start, half, uninterrupted):
    moved = half / "moved.bin"
    shutil.copy(start[3], moved)
    run(*start[:3], moved, *start[4:], *places(half), "--resume")
    assert whole(half) == whole(uninterrupted)


def test_a_folder_in_use_is_not_overwritten(start, half):
    error = run(*start, *places(half), status=1).stderr
    assert "resume" in error and "step 40" in error
    shutil.rmtree(half / "ck")
    assert "log.jsonl" in run(*start, *places(half), status=1).stderr


def test_two_runs_in_one_folder(start, tmp_path):
    slow = ["--steps", 100000, "--warmup", 0]
    process = subprocess.Popen(
        command(*start, *slow, *places(tmp_path), "--json"), stdout=subprocess.PIPE, text=True
    )
    try:
        for line in process.stdout:
            if json.loads(line)["event"] == "step":
                break
        error = run(*start, "--checkpoint", tmp_path / "ck", "--resume", status=1).stderr
        assert "another process" in error
    finally:
        process.kill()
        process.communicate()


def damage_manifest(change):
    def apply(checkpoint):
        path = checkpoint / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return apply


def cut(name):
    def apply(checkpoint):
        os.truncate(checkpoint / name, (checkpoint / name).stat().st_size - 7)

    return apply


def flip(name):
    def apply(checkpoint):
        content = bytearray((checkpoint / name).read_bytes())
        content[-9] ^= 1
        (checkpoint / name).write_bytes(content)

    return apply


def text(content):
    return lambda checkpoint: (checkpoint / "manifest.json").write_text(content)


@pytest.mark.parametrize(
    ("damage", "named", "status"),
    [
        (cut("model.safetensors"), "model.safetensors", 1),
        (cut("optimizer.safetensors"), "optimizer.safetensors", 1),
        (flip("model.safetensors"), "model.safetensors", 1),
        (flip("optimizer.safetensors"), "optimizer.safetensors", 1),
        (lambda c: (c / "optimizer.safetensors").unlink(), "optimizer.safetensors", 1),
        (lambda c: (c / "config.json").unlink(), "config.json", 1),
        (cut("manifest.json"), "manifest.json", 1),
        (text(""), "manifest.json", 1),
        (text("[" * 100000), "manifest.json", 1),
        (text("{}"), "deepwell checkpoint", 1),
        (damage_manifest(lambda m: m.update(version=2)), "version 2", 3),
        (damage_manifest(lambda m: m.update(version="1")), "version", 1),
        (damage_manifest(lambda m: m.update(step=-1)), "step", 1),
        (damage_manifest(lambda m: m.update(step=61)), "step", 1),
        (damage_manifest(lambda m: m.pop("updates")), "updates", 1),
        (damage_manifest(lambda m: m.pop("options")), "checkpoint: absent", 1),
        (damage_manifest(lambda m: m.update(data=5)), "the data are 1 file", 1),
        (damage_manifest(lambda m: m.update(files=[])), "config.json", 1),
        (damage_manifest(lambda m: m["files"][0].update(name="../../x")), "plain name", 1),
        (damage_manifest(lambda m: m["files"][0].update(bytes=1 << 60)), "bytes", 1),
    ],
)
def test_damage_is_named(damage, named, status, start, half):
    checkpoint = half / "ck" / "step-000000000040"
    damage(checkpoint)
    before = whole_tree(half)
    assert named in run(*start, *places(half), "--resume", status=status).stderr
    assert whole_tree(half) == before


def test_earlier_checkpoint_serves_if_the_newest_is_removed(start, half, uninterrupted):
    cut("model.safetensors")(half / "ck" / "step-000000000040")
    error = run(*start, *places(half), "--resume", status=1).stderr
    assert "remove" in error
    shutil.rmtree(half / "ck" / "step-000000000040")
    run(*start, *places(half), "--resume", "--save-every", 1)
    assert whole(half)["out/model.safetensors"] == whole(uninterrupted)["out/model.safetensors"]


# ---- full and read-only disks
# ----------------------------------------------------------------------


def test_file_size_limit(start, half, uninterrupted):
    """Sets a file-size limit below the size of the weights, so that a checkpoint fails in the
    middle of writing."""
    limit = (half / "ck" / "step-000000000040" / "model.safetensors").stat().st_size // 2
    before = whole_tree(half / "ck")

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    arguments = [*start, "--checkpoint", half / "ck", "--resume"]
    error = run(*arguments, preexec_fn=limited, status=1).stderr
    assert "step 60 was not written" in error and "File too large" in error
    assert whole_tree(half / "ck") == before  # no leftovers
    run(*arguments, "--output", half / "out")
    assert whole(half) == whole(uninterrupted)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(start, uninterrupted, small_disk, tmp_path):
    arguments = [*start, "--checkpoint", small_disk / "ck", "--keep", 100]
    error = run(*arguments, "--save-every", 1, status=1).stderr
    assert (
        "No space left" in error
        and "earlier checkpoints are untouched" in error
        or "free space" in error
    )
    names = sorted(path.name for path in (small_disk / "ck").glob("step-*"))
    assert names and not list((small_disk / "ck").glob(".writing*"))
    check_whole(small_disk / "ck" / names[-1])
    for name in names[:-1]:
        shutil.rmtree(small_disk / "ck" / name)
    run(*arguments, "--resume", "--output", tmp_path / "out")
    wanted = (uninterrupted / "out" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == wanted


@pytest.fixture
def closed():
    """Makes a read-only folder. A test that runs as root drops its rights first."""
    top = Path(tempfile.mkdtemp(prefix="deepwell-test-"))
    top.chmod(0o755)
    (top / "closed").mkdir(mode=0o555)
    yield top / "closed"
    shutil.rmtree(top)


def test_folders_that_cannot_be_written(start, closed):
    for name, source in (("model", start[1]), ("tokens.bin", start[3])):
        copied = closed.parent / name
        shutil.copytree(source, copied) if source.is_dir() else shutil.copy(source, copied)
    for copied in (closed.parent / "model").iterdir():
        copied.chmod(0o644)
    arguments = [
        "--model",
        closed.parent / "model",
        "--data",
        closed.parent / "tokens.bin",
        *start[4:],
    ]
    free = closed.parent / "free"
    free.mkdir()
    free.chmod(0o777)
    nobody = {"preexec_fn": lambda: os.setuid(65534)} if os.geteuid() == 0 else {}
    for option in ("--checkpoint", "--output", "--log"):
        where = (
            [option, closed / "here"]
            if option != "--log"
            else ["--output", free / "out", "--log", closed / "here"]
        )
        error = run(*arguments, *where, status=1, **nobody).stderr
        assert "Permission denied" in error and str(closed) in error


def test_impossible_folders(start, tmp_path):
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/below"):
        error = run(*start, "--checkpoint", tmp_path / place, status=1).stderr
        assert str(tmp_path / "file") in error
        run(*start, "--output", tmp_path / place, status=1)
    assert "proc" in run(*start, "--checkpoint", "/proc/deepwell", status=1).stderr
    assert (tmp_path / "file").read_text() == "x"
