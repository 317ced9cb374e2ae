"""GEMMs with operands in any of Deepwell's precisions: by a kernel where one supports the call, else by PyTorch.

    a, b = operand(x, "mxfp8"), operand(weight, "mxfp8")          # [m, k] and [n, k]
    out, backend, reason = multiply(a, b, torch.bfloat16)         # [m, n]

`launch` runs dw_gemm (deepwell/gemm.h) or says why no kernel supports the call. `simulate` multiplies the exact values
of the operands in PyTorch. docs/kernels.md describes the classes built on this module.
"""

from __future__ import annotations

import dataclasses
import json

import torch

from deepwell import _deepwell, numbers
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.precision import Precision

NUMBERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCKS = {"mxfp8": 32, "mxfp6": 32, "mxfp4": 32, "nvfp4": 16}
# The dtypes of results and of tensors to be quantized.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = {None: 0, "gelu": 1, "gelu_tanh": 2, "swiglu": 3}  # dw_activation
_E8M0_ONE = 127
_E4M3_MAX = 448.0


def precision_name(precision: str | Precision) -> str:
    """Returns the name in lower case, or raises ValueError, or UnsupportedError for one that linear layers alone have."""
    names = ", ".join(p.value for p in Precision if p != Precision.FP8_BLOCK)
    try:
        name = Precision(precision.lower() if isinstance(precision, str) else precision).value
    except ValueError:
        raise ValueError(f"precision is {precision!r}: expected one of {names}") from None
    if name == Precision.FP8_BLOCK:
        raise UnsupportedError(
            f"a single GEMM in {name} is not supported: use one of {names}, or deepwell.optimize(model, "
            f"precision={name!r})"
        )
    return name


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix of `rows` rows along the reduction axis of length `k`.

    Either ``values`` (FP32, BF16, FP16) are its numbers, or its numbers are ``factor`` times the values of ``codes``
    (bytes, [rows, bytes of a row]) with ``scales`` (bytes, [rows, blocks]) or, in the order of tensor cores, ``tiles``.
    ``factor`` is a number, or one on the operand's device. ``scheme`` is the layout of the codes, a
    name of `numbers.SCHEMES`. FP8 with one scale per tensor is MXFP8 whose block scales are all 1.
    """

    precision: str
    rows: int
    k: int
    values: torch.Tensor | None = None
    scheme: str | None = None
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    factor: float | torch.Tensor = 1.0

    @property
    def device(self) -> torch.device:
        return (self.codes if self.values is None else self.values).device

    def numbers(self) -> torch.Tensor:
        """Returns the numbers before `factor` on the operand's device; those of codes are float32 and exact."""
        if self.values is not None:
            return self.values
        scales = self.scales
        if scales is None:
            blocks = -(-self.k // _BLOCKS[self.precision])
            scales = numbers.unswizzle_scales(self.tiles.cpu(), self.rows, blocks)
        made = numbers.Quantized(
            self.codes.cpu(),
            scales.cpu(),
            1.0,
            self.scheme,
            "default",
            False,
            1,
            (self.rows, self.k),
        )
        return numbers.dequantize(made).to(self.device)


def _matrix(x: torch.Tensor, what: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{what} is {type(x).__name__}: expected a tensor")
    if x.dim() != 2:
        raise ValueError(f"{what} has shape {tuple(x.shape)}: expected a matrix")
    if x.dtype not in DTYPES:
        raise TypeError(f"{what} is {x.dtype}: expected float32, bfloat16 or float16")
    return x.detach()


def operand(x: torch.Tensor, precision: str, what: str = "x", device: str | None = None) -> Operand:
    """Converts a matrix [rows, k] to `precision`. Blocks run along k. `device`: quantize there, "cuda" or an emulated
    GPU, if a kernel supports it. Otherwise the CPU quantizes, to the same bits, and codes and scales are copied back to
    the device of x."""
    x = _matrix(x, what)
    rows, k = x.shape
    if precision in NUMBERS:
        return Operand(precision, rows, k, values=x.to(NUMBERS[precision]))
    if device is not None:
        made = _quantized_on(device, x, precision)
        if made is not None:
            return made
    on_cpu = x.cpu()
    if precision == "fp8":
        finite = on_cpu.float().nan_to_num(0.0, 0.0, 0.0).abs()
        amax = finite.max().item() if finite.numel() else 0.0
        factor = torch.tensor(amax / _E4M3_MAX, dtype=torch.float32).item() or 1.0
        codes = numbers.encode(on_cpu.float() / factor, "e4m3").view(torch.uint8)
        blocks = -(-k // 32)
        scales = torch.full((rows, blocks), _E8M0_ONE, dtype=torch.uint8)
        return Operand(
            precision,
            rows,
            k,
            scheme="mxfp8",
            codes=codes.to(x.device),
            scales=scales.to(x.device),
            factor=factor,
        )
    return from_quantized(numbers.quantize(on_cpu, precision), precision, what, x.device)


def _quantized_on(device: str, x: torch.Tensor, precision: str) -> Operand | None:
    """Quantizes by dw_quantize (deepwell/quantize.h). Returns None if no kernel supports it."""
    if precision not in ("mxfp8", "mxfp4", "nvfp4") or x.numel() == 0:
        return None
    if (device == "cuda") != (x.device.type == "cuda"):
        return None
    x = x.contiguous()
    rows, k = x.shape
    row_bytes = k if precision == "mxfp8" else -(-k // 2)
    codes = torch.empty(rows, row_bytes + -row_bytes % 16, dtype=torch.uint8, device=x.device)
    count = _deepwell.scales_swizzled_bytes(rows, -(-k // _BLOCKS[precision]))
    tiles = torch.empty(count, dtype=torch.uint8, device=x.device)
    # The tensor scale, and the largest value, which nothing reads.
    found = torch.empty(2, dtype=torch.float32, device=x.device)
    scaled = precision == "nvfp4"

    def run(stream: int) -> str | None:
        return _deepwell.quantize_on(
            device,
            (torch.bfloat16, torch.float16, torch.float32).index(x.dtype),
            numbers._SCHEMES[precision],
            rows,
            k,
            x.data_ptr(),
            k,
            codes.data_ptr(),
            codes.stride(0),
            tiles.data_ptr(),
            found.data_ptr() if scaled else 0,
            found[1:].data_ptr() if scaled else 0,
            stream,
        )

    if _on_device(device, x, run) is not None:
        return None
    return Operand(
        precision,
        rows,
        k,
        scheme=precision,
        codes=codes[:, :row_bytes],
        tiles=tiles,
        factor=found[:1] if scaled else 1.0,
    )


def from_quantized(
    q: numbers.Quantized,
    precision: str,
    what: str,
    device: torch.device | None = None,
) -> Operand:
    """Converts the result of `numbers.quantize` along the last axis."""
    if q.scheme not in (precision, f"{precision}-e5m2", f"{precision}-e2m3"):
        raise ValueError(f"{what} is quantized as {q.scheme}: expected {precision}")
    if q.axis != 1 or q.square or len(q.shape) != 2:
        raise UnsupportedError(
            f"{what} is quantized along axis {q.axis} of shape {tuple(q.shape)}"
            f"{', in square blocks' if q.square else ''}: expected a matrix with its last axis, and no square blocks"
        )
    rows, k = q.shape
    device = device or q.codes.device
    return Operand(
        precision,
        rows,
        k,
        scheme=q.scheme,
        codes=q.codes.view(torch.uint8).reshape(rows, q.codes.shape[-1]).to(device),
        scales=q.scales.view(torch.uint8).reshape(rows, q.scales.shape[-1]).to(device),
        factor=q.tensor_scale if q.scheme == "nvfp4" else 1.0,
    )


def from_pair(pair: tuple, precision: str, rows: int, k: int, what: str) -> Operand:
    """Converts (codes, scales) of a matrix [rows, k], as MicroscaleManager makes them. NVFP4's tensor scale is 1."""
    if precision not in _BLOCKS:
        raise ValueError(f"{what} is codes and scales, and precision {precision} has none")
    if len(pair) != 2 or not all(isinstance(x, torch.Tensor) for x in pair):
        raise TypeError(f"{what} is a tuple: expected (codes, scales), two tensors")
    codes, scales = pair
    row_bytes = -(-k // 2) if precision in ("mxfp4", "nvfp4") else k
    expected = (rows, row_bytes), (rows, -(-k // _BLOCKS[precision]))
    if (tuple(codes.shape), tuple(scales.shape)) != expected:
        raise ValueError(
            f"{what} has codes {tuple(codes.shape)} and scales {tuple(scales.shape)}: {precision} of {rows} x {k} has "
            f"{expected[0]} and {expected[1]}"
        )
    if codes.element_size() != 1 or scales.element_size() != 1:
        raise TypeError(f"{what} is {codes.dtype} and {scales.dtype}: expected types of one byte")
    scheme = "mxfp8-e5m2" if codes.dtype == torch.float8_e5m2 else precision
    return Operand(
        precision,
        rows,
        k,
        scheme=scheme,
        codes=codes.detach().view(torch.uint8),
        scales=scales.detach().view(torch.uint8),
    )


# ---- kernels -------------------------------------------------------------------------------------


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns a matrix whose rows and address are multiples of 16 bytes: x, or a padded copy."""
    step = 16 // x.element_size()
    over = -x.shape[1] % step
    if over:
        x = torch.nn.functional.pad(x, (0, over))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _on_device(device: str, x: torch.Tensor, run):
    """Calls run(stream) with the tensor's GPU as the current device."""
    try:
        if device != "cuda":
            return run(0)
        with torch.cuda.device(x.device):
            return run(torch.cuda.current_stream().cuda_stream)
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None


def _workspace(device: str, x: torch.Tensor, call, kernel: str | None):
    """Returns (memory or None, its bytes), or the reason why the kernel does not support the call."""
    if kernel is None and device != "cuda":
        return None, 0
    needed = _on_device(device, x, lambda stream: call(stream, 0, -1))
    if isinstance(needed, str):
        return needed
    return torch.empty(needed, dtype=torch.uint8, device=x.device), needed


def _tiles(x: Operand) -> torch.Tensor:
    """Returns the operand's scales in the order of tensor cores, on its device."""
    return numbers.swizzle_scales(x.scales.cpu()).to(x.device) if x.tiles is None else x.tiles


def launch(
    device: str,
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    *,
    alpha: float = 1.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    kernel: str | None = None,
) -> torch.Tensor | str:
    """Returns activation(alpha a b^T + bias) + residual as [a.rows, b.rows] (swiglu: half the columns), computed by a
    kernel, or the reason why none supports the call. `device`: "cuda" or an emulated GPU, whose operands are on the
    CPU. The residual has `out_dtype`, the bias the type of the operands."""
    if device == "cuda" and a.device.type != "cuda":
        return "the operands are on the CPU"
    if device != "cuda" and a.device.type != "cpu":
        return f"{device} multiplies tensors on the CPU, and the operands are on {a.device}"
    if (a.values is None) != (b.values is None):
        return "one operand is quantized and the other is not"
    if "fp32" in (a.precision, b.precision) or (
        a.precision != b.precision and a.values is not None
    ):
        return f"no kernel multiplies {a.precision.upper()} and {b.precision.upper()}"
    if "mxfp6" in (a.precision, b.precision):
        return "no kernel multiplies MXFP6"
    if a.values is None and activation == "swiglu":
        return "SwiGLU of quantized operands is not supported from Python"
    dtype = (
        a.values.dtype
        if a.values is not None
        else torch.float16
        if out_dtype == torch.float16
        else torch.bfloat16
    )
    if out_dtype not in (dtype, torch.float32):
        return f"the result is {out_dtype}, and a kernel of {dtype} writes {dtype} or float32"
    if bias is not None:
        bias = bias.to(dtype).contiguous()
    m, k = a.rows, a.k
    n = b.rows // 2 if activation == "swiglu" else b.rows
    quantized = a.values is None
    rows_a = _aligned(a.codes if quantized else a.values)
    rows_b = _aligned(b.codes if quantized else b.values)
    out = torch.empty(m, n + -n % (16 // out_dtype.itemsize), dtype=out_dtype, device=rows_a.device)
    if residual is not None:
        residual = _aligned(residual.to(out_dtype))
    named: dict = {"alpha": alpha, "kernel": kernel}
    kept: list[torch.Tensor] = []  # scales and factors, alive until the call is made
    if quantized:
        for side, x in (("a", a), ("b", b)):
            scales = _tiles(x)
            kept.append(scales)
            named[f"scheme_{side}"] = numbers._SCHEMES[x.scheme]
            named[f"scales_{side}"] = scales.data_ptr()
            if isinstance(x.factor, torch.Tensor) or x.factor != 1.0:
                factor = torch.as_tensor(x.factor, dtype=torch.float32, device=rows_a.device)
                kept.append(factor)
                named[f"factor_{side}"] = factor.data_ptr()

    def run(stream: int, workspace: int, workspace_bytes: int) -> str | int | None:
        return _deepwell.gemm(
            device,
            dtype == torch.float16,
            out_dtype == torch.float32 != dtype,
            (m, n, k),
            ACTIVATIONS[activation],
            rows_a.data_ptr(),
            rows_a.stride(0),
            rows_b.data_ptr(),
            rows_b.stride(0),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            stream,
            residual=0 if residual is None else residual.data_ptr(),
            stride_residual=0 if residual is None else residual.stride(0),
            workspace=workspace,
            workspace_bytes=workspace_bytes,
            **named,
        )

    found = _workspace(device, rows_a, run, kernel)
    if isinstance(found, str):
        return found
    memory, count = found
    address = 0 if memory is None else memory.data_ptr()
    reason = _on_device(device, rows_a, lambda stream: run(stream, address, count))
    return out[:, :n] if reason is None else reason


def launch_grouped(
    device: str,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    alpha: float = 1.0,
    kernel: str | None = None,
) -> torch.Tensor | str:
    """Returns alpha a_g b_g^T for groups of `sizes` rows of a [rows, k], with b [groups, n, k], both BF16 or FP16;
    or the reason why no kernel supports the call."""
    if device == "cuda" and a.device.type != "cuda":
        return "the operands are on the CPU"
    if device != "cuda" and a.device.type != "cpu":
        return f"{device} multiplies tensors on the CPU, and the operands are on {a.device}"
    groups, n, k = b.shape
    rows_a = _aligned(a)
    rows_b = _aligned(b.reshape(groups * n, k))
    out = torch.empty(len(a), n + -n % (16 // a.element_size()), dtype=a.dtype, device=a.device)

    def run(stream: int, workspace: int, workspace_bytes: int) -> str | int | None:
        return _deepwell.grouped_gemm(
            device,
            a.dtype == torch.float16,
            sizes,
            n,
            k,
            rows_a.data_ptr(),
            rows_a.stride(0),
            rows_b.data_ptr(),
            rows_b.stride(0),
            out.data_ptr(),
            out.stride(0),
            stream,
            alpha,
            kernel,
            workspace,
            workspace_bytes,
        )

    found = _workspace(device, rows_a, run, kernel)
    if isinstance(found, str):
        return found
    memory, count = found
    address = 0 if memory is None else memory.data_ptr()
    reason = _on_device(device, rows_a, lambda stream: run(stream, address, count))
    return out[:, :n] if reason is None else reason


def launch_segments(
    device: str,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    contraction: bool = False,
    plain_b: bool = False,
    kernel: str | None = None,
    rows_in: torch.Tensor | None = None,
    rows_in_of_b: bool = False,
    rows_out: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, str]:
    """Multiplies groups of rows whose bounds stay on the device: group g of a has the rows offsets[g] to offsets[g + 1].

    Returns a_g b_g^T [rows, n] with b [groups, n, k]; with `plain_b` a_g b_g with b [groups, k, n]; with `contraction`
    a_g^T b_g [groups, k, n] with b [rows, n]. Rows behind the last offset are 0, or left out of the sums.

    Rows by an index, int32 [rows] each, on an H100 or H200 alone: with `rows_in` row r of the groups is row rows_in[r] of
    a, or with `rows_in_of_b`, in a contraction, of b; with `rows_out`, a permutation, row r of the result is stored as its
    row rows_out[r]. `weights` [rows], of a's type, multiply the result's rows before they are rounded. Beside the
    result comes the name of the kernel that computed it; or None and the reason why no kernel supports the call."""
    if device == "cuda" and a.device.type != "cuda":
        return None, "the operands are on the CPU"
    if device != "cuda" and a.device.type != "cpu":
        return None, f"{device} multiplies tensors on the CPU, and the operands are on {a.device}"
    if a.dtype not in DTYPES or out_dtype not in (a.dtype, torch.float32):
        return None, f"no kernel multiplies groups of {a.dtype} with a result of {out_dtype}"
    rows, k = len(rows_in) if rows_in is not None else len(a), a.shape[1]
    groups = len(offsets) - 1
    n = b.shape[2] if plain_b else b.shape[1]
    shape = (groups, k, n) if contraction else (rows, n)
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(shape, dtype=out_dtype, device=a.device)

    def run(stream: int) -> tuple[str | None, str | None]:
        return _deepwell.segment_gemm(
            device,
            (torch.bfloat16, torch.float16, torch.float32).index(a.dtype),
            out_dtype != a.dtype,
            contraction,
            plain_b,
            (rows, groups, n, k),
            offsets.data_ptr(),
            a.data_ptr(),
            b.data_ptr(),
            out.data_ptr(),
            stream,
            kernel,
            (
                rows_in.data_ptr() if rows_in is not None else 0,
                0 if rows_in is None else len(b if rows_in_of_b else a),
                rows_in_of_b,
                rows_out.data_ptr() if rows_out is not None else 0,
                weights.data_ptr() if weights is not None else 0,
            ),
        )

    name, reason = _on_device(device, a, run)
    return (None, reason) if name is None else (out, name)


def provider_kernels(device: torch.device, precision: str, grouped: bool = False) -> list[str]:
    """Returns the kernels of the CUTLASS library for GEMMs of this precision on this GPU."""
    if device.type != "cuda":
        return []
    major, minor = torch.cuda.get_device_capability(device)
    rows = json.loads(_deepwell.gpu_kernels())
    wanted = ["grouped", precision] if grouped else [precision]
    return [
        row["name"]
        for row in rows
        if row["name"].startswith("cutlass.")
        and row["name"].split(".")[2 : 2 + len(wanted)] == wanted
        and f"sm_{major}{minor}a" in row["architectures"].split()
    ]


# ---- PyTorch -------------------------------------------------------------------------------------


def simulate(
    a: Operand, b: Operand, out_dtype: torch.dtype, *, alpha: float = 1.0
) -> tuple[torch.Tensor, str]:
    """Returns alpha a b^T, computed by PyTorch, and what ran in words. Values of quantized operands are exact; sums are
    FP32, also under autocast."""
    x, y = a.numbers(), b.numbers()
    factor = alpha * float(a.factor) * float(b.factor)
    name = a.precision.upper()
    plain = a.values is not None and b.values is not None and x.dtype == y.dtype
    with torch.autocast(x.device.type, enabled=False):
        if plain and x.dtype == out_dtype and factor == 1.0:
            return torch.matmul(x, y.t()), f"torch.matmul in {name}"
        values = f"{name} values, " if plain else f"simulated: {name} values, "
        if x.device.type == "cuda":
            narrow = _as_16_bits(x, a), _as_16_bits(y, b)
            if (
                narrow[0] is not None
                and narrow[1] is not None
                and narrow[0].dtype == narrow[1].dtype
            ):
                made = torch.mm(narrow[0], narrow[1].t(), out_dtype=torch.float32)
                kind = "BF16" if narrow[0].dtype == torch.bfloat16 else "FP16"
                return (made * factor).to(out_dtype), f"{values}torch.mm in {kind} with FP32 sums"
        made = torch.matmul(x.float(), y.float().t())
        return (made * factor).to(out_dtype), f"{values}torch.matmul in FP32"


def _as_16_bits(x: torch.Tensor, of: Operand) -> torch.Tensor | None:
    """Returns x itself if it has 16 bits, or in BF16 if that is exact, else None."""
    if of.values is not None:
        return None if x.dtype == torch.float32 else x
    narrow = x.bfloat16()
    return narrow if torch.equal(narrow.float().nan_to_num(), x.nan_to_num()) else None


# ---- either --------------------------------------------------------------------------------------


def multiply(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    *,
    alpha: float = 1.0,
    residual: torch.Tensor | None = None,
    device: str | None = None,
    tcgen05: bool = True,
    kernel: str | None = None,
) -> tuple[torch.Tensor, str, str | None]:
    """Returns (alpha a b^T + residual, what computed it, why no kernel did or None).

    `device` None: the GPU of the operands; operands on the CPU then have no kernel. `tcgen05` False: no kernel for
    Blackwell's tensor cores. `kernel`: the only kernel to try, by name.
    """
    reason: str | None = None
    if 0 in (a.rows, b.rows, a.k):
        reason = "the GEMM is empty"
    else:
        for name in _candidates(a, device, tcgen05, kernel):
            made = launch(
                device or "cuda", a, b, out_dtype, alpha=alpha, residual=residual, kernel=name
            )
            if isinstance(made, torch.Tensor):
                own = "sm100_gemm" if a.values is not None else "sm100_gemm_scaled"
                return made, f"kernel {name or own} on {device or 'cuda'}", None
            reason = reason or made
        if reason is None:
            reason = (
                "the operands are on the CPU"
                if device is None and a.device.type == "cpu"
                else "without tcgen05 no kernel of Deepwell's multiplies matrices"
            )
    wide = out_dtype if residual is None else torch.float32
    made, backend = simulate(a, b, wide, alpha=alpha)
    if residual is not None:
        made = (made + residual.float()).to(out_dtype)
    return made, backend, reason


def _candidates(a: Operand, device: str | None, tcgen05: bool, kernel: str | None) -> list:
    if device is None and a.device.type != "cuda":
        return []
    if kernel is not None:
        return [kernel]
    names: list[str | None] = [None] if tcgen05 else []
    found = provider_kernels(a.device, a.precision) if device in (None, "cuda") else []
    return names + [name for name in found if tcgen05 or ".sm90." in name]
