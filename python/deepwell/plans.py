"""Plans: the layout of a training run on GPUs, and the cost of a step.

    plan = deepwell.autoplan("llama3-70b", hw="h100:64", seq_len=8192, global_batch=256)
    print(plan.explain())
    plan.save("plan.json")               # for `deepwell dryrun --plan`
    plan = deepwell.Plan.load("plan.json")

C code does the search (deepwell/autoplan.h); this module names its results. docs/autoplan.md says what is considered.
"""

from __future__ import annotations

import json
import os
import re
import types
import warnings
from typing import Any, Iterable, Mapping

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.host_plan import HostPlan, host_plan
from deepwell.machine import GB, GIB, Hardware, hardware, probe

# Keys of `moe` besides the capacity factor: the planner's fields of a mixture.
_MOE = ("experts", "top_k", "expert_ffn", "shared_ffn", "dense_layers", "moe_every")


def _call(function, *arguments):
    try:
        return function(*arguments)
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None


class Plan:
    """A layout and its prediction.

    ``layout``, ``prediction`` and ``model`` have the fields of the file. If nothing fits, ``fits`` is False,
    ``tightest`` names the part of the memory that is short, and ``gpus_needed`` is the number of GPUs that would be
    enough. ``kernels`` names the kernel of each operation. ``unmeasured`` names the parts of the layout without a known
    measurement ("": all are measured), and ``bolder`` lists layouts with such parts that are predicted to be faster.
    ``remarks`` says what to know before using the plan, such as that the framework's training is not built yet."""

    def __init__(self, text: str) -> None:
        self._text = text
        file = json.loads(text)
        self.model_name: str = file["model"]["name"]
        self.model = types.SimpleNamespace(**file["model"])
        self.layout = types.SimpleNamespace(**file["layout"])
        self.prediction: dict[str, Any] = file["prediction"]
        self.runners_up: list[dict[str, Any]] = file["runners_up"]
        self.what_ifs: list[dict[str, Any]] = file["what_ifs"]
        self.kernels: list[dict[str, Any]] = file["kernels"]
        self.statistics: dict[str, float] = file["statistics"]
        self.bolder: list[dict[str, Any]] = file["bolder"]
        self.unmeasured: str = file["unmeasured"]
        self.remarks: list[str] = file["remarks"]
        self.tightest: str = file["tightest"]
        self.gpus_needed: int = file["gpus_needed"]
        self.fits: bool = self.prediction["fits"]
        self._hardware = file["hardware"]

    @property
    def hardware(self) -> Hardware:
        return Hardware(json.dumps(self._hardware))

    @property
    def step_time_ms(self) -> float:
        return 1e3 * self.prediction["seconds"]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.prediction["tokens_per_second"]

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, relative to the BF16 peak in every precision. With FP8 it may exceed 1."""
        return self.prediction["mfu"]

    @property
    def bubble_fraction(self) -> float:
        return self.prediction["bubble_fraction"]

    @property
    def memory_gb(self) -> float:
        """10^9 bytes of the most loaded GPU, including everything that nvidia-smi counts."""
        return self.prediction["used"] / GB

    @property
    def memory_gib(self) -> float:
        return self.prediction["used"] / GIB

    def explain(self) -> str:
        """Returns the plan as text, with the runners-up and the additional time of each."""
        return _call(_deepwell.autoplan_text, self._text, True)

    def to_json(self) -> str:
        """Returns the text of the plan's file."""
        return self._text

    def save(self, path: str | os.PathLike) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._text)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        with open(path, encoding="utf-8") as file:
            return cls.from_json(file.read())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads and checks the text. Adds the prediction if it is missing."""
        return cls(_call(_deepwell.autoplan_parse, text))

    def __str__(self) -> str:
        return _call(_deepwell.autoplan_text, self._text, False)

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"<Plan {self.model_name or 'of a model'} on {layout.gpus} GPUs: tp {layout.tp}, cp {layout.cp}, "
            f"pp {layout.pp}, dp {layout.dp}, ep {layout.ep}, {'fits' if self.fits else 'does not fit'}>"
        )


def _model_of(what: Any) -> tuple[str, dict[str, Any]]:
    """Returns the model's name and the planner's fields."""
    if isinstance(what, (str, os.PathLike)):
        path = os.fspath(what)
        return os.path.basename(os.path.normpath(path)), _call(_deepwell.planner_model, path)
    if isinstance(what, Mapping):
        return str(what.get("name", "")), {key: what[key] for key in what if key != "name"}
    config = getattr(what, "config", None)
    if hasattr(config, "to_json_string"):
        text = config.to_json_string(use_diff=False)
        return type(what).__name__, _call(_deepwell.planner_model_parse, text)
    if hasattr(what, "captured"):
        return what.name, _call(_deepwell.planner_model_of_graph, what.captured.json)
    raise DeepwellError(
        f"a plan needs a model's name, a Hugging Face folder, its config.json, a Hugging Face model, the result of "
        f"deepwell.capture, or a dict of the planner's fields; got {type(what).__name__}"
    )


_LOADS = ("capacity_factor", "imbalance")


def _load_of(moe: Mapping[str, Any]) -> list[str]:
    """Returns the load of the heaviest expert rank as a constraint: the capacity factor, or the imbalance of
    routing."""
    for name in _LOADS:
        factor = moe.get(name)
        if factor is None:
            continue
        if (
            isinstance(factor, bool)
            or not isinstance(factor, (int, float))
            or not 1 <= factor <= 1000
        ):
            raise DeepwellError(
                f"moe's {name} is {factor!r}; expected 1 to 1000 times an even share. Values below 1 drop tokens, "
                f"which plans do not support"
            )
        return [f"expert_load={round(100 * factor)}"]
    return []


def _with_experts(model: dict[str, Any], moe: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [key for key in moe if key not in _MOE and key not in _LOADS]
    if unknown or ("experts" not in moe and not model.get("experts")):
        raise DeepwellError(
            f"moe has {', '.join(map(repr, unknown)) or 'no experts'}; expected experts, and optionally top_k, expert_ffn, "
            f"shared_ffn, dense_layers, moe_every, capacity_factor, imbalance"
        )
    if not any(key in _MOE for key in moe):
        return model
    moe = {"experts": model.get("experts"), **moe}
    given = {key: moe[key] for key in _MOE if key in moe}
    changed = {
        **model,
        "top_k": model.get("top_k") or min(2, moe["experts"]),
        "expert_ffn": model.get("expert_ffn") or model.get("ffn", 0),
        "moe_every": model.get("moe_every") or 1,
        **given,
    }
    changed["parameters"] = changed["active"] = 0.0  # computed from the widths
    return changed


# The published profile of GPUs with each compute capability.
_PROFILES = {90: "h100", 100: "b200", 103: "b300", 120: "rtx5090"}


def _with_arch(arch: str, hw: Hardware) -> Hardware:
    """Checks that the number in "blackwell-sm100" or "sm_90a" is the hardware's. If ``hw`` is this machine, which has no
    such GPU, returns the published profile of one, with a warning: as many as there are GPUs here, or one node."""
    number = re.search(r"sm_?(\d+)", arch)
    if number is None:
        raise DeepwellError(f"arch is {arch!r}; expected a name with sm and a number: sm100")
    capability = int(number[1])
    if capability == hw._capability and hw.gpu_count > 0:
        return hw
    profile = _PROFILES.get(capability)
    if hw.machine is None or profile is None:
        elsewhere = 'name the GPUs to plan for, such as hw="b200:8", or leave it out'
        has = f"{hw.name} is {hw.architecture}" if hw.gpu_count else f"{hw.name} has no GPUs"
        raise DeepwellError(f"arch is {arch!r}, and {has}: {elsewhere}")
    count = hw.gpu_count or hardware(profile).gpus_per_node
    has = f"{hw.architecture} GPUs" if hw.gpu_count else "no GPUs"
    warnings.warn(
        f'deepwell: this machine has {has}; the plan for {arch} is for the profile "{profile}:{count}". Pass it as hw to '
        "plan for it without this warning",
        stacklevel=3,
    )
    return hardware(f"{profile}:{count}")


def _check_for_host(hw: Hardware, moe: Mapping[str, Any] | None) -> None:
    """Refuses arguments that need GPUs if the machine has none."""
    if moe is not None:
        raise UnsupportedError(
            f"moe replaces a model's MLPs by experts in a plan for GPUs. {hw.name} has no GPUs and runs the model as it "
            'is: name the GPUs to plan for, such as hw="b200:8" or arch="blackwell-sm100", or leave it out'
        )


def _precision_of(precision: Any) -> int:
    names = _deepwell.autoplan_precisions()
    name = str(getattr(precision, "value", precision)).lower().replace("_", "-")
    if name == "auto":
        return -1
    if name == "fp8":  # deepwell.Precision.FP8 has one scale per tensor
        name = "fp8-tensor"
    if name not in names:
        raise DeepwellError(
            f"precision is {precision!r}; expected auto or one of {', '.join(names)}"
        )
    return names.index(name)


def autoplan(
    model: Any,
    *,
    hw: Hardware | str | os.PathLike | Mapping | None = None,
    seq_len: int,
    global_batch: int,
    arch: str | None = None,
    moe: Mapping[str, Any] | None = None,
    precision: Any = None,
    constraints: Iterable[str] | Mapping[str, Any] = (),
    reserve_gb: float | None = None,
    what_ifs: bool = True,
    bold: bool = False,
) -> Plan | HostPlan:
    """Finds the fastest layout that fits, of all layouts whose sizes divide evenly.

    ``model``: a name ("llama3-70b"), a Hugging Face folder, config.json or model, the result of ``deepwell.capture``,
    or a dict of the planner's fields. ``hw``: as for ``deepwell.hardware``; None is this machine. ``global_batch``:
    sequences per optimizer step. ``arch``: "blackwell-sm100" and the like must be what ``hw`` has; if ``hw`` is this
    machine and has no such GPU, the plan is for the published profile of one, and a warning names it.
    ``constraints``: {"tp": 8} or ["tp=8", "pp<=4"]. ``moe``: replaces the model's MLPs by experts, {"experts": 8,
    "top_k": 2}; "capacity_factor" or "imbalance" give the tokens of the most loaded expert rank, relative to an even
    share. ``reserve_gb``: 10^9 bytes of each GPU (or of the host) to leave free; None is 5 %. ``precision``: of the
    GEMMs; None is BF16. ``bold``: True allows layouts with parts that have no known measurement; by default they are
    only listed, as ``plan.bolder``.

    The default framework is "deepwell", whose training on GPUs is not built yet (``plan.remarks`` says so).
    constraints={"framework": "megatron"} plans for a framework that runs today.

    For hardware without GPUs the plan is for Deepwell's own engine on the CPU. The result is a ``HostPlan`` with the
    largest micro-batch that fits. ``model`` is then a module (it may be on the meta device), the result of
    ``deepwell.capture``, or a name or folder as for ``deepwell train``. ``precision`` is as for ``optimize``, None is
    FP32. The only constraint is micro_batch=N.
    """
    if hw is None:
        hw = probe()
    elif not isinstance(hw, Hardware):
        hw = hardware(dict(hw) if isinstance(hw, Mapping) else hw)
    if isinstance(constraints, Mapping):
        constraints = [f"{key}={value}" for key, value in constraints.items()]
    if arch is not None:
        hw = _with_arch(arch, hw)
    if hw.gpu_count == 0:
        _check_for_host(hw, moe)
        precision = "fp32" if precision is None else precision
        return host_plan(
            model, hw, int(seq_len), int(global_batch), precision, constraints, reserve_gb
        )
    name, fields = _model_of(model)
    if moe is not None:
        constraints = [*constraints, *_load_of(moe)]
        fields = _with_experts(fields, moe)
    return Plan(
        _call(
            _deepwell.autoplan_search,
            name,
            fields,
            hw.to_json(),
            int(seq_len),
            int(global_batch),
            _precision_of("bf16" if precision is None else precision),
            tuple(constraints),
            -1.0 if reserve_gb is None else float(reserve_gb) * GB,
            what_ifs,
            bold,
        )
    )
