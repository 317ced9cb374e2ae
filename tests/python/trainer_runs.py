"""Runs of a small Trainer: the program is started once and forks a process for each run, because importing PyTorch
takes longer than a run. ``python trainer_runs.py FOLDER KILLS SEED`` kills runs at random moments until so many died,
checks after each that no checkpoint was lost, and compares the result with a run that nobody killed.

    python trainer_runs.py --ranks FOLDER    trains on several ranks (gloo), whose number changes
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import deepwell
import numpy
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STEPS = 40
WIDTH = 96


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        return {"loss": torch.nn.functional.mse_loss(self.last(self.dropout(self.first(x))), y)}


def collate(rows):
    return {"x": torch.stack([row[0] for row in rows]), "y": torch.stack([row[1] for row in rows])}


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(50, WIDTH, generator=generator), torch.randn(50, 1, generator=generator)
    )


def trainer(folder: Path, **options) -> deepwell.Trainer:
    random.seed(9), numpy.random.seed(9), torch.manual_seed(9)
    loader = DataLoader(rows(), batch_size=4, shuffle=True, collate_fn=collate)
    model = options.pop("model", None) or Small()
    torch.manual_seed(9)
    options = {"steps": STEPS, "save_every": 1, "resume": True, **options}
    return deepwell.Trainer(
        model, loader, optimize=False, progress=False, lr=1e-2, checkpoint=folder / "ck",
        log=folder / "log.jsonl", **options,
    )  # fmt: skip


def result(folder: Path) -> dict[str, bytes]:
    last = folder / "ck" / f"step-{STEPS:012}"
    found = {
        name: (last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")
    }
    kept = json.loads((last / "trainer.json").read_text())
    found["random"] = json.dumps(kept["random"])
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    found["log"] = [{**line, "tokens_per_second": None} for line in lines]
    return found


def fork(folder: Path) -> int:
    process = os.fork()
    if process == 0:
        status = 1
        try:
            trainer(folder).fit()
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(status)
    return process


def newest(folder: Path) -> int:
    """The newest checkpoint, which must be whole."""
    complete = sorted(folder.glob("ck/step-*"))
    if not complete:
        return -1
    from deepwell import _deepwell

    _deepwell.checkpoint_verify(complete[-1], "{}")
    return int(complete[-1].name[5:])


def kill(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    (folder / "whole").mkdir(), (folder / "killed").mkdir()
    began = time.monotonic()
    assert os.waitpid(fork(folder / "whole"), 0)[1] == 0
    length = time.monotonic() - began
    killed, before, died = folder / "killed", -1, 0
    while True:
        process = fork(killed)
        if died < kills:
            time.sleep(chance.uniform(0, length / (20 if chance.random() < 1 / 3 else 8)))
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        assert status in (0, signal.SIGKILL), status
        died += status == signal.SIGKILL
        now = newest(killed)
        assert now >= before, "a checkpoint was lost"
        before = now
        if status != 0:
            continue
        ours, wanted = result(killed), result(folder / "whole")
        assert ours == wanted, [name for name in wanted if ours[name] != wanted[name]]
        names = sorted(path.name for path in (killed / "ck").iterdir())
        assert names == [".lock", f"step-{STEPS - 1:012}", f"step-{STEPS:012}"], names
        if died >= kills:
            break
        shutil.rmtree(killed)
        killed.mkdir()
        before = -1
    print(json.dumps({"died": died}))


def on_ranks(folder: Path, steps: int, ranks: int, kind: str, port: int) -> None:
    processes = []
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                train_rank(folder, steps, rank, ranks, port, kind)
                status = 0
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(status)
        processes.append(process)
    failed = [process for process in processes if os.waitpid(process, 0)[1] != 0]
    if failed:
        sys.exit(1)


def on_changing_ranks(folder: Path) -> None:
    """Runs of 9 steps: on one rank, and on two, one and two."""
    port = 20000 + os.getpid() % 20000
    on_ranks(folder / "one", 9, 1, "", port)
    for kind in ("ddp", "fsdp"):
        for steps, ranks in ((3, 2), (6, 1), (9, 2)):
            port += 1
            on_ranks(folder / kind, steps, ranks, kind, port)


def train_rank(folder: Path, steps: int, rank: int, ranks: int, port: int, kind: str) -> None:
    if ranks > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    model = Small()
    model.dropout.p = 0.0
    if ranks > 1 and kind == "ddp":
        model = DistributedDataParallel(model)
    if ranks > 1 and kind == "fsdp":
        fully_shard(model)
    deepwell.Trainer(
        model, Whole(), shuffle=False, optimize=False, progress=False, lr=1e-2, batch=12, steps=steps, schedule_steps=20, elastic=True,
        checkpoint=folder / "ck", log=folder / "log.jsonl", resume=True,
    ).fit()  # fmt: skip
    if ranks > 1:
        dist.barrier()  # the process then ends by os._exit: gloo's own shutdown may wait for a rank that has gone


class Whole(torch.utils.data.Dataset):
    """The rows as dicts; Trainer divides them among the ranks."""

    def __init__(self) -> None:
        self.x, self.y = rows()[:48]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return {"x": self.x[i], "y": self.y[i]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "--ranks":
        on_changing_ranks(Path(sys.argv[2]))
    else:
        kill(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
