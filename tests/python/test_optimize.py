"""optimize() and restore(): the object stays the same in every respect, fallbacks are counted, and
reasons are given."""

import copy
import inspect
import pickle

import deepwell
import pytest
import torch
from deepwell.optimize import OptimizedForward
from deepwell.targets import Target
from torch import nn
from users import engine_calls
from zoo import llama, mlp, small_gpt2


def call(model, shape=(2, 11)):
    ids = torch.randint(0, 199, shape, generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, labels=ids.clone())


def test_same_object_and_restore(always) -> None:
    model = small_gpt2().train()
    before = {
        "dict": set(model.__dict__),
        "class": type(model),
        "parameters": [(n, id(p)) for n, p in model.named_parameters()],
        "modules": [(n, id(m)) for n, m in model.named_modules()],
        "keys": list(model.state_dict()),
        "signature": inspect.signature(model.forward),
    }
    expected = call(model).loss.item()
    returned = deepwell.optimize(model, verbose=False)
    assert returned is model and type(model) is before["class"]
    assert inspect.signature(model.forward) == before["signature"]
    assert abs(call(model).loss.item() - expected) < 1e-5
    assert engine_calls(model) == (1, 0)
    assert [(n, id(p)) for n, p in model.named_parameters()] == before["parameters"]
    assert [(n, id(m)) for n, m in model.named_modules()] == before["modules"]
    assert list(model.state_dict()) == before["keys"]
    deepwell.restore(model)
    assert set(model.__dict__) == before["dict"]
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert call(model).loss.item() == expected


def test_not_in_place_leaves_the_original(always) -> None:
    model = mlp()
    other = deepwell.optimize(model, inplace=False, verbose=False)
    assert other is not model and "forward" not in model.__dict__
    x = torch.randn(4, 37)
    torch.testing.assert_close(other(x), model(x))


def test_optimizing_twice_equals_optimizing_once(always) -> None:
    model = mlp()
    deepwell.optimize(deepwell.optimize(model, verbose=False), verbose=False)
    model(torch.randn(4, 37))
    deepwell.restore(model)
    assert "forward" not in model.__dict__


def test_exact_output_structure(always) -> None:
    plain, ours = small_gpt2().eval(), None
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    expected, found = call(plain), call(ours)
    assert type(found) is type(expected) and list(found.keys()) == list(expected.keys())
    assert type(found.past_key_values) is type(expected.past_key_values)
    for a, b in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-5)


def test_new_length_needs_no_capture(always) -> None:
    import time

    model = deepwell.optimize(llama().train(), verbose=False)
    call(model, (2, 16)).loss.backward()
    started = time.perf_counter()
    call(model, (3, 29)).loss.backward()
    elapsed = time.perf_counter() - started
    units = model.__dict__["forward"].session.report._units
    assert units[""].captures == 1
    assert elapsed < 0.25 * units[""].capture_seconds + 0.25


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: setattr(m.transformer.h[0].attn.resid_dropout, "p", 0.25), "changed from"),
        (
            lambda m: setattr(m.transformer.h[0], "mlp", copy.deepcopy(m.transformer.h[0].mlp)),
            "sub",
        ),
        (lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight * 2)), "parameters"),
        (lambda m: setattr(m.config, "use_cache", False), "use_cache"),
    ],
    ids=["flag", "submodule", "parameter", "config"],
)
def test_changes_of_a_model_are_detected(change, reason, always) -> None:
    plain = small_gpt2().eval()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    call(ours)
    for model in (plain, ours):
        change(model)
    expected, found = call(plain), call(ours)
    torch.testing.assert_close(found.loss, expected.loss)
    assert list(found.keys()) == list(expected.keys())
    assert reason in deepwell.summary(ours)


def test_submodule_hooks_run_and_are_counted(always) -> None:
    model = deepwell.optimize(small_gpt2().eval(), verbose=False)
    call(model)
    seen = []
    handle = model.transformer.h[0].register_forward_hook(lambda *_: seen.append(1))
    call(model)
    assert seen == [1] and engine_calls(model) == (1, 1)
    assert "hooks are registered on 'transformer.h.0'" in deepwell.summary(model)
    handle.remove()
    call(model)
    assert seen == [1] and engine_calls(model) == (2, 1)


def test_root_hooks_run(always) -> None:
    model = mlp()
    seen = []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    deepwell.optimize(model, verbose=False)
    model(torch.randn(4, 37, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"] and engine_calls(model) == (1, 0)


def test_fallbacks_are_counted(always) -> None:
    model = deepwell.optimize(mlp(), verbose=False)
    x = torch.randn(4, 37)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(model(x), nn.Sequential.forward(model, x))
    assert engine_calls(model) == (0, 1) and "hooks on saved tensors" in deepwell.summary(model)
    jacobian = torch.func.vmap(model)(x)
    torch.testing.assert_close(jacobian, model(x))
    assert "torch.func" in deepwell.summary(model)


class Untraceable(nn.Module):
    """Data-dependent control flow surrounds modules that can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))
        self.single = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if y.sum().item() > -1e9:
            y = self.second(y)
        return self.single(y)


def test_submodules_are_optimized_if_the_model_cannot_be(always) -> None:
    plain = Untraceable()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(6, 37)
    for model in (plain, ours):
        model(x).square().sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)
    text = deepwell.summary(ours)
    assert "[first] Sequential -> engine" in text and "[second] Sequential -> engine" in text
    assert "[model] Untraceable left alone: " in text
    assert "[single] Linear left alone: a single operation" in text
    deepwell.restore(ours)
    assert all("forward" not in module.__dict__ for module in ours.modules())


def test_slower_engine_is_not_used(monkeypatch) -> None:
    """If the engine measures slower, the original runs, and the summary reports it."""
    import time

    from deepwell.runtime import Program

    monkeypatch.delenv("DEEPWELL_MEASURE", raising=False)
    run = Program.run

    def slow(self, *args):
        until = time.thread_time() + 0.02  # on one thread, a sleep would not count
        while time.thread_time() < until:
            pass
        return run(self, *args)

    monkeypatch.setattr(Program, "run", slow)
    model = deepwell.optimize(mlp(), verbose=False)
    x = torch.randn(4, 37)
    model(x)
    assert engine_calls(model) == (0, 1)
    assert "measured slower" in deepwell.summary(model)


def test_measuring_has_no_side_effects(monkeypatch) -> None:
    monkeypatch.delenv("DEEPWELL_MEASURE", raising=False)
    model = small_gpt2(resid_pdrop=0.1).train()
    state = copy.deepcopy(model.state_dict())
    deepwell.optimize(model, verbose=False)
    ids = torch.randint(0, 199, (2, 12))
    torch.manual_seed(11)
    model(input_ids=ids, labels=ids.clone())
    after = torch.get_rng_state()
    assert "forward + backward" in deepwell.summary(model)  # the call was measured
    if engine_calls(model)[0]:  # a call of the engine draws one seed, and measuring draws none
        torch.manual_seed(11)
        Target().fresh_seed()
        assert torch.equal(after, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


def test_summary_format(capsys, always) -> None:
    model = deepwell.optimize(small_gpt2().train())
    call(model)
    out = capsys.readouterr().out
    for line in (
        "Deepwell Optimizer - CPU FP32",
        "[model] GPT2LMHeadModel -> engine",
        "Optimization Summary",
        "Total modules replaced: 1",
        "- Attention modules:",
        "✓ Model optimized for CPU",
    ):
        assert line in out
    call(model)
    assert capsys.readouterr().out == ""


def test_profile(always) -> None:
    model = deepwell.optimize(mlp(), verbose=False, profile=True)
    for _ in range(3):
        model(torch.randn(4, 37))
    assert "ms per forward, over 3 calls" in deepwell.summary(model)


def test_missing_features_are_reported() -> None:
    with pytest.raises(deepwell.UnsupportedError, match="not supported in this version"):
        deepwell.optimize(mlp(), target="sm_80")


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="Module"):
        deepwell.optimize(lambda x: x)


def test_double_precision_models_are_left_alone() -> None:
    model = deepwell.optimize(mlp().double(), verbose=False)
    assert "is torch.float64: the engine trains torch.float32" in deepwell.summary(model)
    assert model(torch.randn(2, 37, dtype=torch.float64)).dtype == torch.float64


def test_copy_and_pickle(always) -> None:
    model = deepwell.optimize(mlp(), verbose=False)
    x = torch.randn(4, 37)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.__dict__["forward"].module is other
        with torch.no_grad():
            other[0].weight.add_(1.0)
        assert not torch.equal(other(x), expected)
        torch.testing.assert_close(model(x), expected)


def test_torch_compile_over_an_optimized_model(always) -> None:
    plain = mlp()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    compiled = torch.compile(ours)
    x = torch.randn(4, 37)
    compiled(x).square().sum().backward()
    plain(x).square().sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)
    assert engine_calls(ours)[0] == 1


def test_wrong_shape_is_pytorchs_own_error(always) -> None:
    model = deepwell.optimize(mlp(), verbose=False)
    model(torch.randn(4, 37))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 36))


def test_index_out_of_range_is_an_error(always) -> None:
    model = deepwell.optimize(small_gpt2().eval(), verbose=False)
    call(model)
    with pytest.raises((IndexError, RuntimeError), match="(?i)index|range"):
        model(input_ids=torch.full((2, 11), 100000))


def test_before_the_first_call() -> None:
    model = deepwell.optimize(mlp(), verbose=False)
    assert isinstance(model.__dict__["forward"], OptimizedForward)
    assert "Total modules replaced: 0" in deepwell.summary(model)
    assert "not optimized" in deepwell.summary(deepwell.restore(model))


def test_a_conversion_and_back_uses_the_capture_of_its_type(monkeypatch) -> None:
    """Conversions and moves give the same parameters other data, so that a capture must remember what they were."""
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    ours = deepwell.optimize(copy.deepcopy(plain), target="cpu", verbose=False)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        found, expected = ours.to(dtype)(x.to(dtype)), plain.to(dtype)(x.to(dtype))
        assert found.dtype == dtype
        tolerance = 2.0**-20 if dtype == torch.float32 else 2.0**-6
        assert (found.double() - expected.double()).abs().max() <= tolerance
    assert len(ours.__dict__["forward"]._states) == 2
