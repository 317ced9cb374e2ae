"""Are the kernels of libdeepwell_cutlass.so right on this GPU? A line per case; ctypes and NumPy.

    python3 tests/gpu/cutlass_smoke.py --lib build/cutlass/libdeepwell_cutlass.so
        [--kernel SUBSTRING]   only kernels whose name contains it
        [--quick]              the first two cases of each
        [--time]               instead: products beside torch.matmul, medians (needs PyTorch and the GPU)

Kernels for another GPU than this one are left out. Each number is the share of the allowed error that was used: above 1
is wrong. Between rows, and around matrices, lie NaNs; so does the output before the launch.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p

import numpy as np

_GEMM, _GROUPED, _ATTENTION = range(3)
_BF16, _MXFP8, _NVFP4 = 0, 6, 11  # dw_scheme
_POISON = 0x7FC5  # a NaN in BF16; byte matrices get NaNs of E4M3 and E8M0 instead
_MARGIN = 64  # guard elements before and after every matrix


class Product(ctypes.Structure):
    _fields_ = [
        ("size_of", c_size_t),
        *((name, c_int64) for name in ("m", "n", "k")),
        *((name, c_void_p) for name in ("a", "b", "c", "d")),
        *((name, c_int64) for name in ("a_stride", "b_stride", "c_stride", "d_stride")),
        ("a_scales", c_void_p),
        ("b_scales", c_void_p),
        ("alpha", c_float),
        ("beta", c_float),
        ("cluster", c_int32 * 2),
        ("processors", c_int32),
        ("a_factor", c_void_p),
        ("b_factor", c_void_p),
    ]


class Grouped(ctypes.Structure):
    _fields_ = [
        ("size_of", c_size_t),
        ("groups", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("m", POINTER(c_int64)),
        *((name, POINTER(c_void_p)) for name in ("a", "b", "d")),
        *((name, c_int64) for name in ("a_stride", "b_stride", "d_stride")),
        ("alpha", c_float),
        ("processors", c_int32),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("size_of", c_size_t),
        *((n, c_int32) for n in ("batch", "heads", "heads_kv", "queries", "keys", "head_dim")),
        ("causal", c_int32),
        *((name, c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((name, c_int64) for name in ("q_stride", "kv_stride", "o_stride")),
        *((name, c_int64) for name in ("q_batch_stride", "kv_batch_stride", "o_batch_stride")),
        ("scale", c_float),
        ("processors", c_int32),
    ]


class Kernel(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("kind", c_int),
        ("scheme", c_int),
        ("capability", c_int),
        ("what", c_char_p),
        ("shown", c_char_p),
        ("workspace_bytes", ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_size_t))),
        ("launch", ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)),
    ]


class Provider:
    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.deepwell_cutlass_kernels.restype = POINTER(Kernel)
        self.library.deepwell_cutlass_error.restype = c_char_p
        self.library.deepwell_cutlass_version.restype = c_char_p
        count = c_size_t()
        rows = self.library.deepwell_cutlass_kernels(3, ctypes.byref(count))
        self.kernels = [rows[i] for i in range(count.value)]
        self.version = self.library.deepwell_cutlass_version().decode()

    def check(self, result: int) -> None:
        if result:
            raise SystemExit(self.library.deepwell_cutlass_error().decode())

    def launch(self, runtime: Runtime, kernel: Kernel, call: ctypes.Structure) -> None:
        call.size_of = ctypes.sizeof(call)
        size = c_size_t()
        self.check(kernel.workspace_bytes(ctypes.byref(call), ctypes.byref(size)))
        workspace = runtime.empty(size.value)
        self.check(kernel.launch(ctypes.byref(call), workspace, None))
        runtime.check(runtime.library.cudaDeviceSynchronize())


class Runtime:
    """Returns the CUDA runtime that the provider uses: the emulator's or NVIDIA's."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcudart.so.13")
        except OSError:
            import torch  # noqa: F401 (it contains the runtime if the system has none)

            self.library = ctypes.CDLL("libcudart.so.13")
        self.library.cudaGetErrorString.restype = c_char_p
        self.taken: list[c_void_p] = []

    def check(self, error: int) -> None:
        if error:
            raise SystemExit(self.library.cudaGetErrorString(error).decode())

    def capability(self) -> int:
        parts = []
        for attribute in (75, 76):
            value = c_int()
            self.check(self.library.cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0))
            parts.append(value.value)
        return parts[0] * 10 + parts[1]

    def empty(self, size: int) -> int:
        pointer = c_void_p()
        self.check(self.library.cudaMalloc(ctypes.byref(pointer), c_size_t(max(size, 16))))
        self.taken.append(pointer)
        return pointer.value

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        at = self.empty(array.nbytes)
        self.check(
            self.library.cudaMemcpy(
                c_void_p(at), array.ctypes.data_as(c_void_p), c_size_t(array.nbytes), 1
            )
        )
        return at

    def get(self, at: int, like: np.ndarray) -> np.ndarray:
        made = np.empty_like(like)
        self.check(
            self.library.cudaMemcpy(
                made.ctypes.data_as(c_void_p), c_void_p(at), c_size_t(made.nbytes), 2
            )
        )
        return made

    def release(self) -> None:
        for pointer in self.taken:
            self.check(self.library.cudaFree(pointer))
        self.taken.clear()


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Returns codes, rounded to nearest even. The doubles must be floats already, or far from a
    tie."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _float_table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    values = []
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        mantissa = code & ((1 << mantissa_bits) - 1)
        exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
        magnitude = math.ldexp(
            mantissa + (1 << mantissa_bits) * (exponent > 0),
            max(exponent, 1) - bias - mantissa_bits,
        )
        values.append(-magnitude if code >> (exponent_bits + mantissa_bits) else magnitude)
    return np.array(values)


_E4M3 = _float_table(4, 3, 7)
_E4M3[[0x7F, 0xFF]] = np.nan
_E2M1 = _float_table(2, 1, 1)


class Matrix:
    """Rows on the GPU with NaNs between and around them; `stride` is in elements."""

    def __init__(self, runtime: Runtime, codes: np.ndarray, poison: int, per_unit: int = 1) -> None:
        rows, columns = codes.shape  # units, of `per_unit` elements each
        sixteen = 16 // codes.itemsize
        wide = -(-columns // sixteen) * sixteen + sixteen
        self.image = np.full(rows * wide + 2 * _MARGIN, poison, codes.dtype)
        self.inside = np.zeros(self.image.size, bool)
        body = self.image[_MARGIN : _MARGIN + rows * wide].reshape(rows, wide)
        body[:, :columns] = codes
        self.inside[_MARGIN : _MARGIN + rows * wide].reshape(rows, wide)[:, :columns] = True
        self.shape = codes.shape
        self.stride = wide * per_unit
        self.base = runtime.put(self.image)
        self.data = self.base + _MARGIN * codes.itemsize
        self.runtime = runtime

    def read(self) -> np.ndarray:
        """Returns the rows' contents; raises if anything around them changed."""
        now = self.runtime.get(self.base, self.image)
        if (now != self.image)[~self.inside].any():
            raise SystemExit("written outside of the matrix")
        return now[self.inside].reshape(self.shape)


def tensor_core_scales(codes: np.ndarray) -> np.ndarray:
    """Puts codes (rows, scales) into atoms of 128 rows x 4 scales, 512 bytes each, along k and then
    along rows."""
    rows, scales = codes.shape
    across = -(-scales // 4)
    made = np.zeros((-(-rows // 128), across, 512), np.uint8)
    row, scale = np.meshgrid(np.arange(rows), np.arange(scales), indexing="ij")
    made[row // 128, scale // 4, row % 32 * 16 + row % 128 // 32 * 4 + scale % 4] = codes
    return made.reshape(-1)


def used(got: np.ndarray, exact: np.ndarray, allowed: np.ndarray) -> float:
    """Returns the largest share of the allowed error; infinity if there is a NaN."""
    if got.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        share = np.abs(got - exact) / allowed
    return float(np.max(np.where(np.isnan(share), np.inf, share)))


def product_bound(magnitude: np.ndarray, exact: np.ndarray, k: int) -> np.ndarray:
    """Returns the bound for a sum of k products whose magnitudes sum to `magnitude`, with D in BF16.

    One instruction adds 16 or more of them to the sum. Each is truncated 24 bits or more below the greatest, and the
    sum to 24 bits, so at most (17 + 2) 2^-24 of the magnitudes for 16 products; then one rounding, 2^-8.
    """
    return (k / 16 + 1) * 19 * 2.0**-24 * magnitude + 2.0**-8 * np.abs(exact) + 1e-30


def operand(
    runtime: Runtime, random: np.random.Generator, kind: int, rows: int, k: int, exact: bool
) -> tuple[Matrix, int | None, np.ndarray]:
    """A matrix, its scales on the GPU, and its values."""
    if kind == _BF16:
        values = random.integers(-3, 4, (rows, k)) if exact else random.standard_normal((rows, k))
        codes = to_bf16(values)
        return Matrix(runtime, codes, _POISON), None, from_bf16(codes)
    if kind == _MXFP8:
        codes = random.integers(0, 0x7F, (rows, k)).astype(np.uint8)
        codes |= random.integers(0, 2, (rows, k)).astype(np.uint8) << 7
        values, block = _E4M3[codes], 32
        scales = random.integers(121, 134, (rows, -(-k // block))).astype(np.uint8)
        factors = 2.0 ** (scales.astype(int) - 127)
        matrix = Matrix(runtime, codes, 0x7F)
    else:
        codes = random.integers(0, 16, (rows, k)).astype(np.uint8)
        values, block = _E2M1[codes], 16
        scales = random.integers(0x20, 0x50, (rows, -(-k // block))).astype(np.uint8)
        factors = _E4M3[scales]
        matrix = Matrix(runtime, codes[:, ::2] | codes[:, 1::2] << 4, 0x77, per_unit=2)
    values = values * np.repeat(factors, block, axis=1)[:, :k]
    return matrix, runtime.put(tensor_core_scales(scales)), values


def run_product(
    provider: Provider, runtime: Runtime, kernel: Kernel, case: tuple, seed: int
) -> float:
    m, n, k, beta, exact, cluster = case
    random = np.random.default_rng(seed)
    a, a_scales, a_values = operand(runtime, random, kernel.scheme, m, k, exact)
    b, b_scales, b_values = operand(runtime, random, kernel.scheme, n, k, exact)
    c_codes = to_bf16(random.integers(-8, 9, (m, n)) if exact else random.standard_normal((m, n)))
    c = Matrix(runtime, c_codes, _POISON)
    d = Matrix(runtime, np.full((m, n), _POISON, np.uint16), _POISON)
    alpha = 1.0 if exact else 0.75
    call = Product(
        m=m,
        n=n,
        k=k,
        a=a.data,
        b=b.data,
        c=c.data if beta else None,
        d=d.data,
        a_stride=a.stride,
        b_stride=b.stride,
        c_stride=c.stride,
        d_stride=d.stride,
        a_scales=a_scales,
        b_scales=b_scales,
        alpha=alpha,
        beta=beta,
        cluster=(c_int32 * 2)(*cluster),
    )
    provider.launch(runtime, kernel, call)
    right = alpha * (a_values @ b_values.T) + beta * from_bf16(c_codes)
    codes = d.read()
    if exact and kernel.scheme == _BF16:  # sums of small integers: one rounding, bit for bit
        return 0.0 if (from_bf16(codes) == from_bf16(to_bf16(right))).all() else math.inf
    magnitude = alpha * (np.abs(a_values) @ np.abs(b_values.T)) + np.abs(beta * from_bf16(c_codes))
    return used(from_bf16(codes), right, product_bound(magnitude, right, k))


def run_grouped(
    provider: Provider, runtime: Runtime, kernel: Kernel, case: tuple, seed: int
) -> float:
    rows, n, k = case
    random = np.random.default_rng(seed)
    groups, total = len(rows), sum(rows)
    a, _, a_values = operand(runtime, random, _BF16, max(total, 1), k, False)
    b, _, b_values = operand(runtime, random, _BF16, groups * n, k, False)
    d = Matrix(runtime, np.full((max(total, 1), n), _POISON, np.uint16), _POISON)
    starts = np.concatenate([[0], np.cumsum(rows)]).tolist()
    call = Grouped(
        groups=groups,
        n=n,
        k=k,
        m=(c_int64 * groups)(*rows),
        a=(c_void_p * groups)(*(a.data + 2 * a.stride * at for at in starts[:-1])),
        b=(c_void_p * groups)(*(b.data + 2 * b.stride * n * g for g in range(groups))),
        d=(c_void_p * groups)(*(d.data + 2 * d.stride * at for at in starts[:-1])),
        a_stride=a.stride,
        b_stride=b.stride,
        d_stride=d.stride,
        alpha=1.0,
    )
    provider.launch(runtime, kernel, call)
    got, worst = from_bf16(d.read()), 0.0
    for g, (first, last) in enumerate(zip(starts, starts[1:])):
        mine, its = a_values[first:last], b_values[g * n : (g + 1) * n]
        right, magnitude = mine @ its.T, np.abs(mine) @ np.abs(its).T
        worst = max(worst, used(got[first:last], right, product_bound(magnitude, right, k)))
    return worst


def run_attention(
    provider: Provider, runtime: Runtime, kernel: Kernel, case: tuple, seed: int
) -> float:
    batch, heads, heads_kv, queries, keys, head_dim, causal = case
    random = np.random.default_rng(seed)

    def rows(count: int, wide: int) -> tuple[Matrix, np.ndarray]:
        codes = to_bf16(random.standard_normal((batch * count, wide * head_dim)))
        matrix = Matrix(runtime, codes, _POISON)
        return matrix, from_bf16(codes).reshape(batch, count, wide, head_dim)

    (q, q_values), (k, k_values), (v, v_values) = (
        rows(queries, heads),
        rows(keys, heads_kv),
        rows(keys, heads_kv),
    )
    o = Matrix(runtime, np.full((batch * queries, heads * head_dim), _POISON, np.uint16), _POISON)
    lse_image = np.full(batch * heads * queries, np.nan, np.float32)
    lse = runtime.put(lse_image)
    scale = 1 / math.sqrt(head_dim)
    call = Attention(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        causal=causal,
        q=q.data,
        k=k.data,
        v=v.data,
        o=o.data,
        lse=lse,
        q_stride=q.stride,
        kv_stride=k.stride,
        o_stride=o.stride,
        q_batch_stride=q.stride * queries,
        kv_batch_stride=k.stride * keys,
        o_batch_stride=o.stride * queries,
        scale=scale,
    )
    provider.launch(runtime, kernel, call)
    got = from_bf16(o.read()).reshape(batch, queries, heads, head_dim)
    got_lse = runtime.get(lse, lse_image).astype(np.float64).reshape(batch, heads, queries)
    worst = 0.0
    for item in range(batch):
        for head in range(heads):
            of = head // (heads // heads_kv)
            query, key, value = (
                q_values[item, :, head],
                k_values[item, :, of],
                v_values[item, :, of],
            )
            score = scale * (query @ key.T)
            if causal:
                score[np.arange(keys)[None] > np.arange(queries)[:, None]] = -np.inf
            top = score.max(axis=1, keepdims=True)
            weight = np.exp(score - top)
            total = weight.sum(axis=1, keepdims=True)
            right, right_lse = (weight / total) @ value, (top + np.log(total))[:, 0]
            # Errors: scores are F32 sums of d products. Weights have these errors, that of
            # ex2.approx (2^-22), and BF16's (2^-8), which the sum of the weights does not have. O
            # is rounded to BF16 once more.
            scores = (
                (head_dim / 16 + 1) * 19 * 2.0**-24 * scale * (np.abs(query) @ np.abs(key.T)).max()
            )
            relative = 2 * scores + 2.0**-8 + (keys + 16) * 2.0**-23
            allowed = relative * ((weight / total) @ np.abs(value)) + 2.0**-8 * np.abs(right)
            worst = max(worst, used(got[item, :, head], right, allowed))
            allowed_lse = 2 * scores + (keys + 16) * 2.0**-23 + 2.0**-22 * np.abs(right_lse)
            worst = max(worst, used(got_lse[item, head], right_lse, allowed_lse))
    return worst


# m, n, k, beta, whether operands are whole numbers, preferred cluster
_GEMMS = [
    (131, 264, 136, 0.0, True, (0, 0)),
    (257, 392, 72, 0.5, False, (0, 0)),
    (1, 8, 8, 0.0, False, (2, 1)),
    (640, 256, 264, 0.0, True, (2, 2)),
    (130, 136, 2056, 0.0, False, (4, 1)),
]
_SCALED = [
    (131, 264, 288, 0.0, False, (0, 0)),
    (257, 392, 416, 0.5, False, (0, 0)),
    (1, 8, 32, 0.0, False, (2, 1)),
    (300, 136, 1056, 0.0, False, (2, 2)),
]
_GROUPS = [
    ([129, 0, 1, 64], 136, 72),
    ([3], 264, 264),
    ([0, 0, 200], 8, 8),
]
# batch, heads, key-value heads, queries, keys, head dimension, causal
_ATTENTIONS = [
    (2, 4, 2, 130, 130, 64, 1),
    (1, 2, 2, 257, 261, 128, 0),
    (1, 2, 1, 300, 300, 128, 1),
    (1, 1, 1, 1, 7, 64, 0),
]


def check(provider: Provider, runtime: Runtime, kernels: list[Kernel], quick: bool) -> bool:
    good = True
    for kernel in kernels:
        cases, run = {
            _GEMM: (_GEMMS if kernel.scheme == _BF16 else _SCALED, run_product),
            _GROUPED: (_GROUPS, run_grouped),
            _ATTENTION: (_ATTENTIONS, run_attention),
        }[kernel.kind]
        for i, case in enumerate(cases[:2] if quick else cases):
            share = run(provider, runtime, kernel, case, seed=100 + i)
            runtime.release()
            good &= share <= 1
            words = " ".join(str(part) for part in case)
            print(f"{kernel.name.decode():32} {words:44} {share:.3f}", flush=True)
    return good


def check_refusals(provider: Provider, runtime: Runtime, kernels: list[Kernel]) -> bool:
    """Checks that invalid calls are rejected with a message, and that nothing is launched."""
    place = runtime.put(np.zeros(65536, np.uint16))
    fine = dict(m=64, n=64, k=64, a=place, b=place, d=place, a_stride=64, b_stride=64, d_stride=64)
    wrong = [
        ({"size_of": 3}, "expected"),
        ({"n": 0}, "1 to 2^31"),
        ({"m": 1 << 31}, "1 to 2^31"),
        ({"beta": 1.0}, "there is no C"),
        ({"n": 60}, "16 bytes"),
        ({"k": 63}, "16 bytes"),
    ]
    (kernel, *_) = (k for k in kernels if k.kind == _GEMM and k.scheme == _BF16)
    told = 0
    for change, words in wrong:
        call = Product(**{"size_of": ctypes.sizeof(Product), "alpha": 1.0, **fine, **change})
        result = kernel.launch(ctypes.byref(call), place, None)
        why = provider.library.deepwell_cutlass_error().decode()
        told += result == 1 and words in why
    print(f"refused: {told} of {len(wrong)}")
    runtime.release()
    return told == len(wrong)


def time(provider: Provider, kernels: list[Kernel]) -> bool:
    import torch

    good = True
    print(
        f"{torch.cuda.get_device_name()}; CUTLASS {provider.version}; PyTorch {torch.__version__}"
    )
    print(f"{'m x n x k':22} {'kernel':32} {'TFLOP/s':>8} {'us':>9} {'of allowed':>10}")
    for m, n, k in [
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (8192, 2048, 4096),
        (16384, 1024, 1024),
        (512, 4096, 4096),
        (4096, 11008, 4096),
    ]:
        torch.manual_seed(m + n + k)
        a = torch.randn(m, k, device="cuda").bfloat16()
        b = torch.randn(n, k, device="cuda").bfloat16()
        d = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        rows = torch.randint(0, m, (256,), device="cuda")
        right = a[rows].double() @ b.double().T
        magnitude = a[rows].double().abs() @ b.double().abs().T

        def median(run) -> float:
            for _ in range(10):
                run()
            taken = []
            for _ in range(100):
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                run()
                last.record()
                last.synchronize()
                taken.append(first.elapsed_time(last) * 1e3)
            return sorted(taken)[len(taken) // 2]

        def report(name: str, run) -> float:
            d.fill_(float("nan"))
            us = median(run)
            got = d[rows].double().cpu().numpy()
            share = used(
                got,
                right.cpu().numpy(),
                product_bound(magnitude.cpu().numpy(), right.cpu().numpy(), k),
            )
            flops = 2e-6 * m * n * k / us
            print(
                f"{f'{m} x {n} x {k}':22} {name:32} {flops:8.1f} {us:9.1f} {share:10.3f}",
                flush=True,
            )
            return share

        report("torch.matmul", lambda: torch.matmul(a, b.T, out=d))
        for kernel in kernels:
            if kernel.kind != _GEMM or kernel.scheme != _BF16:
                continue
            call = Product(
                size_of=ctypes.sizeof(Product),
                m=m,
                n=n,
                k=k,
                a=a.data_ptr(),
                b=b.data_ptr(),
                d=d.data_ptr(),
                a_stride=k,
                b_stride=k,
                d_stride=n,
                alpha=1.0,
            )
            size = c_size_t()
            provider.check(kernel.workspace_bytes(ctypes.byref(call), ctypes.byref(size)))
            space = torch.empty(max(size.value, 16), dtype=torch.uint8, device="cuda")
            stream = torch.cuda.current_stream().cuda_stream

            def run(kernel=kernel, call=call, space=space, stream=stream) -> None:
                provider.check(kernel.launch(ctypes.byref(call), space.data_ptr(), stream))

            good &= report(kernel.name.decode(), run) <= 1
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lib", required=True)
    parser.add_argument("--kernel", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.time:
        import torch  # noqa: F401  (its runtime is the process's)
    runtime, provider = Runtime(), Provider(options.lib)
    capability = runtime.capability()
    kernels = [
        k
        for k in provider.kernels
        if options.kernel in k.name.decode() and k.capability == capability
    ]
    if not kernels:
        names = ", ".join(f"{k.name.decode()} ({k.capability})" for k in provider.kernels)
        print(f"no kernel for compute capability {capability}: {names}")
        return 2
    if options.time:
        good = time(provider, kernels)
    else:
        good = check(provider, runtime, kernels, options.quick)
        if not options.kernel:
            good &= check_refusals(provider, runtime, kernels)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
