"""deepwell.Muon against torch.optim.Muon, which has the same formula for one matrix at a time, and against float64."""

from __future__ import annotations

import copy

import deepwell
import pytest
import torch
from deepwell import _deepwell, muon, optim

SHAPES = [(24, 40), (40, 24), (24, 40), (33, 33), (2, 7)]


def matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def named(params):
    return [(f"layer.{i}.weight", param) for i, param in enumerate(params)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["rms", "original"])
def test_steps_agree_with_torch(scale, nesterov) -> None:
    """Both multiply in bfloat16, in another order: orthogonalized matrices differ by some of their roundings, 2^-8 of
    entries below 1.3, times the scale of a step."""
    ours, theirs = matrices(), matrices()
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    our = deepwell.Muon(named(ours), scale=scale, **options)
    adjust = {"rms": "match_rms_adamw", "original": "original"}[scale]
    their = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **options)
    for seed in range(3):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        our.step()
        their.step()
    for a, b in zip(ours, theirs, strict=True):
        factor = (
            0.2 * max(a.shape) ** 0.5 if scale == "rms" else max(1, a.shape[0] / a.shape[1]) ** 0.5
        )
        assert (a - b).abs().max() <= 3 * 0.02 * factor * 1.3 * 8 * 2.0**-8
        torch.testing.assert_close(
            our.state[a]["momentum_buffer"], their.state[b]["momentum_buffer"], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (3, 20, 31)])
def test_singular_values_against_float64(shape) -> None:
    """The polynomial acts on singular values alone, so float64 computes the result from the decomposition. Products in
    bfloat16 change each entry of the iterate by a few units of 2^-8 of the largest."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    got = muon.orthogonalized(x).double()
    exact = x.bfloat16().double()
    u, s, v = torch.linalg.svd(exact, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    a, b, c = muon.COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    assert s.min() > 0.3 and s.max() < 1.3
    right = u @ torch.diag_embed(s) @ v
    assert (got - right).norm() <= 0.05 * right.norm()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(16, 8)
        self.pos_emb = torch.nn.Parameter(torch.randn(4, 8))
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.out = torch.nn.Linear(8, 16, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.pos_emb
        return self.out(self.norm(x + self.down(torch.relu(self.up(x)))))


def test_the_split_of_a_model() -> None:
    model = Model()
    assert muon.hidden_parameters(model) == ["up.weight", "down.weight"]
    model.get_output_embeddings = lambda: model.out
    assert muon.hidden_parameters(model) == ["up.weight", "down.weight"]
    model.out.weight = model.tokens.weight
    assert muon.hidden_parameters(model) == ["up.weight", "down.weight"]
    optimizer = deepwell.Muon(model, lr=1e-3, adamw_lr=2e-3, hidden=["up.weight"])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 7]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 2e-3]
    optimizer = deepwell.Muon(
        [{"params": [model.up.weight], "muon": True}, {"params": [model.up.bias], "muon": False}]
    )
    assert [group["muon"] for group in optimizer.param_groups] == [True, False]
    with pytest.raises(TypeError, match="named_parameters"):
        deepwell.Muon(model.parameters())
    with pytest.raises(ValueError, match="names no parameter"):
        deepwell.Muon(model, hidden=["upp.weight"])
    with pytest.raises(ValueError, match="stacks of matrices"):
        deepwell.Muon(model, hidden=["up.bias"])


def losses(make, dtype=torch.float32, steps=40):
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = make(model)
    ids = torch.randint(0, 16, (32, 4), generator=torch.Generator().manual_seed(3))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(ids).float().flatten(0, 1), (ids * 5 % 16).flatten()
        )
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, model, optimizer


def test_others_are_updated_as_by_adamw() -> None:
    """Without hidden matrices the losses are those of AdamW; with them they halve in 40 steps, too."""
    adamw, _, _ = losses(
        lambda m: deepwell.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    )
    same, _, _ = losses(lambda m: deepwell.Muon(m, lr=0.01, hidden=[]))
    assert same == adamw
    with_muon, _, _ = losses(lambda m: deepwell.Muon(m, lr=0.01))
    assert max(with_muon[-1] / with_muon[0], adamw[-1] / adamw[0]) < 0.5


@pytest.mark.parametrize("kind", [None, torch.bfloat16, "8bit"])
def test_resume_gives_the_same_bits(kind) -> None:
    options = {
        "lr": 0.01,
        "state_dtype": kind,
        "stochastic_rounding": True,
        "master_weights": kind is None,
    }
    _, model, optimizer = losses(lambda m: deepwell.Muon(m, **options), torch.bfloat16, 3)
    other = copy.deepcopy(model)
    second = deepwell.Muon(other, **options)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (other, second)):
        set_gradients(list(each.parameters()), 4)
        its.step()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        for key, value in optimizer.state[a].items():
            assert torch.equal(value.float(), second.state[b][key].float()), (name, key)
            assert value.dtype is second.state[b][key].dtype, (name, key)
    states = optimizer.state.values()
    assert optimizer.state_bytes() == sum(x.nbytes for state in states for x in state.values())
    buffer = optimizer.state[model.up.weight]["momentum_buffer"]
    assert buffer.dtype is torch.bfloat16


def test_clipping_is_over_all_parameters() -> None:
    model = Model()
    set_gradients(list(model.parameters()), 1)
    right = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    optimizer = deepwell.Muon(model, max_grad_norm=0.5)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, right)
    clipped = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    assert abs(clipped.item() - 0.5) < 1e-4


@pytest.mark.parametrize("options", [{"stochastic_rounding": True}, {"master_weights": True}, {}])
def test_an_emulated_gpu_gives_the_bits_of_the_cpu(monkeypatch, options) -> None:
    """Products are PyTorch's on both here, so that this compares how weights move."""
    if not _deepwell.jit_compiler():
        pytest.skip("the kernels need NVRTC")
    runs = []
    for place in (None, "emulator:sm_90a"):
        monkeypatch.setattr(optim, "emulated", place)
        params = matrices(torch.bfloat16)
        params[3] = torch.nn.Parameter(params[3].detach().t())
        optimizer = deepwell.Muon(named(params), lr=0.02, **options)
        for seed in range(2):
            set_gradients(params, seed)
            optimizer.step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_stochastic_rounding_keeps_the_mean() -> None:
    """A million weights of 1 move by less than the spacing of bfloat16, 2^-8 below 1; six deviations of the mean are
    allowed."""
    param = torch.nn.Parameter(torch.ones(1024, 1024, dtype=torch.bfloat16))
    optimizer = deepwell.Muon(
        [("w", param)], lr=2.0**-9, weight_decay=0.5, stochastic_rounding=True
    )
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert set(param.float().unique().tolist()) == {1.0, 1.0 - 2.0**-8}
    assert abs(param.double().mean().item() - (1.0 - 2.0**-10)) < 6 * 2.0**-8 / 2 / 1024


def test_parameters_without_kernels() -> None:
    """float64 is PyTorch's to update, and has no formats of its own."""
    param, other = (torch.nn.Parameter(torch.eye(4, dtype=torch.float64)) for _ in range(2))
    ours = deepwell.Muon([("w", param)], lr=0.1, scale="original")
    theirs = torch.optim.Muon([other], lr=0.1)
    for each in (param, other):
        each.grad = torch.arange(16, dtype=torch.float64).view(4, 4)
    ours.step(), theirs.step()
    torch.testing.assert_close(param, other, rtol=0, atol=0.1 * 8 * 2.0**-8)
    with pytest.raises(RuntimeError, match="float64"):
        deepwell.Muon([("w", param)], stochastic_rounding=True).step()
