"""Parts of a mixture of experts, for `deepwell bench moe`: its grouped GEMMs beside PyTorch's, and what routing, sorting
and combining cost on both sides. Calls of both sides take turns; medians count."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from deepwell import routing, step_profile
from deepwell.kernels.cutlass_bindings import GroupedGEMMKernel
from deepwell.kernels.profiler import times_ms
from deepwell.moe import DeepwellMoE

LOADS = ("random", "even", "skewed")
_WARMUP, _IN_A_ROW = 2, 5
# Parts of the engine's time: (part, phase or None for both, operations).
_PARTS = (
    ("sort", None, {"group_rows"}),
    ("spread", "forward", {"spread_rows"}),
    ("experts, forward", "forward", {"segment_linear", "grouped_linear"}),
    ("experts, data gradient", "backward", {"segment_linear"}),
    ("experts, weight gradient", None, {"segment_linear_backward_weight"}),
    ("combine", "forward", {"combine_rows"}),
    ("combine and spread, backward", "backward", {"combine_rows", "combine_rows_backward", "spread_rows"}),
)  # fmt: skip
_REST = "routing, activation and the rest"


def give_load(layer: DeepwellMoE, x: torch.Tensor, load: str) -> None:
    """Moves the router's correction bias until experts have equal shares of the choices ("even"), or shares in
    proportion to 1, 1/2, 1/3 and so on ("skewed"). "random" leaves the bias at 0."""
    bias = layer.gate.e_score_correction_bias
    wanted = torch.ones_like(bias)
    if load == "skewed":
        wanted = 1.0 / torch.arange(1, len(bias) + 1, device=bias.device)
    # An expert gets a token once at most, so that no share is above 1 / top_k.
    share = wanted / wanted.sum()
    rate = 0.02
    with torch.no_grad():
        for _ in range(100 if load != "random" else 0):
            _, _, chosen, _ = layer.gate(x)
            found = torch.bincount(chosen.reshape(-1), minlength=len(bias)) / chosen.numel()
            bias += rate * torch.sign(share - found)
            rate *= 0.97


@dataclasses.dataclass
class _Product:
    """One of the six grouped GEMMs of a layer: rows of the groups in `sizes`."""

    name: str
    flops: float
    deepwell: Callable[[], torch.Tensor]
    pytorch: Callable[[], torch.Tensor]


def _products(
    name: str, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor,
    kernel: GroupedGEMMKernel, grouped_mm: Callable[..., torch.Tensor] | None,
) -> list[_Product]:  # fmt: skip
    """The GEMMs of weight [E, N, K]: forward, and the gradients of x [T, K] and of the weight from dy [T, N]."""
    experts, n, k = weight.shape
    ends = sizes.cumsum(0).to(torch.int32)
    offsets = F.pad(ends, (1, 0))
    counts = sizes.tolist()
    a, w = x.detach(), weight.detach()
    kernel.initialize(experts, n, k, _precision(x))

    def gradient(of: torch.Tensor) -> Callable[[], torch.Tensor]:
        # A backward computes the gradients of all operands that need one, so the other operand needs none.
        of = of.detach().requires_grad_()
        operands = (of, w) if of.dim() == a.dim() else (a, of)
        y = kernel.gemm(operands[0], operands[1].mT, offsets=offsets)
        return lambda: torch.autograd.grad(y, of, dy, retain_graph=True)[0]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return kernel.gemm(a, w.mT, offsets=offsets)

    if grouped_mm is not None:
        theirs = (
            lambda: grouped_mm(a, w.mT, offs=ends),
            lambda: grouped_mm(dy, w, offs=ends),
            lambda: grouped_mm(dy.t(), a, offs=ends),
        )
    else:
        theirs = (
            lambda: torch.cat([r @ m.t() for r, m in zip(a.split(counts), w)]),
            lambda: torch.cat([r @ m for r, m in zip(dy.split(counts), w)]),
            lambda: torch.stack([d.t() @ r for d, r in zip(dy.split(counts), a.split(counts))]),
        )
    ours = (forward, gradient(x), gradient(weight))
    flops = 2.0 * sum(counts) * n * k
    kinds = ("forward", "data gradient", "weight gradient")
    return [
        _Product(f"{name}, {kind}", flops, own, other)
        for kind, own, other in zip(kinds, ours, theirs)
    ]


def _precision(x: torch.Tensor) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[x.dtype]


def in_turns(
    ops: dict[str, Callable[[], Any]], iterations: int, device: torch.device
) -> dict[str, float]:
    """Returns the median milliseconds of each call. On a GPU several calls in a row are timed, so that Python prepares a
    call while the GPU computes the one before."""
    row = _IN_A_ROW if device.type == "cuda" else 1
    times: dict[str, list[float]] = {label: [] for label in ops}
    for turn in range(_WARMUP + iterations):
        for label, op in ops.items():
            (ms,) = times_ms(lambda: [op() for _ in range(row)], 1, device)
            if turn >= _WARMUP:
                times[label].append(ms / row)
    return {label: statistics.median(each) for label, each in times.items()}


def _grouped_mm_for(
    layer: DeepwellMoE, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[..., torch.Tensor] | None, str]:
    """Returns PyTorch's grouped GEMM, or None and why it is not run."""
    function = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))
    if function is None:
        return None, f"PyTorch {torch.__version__} has none"
    if dtype != torch.bfloat16 or device.type != "cuda":
        return None, f"it multiplies BF16 on a GPU, and this is {dtype} on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None, "it needs compute capability 8.0"
    widths = (layer.hidden_dim, layer.ffn_dim)
    if any(width % 8 for width in widths):
        return None, f"it expects widths that are multiples of 8, and these are {widths}"
    return function, ""


def measure_products(
    layer: DeepwellMoE, x: torch.Tensor, sizes: list[int], iterations: int
) -> tuple[dict[str, Any], str, list[str]]:
    """Returns each grouped GEMM of the layer for groups of `sizes` rows, which of PyTorch's functions was timed, and what
    was not run, in words."""
    device, dtype = x.device, x.dtype
    rows = torch.tensor(sizes, device=device)
    generator = torch.Generator(device).manual_seed(5)
    kernel = GroupedGEMMKernel()
    found: dict[str, Any] = {}
    missing = []
    weights = {layer.experts.first: "first", "down_proj": "second"}
    theirs, why = _grouped_mm_for(layer, device, dtype)
    if theirs is None:
        missing.append(f"torch.nn.functional.grouped_mm: {why}")
    for parameter, name in weights.items():
        weight = getattr(layer.experts, parameter).detach().clone()
        _, n, k = weight.shape
        a, dy = (
            torch.randn(sum(sizes), width, generator=generator, device=device, dtype=dtype)
            for width in (k, n)
        )
        for product in _products(name, a, dy, weight, rows, kernel, theirs):
            ours, expected = product.deepwell(), product.pytorch()
            backend = kernel.backend if "forward" in product.name else kernel.gradient_backend
            times = in_turns(
                {"pytorch": product.pytorch, "deepwell": product.deepwell}, iterations, device
            )
            size = expected.double().norm().item()
            found[product.name] = {
                label: {"ms": ms, "tflops": product.flops / ms / 1e9} for label, ms in times.items()
            }
            found[product.name]["deepwell"]["backend"] = backend
            found[product.name]["relative_difference"] = (
                (ours.double() - expected.double()).norm().item() / size if size else 0.0
            )
    name = "a loop of torch.matmul" if theirs is None else "torch.nn.functional.grouped_mm"
    return found, name, missing


def measure_parts(
    plain: DeepwellMoE, layer: DeepwellMoE, x: torch.Tensor, iterations: int
) -> tuple[dict[str, Any], list[str]]:
    """Returns the time of the parts of a step: in PyTorch each by itself, in Deepwell those of the engine's instructions.
    Then what was not run, in words."""
    top_k, experts, missing = plain.top_k, plain.num_experts, []
    flat = x.reshape(-1, x.shape[-1])
    with torch.no_grad():
        _, _, indices, weights = plain.gate(flat)
        chosen = indices.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        rows = flat[order // top_k]
        ops = {
            "routing": lambda: plain.gate(flat),
            "sort": lambda: (torch.argsort(chosen, stable=True), routing.load(chosen, experts)),
            "spread": lambda: flat[order // top_k],
            "combine": lambda: (
                torch.empty_like(rows).index_copy(0, order, rows) * weights.reshape(-1, 1)
            ).view(-1, top_k, rows.shape[1]).sum(1).to(x.dtype),
        }  # fmt: skip
        pytorch = in_turns(ops, iterations, x.device)
    found: dict[str, Any] = {"pytorch": pytorch, "deepwell": None, "method": None}
    measured = step_profile.measure(layer, layer, (x,), {}, max(2, iterations // 5), 1, None)
    if measured.ops:
        found["deepwell"] = _of_engine(measured.report["operations"])
        found["method"] = measured.report["method"]
    else:
        missing.append("the parts of Deepwell's layer: the engine does not run it here")
    return found, missing


def _of_engine(operations: list[dict[str, Any]]) -> dict[str, float]:
    parts = {name: 0.0 for name, _, _ in _PARTS} | {_REST: 0.0}
    for row in operations:
        names = [
            name
            for name, phase, ops in _PARTS
            if row["op"] in ops and phase in (None, row["phase"])
        ]
        parts[names[0] if names else _REST] += row["ms"]
    return parts


def report(result: dict[str, Any]) -> list[str]:
    """Returns the parts as lines of text."""
    lines = [
        "",
        f"{'grouped GEMMs':26}{'PyTorch ms':>12}{'TFLOP/s':>9}{'Deepwell ms':>13}{'TFLOP/s':>9}",
    ]
    for name, row in result["products"].items():
        theirs, ours = row["pytorch"], row["deepwell"]
        lines.append(
            f"{name:26}{theirs['ms']:12.3f}{theirs['tflops']:9.3f}{ours['ms']:13.3f}{ours['tflops']:9.3f}"
        )
    backends = dict.fromkeys(row["deepwell"]["backend"] for row in result["products"].values())
    lines.append(f"by {result['products_baseline']}, and by {'; '.join(backends)}")
    for label, title in (("pytorch", "PyTorch, each alone"), ("deepwell", "Deepwell, in a step")):
        if result["parts"][label]:
            lines += ["", f"{title:36}{'ms':>10}"]
            lines += [f"{name:36}{ms:10.3f}" for name, ms in result["parts"][label].items()]
    lines += ["", *(f"not run: {why}" for why in result["not_run"])]
    return lines
