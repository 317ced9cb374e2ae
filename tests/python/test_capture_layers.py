"""Layers of one kind are traced once or twice and copied: the graph must equal that of the complete
trace."""

from __future__ import annotations

import copy

import deepwell
import mixtures
import pytest
import torch
import zoo
from deepwell.capture import Captured, CaptureError, capture_graph
from torch import nn

IDS = {"input_ids": torch.arange(16).reshape(2, 8)}


def both_ways(module: nn.Module, args=(), kwargs=None) -> Captured:
    """Returns the capture with copies, after comparing it with the capture without copies."""
    before = copy.deepcopy([dict(m.__dict__) for m in module.modules() if not m._parameters])
    copied = capture_graph(module, args, kwargs, repeat=True)
    whole = capture_graph(module, args, kwargs)
    assert whole.copied_layers == 0
    assert copied.json == whole.json
    assert len(copied.leaves) == len(whole.leaves)
    for one, other in zip(copied.leaves, whole.leaves):
        assert (one.name, one.kind, one.target, one.position) == (
            other.name,
            other.kind,
            other.target,
            other.position,
        )
    assert copied.outputs == whole.outputs
    assert copied.output_spec == whole.output_spec
    assert copied.guards == whole.guards
    assert (copied.symbols, copied.symbol_sources) == (whole.symbols, whole.symbol_sources)
    assert len(before) == len([m for m in module.modules() if not m._parameters])
    assert not any("forward" in m.__dict__ for m in module.modules())
    return copied


def gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=16,
            max_position_embeddings=64,
        )
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


@pytest.mark.parametrize(
    "build, copies",
    [
        (lambda: zoo.gpt2(n_layer=4, resid_pdrop=0.1, attn_pdrop=0.1), 2),
        (lambda: zoo.llama(num_hidden_layers=4), 2),
        (lambda: mixtures.deepseek_v3(num_hidden_layers=6, first_k_dense_replace=3), 2),
        pytest.param(gemma2, None, marks=pytest.mark.slow),  # two kinds in turn
    ],
    ids=["gpt2", "llama", "deepseek-v3", "gemma2"],
)
@pytest.mark.parametrize(
    "training", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eval", "training"]
)
def test_models(build, copies, training):
    module = build().train(training)
    kwargs = dict(IDS)
    if training:
        kwargs["labels"] = IDS["input_ids"]
        kwargs["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
    copied = both_ways(module, (), kwargs).copied_layers
    assert copies is None or copied == copies


def test_on_the_meta_device():
    with torch.device("meta"):
        module = zoo.llama(num_hidden_layers=4)
    kwargs = {name: tensor.to("meta") for name, tensor in IDS.items()}
    assert both_ways(module, (), kwargs).copied_layers == 2


def test_hooks_that_collect_hidden_states():
    """Hugging Face attaches them to the layers: nothing is copied."""
    module = zoo.llama(num_hidden_layers=3)
    assert both_ways(module, (), {**IDS, "output_hidden_states": True}).copied_layers == 0


def test_without_a_cache_and_with_frozen_layers():
    module = zoo.llama(num_hidden_layers=5)
    module.model.layers[2].requires_grad_(False)  # a different kind
    assert both_ways(module, (), {**IDS, "use_cache": False}).copied_layers == 2


def test_encoder_of_pytorch():
    assert both_ways(encoder(), (torch.randn(2, 7, 32),)).copied_layers == 1


# ---- layers that look alike -----------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Stack(nn.Module):
    def __init__(self, kind=Layer, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(i) for i in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


# It needs no gradient, so the first layer's call differs from the others'.
X = (torch.randn(3, 8),)


def test_plain_layers_are_copied():
    assert both_ways(Stack(), X).copied_layers == 3


def test_two_layers_are_traced():
    assert both_ways(Stack(count=2), X).copied_layers == 0


def test_forward_branches_on_a_number():
    class Parity(Layer):
        def forward(self, x):
            return super().forward(x) if self.number % 2 else super().forward(x).relu()

    assert both_ways(Stack(Parity), X).copied_layers == 0


def test_a_number_that_indexes_a_list():
    scales = [0.5, 0.25, 0.125, 2.0, 3.0, 4.0]

    class Indexed(Layer):
        def forward(self, x):
            return super().forward(x) * scales[self.number]

    assert both_ways(Stack(Indexed), X).copied_layers == 0


def test_a_number_that_becomes_a_tensor():
    class Shifted(Layer):
        def forward(self, x):
            return super().forward(x) + self.number

    assert both_ways(Stack(Shifted), X).copied_layers == 0


def test_layers_with_different_attributes():
    module = Stack()
    for i, layer in enumerate(module.layers):
        layer.slope = 0.5 if i < 3 else 0.25
    assert both_ways(module, X).copied_layers == 1  # the last layer of the second kind


def test_tensor_attribute_of_a_layer():
    class Constant(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.table = torch.arange(8.0) + number

        def forward(self, x):
            return super().forward(x) * self.table

    assert both_ways(Stack(Constant), X).copied_layers == 0


def test_the_same_tensor_for_all_layers():
    table = torch.arange(8.0)

    class Shared(Layer):
        def forward(self, x):
            return super().forward(x) * table

    both_ways(Stack(Shared), X)


def test_hooks_inside_a_layer():
    module = Stack()
    for layer in module.layers:
        layer.linear.register_forward_hook(lambda m, args, y: y * 2)
    assert both_ways(module, X).copied_layers == 0
    module = Stack()
    module.layers[4].register_forward_hook(lambda m, args, y: y * 2)
    assert both_ways(module, X).copied_layers > 0  # it is traced around the copy


def test_state_passed_from_layer_to_layer():
    memory = {}

    class Remembering(Layer):
        def forward(self, x):
            y = super().forward(x)
            if "first" in memory:
                y = y + memory["first"]
            else:
                memory["first"] = y
            return y

    class Fresh(Stack):
        def forward(self, x):
            memory.clear()
            return super().forward(x)

    with pytest.raises(CaptureError, match="changes"):
        both_ways(Fresh(Remembering), X)
    memory.clear()


def test_a_counter_of_calls():
    calls = []

    class Counting(Layer):
        def forward(self, x):
            calls.append(0)
            return super().forward(x) * len(calls)

    class Fresh(Stack):
        def forward(self, x):
            y = super().forward(x)
            calls.clear()  # a forward with a side effect is not captured
            return y

    assert both_ways(Fresh(Counting), X).copied_layers == 0


def test_tensor_stored_outside_by_a_layer():
    class Telling(Layer):
        def forward(self, x):
            y = self.linear(x)
            told.append(y)
            return x + y.tanh()

    class Listening(Stack):
        def forward(self, x):
            y = super().forward(x) + sum(told)
            told.clear()
            return y

    told = []
    assert both_ways(Listening(Telling), X).copied_layers == 0


def test_a_layer_that_changes_its_argument():
    class InPlace(Layer):
        def forward(self, x):
            x.mul_(0.5)
            return super().forward(x)

    class Residual(Stack):
        def forward(self, x):
            x = x.clone()
            for layer in self.layers:
                y = layer(x)
                x = x + y
            return x

    assert both_ways(Residual(InPlace), X).copied_layers == 0


def test_a_layer_that_remembers_its_last_result():
    """A graph cannot have a side effect: such a module is rejected with and without copies."""

    class Keeping(Layer):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    for repeat in (True, False):
        with pytest.raises(CaptureError, match="'layers.0.last' in its forward"):
            capture_graph(Stack(Keeping), X, repeat=repeat)


def test_other_arguments_for_some_layers():
    class Scaled(Layer):
        def forward(self, x, scale, flag=False):
            y = super().forward(x) * scale
            return {"y": y.relu() if flag else y, "flag": flag, "x": x}

    class Uneven(Stack):
        def forward(self, x):
            for i, layer in enumerate(self.layers):
                result = layer(x, 2.0, flag=i >= 3)
                x = result["y"] + result["x"] if result["flag"] else result["y"]
            return x

    assert both_ways(Uneven(Scaled), X).copied_layers == 1


def test_tied_layers_and_layers_called_twice():
    module = Stack()
    module.layers[2].linear.weight = module.layers[0].linear.weight
    assert both_ways(module, X).copied_layers == 2  # the tied layers are traced

    class Twice(Stack):
        def forward(self, x):
            return super().forward(super().forward(x))

    assert both_ways(Twice(), X).copied_layers == 9


def test_a_nested_list():
    class Outer(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.inner = nn.Sequential(*[Layer(i) for i in range(4)])

        def forward(self, x):
            return self.inner(super().forward(x))

    assert both_ways(Stack(Outer), X).copied_layers == 3


def test_a_graph_that_writes_in_place_inside_layers():
    class Filling(Layer):
        def forward(self, x):
            y = x.new_empty(x.shape[0], 16)
            y[:, :8].copy_(super().forward(x))
            y[:, 8:].copy_(x)
            return y.relu_()[:, 4:12].contiguous()

    assert both_ways(Stack(Filling), X).copied_layers == 3


def test_refused_operations_are_named_in_their_layer():
    class Deciding(Layer):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="cannot be traced"):
        capture_graph(Stack(Deciding), X, repeat=True)


BY_IDENTITY: dict = {}


class ByIdentity(Layer):
    def forward(self, x):
        return super().forward(x) * BY_IDENTITY.get(self, 1.0)


class ByNumberOfIdentity(Layer):
    def forward(self, x):
        return super().forward(x) * (1.0 if id(self) != 0 else 2.0)


def test_layers_that_know_themselves():
    """Only the last layer differs, by an entry in a global table. Two traced layers would not show it."""
    stack = Stack(ByIdentity)
    BY_IDENTITY[stack.layers[-1]] = 3.0
    try:
        assert both_ways(stack, X).copied_layers == 0
    finally:
        BY_IDENTITY.clear()
    assert both_ways(Stack(ByNumberOfIdentity), X).copied_layers == 0

    table = {}

    class Around(Layer):
        def forward(self, x):
            return super().forward(x) * table.get(self, 1.0)

    assert both_ways(Stack(Around), X).copied_layers == 0


class Scaled(Layer):
    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.scale = 1.5

    def forward(self, x):
        return super().forward(x) * self.scale


def test_guards_see_changes_of_copied_layers(monkeypatch):
    """optimize copies layers. Changes of a layer that was not traced are noticed as those of the others are."""
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    model = Stack(Scaled)
    deepwell.optimize(model, verbose=False)
    last = model.layers[-1]

    def check() -> None:
        expected = Stack.forward(model, *X)
        torch.testing.assert_close(model(*X), expected)

    check()
    (entries,) = model.forward._states[0].entries.values()
    assert entries[0]._captured.copied_layers == 3
    last.scale = 2.5
    check()
    last.number = 17  # no forward reads it
    check()
    last.linear = nn.Linear(8, 8, bias=False)
    check()
    with torch.no_grad():
        last.linear.weight.add_(1.0)
    check()
    last.forward = lambda x: x - 1.0
    check()
    del last.forward
    last.register_forward_hook(lambda module, args, result: result + 1.0)
    check()
    for layer in model.layers:
        layer.eval()
    check()
