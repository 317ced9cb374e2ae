"""deepwell.compile: engines, their operations, profiles and dry runs."""

import copy
import json
import re
import types
import warnings
from pathlib import Path

import deepwell as dw
import pytest
import torch
from compilers import needs_compiler
from deepwell import kernel_times, step_profile
from deepwell.targets import PlannedGpu
from torch import nn
from zoo import mlp, small_gpt2

PAGE = Path(__file__).parents[2] / "docs" / "compile.md"


class Undecided(nn.Module):
    """Its forward depends on elements, so that only what is inside can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x):
        y = self.block(x)
        return 2 * y if bool(y.sum() > 0) else y


def language_call(batch: int = 2, length: int = 9):
    ids = torch.randint(0, 211, (batch, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    model = small_gpt2().train()
    return dw.compile(dw.capture(model, language_call()), fallback="error"), copy.deepcopy(model)


def test_an_engine_trains_as_the_model(compiled) -> None:
    engine, _ = compiled
    plain = dw.restore(copy.deepcopy(engine.model))
    ours, theirs = engine(**language_call()), plain(**language_call())
    ours.loss.backward()
    theirs.loss.backward()
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert list(engine.state_dict()) == list(plain.state_dict())
    for mine, other in zip(engine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
        mine.grad = None
    assert engine.fallbacks == [] and engine.target == "cpu" and engine.plan is None
    assert not engine.eval().training and engine.train().training
    text = str(engine)
    assert "GPT2LMHeadModel on cpu, precision auto" in text and "sizes B, S" in text


def test_operations_are_those_of_the_plan() -> None:
    rows, wide, narrow = 6, 40, 24
    model = nn.Sequential(nn.Linear(narrow, wide), nn.GELU(), nn.Linear(wide, narrow))
    engine = dw.compile(model, example_inputs=torch.randn(rows, narrow))
    ops = engine.compiled_ops
    products = [op for op in ops if op.op in ("linear", "matmul")]
    # Forward; backward has the gradients of two weights and of the second layer's input.
    assert sum(op.phase == "forward" for op in products) == 2 and len(products) == 5
    assert sum(op.flops for op in products) == pytest.approx(10 * rows * wide * narrow, rel=0.2)
    first = products[0]
    assert (rows, narrow) in first.shapes and (rows, wide) in first.shapes
    assert (first.module, first.precision, first.stream_id) == ("0", "fp32", 0)
    assert first.predicted_ms is None and first.measured_ms is None and first.runs == 0
    assert first.bytes >= 4 * (rows * narrow + wide * narrow + rows * wide)
    for op in ops:
        assert op.backend_op() is None and op.backend_op.kernel == op.kernel
        assert (op.backend_op.flops, op.backend_op.bytes) == (op.flops, op.bytes)
    ops[0].backend_op()
    ops[0].backend_op.release()


def test_operations_name_precision_and_region(compiled) -> None:
    _, model = compiled
    engine = dw.compile(dw.capture(model, language_call()), precision=dw.Precision.MXFP8)
    products = [op for op in engine.compiled_ops if op.op == "matmul" and op.layer is not None]
    assert {op.precision for op in products} == {"mxfp8"}
    assert {op.region for op in products} == {"attn", "mlp"}
    assert {op.layer for op in products} == {0}
    dw.restore(model)


def test_a_profile_measures(compiled, tmp_path, monkeypatch) -> None:
    engine, _ = compiled
    before = [p.grad for p in engine.parameters()]
    state = torch.get_rng_state()
    file = tmp_path / "trace.json"
    profile = engine.profile(steps=3, trace=file)
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.grad for p in engine.parameters()] == before
    assert profile["step_time_ms"] == sorted(profile["step_times_ms"])[1] > 0
    assert profile["method"] == "the clock around each instruction"
    assert all(op.measured_ms > 0 and op.runs == 3 for op in engine.compiled_ops)
    total = sum(op.measured_ms for op in engine.compiled_ops)
    assert profile["operations_ms"] == pytest.approx(total)
    assert sum(row["ms"] for row in profile["operations"]) == pytest.approx(total)
    assert sum(row["count"] for row in profile["operations"]) == len(engine.compiled_ops)

    events = [e for e in json.loads(file.read_text()) if e["ph"] == "X"]
    phases = [e for e in events if e["tid"] == 0]
    runs = [e for e in events if e["tid"] == 1]
    assert len(phases) == 6 and len(runs) == 3 * len(engine.compiled_ops)
    assert sum(e["dur"] for e in runs) == pytest.approx(3e3 * total, rel=1e-3, abs=1)
    for one, other in zip(runs, runs[1:], strict=False):
        assert other["ts"] >= one["ts"] + one["dur"] - 1  # one stream
    for e in runs:  # each within its phase
        (phase,) = [
            p for p in phases if (p["name"], p["args"]["step"]) == (e["cat"], e["args"]["step"])
        ]
        assert phase["ts"] - 1 <= e["ts"] and e["ts"] + e["dur"] <= phase["ts"] + phase["dur"] + 1
    assert "ms measured" in str(engine) and "ms for a step" in str(engine)
    measured = dw.dryrun(engine)["measured"]
    assert measured["step_time_ms"] == profile["step_time_ms"]
    with pytest.raises(ValueError, match="steps is 0"):
        engine.profile(steps=0)


class OnGpu:
    """A kernel of PyTorch's profiler's results, as a GPU's are, for a range of the CPU's."""

    def __init__(self, of, number: int, linked: int) -> None:
        self.of, self.number, self.linked = of, number, linked

    name = lambda self: f"kernel {self.number}"  # noqa: E731
    device_type = lambda self: torch.autograd.DeviceType.CUDA  # noqa: E731
    linked_correlation_id = lambda self: self.linked  # noqa: E731
    device_resource_id = lambda self: 7  # noqa: E731
    duration_ns = lambda self: 1000 + self.number  # noqa: E731
    start_ns = lambda self: self.of.start_ns() + 10_000 * self.number  # noqa: E731


def as_on_a_gpu(monkeypatch) -> list:
    """PyTorch's profiler reports two kernels for each instruction, as if a GPU had run them, and one that belongs to
    none. Returns the list to which the instructions' ranges are added."""
    made = []

    def kernels_of(events, began):
        ranges = [e for e in events if e.name().startswith("deepwell instruction")]
        made.extend(ranges)
        of_gpu = [OnGpu(e, number, e.correlation_id()) for e in ranges for number in (0, 1)]
        return whole(list(events) + of_gpu + [OnGpu(ranges[0], 2, 0)], began)

    whole = kernel_times.kernels_of
    monkeypatch.setattr(kernel_times, "kernels_of", kernels_of)
    monkeypatch.setattr(step_profile, "_has_kernels", lambda root: True)
    return made


def test_a_profile_by_kernels(compiled, tmp_path, monkeypatch) -> None:
    engine, _ = compiled
    made = as_on_a_gpu(monkeypatch)
    file = tmp_path / "trace.json"
    profile = engine.profile(steps=2, trace=file)
    ops = engine.compiled_ops
    assert profile["method"] == "kernels by CUPTI"
    assert [e.name() for e in made[: len(ops)]] == [e.name() for e in made[len(ops) :]]
    assert all(op.measured_ms == pytest.approx(2.001e-3) and op.runs == 2 for op in ops)
    assert profile["operations_ms"] == pytest.approx(2.001e-3 * len(ops))
    written = json.loads(file.read_text())
    kernels = [e for e in written if e["ph"] == "X" and e["tid"] == 2]
    assert len(kernels) == 2 * 2 * len(ops)
    assert {e["args"]["instruction"] for e in kernels} == {op.backend_op.name for op in ops}
    assert "kernels of the GPU's stream 7" in file.read_text()
    runs = [e for e in written if e["ph"] == "X" and e["tid"] == 1]
    assert len(runs) == 2 * len(ops)
    for e in runs:
        assert e["dur"] == pytest.approx(
            11.001, abs=0.01
        )  # from the first kernel to the last one's end
        phases = [p for p in written if p["ph"] == "X" and p["tid"] == 0]
        (phase,) = [p for p in phases if p["ts"] - 50 <= e["ts"] <= p["ts"] + p["dur"] + 50
                    and (p["name"], p["args"]["step"]) == (e["cat"], e["args"]["step"])]  # fmt: skip
        assert phase is not None
    # While another profiler runs, this one does not.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not kernel_times.supported()


def test_a_profile_without_kernels_falls_back(compiled, monkeypatch) -> None:
    engine, _ = compiled
    monkeypatch.setattr(step_profile, "_has_kernels", lambda root: True)
    profile = engine.profile(steps=2)  # CUPTI reports nothing
    assert profile["method"] == "the clock around each instruction"
    assert all(op.measured_ms > 0 and op.runs == 2 for op in engine.compiled_ops)


@pytest.mark.gpu
def test_kernels_of_a_gpu_are_timed(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda().bfloat16()
    x = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    engine = dw.compile(model, example_inputs=x, fallback="none")
    file = tmp_path / "trace.json"
    profile = engine.profile(steps=3, trace=file)
    assert profile["method"] == "kernels by CUPTI"
    assert all(op.measured_ms > 0 and op.runs == 3 for op in engine.compiled_ops)
    assert profile["operations_ms"] < profile["step_time_ms"] * 1.5
    written = json.loads(file.read_text())
    assert [e for e in written if e.get("cat") == "kernel"]


def test_a_profile_of_what_pytorch_runs(tmp_path) -> None:
    """Nothing of the model is the engine's, so that PyTorch's profiler measures."""

    class Counted(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > -1e9 else x

    file = tmp_path / "trace.json"
    engine = dw.compile(Counted(8, 8), example_inputs=torch.ones(2, 8))
    profile = engine.profile(torch.ones(2, 8), steps=2, trace=file)
    assert profile["method"] == "torch.profiler" and not profile["engine_runs"]
    assert any("addmm" in row["op"] for row in profile["operations"]) and file.stat().st_size > 0
    assert engine.compiled_ops == []


def test_what_cannot_be_captured_is_listed_or_refused() -> None:
    x = torch.randn(3, 8)
    engine = dw.compile(Undecided(), example_inputs=x)
    assert engine.ir is None and [one.path for one in engine.fallbacks] == [""]
    engine(x).sum().backward()
    assert engine.fallbacks[0].module == "Undecided" and "traced" in engine.fallbacks[0].reason
    engine.profile(x, steps=1)
    assert {op.module for op in engine.compiled_ops} >= {"block.0", "block.2"}
    with pytest.raises(dw.DeepwellError, match="example_inputs"):
        dw.dryrun(engine)
    for fallback in ("error", "none"):
        with pytest.raises(dw.UnsupportedError, match="Undecided is not captured whole.*leave it"):
            dw.compile(Undecided(), example_inputs=x, fallback=fallback)
    strict = dw.compile(mlp(), example_inputs=torch.randn(2, 3, 37), fallback="error")
    strict(torch.randn(4, 3, 37))
    with pytest.raises(dw.UnsupportedError, match="no elements.*fallback='safe'"):
        strict(torch.randn(0, 3, 37))


def test_a_precision_that_is_not_supported_here(monkeypatch) -> None:
    from deepwell import compiled as module

    given = module.optimize

    def only_auto(model, precision, **options):
        if precision != "auto":
            raise dw.UnsupportedError(f"{precision} is not supported here")
        return given(model, precision=precision, **options)

    monkeypatch.setattr(module, "optimize", only_auto)
    x = torch.randn(2, 3, 37)
    with pytest.warns(UserWarning, match="its own precision, because mxfp8 is not supported"):
        engine = dw.compile(mlp(), precision="mxfp8", example_inputs=x)
    assert engine.precision == "auto" and "mxfp8" in engine.notes[0]
    with pytest.raises(dw.UnsupportedError, match="mxfp8"):
        dw.compile(mlp(), precision="mxfp8", example_inputs=x, fallback="none")


def test_bad_requests() -> None:
    ir = dw.capture(mlp(), torch.zeros(2, 3, 37))
    with pytest.raises(TypeError, match="not int"):
        dw.compile(3)
    with pytest.raises(TypeError, match="autoplan"):
        dw.compile(ir, plan={"version": 1})
    with pytest.raises(ValueError, match="fallback='never'"):
        dw.compile(ir, fallback="never")
    with pytest.raises(ValueError, match="int3"):
        dw.compile(ir, precision="int3")
    with pytest.raises(dw.UnsupportedError, match="sm_90a"):
        dw.compile(ir, target="sm_90a")
    with pytest.raises(ValueError, match="seq_len is 0"):
        dw.optimize_for_blackwell(mlp(), seq_len=0)


def test_a_model_without_memory_is_planned_only() -> None:
    with torch.device("meta"):
        model = small_gpt2()
    engine = dw.compile(dw.capture(model, {k: v.to("meta") for k, v in language_call().items()}))
    assert engine.target == "meta" and "meta device" in engine.notes[-1]
    assert len(engine.compiled_ops) > 20 and dw.dryrun(engine)["memory_gb"] > 0
    for call in (lambda: engine(**language_call()), engine.profile):
        with pytest.raises(dw.UnsupportedError, match="meta device"):
            call()


def test_a_dry_run_without_a_plan_is_that_of_the_model(compiled) -> None:
    engine, model = compiled
    found = dw.dryrun(engine)
    alone = dw.dryrun(model, language_call())
    assert found["peak_bytes"] == alone["peak_bytes"] and found["moments"] == alone["moments"]
    unknown = ("step_time_ms", "expected_speedup", "bubble_fraction", "mfu", "overlap", "trace")
    assert all(found[name] is None for name in unknown) and found["fits"]
    larger = dw.dryrun(engine, language_call(4, 12), optimizer=None)
    assert larger["sizes"] == {"B": 4, "S": 12} and larger["optimizer"] == "none"
    with pytest.raises(dw.UnsupportedError, match="engine.profile"):
        dw.dryrun(engine, trace="trace.json")


def test_a_plan_for_this_cpu(compiled) -> None:
    _, model = compiled
    ir = dw.capture(model, language_call())
    described = json.loads(dw.hardware("h100").to_json())
    described.update(gpus=0, gpus_per_node=0, gpus_per_domain=0)
    described["host_memory"] = {"value": 2**34, "kind": "given", "source": "test"}
    hw = dw.Hardware(json.dumps(described))
    plan = dw.autoplan(ir, hw=hw, seq_len=9, global_batch=6)
    engine = dw.compile(ir, plan=plan)
    found = dw.dryrun(engine)
    assert found["sizes"] == {"B": plan.layout.micro_batch, "S": 9} and engine.notes == []
    assert found["memory_gb"] == plan.memory_gb and found["step_time_ms"] is None
    dw.restore(model)


def test_the_documents_chain() -> None:
    model = small_gpt2()
    hw = dw.probe()
    dw.print_hardware_info(hw)
    ir = dw.capture(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = dw.autoplan(
            ir,
            hw=hw,
            seq_len=32_768,
            global_batch=4096,
            arch="blackwell-sm100",
            moe={"experts": 8, "capacity_factor": 1.25},
        )
        engine = dw.compile(ir, plan=plan, precision="mxfp8", fallback="safe")
    if not any(gpu.is_blackwell for gpu in hw.gpus):
        assert "b200" in str(told[0].message)
    results = dw.dryrun(engine)
    same = dw.dryrun(plan)
    for name in ("memory_gb", "step_time_ms", "expected_speedup", "baseline", "bubble_fraction"):
        assert results[name] == same[name] is not None
    assert {"mfu", "overlap", "fits", "trace", "measured", "planned_for"} <= set(results)
    if plan.layout.gpus > 1:
        assert any(f"the plan is for {plan.layout.gpus} x" in note for note in engine.notes)
    assert torch.isfinite(engine(input_ids=language_call()["input_ids"]).logits).all()
    dw.restore(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU does")
def test_optimize_for_blackwell_elsewhere(compiled) -> None:
    _, model = compiled
    with pytest.warns(
        UserWarning, match='profile "b200", and the model runs on cpu.*mxfp8'
    ) as told:
        engine = dw.optimize_for_blackwell(model, precision="mxfp8", seq_len=16, batch_size=4)
    assert len(told) == 1 and engine.notes == [str(told[0].message).removeprefix("deepwell: ")]
    results = dw.dryrun(engine)
    assert results["planned_for"] == "1 x b200" and results["expected_speedup"] > 0
    assert engine.plan.layout.precision == "mxfp8" and engine.plan.layout.global_batch == 4
    with pytest.warns(UserWarning, match="there is no plan for b200"):
        engine = dw.optimize_for_blackwell(
            mlp().bfloat16(), precision="nvfp4", batch_size=2, seq_len=4
        )
    assert engine.plan is None and dw.dryrun(engine)["memory_gb"] > 0
    dw.restore(model)


@needs_compiler
def test_an_emulated_gpu_is_profiled_by_events(monkeypatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU())
    x = torch.randn(2, 8)
    engine = dw.compile(model, example_inputs=x, target="emulator:sm_90a", fallback="none")
    expected = model(x)
    profile = engine.profile(steps=1, warmup=1)
    torch.testing.assert_close(engine(x), expected, rtol=1e-4, atol=1e-5)
    assert profile["method"] == "events between instructions" and engine.target == "emulator:sm_90a"
    assert all(op.predicted_ms > 0 and op.measured_ms > 0 for op in engine.compiled_ops)
    engine.compiled_ops[0].backend_op()
    made = as_on_a_gpu(monkeypatch)
    assert engine.profile(steps=1)["method"] == "kernels by CUPTI"
    assert len(made) == len(engine.compiled_ops)
    assert all(op.measured_ms == pytest.approx(2.001e-3) for op in engine.compiled_ops)


def test_every_kernel_of_a_planned_gpu_has_a_cost(monkeypatch) -> None:
    with torch.device("meta"):
        model = small_gpt2(n_embd=128, n_head=2).bfloat16()
    call = {name: ids.to("meta") for name, ids in language_call(2, 64).items()}
    engine = dw.compile(dw.capture(model, call))
    monkeypatch.setattr(dw.Engine, "_place", lambda self: PlannedGpu())
    ops = engine.compiled_ops
    assert {"attention", "attention_backward"} <= {op.op for op in ops}
    assert all(op.predicted_ms > 0 and op.predicted_from for op in ops)
    with pytest.raises(dw.UnsupportedError, match="a GPU that is not here .sm_90a."):
        ops[0].backend_op()


def test_the_page_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    assert (tmp_path / "trace.json").exists() and "Expected speedup" in capsys.readouterr().out


def test_pytorchs_kernels_count_once():
    """PyTorch's profiler gives the time of a kernel to the kernel, to the operator that launched it, and to the ranges of the
    user around it."""
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

    def row(key, place, on_gpu, on_cpu=0.0, annotation=False):
        return types.SimpleNamespace(
            key=key, device_type=place, self_device_time_total=on_gpu, self_cpu_time_total=on_cpu, count=4,
            is_user_annotation=annotation,
        )  # fmt: skip

    operators = [row("aten::mm", cpu, 3000.0, 50.0), row("aten::add", cpu, 1000.0, 20.0)]
    kernels = [row("gemm", gpu, 3000.0), row("add", gpu, 1000.0)]
    ranges = [row("step", gpu, 4500.0, annotation=True)]
    rows = step_profile._rows([*operators, *kernels, *ranges], steps=2)
    assert [(each["op"], each["kernel"], each["ms"]) for each in rows] == [
        ("gemm", "gemm", 1.5),
        ("add", "add", 0.5),
    ]
    plain = [row("aten::mm", cpu, 0.0, 50.0), row("aten::add", cpu, 0.0, 20.0)]
    rows = step_profile._rows(plain, steps=2)
    assert [(each["op"], each["kernel"]) for each in rows] == [
        ("aten::mm", None),
        ("aten::add", None),
    ]
    assert sum(each["ms"] for each in rows) == pytest.approx(0.035)
