"""Captured graphs against the modules they came from, in FP64, at several sizes."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from deepwell import _deepwell
from deepwell.capture import Captured, CaptureError, capture_graph
from graph_eval import evaluate

# ---- running a capture --------------------------------------------------------------------------


def run(captured: Captured, module: nn.Module, args: Sequence[Any], kwargs: Dict[str, Any],
        seed: Tuple[int, int] = (1, 2)) -> Any:
    """The captured graph in place of module(*args, **kwargs), by the oracle."""
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
    got_flat, got_spec = pytree.tree_flatten(got)
    want_flat, want_spec = pytree.tree_flatten(want)
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


def check(module: nn.Module, calls: Sequence[Call], tolerance: float = 1e-9,
          dynamic: Optional[bool] = True) -> Captured:
    """Captures at the first call's sizes; the one capture must be right for all calls."""
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
            assert_same(run(captured, module, args, kwargs), _fresh(module, args, kwargs), tolerance)
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


def llama_config(**changes: Any) -> Any:
    settings = dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
        intermediate_size=40, vocab_size=61, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaConfig(**{**settings, **changes})


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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("call", TEXT_CALLS)
def test_gpt2_lm(call: str, train: bool) -> None:
    module = transformers.GPT2LMHeadModel(gpt2_config()).double().train(train)
    captured = check(module, [((), TEXT_CALLS[call](b, s)) for b, s in SIZES])
    assert operations(captured).count("attention") == 2
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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("call", TEXT_CALLS)
def test_llama(call: str, train: bool) -> None:
    module = transformers.LlamaForCausalLM(llama_config()).double().train(train)
    captured = check(module, [((), TEXT_CALLS[call](b, s)) for b, s in SIZES])
    attention = node_of(captured, "attention")
    shapes = {l["name"]: l for l in json.loads(captured.json)["leaves"]}
    assert "lm_head.weight" in shapes
    assert attention["attrs"]["causal"] == (1 if call != "positions" else 0) or call == "positions"


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
@pytest.mark.parametrize("tied", [False, True])
def test_llama_rope_scaling(kind: str, tied: bool) -> None:
    scaling = {"rope_theta": 10000.0, **ROPE[kind]}
    config = llama_config(tie_word_embeddings=tied, rope_parameters=scaling)
    module = transformers.LlamaForCausalLM(config).double()
    captured = check(module, [((), TEXT_CALLS["labels"](b, s)) for b, s in SIZES])
    names = [leaf.target for leaf in captured.leaves if leaf.kind == "parameter"]
    assert ("lm_head.weight" in names) != tied
    assert len(names) == len(set(names))


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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("call", ENCODER_CALLS)
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


@pytest.mark.parametrize("need_weights", [True, False])
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


@pytest.mark.parametrize("need_weights", [True, False])
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


def test_mha_in_eval_takes_the_plain_path() -> None:
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


@pytest.mark.parametrize("train", [True, False])
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
    shapes = {l["name"]: l["shape"] for l in json.loads(captured.json)["leaves"]}
    assert [1, "S", 12] in shapes.values()
