"""GEMMs, microscaling and timing under the names that CUTLASS users know, and whether CUTLASS's own kernels run here.

    kernel = CutlassKernel(CutlassConfig())
    kernel.initialize(m, n, k, "mxfp8")
    out = kernel.gemm(a, b)          # [m, k] x [k, n]
    kernel.backend                   # what computed it

Where a kernel of Deepwell's, or of the optional CUTLASS library (docs/cutlass.md), supports a call, it runs; elsewhere
PyTorch multiplies the exact values of that precision. docs/kernels.md describes all classes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence

import torch

from deepwell import _deepwell, numbers
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.kernels import gemm as _gemm
from deepwell.kernels.profiler import KernelProfiler
from deepwell.machine import probe
from deepwell.precision import Precision

__all__ = [
    "CUTLASS_AVAILABLE",
    "CutlassConfig",
    "CutlassKernel",
    "GroupedGEMMKernel",
    "KernelProfiler",
    "MicroscaleManager",
]

CUTLASS_AVAILABLE: bool  # computed on first use, by __getattr__


@functools.cache
def _fits_a_gpu() -> bool:
    """Returns whether libdeepwell_cutlass.so exists and has kernels for one of this machine's GPUs."""
    kernels = [k for k in json.loads(_deepwell.gpu_kernels()) if k["name"].startswith("cutlass.")]
    if not kernels:
        return False
    targets = {target for kernel in kernels for target in kernel["architectures"].split()}
    return any(gpu.sm_version in targets for gpu in probe().gpus)


def __getattr__(name: str):
    if name == "CUTLASS_AVAILABLE":
        return _fits_a_gpu()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclasses.dataclass(frozen=True)
class CutlassConfig:
    """Which kernels may run.

    ``use_tcgen05``: False leaves out kernels for Blackwell's tensor cores. ``tmem_residency``: accumulators stay in
    tensor memory, which tcgen05.mma always does; False needs ``use_tcgen05=False``. ``microscale_block_size``: elements
    that share a scale. MXFP8, MXFP6 and MXFP4 have 32. NVFP4 always has 16, with either value.
    """

    use_tcgen05: bool = True
    tmem_residency: bool = True
    microscale_block_size: int = 32

    def __post_init__(self) -> None:
        if self.microscale_block_size not in (16, 32):
            raise ValueError(
                f"microscale_block_size is {self.microscale_block_size}: expected 32 (MXFP8, MXFP6, MXFP4) or 16 "
                "(NVFP4)"
            )
        if self.use_tcgen05 and not self.tmem_residency:
            raise UnsupportedError(
                "tmem_residency is False and use_tcgen05 True: tcgen05.mma accumulates in tensor memory only; pass "
                "use_tcgen05=False too"
            )


def _checked_precision(
    precision: str | Precision, use_microscaling: bool | None, config: CutlassConfig
) -> str:
    name = _gemm.precision_name(precision)
    scaled = Precision(name).is_microscaled
    if use_microscaling is not None and use_microscaling != scaled:
        known = ", ".join(p.value for p in Precision if p.is_microscaled != scaled)
        raise ValueError(
            f"use_microscaling is {use_microscaling} with precision {name}: expected {scaled}, or one of {known}"
        )
    if scaled and name != "nvfp4" and config.microscale_block_size != 32:
        raise UnsupportedError(
            f"microscale_block_size is {config.microscale_block_size}: {name} has blocks of 32"
        )
    return name


def _size(name: str, value: int, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: expected an integer of at least {least}")
    return value


def _refuse_gradients(*operands) -> None:
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedError(
            "an operand requires a gradient, and this GEMM computes none: call it under torch.no_grad(), or use "
            "deepwell.kernels.production_kernels.ProductionKernelManager"
        )


def _refuse_bare_codes(*operands) -> None:
    for name, x in zip("ab", operands):
        if isinstance(x, torch.Tensor) and x.element_size() == 1:
            raise TypeError(
                f"{name} is {x.dtype}, codes without their scales: pass both as a pair, (codes, scales) of MicroscaleManager"
            )


def _result_dtype(operands: Sequence, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is None:
        types = [x.dtype for x in operands if isinstance(x, torch.Tensor)]
        out_dtype = functools.reduce(torch.promote_types, types) if types else torch.float32
    if out_dtype not in _gemm.DTYPES:
        raise TypeError(f"the result would be {out_dtype}: expected float32, bfloat16 or float16")
    return out_dtype


def _quantizer(device: str | None, x) -> str | None:
    """Returns the device that quantizes x: the one given, else the GPU of x."""
    on_gpu = isinstance(x, torch.Tensor) and x.device.type == "cuda"
    return device or ("cuda" if on_gpu else None)


class CutlassKernel:
    """The GEMM alpha a b + beta c in one precision, for one set of sizes.

    ``device``: "cuda", or an emulated GPU such as "emulator:sm_100a" for tensors on the CPU; None: the GPU of the
    operands. ``kernel``: the only kernel to try, a name from `deepwell explain kernels`. After a call ``backend`` names
    what computed it, and ``reason`` why no kernel did (None if one did).
    """

    def __init__(
        self,
        config: CutlassConfig | None = None,
        *,
        device: str | None = None,
        kernel: str | None = None,
    ) -> None:
        self.config = config or CutlassConfig()
        self.device, self.kernel = device, kernel
        self.precision: str | None = None
        self.m = self.n = self.k = 0
        self.backend: str | None = None
        self.reason: str | None = None

    def initialize(
        self,
        m: int,
        n: int,
        k: int,
        precision: str | Precision = "bf16",
        use_microscaling: bool | None = None,
    ) -> CutlassKernel:
        """Sets the sizes and the precision of the operands. `use_microscaling` None: as the precision has it."""
        self.precision = _checked_precision(precision, use_microscaling, self.config)
        self.m, self.n, self.k = _size("m", m), _size("n", n), _size("k", k)
        return self

    @property
    def flops(self) -> int:
        """Operations of one call: 2 m n k."""
        return 2 * self.m * self.n * self.k

    def gemm(
        self,
        a,
        b,
        c: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Returns alpha a b + beta c, [m, n].

        a is [m, k] and b [k, n], as for torch.matmul. Either may instead be quantized along its last axis, as a
        numbers.Quantized or a pair (codes, scales) of MicroscaleManager: then b is [n, k]. With beta 0, c is not read.
        The result has `out_dtype`, else the type of the operands that are plain tensors, else float32. Sums are FP32.
        No gradients: an operand that requires one is refused.
        """
        if self.precision is None:
            raise DeepwellError("initialize(m, n, k, precision) has not been called")
        _refuse_gradients(a, b, c)
        _refuse_bare_codes(a, b)
        dtype = _result_dtype((a, b), out_dtype)
        left = self._operand(a, self.m, "a", plain_is_transposed=False)
        right = self._operand(b, self.n, "b", plain_is_transposed=True)
        if left.device != right.device:
            raise ValueError(f"a is on {left.device} and b on {right.device}: expected one device")
        residual = None
        if beta != 0.0:
            if c is None or tuple(c.shape) != (self.m, self.n):
                shape = None if c is None else tuple(c.shape)
                raise ValueError(f"c is {shape} with beta {beta}: expected {(self.m, self.n)}")
            residual = c.detach()
            if beta != 1.0 or c.dtype != dtype:
                residual = residual.float() * beta
        wide = dtype if residual is None or residual.dtype == dtype else torch.float32
        made, self.backend, self.reason = _gemm.multiply(
            left,
            right,
            wide,
            alpha=alpha,
            residual=residual,
            device=self.device,
            tcgen05=self.config.use_tcgen05,
            kernel=self.kernel,
        )
        return made.to(dtype)

    def _operand(self, x, rows: int, what: str, plain_is_transposed: bool) -> _gemm.Operand:
        if isinstance(x, numbers.Quantized):
            made = _gemm.from_quantized(x, self.precision, what)
        elif isinstance(x, tuple):
            return _gemm.from_pair(x, self.precision, rows, self.k, what)
        else:
            if isinstance(x, torch.Tensor) and x.dim() == 2 and plain_is_transposed:
                x = x.t()
            made = _gemm.operand(x, self.precision, what, _quantizer(self.device, x))
        if (made.rows, made.k) != (rows, self.k):
            shape = (self.k, rows) if plain_is_transposed else (rows, self.k)
            found = (made.k, made.rows) if plain_is_transposed else (made.rows, made.k)
            if isinstance(x, numbers.Quantized):
                shape, found = (rows, self.k), (made.rows, made.k)
            raise ValueError(f"{what} has shape {found}: expected {shape}, as initialized")
        return made


class _Bounds:
    """The groups' numbers of rows: known to the host, or on the operands' GPU, where nothing reads them before it must."""

    def __init__(self, group_sizes, offsets, groups: int, a: torch.Tensor) -> None:
        self._sizes: tuple[int, ...] | None = None
        self._offsets: torch.Tensor | None = None
        rows = len(a)
        if (group_sizes is None) == (offsets is None):
            raise ValueError("expected either group_sizes or offsets")
        if offsets is not None:
            if offsets.device != a.device or offsets.dtype != torch.int32:
                raise ValueError(
                    f"offsets is {offsets.dtype} on {offsets.device}: expected int32 on {a.device}"
                )
            if offsets.shape != (groups + 1,):
                raise ValueError(
                    f"offsets has shape {tuple(offsets.shape)}: expected {(groups + 1,)}"
                )
            self._offsets = offsets.detach().contiguous()
            if a.device.type == "cpu":
                bounds = [0, *offsets.tolist(), rows]
                if offsets[0] != 0 or bounds != sorted(bounds):
                    raise ValueError(
                        f"offsets is {offsets.tolist()}: expected 0 first, and ascending to at most {rows} rows"
                    )
            return
        if isinstance(group_sizes, torch.Tensor) and group_sizes.device.type != "cpu":
            if group_sizes.device != a.device:
                raise ValueError(
                    f"group_sizes is on {group_sizes.device} and a on {a.device}: expected one device, or the CPU"
                )
            if group_sizes.shape != (groups,) or group_sizes.is_floating_point():
                raise ValueError(
                    f"group_sizes is {group_sizes.dtype} {tuple(group_sizes.shape)}: expected {groups} integers"
                )
            # Kernels trust the offsets.
            ends = group_sizes.detach().long().clamp(min=0).cumsum(0).clamp(max=rows)
            self._offsets = torch.nn.functional.pad(ends, (1, 0)).int()
            return
        sizes = tuple(int(x) for x in torch.as_tensor(group_sizes).tolist())
        if len(sizes) != groups or min(sizes) < 0 or sum(sizes) != rows:
            raise ValueError(
                f"group_sizes is {sizes}: expected {groups} numbers of rows, {rows} together"
            )
        self._sizes = sizes

    def offsets(self, device: torch.device) -> torch.Tensor:
        """Returns where groups begin, and where the last one ends."""
        if self._offsets is None:
            ends = [0, *itertools.accumulate(self._sizes)]
            self._offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._offsets

    def sizes(self) -> tuple[int, ...]:
        """Returns the groups' numbers of rows. Waits for the GPU if they are there."""
        if self._sizes is None:
            ends = self._offsets.tolist()
            self._sizes = tuple(end - start for start, end in zip(ends, ends[1:]))
        return self._sizes

    def parts(self):
        """Iterates over (group, slice of its rows) of groups that have rows."""
        start = 0
        for group, size in enumerate(self.sizes()):
            if size:
                yield group, slice(start, start + size)
            start += size


class _GroupedProduct(torch.autograd.Function):
    """a [rows, k], or rows of a by an index, times b [groups, k, n], and the gradients of both: GEMMs of the same
    groups."""

    @staticmethod
    def forward(ctx, a, b, bounds: _Bounds, kernel: GroupedGEMMKernel, dtype: torch.dtype, rows):
        narrow = _gemm.NUMBERS[kernel.precision]
        # Whichever of b and its transpose is contiguous is read as it lies.
        plain = b.is_contiguous()
        x, w = a.to(narrow), (b if plain else b.mT.contiguous()).to(narrow)
        ctx.save_for_backward(x, w)
        ctx.bounds, ctx.kernel, ctx.plain = bounds, kernel, plain
        ctx.dtypes, ctx.rows = (a.dtype, b.dtype), rows
        made, kernel.backend, kernel.reason = kernel._rows(x, w, plain, bounds, dtype, rows)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        kernel, bounds, plain, rows = ctx.kernel, ctx.bounds, ctx.plain, ctx.rows
        dy, da, db, ran = dy.to(x.dtype), None, None, []
        if ctx.needs_input_grad[0]:
            da, backend, _ = kernel._rows(dy, w, not plain, bounds, ctx.dtypes[0])
            if rows is not None:  # sums in an order that does not change
                wide = torch.float64 if da.dtype == torch.float64 else torch.float32
                sums = torch.zeros(x.shape, dtype=wide, device=x.device)
                da = sums.index_put_((rows.long(),), da.to(wide), accumulate=True).to(da.dtype)
            ran.append(backend)
        if ctx.needs_input_grad[1]:
            if rows is not None:  # by an index these sums take longer than the copy and they
                x = x[rows.long()]
            pair = (x, dy) if plain else (dy, x)
            db, backend, _ = kernel._sums(*pair, bounds, ctx.dtypes[1])
            db = db if plain else db.mT
            ran.append(backend)
        kernel.gradient_backend = " and ".join(dict.fromkeys(ran))
        return da, db, None, None, None, None


class GroupedGEMMKernel:
    """GEMMs of groups that differ in their rows, as of the experts of a mixture. Arguments and attributes as those of
    CutlassKernel; after a backward ``gradient_backend`` names what computed it.

    In FP32, BF16 and FP16 results are differentiable. On an H100 or H200 one kernel computes all groups, forward, and
    for each gradient."""

    def __init__(
        self,
        config: CutlassConfig | None = None,
        *,
        device: str | None = None,
        kernel: str | None = None,
    ) -> None:
        self.config = config or CutlassConfig()
        self.device, self.kernel = device, kernel
        self.precision: str | None = None
        self.groups = self.n = self.k = 0
        self.backend: str | None = None
        self.gradient_backend: str | None = None
        self.reason: str | None = None

    def initialize(
        self,
        groups: int,
        n: int,
        k: int,
        precision: str | Precision = "bf16",
        use_microscaling: bool | None = None,
    ) -> GroupedGEMMKernel:
        """Sets the sizes and the precision of the operands. `use_microscaling` None: as the precision has it."""
        self.precision = _checked_precision(precision, use_microscaling, self.config)
        self.groups, self.n, self.k = _size("groups", groups, 1), _size("n", n), _size("k", k)
        return self

    def gemm(
        self, a: torch.Tensor, b: torch.Tensor, group_sizes=None, *, offsets=None, rows=None
    ) -> torch.Tensor:
        """Returns [rows, n]: the rows of group g of a [rows, k], times b[g] of b [groups, k, n].

        Groups follow each other in a, and `group_sizes` are their numbers of rows, 0 allowed: integers or a tensor of
        them, of which there must be as many as rows. A tensor on the GPU of a is not read by the host; rows behind the
        last group are then 0. For weights stored as [groups, n, k], pass weights.mT, which is not copied. Precisions
        of 8 bits and fewer quantize each expert on its own and compute no gradients. The result has the type of the
        operands.

        `offsets` in place of `group_sizes`: int32 [groups + 1] on the device of a, which several calls may share: group
        g has the rows offsets[g] to offsets[g + 1]. On a GPU they are not checked: they must begin with 0, ascend, and
        be at most the number of rows.

        `rows`: int32 or int64 [rows] on the device of a, such as the tokens that chose an expert: row r of the groups is
        a[rows[r]]. In BF16 and FP16 an H100 or H200 reads these rows where they are; elsewhere, and for the gradient of b,
        they are copied first, and the copies are not kept.
        """
        if self.precision is None:
            raise DeepwellError("initialize(groups, n, k, precision) has not been called")
        for name, x in (("a", a), ("b", b)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} is {type(x).__name__}: expected a tensor")
        if a.device != b.device:
            raise ValueError(f"a is on {a.device} and b on {b.device}: expected one device")
        dtype = _result_dtype((a, b), None)
        if a.dim() != 2 or tuple(b.shape) != (self.groups, self.k, self.n) or a.shape[1] != self.k:
            raise ValueError(
                f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}: expected (rows, {self.k}) and "
                f"{(self.groups, self.k, self.n)}"
            )
        if rows is not None:
            if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"rows is {rows.dtype} {tuple(rows.shape)}: expected one int32 or int64 for each row"
                )
            if rows.device != a.device:
                raise ValueError(
                    f"rows is on {rows.device} and a on {a.device}: expected one device"
                )
            if (
                rows.device.type == "cpu"
                and len(rows)
                and not 0 <= rows.min() <= rows.max() < len(a)
            ):
                raise ValueError(
                    f"rows has {rows.min()} to {rows.max()}: expected 0 to {len(a) - 1}"
                )
            rows = rows.detach().int().contiguous()
        bounds = _Bounds(group_sizes, offsets, self.groups, a if rows is None else rows)
        if self.precision in _gemm.NUMBERS:
            return _GroupedProduct.apply(a, b, bounds, self, dtype, rows)
        if rows is not None:
            a = a[rows.long()]
        _refuse_gradients(a, b)
        made, self.backend, self.reason = self._one_by_one(
            a.detach(), b.detach().mT, False, bounds, dtype
        )
        return made

    # ---- products of one precision: (result, what computed it, why no kernel did or None) ----

    def _rows(self, x, w, plain: bool, bounds: _Bounds, dtype: torch.dtype, rows=None):
        """Multiplies rows [rows, k], those of x or x[rows], by w [groups, k, n] if `plain`, else [groups, n, k]."""
        made, name = self._segments(x, w, bounds, dtype, plain_b=plain, rows_in=rows)
        if made is not None:
            return made, name, None
        if rows is not None:
            return self._rows(x[rows.long()], w, plain, bounds, dtype)
        width = w.shape[2] if plain else w.shape[1]
        reason = name
        # One call writes the type of its operands: a wider result needs a call for each group.
        if not plain and x.dtype == dtype != torch.float32 and len(x) and width and x.shape[1]:
            made, told = self._one_call(x, w, bounds, dtype)
            if made is not None:
                return made, told, None
            reason = reason or told
        made, backend, told = self._one_by_one(x, w, plain, bounds, dtype)
        return made, backend, reason or told

    def _sums(self, x, y, bounds: _Bounds, dtype: torch.dtype):
        """Returns for each group the sum over its rows of the products of x [rows, k] and y [rows, n]."""
        made, reason = self._segments(x, y, bounds, dtype, contraction=True)
        if made is not None:
            return made, reason, None
        made = torch.zeros(self.groups, x.shape[1], y.shape[1], dtype=dtype, device=x.device)
        ran: dict[str, None] = {}
        for group, rows in bounds.parts():
            made[group], backend, told = self._multiply(x[rows].t(), y[rows].t(), dtype)
            ran[backend] = None
            reason = reason or told
        return made, _in_turn(ran), reason

    def _segments(self, x, w, bounds: _Bounds, dtype: torch.dtype, **kind):
        """Returns (None, why not or None) where the kernels for groups on the GPU do not run."""
        device = self.device or "cuda"
        if self.kernel is None:
            if device == "cuda" and x.device.type == "cuda":
                hopper = torch.cuda.get_device_capability(x.device) == (9, 0)
            else:
                hopper = device == "emulator:sm_90a"
            if not hopper:
                return None, None
        elif self.kernel not in _SEGMENT_KERNELS:
            return None, None
        wide = dtype if dtype in (x.dtype, torch.float32) else torch.float32
        made, told = _gemm.launch_segments(
            device, x, w, bounds.offsets(x.device), wide, kernel=self.kernel, **kind
        )
        if made is None:
            return None, told
        return made.to(dtype), f"kernel {told} on {device}"

    def _one_call(self, a, weights, bounds: _Bounds, dtype):
        if self.device is None and a.device.type != "cuda":
            return None, "the operands are on the CPU"
        names = [self.kernel] if self.kernel else [None] if self.config.use_tcgen05 else []
        if not self.kernel and self.config.use_tcgen05 and self.device in (None, "cuda"):
            names = [*_gemm.provider_kernels(a.device, self.precision, grouped=True), *names]
        reason = None
        for name in names:
            made = _gemm.launch_grouped(
                self.device or "cuda", a, weights, bounds.sizes(), kernel=name
            )
            if isinstance(made, torch.Tensor):
                # Rows behind the last group are in none of its GEMMs.
                made[sum(bounds.sizes()) :] = 0
                return made, f"kernel {name or 'sm100_gemm'} on {self.device or 'cuda'}"
            reason = reason or made
        return None, reason

    def _one_by_one(self, a, weights, plain: bool, bounds: _Bounds, dtype):
        if plain:
            weights = weights.mT
        out = torch.zeros(len(a), weights.shape[1], dtype=dtype, device=a.device)
        ran: dict[str, None] = {}
        reason = None
        for group, rows in bounds.parts():
            out[rows], backend, told = self._multiply(a[rows], weights[group], dtype)
            ran[backend] = None
            reason = reason or told
        return out, _in_turn(ran), reason

    def _multiply(self, a, b, dtype):
        device = _quantizer(self.device, a)
        return _gemm.multiply(
            _gemm.operand(a, self.precision, "a", device),
            _gemm.operand(b, self.precision, "b", device),
            dtype,
            device=self.device,
            tcgen05=self.config.use_tcgen05,
            kernel=self.kernel,
        )


_SEGMENT_KERNELS = ("sm90_segment", "segment_linear")


def _in_turn(ran: dict[str, None]) -> str:
    return f"one group after another: {' and '.join(ran)}" if ran else "nothing to do"


# ---- microscaling --------------------------------------------------------------------------------


def _check_block(block_size: int, only: int, scheme: str) -> None:
    if block_size != only:
        raise UnsupportedError(f"block_size is {block_size}: {scheme} has blocks of {only}")


def _quantized(x: torch.Tensor, scheme: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales on the device of x; the CPU computes them."""
    q = numbers.quantize(x.cpu() if isinstance(x, torch.Tensor) else x, scheme, **options)
    return _moved(q.codes, x.device), _moved(q.scales, x.device)


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x if x.device == device else x.view(torch.uint8).to(device).view(x.dtype)


def _dequantized(elements, scales, scheme, shape, tensor_scale=1.0) -> torch.Tensor:
    cpu = torch.device("cpu")
    q = numbers.Quantized(
        _moved(elements, cpu),
        _moved(scales, cpu),
        tensor_scale,
        scheme,
        "default",
        False,
        1,
        tuple(shape),
    )
    return numbers.dequantize(q).to(elements.device)


def _check_pairs(x: torch.Tensor, scheme: str) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: {scheme} packs pairs, the last axis must be even"
        )


class MicroscaleManager:
    """Quantizes along the last axis, and dequantizes to float32. Tensors on a GPU pass through the CPU: results are on
    their device again. Scales are [..., blocks], not in the order of tensor cores."""

    @staticmethod
    def quantize_mxfp8(
        x: torch.Tensor, block_size: int = 32, scale_rule: str = "rceil"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (elements float8_e4m3fn, scales float8_e8m0fnu)."""
        _check_block(block_size, 32, "MXFP8")
        return _quantized(x, "mxfp8", scale_rule=scale_rule)

    @staticmethod
    def dequantize_mxfp8(
        elements: torch.Tensor, scales: torch.Tensor, block_size: int = 32
    ) -> torch.Tensor:
        _check_block(block_size, 32, "MXFP8")
        return _dequantized(elements, scales, "mxfp8", elements.shape)

    @staticmethod
    def quantize_mxfp6(
        x: torch.Tensor, block_size: int = 32, scale_rule: str = "rceil"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (elements uint8, one E3M2 code each, scales float8_e8m0fnu). numbers.fp6_pack packs the codes."""
        _check_block(block_size, 32, "MXFP6")
        return _quantized(x, "mxfp6", scale_rule=scale_rule)

    @staticmethod
    def dequantize_mxfp6(
        elements: torch.Tensor, scales: torch.Tensor, block_size: int = 32
    ) -> torch.Tensor:
        _check_block(block_size, 32, "MXFP6")
        return _dequantized(elements, scales, "mxfp6", elements.shape)

    @staticmethod
    def quantize_mxfp4(
        x: torch.Tensor, block_size: int = 32, scale_rule: str = "rceil"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (elements float4_e2m1fn_x2, scales float8_e8m0fnu). The last axis must be even."""
        _check_block(block_size, 32, "MXFP4")
        _check_pairs(x, "MXFP4")
        return _quantized(x, "mxfp4", scale_rule=scale_rule)

    @staticmethod
    def dequantize_mxfp4(
        elements: torch.Tensor, scales: torch.Tensor, block_size: int = 32
    ) -> torch.Tensor:
        _check_block(block_size, 32, "MXFP4")
        shape = (*elements.shape[:-1], 2 * elements.shape[-1])
        return _dequantized(elements, scales, "mxfp4", shape)

    @staticmethod
    def quantize_nvfp4(
        x: torch.Tensor, block_size: int = 16, tensor_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (elements float4_e2m1fn_x2, scales float8_e4m3fn). numbers.nvfp4_tensor_scale(x) gives the scale that
        uses the whole range. The last axis must be even."""
        _check_block(block_size, 16, "NVFP4")
        _check_pairs(x, "NVFP4")
        return _quantized(x, "nvfp4", tensor_scale=tensor_scale)

    @staticmethod
    def dequantize_nvfp4(
        elements: torch.Tensor,
        scales: torch.Tensor,
        block_size: int = 16,
        tensor_scale: float = 1.0,
    ) -> torch.Tensor:
        _check_block(block_size, 16, "NVFP4")
        shape = (*elements.shape[:-1], 2 * elements.shape[-1])
        return _dequantized(elements, scales, "nvfp4", shape, tensor_scale)
