"""Calls the C operators on CPU tensors; test_attention_native.py runs it with
attention_by_definition.c preloaded."""

import os
import sys

import attention_reference as reference
import torch
from deepwell import _deepwell
from deepwell.attention import attention, functional, operators, packed_attention

functional.devices.add("cpu")
_folder = os.path.join(os.path.dirname(torch.__file__), "lib")
assert _deepwell.attention_register(os.path.join(_folder, "libtorch_cpu.so"), None, "CPU")


def judged(call, got, q, k, v, d_o, packed=False):
    if packed:
        q, k, v, d_o = (t.transpose(0, 1) for t in (q, k, v, d_o))
        got = [t.transpose(0, 1) for t in got]
    exact = reference.attention(call, q, k, v, d_o)
    for name, tensor in zip(("o", "dq", "dk", "dv"), got):
        error, share, where = exact[name].judge(tensor)
        assert share <= 1, (name, error, where)


def layouts(shape):
    b, h, s, d = shape
    yield "bhsd", torch.randn(b, h, s, d)
    yield "bshd", torch.randn(b, s, h, d).transpose(1, 2)
    yield "fused", torch.randn(b, s, h, 3 * d)[..., d : 2 * d].transpose(1, 2)
    yield "sbhd", torch.randn(s, b, h, d).permute(1, 2, 0, 3)
    yield "hsbd", torch.randn(h, s, b, d + 8)[..., :d].permute(2, 0, 1, 3)
    yield "last axis strided", torch.randn(b, h, d, s).mT
    yield "broadcast heads", torch.randn(b, 1, s, d).expand(b, h, s, d)
    yield "odd offset", torch.randn(b * h * s * d + 1)[1:].view(b, h, s, d)


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for (name, base), (_, other) in zip(layouts((2, 4, 9, 8)), layouts((2, 2, 13, 8))):
            before = _deepwell.attention_copies()
            q = base.to(dtype) if name in ("bhsd",) else _like(base, dtype)
            k, v = _like(other, dtype), _like(other, dtype)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            options = dict(window=(4, 1), bottom_right=True, softcap=3.0, scale=0.4)
            o = attention(*leaves, **options)
            d_o = torch.randn_like(o)
            grads = torch.autograd.grad(o, leaves, d_o)
            call = reference.Call(0.4, 3.0, 4, 1, True)
            judged(call, [o.detach(), *grads], *[t.detach() for t in leaves], d_o)
            copied = _deepwell.attention_copies() - before
            assert (copied > 0) == (
                name in ("last axis strided", "broadcast heads", "odd offset")
            ), (name, copied)
            fake = operators.empty_beside(q)
            assert o.stride() == fake.stride(), (name, o.stride(), fake.stride())
            # an expanded gradient, which is one number in memory
            grads = torch.autograd.grad(attention(*leaves, **options).sum(), leaves)
            judged(call, [o.detach(), *grads], *[t.detach() for t in leaves], torch.ones_like(o))

    for dropout in (0.0, 0.3):
        q, k, v = (
            torch.randn(n, h, 16, dtype=torch.bfloat16) for n, h in ((12, 4), (15, 2), (15, 2))
        )
        lengths_q, lengths_k = (1, 0, 7, 4), (3, 4, 8, 0)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        offsets = [torch.tensor((0, *n)).cumsum(0).int() for n in (lengths_q, lengths_k)]
        torch.manual_seed(5)
        o = packed_attention(*leaves, *offsets, 7, 8, dropout, is_causal=True)
        torch.manual_seed(5)
        seed = functional.fresh_seed(q.device).tolist() if dropout else (0, 0)
        d_o = torch.randn_like(o)
        grads = torch.autograd.grad(o, leaves, d_o)
        call = reference.Call(
            0.25, window_right=0, dropout=dropout, seed=seed[0], seed_offset=seed[1]
        )
        call = reference.replace(call, lengths_q=lengths_q, lengths_k=lengths_k)
        judged(call, [o.detach(), *grads], *[t.detach() for t in leaves], d_o, packed=True)

    q = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    refused = {
        "differ in dtype": (q, q.half(), q.half()),
        "expected a multiple": (torch.zeros(1, 3, 4, 8, dtype=q.dtype), q, q),
        "head_dim is 8 in q and 16 in k": (q, *[torch.zeros(1, 2, 4, 16, dtype=q.dtype)] * 2),
        "axis 2 of v is 4 and of k 5": (q, torch.zeros(1, 2, 5, 8, dtype=q.dtype), q),
        "must be bfloat16 or float16": (q.double(),) * 3,
        "the batch is 1 in q and 2 in k": (q, *[q.repeat(2, 1, 1, 1)] * 2),
        "q must be [batch": (q[0, 0],) * 3,
        "q has 3 axes, expected 4": (q[0],) * 3,
    }
    for text, tensors in refused.items():
        try:
            operators.forward(*tensors, 1.0, 0.0, -1, -1, False, 0.0, None, None, None, 0, 0)
        except RuntimeError as error:
            assert text in str(error), (text, str(error))
        else:
            raise AssertionError(f"not refused: {text}")
    for text, seed in (
        ("dropout without a seed", None),
        ("the seed must be 2", torch.zeros(3, dtype=torch.int64)),
    ):
        try:
            operators.forward(q, q, q, 1.0, 0.0, -1, -1, False, 0.5, seed, None, None, 0, 0)
        except RuntimeError as error:
            assert text in str(error), (text, str(error))
        else:
            raise AssertionError(f"not refused: {text}")
    print("all right")


def _like(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns random numbers of ``dtype`` with the strides of ``base``."""
    size = 1 + sum((n - 1) * s for n, s in zip(base.shape, base.stride())) + base.storage_offset()
    flat = torch.randn(size + 8).to(dtype)
    return flat.as_strided(base.shape, base.stride(), base.storage_offset())


if __name__ == "__main__":
    sys.exit(main())
