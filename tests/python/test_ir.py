"""deepwell.capture: its output on real and meta devices, and its messages when it fails."""

import deepwell
import pytest
import torch
from zoo import gpt2, llama, mlp


def test_layers_and_parameter_shapes() -> None:
    model = gpt2()
    ir = deepwell.capture(model)
    text = str(ir)
    assert "GPT2LMHeadModel: 2 layers" in text and "layer 1" in text and "attn" in text
    assert ir.parameters["transformer.h.0.attn.c_attn.weight"] == (48, 144)
    assert set(ir.parameters) == {name for name, _ in model.named_parameters()}
    flops, moved = ir.cost(**{name: 16 for name in ir.symbols})
    linears = 2 * 12 * 48 * 48 + 211 * 48
    assert flops >= 2.0 * 16 * 16 * linears and moved > 0


def test_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        model = llama(hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
    ir = deepwell.capture(model)
    assert ir.parameters["model.layers.0.mlp.up_proj.weight"] == (11008, 4096)


def test_inputs_are_made_from_the_first_layer() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11)

        def forward(self, tokens, scale=1.0):
            return self.head(self.table(tokens)) * scale

    model = Model()
    ir = deepwell.capture(model)
    assert ir.module is model and ir.arguments[0][0].dtype == torch.long
    encoder = torch.nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    for layer, width in ((mlp(), 37), (torch.nn.LayerNorm(5), 5), (encoder, 12)):
        assert deepwell.capture(layer.eval()).arguments[0][0].shape == (2, 8, width)


def test_text_and_json_read_back() -> None:
    from deepwell import _deepwell

    ir = deepwell.capture(mlp(), torch.zeros(2, 3, 37))
    assert "linear" in ir.text()
    assert _deepwell.Graph(ir.json()).json() == ir.json()


def test_errors() -> None:
    with pytest.raises(deepwell.CaptureError, match="example_inputs"):
        deepwell.capture(torch.nn.MultiheadAttention(8, 2))
    with pytest.raises(TypeError, match="example_inputs"):
        deepwell.capture(mlp(), 3)
    with pytest.raises(ValueError, match="sizes"):
        deepwell.capture(mlp(), torch.zeros(2, 3, 37)).cost()
    with pytest.raises(RuntimeError, match="JSON|json|graph"):
        from deepwell import _deepwell

        _deepwell.Graph("{")
