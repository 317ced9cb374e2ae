"""Logits that are made when they are first looked at (deepwell/lazy_logits.py), against PyTorch's."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import weakref

import deepwell
import numpy as np
import pytest
import torch
from deepwell import lazy_logits
from deepwell.capture import capture_graph
from deepwell.lazy_logits import LazyLogits, defer
from deepwell.optimize import _installed
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from users import close, same_grads

pytestmark = pytest.mark.usefixtures("always")

VOCABULARY, WIDTH = 211, 32


def gpt2() -> nn.Module:
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    sizes = dict(n_layer=1, n_embd=WIDTH, n_head=2, vocab_size=VOCABULARY, n_positions=64)
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=VOCABULARY,
        )
    )


class Small(nn.Module):
    """Returns a tuple of loss and logits. ``kind`` says how the logits are computed."""

    def __init__(self, kind: str = "bias") -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=kind == "bias")
        self.matrix = nn.Parameter(torch.randn(WIDTH, VOCABULARY) / 6)

    def forward(self, ids, labels=None):
        hidden = torch.tanh(self.inner(self.embedding(ids)))
        if self.kind == "transposed":
            logits = hidden @ self.matrix
        elif self.kind == "computed weight":
            logits = F.linear(hidden, self.head.weight * 2)
        else:
            logits = self.head(hidden)
        if self.kind == "flat":
            logits = logits.view(-1, VOCABULARY)
        if self.kind == "capped":
            logits = torch.tanh(logits / 3) * 3
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1))
        if self.kind == "read":
            return loss, logits, logits.softmax(-1)
        if self.kind == "viewed":
            return loss, logits, logits[:, -1]
        return loss, logits


def models(build, **options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = build()
    return plain, deepwell.optimize(copy.deepcopy(plain), verbose=False, **options)


@functools.cache
def shared(build) -> tuple[nn.Module, nn.Module]:
    """The models of tests that do not change them: a capture takes longer than such a test."""
    return models(build)


def without_gradients(build) -> tuple[nn.Module, nn.Module]:
    for model in shared(build):
        model.zero_grad()
    return shared(build)


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def call(model: nn.Module, ids: torch.Tensor | None = None):
    ids = tokens() if ids is None else ids
    return model(input_ids=ids, labels=ids, use_cache=False)


def is_made(logits: LazyLogits) -> bool:
    assert type(logits) is LazyLogits
    return logits._cell.value is not None


def outputs_of(model: nn.Module) -> list[list[int]]:
    """Returns the shapes of the outputs of a graph that was captured once."""
    (entry,) = [e for made in _installed[model]._states[0].entries.values() for e in made]
    variant = [v for v in entry.program._variants.values() if v._prepared][-1]
    return [list(shape) for shape, _ in list(variant._prepared.values())[-1].outputs]


@pytest.fixture
def products(monkeypatch):
    """Counts the logits that are made."""
    made = []
    make = lazy_logits.Layer.make

    def counted(layer):
        made.append(layer)
        return make(layer)

    monkeypatch.setattr(lazy_logits.Layer, "make", counted)
    return made


USES = {
    "loss": lambda out: out.loss,
    "logits": lambda out: out.logits.square().mean(),
    "both": lambda out: out.loss * 2 + out.logits[:, ::2].float().logsumexp(-1).mean(),
}


@pytest.mark.parametrize("build", [gpt2, llama])
def test_gradients(build) -> None:
    plain, ours = models(build)
    for ids in (tokens(), tokens(3, 5)):
        for use in ("loss", "logits", "both", "loss"):
            for model in (plain, ours):
                model.zero_grad()
                USES[use](call(model, ids)).backward()
            same_grads(ours, plain)
        close(call(ours, ids).logits, call(plain, ids).logits)


@pytest.mark.parametrize("kind", ["bias", "transposed", "flat", "plain"])
def test_modules_that_return_tuples(kind, products) -> None:
    plain, ours = models(lambda: Small(kind))
    for use in (lambda o: o[0], lambda o: o[0] + o[1].square().mean()):
        for model in (plain, ours):
            model.zero_grad()
            use(model(tokens(), tokens())).backward()
        same_grads(ours, plain)
    assert len(products) == 1
    theirs, logits = plain(tokens(), tokens())[1], ours(tokens(), tokens())[1]
    assert type(logits) is LazyLogits
    close(logits, theirs)
    assert type(ours(tokens())) is torch.Tensor  # no loss


@pytest.mark.parametrize("kind", ["computed weight", "capped", "read", "viewed"])
def test_logits_that_stay_outputs(kind) -> None:
    plain, ours = models(lambda: Small(kind))
    theirs, found = plain(tokens(), tokens()), ours(tokens(), tokens())
    assert all(type(value) is torch.Tensor for value in found)
    close(found[1], theirs[1])


def test_nothing_is_made_if_only_the_loss_is_used(products, monkeypatch) -> None:
    ours = models(gpt2)[1]
    ids = tokens(4, 11)
    call(ours, ids)
    calls = []
    monkeypatch.setattr(F, "linear", lambda *arguments: calls.append(arguments))
    for _ in range(3):
        out = call(ours, ids)
        out.loss.backward()
    with torch.no_grad():
        out = call(ours, ids)
    assert calls == [] and products == [] and not is_made(out.logits)
    assert outputs_of(ours) == [[], [4, 11, WIDTH]]


def test_what_needs_no_elements(products) -> None:
    plain, ours = without_gradients(gpt2)
    logits, theirs = call(ours).logits, call(plain).logits
    assert isinstance(logits, torch.Tensor) and torch.is_tensor(logits)
    for read in (
        lambda x: (x.shape, x.dtype, x.device, x.size(), x.dim(), x.ndim, x.numel(), len(x)),
        lambda x: (x.requires_grad, x.is_leaf, x.stride(), x.is_contiguous(), x.layout, x.nbytes),
        lambda x: (x.size(-1), x.is_floating_point(), x.is_cuda, x.element_size(), x.grad),
        lambda x: (x.detach().requires_grad, x.double().dtype, x.to("cpu").shape),
    ):
        assert read(logits) == read(theirs)
    assert logits.grad_fn is not None
    logits.register_hook(lambda grad: None)
    logits.retain_grad()
    assert products == []


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def in_place(x):
    y = x.clone()
    x.mul_(2)
    x[:, 0] = 1.0
    x[..., 3:5] += y[..., 3:5]
    return x


DIFFERENTIABLE = {
    "indexing": lambda x: x[:, :-1],
    "index": lambda x: x[torch.tensor([1, 0]), :, 5],
    "conversion": lambda x: x.double(),
    "float": lambda x: x.float() * 2,
    "arithmetic": lambda x: 1 - x / 2,
    "functional": lambda x: F.log_softmax(x, -1),
    "method": lambda x: x.view(-1, VOCABULARY).t(),
    "iteration": lambda x: torch.stack([row.sum() for row in x]),
    "concatenation": lambda x: torch.cat([x, x], 1),
    "function": Double.apply,
    "loss": lambda x: F.cross_entropy(x.flatten(0, 1), tokens().flatten()),
    "in place": in_place,
    "of a view": lambda x: x.view(-1, VOCABULARY).narrow(0, 1, 3).mul_(3),
    "compiled": torch.compile(lambda x: (x * 2).sin()),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
    "vmap": lambda x: torch.vmap(lambda row: row.sum(-1))(x),
    "einsum": lambda x: torch.einsum("bsv,bsv->bs", x, x),
}


@pytest.mark.parametrize("use", DIFFERENTIABLE)
def test_uses_with_a_gradient(use, products) -> None:
    plain, ours = without_gradients(llama)
    results = []
    for model in (plain, ours):
        found = DIFFERENTIABLE[use](call(model).logits)
        found.square().sum().backward()
        results.append(found)
    close(results[1].detach() + 0, results[0].detach())
    same_grads(ours, plain)
    assert len(products) == 1


def saved(x):
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return torch.load(file)


READERS = {
    "argmax": lambda x: x.argmax(-1),
    "comparison": lambda x: x > 0,
    "cpu": lambda x: x.detach().cpu() + 0,
    "numpy": lambda x: torch.from_numpy(x.detach().cpu().numpy()),
    "numpy without gradient": lambda x: (
        torch.from_numpy(x.numpy()) if not x.requires_grad else None
    ),
    "asarray": lambda x: torch.from_numpy(np.asarray(x.detach())),
    "ufunc": lambda x: torch.as_tensor(np.exp(x.detach())),
    "list": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: torch.tensor(x[0, 1, 2].item()),
    "data": lambda x: x.data * 1,
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "save": saved,
    "out": lambda x: torch.add(x.detach(), 1, out=torch.empty(0)),
    "inference mode": torch.inference_mode()(lambda x: x * 1),
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda x: x.detach() * 1),
    "storage": lambda x: torch.tensor(x.untyped_storage().nbytes()),
    "shared": lambda x: x.detach().share_memory_() * 1,
    "equality": lambda x: torch.tensor(torch.equal(x, x.detach())),
    "script": lambda x: torch.jit.script(_scripted)(x.detach()),
    "set": lambda x: torch.zeros(x.shape).copy_(x.detach()),
}


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("use", READERS)
def test_uses_of_elements(use, grad, products) -> None:
    plain, ours = without_gradients(gpt2)
    with torch.set_grad_enabled(grad):
        results = [READERS[use](call(model).logits) for model in (plain, ours)]
    if results[0] is not None:
        assert type(results[1]) in (torch.Tensor, LazyLogits)
        close(results[1], results[0])
        assert len(products) == 1


def test_text() -> None:
    plain, ours = without_gradients(gpt2)
    theirs, logits = call(plain).logits, call(ours).logits
    numbers = repr(theirs.detach())[:60]
    assert numbers[:25] == repr(logits.detach())[:25]
    assert "grad_fn" in repr(logits) and "tensor(" in str(call(ours))


def test_errors_are_those_of_pytorch() -> None:
    plain, ours = without_gradients(gpt2)
    for use in (lambda x: x.numpy(), copy.deepcopy, lambda x: np.asarray(x)):
        for model in (plain, ours):
            with pytest.raises(RuntimeError, match="requires grad|created explicitly"):
                use(call(model).logits)
    with pytest.raises(RuntimeError, match="change the shape of logits in place"):
        call(ours).logits.squeeze_()


def test_gradients_with_respect_to_logits() -> None:
    plain, ours = without_gradients(llama)
    found = []
    for model in (plain, ours):
        out = call(model)
        seen = []
        out.logits.register_hook(lambda grad: seen.append(grad) or grad * 2)
        out.logits.retain_grad()
        value = out.logits.sin().sum() + Double.apply(out.logits).mean()
        (first,) = torch.autograd.grad(value, out.logits, retain_graph=True)
        value.backward(retain_graph=True)
        out.logits.backward(torch.ones(out.logits.shape))
        found.append([first, seen[-1], out.logits.grad])
    for a, b in zip(*found):
        close(b, a)
    same_grads(ours, plain)


def test_a_second_derivative() -> None:
    plain, ours = without_gradients(llama)
    for model in (plain, ours):
        weight = model.lm_head.weight
        (grad,) = torch.autograd.grad(call(model).logits.pow(3).mean(), weight, create_graph=True)
        grad.square().sum().backward()
    same_grads(ours, plain)


def test_backward_frees_the_input_of_the_head(monkeypatch) -> None:
    """A loss that is kept after backward keeps nothing else of the pass."""
    inputs = []
    of = LazyLogits.of.__func__

    def noted(cls, layer):
        inputs.append(weakref.ref(layer.hidden))
        return of(cls, layer)

    monkeypatch.setattr(LazyLogits, "of", classmethod(noted))
    _, ours = without_gradients(gpt2)
    loss = call(ours).loss
    assert inputs[-1]() is not None
    loss.backward(retain_graph=True)
    assert inputs[-1]() is not None
    loss.backward()
    assert inputs[-1]() is None


def test_two_forwards_before_a_backward_and_a_graph_that_is_kept() -> None:
    plain, ours = without_gradients(gpt2)
    for model in (plain, ours):
        first, second = call(model), call(model, tokens(3, 7))
        value = first.loss + second.logits.square().mean() + second.loss
        value.backward(retain_graph=True)
        value.backward()
    same_grads(ours, plain)


@pytest.mark.parametrize("train_head", [True, False])
def test_frozen_parameters(train_head) -> None:
    """The head alone, and everything except the head."""
    plain, ours = models(llama)
    for model in (plain, ours):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_((name == "lm_head.weight") == train_head)
        for use in USES.values():
            use(call(model)).backward()
        call(model).logits.square().mean().backward()
    same_grads(ours, plain)


@pytest.mark.parametrize("step", [torch.optim.SGD, deepwell.AdamW])
def test_changed_parameters_are_an_error(step) -> None:
    ours = models(gpt2)[1]
    out = call(ours)
    out.loss.backward()
    step(ours.parameters(), lr=0.1).step()
    assert out.logits.shape == (2, 9, VOCABULARY)
    with pytest.raises(RuntimeError, match=r"parameters of their linear layer .* changed"):
        out.logits.sum()
    out = call(ours)
    looked_at = out.logits.argmax(-1)
    step(ours.parameters(), lr=0.1).step()
    assert torch.equal(out.logits.argmax(-1), looked_at)
    with pytest.raises(RuntimeError, match="changed after the forward|inplace operation"):
        out.logits.sum().backward()
    out = call(ours)
    ours.bfloat16()
    with pytest.raises(RuntimeError, match="changed after the forward"):
        out.logits.sum()


def test_logits_always() -> None:
    plain, ours = models(gpt2, logits=True)
    out = call(ours)
    assert type(out.logits) is torch.Tensor
    close(out.logits, call(plain).logits)
    assert outputs_of(ours) == [[], [2, 9, VOCABULARY]]


def test_logits_never(products) -> None:
    plain, ours = models(gpt2, logits=False)
    out = call(ours)
    assert out.logits is None and "logits" not in out and type(out) is type(call(plain))
    for model in (plain, ours):
        call(model).loss.backward()
    same_grads(ours, plain)
    assert outputs_of(ours) == [[]] and products == []
    ids = tokens()
    assert ours(input_ids=ids, labels=ids, return_dict=False)[1] is None
    assert ours(input_ids=tokens()).logits.shape == (2, 9, VOCABULARY)  # without labels
    ours.lm_head.register_forward_hook(lambda *a: None)  # PyTorch runs it
    assert call(ours).logits is None
    deepwell.restore(ours)
    assert call(ours).logits is not None


def test_logits_never_in_tuples() -> None:
    for kind in ("bias", "capped"):
        ours = models(lambda: Small(kind), logits=False)[1]
        loss, logits = ours(tokens(), tokens())
        assert logits is None and loss.requires_grad


def test_the_argument_is_checked() -> None:
    for wrong in ("never", None, 1):
        with pytest.raises(ValueError, match="use 'lazy'"):
            deepwell.optimize(Small(), verbose=False, logits=wrong)


def test_a_hook_on_the_head_sees_the_logits() -> None:
    ours = models(llama)[1]
    seen = []
    ours.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
    out = call(ours)
    assert type(out.logits) is torch.Tensor and seen[0] is out.logits


def test_copies_and_pickles_keep_the_choice() -> None:
    ours = models(gpt2, logits=False)[1]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert call(other).logits is None


def test_autocast() -> None:
    plain, ours = without_gradients(llama)
    for model in (plain, ours):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(model)
        assert out.logits.dtype == torch.bfloat16
        (out.loss + out.logits.float().square().mean()).backward()
    assert type(out.logits) is LazyLogits
    same_grads(ours, plain, 2.0**-8)


def test_the_conversion_of_accelerate_stays_lazy(products) -> None:
    """It converts the outputs of a forward under autocast to float32."""
    plain, ours = without_gradients(llama)
    with torch.autocast("cpu", torch.bfloat16):
        out, theirs = call(ours), call(plain)
    logits, expected = out.logits.float(), theirs.logits.float()
    assert not is_made(logits) and products == []
    close(logits, expected, unit=2.0**-8)
    assert logits.dtype == torch.float32


def test_detached_logits_share_elements() -> None:
    ours = without_gradients(gpt2)[1]
    with torch.no_grad():
        logits = call(ours).logits
        wide, detached = logits.double(), logits.detach()
        logits.mul_(2)
        close(detached, logits)
        close(wide * 2, logits.double())


def test_precisions() -> None:
    """The head keeps the model's precision, so its logits may be made by PyTorch."""
    plain, ours = models(gpt2, precision="bf16")
    eager = models(gpt2, precision="bf16", logits=True)[1]
    logits = call(ours).logits
    assert type(logits) is LazyLogits
    close(logits, call(eager).logits)


def test_deferral_of_a_capture() -> None:
    captured = capture_graph(Small(), (tokens(), tokens()))
    lazy, deferred = defer(captured, "lazy")
    assert captured.json != lazy.json and list(deferred) == [1]
    assert defer(captured, True) == (captured, {})
    assert len(json.loads(defer(captured, False)[0].json)["outputs"]) == 1


def test_an_emulated_gpu() -> None:
    plain, ours = models(Small, target="emulator:sm_90a")
    for use in (lambda o: o[0], lambda o: o[0] + o[1].square().mean()):
        for model in (plain, ours):
            model.zero_grad()
            out = model(tokens(2, 3), tokens(2, 3))
            use(out).backward()
        same_grads(ours, plain)
    assert type(out[1]) is LazyLogits
