"""Watches the rounding of a training run's linear layers (docs/precision.md, "Guards").

A ``Sample`` collects the statistics of one step, which the engine computes in backward as the gradients of leaves made for
them. A ``Watch`` judges samples, and says which policy a step has.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepwell.precision import OPERANDS, PrecisionPolicy

if TYPE_CHECKING:
    from deepwell.runtime import Program


@dataclass(frozen=True)
class OperandReport:
    """The rounding of one operand of a layer in a sampled step."""

    layer: str  # the module's name
    operand: str  # "forward_x" ... "wgrad_x"
    scheme: str  # "mxfp8", "nvfp4+hadamard+stochastic"
    snr_db: float  # infinity if nothing was lost
    bound_db: float
    elements: int  # other than 0
    underflow: int  # of these, rounded to 0
    saturated: (
        int  # elements that rounding alone would take beyond the largest number of their block
    )

    def failure(self, underflow: float) -> str:
        """Returns what is wrong with the operand, or "". ``underflow``: the most that may become 0."""
        if self.snr_db < self.bound_db:
            return f"SNR {self.snr_db:.1f} dB, bound {self.bound_db:.1f} dB"
        if self.underflow > underflow * self.elements:
            return f"{self.underflow / self.elements:.1%} of its elements became 0, bound {underflow:.0%}"
        return ""


class Sample:
    """What the engine observes while it is set in a model's sessions."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Program, list[torch.Tensor]]] = {}

    def leaves(self, program: Program) -> list[torch.Tensor]:
        """Returns the leaves whose gradients are the statistics of the program's layers."""
        found = self._made.get(id(program))
        if found is None:
            place = program.target.device
            made = [
                torch.zeros(
                    program.leaf_shape(len(program.leaf_roles) - 1, ()),
                    dtype=torch.float64,
                    device=place,
                    requires_grad=True,
                )
                for _ in program.observed
            ]
            found = self._made[id(program)] = program, made
        return found[1]

    def numbers(self) -> torch.Tensor | None:
        """Returns the statistics of all layers where they were computed, [layers, 6, 5]; None if no engine ran. Statistics
        of several forwards and backwards are added up. Waits for nothing."""
        found = []
        for _, leaves in self._layers():
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            found.append(torch.stack(grads).sum(0) if grads else torch.zeros_like(leaves[0]))
        return torch.stack(found).view(len(found), len(OPERANDS), -1) if found else None

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layers of ``numbers``, as ``PrecisionPolicy.choices`` describes them."""
        return [layer for layer, _ in self._layers()]

    def _layers(self) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Returns each layer with its leaves, one for each kind of call that ran. Ranks whose kinds of calls differ, because
        one of them has a batch of one row, have the same layers, so that their statistics can be added up."""
        found: dict[tuple[int, str, int], tuple[dict[str, Any], list[torch.Tensor]]] = {}
        for program, leaves in self._made.values():
            seen: Counter[str] = Counter()  # linear layers that a module computes itself
            for layer, leaf in zip(program.observed, leaves):
                name = layer["module"]
                # Modules that were optimized by themselves may share names; each such call has arenas of its own.
                key = id(program.pool), name, seen[name]
                seen[name] += 1
                found.setdefault(key, (layer, []))[1].append(leaf)
        return list(found.values())

    def report(self) -> list[OperandReport]:
        """Returns the rounding of each operand. Waits for the step's backward."""
        numbers = self.numbers()
        return [] if numbers is None else reports(self.layers, numbers.tolist())


def reports(layers: Sequence[dict[str, Any]], numbers: Any) -> list[OperandReport]:
    """``numbers``: of ``Sample.numbers``, as lists. Operands that no GEMM read are left out."""
    found = []
    for layer, operands in zip(layers, numbers):
        for operand, (signal, noise, elements, underflow, saturated) in zip(OPERANDS, operands):
            if operand not in layer["bounds"] or elements == 0:
                continue
            snr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else 0.0
            found.append(
                OperandReport(
                    layer["module"], operand, layer["operands"][operand], snr,
                    layer["bounds"][operand], int(elements), int(underflow), int(saturated),
                )
            )  # fmt: skip
    return found


@contextlib.contextmanager
def sample_precision(model: torch.nn.Module) -> Iterator[Sample]:
    """Observes the linear layers of an optimized model while forward and backward run inside the context:

        with deepwell.sample_precision(model) as sample:
            model(**batch).loss.backward()
        for operand in sample.report(): ...

    The model needs a ``PrecisionPolicy`` with a guard, which has the bounds. Nothing is judged.
    """
    from deepwell.optimize import sessions

    observed = [each for each in sessions(model) if each.policy is not None]
    if not any(each.policy.guard for each in observed):
        raise ValueError(
            "the model has no precision policy with a guard, whose bounds the samples are compared with: use "
            "deepwell.optimize(model, precision=PrecisionPolicy(..., guard=PrecisionGuard()))"
        )
    sample = Sample()
    try:
        for each in observed:
            each.sample = sample
        yield sample
    finally:
        for each in observed:
            each.sample = None


class Watch:
    """The guard of a run: which policy each step has, and which layers have fallen back.

    A layer that falls back because of step N is BF16 from step N + 2 on, also where the sample is known earlier, so that
    a run does not depend on when it is read.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        assert policy.guard is not None
        self.policy, self.guard = policy, policy.guard
        self._in_bf16 = policy.in_bf16()
        self.changes: list[
            dict[str, Any]
        ] = []  # JSON, in their order: layers that fell back, repairs
        self.failed: dict[str, int] = {}  # samples in a row, by layer
        self.last: list[OperandReport] = []
        self._known: dict[tuple[str, ...], PrecisionPolicy] = {}

    def repair_begins(self, steps: int) -> int:
        """Returns the first step that is repaired; one behind the last if none is."""
        return steps - int(self.guard.repair * steps + 0.5) + 1

    def samples(self, step: int, steps: int) -> bool:
        every = self.guard.every
        return every > 0 and step % every == 0 and step < self.repair_begins(steps)

    def policy_of(self, step: int, steps: int) -> PrecisionPolicy:
        """Returns the policy of a step in a run of ``steps``."""
        if self.guard.repair and step >= self.repair_begins(steps):
            return self._in_bf16
        return self.unrepaired(step)

    def unrepaired(self, step: int) -> PrecisionPolicy:
        """Returns the policy of a step without the repair: the run's, and the layers that have fallen back."""
        fallen = tuple(
            each["layer"] for each in self.changes if "layer" in each and each["from_step"] <= step
        )
        if fallen not in self._known:
            self._known[fallen] = self.policy.with_fallen_back(fallen) if fallen else self.policy
        return self._known[fallen]

    def repaired(self, step: int) -> dict[str, Any]:
        """Records that the repair begins with a step. Returns the change."""
        self.changes.append({"from_step": step, "repair": True})
        return self.changes[-1]

    def judge(self, step: int, found: list[OperandReport]) -> list[dict[str, Any]]:
        """Judges a step's sample. Returns the changes that it causes: the layers that fall back."""
        self.last = found
        fallen = {each["layer"] for each in self.changes if "layer" in each}
        worst: dict[str, tuple[float, OperandReport, str]] = {}
        for each in found:
            failure = each.failure(self.guard.underflow)
            excess = each.snr_db - each.bound_db
            if failure and (each.layer not in worst or excess < worst[each.layer][0]):
                worst[each.layer] = excess, each, failure
        changes = []
        for layer in dict.fromkeys(each.layer for each in found):
            self.failed[layer] = self.failed.get(layer, 0) + 1 if layer in worst else 0
            if self.failed[layer] < self.guard.samples or layer in fallen:
                continue
            _, operand, failure = worst[layer]
            changes.append(
                {
                    "from_step": step + 2,
                    "layer": layer,
                    "sampled_step": step,
                    "operand": operand.operand,
                    "scheme": operand.scheme,
                    "snr_db": None if math.isinf(operand.snr_db) else operand.snr_db,
                    "bound_db": operand.bound_db,
                    "underflow": operand.underflow / operand.elements,
                    "reason": failure,
                }
            )
        self.changes += changes
        return changes

    # ---- checkpoints ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        failed = {layer: count for layer, count in self.failed.items() if count}
        return {"changes": list(self.changes), "failed": failed}

    def restore(self, state: dict[str, Any]) -> None:
        self.changes, self.failed = list(state["changes"]), dict(state["failed"])


def told(change: dict[str, Any]) -> str:
    """Describes a change in a line."""
    if "repair" in change:
        return f"step {change['from_step']}  every layer is BF16 from here on (repair)"
    return (
        f"step {change['sampled_step']}  {change['layer'] or '(the model)'} falls back to BF16 from step "
        f"{change['from_step']} on: {change['operand']} in {change['scheme']}: {change['reason']}"
    )
