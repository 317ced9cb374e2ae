/* Precision: which linear layers of a graph multiply quantized operands, and how.
 *
 *     dw_precision_policy policy;
 *     dw_precision_policy_init(&policy, DW_RECIPE_MXFP8);
 *     dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
 *     options.precision = &policy;
 *
 * A recipe says how the operands of a linear layer's three products (forward, and for the gradients of
 * its input and of its weight) are rounded; the products are summed in F32, and parameters, activations,
 * gradients and the optimizer stay as they are. docs/precision.md has the recipes and their sources.
 * A policy says which layer has which recipe; everything that is no linear layer (embeddings, norms,
 * attention's own products, the loss) stays as it is. */
#ifndef DEEPWELL_PRECISION_H
#define DEEPWELL_PRECISION_H

#include "deepwell/graph.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dw_recipe {
    DW_RECIPE_NONE,  /* "fp32": as the graph says */
    DW_RECIPE_BF16,  /* "bf16": operands rounded to BF16 */
    DW_RECIPE_MXFP8, /* "mxfp8": E4M3, blocks of 32 with E8M0 scales */
    DW_RECIPE_NVFP4, /* "nvfp4": E2M1, blocks of 16 with E4M3 scales and an F32 scale per tensor */
    DW_RECIPE_COUNT
} dw_recipe;
DW_API const char *dw_recipe_name(dw_recipe recipe);
/* DW_UNSUPPORTED for "fp8", DW_INVALID_ARGUMENT for what is no name; the message lists the names. */
DW_API dw_status dw_recipe_find(const char *name, dw_recipe *recipe);
/* 1 when graphs need a seed leaf (DW_ROLE_SEED), for rounding at random. */
DW_API int dw_recipe_needs_seed(dw_recipe recipe);

/* Layers whose module is `module` or lies inside it ("h.3" has "h.3.mlp.c_fc", not "h.30"). */
typedef struct dw_precision_exception {
    const char *module;
    dw_recipe recipe;
} dw_precision_exception;

typedef struct dw_precision_policy {
    size_t struct_size; /* sizeof(dw_precision_policy) */
    dw_recipe recipe;
    /* Regions whose layers stay as they are: bits 1 << dw_region. */
    uint32_t high_regions;
    /* Of the layers that have the recipe, this share, the last ones of the graph, is BF16 instead;
     * rounded to a whole number of layers. */
    double bf16_share;
    /* Before the rest; of several that match the last one holds. The caller's memory. */
    uint32_t exception_count;
    const dw_precision_exception *exceptions;
} dw_precision_policy;
/* What the published recipe does: high_regions embed, norm, router, head and loss; bf16_share 0.15 for
 * NVFP4, else 0; no exceptions. */
DW_API void dw_precision_policy_init(dw_precision_policy *policy, dw_recipe recipe);

/* Makes each `linear` of the forward pass to which the policy gives a recipe a `quantized_linear`. A
 * product of two activations (its second operand depends on an input) is no linear layer, and one in F64
 * stays as it is. `count` (may be NULL): how many were changed. DW_INVALID_ARGUMENT: the policy, or a
 * graph without the seed leaf that the recipe needs. On failure *graph is unchanged. The engine does this
 * by itself, to a copy, when its options have a policy. */
DW_API dw_status dw_graph_apply_precision(dw_graph **graph, const dw_precision_policy *policy,
                                          uint32_t *count);

#ifdef __cplusplus
}
#endif
#endif
