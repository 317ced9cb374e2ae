"""Names of precisions, and the options of microscaled blocks."""

from __future__ import annotations

import dataclasses
import enum


class Precision(str, enum.Enum):
    """The format of a GEMM's operands. A member equals its name in lower case."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    MXFP6 = "mxfp6"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"

    @property
    def bits(self) -> int:
        """Bits of an element, without scales."""
        return {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "mxfp8": 8, "mxfp6": 6}.get(
            self.value, 4
        )

    @property
    def is_microscaled(self) -> bool:
        """True if blocks of 16 or 32 elements share a scale."""
        return self in (Precision.MXFP8, Precision.MXFP6, Precision.MXFP4, Precision.NVFP4)

    @property
    def requires_blackwell(self) -> bool:
        """True if only tensor cores from Blackwell on support it. A CPU computes the same numbers, more slowly."""
        return self.is_microscaled


@dataclasses.dataclass(frozen=True)
class MicroscalingConfig:
    """block_size: 32 (MX) or 16 (NVFP4). scale_rule (MX only): rceil, floor or ceil (docs/numbers.md)."""

    block_size: int = 32
    scale_rule: str = "rceil"

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32):
            raise ValueError(
                f"block_size is {self.block_size}: expected 32 (MXFP8, MXFP6, MXFP4) or 16 (NVFP4)"
            )
        if self.scale_rule not in ("rceil", "floor", "ceil"):
            raise ValueError(f"scale_rule is {self.scale_rule!r}: expected rceil, floor or ceil")
