"""attention() and its operators on the CPU: every argument compared with FP64, in every context in
which users make calls."""

import copy
import itertools

import attention_reference as reference
import pytest
import torch
import torch.nn.functional as F
from attention_tools import (
    BACKWARD,
    FORWARD,
    apart,
    attention_nodes,
    compiled,
    rounding,
    seen,
)
from deepwell import _deepwell
from deepwell.attention import attention, functional, operators, packed_attention
from torch.utils.checkpoint import checkpoint

# FP32 arithmetic of a few dozen terms of order one.
_CLOSE = 2e-5


pytestmark = pytest.mark.usefixtures("attention_on_cpu")


def tensors(rows_q=9, rows_k=13, heads_q=4, heads_kv=2, dim=8, batch=2, dtype=torch.float32):
    shapes = ((heads_q, rows_q), (heads_kv, rows_k), (heads_kv, rows_k))
    return [
        torch.randn(batch, n, h, dim, dtype=dtype).transpose(1, 2).requires_grad_()
        for h, n in shapes
    ]


def exact(call, q, k, v, d_o):
    made = reference.attention(call, *[t.detach().double().float() for t in (q, k, v)], d_o)
    return [made[name].exact.float() for name in ("o", "dq", "dk", "dv")]


def results(function, leaves, d_o=None):
    o = function(*leaves)
    d_o = torch.ones_like(o) if d_o is None else d_o
    return [o.detach(), *torch.autograd.grad(o, leaves, d_o)]


OPTIONS = [
    dict(is_causal=True),
    dict(is_causal=True, bottom_right=True),
    dict(window=(3, 2)),
    dict(window=(0, 0), bottom_right=True),
    dict(window=(-1, 4)),
    dict(window=(2, -1), scale=0.7),
    dict(softcap=2.0, is_causal=True),
    dict(scale=0.0),
]
# PyTorch runs these calls.
OTHERS = [dict(scale=-1.3, softcap=1.0), dict(scale=-0.5, is_causal=True)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(9, 13), (13, 9), (1, 6), (6, 1), (40, 3)], ids=str)
@pytest.mark.parametrize("wider", [0, 5])
def test_pytorch_computes_what_deepwell_does_not(options, sizes, wider):
    """PyTorch computes attention if values have another width: the results are the same, with zeros
    where no key is seen."""
    q, k, v = tensors(*sizes)
    d_o = torch.randn(q.shape)
    want = results(lambda *qkv: attention(*qkv, **options), (q, k, v), d_o)
    functional.fallbacks.clear()
    d_o, wide = F.pad(d_o, (0, wider)), F.pad(v, (0, wider)).detach().requires_grad_()

    def by_pytorch(q, k, v):
        scale, softcap = options.get("scale"), options.get("softcap", 0.0)
        window = options.get("window", (-1, -1))
        if wider:
            return attention(q, k, v, **options)
        window = (window[0], 0) if options.get("is_causal") else window
        bottom_right = options.get("bottom_right", False)
        return functional._pytorch(q, k, v, None, 0.0, scale, window, bottom_right, softcap)

    got = results(by_pytorch, (q, k, wide), d_o)
    assert functional.fallbacks.total() == (1 if wider else 0)
    got[0], got[3] = got[0][..., : q.shape[-1]], got[3][..., : q.shape[-1]]
    assert apart(got, want) < _CLOSE


@pytest.mark.parametrize("options", OPTIONS + OTHERS, ids=str)
@pytest.mark.parametrize("sizes", [(9, 13), (13, 9), (1, 6), (6, 1)], ids=str)
def test_every_option(options, sizes):
    leaves = tensors(*sizes)
    d_o = torch.randn_like(leaves[0])
    got = results(lambda q, k, v: attention(q, k, v, **options), leaves, d_o)
    left, right = options.get("window", (-1, -1))
    call = reference.Call(
        scale=options.get("scale", 8**-0.5),
        softcap=options.get("softcap", 0.0),
        window_left=left,
        window_right=0 if options.get("is_causal") else right,
        bottom_right=options.get("bottom_right", False),
    )
    assert apart(got, exact(call, *leaves, d_o)) < _CLOSE
    assert bool(functional.fallbacks) == (options in OTHERS)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pytorch_backends_give_the_same_results(options):
    """Calls that another backend computes (here: FP64, directly) give the same results, including rows that
    see nothing.
    """
    leaves = tensors(13, 9)
    ours = results(lambda q, k, v: attention(q, k, v, **options), leaves)
    functional.devices.discard("cpu")
    functional.forget()
    theirs = results(lambda q, k, v: attention(q, k, v, **options), leaves)
    assert functional.fallbacks["the tensors are on cpu"] == 1
    assert apart(ours, theirs) < _CLOSE


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))), ids=str)
def test_results_have_the_layout_of_arguments(order, compile):
    q = torch.randn(*[(2, 4, 9)[i] for i in order], 8)
    q = q.permute(*[order.index(i) for i in range(3)], 3).requires_grad_()
    o = (compiled(attention, []) if compile else attention)(q, q, q)
    assert o.shape == q.shape == (2, 4, 9, 8) and o.stride() == q.stride()
    padded = torch.randn(*[(2, 4, 9)[i] for i in order], 24)[..., 8:16]
    o = attention(*[padded.permute(*[order.index(i) for i in range(3)], 3)] * 3)
    assert o.stride() == q.stride()


@pytest.mark.parametrize("options", OPTIONS + OTHERS, ids=str)
@pytest.mark.parametrize("sizes", [(9, 13), (13, 9)], ids=str)
def test_log_sum_exp(options, sizes):
    leaves = tensors(*sizes)
    o, lse = attention(*leaves, **options, return_lse=True)
    assert lse.shape == o.shape[:3] and lse.dtype == torch.float32 and not lse.requires_grad
    assert apart(results(lambda *t: attention(*t, **options, return_lse=True)[0], leaves),
                 results(lambda *t: attention(*t, **options), leaves)) == 0  # fmt: skip
    q, k, _ = (t.detach().double() for t in leaves)
    scores = q @ k.repeat_interleave(2, 1).mT * options.get("scale", 8**-0.5)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    left, right = options.get("window", (-1, -1))
    window = (left, 0 if options.get("is_causal") else right)
    hidden = ~functional.visible(*sizes, window, options.get("bottom_right", False), q.device)
    exact = torch.logsumexp(scores.masked_fill(hidden, -torch.inf), -1)
    assert torch.equal(lse == -torch.inf, exact == -torch.inf)
    assert (lse - exact).nan_to_num(0).abs().max() < _CLOSE
    functional.devices.discard("cpu")
    functional.forget()
    theirs = attention(*leaves, **options, return_lse=True)[1]
    assert theirs.dtype == torch.float32 and not theirs.requires_grad
    assert torch.equal(theirs == -torch.inf, exact == -torch.inf)
    assert (theirs - exact).nan_to_num(0).abs().max() < _CLOSE


def test_log_sum_exp_with_masks():
    q, k, v = (t.detach() for t in tensors())
    bias = torch.randn(9, 13)
    seen_keys = torch.rand(9, 13) > 0.5
    scores = (q @ k.repeat_interleave(2, 1).mT).double() * 8**-0.5
    for mask, masked in (
        (bias, scores + bias),
        (seen_keys, scores.masked_fill(~seen_keys, -torch.inf)),
    ):
        lse = attention(q, k, v, mask, return_lse=True)[1]
        assert torch.allclose(lse.double(), torch.logsumexp(masked, -1), atol=_CLOSE, rtol=0)


def test_dropout_follows_the_documented_mask():
    leaves = tensors()
    d_o = torch.randn_like(leaves[0])
    torch.manual_seed(11)
    got = results(lambda q, k, v: attention(q, k, v, dropout_p=0.3), leaves, d_o)
    torch.manual_seed(11)
    seed, offset = functional.fresh_seed(torch.device("cpu")).tolist()
    call = reference.Call(scale=8**-0.5, dropout=0.3, seed=seed, seed_offset=offset)
    assert apart(got, exact(call, *leaves, d_o)) < _CLOSE
    again = results(lambda q, k, v: attention(q, k, v, dropout_p=0.3), leaves, d_o)
    assert apart(got[:1], again[:1]) > 0.01  # the call has its own mask


def test_packed_sequences():
    lengths_q, lengths_k = (3, 0, 7, 1), (5, 2, 7, 0)
    q, k, v = (torch.randn(n, h, 8, requires_grad=True) for n, h in ((11, 4), (14, 2), (14, 2)))
    offsets = [torch.tensor((0, *n)).cumsum(0).int() for n in (lengths_q, lengths_k)]
    d_o = torch.randn_like(q)

    def run(q, k, v):
        return packed_attention(q, k, v, *offsets, 7, 7, is_causal=True, bottom_right=True)

    got = results(run, [q, k, v], d_o)
    call = reference.Call(
        8**-0.5, window_right=0, bottom_right=True, lengths_q=lengths_q, lengths_k=lengths_k
    )
    want = exact(call, *[t.transpose(0, 1) for t in (q, k, v)], d_o.transpose(0, 1))
    assert apart(got, [t.transpose(0, 1) for t in want]) < _CLOSE
    functional.devices.discard("cpu")
    functional.forget()
    # PyTorch's attention, one sequence at a time.
    assert apart(results(run, [q, k, v], d_o), got) < _CLOSE


@pytest.mark.parametrize("ours", [True, False])
def test_packed_log_sum_exp(ours):
    if not ours:
        functional.devices.discard("cpu")
    lengths_q, lengths_k = (3, 0, 7, 1), (5, 2, 7, 0)
    q, k, v = (torch.randn(n, h, 8, requires_grad=True) for n, h in ((11, 4), (14, 2), (14, 2)))
    offsets = [torch.tensor((0, *n)).cumsum(0).int() for n in (lengths_q, lengths_k)]
    options = dict(is_causal=True, bottom_right=True)
    o, lse = packed_attention(q, k, v, *offsets, 7, 7, **options, return_lse=True)
    assert lse.shape == (4, 11) and lse.dtype == torch.float32 and not lse.requires_grad
    assert apart([o], [packed_attention(q, k, v, *offsets, 7, 7, **options)]) == 0
    rows_q, rows_k = q.split(lengths_q), k.split(lengths_k)
    for i, part in enumerate(lse.split(lengths_q, 1)):
        one = [t.transpose(0, 1)[None] for t in (rows_q[i], rows_k[i], rows_k[i])]
        if one[0].numel() == 0:
            continue
        want = attention(*one, **options, return_lse=True)[1][0]
        assert apart([part], [want]) < rounding([want])
    o.sum().backward()
    assert q.grad is not None


def test_log_sum_exp_compiled():
    leaves, graphs = tensors(13, 13), []

    def run(q, k, v):
        o, lse = attention(q, k, v, is_causal=True, return_lse=True)
        return o * torch.exp(lse)[..., None]

    got = results(compiled(run, graphs), leaves)
    assert sorted(attention_nodes(graphs)) == sorted([FORWARD, BACKWARD])
    wanted = results(run, leaves)
    assert apart(got, wanted) < rounding(wanted)


def test_masks_go_to_pytorch():
    q, k, v = tensors()
    mask = torch.randn(9, 13)
    with torch.no_grad():
        got = attention(q, k, v, mask)
        want = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        both = attention(q, k, v, mask, window=(2, 2))
        seen_keys = functional.visible(9, 13, (2, 2), False, q.device)
        narrow = F.scaled_dot_product_attention(
            q, k, v, mask.masked_fill(~seen_keys, -torch.inf), enable_gqa=True
        )
    assert apart([got, both], [want, narrow]) == 0
    assert functional.fallbacks["a mask is given as a tensor"] == 2


def test_unsupported_calls_say_why():
    q, k, v = tensors()
    reasons = {
        "q, k and v differ in dtype": (q.half(), k, v),
        "q, k and v differ": (q, k, v[..., :4]),
        "do not have 4 axes": (q[0], k[0], v[0]),
        "not a multiple": (q[:, :3], k, v),
        "no elements": (q[:, :, :0], k, v),
        "batches": (q[:1], k, v),
        "are on meta": tuple(t.to("meta") for t in (q, k, v)),
        "several devices": (q, k.to("meta"), v),
    }
    for text, given in reasons.items():
        assert text in functional.why_pytorch(*given, (-1, -1), False), text
    sub = torch.Tensor._make_subclass(type("Mine", (torch.Tensor,), {}), q.detach())
    assert functional.why_pytorch(sub, k, v, (-1, -1), False) == "the tensors are Mines"


def test_second_derivatives_are_refused_clearly():
    leaves = tensors()
    grads = torch.autograd.grad(attention(*leaves).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*deepwell\.restore"):
        grads[0].sum().backward()


def test_operators_differentiate_by_themselves():
    leaves = tensors()
    given = (8**-0.5, 0.0, -1, 0, False, 0.0, None, None, None, 0, 0)
    got = results(lambda *t: operators.forward(*t, *given)[0], leaves)
    assert apart(got, results(lambda *t: attention(*t, is_causal=True), leaves)) == 0


def test_opcheck():
    q, k, v = tensors(5, 6)
    given = (0.3, 2.0, 3, 0, True, 0.0, None, None, None, 0, 0)
    torch.library.opcheck(operators.forward, (q, k, v, *given))
    o, lse = operators.forward(*[t.detach() for t in (q, k, v)], *given)
    d_o = torch.randn_like(o)
    plain = [t.detach() for t in (d_o, q, k, v, o, lse)]
    torch.library.opcheck(operators.backward, (*plain, *given, False))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled(dynamic, dropout):
    def run(q, k, v):
        return attention(q * 1.5, k, v, is_causal=True, window=(4, 0), dropout_p=dropout) + 1

    leaves = tensors(13, 13)
    graphs = []
    fast = compiled(run, graphs)
    torch._dynamo.config.assume_static_by_default = not dynamic
    try:
        torch.manual_seed(4)
        got = results(fast, leaves)
        other = tensors(7, 7)
        results(fast, other)
    finally:
        torch._dynamo.config.assume_static_by_default = True
    torch.manual_seed(4)
    wanted = results(run, leaves)
    assert apart(got, wanted) < rounding(wanted)
    nodes = attention_nodes(graphs[:2])
    assert sorted(nodes) == sorted([FORWARD, BACKWARD])


@pytest.mark.slow
def test_compiled_by_inductor():
    def run(q, k, v):
        return attention(q * 1.5, k, v, is_causal=True).transpose(1, 2).flatten(2) * 2

    leaves = tensors(13, 13)
    torch._dynamo.reset()
    wanted = results(run, leaves)
    made = results(torch.compile(run, fullgraph=True), leaves)
    assert apart(made, wanted) < rounding(wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    leaves = tensors()

    def run(q, k, v):
        return attention(q * 2, k, v, dropout_p=0.4, is_causal=True)

    def grads(function):
        torch.manual_seed(8)
        for leaf in leaves:
            leaf.grad = None
        o = function(*leaves)
        o.square().sum().backward()
        return [o.detach(), *[leaf.grad for leaf in leaves]]

    plain = grads(run)
    assert apart(grads(lambda *t: checkpoint(run, *t, use_reentrant=reentrant)), plain) == 0


@pytest.mark.parametrize("fast", [False, True])
def test_autocast(fast):
    leaves = tensors()
    function = compiled(attention, []) if fast else attention
    with torch.autocast("cpu", torch.bfloat16):
        o = function(*leaves)
    assert o.dtype == torch.bfloat16
    grads = torch.autograd.grad(o.sum(), leaves)
    assert all(g.dtype == torch.float32 for g in grads)
    assert apart([o], [attention(*[t.bfloat16() for t in leaves])]) == 0


def test_transforms_go_to_pytorch():
    q, k, v = (t.detach() for t in tensors())
    got = torch.func.grad(lambda q: attention(q, k, v).square().sum())(q)
    leaf = q.clone().requires_grad_()
    want = torch.autograd.grad(attention(leaf, k, v).square().sum(), leaf)[0]
    assert apart([got], [want]) < _CLOSE
    assert functional.fallbacks["called inside a torch.func transform"] == 1


def test_no_gradient_unless_required():
    q, k, v = tensors()
    with torch.no_grad():
        assert attention(q, k, v).grad_fn is None
    with torch.inference_mode():
        assert attention(q, k, v).is_inference()
    assert seen(lambda: attention(q.detach(), k.detach(), v.detach())).ours == 1
    only_v = v.detach().requires_grad_()
    o = attention(q.detach(), k.detach(), only_v)
    assert torch.autograd.grad(o.sum(), only_v)[0].shape == v.shape


def test_modified_saved_tensors_are_an_error():
    q, k, v = tensors()
    inner = q * 1
    o = attention(inner, k, v)
    inner.data_ptr()
    with torch.no_grad():
        inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_modules():
    import deepwell

    q, k, v = (t.detach() for t in tensors(heads_kv=4))
    module = deepwell.BlackwellFlashAttention(deepwell.BlackwellConfig(enable_profiling=True))
    got = module(q, k, v, causal=True)
    seen_keys = functional.visible(9, 13, (-1, 0), True, q.device)
    want = F.scaled_dot_product_attention(q, k, v, seen_keys)
    assert apart([got], [want]) < _CLOSE
    assert module.last_seconds > 0
    plain = deepwell.BlackwellFlashAttention(deepwell.BlackwellConfig(use_flash_attention=False))
    assert seen(lambda: plain(q, k, v)).ours == 0
    assert apart([plain(q, k, v, True)], [want]) < _CLOSE
    meta = [t.to("meta") for t in (q, k, v)]
    with pytest.raises(deepwell.UnsupportedError, match="are on meta.*use_pytorch_fallback=True"):
        deepwell.BlackwellFlashAttention()(*meta)
    fallback = deepwell.BlackwellFlashAttention(deepwell.BlackwellConfig(use_pytorch_fallback=True))
    assert fallback(*meta).shape == q.shape


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        ((16, 8), (16, 8), (16, 8), r"\[batch, heads, seq_len, head_dim\]; got q \(16, 8\)"),
        ((4, 16, 8), (4, 16, 8), (4, 16, 8), r"got q \(4, 16, 8\)"),
        ((2, 4, 5, 8), (2, 4, 5, 8), (4, 5, 8), r"v \(4, 5, 8\)"),
        ((2, 4, 5, 8), (3, 4, 5, 8), (3, 4, 5, 8), "the same batch"),
        ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 7, 8), "k and v the same heads"),
        ((2, 4, 5, 8), (2, 4, 5, 7), (2, 4, 5, 7), "q and k the same head_dim"),
        ((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), "4 heads of q must be a multiple of the 3"),
    ],
)
def test_wrong_shapes_are_rejected(flash, q, k, v, words):
    import deepwell

    module = deepwell.BlackwellFlashAttention(deepwell.BlackwellConfig(use_flash_attention=flash))
    with pytest.raises(ValueError, match=words):
        module(*(torch.randn(shape) for shape in (q, k, v)))


def test_self_attention_is_a_drop_in():
    import deepwell

    ours = deepwell.DWSelfAttention(32, 4, deepwell.BlackwellConfig(), batch_first=True)
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 7, 32)
    for options in (
        {},
        dict(need_weights=False),
        dict(average_attn_weights=False),
        dict(key_padding_mask=torch.arange(7).expand(2, 7) > 4),
    ):
        got, want = ours(x, x, x, **options), theirs(x, x, x, **options)
        assert apart(got, want) < _CLOSE
    assert apart(ours(x, need_weights=False)[:1], theirs(x, x, x)[:1]) < _CLOSE
    assert seen(lambda: ours(x, need_weights=False)).ours == 1
    copied = copy.deepcopy(ours)
    assert apart(copied(x)[:1], ours(x)[:1]) == 0
    with pytest.raises(TypeError, match="config must be a BlackwellConfig, not float"):
        deepwell.DWSelfAttention(32, 4, 0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_the_library_says_why_it_runs_no_call_here():
    sizes = ("bf16", 2, 8, 4, 64, 96, 64, False, 0.0, -1, 0, False, 0.0, True, False)
    for prepare in (False, True):
        verdict, name, because, refusal = _deepwell.attention_decide(prepare, None, *sizes)
        assert (verdict, name, because) == ("others", None, "there is no GPU")
        assert "there is no NVIDIA driver on this machine" in refusal
    wrong = (*sizes[:3], 3, *sizes[4:])
    verdict, name, because, refusal = _deepwell.attention_decide(True, None, *wrong)
    assert (verdict, name, because) == ("others", None, "")
    assert "heads_q is 8 and heads_kv is 3" in refusal
