"""Parameters that are replaced, converted, tied, flattened, adapted or parametrized after
optimize."""

import deepwell
import pytest
import torch
from torch import nn
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)
from users import Net, close, pair, rows, same, train_step, uneven
from zoo import small_gpt2


def captures(model: nn.Module) -> int:
    return model.forward.session.report._units[""].captures


def then(change):
    """Trains, changes the model, trains again."""

    def use(model):
        first = train_step(model)
        model.zero_grad()
        change(model)
        return first, train_step(model, 2)

    return use


@pytest.mark.support("Parameters", "p.data = ... and in-place changes under no_grad", "engine")
def test_data_replaced(support) -> None:
    def change(model):
        model.first.weight.data = model.first.weight.data * 2
        model.second.weight.data = model.second.weight.data.t().contiguous().t()
        with torch.no_grad():
            model.second.bias.add_(1.0)
            model.norm.weight.set_(model.norm.weight * 3)

    plain, ours = pair()
    same(plain, ours, then(change))
    support.check(ours)
    assert captures(ours) == 1


@pytest.mark.support("Parameters", "module.weight = nn.Parameter(...)", "engine")
def test_parameter_replaced(support) -> None:
    plain, ours = pair()
    same(plain, ours, then(lambda m: setattr(m.first, "weight", nn.Parameter(m.first.weight * 2))))
    support.check(ours)
    assert captures(ours) == 1


@pytest.mark.support("Parameters", "a layer of another size in the place of one", "engine")
def test_resized(support) -> None:
    def change(model):
        torch.manual_seed(3)
        model.first, model.second = nn.Linear(8, 24), nn.Linear(24, 8)

    plain, ours = pair()
    same(plain, ours, then(change))
    support.check(ours)


@pytest.mark.support("Parameters", "vector_to_parameters, parameters_to_vector", "engine")
def test_vectors(support) -> None:
    def change(model):
        vector = parameters_to_vector(model.parameters()).detach()
        padded = torch.cat([torch.zeros(3), vector * 1.5])[3:]  # at an odd address
        vector_to_parameters(padded, model.parameters())

    plain, ours = pair()
    same(plain, ours, then(change))
    support.check(ours)
    assert captures(ours) == 1


@pytest.mark.support(
    "Parameters",
    "parameters that are views of one flat parameter (as FSDP1 has them)",
    "PyTorch",
    "requires gradients and is not one of its parameters",
)
def test_flat_parameter(support) -> None:
    results = []
    plain, ours = pair()
    for model in (plain, ours):
        named = [(name, p.shape) for name, p in model.named_parameters()]
        flat = nn.Parameter(parameters_to_vector(model.parameters()).detach())
        for _ in range(2):
            at = 0
            for name, shape in named:
                owner, _, key = name.rpartition(".")
                module = model.get_submodule(owner)
                module._parameters.pop(key, None)
                module.__dict__[key] = flat[at : at + shape.numel()].view(shape)
                at += shape.numel()
            flat.grad = None
            loss = uneven(model(rows()))
            loss.backward()
            with torch.no_grad():
                flat.sub_(flat.grad, alpha=0.1)
        results.append((loss.detach(), flat.grad))
    for a, b in zip(results[1], results[0]):
        close(a, b)
    support.check(ours)


@pytest.mark.support("Parameters", "torch.func.functional_call, stateless calls", "engine")
def test_functional_call(support) -> None:
    plain, ours = pair()
    other = {n: (p.detach() * 1.5).requires_grad_() for n, p in plain.named_parameters()}

    def use(model):
        model(rows())
        loss = uneven(torch.func.functional_call(model, other, (rows(),)))
        return (loss.detach(), *torch.autograd.grad(loss, list(other.values())), model(rows(2)))

    same(plain, ours, use)
    support.check(ours)
    assert captures(ours) == 1


@pytest.mark.support("Parameters", "weights tied and untied after optimize", "engine")
def test_tying(support) -> None:
    def build():
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def use(model):
        results = [train_step(model)]
        model[2].weight = model[0].weight
        model.zero_grad()
        results.append(train_step(model))
        results.append(model[0].weight.grad.clone())
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())
        return (*results, train_step(model))

    plain, ours = pair(build)
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Parameters", "requires_grad_(False) for parts, and back", "engine")
def test_freezing(support) -> None:
    def use(model):
        model.first.requires_grad_(False)
        frozen = train_step(model)
        assert model.first.weight.grad is None
        model.requires_grad_(False)
        assert not model(rows()).requires_grad
        model.requires_grad_(True)
        return frozen, train_step(model)

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Parameters", "parametrizations.weight_norm, before and after", "engine")
def test_weight_norm(support) -> None:
    def build():
        model = Net()
        parametrizations.weight_norm(model.first)
        return model

    # Copy.deepcopy would share the class, which removing the parametrization changes.
    plain, ours = build(), build()
    ours.load_state_dict(plain.state_dict())
    deepwell.optimize(ours, verbose=False)
    same(plain, ours, then(lambda m: parametrizations.weight_norm(m.second)))
    same(plain, ours, then(lambda m: parametrize.remove_parametrizations(m.first, "weight")))
    support.check(ours)


@pytest.mark.support(
    "Parameters", "parametrize.cached()", "engine and PyTorch", "parametrize.cached()"
)
def test_cached_parametrization(support) -> None:
    def build():
        model = Net()
        parametrizations.weight_norm(model.first)
        return model

    def use(model):
        with parametrize.cached():
            inside = uneven(model(rows()))
        inside.backward()
        with torch.no_grad():
            model.first.parametrizations.weight.original0.mul_(2)
        return inside.detach(), train_step(model)

    plain, ours = pair(build)
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Parameters", "parametrizations.spectral_norm", "PyTorch", "in place")
def test_spectral_norm(support) -> None:
    def build():
        model = Net()
        parametrizations.spectral_norm(model.first)
        return model

    plain, ours = pair(build)
    same(plain, ours, lambda m: [train_step(m), train_step(m)])
    support.check(ours)


@pytest.mark.support("Parameters", "parametrizations.orthogonal", "PyTorch", "cannot be captured")
def test_orthogonal(support) -> None:
    def build():
        model = Net()
        parametrizations.orthogonal(model.first)
        return model

    plain, ours = pair(build)
    same(plain, ours, lambda m: [train_step(m), train_step(m)])
    support.check(ours)


@pytest.mark.support(
    "Parameters", "weights made by hooks (prune, nn.utils.weight_norm)", "PyTorch", "hooks"
)
def test_weights_made_by_hooks(support) -> None:
    def build():
        model = Net()
        prune.random_unstructured(model.first, "weight", 0.5)
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model.second)
        return model

    plain, ours = build(), build()  # PyTorch cannot copy a weight that a hook has made
    ours.load_state_dict(plain.state_dict())
    deepwell.optimize(ours, verbose=False)
    same(plain, ours, lambda m: train_step(m))
    support.check(ours)


@pytest.mark.support(
    "Parameters",
    "sparse gradients, max_norm, scale_grad_by_freq",
    "PyTorch",
    "the module runs in PyTorch",
)
@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq", "max_norm"])
def test_embedding_options(option, support) -> None:
    def build():
        value = 0.5 if option == "max_norm" else True
        return nn.Sequential(nn.Embedding(10, 8, **{option: value}), nn.Linear(8, 8))

    plain, ours = pair(build)
    ids = torch.tensor([[1, 2, 2], [1, 3, 5]])
    for model in (plain, ours):
        model(ids).square().sum().backward()
    assert ours[0].weight.grad.is_sparse == plain[0].weight.grad.is_sparse
    close(ours[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense())
    close(ours[0].weight, plain[0].weight)
    support.check(ours)


def lora(model: nn.Module):
    import peft

    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True
    )
    return peft.get_peft_model(model, config)


def language_loss(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 199, (2, 9), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


@pytest.mark.support("Parameters", "LoRA (PEFT) added after optimize, disabled, merged", "engine")
def test_lora_after(support) -> None:
    plain, ours = pair(small_gpt2)
    same(plain, ours, language_loss)
    adapted = [lora(plain), lora(ours)]
    for model in adapted:
        model.zero_grad()
    same(*adapted, language_loss)
    assert all("lora" in n for n, p in adapted[1].named_parameters() if p.grad is not None)

    def disabled(model):
        with model.disable_adapter(), torch.no_grad():
            return model(input_ids=torch.arange(6)[None]).logits

    same(*adapted, disabled)
    same(*adapted, language_loss)
    merged = [model.merge_and_unload() for model in adapted]
    assert merged[1] is ours
    for model in merged:
        model.requires_grad_(True)
        model.zero_grad()
    same(*merged, language_loss)
    support.check(ours)
    assert captures(ours) <= 4


@pytest.mark.slow_emulated
@pytest.mark.support("Parameters", "LoRA (PEFT) added before optimize", "engine")
def test_lora_before(support) -> None:
    plain, ours = pair(lambda: lora(small_gpt2()))
    same(plain, ours, language_loss)
    support.check(ours)
