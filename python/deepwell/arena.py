"""Arenas, reused between runs.

A forward leases an arena until its autograd node is freed, so two forwards before a backward use two arenas. An arena
consists of segments, each memory of its own. Segment 0 lasts until the end of backward; idle ones are kept for the next
step, because every step touches the whole arena, and fresh memory costs a page fault per page. The other segments, which
only GPUs have, are freed while backward runs: their memory is PyTorch's again, for the gradients. Some of them are
allocated only then, after others have been freed.
"""

from __future__ import annotations

import threading
from typing import Any, Sequence

from deepwell.kept import Block
from deepwell.targets import Target

_KEPT_IDLE = 2


class ArenaPool:
    """Idle segments. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run while the lock is held, and release a lease of this thread.
        self._lock = threading.RLock()
        # By target and stream (Target.arena_key).
        self._idle: dict[Any, list[Any]] = {}

    def lease(self, sizes: Sequence[int | None], target: Target) -> "Lease":
        """Returns an arena whose segments have at least ``sizes`` bytes. None is in the place of one that begins late."""
        key = target.arena_key()
        first = self._take(sizes[0], key)
        lease = Lease(self, key, target.arena(sizes[0]) if first is None else first)
        for size in sizes[1:]:
            lease.add(None if size is None else target.arena(size))
        return lease

    def _take(self, size: int, key: Any) -> Any:
        """Returns an idle segment of at least ``size`` bytes, or None if all are too small or wastefully large."""
        with self._lock:
            idle = self._idle.setdefault(key, [])
            best = None
            for segment in idle:
                fits = size <= segment.bytes <= 2 * size + (1 << 22)
                if fits and (best is None or segment.bytes < best.bytes):
                    best = segment
            if best is not None:
                idle.remove(best)
            else:
                # The sizes have changed, so the idle segments would only add to the peak.
                idle.clear()
            return best

    def give(self, key: Any, segment: Any) -> None:
        with self._lock:
            idle = self._idle.setdefault(key, [])
            idle.append(segment)
            if len(idle) > _KEPT_IDLE:
                idle.remove(min(idle, key=lambda segment: segment.bytes))

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()

    # A copied or unpickled model starts without arenas.
    def __reduce__(self):
        return (ArenaPool, ())


class Lease:
    """An arena in use. Segment 0 returns to its pool on ``release`` or when the lease is garbage-collected; the others
    are freed then, or by ``free`` before. Kept values, which it shares with other leases, are its last segment."""

    __slots__ = ("_pool", "_key", "_segments", "addresses", "kept")

    def __init__(self, pool: ArenaPool, key: Any, first: Any) -> None:
        self._pool = pool
        self._key = key
        self._segments: list[Any] = []
        self.kept: Block | None = None
        self.addresses: list[
            int | None
        ] = []  # of the segments; None before they begin and once they are freed
        self.add(first)

    def add(self, segment: Any) -> None:
        self._segments.append(segment)
        self.addresses.append(None if segment is None else segment.address)

    def share(self, block: Block) -> None:
        """Adds the segment of kept values, when all others have been added. The lease releases the block."""
        self.kept = block
        self.add(block.segment)

    def begin(self, index: int, segment: Any) -> None:
        """Provides a segment that begins late."""
        self._segments[index] = segment
        self.addresses[index] = segment.address

    def free(self, segments: Sequence[int]) -> None:
        """Frees these segments, none of which is segment 0."""
        for index in segments:
            self._segments[index] = self.addresses[index] = None

    def copy_from(self, other: "Lease", sizes: Sequence[int]) -> None:
        """Copies the first bytes of each segment."""
        for ours, theirs, size in zip(self._segments, other._segments, sizes):
            if size:
                ours.copy_from(theirs, size)

    def release(self) -> None:
        segments, self._segments, self.addresses = self._segments, [], []
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.release()
        if segments:
            self._pool.give(self._key, segments[0])

    def __del__(self) -> None:
        self.release()
