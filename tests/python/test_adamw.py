"""deepwell.AdamW against torch.optim.AdamW: on the CPU, and by the kernels for GPUs on an emulated one."""

from __future__ import annotations

import copy
import itertools

import deepwell
import pytest
import torch
from deepwell import _deepwell, optim


@pytest.fixture(params=["cpu", "emulator:sm_90a"])
def place(request, monkeypatch):
    if request.param != "cpu":
        if not _deepwell.jit_compiler():
            pytest.skip("the kernels need NVRTC")
        monkeypatch.setattr(optim, "emulated", request.param)
    return request.param


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 13), (1,), (0,), (33,), (5000,)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made[0] = made[0].t()  # dense in another order
    return [torch.nn.Parameter(each) for each in made]


def set_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * scale
        param.grad = torch.empty_like(param).copy_(grad)


def close(ours, theirs, dtype):
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [None, 0.5, 1e6])
def test_steps_agree_with_torch(place, dtype, norm) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}
    our = deepwell.AdamW(
        [{"params": ours[:2]}, {"params": ours[2:], "weight_decay": 0.0}],
        max_grad_norm=norm,
        **options,
    )
    their = torch.optim.AdamW(
        [{"params": theirs[:2]}, {"params": theirs[2:], "weight_decay": 0.0}], **options
    )
    for seed in range(3):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        before = [param.grad.clone() for param in ours]
        our.step()
        assert all(torch.equal(a, p.grad) for a, p in zip(before, ours)), "gradients changed"
        if norm is not None:
            total = torch.nn.utils.clip_grad_norm_(theirs, norm)
            close([our.grad_norm.float()], [total.float()], dtype)
        their.step()
    close(ours, theirs, dtype)
    assert all(our.state[param]["step"].item() == 3 for param in ours)


def test_either_loads_what_the_other_saved(place) -> None:
    first, second = parameters(), parameters()
    our, their = deepwell.AdamW(first, lr=0.01), torch.optim.AdamW(second, lr=0.01)
    for seed in range(4):
        set_gradients(first, seed)
        set_gradients(second, seed)
        our.step()
        their.step()
        if seed == 1:  # each goes on with the other's state
            saved = copy.deepcopy(our.state_dict()), copy.deepcopy(their.state_dict())
            assert saved[0].keys() == saved[1].keys()
            assert saved[0]["param_groups"][0].keys() == saved[1]["param_groups"][0].keys()
            our.load_state_dict(saved[1])
            their.load_state_dict(saved[0])
    close(first, second, torch.float32)


def test_an_infinite_gradient_as_in_torch(place) -> None:
    for value in (float("inf"), float("nan")):
        ours, theirs = parameters(), parameters()
        our = deepwell.AdamW(ours, max_grad_norm=1.0)
        for params in (ours, theirs):
            set_gradients(params, 1)
            params[3].grad[2] = value
        our.step()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        torch.optim.AdamW(theirs).step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_parameters_of_several_kinds_share_a_norm(place) -> None:
    """Parameters that no kernel updates join those that one does."""
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params.append(torch.nn.Parameter(torch.linspace(0, 1, 20, dtype=torch.float64)))
        params.append(torch.nn.Parameter(torch.ones(4, 6)[:, ::2]))
    our = deepwell.AdamW(ours, max_grad_norm=0.5)
    their = torch.optim.AdamW(theirs)
    for seed in range(2):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        our.step()
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        their.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_no_gradients_and_copies() -> None:
    params = parameters()
    our = deepwell.AdamW(params, max_grad_norm=2.0)
    our.step()
    assert not our.state
    assert copy.deepcopy(our).max_grad_norm == 2.0
    with pytest.raises(ValueError, match="max_grad_norm"):
        deepwell.AdamW(params, max_grad_norm=0.0)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_scaled_gradients(monkeypatch, found) -> None:
    """grad_scale and found_inf, as torch.amp.GradScaler sets them for fused optimizers."""
    if not _deepwell.jit_compiler():
        pytest.skip("the kernels need NVRTC")
    monkeypatch.setattr(optim, "emulated", "emulator:sm_90a")
    ours, theirs = parameters(), parameters()
    our, their = deepwell.AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    set_gradients(ours, 1, scale=8.0)
    set_gradients(theirs, 1)
    assert our._step_supports_amp_scaling
    our.grad_scale, our.found_inf = torch.tensor(8.0), torch.tensor(found)
    our.step()
    if found == 0.0:
        their.step()
        close([p.grad for p in ours], [p.grad for p in theirs], torch.float32)
    close(ours, theirs, torch.float32)
    assert {our.state[param]["step"].item() for param in ours} == {1.0 - found}


def test_mixed_types_in_one_group(monkeypatch) -> None:
    if not _deepwell.jit_compiler():
        pytest.skip("the kernels need NVRTC")
    monkeypatch.setattr(optim, "emulated", "emulator:sm_90a")
    ours = parameters() + parameters(torch.bfloat16, seed=1)
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    our = deepwell.AdamW(ours, lr=0.01, eps=1e-3, max_grad_norm=1.0)
    set_gradients(ours, 5)
    set_gradients(theirs, 5)
    our.step()
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.optim.AdamW(theirs, lr=0.01, eps=1e-3).step()
    for a, b in itertools.zip_longest(ours, theirs):
        close([a], [b], a.dtype)
