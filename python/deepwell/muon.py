"""Muon for the matrices of hidden layers, AdamW for all other parameters.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale of the update and the
weight decay of Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982).
"""

from __future__ import annotations

import math
from typing import Any, Iterable

import torch

from deepwell import optim
from deepwell.optim import DTYPES, AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the odd polynomial a x + b x^3 + c x^5
EPS = 1e-7  # the least norm that a matrix is divided by
BATCH_ELEMENTS = 1 << 26  # of matrices that are multiplied at once: 128 MiB in bfloat16
OUTER_NAMES = ("emb", "wte", "wpe", "head")  # parts of names of embeddings and heads


def orthogonalized(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Returns matrices [..., n, m] with their singular values moved towards 1, by ``steps`` of the Newton-Schulz
    iteration X -> a X + (b X X^T + c (X X^T)^2) X in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    shape = x.shape
    # The Frobenius norm bounds the largest singular value.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = (x / norm.clamp_min(EPS)).reshape(-1, *shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT if tall else x


def hidden_parameters(model: torch.nn.Module) -> list[str]:
    """Returns the names of the parameters that Muon updates: matrices that belong neither to an embedding nor to the
    head. The head is what ``get_output_embeddings()`` returns, or else the last ``torch.nn.Linear``."""
    outer = {
        id(weight)
        for module in model.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for weight in module.parameters(recurse=False)
    }
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        head = linear[-1] if linear else None
    if isinstance(head, torch.nn.Module):
        outer |= {id(weight) for weight in head.parameters()}
    return [
        name
        for name, param in model.named_parameters()
        if id(param) not in outer and _is_hidden(name, param)
    ]


def _is_hidden(name: str, param: torch.Tensor) -> bool:
    named_outer = any(part in name.lower() for part in OUTER_NAMES)
    return param.ndim == 2 and min(param.shape) > 1 and not named_outer


class Muon(AdamW):
    """Muon for the matrices of hidden layers; ``deepwell.AdamW`` for embeddings, the head, norms and biases.

    ``params`` is a model, or pairs of names and parameters, or groups with an entry ``"muon"``: True or False. For a
    model ``hidden_parameters`` chooses the matrices; for pairs, two axes and the name do. ``hidden``, a list of names,
    replaces both choices. A parameter of three axes that is named there is a stack of matrices.

    A matrix [n, m] moves by ``lr * 0.2 * sqrt(max(n, m))`` times the orthogonalized momentum, whose root mean square is
    then that of AdamW's updates, so that learning rate and weight decay of AdamW fit; with ``scale="original"`` by
    ``lr * sqrt(max(1, n / m))`` times it. ``adamw_lr`` and ``adamw_weight_decay`` of the other parameters are by
    default the same.

    ``state_dtype`` and the options after it are those of ``deepwell.AdamW``. The momentum has ``state_dtype``, bfloat16
    for ``"8bit"``, and the type of the parameter by default. ``max_grad_norm`` clips all gradients together, in place.
    """

    def __init__(
        self,
        params: torch.nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        *,
        scale: str = "rms",
        hidden: Iterable[str] | None = None,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum is {momentum}; it must be in [0, 1)")
        if not 1 <= ns_steps <= 20:
            raise ValueError(f"ns_steps is {ns_steps}; it must be 1 to 20")
        if scale not in ("rms", "original"):
            raise ValueError(f'scale is {scale!r}; expected "rms" or "original"')
        self._muon = {
            "muon": True,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "scale": scale,
        }
        self._others = {
            "muon": False,
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        groups = self._groups_of(params, hidden)
        super().__init__(groups, lr, betas, eps, weight_decay, **options)

    def _groups_of(self, params: Any, hidden: Iterable[str] | None) -> list[dict[str, Any]]:
        if isinstance(params, torch.nn.Module):
            pairs = list(params.named_parameters())
            names = set(hidden_parameters(params) if hidden is None else hidden)
        else:
            pairs = list(params)
            if pairs and all(isinstance(each, dict) and "muon" in each for each in pairs):
                return pairs
            if not all(isinstance(each, tuple) and isinstance(each[0], str) for each in pairs):
                raise TypeError(
                    "deepwell.Muon needs to know which parameters are matrices of hidden layers: give the model, "
                    'model.named_parameters(), or groups with an entry "muon"'
                )
            names = {name for name, param in pairs if _is_hidden(name, param)}
            names = names if hidden is None else set(hidden)
        unknown = names - {name for name, _ in pairs}
        if unknown:
            raise ValueError(f"hidden names no parameter: {sorted(unknown)}")
        chosen = [pair for pair in pairs if pair[0] in names]
        others = [pair for pair in pairs if pair[0] not in names]
        groups = [{"params": chosen, "muon": True}, {"params": others, "muon": False}]
        return [group for group in groups if group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        muon = param_group.get("muon", False)
        super().add_param_group({**(self._muon if muon else self._others), **param_group})
        group = self.param_groups[-1]
        for param in group["params"] if muon else ():
            if param.ndim not in (2, 3):
                del self.param_groups[-1]
                raise ValueError(
                    f"Muon updates matrices and stacks of matrices; a parameter has the shape {tuple(param.shape)}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_muon": self._muon, "_others": self._others}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return False

    def _restore(self, param: torch.Tensor, saved: dict[str, Any]) -> None:
        if "momentum_buffer" not in saved:
            return super()._restore(param, saved)
        state = self.state[param]
        kind = self._momentum_dtype(param)
        state["momentum_buffer"] = saved["momentum_buffer"].to(param.device, kind, copy=True)
        state.pop("master", None)
        if self._has_master(param):
            master = saved.get("master", param.detach())
            state["master"] = master.to(param.device, torch.float32, copy=True)

    def _state_bytes(self, group: dict[str, Any], param: torch.Tensor) -> int:
        if not group["muon"]:
            return super()._state_bytes(group, param)
        width = self._momentum_dtype(param).itemsize + (4 if self._has_master(param) else 0)
        return 4 + width * param.numel()

    def _momentum_dtype(self, param: torch.Tensor) -> torch.dtype:
        if self.state_dtype is None:
            return param.dtype
        return torch.float32 if self.state_dtype is torch.float32 else torch.bfloat16

    def _update(self, found: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        limit = self.max_grad_norm
        if limit is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_([param for _, param in found], limit)
        self.max_grad_norm = None
        try:
            super()._update([each for each in found if not each[0]["muon"]])
        finally:
            self.max_grad_norm = limit
        self._update_hidden([each for each in found if each[0]["muon"]])

    def _update_hidden(self, found: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Multiplies matrices of the same shape together."""
        batches: dict[Any, list[list[tuple[dict[str, Any], torch.Tensor]]]] = {}
        for group, param in found:
            key = (param.shape, param.device, group["ns_steps"])
            of_key = batches.setdefault(key, [[]])
            if of_key[-1] and (len(of_key[-1]) + 1) * param.numel() > BATCH_ELEMENTS:
                of_key.append([])
            of_key[-1].append((group, param))
        positions = self._positions()
        for (_, _, steps), of_key in batches.items():
            for members in of_key:
                directions = torch.stack([self._direction(*each) for each in members])
                updates = orthogonalized(directions, steps)
                calls: dict[Any, list[Any]] = {}
                for (group, param), update in zip(members, updates):
                    place = _place(param)
                    key = (place, id(group), param.dtype)
                    calls.setdefault(key, []).append((group, param, update))
                for (place, _, _), some in calls.items():
                    if place is None or not self._move(place, some, positions):
                        self._move_with_torch(some)

    def _direction(self, group: dict[str, Any], param: torch.Tensor) -> torch.Tensor:
        """Adds the gradient to the momentum. Returns the momentum, or that of the next step by Nesterov's rule, in
        bfloat16."""
        state, grad, keep = self.state[param], param.grad, group["momentum"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["momentum_buffer"] = torch.zeros_like(param, dtype=self._momentum_dtype(param))
            if self._has_master(param):
                state["master"] = param.detach().to(torch.float32)
        buffer = state["momentum_buffer"]
        grad = (-grad if group["maximize"] else grad).to(torch.float32)
        average = torch.lerp(buffer.to(torch.float32), grad, 1.0 - keep)
        buffer.copy_(average)
        return (torch.lerp(grad, average, keep) if group["nesterov"] else average).bfloat16()

    def _move(
        self,
        place: str,
        some: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]],
        positions: dict[torch.Tensor, int],
    ) -> bool:
        """Moves parameters of one group, type and shape by one call, as AdamW's but without averages. Returns False,
        with nothing changed, if no kernel supports it."""
        group, first, _ = some[0]
        device, of_param = first.device, DTYPES[first.dtype]
        factor = _factor(group, first)
        lr, flat, kept, changed = group["lr"], [], [], []
        for _, param, update in some:
            state = self.state[param]
            if state["step"].device != device or state["step"].dtype is not torch.float32:
                state["step"] = state["step"].to(device, torch.float32)
            if update.stride() != param.stride():
                update = torch.empty_like(param, dtype=torch.bfloat16).copy_(update)
                kept.append(update)
            master = state.get("master")
            flat += (
                (param if master is None else master).data_ptr(),
                update.data_ptr(),
                0,
                0,
                state["step"].data_ptr(),
                param.numel(),
                0 if master is None else param.data_ptr(),
                0,
                positions.get(param, 0),
            )
            changed += (param, state["step"], *(() if master is None else (master,)))
        lr_at = None
        if isinstance(lr, torch.Tensor) and not lr.is_cpu:
            lr_at = lr.to(device, torch.float32) * factor
        has_master = self._has_master(first)
        call = (
            "f32" if has_master else of_param,
            "bf16",
            "",
            of_param if has_master else "",
            flat,
            0.0 if lr_at is not None else float(lr) * factor,
            0 if lr_at is None else lr_at.data_ptr(),
            0.0,
            0.0,
            0.0,
            group["weight_decay"] / factor,
            False,
            self.stochastic_rounding,
            self.seed,
        )
        if not self._run(place, device, [call]):
            return False
        torch.autograd.graph.increment_version(changed)
        return True

    def _move_with_torch(
        self, some: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]
    ) -> None:
        for group, param, update in some:
            if self._own_formats:
                self._refuse(param)
            lr = group["lr"]
            self.state[param]["step"] += 1
            param.mul_(1.0 - lr * group["weight_decay"])
            param.sub_(update.to(param.dtype) * (lr * _factor(group, param)))


def _place(param: torch.Tensor) -> str | None:
    """Returns the device whose kernels update a parameter, or None for PyTorch."""
    if param.dtype not in DTYPES or not optim._have_one_layout([param]):
        return None
    if param.is_cuda:
        return optim._gpu(param.device)
    return (optim.emulated or "cpu") if param.device.type == "cpu" else None


def _factor(group: dict[str, Any], param: torch.Tensor) -> float:
    n, m = param.shape[-2:]
    return 0.2 * math.sqrt(max(n, m)) if group["scale"] == "rms" else math.sqrt(max(1.0, n / m))
