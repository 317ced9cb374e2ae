"""Prepares PyTorch and a module for tracing: plain code paths, and side effects that are undone."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import logging
import random
import sys
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
import torch.utils.checkpoint
from torch.fx import _lazy_graph_module
from torch.fx import config as fx_config
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, _ModuleStackTracer

from deepwell.errors import CaptureError
from deepwell.guards import Effects

_tracing = threading.RLock()


@contextlib.contextmanager
def quiet_tracing(grad: bool) -> Iterator[None]:
    """Traces on the plain code paths in this grad mode, one trace at a time, and restores global state.

    The fused inference paths of nn.TransformerEncoderLayer and nn.MultiheadAttention compute the same
    as the plain ones. nn.TransformerEncoder reads its mask to find whether it is causal, only to take a
    faster path; a graph applies the mask instead.
    """
    transformer = torch.nn.modules.transformer
    detect = getattr(transformer, "_detect_is_causal_mask", None)

    def declared_causal(mask: Any, is_causal: Optional[bool] = None, size: Any = None) -> bool:
        return is_causal is True

    with contextlib.ExitStack() as stack:
        stack.enter_context(_tracing)
        stack.enter_context(_collected())
        stack.enter_context(_in_this_thread_only())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(warnings.catch_warnings())
        # Warnings of tracers repeat the error, or concern code that is not the user's.
        warnings.simplefilter("ignore")
        stack.enter_context(_silent("torch.fx.experimental.symbolic_shapes"))
        stack.enter_context(_no_autocast_cache())
        stack.enter_context(_graphs_alone())
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
def _no_autocast_cache() -> Iterator[None]:
    """Keeps autocast from keeping casts of fake tensors."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _graphs_alone() -> Iterator[None]:
    """Keeps tracers from making what a capture does not read: each node's stack trace, and Python code of each graph
    after every change. Versions of PyTorch without these settings make both."""
    with contextlib.ExitStack() as stack:
        if hasattr(fx_config, "do_not_emit_stack_traces"):
            kept = fx_config.do_not_emit_stack_traces
            fx_config.do_not_emit_stack_traces = True
            stack.callback(setattr, fx_config, "do_not_emit_stack_traces", kept)
        if hasattr(_lazy_graph_module, "_use_lazy_graph_module"):
            stack.enter_context(_lazy_graph_module._use_lazy_graph_module(True))
        yield


@contextlib.contextmanager
def no_fake_cache() -> Iterator[None]:
    """Keeps fake tensors from caching the results of operations. Filling the cache takes longer than most operations,
    so that it pays only for a trace with many equal layers."""
    import torch._dynamo.config as config  # torch.export imports it; deepwell does not need it before

    if not hasattr(config, "fake_tensor_cache_enabled"):
        yield
        return
    kept = config.fake_tensor_cache_enabled
    config.fake_tensor_cache_enabled = False
    try:
        yield
    finally:
        config.fake_tensor_cache_enabled = kept


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Collects the garbage of tracers: cycles that hold parameters, which would outlive their model. Earlier objects
    are not examined, unless the program has frozen objects of its own."""
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if freezes:
            gc.unfreeze()


@contextlib.contextmanager
def _in_this_thread_only() -> Iterator[None]:
    """Limits tracers to this thread. They replace torch.nn.Module.__call__ and __getattr__ for the whole process; other
    threads get the originals meanwhile."""
    tracing = threading.get_ident()
    plain = {
        "call_module": lambda _tracer, _module, forward, args, kwargs: forward(*args, **kwargs),
        "getattr": lambda _tracer, _name, value, _proxies: value,
    }
    replaced = [
        (tracer, name, vars(tracer)[name])
        for tracer in (torch.fx.Tracer, PythonKeyTracer, _ModuleStackTracer)
        for name in plain
        if name in vars(tracer)
    ]

    def of_thread(traced: Callable[..., Any], untraced: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            return (traced if threading.get_ident() == tracing else untraced)(*args)

        return method

    for tracer, name, traced in replaced:
        setattr(tracer, name, of_thread(traced, plain[name]))
    try:
        yield
    finally:
        for tracer, name, traced in replaced:
            setattr(tracer, name, traced)


class _Discarding(io.TextIOBase):
    """Drops what the given thread writes and passes on to `stream` what others write."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        if threading.get_ident() != self._thread:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Drops what this thread prints to sys.stderr."""
    if sys.stderr is None:
        yield
        return
    with contextlib.redirect_stderr(_Discarding(sys.stderr, threading.get_ident())):
        yield


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
def unchanged(effects: Effects) -> Iterator[None]:
    """Undoes the side effects of a forward that is being traced: attributes and buffers that are fake
    tensors, items of lists, hooks (Hugging Face installs some at the first call that needs them), draws
    from Python's and NumPy's generators. Adds to `seen` what a graph would omit."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    seen = effects.seen
    try:
        yield
    finally:
        effects.undo()
        if random.getstate() != python_state:
            random.setstate(python_state)
            seen.append("draws from Python's random generator in its forward")
        if numpy_state is not None and numpy is not None:
            now = numpy.random.get_state()
            if now[2:] != numpy_state[2:] or not (now[1] == numpy_state[1]).all():
                numpy.random.set_state(numpy_state)
                seen.append("draws from NumPy's random generator in its forward")


@contextlib.contextmanager
def watched_autograd() -> Iterator[List[str]]:
    """Detects what a forward does to autograd that a trace does not show: functions with their own backward
    (torch.autograd.Function), hooks on tensors. Checkpoints that keep autograd unchanged
    (use_reentrant=False) are ignored, because the engine itself chooses what to recompute."""
    seen: List[str] = []
    tracing = threading.get_ident()
    function = torch.autograd.Function
    apply = function.__dict__["apply"]
    hook = torch.Tensor.register_hook
    checkpoint = torch.utils.checkpoint
    recording = checkpoint._checkpoint_without_reentrant_generator

    def watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracing and torch.is_grad_enabled():
            seen.append(f"has a backward of its own in its forward ({cls.__qualname__})")
        return apply.__get__(None, cls)(*args, **kwargs)

    def watched_hook(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracing:
            seen.append("registers a hook on a tensor in its forward")
        return hook(tensor, *args, **kwargs)

    def not_recording(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != tracing:
            return recording(*args, **kwargs)
        return nothing()

    def nothing() -> Iterator[None]:
        yield

    function.apply = classmethod(watched_apply)
    torch.Tensor.register_hook = watched_hook
    checkpoint._checkpoint_without_reentrant_generator = not_recording
    try:
        yield seen
    finally:
        function.apply = apply
        torch.Tensor.register_hook = hook
        checkpoint._checkpoint_without_reentrant_generator = recording


@dataclass
class Observed:
    """Observations made while the forward was traced."""

    pads_with_zeros: bool = False
    limits: List[Tuple[Any, int, int]] = field(default_factory=list)  # (size, lowest, highest)
    refusal: Optional[CaptureError] = None


@contextlib.contextmanager
def watched_encoder() -> Iterator[Observed]:
    """Detects nn.TransformerEncoder where it would use nested tensors."""
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


# Equivalent forms of Hugging Face's experts, apart from rounding. One of them has no data-dependent control flow.
_EXPERT_FORMS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")


@contextlib.contextmanager
def batched_experts(module: torch.nn.Module) -> Iterator[None]:
    """Selects the form of Hugging Face's experts that gathers each token's matrices. It has no loop over
    the chosen experts, and the recognizer turns it into a grouped_linear."""
    configs = {
        id(m.config): m.config
        for m in module.modules()
        if hasattr(m, "is_concatenated") and hasattr(m, "is_transposed")
        # Versions of transformers without the attribute spread experts over processes by hooks.
        if not getattr(m, "_is_expert_parallel", False)
        if hasattr(getattr(m, "config", None), "_experts_implementation")
    }
    before = []
    try:
        for config in configs.values():
            form = config._experts_implementation
            if form in _EXPERT_FORMS:
                before.append((config, form))
                config._experts_implementation = "batched_mm"
        yield
    finally:
        for config, form in before:
            config._experts_implementation = form


@contextlib.contextmanager
def settled_rope(
    module: torch.nn.Module, observed: Observed, positions_given: bool
) -> Iterator[None]:
    """Replaces the data-dependent part of Hugging Face's RoPE of type "dynamic".

    It computes new frequencies once a sequence is longer than any before, and restores the first ones
    for short sequences after that. Between the two limits it keeps its frequencies. A graph can express
    this range, for positions that count from 0, and the limits become relations on the size.
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

        m.__dict__["forward"] = forward  # `unchanged` removes it again
    yield
