"""Measures tokens/s of an exported GPT-2 124M beside `generate` of transformers, side by side.

    python bench/generate.py [--device cpu|cuda] [--model gpt2|llama1b] [--tokens 256] [--out FILE.json]

The model has random weights. A prompt of 32 tokens is continued greedily, one text at a time, by the artifact
(deepwell.load_engine) and by transformers with its growing cache and with its static cache, whose step transformers
compiles on a GPU. The time is that of a whole call, prompt included, on a quiet machine: the ways take turns, and the
median of the rounds counts. In FP32 the tokens of all ways must be equal, or the exit status is 1; in BF16, where two
kernels may round the two most likely logits differently, the length of the equal beginning is printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import deepwell
import torch
import transformers
from transformers import GPT2Config, LlamaConfig

CONFIGURATIONS = {
    "gpt2": GPT2Config(),
    "llama1b": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="gpt2", choices=CONFIGURATIONS)
    parser.add_argument("--dtype", default="f32,bf16", help="f32, bf16 or both")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-static", action="store_true", help="leaves out the static cache")
    parser.add_argument("--out", help="writes the figures as JSON")
    return parser.parse_args()


def transformers_way(model, prompt: torch.Tensor, tokens: int, **how):
    def run() -> list[int]:
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            **how,
        )
        return made[0].tolist()

    return run


def equal_beginning(first: list[int], second: list[int]) -> int:
    different = (i for i, pair in enumerate(zip(first, second)) if pair[0] != pair[1])
    return next(different, min(len(first), len(second)))


def measure(options: argparse.Namespace, dtype: str, folder: Path) -> dict:
    torch.manual_seed(0)
    config = CONFIGURATIONS[options.model]
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = model.to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    path = folder / f"{dtype}.engine"
    begin = time.perf_counter()
    deepwell.export(model, path)
    exported = time.perf_counter() - begin
    begin = time.perf_counter()
    artifact = deepwell.load_engine(
        path, device=options.device, dtype=dtype if dtype == "f32" else None
    )
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, config.vocab_size, (1, options.prompt), generator=generator)
    ids = prompt[0].tolist()
    artifact.generate(ids, 2, ignore_end=True)
    loaded = time.perf_counter() - begin
    model, prompt = model.to(options.device), prompt.to(options.device)
    ways = {
        "artifact": lambda: artifact.generate(ids, options.tokens, ignore_end=True),
        "transformers": transformers_way(model, prompt, options.tokens),
    }
    if not options.no_static:
        ways["transformers, static cache"] = transformers_way(
            model, prompt, options.tokens, cache_implementation="static"
        )
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    texts: dict[str, list[int]] = {}
    for round in range(-1, options.rounds):  # the first round compiles and fills caches
        for way, run in ways.items():
            begin = time.perf_counter()
            texts[way] = run()
            if round >= 0:
                seconds[way].append(time.perf_counter() - begin)
    rows = {}
    for way, times in seconds.items():
        rows[way] = {
            "tokens_per_second": options.tokens / statistics.median(times),
            "seconds": times,
            "equal_beginning": equal_beginning(texts[way], texts["transformers"]),
        }
    return {"ways": rows, "export_s": exported, "load_s": loaded, "length": len(texts["artifact"])}


def main() -> int:
    options = parse()
    transformers.logging.set_verbosity_error()
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
    results = {
        "model": options.model,
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deepwell": deepwell.__version__,
        "threads": torch.get_num_threads(),
        "prompt": options.prompt,
        "tokens": options.tokens,
        "dtypes": {},
    }
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtype.split(","):
            made = results["dtypes"][dtype] = measure(options, dtype, Path(folder))
            print(
                f"{options.model} {dtype}: export {made['export_s']:.2f} s, load {made['load_s']:.2f} s"
            )
            for way, row in made["ways"].items():
                equal = f"{row['equal_beginning']} of {made['length']} tokens equal"
                print(f"  {way:28} {row['tokens_per_second']:9.1f} tokens/s  {equal}", flush=True)
                failed |= dtype == "f32" and row["equal_beginning"] != made["length"]
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
