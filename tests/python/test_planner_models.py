"""Models by config.json: compares the planner's count of parameters with transformers' own classes,
on the meta device."""

import json
import time
from pathlib import Path
from random import Random
from typing import Any

import deepwell
import pytest
import torch
import transformers
from deepwell import _deepwell

PLAIN = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 144,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
}
GROUPED = PLAIN | {"num_key_value_heads": 2}
MIXTURE = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
LATENT = MIXTURE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 20,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {name: value for name, value in LATENT.items() if name != "head_dim"}
GPT2 = {
    "vocab_size": 320,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 48,
    "pad_token_id": 0,
}
HYBRID = MIXTURE | {
    "num_hidden_layers": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 20,
    "n_groups": 2,
    "n_routed_experts": 8,
    "moe_shared_expert_intermediate_size": 56,
}

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 20, "mamba_n_groups": 2}

CASES = [
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 100, "tie_word_embeddings": False}),
    ("gpt_bigcode", GPT2),
    ("gpt_bigcode", GPT2 | {"multi_query": False}),
    ("gpt_neox", PLAIN),
    ("gpt_neox", PLAIN | {"attention_bias": False}),
    ("gptj", GPT2 | {"rotary_dim": 4}),
    ("opt", PLAIN | {"ffn_dim": 144, "word_embed_proj_dim": 64}),
    ("bloom", {"vocab_size": 320, "hidden_size": 64, "n_layer": 4, "n_head": 4, "pad_token_id": 0}),
    ("mpt", {"vocab_size": 320, "d_model": 64, "n_layers": 4, "n_heads": 4}),
    ("falcon", PLAIN),
    ("falcon", PLAIN | {"multi_query": False, "bias": True, "parallel_attn": False}),
    ("falcon", PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("phi", PLAIN),
    ("starcoder2", GROUPED),
    ("starcoder2", GROUPED | {"use_bias": False}),
    ("nemotron", GROUPED),
    ("nemotron", GROUPED | {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("llama", GROUPED),
    (
        "llama",
        GROUPED
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    ("mistral", GROUPED | {"head_dim": 24}),
    ("qwen2", GROUPED),
    ("qwen3", GROUPED | {"head_dim": 24}),
    ("qwen3", GROUPED | {"attention_bias": True}),
    ("phi3", GROUPED),
    ("gemma", GROUPED | {"head_dim": 24}),
    ("gemma2", GROUPED | {"head_dim": 24}),
    ("gemma3_text", GROUPED | {"head_dim": 24}),
    ("olmo", GROUPED),
    ("olmo2", GROUPED),
    ("olmo3", GROUPED),
    ("cohere", GROUPED),
    ("cohere", GROUPED | {"use_qk_norm": True}),
    ("cohere2", GROUPED),
    ("glm", GROUPED | {"head_dim": 16}),
    ("glm4", GROUPED | {"head_dim": 16, "attention_bias": True}),
    ("granite", GROUPED),
    ("granite", GROUPED | {"mlp_bias": True, "attention_bias": True}),
    ("smollm3", GROUPED),
    ("mixtral", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ("qwen2_moe", MIXTURE | {"num_experts": 6, "shared_expert_intermediate_size": 72}),
    (
        "qwen2_moe",
        MIXTURE
        | {"num_experts": 6, "shared_expert_intermediate_size": 72, "decoder_sparse_step": 2},
    ),
    ("qwen3_moe", MIXTURE | {"num_experts": 6}),
    ("qwen3_moe", MIXTURE | {"num_experts": 6, "mlp_only_layers": [0, 2]}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", LATENT | {"attention_bias": True}),
    ("glm4_moe", MIXTURE | {"n_routed_experts": 6, "n_shared_experts": 1}),
    (
        "glm4_moe",
        MIXTURE
        | {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
        },
    ),
    (
        "gpt_oss",
        GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24},
    ),
    ("olmoe", GROUPED | {"num_experts": 6, "num_experts_per_tok": 2}),
    ("granitemoe", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    (
        "llama4_text",
        GROUPED
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 200,
            "head_dim": 16,
            "interleave_moe_layer_step": 2,
        },
    ),
    (
        "gpt_neo",
        {"vocab_size": 320, "hidden_size": 64, "num_layers": 4, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 2]], "max_position_embeddings": 48},
    ),
    ("codegen", GPT2 | {"rotary_dim": 4}),
    ("ctrl", GPT2 | {"dff": 144}),
    ("biogpt", PLAIN),
    (
        "xglm",
        {"vocab_size": 320, "d_model": 64, "num_layers": 4, "attention_heads": 4, "ffn_dim": 144},
    ),
    ("jais2", PLAIN),
    ("arcee", GROUPED),
    ("nanochat", GROUPED),
    ("vaultgemma", GROUPED | {"head_dim": 24}),
    ("exaone4", GROUPED),
    ("hunyuan_v1_dense", GROUPED | {"head_dim": 16}),
    ("hyperclovax", GROUPED),
    ("bitnet", GROUPED),
    ("seed_oss", GROUPED | {"head_dim": 24}),
    ("stablelm", GROUPED | {"use_qkv_bias": True}),
    ("ernie4_5", GROUPED | {"use_bias": True}),
    ("granite_swa", GROUPED),
    ("phimoe", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ("minimax_m2", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24}),
    ("afmoe", MIXTURE | {"num_experts": 6, "num_shared_experts": 2, "num_dense_layers": 2}),
    (
        "dots1",
        MIXTURE
        | {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1},
    ),
    (
        "ernie4_5_moe",
        GROUPED
        | {"moe_intermediate_size": 40, "moe_k": 2, "moe_num_experts": 6}
        | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 3},
    ),
    ("flex_olmo", GROUPED | {"num_experts": 6, "num_experts_per_tok": 2}),
    ("glm4_moe_lite", LATENT),
    ("deepseek_v32", LATENT | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 16}),
    ("qwen3_next", MIXTURE | DELTA | {"num_experts": 6, "shared_expert_intermediate_size": 72}),
    ("qwen3_5_text", GROUPED | DELTA | {"head_dim": 16}),
    ("olmo_hybrid", GROUPED | DELTA),
    (
        "kimi_linear",
        LATENT
        | {"linear_num_heads": 4, "linear_head_dim": 12, "num_experts": 6}
        | {
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
    ("jamba", GROUPED | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}),
    ("bamba", GROUPED | MAMBA | {"attn_layer_indices": [1, 3]}),
    (
        "granitemoehybrid",
        GROUPED
        | MAMBA
        | {"num_local_experts": 6, "num_experts_per_tok": 2}
        | {
            "layers_block_type": ["mamba", "attention", "mamba", "mamba"],
            "shared_intermediate_size": 56,
        },
    ),
    (
        "granitemoehybrid",
        GROUPED
        | MAMBA
        | {"num_local_experts": 0, "num_experts_per_tok": 0}
        | {
            "layers_block_type": ["mamba", "attention", "mamba", "mamba"],
            "shared_intermediate_size": 56,
        },
    ),
    ("falcon_h1", GROUPED | MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True}),
    ("minimax", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ("lfm2", GROUPED | {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    (
        "lfm2_moe",
        {name: value for name, value in MIXTURE.items() if name != "head_dim"}
        | {"layer_types": ["conv", "full_attention", "conv", "conv"]}
        | {"num_experts": 6, "num_dense_layers": 1},
    ),
    ("recurrent_gemma", PLAIN | {"lru_width": 64, "attention_window_size": 16}),
    ("bert", PLAIN),
    ("roberta", PLAIN | {"type_vocab_size": 1}),
    ("nemotron_h", HYBRID | {"hybrid_override_pattern": "M-M*M-"}),
    ("nemotron_h", HYBRID | {"hybrid_override_pattern": "MEM*ME", "use_bias": True}),
    ("nemotron_h", HYBRID | {"hybrid_override_pattern": "ME-*ME", "moe_latent_size": 32}),
]


def build(family: str, sizes: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(family, **sizes)
    encoder = family in ("bert", "roberta")
    kind = transformers.AutoModelForMaskedLM if encoder else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def counted(model: Any) -> tuple[int, int]:
    """Counts all parameters, and those that a token uses, from names and shapes."""
    config = model.config.get_text_config()
    tied = config.tie_word_embeddings
    experts = next(
        (
            getattr(config, name)
            for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
            if getattr(config, name, None)
        ),
        0,
    )
    total, active = 0, 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if parameter is model.get_input_embeddings().weight and not tied:
            continue
        looked_up = ("wpe", "embed_positions", "position_embeddings", "token_type_embeddings")
        if any(part in name for part in looked_up):
            continue
        routed = ".experts." in name or "block_sparse_moe.input_linear" in name
        routed = routed and "self_attn" not in name
        routed = routed or "block_sparse_moe.output_linear" in name
        if routed:
            assert parameter.shape[0] == experts
            chosen = next(
                getattr(config, name)
                for name in ("num_experts_per_tok", "num_experts_per_token", "moe_k")
                if getattr(config, name, None)
            )
            active += parameter.numel() // experts * chosen
        else:
            active += parameter.numel()
    return total, active


@pytest.mark.parametrize(
    ("family", "sizes"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_parameters_are_those_of_transformers_class(family: str, sizes: dict[str, Any]) -> None:
    model = build(family, sizes)
    planned = _deepwell.planner_model_parse(model.config.to_json_string())
    assert (planned["parameters"], planned["active"]) == counted(model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "falcon"])
def test_published_configurations_are_read(family: str, tmp_path: Any) -> None:
    """Tests a saved folder, and the bare fields that older files have."""
    sizes = next(case for name, case in CASES if name == family)
    model = build(family, sizes)
    model.config.save_pretrained(tmp_path)
    saved = _deepwell.planner_model(str(tmp_path))
    assert saved["parameters"] == counted(model)[0]
    bare = _deepwell.planner_model_parse(json.dumps(sizes | {"model_type": family}))
    if family == "llama":
        assert bare == saved


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mistral"])
def test_absent_fields_have_the_defaults_of_the_class(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    bare = _deepwell.planner_model_parse(json.dumps({"model_type": family}))
    assert bare == _deepwell.planner_model_parse(config.to_json_string(use_diff=False))
    assert (bare["parameters"], bare["active"]) == counted(model)


# transformers lists these classes; each is planned to within one hundredth, or rejected with its reason.
CAUSAL = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
BEYOND_TEXT = {"gemma3", "got_ocr2", "moss_transcribe_diarize"}  # towers for images and sound


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(CAUSAL))
def test_every_class_with_a_language_model_head(family: str) -> None:
    """Tests the configuration that the class has by default, which is that of its first model."""
    kind = getattr(
        transformers, CAUSAL[family] if isinstance(CAUSAL[family], str) else CAUSAL[family][0]
    )
    try:
        config = kind.config_class()
        with torch.device("meta"):
            total = sum(parameter.numel() for parameter in kind(config).parameters())
    except Exception as error:  # the class rejects its own default, so there is nothing to compare
        pytest.skip(f"{type(error).__name__}: {str(error)[:80]}")
    try:
        planned = _deepwell.planner_model_parse(config.to_json_string(use_diff=False))
    except _deepwell.Error as error:
        assert len(str(error)) > 30
        return
    if family not in BEYOND_TEXT:
        assert planned["parameters"] == pytest.approx(total, rel=0.01)
    assert 0 < planned["active"] <= planned["parameters"]


# Families whose graphs the planner reads; capture or the planner rejects the others with a reason.
QUICK = ["gpt2", "llama", "gemma3_text", "deepseek_v3"]
SLOW = [
    "gpt_bigcode gpt_neox gptj opt phi starcoder2 nemotron mistral qwen2 qwen3 phi3 gemma gemma2 olmo olmo2 olmo3",
    "cohere cohere2 glm glm4 granite smollm3 mixtral qwen2_moe qwen3_moe glm4_moe olmoe granitemoe",
]
GRAPHS: list[Any] = QUICK + [
    pytest.param(family, marks=pytest.mark.slow) for family in " ".join(SLOW).split()
]


def pairs(model: dict[str, Any], length: int) -> float:
    """Returns the (query, key) pairs of one head that a causal mask and windows leave, in all
    layers."""
    window = model["window"]
    full = length * (length + 1) / 2
    windowed = full if not window else sum(min(at + 1, window) for at in range(length))
    return (model["layers"] - model["window_layers"]) * full + model["window_layers"] * windowed


def check_work(
    planned: dict[str, Any], ir: Any, batch: int, length: int, shared_gates: int
) -> None:
    """The planner's operations are the graph's, forward and backward, each by the operation table.

    Products to the last one. Attention by the pairs that are seen: the table counts the whole diagonal where the
    planner counts half of it.
    """
    sizes = {"B": batch, "S": length}
    graph = _deepwell.planner_graph_work(ir.json(), tuple(sizes[name] for name in ir.symbols), True)
    model = _deepwell.planner_model_work(planned, batch, length)
    # No width of the planner describes it.
    gates = 2 * batch * length * shared_gates * planned["hidden"]
    assert graph["gemm"] == model["gemm"] + gates
    assert graph["backward_gemm"] == model["backward_gemm"] + 2 * gates
    key = planned["head_dim"] + planned["rope_dim"]
    value = planned["value_dim"] or planned["head_dim"]
    each = 2 * batch * planned["heads"] * pairs(planned, length)
    assert graph["attention"] == each * (key + value)
    assert graph["backward_attention"] == each * (3 * key + 2 * value)
    # Adds the diagonal's other half: one token for each query, for each query within the window.
    excess = each / pairs(planned, length) * (key + value) / 2
    window = min(planned["window"] or length, length)
    diagonal = (planned["layers"] - planned["window_layers"]) * length + planned[
        "window_layers"
    ] * window
    assert graph["attention"] - model["attention"] == pytest.approx(excess * diagonal, rel=1e-9)


@pytest.mark.parametrize("family", GRAPHS)
def test_a_captured_graph_is_the_same_model(family: str) -> None:
    model = build(family, next(case for name, case in CASES if name == family))
    planned = _deepwell.planner_model_parse(model.config.to_json_string())
    ir = deepwell.capture(model)
    captured = _deepwell.planner_model_of_graph(ir.json())
    if family in ("qwen2_moe", "qwen3_moe"):
        planned["ffn"] = captured["ffn"]  # the number of dense layers, which are absent here
    assert captured == planned
    gates = planned["layers"] if family == "qwen2_moe" else 0
    check_work(planned, ir, 2, 40, gates)
    check_work(planned, ir, 1, 5000 if planned["window"] else 7, gates)


# Returns the publishers' config.json, written here independently of the catalogue.
SEVEN = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
SEVEN |= {"num_hidden_layers": 32, "vocab_size": 32000}
REAL = {
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "mistral-7b": ("mistral", SEVEN | {"sliding_window": 4096}),
    "llama3-8b": ("llama", SEVEN | {"vocab_size": 128256}),
    "qwen3-8b": (
        "qwen3",
        SEVEN
        | {
            "num_hidden_layers": 36,
            "intermediate_size": 12288,
            "vocab_size": 151936,
            "head_dim": 128,
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        SEVEN | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        }
        | {"vocab_size": 102400, "intermediate_size": 10944, "moe_intermediate_size": 1408}
        | {
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        }
        | {
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
        }
        | {"v_head_dim": 128, "n_group": 1, "topk_group": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_model_by_name_by_config_and_captured(name: str) -> None:
    """A model by name, by config.json, and captured on the meta device: the operations are the
    same."""
    family, sizes = REAL[name]
    model = build(family, sizes)
    named = _deepwell.planner_model(name)
    assert _deepwell.planner_model_parse(model.config.to_json_string()) == named
    start = time.monotonic()
    ir = deepwell.capture(model)
    text = ir.json()
    captured = time.monotonic() - start
    assert _deepwell.planner_model_of_graph(text) == named
    check_work(named, ir, 2, 6144, 0)
    assert captured < 60 and time.monotonic() - start < 120  # 4 to 25 seconds on two quiet cores


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpt", "gpt_oss"))]
)
def test_attention_with_sinks_alibi_and_encoders(family: str) -> None:
    """Attention with sinks or alibi, which consists of single operations, and an encoder's: the
    same widths, with all pairs."""
    model = build(family, next(case for name, case in CASES if name == family))
    planned = _deepwell.planner_model_parse(model.config.to_json_string())
    ir = deepwell.capture(model)
    captured = _deepwell.planner_model_of_graph(ir.json())
    for field in ("window", "window_every", "window_layers"):
        planned[field] = 0  # in a graph it is an ordinary mask
    assert captured == planned
    sizes = {"B": 2, "S": 40}
    graph = _deepwell.planner_graph_work(ir.json(), tuple(sizes[name] for name in ir.symbols), True)
    work = _deepwell.planner_model_work(planned, 2, 40)
    # The layer in front of its head.
    transform = 2 * 2 * 40 * planned["hidden"] ** 2 if family == "bert" else 0
    assert graph["gemm"] == work["gemm"] + transform
    assert graph["backward_gemm"] == work["backward_gemm"] + 2 * transform
    assert graph["attention"] == 2 * work["attention"]
    # Attention as single operations saves its scores and does not recompute them: four matmuls, not
    # five.
    again = 1 if family == "bert" else 4 / 5
    assert graph["backward_attention"] == pytest.approx(2 * again * work["backward_attention"])


GRAPHS_OF_THE_CORPUS = sorted(
    (Path(__file__).parents[1] / "fuzz" / "corpus" / "planner_graph").glob("*.json")
)


def spoil(graph: Any, random: Random) -> None:
    """Corrupts one part of a graph in place: a size, a layer, an attribute, an edge, or a whole
    node."""
    node = random.choice(graph["nodes"])
    match random.randrange(8):
        case 0:
            node["layer"] = random.choice([-5, 1, 7, 65535, 65536, 2**31, "first", None])
        case 1:
            leaf = random.choice(graph["leaves"])
            leaf["shape"] = [
                random.choice([0, 1, -1, 2**31, 2**62, "B", "S*S"]) for _ in leaf["shape"]
            ]
        case 2:
            leaf = random.choice(graph["leaves"])
            leaf["role"] = random.choice(["parameter", "input", "constant", "seed", "what"])
        case 3:
            node["op"] = random.choice(
                ["linear", "attention", "embedding", "softmax", "matmul", "add"]
            )
        case 4:
            node["region"] = random.choice(["attn", "mlp", "router", "experts", "none", 3])
        case 5:
            graph["nodes"].remove(node)
        case 6:
            inputs = node.get("inputs") or [None]
            inputs[random.randrange(len(inputs))] = random.choice([None, "nothing", 0, 10**9])
        case 7:
            attributes = node.get("attrs") or {}
            for name in list(attributes):
                attributes[name] = random.choice([0, -1, 2**40, "x", [1, 2], None, 1e308])


@pytest.mark.parametrize("path", GRAPHS_OF_THE_CORPUS, ids=lambda path: path.stem)
def test_corrupted_graphs_are_rejected_or_valid(path: Path) -> None:
    """A corrupted graph gives a model with positive sizes, or one line with the reason why not."""
    text = path.read_text()
    refused = 0
    for seed in range(150):
        graph = json.loads(text)
        random = Random(seed)
        for _ in range(1 + seed % 3):
            spoil(graph, random)
        for spoiled in (json.dumps(graph), text[: random.randrange(len(text))]):
            try:
                model = _deepwell.planner_model_of_graph(spoiled)
                assert model["layers"] > 0 and model["parameters"] > 0 and model["active"] > 0
            except _deepwell.Error as error:
                refused += 1
                assert 20 < len(str(error)) < 1500 and "\n" not in str(error)
    # Each corruption truncates at least one number, except for a rare whole one.
    assert refused > 150


def names() -> list[str]:
    return [name for name, _ in _deepwell.planner_model_names()]


def test_the_catalogue_is_listed() -> None:
    assert len(set(names())) == len(names()) > 90
    assert {"llama3-405b", "deepseek-v3", "gpt3-175b"} <= set(names())


def test_unknown_names_are_reported() -> None:
    with pytest.raises(_deepwell.Error, match="similar names: llama3-70b"):
        _deepwell.planner_model("llama3-71b")
