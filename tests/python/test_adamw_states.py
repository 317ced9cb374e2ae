"""deepwell.AdamW with averages in fewer bits and stochastic rounding: the CPU against FP64, an emulated GPU against the
CPU bit for bit, and training against float32."""

from __future__ import annotations

import copy
import functools
import io
import os
import subprocess
import sys
import zlib

import deepwell
import pytest
import torch
from deepwell import _deepwell, optim
from deepwell.step_memory import optimizer_name

FORMATS = [torch.float32, torch.bfloat16, "8bit"]
SHAPES = [(7, 13), (1,), (0,), (129,), (4500,), (3, 128)]


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made[0] = made[0].t()  # dense in another order
    return [torch.nn.Parameter(each) for each in made]


def set_gradients(params, seed):
    """Gradients of magnitudes that differ within a block by five orders."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        size = torch.exp(2.5 * torch.randn(param.shape, generator=generator)) / 16
        grad = torch.randn(param.shape, generator=generator) * size
        param.grad = torch.empty_like(param).copy_(grad)


def trained(dtype, steps=3, params=None, **options):
    params = params or parameters(dtype)
    optimizer = deepwell.AdamW(params, lr=0.01, weight_decay=0.1, **options)
    for seed in range(steps):
        set_gradients(params, seed)
        optimizer.step()
    return params, optimizer


def bits(params, optimizer):
    found = []
    for param in params:
        state = optimizer.state[param]
        found += [param.detach(), *(state[name] for name in sorted(state))]
    return [each.contiguous().view(-1).view(torch.uint8) for each in found]


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_emulated_gpu_gives_the_bits_of_the_cpu(monkeypatch, dtype, kind, master) -> None:
    if not _deepwell.jit_compiler():
        pytest.skip("the kernels need NVRTC")
    options = {"state_dtype": kind, "stochastic_rounding": True, "master_weights": master}
    on_cpu = bits(*trained(dtype, **options, maximize=master))
    monkeypatch.setattr(optim, "emulated", "emulator:sm_90a")
    assert same(on_cpu, bits(*trained(dtype, **options, maximize=master)))


def test_bits_on_any_instruction_set_and_number_of_threads() -> None:
    code = (
        "import sys, zlib; sys.path.insert(0, 'tests/python'); import torch; torch.set_num_threads(1);"
        "import test_adamw_states as t; print(*[zlib.crc32(b.numpy().tobytes()) for k in t.FORMATS for b in "
        "t.bits(*t.trained(torch.bfloat16, state_dtype=k, stochastic_rounding=True))])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DEEPWELL_ISA": "baseline"},
        check=True,
        capture_output=True,
        text=True,
    )
    here = [
        zlib.crc32(each.numpy().tobytes())
        for kind in FORMATS
        for each in bits(*trained(torch.bfloat16, state_dtype=kind, stochastic_rounding=True))
    ]
    assert other.stdout.split() == [str(each) for each in here]


def exact_step(p, g, m, v, step):
    """AdamW in float64, with the options of `trained`; the betas are float32 numbers."""
    beta1, beta2 = (torch.tensor(beta).double() for beta in (0.9, 0.999))
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    change = 0.01 * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + 1e-8)
    return p * (1 - 0.01 * 0.1) - change, m, v


def spacing(exact, fractions, least):
    """The distance of neighbouring numbers of a format with so many fraction bits and a least exponent."""
    return torch.ldexp(
        torch.ones_like(exact), torch.frexp(exact.abs())[1] - 1 - fractions
    ).clamp_min(least)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_against_float64(dtype, kind, stochastic) -> None:
    """Each stored number is one of the two neighbours of the exact one, or the nearer without stochastic rounding."""
    params, optimizer = trained(dtype, state_dtype=kind, stochastic_rounding=stochastic)
    before = [(p.detach().double(), *(a.double() for a in optimizer.averages(p))) for p in params]
    set_gradients(params, 9)
    optimizer.step()
    for param, (p, m, v) in zip(params, before, strict=True):
        if param.numel() == 0:
            continue
        p, m, v = exact_step(p, param.grad.double(), m, v, 4)
        steps = 1.0 if stochastic else 0.5
        float_error = (
            2.0**-20
        )  # 16 roundings in float32, of terms below 1 in magnitude beside the sum
        width = spacing(p, 7, 0.0) * steps if dtype is torch.bfloat16 else 0.0
        assert ((param.double() - p).abs() <= width + float_error * (1 + p.abs())).all()
        got_m, got_v = (average.double() for average in optimizer.averages(param))
        if kind == "8bit":
            state = optimizer.state[param]
            scales = optim._like(
                state["scales"].unsqueeze(-1).expand(2, -1, 128)[0], param
            ).double()
            roots = optim._like(state["scales"].unsqueeze(-1).expand(2, -1, 128)[1], param).double()
            width_m = spacing(m / scales, 3, 2.0**-9) * scales * steps
            root = v.sqrt()
            width_v = spacing(root / roots, 4, 2.0**-10) * roots
            # A positive average is at least the least code.
            width_v = width_v * (1.0 if stochastic else torch.where(root < width_v, 1.0, 0.5))
            assert ((got_v.sqrt() - root).abs() <= width_v + 1e-6 * root).all()
        else:
            fraction = 7 if kind is torch.bfloat16 else 23
            width_m, width_v = (spacing(x, fraction, 0.0) * steps for x in (m, v))
            assert ((got_v - v).abs() <= width_v + 1e-6 * v).all()
        assert ((got_m - m).abs() <= width_m + 1e-6 * (m.abs() + param.grad.double().abs())).all()


@pytest.mark.parametrize("kind", [torch.bfloat16, "8bit"])
def test_stochastic_rounding_keeps_the_mean(kind) -> None:
    """The mean of n roundings of a number between neighbours at distance d differs from it by a random number whose
    deviation is at most d / (2 sqrt(n)); 6 deviations are allowed."""
    n = 128 * 512
    param = torch.nn.Parameter(
        torch.full((n,), 1.0 + 2**-9 + 2**-12, dtype=torch.float32).bfloat16()
    )
    optimizer = deepwell.AdamW([param], lr=2.0**-12, weight_decay=0.0, state_dtype=kind, seed=5)
    grad = torch.full((n,), 0.3)
    grad[::128] = 1.0  # the largest of each block
    param.grad = grad.bfloat16()
    optimizer.step()
    change = 2.0**-12 * (1 - 1e-8 / 0.3)
    start = torch.tensor(1.0 + 2**-9 + 2**-12).bfloat16().item()
    assert abs(param.double().mean().item() - (start - change)) < 6 * 2**-8 / 2 / n**0.5
    m, v = optimizer.averages(param)
    g = param.grad[1].double().item()
    few = torch.ones(n, dtype=torch.bool)
    few[::128] = False
    exact_m, exact_v = (
        (1 - torch.tensor(0.9).double().item()) * g,
        (1 - torch.tensor(0.999).double().item()) * g * g,
    )
    for got, exact, width in ((m, exact_m, 2**-3), (v, exact_v, 2**-3)):
        deviation = width * exact / 2 / n**0.5
        assert abs(got[few].double().mean().item() - exact) < 6 * deviation + 1e-6 * exact


def test_the_roundings_of_an_element_are_independent() -> None:
    """No pair of parameter, exp_avg and exp_avg_sq is correlated by more than 6 / sqrt(n), nor are neighbours, or
    steps, or parameters."""
    n = 1 << 16
    ups = []
    for _ in range(2):
        params = [torch.nn.Parameter(torch.full((n,), 1.001).bfloat16()) for _ in range(2)]
        optimizer = deepwell.AdamW(
            params, lr=2.0**-10, weight_decay=0.0, state_dtype=torch.bfloat16, betas=(0.7, 0.7)
        )
        for param in params:
            param.grad = torch.full((n,), 0.7).bfloat16()
        optimizer.step()
        state = optimizer.state[params[0]]
        ups = [params[0], params[1], state["exp_avg"], state["exp_avg_sq"], params[0].roll(1)]
    ups = torch.stack([(x.detach().float() > x.float().mean()).float() for x in ups])
    assert (ups.std(1) > 0.1).all()
    correlation = torch.corrcoef(ups) - torch.eye(len(ups))
    assert correlation.abs().max() < 6 / n**0.5


@pytest.mark.parametrize("kind", FORMATS)
def test_resume_and_copies_give_the_same_bits(kind) -> None:
    options = {"state_dtype": kind, "stochastic_rounding": True, "master_weights": True, "seed": 3}
    params, optimizer = trained(torch.bfloat16, **options)
    file = io.BytesIO()
    torch.save((params, optimizer.state_dict()), file)
    file.seek(0)
    loaded, saved = torch.load(file, weights_only=False)
    other = deepwell.AdamW(loaded, lr=0.01, weight_decay=0.1, **options)
    other.load_state_dict(saved)
    copied = copy.deepcopy(optimizer)
    copies = [param for group in copied.param_groups for param in group["params"]]
    for each in (params, loaded, copies):
        set_gradients(each, 7)
    for each in (optimizer, other, copied):
        each.step()
    assert same(bits(params, optimizer), bits(loaded, other))
    assert same(bits(params, optimizer), bits(copies, copied))
    nbytes = {torch.float32: 8, torch.bfloat16: 4, "8bit": 2}[kind]
    for param in params:
        state = optimizer.state[param]
        held = sum(x.nbytes for x in state.values())
        scales = 8 * -(-param.numel() // 128) if kind == "8bit" else 0
        assert held == 4 + (nbytes + 4) * param.numel() + scales
        assert all(state[name].shape == param.shape for name in ("exp_avg", "exp_avg_sq"))
    states = optimizer.state.values()
    assert optimizer.state_bytes() == sum(x.nbytes for state in states for x in state.values())
    with pytest.raises(deepwell.UnsupportedError, match="state_bytes"):
        optimizer_name(optimizer)


def test_groups_that_join_and_types_in_one_group() -> None:
    """Each parameter has the bits that it has by itself at the same position."""
    options = {"lr": 0.01, "weight_decay": 0.1, "state_dtype": "8bit", "seed": 4}
    mixed = parameters(torch.float32) + parameters(torch.bfloat16, 1)
    optimizer = deepwell.AdamW(mixed, **options)
    late = parameters(torch.bfloat16, 2)
    optimizer.add_param_group({"params": late, "lr": 0.02})
    every = mixed + late
    alone = [torch.nn.Parameter(param.detach().clone()) for param in every]
    set_gradients(every, 1)
    optimizer.step()
    for position, (param, single) in enumerate(zip(every, alone, strict=True)):
        before = [torch.nn.Parameter(torch.zeros(1)) for _ in range(position)]
        lr = 0.02 if position >= len(mixed) else 0.01
        own = deepwell.AdamW([*before, single], **{**options, "lr": lr})
        single.grad = param.grad
        own.step()
        assert same(bits([param], optimizer), bits([single], own))


@pytest.mark.parametrize("kind", [torch.bfloat16, "8bit"])
def test_averages_change_their_type(kind) -> None:
    """Between torch.optim.AdamW and 8 bits: each number becomes one within half a spacing; a second way back changes
    nothing."""
    params = parameters(torch.float32)
    their = torch.optim.AdamW(params, lr=0.01)
    for seed in range(3):
        set_gradients(params, seed)
        their.step()
    our = deepwell.AdamW(params, lr=0.01, state_dtype=kind)
    our.load_state_dict(their.state_dict())
    plain = deepwell.AdamW(params, lr=0.01)
    plain.load_state_dict(our.state_dict())
    again = deepwell.AdamW(params, lr=0.01, state_dtype=kind)
    again.load_state_dict(plain.state_dict())
    for param in params:
        m, v = our.averages(param)
        assert plain.state[param]["exp_avg"].dtype is torch.float32
        right_m, right_v = their.state[param]["exp_avg"], their.state[param]["exp_avg_sq"]
        largest = right_m.abs().max() if param.numel() else 1.0
        assert ((m - right_m).abs() <= right_m.abs() / 16 + largest * 2.0**-18).all()
        root, right_root = v.sqrt(), right_v.sqrt()
        largest = right_root.max() if param.numel() else 1.0
        assert ((root - right_root).abs() <= right_root / 32 + largest * 2.0**-18).all()
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                again.state[param][name].float(), our.state[param][name].float(), rtol=0, atol=0
            )


def test_numbers_that_are_not_finite_stay_with_their_element() -> None:
    for kind in FORMATS:
        params, optimizer = trained(torch.float32, state_dtype=kind, stochastic_rounding=True)
        clean, other = trained(torch.float32, state_dtype=kind, stochastic_rounding=True)
        for each in (params, clean):
            set_gradients(each, 5)
        where = torch.zeros(4500, dtype=torch.bool)
        for at, value in ((3, torch.nan), (300, torch.inf), (4499, -torch.inf)):
            params[4].grad[at] = value
            clean[4].grad[at] = 0.0
            where[at] = True
        optimizer.step(), other.step()
        assert torch.equal(params[4].isfinite(), ~where)
        assert torch.equal(optimizer.averages(params[4])[0].isfinite(), ~where)
        assert torch.equal(params[4][~where], clean[4][~where])


@pytest.mark.parametrize("place", ["cpu", "emulator:sm_90a"])
def test_clipping_and_scaled_gradients(monkeypatch, place) -> None:
    if place != "cpu":
        if not _deepwell.jit_compiler():
            pytest.skip("the kernels need NVRTC")
        monkeypatch.setattr(optim, "emulated", place)
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    our = deepwell.AdamW(ours, lr=0.01, eps=1e-6, max_grad_norm=0.5, state_dtype=torch.float32)
    their = torch.optim.AdamW(theirs, lr=0.01, eps=1e-6)
    for seed in range(2):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        for param in ours:
            param.grad *= 8
        our.grad_scale, our.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        our.step()
        total = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        torch.testing.assert_close(our.grad_norm, total)
        their.step()
    our.found_inf = torch.tensor(1.0)
    our.step()  # changes nothing
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_what_is_refused() -> None:
    params = parameters(torch.float32)
    with pytest.raises(ValueError, match="state_dtype is 'int8'"):
        deepwell.AdamW(params, state_dtype="int8")
    with pytest.raises(ValueError, match="seed"):
        deepwell.AdamW(params, seed=-1)
    with pytest.raises(ValueError, match="amsgrad"):
        deepwell.AdamW(params, amsgrad=True, state_dtype="8bit")
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="float64"):
        deepwell.AdamW([param], state_dtype="8bit").step()


# ---- training ---------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A block of attention and one of 4 times the width, for tokens of a Markov chain of order 2."""

    def __init__(self, tokens=32, width=32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(3)])
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.head = torch.nn.Linear(width, tokens, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = self.attention(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


@functools.cache
def batches(steps=200):
    generator = torch.Generator().manual_seed(7)
    chances = torch.softmax(2.5 * torch.randn(32, 32, generator=generator), -1)
    ids = torch.randint(0, 32, (steps * 16, 1), generator=generator)
    for _ in range(16):
        ids = torch.cat([ids, torch.multinomial(chances[ids[:, -1]], 1, generator=generator)], 1)
    return ids.view(steps, 16, 17)


@functools.cache
def losses(dtype, steps=200, start=0, **options):
    torch.manual_seed(start)
    model = Model().to(dtype)
    optimizer = deepwell.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1, **options)
    found = []
    for ids in batches(steps):
        optimizer.zero_grad()
        out = model(ids[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.parametrize(
    "dtype, options, bound",
    [
        (torch.float32, {"state_dtype": torch.bfloat16}, 0.005),
        (torch.float32, {"state_dtype": "8bit"}, 0.005),
        (torch.bfloat16, {"state_dtype": "8bit"}, 0.01),
    ],
)
def test_training_follows_float32(dtype, options, bound) -> None:
    """200 steps, in which the loss falls from 3.6 to 2.0. Another start of float32 moves the mean of 25 losses by about
    0.05 while it falls and the mean over all steps by 0.015; a quarter and a half of that are allowed on average. 8-bit
    averages move it by 0.001 on average (docs/optimizers.md)."""
    right, got = losses(torch.float32), losses(dtype, **options)
    assert right[:10].mean() - right[-25:].mean() > 1.0
    difference = (got - right).view(8, 25).mean(1)
    assert difference.abs().max() <= 2 * bound
    assert (got - right).abs().mean() <= bound
