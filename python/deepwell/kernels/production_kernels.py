"""Linear layers with an activation: by a kernel that fuses both, where there is one, else by PyTorch.

manager = ProductionKernelManager()
out = manager.gemm(a, b, bias, activation="gelu")   # gelu(a @ b + bias)
manager.last_kernel                                  # what computed it
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from deepwell.kernels import gemm as _gemm
from deepwell.kernels.cutlass_bindings import CutlassConfig

__all__ = ["ProductionKernelManager"]


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


_ACTIVATIONS = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "swiglu": _swiglu,
}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _kernel_gemm(a, b, bias, activation, device) -> torch.Tensor | str:
    """Returns activation(a b + bias) of matrices by Deepwell's kernel, or the reason why it cannot."""
    if a.dtype not in _NAMES or b.dtype != a.dtype or (bias is not None and bias.dtype != a.dtype):
        others = "" if bias is None else f", the bias {bias.dtype}"
        return f"a is {a.dtype} and b {b.dtype}{others}: the kernel multiplies BF16 or FP16"
    name = _NAMES[a.dtype]
    return _gemm.launch(
        device,
        _gemm.operand(a, name, "a"),
        _gemm.operand(b.t(), name, "b"),
        a.dtype,
        bias=None if bias is None else bias.detach(),
        activation=activation,
    )


class _Fused(torch.autograd.Function):
    """Forward: a result that a kernel has computed already. Backward: PyTorch's GEMMs; what the activation needs is
    computed again, in FP32."""

    @staticmethod
    def forward(ctx, a, b, bias, activation, made):
        ctx.save_for_backward(a, b, bias)
        ctx.activation = activation
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, bias = ctx.saved_tensors
        wants_a, wants_b, wants_bias = ctx.needs_input_grad[:3]
        if ctx.activation is not None:
            with torch.enable_grad():
                x = _sums(a, b)
                x = (x if bias is None else x + bias.float()).detach().requires_grad_()
                (grad,) = torch.autograd.grad(_ACTIVATIONS[ctx.activation](x), x, grad.float())
            grad = grad.to(a.dtype)
        return (
            grad @ b.t() if wants_a else None,
            a.t() @ grad if wants_b else None,
            grad.sum(0) if bias is not None and wants_bias else None,
            None,
            None,
        )


def _sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a b in FP32."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class ProductionKernelManager:
    """Chooses what computes a GEMM with bias and activation.

    ``config.use_tcgen05`` False: never a kernel for Blackwell's tensor cores. ``device``: "cuda", or an emulated GPU
    such as "emulator:sm_100a" for tensors on the CPU; None: the GPU of the operands. After a call ``last_kernel`` names
    what computed it, and ``reason`` why no kernel did (None if one did).
    """

    def __init__(self, config: CutlassConfig | None = None, *, device: str | None = None) -> None:
        self.config = config or CutlassConfig()
        self.device = device
        self.last_kernel: str | None = None
        self.reason: str | None = None

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """Returns activation(a b + bias) of a [..., k] and b [k, n], differentiable in all three.

        `activation`: None, "gelu" (erf), "gelu_tanh", "silu", "relu" or "swiglu". For swiglu b is [k, 2 n] and the bias
        [2 n], the gate's n columns first; the result is silu(gate) * up, [..., n].
        """
        if activation not in _ACTIVATIONS:
            names = ", ".join(str(x) for x in _ACTIVATIONS)
            raise ValueError(f"activation is {activation!r}: expected one of {names}")
        if a.dim() < 1 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
            raise ValueError(
                f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}: expected [..., k] and [k, n]"
            )
        if bias is not None and tuple(bias.shape) != (b.shape[1],):
            raise ValueError(f"bias has shape {tuple(bias.shape)}: expected ({b.shape[1]},)")
        if activation == "swiglu" and b.shape[1] % 2:
            raise ValueError(f"b has {b.shape[1]} columns: swiglu needs an even number")
        made = self._by_kernel(a, b, bias, activation)
        return self._by_torch(a, b, bias, activation) if made is None else made

    def _by_kernel(self, a, b, bias, activation) -> torch.Tensor | None:
        device = self.device or ("cuda" if a.device.type == "cuda" else None)
        if device is None:
            self.reason = "the operands are on the CPU"
        elif not self.config.use_tcgen05:
            self.reason = "use_tcgen05 is False"
        elif 0 in (a.numel(), b.numel()):
            self.reason = "the GEMM is empty"
        else:
            fused = activation if activation in _gemm.ACTIVATIONS else None
            rows = a.reshape(-1, a.shape[-1])
            made = _kernel_gemm(rows.detach(), b.detach(), bias, fused, device)
            if isinstance(made, torch.Tensor):
                out = _Fused.apply(rows, b, bias, fused, made)
                parts = (
                    ["a b"] + (["bias"] if bias is not None else []) + ([fused] if fused else [])
                )
                self.last_kernel = f"kernel sm100_gemm ({', '.join(parts)}) on {device}"
                if fused != activation:
                    out = _ACTIVATIONS[activation](out)
                    self.last_kernel += f", then PyTorch's {activation}"
                self.reason = None
                return out.reshape(*a.shape[:-1], out.shape[-1])
            self.reason = made
        return None

    def _by_torch(self, a, b, bias, activation) -> torch.Tensor:
        out = F.linear(a, b.t(), bias)
        self.last_kernel = "torch.nn.functional.linear"
        if activation is not None:
            self.last_kernel += f", then PyTorch's {activation}"
        return _ACTIVATIONS[activation](out)
