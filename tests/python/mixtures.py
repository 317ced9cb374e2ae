"""Small mixtures of experts built from Hugging Face's classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 151
_BASE = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    options = dict(_BASE, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2)
    return MixtralForCausalLM(MixtralConfig(**{**options, **changes}))


def qwen3_moe(**changes: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = dict(
        _BASE,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**options, **changes}))


_LATENT = dict(
    num_key_value_heads=4,
    moe_intermediate_size=20,
    n_routed_experts=12,
    num_experts_per_tok=3,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    first_k_dense_replace=1,
    num_hidden_layers=3,
)


def deepseek_v2(**changes: Any) -> nn.Module:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    options = dict(_BASE, **{**_LATENT, "topk_method": "group_limited_greedy"})
    return DeepseekV2ForCausalLM(DeepseekV2Config(**{**options, **changes}))


def deepseek_v3(**changes: Any) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**_BASE, **_LATENT, **changes}))


def qwen2_moe(**changes: Any) -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    options = dict(
        _BASE,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=36,
        norm_topk_prob=False,
        mlp_only_layers=[],
    )
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**options, **changes}))


def olmoe(**changes: Any) -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    options = dict(_BASE, num_key_value_heads=2, num_experts=6, num_experts_per_tok=3)
    return OlmoeForCausalLM(OlmoeConfig(**{**options, **changes}))


def gpt_oss(**changes: Any) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    options = dict(
        _BASE,
        num_key_value_heads=2,
        head_dim=12,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    )
    return GptOssForCausalLM(GptOssConfig(**{**options, **changes}))


def llama4(**changes: Any) -> nn.Module:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    options = dict(
        _BASE,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size_mlp=64,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        attention_chunk_size=64,
        no_rope_layers=[1, 0],
    )
    return Llama4ForCausalLM(Llama4TextConfig(**{**options, **changes}))


def spread(model: nn.Module) -> nn.Module:
    """Makes routers choose clearly: random weights leave their scores nearly equal, and rounding may then
    decide the choice. PyTorch runs the loop over experts, which works in FP64.
    """
    model.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name or "router" in name:
            with torch.no_grad():
                parameter.normal_(generator=generator)
    return model
