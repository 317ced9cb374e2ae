"""The number formats' rules in plain, slow numpy: the reference for tests of the library.

Values are float64, in which every sum, product and midpoint below is exact. Sources: OCP Microscaling Formats (MX)
Specification v1.0 (formats 5.3, E8M0 5.4.1, conversion 6.3); OCP 8-bit Floating Point Specification v1.0; PTX ISA,
instruction cvt (.satfinite, .rp to ue8m0); arXiv 2506.08027 (MXFP8 recipe: rceil); arXiv 2509.25149 (NVFP4, appendix
on quantization); arXiv 2412.19437, 3.3 (FP8 in blocks); Salmon et al., SC'11 (Philox).
"""

import functools

import numpy as np

# exponent bits, fraction bits, bias, largest code, bits
FIELDS = {
    "bf16": (8, 7, 127, 0x7F7F, 16),
    "f16": (5, 10, 15, 0x7BFF, 16),
    "e4m3": (4, 3, 7, 0x7E, 8),
    "e5m2": (5, 2, 15, 0x7B, 8),
    "e3m2": (3, 2, 3, 0x1F, 6),
    "e2m3": (2, 3, 1, 0x1F, 6),
    "e2m1": (2, 1, 1, 0x7, 4),
    "ue4m3": (4, 3, 7, 0x7E, 8),
}
INFINITY = {"bf16": 0x7F80, "f16": 0x7C00, "e5m2": 0x7C}
NAN = {"bf16": 0x7FC0, "f16": 0x7E00, "e4m3": 0x7F, "e5m2": 0x7F, "ue4m3": 0x7F}


@functools.cache
def grid(name):
    """Returns the finite numbers that are not negative, in order: number i has code i."""
    _, fraction, bias, largest, _ = FIELDS[name]
    code = np.arange(largest + 1)
    field, low = code >> fraction, code & ((1 << fraction) - 1)
    significand = np.where(field > 0, low + (1 << fraction), low).astype(np.float64)
    return np.ldexp(significand, np.maximum(field, 1) - bias - fraction)


def sign_bit(name):
    return 0 if name == "ue4m3" else 1 << (FIELDS[name][4] - 1)


def beyond(name):
    """Returns the number that would follow the largest one."""
    values = grid(name)
    return 2 * values[-1] - values[-2]


def cast(x, name, overflow="saturate", words=None):
    """Returns the codes of float64 x: rounded to nearest, ties to even; or stochastically with one
    32-bit word each."""
    x = np.asarray(x, dtype=np.float64)
    values = np.append(grid(name), beyond(name))
    largest = len(values) - 2
    magnitude = np.minimum(np.abs(x), values[-1])
    magnitude = np.where(np.isnan(x), 0, magnitude)
    low = np.clip(np.searchsorted(values, magnitude, side="right") - 1, 0, largest)
    below, above = magnitude - values[low], values[low + 1] - magnitude
    if words is None:
        up = (below > above) | ((below == above) & (low % 2 == 1))
    else:
        share = np.floor(below / (below + above) * 2.0**32)
        up = share + words.astype(np.float64) >= 2.0**32
    code = low + up
    code = np.where(np.isinf(x), largest + 1, code)
    special = {"saturate": largest}.get(overflow, INFINITY.get(name, NAN.get(name, largest)))
    code = np.where(code > largest, special, code)
    negative = np.signbit(x)
    if name == "ue4m3":
        code = np.where(negative & (x != 0), 0 if overflow == "saturate" else NAN[name], code)
    else:
        code = code | np.where(negative, sign_bit(name), 0)
    nan = NAN.get(name, largest) | np.where(
        negative & (name in ("e4m3", "e5m2")), sign_bit(name), 0
    )
    return np.where(np.isnan(x), nan, code).astype(np.uint16)


def value(code, name):
    """Returns the float64 values of codes."""
    code = np.asarray(code).astype(np.int64)
    largest = len(grid(name)) - 1
    magnitude = code & ((1 << (FIELDS[name][4] - 1)) - 1)
    result = grid(name)[np.minimum(magnitude, largest)]
    result = np.where(magnitude > largest, np.nan, result)
    result = np.where(magnitude == INFINITY.get(name, -1), np.inf, result)
    return np.where(code & sign_bit(name), -result, result)


def e8m0_cast(x, overflow="saturate"):
    """Returns the nearest power of two by value; the upper one in a tie; between the lowest two,
    the upper one."""
    x = np.asarray(x, dtype=np.float64)
    powers = np.ldexp(1.0, np.arange(255) - 127)
    magnitude = np.where(np.isnan(x), 1, np.abs(x))
    low = np.clip(np.searchsorted(powers, magnitude, side="right") - 1, 0, 254)
    code = np.where(low == 0, magnitude > powers[0], low + (magnitude >= 1.5 * powers[low]))
    code = np.where(code > 254, 254 if overflow == "saturate" else 255, code)
    code = np.where(x < 0, 0 if overflow == "saturate" else 255, code)
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


# ---- blocks ----------------------------------------------------------------------------------------

ELEMENT = {
    "mxfp8": "e4m3",
    "mxfp8-e5m2": "e5m2",
    "mxfp6": "e3m2",
    "mxfp6-e2m3": "e2m3",
    "mxfp4": "e2m1",
    "nvfp4": "e2m1",
    "fp8-block": "e4m3",
}
BLOCK = {"nvfp4": 16, "fp8-block": 128}


def nan_code(name):
    return NAN.get(name, FIELDS[name][3])


def mx_exponent(amax, name, rule):
    """Returns e of the scale 2^e for amax (float64 array, finite), searched by definition."""
    largest = grid(name)[-1]
    most = int(np.floor(np.log2(largest)))
    candidates = np.arange(-127, 128)
    if rule == "rceil":  # the smallest e with amax <= largest * 2^e
        enough = np.searchsorted(np.ldexp(largest, candidates), amax, side="left")
        e = candidates[np.minimum(enough, len(candidates) - 1)]
    else:
        fraction, exponent = np.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
        floor = np.where(amax > 0, exponent - 1, -(10**6))
        log = floor if rule == "floor" else np.where(fraction > 0.5, floor + 1, floor)
        e = log - most
    return np.clip(e, -127, 127)


def mx_quantize(blocks, name, rule, words=None):
    """Quantizes blocks [n, length] of float32. Returns (codes, E8M0 codes)."""
    x = blocks.astype(np.float64)
    amax = np.abs(x).max(1)
    nan, infinite = np.isnan(amax), np.isinf(amax)
    e = mx_exponent(np.where(nan | infinite, 1, amax), name, rule)
    most = int(np.floor(np.log2(grid(name)[-1])))
    e = np.where(infinite, 127 if rule == "rceil" else 128 - most, e)
    # The library multiplies in float32; that rounding is below half of any quantum (see the header).
    codes = cast(np.ldexp(x, -e[:, None]), name, words=words)
    codes = np.where(nan[:, None], nan_code(name), codes)
    return codes.astype(np.uint8), np.where(nan, 255, e + 127).astype(np.uint8)


def f32(x):
    with np.errstate(all="ignore"):
        return np.asarray(x, dtype=np.float32)


def nvfp4_quantize(blocks, tensor_scale, words=None, amax=None):
    """Returns (codes, UE4M3 codes). Every quotient and product is rounded to float32."""
    with np.errstate(all="ignore"):
        ts = np.float32(tensor_scale)
        amax = np.abs(blocks).max(1) if amax is None else amax
        nan = ~np.isfinite(amax)
        wanted = (np.where(nan, np.float32(0), amax) / np.float32(6)) / ts
        scale_code = cast(wanted, "ue4m3").astype(np.uint8)
        scale = f32(value(scale_code, "ue4m3"))
        factor = np.minimum((np.float32(1) / ts) / scale, np.finfo(np.float32).max)
        factor = np.where(scale == 0, np.float32(0), factor).astype(np.float32)
        codes = cast(blocks * factor[:, None], "e2m1", words=words)
    codes = np.where(nan[:, None], nan_code("e2m1"), codes)
    return codes.astype(np.uint8), np.where(nan, 0x7F, scale_code).astype(np.uint8)


def fp8_block_quantize(blocks, words=None, amax=None):
    """Returns (codes, float32 scales)."""
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(1) if amax is None else amax
        nan, infinite = np.isnan(amax), np.isinf(amax)
        scale = (amax / np.float32(448)).astype(np.float32)
        scale = np.where(infinite, np.float32(2.0**120), scale)
        quotient = blocks / np.where(scale == 0, np.float32(np.inf), scale)[:, None]
        codes = cast(quotient, "e4m3", words=words)
    codes = np.where(nan[:, None], nan_code("e4m3"), codes)
    return codes.astype(np.uint8), np.where(nan, np.float32(np.nan), scale)


# ---- random words --------------------------------------------------------------------------------------


def philox_words(count, seed=0, offset=0, stream=0, first=0):
    """Returns the words of elements first .. first + count - 1."""
    mask = np.uint64(0xFFFFFFFF)
    index = np.arange(first, first + count, dtype=np.uint64)
    block = index // np.uint64(4)

    def const(x):
        return np.full(count, x & 0xFFFFFFFF, dtype=np.uint64)

    high = block >> np.uint64(32)
    counter = [
        block & mask,
        const(stream) ^ ((high << np.uint64(20)) & mask),
        const(offset),
        const(offset >> 32),
    ]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        a = np.uint64(0xD2511F53) * counter[0]
        b = np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (b >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
            b & mask,
            (a >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
            a & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.choose((index % np.uint64(4)).astype(np.int64), counter).astype(np.uint32)
