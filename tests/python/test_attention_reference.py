"""Tests the reference for attention kernels: it accepts a correct kernel, and rejects one with a
planted mistake."""

import ctypes
import math
import shutil
import subprocess
import sys
from pathlib import Path

import attention_reference as reference
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import attention_smoke as smoke  # noqa: E402
import native  # noqa: E402


class Emulated:
    """A fused kernel in FP32 on the CPU: tiles of keys, an online softmax, rounding of P, dS and O."""

    tile = 64

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def dtype(self, dtype):
        self._dtype = dtype
        return 0

    def supported(self, call, backward):
        return ""

    def workspace(self, call):
        return 0

    def attach(self, run):
        self.run = run
        return self

    def _parts(self):
        run = self.run
        call, case = run.reference, run.case
        tensors = {name: p.view for name, p in {**run.inputs, **run.outputs}.items()}
        tensors["lse"] = run.lse_view
        keep = None
        if case.lengths_q is None:
            if call.dropout:
                q, k = tensors["q"], tensors["k"]
                keep = reference.kept(call, q.shape[0], q.shape[1], q.shape[2], k.shape[2], "cpu")
            yield call, tensors, keep
            return
        if call.dropout:
            sizes = max(case.lengths_q), max(case.lengths_k)
            keep = reference.kept(call, len(case.lengths_q), case.heads_q, *sizes, "cpu")
        a = b = 0
        for i, (n, m) in enumerate(zip(case.lengths_q, case.lengths_k)):
            part = {
                name: t[:, b : b + m][None]
                if name in "k v dk dv".split()
                else t[:, a : a + n][None]
                for name, t in tensors.items()
            }
            a, b = a + n, b + m
            yield call, part, None if keep is None else keep[i : i + 1, :, :n, :m]

    def _scores(self, call, t):
        group = t["q"].shape[1] // t["k"].shape[1]
        k = t["k"].float().repeat_interleave(group, 1)
        v = t["v"].float().repeat_interleave(group, 1)
        s = (t["q"].float() @ k.mT) * call.scale
        slope = torch.ones_like(s)
        if call.softcap:
            x = torch.tanh(s / call.softcap)
            s, slope = x * call.softcap, 1 - x * x
        seen = reference.visible(call, s.shape[2], s.shape[3], "cpu")
        if self.mistake == "mask":
            seen = seen.clone()
            seen[-1, -1] = ~seen[-1, -1]
        return s.masked_fill(~seen, -math.inf), slope, k, v, group

    def forward(self, _):
        for call, t, keep in self._parts():
            s, _, _, v, _ = self._scores(call, t)
            o = torch.zeros(t["q"].shape)
            top = torch.full(s.shape[:3], -math.inf)
            total = torch.zeros(s.shape[:3])
            for begin in range(0, s.shape[3], self.tile):
                part = s[..., begin : begin + self.tile]
                new = torch.maximum(top, part.amax(-1))
                safe = torch.where(new == -math.inf, 0.0, new)
                p, shrink = torch.exp(part - safe[..., None]), torch.exp(top - safe)
                total = total * shrink + p.sum(-1)
                if keep is not None:
                    p = p * keep[..., begin : begin + self.tile]
                p = p.to(t["q"].dtype).float()
                if self.mistake == "rescale" and begin:
                    shrink = torch.ones_like(shrink)
                o = o * shrink[..., None] + p @ v[..., begin : begin + self.tile, :]
                top = new
            o = o / torch.where(total == 0, 1.0, total)[..., None] / (1 - call.dropout)
            t["o"].copy_(o * (1.01 if self.mistake == "percent" else 1))
            t["lse"].copy_(top + torch.log(total))
        return ""

    def backward(self, _):
        for call, t, keep in self._parts():
            dtype = t["q"].dtype
            s, slope, k, v, group = self._scores(call, t)
            lse = torch.where(t["lse"] == -math.inf, math.inf, t["lse"])
            p = torch.exp(s - lse[..., None])
            d_o = t["d_o"].float()
            d_p = d_o @ v.mT
            dropped = p
            if keep is not None:
                d_p, dropped = d_p * keep / (1 - call.dropout), p * keep
            delta = (d_o * t["o"].float()).sum(-1, keepdim=True)
            if self.mistake == "delta":
                delta = delta * 0
            d_s = (p * (d_p - delta) * slope).to(dtype).float()
            d_v = dropped.to(dtype).float().mT @ d_o / (1 - call.dropout)
            d_q, d_k = call.scale * (d_s @ k), call.scale * (d_s.mT @ t["q"].float())
            if self.mistake == "half sums":
                d_q = call.scale * sum(
                    (d_s[..., i : i + 16] @ k[..., i : i + 16, :]).to(dtype)
                    for i in range(0, k.shape[2], 16)
                )
            shape = (t["k"].shape[0], t["k"].shape[1], group, *t["k"].shape[2:])
            if self.mistake == "group" and group > 1:
                d_k[:, 1] = 0
            t["dq"].copy_(d_q)
            t["dk"].copy_(d_k.view(shape).sum(2))
            t["dv"].copy_(d_v.view(shape).sum(2))
        return ""


@pytest.fixture
def judged(monkeypatch):
    class Attached(smoke.Run):
        def __init__(self, case, library, device):
            super().__init__(case, library, device)
            library.attach(self)

    monkeypatch.setattr(smoke, "Run", Attached)

    def judge(case, mistake=""):
        return smoke.check(case, Emulated(mistake), torch.device("cpu"), True, True, False)

    return judge


def _quick(case):
    return case.rows_q * case.rows_k * case.batch * case.heads_q <= 2**20 and case.head_dim == 64


# the other cases differ only in sizes
@pytest.mark.parametrize("case", [c for c in smoke.cases() if _quick(c)], ids=lambda c: c.name)
def test_correct_kernel_passes(case, judged):
    verdict, parts = judged(case)
    assert verdict == "ok", parts


@pytest.mark.slow
@pytest.mark.parametrize("case", smoke.cases(), ids=lambda c: c.name)
def test_correct_kernel_passes_all_cases(case, judged):
    verdict, parts = judged(case)
    assert verdict == "ok", parts


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        ("mask", smoke.Case(1, 2, 2, 300, 300, 64, window=(-1, 0))),
        ("rescale", smoke.Case(1, 2, 2, 100, 200, 64)),
        ("percent", smoke.Case(1, 2, 2, 100, 200, 64)),
        ("delta", smoke.Case(1, 2, 2, 100, 200, 64)),
        ("half sums", smoke.Case(1, 2, 2, 64, 1024, 64)),
        ("group", smoke.Case(1, 4, 2, 100, 200, 64)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mistakes_are_detected(mistake, case, judged):
    verdict, parts = judged(case, mistake)
    assert verdict == "FAIL", parts


def test_writes_outside_are_detected():
    placed = smoke.Placed((2, 3, 5, 8), "gaps", torch.bfloat16, torch.device("cpu"))
    placed.fill(torch.randn(2, 3, 5, 8))
    assert placed.trespassed() == 0
    kept = placed.view.clone()
    placed.flat[-1] = 0
    assert placed.trespassed() == 1
    assert torch.equal(placed.view, kept)


def test_uniforms_are_philox():
    """Compares with Random123's published vector for the counter and key of pi's digits."""
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    key = [0xA4093822, 0x299F31D0]
    want = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    block = counter[0]  # the element whose counter has this low word
    seed = key[1] << 32 | key[0]
    offset = counter[3] << 32 | counter[2]
    # counter[1] is the stream here; high32(block) << 20 is 0. A stream's low 32 bits count.
    index = torch.tensor([4 * block, 4 * block + 3])
    for stream, words in (
        (0, _philox([block, 0, counter[2], counter[3]], key)),
        (counter[1], want),
        ((2 << 32) + counter[1], want),
    ):
        got = reference.uniform(seed, offset, index, stream)
        assert got.tolist() == [(words[0] >> 8) * 2.0**-24, (words[3] >> 8) * 2.0**-24]
    assert _philox(counter, key) == want


def _philox(c, k):
    c, k = list(c), list(k)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_exact_agrees_with_pytorch():
    """Compares the FP64 results with autograd through PyTorch's form of the definition."""
    torch.manual_seed(3)
    q, k, v, d_o = (torch.randn(2, 4, 7, 16).bfloat16() for _ in range(4))
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    grads = torch.autograd.grad(o, wide, d_o.double())
    made = reference.attention(reference.Call(scale=0.25, window_right=0), q, k, v, d_o)
    for name, want in zip(("o", "dq", "dk", "dv"), (o, *grads)):
        torch.testing.assert_close(made[name].exact, want, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_structure_equals_the_headers(tmp_path):
    names = [name for name, _ in native.Call._fields_]
    lines = "".join(f'printf("%zu\\n", offsetof(dw_attention, {name}));' for name in names)
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include "deepwell/attention.h"\n#include <stdio.h>\n'
        f'int main(void) {{ {lines} printf("%zu\\n", sizeof(dw_attention)); }}'
    )
    include = Path(__file__).parents[2] / "include"
    program = tmp_path / "offsets"
    subprocess.run(["cc", f"-I{include}", str(source), "-o", str(program)], check=True)
    told = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    here = [getattr(native.Call, name).offset for name in names] + [ctypes.sizeof(native.Call)]
    assert [int(n) for n in told.split()] == here
