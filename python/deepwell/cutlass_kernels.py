"""An alias of deepwell.kernels.cutlass_bindings."""

from deepwell.kernels import cutlass_bindings as _bindings
from deepwell.kernels.cutlass_bindings import (
    CutlassConfig,
    CutlassKernel,
    GroupedGEMMKernel,
    KernelProfiler,
    MicroscaleManager,
)

__all__ = [
    "CUTLASS_AVAILABLE",
    "CutlassConfig",
    "CutlassKernel",
    "GroupedGEMMKernel",
    "KernelProfiler",
    "MicroscaleManager",
]

CUTLASS_AVAILABLE: bool  # computed on first use, by __getattr__


def __getattr__(name: str):
    return getattr(_bindings, name)
