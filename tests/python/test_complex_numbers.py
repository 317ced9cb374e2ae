"""Complex tensors inside a forward: rotations are captured, and what a graph cannot express is refused."""

from __future__ import annotations

import copy
import json

import deepwell
import pytest
import torch
from compare import assert_same_function
from deepwell.capture import capture_graph
from torch import nn
from users import engine_calls


class Rotated(nn.Module):
    """Rotates pairs of a linear layer's outputs by angles that grow with the position."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def table(self, length: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(length).float(), torch.tensor(0.3) ** torch.arange(4))
        if self.way == "complex":
            return torch.complex(angles.cos(), angles.sin())
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        numbers = torch.view_as_complex(y.float().reshape(*y.shape[:-1], 4, 2))
        table = self.table(x.shape[1])
        if self.way == "arithmetic":
            turned = (numbers + 0.5) * table.conj() * (2 - 1j) - numbers / 3.0 + numbers.mul(0.25)
        elif self.way == "parts":
            turned = torch.complex(numbers.imag, -numbers.real) * table[None]
        elif self.way == "moves":
            turned = (numbers.transpose(1, 2).contiguous() * table.t().unsqueeze(0)).transpose(1, 2)
            turned = torch.cat([turned[:, :2], turned[:, 2:].clone()], dim=1)
        elif self.way == "learned":
            turned = numbers * torch.view_as_complex(
                y[:, :, 4:].reshape(*y.shape[:-1], 2, 2)
            ).repeat(1, 1, 2)
        else:
            turned = numbers * table
        return self.second(torch.view_as_real(turned).flatten(2).to(x.dtype))


WAYS = ("polar", "complex", "arithmetic", "parts", "moves", "learned")


@pytest.mark.parametrize("way", WAYS)
def test_same_function(way: str, always) -> None:
    torch.manual_seed(1)
    plain = Rotated(way)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    for batch, length in ((3, 7), (2, 12)):
        assert_same_function(plain, ours, (torch.randn(batch, length, 6),), {})
    assert engine_calls(ours) == (2, 0), deepwell.summary(ours)


def test_a_rotation_is_one_operation() -> None:
    captured = capture_graph(Rotated("polar"), (torch.randn(3, 7, 6),))
    operations = [node["op"] for node in json.loads(captured.json)["nodes"]]
    assert operations.count("rope") == 1 and "slice" not in operations


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda z: torch.linalg.vector_norm(z), "complex tensors are supported in"),
        (lambda z: z.flip(0).abs(), "complex tensors are supported in"),
        (lambda z: z, "returns a complex tensor"),
        (lambda z: z / (z + 1.0), "a complex divisor"),
    ],
)
def test_refused(change, message: str) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return change(torch.view_as_complex((x * 2).reshape(2, 4, 2)))

    with pytest.raises(deepwell.CaptureError, match=message):
        capture_graph(Module(), (torch.randn(2, 8),))


def write_before(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    y += 1.0
    return torch.view_as_real(z * 1j)


def write_to_pairs(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z).add_(1.0) + z.real[..., None]


def write_to_numbers(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return z.mul_(2.0).real + y[..., 0]


@pytest.mark.parametrize("write", [write_before, write_to_pairs, write_to_numbers])
def test_writes_to_shared_memory(write, always) -> None:
    """A complex view and its tensor show each other's writes, whether the engine or PyTorch runs the module."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).reshape(2, 4, 2)
            return write(y, torch.view_as_complex(y))

    model = Module()
    assert_same_function(
        model, deepwell.optimize(copy.deepcopy(model), verbose=False), (torch.randn(2, 8),), {}
    )
