"""The state of PyTorch and of a module while it is traced: plain code paths, nothing left."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from deepwell.errors import CaptureError

_tracing = threading.RLock()


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Tracing on the plain code paths, one at a time, leaving global state as it was.

    The fused inference paths of nn.TransformerEncoderLayer and nn.MultiheadAttention compute what
    the plain ones do. nn.TransformerEncoder reads its mask to find out whether it is causal, only
    to take a faster path: a graph does not, and applies the mask.
    """
    transformer = torch.nn.modules.transformer
    detect = getattr(transformer, "_detect_is_causal_mask", None)

    def declared_causal(mask: Any, is_causal: Optional[bool] = None, size: Any = None) -> bool:
        return is_causal is True

    with contextlib.ExitStack() as stack:
        stack.enter_context(_tracing)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        # What tracers say on the way is either in the error or about code that is not the user's.
        warnings.simplefilter("ignore")
        stack.enter_context(_silent("torch.fx.experimental.symbolic_shapes"))
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        if detect is not None:
            transformer._detect_is_causal_mask = declared_causal
        try:
            yield
        finally:
            if detect is not None:
                transformer._detect_is_causal_mask = detect
            torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def _silent(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Undoes what a forward that is being traced leaves in its modules: attributes and buffers that
    are fake tensors, hooks (Hugging Face installs some at the first call that needs them)."""
    saved = []
    for m in module.modules():
        tables = [(t, dict(t)) for t in m.__dict__.values() if isinstance(t, dict)]
        saved.append((m.__dict__, dict(m.__dict__), tables))
    try:
        yield
    finally:
        for attributes, before, tables in saved:
            for name in [n for n in attributes if n not in before]:
                del attributes[name]
            attributes.update(before)
            for table, content in tables:
                if _identities(table) != _identities(content):
                    table.clear()
                    table.update(content)


def _identities(table: Dict[Any, Any]) -> List[Tuple[Any, int]]:
    return [(key, id(value)) for key, value in table.items()]


@dataclass
class Observed:
    """What was seen while the forward was traced."""

    pads_with_zeros: bool = False
    limits: List[Tuple[Any, int, int]] = field(default_factory=list)  # (size, lowest, highest)
    refusal: Optional[CaptureError] = None


@contextlib.contextmanager
def watched_encoder() -> Iterator[Observed]:
    """Notices nn.TransformerEncoder where it would use nested tensors."""
    observed = Observed()
    forward = torch.nn.TransformerEncoder.forward

    def watched(
        self: Any,
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: Optional[bool] = None,
    ) -> Any:
        nested = getattr(self, "use_nested_tensor", False) and not self.training
        if nested and src_key_padding_mask is not None:
            observed.pads_with_zeros = True
        return forward(self, src, mask, src_key_padding_mask, is_causal)

    torch.nn.TransformerEncoder.forward = watched
    try:
        yield observed
    finally:
        torch.nn.TransformerEncoder.forward = forward


@contextlib.contextmanager
def settled_rope(
    module: torch.nn.Module, observed: Observed, positions_given: bool
) -> Iterator[None]:
    """Hugging Face's RoPE of type "dynamic" without its look at the largest position.

    It computes new frequencies once a sequence is longer than any before, and the first ones again
    for short sequences after that. Between the two limits it uses the frequencies it has: that is
    what a graph can say, for positions that count from 0, and the limits become relations on the
    size.
    """
    for m in module.modules():
        kind = getattr(m, "rope_type", None)
        plain = inspect.unwrap(type(m).forward)
        if not (isinstance(kind, str) and "dynamic" in kind) or plain is type(m).forward:
            continue
        longest, original = int(m.max_seq_len_cached), int(m.original_max_seq_len)
        shortest = original if longest > original else 0

        def forward(
            x: Any,
            position_ids: Any,
            *rest: Any,
            _m: Any = m,
            _plain: Any = plain,
            _limits: Tuple[int, int] = (shortest, longest),
            **named: Any,
        ) -> Any:
            if positions_given:
                observed.refusal = CaptureError(
                    "RoPE of type 'dynamic' depends on the values of position_ids; call the model "
                    "without them, or choose another rope_type"
                )
            size, (low, high) = position_ids.shape[-1], _limits
            if isinstance(size, int) and not low <= size <= high:
                observed.refusal = CaptureError(
                    f"RoPE of type 'dynamic' computes new frequencies for {size} tokens; it keeps "
                    f"those it has from {low} to {high}"
                )
            observed.limits.append((size, low, high))
            with torch.no_grad():
                return _plain(_m, x, position_ids, *rest, **named)

        m.__dict__["forward"] = forward  # `unchanged` takes it away again
    yield
