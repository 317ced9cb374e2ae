"""Gradients at points where a formula that is right elsewhere fails: values on a bound, and
functions that overflow on the branch that is not selected."""

from __future__ import annotations

import copy

import deepwell
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from users import tally

FUNCTIONS = {
    "clamp": lambda y: y.clamp(-1.0, 1.0),
    "clamp from below": lambda y: y.clamp(min=-1.0),
    "clamp between tensors": lambda y: y.clamp(torch.full((5,), -1.0), torch.full((5,), 1.0)),
    "bounds in the wrong order": lambda y: y.clamp(1.0, -1.0),
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "maximum": lambda y: torch.maximum(y, torch.ones(5)),
    "softplus": F.softplus,
}


class Scaled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 5))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight) * 2.0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_at_bounds(name, monkeypatch):
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    x = torch.tensor([-1.0, 0.0, 1.0, 6.0, 100.0]) * torch.tensor(
        [[1.0], [-1.0], [0.5], [float("nan")]]
    )
    plain = Scaled(FUNCTIONS[name])
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    results = []
    for model in (ours, plain):
        y = model(x)
        y.backward(torch.arange(1.0, 21.0).view(4, 5))
        results.append((y.detach(), model.weight.grad))
    assert tally(ours)[0] == 1
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-40, equal_nan=True)
