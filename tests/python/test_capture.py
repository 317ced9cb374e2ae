"""Captured graphs against the modules they came from, in FP64, at several sizes."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

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
