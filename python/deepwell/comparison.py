"""Whether the engine or PyTorch is faster for one kind of call.

Both are timed through the calls that users make, in turns, and medians decide. On one thread the clock is the CPU time of
the calling thread, which other programs do not lengthen. On several threads it is the wall clock, which they do: PyTorch's
OpenMP threads spin while they wait for one that has lost its core, so that a busy machine shows ratios that are no
property of either side. Rounds in which a thread lost its core are therefore left out, and where too few others remain
both sides are timed on one thread instead.
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

# The engine must not be slower; medians this close count as equal, and equal ones stay with the engine.
SLACK = 1.03
# Rounds end after this long, and sooner where they agree. A round is one call of each side.
_SECONDS = 0.5
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 101
# Rounds as long as this are few: two decide.
_LONG_ROUND = 2.0
# Below this a call's first round is warm-up and not counted.
_SHORT_ROUND = 0.02
# An otherwise idle system takes the core from a thread about ten times a second; one that is in use, a hundred times.
_LOSSES_A_SECOND = 25.0

# A call whose arena and outputs take more than this is compared on a part of it: PyTorch would take at least as much.
LARGE_CALL = 64 << 20
# ... of at most this share, where its sizes can be halved.
SHARE = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """The result of a comparison: medians in seconds, and bounds of the ratio of PyTorch's to the engine's time."""

    original: float
    engine: float
    ratio: float  # median of the rounds' ratios; above 1 the engine is faster
    low: float  # bounds that hold the true median of the ratio with a probability of 95%, given enough rounds
    high: float
    rounds: int
    one_thread: bool  # where PyTorch has more: too many rounds were disturbed on them

    @property
    def slower(self) -> bool:
        """Whether PyTorch runs this kind of call from now on."""
        return self.ratio * SLACK < 1

    @property
    def certain(self) -> bool:
        """Whether the difference is larger than the noise."""
        return (self.low > 1 or self.high < 1) and self.rounds >= _LEAST_ROUNDS


def bounds(ratios: Iterable[float]) -> tuple[float, float]:
    """Bounds of the median, from the order of the values alone: no assumption about how they are distributed. Below six
    values these are the smallest and the largest, which hold it less often than in 95% of cases."""
    ordered = sorted(ratios)
    count = len(ordered)
    skipped = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[skipped], ordered[count - 1 - skipped]


def _losses() -> int:
    """How often the system has taken the core from a thread of this process."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


# Seconds of a call, and whether a thread lost its core meanwhile more often than on an idle system.
_Sample = tuple[float, bool]


def _thread_time(function: Callable[[], None]) -> _Sample:
    started = time.thread_time()
    function()
    return time.thread_time() - started, False


def _wall_time(function: Callable[[], None]) -> _Sample:
    losses, started = _losses(), time.perf_counter()
    function()
    seconds = time.perf_counter() - started
    return seconds, _losses() - losses > 1 + _LOSSES_A_SECOND * seconds


def compare(original: Callable[[], None], engine: Callable[[], None]) -> Timing:
    """Times both in turns."""
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
    assert found is not None  # for no round is disturbed by this clock
    return dataclasses.replace(found, one_thread=threads > 1)


def _compare(
    original: Callable[[], None],
    engine: Callable[[], None],
    timed: Callable[[Callable[[], None]], _Sample],
) -> Timing | None:
    """None where too many rounds are disturbed."""
    rounds: list[tuple[float, float]] = []
    disturbed = 0
    started = time.perf_counter()
    warm = False
    while True:
        began = time.perf_counter()
        if len(rounds) % 2 == 0:  # either side begins in turn
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
    """A function that makes the call, and runs its backward to ``targets`` where there are any. What it makes is freed
    before it returns: both sides are never in memory together."""

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
    """Calls of one magnitude, within a factor of four in the product of their sizes, share one verdict: what a call costs
    beside its arithmetic weighs more in a small one, and kernels differ in which sizes suit them."""
    return math.prod(sizes).bit_length() // 2


def smaller_sizes(
    sizes: tuple[int, ...], first_axes: list[bool], bytes_at: Callable[[tuple[int, ...]], int]
) -> tuple[int, ...]:
    """Sizes of a call of at most a third of the bytes, where ``sizes`` take much memory; ``sizes`` itself otherwise.

    The batch is halved before other axes are: ``first_axes`` says which sizes are some input's first axis. None goes
    below 2, for PyTorch treats axes of 1 apart."""
    whole = bytes_at(sizes)
    if whole <= LARGE_CALL:
        return sizes
    goal = max(whole // SHARE, LARGE_CALL)
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
