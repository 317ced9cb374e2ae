"""Linear layers through Deepwell's GEMMs for Blackwell, if a target names them.

These kernels have been tested on the emulator but not on hardware. ``optimize`` with ``target="auto"`` never installs
them. The first use of each kernel on a GPU compares it with a GEMM accumulated in double. If it disagrees, or does not
support a call, PyTorch's own GEMM runs. Gradients use PyTorch's GEMMs.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from typing import Any

import torch

from deepwell import _deepwell
from deepwell.attention.instance import InstanceForward
from deepwell.kernels.gemm import launch, operand
from deepwell.targets import BLACKWELL

UNPROVEN = "proven on the emulator, not run on hardware"
TARGETS = BLACKWELL
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# Reasons why PyTorch's GEMM ran, with their counts, in this process.
fallbacks: Counter[str] = Counter()
_told: set[str] = set()


def kernels() -> list[dict[str, str]]:
    """Returns Deepwell's GPU kernels: what each supports, where it has been shown to be right, when it is used."""
    return json.loads(_deepwell.gpu_kernels())


def why_not(module: torch.nn.Linear, device: str) -> str | None:
    """Returns why the kernel cannot run any call of ``module``, or None."""
    if module.in_features % 8 or module.out_features % 8:
        return (
            f"it is {module.out_features} x {module.in_features}: rows must be multiples of 16 "
            "bytes, which is 8 elements"
        )
    if device != "cuda" and module.weight.device.type != "cpu":
        return f"its weight is on {module.weight.device}, and {device} is for a model on the CPU"
    return None


def gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, device: str
) -> torch.Tensor | str:
    """Returns x weight^T + bias of matrices, computed by the kernel, or the reason why it cannot."""
    k, n = weight.shape[1], weight.shape[0]
    if x.dtype not in _NAMES:
        return f"the input is {x.dtype}"
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return f"the input is {x.dtype} and the weight {weight.dtype}"
    rows = launch(
        device,
        operand(x.reshape(-1, k), _NAMES[x.dtype]),
        operand(weight, _NAMES[x.dtype]),
        x.dtype,
        bias=bias,
    )
    return rows if isinstance(rows, str) else rows.reshape(*x.shape[:-1], n)


class _Gemm(torch.autograd.Function):
    """Forward by the kernel, or by PyTorch if the kernel does not support the call."""

    @staticmethod
    def forward(ctx, x, weight, bias, device):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        made = gemm(x, weight, bias, device) if x.numel() else None
        if isinstance(made, str):
            _fall_back(made)
            made = None
        return torch.nn.functional.linear(x, weight, bias) if made is None else made

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ weight if wants_x else None
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if wants_weight else None
        grad_bias = rows.sum(0) if ctx.has_bias and wants_bias else None
        return grad_x, grad_weight, grad_bias, None


def _fall_back(reason: str) -> None:
    fallbacks[reason] += 1
    if reason not in _told:
        _told.add(reason)
        warnings.warn(f"a linear layer runs in PyTorch: {reason}", RuntimeWarning, stacklevel=2)


class LinearForward(InstanceForward):
    """The forward of one nn.Linear."""

    device = "cuda"

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self._module()
        x, weight, bias = input, module.weight, module.bias
        if torch.is_autocast_enabled(x.device.type):  # casts as autocast does for F.linear
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return _Gemm.apply(x, weight, bias, self.device)


class EmulatedForward(LinearForward):
    """Runs on an emulated GPU, which has its own memory: operands are copied there and back."""

    device = "emulator:sm_100a"


class EmulatedForward103(LinearForward):
    device = "emulator:sm_103a"


_FORWARDS: dict[str, Any] = {
    "cuda": LinearForward,
    "emulator:sm_100a": EmulatedForward,
    "emulator:sm_103a": EmulatedForward103,
}


def install(root: torch.nn.Module, device: str) -> tuple[dict[str, str], dict[str, str]]:
    """Gives every nn.Linear of ``root`` a forward for ``device``. Returns the replaced layers and the layers left
    alone, each with the reason."""
    replaced: dict[str, str] = {}
    left: dict[str, str] = {}
    for path, module in root.named_modules():
        if type(module) is not torch.nn.Linear:
            continue
        reason = (
            "its forward has been replaced already"
            if "forward" in module.__dict__
            else why_not(module, device)
        )
        if reason:
            left[path] = f"Linear: {reason}"
            continue
        module.__dict__["forward"] = _FORWARDS[device](module)
        replaced[path] = f"Linear -> GEMM on Blackwell, {UNPROVEN}"
    return replaced, left
