"""Number formats: compared bit for bit with ml_dtypes, torch and torchao, and with
number_rules.py."""

import ast
import contextlib
import dataclasses
import importlib.util
import io
import logging
import math
import pathlib
import warnings

import deepwell as dw
import ml_dtypes
import number_rules as rules
import numpy as np
import pytest
import torch
from deepwell import numbers

ML_TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
# These tests cast NaN and values that overflow.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MX = ["mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp6-e2m3", "mxfp4"]
QUICK_BLOCKS = 1 << 15
MILLION = 1_000_000


@pytest.fixture(scope="module")
def torchao():
    """Returns torchao's formats. Its warnings about kernels that it cannot load are suppressed."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            from torchao.prototype.mx_formats import config, mx_tensor, nvfp4_tensor, utils
        finally:
            logging.disable(logging.NOTSET)
    return {
        "mx": mx_tensor,
        "nvfp4": nvfp4_tensor,
        "utils": utils,
        "rule": config.ScaleCalculationMode,
    }


def raw(codes, name):
    """Returns the codes as integers, one for each element."""
    if name in ("bf16", "f16"):
        return codes.view(torch.int16).numpy().view(np.uint16)
    bytes_ = codes.view(torch.uint8).numpy()
    if name != "e2m1":
        return bytes_
    pairs = np.stack([bytes_ & 15, bytes_ >> 4], -1)
    return pairs.reshape(*bytes_.shape[:-1], 2 * bytes_.shape[-1])


def encode(x, name, **options):
    if name == "e2m1" and len(x) % 2:
        return encode(np.append(x, np.float32(0)), name, **options)[:-1]
    return raw(numbers.encode(torch.from_numpy(x), name, **options), name)


def decode(codes, name):
    codes = np.asarray(codes)
    if name in ("bf16", "f16"):
        tensor = torch.from_numpy(codes.astype(np.uint16).view(np.int16))
        tensor = tensor.view(torch.bfloat16 if name == "bf16" else torch.float16)
    elif name == "e2m1":
        low, high = codes[0::2], codes[1::2]
        tensor = torch.from_numpy((low | high << 4).astype(np.uint8))
    else:
        tensor = torch.from_numpy(codes.astype(np.uint8))
    return numbers.decode(tensor, name).numpy()


def random_bits(count, seed):
    words = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return words.view(np.float32)


def neighbours(x):
    """Returns x and its float32 neighbours; both signs."""
    x = np.asarray(x, dtype=np.float32)
    up, down = np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))
    x = np.concatenate([x, up, down])
    return np.concatenate([x, -x])


def same_or_nan(a, b):
    return np.array_equal(a, b, equal_nan=True)


# ---- single numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rules.FIELDS)
def test_every_code_has_the_documented_value(name):
    bits = rules.FIELDS[name][4]
    codes = np.arange(1 << (bits - (name == "ue4m3")), dtype=np.uint16)
    values = decode(codes, name)
    assert same_or_nan(values.astype(np.float64), rules.value(codes, name))
    nan = np.isnan(values)
    assert np.array_equal(np.signbit(values), codes & rules.sign_bit(name) != 0)
    if name in ML_TYPES:
        stored = codes.astype(np.uint16 if bits == 16 else np.uint8).view(ML_TYPES[name])
        assert same_or_nan(values, stored.astype(np.float32))
    if name in ("e4m3", "e5m2"):
        kind = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
        peer = torch.from_numpy(codes.astype(np.uint8)).view(kind).float().numpy()
        assert same_or_nan(values, peer)
    # A number converts back to its code.
    finite = ~nan
    assert np.array_equal(encode(values, name, overflow="nonfinite")[finite], codes[finite])


def test_every_scale_code_has_the_documented_value():
    codes = np.arange(256, dtype=np.uint8)
    values = decode(codes, "e8m0")
    assert same_or_nan(values, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    peer = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy()
    assert same_or_nan(values, peer)
    assert np.array_equal(encode(values, "e8m0"), codes)


def difficult(name):
    """Returns every number and midpoint, the ends of the range, special values, and random bits."""
    values = np.append(rules.grid(name), rules.beyond(name))
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2])
    with np.errstate(over="ignore"):
        points = points.astype(np.float32)  # exact, but larger than bf16's largest number
    special = [0.0, np.inf, np.nan, 2.0**-149, 2.0**-126, 3.4028235e38, 1.0]
    count = 1 << 20
    return np.concatenate([neighbours(points), neighbours(special), random_bits(count, 1)])


@pytest.mark.parametrize("name", rules.FIELDS)
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
def test_encoding_is_exact(name, overflow):
    x = difficult(name)
    codes = encode(x, name, overflow=overflow)
    expected = rules.cast(x, name, overflow)
    nan = np.isnan(x)
    compared = ~nan if name in ("bf16", "f16") else np.ones_like(nan)
    wrong = compared & (codes != expected)
    assert not wrong.any(), (x[wrong][:5], codes[wrong][:5], expected[wrong][:5])
    if name in ("bf16", "f16"):  # payloads differ between implementations
        assert np.isnan(decode(codes[nan], name)).all()
        assert np.array_equal(codes[nan] >> 15, np.signbit(x[nan]))
    if name in ML_TYPES and overflow == "nonfinite":
        peer = x.astype(ML_TYPES[name]).view(np.uint16 if name in ("bf16", "f16") else np.uint8)
        # NaNs that ml_dtypes does not map to 0x7F: e5m2 0x7E, e2m1 -0.
        assert np.array_equal(codes[~nan], peer[~nan])
    if (name, overflow) in (("e4m3", "saturate"), ("e5m2", "nonfinite")):  # as torch converts them
        kind = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
        peer = torch.from_numpy(x).to(kind).view(torch.uint8).numpy()
        # torch 2.13 keeps E4M3's overflow at 448; earlier ones make it NaN.
        within = np.abs(x) < 464 if name == "e4m3" else np.ones_like(nan)
        assert np.array_equal(codes[within | nan], peer[within | nan])


@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
def test_scales_encode_exactly(overflow):
    powers = np.ldexp(1.0, np.arange(-149, 128))
    points = np.concatenate([powers, np.minimum(1.5 * powers, 3.4028235e38)]).astype(np.float32)
    x = np.concatenate(
        [neighbours(points), neighbours([0, np.inf, np.nan]), random_bits(1 << 20, 2)]
    )
    codes = encode(x, "e8m0", overflow=overflow)
    assert np.array_equal(codes, rules.e8m0_cast(x, overflow))
    if overflow == "nonfinite":
        positive = ~(x <= 0) & ~np.isnan(
            x
        )  # log2 of zero and negative numbers: ml_dtypes gives NaN, torch that of the magnitude
        peer = x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
        assert np.array_equal(codes[positive], peer[positive])
        peer = torch.from_numpy(x).to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
        assert np.array_equal(codes[~(x < 0)], peer[~(x < 0)])


# ---- stochastic rounding ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", rules.FIELDS)
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
def test_stochastic_rounding_follows_the_documentation(name, overflow):
    rng = np.random.default_rng(3)
    wide = (rng.standard_normal(100_001) * np.exp2(rng.integers(-40, 18, 100_001))).astype(
        np.float32
    )
    x = np.concatenate([difficult(name)[: 1 << 17], wide, random_bits(1 << 17, 4)])
    x = x[~np.isnan(x)]
    options = dict(seed=-(7**20), offset=2**40 + 3, stream=11)
    words = rules.philox_words(len(x), **options)
    codes = encode(x, name, overflow=overflow, rounding="stochastic", **options)
    expected = rules.cast(x, name, overflow, words)
    wrong = codes != expected
    assert not wrong.any(), (x[wrong][:5], codes[wrong][:5], expected[wrong][:5], words[wrong][:5])


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e2m1"])
def test_stochastic_rounding_is_unbiased(name):
    """The share rounded up of N is within 6 standard deviations, sqrt(p (1 - p) / N), of p."""
    values, count = rules.grid(name), 1 << 18
    index = {"bf16": 0x3F80, "e4m3": 0x38, "e2m1": 2}[name]
    for number, (low, high) in enumerate([values[:2], values[index : index + 2], values[-2:]]):
        for p in (1 / 3, 0.01, 0.9):
            x = np.float32(low + p * (high - low))
            p = (float(x) - low) / (high - low)
            codes = encode(np.full(count, x), name, rounding="stochastic", seed=5, stream=number)
            got = rules.value(codes, name)
            assert set(np.unique(got)) <= {low, high}
            assert abs((got == high).mean() - p) < 6 * math.sqrt(p * (1 - p) / count)


def test_representable_numbers_are_unchanged():
    for name in rules.FIELDS:
        values = rules.grid(name).astype(np.float32)
        codes = encode(values, name, rounding="stochastic", seed=9)
        assert np.array_equal(codes, np.arange(len(values)))


# ---- six bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1001])
def test_six_bit_codes_pack(count):
    codes = np.random.default_rng(count).integers(0, 64, count).astype(np.uint8)
    packed = numbers.fp6_pack(torch.from_numpy(codes)).numpy()
    bits = np.unpackbits(codes[:, None], axis=1, count=6, bitorder="little").ravel()
    assert np.array_equal(packed, np.packbits(bits, bitorder="little"))
    back = numbers.fp6_unpack(torch.from_numpy(packed), count).numpy()
    assert np.array_equal(back, codes)


# ---- blocks ------------------------------------------------------------------------------------------


def adversarial_blocks(count, length, seed):
    """Returns random blocks of every scale, with some zeros, subnormals, ties, NaNs, infinities."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, length)).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        x *= np.exp2(rng.integers(-20, 20, (count, 1))).astype(np.float32)
        kind = np.arange(count) % 16
        spread = kind == 1  # every element has its own scale
        x[spread] *= np.exp2(rng.integers(-14, 14, (spread.sum(), length))).astype(np.float32)
        x[kind == 2] *= np.float32(2.0**-120)
        x[kind == 3] *= np.float32(2.0**-140)
        x[kind == 4] *= np.float32(2.0**107)
        ties = kind == 5
        x[ties] = np.round(x[ties] * 8) / 8
        x[kind == 6] = np.where(rng.random((np.sum(kind == 6), length)) < 0.9, 0, x[kind == 6])
        random = kind == 7
        bits = rng.integers(0, 2**32, (random.sum(), length), dtype=np.uint32).view(np.float32)
        x[random] = np.where(np.isfinite(bits), bits, 1)
        x[kind == 8] = np.where(rng.random((np.sum(kind == 8), length)) < 0.5, -0.0, 0.0)
    where = np.flatnonzero(kind == 9)
    x[where, rng.integers(0, length, len(where))] = np.where(
        rng.random(len(where)) < 0.5, np.nan, np.inf
    )
    where = where[::3]
    x[where, rng.integers(0, length, len(where))] = -np.inf
    return x


def boundary_blocks(length, largest):
    """Returns blocks whose amax is equal to, or one ulp beside, every power of two and M times
    every power of two."""
    powers = np.ldexp(1.0, np.arange(-149, 128))
    with np.errstate(over="ignore"):
        amax = np.concatenate([powers, (powers * largest)]).astype(np.float32)
    amax = neighbours(amax[(amax > 0) & np.isfinite(amax)])
    rng = np.random.default_rng(7)
    x = (rng.random((len(amax), length)) * amax[:, None]).astype(np.float32)
    x[np.arange(len(x)), rng.integers(0, length, len(x))] = amax
    return x


def quantize(x, scheme, **options):
    """Returns one code for each element, and scales as stored."""
    q = numbers.quantize(torch.from_numpy(x), scheme, **options)
    scales = (
        q.scales.numpy() if q.scales.dtype == torch.float32 else q.scales.view(torch.uint8).numpy()
    )
    return raw(q.codes, rules.ELEMENT[scheme]), scales, q


def check_values(codes, scales, q, tensor_scale=1.0):
    """Dequantizes: element * scale, rounded once."""
    name = rules.ELEMENT[q.scheme]
    value = rules.value(codes, name)
    if q.scales.dtype == torch.float32:
        scale = scales.astype(np.float64)
    elif q.scheme == "nvfp4":
        scale = rules.value(scales, "ue4m3")
    else:
        scale = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int64) - 127))
    block = rules.BLOCK.get(q.scheme, 32)
    with np.errstate(over="ignore", invalid="ignore"):
        product = value * np.repeat(scale, block, 1)[:, : value.shape[1]]
        expected = rules.f32(product * np.float64(np.float32(tensor_scale)))
    assert same_or_nan(numbers.dequantize(q).numpy(), expected)


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil"])
@pytest.mark.parametrize("scheme", MX)
def test_mx_blocks_follow_the_rules(scheme, rule):
    name = rules.ELEMENT[scheme]
    for x in (
        adversarial_blocks(4096, 32, 1),
        boundary_blocks(32, rules.grid(name)[-1]),
        random_bits(4096 * 32, 6).reshape(-1, 32),
    ):
        codes, scales, q = quantize(x, scheme, scale_rule=rule)
        expected_codes, expected_scales = rules.mx_quantize(x, name, rule)
        assert np.array_equal(scales[:, 0], expected_scales)
        assert np.array_equal(codes, expected_codes)
        check_values(codes, scales, q)


def test_rceil_is_the_default_and_never_saturates():
    x = adversarial_blocks(4096, 32, 2)
    codes, scales, q = quantize(x, "mxfp8")
    again, same, _ = quantize(x, "mxfp8", scale_rule="rceil")
    assert np.array_equal(codes, again) and np.array_equal(scales, same)
    finite = np.isfinite(x).all(1)
    amax = np.abs(x[finite].astype(np.float64)).max(1)
    limit = np.ldexp(448.0, scales[finite, 0].astype(np.int64) - 127)
    assert (amax <= limit).all()


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-7, 0.0123, 1e-30, 3e20])
def test_nvfp4_blocks_follow_the_rule(tensor_scale, square):
    blocks = np.concatenate([adversarial_blocks(2048, 16, 3), boundary_blocks(16, 6.0)])
    blocks = blocks[: len(blocks) // 16 * 16]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = (blocks[: 1 << 10] * np.float32(tensor_scale)).astype(np.float32)
    x = np.concatenate([blocks, scaled])
    codes, scales, q = quantize(x, "nvfp4", tensor_scale=tensor_scale, square=square)
    amax = np.repeat(np.abs(x).reshape(-1, 256).max(1), 16) if square else None
    expected_codes, expected_scales = rules.nvfp4_quantize(x, tensor_scale, amax=amax)
    scales = np.repeat(scales, 16, 0) if square else scales
    assert np.array_equal(scales[:, 0], expected_scales)
    assert np.array_equal(codes, expected_codes)
    if not square:
        check_values(codes, scales, q, tensor_scale)


def test_nvfp4_tensor_scale():
    x = torch.tensor([[1.0, -2688.0], [float("nan"), -float("inf")]])
    assert numbers.nvfp4_tensor_scale(x) == 1.0
    assert numbers.nvfp4_tensor_scale(x / 7) == float(
        np.float32(np.float32(2688 / 7) / np.float32(2688))
    )
    assert numbers.nvfp4_tensor_scale(torch.zeros(3, 3)) == 1.0
    assert numbers.nvfp4_tensor_scale(torch.full((2,), 2.0**-149)) == 2.0**-126


@pytest.mark.parametrize("square", [False, True])
def test_fp8_blocks_follow_the_rule(square):
    x = np.concatenate([adversarial_blocks(2048, 128, 4), boundary_blocks(128, 448.0)])
    x = x[: len(x) // 128 * 128]
    codes, scales, q = quantize(x, "fp8-block", square=square)
    amax = np.repeat(np.abs(x).reshape(-1, 128 * 128).max(1), 128) if square else None
    expected_codes, expected_scales = rules.fp8_block_quantize(x, amax=amax)
    scales = np.repeat(scales, 128, 0) if square else scales
    assert same_or_nan(scales[:, 0], expected_scales)
    assert np.array_equal(codes, expected_codes)
    if not square:
        check_values(codes, scales, q)


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil"])
def test_fp8_blocks_with_powers_of_two(rule):
    x = np.concatenate([adversarial_blocks(1024, 128, 5), boundary_blocks(128, 448.0)])
    codes, scales, q = quantize(x, "fp8-block", scale_rule=rule)
    expected_codes, expected_scales = rules.mx_quantize(x, "e4m3", rule)
    assert np.array_equal(scales[:, 0], expected_scales)
    assert np.array_equal(codes, expected_codes)
    check_values(codes, scales, q)


@pytest.mark.parametrize("scheme", rules.ELEMENT)
def test_blocks_round_stochastically_as_stated(scheme):
    length = rules.BLOCK.get(scheme, 32)
    name = rules.ELEMENT[scheme]
    x = np.concatenate(
        [adversarial_blocks(2048, length, 6), random_bits(512 * length, 8).reshape(-1, length)]
    )
    options = dict(seed=12345678901234, offset=7, stream=3)
    words = rules.philox_words(x.size, **options).reshape(x.shape)
    codes, scales, _ = quantize(x, scheme, rounding="stochastic", tensor_scale=0.0123, **options)
    if scheme == "nvfp4":
        expected, expected_scales = rules.nvfp4_quantize(x, 0.0123, words)
    elif scheme == "fp8-block":
        expected, expected_scales = rules.fp8_block_quantize(x, words)
    else:
        expected, expected_scales = rules.mx_quantize(x, name, "rceil", words)
    assert same_or_nan(scales[:, 0], expected_scales)
    assert np.array_equal(codes, expected)


# ---- layouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", rules.ELEMENT)
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 37), (65, 130), (129, 257), (31, 1100), (130, 2050), (0, 5), (5, 0)]
)
def test_axes_strides_and_ragged_blocks(scheme, square, shape):
    """Quantizing along the other axis equals quantizing the transposed matrix; a ragged block is padded with zeros."""
    rng = np.random.default_rng(11)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))).astype(np.float32)
    options = dict(square=square, rounding="stochastic", seed=3, tensor_scale=0.01)
    codes, scales, q = quantize(x, scheme, **options)
    block = rules.BLOCK.get(scheme, 32)
    rows, cols = shape
    padded_rows = -(-rows // block) * block if square else rows
    padded_cols = -(-cols // block) * block
    padded = np.zeros((padded_rows, padded_cols), np.float32)
    padded[:rows, :cols] = x
    nearest = dict(square=square, tensor_scale=0.01)
    padded_codes, padded_scales, _ = quantize(padded, scheme, **nearest)
    plain_codes, plain_scales, plain = quantize(x, scheme, **nearest)
    assert np.array_equal(plain_scales, padded_scales) and np.array_equal(scales, padded_scales)
    assert np.array_equal(plain_codes[:, :cols], padded_codes[:rows, :cols])
    assert not plain_codes[:, cols:].any()
    # Columns, from a matrix whose rows lie apart.
    wide = np.full((cols, rows + 3), np.nan, np.float32)
    wide[:, :rows] = x.T
    turned = torch.from_numpy(wide)[:, :rows]
    other = numbers.quantize(turned, scheme, axis=0, **options)
    assert torch.equal(other.codes.view(torch.uint8), q.codes.view(torch.uint8))
    assert torch.equal(other.scales.view(torch.uint8), q.scales.view(torch.uint8))
    back = numbers.dequantize(q)
    assert back.shape == shape and torch.equal(numbers.dequantize(other), back.T)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 9), (32, 4), (0, 3)])
def test_scales_in_the_order_of_tensor_cores(shape, torchao):
    rows, cols = shape
    scales = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    swizzled = numbers.swizzle_scales(torch.from_numpy(scales))
    high, wide = -(-rows // 128), -(-cols // 4)
    expected = np.zeros(high * wide * 512, np.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = r // 128 * wide + c // 4
            expected[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    assert np.array_equal(swizzled.numpy(), expected)
    if rows:
        assert torch.equal(swizzled, torchao["utils"].to_blocked(torch.from_numpy(scales)))
    assert np.array_equal(numbers.unswizzle_scales(swizzled, rows, cols).numpy(), scales)


def test_square_scales_are_repeated_for_tensor_cores():
    scales = torch.arange(6, dtype=torch.uint8).reshape(3, 2)
    swizzled = numbers.swizzle_scales(scales, rows=40, repeat=16)
    full = scales.repeat_interleave(16, 0)[:40]
    assert torch.equal(swizzled, numbers.swizzle_scales(full))
    assert torch.equal(numbers.unswizzle_scales(swizzled, 40, 2, repeat=16), scales)


# ---- torchao -------------------------------------------------------------------------------------------


def compare_mx(torchao, scheme, rule, count, seed):
    """Where torchao differs, it is by these rules alone; elsewhere every bit agrees.

    1. Scale code 0 (2^-127): torchao scales elements by 2^-126 (floor, ceil) or not at all (rceil).
    2. rceil: it takes log2 in float32, which loses amax just above M * 2^e; its scale is then half of ours.
    3. Blocks with NaN: the sign and kind of their codes (the scale is NaN in both).
    """
    name = rules.ELEMENT[scheme]
    kinds = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e3m2": torchao["mx"].DTYPE_FP6_E3M2,
        "e2m3": torchao["mx"].DTYPE_FP6_E2M3,
        "e2m1": torch.float4_e2m1fn_x2,
    }
    x = adversarial_blocks(count, 32, seed)
    codes, scales, _ = quantize(x, scheme, scale_rule=rule)
    peer_scales, peer = torchao["mx"].to_mx(
        torch.from_numpy(x), kinds[name], 32, torchao["rule"][rule.upper()]
    )
    peer_scales = peer_scales.view(torch.uint8).numpy().ravel()
    peer = raw(peer, name).reshape(x.shape)
    scales = scales[:, 0]
    apart = scales != peer_scales
    if rule == "rceil":
        amax = np.abs(x[apart].astype(np.float64)).max(1)
        e = peer_scales[apart].astype(np.int64) - 127
        excess = amax / np.ldexp(rules.grid(name)[-1], e)
        assert np.array_equal(scales[apart], peer_scales[apart] + 1)
        assert (excess > 1).all() and (excess < 1 + 2.0**-14).all()
    else:
        assert not apart.any()
    compared = ~apart & (scales != 0) & (scales != 255)
    wrong = compared & (codes != peer).any(1)
    assert compared.sum() > 0.7 * count
    assert not wrong.any(), (x[wrong][:1], codes[wrong][:1], peer[wrong][:1], scales[wrong][:1])


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil"])
@pytest.mark.parametrize("scheme", MX)
def test_mx_agrees_with_torchao(torchao, scheme, rule):
    compare_mx(torchao, scheme, rule, QUICK_BLOCKS // 4, 21)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil"])
@pytest.mark.parametrize("scheme", MX)
def test_mx_agrees_with_torchao_on_a_million_blocks(torchao, scheme, rule):
    for part in range(8):
        compare_mx(torchao, scheme, rule, MILLION // 8, 100 + part)


def compare_nvfp4(torchao, tensor_scale, count, seed):
    """Where torchao differs: scales below 2^-6 (it keeps to normal ones, also for zero blocks), infinity (saturates
    the scale; ours is NaN)."""
    x = adversarial_blocks(count, 16, seed)
    given = None if tensor_scale is None else torch.tensor(tensor_scale, dtype=torch.float32)
    codes, scales, _ = quantize(
        x, "nvfp4", tensor_scale=1.0 if tensor_scale is None else float(given)
    )
    peer_scales, peer = torchao["nvfp4"].nvfp4_quantize(torch.from_numpy(x), 16, given)
    peer_scales = peer_scales.view(torch.uint8).numpy().ravel()
    peer = raw(peer, "e2m1").reshape(x.shape)
    scales = scales[:, 0]
    with np.errstate(all="ignore"):
        finite = np.isfinite(x).all(1)
    normal = finite & (scales >= 8)
    assert normal.sum() > 0.4 * count
    assert np.array_equal(scales[normal], peer_scales[normal])
    assert np.array_equal(codes[normal], peer[normal])
    assert (peer_scales[finite & (scales < 8)] == 8).all()
    nan = np.isnan(x).any(1)
    assert (scales[~finite] == 0x7F).all() and (peer_scales[nan] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("tensor_scale", [None, 0.00371, 2.0**-9])
def test_nvfp4_agrees_with_torchao(torchao, tensor_scale):
    compare_nvfp4(torchao, tensor_scale, QUICK_BLOCKS, 22)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_scale", [None, 0.00371])
def test_nvfp4_agrees_with_torchao_on_a_million_blocks(torchao, tensor_scale):
    for part in range(8):
        compare_nvfp4(torchao, tensor_scale, MILLION // 8, 200 + part)


def torchao_function(file, name):
    """Returns torchao's reference in plain torch, taken from a file whose import needs Triton."""
    root = importlib.util.find_spec("torchao").submodule_search_locations[0]
    tree = ast.parse((pathlib.Path(root) / file).read_text())
    wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    space = {"torch": torch, "EPS": 1e-12, "e4m3_dtype": torch.float8_e4m3fn}
    exec(compile(ast.Module(wanted, []), file, "exec"), space)
    return space[name]


@pytest.mark.parametrize("count", [4096, pytest.param(MILLION // 8, marks=pytest.mark.slow)])
def test_fp8_blocks_compared_with_torchao(count):
    """torchao multiplies by 448 / amax, rounded; ours divides by amax / 448, rounded. Scales agree within two
    roundings (each 2^-24), and codes wherever that does not decide a tie: never by more than one step."""
    peer_quantize = torchao_function(
        "prototype/blockwise_fp8_training/kernels.py", "torch_blockwise_scale_act_quant_lhs"
    )
    for part in range(8 if count > 4096 else 1):
        x = adversarial_blocks(count, 128, 300 + part)
        amax = np.abs(x).max(1)
        x = x[np.isfinite(x).all(1) & (amax > 1e-12)]  # it holds amax to 1e-12 at least
        codes, scales, _ = quantize(x, "fp8-block")
        peer, peer_scales = peer_quantize(torch.from_numpy(x))
        peer, peer_scales = peer.view(torch.uint8).numpy(), peer_scales.numpy().ravel()
        relative = np.abs(scales[:, 0].astype(np.float64) / peer_scales - 1)
        usual = (
            np.abs(x).max(1) < 2.0**100
        )  # beyond this range its 448 / amax is subnormal and rounds by more
        assert (relative[usual] <= 2.0**-22).all()
        a = rules.value(codes[usual], "e4m3")
        b = rules.value(peer[usual], "e4m3")
        step = np.maximum(np.exp2(np.floor(np.log2(np.maximum(np.abs(a), 2.0**-6))) - 3), 2.0**-9)
        assert (np.abs(a - b) <= step).all()
        assert (codes[usual] != peer[usual]).mean() < 1e-4


# ---- random Hadamard transform -------------------------------------------------------------------------


def hadamard_matrix(size):
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def signs(size, **random):
    words = rules.philox_words(4, **random)
    return np.array([-1.0 if words[j // 32] >> np.uint32(j % 32) & 1 else 1.0 for j in range(size)])


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("axis", [0, 1])
def test_hadamard_equals_the_documented_matrix(size, axis):
    """On small integers every sum is exact, and the result is one rounded product."""
    rng = np.random.default_rng(size)
    x = rng.integers(-1000, 1000, (5, 3 * size)).astype(np.float32)
    random = dict(seed=99, offset=1, stream=2)
    d = signs(size, **random)
    exact = (x.reshape(-1, size) * d) @ hadamard_matrix(size)
    expected = rules.f32(exact) * np.float32(1 / np.sqrt(np.float64(size)))
    source = torch.from_numpy(x if axis == 1 else np.ascontiguousarray(x.T))
    result = numbers.hadamard(source, size, axis=axis, **random)
    result = result if axis == 1 else result.T
    assert np.array_equal(result.reshape(-1, size).numpy(), expected)
    # The inverse, on other numbers: log2(size) additions and two products each way, in units of the vector's norm.
    y = torch.randn(source.shape)
    back = numbers.hadamard(
        numbers.hadamard(y, size, axis=axis, **random), size, axis=axis, inverse=True, **random
    )
    runs = y if axis == 1 else y.T
    norm = runs.reshape(-1, size).norm(dim=1).max().item()
    assert (back - y).abs().max().item() <= 2 * (math.log2(size) + 2) * 2.0**-24 * norm


def test_hadamard_without_signs_and_unlike_signs():
    x = torch.zeros(1, 16)
    x[0, 0] = 4.0
    assert torch.equal(numbers.hadamard(x, random_signs=False), torch.ones(1, 16))
    y = torch.eye(16)
    assert not torch.equal(numbers.hadamard(y, seed=1), numbers.hadamard(y, seed=2))


# ---- the caller's rounding mode
# ----------------------------------------------------------------------------


def test_the_callers_floating_point_mode_does_not_matter():
    x = torch.from_numpy(random_bits(32 * 4096, 41)).reshape(-1, 32)
    x = torch.where(x.isfinite(), x, torch.tensor(2.0**-140))
    x[::2] *= 2.0**-100
    before = numbers.quantize(x, "mxfp8")
    values = numbers.dequantize(before)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = numbers.quantize(x, "mxfp8")
        again = numbers.dequantize(after)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(before.codes.view(torch.uint8), after.codes.view(torch.uint8))
    assert torch.equal(before.scales.view(torch.uint8), after.scales.view(torch.uint8))
    assert torch.equal(values.view(torch.int32), again.view(torch.int32))


# ---- the public functions
# ----------------------------------------------------------------------------------


def test_shapes_dtypes_and_gradients():
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    q = numbers.quantize(x)
    assert q.codes.dtype == torch.float8_e4m3fn and q.codes.shape == x.shape
    assert q.scales.dtype == torch.float8_e8m0fnu and q.scales.shape == (2, 3, 2)
    assert numbers.dequantize(q).shape == x.shape
    q = numbers.quantize(x[0].T, "nvfp4")  # not contiguous
    assert q.codes.dtype == torch.float4_e2m1fn_x2 and q.codes.shape == (64, 2)
    assert numbers.quantize(torch.randn(64), "fp8-block").scales.dtype == torch.float32


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: numbers.encode(torch.zeros(2), "e4m4"), ValueError, ["e4m4", "e4m3"]),
        (
            lambda: numbers.encode(torch.zeros(2).double(), "e4m3"),
            TypeError,
            ["float64", "float32"],
        ),
        (lambda: numbers.encode(torch.zeros(3), "e2m1"), ValueError, ["[3]", "even"]),
        (lambda: numbers.encode([1.0], "e4m3"), TypeError, ["list", "tensor"]),
        (
            lambda: numbers.encode(torch.zeros(2), "e8m0", rounding="stochastic"),
            dw.DeepwellError,
            ["e8m0", "nearest"],
        ),
        (
            lambda: numbers.encode(torch.zeros(2, device="meta"), "e4m3"),
            dw.UnsupportedError,
            ["meta", "CPU"],
        ),
        (lambda: numbers.decode(torch.zeros(3), "e4m3"), TypeError, ["float32", "float8_e4m3fn"]),
        (lambda: numbers.quantize(torch.zeros(4, 4), "mxfp9"), ValueError, ["mxfp9", "mxfp8"]),
        (
            lambda: numbers.quantize(torch.zeros(4, 4), "mxfp4", scale_rule="amax"),
            dw.DeepwellError,
            ["mxfp4", "RCEIL"],
        ),
        (
            lambda: numbers.quantize(torch.zeros(4, 4), "nvfp4", scale_rule="floor"),
            dw.DeepwellError,
            ["nvfp4"],
        ),
        (
            lambda: numbers.quantize(torch.zeros(4, 4), "nvfp4", tensor_scale=0.0),
            dw.DeepwellError,
            ["tensor_scale"],
        ),
        (
            lambda: numbers.quantize(torch.zeros(4, 4), "nvfp4", tensor_scale=math.nan),
            dw.DeepwellError,
            ["tensor_scale"],
        ),
        (lambda: numbers.quantize(torch.zeros(4, 4, 4), axis=0), ValueError, ["axis", "0"]),
        (lambda: numbers.quantize(torch.tensor(1.0)), ValueError, ["scalar"]),
        (lambda: numbers.hadamard(torch.zeros(2, 24)), dw.DeepwellError, ["24", "16"]),
        (lambda: numbers.hadamard(torch.zeros(2, 24), 12), dw.DeepwellError, ["size is 12", "16"]),
        (lambda: numbers.swizzle_scales(torch.zeros(4, 4)), ValueError, ["float32", "bytes"]),
        (
            lambda: numbers.unswizzle_scales(torch.zeros(4, dtype=torch.uint8), 4, 4),
            ValueError,
            ["4 bytes"],
        ),
        (
            lambda: numbers.fp6_unpack(torch.zeros(2, dtype=torch.uint8), 3),
            ValueError,
            ["3", "2 bytes"],
        ),
        (lambda: dw.MicroscalingConfig(block_size=64), ValueError, ["64", "32"]),
    ],
)
def test_errors_say_what_is_wrong(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_wrong_scales_are_refused():
    q = numbers.quantize(torch.randn(4, 64))
    with pytest.raises(ValueError, match="scales"):
        numbers.dequantize(dataclasses.replace(q, scales=q.scales[:, :1]))
    with pytest.raises(ValueError, match="codes"):
        numbers.dequantize(dataclasses.replace(q, codes=q.codes[:3]))


def test_precisions_by_name():
    bits = {
        "FP32": 32,
        "FP16": 16,
        "BF16": 16,
        "FP8": 8,
        "FP8_BLOCK": 8,
        "MXFP8": 8,
        "MXFP6": 6,
        "MXFP4": 4,
        "NVFP4": 4,
    }
    assert {p.name: p.bits for p in dw.Precision} == bits
    scaled = {"MXFP8", "MXFP6", "MXFP4", "NVFP4"}
    assert {p.name for p in dw.Precision if p.is_microscaled} == scaled
    assert {p.name for p in dw.Precision if p.requires_blackwell} == scaled
    assert dw.Precision("mxfp8") is dw.Precision.MXFP8 and dw.Precision.MXFP8 == "mxfp8"
    assert dw.MicroscalingConfig(block_size=32).scale_rule == "rceil"


def test_microscale_manager():
    from deepwell import cutlass_kernels
    from deepwell.kernels import cutlass_bindings

    manager = cutlass_kernels.MicroscaleManager
    assert manager is cutlass_bindings.MicroscaleManager
    x = torch.randn(4, 96)
    elements, scales = manager.quantize_mxfp8(x)
    assert torch.equal(
        manager.dequantize_mxfp8(elements, scales), numbers.dequantize(numbers.quantize(x))
    )
    elements, scales = manager.quantize_mxfp8(x, scale_rule="floor")
    assert torch.equal(
        scales.view(torch.uint8), numbers.quantize(x, scale_rule="floor").scales.view(torch.uint8)
    )
    scale = numbers.nvfp4_tensor_scale(x)
    elements, scales = manager.quantize_nvfp4(x, tensor_scale=scale)
    back = manager.dequantize_nvfp4(elements, scales, tensor_scale=scale)
    assert torch.equal(back, numbers.dequantize(numbers.quantize(x, "nvfp4")))
    with pytest.raises(dw.UnsupportedError, match="16"):
        manager.quantize_mxfp8(x, block_size=16)
