"""Every family of docs/models.md computes the same function, and its graph is made of
composites."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import deepwell
import pytest
import torch
from compare import assert_same_function, tensors_of
from deepwell import _deepwell
from deepwell.targets import Target
from users import engine_calls
from zoo_families import BY_FAMILY, FAMILIES, VARIANTS, Variant, available, document

PLAIN = [variant for variant in VARIANTS if variant.name == "plain"]


def _named(variant: Variant) -> str:
    return f"{variant.family}, {variant.name}"


def _parameter(variant: Variant, *, quick: bool):
    marks = [] if quick else [pytest.mark.slow]
    if not available(BY_FAMILY[variant.family]):
        marks.append(pytest.mark.skip(f"this transformers has no {variant.family}"))
    return pytest.param(variant, id=_named(variant), marks=marks)


def recognised(model: torch.nn.Module) -> list[dict]:
    """Counts composites in the first graph of an optimized model, as the engine has them before gradients."""
    (entries, *_) = model.forward._states[0].entries.values()
    graph = _deepwell.Graph(entries[0]._captured.json)
    for name in ("fold", "recognize", "fold", "common", "dead_code"):
        graph.run_pass(name)
    return json.loads(graph.json())["nodes"]


@pytest.mark.parametrize("variant", [_parameter(v, quick=v.name == "plain") for v in VARIANTS])
def test_training(variant: Variant, always) -> None:
    """Compares outputs and every gradient, in training mode, at several sizes, with one engine for
    the whole model."""
    plain = variant.build().train()
    sizes = variant.sizes[:2] if variant.name == "plain" else variant.sizes
    ours = same_function(variant, plain, sizes)
    assert f"[model] {type(plain).__name__} -> engine" in deepwell.summary(ours)
    family = BY_FAMILY[variant.family]
    nodes = recognised(ours)
    found = Counter(node["op"] for node in nodes)
    assert found["attention"] == family.composites["attention"] and not found["softmax"]
    if variant.name != "plain":
        return
    assert {op: found[op] for op in family.composites} == family.composites
    for node, expected in zip((n for n in nodes if n["op"] == "attention"), family.attention):
        attributes = {"mask": node["inputs"][3] is not None, **node["attrs"]}
        assert {name: attributes.get(name) for name in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", [_parameter(v, quick=False) for v in PLAIN if v.sizes[2:]])
def test_a_batch_of_one(variant: Variant, always) -> None:
    """A capture fixes sizes of one, so they need another capture. test_same_function.py has some
    models of it."""
    same_function(variant, variant.build().train(), variant.sizes[2:])


def same_function(variant: Variant, plain: torch.nn.Module, sizes) -> torch.nn.Module:
    """Compares `plain` with an optimized copy, which it returns."""
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    generator = torch.Generator().manual_seed(1)
    for batch, length in sizes:
        args, kwargs = variant.arguments(batch, length, generator)
        assert_same_function(plain, ours, args, kwargs)
    assert engine_calls(ours) == (len(sizes), 0), deepwell.summary(ours)
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("variant", [_parameter(v, quick=False) for v in PLAIN])
def test_evaluation(variant: Variant, always) -> None:
    """The same in eval mode, with gradients and without."""
    plain = variant.build().eval()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    generator = torch.Generator().manual_seed(1)
    for batch, length in variant.sizes:
        args, kwargs = variant.arguments(batch, length, generator)
        assert_same_function(plain, ours, args, kwargs)
        with torch.no_grad():
            expected, found = plain(*args, **kwargs), ours(*args, **kwargs)
        for a, b in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert not a.requires_grad
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert engine_calls(ours) == (2 * len(variant.sizes), 0), deepwell.summary(ours)


_QUICK_TRAININGS = ("mistral", "bert")


@pytest.mark.parametrize(
    "variant", [_parameter(v, quick=v.family in _QUICK_TRAININGS) for v in PLAIN]
)
def test_losses_over_30_steps(variant: Variant, always) -> None:
    """Losses follow PyTorch's over 30 steps of AdamW on four batches that can be learned by heart. Some gradients, of
    keys' biases for one, are zero but for rounding errors, which AdamW's usual eps would turn into whole steps: OPT's
    losses in FP32 and FP64 part by 2e-3 with 1e-8, all families' by 4e-6 at most with 1e-5."""
    models = [variant.build().train()]
    models.append(deepwell.optimize(copy.deepcopy(models[0]), verbose=False))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5) for model in models]
    generator = torch.Generator().manual_seed(3)
    batches = [variant.arguments(4, 12, generator) for _ in range(2)]
    losses = []
    for step in range(30):
        args, kwargs = batches[step % len(batches)]
        pair = []
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            loss = model(*args, **kwargs).loss
            loss.backward()
            optimizer.step()
            pair.append(loss.item())
        losses.append(pair)
    first, last = losses[0][0], losses[-1][0]
    assert last < 0.9 * first, "the model did not learn, so the comparison would mean little"
    worst = max(abs(a - b) for a, b in losses)
    assert worst <= 1e-4, f"losses part by {worst}"
    assert engine_calls(models[1]) == (30, 0), deepwell.summary(models[1])


_QUICK_IN_BF16 = ("gpt2", "llama", "qwen3", "bert", "t5")


def _cast(values, dtype: torch.dtype):
    return [v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for v in values]


@pytest.mark.parametrize(
    "variant", [_parameter(v, quick=v.family in _QUICK_IN_BF16) for v in PLAIN]
)
@pytest.mark.parametrize("autocast", [False, True], ids=["parameters", "autocast"])
def test_bf16_is_as_exact_as_in_pytorch(variant: Variant, autocast: bool, always) -> None:
    """With parameters in BF16, or under autocast, the logits and all gradients together are no further from FP64 than
    1.1 times PyTorch's. Roundings of the two differ, so that a single small gradient may be off by more in either."""
    base = variant.build().eval()  # without dropout, which would draw other masks in FP64
    args, kwargs = variant.arguments(3, 13, torch.Generator().manual_seed(1))

    def results(model: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        values = dict(zip(kwargs, _cast(kwargs.values(), dtype)))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            output = model(*_cast(args, dtype), **values)
        output.loss.backward()
        gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        return [output.logits.double(), torch.cat(gradients)]

    exact = results(copy.deepcopy(base).double(), torch.float64)
    low = torch.float32 if autocast else torch.bfloat16
    theirs = results(copy.deepcopy(base).to(low), low)
    model = deepwell.optimize(copy.deepcopy(base).to(low), verbose=False)
    ours = results(model, low)
    assert engine_calls(model) == (1, 0), deepwell.summary(model)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).norm() <= 1.1 * (b - c).norm()


# Dropout sites: embeddings, and in each of two layers attention's weights and two results. T5 has
# them after its embeddings and final norms and inside its feed-forward layers, in encoder and
# decoder.
_DROPOUT = {
    "bert": (dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3), 5, 2),
    "opt": (dict(dropout=0.2, attention_dropout=0.3), 4, 2),
    "t5": (dict(dropout_rate=0.2), 18, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", _DROPOUT)
def test_dropout(family: str, implementation: str, always, monkeypatch) -> None:
    """With dropout, outputs and gradients are those of the captured graph evaluated in PyTorch, which draws
    the same masks from the same seed; and there are as many sites as the model has."""
    from test_capture import run

    if not available(BY_FAMILY[family]):
        pytest.skip(f"this transformers has no {family}")
    changes, sites, attentions = _DROPOUT[family]
    variant = next(v for v in PLAIN if v.family == family)
    model = Variant(family, "", {**changes, "attn_implementation": implementation}).build().train()
    deepwell.optimize(model, verbose=False)
    monkeypatch.setattr(Target, "fresh_seed", lambda self: torch.tensor([17, 4]))
    args, kwargs = variant.arguments(3, 13, torch.Generator().manual_seed(1))
    found = model(*args, **kwargs).loss
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(found, parameters.values())
    (entries,) = model.forward._states[0].entries.values()
    expected = run(entries[0]._captured, model, args, kwargs, (17, 4)).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, ours, reference in zip(
        parameters, gradients, torch.autograd.grad(expected, parameters.values())
    ):
        error = (ours - reference).norm()
        assert error <= 1e-4 * max(reference.norm(), 1e-3), f"{name}: {error}"
    nodes = recognised(model)
    assert sum(node["op"] == "dropout" for node in nodes) == sites
    dropped = [n for n in nodes if n["op"] == "attention" and n["attrs"].get("p", 0) > 0]
    assert len(dropped) == attentions


@pytest.mark.slow
def test_relative_position_bias_gets_gradients(always) -> None:
    """T5's bias is an operand of attention and receives its gradient, from every layer that adds it."""
    if not available(BY_FAMILY["t5"]):
        pytest.skip("this transformers has no T5")
    variant = next(v for v in PLAIN if v.family == "t5")
    model = deepwell.optimize(variant.build().train(), verbose=False)
    args, kwargs = variant.arguments(2, 11, torch.Generator().manual_seed(1))
    model(*args, **kwargs).loss.backward()
    names = [n for n, _ in model.named_parameters() if "relative_attention_bias" in n]
    assert len(names) == 2
    for name in names:
        gradient = model.get_parameter(name).grad
        assert gradient is not None and gradient.abs().max() > 0
    assert engine_calls(model) == (1, 0)


def test_document_agrees_with_the_tests() -> None:
    """docs/models.md holds the table of the variants above (python tests/python/zoo_families.py)."""
    path = Path(__file__).parents[2] / "docs" / "models.md"
    assert document() in path.read_text()
    assert {variant.family for variant in VARIANTS} == {family.name for family in FAMILIES}
