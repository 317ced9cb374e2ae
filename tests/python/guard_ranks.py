"""A run with a guard on two ranks, started by test_precision_guard.py: guard_ranks.py FOLDER KIND. Prints for each rank the
changes of precision, the numbers of elements of the newest sample, and the bytes of kept codes, as JSON."""

import json
import os
import sys
from pathlib import Path

import deepwell
import torch
import torch.distributed as dist
from deepwell.optimize import installed, sessions
from deepwell.training import distributed  # noqa: F401  before the forks
from test_precision_guard import Rows, guarded, small
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def in_pytorch(model: torch.nn.Module) -> None:
    """Makes the forward one that no capture follows and that calls no module, so that PyTorch runs all of it."""

    def applied(layer, x):
        return functional.linear(x, layer.weight, layer.bias)

    def branching(x, y):
        x = x if float(x.sum()) > -1e9 else -x
        h = torch.tanh(applied(model.middle, torch.relu(applied(model.first, x))))
        return {"loss": functional.mse_loss(applied(model.last, h), y)}

    model.forward = branching


def train(folder: Path, kind: str, rank: int) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = small(1e7)
    if kind == "pytorch" and rank == 1:
        in_pytorch(model)
    model = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model)
    trainer = deepwell.Trainer(
        model, Rows(), batch=4, shuffle=False, steps=8, lr=1e-3, weight_decay=0.0, schedule="constant", progress=False,
        precision=guarded("fp8", every=2), accumulate=2,
    )  # fmt: skip
    trainer.fit()
    elements = {f"{x.layer} {x.operand}": x.elements for x in trainer.precision_report()}
    blocks = [each for session in sessions(model) for each in session.kept._blocks.values()]
    kept = sum(each.segment.bytes for each in blocks)
    found = {
        "changes": trainer.precision_changes,
        "elements": elements,
        "kept": kept,
        "programs": sum(len(each.programs()) for each in installed(trainer.module)),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(
        0
    )  # PyTorch's threads of DistributedDataParallel over gloo may not end when the model is destroyed


def main(folder: Path, kind: str) -> int:
    processes = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            try:
                train(folder, kind, rank)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        processes.append(process)
    failed = [process for process in processes if os.waitpid(process, 0)[1] != 0]
    if not failed:
        print(
            json.dumps([json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)])
        )
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
