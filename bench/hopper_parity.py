"""Trains GPT-2 124M in BF16, FP8, MXFP8 and NVFP4 on one GPU and compares the losses, by deepwell.parity.

    python3 bench/hopper_parity.py --make-tokens tokens.bin      # anywhere, with the package tokenizers
    python3 bench/hopper_parity.py --tokens tokens.bin --output OUT [--reuse EARLIER] [--only RUN,...] [--limit SECONDS] [--gpus N]
    python3 bench/hopper_parity.py --tokens tokens.bin --probe 40       # time of a step in each precision

    python3 bench/hopper_parity.py --tokens tokens.bin --make-start start.safetensors     # on a GPU
    python3 bench/hopper_parity.py --tokens tokens.bin --start start.safetensors --lr 3e-4 ...

Sequences of 1024, 16 of them a step, 2,000 steps of AdamW at 6e-4, a cosine after 100 steps of warm-up. Weights are random,
or with --start those of a file. --make-start trains such a file in BF16, by 1,000 steps at a constant rate. Runs from random
weights differ by up to 8 % from seed to seed, because each learns to copy from its context at another time; a start behind that
point makes smaller gaps visible. A seed then stands for an order of the data alone.
A run is a precision and a seed, `bf16:1`; a precision alone stands for seed 0. By default BF16 runs with three seeds, the
recipes with two, and NVFP4 without one of its recipe's parts with one. --gpus divides the runs among so many GPUs.
Finished runs are lines of OUT/runs.jsonl. Those that are there already, and those of EARLIER/runs.jsonl, are not made
again, so that the experiment may be spread over several calls: --limit starts no run that would end later than so many
seconds after the start, judged by the longest run so far. With a run in BF16, OUT has the report, the page and, with
matplotlib, the picture of all runs so far. The precisions in files are those of examples/policies.

The text is source code in Python: the standard library's, and the installed packages'. --make-tokens trains a byte-level
BPE of 32,768 tokens on it and writes 34.5 million tokens (69 MB), more than 2,000 steps read, so that a run reads none
twice. Without --tokens the bytes of the standard library
are the tokens.

The exit status is that of `deepwell parity`, or 1 if a run failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import sysconfig
import time
import traceback
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

POLICIES = Path(__file__).resolve().parents[1] / "examples" / "policies"
FILES = sorted(path.stem for path in POLICIES.glob("*.json"))
NAMED = ("fp8", "fp8-block")
PRECISIONS = {
    **{name: name for name in NAMED},
    **{name: POLICIES / f"{name}.json" for name in FILES},
}
RECIPES = (*NAMED, "mxfp8-floor", "mxfp8-rceil", "nvfp4-recipe")
RUNS = [
    *(f"bf16:{seed}" for seed in range(3)),
    *(f"{name}:0" for name in PRECISIONS),
    *(f"{name}:1" for name in RECIPES),
]
VOCABULARY = 32768
END_OF_TEXT = "<|endoftext|>"


# ---- text ----------------------------------------------------------------------------------------


def sources(packages: bool) -> list[Path]:
    """Returns the modules of the standard library, and of the packages if they are wanted, in an order that depends on
    their names alone and mixes them, so that the held-out end is text of the same kind."""
    paths = sysconfig.get_paths()
    library, installed = Path(paths["stdlib"]), Path(paths["purelib"])
    found = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    if packages:
        found += installed.rglob("*.py")

    def name(path: Path) -> str:
        base = installed if installed in path.parents else library
        return path.relative_to(base).as_posix()

    return sorted(found, key=lambda path: hashlib.sha256(name(path).encode()).digest())


def texts(packages: bool) -> Iterator[str]:
    """Yields the modules that are neither empty nor equal to an earlier one."""
    seen = set()
    for path in sources(packages):
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        if len(raw) < 64 or len(raw) > 1 << 20 or digest in seen:
            continue
        seen.add(digest)
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError:
            continue


def make_tokens(path: Path, most: int) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    began = time.perf_counter()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        size = 0
        for text in texts(packages=True):
            size += len(text)
            if size > 16 << 20:
                return
            yield text

    tokenizer.train_from_iterator(sample(), trainer)
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokens, size, modules = array("H"), 0, 0
    for text in texts(packages=True):
        tokens.extend(tokenizer.encode(text).ids)
        tokens.append(end)
        size, modules = size + len(text), modules + 1
        if len(tokens) >= most:
            break
    del tokens[most:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tokens.tobytes())
    tokenizer.save(str(path.with_suffix(".tokenizer.json")))
    print(
        f"{path}: {len(tokens):,} tokens of {modules:,} modules, {size / len(tokens):.2f} characters each, in "
        f"{time.perf_counter() - began:.0f} s"
    )


def make_bytes(path: Path) -> Path:
    """Writes the standard library's bytes, each a token, and 256 between modules."""
    tokens = array("H")
    for text in texts(packages=False):
        tokens.extend(text.encode())
        tokens.append(256)
    path.write_bytes(tokens.tobytes())
    return path


# ---- runs ----------------------------------------------------------------------------------------


def gpt2():
    import transformers as hf

    config = hf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return hf.GPT2LMHeadModel(config)


def trained(options: argparse.Namespace):
    """Returns the model with the weights of --start."""
    from safetensors.torch import load_file

    model = small_gpt2() if options.small else gpt2()
    found = model.load_state_dict(load_file(options.start), strict=False)
    missing = set(found.missing_keys) & {name for name, _ in model.named_parameters()}
    if (
        missing or found.unexpected_keys
    ):  # the head, which is the embedding, is no parameter of its own
        differ = sorted(missing) + found.unexpected_keys
        sys.exit(f"{options.start} is of another model: {', '.join(differ[:5])}")
    model.tie_weights()
    return model


def make_start(options: argparse.Namespace) -> None:
    """Trains a model in BF16 at a constant rate, on what comparisons train on, and writes its weights in FP32."""
    import deepwell
    import torch
    from deepwell.parity import HELD_OUT_BATCHES, HELD_OUT_SHARE, Sequences, in_bf16
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = in_bf16(small_gpt2() if options.small else gpt2())
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    every = Sequences(options.tokens, options.sequence, model.config.vocab_size)
    held_out = options.batch * min(
        int(len(every) * HELD_OUT_SHARE) // options.batch, HELD_OUT_BATCHES
    )
    trainer = deepwell.Trainer(
        model,
        torch.utils.data.Subset(every, range(len(every) - held_out)),
        optimizer=lambda groups: deepwell.AdamW(
            groups, lr=options.lr, betas=(0.9, 0.95), master_weights=True
        ),
        steps=options.start_steps,
        batch=options.batch,
        warmup_steps=options.start_steps // 10,
        schedule="constant",
        seed=1234,
        progress=False,
    )
    trainer.fit()
    weights = {
        name: value.detach().float().cpu().clone() for name, value in model.named_parameters()
    }
    save_file(weights, options.make_start)
    print(f"{options.make_start}: weights after {options.start_steps} steps", flush=True)


def small_gpt2():
    """A model that a CPU trains in seconds, to try this script."""
    import transformers as hf

    sizes = dict(n_layer=2, n_embd=64, n_head=2, n_positions=1024)
    none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **none, use_cache=False))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make-tokens", type=Path, metavar="FILE")
    parser.add_argument("--token-count", type=int, default=34_500_000)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "build/parity")))
    parser.add_argument("--reuse", type=Path, help="folder of an earlier call's results")
    parser.add_argument("--only", default=",".join(RUNS), help=f"default: {','.join(RUNS)}")
    parser.add_argument("--limit", type=float, default=520.0, help="seconds for this call")
    parser.add_argument("--start", type=Path, help="file of weights with which every run begins")
    parser.add_argument("--make-start", type=Path, metavar="FILE")
    parser.add_argument("--start-steps", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=1, help="divide the runs among so many GPUs")
    parser.add_argument("--probe", type=int, metavar="STEPS", help="times a few steps of each run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--device", help="default: a GPU if there is one")
    return parser.parse_args()


def share_out(runs: list[str], gpus: int) -> list[list[str]]:
    """Divides runs among GPUs in their order, each to the GPU with the least to do. Times are relative to BF16's."""
    cost = {"bf16": 1.0, "fp8": 1.1, "mxfp8": 1.6, "nvfp4": 2.0}
    shares, loads = [[] for _ in range(gpus)], [0.0] * gpus
    for run in runs:
        least = loads.index(min(loads))
        shares[least].append(run)
        loads[least] += cost[run.split(":")[0].split("-")[0]]
    return [share for share in shares if share]


def merged(records: Iterable[Path]) -> list[str]:
    """Returns the lines of several records as one: the first line, which has the settings, and each run once. A record with
    other settings is left out."""
    lines: list[str] = []
    for record in records:
        text = record.read_text() if record.exists() else ""
        found = text[: text.rfind("\n") + 1].splitlines()  # a process may have ended in a line
        if not found:
            continue
        if lines and found[0] != lines[0]:
            print(f"hopper_parity: {record} has other settings and is left out", file=sys.stderr)
            continue
        lines += [line for line in found if line not in lines]
    return lines


def merge_into(folder: Path, records: Iterable[Path]) -> None:
    """Adds the runs of these records to the record of the folder, which keeps its own."""
    own = folder / "runs.jsonl"
    lines = merged([own, *records])
    if lines:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = own.with_name(f"{own.name}.new")
        temporary.write_text("".join(line + "\n" for line in lines))
        temporary.replace(own)


def records_of_gpus(output: Path) -> list[Path]:
    return sorted(output.glob("gpu*/runs.jsonl"))


def run_on_gpus(options: argparse.Namespace) -> None:
    """Makes the runs in one process for each GPU, and collects their records, also those of processes that failed and of an
    earlier call that did not end."""
    words, processes = sys.argv[1:], []
    earlier = [options.reuse / "runs.jsonl"] if options.reuse else []
    merge_into(options.output, [*records_of_gpus(options.output), *earlier])
    try:
        for index, share in enumerate(
            share_out([run for run in options.only.split(",") if run], options.gpus)
        ):
            folder = options.output / f"gpu{index}"
            command = [
                *words,
                "--gpus",
                "1",
                "--only",
                ",".join(share),
                "--output",
                str(folder),
                "--tokens",
                str(options.tokens),
                "--reuse",
                str(options.output),
            ]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(index)}
            processes.append(
                (folder, subprocess.Popen([sys.executable, __file__, *command], env=environment))
            )
        for folder, process in processes:
            if status := process.wait():
                print(f"hopper_parity: the runs in {folder} ended with {status}", file=sys.stderr)
    finally:
        merge_into(options.output, records_of_gpus(options.output))


def main() -> int:
    began = time.perf_counter()
    options = parse()
    if options.make_tokens:
        make_tokens(options.make_tokens, options.token_count)
        return 0
    if options.tokens is None:
        options.output.mkdir(parents=True, exist_ok=True)
        options.tokens = make_bytes(options.output / "bytes.bin")
    if options.make_start:
        make_start(options)
        return 0
    if options.gpus > 1:
        run_on_gpus(options)
        options.limit, options.reuse = 0.0, None
    import torch
    from deepwell.errors import DeepwellError
    from deepwell.parity import RUNS as RECORD
    from deepwell.parity import Comparison, Settings, variants_of, write_reports

    variants = {variant.name: variant for variant in variants_of(PRECISIONS)}
    runs = (run.partition(":") for run in options.only.split(",") if run)
    chosen = [(name, int(seed or 0)) for name, _, seed in runs]
    if unknown := [name for name, _ in chosen if name not in variants]:
        raise SystemExit(f"no precision called '{unknown[0]}': one of {', '.join(variants)}")
    output = options.output / "probe" if options.probe else options.output
    output.mkdir(parents=True, exist_ok=True)
    if options.reuse and not options.probe:
        merge_into(output, [options.reuse / RECORD])
    comparison = Comparison(
        trained(options) if options.start else small_gpt2 if options.small else gpt2,
        options.tokens,
        list(variants.values()),
        Settings(
            options.probe or options.steps,
            batch=options.batch,
            sequence=options.sequence,
            lr=options.lr,
            eval_every=options.probe or max(1, options.steps // 5),
        ),
        output=output,
        fresh=bool(options.probe),
        device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        show=sys.stderr.isatty(),
    )
    longest, failed = 0.0, False
    if options.probe:
        chosen = list(dict.fromkeys((name, 0) for name, _ in chosen))
    for name, seed in chosen:
        known = comparison.ledger.find(variants[name], seed) is not None
        spent = time.perf_counter() - began
        if not known and spent + longest * 1.1 > options.limit:
            print(f"{name}:{seed} left for another call after {spent:.0f} s", flush=True)
            continue
        try:
            run = comparison.run(variants[name], seed)
        except Exception:
            failed = True
            print(f"{name}:{seed} failed", flush=True)
            traceback.print_exc()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises if the GPU's state is lost
            continue
        if run is None:
            print(f"{name}:{seed} unsupported: {comparison.unsupported[name]}", flush=True)
            continue
        if not known:
            longest = max(longest, run.seconds)
        print(
            f"{name}:{seed} held-out loss {run.loss:.4f}, training loss {run.training_loss:.4f}, {run.step_ms:.2f} ms a "
            f"step, {run.seconds:.0f} s{', from an earlier call' if known else ''} {run.diverged}",
            flush=True,
        )
    try:
        result = comparison.result()
    except DeepwellError as error:
        print(error)
        return 1
    print(result)
    if missing := write_reports(result, output):
        print(missing)
    print(f"{time.perf_counter() - began:.0f} s")
    return 1 if failed else result.exit_status


if __name__ == "__main__":
    sys.exit(main())
