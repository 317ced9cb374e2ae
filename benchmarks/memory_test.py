"""Peak memory of training steps, Deepwell beside PyTorch: a front of `deepwell bench memory`.

python benchmarks/memory_test.py --model llama-70b --batch-size 128
"""

import sys

from deepwell.bench import main

if __name__ == "__main__":
    sys.exit(main(["memory", *sys.argv[1:]]))
