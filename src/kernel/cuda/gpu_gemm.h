/* GEMM on a GPU: declarations shared by the family's files and their tests. */
#ifndef DW_GPU_GEMM_H
#define DW_GPU_GEMM_H

#include "common/data_error.h"
#include "common/gemm_groups.h"
#include "common/scale_layout.h"
#include "deepwell/gemm.h"
#include "kernel/gpu_kernel.h"
#include "kernel/library/cutlass.h"
#include "plan/tile_cost.h"
#include "sm100/gemm_scaled_params.h"
#include "sm120/sm120_gemm_params.h"
#include "sm90/sm90_gemm_params.h"

/* ---- gemm.c: calls --------------------------------------------------------------------------- */

/* Converts the caller's structure, which may have the shorter form of an earlier version, to today's form. */
dw_status dw__gemm_read(const dw_gemm *given, dw_gemm *call);

/* Operands whose rows run across the contraction: A is stored as k x m, B as k x n. Public calls have none. */
typedef struct dw__gemm_turned {
    bool a, b;
} dw__gemm_turned;

/* A call with operands along or across the contraction, of one or more GEMMs. */
typedef struct dw__gemm_groups_call {
    dw_gemm gemm; /* m and k: of all groups together where these divide them */
    dw__gemm_turned turned;
    bool
        halves; /* Hopper: a program reads the halves of D's columns; B has 2 gemm.n rows, D as many columns */
    struct {
        int kind; /* DW_GROUPS_BATCH, ... of common/gemm_groups.h */
        int64_t count;
        const int32_t *offsets; /* device memory; NULL for a batch */
        dw_data_error error;    /* of offsets that do not ascend from 0 to at most the rows */
    } groups;
    /* Hopper: A and B are codes of FP8 if `a` is DW_E4M3 or DW_E5M2. gemm.dtype is then the type of a D in 16 bits. */
    struct {
        dw_dtype a, b;
        bool fast;                      /* all sums in the tensor cores' accumulators */
        const float *scale_a, *scale_b; /* device memory: of all of A, of B or of each matrix */
        bool scale_b_each;
        bool row_scales; /* of each row of A and of B instead; not in groups */
        bool blocks, square_a,
            square_b;       /* scales of blocks instead, as fp8-block has them; not in groups */
        int wide_a, wide_b; /* from a row of square blocks to the next */
        bool side_by_side;  /* matrices of B: a row of one, then the same row of the next */
    } codes;
    /* Hopper, in groups of rows or of the contraction: rows by an index, in device memory, of gemm.m or gemm.k rows. */
    struct {
        int gather; /* DW_SM90_GATHER_NONE, or the operand that has `count` rows */
        int64_t count;
        const int32_t *in; /* row r of that operand is its row in[r] */
        bool scatter;      /* row r of D is stored as row out[r] */
        const int32_t *out;
        bool weighted; /* rows of D are multiplied by elements of gemm.dtype */
        const void *weights;
    } rows;
} dw__gemm_groups_call;
static inline bool dw__gemm_is_fp8(dw_dtype type) { return type == DW_E4M3 || type == DW_E5M2; }
static inline dw__gemm_groups_call dw__gemm_single(const dw_gemm *gemm, dw__gemm_turned turned) {
    return (dw__gemm_groups_call){.gemm = *gemm, .turned = turned, .groups = {.count = 1}};
}

/* Checks whether the call's members are consistent, with or without a GPU. If `launching`, pointers must be set. */
dw_status dw__gemm_check(const dw_gemm *call, bool launching);
dw_status dw__gemm_check_turned(const dw_gemm *call, dw__gemm_turned turned, bool launching);

static inline bool dw__gemm_is_empty(const dw_gemm *call) { return call->m == 0 || call->n == 0; }
/* Returns the number of rows of B, which is also the number of elements of the bias. */
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

/* The scheme of D's codes. */
static inline dw_scheme dw__gemm_scheme_d(const dw_gemm *call) {
    return call->scheme_d == DW_SCHEME_BF16 ? DW_SCHEME_MXFP8 : call->scheme_d;
}
/* Whether D becomes codes of fp8-block. */
static inline bool dw__gemm_has_blocks_d(const dw_gemm *call) {
    return call->quantized_d && call->scheme_d == DW_SCHEME_FP8_BLOCK;
}
/* Bytes of a row of codes of fp8-block, with the zeros behind them. */
static inline int64_t dw__gemm_code_row(int64_t codes) {
    return (codes + DW_CODE_ROW - 1) / DW_CODE_ROW * DW_CODE_ROW;
}

/* Returns the length of a row of A and B in the unit of dw_matrix.stride: elements, or bytes of codes. */
int64_t dw__gemm_row_units(const dw_gemm *call);

/* "m 300, n 256, k 64, bf16 to f32, bias, gelu, residual": for messages. */
const char *dw__gemm_describe(const void *call, char *text, size_t bytes);

/* ---- gemm.c: variants ------------------------------------------------------------------------ */

/* One row of cuda/sm100/gemm_tiles.h. */
typedef struct dw__gemm_tile {
    dw_scheme scheme; /* MXFP8 is for MXFP8_E5M2 too */
    int ctas, n, stages;
    unsigned shared_bytes; /* dynamic shared memory */
} dw__gemm_tile;
enum { DW__GEMM_TILES = 18, DW__GEMM_OUTPUTS = 3 };
extern const dw__gemm_tile dw__gemm_tiles[DW__GEMM_TILES];

/* The compile-time parameters of a variant. */
typedef union dw__gemm_shape {
    struct {
        uint64_t
            tile : 8; /* of dw__gemm_tiles, one for the schemes; on sm_120 of dw__sm120_tiles */
        uint64_t scheme_a : 8; /* dw_scheme */
        uint64_t scheme_b : 8;
        uint64_t output : 8;     /* OUTPUT of gemm_params.h */
        uint64_t activation : 8; /* dw_activation */
        bool f16 : 1, bias : 1, residual : 1;
        bool turned_a : 1, turned_b : 1;
        uint64_t groups : 8; /* GROUPS of common/gemm_groups.h, on sm_100 */
        uint64_t unused : 11;
    };
    uint64_t params; /* of dw__variant */
} dw__gemm_shape;
_Static_assert(sizeof(dw__gemm_shape) == sizeof(uint64_t), "packed, and no bit is padding");
/* Returns what a call asks of a variant, whose tile is still to be chosen. */
dw__gemm_shape dw__gemm_shape_without_tile(const dw_gemm *call);
/* Adds the defines of what follows the multiplication. */
void dw__gemm_add_epilogue(dw__jit_variant *variant, const dw__gemm_shape *shape);

/* Returns whether this variant exists: a tile is for one kind of operands and needs whole boxes of D's columns. */
bool dw__gemm_exists(const dw__gemm_shape *shape);
int dw__gemm_tile_rows(const dw__gemm_shape *shape);
int dw__gemm_tile_columns(const dw__gemm_shape *shape); /* of D */
/* Elements along the contraction axis. */
int dw__gemm_step(dw_scheme scheme);

/* Rate of an SM of Blackwell's data-center GPUs, by the data sheet: 2250 TFLOP/s (twice that for MXFP8, four times for
 * FP4) on 148 SMs at 1.85 GHz. */
enum { DW__SM100_FLOPS_PER_CLOCK = 8192 };

/* The static cost model of a tile; none of it is measured. The clocks are the rounds of tiles over all SMs, times the
 * steps of the contraction, times the clocks of a step: the longer of the tensor cores' time and the time to read A and
 * B from shared memory. The bytes are those that all tiles load. */
typedef struct dw__gemm_cost {
    double clocks, bytes;
    int64_t tiles, rounds, steps;
    int step_clocks;
} dw__gemm_cost;
dw__gemm_cost dw__gemm_cost_of(const dw_gemm *call, const dw__gemm_shape *shape, int sm_count);
/* The same of groups, which are taken for equally long. */
dw__gemm_cost dw__gemm_groups_cost_of(const dw__gemm_groups_call *call, const dw__gemm_shape *shape,
                                      int sm_count);

/* Chooses the variant for a checked call: the tile with the fewest clocks, and among those the one with the fewest
 * bytes. */
dw__gemm_shape dw__gemm_shape_of(const dw_gemm *call, int sm_count);
dw__gemm_shape dw__gemm_groups_shape_of(const dw__gemm_groups_call *call, int sm_count);

dw__jit_variant dw__gemm_variant(const dw__gemm_shape *shape);
/* The variant of the reference, for dense operands and D, which it does not quantize. */
dw__jit_variant dw__gemm_reference_variant(int capability, bool f16, bool f32_output);

/* ---- gemm.c: tensor maps ---------------------------------------------------------------------- */

/* The elements of maps; `codes`: bytes. */
dw__map_element dw__gemm_map_element(dw_dtype type, bool codes);
/* Makes a map of `rows` x `columns` with boxes of 128 bytes x `box_rows`, swizzled. */
dw_status dw__gemm_map(const dw__context *context, const dw_matrix *x, const char *name,
                       int64_t rows, int64_t columns, dw__map_element element, int box_rows,
                       dw__tensor_map *map);
/* The same of `groups` matrices, one after the other: a map of rank 4. */
dw_status dw__gemm_groups_map(const dw__context *context, const dw_matrix *x, const char *name,
                              int64_t groups, int64_t rows, int64_t columns,
                              dw__map_element element, int box_rows, dw__tensor_map *map);
/* Makes those of A and of B, which have `box_a` and `box_b` rows in a box; of turned operands boxes have 64. */
dw_status dw__gemm_groups_operand_maps(const dw__gemm_groups_call *call, const dw__context *context,
                                       int box_a, int box_b, dw__tensor_map maps[2]);
/* Makes a map of the scales of `parts` times `rows` rows: their tiles side by side, as words of 64 bits, in boxes for
 * one step. */
dw_status dw__gemm_scale_map(const dw__context *context, const void *scales, const char *name,
                             int64_t rows, int parts, int64_t k, int scheme, dw__tensor_map *map);
/* Makes those of A and of B, whose rows have two parts for SwiGLU; none if the operands are no codes. */
dw_status dw__gemm_scale_maps(const dw__context *context, const dw_gemm *call, int scheme,
                              dw__tensor_map *maps);

/* ---- gemm.c: launch ---------------------------------------------------------------------------- */

/* Returns the number of blocks, or pairs of blocks, of a persistent grid: as many as there are tiles, but at most
 * `places`. */
int64_t dw__gemm_grid(const dw__gemm_groups_call *call, int tile_m, int tiles_n, int64_t places);
/* As the functions of dw__sm100_gemm, for turned operands and for groups of BF16 or F16. */
dw_status dw__sm100_supports(const dw_gemm *call, dw__gemm_turned turned,
                             const dw__gpu_target *gpu);
dw_status dw__sm100_prepare(const dw_gemm *call, dw__gemm_turned turned, const dw__context *context,
                            const dw__variant **variant);
dw_status dw__sm100_enqueue(const dw__gemm_groups_call *call, const dw__context *context,
                            const dw__variant *variant);
dw_status dw__sm100_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                 dw__entry_point points[DW__ENTRY_POINTS]);

/* ---- sm90_gemm.c: Hopper ---------------------------------------------------------------------- */

/* One row of DW_SM90_GEMM_TILES. */
typedef struct dw__sm90_tile {
    int m, n, stages;
    bool together; /* two warpgroups compute it */
    int cluster;   /* blocks that compute it; 0: any number of GEMMs of any kind have such tiles */
} dw__sm90_tile;
enum { DW__SM90_TILES = 11 };
extern const dw__sm90_tile dw__sm90_tiles[DW__SM90_TILES];

/* The compile-time parameters of a variant. */
typedef union dw__sm90_shape {
    struct {
        uint64_t tile : 8;       /* of dw__sm90_tiles */
        uint64_t groups : 8;     /* GROUPS of common/gemm_groups.h */
        uint64_t output : 8;     /* OUTPUT of gemm_params.h */
        uint64_t activation : 8; /* dw_activation */
        bool f16 : 1, bias : 1, residual : 1, turned_a : 1, turned_b : 1;
        uint64_t codes_a : 2, codes_b : 2; /* CODES_A of sm90_gemm.cu */
        bool promote : 1, blocks : 1, square_a : 1, square_b : 1;
        bool halves : 1; /* PROGRAM_HALVES of sm90_program.cuh, or PAIR of sm90_pair.cuh */
        bool row_scales : 1;
        bool row_factors : 1, row_squares : 1; /* of dw_gemm: sm90_rows.cuh */
        bool split : 1;                        /* SPLIT of sm90_gemm.cu */
        uint64_t gather : 2;                   /* GATHER of sm90_gather_params.h */
        bool scatter : 1, weighted : 1;
        bool coded : 1, coded_turned : 1, coded_d : 1; /* CODED of sm90_gemm.cu */
        uint64_t unused : 7;
    };
    uint64_t params; /* of dw__variant */
} dw__sm90_shape;
_Static_assert(sizeof(dw__sm90_shape) == sizeof(uint64_t), "packed, and no bit is padding");

/* Whether the operands of a variant are codes of FP8. */
static inline bool dw__sm90_has_codes(const dw__sm90_shape *shape) { return shape->codes_a != 0; }
int dw__sm90_tile_columns(const dw__sm90_shape *shape); /* of D */
bool dw__sm90_exists(const dw__sm90_shape *shape);
/* The static cost model of a tile, as dw__gemm_cost_of. Groups are taken for equally long. */
dw__gemm_cost dw__sm90_cost_of(const dw__gemm_groups_call *call, const dw__sm90_shape *shape,
                               int sm_count);
/* How blocks share the tiles of a variant with `split`. */
typedef struct dw__sm90_split {
    int alone, tiles, blocks; /* of dw_sm90_split */
    size_t sums_bytes, bytes; /* of the workspace: sums, and flags behind them */
} dw__sm90_split;
dw__sm90_split dw__sm90_split_of(const dw__gemm_groups_call *call, const dw__sm90_shape *shape,
                                 int sm_count);
/* A variant that computes a call, with the clocks that the cost model counts. */
typedef struct dw__sm90_proposal {
    dw__sm90_shape shape;
    double clocks;
} dw__sm90_proposal;
enum { DW__SM90_MOST_PROPOSALS = 2 * DW__SM90_TILES };
/* All of them for a checked call, in the order of the tiles. Blocks share tiles if the call's workspace has room for their
 * sums. Returns their number. `best` receives the one with the fewest clocks, the first of nearly equal ones. */
int dw__sm90_proposals(const dw__gemm_groups_call *call, int sm_count,
                       dw__sm90_proposal proposals[DW__SM90_MOST_PROPOSALS], int *best);
/* Chooses the best by the cost model. */
dw__sm90_shape dw__sm90_shape_of(const dw__gemm_groups_call *call, int sm_count);
dw__jit_variant dw__sm90_variant(const dw__sm90_shape *shape);
dw_status dw__sm90_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                dw__entry_point points[DW__ENTRY_POINTS]);
/* DW_UNSUPPORTED: the call has codes. */
dw_status dw__sm90_check_types(const dw_gemm *call);
/* As the entry's functions, for one product with turned operands. */
dw_status dw__sm90_supports(const dw_gemm *call, dw__gemm_turned turned, const dw__gpu_target *gpu);
dw_status dw__sm90_prepare(const dw_gemm *call, dw__gemm_turned turned, const dw__context *context,
                           const dw__variant **variant);
/* Enqueues a call of any number of GEMMs; the variant is one of dw__sm90_shape_of. */
dw_status dw__sm90_enqueue(const dw__gemm_groups_call *call, const dw__context *context,
                           const dw__variant *variant);

/* sm90_choice.c: chooses among the proposals for one GEMM whose clocks are close to the fewest by a measurement, which is
 * made once for each GPU model and kept on disk. Products that are not worth it, that have codes or that are parts of
 * larger calls have the cost model's. Measures on a stream and memory of its own, also while the caller records a graph.
 * Never fails. */
dw__sm90_shape dw__sm90_choose(const dw__gemm_groups_call *call, const dw__context *context);
/* Bytes of workspace with which the call of one product is fastest. Chooses, too. */
size_t dw__sm90_workspace(const dw_gemm *call, dw__gemm_turned turned, const dw__context *context);
/* Returns what is kept; false if nothing was measured. */
bool dw__sm90_measured(const dw__gemm_groups_call *call, const dw__context *context,
                       dw__sm90_shape *shape, double *seconds);

/* The compile-time parameters of rotary position embedding behind a GEMM; `columns` 0: there is none. */
typedef struct dw__sm90_rope_form {
    int columns, turned; /* of a head, and those of them that are rotated */
    bool interleaved;
} dw__sm90_rope_form;

/* An elementwise program behind a GEMM. Its operands and results have D's type and shape; vectors have D's type and an
 * element for each row. */
typedef struct dw__sm90_program {
    int operand_count, vector_count, result_count;
    dw_matrix operands[DW_SM90_MOST_OPERANDS], vectors[DW_SM90_MOST_VECTORS];
    dw_matrix results[DW_SM90_MOST_RESULTS]; /* data NULL: not wanted */
    float *sums[DW_SM90_MOST_RESULTS];       /* partial sums of its columns, or NULL */
    const dw_sm90_loss *loss;                /* cross-entropy in place of a program, or NULL */
    bool draws;                              /* random numbers */
    const void *random_key;                  /* seed and offset, so many words apart */
    int64_t random_key_stride;
    dw__sm90_rope_form rope_form; /* of rotary position embedding in place of a program */
    dw_sm90_rope rope;
    const dw_gemm *second; /* NULL, or another GEMM beside it, with its own B, bias and D (PAIR) */
    unsigned shared_bytes;
} dw__sm90_program;
/* Enqueues a variant of this shape. `program`: NULL, or the one that was compiled with it; D's data may then be NULL. */
dw_status dw__sm90_launch(const dw__gemm_groups_call *call, const dw__sm90_program *program,
                          dw__sm90_shape shape, const dw__context *context,
                          const dw__variant *variant);
extern const dw__kernel dw__sm90_linear_program, dw__sm90_segment_program; /* sm90_program.c */
/* Makes the call of a linear layer with n columns, for the first-use check of a product with something behind it. */
void dw__sm90_example_linear(const dw__sm90_shape *shape, int index, int64_t n, dw__call *c);
extern const dw__kernel dw__sm90_linear_pair; /* sm90_pair.c */

/* ---- sm90_program_rope.c: rotary position embedding behind a product ----------------------------- */

/* Makes the parameters of a call of rope whose x shows all elements of D, for data that may be NULL. False: they lie in a
 * way that the kernel does not read or write. */
bool dw__sm90_rope_of(const dw__call *call, const dw_gemm *g, dw__sm90_rope_form *form,
                      dw_sm90_rope *rope);
/* True if a tile of `columns` columns has what a head's rotation needs. */
bool dw__sm90_rope_fits(const dw__sm90_rope_form *form, int columns);
/* Appends the source of a launch: what sm90_program.cuh expects to be defined, and the GEMM. */
dw_status dw__sm90_rope_source(const dw__sm90_rope_form *form, dw_dtype dtype, dw__text *source);

/* ---- graph_gemm.c, segment_gemm.c: calls of the graph's operations ------------------------------- */

/* DW_UNSUPPORTED: the call has what sm90_gemm alone computes: factors or sums of squares of rows, codes of fp8-block. */
dw_status dw__gemm_refuse_sm90(const dw_gemm *call); /* gemm.c */

/* Makes the call of a linear layer or matmul, or of segment_linear and its gradient. False: operands lie in a way that no
 * GEMM kernel reads. */
bool dw__graph_gemm_call(const dw__operation_call *given, dw__gemm_groups_call *call);
bool dw__segment_gemm_call(const dw__operation_call *given, dw__gemm_groups_call *call);
/* Whether the kernel reads the rows of such a call that are given by an index. */
bool dw__sm90_gathers(const dw__gemm_groups_call *call);

/* ---- sm120_gemm.c: consumer and workstation Blackwell GPUs --------------------------------------- */

/* One row of DW_SM120_GEMM_TILES or DW_SM120_SCALED_TILES. */
typedef struct dw__sm120_tile {
    bool scaled;
    int m, n, warps, stages;
    int blocks; /* that an SM holds at once */
} dw__sm120_tile;
enum { DW__SM120_TILES = 4 };
extern const dw__sm120_tile dw__sm120_tiles[DW__SM120_TILES];

/* Returns whether this variant exists. */
bool dw__sm120_exists(const dw__gemm_shape *shape);
int dw__sm120_tile_columns(const dw__gemm_shape *shape); /* of D */
unsigned dw__sm120_shared_bytes(const dw__gemm_shape *shape);
/* The static cost model of a tile, as dw__gemm_cost_of. step_clocks: of all blocks of an SM together. */
dw__gemm_cost dw__sm120_cost_of(const dw_gemm *call, const dw__gemm_shape *shape, int sm_count);
/* Chooses the variant for a checked call: of the tiles whose clocks are within an eighth of the fewest, the one with
 * the fewest bytes. */
dw__gemm_shape dw__sm120_shape_of(const dw_gemm *call, dw__gemm_turned turned, int sm_count);
dw__jit_variant dw__sm120_variant(const dw__gemm_shape *shape);
/* As the entry's functions, for calls with turned operands. */
dw_status dw__sm120_supports(const dw_gemm *call, dw__gemm_turned turned,
                             const dw__gpu_target *gpu);
dw_status dw__sm120_prepare(const dw_gemm *call, dw__gemm_turned turned, const dw__context *context,
                            const dw__variant **variant);

/* ---- gemm.c: kernels --------------------------------------------------------------------------- */

extern const dw__kernel dw__sm100_gemm, dw__sm100_gemm_scaled;
extern const dw__kernel dw__sm120_gemm, dw__sm120_gemm_scaled; /* sm120_gemm.c */
extern const dw__kernel dw__sm90_gemm;                         /* sm90_gemm.c */
/* The kernel for a call on GPUs of a compute capability that has one. */
const dw__kernel *dw__gemm_kernel_on(const dw_gemm *call, int capability);
/* The reference: GEMM by its definition, for dense operands on any GPU. It runs only if the first-use check refused the
 * fast kernel. */
extern const dw__kernel dw__reference_gemm;

/* gemm_explain.c: PyTorch's kernel, and the members of our entries that only explanations use. */
extern const dw__kernel dw__torch_gemm;
void dw__gemm_kernel_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                             dw__kernel_seconds *result);
/* Seconds of `groups` GEMMs of cuBLAS that move `bytes` in all: the planner's model, with the constants that were
 * fitted to published runs. `part`: of the rate of dense GEMMs in 16 bits, for other types. 0 if a size is. */
double dw__gemm_library_seconds(const dw__gpu_target *gpu, double m, double n, double k,
                                double groups, double bytes, double part);
extern const char dw__gemm_library_source[]; /* names the model */
/* The larger of the times that the cost model's clocks, at the tensor cores' `flops_per_clock` per SM, and the memory
 * traffic allow. */
double dw__gemm_least_seconds(const dw_gemm *call, const dw__gpu_target *gpu,
                              const dw__gemm_cost *cost, double flops_per_clock);
struct json_t *dw__gemm_describe_tile(const dw__kernel *kernel, const void *call,
                                      const dw__gpu_target *gpu);

/* dw__gpu_family.choose, of dw_gemm. */
dw_status dw__gemm_choose(const void *call, int capability, const dw__kernel **kernel);

/* ---- gpu_cutlass.c -------------------------------------------------------------------------- */

/* Each of CUTLASS's kernels has an entry like one of these, with its own name and description. */
extern const dw__kernel dw__cutlass_gemm, dw__cutlass_grouped_gemm;

/* ---- gemm_first_use.c -------------------------------------------------------------------------- */

/* The call with which a variant is checked: sizes, types, alpha, activation, schemes. */
typedef struct dw__gemm_case {
    dw_gemm call;
    bool bias, residual, row_factors, row_squares;
    bool turned_d, plain_d; /* with codes of fp8-block */
    dw__gemm_turned turned;
    int sm_count; /* so few SMs that each block processes several tiles */
    /* groups 1 without `rows`: a GEMM. Otherwise the number of groups, which have m rows of A together; each group has
     * its own B, and the Bs follow one another. */
    int groups;
    int64_t rows[4];
    size_t
        workspace_bytes; /* that the variant needs, if it is not the one that the call would choose */
} dw__gemm_case;
dw__gemm_case dw__gemm_case_of(const dw__variant *variant);         /* gemm.c */
dw__gemm_case dw__sm90_case_of(const dw__variant *variant);         /* sm90_gemm.c */
dw__gemm_case dw__sm120_case_of(const dw__variant *variant);        /* sm120_gemm.c */
dw__gemm_case dw__gemm_cutlass_case_of(const dw__variant *variant); /* gpu_cutlass.c */
extern const dw__first_use dw__gemm_first_use;

/* Makes a call of multiply_codes, for examples: a [m, k], b [n, k]. */
void dw__multiply_codes_example(dw_dtype a, dw_dtype b, dw_dtype result, int64_t m, int64_t n,
                                int64_t k, dw__call *call);
/* Adds a bias to a call of multiply_codes. */
void dw__multiply_codes_add_bias(dw__call *c);
/* Gives such a call, of E4M3 codes and without a bias, the scales of fp8-block in place of those of tensors. */
void dw__multiply_codes_add_blocks(dw__call *c, bool square_a, bool square_b);

#endif
