"""deepwell.AdamW on a GPU against torch.optim.AdamW(fused=True). tests/python/test_adamw.py tests the same kernels on
the emulator."""

from __future__ import annotations

import copy

import deepwell
import pytest
import torch
from deepwell import optim

supported = torch.cuda.is_available() and torch.cuda.get_device_capability() in optim.CAPABILITIES
pytestmark = pytest.mark.skipif(not supported, reason="needs a Hopper or Blackwell GPU")

SHAPES = [(513, 768), (768,), (1,), (0,), (7,), (8,), (1023,), (4097,)] + [(64,)] * 150


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SHAPES]


def set_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        grad = torch.randn_like(param)
        param.grad = grad if param.grad is None else param.grad.copy_(grad)


def pair(dtype: torch.dtype, **options):
    ours, theirs = parameters(dtype), parameters(dtype)
    our = deepwell.AdamW(ours, lr=0.01, eps=1e-6, **options)
    return ours, theirs, our, torch.optim.AdamW(theirs, lr=0.01, eps=1e-6, fused=True)


def close(ours, theirs, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}[dtype]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [None, 3.0])
def test_steps_agree_with_fused(dtype, norm) -> None:
    ours, theirs, our, their = pair(dtype, max_grad_norm=norm)
    for seed in range(3):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        our.step()
        if norm is not None:
            total = torch.nn.utils.clip_grad_norm_(theirs, norm)
            torch.testing.assert_close(our.grad_norm, total.float(), rtol=1e-2, atol=0.0)
        their.step()
    assert our.__dict__.get("_workspaces"), "the kernels did not run"
    close(ours, theirs, dtype)


def test_bits_repeat() -> None:
    runs = []
    for _ in range(2):
        ours, _, our, _ = pair(torch.bfloat16, max_grad_norm=1.0)
        for seed in range(3):
            set_gradients(ours, seed)
            our.step()
        runs.append(ours)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_captured_step_advances() -> None:
    ours, theirs, our, their = pair(torch.bfloat16)
    lr = torch.tensor(0.01, device="cuda")
    our.param_groups[0]["lr"] = lr
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    our.step()  # loads and checks the kernels
    their.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        our.step()
    for seed in range(1, 4):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        lr.fill_(0.01 * seed)
        their.param_groups[0]["lr"] = 0.01 * seed
        graph.replay()
        their.step()
    close(ours, theirs, torch.bfloat16)
    assert {our.state[param]["step"].item() for param in ours} == {4.0}


def test_states_are_exchanged_with_fused() -> None:
    ours, theirs, our, their = pair(torch.float32)
    for seed in range(4):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        our.step()
        their.step()
        if seed == 1:
            saved = copy.deepcopy(our.state_dict()), copy.deepcopy(their.state_dict())
            assert saved[0]["param_groups"][0]["fused"] is True
            our.load_state_dict(saved[1])
            their.load_state_dict(saved[0])
    close(ours, theirs, torch.float32)


@pytest.mark.parametrize("bad", [False, True])
def test_grad_scaler(bad) -> None:
    ours, theirs, our, their = pair(torch.float32)
    for params, optimizer in ((ours, our), (theirs, their)):
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        scaler.scale(torch.ones((), device="cuda"))
        set_gradients(params, 1)
        if bad:
            params[0].grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    close(ours, theirs, torch.float32)
    assert our.state[ours[0]]["step"].item() == their.state[theirs[0]]["step"].item()


def test_a_step_does_not_wait() -> None:
    ours, _, our, _ = pair(torch.bfloat16, max_grad_norm=1.0)
    set_gradients(ours, 0)
    our.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        our.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- states in fewer bits, Muon, gradient release: the CPU's bits and the same memory ----------------


def run_formats(device: str, dtype: torch.dtype, **options):
    params = [torch.nn.Parameter(param.detach().to(device)) for param in parameters(dtype)[:12]]
    optimizer = deepwell.AdamW(params, lr=0.01, weight_decay=0.1, **options)
    for seed in range(3):
        torch.manual_seed(seed)
        for param in params:
            grad = torch.randn(param.shape) * torch.exp(2 * torch.randn(param.shape))
            param.grad = grad.to(dtype).to(device)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_have_the_bits_of_the_cpu(dtype, kind, master) -> None:
    options = {
        "state_dtype": kind,
        "stochastic_rounding": True,
        "master_weights": master,
        "seed": 9,
    }
    on_cpu, cpu = run_formats("cpu", dtype, **options)
    on_gpu, gpu = run_formats("cuda", dtype, **options)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(a, b.cpu())
        for name, value in cpu.state[a].items():
            assert torch.equal(value.float(), gpu.state[b][name].cpu().float()), name


@pytest.mark.parametrize("kind", [torch.bfloat16, "8bit"])
def test_a_captured_step_draws_new_bits(kind) -> None:
    """Replays give the bits of steps: the random bits follow the count of steps on the GPU."""
    runs = []
    for captured in (False, True):
        ours, _, our, _ = pair(torch.bfloat16, state_dtype=kind)
        set_gradients(ours, 0)
        our.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                our.step()
        for seed in range(1, 4):
            set_gradients(ours, seed)
            graph.replay() if captured else our.step()
        runs.append(ours)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_muon_agrees_with_torch() -> None:
    first = parameters(torch.float32)[0].detach()
    ours, theirs = ([torch.nn.Parameter(first.clone()) for _ in range(3)] for _ in range(2))
    our = deepwell.Muon([(f"layer.{i}", p) for i, p in enumerate(ours)], lr=0.02)
    their = torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn="match_rms_adamw")
    for seed in range(2):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        our.step()
        their.step()
    for a, b in zip(ours, theirs, strict=True):
        # As in tests/python/test_muon.py: roundings of products in bfloat16.
        assert (a - b).abs().max() <= 2 * 0.02 * 0.2 * max(a.shape) ** 0.5 * 8 * 2.0**-8


def test_released_gradients_leave_memory() -> None:
    """16 layers of 16 MiB: with release, at most two gradients and a layer's activations exist beside the weights."""
    peaks = []
    for released in (False, True):
        model = torch.nn.Sequential(
            *[torch.nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(16)]
        )
        optimizer = deepwell.AdamW(model.parameters(), lr=1e-3, state_dtype="8bit")
        if released:
            optimizer.release_gradients(pending_bytes=0)
        for _ in range(2):
            optimizer.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(torch.ones(8, 2048, device="cuda")).sum().backward()
            optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, optimizer
    weight = 2048 * 2048 * 4
    assert peaks[0] > 15 * weight and peaks[1] < 4 * weight
