"""deepwell.compile on a GPU: operations, the times of their kernels, and kernels that run by themselves."""

import json

import deepwell as dw
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    config = GPT2Config(n_embd=768, n_layer=4, n_head=12, vocab_size=8192, n_positions=1024)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16)
    ids = torch.randint(0, 8192, (4, 1024), device="cuda")
    return dw.compile(dw.capture(model, {"input_ids": ids, "labels": ids}), fallback="error")


def test_a_profile_by_kernels(engine, tmp_path) -> None:
    file = tmp_path / "trace.json"
    profile = engine.profile(steps=5, warmup=3, trace=file)
    assert profile["method"] == "kernels by CUPTI" and engine.target == "sm_90a"
    ops = engine.compiled_ops
    assert all(op.measured_ms > 0 and op.runs == 5 and op.predicted_ms > 0 for op in ops)
    # Kernels of one stream do not overlap.
    assert profile["operations_ms"] < 1.1 * profile["step_time_ms"]
    products = [op for op in ops if op.op in ("linear", "matmul")]
    for op in products:
        assert op.flops / op.measured_ms / 1e9 < 1000  # TFLOP/s
    kernels = [e for e in json.loads(file.read_text()) if e.get("cat") == "kernel"]
    assert len(kernels) >= 5 * len(products)
    # What is timed trains as before.
    ids = torch.randint(0, 8192, (4, 1024), device="cuda")
    engine(input_ids=ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in engine.parameters())


def test_kernels_run_by_themselves(engine) -> None:
    for op in engine.compiled_ops:
        op.backend_op()
        op.backend_op.wait()
    largest = max(engine.compiled_ops, key=lambda op: op.flops)
    largest.backend_op()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        largest.backend_op()
    end.record()
    end.synchronize()
    assert 0 < start.elapsed_time(end) / 20 < 100
    largest.backend_op.release()


def test_optimize_for_blackwell_on_hopper(engine) -> None:
    with pytest.warns(UserWarning, match='no Blackwell GPU: the plan is for the profile "b200"'):
        other = dw.optimize_for_blackwell(engine.model, "mxfp8", seq_len=1024, batch_size=4)
    assert dw.dryrun(other)["expected_speedup"] > 0 and other.target == "sm_90a"
