"""optimize() on a GPU: each attention of a model runs in Deepwell; the rest of the model does not change."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import torch

from deepwell.attention import encoder, functional, huggingface, tune
from deepwell.attention.instance import InstanceForward
from deepwell.attention.multihead import MultiheadForward, why_not_module
from deepwell.linear import UNPROVEN
from deepwell.linear import fallbacks as linear_fallbacks

_MARK = "_deepwell_attention"
_RULE = "=" * 60


class Installation:
    """The record of what install() did to one model, stored as its attribute. A copied or loaded model has its own."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.linear: dict[str, str] = {}

    def add_linear(self, replaced: dict[str, str], left: dict[str, str]) -> None:
        self.linear.update(replaced)
        if replaced and list(self.left) == [""]:
            self.left.clear()  # removes the note that there is no attention
        self.left.update(left)

    def mark(self, root: torch.nn.Module) -> None:
        root.__dict__[_MARK] = self

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.linear = {}  # missing in models saved by an earlier version
        self.__dict__.update(saved)
        if any("transformers" in how for how in self.replaced.values()):
            importlib.import_module("transformers")
            huggingface.register()  # the loaded model's configuration names it

    def text(self, root: torch.nn.Module) -> str:
        lines = [_RULE, f"Deepwell Optimizer - {self.title}", _RULE]
        both = {**self.replaced, **self.linear}
        lines += [f"  [{path or 'model'}] {how}" for path, how in both.items()]
        lines += [
            f"  [{path or 'model'}] left alone: {reason}" for path, reason in self.left.items()
        ]
        lines += [_RULE, "Optimization Summary", _RULE]
        lines.append(f"Total modules replaced: {len(both)}")
        if self.replaced:
            lines.append(f"  - Attention modules: {len(self.replaced)}")
        if self.linear:
            lines.append(f"  - Linear layers: {len(self.linear)}, by kernels that are {UNPROVEN}")
        lines.append(f"Modules left alone: {len(self.left)}")
        counted: Counter[str] = Counter(functional.fallbacks)
        for module in root.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, MultiheadForward):
                counted += forward.fallbacks
        for reason, count in counted.most_common(6):
            lines.append(f"  {count} x PyTorch's attention in this process because {reason}")
        for reason, count in linear_fallbacks.most_common(6) if self.linear else ():
            lines.append(f"  {count} x PyTorch's linear layer in this process because {reason}")
        if tune.tuner.measured:
            lines.append(
                f"  Classes of shapes measured in this process: {len(tune.tuner.measured)}"
            )
        lines += [f"  Measuring: {note}" for note in tune.tuner.notes]
        lines.append(_RULE)
        if self.linear:
            both_run = "Attention and linear layers" if self.replaced else "Linear layers"
            lines.append(f"✓ {both_run} run in Deepwell")
        else:
            lines.append(
                "✓ Attention runs in Deepwell"
                if self.replaced
                else "The model runs in PyTorch as before."
            )
        return "\n".join(lines)


def install(root: torch.nn.Module, title: str) -> Installation:
    """Replaces every attention of ``root`` that can be replaced, and records the others with the reason."""
    made = Installation(title)
    for path, model in huggingface.models(root):
        reason = huggingface.why_not(model)
        if reason:
            made.left[path] = f"{type(model).__name__}: {reason}"
            continue
        model.config._attn_implementation_internal = huggingface.replacement(model)
        for module in model.modules():
            huggingface.note_positions(module)
        for inner, module in huggingface.attention_modules(model, path).items():
            made.replaced[inner] = f"{type(module).__name__} -> attention, through transformers"
    for path, module in root.named_modules():
        if not isinstance(module, torch.nn.MultiheadAttention):
            continue
        reason = why_not_module(module)
        if reason:
            made.left[path] = f"{type(module).__name__}: {reason}"
            continue
        module.__dict__["forward"] = MultiheadForward(module)
        made.replaced[path] = f"{type(module).__name__} -> attention"
    for module in reversed(list(root.modules())):  # layers before the encoders that contain them
        encoder.install(module)
    if not made.replaced and not made.left:
        made.left[""] = f"{type(root).__name__}: it has no attention that Deepwell supports"
    made.mark(root)
    return made


def restore(model: torch.nn.Module) -> None:
    """Undoes install() in ``model``, also in a part or a copy of the model on which it was called."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, InstanceForward):
            del module.__dict__["forward"]
        config = getattr(module, "config", None)
        named = getattr(config, "_attn_implementation_internal", None)
        if named in huggingface.BEFORE:
            config._attn_implementation_internal = huggingface.BEFORE[named]
        huggingface.forget_positions(module)
        module.__dict__.pop(_MARK, None)


def installation(model: torch.nn.Module) -> Installation | None:
    """Returns what install() did to this very module."""
    return model.__dict__.get(_MARK)


def installed(model: torch.nn.Module) -> str | None:
    """Returns the summary of a model on which install() was called."""
    for module in model.modules():
        made = module.__dict__.get(_MARK)
        if made is not None:
            return made.text(module)
    return None
