"""Trains GPT-2 and Llama byte by byte on Python's own source code: PyTorch, torch.compile, Deepwell.

    make demo        or        python examples/demo.py [--steps N] [--quick] [--compile-all]

Each model starts from the same random weights in all three, sees the same text in the same order, and
is trained by the same AdamW. The table compares the losses, the median time of a step, the memory that a
step needs on top of parameters, gradients and optimizer state, and the time until the first step is done.
torch.compile starts with an empty cache, as for any new model, and is shown for GPT-2 only unless
--compile-all is given. Everything runs on this machine, now; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import os
import statistics
import sys
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Large blocks go back to the system when freed, so that resident memory shows what is in use.
if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    os.execv(sys.executable, [sys.executable, *sys.argv])
# Warnings of other packages while they load are not part of the comparison. Their errors still show.
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import deepwell  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


def standard_library_text(limit: int = 4 << 20) -> torch.Tensor:
    """Returns the bytes of the standard library's modules, in name order: text that every machine has."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 1 << 16:
        raise SystemExit(f"{folder} holds too little Python source to train on ({len(text)} bytes)")
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8).long()


def batches(text: torch.Tensor, steps: int, batch: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(text) - length, (steps, batch), generator=generator)
    return [torch.stack([text[s : s + length] for s in row.tolist()]) for row in starts]


def models(quick: bool) -> dict[str, torch.nn.Module]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    layers, width = (2, 128) if quick else (4, 256)
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=width // 64,
            n_positions=256,
            vocab_size=256,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            max_position_embeddings=256,
            vocab_size=256,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    return {"GPT-2": gpt2, "Llama": llama}


def _status(field: str) -> int:
    """Returns a field of /proc/self/status in bytes, 0 if there is no such file."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


class Run:
    """One model trained in one way."""

    def __init__(self, way: str, model: torch.nn.Module) -> None:
        self.way = way
        self.model = copy.deepcopy(model).train()
        self.started = time.perf_counter()
        self.step_model = self.model
        optimizer = torch.optim.AdamW
        if way == "torch.compile":
            self.step_model = torch.compile(self.model)
        elif way == "Deepwell":
            self.step_model = deepwell.optimize(self.model, verbose=False)
            optimizer = deepwell.AdamW
        self.optimizer = optimizer(self.model.parameters(), lr=3e-4)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak = 0

    def step(self, ids: torch.Tensor) -> None:
        started = time.perf_counter()
        loss = self.step_model(input_ids=ids, labels=ids.clone()).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - started)
        if len(self.seconds) == 1:
            self.first = time.perf_counter() - self.started

    def measure_memory(self, ids: torch.Tensor) -> None:
        """Measures the peak resident memory of one step, above the idle resident memory."""
        if self.way == "Deepwell":
            self.model.forward.session.pool.clear()
        gc.collect()
        idle = _status("VmRSS")
        _reset_peak()
        self.step(ids)
        self.losses.pop(), self.seconds.pop()
        self.peak = max(_status("VmHWM") - idle, 0)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def compare(name: str, model: torch.nn.Module, text: torch.Tensor, steps: int, ways: list[str]):
    batch, length = 8, 128
    data = batches(text, steps + 1, batch, length)
    runs = []
    for way in ways:
        run = Run(way, model)
        for index, ids in enumerate(data[:steps]):
            progress(f"{name}, {way}: step {index + 1} of {steps}")
            run.step(ids)
        run.measure_memory(data[steps])
        runs.append(run)
    progress("")
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"\n{name}: {parameters / 1e6:.1f} M parameters, {steps} steps of {batch} x {length} bytes"
    )
    print(
        f"  {'':14}{'loss, first':>12}{'loss, last':>12}{'ms/step':>10}{'tokens/s':>11}"
        f"{'MiB/step':>10}{'first step':>12}{'speed-up':>10}"
    )
    plain = runs[0]
    for run in runs:
        median = statistics.median(run.seconds[2:])
        speedup = statistics.median(plain.seconds[2:]) / median
        print(
            f"  {run.way:14}{run.losses[0]:12.4f}{run.losses[-1]:12.4f}{median * 1e3:10.1f}"
            f"{batch * length / median:11.0f}{run.peak / 2**20:10.0f}{run.first:11.1f}s"
            f"{speedup:9.2f}x"
        )
    worst = max(abs(a - b) for a, b in zip(plain.losses, runs[-1].losses))
    agree = worst <= 1e-3
    print(
        f"  Deepwell's losses {'agree' if agree else 'DO NOT AGREE'} with PyTorch's: "
        f"largest difference {worst:.1e} over {steps} steps (allowed 1e-3)"
    )
    print(
        "  "
        + next(
            (
                line.strip()
                for line in deepwell.summary(runs[-1].model).splitlines()
                if "[model]" in line
            ),
            "",
        )
    )
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
    parser.add_argument("--quick", action="store_true", help="smaller models, no torch.compile")
    parser.add_argument(
        "--compile-all",
        action="store_true",
        help="run torch.compile for Llama too, not only for GPT-2",
    )
    options = parser.parse_args()
    if options.steps < 4:
        parser.error("--steps must be 4 or more")
    ways = ["PyTorch", "torch.compile", "Deepwell"]
    if options.quick:
        ways.remove("torch.compile")
    print(
        f"Deepwell {deepwell.__version__}, PyTorch {torch.__version__}, transformers "
        f"{transformers.__version__}, {torch.get_num_threads()} threads"
    )
    text = standard_library_text()
    print(f"Text: {len(text) / 1e6:.1f} MB of the Python standard library's sources")
    with tempfile.TemporaryDirectory(prefix="deepwell-demo-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        agree = []
        for name, model in models(options.quick).items():
            agree.append(compare(name, model, text, options.steps, ways))
            # Its cold start takes most of the demo's time, so it is shown once.
            if not options.compile_all and "torch.compile" in ways:
                ways.remove("torch.compile")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
