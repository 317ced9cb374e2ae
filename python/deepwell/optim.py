"""Optimizers that run in one pass over all parameters."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable

import torch
from torch.optim.adamw import adamw as torch_adamw

from deepwell import _deepwell

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
PLAIN = (torch.Tensor, torch.nn.Parameter)
CAPABILITIES = ((9, 0), (10, 0), (10, 3))
emulated: str | None = None  # tests: the emulated GPU that updates parameters on the CPU


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), one C call for all parameters.

    Drop-in for ``torch.optim.AdamW``: same arguments, same defaults, same ``state_dict`` (either loads
    what the other saved), the same arithmetic per element. float32 CPU parameters with dense gradients
    are updated by Deepwell, and so are parameters in float32, bfloat16 and float16 on an NVIDIA GPU of
    the Hopper or Blackwell generation, as by ``torch.optim.AdamW(fused=True)``. Any other parameter is
    updated by PyTorch's own function.

    On a GPU a step works on PyTorch's current stream and does not wait for it. It may be captured in a
    CUDA graph: ``lr`` as a float32 tensor on the GPU is read at each replay, and a number is not.

    ``max_grad_norm`` clips gradients by the norm of all of them, in the same passes, and replaces
    ``torch.nn.utils.clip_grad_norm_``. The tensors in ``.grad`` keep their values. After a step
    ``grad_norm`` is a tensor with the norm before clipping.
    """

    max_grad_norm: float | None = None
    grad_norm: torch.Tensor | None = None

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
        capturable: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        if not 0.0 <= float(lr):
            raise ValueError(f"lr is {lr}; it must be 0 or more")
        if not 0.0 <= eps:
            raise ValueError(f"eps is {eps}; it must be 0 or more")
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError(f"betas are {betas}; each must be in [0, 1)")
        if not 0.0 <= weight_decay:
            raise ValueError(f"weight_decay is {weight_decay}; it must be 0 or more")
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}; it must be positive, or None")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": capturable,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)
        self.max_grad_norm = max_grad_norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # Kept in the state_dict, from which torch.optim.AdamW takes it.
        if group["fused"] is None and all(param.is_cuda for param in group["params"]):
            group["fused"] = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Returns whether torch.amp.GradScaler leaves it to step() to unscale and to skip."""
        places = {self._place_of(*each) for each in self._with_gradients()}
        return len(places) == 1 and places <= {"cuda", emulated} - {None}

    def _with_gradients(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Returns each parameter that has a gradient, after its group."""
        found = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise RuntimeError(
                        "deepwell.AdamW does not support sparse gradients; use torch.optim.SparseAdam"
                    )
                found.append((group, param))
        return found

    def _place_of(self, group: dict[str, Any], param: torch.Tensor) -> str | None:
        """Returns what updates a parameter: "cuda", the emulated GPU, "cpu", or None for PyTorch."""
        if group["amsgrad"]:
            return None
        state, grad = self.state.get(param, {}), param.grad
        m, v = state.get("exp_avg"), state.get("exp_avg_sq")
        at, count = param.data_ptr(), param.numel()
        known = self.__dict__.setdefault("_places", {}).get(param)
        # Looks at the parameter and its averages once, as long as they are the same.
        if known is None or known[0] is not m or known[1] is not v or known[2:4] != (at, count):
            place = self._place_of_states(param, [each for each in (m, v) if each is not None])
            known = (m, v, at, count, place, param.stride(), param.dtype)
            self._places[param] = known
        if grad.dtype is not known[6] or grad.stride() != known[5] or type(grad) not in PLAIN:
            return None
        return known[4] if grad.device == param.device else None

    def _place_of_states(self, param: torch.Tensor, averages: list[torch.Tensor]) -> str | None:
        tensors = [param, *averages]
        if not _have_one_layout(tensors):
            return None
        types = [tensor.dtype for tensor in tensors]
        if param.is_cuda or (param.device.type == "cpu" and emulated):
            if any(dtype not in DTYPES for dtype in types) or len(set(types[1:])) > 1:
                return None
            return emulated if not param.is_cuda else _gpu(param.device)
        plain = param.device.type == "cpu" and set(types) == {torch.float32}
        return "cpu" if plain else None

    def _state_of(self, group: dict[str, Any], param: torch.Tensor, on_gpu: bool) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=param.device if on_gpu else "cpu"
            )
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(
                    param, memory_format=torch.preserve_format
                )
        step = state["step"]
        if on_gpu and (step.device != param.device or step.dtype != torch.float32):
            state["step"] = step.to(param.device, torch.float32)  # a state_dict had it elsewhere
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        places: dict[Any, list[tuple[dict[str, Any], torch.Tensor]]] = {}
        for group, param in self._with_gradients():
            place = self._place_of(group, param)
            key = (place, param.device) if place not in ("cpu", None) else place
            places.setdefault(key, []).append((group, param))
        clips = self.max_grad_norm is not None
        if clips and len(places) > 1:  # one norm over several devices
            places = {None: [each for some in places.values() for each in some]}
        for key, members in places.items():
            if key == "cpu":
                self._step_on_cpu(members)
            elif key is None or not self._step_on_gpu(*key, members):
                self._step_with_torch(members)
        return loss

    def _step_on_cpu(self, members: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        factor = 1.0
        if self.max_grad_norm is not None:
            factor = float(self._clipping([param.grad for _, param in members]))
        calls: dict[tuple[int, int], tuple[dict[str, Any], list[int]]] = {}
        changed: list[torch.Tensor] = []
        for group, param in members:
            state = self._state_of(group, param, on_gpu=False)
            state["step"] += 1
            step = int(state["step"].item())
            flat = calls.setdefault((id(group), step), (group, []))[1]
            flat += (
                param.data_ptr(),
                param.grad.data_ptr(),
                state["exp_avg"].data_ptr(),
                state["exp_avg_sq"].data_ptr(),
                param.numel(),
            )
            changed += (param, state["exp_avg"], state["exp_avg_sq"])
        _deepwell.set_threads(torch.get_num_threads())
        for (_, step), (group, flat) in calls.items():
            _deepwell.adamw(
                flat,
                float(group["lr"]),
                float(group["betas"][0]),
                float(group["betas"][1]),
                group["eps"],
                group["weight_decay"],
                step,
                group["maximize"],
                factor,
            )
        torch.autograd.graph.increment_version(changed)

    def _step_on_gpu(
        self,
        name: str,
        device: torch.device,
        members: list[tuple[dict[str, Any], torch.Tensor]],
    ) -> bool:
        """Returns False, with nothing changed, if no kernel supports the step."""
        calls: dict[tuple[int, Any, Any], tuple[dict[str, Any], list[int]]] = {}
        changed: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []  # until the call has been enqueued
        scale, found = (_on(device, getattr(self, n, None)) for n in ("grad_scale", "found_inf"))
        for group, param in members:
            state = self._state_of(group, param, on_gpu=True)
            exp_avg, exp_avg_sq, count = state["exp_avg"], state["exp_avg_sq"], state["step"]
            key = (id(group), param.dtype, exp_avg.dtype)
            flat = calls.setdefault(key, (group, []))[1]
            flat += (
                param.data_ptr(),
                param.grad.data_ptr(),
                exp_avg.data_ptr(),
                exp_avg_sq.data_ptr(),
                count.data_ptr(),
                param.numel(),
            )
            changed += (param, exp_avg, exp_avg_sq, count)
            if scale is not None:
                changed.append(param.grad)
        groups = []
        for (_, param_type, state_type), (group, flat) in calls.items():
            lr = group["lr"]
            lr_at = _on(device, lr) if isinstance(lr, torch.Tensor) and not lr.is_cpu else None
            kept.append(lr_at)
            groups.append(
                (
                    DTYPES[param_type],
                    DTYPES[state_type],
                    flat,
                    0.0 if lr_at is not None else float(lr),
                    _address(lr_at),
                    float(group["betas"][0]),
                    float(group["betas"][1]),
                    float(group["eps"]),
                    float(group["weight_decay"]),
                    bool(group["maximize"]),
                )
            )
        norm = None
        if self.max_grad_norm is not None:
            norm = self.grad_norm
            if norm is None or norm.device != device:
                norm = torch.zeros((), dtype=torch.float32, device=device)
        on_cuda = device.type == "cuda"
        stream = torch.cuda.current_stream(device).cuda_stream if on_cuda else 0
        # The last one is used. Captured graphs may use the others.
        spaces = self.__dict__.setdefault("_workspaces", {}).setdefault(device, [])
        with torch.cuda.device(device) if on_cuda else contextlib.nullcontext():
            while True:
                space = spaces[-1] if spaces else None
                needed = _deepwell.adamw_gpu(
                    name,
                    groups,
                    self.max_grad_norm or 0.0,
                    _address(scale),
                    _address(found),
                    _address(norm),
                    _address(space),
                    0 if space is None else space.numel(),
                    stream,
                )
                if not isinstance(needed, int):
                    break
                spaces.append(torch.empty(needed, dtype=torch.uint8, device=device))
        if needed is not None:
            return False
        self.grad_norm = norm
        torch.autograd.graph.increment_version(changed)
        return True

    def _clipping(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Sets grad_norm and returns the factor of clip_grad_norm_."""
        self.grad_norm = torch.nn.utils.get_total_norm(grads)
        return torch.clamp(self.max_grad_norm / (self.grad_norm + 1e-6), max=1.0)

    def _step_with_torch(self, members: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        grads = [param.grad for _, param in members]
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            for grad in grads:
                grad.div_(scale.to(grad.device))
        if found is not None and found.item():
            return
        if self.max_grad_norm is not None:
            factor = self._clipping(grads)
            grads = [grad * factor.to(grad.device) for grad in grads]
        calls: dict[int, tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]] = {}
        for (group, param), grad in zip(members, grads):
            _, params, scaled = calls.setdefault(id(group), (group, [], []))
            params.append(param)
            scaled.append(grad)
        for group, params, scaled in calls.values():
            self._update_with_torch(group, params, scaled)

    def _update_with_torch(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> None:
        on_gpu = bool(group["capturable"])
        states = [self._state_of(group, p, on_gpu=on_gpu and p.is_cuda) for p in params]
        torch_adamw(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            foreach=False,
            capturable=group["capturable"],
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


def _gpu(device: torch.device) -> str | None:
    """Returns "cuda" if there are kernels for the GPU."""
    return "cuda" if torch.cuda.get_device_capability(device) in CAPABILITIES else None


def _on(device: torch.device, number: torch.Tensor | None) -> torch.Tensor | None:
    return None if number is None else number.to(device, torch.float32, non_blocking=True)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _have_one_layout(tensors: list[torch.Tensor]) -> bool:
    """Returns whether all are plain and dense, on the same device, with the same layout."""
    first = tensors[0]
    strides = first.stride()
    for tensor in tensors:
        if tensor.device != first.device or tensor.stride() != strides:
            return False
        if type(tensor) not in PLAIN:
            return False
    # The update is elementwise, so any common order of the elements works. Dense means no gaps and no overlap.
    span = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, strides))
    return first.numel() == span or first.numel() == 0
