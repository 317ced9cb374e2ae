"""Measures the capture of models that are too large for this machine: time and memory, each in its own process.

    python bench/capture_models.py [llama-405b] [deepseek-671b] [--whole] [--json FILE]

The model is built on the meta device from its configuration alone and captured. Memory is the peak of the process, and
the part of it that importing PyTorch and transformers takes. --whole traces every layer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

BATCH, LENGTH = 2, 4096  # the sequence length for which FLOPs are counted


def llama_405b():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig(
        num_hidden_layers=126,
        hidden_size=16384,
        num_attention_heads=128,
        num_key_value_heads=8,
        intermediate_size=53248,
        vocab_size=128256,
        max_position_embeddings=131072,
    )


def deepseek_671b():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM, DeepseekV3Config()


MODELS = {"llama-405b": llama_405b, "deepseek-671b": deepseek_671b}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, whole: bool) -> dict:
    """Runs the capture, in a process that has done nothing else."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    load = os.getloadavg()[0]
    started = time.perf_counter()
    import deepwell
    import torch
    from deepwell.ir import IR

    capture_graph = sys.modules["deepwell.capture"].capture_graph
    kind, config = MODELS[name]()
    imported, imported_mib = time.perf_counter() - started, peak_mib()
    started = time.perf_counter()
    with torch.device("meta"):
        model = kind(config)
    built = time.perf_counter() - started
    started, cpu_started = time.perf_counter(), time.process_time()
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    captured = capture_graph(model, (), {"input_ids": ids}, repeat=not whole)
    ir = IR(kind.__name__, captured)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    flops, least_bytes = ir.cost(B=BATCH, S=LENGTH)
    return {
        "model": name,
        "layers": config.num_hidden_layers,
        "copied_layers": captured.copied_layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "captured_parameters": ir.parameter_count,
        "nodes": ir.node_count,
        "symbols": ir.symbols,
        "flops": flops,
        "bytes": least_bytes,
        "import_seconds": imported,
        "build_seconds": built,
        "capture_seconds": seconds,
        "capture_cpu_seconds": cpu_seconds,
        "import_mib": imported_mib,
        "peak_mib": peak_mib(),
        "load_before": load,
        "deepwell": deepwell.__version__,
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["llama-405b"])
    parser.add_argument("--whole", action="store_true", help="trace every layer")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--note", default="", help="other work on the machine, for the record")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.models:
        if name not in MODELS:
            parser.error(f"no model called {name}: one of {', '.join(MODELS)}")
    if options.one:
        print(json.dumps(measure(options.models[0], options.whole)))
        return 0
    results = []
    for name in options.models:
        command = [sys.executable, __file__, "--one", name] + ["--whole"] * options.whole
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode != 0:
            return run.returncode
        result = json.loads(run.stdout.splitlines()[-1])
        results.append(result)
        print(
            f"{name}: {result['capture_seconds']:.1f} s ({result['capture_cpu_seconds']:.1f} s of CPU), "
            f"peak {result['peak_mib']:.0f} MiB ({result['import_mib']:.0f} of them imports), {result['nodes']} nodes, "
            f"{result['copied_layers']} of {result['layers']} layers copied; "
            f"load {result['load_before']:.1f} on {os.cpu_count()} CPUs"
        )
    if options.json:
        from formats import cpu_name

        document = {
            "date": datetime.date.today().isoformat(),
            "machine": {"cpu": cpu_name(), "threads": os.cpu_count()},
            "note": options.note,
            "batch": BATCH,
            "length": LENGTH,
            "results": results,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
