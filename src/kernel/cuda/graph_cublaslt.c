/* Matrix multiplications and linear layers of a graph by NVIDIA's cuBLASLt, on a real GPU.
 *
 * The library's matrices are column-major, so it computes y^T = b^T a^T: our b is its A, our a its B, our y its D. A
 * matrix whose rows are contiguous is, read by columns, its transpose. Each distinct GEMM (types, sizes, strides,
 * alignment, epilogue) is described to the library once in each context, which then names an algorithm. These
 * descriptions are entries of a table that only grows, so that calls find theirs without a lock.
 *
 * A variant is a class of GEMMs: the types, how the operands lie, whether there are batches and a bias. It has no code of
 * ours. Its first-use check multiplies small matrices of that class.
 *
 * Results have the same bits in every run. The library promises this for one algorithm on one GPU. The heuristic's
 * answer depends on the GEMM and the GPU alone; which of its algorithms is fastest is measured once and kept on disk
 * (lt_algorithm.h). Split sums are added in a separate step, in the compute type (DW_LT_REDUCTION_COMPUTE_TYPE; the
 * other schemes round partial sums to the result's type).
 *
 * An addend is the library's C, with a beta of 1; a bias is its epilogue, which applies to A B + C. The sums of an
 * operand over k are another epilogue, which the library has for some layouts: the heuristic tells.
 */
#include "base/json.h"
#include "common/scale_tiles_params.h"
#include "deepwell/explain.h"
#include "device/cublaslt.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/lt_algorithm.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { WORKSPACE = 32 << 20, ALIGNMENT = 16, ROOM_ALIGNMENT = 256, MOST_CALLS = 64 };

/* ---- the GEMM of a call ------------------------------------------------------------------------------- */

/* All that the library is told, but addresses. The members have one size, so that no byte is padding. */
typedef struct gemm_key {
    int64_t context; /* dw__context.index */
    int64_t m, n, k, batch;
    /* elements from one row, or column, to the next; c is the addend, or y if there is none */
    int64_t a_leading, b_leading, c_leading, y_leading;
    int64_t a_step, b_step, c_step, y_step; /* elements from one batch to the next */
    /* The library is called for each index of a second axis of batches, with as many elements from one to the next. */
    int64_t calls, a_next, b_next, c_next, y_next;
    int64_t a_turned, b_turned;   /* columns are contiguous, not rows */
    int64_t type, type_b, result; /* dw_dtype; type is a's, and b's unless these are codes */
    int64_t bias, apart;          /* apart: c is not y */
    int64_t sums, sum_type;       /* dw__operand_sum, and the sums' dw_dtype */
    int64_t tf32;                 /* operands are F32, multiplied as TF32 */
    int64_t a_alignment, b_alignment, c_alignment, y_alignment; /* in bytes, at most ALIGNMENT */
    int64_t scales; /* of blocks: block_scales; not in names */
    int64_t fast;   /* codes whose sums need not be added in F32; in names only where it is 1 */
} gemm_key;
enum { UNNAMED = 2 }; /* the last members, which names do not have */

/* Scales of blocks of codes: 1 and 2 are cublasLtMatmulMatrixScale_t of both operands. */
enum block_scales {
    SCALES_OF_16 = DW_LT_SCALES_OF_16,
    SCALES_OF_32 = DW_LT_SCALES_OF_32,
    FP8_BLOCK = 4, /* and the next two if an operand's blocks are square */
    SQUARE_A = 1,
    SQUARE_B = 2
};

/* Axes outside of a GEMM's columns, with the elements that each operand has from one index to the next. */
typedef struct outer_axes {
    int count;
    struct {
        int64_t size, a, b, c, y;
    } axis[DW_MAX_RANK];
} outer_axes;

enum { A, B, SCALE_A, SCALE_B, TILES_A, TILES_B }; /* operands of multiply_codes */

static bool is_linear(const dw__call *c) { return c->op == DW_OP_LINEAR; }
static bool multiplies_codes(const dw__call *c) { return c->op == DW_OP_MULTIPLY_CODES; }

/* Appends an axis, or merges it into the one outside of it. */
static void add_axis(outer_axes *axes, int64_t size, int64_t a, int64_t b, int64_t c, int64_t y) {
    if (size == 1) return;
    if (axes->count > 0) {
        const int last = axes->count - 1;
        if (axes->axis[last].a == a * size && axes->axis[last].b == b * size &&
            axes->axis[last].c == c * size && axes->axis[last].y == y * size) {
            axes->axis[last].size *= size;
            axes->axis[last].a = a;
            axes->axis[last].b = b;
            axes->axis[last].c = c;
            axes->axis[last].y = y;
            return;
        }
    }
    axes->axis[axes->count].size = size;
    axes->axis[axes->count].a = a;
    axes->axis[axes->count].b = b;
    axes->axis[axes->count].c = c;
    axes->axis[axes->count++].y = y;
}

/* Describes a matrix by its leading dimension. False: neither rows nor columns are contiguous, or elements overlap. */
static bool lay(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                int64_t *leading, int64_t *turned) {
    *turned = 0;
    *leading = rows == 1 ? columns : row_stride;
    if ((columns == 1 || column_stride == 1) && *leading >= columns) return true;
    *turned = 1;
    *leading = columns == 1 ? rows : column_stride;
    return (rows == 1 || row_stride == 1) && *leading >= rows;
}

/* A caller's tensor of one element lies anywhere, and when a plan is made its address is not known. */
static int64_t alignment_of(const dw__tensor *t) {
    const uintptr_t address = (uintptr_t)t->data;
    if (dw__tensor_count(t) == 1) return (int64_t)dw_dtype_bytes(t->dtype);
    return address % ALIGNMENT ? (int64_t)(address & -address) : ALIGNMENT;
}

/* Divides the merged axes into one or two of batches and the rows of a, which are the last axis if b has no part in it.
 * Without rows there is one axis, of batches. */
static bool split_axes(const outer_axes *axes, bool rows, gemm_key *g, int64_t *a_row,
                       int64_t *c_row, int64_t *y_row) {
    int batches = axes->count, inner = 0;
    g->m = g->batch = g->calls = 1;
    g->a_step = g->b_step = g->c_step = g->y_step = 0;
    g->a_next = g->b_next = g->c_next = g->y_next = 0;
    *a_row = g->k;
    *c_row = *y_row = g->n;
    if (rows && batches > 0 && axes->axis[batches - 1].b == 0) {
        batches--;
        g->m = axes->axis[batches].size;
        *a_row = axes->axis[batches].a;
        *c_row = axes->axis[batches].c;
        *y_row = axes->axis[batches].y;
    }
    if (batches == 0) return true;
    if (batches == 2) { /* a call for each index of the shorter axis */
        inner = axes->axis[1].size > axes->axis[0].size;
        g->calls = axes->axis[!inner].size;
        g->a_next = axes->axis[!inner].a;
        g->b_next = axes->axis[!inner].b;
        g->c_next = axes->axis[!inner].c;
        g->y_next = axes->axis[!inner].y;
    }
    g->batch = axes->axis[inner].size;
    g->a_step = axes->axis[inner].a;
    g->b_step = axes->axis[inner].b;
    g->c_step = axes->axis[inner].c;
    g->y_step = axes->axis[inner].y;
    return batches == 1 || (rows && batches == 2 && g->calls <= MOST_CALLS);
}

/* The alignment of all calls' addresses, which are so many elements apart. */
static int64_t alignment_with(int64_t alignment, int64_t next, const dw__tensor *t) {
    const int64_t bytes = next * (int64_t)dw_dtype_bytes(t->dtype);
    return bytes == 0 || bytes % alignment == 0 ? alignment : bytes & -bytes;
}

static int64_t block_scales_of(const dw__call *c) {
    if (dw__call_has_f32_scales(c))
        return FP8_BLOCK | (c->inputs[TILES_A].rank == 3 ? SQUARE_A : 0) |
               (c->inputs[TILES_B].rank == 3 ? SQUARE_B : 0);
    return c->inputs[TILES_A].dtype == DW_UE4M3 ? SCALES_OF_16 : SCALES_OF_32;
}

/* False: the operands lie in a way that the library does not read. A call without a result has m, n or batch 0. */
static bool key_of(const dw__call *c, gemm_key *g) {
    const dw__tensor *a = &c->inputs[0], *b = &c->inputs[1], *y = &c->outputs[0],
                     *addend = dw__call_addend(c) ? dw__call_addend(c) : y;
    const bool linear = is_linear(c);
    const int last = y->rank - 1, b_last = b->rank - 1;
    const bool a_turned = !linear && dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0,
               b_turned = linear                ? dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0
                          : multiplies_codes(c) ? true
                                                : dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
    const int a_column_axis = a_turned ? last - 1 : last,
              b_row_axis = b_turned ? b_last : b_last - 1,
              b_column_axis = b_turned ? b_last - 1 : b_last;
    outer_axes axes = {0};
    int64_t a_row, c_row, y_row, c_turned, y_turned;
    memset(g, 0, sizeof *g);
    g->type = a->dtype;
    g->type_b = b->dtype;
    g->result = y->dtype;
    g->n = y->shape[last];
    g->k = a->shape[a_column_axis];
    g->a_alignment = alignment_of(a);
    g->b_alignment = alignment_of(b);
    g->c_alignment = alignment_of(addend);
    g->apart = addend != y;
    g->y_alignment = alignment_of(y);
    g->bias = dw__call_bias(c) != NULL;
    g->sums = c->sums;
    g->tf32 = c->tf32 && a->dtype == DW_F32;
    if (multiplies_codes(c) && dw__call_has_tiles(c)) g->scales = block_scales_of(c);
    g->fast = multiplies_codes(c) && dw__call_int(c, DW_ATTR_KEY_FAST_ACCUMULATION, 0);
    if (g->sums) g->sum_type = c->outputs[1].dtype;
    if (dw__tensor_count(y) == 0) return true;
    if (g->k == 0) return false;
    for (int axis = 0; axis < last; axis++) {
        const bool is_row = linear || axis == last - 1;
        add_axis(&axes, y->shape[axis], a->stride[a_turned && axis == last - 1 ? last : axis],
                 is_row ? 0 : b->stride[axis], addend->stride[axis], y->stride[axis]);
    }
    /* Rows that are one in memory, or whose elements have gaps, still can be batches. */
    for (int rows = 1; rows >= 0; rows--)
        if (split_axes(&axes, rows, g, &a_row, &c_row, &y_row) &&
            lay(g->m, g->k, a_row, a->stride[a_column_axis], &g->a_leading, &g->a_turned) &&
            lay(g->k, g->n, b->stride[b_row_axis], b->stride[b_column_axis], &g->b_leading,
                &g->b_turned) &&
            lay(g->m, g->n, c_row, addend->stride[last], &g->c_leading, &c_turned) && !c_turned &&
            lay(g->m, g->n, y_row, y->stride[last], &g->y_leading, &y_turned) && !y_turned) {
            g->a_alignment = alignment_with(g->a_alignment, g->a_next, a);
            g->b_alignment = alignment_with(g->b_alignment, g->b_next, b);
            g->c_alignment = alignment_with(g->c_alignment, g->c_next, addend);
            g->y_alignment = alignment_with(g->y_alignment, g->y_next, y);
            return true;
        }
    return false;
}

static bool is_empty(const gemm_key *g) { return g->m == 0 || g->n == 0 || g->batch == 0; }

/* ---- the library's descriptions ------------------------------------------------------------------------- */

typedef struct gemm {
    struct gemm *next; /* in its bucket */
    gemm_key key;
    /* a and b are the call's, not the library's; c is NULL where it is y */
    void *handle, *product, *a, *b, *c, *y;
    dw__lt_algorithm algorithm; /* the heuristic's first, until it is chosen */
    _Atomic bool is_chosen;
    double seconds, ours; /* measured, also of our kernel; 0: not known */
    pthread_mutex_t
        addresses; /* those of the bias, the sums or the scales are a part of `product` */
} gemm;

enum { BUCKETS = 1 << 10 };
static gemm *_Atomic buckets[BUCKETS];                   /* lists that only grow at their heads */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of additions */

static gemm *_Atomic *bucket_of(const gemm_key *key) {
    return &buckets[dw__key_hash(key, sizeof *key) % BUCKETS];
}

static gemm *find(gemm *_Atomic *bucket, const gemm_key *key) {
    gemm *g = atomic_load_explicit(bucket, memory_order_acquire);
    while (g && memcmp(&g->key, key, sizeof *key) != 0) g = g->next;
    return g;
}

static int lt_type(int64_t dtype) {
    switch (dtype) {
    case DW_BF16: return DW_LT_BF16;
    case DW_F16: return DW_LT_F16;
    case DW_F64: return DW_LT_F64;
    case DW_E4M3: return DW_LT_E4M3;
    case DW_E5M2: return DW_LT_E5M2;
    case DW_E2M1: return DW_LT_E2M1;
    default: return DW_LT_F32;
    }
}

/* The matrix by columns: its rows are contiguous unless it is turned. */
static dw_status describe_matrix(const dw__cublaslt *lt, int64_t type, int64_t rows,
                                 int64_t columns, int64_t leading, int64_t turned, int64_t batch,
                                 int64_t step, void **matrix) {
    const int32_t count = (int32_t)batch;
    DW_RETURN_IF_FAILED(dw__cublaslt_check(
        lt->matrix_create(matrix, lt_type(type), (uint64_t)(turned ? rows : columns),
                          (uint64_t)(turned ? columns : rows), leading),
        "cublasLtMatrixLayoutCreate"));
    if (batch == 1) return DW_OK;
    int result = lt->matrix_set(*matrix, DW_LT_BATCH_COUNT, &count, sizeof count);
    if (result == 0) result = lt->matrix_set(*matrix, DW_LT_BATCH_STRIDE, &step, sizeof step);
    return dw__cublaslt_check(result, "cublasLtMatrixLayoutSetAttribute");
}

/* NVFP4's scales of tensors, whose product is alpha, are on the device. */
static bool scales_tensors(const gemm_key *key) { return key->scales == SCALES_OF_16; }

/* cublasLtMatmulMatrixScale_t of the library's A, our b, or of its B. */
static int scale_mode(const gemm_key *key, int operand) {
    if (!(key->scales & FP8_BLOCK)) return (int)key->scales;
    return key->scales & (operand == 0 ? SQUARE_B : SQUARE_A) ? DW_LT_SCALES_OF_SQUARES
                                                              : DW_LT_SCALES_OF_128;
}

static dw_status describe_product(const dw__cublaslt *lt, gemm *g) {
    const gemm_key *key = &g->key;
    const bool wide = key->type == DW_F64;
    const int first = key->b_turned ? DW_LT_TRANSPOSED : DW_LT_NORMAL,
              second = key->a_turned ? DW_LT_TRANSPOSED : DW_LT_NORMAL,
              epilogue = key->bias                 ? DW_LT_EPILOGUE_BIAS
                         : key->sums == DW__SUMS_A ? DW_LT_EPILOGUE_SUMS_B
                                                   : DW_LT_EPILOGUE_SUMS_A,
              bias_type = lt_type(key->bias ? key->result : key->sum_type);
    const bool has_epilogue = key->bias || key->sums;
    const int8_t fast = 1;
    /* Stands for the address of the sums, or of scales, without which the library names no algorithm. */
    const void *aligned = (const char *)0 + ROOM_ALIGNMENT;
    DW_RETURN_IF_FAILED(dw__cublaslt_check(lt->product_create(&g->product,
                                                              wide        ? DW_LT_COMPUTE_F64
                                                              : key->tf32 ? DW_LT_COMPUTE_TF32
                                                                          : DW_LT_COMPUTE_F32,
                                                              wide ? DW_LT_F64 : DW_LT_F32),
                                           "cublasLtMatmulDescCreate"));
    int result = lt->product_set(g->product, DW_LT_TRANSPOSE_A, &first, sizeof first);
    if (result == 0)
        result = lt->product_set(g->product, DW_LT_TRANSPOSE_B, &second, sizeof second);
    if (result == 0 && key->fast)
        result = lt->product_set(g->product, DW_LT_FAST_ACCUMULATION, &fast, sizeof fast);
    if (result == 0 && has_epilogue)
        result = lt->product_set(g->product, DW_LT_EPILOGUE, &epilogue, sizeof epilogue);
    if (result == 0 && has_epilogue)
        result = lt->product_set(g->product, DW_LT_BIAS_TYPE, &bias_type, sizeof bias_type);
    if (result == 0 && key->sums)
        result = lt->product_set(g->product, DW_LT_BIAS_POINTER, &aligned, sizeof aligned);
    if (result == 0 && scales_tensors(key)) {
        const int pointers = DW_LT_POINTERS_OF_DEVICE;
        result = lt->product_set(g->product, DW_LT_POINTER_MODE, &pointers, sizeof pointers);
    }
    for (int operand = 0; operand < 2 && key->scales && result == 0; operand++) {
        const int mode = scale_mode(key, operand);
        result = lt->product_set(g->product, DW_LT_SCALE_MODE_A + operand, &mode, sizeof mode);
        if (result == 0)
            result =
                lt->product_set(g->product, DW_LT_SCALES_A + operand, &aligned, sizeof aligned);
    }
    return dw__cublaslt_check(result, "cublasLtMatmulDescSetAttribute");
}

/* The library's A, B, C and D are our b, a, c and y. */
static dw_status set_preference(const dw__cublaslt *lt, const gemm_key *key, void *preference) {
    const uint64_t workspace = WORKSPACE;
    const uint32_t reductions = DW_LT_REDUCTION_COMPUTE_TYPE;
    const uint32_t alignment[] = {(uint32_t)key->b_alignment, (uint32_t)key->a_alignment,
                                  (uint32_t)key->c_alignment, (uint32_t)key->y_alignment};
    int result =
        lt->preference_set(preference, DW_LT_PREFER_WORKSPACE, &workspace, sizeof workspace);
    if (result == 0)
        result =
            lt->preference_set(preference, DW_LT_PREFER_REDUCTIONS, &reductions, sizeof reductions);
    for (int i = 0; i < 4 && result == 0; i++)
        result = lt->preference_set(preference, DW_LT_PREFER_ALIGNMENT_A + i, &alignment[i],
                                    sizeof alignment[i]);
    return dw__cublaslt_check(result, "cublasLtMatmulPreferenceSetAttribute");
}

/* The library adds in place only where C and D have one description. */
static void *addend_matrix(const gemm *g) { return g->key.apart ? g->c : g->y; }

static size_t bytes_from_first(int64_t type, int64_t lines, int64_t line, int64_t leading,
                               int64_t batch, int64_t step) {
    return (size_t)((batch - 1) * step + (lines - 1) * leading + line) *
           dw_dtype_bytes((dw_dtype)type);
}

/* Equal GEMMs have equal names on all contexts. */
static dw_status name_of(const gemm_key *key, dw__text *name) {
    int64_t words[sizeof *key / sizeof(int64_t)];
    memcpy(words, key, sizeof words);
    DW_RETURN_IF_FAILED(dw__text_printf(name, "gemm"));
    for (size_t i = 1; i < DW_COUNT(words) - UNNAMED; i++) /* behind the context */
        DW_RETURN_IF_FAILED(dw__text_printf(name, " %lld", (long long)words[i]));
    if (key->fast) DW_RETURN_IF_FAILED(dw__text_printf(name, " fast"));
    return DW_OK;
}

/* Reads what name_of() has written, but for what is no number. */
static bool key_from(const char *name, gemm_key *key) {
    int64_t words[sizeof *key / sizeof(int64_t)] = {0};
    int length = 0;
    if (strncmp(name, "gemm", 4) != 0) return false;
    name += 4;
    for (size_t i = 1; i < DW_COUNT(words) - UNNAMED; i++, name += length) {
        long long word;
        if (sscanf(name, "%lld%n", &word, &length) != 1) return false;
        words[i] = word;
    }
    memcpy(key, words, sizeof *key);
    return true;
}

/* ---- our kernel ------------------------------------------------------------------------------------------- */

/* The GEMM as sm90_gemm has it. Its B lies along k where the library's rows of b do not. */
typedef struct our_gemm {
    dw__gemm_groups_call call;
    const dw__context *context;
    const dw__variant *variant;
} our_gemm;

/* DW_OK if sm90_gemm computes the GEMM. Its first use is then over. */
static dw_status find_ours(const gemm_key *k, const dw__context *context, our_gemm *ours) {
    void *const somewhere = (char *)0 + ROOM_ALIGNMENT; /* aligned, never read */
    char name[DW__TARGET_NAME];
    const dw__gpu_target target = dw__gpu_target_of(context, name);
    dw_gemm g = {.struct_size = sizeof g,
                 .dtype = (dw_dtype)k->type,
                 .output = (dw_dtype)k->type,
                 .alpha = 1.0f,
                 .m = k->m,
                 .n = k->n,
                 .k = k->k,
                 .a = {somewhere, k->a_leading},
                 .b = {somewhere, k->b_leading},
                 .d = {somewhere, k->y_leading},
                 .bias = k->bias ? somewhere : NULL};
    const dw__gemm_turned turned = {k->a_turned != 0, k->b_turned == 0};
    if (!dw__dtype_is_half((dw_dtype)k->type) || k->type_b != k->type || k->result != k->type ||
        k->batch != 1 || k->calls != 1 || k->sums || k->apart || k->scales)
        return DW_UNSUPPORTED;
    DW_RETURN_IF_FAILED(dw__sm90_supports(&g, turned, &target));
    g.workspace_bytes = dw__sm90_workspace(&g, turned, context);
    ours->call = dw__gemm_single(&g, turned);
    ours->context = context;
    DW_RETURN_IF_FAILED(dw__sm90_prepare(&g, turned, context, &ours->variant));
    return dw__variant_status(ours->variant);
}

static dw_status run_ours(const void *described, const dw__lt_operands *operands) {
    const our_gemm *ours = described;
    dw__gemm_groups_call call = ours->call;
    call.gemm.a.data = operands->b;
    call.gemm.b.data = operands->a;
    call.gemm.d.data = operands->d;
    if (call.gemm.bias) call.gemm.bias = operands->bias;
    call.gemm.workspace = operands->workspace;
    call.gemm.stream = operands->stream;
    return dw__sm90_enqueue(&call, ours->context, ours->variant);
}

static dw_status choose_among(const dw__cublaslt *lt, const dw__context *context, gemm *g,
                              const dw__lt_algorithm *algorithms, int count) {
    const gemm_key *k = &g->key;
    our_gemm ours;
    const bool has_ours = find_ours(k, context, &ours) == DW_OK;
    const int64_t sums = k->sums == DW__SUMS_A ? k->m : k->sums ? k->n : 0;
    dw__text name = {0};
    const dw_status status = name_of(k, &name);
    const dw__lt_gemm described = {
        .library = lt,
        .context = context,
        .name = name.text,
        .type_a = (dw_dtype)k->type_b,
        .type_b = (dw_dtype)k->type,
        .type_c = (dw_dtype)k->result,
        .type_bias = (dw_dtype)(sums ? k->sum_type : k->result),
        .flops = 2.0 * (double)k->m * (double)k->n * (double)k->k * (double)k->batch,
        .handle = g->handle,
        .product = g->product,
        .a = g->b,
        .b = g->a,
        .c = addend_matrix(g),
        .d = g->y,
        .a_bytes = bytes_from_first(k->type_b, k->b_turned ? k->n : k->k, k->b_turned ? k->k : k->n,
                                    k->b_leading, k->batch, k->b_step),
        .b_bytes = bytes_from_first(k->type, k->a_turned ? k->k : k->m, k->a_turned ? k->m : k->k,
                                    k->a_leading, k->batch, k->a_step),
        .c_bytes = k->apart
                       ? bytes_from_first(k->result, k->m, k->n, k->c_leading, k->batch, k->c_step)
                       : 0,
        .d_bytes = bytes_from_first(k->result, k->m, k->n, k->y_leading, k->batch, k->y_step),
        .bias_bytes = k->bias ? (size_t)k->n * dw_dtype_bytes((dw_dtype)k->result)
                      : sums  ? (size_t)sums * dw_dtype_bytes((dw_dtype)k->sum_type)
                              : 0,
        .other = has_ours ? run_ours : NULL,
        .described = &ours,
        .other_workspace = has_ours ? ours.call.gemm.workspace_bytes : 0,
    };
    if (status == DW_OK)
        dw__lt_choose(&described, algorithms, count, WORKSPACE, &g->algorithm, &g->seconds,
                      &g->ours);
    dw__text_free(&name);
    return status;
}

/* Takes the heuristic's first algorithm, or the fastest if `measured`. */
static dw_status choose_algorithm(const dw__cublaslt *lt, const dw__context *context, bool measured,
                                  gemm *g) {
    static const char call[] = "cublasLtMatmulAlgoGetHeuristic";
    dw_status status = DW_OK;
    dw__lt_algorithm found[DW__LT_MOST_ALGORITHMS] = {{{0}, 0, 0, 0.0f, {0}}};
    void *preference = NULL;
    int count = 0, supported = 0;
    DW_TRY(
        dw__cublaslt_check(lt->preference_create(&preference), "cublasLtMatmulPreferenceCreate"));
    DW_TRY(set_preference(lt, &g->key, preference));
    DW_TRY(dw__cublaslt_check(lt->choose(g->handle, g->product, g->b, g->a, addend_matrix(g), g->y,
                                         preference, DW__LT_MOST_ALGORITHMS, found, &count),
                              call));
    for (int i = 0; i < count; i++)
        if (found[i].state == 0 && found[i].workspace <= WORKSPACE) found[supported++] = found[i];
    if (supported == 0)
        DW_TRY(
            dw__fail(DW_UNSUPPORTED, "%s: none of %d algorithms supports the GEMM", call, count));
    g->algorithm = found[0];
    /* scales have no memory here to measure with */
    if (measured && g->key.type != DW_F64 && !g->key.scales)
        DW_TRY(choose_among(lt, context, g, found, supported));

cleanup:
    if (preference) lt->preference_destroy(preference);
    return status;
}

static void release(const dw__cublaslt *lt, gemm *g) {
    if (!g) return;
    if (g->product) lt->product_destroy(g->product);
    if (g->a) lt->matrix_destroy(g->a);
    if (g->b) lt->matrix_destroy(g->b);
    if (g->c) lt->matrix_destroy(g->c);
    if (g->y) lt->matrix_destroy(g->y);
    dw__free(g);
}

static dw_status describe(const dw__cublaslt *lt, const dw__context *context, gemm *g) {
    const gemm_key *k = &g->key;
    DW_RETURN_IF_FAILED(dw__cublaslt_handle(lt, context, &g->handle));
    DW_RETURN_IF_FAILED(describe_product(lt, g));
    DW_RETURN_IF_FAILED(describe_matrix(lt, k->type, k->m, k->k, k->a_leading, k->a_turned,
                                        k->batch, k->a_step, &g->a));
    DW_RETURN_IF_FAILED(describe_matrix(lt, k->type_b, k->k, k->n, k->b_leading, k->b_turned,
                                        k->batch, k->b_step, &g->b));
    if (k->apart)
        DW_RETURN_IF_FAILED(describe_matrix(lt, k->result, k->m, k->n, k->c_leading, 0, k->batch,
                                            k->c_step, &g->c));
    DW_RETURN_IF_FAILED(
        describe_matrix(lt, k->result, k->m, k->n, k->y_leading, 0, k->batch, k->y_step, &g->y));
    return choose_algorithm(lt, context, false, g);
}

static dw_status add(const dw__cublaslt *lt, const dw__context *context, const gemm_key *key,
                     gemm **made) {
    gemm *_Atomic *bucket = bucket_of(key);
    dw_status status = DW_OK;
    *made = dw__calloc(1, sizeof **made);
    if (!*made) return dw__fail_memory("a GEMM", sizeof **made);
    (*made)->key = *key;
    if (context->plans_only) /* only the library on a GPU knows what it needs: the most */
        (*made)->algorithm.workspace = WORKSPACE;
    else
        DW_TRY(describe(lt, context, *made));
    pthread_mutex_init(&(*made)->addresses, NULL);
    (*made)->next = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, *made, memory_order_release);
    return DW_OK;

cleanup:
    release(lt, *made);
    *made = NULL;
    return status;
}

/* Adds the GEMM, or chooses its algorithm, or both. The lock is held. */
static dw_status add_or_choose(const dw__cublaslt *lt, const dw__context *context,
                               const gemm_key *key, bool chosen, gemm **found) {
    dw_status status = DW_OK;
    int before = 0;
    DW_RETURN_IF_FAILED(context->device->capture_relax(&before));
    if (!*found) DW_TRY(add(lt, context, key, found));
    if (!chosen || (*found)->is_chosen) goto cleanup;
    if (!context->plans_only) DW_TRY(choose_algorithm(lt, context, true, *found));
    (*found)->is_chosen = true;

cleanup:
    context->device->capture_restore(before);
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "%s of m %lld, n %lld, k %lld in %lld batches, %s",
                           key->bias ? "a linear layer" : "a matmul", (long long)key->m,
                           (long long)key->n, (long long)key->k, (long long)key->batch,
                           dw_dtype_name((dw_dtype)key->type));
}

/* The description of a GEMM that is not empty, made if this is the first call of its kind. What only asks whether the
 * library computes it does not need `chosen`. */
static dw_status gemm_of(const dw__context *context, gemm_key *key, bool chosen, gemm **found) {
    const dw__cublaslt *lt = NULL;
    dw_status status = DW_OK;
    key->context = context->index;
    *found = find(bucket_of(key), key);
    if (*found && (!chosen || (*found)->is_chosen)) return DW_OK;
    if (!context->plans_only) DW_RETURN_IF_FAILED(dw__cublaslt_load(&lt));
    pthread_mutex_lock(&lock);
    *found = find(bucket_of(key), key); /* another thread may have added it */
    status = add_or_choose(lt, context, key, chosen, found);
    pthread_mutex_unlock(&lock);
    return status;
}

/* ---- variants -------------------------------------------------------------------------------------------- */

static uint64_t params_of(const gemm_key *g) {
    return (uint64_t)g->type | (uint64_t)g->result << 4 | (uint64_t)g->a_turned << 8 |
           (uint64_t)g->b_turned << 9 | (uint64_t)(g->batch > 1) << 10 | (uint64_t)g->bias << 11 |
           (uint64_t)g->sums << 12 | (uint64_t)g->sum_type << 14 | (uint64_t)g->tf32 << 18 |
           (uint64_t)g->type_b << 19 | (uint64_t)g->scales << 23 | (uint64_t)g->fast << 26;
}

static int scales_of(uint64_t params) { return (int)(params >> 23 & 7); }

/* Adds scales of blocks to a call of multiply_codes with a k that is a multiple of 128, or of any with fp8-block. */
static void add_tiles(dw__call *c, int scales) {
    const bool nvfp4 = scales == SCALES_OF_16;
    if (scales & FP8_BLOCK) {
        dw__multiply_codes_add_blocks(c, scales & SQUARE_A, scales & SQUARE_B);
        return;
    }
    for (int i = 0; i < 2; i++) {
        const int64_t *codes = c->inputs[A + i].shape;
        if (!nvfp4) c->inputs[SCALE_A + i].rank = -1;
        c->inputs[TILES_A + i] = (dw__tensor){
            .dtype = nvfp4 ? DW_UE4M3 : DW_E8M0,
            .rank = 3,
            .shape = {DW_SCALE_TILES_HIGH(codes[0]),
                      DW_SCALE_TILES_WIDE(codes[1] / (nvfp4 ? 16 : 32)), DW_SCALE_TILE_BYTES}};
        dw__tensor_set_contiguous(&c->inputs[TILES_A + i]);
    }
    c->input_count = TILES_A + 2;
}

/* Lets a call of multiply_codes sum in fewer bits. */
static void allow_fast_accumulation(dw__call *c) {
    static const dw_attr attrs[][2] = {{{.key = DW_ATTR_KEY_DTYPE, .integer = DW_BF16},
                                        {.key = DW_ATTR_KEY_FAST_ACCUMULATION, .integer = 1}},
                                       {{.key = DW_ATTR_KEY_DTYPE, .integer = DW_F16},
                                        {.key = DW_ATTR_KEY_FAST_ACCUMULATION, .integer = 1}},
                                       {{.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32},
                                        {.key = DW_ATTR_KEY_FAST_ACCUMULATION, .integer = 1}}};
    const dw_dtype result = c->outputs[0].dtype;
    c->attrs = attrs[result == DW_BF16 ? 0 : result == DW_F16 ? 1 : 2];
    c->attr_count = 2;
}

/* Sizes of which no tile is a divisor, and sizes of whole tiles. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr transposed[2][2][3] = {{{{.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32},
                                                  {.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = 0},
                                                  {.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = 0}},
                                                 {{.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32},
                                                  {.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = 0},
                                                  {.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = 1}}},
                                                {{{.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32},
                                                  {.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = 1},
                                                  {.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = 0}},
                                                 {{.key = DW_ATTR_KEY_DTYPE, .integer = DW_F32},
                                                  {.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = 1},
                                                  {.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = 1}}}};
    static const dw_attr of_linear[2] = {{.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0},
                                         {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 1}};
    const dw_dtype type = (dw_dtype)(params & 15), result = (dw_dtype)(params >> 4 & 15);
    const int a_turned = params >> 8 & 1, b_turned = params >> 9 & 1;
    const dw__operand_sum sums = (dw__operand_sum)(params >> 12 & 3);
    const bool batched = params >> 10 & 1, bias = params >> 11 & 1;
    const int64_t batch = batched ? 2 : 1,
                  m = index  ? 128
                      : sums ? 72
                             : 70,
                  n = index  ? 64
                      : sums ? 136
                             : 129,
                  k = index ? 96 : 37;
    const uint32_t first = result == type;
    const int scales = scales_of(params);
    if (dw__dtype_is_code(type)) {
        const int64_t short_k = scales & FP8_BLOCK ? 160
                                : scales           ? 128
                                                   : 48,
                      long_k = scales & FP8_BLOCK ? 640
                               : scales           ? 256
                                                  : 96;
        dw__multiply_codes_example(type, (dw_dtype)(params >> 19 & 15), result, index ? 128 : 80,
                                   index ? 64 : 144, index ? long_k : short_k, c);
        if (scales) add_tiles(c, scales);
        if (bias) dw__multiply_codes_add_bias(c);
        if (params >> 26 & 1) allow_fast_accumulation(c);
        return;
    }
    *c = (dw__call){.op = bias ? DW_OP_LINEAR : DW_OP_MATMUL,
                    .attr_count = bias ? 1 : 3 - first,
                    .attrs = bias ? &of_linear[b_turned] : transposed[a_turned][b_turned] + first,
                    .input_count = bias ? 3 : 2,
                    .output_count = 1,
                    .tf32 = params >> 18 & 1,
                    .inputs = {{.dtype = type, .rank = 3, .shape = {batch, m, k}},
                               {.dtype = type, .rank = 3, .shape = {batch, k, n}},
                               {.dtype = type, .rank = 1, .shape = {n}}},
                    .outputs = {{.dtype = result, .rank = 3, .shape = {batch, m, n}}}};
    if (sums) {
        c->sums = sums;
        c->output_count = 2;
        c->outputs[1] = (dw__tensor){.dtype = (dw_dtype)(params >> 14 & 15),
                                     .rank = 1,
                                     .shape = {sums == DW__SUMS_A ? m : n},
                                     .stride = {1}};
    }
    if (!bias && a_turned) c->inputs[0].shape[1] = k, c->inputs[0].shape[2] = m;
    if (b_turned) c->inputs[1].shape[1] = n, c->inputs[1].shape[2] = k;
    if (bias) {
        dw__tensor *w = &c->inputs[1];
        w->rank = 2;
        w->shape[0] = w->shape[1], w->shape[1] = w->shape[2];
    }
    for (uint32_t i = 0; i < c->input_count; i++) dw__tensor_set_contiguous(&c->inputs[i]);
    dw__tensor_set_contiguous(&c->outputs[0]);
    if (!bias) return;
    /* A gap keeps batches from merging into the rows; a turned x has its columns contiguous. */
    int64_t *stride = c->inputs[0].stride;
    stride[0] = m * k + 16;
    stride[1] = a_turned ? 1 : k;
    stride[2] = a_turned ? m : 1;
}

/* ---- the entry --------------------------------------------------------------------------------------------- */

static bool computes(dw_op op) {
    return op == DW_OP_LINEAR || op == DW_OP_MATMUL || op == DW_OP_MULTIPLY_CODES;
}

static dw_status refuse(const dw__kernel *kernel, const char *expected) {
    return dw__fail(DW_UNSUPPORTED, "%s: expected %s", kernel->name, expected);
}

/* The library does not add a bias in F64, and may read biases as vectors. A tensor of one element may lie anywhere. */
static dw_status check_bias(const dw__kernel *kernel, const dw__call *c, const gemm_key *g) {
    const dw__tensor *bias = dw__call_bias(c);
    if (!bias) return DW_OK;
    if (multiplies_codes(c) && !dw__dtype_is_half(bias->dtype))
        return refuse(kernel, "a bias of codes in 16 bits");
    if (g->type == DW_F64) return refuse(kernel, "no bias in f64");
    if (g->n == 1 || !dw__tensor_is_contiguous(bias) || (uintptr_t)bias->data % ALIGNMENT != 0)
        return refuse(kernel, "a contiguous bias of several elements at a multiple of 16 bytes");
    return DW_OK;
}

static dw_status check_sums(const dw__kernel *kernel, const dw__call *c, const gemm_key *g) {
    const dw__tensor *sums = &c->outputs[1];
    if (!g->sums) return DW_OK;
    if (dw__dtype_is_half((dw_dtype)g->type) && (g->m % 8 != 0 || g->n % 8 != 0))
        return refuse(kernel, "sums beside a product in 16 bits of multiples of 8 columns");
    if (g->type == DW_F64 || g->batch != 1 || is_empty(g) || c->accumulates)
        return refuse(kernel, "sums of an operand of one product, not in f64, that adds nothing");
    if (dw__tensor_count(sums) != (g->sums == DW__SUMS_A ? g->m : g->n) ||
        dw__tensor_count(sums) == 1 || !dw__tensor_is_contiguous(sums) ||
        (uintptr_t)sums->data % ALIGNMENT != 0)
        return refuse(kernel, "contiguous sums of several columns at a multiple of 16 bytes");
    return DW_OK;
}

/* The library multiplies codes as op(A)^T B alone, which key_of() gives for them. */
static dw_status check_codes(const dw__kernel *kernel, const gemm_key *g) {
    if (g->type == DW_E5M2 && g->type_b == DW_E5M2)
        return refuse(kernel, "E4M3 codes on one side of a product of codes at least");
    if (g->n % 16 != 0 || g->k % 16 != 0 || g->a_alignment < 16 || g->b_alignment < 16 ||
        g->y_alignment < 16)
        return refuse(kernel, "codes in multiples of 16 columns, at multiples of 16 bytes");
    /* The documentation asks for multiples of 4; Transformer Engine has found that scales of 1 x 128 of the library's B
     * need multiples of 8. */
    if (g->scales & FP8_BLOCK && g->m % 8 != 0)
        return refuse(kernel, "a multiple of 8 rows with scales of blocks of fp8-block");
    if (g->scales == (FP8_BLOCK | SQUARE_A | SQUARE_B))
        return refuse(kernel, "square blocks for one operand at most");
    return DW_OK;
}

static dw_status check_call(const dw__kernel *kernel, const dw__call *c, gemm_key *g) {
    const int64_t most = INT32_MAX;
    if (!dw__dtype_is_float(c->inputs[0].dtype) && !multiplies_codes(c))
        return dw__fail(DW_TYPE, "%s: the element type is %s; expected bf16, f16, f32 or f64",
                        kernel->name, dw_dtype_name(c->inputs[0].dtype));
    if (!key_of(c, g)) return refuse(kernel, kernel->needs);
    if (g->m > most || g->n > most || g->k > most || g->batch > most)
        return refuse(kernel, "sizes below 2^31");
    DW_RETURN_IF_FAILED(check_bias(kernel, c, g));
    if (multiplies_codes(c)) return check_codes(kernel, g);
    return check_sums(kernel, c, g);
}

/* DW_OK on the GPU that the library runs on, and for architectures. */
static dw_status check_device(const dw__kernel *kernel, const dw__gpu_target *gpu) {
    const dw__cublaslt *lt;
    if (!gpu || !gpu->context) return DW_OK;
    if (gpu->context->plans_only) return dw__cublaslt_wanted();
    if (gpu->context->device != &dw__device_cuda || gpu->context->ptx_only)
        return dw__fail(DW_TYPE, "%s is for GPUs, not for emulated ones", kernel->name);
    const dw_status status = dw__cublaslt_load(&lt);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "%s", kernel->name);
}

/* Whether the first-use check accepts the GEMM and the library has an algorithm. Nothing is measured: the sizes may be
 * those of a question. */
static dw_status runs(const dw__kernel *kernel, const dw__context *context, gemm_key *key) {
    const dw__variant *variant;
    gemm *g = NULL;
    DW_RETURN_IF_FAILED(dw__variant_of(context, kernel, params_of(key), &variant));
    DW_RETURN_IF_FAILED(dw__variant_status(variant));
    return is_empty(key) ? DW_OK : gemm_of(context, key, false, &g);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    gemm_key g;
    if (multiplies_codes(c) && dw__call_has_tiles(c))
        return dw__fail(DW_TYPE, "%s multiplies codes without scales of blocks", kernel->name);
    if (dw__call_has_row_scales(c))
        return dw__fail(DW_TYPE, "%s multiplies codes with one scale for each tensor",
                        kernel->name);
    DW_RETURN_IF_FAILED(multiplies_codes(c) ? dw__gpu_kernel_has(kernel, gpu)
                                            : dw__gpu_kernel_computes(kernel, c, gpu));
    DW_RETURN_IF_FAILED(check_call(kernel, c, &g));
    DW_RETURN_IF_FAILED(check_device(kernel, gpu));
    /* `linear` is expanded unless this kernel is sure to run. */
    if (!is_linear(c) || !gpu || !gpu->context) return DW_OK;
    return runs(kernel, gpu->context, &g);
}

/* FMA units compute F32 at a sixteenth of the tensor cores' rate in 16 bits, F64's tensor cores at the same; TF32 has
 * half of that rate, FP8 codes have twice the rate of 16 bits, NVFP4 codes four times. */
static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    gemm_key g;
    double bytes = (double)dw__tensor_bytes(&c->outputs[0]) * (dw__call_addend(c) ? 2.0 : 1.0);
    (void)kernel;
    if (!key_of(c, &g)) return;
    for (uint32_t i = 0; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0) bytes += (double)dw__tensor_bytes(&c->inputs[i]);
    const double part = scales_tensors(&g)                    ? 4.0 /* NVFP4 */
                        : multiplies_codes(c)                 ? 2.0
                        : dw__dtype_is_half((dw_dtype)g.type) ? 1.0
                        : g.tf32                              ? 0.5
                                                              : 1.0 / 16.0;
    result->seconds = dw__gemm_library_seconds(gpu, (double)g.m, (double)g.n, (double)g.k,
                                               (double)(g.batch * g.calls), bytes, part);
    snprintf(result->from, sizeof result->from, "%s", dw__gemm_library_source);
}

static size_t room_for(size_t bytes) {
    return (bytes + ROOM_ALIGNMENT - 1) / ROOM_ALIGNMENT * ROOM_ALIGNMENT;
}

/* The library always writes both the product and the sums. One that nobody reads goes to the workspace. */
static void place_unread(const dw__operation_call *c, const gemm *g, void **y, void **sums) {
    char *room = (char *)c->workspace + room_for(g->algorithm.workspace);
    if (!*y) *y = room;
    if (!*sums) *sums = room + room_for(dw__tensor_bytes(&c->call.outputs[0]));
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    gemm_key key;
    gemm *g = NULL;
    (void)kernel;
    *bytes = 0;
    (void)key_of(c, &key);
    if (is_empty(&key)) return DW_OK;
    DW_RETURN_IF_FAILED(gemm_of(context, &key, true, &g));
    *bytes = g->algorithm.workspace;
    if (scales_tensors(&key)) *bytes = room_for(*bytes) + ROOM_ALIGNMENT;
    if (key.sums)
        *bytes = room_for(*bytes) + room_for(dw__tensor_bytes(&c->outputs[0])) +
                 room_for(dw__tensor_bytes(&c->outputs[1]));
    return DW_OK;
}

/* DW_UNSUPPORTED if the product alone and a step for the sums are faster than both at once: the library has fewer
 * algorithms for these. A step reads the operand at 0.65 of the memory's rate, as on an H200. */
static dw_status check_gain(const dw__kernel *kernel, const dw__context *context, const gemm *g) {
    gemm_key alone = g->key;
    gemm *product = NULL;
    const double launch = 4e-6, share = 0.65,
                 rate = 2e3 * (double)context->memory_clock_khz * context->memory_bus_bits / 8.0;
    const int64_t columns = g->key.sums == DW__SUMS_A ? g->key.m : g->key.n;
    if (!g->key.sums || g->seconds == 0.0 || rate <= 0.0) return DW_OK;
    alone.sums = alone.sum_type = 0;
    DW_RETURN_IF_FAILED(gemm_of(context, &alone, true, &product));
    const double bytes =
        (double)g->key.k * (double)columns * (double)dw_dtype_bytes((dw_dtype)g->key.type);
    if (product->seconds == 0.0 || g->seconds <= product->seconds + launch + bytes / (share * rate))
        return DW_OK;
    return refuse(kernel, "sums beside a product that are faster than a step of their own");
}

/* Whether our kernel is faster by more than the measurement varies. */
static bool ours_is_faster(double seconds, double ours) {
    const double least_gain = 0.01;
    return ours > 0.0 && ours < (1.0 - least_gain) * seconds;
}

/* DW_UNSUPPORTED if our kernel, which is the next, was measured to be faster. */
static dw_status check_ours(const dw__kernel *kernel, const gemm *g) {
    if (!ours_is_faster(g->seconds, g->ours)) return DW_OK;
    return refuse(kernel, "a product that Deepwell's sm90_gemm was not measured to compute faster");
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    gemm_key key;
    gemm *g = NULL;
    (void)key_of(&((const dw__operation_call *)call)->call, &key);
    DW_RETURN_IF_FAILED(dw__variant_of(context, kernel, params_of(&key), variant));
    if (is_empty(&key) || (*variant)->disabled) return DW_OK;
    DW_RETURN_IF_FAILED(gemm_of(context, &key, true, &g));
    DW_RETURN_IF_FAILED(check_ours(kernel, g));
    return check_gain(kernel, context, g);
}

static void *at(const dw__tensor *t, int64_t element) {
    return (char *)t->data + element * (int64_t)dw_dtype_bytes(t->dtype);
}

/* The library's A is our b. The scales are those of tensors, or of blocks. */
static int set_scales(const dw__cublaslt *lt, const gemm *g, const dw__call *c) {
    const int first = g->key.scales ? TILES_A : SCALE_A;
    void *const of_a = c->inputs[first + 1].data, *const of_b = c->inputs[first].data;
    const int result = lt->product_set(g->product, DW_LT_SCALES_A, &of_a, sizeof of_a);
    return result ? result : lt->product_set(g->product, DW_LT_SCALES_B, &of_b, sizeof of_b);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    static const float factors[] = {0.0f, 1.0f};
    static const double wide_factors[] = {0.0, 1.0};
    const dw__operation_call *c = call;
    const dw__cublaslt *lt;
    gemm_key key;
    gemm *g = NULL;
    int result = 0;
    (void)key_of(&c->call, &key);
    if (is_empty(&key)) return DW_OK;
    DW_RETURN_IF_FAILED(gemm_of(context, &key, true, &g)); /* prepare() has made it */
    DW_RETURN_IF_FAILED(dw__cublaslt_load(&lt));
    const bool wide = key.type == DW_F64;
    const dw__tensor *addend = dw__call_addend(&c->call);
    const void *alpha = wide ? (const void *)&wide_factors[1] : &factors[1],
               *beta =
                   wide ? (const void *)&wide_factors[addend != NULL] : &factors[addend != NULL];
    if (scales_tensors(&key)) {
        float *both = (float *)((char *)c->workspace + room_for(g->algorithm.workspace));
        dw_scale_product_params scales = {c->call.inputs[SCALE_A].data,
                                          c->call.inputs[SCALE_B].data, both};
        DW_RETURN_IF_FAILED(
            dw__gpu_launch(c, context, "scale_product", variant->functions[0], 1, 1, &scales));
        alpha = &both[0];
        beta = &both[1];
    }
    void *bias = key.bias ? dw__call_bias(&c->call)->data : c->call.outputs[1].data,
         *unread = c->call.outputs[0].data;
    const bool has_bias = key.bias || key.sums, has_scales = multiplies_codes(&c->call);
    if (key.sums) place_unread(c, g, &unread, &bias);
    if (has_bias || has_scales) pthread_mutex_lock(&g->addresses);
    if (has_bias) result = lt->product_set(g->product, DW_LT_BIAS_POINTER, &bias, sizeof(void *));
    if (has_scales) result = set_scales(lt, g, &c->call);
    for (int64_t i = 0; i < key.calls && result == 0; i++) {
        void *y = key.sums ? unread : at(&c->call.outputs[0], i * key.y_next);
        result = lt->multiply(g->handle, g->product, alpha, at(&c->call.inputs[1], i * key.b_next),
                              g->b, at(&c->call.inputs[0], i * key.a_next), g->a, beta,
                              addend ? at(addend, i * key.c_next) : y, addend_matrix(g), y, g->y,
                              g->algorithm.data, c->workspace, g->algorithm.workspace, c->stream);
    }
    if (has_bias || has_scales) pthread_mutex_unlock(&g->addresses);
    return dw__cublaslt_check(result, "cublasLtMatmul");
}

const dw__kernel dw__graph_cublaslt = {
    .name = "cublaslt",
    .backend = "cublas",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__PROOF_OF_PROVIDER,
    .shown = "NVIDIA's library; Deepwell has trained whole models with it on an H200",
    .operation = "linear, matmul, multiply_codes",
    .source = "src/kernel/cuda/graph_cublaslt.c",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64; the result of 16-bit operands also F32; FP8 codes",
    .needs =
        "matrices with contiguous rows or columns, batches at one distance or two, sizes above 0",
    .supports = supports,
    .seconds = seconds,
    .workspace_bytes = workspace_bytes,
    .results = DW__RESULTS_IN_ROWS,
    .prepare = prepare,
    .enqueue = enqueue,
    .first_use = &dw__operation_first_use,
    .tolerance = "sums in F32 (F64 in F64), rounded once; with a bias twice: before it is added, "
                 "and after; F32 operands are "
                 "rounded to TF32 where the plan allows it",
    .example = example,
    .tolerance_factor = 8.0,
    .rounds_before_bias = true,
    .accumulates = DW__ADDS_TO_ADDEND,
    .sums_operands = true,
};

/* ---- what was measured --------------------------------------------------------------------------------------------- */

static dw_status add_measured(void *state, const char *name, double seconds, double ours) {
    gemm_key key;
    json_t *rows = state;
    if (!key_from(name, &key) || !ours_is_faster(seconds, ours)) return DW_OK;
    json_t *row = json_pack("{s:I, s:I, s:I, s:s, s:b, s:b, s:b, s:f, s:f}", "m", (json_int_t)key.m,
                            "n", (json_int_t)key.n, "k", (json_int_t)key.k, "dtype",
                            dw_dtype_name((dw_dtype)key.type), "a_across", key.a_turned != 0,
                            "b_across", key.b_turned == 0, "bias", key.bias != 0,
                            "cublaslt_seconds", seconds, "deepwell_seconds", ours);
    return json_array_append_new(rows, row) == 0 ? DW_OK : dw__fail_memory("a measurement", 0);
}

dw_status dw_gemm_measured(char **json) {
    dw_status status = DW_OK;
    const dw__context *context = NULL;
    json_t *rows = json_array(), *root = NULL;
    if (!rows) DW_TRY(dw__fail_memory("measurements", 0));
    if (dw__device_cuda.context(&context) == DW_OK)
        DW_TRY(dw__lt_each_measured(context->name, add_measured, rows));
    root = json_pack("{s:s?, s:O}", "gpu", context ? context->name : NULL, "faster", rows);
    if (!root) DW_TRY(dw__fail_memory("measurements", 0));
    DW_TRY(dw__json_string(root, json));

cleanup:
    json_decref(rows);
    json_decref(root);
    return status;
}

/* ---- codes with scales of blocks ---------------------------------------------------------------------------------- */

static bool computes_codes(dw_op op) { return op == DW_OP_MULTIPLY_CODES; }

static dw_status scaled_supports(const dw__kernel *kernel, const void *call,
                                 const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    gemm_key g;
    if (gpu && !dw__gpu_is_blackwell(gpu->capability) && !dw__gpu_is_rtx_blackwell(gpu->capability))
        return dw__fail(DW_TYPE, "%s is for %s, not for %s", kernel->name, kernel->architectures,
                        gpu->name);
    if (!dw__call_has_tiles(c) || dw__call_has_f32_scales(c) ||
        (c->inputs[A].dtype == DW_E2M1) != (c->inputs[TILES_A].dtype == DW_UE4M3))
        return dw__fail(DW_TYPE, "%s multiplies codes of MXFP8 and NVFP4", kernel->name);
    DW_RETURN_IF_FAILED(check_call(kernel, c, &g));
    return check_device(kernel, gpu);
}

/* Our code for NVFP4 alone: alpha, from the scales of tensors. */
static dw_status scaled_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                     dw__entry_point *points) {
    (void)kernel;
    if (scales_of(params) == SCALES_OF_16)
        points->code = (dw__jit_variant){.source = "common/scale_tiles.cu",
                                         .entry = "scale_product",
                                         .arch = dw__gpu_arch(capability)};
    return DW_OK;
}

const dw__kernel dw__graph_cublaslt_scaled = {
    .name = "cublaslt_scaled",
    .backend = "cublas",
    .kind = DW__CALL_OPERATION,
    .computes = computes_codes,
    .proof = DW__PROOF_OF_PROVIDER,
    .shown = "NVIDIA's library; Deepwell's calls are tested with a substitute, not run on hardware",
    .operation = "multiply_codes with scales of blocks",
    .source = "src/kernel/cuda/graph_cublaslt.c",
    .architectures = "sm_100f (B200, B300), sm_120a (RTX 50, RTX PRO)",
    .elements = "codes of MXFP8, NVFP4; the result BF16, F16, F32",
    .needs = "codes and results in multiples of 16 columns, sizes above 0",
    .supports = scaled_supports,
    .seconds = seconds,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = scaled_entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "sums in F32, rounded once",
    .example = example,
    .tolerance_factor = 8.0,
};

/* ---- codes with scales of fp8-block --------------------------------------------------------------------------------- */

/* cuBLAS, "128-element 1D and 128x128 2D Block Scaling for FP8 Data Types". */
static dw_status fp8_block_supports(const dw__kernel *kernel, const void *call,
                                    const dw__gpu_target *gpu) {
    enum { FIRST_VERSION = 120900 };
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const dw__cublaslt *lt;
    gemm_key g;
    if (!dw__call_has_f32_scales(c))
        return dw__fail(DW_TYPE, "%s multiplies codes of fp8-block", kernel->name);
    if (gpu && gpu->capability != 90)
        return dw__fail(DW_UNSUPPORTED, "%s is for %s, not for %s", kernel->name,
                        kernel->architectures, gpu->name);
    DW_RETURN_IF_FAILED(check_call(kernel, c, &g));
    DW_RETURN_IF_FAILED(check_device(kernel, gpu));
    if (!gpu || !gpu->context || gpu->context->plans_only) return DW_OK;
    DW_RETURN_IF_FAILED(dw__cublaslt_load(&lt));
    if (lt->version() >= FIRST_VERSION) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "%s: cuBLASLt is version %zu; expected %d (CUDA 12.9) or later, or name such a "
                    "libcublasLt.so in DEEPWELL_CUBLASLT",
                    kernel->name, lt->version(), FIRST_VERSION);
}

const dw__kernel dw__graph_cublaslt_fp8_block = {
    .name = "cublaslt_fp8_block",
    .backend = "cublas",
    .kind = DW__CALL_OPERATION,
    .computes = computes_codes,
    .proof = DW__PROOF_OF_PROVIDER,
    .shown = "NVIDIA's library; Deepwell's calls are tested with a substitute, not run on hardware",
    .operation = "multiply_codes with scales of fp8-block",
    .source = "src/kernel/cuda/graph_cublaslt.c",
    .architectures = "sm_90a (H100, H200)",
    .elements = "E4M3 codes with F32 scales of 1 x 128 or 128 x 128; the result BF16, F16, F32",
    .needs = "codes and results in multiples of 16 columns, 8 rows, sizes above 0; cuBLASLt 12.9",
    .supports = fp8_block_supports,
    .seconds = seconds,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .first_use = &dw__operation_first_use,
    .tolerance = "sums of 128 products in 14 bits, added in F32, rounded once",
    .example = example,
    .tolerance_factor = 8.0,
    .rounds_before_bias = true,
};
