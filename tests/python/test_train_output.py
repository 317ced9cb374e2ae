"""The files that `deepwell train` leaves beside its output, and those it copies from the model's folder."""

import fcntl
import os
import shutil
import subprocess

import pytest
import train_runs
from train_runs import SEQUENCE, command, run

TOKENIZER = b'{"version": "1.0"}\n'


@pytest.fixture
def model(tmp_path):
    """Makes models--x/snapshots/main, as in the cache of the Hugging Face hub, but with files in
    place of links."""
    folder = tmp_path / "models--x" / "snapshots" / "main"
    folder.parent.mkdir(parents=True)
    return train_runs.save_model(folder, "gpt2")


@pytest.fixture
def arguments(model, tmp_path):
    data = train_runs.save_tokens(tmp_path / "tokens.bin", train_runs.random_tokens(300))
    return [
        *("--model", model, "--data", data, "--sequence", SEQUENCE, "--batch", 1, "--steps", 2),
        *("--output", tmp_path / "out", "--log", tmp_path / "log.jsonl"),
    ]


def test_leftovers_of_killed_runs_are_removed(arguments, tmp_path):
    for name in ("out.1-0.tmp", "out.999999999-3.tmp", "out.77-0.tmp", "out.mine.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(100))
    # A temporary that a process is writing, maybe on another machine with the same disk: its
    # process number proves nothing.
    written = os.open(tmp_path / "out.77-0.tmp", os.O_RDONLY)
    fcntl.flock(written, fcntl.LOCK_EX)
    run(*arguments)
    os.close(written)
    left = sorted(path.name for path in tmp_path.glob("out*"))
    assert left == ["out", "out.77-0.tmp", "out.mine.tmp"]
    # Leftovers are removed before training to make room; here that fails.
    (tmp_path / "out.1-0.tmp").mkdir()
    (tmp_path / "bad.bin").write_bytes(b"\xff" * 200)
    error = run(*arguments, "--overwrite", "--data", tmp_path / "bad.bin", status=1).stderr
    assert "bad.bin" in error and not (tmp_path / "out.1-0.tmp").exists()


def test_log_is_truncated_in_place(arguments, tmp_path):
    """A log is truncated without a second file that a killed process could leave; the remaining
    lines keep their bytes."""
    log = tmp_path / "log.jsonl"
    run(*arguments, "--checkpoint", tmp_path / "ck", "--steps", 4, "--save-every", 2)
    shutil.rmtree(tmp_path / "ck" / "step-000000000004")
    kept = log.read_bytes().splitlines(keepends=True)[:2]
    node = log.stat().st_ino
    with log.open("ab") as file:
        file.write(b'{"step":5,"loss":1.0}\n{"step":')
    run(*arguments, "--checkpoint", tmp_path / "ck", "--steps", 4, "--resume")
    lines = log.read_bytes().splitlines(keepends=True)
    assert lines[:2] == kept and len(lines) == 4 and log.stat().st_ino == node
    assert [line["step"] for line in train_runs.read_log(log)] == [1, 2, 3, 4]


@pytest.mark.parametrize("place", ["--output", "--checkpoint"])
def test_a_link_out_of_the_model_is_not_followed(place, arguments, model, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"root:x:0:0\n")
    (model / "tokenizer.json").symlink_to(secret)
    at = arguments.index("--output")
    here = [*arguments[:at], place, tmp_path / "here", *arguments[at + 2 :]]
    error = run(*here, status=1).stderr
    assert "tokenizer.json" in error and str(secret) in error
    assert not (tmp_path / "here").exists() and not (tmp_path / "log.jsonl").exists()
    # A folder whose name begins in the same way is another folder.
    other = model.parent / "main2"
    other.mkdir()
    (other / "tokenizer.json").write_bytes(TOKENIZER)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to(other / "tokenizer.json")
    assert "tokenizer.json" in run(*here, status=1).stderr


def test_links_of_the_hub_are_followed(arguments, model, tmp_path):
    """Links into Hugging Face's cache and within the model's folder are followed, even if the
    folder is a link."""
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (blobs / "1234").write_bytes(TOKENIZER)
    (model / "tokenizer.json").symlink_to("../../blobs/1234")
    (model / "original").mkdir()
    (model / "original" / "vocab.json").write_bytes(b"{}")
    (model / "vocab.json").symlink_to("original/vocab.json")
    (model / "merges.txt").symlink_to("nowhere")
    (tmp_path / "named").symlink_to(model)
    for path in (model, tmp_path / "named"):
        run(*arguments, "--model", path, "--overwrite")
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == TOKENIZER
        assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
        assert (tmp_path / "out" / "vocab.json").read_bytes() == b"{}"
        assert not (tmp_path / "out" / "merges.txt").exists()
        (tmp_path / "log.jsonl").unlink()


def test_a_pipe_among_the_files_is_found_before_training(arguments, model, tmp_path):
    os.mkfifo(model / "tokenizer.json")
    error = run(*arguments, status=1).stderr
    assert "tokenizer.json" in error and "pipe" in error
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2)])
def test_closed_descriptors_are_not_used_for_files(closed, arguments, tmp_path):
    """Without a standard descriptor the next opened file would get its number, and messages would go into it."""

    def close():
        for number in closed:
            os.close(number)

    bad = [*arguments, "--checkpoint", tmp_path / "ck", "--resume", "--init", "--seed", 1]
    run(*bad)
    (tmp_path / "log.jsonl").unlink()
    done = subprocess.run(command(*bad, "--seed", 2), preexec_fn=close, timeout=60)
    assert done.returncode == 1
    assert (tmp_path / "ck" / ".lock").read_bytes() == b""
    whole = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"deepwell: " not in whole
