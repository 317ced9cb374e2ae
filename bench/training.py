"""Measures whole models, FP32, on this CPU: PyTorch, torch.compile and Deepwell in one run.

    python bench/training.py [MODEL ...] [--rounds N] [--json FILE]

The floor comes first: the time of the model's GEMMs alone, forward and backward, by PyTorch and by Deepwell's matmul
kernels. Then forward + backward, and the whole step with each optimizer, are interleaved round by round, so that drift
of the machine affects all alike. Memory is measured in one process per way (``--memory WAY MODEL``): the peak of a step
above parameters, gradients and optimizer state.
"""

from __future__ import annotations

import argparse
import collections
import copy
import ctypes
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["DEEPWELL_MEASURE"] = "0"  # this script makes the comparison itself
warnings.filterwarnings("ignore")

import deepwell  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()


def build(name: str) -> tuple[torch.nn.Module, int, int]:
    """Returns (model in training mode, batch, length)."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # No dropout in any way: masks would differ, and so would the losses.
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if name == "gpt2-6x384":
        return GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=384, n_head=6, **still)).train(), 8, 256
    if name == "gpt2-124M":
        return GPT2LMHeadModel(GPT2Config(**still)).train(), 2, 256
    if name == "llama-6x384":
        config = LlamaConfig(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=50257,
            bos_token_id=0,
            eos_token_id=0,
        )
        return LlamaForCausalLM(config).train(), 8, 256
    raise SystemExit(f"no model called '{name}': one of {', '.join(MODELS)}")


MODELS = ["gpt2-6x384", "gpt2-124M", "llama-6x384"]
WAYS = ["eager", "compile", "deepwell"]


def data_for(model: torch.nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(
        0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1)
    )
    return {"input_ids": ids, "labels": ids.clone()}


def prepared(way: str, model: torch.nn.Module) -> torch.nn.Module:
    if way == "compile":
        return torch.compile(model)
    if way == "deepwell":
        return deepwell.optimize(model, verbose=False)
    return model


def seconds(function, *args) -> float:
    started = time.perf_counter()
    function(*args)
    return time.perf_counter() - started


def floor(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Returns (seconds, FLOPs) of the linear layers' GEMMs: forward, gradient of input, gradient of weight."""
    shapes: collections.Counter = collections.Counter()

    def record(module, inputs, output):
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        shapes[x.shape[0], x.shape[1], output.shape[-1]] += 1

    handles = [
        module.register_forward_hook(record)
        for module in model.modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    ]
    with torch.no_grad():
        model(**data)
    for handle in handles:
        handle.remove()
    total, flops = 0.0, 0.0
    for (m, k, n), count in shapes.items():
        x, w, dy = torch.randn(m, k), torch.randn(k, n), torch.randn(m, n)
        for gemm in (lambda: x @ w, lambda: dy @ w.t(), lambda: x.t() @ dy):
            gemm()
            total += count * statistics.median(seconds(gemm) for _ in range(5))
        flops += 6.0 * m * k * n * count
    return total, flops


def speed(name: str, rounds: int) -> dict:
    model, batch, length = build(name)
    data = data_for(model, batch, length)
    floor_seconds, flops = floor(model, data)
    models = {way: copy.deepcopy(model) for way in WAYS}
    steps, first, losses = {}, {}, {}

    def forward_backward(way: str) -> float:
        loss = steps[way](**data).loss
        loss.backward()
        models[way].zero_grad(set_to_none=True)
        return loss.item()

    for way in WAYS:
        started = time.perf_counter()
        steps[way] = prepared(way, models[way])
        losses[way] = forward_backward(way)
        first[way] = time.perf_counter() - started
        forward_backward(way)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            times[way].append(seconds(forward_backward, way))
    medians = {way: statistics.median(values) for way, values in times.items()}

    threads = torch.get_num_threads()
    scaling = {}
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        forward_backward("deepwell")
        scaling[count] = statistics.median(seconds(forward_backward, "deepwell") for _ in range(3))
    torch.set_num_threads(threads)

    optimizers = {
        "torch AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "torch AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        "deepwell AdamW": lambda p: deepwell.AdamW(p, lr=1e-4),
    }
    whole: dict[str, dict[str, float]] = {}
    for label, make in optimizers.items():
        made = {way: make(models[way].parameters()) for way in WAYS}
        step_times: dict[str, list[float]] = {way: [] for way in WAYS}

        def step(way: str) -> None:
            steps[way](**data).loss.backward()
            made[way].step()
            made[way].zero_grad()

        for round_ in range(max(rounds // 2, 3) + 1):
            for way in WAYS:
                elapsed = seconds(step, way)
                if round_ > 0:
                    step_times[way].append(elapsed)
        whole[label] = {way: statistics.median(values) for way, values in step_times.items()}
        made.clear()
        gc.collect()
    unit = models["deepwell"].forward.session.report._units[""]
    assert unit.calls and not unit.fallbacks, deepwell.summary(models["deepwell"])
    return {
        "model": name,
        "batch": batch,
        "length": length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "floor_seconds": floor_seconds,
        "floor_gflops": flops / floor_seconds / 1e9,
        "linear_flops": flops,
        "forward_backward_seconds": medians,
        "forward_backward_all": times,
        "deepwell_seconds_by_threads": scaling,
        "first_step_seconds": first,
        "capture_seconds": unit.capture_seconds,
        "losses": losses,
        "whole_step_seconds": whole,
    }


# ---- memory -----------------------------------------------------------------------------------------


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def memory(way: str, name: str) -> dict[str, int]:
    """Returns peak bytes of resident memory above parameters, gradients and optimizer state, in two cases.

    in_place: forward and backward with all gradients in place, as in gradient accumulation. This is the need of
    activations and temporaries. plain_loop: forward, backward, step, zero_grad (which frees the gradients), minus the
    idle resident memory with all gradients in place.
    """
    model, batch, length = build(name)
    data = data_for(model, batch, length)
    step_model = prepared(way, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def forward_backward() -> None:
        step_model(**data).loss.backward()

    def plain_step() -> None:
        optimizer.zero_grad()
        forward_backward()
        optimizer.step()

    def peak(function) -> int:
        if way == "deepwell":
            model.forward.session.pool.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        at_rest = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        function()
        return _status("VmHWM") - at_rest

    plain_step()
    plain_step()
    return {"in_place": peak(forward_backward), "plain_loop": peak(plain_step)}


def measured_memory(way: str, name: str) -> dict[str, int]:
    environment = dict(os.environ, MALLOC_MMAP_THRESHOLD_="131072", MALLOC_TRIM_THRESHOLD_="131072")
    command = [sys.executable, __file__, "--memory", way, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- report -----------------------------------------------------------------------------------------


def machine() -> dict:
    cpu = platform.processor() or "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    from deepwell import _deepwell

    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "engine": json.loads(_deepwell.machine()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deepwell": deepwell.__version__,
        "date": datetime.date.today().isoformat(),
    }


def show(result: dict) -> None:
    medians, eager = result["forward_backward_seconds"], result["forward_backward_seconds"]["eager"]
    print(
        f"\n{result['model']}: {result['parameters'] / 1e6:.1f} M parameters, batch "
        f"{result['batch']}, length {result['length']}, FP32"
    )
    print(
        f"  floor: GEMMs of the linear layers alone {result['floor_seconds'] * 1e3:.0f} ms "
        f"({result['floor_gflops']:.0f} GFLOP/s in PyTorch)"
    )
    print(
        f"  {'':10}{'fwd+bwd ms':>12}{'speed-up':>10}{'floor/time':>12}{'MiB/step':>10}"
        f"{'of eager':>10}{'first step':>12}{'loss':>10}"
    )
    for way in WAYS:
        used = result["memory_bytes"][way]["in_place"]
        print(
            f"  {way:10}{medians[way] * 1e3:12.1f}{eager / medians[way]:9.2f}x"
            f"{result['floor_seconds'] / medians[way]:12.2f}{used / 2**20:10.0f}"
            f"{used / result['memory_bytes']['eager']['in_place']:10.2f}"
            f"{result['first_step_seconds'][way]:11.1f}s{result['losses'][way]:10.4f}"
        )
    row = ", ".join(
        f"{way} {used['plain_loop'] / 2**20:.0f} MiB"
        for way, used in result["memory_bytes"].items()
    )
    print(f"  memory of a plain loop with torch AdamW: {row}")
    print(f"  capture and compile: {result['capture_seconds']:.2f} s")
    row = ", ".join(
        f"{count}: {value * 1e3:.0f} ms"
        for count, value in result["deepwell_seconds_by_threads"].items()
    )
    print(f"  deepwell by threads: {row}")
    for label, times in result["whole_step_seconds"].items():
        row = ", ".join(f"{way} {times[way] * 1e3:.0f} ms" for way in WAYS)
        print(f"  whole step, {label}: {row}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--memory", choices=WAYS, help="print one way's bytes and stop")
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory(options.memory, options.models[0])))
        return 0
    results = []
    for name in options.models or MODELS:
        result = speed(name, options.rounds)
        gc.collect()
        result["memory_bytes"] = {way: measured_memory(way, name) for way in WAYS}
        results.append(result)
        show(result)
        sys.stdout.flush()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(), "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwritten to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
