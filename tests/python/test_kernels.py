"""deepwell.kernels: GEMMs in every precision against FP64, with derived bounds; on an emulated GPU by its kernels."""

import dataclasses
import math
import pathlib
import re

import deepwell as dw
import pytest
import torch
from compilers import needs_compiler
from deepwell import cutlass_kernels, linear, numbers
from deepwell.kernels import cutlass_bindings, gemm
from deepwell.kernels.cutlass_bindings import (
    CutlassConfig,
    CutlassKernel,
    GroupedGEMMKernel,
    KernelProfiler,
    MicroscaleManager,
)
from deepwell.kernels.production_kernels import ProductionKernelManager

TARGET = "emulator:sm_100a"
_ONES = torch.ones(8, 8, dtype=torch.bfloat16)
needs_kernels = pytest.mark.skipif(
    isinstance(linear.gemm(_ONES, _ONES, None, TARGET), str),
    reason="no compiler made PTX of sm_100f",
)
# Half a unit in the last place, relative, and the least rounding error, of subnormal numbers.
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
TINY = {torch.float32: 2**-150, torch.bfloat16: 2**-134, torch.float16: 2**-25}


def values_of(x, precision):
    """Returns the FP64 values of a matrix, quantized along its rows."""
    if precision in ("fp32", "bf16", "fp16"):
        types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return x.to(types[precision]).double()
    if precision == "fp8":
        scale = (x.float().abs().max() / 448).item()
        return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale
    return numbers.dequantize(numbers.quantize(x, precision)).double()


def check(made, a, b, *, extra=None, alpha=1.0, step=2**-23):
    """Checks alpha a b^T + extra against FP64: FP32 sums of k products and three more operations, then one rounding to
    the result's type. A tensor scale's product rounds once more. `step`: the error of a sum's step."""
    exact, size = alpha * (a @ b.t()), abs(alpha) * (a.abs() @ b.abs().t())
    if extra is not None:
        exact, size = exact + extra, size + extra.abs()
    error = (a.shape[1] + 6) * step * size
    error = error + (exact.abs() + error) * UNIT[made.dtype] + TINY[made.dtype]
    assert made.shape == exact.shape
    assert ((made.double() - exact).abs() <= error).all()


def operands(m, n, k, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator) * torch.logspace(-2, 2, k)
    return a.to(dtype), torch.randn(k, n, generator=generator).to(dtype)


def test_scales_of_128_elements_are_refused():
    with pytest.raises(dw.UnsupportedError, match="a single GEMM in fp8-block is not supported"):
        CutlassKernel(CutlassConfig()).initialize(8, 8, 8, "fp8-block")


@pytest.mark.parametrize("precision", [p.value for p in dw.Precision if p.value != "fp8-block"])
def test_gemm_on_the_cpu(precision):
    for m, n, k in [(1, 1, 1), (37, 19, 65), (5, 130, 96)]:
        a, b = operands(m, n, k, seed=m)
        c = torch.randn(m, n)
        kernel = CutlassKernel(CutlassConfig()).initialize(m, n, k, precision)
        x, y = values_of(a, precision), values_of(b.t(), precision)
        check(kernel.gemm(a, b), x, y)
        check(kernel.gemm(a, b, c, 0.5, -2.0), x, y, alpha=0.5, extra=-2.0 * c.double())
        made = kernel.gemm(a.bfloat16(), b.bfloat16())
        assert made.dtype == torch.bfloat16
        scaled = dw.Precision(precision).bits < 16
        assert kernel.backend.startswith("simulated") == scaled
        assert (
            precision.upper() in kernel.backend and kernel.reason == "the operands are on the CPU"
        )
        assert kernel.flops == 2 * m * n * k


@needs_kernels
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_gemm_by_a_kernel(precision):
    """The kernel's result is that of the operands' values: codes, scales and tensor scales arrive as they are."""
    for m, n, k in [(37, 19, 65), (130, 72, 160)]:
        a, b = operands(m, n, k, seed=n)
        c = torch.randn(m, n)
        kernel = CutlassKernel(CutlassConfig(), device=TARGET).initialize(m, n, k, precision)
        x, y = values_of(a, precision), values_of(b.t(), precision)
        check(kernel.gemm(a, b, c, 0.5, -2.0), x, y, alpha=0.5, extra=-2.0 * c.double())
        name = "sm100_gemm_scaled" if dw.Precision(precision).bits < 16 else "sm100_gemm"
        assert kernel.backend == f"kernel {name} on {TARGET}" and kernel.reason is None
        narrow = torch.float16 if precision == "fp16" else torch.bfloat16
        made = kernel.gemm(a, b, c.to(narrow), beta=1.0, out_dtype=narrow)
        assert made.dtype == narrow and kernel.reason is None
        check(made, x, y, extra=c.to(narrow).double())


@needs_kernels
@pytest.mark.parametrize("precision", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_quantizes_to_the_same_bits(precision, dtype):
    for rows, k in [(3, 65), (130, 48)]:
        x = operands(rows, 1, k, dtype)[0]
        ours, theirs = (gemm.operand(x, precision, device=d) for d in (TARGET, None))
        assert ours.tiles is not None and theirs.tiles is None
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.tiles, numbers.swizzle_scales(theirs.scales))
        assert float(ours.factor) == theirs.factor
        assert torch.equal(ours.numbers(), theirs.numbers())


@needs_kernels
def test_calls_without_a_kernel_say_why():
    a, b = operands(4, 8, 32)
    for precision in ("fp32", "mxfp6"):
        kernel = CutlassKernel(device=TARGET).initialize(4, 8, 32, precision)
        check(kernel.gemm(a, b), values_of(a, precision), values_of(b.t(), precision))
        assert precision.upper() in kernel.reason and "torch.matmul" in kernel.backend
    kernel = CutlassKernel(CutlassConfig(use_tcgen05=False), device=TARGET).initialize(4, 8, 32)
    kernel.gemm(a, b)
    assert "without tcgen05" in kernel.reason
    kernel = CutlassKernel(device=TARGET, kernel="cutlass.sm100.nothing").initialize(4, 8, 32)
    kernel.gemm(a, b)
    assert "cutlass.sm100.nothing" in kernel.reason


@pytest.mark.parametrize("precision", ["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("device", [None, pytest.param(TARGET, marks=needs_kernels)])
def test_quantized_operands(precision, device):
    """Pairs and numbers.Quantized are quantized along their last axis, so that b is [n, k]."""
    m, n, k = 9, 24, 64
    a, b = operands(m, n, k)
    kernel = CutlassKernel(CutlassConfig(), device=device)
    assert kernel.initialize(m, n, k, precision, use_microscaling=True) is kernel
    quantize = getattr(MicroscaleManager, f"quantize_{precision}")
    dequantize = getattr(MicroscaleManager, f"dequantize_{precision}")
    pairs = quantize(a), quantize(b.t())
    made = kernel.gemm(*pairs)
    assert made.dtype == torch.float32
    check(made, dequantize(*pairs[0]).double(), dequantize(*pairs[1]).double())
    q = numbers.quantize(b.t(), precision)
    check(kernel.gemm(a, q), values_of(a, precision), numbers.dequantize(q).double())
    assert (kernel.reason is None) == (device is not None and precision != "mxfp6")


def test_wrong_calls_say_what_is_wrong():
    a, b = operands(4, 8, 32)
    made = CutlassKernel().initialize(4, 8, 32, "mxfp8")
    pair = MicroscaleManager.quantize_mxfp8(a)
    cases = [
        (lambda: CutlassConfig(microscale_block_size=64), ValueError, "64.*32"),
        (lambda: CutlassConfig(tmem_residency=False), dw.UnsupportedError, "tensor memory"),
        (lambda: CutlassKernel().gemm(a, b), dw.DeepwellError, "initialize"),
        (lambda: CutlassKernel().initialize(4, 8, 32, "int8"), ValueError, "int8.*mxfp8"),
        (
            lambda: CutlassKernel().initialize(4, 8, 32, "fp8-block"),
            dw.UnsupportedError,
            "a single GEMM in fp8-block.*optimize",
        ),
        (lambda: CutlassKernel().initialize(4, -8, 32), ValueError, "n is -8"),
        (
            lambda: CutlassKernel().initialize(4, 8, 32, "bf16", use_microscaling=True),
            ValueError,
            "use_microscaling.*bf16",
        ),
        (
            lambda: CutlassKernel(CutlassConfig(microscale_block_size=16)).initialize(
                4, 8, 32, "mxfp8"
            ),
            dw.UnsupportedError,
            "blocks of 32",
        ),
        (lambda: made.gemm(a.t(), b), ValueError, r"a has shape \(32, 4\)"),
        (lambda: made.gemm(a, b.t()), ValueError, r"b has shape \(8, 32\): expected \(32, 8\)"),
        (lambda: made.gemm(a, pair), ValueError, "b has codes"),
        (lambda: made.gemm(a, numbers.quantize(b.t(), "nvfp4")), ValueError, "nvfp4.*mxfp8"),
        (lambda: made.gemm(a.double(), b.double()), TypeError, "float64"),
        (lambda: made.gemm(a, b, beta=1.0), ValueError, "c is None"),
        (lambda: made.gemm(a.requires_grad_(), b), dw.UnsupportedError, "gradient"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()
    assert dataclasses.is_dataclass(CutlassConfig) and CutlassConfig() == CutlassConfig(True, True)


@pytest.mark.parametrize("device", [None, pytest.param(TARGET, marks=needs_kernels)])
@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_grouped_gemm(device, precision):
    sizes, n, k = [3, 0, 17, 1], 20, 48
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(sum(sizes), k, generator=generator).bfloat16()
    weights = torch.randn(len(sizes), n, k, generator=generator).bfloat16()
    kernel = GroupedGEMMKernel(CutlassConfig(), device=device)
    kernel.initialize(len(sizes), n, k, precision)
    made = kernel.gemm(a, weights.mT, torch.tensor(sizes))
    assert made.dtype == torch.bfloat16
    start = 0
    for group, size in enumerate(sizes):
        if not size:
            continue
        rows = slice(start, start + size)
        start += size
        check(made[rows], values_of(a[rows], precision), values_of(weights[group], precision))
    assert (kernel.reason is None) == (device is not None)
    assert ("kernel" in kernel.backend) == (device is not None)
    assert kernel.gemm(a[:0], weights.mT, [0] * 4).shape == (0, n)
    for call, words in [
        (lambda: kernel.gemm(a, weights.mT, [1, 2, 3, 4]), "group_sizes"),
        (lambda: kernel.gemm(a, weights, sizes), "expected"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


HOPPER = "emulator:sm_90a"


@pytest.fixture
def quick_first_use(monkeypatch):
    """Leaves out first-use checks, which test_operations_gpu.c runs on the emulator; they would take most of the time."""
    monkeypatch.setenv("DEEPWELL_FIRST_USE_CHECK", "off")


# Tensor cores cut sums off (2^-21 relative to the largest term), as tests/gpu/test_kernels_gpu.py has it.
CUT = 2**-21


def grouped_parts(sizes):
    start = 0
    for group, size in enumerate(sizes):
        yield group, slice(start, start + size)
        start += size


@pytest.mark.parametrize("device", [None, pytest.param(HOPPER, marks=needs_compiler)])
@pytest.mark.parametrize(
    "precision, dtype, n, k, kernel",
    [
        ("bf16", torch.bfloat16, 40, 72, "sm90_segment"),
        ("fp16", torch.float16, 136, 200, "sm90_segment"),
        ("bf16", torch.float32, 24, 40, "sm90_segment"),  # FP32 results of BF16 products
        ("fp32", torch.float32, 40, 24, "segment_linear"),
        ("bf16", torch.bfloat16, 21, 35, "segment_linear"),  # rows that tensor cores cannot load
    ],
)
@pytest.mark.parametrize("turned", [True, False], ids=["weights.mT", "weights"])
def test_grouped_gradients(device, precision, dtype, n, k, kernel, turned, quick_first_use):
    """Results and both gradients, group by group, against FP64: each is one rounding of FP32 sums."""
    sizes = [3, 0, 70, 1, 27]
    draw = torch.Generator().manual_seed(n)
    a = torch.randn(sum(sizes), k, generator=draw).to(dtype).requires_grad_()
    shape = (len(sizes), n, k) if turned else (len(sizes), k, n)
    weights = torch.randn(shape, generator=draw).to(dtype).requires_grad_()
    dy = torch.randn(sum(sizes), n, generator=draw).to(dtype)
    grouped = GroupedGEMMKernel(device=device).initialize(len(sizes), n, k, precision)
    made = grouped.gemm(a, weights.mT if turned else weights, sizes)
    made.backward(dy)
    assert made.dtype == a.grad.dtype == weights.grad.dtype == dtype
    assert weights.grad.is_contiguous()  # as the weights lie
    x, w, d = (values_of(t.detach(), precision) for t in (a, weights, dy))
    w, dw_ = (w, weights.grad) if turned else (w.mT, weights.grad.mT)
    step = 2**-23 if device is None else CUT
    for group, rows in grouped_parts(sizes):
        check(made.detach()[rows], x[rows], w[group], step=step)
        check(a.grad[rows], d[rows], w[group].t(), step=step)
        check(dw_[group], d[rows].t(), x[rows].t(), step=step)
    if device is None:
        assert grouped.reason == "the operands are on the CPU"
        assert "torch.matmul" in grouped.gradient_backend
    else:
        assert grouped.backend == grouped.gradient_backend == f"kernel {kernel} on {device}"
        assert grouped.reason is None


@pytest.mark.parametrize("device", [None, pytest.param(HOPPER, marks=needs_compiler)])
@pytest.mark.parametrize("turned", [True, False], ids=["weights.mT", "weights"])
def test_rows_by_an_index(device, turned, quick_first_use):
    """Tokens that several experts have chosen, and none of them is copied: results and both gradients as of copies."""
    sizes, n, k = [3, 0, 70, 1, 27], 136, 72
    draw = torch.Generator().manual_seed(n)
    rows = torch.randint(0, 40, (sum(sizes),), generator=draw)
    a = torch.randn(40, k, generator=draw).bfloat16().requires_grad_()
    shape = (len(sizes), n, k) if turned else (len(sizes), k, n)
    weights = torch.randn(shape, generator=draw).bfloat16().requires_grad_()
    dy = torch.randn(sum(sizes), n, generator=draw).bfloat16()
    grouped = GroupedGEMMKernel(device=device).initialize(len(sizes), n, k, "bf16")
    made = grouped.gemm(a, weights.mT if turned else weights, sizes, rows=rows)
    made.backward(dy)
    if device is not None:
        assert grouped.backend == grouped.gradient_backend == f"kernel sm90_segment on {device}"
    x, w, d = (values_of(t.detach(), "bf16") for t in (a, weights, dy))
    w, dw_ = (w, weights.grad) if turned else (w.mT, weights.grad.mT)
    step = 2**-23 if device is None else CUT
    dx = torch.zeros(x.shape, dtype=torch.float64)
    for group, part in grouped_parts(sizes):
        check(made.detach()[part], x[rows[part]], w[group], step=step)
        check(dw_[group], d[part].t(), x[rows[part]].t(), step=step)
        dx.index_add_(0, rows[part], d[part] @ w[group])
    # Rows of the gradient are rounded to BF16 before their sum is.
    size = torch.zeros_like(dx)
    for group, part in grouped_parts(sizes):
        size.index_add_(0, rows[part], d[part].abs() @ w[group].abs())
    assert ((a.grad.double() - dx).abs() <= 2**-7 * size).all()
    with pytest.raises(ValueError, match="expected 0 to 39"):
        grouped.gemm(a, weights.mT if turned else weights, sizes, rows=rows + 1000)


@needs_compiler
def test_rows_are_stored_by_an_index_with_weights(quick_first_use):
    """Row r goes to row rows_out[r], times its weight, with one rounding; also rows of no group, which are 0."""
    draw = torch.Generator().manual_seed(7)
    a, weights = (torch.randn(s, generator=draw).bfloat16() for s in [(25, 64), (3, 48, 64)])
    rows, out = (
        torch.randint(0, 25, (50,), generator=draw).int(),
        torch.randperm(50, generator=draw),
    )
    weight = torch.randn(50, generator=draw).bfloat16()
    offsets = torch.tensor([0, 9, 9, 41], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        y, name = gemm.launch_segments(
            HOPPER, a, weights, offsets, dtype, rows_in=rows, rows_out=out.int(), weights=weight
        )
        assert name == "sm90_segment" and (y[out[41:]] == 0).all()
        for group, part in ((0, slice(0, 9)), (2, slice(9, 41))):
            x = a[rows[part]].double() * weight[part, None].double()
            check(y[out[part]], x, weights[group].double(), step=CUT)


@needs_compiler
def test_rows_behind_the_last_group_are_zero(quick_first_use):
    """The kernels read the groups' bounds on their device, where they may leave rows out; NaNs there reach no result."""
    a = torch.randn(50, 64).bfloat16()
    a[30:] = float("nan")
    weights, dy = torch.randn(3, 48, 64).bfloat16(), torch.randn(50, 48).bfloat16()
    offsets = torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    for kernel in ("sm90_segment", "segment_linear"):
        y, name = gemm.launch_segments(HOPPER, a, weights, offsets, a.dtype, kernel=kernel)
        assert name == kernel and (y[30:] == 0).all()
        check(y[:9], a[:9].double(), weights[0].double(), step=CUT)
        check(y[9:30], a[9:30].double(), weights[2].double(), step=CUT)
        dw_, _ = gemm.launch_segments(
            HOPPER, dy, a, offsets, a.dtype, contraction=True, kernel=kernel
        )
        check(dw_[0], dy[:9].t().double(), a[:9].t().double(), step=CUT)
        assert (dw_[1] == 0).all() and dw_.isfinite().all()


@pytest.mark.parametrize("rows, n, k", [(0, 48, 64), (5, 0, 64), (5, 48, 0)])
@pytest.mark.parametrize("kernel", ["sm90_segment", "segment_linear"])
@needs_compiler
def test_empty_groups(quick_first_use, kernel, rows, n, k):
    """A gradient of no rows is 0, and so is a product over nothing."""
    a, b = torch.randn(rows, k).bfloat16(), torch.randn(2, n, k).bfloat16()
    offsets = torch.tensor([0, 0, rows], dtype=torch.int32)
    for x, y, kind in [(a, b, {}), (a, torch.randn(rows, n).bfloat16(), {"contraction": True})]:
        made, name = gemm.launch_segments(HOPPER, x, y, offsets, x.dtype, kernel=kernel, **kind)
        assert name == kernel and (made == 0).all()
        assert made.shape == ((2, k, n) if kind else (rows, n))


def test_what_groups_do_not_support():
    a, b = torch.randn(8, 16), torch.randn(2, 16, 24)
    made = GroupedGEMMKernel().initialize(2, 24, 16, "nvfp4")
    with pytest.raises(dw.UnsupportedError, match="requires a gradient"):
        made.gemm(a.requires_grad_(), b, [3, 5])
    made = GroupedGEMMKernel().initialize(2, 24, 16, "fp32")
    for call, error, words in [
        (lambda: made.gemm(a.double(), b.double(), [3, 5]), TypeError, "float64"),
        (lambda: made.gemm(a, None, [3, 5]), TypeError, "b is NoneType"),
        (lambda: made.gemm(a, b.to("meta"), [3, 5]), ValueError, "b on meta"),
        (lambda: made.gemm(a, b, [3, 4]), ValueError, "2 numbers of rows, 8 together"),
        (lambda: made.gemm(a, b, [-1, 9]), ValueError, "group_sizes"),
        (lambda: made.gemm(a, b), ValueError, "either group_sizes or offsets"),
        (lambda: made.gemm(a, b, offsets=torch.tensor([0, 3, 9]).int()), ValueError, "at most 8"),
        (lambda: made.gemm(a, b, offsets=torch.tensor([0, 3, 8])), ValueError, "int64"),
        (lambda: made.gemm(a, b, offsets=torch.tensor([0, 3]).int()), ValueError, "shape"),
    ]:
        with pytest.raises(error, match=words):
            call()
    y = made.gemm(a, b, [3, 5])
    some = made.gemm(a, b, offsets=torch.tensor([0, 3, 6], dtype=torch.int32))
    assert torch.allclose(some[:6], y[:6], atol=1e-5) and (some[6:] == 0).all()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad,) = torch.autograd.grad(y.square().sum(), a, create_graph=True)
        grad.sum().backward()
    name, why = gemm.launch_segments(
        HOPPER, a.detach(), b, torch.tensor([0, 3, 8]).int(), a.dtype, plain_b=True, kernel="none"
    )
    assert name is None and "none" in why and "expected NULL, or another kernel" in why


def test_microscale_round_trips():
    x = torch.randn(3, 5, 64)
    for name in ("mxfp8", "mxfp6", "mxfp4", "nvfp4"):
        pair = getattr(MicroscaleManager, f"quantize_{name}")(x)
        back = getattr(MicroscaleManager, f"dequantize_{name}")(*pair)
        scale = {"tensor_scale": 1.0} if name == "nvfp4" else {}
        assert torch.equal(back, numbers.dequantize(numbers.quantize(x, name, **scale)))
    with pytest.raises(ValueError, match="even"):
        MicroscaleManager.quantize_mxfp4(x[..., :63])
    with pytest.raises(dw.UnsupportedError, match="16"):
        MicroscaleManager.quantize_mxfp6(x, block_size=16)


def test_profiler_measures_and_invents_nothing():
    a, b = operands(16, 16, 16)
    calls = []

    def op():
        calls.append(1)
        return a @ b

    profile = KernelProfiler.profile_kernel(op, warmup_iterations=2, profile_iterations=5)
    assert len(calls) == 7 and profile["iterations"] == 5 and profile["ms"] > 0
    unknown = ("tflops", "gb_per_s", "sm_efficiency", "tmem_utilization")
    assert all(profile[name] is None for name in unknown)
    op.flops, op.bytes = 2 * 16**3, 3 * 16 * 16 * 4
    profile = KernelProfiler.profile_kernel(op, 0, 3)
    assert math.isclose(profile["tflops"] * profile["ms"] * 1e9, op.flops)
    assert math.isclose(profile["gb_per_s"] * profile["ms"] * 1e6, op.bytes)
    with pytest.raises(ValueError, match="profile_iterations"):
        KernelProfiler.profile_kernel(op, 0, 0)


ACTIVATIONS = {
    None: lambda x: x,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "swiglu": lambda x: (
        torch.nn.functional.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]
    ),
}


@pytest.mark.parametrize("device", [None, pytest.param(TARGET, marks=needs_kernels)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_production_gemm(activation, device):
    """Results and gradients against FP64: each intermediate of the operands' type rounds by 2^-8 (BF16)."""
    generator = torch.Generator().manual_seed(4)
    shapes = (2, 7, 40), (40, 48), (48,)
    tensors = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    manager = ProductionKernelManager(device=device)
    made = manager.gemm(*tensors, activation=activation)
    expected = ACTIVATIONS[activation](exact[0] @ exact[1] + exact[2])
    grad = torch.randn(made.shape, generator=generator).bfloat16()
    assert made.dtype == torch.bfloat16 and made.shape == expected.shape
    made.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in [(made, expected), *((x.grad, y.grad) for x, y in zip(tensors, exact))]:
        off = (ours.double() - theirs).norm() / theirs.norm()
        assert off < 4 * 2**-8
    if device is None:
        assert "torch" in manager.last_kernel and manager.reason == "the operands are on the CPU"
    else:
        assert manager.last_kernel.startswith("kernel sm100_gemm") and manager.reason is None
        assert ("PyTorch's" in manager.last_kernel) == (activation in ("silu", "relu"))


def test_production_gemm_refuses():
    manager = ProductionKernelManager()
    for arguments, words in [
        ((torch.ones(2, 3), torch.ones(3, 4), None, "tanh"), "tanh.*gelu"),
        ((torch.ones(2, 3), torch.ones(4, 3)), r"\(4, 3\)"),
        ((torch.ones(2, 3), torch.ones(3, 4), torch.ones(3)), "bias"),
        ((torch.ones(2, 3), torch.ones(3, 5), None, "swiglu"), "even"),
    ]:
        with pytest.raises(ValueError, match=words):
            manager.gemm(*arguments)


def test_the_alias_has_the_same_names():
    for name in cutlass_bindings.__all__:
        assert getattr(cutlass_kernels, name) is getattr(cutlass_bindings, name)
    assert sorted(cutlass_kernels.__all__) == sorted(cutlass_bindings.__all__)
    for module in (cutlass_kernels, cutlass_bindings):
        with pytest.raises(AttributeError):
            _ = module.NoSuchThing


@needs_kernels
def test_the_document_runs(capsys):
    """Runs all Python blocks of docs/kernels.md in one namespace and compares what they print with their comments."""
    text = (pathlib.Path(__file__).parents[2] / "docs/kernels.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 8
    code = "\n".join(blocks)
    exec(compile(code, "docs/kernels.md", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.findall(r"^print\(.*?\) +# (.*)$", code, re.MULTILINE)
    assert len(shown) == 4 and all(line in printed.splitlines() for line in shown)
