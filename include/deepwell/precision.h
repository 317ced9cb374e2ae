/* Precision: which linear layers of a graph multiply quantized operands, and how.
 *
 *     dw_precision_policy policy;
 *     dw_precision_policy_init(&policy, "mxfp8");
 *     dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
 *     options.precision = &policy;
 *
 * A policy says which scheme (deepwell/scheme.h) each operand has in the three GEMMs of each linear layer. The GEMMs
 * accumulate in F32. Parameters, activations, gradients and the optimizer keep their precision. Embeddings, norms,
 * attention's own matmuls and the loss are not affected. docs/precision.md describes the named policies and their
 * sources. */
#ifndef DEEPWELL_PRECISION_H
#define DEEPWELL_PRECISION_H

#include "deepwell/graph.h"
#include "deepwell/number.h"
#include "deepwell/scheme.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How an operand is rounded. Its text form, used in the attributes of `quantized_linear`, is the scheme's name followed
 * by "+square", "+hadamard" and "+stochastic" for the members that are 1, and by "+floor" or "+ceil" for those scale
 * rules: "nvfp4+hadamard+stochastic", "mxfp8+floor". */
typedef struct dw_operand_precision {
    /* FP32 (all six operands of a layer: not quantized), BF16, FP8_TENSOR, FP8_TENSOR_E5M2, MXFP8, MXFP8_E5M2, MXFP6,
     * MXFP6_E2M3, MXFP4 or NVFP4. The GEMM reads the values as BF16, which represents those of the last eight exactly;
     * the tensor's scale (FP8_TENSOR..., NVFP4) multiplies its result. FP8_BLOCK, for both operands of a GEMM or neither:
     * the GEMM reads codes, and multiplies the sum of each 128 products by the scales of their blocks. */
    dw_scheme scheme;
    /* The members below apply to schemes with blocks only. 1: one scale for block x block elements, so that the numbers
     * are the same along both axes. */
    int square; /* FP8_BLOCK: for one operand of a GEMM at most */
    /* 1: runs of 16 along the reduction axis go through a random Hadamard transform first. Both operands of a GEMM must
     * agree; not with `square`, and not of FP8_BLOCK. */
    int hadamard;
    int stochastic; /* 1: stochastic rounding; for gradients only, DW_DGRAD_DY and DW_WGRAD_DY; not of FP8_BLOCK */
    /* DEFAULT, which is RCEIL for MX and AMAX for NVFP4; MX schemes also have RCEIL, FLOOR and CEIL. */
    dw_scale_rule scale_rule;
} dw_operand_precision;

/* Writes the text form, at most `bytes` bytes with the NUL; 64 suffice. */
DW_API void dw_operand_precision_text(const dw_operand_precision *precision, char *text,
                                      size_t bytes);

/* The operands of a linear layer's GEMMs. Names in attributes: "forward_x" ... "wgrad_x". */
typedef enum dw_linear_operand {
    DW_FORWARD_X, /* y = x w^T, reduced over K */
    DW_FORWARD_W,
    DW_DGRAD_DY, /* dx = dy w, reduced over N */
    DW_DGRAD_W,
    DW_WGRAD_DY, /* dw = dy^T x, reduced over rows */
    DW_WGRAD_X,
    DW_LINEAR_OPERANDS
} dw_linear_operand;

typedef struct dw_layer_precision {
    dw_operand_precision operand[DW_LINEAR_OPERANDS];
} dw_layer_precision;

/* Reads a row of the table of policies: "fp32" (not quantized), "bf16", "fp8", "fp8-block", "mxfp8", "mxfp6",
 * "mxfp4" or "nvfp4".
 * DW_UNSUPPORTED: the name is that of a scheme without a row. DW_INVALID_ARGUMENT: the name is unknown. The message
 * lists the names. */
DW_API dw_status dw_layer_precision_named(const char *name, dw_layer_precision *layer);

/* A precision for the layers of `module` and inside it: "h.3" covers "h.3.mlp.c_fc", not "h.30". `module` may be a
 * pattern: `*` stands for any characters, dots included, `?` for one character, and "[0-3]" or "[!0-3]" for one of a
 * set. "*.mlp" covers the layers in all modules called mlp. */
typedef struct dw_precision_exception {
    const char *module;
    dw_layer_precision layer;
} dw_precision_exception;

/* Guards of a training run (docs/precision.md). dw_trainer obeys them. For other loops the library reads and writes
 * these numbers, adds the statistics of operands to a graph (dw_graph_apply_precision), judges samples
 * (precision_watch.h), and applies `fallen_back`. */
typedef struct dw_precision_guard {
    int64_t every; /* steps from one sampled step to the next; 0: none is sampled */
    /* A layer fails a sample if the signal-to-noise ratio of one of its operands is below this; 0: below
     * dw_operand_snr_bound_db of the operand. */
    double snr_db;
    /* It also fails if more than this share of an operand's elements other than 0 are rounded to 0; 0: 0.9. */
    double underflow;
    int samples;   /* failed in a row, after which the layer falls back to BF16; 0: 2 */
    double repair; /* share of the run's steps, the last ones, in which every layer is BF16 */
} dw_precision_guard;
/* The bound of an operand for which none is given: the ratio that rounding to the scheme's element gives for numbers of
 * a normal distribution, 6.02 f + 13.5 dB with f bits of fraction and 3 dB less if it is stochastic, less 6 dB. 0: the
 * operand is not observed, because it is FP32 or BF16. */
DW_API double dw_operand_snr_bound_db(const dw_operand_precision *precision);

typedef struct dw_precision_policy {
    size_t struct_size; /* sizeof(dw_precision_policy) */
    dw_layer_precision layer;
    /* Regions whose layers keep their precision: bits 1 << dw_region. */
    uint32_t high_regions;
    /* Of the layers that would have the policy's precision, the fraction that has "bf16" instead: the last layers of
     * the graph. Rounded to a whole number of layers. */
    double bf16_share;
    /* Exceptions to the members above; the last match applies. Owned by the caller. */
    uint32_t exception_count;
    const dw_precision_exception *exceptions;
    /* 0: what cannot be computed in the policy's precision keeps the model's: a layer in F64, and in Python what
     * PyTorch runs instead of the engine. 1: it is an error. */
    int strict;
    dw_precision_guard guard; /* zeros: none */
    /* Modules whose layers are BF16 although the members above give them a shorter format, because the guard found it
     * too short. Exact names. They count for bf16_share as before. Owned by the caller. */
    uint32_t fallen_back_count;
    const char *const *fallen_back;
    /* 1: GEMMs of FP8 codes in the forward pass may sum in fewer bits than F32 has, where the GPU is then faster: on
     * Hopper's tensor cores all K products in their own accumulators, of about 14 bits. 0: partial sums are added in
     * F32. Backward never does this. */
    int fast_accumulation;
} dw_precision_policy;
/* Sets the published recipe called `name`, a name of dw_layer_precision_named: high_regions embed, norm, router, head
 * and loss; bf16_share 0.15 for "nvfp4", else 0; no exceptions. Fails as dw_layer_precision_named does. */
DW_API dw_status dw_precision_policy_init(dw_precision_policy *policy, const char *name);

/* ---- files ----------------------------------------------------------------------------------- */

/* Reads a policy from JSON, as docs/precision.md describes it: {"format": "deepwell.precision", "version": 1,
 * "default": "mxfp8", ...}. *policy owns its exceptions; release it with dw_precision_policy_destroy. DW_PARSE: the
 * text is not such JSON. DW_INVALID_ARGUMENT, DW_UNSUPPORTED: as dw_graph_apply_precision. */
DW_API dw_status dw_precision_policy_parse(const char *json, size_t bytes,
                                           dw_precision_policy **policy);
/* As dw_precision_policy_parse, of the file called `name` if that ends in ".json", else of the published recipe `name`.
 * DW_IO: the file cannot be read. */
DW_API dw_status dw_precision_policy_load(const char *name, dw_precision_policy **policy);
DW_API void dw_precision_policy_destroy(dw_precision_policy *policy); /* NULL: does nothing */
/* Writes a policy as dw_precision_policy_parse reads it. Policies with the same meaning and the same exceptions have
 * the same text. Free *json with dw_text_free. */
DW_API dw_status dw_precision_policy_json(const dw_precision_policy *policy, char **json);

/* ---- policies made of others ------------------------------------------------------------------ */

/* Makes a copy of a policy in which more modules have fallen back. Names that it has already are not repeated. */
DW_API dw_status dw_precision_policy_with_fallen_back(const dw_precision_policy *policy,
                                                      uint32_t count, const char *const *modules,
                                                      dw_precision_policy **made);
/* Makes the policy that rounds to BF16 what another one quantizes, as in the repair at the end of training. It has no
 * guard. */
DW_API dw_status dw_precision_policy_in_bf16(const dw_precision_policy *policy,
                                             dw_precision_policy **made);

/* ---- graphs ---------------------------------------------------------------------------------- */

/* Writes for each linear layer of a forward graph, and for experts where the policy's default may quantize them, in the
 * order in which an engine runs them, which precision it has and why: [{"module": "h.0.mlp.c_fc", "region": "mlp",
 * "dtype": "f32", "name": "mxfp8", "operands": {"forward_x": "mxfp8", ...}, "reason": "default"}, ...]. "operands" is
 * absent if the layer keeps the model's precision, and "name" if no named policy has these operands. Experts have no
 * operands "wgrad_dy" and "wgrad_x", and no bounds. The reasons: "default", "region", "module" (with its "pattern"),
 * "share" (of bf16_share), "f64", "bf16" (the layer has that precision already), "guard" (of fallen_back). If
 * guard.every is not 0, layers with operands shorter than BF16 also have "bounds", the dB of each such operand. Free
 * *json with dw_text_free. */
DW_API dw_status dw_precision_layers_json(const dw_graph *graph, const dw_precision_policy *policy,
                                          char **json);

/* Returns 1 if an operand is rounded stochastically; graphs then need a seed leaf (DW_ROLE_SEED). */
DW_API int dw_precision_policy_needs_seed(const dw_precision_policy *policy);

/* Replaces each `linear` of the forward pass that the policy quantizes by a `quantized_linear`, and with FP8 of one
 * scale for each tensor each grouped_linear or segment_linear by a `quantized_segment_linear`, whose rows it sorts. A
 * matmul of two activations (its second operand depends on an input) is not a linear layer, and a layer in F64 is not
 * changed; nor is a layer of a BF16 model with "bf16", whose operands are BF16 already. `count` (may be NULL): number
 * of replaced layers. If the graph has leaves of role DW_ROLE_STATISTICS, f64[DW_LAYER_STATISTICS], each layer with
 * operands shorter than BF16 takes the next one. The gradient of such a leaf is the result of quantization_error
 * (deepwell/ops.h) for each of the layer's six operands. It costs nothing where this gradient is not asked for.
 * DW_INVALID_ARGUMENT: the policy is invalid, the graph lacks the seed leaf that it needs, or it has leaves of
 * statistics, but not one for each such layer. DW_UNSUPPORTED: Deepwell does not implement one of the policy's schemes,
 * or the policy is strict and a layer is in F64. On failure *graph is unchanged. An engine whose options have a policy
 * calls this on its copy of the graph. */
DW_API dw_status dw_graph_apply_precision(dw_graph **graph, const dw_precision_policy *policy,
                                          uint32_t *count);

#ifdef __cplusplus
}
#endif
#endif
