"""optimize() on GPU models: as close to the FP32 model as the BF16 model in PyTorch."""

import copy

import deepwell
import pytest
import torch
import torch.nn.functional as F
from attention_tools import seen
from deepwell.attention import functional, install

transformers = pytest.importorskip("transformers")
from test_attention_models import encoder, hugging_face  # noqa: E402


def optimized(model, device):
    if device.type == "cuda":
        return deepwell.optimize(model, target="attention", verbose=False)
    install.install(model, "test")
    return model


def results(model, run):
    """Returns outputs and gradients as one vector, in FP64."""
    model.zero_grad()
    out = run(model)
    out.float().square().mean().backward()
    parts = [out.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]
    return [part.double() for part in parts]


def as_near(model, device, run, attentions):
    """Compares with FP32: the optimized BF16 model's error is at most 1.5 times that of the BF16
    model in PyTorch."""
    wide = copy.deepcopy(model).to(device).float()
    plain = copy.deepcopy(wide).bfloat16()
    ours = optimized(copy.deepcopy(plain), device)
    assert seen(lambda: run(ours)).ours == attentions, deepwell.summary(ours)
    exact = results(wide, run)
    errors = []
    for other in (plain, ours):
        parts = zip(results(other, run), exact)
        errors.append(sum(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in parts))
    assert errors[1] <= 1.5 * errors[0], errors
    deepwell.restore(ours)
    assert seen(lambda: run(ours)).ours == 0
    again, first = results(ours, run), results(plain, run)
    assert all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(again, first))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3", "gemma2", "bert"])
def test_hugging_face(device, name):
    torch.manual_seed(1)
    model = hugging_face(name)
    ids = torch.randint(50, (2, 50), device=device)
    as_near(model, device, lambda m: m(input_ids=ids).logits, 2)
    for pad, attentions in ((slice(40, 50), 2), (slice(0, 9), 2)):
        kept = torch.ones_like(ids)
        kept[0, pad] = 0

        def at_tokens(m):
            logits = m(input_ids=ids, attention_mask=kept).logits
            return torch.where(kept[..., None] > 0, logits, 0.0)

        as_near(model, device, at_tokens, attentions)


def test_multihead_and_layers(device):
    x = torch.randn(2, 70, 32, device=device)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(70, device=device)

    def run(model):
        dtype = next(model.parameters()).dtype
        return model(x.to(dtype), mask=mask.to(dtype), is_causal=True)

    as_near(encoder(), device, run, 2)


PADDINGS = {
    "right": torch.arange(70) >= torch.tensor([[70], [33]]),
    "left": torch.arange(70) < torch.tensor([[5], [0]]),
    "holes": torch.arange(70) % torch.tensor([[3], [70]]) == 1,
}


@pytest.mark.parametrize("where", list(PADDINGS))
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_padding_and_weights(device, where, batch_first):
    x = torch.randn(2, 70, 64, device=device)
    padded = PADDINGS[where].to(device)
    module = torch.nn.MultiheadAttention(64, 2, batch_first=batch_first)

    def run(model):
        rows = x.to(model.out_proj.weight.dtype)
        rows = rows if batch_first else rows.transpose(0, 1)
        out, weights = model(rows, rows, rows, key_padding_mask=padded)
        assert weights.shape == (2, 70, 70) and (weights * padded[:, None]).abs().max() == 0
        return torch.cat([out.flatten(), 10 * weights.flatten()])

    as_near(module, device, run, 1)


@pytest.mark.parametrize("where", ["none", *PADDINGS])
def test_encoder_in_evaluation(device, where):
    layer = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    wide = torch.nn.TransformerEncoder(layer, 2).to(device).eval()
    plain = copy.deepcopy(wide).bfloat16()
    ours = optimized(copy.deepcopy(plain), device)
    padded = None if where == "none" else PADDINGS[where].to(device)
    x = torch.randn(2, 70, 64, device=device)

    def run(model):
        dtype = next(model.parameters()).dtype
        return model(x.to(dtype), src_key_padding_mask=padded).double()

    with torch.no_grad():
        assert seen(lambda: run(ours)).ours == 2, deepwell.summary(ours)
        exact = run(wide)
        errors = [float((run(model) - exact).norm() / exact.norm()) for model in (plain, ours)]
    assert errors[1] <= 1.5 * errors[0], errors


def test_padding_in_a_captured_graph_is_pytorch_s(gpu):
    module = optimized(torch.nn.MultiheadAttention(64, 2, batch_first=True).to(gpu).bfloat16(), gpu)
    x = torch.randn(2, 70, 64, device=gpu, dtype=torch.bfloat16)
    padded = PADDINGS["right"].to(gpu)
    with torch.no_grad():

        def run():
            return module(x, x, x, key_padding_mask=padded, need_weights=False)[0]

        want = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        graph.replay()
    assert any("captured" in reason for reason in module.forward.fallbacks)
    assert (got - want).float().norm() <= 0.02 * want.float().norm()


def test_fp32_models_stay_with_pytorch_and_autocast_does_not(device):
    if device.type != "cuda":
        pytest.skip("needs an NVIDIA GPU")
    model = optimized(encoder().to(device), device)
    x = torch.randn(2, 70, 32, device=device)
    assert seen(lambda: model(x)).ours == 0
    with torch.autocast("cuda", torch.bfloat16):
        assert seen(lambda: model(x)).ours == 2


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_compiled(device, name):
    torch.manual_seed(1)
    model = hugging_face(name).to(device).bfloat16()
    plain = copy.deepcopy(model)
    fast = torch.compile(optimized(model, device), fullgraph=True)
    ids = torch.randint(50, (2, 50), device=device)
    functional.fallbacks.clear()

    def loss(m):
        logits = m(input_ids=ids, use_cache=False).logits.float()
        value = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        value.backward()
        return value.item()

    assert abs(loss(fast) - loss(plain)) < 0.05
    for a, b in zip(model.parameters(), plain.parameters()):
        assert (a.grad - b.grad).float().norm() <= 0.1 * b.grad.float().norm() + 1e-4


def test_the_blackwell_modules(device):
    module = deepwell.BlackwellFlashAttention(deepwell.BlackwellConfig())
    q, k, v = (torch.randn(2, 4, 100, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (module(q, k, v, causal=True) - want).float().norm() <= 0.01 * want.float().norm()
    ours = deepwell.DWSelfAttention(256, 4, batch_first=True, device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 100, 256, device=device, dtype=torch.bfloat16)
    assert seen(lambda: ours(x, need_weights=False)).ours == 1
