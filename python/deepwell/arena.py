"""Arenas, reused between runs.

A forward leases an arena until its autograd node is freed, so two forwards before a backward use two arenas. Idle
arenas are kept for the next step: every step touches the whole arena, and fresh memory costs a page fault per page.
"""

from __future__ import annotations

import threading

from deepwell import _deepwell

_KEPT_IDLE = 2


class ArenaPool:
    """Idle arenas. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run while the lock is held, and release a lease of this thread.
        self._lock = threading.RLock()
        self._idle: list[_deepwell.Arena] = []

    def lease(self, size: int) -> "Lease":
        """Returns an arena of at least ``size`` bytes: an idle one, unless all are too small or wastefully large."""
        with self._lock:
            best = None
            for arena in self._idle:
                fits = size <= arena.bytes <= 2 * size + (1 << 22)
                if fits and (best is None or arena.bytes < best.bytes):
                    best = arena
            if best is not None:
                self._idle.remove(best)
                return Lease(self, best)
            # The sizes have changed, so the idle arenas would only add to the peak.
            self._idle.clear()
        return Lease(self, _deepwell.Arena(size))

    def give(self, arena: _deepwell.Arena) -> None:
        with self._lock:
            self._idle.append(arena)
            if len(self._idle) > _KEPT_IDLE:
                self._idle.remove(min(self._idle, key=lambda arena: arena.bytes))

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()

    # A copied or unpickled model starts without arenas.
    def __reduce__(self):
        return (ArenaPool, ())


class Lease:
    """An arena in use. It returns to its pool on ``release`` or when the lease is garbage-collected."""

    __slots__ = ("_pool", "arena")

    def __init__(self, pool: ArenaPool, arena: _deepwell.Arena) -> None:
        self._pool = pool
        self.arena: _deepwell.Arena | None = arena

    def release(self) -> None:
        arena, self.arena = self.arena, None
        if arena is not None:
            self._pool.give(arena)

    def __del__(self) -> None:
        self.release()
