"""optimize(precision=...): the products of linear layers against the recipes' rules, written out here.

The rules stand below in NumPy and Python (Philox, BF16, FP8, MX, NVFP4, the random Hadamard transform), with
their sources; products are taken in FP64. What may differ is the order of F32 sums alone: a sum of n
products in F32, in any order, is off by at most n * 2^-24 times the sum of their magnitudes (Higham 2002,
"Accuracy and Stability of Numerical Algorithms", 3.1), and each rounding behind it by 2^-24 of the result.
One code of one operand that is off moves the result by far more.
"""

import copy
import warnings

import deepwell
import numpy as np
import pytest
import torch
from compilers import needs_compiler
from deepwell import _deepwell
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

RECIPES = ("bf16", "fp8", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
# rows, K, N: blocks that are not full, one row, primes, one past a block, and one large enough for
# AMX
SHAPES = [(1, 1, 1), (1, 37, 5), (7, 33, 17), (16, 32, 16), (130, 161, 97)]

# ---- rules ---------------------------------------------------------------------------------------


def philox(seed, stream, count):
    """Returns the words of elements 0..count: Philox4x32-10 (Salmon et al. 2011), with number.h's
    counters."""
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    key = [np.uint64(seed[0] & 0xFFFFFFFF), np.uint64(seed[0] >> 32 & 0xFFFFFFFF)]
    c = [
        block & mask,
        np.uint64(stream) ^ block >> np.uint64(32) << np.uint64(20),
        np.full_like(block, seed[1] & 0xFFFFFFFF),
        np.full_like(block, seed[1] >> 32 & 0xFFFFFFFF),
    ]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ key[0],
            p1 & mask,
            (p0 >> np.uint64(32)) ^ c[3] ^ key[1],
            p0 & mask,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(c, axis=-1).reshape(-1)[:count]


def blocked(x, size):
    """Pads [outer, inner] with zeros along inner and divides it: [outer, blocks, size]."""
    outer, inner = x.shape
    x = np.pad(x, ((0, 0), (0, -inner % size)))
    return x.reshape(outer, -1, size)


def bf16(x):
    return torch.from_numpy(x).bfloat16().double().numpy()


def e4m3(x):
    return torch.from_numpy(np.asarray(x, np.float32)).to(torch.float8_e4m3fn).double().numpy()


# Fraction bits, exponent of the least normal number, largest number (OFP8 1.0; OCP MX 1.0, 5.3).
FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0), "e3m2": (2, -2, 28.0)}


def rounded(x, fraction, least):
    """Rounds to nearest even in FP64: the numbers of a binade are 2^-fraction of it apart."""
    with np.errstate(divide="ignore"):
        binade = np.maximum(np.floor(np.log2(np.abs(x))), least)
    quantum = np.exp2(binade - fraction)
    return np.rint(x / quantum) * quantum


def element(x, kind):
    fraction, least, largest = FORMATS[kind]
    return np.clip(rounded(x, fraction, least), -largest, largest)


def mx(x, kind, rule="rceil", random=None):
    """Blocks of 32 with a scale 2^e. RCEIL: the smallest with amax <= M * 2^e (arXiv 2506.08027); FLOOR and CEIL: that
    of log2(amax), less that of M's binade (OCP MX 1.0, 6.3; docs/numbers.md)."""
    largest = 6.0 if kind == "e2m1" else FORMATS[kind][2]
    parts = blocked(x, 32).astype(np.float64)
    amax = np.abs(parts).max(-1, keepdims=True)
    # exact in double, since M has few bits
    mantissa, exponent = np.frexp(amax / largest if rule == "rceil" else amax)
    exponent = exponent - (mantissa == 0.5) - (rule == "floor") * (mantissa != 0.5)
    if rule != "rceil":
        exponent = exponent - np.floor(np.log2(largest)).astype(int)
    scale = np.ldexp(1.0, np.where(amax == 0, -127, np.clip(exponent, -127, 127)))
    words = None
    if random is not None:
        words = blocked(philox(*random, x.size).reshape(x.shape).astype(np.float64), 32)
    codes = e2m1(parts / scale, words) if kind == "e2m1" else element(parts / scale, kind)
    return (codes * scale).reshape(x.shape[0], -1)[:, : x.shape[1]]


def fp8(x, kind):
    """Codes of x * (1 / s) and s = amax / M, each result in F32 (arXiv 2209.05433; Transformer Engine's current scaling)."""
    f32 = np.float32
    amax = np.abs(x).max(initial=0.0)
    scale = max(f32(amax) / f32(FORMATS[kind][2]), f32(2.0**-126)) if amax > 0 else f32(1)
    inverse = f32(1) / f32(scale)
    return element((x.astype(f32) * inverse).astype(f32).astype(np.float64), kind), scale


def fp8_block(x, square):
    """E4M3 codes of x / s and s = amax / 448 of 1 x 128 or 128 x 128 elements, each quotient rounded to F32
    (arXiv 2412.19437, 3.3.2). Returns codes times scales, which are exact in FP64."""
    f32 = np.float32
    parts = blocked(x.astype(f32), 128)
    amax = np.abs(parts).max(-1)
    if square:
        tall = np.pad(amax, ((0, -len(amax) % 128), (0, 0))).reshape(-1, 128, amax.shape[1]).max(1)
        amax = np.repeat(tall, 128, axis=0)[: len(amax)]
    scale = (amax / f32(448))[..., None]
    quotient = np.divide(parts, scale, out=np.zeros_like(parts), where=scale > 0)
    values = element(quotient.astype(np.float64), "e4m3") * scale.astype(np.float64)
    return values.reshape(x.shape[0], -1)[:, : x.shape[1]]


GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def e2m1(x, words=None):
    """Rounds to nearest (ties to the even code), or stochastically if words are given;
    saturating."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 6.0)
    below = np.searchsorted(GRID, magnitude, side="right") - 1
    above = np.minimum(below + 1, 7)
    gap = np.where(above > below, GRID[above] - GRID[below], 1.0)
    fraction = (magnitude - GRID[below]) / gap
    if words is None:
        up = (fraction > 0.5) | ((fraction == 0.5) & (below % 2 == 1))
    else:
        up = words + np.floor(fraction * 2.0**32) >= 2.0**32
    return np.copysign(GRID[np.where(up, above, below)], x)


def nvfp4(x, square=False, random=None):
    """Returns codes times block scales, and the tensor scale (arXiv 2509.25149, appendix on
    quantization)."""
    outer, inner = x.shape
    f32 = np.float32
    amax = np.abs(x).max(initial=0.0)
    tensor = f32(amax / f32(448 * 6)) if amax > 0 else f32(1)
    largest = np.abs(blocked(x, 16)).max(-1)
    if square:
        tall = np.pad(largest, ((0, -outer % 16), (0, 0))).reshape(-1, 16, largest.shape[1]).max(1)
        largest = np.repeat(tall, 16, axis=0)[:outer]
    scale = e4m3(np.minimum((largest.astype(f32) / f32(6)) / tensor, f32(448))).astype(f32)
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.minimum((f32(1) / tensor) / scale, np.finfo(f32).max)
    scaled = blocked(x, 16) * factor[..., None].astype(f32)
    scaled = np.where(scale[..., None] == 0, np.copysign(f32(0), scaled), scaled)
    words = None
    if random is not None:
        words = philox(*random, outer * inner).reshape(outer, inner)
        words = blocked(words.astype(np.float64), 16)
    codes = e2m1(scaled, words)
    return (codes * scale[..., None]).reshape(outer, -1)[:, :inner].astype(np.float64), tensor


def rotated(x):
    """Rotates runs of 16 by D H / 4, where D has fixed random signs; a shorter last run is
    unchanged. Butterflies are in F32."""
    whole = x.shape[1] // 16 * 16
    signs = np.where(
        philox((0, 0), 0, 1)[0] >> np.arange(16, dtype=np.uint64) & np.uint64(1), -1, 1
    )
    runs = (x[:, :whole].reshape(x.shape[0], -1, 16) * signs).astype(np.float32)
    for stride in (1, 2, 4, 8):
        pairs = runs.reshape(*runs.shape[:2], 8 // stride, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        runs = np.stack([a + b, a - b], axis=-2).reshape(runs.shape)
    runs = runs * np.float32(0.25)
    return np.concatenate([runs.reshape(x.shape[0], whole), x[:, whole:]], axis=1)


def operand(x, recipe, kind, columns=False, random=None):
    """Returns the FP64 values that a matmul over the last axis reads from the matrix, and
    separately its tensor scale."""
    rule = recipe.partition("+")[2] or "rceil"
    if recipe == "bf16":
        return bf16(x), 1.0
    if recipe == "fp8":
        return fp8(x, "e5m2" if kind == "gradient" else "e4m3")
    if recipe == "fp8-block":
        return fp8_block(x, kind.startswith("weight")), 1.0
    if recipe.startswith("mxfp8"):
        return mx(x, "e4m3", rule), 1.0
    if recipe == "mxfp6":
        return mx(x, "e3m2"), 1.0
    if recipe == "mxfp4":  # arXiv 2502.20586: both GEMMs of backward are rotated
        return mx(
            rotated(x) if columns or kind.endswith("backward") or kind == "gradient" else x,
            "e2m1",
            random=random,
        ), 1.0
    if columns:
        x = rotated(x)
    kind = kind.partition(" ")[0]
    return nvfp4(x, square=kind == "weight", random=random)


def product(a, b):
    """Returns (a b^T, the largest error of any sum in F32)."""
    (a, a_scale), (b, b_scale) = a, b
    scale = float(np.float32(a_scale)) * float(np.float32(b_scale))
    y = a @ b.T * scale
    bound = (a.shape[1] + 4) * 2.0**-24 * (np.abs(a) @ np.abs(b).T) * scale
    return y, bound + 2.0**-120


def linear(recipe, x, w, b, dy, seed):
    """Returns y, dx, dw, db and their bounds for w [N, K]."""

    def contiguous(t):
        return np.ascontiguousarray(t)

    y, y_bound = product(operand(x, recipe, "activation"), operand(w, recipe, "weight"))
    y = y + b
    dx, dx_bound = product(
        operand(dy, recipe, "gradient", random=(seed, 0)),
        operand(contiguous(w.T), recipe, "weight backward"),
    )
    dw, dw_bound = product(
        operand(contiguous(dy.T), recipe, "gradient", columns=True, random=(seed, 1)),
        operand(contiguous(x.T), recipe, "activation", columns=True),
    )
    db_bound = len(dy) * 2.0**-24 * np.abs(dy).sum(0)
    return (
        (y, y_bound + 2.0**-23 * np.abs(y)),
        (dx, dx_bound),
        (dw, dw_bound),
        (dy.astype(np.float64).sum(0), db_bound),
    )


# ---- matmuls
# -----------------------------------------------------------------------------------------


def values(kind, *shape):
    x = torch.randn(*shape)
    if kind == "mixed":  # magnitudes over six decades, whole blocks of zeros
        x = x * torch.exp2(torch.randint(-12, 9, shape).float())
        x[: (shape[0] + 1) // 3] = 0
    return x


def check_layer(plain, model, recipe, x, dy):
    """Calls the layer and its backward; returns all four results."""
    plain.weight.grad = plain.bias.grad = None
    torch.manual_seed(77)
    seed = [int(word) for word in torch.empty(2, dtype=torch.int64).random_()]
    torch.manual_seed(77)
    y = model(x)
    y.backward(dy)
    transposed = isinstance(plain, Conv1D)
    w = plain.weight.detach().T if transposed else plain.weight.detach()
    expected = linear(
        recipe, x.detach().numpy(), w.numpy().copy(), plain.bias.detach().numpy(), dy.numpy(), seed
    )
    dw = plain.weight.grad.T if transposed else plain.weight.grad
    for name, got, (wanted, bound) in zip(
        ("y", "dx", "dw", "db"), (y.detach(), x.grad, dw, plain.bias.grad), expected
    ):
        error = np.abs(got.double().numpy() - wanted)
        worst = (error / bound).max()
        assert worst <= 1, f"{name}: {error.max():.3g} off, {worst:.2f} of what F32 sums may be"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["linear", "conv1d"])
def test_gemms_of_a_linear_layer(layout, recipe, shape):
    rows, inputs, outputs = shape
    if layout == "conv1d" and rows not in (7, 130):
        pytest.skip("the layouts differ in strides alone: two shapes are enough")
    torch.manual_seed(rows)
    plain = torch.nn.Linear(inputs, outputs) if layout == "linear" else Conv1D(outputs, inputs)
    model = deepwell.optimize(plain, precision=recipe, verbose=False)
    for kind in ("normal", "mixed"):
        with torch.no_grad():
            plain.weight.copy_(values(kind, *plain.weight.shape))
            plain.bias.normal_()
        x, dy = values(kind, rows, inputs).requires_grad_(), values(kind, rows, outputs)
        check_layer(plain, model, recipe, x, dy)
    assert "2 calls by the engine, 0 by PyTorch" in deepwell.summary(model)


@pytest.mark.parametrize("layout", ["linear", "conv1d"])
def test_several_blocks_of_128(layout):
    """Blocks of 1 x 128 and 128 x 128 in each GEMM, the last ones short, with outliers that only their block's scale
    may follow. One scale for each tensor gives other results."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(300, 150) if layout == "linear" else Conv1D(150, 300)
    model = deepwell.optimize(plain, precision="fp8-block", verbose=False)
    x, dy = torch.randn(270, 300), torch.randn(270, 150)
    with torch.no_grad():
        plain.weight.view(-1)[::7919] *= 1e4
        plain.bias.normal_()
        x.view(-1)[::6007] *= 1e5
        dy.view(-1)[::5003] *= 1e5
    check_layer(plain, model, "fp8-block", x.requires_grad_(), dy)
    whole = operand(x.detach().numpy(), "fp8", "activation")
    blocks = operand(x.detach().numpy(), "fp8-block", "activation")
    assert np.abs(whole[0] * float(whole[1]) - blocks[0]).max() > 0.1


def test_three_axes_and_no_bias():
    """Leading axes are rows; a layer without a bias; input that needs no gradient."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(35, 21, bias=False)
    flat = copy.deepcopy(plain)
    x = torch.randn(2, 3, 5, 35)
    dy = torch.randn(2, 3, 5, 21)
    results = []
    for model, x_, dy_ in ((plain, x, dy), (flat, x.reshape(30, 35), dy.reshape(30, 21))):
        deepwell.optimize(model, precision="mxfp8", verbose=False)
        y = model(x_)
        y.backward(dy_)
        results.append((y.detach().reshape(30, 21), model.weight.grad))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


def test_stochastic_rounding_is_unbiased():
    """The mean of many roundings of one gradient approaches the gradient; with nearest rounding it does not."""
    torch.manual_seed(3)
    model = torch.nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(16))  # dx is then the rounded dy
    deepwell.optimize(model, precision="nvfp4", verbose=False)
    dy, x = torch.randn(1, 16), torch.randn(1, 16).requires_grad_()
    count = 2000
    total = torch.zeros(1, 16, dtype=torch.float64)
    for _ in range(count):
        x.grad = None
        model(x).backward(dy)
        total += x.grad
    # A code's step is at most 2 of the block's 6; the root of the variance is at most half of it.
    deviation = dy.abs().max() / 6.0 / count**0.5
    assert ((total / count - dy).abs() <= 5 * deviation + 1e-3 * dy.abs()).all()
    assert ((x.grad - dy).abs() > 5 * deviation).any()


# ---- models --------------------------------------------------------------------------------------


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_head=2, n_embd=64, n_positions=64, vocab_size=96)
    )


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=64,
            intermediate_size=160,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
            max_position_embeddings=64,
        )
    )


MODELS = {"gpt2": gpt2, "llama": llama}


def train(make, precision, steps):
    """Returns the losses of `steps` steps on repetitive text, which is learned quickly."""
    torch.manual_seed(0)
    model = make().eval()  # no dropout
    if precision is not None:
        deepwell.optimize(model, precision=precision, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        start = torch.randint(0, 96, (8, 1), generator=data)
        step = torch.randint(1, 4, (8, 1), generator=data)
        ids = (start + step * torch.arange(32)) % 96
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_small_models_learn_as_in_fp32(name):
    """Compares loss curves with FP32's: the tolerances are those that docs/precision.md states."""
    steps = 40
    exact, _ = train(MODELS[name], None, steps)
    assert exact[-1] < exact[0] / 2
    fp8 = [("fp8", 0.05), ("fp8-block", 0.05)] if name == "llama" else []  # long
    for recipe, tolerance in [("bf16", 0.02), ("mxfp8", 0.05), ("nvfp4", 0.15), *fp8]:
        losses, model = train(MODELS[name], recipe, steps)
        assert losses != exact
        apart = max(abs(a - b) / b for a, b in zip(losses, exact))
        print(
            f"{name} {recipe}: {losses[-1]:.4f} against {exact[-1]:.4f}, {apart:.4f} apart at most"
        )
        assert apart <= tolerance
        assert f" in {recipe.upper()}" in deepwell.summary(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_repeat_bit_for_bit_on_any_number_of_threads(recipe):
    def losses(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(67, 161),
                torch.nn.GELU(),
                torch.nn.Dropout(0.2),
                torch.nn.Linear(161, 35),
            )
            deepwell.optimize(model, precision=recipe, verbose=False)
            optimizer = deepwell.AdamW(model.parameters(), lr=1e-3)
            found = []
            for _ in range(4):
                loss = model(torch.randn(131, 67)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found
        finally:
            torch.set_num_threads(before)

    assert losses(1) == losses(2)


@pytest.mark.parametrize("name,count", [("gpt2", 16), ("llama", 28)])
def test_which_layers_have_the_recipe(name, count):
    """Attention's and the MLP's layers have the recipe, the head does not; NVFP4's last layers are BF16."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    deepwell.optimize(model, precision="nvfp4", verbose=False)
    ids = torch.arange(12).reshape(1, 12)
    model(input_ids=ids, labels=ids)
    share = round(0.15 * count)
    told = (
        f"{count - share} linear layers in NVFP4, {share} in BF16, 1 in the model's own precision"
    )
    assert told in deepwell.summary(model)


def engine_text(recipe, share=None):
    """Returns the scheduled graph of three layers, forward and backward."""
    from deepwell.capture import capture_graph

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False) for _ in range(3)])
    captured = capture_graph(model, (torch.randn(4, 32),))
    graph = captured.json.replace(
        '"leaves": [', '"leaves": [{"name": "s", "role": "seed", "dtype": "i64", "shape": [2]}, ', 1
    )
    graph = _deepwell.Graph(graph)
    wrt = [i for i, leaf in enumerate(captured.leaves, 1) if leaf.kind == "parameter"]
    policy = deepwell.PrecisionPolicy(recipe, bf16_share=share)
    return _deepwell.Engine(graph, [0], wrt, policy=policy._policy, recompute=False)


def test_share_in_bf16():
    def count(engine, what):
        return sum(what in line for line in engine.text().splitlines())

    full = engine_text("nvfp4", 0.0)
    assert full.quantized_count == 3
    # x and w of each of three layers; dy twice and x once more for each, but backward reuses
    # forward's w, and layer 0 needs no dx
    assert count(full, 'scheme="nvfp4"') == 3 * 2 + 3 + 2 + 3
    tail = engine_text("nvfp4", 0.34)
    assert tail.quantized_count == 3
    assert count(tail, 'scheme="nvfp4"') == 2 * 2 + 2 + 1 + 2
    assert count(engine_text("mxfp8"), 'scheme="mxfp8"') == 3 * 2 + 3 + 2 * 2 + 3
    bf16 = engine_text("bf16")  # casts, which are fused; each tensor is rounded once
    assert count(bf16, "quantize") == 0
    assert count(bf16, "cast") == 3 + 3 + 3


# ---- combinations with other features
# --------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_retain_graph_and_two_forwards(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(65, 17)
    )
    deepwell.optimize(model, precision=recipe, verbose=False)
    xs = [torch.randn(9, 33).requires_grad_() for _ in range(2)]
    outputs = [model(x).square().sum() for x in xs]  # two forwards, each with its own seed
    grads = []
    for _ in range(2):
        model.zero_grad()
        xs[1].grad = None
        outputs[1].backward(retain_graph=True)
        grads.append([xs[1].grad, *[p.grad.clone() for p in model.parameters()]])
    for first, second in zip(*grads):
        assert torch.equal(first, second)
    outputs[0].backward()
    assert torch.isfinite(xs[0].grad).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_in_parts(recipe):
    """Gradients so large that they arrive in parts: each must be the layer's own result."""
    torch.manual_seed(0)
    size = 1500
    model = torch.nn.Sequential(*[torch.nn.Linear(size, size, bias=False) for _ in range(3)])
    alone = copy.deepcopy(model[0])
    deepwell.optimize(model, precision=recipe, verbose=False)
    deepwell.optimize(alone, precision=recipe, verbose=False)
    x, dy = torch.randn(5, size).requires_grad_(), torch.randn(5, size)
    torch.manual_seed(1)
    y = model(x)
    y.backward(dy)
    forward = model.__dict__["forward"]
    (entries,) = forward._states[0].entries.values()
    (variant,) = [v for v in entries[0].program._variants.values() if v.wrt]
    assert variant.plan((5,) if entries[0].program.symbols else ()).part_count > 1
    # Recomputes the first layer's weight gradient from the gradient that reached it.
    for layer in model:
        assert torch.isfinite(layer.weight.grad).all() and layer.weight.grad.abs().max() > 0
    if recipe == "bf16":  # the slow rules would take long for so many numbers
        y_alone = alone(x.detach())
        reached = torch.randn(5, size)
        y_alone.backward(reached)
        expected = linear(
            recipe,
            x.detach().numpy(),
            alone.weight.detach().numpy(),
            np.zeros(size),
            reached.numpy(),
            None,
        )
        wanted, bound = expected[2]
        assert (np.abs(alone.weight.grad.double().numpy() - wanted) <= bound).all()


def test_fallbacks_warn():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    deepwell.optimize(model, precision="bf16", verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(3, 8))
    with torch.autograd.graph.save_on_cpu():
        with pytest.warns(RuntimeWarning, match="ran in PyTorch, not in BF16"):
            model(torch.randn(3, 8))


def test_wrong_precisions():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(deepwell.UnsupportedError, match="'fp16' is not supported: use one of fp32"):
        deepwell.optimize(model, precision="fp16")
    with pytest.raises(ValueError, match="precision='int8' does not exist: use one of auto, fp32"):
        deepwell.optimize(model, precision="int8")
    with pytest.raises(TypeError, match="policy must be a Policy or None"):
        _deepwell.Engine(
            _deepwell.Graph(
                '{"format": "deepwell.graph", "version": 1, "symbols": [], "leaves": '
                '[], "nodes": [], "outputs": []}'
            ),
            [],
            [],
            policy="int8",
        )


# ---- models in BF16 and FP16, autocast, an emulated GPU --------------------------------------------

# Unit roundoffs: the largest relative error of a rounding to nearest.
ROUNDOFF = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LEAST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # of subnormal numbers


def check_typed(model, call, recipe, dtype, x, dy, sums=1.0):
    """Checks a layer whose operands and results have the type: they are rounded to it before quantization, and once
    more behind the sums. ``sums``: how much larger the error of sums may be than that of rounding to nearest."""
    torch.manual_seed(77)
    seed = torch.empty(2, dtype=torch.int64, device=x.device).random_().tolist()
    torch.manual_seed(77)
    y = call(x)
    assert y.dtype == dtype
    y.backward(dy)
    operands = (x, model.weight, model.bias, dy)
    typed = [t.detach().cpu().to(dtype).float().numpy() for t in operands]
    expected = linear(recipe, *typed, seed)
    for name, got, (wanted, bound) in zip(
        ("y", "dx", "dw", "db"), (y.detach(), x.grad, model.weight.grad, model.bias.grad), expected
    ):
        error = np.abs(got.double().cpu().numpy() - wanted)
        bound = sums * bound + ROUNDOFF[dtype] * (np.abs(wanted) + sums * bound) + LEAST[dtype]
        worst = (error / bound).max()
        assert worst <= 1, f"{name}: {error.max():.3g} off, {worst:.2f} of what rounding may be"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_in_16_bits(dtype, recipe):
    torch.manual_seed(0)
    model = torch.nn.Linear(67, 35).to(dtype)
    deepwell.optimize(model, precision=recipe, verbose=False)
    for rows in (1, 41):
        model.zero_grad()
        x, dy = torch.randn(rows, 67, dtype=dtype), torch.randn(rows, 35, dtype=dtype)
        check_typed(model, model, recipe, dtype, x.requires_grad_(), dy)
    assert "2 calls by the engine, 0 by PyTorch" in deepwell.summary(model)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
def test_autocast(recipe):
    """Autocast casts the operands to BF16, and the policy quantizes these."""
    torch.manual_seed(0)
    model = torch.nn.Linear(67, 35)
    deepwell.optimize(model, precision=recipe, verbose=False)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    x, dy = torch.randn(41, 67).requires_grad_(), torch.randn(41, 35).bfloat16()
    check_typed(model, call, recipe, torch.bfloat16, x, dy)
    assert x.grad.dtype == torch.float32
    assert "1 calls by the engine, 0 by PyTorch" in deepwell.summary(model)


@needs_compiler
@pytest.mark.parametrize(
    "recipe,dtype",
    [
        ("fp8", torch.bfloat16),
        ("fp8-block", torch.bfloat16),
        ("nvfp4", torch.bfloat16),
        ("mxfp8+floor", torch.float32),
    ],
    ids=str,
)
def test_an_emulated_gpu(recipe, dtype):
    """The same codes as on a CPU. Hopper's tensor cores truncate sums: their error is at most twice that of rounding to
    nearest for each operation, and an alignment to the largest of 16 products costs as much again."""
    torch.manual_seed(0)
    model = torch.nn.Linear(72, 40).to(dtype)
    deepwell.optimize(
        model, precision=policy_with_rule(recipe), target="emulator:sm_90a", verbose=False
    )
    x, dy = torch.randn(17, 72, dtype=dtype), torch.randn(17, 40, dtype=dtype)
    # FP8 tensor cores multiply the codes of fp8-block: they add 32 products, and the sum of at most 128, in 14 bits.
    in_14_bits = 1.1 * 2.0**-13 / 2.0**-24
    sums = in_14_bits if recipe == "fp8-block" else 4.0
    check_typed(model, model, recipe, dtype, x.requires_grad_(), dy, sums=sums)
    text = deepwell.summary(model)
    assert "1 calls by the engine, 0 by PyTorch" in text
    name = recipe.partition("+")[0].upper()
    told = {
        "FP8": "FP8 codes are multiplied",
        "FP8-BLOCK": "FP8-BLOCK on tensor cores: 3 of 3 products, forward and backward, multiply codes",
    }
    assert told.get(name, f"{name} simulated in BF16: this GPU has no") in text


@needs_compiler
@pytest.mark.parametrize("features, kernel", [(90, "fp8_block_gemm"), (96, "sm90_codes")])
def test_products_by_blocks_pass_their_first_use_check(features, kernel):
    """Otherwise the engine would take the products in F16, or on FMA units. Results whose rows are not multiples of 16
    bytes are multiplied in F16."""
    inputs = 150 if kernel == "fp8_block_gemm" else 152
    model = torch.nn.Linear(inputs, features, dtype=torch.bfloat16)
    example = torch.randn(40, inputs, dtype=torch.bfloat16, requires_grad=True)
    policy = deepwell.PrecisionPolicy("fp8-block", [])
    engine = deepwell.compile(
        model, precision=policy, example_inputs=example, target="emulator:sm_90a"
    )
    engine(example).sum().backward()
    kernels = [op.kernel for op in engine.compiled_ops if op.op == "multiply_codes"]
    assert kernels == [kernel] * 3


@needs_compiler
def test_programs_find_the_scale_of_what_they_make():
    """An activation's result and gradient are quantized by the magnitude that their own programs have found, in each step
    anew: calls whose operands are a hundred times as large follow each other. A few codes differ from the CPU's by one
    step, a quarter of their value or less, because sums before them round otherwise in their last bit; with the scale of
    another call the results would differ by much of their size."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(48, 80), torch.nn.SiLU(), torch.nn.Linear(80, 32)]
    plain = torch.nn.Sequential(*layers).bfloat16()
    policy = deepwell.PrecisionPolicy("fp8", [])
    models = {
        target: deepwell.compile(
            copy.deepcopy(plain),
            precision=policy,
            example_inputs=torch.zeros(16, 48, dtype=torch.bfloat16, requires_grad=True),
            target=target,
        )
        for target in ("cpu", "emulator:sm_90a")
    }
    told = [
        op.phase
        for op in models["emulator:sm_90a"].compiled_ops
        if op.op == "quantize_tensor" and len(op.inputs) == 2
    ]
    assert told == ["forward", "backward"]
    for size in (1.0, 100.0, 0.01):
        x = (size * torch.randn(16, 48)).bfloat16()
        dy = (size * torch.randn(16, 32)).bfloat16()
        found = []
        for model in models.values():
            own = x.clone().requires_grad_()
            y = model(own)
            y.backward(dy)
            found.append((y.detach().float(), own.grad.float()))
        for cpu, gpu in zip(*found):
            assert (cpu - gpu).norm() < 0.02 * cpu.norm()


@needs_compiler
def test_programs_make_the_codes_of_what_they_compute(monkeypatch):
    """SwiGLU and its gradient write the codes that the next products read, which have the bits of two kernels. The gate's
    rows are special: tiles of the gradient with an infinity are encoded by division."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = torch.nn.Linear(48, 136), torch.nn.Linear(48, 136)
            self.down = torch.nn.Linear(136, 32)

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    torch.manual_seed(0)
    plain = Layer().bfloat16()
    x, dy = torch.randn(2, 72, 48).bfloat16(), torch.randn(2, 72, 32).bfloat16()
    dy[1, 70, 3] = float("inf")
    found = []
    for epilogues in ("off", ""):  # empty: the default
        monkeypatch.setenv("DEEPWELL_EPILOGUES", epilogues)
        model = deepwell.compile(
            copy.deepcopy(plain),
            precision=deepwell.PrecisionPolicy("fp8-block", []),
            example_inputs=torch.zeros_like(x, requires_grad=True),
            target="emulator:sm_90a",
        )
        own = x.clone().requires_grad_()
        y = model(own)
        y.backward(dy)
        made = [op.phase for op in model.compiled_ops if op.kernel == "sm90_program_codes"]
        assert made == ([] if epilogues == "off" else ["forward", "backward"])
        found.append([y.detach(), own.grad, *(p.grad for p in model.parameters())])
    assert all(t.isfinite().all() for t in found[0][:1])
    for apart, together in zip(*found):
        assert torch.equal(apart.view(torch.int16), together.view(torch.int16))


def policy_with_rule(recipe):
    name, _, rule = recipe.partition("+")
    if not rule:
        return name
    return deepwell.PrecisionPolicy(
        name, [], deepwell.MicroscalingConfig(block_size=32, scale_rule=rule)
    )


@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_scale_rules(rule):
    torch.manual_seed(0)
    recipe = f"mxfp8+{rule}"
    model = torch.nn.Linear(161, 97)
    deepwell.optimize(model, precision=policy_with_rule(recipe), verbose=False)
    with torch.no_grad():
        model.weight.copy_(values("mixed", 97, 161))
    x, dy = values("mixed", 130, 161).requires_grad_(), values("mixed", 130, 97)
    check_layer(model, model, recipe, x, dy)


def test_fp8_keeps_infinities_and_zeros():
    model = torch.nn.Linear(3, 2, bias=False)
    deepwell.optimize(model, precision="fp8", verbose=False)
    assert torch.equal(model(torch.zeros(4, 3)), torch.zeros(4, 2))
    x = torch.zeros(4, 3)
    x[1, 2] = float("inf")
    y = model(x)
    assert y[1].isnan().all() and torch.equal(y[0], torch.zeros(2))  # E4M3 has no infinity
