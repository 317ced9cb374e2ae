/* quantize_tiles of the graph: codes and scales of blocks as tensor cores read them.
 *
 * Rounding to nearest, without a rotation, is a call of quantize.c's kernel, which computes both orientations from one
 * read. Everything else is quantize_blocks of the graph, whose scales cuda/common/scale_tiles.cu then arranges, and whose
 * rows it pads unless their length is right. */
#include "common/scale_tiles_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_quantize.h"
#include "kernel/quantization.h"
#include <string.h>

enum { TILES, ROWS, ZEROS, ENTRIES }; /* entry points */
static const char *const entries[] = {"scale_tiles", "padded_rows", "zeros"};
enum { ALIGNMENT = 256, VECTOR = 16, MOST_ATTRS = 8 };

/* ---- the call ------------------------------------------------------------------------------------------------------ */

/* One orientation. Offsets are those in the workspace, of what the call has no tensor for. */
typedef struct way {
    int axis;
    dw_block_layout layout;
    int64_t row_bytes; /* of a padded row of codes */
    const dw__tensor *codes, *tiles;
    bool wanted;
    size_t codes_at, tiles_at;
} way;

typedef struct tiles_call {
    const dw__operation_call *given;
    const dw__tensor *x, *scale; /* scale: NULL for MX */
    dw__quantization q;
    bool nearest; /* by quantize.c */
    int count;
    way ways[2];
    size_t scale_at, amax_at, plain_codes, plain_scales, inner, bytes;
} tiles_call;

static size_t reserve(size_t *total, size_t bytes) {
    const size_t at = *total;
    *total += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return at;
}

/* NULL while a plan is made, and where the call has no tensor for it. */
static void *at(const tiles_call *t, const dw__tensor *tensor, size_t offset) {
    if (tensor && tensor->data) return tensor->data;
    return t->given->workspace ? (char *)t->given->workspace + offset : NULL;
}

static dw_quantized_matrix result_of(const tiles_call *t, int axis) {
    for (int i = 0; i < t->count; i++) {
        const way *w = &t->ways[i];
        if (w->axis == axis && w->wanted)
            return (dw_quantized_matrix){.wanted = 1,
                                         .codes = at(t, w->codes, w->codes_at),
                                         .stride = w->row_bytes,
                                         .scales = at(t, w->tiles, w->tiles_at)};
    }
    return (dw_quantized_matrix){.wanted = 0};
}

static dw_quantize quantize_call(const tiles_call *t) {
    return (dw_quantize){.struct_size = sizeof(dw_quantize),
                         .dtype = t->x->dtype,
                         .scheme = t->q.options.scheme,
                         .scale_rule = t->q.options.scale_rule,
                         .square = t->q.options.square,
                         .rows = t->q.rows,
                         .cols = t->q.cols,
                         .source = t->x->data,
                         .row_stride = t->q.rows > 1 ? t->x->stride[0] : t->q.cols,
                         .along_rows = result_of(t, 1),
                         .along_cols = result_of(t, 0),
                         .tensor_scale = t->q.tensor_scale ? at(t, t->scale, t->scale_at) : NULL,
                         .amax = t->q.tensor_scale ? at(t, NULL, t->amax_at) : NULL,
                         .stream = t->given->stream};
}

/* An empty matrix has a tensor scale too, which quantize.c's kernel does not write. */
static bool is_nearest(const tiles_call *t) {
    const dw__quantization *q = &t->q;
    if (q->hadamard || q->options.rounding == DW_ROUND_STOCHASTIC || q->rows == 0 || q->cols == 0 ||
        (q->cols > 1 && t->x->stride[1] != 1))
        return false;
    const dw_quantize call = quantize_call(t);
    return dw__quantize_check(&call, false) == DW_OK;
}

static dw_status tiles_call_of(const dw__operation_call *given, tiles_call *t) {
    const dw__call *c = &given->call;
    const bool both = !dw__call_attr(c, DW_ATTR_KEY_AXIS);
    dw__call shape = *c;
    if (shape.input_count > 1) shape.inputs[1].data = NULL; /* the seed is on the device */
    memset(t, 0, sizeof *t);
    t->given = given;
    t->x = &c->inputs[0];
    DW_RETURN_IF_FAILED(dw__quantization_of(&shape, &t->q));
    if (t->q.tensor_scale) t->scale = &c->outputs[c->output_count - 1];
    t->count = both ? 2 : 1;
    size_t codes = 0, scales = 0;
    for (int i = 0; i < t->count; i++) {
        way *w = &t->ways[i];
        dw_block_options options = t->q.options;
        if (both) options.axis = 1 - i;
        w->axis = options.axis;
        w->codes = &c->outputs[2 * i];
        w->tiles = w->codes + 1;
        DW_RETURN_IF_FAILED(dw_block_layout_of(&options, t->q.rows, t->q.cols, &w->layout));
        w->row_bytes = dw_tensor_bytes(w->codes->dtype, 1, &w->codes->shape[1]);
        w->wanted = w->codes->data || w->tiles->data;
        codes = w->layout.code_bytes > codes ? w->layout.code_bytes : codes;
        scales = w->layout.scale_bytes > scales ? w->layout.scale_bytes : scales;
    }
    if (!t->ways[0].wanted && !t->ways[1].wanted)
        t->ways[0].wanted = true; /* for the tensor scale */
    t->scale_at = reserve(&t->bytes, sizeof(float));
    t->amax_at = reserve(&t->bytes, VECTOR);
    t->nearest = is_nearest(t);
    for (int i = 0; i < t->count && t->nearest; i++) {
        way *w = &t->ways[i];
        if (!w->wanted) continue;
        if (!w->codes->data) w->codes_at = reserve(&t->bytes, dw__tensor_bytes(w->codes));
        if (!w->tiles->data) w->tiles_at = reserve(&t->bytes, dw__tensor_bytes(w->tiles));
    }
    if (t->nearest) return DW_OK;
    t->plain_codes = reserve(&t->bytes, codes);
    t->plain_scales = reserve(&t->bytes, scales);
    t->inner = t->bytes;
    return DW_OK;
}

/* ---- by quantize_blocks -------------------------------------------------------------------------------------------- */

typedef struct blocks_call {
    dw__operation_call call;
    dw_attr attrs[MOST_ATTRS];
    const dw__variant *variant;
} blocks_call;

static dw__tensor matrix(dw_dtype dtype, int64_t rows, int64_t columns, void *data) {
    dw__tensor t = {.data = data, .dtype = dtype, .rank = 2, .shape = {rows, columns}};
    dw__tensor_set_contiguous(&t);
    return t;
}

static bool is_padded(const way *w) { return w->layout.row_bytes != w->row_bytes; }

/* Finds the kernel's variant, and the bytes of its workspace. */
static dw_status blocks_call_of(const tiles_call *t, const way *w, const dw__context *context,
                                blocks_call *b, size_t *bytes) {
    const dw__call *c = &t->given->call;
    const bool has_axis = dw__call_attr(c, DW_ATTR_KEY_AXIS);
    const dw_block_layout *l = &w->layout;
    uint32_t count = 0;
    for (uint32_t i = 0; i <= c->attr_count; i++) { /* sorted by key */
        const bool before = i == c->attr_count || c->attrs[i].key > DW_ATTR_KEY_AXIS;
        if (!has_axis && before && (count == 0 || b->attrs[count - 1].key < DW_ATTR_KEY_AXIS))
            b->attrs[count++] = (dw_attr){.key = DW_ATTR_KEY_AXIS, .integer = w->axis};
        if (i < c->attr_count) b->attrs[count++] = c->attrs[i];
    }
    b->call = *t->given;
    b->call.workspace = at(t, NULL, t->inner);
    dw__call *made = &b->call.call;
    made->op = DW_OP_QUANTIZE_BLOCKS;
    made->attr_count = count;
    made->attrs = b->attrs;
    made->output_count = 3;
    made->outputs[0] = matrix(l->element, l->outer, l->inner,
                              is_padded(w) ? at(t, NULL, t->plain_codes) : w->codes->data);
    made->outputs[1] = matrix(l->scale, l->scale_rows, l->scale_cols, at(t, NULL, t->plain_scales));
    made->outputs[2] = (dw__tensor){.data = t->scale ? t->scale->data : NULL, .dtype = DW_F32};
    DW_RETURN_IF_FAILED(
        dw__graph_quantize.prepare(&dw__graph_quantize, &b->call, context, &b->variant));
    DW_RETURN_IF_FAILED(dw__variant_status(b->variant));
    return dw__graph_quantize.workspace_bytes(&dw__graph_quantize, &b->call, context, bytes);
}

static dw_status arrange(const tiles_call *t, const way *w, const dw__context *context,
                         const dw__variant *variant) {
    const dw_block_layout *l = &w->layout;
    dw_scale_tiles_params tiles = {.scales = at(t, NULL, t->plain_scales),
                                   .tiles = w->tiles->data,
                                   .rows = l->outer,
                                   .columns = l->scale_cols,
                                   .repeat = t->q.options.square ? l->block : 1,
                                   .wide = w->tiles->shape[1],
                                   .words = dw__tensor_count(w->tiles) / DW_SCALE_TILE_COLUMNS};
    dw_padded_rows_params rows = {.from = at(t, NULL, t->plain_codes),
                                  .to = w->codes->data,
                                  .row_bytes = l->row_bytes,
                                  .padded = w->row_bytes,
                                  .vectors = l->outer * w->row_bytes / VECTOR};
    if (tiles.tiles)
        DW_RETURN_IF_FAILED(dw__gpu_launch_each(t->given, context, entries[TILES],
                                                variant->functions[TILES], tiles.words, &tiles));
    if (!rows.to || !is_padded(w)) return DW_OK;
    return dw__gpu_launch_each(t->given, context, entries[ROWS], variant->functions[ROWS],
                               rows.vectors, &rows);
}

/* ---- the entry ----------------------------------------------------------------------------------------------------- */

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    tiles_call t;
    if (((const dw__operation_call *)call)->call.outputs[1].dtype == DW_F32)
        return dw__fail(DW_TYPE, "%s writes scales of one byte", kernel->name);
    DW_RETURN_IF_FAILED(tiles_call_of(call, &t));
    return dw__gpu_kernel_has(kernel, gpu);
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    tiles_call t;
    (void)kernel;
    DW_RETURN_IF_FAILED(tiles_call_of(call, &t));
    *bytes = t.bytes;
    for (int i = 0; i < t.count && !t.nearest; i++) {
        blocks_call blocks;
        size_t inner = 0;
        DW_RETURN_IF_FAILED(blocks_call_of(&t, &t.ways[i], context, &blocks, &inner));
        if (t.inner + inner > *bytes) *bytes = t.inner + inner;
    }
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    tiles_call t;
    DW_RETURN_IF_FAILED(tiles_call_of(call, &t));
    if (t.nearest) {
        const dw_quantize made = quantize_call(&t);
        DW_RETURN_IF_FAILED(
            dw__quantize_blocks.prepare(&dw__quantize_blocks, &made, context, variant));
        if (!t.q.tensor_scale || (*variant)->disabled) return DW_OK;
        return dw__variant_of(context, kernel, 0, variant); /* for zeros() */
    }
    for (int i = 0; i < t.count; i++) {
        blocks_call blocks;
        size_t bytes;
        if (t.ways[i].wanted)
            DW_RETURN_IF_FAILED(blocks_call_of(&t, &t.ways[i], context, &blocks, &bytes));
    }
    return dw__variant_of(context, kernel, 0, variant);
}

static dw_status clear(const tiles_call *t, const dw__context *context, const dw__variant *variant,
                       void *to, size_t bytes) {
    dw_zeros_params zeros = {.to = to, .vectors = (long long)bytes / VECTOR};
    return dw__gpu_launch_each(t->given, context, entries[ZEROS], variant->functions[ZEROS],
                               zeros.vectors, &zeros);
}

/* NVFP4: the largest magnitude starts at 0. The kernel writes whole blocks, behind which half of the vector that ends a
 * row may lie. */
static dw_status run_nvfp4(const tiles_call *t, const dw_quantize *call, const dw__context *context,
                           const dw__variant *own) {
    const dw__variant *variant;
    DW_RETURN_IF_FAILED(clear(t, context, own, call->amax, VECTOR));
    for (int i = 0; i < t->count; i++) {
        const way *w = &t->ways[i];
        if (w->wanted && w->layout.scale_cols * w->layout.block != w->codes->shape[1])
            DW_RETURN_IF_FAILED(
                clear(t, context, own, at(t, w->codes, w->codes_at), dw__tensor_bytes(w->codes)));
    }
    DW_RETURN_IF_FAILED(dw__quantize_blocks.prepare(&dw__quantize_blocks, call, context, &variant));
    return dw__quantize_enqueue(call, context, variant, true);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    tiles_call t;
    DW_RETURN_IF_FAILED(tiles_call_of(call, &t));
    if (t.nearest) {
        const dw_quantize made = quantize_call(&t);
        return t.q.tensor_scale ? run_nvfp4(&t, &made, context, variant)
                                : dw__quantize_enqueue(&made, context, variant, false);
    }
    for (int i = 0; i < t.count; i++) {
        blocks_call blocks;
        size_t bytes;
        if (!t.ways[i].wanted) continue;
        DW_RETURN_IF_FAILED(blocks_call_of(&t, &t.ways[i], context, &blocks, &bytes));
        DW_RETURN_IF_FAILED(dw__graph_quantize.enqueue(&blocks.call, context, blocks.variant));
        DW_RETURN_IF_FAILED(arrange(&t, &t.ways[i], context, variant));
    }
    return DW_OK;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel, (void)params;
    for (int i = 0; i < ENTRIES; i++)
        points[i].code = (dw__jit_variant){.source = "common/scale_tiles.cu",
                                           .entry = entries[i],
                                           .arch = dw__gpu_arch(capability)};
    return DW_OK;
}

/* NVFP4 of a rotated matrix, whose rows of codes are padded, and MXFP8 of columns, whose rows are not. */
static void example(uint64_t params, int index, dw__call *c) {
    enum { OUTER = 160, INNER = 76 };
    static const dw_attr nvfp4[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                                    {.key = DW_ATTR_KEY_SCHEME, .string = "nvfp4"},
                                    {.key = DW_ATTR_KEY_HADAMARD, .integer = 1}},
                         mxfp8[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 0},
                                    {.key = DW_ATTR_KEY_SCHEME, .string = "mxfp8"},
                                    {.key = DW_ATTR_KEY_HADAMARD, .integer = 1}};
    const int64_t block = index ? 32 : 16, padded = index ? OUTER : 96,
                  outer = index ? INNER : OUTER;
    (void)params;
    *c = (dw__call){
        .op = DW_OP_QUANTIZE_TILES,
        .attr_count = 3,
        .attrs = index ? mxfp8 : nvfp4,
        .input_count = 1,
        .output_count = index ? 2 : 3,
        .inputs = {{.dtype = DW_BF16, .rank = 2, .shape = {OUTER, INNER}}},
        .outputs = {{.dtype = index ? DW_E4M3 : DW_E2M1, .rank = 2, .shape = {outer, padded}},
                    {.dtype = index ? DW_E8M0 : DW_UE4M3,
                     .rank = 3,
                     .shape = {DW_SCALE_TILES_HIGH(outer), DW_SCALE_TILES_WIDE(padded / block),
                               DW_SCALE_TILE_BYTES}},
                    {.dtype = DW_F32}}};
    dw__tensor_set_contiguous(&c->inputs[0]);
    for (int i = 0; i < 3; i++) dw__tensor_set_contiguous(&c->outputs[i]);
}

const dw__kernel dw__gpu_quantize_tiles = {
    .name = "quantize_tiles",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_QUANTIZE_TILES,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "quantize_tiles",
    .source = "src/kernel/cuda/block_codes.c",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32; codes of MXFP8, MXFP4, NVFP4",
    .needs = "any strides",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "every byte is the definition's",
    .example = example,
    .tolerance_factor = 0.0,
};
