"""Processes of the tests of ``deepwell.checkpoints``: ranks of FSDP2 (gloo) that load and save folders of
torch.distributed.checkpoint, and conversions that are killed. Processes are forked, because importing PyTorch takes
longer than a run.

    python reshard_runs.py ranks SAVED SHARDED OUT      one process to two ranks, theirs to a checkpoint, that to three ranks
    python reshard_runs.py limited FOLDER OUT OUT BYTES    converts there and back with little memory
    python reshard_runs.py kill SAVED OUT KILLS SEED    kills conversions of SAVED until so many died
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import deepwell
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from deepwell.training import state
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCABULARY = 61  # no multiple of a number of ranks


def model() -> torch.nn.Module:
    torch.manual_seed(11)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=24, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=16, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, VOCABULARY, (2, 8), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in rows]


def optimizer(of: torch.nn.Module) -> torch.optim.Optimizer:
    params = list(of.parameters())
    groups = [
        {"params": [each for each in params if each.dim() >= 2]},
        {"params": [each for each in params if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=7.0)


def load(folder: Path, of: torch.nn.Module, updates: torch.optim.Optimizer, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, averages = get_state_dict(of, updates, options=options)
    loaded = {"model": weights, "optim": averages}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        of, updates, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"], options=options
    )  # fmt: skip


def whole(of: torch.nn.Module, updates: torch.optim.Optimizer) -> dict:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, averages = get_state_dict(of, updates, options=options)
    return {"model": weights, "optim": averages}


def split(of: torch.nn.Module) -> torch.nn.Module:
    for block in of.transformer.h:
        fully_shard(block)
    return fully_shard(of)


def by_trainer(source: Path, wanted: dict) -> None:
    """Trainer's way to resume: each rank reads its shards, and both have what torch.distributed.checkpoint loaded."""
    torch.manual_seed(99)
    mine = model()
    with torch.no_grad():
        for param in mine.parameters():
            param.normal_()
    mine = split(mine)
    updates = optimizer(mine)
    kept = json.loads((source / "trainer.json").read_text())["optimizer"]
    state.read_into(str(source), state.tensors_of(mine))
    state.load_optimizer(mine, updates, str(source), kept, 0)
    found = whole(mine, updates)
    for name, each in wanted["model"].items():
        assert torch.equal(found["model"][name], each), name
    for name, values in wanted["optim"].get("state", {}).items():  # of rank 0
        for key, each in values.items():
            assert torch.equal(found["optim"]["state"][name][key], each), (name, key)


def rank_of(rank: int, ranks: int, port: int, source: Path, target: Path, gathered: Path) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    sharded = split(model())
    updates = optimizer(sharded)
    flat = "flat" in source.name
    load(source, sharded, updates, flat)
    before = whole(sharded, updates)
    by_trainer(source, before)
    for group in updates.param_groups:
        group["lr"] = 1e-2
    sharded(**batches()[0]).loss.backward()
    updates.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, averages = get_state_dict(sharded, updates, options=options)
    # Entries that are neither of the model nor of the optimizer: a tensor, values, and one that no file holds.
    more = {"seen": torch.arange(5), "run": {"name": "x", "tokens": 7}, "odd": complex(1, 2)}
    dcp.save({"app": {"model": weights, "optim": averages}, **more}, checkpoint_id=target)
    after = whole(sharded, updates)
    if rank == 0:
        torch.save({"before": before, "after": after}, gathered)
    dist.barrier()  # the process then ends by os._exit: see trainer_runs.py


def ranks(count: int, *paths: Path) -> None:
    port = 20000 + os.getpid() % 20000
    processes = []
    for rank in range(count):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                rank_of(rank, count, port, *paths)
                status = 0
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(status)
        processes.append(process)
    if any([os.waitpid(process, 0)[1] != 0 for process in processes]):
        sys.exit(1)


def chain(saved: Path, sharded: Path, out: Path) -> None:
    """Ranks load a folder, make a step, and save another; the last folder's names of groups are flat."""
    reports = []
    ranks(2, sharded, out / "two", out / "two.pt")
    reports.append(deepwell.checkpoints.from_distributed(out / "two", out / "one", like=saved))
    reports.append(deepwell.checkpoints.to_distributed(out / "one", out / "flat", flat=True))
    ranks(3, out / "flat", out / "three", out / "three.pt")
    last = deepwell.checkpoints.from_distributed(out / "three", out / "last", like=saved, step=70)
    print(json.dumps([dataclasses.asdict(each) for each in (*reports, last)]))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def convert(source: Path, target: Path) -> int:
    process = os.fork()
    if process == 0:
        status = 1
        try:
            back = (source / ".metadata").exists()
            checkpoints = deepwell.checkpoints
            (checkpoints.from_distributed if back else checkpoints.to_distributed)(source, target)
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(status)
    return process


def limited(source: Path, sharded: Path, back: Path, limit: int) -> None:
    """Converts there and back in a process that can have ``limit`` bytes of data more than it has."""
    page = os.sysconf("SC_PAGE_SIZE")
    mapped = int(Path("/proc/self/statm").read_text().split()[5]) * page
    resource.setrlimit(resource.RLIMIT_DATA, (mapped + limit, mapped + limit))
    for pair in ((source, sharded), (sharded, back)):
        if os.waitpid(convert(*pair), 0)[1] != 0:
            sys.exit(1)


def kill(source: Path, target: Path, kills: int, seed: int) -> None:
    """Kills conversions to a DCP folder and back at random moments. Each time the result is complete or absent, or the
    one of before; and a conversion that nobody kills is not hindered by what they left."""
    chance = random.Random(seed)
    sharded, back = target / "sharded", target / "back"
    began = time.monotonic()
    assert os.waitpid(convert(source, sharded), 0)[1] == 0
    length = time.monotonic() - began
    wanted = bytes_of(source)
    died = present = 0
    while died < kills:
        process = convert(*chance.choice([(source, sharded), (sharded, back)]))
        time.sleep(chance.uniform(0, 1.3 * length))
        os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        assert status in (0, signal.SIGKILL), status
        died += status == signal.SIGKILL
        deepwell._deepwell.checkpoint_verify(sharded, "{}")
        if back.exists():
            present += 1
            assert bytes_of(back) == wanted
            shutil.rmtree(back)
    assert os.waitpid(convert(sharded, back), 0)[1] == 0
    assert bytes_of(back) == wanted
    assert os.waitpid(convert(source, sharded), 0)[1] == 0
    assert sorted(path.name for path in target.iterdir()) == ["back", "sharded"]  # no leftovers
    print(died, present)


if __name__ == "__main__":
    torch.set_num_threads(1)
    from deepwell.training import distributed  # noqa: F401  before the forks

    if sys.argv[1] == "ranks":
        chain(*map(Path, sys.argv[2:]))
    elif sys.argv[1] == "limited":
        limited(*map(Path, sys.argv[2:5]), int(sys.argv[5]))
    else:
        kill(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
