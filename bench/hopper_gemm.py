"""Measures the GEMM of Hopper (cuda/sm90/sm90_gemm.cu) beside cuBLAS on one GPU, through the C interface.

    python3 bench/hopper_gemm.py [MxNxK ...] [--epilogues] [--rounds N] [--out FILE.json]

D = A B^T in BF16 with random data, TFLOP/s, medians of rounds in turns. Each call has other operands than the three
before it, so that they come from memory. Two states of the GPU, whose clock follows its power: "burst", 1 ms of calls
after 4 ms of rest, as between the other kernels of a training step; "steady", one load of GEMMs after the other. Calls
are captured in CUDA graphs, so that the host's time for a call does not count.
``--epilogues`` also measures each epilogue that `dw_gemm_run` has, beside PyTorch's: cuBLAS, and elementwise kernels
where cuBLAS has no such epilogue. "of plain" is Deepwell's rate with the epilogue divided by cuBLAS' without one.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
from pathlib import Path

SIZES = [
    "4096x4096x4096", "8192x8192x8192", "16384x4096x4096", "16384x14336x4096", "16384x4096x14336", "8192x28672x8192",
    "2048x768x768", "2048x3072x768", "512x4096x4096", "64x4096x4096", "768x3072x16384", "768x768x16384",
    "2304x768x16384", "512x2048x8192",
    "8192x8192x2048", "8192x2048x8192", "8192x2048x2048", "16384x3072x768", "16384x768x3072", "16384x768x768",
]  # fmt: skip
PUBLISHED = 10  # the first of them are those of a published table
COPIES = 4
NONE, GELU, GELU_TANH, SWIGLU = range(4)  # dw_activation


class Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


class Gemm(ctypes.Structure):
    """struct dw_gemm (include/deepwell/gemm.h)."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("device", ctypes.c_void_p), ("dtype", ctypes.c_int),
        ("output", ctypes.c_int), ("m", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64),
        ("alpha", ctypes.c_float), ("activation", ctypes.c_int), ("a", Matrix), ("b", Matrix), ("d", Matrix),
        ("bias", ctypes.c_void_p), ("residual", Matrix), ("stream", ctypes.c_void_p),
        ("quantized", ctypes.c_int), ("quantized_d", ctypes.c_int), ("scheme_a", ctypes.c_int),
        ("scheme_b", ctypes.c_int), ("scales_a", ctypes.c_void_p), ("scales_b", ctypes.c_void_p),
        ("scales_d", ctypes.c_void_p), ("factor_a", ctypes.c_void_p), ("factor_b", ctypes.c_void_p),
        ("kernel", ctypes.c_char_p), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t),
        ("row_scale", ctypes.c_void_p), ("row_squares", ctypes.c_void_p), ("row_norm", ctypes.c_int),
        ("row_epsilon", ctypes.c_float), ("scheme_d", ctypes.c_int), ("turned_d", Matrix),
        ("turned_scales_d", ctypes.c_void_p), ("plain_d", Matrix),
    ]  # fmt: skip


def library() -> ctypes.CDLL:
    """Returns the library that the installed package runs."""
    import deepwell  # noqa: F401

    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libdeepwell.so" in line:
            found = ctypes.CDLL(line.split()[-1])
            found.dw_last_error.restype = found.dw_dtype_name.restype = ctypes.c_char_p
            return found
    raise SystemExit("hopper_gemm: libdeepwell.so is not loaded; expected a shared build")


def tile_of(dw: ctypes.CDLL, call: Gemm) -> tuple[str, str]:
    """Returns the tile that computes a call, and what has chosen it."""
    text = ctypes.c_char_p()
    if dw.dw_gemm_explain(ctypes.byref(call), None, ctypes.byref(text)) != 0:
        raise SystemExit(f"dw_gemm_explain: {dw.dw_last_error().decode()}")
    tile = json.loads(text.value)["candidates"][0]["tile"]
    dw.dw_text_free(text)
    words = [f"{tile['tile_m']}x{tile['tile_n']}x{tile['stages']}", f"{tile['ctas']} blocks"]
    words += ["in turn"] * tile["in_turn"] + ["shared"] * tile["shared"]
    return ", ".join(words), tile["chosen_by"]


def graph_of(function, calls: int):
    """Captures that many calls, each with the operands' next copy."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(COPIES):
            function(i)  # what is chosen or allocated at the first call is no part of the graph
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            function(i % COPIES)
    return graph


def median_ms(functions, rounds: int, burst: bool) -> list[float]:
    """Returns the median time of a call of each, in turns; functions take the number of the operands' copy."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    once = graph_of(functions[0], 8)
    once.replay()
    begin.record()
    once.replay()
    end.record()
    end.synchronize()
    calls = max(2, int((1.0 if burst else 12.0) / (begin.elapsed_time(end) / 8)))
    graphs = [graph_of(function, calls) for function in functions]
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for graph, found in zip(graphs, times):
            if burst:
                torch.cuda._sleep(8_000_000)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / calls)
    return [statistics.median(found) for found in times]


class Problem:
    """One size with each form of the epilogue: PyTorch's call and Deepwell's, on the same operands."""

    def __init__(self, size: str, dw: ctypes.CDLL) -> None:
        import torch

        self.m, self.n, self.k = (int(x) for x in size.split("x"))
        self.dw = dw
        self.dtype, self.f32 = (
            next(i for i in range(64) if dw.dw_dtype_name(i) == name) for name in (b"bf16", b"f32")
        )

        def draw(*shape):
            return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(COPIES)]

        self.a, self.b = draw(self.m, self.k), draw(self.n, self.k)
        self.d, self.residual = draw(self.m, self.n), draw(self.m, self.n)
        self.d_f32 = [x.float() for x in self.residual]
        self.bias = torch.randn(self.n, device="cuda", dtype=torch.bfloat16)

    def ours(self, activation=NONE, bias=False, residual=False, f32=False):
        import torch

        outputs, output = (self.d_f32, self.f32) if f32 else (self.d, self.dtype)
        half = 2 if activation == SWIGLU else 1
        calls = [
            Gemm(
                ctypes.sizeof(Gemm), None, self.dtype, output, self.m, self.n // half, self.k, 1.0, activation,
                Matrix(a.data_ptr(), self.k), Matrix(b.data_ptr(), self.k), Matrix(d.data_ptr(), self.n // half),
                self.bias.data_ptr() if bias else None,
                Matrix(r.data_ptr(), self.n) if residual else Matrix(None, 0), None,
            )
            for a, b, d, r in zip(self.a, self.b, outputs, self.d_f32 if f32 else self.residual)
        ]  # fmt: skip

        needed = ctypes.c_size_t()
        if self.dw.dw_gemm_workspace(ctypes.byref(calls[0]), ctypes.byref(needed)) != 0:
            raise SystemExit(f"hopper_gemm: {self.dw.dw_last_error().decode()}")
        workspace = torch.empty(needed.value, device="cuda", dtype=torch.uint8)
        for call in calls:
            call.workspace, call.workspace_bytes = workspace.data_ptr(), workspace.numel()

        def run(i, workspace=workspace):
            calls[i].stream = torch.cuda.current_stream().cuda_stream
            if self.dw.dw_gemm_run(ctypes.byref(calls[i])) != 0:
                raise SystemExit(f"hopper_gemm: {self.dw.dw_last_error().decode()}")

        run.call = calls[0]
        return run

    def forms(self, epilogues: bool) -> dict:
        import torch
        from torch.nn import functional

        out = torch.empty_like(self.d[0])
        made = {"": (lambda i: torch.mm(self.a[i], self.b[i].t(), out=out), self.ours())}
        if not epilogues:
            return made

        def linear(i):
            return torch.addmm(self.bias, self.a[i], self.b[i].t())

        made["bias"] = (linear, self.ours(bias=True))
        made["residual"] = (
            lambda i: torch.addmm(self.residual[i], self.a[i], self.b[i].t(), out=out),
            self.ours(residual=True),
        )
        made["f32"] = (
            lambda i: torch.mm(self.a[i], self.b[i].t(), out_dtype=torch.float32),
            self.ours(f32=True),
        )
        made["f32, added"] = (
            lambda i: self.d_f32[i].add_(
                torch.mm(self.a[i], self.b[i].t(), out_dtype=torch.float32)
            ),
            self.ours(f32=True, residual=True),
        )
        made["bias, gelu"] = (lambda i: functional.gelu(linear(i)), self.ours(GELU, bias=True))
        made["bias, gelu tanh"] = (
            lambda i: functional.gelu(linear(i), approximate="tanh"),
            self.ours(GELU_TANH, bias=True),
        )
        if self.n % 16 == 0:

            def swiglu(i):
                gate, up = torch.mm(self.a[i], self.b[i].t()).chunk(2, 1)
                return functional.silu(gate) * up

            made["swiglu"] = (swiglu, self.ours(SWIGLU))
        return made

    def check(self, name: str, theirs, ours) -> None:
        """Compares one element of each with a sum in FP64, so that no wrong kernel is timed."""
        theirs(1)
        ours(1)
        if name == "":
            want = self.a[1][0].double() @ self.b[1][0].double()
            error = abs(self.d[1][0, 0].item() - want.item())
            if error > 2**-7 * max(1.0, abs(want.item())):
                raise SystemExit(
                    f"hopper_gemm: D[0, 0] is {self.d[1][0, 0].item()}; expected {want.item()}"
                )


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("sizes", nargs="*", default=SIZES, metavar="MxNxK")
    made.add_argument("--epilogues", action="store_true")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--out", type=Path)
    options = made.parse_args()
    import torch

    dw, rows = library(), []
    for size in options.sizes:
        problem = Problem(size, dw)
        plain: dict[str, float] = {}
        for name, (theirs, ours) in problem.forms(options.epilogues).items():
            problem.check(name, theirs, ours)
            row = {"size": size, "epilogue": name, "tile": " by the ".join(tile_of(dw, ours.call))}
            line = f"{size:18} {name:16}"
            for state in ("burst", "steady"):
                times = median_ms([theirs, ours], options.rounds, state == "burst")
                cublas, deepwell = (
                    2 * problem.m * problem.n * problem.k / ms / 1e9 for ms in times
                )
                of_plain = deepwell / plain.setdefault(state, cublas)
                row[state] = {
                    "cublas": round(cublas, 1), "deepwell": round(deepwell, 1), "of_plain": round(of_plain, 3),
                }  # fmt: skip
                line += f"  {state} {cublas:6.1f} {deepwell:6.1f} ({deepwell / cublas:.3f}; of plain {of_plain:.3f})"
            rows.append(row)
            print(line + "  " + row["tile"], flush=True)
    for name in dict.fromkeys(row["epilogue"] for row in rows):
        for state in ("burst", "steady"):
            found = [r for r in rows if r["epilogue"] == name]
            mean = statistics.geometric_mean
            line = f"geometric mean, {name or 'plain'}, {state}: "
            line += f"{mean(r[state]['deepwell'] / r[state]['cublas'] for r in found):.3f}"
            line += f", of cuBLAS plain {mean(r[state]['of_plain'] for r in found):.3f}"
            if published := [r for r in found if r["size"] in SIZES[:PUBLISHED]]:
                line += f"; of the {len(published)} published sizes "
                line += f"{mean(r[state]['deepwell'] / r[state]['cublas'] for r in published):.3f}"
                line += f", of cuBLAS plain {mean(r[state]['of_plain'] for r in published):.3f}"
            print(line)
    if options.out:
        record = {
            "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "unit": "TFLOP/s", "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
