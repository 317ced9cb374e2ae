"""What mixtures of experts record of a call: the load of each expert, the router's entropy, auxiliary losses.

A graph has outputs and no other effects. While a forward is traced, records are collected and become further outputs of
the graph, and each run of the engine delivers them to the modules. Where PyTorch runs a forward, the module's own call
delivers them. Nothing waits for a GPU before someone reads the numbers.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Iterator

import torch
from torch.utils import _pytree as pytree

Tensors = dict[str, torch.Tensor]

# The tensors of each module's last call. Keys: tokens, i64 [experts], rows that chose each expert; dropped, i64 scalar,
# of those; numbers, floating-point [n], first the mean entropy of a token's router probabilities in nats; loss, the
# weighted sum of auxiliary losses. All but tokens may be missing.
_last: "weakref.WeakKeyDictionary[torch.nn.Module, Tensors]" = weakref.WeakKeyDictionary()
_watched: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


class _Thread(threading.local):
    # Records of the forwards that are traced, of the innermost layer last; empty if nothing is traced.
    collected: tuple[list[tuple[torch.nn.Module, Tensors]], ...] = ()


_thread = _Thread()


class Recorded:
    """A module's result with what mixtures inside it recorded, by their paths."""

    def __init__(self, result: Any, records: list[tuple[str, Tensors]]) -> None:
        self.result, self.records = result, records


pytree.register_pytree_node(
    Recorded,
    lambda made: (
        [made.result, *(list(tensors.values()) for _, tensors in made.records)],
        tuple((path, tuple(tensors)) for path, tensors in made.records),
    ),
    lambda values, context: Recorded(
        list(values)[0],
        [(path, dict(zip(names, each))) for (path, names), each in zip(context, list(values)[1:])],
    ),
    serialized_type_name="deepwell.routing.Recorded",
)


def is_traced() -> bool:
    """Returns whether this thread traces a forward for a graph."""
    return bool(_thread.collected)


def record(module: torch.nn.Module, tensors: Tensors) -> None:
    """Records tensors of a call of a module."""
    if _thread.collected:
        _thread.collected[-1].append((module, tensors))
    else:
        _last[module] = tensors


def last(module: torch.nn.Module) -> Tensors | None:
    """Returns the tensors of the module's last call, or None."""
    if not _thread.collected:
        return _last.get(module)
    for collected in reversed(_thread.collected):
        for called, tensors in reversed(collected):
            if called is module:
                return tensors
    raise RuntimeError(
        f"the forward reads what a {type(module).__name__} recorded in an earlier call, which a graph cannot express"
    )


def forget(module: torch.nn.Module) -> None:
    _last.pop(module, None)


@contextlib.contextmanager
def collecting() -> Iterator[list[tuple[torch.nn.Module, Tensors]]]:
    """Collects the records of calls inside the context instead of delivering them."""
    outer, made = _thread.collected, []
    _thread.collected = (*outer, made)
    try:
        yield made
    finally:
        _thread.collected = outer


def with_records(
    root: torch.nn.Module, result: Any, collected: list[tuple[torch.nn.Module, Tensors]]
) -> Any:
    """Returns the result of a call of `root` with the records that were collected in it; the result alone if there are
    none. Of several calls of one module the last one counts."""
    if not collected:
        return result
    paths = {id(module): path for path, module in root.named_modules()}
    found = {paths[id(module)]: tensors for module, tensors in collected if id(module) in paths}
    return Recorded(result, list(found.items()))


def delivered(root: torch.nn.Module, result: Any) -> Any:
    """Records what a call of `root` returned with its result, and returns the result."""
    if not isinstance(result, Recorded):
        return result
    for path, tensors in result.records:
        record(root.get_submodule(path), tensors)
    return result.result


# ---- routers of transformers ------------------------------------------------------------------------


def is_router(module: torch.nn.Module) -> bool:
    """Returns whether a module is a router of transformers: it returns logits, weights and the chosen experts."""
    return (
        type(module).__module__.startswith("transformers.")
        and type(module).__name__.lower().endswith("topkrouter")
        and isinstance(getattr(module, "num_experts", None), int)
    )


def watch(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Makes graphs that are captured from now on record the load of transformers' routers. Returns path and module of
    everything in the model that records its load."""
    _watched.update(module for module in model.modules() if is_router(module))
    return mixtures(model)


def mixtures(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Returns path and module of everything in the model that records its load."""
    from deepwell.moe import DeepwellMoE

    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, DeepwellMoE) or module in _watched
    ]


def observe_routers(users: torch.nn.Module, traced: torch.nn.Module) -> None:
    """Gives the watched routers of the module that is traced a forward that records. `traced` is the users' module or
    stands for it; whoever traces removes the forwards."""
    for path, module in users.named_modules():
        if module in _watched and "forward" not in module.__dict__:
            router = traced.get_submodule(path)
            router.__dict__["forward"] = _Observed(router)


class _Observed:
    """A router's forward that records which experts it chose."""

    def __init__(self, router: torch.nn.Module) -> None:
        self._router = router

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        router = self._router
        result = type(router).forward(router, *args, **kwargs)
        if isinstance(result, tuple) and len(result) == 3 and not result[2].is_floating_point():
            logits, _, chosen = result
            probabilities = torch.softmax(logits.float(), -1)
            record(
                router,
                {
                    "tokens": load(chosen.reshape(-1), router.num_experts),
                    "numbers": entropy(probabilities).reshape(1),
                },
            )
        return result


def load(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Returns how many of the last axis chose each expert: [.., n] -> [.., experts]."""
    if is_traced():  # in a graph a sum over a mask is faster than a scatter to a few places
        numbers = torch.arange(experts, device=chosen.device)
        return (chosen.unsqueeze(-1) == numbers).sum(-2)
    counts = torch.zeros(*chosen.shape[:-1], experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add(-1, chosen, torch.ones_like(chosen))


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Returns the mean over rows of -sum(p log p), in nats."""
    least = torch.finfo(probabilities.dtype).tiny
    return -(probabilities * probabilities.clamp(min=least).log()).sum(-1).mean()
