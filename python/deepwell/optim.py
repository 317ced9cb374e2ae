"""Optimizers that run in one pass over all parameters."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Iterable

import torch
from torch.optim.adamw import adamw as torch_adamw

from deepwell import _deepwell

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
CODES = torch.float8_e4m3fn  # of exp_avg in 8 bits; those of exp_avg_sq are in torch.uint8
STATE_DTYPES = {**DTYPES, CODES: "e4m3"}
BLOCK = 128  # elements that share a scale (deepwell/adamw.h)
PLAIN = (torch.Tensor, torch.nn.Parameter)
CAPABILITIES = ((9, 0), (10, 0), (10, 3), (12, 0))
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

    ``state_dtype`` is the type of the averages: ``torch.float32``, ``torch.bfloat16``, or ``"8bit"`` for blocks of 128
    8-bit codes with a float32 scale each; None is the type of the parameter. ``stochastic_rounding`` rounds bfloat16
    parameters, and averages in bfloat16 and 8 bits, up or down at random with the exact value as expectation; by
    default it is on if ``state_dtype`` is ``torch.bfloat16`` or ``"8bit"``. The random bits depend on ``seed``, the
    step, the parameter's position and the element alone. ``master_weights`` keeps a float32 copy of parameters in 16
    bits, which is updated instead of them. docs/optimizers.md has the formats.
    """

    max_grad_norm: float | None = None
    grad_norm: torch.Tensor | None = None
    state_dtype: torch.dtype | str | None = None
    stochastic_rounding: bool = False
    master_weights: bool = False
    seed: int = 0
    _release: _Release | None = None

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
        state_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool | None = None,
        master_weights: bool = False,
        seed: int = 0,
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
        if state_dtype not in (None, torch.float32, torch.bfloat16, "8bit"):
            raise ValueError(
                f'state_dtype is {state_dtype!r}; expected torch.float32, torch.bfloat16, "8bit" or None'
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}; it must be in [0, 2**64)")
        if stochastic_rounding is None:
            stochastic_rounding = state_dtype in (torch.bfloat16, "8bit")
        self.state_dtype = state_dtype
        self.stochastic_rounding = stochastic_rounding
        self.master_weights = master_weights
        self.seed = seed
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
        if group["amsgrad"] and self._own_formats:
            del self.param_groups[-1]
            raise ValueError(
                "deepwell.AdamW has no amsgrad with state_dtype, stochastic_rounding or master_weights; leave one out"
            )
        if self._release is not None:
            self._release.watch(group)
        # Kept in the state_dict, from which torch.optim.AdamW takes it.
        if group["fused"] is None and all(param.is_cuda for param in group["params"]):
            group["fused"] = True

    def __getstate__(self) -> dict[str, Any]:
        kept = ("max_grad_norm", "state_dtype", "stochastic_rounding", "master_weights", "seed")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    @property
    def _own_formats(self) -> bool:
        """Returns whether numbers are stored as PyTorch's optimizer does not store them."""
        return self.state_dtype is not None or self.stochastic_rounding or self.master_weights

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Returns whether torch.amp.GradScaler leaves it to step() to unscale and to skip."""
        places = {self._place_of(*each) for each in self._with_gradients()}
        return len(places) == 1 and places <= {"cuda", "cpu", emulated} - {None}

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
        """Returns what updates a parameter: the device "cuda" or "cpu" or an emulated GPU, "plain" for the CPU's loop
        over float32, or None for PyTorch."""
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
        if self._own_formats:
            if param.dtype not in DTYPES:
                return None
            place = _gpu(param.device) if param.is_cuda else emulated or "cpu"
            return place if param.is_cuda or param.device.type == "cpu" else None
        if param.is_cuda or (param.device.type == "cpu" and emulated):
            if any(dtype not in DTYPES for dtype in types) or len(set(types[1:])) > 1:
                return None
            return emulated if not param.is_cuda else _gpu(param.device)
        plain = param.device.type == "cpu" and set(types) == {torch.float32}
        return "plain" if plain else None

    def _state_of(self, group: dict[str, Any], param: torch.Tensor, on_gpu: bool) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=param.device if on_gpu else "cpu"
            )
            kinds = (self.state_dtype, self.state_dtype)
            if self.state_dtype == "8bit":
                kinds = (CODES, torch.uint8)
                state["scales"] = torch.zeros(_scales_shape(param), device=param.device)
            for name, kind in zip(("exp_avg", "exp_avg_sq"), kinds):
                state[name] = torch.zeros_like(
                    param, dtype=kind, memory_format=torch.preserve_format
                )
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(
                    param, memory_format=torch.preserve_format
                )
            if self._has_master(param):
                state["master"] = param.detach().to(torch.float32)
        step = state["step"]
        if on_gpu and (step.device != param.device or step.dtype != torch.float32):
            state["step"] = step.to(param.device, torch.float32)  # a state_dict had it elsewhere
        return state

    # ---- gradient release ----------------------------------------------------------------------------

    def release_gradients(self, accumulation: int = 1, pending_bytes: int = 32 << 20) -> _Release:
        """Updates parameters while backward runs and frees their gradients, so that few gradients exist at once.

        A parameter is updated when the last of ``accumulation`` backward passes has its gradient. Up to
        ``pending_bytes`` of gradients wait for each other, to be updated by one call; with 0 none waits. ``step()``
        then ends a step and updates only what has a gradient still. Results have the same bits as without release.
        ``remove()`` of the returned handle ends it.

        The norm of all gradients, gradients of other ranks, and a scaler's verdict are known only after backward:
        ``max_grad_norm``, several ranks and ``torch.amp.GradScaler`` are errors.
        """
        if self.max_grad_norm is not None:
            raise ValueError(
                "release_gradients: max_grad_norm needs the norm of all gradients, which is known only after backward; "
                "leave one of them out"
            )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_world_size() > 1:
                raise RuntimeError(
                    "release_gradients: there are several ranks, whose gradients are reduced after the hooks of "
                    "parameters; leave it out"
                )
        if accumulation < 1 or pending_bytes < 0:
            raise ValueError(
                f"release_gradients: accumulation is {accumulation} and pending_bytes {pending_bytes}; expected at "
                "least 1 and 0"
            )
        if self._release is not None:
            raise RuntimeError(
                "release_gradients: gradients are released already; remove() that first"
            )
        self._release = _Release(self, accumulation, pending_bytes)
        return self._release

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._release is not None:
            self._release.forget()

    def _has_master(self, param: torch.Tensor) -> bool:
        return self.master_weights and param.dtype in (torch.bfloat16, torch.float16)

    @property
    def has_other_memory(self) -> bool:
        """Returns whether states take other memory than those of ``torch.optim.AdamW(fused=True)``."""
        return self._own_formats

    @property
    def releases_gradients(self) -> bool:
        """Returns whether parameters are updated during backward."""
        return self._release is not None

    @property
    def released_bytes(self) -> int | None:
        """Returns the most bytes of gradients that wait for an update during backward; None if they are not updated
        then, or only in the last of several passes."""
        release = self._release
        return release.limit if release is not None and release.accumulation == 1 else None

    def state_bytes(self) -> int:
        """Returns the bytes that the states of all parameters have after a step in which each had a gradient."""
        return sum(
            self._state_bytes(group, param)
            for group in self.param_groups
            for param in group["params"]
        )

    def _state_bytes(self, group: dict[str, Any], param: torch.Tensor) -> int:
        count = param.numel()
        master = 4 * count if self._has_master(param) else 0
        if self.state_dtype == "8bit":
            return 4 + 2 * count + 8 * -(-count // BLOCK) + master
        width = (self.state_dtype or param.dtype).itemsize
        return 4 + (3 if group["amsgrad"] else 2) * width * count + master

    def averages(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns exp_avg and exp_avg_sq of a parameter in float32, whatever their type in ``state``."""
        state = self.state[param]
        if "scales" not in state:
            return state["exp_avg"].float(), state["exp_avg_sq"].float()
        return _decoded(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this optimizer or ``torch.optim.AdamW`` saved. Averages of another type become ``state_dtype``."""
        super().load_state_dict(state_dict)  # gives all tensors the type of their parameter
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, param in zip(keys, params):
            if key in state_dict["state"]:
                self._restore(param, state_dict["state"][key])

    def _restore(self, param: torch.Tensor, saved: dict[str, Any]) -> None:
        """Replaces what the base class has loaded, where that lost bits or has another type than ``state_dtype``."""
        state = self.state[param]
        coded = "scales" in saved
        for name in ("scales", "master"):
            state.pop(name, None)
        if coded and self.state_dtype == "8bit":
            for name in ("exp_avg", "exp_avg_sq", "scales"):
                state[name] = saved[name].to(param.device, copy=True)
        elif coded or self.state_dtype is not None:
            m, v = (saved["exp_avg"], saved["exp_avg_sq"]) if not coded else _decoded(saved)
            if self.state_dtype == "8bit":
                state.update(_encoded(m.to(param.device), v.to(param.device)))
            else:
                kind = self.state_dtype or param.dtype
                state["exp_avg"] = m.to(param.device, kind, copy=True)
                state["exp_avg_sq"] = v.to(param.device, kind, copy=True)
        if self._has_master(param):
            master = saved.get("master", param.detach())
            state["master"] = master.to(param.device, torch.float32, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._release is not None:
            self._release.end_step()
        found = self._with_gradients()
        self._update(found)
        if self._release is not None:
            for _, param in found:
                param.grad = None
        return loss

    @torch.no_grad()
    def step_if_finite(self, loss: torch.Tensor, max_norm: float) -> torch.Tensor | None:
        """Enqueues a step on a GPU that changes nothing if ``loss`` or the norm of the gradients is not finite.

        Gradients are clipped to ``max_norm`` as by ``max_grad_norm``; infinity clips nothing. Returns [2] float64 on
        the GPU, to be read later by ``outcome_of``. None, with nothing changed: the parameters are not all on one GPU
        that Deepwell has kernels for, or their gradients are released during backward.
        """
        found = self._with_gradients()
        places = {(self._place_of(*each), each[1].device) for each in found}
        name, device = next(iter(places), (None, None))
        if len(places) != 1 or name in (None, "plain", "cpu") or self._release is not None:
            return None
        outcome = torch.zeros(2, dtype=torch.float64, device=device)
        not_finite = loss.detach().isfinite().logical_not()
        return (
            outcome
            if self._step_on_device(name, device, found, outcome, not_finite, max_norm)
            else None
        )

    def _update(self, found: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Updates parameters, each given after its group."""
        places: dict[Any, list[tuple[dict[str, Any], torch.Tensor]]] = {}
        for group, param in found:
            place = self._place_of(group, param)
            if place is None and self._own_formats:
                self._refuse(param)
            key = (place, param.device) if place not in ("plain", None) else place
            places.setdefault(key, []).append((group, param))
        clips = self.max_grad_norm is not None
        if clips and len(places) > 1:  # one norm over several devices
            if self._own_formats:
                raise RuntimeError(
                    "deepwell.AdamW: max_grad_norm over parameters on several devices has no state_dtype, "
                    "stochastic_rounding or master_weights; clip the gradients before the step"
                )
            places = {None: [each for some in places.values() for each in some]}
        for key, members in places.items():
            if key == "plain":
                self._step_on_cpu(members)
            elif key is None or not self._step_on_device(*key, members):
                if self._own_formats:
                    self._refuse(members[0][1])
                self._step_with_torch(members)

    def _refuse(self, param: torch.Tensor) -> None:
        raise RuntimeError(
            f"deepwell.AdamW: a parameter of shape {tuple(param.shape)}, {param.dtype}, on {param.device} cannot "
            "have state_dtype, stochastic_rounding or master_weights; expected a dense float32, bfloat16 or float16 "
            "tensor with a gradient of the same type and strides on the CPU or on a Hopper or Blackwell GPU"
        )

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

    def _step_on_device(
        self,
        name: str,
        device: torch.device,
        members: list[tuple[dict[str, Any], torch.Tensor]],
        outcome: torch.Tensor | None = None,
        not_finite: torch.Tensor | None = None,
        max_norm: float | None = None,
    ) -> bool:
        """Returns False, with nothing changed, if no kernel supports the step. With an ``outcome`` a step that is
        ``not_finite``, or whose norm is not, changes nothing."""
        calls: dict[tuple[int, Any, Any], tuple[dict[str, Any], list[int]]] = {}
        changed: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []  # until the call has been enqueued
        scale, found = (_on(device, getattr(self, n, None)) for n in ("grad_scale", "found_inf"))
        found = _on(device, not_finite) if found is None else found
        max_norm = self.max_grad_norm if max_norm is None else max_norm
        positions = self._positions()
        for group, param in members:
            state = self._state_of(group, param, on_gpu=name != "cpu")
            exp_avg, exp_avg_sq, count = state["exp_avg"], state["exp_avg_sq"], state["step"]
            master, scales = state.get("master"), state.get("scales")
            key = (id(group), param.dtype, exp_avg.dtype)
            flat = calls.setdefault(key, (group, []))[1]
            flat += (
                _address(param if master is None else master),
                param.grad.data_ptr(),
                exp_avg.data_ptr(),
                exp_avg_sq.data_ptr(),
                count.data_ptr(),
                param.numel(),
                0 if master is None else param.data_ptr(),
                _address(scales),
                positions.get(param, 0),
            )
            changed += (param, exp_avg, exp_avg_sq, count)
            changed += (each for each in (master, scales) if each is not None)
            if scale is not None:
                changed.append(param.grad)
        groups = []
        for (_, param_type, state_type), (group, flat) in calls.items():
            of_param = DTYPES[param_type]
            has_master = self.master_weights and of_param != "f32"
            lr = group["lr"]
            lr_at = _on(device, lr) if isinstance(lr, torch.Tensor) and not lr.is_cpu else None
            kept.append(lr_at)
            groups.append(
                (
                    "f32" if has_master else of_param,
                    of_param,
                    STATE_DTYPES[state_type],
                    of_param if has_master else "",
                    flat,
                    0.0 if lr_at is not None else float(lr),
                    _address(lr_at),
                    float(group["betas"][0]),
                    float(group["betas"][1]),
                    float(group["eps"]),
                    float(group["weight_decay"]),
                    bool(group["maximize"]),
                    self.stochastic_rounding,
                    self.seed,
                )
            )
        norm = None
        if max_norm is not None:
            norm = self.grad_norm
            if norm is None or norm.device != device:
                norm = torch.zeros((), dtype=torch.float32, device=device)
        if not self._run(name, device, groups, scale, found, norm, max_norm, outcome):
            return False
        self.grad_norm = norm
        torch.autograd.graph.increment_version(changed)
        return True

    def _positions(self) -> dict[torch.Tensor, int]:
        """Returns the numbers of parameters in random bits."""
        if not self.stochastic_rounding:
            return {}
        every = (param for group in self.param_groups for param in group["params"])
        return {param: position for position, param in enumerate(every)}

    def _run(
        self,
        name: str,
        device: torch.device,
        groups: list[tuple[Any, ...]],
        scale: torch.Tensor | None = None,
        found: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        max_norm: float | None = None,
        outcome: torch.Tensor | None = None,
    ) -> bool:
        """Runs the call of deepwell/adamw.h. Returns False, with nothing changed, if no kernel supports it."""
        if name == "cpu":
            _deepwell.set_threads(torch.get_num_threads())
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
                    0.0 if max_norm is None else max_norm,
                    _address(scale),
                    _address(found),
                    _address(norm),
                    _address(outcome),
                    _address(space),
                    0 if space is None else space.numel(),
                    stream,
                )
                if not isinstance(needed, int):
                    return needed is None
                spaces.append(torch.empty(needed, dtype=torch.uint8, device=device))

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


class _Release:
    """Hooks that update parameters during backward."""

    def __init__(self, optimizer: AdamW, accumulation: int, pending_bytes: int) -> None:
        self.optimizer, self.accumulation, self.limit = optimizer, accumulation, pending_bytes
        self.pending: list[tuple[dict[str, Any], torch.Tensor]] = []
        self.bytes = 0
        self.passes: dict[torch.Tensor, int] = {}  # backward passes since the last step
        self.lock = threading.RLock()  # autograd has a thread for each device
        self.hooks: dict[torch.Tensor, Any] = {}
        for group in optimizer.param_groups:
            self.watch(group)

    def watch(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if param.requires_grad:
                hook = functools.partial(self.collect, group)
                self.hooks[param] = param.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def collect(self, group: dict[str, Any], param: torch.Tensor) -> None:
        with self.lock:
            passes = self.passes[param] = self.passes.get(param, 0) + 1
            if passes > self.accumulation:
                raise RuntimeError(
                    f"deepwell: backward pass {passes} since the last step(), but release_gradients has accumulation="
                    f"{self.accumulation}: parameters are updated already; call step() after each {self.accumulation}, "
                    "or give the number of passes of a step"
                )
            if passes < self.accumulation:
                return
            if not self.pending:  # what is left when backward ends is updated then
                torch.autograd.Variable._execution_engine.queue_callback(self.update)
            self.pending.append((group, param))
            self.bytes += param.grad.nbytes
            if self.bytes >= self.limit:
                self.update()

    @torch.no_grad()
    def update(self) -> None:
        with self.lock:
            found, self.pending, self.bytes = self.pending, [], 0
            if not found:
                return
            for _, param in found:
                if param.grad.is_sparse:
                    raise RuntimeError(
                        "deepwell.AdamW does not support sparse gradients; use torch.optim.SparseAdam"
                    )
            self.optimizer._update(found)
            for _, param in found:
                param.grad = None

    def end_step(self) -> None:
        if getattr(self.optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "deepwell: release_gradients has updated parameters before torch.amp.GradScaler looked at the "
                "gradients; leave the scaler or the release out"
            )
        most = max(self.passes.values(), default=self.accumulation)
        if most < self.accumulation:
            raise RuntimeError(
                f"deepwell: step() after {most} of {self.accumulation} backward passes of release_gradients; call it "
                "after the last"
            )
        self.update()
        self.passes.clear()

    def forget(self) -> None:
        """Begins a step again, as zero_grad does, unless parameters have been updated since the last one."""
        if max(self.passes.values(), default=0) < self.accumulation:
            self.passes.clear()

    def remove(self) -> None:
        for hook in self.hooks.values():
            hook.remove()
        self.hooks.clear()
        self.optimizer._release = None


def outcome_of(numbers: torch.Tensor) -> tuple[float, bool]:
    """Returns the norm of the gradients and whether the step was applied, from what ``step_if_finite`` returned, on the
    CPU: the bytes of dw_adamw_gpu_outcome."""
    return float(numbers[0]), bool(numbers.view(torch.int32)[2])


def _gpu(device: torch.device) -> str | None:
    """Returns "cuda" if there are kernels for the GPU."""
    return "cuda" if torch.cuda.get_device_capability(device) in CAPABILITIES else None


def _on(device: torch.device, number: torch.Tensor | None) -> torch.Tensor | None:
    return None if number is None else number.to(device, torch.float32, non_blocking=True)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# ---- averages in 8 bits: between codes and float32, where a state_dict has another type ----------------


def _scales_shape(param: torch.Tensor) -> tuple[int, int]:
    return (2, -(-param.numel() // BLOCK))


def _in_blocks(dense: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a dense tensor in the order of memory, in blocks; zeros fill up the last one."""
    flat = dense.as_strided((dense.numel(),), (1,))
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _like(blocks: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Returns elements in blocks as a tensor with the shape and strides of ``dense``."""
    made = torch.empty_like(dense, dtype=blocks.dtype)
    made.as_strided((dense.numel(),), (1,)).copy_(blocks.reshape(-1)[: dense.numel()])
    return made


def _root_values(device: torch.device) -> torch.Tensor:
    """Returns the numbers of the 256 codes of exp_avg_sq's root: 4 exponent bits, 4 fraction bits, bias 7."""
    code = torch.arange(256, device=device)
    exponent, fraction = code >> 4, (code & 15).float() / 16
    normal = torch.ldexp(1 + fraction, exponent - 7)
    values = torch.where(exponent == 0, fraction * 2.0**-6, normal)
    values[255] = torch.nan
    return values


def _decoded(state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    m, v = state["exp_avg"], state["exp_avg_sq"]
    scales = state["scales"].unsqueeze(-1)
    first = _in_blocks(m.float()) * scales[0]
    root = _root_values(v.device)[_in_blocks(v.int())] * scales[1]
    return _like(first, m), _like(root * root, v)


def _encoded(m: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    first, root = _in_blocks(m.float()), _in_blocks(v.float()).sqrt()
    values = _root_values(v.device)[:255]
    scales = [
        torch.where(x.isfinite(), x, 0).abs().amax(1, keepdim=True) / largest
        for x, largest in ((first, 448.0), (root, 480.0))
    ]
    first_codes, root_codes = (x / s.clamp_min(2.0**-120) for x, s in zip((first, root), scales))
    nearest = torch.bucketize(root_codes, (values[1:] + values[:-1]) / 2)
    nearest = torch.where((nearest == 0) & (root > 0), 1, nearest.clamp_max(254))
    nearest = torch.where(root.isfinite(), nearest, 255)
    return {
        "exp_avg": _like(first_codes.clamp(-448, 448).to(CODES), m),
        "exp_avg_sq": _like(nearest.to(torch.uint8), v),
        "scales": torch.cat(scales, 1).t().contiguous(),
    }


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
