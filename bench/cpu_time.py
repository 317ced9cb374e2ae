"""Measures the CPU time of a training step on one thread: PyTorch, torch.compile and Deepwell in turns.

    python bench/cpu_time.py [MODEL ...] [--rounds N] [--ways WAY ...] [--json FILE]
    python bench/cpu_time.py MODEL --profile     Deepwell's step by operation and shape

Other work on the machine changes wall-clock time much and CPU time little. Each round runs every way once, so that
remaining drift affects all alike. The figures are medians. The models are those of bench/training.py.
"""

from __future__ import annotations

import argparse
import collections
import copy
import gc
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch starts its threads
if "--profile" in sys.argv:
    os.environ["DEEPWELL_PROFILE"] = "cpu"  # before an engine is made

import deepwell  # noqa: E402
import torch  # noqa: E402
import training  # noqa: E402  (bench/training.py, beside this file)


def optimizer_for(way: str, parameters):
    """Returns the optimizer. PyTorch's ways use fused AdamW, PyTorch's fastest on a CPU."""
    if way == "deepwell":
        return deepwell.AdamW(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def measure(name: str, ways: list[str], rounds: int) -> dict:
    model, batch, length = training.build(name)
    data = training.data_for(model, batch, length)
    models = {way: copy.deepcopy(model) for way in ways}
    steps = {way: training.prepared(way, models[way]) for way in ways}
    optimizers = {way: optimizer_for(way, models[way].parameters()) for way in ways}
    times = {way: collections.defaultdict(list) for way in ways}
    losses: dict[str, float] = {}
    for round_ in range(rounds + 2):  # the first two compile and warm up
        for way in ways:
            begin = time.process_time()
            loss = steps[way](**data).loss
            forward = time.process_time()
            loss.backward()
            backward = time.process_time()
            optimizers[way].step()
            end = time.process_time()
            optimizers[way].zero_grad()
            losses[way] = loss.item()
            del loss
            if round_ >= 2:
                times[way]["forward"].append(forward - begin)
                times[way]["backward"].append(backward - forward)
                times[way]["optimizer"].append(end - backward)
                times[way]["step"].append(end - begin)
    medians = {
        way: {part: statistics.median(values) for part, values in parts.items()}
        for way, parts in times.items()
    }
    return {
        "model": name,
        "batch": batch,
        "length": length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": rounds,
        "cpu_seconds": medians,
        "step_cpu_seconds_all": {way: parts["step"] for way, parts in times.items()},
        "losses_of_the_last_step": losses,
    }


def show(result: dict) -> None:
    print(
        f"\n{result['model']}, batch {result['batch']} x {result['length']}, one thread, CPU time"
    )
    print(f"  {'':10}{'forward':>10}{'backward':>10}{'optimizer':>10}{'step':>10}   of all rounds")
    ours = result["cpu_seconds"].get("deepwell")
    for way, parts in result["cpu_seconds"].items():
        every = result["step_cpu_seconds_all"][way]
        row = "".join(
            f"{parts[part] * 1e3:10.0f}" for part in ("forward", "backward", "optimizer", "step")
        )
        ratio = f"   {parts['step'] / ours['step']:.2f} of Deepwell's" if ours else ""
        print(f"  {way:10}{row} ms {min(every) * 1e3:.0f} to {max(every) * 1e3:.0f}{ratio}")


LINE = re.compile(r"^ *\d+ ([FB]) +([\d.]+) ms (\S+) \S+?(?: \([^)]*\))?: (\S+) (.*)$")


def profile(name: str, rounds: int) -> None:
    """Prints the engine's instructions, summed by operation, kernel and shapes."""
    model, batch, length = training.build(name)
    data = training.data_for(model, batch, length)
    step = training.prepared("deepwell", model)
    for _ in range(rounds + 1):
        step(**data).loss.backward()
        model.zero_grad(set_to_none=True)
    sums: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    for program in (o for o in gc.get_objects() if type(o).__name__ == "_Variant"):
        for plan in program._plans.values():
            for line in plan.describe().splitlines():
                found = LINE.match(line)
                if not found:
                    continue
                when, ms, op, kernel, rest = found.groups()
                shapes = re.sub(r"@\S+", "", rest.split(" scratch ")[0])
                key = f"{when} {op} {kernel.removeprefix('cpu.')} {shapes}"
                sums[key] += float(ms)
                counts[key] += 1
    total = sum(sums.values())
    print(f"\n{name}: {total:.0f} ms of CPU time in instructions, forward and backward, one thread")
    for key, ms in sums.most_common():
        if ms >= 0.001 * total:
            print(f"  {ms:9.2f} ms {100 * ms / total:5.1f} %  {counts[key]:3} x  {key}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="*", help=f"of {', '.join(training.MODELS)}; all by default"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=training.WAYS, default=training.WAYS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    results = []
    for name in options.models or training.MODELS:
        if options.profile:
            profile(name, options.rounds)
            continue
        results.append(measure(name, options.ways, options.rounds))
        show(results[-1])
        sys.stdout.flush()
        gc.collect()
    if options.json and results:
        record = {"machine": training.machine(), "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwritten to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
