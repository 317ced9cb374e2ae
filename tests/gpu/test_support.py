"""What users do with a model that runs whole in the engine, on a Hopper GPU. tests/python/test_users_*.py has the
complete list, on the CPU and on an emulated GPU; here are those for which the device may matter. With
DEEPWELL_TEST_DEVICE=cpu they run on an emulated GPU, slowly."""

from __future__ import annotations

import copy
import gc
import io
import threading

import deepwell
import pytest
import torch
from deepwell.targets import EMULATED
from distributed_cases import failures, told
from test_optimize_gpu import gpt2
from torch import nn
from torch.utils.checkpoint import checkpoint
from users import BF16_UNIT, Net, close, engine_calls, rows, same, tally, uneven

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda", 0) if hopper else torch.device("cpu")
KIND = DEVICE.type
TARGET = "auto" if hopper else EMULATED[0]
F16_UNIT = 2.0**-11

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not hopper, reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def _the_engine_runs(monkeypatch):
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")


def optimized(model: nn.Module) -> nn.Module:
    return deepwell.optimize(model, target=TARGET, verbose=False)


def pair(build=Net) -> tuple[nn.Module, nn.Module]:
    plain = build().to(DEVICE)
    return plain, optimized(copy.deepcopy(plain))


def x(seed: int = 1, count: int = 4) -> torch.Tensor:
    return rows(seed, count).to(DEVICE)


def step(model: nn.Module, seed: int = 1, count: int = 4) -> torch.Tensor:
    loss = uneven(model(x(seed, count)))
    loss.backward()
    return loss.detach()


def check_served(model: nn.Module, engine: bool = True, because: str | None = None) -> None:
    calls, reasons = tally(model)
    summary = deepwell.summary(model)
    assert (calls > 0) == engine, f"{calls} calls of the engine, {dict(reasons)}\n{summary}"
    if because is None:
        assert not reasons, f"{dict(reasons)}\n{summary}"
    else:
        assert any(because in reason for reason in reasons), f"{dict(reasons)}\n{summary}"


# ---- what the engine serves alone: each function is used on a plain model and on an optimized one ---------------


def accumulation_clipping_and_adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    norms = []
    for seed in (1, 3, 5):
        optimizer.zero_grad()
        step(model, seed)
        step(model, seed + 1, 6)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return norms


def sizes_that_change(model):
    return [step(model, n, n) for n in (4, 1, 7, 2, 4, 1, 30)]


def two_forwards_before_a_backward(model):
    first, second = model(x(1, 4)), model(x(2, 7))
    (uneven(first) + uneven(second)).backward()
    return first.detach(), second.detach()


def two_backwards_of_a_forward(model):
    y = uneven(model(x()))
    y.backward(retain_graph=True)
    y.backward()


def gradients_of_some(model):
    given = x().requires_grad_()
    y = uneven(model(given))
    return [*torch.autograd.grad(y, [model.first.weight, given])]


def a_gradient_penalty(model):
    given = x().requires_grad_()
    (slope,) = torch.autograd.grad(uneven(model(given)), given, create_graph=True)
    slope.square().sum().backward()


def inference_and_training(model):
    results = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            results.append(model(x(2)).clone().detach())
        results.append(step(model))
    return results


def training_and_evaluation(model):
    results = []
    for training in (True, False, True):
        model.train(training)
        results.append(step(model))
    return results


def hooks_on_the_model(model):
    seen = []
    model.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    model.register_forward_hook(lambda m, args, y: y + 1)
    model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    step(model)
    return seen


def hooks_on_tensors(model):
    seen = []
    model.first.weight.register_hook(lambda g: 3 * g)
    model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y = model(x())
    y.register_hook(lambda g: 2 * g)
    uneven(y).backward()
    return seen


def an_optimizer_in_backward(model):
    def update(parameter):
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return [step(model, seed) for seed in (1, 2)]


def a_reentrant_checkpoint(model):
    given = x().requires_grad_()
    uneven(checkpoint(model, given, use_reentrant=True)).backward()
    return given.grad


def frozen_parts(model):
    step(model)
    model.first.requires_grad_(False)
    step(model, 2)
    model.first.requires_grad_(True)
    step(model, 3)


def parameters_exchanged(model):
    with torch.no_grad():
        model.first.weight.mul_(0.5)
    results = [step(model)]
    model.first.weight.data = model.first.weight.data * 2
    results.append(step(model))
    draw = torch.Generator().manual_seed(9)
    model.second.weight = nn.Parameter(torch.randn(8, 16, generator=draw).to(DEVICE))
    return [*results, step(model)]


def states_loaded(model):
    state = {k: 1.5 * v for k, v in model.state_dict().items()}
    results = [step(model)]
    model.load_state_dict(state)
    results.append(step(model))
    model.load_state_dict({k: v + 0.1 for k, v in state.items()}, assign=True)
    return [*results, step(model)]


def autocast_on_and_off(model):
    with torch.autocast(KIND, torch.bfloat16):
        y = model(x())
    uneven(y.float()).backward()
    return y.detach().float(), step(model, 2)


def streams(model):
    """Forward and backward on a stream, then forward on one and backward from another."""
    if KIND == "cpu":
        return None
    sides = torch.cuda.Stream(), torch.cuda.Stream()
    here = torch.cuda.current_stream()
    results = []
    for forward, backward in ((sides[0], sides[0]), (sides[0], sides[1]), (here, sides[1])):
        forward.wait_stream(here)
        with torch.cuda.stream(forward):
            loss = uneven(model(x(3)))
        backward.wait_stream(forward)
        with torch.cuda.stream(backward):
            loss.backward()
        here.wait_stream(forward)
        here.wait_stream(backward)
        results.append(loss.detach())
        torch.cuda.synchronize()
    return results


def compiled(model):
    run = torch.compile(model, backend="eager")
    loss = uneven(run(x()))
    loss.backward()
    return loss.detach()


def profiled_and_checked(model):
    with torch.profiler.profile(), torch.autograd.set_detect_anomaly(True):
        return step(model)


def an_average_of_weights(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (1, 2):
        optimizer.zero_grad()
        step(model, seed)
        optimizer.step()
        average.update_parameters(model)
    with torch.no_grad():
        return average(x(4))


@pytest.mark.parametrize(
    "use, unit",
    [
        (accumulation_clipping_and_adamw, 0.0), (sizes_that_change, 0.0),
        (two_forwards_before_a_backward, 0.0), (two_backwards_of_a_forward, 0.0),
        (gradients_of_some, 0.0), (a_gradient_penalty, 0.0), (inference_and_training, 0.0),
        (training_and_evaluation, 0.0), (hooks_on_the_model, 0.0), (hooks_on_tensors, 0.0),
        (an_optimizer_in_backward, 0.0), (a_reentrant_checkpoint, 0.0), (frozen_parts, 0.0),
        (parameters_exchanged, 0.0), (states_loaded, 0.0), (autocast_on_and_off, BF16_UNIT),
        (compiled, 0.0), (profiled_and_checked, 0.0), (an_average_of_weights, 0.0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_served_by_the_engine(use, unit) -> None:
    plain, ours = pair()
    same(plain, ours, use, unit)
    check_served(ours)


@pytest.mark.skipif(not hopper, reason="needs streams")
def test_streams() -> None:
    plain, ours = pair()
    same(plain, ours, streams)
    check_served(ours)


# ---- what PyTorch runs in part or whole ------------------------------------------------------------------


def a_checkpoint_without_reentry(model):
    given = x().requires_grad_()
    uneven(checkpoint(model, given, use_reentrant=False)).backward()
    return given.grad, step(model)


def tensors_saved_on_the_cpu(model):
    with torch.autograd.graph.save_on_cpu():
        return step(model)


def a_hook_inside(model):
    handle = model.first.register_forward_hook(lambda m, args, y: 2 * y)
    results = [step(model)]
    handle.remove()
    return [*results, step(model)]


def moved(model):
    results = [step(model)]
    model.double()
    results.append(uneven(model(x().double())).detach())
    model.float()
    model.zero_grad()
    results.append(step(model))
    if KIND == "cuda":
        model.cpu()
        model.zero_grad()
        uneven(model(rows(1))).backward()
        model.to(DEVICE)
        model.zero_grad()
        results.append(step(model))
    return results


@pytest.mark.parametrize(
    "use, engine, because",
    [
        (a_checkpoint_without_reentry, True, "hooks on saved tensors"),
        (tensors_saved_on_the_cpu, False, "hooks on saved tensors"),
        (a_hook_inside, True, "hooks are registered on 'first'"),
        (moved, True, "float64"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_served_in_part(use, engine, because) -> None:
    plain, ours = pair()
    same(plain, ours, use)
    check_served(ours, engine, because)


@pytest.mark.skipif(not hopper, reason="needs two devices")
def test_the_engine_follows_a_model_that_is_moved() -> None:
    """Optimized on the CPU and trained on the GPU, as with a Trainer, and back."""
    plain = Net()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)

    def use(model):
        results = []
        for device in ("cpu", DEVICE, "cpu", DEVICE):
            model.to(device)
            model.zero_grad()
            loss = uneven(model(rows(1).to(device)))
            loss.backward()
            results.append(loss.detach().cpu())
        return results

    same(plain, ours, use)
    check_served(ours)
    assert torch.cuda.get_device_name(0) in deepwell.summary(ours)


# ---- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_copies(how, when) -> None:
    plain, ours = pair()
    if when == "after it":
        step(ours)
        ours.zero_grad()
    if how == "deepcopy":
        other = copy.deepcopy(ours)
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    del ours
    gc.collect()
    same(plain, other, lambda model: [step(model, seed) for seed in (1, 2)])
    check_served(other)


# ---- adapters, sixteen bits, padding ---------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with an adapter of rank 2, as PEFT makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(6)
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=draw).to(base.weight))
        self.b = nn.Parameter(torch.randn(base.out_features, 2, generator=draw).to(base.weight))

    def forward(self, given):
        return self.base(given) + given @ self.a.T @ self.b.T


def test_adapters_added_after_optimize() -> None:
    def use(model):
        results = [step(model)]
        model.requires_grad_(False)
        model.first, model.second = Adapted(model.first), Adapted(model.second)
        model.zero_grad()
        return [*results, step(model), step(model, 2)]

    plain, ours = pair()
    same(plain, ours, use)
    check_served(ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_models_of_sixteen_bits(dtype) -> None:
    def use(model):
        y = model(x().to(dtype))
        uneven(y.float()).backward()
        return y.detach()

    plain, ours = pair(lambda: Net().to(dtype))
    same(plain, ours, use, BF16_UNIT if dtype == torch.bfloat16 else F16_UNIT)
    check_served(ours)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "float32"])
def test_grad_scaler(autocast) -> None:
    """Training in F16 with unscale_ and clipping; the second step overflows and is skipped."""

    def use(model):
        scaler = torch.amp.GradScaler(KIND, init_scale=256.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scales = []
        for seed in (1, 2, 3):
            optimizer.zero_grad()
            with torch.autocast(KIND, torch.float16, enabled=autocast):
                y = model(x(seed))
            loss = uneven(y.float()) * (float("inf") if seed == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    plain, ours = pair()
    same(plain, ours, use, 3 * F16_UNIT if autocast else 1e-6)  # over two steps
    check_served(ours)


def test_lengths_and_padding_of_a_language_model() -> None:
    def use(model):
        results = []
        for length in (9, 13, 9, 5):
            ids = torch.randint(0, 96, (2, length), generator=torch.Generator().manual_seed(length))
            mask = torch.ones_like(ids)
            mask[1, length - 3 :] = 0
            labels = ids.masked_fill(mask == 0, -100)
            given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            output = model(**{k: v.to(DEVICE) for k, v in given.items()})
            output.loss.backward()
            results += [output.loss.detach(), output.logits.detach()[mask.bool().to(DEVICE)]]
        return results

    plain, ours = pair(gpt2)
    same(plain, ours, use)
    check_served(ours)


# ---- several models, threads, memory ---------------------------------------------------------------------


def in_threads(*functions) -> None:
    failed: list[BaseException] = []

    def run(function):
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_threads_with_models_of_their_own() -> None:
    """Each on a stream of its own."""
    pairs = [pair() for _ in range(3)]

    def train(plain, ours):
        stream = torch.cuda.Stream() if hopper else None
        with torch.cuda.stream(stream):
            for model in (plain, ours):
                for seed in range(4):
                    step(model, seed)
            if stream is not None:
                stream.synchronize()

    torch.cuda.synchronize() if hopper else None
    in_threads(*[lambda p=p: train(*p) for p in pairs])
    for plain, ours in pairs:
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            close(a.grad, b.grad)
        check_served(ours)


def test_threads_share_a_model() -> None:
    plain, ours = pair()
    found: dict[int, torch.Tensor] = {}

    def infer(count):
        for _ in range(3):
            with torch.no_grad():
                found[count] = ours(x(count, count))

    in_threads(*[lambda count=count: infer(count) for count in (1, 2, 3, 5)])
    for count, value in found.items():
        close(value, plain(x(count, count)).detach(), f"{count} rows")
    check_served(ours)


def test_one_model_inside_of_another() -> None:
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Net(), nn.Linear(8, 8)

        def forward(self, given):
            return self.last(torch.relu(self.inner(given)))

    plain = Outer().to(DEVICE)
    ours = copy.deepcopy(plain)
    optimized(ours.inner)
    optimized(ours)
    same(plain, ours, lambda model: [step(model), uneven(model.inner(x(2))).detach()])
    assert engine_calls(ours)[0] > 0, deepwell.summary(ours)


@pytest.mark.skipif(not hopper, reason="counts PyTorch's memory of a GPU")
def test_steps_and_dropped_models_leave_nothing() -> None:
    def use():
        _, ours = pair()
        for seed in range(20):
            y = ours(x(seed))
            if seed % 3:
                uneven(y).backward()
            ours.zero_grad()
        check_served(ours)

    use()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        use()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 16)


# ---- the comparison with PyTorch -------------------------------------------------------------------------


@pytest.mark.skipif(not hopper, reason="the emulator is not compared")
def test_the_comparison_changes_nothing(monkeypatch) -> None:
    """With measuring on, gradients, values and memory are as without; the summary has a figure or a verdict."""
    monkeypatch.delenv("DEEPWELL_MEASURE")

    def build():
        return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    plain, ours = pair(build)
    given = torch.randn(4096, 512, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def use(model):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        loss = model(given).square().mean()
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        return loss.detach()

    peaks: list[int] = []
    same(plain, ours, use)
    summary = deepwell.summary(ours)
    assert "forward + backward" in summary, summary
    # PyTorch's step and a step of the engine are never in memory together.
    assert peaks[1] < 3 * peaks[0], (peaks, summary)


# ---- several GPUs ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not (hopper and torch.cuda.device_count() > 1), reason="needs two Hopper GPUs")
def test_a_model_on_another_gpu_than_the_current_one() -> None:
    """In the main thread, in a thread that has used no GPU, with a plan made in backward, and with both in turn."""
    assert torch.cuda.current_device() == 0
    plain = Net().to("cuda:1")
    ours = optimized(copy.deepcopy(plain))
    other_plain, other = pair()

    def train():
        for seed, count in ((1, 4), (2, 6)):
            for model in (plain, ours):
                uneven(model(rows(seed, count).to("cuda:1"))).backward()
            for model in (other_plain, other):
                step(model, seed, count)
        assert torch.cuda.current_device() == 0

    train()
    in_threads(train)
    for a, b in ((ours, plain), (other, other_plain)):
        for mine, right in zip(a.parameters(), b.parameters(), strict=True):
            close(mine.grad, right.grad)
        check_served(a)


# ---- groups of processes ---------------------------------------------------------------------------------


def worlds() -> list[int]:
    return [1, *([2] if torch.cuda.device_count() > 1 else [])] if hopper else [2]


@pytest.mark.parametrize("world", worlds())
def test_groups_of_processes(world) -> None:
    """DistributedDataParallel, FSDP2 and tensor parallelism, with NCCL and a GPU for each process."""
    failed = failures(world, KIND, TARGET)
    assert not failed, told(failed)
