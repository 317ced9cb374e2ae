"""activate_sdpa(): replaces scaled_dot_product_attention itself, on CPU tensors."""

import deepwell
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
    said,
    seen,
    served_on_cpu,
)
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture
def active():
    with served_on_cpu():
        deepwell.activate_sdpa()
        try:
            yield
        finally:
            deepwell.deactivate_sdpa()


def leaves(heads_kv=4):
    return [torch.randn(2, h, 9, 8, requires_grad=True) for h in (4, heads_kv, heads_kv)]


def run(tensors, function=F.scaled_dot_product_attention, **options):
    o = function(*tensors, **options)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), tensors)]


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, 1),
        ({"is_causal": True}, 1),
        ({"scale": 0.3}, 1),
        ({"attn_mask": torch.randn(9, 9)}, 0),
        ({"attn_mask": torch.ones(9, 9).tril().bool()}, 0),
    ],
    ids=said,
)
def test_same_results(active, options, ours):
    tensors = leaves()
    made = run(tensors, **options)
    assert seen(lambda: run(tensors, **options)).ours == ours
    deepwell.deactivate_sdpa()
    assert apart(made, run(tensors, **options)) < 1e-5
    assert seen(lambda: run(tensors, **options)).ours == 0


def test_shared_heads_only_on_request(active):
    tensors = leaves(2)
    made = run(tensors, enable_gqa=True)
    assert seen(lambda: run(tensors, enable_gqa=True)).ours == 1
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*tensors)
    deepwell.deactivate_sdpa()
    assert apart(made, run(tensors, enable_gqa=True)) < 1e-5


def test_every_reference_to_sdpa_is_replaced(active):
    tensors = leaves()
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)
    assert seen(lambda: module(x, x, x, need_weights=False)).ours == 1
    assert seen(lambda: torch.ops.aten.scaled_dot_product_attention(*tensors)).ours == 1
    for fused in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        with sdpa_kernel(fused):
            assert seen(lambda: F.scaled_dot_product_attention(*tensors)).ours == 1
    with torch.no_grad():
        assert seen(lambda: F.scaled_dot_product_attention(*tensors)).ours == 1


def test_pytorch_runs_if_fused_kernels_are_disabled(active):
    tensors = leaves()

    def second_derivatives(*tensors):
        o = F.scaled_dot_product_attention(*tensors)
        (first,) = torch.autograd.grad(o.square().sum(), tensors[:1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), tensors)

    with sdpa_kernel(SDPBackend.MATH):
        assert seen(lambda: F.scaled_dot_product_attention(*tensors)).ours == 0
        made = second_derivatives(*tensors)
    deepwell.deactivate_sdpa()
    with sdpa_kernel(SDPBackend.MATH):
        assert apart(made, second_derivatives(*tensors)) == 0
    with sdpa_kernel(SDPBackend.ERROR), pytest.raises(RuntimeError, match="backend") as theirs:
        F.scaled_dot_product_attention(*tensors)
    deepwell.activate_sdpa()
    with sdpa_kernel(SDPBackend.ERROR), pytest.raises(RuntimeError) as ours:
        F.scaled_dot_product_attention(*tensors)
    assert str(ours.value) == str(theirs.value)
    assert seen(lambda: F.scaled_dot_product_attention(*tensors)).ours == 1


def test_compiled_with_fused_kernels_disabled(active):
    tensors, graphs = leaves(), []

    def math(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            first = F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(first, k, v)

    made = run(tensors, compiled(math, graphs))
    assert sorted(attention_nodes(graphs)) == sorted([FORWARD, BACKWARD])
    wanted = run(tensors, math)
    assert apart(made, wanted) < rounding(wanted)


def test_odd_shapes_are_left_to_pytorch(active):
    q, k, v = leaves()
    assert F.scaled_dot_product_attention(q[0], k[0], v[0]).shape == (4, 9, 8)


def test_compiled(active):
    tensors, graphs = leaves(), []

    def twice(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)

    made = run(tensors, compiled(twice, graphs))
    assert sorted(attention_nodes(graphs)) == sorted([FORWARD, BACKWARD])
    wanted = run(tensors, twice)
    assert apart(made, wanted) < rounding(wanted)


def test_compiled_after_a_compilation_without():
    def twice(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)

    with served_on_cpu():
        for ours in (False, True, False):
            graphs = []
            torch._dynamo.reset()
            if ours:
                deepwell.activate_sdpa()
            run(leaves(), compiled(twice, graphs))
            deepwell.deactivate_sdpa()
            assert (FORWARD in attention_nodes(graphs)) == ours


def test_activating_twice_is_activating_once(active):
    deepwell.activate_sdpa()
    deepwell.deactivate_sdpa()
    tensors = leaves()
    assert seen(lambda: F.scaled_dot_product_attention(*tensors)).ours == 0
    deepwell.deactivate_sdpa()


def test_dropout_has_the_right_expectation(active):
    q, k, v = (t.detach() for t in leaves())
    v = v.abs() + 1
    total = sum(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(400))
    exact = F.scaled_dot_product_attention(q, k, v)
    # The standard deviation of an element is at most that of the mean of nine equal weights of
    # which half are dropped; five of these are allowed.
    assert ((total / 400 - exact).abs() / exact).max() < 5 * (v.max() / v.min()) / 400**0.5
