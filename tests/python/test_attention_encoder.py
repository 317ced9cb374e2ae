"""nn.TransformerEncoder and its layers in evaluation, where PyTorch has fused paths: our kernel runs and gives
the same results, including padded rows.
"""

import copy
import io

import deepwell
import pytest
import torch
from attention_tools import FORWARD, apart, attention_nodes, compiled, seen
from deepwell.attention import functional, install
from deepwell.attention.encoder import EncoderForward, LayerForward

_CLOSE = 2e-5


pytestmark = pytest.mark.usefixtures("attention_on_cpu")


class Fused(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts PyTorch's fused layers and attentions."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.count += "_transformer_encoder_layer_fwd" in name or "_native_multi_head" in name
        return function(*args, **(kwargs or {}))


def fused(function) -> int:
    with torch.no_grad(), Fused() as mode:
        function()
    return mode.count


def encoder(norm=True, layers=2, nested=True, **settings):
    settings = dict(dim_feedforward=64, dropout=0.1, batch_first=True) | settings
    layer = torch.nn.TransformerEncoderLayer(32, 4, **settings)
    last = torch.nn.LayerNorm(32) if norm else None
    module = torch.nn.TransformerEncoder(layer, layers, last, enable_nested_tensor=nested)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain = copy.deepcopy(module).eval()
    made = install.install(module.eval(), "test")
    return module, plain, made


SETTINGS = [
    dict(),
    dict(norm=False),
    dict(norm_first=True, nested=False),
    dict(activation="gelu"),
    dict(batch_first=False, nested=False),
    dict(nested=False),
    dict(bias=False, nested=False),
]
PADDINGS = {
    "none": None,
    "keeps all": torch.zeros(3, 7).bool(),
    "right": torch.arange(7) >= torch.tensor([[4], [7], [1]]),
    "left": torch.arange(7) < torch.tensor([[4], [0], [6]]),
    "holes": torch.tensor([[0, 1, 0, 0, 1, 0, 1], [0] * 7, [1, 1, 0, 1, 0, 0, 0]]).bool(),
}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(settings, mode):
    module, plain, made = encoder(**settings)
    # Only attentions: the forward of a layer does not call an attention module.
    assert len(made.replaced) == 2
    x = torch.randn(3, 7, 32) if settings.get("batch_first", True) else torch.randn(7, 3, 32)
    for name, padded in PADDINGS.items():
        with mode():
            exact = plain.double()(x.double(), src_key_padding_mask=padded).float()
            plain.float()
            assert seen(lambda: module(x, src_key_padding_mask=padded)).ours == 2, name
            ours = module(x, src_key_padding_mask=padded)
        assert apart([ours], [exact]) < _CLOSE * 10, name
        assert fused(lambda: module(x, src_key_padding_mask=padded)) == 0
    assert not any(layer.self_attn.forward.fallbacks for layer in module.layers)
    assert not functional.fallbacks


def test_reference_uses_pytorchs_fused_path():
    """Checks that PyTorch uses its fused paths where these tests assume it; otherwise the tests
    would show nothing."""
    _, plain, _ = encoder()
    x = torch.randn(3, 7, 32)
    for name in ("none", "right"):
        assert fused(lambda: plain(x, src_key_padding_mask=PADDINGS[name])) == 2
    with torch.no_grad():
        padded = plain.layers[0](x, src_key_padding_mask=PADDINGS["right"])
        nested = encoder(norm=False)[1](x, src_key_padding_mask=PADDINGS["right"])
    assert padded[2, 3].abs().max() > 0 and nested[2, 3].abs().max() == 0


def test_frozen_parameters_with_gradients_enabled():
    module, plain, _ = encoder()
    for parameter in [*module.parameters(), *plain.parameters()]:
        parameter.requires_grad_(False)
    x = torch.randn(3, 7, 32)
    for padded in PADDINGS.values():
        assert seen(lambda: module(x, src_key_padding_mask=padded)).ours == 2
        both = [m(x, src_key_padding_mask=padded) for m in (module, plain)]
        assert apart(both[:1], both[1:]) < _CLOSE * 10
    x.requires_grad_()
    grads = [
        torch.autograd.grad(m(x, src_key_padding_mask=PADDINGS["right"]).square().sum(), x)
        for m in (module, plain)
    ]
    assert apart(*grads) < _CLOSE * 100


def test_a_trainable_part_keeps_padded_rows():
    """With gradients PyTorch makes no nested tensor, so padded rows have values."""
    module, plain, _ = encoder(norm=False)
    for m in (module, plain):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(name.endswith("linear1.weight"))
    x = torch.randn(3, 7, 32)
    both = [m(x, src_key_padding_mask=PADDINGS["right"]) for m in (module, plain)]
    assert both[1][2, 3].abs().max() > 0
    assert apart(both[:1], both[1:]) < _CLOSE * 10
    grads = [
        torch.autograd.grad(out.square().sum(), [p for p in m.parameters() if p.requires_grad])
        for out, m in zip(both, (module, plain), strict=True)
    ]
    assert apart(*[[g / 100 for g in given] for given in grads]) < _CLOSE * 10


def test_hooks_see_what_pytorch_shows_them():
    module, plain, _ = encoder(nested=False)
    x, padded = torch.randn(3, 7, 32), PADDINGS["left"]
    seen_by = []
    for m in (module, plain):
        shown = []

        def hook(part, args, kwargs, out, shown=shown):
            shown.append([kwargs["key_padding_mask"], *args, out[0]])

        m.layers[1].self_attn.register_forward_hook(hook, with_kwargs=True)
        with torch.no_grad():
            m(x, src_key_padding_mask=padded)
        seen_by.append(shown[0])
    finite = [[t.nan_to_num(neginf=-1) for t in given] for given in seen_by]
    assert apart(*finite) < _CLOSE * 10


def test_causal():
    module, plain, _ = encoder()
    x = torch.randn(3, 7, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7)
    with torch.no_grad():
        for options in (dict(mask=mask), dict(mask=mask, is_causal=True)):
            assert seen(lambda: module(x, **options)).ours == 2
            assert apart([module(x, **options)], [plain(x, **options)]) < _CLOSE * 10
        padded = torch.zeros(3, 7).masked_fill(PADDINGS["right"], -torch.inf)
        options = dict(mask=mask, src_key_padding_mask=padded)
        assert seen(lambda: module(x, **options)).ours == 2
        assert apart([module(x, **options)], [plain(x, **options)]) < _CLOSE * 10


def test_single_causal_layer():
    module, plain, _ = encoder()
    x, mask = torch.randn(3, 7, 32), torch.ones(7, 7).triu(1).bool()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for options in (dict(src_mask=mask), dict(src_mask=mask, is_causal=True)):
            with mode():
                assert seen(lambda: module.layers[0](x, **options)).ours == 1
                both = [m.layers[0](x, **options) for m in (module, plain)]
            assert apart(both[:1], both[1:]) < _CLOSE * 10


def test_layers_left_to_pytorch_use_its_fused_path():
    module, plain, _ = encoder(nested=False)  # nested tensors have no empty rows
    x = torch.randn(3, 7, 32)
    options = dict(mask=torch.randn(7, 7))
    for options in (
        dict(mask=torch.randn(7, 7)),
        dict(src_key_padding_mask=torch.ones(3, 7).bool()),
    ):
        assert fused(lambda: module(x, **options)) == 2
        with torch.no_grad():
            ours, theirs = module(x, **options), plain(x, **options)
        assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))
    counted = module.layers[0].self_attn.forward.fallbacks
    assert counted["an attn_mask is given that is not causal"] == 2
    assert "an attn_mask is given that is not causal" in deepwell.summary(module)
    functional.devices.discard("cpu")
    functional.forget()
    for padded in PADDINGS.values():  # nothing changes for tensors on other devices
        assert fused(lambda: module(x, src_key_padding_mask=padded)) == fused(
            lambda: plain(x, src_key_padding_mask=padded)
        )
        with torch.no_grad():
            both = [m(x, src_key_padding_mask=padded) for m in (module, plain)]
        assert torch.equal(*both)


def test_calls_without_a_deepwell_kernel(monkeypatch):
    module, plain, _ = encoder()
    monkeypatch.setattr(functional, "why_not_kernels", lambda *_: "no kernel")
    functional.forget()
    x = torch.randn(3, 7, 32)
    for padded in PADDINGS.values():
        assert fused(lambda: module(x, src_key_padding_mask=padded)) == 2
        with torch.no_grad():
            both = [m(x, src_key_padding_mask=padded) for m in (module, plain)]
        assert torch.equal(*both)
    assert functional.fallbacks["no kernel"] > 0


def test_compiled_in_evaluation():
    module, plain, _ = encoder()
    x, graphs = torch.randn(3, 7, 32), []
    with torch.no_grad():
        assert apart([compiled(module, graphs)(x)], [plain(x)]) < _CLOSE * 10
    assert attention_nodes(graphs) == [FORWARD] * 2


def test_restored_copied_and_pickled():
    module, plain, _ = encoder()
    x, padded = torch.randn(3, 7, 32), PADDINGS["right"]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False), module):
        assert isinstance(other.forward, EncoderForward)
        assert all(isinstance(layer.forward, LayerForward) for layer in other.layers)
        assert other.forward._module() is other
        with torch.no_grad():
            assert seen(lambda: other(x, src_key_padding_mask=padded)).ours == 2
        deepwell.restore(other)
        assert {name: set(m.__dict__) for name, m in other.named_modules()} == {
            name: set(m.__dict__) for name, m in plain.named_modules()
        }
        assert fused(lambda: other(x, src_key_padding_mask=padded)) == 2


def test_custom_layers_are_unchanged():
    class Part(torch.nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return 2 * super()._ff_block(x)

    class Whole(torch.nn.TransformerEncoderLayer):
        def forward(self, src, **options):
            return src

    for kind in (Part, Whole):
        layer = kind(32, 4, 64, dropout=0.0, batch_first=True)
        module = torch.nn.TransformerEncoder(layer, 1).eval()
        plain = copy.deepcopy(module)
        install.install(module, "test")
        assert "forward" not in module.__dict__ and "forward" not in module.layers[0].__dict__
        x = torch.randn(3, 7, 32)
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode:
                assert apart([module(x)], [plain(x)]) < _CLOSE
    module = torch.nn.TransformerEncoder(Part(32, 4, 64, batch_first=True), 1).eval()
    install.install(module, "test")
    assert seen(lambda: module(x)).ours == 1  # with gradients PyTorch runs the layer's parts
