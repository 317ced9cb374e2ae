"""Optimizes a model with one line, trains it, and times training beside PyTorch's.

    python examples/automatic_optimization_prototype.py [--model tiny] [--iterations N] ...

Options are those of `deepwell bench step`, which measures the times.
"""

import copy
import sys

import deepwell
import torch
from deepwell import bench_models
from deepwell.bench import main


def train(model: torch.nn.Module, tokens: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare() -> None:
    """Trains the same model with and without Deepwell and prints both losses."""
    torch.manual_seed(0)
    sizes = bench_models.sizes_of("tiny")
    plain = bench_models.Decoder(sizes)
    optimized = deepwell.optimize(copy.deepcopy(plain))  # the one line
    tokens = torch.randint(sizes["vocabulary"], (2, 64))
    for name, model in (("PyTorch", plain), ("Deepwell", optimized)):
        losses = train(model, tokens, 4)
        print(f"{name:8} losses: {', '.join(f'{loss:.4f}' for loss in losses)}")


if __name__ == "__main__":
    if not {"-h", "--help"} & set(sys.argv[1:]):
        compare()
    sys.exit(main(["step", *sys.argv[1:]]))
