"""Scenarios of test_attention_tune.py, which runs them with a driver that pretends to be a GPU:
`attention_tune_run.py SCENARIO`."""

import os
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from attention_tools import apart, compiled, seen
from deepwell import _deepwell
from deepwell.attention import attention, functional, install, tune
from deepwell.attention.__main__ import main, measure_shape, read_shape

_CLOSE = 0.05  # results in BF16


def tensors(rows=64, batch=2, dim=16, grad=True, rows_k=None, dtype=torch.bfloat16):
    shapes = ((4, rows), (2, rows_k or rows), (2, rows_k or rows))
    made = [torch.randn(batch, n, h, dim, dtype=dtype).transpose(1, 2) for h, n in shapes]
    return [t.requires_grad_(grad) for t in made]


def sdpa(q, k, v, causal, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


class Alternatives:
    """Entries for PyTorch's own attention, with a record of their calls."""

    def __init__(self, forward_error=None, wrong=0.0, fails_from=1 << 30, error=RuntimeError):
        self.calls, self.backwards = 0, 0
        self._forward_error, self._wrong, self._error = forward_error, wrong, error
        self._fails_from = fails_from

    def forward(self, q, k, v, causal, scale, gradients):
        self.calls += 1
        if self._forward_error or self.calls >= self._fails_from:
            raise self._error(self._forward_error or "it broke")
        o = sdpa(q, k, v, causal, scale) * (1 + self._wrong)
        return (o.contiguous(),)  # its layout differs

    def backward(self, d_o, q, k, v, saved, causal, scale):
        self.backwards += 1
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(sdpa(*leaves, causal, scale), leaves, d_o)

    def entry(self, name):
        return tune.Entry(name, self.forward, self.backward)


class Clock:
    """A clock that reports the given times of each entry's forward and backward, and runs them too."""

    def __init__(self, **seconds):
        self.seconds, self.ticks = seconds, 0

    def __call__(self, device):
        def clock(run):
            run()
            self.ticks += 1
            trial, backward = run.__self__, "backward" in run.__name__
            told = self.seconds[trial.entry.name]
            return told(backward, self.ticks) if callable(told) else told[backward]

        return clock


OURS_FASTER = dict(deepwell=(1e-3, 3e-3), cudnn=(2e-3, 3e-3), flash=(4e-3, 5e-3))
CUDNN_FASTER = dict(deepwell=(1e-3, 3e-3), cudnn=(1e-3, 2.5e-3), flash=(4e-3, 5e-3))


class World:
    """A tuner with its own store."""

    def __init__(self, seconds, cudnn=None, flash=None, cache=None, **more):
        self.cudnn, self.flash = cudnn or Alternatives(), flash or Alternatives()
        self.clock = Clock(**seconds)
        more.setdefault("free", lambda device: 1 << 40)
        more.setdefault("capturing", lambda: False)
        entries = (tune.OURS, self.cudnn.entry("cudnn"), self.flash.entry("flash"))
        self.tuner = tune.Tuner(entries, self.clock, device="cpu", **more)
        self.cache = cache or tempfile.mkdtemp(dir=os.environ["DEEPWELL_CACHE"])

    def __enter__(self):
        self._before = tune.tuner, os.environ["DEEPWELL_CACHE"]
        tune.tuner, os.environ["DEEPWELL_CACHE"] = self.tuner, self.cache
        functional.devices.add("cpu")
        functional.forget()
        functional.fallbacks.clear()
        self.tuner.switch(True)
        return self

    def __exit__(self, *error):
        self.tuner.switch(False)
        functional.devices.discard("cpu")
        functional.forget()
        tune.tuner, os.environ["DEEPWELL_CACHE"] = self._before

    def files(self):
        return list(Path(self.cache).glob("tune/*.json"))


def upstream(o):
    return torch.linspace(-1, 1, o.numel()).view(o.shape).to(o.dtype)


def trained(leaves, **options):
    o = attention(*leaves, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, upstream(o))]


def check_ours(world, leaves, **options):
    """Checks that the call uses our kernel, and that no alternative is measured."""
    asked = world.cudnn.calls, world.flash.calls, world.clock.ticks
    counted = seen(lambda: trained(leaves, **options))
    assert counted.ours == 1, counted.counts
    assert asked == (world.cudnn.calls, world.flash.calls, world.clock.ticks)


# ---- scenarios -------------------------------------------------------------------------------------------


def test_ours_is_faster():
    with World(OURS_FASTER) as world:
        leaves = tensors()
        state = torch.get_rng_state()
        got = trained(leaves, is_causal=True)
        assert torch.equal(state, torch.get_rng_state())
        assert world.tuner.measured == ["attention backward bf16 d16 group2 q64 k64 heads8 causal"]
        assert world.cudnn.calls > 3 and world.cudnn.backwards > 3 and world.clock.ticks > 10
        check_ours(world, leaves, is_causal=True)
        check_ours(world, tensors(60), is_causal=True)  # another call of the same class
        check_ours(world, leaves, is_causal=True, bottom_right=True)  # the same mask
        assert not functional.fallbacks and len(world.files()) == 1
        wide = [t.float().detach().requires_grad_() for t in leaves]
        want = sdpa(*wide, True, 16**-0.5)
        want = [want, *torch.autograd.grad(want, wide, upstream(want))]
        assert apart([t.float() for t in got], want) < _CLOSE
        # Without gradients only forward counts, and it has been measured.
        ticks = world.clock.ticks
        with torch.no_grad():
            attention(*leaves, is_causal=True)
        assert world.clock.ticks == ticks
        attention(*tensors(256, grad=False))  # another class, which is forward only
        assert world.tuner.measured[1:] == ["attention forward bf16 d16 group2 q256 k256 heads8"]


def test_a_faster_alternative_runs():
    with World(CUDNN_FASTER) as world:
        leaves = tensors()
        ours = trained(leaves, is_causal=True, softcap=1e4)
        assert world.clock.ticks == 0  # a class that only Deepwell supports
        got = trained(leaves, is_causal=True)
        calls, ticks = world.cudnn.calls, world.clock.ticks
        again = trained(leaves, is_causal=True)
        assert (world.cudnn.calls, world.clock.ticks) == (calls + 1, ticks)
        assert apart(got, again) == 0 and apart(got, ours) < _CLOSE
        because = "cuDNN is faster here: 3.5 ms against 4, forward and backward"
        assert dict(functional.fallbacks) == {because: 2}
        o = attention(*leaves, is_causal=True)
        assert o.stride() == leaves[0].stride()  # although the entry's result has another layout
        counted = seen(lambda: trained(leaves, is_causal=True))
        assert counted.ours == 0
        trained(tensors(62), is_causal=True)  # another call of the same class
        assert world.clock.ticks == ticks and functional.fallbacks[because] == 5
        text = install.Installation("a GPU").text(torch.nn.Identity())
        assert f"5 x PyTorch's attention in this process because {because}" in text, text
        assert "Classes of shapes measured in this process: 1" in text
        # The two are equal in forward alone, so our kernel is used.
        with torch.no_grad():
            assert seen(lambda: attention(*leaves, is_causal=True)).ours == 1
        # Our operator runs, with their kernel.
        assert functional.why_pytorch(*leaves, (-1, 0), False) == ""
        check_ours(world, leaves, dropout_p=0.1)
        check_ours(world, leaves, window=(3, 0))
        check_ours(world, tensors(8, rows_k=9), is_causal=True, bottom_right=True)
        torch.use_deterministic_algorithms(True)
        check_ours(world, leaves, is_causal=True)
        torch.use_deterministic_algorithms(False)


def test_ties_and_noise():
    def cases(ours, theirs):
        return dict(deepwell=ours, cudnn=theirs, flash=(1.0, 1.0))

    for theirs, ours_expected in ((0.98e-3, True), (0.96e-3, False)):
        with World(cases((1e-3, 1e-3), (theirs, theirs))) as world:
            trained(tensors())
            assert seen(lambda: trained(tensors())).ours == (1 if ours_expected else 0)
    # The times differ by 10 %, but vary by more.
    noisy = lambda middle: lambda backward, tick: middle * (0.5 + tick * 0.37 % 1)  # noqa: E731
    with World(cases(noisy(1e-3), noisy(0.9e-3))) as world:
        trained(tensors())
        check_ours(world, tensors())


def test_entries_that_fail():
    text = "no valid execution plans built.\nand more"
    with World(CUDNN_FASTER, cudnn=Alternatives(text)) as world:
        trained(tensors())
        check_ours(world, tensors())
        written = world.files()[0].read_text()
        assert "RuntimeError: no valid execution plans built." in written, written
    with World(CUDNN_FASTER, cudnn=Alternatives(wrong=0.1)) as world:
        trained(tensors())
        check_ours(world, tensors())
        assert "its o differs from Deepwell's by 0.1 of the norm" in world.files()[0].read_text()
    # An entry that was measured and fails later: that call and all later ones use our kernel.
    with World(CUDNN_FASTER) as world:
        leaves = tensors()
        trained(leaves)
        world.cudnn._fails_from = world.cudnn.calls + 1
        got = trained(leaves)
        check_ours(world, leaves)
        check_ours(world, tensors(63))
        assert apart(got, trained(leaves)) == 0
        assert "cudnn is not used again for attention backward" in world.tuner.notes[0]
        assert "it broke" in install.Installation("a GPU").text(torch.nn.Identity())
    # An out-of-memory error decides nothing for the next process.
    broken = Alternatives("CUDA out of memory", error=torch.OutOfMemoryError)
    with World(CUDNN_FASTER, cudnn=broken) as world:
        trained(tensors())
        check_ours(world, tensors())
        assert not world.files() and "memory ran out" in world.tuner.notes[0]
    with World(CUDNN_FASTER) as world:  # when it is not measuring, the error is the user's
        trained(tensors())
        world.cudnn._fails_from, world.cudnn._error = 0, torch.OutOfMemoryError
        try:
            trained(tensors())
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("an error was lost")


def test_where_nothing_can_be_measured():
    def check(world, why):
        trained(tensors())
        check_ours(world, tensors())
        assert world.clock.ticks == 0 and not world.files(), why

    with World(CUDNN_FASTER, capturing=lambda: True) as world:
        check(world, "a capture")
    with World(CUDNN_FASTER, free=lambda device: 100 << 20) as world:
        check(world, "little memory")
        assert "not measured, it needs 256 MiB, and 100 MiB are free" in world.tuner.notes[0]
    with World(CUDNN_FASTER) as world:
        seen(lambda: trained(tensors()))  # under a mode that would see the calls of a measurement
        check(world, "a mode")
    with World(CUDNN_FASTER, cache="/proc/none") as world:
        trained(tensors())
        ticks = world.clock.ticks
        trained(tensors())
        trained(tensors(256))
        assert world.clock.ticks == ticks and not world.tuner.on
        assert "measuring stopped" in world.tuner.notes[0]
    # A recorded decision also holds under such a mode.
    with World(CUDNN_FASTER) as world:
        trained(tensors())
    with World(CUDNN_FASTER, capturing=lambda: True, cache=world.cache) as world:
        assert seen(lambda: trained(tensors())).ours == 0


def test_damaged_and_outdated_stores():
    with World(CUDNN_FASTER) as world:
        trained(tensors())
    path = world.files()[0]
    whole = path.read_text()
    for damaged in ("", "{", whole[: len(whole) // 2], whole.replace("seconds", "second")):
        path.write_text(damaged)
        with World(OURS_FASTER, cache=world.cache) as other:
            trained(tensors())
            assert other.clock.ticks > 0
            check_ours(other, tensors())
    with World(CUDNN_FASTER, cache=world.cache) as other:
        trained(tensors())
        assert other.clock.ticks == 0
    before = tune.versions
    tune.versions = lambda: "another cuDNN"
    with World(CUDNN_FASTER, cache=world.cache) as other:
        trained(tensors())
        assert other.clock.ticks > 0 and seen(lambda: trained(tensors())).ours == 0
    tune.versions = before


def test_compiled():
    def run(q, k, v):
        return attention(q * 1, k, v, is_causal=True)

    with World(CUDNN_FASTER) as world:
        leaves = tensors()
        ours = compiled(run, [])(*leaves)
        assert world.clock.ticks == 0 and world.cudnn.calls == 0  # not measured, so ours runs
        trained(leaves, is_causal=True)
        ticks, calls = world.clock.ticks, world.cudnn.calls
        graphs = []
        theirs = compiled(run, graphs)(*leaves)
        assert world.clock.ticks == ticks and world.cudnn.calls > calls
        assert "deepwell" not in str(graphs[0].code) and apart([ours], [theirs]) < _CLOSE
        # Lengths that may vary use our kernel.
        torch._dynamo.config.assume_static_by_default = False
        graphs = []
        compiled(run, graphs)(*leaves)
        assert "deepwell" in str(graphs[0].code)
        torch._dynamo.config.assume_static_by_default = True


def test_threads_measure_once():
    with World(CUDNN_FASTER) as world:
        results = []
        leaves = [tensors() for _ in range(4)]
        threads = [threading.Thread(target=lambda t=t: results.append(trained(t))) for t in leaves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4 and len(world.tuner.measured) == 1


def test_table():
    """Decided classes are found again, and others are not. If the table is full, all further calls
    use our kernel."""
    sizes = lambda n: ("bf16", 1, n + 1, 1, 64, 64, 64, False, 0.0, -1, -1, False, 0.0, True, False)  # noqa: E731
    _deepwell.attention_watch(True)
    for n in range(511):
        assert not _deepwell.attention_settled(0, *sizes(n))
        _deepwell.attention_settle(n % 3 != 0, 0, *sizes(n))
    assert not _deepwell.attention_settled(0, *sizes(600))
    for n in range(511):
        assert _deepwell.attention_settled(0, *sizes(n)) == (n % 3 != 0)
        assert not _deepwell.attention_settled(1, *sizes(n))  # another GPU
    for n in range(511, 700):
        _deepwell.attention_settle(False, 0, *sizes(n))
    assert _deepwell.attention_settled(0, *sizes(600)) and not _deepwell.attention_settled(
        0, *sizes(0)
    )
    _deepwell.attention_settle(True, 0, *sizes(0))
    assert _deepwell.attention_settled(0, *sizes(0))
    _deepwell.attention_watch(False)
    assert _deepwell.attention_settled(1, *sizes(5))


def test_program():
    with World(CUDNN_FASTER) as world:
        sizes = read_shape("2,4,64,16,causal,kv=2", True)
        said = measure_shape(world.tuner, torch.device("cpu"), sizes)
        assert said == "cuDNN is faster here: 3.5 ms against 4, forward and backward", said
        said = measure_shape(
            world.tuner, torch.device("cpu"), read_shape("2,4,64,16,f16,k=9", False)
        )
        assert said == "Deepwell: the fastest as measured on this GPU", said
    for wrong in ("1,2,3", "1,2,x,4", "1,2,3,4,window=3:3", "1,3,4,8,kv=2", "0,1,1,8"):
        assert main([wrong]) == 2, wrong
    assert main([]) == 2 and main(["-h"]) == 0


def test_entries_speak_pytorch_s_language():
    """Checks the arguments and results of PyTorch's operators with their own shape rules; nothing is computed."""
    q = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    k = torch.empty(2, 2, 96, 64, dtype=torch.bfloat16, device="meta")
    for entry in tune.ENTRIES:
        saved = entry.forward(q, k, k, False, 0.1, True)
        grads = entry.backward(torch.empty_like(q), q, k, k, saved, False, 0.1)
        assert [g.shape for g in grads] == [q.shape, k.shape, k.shape], entry.name
        leaves = [t.clone().requires_grad_() for t in (q, k, k)]
        o = entry.run(*leaves, False, 0.1, True)
        assert o.shape == q.shape and o.stride() == q.stride(), entry.name
        grads = torch.autograd.grad(o, leaves, torch.empty_like(o))
        assert [g.shape for g in grads] == [q.shape, k.shape, k.shape], entry.name


def test_middle():
    """Compares the standard error with that of medians of normal numbers."""
    torch.manual_seed(1)
    rows = (10 + torch.randn(4000, 9)).tolist()
    medians, errors = zip(*[tune.middle(row) for row in rows])
    spread = float(torch.tensor(medians).std())
    assert 0.75 * spread < sum(errors) / len(errors) < 1.25 * spread
    assert tune.middle([3.0]) == (3.0, 0.0)


def first():
    with World(CUDNN_FASTER, cache=os.environ["DEEPWELL_CACHE"]) as world:
        trained(tensors(), is_causal=True)
        assert world.clock.ticks > 0


def second():
    told = dict(CUDNN_FASTER, cudnn=(9.0, 9.0))  # the watch would be asked here
    with World(told, cache=os.environ["DEEPWELL_CACHE"]) as world:
        trained(tensors(), is_causal=True)
        assert world.clock.ticks == 0 and world.cudnn.calls == 1
        assert list(functional.fallbacks)[0].startswith("cuDNN is faster here: 3.5 ms against 4")


def off():
    assert not tune.tuner.on
    functional.devices.add("cpu")
    tune.tuner._device = "cpu"
    assert seen(lambda: trained(tensors())).ours == 1 and not tune.tuner.measured


def decisions():
    assert tune.tuner.on  # the default
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            torch.manual_seed(0)
            test()
            print(name, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("all right")
