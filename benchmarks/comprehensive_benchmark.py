"""All benchmarks, Deepwell beside PyTorch: a front of `deepwell bench`. Options follow, for all of them.

python benchmarks/comprehensive_benchmark.py [--iterations N] [--json]
"""

import sys

from deepwell.bench import main_of_all

CASES = (["attention"], ["gemm"], ["gemm", "--num-experts", "8"], ["moe"], ["step"])

if __name__ == "__main__":
    sys.exit(main_of_all(CASES))
