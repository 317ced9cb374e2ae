"""Measures which backend runs attention fastest: once per class of shapes, at the first eager call. Stores the result.

The entries are Deepwell's kernels and PyTorch's cuDNN and flash operators, on random tensors of the call's shape. Times
go to libdeepwell's store (one file per GPU model, deepwell/explain.h), which also has the rule: Deepwell's kernel,
unless another is faster by more than the measurement error. `deepwell explain` and the next process therefore decide
alike. `python -m deepwell.attention` measures shapes in advance.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepwell import _deepwell
from deepwell.attention import operators

_aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]
Clock = Callable[[Callable[[], Any]], float]  # returns the seconds that the work takes


# ---- entries ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One way to compute attention without a mask, or with a causal one aligned at the first query and key.

    ``run`` computes a call, differentiably. ``forward`` and ``backward`` are its parts, for timing.
    ``forward(q, k, v, causal, scale, gradients)`` returns the result and the ``saved`` argument of ``backward(d_o, q,
    k, v, saved, causal, scale)``.
    """

    name: str
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]

    def run(self, q, k, v, causal: bool, scale: float, gradients: bool) -> torch.Tensor:
        o = self.forward(q, k, v, causal, scale, gradients)[0]
        # Callers that view the result may rely on its having the layout of q.
        return o if _lies_beside(o, q) else operators.empty_beside(q).copy_(o)


def _lies_beside(o: torch.Tensor, q: torch.Tensor) -> bool:
    _, heads, rows, dim = q.shape
    inside = heads > 1 and rows > 1 and q.stride(1) < q.stride(2)
    wanted = (dim, heads * dim) if inside else (rows * dim, dim)
    strides = (heads * rows * dim, *wanted, 1)
    return all(n == 1 or a == b for n, a, b in zip(q.shape, o.stride(), strides, strict=True))


_NOTHING = (None, None, None, 0, 0)


def _ours_forward(q, k, v, causal, scale, gradients):
    right = 0 if causal else -1
    return operators.forward(q, k, v, scale, 0.0, -1, right, False, 0.0, *_NOTHING)


def _ours_backward(d_o, q, k, v, saved, causal, scale):
    options = (scale, 0.0, -1, 0 if causal else -1, False, 0.0)
    return operators.backward(d_o, q, k, v, *saved, *options, *_NOTHING, False)


def _cudnn_forward(q, k, v, causal, scale, gradients):
    return _aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, gradients, 0.0, causal, False, scale=scale
    )


def _cudnn_backward(d_o, q, k, v, saved, causal, scale):
    o, lse, ends_q, ends_k, longest_q, longest_k, seed, offset, _ = saved
    return _aten._scaled_dot_product_cudnn_attention_backward.default(
        *(d_o, q, k, v, o, lse, seed, offset, None, ends_q, ends_k, longest_q, longest_k),
        *(0.0, causal),
        scale=scale,
    )


def _flash_forward(q, k, v, causal, scale, gradients):
    return _aten._scaled_dot_product_flash_attention.default(
        q, k, v, 0.0, causal, False, scale=scale
    )


def _flash_backward(d_o, q, k, v, saved, causal, scale):
    o, lse, ends_q, ends_k, longest_q, longest_k, state, unused, _ = saved
    return _aten._scaled_dot_product_flash_attention_backward.default(
        *(d_o, q, k, v, o, lse, ends_q, ends_k, longest_q, longest_k, 0.0, causal, state, unused),
        scale=scale,
    )


OURS = Entry("deepwell", _ours_forward, _ours_backward)
# The names are libdeepwell's. The others are compared with the first one.
ENTRIES = (
    OURS,
    Entry("cudnn", _cudnn_forward, _cudnn_backward),
    Entry("flash", _flash_forward, _flash_backward),
)


# ---- measuring -------------------------------------------------------------------------------------------

_SECONDS = 0.04  # of timed work per class
_MOST_ROUNDS, _LEAST_ROUNDS = 9, 3
# Bound of the relative norm of the difference of two results. Both round; correct pairs differ by about 0.004.
_FAR = 0.02


class GpuClock:
    """Measures seconds of work on the GPU, with an empty cache, and with the launches queued before they run."""

    _SLEEP_CYCLES = 400_000  # about 0.2 ms, in which the host enqueues the work

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run: Callable[[], Any]) -> float:
        self._flushed.zero_()
        torch.cuda._sleep(self._SLEEP_CYCLES)
        self._begin.record()
        run()
        self._end.record()
        self._end.synchronize()
        return 1e-3 * self._begin.elapsed_time(self._end)


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of the GPU, including what PyTorch's allocator holds."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def needed_bytes(q: torch.Tensor, k: torch.Tensor, gradients: bool) -> int:
    """Returns an upper bound: results of three entries, gradients of two, sums in FP32, and a pair of results in
    FP32."""
    of_q, of_k, size = q.numel(), k.numel(), q.element_size()
    if not gradients:
        return size * (4 * of_q + 2 * of_k) + 8 * of_q + (256 << 20)
    return size * (7 * of_q + 6 * of_k) + 12 * (of_q + of_k) + (256 << 20)


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


class _Trial:
    """The trial of one entry, on tensors that all entries share."""

    def __init__(self, entry: Entry, tensors: list[torch.Tensor], causal, scale, gradients) -> None:
        self.entry = entry
        self._q, self._k, self._v, self._d_o = tensors
        self._causal, self._scale, self._gradients = causal, scale, gradients
        self.failure: str | None = None
        passes = (False, True) if gradients else (False,)
        self.times: dict[bool, list[float]] = {backward: [] for backward in passes}

    def _forward(self) -> None:
        given = (self._q, self._k, self._v, self._causal, self._scale, self._gradients)
        self._saved = self.entry.forward(*given)

    def _backward(self) -> None:
        given = (self._d_o, self._q, self._k, self._v, self._saved, self._causal, self._scale)
        self._grads = self.entry.backward(*given)

    def passes(self) -> dict[bool, Callable[[], None]]:
        return {backward: (self._forward, self._backward)[backward] for backward in self.times}

    def results(self) -> Sequence[torch.Tensor]:
        return (self._saved[0], *(self._grads if self._gradients else ()))

    def attempt(self, clock: Clock, rounds: int) -> None:
        """Records times or an error in the trial. Running out of memory is raised, since it concerns all trials."""
        try:
            for _ in range(rounds):
                for backward, run in self.passes().items():
                    self.times[backward].append(clock(run))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # PyTorch's kernels raise various errors
            self.failure = f"{type(error).__name__}: {_line(error)}"

    def compare(self, with_: "_Trial") -> None:
        for name, ours, theirs in zip("o dq dk dv".split(), with_.results(), self.results()):
            wide = ours.float()
            apart = float((theirs.float() - wide).norm() / wide.norm().clamp_min(1e-30))
            if not apart < _FAR:
                self.failure = f"its {name} differs from Deepwell's by {apart:.2g} of the norm"

    def forget(self) -> None:
        self.times = {backward: [] for backward in self.times}

    def row(self, backward: bool) -> tuple[str, float, float, str | None]:
        """Returns a row for the store: name, seconds, standard error, and the reason if there is no time."""
        if self.failure:
            return (self.entry.name, 0.0, 0.0, self.failure)
        return (self.entry.name, *middle(self.times[backward]), None)


def _synthetic(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return operators.empty_beside(like).normal_(generator=generator)


def measure(
    entries: Sequence[Entry],
    clock: Clock,
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    scale: float,
    gradients: bool,
) -> dict[str, _Trial]:
    """Returns trials by name, with times of forward and backward, on random tensors with the shapes and layouts of q
    and k."""
    generator = torch.Generator(q.device).manual_seed(1)  # leaves the user's generator alone
    tensors = [_synthetic(like, generator) for like in (q, k, k, q)]
    trials = [_Trial(entry, tensors, causal, scale, gradients) for entry in entries]
    for trial in trials:  # the first run loads kernels and makes plans
        trial.attempt(clock, 2)
        if trial is not trials[0] and not trial.failure and not trials[0].failure:
            trial.compare(trials[0])
    running = [trial for trial in trials if not trial.failure]
    one_round = sum(times[-1] for trial in running for times in trial.times.values())
    for trial in running:
        trial.forget()
    rounds = min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(_SECONDS / max(one_round, 1e-9))))
    for _ in range(rounds):  # in turns, so that changes of the clock rate affect all trials
        for trial in running:
            if not trial.failure:
                trial.attempt(clock, 1)
    return {trial.entry.name: trial for trial in trials}


def middle(times: Sequence[float]) -> tuple[float, float]:
    """Returns the median and its standard error, from the median absolute deviation (of normal numbers: sigma / 1.4826;
    a median of n has the error 1.2533 sigma / sqrt(n))."""
    median = statistics.median(times)
    deviation = statistics.median(abs(time - median) for time in times)
    return median, 1.2533 * 1.4826 * deviation / len(times) ** 0.5


# ---- decisions -------------------------------------------------------------------------------------------

# The extension's description of a call: dtype, batch, heads_q, heads_kv, rows_q, rows_k, head_dim, packed, softcap,
# window_left, window_right, bottom_right, dropout, gradients, deterministic.
Sizes = tuple[Any, ...]


def _pass_of(sizes: Sizes, backward: bool) -> Sizes:
    return (*sizes[:-2], backward, sizes[-1])


@dataclass(frozen=True)
class Alternative:
    """An entry that runs the calls of a class instead of Deepwell's kernels."""

    entry: Entry
    because: str


def versions() -> str:
    """Returns the software versions that times depend on."""
    cudnn = torch.backends.cudnn.version()
    return f"deepwell {_deepwell.version()}, torch {torch.__version__}, cuDNN {cudnn}"


def on_device(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _undisturbed() -> bool:
    """Returns whether the code runs eagerly and unobserved: not recorded, traced, counted or faked."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
    )


@contextlib.contextmanager
def _apart(device: torch.device):
    """Disables gradients and restores PyTorch's random state."""
    cuda = device.type == "cuda"
    generator = (
        torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
    )
    state = generator.get_state()
    try:
        with torch.no_grad():
            yield
    finally:
        generator.set_state(state)


class Tuner:
    """Decides the backend for each class of shapes. Its GPU functions are arguments, so that tests need no GPU."""

    def __init__(
        self,
        entries: Sequence[Entry] = ENTRIES,
        clock: Callable[[torch.device], Clock] = GpuClock,
        free: Callable[[torch.device], int] = free_bytes,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        device: str = "cuda",
    ) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self._clock, self._free, self._capturing, self._device = clock, free, capturing, device
        self._lock = threading.Lock()
        self._alternatives: dict[tuple[int, str], Alternative] = {}
        self.on = False
        self.measured: list[str] = []  # classes measured by this process
        self.notes: list[str] = []  # for the summary

    def switch(self, on: bool) -> None:
        """Turns measuring on or off. Forgets the decisions of this process."""
        self.on = on
        self._alternatives.clear()
        _deepwell.attention_watch(on)

    def decide(
        self, q: torch.Tensor, k: torch.Tensor, scale: float, sizes: Sizes
    ) -> Alternative | None:
        """Returns the entry that runs a call, None for Deepwell. Measures if necessary and possible here. If a class is
        first seen where it cannot be measured, Deepwell runs it in this process, so that equal calls use one
        backend."""
        index = q.device.index or 0
        if not self._concerns(q.device, sizes):
            return None
        place = (index, _deepwell.attention_class(*sizes))
        with self._lock, on_device(q.device):
            alternative = self._alternatives.get(place) or self._find(q, k, scale, sizes)
            _deepwell.attention_settle(alternative is None, index, *sizes)
            if alternative is not None:
                self._alternatives[place] = alternative
        return alternative

    def recorded(self, device: torch.device, sizes: Sizes) -> str:
        """Returns the name of the entry chosen by earlier measurements, "" for Deepwell. Measures nothing."""
        if not self._concerns(device, sizes):
            return ""
        with on_device(device):
            alternative = self._look_up(sizes)
        return alternative.entry.name if isinstance(alternative, Alternative) else ""

    def give_up(
        self, alternative: Alternative, device: torch.device, sizes: Sizes, error: Exception
    ) -> None:
        """Stops using an entry that fails now, for its class and this process."""
        index, shape_class = device.index or 0, _deepwell.attention_class(*sizes)
        with self._lock:
            self._alternatives.pop((index, shape_class), None)
            _deepwell.attention_settle(True, index, *sizes)
            self._note(
                f"{alternative.entry.name} is not used again for {shape_class}: {_line(error)}"
            )

    def _concerns(self, device: torch.device, sizes: Sizes) -> bool:
        if not self.on or device.type != self._device:
            return False
        return not _deepwell.attention_settled(device.index or 0, *sizes)

    def _find(
        self, q: torch.Tensor, k: torch.Tensor, scale: float, sizes: Sizes
    ) -> Alternative | None:
        try:
            found = self._look_up(sizes)
            if found is False and self._may_measure(q, k, sizes):
                self._measure(q, k, scale, sizes)
                found = self._look_up(sizes)
        except torch.OutOfMemoryError:
            self._note(f"not measured, because memory ran out: {_deepwell.attention_class(*sizes)}")
            return None
        except RuntimeError as error:  # without the store, each class would be measured repeatedly
            self.switch(False)
            self._note(f"measuring stopped, Deepwell runs every call that it supports: {error}")
            return None
        return found if isinstance(found, Alternative) else None

    def _look_up(self, sizes: Sizes) -> Alternative | bool:
        """Returns True for Deepwell, False if not measured."""
        verdict, name, because, _ = _deepwell.attention_decide(False, versions(), *sizes)
        if verdict == "unmeasured":
            return False
        entry = self.entries.get(name) if verdict == "others" else None
        return True if entry is None else Alternative(entry, because)

    def _may_measure(self, q: torch.Tensor, k: torch.Tensor, sizes: Sizes) -> bool:
        if self._capturing() or not _undisturbed():
            return False
        need, free = needed_bytes(q, k, sizes[-2]), self._free(q.device)
        if 2 * need > free:
            sayings = f"{need >> 20} MiB, and {free >> 20} MiB are free"
            self._note(f"not measured, it needs {sayings}: {_deepwell.attention_class(*sizes)}")
        return 2 * need <= free

    def _measure(self, q: torch.Tensor, k: torch.Tensor, scale: float, sizes: Sizes) -> None:
        causal, gradients = sizes[10] == 0, sizes[-2]
        with _apart(q.device):
            trials = measure(
                list(self.entries.values()), self._clock(q.device), q, k, causal, scale, gradients
            )
        if trials[OURS.name].failure:  # the call itself will raise the error
            self._note(f"not measured, Deepwell's kernels failed: {trials[OURS.name].failure}")
            return
        for backward in (False, True)[: 1 + gradients]:
            shape_class = _deepwell.attention_class(*_pass_of(sizes, backward))
            _deepwell.tune_publish(
                shape_class, versions(), [t.row(backward) for t in trials.values()]
            )
        self.measured.append(_deepwell.attention_class(*sizes))

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 20:
            self.notes.append(text)


# The process's tuner. With DEEPWELL_AUTOTUNE=0 Deepwell runs every call that it supports.
tuner = Tuner()
tuner.switch(os.environ.get("DEEPWELL_AUTOTUNE", "1") not in ("0", "off"))
