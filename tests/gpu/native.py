"""Calls libdeepwell.so's attention through ctypes, without the extension or the package."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

_DTYPES = {torch.bfloat16: 3, torch.float16: 4}  # dw_dtype


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    ]


class Bias(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("key", ctypes.c_int64),
    ]


class Call(ctypes.Structure):
    """struct dw_attention of deepwell/attention.h."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("batch", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("seq_len_q", ctypes.c_int32),
        ("seq_len_kv", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("offsets_q", ctypes.c_void_p),
        ("offsets_k", ctypes.c_void_p),
        ("total_q", ctypes.c_int64),
        ("total_k", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("bottom_right", ctypes.c_bool),
        ("dropout", ctypes.c_float),
        ("seed", ctypes.c_int64),
        ("seed_offset", ctypes.c_int64),
        ("seed_memory", ctypes.c_void_p),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("lse", ctypes.c_void_p),
        ("d_o", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("deterministic", ctypes.c_bool),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("kernel", ctypes.c_char_p),
        ("dropout_stream", ctypes.c_int64),
        ("bias_kind", ctypes.c_int),
        ("bias", Bias),
        ("d_bias", Bias),
    ]


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that torch allocated on the host, registered with an emulated driver (deepwell
    emulate)."""
    if tensor.device.type == "cpu" and os.environ.get("DEEPWELL_EMULATE_ARCH"):
        driver = ctypes.CDLL("libcuda.so.1")
        memory = tensor.untyped_storage()
        address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes())
        assert driver.cuInit(0) == 0 and driver.cuMemHostRegister_v2(address, size, 0) == 0
    return tensor


def described(tensor: torch.Tensor) -> Tensor:
    """[batch, heads, rows, head_dim], or packed [heads, total, head_dim]."""
    strides = [0, *tensor.stride()] if tensor.dim() == 3 else list(tensor.stride())
    assert strides[3] == 1 or tensor.shape[-1] == 1
    return Tensor(tensor.data_ptr(), *strides[:3])


def described_bias(tensor: torch.Tensor) -> Bias:
    """Four axes, of which those of length 1 repeat."""
    strides = (0 if n == 1 else stride for n, stride in zip(tensor.shape, tensor.stride()))
    return Bias(tensor.data_ptr(), *strides)


class Library:
    """Each function returns "" or the library's message."""

    def __init__(self, path: str | Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.dw_last_error.restype = ctypes.c_char_p
        self._library.dw_status_name.restype = ctypes.c_char_p

    def dtype(self, dtype: torch.dtype) -> int:
        return _DTYPES[dtype]

    def _said(self, status: int) -> str:
        if status == 0:
            return ""
        name = self._library.dw_status_name(status).decode()
        return f"{name}: {self._library.dw_last_error().decode()}"

    def supported(self, call: Call, backward: bool) -> str:
        function = self._library.dw_attention_supported
        return self._said(function(ctypes.byref(call), ctypes.c_bool(backward)))

    def forward(self, call: Call) -> str:
        return self._said(self._library.dw_attention_forward(ctypes.byref(call)))

    def backward(self, call: Call) -> str:
        return self._said(self._library.dw_attention_backward(ctypes.byref(call)))

    def workspace(self, call: Call) -> int:
        size = ctypes.c_size_t()
        said = self._said(
            self._library.dw_attention_backward_workspace(ctypes.byref(call), ctypes.byref(size))
        )
        if said:
            raise RuntimeError(said)
        return size.value
