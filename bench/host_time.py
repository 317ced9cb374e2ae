"""Measures the host's time of a call through an optimized module on a GPU: forward and backward, medians in ms, and how
much of each is spent in the engine's own calls, which launch CUDA graphs.

    python bench/host_time.py [blocks] [gpt2] [--profile] [--fake build/release/fake]

Without a GPU, --fake names the folder of the tests' fake driver, which does nothing: tensors are then the CPU's, results
are meaningless, and what is left is the time of Python, PyTorch and the library, without that of a driver. One thread.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import statistics
import sys
import tempfile
import time

os.environ["DEEPWELL_MEASURE"] = "0"

# glibc keeps what is freed, as PyTorch's allocator of a GPU does.
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}


def use_fake_driver(folder: pathlib.Path) -> None:
    if any(os.environ.get(name) != value for name, value in _KEPT.items()):
        os.environ.update(_KEPT)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ["DEEPWELL_FIRST_USE_CHECK"] = "off"
    os.environ["DEEPWELL_NVRTC"] = str(folder / "libnvrtc.so.13")
    os.environ["DEEPWELL_CACHE"] = tempfile.mkdtemp()
    ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


def fake_target():
    """Returns a target whose tensors are the CPU's and whose plans go to the fake driver."""
    import contextlib

    import torch
    from deepwell import targets

    class Fake(targets.Gpu):
        kind = "cpu"

        def __init__(self) -> None:
            super().__init__(0)
            self.device = torch.device("cpu")

        def current(self):
            return contextlib.nullcontext()

        def _stream(self) -> int:
            return 0

        def arena(self, size: int):
            # PyTorch's allocator of a GPU gives multiples of 512, the CPU's of 64.
            memory = super().arena(size + 512)
            memory.address, memory.bytes = -(-memory.address // 512) * 512, size
            return memory

    return Fake()


def blocks(device):
    import torch

    layer = torch.nn.TransformerEncoderLayer(
        256, 8, 1024, dropout=0.0, batch_first=True, activation="gelu"
    )
    encoder = torch.nn.TransformerEncoder(layer, 4, torch.nn.LayerNorm(256))
    encoder = encoder.to(device=device, dtype=torch.bfloat16)
    x = torch.randn(4, 128, 256, device=device, dtype=torch.bfloat16)
    return encoder, lambda model: model(x).sum()


def gpt2(device):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    config._attn_implementation = "sdpa"
    model = GPT2LMHeadModel(config).to(device=device, dtype=torch.bfloat16)
    shape = (16, 1024) if device != "cpu" else (1, 128)
    ids = torch.randint(0, 50257, shape, device=device)
    return model, lambda model: model(ids, labels=ids).loss


def measure(name: str, options: argparse.Namespace) -> None:
    import deepwell
    import torch

    device = "cuda" if options.fake is None else "cpu"
    model, loss = {"blocks": blocks, "gpt2": gpt2}[name](device)
    wait = torch.cuda.synchronize if options.fake is None else lambda: None
    if options.fake is None:
        model = deepwell.optimize(model, verbose=False)
    else:
        sys.modules["deepwell.optimize"]._place = lambda root, target: fake_target()
        torch.cuda.get_device_name = lambda device: "a fake GPU"
        model = deepwell.optimize(model, target="cpu", precision="fp32", verbose=False)
    times: list[tuple[float, ...]] = []
    inside = {
        "forward": 0.0,
        "backward": 0.0,
    }  # seconds of the current step in the library and the driver
    target = type(model.forward.session.target)

    def timed(name: str) -> None:
        run = getattr(target, name)

        def measured(*arguments):
            started = time.perf_counter()
            run(*arguments)
            inside[name] += time.perf_counter() - started

        setattr(target, name, measured)

    for name_of_run in inside:
        timed(name_of_run)

    def step() -> None:
        model.zero_grad()
        wait()
        inside.update(forward=0.0, backward=0.0)
        at = [time.perf_counter()]
        made = loss(model)
        at.append(time.perf_counter())
        wait()
        at.append(time.perf_counter())
        made.backward()
        at.append(time.perf_counter())
        wait()
        each = at[1] - at[0], at[3] - at[2]
        times.append((*each, sum(each), inside["forward"], inside["backward"]))

    for _ in range(10):
        step()
    times.clear()
    for _ in range(options.steps):
        step()
    forward, backward, both, enqueued, enqueued_back = (
        statistics.median(each) * 1e3 for each in zip(*times)
    )
    counts = [
        prepared.part_count
        for entries in model.forward._states[0].entries.values()
        for entry in entries
        for variant in entry.program._variants.values()
        for prepared in variant._prepared.values()
        if variant.wrt
    ]
    print(
        f"{name:8} forward {forward:.3f} ms ({enqueued:.3f} in the engine and the driver), "
        f"backward {backward:.3f} ms ({enqueued_back:.3f}), both {both:.3f} ms; "
        f"{len(list(model.parameters()))} parameters, parts {counts}"
    )
    if options.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.enable()
        for _ in range(100):
            step()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["blocks", "gpt2"])
    parser.add_argument("--fake", type=pathlib.Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if options.fake is not None:
        use_fake_driver(options.fake.resolve())
    import torch

    torch.set_num_threads(1)
    for name in options.models:
        measure(name, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
