"""optimize(target="sm_90a") on a Hopper GPU: whole models in the engine, in the ways in which they are trained. The same
behaviours are tested on the emulator by tests/python/test_optimize_gpu.py."""

from __future__ import annotations

import copy
import gc

import deepwell
import pytest
import torch
from deepwell.arena import Lease
from deepwell.targets import Gpu
from test_optimize_gpu import errors, gpt2, llama
from torch import nn
from users import BF16_UNIT, Net, close, engine_calls, rows, uneven

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")


@pytest.fixture(autouse=True)
def _the_engine_runs(monkeypatch):
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")


def pair(build=Net) -> tuple[nn.Module, nn.Module]:
    plain = build().cuda()
    return plain, deepwell.optimize(copy.deepcopy(plain), target="sm_90a", verbose=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_models_are_as_exact_as_in_pytorch(build, dtype) -> None:
    ids = torch.randint(0, 96, (4, 29), generator=torch.Generator().manual_seed(3)).cuda()
    arguments = {"input_ids": ids, "labels": ids}
    plain = build().cuda().to(dtype)
    reference = copy.deepcopy(plain).double()
    ours = deepwell.optimize(copy.deepcopy(plain), target="sm_90a", verbose=False)
    found = errors(ours, copy.deepcopy(reference), arguments)
    expected = errors(plain, reference, arguments)
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)
    floor = 2.0**-22 if dtype == torch.float32 else 2.0**-10
    for name, error in found.items():
        assert error <= 1.5 * max(expected[name], floor), (name, error, expected[name])


def test_training_and_autocast() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        for seed in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=seed % 2 == 1):
                y = model(rows(seed).cuda())
            uneven(y.float().cpu()).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        close(a.detach().cpu(), b.detach().cpu(), unit=BF16_UNIT)
    assert engine_calls(ours) == (5, 0), deepwell.summary(ours)


def test_another_stream_and_two_forwards() -> None:
    plain, ours = pair()
    stream = torch.cuda.Stream()
    results = []
    for model in (plain, ours):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first, second = model(rows(1).cuda()), model(rows(2, 7).cuda())
            (uneven(first) + uneven(second)).backward()
        torch.cuda.current_stream().wait_stream(stream)
        results.append([first.detach(), second.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        close(b.cpu(), a.cpu())


def test_a_captured_step_replays() -> None:
    """The caller's own CUDA graph of forward and backward, as torch.cuda.graph makes it."""
    plain, ours = pair()
    static = rows(1).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            ours.zero_grad(set_to_none=True)
            uneven(ours(static)).backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    ours.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = uneven(ours(static))
        loss.backward()
    static.copy_(rows(5).cuda())
    graph.replay()
    expected = uneven(plain(rows(5).cuda()))
    expected.backward()
    close(loss.detach().cpu(), expected.detach().cpu())
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        close(a.grad.cpu(), b.grad.cpu())


def test_memory_is_pytorchs_and_comes_back() -> None:
    # Blocks that earlier tests left idle may be larger than what is put into them, and count as a whole.
    gc.collect()
    torch.cuda.empty_cache()
    _, ours = pair(lambda: nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)))
    x = torch.randn(512, 64, device="cuda")

    def allocated_after_steps() -> int:
        """The least after any of three steps: what is merely freed late counts in some of them only."""
        readings = []
        for _ in range(3):
            ours.zero_grad()
            ours(x).sum().backward()
            torch.cuda.synchronize()
            gc.collect()
            readings.append(torch.cuda.memory_allocated())
        return min(readings)

    allocated_after_steps()  # the capture, and what it leaves
    before = allocated_after_steps()
    torch.cuda.reset_peak_memory_stats()
    assert allocated_after_steps() <= before
    assert torch.cuda.max_memory_allocated() > before


class Deep(nn.Module):
    """Layers that are each a part of backward, and enough of them that freeing what they saved lowers the peak whatever
    workspace cuBLASLt takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(1500, 1500, bias=False) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_gradients_take_the_place_of_segments(monkeypatch) -> None:
    """The peak of a step falls, gradients keep their bits, and after some steps every segment has an address that it had
    before, so that graphs are replayed."""
    addresses: list[tuple] = []
    free = Lease.free

    def noted(lease, which):
        addresses.append(tuple(lease.addresses))
        free(lease, which)

    monkeypatch.setattr(Lease, "free", noted)
    monkeypatch.setattr(Gpu, "part_bytes", lambda self: 8 << 20)  # one part for each layer
    x = torch.randn(1024, 1500, device="cuda")
    peaks, gradients = [], []
    for segments in (1, 4):
        monkeypatch.setattr(Gpu, "arena_segments", segments)
        gc.collect()
        before = torch.cuda.memory_allocated()  # one segment stays allocated between steps
        ours = deepwell.optimize(Deep().cuda(), target="sm_90a", verbose=False)
        for step in range(8):
            if step == 7:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                known = set(addresses)
                addresses.clear()
            ours.zero_grad()
            ours(x).square().sum().backward()
        assert engine_calls(ours) == (8, 0), deepwell.summary(ours)
        assert set(addresses) <= known
        peaks.append(torch.cuda.max_memory_allocated() - before)
        gradients.append([p.grad.cpu() for p in ours.parameters()])
        del ours
        addresses.clear()
    assert all(map(torch.equal, *gradients))
    assert peaks[1] <= peaks[0] - (1 << 22), peaks


def test_scratch_may_be_allocated_after_logits_are_freed(monkeypatch) -> None:
    """Gradients keep their bits, also with retain_graph."""
    from transformers import LlamaConfig, LlamaForCausalLM

    begun = []
    begin = Lease.begin

    def noted(lease, index, segment):
        assert lease.addresses[index] is None
        begun.append(index)
        begin(lease, index, segment)

    monkeypatch.setattr(Lease, "begin", noted)
    config = LlamaConfig(hidden_size=1024, num_hidden_layers=6, intermediate_size=4096, vocab_size=64000,
                         num_attention_heads=8, num_key_value_heads=8, use_cache=False)  # fmt: skip
    ids = torch.randint(0, 64000, (4, 1024), generator=torch.Generator().manual_seed(3)).cuda()
    torch.manual_seed(4)
    plain = LlamaForCausalLM(config).cuda().bfloat16()
    gradients = []
    for segments in (1, 4, 4):
        monkeypatch.setattr(Gpu, "arena_segments", segments)
        ours = deepwell.optimize(copy.deepcopy(plain), target="sm_90a", verbose=False)
        loss = ours(input_ids=ids, labels=ids).loss
        if len(gradients) == 2:
            loss.backward(retain_graph=True)
            ours.zero_grad()
        loss.backward()
        gradients.append([p.grad.cpu() for p in ours.parameters()])
        assert len(begun) == (0, 1, 3)[len(gradients) - 1]
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert all(map(torch.equal, gradients[0], gradients[2]))


def test_an_index_outside_is_an_error_of_the_next_call() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.GELU()).cuda()
    deepwell.optimize(model, target="sm_90a", verbose=False)
    model(torch.tensor([[1, 5]], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="outside of its axis"):
        model(torch.tensor([[1, 2]], device="cuda"))


def test_a_model_that_cannot_be_captured_keeps_its_attention() -> None:
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)

        def forward(self, x):
            return self.inner(x) if x.sum() > 0 else -self.inner(x)

    model = Branches().cuda().bfloat16()
    x = torch.randn(2, 16, 64, device="cuda", dtype=torch.bfloat16)
    expected = model(x).detach()
    deepwell.optimize(model, target="sm_90a", verbose=False)
    close(model(x).detach().cpu(), expected.cpu(), unit=BF16_UNIT)
    assert "attention" in deepwell.summary(model)


def test_an_effect_of_the_first_call_is_waited_for() -> None:
    """Hugging Face's classifiers set ``config.problem_type`` when they first see labels."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(4)
    model = ViTForImageClassification(
        ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96,
                  image_size=32, patch_size=8, num_labels=10)
    ).cuda().eval()  # fmt: skip
    arguments = {
        "pixel_values": torch.randn(3, 3, 32, 32, device="cuda"),
        "labels": torch.randint(0, 10, (3,), device="cuda"),
    }
    deepwell.optimize(model, target="sm_90a", verbose=False)
    for _ in range(3):
        model(**arguments).loss.backward()
    assert engine_calls(model)[0] == 2, deepwell.summary(model)


def test_an_effect_of_every_call_keeps_attention() -> None:
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    model = Counts().cuda().bfloat16()
    x = torch.randn(2, 16, 64, device="cuda", dtype=torch.bfloat16)
    deepwell.optimize(model, target="sm_90a", verbose=False)
    for _ in range(3):
        model(x)
    assert model.calls == 3 and "attention" in deepwell.summary(model)
