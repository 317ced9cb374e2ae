"""Trains a Hugging Face folder on several GPUs, sharded by FSDP2, with deepwell.Trainer.

    torchrun --standalone --nproc-per-node 8 examples/train_sharded.py --model FOLDER --data tokens.bin --steps 1000 \\
        --checkpoint run

On several nodes give torchrun --nnodes and --rdzv-endpoint instead of --standalone. Each process reads the weights,
shards the model with the others, and runs its part of each batch. Without GPUs the processes use CPUs and gloo. The same
command goes on after an interruption, on another number of processes as well.
"""

import argparse

import deepwell as dw
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--data", required=True, nargs="+", help="token files")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=512, help="sequences of a step, all processes")
    parser.add_argument("--accumulate", type=int, default=8, help="calls that make a step")
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


def sharded(folder: str) -> torch.nn.Module:
    """The model with FP32 parameters, each layer a unit of FSDP2. On GPUs it computes in BF16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    options = {}
    if torch.cuda.is_available():
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def main() -> None:
    given = arguments()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    trainer = dw.Trainer(
        sharded(given.model), given.data, steps=given.steps, sequence=given.sequence, batch=given.batch,
        accumulate=given.accumulate, lr=given.lr, checkpoint=given.checkpoint, resume=True, elastic=True,
    )  # fmt: skip
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
