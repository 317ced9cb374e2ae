"""Microscaling under the names that CUTLASS users know. The CUTLASS provider itself is not built yet."""

from __future__ import annotations

import torch

from deepwell import numbers
from deepwell.errors import UnsupportedError

CUTLASS_AVAILABLE = False

__all__ = ["CUTLASS_AVAILABLE", "MicroscaleManager"]


def __getattr__(name: str):
    if name in ("CutlassConfig", "CutlassKernel", "GroupedGEMMKernel", "KernelProfiler"):
        raise UnsupportedError(
            f"{name} needs the CUTLASS provider, which this version does not have: "
            "use deepwell.optimize(model), or deepwell.numbers for the number formats"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_block(block_size: int, only: int, scheme: str) -> None:
    if block_size != only:
        raise UnsupportedError(f"block_size is {block_size}: {scheme} has blocks of {only}")


class MicroscaleManager:
    """Quantization along the last axis, and back."""

    @staticmethod
    def quantize_mxfp8(
        x: torch.Tensor, block_size: int = 32, scale_rule: str = "rceil"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(elements float8_e4m3fn, scales float8_e8m0fnu)"""
        _check_block(block_size, 32, "MXFP8")
        q = numbers.quantize(x, "mxfp8_e4m3", scale_rule=scale_rule)
        return q.codes, q.scales

    @staticmethod
    def dequantize_mxfp8(
        elements: torch.Tensor, scales: torch.Tensor, block_size: int = 32
    ) -> torch.Tensor:
        _check_block(block_size, 32, "MXFP8")
        shape = tuple(elements.shape)
        return numbers.dequantize(
            numbers.Quantized(elements, scales, 1.0, "mxfp8_e4m3", "default", False, 1, shape)
        )

    @staticmethod
    def quantize_nvfp4(
        x: torch.Tensor, block_size: int = 16, tensor_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(elements float4_e2m1fn_x2, scales float8_e4m3fn); numbers.nvfp4_tensor_scale(x) gives the scale that
        uses the whole range. The last axis must be even."""
        _check_block(block_size, 16, "NVFP4")
        if x.dim() == 0 or x.shape[-1] % 2:
            raise ValueError(
                f"x has shape {tuple(x.shape)}: NVFP4 packs pairs, the last axis must be even"
            )
        q = numbers.quantize(x, "nvfp4", tensor_scale=tensor_scale)
        return q.codes, q.scales

    @staticmethod
    def dequantize_nvfp4(
        elements: torch.Tensor,
        scales: torch.Tensor,
        block_size: int = 16,
        tensor_scale: float = 1.0,
    ) -> torch.Tensor:
        _check_block(block_size, 16, "NVFP4")
        shape = (*elements.shape[:-1], 2 * elements.shape[-1])
        return numbers.dequantize(
            numbers.Quantized(elements, scales, tensor_scale, "nvfp4", "default", False, 1, shape)
        )
