"""Models by config.json: the planner's count of parameters against transformers' own classes, on the meta device."""

import json
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
    """All parameters, and those that a token meets, from names and shapes."""
    config = model.config.get_text_config()
    tied = config.tie_word_embeddings
    experts = next(
        (
            getattr(config, name)
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if getattr(config, name, None)
        ),
        0,
    )
    total, active = 0, 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if parameter is model.get_input_embeddings().weight and not tied:
            continue
        if any(part in name for part in ("wpe", "embed_positions", "position_embeddings")):
            continue
        routed = ".experts." in name or "block_sparse_moe.input_linear" in name
        routed = routed or "block_sparse_moe.output_linear" in name
        if routed:
            assert parameter.shape[0] == experts
            active += parameter.numel() // experts * config.num_experts_per_tok
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
def test_what_publishers_wrote_reads_alike(family: str, tmp_path: Any) -> None:
    """A saved folder, and the bare fields that older files have."""
    sizes = next(case for name, case in CASES if name == family)
    model = build(family, sizes)
    model.config.save_pretrained(tmp_path)
    saved = _deepwell.planner_model(str(tmp_path))
    assert saved["parameters"] == counted(model)[0]
    bare = _deepwell.planner_model_parse(json.dumps(sizes | {"model_type": family}))
    if family == "llama":
        assert bare == saved


GRAPHS: list[Any] = ["gpt2", "llama", "deepseek_v3"]
SLOW = ["gpt_neox", "opt", "mistral", "qwen3", "gemma3_text", "mixtral", "qwen3_moe"]
GRAPHS += [pytest.param(family, marks=pytest.mark.slow) for family in SLOW]


@pytest.mark.parametrize("family", GRAPHS)
def test_a_captured_graph_is_the_same_model(family: str) -> None:
    model = build(family, next(case for name, case in CASES if name == family))
    planned = _deepwell.planner_model_parse(model.config.to_json_string())
    captured = _deepwell.planner_model_of_graph(deepwell.capture(model).json())
    if family == "qwen3_moe":
        planned["ffn"] = captured["ffn"]  # of dense layers, which it has none of
    assert captured == planned


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("gpt2", GPT2), ("llama", GROUPED), ("qwen3", GROUPED | {"head_dim": 24})],
    ids=["gpt2", "llama", "qwen3"],
)
def test_operations_are_those_of_the_operation_table(family: str, sizes: dict[str, Any]) -> None:
    """A captured forward costs a third of the planner's token, and what is no product: norms, activations, rotations.

    At twice the sequence and again, what grows with its square is attention; the planner counts it by exactly half
    of the square, the table by the pairs that are visible, s (s + 1) / 2.
    """
    graph = deepwell.capture(build(family, sizes))
    planned = _deepwell.planner_model_parse(json.dumps(sizes | {"model_type": family}))
    first, second, third = (graph.cost(B=1, S=s)[0] for s in (64, 128, 192))
    squared = (third - 2 * second + first) / (2 * 64 * 64)
    width = planned["layers"] * planned["heads"] * planned["head_dim"]
    assert squared == pytest.approx(2 * width, rel=1e-9)
    products = 2 * planned["active"]  # of a token, with biases and norms, a thousandth
    linear = (first - squared * 64 * 64) / 64
    assert products < linear < 1.25 * products  # small widths: much that is no product


def names() -> list[str]:
    return [name for name, _ in _deepwell.planner_model_names()]


def test_the_catalogue_is_listed() -> None:
    assert len(set(names())) == len(names()) > 90
    assert {"llama3-405b", "deepseek-v3", "gpt3-175b"} <= set(names())


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(_deepwell.Error, match="near to it: llama3-70b"):
        _deepwell.planner_model("llama3-71b")
