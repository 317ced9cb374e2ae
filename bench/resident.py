"""Measures the resident memory of a whole training process, with and without deepwell.optimize.

    python bench/resident.py [MODEL ...] [--steps N] [--json FILE]

Each figure is the peak that the operating system reports for one process (VmHWM, which is ru_maxrss) after imports,
after the model, after the first step (including capture and the comparison with PyTorch), and after all steps of a
plain loop with torch.optim.AdamW. The ratio of the two peaks is what a user sees. ``bench/training.py --memory``
measures the step alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

MIB = 2**20


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def child(way: str, name: str, steps: int) -> dict:
    """Trains in this process. Returns the peak so far after each stage, and the resident memory then."""
    import training  # sets DEEPWELL_MEASURE=0

    os.environ.pop("DEEPWELL_MEASURE", None)
    import torch

    stages: dict[str, dict[str, int]] = {}

    def stage(label: str) -> None:
        stages[label] = {"peak": status("VmHWM"), "resident": status("VmRSS")}

    stage("imports")
    model, batch, length = training.build(name)
    data = training.data_for(model, batch, length)
    model = training.prepared(way, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stage("model")
    losses = []
    for index in range(steps):
        optimizer.zero_grad()
        loss = model(**data).loss
        stage(f"forward {index}")
        loss.backward()
        stage(f"backward {index}")
        optimizer.step()
        stage(f"step {index}")
        losses.append(loss.item())
    result = {"stages": stages, "peak": status("VmHWM"), "losses": losses}
    if way == "deepwell":
        import deepwell

        result["summary"] = deepwell.summary(model)
    return result


def in_process(way: str, name: str, steps: int) -> dict:
    command = [sys.executable, __file__, "--child", way, name, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="all three of bench/training.py by default")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--child", choices=["eager", "deepwell"], help="run one way in this process"
    )
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.models[0], options.steps)))
        return 0
    results = []
    for name in options.models or ["gpt2-6x384", "gpt2-124M", "llama-6x384"]:
        ways = {way: in_process(way, name, options.steps) for way in ("eager", "deepwell")}
        ratio = ways["deepwell"]["peak"] / ways["eager"]["peak"]
        results.append({"model": name, "steps": options.steps, "ratio": ratio, "ways": ways})
        print(
            f"{name}: peak {ways['eager']['peak'] / MIB:.0f} MiB in PyTorch, "
            f"{ways['deepwell']['peak'] / MIB:.0f} MiB with deepwell.optimize: {ratio:.2f}"
        )
        for label in ways["eager"]["stages"]:
            row = "  ".join(
                f"{way} {ways[way]['stages'][label]['peak'] / MIB:5.0f} "
                f"({ways[way]['stages'][label]['resident'] / MIB:5.0f})"
                for way in ways
            )
            print(f"  {label:12} peak (resident), MiB: {row}")
        sys.stdout.flush()
    if options.json:
        import training

        record = {"machine": training.machine(), "date": datetime.date.today().isoformat()}
        record["results"] = results
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
