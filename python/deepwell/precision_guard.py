"""Watches the rounding of a training run's linear layers (docs/precision.md, "Guards").

A ``Sample`` collects the statistics of one step, which the engine computes in backward as the gradients of leaves made for
them. A ``Watch`` judges samples, and says which policy a step has.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepwell import _deepwell
from deepwell.precision import OPERANDS, PrecisionPolicy
from deepwell.runtime import STATISTICS

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
        return [] if numbers is None else reports(self.layers, numbers)


def reports(layers: Sequence[dict[str, Any]], numbers: torch.Tensor) -> list[OperandReport]:
    """``numbers``: of ``Sample.numbers``. Operands that no GEMM read are left out. Waits for the numbers."""
    sums = numbers.detach().to("cpu", torch.float64).contiguous()
    text = _deepwell.precision_operands(json.dumps(list(layers)), len(layers), sums.data_ptr())
    return [
        OperandReport(**{**each, "snr_db": math.inf if each["snr_db"] is None else each["snr_db"]})
        for each in json.loads(text)
    ]


def over_ranks(
    layers: Sequence[dict[str, Any]], numbers: torch.Tensor | None, device: torch.device
) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
    """Adds up the samples of all ranks, each of which must call this. Returns the layers that any rank observed, the same on
    all ranks, and their numbers. A rank that observed a layer in no call, because PyTorch ran its model, adds zeros."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(layers))
    known: dict[tuple[str, int], dict[str, Any]] = {}
    for observed in every:
        for key, layer in zip(_keys(observed), observed):
            known.setdefault(key, layer)
    if not known:
        return [], None
    sums = torch.zeros(len(known), len(OPERANDS), STATISTICS, dtype=torch.float64, device=device)
    places = {key: place for place, key in enumerate(known)}
    if numbers is not None:
        sums[[places[key] for key in _keys(layers)]] = numbers.to(device)
    dist.all_reduce(sums)
    return list(known.values()), sums


def _keys(layers: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Returns what identifies each layer on all ranks: its module, and which of the module's layers it is."""
    seen: Counter[str] = Counter()
    keys = []
    for layer in layers:
        keys.append((layer["module"], seen[layer["module"]]))
        seen[layer["module"]] += 1
    return keys


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
    """The guard of a run: which policy each step has, and which layers have fallen back (deepwell/precision_watch.h, whose
    functions `deepwell train` calls, too).

    A layer that falls back because of step N is BF16 from step N + 2 on, also where the sample is known earlier, so that
    a run does not depend on when it is read.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy
        self._watch = _deepwell.precision_watch(policy.to_json())
        self.last: list[OperandReport] = []
        self._known: dict[int, PrecisionPolicy] = {0: policy}  # by phase

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Layers that fell back, and the repair, as JSON, in their order."""
        return self.state().get("precision_changes", [])

    def repair_begins(self, steps: int) -> int:
        """Returns the first step that is repaired; one behind the last if none is."""
        return _deepwell.precision_watch_repair_begins(self._watch, steps)

    def samples(self, step: int, steps: int) -> bool:
        return _deepwell.precision_watch_samples(self._watch, step, steps)

    def policy_of(self, step: int, steps: int) -> PrecisionPolicy:
        """Returns the policy of a step in a run of ``steps``; always the same object for the same policy."""
        phase = _deepwell.precision_watch_phase(self._watch, step, steps)
        if phase not in self._known:
            text = _deepwell.precision_watch_policy(self._watch, step, steps)
            self._known[phase] = PrecisionPolicy.from_json(text)
        return self._known[phase]

    def unrepaired(self, step: int) -> PrecisionPolicy:
        """Returns the policy of a step without the repair: the run's, and the layers that have fallen back."""
        return self.policy_of(step, 0)

    def repaired(self, step: int) -> dict[str, Any]:
        """Records that the repair begins with a step. Returns the change."""
        return json.loads(_deepwell.precision_watch_repair(self._watch, step))

    def judge(self, step: int, found: list[OperandReport]) -> list[dict[str, Any]]:
        """Judges a step's sample. Returns the changes that it causes: the layers that fall back."""
        self.last = found
        operands = [asdict(each) for each in found]
        for each in operands:
            each["snr_db"] = each["snr_db"] if math.isfinite(each["snr_db"]) else None
        return json.loads(_deepwell.precision_watch_judge(self._watch, step, json.dumps(operands)))

    # ---- checkpoints ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint's manifest keeps."""
        return json.loads(_deepwell.precision_watch_state(self._watch))

    def restore(self, manifest: dict[str, Any]) -> None:
        kept = ("precision_changes", "precision_failed")
        members = {name: manifest[name] for name in kept if name in manifest}
        _deepwell.precision_watch_restore(self._watch, json.dumps(members))
        self._known = {0: self.policy}


def told(change: dict[str, Any]) -> str:
    """Describes a change in a line."""
    return _deepwell.precision_change_text(json.dumps(change))
