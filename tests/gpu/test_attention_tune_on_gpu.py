"""Measurements that decide who computes attention, on a GPU: what is stored, and that calls follow
it."""

import json
import time

import attention_reference as reference
import pytest
import torch
from attention_tools import seen
from deepwell import _deepwell
from deepwell.attention import attention, functional, tune

SIZES = ("bf16", 2, 8, 4, 512, 512, 64, False, 0.0, -1, 0, False, 0.0, True, False)


@pytest.fixture
def tuner(gpu, tmp_path, monkeypatch):
    """A GPU with an empty store of measurements."""
    monkeypatch.setenv("DEEPWELL_CACHE", str(tmp_path))
    made = tune.Tuner()
    monkeypatch.setattr(tune, "tuner", made)
    functional.forget()
    made.switch(True)
    yield made
    made.switch(False)
    functional.forget()


def tensors():
    shapes = ((8, 512), (4, 512), (4, 512))
    return [
        torch.randn(2, n, h, 64, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for h, n in shapes
    ]


def trained(leaves, d_o):
    o = attention(*leaves, is_causal=True)
    return [o.detach(), *torch.autograd.grad(o, leaves, d_o)]


def judge(leaves, d_o, got):
    call = reference.Call(64**-0.5, window_right=0)
    exact = reference.attention(call, *[t.detach() for t in leaves], d_o)
    for name, tensor in zip(("o", "dq", "dk", "dv"), got, strict=True):
        error, share, where = exact[name].judge(tensor)
        assert share <= 1, (name, error, where)


def test_measured_once(tuner, tmp_path):
    leaves = tensors()
    d_o = torch.randn_like(leaves[0])
    state = torch.cuda.get_rng_state()
    begin = time.perf_counter()
    got = trained(leaves, d_o)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    assert torch.equal(state, torch.cuda.get_rng_state())
    judge(leaves, d_o, got)
    assert len(tuner.measured) == 1 and not tuner.notes, tuner.notes
    written = json.loads(next(tmp_path.glob("tune/*.json")).read_text())["measured"]
    assert len(written) == 2
    for shape_class, entries in written.items():
        print(shape_class, {n: e for n, e in entries.items()}, f"first call {seconds:.3f} s")
        for name in ("deepwell", "cudnn", "flash"):
            assert 1e-6 < entries[name]["seconds"] < 1e-2, (shape_class, entries)
            assert 0 <= entries[name]["error"] < 0.5 * entries[name]["seconds"]
    trained(leaves, d_o)
    assert len(tuner.measured) == 1


@pytest.mark.parametrize("name", ["deepwell", "cudnn", "flash"])
def test_calls_follow_the_stored_decision(tuner, name):
    for backward in (False, True):
        shape_class = _deepwell.attention_class(*SIZES[:-2], backward, False)
        rows = [(n, 1e-4 if n == name else 1e-3, 0.0, None) for n in tuner.entries]
        _deepwell.tune_publish(shape_class, tune.versions(), rows)
    leaves = tensors()
    d_o = torch.randn_like(leaves[0])
    o = attention(*leaves, is_causal=True)
    assert o.stride() == leaves[0].stride()
    judge(leaves, d_o, trained(leaves, d_o))
    expected = {"deepwell": 0}.get(name, 2)
    assert sum(functional.fallbacks.values()) == expected and not tuner.measured
    counts = seen(lambda: trained(leaves, d_o)).counts
    assert all(name in operator or name == "deepwell" for operator in counts), counts

    torch._dynamo.reset()
    fast = torch.compile(lambda *t: attention(*t, is_causal=True), fullgraph=True)
    assert torch.allclose(fast(*leaves).float(), o.float(), atol=2e-2)

    graph, plain = torch.cuda.CUDAGraph(), [t.detach() for t in leaves]
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            attention(*plain, is_causal=True)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            captured = attention(*plain, is_causal=True)
    graph.replay()
    assert torch.allclose(captured.float(), o.detach().float(), atol=2e-2)


def test_nothing_is_measured_in_a_capture(tuner):
    plain = [t.detach() for t in tensors()]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = attention(*plain, is_causal=True)
    graph.replay()
    assert not tuner.measured
    assert torch.allclose(captured.float(), attention(*plain, is_causal=True).float(), atol=2e-2)
