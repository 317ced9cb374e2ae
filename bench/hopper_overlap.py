"""Measures on one GPU whether overlap by streams helps: batches, the optimizer, and the GEMMs of weight gradients.

    python3 bench/hopper_overlap.py [MODEL ...] [--steps 20] [--rounds 7] [--out FILE.json]
    python3 bench/hopper_overlap.py --small      on a CPU: tiny models, no streams; shows that the script runs

Steps of deepwell.optimize and deepwell.AdamW on one model, the ways in turns, round by round:

    resident        batches lie on the GPU; the optimizer runs after backward. The others are compared with it
    copy            each batch is copied from pinned memory on the main stream, in front of its step
    copy-side       the next batch is copied on a second stream beside the step
    release         gradients are released: AdamW updates parameters during backward, on the main stream
    release-side    the same on a second stream

Each way makes the same steps from the same weights first, and their losses must be the same numbers. GEMMs of linear
layers in backward, in PyTorch alone, in the order of a model's backward:

    serial          for each layer the gradient of its input (dgrad), then that of its weight (wgrad)
    side            wgrad on a second stream as soon as the layer's output gradient exists, dgrad on the main stream
    deferred        all dgrad first, then all wgrad: what a schedule alone changes

Times are medians of the rounds; the spread is the distance between their quartiles. The second stream has the lowest
priority, and the main stream waits for it at the end of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "DEEPWELL_MEASURE", "0"
)  # the engine runs, whatever its first comparison says

import deepwell  # noqa: E402
import torch  # noqa: E402
from hopper_step import MODELS, build  # noqa: E402

LR = 1e-4
CHECKED = 4  # steps whose losses are compared
# Linear layers of a block, (input, output), in the order of forward; blocks; tokens of a step.
LINEARS = {
    "gpt2": ([(768, 2304), (768, 768), (768, 3072), (3072, 768)], 12, 16 * 1024),
    "llama-1b": (
        [(2048, 2048), (2048, 512), (2048, 512), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048)],
        16,
        4 * 2048,
    ),
    "small": ([(32, 96), (32, 32), (32, 64), (64, 32)], 2, 48),
}  # fmt: skip


class Gpu:
    """The main and the second stream of a GPU."""

    device = "cuda"

    def __init__(self) -> None:
        self.main = torch.cuda.current_stream()
        self.side = torch.cuda.Stream(priority=0)  # 0 is the lowest

    def on_side(self) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(self.side)

    def side_waits(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())

    def main_waits(self) -> None:
        self.main.wait_stream(self.side)

    def keep(self, tensor: torch.Tensor) -> None:
        """The tensor's memory is not used again before the second stream has read it."""
        tensor.record_stream(self.side)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def name(self) -> str:
        return torch.cuda.get_device_name()


class Cpu:
    """Stands for a GPU, and does all of it in order."""

    device = "cpu"

    def on_side(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def side_waits(self) -> None: ...

    def main_waits(self) -> None: ...

    def keep(self, tensor: torch.Tensor) -> None: ...

    def wait(self) -> None: ...

    def name(self) -> str:
        return "cpu"


def small_model() -> tuple[torch.nn.Module, int, int, int]:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config).train(), 2, 16, 128


# ---- steps -----------------------------------------------------------------------------------------


class Steps:
    """A model that trains in one of several ways."""

    def __init__(self, name: str, place: Gpu | Cpu) -> None:
        self.place = place
        if name == "small":
            self.model, rows, length, vocabulary = small_model()
        else:
            self.model, arguments = build(name, place.device)
            rows, length = arguments["input_ids"].shape
            vocabulary = self.model.config.vocab_size
        deepwell.optimize(self.model, verbose=False)
        self.optimizer = deepwell.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95))
        generator = torch.Generator().manual_seed(5)
        self.batches, self.resident = [], []
        for _ in range(8):
            ids = torch.randint(vocabulary, (rows, length), generator=generator)
            batch = {"input_ids": ids, "labels": ids.clone()}
            if place.device == "cuda":
                batch = {key: value.pin_memory() for key, value in batch.items()}
            self.batches.append(batch)
            self.resident.append({k: v.to(place.device) for k, v in batch.items()})
        self.at = 0
        self.next: dict[str, torch.Tensor] | None = None
        self.ways: dict[str, Callable[[], torch.Tensor]] = {
            "resident": lambda: self.step(self.resident[self.turn()]),
            "copy": lambda: self.step(self.copied(self.batches[self.turn()])),
            "copy-side": self.beside,
            "release": lambda: self.released(self.resident[self.turn()]),
            "release-side": lambda: self.released(self.resident[self.turn()]),
        }

    def turn(self) -> int:
        self.at += 1
        return (self.at - 1) % len(self.batches)

    def copied(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: v.to(self.place.device, non_blocking=True) for k, v in batch.items()}

    def forward_backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch).loss
        loss.backward()
        return loss.detach()

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward(batch)
        self.optimizer.step()
        return loss

    def fetch(self) -> None:
        with self.place.on_side():
            self.next = self.copied(self.batches[self.turn()])

    def beside(self) -> torch.Tensor:
        """The batch of this step has been copied beside the one before; the next one's copy is queued first."""
        if self.next is None:
            self.fetch()
        batch = self.next
        self.place.main_waits()
        for tensor in batch.values():
            if self.place.device == "cuda":
                tensor.record_stream(self.place.main)
        self.fetch()
        return self.step(batch)

    def released(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward(batch)  # updates the parameters
        self.optimizer.step()  # ends the step
        self.place.main_waits()
        return loss

    @contextlib.contextmanager
    def way(self, name: str):
        """Within the context the model trains in this way."""
        self.at, self.next = 0, None
        release = None
        if name.startswith("release"):
            release = self.optimizer.release_gradients()
        if name == "release-side":
            update = release.update

            def beside() -> None:
                self.place.side_waits()
                for _, param in release.pending:
                    self.place.keep(param.grad)
                with self.place.on_side():
                    update()

            release.update = beside
        try:
            yield self.ways[name]
        finally:
            self.place.wait()
            if release is not None:
                release.remove()

    def values(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        kept = [p.detach() for p in self.model.parameters()]
        for param in self.model.parameters():
            kept += [v for v in state[param].values() if isinstance(v, torch.Tensor)]
        return kept

    def check(self) -> dict[str, list[float]]:
        """The losses of the same few steps in each way."""
        with self.way("resident") as step:
            step()  # the optimizer has its state
        before = [value.clone() for value in self.values()]
        losses = {}
        for name in self.ways:
            with torch.no_grad():
                for value, kept in zip(self.values(), before):
                    value.copy_(kept)
            with self.way(name) as step:
                losses[name] = torch.stack([step() for _ in range(CHECKED)]).tolist()
        return losses

    def measure(self, steps: int, rounds: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in self.ways}
        names = list(self.ways)
        for round in range(-1, rounds):
            shift = round % len(names)  # each way is first in turn
            for name in names[shift:] + names[:shift]:
                with self.way(name) as step:
                    for _ in range(2):  # the second stream and the release are in use
                        step()
                    self.place.wait()
                    begin = time.perf_counter()
                    for _ in range(steps if round >= 0 else 3):
                        step()
                    self.place.wait()
                    if round >= 0:
                        times[name].append(1e3 * (time.perf_counter() - begin) / steps)
        return times


# ---- GEMMs of backward -----------------------------------------------------------------------------


class Gemms:
    """Backward of the linear layers of a model, in PyTorch alone."""

    def __init__(self, name: str, place: Gpu | Cpu) -> None:
        shapes, self.blocks, tokens = LINEARS[name]
        self.place = place
        dtype = torch.bfloat16 if place.device == "cuda" else torch.float32
        torch.manual_seed(1)
        new = lambda *shape: torch.randn(*shape, device=place.device, dtype=dtype)  # noqa: E731
        self.layers = [
            (new(tokens, output), new(tokens, input), new(output, input))
            for input, output in reversed(shapes)
        ]
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = [
            (torch.empty_like(x), torch.empty_like(w)) for _, x, w in self.layers
        ]
        self.ways = {"serial": self.serial, "side": self.side, "deferred": self.deferred}
        self.flops = 4 * self.blocks * tokens * sum(a * b for a, b in shapes)

    def serial(self) -> None:
        for _ in range(self.blocks):
            for (dy, x, w), (dx, dw) in zip(self.layers, self.results):
                torch.mm(dy, w, out=dx)
                torch.mm(dy.t(), x, out=dw)

    def side(self) -> None:
        for _ in range(self.blocks):
            for (dy, x, w), (dx, dw) in zip(self.layers, self.results):
                self.place.side_waits()  # dy exists
                with self.place.on_side():
                    torch.mm(dy.t(), x, out=dw)
                torch.mm(dy, w, out=dx)
        self.place.main_waits()

    def deferred(self) -> None:
        for _ in range(self.blocks):
            for (dy, _, w), (dx, _) in zip(self.layers, self.results):
                torch.mm(dy, w, out=dx)
        for _ in range(self.blocks):
            for (dy, x, _), (_, dw) in zip(self.layers, self.results):
                torch.mm(dy.t(), x, out=dw)

    def check(self) -> bool:
        """Whether all ways have the same results."""
        seen = []
        for way in self.ways.values():
            way()
            self.place.wait()
            seen.append([value.clone() for pair in self.results for value in pair])
        return all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other))

    def measure(self, repeats: int, rounds: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in self.ways}
        names = list(self.ways)
        for round in range(-1, rounds):
            shift = round % len(names)
            for name in names[shift:] + names[:shift]:
                way = self.ways[name]
                way()
                self.place.wait()
                begin = time.perf_counter()
                for _ in range(repeats):
                    way()
                self.place.wait()
                if round >= 0:
                    times[name].append(1e3 * (time.perf_counter() - begin) / repeats)
        return times


# ---- the report ------------------------------------------------------------------------------------


def summed(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, quartile distances, and the change from the first way: the median of the rounds' ratios."""
    first = next(iter(times.values()))
    made = {}
    for name, rounds in times.items():
        quarters = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else [rounds[0]] * 3
        ratios = [mine / other for mine, other in zip(rounds, first)]
        made[name] = {
            "ms": statistics.median(rounds),
            "spread_ms": quarters[2] - quarters[0],
            "change_percent": 100 * (statistics.median(ratios) - 1),
            "rounds_ms": rounds,
        }
    return made


def table(title: str, figures: dict[str, Any]) -> str:
    lines = [title]
    for name, row in figures.items():
        lines.append(
            f"  {name:13} {row['ms']:9.3f} ms  spread {row['spread_ms']:7.3f}  {row['change_percent']:+6.2f} %"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[], metavar="MODEL")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="on a CPU, to try the script")
    parser.add_argument("--out", help="writes the figures as JSON")
    options = parser.parse_args()
    names = options.models or (["small"] if options.small else ["gpt2", "llama-1b"])
    known = ["small"] if options.small else [name for name in LINEARS if name in MODELS]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no model called '{unknown[0]}' here: one of {', '.join(known)}")
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no GPU here; --small tries the script on a CPU")
    place = Cpu() if options.small else Gpu()
    results: dict[str, Any] = {"device": place.name(), "torch": torch.__version__, "models": {}}
    tables, same = [], True
    for name in names:
        steps = Steps(name, place)
        losses = steps.check()
        same_losses = len({tuple(each) for each in losses.values()}) == 1
        step_times = summed(steps.measure(options.steps, options.rounds))
        del steps
        gc.collect()
        if place.device == "cuda":
            torch.cuda.empty_cache()
        gemms = Gemms(name, place)
        same_gemms = gemms.check()
        gemm_times = summed(gemms.measure(max(1, options.steps // 4), options.rounds))
        results["models"][name] = {
            "step": step_times,
            "losses": losses,
            "same_losses": same_losses,
            "gemms": gemm_times,
            "gemm_flops": gemms.flops,
            "same_gemms": same_gemms,
        }
        del gemms
        same &= same_losses and same_gemms
        tables += [
            table(f"{name}: a training step", step_times)
            + ("" if same_losses else "\n  the losses of the ways DIFFER"),
            table(f"{name}: GEMMs of backward", gemm_times)
            + ("" if same_gemms else "\n  the results of the ways DIFFER"),
        ]
        print(tables[-2], tables[-1], sep="\n", file=sys.stderr, flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    print(f"{place.name()}, torch {torch.__version__}, medians of {options.rounds} rounds")
    print("\n".join(tables))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
