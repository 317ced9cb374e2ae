"""Measures the emulator's own speed (lane-instructions per second of CPU time) and memory.

    python bench/emulator.py [--json FILE]

Each line runs in a separate process (bench_emulator), so that its peak memory is measured
separately. Seconds are CPU time, the minimum of three runs, so other programs may run at the same
time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = ("gemm", "forward", "backward", "definition")


def compilers() -> list[str]:
    return [
        str(path)
        for folder in sys.path
        for path in Path(folder).glob("nvidia/*/lib/libnvrtc.so.1[23]")
    ]


def run(*arguments: str) -> dict:
    program = ROOT / "build" / "release" / "bin" / "bench_emulator"
    found = compilers()
    environment = {**os.environ, **({"DEEPWELL_NVRTC": found[0]} if found else {})}
    command = [str(program), *arguments]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return json.loads(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    lines = []
    for kernel in KERNELS:
        for check in (True, False):
            for threads in (1, cores) if cores > 1 else (1,):
                lines.append(
                    run(kernel, "--threads", str(threads), *([] if check else ["--no-check"]))
                )
                print(json.dumps(lines[-1]), flush=True)
    lines.append({**run("gemm", "--size", "2048"), "size": 2048})
    print(json.dumps(lines[-1]))
    if options.json:
        names = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        made = {
            "date": datetime.date.today().isoformat(),
            "machine": names[0] if names else platform.processor(),
            "cores": cores,
            "load": os.getloadavg()[0],
            "runs": lines,
        }
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
