"""Number formats of 16 bits and fewer, and quantization in blocks that share a scale.

    q = numbers.quantize(x, "mxfp8")        # q.codes, q.scales
    y = numbers.dequantize(q)

Tensors must be on the CPU. docs/numbers.md has the rules, layouts and their sources.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError

_FORMATS, _SCHEMES = _deepwell.number_names()
FORMATS, SCHEMES = tuple(_FORMATS), tuple(_SCHEMES)
SCALE_RULES = ("default", "rceil", "floor", "ceil", "amax")
OVERFLOWS = ("saturate", "nonfinite")
ROUNDINGS = ("nearest", "stochastic")

# torch's dtypes of codes and scales. Formats that torch lacks are uint8, one code each.
_TYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float4_e2m1fn_x2,
    "e8m0": torch.float8_e8m0fnu,
    "ue4m3": torch.float8_e4m3fn,
}


def _check(what: str, name: str, names) -> None:
    if name not in names:
        raise ValueError(f"{what} is {name!r}: expected one of {', '.join(names)}")


def _choose(what: str, name: str, names: tuple) -> int:
    _check(what, name, names)
    return names.index(name)


def _number(what: str, name: str, numbers: dict) -> int:
    _check(what, name, numbers)
    return numbers[name]


def _call(function, *arguments):
    try:
        return function(*arguments)
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None


def _f32(x: torch.Tensor, what: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{what} is {type(x).__name__}: expected a tensor")
    if x.device.type != "cpu":
        raise UnsupportedError(f"{what} is on {x.device}: move it to the CPU first (x.cpu())")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{what} is {x.dtype}: expected float32, bfloat16 or float16")
    return x.detach().to(torch.float32)


def _bytes(x: torch.Tensor, what: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{what} is {type(x).__name__}: expected a tensor")
    if x.device.type != "cpu":
        raise UnsupportedError(f"{what} is on {x.device}: move it to the CPU first (x.cpu())")
    return x.detach().contiguous().view(torch.uint8) if x.dtype != torch.uint8 else x.contiguous()


# ---- single numbers ------------------------------------------------------------------------------


def encode(
    x: torch.Tensor,
    format: str,
    *,
    overflow: str = "saturate",
    rounding: str = "nearest",
    seed: int = 0,
    offset: int = 0,
    stream: int = 0,
) -> torch.Tensor:
    """Returns the codes of x, in torch's dtype if it has one, else uint8.

    e2m1 packs two codes into a byte along the last axis, which must be even.
    """
    number = _number("format", format, _FORMATS)
    values = _f32(x, "x").contiguous()
    shape = list(values.shape)
    if format == "e2m1":
        if not shape or shape[-1] % 2:
            raise ValueError(f"x has shape {shape}: e2m1 packs pairs, the last axis must be even")
        shape[-1] //= 2
    codes = torch.empty(shape, dtype=_TYPES.get(format, torch.uint8))
    _call(
        _deepwell.encode,
        number,
        values.numel(),
        values.data_ptr(),
        _choose("overflow", overflow, OVERFLOWS),
        _choose("rounding", rounding, ROUNDINGS),
        seed,
        offset,
        stream,
        codes.data_ptr(),
    )
    return codes


def decode(codes: torch.Tensor, format: str) -> torch.Tensor:
    """Returns the exact float32 values of codes from `encode`."""
    number = _number("format", format, _FORMATS)
    raw = _bytes(codes, "codes")
    shape = list(codes.shape)
    if format == "e2m1":
        if not shape:
            raise ValueError("codes is a scalar: e2m1 holds pairs, it needs an axis")
        shape[-1] *= 2
    count = math.prod(shape)
    expected = (
        count * 2 if format in ("bf16", "f16") else (count + 1) // 2 if format == "e2m1" else count
    )
    if raw.numel() != expected:
        raise TypeError(f"codes is {codes.dtype}: expected {_TYPES.get(format, torch.uint8)}")
    values = torch.empty(shape, dtype=torch.float32)
    _call(_deepwell.decode, number, count, raw.data_ptr(), values.data_ptr())
    return values


def fp6_pack(codes: torch.Tensor) -> torch.Tensor:
    """Packs six-bit codes, one per byte, into three bytes per four codes (flat)."""
    raw = _bytes(codes, "codes")
    packed = torch.empty((6 * raw.numel() + 7) // 8, dtype=torch.uint8)
    _call(_deepwell.fp6_pack, raw.numel(), raw.data_ptr(), packed.data_ptr())
    return packed


def fp6_unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first `count` codes."""
    raw = _bytes(packed, "packed")
    if count < 0 or (6 * count + 7) // 8 > raw.numel():
        raise ValueError(f"count is {count}, and packed has {raw.numel()} bytes: too few")
    codes = torch.empty(count, dtype=torch.uint8)
    _call(_deepwell.fp6_unpack, count, raw.data_ptr(), codes.data_ptr())
    return codes


# ---- blocks ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor quantized in blocks.

    ``codes``: the codes with the reduction axis last (axis 0: transposed); e2m1 codes are packed in pairs along it.
    ``scales``: one per block, float8_e8m0fnu, float8_e4m3fn (nvfp4) or float32 (fp8-block, "amax").
    ``shape``: the shape of the original tensor.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: float
    scheme: str
    scale_rule: str
    square: bool
    axis: int
    shape: tuple


def _options(scheme, scale_rule, square, axis, rounding, seed, offset, stream, tensor_scale):
    return (
        _number("scheme", scheme, _SCHEMES),
        _choose("scale_rule", scale_rule, SCALE_RULES),
        int(bool(square)),
        axis,
        _choose("rounding", rounding, ROUNDINGS),
        seed,
        offset,
        stream,
        tensor_scale,
    )


def _matrix_axis(shape: tuple, axis: int) -> int:
    """Returns 1 if `axis` is the last (all others are rows), 0 if it is the first axis of a matrix."""
    if len(shape) == 0:
        raise ValueError("x is a scalar: quantization needs an axis")
    if axis in (-1, len(shape) - 1):
        return 1
    if axis in (0, -2) and len(shape) == 2:
        return 0
    raise ValueError(
        f"axis is {axis} for shape {tuple(shape)}: expected the last, or 0 of a matrix"
    )


def _rows(shape: tuple) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _strided(x: torch.Tensor) -> torch.Tensor:
    """Returns x as a matrix; its rows may be strided."""
    rows, cols = _rows(x.shape)
    matrix = x if x.dim() == 2 else x.reshape(rows, cols)
    fits = matrix.stride(1) == 1 and matrix.stride(0) >= cols
    return matrix if fits or matrix.numel() == 0 else matrix.contiguous()


def nvfp4_tensor_scale(x: torch.Tensor) -> float:
    """Returns amax / (448 * 6), with amax over finite elements."""
    matrix = _strided(
        _f32(x, "x").reshape(-1, x.shape[-1]) if x.dim() else _f32(x, "x")[None, None]
    )
    rows, cols = matrix.shape
    stride = max(matrix.stride(0), cols)
    return _call(_deepwell.nvfp4_tensor_scale, rows, cols, matrix.data_ptr(), stride)[0]


def quantize(
    x: torch.Tensor,
    scheme: str = "mxfp8",
    *,
    axis: int = -1,
    scale_rule: str = "default",
    square: bool = False,
    rounding: str = "nearest",
    seed: int = 0,
    offset: int = 0,
    stream: int = 0,
    tensor_scale: float | None = None,
) -> Quantized:
    """Quantizes x in blocks along `axis`. tensor_scale None: computed from x's amax for nvfp4, else not used."""
    _check("scheme", scheme, SCHEMES)
    values = _f32(x, "x")
    matrix_axis = _matrix_axis(values.shape, axis)
    if tensor_scale is None:
        tensor_scale = nvfp4_tensor_scale(values) if scheme == "nvfp4" else 1.0
    options = _options(
        scheme, scale_rule, square, matrix_axis, rounding, seed, offset, stream, tensor_scale
    )
    matrix = _strided(values)
    rows, cols = _rows(values.shape)
    layout = _call(_deepwell.block_layout, options, rows, cols)
    outer, _, row_bytes, scale_rows, scale_cols, element, scale = layout
    leading = tuple(values.shape[:-1]) if matrix_axis else (outer,)
    codes = torch.empty((*leading, row_bytes), dtype=_TYPES.get(element, torch.uint8))
    scale_type = _TYPES[scale]
    scale_leading = (scale_rows,) if square else leading
    scales = torch.empty((*scale_leading, scale_cols), dtype=scale_type)
    _call(
        _deepwell.block_quantize,
        options,
        rows,
        cols,
        matrix.data_ptr(),
        max(matrix.stride(0), cols),
        codes.data_ptr(),
        0,
        scales.data_ptr(),
    )
    shape = tuple(values.shape)
    return Quantized(
        codes, scales, tensor_scale, scheme, scale_rule, bool(square), matrix_axis, shape
    )


def dequantize(q: Quantized) -> torch.Tensor:
    """Returns the values as float32, in the original shape."""
    options = _options(q.scheme, q.scale_rule, q.square, q.axis, "nearest", 0, 0, 0, q.tensor_scale)
    rows, cols = _rows(q.shape)
    layout = _call(_deepwell.block_layout, options, rows, cols)
    outer, _, row_bytes, scale_rows, scale_cols, _, scale = layout
    codes = _bytes(q.codes, "codes")
    if codes.numel() != outer * row_bytes:
        raise ValueError(
            f"codes has {codes.numel()} bytes: a {q.scheme} tensor of shape {tuple(q.shape)} has "
            f"{outer * row_bytes}"
        )
    f32 = scale == "f32"
    if (q.scales.dtype == torch.float32) != f32 or q.scales.numel() != scale_rows * scale_cols:
        raise ValueError(
            f"scales is {q.scales.dtype} of shape {tuple(q.scales.shape)}: expected "
            f"{scale_rows} x {scale_cols} of {_TYPES[scale]}"
        )
    scales = q.scales.detach().contiguous() if f32 else _bytes(q.scales, "scales")
    result = torch.empty(q.shape, dtype=torch.float32)
    _call(
        _deepwell.block_dequantize,
        options,
        rows,
        cols,
        codes.data_ptr(),
        0,
        scales.data_ptr(),
        result.data_ptr(),
        cols,
    )
    return result


# ---- Hadamard, order of scales -----------------------------------------------------------------------


def hadamard(
    x: torch.Tensor,
    size: int = 16,
    *,
    axis: int = -1,
    inverse: bool = False,
    random_signs: bool = True,
    seed: int = 0,
    offset: int = 0,
    stream: int = 0,
) -> torch.Tensor:
    """Random Hadamard transform of runs of `size` along `axis`, or its inverse."""
    values = _f32(x, "x")
    matrix_axis = _matrix_axis(values.shape, axis)
    matrix = _strided(values)
    rows, cols = _rows(values.shape)
    result = torch.empty(values.shape, dtype=torch.float32)
    _call(
        _deepwell.hadamard,
        size,
        matrix_axis,
        inverse,
        random_signs,
        seed,
        offset,
        stream,
        rows,
        cols,
        matrix.data_ptr(),
        max(matrix.stride(0), cols),
        result.data_ptr(),
        cols,
    )
    return result


def swizzle_scales(scales: torch.Tensor, rows: int | None = None, repeat: int = 1) -> torch.Tensor:
    """Arranges one-byte scales [rows, cols] in the order that tensor cores read (flat, padded to 128 x 4).

    repeat > 1: each row of scales serves `repeat` rows of the operand, which has `rows` rows.
    """
    raw = _bytes(scales, "scales")
    if scales.dim() != 2 or scales.element_size() != 1:
        raise ValueError(
            f"scales is {scales.dtype} of shape {tuple(scales.shape)}: expected a matrix of bytes"
        )
    own, cols = scales.shape
    rows = own * repeat if rows is None else rows
    if repeat < 1 or -(-rows // repeat) != own:
        raise ValueError(f"rows is {rows} and repeat {repeat}: that is not {own} rows of scales")
    bytes_ = _deepwell.scales_swizzled_bytes(rows, cols)
    swizzled = torch.empty(bytes_, dtype=torch.uint8)
    _call(_deepwell.scales_swizzle, rows, cols, repeat, raw.data_ptr(), swizzled.data_ptr())
    return swizzled.view(scales.dtype)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, cols: int, repeat: int = 1) -> torch.Tensor:
    """Returns the scales [ceil(rows / repeat), cols] from the result of `swizzle_scales`."""
    raw = _bytes(swizzled, "swizzled")
    if repeat < 1 or raw.numel() != _deepwell.scales_swizzled_bytes(rows, cols):
        raise ValueError(
            f"swizzled has {raw.numel()} bytes: not those of scales [{rows}, {cols}], repeat {repeat}"
        )
    scales = torch.empty((-(-rows // repeat), cols), dtype=torch.uint8)
    _call(_deepwell.scales_unswizzle, rows, cols, repeat, raw.data_ptr(), scales.data_ptr())
    return scales.view(swizzled.dtype)
