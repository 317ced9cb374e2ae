"""Microscaling under the names that CUTLASS users know, and whether CUTLASS's own kernels run here.

CUTLASS's kernels belong to an optional library, which C calls by the names in ``deepwell/gemm.h`` (docs/cutlass.md).
This module has no classes for them yet.
"""

from __future__ import annotations

import functools
import json

import torch

from deepwell import _deepwell, numbers
from deepwell.errors import UnsupportedError
from deepwell.machine import probe

__all__ = ["CUTLASS_AVAILABLE", "MicroscaleManager"]

CUTLASS_AVAILABLE: bool  # computed on first use, by __getattr__

_NOT_BUILT = ("CutlassConfig", "CutlassKernel", "GroupedGEMMKernel", "KernelProfiler")


@functools.cache
def _fits_a_gpu() -> bool:
    """Returns whether libdeepwell_cutlass.so exists and has kernels for one of this machine's GPUs."""
    kernels = [k for k in json.loads(_deepwell.gpu_kernels()) if k["name"].startswith("cutlass.")]
    if not kernels:
        return False
    targets = {target for kernel in kernels for target in kernel["architectures"].split()}
    return any(gpu.sm_version in targets for gpu in probe().gpus)


def __getattr__(name: str):
    if name == "CUTLASS_AVAILABLE":
        return _fits_a_gpu()
    if name in _NOT_BUILT:
        raise AttributeError(
            f"module {__name__!r} has no {name}: Python classes for CUTLASS's kernels are not built yet. Call the "
            "kernels of `make cutlass` from C by name (docs/cutlass.md); for models use deepwell.optimize, for "
            "number formats deepwell.numbers"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_block(block_size: int, only: int, scheme: str) -> None:
    if block_size != only:
        raise UnsupportedError(f"block_size is {block_size}: {scheme} has blocks of {only}")


class MicroscaleManager:
    """Quantizes along the last axis, and dequantizes."""

    @staticmethod
    def quantize_mxfp8(
        x: torch.Tensor, block_size: int = 32, scale_rule: str = "rceil"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (elements float8_e4m3fn, scales float8_e8m0fnu)."""
        _check_block(block_size, 32, "MXFP8")
        q = numbers.quantize(x, "mxfp8", scale_rule=scale_rule)
        return q.codes, q.scales

    @staticmethod
    def dequantize_mxfp8(
        elements: torch.Tensor, scales: torch.Tensor, block_size: int = 32
    ) -> torch.Tensor:
        _check_block(block_size, 32, "MXFP8")
        shape = tuple(elements.shape)
        return numbers.dequantize(
            numbers.Quantized(elements, scales, 1.0, "mxfp8", "default", False, 1, shape)
        )

    @staticmethod
    def quantize_nvfp4(
        x: torch.Tensor, block_size: int = 16, tensor_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (elements float4_e2m1fn_x2, scales float8_e4m3fn). numbers.nvfp4_tensor_scale(x) gives the scale that
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
