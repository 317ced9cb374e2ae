"""A second signal ends `deepwell train` at once, also in the middle of a long step."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import train_runs
from train_runs import SEQUENCE, command


def handled(process: subprocess.Popen) -> int:
    """Returns the signals that the process handles, as a mask."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("SigCgt:")[1].split()[0], 16)


def cpu_seconds(process: subprocess.Popen) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(process: subprocess.Popen, number: int, is_handled: bool) -> None:
    end = time.monotonic() + 60
    while bool(handled(process) >> (number - 1) & 1) != is_handled:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_a_second_signal_ends_a_long_step(first, second, tmp_path):
    train_runs.save_model(tmp_path / "model", "gpt2")
    data = train_runs.save_tokens(tmp_path / "tokens.bin", train_runs.random_tokens(300))
    # A step that takes hours.
    process = subprocess.Popen(
        command("--model", tmp_path / "model", "--data", data, "--sequence", SEQUENCE, "--steps", 2,
                "--batch", 1 << 30, "--micro-batch", 1, "--checkpoint", tmp_path / "ck"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(first, signal.SIG_DFL),  # nohup ignores SIGHUP
    )  # fmt: skip
    try:
        wait_until(process, first, True)
        process.send_signal(first)
        # The handler receives the first signal, and the step continues.
        wait_until(process, second, False)
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(60) == -second
    finally:
        process.kill()
        process.communicate()


def test_before_the_first_step_one_signal_is_enough(tmp_path):
    """Makes a model of many layers, whose plan takes seconds. There is nothing to save yet."""
    config = train_runs.config("gpt2")
    config.n_layer = 3000
    config.save_pretrained(tmp_path / "model")
    data = train_runs.save_tokens(tmp_path / "tokens.bin", train_runs.random_tokens(300))
    process = subprocess.Popen(
        command("--init", "--model", tmp_path / "model", "--data", data, "--sequence", SEQUENCE,
                "--dry-run"),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while cpu_seconds(process) < 0.3:  # by then it is making the plan
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
    finally:
        process.kill()
        process.wait()
