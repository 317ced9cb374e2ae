"""Attention on the GPU through PyTorch: compared with FP64 on random calls, and in every context in
which users make calls."""

import attention_reference as reference
import pytest
import torch
import torch.nn.functional as F
from attention_tools import BACKWARD, FORWARD, apart, attention_nodes, compiled, seen
from deepwell.attention import attention, functional, operators, packed_attention
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint


def lying(shape, layout, dtype, device):
    """Makes a random [batch, heads, rows, dim] tensor in a layout."""
    b, h, s, d = shape
    if layout == "bhsd":
        return torch.randn(b, h, s, d, device=device).to(dtype)
    if layout == "bshd":
        return torch.randn(b, s, h, d, device=device).to(dtype).transpose(1, 2)
    if layout == "fused":
        return torch.randn(b, s, h, 3 * d, device=device).to(dtype)[..., d : 2 * d].transpose(1, 2)
    if layout == "padded":
        return torch.randn(b, h, s + 5, d + 8, device=device).to(dtype)[:, :, 2:-3, :d]
    assert layout == "awkward"  # the last axis has a stride, so it is copied
    return torch.randn(b, h, d, s, device=device).to(dtype).mT


def differentiated(function, leaves, d_o=None):
    leaves = [t.detach().requires_grad_() for t in leaves]
    o = function(*leaves)
    d_o = torch.randn_like(o) if d_o is None else d_o
    return d_o, [o.detach(), *torch.autograd.grad(o, leaves, d_o)]


def judge(call, leaves, d_o, got):
    exact = reference.attention(call, *leaves, d_o)
    for name, tensor in zip(("o", "dq", "dk", "dv"), got):
        error, share, where = exact[name].judge(tensor)
        assert share <= 1, f"{name}: error {error:.3g}, {share:.2f} of what is allowed; {where}"


# dtype, head_dim, soft cap, dropout, whether there may be no window: each combination is a separate
# kernel, and kernels that the library does not carry are compiled first.
_VARIANTS = (
    (torch.bfloat16, 64, 0.0, 0.0, True),
    (torch.bfloat16, 128, 0.0, 0.0, True),
    (torch.bfloat16, 40, 0.0, 0.0, True),
    (torch.float16, 128, 0.0, 0.0, False),
    (torch.bfloat16, 256, 0.0, 0.0, False),
    (torch.float16, 184, 0.0, 0.0, False),
    (torch.bfloat16, 96, 0.0, 0.0, False),
    (torch.bfloat16, 64, 20.0, 0.0, False),
    (torch.bfloat16, 128, 0.0, 0.17, False),
    (torch.float16, 64, 5.0, 0.5, False),
)


@st.composite
def calls(draw):
    dtype, dim, softcap, dropout, open_ended = draw(st.sampled_from(_VARIANTS))
    heads_kv = draw(st.integers(1, 3))
    span = st.one_of(st.just(-1), st.integers(0, 5), st.integers(0, 400))
    window = (draw(span), draw(st.one_of(st.just(0), span)))
    if window == (-1, -1) and not open_ended:
        window = (-1, 0)
    return dict(
        dtype=dtype,
        dim=dim,
        batch=draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        heads_q=heads_kv * draw(st.sampled_from((1, 1, 2, 4))),
        rows_q=draw(st.one_of(st.integers(1, 9), st.integers(1, 400))),
        rows_k=draw(st.one_of(st.integers(1, 9), st.integers(1, 600))),
        layout=draw(st.sampled_from(("bhsd", "bshd", "fused", "padded", "awkward"))),
        window=window,
        bottom_right=draw(st.booleans()),
        softcap=softcap,
        scale=draw(st.sampled_from((None, None, 1.0, 0.1, 0.0))),
        dropout=dropout,
        sharpness=draw(st.sampled_from((1.0, 1.0, 0.02, 4.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(calls())
def test_random_calls(device, one):
    torch.manual_seed(one["seed"])
    shape = (one["batch"], one["heads_q"], one["rows_q"], one["dim"])
    keys = (one["batch"], one["heads_kv"], one["rows_k"], one["dim"])
    q, k, v = (lying(s, one["layout"], one["dtype"], device) for s in (shape, keys, keys))
    q = (q * one["sharpness"]).to(one["dtype"])
    options = {name: one[name] for name in ("window", "bottom_right", "softcap", "scale")}

    def run(q, k, v):
        torch.manual_seed(one["seed"])
        return attention(q, k, v, dropout_p=one["dropout"], **options)

    functional.fallbacks.clear()
    d_o, got = differentiated(run, [q, k, v])
    seed, offset = 0, 0
    if one["dropout"]:
        torch.manual_seed(one["seed"])
        seed, offset = functional.fresh_seed(device).tolist()
    call = reference.Call(
        scale=one["dim"] ** -0.5 if one["scale"] is None else one["scale"],
        softcap=one["softcap"],
        window_left=one["window"][0],
        window_right=one["window"][1],
        bottom_right=one["bottom_right"],
        dropout=one["dropout"],
        seed=seed,
        seed_offset=offset,
    )
    assert not functional.fallbacks, functional.fallbacks
    judge(call, [q, k, v], d_o, got)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=5),
    st.sampled_from((64, 128)),
    st.booleans(),
)
def test_random_packed_calls(device, lengths, dim, bottom_right):
    lengths_q, lengths_k = zip(*[(n + (i == 0), m + (i == 0)) for i, (n, m) in enumerate(lengths)])
    torch.manual_seed(sum(lengths_q))
    q, k, v = (
        torch.randn(sum(n), h, dim, device=device).bfloat16()
        for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    offsets = [torch.tensor((0, *n), device=device).cumsum(0).int() for n in (lengths_q, lengths_k)]

    def run(q, k, v):
        longest = max(lengths_q), max(lengths_k)
        return packed_attention(
            q, k, v, *offsets, *longest, is_causal=True, bottom_right=bottom_right
        )

    d_o, got = differentiated(run, [q, k, v])
    assert not functional.fallbacks, functional.fallbacks
    call = reference.Call(
        dim**-0.5,
        window_right=0,
        bottom_right=bottom_right,
        lengths_q=lengths_q,
        lengths_k=lengths_k,
    )
    judge(
        call,
        *[
            [t.transpose(0, 1) for t in (q, k, v)],
            d_o.transpose(0, 1),
            [t.transpose(0, 1) for t in got],
        ],
    )


def leaves(device, rows=200, heads=4, heads_kv=2, dim=64, dtype=torch.bfloat16):
    shapes = ((heads, rows), (heads_kv, rows), (heads_kv, rows))
    return [
        torch.randn(2, n, h, dim, device=device).to(dtype).transpose(1, 2).requires_grad_()
        for h, n in shapes
    ]


def test_dropout_follows_the_documented_mask(device):
    """Unit vectors as values show the probabilities: which ones are kept, and their factor."""
    rows, p = 64, 0.3
    q, k = (torch.zeros(2, 3, rows, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = torch.eye(rows, 64, device=device, dtype=torch.bfloat16).expand(2, 3, rows, 64)
    torch.manual_seed(3)
    o = attention(q, k, v, dropout_p=p)
    torch.manual_seed(3)
    seed, offset = functional.fresh_seed(device).tolist()
    call = reference.Call(1.0, dropout=p, seed=seed, seed_offset=offset)
    kept = reference.kept(call, 2, 3, rows, rows, device)
    assert torch.equal(o != 0, kept)
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.02
    want = torch.tensor(1 / rows / (1 - p), dtype=torch.bfloat16)
    assert torch.allclose(o[kept].float(), want.float().to(device), rtol=2**-7)


@pytest.mark.parametrize("largest", [2.0**6, 2.0**12, 133120.0, 2.0**30])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_select_the_largest(device, largest, sign):
    """Scores are so far apart that only the largest count. There are two of these, so O is the mean
    of their values. Below zero, the largest score is the one nearest to zero."""
    q = torch.full((1, 2, 70, 64), largest, device=device, dtype=torch.bfloat16)
    k = torch.full((1, 2, 300, 64), sign * largest, device=device, dtype=torch.bfloat16)
    v = torch.randn(1, 2, 300, 64, device=device, dtype=torch.bfloat16)
    chosen = [33, 277]
    k[:, :, [i for i in range(300) if (i in chosen) == (sign < 0)]] /= 2
    o = attention(q, k, v, window=(-1, 230))
    exact = v.double()[:, :, chosen].mean(2, keepdim=True).expand(o.shape).clone()
    exact[:, :, :47] = v.double()[:, :, 33:34]  # key 277 lies outside their window
    # P and the result are each rounded to BF16 once.
    assert (o.double() - exact).abs().max() <= 2.1 * 2.0**-9 * exact.abs().max()


@pytest.mark.parametrize("largest", [3e4, 133120.0, 2.0**30])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_of_large_scores(device, largest, dim):
    """Every query gives one key its whole weight: that key's value gets all gradients, and nothing
    is infinite."""
    q = torch.full((1, 2, 70, dim), largest, device=device, dtype=torch.bfloat16).requires_grad_()
    k = torch.full((1, 2, 300, dim), largest / 2, device=device, dtype=torch.bfloat16)
    k[:, :, 277] = largest
    k.requires_grad_()
    v = torch.randn(1, 2, 300, dim, device=device, dtype=torch.bfloat16).requires_grad_()
    d_o = torch.randn(1, 2, 70, dim, device=device, dtype=torch.bfloat16)
    attention(q, k, v).backward(d_o)
    exact = torch.zeros_like(v, dtype=torch.float64)
    exact[:, :, 277] = d_o.double().sum(2)
    # The sum is FP32, has 70 terms, and is rounded once.
    allowed = 2.0**-8 * exact.abs() + 70 * 2.0**-23 * d_o.double().abs().sum(2, keepdim=True)
    assert ((v.grad.double() - exact).abs() <= allowed).all()
    assert q.grad.isfinite().all() and k.grad.isfinite().all()


@pytest.mark.parametrize("dim", [64, 96])
def test_queries_without_keys_in_pytorch(device, dim):
    """Values of another width are left to PyTorch, whose kernels leave such rows undefined."""
    q = torch.randn(2, 3, 70, 64, device=device, dtype=torch.bfloat16).requires_grad_()
    k = torch.randn(2, 3, 20, 64, device=device, dtype=torch.bfloat16).requires_grad_()
    v = torch.randn(2, 3, 20, 2 * dim, device=device, dtype=torch.bfloat16).requires_grad_()
    o = attention(q, k, v, is_causal=True, bottom_right=True)
    assert functional.fallbacks.total() == 1
    assert (o[:, :, :50] == 0).all() and (o[:, :, 50:] != 0).any()
    o.float().square().sum().backward()
    assert (q.grad[:, :, :50] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_seeds_advance_and_repeat(device):
    q, k, v = (t.detach() for t in leaves(device))
    torch.manual_seed(1)
    first, second = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_deterministic_backward(device):
    q, k, v = leaves(device, rows=1000, heads=8, heads_kv=1)
    torch.use_deterministic_algorithms(True)
    try:
        d_o, first = differentiated(lambda *t: attention(*t, is_causal=True), (q, k, v))
        for _ in range(3):
            _, again = differentiated(lambda *t: attention(*t, is_causal=True), (q, k, v), d_o)
            assert all(torch.equal(a, b) for a, b in zip(first, again))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not functional.fallbacks


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(device, dropout, dynamic):
    def run(q, k, v):
        return (
            attention(q * 1.5, k, v, is_causal=True, dropout_p=dropout).transpose(1, 2).flatten(2)
            * 2
        )

    tensors = leaves(device)
    fast = torch.compile(run, fullgraph=True, dynamic=dynamic)
    d_o, got = differentiated(fast, tensors)
    assert [t.shape for t in got[1:]] == [t.shape for t in tensors]
    if not dropout:  # Inductor draws other random numbers
        _, want = differentiated(run, tensors, d_o)
        for a, b in zip(got, want):
            assert (a - b).float().norm() <= 0.01 * b.float().norm()
    differentiated(fast, leaves(device, rows=130))
    graphs = []
    differentiated(compiled(run, graphs), tensors)
    assert sorted(attention_nodes(graphs)) == sorted([FORWARD, BACKWARD])


def test_cuda_graphs(gpu):
    tensors = leaves(gpu)

    def run(q, k, v):
        o = attention(q, k, v, is_causal=True)
        return [o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*tensors)
    with torch.no_grad():
        for t in tensors:
            t.copy_(torch.randn_like(t))
    graph.replay()
    torch.cuda.synchronize()
    call = reference.Call(64**-0.5, window_right=0)
    judge(
        call,
        [t.detach() for t in tensors],
        torch.ones_like(captured[0]),
        [t.detach() for t in captured],
    )


def test_dropout_in_cuda_graphs_is_new_at_each_replay(gpu):
    q, k, v = (t.detach() for t in leaves(gpu))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attention(q, k, v, dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, dropout_p=0.5)
    torch.cuda.manual_seed(5)
    graph.replay()
    first = o.clone()
    graph.replay()
    assert not torch.equal(first, o)
    torch.cuda.manual_seed(5)
    graph.replay()
    assert torch.equal(first, o)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(device, reentrant):
    tensors = leaves(device)

    def run(q, k, v):
        return attention(q * 2, k, v, dropout_p=0.4, is_causal=True)

    def grads(function):
        torch.manual_seed(8)
        for t in tensors:
            t.grad = None
        function(*tensors).square().sum().backward()
        return [t.grad for t in tensors]

    plain = grads(run)
    again = grads(lambda *t: checkpoint(run, *t, use_reentrant=reentrant))
    for a, b in zip(again, plain):  # the order in which a backward adds may differ
        assert (a - b).float().norm() <= 0.005 * b.float().norm()


def test_autocast(device):
    tensors = leaves(device, dtype=torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        o = attention(*tensors, is_causal=True)
    assert o.dtype == torch.bfloat16 and not functional.fallbacks
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(o.sum(), tensors))


def test_on_another_stream(gpu):
    tensors = [t.detach() for t in leaves(gpu, rows=2000)]
    stream = torch.cuda.Stream()
    want = attention(*tensors, is_causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        moved = [t * 1 for t in tensors]
        got = attention(*moved, is_causal=True) * 1
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)


def test_unsupported_calls_are_left_to_pytorch(device):
    q, k, v = (t.detach() for t in leaves(device, heads_kv=4))
    mask = torch.randn(200, 200, device=device, dtype=q.dtype)
    assert torch.equal(attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    odd = [t[..., :60] for t in (q, k, v)]
    attention(*odd)
    if device.type == "cuda":
        wide = [t.float() for t in (q, k, v)]
        with torch.no_grad():
            assert torch.equal(attention(*wide), F.scaled_dot_product_attention(*wide))
        assert functional.fallbacks["the dtype is torch.float32"] == 1


def test_errors_name_what_is_wrong(gpu):
    q = torch.randn(1, 2, 4, 64, device=gpu, dtype=torch.bfloat16)
    given = (1.0, 0.0, -1, -1, False, 0.0, None, None, None, 0, 0)
    for text, tensors in {
        "bfloat16 or float16": [q.float()] * 3,
        "differ in dtype": (q, q.half(), q.half()),
        "head_dim is 64 in q and 128 in k": (
            q,
            *[torch.zeros(1, 2, 4, 128, device=gpu, dtype=q.dtype)] * 2,
        ),
        "expected a multiple": (q[:, :1], q, q),
    }.items():
        with pytest.raises(RuntimeError, match=text):
            operators.forward(*tensors, *given)
    with pytest.raises(RuntimeError, match="out of memory"):
        huge = torch.empty(1, 1, 1, 64, device=gpu, dtype=q.dtype).expand(1, 1, 2**31 - 1, 64)
        operators.forward(huge, q[:, :1], q[:, :1], *given)
    leaf = q.clone().requires_grad_()
    grad = torch.autograd.grad(attention(leaf, q, q).sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_activate_sdpa(device):
    import deepwell

    tensors = leaves(device, heads_kv=4)
    d_o, plain = differentiated(
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), tensors
    )
    deepwell.activate_sdpa()
    try:
        assert seen(lambda: F.scaled_dot_product_attention(*tensors, is_causal=True)).ours == 1
        _, ours = differentiated(
            lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), tensors, d_o
        )
        graphs = []
        differentiated(
            compiled(lambda q, k, v: F.scaled_dot_product_attention(q * 1, k, v), graphs), tensors
        )
        assert sorted(attention_nodes(graphs)) == sorted([FORWARD, BACKWARD])
        module = torch.nn.MultiheadAttention(
            64, 2, batch_first=True, device=device, dtype=torch.bfloat16
        )
        x = torch.randn(2, 9, 64, device=device, dtype=torch.bfloat16)
        assert seen(lambda: module(x, x, x, need_weights=False)).ours == 1
    finally:
        deepwell.deactivate_sdpa()
    assert seen(lambda: F.scaled_dot_product_attention(*tensors)).ours == 0
    for a, b in zip(ours, plain):
        assert (a - b).float().norm() <= 0.01 * b.float().norm()
    assert apart([], []) == 0
