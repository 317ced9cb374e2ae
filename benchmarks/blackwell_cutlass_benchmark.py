"""GEMMs in several precisions, training steps and the grouped GEMM of a mixture, Deepwell beside PyTorch: a front of
`deepwell bench`. Options follow, for all of them.

    python benchmarks/blackwell_cutlass_benchmark.py [--iterations N] [--json]
"""

import sys

from deepwell.bench import main_of_all

CASES = (
    *(["gemm", "--precision", name] for name in ("bf16", "mxfp8", "nvfp4")),
    ["gemm", "--num-experts", "8"],
    ["step"],
)

if __name__ == "__main__":
    sys.exit(main_of_all(CASES))
