"""Runs the benchmarks and writes bench/results/<what>-<date>.json.

make bench        or        python bench/run.py [training] [resident] [capture] [operations] [formats] [emulator]
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent


def training(stamp: str) -> int:
    """Whole models, with PyTorch and torch.compile for comparison."""
    target = HERE / "results" / f"training-cpu-{stamp}.json"
    return subprocess.call([sys.executable, str(HERE / "training.py"), "--json", str(target)])


def resident(stamp: str) -> int:
    """Peak memory of whole training processes."""
    target = HERE / "results" / f"resident-cpu-{stamp}.json"
    return subprocess.call([sys.executable, str(HERE / "resident.py"), "--json", str(target)])


def capture(stamp: str) -> int:
    """Capture of models with hundreds of billions of parameters, without their weights."""
    target = HERE / "results" / f"capture-cpu-{stamp}.json"
    return subprocess.call([sys.executable, str(HERE / "capture_models.py"), "--json", str(target)])


def operations(stamp: str) -> int:
    """Every kernel's speed."""
    del stamp
    driver = ROOT / "build" / "release" / "bin" / "deepwell-ops"
    if not driver.exists():
        print(f"{driver} is not built: run `make` first", file=sys.stderr)
        return 1
    return subprocess.call([str(driver), "perf"])


def formats(stamp: str) -> int:
    """Quantizing and dequantizing against memcpy."""
    target = HERE / "results" / f"formats-cpu-{stamp}.json"
    return subprocess.call([sys.executable, str(HERE / "formats.py"), "--json", str(target)])


def emulator(stamp: str) -> int:
    """The emulator's own speed and memory."""
    target = HERE / "results" / f"emulator-cpu-{stamp}.json"
    return subprocess.call([sys.executable, str(HERE / "emulator.py"), "--json", str(target)])


KINDS = {
    "training": training,
    "resident": resident,
    "capture": capture,
    "operations": operations,
    "formats": formats,
    "emulator": emulator,
}


def main() -> int:
    wanted = sys.argv[1:] or list(KINDS)
    unknown = [name for name in wanted if name not in KINDS]
    if unknown:
        print(f"no benchmark called {unknown[0]}: one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    stamp = datetime.date.today().isoformat()
    return max(KINDS[name](stamp) for name in wanted)


if __name__ == "__main__":
    sys.exit(main())
