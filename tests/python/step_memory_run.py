"""Predicts the memory of a training step of a model on the meta device, then trains the real one
and measures it. Prints both as JSON, one line for each task."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import traceback

os.environ["DEEPWELL_MEASURE"] = "0"  # otherwise the first call also runs the model in PyTorch
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepwell as dw
import torch
from compare import tensors_of
from deepwell import _deepwell
from step_memory_models import MODELS

_counter = ctypes.CDLL(None)
for _name in ("counted_now", "counted_most"):
    getattr(_counter, _name).restype = ctypes.c_size_t
MAPPED = 2 << 20  # the CPU device maps blocks from this size by itself


def resident(most: bool = False) -> int:
    """Returns the bytes of this process that are resident now, or the peak."""
    key = "VmHWM:" if most else "VmRSS:"
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(key))


def restart() -> None:
    _counter.counted_restart()
    _deepwell.device_memory(True)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM


def tensor_bytes() -> int:
    """Returns the peak of allocated bytes since the last restart: counted allocations and mapped
    arenas."""
    _, arena = _deepwell.device_memory()
    return _counter.counted_most() + (arena if arena >= MAPPED else 0)


def train(model, optimizer, arguments, steps: int, accumulate: bool, keep: bool | None) -> None:
    """Runs the loop that the prediction describes. A model without a loss gets gradients of all its outputs."""
    args, kwargs = arguments
    for _ in range(steps):
        if not accumulate:
            optimizer.zero_grad()
        with dw.accumulate(model) if accumulate else contextlib.nullcontext():
            result = model(*args, **kwargs)
            loss = getattr(result, "loss", None)
            if loss is None:
                outputs = [t for t in tensors_of(result) if t.requires_grad]
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
                del outputs
            else:
                if not keep:
                    del result
                loss.backward()
        optimizer.step()
        result = loss = None


def measure(name: str, which: str, words: list[str]) -> dict:
    accumulate, keep = "accumulate" in words, True if "keep" in words else None
    precision = next((w for w in words if w in ("bf16", "mxfp8", "nvfp4")), "auto")
    made = MODELS[name]
    arenas, before = _deepwell.device_memory(True)[0], _counter.counted_now()
    restart()
    with torch.device("meta"):
        model = made.build().train()
    arguments = made.arguments(torch.Generator().manual_seed(1))
    given = sum(
        t.numel() * t.element_size()
        for t in [*arguments[0], *arguments[1].values()]
        if isinstance(t, torch.Tensor)
    )
    options = dict(accumulate=accumulate, keep_outputs=keep, precision=precision)
    report = dw.dryrun(model, arguments, optimizer=which, **options)
    while_predicting = _counter.counted_most() - before - given
    arenas_predicting = _deepwell.device_memory()[1] - arenas
    del model, arguments
    gc.collect()

    before, resident_before = _counter.counted_now(), resident()
    model = made.build().train()
    arguments = made.arguments(torch.Generator().manual_seed(1))
    optimizer = {"adamw_dw": dw.AdamW, "adamw": torch.optim.AdamW}[which](model.parameters())
    dw.optimize(model, precision=precision, verbose=False)
    train(model, optimizer, arguments, 2, accumulate, keep)
    restart()
    train(model, optimizer, arguments, 2, accumulate, keep)
    return {
        "predicted": report["peak_bytes"],
        "peak": report["peak"],
        # Without the gap in front of kept values, which are memory of their own.
        "arena": [
            report["arena"]["bytes"] - report["arena"]["kept_bytes"],
            _deepwell.device_memory()[1] - report["arena"]["kept_bytes"],
        ],
        "measured": tensor_bytes() - before,
        "resident": resident(most=True) - resident_before,
        "while_predicting": while_predicting,
        "arenas_predicting": arenas_predicting,
        "parts": len(report["moments"]) - 2,
        "engine": "4 calls by the engine, 0 by PyTorch" in dw.summary(model),
    }


def main() -> None:
    """Runs each task, MODEL:OPTIMIZER[:WORD...], in its own process: a fork that has imported everything."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Incurs one-time costs of a process: imports, and oneDNN's generated code, which it keeps.
    warm, (args, kwargs) = MODELS["gpt2"].build(), MODELS["gpt2"].arguments(torch.Generator())
    dw.dryrun(warm, (args, kwargs))
    dw.optimize(warm, verbose=False)(*args, **kwargs).loss.backward()
    del warm, args, kwargs
    gc.collect()
    for task in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        name, which, *words = task.split(":")
        torch.set_num_threads(
            int(next((w[1:] for w in words if w[0] == "t" and w[1:].isdigit()), 1))
        )
        try:
            print(json.dumps({"task": task, **measure(name, which, words)}), flush=True)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)


main()
