"""The probe on a GPU: compared with PyTorch and nvidia-smi, and its measurements with PyTorch's."""

import functools
import shutil
import subprocess

import deepwell as dw
import pytest
import torch


@functools.cache
def measured():
    return dw.probe(measure=True)


def smi(*fields):
    """Returns nvidia-smi's output, a row for each GPU, by bus address in lower case."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvidia-smi")
    query = [
        "nvidia-smi",
        f"--query-gpu={','.join(('pci.bus_id', *fields))}",
        "--format=csv,noheader,nounits",
    ]
    rows = [line.split(", ") for line in subprocess.check_output(query, text=True).splitlines()]
    return {row[0][4:].lower(): row[1:] for row in rows}


def seconds_of(run, calls=8):
    """Returns the seconds of one call on the GPU: the median of five series, after one that is not
    counted."""
    times = []
    for _ in range(6):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(calls):
            run()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3 / calls)
    return sorted(times[1:])[2]


def test_probe_agrees_with_pytorch(gpu):
    hw = dw.probe()
    assert len(hw.gpus) == torch.cuda.device_count() == hw.gpu_count
    for index, found in enumerate(hw.gpus):
        properties = torch.cuda.get_device_properties(index)
        assert found.name == properties.name
        assert found.compute_capability == (properties.major, properties.minor)
        assert found.sm_count == properties.multi_processor_count
        assert found.figures["cache"].value == properties.L2_cache_size
        # nvidia-smi's total includes the memory that the driver reserves.
        assert (
            0
            <= found.figures["memory"].value - properties.total_memory
            < 0.05 * properties.total_memory
        )


def test_probe_agrees_with_nvidia_smi(gpu):
    rows = smi(
        "uuid",
        "memory.total",
        "power.limit",
        "pcie.link.gen.max",
        "pcie.link.width.max",
        "driver_version",
    )
    hw = dw.probe()
    for found in hw.gpus:
        uuid, memory, power, generation, lanes, driver = rows[found.bus]
        assert found.uuid == uuid
        assert found.figures["memory"].value // 2**20 == int(memory)
        assert found.figures["power"].value == pytest.approx(float(power), abs=0.01)
        assert (found.pcie_generation, found.pcie_lanes) == (int(generation), int(lanes))
        assert hw.machine["driver"] == driver


def test_links_are_those_of_nvidia_smi(gpu):
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvidia-smi")
    status = subprocess.run(
        ["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True
    ).stdout
    up = sum("GB/s" in line for line in status.splitlines())
    hw = dw.probe()
    shown = len(smi())
    if shown != len(hw.gpus):
        pytest.skip("not all GPUs are visible")
    assert len(hw.links) == up
    assert (hw.nvlink is None) == (up == 0)


def test_copies(gpu):
    found = measured().gpus[0]
    a = torch.randn(2**28, device=gpu)  # 1 GiB
    b = torch.empty_like(a)
    expected = 2 * a.numel() * 4 / seconds_of(lambda: b.copy_(a))
    assert found.figures["copy_bandwidth"].kind == "measured", measured().remarks
    assert found.figures["copy_bandwidth"].value == pytest.approx(expected, rel=0.1)
    assert found.figures["copy_bandwidth"].value < 1.02 * found.figures["memory_bandwidth"].value
    locked = torch.randn(2**26, pin_memory=True)
    there = torch.empty_like(locked, device=gpu)
    slower = max(
        seconds_of(lambda: there.copy_(locked, non_blocking=True), 2),
        seconds_of(lambda: locked.copy_(there, non_blocking=True), 2),
    )
    assert found.figures["host_bandwidth"].value == pytest.approx(
        locked.numel() * 4 / slower, rel=0.2
    )


@pytest.mark.parametrize("rate", ["fp32", "tf32", "bf16", "fp8"])
def test_gemm_rates(gpu, rate):
    found = measured().gpus[0]
    if rate not in found.formats:
        pytest.skip(f"no {rate} here")
    n = 8192
    a, b = (torch.rand(n, n, device=gpu) * 2 - 1 for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = rate == "tf32"
    try:
        if rate == "bf16":
            a, b = a.bfloat16(), b.bfloat16()
        if rate == "fp8":
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
            one = torch.ones((), device=gpu)
            seconds = seconds_of(
                lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), 16
            )
        else:
            seconds = seconds_of(lambda: a @ b.t(), 4 if rate == "fp32" else 16)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    figure = found.rates[rate]
    assert figure.kind == "measured", measured().remarks
    assert figure.value == pytest.approx(2 * n**3 / seconds, rel=0.2)


def test_all_reduce(gpu):
    hw = measured()
    if len(hw.gpus) < 2:
        pytest.skip("needs two GPUs")
    bandwidth = hw.machine["bus_bandwidth"]
    assert bandwidth["kind"] == "measured", hw.remarks
    links = dw.probe().figures["link_bandwidth"].value
    # NVLS sums in the switch, so bus bandwidth may exceed that of the links.
    assert 0.3 * links < bandwidth["value"] < 2 * links


def test_a_plan_can_use_it(gpu, tmp_path):
    file = tmp_path / "here.json"
    file.write_text(measured().to_json())
    assert dw.hardware(file).to_json()
    assert dw.hardware(file).rates["bf16"].kind == "measured"
