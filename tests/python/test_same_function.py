"""Every model of the zoo computes the same outputs and gradients with Deepwell as without."""

import copy

import deepwell
import pytest
import torch
from compare import assert_same_function, tensors_of
from users import engine_calls
from zoo import CASES, Case


def modes(*quick: str) -> list:
    """Lists every case; cases that are not named are slow."""
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in quick else pytest.mark.slow)
        for case in CASES
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_function(case: Case, always) -> None:
    same_function(case, case.build(), case.sizes)


# Evaluation with gradients differs from training only in the flag, and from test_inference only in
# the gradients.
@pytest.mark.parametrize("case", modes("gpt2-padded", "llama", "encoder-pre-gelu", "mha-weights"))
def test_same_function_in_evaluation(case: Case, always) -> None:
    same_function(case, case.build().eval(), case.sizes[:2])


def same_function(case: Case, plain: torch.nn.Module, sizes) -> None:
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    generator = torch.Generator().manual_seed(1)
    for batch, length in sizes:
        args, kwargs = case.arguments(batch, length, generator)
        assert_same_function(plain, ours, args, kwargs)
    calls, fallbacks = engine_calls(ours)
    assert calls == len(sizes) and fallbacks == 0, deepwell.summary(ours)


# A batch of one needs its own capture; test_same_function has it for each case. All kinds of rotary
# embeddings are outputs of the same operations with and without gradients, so one kind is enough
# here.
@pytest.mark.parametrize(
    "case",
    modes(*(c.name for c in CASES if "rope" not in c.name or c.name == "llama-rope-dynamic")),
)
def test_inference(case: Case, always) -> None:
    plain = case.build().eval()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    generator = torch.Generator().manual_seed(2)
    for batch, length in case.sizes[:2]:
        args, kwargs = case.arguments(batch, length, generator)
        with torch.no_grad():
            expected, found = plain(*args, **kwargs), ours(*args, **kwargs)
        assert type(found) is type(expected)
        for a, b in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert not a.requires_grad
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norms_of_huge_rows(norm, always):
    """Rows that F32 cannot normalize give 0 or NaN where PyTorch does, forward and backward."""
    width, spread = 96, torch.rand(5, 96, generator=torch.Generator().manual_seed(2)) + 0.5
    x = spread * torch.tensor([1e-3, 1e15, 1e25, 1e30, 1.0])[:, None]
    x[1] *= torch.where(torch.arange(width) % 2 == 0, 1.0, -1.0)
    plain = norm(width)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    results = []
    for model in (plain, ours):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(torch.ones_like(y))
        results.append((y, leaf.grad, model.weight.grad))
    for theirs, made in zip(*results):
        assert torch.equal(theirs.isnan(), made.isnan())
    assert engine_calls(ours)[0] > 0
    assert results[0][0][2:4].isnan().any() == (norm is torch.nn.LayerNorm)
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5, equal_nan=True)
