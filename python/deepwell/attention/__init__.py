"""Attention that trains fast on NVIDIA GPUs, and its ways into PyTorch."""

from deepwell.attention.functional import attention, packed_attention

__all__ = ["attention", "packed_attention"]
