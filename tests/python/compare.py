"""Compares outputs and gradients with PyTorch in FP64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from deepwell.caches import flatten_outputs, is_cache
from torch.utils import _pytree as pytree


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Returns the floating-point tensors of a model's output in order, including those in caches."""
    if hasattr(outputs, "to_tuple"):
        outputs = outputs.to_tuple()
    found = []
    for value in pytree.tree_leaves(outputs, is_leaf=is_cache):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append(value)
        elif is_cache(value):
            found += tensors_of(flatten_outputs(value)[0])
    return found


def objective(outputs: Any) -> torch.Tensor:
    """Returns the model's loss if it has one, else a fixed uneven projection of its first output."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    first = tensors_of(outputs)[0]
    weights = torch.cos(torch.arange(first.numel(), dtype=torch.float64)).to(first.dtype)
    return (first * weights.view(first.shape)).sum()


def to_double(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: (
            leaf.detach().double()
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            else leaf
        ),
        value,
    )


def gradients(model: torch.nn.Module, args: Any, kwargs: Any):
    """Returns (outputs, {name: gradient or None}) of one forward and backward, starting without
    gradients."""
    model.zero_grad(set_to_none=True)
    outputs = model(*args, **kwargs)
    objective(outputs).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return [t.detach().clone() for t in tensors_of(outputs)], grads


def rounding(model: torch.nn.Module) -> float:
    """Returns the rounding that F32 leaves where terms cancel, relative to these terms. A path
    through forward and backward passes a sum along each extent of each parameter. In any order of
    summation the roundings of N terms, 2^-24 each, add up like a random walk."""
    return 2.0**-24 * sum(sum(p.shape) for p in model.parameters()) ** 0.5


def gradient_bounds(
    model: torch.nn.Module, own: dict[str, Any], exact: dict[str, Any]
) -> dict[str, float]:
    """Returns the largest permitted norm of each gradient's error: 1e-4 of the gradient's norm,
    twice the error of PyTorch's own F32 gradient, or the rounding of terms as large as the largest
    gradient. The last is the limit of F32 for gradients that are small because terms cancel (of
    queries, if there is one key)."""
    wanted = {name: gradient for name, gradient in exact.items() if gradient is not None}
    largest = max((gradient.norm().item() for gradient in wanted.values()), default=0.0)
    return {
        name: max(
            1e-4 * gradient.norm().item(),
            2 * error_of(own[name], gradient),
            rounding(model) * largest,
        )
        for name, gradient in wanted.items()
    }


def assert_same_function(plain: torch.nn.Module, ours: torch.nn.Module, args: Any, kwargs: Any):
    """Checks that ``ours`` agrees with FP64 PyTorch: outputs within 1e-4 of their norm or twice the
    error of FP32 PyTorch, gradients within gradient_bounds."""
    exact_model = copy.deepcopy(plain).double()
    exact_args, exact_kwargs = to_double((args, kwargs))
    exact_outputs, exact_grads = gradients(exact_model, exact_args, exact_kwargs)
    plain_outputs, plain_grads = gradients(plain, args, kwargs)
    if any(t.isnan().any() for t in exact_outputs):
        # Eager attention of transformers computes its softmax in FP32 even in an FP64 model. That
        # model's masks (FP64's least number) become -inf there, and a row that sees nothing becomes
        # NaN. In this case FP32 gives the expected results.
        exact_outputs, exact_grads = plain_outputs, plain_grads
    our_outputs, our_grads = gradients(ours, args, kwargs)

    assert len(our_outputs) == len(exact_outputs)
    for index, (our, own, exact) in enumerate(zip(our_outputs, plain_outputs, exact_outputs)):
        assert our.shape == exact.shape and our.dtype == own.dtype
        error, allowed = error_of(our, exact), 2 * error_of(own, exact)
        assert error <= max(1e-4 * exact.norm().item(), allowed), f"output {index}: error {error}"

    assert our_grads.keys() == exact_grads.keys()
    for name, exact in exact_grads.items():
        for made in (our_grads[name], plain_grads[name]):
            assert (made is None) == (exact is None), f"{name}: one gradient is None"
    for name, bound in gradient_bounds(plain, plain_grads, exact_grads).items():
        error, exact = error_of(our_grads[name], exact_grads[name]), exact_grads[name]
        assert error <= bound, (
            f"{name}: error {error:.3g} over {bound:.3g}, norm {exact.norm():.3g}"
        )


def error_of(value: torch.Tensor, exact: torch.Tensor) -> float:
    return (value.double() - exact.double()).norm().item()
