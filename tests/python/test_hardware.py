"""deepwell.probe, hardware and print_hardware_info."""

import json
import os
import subprocess
import sys
from pathlib import Path

import deepwell as dw
import pytest

FAKES = Path(__file__).parents[2] / "build" / "release" / "fake"


def test_a_profile():
    hw = dw.hardware("b200:64")
    assert hw.name == "b200" and hw.gpu_count == 64 and len(hw.gpus) == 64
    gpu = hw.gpus[63]
    assert gpu.compute_capability == (10, 0) and gpu.sm_version == "sm_100a"
    assert gpu.is_blackwell and gpu.blackwell_variant == "sm_100"
    assert gpu.supports_mxfp8 and gpu.supports_fp4
    assert 170 < gpu.memory_gib < 192 and gpu.memory_bandwidth_gb_s == 7700
    assert gpu.memory_gb == pytest.approx(gpu.memory_gib * 1.073741824)
    assert gpu.sm_count == 148
    assert (
        hw.nvlink.version == 5
        and hw.nvlink.bandwidth_gb_s == 900
        and hw.nvlink.gpus_per_domain == 8
    )
    assert hw.links == [] and hw.nvlink.switches is None
    assert (
        gpu.rates["bf16"].value == 2.25e15
        and gpu.rates["bf16"].kind == "published"
        and gpu.rates["bf16"].source
    )


def changed(**fields):
    return json.dumps({"profile": "h100", **fields})


HOSTILE = {
    **{
        f"gpus {count!r}": (changed(gpus=count), "gpus")
        for count in (0, -1, 10_000_000, 1.5, "8", True, [8], 1e30)
    },
    **{
        f"{name} {value!r}": (changed(**{name: value}), name)
        for name in (
            "memory",
            "memory_bandwidth",
            "link_bandwidth",
            "network_bandwidth",
            "sm_count",
            "clock",
            "power",
            "cache",
        )
        for value in (
            -1,
            1e40,
            "80GB",
            {"value": None},
            {"value": 1, "kind": "guessed"},
            {"worth": 1},
        )
    },
    **{
        f"without {name}": (changed(**{name: 0}), name)
        for name in ("memory", "memory_bandwidth", "link_bandwidth")
    },
    "rate": (changed(rates={"bf16": 989}), "rates.bf16"),
    "rates of another name": (changed(rates={"bf17": 1e15}), "bf17"),
    "rates in a list": (changed(rates=[1e15]), "rates"),
    "node": (changed(gpus_per_node=3), "gpus_per_node"),
    "domain": (changed(gpus_per_domain=0), "gpus_per_domain"),
    "part of a node": (changed(gpus=12), "gpus"),
    "architecture": (changed(architecture="sm_80"), "architecture"),
    "capability": (changed(capability=100), "capability"),
    "cache above memory": (changed(cache=1e12), "cache"),
    "latency": (changed(link_latency=5), "link_latency"),
    "rails": (changed(rails=-3), "rails"),
    "slip of the pen": (changed(memroy=8e10), "memroy"),
    "escape": (changed(name="\x1b[2J"), "name"),
    "profile": ('{"profile": "h1000"}', "h1000"),
    "nothing": ("", "line 1"),
    "an empty object": ("{}", "gpus"),
    "a list": ("[]", "object"),
    "cut off": ('{"profile": "h10', "line 1"),
    "twice": ('{"profile": "h100", "profile": "b200"}', "duplicate"),
    "deep": ("[" * 100_000, "within one another"),
    "NaN": ('{"profile": "h100", "gpus": NaN}', "NaN"),
    "bytes": (b"\xff\xfe\x00", "line 1"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_one_error(what, tmp_path):
    content, named = HOSTILE[what]
    file = tmp_path / "cluster.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(dw.DeepwellError) as caught:
        dw.hardware(str(file))
    message = str(caught.value)
    assert (
        named in message
        and "expected" in message
        or what in ("profile", "cut off", "twice", "NaN", "bytes")
    )
    assert (
        len(message) < 600
        and message.isprintable()
        and "cluster.json" in message
        or what == "profile"
    )


@pytest.mark.parametrize(
    ("name", "blackwell", "mxfp8", "formats"),
    [
        ("h100", None, False, ("fp32", "tf32", "bf16", "fp8")),
        ("a100-80", None, False, ("fp32", "tf32", "bf16")),
        ("v100", None, False, ("fp32", "fp16")),
        ("gb300", "sm_103", True, ("fp32", "tf32", "bf16", "fp8", "mxfp8", "fp4")),
        ("rtx5090", "sm_120", True, ("fp32", "tf32", "bf16", "fp8", "mxfp8", "fp4")),
        ("mi300x", None, False, ("fp32", "tf32", "bf16", "fp8")),
    ],
)
def test_generations(name, blackwell, mxfp8, formats):
    gpu = dw.hardware(name).gpus[0]
    assert gpu.blackwell_variant == blackwell and gpu.is_blackwell == (blackwell is not None)
    assert gpu.supports_mxfp8 == gpu.supports_fp4 == mxfp8
    assert gpu.formats == formats


def test_documented_table_is_the_catalogue():
    def shown(figure, unit):
        return f"{figure.value / unit:.5g}" if figure and figure.value else ""

    page = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()
    rows = {
        cells[0]: cells
        for cells in (
            [c.strip() for c in line.split("|")[1:-1]]
            for line in page.splitlines()
            if line.startswith("|")
        )
    }
    for name in dw._deepwell.hardware_names():
        hw = dw.hardware(name)
        rates = [shown(hw.rates.get(rate), 1e12) for rate in ("bf16", "fp8", "fp4")]
        bandwidths = [
            shown(hw.figures.get(f"{what}_bandwidth"), unit)
            for what, unit in (("memory", 1e12), ("link", 1e9), ("network", 1e9), ("host", 1e9))
        ]
        counts = [str(count) for count in (hw.gpu_count, hw.gpus_per_node, hw.gpus_per_domain)]
        assert rows[name] == [
            name,
            *counts,
            *rates,
            shown(hw.figures["memory"], 2**30),
            *bandwidths,
        ]


def test_files_and_dicts(tmp_path):
    text = dw.hardware("h100:256").to_json()
    file = tmp_path / "cluster.json"
    file.write_text(text)
    assert dw.hardware(file).to_json() == text == dw.hardware(str(file)).to_json()
    changed = json.loads(text)
    changed["network_bandwidth"] = 1e10
    hw = dw.hardware(changed)
    assert hw.figures["network_bandwidth"] == type(hw.figures["memory"])(1e10, "given")
    assert dw.hardware({"profile": "h200", "gpus": 16}).gpu_count == 16
    assert dw.hardware("rtx5090").nvlink is None


def test_invalid_requests(tmp_path):
    file = tmp_path / "bad.json"
    file.write_text('{"profile": "h100", "memory": 80}')
    for what, part in [
        ("h101", 'no hardware "h101"'),
        ("h100:0", "COUNT from 1 to 1048576"),
        ("h100:10000000", "COUNT from 1 to 1048576"),
        ({"gpus": 8}, "gpus_per_node is missing"),
        (file, f'"{file}": memory is 80'),
    ]:
        with pytest.raises(dw.DeepwellError) as raised:
            dw.hardware(what)
        assert part in str(raised.value)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(dw.DeepwellError, match="bad.json"):
        dw.hardware(file)
    with pytest.raises(TypeError, match="hardware is int"):
        dw.hardware(8)


def test_this_machine(capsys):
    hw = dw.probe()
    assert hw.cpu["usable"] == len(os.sched_getaffinity(0))
    assert len(hw.gpus) == len(hw.machine["gpus"])
    if not hw.gpus:
        assert hw.gpu_count == 0 and hw.nvlink is None and hw.links == []
        assert any("no GPU" in remark for remark in hw.remarks)
    dw.print_hardware_info(hw)
    printed = capsys.readouterr().out
    assert "CPU: " in printed and printed.startswith(f"GPUs: {len(hw.gpus)}\n")
    dw.print_hardware_info(dw.hardware("gb200"))
    printed = capsys.readouterr().out
    assert "GPUs: 72" in printed and "NVLink 5: 72 GPUs, 900 GB/s each way" in printed
    assert printed.count("Blackwell sm_100") == 1


def test_a_described_machine_as_a_file(tmp_path):
    file = tmp_path / "here.json"
    here = dw.probe()
    file.write_text(here.to_json())
    back = dw.hardware(file)
    assert json.loads(back.to_json()) == json.loads(here.to_json())
    assert back.gpus == here.gpus and back.remarks == here.remarks


GPUS = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
nvml = ctypes.CDLL("libnvidia-ml.so.1")
import deepwell as dw
hw = dw.probe()
gpu = hw.gpus[0]
print(json.dumps([gpu.name, gpu.compute_capability, gpu.sm_version, gpu.sm_count, gpu.memory_bandwidth_gb_s,
                  gpu.pcie_generation, gpu.numa_node, hw.gpu_count, gpu.figures["power"].value]))
"""


def test_gpus_of_a_fake_driver():
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip("the fake driver is not built: build with the C tests")
    run = subprocess.run(
        [sys.executable, "-c", GPUS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": str(FAKES)},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [
        "Fake GPU 0",
        [9, 0],
        "sm_90a",
        132,
        2 * 3201e6 * 6144 / 8 / 1e9,
        5,
        None,
        1,
        700,
    ]
