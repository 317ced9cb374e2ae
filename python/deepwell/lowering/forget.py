"""Drops the part of a trace that torch keeps when it is no longer needed.

Caches of torch's own keep the ShapeEnv of a trace alive, and a ShapeEnv keeps the fake result of every operation
that was traced with symbolic sizes: 1.6 MB for a GPT-2 of two layers. No later trace uses them, since its symbols
are others.
"""

from __future__ import annotations

from typing import Any, Sequence


def forget_results(values: Sequence[Any]) -> None:
    """Drops the fake results behind the trace that these fake tensors are from."""
    for value in values:
        environment = getattr(getattr(value, "fake_mode", None), "shape_env", None)
        results = getattr(environment, "fake_tensor_cache", None)
        if isinstance(results, dict):
            results.clear()
