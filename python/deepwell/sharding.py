"""Models whose parameters PyTorch splits over processes: FSDP2 (``fully_shard``), FSDP1, tensor parallelism.

A module to which ``fully_shard`` was applied has whole parameters, which are plain tensors, while its forward and its
backward run; at other times they are DTensors. It can be one graph. A module that contains such modules cannot: each of
them gathers its own parameters when it is called.
"""

from __future__ import annotations

import sys

import torch


def _class(name: str) -> type | None:
    """Returns a class of torch.distributed.fsdp, or None if nothing in this process can be an instance of it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def is_sharded(module: torch.nn.Module) -> bool:
    """Returns whether ``fully_shard`` was applied to this module."""
    kind = _class("FSDPModule")
    return kind is not None and isinstance(module, kind)


def sharded_inside(root: torch.nn.Module) -> str | None:
    """Returns the path of a module inside of ``root`` to which ``fully_shard`` was applied, or None."""
    if _class("FSDPModule") is None:
        return None
    for path, module in root.named_modules():
        if module is not root and is_sharded(module):
            return path
    return None


def gathers(root: torch.nn.Module) -> bool:
    """Returns whether every forward sees whole parameters as plain tensors, as far as the modules' classes show: none
    are split but by ``fully_shard``."""
    flat = _class("FullyShardedDataParallel")
    if flat is not None and any(isinstance(module, flat) for module in root.modules()):
        return False
    if any(is_sharded(module) for module in root.modules()):
        return True
    plain = (torch.Tensor, torch.nn.Parameter)
    return all(type(parameter) in plain for parameter in root.parameters())
