"""Precisions, and policies that say which linear layers multiply which formats.

A ``PrecisionPolicy`` is a front of the C structure ``dw_precision_policy``: its text is read, checked and written by the
library (docs/precision.md), and ``deepwell train --precision FILE.json`` reads the same file.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from typing import Any, Mapping, Sequence

from deepwell import _deepwell
from deepwell.errors import UnsupportedError

OPERANDS = ("forward_x", "forward_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
_FORMAT = {"format": "deepwell.precision", "version": 1}


class Precision(str, enum.Enum):
    """The format of a GEMM's operands. A member equals its name in lower case."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    FP8_BLOCK = "fp8-block"
    MXFP8 = "mxfp8"
    MXFP6 = "mxfp6"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"

    @property
    def bits(self) -> int:
        """Bits of an element, without scales."""
        return {
            "fp32": 32,
            "fp16": 16,
            "bf16": 16,
            "fp8": 8,
            "fp8-block": 8,
            "mxfp8": 8,
            "mxfp6": 6,
        }.get(self.value, 4)

    @property
    def is_microscaled(self) -> bool:
        """True if blocks of 16 or 32 elements share a scale."""
        return self in (Precision.MXFP8, Precision.MXFP6, Precision.MXFP4, Precision.NVFP4)

    @property
    def requires_blackwell(self) -> bool:
        """True if only tensor cores from Blackwell on support it. Others compute the same numbers, more slowly."""
        return self.is_microscaled


@dataclasses.dataclass(frozen=True)
class MicroscalingConfig:
    """block_size: 32 (MX), 16 (NVFP4) or 128 (fp8-block). scale_rule (MX only): rceil, floor or ceil (docs/numbers.md)."""

    block_size: int = 32
    scale_rule: str = "rceil"

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32, 128):
            raise ValueError(
                f"block_size is {self.block_size}: expected 32 (MXFP8, MXFP6, MXFP4), 16 (NVFP4) or 128 (fp8-block)"
            )
        if self.scale_rule not in ("rceil", "floor", "ceil"):
            raise ValueError(f"scale_rule is {self.scale_rule!r}: expected rceil, floor or ceil")


@dataclasses.dataclass(frozen=True)
class PrecisionGuard:
    """When a layer goes back to BF16 during training (docs/precision.md). ``deepwell.Trainer`` obeys it.

    Args:
        every: steps from one sampled step to the next; 0: none is sampled.
        snr_db: a layer fails a sample if the signal-to-noise ratio of one of its operands is below this. None: below
            the bound that follows from the operand's format.
        underflow: it also fails if more than this share of an operand's elements other than 0 are rounded to 0.
        samples: failed samples in a row after which the layer falls back to BF16.
        repair: the share of the run's steps, the last ones, in which every layer is BF16.
    """

    every: int = 100
    snr_db: float | None = None
    underflow: float = 0.9
    samples: int = 2
    repair: float = 0.0


# Precisions that a policy may have, in the order of messages.
NAMES = ("fp32", "bf16", "fp8", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")


class PrecisionPolicy:
    """Which linear layers multiply operands of which precision, forward and backward.

    Args:
        default_compute: of all layers that the other arguments do not name. A ``Precision``, its name, or a mapping that
            changes operands of a recipe: ``{"recipe": "mxfp8", "dgrad_dy": "mxfp8-e5m2"}``. The operands are those of
            y = x w^T (forward_x, forward_w), dx = dy w (dgrad_dy, dgrad_w) and dw = dy^T x (wgrad_dy, wgrad_x).
        sensitive_layers: layers that keep the model's own precision. Words mean regions of the model: "embedding",
            "norm", "router", "final_linear" (also "lm_head", "head"), "loss", "attention", "mlp". Any other string is a
            module's name or a pattern. None: embedding, norm, router, final_linear and loss.
        microscaling: the block size, which must be that of the default precision, and the rule of MX's scales. None: 32
            (16 for NVFP4, 128 for fp8-block) and rceil.
        layers: precisions by the name or pattern of modules, as for ``default_compute``; a mapping without "recipe"
            changes operands of the default. The last match applies. A name here wins over a word for a region, and a name in
            ``sensitive_layers`` wins over a name here.
        bf16_share: the last layers with the default precision that are BF16 instead, as a fraction of their number.
            None: that of the recipe, 0.15 for NVFP4 and else 0.
        guard: a ``PrecisionGuard``: layers whose operands lose too much are BF16 from then on, and the last part of
            training is. None: nothing is sampled.
        fast_accumulation: True lets FP8 GEMMs of the forward pass sum in the accumulators of Hopper's tensor cores, which
            have about 14 bits, where that is faster. Other GPUs and the CPU sum as without it.
        fallback: "safe": what cannot run in the policy's precision runs in the model's own, in PyTorch if the engine
            cannot run it, with a ``RuntimeWarning`` for each reason. "strict": it raises ``UnsupportedError``.

    A name covers a module and all inside it. In a pattern ``*`` stands for any characters, dots included, ``?`` for
    one character and ``[0-3]`` for one of a set: "*.mlp.*", "model.layers.[01]".

    Raises:
        ValueError: an argument that does not exist or does not fit; the message names it.
        UnsupportedError: a format that linear layers do not support.
    """

    def __init__(
        self,
        default_compute: Precision | str | Mapping[str, str] = Precision.MXFP8,
        sensitive_layers: Sequence[str] | None = None,
        microscaling: MicroscalingConfig | None = None,
        *,
        layers: Mapping[str, Precision | str | Mapping[str, str]] | None = None,
        bf16_share: float | None = None,
        fallback: str = "safe",
        guard: PrecisionGuard | None = None,
        fast_accumulation: bool = False,
    ) -> None:
        text: dict[str, Any] = {**_FORMAT, "default": _json_of("default_compute", default_compute)}
        if isinstance(sensitive_layers, str):
            raise TypeError(
                f"sensitive_layers is the string {sensitive_layers!r}: expected a list, [{sensitive_layers!r}]"
            )
        if sensitive_layers is not None:
            text["sensitive_layers"] = list(sensitive_layers)
        if microscaling is not None:
            if not isinstance(microscaling, MicroscalingConfig):
                raise TypeError(
                    f"microscaling is a {type(microscaling).__name__}: expected a MicroscalingConfig"
                )
            text.update(dataclasses.asdict(microscaling))
        text["layers"] = [
            {"module": module, "precision": _json_of(f"layers[{module!r}]", precision)}
            for module, precision in (layers or {}).items()
        ]
        if bf16_share is not None:
            text["bf16_share"] = float(bf16_share)
        text["fallback"] = fallback
        if guard is not None:
            if not isinstance(guard, PrecisionGuard):
                raise TypeError(f"guard is a {type(guard).__name__}: expected a PrecisionGuard")
            given = dataclasses.asdict(guard)
            text["guard"] = {key: value for key, value in given.items() if value is not None}
        text["fast_accumulation"] = fast_accumulation
        try:
            self._read(json.dumps(text))
        except TypeError as error:  # of json: not a string
            raise TypeError(f"precision policy: {error}") from None

    def _read(self, text: str) -> None:
        try:
            self._policy = _deepwell.Policy(text)
        except _deepwell.Error as error:
            unsupported = getattr(error, "status", "") == "UNSUPPORTED"
            raise (UnsupportedError if unsupported else ValueError)(str(error)) from None
        self._text: str = self._policy.json()
        self._parsed: dict[str, Any] = json.loads(self._text)

    # ---- members ---------------------------------------------------------------------------------

    @property
    def default_compute(self) -> Precision | dict[str, str]:
        """A precision, or the operands' schemes if no recipe has them."""
        return _precision_of(self._parsed["default"])

    @property
    def sensitive_layers(self) -> tuple[str, ...]:
        return tuple(self._parsed["sensitive_layers"])

    @property
    def layers(self) -> dict[str, Precision | dict[str, str]]:
        found: dict[str, Any] = {}
        for entry in self._parsed["layers"]:
            found.pop(entry["module"], None)  # the last match applies
            found[entry["module"]] = _precision_of(entry["precision"])
        return found

    @property
    def microscaling(self) -> MicroscalingConfig | None:
        """None if the default precision has no blocks."""
        block = self._parsed.get("block_size")
        if block is None:
            return None
        return MicroscalingConfig(block, self._parsed.get("scale_rule", "rceil"))

    @property
    def bf16_share(self) -> float:
        return self._parsed["bf16_share"]

    @property
    def fallback(self) -> str:
        return self._parsed["fallback"]

    @property
    def guard(self) -> PrecisionGuard | None:
        """None if nothing is sampled and no part of training is repaired."""
        guard = self._parsed.get("guard")
        return None if guard is None else PrecisionGuard(**guard)

    @property
    def fallen_back(self) -> tuple[str, ...]:
        """Modules whose layers are BF16 because a guard found their format too short."""
        return tuple(self._parsed.get("fallen_back", ()))

    def with_fallen_back(self, modules: Sequence[str]) -> PrecisionPolicy:
        """Returns this policy with more layers that have fallen back to BF16."""
        made = _deepwell.precision_with_fallen_back(self._text, tuple(modules))
        return PrecisionPolicy.from_json(made)

    def in_bf16(self) -> PrecisionPolicy:
        """Returns the policy that rounds to BF16 what this one quantizes, as in the repair at the end of training."""
        return PrecisionPolicy.from_json(_deepwell.precision_in_bf16(self._text))

    @property
    def fast_accumulation(self) -> bool:
        return self._parsed.get("fast_accumulation", False)

    @property
    def name(self) -> str:
        """The default precision's name, or "mixed"."""
        default = self._parsed["default"]
        return default if isinstance(default, str) else "mixed"

    # ---- files -------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the policy as JSON (docs/precision.md)."""
        return self._text

    @classmethod
    def from_json(cls, text: str) -> PrecisionPolicy:
        """Reads what ``to_json`` wrote. Raises ValueError for anything else."""
        policy = cls.__new__(cls)
        policy._read(text)
        return policy

    def save(self, path: str | os.PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrecisionPolicy:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    def __reduce__(self) -> Any:
        return (PrecisionPolicy.from_json, (self._text,))

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, PrecisionPolicy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    # ---- layers ------------------------------------------------------------------------------------

    @property
    def needs_seed(self) -> bool:
        """Whether gradients are rounded stochastically."""
        return self._policy.needs_seed

    def choices(self, graph: _deepwell.Graph) -> list[dict[str, Any]]:
        """Returns what each linear layer of a captured graph has, and why."""
        return json.loads(self._policy.layers(graph))

    def table(self, model: Any, example_inputs: Any = None) -> str:
        """Returns a table of the model's linear layers, and of experts where the policy may quantize them: the scheme
        of each operand, "-" for the model's own, and why.

        Nothing is computed, and the model may be on the meta device.

        Args:
            model: any module.
            example_inputs: as for ``deepwell.capture``.

        Raises:
            CaptureError: the model cannot be captured as a whole.
        """
        from deepwell.ir import capture

        graph = _deepwell.Graph(capture(model, example_inputs).captured.json)
        rows = []
        for layer in self.choices(graph):
            operands = layer.get("operands")
            cells = [(operands or {}).get(name, "-") for name in OPERANDS]
            rows.append([layer["module"] or "(the model)", *cells, _reason(layer)])
        names = [*self.layers, *self.sensitive_layers[self._words() :]]
        unused = [name for name in names if not any(repr(name) in row[-1] for row in rows)]
        lines = [_aligned([["layer", *OPERANDS, "why"], *rows])]
        lines += [f"{name!r} applies to no linear layer of this model" for name in unused]
        return "\n".join(lines)

    def _words(self) -> int:
        """Returns how many sensitive layers are words for regions; they are the first ones."""
        names = len(self._policy.operands()) - 1 - len(self._parsed["layers"])
        return len(self._parsed["sensitive_layers"]) - names

    def __str__(self) -> str:
        parsed = self._parsed
        title = f"PrecisionPolicy, fallback {parsed['fallback']}"
        if "block_size" in parsed:
            title += f", blocks of {parsed['block_size']}"
        if "scale_rule" in parsed:
            title += f", scales by {parsed['scale_rule']}"
        if self.fast_accumulation:
            title += ", fast accumulation in forward"
        default, *others = [_cells(operands) for operands in self._policy.operands()]
        modules = [entry["module"] for entry in parsed["layers"]]
        words = self._words()
        rows = [["layers", *OPERANDS], ["all", *default]]
        if parsed["bf16_share"]:
            rows.append([f"the last {parsed['bf16_share']:.0%} of them", *["bf16"] * len(OPERANDS)])
        rows += [[f"region {word}", *_KEPT] for word in parsed["sensitive_layers"][:words]]
        names = [*modules, *parsed["sensitive_layers"][words:]]
        rows += [[name, *cells] for name, cells in zip(names, others)]
        rows += [[name, *["bf16"] * len(OPERANDS)] for name in self.fallen_back]
        text = f"{title}\n{_aligned(rows)}\nThe last row that fits a layer applies. -: the model's own precision."
        return text if self.guard is None else f"{text}\n{_guard_told(self.guard)}"

    def __repr__(self) -> str:
        parts = [repr(self.default_compute), f"sensitive_layers={list(self.sensitive_layers)}"]
        if self.microscaling is not None:
            parts.append(f"microscaling={self.microscaling}")
        if self.layers:
            parts.append(f"layers={self.layers}")
        if self.bf16_share:
            parts.append(f"bf16_share={self.bf16_share}")
        if self.fallback != "safe":
            parts.append(f"fallback={self.fallback!r}")
        if self.guard is not None:
            parts.append(f"guard={self.guard}")
        if self.fast_accumulation:
            parts.append("fast_accumulation=True")
        return f"PrecisionPolicy({', '.join(parts)})"


def policy_of(precision: Any) -> PrecisionPolicy | None:
    """Returns the policy for the argument ``precision`` of deepwell.optimize; None for the model's own precision."""
    if isinstance(precision, PrecisionPolicy):
        return precision
    if isinstance(precision, str):
        name = str(precision.value if isinstance(precision, Precision) else precision)
        if name in ("auto", "fp32"):
            return None
        if name in NAMES:
            return PrecisionPolicy(name)
        if name in Precision._value2member_map_:
            raise UnsupportedError(
                f"precision={name!r} is not supported: use one of {', '.join(NAMES)}, or a model in that type"
            )
    raise ValueError(
        f"precision={precision!r} does not exist: use one of auto, {', '.join(NAMES)}, or a deepwell.PrecisionPolicy"
    )


_KEPT = ("-",) * len(OPERANDS)


def _cells(operands: Sequence[str]) -> Sequence[str]:
    return _KEPT if set(operands) == {"fp32"} else operands


def _guard_told(guard: PrecisionGuard) -> str:
    parts = []
    if guard.every:
        bound = "its format's bound" if guard.snr_db is None else f"{guard.snr_db:g} dB"
        times = "once" if guard.samples == 1 else f"{guard.samples} times in a row"
        parts.append(
            f"every {guard.every} steps operands are sampled; a layer below {bound}, or with more than "
            f"{guard.underflow:.0%} of an operand rounded to 0, {times} falls back to BF16"
        )
    if guard.repair:
        parts.append(f"the last {guard.repair:.0%} of the steps are BF16")
    return f"Guard: {'; '.join(parts)}."


def _json_of(what: str, precision: Any) -> Any:
    if isinstance(precision, Precision):
        return precision.value
    if isinstance(precision, Mapping):
        return {
            key: value.value if isinstance(value, Precision) else value
            for key, value in precision.items()
        }
    if not isinstance(precision, str):
        raise TypeError(
            f"{what} is a {type(precision).__name__}: expected a Precision, its name, or a mapping of operands"
        )
    return precision


def _precision_of(written: Any) -> Precision | dict[str, str]:
    return Precision(written) if isinstance(written, str) else dict(written)


def _reason(layer: Mapping[str, Any]) -> str:
    """Says why a layer has its precision."""
    return {
        "default": "the default",
        "region": f"the region {layer['region']} is sensitive",
        "module": f"matches {layer.get('pattern')!r}",
        "share": "among the last, which are BF16",
        "f64": "computes in FP64",
        "bf16": "is BF16 already",
        "guard": "fell back to BF16 by the guard",
    }[layer["reason"]]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def shown(layer: Mapping[str, Any]) -> str:
    """Returns a layer's precision in capitals: "MXFP8", or the schemes of its operands if it is no recipe's."""
    return told(Precision(layer["name"]) if "name" in layer else layer["operands"])


def told(precision: Precision | Mapping[str, str]) -> str:
    """Returns a precision's name in capitals, or the schemes of its operands."""
    if isinstance(precision, Precision):
        return precision.value.upper()
    schemes = dict.fromkeys(text.partition("+")[0] for text in precision.values())
    return "/".join(schemes).upper()
