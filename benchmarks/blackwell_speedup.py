"""Training steps of a model, Deepwell beside PyTorch: a front of `deepwell bench step`.

    python benchmarks/blackwell_speedup.py --model llama-7b --precision mxfp8 --batch-size 64 --seq-len 2048 \\
        --iterations 100
"""

import sys

from deepwell.bench import main

if __name__ == "__main__":
    sys.exit(main(["step", *sys.argv[1:]]))
