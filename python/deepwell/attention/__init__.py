"""Attention that trains fast on NVIDIA GPUs, and the ways to use it from PyTorch."""

from deepwell.attention.functional import attention, packed_attention

__all__ = ["attention", "packed_attention"]
