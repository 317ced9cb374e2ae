"""Everything besides its arguments and parameters that a forward may depend on or change."""

import functools
import inspect
import random
import types

import deepwell
import numpy
import pytest
import torch
from torch import nn
from users import Net, close, optimized, pair, rows, same, train_step, uneven

FACTOR = 1.0


class Scaled(Net):
    """Multiplies the output by a number that ``factor`` finds."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.table = [1.0, 2.0], {"factor": 1.0}
        self.tensor, self.settings = torch.tensor(1.0), types.SimpleNamespace(factor=1.0)
        self.tensors = [torch.tensor(1.0)]
        self.activation = torch.sin

    def factor(self):
        return (
            self.numbers[0] * self.table["factor"] * self.settings.factor * self.rate * FACTOR
        ) * (self.tensor * self.tensors[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(super().forward(x)) * self.factor()


def change_list(model):
    model.numbers[0] = 3.0


def change_dict(model):
    model.table["factor"] = 3.0


def change_object(model):
    model.settings.factor = 3.0


def replace_tensor(model):
    model.tensor = torch.tensor(3.0)


def change_tensor(model):
    model.tensor.fill_(3.0)


def change_tensor_in_list(model):
    model.tensors[0].fill_(3.0)


def change_function(model):
    model.activation = torch.cos


def change_class(model):
    type(model).rate = 3.0


def change_global(model):
    global FACTOR
    FACTOR = 3.0


@pytest.mark.support(
    "Modules", "attributes, lists, settings, class attributes and globals that change", "engine"
)
@pytest.mark.parametrize(
    "change",
    [
        change_list, change_dict, change_object, replace_tensor, change_tensor, change_tensor_in_list,
        change_function, change_class, change_global,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_changes_are_seen(change, support, monkeypatch) -> None:
    monkeypatch.setattr(Scaled, "rate", 1.0)
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    plain, ours = pair(Scaled)
    before = ours(rows())
    for model in (plain, ours):
        change(model)
    close(ours(rows()), plain(rows()))
    assert not torch.allclose(before, plain(rows()), rtol=0.01)
    support.check(ours)


@pytest.mark.support("Modules", "switching a setting to and fro", "engine")
def test_switching(support) -> None:
    plain, ours = pair(Scaled)
    for _ in range(3):
        for factor in (1.0, 2.0):
            for model in (plain, ours):
                model.settings.factor = factor
            close(ours(rows()), plain(rows()))
    assert ours.forward.session.report._units[""].captures == 2
    support.check(ours)


@pytest.mark.support("Modules", "train() and eval() of parts", "engine")
def test_modes_of_parts(support) -> None:
    def build():
        return nn.Sequential(Net(), nn.Dropout(0.5), Net())

    plain, ours = pair(build)
    for model in (plain, ours):
        model[1].eval()
    same(plain, ours, train_step)
    ours[1].train()
    assert not torch.equal(ours(rows()), ours(rows()))
    ours.eval(), plain.eval()
    same(plain, ours, train_step)
    support.check(ours)


@pytest.mark.support(
    "Modules",
    "a number among the arguments that is new at every call",
    "engine and PyTorch",
    "differ only in a number",
)
def test_numbers(support) -> None:
    class Steps(Net):
        def forward(self, x, step):
            return super().forward(x) * step

    plain, ours = pair(Steps)
    for step in range(7):
        close(ours(rows(), step), plain(rows(), step))
    support.check(ours)


class KeepsOutput(Net):
    def forward(self, x):
        self.kept = self.hidden(x)
        return self.second(self.kept)


class Counts(Net):
    count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x) * self.count


class Logs(Net):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        self.kept.append(self.hidden(x))
        return self.second(self.kept[-1])


@pytest.mark.support(
    "Modules",
    "a forward that sets attributes, counts or collects",
    "PyTorch",
    "changes its attribute",
)
@pytest.mark.parametrize("build", [KeepsOutput, Counts, Logs])
def test_side_effects(build, support) -> None:
    def use(model):
        results = [train_step(model, seed) for seed in range(3)]
        kept = getattr(model, "kept", [])
        return *results, *(kept if isinstance(kept, list) else [kept]), model.__dict__.get("count")

    plain, ours = pair(build)
    same(plain, ours, use)
    support.check(ours)


class SharesPlan(Net):
    """Two modules hold one object, and only a trace at a fixed size succeeds, which is tried last."""

    def __init__(self) -> None:
        super().__init__()
        step = ("rows", ["hidden"])
        self.plan, self.first.plan = {"first": step}, {"first": step}

    def forward(self, x):
        if isinstance(x.shape[0], torch.SymInt):
            raise TypeError("a size without a number")
        return super().forward(x)


@pytest.mark.support("Modules", "lists and tuples that several modules share", "engine")
def test_shared_attributes(support) -> None:
    """torch.export leaves equal copies in place of shared attributes, which is not an effect of the forward."""
    plain, ours = pair(SharesPlan)
    same(plain, ours, train_step)
    support.check(ours)


class DrawsPython(Net):
    def forward(self, x):
        return super().forward(x) * (2.0 if random.random() < 0.5 else 1.0)


class DrawsNumPy(Net):
    def forward(self, x):
        return super().forward(x) * float(numpy.random.rand())


@pytest.mark.support(
    "Modules",
    "random numbers of Python or NumPy in forward (LayerDrop)",
    "PyTorch",
    "random generator",
)
@pytest.mark.parametrize("build", [DrawsPython, DrawsNumPy])
def test_other_random_numbers(build, support) -> None:
    def use(model):
        random.seed(3)
        numpy.random.seed(3)
        return [train_step(model) for _ in range(6)]

    plain, ours = pair(build)
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support(
    "Modules", "buffers that change in forward (BatchNorm in training)", "PyTorch", "in place"
)
def test_batch_norm(support) -> None:
    plain, ours = pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    same(plain, ours, lambda m: [train_step(m), train_step(m, 2)])
    close(ours[1].running_mean, plain[1].running_mean)
    support.check(ours)


@pytest.mark.support(
    "Modules", "modules in a plain list", "PyTorch", "hold modules in a ModuleList"
)
def test_unregistered_modules(support) -> None:
    class Hidden(Net):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(8, 8)]

        def forward(self, x):
            return super().forward(torch.tanh(self.layers[0](x)))

    plain, ours = pair(Hidden)
    same(plain, ours, train_step)
    close(ours.layers[0].weight.grad, plain.layers[0].weight.grad)
    support.check(ours)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class ReversesGradients(Net):
    def forward(self, x):
        return self.second(Reversed.apply(self.hidden(x)))


class HooksTensors(Net):
    def forward(self, x):
        hidden = self.hidden(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 3)
        return self.second(hidden)


@pytest.mark.support(
    "Modules",
    "torch.autograd.Function or tensor hooks inside of forward",
    "PyTorch",
    "in its forward",
)
@pytest.mark.parametrize("build", [ReversesGradients, HooksTensors])
def test_backward_of_their_own(build, support) -> None:
    plain, ours = pair(build)
    same(plain, ours, train_step)
    support.check(ours)


class PartlyFrozen(Net):
    def forward(self, x):
        with torch.no_grad():
            hidden = self.hidden(x)
        return self.second(hidden) + self.norm(self.hidden(x).detach()[:, :8])


@pytest.mark.support("Modules", "no_grad and detach inside of forward", "engine")
def test_no_grad_inside(support) -> None:
    plain, ours = pair(PartlyFrozen)
    same(plain, ours, train_step)
    assert ours.first.weight.grad is None
    support.check(ours)


@pytest.mark.support(
    "Modules", "a second derivative inside of forward (forces)", "PyTorch", "in its forward"
)
def test_gradient_inside(support) -> None:
    class Force(Net):
        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(uneven(super().forward(x)), x, create_graph=True)[0]

    plain, ours = pair(Force)
    same(plain, ours, train_step)
    support.check(ours)


@pytest.mark.support("Modules", "subclasses, model.forward(), partial, inspect.signature", "engine")
def test_optimized_module_inside_a_forward(support) -> None:
    class Derived(Net):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            """Scales the result."""
            return super().forward(x) * scale

    plain, ours = pair(Derived)
    assert inspect.signature(ours.forward) == inspect.signature(plain.forward)
    assert ours.forward.__doc__ == "Scales the result." and ours.forward.__name__ == "forward"
    assert ours.forward.__self__ is ours and ours.forward.__code__ is Derived.forward.__code__
    assert inspect.getsource(ours.forward) == inspect.getsource(Derived.forward)
    close(ours.forward(rows(), scale=2.0), plain.forward(rows(), scale=2.0))
    close(functools.partial(ours.forward, scale=2.0)(rows()), plain(rows(), scale=2.0))
    close(nn.DataParallel(ours)(rows()), plain(rows()))
    close(ours.forward.__func__(ours, rows()), plain(rows()))
    support.check(ours)


@pytest.mark.support("Modules", "several models, one inside of the other", "engine")
def test_nested(support) -> None:
    plain, ours = pair(lambda: nn.Sequential(Net(), nn.Tanh(), Net()))
    same(plain, ours, train_step)
    deepwell.optimize(ours[0], verbose=False)
    same(plain, ours, train_step)
    close(ours[0](rows()), plain[0](rows()))
    deepwell.restore(ours)
    assert not any("forward" in module.__dict__ for module in ours.modules())
    deepwell.optimize(ours, verbose=False)
    same(plain, ours, train_step)
    support.check(ours)


@pytest.mark.support("Modules", "errors in forward and in hooks, KeyboardInterrupt", "engine")
def test_errors_leave_no_trace(support) -> None:
    plain, ours = pair()
    stop = []

    def interrupt(*_):
        if stop:
            raise stop.pop()

    handles = [
        ours.register_forward_pre_hook(interrupt),
        ours.register_forward_hook(interrupt),
        ours.first.weight.register_hook(interrupt),
    ]
    for error in (KeyboardInterrupt, ValueError("stop")):
        for when in ("before", "backward"):
            with pytest.raises((KeyboardInterrupt, ValueError)):
                if when == "before":
                    stop.append(error)
                loss = uneven(ours(rows()))
                stop.append(error)
                loss.backward()
            stop.clear()
    for handle in handles:
        handle.remove()
    ours.zero_grad()
    same(plain, ours, train_step)
    support.check(ours)


@pytest.mark.support("Modules", "a first call with wrong arguments", "engine")
def test_wrong_first_call(support) -> None:
    plain, ours = pair()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours(torch.randn(4, 9))
    same(plain, ours, train_step)
    assert "1 calls by the engine" in deepwell.summary(ours)
    support.check(ours)


def test_an_error_while_capturing_leaves_no_trace() -> None:
    class Fails(Net):
        fail = True

        def forward(self, x):
            if self.fail:
                raise KeyboardInterrupt
            return super().forward(x)

    ours = optimized(Fails())
    hook = ours.register_forward_hook(lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        ours(rows())
    assert list(ours._forward_hooks.values()) and ours.first.weight.requires_grad
    hook.remove()
    ours.fail = False
    plain = Fails()
    plain.fail = False
    plain.load_state_dict(ours.state_dict())
    same(plain, ours, train_step)


@pytest.mark.support("Modules", "a function wrapped around the optimized forward", "engine")
def test_wrapped_forward(support) -> None:
    def wrap(model):
        inner = model.forward

        def forward(x):
            return 2 * inner(x + 1)

        model.forward = forward

    plain, ours = pair()
    wrap(plain)
    wrap(ours)
    same(plain, ours, train_step)
    support.check(ours)
