/* Attention on a GPU: the public calls.
 *
 * Between the call and the launch there is arithmetic only: no allocation, no lock, no synchronisation. A kernel is
 * compiled and loaded by the first call that needs it.
 */
#include "kernel/cuda/attention.h"
#include <string.h>

/* ---- kernels that are loaded -------------------------------------------------------------------- */

enum { VARIANTS = 5 << 7 };

static unsigned variant_index(const dw__attention_shape *s) {
    static const unsigned char dims[] = {[1] = 0, [2] = 2, [3] = 3, [4] = 4};
    unsigned dim = s->head_dim == 96 ? 1 : dims[s->head_dim / 64];
    return dim << 7 | (unsigned)s->many_keys << 6 | (unsigned)s->f16 << 5 |
           (unsigned)s->softcap << 4 | (unsigned)s->dropout << 3 | (unsigned)s->packed << 2 |
           (unsigned)s->window << 1 | (unsigned)s->deterministic;
}

static dw_status check_device(const dw__context **context) {
    DW_RETURN_IF_FAILED(dw__device_cuda.context(context));
    if ((*context)->capability == 90) return DW_OK;
    return dw__fail(
        DW_UNSUPPORTED,
        "attention: GPU %d is a %s (compute capability %d.%d); this version's kernels run "
        "on 9.0 (H100, H200); use PyTorch's own attention on this GPU",
        (*context)->ordinal, (*context)->name, (*context)->capability / 10,
        (*context)->capability % 10);
}

static dw_status check_tile(const dw__attention_tile *tile, const dw__context *context) {
    if (!tile)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: there is no kernel for this head_dim; use another "
                        "implementation");
    if ((int)tile->shared_bytes > context->shared_bytes)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: the kernel needs %u bytes of shared memory, GPU %d gives %d",
                        tile->shared_bytes, context->ordinal, context->shared_bytes);
    return DW_OK;
}

static dw_status count_tiles(int64_t rows, int tile_rows, int64_t heads, int *tiles) {
    int64_t count = (rows + tile_rows - 1) / tile_rows * heads; /* below 2^29 * 2^40: no overflow */
    if (count > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: %lld tiles of work, more than %d; split the batch",
                        (long long)count, INT32_MAX);
    *tiles = (int)count;
    return DW_OK;
}

/* ---- by definition ------------------------------------------------------------------------------- */

/* One element after another, for calls that multiply nothing. */
static dw_status run_reference(const dw_attention *call, const dw__context *context,
                               dw__attention_pass pass) {
    static dw__jit_cell cells[2][2];
    bool f16 = call->dtype == DW_F16;
    dw__jit_variant variant = {
        .source = "common/attention_reference.cu",
        .entry = pass == DW__ATTENTION_FORWARD ? "reference_attention_forward"
                                               : "reference_attention_backward",
        .arch = "sm_90a",
    };
    dw__jit_cell *cell = &cells[pass][f16];
    dw_attention_params params;
    void *arguments[] = {&params}, *function = dw__jit_loaded(cell, context);
    dw__jit_add_define(&variant, "ELEMENT", f16);
    if (!function) DW_RETURN_IF_FAILED(dw__jit_load(cell, context, &variant, 0, &function));
    dw__attention_set_params(call, &params);
    dw__launch launch = {
        .name = variant.entry,
        .function = function,
        .grid = {1024, 1, 1},
        .block = {128, 1, 1},
        .stream = call->stream,
        .arguments = arguments,
    };
    return dw__device_cuda.launch(&launch);
}

/* ---- forward --------------------------------------------------------------------------------------- */

static dw_status launch_forward(const dw_attention *call, const dw__context *context) {
    static dw__jit_cell cells[VARIANTS];
    static const char entry[] = "sm90_attention_forward";
    const dw__attention_pass pass = DW__ATTENTION_FORWARD;
    dw__attention_shape shape = dw__attention_shape_of(call, pass);
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, pass);
    DW_RETURN_IF_FAILED(check_tile(tile, context));
    dw__jit_cell *cell = &cells[variant_index(&shape)];
    void *function = dw__jit_loaded(cell, context);
    if (!function) {
        dw__jit_variant variant = dw__attention_variant(&shape, pass, entry, "sm_90a");
        DW_RETURN_IF_FAILED(dw__jit_load(cell, context, &variant, tile->shared_bytes, &function));
    }

    dw_attention_params params;
    dw__tensor_map q, k, v;
    bool packed = shape.packed;
    int64_t rows_q = packed ? call->total_q : call->rows_q;
    int64_t rows_k = packed ? call->total_k : call->rows_k;
    dw__attention_set_params(call, &params);
    DW_RETURN_IF_FAILED(
        count_tiles(call->rows_q, tile->m, (int64_t)call->heads_q * call->batch, &params.tiles));
    DW_RETURN_IF_FAILED(dw__attention_map(call, &call->q, "q", call->heads_q, rows_q, tile->m, &q));
    DW_RETURN_IF_FAILED(
        dw__attention_map(call, &call->k, "k", call->heads_kv, rows_k, tile->n, &k));
    DW_RETURN_IF_FAILED(
        dw__attention_map(call, &call->v, "v", call->heads_kv, rows_k, tile->n, &v));
    int blocks = params.tiles < context->sm_count ? params.tiles : context->sm_count;
    void *arguments[] = {&q, &k, &v, &params};
    dw__launch launch = {
        .name = entry,
        .function = function,
        .grid = {(unsigned)blocks, 1, 1},
        .block = {128u * (1u + (unsigned)tile->consumers), 1, 1},
        .shared_bytes = tile->shared_bytes,
        .stream = call->stream,
        .arguments = arguments,
    };
    return dw__device_cuda.launch(&launch);
}

/* Nothing to write at all. */
static bool has_no_queries(const dw_attention *call) {
    return call->batch == 0 || call->rows_q == 0 || (call->offsets_q && call->total_q == 0);
}

static dw_status name_call(dw_status status, const dw_attention *call) {
    char text[256];
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "attention (%s)",
                           dw__attention_describe(call, text, sizeof text));
}

dw_status dw_attention_forward(const dw_attention *call) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(dw__attention_check(call, DW__ATTENTION_FORWARD, true));
    DW_RETURN_IF_FAILED(check_device(&context));
    if (has_no_queries(call)) return DW_OK;
    if (dw__attention_is_empty(call))
        return name_call(run_reference(call, context, DW__ATTENTION_FORWARD), call);
    return name_call(launch_forward(call, context), call);
}

/* ---- backward -------------------------------------------------------------------------------------- */

dw_status dw_attention_backward_workspace(const dw_attention *call, size_t *bytes) {
    *bytes = 0;
    return dw__attention_check(call, DW__ATTENTION_BACKWARD, false);
}

dw_status dw_attention_backward(const dw_attention *call) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(dw__attention_check(call, DW__ATTENTION_BACKWARD, true));
    DW_RETURN_IF_FAILED(check_device(&context));
    if (call->batch == 0) return DW_OK;
    return name_call(run_reference(call, context, DW__ATTENTION_BACKWARD), call);
}

dw_status dw_attention_supported(const dw_attention *call, bool backward) {
    const dw__context *context;
    const dw__attention_pass pass = backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD;
    DW_RETURN_IF_FAILED(dw__attention_check(call, pass, false));
    DW_RETURN_IF_FAILED(check_device(&context));
    dw__attention_shape shape = dw__attention_shape_of(call, DW__ATTENTION_FORWARD);
    return check_tile(dw__attention_tile_of(&shape, DW__ATTENTION_FORWARD), context);
}
