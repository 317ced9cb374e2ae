"""Updates during backward (release_gradients) against updates after it."""

from __future__ import annotations

import copy

import deepwell
import pytest
import torch

WIDTH, LAYERS = 48, 6


def make_model():
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        for _ in range(LAYERS)
    ]
    return torch.nn.Sequential(*blocks)


def optimizer_of(kind, model):
    if kind == "muon":
        return deepwell.Muon(model, lr=0.01, state_dtype=torch.bfloat16)
    formats = {"plain": {}, "8bit": {"state_dtype": "8bit"}}[kind]
    return deepwell.AdamW(model.parameters(), lr=0.01, **formats)


def train(model, optimizer, passes=1, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(passes):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
            model(x).square().mean().backward()
        optimizer.step()


def states_equal(first, second, params):
    for a, b in params:
        assert torch.equal(a, b)
        for name, value in first.state[a].items():
            assert torch.equal(value.float(), second.state[b][name].float()), name


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "8bit", "muon"])
def test_same_bits_as_without_release(kind, passes, engine) -> None:
    model = make_model()
    other = copy.deepcopy(model)
    if engine:
        deepwell.optimize(model, verbose=False)
        deepwell.optimize(other, verbose=False)
    first, second = optimizer_of(kind, model), optimizer_of(kind, other)
    second.release_gradients(passes, pending_bytes=20_000)
    train(model, first, passes)
    train(other, second, passes)
    states_equal(first, second, list(zip(model.parameters(), other.parameters(), strict=True)))
    assert all(param.grad is None for param in other.parameters())


@pytest.mark.parametrize("pending", [0, 50_000, 1 << 30])
def test_gradients_that_exist_at_once(pending) -> None:
    """At most `pending` bytes and the gradient that exceeds them, which is added before the update."""
    model = make_model()
    params = list(model.parameters())
    optimizer = deepwell.AdamW(params, lr=0.01, state_dtype="8bit")
    most, calls = 0, 0
    held = []

    def count(_param):
        nonlocal most
        most = max(most, sum(param.grad.nbytes for param in params if param.grad is not None))

    for param in params:
        held.append(param.register_post_accumulate_grad_hook(count))
    update = optimizer._update

    def counted(found):
        nonlocal calls
        calls += 1
        update(found)

    optimizer._update = counted
    handle = optimizer.release_gradients(pending_bytes=pending)
    model(torch.ones(3, WIDTH)).sum().backward()
    every = sum(param.nbytes for param in params)
    largest = max(param.nbytes for param in params)
    assert most <= min(every, pending + largest)
    assert calls == {0: len(params), 1 << 30: 1}.get(pending, calls)
    assert calls <= every // max(pending, 1) + 1 or pending == 0
    assert all(param.grad is None for param in params)
    optimizer.step()
    handle.remove()
    model(torch.ones(3, WIDTH)).sum().backward()
    assert all(param.grad is not None for param in params)


def test_what_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="max_grad_norm"):
        deepwell.AdamW(model.parameters(), max_grad_norm=1.0).release_gradients()
    optimizer = deepwell.AdamW(model.parameters())
    with pytest.raises(ValueError, match="accumulation is 0"):
        optimizer.release_gradients(0)
    handle = optimizer.release_gradients()
    with pytest.raises(RuntimeError, match="already"):
        optimizer.release_gradients()
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="accumulation=1"):
        model(x).sum().backward()
    optimizer.step()
    model.zero_grad()
    model(x).sum().backward()
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(RuntimeError, match="GradScaler"):
        optimizer.step()
    del optimizer.grad_scale
    optimizer.step()
    handle.remove()
    optimizer.release_gradients(2)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="1 of 2"):
        optimizer.step()
    optimizer.zero_grad()
    model(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()
    assert not optimizer._release.passes


def test_parameters_with_fewer_passes_and_groups_that_join() -> None:
    """A parameter with a gradient in one of two passes is updated by step(), as one that no hook has seen."""
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = deepwell.AdamW([a], lr=0.1, weight_decay=0.0)
    optimizer.release_gradients(2)
    optimizer.add_param_group({"params": [b]})
    (a.sum() + b.sum()).backward()
    a.sum().backward()
    assert a.grad is None and b.grad is not None
    optimizer.step()
    assert b.grad is None
    for param in (a, b):
        assert torch.allclose(param, torch.full((3,), 0.9))
