"""Measures whole training steps on one GPU: PyTorch, torch.compile, Liger's kernels and Deepwell in one run.

    python3 bench/hopper_step.py [MODEL ...] [--ways WAY,...] [--steps N] [--accumulate N] [--profile] [--out FILE.json]

A step is forward, backward and PyTorch's fused AdamW (unless the way says otherwise), with BF16 parameters, random
weights and random tokens. Each way runs in a process of its own, so that its peak of memory and its first step are its
own. The time of a step is the median of ``--steps`` steps, each between two CUDA events; ``host`` is how long the CPU
needs to queue a step when the GPU is idle. ``--profile`` lists the kernels of one step by time. With ``--accumulate N`` a
step is N forwards and backwards and one update.

Ways:
    eager       PyTorch
    compile     torch.compile(model)
    liger       Liger's kernels, where ``liger_kernel`` can be imported
    attention   deepwell.optimize with attention replaced alone, then torch.compile
    engine      deepwell.optimize with the whole model in the engine
    adamw       the same, with deepwell.AdamW
    released    the same after release_gradients(): parameters are updated during backward
    programs-off, programs-all    as adamw with DEEPWELL_EPILOGUES "off" or "all" (docs/gemm.md)
    fp8         the engine with precision="fp8": linear layers but the head multiply FP8 codes
    fp8-block   the engine with precision="fp8-block": the same with scales of blocks, DeepSeek-V3's recipe
    fp8-fast    the way fp8 with fast accumulation in the forward pass
    fp8-adamw, fp8-fast-adamw, fp8-block-adamw    the same three with deepwell.AdamW
    fp8-once    fp8 in deepwell.accumulate: weights are quantized once in each step, for --accumulate above 1
    torchao     torchao's FP8 with one scale for each tensor, then torch.compile, where ``torchao`` can be imported
    grouped, grouped-compile    mixtures with transformers' experts by torch._grouped_mm, without and with torch.compile
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DEEPWELL_MEASURE", "0")  # this script makes the comparison itself

WAYS = [
    "eager", "compile", "liger", "attention", "engine", "adamw", "fp8", "fp8-block", "fp8-fast", "fp8-once",
    "torchao", "grouped", "grouped-compile", "released", "programs-off", "programs-all",
    "fp8-adamw", "fp8-fast-adamw", "fp8-block-adamw",
]  # fmt: skip
# With deepwell.AdamW.
OWN_OPTIMIZER = (
    "adamw", "released", "programs-off", "programs-all", "fp8-adamw", "fp8-fast-adamw", "fp8-block-adamw",
)  # fmt: skip
MODELS = {
    "gpt2": (16, 1024),
    "llama-1b": (4, 2048),
    "llama-8b-8": (2, 4096),
    "qwen3-0.6b": (4, 2048),
    "bert-large": (16, 512),
    "vit-large": (32, 197),
    "t5-large": (8, 512),
    "blocks": (4, 128),
    "olmoe-4": (4, 2048),
    "qwen3-moe-4": (4, 2048),
    "mixtral-1": (4, 2048),
}


def small_blocks():
    """Four pre-norm blocks, hidden 256, 4 heads: hardly any work for the GPU, so that the host's time shows."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(
        256, 4, 1024, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def mixture(name: str):
    """Layers of OLMoE, of a Qwen3-MoE with smaller experts, and one of Mixtral 8x7B."""
    import transformers as hf

    if name == "olmoe-4":
        config = hf.OlmoeConfig(
            num_hidden_layers=4, intermediate_size=1024, num_experts=64, use_cache=False
        )
        return hf.OlmoeForCausalLM(config)
    if name == "qwen3-moe-4":
        config = hf.Qwen3MoeConfig(
            num_hidden_layers=4, hidden_size=2048, num_experts=128, moe_intermediate_size=768, num_experts_per_tok=8,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, use_cache=False,
        )  # fmt: skip
        return hf.Qwen3MoeForCausalLM(config)
    return hf.MixtralForCausalLM(hf.MixtralConfig(num_hidden_layers=1, use_cache=False))


def build(name: str, device: str = "cuda"):
    """Returns the model, in training mode, in BF16, and the arguments of its forward."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    batch, length = MODELS[name]
    no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    llama = dict(num_key_value_heads=8, bos_token_id=0, eos_token_id=0, vocab_size=128256)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        if name == "gpt2":
            model = hf.GPT2LMHeadModel(hf.GPT2Config(**no_dropout, use_cache=False))
        elif name == "llama-1b":
            model = hf.LlamaForCausalLM(
                hf.LlamaConfig(
                    hidden_size=2048,
                    intermediate_size=8192,
                    num_hidden_layers=16,
                    num_attention_heads=32,
                    head_dim=64,
                    tie_word_embeddings=True,
                    use_cache=False,
                    **llama,
                )
            )
        elif name == "llama-8b-8":
            model = hf.LlamaForCausalLM(
                hf.LlamaConfig(
                    hidden_size=4096,
                    intermediate_size=14336,
                    num_hidden_layers=8,
                    num_attention_heads=32,
                    max_position_embeddings=8192,
                    use_cache=False,
                    **llama,
                )
            )
        elif name == "qwen3-0.6b":
            model = hf.Qwen3ForCausalLM(
                hf.Qwen3Config(
                    vocab_size=151936,
                    hidden_size=1024,
                    intermediate_size=3072,
                    num_hidden_layers=28,
                    num_attention_heads=16,
                    num_key_value_heads=8,
                    head_dim=128,
                    tie_word_embeddings=True,
                    use_cache=False,
                )
            )
        elif name == "bert-large":
            model = hf.BertForMaskedLM(
                hf.BertConfig(
                    hidden_size=1024,
                    num_hidden_layers=24,
                    num_attention_heads=16,
                    intermediate_size=4096,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                )
            )
        elif name == "vit-large":
            model = hf.ViTForImageClassification(
                hf.ViTConfig(
                    hidden_size=1024,
                    num_hidden_layers=24,
                    num_attention_heads=16,
                    intermediate_size=4096,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                    num_labels=1000,
                )
            )
        elif name == "t5-large":
            model = hf.T5ForConditionalGeneration(
                hf.T5Config(
                    d_model=1024,
                    d_kv=64,
                    d_ff=4096,
                    num_layers=24,
                    num_heads=16,
                    dropout_rate=0.0,
                    decoder_start_token_id=0,
                    use_cache=False,
                )
            )
        elif name in ("olmoe-4", "qwen3-moe-4", "mixtral-1"):
            model = mixture(name)
        else:
            model = small_blocks()
        if name == "blocks":
            arguments = {"src": torch.randn(batch, length, 256)}
        elif name == "vit-large":
            arguments = {
                "pixel_values": torch.randn(batch, 3, 224, 224),
                "labels": torch.randint(0, 1000, (batch,)),
            }
        else:
            ids = torch.randint(0, model.config.vocab_size, (batch, length))
            arguments = {"input_ids": ids, "labels": ids.clone()}
        torch.set_default_dtype(torch.float32)
    return model.train(), arguments


def prepared(way: str, model):
    import deepwell
    import torch

    if way.startswith("fp8"):
        way = way.removesuffix("-adamw")
    if way in ("grouped", "grouped-compile"):
        model.set_experts_implementation("grouped_mm")
    if way in ("compile", "grouped-compile"):
        return torch.compile(model)
    if way == "attention":
        return torch.compile(deepwell.optimize(model, target="attention", verbose=False))
    if way in ("fp8", "fp8-block", "fp8-once"):
        precision = "fp8-block" if way == "fp8-block" else "fp8"
        return deepwell.optimize(model, precision=precision, verbose=False)
    if way == "fp8-fast":
        policy = deepwell.PrecisionPolicy("fp8", fast_accumulation=True)
        return deepwell.optimize(model, precision=policy, verbose=False)
    if way == "torchao":
        from torchao.float8 import convert_to_float8_training

        heads = {"lm_head", "classifier", "cls"}
        return torch.compile(
            convert_to_float8_training(
                model, module_filter_fn=lambda module, name: name.split(".")[0] not in heads
            )
        )
    if way.startswith("programs-"):
        os.environ["DEEPWELL_EPILOGUES"] = way.removeprefix("programs-")
    if way == "engine" or way in OWN_OPTIMIZER:
        return deepwell.optimize(model, verbose=False)
    return model


def measure(name: str, way: str, steps: int, profile: bool, accumulate: int) -> dict:
    """Returns the figures of one way, measured in this process."""
    import torch

    if way == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        model, arguments = build(name)
        _apply_liger_kernel_to_instance(model=model)
    else:
        model, arguments = build(name)
    batch, length = MODELS[name]
    run = prepared(way, model)
    if way in OWN_OPTIMIZER:
        import deepwell

        optimizer = deepwell.AdamW(model.parameters(), lr=1e-4)
        if way == "released":
            optimizer.release_gradients(accumulation=accumulate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    same_weights = contextlib.nullcontext
    if way == "fp8-once":
        import deepwell

        same_weights = functools.partial(deepwell.accumulate, model)

    def step() -> torch.Tensor:
        with same_weights():
            for _ in range(accumulate):
                made = run(**arguments)
                loss = made.loss if hasattr(made, "loss") else made.square().mean()
                (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    torch.cuda.synchronize()
    begin = time.perf_counter()
    losses = [step()]
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    losses += [step() for _ in range(4)]
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for i in range(steps):
        losses.append(step())
        events[i + 1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    peak = torch.cuda.max_memory_allocated()
    host = []
    for _ in range(5):
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    # The model's own part of the host's time: forward and backward.
    model_host = []
    for _ in range(5):
        begin = time.perf_counter()
        made = run(**arguments)
        loss = made.loss if hasattr(made, "loss") else made.square().mean()
        loss.backward()
        model_host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        if way == "released":  # which counts the backward passes of a step
            for _ in range(accumulate - 1):
                run(**arguments).loss.backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    del made, loss
    milliseconds = statistics.median(times)
    figures = {
        "ms": milliseconds,
        "ms_spread": [min(times), max(times)],
        "tokens_per_s": accumulate * batch * length / milliseconds * 1e3,
        "peak_gib": peak / 2**30,
        "first_step_s": first,
        "host_ms": statistics.median(host) * 1e3,
        "model_host_ms": statistics.median(model_host) * 1e3,
        "losses": [float(loss) for loss in losses[:5] + losses[-1:]],
    }
    if way in OWN_OPTIMIZER or way in ("engine", "attention") or way.startswith("fp8"):
        import deepwell

        figures["summary"] = deepwell.summary(model)
    if profile:
        figures["kernels"] = kernels(step)
    return figures


def kernels(step) -> list[dict]:
    """Returns the kernels of one step, the longest first: name, calls, milliseconds, and for how many milliseconds the
    GPU did nothing before them."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    total: dict[str, list[float]] = {}
    ended = events[0].time_range.start if events else 0
    for event in events:
        entry = total.setdefault(event.name, [0, 0.0, 0.0])
        entry[0] += 0.5
        entry[1] += event.device_time / 2e3
        entry[2] += max(0, event.time_range.start - ended) / 2e3
        ended = max(ended, event.time_range.end)
    ordered = sorted(total.items(), key=lambda item: -item[1][1])
    return [
        {"name": name, "calls": calls, "ms": ms, "idle_before_ms": idle}
        for name, (calls, ms, idle) in ordered
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    asked_for = ("fp8-once", *WAYS[WAYS.index("grouped") :])
    parser.add_argument("--ways", default=",".join(way for way in WAYS if way not in asked_for))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1, metavar="N")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--limit", type=int, default=150, help="seconds for one way")
    parser.add_argument("--out")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        figures = measure(*options.one, options.steps, options.profile, options.accumulate)
        print("figures " + json.dumps(figures))
        return 0
    if unknown := [m for m in options.models if m not in MODELS]:
        parser.error(f"no model called '{unknown[0]}': one of {', '.join(MODELS)}")
    ways = options.ways.split(",")
    if unknown := [w for w in ways if w not in WAYS]:
        parser.error(f"no way called '{unknown[0]}': one of {', '.join(WAYS)}")
    for way, package in (("liger", "liger_kernel"), ("torchao", "torchao")):
        if importlib.util.find_spec(package) is None:
            ways = [w for w in ways if w != way]
    results: dict[str, dict] = {}
    failed = 0
    for name in options.models or [m for m in MODELS if m != "blocks"]:
        for way in ways:
            command = [sys.executable, __file__, "--one", name, way, "--steps", str(options.steps)]
            command += ["--accumulate", str(options.accumulate)]
            command += ["--profile"] * options.profile
            try:
                run = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
                said = run.stdout.rpartition("figures ")[2] if "figures " in run.stdout else ""
                problem = "" if said else (run.stdout + run.stderr)[-4000:]
            except subprocess.TimeoutExpired as error:
                said, problem = "", f"stopped after {error.timeout} s"
            if problem:
                failed += 1
                print(f"{name:12} {way:12} failed\n{problem}", flush=True)
                results.setdefault(name, {})[way] = {"problem": problem}
                continue
            f = json.loads(said)
            results.setdefault(name, {})[way] = f
            print(
                f"{name:12} {way:12} {f['ms']:8.2f} ms {f['tokens_per_s']:9.0f} tokens/s {f['peak_gib']:6.2f} GiB, first"
                f" step {f['first_step_s']:5.1f} s, host {f['host_ms']:6.2f} ms (model {f['model_host_ms']:.2f}), loss"
                f" {f['losses'][0]:.4f} .. {f['losses'][-1]:.4f}",
                flush=True,
            )
            found = f.get("kernels", [])
            if found:
                idle, calls = (sum(k[key] for k in found) for key in ("idle_before_ms", "calls"))
                print(
                    f"    idle {idle:.3f} ms between {calls:.0f} kernels; ms, calls, ms idle before:"
                )
            for k in found[:40]:
                print(
                    f"    {k['ms']:8.3f} {k['calls']:6.0f} {k['idle_before_ms']:7.3f}  {k['name'][:110]}"
                )
    if options.out:
        import torch

        report = {
            "date": datetime.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "torch": torch.__version__,
            "steps": options.steps,
            "accumulate": options.accumulate,
            "results": results,
        }
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
