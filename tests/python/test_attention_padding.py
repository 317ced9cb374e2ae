"""nn.MultiheadAttention with the arguments that most models use: key padding, and requested
weights. The expected results are those of PyTorch's own module in FP64.
"""

import copy
import itertools

import pytest
import torch
from attention_tools import (
    BACKWARD,
    FORWARD,
    apart,
    attention_nodes,
    compiled,
    said,
    seen,
)
from deepwell.attention import functional, install, padding

# FP32 arithmetic of a few dozen terms of order one.
_CLOSE = 2e-5


def off(ours, exact) -> float:
    """Returns the largest difference, relative to the largest number of its tensor (or to 1). About
    700 products contribute to an element, through half a dozen roundings: 6 sqrt(700) 2^-24 is
    1e-5.
    """
    return apart(
        *[[t / e.abs().max().clamp_min(1) for t, e in zip(x, exact)] for x in (ours, exact)]
    )


pytestmark = pytest.mark.usefixtures("attention_on_cpu")


def mask_of(*rows: str) -> torch.Tensor:
    """Makes a key_padding_mask from one letter per key: x is ignored."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


MASKS = {
    "right": mask_of("....xxx", ".......", ".xxxxxx"),
    "left": mask_of("xxx....", ".......", "xxxxxx."),
    "both sides": mask_of("xx...xx", "x......", "......x"),
    "holes": mask_of("x.x..x.", ".......", "..xxx.."),
    "all kept": mask_of(*["......."] * 3),
}


def module_and_exact(**settings):
    module = torch.nn.MultiheadAttention(32, 4, **settings)
    torch.nn.init.normal_(module.in_proj_weight, std=0.5)  # so that attention is not just a mean
    torch.nn.init.normal_(module.in_proj_bias)
    plain = copy.deepcopy(module).double()
    install.install(module, "test")
    return module, plain


def run(module, given, options, use_weights, d_out, d_weights):
    """Returns the output, the weights, and all gradients."""
    dtype = module.out_proj.weight.dtype
    leaves = [t.detach().to(dtype).requires_grad_() for t in given]
    x = leaves if len(leaves) == 3 else leaves * 3
    out, weights = module(*x, **options)
    loss = (out * d_out.to(dtype)).sum()
    if use_weights:
        loss = loss + (weights * d_weights.to(dtype)).sum()
    grads = torch.autograd.grad(loss, [*leaves, *module.parameters()])
    made = [out.detach(), *grads] if weights is None else [out.detach(), weights.detach(), *grads]
    return [t.float() for t in made]


def both(module, plain, given, options, use_weights=False):
    batch_first = module.batch_first
    rows_q = given[0].shape[1 if batch_first else 0]
    rows_k = given[-1].shape[1 if batch_first else 0]
    d_out = torch.randn(given[0].shape)
    average = options.get("average_attn_weights", True)
    d_weights = torch.randn(3, *([] if average else [4]), rows_q, rows_k)
    wide = {
        name: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for name, v in options.items()
    }
    rest = (use_weights, d_out, d_weights)
    return run(module, given, options, *rest), run(plain, given, wide, *rest)


def operands(kind, batch_first, rows_q=7):
    def one(rows):
        return torch.randn(3, rows, 32) if batch_first else torch.randn(rows, 3, 32)

    return [one(7)] if kind == "self" else [one(rows_q), one(7), one(7)]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("use_weights", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_weights(average, use_weights, causal, batch_first):
    module, plain = module_and_exact(batch_first=batch_first)
    options = dict(average_attn_weights=average)
    if causal:
        options |= dict(attn_mask=torch.full((7, 7), -torch.inf).triu(1), is_causal=True)
    for kind in ("self",) if causal else ("self", "cross"):
        given = operands(kind, batch_first, 5)
        assert off(*both(module, plain, given, options, use_weights)) < _CLOSE
    x = given * (3 // len(given))
    assert seen(lambda: module(*x, **options)).ours == 1
    module.eval()
    with torch.no_grad():
        assert seen(lambda: module(*x, **options)).ours == 1
        wide = [t.double() for t in x]
        if causal:
            options["attn_mask"] = options["attn_mask"].double()
        ours, theirs = module(*x, **options), plain.eval()(*wide, **options)
        assert apart(ours, [t.float() for t in theirs]) < _CLOSE


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_have_pytorch_s_dtype_and_shape(autocast):
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 5, 32)
    if not autocast:
        module, x = module.bfloat16(), x.bfloat16()
    plain = copy.deepcopy(module)
    install.install(module, "test")
    with torch.autocast("cpu", torch.bfloat16, autocast):
        for average in (True, False):
            (a, p), (b, r) = (
                m(x, x, x, average_attn_weights=average, need_weights=True) for m in (module, plain)
            )
            assert (a.dtype, a.shape, p.dtype, p.shape) == (b.dtype, b.shape, r.dtype, r.shape)
            # several roundings to BF16 of numbers below one
            assert (p.float() - r.float()).abs().max() < 2**-6
    p.float().square().sum().backward(), r.float().square().sum().backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad.dtype == theirs.grad.dtype
            scale = theirs.grad.float().norm() + 1e-3
            assert (ours.grad - theirs.grad).float().norm() < 0.05 * scale


def test_weights_save_no_tensors_without_backward():
    module, _ = module_and_exact(batch_first=True)
    x = torch.randn(2, 40, 32)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        out, weights = module(x, x, x)
    assert max(t.numel() for t in kept) < 2 * 4 * 40 * 40
    times = []
    weights.register_hook(times.append)
    out.sum().backward()
    assert not times


def test_weights_after_dropout_are_pytorch_s():
    module, _ = module_and_exact(batch_first=True, dropout=0.2)
    x = torch.randn(2, 5, 32)
    assert seen(lambda: module(x, x, x)).ours == 0
    assert "and dropout changes them" in next(iter(module.forward.fallbacks))
    assert seen(lambda: module(x, x, x, need_weights=False)).ours == 1
    assert seen(lambda: module.eval()(x, x, x)).ours == 1


def test_weights_have_one_derivative():
    module, _ = module_and_exact(batch_first=True)
    x = torch.randn(2, 5, 32, requires_grad=True)
    first = torch.autograd.grad(module(x, x, x)[1].square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("use_weights", [False, True])
def test_weights_compiled(use_weights):
    module, _ = module_and_exact(batch_first=True)
    x, graphs = torch.randn(2, 5, 32), []

    def loss(module):
        out, weights = module(x, x, x)
        return out.square().sum() + (weights.square().sum() if use_weights else 0)

    fast = compiled(loss, graphs)
    grads = [torch.autograd.grad(f(module), list(module.parameters())) for f in (fast, loss)]
    assert apart(*grads) < _CLOSE * 10
    assert sorted(attention_nodes(graphs)) == sorted([FORWARD, BACKWARD])
    softmaxes = [n for g in graphs for n in g.graph.nodes if "softmax" in str(n.target)]
    assert bool(softmaxes) == use_weights


# ---- padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize(
    ("kind", "batch_first"), list(itertools.product(["self", "cross"], [False, True])), ids=str
)
def test_padding(name, as_float, kind, batch_first):
    module, plain = module_and_exact(batch_first=batch_first)
    mask = MASKS[name]
    if as_float:
        mask = torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
    for need_weights in (False, True):
        options = dict(key_padding_mask=mask, need_weights=need_weights)
        given = operands(kind, batch_first, 5)
        assert off(*both(module, plain, given, options, need_weights)) < _CLOSE
        x = given * (3 // len(given))
        assert seen(lambda: module(*x, **options)).ours == 1
        module.eval()
        with torch.no_grad():
            assert seen(lambda: module(*x, **options)).ours == 1
        module.train()
    assert not module.forward.fallbacks


@pytest.mark.parametrize("name", list(MASKS))
def test_padding_of_causal_calls(name):
    module, plain = module_and_exact(batch_first=True)
    mask = torch.zeros(3, 7).masked_fill(MASKS[name], -torch.inf)
    options = dict(
        key_padding_mask=mask,
        attn_mask=torch.full((7, 7), -torch.inf).triu(1),
        is_causal=True,
        need_weights=False,
    )
    taken = name in ("right", "all kept")
    x = torch.randn(3, 7, 32)
    assert seen(lambda: module(x, x, x, **options)).ours == taken
    assert off(*both(module, plain, [x], options)) < _CLOSE
    because = "a causal mask is combined with padding that is not at the end of the rows"
    assert taken or list(module.forward.fallbacks) == [because]


@pytest.mark.parametrize("case", range(24))
def test_random_padding(case):
    """Compares attend() with attention with the mask as a tensor, for calls where both must
    agree."""
    draw = torch.Generator().manual_seed(case)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    batch, rows, group = number(1, 4), number(1, 12), number(1, 2)
    causal = case % 2 == 1
    rows_q = rows if causal else number(1, 9)
    window = (number(0, 5) if case % 4 == 3 else -1, 0) if causal else (-1, -1)
    if case % 3 == 0:
        kept = torch.rand(batch, rows, generator=draw) < 0.6
        kept[:, number(0, rows - 1)] = True
    else:
        begin = torch.randint(0, rows, (batch, 1), generator=draw)
        end = begin + torch.randint(1, rows + 1, (batch, 1), generator=draw)
        kept = (torch.arange(rows) >= begin) & (torch.arange(rows) < end)
    found = padding.of_keys_kept(kept)
    gathered = causal and not found.is_solid
    assert bool(padding.why_not(found, rows_q, window)) == (gathered and window[0] >= 0)
    if gathered and window[0] >= 0:
        return
    q = torch.randn(batch, 2 * group, rows_q, 8, generator=draw, requires_grad=True)
    k, v = (torch.randn(batch, 2, rows, 8, generator=draw, requires_grad=True) for _ in range(2))
    seen_keys = functional.visible(rows_q, rows, window, False, "cpu") & kept[:, None, None]
    d_o = torch.randn(q.shape, generator=draw)
    if gathered:  # padded queries get zeros
        d_o = torch.where(kept[:, None, :, None], d_o, 0.0)
    results = []
    for wide in (False, True):
        leaves = [
            t.detach().to(torch.float64 if wide else t.dtype).requires_grad_() for t in (q, k, v)
        ]
        if wide:
            k_, v_ = (t.repeat_interleave(group, 1) for t in leaves[1:])
            scores = leaves[0] @ k_.mT * 0.3
            p = torch.softmax(scores.masked_fill(~seen_keys, -1e300), -1) * seen_keys.any(-1, True)
            out = p @ v_
            if gathered:
                out = torch.where(kept[:, None, :, None], out, 0.0)
        else:
            out = padding.attend(*leaves, found, 0.0, 0.3, window=window)
        grads = torch.autograd.grad(out, leaves, d_o.to(out.dtype))
        results.append([t.detach().float() for t in (out, *grads)])
    assert off(*results) < _CLOSE


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("as_float", [False, True])
def test_causal_masks_without_the_hint(need_weights, as_float):
    module, plain = module_and_exact(batch_first=True)
    mask = torch.ones(7, 7).triu(1).bool()
    if as_float:
        mask = torch.zeros(7, 7).masked_fill(mask, -torch.inf)
    options = dict(attn_mask=mask, need_weights=need_weights)
    x = torch.randn(3, 7, 32)
    assert seen(lambda: module(x, x, x, **options)).ours == 1
    assert off(*both(module, plain, [x], options, need_weights)) < _CLOSE
    mask[3, 5] = 0  # the mask is no longer causal
    assert seen(lambda: module(x, x, x, **options)).ours == 0
    assert off(*both(module, plain, [x], options, need_weights)) < _CLOSE


def test_padded_keys_do_not_reach_results():
    module, _ = module_and_exact(batch_first=True)
    x, y = torch.randn(3, 7, 32), torch.randn(3, 7, 32)
    for name, mask in MASKS.items():
        loud = torch.where(mask[..., None], torch.full_like(y, torch.inf), y)
        options = dict(key_padding_mask=mask, need_weights=False)
        quiet = module(x, y, y, **options)[0]
        assert torch.equal(module(x, loud, loud, **options)[0], quiet), name


def test_dropout_with_padding():
    module, _ = module_and_exact(batch_first=True, dropout=0.5)
    x = torch.randn(3, 7, 32)
    for mask in MASKS.values():
        options = dict(key_padding_mask=mask, need_weights=False)
        assert seen(lambda: module(x, x, x, **options)).ours == 1
        torch.manual_seed(3)
        a, b = (module(x, x, x, **options)[0] for _ in range(2))
        torch.manual_seed(3)
        assert torch.equal(module(x, x, x, **options)[0], a) and not torch.equal(a, b)
        # The mean over many masks equals the call without dropout.
        exact = module.eval()(x, x, x, **options)[0]
        many = torch.stack([module.train()(x, x, x, **options)[0] for _ in range(200)])
        spread = many.std(0) / 200**0.5
        assert ((many.mean(0) - exact).abs() < 6 * spread + 1e-5).all()


def test_mask_is_read_once(monkeypatch):
    looks = []
    made = padding.Padding.__init__
    monkeypatch.setattr(padding.Padding, "__init__", lambda *a: looks.append(1) or made(*a))
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    plain = copy.deepcopy(model)
    install.install(model, "test")
    x, mask = torch.randn(7, 3, 32), MASKS["right"].clone()
    assert seen(lambda: model(x, src_key_padding_mask=mask)).ours == 3
    assert len(looks) == 1
    out = model(x, src_key_padding_mask=mask)
    assert apart([out], [plain(x, src_key_padding_mask=mask)]) < _CLOSE
    attention = model.layers[0].self_attn
    looks.clear()
    for _ in range(3):
        attention(x, x, x, key_padding_mask=mask)
    assert len(looks) == 1
    mask = mask.clone()
    attention(x, x, x, key_padding_mask=mask)
    assert len(looks) == 2
    mask[0, 0] = True
    changed = attention(x, x, x, key_padding_mask=mask)[0]
    assert len(looks) == 3
    assert apart([changed], [plain.layers[0].self_attn(x, x, x, key_padding_mask=mask)[0]]) < _CLOSE
    with torch.inference_mode():  # writes leave no trace in the caller's tensor
        own = MASKS["right"].clone()
        first = attention(x, x, x, key_padding_mask=own)[0]
        own[0, 0] = True
        assert not torch.equal(attention(x, x, x, key_padding_mask=own)[0], first)


def test_masks_of_inference_serve_training():
    module, plain = module_and_exact(batch_first=True)
    for mask in MASKS.values():
        mask, x = mask.clone(), torch.randn(3, 7, 32)
        for need_weights in (False, True):
            options = dict(key_padding_mask=mask, need_weights=need_weights)
            with torch.inference_mode():
                module(x, x, x, **options)
            assert off(*both(module, plain, [x], options, need_weights)) < _CLOSE


def test_masks_with_a_gradient_are_pytorch_s():
    module, plain = module_and_exact(batch_first=True)
    x, mask = torch.randn(3, 7, 32), torch.zeros(3, 7, requires_grad=True)
    grads = []
    for m in (module, plain.float()):
        out = m(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        grads.append(torch.autograd.grad(out.square().sum(), mask)[0])
    assert torch.equal(*grads) and grads[0].abs().max() > 0
    assert list(module.forward.fallbacks) == ["a mask has a gradient"]


def test_padding_while_tracing_is_pytorch_s():
    module, plain = module_and_exact(batch_first=True)
    plain = plain.float()
    x, graphs = torch.randn(3, 7, 32), []
    options = dict(key_padding_mask=MASKS["left"], need_weights=False)
    fast = compiled(module, graphs)
    assert apart([fast(x, x, x, **options)[0]], [plain(x, x, x, **options)[0]]) < _CLOSE
    assert FORWARD not in attention_nodes(graphs)


def test_padding_without_a_deepwell_kernel(monkeypatch):
    """Only libdeepwell, after reading the mask, knows that no kernel supports it: PyTorch's attention runs on
    the same projections.
    """
    module, plain = module_and_exact(batch_first=True)
    monkeypatch.setattr(functional, "why_not_kernels", lambda *_: "no kernel")
    for name, mask in MASKS.items():
        for need_weights in (False, True):
            functional.forget()
            options = dict(key_padding_mask=mask, need_weights=need_weights)
            x = torch.randn(3, 7, 32)
            assert seen(lambda: module(x, x, x, **options)).ours == 0
            assert off(*both(module, plain, [x], options, need_weights)) < _CLOSE, name
    assert functional.fallbacks["no kernel"] > 0


def test_decoder_layers_with_padding():
    layer = torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerDecoder(layer, 2)
    plain = copy.deepcopy(model)
    install.install(model, "test")
    x, memory = torch.randn(3, 7, 32), torch.randn(3, 7, 32)
    options = dict(
        tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(7),
        tgt_is_causal=True,
        tgt_key_padding_mask=torch.zeros(3, 7).masked_fill(MASKS["right"], -torch.inf),
        memory_key_padding_mask=MASKS["holes"],
    )
    assert seen(lambda: model(x, memory, **options)).ours == 4
    results = []
    for m in (model, plain):
        out = m(x, memory, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(m.parameters()))])
    assert apart(*results) < _CLOSE * 10


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(3, 6).bool(), torch.zeros(2, 7).bool(), torch.zeros(3, 7).int()],
    ids=said,
)
def test_errors_of_masks_are_pytorch_s(mask):
    module, plain = module_and_exact(batch_first=True)
    x = torch.randn(3, 7, 32)
    errors = []
    for m in (module, plain.float()):
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            m(x, x, x, key_padding_mask=mask)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
