"""Descriptions of this machine, and of hardware that is not present, for planning.

    hw = deepwell.probe()                # this machine
    hw = deepwell.hardware("b200:64")    # published figures
    hw = deepwell.hardware("cluster.json")
    deepwell.print_hardware_info(hw)

C code reads all values (deepwell/machine.h); this module names them. docs/hardware.md describes the figures and the
file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os

from deepwell import _deepwell
from deepwell.errors import DeepwellError

GB, GIB = 10**9, 2**30

# Names of the figures in a description's file.
_FIGURES = (
    "sm_count",
    "clock",
    "power",
    "memory",
    "memory_bandwidth",
    "cache",
    "host_bandwidth",
    "host_memory",
    "link_bandwidth",
    "link_latency",
    "network_bandwidth",
    "network_latency",
)


def _call(function, *arguments):
    try:
        return function(*arguments)
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number in SI units and its kind: published, read, measured, estimated or given."""

    value: float
    kind: str
    source: str = ""


def _figure(entry: dict | None) -> Figure | None:
    return None if entry is None else Figure(entry["value"], entry["kind"], entry["source"])


def _scaled(figure: Figure | None, unit: float) -> float | None:
    return None if figure is None else figure.value / unit


@dataclasses.dataclass(frozen=True)
class GPU:
    """One GPU. An unknown value is None. ``memory_gb`` is in 10^9 bytes, ``memory_gib`` in 2^30 bytes (what vendors and
    PyTorch call GB)."""

    name: str
    compute_capability: tuple[int, int]
    sm_version: str
    blackwell_variant: str | None
    formats: tuple[str, ...]
    rates: dict[str, Figure]
    figures: dict[str, Figure]
    uuid: str | None = None
    bus: str | None = None
    numa_node: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None

    @property
    def is_blackwell(self) -> bool:
        return self.blackwell_variant is not None

    @property
    def supports_mxfp8(self) -> bool:
        return "mxfp8" in self.formats

    @property
    def supports_fp4(self) -> bool:
        return "fp4" in self.formats

    @property
    def sm_count(self) -> int | None:
        figure = self.figures.get("sm_count")
        return None if figure is None else int(figure.value)

    @property
    def memory_gb(self) -> float | None:
        return _scaled(self.figures.get("memory"), GB)

    @property
    def memory_gib(self) -> float | None:
        return _scaled(self.figures.get("memory"), GIB)

    @property
    def memory_bandwidth_gb_s(self) -> float | None:
        return _scaled(self.figures.get("memory_bandwidth"), 1e9)

    @property
    def clock_mhz(self) -> float | None:
        return _scaled(self.figures.get("clock"), 1e6)


@dataclasses.dataclass(frozen=True)
class NVLink:
    """NVLink between the GPUs. The bandwidth is that of one GPU in one direction."""

    version: int
    gpus_per_domain: int
    bandwidth_gb_s: float | None
    switches: int | None


@dataclasses.dataclass(frozen=True)
class Link:
    """One NVLink, seen from GPU ``gpu``. ``to`` is gpu, switch, cpu or unknown; ``peer`` is set if ``to`` is gpu."""

    gpu: int
    link: int
    version: int
    to: str
    peer: int | None
    to_bus: str | None
    bandwidth_gb_s: float | None


def _split(capability: int) -> tuple[int, int]:
    return capability // 10, capability % 10


def _figures(entry: dict, names) -> dict[str, Figure]:
    return {name: _figure(entry[name]) for name in names if name in entry}


def _probed_gpu(entry: dict) -> GPU:
    major, minor = entry["compute_capability"].split(".")
    names = [name for name, value in entry.items() if isinstance(value, dict) and name != "rates"]
    return GPU(
        name=entry["name"],
        compute_capability=(int(major), int(minor)),
        sm_version=entry["sm_version"],
        blackwell_variant=entry["blackwell_variant"],
        formats=tuple(entry["formats"]),
        rates=_figures(entry["rates"], entry["rates"]),
        figures=_figures(entry, names),
        **{
            key: entry[key] for key in ("uuid", "bus", "numa_node", "pcie_generation", "pcie_lanes")
        },
    )


class Hardware:
    """A description of GPUs and their connections. ``figures`` and ``rates`` are those of one GPU, in SI units."""

    def __init__(self, text: str) -> None:
        self._text = text
        file = json.loads(text)
        self.name = file["name"]
        self.architecture = file["architecture"]
        self.gpu_count = file["gpus"]
        self.gpus_per_node = file["gpus_per_node"]
        self.gpus_per_domain = file["gpus_per_domain"]
        self.network = file["network"]
        self.rates = _figures(file["rates"], file["rates"])
        self.figures = _figures(file, _FIGURES)
        self.machine = file.get("machine")
        self.remarks = tuple(self.machine["remarks"]) if self.machine else ()
        self.cpu = self.machine["cpu"] if self.machine else None
        self.nics = self.machine["nics"] if self.machine else []
        self.paths = self.machine["paths"] if self.machine else []
        self._capability = file["capability"]
        self._link_version = file["link_version"]

    @functools.cached_property
    def gpus(self) -> list[GPU]:
        if self.machine is not None:
            return [_probed_gpu(entry) for entry in self.machine["gpus"]]
        variant = f"sm_{self._capability}" if 100 <= self._capability < 130 else None
        rates = {name: figure for name, figure in self.rates.items() if figure.value > 0}
        formats = [
            "fp16" if name == "bf16" and 0 < self._capability < 80 else name for name in rates
        ]
        gpu = GPU(
            name=self.name,
            compute_capability=_split(self._capability),
            sm_version=self.architecture,
            blackwell_variant=variant,
            formats=tuple(formats),
            rates=rates,
            figures=self.figures,
        )
        return [gpu] * self.gpu_count

    @property
    def nvlink(self) -> NVLink | None:
        if self._link_version == 0:
            return None
        return NVLink(
            version=self._link_version,
            gpus_per_domain=self.gpus_per_domain,
            bandwidth_gb_s=_scaled(self.figures.get("link_bandwidth"), 1e9),
            switches=None if self.machine is None else self.machine["switches"],
        )

    @property
    def links(self) -> list[Link]:
        """The NVLinks that are up. A profile has none, because it describes only the whole connection."""
        return [
            Link(
                **{key: entry[key] for key in ("gpu", "link", "version", "to", "peer", "to_bus")},
                bandwidth_gb_s=_scaled(_figure(entry.get("bandwidth")), 1e9),
            )
            for entry in (self.machine["links"] if self.machine else [])
        ]

    def to_json(self) -> str:
        """Returns the text of the file that ``deepwell.hardware`` and ``deepwell plan --hardware`` read."""
        return self._text

    def __repr__(self) -> str:
        return f"<Hardware {self.name}: {self.gpu_count} GPUs>"


def probe(measure: bool = False) -> Hardware:
    """Describes this machine. Without a GPU ``gpus`` is empty and ``cpu`` describes the CPU. ``measure`` also times
    copies, GEMMs and NCCL, which takes some seconds per GPU."""
    return Hardware(_call(_deepwell.machine_probe, bool(measure)))


def hardware(what: str | os.PathLike | dict) -> Hardware:
    """Reads a published profile ("h100", "gb200:144"), a file that describes hardware, or a dict with a file's
    contents."""
    if isinstance(what, dict):
        return Hardware(_call(_deepwell.hardware_parse, json.dumps(what)))
    if not isinstance(what, (str, os.PathLike)):
        raise TypeError(f"hardware is {type(what).__name__}: expected a name, a path or a dict")
    path = os.fspath(what)
    if not os.path.isfile(path):
        return Hardware(_call(_deepwell.hardware_named, path))
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        full = _call(_deepwell.hardware_parse, text)
    except (DeepwellError, UnicodeDecodeError) as error:
        raise DeepwellError(f'"{path}": {error}') from None
    machine = json.loads(text).get("machine")
    return Hardware(
        full if machine is None else json.dumps({**json.loads(full), "machine": machine}, indent=2)
    )


_MARKS = {"estimated": " (estimated)", "measured": " (measured)"}


def _shown(figure: Figure | None, unit: float, name: str) -> str:
    return (
        "" if figure is None else f"{figure.value / unit:.5g} {name}{_MARKS.get(figure.kind, '')}"
    )


def _gpu_lines(gpu: GPU) -> list[str]:
    parts = [
        f"{gpu.sm_count} SMs" if gpu.sm_count else "",
        _shown(gpu.figures.get("clock"), 1e6, "MHz"),
        _shown(gpu.figures.get("memory"), GIB, "GiB"),
        _shown(gpu.figures.get("memory_bandwidth"), 1e9, "GB/s"),
    ]
    rates = ", ".join(
        f"{name} {_shown(figure, 1e12, 'TFLOP/s')}" for name, figure in gpu.rates.items()
    )
    blackwell = f", Blackwell {gpu.blackwell_variant}" if gpu.is_blackwell else ""
    return [
        f"{gpu.name} ({gpu.sm_version}{blackwell})",
        "  " + ", ".join(part for part in parts if part),
        f"  {rates}",
    ]


def _lines(hw: Hardware) -> list[str]:
    gpus, lines, seen = hw.gpus, [], None
    lines.append(f"GPUs: {hw.gpu_count}" if hw.gpu_count == len(gpus) else f"GPUs: {len(gpus)}")
    for gpu in gpus:
        if gpu.name != seen:
            lines += _gpu_lines(gpu)
        seen = gpu.name
    if hw.nvlink:
        bandwidth = _shown(hw.figures.get("link_bandwidth"), 1e9, "GB/s each way")
        lines.append(f"NVLink {hw.nvlink.version}: {hw.nvlink.gpus_per_domain} GPUs, {bandwidth}")
    if hw.gpu_count and hw.network:
        lines.append(
            f"Network: {hw.network}, {_shown(hw.figures.get('network_bandwidth'), 1e9, 'GB/s per GPU')}"
        )
    if hw.cpu:
        lines.append(f"CPU: {hw.cpu['model'] or 'unknown'}, {hw.cpu['usable']} threads usable")
    return lines + [f"Note: {remark}" for remark in hw.remarks]


def print_hardware_info(hw: Hardware | None = None) -> None:
    """Prints a description of ``hw``, by default of this machine."""
    print("\n".join(_lines(probe() if hw is None else hw)))
