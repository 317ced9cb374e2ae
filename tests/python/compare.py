"""Is it the same function? Outputs and gradients against PyTorch in FP64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from deepwell.caches import flatten_outputs, is_cache
from torch.utils import _pytree as pytree


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Floating-point tensors of a model's output, in order; caches opened."""
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
    """The model's loss where it returns one, else a fixed uneven projection of its first output."""
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
    """(outputs, {name: gradient or None}) of one forward and backward from zero."""
    model.zero_grad(set_to_none=True)
    outputs = model(*args, **kwargs)
    objective(outputs).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return [t.detach().clone() for t in tensors_of(outputs)], grads


def assert_same_function(plain: torch.nn.Module, ours: torch.nn.Module, args: Any, kwargs: Any):
    """``ours`` agrees with FP64 PyTorch within 1e-4 of max(norm, 1e-3 median norm), or within twice
    the error that FP32 PyTorch itself makes; outputs likewise, against their own norm."""
    exact_model = copy.deepcopy(plain).double()
    exact_args, exact_kwargs = to_double((args, kwargs))
    exact_outputs, exact_grads = gradients(exact_model, exact_args, exact_kwargs)
    plain_outputs, plain_grads = gradients(plain, args, kwargs)
    if any(t.isnan().any() for t in exact_outputs):
        # Eager attention of transformers takes its softmax in FP32 even in an FP64 model, whose masks
        # (FP64's least number) are -inf there: a row that sees nothing is NaN. FP32 judges then.
        exact_outputs, exact_grads = plain_outputs, plain_grads
    our_outputs, our_grads = gradients(ours, args, kwargs)

    assert len(our_outputs) == len(exact_outputs)
    for index, (our, own, exact) in enumerate(zip(our_outputs, plain_outputs, exact_outputs)):
        assert our.shape == exact.shape and our.dtype == own.dtype
        error, allowed = _error(our, exact), 2 * _error(own, exact)
        assert error <= max(1e-4 * exact.norm().item(), allowed), f"output {index}: error {error}"

    assert our_grads.keys() == exact_grads.keys()
    norms = torch.tensor([g.norm() for g in exact_grads.values() if g is not None])
    median = norms.median().item() if len(norms) else 0.0
    # A gradient that is exactly zero (of queries, where there is one key) is rounding of larger terms.
    largest = norms.max().item() if len(norms) else 0.0
    for name, exact in exact_grads.items():
        our, own = our_grads[name], plain_grads[name]
        assert (our is None) == (own is None), f"{name}: one gradient is None"
        if our is None:
            continue
        error = _error(our, exact)
        allowed = 1e-4 * max(exact.norm().item(), 1e-3 * median)
        if exact.norm().item() < 1e-9 * largest:
            allowed = max(allowed, 8 * 2.0**-24 * largest)
        assert error <= max(allowed, 2 * _error(own, exact)), (
            f"{name}: error {error:.3g}, norm {exact.norm():.3g}, PyTorch's own {_error(own, exact):.3g}"
        )


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return (value.double() - exact.double()).norm().item()
