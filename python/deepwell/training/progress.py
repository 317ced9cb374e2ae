"""What a run prints and logs: one line that is updated on a terminal, plain lines elsewhere, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from typing import Any

from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.expert_load import load_line

_REDRAW_SECONDS = 0.1
_MEMORY = 0.9  # of the mean of the seconds of a step


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Printer:
    """Lines on standard output, as `deepwell train` prints them."""

    def __init__(self, steps: int, every: int) -> None:
        self.steps, self.every = steps, every
        self.terminal = sys.stdout.isatty()
        self.open = False
        self.drawn = 0.0
        self.seconds = 0.0

    def step(self, report: Any) -> None:
        before = self.seconds or report.seconds
        self.seconds = _MEMORY * before + (1.0 - _MEMORY) * report.seconds
        if not report.applied:
            what = report.not_finite
            named = what if what == "the loss" else f'the gradient of "{what}"'
            why = f"{named} is not finite"
            if report.is_spike:
                why = f"its loss is a spike, above {report.spike_limit:g}"
            self.say(
                f"step {report.step} was not applied: {why} (loss {report.loss:g}, gradient norm "
                f"{report.gradient_norm:g})"
            )
        elif self.terminal:
            now = time.monotonic()
            if report.step == self.steps or now - self.drawn >= _REDRAW_SECONDS:
                self.drawn = now
                columns = shutil.get_terminal_size().columns
                print("\r\033[K" + self._line(report)[: columns - 1], end="", flush=True)
                self.open = True
        elif report.step in (1, self.steps) or (self.every and report.step % self.every == 0):
            print(self._line(report), flush=True)

    def _line(self, report: Any) -> str:
        line = (
            f"step {report.step}/{self.steps}  loss {report.loss:.4f}  norm {report.gradient_norm:.3g}  "
            f"lr {report.lr:.3g}"
        )
        if report.tokens:
            line += f"  {report.tokens / max(self.seconds, 1e-9):.0f} tokens/s"
        return line + f"  left {_duration((self.steps - report.step) * self.seconds)}"

    def say(self, text: str) -> None:
        self.close()
        print(text, flush=True)

    def close(self) -> None:
        if self.open:
            print(flush=True)
        self.open = False


class Log:
    """JSON lines, one for each step and validation, with the fields of `deepwell train --log`."""

    def __init__(self, path: str | os.PathLike, step: int, resumed: bool) -> None:
        self.path = os.fspath(path)
        if os.path.isfile(self.path) and os.path.getsize(self.path) > 0:
            if not resumed:
                raise DeepwellError(
                    f'the log "{self.path}" holds lines of an earlier run; name another file, remove it, or resume '
                    "that run"
                )
            self._cut_back(step)
        self.file = open(self.path, "a", encoding="utf-8")

    def _cut_back(self, step: int) -> None:
        """Truncates the log behind the last line of a step that the run has done."""
        with open(self.path, "r+b") as file:
            end = at = 0
            for line in file:
                at += len(line)
                if line.endswith(b"\n") and _step_of(line) <= step:
                    end = at
            file.truncate(end)
            os.fsync(file.fileno())

    def write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def sync(self) -> None:
        try:
            os.fsync(self.file.fileno())
        except OSError:  # a pipe or a device
            pass

    def close(self) -> None:
        self.file.close()


def _step_of(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def step_line(report: Any) -> dict[str, Any]:
    line = {
        "step": report.step,
        "loss": _finite(report.loss),
        "gradient_norm": _finite(report.gradient_norm),
        "lr": report.lr,
        "tokens_per_second": report.tokens / max(report.seconds, 1e-9) if report.tokens else None,
        "applied": report.applied,
    }
    if report.is_spike:
        line["spike_limit"] = report.spike_limit
    elif not report.applied:
        line["not_finite"] = report.not_finite
    return {**line, **precision_numbers(report), **load_line(report.experts)}


def precision_numbers(report: Any) -> dict[str, Any]:
    """Returns the rounding in a sampled step: the operand with the lowest SNR, and how many elements became 0 or were too
    large, over all operands. Empty for other steps."""
    if not report.operands:
        return {}
    worst = min(report.operands, key=lambda each: each.snr_db)
    return {
        "snr_db": _finite(worst.snr_db),
        "snr_layer": worst.layer,
        "snr_operand": worst.operand,
        "underflow": sum(each.underflow for each in report.operands),
        "saturated": sum(each.saturated for each in report.operands),
    }


def validation_line(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "validation_loss": _finite(loss)}


def tensorboard(folder: str | os.PathLike, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError(
            "tensorboard= needs the package tensorboard: install it, or use log= for JSON lines"
        ) from error
    return SummaryWriter(os.fspath(folder), purge_step=step + 1)
