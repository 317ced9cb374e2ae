"""Outputs share memory exactly where PyTorch's do, so writes in place are seen in the same
places."""

from __future__ import annotations

import copy

import deepwell
import pytest
import torch
from torch import nn
from users import tally

pytestmark = pytest.mark.usefixtures("always")


class Model(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("table", torch.arange(6.0))
        self.returns = returns

    def forward(self, x):
        return self.returns(self, x, torch.tanh(self.lin(x)) * 2.0)


SHARED = {
    "reshaped": lambda m, x, h: (h, h.view(-1)),
    "the view first": lambda m, x, h: (h.view(-1, 3), h),
    "a row and a transposed view": lambda m, x, h: (h, h[1], h.t(), h[:, 2:4]),
    "every second": lambda m, x, h: (h[::2], h),
    "detached": lambda m, x, h: (h, h.detach(), h.detach()[0]),
    "broadcast": lambda m, x, h: (h, h[:1].expand(3, 6)),
    "a scalar": lambda m, x, h: (h.mean(), h.mean().detach()),
    "a loss and itself detached": lambda m, x, h: (lambda s: (s, s.detach()))(h.mean()),
    "chunks": lambda m, x, h: h.chunk(2, dim=-1),
    "cloned": lambda m, x, h: (h, h.clone(), h.view(-1).clone()),
    "an argument cloned": lambda m, x, h: (h, x.clone(), x),
    "one tensor twice": lambda m, x, h: (h, h),
    "a parameter, and it cloned": lambda m, x, h: (h, m.lin.weight, m.lin.weight.clone()),
    "a buffer": lambda m, x, h: (h, m.table),
}

IN_PYTORCH = {
    "a view of an argument": (lambda m, x, h: (h, x.view(-1)), "argument number 0"),
    "a view of a parameter": (lambda m, x, h: (h, m.lin.weight.t()), "'lin.weight'"),
    "a view of a buffer": (lambda m, x, h: (h, m.table[1:]), "'table'"),
    "overlapping parts of a tensor that is none": (lambda m, x, h: (h[:3], h[2:]), "output 0"),
}


def outputs_that_change(model, rows):
    """For each output (and the argument), returns the tensors that change when 1 is added to it."""
    x = torch.linspace(-2, 2, 6 * rows).view(rows, 6)
    with torch.no_grad():
        count = len(model(x))
    seen = []
    for position in range(count + 1):
        given = x.clone()
        with torch.no_grad():
            tensors = [*model(given), given, model.lin.weight, model.table]
            before = [t.clone() for t in tensors]
            tensors[position].add_(1.0)
        seen.append([not torch.equal(t, was) for t, was in zip(tensors, before)])
        with torch.no_grad():
            tensors[position].sub_(1.0)
    return seen


# PyTorch rejects writes to a broadcast tensor.
@pytest.mark.parametrize("name", [*[name for name in SHARED if name != "broadcast"], *IN_PYTORCH])
def test_in_place_writes_are_visible_as_in_pytorch(name):
    returns = SHARED.get(name) or IN_PYTORCH[name][0]
    plain = Model(returns)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    for rows in (4, 5):
        assert outputs_that_change(ours, rows) == outputs_that_change(plain, rows)
    calls, reasons = tally(ours)
    if name in SHARED:
        assert calls and not reasons
    else:
        assert not calls and any(IN_PYTORCH[name][1] in reason for reason in reasons), reasons


@pytest.mark.parametrize("name", SHARED)
def test_values_and_gradients(name):
    plain = Model(SHARED[name])
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    results = []
    for model in (ours, plain):
        x = torch.linspace(-2, 2, 24).view(4, 6).requires_grad_()
        found = model(x)
        loss = sum(
            (y * torch.cos(torch.arange(y.numel())).view(y.shape)).sum()
            for y in found
            if y.requires_grad
        )
        loss.backward()
        results.append(
            (
                [y.detach() for y in found],
                [y.requires_grad for y in found],
                x.grad,
                model.lin.weight.grad,
            )
        )
    (ys, flags, *grads), (plain_ys, plain_flags, *plain_grads) = results
    assert flags == plain_flags
    for a, b in zip([*ys, *grads], [*plain_ys, *plain_grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert a.shape == b.shape and a.stride() == b.stride() or name == "chunks"


def test_a_write_before_backward_is_differentiated():
    """b is a view of a. An addition to b changes a, and autograd tracks it."""
    plain = Model(lambda m, x, h: (h, h.view(-1)))
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    grads = []
    for model in (ours, plain):
        a, b = model(torch.linspace(-2, 2, 24).view(4, 6))
        b[3:9] *= 3.0
        (a * a).sum().backward()
        grads.append(model.lin.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
