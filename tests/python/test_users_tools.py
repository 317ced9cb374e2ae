"""PyTorch's tools around an optimized model: compilers, exporters, profilers; threads, processes, memory."""

import copy
import dataclasses
import gc
import multiprocessing
import os
import sys
import threading
import types
import weakref

import deepwell
import pytest
import torch
from deepwell.guards import Effects
from deepwell.optimize import OptimizedForward
from torch import nn
from torch.utils.data import DataLoader
from users import Net, close, optimized, pair, rows, same, tally, train_step, uneven


@pytest.mark.support("Compilers", "torch.compile(model) after optimize", "engine")
def test_compile_after(support) -> None:
    plain, ours = pair()
    compiled = torch.compile(ours, backend="eager")
    same(plain, ours, lambda m: train_step(compiled if m is ours else m))
    ours.compile(backend="eager")
    same(plain, ours, train_step)
    support.check(ours)


class Graphs:
    """A backend of torch.compile that counts the calls of its graphs."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph, inputs):
        def run(*arguments):
            self.calls += 1
            return graph(*arguments)

        return run


class Prints(Net):
    """PyTorch runs its forward, and ``hidden`` has a graph of torch.compile's."""

    def forward(self, x):
        print("called", file=sys.stderr)
        return super().forward(x)


@pytest.mark.support(
    "Compilers",
    "torch.compile(model) where the engine does not run it: compiled",
    "PyTorch",
    "in its forward",
)
def test_compile_what_the_engine_leaves(support) -> None:
    plain, ours = pair(Prints)
    graphs = Graphs()
    compiled = torch.compile(ours, backend=graphs)
    same(plain, ours, lambda m: [train_step(compiled if m is ours else m, seed) for seed in (1, 2)])
    assert graphs.calls >= 2
    support.check(ours)


def test_the_engine_is_compared_with_torch_compile(monkeypatch) -> None:
    """Under torch.compile it must not be slower than the compiled forward, which runs otherwise."""
    monkeypatch.delenv("DEEPWELL_MEASURE", raising=False)
    compared = OptimizedForward._compared
    ran: list[int] = []

    def slower(self, *arguments):
        before = graphs.calls
        timing = compared(self, *arguments)
        ran.append(graphs.calls - before)
        return dataclasses.replace(timing, ratio=0.5, low=0.5, high=0.5)

    monkeypatch.setattr(OptimizedForward, "_compared", slower)
    graphs = Graphs()
    plain, ours = pair()
    compiled = torch.compile(ours, backend=graphs)
    same(plain, ours, lambda m: [train_step(compiled if m is ours else m, seed) for seed in (1, 2)])
    assert len(ran) == 1 and ran[0] > 3
    assert graphs.calls == ran[0] + 2
    train_step(ours)  # without torch.compile it is another comparison
    assert len(ran) == 2 and ran[1] == 0
    assert "forward + backward (torch.compile)" in deepwell.summary(ours)


@pytest.mark.support("Compilers", "optimize(torch.compile(model))", "engine")
def test_compile_before(support) -> None:
    plain = Net()
    inner = copy.deepcopy(plain)
    ours = deepwell.optimize(torch.compile(inner, backend="eager"), verbose=False)
    same(plain, inner, lambda m: train_step(ours if m is inner else m))
    support.check(ours)
    deepwell.restore(ours)
    assert "forward" not in inner.__dict__


@pytest.mark.support(
    "Compilers",
    "torch.compile(model, fullgraph=True): PyTorch has no graph to make, and says so",
    "refused",
    "fullgraph=True found no compiled frames",
)
def test_fullgraph_of_the_model(support) -> None:
    compiled = torch.compile(optimized(Net()), backend="eager", fullgraph=True)
    try:
        compiled(rows())
    except RuntimeError:
        pass
    else:
        pytest.skip("this PyTorch takes a model without compiled frames")
    with support.refused(RuntimeError):
        compiled(rows())


@pytest.mark.support(
    "Compilers",
    "torch.compile(fullgraph=True) of code that calls it",
    "refused",
    "an engine of Deepwell runs this forward",
)
def test_fullgraph(support) -> None:
    ours = optimized(Net())

    def step(x):
        return ours(x) * 2

    with support.refused(Exception):
        torch.compile(step, backend="eager", fullgraph=True)(rows())


@pytest.mark.support(
    "Compilers",
    "torch.jit.trace, torch.export, torch.fx",
    "engine and PyTorch",
    "traced by torch.jit",
)
def test_exporters(support) -> None:
    plain, ours = pair()
    x = rows()
    traced = torch.jit.trace(ours, x)
    exported = torch.export.export(ours, (x,)).module()
    symbolic = torch.fx.symbolic_trace(ours)
    for found in (traced, exported, symbolic):
        close(found(rows(2)).detach(), plain(rows(2)).detach())
    support.check(ours)


@pytest.mark.support(
    "Compilers", "torch.jit.script", "refused", "call deepwell.restore(model) first"
)
def test_script(support) -> None:
    with support.refused(deepwell.UnsupportedError):
        torch.jit.script(optimized(Net()))


@pytest.mark.support("Tools", "torch.profiler, anomaly mode, deterministic algorithms", "engine")
def test_tools(support) -> None:
    def use(model):
        results = []
        with torch.profiler.profile() as profile:
            results.append(train_step(model))
        assert len(profile.events()) > 0
        with torch.autograd.detect_anomaly(check_nan=True):
            results.append(train_step(model, 2))
        torch.use_deterministic_algorithms(True)
        try:
            results.append(train_step(model, 3))
        finally:
            torch.use_deterministic_algorithms(False)
        return results

    plain, ours = pair()
    with pytest.warns(UserWarning, match="Anomaly"):
        same(plain, ours, use)
    support.check(ours)


# ---- threads and processes ---------------------------------------------------------------------------


def in_threads(work, count: int) -> None:
    errors = []

    def guarded(index):
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def train(model: nn.Module, steps: int) -> torch.Tensor:
    optimizer = deepwell.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for seed in range(steps):
        optimizer.zero_grad()
        loss = train_step(model, seed)
        optimizer.step()
    return loss


@pytest.mark.support(
    "Threads and processes", "four threads train four models, captures included", "engine"
)
def test_threads_with_models_of_their_own(support) -> None:
    built = [nn.Sequential(Net(), nn.Tanh(), Net()) for _ in range(4)]
    models = [optimized(model) for model in built]
    found = {}

    def work(index):
        # this thread's number: plans for several numbers of threads exist at once
        torch.set_num_threads(1 + index % 3)
        found[index] = train(models[index], 6)

    before = torch.get_num_threads()
    in_threads(work, 4)
    torch.set_num_threads(before)
    for index, plain in enumerate(built):
        close(found[index], train(plain, 6))
        for a, b in zip(models[index].parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    support.check(*models)


@pytest.mark.support(
    "Threads and processes", "four threads share one model, with batches of 1 to 5", "engine"
)
def test_threads_share_a_model(support) -> None:
    plain, ours = pair()

    def work(index):
        for seed in range(5):
            with torch.no_grad():
                close(ours(rows(10 * index + seed)), plain(rows(10 * index + seed)))
        for count in range(
            1, 6
        ):  # each thread starts with another size, so that calls run during captures
            x = rows(index, (count + index) % 5 + 1)
            weights = torch.autograd.grad(uneven(ours(x)), list(ours.parameters()))
            expected = torch.autograd.grad(uneven(plain(x)), list(plain.parameters()))
            for a, b in zip(weights, expected):
                close(a, b)

    in_threads(work, 4)
    support.check(ours)


def test_a_capture_leaves_other_threads_alone(capfd, monkeypatch) -> None:
    """Another thread runs, reads and saves the same model while fake tensors are in place; it is
    unaffected."""
    plain, ours = pair(lambda: nn.Sequential(Net(), nn.Tanh(), Net()))
    ours.register_forward_hook(lambda *_: None)
    expected = plain(rows(2))
    mine = {name: id(tensor) for name, tensor in ours.named_parameters()}
    found = []

    def elsewhere(_index):
        found.append(plain(rows(2)))
        assert {name: id(tensor) for name, tensor in ours.named_parameters()} == mine
        for name, tensor in ours.state_dict().items():
            assert type(tensor) is torch.Tensor and torch.equal(tensor, plain.state_dict()[name])
        assert len(ours._forward_hooks) == 1 and "forward" not in ours[0].__dict__
        close(ours[0](rows(3)), plain[0](rows(3)))
        weights = list(ours[2].parameters())
        for gradient in torch.autograd.grad(uneven(ours[2](rows(4))), weights):
            assert gradient.abs().max() > 0
        print("from elsewhere", file=sys.stderr)

    look = Effects.look

    def interrupted(effects):
        in_threads(elsewhere, 1)
        look(effects)

    monkeypatch.setattr(Effects, "look", interrupted)
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    close(ours(rows(2)), expected)
    assert found, "nothing was traced"
    assert tally(ours)[0] == 1
    for output in found:
        assert type(output) is torch.Tensor
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert capfd.readouterr().err.count("from elsewhere") == len(found)


class Finds(Net):
    """A forward that calls itself in ways that a stand-in does not support."""

    def __init__(self):
        super().__init__()
        self.ways = types.SimpleNamespace(first=self.first, weight=self.norm.weight)

    def forward(self, x):
        return self.norm(self.second(torch.tanh(self.ways.first(x)))) + self.extra()

    def extra(self):
        return 0.0


class FindsWeight(Finds):
    def extra(self):
        return self.ways.weight


@pytest.mark.support(
    "Threads and processes", "a module that is found through objects of the user's", "engine"
)
def test_stray_module(support) -> None:
    plain, ours = pair(Finds)
    same(plain, ours, train_step)
    support.check(ours)


@pytest.mark.support(
    "Threads and processes", "a parameter that is found through objects of the user's", "engine"
)
def test_stray_parameter(support) -> None:
    plain, ours = pair(FindsWeight)
    same(plain, ours, train_step)
    support.check(ours)


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return rows(index, 1)[0]


@pytest.mark.support("Threads and processes", "DataLoader workers forked after optimize", "engine")
def test_data_loader(support) -> None:
    def use(model):
        train_step(model)
        loader = DataLoader(Numbered(), batch_size=3, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            uneven(model(batch)).backward()

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


def _child(model, expected, queue):
    try:
        with torch.no_grad():
            close(model(rows(3)), expected)
        train_step(model)
        queue.put("well")
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.support(
    "Threads and processes", "the model used in a forked child, and in the parent after", "engine"
)
def test_fork(support) -> None:
    plain, ours = pair()
    same(plain, ours, train_step)
    with torch.no_grad():
        expected = plain(rows(3))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_child, args=(ours, expected, queue)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(timeout=120) for _ in children] == ["well", "well"]
    for child in children:
        child.join(timeout=60)
    same(plain, ours, train_step)
    support.check(ours)


# ---- memory ------------------------------------------------------------------------------------------


@pytest.mark.support("Memory", "a model is freed with its last reference", "engine")
def test_freed(support) -> None:
    ours = optimized(Net())
    train_step(ours)
    support.check(ours)
    gc.collect()
    gc.disable()
    try:
        model, weight = weakref.ref(ours), weakref.ref(ours.first.weight)
        forward = weakref.ref(ours.forward)
        del ours
        assert model() is None and weight() is None and forward() is None
    finally:
        gc.enable()


def test_a_forward_without_its_model_says_so() -> None:
    forward = optimized(Net()).forward
    gc.collect()
    with pytest.raises(RuntimeError, match="keep the model"):
        forward(rows())


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow_emulated
@pytest.mark.support(
    "Memory", "hundreds of steps, some without a backward, leave nothing", "engine"
)
def test_steps_leak_nothing(support) -> None:
    """A step's output alone is 64 kB, and its arena more: leaking one per step would add 20 MB and
    more."""
    ours = optimized(Net())

    def steps(count):
        for step in range(count):
            loss = uneven(ours(rows(1, 2048)))
            if step % 3:
                loss.backward(retain_graph=step % 2 == 0)
            ours.zero_grad()

    steps(30)
    gc.collect()
    before = resident()
    steps(300)
    gc.collect()
    assert resident() - before < 16 << 20
    support.check(ours)


@pytest.mark.slow_emulated
@pytest.mark.support(
    "Memory",
    "models made, trained and dropped in turn leave no parameters, gradients or arenas",
    "engine",
)
def test_dropped_models_leave_no_tensors(support) -> None:
    """torch.export keeps a record of each capture (docs/optimize.md), which is far smaller than the bound."""

    def one():
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024))
        deepwell.optimize(model, verbose=False)
        model(torch.randn(64, 1024)).sum().backward()
        return model  # 8 MB of parameters, and as much of gradients

    last = one()
    one()
    gc.collect()
    before = resident()
    for _ in range(4):
        one()
    assert resident() - before < 24 << 20
    support.check(last)
