"""Codes with scales of blocks on an emulated Blackwell GPU: the engine multiplies MXFP8, MXFP4 and NVFP4 codes there."""

import json
import re

import deepwell
import pytest
import torch
from compilers import needs_blackwell_compiler
from test_precision import check_typed
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BLACKWELL = "emulator:sm_100a"

pytestmark = needs_blackwell_compiler


def on_tensor_cores(model):
    """Returns how many products multiply codes, and of how many."""
    found = re.search(r"on tensor cores: (\d+) of (\d+) products", deepwell.summary(model))
    return tuple(map(int, found.groups())) if found else (0, 0)


@pytest.mark.parametrize(
    "recipe,dtype,shape",
    [
        ("mxfp8", torch.bfloat16, (150, 72, 136)),
        ("mxfp8", torch.float32, (37, 76, 44)),  # rows of codes are padded
        ("mxfp4", torch.bfloat16, (41, 72, 40)),
        ("nvfp4", torch.float16, (150, 72, 136)),
        ("nvfp4", torch.float32, (33, 132, 44)),
    ],
    ids=str,
)
def test_a_layer(recipe, dtype, shape):
    """The same codes as the definition's, forward and backward. Sums are rounded as often as on a CPU."""
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    model = torch.nn.Linear(inputs, outputs).to(dtype)
    deepwell.optimize(model, precision=recipe, target=BLACKWELL, verbose=False)
    x, dy = torch.randn(rows, inputs, dtype=dtype), torch.randn(rows, outputs, dtype=dtype)
    check_typed(model, model, recipe, dtype, x.requires_grad_(), dy)
    text = deepwell.summary(model)
    assert "1 calls by the engine, 0 by PyTorch" in text and "simulated" not in text
    assert on_tensor_cores(model) == (3, 3)
    assert f"{recipe.upper()} on tensor cores" in text


@pytest.mark.parametrize("recipe,dtype", [("mxfp8", torch.bfloat16), ("nvfp4", torch.float16)])
def test_a_layer_on_an_rtx_gpu(recipe, dtype, monkeypatch):
    """The same by the kernels of sm_120a, which multiply by mma.sync. test_sm120_gemm_scaled runs their first-use check."""
    monkeypatch.setenv("DEEPWELL_FIRST_USE_CHECK", "off")
    torch.manual_seed(0)
    model = torch.nn.Linear(72, 136).to(dtype)
    deepwell.optimize(model, precision=recipe, target="emulator:sm_120a", verbose=False)
    x, dy = torch.randn(150, 72, dtype=dtype), torch.randn(150, 136, dtype=dtype)
    check_typed(model, model, recipe, dtype, x.requires_grad_(), dy)
    assert on_tensor_cores(model) == (3, 3)


def test_sizes_that_the_kernels_lack_are_simulated():
    """A result's rows must be multiples of 16 bytes: of 8 elements in BF16."""
    torch.manual_seed(0)
    model = torch.nn.Linear(72, 42).bfloat16()
    deepwell.optimize(model, precision="mxfp8", target=BLACKWELL, verbose=False)
    x, dy = torch.randn(17, 72).bfloat16(), torch.randn(17, 42).bfloat16()
    check_typed(model, model, "mxfp8", torch.bfloat16, x.requires_grad_(), dy)
    assert on_tensor_cores(model) == (2, 3)  # dx and dw have rows of 72
    told = deepwell.summary(model)
    assert (
        "MXFP8 simulated in BF16: 1 product, the first because GEMM: the rows of D are 42 " in told
    )


def test_the_reason_is_that_of_a_simulated_product():
    """Rows of 44 elements are multiples of 16 bytes in F32, and not in BF16: the product is computed in F32 and rounded
    afterwards. That it has no kernel in BF16 is not why another one, with rows of 42, is simulated."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(72, 44, bias=False), torch.nn.Linear(44, 42)
    model = torch.nn.Sequential(*layers).bfloat16()
    deepwell.optimize(model, precision="mxfp8", target=BLACKWELL, verbose=False)
    model(torch.randn(17, 72).bfloat16())
    assert on_tensor_cores(model) == (4, 5)
    told = deepwell.summary(model)
    assert "1 product, the first because GEMM: the rows of D are 42 elements" in told


def test_formats_of_which_there_are_no_tensor_cores():
    model = torch.nn.Linear(72, 40).bfloat16()
    deepwell.optimize(model, precision="mxfp6", target=BLACKWELL, verbose=False)
    model(torch.randn(17, 72).bfloat16())
    assert "MXFP6 simulated in BF16: this GPU has no MXFP6 tensor cores" in deepwell.summary(model)


def plan_of_a_layer(precision, bias):
    """Returns the graph and the plan's operations of a training step."""
    model = torch.nn.Linear(72, 40, bias=bias).bfloat16()
    deepwell.optimize(model, precision=precision, target=BLACKWELL, verbose=False)
    model(torch.randn(17, 72).bfloat16().requires_grad_()).sum().backward()
    (entries,) = model.__dict__["forward"]._states[0].entries.values()
    (variant,) = [v for v in entries[0].program._variants.values() if v.wrt]
    plan = variant.plan((17,) if entries[0].program.symbols else ()).operations()
    return variant.engine.text(), json.loads(plan)


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_the_product_adds_the_bias(precision):
    """Forward writes no result in F32: the sum with the bias is rounded once, by the product."""
    text, plan = plan_of_a_layer(precision, bias=True)
    kernel = "gemm_scaled" if precision == "mxfp8" else "multiply_codes"
    forward = [o["kernel"] for o in plan if o["phase"] == "forward"]
    assert forward[-1] == kernel and "elementwise" not in forward
    assert "dtype=bf16" in text


def test_weights_are_quantized_once():
    """One read makes both orientations. Backward quantizes its gradient alone and reads the codes of forward."""
    text, plan = plan_of_a_layer("mxfp8", bias=False)
    assert text.count("= quantize_tiles(") == 3 and text.count("= multiply_codes(") == 3
    assert "quantize(" not in text
    assert [o["kernel"] for o in plan if o["phase"] == "backward"] == [
        "quantize_tiles",
        "gemm_scaled",
        "gemm_scaled",
    ]


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=32, vocab_size=64)
    )


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=1,
            hidden_size=32,
            intermediate_size=80,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            max_position_embeddings=32,
        )
    )


def gradients(make, steps=1, **options):
    """Returns the losses of steps of SGD, the gradients of the first one, and the model."""
    torch.manual_seed(0)
    model = make().eval()  # no dropout
    ids = torch.randint(0, 64, (2, 17))
    if options:
        deepwell.optimize(model, verbose=False, **options)
    losses, first = [], None
    for _ in range(steps):
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad
    return losses, first, model


def distance(ours, theirs):
    """Returns the largest difference of a gradient, relative to its norm."""
    return max(
        float((ours[name] - g).norm() / g.norm()) for name, g in theirs.items() if g.norm() > 0
    )


@pytest.mark.parametrize(
    "make,recipe",
    [(gpt2, "mxfp8"), (llama, deepwell.PrecisionPolicy("nvfp4", bf16_share=0.0))],
    ids=["gpt2-mxfp8", "llama-nvfp4"],
)
def test_a_model_trains_as_on_a_cpu(make, recipe):
    """The codes of equal numbers are equal. Activations differ in their last bits, because each machine adds in its own
    order, so that a few that lie between two codes get another one. What the formats themselves change is many times
    larger."""
    losses, grads, model = gradients(make, steps=2, precision=recipe, target=BLACKWELL)
    simulated, expected, _ = gradients(make, steps=2, precision=recipe)
    _, unrounded, _ = gradients(make)
    multiplied, of = on_tensor_cores(model)
    assert multiplied == of > 0
    assert distance(grads, expected) < 0.1 * distance(unrounded, expected)
    assert losses == pytest.approx(simulated, rel=1e-3) and losses[1] < losses[0]
