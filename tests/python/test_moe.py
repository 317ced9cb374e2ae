"""deepwell.DeepwellMoE: its forward and losses by definition, dropping, blocks of transformers, statistics, capture."""

from __future__ import annotations

import copy
import json
import math
import sys

import deepwell
import mixtures
import pytest
import torch
from compare import assert_same_function
from deepwell import _deepwell, routing
from deepwell.capture import capture_graph
from deepwell.moe import DeepwellMoE
from torch import nn
from torch.nn import functional as F
from users import engine_calls

H, INNER, E = 12, 10, 6
moe_module = sys.modules["deepwell.moe"]

VARIANTS = {
    "plain": {},
    "top one": {"top_k": 1, "normalize": False},
    "gelu with biases": {"activation": "gelu", "bias": True},
    "geglu with biases": {"activation": "geglu", "bias": True, "top_k": 3},
    "sigmoid": {"router": "sigmoid", "score_correction_bias": True, "routed_scale": 2.5},
    "groups": {"router": "sigmoid", "score_correction_bias": True, "groups": 3, "top_groups": 2},
    "groups by maximum": {"groups": 3, "top_groups": 1, "group_score": "max", "normalize": False},
    "shared": {"shared_experts": 2},
    "shared behind a gate": {"shared_dim": 7, "shared_gate": True, "activation": "silu"},
    "capacity": {"capacity_factor": 0.75},
    "capacity by weight": {"capacity_factor": 0.5, "drop": "weight", "top_k": 3},
    "losses": {"load_balance_loss": 0.3, "z_loss": 0.02, "sequence_loss": 0.1},
}


def made(seed: int = 0, **options) -> DeepwellMoE:
    torch.manual_seed(seed)
    moe = DeepwellMoE(H, INNER, E, **{"top_k": 2, **options})
    with torch.no_grad():
        moe.gate.weight.normal_()
        if moe.gate.e_score_correction_bias is not None:
            moe.gate.e_score_correction_bias.normal_(std=0.2)
    return moe


def by_definition(
    moe: DeepwellMoE, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int], int]:
    """Returns outputs, the weighted sum of losses, rows of each expert, dropped choices: token by token, from the
    documentation alone."""
    gate, experts = moe.gate, moe.experts
    rows = x.reshape(-1, H)
    logits = rows @ gate.weight.T
    if gate.kind == "softmax":
        scores = probabilities = torch.softmax(logits, -1)
    else:
        scores = torch.sigmoid(logits)
        probabilities = scores / scores.sum(-1, keepdim=True)
    choices = []
    for score in scores:
        choice = (
            score if gate.e_score_correction_bias is None else score + gate.e_score_correction_bias
        )
        allowed = range(E)
        if gate.groups > 1:
            groups = [
                list(range(g * E // gate.groups, (g + 1) * E // gate.groups))
                for g in range(gate.groups)
            ]
            count = 1 if gate.group_score == "max" else 2
            value = {
                i: sum(sorted((choice[e].item() for e in g), reverse=True)[:count])
                for i, g in enumerate(groups)
            }
            best = sorted(value, key=value.get, reverse=True)[: gate.top_groups]
            allowed = [e for i in best for e in groups[i]]
        choices.append(sorted(allowed, key=lambda e: choice[e].item(), reverse=True)[: gate.top_k])
    weights = []
    for score, chosen in zip(scores, choices):
        own = score[chosen]
        weights.append((own / own.sum() if gate.normalize else own) * gate.scale)

    places = [(k, t) for k in range(gate.top_k) for t in range(len(rows))]
    if moe.drop == "weight":
        places.sort(key=lambda at: -weights[at[1]][at[0]].item())
    room = math.inf
    if moe.capacity_factor is not None:
        room = math.ceil(moe.capacity_factor * len(rows) * gate.top_k / E)
    kept, used = set(), [0] * E
    for k, t in places:
        expert = choices[t][k]
        if used[expert] < room:
            used[expert] += 1
            kept.add((k, t))

    def activated(y: torch.Tensor) -> torch.Tensor:
        if experts.activation in ("swiglu", "geglu"):
            gated, up = y[: len(y) // 2], y[len(y) // 2 :]
            return (F.silu if experts.activation == "swiglu" else F.gelu)(gated) * up
        return {"gelu": F.gelu, "silu": F.silu}[experts.activation](y)

    outputs = []
    for t, row in enumerate(rows):
        y = torch.zeros(H, dtype=x.dtype)
        for k, e in enumerate(choices[t]):
            if (k, t) in kept:
                inner = getattr(experts, experts.first)[e] @ row
                if experts.has_bias:
                    inner = inner + getattr(experts, experts.first + "_bias")[e]
                out = experts.down_proj[e] @ activated(inner)
                if experts.has_bias:
                    out = out + experts.down_proj_bias[e]
                y = y + weights[t][k] * out
        shared = getattr(moe, moe.shared_name)
        if shared is not None:
            if experts.is_gated:
                inner = F.silu(shared.gate_proj(row)) * shared.up_proj(row)
            else:
                inner = activated(shared.up_proj(row))
            part = shared.down_proj(inner)
            y = y + (
                part
                if moe.shared_expert_gate is None
                else torch.sigmoid(moe.shared_expert_gate(row)) * part
            )
        outputs.append(y)

    tokens = [sum(chosen.count(e) for chosen in choices) for e in range(E)]
    loss = torch.zeros((), dtype=x.dtype)
    for e in range(E):
        share = tokens[e] / (len(rows) * gate.top_k)
        loss = loss + moe.load_balance_loss * E * share * probabilities[:, e].mean()
    loss = (
        loss + moe.z_loss * torch.stack([torch.log(row.exp().sum()) ** 2 for row in logits]).mean()
    )
    length = x.shape[-2]
    sequences = len(rows) // length
    for s in range(sequences):
        at = slice(s * length, (s + 1) * length)
        for e in range(E):
            share = sum(chosen.count(e) for chosen in choices[at]) / (length * gate.top_k)
            loss = loss + moe.sequence_loss * E * share * probabilities[at, e].mean() / sequences
    return torch.stack(outputs).view(x.shape), loss, tokens, len(places) - len(kept)


class WithLoss(nn.Module):
    """Returns outputs and the sum of losses, so that both are compared, and their gradients."""

    def __init__(self, moe: DeepwellMoE, forward=None) -> None:
        super().__init__()
        self.moe = moe
        self.__dict__["reference"] = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reference is not None:
            y, loss, _, _ = self.reference(self.moe, x)
        else:
            y, loss = self.moe(x), self.moe.loss()
        return torch.cat([y.reshape(-1), torch.as_tensor(loss, dtype=y.dtype).reshape(1)])


@pytest.mark.parametrize("name", VARIANTS)
def test_by_definition(name: str) -> None:
    moe = made(**VARIANTS[name]).double()
    x = torch.randn(2, 7, H, dtype=torch.float64)
    results = []
    for model in (WithLoss(moe, by_definition), WithLoss(copy.deepcopy(moe))):
        own = x.clone().requires_grad_()
        out = model(own)
        (out * torch.cos(torch.arange(len(out)))).sum().backward()
        results.append([out.detach(), own.grad, *[p.grad for p in model.parameters()]])
    for at, (wanted, got) in enumerate(zip(*results)):
        assert (wanted is None) == (got is None), at
        if wanted is not None:
            # FP64: sums of at most some hundred terms.
            assert (got - wanted).norm() <= 1e-12 * max(1.0, wanted.norm().item()), at
    _, _, tokens, dropped = by_definition(moe, x)
    moe(x)
    told = moe.statistics()
    assert told["tokens"] == tokens and told["dropped"] == pytest.approx(dropped / sum(tokens))
    assert 0.0 < told["entropy"] <= math.log(E)
    assert name not in ("capacity", "capacity by weight") or dropped > 0


# ---- dropped choices cost nothing ------------------------------------------------------------------


def counted_rows(monkeypatch) -> list[int]:
    """The returned list receives the rows of each product that the experts compute in PyTorch."""
    found: list[int] = []
    multiply = moe_module._Groups.multiply

    def counted(self, x, w):
        found.append(len(x))
        return multiply(self, x, w)

    monkeypatch.setattr(moe_module._Groups, "multiply", counted)
    return found


@pytest.mark.parametrize("drop", ["position", "weight"])
def test_rows_beyond_the_capacity_are_not_computed(monkeypatch, drop) -> None:
    moe, x = made(capacity_factor=0.5, drop=drop), torch.randn(4, 16, H)
    found = counted_rows(monkeypatch)
    moe(x)
    told = moe.statistics()
    kept = sum(min(count, moe.capacity(64)) for count in told["tokens"])
    assert moe.capacity(64) == math.ceil(0.5 * 64 * 2 / E) and moe.capacity_factor == 0.5
    assert found == [kept, kept] and kept <= 66 < sum(told["tokens"]) == 128
    assert told["dropped"] == (128 - kept) / 128
    moe.capacity_factor = None
    moe(x)
    assert found[2:] == [128, 128] and moe.capacity(64) == 64


class _UndefinedBehindGroups(torch.autograd.Function):
    """torch.nn.functional.grouped_mm as GPUs compute it: what is behind the last group is anything, here NaN."""

    @staticmethod
    def forward(ctx, a, b, ends):
        ctx.save_for_backward(a, b, ends)
        y = a.new_full((len(a), b.shape[2]), math.nan)
        for group, rows in enumerate(_UndefinedBehindGroups.parts(ends)):
            y[rows] = a[rows] @ b[group]
        return y

    @staticmethod
    def backward(ctx, dy):
        a, b, ends = ctx.saved_tensors
        da, db = torch.full_like(a, math.nan), torch.zeros_like(b)
        for group, rows in enumerate(_UndefinedBehindGroups.parts(ends)):
            da[rows], db[group] = dy[rows] @ b[group].t(), a[rows].t() @ dy[rows]
        return da, db, None

    @staticmethod
    def parts(ends):
        return [slice(a, b) for a, b in zip([0, *ends.tolist()], ends.tolist())]


@pytest.mark.parametrize("name", ["capacity", "capacity by weight", "gelu with biases"])
def test_groups_whose_sizes_the_host_does_not_know(name, monkeypatch) -> None:
    """As on a GPU: there are at most as many rows as all capacities together, and what is behind them reaches nothing."""
    options = {"capacity_factor": 0.75, **VARIANTS[name]}
    moe, x = made(**options).double(), torch.randn(2, 7, H, dtype=torch.float64)
    found = counted_rows(monkeypatch)
    results = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(moe_module, "_grouped_mm_takes", lambda *given: True)
            monkeypatch.setattr(
                F, "grouped_mm", lambda a, b, offs: _UndefinedBehindGroups.apply(a, b, offs)
            )
            monkeypatch.setattr(moe_module._Groups, "sizes", lambda self: pytest.fail("waited"))
        own = x.clone().requires_grad_()
        moe.zero_grad()
        moe(own).square().sum().backward()
        results.append([own.grad, *[p.grad for p in moe.parameters()]])
    for wanted, got in zip(*results):
        assert (got - wanted).norm() <= 1e-12 * max(1.0, wanted.norm().item())
    assert found[0] <= found[2] <= E * moe.capacity(14)


class RowsWithoutAMatrix(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4))
        self.bias = nn.Parameter(torch.randn(3, 5)) if bias else None

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = torch.ops.deepwell.grouped_linear(F.silu(x), self.weight, index, self.bias)
        return y.square() + 1.0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.filterwarnings("ignore:.*grouped_linear")
def test_the_engine_does_not_compute_rows_without_a_matrix(bias: bool, always) -> None:
    """A product of NaN would be NaN in the row itself and in the gradients of weight and bias."""
    module = RowsWithoutAMatrix(bias)
    ours = deepwell.optimize(copy.deepcopy(module), verbose=False)
    index = torch.tensor([2, 3, 0, 0, 3, 2, 3])
    kept = index < 3
    draw = torch.randn(7, 4)
    x = torch.where(kept[:, None], draw, math.nan).requires_grad_()
    ours(draw, index)
    assert torch.allclose(ours(draw, index), module(draw, index), atol=1e-6)
    y = ours(x, index)
    assert (y[~kept] == 1.0).all()
    y.sum().backward()
    exact = copy.deepcopy(module).double()
    own = draw.double()[kept].requires_grad_()
    inner = torch.einsum("rk,rnk->rn", F.silu(own), exact.weight[index[kept]])
    if bias:
        inner = inner + exact.bias[index[kept]]
    inner.square().sum().backward()
    assert torch.allclose(x.grad[kept].double(), own.grad, atol=1e-5)
    for got, wanted in zip(ours.parameters(), exact.parameters()):
        assert torch.allclose(got.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)
    assert engine_calls(ours)[1] == 0, deepwell.summary(ours)


# ---- in the engine ---------------------------------------------------------------------------------


class Model(nn.Module):
    """A language model of some layers, each with a mixture behind a residual connection; it returns its loss."""

    def __init__(self, layers: int = 1, **options) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, H)
        self.layers = nn.ModuleList(Layer(made(i, **options)) for i in range(layers))
        self.head = nn.Linear(H, 23)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Layer(nn.Module):
    def __init__(self, moe: DeepwellMoE) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(H), moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


QUICK = ("capacity by weight", "losses")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in VARIANTS]
)
def test_captured_whole(name: str, always) -> None:
    plain = WithLoss(made(**VARIANTS[name]))
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    for batch, length in ((2, 7), (3, 5)):
        assert_same_function(plain, ours, (torch.randn(batch, length, H),), {})
        told = ours.moe.statistics()
        for key, value in plain.moe.statistics().items():
            assert told[key] == pytest.approx(value, rel=1e-5), key
    assert engine_calls(ours) == (2, 0), deepwell.summary(ours)


def test_no_gathered_matrices() -> None:
    graph = _deepwell.Graph(capture_graph(made(bias=True), (torch.randn(2, 7, H),)).json)
    graph.run_pass("recognize")
    nodes = json.loads(graph.json())["nodes"]
    assert [node["op"] for node in nodes].count("grouped_linear") == 2
    assert not any(node["op"] == "take" for node in nodes)


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_losses_and_statistics_of_a_model(layers: int, always) -> None:
    """Auxiliary losses are no results of the model's forward. Their gradients are those of PyTorch, and so are numbers
    of each layer, whether it was traced or copied from an equal one."""
    options = {"load_balance_loss": 0.5, "z_loss": 0.1, "capacity_factor": 1.0}
    plain = Model(layers, **options)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    gradients = []
    ids = torch.randint(0, 23, (3, 9), generator=torch.Generator().manual_seed(5))
    for model in (plain, ours):
        for _ in range(2):
            model.zero_grad()
            loss = model(ids) + DeepwellMoE.losses_of(model)
            loss.backward()
        gradients.append([loss.detach(), *[p.grad for p in model.parameters()]])
    assert engine_calls(ours) == (2, 0), deepwell.summary(ours)
    for wanted, got in zip(*gradients):
        assert (got - wanted).norm() <= 2e-5 * wanted.norm() + 1e-7
    for one, other in zip(plain.layers, ours.layers):
        wanted, got = one.moe.statistics(), other.moe.statistics()
        assert got["tokens"] == wanted["tokens"] and got["dropped"] == wanted["dropped"] > 0.0
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert len({tuple(layer.moe.statistics()["tokens"]) for layer in ours.layers}) == layers


def test_without_weights() -> None:
    """On the meta device nothing is computed. The experts cost what the rows of a grouped GEMM cost."""
    with torch.device("meta"):
        model = Model(2, capacity_factor=1.25)
    ir = deepwell.capture(model, torch.zeros(3, 9, dtype=torch.int64, device="meta"))
    rows, steps = 3 * 9 * 2, 2 * 2  # choices, and mixtures times two operations of a multiplication
    experts = rows * steps * (H * 2 * INNER + INNER * H)
    assert experts < ir.cost(B=3, S=9)[0] < 2 * experts


def test_equal_layers_are_copied() -> None:
    captured = capture_graph(Model(4), (torch.randint(0, 23, (3, 9)),), repeat=True)
    assert captured.copied_layers == 2


def test_evaluation_and_restore_keep_statistics(always) -> None:
    moe = made()
    ours = deepwell.optimize(copy.deepcopy(moe), verbose=False)
    x = torch.randn(2, 7, H)
    with torch.no_grad():
        assert torch.allclose(ours(x), moe(x), atol=1e-6)
    assert ours.statistics()["tokens"] == moe.statistics()["tokens"]
    deepwell.restore(ours)
    y = torch.randn(4, 3, H)
    ours(y), moe(y)
    assert ours.statistics()["tokens"] == moe.statistics()["tokens"]
    assert sum(ours.statistics()["tokens"]) == 24


def test_jitter_is_drawn_in_training_alone(always) -> None:
    moe = made(router_jitter=0.3)
    ours = deepwell.optimize(copy.deepcopy(moe), verbose=False)
    x = torch.randn(2, 7, H)
    for model in (moe, ours):
        assert not torch.equal(model(x), model(x))
        model(x).sum().backward()
        assert model.gate.weight.grad is not None
        model.eval()
    assert torch.allclose(ours(x), moe(x), atol=1e-6)
    assert engine_calls(ours)[1] == 0
    factors = torch.ops.deepwell.router_jitter(torch.zeros(10000), 0.3)
    assert 0.7 <= factors.min() < 0.71 and 1.29 < factors.max() <= 1.3


# ---- blocks of transformers ------------------------------------------------------------------------

BLOCKS = {
    "mixtral": (lambda: mixtures.mixtral().model.layers[0].mlp, ()),
    "qwen2-moe": (lambda: mixtures.qwen2_moe().model.layers[0].mlp, ()),
    "qwen3-moe": (lambda: mixtures.qwen3_moe().model.layers[0].mlp, ()),
    "olmoe": (lambda: mixtures.olmoe().model.layers[0].mlp, ()),
    "deepseek-v2": (lambda: mixtures.deepseek_v2().model.layers[1].mlp, ()),
    "deepseek-v2-greedy": (
        lambda: mixtures.deepseek_v2(topk_method="greedy").model.layers[1].mlp,
        (),
    ),
    "deepseek-v3": (lambda: mixtures.deepseek_v3().model.layers[1].mlp, ()),
}


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("qwen2-moe", "deepseek-v3") else pytest.param(n, marks=pytest.mark.slow)
        for n in BLOCKS
    ],
)
def test_from_module(name: str) -> None:
    torch.manual_seed(2)
    block = BLOCKS[name][0]()
    with torch.no_grad():
        for key, tensor in [*block.named_parameters(), *block.named_buffers()]:
            tensor.normal_(std=0.1 if "proj" in key else 1.0)
    block.experts.config._experts_implementation = "eager"
    block.experts.down_proj.requires_grad_(False)
    moe = DeepwellMoE.from_module(block, capacity_factor=100.0)
    assert moe.state_dict().keys() == block.state_dict().keys()
    assert moe.experts.gate_up_proj is block.experts.gate_up_proj
    assert not moe.experts.down_proj.requires_grad and moe.gate.weight.requires_grad
    x = torch.randn(2, 9, 48)
    wanted = block(x)
    wanted.square().sum().backward()
    gradients = {key: p.grad for key, p in block.named_parameters()}
    block.zero_grad()
    got = moe(x)
    got.square().sum().backward()
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    for key, p in moe.named_parameters():
        if gradients[key] is None:
            assert p.grad is None
        else:
            assert (p.grad - gradients[key]).norm() <= 1e-5 * gradients[key].norm() + 1e-7, key
    block.load_state_dict({key: 2 * value for key, value in moe.state_dict().items()})
    moe.load_state_dict(block.state_dict())


def test_from_module_refuses() -> None:
    with pytest.raises(
        deepwell.UnsupportedError, match="supports the blocks of Mixtral.* not GptOssMLP"
    ):
        DeepwellMoE.from_module(mixtures.gpt_oss().model.layers[0].mlp)
    block = mixtures.mixtral(router_jitter_noise=0.1).model.layers[0].mlp
    with pytest.raises(deepwell.UnsupportedError, match="jitter_noise is 0.1"):
        DeepwellMoE.from_module(block)
    block.jitter_noise = 0.0
    with pytest.raises(ValueError, match="activation, normalize come from the block"):
        DeepwellMoE.from_module(block, normalize=False, activation="gelu")


# ---- errors and small things -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 7}, "top_k is 7; expected at most num_experts, which is 6"),
        ({"top_k": 0}, "top_k is 0; expected an integer of at least 1"),
        (
            {"activation": "swish"},
            "activation is 'swish'; expected one of 'swiglu', 'geglu', 'gelu'",
        ),
        ({"router": "hash"}, "router is 'hash'; expected one of 'softmax', 'sigmoid'"),
        ({"drop": "random"}, "drop is 'random'"),
        ({"capacity_factor": 0}, "capacity_factor is 0; expected a positive number, or None"),
        ({"groups": 4}, "groups is 4; expected a divisor of num_experts, 6"),
        ({"groups": 3, "top_groups": 4}, "top_groups is 4"),
        (
            {"groups": 3, "top_k": 3},
            "top_k is 3; expected at most the experts of top_groups groups, 2",
        ),
        ({"groups": 6, "top_groups": 2}, "groups of at least 2 experts"),
        ({"z_loss": -1.0}, "z_loss is -1.0; expected a coefficient of at least 0"),
        ({"router_jitter": 1.0}, "router_jitter is 1.0"),
        ({"routed_scale": 0}, "routed_scale is 0"),
        ({"shared_experts": -1}, "shared_experts is -1"),
        ({"shared_dim": 0}, "shared_dim is 0"),
        ({"shared_gate": True}, "shared_gate is True; expected False without shared experts"),
    ],
)
def test_refused_options(options, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        DeepwellMoE(H, INNER, E, **{"top_k": 2, **options})
    assert message in str(raised.value)


def test_refused_calls() -> None:
    moe = made()
    with pytest.raises(
        ValueError, match=r"hidden_states have the shape \[3, 11\]; expected \[.., 12\]"
    ):
        moe(torch.randn(3, 11))
    with pytest.raises(RuntimeError, match="there was no call yet"):
        moe.statistics()
    with pytest.raises(ValueError, match="give score_correction_bias=True"):
        moe.update_bias()
    assert moe.loss() == 0.0 and DeepwellMoE.losses_of(nn.Linear(2, 2)) == 0


def test_bias_balances_the_load() -> None:
    moe = made(router="sigmoid", score_correction_bias=True)
    x = torch.randn(64, H) + 1.0
    moe(x)
    before = moe.statistics()["imbalance"]
    for _ in range(60):
        moe(x)
        moe.update_bias(0.02)
    moe(x)
    assert moe.statistics()["imbalance"] < 0.6 * before


def test_bias_follows_the_load_that_is_given() -> None:
    moe = made(score_correction_bias=True)
    before = moe.gate.e_score_correction_bias.clone()
    moe.update_bias(0.5, tokens=[9, 0, 3, 3, 1, 2])
    moved = moe.gate.e_score_correction_bias - before
    assert torch.allclose(moved, torch.tensor([-0.5, 0.5, 0.0, 0.0, 0.5, 0.5]))
    with pytest.raises(ValueError, match="expected a number for each of 6 experts"):
        moe.update_bias(tokens=[1, 2])


def test_low_precision_routes_in_fp32() -> None:
    """The router of a BF16 layer sees FP32 numbers, under autocast, too."""
    moe = made().bfloat16()
    x = torch.randn(3, 5, H, dtype=torch.bfloat16)
    logits, probabilities, _, weights = moe.gate(x.reshape(-1, H))
    assert logits.dtype == probabilities.dtype == weights.dtype == torch.float32
    assert moe(x).dtype == torch.bfloat16
    wide = made()
    seen = []
    wide.gate.register_forward_hook(lambda module, args, result: seen.append(result[0]))
    with torch.autocast("cpu", torch.bfloat16):
        y = wide(x.float())
    assert seen[0].dtype == torch.float32 and y.dtype == torch.float32
    exact = wide(x.float())
    assert 1e-6 < (y - exact).norm() / exact.norm() < 0.05  # the experts computed in BF16


def test_a_deep_copy_has_no_statistics_and_no_calls_keep_memory() -> None:
    moe = made()
    moe(torch.randn(3, H))
    with pytest.raises(RuntimeError):
        copy.deepcopy(moe).statistics()
    routing.forget(moe)
    assert routing.last(moe) is None


class AddsLosses(Model):
    """The sum of losses is a part of the forward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + DeepwellMoE.losses_of(self)


@pytest.mark.slow
def test_losses_inside_the_forward(always) -> None:
    plain = AddsLosses(3, load_balance_loss=0.5, z_loss=0.1)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    ids = torch.randint(0, 23, (3, 9), generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        assert_same_function(plain, ours, (ids,), {})
    assert engine_calls(ours) == (2, 0), deepwell.summary(ours)


def test_losses_of_an_earlier_call_are_no_part_of_a_graph(always) -> None:
    class Earlier(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            before = DeepwellMoE.losses_of(self)
            return super().forward(ids) + float(before)

    plain = Earlier(1, z_loss=0.1)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    ids = torch.randint(0, 23, (3, 9))
    for _ in range(2):
        assert torch.allclose(ours(ids), plain(ids), rtol=1e-5)
    assert "recorded in an earlier call" in deepwell.summary(ours)


@pytest.mark.slow
@pytest.mark.skipif(not _deepwell.jit_compiler(), reason="elementwise programs need NVRTC")
def test_on_an_emulated_gpu(always) -> None:
    options = {"capacity_factor": 0.75, "drop": "weight", "bias": True, "load_balance_loss": 0.3}
    plain = WithLoss(made(z_loss=0.02, sequence_loss=0.1, **options))
    ours = deepwell.optimize(copy.deepcopy(plain), target="emulator:sm_90a", verbose=False)
    assert_same_function(plain, ours, (torch.randn(2, 7, H),), {})
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)
    assert ours.moe.statistics()["tokens"] == plain.moe.statistics()["tokens"]
