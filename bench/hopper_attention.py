"""Measures attention forward and backward on one Hopper GPU: Deepwell and PyTorch's cuDNN and flash operators, in one
run.

    python3 bench/hopper_attention.py --lib build/release/lib/libdeepwell.so [--out FILE.json] [-k TEXT] [--host-only]
        [--deterministic] [--shape B,H,S,D]... [--interleaved] [--bias learned|alibi|padding]

The rows are the shapes that FlashAttention's authors publish, then head dimensions 96 and 192, grouped heads (32 of
queries on 8), sliding windows and packed sequences. Peers are PyTorch's cuDNN and flash operators and, where its package
is installed, FlashAttention-3 (flash_attn_interface); PyTorch gives windows and packed sequences to flash alone.

Inputs are random BF16, contiguous [batch, heads, seq_len, head_dim]; with --interleaved, q, k and v are views of one
[batch, seq_len, 3, heads, head_dim]. --deterministic also measures the deterministic backward and compares the bits of
two of its runs. --bias adds numbers to the scores: [1, heads, seq_len, seq_len] whose gradient is computed (T5), the
same without a gradient (ALiBi), or [batch, 1, 1, seq_len] of 0 and -infinity (padding); the peers are then PyTorch's
memory-efficient and cuDNN operators with attn_mask, and flex_attention, compiled. The variable DEEPWELL_SERIAL=0 or 1
excludes or forces the serial backward kernel. Each time is the median of rounds in which the
candidates take turns, between two events, after a write of 512 MiB, which empties the L2 cache and gives the host a
head start. TFLOP/s count 4 D for each head and pair of a query and a key that it sees (half of all pairs if causal), and
2.5 times that backward. Host times are CPU
time per call, for calls that are only enqueued.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import functools
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path

os.environ["DEEPWELL_AUTOTUNE"] = "0"  # measures Deepwell's kernels even if others are faster

import torch  # noqa: E402
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "gpu")]
import native  # noqa: E402

try:
    import flash_attn_interface as flash3
except ImportError:
    flash3 = None


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    rows: int  # of a packed batch: of all its sequences
    dim: int
    causal: bool
    heads_kv: int = 0  # 0: as many as heads
    window: int = -1  # keys that a query sees before its own; -1: all
    lengths: tuple[int, ...] = ()  # of packed sequences

    @property
    def name(self) -> str:
        heads = f"{self.heads}:{self.heads_kv}" if self.heads_kv else f"{self.heads}"
        name = f"B{self.batch} H{heads} S{self.rows} D{self.dim} "
        name += "causal" if self.causal else "full"
        name += f" window {self.window}" if self.window >= 0 else ""
        return name + (f" {len(self.lengths)} packed" if self.lengths else "")

    @property
    def pairs(self) -> float:
        """Of a query and a key that it sees, for each head."""
        if self.window >= 0:
            seen = min(self.window, self.rows)
            return self.batch * (seen * (seen + 1) / 2 + (self.rows - seen) * (seen + 1))
        squares = sum(n * n for n in self.lengths) or self.batch * self.rows**2
        return squares * (0.5 if self.causal else 1.0)


# Batch and heads shrink as seq_len grows, so that the work is similar. FlashAttention's authors publish these shapes.
SHAPES = [
    Case(max(1, 32 * 512 // rows), heads, rows, dim, causal)
    for dim, heads in ((64, 32), (128, 16), (256, 8))
    for rows in (512, 1024, 2048, 4096, 8192, 16384)
    for causal in (False, True)
]
OTHERS = [
    *(
        Case(16384 // rows, heads, rows, dim, causal)
        for dim, heads in ((96, 20), (192, 10))
        for rows in (2048, 8192)
        for causal in (False, True)
    ),
    *(Case(16384 // rows, 32, rows, 128, True, heads_kv=8) for rows in (1024, 4096, 8192)),
    *(
        Case(16384 // rows, heads, rows, dim, True, window=window)
        for dim, heads in ((64, 32), (128, 16))
        for rows, window in ((4096, 1023), (16384, 4095))
    ),
    *(
        Case(
            1, 2048 // dim, 16384, dim, True, lengths=(5120, 3072, 2560, 2048, 1536, 1024, 640, 384)
        )
        for dim in (64, 128)
    ),
]
DETERMINISTIC = "deterministic"
OURS = ("ours", DETERMINISTIC)
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
BIASED_PEERS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flex": None,
}


def offsets_of(case: Case, device) -> torch.Tensor:
    offsets = torch.tensor((0, *case.lengths), device=device).cumsum(0)
    return offsets.to(torch.int32)


def bias_for(kind: str, q: torch.Tensor) -> torch.Tensor | None:
    if not kind:
        return None
    batch, heads, rows, _ = q.shape
    if kind == "padding":
        kept = torch.linspace(rows // 2, rows, batch, device=q.device).long()
        hidden = torch.arange(rows, device=q.device) >= kept[:, None]
        return torch.zeros(batch, 1, 1, rows, device=q.device, dtype=q.dtype).masked_fill_(
            hidden[:, None, None], -math.inf
        )
    return torch.randn(1, heads, rows, rows, device=q.device, dtype=q.dtype)


def call_for(tensors: dict[str, torch.Tensor], case: Case) -> native.Call:
    q = tensors["q"]
    dtype = 3 if q.dtype == torch.bfloat16 else 4
    call = native.Call(struct_size=ctypes.sizeof(native.Call), dtype=dtype)
    call.batch, call.heads_q, call.seq_len_q, call.head_dim = (1, *q.shape)[-4:]
    call.heads_kv, call.seq_len_kv = tensors["k"].shape[-3:-1]
    call.scale = q.shape[-1] ** -0.5
    call.window_left, call.window_right = case.window, 0 if case.causal else -1
    if case.lengths:
        call.batch, call.total_q, call.total_k = len(case.lengths), case.rows, case.rows
        call.seq_len_q = call.seq_len_kv = max(case.lengths)
        call.offsets_q = call.offsets_k = tensors["offsets"].data_ptr()
    for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv"):
        setattr(call, name, native.described(tensors[name]))
    call.lse = tensors["lse"].data_ptr()
    call.stream = torch.cuda.current_stream().cuda_stream
    return call


class Ours:
    def __init__(
        self, library, q, k, v, d_o, case, deterministic=False, bias=None, learned=False
    ) -> None:
        self.library = library
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        results = {name: torch.empty_like(t) for name, t in dict(o=q, dq=q, dk=k, dv=v).items()}
        self.tensors = dict(q=q, k=k, v=v, d_o=d_o, lse=lse, **results)
        if case.lengths:
            self.tensors["offsets"] = offsets_of(case, q.device)
        self.call = call_for(self.tensors, case)
        self.call.deterministic = deterministic
        self.names = ["o", "dq", "dk", "dv"]
        if bias is not None:
            self.tensors["bias"] = bias
            self.call.bias_kind, self.call.bias = 1, native.described_bias(bias)
        if learned:
            self.tensors["d_bias"] = torch.empty_like(bias)
            self.call.d_bias = native.described_bias(self.tensors["d_bias"])
            self.names.append("d_bias")
        self.refused = library.supported(self.call, False)
        self.refused_backward = self.refused or library.supported(self.call, True)
        if not self.refused_backward:
            size = library.workspace(self.call)
            self.workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
            self.call.workspace, self.call.workspace_bytes = self.workspace.data_ptr(), size
            if deterministic:
                self.forward()  # backward needs its results, and only backward is measured

    def forward(self) -> None:
        said = self.library.forward(self.call)
        if said:
            raise RuntimeError(said)

    def backward(self) -> None:
        said = self.library.backward(self.call)
        if said:
            raise RuntimeError(said)

    def results(self) -> list[torch.Tensor]:
        return [self.tensors[name] for name in self.names]


class Peer:
    def __init__(self, backend, q, k, v, d_o, case, bias=None, learned=False) -> None:
        self.backend, self.d_o, self.causal, self.case = backend, d_o, case.causal, case
        self.leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        self.bias = None if bias is None else bias.detach().requires_grad_(learned)
        self.hides = None  # the causal mask beside a bias, which these operators take as one tensor
        if bias is not None and case.causal:
            self.hides = torch.ones(q.shape[2], k.shape[2], device=q.device).tril() == 0
        if bias is not None and backend is None:
            self.flex = self._flex(q, k)
        self.wanted = [*self.leaves, self.bias] if learned else self.leaves
        self.o, self.grads, self.refused = None, None, ""
        try:
            self.forward()
            self.refused_backward = ""
            if bias is not None:
                self.backward()
        except Exception as error:  # compilers have exceptions of their own
            said = (str(error) or repr(error)).splitlines()[0]
            self.refused_backward = said
            if self.o is None:
                self.refused = said

    def _flex(self, q, k):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        attend, bias = torch.compile(flex_attention, dynamic=False), self.bias
        b, h, i, _ = (n > 1 for n in bias.shape)  # axes of length 1 repeat

        def score(value, batch, head, query, key):
            return value + bias[batch * int(b), head * int(h), query * int(i), key]

        mask = None
        if self.causal:
            rows, keys = q.shape[2], k.shape[2]
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, rows, keys, device=q.device
            )
        return lambda: attend(*self.leaves, score_mod=score, block_mask=mask)

    def forward(self) -> None:
        if self.bias is None:
            if self.case.window >= 0 or self.case.lengths:
                raise RuntimeError(
                    "scaled_dot_product_attention has no windows or packed sequences"
                )
            with sdpa_kernel(self.backend):
                self.o = F.scaled_dot_product_attention(
                    *self.leaves, is_causal=self.causal, enable_gqa=bool(self.case.heads_kv)
                )
        elif self.backend is None:
            self.o = self.flex()
        else:
            q, k, _ = self.leaves
            mask = self.bias if self.hides is None else self.bias.masked_fill(self.hides, -math.inf)
            with sdpa_kernel(self.backend):
                self.o = F.scaled_dot_product_attention(
                    *self.leaves, attn_mask=mask.expand(*q.shape[:3], k.shape[2])
                )

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.o, self.wanted, self.d_o, retain_graph=True)

    def results(self) -> list[torch.Tensor]:
        return [self.o.detach(), *self.grads]


class Rows(Peer):
    """An operator of FlashAttention, whose tensors are [batch, seq_len, heads, head_dim], or [total, heads, head_dim]."""

    def __init__(self, backend, q, k, v, d_o, case, bias=None, learned=False) -> None:
        self.offsets = offsets_of(case, q.device) if case.lengths else None
        super().__init__(backend, *(t.transpose(-3, -2).contiguous() for t in (q, k, v, d_o)), case)

    def forward(self) -> None:
        self.o = self.backend(self)

    def results(self) -> list[torch.Tensor]:
        return [t.transpose(-3, -2) for t in super().results()]


def flash2(peer: Rows) -> torch.Tensor:
    """PyTorch's own FlashAttention-2, with what scaled_dot_product_attention does not pass to it."""
    case, (q, k, v) = peer.case, peer.leaves
    most = max(case.lengths, default=case.rows)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, peer.offsets, peer.offsets, most, most, 0.0, case.causal, False,
        window_size_left=case.window if case.window >= 0 else None,
        window_size_right=0 if case.window >= 0 else None,
    )[0]  # fmt: skip


def flash_attention_3(peer: Rows) -> torch.Tensor:
    case, (q, k, v) = peer.case, peer.leaves
    options = dict(causal=case.causal, window_size=(case.window, 0 if case.window >= 0 else -1))
    if case.lengths:
        most = max(case.lengths)
        o = flash3.flash_attn_varlen_func(
            q, k, v, peer.offsets, peer.offsets, most, most, **options
        )
    else:
        o = flash3.flash_attn_func(q, k, v, **options)
    return o[0] if isinstance(o, tuple) else o


def makers_of_peers(options, case: Case, q, k, v, d_o, bias, learned) -> dict:
    made = {}
    for name, backend in options.peers.items():
        kind = Peer
        if name == "flash" and (case.window >= 0 or case.lengths):
            kind, backend = Rows, flash2
        made[name] = functools.partial(kind, backend, q, k, v, d_o, case, bias, learned)
    if flash3 and not options.bias:
        made["fa3"] = functools.partial(Rows, flash_attention_3, q, k, v, d_o, case)
    return made


def timed(runs: dict, flush: torch.Tensor, rounds: int) -> dict[str, float]:
    """Returns median milliseconds by name; the candidates take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        events = {}
        for name, run in runs.items():
            flush.fill_(1.0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events[name] = (begin, end)
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def differ(ours: torch.Tensor, other: torch.Tensor) -> float:
    ours, other = ours.double(), other.double()
    return float((ours - other).norm() / other.norm())


def repeats(entry: Ours) -> bool:
    """Returns whether two runs of backward give the same bits."""
    entry.backward()
    first = [t.clone() for t in entry.results()]
    entry.backward()
    return all(torch.equal(a, b) for a, b in zip(first, entry.results()))


def inputs_of(case: Case, interleaved: bool) -> list[torch.Tensor]:
    batch, heads, length, dim = case.batch, case.heads, case.rows, case.dim
    kind = dict(device="cuda", dtype=torch.bfloat16)
    if not interleaved:
        of_keys = case.heads_kv or heads
        shapes = [(batch, n, length, dim) for n in (heads, of_keys, of_keys, heads)]
        made = [torch.randn(shape, **kind) for shape in shapes]
        return [t[0] for t in made] if case.lengths else made
    qkv = torch.randn(batch, length, 3, heads, dim, **kind)
    d_o = torch.randn(batch, length, heads, dim, **kind)
    return [*qkv.permute(2, 0, 3, 1, 4).unbind(), d_o.transpose(1, 2)]


def device_times(library, options) -> tuple[list[dict], bool]:
    device = torch.device("cuda")
    flush = torch.empty(512 << 18, dtype=torch.float32, device=device)
    rows, right = [], True
    given = [Case(*shape, causal) for shape in options.shape for causal in (False, True)]
    plain = options.bias or options.interleaved
    for case in given or (SHAPES if plain else SHAPES + OTHERS):
        if options.k not in case.name:
            continue
        torch.manual_seed(case.rows + case.dim)
        q, k, v, d_o = inputs_of(case, options.interleaved)
        bias, learned = bias_for(options.bias, q), options.bias == "learned"
        makers = {"ours": lambda: Ours(library, q, k, v, d_o, case, bias=bias, learned=learned)}
        if options.deterministic:
            makers[DETERMINISTIC] = lambda: Ours(library, q, k, v, d_o, case, True, bias, learned)
        makers |= makers_of_peers(options, case, q, k, v, d_o, bias, learned)
        entries = {n: make() for n, make in makers.items()}
        row = {
            "shape": case.name,
            "refused": {n: e.refused_backward for n, e in entries.items() if e.refused_backward},
        }
        flops = 4.0 * case.heads * case.dim * case.pairs
        for what, factor in (("forward", 1.0), ("backward", 2.5)):
            runs = {
                n: getattr(e, what)
                for n, e in entries.items()
                if not (e.refused if what == "forward" else e.refused_backward)
                and (n != DETERMINISTIC or what == "backward")
            }
            made = timed(runs, flush, options.rounds)
            row[what] = {
                n: {"ms": ms, "tflops": flops * factor / ms * 1e-9} for n, ms in made.items()
            }
        other = next((n for n in entries if n in row["backward"] and n not in OURS), "")
        if "ours" in row["backward"] and other:
            pairs = zip(entries["ours"].results(), entries[other].results())
            row["difference"] = dict(zip(entries["ours"].names, [differ(a, b) for a, b in pairs]))
            # Both results round; correct pairs differ by about 0.004.
            if not all(value < 0.02 for value in row["difference"].values()):
                right = False
        if DETERMINISTIC in row["backward"]:
            pairs = zip(entries[DETERMINISTIC].results(), entries["ours"].results())
            row["deterministic"] = {
                "repeats": repeats(entries[DETERMINISTIC]),
                "difference": [differ(a, b) for a, b in pairs],
            }
            same, apart = row["deterministic"]["repeats"], row["deterministic"]["difference"]
            if not same or max(apart) > 0.02:
                right = False
        rows.append(row)
        print(line(row, [n for n in entries if n not in OURS]), flush=True)
        for name, reason in row["refused"].items():
            if options.bias:
                print(f"    {name}: {reason}")
    return rows, right


def line(row: dict, peers: list[str]) -> str:
    """The number in brackets is the time of the fastest peer over ours."""
    parts = [f"{row['shape']:36}"]
    for what in ("forward", "backward"):
        found = row[what]
        parts.append(what[:3])
        parts += [
            f"{n} {found[n]['tflops']:6.1f}" if n in found else f"{n}      -"
            for n in ("ours", *peers)
        ]
        best = min((found[n]["ms"] for n in peers if n in found), default=0.0)
        if "ours" in found and best:
            parts.append(f"({best / found['ours']['ms']:.3f})")
    if DETERMINISTIC in row["backward"]:
        ours, fixed = row["backward"]["ours"]["ms"], row["backward"][DETERMINISTIC]["ms"]
        same = "same" if row["deterministic"]["repeats"] else "OTHER"
        parts.append(f"{fixed:.3f} ms deterministic ({fixed / ours:.3f}), {same} bits")
    if "difference" in row:
        parts.append("diff " + " ".join(f"{value:.4f}" for value in row["difference"].values()))
    if "ours" in row["refused"]:
        parts.append(row["refused"]["ours"])
    return " ".join(parts)


def geometric_means(rows: list[dict]) -> dict:
    """The peer's time over ours: of each peer, and of the fastest one in each row."""
    means = {}
    for what in ("forward", "backward"):
        ratios: dict[str, list[float]] = {}
        for found in (r[what] for r in rows):
            times = {n: found[n]["ms"] for n in found if n not in OURS}
            if "ours" not in found or not times:
                continue
            times["the best"] = min(times.values())
            for peer, ms in times.items():
                ratios.setdefault(peer, []).append(ms / found["ours"]["ms"])
        for peer, values in ratios.items():
            means[f"{what} of {peer}"] = {
                "ratio": math.exp(sum(map(math.log, values)) / len(values)),
                "shapes": len(values),
                "below_1": sum(value < 1 for value in values),
            }
    return means


# ---- the host --------------------------------------------------------------------------------------------


def host_rounds(runs: dict, calls: int = 50, rounds: int = 61) -> dict[str, list[float]]:
    """Returns microseconds per call, of each way in every round, so that disturbances of the host affect all alike. A
    way is a list of contexts, entered outside of the timed part, and a function. The calls are too few to fill the
    queue."""
    times = {name: [] for name in runs}
    for round_ in range(rounds + 3):
        for name, (within, run) in runs.items():
            torch.cuda.synchronize()
            with contextlib.ExitStack() as stack:
                for context in within:
                    stack.enter_context(context())
                begin = time.perf_counter()
                for _ in range(calls):
                    run()
                taken = time.perf_counter() - begin
            if round_ >= 3:
                times[name].append(taken / calls * 1e6)
    torch.cuda.synchronize()
    return times


BARE = "bare launch (dw_attention_forward)"


def host_times(library) -> dict[str, dict[str, float]]:
    case = Case(2, 8, 128, 64, causal=True)
    shape = (case.batch, case.heads, case.rows, case.dim)
    q, k, v, d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    ours = Ours(library, q, k, v, d_o, case)
    runs = {}
    if not ours.refused:
        call = ctypes.byref(ours.call)
        runs["ctypes itself (dw_version)"] = [], library._library.dw_version
        runs[BARE] = [], lambda: library._library.dw_attention_forward(call)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def add(name: str, attend, *within) -> None:
        with contextlib.ExitStack() as stack:
            for context in within:
                stack.enter_context(context())
            o = attend(*leaves)
        again = functools.partial(torch.autograd.grad, o, leaves, d_o, retain_graph=True)
        runs[f"{name}, no_grad"] = [*within, torch.no_grad], lambda: attend(q, k, v)
        runs[f"{name}, grad"] = [*within], lambda: attend(*leaves)
        runs[f"{name}, backward"] = [*within], again

    try:
        from deepwell.attention import attention, functional
    except ImportError as error:
        print(f"the package is missing ({error}): its host times are not measured")
    else:
        functional.fallbacks.clear()
        add("deepwell.attention", lambda q, k, v: attention(q, k, v, is_causal=True))
    for name, backend in PEERS.items():
        add(
            f"sdpa {name}",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            functools.partial(sdpa_kernel, backend),
        )
    times = host_rounds(runs)
    if "deepwell.attention, grad" in times and functional.fallbacks:
        print("deepwell.attention fell back:", dict(functional.fallbacks))
    if BARE in times:
        empty = times.pop("ctypes itself (dw_version)")
        times[BARE] = [a - b for a, b in zip(times[BARE], empty)]
        for name in [n for n in times if n.startswith("deepwell") and "backward" not in n]:
            over = [a - b for a, b in zip(times[name], times[BARE])]
            times[f"{name}: over the bare launch"] = over
    return {name: spread(values) for name, values in times.items()}


def spread(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lib", default="build/release/lib/libdeepwell.so")
    parser.add_argument("--out")
    parser.add_argument("-k", default="", help="shapes whose name contains this")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--interleaved", action="store_true")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        type=lambda text: tuple(int(n) for n in text.split(",")),
        help="batch,heads,seq_len,head_dim, both full and causal, instead of the usual shapes",
    )
    parser.add_argument("--host-only", action="store_true")
    parser.add_argument("--bias", default="", choices=["", "learned", "alibi", "padding"])
    options = parser.parse_args()
    options.peers = BIASED_PEERS if options.bias else PEERS
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 3
    library = native.Library(options.lib)
    properties = torch.cuda.get_device_properties(0)
    report = {
        "date": datetime.date.today().isoformat(),
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "rounds": options.rounds,
    }
    print(" ".join(f"{key} {value}" for key, value in report.items()), flush=True)
    rows, right = ([], True) if options.host_only else device_times(library, options)
    usual = {case.name for case in SHAPES}
    report["shapes"] = rows
    report["geometric_means"] = geometric_means([r for r in rows if r["shape"] in usual])
    report["geometric_means_of_others"] = geometric_means(
        [r for r in rows if r["shape"] not in usual]
    )
    for key, which in (("geometric_means", ""), ("geometric_means_of_others", "other ")):
        for name, mean in report[key].items():
            print(
                f"ours, {name}: {mean['ratio']:.3f} (geometric mean over {mean['shapes']} "
                f"{which}shapes, {mean['below_1']} below 1)"
            )
    report["host_microseconds"] = host_times(library)
    for name, value in report["host_microseconds"].items():
        print("host: {}: {median:.2f} us per call ({p10:.2f} to {p90:.2f})".format(name, **value))
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    if not right:
        print("WRONG: a result is further from another than rounding explains, or its bits change")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
