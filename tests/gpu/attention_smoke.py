"""Is libdeepwell.so's attention right on this GPU? A table, one line per case; nothing but ctypes and PyTorch.

    python3 tests/gpu/attention_smoke.py --lib build/release/lib/libdeepwell.so
        [--forward] [--backward]   only one of the two (backward then runs on exact O and LSE)
        [-k SUBSTRING]...          cases whose name contains every one
        [--time] [--list] [--stop]

Each number is the share of the allowed error (attention_reference.py) that was used: above 1 is wrong. Inputs lie
between NaNs, outputs between guard zones, so that a row read or written too many is seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]
import attention_reference as reference  # noqa: E402
import native  # noqa: E402

_GUARD = 4096  # guard elements on either side
_FILL = 0x7FC5  # a NaN in BF16 and in FP16


@dataclass
class Case:
    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 4
    rows_q: int = 256
    rows_k: int = 256
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    layout: str = "bhsd"
    scale: float | None = None
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    dropout: float = 0.0
    seed_memory: bool = False
    dropout_stream: int = 0
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    deterministic: bool = False
    data: str = "normal"
    note: str = ""

    @property
    def name(self) -> str:
        parts = [
            "bf16" if self.dtype == torch.bfloat16 else "f16",
            f"d{self.head_dim}",
            f"b{self.batch}",
            f"h{self.heads_q}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else ""),
            f"s{self.rows_q}" + (f"x{self.rows_k}" if self.rows_k != self.rows_q else ""),
        ]
        if self.lengths_q is not None:
            parts[-1] = "packed" + ",".join(
                f"{n}:{m}" for n, m in zip(self.lengths_q, self.lengths_k)
            )
        if self.window == (-1, 0):
            parts.append("causal")
        elif self.window != (-1, -1):
            parts.append(f"window{self.window[0]},{self.window[1]}")
        parts += ["br"] * self.bottom_right
        parts += [self.layout] * (self.layout != "bhsd")
        parts += [f"softcap{self.softcap:g}"] * (self.softcap > 0)
        parts += [f"dropout{self.dropout:g}"] * (self.dropout > 0)
        parts += ["seedmem"] * self.seed_memory
        parts += [f"stream{self.dropout_stream}"] * (self.dropout_stream > 0)
        parts += [f"scale{self.scale:g}"] if self.scale is not None else []
        parts += [self.data] * (self.data != "normal")
        parts += ["deterministic"] * self.deterministic
        return "-".join(parts)


def cases() -> list[Case]:
    """The simplest shapes come first."""
    half, full = torch.float16, torch.bfloat16
    made = []
    for d in (64, 128, 96, 192, 256):
        made += [
            Case(1, 1, 1, 128, 128, d),
            Case(head_dim=d),
            Case(head_dim=d, window=(-1, 0)),
            Case(head_dim=d, dtype=half, window=(-1, 0), rows_q=384, rows_k=384),
            Case(
                head_dim=d, rows_q=257, rows_k=513, window=(-1, 0), bottom_right=True, layout="bshd"
            ),
            Case(head_dim=d, heads_q=8, heads_kv=2, rows_q=200, rows_k=333),
            Case(1, 2, 2, 1024, 1024, d, window=(-1, 0)),
        ]
    for d in (64, 128, 256):
        one = dict(head_dim=d)
        made += [
            Case(**one, rows_q=1, rows_k=1),
            Case(**one, rows_q=1, rows_k=700, window=(-1, 0), bottom_right=True),
            Case(**one, rows_q=3, rows_k=5),
            Case(**one, rows_q=65, rows_k=129, window=(-1, 0)),
            Case(**one, rows_q=300, rows_k=100, window=(-1, 0)),
            Case(
                **one, rows_q=300, rows_k=100, window=(-1, 0), bottom_right=True, note="empty rows"
            ),
            Case(**one, rows_q=257, rows_k=257, window=(17, 0), heads_kv=1),
            Case(**one, rows_q=321, rows_k=450, window=(40, 30), bottom_right=True),
            Case(**one, rows_q=450, rows_k=321, window=(0, 0)),
            Case(**one, rows_q=321, rows_k=450, window=(-1, 100)),
            Case(**one, rows_q=200, rows_k=200, window=(200, -1)),
            Case(**one, softcap=20.0, window=(-1, 0), data="large"),
            Case(**one, softcap=50.0, rows_q=131, rows_k=259),
            Case(**one, layout="bshd", rows_q=190, rows_k=190),
            Case(**one, layout="qkv", rows_q=190, rows_k=190, window=(-1, 0)),
            Case(**one, layout="gaps", rows_q=77, rows_k=190),
            Case(**one, layout="sbhd", rows_q=77, rows_k=190),
            Case(**one, scale=-0.3, rows_q=77, rows_k=190),
            Case(**one, scale=0.0, rows_q=77, rows_k=190),
            Case(**one, data="peaked", window=(-1, 0)),
            Case(**one, data="flat", rows_k=700),
            Case(**one, data="huge"),
            Case(**one, data="shifted"),
            Case(**one, data="last", rows_k=500),
            Case(**one, dtype=half, data="peaked", rows_q=190, rows_k=70),
            Case(**one, lengths_q=(1, 130, 64, 255), lengths_k=(1, 130, 64, 255), window=(-1, 0)),
            Case(
                **one,
                lengths_q=(100, 0, 300, 7),
                lengths_k=(200, 50, 129, 1),
                window=(-1, 0),
                bottom_right=True,
                heads_kv=2,
            ),
            Case(**one, lengths_q=(33, 64), lengths_k=(500, 31), window=(20, 20), layout="qkv"),
            Case(**one, dropout=0.2, rows_q=190, rows_k=257),
            Case(**one, dropout=0.5, window=(-1, 0), seed_memory=True, heads_kv=2),
            Case(**one, dropout=0.3, dropout_stream=3, rows_q=131, rows_k=259),
            Case(
                **one,
                dropout=0.1,
                dropout_stream=(1 << 33) + 5,
                window=(-1, 0),
                seed_memory=True,
                deterministic=True,
            ),
            Case(**one, dropout=0.1, lengths_q=(100, 65), lengths_k=(200, 31)),
            Case(**one, deterministic=True, rows_q=700, rows_k=700, window=(-1, 0), heads_kv=1),
            Case(**one, deterministic=True, rows_q=333, rows_k=700, dropout=0.1),
            Case(**one, deterministic=True, rows_q=321, rows_k=450, window=(40, 30)),
            Case(
                **one,
                deterministic=True,
                rows_q=300,
                rows_k=100,
                window=(-1, 0),
                bottom_right=True,
                note="empty rows",
            ),
            Case(
                **one,
                deterministic=True,
                lengths_q=(100, 0, 300, 7),
                lengths_k=(200, 50, 329, 1),
                window=(-1, 0),
                bottom_right=True,
                heads_kv=2,
            ),
        ]
    for d in (8, 40, 72, 80, 112, 160, 200, 248):
        made.append(Case(head_dim=d, rows_q=130, rows_k=190, window=(-1, 0)))
    made += [
        Case(1, 12, 12, 1024, 1024, 64, window=(-1, 0), layout="qkv", note="gpt2"),
        Case(1, 8, 2, 2048, 2048, 128, window=(-1, 0), layout="bshd", note="llama"),
        Case(1, 2, 1, 4096, 4096, 128, window=(-1, 0)),
        Case(1, 2, 1, 4096, 4096, 128),
        Case(1, 1, 1, 3001, 5003, 64, window=(1024, 0), bottom_right=True),
        Case(1, 2, 2, 4096, 4096, 128, window=(-1, 0), deterministic=True),
        Case(70, 3, 1, 130, 70, 64),
        Case(1, 2, 2, 1024, 1024, 128, full, window=(-1, 0), dropout=0.1),
    ]
    return made


# ---- memory ------------------------------------------------------------------------------------------------


class Placed:
    """A tensor [batch, heads, rows, dim] (or [heads, total, dim]) in some layout, with guards on
    all sides."""

    def __init__(self, shape, layout: str, dtype: torch.dtype, device: torch.device) -> None:
        packed = len(shape) == 3
        b, (h, s, d) = (1 if packed else shape[0]), shape[-3:]
        gap = 8 if layout == "gaps" else 2 * d if layout == "qkv" else 0
        pad = 3 if layout == "gaps" else 0
        if layout == "sbhd":
            order, sizes = (1, 2, 0, 3), (s, b, h, d)
        elif layout in ("bshd", "qkv") or packed:
            order, sizes = (0, 2, 1, 3), (b, s, h, d + gap)
        else:
            order, sizes = (0, 1, 2, 3), (b, h, s + pad, d + gap)
        count = 1
        for size in sizes:
            count *= size
        self.flat = torch.full((count + 2 * _GUARD,), _FILL, dtype=torch.int16, device=device)
        native.share(self.flat)
        # Returns an int16 with this pattern, and the float with the same bits.
        inside = self.flat[_GUARD : _GUARD + count].view(dtype).view(sizes)
        view = inside.permute(order)[:, :, :s, :d]
        self.view = view[0] if packed else view
        self._bits = self.flat[_GUARD : _GUARD + count].view(sizes).permute(order)[:, :, :s, :d]

    def fill(self, data: torch.Tensor) -> "Placed":
        self.view.copy_(data)
        return self

    def trespassed(self) -> int:
        """Returns the elements outside of the tensor that were written."""
        now = self._bits.clone()
        self._bits.fill_(_FILL)
        wrong = int((self.flat != _FILL).sum())
        self._bits.copy_(now)
        return wrong


def data_for(case: Case, shape, which: str, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if case.data == "peaked" and which in "qk":
        x *= 6.0
    elif case.data == "flat" and which in "qk":
        x *= 2.0**-6
    elif case.data == "large" and which in "qk":
        x *= 2.0
    elif case.data == "huge":
        # Scores stay moderate; values and output gradients approach FP16's limit and go far into
        # BF16's range.
        power = (
            {"q": 20, "k": -20, "v": 100, "d": -60} if case.dtype == torch.bfloat16 else {"v": 10}
        )
        x *= 2.0 ** power.get(which[0], 0)
    elif case.data == "shifted" and which == "v":
        x += 100.0  # dP and delta nearly cancel
    elif case.data == "last" and which == "k":
        # Scores grow with the key, so that each tile raises the maximum.
        x += torch.linspace(0, 4, shape[-2], device=device)[:, None] * torch.ones_like(x).sign()
    elif case.data == "last" and which == "q":
        x = x.abs()
    return x.to(case.dtype)


# ---- one case ----------------------------------------------------------------------------------------------


class Run:
    def __init__(self, case: Case, library, device: torch.device) -> None:
        self.case, self.library = case, library
        generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
        d, packed = case.head_dim, case.lengths_q is not None
        if packed:
            rows_q, rows_k = sum(case.lengths_q), sum(case.lengths_k)
            shape_q, shape_k = (case.heads_q, rows_q, d), (case.heads_kv, rows_k, d)
        else:
            shape_q = (case.batch, case.heads_q, case.rows_q, d)
            shape_k = (case.batch, case.heads_kv, case.rows_k, d)

        def place(shape):
            return Placed(shape, case.layout, case.dtype, device)

        self.inputs = {
            name: place(shape).fill(data_for(case, shape, name, generator))
            for name, shape in (("q", shape_q), ("k", shape_k), ("v", shape_k), ("d_o", shape_q))
        }
        self.before = {name: placed.flat.clone() for name, placed in self.inputs.items()}
        self.outputs = {
            name: place(shape)
            for name, shape in (("o", shape_q), ("dq", shape_q), ("dk", shape_k), ("dv", shape_k))
        }
        rows = _count(shape_q[:-1])
        self.lse = native.share(torch.full((rows + 128,), float("nan"), device=device))
        self.lse_view = self.lse[:rows].view(shape_q[:-1])
        self.reference = reference.Call(
            scale=d**-0.5 if case.scale is None else case.scale,
            softcap=case.softcap,
            window_left=case.window[0],
            window_right=case.window[1],
            bottom_right=case.bottom_right,
            dropout=case.dropout,
            seed=0x1234_5678_9ABC if case.dropout else 0,
            seed_offset=(7 << 32) + 3 if case.dropout else 0,
            dropout_stream=case.dropout_stream,
            lengths_q=case.lengths_q,
            lengths_k=case.lengths_k,
        )
        self._keep = []
        self.call = self._describe(device, packed)

    def _describe(self, device, packed: bool) -> native.Call:
        case, ref = self.case, self.reference
        call = native.Call(struct_size=native.ctypes.sizeof(native.Call))
        call.dtype = self.library.dtype(case.dtype)
        call.batch = len(case.lengths_q) if packed else case.batch
        call.heads_q, call.heads_kv = case.heads_q, case.heads_kv
        call.seq_len_q = max(case.lengths_q) if packed else case.rows_q
        call.seq_len_kv = max(case.lengths_k) if packed else case.rows_k
        call.head_dim = case.head_dim
        if packed:
            for name, lengths in (("q", case.lengths_q), ("k", case.lengths_k)):
                ends = torch.tensor((0, *lengths)).cumsum(0)
                setattr(call, f"total_{name}", int(ends[-1]))
                setattr(call, f"offsets_{name}", self._kept(ends.to(device, torch.int32)))
        call.scale, call.softcap = ref.scale, ref.softcap
        call.window_left, call.window_right = case.window
        call.bottom_right = case.bottom_right
        call.dropout = case.dropout
        call.dropout_stream = case.dropout_stream
        if case.seed_memory:
            memory = torch.tensor([ref.seed, ref.seed_offset], dtype=torch.int64, device=device)
            call.seed_memory = self._kept(memory)
        else:
            call.seed, call.seed_offset = ref.seed, ref.seed_offset
        for name, placed in {**self.inputs, **self.outputs}.items():
            setattr(call, name, native.described(placed.view))
        call.lse = self.lse.data_ptr()
        call.deterministic = case.deterministic
        if device.type == "cuda":
            call.stream = torch.cuda.current_stream().cuda_stream
        return call

    def _kept(self, tensor: torch.Tensor) -> int:
        self._keep.append(native.share(tensor))
        return tensor.data_ptr()

    def exact(self, backward: bool) -> dict[str, reference.Result]:
        i = {name: placed.view for name, placed in self.inputs.items()}
        return reference.attention(
            self.reference, i["q"], i["k"], i["v"], i["d_o"] if backward else None
        )

    def forward(self) -> str:
        return self.library.forward(self.call)

    def backward(self) -> str:
        size = self.library.workspace(self.call)
        memory = torch.full((size + 2 * _GUARD,), 0xFF, dtype=torch.uint8, device=self.lse.device)
        native.share(memory)
        self.call.workspace, self.call.workspace_bytes = memory.data_ptr() + _GUARD, size
        said = self.library.backward(self.call)
        if not said:
            outside = torch.cat([memory[:_GUARD], memory[_GUARD + size :]])
            wrong = int((outside != 0xFF).sum())
            if wrong:
                return f"{wrong} bytes around the workspace of {size} were written"
        return said

    def trespasses(self) -> str:
        for name, placed in self.inputs.items():
            if not torch.equal(placed.flat, self.before[name]):
                return f"input {name} was changed"
        for name, placed in self.outputs.items():
            wrong = placed.trespassed()
            if wrong:
                return f"{wrong} elements outside of {name} were written"
        tail = self.lse[self.lse_view.numel() :]
        return "" if bool(tail.isnan().all()) else "elements behind lse were written"

    def got(self, name: str) -> torch.Tensor:
        return self.lse_view if name == "lse" else self.outputs[name].view


def _count(shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def milliseconds(function, device) -> float:
    if device.type != "cuda":
        return float("nan")
    times = []
    for _ in range(12):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        function()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return sorted(times[2:])[5]


def check(
    case: Case, library, device, forward: bool, backward: bool, timed: bool
) -> tuple[str, list[str]]:
    """Returns ("ok", "FAIL" or "unsupported", the columns of the line)."""
    run = Run(case, library, device)
    said = library.supported(run.call, backward)
    if said:
        return "unsupported", [said]
    exact = run.exact(backward)
    parts, wrong = [], []
    if not forward:  # tests backward alone, with the exact O and LSE of forward
        run.outputs["o"].fill(exact["o"].exact.to(case.dtype))
        run.lse_view.copy_(exact["lse"].exact)
    steps = [("forward", run.forward, ("o", "lse"))] * forward
    steps += [("backward", run.backward, ("dq", "dk", "dv"))] * backward
    for what, step, names in steps:
        said = step()
        if not said and device.type == "cuda":
            torch.cuda.synchronize()
        if said:
            return "FAIL", [f"{what}: {said}"]
        for name in names:
            error, share, where = exact[name].judge(run.got(name))
            parts.append(f"{name} {share:.2f}")
            if not share <= 1:
                wrong.append(f"{name}: error {error:.3g}; {where}")
        said = run.trespasses()
        if said:
            wrong.append(f"{what}: {said}")
        if what == "forward" or case.deterministic:
            first = {name: run.got(name).clone() for name in names}
            step()
            for name in names:
                if not torch.equal(first[name].nan_to_num(7), run.got(name).nan_to_num(7)):
                    wrong.append(f"{name}: other bits in a second run")
        if timed:
            parts.append(f"{what} {milliseconds(step, device):.3f} ms")
    return ("FAIL" if wrong else "ok"), parts + wrong


def main(
    arguments: list[str] | None = None, library=None, device: torch.device | None = None
) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lib", default="build/release/lib/libdeepwell.so")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("-k", action="append", default=[])
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--stop", action="store_true", help="at the first case that fails")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if all(text in case.name for text in options.k)]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if device is None and os.environ.get("DEEPWELL_EMULATE_ARCH"):
        device = torch.device("cpu")
        library = native.Library(options.lib)
    if device is None:
        if not torch.cuda.is_available():
            print("no CUDA device: nothing was checked")
            return 3
        device = torch.device("cuda", torch.cuda.current_device())
        library = native.Library(options.lib)
        print(torch.cuda.get_device_name(device), "torch", torch.__version__, flush=True)
    forward = options.forward or not options.backward
    backward = options.backward or not options.forward
    count = {"ok": 0, "FAIL": 0, "unsupported": 0}
    for case in chosen:
        try:
            verdict, parts = check(case, library, device, forward, backward, options.time)
        # A CUDA error makes the context unusable, so no further case can run.
        except torch.AcceleratorError as error:
            print(f"FAIL {case.name}: {str(error).splitlines()[0]}; the device is lost")
            return 1
        count[verdict] += 1
        print(f"{verdict:4} {case.name}: {'; '.join(parts)}", flush=True)
        if verdict == "FAIL" and options.stop:
            break
    print(
        f"attention_smoke: {count['ok']} right, {count['FAIL']} wrong, {count['unsupported']} not supported"
    )
    return 1 if count["FAIL"] or not count["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
