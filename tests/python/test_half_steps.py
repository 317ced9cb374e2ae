"""BF16 and FP16 steps inside an FP32 model: every operation rounds its result, forward and backward, as
PyTorch's do. Bits are compared where PyTorch's operation is correctly rounded or one rounding of an FP32 result;
elsewhere (orders of summation, transcendental functions near a tie) one unit in the last place is allowed."""

from __future__ import annotations

import copy
import random

import deepwell
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from users import tally

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


pytestmark = pytest.mark.usefixtures("always")


class Chains(nn.Module):
    """Captures many functions of (h, v, T) at once. Each function has its own parameters h and v,
    so that gradients do not mix.
    """

    def __init__(self, functions, dtype, values):
        super().__init__()
        self.functions, self.dtype = tuple(functions), dtype
        self.h = nn.ParameterList([nn.Parameter(values[0].clone()) for _ in functions])
        self.v = nn.ParameterList([nn.Parameter(values[1].clone()) for _ in functions])

    def forward(self, x):
        found = []
        for function, h, v in zip(self.functions, self.h, self.v):
            found.append(function(h * x, v, self.dtype))
        return tuple(found)


def numbers(shape, seed):
    """Returns numbers of all magnitudes, with ties and exact ones among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(
        -6, 7, shape, generator=generator
    )
    ties = (torch.randint(-512, 512, shape, generator=generator) + 0.5) / 256
    return torch.where(torch.rand(shape, generator=generator) < 0.2, ties, x)


def run(functions, dtype, shape, seed=0):
    """Returns [(name, ours, plain, gradients of ours, of plain)] for every function."""
    values = numbers(shape, seed), numbers(shape, seed + 1)
    plain = Chains(functions.values(), dtype, values)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    results = []
    for model in (ours, plain):
        outputs = model(torch.ones(shape))
        loss = sum(
            (y.float() * torch.cos(torch.arange(y.numel()).view(y.shape).float()))
            .nan_to_num()
            .sum()
            for y in outputs
            if y.requires_grad
        )
        loss.backward()
        grads = [(h.grad, v.grad) for h, v in zip(model.h, model.v)]
        results.append(([y.detach() for y in outputs], grads))
    calls, reasons = tally(ours)
    assert calls >= 1 and not reasons, reasons
    (ys, gs), (plain_ys, plain_gs) = results
    return list(zip(functions, ys, plain_ys, gs, plain_gs))


def differing(ours, plain):
    """Counts elements with different values. All NaNs are equal, and so are 0 and -0."""
    assert ours.dtype == plain.dtype and ours.shape == plain.shape
    if not plain.is_floating_point():
        return ours != plain
    return ~((ours == plain) | (ours.isnan() & plain.isnan()))


def assert_bits(name, ours, plain):
    wrong = differing(ours, plain)
    if wrong.any():
        at = wrong.flatten().nonzero()[0].item()
        raise AssertionError(
            f"{name}: {wrong.sum()} of {wrong.numel()} elements differ, element {at} is "
            f"{ours.flatten()[at]}, PyTorch has {plain.flatten()[at]}"
        )


def assert_ulp(name, ours, plain, dtype, ulps=1):
    """Checks that values are within ``ulps`` units in the last place of ``dtype``, and that both
    are finite or neither is. A result of 2^-120 may be zero: PyTorch's vectorized exp has no
    subnormal numbers of FP32.
    """
    info = torch.finfo(dtype)
    wrong = differing(ours, plain)
    unit = info.eps * 2.0 ** torch.floor(torch.log2(plain.double().abs().clamp_min(info.tiny)))
    error = (ours.double() - plain.double()).abs()
    near = (error <= ulps * unit) | (error <= max(2.0**-120, CANCELLATION.get(name, 0)))
    bad = wrong & ~near
    assert not bad.any(), (
        f"{name}: {bad.sum()} elements beyond {ulps} ulp: {ours[bad][:3]} {plain[bad][:3]}"
    )


# ---- one operation or a few -----------------------------------------------------------------------

# PyTorch rounds these operations correctly, or computes them in FP32 and rounds once, so forward
# has the same bits. So have the gradients of those that come first. "~" marks the others, whose
# backward PyTorch composes of other steps.
EXACT = {
    "far": lambda h, v, T: ((h.to(T) + 256) - 256).float(),
    "decide": lambda h, v, T: ((h.to(T) + 100) > 100).float() * h,
    "overflow": lambda h, v, T: (h.to(T) * 3e4 * 3e4 / 3e4).float(),
    "large": lambda h, v, T: ((h.to(T) * 65000 + 65000) - 65000).float(),
    "products": lambda h, v, T: (h.to(T) * v.to(T) * v.to(T) * h.to(T)).float(),
    "sums": lambda h, v, T: (h.to(T) * v.to(T) + h.to(T) * 2.3 + v.to(T)).float(),
    "number": lambda h, v, T: (h.to(T) * 0.1 + 0.3).float(),
    "quotient": lambda h, v, T: (h.to(T) / 3 / v.to(T)).float(),
    "from a number": lambda h, v, T: (0.3 - h.to(T)).float(),
    "over": lambda h, v, T: (0.3 / h.to(T)).float(),
    "integer": lambda h, v, T: (h.to(T) * 257 + 257).float(),
    "square": lambda h, v, T: (h.to(T) ** 2).float(),
    "clamp": lambda h, v, T: h.to(T).clamp(-0.3, 0.7).float(),
    "clamp_min": lambda h, v, T: h.to(T).clamp_min(0.1).float(),
    "hardtanh": lambda h, v, T: F.hardtanh(h.to(T)).float(),
    "relu6": lambda h, v, T: F.relu6(h.to(T) * 4).float(),
    "maximum": lambda h, v, T: torch.maximum(h.to(T), v.to(T)).float(),
    "where": lambda h, v, T: torch.where(h.to(T) > v.to(T), h.to(T) + 1, v.to(T) * 3).float(),
    "where number": lambda h, v, T: torch.where(h > 0, h.to(T), 0.1).float(),
    "masked_fill": lambda h, v, T: h.to(T).masked_fill(h > 0, 0.1).float(),
    "equal": lambda h, v, T: ((h.to(T) * 0 + 0.1) == 0.1).float() * h,
    "promoted": lambda h, v, T: h.to(T) * 1.1 + v,
    "to long": lambda h, v, T: (h.to(T) * 300).long().float() * v,
    "to int": lambda h, v, T: (h.to(T) + 256).int().float() * v,
    "from long": lambda h, v, T: ((h * 1e4).long().to(T) + h.to(T)).float(),
    "times long": lambda h, v, T: ((h * 100).long() * h.to(T)).float(),
    "by double": lambda h, v, T: (h.to(T).double() * 1.1).to(T).float(),
    "in place": lambda h, v, T: h.to(T).clone().add_(0.1).mul_(v.to(T)).float(),
    "other half": lambda h, v, T: (h.bfloat16().half() * v.half()).bfloat16().float(),
    "result is half": lambda h, v, T: h.to(T) * v.to(T) - 1,
    "rotary": lambda h, v, T: (
        h.to(T) * v.to(T) + torch.cat([-h.to(T)[..., 32:], h.to(T)[..., :32]], -1) * v.to(T)
    ).float(),
    "relu": lambda h, v, T: F.relu(h.to(T) - 0.1).float(),
    "~scaled sum": lambda h, v, T: torch.add(h.to(T), v.to(T), alpha=0.3).float(),
    "~scaled difference": lambda h, v, T: torch.sub(h.to(T), v.to(T), alpha=0.3).float(),
    "~scalar tensor": lambda h, v, T: (h.to(T) * v.sum() + v.sum() * h.to(T)).float(),
    "~square root": lambda h, v, T: (torch.sqrt(h.abs().to(T)) * 1.1).float(),
    "~leaky": lambda h, v, T: F.leaky_relu(h.to(T), 0.3).float(),
    "~extreme": lambda h, v, T: (h.to(T) + 100).amax(-1).float(),
}  # fmt: skip

# Transcendental functions and sums: an FP32 result near a tie may round either way.
NEAR = {
    "log of exp": lambda h, v, T: torch.log(torch.exp(h.to(T))).float(),
    "sigmoid": lambda h, v, T: (torch.sigmoid(h.to(T)) * 1.0).float(),
    "tanh": lambda h, v, T: torch.tanh(h.to(T)).float(),
    "silu": lambda h, v, T: F.silu(h.to(T)).float(),
    "gelu": lambda h, v, T: F.gelu(h.to(T)).float(),
    "gelu tanh": lambda h, v, T: F.gelu(h.to(T), approximate="tanh").float(),
    "elu": lambda h, v, T: F.elu(h.to(T), 1.3).float(),
    "selu": lambda h, v, T: F.selu(h.to(T)).float(),
    "softplus": lambda h, v, T: F.softplus(h.to(T)).float(),
    "expm1": lambda h, v, T: torch.expm1(h.to(T)).float(),
    "log1p": lambda h, v, T: torch.log1p(h.abs().to(T)).float(),
    "sin": lambda h, v, T: torch.sin(h.to(T)).float(),
    "erf": lambda h, v, T: torch.erf(h.to(T)).float(),
    "cube": lambda h, v, T: (h.to(T) ** 3).float(),
    "power": lambda h, v, T: (h.abs().to(T) ** 1.7).float(),
    "lerp": lambda h, v, T: torch.lerp(h.to(T), v.to(T), 0.3).float(),
    "addcmul": lambda h, v, T: torch.addcmul(h.to(T), h.to(T), h.to(T), value=0.3).float(),
    "mean": lambda h, v, T: h.abs().to(T).mean(-1).float(),
    "sum": lambda h, v, T: h.abs().to(T).sum(-1).float(),
    "cumsum": lambda h, v, T: h.abs().to(T).cumsum(-1).float(),
    "var": lambda h, v, T: h.to(T).var(-1).float(),
    "norm": lambda h, v, T: h.to(T).norm(dim=-1).float(),
    "softmax": lambda h, v, T: torch.softmax(h.to(T), -1).float(),
    "layer_norm": lambda h, v, T: F.layer_norm(h.to(T), (64,)).float(),
    "matmul": lambda h, v, T: (h.abs().to(T) @ v.abs().to(T).T).float(),
    "linear": lambda h, v, T: F.linear(h.abs().to(T), v.abs().to(T), v[0, :16].abs().to(T)).float(),
}  # fmt: skip
# PyTorch composes these of several steps, and differs from rounding once by more than one unit.
ULPS = {"cube": 2, "log of exp": 2, "softmax": 2}
# PyTorch's x/2 * (1 + erf(..)) cancels if x is negative: the difference is a few of FP32's
# roundings of |x|, up to 8 there.
CANCELLATION = {"gelu": 2**-20, "gelu tanh": 2**-20}


@pytest.mark.parametrize("name", HALVES)
def test_each_step_is_rounded(name):
    for what, ours, plain, grads, plain_grads in run(EXACT, HALVES[name], (16, 64)):
        assert_bits(what, ours, plain)
        if what.startswith("~"):
            continue
        for kind, a, b in zip("hv", grads, plain_grads):
            assert (a is None) == (b is None), what
            if a is not None:
                assert_bits(f"{what}, gradient of {kind}", a, b)


@pytest.mark.parametrize("name", HALVES)
def test_functions_and_sums_round_once(name):
    dtype = HALVES[name]
    for what, ours, plain, grads, plain_grads in run(NEAR, dtype, (16, 64)):
        assert_ulp(what, ours, plain, dtype, ULPS.get(what, 1))
        for kind, a, b in zip("hv", grads, plain_grads):
            assert (a is None) == (b is None), what
            if a is None or not b.isfinite().all():
                continue
            # Backwards are composed of up to eight steps, each of which rounds.
            assert (a - b).norm() <= 8 * torch.finfo(dtype).eps / 2 * b.norm(), (
                f"{what}, gradient of {kind}"
            )


def test_infinities_agree_with_pytorch():
    class Log(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            h = self.lin(x)
            return torch.log(torch.exp(h.half() * 20)), h

    torch.manual_seed(0)
    plain = Log()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(32, 4) * 4
    (y, _), (want, _) = ours(x), plain(x)
    assert want.isinf().any() and torch.equal(y.isinf(), want.isinf())


# ---- random chains --------------------------------------------------------------------------------


def random_chain(seed):
    """Makes a function of 14 steps, each of which PyTorch rounds correctly and differentiates step
    by step."""
    rng = random.Random(seed)
    scalars = (0.1, 1 / 3, 256.0, 100, -2.5, 3e4, 1e-4)
    plans = []
    for step in range(14):
        operation = rng.choice(
            ("add", "sub", "mul", "div", "scaled", "shifted", "share", "neg", "abs", "maximum",
             "minimum", "clamp", "where", "through", "relu", "reversed")
        )  # fmt: skip
        older = rng.randrange(-2, step)
        plans.append(
            (
                operation,
                older,
                rng.choice(scalars),
                rng.choice(list(HALVES.values()) + [torch.float64]),
            )
        )

    def function(h, v, T):
        made = [h.to(T), v.to(T)]
        for operation, older, number, other in plans:
            x, y = made[-1], made[older + 2]
            made.append(
                {
                    "add": lambda: x + y,
                    "sub": lambda: x - y,
                    "mul": lambda: x * y,
                    "div": lambda: x / (y.abs() + 0.5),
                    "scaled": lambda: x * number,
                    "shifted": lambda: x + number,
                    "share": lambda: x / number,
                    "neg": lambda: -x,
                    "abs": lambda: x.abs(),
                    "maximum": lambda: torch.maximum(x, y),
                    "minimum": lambda: torch.minimum(x, y),
                    "clamp": lambda: x.clamp(-abs(number), abs(number)),
                    "where": lambda: torch.where(x > y * number, x, y),
                    "through": lambda: (x.to(other) * number).to(T),
                    "relu": lambda: F.relu(x),
                    "reversed": lambda: number - x,
                }[operation]()
            )
        return made[-1].float()

    return function


@pytest.mark.parametrize("name", HALVES)
def test_random_chains_have_pytorchs_bits(name):
    """Gradients agree too, up to the order in which those of three or more readers are added."""
    chains = {f"chain {seed}": random_chain(seed) for seed in range(24)}
    for what, ours, plain, grads, plain_grads in run(chains, HALVES[name], (5, 67)):
        assert_bits(what, ours, plain)
        for kind, a, b in zip("hv", grads, plain_grads):
            assert (a is None) == (b is None), what
            if a is not None:
                assert_bits(f"{what}, gradient of {kind}", a, b)
