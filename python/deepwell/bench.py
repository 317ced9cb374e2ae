"""Benchmarks of Deepwell beside PyTorch, in one run on this machine. `deepwell bench` runs this module.

    python -m deepwell.bench step --model gpt2 --precision bf16 --batch-size 4 --seq-len 512 --iterations 20
    python -m deepwell.bench attention|gemm|moe|memory ... [--json]

docs/bench.md describes the measurements. Exit status: 0 done, 1 failed, 2 wrong usage, 3 not supported here.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import deepwell
from deepwell import bench_models as models
from deepwell import bench_moe as bench_moe_parts
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.kernels.cutlass_bindings import CutlassKernel, GroupedGEMMKernel
from deepwell.kernels.profiler import device_name, times_ms

KINDS = ("step", "attention", "gemm", "moe", "memory")
PRECISIONS = ("auto", *(p.value for p in deepwell.Precision))
_SEED = 7
_WARMUP = 2
# Bytes of a parameter in training by AdamW without counting activations: weight, gradient, two moments.
_STATES = 4

Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="deepwell bench", description="Times Deepwell beside PyTorch on this machine."
    )
    made.add_argument("kind", nargs="?", default="step", choices=KINDS)
    made.add_argument(
        "--model",
        help=f"step, memory: {', '.join(models.NAMES)}, a name of the catalogue, or a Hugging Face folder",
    )
    made.add_argument("--precision", default="auto", choices=PRECISIONS)
    made.add_argument("--batch-size", type=int)
    made.add_argument("--seq-len", type=int)
    made.add_argument("--num-experts", type=int, help="gemm, moe: groups, or experts")
    made.add_argument("--size", help="gemm: M,N,K")
    made.add_argument("--heads", type=int, help="attention (default: 8)")
    made.add_argument("--head-dim", type=int, help="attention (default: 64)")
    made.add_argument("--hidden", type=int, help="moe: width of tokens")
    made.add_argument("--width", type=int, help="moe: width of an expert (default: 4 * hidden)")
    made.add_argument("--top-k", type=int, help="moe: experts of a token (default: 2)")
    made.add_argument("--tokens", type=int, help="moe: in place of --batch-size and --seq-len")
    made.add_argument(
        "--load",
        default="random",
        choices=bench_moe_parts.LOADS,
        help="moe: how tokens spread over experts: as a random router has it, evenly, or 1 : 1/2 : 1/3 ..",
    )
    made.add_argument("--capacity-factor", type=float, help="moe: drop choices beyond it")
    made.add_argument("--iterations", type=int)
    made.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: the GPU if there is one",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


# ---- measurements --------------------------------------------------------------------------------


class _Peak:
    """The peak of memory while it is open: of PyTorch's allocator on a GPU, of the process on the CPU. None if the
    system does not say."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, None

    def __enter__(self) -> _Peak:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.reset = False
            with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                file.write("5")
                self.reset = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self.reset:
            with contextlib.suppress(OSError), open("/proc/self/status") as file:
                lines = [line.split() for line in file if line.startswith("VmHWM")]
                self.bytes = int(lines[0][1]) * 1024 if lines else None


def _peak_rate(device: torch.device, precision: str) -> float | None:
    """Returns the GPU's operations per second in this precision, or None if it has no such arithmetic."""
    if device.type != "cuda":
        return None
    gpus = deepwell.probe().gpus
    index = device.index or 0
    rates = gpus[index].rates if index < len(gpus) else {}
    name = {"fp16": "bf16", "fp8-block": "fp8", "mxfp6": "mxfp8", "mxfp4": "fp4", "nvfp4": "fp4"}
    figure = rates.get(name.get(precision, precision))
    return None if figure is None else figure.value


def _rates(ms: float, *, flops: float | None, tokens: int | None, peak: float | None) -> Row:
    per_second = None if flops is None else flops / (ms / 1e3)
    return {
        "ms": ms,
        "tokens_per_s": None if tokens is None else tokens / (ms / 1e3),
        "tflops": None if per_second is None else per_second / 1e12,
        "efficiency": None if per_second is None or peak is None else per_second / peak,
    }


def _time_both(
    ops: dict[str, Callable[[], Any]], options: argparse.Namespace
) -> dict[str, tuple[float, int | None]]:
    """Returns the median time and the peak memory of each call. The calls take turns, so that other work on the machine
    slows both."""
    peaks = {}
    for label, op in ops.items():
        with _Peak(options.on) as peak:
            for _ in range(_WARMUP):
                op()
            if options.on.type == "cuda":
                torch.cuda.synchronize(options.on)
        peaks[label] = peak.bytes
    times: dict[str, list[float]] = {label: [] for label in ops}
    for _ in range(options.iterations):
        for label, op in ops.items():
            times[label] += times_ms(op, 1, options.on)
    return {label: (statistics.median(times[label]), peaks[label]) for label in ops}


def _dtype(options: argparse.Namespace) -> tuple[torch.dtype, str]:
    """Returns the type of tensors and models, and its name. Precisions below 16 bits start from BF16 on a GPU and from
    FP32 on the CPU."""
    if options.precision in ("fp32", "fp16", "bf16"):
        types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return types[options.precision], options.precision
    return (torch.bfloat16, "bf16") if options.on.type == "cuda" else (torch.float32, "fp32")


def _default(value: int | None, on_cpu: int, on_gpu: int, options: argparse.Namespace) -> int:
    return value if value is not None else on_cpu if options.on.type == "cpu" else on_gpu


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """Returns |x - y| / |y| by Frobenius norms."""
    size = y.double().norm().item()
    return (x.double() - y.double()).norm().item() / size if size else 0.0


# ---- the benchmarks ------------------------------------------------------------------------------


def bench_gemm(options: argparse.Namespace) -> Row:
    side = 256 if options.on.type == "cpu" else 4096
    text = options.size or f"{side},{side},{side}"
    try:
        m, n, k = (int(x) for x in text.split(","))
    except ValueError:
        raise _Usage(f"--size is {text!r}: expected M,N,K") from None
    if min(m, n, k) < 1:
        raise _Usage(f"--size is {text!r}: expected numbers of at least 1")
    dtype, name = _dtype(options)
    precision = name if options.precision == "auto" else options.precision
    generator = torch.Generator().manual_seed(_SEED)
    a = torch.randn(m, k, generator=generator).to(options.on, dtype)
    if options.num_experts:
        groups = options.num_experts
        weights = torch.randn(groups, n, k, generator=generator).to(options.on, dtype)
        bounds = sorted(torch.randint(0, m + 1, (groups - 1,), generator=generator).tolist())
        sizes = [after - before for before, after in zip([0, *bounds], [*bounds, m])]
        kernel: Any = GroupedGEMMKernel().initialize(groups, n, k, precision)

        def ours():
            return kernel.gemm(a, weights.mT, sizes)

        def theirs():
            parts = zip(a.split(sizes), weights)
            return torch.cat([torch.matmul(rows, weight.t()) for rows, weight in parts])
    else:
        weight = torch.randn(n, k, generator=generator).to(options.on, dtype)
        kernel = CutlassKernel().initialize(m, n, k, precision)

        def ours():
            return kernel.gemm(a, weight.t())

        def theirs():
            return torch.matmul(a, weight.t())

    flops = 2.0 * m * n * k
    difference = _relative(ours(), theirs())
    rows = {}
    for label, (ms, memory) in _time_both({"pytorch": theirs, "deepwell": ours}, options).items():
        share = _peak_rate(options.on, name if label == "pytorch" else precision)
        rows[label] = _rates(ms, flops=flops, tokens=None, peak=share)
        rows[label]["peak_memory_bytes"] = memory
    rows["deepwell"]["backend"] = kernel.backend
    return {
        "precision": precision,
        "size": [m, n, k],
        "num_experts": options.num_experts,
        **rows,
        "accuracy": {"relative_difference": difference},
    }


def bench_attention(options: argparse.Namespace) -> Row:
    if options.precision not in ("auto", "fp32", "fp16", "bf16"):
        raise UnsupportedError(
            f"attention in {options.precision} is not supported: use bf16, fp16 or fp32"
        )
    batch = _default(options.batch_size, 2, 8, options)
    seq_len = _default(options.seq_len, 256, 4096, options)
    heads, head_dim = options.heads or 8, options.head_dim or 64
    dtype, name = _dtype(options)
    generator = torch.Generator().manual_seed(_SEED)
    q, k, v = (
        torch.randn(batch, heads, seq_len, head_dim, generator=generator).to(options.on, dtype)
        for _ in range(3)
    )
    for x in (q, k, v):
        x.requires_grad_()
    grad = torch.randn(q.shape, generator=generator).to(options.on, dtype)
    config = deepwell.BlackwellConfig(use_pytorch_fallback=True)
    ours = deepwell.BlackwellFlashAttention(config)

    def theirs(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    flops = 2.0 * batch * heads * seq_len * seq_len * head_dim * 3.5  # causal; backward is 2.5
    results, ops, rows = {}, {}, {}
    for label, forward in (
        ("pytorch", theirs),
        ("deepwell", lambda q, k, v: ours(q, k, v, causal=True)),
    ):

        def op(forward=forward):
            return torch.autograd.grad(forward(q, k, v), (q, k, v), grad)

        results[label] = (forward(q, k, v).detach(), *op())
        ops[label] = op
    share = _peak_rate(options.on, name)
    for label, (ms, memory) in _time_both(ops, options).items():
        rows[label] = _rates(ms, flops=flops, tokens=batch * seq_len, peak=share)
        rows[label]["peak_memory_bytes"] = memory
    return {
        "precision": name,
        "batch_size": batch,
        "seq_len": seq_len,
        "heads": heads,
        "head_dim": head_dim,
        **rows,
        "accuracy": {
            "relative_difference": max(
                _relative(x, y) for x, y in zip(results["deepwell"], results["pytorch"])
            )
        },
    }


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        (line,) = (line for line in file if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def bench_step(options: argparse.Namespace) -> Row:
    model_name = options.model or ("tiny" if options.on.type == "cpu" else "small")
    sizes = models.sizes_of(model_name)
    models.check(sizes)
    batch = _default(options.batch_size, 2, 8, options)
    seq_len = _default(options.seq_len, 128, 1024, options)
    if sizes["positions"] and seq_len > sizes["positions"]:
        raise _Usage(f"--seq-len is {seq_len}: {model_name} has {sizes['positions']} positions")
    dtype, name = _dtype(options)
    # The original and a copy in training; activations come on top.
    needed = models.parameter_count(sizes) * dtype.itemsize * (_STATES + 1)
    free = _free_bytes(options.on)
    if needed > free:
        raise UnsupportedError(
            f"{model_name} is not supported here: its training needs more than {needed / 1e9:.1f} GB without "
            f"activations, and {free / 1e9:.1f} GB are free. Choose a smaller --model; `deepwell plan` and `deepwell "
            "dryrun` predict larger ones"
        )
    torch.manual_seed(_SEED)
    original = models.Decoder(sizes).to(options.on, dtype)
    tokens = torch.randint(
        sizes["vocabulary"], (batch, seq_len), generator=torch.Generator().manual_seed(_SEED)
    ).to(options.on)
    flops = float(models.step_flops(sizes, batch, seq_len))
    losses, rows = {}, {}
    for label in ("pytorch", "deepwell"):
        model = copy.deepcopy(original)
        if label == "deepwell":
            model = _optimized(model, "auto" if options.precision == name else options.precision)
        losses[label], ms, memory = _train(model, tokens, options)
        rate = name if label == "pytorch" or options.precision == "auto" else options.precision
        rows[label] = _rates(
            ms, flops=flops, tokens=tokens.numel(), peak=_peak_rate(options.on, rate)
        )
        rows[label]["peak_memory_bytes"] = memory
        rows[label]["last_loss"] = losses[label][-1]
        del model
        if options.on.type == "cuda":
            torch.cuda.empty_cache()
    pairs = zip(losses["deepwell"], losses["pytorch"])
    return {
        "model": model_name,
        "parameters": models.parameter_count(sizes),
        "precision": options.precision,
        "baseline_precision": name,
        "batch_size": batch,
        "seq_len": seq_len,
        **rows,
        "accuracy": {"loss_difference": max(abs(x - y) for x, y in pairs)},
    }


def _optimized(model: torch.nn.Module, precision: str) -> torch.nn.Module:
    try:
        return deepwell.optimize(model, precision=precision, verbose=False)
    except ValueError as error:
        raise UnsupportedError(f"step in {precision} is not supported: {error}") from None


def _train(model, tokens, options) -> tuple[list[float], float, int | None]:
    """Returns the loss of every step, and the median time and the peak memory of the steps after the first ones, in
    which Deepwell captures the model and compares itself with PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses: list[torch.Tensor] = []

    def step() -> None:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    for _ in range(_WARMUP):
        step()
    with _Peak(options.on) as peak:
        ms = statistics.median(times_ms(step, options.iterations, options.on))
    return [loss.item() for loss in losses], ms, peak.bytes


def bench_moe(options: argparse.Namespace) -> Row:
    if options.precision not in ("auto", "fp32", "fp16", "bf16"):
        raise UnsupportedError(
            f"moe in {options.precision} is not supported: use bf16, fp16 or fp32"
        )
    experts = options.num_experts or 8
    top_k = options.top_k or min(2, experts)
    hidden = options.hidden or (64 if options.on.type == "cpu" else 1024)
    width = options.width or 4 * hidden
    if options.tokens is None:
        batch = _default(options.batch_size, 2, 8, options)
        seq_len = _default(options.seq_len, 128, 1024, options)
    elif options.batch_size or options.seq_len:
        raise _Usage("--tokens is given with --batch-size or --seq-len: expected one or the other")
    else:
        batch, seq_len = 1, options.tokens
    factor = options.capacity_factor
    if factor is not None and not 0 < factor < 1e6:
        raise _Usage(f"--capacity-factor is {factor}: expected a positive number")
    if top_k > experts:
        raise _Usage(f"--top-k is {top_k}: expected at most --num-experts, {experts}")
    dtype, name = _dtype(options)
    torch.manual_seed(_SEED)
    plain = deepwell.DeepwellMoE(
        hidden, width, experts, top_k, options.capacity_factor,
        normalize=top_k > 1, score_correction_bias=True,
    )  # fmt: skip
    plain = plain.to(options.on, dtype)
    plain.gate.e_score_correction_bias = plain.gate.e_score_correction_bias.float()
    x = torch.randn(batch, seq_len, hidden).to(options.on, dtype)
    bench_moe_parts.give_load(plain, x.reshape(-1, hidden), options.load)
    layer = _optimized(copy.deepcopy(plain), "auto")
    ops, rows, outputs = {}, {}, {}
    for label, module in (("pytorch", plain), ("deepwell", layer)):

        def op(module=module, label=label):
            out = outputs[label] = module(x)
            out.float().square().mean().backward()
            module.zero_grad(set_to_none=True)

        ops[label] = op
    times = _time_both(ops, options)
    told = plain.statistics()
    sizes = [min(count, plain.capacity(batch * seq_len)) for count in told["tokens"]]
    # Forward, and the gradients of rows and weights: two matrices for each expert, of which one has gate and up.
    flops = 3 * 2.0 * hidden * (sum(sizes) * 3 * width + batch * seq_len * experts)
    share = _peak_rate(options.on, name)
    for label, (ms, memory) in times.items():
        rows[label] = _rates(ms, flops=flops, tokens=batch * seq_len, peak=share)
        rows[label]["peak_memory_bytes"] = memory
    difference = _relative(outputs["deepwell"], outputs["pytorch"])
    products, baseline, not_run = bench_moe_parts.measure_products(
        plain, x, sizes, options.iterations
    )
    parts, missing = bench_moe_parts.measure_parts(plain, layer, x, options.iterations)
    if options.on.type == "cpu":
        not_run.append("kernels of a GPU: --device is cpu, or PyTorch finds no GPU")
    not_run.append("torch.compile of the layer, and expert parallelism")
    return {
        "precision": name,
        "num_experts": experts,
        "top_k": top_k,
        "batch_size": batch,
        "seq_len": seq_len,
        "hidden": hidden,
        "width": width,
        "load": options.load,
        "capacity_factor": options.capacity_factor,
        "rows": {
            "computed": sum(sizes),
            "least": min(sizes),
            "most": max(sizes),
            "imbalance": told["imbalance"],
            "dropped": told["dropped"],
        },
        "baseline": "the same layer in PyTorch",
        **rows,
        "products": products,
        "products_baseline": baseline,
        "parts": parts,
        "not_run": not_run + missing,
        "accuracy": {"relative_difference": difference},
    }


_BENCHES = {
    "attention": bench_attention,
    "gemm": bench_gemm,
    "memory": bench_step,
    "moe": bench_moe,
    "step": bench_step,
}


# ---- the program ---------------------------------------------------------------------------------


class _Usage(Exception):
    pass


def _shown(value: float | None, format: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{format}}{unit}"


def report(result: Row) -> str:
    """Returns the result as text: what was measured, a table of both, the ratio."""
    skipped = (
        "bench", "device", "pytorch", "deepwell", "accuracy", "speedup", "memory_ratio", "products",
        "products_baseline", "parts", "not_run",
    )  # fmt: skip
    words = [f"{key} {value}" for key, value in result.items() if key not in skipped and value]
    lines = [f"{result['bench']} on {result['device']}: {', '.join(words)}", ""]
    lines.append(f"{'':10}{'ms':>12}{'tokens/s':>14}{'TFLOP/s':>10}{'of peak':>9}{'memory GB':>11}")
    for label in ("pytorch", "deepwell"):
        row = result[label]
        memory = row["peak_memory_bytes"]
        lines.append(
            f"{label:10}{row['ms']:12.3f}{_shown(row['tokens_per_s'], ',.0f'):>14}"
            f"{_shown(row['tflops'], '.3f'):>10}{_shown(row['efficiency'], '.1%'):>9}"
            f"{_shown(None if memory is None else memory / 1e9, '.3f'):>11}"
        )
    lines += ["", f"speedup {result['speedup']:.2f}"]
    if result["memory_ratio"] is not None:
        lines.append(f"memory {result['memory_ratio']:.2f} of PyTorch's")
    if result["deepwell"].get("backend"):
        lines.append(f"computed by {result['deepwell']['backend']}")
    for key, value in (result["accuracy"] or {}).items():
        lines.append(f"{key.replace('_', ' ')} to PyTorch {value:.3g}")
    if "products" in result:
        lines += bench_moe_parts.report(result)
    return "\n".join(lines)


def run(arguments: Sequence[str]) -> Row:
    """Runs one benchmark and returns its result."""
    options = parser().parse_args(arguments)
    for name in (
        "batch_size",
        "seq_len",
        "num_experts",
        "heads",
        "head_dim",
        "hidden",
        "width",
        "top_k",
        "tokens",
        "iterations",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise _Usage(f"--{name.replace('_', '-')} is {value}: expected at least 1")
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise UnsupportedError(
            "--device cuda is not supported here: PyTorch finds no GPU (`deepwell doctor` says why)"
        )
    on_gpu = has_gpu and options.device != "cpu"
    options.on = (
        torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    )
    options.iterations = _default(options.iterations, 10, 50, options)
    result = {
        "bench": options.kind,
        "device": device_name(options.on),
        "iterations": options.iterations,
        **_BENCHES[options.kind](options),
    }
    result["speedup"] = result["pytorch"]["ms"] / result["deepwell"]["ms"]
    memory = [result[label]["peak_memory_bytes"] for label in ("deepwell", "pytorch")]
    result["memory_ratio"] = memory[0] / memory[1] if all(memory) else None
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `deepwell bench` and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with warnings.catch_warnings():
            if "--json" in arguments:
                warnings.simplefilter("ignore")
            result = run(arguments)
    except _Usage as error:
        print(f"deepwell: {error}\nTry 'deepwell bench --help'.", file=sys.stderr)
        return 2
    except UnsupportedError as error:
        print(f"deepwell: {error}", file=sys.stderr)
        return 3
    except (DeepwellError, torch.OutOfMemoryError) as error:
        print(f"deepwell: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if "--json" in arguments else report(result), flush=True)
    return 0


def main_of_all(cases: Sequence[Sequence[str]], arguments: Sequence[str] | None = None) -> int:
    """Runs several benchmarks, each with `arguments` after its own (None: those of the program). Benchmarks that are
    not supported here are reported and skipped. Returns the greatest of the other exit statuses, or 3 if none ran."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    statuses = []
    for case in cases:
        if "--json" not in arguments:
            print(f"\n== {' '.join([*case, *arguments])}", flush=True)
        statuses.append(main([*case, *arguments]))
    ran = [status for status in statuses if status != 3]
    return max(ran) if ran else 3


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
