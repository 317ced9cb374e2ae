"""Two processes (gloo) with an emulated H100 each train as plain PyTorch does on the whole batch: the cases of
distributed_cases.py. And DistributedDataParallel sends gradients while backward runs."""

from __future__ import annotations

import deepwell
import pytest
import torch
import torch.distributed as dist
from deepwell import _deepwell
from deepwell.runtime import _Pass
from distributed_cases import failures, free_port, told
from test_optimize_gpu import EMULATED, Wide
from torch.nn.parallel import DistributedDataParallel


def test_two_processes_train_as_one() -> None:
    if not _deepwell.jit_compiler():
        pytest.skip("elementwise programs need NVRTC")
    failed = failures(2, "cpu", EMULATED)
    assert not failed, told(failed)


def test_buckets_are_sent_between_parts_of_backward(always, monkeypatch) -> None:
    """The order of the parts of backward and of the buckets that become full."""
    happened: list[str] = []
    run = _Pass.run

    def noted(self, part):
        happened.append(f"part {part}")
        return run(self, part)

    def hook(state, bucket):
        happened.append(f"bucket of {len(bucket.parameters())}")
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    monkeypatch.setattr(_Pass, "run", noted)
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        ours = deepwell.optimize(Wide(), verbose=False)
        model = DistributedDataParallel(ours, bucket_cap_mb=8)
        model.register_comm_hook(None, hook)
        for _ in range(3):  # the first backward has one bucket
            happened.clear()
            model(torch.randn(3, 1500)).square().sum().backward()
        # A part hands a gradient on when no later part reads the weight either, because a hook may change it.
        assert happened == [
            "part 0", "part 1", "bucket of 1", "bucket of 1", "part 2", "bucket of 1",
        ]  # fmt: skip
    finally:
        dist.destroy_process_group()
