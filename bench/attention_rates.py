"""Writes src/kernel/cuda/attention_measured.c, the measured rates that `deepwell explain` uses for
attention, from a result of bench/hopper_attention.py:

    python3 bench/attention_rates.py bench/results/FILE.json > src/kernel/cuda/attention_measured.c
"""

from __future__ import annotations

import json
import re
import sys

HEAD = """\
/* Attention as it was measured. Written by bench/attention_rates.py; not to be edited.
 *
 * {gpu}, {date}, torch {torch}, cuDNN {cudnn}: medians of {rounds} rounds of
 * bench/hopper_attention.py, BF16, 16384 rows of queries in all. TFLOP/s of 4 B H S^2 D operations forward (half of
 * them when causal), 2.5 times as many backward. Machines differ by several per cent from day to day: these figures
 * order candidates and scale by shape; which is faster here is for measuring to say. */
#include "kernel/cuda/gpu_attention.h"

/* clang-format off */
const char dw__attention_rates_source[] = "{gpu}, torch {torch}, {date}: nearest shape";

const dw__attention_rate dw__attention_rates[] = {{
    /* head_dim, rows, causal, then forward and backward of deepwell, cudnn, flash */
"""


def main() -> None:
    result = json.load(open(sys.argv[1]))
    rows = []
    for shape in result["shapes"]:
        _, _, s, d, mask = shape["shape"].split()
        rates = [
            "{%.0f, %.0f}" % tuple(shape[way][name]["tflops"] for way in ("forward", "backward"))
            for name in ("ours", "cudnn", "flash")
        ]
        numbers = [int(re.sub("[A-Z]", "", x)) for x in (d, s)]
        rows.append((numbers, mask == "causal", rates))
    print(HEAD.format(**result), end="")
    for (d, s), causal, rates in sorted(rows):
        print(f"    {{{d}, {s}, {str(causal).lower()}, {{{', '.join(rates)}}}}},")
    print("};\n/* clang-format on */")
    print("const size_t dw__attention_rate_count = DW_COUNT(dw__attention_rates);")


if __name__ == "__main__":
    main()
