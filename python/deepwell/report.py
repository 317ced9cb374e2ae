"""The report of optimize() as text: each module replaced, each module left alone and why, totals."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Iterator

import torch

from deepwell import _deepwell
from deepwell.comparison import Timing
from deepwell.errors import UnsupportedError
from deepwell.precision import PrecisionPolicy, shown, told
from deepwell.targets import EmulatedGpu, Gpu, Target

if TYPE_CHECKING:
    from deepwell.runtime import Program

_RULE = "=" * 60
_KINDS = (
    ("Attention modules", ("attn", "attention")),
    ("MLP modules", ("mlp", "feedforward", "feed_forward")),
    ("Norm modules", ("norm",)),
    ("Linear modules", ("linear", "conv1d")),
    ("Embeddings", ("embedding",)),
)


def _kind(module: torch.nn.Module) -> str | None:
    """Returns the row of the totals that the module counts in."""
    name = type(module).__name__.lower()
    for label, fragments in _KINDS:
        if any(fragment in name for fragment in fragments):
            return label
    return None


@dataclass
class _Unit:
    """One module with a forward of Deepwell's, or one left to PyTorch."""

    path: str
    class_name: str
    inside: Counter[str] = field(default_factory=Counter)
    nodes: int = 0
    # Numbers of linear layers, by the name of their precision.
    precisions: Counter[str] = field(default_factory=Counter)
    patterns: set[str] = field(default_factory=set)  # of the policy, that apply to a layer
    program: weakref.ref[Program] | None = None  # of the last capture
    products: tuple[int, int, str] = (0, 0, "")  # Program.code_products of a program that is gone
    captures: int = 0
    capture_seconds: float = 0.0
    left_alone: str | None = None
    # Comparisons with PyTorch, by grad mode and sizes.
    timings: dict[str, Timing] = field(default_factory=dict)
    calls: int = 0
    seconds: float = 0.0  # total time of forwards, while profiling
    fallbacks: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def code_products(self) -> tuple[int, int, str]:
        program = self.program and self.program()
        return program.code_products() if program else self.products

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "program": None, "products": self.code_products()}


class Report:
    def __init__(
        self,
        root: torch.nn.Module,
        *,
        verbose: bool,
        profile: bool,
        target: Target,
        policy: PrecisionPolicy | None = None,
    ) -> None:
        dtypes = {str(p.dtype).removeprefix("torch.").upper() for p in root.parameters()}
        names = {"FLOAT32": "FP32", "BFLOAT16": "BF16", "FLOAT16": "FP16"}
        self._types = "/".join(sorted(names.get(d, d) for d in dtypes) or ["FP32"])
        self._policy = policy
        self._precision = None if policy is None else _called(policy)
        if self._precision:
            self._types += f", linear layers in {self._precision}"
        self.placed(target)
        self._header_stands = False
        self._units: dict[str, _Unit] = {}
        self._attention: dict[str, str] = {}  # attention that was replaced in what no graph holds
        self._verbose = verbose
        self.profile = profile
        self.announced = False

    def _unit(self, path: str, module: torch.nn.Module | None = None) -> _Unit:
        unit = self._units.get(path)
        if unit is None:
            unit = self._units[path] = _Unit(path, type(module).__name__ if module else "?")
        return unit

    def placed(self, target: Target) -> None:
        """Records where the model runs."""
        self._on_gpu = isinstance(target, (Gpu, EmulatedGpu))
        self._where, self._machine = _described(target)

    # ---- events --------------------------------------------------------------------------------------

    def installed(self, path: str, module: torch.nn.Module) -> None:
        self._unit(path, module)

    def leave(self, path: str, module: torch.nn.Module, reason: str) -> None:
        if self._precision and any(True for _ in module.parameters()):
            self._leave_precision(f"{path or 'the model'} is left to PyTorch", reason)
        self._unit(path, module).left_alone = reason

    def captured(self, path: str, module: torch.nn.Module, program, seconds: float) -> None:
        unit = self._unit(path, module)
        unit.captures += 1
        unit.capture_seconds += seconds
        unit.nodes = program.graph.node_count
        self.precisions_of(path, program)
        unit.inside = Counter(
            kind for submodule in module.modules() if (kind := _kind(submodule)) is not None
        )

    def precisions_of(self, path: str, program) -> None:
        if self._precision:
            unit, layers = self._unit(path), program.precisions()
            unit.program = weakref.ref(program)
            unit.precisions = Counter(
                shown(layer) if "operands" in layer else _OWN for layer in layers
            )
            unit.patterns = {layer["pattern"] for layer in layers if "pattern" in layer}

    def policy_changed(self, policy: PrecisionPolicy) -> None:
        self._policy, self._precision = policy, _called(policy)

    def measured(
        self,
        path: str,
        module: torch.nn.Module,
        grad: bool,
        timing: Timing,
        part: tuple[int, ...] | None,
        compiled: bool,
    ) -> None:
        """Records a comparison. ``part``: the sizes at which a large call was compared, if they are not the call's
        own. ``compiled``: torch.compile compiled PyTorch's side."""
        what = "forward + backward" if grad else "forward"
        if compiled:
            what += " (torch.compile)"
        if part is not None:
            what += f" (a part of the call, {' x '.join(map(str, part))})"
        self._unit(path, module).timings[what] = timing
        if timing.slower and self.announced and self._verbose:
            print(f"  [{path or 'model'}] {what} left to PyTorch: measured slower", flush=True)

    def attention(self, made: Any) -> None:
        """Records the attention that was replaced in a module that cannot be captured."""
        self._attention.update(made.replaced)

    def note(self, path: str, text: str) -> None:
        notes = self._unit(path).notes
        if text not in notes:
            notes.append(text)

    def count_call(self, path: str, seconds: float) -> None:
        unit = self._unit(path)
        unit.calls += 1
        unit.seconds += seconds

    def _leave_precision(self, what: str, reason: str) -> None:
        """Warns that something has the model's own precision, or raises an error if the policy is strict."""
        if self._policy is not None and self._policy.fallback == "strict":
            raise UnsupportedError(
                f"{what.replace('ran', 'would run').replace('is left', 'would be left')}, not in {self._precision}: "
                f"{reason}. The policy's fallback is 'strict': use 'safe' to allow this"
            )
        warnings.warn(
            f"deepwell: {what}, not in {self._precision}: {reason}", RuntimeWarning, stacklevel=3
        )

    def count_fallback(self, path: str, reason: str) -> None:
        fallbacks = self._unit(path).fallbacks
        if self._precision and not fallbacks[reason]:
            self._leave_precision(f"{path or 'the model'} ran in PyTorch", reason)
        fallbacks[reason] += 1

    def left_to_pytorch(self, but: str) -> list[tuple[str, str, str]]:
        """Returns path, class and reason of what PyTorch runs, or has run, for any reason but ``but``."""
        left = []
        for unit in self._units.values():
            reasons = [unit.left_alone] if unit.left_alone else list(unit.fallbacks)
            left += [(unit.path, unit.class_name, r) for r in reasons if r != but]
        return left

    # ---- text ----------------------------------------------------------------------------------------

    def announce_start(self) -> None:
        if self._verbose:
            self._header_stands = True
            print(self._header(), flush=True)
            print("  The first call captures the model; the replaced modules follow.", flush=True)

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[None]:
        """Shows on a terminal a line that names the slow operation, and then how long it took."""
        if not self._verbose or not sys.stdout.isatty():
            yield
            return
        print(f"  {what} ...", end="", flush=True)
        started = time.perf_counter()
        try:
            yield
        finally:
            print(f" {time.perf_counter() - started:.1f} s", flush=True)

    def announce(self) -> None:
        """Prints the summary once, after the first call has settled it."""
        if self.announced:
            return
        self.announced = True
        if self._verbose:
            print("\n".join(self._lines()) if self._header_stands else self.text(), flush=True)

    def _header(self) -> str:
        return f"{_RULE}\nDeepwell Optimizer - {self._where} {self._types}\n{_RULE}"

    def _policy_lines(self, units: list[_Unit]) -> list[str]:
        """Describes the policy in effect."""
        assert self._policy is not None
        sensitive = ", ".join(self._policy.sensitive_layers) or "none"
        lines = [f"  Policy: {self._precision}; sensitive layers: {sensitive}"]
        lines += [
            f"      {pattern}: {told(precision)}"
            for pattern, precision in self._policy.layers.items()
        ]
        matched = {pattern for unit in units for pattern in unit.patterns}
        lines += [
            f"      {pattern!r} applies to no linear layer: check the name with policy.table(model)"
            for pattern in self._policy.layers
            if pattern not in matched
        ]
        names = {name for unit in units for name in unit.precisions} - {_OWN, "BF16"}
        if self._on_gpu and names:
            lines += _codes_told(sorted(names), units)
        return lines

    def text(self) -> str:
        return "\n".join([self._header(), *self._lines()])

    def _lines(self) -> list[str]:
        lines: list[str] = []
        replaced = [u for u in self._units.values() if u.captures and not _all_slower(u)]
        alone = [u for u in self._units.values() if u not in replaced]
        for unit in replaced:
            name = unit.path or "model"
            lines.append(
                f"  [{name}] {unit.class_name} -> engine "
                f"({unit.nodes} nodes, captured in {unit.capture_seconds:.2f} s)"
            )
            if self._precision:
                lines.append(f"      {_layers_told(unit.precisions)}")
            lines += [f"      {what}: {_told(timing)}" for what, timing in unit.timings.items()]
            if self.profile and unit.calls:
                mean = unit.seconds / unit.calls * 1e3
                lines.append(f"      profile: {mean:.2f} ms per forward, over {unit.calls} calls")
            lines += _counts(unit)
        lines += [f"  [{path or 'model'}] {how}" for path, how in self._attention.items()]
        for unit in alone:
            lines.append(
                f"  [{unit.path or 'model'}] {unit.class_name} left alone: {_reason(unit)}"
            )
            lines += _counts(unit)
        if self._policy is not None and replaced:
            lines += self._policy_lines(replaced)
        lines += [_RULE, "Optimization Summary", _RULE]
        lines.append(f"Total modules replaced: {len(replaced) + len(self._attention)}")
        totals: Counter[str] = Counter()
        for unit in replaced:
            totals += unit.inside
        width = max((len(label) for label, _ in _KINDS), default=0) + 2
        for label, _ in _KINDS:
            if totals[label]:
                lines.append(f"  - {label + ':':{width}}{totals[label]}")
        lines.append(f"Modules left alone: {len(alone)}")
        lines.append(_RULE)
        if replaced:
            lines.append(f"✓ Model optimized for {self._where} ({self._machine})")
        elif self._attention:
            lines.append("✓ Attention runs in Deepwell")
        else:
            lines.append("The model runs in PyTorch as before.")
        return lines


def _codes_told(names: list[str], units: list[_Unit]) -> list[str]:
    """Returns what is multiplied as codes and what is simulated, on a GPU."""
    lines: list[str] = []
    whole = [name for name in names if name.startswith("FP8") and "FP8-BLOCK" not in name]
    blocks = ", ".join(name for name in names if name not in whole)
    if whole:
        lines.append(
            "  FP8 codes are multiplied as they are, by cuBLASLt where it takes their sizes"
        )
    if not blocks:
        return lines
    products = [unit.code_products() for unit in units]
    multiplied, simulated = (sum(each[i] for each in products) for i in range(2))
    reason = next((each[2] for each in products if each[2]), "")
    if multiplied:
        lines.append(
            f"  {blocks} on tensor cores: {multiplied} of {multiplied + simulated} products, forward and backward, "
            "multiply codes"
        )
    count = f"{simulated} product{'' if simulated == 1 else 's'}"
    how = _without_tensor_cores([name for name in names if name not in whole])
    if simulated and reason:
        lines.append(f"  {blocks} {how}: {count}, the first because {reason}")
    elif simulated and multiplied:
        lines.append(
            f"  {blocks} {how}: {count}, whose formats this GPU's tensor cores do not multiply"
        )
    elif simulated:
        cores = blocks.replace(", ", " or ")
        lines.append(f"  {blocks} {how}: this GPU has no {cores} tensor cores")
    return lines


def _without_tensor_cores(names: list[str]) -> str:
    """Returns how products with scales of blocks are computed where no tensor cores multiply their codes."""
    in_f32 = ["FP8-BLOCK" in name for name in names]
    if all(in_f32):
        return "multiplied in F16"
    return "simulated in BF16, FP8-BLOCK multiplied in F16" if any(in_f32) else "simulated in BF16"


# A layer that keeps the model's precision.
_OWN = "the model's own precision"


def _called(policy: PrecisionPolicy) -> str:
    """Returns the policy's name in capitals, or "a mixed precision"."""
    return "a mixed precision" if policy.name == "mixed" else policy.name.upper()


def _layers_told(precisions: Counter[str]) -> str:
    counted = [f"{count} in {name}" for name, count in precisions.most_common() if name != _OWN]
    if precisions[_OWN]:
        counted.append(f"{precisions[_OWN]} in {_OWN}")
    if not counted:
        return "no linear layers"
    first, *others = counted
    return ", ".join([first.replace(" in ", " linear layers in ", 1), *others])


_RUN_ON_A_GPU = "the whole model in the engine"
_UNPROVEN = "kernels proven on the emulator, not run on hardware, each checked at first use"


def _described(target: Target) -> tuple[str, str]:
    """Returns the target's short name, and what it is."""
    if isinstance(target, Gpu):
        name = torch.cuda.get_device_name(target.device)
        if torch.cuda.get_device_capability(target.device) != (9, 0):
            return name, f"{_RUN_ON_A_GPU}: {_UNPROVEN}"
        return name, _RUN_ON_A_GPU
    if isinstance(target, EmulatedGpu):
        return target.name, "emulated on the CPU"
    machine = json.loads(_deepwell.machine())
    return "CPU", f"{machine.get('isa', 'cpu')}, {torch.get_num_threads()} threads"


def _all_slower(unit: _Unit) -> bool:
    return bool(unit.timings) and all(timing.slower for timing in unit.timings.values())


def _told(timing: Timing) -> str:
    """Describes a comparison, without figures if the noise is larger than the difference."""
    where = (
        ", on one thread, because other programs kept preempting threads"
        if timing.one_thread
        else ""
    )
    if not timing.certain:
        verdict = "left to PyTorch" if timing.slower else "the engine runs"
        return f"no difference above the noise of {timing.rounds} rounds{where}: {verdict}"
    times = f"{timing.original * 1e3:.2f} ms in PyTorch, {timing.engine * 1e3:.2f} ms here"
    verdict = "left to PyTorch" if timing.slower else f"{timing.ratio:.2f}x"
    return f"{times}{where}: {verdict}"


def _reason(unit: _Unit) -> str:
    if unit.left_alone is not None:
        return unit.left_alone
    if unit.captures and _all_slower(unit):
        told = "; ".join(f"{what}: {_told(timing)}" for what, timing in unit.timings.items())
        return f"compared with PyTorch, {told}"
    if unit.fallbacks:
        return unit.fallbacks.most_common(1)[0][0]
    return "not called yet"


def _counts(unit: _Unit) -> list[str]:
    lines = []
    if unit.calls or unit.fallbacks:
        total = sum(unit.fallbacks.values())
        lines.append(f"      {unit.calls} calls by the engine, {total} by PyTorch")
    for reason, count in unit.fallbacks.most_common(4):
        lines.append(f"      {count} x PyTorch because {reason}")
    for note in unit.notes[-3:]:
        lines.append(f"      captured again: {note}")
    return lines
