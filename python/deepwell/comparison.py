"""Compares the engine's speed with PyTorch's for one kind of call.

Both sides run in turns, through the calls that users make, and the medians decide. With one thread the clock is the CPU
time of the calling thread, which other programs do not lengthen. With several threads it is the wall clock, which they
do lengthen: PyTorch's OpenMP threads spin while they wait for a thread that was preempted. Rounds with many involuntary
context switches are therefore discarded. If too few rounds remain, both sides are timed with one thread instead.

On a GPU the clock is the wall clock of several calls in a row, as a training makes them, with one wait at the end. The
rounds before it are warm-up: kernels are compiled, CUDA graphs recorded and algorithms chosen in them. Nothing here
communicates: in a group of processes each compares and decides by itself, and a wait is for the current stream alone, so
that no process waits for a collective that another has not reached.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import Any, Callable, Iterable

import torch
from torch.utils import _pytree as pytree

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

# The engine must not be slower. Medians within this ratio count as equal, and the engine is then used.
SLACK = 1.03
# Rounds end after this many seconds, or earlier if they agree. A round is one call of each side.
_SECONDS = 0.5
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 101
# If a round takes longer than this, two rounds decide.
_LONG_ROUND = 2.0
# If a call's first round is shorter than this, it is warm-up and does not count.
_SHORT_ROUND = 0.02
# On a GPU: rounds of warm-up, the least seconds of a sample, and its most calls.
_WARM_ROUNDS = 3
_SAMPLE, _MOST_CALLS = 0.02, 20
# Most involuntary context switches per second of an undisturbed round. An idle system has about ten, a busy one about
# a hundred.
_MOST_SWITCHES = 25.0

# A call whose arena and outputs take more bytes than its target's large_call is compared on smaller sizes; PyTorch needs
# at least as much. The smaller call takes at most 1 / SHARE of the bytes, if its sizes can be halved that far.
SHARE = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """The result of a comparison: median seconds, and the ratio of PyTorch's time to the engine's with its bounds."""

    original: float
    engine: float
    ratio: float  # median of the rounds' ratios; above 1 the engine is faster
    # The true median lies between low and high with 95% probability, given enough rounds.
    low: float
    high: float
    rounds: int
    # Timed with one thread though PyTorch has more, because too many rounds were disturbed.
    one_thread: bool

    @property
    def slower(self) -> bool:
        """Whether PyTorch runs this kind of call from now on."""
        return self.ratio * SLACK < 1

    @property
    def certain(self) -> bool:
        """Whether the difference is larger than the noise."""
        return (self.low > 1 or self.high < 1) and self.rounds >= _LEAST_ROUNDS


def bounds(ratios: Iterable[float]) -> tuple[float, float]:
    """Returns bounds of the median, from the order of the values alone, for any distribution. With fewer than six
    values they are the smallest and the largest value, and hold the median with less than 95% probability."""
    ordered = sorted(ratios)
    count = len(ordered)
    skipped = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[skipped], ordered[count - 1 - skipped]


def _switches() -> int:
    """Returns the number of involuntary context switches of this process so far."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


# Seconds of a call, and whether there were more involuntary context switches than on an idle system.
_Sample = tuple[float, bool]


def _thread_time(function: Callable[[], None]) -> _Sample:
    started = time.thread_time()
    function()
    return time.thread_time() - started, False


def _wall_time(function: Callable[[], None]) -> _Sample:
    switches, started = _switches(), time.perf_counter()
    function()
    seconds = time.perf_counter() - started
    return seconds, _switches() - switches > 1 + _MOST_SWITCHES * seconds


def _batch_time(
    original: Callable[[], None], engine: Callable[[], None], wait: Callable[[], None]
) -> Callable[[Callable[[], None]], _Sample]:
    """Warms both sides up. Returns a clock for a call on a GPU: the mean of as many calls as fill a sample."""

    def seconds(function: Callable[[], None], calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        return (time.perf_counter() - started) / calls

    wait()
    for _ in range(_WARM_ROUNDS):
        fastest = min(seconds(original, 1), seconds(engine, 1))
    calls = max(1, min(_MOST_CALLS, math.ceil(_SAMPLE / max(fastest, 1e-6))))
    return lambda function: (seconds(function, calls), False)


def compare(
    original: Callable[[], None],
    engine: Callable[[], None],
    wait: Callable[[], None] | None = None,
) -> Timing:
    """Times both sides in turns. On a GPU neither waits for its work, and ``wait`` does."""
    if wait is not None:
        timed = _batch_time(original, engine, wait)
        found = _compare(original, engine, timed)
        assert found is not None
        return found
    threads = torch.get_num_threads()
    if threads > 1:
        found = _compare(original, engine, _wall_time)
        if found is not None:
            return found
    torch.set_num_threads(1)
    try:
        found = _compare(original, engine, _thread_time)
    finally:
        torch.set_num_threads(threads)
    assert found is not None  # no round is disturbed by this clock
    return dataclasses.replace(found, one_thread=threads > 1)


def _compare(
    original: Callable[[], None],
    engine: Callable[[], None],
    timed: Callable[[Callable[[], None]], _Sample],
) -> Timing | None:
    """Returns None if too many rounds are disturbed."""
    rounds: list[tuple[float, float]] = []
    disturbed = 0
    started = time.perf_counter()
    warm = False
    while True:
        began = time.perf_counter()
        if len(rounds) % 2 == 0:  # the sides take turns at starting
            (theirs, lost), (ours, lost_too) = timed(original), timed(engine)
        else:
            (ours, lost), (theirs, lost_too) = timed(engine), timed(original)
        now = time.perf_counter()
        if not warm:
            warm = True
            if now - began < _SHORT_ROUND:
                continue
        if lost or lost_too:
            disturbed += 1
            if disturbed > 1 + len(rounds):
                return None
            continue
        rounds.append((theirs, ours))
        if _enough(rounds, now - started, now - began):
            return _timing(rounds)


def _enough(rounds: list[tuple[float, float]], spent: float, last: float) -> bool:
    if len(rounds) >= (2 if last > _LONG_ROUND else _LEAST_ROUNDS):
        if spent > _SECONDS or len(rounds) >= _MOST_ROUNDS:
            return True
        if len(rounds) >= 7 and spent > _SECONDS / 10:
            found = _timing(rounds)
            return found.certain and (found.low > 1 or found.high * SLACK < 1)
    return False


def _timing(rounds: list[tuple[float, float]]) -> Timing:
    ratios = [theirs / max(ours, 1e-9) for theirs, ours in rounds]
    low, high = bounds(ratios)
    return Timing(
        original=statistics.median(theirs for theirs, _ in rounds),
        engine=statistics.median(ours for _, ours in rounds),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        rounds=len(rounds),
        one_thread=False,
    )


def differentiated(call: Callable[[], Any], targets: list[torch.Tensor]) -> Callable[[], None]:
    """Returns a function that runs the call, and its backward to ``targets`` if there are any. It frees everything before
    it returns."""

    def run() -> None:
        outputs = [
            value
            for value in pytree.tree_leaves(call())
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        if targets and outputs:
            chosen = [value for value in outputs if value.dim() == 0][:1] or outputs
            torch.autograd.grad(
                chosen, targets, [torch.ones_like(value) for value in chosen], allow_unused=True
            )

    return run


def magnitude(sizes: Iterable[int]) -> int:
    """Returns the magnitude of a call: equal for sizes whose products are within a factor of four. Calls of one
    magnitude share one decision. Fixed costs matter more in small calls, and kernels differ in the sizes that they
    handle well."""
    return math.prod(sizes).bit_length() // 2


def smaller_sizes(
    sizes: tuple[int, ...],
    first_axes: list[bool],
    bytes_at: Callable[[tuple[int, ...]], int],
    large: int,
) -> tuple[int, ...]:
    """Returns ``sizes``, or smaller sizes with at most a third of the bytes if ``sizes`` take more than ``large``.

    The batch is halved before other axes: ``first_axes`` says which sizes are the first axis of an input. No size goes
    below 2, because PyTorch traces axes of size 1 separately."""
    whole = bytes_at(sizes)
    if whole <= large:
        return sizes
    goal = max(whole // SHARE, large)
    found = sizes
    for wanted in (True, False):
        while bytes_at(found) > goal:
            index = max(
                (i for i, first in enumerate(first_axes) if first == wanted and found[i] >= 4),
                key=lambda i: found[i],
                default=None,
            )
            if index is None:
                break
            found = (*found[:index], found[index] // 2, *found[index + 1 :])
    return found
