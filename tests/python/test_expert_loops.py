"""Mixtures of experts written as a loop: captured as grouped GEMMs where every statement is understood, else left alone."""

from __future__ import annotations

import copy
import json

import deepwell
import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_function
from deepwell import _deepwell
from deepwell.capture import capture_graph
from deepwell.lowering.expert_loops import NotRecognised, of_their_experts
from torch import nn
from users import engine_calls

H, E = 8, 5


class SwiGLU(nn.Module):
    """An expert as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(H, 6, bias=False), nn.Linear(6, H, bias=False)
        self.w3 = nn.Linear(H, 6, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(H, 7), nn.GELU(), nn.Linear(7, H), nn.Dropout(0.0))


class Mixture(nn.Module):
    top_k = 2

    def __init__(self, expert=mlp) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(E))
        self.num_experts = E
        nn.init.normal_(self.gate.weight)

    def routed(self, x):
        weights, selected = torch.topk(self.gate(x).softmax(-1), self.top_k)
        return weights / weights.sum(-1, keepdim=True), selected


class Where(Mixture):
    """As in Mistral's and DeepSeek's own code."""

    def forward(self, x):
        flat = x.view(-1, H)
        weights, selected = self.routed(flat)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(selected == i)
            out[rows] += weights[rows, choice, None] * expert(flat[rows])
        return out.view_as(x)


class Guarded(Mixture):
    """Experts without rows are skipped; the loop counts."""

    def forward(self, x):
        flat = x.view(-1, H)
        weights, selected = self.routed(flat)
        out = torch.zeros_like(flat)
        for i in range(self.num_experts):
            rows, choice = (selected == i).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            y = self.experts[i](flat[rows])
            out.index_add_(0, rows, y * weights[rows, choice].unsqueeze(-1))
        return out.view_as(x)


class OneHot(Mixture):
    """As in earlier versions of transformers."""

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        routing_weights, selected_experts = self.routed(hidden_states)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final = torch.zeros(
            (batch * length, width), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, width)
            current = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch, length, width)


class Masked(Mixture):
    """As in tutorials: a mask of tokens, and gates of all experts of which few are not 0."""

    def forward(self, x):
        logits = self.gate(x)
        top, indices = logits.topk(self.top_k, dim=-1)
        sparse = torch.full_like(logits, float("-inf")).scatter(-1, indices, top)
        gating_output = F.softmax(sparse, dim=-1)
        final_output = torch.zeros_like(x)
        flat_x = x.view(-1, x.size(-1))
        flat_gating_output = gating_output.view(-1, gating_output.size(-1))
        for i, expert in enumerate(self.experts):
            expert_mask = (indices == i).any(dim=-1)
            flat_mask = expert_mask.view(-1)
            if flat_mask.any():
                expert_input = flat_x[flat_mask]
                expert_output = expert(expert_input)
                gating_scores = flat_gating_output[flat_mask, i].unsqueeze(1)
                weighted_output = expert_output * gating_scores
                final_output[expert_mask] += weighted_output.squeeze(1)
        return final_output


class TopOne(Mixture):
    """One expert for each token, whose rows are overwritten."""

    def forward(self, x):
        score, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.sum() > 0:
                out[mine] = score[mine].unsqueeze(-1) * expert(x[mine])
        return x + out


class Indices(Mixture):
    """Row numbers of one choice, with a negative one for tokens that no expert sees."""

    def forward(self, x):
        flat = x.view(-1, H)
        score, chosen = self.gate(flat).sigmoid().max(-1)
        chosen = torch.where(score > 0.6, chosen, torch.full_like(chosen, -1))
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == i).squeeze(-1)
            if len(rows) > 0:
                out[rows] = out[rows] + 0.5 * expert(flat[rows]) * score[rows][:, None]
        return out.view_as(x)


FORMS = [Where, Guarded, OneHot, Masked, TopOne, Indices]
QUICK = (OneHot, Masked)


@pytest.mark.parametrize("expert", [mlp, pytest.param(SwiGLU, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "form",
    [form if form in QUICK else pytest.param(form, marks=pytest.mark.slow) for form in FORMS],
)
def test_same_function(form, expert, always) -> None:
    torch.manual_seed(4)
    plain = form(expert)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    for batch, length in ((3, 11), (2, 16)):
        assert_same_function(plain, ours, (torch.randn(batch, length, H),), {})
    assert engine_calls(ours) == (2, 0), deepwell.summary(ours)


@pytest.mark.parametrize("form", [OneHot, Masked])
def test_grouped_gemms(form) -> None:
    captured = capture_graph(form(), (torch.randn(3, 11, H),))
    assert [name for name, _, _ in captured.symbols] == ["B", "S"]
    nodes = json.loads(captured.json)["nodes"]
    products = [node["attrs"] for node in nodes if node["op"] == "grouped_linear"]
    # Choices outside of the list are not multiplied.
    assert [attrs["ignore_index"] for attrs in products] == [E, E]
    graph = _deepwell.Graph(captured.json)
    graph.run_pass("recognize")
    assert not any(node["op"] == "take" for node in json.loads(graph.json())["nodes"])


def test_an_expert_without_rows_gets_a_gradient_of_zeros(always) -> None:
    plain = Guarded()
    with torch.no_grad():
        plain.gate.weight.zero_()
        plain.gate.weight[:3] = (
            1.0  # the choice is among three experts for rows with a positive sum
        )
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.rand(2, 6, H)
    for model in (plain, ours):
        model(x).sum().backward()
    for own, our in zip(plain.experts[4].parameters(), ours.experts[4].parameters()):
        assert own.grad is None and torch.equal(our.grad, torch.zeros_like(our))


class Given(Mixture):
    """The choice is an argument: it may name an expert twice, or none of the list."""

    def forward(self, x, weights, selected):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(selected == i)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, choice, None])
        return out


class GivenMask(Mixture):
    def forward(self, x, weights, selected):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (selected == i).any(-1)
            out[mine] += weights[mine, i].unsqueeze(-1) * expert(x[mine])
        return out


@pytest.mark.parametrize("mask", [False, True])
def test_an_expert_chosen_twice(mask: bool, always) -> None:
    """A sum over indices counts it twice, one over a mask of rows once."""
    torch.manual_seed(4)
    plain = GivenMask() if mask else Given()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    selected = torch.tensor([[0, 0, 1], [1, 3, 1], [-1, 4, 7], [2, 2, 2], [3, 4, 0]])
    weights = torch.rand(5, E if mask else 3)
    assert_same_function(plain, ours, (torch.randn(5, H), weights, selected), {})
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)


# ---- what is left alone ----------------------------------------------------------------------------


class Usage(Where):
    def forward(self, x):
        weights, selected = self.routed(x)
        out = torch.zeros_like(x)
        used = 0
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(selected == i)
            if rows.numel() > 0:
                used += 1
                out[rows] += weights[rows, choice, None] * expert(x[rows])
        return out / used


class Carried(Where):
    def forward(self, x):
        weights, selected = self.routed(x)
        out, last = torch.zeros_like(x), 0.0
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(selected == i)
            y = expert(x[rows]) + last
            last = y.mean()
            out[rows] += weights[rows, choice, None] * y
        return out


class After(Where):
    def forward(self, x):
        weights, selected = self.routed(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(selected == i)
            out[rows] += weights[rows, choice, None] * expert(x[rows])
        return out * rows.numel()


class InPlace(Where):
    def forward(self, x):
        x = x * 1.0
        weights, selected = self.routed(x)
        out = x
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(selected == i)
            out[rows] += weights[rows, choice, None] * expert(x[rows])
        return out


class Fewer(Where):
    def forward(self, x):
        weights, selected = self.routed(x)
        out = torch.zeros_like(x)
        for i in range(self.num_experts - 1):
            rows, choice = torch.where(selected == i)
            out[rows] += weights[rows, choice, None] * self.experts[i](x[rows])
        return out


class OtherRows(Where):
    def forward(self, x):
        weights, selected = self.routed(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(selected == i)
            out[rows] += weights[rows, choice, None] * expert(x[rows - 1])
        return out


class OtherGuard(Where):
    def forward(self, x):
        weights, selected = self.routed(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, choice = torch.where(selected == i)
            if (weights.round().long() == i).any():
                out[rows] += weights[rows, choice, None] * expert(x[rows])
        return out


class ChangedMask(Where):
    def forward(self, x):
        weights, selected = self.routed(x)
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, E).permute(2, 1, 0)
        mask[0] = 0
        for i in range(E):
            choice, rows = torch.where(mask[i])
            out.index_add_(0, rows, self.experts[i](x[rows]) * weights[rows, choice, None])
        return out


class Twice(Where):
    def forward(self, x):
        weights, selected = self.routed(x)
        out = torch.zeros_like(x)
        for _ in range(2):
            for i, expert in enumerate(self.experts):
                rows, choice = torch.where(selected == i)
                out[rows] += weights[rows, choice, None] * expert(x[rows])
        return out


class Method(nn.Module):
    """An expert with a method that looks at all of its rows together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def centred(self, x):
        return x - x.mean(0)

    def forward(self, x):
        return self.linear(self.centred(x))


class Mixing(nn.Module):
    """An expert that looks at all of its rows together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x):
        return self.linear(x - x.mean(0))


def different() -> Where:
    model = Where()
    model.experts[3] = nn.Sequential(nn.Linear(H, 7), nn.ReLU(), nn.Linear(7, H), nn.Dropout(0.0))
    return model


def hooked() -> Where:
    model = Where()
    model.experts[1][0].register_forward_hook(lambda *arguments: None)
    return model


LEFT = {
    "a count": (Usage, "the statement `used \\+= 1`"),
    "carried": (Carried, "'last' keeps a value from one expert to the next|the statement `last"),
    "used after": (After, "'rows' is used after the loop"),
    "in place": (InPlace, "the result shares memory with what the experts read"),
    "fewer experts": (Fewer, "the loop runs over 4 of 5 experts"),
    "other rows": (OtherRows, "the input of the expert, `x\\[rows - 1\\]`"),
    "mixing rows": (lambda: Where(Mixing), "the forward of an expert \\(Mixing\\) may mix rows"),
    "a method": (lambda: Where(Method), "the forward of an expert \\(Method\\) may mix rows"),
    "another guard": (OtherGuard, "it skips an expert for another reason"),
    "a changed mask": (ChangedMask, "the statement `choice, rows = torch.where"),
    "a loop around": (Twice, "it is inside of another loop"),
    "different experts": (different, "expert 3 differs from expert 0"),
}


SLOWER = ("a changed mask", "a loop around", "carried", "different experts", "mixing rows")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOWER else n for n in LEFT]
)
def test_left_alone(name: str) -> None:
    build, message = LEFT[name]
    with pytest.raises(deepwell.CaptureError, match=message):
        capture_graph(build(), (torch.randn(9, H),))


def test_summary_says_why(always) -> None:
    plain = Usage().eval()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(9, H)
    for _ in range(2):
        assert torch.allclose(ours(x), plain(x), atol=1e-6)
    assert "the loop over experts in the module is not recognised" in deepwell.summary(ours)


def test_experts_with_hooks_are_not_replaced() -> None:
    with pytest.raises(NotRecognised, match="expert 1: hooks on 0"):
        of_their_experts(hooked().experts, torch.randn(3, H), torch.tensor([0, 1, 2]))


def test_rows_of_their_experts() -> None:
    """Duplicates, and experts without rows."""
    experts = Where(SwiGLU).experts.double()
    rows, chosen = torch.randn(7, H, dtype=torch.float64), torch.tensor([4, 0, 0, 2, 4, 4, 0])
    wanted = torch.stack([experts[c](row) for c, row in zip(chosen.tolist(), rows)])
    assert (of_their_experts(experts, rows, chosen) - wanted).norm() < 1e-13
    assert all("forward" not in module.__dict__ for module in experts.modules())
