"""Is Hopper's GEMM right on this GPU, with each tile and each epilogue that `dw_gemm_run` has? Also to be run under
compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python3 tests/gpu/hopper_gemm_smoke.py [-k WORDS]

Prints a line for each case, with its tile. Results may differ from PyTorch's in FP64, rounded once, by (u + 8 sqrt(k)
2^-24) times the largest magnitude, where u is the unit roundoff of D's type. Exits with status 1 if one differs by more,
or if the cases have fewer tiles than TILES names. The cost model chooses the tiles: nothing is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import sys
from pathlib import Path

os.environ["DEEPWELL_AUTOTUNE"] = "0"
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]

import torch  # noqa: E402
from hopper_gemm import GELU, GELU_TANH, NONE, SWIGLU, Gemm, Matrix, library, tile_of  # noqa: E402
from torch.nn import functional  # noqa: E402

FP8_BLOCK = 5  # DW_SCHEME_FP8_BLOCK
RMS_NORM = 1  # row_norm of dw_gemm
# Sizes by the tile that computes them on a GPU of 132 SMs.
TILES = {
    "128x128 in turn": (2100, 2056, 200), "128x256": (4090, 776, 776), "128x192": (4090, 768, 776),
    "128x96": (2040, 768, 776), "128x128, one block": (505, 4096, 520),
    "128x128, two blocks": (512, 2040, 4104), "128x128, three blocks": (760, 768, 8200),
    "64x128, one block": (61, 14336, 264), "64x64": (61, 4088, 4104), "shared tiles": (760, 3072, 16392),
}  # fmt: skip
# The activation, and what else the call has.
EPILOGUES = {
    "bias": (NONE, ("bias",)), "gelu": (GELU, ("bias",)), "gelu tanh": (GELU_TANH, ()), "swiglu": (SWIGLU, ()),
    "residual": (NONE, ("residual",)), "f32": (NONE, ("f32",)), "f32, added": (NONE, ("f32", "residual")),
    "row factors": (NONE, ("factors",)), "row squares": (NONE, ("squares", "residual")),
}  # fmt: skip
OF_EPILOGUES = ("128x256", "64x64")


class Case:
    """A call and the result that it should have."""

    def __init__(self, dw, size, activation=NONE, having=()):
        m, n, k = size
        f32 = "f32" in having
        half = 2 if activation == SWIGLU else 1
        types = {dw.dw_dtype_name(i): i for i in range(64)}
        out = torch.float32 if f32 else torch.bfloat16
        self.dw, self.k = dw, k

        def draw(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, device="cuda", dtype=dtype)

        def unwritten(*shape, dtype):
            return torch.full(shape, math.nan, device="cuda", dtype=dtype)

        self.a, self.b, self.d = draw(m, k), draw(n * half, k), unwritten(m, n, dtype=out)
        self.bias = draw(n * half) if "bias" in having else None
        self.residual = draw(m, n, dtype=out) if "residual" in having else None
        self.factors = draw(m, dtype=torch.float32) if "factors" in having else None
        self.squares = unwritten(m, dtype=torch.float32) if "squares" in having else None
        self.call = Gemm(
            struct_size=ctypes.sizeof(Gemm), dtype=types[b"bf16"], output=types[b"f32" if f32 else b"bf16"],
            m=m, n=n, k=k, alpha=0.5, activation=activation, a=Matrix(self.a.data_ptr(), k),
            b=Matrix(self.b.data_ptr(), k), d=Matrix(self.d.data_ptr(), n), bias=pointer(self.bias),
            residual=Matrix(pointer(self.residual), n), row_scale=pointer(self.factors),
            row_squares=pointer(self.squares), row_norm=RMS_NORM if "squares" in having else 0, row_epsilon=1e-5,
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        needed = ctypes.c_size_t()
        self.do(dw.dw_gemm_workspace(ctypes.byref(self.call), ctypes.byref(needed)))
        self.workspace = torch.empty(max(1, needed.value), device="cuda", dtype=torch.uint8)
        if needed.value:
            self.call.workspace, self.call.workspace_bytes = pointer(self.workspace), needed.value

    def do(self, status: int) -> None:
        if status != 0:
            raise SystemExit(f"hopper_gemm_smoke: {self.dw.dw_last_error().decode()}")

    def run(self) -> None:
        self.do(self.dw.dw_gemm_run(ctypes.byref(self.call)))

    def expected(self) -> torch.Tensor:
        y = 0.5 * (self.a.double() @ self.b.double().t())
        if self.factors is not None:
            y *= self.factors.double()[:, None]
        if self.bias is not None:
            y += self.bias.double()
        if self.call.activation in (GELU, GELU_TANH):
            y = functional.gelu(y, approximate="none" if self.call.activation == GELU else "tanh")
        if self.call.activation == SWIGLU:
            gate, up = y.chunk(2, 1)
            y = functional.silu(gate) * up
        return y if self.residual is None else y + self.residual.double()

    def error(self) -> float:
        """Returns the largest error in units of the bound."""
        want = self.expected()
        self.run()
        u = 2**-24 if self.d.dtype == torch.float32 else 2**-8
        bound = (u + 8 * math.sqrt(self.k) * 2**-24) * want.abs().max().item()
        worst = (self.d.double() - want).abs().max().item() / bound
        if self.squares is not None:
            norm = (self.d.double().square().mean(1) + 1e-5).rsqrt()
            bound = self.d.shape[1] * 2**-24  # sums of n squares in F32, and their root
            worst = max(worst, (self.squares.double() / norm - 1).abs().max().item() / bound)
        return worst if math.isfinite(worst) else math.inf


def pointer(x):
    return None if x is None else x.data_ptr()


def codes_differ(dw, size: tuple[int, int, int]) -> int:
    """Returns how many codes and scales of D differ from those of the stored D, both along rows and along columns."""
    made = Case(dw, size)
    call, (m, n, _) = made.call, size

    def bytes_of(rows, columns):
        return torch.zeros(rows, -(-columns // 32) * 32, device="cuda", dtype=torch.uint8)

    codes, turned = bytes_of(m, n), bytes_of(n, m)
    scales = torch.zeros(-(-n // 128), m, device="cuda")
    turned_scales = torch.zeros(-(-m // 128), n, device="cuda")
    call.plain_d = call.d
    call.d = Matrix(codes.data_ptr(), codes.shape[1])
    call.turned_d = Matrix(turned.data_ptr(), turned.shape[1])
    call.quantized_d, call.scheme_d = 1, FP8_BLOCK
    call.scales_d, call.turned_scales_d = scales.data_ptr(), turned_scales.data_ptr()
    call.workspace, call.workspace_bytes = None, 0
    made.run()
    wrong = 0
    for x, found, found_scales in ((made.d, codes, scales), (made.d.t(), turned, turned_scales)):
        rows, columns = x.shape
        blocks = functional.pad(x.float(), (0, -columns % 128)).view(rows, -1, 128)
        largest = blocks.abs().amax(2)
        scale = largest / torch.full_like(largest, 448)
        scale = torch.where(largest == 0, torch.ones_like(scale), scale)
        want = (blocks / scale[:, :, None]).view(rows, -1).to(torch.float8_e4m3fn).view(torch.uint8)
        wrong += (found[:, :columns] != want[:, :columns]).sum().item()
        wrong += (found_scales.t() != scale).sum().item()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="cases whose name contains these words")
    options = parser.parse_args()
    torch.manual_seed(1)
    dw, failed, tiles = library(), 0, set()
    cases = {name: (size, NONE, ()) for name, size in TILES.items()}
    cases["64x128, two blocks"] = ((61, 2040, 4104), SWIGLU, ())
    for name, epilogue in EPILOGUES.items():
        cases.update({f"{tile}: {name}": (TILES[tile], *epilogue) for tile in OF_EPILOGUES})
    for name, call in cases.items():
        if options.k not in name:
            continue
        case = Case(dw, *call)
        error = case.error()
        tile, _ = tile_of(dw, case.call)
        tiles.add(tile)
        failed += error > 1
        print(f"{name:36} {call[0]!s:20} {tile:32} {error:.3f} of the bound", flush=True)
    for size in ((300, 264, 520), (2048, 768, 768)):
        if options.k in "codes of D":
            wrong = codes_differ(dw, size)
            failed += wrong > 0
            print(f"{'codes of D':36} {size!s:20} {wrong} differ", flush=True)
    print(f"{failed} wrong; {len(tiles)} tiles: {'; '.join(sorted(tiles))}")
    return 1 if failed or (not options.k and len(tiles) < len(TILES)) else 0


if __name__ == "__main__":
    sys.exit(main())
