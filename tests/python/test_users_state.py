"""State that a forward reads and writes besides its arguments: the engine follows it or leaves the
call to PyTorch."""

import collections
import functools
import os
import sys
import time
import types

import deepwell
import numpy
import pytest
import torch
import transformers
from users import Net, close, optimized, pair, rows, same, train_step

# What a forward reads is watched in the same way for every target.
pytestmark = pytest.mark.slow_emulated

# ---- reading
# -----------------------------------------------------------------------------------------

FACTORS = {"scale": [1.0, 2.0]}
TENSOR = torch.tensor(1.0)


class Settings:
    scale = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Inner:
    def __init__(self):
        self.deep = Slotted(1.0)


SETTINGS = Inner()


def helper():
    return deeper() * TENSOR


def deeper(default=[1.0]):  # noqa: B006
    return default[0] * SETTINGS.deep.scale * Settings.scale * FACTORS["scale"][0]


def closed_over():
    factor = 1.0

    def get():
        return factor

    def put(value):
        nonlocal factor
        factor = value

    return get, put


GET, PUT = closed_over()


class Plain:
    def __init__(self):
        self.k = 1.0


class Chained(Plain):
    pass


class Reads(Net):
    def __init__(self):
        super().__init__()
        self.cfg, self.slotted, self.queue = Plain(), Slotted(1.0), collections.deque([1.0, 2.0])
        self.chain = Chained()
        self.chosen, self.numbers = {1.0}, numpy.ones(2, dtype=numpy.float32)

    def forward(self, x):
        late = 3.0 if hasattr(self.chain, "late") else 1.0
        own = (
            late
            * self.cfg.k
            * self.slotted.scale
            * self.queue[0]
            * float(self.numbers[0])
            * max(self.chosen)
        )
        return super().forward(x) * (own * helper() * GET())


def put_global_list(model):
    FACTORS["scale"][0] = 3.0


def put_global_dict(model):
    FACTORS["scale"] = [3.0]


def put_global_tensor(model):
    global TENSOR
    TENSOR = torch.tensor(3.0)


def fill_global_tensor(model):
    TENSOR.fill_(3.0)


def put_data_of_global_tensor(model):
    TENSOR.data = torch.tensor(3.0)


def fill_data_of_global_tensor(model):
    TENSOR.data.fill_(3.0)


def put_global_object(model):
    SETTINGS.deep.scale = 3.0


def put_class(model):
    Settings.scale = 3.0


def put_default(model):
    deeper.__defaults__[0][0] = 3.0


def put_closure(model):
    PUT(3.0)


def put_plain_object(model):
    model.cfg.k = 3.0


def put_new_attribute(model):
    model.chain.late = True


def put_slot(model):
    model.slotted.scale = 3.0


def put_deque(model):
    model.queue[0] = 3.0


def put_set(model):
    model.chosen.add(3.0)


def put_array(model):
    model.numbers[0] = 3.0


def put_function(model):
    global deeper
    deeper = lambda: 3.0  # noqa: E731


def put_code(model):
    """Replaces code as IPython's autoreload does."""
    deeper.__code__ = (lambda default=None: 3.0).__code__


CHANGES = [
    put_global_list, put_global_dict, put_global_tensor, fill_global_tensor, put_data_of_global_tensor,
    fill_data_of_global_tensor, put_global_object, put_class, put_default, put_closure, put_plain_object, put_new_attribute, put_slot,
    put_deque, put_set, put_array, put_function, put_code,
]  # fmt: skip


@pytest.fixture
def as_it_was(monkeypatch):
    monkeypatch.setitem(globals(), "FACTORS", {"scale": [1.0, 2.0]})
    monkeypatch.setitem(globals(), "TENSOR", torch.tensor(1.0))
    monkeypatch.setitem(globals(), "SETTINGS", Inner())
    monkeypatch.setitem(globals(), "deeper", deeper)
    monkeypatch.setattr(deeper, "__code__", deeper.__code__)
    monkeypatch.setattr(deeper, "__defaults__", ([1.0],))
    monkeypatch.setattr(Settings, "scale", 1.0)
    PUT(1.0)


@pytest.mark.support(
    "Modules",
    "globals, closures, defaults, classes, plain objects, slots, deques, sets and arrays that helpers read, changed",
    "engine",
)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_helpers_and_modules_that_a_forward_reads(change, support, as_it_was) -> None:
    plain, ours = pair(Reads)
    before = ours(rows())
    close(before, plain(rows()))
    change(plain)
    if change.__code__.co_names and "model" in change.__code__.co_varnames and uses_model(change):
        change(ours)
    close(ours(rows()), plain(rows()))
    assert not torch.allclose(before, plain(rows()), rtol=0.01)
    support.check(ours)


def uses_model(change) -> bool:
    return change.__name__ in (
        "put_plain_object",
        "put_new_attribute",
        "put_slot",
        "put_deque",
        "put_set",
        "put_array",
    )


def test_a_package_s_forward_is_replaced() -> None:
    """Replaces a function as users do with the attention of transformers."""
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    plain = transformers.GPT2LMHeadModel(config).eval()
    ours = optimized(plain)
    tokens = torch.tensor([[1, 2, 3, 4]])
    kind = type(plain.transformer.h[0].mlp)
    before = ours(input_ids=tokens, use_cache=False).logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, x: 2 * self.c_proj(x.repeat(1, 1, 4)))
        found = ours(input_ids=tokens, use_cache=False).logits
        close(found, plain(input_ids=tokens, use_cache=False).logits)
        assert not torch.allclose(found, before, rtol=1e-2)
    close(ours(input_ids=tokens, use_cache=False).logits, before)


# ---- queried while it is traced
# ----------------------------------------------------------------------


class AsksGradMode(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if torch.is_grad_enabled() else 3.0)


@pytest.mark.support("Modules", "torch.is_grad_enabled() in forward", "engine")
def test_grad_mode(support) -> None:
    plain, ours = pair(AsksGradMode)
    for _ in range(2):
        same(plain, ours, train_step)
        with torch.no_grad():
            close(ours(rows()), plain(rows()))
    support.check(ours)


class AsksContiguous(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.is_contiguous() else 3.0)


class AsksStride(Net):
    def forward(self, x):
        return super().forward(x) * float(x.stride(0)) + x.storage_offset()


@pytest.mark.support(
    "Modules",
    "strides and offsets that forward asks for: not as in the first call",
    "engine and PyTorch",
    "strides",
)
@pytest.mark.parametrize("build", [AsksContiguous, AsksStride])
def test_layout(build, support) -> None:
    plain, ours = pair(build)
    for x in (rows(), rows(2, 8).t().contiguous().t(), rows(3, 5)[1:], rows()):
        close(ours(x), plain(x))
    support.check(ours)


class AsksIdentity(Net):
    def forward(self, x, y):
        return super().forward(x) + (3.0 * y if x is y else y)


@pytest.mark.support(
    "Modules", "two arguments that are one tensor, and a forward that asks", "engine"
)
def test_identity_of_arguments(support) -> None:
    plain, ours = pair(AsksIdentity)

    def use(model):
        x, y = rows().requires_grad_(), rows(2).requires_grad_()
        results = []
        for arguments in ((x, y), (x, x), (y, y), (y, x)):
            results.append(model(*arguments))
            results[-1].sin().sum().backward()
        return *results, x.grad, y.grad

    same(plain, ours, use)
    assert ours.forward.session.report._units[""].captures == 2
    support.check(ours)


class AsksGradient(Net):
    def forward(self, x):
        return super().forward(x) * (3.0 if x.requires_grad else 1.0)


class AsksLeaf(Net):
    def forward(self, x):
        return super().forward(x) * (3.0 if x.is_leaf else 1.0)


class AsksNode(Net):
    def forward(self, x):
        return super().forward(x) * (3.0 if x.grad_fn is None else 1.0)


class AsksVersion(Net):
    def forward(self, x):
        return super().forward(x) * float(1 + x._version)


class AsksParameter(Net):
    def forward(self, x):
        return super().forward(x) * (3.0 if self.first.weight.requires_grad else 1.0)


class AsksInference(Net):
    def forward(self, x):
        return super().forward(x) * (3.0 if torch.is_inference_mode_enabled() else 1.0)


class AsksTime(Net):
    def forward(self, x):
        return super().forward(x) * (time.time() * 0 + CLOCK[0])


class AsksEnvironment(Net):
    def forward(self, x):
        return super().forward(x) * float(os.environ.get("DEEPWELL_TEST_FACTOR", "1"))


class AsksIterator(Net):
    def __init__(self):
        super().__init__()
        self.numbers = iter([1.0, 2.0, 3.0, 4.0])

    def forward(self, x):
        return super().forward(x) * next(self.numbers)

    def __deepcopy__(self, memo):
        made = AsksIterator()
        made.load_state_dict(self.state_dict())
        return made


CLOCK = [1.0]


@pytest.mark.support(
    "Modules",
    "requires_grad, grad_fn, versions, inference mode, the clock and the environment in forward",
    "PyTorch",
    "in its forward",
)
@pytest.mark.parametrize(
    "build",
    [
        AsksGradient, AsksLeaf, AsksNode, AsksVersion, AsksParameter, AsksInference, AsksTime, AsksEnvironment,
    ],
)  # fmt: skip
def test_other_queries_while_tracing(build, support, monkeypatch) -> None:
    plain, ours = pair(build)
    x = rows()
    close(ours(x), plain(x))
    for model in (plain, ours):
        model.first.weight.requires_grad_(False)
        with torch.no_grad():
            model.first.weight.mul_(1.5)
    monkeypatch.setenv("DEEPWELL_TEST_FACTOR", "3")
    close(ours(x.requires_grad_()), plain(x))
    twice = (x * 2).detach().add_(1)  # another version of the code
    close(ours(twice), plain(twice))
    close(ours(x * 2), plain(x * 2))
    with torch.no_grad() if build is AsksVersion else torch.inference_mode():
        close(ours(rows()), plain(rows()))
    support.check(ours)


@pytest.mark.support("Modules", "iterators that forward draws from", "PyTorch", "an iterator")
def test_iterators(support) -> None:
    plain, ours = pair(AsksIterator)
    same(plain, ours, lambda model: [train_step(model) for _ in range(4)])
    support.check(ours)


# ---- writing
# -----------------------------------------------------------------------------------------


class Averages(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(8))

    def forward(self, x):
        y = super().forward(x)
        self.keep(y.detach().mean(0))
        return y + self.ema


class Assigns(Averages):
    def keep(self, mean):
        self.ema = 0.9 * self.ema + 0.1 * mean


class PutsInTable(Averages):
    def keep(self, mean):
        self._buffers["ema"] = 0.9 * self.ema + 0.1 * mean


class PutsData(Averages):
    def keep(self, mean):
        self.ema.data = 0.9 * self.ema + 0.1 * mean


class CopiesData(Averages):
    def keep(self, mean):
        self.ema.data.mul_(0.9).add_(mean, alpha=0.1)


class Registers(Averages):
    def keep(self, mean):
        self.register_buffer("ema", 0.9 * self.ema + 0.1 * mean)


class InSubmodule(Averages):
    def keep(self, mean):
        self.norm.__dict__.setdefault("seen", [])
        self.first.ema = self.ema
        self.ema = 0.9 * self.ema + mean

    def __init__(self):
        super().__init__()
        self.first.register_buffer("ema", torch.zeros(8))


@pytest.mark.support("Modules", "buffers that forward assigns", "PyTorch", "runs in PyTorch")
@pytest.mark.parametrize(
    "build", [Assigns, PutsInTable, PutsData, CopiesData, Registers, InSubmodule]
)
def test_assigned_buffers(build, support) -> None:
    def use(model):
        results = [train_step(model, seed) for seed in range(3)]
        return *results, *[buffer.clone() for buffer in model.buffers()]

    plain, ours = pair(build)
    same(plain, ours, use)
    support.check(ours)


SEEN = []
COUNTS = types.SimpleNamespace(calls=0, last=None)


class LogsElsewhere(Net):
    def forward(self, x):
        SEEN.append(1)
        return super().forward(x) * len(SEEN)


class CountsElsewhere(Net):
    def forward(self, x):
        COUNTS.calls += 1
        return super().forward(x) * COUNTS.calls


def count_up():
    global TOTAL
    TOTAL += 1
    return TOTAL


TOTAL = 0


class CountsInHelper(Net):
    def forward(self, x):
        return super().forward(x) * count_up()


@functools.lru_cache
def cached_mask(size):
    return torch.ones(size).cumsum(0)


class FillsCache(Net):
    def forward(self, x):
        return super().forward(x) * cached_mask(8)


class Prints(Net):
    def forward(self, x):
        print("called")
        return super().forward(x)


@pytest.mark.support(
    "Modules",
    "a forward that changes globals, fills functools.lru_cache or prints",
    "PyTorch",
    "in its forward",
)
@pytest.mark.parametrize(
    "build", [LogsElsewhere, CountsElsewhere, CountsInHelper, FillsCache, Prints]
)
def test_state_written_outside_the_model(build, support, monkeypatch, capsys) -> None:
    def use(model):
        SEEN.clear(), cached_mask.cache_clear()
        COUNTS.calls, globals()["TOTAL"] = 0, 0
        capsys.readouterr()
        results = [train_step(model) for _ in range(3)]
        return *results, len(SEEN), COUNTS.calls, TOTAL, capsys.readouterr().out

    plain, ours = pair(build)
    same(plain, ours, use)
    support.check(ours)


def test_the_comparison_with_pytorch_leaves_no_trace(monkeypatch) -> None:
    """This also holds if a forward has an effect that no capture noticed."""
    monkeypatch.delenv("DEEPWELL_MEASURE", raising=False)
    monkeypatch.setattr("deepwell.guards.Effects.look", lambda self: None)
    # PyTorch runs the call and moves the buffer, as expected.
    monkeypatch.setattr("deepwell.comparison.Timing.slower", False)
    torch.manual_seed(0)
    model = deepwell.optimize(Assigns(), verbose=False)
    before = model.ema
    model(rows())
    assert model.ema is before and not before.any()


def test_profiler_is_restored() -> None:
    calls = []

    def profile(*event):
        calls.append(event)

    _, ours = pair()
    sys.setprofile(profile)
    try:
        ours(rows())
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
