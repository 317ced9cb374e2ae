"""The state of the random number generators of a process, as JSON."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any, Iterable

import torch


def pack(tensor: torch.Tensor) -> str:
    """Returns the bytes of a uint8 tensor as text."""
    return base64.b64encode(bytes(tensor.tolist())).decode("ascii")


def unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def capture() -> dict[str, Any]:
    """Returns the states of PyTorch (CPU and every GPU that this process uses), Python and, if it is loaded, NumPy."""
    kind, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": pack(torch.get_rng_state()),
        "python": [kind, list(words), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [pack(each) for each in torch.cuda.get_rng_state_all()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), position, has_gauss, cached]
    return state


def restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(unpack(state["torch"]))
    kind, words, gauss = state["python"]
    random.setstate((kind, tuple(words), gauss))
    if state.get("cuda") and torch.cuda.is_available():
        for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(unpack(each), device)
    if state.get("numpy"):
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        keys = numpy.array(keys, dtype=numpy.uint32)
        numpy.random.set_state((name, keys, position, has_gauss, cached))


def capture_generators(generators: Iterable[torch.Generator]) -> list[str]:
    return [pack(each.get_state()) for each in generators]


def restore_generators(generators: Iterable[torch.Generator], states: list[str]) -> None:
    for generator, state in zip(generators, states):
        generator.set_state(unpack(state))
