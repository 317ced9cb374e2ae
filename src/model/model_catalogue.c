/* Models by name, with the fields of their publishers' config.json that determine their function: sizes for every
 * family, and for the families that Deepwell builds also numbers such as the base of rotary positions. The reader of
 * config.json reads them. Models without such a file (GPT-3, Megatron's, Grok) have the widths of their paper in the
 * fields of a similar family. */
#include "base/base.h"
#include "deepwell/model.h"
#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* The macro keeps config.json's own text: # does not expand `true`. */
#define ROW(name, aliases, source, ...)                                                            \
    { name, aliases, source, #__VA_ARGS__ }

/* clang-format off */
static const struct row {
    const char *name, *aliases, *source, *json;
} rows[] = {
    /* GPT-2 */
    ROW("gpt2", "gpt2-small gpt2-124m", "huggingface.co/openai-community/gpt2",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt2-medium", "gpt2-355m", "huggingface.co/openai-community/gpt2-medium",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt2-large", "gpt2-774m", "huggingface.co/openai-community/gpt2-large",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1280, "n_layer": 36, "n_head": 20,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt2-xl", "gpt2-1.5b", "huggingface.co/openai-community/gpt2-xl",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1600, "n_layer": 48, "n_head": 25,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    /* GPT-3 */
    ROW("gpt3-125m", "gpt3-small", "Brown et al. 2020, table 2.1",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 768, "n_layer": 12, "n_head": 12,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt3-350m", "gpt3-medium gpt3-355m", "Brown et al. 2020, table 2.1",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 1024, "n_layer": 24, "n_head": 16,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt3-760m", "gpt3-large", "Brown et al. 2020, table 2.1",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 1536, "n_layer": 24, "n_head": 16,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt3-1.3b", "gpt3-xl",
         "Brown et al. 2020, table 2.1, with 16 heads, which its width and its parameter count imply",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt3-2.7b", "", "Brown et al. 2020, table 2.1",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 2560, "n_layer": 32, "n_head": 32,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt3-6.7b", "", "Brown et al. 2020, table 2.1",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 4096, "n_layer": 32, "n_head": 32,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt3-13b", "", "Brown et al. 2020, table 2.1, with width 5120, which 40 heads of 128 imply",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 5120, "n_layer": 40, "n_head": 40,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("gpt3-175b", "gpt3 gpt-175b", "Brown et al. 2020, table 2.1",
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 12288, "n_layer": 96, "n_head": 96,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    /* Megatron's GPTs */
    ROW("megatron-1.7b", "gpt-1.7b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 2304, "n_layer": 24, "n_head": 24,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-3.6b", "gpt-3.6b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 3072, "n_layer": 30, "n_head": 32,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-7.5b", "gpt-7.5b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 4096, "n_layer": 36, "n_head": 32,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-18.4b", "gpt-18.4b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 6144, "n_layer": 40, "n_head": 48,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-22b", "gpt-22b", "Korthikanti et al. 2022, table 3",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 6144, "n_layer": 48, "n_head": 64,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-39.1b", "gpt-39.1b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 8192, "n_layer": 48, "n_head": 64,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-76.1b", "gpt-76.1b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 10240, "n_layer": 60, "n_head": 80,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-145.6b", "gpt-145.6b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 12288, "n_layer": 80, "n_head": 96,
         "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-310b", "gpt-310b gpt3-310b megatron-310.1b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 16384, "n_layer": 96,
         "n_head": 128, "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-530b", "gpt-530b gpt3-530b megatron-529.6b mt-nlg-530b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 20480, "n_layer": 105,
         "n_head": 128, "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    ROW("megatron-1t", "gpt-1t gpt3-1t megatron-1008b gpt-1008b", "Narayanan et al. 2021, table 1",
        {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048, "n_embd": 25600, "n_layer": 128,
         "n_head": 160, "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256}),
    /* Llama */
    ROW("llama-7b", "llama1-7b", "Touvron et al. 2023, arXiv:2302.13971, table 2",
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2}),
    ROW("llama-13b", "llama1-13b", "Touvron et al. 2023, arXiv:2302.13971, table 2",
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
         "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40, "hidden_act": "silu",
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2}),
    ROW("llama-33b", "llama1-33b llama-30b", "Touvron et al. 2023, arXiv:2302.13971, table 2",
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 6656, "intermediate_size": 17920,
         "num_hidden_layers": 60, "num_attention_heads": 52, "num_key_value_heads": 52, "hidden_act": "silu",
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2}),
    ROW("llama-65b", "llama1-65b", "Touvron et al. 2023, arXiv:2302.13971, table 2",
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 22016,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 64, "hidden_act": "silu",
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}),
    ROW("llama2-7b", "", "huggingface.co/meta-llama/Llama-2-7b-hf",
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}),
    ROW("llama2-13b", "", "huggingface.co/meta-llama/Llama-2-13b-hf",
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
         "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40, "hidden_act": "silu",
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}),
    ROW("llama2-34b", "codellama-34b", "huggingface.co/codellama/CodeLlama-34b-hf",
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 22016,
         "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "bos_token_id": 1,
         "eos_token_id": 2}),
    ROW("llama2-70b", "", "huggingface.co/meta-llama/Llama-2-70b-hf",
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}),
    ROW("llama3-8b", "", "huggingface.co/meta-llama/Meta-Llama-3-8B",
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 128000,
         "eos_token_id": 128001}),
    ROW("llama3-70b", "", "huggingface.co/meta-llama/Meta-Llama-3-70B",
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 128000,
         "eos_token_id": 128001}),
    ROW("llama3.1-8b", "", "huggingface.co/meta-llama/Llama-3.1-8B",
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}, "bos_token_id": 128000, "eos_token_id": 128001}),
    ROW("llama3.1-70b", "llama3.3-70b", "huggingface.co/meta-llama/Llama-3.1-70B",
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}, "bos_token_id": 128000, "eos_token_id": 128001}),
    ROW("llama3-405b", "llama3.1-405b", "huggingface.co/meta-llama/Llama-3.1-405B",
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
         "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}, "bos_token_id": 128000, "eos_token_id": 128001}),
    ROW("llama3.2-1b", "", "huggingface.co/meta-llama/Llama-3.2-1B",
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192},
         "tie_word_embeddings": true, "bos_token_id": 128000, "eos_token_id": 128001}),
    ROW("llama3.2-3b", "", "huggingface.co/meta-llama/Llama-3.2-3B",
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192},
         "tie_word_embeddings": true, "bos_token_id": 128000, "eos_token_id": 128001}),
    ROW("llama4-scout", "llama4-scout-17b-16e llama4-109b",
         "huggingface.co/meta-llama/Llama-4-Scout-17B-16E, text_config",
        {"model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
         "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
         "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
         "interleave_moe_layer_step": 1}),
    ROW("llama4-maverick", "llama4-maverick-17b-128e llama4-400b",
         "huggingface.co/meta-llama/Llama-4-Maverick-17B-128E, text_config",
        {"model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
         "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
         "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 128, "num_experts_per_tok": 1,
         "interleave_moe_layer_step": 2}),
    /* Qwen */
    ROW("qwen2.5-0.5b", "", "huggingface.co/Qwen/Qwen2.5-0.5B",
        {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
         "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
         "tie_word_embeddings": true}),
    ROW("qwen2.5-1.5b", "", "huggingface.co/Qwen/Qwen2.5-1.5B",
        {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
         "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
         "tie_word_embeddings": true}),
    ROW("qwen2.5-3b", "", "huggingface.co/Qwen/Qwen2.5-3B",
        {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
         "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
         "tie_word_embeddings": true}),
    ROW("qwen2.5-7b", "", "huggingface.co/Qwen/Qwen2.5-7B",
        {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
         "tie_word_embeddings": false}),
    ROW("qwen2.5-14b", "", "huggingface.co/Qwen/Qwen2.5-14B",
        {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 13824,
         "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
         "tie_word_embeddings": false}),
    ROW("qwen2.5-32b", "", "huggingface.co/Qwen/Qwen2.5-32B",
        {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648,
         "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
         "tie_word_embeddings": false}),
    ROW("qwen2.5-72b", "", "huggingface.co/Qwen/Qwen2.5-72B",
        {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
         "tie_word_embeddings": false}),
    ROW("qwen3-0.6b", "", "huggingface.co/Qwen/Qwen3-0.6B",
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": true, "bos_token_id": 151643, "eos_token_id": 151645}),
    ROW("qwen3-1.7b", "", "huggingface.co/Qwen/Qwen3-1.7B",
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": true, "bos_token_id": 151643, "eos_token_id": 151645}),
    ROW("qwen3-4b", "", "huggingface.co/Qwen/Qwen3-4B",
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": true, "bos_token_id": 151643, "eos_token_id": 151645}),
    ROW("qwen3-8b", "", "huggingface.co/Qwen/Qwen3-8B",
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": false, "bos_token_id": 151643, "eos_token_id": 151645}),
    ROW("qwen3-14b", "", "huggingface.co/Qwen/Qwen3-14B",
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408,
         "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": false, "bos_token_id": 151643, "eos_token_id": 151645}),
    ROW("qwen3-32b", "", "huggingface.co/Qwen/Qwen3-32B",
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600,
         "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": false, "bos_token_id": 151643, "eos_token_id": 151645}),
    ROW("qwen3-30b-a3b", "qwen3-30b", "huggingface.co/Qwen/Qwen3-30B-A3B",
        {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
         "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}),
    ROW("qwen3-235b-a22b", "qwen3-235b", "huggingface.co/Qwen/Qwen3-235B-A22B",
        {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
         "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
         "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}),
    ROW("qwen3-next-80b-a3b", "qwen3-next qwen3-next-80b", "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct",
        {"model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_hidden_layers": 48,
         "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
         "num_experts_per_tok": 10, "full_attention_interval": 4, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}),
    /* Mistral */
    ROW("mistral-7b", "", "huggingface.co/mistralai/Mistral-7B-v0.1",
        {"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
         "bos_token_id": 1, "eos_token_id": 2}),
    ROW("mistral-7b-v0.2", "", "huggingface.co/mistralai/Mistral-7B-Instruct-v0.2",
        {"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": null,
         "bos_token_id": 1, "eos_token_id": 2}),
    ROW("mistral-7b-v0.3", "", "huggingface.co/mistralai/Mistral-7B-v0.3",
        {"model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": null,
         "bos_token_id": 1, "eos_token_id": 2}),
    ROW("mixtral-8x7b", "mixtral", "huggingface.co/mistralai/Mixtral-8x7B-v0.1",
        {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2}),
    ROW("mixtral-8x22b", "", "huggingface.co/mistralai/Mixtral-8x22B-v0.1",
        {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 6144, "intermediate_size": 16384,
         "num_hidden_layers": 56, "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2}),
    /* DeepSeek and Kimi */
    ROW("deepseek-v2-lite", "", "huggingface.co/deepseek-ai/DeepSeek-V2-Lite",
        {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
         "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "n_routed_experts": 64,
         "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": null,
         "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}),
    ROW("deepseek-v2", "", "huggingface.co/deepseek-ai/DeepSeek-V2",
        {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 12288,
         "moe_intermediate_size": 1536, "num_hidden_layers": 60, "num_attention_heads": 128,
         "n_routed_experts": 160, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
         "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "v_head_dim": 128}),
    ROW("deepseek-v3", "deepseek-r1 deepseek-v3.1 deepseek-v3-671b deepseek-671b",
         "huggingface.co/deepseek-ai/DeepSeek-V3",
        {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
         "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
         "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
         "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "v_head_dim": 128}),
    ROW("kimi-k2", "kimi-k2-1t", "huggingface.co/moonshotai/Kimi-K2-Base",
        {"model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432,
         "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64, "n_routed_experts": 384,
         "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 1536,
         "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}),
    /* gpt-oss */
    ROW("gpt-oss-20b", "", "huggingface.co/openai/gpt-oss-20b",
        {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
         "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
         "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}),
    ROW("gpt-oss-120b", "", "huggingface.co/openai/gpt-oss-120b",
        {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
         "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
         "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128}),
    /* Nemotron */
    ROW("nemotron3-8b", "", "huggingface.co/nvidia/nemotron-3-8b-base-4k",
        {"model_type": "nemotron", "vocab_size": 256000, "hidden_size": 4096, "intermediate_size": 16384,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}),
    ROW("nemotron3-22b", "", "NeMo's recipe nemotron3_22b",
        {"model_type": "nemotron", "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576,
         "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 48}),
    ROW("nemotron4-15b", "", "Parmar et al. 2024, arXiv:2402.16819, table 1",
        {"model_type": "nemotron", "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576,
         "num_hidden_layers": 32, "num_attention_heads": 48, "num_key_value_heads": 8}),
    ROW("nemotron4-340b", "", "huggingface.co/nvidia/Nemotron-4-340B-Base; arXiv:2406.11704",
        {"model_type": "nemotron", "vocab_size": 256000, "hidden_size": 18432, "intermediate_size": 73728,
         "num_hidden_layers": 96, "num_attention_heads": 96, "num_key_value_heads": 8}),
    ROW("nemotron-h-8b", "", "huggingface.co/nvidia/Nemotron-H-8B-Base-8K",
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128,
         "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
         "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"}),
    ROW("nemotron-h-47b", "", "Megatron-Bridge, NemotronHModelProvider47B",
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 8192, "intermediate_size": 30720,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 256,
         "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 256,
         "hybrid_override_pattern": "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"}),
    ROW("nemotron-h-56b", "", "huggingface.co/nvidia/Nemotron-H-56B-Base-8K",
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 8192, "intermediate_size": 32768,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 256,
         "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 256,
         "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"}),
    ROW("nemotron3-nano-30b-a3b", "nemotron3-nano nemotron3-nano-30b",
         "huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856,
         "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "num_attention_heads": 32,
         "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
         "ssm_state_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6,
         "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}),
    /* Grok */
    ROW("grok-1", "grok1-314b grok-314b", "github.com/xai-org/grok-1, run.py",
        {"model_type": "grok-1", "vocab_size": 131072, "hidden_size": 6144, "intermediate_size": 32768,
         "num_hidden_layers": 64, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
         "num_local_experts": 8, "num_experts_per_tok": 2}),
    /* Gemma */
    ROW("gemma-2b", "gemma1-2b", "huggingface.co/google/gemma-2b",
        {"model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384,
         "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}),
    ROW("gemma-7b", "gemma1-7b", "huggingface.co/google/gemma-7b",
        {"model_type": "gemma", "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}),
    ROW("gemma2-2b", "", "huggingface.co/google/gemma-2-2b",
        {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
         "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
         "sliding_window": 4096}),
    ROW("gemma2-9b", "", "huggingface.co/google/gemma-2-9b",
        {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336,
         "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
         "sliding_window": 4096}),
    ROW("gemma2-27b", "", "huggingface.co/google/gemma-2-27b",
        {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 4608, "intermediate_size": 36864,
         "num_hidden_layers": 46, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
         "sliding_window": 4096}),
    ROW("gemma3-270m", "", "huggingface.co/google/gemma-3-270m",
        {"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048,
         "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
         "sliding_window": 512}),
    ROW("gemma3-1b", "", "huggingface.co/google/gemma-3-1b-pt",
        {"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
         "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
         "sliding_window": 512}),
    ROW("gemma3-4b", "", "huggingface.co/google/gemma-3-4b-pt, text_config",
        {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
         "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
         "sliding_window": 1024}),
    ROW("gemma3-12b", "", "huggingface.co/google/gemma-3-12b-pt, text_config",
        {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360,
         "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
         "sliding_window": 1024}),
    ROW("gemma3-27b", "", "huggingface.co/google/gemma-3-27b-pt, text_config",
        {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504,
         "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
         "sliding_window": 1024}),
    /* Falcon, BLOOM, MPT, Pythia */
    ROW("falcon-7b", "", "huggingface.co/tiiuae/falcon-7b",
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
         "num_attention_heads": 71, "multi_query": true, "parallel_attn": true}),
    ROW("falcon-40b", "", "huggingface.co/tiiuae/falcon-40b",
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 8192, "num_hidden_layers": 60,
         "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": true}),
    ROW("falcon-180b", "", "huggingface.co/tiiuae/falcon-180B",
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 14848, "num_hidden_layers": 80,
         "num_attention_heads": 232, "num_kv_heads": 8, "new_decoder_architecture": true,
         "tie_word_embeddings": false}),
    ROW("bloom-560m", "", "huggingface.co/bigscience/bloom-560m",
        {"model_type": "bloom", "vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    ROW("bloom-7.1b", "bloom-7b1", "huggingface.co/bigscience/bloom-7b1",
        {"model_type": "bloom", "vocab_size": 250880, "hidden_size": 4096, "n_layer": 30, "n_head": 32}),
    ROW("bloom-176b", "bloom bigscience-176b", "huggingface.co/bigscience/bloom",
        {"model_type": "bloom", "vocab_size": 250880, "hidden_size": 14336, "n_layer": 70, "n_head": 112}),
    ROW("mpt-7b", "", "huggingface.co/mosaicml/mpt-7b",
        {"model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32}),
    ROW("mpt-30b", "", "huggingface.co/mosaicml/mpt-30b",
        {"model_type": "mpt", "vocab_size": 50432, "d_model": 7168, "n_layers": 48, "n_heads": 64}),
    ROW("pythia-70m", "", "huggingface.co/EleutherAI/pythia-70m",
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 512, "intermediate_size": 2048,
         "num_hidden_layers": 6, "num_attention_heads": 8}),
    ROW("pythia-160m", "", "huggingface.co/EleutherAI/pythia-160m",
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 3072,
         "num_hidden_layers": 12, "num_attention_heads": 12}),
    ROW("pythia-410m", "", "huggingface.co/EleutherAI/pythia-410m",
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 4096,
         "num_hidden_layers": 24, "num_attention_heads": 16}),
    ROW("pythia-1b", "", "huggingface.co/EleutherAI/pythia-1b",
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 8}),
    ROW("pythia-1.4b", "", "huggingface.co/EleutherAI/pythia-1.4b",
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 24, "num_attention_heads": 16}),
    ROW("pythia-2.8b", "", "huggingface.co/EleutherAI/pythia-2.8b",
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 10240,
         "num_hidden_layers": 32, "num_attention_heads": 32}),
    ROW("pythia-6.9b", "", "huggingface.co/EleutherAI/pythia-6.9b",
        {"model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 4096, "intermediate_size": 16384,
         "num_hidden_layers": 32, "num_attention_heads": 32}),
    ROW("pythia-12b", "", "huggingface.co/EleutherAI/pythia-12b",
        {"model_type": "gpt_neox", "vocab_size": 50688, "hidden_size": 5120, "intermediate_size": 20480,
         "num_hidden_layers": 36, "num_attention_heads": 40}),
    /* Phi */
    ROW("phi3-mini", "phi3-mini-4k phi3-mini-128k phi3.5-mini", "huggingface.co/microsoft/Phi-3-mini-4k-instruct",
        {"model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}),
    ROW("phi3-medium", "phi3-medium-4k phi3-medium-128k phi3-14b",
         "huggingface.co/microsoft/Phi-3-medium-4k-instruct",
        {"model_type": "phi3", "vocab_size": 32064, "hidden_size": 5120, "intermediate_size": 17920,
         "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10}),
    ROW("phi4", "phi4-14b", "huggingface.co/microsoft/phi-4",
        {"model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
         "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10}),
    ROW("phi4-mini", "", "huggingface.co/microsoft/Phi-4-mini-instruct",
        {"model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
         "tie_word_embeddings": true}),
    /* GLM */
    ROW("glm-4.5", "glm-4.5-355b-a32b glm-4.6", "huggingface.co/zai-org/GLM-4.5",
        {"model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120, "intermediate_size": 12288,
         "moe_intermediate_size": 1536, "num_hidden_layers": 92, "num_attention_heads": 96,
         "num_key_value_heads": 8, "head_dim": 128, "attention_bias": true, "use_qk_norm": true,
         "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3}),
    ROW("glm-4.5-air", "glm-4.5-106b-a12b", "huggingface.co/zai-org/GLM-4.5-Air",
        {"model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
         "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
         "num_key_value_heads": 8, "head_dim": 128, "attention_bias": true, "use_qk_norm": false,
         "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}),
};
/* clang-format on */

uint32_t dw_model_catalogue_count(void) { return DW_COUNT(rows); }

const char *dw_model_catalogue_name(uint32_t index) {
    return index < DW_COUNT(rows) ? rows[index].name : NULL;
}

const char *dw_model_catalogue_source(uint32_t index) {
    return index < DW_COUNT(rows) ? rows[index].source : NULL;
}

/* ---- names ----------------------------------------------------------------------------------------------------- */

enum { NAME_MOST = 64, NEAR_MOST = 6 };

/* Returns whether a part of a name does not identify a size. */
static bool is_decoration(const char *part, size_t length) {
    static const char *const words[] = {"meta", "hf",   "instruct", "chat", "it",
                                        "pt",   "base", "v0.1",     "bf16", "nvidia"};
    for (size_t at = 0; at < DW_COUNT(words); at++)
        if (strlen(words[at]) == length && strncmp(words[at], part, length) == 0) return true;
    if (length != 4) return false; /* date of a release, as in "2407" */
    for (size_t at = 0; at < length; at++)
        if (!isdigit((unsigned char)part[at])) return false;
    return true;
}

/* Reduces a name to its core: "meta-llama/Meta-Llama-3-70B-Instruct" gives "llama3-70b". Drops the publisher, lowers
 * the case, and joins parts where the result is unambiguous. */
static void plain_name(const char *name, size_t length, char out[NAME_MOST]) {
    char small[NAME_MOST] = "";
    size_t used = 0, written = 0;
    for (size_t at = 0; at < length; at++)
        if (name[at] == '/') name += at + 1, length -= at + 1, at = (size_t)-1;
    for (size_t at = 0; at < length && used + 1 < sizeof small; at++) {
        unsigned char c = (unsigned char)name[at];
        small[used++] = c == '_' || c == ' ' || c == ':' ? '-' : (char)tolower(c);
    }
    small[used] = 0;
    for (const char *part = small; *part;) {
        size_t count = strcspn(part, "-");
        if (count && !is_decoration(part, count)) {
            if (written && isdigit((unsigned char)out[written - 1]) &&
                isdigit((unsigned char)*part))
                out[written++] = '-'; /* keeps "llama3-3b" apart from "llama33b" */
            memcpy(out + written, part, count);
            written += count;
        }
        part += count + (part[count] == '-');
    }
    out[written] = 0;
}

static const struct row *find(const char *plain) {
    char known[NAME_MOST];
    for (size_t at = 0; at < DW_COUNT(rows); at++) {
        plain_name(rows[at].name, strlen(rows[at].name), known);
        if (strcmp(known, plain) == 0) return &rows[at];
        for (const char *alias = rows[at].aliases; *alias;) {
            size_t count = strcspn(alias, " ");
            plain_name(alias, count, known);
            if (strcmp(known, plain) == 0) return &rows[at];
            alias += count + (alias[count] == ' ');
        }
    }
    return NULL;
}

/* Levenshtein distance: the fewest letters to insert, delete or change. */
static int distance(const char *a, const char *b) {
    int row[NAME_MOST];
    int width = (int)strlen(b);
    for (int j = 0; j <= width; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= width; j++) {
            int least = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < least) least = row[j] + 1;
            if (row[j - 1] + 1 < least) least = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = least;
        }
    }
    return row[width];
}

static dw_status fail_name(const char *name, const char *plain) {
    size_t nearest[NEAR_MOST], count = 0;
    int away[NEAR_MOST];
    char list[512] = "", known[NAME_MOST];
    size_t used = 0;
    for (size_t at = 0; at < DW_COUNT(rows); at++) {
        plain_name(rows[at].name, strlen(rows[at].name), known);
        int far = distance(plain, known);
        size_t place = count;
        while (place > 0 && away[place - 1] > far) place--;
        if (place == NEAR_MOST) continue;
        if (count < NEAR_MOST) count++;
        for (size_t i = count - 1; i > place; i--)
            nearest[i] = nearest[i - 1], away[i] = away[i - 1];
        nearest[place] = at, away[place] = far;
    }
    for (size_t i = 0; i < count && used < sizeof list; i++)
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "",
                                 rows[nearest[i]].name);
    return dw__fail(DW_NOT_FOUND,
                    "there is no model \"%.64s\" in the catalogue; similar names: %s; or give a "
                    "config.json or its folder",
                    name, list);
}

static dw_status row_named(const char *name, const struct row **row) {
    char plain[NAME_MOST];
    plain_name(name, strlen(name), plain);
    *row = find(plain);
    return *row ? DW_OK : fail_name(name, plain);
}

dw_status dw_model_sizes_named(const char *name, dw_model_sizes *model) {
    const struct row *row;
    if (!name || !model)
        return dw__fail(DW_INVALID_ARGUMENT, "the model's name or the model is NULL");
    DW_RETURN_IF_FAILED(row_named(name, &row));
    return dw_model_sizes_parse(row->json, strlen(row->json), model);
}

dw_status dw_model_config_named(const char *name, dw_model_config **config) {
    const struct row *row;
    if (!name) return dw__fail(DW_INVALID_ARGUMENT, "the name of a model is NULL");
    DW_RETURN_IF_FAILED(row_named(name, &row));
    dw_status status = dw_model_config_parse(row->json, strlen(row->json), config);
    return status == DW_UNSUPPORTED ? dw__fail_prefix(status, "\"%s\"", row->name) : status;
}
