"""Measures deepwell.Trainer beside a plain PyTorch loop over the same optimized model, on one GPU.

    python3 bench/hopper_trainer.py [MODEL ...] [--steps 40] [--rounds 5] [--out FILE.json]

Both train the same weights on the same batches by deepwell.AdamW at a constant rate, with gradients clipped to a norm
of 1, and take turns: a round is ``--steps`` steps of each, from one wait for the GPU to the next. The plain loop moves
batches without pinning them and reads no loss until the end of a round. The exit status is 1 if a loss or a weight
differs in one bit, or if the Trainer's median round takes more than 1 % longer than the loop's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepwell  # noqa: E402
import torch  # noqa: E402
from hopper_step import MODELS, build  # noqa: E402

LR = 1e-4
WARM = 5  # steps before the first round


def groups(model: torch.nn.Module) -> list[dict]:
    """Weight decay for tensors of two and more dimensions, as the Trainer has by default."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


class Loop:
    """A training loop as the documents of PyTorch have it."""

    def __init__(self, name: str, batches: list[dict], device: str) -> None:
        self.model, _ = build(name, device)
        deepwell.optimize(self.model, verbose=False)
        self.optimizer = deepwell.AdamW(
            groups(self.model), lr=LR, betas=(0.9, 0.95), max_grad_norm=1.0
        )
        self.batches, self.device, self.at = batches, device, 0

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = self.batches[self.at % len(self.batches)]
            self.at += 1
            batch = {key: value.to(self.device) for key, value in batch.items()}
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.model(**batch).loss
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()


class Trained:
    """The same by deepwell.Trainer."""

    def __init__(self, name: str, batches: list[dict], device: str, folder: Path) -> None:
        self.model, _ = build(name, device)
        self.log = folder / f"{name}.jsonl"
        self.trainer = deepwell.Trainer(
            self.model, batches, steps=1, schedule="constant", lr=LR, log=self.log, progress=False
        )  # fmt: skip
        self.seen = 0

    def run(self, steps: int) -> list[float]:
        self.trainer.fit(steps=self.trainer.step + steps)
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        losses = [line["loss"] for line in lines[self.seen :]]
        self.seen = len(lines)
        return losses


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict:
    _, arguments = build(name, options.device)
    rows, length = next(iter(arguments.values())).shape[:2]
    vocabulary = int(arguments["input_ids"].max()) + 1
    del arguments
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(16):
        ids = torch.randint(vocabulary, (rows, length), generator=generator)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    loops = {
        "loop": Loop(name, batches, options.device),
        "trainer": Trained(name, batches, options.device, folder),
    }
    times: dict[str, list[float]] = {way: [] for way in loops}
    losses: dict[str, list[float]] = {way: [] for way in loops}
    for round in range(-1, options.rounds):
        steps = options.steps if round >= 0 else WARM
        for way, loop in loops.items():
            if options.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            losses[way] += loop.run(steps)
            if options.device == "cuda":
                torch.cuda.synchronize()
            if round >= 0:
                times[way].append(1e3 * (time.perf_counter() - begin) / steps)
    pairs = zip(loops["loop"].model.parameters(), loops["trainer"].model.parameters())
    made = {way: statistics.median(each) for way, each in times.items()}
    return {
        "batch": rows,
        "sequence": length,
        "step_ms": made,
        "rounds_ms": times,
        "ratio": made["trainer"] / made["loop"],
        "same_losses": losses["loop"] == losses["trainer"],
        "same_weights": all(torch.equal(a, b) for a, b in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["gpt2", "llama-1b"], metavar="MODEL")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="writes the figures as JSON")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"no model called '{unknown[0]}': one of {', '.join(MODELS)}")
    results, failed = {}, False
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            made = results[name] = measure(name, options, Path(folder))
            gc.collect()
            same = made["same_losses"] and made["same_weights"]
            failed |= not same or made["ratio"] > 1.01
            print(
                f"{name:12} loop {made['step_ms']['loop']:.2f} ms a step, Trainer {made['step_ms']['trainer']:.2f} "
                f"({100 * (made['ratio'] - 1):+.2f} %), {'the same' if same else 'OTHER'} bits",
                flush=True,
            )
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
