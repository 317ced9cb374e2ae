"""Simulates one training step of a plan, without the hardware that it is for.

    report = deepwell.dryrun("plan.json", trace="trace.json", report="report.html")
    report["step_time_ms"], report["memory_gb"], report["bubble_fraction"]

C code does the work (deepwell/simulate.h). docs/dryrun.md has the rules and the fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepwell import _deepwell
from deepwell.compiled import Engine
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.host_plan import HostPlan
from deepwell.optimize import _unwrap
from deepwell.plans import Plan
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
        f"dryrun needs a plan, the path of a plan's file, a dict with its contents, or a model; not {type(plan).__name__}"
    )


def dryrun(
    plan,
    example_inputs: Any = None,
    trace: str | os.PathLike | None = None,
    report: str | os.PathLike | None = None,
    log: str | os.PathLike | None = None,
    **step: Any,
) -> dict:
    """Simulates one step of `plan`: a plan, the path of its file, or a dict with the file's contents.

    `trace` names a file to write for ui.perfetto.dev, `report` an HTML page. The returned dict has step_time_ms,
    memory_gb, fits, mfu, bubble_fraction, overlap, expected_speedup (None if no usual layout fits), baseline (the
    layout that the speedup is relative to, in words), stages and more, and the paths under "trace" and "report".

    `log` names the log of a Trainer's run of a mixture. "expert_load" then has what the plan assumes of the busiest
    rank of experts, relative to an even share ("planned"), and what the last 100 steps of the log were: mean and largest
    imbalance of the busiest mixture of each step ("mean", "largest"), and their number ("steps"). The log is of single
    experts, so it is an upper bound where a rank has several; "rank" is the mean for the plan's ranks, if experts are
    loaded independently of one another.

    `dryrun(model, example_inputs)` predicts one training step on Deepwell's own engine, as `deepwell.optimize` would
    run it on a call with such arguments. Nothing is computed; model and arguments may be on the meta device.
    `example_inputs`: a tuple of positional or a dict of keyword arguments; None: token ids, for a Hugging Face model.
    The dict has peak_bytes, memory_gb (10^9 bytes) and memory_gib of the step, peak, moments (what is held in forward,
    in each part of backward, and in the update), arena and fits. Further arguments:

        target         "auto": where the model is, or the GPU that hw names; "cpu"; "sm_90a" (a Hopper GPU, which need
                       not be there); "emulator:sm_90a"
        optimizer      "adamw_dw", "adamw" or "adamw_fused" (torch.optim.AdamW, with fused=True), such an optimizer or
                       its class, or None
        precision      as for optimize
        accumulate     True: gradients are added to those of earlier micro-batches
        quantize_once  True: the codes of weights are kept for all micro-batches, as in `deepwell.accumulate` and Trainer;
                       None: if accumulate is True
        keep_outputs   True: the caller holds all outputs until the step ends (the default if there is no loss)
        threads        number of threads
        hw             hardware whose memory the step must fit into, "h200" say; None: this machine

    docs/engine.md says what is counted, docs/dryrun.md what there is on a GPU.

    `dryrun(engine)` of what `deepwell.compile` returns is the dry run of its plan, or the memory of its step on this
    machine if it has none, with the same fields and None for what is not known. "measured" is what `engine.profile`
    measured, or None.
    """
    if log is not None and isinstance(plan, (Engine, HostPlan, torch.nn.Module)):
        raise UnsupportedError(
            "log needs a plan, whose assumption is compared with it: give the plan or its file"
        )
    if isinstance(plan, Engine):
        return _of_engine(plan, example_inputs, trace, report, step)
    if isinstance(plan, HostPlan):
        raise UnsupportedError(
            "a plan for Deepwell's engine has no schedule to simulate: use dryrun(model, example_inputs) for its memory"
        )
    if isinstance(plan, torch.nn.Module):
        if trace is not None or report is not None:
            raise UnsupportedError(
                "trace and report need a plan; for a model the dict has moments and arena, and no files are written"
            )
        return predict_step(plan, example_inputs, **step)
    if example_inputs is not None or step:
        names = ", ".join(["example_inputs"] * (example_inputs is not None) + list(step))
        raise TypeError(f"dryrun of a plan does not accept {names}, which needs a model")
    paths = [None if path is None else os.fspath(path) for path in (trace, report)]
    text = _text_of(plan)
    try:
        figures = json.loads(_deepwell.dryrun(text, *paths, None))
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None
    figures["trace"], figures["report"] = paths
    if log is not None:
        figures["expert_load"] = _loads_of(text, figures, log)
    return figures


_LOGGED_STEPS = 100


def _loads_of(plan: str, figures: dict[str, Any], log: str | os.PathLike) -> dict[str, Any]:
    """Returns the load of experts that a plan assumes, and that of the last steps of a log."""
    loads = []
    try:
        with open(log, encoding="utf-8") as file:
            for line in file:
                experts = json.loads(line).get("experts")
                if experts:
                    loads.append(max(each["imbalance"] for each in experts.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeepwellError(f'cannot read the log "{os.fspath(log)}": {error}') from None
    if not loads:
        raise DeepwellError(
            f'the log "{os.fspath(log)}" has no load of experts; expected the log of a Trainer whose model has mixtures of '
            "experts (docs/moe.md)"
        )
    loads = loads[-_LOGGED_STEPS:]
    mean = sum(loads) / len(loads)
    # Loads of experts that share a rank add up. Where they are independent, their sum deviates less, by the root of
    # their number.
    each = max(1, figures["model"]["experts"] // figures["layout"]["ep"])
    return {
        "planned": figures["planned_expert_load"],
        "mean": mean,
        "largest": max(loads),
        "rank": 1 + (mean - 1) / math.sqrt(each),
        "steps": len(loads),
    }


# Fields that a dry run of any engine has.
_FIELDS = (
    "memory_gb", "step_time_ms", "expected_speedup", "baseline", "bubble_fraction", "mfu", "overlap", "fits",
    "capacity_gb", "trace", "report",
)  # fmt: skip


def _of_engine(
    engine: Engine, example_inputs: Any, trace: Any, report: Any, step: dict[str, Any]
) -> dict[str, Any]:
    plan = engine.plan
    if isinstance(plan, Plan):
        figures = dryrun(plan, example_inputs, trace, report, **step)
        figures["planned_for"] = f"{plan.layout.gpus} x {plan.hardware.name}"
    elif trace is not None or report is not None:
        raise UnsupportedError(
            "trace and report need a plan for GPUs; engine.profile(trace=...) writes what a step of this engine does"
        )
    else:
        figures = _host_step(engine, plan, example_inputs, step)
        figures["planned_for"] = None
    measured = engine.measured
    if measured is not None:
        names = ("step_time_ms", "forward_ms", "backward_ms", "device", "engine_runs")
        measured = {name: measured[name] for name in names}
    return {**dict.fromkeys(_FIELDS), "basis": "predicted", **figures, "measured": measured}


def _host_step(
    engine: Engine, plan: HostPlan | None, example_inputs: Any, step: dict[str, Any]
) -> dict[str, Any]:
    """Returns the memory of a step on this machine: by the plan, or at the sizes of the example inputs."""
    if plan is not None and example_inputs is None and not step:
        return {
            "model": plan.model_name,
            "sizes": {"B": plan.layout.micro_batch, "S": plan.layout.seq_len},
            "peak_bytes": plan.peak_bytes,
            "memory_gb": plan.memory_gb,
            "memory_gib": plan.memory_gib,
            "peak": plan.peak,
            "capacity_gb": plan.capacity_gb,
            "fits": plan.fits,
        }
    if example_inputs is None and engine.ir is None:
        raise DeepwellError(
            "this engine has no example inputs, because the model was not captured: pass example_inputs"
        )
    known = engine.ir if example_inputs is None else None
    call = engine.ir.arguments if example_inputs is None else example_inputs
    return predict_step(
        _unwrap(engine.model), call, **{"precision": engine.precision, "ir": known, **step}
    )
