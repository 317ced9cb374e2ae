"""Attention modules: BlackwellFlashAttention, DWSelfAttention."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import torch

from deepwell.attention import functional, multihead
from deepwell.errors import UnsupportedError


@dataclass
class BlackwellConfig:
    """How the attention modules run.

    Args:
        use_flash_attention: False always uses PyTorch's attention.
        use_pytorch_fallback: True lets PyTorch's attention run what Deepwell does not support. False raises
            ``deepwell.UnsupportedError`` with the reason instead.
        enable_profiling: each module stores the seconds of its last call in ``last_seconds`` (it waits for the GPU).
    """

    use_flash_attention: bool = True
    use_pytorch_fallback: bool = False
    enable_profiling: bool = False


class _Profiled:
    """Stores the seconds of a call, including the GPU's work, in ``module.last_seconds``; None if not measured."""

    def __init__(self, module: torch.nn.Module, tensor: torch.Tensor) -> None:
        self._module = module
        self._device = tensor.device if module.config.enable_profiling else None

    def _wait(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __enter__(self) -> None:
        if self._device is not None:
            self._begin = self._wait()

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            self._module.last_seconds = self._wait() - self._begin


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks for [batch, heads, seq_len, head_dim] each, with as many keys as values."""
    given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"BlackwellFlashAttention needs q, k and v of shape [batch, heads, seq_len, head_dim]; got {given}"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "BlackwellFlashAttention: q, k and v must have the same batch, q and k the same head_dim, k and v the same heads "
            f"and seq_len; got {given}"
        )
    if q.shape[1] % max(k.shape[1], 1):
        raise ValueError(
            f"BlackwellFlashAttention: the {q.shape[1]} heads of q must be a multiple of the {k.shape[1]} of k and v"
        )


class BlackwellFlashAttention(torch.nn.Module):
    """``forward(q, k, v, causal=False)`` on [batch, heads, seq_len, head_dim]; differentiable, without parameters.

    Other shapes raise ``ValueError``. ``causal`` aligns the last query with the last key (bottom-right), which is the
    usual mask for equal lengths.
    """

    def __init__(self, config: BlackwellConfig | None = None) -> None:
        super().__init__()
        self.config = BlackwellConfig() if config is None else config
        self.last_seconds: float | None = None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
    ) -> torch.Tensor:
        _check_shapes(q, k, v)
        with _Profiled(self, q):
            window = (-1, 0) if causal else (-1, -1)
            if not self.config.use_flash_attention:
                return functional.by_pytorch(q, k, v, window=window, bottom_right=True)
            # On the CPU PyTorch's attention is the definition, so this is not a fallback.
            if not self.config.use_pytorch_fallback and q.device.type != "cpu":
                reason = functional.why_pytorch(q, k, v, window, True)
                if reason:
                    raise UnsupportedError(
                        f"Deepwell's attention does not support this call: {reason}. "
                        "BlackwellConfig(use_pytorch_fallback=True) lets PyTorch run it"
                    )
            return functional.attention(q, k, v, window=window, bottom_right=True)


class DWSelfAttention(torch.nn.MultiheadAttention):
    """nn.MultiheadAttention, with its parameters, ``state_dict``, arguments and results, through Deepwell.

    ``DWSelfAttention(hidden_dim, num_heads, config)``; all other arguments of nn.MultiheadAttention are keyword
    arguments. PyTorch's forward runs what only it supports (masks other than padding, weights after dropout).
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        config: BlackwellConfig | None = None,
        **others: object,
    ) -> None:
        if config is not None and not isinstance(config, BlackwellConfig):
            raise TypeError(
                f"DWSelfAttention: config must be a BlackwellConfig, not {type(config).__name__}; pass arguments of "
                "nn.MultiheadAttention such as dropout by name"
            )
        super().__init__(hidden_dim, num_heads, **others)
        self.config = BlackwellConfig() if config is None else config
        self.last_seconds: float | None = None
        self.fallbacks: Counter[str] = Counter()  # calls that PyTorch's forward ran, by reason

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As nn.MultiheadAttention's; ``key`` and ``value`` default to ``query``."""
        key = query if key is None else key
        value = key if value is None else value
        with _Profiled(self, query):
            given = (query, key, value, key_padding_mask, need_weights, attn_mask)
            if not self.config.use_flash_attention:
                return super().forward(*given, average_attn_weights, is_causal)
            return multihead.run(self, self.fallbacks, *given, average_attn_weights, is_causal)
