"""A training with two mixtures on two ranks, started by test_expert_load.py: expert_load_ranks.py FOLDER. Each rank writes
what its mixtures told after every forward, and what its Trainer reported, wrote to its log and to TensorBoard."""

import json
import os
import sys
import types
from pathlib import Path

import deepwell
import torch
import torch.distributed as dist
from deepwell.optimize import installed
from deepwell.training import distributed  # noqa: F401  before the forks
from test_expert_load import Model, rows
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

RANKS, STEPS, ACCUMULATE = 2, 3, 2


class Board:
    """Stands for TensorBoard's writer."""

    written: list = []

    def __init__(self, folder, purge_step=None) -> None:
        pass

    def add_scalar(self, name, value, step) -> None:
        self.written.append((name, value, step))

    def close(self) -> None:
        pass


def train(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Board
    sys.modules["torch.utils.tensorboard"] = fake
    model = DistributedDataParallel(Model(capacity_factor=1.0))
    told, reports = [], []

    def note(module, args, result) -> None:
        mixtures = module.module.first, module.module.second
        told.append([each.statistics() for each in mixtures])

    model.register_forward_hook(note)
    callback = types.SimpleNamespace(on_step=lambda trainer, report: reports.append(report))
    trainer = deepwell.Trainer(
        model, DataLoader(rows(23)[rank::RANKS]), steps=STEPS, schedule="constant", progress=False, callbacks=[callback],
        accumulate=ACCUMULATE, log=folder / "log.jsonl", tensorboard=folder / "board",
    )  # fmt: skip
    trainer.fit()
    found = {
        "told": told,
        "reported": [
            [(each.layer, each.tokens, each.dropped, each.entropy) for each in report.experts]
            for report in reports
        ],
        "board": Board.written,
        "programs": sum(len(each.programs()) for each in installed(trainer.module)),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # threads of DistributedDataParallel over gloo may not end


def main(folder: Path) -> int:
    processes = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            try:
                train(folder, rank)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        processes.append(process)
    return int(any(os.waitpid(process, 0)[1] != 0 for process in processes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1])))
