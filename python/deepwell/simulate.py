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

from deepwell import _deepwell
from deepwell.errors import DeepwellError


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
        f"dryrun takes a plan, the path of a plan's file, or the dict that is in one; not {type(plan).__name__}"
    )


def dryrun(
    plan, trace: str | os.PathLike | None = None, report: str | os.PathLike | None = None
) -> dict:
    """Plays one step of `plan`: a plan, its file's path, or the dict that is in the file.

    `trace` is a file to write for ui.perfetto.dev, `report` an HTML page. The dict that comes back has step_time_ms,
    memory_gb, fits, mfu, bubble_fraction, overlap, expected_speedup ({"bf16": ..., "unplanned": ...}, None where there is
    nothing to compare with), stages and more, and the paths under "trace" and "report".
    """
    paths = [None if path is None else os.fspath(path) for path in (trace, report)]
    try:
        figures = json.loads(_deepwell.dryrun(_text_of(plan), *paths, None))
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None
    figures["trace"], figures["report"] = paths
    return figures
