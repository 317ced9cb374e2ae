"""Training in a group of processes, one engine each: DistributedDataParallel, FSDP2, tensor parallelism. Each case
compares with plain PyTorch on the batch of all processes, and returns the model whose summary must agree with the case's
mark. Used on CPUs (test_distributed.py: gloo, an emulated GPU) and
on GPUs (tests/gpu/test_support.py: NCCL, one GPU each)."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS = 3  # of each process


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Two blocks and a head, as a transformer has them; one layer is in no forward."""

    def __init__(self, width: int = 8, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, width)
        if unused:
            self.unused = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Case:
    """What a case needs: the device of its models, the target of optimize, and the data of all processes."""

    def __init__(self, device: torch.device, target: str) -> None:
        self.device, self.target = device, target
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def build(self, **options) -> nn.Module:
        return Blocks(**options).to(self.device)

    def optimize(self, model: nn.Module) -> nn.Module:
        import deepwell

        return deepwell.optimize(model, target=self.target, verbose=False)

    def batch(self, seed: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(ROWS * self.world, 8, generator=draw).to(self.device)

    def mine(self, seed: int) -> torch.Tensor:
        return self.batch(seed)[self.rank * ROWS : (self.rank + 1) * ROWS]

    def wrap(self, model: nn.Module, **options) -> DistributedDataParallel:
        on = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=on, **options)

    def shard(self, model: nn.Module, **options) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """The gradients of a batch are the means of those of its parts."""
    return torch.sin(2 * y.float()).square().mean()


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_gradients(case: Case, model: nn.Module, plain: nn.Module, unit: float = 0.0) -> None:
    from users import close

    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        found, expected = whole(ours.grad), theirs.grad
        if expected is None:  # DistributedDataParallel may give zeros
            assert found is None or not found.any(), name
        else:
            assert found is not None, f"{name} has no gradient"
            close(found.cpu(), expected.cpu(), f"gradient of {name}", unit)


def train(case: Case, run: nn.Module, model: nn.Module, unit: float = 0.0, **options) -> None:
    """Two steps, the second from the parameters that the first has made."""
    plain = case.build(**options)
    for each in (model, plain):
        each.zero_grad()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for seed in (1, 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(run(case.mine(seed))).backward()
        loss_of(plain(case.batch(seed))).backward()
        check_gradients(case, model, plain, unit)
        for optimizer in optimizers:
            optimizer.step()


# ---- DistributedDataParallel -----------------------------------------------------------------------------


@pytest.mark.support("Several processes", "DistributedDataParallel after optimize", "engine")
def ddp_after_optimize(case: Case) -> nn.Module | None:
    model = case.optimize(case.build())
    train(case, case.wrap(model), model)
    return model


@pytest.mark.support("Several processes", "DistributedDataParallel before optimize", "engine")
def ddp_before_optimize(case: Case) -> nn.Module | None:
    wrapped = case.optimize(case.wrap(case.build()))
    train(case, wrapped, wrapped.module)
    return wrapped.module


@pytest.mark.support(
    "Several processes", "find_unused_parameters, gradient_as_bucket_view", "engine"
)
def ddp_with_unused_parameters(case: Case) -> nn.Module | None:
    model = case.optimize(case.build(unused=True))
    wrapped = case.wrap(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    train(case, wrapped, model, unused=True)
    return model


@pytest.mark.support("Several processes", "static_graph", "engine")
def ddp_with_a_static_graph(case: Case) -> nn.Module | None:
    model = case.optimize(case.build())
    train(case, case.wrap(model, static_graph=True), model)
    return model


@pytest.mark.support(
    "Several processes", "accumulation over microbatches, with no_sync and without", "engine"
)
def ddp_accumulation(case: Case) -> nn.Module | None:
    """With no_sync, and without it: both give the sum over microbatches."""
    for synchronized in (False, True):
        model, plain = case.optimize(case.build()), case.build()
        wrapped = case.wrap(model)
        for seed in (1, 2, 3):
            last = seed == 3
            with nullcontext() if last or synchronized else wrapped.no_sync():
                loss_of(wrapped(case.mine(seed))).backward()
            loss_of(plain(case.batch(seed))).backward()
        check_gradients(case, model, plain)
    return model


@pytest.mark.support(
    "Several processes",
    "processes that decide differently between the engine and PyTorch",
    "engine",
)
def ddp_where_processes_differ(case: Case) -> nn.Module | None:
    """The engine runs in the first process and PyTorch in the others, as comparisons may decide."""
    import deepwell

    model = case.optimize(case.build())
    if case.rank > 0:
        deepwell.restore(model)
    train(case, case.wrap(model), model)
    return model if case.rank == 0 else None


@pytest.mark.support("Several processes", "comparison with PyTorch in each process", "engine")
def ddp_compared(case: Case) -> nn.Module | None:
    """Each process compares with PyTorch by itself, without communication, and may decide as no other does."""
    os.environ.pop("DEEPWELL_MEASURE")
    try:
        model = case.optimize(case.build())
        train(case, case.wrap(model), model)
    finally:
        os.environ["DEEPWELL_MEASURE"] = "0"
    return None if case.device.type == "cuda" else model  # either side may be faster there


@pytest.mark.support(
    "Several processes", "frozen parameters under DistributedDataParallel", "engine"
)
def ddp_with_frozen_parameters(case: Case) -> nn.Module | None:
    model, plain = case.build(), case.build()
    for each in (model, plain):
        each.blocks[0].requires_grad_(False)
    wrapped = case.wrap(case.optimize(model))
    loss_of(wrapped(case.mine(1))).backward()
    loss_of(plain(case.batch(1))).backward()
    check_gradients(case, model, plain)
    return model


# ---- FSDP2 -----------------------------------------------------------------------------------------------


@pytest.mark.support(
    "Several processes",
    "fully_shard of blocks and model after optimize",
    "engine and PyTorch",
    "fully_shard was applied",
)
def fsdp2_after_optimize(case: Case) -> nn.Module | None:
    model = case.shard(case.optimize(case.build()))
    train(case, model, model)
    return model


@pytest.mark.support(
    "Several processes",
    "fully_shard of blocks and model before optimize",
    "engine and PyTorch",
    "fully_shard was applied",
)
def fsdp2_before_optimize(case: Case) -> nn.Module | None:
    model = case.optimize(case.shard(case.build()))
    train(case, model, model)
    return model


@pytest.mark.support("Several processes", "optimize of each block, fully_shard after", "engine")
def fsdp2_blocks_optimized(case: Case) -> nn.Module | None:
    model = case.build()
    for block in model.blocks:
        case.optimize(block)
    case.shard(model)
    train(case, model, model)
    return model


@pytest.mark.support(
    "Several processes", "fully_shard of a whole model, freed after forward", "engine"
)
def fsdp2_of_a_whole_model(case: Case) -> nn.Module | None:
    """One unit, freed after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(case.device.type, (case.world,))
    model = fully_shard(case.optimize(case.build()), mesh=mesh, reshard_after_forward=True)
    train(case, model, model)
    return model


@pytest.mark.support(
    "Several processes",
    "MixedPrecisionPolicy of FSDP2",
    "engine and PyTorch",
    "fully_shard was applied",
)
def fsdp2_in_bfloat16(case: Case) -> nn.Module | None:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from users import BF16_UNIT

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = case.optimize(case.shard(case.build(), mp_policy=policy))
    plain = case.build()
    loss_of(model(case.mine(1))).backward()
    loss_of(plain(case.batch(1))).backward()
    check_gradients(case, model, plain, 2 * BF16_UNIT)  # the reference does not round
    return model


@pytest.mark.support(
    "Several processes",
    "set_requires_gradient_sync of FSDP2",
    "engine and PyTorch",
    "fully_shard was applied",
)
def fsdp2_accumulation(case: Case) -> nn.Module | None:
    model, plain = case.optimize(case.shard(case.build())), case.build()
    for seed in (1, 2, 3):
        model.set_requires_gradient_sync(seed == 3)
        loss_of(model(case.mine(seed))).backward()
        loss_of(plain(case.batch(seed))).backward()
    check_gradients(case, model, plain)
    return model


# ---- tensor parallelism ----------------------------------------------------------------------------------


@pytest.mark.support(
    "Several processes", "tensor parallelism (parallelize_module)", "PyTorch", "DTensor"
)
def tensor_parallelism(case: Case) -> nn.Module | None:
    """Each process has a part of each weight while it computes: the forward is PyTorch's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(case.device.type, (case.world,))
    model, plain = case.build(), case.build()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    case.optimize(model)
    for each in (model, plain):
        loss_of(each(case.batch(1))).backward()
    check_gradients(case, model, plain)
    return None if case.device.type == "cuda" else model  # PyTorch's, with Deepwell's attention


CASES = (
    ddp_after_optimize, ddp_before_optimize, ddp_with_unused_parameters, ddp_with_a_static_graph,
    ddp_accumulation, ddp_compared, ddp_where_processes_differ, ddp_with_frozen_parameters,
    fsdp2_after_optimize, fsdp2_before_optimize, fsdp2_blocks_optimized, fsdp2_of_a_whole_model,
    fsdp2_in_bfloat16, fsdp2_accumulation, tensor_parallelism,
)  # fmt: skip


def run_all(rank: int, world: int, port: int, kind: str, target: str, results) -> None:
    """Runs every case in one process group. Failures are in ``results``, by rank and case."""
    sys.path.insert(0, os.path.dirname(__file__))
    from users import Support

    os.environ["DEEPWELL_MEASURE"] = "0"
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
    )
    for function in CASES:
        try:
            model = function(Case(device, target))
            if model is not None:
                Support(*function.pytestmark[0].args).check(model)
            results[rank, function.__name__] = ""
        except BaseException:
            results[rank, function.__name__] = traceback.format_exc()
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def failures(world: int, kind: str, target: str) -> dict:
    """Runs all cases in ``world`` processes. Returns the tracebacks of those that failed, by (rank, case)."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(run_all, args=(world, free_port(), kind, target, results), nprocs=world)
        found = dict(results)
    assert found.keys() == {(rank, f.__name__) for rank in range(world) for f in CASES}
    return {key: text for key, text in found.items() if text}


def told(failed: dict) -> str:
    return "\n".join(f"rank {rank}, {name}:\n{text}" for (rank, name), text in failed.items())
