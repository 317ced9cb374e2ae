"""An engine follows autograd's rules: calls that work in PyTorch work, and calls that fail there
fail."""

import copy

import deepwell
import pytest
import torch
from compare import assert_same_function, gradients
from deepwell import _deepwell, guards
from deepwell.runtime import _Allocations
from deepwell.targets import Target
from torch import nn
from users import engine_calls
from zoo import BY_NAME, gpt2, llama, small_gpt2

pytestmark = pytest.mark.usefixtures("always")


def pair(build=small_gpt2, **options):
    plain = build(**options).train()
    return plain, deepwell.optimize(copy.deepcopy(plain), verbose=False)


def batch(seed: int, shape=(2, 13), vocabulary: int = 199) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed: int, shape=(2, 13)) -> torch.Tensor:
    ids = batch(seed, shape)
    return model(input_ids=ids, labels=ids.clone()).loss


def assert_grads_close(ours, plain) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(
                a.grad, b.grad, rtol=1e-3, atol=1e-5 * b.grad.abs().max().item() + 1e-8, msg=name
            )


def test_two_forwards_before_a_backward() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        first, second = loss_of(model, 1), loss_of(model, 2, (3, 7))
        (first + 0.5 * second).backward()
    assert_grads_close(ours, plain)
    assert engine_calls(ours) == (2, 0)


def test_backwards_in_the_order_of_forwards() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        first, second = loss_of(model, 1), loss_of(model, 2)
        first.backward()
        second.backward()
    assert_grads_close(ours, plain)


def test_gradient_accumulation() -> None:
    plain, ours = pair(llama, num_hidden_layers=1)
    for model in (plain, ours):
        for seed in range(3):
            (loss_of(model, seed) / 3).backward()
    assert_grads_close(ours, plain)


def test_retain_graph() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        loss = loss_of(model, 1)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_grads_close(ours, plain)


def test_second_backward_fails() -> None:
    _, ours = pair()
    loss = loss_of(ours, 1)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_fails_loudly() -> None:
    _, ours = pair()
    parameters = list(ours.parameters())
    grads = torch.autograd.grad(loss_of(ours, 1), parameters, create_graph=True)
    with pytest.raises(RuntimeError):
        sum(g.pow(2).sum() for g in grads).backward()


def test_frozen_parameters() -> None:
    plain, ours = pair(gpt2)
    for model in (plain, ours):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("h.1" in name)
        loss_of(model, 1).backward()
    assert_grads_close(ours, plain)
    for model in (plain, ours):  # and requires gradients again
        model.requires_grad_(True)
        loss_of(model, 2).backward()
    assert_grads_close(ours, plain)


def test_frozen_model_needs_no_autograd_graph() -> None:
    _, ours = pair()
    ours.requires_grad_(False)
    assert not loss_of(ours, 1).requires_grad


class _Reordered(nn.Module):
    """Tracing makes its index, which is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)[:, [1, 0, 3, 2, 5, 4]])


def test_first_call_under_inference_mode() -> None:
    """Constants that the first call makes under inference_mode must serve calls with gradients."""
    plain = _Reordered()
    model = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(5, 6)
    for run in (plain, model):
        with torch.inference_mode():
            run(x)
        run(x).square().sum().backward()
    assert_grads_close(model, plain)


def test_no_grad_and_inference_mode() -> None:
    plain, ours = pair()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(ours, 1), loss_of(plain, 1))
    with torch.inference_mode():
        torch.testing.assert_close(loss_of(ours, 1), loss_of(plain, 1))
    loss_of(ours, 1).backward()
    loss_of(plain, 1).backward()
    assert_grads_close(ours, plain)


def test_train_and_eval_have_separate_captures() -> None:
    model = small_gpt2(resid_pdrop=0.5).train()
    deepwell.optimize(model, verbose=False)
    noisy = loss_of(model, 1).item()
    assert noisy != loss_of(model, 1).item()
    model.eval()
    assert loss_of(model, 1).item() == loss_of(model, 1).item()
    assert engine_calls(model) == (4, 0)


def test_padded_batches_of_changing_length() -> None:
    case = BY_NAME["llama-padded"]
    plain = case.build().train()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    generator = torch.Generator().manual_seed(5)
    for shape in ((2, 9), (2, 31), (4, 12), (2, 9), (3, 64)):
        assert_same_function(plain, ours, *case.arguments(*shape, generator))
    assert engine_calls(ours) == (5, 0)
    assert "captured again" not in deepwell.summary(ours)


def test_gradients_of_inputs() -> None:
    plain = BY_NAME["mlp"].build().train()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(5, 6, 37)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, value in zip((plain, ours), inputs):
        model(value).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-7)
    assert_grads_close(ours, plain)


def test_non_contiguous_input() -> None:
    plain = BY_NAME["mlp"].build().train()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(6, 37, 5).transpose(1, 2).requires_grad_()
    y = x.detach().clone().requires_grad_()
    ours(x).square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-7)


def test_gradient_through_logits_after_gradient_through_loss() -> None:
    """Outputs that receive gradients may change from step to step; none is lost."""
    plain, ours = pair()
    ids = batch(1)
    for use_logits in (False, True, False, True):
        for model in (plain, ours):
            model.zero_grad()
            out = model(input_ids=ids, labels=ids.clone())
            value = out.logits.square().mean() if use_logits else out.loss
            value.backward()
        assert_grads_close(ours, plain)
    for model in (plain, ours):
        model.zero_grad()
        out = model(input_ids=ids, labels=ids.clone())
        (out.loss + out.logits.square().mean()).backward()
    assert_grads_close(ours, plain)


def test_parameter_changed_between_forward_and_backward_is_an_error() -> None:
    _, ours = pair()
    loss = loss_of(ours, 1)
    with torch.no_grad():
        ours.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_optimizer_steps_take_effect() -> None:
    """The engine reads parameters where they are: after a step the outputs change."""
    plain, ours = pair()
    for model in (plain, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            optimizer.step()
    torch.testing.assert_close(loss_of(ours, 9), loss_of(plain, 9), rtol=1e-5, atol=1e-6)


def test_parameter_hooks_run() -> None:
    plain, ours = pair()
    for model in (plain, ours):
        model.lm_head.weight.register_hook(lambda grad: grad * 2)
        loss_of(model, 1).backward()
    assert_grads_close(ours, plain)


def test_output_may_be_changed_in_place_where_pytorch_allows_it() -> None:
    plain, ours = pair()
    ids = batch(3)
    for model in (plain, ours):
        logits = model(input_ids=ids).logits
        logits.mul_(0.5)
        logits.square().mean().backward()
    assert_grads_close(ours, plain)


def test_number_of_threads_may_change_between_forward_and_backward() -> None:
    plain, ours = pair()
    threads = torch.get_num_threads()
    try:
        for before, after in ((1, 3), (3, 1)):
            torch.set_num_threads(before)
            losses = [loss_of(model, 1) for model in (plain, ours)]
            torch.set_num_threads(after)
            for model, loss in zip((plain, ours), losses):
                model.zero_grad()
                loss.backward()
            assert_grads_close(ours, plain)
    finally:
        torch.set_num_threads(threads)


def test_threads_share_a_model() -> None:
    import threading

    plain, ours = pair()
    expected = [loss_of(plain, seed).item() for seed in range(6)]
    loss_of(ours, 0)
    found: dict[int, float] = {}

    def work(seed: int) -> None:
        found[seed] = loss_of(ours, seed).item()

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for seed, value in enumerate(expected):
        assert abs(found[seed] - value) < 1e-5
    _, grads = gradients(ours, (), {"input_ids": batch(1), "labels": batch(1)})
    assert all(grad is not None for grad in grads.values())


class Stopped(nn.Module):
    """Writes through which PyTorch propagates no gradient."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, y = self.linear(x), x.new_zeros(x.shape)
        return self.function(made, y) * self.other(x)


def _stop_all(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.copy_(made)
    return y + made


def _stop_slice(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    part = y[:, :4]
    with torch.no_grad():
        part.copy_(made[:, 2:])
    return y + made


def _stop_written(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = made * 2
    with torch.no_grad():
        made.mul_(3)
    return made


def _stop_column(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y[:, 0] = made[:, 0]
    return y + made


def _stop_transposed(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.t()[0] = made[:, 0]
    return y + made


def _stop_detached(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y[:, 0] = made[:, 0].detach() * made[:, 1]
    return y + made


@pytest.mark.parametrize(
    "function, captured",
    [
        (_stop_all, True),
        (_stop_slice, True),
        (_stop_written, False),
        (_stop_column, True),
        (_stop_transposed, False),
        (_stop_detached, True),
    ],
)
def test_writes_without_gradient(function, captured: bool) -> None:
    torch.manual_seed(0)
    plain = Stopped(function)
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    x = torch.randn(5, 6)
    for module in (plain, ours):
        module(x).sin().sum().backward()
    assert_grads_close(ours, plain)
    assert engine_calls(ours)[0] == (1 if captured else 0)


def test_an_argument_that_a_transform_left_behind_goes_to_pytorch() -> None:
    """torch.func's tensors have no memory of their own, also after their transform has ended."""
    model = deepwell.optimize(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), verbose=False)
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(torch.randn(3))
    torch.testing.assert_close(model(kept[0]), nn.Sequential.forward(model, kept[0]))
    assert engine_calls(model) == (0, 1) and "torch.func" in deepwell.summary(model)


@pytest.mark.parametrize("fast", [True, False], ids=["torch's check", "own check"])
def test_new_data_of_another_kind_is_noticed(fast, monkeypatch) -> None:
    """Parameters may get new data through ``.data``: of the same kind, with other strides, or of another dtype."""
    if not fast:
        monkeypatch.setattr(guards, "_likeness_checks", lambda tensors: [])
    model = deepwell.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), verbose=False)
    weight, x = model[0].weight, torch.randn(4, 8)

    def check(x) -> None:
        torch.testing.assert_close(model(x), nn.Sequential.forward(model, x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        with torch.no_grad():
            torch.testing.assert_close(model(x), nn.Sequential.forward(model, x))

    for data in (torch.randn(8, 8), torch.randn(8, 8).t(), torch.randn(16, 16)[::2, ::2]):
        weight.data = data
        check(x)
        model(x).sum().backward()
    assert engine_calls(model)[1] == 0
    model.double()
    assert model(x.double()).dtype == torch.float64


def test_tensors_that_plans_cannot_read() -> None:
    whole = torch.zeros(64, 64, dtype=torch.uint8)
    tensors = [whole, whole.t(), whole[1:], whole[0, 3:], torch.tensor(1.0), whole[0, 1:2]]
    assert _deepwell.unreadable(tensors, 1) == [1]
    assert _deepwell.unreadable(tensors, 16) == [1, 3, 5]
    assert _deepwell.unreadable([], 16) == []
    for wrong in ([None], [1], (whole,)):
        with pytest.raises((AttributeError, TypeError)):
            _deepwell.unreadable(wrong, 1)
    with pytest.raises(ValueError):
        _deepwell.unreadable(tensors, 0)


def test_a_tensor_that_only_pytorch_can_describe_is_read() -> None:
    """Layouts with axes of size 1, no elements, subclasses and zero-dim tensors agree with PyTorch's own answer."""
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = [
        base[:1, :, :1].expand(1, 3, 1),
        base.permute(2, 0, 1),
        base[:, :0],
        base[0, 0, 0],
        base[:, :1],
        nn.Parameter(base[1]),
        nn.Buffer(base[..., ::2]),
        base.bfloat16().as_strided((2, 2), (2, 1), 1),
    ]
    expected = [i for i, tensor in enumerate(tensors) if not tensor.is_contiguous()]
    assert _deepwell.unreadable(tensors, 1) == expected
    expected = [i for i, t in enumerate(tensors) if not t.is_contiguous() or t.data_ptr() % 64 != 0]
    assert _deepwell.unreadable(tensors, 64) == expected


def test_positions_that_require_a_gradient() -> None:
    tensors = [torch.zeros(2), nn.Parameter(torch.zeros(2)), None, torch.zeros(1).requires_grad_()]
    found = _deepwell.differentiable(tensors, ())
    assert found == (1, 3)
    assert _deepwell.differentiable(tensors, found) is found
    for last in ((1,), (1, 2), (1, 3, 4), (0, 3)):
        assert _deepwell.differentiable(tensors, last) == (1, 3)
    tensors[1].requires_grad_(False)
    assert _deepwell.differentiable(tensors, found) == (3,)
    assert _deepwell.differentiable([], found) == ()
    for wrong in ((tensors, None), (tuple(tensors), ()), ([1], ())):
        with pytest.raises((AttributeError, TypeError)):
            _deepwell.differentiable(*wrong)


def test_versions_of_many_tensors() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    tensors[1].add_(1)
    versions = _deepwell.versions(tensors)
    assert memoryview(versions).cast("q").tolist() == [0, 1, 0]
    assert _deepwell.same_versions(tensors, versions, range(3))
    tensors[2].zero_()
    assert _deepwell.same_versions(tensors, versions, [0, 1])
    assert not _deepwell.same_versions(tensors, versions, (2,))
    for wrong in ([3], [-1]):
        with pytest.raises(IndexError):
            _deepwell.same_versions(tensors, versions, wrong)
    with pytest.raises(AttributeError):
        _deepwell.versions([None])
    with pytest.raises(AttributeError):
        _deepwell.same_versions([None, *tensors], versions, [0])


def test_gradients_are_allocated_by_the_extension_as_by_pytorch() -> None:
    shared = [(3, (5, 7), torch.bfloat16), (0, (), torch.float32), (4, (2, 1, 3), torch.bfloat16)]
    shared.append((2, (9,), torch.float32))
    allocations = _Allocations(shared, [(5, (64, 3), torch.float64)], Target())
    assert allocations._prepared is not None
    made: list = [None] * 6
    allocations.make(made)
    allocations._prepared = None
    expected: list = [None] * 6
    allocations.make(expected)
    assert made[1] is None and expected[1] is None
    for grad, other in zip(made, expected):
        if grad is None:
            continue
        assert type(grad) is torch.Tensor and grad.device == other.device
        assert grad.dtype == other.dtype and grad.shape == other.shape
        assert grad.stride() == other.stride() and grad._version == 0 and not grad._is_view()
        assert grad.storage_offset() == other.storage_offset()
        assert grad.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    assert made[3].untyped_storage().data_ptr() == made[4].untyped_storage().data_ptr()
    assert made[0].untyped_storage().data_ptr() == made[2].untyped_storage().data_ptr()


def test_no_memory_for_gradients_is_pytorchs_own_error() -> None:
    allocations = _Allocations([], [(0, (1 << 50,), torch.float64)], Target())
    with pytest.raises(RuntimeError, match="memory"):
        allocations.make([None])


def test_a_watch_compares_objects_not_values() -> None:
    """A watched dict or list holds the same objects in the same order, or it has changed; `...` matches any value."""
    given, table, items = {"a": 1}, {"x": 2.5, "y": (3,)}, [4.5, "five"]
    watched = [
        None, ("a", given["a"]),
        table, ("x", table["x"], "y", ...),
        items, tuple(items),
        {}, (),
    ]  # fmt: skip
    watch = _deepwell.watch(watched)
    assert _deepwell.first_change(watch, given) == -1
    assert _deepwell.first_change(watch, {"a": 2}) == 0 and _deepwell.first_change(watch, {}) == 0
    table["y"] = (4,)
    assert _deepwell.first_change(watch, given) == -1
    was = table["x"]
    table["x"] = float("2.5")
    assert _deepwell.first_change(watch, given) == 1
    table["x"] = was
    items.append(6)
    assert _deepwell.first_change(watch, given) == 2
    items.pop()
    items[1] = "six"
    assert _deepwell.first_change(watch, given) == 2
    items[1] = watched[5][1]
    watched[6]["new"] = 1
    assert _deepwell.first_change(watch, given) == 3
    for wrong in ((), [{}], [{}, 1], [1, ()]):
        with pytest.raises(TypeError):
            _deepwell.watch(wrong)
    for arguments in ((watch,), (watch, 1), (None, {})):
        with pytest.raises((TypeError, ValueError)):
            _deepwell.first_change(*arguments)
