/* Models that several tests plan for, as published, and hardware by name. */
#ifndef PLANNER_EXAMPLES_H
#define PLANNER_EXAMPLES_H

#include "deepwell/planner.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

__attribute__((unused)) static const dw_model_sizes llama3_8b = {.layers = 32,
                                                                 .hidden = 4096,
                                                                 .heads = 32,
                                                                 .kv_heads = 8,
                                                                 .head_dim = 128,
                                                                 .ffn = 14336,
                                                                 .gated = 1,
                                                                 .vocabulary = 128256};
__attribute__((unused)) static const dw_model_sizes llama3_70b = {.layers = 80,
                                                                  .hidden = 8192,
                                                                  .heads = 64,
                                                                  .kv_heads = 8,
                                                                  .head_dim = 128,
                                                                  .ffn = 28672,
                                                                  .gated = 1,
                                                                  .vocabulary = 128256};
__attribute__((unused)) static const dw_model_sizes llama3_405b = {.layers = 126,
                                                                   .hidden = 16384,
                                                                   .heads = 128,
                                                                   .kv_heads = 8,
                                                                   .head_dim = 128,
                                                                   .ffn = 53248,
                                                                   .gated = 1,
                                                                   .vocabulary = 128256};
__attribute__((unused)) static const dw_model_sizes deepseek_v3 = {.layers = 61,
                                                                   .hidden = 7168,
                                                                   .heads = 128,
                                                                   .kv_heads = 128,
                                                                   .head_dim = 128,
                                                                   .ffn = 18432,
                                                                   .gated = 1,
                                                                   .vocabulary = 129280,
                                                                   .experts = 256,
                                                                   .top_k = 8,
                                                                   .expert_ffn = 2048,
                                                                   .shared_ffn = 2048,
                                                                   .dense_layers = 3,
                                                                   .moe_every = 1,
                                                                   .q_rank = 1536,
                                                                   .kv_rank = 512,
                                                                   .rope_dim = 64,
                                                                   .value_dim = 128};

static inline dw_hardware *hardware_of(const char *name) {
    dw_hardware *hardware = NULL;
    assert_int_equal(dw_hardware_named(name, &hardware), DW_OK);
    return hardware;
}

#endif
