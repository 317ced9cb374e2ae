"""What a captured graph took for granted about its module, and a quick check that it still holds.

A graph is the module's forward at one moment: its submodules, parameters, flags and hooks. When any of
them changes, the graph is not the module's forward any more, and the original forward must run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as nn_module

_SIMPLE = (bool, int, float, str, type(None))
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
# Attributes that PyTorch itself changes as modules are used.
_UNWATCHED = frozenset(("training", "_is_full_backward_hook", "_is_hf_initialized"))


def _simple_items(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, _SIMPLE) and name not in _UNWATCHED
    }


def _configurations(module: torch.nn.Module) -> list[Any]:
    """Configuration objects that forward may consult (Hugging Face keeps one, shared)."""
    found: dict[int, Any] = {}
    for submodule in module.modules():
        config = submodule.__dict__.get("config")
        if config is not None and hasattr(config, "__dict__"):
            found[id(config)] = config
            for value in vars(config).values():
                if hasattr(value, "to_dict") and hasattr(value, "__dict__"):
                    found[id(value)] = value
    return list(found.values())


def hooked_submodule(module: torch.nn.Module) -> str | None:
    """Dotted name of a submodule with hooks that an engine would not run, or None.

    Hooks of ``module`` itself run around its forward as ever and do not count.
    """
    for name in _GLOBAL_HOOKS:
        if getattr(nn_module, name, None):
            return f"torch.nn.modules.module.{name}"
    for path, submodule in module.named_modules():
        if submodule is not module and any(getattr(submodule, hooks) for hooks in HOOKS):
            return path
    return None


class ModuleState:
    """A snapshot of everything a captured graph depends on, apart from the inputs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._root = module
        self._modules: list[tuple[Any, ...]] = []
        for path, submodule in module.named_modules():
            attributes = submodule.__dict__
            self._modules.append(
                (
                    path,
                    submodule,
                    attributes,
                    type(submodule),
                    [id(value) for value in submodule._parameters.values()],
                    [id(value) for value in submodule._buffers.values()],
                    [id(value) for value in submodule._modules.values()],
                    list(_simple_items(attributes).items()),
                    attributes.get("forward") if submodule is not module else None,
                )
            )
        self._configs = [
            (config, _simple_items(vars(config))) for config in _configurations(module)
        ]

    def changed(self) -> str | None:
        """None while everything is as it was; else what changed, for the summary."""
        for name in _GLOBAL_HOOKS:
            if getattr(nn_module, name, None):
                return f"global hooks ({name}) are registered"
        for record in self._modules:
            path, submodule, attributes, kind, parameters, buffers, children, simple, forward = (
                record
            )
            if (
                type(submodule) is not kind
                or [id(value) for value in attributes["_parameters"].values()] != parameters
            ):
                return f"parameters of '{path}' were replaced"
            if [id(value) for value in attributes["_buffers"].values()] != buffers:
                return f"buffers of '{path}' were replaced"
            if [id(value) for value in attributes["_modules"].values()] != children:
                return f"submodules of '{path}' were replaced"
            for name, value in simple:
                now = attributes.get(name, _MISSING)
                if now is not value and (now != value or type(now) is not type(value)):
                    return f"'{path}.{name}' changed from {value!r} to {now!r}"
            if submodule is not self._root:
                if attributes.get("forward") is not forward:
                    return f"forward of '{path}' was replaced"
                if (
                    attributes["_forward_hooks"]
                    or attributes["_forward_pre_hooks"]
                    or attributes["_backward_hooks"]
                    or attributes["_backward_pre_hooks"]
                ):
                    return f"hooks are registered on '{path}'"
        for config, items in self._configs:
            now = vars(config)
            for name, value in items.items():
                if now.get(name, _MISSING) != value:
                    return f"config.{name} changed from {value!r} to {now.get(name)!r}"
        return None


_MISSING = object()


def training_flags(modules: list[torch.nn.Module]) -> tuple[bool, ...]:
    return tuple([module.training for module in modules])


def unusual_mode() -> str | None:
    """A PyTorch mode under which a compiled engine must step aside, or None."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "called inside a torch.func transform"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "called under a TorchDispatchMode"
    if torch._C._is_torch_function_mode_enabled() and torch._C._len_torch_function_stack() > 0:
        # A default device set with torch.set_default_device is such a mode, and harmless.
        for index in range(torch._C._len_torch_function_stack()):
            mode = torch._C._get_function_stack_at(index)
            if type(mode).__name__ != "DeviceContext":
                return f"called under {type(mode).__name__}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if torch._C._get_tracing_state() is not None:
        return "being traced by torch.jit"
    return None
