"""Optimizers that run in one pass over all parameters."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import torch
from torch.optim.adamw import adamw as torch_adamw

from deepwell import _deepwell


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), one C call for all parameters.

    Drop-in for ``torch.optim.AdamW``: same arguments, same defaults, same ``state_dict`` (either loads
    what the other saved), the same arithmetic per element. float32 CPU parameters with dense gradients
    are updated by Deepwell; any other parameter is updated by PyTorch's own function.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        if not 0.0 <= float(lr):
            raise ValueError(f"lr is {lr}; it must be 0 or more")
        if not 0.0 <= eps:
            raise ValueError(f"eps is {eps}; it must be 0 or more")
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError(f"betas are {betas}; each must be in [0, 1)")
        if not 0.0 <= weight_decay:
            raise ValueError(f"weight_decay is {weight_decay}; it must be 0 or more")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            ours: dict[int, list[int]] = {}
            changed: list[torch.Tensor] = []
            theirs: list[torch.Tensor] = []
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                if grad.is_sparse:
                    raise RuntimeError(
                        "deepwell.AdamW does not support sparse gradients; use torch.optim.SparseAdam"
                    )
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(
                        param, memory_format=torch.preserve_format
                    )
                    if group["amsgrad"]:
                        state["max_exp_avg_sq"] = torch.zeros_like(
                            param, memory_format=torch.preserve_format
                        )
                if group["amsgrad"] or not _is_plain(param, grad, state):
                    theirs.append(param)
                    continue
                state["step"] += 1
                flat = ours.setdefault(int(state["step"].item()), [])
                flat += (
                    param.data_ptr(),
                    grad.data_ptr(),
                    state["exp_avg"].data_ptr(),
                    state["exp_avg_sq"].data_ptr(),
                    param.numel(),
                )
                changed += (param, state["exp_avg"], state["exp_avg_sq"])
            _deepwell.set_threads(torch.get_num_threads())
            for step, flat in ours.items():
                _deepwell.adamw(
                    flat,
                    float(group["lr"]),
                    float(group["betas"][0]),
                    float(group["betas"][1]),
                    group["eps"],
                    group["weight_decay"],
                    step,
                    group["maximize"],
                    1.0,
                )
            if changed:
                torch.autograd.graph.increment_version(changed)
            if theirs:
                self._step_with_torch(group, theirs)
        return loss

    def _step_with_torch(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        states = [self.state[param] for param in params]
        torch_adamw(
            params,
            [param.grad for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            foreach=False,
            capturable=False,
            differentiable=False,
            fused=False,
            grad_scale=None,
            found_inf=None,
            has_complex=any(torch.is_complex(param) for param in params),
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def _is_plain(param: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> bool:
    """Returns whether all four are dense float32 on the CPU with the same dense layout."""
    strides = param.stride()
    for tensor in (param, grad, state["exp_avg"], state["exp_avg_sq"]):
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return False
        if tensor.stride() != strides or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return False
    # The update is elementwise, so any common order of the elements works. Dense means no gaps and no overlap.
    span = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, strides))
    return param.numel() == span or param.numel() == 0
