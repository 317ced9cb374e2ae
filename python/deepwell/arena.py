"""Arenas, reused between runs.

A forward leases an arena until its autograd node is freed, so two forwards before a backward use two arenas. Idle
arenas are kept for the next step: every step touches the whole arena, and fresh memory costs a page fault per page.
"""

from __future__ import annotations

import threading
from typing import Any

from deepwell.targets import Target

_KEPT_IDLE = 2


class ArenaPool:
    """Idle arenas. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run while the lock is held, and release a lease of this thread.
        self._lock = threading.RLock()
        # By target and stream (Target.arena_key).
        self._idle: dict[Any, list[Any]] = {}

    def lease(self, size: int, target: Target) -> "Lease":
        """Returns an arena of at least ``size`` bytes: an idle one, unless all are too small or wastefully large."""
        key = target.arena_key()
        with self._lock:
            idle = self._idle.setdefault(key, [])
            best = None
            for arena in idle:
                fits = size <= arena.bytes <= 2 * size + (1 << 22)
                if fits and (best is None or arena.bytes < best.bytes):
                    best = arena
            if best is not None:
                idle.remove(best)
                return Lease(self, key, best)
            # The sizes have changed, so the idle arenas would only add to the peak.
            idle.clear()
        return Lease(self, key, target.arena(size))

    def give(self, key: Any, arena: Any) -> None:
        with self._lock:
            idle = self._idle.setdefault(key, [])
            idle.append(arena)
            if len(idle) > _KEPT_IDLE:
                idle.remove(min(idle, key=lambda arena: arena.bytes))

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()

    # A copied or unpickled model starts without arenas.
    def __reduce__(self):
        return (ArenaPool, ())


class Lease:
    """An arena in use. It returns to its pool on ``release`` or when the lease is garbage-collected."""

    __slots__ = ("_pool", "_key", "arena")

    def __init__(self, pool: ArenaPool, key: Any, arena: Any) -> None:
        self._pool = pool
        self._key = key
        self.arena: Any = arena

    def release(self) -> None:
        arena, self.arena = self.arena, None
        if arena is not None:
            self._pool.give(self._key, arena)

    def __del__(self) -> None:
        self.release()
