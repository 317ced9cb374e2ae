"""Every family of docs/models.md on a Hopper GPU: as exact as PyTorch in the same precision, against FP64. The same is
tested on a CPU by tests/python/test_families.py."""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path

import deepwell
import pytest
import torch
from users import engine_calls
from zoo_families import BY_FAMILY, available

sys.path.append(str(Path(__file__).parents[2] / "bench"))

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")

PRECISIONS = {
    "float32": (torch.float32, False),
    "tf32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "f16": (torch.float16, False),
    "autocast": (torch.float32, True),
}


@pytest.fixture(autouse=True)
def _the_engine_runs(monkeypatch):
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def built(family: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a model and a call: large enough that an error over a whole gradient hardly depends on chance."""
    if family in BY_FAMILY:
        import families

        model, call = families.build(family, None)
        if family in ("vit", "bert-classes"):
            model.config.problem_type = (
                "single_label_classification"  # otherwise the first call sets it
            )
        return model, call
    import zoo

    torch.manual_seed(0)
    if family == "gpt2":
        model = zoo.gpt2(n_embd=384, n_head=6, vocab_size=2048)
    else:
        model = zoo.llama(
            hidden_size=384, intermediate_size=1024, num_attention_heads=6, vocab_size=2048
        )
    ids = torch.randint(1, 2048, (4, 128), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids.clone()}


# In FP32 and TF32 the order of sums and the algorithms decide, which cuBLAS and cuBLASLt choose apart.
MOST = {"float32": 1.2, "tf32": 1.2}
RELU = ("opt", "t5")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama", *BY_FAMILY])
def test_as_exact_as_pytorch(family, precision, monkeypatch) -> None:
    """Logits, and the gradients of each parameter, are no further from FP64 than 1.1 times PyTorch's in 16 bits, 1.2
    times in FP32. A gradient of few elements is off by chance more or less: with n elements of independent errors the
    ratio of two norms varies by about 1 / sqrt(n), of which four are allowed."""
    if family in BY_FAMILY and not available(BY_FAMILY[family]):
        pytest.skip(f"this transformers has no {family}")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", precision == "tf32")
    dtype, autocast = PRECISIONS[precision]
    scale = (
        2.0**12 if precision == "f16" else 1.0
    )  # as GradScaler does: otherwise gradients underflow
    base, call = built(family)
    base = base.cuda().eval()  # without dropout, whose masks PyTorch draws otherwise

    def results(model: torch.nn.Module, of: torch.dtype) -> dict[str, torch.Tensor]:
        moved = {n: v.to("cuda", of if v.is_floating_point() else None) for n, v in call.items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast and of == torch.float32):
            output = model(**moved)
        (output.loss * scale).backward()
        found = {
            name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None
        }
        return {"logits": output.logits.detach().double(), **found}

    exact = results(copy.deepcopy(base).double(), torch.float64)
    theirs = results(copy.deepcopy(base).to(dtype), dtype)
    model = deepwell.optimize(copy.deepcopy(base).to(dtype), verbose=False)
    ours = results(model, dtype)
    assert engine_calls(model) == (1, 0), deepwell.summary(model)
    assert ours.keys() == exact.keys()

    def error(found: dict[str, torch.Tensor], names) -> float:
        return sum((found[n] - exact[n]).norm() ** 2 for n in names).item() ** 0.5

    gradients = [name for name in exact if name != "logits"]
    size = sum(exact[n].norm() ** 2 for n in gradients).item() ** 0.5
    relative = error(theirs, gradients) / size
    # A hundredth of what all gradients are off by counts for one that is nearly 0, as that of a bias before a norm is.
    least = relative * 1e-2
    if family in RELU and precision == "float32":
        # Where a ReLU's argument is 0 up to rounding, one gradient passes it and the other does not. One argument of a
        # million does, and is a thousandth of the gradient's norm.
        least = 1e-3
    ratios, most = {}, {}
    for name in [*exact, "all"]:
        names = gradients if name == "all" else [name]
        count = sum(exact[n].numel() for n in names)
        floor = 0.0 if name == "logits" else least * size
        ratios[name] = error(ours, names) / max(error(theirs, names), floor)
        most[name] = MOST.get(precision, 1.1) * (1 + 4 / count**0.5)
    worst = max(ratios, key=lambda name: ratios[name] / most[name])
    print(
        f"{family} {precision}: logits {ratios['logits']:.3f}, all gradients {ratios['all']:.3f}, worst"
        f" {ratios[worst]:.3f} {worst} of {len(exact)} (at most {most[worst]:.3f}); PyTorch's gradients are off by"
        f" {relative:.2e}"
    )
    assert ratios[worst] <= most[worst]
