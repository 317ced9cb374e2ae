"""The load of experts in training: collected where it was computed, and read when a step is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch

from deepwell import routing


@dataclass
class ExpertLoad:
    """The load of one mixture in a step, over all batches and ranks."""

    layer: str  # path in the model
    tokens: list[int]  # rows that chose each expert, before any were dropped
    dropped: float  # the share of choices that were dropped
    entropy: float  # mean entropy of a token's router probabilities, in nats

    @property
    def imbalance(self) -> float:
        """The rows of the busiest expert over the mean."""
        return max(self.tokens) * len(self.tokens) / sum(self.tokens)


class ExpertLoads:
    """Sums the records of a model's mixtures over the batches of a step."""

    def __init__(self, mixtures: Sequence[tuple[str, torch.nn.Module]]) -> None:
        self._mixtures = list(mixtures)
        self._sum: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._mixtures)

    def begin_step(self) -> None:
        self._sum = None

    def begin_batch(self) -> None:
        for _, module in self._mixtures:
            routing.forget(module)

    def end_batch(self, device: torch.device) -> None:
        """Adds what the last forward recorded. Does not wait for the device."""
        tokens, rest = [], []
        none = torch.zeros(1, dtype=torch.int64, device=device)
        for _, module in self._mixtures:
            found = routing.last(module)
            if found is None:
                tokens.append(none.expand(module.num_experts))
                rest += [none, none]
                continue
            tokens.append(found["tokens"])
            dropped = found.get("dropped")
            rest += [
                none if dropped is None else dropped.reshape(1),
                found["numbers"].detach()[:1] if "numbers" in found else none,
            ]
        made = torch.cat([torch.cat(tokens).double(), torch.cat([each.double() for each in rest])])
        self._sum = made if self._sum is None else self._sum + made

    def numbers(self) -> torch.Tensor | None:
        """Returns the sums of the step, F64, on the device."""
        return self._sum

    def loads(self, numbers: Sequence[float], batches: int) -> list[ExpertLoad]:
        """Returns the loads of the mixtures that recorded any, from `numbers` of a step of this many batches over all
        ranks."""
        loads, at = [], 0
        rest = sum(module.num_experts for _, module in self._mixtures)
        for path, module in self._mixtures:
            tokens = [round(value) for value in numbers[at : at + module.num_experts]]
            dropped, entropy = numbers[rest : rest + 2]
            at, rest = at + module.num_experts, rest + 2
            if total := sum(tokens):
                loads.append(ExpertLoad(path, tokens, dropped / total, entropy / batches))
        return loads


def load_line(loads: Sequence[ExpertLoad] | None) -> dict[str, Any]:
    """Returns what a log's line of a step has of them."""
    if not loads:
        return {}
    return {
        "experts": {
            each.layer: {
                "imbalance": each.imbalance,
                "dropped": each.dropped,
                "entropy": each.entropy,
            }
            for each in loads
        }
    }
