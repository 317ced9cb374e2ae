"""Helpers of the tests of users' behaviours: a small model and its optimized copy, and a record of
how calls were served.

A test marked ``support(area, behaviour, served, because)`` states how Deepwell serves that behaviour:
"engine", "PyTorch", "engine and PyTorch" or "refused". Its ``support`` fixture reads from the report what
served the model; a test that does not ask it fails. docs/support.md is made of these marks
(scripts/support.py).
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any, Callable

import deepwell
import pytest
import torch
from deepwell.optimize import OptimizedForward, _installed
from torch import nn

SERVED = ("engine", "PyTorch", "engine and PyTorch", "refused")


class Net(nn.Module):
    """Two linear layers and a norm, which are enough for most tests."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.hidden(x)))


def rows(seed: int = 1, count: int = 4) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def optimized(model: nn.Module) -> nn.Module:
    """Returns an optimized copy of ``model``."""
    return deepwell.optimize(copy.deepcopy(model), verbose=False)


def pair(build: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    plain = build()
    return plain, optimized(plain)


BF16_UNIT = 2.0**-8  # the unit roundoff


def close(ours: Any, plain: Any, what: str = "value", unit: float = 0.0) -> None:
    """``unit``: the unit roundoff of a 16-bit type in which the two computed. They round in the same places but add in
    another order, so that about ten roundings on the way to a result may each differ by the unit; twice that much is
    allowed."""
    if ours is None or plain is None:
        assert ours is plain, f"{what}: one is None"
        return
    assert ours.dtype == plain.dtype and ours.shape == plain.shape, what
    if not plain.is_floating_point():
        assert torch.equal(ours, plain), what
        return
    scale = plain.detach().abs().max().item() if plain.numel() else 0.0
    atol = max(1e-5, 20 * unit) * scale + 1e-9
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=atol, msg=what)


def same_grads(ours: nn.Module, plain: nn.Module, unit: float = 0.0) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        close(a.grad, b.grad, name, unit)


def same(
    plain: nn.Module, ours: nn.Module, use: Callable[[nn.Module], Any], unit: float = 0.0
) -> None:
    """Checks that ``use`` gives the same results on both models and leaves the same gradients and
    parameters. ``unit``: as in close()."""
    results = []
    for model in (plain, ours):
        torch.manual_seed(7)
        found = use(model)
        results.append(found if isinstance(found, (list, tuple)) else [found])
    for index, (a, b) in enumerate(zip(results[1], results[0], strict=True)):
        if isinstance(b, torch.Tensor):
            close(a, b, f"result {index}", unit)
        else:
            assert a == b, f"result {index}: {a} and {b}"
    same_grads(ours, plain, unit)
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        close(a.detach(), b.detach(), f"parameter {name}", unit)


def uneven(y: torch.Tensor) -> torch.Tensor:
    """Returns a loss that no norm or softmax before it makes constant."""
    weights = torch.cos(torch.arange(y.numel(), dtype=torch.float64, device=y.device)).to(y.dtype)
    return (torch.sin(2 * y) * weights.view(y.shape)).sum()


def train_step(model: nn.Module, seed: int = 1) -> torch.Tensor:
    """Accumulates gradients and returns the loss."""
    loss = uneven(model(rows(seed)))
    loss.backward()
    return loss.detach()


def engine_calls(model) -> tuple[int, int]:
    """Returns (calls by the engine, calls by PyTorch) over all units of an optimized model."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, OptimizedForward):
            units = forward.session.report._units.values()
            return sum(u.calls for u in units), sum(sum(u.fallbacks.values()) for u in units)
    return 0, 0


def tally(model: nn.Module) -> tuple[int, Counter[str]]:
    """Returns (calls by the engine, calls by PyTorch by reason), including reasons of modules left unchanged."""
    calls, reasons = 0, Counter()
    seen = set()
    for module in model.modules():
        forward = _installed.get(module)
        if isinstance(forward, OptimizedForward) and id(forward.session.report) not in seen:
            seen.add(id(forward.session.report))
            for unit in forward.session.report._units.values():
                calls += unit.calls
                reasons += unit.fallbacks
                alone = unit.left_alone not in (None, "a single operation gains nothing")
                if alone and not unit.captures:
                    reasons[unit.left_alone] += 1
    return calls, reasons


class Support:
    """Compares a marked test's statement about its behaviour with what happened."""

    def __init__(self, area: str, behaviour: str, served: str, because: str = "") -> None:
        assert served in SERVED, f"{served!r} is none of {SERVED}"
        self.served, self.because = served, because
        self.checked = False

    def check(self, *models: nn.Module) -> None:
        self.checked = True
        calls, reasons = 0, Counter()
        for model in models:
            more_calls, more_reasons = tally(model)
            calls, reasons = calls + more_calls, reasons + more_reasons
        text = "\n".join(deepwell.summary(model) for model in models)
        by_engine = self.served in ("engine", "engine and PyTorch")
        by_pytorch = self.served in ("PyTorch", "engine and PyTorch")
        assert (calls > 0) == by_engine, f"{calls} calls of the engine\n{text}"
        assert bool(reasons) == by_pytorch, f"{dict(reasons)}\n{text}"
        if by_pytorch:
            assert self.because, "say why PyTorch runs it"
            assert any(self.because in reason for reason in reasons), f"{dict(reasons)}"

    @contextlib.contextmanager
    def refused(self, kind: type[BaseException]):
        self.checked = True
        assert self.served == "refused" and self.because
        with pytest.raises(kind) as caught:
            yield
        assert self.because in str(caught.value), str(caught.value)
