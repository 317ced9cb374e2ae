/* Precision: which linear layers of a graph multiply quantized operands, and how.
 *
 *     dw_precision_policy policy;
 *     dw_precision_policy_init(&policy, DW_RECIPE_MXFP8);
 *     dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
 *     options.precision = &policy;
 *
 *
 * A recipe says how the operands of a linear layer's three GEMMs (forward, gradient of the input, gradient of the
 * weight) are rounded. The GEMMs accumulate in F32. Parameters, activations, gradients and the optimizer keep their
 * precision. docs/precision.md describes the recipes and their sources.
 *
 * A policy assigns recipes to layers. Embeddings, norms, attention's own matmuls and the loss are not affected. */
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
DW_API const char *dw_recipe_name(dw_recipe recipe); /* "fp32" "bf16" "mxfp8" "nvfp4" */
/* DW_UNSUPPORTED for "fp8", DW_INVALID_ARGUMENT for an unknown name; the message lists the names. */
DW_API dw_status dw_recipe_find(const char *name, dw_recipe *recipe);
/* Returns 1 if the recipe rounds stochastically; graphs then need a seed leaf (DW_ROLE_SEED). */
DW_API int dw_recipe_needs_seed(dw_recipe recipe);

/* A recipe for the layers of `module` and inside it: "h.3" covers "h.3.mlp.c_fc", not "h.30". */
typedef struct dw_precision_exception {
    const char *module;
    dw_recipe recipe;
} dw_precision_exception;

typedef struct dw_precision_policy {
    size_t struct_size; /* sizeof(dw_precision_policy) */
    dw_recipe recipe;
    /* Regions whose layers keep their precision: bits 1 << dw_region. */
    uint32_t high_regions;
    /* Fraction of the layers with the recipe that use BF16 instead: the last ones of the graph. Rounded to a whole
     * number of layers. */
    double bf16_share;
    /* Exceptions to the members above; the last match applies. Owned by the caller. */
    uint32_t exception_count;
    const dw_precision_exception *exceptions;
} dw_precision_policy;
/* Sets what the published recipe does: high_regions embed, norm, router, head and loss; bf16_share 0.15 for NVFP4, else
 * 0; no exceptions. */
DW_API void dw_precision_policy_init(dw_precision_policy *policy, dw_recipe recipe);

/* Replaces each `linear` of the forward pass that the policy gives a recipe by a `quantized_linear`. A matmul of two
 * activations (its second operand depends on an input) is not a linear layer, and a layer in F64 is not changed.
 * `count` (may be NULL): number of replaced layers. DW_INVALID_ARGUMENT: the policy is invalid, or the graph lacks the
 * seed leaf that the recipe needs. On failure *graph is unchanged. An engine whose options have a policy calls this on
 * its copy of the graph. */
DW_API dw_status dw_graph_apply_precision(dw_graph **graph, const dw_precision_policy *policy,
                                          uint32_t *count);

#ifdef __cplusplus
}
#endif
#endif
