"""optimize() as on a GPU, but on CPU models: Hugging Face's interface, nn.MultiheadAttention, and
tools that users combine with models. The tests call install() directly, because optimize() requires
a CUDA model.
"""

import copy
import gc
import io
import weakref

import deepwell
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_tools import (
    BACKWARD,
    FORWARD,
    apart,
    attention_nodes,
    compiled,
    said,
    seen,
)
from deepwell.attention import functional, huggingface, install
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")
_CLOSE = 2e-5


pytestmark = pytest.mark.usefixtures("attention_on_cpu")


# ---- nn.MultiheadAttention -------------------------------------------------------------------------------


def pair(module):
    """Returns a module with our attention, and an untouched copy."""
    plain = copy.deepcopy(module)
    return module, install.install(module, "test"), plain


def trained(module, *given, **options):
    """Returns outputs and all gradients."""
    given = [t.detach().clone().requires_grad_() for t in given]
    out = module(*given, **options)
    out = out[0] if isinstance(out, tuple) else out
    grads = torch.autograd.grad(
        out.square().sum(), [*given, *module.parameters()], allow_unused=True
    )
    return [out.detach(), *grads]


SETTINGS = [
    dict(batch_first=True),
    dict(),
    dict(batch_first=True, bias=False),
    dict(batch_first=True, kdim=24, vdim=40),
    dict(kdim=24),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_multihead_settings(settings, causal):
    module, made, plain = pair(torch.nn.MultiheadAttention(32, 4, **settings))
    q = torch.randn(3, 7, 32)
    k, v = torch.randn(3, 7, settings.get("kdim", 32)), torch.randn(3, 7, settings.get("vdim", 32))
    options = dict(need_weights=False)
    rows = 7 if settings.get("batch_first") else 3
    if causal:
        options |= dict(attn_mask=torch.full((rows, rows), -torch.inf).triu(1), is_causal=True)
    assert list(made.replaced) == [""]
    assert seen(lambda: module(q, k, v, **options)).ours == 1
    ours, theirs = module(q, k, v, **options)[0], plain(q, k, v, **options)[0]
    assert ours.shape == theirs.shape and ours.is_contiguous()
    assert apart(trained(module, q, k, v, **options), trained(plain, q, k, v, **options)) < _CLOSE


@pytest.mark.parametrize("same", ["all", "key and value", "none"])
def test_multihead_operands(same):
    module, _, plain = pair(torch.nn.MultiheadAttention(32, 4, batch_first=True))
    x, y, z = (torch.randn(2, 5, 32) for _ in range(3))
    given = {"all": (x, x, x), "key and value": (x, y, y), "none": (x, y, z)}[same]
    ours, theirs = module(*given, need_weights=False)[0], plain(*given, need_weights=False)[0]
    assert apart([ours], [theirs]) < _CLOSE
    grads = [
        torch.autograd.grad(out.square().sum(), list(m.parameters()))
        for out, m in ((ours, module), (theirs, plain))
    ]
    assert apart(*grads) < _CLOSE


@pytest.mark.parametrize(
    ("options", "because"),
    [
        (
            dict(key_padding_mask=torch.randn(2, 5), need_weights=False),
            "numbers other than 0 and -inf",
        ),
        (
            dict(key_padding_mask=torch.ones(2, 5).bool(), need_weights=False),
            "all keys of a row are padded",
        ),
        (dict(attn_mask=torch.randn(5, 5)), "attn_mask is given"),
        (dict(attn_mask=torch.randn(5, 5), is_causal=True), "attn_mask is given"),
        (dict(attn_mask=torch.ones(5, 5).tril(-1).bool()), "attn_mask is given"),
        (dict(attn_mask=torch.randn(5, 5), need_weights=False), "attn_mask is given"),
        (dict(attn_mask=torch.ones(5, 5).triu(2).bool(), need_weights=False), "attn_mask is given"),
        (dict(attn_mask=torch.randn(8, 5, 5), need_weights=False), "attn_mask is given"),
    ],
    ids=said,
)
def test_multihead_calls_for_pytorch(options, because):
    module, _, plain = pair(torch.nn.MultiheadAttention(32, 4, batch_first=True))
    x = torch.randn(2, 5, 32)
    ours, theirs = module(x, x, x, **options), plain(x, x, x, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert a is b is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert because in next(iter(module.forward.fallbacks))
    assert because in install.installed(module)


def test_multihead_without_a_batch_axis_and_nested():
    module, _, plain = pair(torch.nn.MultiheadAttention(32, 4, batch_first=True))
    x = torch.randn(5, 32)
    assert apart(module(x, x, x, need_weights=False), plain(x, x, x, need_weights=False)) == 0
    with pytest.raises((RuntimeError, AssertionError)):
        module(torch.randn(2, 5, 30), *[torch.randn(2, 5, 32)] * 2, need_weights=False)


@pytest.mark.parametrize("settings", [dict(add_bias_kv=True), dict(add_zero_attn=True)], ids=str)
def test_unsupported_multihead_modules_are_unchanged(settings):
    module, made, plain = pair(torch.nn.MultiheadAttention(32, 4, batch_first=True, **settings))
    assert "adds its own keys" in made.left[""] and "forward" not in module.__dict__
    x = torch.randn(2, 5, 32)
    assert apart(module(x, x, x), plain(x, x, x)) == 0


def test_multihead_subclasses_and_replaced_forwards_are_unchanged():
    class Mine(torch.nn.MultiheadAttention):
        def forward(self, x):
            return x

    model = torch.nn.Sequential(Mine(32, 4), torch.nn.MultiheadAttention(32, 4))
    model[1].forward = lambda x: x
    _, made, _ = pair(model)
    assert "forward of its own" in made.left["0"] and "replaced already" in made.left["1"]
    x = torch.randn(2, 5, 32)
    assert torch.equal(model(x), x)
    deepwell.restore(model)
    assert "forward" in model[1].__dict__


def test_multihead_hooks_run():
    module, _, plain = pair(torch.nn.MultiheadAttention(32, 4, batch_first=True))
    said = []
    for m in (module, plain):
        m.register_forward_pre_hook(lambda *a: said.append("pre"))
        m.register_forward_hook(lambda *a: said.append("post"))
        m.register_full_backward_hook(lambda *a: said.append("backward"))
        x = torch.randn(2, 5, 32, requires_grad=True)
        m(x, x, x, need_weights=False)[0].sum().backward()
    assert said == ["pre", "post", "backward"] * 2


def test_dropout_of_multihead():
    module, _, plain = pair(torch.nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True))
    x = torch.randn(2, 5, 32)
    torch.manual_seed(1)
    first = module(x, x, x, need_weights=False)[0]
    torch.manual_seed(1)
    assert torch.equal(first, module(x, x, x, need_weights=False)[0])
    assert not torch.equal(first, module(x, x, x, need_weights=False)[0])
    module.eval(), plain.eval()
    with torch.no_grad():  # PyTorch has its own fast path for both
        assert apart(module(x, x, x)[:1], plain(x, x, x)[:1]) < _CLOSE


def encoder():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_transformer_layers():
    module, made, plain = pair(encoder())
    assert list(made.replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
    x = torch.randn(2, 7, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7)
    for options in ({}, dict(mask=mask, is_causal=True), dict(mask=mask)):
        assert seen(lambda: module(x, **options)).ours == 2
        assert apart(trained(module, x, **options), trained(plain, x, **options)) < _CLOSE
    padding = torch.arange(7).expand(2, 7) > 5
    options = dict(src_key_padding_mask=padding)
    assert seen(lambda: module(x, **options)).ours == 2
    assert apart(trained(module, x, **options), trained(plain, x, **options)) < _CLOSE
    module.eval(), plain.eval()
    with torch.no_grad():
        assert apart([module(x)], [plain(x)]) < _CLOSE


def test_decoder_layers():
    layer = torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    module, made, plain = pair(layer)
    assert list(made.replaced) == ["self_attn", "multihead_attn"]
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 9, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7)
    options = dict(tgt_mask=mask, tgt_is_causal=True)
    assert seen(lambda: module(x, memory, **options)).ours == 2
    assert (
        apart(trained(module, x, memory, **options), trained(plain, x, memory, **options)) < _CLOSE
    )


# ---- use of an optimized model
# ---------------------------------------------------------------------------


def test_compiled_whole():
    module, _, plain = pair(encoder())
    x, graphs = torch.randn(2, 7, 32), []
    fast = compiled(module, graphs)
    assert apart(trained(fast, x), trained(plain, x)) < _CLOSE
    assert sorted(attention_nodes(graphs)) == sorted([FORWARD, BACKWARD] * 2)


def test_copied_pickled_and_restored():
    module, _, plain = pair(encoder())
    x = torch.randn(2, 7, 32)
    copied = copy.deepcopy(module)
    assert copied.layers[0].self_attn.forward._module() is copied.layers[0].self_attn
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        assert seen(lambda: other(x)).ours == 2
        assert apart(trained(other, x), trained(plain, x)) < _CLOSE
        assert "modules replaced: 2" in deepwell.summary(other)
        before = {name: set(m.__dict__) for name, m in plain.named_modules()}
        deepwell.restore(other)
        assert {name: set(m.__dict__) for name, m in other.named_modules()} == before
        assert seen(lambda: other(x)).ours == 0
    assert list(module.state_dict()) == list(plain.state_dict())
    assert seen(lambda: module(x)).ours == 2


def test_freed_with_the_last_reference():
    module, _, _ = pair(encoder())
    trained(module, torch.randn(2, 7, 32))
    gone = weakref.ref(module.layers[0].self_attn)
    gc.collect()
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    module, _, plain = pair(encoder())
    x = torch.randn(2, 7, 32, requires_grad=True)

    def gradients(model, function):
        model.zero_grad()
        function(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    ours = gradients(module, lambda x: checkpoint(module, x, use_reentrant=reentrant))
    assert apart(ours, gradients(plain, plain)) < _CLOSE * 10


@pytest.fixture
def alone(tmp_path):
    """Makes a process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ["optimize first", "DDP first"])
def test_ddp(alone, order):
    plain = encoder()
    module = copy.deepcopy(plain)
    if order == "optimize first":
        install.install(module, "test")
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    if order == "DDP first":
        install.install(module, "test")
    x = torch.randn(2, 7, 32)
    assert seen(lambda: wrapped(x)).ours == 2
    wrapped(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert (
        apart([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])
        < _CLOSE * 10
    )


@pytest.mark.parametrize("order", ["optimize first", "FSDP first"])
def test_fsdp2(alone, order):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = encoder()
    module = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1,))
    if order == "optimize first":
        install.install(module, "test")
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    if order == "FSDP first":
        install.install(module, "test")
    x = torch.randn(2, 7, 32)
    assert seen(lambda: module(x)).ours == 2
    module(x).square().sum().backward()
    plain(x).square().sum().backward()
    grads = [p.grad.full_tensor() for p in module.parameters()]
    assert apart(grads, [p.grad for p in plain.parameters()]) < _CLOSE * 10


def test_optimize_checks_its_arguments():
    with pytest.raises(deepwell.UnsupportedError, match="target='sm_90a' is for a model on a GPU"):
        deepwell.optimize(encoder(), target="sm_90a")


# ---- Hugging Face ----------------------------------------------------------------------------------------

_SMALL = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
_LLAMA = dict(_SMALL, intermediate_size=64, num_key_value_heads=2)


def configurations():
    t = transformers
    gpt2 = dict(
        vocab_size=50,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    quiet = dict(attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    return {
        "gpt2": t.GPT2Config(**gpt2, **quiet),
        "gpt2 by layer": t.GPT2Config(**gpt2, **quiet, scale_attn_by_inverse_layer_idx=True),
        "gpt2 unscaled": t.GPT2Config(
            **gpt2, **quiet, scale_attn_weights=False, reorder_and_upcast_attn=True
        ),
        "llama": t.LlamaConfig(**_LLAMA),
        "mistral": t.MistralConfig(**_LLAMA, sliding_window=5),
        "qwen3": t.Qwen3Config(
            **_LLAMA, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
        "gemma2": t.Gemma2Config(
            **_LLAMA, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0
        ),
        "bert": t.BertConfig(
            **_SMALL, intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        ),
    }


def hugging_face(name, implementation=None):
    config = copy.deepcopy(configurations()[name])
    kind = (
        transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    )
    implementation = implementation or ("eager" if name == "gemma2" else "sdpa")
    model = kind.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():  # so that attention is not just a mean
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits_and_gradients(model, ids, **options):
    logits = model(input_ids=ids, **options).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    return [
        logits.detach(),
        *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True),
    ]


PADDED = torch.tensor([[1] * 8 + [0] * 3, [1] * 11])


@pytest.mark.parametrize("name", list(configurations()))
def test_families(name):
    model, made, plain = pair(hugging_face(name))
    assert len(made.replaced) == 2 and not made.left
    ids = torch.randint(50, (2, 11))
    with torch.no_grad():
        assert seen(lambda: model(input_ids=ids)).ours == 2
    for options in (
        {},
        dict(attention_mask=torch.ones_like(ids)),
        dict(attention_mask=PADDED),
    ):
        assert seen(lambda: model(input_ids=ids, **options)).ours == 2, options
        both = [logits_and_gradients(m, ids, **options) for m in (model, plain)]
        assert apart(*both) < 1e-4, options


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2", "bert"])
def test_families_compiled(name):
    model, _, plain = pair(hugging_face(name))
    ids, graphs = torch.randint(50, (2, 11)), []
    options = {} if name == "bert" else dict(use_cache=False)
    got = logits_and_gradients(compiled(model, graphs), ids, **options)
    assert apart(got, logits_and_gradients(plain, ids, **options)) < 1e-4
    assert sorted(attention_nodes(graphs)) == sorted([FORWARD, BACKWARD] * 2)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2"])
def test_generation_and_caches(name):
    model, _, plain = pair(hugging_face(name).eval())
    ids = torch.randint(50, (2, 7))
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    left = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    options["attention_mask"] = left
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_packed_positions_are_detected():
    """Packed sequences that only their positions reveal: transformers adds a mask, and it must not be skipped."""
    model, _, plain = pair(hugging_face("llama"))
    ids = torch.randint(50, (1, 9))
    options = dict(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]]), use_cache=False)
    assert seen(lambda: model(input_ids=ids, **options)).ours == 0
    both = [logits_and_gradients(m, ids, **options) for m in (model, plain)]
    assert apart(*both) < 1e-5


def test_custom_mask():
    model, _, plain = pair(hugging_face("llama"))
    ids = torch.randint(50, (2, 9))
    own = torch.zeros(2, 1, 9, 9).masked_fill(
        torch.rand(2, 1, 9, 9) < 0.3, torch.finfo(torch.float32).min
    )
    both = [logits_and_gradients(m, ids, attention_mask=own) for m in (model, plain)]
    assert apart(*both) < 1e-5


def test_probabilities_of_a_soft_cap_model():
    model, _, plain = pair(hugging_face("gemma2"))
    ids = torch.randint(50, (2, 9))
    for options in ({}, dict(attention_mask=PADDED[:, 2:])):
        ours, theirs = (m(input_ids=ids, output_attentions=True, **options) for m in (model, plain))
        assert apart(ours.attentions, theirs.attentions) < 1e-5
        assert apart([ours.logits], [theirs.logits]) < 1e-4


def test_deepwell_by_name():
    import_ = huggingface.register()
    assert import_
    model = hugging_face("gemma2", "deepwell")
    plain = hugging_face("gemma2")
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(50, (2, 11))
    for options in ({}, dict(attention_mask=PADDED)):
        both = [logits_and_gradients(m, ids, **options) for m in (model, plain)]
        assert apart(*both) < 1e-4
    module = model.model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(
        NotImplementedError, match="does not support s_aux, which Gemma2Attention uses"
    ):
        huggingface.attention_forward(module, q, q, q, None, s_aux=torch.zeros(4))


def test_restore_and_copies_of_hugging_face():
    model, _, plain = pair(hugging_face("llama"))
    assert model.config._attn_implementation == "deepwell_sdpa"
    assert "deepwell" not in model.config.to_json_string()
    copied = copy.deepcopy(model)
    deepwell.restore(copied)
    assert copied.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "deepwell_sdpa"
    ids = torch.randint(50, (2, 11))
    assert apart(*[logits_and_gradients(m, ids) for m in (copied, plain)]) == 0
    again = install.install(model, "test")
    assert "already" in next(iter(again.left.values()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert seen(lambda: loaded(input_ids=ids)).ours == 2


def test_unsupported_models_are_unchanged():
    falcon = transformers.FalconConfig(**_SMALL)
    model = transformers.FalconForCausalLM._from_config(falcon, attn_implementation="sdpa")
    _, made, _ = pair(model)
    assert "compares with the name 'sdpa'" in made.left[""]
    _, made, _ = pair(hugging_face("llama", "eager"))
    assert "attn_implementation is 'eager'" in made.left[""]
    _, made, _ = pair(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert "no attention that Deepwell supports" in made.left[""]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, _, plain = pair(hugging_face("mistral"))
    ids = torch.randint(50, (2, 11))
    model.train(), plain.train()
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    losses = []
    for m in (model, plain):
        out = m(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        losses.append(out.loss.detach())
    assert apart(losses[:1], losses[1:]) < 1e-5
    assert apart([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]) < 1e-5
    assert functional.fallbacks == {}
