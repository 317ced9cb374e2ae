"""The comparison with PyTorch: its measurements, its conclusions from noisy times, and its side
effects."""

import copy
import io
import json
import random
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import deepwell
import pytest
import torch
from deepwell import comparison
from deepwell.comparison import Timing, bounds, compare, magnitude, smaller_sizes
from deepwell.guards import ModuleState
from deepwell.optimize import OptimizedForward
from deepwell.targets import Target
from torch import nn
from users import engine_calls


@pytest.fixture
def compared(monkeypatch):
    """Measures calls as it does for users."""
    monkeypatch.delenv("DEEPWELL_MEASURE", raising=False)


def block(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


def busy(seconds: float) -> None:
    """Keeps a core busy for this long, so that both clocks of a comparison count it."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


# ---- statistics --------------------------------------------------------------------------------------


def scripted(monkeypatch, original, engine, lost=lambda: False):
    """Makes comparisons whose times come from these functions instead of a clock."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(comparison, "_wall_time", lambda function: (function(), lost()))
    monkeypatch.setattr(comparison, "_thread_time", lambda function: (function(), False))
    return compare(original, engine)


def test_bounds_hold_the_median() -> None:
    """Skewed values, as timings are: the bounds contain the true median in 95% of the trials."""
    draw = random.Random(5)
    trials = 1500
    for count in (9, 25, 101):
        held = 0
        for _ in range(trials):
            low, high = bounds(draw.lognormvariate(0, 1) for _ in range(count))  # median 1
            held += low <= 1 <= high
        # The order statistics promise at least 0.93 at these counts; four standard errors below that.
        assert held / trials > 0.93 - 4 * (0.93 * 0.07 / trials) ** 0.5, count


@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.25, 2.0])
def test_a_clear_difference_is_found(monkeypatch, ratio) -> None:
    draw = random.Random(int(ratio * 100))
    found = scripted(
        monkeypatch, lambda: ratio * draw.uniform(0.99, 1.01), lambda: draw.uniform(0.99, 1.01)
    )
    assert found.certain and found.slower == (ratio < 1)
    assert found.low <= found.ratio <= found.high
    assert found.ratio == pytest.approx(ratio, rel=0.02)


def test_noise_is_not_a_difference(monkeypatch) -> None:
    draw = random.Random(2)
    found = scripted(
        monkeypatch, lambda: draw.lognormvariate(0, 1), lambda: draw.lognormvariate(0, 1)
    )
    assert not found.certain and found.low < 1 < found.high


def test_two_percent_is_equal(monkeypatch) -> None:
    found = scripted(monkeypatch, lambda: 0.98, lambda: 1.0)
    assert not found.slower


def test_disturbed_rounds_are_dropped(monkeypatch) -> None:
    """Rounds in which PyTorch's threads wait for a lost core appear a hundred times slower and are dropped."""
    draw = random.Random(3)
    state = {"lost": False}

    def original() -> float:
        state["lost"] = draw.random() < 0.3
        return 100.0 if state["lost"] else 0.8

    found = scripted(monkeypatch, original, lambda: 1.0, lambda: state["lost"])
    assert found.slower and not found.one_thread and found.high == 0.8


def test_one_thread_decides_if_all_rounds_are_disturbed(monkeypatch) -> None:
    calls = []

    def original() -> float:
        calls.append(1)
        return 100.0 if len(calls) < 5 else 0.8

    found = scripted(monkeypatch, original, lambda: 1.0, lambda: len(calls) < 5)
    assert found.one_thread and found.slower and found.high == 0.8


def test_the_number_of_threads_stays(monkeypatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(comparison, "_switches", iter(range(0, 10**9, 10**6)).__next__)
    seen = set()
    torch.set_num_threads(2)
    try:
        found = compare(lambda: seen.add(torch.get_num_threads()), lambda: None)
        assert found.one_thread and seen == {1, 2} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_one_thread_does_not_count_other_programs(monkeypatch) -> None:
    """On one thread the clock stops while the thread waits for its core, as in a sleep."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = compare(lambda: busy(0.002), lambda: (time.sleep(0.01), busy(0.001)))
    assert found.ratio > 1 and not found.slower


def test_samples_of_a_gpu_are_several_warm_calls(monkeypatch) -> None:
    """Nothing waits between the calls of a sample, and slow first calls do not count."""
    clock = types.SimpleNamespace(perf_counter=time.thread_time)  # without other programs
    monkeypatch.setattr(comparison, "time", clock)
    events: list[str] = []

    def side(name: str, first: float, later: float):
        def run() -> None:
            busy(first if events.count(name) < 3 else later)
            events.append(name)

        return run

    found = compare(
        side("theirs", 0.002, 0.002), side("ours", 0.02, 0.001), lambda: events.append("wait")
    )
    assert 1.5 < found.ratio < 2.5 and not found.slower
    assert found.engine < 0.0015
    runs = " ".join(events).split("wait")
    warm, samples = runs[1:7], [run.split() for run in runs[7:-1]]
    assert all(len(run.split()) == 1 for run in warm)
    assert all(len(set(run)) == 1 and len(run) >= 10 for run in samples), samples
    first = [run[0] for run in samples]
    assert first[:4] == ["theirs", "ours", "ours", "theirs"]


# ---- measurements
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["guards", "autograd"])
def test_timing_includes_the_wrappers_overhead(compared, monkeypatch, part) -> None:
    """The engine's time includes the checks of the module and autograd's functions."""
    from deepwell import runtime

    if part == "guards":
        unchanged = ModuleState.unchanged
        monkeypatch.setattr(ModuleState, "unchanged", lambda self: busy(0.02) or unchanged(self))
    else:
        backward = runtime._Run.backward
        slow = staticmethod(lambda ctx, *grads: busy(0.02) or backward(ctx, *grads))
        monkeypatch.setattr(runtime._Run, "backward", slow)
    model = deepwell.optimize(block(), verbose=False)
    model(torch.randn(4, 16)).sum().backward()
    assert engine_calls(model) == (0, 1), deepwell.summary(model)
    assert "left to PyTorch" in deepwell.summary(model)


def test_calls_left_to_pytorch_skip_the_checks(compared, monkeypatch) -> None:
    """Calls that PyTorch runs because it is faster skip the engine's checks; other shapes and modes do not."""
    checks = []
    unchanged = ModuleState.unchanged
    monkeypatch.setattr(comparison, "SLACK", 0.0)  # the engine is slower, whatever the clock says
    monkeypatch.setattr(ModuleState, "unchanged", lambda self: checks.append(1) or unchanged(self))
    plain = block()
    model = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(4, 16)
    model(x)
    assert engine_calls(model) == (0, 1)
    checks.clear()
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    assert not checks and engine_calls(model) == (0, 4)
    with torch.no_grad():
        model(x)
    model(torch.randn(5, 16))
    model.eval()(x)
    assert len(checks) >= 3 and engine_calls(model) == (0, 7)


def test_each_magnitude_is_compared_once(compared, monkeypatch) -> None:
    """A verdict holds for calls of about one size; others have their own."""
    seen = []
    compared_ = OptimizedForward._compared

    def spy(self, entry, copies, structure):
        seen.append(tuple(copies[0].shape))
        return compared_(self, entry, copies, structure)

    monkeypatch.setattr(OptimizedForward, "_compared", spy)
    model = deepwell.optimize(block(), verbose=False)
    for rows in (8, 9, 15, 8, 500, 300, 9):
        model(torch.randn(rows, 16))
    assert seen == [(8, 16), (500, 16)]
    with torch.no_grad():  # forward alone is a separate kind of call
        model(torch.randn(9, 16))
    assert seen[2:] == [(9, 16)]
    assert magnitude((8,)) == magnitude((15,)) != magnitude((500,))


def test_large_calls_are_compared_on_a_part(compared, monkeypatch) -> None:
    seen = []

    def spy(self, entry, copies, structure):
        seen.append([tuple(value.shape) for value in copies])
        assert all(value.is_contiguous() for value in copies)
        return compared_(self, entry, copies, structure)

    compared_ = OptimizedForward._compared
    monkeypatch.setattr(OptimizedForward, "_compared", spy)
    monkeypatch.setattr(Target, "large_call", 1 << 14)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block()

        def forward(self, x, mask):
            return (self.inner(x).transpose(1, 2) @ mask).sum()

    model = deepwell.optimize(Masked(), verbose=False)
    x = torch.randn(64, 24, 16, requires_grad=True)
    model(x, torch.randn(24, 24)).backward()
    (((batch, *others), mask),) = seen
    assert 2 <= batch <= 16 and (others, mask) == ([24, 16], (24, 24))  # the batch, not the length
    assert "a part of the call, " in deepwell.summary(model)


def test_sizes_of_a_part() -> None:
    def bytes_at(sizes):
        return sizes[0] * sizes[1] * (1 << 20) + (1 << 18)

    large = 64 << 20
    assert smaller_sizes((8, 8), [True, False], bytes_at, large) == (4, 8)
    assert smaller_sizes((2, 16), [True, False], bytes_at, large) == (2, 16)
    assert smaller_sizes((32, 256), [True, False], bytes_at, large) == (8, 256)
    assert smaller_sizes((4, 1024), [True, False], bytes_at, large) == (2, 512)  # at least 2
    assert smaller_sizes((), [], lambda sizes: 1 << 40, large) == ()


def test_arguments_that_have_no_part(compared, monkeypatch) -> None:
    """If some arguments cannot be cut into consistent parts, the whole call is compared."""
    monkeypatch.setattr(Target, "large_call", 1 << 10)

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block()

        def forward(self, x, rows):
            return self.inner(x).index_select(0, rows)

    model = deepwell.optimize(Chosen(), verbose=False)
    x, rows = torch.randn(64, 16), torch.full((8,), 63)  # the last row, which exceeds x
    expected = deepwell.optimize(copy.deepcopy(model), verbose=False)
    deepwell.restore(expected)
    torch.testing.assert_close(model(x, rows), expected(x, rows))
    assert "forward" in deepwell.summary(model) and "a part of" not in deepwell.summary(model)


# ---- side effects
# ------------------------------------------------------------------------------------


def test_comparison_has_no_side_effects(compared) -> None:
    """Gradients, their accumulation, buffers, attributes and every random state stay unchanged, whichever runs."""
    model = nn.Sequential(block(), nn.Dropout(0.3), nn.Linear(16, 3))
    x = torch.randn(6, 16, requires_grad=True)
    for tensor in (*model.parameters(), x):
        tensor.grad = torch.randn_like(tensor)
    before = [
        (tensor, tensor.grad, tensor.grad.clone(), tensor._version)
        for tensor in (*model.parameters(), x)
    ]
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    deepwell.optimize(model, verbose=False)
    python, drawn = random.getstate(), torch.get_rng_state()
    forward = model.forward
    count = forward.session.report._unit("").calls
    model(x)
    assert random.getstate() == python
    after = torch.get_rng_state()
    torch.set_rng_state(drawn)
    if engine_calls(model)[0] - count:
        torch.empty(2, dtype=torch.int64).random_()  # the engine draws one seed
    else:
        deepwell.restore(model)(x)  # PyTorch ran one forward
    assert torch.equal(after, torch.get_rng_state())
    deepwell.restore(model)
    for tensor, grad, value, version in before:
        assert tensor.grad is grad and torch.equal(grad, value) and tensor._version == version
    assert attributes == {name: set(module.__dict__) for name, module in model.named_modules()}


# ---- memory ------------------------------------------------------------------------------------------

PROCESS = """
import json, torch, deepwell, deepwell.comparison
from torch import nn

deepwell.comparison.SLACK = float("inf")  # the engine runs, whichever is faster here

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(10) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())])
saved = {}
def pack(tensor):
    if tensor.dim() == 2 and tensor.shape[0] == 128:
        saved[tensor.data_ptr()] = tensor.numel() * 4
    return tensor
with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    kept = model(torch.randn(128, 64))
del kept
deepwell.optimize(model, verbose=False)
model(torch.randn(128, 64)).sum().backward()
before = peak()
rows = 64 * 1024
x = torch.randn(rows, 64)
for _ in range(2):
    model(x).sum().backward()
((entry,),) = model.forward._states[0].entries.values()
leaves, sizes = entry.bind_call([x])
unit = model.forward.session.report._units[""]
print(json.dumps({
    "pytorch": sum(saved.values()) * rows // 128,
    "ours": entry.program.call_bytes(leaves, sizes),
    "grown": peak() - before,
    "engine": unit.calls,
    "compared": list(unit.timings),
}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_comparison_does_not_hold_pytorchs_activations() -> None:
    """The whole process grows by less than what PyTorch's autograd saves, first comparison included.

    PyTorch holds a quarter of its activations while a quarter of the call is compared (a third is the goal, and sizes are
    halved), and what its backward makes on the way, less than as much again. The engine holds its arena and outputs, and x and the output's gradient lie beside it.
    """
    command = [sys.executable, "-c", PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    x_and_gradient = 2 * 64 * 1024 * 64 * 4
    allowed = max(found["pytorch"] / 2, found["ours"]) + x_and_gradient + (32 << 20)
    assert found["grown"] < allowed, found
    assert allowed < 0.9 * found["pytorch"], found  # otherwise the test would show nothing
    assert any("a part of the call" in what for what in found["compared"]), found


def test_figures_of_the_summary(compared) -> None:
    """The summary shows a figure where the difference is larger than the noise, and none elsewhere."""
    model = deepwell.optimize(block(), verbose=False)
    model(torch.randn(8, 16)).sum().backward()
    timings = model.forward.session.report._units[""].timings
    (what, timing), *_ = timings.items()
    assert timing.low <= timing.ratio <= timing.high
    clear = dict(engine=1e-3, rounds=9, one_thread=False)
    for ratio, low, high, told in (
        (1.5, 1.4, 1.6, "1.50 ms in PyTorch, 1.00 ms here: 1.50x"),
        (1.1, 0.9, 1.3, "no difference above the noise of 9 rounds: the engine runs"),
        (0.5, 0.4, 0.6, "0.50 ms in PyTorch, 1.00 ms here: left to PyTorch"),
        (0.9, 0.7, 1.1, "no difference above the noise of 9 rounds: left to PyTorch"),
    ):
        timings[what] = Timing(original=ratio * 1e-3, ratio=ratio, low=low, high=high, **clear)
        assert f"{what}: {told}" in deepwell.summary(model)


# ---- output
# ------------------------------------------------------------------------------------------


def test_header_is_printed_once(compared, capsys) -> None:
    model = deepwell.optimize(block())
    model(torch.randn(8, 16))
    model(torch.randn(8, 16))
    printed = capsys.readouterr().out
    assert printed.count("Deepwell Optimizer") == 1 and printed.count("Optimization Summary") == 1
    assert "Capturing" not in printed  # for terminals only
    assert "Deepwell Optimizer" in deepwell.summary(model)


def test_header_where_nothing_is_optimized(capsys) -> None:
    deepwell.optimize(block().double())
    printed = capsys.readouterr().out
    assert printed.count("Deepwell Optimizer") == 1 and "left alone" in printed


@pytest.mark.parametrize("fails", [False, True])
def test_terminal_shows_progress(monkeypatch, fails) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Untraceable(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    model = deepwell.optimize(Untraceable() if fails else block())
    model(torch.randn(8, 16))
    name = "Untraceable" if fails else "Sequential"
    assert (
        len(re.findall(rf"^  Capturing {name} \.\.\. \d+\.\d s$", sys.stdout.getvalue(), re.M)) == 1
    )
