"""Are CUTLASS's product kernels right by the library's own calls? dw_gemm_run and dw_grouped_gemm_run with a
kernel's name, on this GPU or an emulated one; ctypes and NumPy, a line per case.

    python3 tests/gpu/gemm_smoke.py --lib build/release/lib/libdeepwell.so
        [--kernel SUBSTRING]   only kernels whose name contains it
        [--quick]              the first two cases of each
        [--time]               instead: what a call costs, beside the same by the provider's own function (on a GPU)
        [--refused WORDS]      instead: each kernel is to be refused at its first use, for a reason with these words,
                               and what it computes to be right all the same, or refused, where it takes codes

libdeepwell_cutlass.so lies beside it, or DEEPWELL_CUTLASS names it. Cases, bounds and NaNs around are those of
cutlass_smoke.py. Each case is called by a thread of its own, which has no context yet. On a GPU products are captured,
their first uses too, and it is the graph that computes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import (
    POINTER,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from types import SimpleNamespace

import cutlass_smoke as smoke
import numpy as np

_DW_BF16, _DW_UNSUPPORTED = 3, 4
_SCHEMES = {"BF16": smoke._BF16, "MXFP8": smoke._MXFP8, "NVFP4": smoke._NVFP4}
_EMULATED = "DEEPWELL_EMULATE_ARCH" in os.environ  # which has no graphs


class DwMatrix(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class DwGemm(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("device", c_void_p),
        ("dtype", c_int),
        ("output", c_int),
        *((name, c_int64) for name in ("m", "n", "k")),
        ("alpha", c_float),
        ("activation", c_int),
        *((name, DwMatrix) for name in ("a", "b", "d")),
        ("bias", c_void_p),
        ("residual", DwMatrix),
        ("stream", c_void_p),
        *((name, c_int) for name in ("quantized", "quantized_d", "scheme_a", "scheme_b")),
        *((name, c_void_p) for name in ("scales_a", "scales_b", "scales_d")),
        *((name, c_void_p) for name in ("factor_a", "factor_b")),
        ("kernel", c_char_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class DwGrouped(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("device", c_void_p),
        ("dtype", c_int),
        ("alpha", c_float),
        ("groups", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("m", POINTER(c_int64)),
        *((name, POINTER(c_void_p)) for name in ("a", "b", "d")),
        *((name, c_int64) for name in ("stride_a", "stride_b", "stride_d")),
        ("stream", c_void_p),
        ("kernel", c_char_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class Deepwell:
    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.library = ctypes.CDLL(self.path)
        self.library.dw_last_error.restype = c_char_p

    def error(self) -> str:
        return self.library.dw_last_error().decode()

    def check(self, status: int) -> None:
        if status:
            raise SystemExit(self.error())

    def kernels(self, capability: int) -> list[SimpleNamespace]:
        """Returns CUTLASS's GEMM kernels for this GPU, as `deepwell explain kernels` lists them."""
        text = c_char_p()
        self.check(self.library.dw_gpu_kernels(ctypes.byref(text)))
        return [
            SimpleNamespace(
                name=row["name"],
                grouped=row["operation"] != "gemm",
                scheme=_SCHEMES[row["elements"].split()[0]],
            )
            for row in json.loads(text.value.decode())
            if row["name"].startswith(f"cutlass.sm{capability}.")
            and row["operation"].startswith("gemm")
        ]


class Stream:
    """A stream on which launches are captured and then run as a graph; on the emulator they run at
    once."""

    def __init__(self, runtime: smoke.Runtime) -> None:
        self.runtime, self.handle = runtime, c_void_p()
        runtime.check(runtime.library.cudaStreamCreateWithFlags(ctypes.byref(self.handle), 1))

    def run(self, launch: Callable[[], None], captured: bool) -> None:
        way = self.capture if captured and not _EMULATED else lambda do: do()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(way, launch).result()
        self.runtime.check(self.runtime.library.cudaStreamSynchronize(self.handle))

    def capture(self, launch: Callable[[], None]) -> None:
        library, check = self.runtime.library, self.runtime.check
        graph, ready = c_void_p(), c_void_p()
        check(library.cudaStreamBeginCapture(self.handle, 0))
        launch()
        check(library.cudaStreamEndCapture(self.handle, ctypes.byref(graph)))
        check(library.cudaGraphInstantiate(ctypes.byref(ready), graph, c_uint64(0)))
        check(library.cudaGraphLaunch(ready, self.handle))
        check(library.cudaStreamSynchronize(self.handle))
        check(library.cudaGraphExecDestroy(ready))
        check(library.cudaGraphDestroy(graph))


def run_product(deepwell, runtime, stream, kernel, case: tuple, seed: int) -> float:
    m, n, k, beta, exact, in_place = case
    random = np.random.default_rng(seed)
    a, a_scales, a_values = smoke.operand(runtime, random, kernel.scheme, m, k, exact)
    b, b_scales, b_values = smoke.operand(runtime, random, kernel.scheme, n, k, exact)
    c_codes = smoke.to_bf16(
        random.integers(-8, 9, (m, n)) if exact else random.standard_normal((m, n))
    )
    poison = np.full((m, n), smoke._POISON, np.uint16)
    d = smoke.Matrix(runtime, c_codes if in_place else poison, smoke._POISON)
    residual = d if in_place else smoke.Matrix(runtime, c_codes, smoke._POISON) if beta else None
    scaled, alpha = kernel.scheme != smoke._BF16, 1.0 if exact else 0.75
    factors = np.array([1.75, 0.40625], np.float32)
    at = runtime.put(factors) if scaled else 0
    unit = 2 if kernel.scheme == smoke._NVFP4 else 1  # strides of codes are in bytes
    call = DwGemm(
        struct_size=ctypes.sizeof(DwGemm),
        dtype=_DW_BF16,
        output=_DW_BF16,
        m=m,
        n=n,
        k=k,
        alpha=alpha,
        a=DwMatrix(a.data, a.stride // unit),
        b=DwMatrix(b.data, b.stride // unit),
        d=DwMatrix(d.data, d.stride),
        stream=stream.handle,
        kernel=kernel.name.encode(),
    )
    if residual:
        call.residual = DwMatrix(residual.data, residual.stride)
    if scaled:
        call.quantized = 1
        call.scheme_a = call.scheme_b = kernel.scheme
        call.scales_a, call.scales_b = a_scales, b_scales
        call.factor_a, call.factor_b = at, at + 4
        alpha *= float(factors[0]) * float(factors[1])
    give_workspace(deepwell, runtime, deepwell.library.dw_gemm_workspace, call)
    stream.run(
        lambda: deepwell.check(deepwell.library.dw_gemm_run(ctypes.byref(call))), captured=True
    )
    values = smoke.from_bf16(c_codes) if residual else np.zeros((m, n))
    right = alpha * (a_values @ b_values.T) + values
    codes = d.read()
    if exact and not scaled:  # sums of small integers: one rounding, bit for bit
        same = smoke.from_bf16(codes) == smoke.from_bf16(smoke.to_bf16(right))
        return 0.0 if same.all() else math.inf
    magnitude = alpha * (np.abs(a_values) @ np.abs(b_values.T)) + np.abs(values)
    # alpha and its factors add two roundings
    allowed = smoke.product_bound(magnitude, right, k) + 2.0**-23 * magnitude
    return smoke.used(smoke.from_bf16(codes), right, allowed)


def _products(kernel: SimpleNamespace) -> list[tuple]:
    """m, n, k, whether there is a residual, whether operands are whole numbers, and whether the
    residual is D."""
    cases = smoke._GEMMS if kernel.scheme == smoke._BF16 else smoke._SCALED
    return [
        *((m, n, k, bool(beta), exact, False) for m, n, k, beta, exact, _ in cases),
        (301, 264, 160, True, False, True),
    ]


def give_workspace(deepwell, runtime, ask: Callable, call: ctypes.Structure) -> None:
    size = c_size_t()
    deepwell.check(ask(ctypes.byref(call), ctypes.byref(size)))
    if size.value:
        call.workspace, call.workspace_bytes = runtime.empty(size.value), size.value


def run_grouped(deepwell, runtime, stream, kernel, case: tuple, seed: int) -> float:
    rows, n, k = case
    random = np.random.default_rng(seed)
    groups, total = len(rows), sum(rows)
    a, _, a_values = smoke.operand(runtime, random, smoke._BF16, total, k, False)
    b, _, b_values = smoke.operand(runtime, random, smoke._BF16, groups * n, k, False)
    d = smoke.Matrix(runtime, np.full((total, n), smoke._POISON, np.uint16), smoke._POISON)
    starts = np.concatenate([[0], np.cumsum(rows)]).tolist()

    def pointers(matrix: smoke.Matrix, first_rows: list[int]) -> ctypes.Array:
        """Groups without rows compute nothing."""
        return (c_void_p * groups)(
            *(
                matrix.data + 2 * matrix.stride * first if count else None
                for first, count in zip(first_rows, rows)
            )
        )

    call = DwGrouped(
        struct_size=ctypes.sizeof(DwGrouped),
        dtype=_DW_BF16,
        alpha=1.0,
        groups=groups,
        n=n,
        k=k,
        m=(c_int64 * groups)(*rows),
        a=pointers(a, starts),
        b=pointers(b, [n * g for g in range(groups)]),
        d=pointers(d, starts),
        stride_a=a.stride,
        stride_b=b.stride,
        stride_d=d.stride,
        stream=stream.handle,
        kernel=kernel.name.encode() if kernel else None,
    )
    give_workspace(deepwell, runtime, deepwell.library.dw_grouped_gemm_workspace, call)
    stream.run(
        lambda: deepwell.check(deepwell.library.dw_grouped_gemm_run(ctypes.byref(call))),
        captured=kernel is None,  # CUTLASS's kernel copies from the host
    )
    got, worst = smoke.from_bf16(d.read()), 0.0
    for g, (first, last) in enumerate(zip(starts, starts[1:])):
        mine, its = a_values[first:last], b_values[g * n : (g + 1) * n]
        right, magnitude = mine @ its.T, np.abs(mine) @ np.abs(its).T
        allowed = smoke.product_bound(magnitude, right, k)
        worst = max(worst, smoke.used(got[first:last], right, allowed))
    return worst


def is_refused(deepwell: Deepwell, kernel: SimpleNamespace, words: str) -> bool:
    """First-use checks, with and without a residual."""
    found = 0
    for residual in (None, 16) if not kernel.grouped else (None,):
        if kernel.grouped:
            call = DwGrouped(
                struct_size=ctypes.sizeof(DwGrouped),
                dtype=_DW_BF16,
                groups=1,
                n=64,
                k=64,
                m=(c_int64 * 1)(64),
                stride_a=64,
                stride_b=64,
                stride_d=64,
                kernel=kernel.name.encode(),
            )
            status = deepwell.library.dw_grouped_gemm_supported(ctypes.byref(call))
        else:
            call = DwGemm(
                struct_size=ctypes.sizeof(DwGemm),
                dtype=_DW_BF16,
                output=_DW_BF16,
                m=64,
                n=64,
                k=64,
                a=DwMatrix(None, 64),
                b=DwMatrix(None, 64),
                d=DwMatrix(None, 64),
                residual=DwMatrix(residual, 64),
                quantized=kernel.scheme != smoke._BF16,
                scheme_a=kernel.scheme,
                scheme_b=kernel.scheme,
                kernel=kernel.name.encode(),
            )
            status = deepwell.library.dw_gemm_supported(ctypes.byref(call))
        if status == _DW_UNSUPPORTED and words in deepwell.error():
            found += 1
        else:
            print(f"{kernel.name}: not refused: {deepwell.error() if status else 'used'}")
    return found == (1 if kernel.grouped else 2)


def check(deepwell, runtime, stream, kernels: list, options: argparse.Namespace) -> bool:
    good = True
    for kernel in kernels:
        if options.refused:
            refused = is_refused(deepwell, kernel, options.refused)
            good &= refused
            print(f"{kernel.name:32} {'refused' if refused else 'NOT REFUSED'}", flush=True)
            if kernel.scheme != smoke._BF16:
                continue  # no other kernel computes it instead
        cases = smoke._GROUPS if kernel.grouped else _products(kernel)
        for i, case in enumerate(cases[:2] if options.quick else cases):
            began = time.perf_counter()
            run = run_grouped if kernel.grouped else run_product
            share = run(deepwell, runtime, stream, kernel, case, 100 + i)
            runtime.release()
            good &= share <= 1
            words = " ".join(str(part) for part in case)
            took = time.perf_counter() - began
            print(f"{kernel.name:32} {words:40} {share:.3f} {took:7.2f} s", flush=True)
    return good


def cost(deepwell: Deepwell, runtime: smoke.Runtime, kernels: list) -> None:
    """Calls that follow one another, all of them small."""
    provider = smoke.Provider(
        os.environ.get("DEEPWELL_CUTLASS")
        or os.path.join(os.path.dirname(deepwell.path), "libdeepwell_cutlass.so")
    )
    m, n, k, calls = 128, 128, 64, 2000
    at = [runtime.put(np.zeros(m * n, np.uint16)) for _ in range(3)]
    size, space = c_size_t(), runtime.empty(1 << 26)
    theirs = {their.name.decode(): their for their in provider.kernels}

    def microseconds(launch: Callable[[], int]) -> float:
        for _ in range(100):
            deepwell.check(launch())
        runtime.check(runtime.library.cudaDeviceSynchronize())
        began = time.perf_counter()
        for _ in range(calls):
            launch()
        runtime.check(runtime.library.cudaDeviceSynchronize())
        return 1e6 * (time.perf_counter() - began) / calls

    for kernel in (kernel for kernel in kernels if kernel.scheme == smoke._BF16):
        if kernel.grouped:
            continue
        named = DwGemm(
            struct_size=ctypes.sizeof(DwGemm),
            dtype=_DW_BF16,
            output=_DW_BF16,
            m=m,
            n=n,
            k=k,
            alpha=1.0,
            a=DwMatrix(at[0], k),
            b=DwMatrix(at[1], k),
            d=DwMatrix(at[2], n),
            kernel=kernel.name.encode(),
            workspace=space,
            workspace_bytes=1 << 26,
        )
        plain = smoke.Product(
            size_of=ctypes.sizeof(smoke.Product),
            m=m,
            n=n,
            k=k,
            a=at[0],
            b=at[1],
            d=at[2],
            a_stride=k,
            b_stride=k,
            d_stride=n,
            alpha=1.0,
        )
        their = theirs[kernel.name]
        provider.check(their.workspace_bytes(ctypes.byref(plain), ctypes.byref(size)))
        ours_us = microseconds(lambda: deepwell.library.dw_gemm_run(ctypes.byref(named)))
        their_us = microseconds(lambda: their.launch(ctypes.byref(plain), space, None))
        print(f"{kernel.name:32} dw_gemm_run {ours_us:.2f} us, the provider {their_us:.2f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lib", required=True)
    parser.add_argument("--kernel", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--refused", default="")
    options = parser.parse_args()
    runtime, deepwell = smoke.Runtime(), Deepwell(options.lib)
    capability = runtime.capability()
    kernels = [k for k in deepwell.kernels(capability) if options.kernel in k.name]
    if not kernels:
        print(f"no kernel of CUTLASS's for compute capability {capability}: is the library there?")
        return 2
    if options.time:
        cost(deepwell, runtime, kernels)
        return 0
    good = check(deepwell, runtime, Stream(runtime), kernels, options)
    if capability == 100 and not options.refused and not options.kernel:
        # Deepwell's kernel, group by group, with the variants that the library carries.
        share = run_grouped(deepwell, runtime, Stream(runtime), None, smoke._GROUPS[0], 200)
        good &= share <= 1
        print(f"{'sm100_gemm':32} {'groups':40} {share:.3f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
