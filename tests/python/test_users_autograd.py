"""Users' autograd features around an optimized model, and hooks."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from users import Net, pair, rows, same, train_step, uneven
from zoo import small_gpt2


@pytest.mark.support("Autograd", "accumulation over microbatches, clipping, AdamW", "engine")
def test_accumulation(support) -> None:
    def use(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(3):
                (uneven(model(rows(3 * step + micro))) / 3).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return norm, model(rows(9))

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Autograd", "torch.autograd.grad and backward(inputs=...) for some", "engine")
def test_some_gradients(support) -> None:
    def use(model):
        x = rows().requires_grad_()
        loss = uneven(model(x))
        found = torch.autograd.grad(loss, [model.first.weight, x], retain_graph=True)
        loss.backward(inputs=[model.second.bias])
        assert model.first.weight.grad is None
        return found

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Autograd", "second derivatives (create_graph: gradient penalty)", "engine")
def test_double_backward(support) -> None:
    def use(model):
        x = rows().requires_grad_()
        (grad,) = torch.autograd.grad(uneven(model(x)), x, create_graph=True)
        penalty = uneven(grad)
        penalty.backward()
        return penalty.detach(), x.grad

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support(
    "Autograd",
    "second derivatives through dropout",
    "refused",
    "random numbers that PyTorch cannot",
)
def test_double_backward_through_dropout(support) -> None:
    _, ours = pair(lambda: nn.Sequential(Net(), nn.Dropout(0.5), Net()))
    x = rows().requires_grad_()
    with support.refused(RuntimeError):
        torch.autograd.grad(uneven(ours(x)), x, create_graph=True)


@pytest.mark.support("Autograd", "jacobian and hessian, vectorized or not", "engine")
def test_jacobian(support) -> None:
    functional = torch.autograd.functional

    def use(model):
        return (
            functional.jacobian(model, rows(), vectorize=True),
            functional.jacobian(model, rows()),
            functional.hessian(lambda x: uneven(model(x)), rows(count=2)),
        )

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Autograd", "torch.func.grad, vmap, jvp", "PyTorch", "torch.func")
def test_func(support) -> None:
    def use(model):
        ones = torch.ones(4, 8)
        return (
            torch.func.grad(lambda x: uneven(model(x)))(rows()),
            torch.func.vmap(model)(rows()),
            torch.func.jvp(model, (rows(),), (ones,))[1],
        )

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Autograd", "forward-mode differentiation", "PyTorch", "forward-mode")
def test_forward_mode(support) -> None:
    from torch.autograd import forward_ad

    def use(model):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(rows(), torch.ones(4, 8))
            with torch.no_grad():
                quiet = forward_ad.unpack_dual(model(dual)).tangent
            return forward_ad.unpack_dual(model(dual)).tangent, quiet

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Autograd", "no_grad, inference_mode and training in turn", "engine")
def test_modes(support) -> None:
    def use(model):
        results = [train_step(model)]
        with torch.inference_mode():
            results.append(uneven(model(rows())))
        with torch.no_grad():
            results.append(model(rows()))
        return *results, train_step(model)

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support(
    "Autograd",
    "tensors made under inference_mode, negated lazily, or empty",
    "PyTorch",
    "an argument",
)
def test_unusual_arguments(support) -> None:
    with torch.inference_mode():
        inferred = rows()

    def use(model):
        return model(torch._neg_view(rows())), model(rows(count=0))

    plain, ours = pair()
    same(plain, ours, use)
    for model in (plain, ours):
        with pytest.raises(RuntimeError, match="[Ii]nference"):
            uneven(model(inferred)).backward()
    support.check(ours)


class Several(Net):
    def forward(self, x):
        hidden = self.hidden(x)
        return self.second(hidden), x * 2, torch.arange(8.0) + x.shape[0], hidden > 0


@pytest.mark.support(
    "Autograd", "outputs that require no gradient, outputs changed in place", "engine"
)
def test_outputs(support) -> None:
    def use(model):
        y, double, count, positive = model(rows())
        y.mul_(2.0)
        uneven(y).backward()
        return [y.detach(), double, count, positive, y.requires_grad, double.requires_grad]

    plain, ours = pair(Several)
    same(plain, ours, use)
    assert ours(rows())[1].numpy() is not None
    support.check(ours)


@pytest.mark.support(
    "Autograd", "one tensor given twice, expanded and transposed arguments", "engine"
)
def test_aliased_arguments(support) -> None:
    class Two(Net):
        def forward(self, x, y):
            return super().forward(x) + 2 * super().forward(y)

    def use(model):
        x = rows().requires_grad_()
        row = rows(2, 1).requires_grad_()
        column = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        uneven(model(x, x)).backward()
        uneven(model(row.expand(4, 8), column.t())).backward()
        return x.grad, row.grad, column.grad

    plain, ours = pair(Two)
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.slow_emulated
@pytest.mark.support("Autograd", "inputs_embeds that require gradients", "engine")
def test_inputs_embeds(support) -> None:
    def use(model):
        x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
        ids = torch.arange(14).view(2, 7)
        model(inputs_embeds=x, labels=ids).loss.backward()
        return x.grad

    plain, ours = pair(lambda: small_gpt2())
    same(plain, ours, use)
    support.check(ours)


def hooked(register):
    """Trains with hooks and also returns the values that they saw."""

    def use(model):
        seen = []
        handles = register(model, seen)
        results = [train_step(model)]
        for handle in handles:
            handle.remove()
        return *results, train_step(model), *seen

    return use


@pytest.mark.support(
    "Hooks", "on the model: forward, pre-forward, full backward, with kwargs", "engine"
)
def test_root_hooks(support) -> None:
    def register(model, seen):
        return [
            model.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
            model.register_forward_pre_hook(lambda m, a, k: seen.append(len(k)), with_kwargs=True),
            model.register_forward_hook(lambda m, args, out: out + 1),
            model.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,)),
            model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone())),
        ]

    plain, ours = pair()
    same(plain, ours, hooked(register))
    support.check(ours)


@pytest.mark.support(
    "Hooks", "on modules inside", "engine and PyTorch", "hooks are registered on 'first'"
)
def test_inner_hooks(support) -> None:
    def register(model, seen):
        return [
            model.first.register_forward_hook(lambda m, args, out: out * 2),
            model.second.register_full_backward_hook(lambda m, gi, go: seen.append(gi[0].clone())),
        ]

    plain, ours = pair()
    same(plain, ours, hooked(register))
    support.check(ours)


@pytest.mark.support(
    "Hooks", "register_backward_hook (the old kind) on the model", "PyTorch", "the old kind"
)
def test_old_backward_hook(support) -> None:
    def use(model):
        seen = []
        model.register_backward_hook(lambda m, gi, go: seen.append(len(gi)))
        return train_step(model), *seen

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support(
    "Hooks", "on all modules (register_module_forward_hook)", "engine and PyTorch", "global hooks"
)
def test_global_hooks(support) -> None:
    from torch.nn.modules.module import register_module_forward_hook

    def register(model, seen):
        return [register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))]

    plain, ours = pair()
    same(plain, ours, hooked(register))
    support.check(ours)


@pytest.mark.support("Hooks", "on parameters, outputs and accumulated gradients", "engine")
def test_tensor_hooks(support) -> None:
    def use(model):
        seen = []
        model.first.weight.register_hook(lambda grad: grad * 2)
        model.second.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.clone())
        )
        y = model(rows())
        y.retain_grad()
        y.register_hook(lambda grad: seen.append(grad.clone()))
        uneven(y).backward()
        return *seen, y.grad

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.slow_emulated
@pytest.mark.support("Hooks", "an optimizer that steps inside of backward", "engine")
def test_optimizer_in_backward(support) -> None:
    """The model is so large that backward has several parts: a parameter is not updated before the
    last part that reads it."""
    wide = 2048

    def build():
        return nn.Sequential(
            *[m for _ in range(4) for m in (nn.Linear(wide, wide, bias=False), nn.Tanh())]
        )

    def use(model):
        def update(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.01)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        x = torch.randn(2, wide, generator=torch.Generator().manual_seed(1))
        uneven(model(x)).backward()

    plain, ours = pair(build)
    same(plain, ours, use)
    (entries,) = ours.forward._states[0].entries.values()
    variants = entries[0].program._variants.values()
    parts = [p.part_count for v in variants if v.wrt for p in v._prepared.values()]
    assert max(parts) > 1
    support.check(ours)


@pytest.mark.support("Checkpointing", "checkpoint(model, use_reentrant=True)", "engine")
def test_checkpoint_around_reentrant(support) -> None:
    def use(model):
        x = rows().requires_grad_()
        uneven(checkpoint(model, x, use_reentrant=True)).backward()
        return x.grad

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support(
    "Checkpointing",
    "checkpoint(model, use_reentrant=False), save_on_cpu, saved_tensors_hooks",
    "PyTorch",
    "hooks on saved tensors",
)
def test_checkpoint_around(support) -> None:
    def use(model):
        x = rows().requires_grad_()
        uneven(checkpoint(model, x, use_reentrant=False)).backward()
        with torch.autograd.graph.save_on_cpu():
            uneven(model(x)).backward()
        return x.grad

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


class Checkpointed(Net):
    reentrant = False

    def forward(self, x):
        return self.second(checkpoint(self.hidden, x, use_reentrant=self.reentrant))


class CheckpointedReentrant(Checkpointed):
    reentrant = True


def with_input_gradient(model):
    x = rows().requires_grad_()
    uneven(model(x)).backward()
    return x.grad


@pytest.mark.support("Checkpointing", "checkpoint(use_reentrant=False) inside of forward", "engine")
def test_checkpoint_inside(support) -> None:
    plain, ours = pair(Checkpointed)
    same(plain, ours, with_input_gradient)
    support.check(ours)


@pytest.mark.support(
    "Checkpointing",
    "checkpoint(use_reentrant=True) inside of forward",
    "PyTorch",
    "backward of its own",
)
def test_checkpoint_inside_reentrant(support) -> None:
    plain, ours = pair(CheckpointedReentrant)
    same(plain, ours, with_input_gradient)
    support.check(ours)


@pytest.mark.slow_emulated
@pytest.mark.support(
    "Checkpointing",
    "gradient_checkpointing_enable() of Hugging Face",
    "engine and PyTorch",
    "hooks are registered",
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_checkpointing(reentrant, support) -> None:
    ids = torch.randint(0, 199, (2, 9), generator=torch.Generator().manual_seed(1))

    def use(model):
        results = [model(input_ids=ids, labels=ids).loss]
        results[0].backward()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        results.append(model(input_ids=ids, labels=ids).loss)
        results[1].backward()
        model.gradient_checkpointing_disable()
        return [loss.detach() for loss in results]

    plain, ours = pair(lambda: small_gpt2().train())
    same(plain, ours, use)
    support.check(ours)
