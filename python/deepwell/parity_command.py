"""`deepwell parity` runs this module: ``deepwell.parity`` with the options of a command line.

    python -m deepwell.parity_command --model gpt2 --data tokens.bin --precision mxfp8,nvfp4 --steps 2000 --seeds 3

docs/parity.md describes it. Exit status: 0 all within their bars, 1 apart or failed, 2 wrong usage, 3 not supported
here.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

import deepwell
from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="deepwell parity",
        description="Compares training in lower precisions with training in BF16.",
    )
    made.add_argument("--model", required=True, metavar="DIR|NAME")
    made.add_argument("--init", action="store_true", help="random weights for a folder's model")
    made.add_argument("--data", required=True, nargs="+", metavar="PATH")
    made.add_argument("--held-out", nargs="+", metavar="PATH")
    made.add_argument("--token-type", choices=("uint16", "uint32"))
    made.add_argument("--precision", required=True, metavar="P,...")
    made.add_argument("--steps", required=True, type=int)
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--micro-batch", type=int)
    made.add_argument("--sequence", type=int, default=256)
    made.add_argument("--lr", type=float, default=3e-4)
    made.add_argument("--warmup", type=int)
    made.add_argument("--schedule", default="cosine", choices=("cosine", "linear", "constant"))
    made.add_argument("--no-dropout", action="store_true")
    made.add_argument("--bar", type=float, metavar="PERCENT")
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--output", default="parity", metavar="DIR")
    made.add_argument("--fresh", action="store_true", help="do not reuse runs of DIR")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _accumulate(batch: int, micro_batch: int | None) -> int:
    if micro_batch is None:
        return 1
    if micro_batch < 1 or batch % micro_batch:
        raise ValueError(f"--micro-batch is {micro_batch}: expected a divisor of --batch, {batch}")
    return batch // micro_batch


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `deepwell parity` and returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            if options.json:
                warnings.simplefilter("ignore")
            result = deepwell.parity(
                options.model,
                options.data,
                [each for each in options.precision.split(",") if each],
                options.steps,
                options.seeds,
                held_out=options.held_out,
                output=options.output,
                fresh=options.fresh,
                device=options.device,
                init=options.init,
                no_dropout=options.no_dropout,
                token_type=options.token_type,
                bar=None if options.bar is None else options.bar / 100,
                batch=options.batch,
                accumulate=_accumulate(options.batch, options.micro_batch),
                sequence=options.sequence,
                lr=options.lr,
                warmup_steps=options.warmup,
                schedule=options.schedule,
            )
    except ValueError as error:
        print(f"deepwell: {error}\nTry 'deepwell parity --help'.", file=sys.stderr)
        return 2
    except UnsupportedError as error:
        print(f"deepwell: {error}", file=sys.stderr)
        return 3
    except (DeepwellError, _deepwell.Error, OSError, torch.OutOfMemoryError) as error:
        print(f"deepwell: {error}", file=sys.stderr)
        return 1
    print(result.to_json() if options.json else result, flush=True)
    if not options.json:
        page = Path(options.output) / "parity.html"
        print(f"\n{page} has the curves.", flush=True)
    return result.exit_status


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
