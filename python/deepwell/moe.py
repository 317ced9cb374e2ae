"""``deepwell.DeepwellMoE``: a layer of experts with its router, in place of a transformer's MLP.

The forward runs in PyTorch on any device. ``deepwell.optimize`` captures it whole, as grouped GEMMs (docs/moe.md).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Iterable, Optional, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from deepwell import routing
from deepwell.errors import UnsupportedError

_GATED = {"swiglu": F.silu, "geglu": F.gelu}
_PLAIN = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


@torch.library.custom_op("deepwell::router_jitter", mutates_args=())
def _jitter(x: torch.Tensor, width: float) -> torch.Tensor:
    """Returns random factors of x's shape, uniform between 1 - width and 1 + width."""
    return torch.empty_like(x).uniform_(1.0 - width, 1.0 + width)


@_jitter.register_fake
def _(x: torch.Tensor, width: float) -> torch.Tensor:
    return torch.empty_like(x)


# custom_op would give the operation a backward of its own, which a graph that is differentiated has no use for.
_library = torch.library.Library("deepwell", "FRAGMENT")
_library.define("grouped_linear(Tensor x, Tensor weight, Tensor index, Tensor? bias) -> Tensor")


def _grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, bias: Optional[torch.Tensor]
) -> torch.Tensor:
    """Multiplies each row of x [T, K] by the matrix of its index, of weight [E, N, K], and adds its bias. Rows with the
    index E are not multiplied: their result is 0."""
    y = x.new_zeros(len(x), weight.shape[1])
    for expert, matrix in enumerate(weight):
        (rows,) = torch.where(index == expert)
        y[rows] = F.linear(x[rows], matrix, None if bias is None else bias[expert])
    return y


_library.impl("grouped_linear", _grouped_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("deepwell::grouped_linear", lib=_library)
def _(x, weight, index, bias):
    return x.new_empty(x.shape[0], weight.shape[1])


class Router(nn.Module):
    """Chooses ``top_k`` experts for each row, in FP32. Returns (logits, probabilities, indices, weights)."""

    def __init__(
        self,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        kind: str,
        normalize: bool,
        score_correction_bias: bool,
        groups: int,
        top_groups: int,
        group_score: str,
        scale: float,
        jitter: float,
        device: Any,
    ) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.kind, self.normalize = (
            top_k,
            num_experts,
            kind,
            normalize,
        )
        self.groups, self.top_groups, self.group_score = groups, top_groups, group_score
        self.scale, self.jitter = scale, jitter
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_dim, device=device))
        if score_correction_bias:
            bias = torch.zeros(num_experts, dtype=torch.float32, device=device)
            self.register_buffer("e_score_correction_bias", bias)
        else:
            self.e_score_correction_bias = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x.to(wide)
        if self.training and self.jitter > 0.0:
            x = x * _jitter(x.detach(), self.jitter)
        logits = F.linear(x, self.weight.to(wide))
        if self.kind == "softmax":
            scores = probabilities = torch.softmax(logits, -1)
        else:
            scores = torch.sigmoid(logits)
            probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = scores + self.e_score_correction_bias
        if self.groups > 1:
            choice = self._in_the_best_groups(choice)
        indices = torch.topk(choice, self.top_k, -1)[1]
        weights = scores.gather(1, indices)
        if self.normalize:
            # A softmax has a positive sum; a sigmoid of very low scores may not.
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if self.kind == "softmax" else total + 1e-20)
        if self.scale != 1.0:
            weights = weights * self.scale
        return logits, probabilities, indices, weights

    def _in_the_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Returns the scores with those of experts in other groups replaced."""
        grouped = choice.view(-1, self.groups, self.num_experts // self.groups)
        if self.group_score == "max":
            of_group = grouped.max(-1)[0]
        else:
            of_group = torch.topk(grouped, 2, -1)[0].sum(-1)
        best = torch.topk(of_group, self.top_groups, -1)[1]
        kept = torch.zeros_like(of_group).scatter(1, best, 1.0).unsqueeze(-1).expand_as(grouped)
        # Scores without a correction bias are not negative, so 0 is chosen last, as -inf would be.
        fill = 0.0 if self.e_score_correction_bias is None else float("-inf")
        return choice.masked_fill(kept.reshape(-1, self.num_experts) == 0, fill)


class Experts(nn.Module):
    """The matrices of all experts, in the layout of transformers."""

    def __init__(
        self,
        hidden_dim: int,
        ffn_dim: int,
        num_experts: int,
        activation: str,
        bias: bool,
        **where: Any,
    ) -> None:
        super().__init__()
        self.num_experts, self.activation = num_experts, activation
        self.is_gated, self.has_bias = activation in _GATED, bias
        self.first = "gate_up_proj" if self.is_gated else "up_proj"
        width = 2 * ffn_dim if self.is_gated else ffn_dim
        self.register_parameter(
            self.first, nn.Parameter(torch.empty(num_experts, width, hidden_dim, **where))
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, ffn_dim, **where))
        if bias:
            for name, size in ((self.first, width), ("down_proj", hidden_dim)):
                made = nn.Parameter(torch.empty(num_experts, size, **where))
                self.register_parameter(f"{name}_bias", made)

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_gated:
            return _PLAIN[self.activation](x)
        gate, up = x.chunk(2, -1)
        return _GATED[self.activation](gate) * up

    def _weights(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None

    def forward(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        tokens: torch.Tensor,
        drops: bool = False,
        most: Optional[int] = None,
    ) -> torch.Tensor:
        """Returns for each row of x [N, H] the sum of its experts' outputs, times their weights. ``tokens`` has the
        number of rows of each expert. With ``drops``, choices of the expert ``num_experts``, which does not exist, are
        not computed; at most ``most`` others are."""
        top_k = indices.shape[1]
        chosen = indices.reshape(-1)
        if routing.is_traced():
            # Gathers a matrix for each row, which the core recognises as a grouped GEMM.
            rows = x.repeat_interleave(top_k, dim=0)
            y = self._activated(self._gathered(self.first, rows, chosen, drops))
            y = self._gathered("down_proj", y, chosen, drops)
        else:
            order = torch.argsort(chosen, stable=True)  # choices that are dropped come last
            if drops:
                order = order[:most]
            groups = _Groups(tokens, drops)
            if drops and not self._runs_without_sizes(x):
                order = order[: sum(groups.sizes())]
            rows, sorted_experts = groups.without_dropped(x[order // top_k]), chosen[order]
            y = self._activated(self._grouped(self.first, rows, sorted_experts, groups))
            y = self._grouped("down_proj", y, sorted_experts, groups)
            y = y.new_zeros(len(chosen), y.shape[1]).index_copy(0, order, y)
        weighted = y * weights.reshape(-1, 1)
        return weighted.view(-1, top_k, x.shape[1]).sum(1).to(x.dtype)

    def _gathered(
        self, name: str, x: torch.Tensor, chosen: torch.Tensor, drops: bool
    ) -> torch.Tensor:
        weight, bias = self._weights(name)
        if drops:
            x, weight = self._cast(x, name)
            return torch.ops.deepwell.grouped_linear(
                x, weight, chosen, None if bias is None else bias.to(x.dtype)
            )
        y = torch.bmm(weight[chosen], x.unsqueeze(-1)).squeeze(-1)
        return y if bias is None else y + bias[chosen].to(y.dtype)

    def _cast(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        weight = getattr(self, name)
        if _autocasts(x.device):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        return x, weight

    def _runs_without_sizes(self, x: torch.Tensor) -> bool:
        """Returns whether PyTorch multiplies groups whose sizes the host does not know."""
        names = self.first, "down_proj"
        if _autocasts(x.device):
            dtypes = {torch.get_autocast_dtype(x.device.type)}
        else:
            dtypes = {x.dtype, *(getattr(self, name).dtype for name in names)}
        return all(_grouped_mm_takes(x.device, dtypes, getattr(self, name)) for name in names)

    def _grouped(
        self, name: str, x: torch.Tensor, experts: torch.Tensor, groups: _Groups
    ) -> torch.Tensor:
        y = groups.multiply(*self._cast(x, name))
        if self.has_bias:
            bias = getattr(self, f"{name}_bias")
            y = y + bias[experts.clamp(max=self.num_experts - 1)].to(y.dtype)
        return groups.without_dropped(y)


class _Groups:
    """Rows sorted by expert: multiplies each group of rows by the matrix of its expert. With ``drops`` there may be rows
    behind the last group, which are not multiplied."""

    def __init__(self, tokens: torch.Tensor, drops: bool) -> None:
        self._tokens, self._drops = tokens, drops
        self._offsets = tokens.cumsum(0).to(torch.int32)
        self._sizes: list[int] | None = None

    def sizes(self) -> list[int]:
        if self._sizes is None:
            self._sizes = self._tokens.tolist()  # the only wait for the device
        return self._sizes

    def without_dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Replaces rows behind the last group by zeros, and so their gradients: a grouped GEMM leaves both undefined."""
        if not self._drops or self._sizes is not None:
            return x  # there are none
        dropped = torch.arange(len(x), device=x.device) >= self._offsets[-1]
        return x.masked_fill(dropped.unsqueeze(1), 0.0)

    def multiply(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [T, K], w [E, N, K]."""
        if _grouped_mm_takes(x.device, {x.dtype, w.dtype}, w):
            return F.grouped_mm(x, w.transpose(1, 2), offs=self._offsets)
        # The gradient of unbind is one stack; that of w[e] would be as large as w for each expert.
        return torch.cat([F.linear(rows, m) for rows, m in zip(x.split(self.sizes()), w.unbind(0))])


def _autocasts(device: torch.device) -> bool:
    """Returns whether torch.autocast is on for a device; the meta device has none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _grouped_mm_takes(device: torch.device, dtypes: set[torch.dtype], w: torch.Tensor) -> bool:
    """Returns whether PyTorch has a grouped GEMM for such operands. It is differentiable for BF16 on GPUs from compute
    capability 8.0 on, if rows are multiples of 16 bytes."""
    return (
        hasattr(F, "grouped_mm")
        and dtypes == {torch.bfloat16}
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and w.shape[1] % 8 == 0
        and w.shape[2] % 8 == 0
    )


class _SharedExperts(nn.Module):
    """The experts that every row sees, as one MLP."""

    def __init__(
        self, hidden_dim: int, width: int, activation: str, bias: bool, **where: Any
    ) -> None:
        super().__init__()
        self.activation = activation
        if activation in _GATED:
            self.gate_proj = nn.Linear(hidden_dim, width, bias, **where)
        self.up_proj = nn.Linear(hidden_dim, width, bias, **where)
        self.down_proj = nn.Linear(width, hidden_dim, bias, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation in _GATED:
            return self.down_proj(_GATED[self.activation](self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(_PLAIN[self.activation](self.up_proj(x)))


class DeepwellMoE(nn.Module):
    """A mixture of experts: a router sends each token to ``top_k`` of ``num_experts`` MLPs and sums their outputs.

    It takes and returns [.., hidden_dim]. Parameters have the names and layouts of transformers' blocks:
    ``gate.weight`` [E, H], ``experts.gate_up_proj`` [E, 2I, H] (without a gated activation ``experts.up_proj``
    [E, I, H]), ``experts.down_proj`` [E, H, I]. See docs/moe.md.

    Args:
        hidden_dim, ffn_dim: width of tokens, and of each expert's inner layer.
        num_experts, top_k: experts, and how many of them each token sees.
        capacity_factor: None drops nothing. Else an expert keeps at most ``ceil(capacity_factor * tokens * top_k /
            num_experts)`` rows of a call; what is beyond that contributes nothing and is not computed.
        drop: which rows an expert keeps: "position" (first choices before second ones, then earlier tokens) or "weight"
            (the largest weights of the router).
        activation: "swiglu", "geglu", or without a gate "gelu", "gelu_tanh", "silu", "relu".
        bias: the experts have biases.
        router: "softmax" over all experts, or "sigmoid" of each score.
        normalize: the weights of the chosen experts are divided by their sum.
        score_correction_bias: a buffer that is added to the scores when experts are chosen, and not to their weights;
            ``update_bias`` balances the load with it.
        groups, top_groups, group_score: experts are chosen only in the ``top_groups`` best of ``groups`` equal groups; a
            group's score is its best expert's ("max") or the sum of its two best ones' ("top2").
        routed_scale: factor of the weights.
        shared_experts, shared_dim: experts that every token sees; ``shared_dim`` is their width in all (default:
            ``shared_experts * ffn_dim``).
        shared_gate: a sigmoid of one more linear layer scales the shared experts, as in Qwen2-MoE.
        load_balance_loss, z_loss, sequence_loss: coefficients of auxiliary losses; 0 leaves a loss out. ``losses_of``
            returns their sum.
        router_jitter: in training the router's inputs are multiplied by random numbers between 1 - ``router_jitter`` and
            1 + ``router_jitter``.
        device, dtype: of the parameters. The router computes in FP32 (FP64 for FP64 tokens).
    """

    def __init__(
        self,
        hidden_dim: int,
        ffn_dim: int,
        num_experts: int,
        top_k: int = 2,
        capacity_factor: float | None = None,
        *,
        drop: str = "position",
        activation: str = "swiglu",
        bias: bool = False,
        router: str = "softmax",
        normalize: bool = True,
        score_correction_bias: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        group_score: str = "top2",
        routed_scale: float = 1.0,
        shared_experts: int = 0,
        shared_dim: int | None = None,
        shared_gate: bool = False,
        load_balance_loss: float = 0.0,
        z_loss: float = 0.0,
        sequence_loss: float = 0.0,
        router_jitter: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("hidden_dim", hidden_dim),
            ("ffn_dim", ffn_dim),
            ("num_experts", num_experts),
            ("top_k", top_k),
            ("groups", groups),
            ("top_groups", top_groups),
        ):
            _check(isinstance(value, int) and value >= 1, name, value, "an integer of at least 1")
        _check(top_k <= num_experts, "top_k", top_k, f"at most num_experts, which is {num_experts}")
        _one_of("activation", activation, (*_GATED, *_PLAIN))
        _one_of("router", router, ("softmax", "sigmoid"))
        _one_of("drop", drop, ("position", "weight"))
        _one_of("group_score", group_score, ("max", "top2"))
        _check(
            num_experts % groups == 0, "groups", groups, f"a divisor of num_experts, {num_experts}"
        )
        _check(top_groups <= groups, "top_groups", top_groups, f"at most groups, which is {groups}")
        size = num_experts // groups
        if groups > 1:
            _check(
                top_k <= top_groups * size,
                "top_k",
                top_k,
                f"at most the experts of top_groups groups, {top_groups * size}",
            )
            enough = group_score == "max" or size >= 2
            _check(
                enough, "groups", groups, "groups of at least 2 experts, or use group_score='max'"
            )
        if capacity_factor is not None:
            fits = isinstance(capacity_factor, (int, float)) and 0 < capacity_factor < 1e6
            _check(fits, "capacity_factor", capacity_factor, "a positive number, or None")
        for name, value in (
            ("load_balance_loss", load_balance_loss),
            ("z_loss", z_loss),
            ("sequence_loss", sequence_loss),
        ):
            fits = isinstance(value, (int, float)) and 0 <= value < math.inf
            _check(fits, name, value, "a coefficient of at least 0")
        _check(0.0 <= router_jitter < 1.0, "router_jitter", router_jitter, "at least 0 and below 1")
        _check(routed_scale > 0, "routed_scale", routed_scale, "a positive number")
        _check(
            isinstance(shared_experts, int) and shared_experts >= 0,
            "shared_experts",
            shared_experts,
            "an integer of at least 0",
        )
        if shared_dim is not None:
            fits = isinstance(shared_dim, int) and shared_dim >= 1
            _check(fits, "shared_dim", shared_dim, "an integer of at least 1, or None")
            shared_experts = shared_experts or 1
        _check(
            shared_experts > 0 or not shared_gate,
            "shared_gate",
            shared_gate,
            "False without shared experts, or give shared_experts",
        )
        where = {"device": device, "dtype": dtype}
        self.hidden_dim, self.ffn_dim, self.num_experts, self.top_k = (
            hidden_dim,
            ffn_dim,
            num_experts,
            top_k,
        )
        self.capacity_factor, self.drop = capacity_factor, drop
        self.load_balance_loss, self.z_loss, self.sequence_loss = (
            load_balance_loss,
            z_loss,
            sequence_loss,
        )
        self.gate = Router(
            hidden_dim, num_experts, top_k, router, normalize, score_correction_bias, groups, top_groups, group_score,
            routed_scale, router_jitter, device,
        )  # fmt: skip
        self.experts = Experts(hidden_dim, ffn_dim, num_experts, activation, bias, **where)
        # The name that the family of transformers has which gates its shared experts, or not.
        self.shared_name = "shared_expert" if shared_gate else "shared_experts"
        self.shared_expert_gate = None
        setattr(self, self.shared_name, None)
        if shared_experts > 0:
            width = shared_dim or shared_experts * ffn_dim
            setattr(
                self, self.shared_name, _SharedExperts(hidden_dim, width, activation, bias, **where)
            )
        if shared_gate:
            self.shared_expert_gate = nn.Linear(hidden_dim, 1, bias=False, **where)
        if dtype is not None:
            self.gate.weight.data = self.gate.weight.data.to(dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws router and experts as nn.Linear would: uniform up to 1 / sqrt(inputs)."""
        first = self.experts.first
        for module, name, inputs in (
            (self.gate, "weight", self.hidden_dim),
            (self.experts, first, self.hidden_dim),
            (self.experts, f"{first}_bias", self.hidden_dim),
            (self.experts, "down_proj", self.ffn_dim),
            (self.experts, "down_proj_bias", self.ffn_dim),
        ):
            parameter = module._parameters.get(name)
            if parameter is not None:
                nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5)

    def extra_repr(self) -> str:
        told = (
            f"{self.hidden_dim}, {self.ffn_dim}, num_experts={self.num_experts}, top_k={self.top_k}"
        )
        return (
            told
            if self.capacity_factor is None
            else f"{told}, capacity_factor={self.capacity_factor}"
        )

    # ---- forward -----------------------------------------------------------------------------------

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dim() < 2 or hidden_states.shape[-1] != self.hidden_dim:
            raise ValueError(
                f"DeepwellMoE: hidden_states have the shape {list(hidden_states.shape)}; expected [.., "
                f"{self.hidden_dim}] with at least 2 axes"
            )
        shape = hidden_states.shape
        x = hidden_states.reshape(-1, self.hidden_dim)
        if _autocasts(x.device):
            with torch.autocast(x.device.type, enabled=False):
                routed = self.gate(x)
        else:
            routed = self.gate(x)
        logits, probabilities, indices, weights = routed
        tokens = routing.load(indices.reshape(-1), self.num_experts)
        made = {"tokens": tokens}
        made.update(self._losses(logits, probabilities, indices, tokens, shape))
        most = None
        if self.capacity_factor is not None:
            kept = self._kept(indices, weights, tokens)
            if not routing.is_traced():  # whose sizes are not known
                most = self.num_experts * self.capacity(len(x))
            made["dropped"] = (~kept).sum()
            # Dropped choices are of an expert that does not exist, so that they are not computed.
            weights = weights * kept
            indices = indices.masked_fill(~kept, self.num_experts)
            tokens = routing.load(indices.reshape(-1), self.num_experts + 1)[:-1]
        y = self.experts(x, indices, weights, tokens, self.capacity_factor is not None, most)
        shared = getattr(self, self.shared_name)
        if shared is not None:
            seen = shared(x)
            if self.shared_expert_gate is not None:
                seen = torch.sigmoid(self.shared_expert_gate(x)) * seen
            y = y + seen
        routing.record(self, made)
        return y.reshape(shape).to(hidden_states.dtype)

    def _kept(
        self, indices: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Returns which of the choices [N, top_k] are within the capacity of their experts."""
        rows = indices.shape[0]
        chosen = indices.t().reshape(-1)  # all first choices, then all second ones
        if self.drop == "position":
            order = torch.argsort(chosen, stable=True)
        else:
            by_weight = torch.argsort(weights.t().reshape(-1), descending=True, stable=True)
            order = by_weight[torch.argsort(chosen[by_weight], stable=True)]
        # The place of each choice in the order of its expert.
        starts = tokens.cumsum(0) - tokens
        place = torch.argsort(order) - starts[chosen]
        # place < factor * rows * top_k / experts, in whole numbers, because the number of rows may be symbolic.
        limit, share = self._capacity(rows)
        return (place * share < limit).view(self.top_k, rows).t()

    def _capacity(self, rows: Any) -> tuple[Any, int]:
        """Returns numerator and denominator of the most rows of an expert in a call of ``rows`` tokens, not rounded up."""
        factor = Fraction(self.capacity_factor).limit_denominator(1_000_000)
        return rows * (self.top_k * factor.numerator), self.num_experts * factor.denominator

    def capacity(self, rows: int) -> int:
        """Returns the most rows that an expert computes in a call of ``rows`` tokens; ``rows`` without a capacity factor,
        because a token chooses an expert once."""
        if self.capacity_factor is None:
            return rows
        limit, share = self._capacity(rows)
        return -(-limit // share)

    def _losses(
        self,
        logits: torch.Tensor,
        probabilities: torch.Tensor,
        indices: torch.Tensor,
        tokens: torch.Tensor,
        shape: torch.Size,
    ) -> dict[str, torch.Tensor]:
        """Returns entropy and losses as numbers, and the weighted sum of the losses."""
        choices = indices.shape[0] * self.top_k
        numbers = [routing.entropy(probabilities)]
        total = None
        if self.load_balance_loss:
            share = tokens.to(probabilities.dtype) / choices
            numbers.append(self.num_experts * (share * probabilities.mean(0)).sum())
            total = self.load_balance_loss * numbers[-1]
        if self.z_loss:
            numbers.append(torch.logsumexp(logits, -1).square().mean())
            total = self.z_loss * numbers[-1] + (0.0 if total is None else total)
        if self.sequence_loss:
            numbers.append(self._sequence_loss(probabilities, indices, shape))
            total = self.sequence_loss * numbers[-1] + (0.0 if total is None else total)
        made = {"numbers": torch.stack(numbers)}
        if total is not None:
            made["loss"] = total
        return made

    def _sequence_loss(
        self, probabilities: torch.Tensor, indices: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        """Returns the load-balance loss of each sequence, on average."""
        length = shape[-2]
        of_sequence = indices.reshape(-1, length * self.top_k)
        counts = routing.load(of_sequence, self.num_experts).to(probabilities.dtype)
        mean = probabilities.reshape(-1, length, self.num_experts).mean(1)
        share = counts / (length * self.top_k)
        return self.num_experts * (share * mean).sum(-1).mean()

    # ---- the last call -----------------------------------------------------------------------------

    def loss(self) -> torch.Tensor | float:
        """Returns the weighted sum of the last call's auxiliary losses, differentiable; 0.0 if there are none."""
        return (routing.last(self) or {}).get("loss", 0.0)

    @staticmethod
    def losses_of(model: nn.Module) -> torch.Tensor | float:
        """Returns the sum of ``loss()`` over all mixtures of a model; add it to the model's own loss."""
        return sum(m.loss() for m in model.modules() if isinstance(m, DeepwellMoE))

    def statistics(self) -> dict[str, Any]:
        """Returns what the last call was, as numbers. Waits for the device.

        ``tokens``: rows that chose each expert, before any were dropped. ``imbalance``: the largest of them over their
        mean. ``dropped``: the share of choices that were dropped. ``entropy``: mean entropy of a token's router
        probabilities, in nats; at most log(num_experts). ``losses``: the auxiliary losses, not weighted.
        """
        tensors = routing.last(self)
        if tensors is None:
            raise RuntimeError(
                "DeepwellMoE.statistics: there was no call yet; call the module first"
            )
        names = [
            name for name in ("load_balance_loss", "z_loss", "sequence_loss") if getattr(self, name)
        ]
        numbers = tensors["numbers"].detach().tolist()
        return {**load_numbers(tensors), "losses": dict(zip(names, numbers[1:]))}

    @torch.no_grad()
    def update_bias(
        self, rate: float = 1e-3, tokens: Optional[Sequence[int] | torch.Tensor] = None
    ) -> None:
        """Moves the correction bias by ``rate``: up for experts with fewer rows than the mean, down for those with more
        (auxiliary-loss-free balancing). Call it after each step. ``tokens``: the rows of each expert, such as those of all
        micro-batches and ranks that Trainer reports; None: those of this module's last call."""
        bias = self.gate.e_score_correction_bias
        if bias is None:
            raise ValueError(
                "DeepwellMoE.update_bias: there is no bias; give score_correction_bias=True"
            )
        if tokens is None:
            tensors = routing.last(self)
            if tensors is None:
                raise RuntimeError(
                    "DeepwellMoE.update_bias: there was no call yet; call the module first"
                )
            tokens = tensors["tokens"]
        tokens = torch.as_tensor(tokens, device=bias.device).to(bias.dtype)
        if tokens.shape != bias.shape:
            raise ValueError(
                f"DeepwellMoE.update_bias: tokens has the shape {list(tokens.shape)}; expected a number for each of "
                f"{self.num_experts} experts"
            )
        bias += rate * torch.sign(tokens.mean() - tokens)

    # ---- blocks of transformers ----------------------------------------------------------------------

    @classmethod
    def from_module(cls, block: nn.Module, **options: Any) -> DeepwellMoE:
        """Returns a mixture with the parameters (the same tensors) and the router of a block of transformers: Mixtral,
        Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2, DeepSeek-V3. ``options`` are those of the constructor that a block does
        not have, such as ``capacity_factor``. State dicts of both can be loaded into each other."""
        found = _routing_of(block)
        gate, experts = block.gate, block.experts
        activation = _activation_of(experts)
        width, hidden = experts.gate_up_proj.shape[1] // 2, experts.gate_up_proj.shape[2]
        shared = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
        if shared is not None:
            found["shared_dim"] = shared.up_proj.weight.shape[0]
        found["shared_gate"] = getattr(block, "shared_expert_gate", None) is not None
        taken = sorted(set(options) & {"activation", "bias", "device", "dtype", *found})
        if taken:
            raise ValueError(
                f"DeepwellMoE.from_module: {', '.join(taken)} come from the block; leave them out"
            )
        made = cls(
            hidden,
            width,
            gate.num_experts,
            gate.top_k,
            activation=activation,
            device="meta",
            **found,
            **options,
        )
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(block.get_parameter(name).requires_grad)
        made.load_state_dict(block.state_dict(keep_vars=True), assign=True)
        return made.train(block.training)


_FAMILIES = "Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 or DeepSeek-V3"


def _routing_of(block: nn.Module) -> dict[str, Any]:
    """Returns the constructor's options of the router of transformers' block."""
    gate = getattr(block, "gate", None)
    experts = getattr(block, "experts", None)
    name = type(gate).__name__
    grouped: dict[str, Any] = {}
    if getattr(gate, "num_group", None) not in (None, 1):
        grouped = {"groups": gate.num_group, "top_groups": gate.topk_group}
    if getattr(experts, "gate_up_proj", None) is None or getattr(experts, "is_transposed", False):
        name = ""
    if name == "MixtralTopKRouter":
        if block.jitter_noise > 0.0:
            raise UnsupportedError(
                f"DeepwellMoE.from_module: the block's jitter_noise is {block.jitter_noise}, which changes the experts' "
                "inputs, too; set it to 0 and give router_jitter="
            )
        return {"normalize": True}
    if name in ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter"):
        return {"normalize": bool(gate.norm_topk_prob)}
    if name == "DeepseekV2TopkRouter":
        if gate.topk_method == "greedy":
            grouped = {}
        scale = float(gate.routed_scaling_factor)
        return {"normalize": False, "routed_scale": scale, "group_score": "max", **grouped}
    if name == "DeepseekV3TopkRouter":
        return {
            "router": "sigmoid",
            "normalize": bool(gate.norm_topk_prob),
            "score_correction_bias": True,
            "routed_scale": float(gate.routed_scaling_factor),
            **grouped,
        }
    raise UnsupportedError(
        f"DeepwellMoE.from_module supports the blocks of {_FAMILIES} in transformers, not {type(block).__name__}; "
        "deepwell.optimize runs other blocks as they are"
    )


def _activation_of(experts: nn.Module) -> str:
    act = getattr(experts, "act_fn", None)
    known = {
        "SiLUActivation": "swiglu",
        "SiLU": "swiglu",
        "GELUActivation": "geglu",
        "GELU": "geglu",
    }
    name = known.get(type(act).__name__)
    if name is None or getattr(act, "approximate", "none") != "none":
        raise UnsupportedError(
            f"DeepwellMoE.from_module supports experts with SiLU or GELU, not {type(act).__name__}"
        )
    return name


def load_numbers(tensors: routing.Tensors) -> dict[str, Any]:
    """Returns what a mixture recorded of its load, as numbers."""
    tokens = tensors["tokens"].tolist()
    total = sum(tokens)
    made: dict[str, Any] = {
        "tokens": tokens,
        "imbalance": max(tokens) * len(tokens) / total if total else math.nan,
        "dropped": tensors["dropped"].item() / total if total and "dropped" in tensors else 0.0,
    }
    if "numbers" in tensors:
        made["entropy"] = tensors["numbers"][0].item()
    return made


def _check(fits: bool, name: str, value: Any, expected: str) -> None:
    if not fits:
        raise ValueError(f"DeepwellMoE: {name} is {value!r}; expected {expected}")


def _one_of(name: str, value: Any, known: Iterable[str]) -> None:
    _check(value in known, name, value, "one of " + ", ".join(f"'{each}'" for each in known))
