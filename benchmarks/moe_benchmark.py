"""A mixture-of-experts layer: a front of `deepwell bench moe`.

python benchmarks/moe_benchmark.py --num-experts 8 --precision bf16
"""

import sys

from deepwell.bench import main

if __name__ == "__main__":
    sys.exit(main(["moe", *sys.argv[1:]]))
