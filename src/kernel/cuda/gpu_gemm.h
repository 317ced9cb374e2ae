/* GEMM on a GPU: what the family's files and their tests share. */
#ifndef DW_GPU_GEMM_H
#define DW_GPU_GEMM_H

#include "deepwell/gemm.h"
#include "kernel/gpu_kernel.h"
#include "kernel/library/cutlass.h"
#include "sm100/gemm_scaled_params.h"
#include <string.h>

/* ---- gemm_check.c ------------------------------------------------------------------------ */

/* The caller's structure, which may be a shorter one of before, as one of today. */
dw_status dw__gemm_read(const dw_gemm *given, dw_gemm *call);

/* Whether the call's members make sense together, GPU or not. `launching`: pointers are needed, too. */
dw_status dw__gemm_check(const dw_gemm *call, bool launching);

static inline bool dw__gemm_is_empty(const dw_gemm *call) { return call->m == 0 || call->n == 0; }
/* Rows of B, and numbers in the bias. */
static inline int64_t dw__gemm_rows_b(const dw_gemm *call) {
    return call->activation == DW_ACTIVATION_SWIGLU ? 2 * call->n : call->n;
}

/* Schemes of A and B of a checked call; DW_SCHEME_BF16 stands for all operands that are no codes. */
static inline dw_scheme dw__gemm_scheme_a(const dw_gemm *call) {
    return call->quantized ? call->scheme_a : DW_SCHEME_BF16;
}
static inline dw_scheme dw__gemm_scheme_b(const dw_gemm *call) {
    return call->quantized ? call->scheme_b : DW_SCHEME_BF16;
}

/* Length of a row of A and B in the unit of dw_matrix.stride: elements, or bytes of codes. */
int64_t dw__gemm_row_units(const dw_gemm *call);

/* "m 300, n 256, k 64, bf16 to f32, bias, gelu, residual": for messages. */
const char *dw__gemm_describe(const dw_gemm *call, char *text, size_t bytes);

/* ---- gemm.c: variants ------------------------------------------------------------------------ */

/* One of cuda/sm100/gemm_tiles.h. */
typedef struct dw__gemm_tile {
    dw_scheme scheme; /* MXFP8 is for MXFP8_E5M2 too */
    int ctas, n, stages;
    unsigned shared_bytes; /* dynamic */
} dw__gemm_tile;
enum { DW__GEMM_TILES = 18, DW__GEMM_OUTPUTS = 3 };
extern const dw__gemm_tile dw__gemm_tiles[DW__GEMM_TILES];

/* What a variant is compiled for. */
typedef struct dw__gemm_shape {
    uint64_t tile : 8;     /* of dw__gemm_tiles, one for the schemes */
    uint64_t scheme_a : 8; /* dw_scheme */
    uint64_t scheme_b : 8;
    uint64_t output : 8;     /* OUTPUT of gemm_params.h */
    uint64_t activation : 8; /* dw_activation */
    bool f16 : 1, bias : 1, residual : 1;
    uint64_t unused : 21;
} dw__gemm_shape;

_Static_assert(sizeof(dw__gemm_shape) == sizeof(uint64_t), "packed, and no bit is padding");
static inline uint64_t dw__gemm_pack(dw__gemm_shape shape) {
    uint64_t params;
    memcpy(&params, &shape, sizeof params);
    return params;
}
static inline dw__gemm_shape dw__gemm_unpack(uint64_t params) {
    dw__gemm_shape shape;
    memcpy(&shape, &params, sizeof shape);
    return shape;
}

/* Whether there is such a variant: a tile is for one scheme of operands and takes whole boxes of D's columns. */
bool dw__gemm_exists(const dw__gemm_shape *shape);
int dw__gemm_tile_rows(const dw__gemm_shape *shape);
int dw__gemm_tile_columns(const dw__gemm_shape *shape); /* of D */
/* Of the contraction. */
int dw__gemm_step(dw_scheme scheme);

/* A tile by the static cost model, none of it measured: clocks = rounds of tiles over all SMs, each as many steps as
 * the contraction has, each step the longer of the tensor cores' time and that of reading A and B from shared memory;
 * and the bytes that all tiles load. */
typedef struct dw__gemm_account {
    double clocks, bytes;
    int64_t tiles, rounds, steps;
    int step_clocks;
} dw__gemm_account;
dw__gemm_account dw__gemm_account_of(const dw_gemm *call, const dw__gemm_shape *shape,
                                     int sm_count);

/* The variant for a checked call: of the tiles the one with the fewest clocks, then with the fewest bytes. */
dw__gemm_shape dw__gemm_shape_of(const dw_gemm *call, int sm_count);

dw__jit_variant dw__gemm_variant(const dw__gemm_shape *shape);
/* By definition: operands and D as they are, not quantized. */
dw__jit_variant dw__gemm_reference_variant(int capability, bool f16, bool f32_output);

/* ---- gemm.c: kernels --------------------------------------------------------------------------- */

extern const dw__gpu_kernel dw__sm100_gemm, dw__sm100_gemm_scaled;
/* By definition, for dense operands on any GPU; nothing chooses it but a refused kernel. */
extern const dw__gpu_kernel dw__reference_gemm;

/* gemm_explain.c: PyTorch's, and what the registry says of ours beside what they support. */
extern const dw__gpu_kernel dw__torch_gemm;
void dw__gemm_kernel_seconds(const dw__gpu_kernel *kernel, const void *call,
                             const dw__gpu_target *gpu, dw__gpu_seconds *result);
struct json_t *dw__gemm_describe_tile(const dw__gpu_kernel *kernel, const void *call,
                                      const dw__gpu_target *gpu);

/* The device's context (NULL: "cuda"), in which the kernel runs. */
dw_status dw__gemm_context(const dw_device *device, const dw__gpu_kernel *kernel,
                           const dw__context **context);
/* Runs a checked, non-empty call by definition. */
dw_status dw__gemm_run_reference(const dw_gemm *call, const dw__context *context);

/* ---- gemm_cutlass.c -------------------------------------------------------------------------- */

/* Every one of CUTLASS's kernels is an entry like these, with its own name and description. */
extern const dw__gpu_kernel dw__cutlass_gemm, dw__cutlass_grouped_gemm;
/* Whether the kernel supports the call, anywhere. */
dw_status dw__gemm_cutlass_supports(const dw_gemm *call, const dw_cutlass_kernel *kernel);

/* ---- gemm_first_use.c -------------------------------------------------------------------------- */

/* The call that a variant is tried with: sizes, types, alpha, activation, schemes. */
typedef struct dw__gemm_case {
    dw_gemm call;
    bool bias, residual;
    bool has_reference; /* refused calls are computed by definition */
    int sm_count;       /* so few SMs that blocks take one tile after another */
    /* 1 and no rows: a GEMM. Otherwise groups of A's rows, m together, each with a B of its own; the Bs follow one
     * another. */
    int groups;
    int64_t rows[4];
} dw__gemm_case;
dw__gemm_case dw__gemm_case_of(const dw__variant *variant);         /* gemm.c */
dw__gemm_case dw__gemm_cutlass_case_of(const dw__variant *variant); /* gemm_cutlass.c */
extern const dw__first_use dw__gemm_first_use;

#endif
