"""`deepwell reshard` runs this module: ``deepwell.checkpoints`` with the options of a command line.

    python -m deepwell.reshard_command run/step-000000000200 -o sharded

docs/reshard.md describes it. Exit status: 0 written, 1 failed, 2 wrong usage, 3 not supported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepwell import checkpoints
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.training import state


class _UsageError(Exception):
    """The options contradict one another or the folder."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="deepwell reshard",
        description="Converts a checkpoint to or from torch.distributed.checkpoint.",
    )
    made.add_argument("folder", metavar="FOLDER")
    made.add_argument("-o", "--output", required=True, metavar="OUT")
    made.add_argument("--tied", action="append", default=[], metavar="A=B")
    made.add_argument("--flat", action="store_true")
    made.add_argument("--like", metavar="DIR")
    made.add_argument("--step", type=int, metavar="N")
    made.add_argument("--model-key", metavar="K")
    made.add_argument("--optimizer-key", metavar="K")
    made.add_argument("--json", action="store_true")
    return made


def _tied(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, mark, of = pair.partition("=")
        if not (name and mark and of):
            raise _UsageError(f"--tied is {pair!r}: expected NAME=NAME")
        found[name] = of
    return found


def _convert(options: argparse.Namespace) -> checkpoints.Resharded:
    tied = _tied(options.tied)
    keys = ("like", "step", "model_key", "optimizer_key")
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    if state.is_distributed(options.folder):
        if options.flat:
            raise _UsageError("--flat is for conversions to torch.distributed.checkpoint")
        return checkpoints.from_distributed(options.folder, options.output, tied=tied, **given)
    if given:
        option = next(iter(given)).replace("_", "-")
        raise _UsageError(
            f'--{option} is for conversions from torch.distributed.checkpoint, and "{options.folder}" has no '
            "file .metadata"
        )
    return checkpoints.to_distributed(options.folder, options.output, tied=tied, flat=options.flat)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `deepwell reshard` and returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        result = _convert(options)
    except _UsageError as error:
        print(f"deepwell: {error}\nTry 'deepwell reshard --help'.", file=sys.stderr)
        return 2
    except UnsupportedError as error:
        print(f"deepwell: {error}", file=sys.stderr)
        return 3
    except (DeepwellError, OSError, ValueError) as error:
        print(f"deepwell: {error}", file=sys.stderr)
        return 1
    print(result.to_json() if options.json else result, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
