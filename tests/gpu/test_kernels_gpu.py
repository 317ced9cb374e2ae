"""deepwell.kernels and `deepwell bench` on a GPU. tests/python/test_kernels.py has the same on the CPU and the emulator."""

from __future__ import annotations

import contextlib
import json

import deepwell as dw
import pytest
import torch
from deepwell import bench, numbers
from deepwell.kernels.cutlass_bindings import (
    CutlassConfig,
    CutlassKernel,
    GroupedGEMMKernel,
    KernelProfiler,
    MicroscaleManager,
)
from deepwell.kernels.production_kernels import ProductionKernelManager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def close(made: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """FP32 sums of k products, which tensor cores may cut off (2^-21 instead of 2^-24), and one rounding."""
    exact, size = a @ b.t(), a.abs() @ b.abs().t()
    unit = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}[made.dtype]
    error = a.shape[1] * 2**-21 * size
    assert ((made.double().cpu() - exact).abs() <= error + (exact.abs() + error) * unit).all()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemm(precision, dtype):
    m, n, k = 70, 136, 192
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    kernel = CutlassKernel(CutlassConfig()).initialize(m, n, k, precision)
    made = kernel.gemm(a.cuda(), b.cuda().t())
    assert made.dtype == dtype and made.device.type == "cuda" and kernel.backend
    if precision in ("bf16", "fp16"):
        narrow = torch.bfloat16 if precision == "bf16" else torch.float16
        close(made, a.to(narrow).double(), b.to(narrow).double())
    else:
        x, y = (numbers.dequantize(numbers.quantize(t, precision)).double() for t in (a, b))
        close(made, x, y)


def test_pairs_and_groups():
    a, b = torch.randn(24, 64).cuda(), torch.randn(40, 64).cuda()
    pairs = MicroscaleManager.quantize_mxfp8(a), MicroscaleManager.quantize_mxfp8(b)
    assert all(x.device.type == "cuda" for pair in pairs for x in pair)
    kernel = CutlassKernel().initialize(24, 40, 64, dw.Precision.MXFP8)
    values = [MicroscaleManager.dequantize_mxfp8(*pair).double().cpu() for pair in pairs]
    close(kernel.gemm(*pairs), *values)
    weights = torch.randn(3, 40, 64).cuda().bfloat16()
    rows = a.bfloat16()
    made = GroupedGEMMKernel().initialize(3, 40, 64).gemm(rows, weights.mT, [20, 0, 4])
    close(made[:20], rows[:20].double().cpu(), weights[0].double().cpu())
    close(made[20:], rows[20:].double().cpu(), weights[2].double().cpu())


@pytest.mark.parametrize(
    "precision, dtype, n, k",
    [
        ("bf16", torch.bfloat16, 2048, 1024),
        ("fp16", torch.float16, 136, 200),
        ("bf16", torch.float32, 256, 512),
        ("fp32", torch.float32, 264, 136),
        ("bf16", torch.bfloat16, 21, 35),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["sizes", "sizes on the GPU"])
def test_grouped_gradients(precision, dtype, n, k, known):
    """Results and both gradients, group by group, against FP64. Sizes on the GPU leave the last rows without a group."""
    sizes = [300, 0, 77, 1, 513, 128]
    rest = 0 if known else 45
    rows = sum(sizes) + rest
    a = torch.randn(rows, k).to(dtype).cuda().requires_grad_()
    weights = torch.randn(len(sizes), n, k).to(dtype).cuda().requires_grad_()
    dy = torch.randn(rows, n).to(dtype)
    kernel = GroupedGEMMKernel().initialize(len(sizes), n, k, precision)
    given = sizes if known else torch.tensor(sizes).cuda()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    grad = dy.cuda()
    with waits_raise(not known and hopper):
        made = kernel.gemm(a, weights.mT, given)
        made.backward(grad)
    if hopper:
        assert kernel.reason is None and kernel.backend == kernel.gradient_backend
        assert ("sm90_segment" in kernel.backend) == (precision != "fp32" and n % 8 == 0)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    x, w, d = (t.detach().cpu().to(narrow).double() for t in (a, weights, dy))
    start = 0
    for group, size in enumerate(sizes):
        part = slice(start, start + size)
        start += size
        close(made.detach()[part].cpu(), x[part], w[group])
        close(a.grad[part].cpu(), d[part], w[group].t())
        close(weights.grad[group].cpu(), d[part].t(), x[part].t())
    assert (made[start:] == 0).all() and (a.grad[start:] == 0).all()


@contextlib.contextmanager
def waits_raise(on: bool):
    """Makes PyTorch raise where it waits for the GPU."""
    if on:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dropped_rows_reach_nothing():
    """torch.nn.functional.grouped_mm leaves rows behind the last group undefined, forward and backward."""
    torch.manual_seed(3)
    made = dw.DeepwellMoE(64, 48, 8, 2, 0.5, score_correction_bias=True).cuda().bfloat16()
    exact = dw.DeepwellMoE(64, 48, 8, 2, 0.5, score_correction_bias=True)
    exact.load_state_dict({k: v.float().cpu() for k, v in made.state_dict().items()})
    x = torch.randn(4, 64, 64).bfloat16()
    own, wide = x.cuda().requires_grad_(), x.float().requires_grad_()
    made(own).float().square().sum().backward()
    exact(wide).square().sum().backward()
    assert made.statistics()["tokens"] == exact.statistics()["tokens"]
    assert made.statistics()["dropped"] == exact.statistics()["dropped"] > 0.3
    pairs = [(own.grad, wide.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(made.parameters(), exact.parameters())]
    for ours, theirs in pairs:
        # Some ten roundings to BF16 between a parameter and its gradient.
        assert (ours.cpu().float() - theirs).norm() <= 16 * 2**-8 * theirs.norm()


def test_production_gemm_and_profiler():
    a = torch.randn(65, 128).cuda().bfloat16().requires_grad_()
    b = torch.randn(128, 96).cuda().bfloat16().requires_grad_()
    manager = ProductionKernelManager()
    made = manager.gemm(a, b, activation="gelu")
    made.float().sum().backward()
    x, y = (t.detach().double().requires_grad_() for t in (a, b))
    expected = torch.nn.functional.gelu(x @ y)
    expected.sum().backward()
    for ours, theirs in ((made, expected), (a.grad, x.grad), (b.grad, y.grad)):
        assert (ours.double() - theirs).norm() <= 4 * 2**-8 * theirs.norm()
    profile = KernelProfiler.profile_kernel(
        lambda: manager.gemm(a, b), 2, 5, flops=2 * 65 * 96 * 128
    )
    assert profile["ms"] > 0 and profile["tflops"] > 0 and profile["sm_efficiency"] is None
    assert profile["device"] == torch.cuda.get_device_name()


@pytest.mark.parametrize(
    "arguments",
    [
        ["gemm", "--size", "256,256,256", "--precision", "mxfp8"],
        ["attention", "--seq-len", "256"],
        ["step", "--model", "tiny", "--seq-len", "64"],
        ["moe", "--hidden", "128", "--width", "64", "--tokens", "512", "--load", "skewed"],
    ],
)
def test_bench(arguments, capsys):
    assert bench.main([*arguments, "--iterations", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == torch.cuda.get_device_name() and result["speedup"] > 0
    assert result["pytorch"]["peak_memory_bytes"] > 0
