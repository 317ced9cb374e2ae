"""Measures `deepwell train` on a GPU, and checks that a run that was killed and resumed has the bits of a whole one.

    python3 bench/hopper_train_command.py [--program build/release/bin/deepwell] [--steps 40]
        [--out FILE.json]

It needs the program, its library (LD_LIBRARY_PATH) and NVRTC, but neither PyTorch nor a network. By default it trains
GPT-2 124M from random weights on random tokens, 16 x 1024 a step, in BF16 and, unless --only-bf16 is given, in FP32 and
with four micro-batches. Printed for each: tokens/s and milliseconds of a step (median of the steps after the fifth, each
as the program reports it), the same by the wall clock between the program's lines, the first step, and the peak of the
GPU's memory by the program's count and by nvidia-smi, which includes the driver's own.

The exit status is 1 if a run fails or bits differ.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

WARM = 5  # steps that do not count
WAYS = {
    "bf16": ["--precision", "bf16"],
    "bf16, 4 micro-batches": ["--precision", "bf16", "--micro-batch", "QUARTER"],
    "fp32": ["--precision", "fp32"],
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="build/release/bin/deepwell")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only-bf16", action="store_true")
    parser.add_argument("--no-resume", action="store_true", help="leaves out the check of bits")
    parser.add_argument("--folder", help="where tokens and checkpoints go for the time of the run")
    parser.add_argument("--out", help="writes the figures as JSON")
    return parser.parse_args()


def write_tokens(path: Path, count: int, vocabulary: int) -> None:
    # Words of a few hundred tokens at a time, so that the loss falls.
    draw = random.Random(1)
    words = [[draw.randrange(vocabulary) for _ in range(64)] for _ in range(32)]
    tokens = array("H")
    while len(tokens) < count:
        tokens.extend(draw.choice(words))
    path.write_bytes(tokens[:count].tobytes())


def command(options, data: Path, steps: int, *more: object) -> list[str]:
    fixed = ["train", "--model", options.model, "--init", "--no-dropout", "--data", data]
    fixed += ["--device", options.device, "--sequence", options.sequence, "--batch", options.batch]
    fixed += ["--schedule-steps", options.steps, "--steps", steps, "--lr", "3e-4", "--warmup", "5"]
    more = [options.batch // 4 if each == "QUARTER" else each for each in more]
    return [options.program, *map(str, [*fixed, *more, "--json", "--report-every", 1])]


def used_by_driver() -> float | None:
    """Returns the GPU's used memory in GB."""
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.check_output(ask, text=True).split()[0]) * 2**20 / 1e9
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def measure(options, data: Path, folder: Path, way: list[object]) -> dict:
    output = folder / "model"
    call = command(options, data, options.steps, *way, "--output", output, "--overwrite")
    begin = time.perf_counter()
    losses, rates, arrivals, plan, peak, used = [], [], [], {}, 0, None
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            event = json.loads(line)
            if event["event"] == "plan":
                plan = event
            if event["event"] != "step":
                continue
            arrivals.append(time.perf_counter() - begin)
            losses.append(event["loss"])
            rates.append(event["tokens_per_second"])
            peak = max(peak, event["memory_peak"])
            if len(losses) == options.steps - 1:
                used = used_by_driver()
    shutil.rmtree(output, ignore_errors=True)
    if run.returncode or len(losses) != options.steps:
        raise RuntimeError(f"{' '.join(call)}: status {run.returncode}, {len(losses)} steps")
    tokens = options.batch * options.sequence
    between = [b - a for a, b in zip(arrivals[WARM:-2], arrivals[WARM + 1 : -1])]
    return {
        "tokens_per_second": statistics.median(rates[WARM:]),
        "step_ms": 1e3 * tokens / statistics.median(rates[WARM:]),
        "wall_step_ms": 1e3 * statistics.median(between),
        "first_step_s": tokens / rates[0],
        "until_first_step_s": arrivals[0],
        "memory_gb": peak / 1e9,
        "predicted_gb": plan["memory"]["predicted_peak"] / 1e9,
        "nvidia_smi_gb": used,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "plan": plan,
    }


def run_until(options, data: Path, kept: Path, steps: int, way: list[object], kill_at: int) -> None:
    """Trains with checkpoints, and kills the program when it has done a step; 0: never."""
    more = ["--checkpoint", kept, "--save-every", 2, "--keep", 1, "--resume"]
    call = command(options, data, steps, *way, *more)
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            event = json.loads(line)
            if kill_at and event["event"] == "step" and event["step"] == kill_at:
                run.kill()
                break
    if run.returncode != (-signal.SIGKILL if kill_at else 0):
        raise RuntimeError(f"{' '.join(call)}: status {run.returncode}")


def same_bits(options, data: Path, folder: Path, way: list[object]) -> bool:
    steps, final = 6, "step-000000000006"
    whole, killed = folder / "whole", folder / "killed"
    run_until(options, data, whole, steps, way, 0)
    run_until(options, data, killed, steps, way, 3)
    run_until(options, data, killed, steps, way, 0)
    same = all(
        filecmp.cmp(whole / final / name, killed / final / name, shallow=False)
        for name in ("model.safetensors", "optimizer.safetensors")
    )
    shutil.rmtree(whole)
    shutil.rmtree(killed)
    return same


def main() -> int:
    options = parse()
    results: dict = {}
    status = 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        data = folder / "tokens.bin"
        write_tokens(data, options.steps * options.batch * options.sequence + 1, options.vocabulary)
        for way, arguments in WAYS.items():
            if options.only_bf16 and way != "bf16":
                continue
            try:
                made = results[way] = measure(options, data, folder, arguments)
                if not options.no_resume:
                    made["same_bits"] = same_bits(options, data, folder, arguments)
                    status |= not made["same_bits"]
            except RuntimeError as error:
                print(f"{way}: {error}", flush=True)
                status = 1
                continue
            bits = {True: "same bits", False: "BITS DIFFER", None: ""}[made.get("same_bits")]
            used = f"{made['nvidia_smi_gb']:.2f}" if made["nvidia_smi_gb"] else "?"
            print(
                f"{way:22} {made['tokens_per_second']:9.0f} tokens/s "
                f" {made['step_ms']:8.2f} ms a step ({made['wall_step_ms']:.2f} by the wall clock) "
                f" first step {made['first_step_s']:.1f} s, done"
                f" {made['until_first_step_s']:.1f} s after the start  {made['memory_gb']:.2f} GB,"
                f" predicted {made['predicted_gb']:.2f}, nvidia-smi {used} "
                f" loss {made['first_loss']:.4f} to {made['last_loss']:.4f}  {bits}",
                flush=True,
            )
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
