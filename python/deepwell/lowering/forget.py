"""Frees the part of a trace that torch keeps without need.

torch's own caches keep the ShapeEnv of a trace alive. A ShapeEnv keeps the fake result of every operation that was
traced with symbolic sizes: 1.6 MB for a GPT-2 of two layers. Later traces have other symbols and never use them.
"""

from __future__ import annotations

from typing import Any, Sequence


def forget_results(values: Sequence[Any]) -> None:
    """Drops the fake results of the trace that these fake tensors belong to."""
    for value in values:
        environment = getattr(getattr(value, "fake_mode", None), "shape_env", None)
        results = getattr(environment, "fake_tensor_cache", None)
        if isinstance(results, dict):
            results.clear()
