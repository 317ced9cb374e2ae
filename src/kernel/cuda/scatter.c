/* scatter_add, embedding_backward and large calls of put_along_add, by cuda/common/scatter.cu: the indexes are sorted, then
 * each row of the result is written once, a sum or zeros. A few rows are filled with zeros while the indexes are sorted.
 * A variant is compiled for the types of elements and indexes, and for 16-byte accesses. */
#include "common/scatter_params.h"
#include "kernel/cuda/gpu_kernels.h"

enum { TILES, MERGE, ROWS, FINISH }; /* entry points */
static const char *const entries[] = {"scatter_tiles", "scatter_merge", "scatter_rows",
                                      "scatter_finish"};
enum { ENTRY_BYTES = 8 };
/* Bytes of zeros that each kernel of the sort writes meanwhile: about as many as an H100 or H200 stores in its time. */
enum { ZEROS_MEANWHILE = 8 << 20 };
enum { LEAST_ROW_BYTES = 64 }; /* of a row whose zeros are written beside the sums */

static bool is_along(const dw__call *c) { return c->op == DW_OP_PUT_ALONG_ADD; }

/* Of rows; put_along_add has rows of one element, of all axes together. */
static int axis_of(const dw__call *c) {
    return c->op == DW_OP_SCATTER_ADD ? (int)dw__call_int(c, DW_ATTR_KEY_AXIS, 0) : 0;
}

static int64_t product(const int64_t *shape, int from, int to) {
    int64_t count = 1;
    for (int axis = from; axis < to; axis++) count *= shape[axis];
    return count;
}

static int64_t outers_of(const dw__call *c) {
    return is_along(c) ? 1 : product(c->outputs[0].shape, 0, axis_of(c));
}

static int64_t inners_of(const dw__call *c) {
    const dw__tensor *y = &c->outputs[0];
    return is_along(c) ? 1 : product(y->shape, axis_of(c) + 1, y->rank);
}

static int64_t rows_of(const dw__call *c) {
    const dw__tensor *y = &c->outputs[0];
    return is_along(c) ? dw__tensor_count(y) : y->shape[axis_of(c)];
}

/* Elements of 16 bytes where rows consist of such pieces, else 1. The engine aligns tensors to 16 bytes. */
static int vector_of(const dw__call *c) {
    const dw__tensor *x = &c->inputs[1], *y = &c->outputs[0];
    const int most = (int)(16 / dw_dtype_bytes(x->dtype));
    const bool is_aligned = (((uintptr_t)x->data | (uintptr_t)y->data) & 15) == 0;
    return is_aligned && inners_of(c) % most == 0 ? most : 1;
}

static size_t buffer_bytes(const dw__call *c) {
    return ((size_t)dw__tensor_count(&c->inputs[0]) * ENTRY_BYTES + 255) / 256 * 256;
}

static int64_t tiles_of(const dw__call *c) {
    return (dw__tensor_count(&c->inputs[0]) + DW_SCATTER_TILE - 1) / DW_SCATTER_TILE;
}

/* Returns the size of the sums that rows have in each tile, which are F32 for 16-bit types. */
static size_t share_bytes(const dw__call *c) {
    const size_t width = dw_dtype_bytes(c->outputs[0].dtype);
    return (size_t)(tiles_of(c) * outers_of(c) * 2 * inners_of(c)) * (width < 4 ? 4 : width);
}

static int64_t count_of(const dw__call *c) { return dw__tensor_count(&c->inputs[0]); }

/* True if scatter_rows writes the zeros of rows that the sort has left out. Rows of a few bytes are not worth their bits. */
static bool fills_rows(const dw__call *c) {
    return c->accumulates == DW__ADDS_NOTHING && outers_of(c) == 1 &&
           count_of(c) > DW_SCATTER_RUN &&
           inners_of(c) * (int64_t)dw_dtype_bytes(c->outputs[0].dtype) >= LEAST_ROW_BYTES;
}

static size_t selected_bytes(const dw__call *c) {
    return fills_rows(c) ? ((size_t)rows_of(c) + 31) / 32 * sizeof(unsigned) : 0;
}

/* Runs that a merge makes one of. An entry is searched for in each of them, so fewer are faster where there are more
 * entries than a GPU has threads, though there are more merges. */
static int ways_for(int64_t count, int64_t run) {
    const int64_t most = count > 1 << 17 ? 8 : 32, runs = (count + run - 1) / run;
    return (int)(runs < most ? runs : most);
}

static bool computes(dw_op op) {
    return op == DW_OP_SCATTER_ADD || op == DW_OP_EMBEDDING_BACKWARD || op == DW_OP_PUT_ALONG_ADD;
}

/* The indexes of put_along_add may leave out the ends of other axes than the one that they select from. */
static bool covers_all_lines(const dw__call *c) {
    const dw__tensor *index = &c->inputs[0], *y = &c->outputs[0];
    const int along = (int)dw__call_int(c, DW_ATTR_KEY_AXIS, 0);
    bool covers = y->rank > 0;
    for (int axis = 0; axis < y->rank; axis++)
        covers &= axis == along || index->shape[axis] == y->shape[axis];
    return covers;
}

/* gather.c has a thread for each result, which reads all indexes of its line one after the other: some 20 ns for each,
 * and 4 us for four million reads of all threads. Sorting takes a launch of some 4 us for each merge, and three others.
 * These are estimates. */
static bool sorting_is_faster(const dw__call *c) {
    const int along = (int)dw__call_int(c, DW_ATTR_KEY_AXIS, 0);
    const double indexes = (double)c->inputs[0].shape[along],
                 reads = indexes * (double)dw__tensor_count(&c->outputs[0]);
    double launches = 3;
    for (int64_t run = DW_SCATTER_RUN; run < count_of(c); run *= ways_for(count_of(c), run))
        launches++;
    return indexes > 200 * launches || reads > 4e6 * launches;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    if (!dw__tensor_is_contiguous(&c->inputs[0]) || !dw__tensor_is_contiguous(&c->inputs[1]) ||
        !dw__tensor_is_contiguous(&c->outputs[0]))
        return dw__fail(DW_UNSUPPORTED, "%s: expected contiguous tensors", kernel->name);
    if (is_along(c) && c->inputs[1].dtype == DW_BOOL)
        return dw__fail(DW_TYPE, "%s: expected elements that are not BOOL", kernel->name);
    if (is_along(c) && !(covers_all_lines(c) && sorting_is_faster(c)))
        return dw__fail(DW_UNSUPPORTED, "%s: expected indexes of all lines, and many of them",
                        kernel->name);
    if (dw__tensor_count(&c->inputs[0]) >= UINT32_MAX || rows_of(c) >= UINT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%s: expected fewer than 2^32 - 1 indexes and rows",
                        kernel->name);
    return dw__gpu_kernel_computes(kernel, c, gpu);
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    (void)kernel;
    (void)context;
    *bytes = 2 * buffer_bytes(c) + share_bytes(c) + selected_bytes(c);
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    const uint64_t type = (uint64_t)dw__gpu_element(c->inputs[1].dtype),
                   wide = c->inputs[0].dtype == DW_I64, vector = (uint64_t)vector_of(c);
    return dw__variant_of(context, kernel, type | wide << 4 | vector << 5, variant);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t blocks_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

/* Rows that each kernel of the sort fills with zeros: a multiple of 32. */
static int64_t rows_meanwhile(const dw__call *c) {
    const int64_t row = inners_of(c) * (int64_t)dw_dtype_bytes(c->outputs[0].dtype);
    return larger(1, ZEROS_MEANWHILE / row / 32) * 32;
}

/* Threads side by side: as many pieces as a row has, up to a warp. Those of one warp then do the same work. */
static int lanes_for(int64_t pieces) {
    int lanes = 1;
    while (lanes < 32 && lanes < pieces) lanes *= 2;
    return lanes;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const dw__tensor *index = &c->call.inputs[0], *x = &c->call.inputs[1], *y = &c->call.outputs[0];
    const int vector = (int)(variant->params >> 5);
    const int64_t inners = inners_of(&c->call), lanes = lanes_for((inners + vector - 1) / vector);
    char *buffers[2] = {c->workspace, (char *)c->workspace + buffer_bytes(&c->call)};
    dw_scatter_params p = {.index = index->data,
                           .x = x->data,
                           .result = y->data,
                           .count = dw__tensor_count(index),
                           .rows = rows_of(&c->call),
                           .padding = c->call.op == DW_OP_EMBEDDING_BACKWARD
                                          ? dw__call_int(&c->call, DW_ATTR_KEY_PADDING_INDEX, -1)
                                          : -1,
                           .accumulates = c->call.accumulates != DW__ADDS_NOTHING,
                           .outers = outers_of(&c->call),
                           .inners = inners,
                           .to = buffers[0],
                           .shares = buffers[1] + buffer_bytes(&c->call),
                           .lanes = (int)lanes,
                           .error = c->error};
    if (is_along(&c->call)) {
        const int along = (int)dw__call_int(&c->call, DW_ATTR_KEY_AXIS, 0);
        p.along = y->shape[along];
        p.along_count = index->shape[along];
        p.along_inners = product(y->shape, along + 1, y->rank);
    }
    /* The result's pieces: each kernel of the sort fills `zeros` of them, or scatter_tiles all. */
    const bool fills = fills_rows(&c->call);
    const int64_t row_pieces = larger(1, blocks_of(inners, vector)),
                  pieces = p.accumulates ? 0 : dw__tensor_count(y) / vector,
                  zeros = fills ? rows_meanwhile(&c->call) * row_pieces : pieces;
    int next = 0;
    if (fills) p.selected = (unsigned *)(void *)((char *)p.shares + share_bytes(&c->call));
    p.zeros_to = smaller(pieces, zeros);
    DW_RETURN_IF_FAILED(dw__gpu_launch(
        c, context, entries[TILES], variant->functions[TILES],
        larger(blocks_of(p.zeros_to, DW_SCATTER_RUN), blocks_of(p.count, DW_SCATTER_RUN)),
        DW_SCATTER_RUN, &p));
    for (p.run = DW_SCATTER_RUN; p.run < p.count; p.run *= p.ways) {
        p.from = buffers[next];
        next = !next;
        p.to = buffers[next];
        p.ways = ways_for(p.count, p.run);
        p.is_last_merge = p.run * p.ways >= p.count;
        p.zeros_from = p.zeros_to;
        p.zeros_to = smaller(pieces, p.zeros_from + zeros);
        DW_RETURN_IF_FAILED(
            dw__gpu_launch(c, context, entries[MERGE], variant->functions[MERGE],
                           larger(blocks_of(p.zeros_to - p.zeros_from, DW_SCATTER_THREADS),
                                  blocks_of(p.count, 32)),
                           DW_SCATTER_THREADS, &p));
    }
    p.from = buffers[next];
    /* `lanes` threads for each tile, outer index and part of a row */
    const int64_t groups = tiles_of(&c->call) * p.outers * blocks_of(inners, lanes * vector),
                  adding = blocks_of(groups * lanes, DW_SCATTER_THREADS),
                  resident = (int64_t)DW_SCATTER_RESIDENT * context->sm_count;
    if (p.zeros_to == pieces) p.selected = NULL;
    p.zero_row = p.zeros_to / row_pieces;
    DW_RETURN_IF_FAILED(dw__gpu_launch(c, context, entries[ROWS], variant->functions[ROWS],
                                       p.selected ? resident : adding, DW_SCATTER_THREADS, &p));
    return dw__gpu_launch(c, context, entries[FINISH], variant->functions[FINISH], adding,
                          DW_SCATTER_THREADS, &p);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    for (int i = 0; i < (int)DW_COUNT(entries); i++) {
        points[i].code = (dw__jit_variant){
            .source = "common/scatter.cu", .entry = entries[i], .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "TYPE", (int)(params & 15));
        dw__jit_add_define(&points[i].code, "VECTOR", (int)(params >> 5));
        dw__jit_add_define(&points[i].code, "WIDE", (int)(params >> 4 & 1));
    }
    return DW_OK;
}

/* Indexes are from 0 to 2 (operation_first_use.c), so that rows have many addends, or none: along the middle axis, and
 * by more indexes than a tile has, which are those of single elements in variants that access them. */
static void example(uint64_t params, int index, dw__call *c) {
    static const int64_t rows = 7, size[] = {2, 7, 3};
    static const dw_attr along[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                                    {.key = DW_ATTR_KEY_SIZE, .count = 3, .list = size}};
    static const dw_attr middle[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                                     {.key = DW_ATTR_KEY_SIZE, .count = 1, .list = &rows}},
                         first[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 0},
                                    {.key = DW_ATTR_KEY_SIZE, .count = 1, .list = &rows}};
    enum { MANY = DW_SCATTER_RUN + 77 };
    const dw_dtype dtype = (dw_dtype)(params & 15), index_dtype = params >> 4 & 1 ? DW_I64 : DW_I32;
    const int64_t vector = (int64_t)(params >> 5), columns = vector > 1 ? 37 * vector : 131;
    *c = (dw__call){.op = DW_OP_SCATTER_ADD,
                    .attr_count = 2,
                    .attrs = middle,
                    .input_count = 2,
                    .output_count = 1,
                    .inputs = {{.dtype = index_dtype, .rank = 2, .shape = {2, 30}},
                               {.dtype = dtype, .rank = 4, .shape = {3, 2, 30, columns}}},
                    .outputs = {{.dtype = dtype, .rank = 3, .shape = {3, rows, columns}}}};
    if (index && vector == 1 && dtype != DW_BOOL) {
        c->op = DW_OP_PUT_ALONG_ADD;
        c->attrs = along;
        c->inputs[0] = (dw__tensor){.dtype = index_dtype, .rank = 3, .shape = {2, MANY / 4, 3}};
        c->inputs[1] = (dw__tensor){.dtype = dtype, .rank = 3, .shape = {2, MANY / 4, 3}};
        c->outputs[0] = (dw__tensor){.dtype = dtype, .rank = 3, .shape = {2, 7, 3}};
    } else if (index) {
        c->attrs = first;
        c->inputs[0] = (dw__tensor){.dtype = index_dtype, .rank = 1, .shape = {MANY}};
        c->inputs[1] = (dw__tensor){.dtype = dtype, .rank = 2, .shape = {MANY, vector}};
        c->outputs[0] = (dw__tensor){.dtype = dtype, .rank = 2, .shape = {rows, vector}};
    }
    for (int i = 0; i < 2; i++) dw__tensor_set_contiguous(&c->inputs[i]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

const dw__kernel dw__gpu_scatter = {
    .name = "scatter",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "scatter_add, embedding_backward, put_along_add",
    .source = "cuda/common/scatter.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type but BOOL; indexes I32 or I64",
    .needs =
        "contiguous tensors; fewer than 2^32 - 1 indexes and rows; put_along_add: many indexes",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .accumulates = DW__ADDS_TO_OUTPUT,
    .tolerance = "accumulates in F32 (F64 in F64) and rounds once; integers exactly",
    .example = example,
    .tolerance_factor = 8.0,
};
