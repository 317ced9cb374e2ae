"""Measures in advance which backend runs attention of given shapes fastest, as the first eager call would."""

from __future__ import annotations

import sys

import torch

from deepwell import _deepwell
from deepwell.attention import functional
from deepwell.attention.tune import Sizes, Tuner, on_device, versions

_USAGE = """Usage: python -m deepwell.attention B,H,S,D[,WORD...]... [--forward]

Measures which backend (Deepwell, or one of PyTorch's operators) is fastest on this GPU for attention of batch B, H
heads, seq_len S and head dimension D, and stores the result. A shape that has been measured is not measured again.
Words: causal, f16, kv=HEADS, k=ROWS. --forward: without gradients.
"""


def read_shape(text: str, gradients: bool) -> Sizes:
    """Reads a shape as `deepwell explain attention` does, as far as PyTorch's operators support it."""
    words = text.split(",")
    if len(words) < 4 or not all(word.isdecimal() for word in words[:4]):
        raise ValueError(f"'{text}' is not a shape B,H,S,D[,WORD...]")
    batch, heads, rows, dim = (int(word) for word in words[:4])
    dtype, heads_kv, rows_k, right = "bf16", heads, rows, -1
    for word in words[4:]:
        name, _, value = word.partition("=")
        if word == "causal":
            right = 0
        elif word in ("bf16", "f16"):
            dtype = word
        elif name == "kv" and value.isdecimal():
            heads_kv = int(value)
        elif name == "k" and value.isdecimal():
            rows_k = int(value)
        else:
            raise ValueError(f"'{word}' cannot be measured: expected causal, f16, kv=HEADS, k=ROWS")
    lengths = (batch, heads, heads_kv, rows, rows_k, dim)
    if min(lengths) < 1 or heads % heads_kv:
        raise ValueError(f"'{text}': expected positive numbers, and H a multiple of kv")
    return (dtype, *lengths, False, 0.0, -1, right, False, 0.0, gradients, False)


def measure_shape(tuner: Tuner, device: torch.device, sizes: Sizes) -> str:
    """Returns which backend runs such calls, and why."""
    dtype = torch.float16 if sizes[0] == "f16" else torch.bfloat16
    batch, heads, heads_kv, rows, rows_k, dim = sizes[1:7]
    q = torch.empty(batch, heads, rows, dim, dtype=dtype, device=device)
    k = torch.empty(batch, heads_kv, rows_k, dim, dtype=dtype, device=device)
    with on_device(device):
        refused = functional.why_not_kernels(device.type, device.index or 0, sizes)
        if refused:
            return f"not Deepwell's: {refused}"
        tuner.decide(q, k, dim**-0.5, sizes)
        verdict, _, because, _ = _deepwell.attention_decide(False, versions(), *sizes)
    if verdict == "unmeasured":
        return "; ".join(tuner.notes) or "not measured"
    return f"Deepwell: {because}" if verdict == "ours" else because


def main(arguments: list[str]) -> int:
    shapes = [argument for argument in arguments if argument != "--forward"]
    if not shapes or any(shape.startswith("-") for shape in shapes):
        print(_USAGE, file=sys.stderr)
        return 0 if shapes in (["-h"], ["--help"]) else 2
    try:
        sizes = [read_shape(shape, "--forward" not in arguments) for shape in shapes]
    except ValueError as error:
        print(f"deepwell.attention: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("deepwell.attention: there is no CUDA device to measure on", file=sys.stderr)
        return 3
    tuner = Tuner()
    tuner.switch(True)
    for shape, of_shape in zip(shapes, sizes, strict=True):
        print(f"{shape}: {measure_shape(tuner, torch.device('cuda'), of_shape)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
