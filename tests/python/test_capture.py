"""Compares captured graphs with their modules, in FP64, at several sizes."""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
from deepwell import _deepwell
from deepwell.caches import flatten_outputs
from deepwell.capture import Captured, CaptureError, capture_graph
from graph_eval import evaluate
from torch import nn
from torch.utils import _pytree as pytree
from zoo import longrope_branches_on_data

# ---- running a capture --------------------------------------------------------------------------


def run(
    captured: Captured,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Dict[str, Any],
    seed: Tuple[int, int] = (1, 2),
) -> Any:
    """Evaluates the captured graph in PyTorch instead of calling module(*args, **kwargs)."""
    flat, _ = pytree.tree_flatten((tuple(args), kwargs))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors = {}
    for leaf in captured.leaves:
        tensors[leaf.name] = {
            "parameter": lambda: parameters[leaf.target],
            "buffer": lambda: buffers[leaf.target],
            "input": lambda: flat[leaf.position],
            "constant": lambda: leaf.value,
            "seed": lambda: torch.tensor(seed),
        }[leaf.kind]()
    sizes = {
        name: flat[position].shape[axis]
        for (name, _, _), (position, axis) in zip(captured.symbols, captured.symbol_sources)
    }
    assert captured.accepts_sizes(list(sizes.values()))
    return captured.rebuild_outputs(evaluate(captured.json, tensors, sizes), flat)


def assert_same(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    assert type(got) is type(want)
    got_flat, got_spec = flatten_outputs(got)
    want_flat, want_spec = flatten_outputs(want)
    assert got_spec == want_spec
    for g, w in zip(got_flat, want_flat):
        if not isinstance(w, torch.Tensor):
            assert type(g) is type(w) and g == w
            continue
        assert g.dtype == w.dtype and g.shape == w.shape
        if w.dtype.is_floating_point:
            scale = max(1.0, float(w.detach().abs().nan_to_num(posinf=0).max()) if w.numel() else 1)
            bound = tolerance if w.dtype == torch.float64 else max(tolerance, 2e-6)
            torch.testing.assert_close(g, w, rtol=0, atol=bound * scale)
        else:
            assert torch.equal(g, w)


Call = Tuple[Sequence[Any], Dict[str, Any]]


def check(
    module: nn.Module,
    calls: Sequence[Call],
    tolerance: float = 1e-9,
    dynamic: Optional[bool] = True,
) -> Captured:
    """Captures at the first call's sizes; the capture must be right for all calls."""
    args, kwargs = calls[0]
    before = _snapshot(module)
    captured = capture_graph(module, tuple(args), kwargs)
    assert _snapshot(module) == before
    assert captured.method == "export"
    if dynamic is not None:
        assert captured.dynamic == dynamic
    _deepwell.Graph(captured.json)  # the core's own verifier
    for args, kwargs in calls:
        with torch.no_grad():
            want = _fresh(module, args, kwargs)
        assert_same(run(captured, module, args, kwargs), want, tolerance)
    return captured


def _fresh(module: nn.Module, args: Sequence[Any], kwargs: Dict[str, Any]) -> Any:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return module(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _snapshot(module: nn.Module) -> Any:
    tensors = [(n, t._version, id(t)) for n, t in module.state_dict(keep_vars=True).items()]
    grads = [p.grad is None for p in module.parameters()]
    flags = [m.training for m in module.modules()]
    flags += [(sorted(m.__dict__), len(m._forward_hooks)) for m in module.modules()]
    return tensors, grads, flags, torch.get_rng_state().tolist(), torch.is_grad_enabled()


def operations(captured: Captured) -> List[str]:
    return [node["op"] for node in json.loads(captured.json)["nodes"]]


def node_of(captured: Captured, op: str) -> Dict[str, Any]:
    return next(n for n in json.loads(captured.json)["nodes"] if n["op"] == op)


def random_ids(batch: int, length: int, classes: int = 61) -> torch.Tensor:
    return torch.randint(0, classes, (batch, length))


SIZES = [(2, 7), (3, 5), (5, 11)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- Hugging Face -------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")


def gpt2_config(**changes: Any) -> Any:
    settings = dict(
        n_layer=2, n_head=3, n_embd=24, vocab_size=61, n_positions=32, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2Config(**{**settings, **changes})


LLAMA_SETTINGS = dict(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
    intermediate_size=40, vocab_size=61, max_position_embeddings=64, bos_token_id=0,
    eos_token_id=0, pad_token_id=0,
)  # fmt: skip


def llama_config(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**LLAMA_SETTINGS, **changes})


def padding(batch: int, length: int) -> torch.Tensor:
    """Right padding: row i lacks its last i tokens."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, max(1, length - row) :] = 0
    return mask


TEXT_CALLS: Dict[str, Callable[[int, int], Dict[str, Any]]] = {
    "ids": lambda b, s: {"input_ids": random_ids(b, s)},
    "labels": lambda b, s: {"input_ids": random_ids(b, s), "labels": random_ids(b, s)},
    "padding": lambda b, s: {"input_ids": random_ids(b, s), "attention_mask": padding(b, s),
                             "labels": random_ids(b, s)},
    "positions": lambda b, s: {"input_ids": random_ids(b, s),
                               "position_ids": torch.randint(0, 32, (b, s)).sort(1).values},
    "no cache": lambda b, s: {"input_ids": random_ids(b, s), "use_cache": False},
    "tuple": lambda b, s: {"input_ids": random_ids(b, s), "return_dict": False},
    "hidden": lambda b, s: {"input_ids": random_ids(b, s), "output_hidden_states": True},
}  # fmt: skip


def layers_for(call: str) -> int:
    """Two layers share a mask, a cache and a list of hidden states; the other calls say nothing of layers."""
    return 2 if call in ("ids", "padding", "hidden") else 1


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", TEXT_CALLS)
def test_gpt2_lm(call: str, train: bool) -> None:
    layers = layers_for(call)
    module = transformers.GPT2LMHeadModel(gpt2_config(n_layer=layers)).double().train(train)
    captured = check(module, [((), TEXT_CALLS[call](b, s)) for b, s in SIZES])
    assert operations(captured).count("attention") == layers
    if call != "positions":
        assert node_of(captured, "attention")["attrs"]["causal"] == 1
    if call not in ("padding", "positions"):
        assert node_of(captured, "attention")["inputs"][3] is None


@pytest.mark.parametrize("train", [True, False])
def test_gpt2_model_with_embeddings_given(train: bool) -> None:
    module = transformers.GPT2Model(gpt2_config()).double().train(train)
    check(module, [((), {"inputs_embeds": torch.randn(b, s, 24).double()}) for b, s in SIZES])


def test_gpt2_eager_attention() -> None:
    module = transformers.GPT2LMHeadModel(gpt2_config(attn_implementation="eager")).double()
    check(module, [((), TEXT_CALLS["padding"](b, s)) for b, s in SIZES])


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", TEXT_CALLS)
def test_llama(call: str, train: bool) -> None:
    layers = layers_for(call)
    module = transformers.LlamaForCausalLM(llama_config(num_hidden_layers=layers))
    module = module.double().train(train)
    captured = check(module, [((), TEXT_CALLS[call](b, s)) for b, s in SIZES])
    attention = node_of(captured, "attention")
    if call != "positions":
        assert attention["attrs"]["causal"] == 1
    if call not in ("padding", "positions"):
        assert attention["inputs"][3] is None
    if call == "padding":  # the part of the mask that remains once "key <= query" is an attribute
        mask = attention["inputs"][3]
        made = next(n for n in json.loads(captured.json)["nodes"] if mask in n["outputs"])
        assert made["op"] == "reshape" and made["attrs"]["shape"] == ["B", 1, 1, "S"]
        assert "take" not in operations(captured)
    leaves = {leaf["name"]: leaf["shape"] for leaf in json.loads(captured.json)["leaves"]}
    key = next(n for n in json.loads(captured.json)["nodes"] if "k_proj" in n["module"])
    assert leaves[key["inputs"][1]] == [16, 32]  # two key heads for four query heads
    assert operations(captured).count("attention") == layers


ROPE = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16,
                 "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_llama_rope_scaling(kind: str, tied: bool) -> None:
    if kind == "longrope" and longrope_branches_on_data():
        pytest.skip("this transformers chooses longrope's factors by control flow on data")
    scaling = {"rope_theta": 10000.0, **ROPE[kind]}
    config = llama_config(num_hidden_layers=1, tie_word_embeddings=tied, rope_parameters=scaling)
    module = transformers.LlamaForCausalLM(config).double()
    sizes = SIZES + [(2, 20)]  # beyond original_max_position_embeddings
    captured = check(module, [((), TEXT_CALLS["labels"](b, s)) for b, s in sizes])
    names = [leaf.target for leaf in captured.leaves if leaf.kind == "parameter"]
    assert ("lm_head.weight" in names) != tied
    assert len(names) == len(set(names))


def test_llama_dynamic_rope_states_its_limit() -> None:
    scaling = {"rope_theta": 10000.0, **ROPE["dynamic"]}
    config = llama_config(num_hidden_layers=1, rope_parameters=scaling)
    module = transformers.LlamaForCausalLM(config).double()
    captured = capture_graph(module, (), TEXT_CALLS["ids"](2, 7))
    assert captured.accepts_sizes([2, 64]) and not captured.accepts_sizes([2, 65])
    with pytest.raises(CaptureError, match="S <= 64"):
        capture_graph(module, (), TEXT_CALLS["ids"](2, 65))
    with pytest.raises(CaptureError, match="position_ids"):
        capture_graph(module, (), TEXT_CALLS["positions"](2, 7))
    assert module.model.rotary_emb.forward.__func__ is type(module.model.rotary_emb).forward


def test_cache_is_returned_with_its_classes() -> None:
    """Each layer of the cache has its class and window, and counts the tokens that the window has dropped."""
    config = transformers.MistralConfig(**{**LLAMA_SETTINGS, "sliding_window": 4})
    module = transformers.MistralForCausalLM(config)
    captured = capture_graph(module, (), TEXT_CALLS["ids"](2, 7))
    for b, s in [(2, 7), (3, 9)]:
        kwargs = TEXT_CALLS["ids"](b, s)
        got = run(captured, module, (), kwargs).past_key_values
        want = module(**kwargs).past_key_values
        assert got.get_seq_length() == want.get_seq_length() == s
        tokens = random_ids(b, 1)
        again = module(tokens, past_key_values=got).logits
        torch.testing.assert_close(again, module(tokens, past_key_values=want).logits)


def test_grouped_heads_are_not_copied() -> None:
    module = transformers.LlamaForCausalLM(llama_config(num_hidden_layers=1))
    captured = capture_graph(module, (), TEXT_CALLS["no cache"](2, 7))
    nodes = json.loads(captured.json)["nodes"]
    assert not [n for n in nodes if n["op"] == "broadcast" and n["region"] == "attn" and
                len(n["attrs"]["shape"]) == 5]  # fmt: skip


def test_a_cache_as_argument_is_refused() -> None:
    module = transformers.LlamaForCausalLM(llama_config()).eval()
    cache = module(random_ids(2, 3), use_cache=True).past_key_values
    with pytest.raises(CaptureError, match="cache"):
        capture_graph(module, (random_ids(2, 1),), {"past_key_values": cache})


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients(family: str) -> None:
    """Autograd differentiates the evaluation: the graph must have the module's gradients too."""
    if family == "gpt2":
        module = transformers.GPT2LMHeadModel(gpt2_config()).double()
    else:
        module = transformers.LlamaForCausalLM(llama_config()).double()
    captured = capture_graph(module, (), TEXT_CALLS["padding"](2, 7))
    kwargs = TEXT_CALLS["padding"](3, 5)
    names, parameters = zip(*module.named_parameters())
    want = torch.autograd.grad(module(**kwargs).loss, parameters)
    got = torch.autograd.grad(run(captured, module, (), kwargs).loss, parameters)
    for name, g, w in zip(names, got, want):
        error = (g - w).norm() / w.norm().clamp_min(1e-12)
        assert error < 2e-5 or w.norm() < 1e-12, name  # the models compute partly in FP32


def test_regions_layers_and_modules() -> None:
    module = transformers.LlamaForCausalLM(llama_config())
    captured = capture_graph(module, (), TEXT_CALLS["labels"](2, 7))
    found = {(n["region"], n["layer"]) for n in json.loads(captured.json)["nodes"]}
    assert {("embed", -1), ("norm", 0), ("attn", 0), ("mlp", 1), ("attn", 1), ("norm", -1),
            ("head", -1), ("loss", -1)} <= found  # fmt: skip
    for node in json.loads(captured.json)["nodes"]:
        module.get_submodule(node["module"])


# ---- torch.nn: the transformer classes ----------------------------------------------------------


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    settings = dict(d_model=12, nhead=3, dim_feedforward=20, dropout=0.0, batch_first=True)
    return nn.TransformerEncoderLayer(**{**settings, **options}).double()


def source(batch: int, length: int, batch_first: bool = True) -> torch.Tensor:
    shape = (batch, length, 12) if batch_first else (length, batch, 12)
    return torch.randn(shape).double()


def causal(length: int) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def late_keys(batch: int, length: int) -> torch.Tensor:
    return padding(batch, length) == 0


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer(train: bool, norm_first: bool, batch_first: bool, activation: str) -> None:
    module = encoder_layer(norm_first=norm_first, batch_first=batch_first, activation=activation)
    module.train(train)
    check(module, [((source(b, s, batch_first),), {}) for b, s in SIZES])


ENCODER_CALLS: Dict[str, Callable[[int, int], Call]] = {
    "plain": lambda b, s: ((source(b, s),), {}),
    "mask": lambda b, s: ((source(b, s), causal(s)), {}),
    "bool mask": lambda b, s: ((source(b, s),), {"mask": causal(s).isinf()}),
    "padding": lambda b, s: ((source(b, s),), {"src_key_padding_mask": late_keys(b, s)}),
    "both": lambda b, s: ((source(b, s), causal(s).isinf(), late_keys(b, s)), {}),
    "is_causal": lambda b, s: ((source(b, s), causal(s)), {"is_causal": True}),
}


@pytest.mark.parametrize(
    "call, train",
    [
        *((call, True) for call in ENCODER_CALLS),
        *(("plain", False), ("both", False)),
        *(
            pytest.param(call, False, marks=pytest.mark.slow)
            for call in ENCODER_CALLS
            if call not in ("plain", "both")
        ),
    ],
)
def test_encoder(call: str, train: bool) -> None:
    norm = nn.LayerNorm(12).double()
    module = nn.TransformerEncoder(encoder_layer(nhead=2), 2, norm=norm).train(train)
    captured = check(module, [ENCODER_CALLS[call](b, s) for b, s in SIZES])
    assert operations(captured).count("attention") == 2


def test_encoder_that_pads_with_zeros_is_refused() -> None:
    """Without gradients nn.TransformerEncoder gives zeros at padded positions."""
    module = nn.TransformerEncoder(encoder_layer(nhead=2), 2).eval()
    args = (source(2, 5),)
    with torch.no_grad(), pytest.raises(CaptureError, match="enable_nested_tensor=False"):
        capture_graph(module, args, {"src_key_padding_mask": late_keys(2, 5)})
    captured = capture_graph(module, args, {"src_key_padding_mask": late_keys(2, 5)})
    assert captured.guards.grad_enabled is True


def test_decoder() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, dropout=0.0, batch_first=True).double()
    module = nn.TransformerDecoder(layer, 2)
    check(module, [((source(b, s), source(b, s + 3)), {"tgt_mask": causal(s)}) for b, s in SIZES])


def attention_module(**options: Any) -> nn.MultiheadAttention:
    settings = dict(embed_dim=12, num_heads=3, batch_first=True)
    module = nn.MultiheadAttention(**{**settings, **options}).double()
    for parameter in module.parameters():  # biases start at zero, where mistakes do not show
        nn.init.normal_(parameter, std=0.3)
    return module


def same(x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    return (x, x.clone(), x.clone())


@pytest.mark.parametrize("need_weights", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": False},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": False},
    ],
    ids=str,
)
def test_mha_construction(options: Dict[str, Any], need_weights: bool) -> None:
    module = attention_module(**options)
    first = options.get("batch_first", True)
    check(module, [(same(source(b, s, first)), {"need_weights": need_weights}) for b, s in SIZES])


@pytest.mark.parametrize("need_weights", [True, False])
def test_mha_cross(need_weights: bool) -> None:
    module = attention_module(kdim=8, vdim=10)

    def call(b: int, s: int) -> Call:
        keys, values = torch.randn(b, s + 2, 8).double(), torch.randn(b, s + 2, 10).double()
        return (source(b, s), keys, values), {"need_weights": need_weights}

    check(module, [call(b, s) for b, s in SIZES])


MHA_MASKS: Dict[str, Callable[[int, int], Dict[str, Any]]] = {
    "padding": lambda b, s: {"key_padding_mask": late_keys(b, s)},
    "float padding": lambda b, s: {
        "key_padding_mask": torch.zeros(b, s).double().masked_fill(late_keys(b, s), -1e4)
    },
    "float": lambda b, s: {"attn_mask": torch.randn(s, s).double()},
    "bool": lambda b, s: {"attn_mask": causal(s).isinf()},
    "float 3-D": lambda b, s: {"attn_mask": torch.randn(b * 3, s, s).double()},
    "bool 3-D": lambda b, s: {"attn_mask": causal(s).isinf().expand(b * 3, s, s).clone()},
    "both": lambda b, s: {"attn_mask": causal(s), "key_padding_mask": late_keys(b, s)},
    "is_causal": lambda b, s: {"attn_mask": causal(s), "is_causal": True},
    "each head": lambda b, s: {"average_attn_weights": False},
}


@pytest.mark.parametrize("need_weights", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("masks", MHA_MASKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_mha_masks(masks: str, need_weights: bool) -> None:
    module = attention_module()
    dynamic = masks not in ("float 3-D", "bool 3-D")
    calls = [
        (same(source(b, s)), {**MHA_MASKS[masks](b, s), "need_weights": need_weights})
        for b, s in (SIZES if dynamic else SIZES[:1])
    ]
    check(module, calls, dynamic=dynamic or None)


@pytest.mark.parametrize("need_weights", [True, False])
def test_mha_unbatched(need_weights: bool) -> None:
    module = attention_module()
    lengths = (7, 5, 11)
    calls = [(same(torch.randn(s, 12).double()), {"need_weights": need_weights}) for s in lengths]
    check(module, calls)


def test_mha_in_eval_uses_the_plain_path() -> None:
    module = attention_module().eval()
    with torch.no_grad():
        check(module, [(same(source(b, s)), {"need_weights": False}) for b, s in SIZES])


# ---- plain modules ------------------------------------------------------------------------------

LAYERS: Dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(12, 9),
    "no bias": lambda: nn.Linear(12, 9, bias=False),
    "gelu": lambda: nn.GELU(),
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": lambda: nn.ReLU(),
    "relu in place": lambda: nn.Sequential(nn.Linear(12, 5), nn.ReLU(inplace=True)),
    "silu": lambda: nn.SiLU(),
    "tanh": lambda: nn.Tanh(),
    "sigmoid": lambda: nn.Sigmoid(),
    "softplus": lambda: nn.Softplus(),
    "leaky relu": lambda: nn.LeakyReLU(),
    "elu": lambda: nn.ELU(),
    "mish": lambda: nn.Mish(),
    "hardswish": lambda: nn.Hardswish(),
    "layer norm": lambda: nn.LayerNorm(12),
    "layer norm plain": lambda: nn.LayerNorm(12, elementwise_affine=False),
    "rms norm": lambda: nn.RMSNorm(12),
    "rms norm eps": lambda: nn.RMSNorm(12, eps=1e-3),
    "dropout 0": lambda: nn.Dropout(0.0),
    "softmax": lambda: nn.Softmax(dim=-1),
    "log softmax": lambda: nn.LogSoftmax(dim=1),
    "mlp": lambda: nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)),
    "group norm": lambda: nn.GroupNorm(3, 12),
    "identity": lambda: nn.Identity(),
}


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", LAYERS)
def test_layer(layer: str, train: bool) -> None:
    module = LAYERS[layer]().double().train(train)
    if layer == "group norm":
        check(module, [((torch.randn(b, 12, s).double(),), {}) for b, s in SIZES])
    else:
        check(module, [((source(b, s),), {}) for b, s in SIZES])


def test_embedding_bag_of_tokens() -> None:
    module = nn.Sequential(nn.Embedding(61, 12, padding_idx=0), nn.Linear(12, 4)).double()
    captured = check(module, [((random_ids(b, s),), {}) for b, s in SIZES])
    assert node_of(captured, "embedding")["attrs"]["padding_index"] == 0


def test_sizes_of_one_are_fixed() -> None:
    module = nn.Linear(12, 9).double()
    captured = check(module, [((source(1, 7),), {}), ((source(1, 5),), {})])
    shapes = {leaf["name"]: leaf["shape"] for leaf in json.loads(captured.json)["leaves"]}
    assert [1, "S", 12] in shapes.values()


# ---- dropout ------------------------------------------------------------------------------------


def test_each_dropout_site_has_its_own_stream() -> None:
    config = gpt2_config(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3)
    module = transformers.GPT2LMHeadModel(config).train()
    graph = json.loads(capture_graph(module, (), TEXT_CALLS["ids"](2, 7)).json)
    sites = [n for n in graph["nodes"] if "stream" in n["attrs"]]
    assert [n["attrs"]["p"] for n in sites] == [0.2, 0.3, 0.1, 0.1, 0.3, 0.1, 0.1]
    assert len({n["attrs"]["stream"] for n in sites}) == len(sites)
    seeds = [leaf for leaf in graph["leaves"] if leaf["role"] == "seed"]
    assert seeds == [{"name": "seed", "role": "seed", "dtype": "i64", "shape": [2]}]
    graph = json.loads(capture_graph(module.eval(), (), TEXT_CALLS["ids"](2, 7)).json)
    assert not [leaf for leaf in graph["leaves"] if leaf["role"] == "seed"]


def test_dropout_keeps_and_scales() -> None:
    module = nn.Dropout(0.25).train()
    x = torch.ones(64, 65)
    captured = capture_graph(module, (x,))
    y = run(captured, module, (x,), {}, seed=(7, 9))
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    kept = (y != 0).float().mean().item()
    deviation = (0.25 * 0.75 / x.numel()) ** 0.5
    assert abs(kept - 0.75) < 5 * deviation
    assert not torch.equal(y, run(captured, module, (x,), {}, seed=(7, 10)))
    assert torch.equal(y, run(captured, module, (x,), {}, seed=(7, 9)))


# ---- what can be captured -----------------------------------------------------------------------


def test_one_tensor_as_two_arguments() -> None:
    """One tensor passed twice is one input, because a forward may ask `x is y`; two tensors are two
    inputs."""
    module = transformers.GPT2LMHeadModel(gpt2_config(n_layer=1)).double()
    ids = random_ids(2, 7)
    captured = capture_graph(module, (), {"input_ids": ids, "labels": ids})
    other = random_ids(3, 5)
    kwargs = {"input_ids": other, "labels": other}
    assert_same(run(captured, module, (), kwargs), module(**kwargs))
    captured = capture_graph(module, (), {"input_ids": ids, "labels": ids.clone()})
    kwargs = {"input_ids": other, "labels": random_ids(3, 5)}
    assert_same(run(captured, module, (), kwargs), module(**kwargs))


def test_meta_device() -> None:
    config = llama_config(hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    captured = capture_graph(module, (), TEXT_CALLS["labels"](2, 7))
    assert captured.dynamic and operations(captured).count("attention") == 2


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = transformers.GPT2LMHeadModel(gpt2_config())
        captured = capture_graph(module, (), {"input_ids": torch.zeros(2, 7, dtype=torch.long)})
    assert captured.dynamic and operations(captured).count("attention") == 2
    module = transformers.GPT2LMHeadModel(gpt2_config())
    with FakeTensorMode():
        ids = torch.zeros(2, 7, dtype=torch.long)
    assert capture_graph(module, (ids,)).dynamic


def test_make_fx_is_the_fallback_of_export(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepwell.lowering.trace import Tracer

    def export(self: Any, axes: str) -> None:
        raise RuntimeError("no export today")

    monkeypatch.setattr(Tracer, "export", export)
    module = transformers.LlamaForCausalLM(llama_config()).double()
    captured = capture_graph(module, (), TEXT_CALLS["labels"](2, 7))
    assert captured.method == "make_fx" and captured.dynamic
    for b, s in SIZES:
        kwargs = TEXT_CALLS["labels"](b, s)
        assert_same(run(captured, module, (), kwargs), module(**kwargs))
    modules = {n["module"] for n in json.loads(captured.json)["nodes"]}
    assert "model.layers.1.self_attn.q_proj" in modules


class Function(nn.Module):
    """Makes a module from a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def test_output_structure() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, flag: bool) -> Any:
        z = x + y
        return {"z": z, "again": [z, x, None, flag, 3.5], "size": x.shape[0] * 2, "text": "t"}

    module = Function(function)
    args = (torch.randn(4, 3), torch.randn(4, 3), True)
    captured = capture_graph(module, args)
    got = run(captured, module, args, {})
    assert_same(got, module(*args))
    assert got["again"][0] is got["z"] and got["again"][1] is args[0]
    longer = (torch.randn(5, 3), torch.randn(5, 3), True)
    assert run(captured, module, longer, {})["size"] == 10
    assert operations(captured) == ["add"]


def test_keyword_order_and_nesting() -> None:
    module = Function(lambda pair, *, b, a: pair["x"] - a * b[0])
    kwargs = {"a": torch.randn(3), "b": [torch.randn(3)]}
    args = ({"x": torch.randn(3)},)
    captured = capture_graph(module, args, kwargs)
    assert_same(run(captured, module, args, kwargs), module(*args, **kwargs))
    targets = [leaf.target for leaf in captured.leaves]
    assert targets == ["[0][0]['x']", "[1]['a']", "[1]['b'][0]"]


def test_parameter_as_output() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(3))
    module.forward = lambda x: (x * module.weight, module.weight)
    captured = capture_graph(module, (torch.randn(3),))
    assert run(captured, module, (torch.randn(3),), {})[1] is module.weight


def test_tensors_that_are_neither_parameters_nor_buffers() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(3.0)
            self.factor = torch.tensor(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table * self.factor + torch.tensor([1.0, 5.0, 2.0]) - torch.tensor(4.0)

    module = Tables()
    x = torch.randn(4, 3)
    captured = capture_graph(module, (x,))
    assert_same(run(captured, module, (x,), {}), module(x))
    module.table.add_(1)
    module.factor.mul_(3)
    assert_same(run(captured, module, (x,), {}), module(x))


def test_static_capture_on_request() -> None:
    module = nn.Linear(12, 3).double()
    captured = capture_graph(module, (source(2, 7),), dynamic=False)
    assert captured.symbols == [] and not captured.dynamic
    assert_same(run(captured, module, (source(2, 7),), {}), module(source(2, 7)), 100)


def test_detached_values_get_no_gradient() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.sum()
        return x.detach() * 2 + x * scale

    captured = capture_graph(Function(function), (torch.randn(3, 4),))
    x = torch.randn(5, 4, dtype=torch.float32, requires_grad=True)
    (want,) = torch.autograd.grad(function(x).sum(), x)
    (got,) = torch.autograd.grad(run(captured, Function(function), (x,), {}).sum(), x)
    torch.testing.assert_close(got, want)


# ---- rejected modules ---------------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x)[0]


def test_unsupported_operation_names_operation_and_module() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Inner()))
    with pytest.raises(CaptureError) as caught:
        capture_graph(module, (torch.randn(4, 4),))
    assert "svd" in caught.value.operation and caught.value.module_path == "1.0"
    assert "svd" in str(caught.value) and "'1.0'" in str(caught.value)
    assert "runs in PyTorch" in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > 0],
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x * x.max().item(),
    ],
)
def test_data_dependence_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError):
        capture_graph(Function(function), (torch.randn(4, 3),))


def test_batch_norm_statistics_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {n: b.clone() for n, b in module.named_buffers()}
    with pytest.raises(CaptureError, match="running_mean|num_batches_tracked|batch_norm"):
        capture_graph(module, (torch.randn(5, 4),))
    assert all(torch.equal(before[n], b) for n, b in module.named_buffers())


def test_input_mutation_is_refused() -> None:
    with pytest.raises(CaptureError, match="in place"):
        capture_graph(Function(lambda x: x.add_(1)), (torch.randn(4, 3),))


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(CaptureError, match="object"):
        capture_graph(Function(lambda x, o: x), (torch.randn(4, 3), object()))


def test_a_result_on_another_device_is_refused() -> None:
    with pytest.raises(CaptureError, match="returns a tensor on meta"):
        capture_graph(Function(lambda x: x.exp().to("meta")), (torch.randn(4, 3),))


def test_autocast_is_captured() -> None:
    """The operands of a linear layer are cast, once each, and a loss that autocast computes in float32 is as well."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, y):
            z = self.layer(x)
            return z, nn.functional.mse_loss(z, y)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture_graph(Loss(), (torch.randn(3, 4), torch.randn(3, 4)))
    graph = json.loads(captured.json)
    text = _deepwell.Graph(captured.json).text()
    types = dict(re.findall(r"%(\w+): (\w+)\[", text))
    (linear,) = [node for node in graph["nodes"] if node["op"] == "linear"]
    assert {types[name] for name in linear["inputs"] if name is not None} == {"bf16"}
    assert [types[name] for name in graph["outputs"]] == ["bf16", "f32"]


# ---- operations ---------------------------------------------------------------------------------


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += 1
    y.mul_(x)
    y[:, 0] = 0  # through a view
    return y.clamp_(min=-1)


def _written_apart(x: torch.Tensor) -> Any:
    """Tensors of equal content that are written separately."""
    zeros, more = (torch.zeros(3, 12, dtype=torch.float64) for _ in range(2))
    ones, others = (torch.ones(x.shape[1], 12, dtype=torch.float64) for _ in range(2))
    zeros += x[0, :1]
    others.mul_(5)
    return zeros, more, ones, others, x * ones + others + more[0]


def _slices_written(x: torch.Tensor) -> Any:
    y, z = x.clone(), x.clone()
    y[:, 1:3] = 0.5
    y[..., :4] = x[..., 8:]
    y[..., 4:] *= 2
    z[:, -2:] = x[:, :2]
    z[..., 3:7] = z[..., 5:9].clone()
    return y, z


def _indices_written(x: torch.Tensor) -> Any:
    y, z, w = x.clone(), x.clone(), x.clone()
    y[..., 1:] = x[..., :-1]
    y[..., 0] = 7  # as decoders shift their input
    z[:, -1] *= 2
    z[:, 0, 3] = z[:, 1, 2]  # a part of a part
    row = w[:, 0]
    row += 1
    return y, z, row, w.cumsum(1), w[:, 0]


def _views_written(x: torch.Tensor) -> Any:
    """Views that are kept while they and their bases are written."""
    y, z, w = x.clone(), x.new_zeros(x.shape[0], 20), x.clone()
    part = y[:, 1:]
    part.add_(1)
    part.mul_(y[:, :1])  # reads y before the write
    whole = y * 2
    part[..., :5] = 3  # a view of a view
    first, second = z[:, :12], z[:, 12:]
    first.copy_(x[:, 0])
    z[:, 10:15].sub_(4)  # over both halves
    second += 1  # z sees it, because second holds z's memory
    w[:, 2:] = w[:, :-2].flip(1)
    return y, part, whole, z, first, second, w.mul_(w[..., ::2].sum())


def _scattered(x: torch.Tensor) -> Any:
    """Scatters to positions, some of which occur twice."""
    places = x.argsort(-1)[..., :5] % 4
    return x.scatter(-1, places, 7.0), x.scatter_add(-1, places, x[..., 2:7])


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], -1, 4, 3).transpose(1, 2)


OPERATIONS: Dict[str, Callable[[torch.Tensor], Any]] = {
    "slices": lambda x: (x[:, 1:], x[:, :-1], x[..., ::2], x[:, -3:-1], x[0], x[:, None, 2]),
    "select": lambda x: x.select(1, -1),
    "split": lambda x: x.split(5, 2),
    "split sizes": lambda x: x.split([3, 9], dim=-1),
    "chunk": lambda x: x.chunk(5, -1),
    "unbind": lambda x: x.unbind(2)[3],
    "cat": lambda x: torch.cat([x, x[:, :1], torch.zeros_like(x)], 1),
    "stack": lambda x: torch.stack([x, x + 1], 1),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "roll": lambda x: (x.roll(1, 1), x.roll((2, -1), (1, 2)), x.roll(2, 0), x.roll(-5, 1)),
    "flip": lambda x: x.flip(1),
    "pad": lambda x: nn.functional.pad(x, (1, 2, 0, 3), value=0.5),
    "pad cuts": lambda x: nn.functional.pad(x, (-1, 2)),
    "tril": lambda x: (x.tril(), x.triu(1), (x > 0).tril(-1)),
    "flatten": lambda x: (x.flatten(), x.flatten(1), x.unflatten(2, (3, -1))),
    "permute": lambda x: (x.permute(2, 0, 1), x.movedim(0, 2), x.mT, x.transpose(0, -1)),
    "squeeze": lambda x: (x[:, :1].squeeze(1), x.unsqueeze(-2).squeeze()),
    "expand": lambda x: x[:, :1].expand(-1, 4, -1),
    "arange": lambda x: (torch.arange(2, 20, 3), torch.arange(x.shape[1]) * 0.5),
    "full": lambda x: (x.new_full((2,), 3), torch.ones(3, dtype=torch.bool), torch.eye(3)),
    "size as tensor": lambda x: x * x.shape[1] + x.shape[0],
    "scalars": lambda x: (2 - x, 1 / (x.abs() + 1), x / 3, x // 1, x - 0.5, -x, x**2, x**3),
    "powers": lambda x: (x.abs() ** 0.5, x.abs() ** 1.5, 2.0**x, x.square()),
    "integers": lambda x: (torch.arange(9) // 2, torch.arange(-4, 5) % 3, torch.arange(4) / 2),
    "promotion": lambda x: (torch.arange(12) * x, x + torch.tensor(1.0), torch.arange(3) * 1.5,
                            torch.ones(3, dtype=torch.bool) + 1, x.float() * 2 + x),
    "comparisons": lambda x: ((x > 0) & (x <= 1), (x < 0) | (x == 1), ~(x >= 0), x != 2),
    "where": lambda x: (torch.where(x > 0, x, 0.0), x.masked_fill(x < 0, float("-inf"))),
    "extremes": lambda x: (x.max(), x.max(1), x.min(-1, keepdim=True), x.amax((0, 2)), x.argmax(1)),
    "maximum": lambda x: (torch.maximum(x, -x), x.clamp(-1, 1), x.clamp_min(0), x.argmin()),
    "reductions": lambda x: (x.sum(), x.mean((0, 1)), x.sum(-1, keepdim=True), x.prod(2)),
    "variance": lambda x: (x.var(-1), x.var(1, unbiased=False), x.std(dim=-1), x.var((0, 1))),
    "any": lambda x: ((x > 2).any(1), (x < 5).all()),
    "cumsum": lambda x: (x.cumsum(1), (x > 0).cumsum(-1), x.diff(dim=1)),
    "sort": lambda x: (x.sort(-1), x.sort(1, descending=True).values),
    "topk": lambda x: x.topk(3, -1),
    "gather": lambda x: x.gather(2, x.argsort(-1)[:, :, :4]),
    "index": lambda x: (x[:, torch.tensor([0, 2, -1])], x[torch.tensor([[0], [1]]), :, 3]),
    "index pairs": lambda x: x[torch.arange(x.shape[0]), torch.tensor(2)],
    "index both": lambda x: x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])],
    "index last": lambda x: x[:, :, torch.tensor([[1, 0], [3, 2]])],
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 1, 0])),
    "matmul": lambda x: (x @ x.mT, x[0] @ x[0].mT, x @ torch.ones(12, 3).double(), x @ x[0, 0]),
    "products": lambda x: (torch.bmm(x.mT, x), torch.mv(x[0], x[0, 0]), x[0, 0] @ x[0].mT),
    "baddbmm": lambda x: torch.baddbmm(x[:, :1], x @ x.mT, x, beta=0.5, alpha=2),
    "einsum": lambda x: (torch.einsum("bse,bte->bst", x, x), torch.einsum("bse->eb", x),
                         torch.einsum("bse,be,t->bt", x, x[:, 0], x[0, :, 0])),
    "softmax": lambda x: (x.softmax(-1), x.log_softmax(1), x.logsumexp(-1)),
    "norm": lambda x: (x.norm(dim=-1), nn.functional.normalize(x, dim=-1)),
    "losses": lambda x: (nn.functional.mse_loss(x, x * 2), nn.functional.l1_loss(x, x.exp())),
    "sdpa": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "gqa": lambda x: nn.functional.scaled_dot_product_attention(
        _heads(x), _heads(x)[:, :2], _heads(x)[:, 2:], enable_gqa=True),
    "written": _written,
    "written apart": _written_apart,
    "slices written": _slices_written,
    "indices written": _indices_written,
    "views written": _views_written,
    "scatter": _scattered,
    "histogram": lambda x: torch.histc((2 * x).long().float(), bins=5, min=-2, max=3),
    "index by values": lambda x: torch.arange(12)[x.long().clamp(-3, 3).sort(-1).values],
    "nan": lambda x: (x.isnan(), (x / 0).isinf(), x.isfinite(), x.nan_to_num()),
    "trigonometry": lambda x: (x.sin(), x.cos(), x.erf(), x.exp(), x.expm1(), x.abs().log1p()),
    "rounding": lambda x: (x.floor(), x.ceil(), x.trunc(), x.sign(), x.to(torch.int64)),
    "patches": lambda x: (
        nn.functional.conv1d(
            x.reshape(-1, 1, 12), torch.linspace(-1, 1, 6).double().view(2, 1, 3), stride=3),
        nn.functional.conv2d(
            x[:, None], torch.linspace(-1, 1, 10).double().view(2, 1, 1, 5),
            torch.tensor([1.0, 2.0]).double(), stride=(1, 5)),
        nn.functional.conv1d(x.mT, torch.ones(4, 12, 1).double()),
    ),
    "lerp": lambda x: (x.lerp(-x, 0.3), torch.addcmul(x, x, x, value=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str) -> None:
    function = OPERATIONS[name]
    calls = [((2 * source(b, s),), {}) for b, s in SIZES]
    # Copies, because outputs that are views of an argument or of one another are rejected.
    module = Function(lambda x: pytree.tree_map_only(torch.Tensor, torch.clone, function(x)))
    check(module, calls)


def test_parts_are_written_without_a_second_trace(monkeypatch) -> None:
    def function(x: torch.Tensor) -> Any:
        y, z = x.clone(), x.new_empty(x.shape[0], 20)
        part = y[:, 1:][..., 2:7]
        part.add_(1)
        part.mul_(y[:, :1, :5])
        part[:, :1] *= 3  # a part of it
        z[:, :12].copy_(x[:, 0])
        z[:, 12:] = x[:, 1, :8]
        z[:, 0] = 1
        y[:, 1, 2].neg_()
        return y, z.mul_(2), y[:, 1:] + 1

    def refused(*args: Any) -> None:
        raise AssertionError("run_decompositions")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", refused)
    captured = check(Function(function), [((source(b, s),), {}) for b, s in SIZES])
    assert captured.method == "export"


LOSSES: List[Dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.2, "ignore_index": 0, "reduction": "sum"},
]


@pytest.mark.parametrize("options", LOSSES, ids=str)
@pytest.mark.parametrize("extra", [False, True])
def test_cross_entropy(options: Dict[str, Any], extra: bool) -> None:
    def call(b: int, s: int) -> Call:
        shape = (b * s, 7, 3) if extra else (b * s, 7)
        target = torch.randint(0, 7, (b * s, 3) if extra else (b * s,))
        target[0] = options.get("ignore_index", -100)
        return (torch.randn(shape).double(), target), {}

    module = nn.CrossEntropyLoss(**options)
    captured = check(module, [call(b, s) for b, s in SIZES])
    assert node_of(captured, "cross_entropy")["region"] == "loss"


def test_nll_of_log_softmax() -> None:
    module = Function(lambda x, t: nn.functional.nll_loss(x.log_softmax(1), t))
    calls = [((torch.randn(b, 5).double(), torch.randint(0, 5, (b,))), {}) for b in (4, 3, 9)]
    assert "cross_entropy" in operations(check(module, calls))


# ---- masks in closed form -----------------------------------------------------------------------


def _masked(make: Callable[[int, int], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mask = make(q.shape[-2], k.shape[-2])
        return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    return function


def _index(n: int) -> torch.Tensor:
    return torch.arange(n)


@pytest.mark.parametrize(
    "make, causal, window, keys",
    [
        (lambda q, k: _index(k)[None] <= _index(q)[:, None], 1, -1, 0),
        (lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(), 1, -1, 0),
        (lambda q, k: ~(_index(k)[None] > _index(q)[:, None]), 1, -1, 0),
        (lambda q, k: _index(k)[None] <= _index(q)[:, None] + (k - q), 2, -1, 4),
        (lambda q, k: (_index(k)[None] <= _index(q)[:, None])
         & (_index(k)[None] > _index(q)[:, None] - 3), 1, 3, 0),
        (lambda q, k: torch.ones(q, k, dtype=torch.bool), 0, -1, 0),
    ],
)  # fmt: skip
def test_masks_that_need_no_memory(make: Any, causal: int, window: int, keys: int) -> None:
    module = Function(_masked(make))
    calls = [
        ((torch.randn(b, 2, s, 4).double(), torch.randn(b, 2, s + keys, 4).double()), {})
        for b, s in SIZES
    ]
    captured = check(module, calls, dynamic=None)
    node = node_of(captured, "attention")
    assert node["inputs"][3] is None
    assert node["attrs"]["causal"] == causal and node["attrs"].get("window", -1) == window
