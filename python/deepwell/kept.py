"""Values that depend on parameters alone, such as the codes of quantized weights, for all micro-batches of a step.

No guess says that a parameter has not changed: writes through ``.data``, through pointers and by replayed CUDA graphs leave
no trace in a tensor's version. The caller says it, by ``accumulate``. Addresses and versions are compared as well, so that
a change that PyTorch knows of is never overlooked.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Callable, Iterator

if TYPE_CHECKING:
    import torch

    from deepwell.targets import Target


@contextlib.contextmanager
def accumulate(model: torch.nn.Module) -> Iterator[None]:
    """Says that the parameters of an optimized model do not change inside the context:

        with deepwell.accumulate(model):
            for batch in micro_batches:
                (model(**batch).loss / len(micro_batches)).backward()
        optimizer.step()

    Where the model has a precision, its weights are then quantized by the first call that needs their codes, and not again
    by the others. Results have the same bits. Until the context is left, nothing may write a parameter in a way that
    does not raise its version (``param._version``), such as ``param.data.copy_``.
    """
    from deepwell.optimize import sessions

    entered = [session.kept for session in sessions(model)]
    for kept in entered:
        kept.begin()
    try:
        yield
    finally:
        for kept in entered:
            kept.end()


class Block:
    """Memory with the kept values of one engine."""

    __slots__ = ("segment", "state", "step", "users", "_owner")

    def __init__(self, segment: Any, owner: KeptValues) -> None:
        self.segment, self._owner = segment, owner
        self.state: bytes | None = None  # of the parameters that the values were computed from
        self.step = 0  # the context that they were computed in
        self.users = 0  # forwards whose backward may still read them

    def use(self) -> Block:
        with self._owner.lock:
            self.users += 1
        return self

    def release(self) -> None:
        with self._owner.lock:
            self.users -= 1


class KeptValues:
    """The kept values of a session's engines, while ``accumulate`` is entered. Their memory stays for the next step."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run while the lock is held, and release a block of this thread.
        self.lock = threading.RLock()
        self._blocks: dict[Any, Block] = {}
        self._step = 0
        self._entered = 0

    @property
    def wanted(self) -> bool:
        return self._entered > 0

    def begin(self) -> None:
        with self.lock:
            self._entered += 1
            if self._entered == 1:
                self._step += 1

    def end(self) -> None:
        with self.lock:
            self._entered -= 1
            if self._entered == 0:
                # What this step did not use belongs to another precision, or to other calls.
                now = self._step
                self._blocks = {key: each for key, each in self._blocks.items() if each.step == now}

    def clear(self) -> None:
        with self.lock:
            self._blocks.clear()

    def lease(
        self, key: Any, size: int, state: bytes, target: Target, compute: Callable[[Block], None]
    ) -> Block:
        """Returns memory of ``size`` bytes with the values of the engine ``key`` for the parameters' ``state``. Calls
        ``compute`` if no call of this context has computed them."""
        key = target.arena_key(), key
        with self.lock:
            block = self._blocks.get(key)
            if block is not None and block.step == self._step and block.state == state:
                return block.use()
            if block is None or block.users:  # a backward still needs the earlier values
                block = self._idle(size, key) or Block(target.arena(size), self)
            self._blocks[key] = block
            block.state = None
            compute(block)
            block.state, block.step = state, self._step
            return block.use()

    def _idle(self, size: int, key: Any) -> Block | None:
        """Returns the memory of values of an earlier step, of another engine on the same stream."""
        for other, block in self._blocks.items():
            free = block.step != self._step and not block.users
            if free and other[0] == key[0] and block.segment.bytes == size:
                return self._blocks.pop(other)
        return None
