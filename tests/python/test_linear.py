"""Linear layers with Blackwell's GEMMs on an emulated GPU: the path from PyTorch to the kernel, its marking,
and fallbacks. No real GPU of that kind was available.
"""

import copy
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import deepwell
import pytest
import torch
from deepwell import linear
from deepwell.errors import UnsupportedError

TARGET = "emulator:sm_100a"
ROOT = Path(__file__).parents[2]


def _has_kernels() -> bool:
    """Returns whether the library carries PTX for the emulator, or a compiler is installed."""
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    return isinstance(linear.gemm(x, x, None, TARGET), torch.Tensor)


needs_kernels = pytest.mark.skipif(not _has_kernels(), reason="no compiler made PTX of sm_100f")


def model_of(dtype=torch.bfloat16, width=72):
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, 8, bias=False)
    ).to(dtype)


def bound(x, weight, bias, made):
    """Returns the bound of |made - x W^T - b|: F32 sums of k products, then BF16's rounding."""
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    error = (x.shape[-1] + 2) * 2**-23 * size
    return (made.double() - exact).abs() - error - (exact.abs() + error) * (2**-8 + 2**-23)


@needs_kernels
def test_linear_layers_are_right():
    generator = torch.Generator().manual_seed(3)
    for rows, n, k, with_bias in [(1, 8, 8, True), (37, 136, 200, False), (130, 72, 64, True)]:
        x = torch.randn(rows, k, generator=generator).bfloat16()
        weight = torch.randn(n, k, generator=generator).bfloat16()
        bias = torch.randn(n, generator=generator).bfloat16() if with_bias else None
        made = linear.gemm(x, weight, bias, TARGET)
        assert bound(x, weight, bias, made).max() <= 0


@needs_kernels
def test_optimize_and_restore(capsys):
    model, plain = model_of(), model_of()
    names = list(model.state_dict())
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert deepwell.optimize(model, target=TARGET) is model
    printed = capsys.readouterr().out
    assert printed.count(linear.UNPROVEN) >= 2 and "Linear layers: 2" in printed
    before = linear.fallbacks.total()
    out, expected = model(x), plain(x)
    assert linear.fallbacks.total() == before
    first = model[0](x)
    assert (
        bound(x.reshape(15, 64), model[0].weight, model[0].bias, first.reshape(15, 72)).max() <= 0
    )
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        # Outputs differ by BF16's rounding, and so do gradients, which have another size.
        off = (ours.grad.float() - theirs.grad.float()).norm() / theirs.grad.float().norm()
        assert off < 4 * 2**-8, name
    assert list(model.state_dict()) == names
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), out)
    deepwell.restore(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert torch.equal(model(x), expected)
    assert linear.UNPROVEN not in deepwell.summary(model)


@needs_kernels
def test_autocast():
    """As in PyTorch, operands have autocast's dtype and gradients the parameters' dtype."""
    model = deepwell.optimize(model_of(torch.float32), target=TARGET, verbose=False)
    x = torch.randn(9, 64, requires_grad=True)
    before = linear.fallbacks.total()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16 and linear.fallbacks.total() == before
    out.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32 and x.grad.dtype == torch.float32


def test_falls_back_and_says_so():
    model, plain = model_of(torch.float32), model_of(torch.float32)
    deepwell.optimize(model, target=TARGET, verbose=False)
    x = torch.randn(4, 64)
    linear._told.clear()
    with pytest.warns(
        RuntimeWarning, match="a linear layer runs in PyTorch: the input is torch.float32"
    ):
        out = model(x)
    assert torch.equal(out, plain(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # logged once
        model(x)
    assert "PyTorch's linear layer" in deepwell.summary(model)
    empty = model_of()
    deepwell.optimize(empty, target=TARGET, verbose=False)
    assert empty(torch.zeros(0, 64, dtype=torch.bfloat16)).shape == (0, 8)


def test_unsupported_rows_fall_back(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(8, 8)).bfloat16()
    deepwell.optimize(model, target=TARGET)
    printed = capsys.readouterr().out
    assert "[0] left alone: Linear: it is 8 x 12: rows must be multiples of 16 bytes" in printed
    assert "Linear layers: 1" in printed


def test_blackwell_kernels_run_only_on_request(capsys):
    model = model_of()
    deepwell.optimize(model)
    assert linear.UNPROVEN not in capsys.readouterr().out
    assert not any(
        isinstance(m.__dict__.get("forward"), linear.LinearForward) for m in model.modules()
    )
    deepwell.restore(model)


def test_targets():
    with pytest.raises(UnsupportedError, match="target='sm_100a' is for a model on a GPU"):
        deepwell.optimize(model_of(), target="sm_100a")
    with pytest.raises(UnsupportedError, match="target='sm_120a' is for a model on a GPU"):
        deepwell.optimize(model_of(), target="sm_120a")
    with pytest.raises(UnsupportedError, match="target='sm_103a' is for a model on a GPU"):
        deepwell.optimize(model_of(), target="sm_103a", precision="mxfp8")
    with pytest.raises(UnsupportedError, match="'emulator:sm_103a'"):
        deepwell.optimize(model_of(), target="sm_80")


WITHOUT_COMPILER = """
import warnings, torch
import deepwell
model = torch.nn.Linear(64, 64).half()
deepwell.optimize(model, target="emulator:sm_100a", verbose=False)
x = torch.randn(4, 64).half()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    outs = [model(x), model(x)]
expected = torch.nn.functional.linear(x, model.weight, model.bias)
assert all(torch.equal(out, expected) for out in outs), "not PyTorch's"
assert len(told) == 1, told
print(told[0].message)
"""


def test_missing_kernel_falls_back(tmp_path):
    """A kernel that the library lacks, without a compiler: PyTorch's GEMM runs, and the log reports it once."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", "HOME": str(tmp_path), "DEEPWELL_NVRTC": str(tmp_path / "none.so")},
    )
    assert run.returncode == 0, run.stderr
    assert "a linear layer runs in PyTorch: GEMM (m 4, n 64, k 64, f16, bias)" in run.stdout


def test_documents_mark_emulator_proof():
    """Every document that mentions these kernels states that only the emulator has run them."""
    for page in (
        "README.md",
        "docs/blackwell.md",
        "docs/optimize.md",
        "docs/support.md",
        "docs/cuda.md",
    ):
        text = (ROOT / page).read_text().lower().replace("\n", " ")
        assert linear.UNPROVEN in text, page
    rows = linear.kernels()
    assert any(row["proof"] == linear.UNPROVEN for row in rows)
    text = (ROOT / "docs/blackwell.md").read_text()
    for row in rows:
        if row["name"].startswith("cublaslt"):
            assert "NVIDIA's library" in row["proof"]
        elif not row["name"].startswith("sm90_"):
            assert f"`{row['name']}`" in text, row
            # For operations that Hopper supports too, Blackwell's form comes last.
            shown = row["proof"].rpartition("on sm_100f and sm_120a ")[2]
            assert shown == linear.UNPROVEN, row
    assert json.dumps(rows)
