"""Experts of mixtures in precision="fp8": forward and the gradient of the rows by codes, as a GPU multiplies them."""

from __future__ import annotations

import copy

import deepwell
import mixtures
import numpy as np
import pytest
import torch
from compilers import needs_compiler
from deepwell import _deepwell
from test_precision import fp8
from torch import nn
from users import engine_calls

EMULATED = "emulator:sm_90a"


class Experts(nn.Module):
    """One layer of experts whose rows choose them by the data; `across` stores the matrices as [E, K, N]."""

    def __init__(self, width=48, results=32, experts=4, across=False, bias=False) -> None:
        super().__init__()
        torch.manual_seed(2)
        shape = (experts, width, results) if across else (experts, results, width)
        self.across = across
        self.weight = nn.Parameter(torch.randn(shape) * 0.3)
        self.bias = nn.Parameter(torch.randn(experts, results)) if bias else None

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        w = self.weight[expert]
        y = torch.bmm(x.unsqueeze(1), w if self.across else w.mT).squeeze(1)
        return y if self.bias is None else y + self.bias[expert]


def by_definition(model: Experts, x: np.ndarray, expert: np.ndarray, dy: np.ndarray):
    """Returns y, dx and dw, and bounds of errors of sums in F32: operands of y and dx are codes with one scale for a tensor,
    of the weight for all experts; those of dw are not rounded."""
    w = model.weight.detach().double().numpy()
    if model.across:
        w = np.swapaxes(w, 1, 2)
    codes, scale = fp8(w.reshape(-1, w.shape[2]), "e4m3")
    codes = codes.reshape(w.shape)[expert]  # [T, N, K]
    (x_codes, x_scale), (dy_codes, dy_scale) = fp8(x, "e4m3"), fp8(dy, "e5m2")

    def sums(a, b, factor):
        terms = a.shape[1] + 4
        size = np.einsum("tk,tnk->tn", np.abs(a), np.abs(b)) * factor
        return np.einsum("tk,tnk->tn", a, b) * factor, terms * 2.0**-24 * size

    y, y_bound = sums(x_codes, codes, float(x_scale) * float(scale))
    dx, dx_bound = sums(dy_codes, np.swapaxes(codes, 1, 2), float(dy_scale) * float(scale))
    if model.bias is not None:
        y = y + model.bias.detach().double().numpy()[expert]
    dw, dw_bound = np.zeros_like(w), np.zeros_like(w)
    for e in range(len(w)):
        rows = expert == e
        dw[e] = dy[rows].T.astype(np.float64) @ x[rows]
        dw_bound[e] = (rows.sum() + 4) * 2.0**-24 * (np.abs(dy[rows]).T @ np.abs(x[rows]))
    if model.across:
        dw, dw_bound = np.swapaxes(dw, 1, 2), np.swapaxes(dw_bound, 1, 2)
    return (y, y_bound), (dx, dx_bound), (dw, dw_bound)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("across", [False, True], ids=["along", "across"])
def test_numbers_are_the_definitions(across: bool, bias: bool) -> None:
    model = Experts(width=37, results=29, experts=5, across=across, bias=bias)
    policy = deepwell.PrecisionPolicy("fp8", [])
    ours = deepwell.optimize(copy.deepcopy(model), precision=policy, verbose=False)
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(31, 37, generator=draw) * torch.exp2(torch.randn(31, 1, generator=draw))
    dy = torch.randn(31, 29, generator=draw)
    expert = torch.randint(0, 4, (31,), generator=draw)  # the last has no rows
    own = x.clone().requires_grad_()
    y = ours(own, expert)
    y.backward(dy)
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)
    assert "1 linear layers in FP8" in deepwell.summary(ours)
    expected = by_definition(model, x.numpy(), expert.numpy(), dy.numpy())
    for got, (wanted, bound) in zip((y.detach(), own.grad, ours.weight.grad), expected):
        limit = bound + 2.0**-23 * np.abs(wanted) + 2.0**-100
        worst = (np.abs(got.double().numpy() - wanted) / limit).max()
        assert worst <= 1, worst


def train(model: nn.Module, precision, steps: int) -> list[float]:
    model = copy.deepcopy(model)
    if precision is not None:
        deepwell.optimize(model, precision=precision, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        start, step = (
            torch.randint(low, high, (8, 1), generator=data) for low, high in ((0, 96), (1, 4))
        )
        ids = (start + step * torch.arange(24)) % 96
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "name, layers",
    [
        ("olmoe", 1),
        pytest.param("olmoe", 2, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, marks=pytest.mark.slow),
    ],
)
def test_small_mixtures_learn_as_in_bf16(name: str, layers: int) -> None:
    """Each step's loss stays within 5 % of that with operands in BF16, as for models without experts (docs/precision.md)."""
    torch.manual_seed(3)
    model = mixtures.spread(getattr(mixtures, name)(num_hidden_layers=layers).train())
    exact, ours = train(model, "bf16", 15), train(model, "fp8", 15)
    assert exact[-1] < exact[0] / 1.2
    apart = max(abs(a - b) / b for a, b in zip(ours, exact))
    print(f"{name}: {ours[-1]:.4f} against {exact[-1]:.4f}, {apart:.4f} apart at most")
    assert ours != exact and apart <= 0.05


def test_policies_name_experts() -> None:
    model = mixtures.mixtral(num_hidden_layers=2)
    ids = torch.zeros(2, 5, dtype=torch.long)
    policy = deepwell.PrecisionPolicy("fp8", layers={"model.layers.1.mlp.experts": "fp32"})
    rows = [row.split() for row in policy.table(model, ids).splitlines() if "mlp.experts" in row]
    codes = ["fp8-tensor", "fp8-tensor", "fp8-tensor-e5m2", "fp8-tensor", "-", "-"]
    assert [row[1:7] for row in rows] == [codes] * 2 + [["-"] * 6] * 2
    graph = _deepwell.Graph(deepwell.capture(model, ids).captured.json)
    for other in ("mxfp8", "fp8-block", "bf16"):  # experts keep the model's precision
        modules = [layer["module"] for layer in deepwell.PrecisionPolicy(other).choices(graph)]
        assert modules and not any("experts" in module for module in modules)


@needs_compiler
@pytest.mark.parametrize("fast", [False, True], ids=["two-levels", "fast"])
def test_an_emulated_gpu_multiplies_codes(fast: bool) -> None:
    """The same codes as on a CPU, multiplied by tensor cores that add in 14 bits: K and N are below 128, so the products of
    an element are added in at most 4 instructions, each of 33 terms."""
    model = Experts(width=64, results=48).bfloat16()
    draw = torch.Generator().manual_seed(7)
    x, dy = (torch.randn(31, n, generator=draw).bfloat16() for n in (64, 48))
    expert = torch.randint(0, 3, (31,), generator=draw)
    policy = deepwell.PrecisionPolicy("fp8", [], fast_accumulation=fast)
    own = x.clone().requires_grad_()
    ours = deepwell.optimize(copy.deepcopy(model), precision=policy, target=EMULATED, verbose=False)
    y = ours(own, expert)
    y.backward(dy)
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)
    numbers = [t.detach().float().numpy() for t in (x, dy)]
    expected = by_definition(model.float(), numbers[0], expert.numpy(), numbers[1])
    for got, (wanted, bound) in zip((y.detach(), own.grad, ours.weight.grad), expected):
        # A bound of F32 sums, of K + 4 terms; tensor cores have 33 terms and a result for each of 32 products.
        limit = 1.1 * 2.0**-13 / 2.0**-24 * bound + 2.0**-8 * np.abs(wanted) + 2.0**-100
        worst = (np.abs(got.double().numpy() - wanted) / limit).max()
        assert worst <= 1, worst


@needs_compiler
def test_weights_are_quantized_once_for_both_directions() -> None:
    model = Experts(width=64, results=48).bfloat16()
    example = (
        torch.randn(31, 64, dtype=torch.bfloat16, requires_grad=True),
        torch.randint(0, 3, (31,)),
    )
    engine = deepwell.compile(
        model,
        precision=deepwell.PrecisionPolicy("fp8", []),
        example_inputs=example,
        target=EMULATED,
    )
    engine(*example).sum().backward()
    counts = {}
    for op in engine.compiled_ops:
        counts.setdefault(op.op, []).append(op.kernel)
    assert counts["segment_multiply_codes"] == ["sm90_codes"] * 2
    assert counts["segment_linear_backward_weight"] == ["sm90_segment"]
    assert len(counts["quantize_tensor"]) == 3  # x, w once for both directions, dy
