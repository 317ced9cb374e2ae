"""Finds the part of a model that a node belongs to, from the names and classes of its modules."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Tuple

from .builder import Origin

# (region, words of attribute or class). The innermost module is tried first, and the first matching rule wins.
_RULES: Tuple[Tuple[str, "re.Pattern[str]"], ...] = (
    ("router", re.compile(r"router|gating|gate$|topk")),
    ("experts", re.compile(r"experts?$|expert(s)?\d*$")),
    ("norm", re.compile(r"norm|^ln_|^ln\d")),
    ("loss", re.compile(r"loss|criterion")),
    ("head", re.compile(r"(^|_)head$|lm_head|score$|classifier$|qa_outputs$")),
    ("attn", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_?forward|^linear[12]$|^fc\d?$")),
    ("embed", re.compile(r"embed|^w[tp]e$|rotary")),
)
_LOSS_OPERATIONS = ("cross_entropy_loss", "nll_loss", "mse_loss", "l1_loss")


def origin_of(stack: Mapping[str, Any], cache: Dict[Tuple, Origin]) -> Origin:
    """Returns the origin for PyTorch's nn_module_stack: {key: (dotted path, class or its name)}."""
    key = tuple(entry[0] for entry in stack.values())
    found = cache.get(key)
    if found is None:
        found = cache[key] = _make_origin([_entry(e) for e in stack.values()])
    return found


def is_loss(operation: str) -> bool:
    return operation.partition(".")[0] in _LOSS_OPERATIONS


def _entry(entry: Tuple[str, Any]) -> Tuple[str, str]:
    path, kind = entry
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    # Old and new PyTorch write the root as "L['self']" or leave it empty.
    path = re.sub(r"^L\['self'\]\.?", "", path)
    path = re.sub(r"^module(\.|$)", "", path)  # where capture keeps the traced module
    return path, name.rpartition(".")[2]


def _make_origin(stack: List[Tuple[str, str]]) -> Origin:
    path = stack[-1][0] if stack else ""
    region = "none"
    for module_path, kind in reversed(stack[1:]):
        attribute = module_path.rpartition(".")[2].lower()
        region = next((r for r, words in _RULES if words.search(attribute)), "none")
        if region == "none" and not kind.lower().endswith(("model", "lm")):
            region = next((r for r, words in _RULES if words.search(kind.lower())), "none")
        # A gate projection inside an MLP is not a router.
        if region == "router" and "mlp" in module_path.lower() and "proj" in attribute:
            region = "none"
        if region != "none":
            break
    return Origin(region, _layer(path), path)


def _layer(path: str) -> int:
    return next((int(part) for part in path.split(".") if part.isdigit()), -1)


def moved(origin: Origin, old: str, new: str) -> Origin:
    """Returns the origin in layer `new` that corresponds to one in layer `old`, of the same kind."""
    if origin.module != old and not origin.module.startswith(old + "."):
        return origin
    path = new + origin.module[len(old) :]
    return Origin(origin.region, _layer(path), path)
