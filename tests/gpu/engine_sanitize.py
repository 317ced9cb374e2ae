"""Training steps of small models in the engine, to be run under compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python3 tests/gpu/engine_sanitize.py [FAMILY ...]

With PyTorch's pool of memory off, each tensor is an allocation of its own, so that an access outside of one is seen.
Sizes are odd, so that rows are not aligned. Exits with status 1 if PyTorch ran a model instead of the engine, or if a
loss is not finite.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ["DEEPWELL_MEASURE"] = "0"
sys.path[:0] = [
    str(Path(__file__).parents[1] / "python"),
    str(Path(__file__).parents[2] / "python"),
]

import deepwell  # noqa: E402
import torch  # noqa: E402
import zoo  # noqa: E402
import zoo_families  # noqa: E402
from users import engine_calls  # noqa: E402

FAMILIES = ["gpt2", "llama", "t5", "bert", "vit", "gemma2", "mistral"]


def built(family: str) -> tuple[torch.nn.Module, dict]:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    if family in ("gpt2", "llama"):
        arguments = zoo.language_model_arguments(199)(3, 37, generator)
        return getattr(zoo, family)(vocab_size=199), arguments[1]
    variant = next(v for v in zoo_families.VARIANTS if (v.family, v.name) == (family, "plain"))
    return variant.build(), variant.arguments(3, 37, generator)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--target", default="auto")
    options = parser.parse_args()
    failed = 0
    for family in options.families:
        model, call = built(family)
        model = model.to(options.device, torch.bfloat16).train()
        call = {
            n: v.to(options.device, torch.bfloat16 if v.is_floating_point() else None)
            for n, v in call.items()
            if v is not None
        }
        deepwell.optimize(model, target=options.target, verbose=False)
        optimizer = deepwell.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(2):
            loss = model(**call).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        ok = engine_calls(model) == (2, 0) and all(map(torch.isfinite, torch.tensor(losses)))
        failed += not ok
        print(f"{family}: losses {losses} {'ok' if ok else deepwell.summary(model)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
