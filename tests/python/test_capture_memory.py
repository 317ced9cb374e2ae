"""After the model is gone, only torch's own records of the trace remain, without the results."""

from __future__ import annotations

import gc

import deepwell
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def test_results_of_traces_are_dropped(monkeypatch):
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")

    def one(width):
        model = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        deepwell.optimize(model, verbose=False)
        model(torch.randn(6, width)).sum().backward()

    one(7)  # objects that are made once
    gc.collect()
    others = [o for o in gc.get_objects() if type(o) is ShapeEnv]  # captures before this test
    before = len(gc.get_objects())
    for width in (8, 9, 10, 11):
        one(width)
    gc.collect()
    objects = gc.get_objects()
    made = [o for o in objects if type(o) is ShapeEnv and not any(o is other for other in others)]
    kept = [len(o.fake_tensor_cache) for o in made]
    assert sum(kept) == 0, kept
    # 650 with the results; the rest is torch's own record of a trace, which torch keeps.
    assert (len(objects) - before) / 4 < 400
