"""Backward in parts: a model so large that its gradients arrive in several portions. With segments, as on a GPU, parts of
the arena are freed between them."""

import copy

import deepwell
import pytest
import torch
from deepwell.arena import Lease
from deepwell.targets import Gpu, Target
from test_autograd import assert_grads_close, loss_of
from users import engine_calls
from zoo import llama

pytestmark = pytest.mark.usefixtures("always")


@pytest.fixture(params=[1, Gpu.arena_segments], ids=["whole", "segments"])
def segments(request, monkeypatch) -> int:
    monkeypatch.setattr(Target, "arena_segments", request.param)
    return request.param


@pytest.fixture
def models(segments):
    plain = llama(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=4000,
    ).train()  # fmt: skip
    return plain, deepwell.optimize(copy.deepcopy(plain), verbose=False)


def training_plans(model) -> list:
    """Returns the prepared plans of the model's training engines."""
    entries = [e for made in model.forward._states[0].entries.values() for e in made]
    return [
        prepared
        for entry in entries
        for variant in entry.program._variants.values()
        if variant.wrt
        for prepared in variant._prepared.values()
    ]


def test_gradients_agree_and_accumulate(models, segments) -> None:
    for model in models:
        for seed in (1, 2):
            loss_of(model, seed).backward()
    assert_grads_close(models[1], models[0])
    assert engine_calls(models[1]) == (2, 0)
    plans = [prepared.plan for prepared in training_plans(models[1])]
    assert all(plan.part_count >= 4 for plan in plans)
    assert all((len(plan.segments) > 1) == (segments > 1) for plan in plans)


def test_segments_are_freed_while_backward_runs(models, segments, monkeypatch) -> None:
    """Each is freed once, after its last part and before any gradient of the next one exists. Segment 0 goes back to the
    pool for the next step."""
    _, ours = models
    happened = []
    free, release = Lease.free, Lease.release

    def noted_free(lease, which):
        free(lease, which)
        happened.extend(which)

    def noted_release(lease):
        happened.append("released")
        release(lease)

    monkeypatch.setattr(Lease, "free", noted_free)
    monkeypatch.setattr(Lease, "release", noted_release)
    for parameter in ours.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: happened.append("gradient"))
    loss = loss_of(ours, 1)
    happened.clear()
    loss.backward()
    (prepared,) = training_plans(ours)
    count = len(prepared.plan.segments)
    order = [step for step in happened if step not in ("gradient", "released")]
    assert order == [index for part in prepared.freed for index in part]
    assert sorted(order) == list(range(1, count)) and (count > 1) == (segments > 1)
    if count > 1:
        first = happened.index(order[0])
        assert "gradient" in happened[first:] and happened.index("released") > first
    address = ours.forward.session.pool._idle[None][0].address
    loss_of(ours, 2).backward()
    assert [segment.address for segment in ours.forward.session.pool._idle[None]] == [address]


def test_gradients_arrive_in_portions(models) -> None:
    """The head's gradient is in .grad before the first layer's is computed."""
    _, ours = models
    order = []
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    loss_of(ours, 1).backward()
    assert len(order) == len(list(ours.parameters()))
    assert order.index("lm_head.weight") < order.index("model.layers.0.mlp.up_proj.weight")
    assert order.index("model.layers.3.mlp.up_proj.weight") < order.index(
        "model.layers.0.mlp.up_proj.weight"
    )


def test_two_forwards_retain_graph_and_second_backward(models) -> None:
    for model in models:
        first, second = loss_of(model, 1), loss_of(model, 2, (3, 7))
        (first + 2 * second).backward(retain_graph=True)
        (first - second).backward()
        with pytest.raises(RuntimeError, match="second time"):
            first.backward()
    assert_grads_close(models[1], models[0])


def test_gradient_of_some_parameters(models) -> None:
    found = []
    for model in models:
        wanted = [model.lm_head.weight, model.model.layers[1].mlp.up_proj.weight]
        found.append(torch.autograd.grad(loss_of(model, 1), wanted))
        assert all(parameter.grad is None for parameter in model.parameters())
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().item())
    for model in models:  # and the arena of an interrupted backward does not interfere
        loss_of(model, 2).backward()
    assert_grads_close(models[1], models[0])


def test_unexpected_outputs(models) -> None:
    ids = torch.randint(0, 4000, (2, 9), generator=torch.Generator().manual_seed(1))
    for use_logits in (False, True, False):
        for model in models:
            model.zero_grad()
            out = model(input_ids=ids, labels=ids.clone())
            (out.logits.square().mean() if use_logits else out.loss).backward()
        assert_grads_close(models[1], models[0])


def test_frozen_layers(models) -> None:
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" not in name and "embed" not in name)
        loss_of(model, 1).backward()
    assert_grads_close(models[1], models[0])


def test_gradients_are_the_memory_that_the_engine_wrote(models, monkeypatch) -> None:
    """Autograd stores the engine's tensors without a copy. Small ones share memory, without overlap; they are ordinary
    tensors all the same. A large one can be freed alone."""
    written: set[int] = set()
    backward = Target.backward

    def recording(self, plan, part, arena, *tensors):
        written.update(grad.data_ptr() for grad in tensors[-1] if grad is not None)
        backward(self, plan, part, arena, *tensors)

    monkeypatch.setattr(Target, "backward", recording)
    _, ours = models
    loss_of(ours, 1).backward()
    ends = []
    storages = {}
    for parameter in ours.parameters():
        grad = parameter.grad
        assert grad.data_ptr() in written and grad.data_ptr() % 64 == 0
        assert grad.is_contiguous() and not grad._is_view() and grad._version == 0
        ends.append((grad.data_ptr(), grad.data_ptr() + grad.nbytes))
        storages.setdefault(grad.untyped_storage().data_ptr(), []).append(grad)
    ends.sort()
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:]))
    assert any(len(sharing) > 1 for sharing in storages.values())
    for sharing in storages.values():
        assert len(sharing) == 1 or all(grad.nbytes < 1 << 20 for grad in sharing)
    first, second = next(sharing for sharing in storages.values() if len(sharing) > 1)[:2]
    before = second.clone()
    first.zero_()
    assert torch.equal(second, before) and second._version == 0


def test_parts_on_a_gpu_are_larger_unless_a_process_group_sends_them() -> None:
    target = Gpu(0)
    assert Target().part_bytes() == 0 and target.part_bytes() == 64 << 20
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        assert target.part_bytes() == 25 << 20
    finally:
        torch.distributed.destroy_process_group()


def test_the_bytes_of_a_part_are_an_option(models, monkeypatch) -> None:
    """A part completes at least as many bytes of gradients, except for the last one."""
    monkeypatch.setattr(Target, "part_bytes", lambda self: 1 << 40)
    plain, ours = models
    for model in (plain, ours):
        loss_of(model, 1).backward()
    assert_grads_close(ours, plain)
    assert [prepared.plan.part_count for prepared in training_plans(ours)] == [1]


def test_a_leaf_changed_between_two_parts_is_an_error(models) -> None:
    """A hook that runs when the first gradients are complete changes a parameter that later parts read."""
    _, ours = models

    def change(_) -> None:
        with torch.no_grad():
            ours.model.layers[0].mlp.up_proj.weight.mul_(2)

    ours.lm_head.weight.register_post_accumulate_grad_hook(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(ours, 1).backward()


def test_a_hook_may_replace_the_data_of_a_leaf_that_is_still_read(models) -> None:
    """As in PyTorch, backward then reads the new data: addresses are taken anew for each part."""
    for model in models:
        weight = model.model.layers[0].mlp.up_proj.weight

        def replace(_, weight=weight) -> None:
            weight.data = weight.data.clone()

        model.lm_head.weight.register_post_accumulate_grad_hook(replace)
        loss_of(model, 1).backward()
    assert_grads_close(models[1], models[0])
