"""DistributedDataParallel on two CPU processes (gloo) equals plain PyTorch on the whole batch."""

import os
import socket

import deepwell
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _worker(rank: int, port: int, wrap_first: bool, folder: str) -> None:
    from zoo import small_gpt2

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DEEPWELL_MEASURE="0", HF_HUB_OFFLINE="1"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = small_gpt2().train()
    if wrap_first:
        model = deepwell.optimize(torch.nn.parallel.DistributedDataParallel(model), verbose=False)
    else:
        model = torch.nn.parallel.DistributedDataParallel(deepwell.optimize(model, verbose=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        ids = torch.randint(0, 211, (4, 15), generator=torch.Generator().manual_seed(step))
        mine = ids[rank * 2 : rank * 2 + 2]
        optimizer.zero_grad()
        loss = model(input_ids=mine, labels=mine.clone()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    from users import engine_calls

    torch.save(
        {
            "losses": losses,
            "state": model.module.state_dict(),
            "calls": engine_calls(model.module),
        },
        os.path.join(folder, f"{rank}.pt"),
    )
    dist.destroy_process_group()


def _run(tmp_path, wrap_first: bool) -> None:
    from zoo import small_gpt2

    mp.spawn(_worker, args=(_free_port(), wrap_first, str(tmp_path)), nprocs=2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    torch.manual_seed(0)
    plain = small_gpt2().train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(3):
        ids = torch.randint(0, 211, (4, 15), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = plain(input_ids=ids, labels=ids.clone()).loss
        loss.backward()
        optimizer.step()
        assert abs(sum(r["losses"][step] for r in results) / 2 - loss.item()) < 1e-4
    for result in results:
        assert result["calls"] == (3, 0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(results[0]["state"][name], results[1]["state"][name])
        torch.testing.assert_close(results[0]["state"][name], value, rtol=1e-3, atol=2e-4)


def test_optimize_then_wrap(tmp_path) -> None:
    _run(tmp_path, wrap_first=False)


@pytest.mark.slow
def test_wrap_then_optimize(tmp_path) -> None:
    _run(tmp_path, wrap_first=True)
