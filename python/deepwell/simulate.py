"""One training step of a plan, played without the hardware that it is for.

    report = deepwell.dryrun("plan.json", trace="trace.json", report="report.html")
    report["step_time_ms"], report["memory_gb"], report["bubble_fraction"]

All of it is done in C (deepwell/simulate.h); docs/dryrun.md has the rules and the fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.host_plan import HostPlan
from deepwell.step_memory import predict_step


def _text_of(plan) -> str:
    if isinstance(plan, (str, os.PathLike)):
        try:
            return Path(plan).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DeepwellError(f'cannot read the plan "{os.fspath(plan)}": {error}') from None
    if isinstance(plan, Mapping):
        return json.dumps(dict(plan))
    if callable(getattr(plan, "to_json", None)):
        return plan.to_json()
    raise TypeError(
        f"dryrun takes a plan, the path of a plan's file, the dict that is in one, or a model; not {type(plan).__name__}"
    )


def dryrun(
    plan,
    example_inputs: Any = None,
    trace: str | os.PathLike | None = None,
    report: str | os.PathLike | None = None,
    **step: Any,
) -> dict:
    """Plays one step of `plan`: a plan, its file's path, or the dict that is in the file.

    `trace` is a file to write for ui.perfetto.dev, `report` an HTML page. The dict that comes back has step_time_ms,
    memory_gb, fits, mfu, bubble_fraction, overlap, expected_speedup (one number, or None where no usual layout fits),
    baseline (the layout that the speedup is against, in words), stages and more, and the paths under "trace" and "report".

    Or of a model, on this library's own engine: `dryrun(model, example_inputs)` places one training step as
    `deepwell.optimize` would run it on a call with such arguments, without computing anything; model and arguments may be
    on the meta device. `example_inputs`: a tuple of positional or a dict of keyword arguments; None: token ids, for a
    Hugging Face model. The dict has peak_bytes, memory_gb (10^9 bytes) and memory_gib of the step, peak and moments (what is held in forward,
    in each part of backward, in the update), arena, fits. Further arguments: `optimizer` ("adamw_dw", "adamw", None),
    `precision` as optimize takes it, `accumulate=True` for gradients that are added to those of earlier micro-batches,
    `keep_outputs=True` for a loop that holds all outputs until the step ends (as it is assumed where there is no loss),
    `threads`, `hw` (whose host memory it must fit into; None: this machine's). docs/engine.md says what is counted.
    """
    if isinstance(plan, HostPlan):
        raise UnsupportedError(
            "a plan for this library's engine has no schedule to play: use dryrun(model, example_inputs) for what its step holds"
        )
    if isinstance(plan, torch.nn.Module):
        if trace is not None or report is not None:
            raise UnsupportedError(
                "trace and report are for plans; of a model the dict has moments and arena, and no files are written"
            )
        return predict_step(plan, example_inputs, **step)
    if example_inputs is not None or step:
        names = ", ".join(["example_inputs"] * (example_inputs is not None) + list(step))
        raise TypeError(f"dryrun of a plan does not take {names}: that is for a model")
    paths = [None if path is None else os.fspath(path) for path in (trace, report)]
    try:
        figures = json.loads(_deepwell.dryrun(_text_of(plan), *paths, None))
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None
    figures["trace"], figures["report"] = paths
    return figures
