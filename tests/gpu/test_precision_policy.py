"""Precision policies on a Hopper GPU, which simulates the formats, against the rules of tests/python/test_precision.py.
With DEEPWELL_TEST_DEVICE=cpu they run on an emulated GPU, slowly."""

from __future__ import annotations

import deepwell
import pytest
import torch
from test_precision import RECIPES, check_typed
from test_support import DEVICE, TARGET, pytestmark  # noqa: F401


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer(recipe, dtype):
    """Tensor cores truncate sums, as in test_precision.test_an_emulated_gpu."""
    torch.manual_seed(0)
    model = torch.nn.Linear(72, 40).to(DEVICE, dtype)
    deepwell.optimize(model, precision=recipe, target=TARGET, verbose=False)
    for rows in (1, 41):
        model.zero_grad()
        x = torch.randn(rows, 72, dtype=dtype, device=DEVICE).requires_grad_()
        dy = torch.randn(rows, 40, dtype=dtype, device=DEVICE)
        check_typed(model, model, recipe, dtype, x, dy, sums=4.0)
    text = deepwell.summary(model)
    assert "2 calls by the engine, 0 by PyTorch" in text
    told = {"bf16": "", "fp8": "FP8 codes are multiplied"}
    assert told.get(recipe, f"{recipe.upper()} simulated in BF16") in text


def test_a_model_that_is_moved_keeps_its_policy():
    model = torch.nn.Sequential(torch.nn.Linear(72, 40), torch.nn.GELU(), torch.nn.Linear(40, 8))
    x = torch.randn(5, 72)
    policy = deepwell.PrecisionPolicy("mxfp8", layers={"2": "fp8"})
    deepwell.optimize(model, precision=policy, verbose=False)
    with torch.no_grad():
        here = model(x)
        there = model.to(DEVICE)(x.to(DEVICE)).cpu()
    # A code that differs, because sums before it do, moves a result by 2^-3 of one of 40 products.
    torch.testing.assert_close(there, here, rtol=0.02, atol=0.02 * float(here.abs().max()))
    assert "2 calls by the engine, 0 by PyTorch" in deepwell.summary(model)
