/* group_rows, by cuda/common/group_rows.cu: two launches, one for counts and one for places. A variant is compiled for
 * the type of the index. */
#include "common/group_rows_params.h"
#include "kernel/cuda/gpu_kernels.h"

enum { COUNT, PLACE }; /* entry points */
static const char *const entries[] = {"group_rows_count", "group_rows_place"};

static int64_t tile_rows(int64_t rows) {
    const int64_t shared = (rows + DW_GROUP_ROWS_TILES - 1) / DW_GROUP_ROWS_TILES,
                  whole = (shared + DW_GROUP_ROWS_THREADS - 1) / DW_GROUP_ROWS_THREADS *
                          DW_GROUP_ROWS_THREADS;
    return whole > DW_GROUP_ROWS_TILE ? whole : DW_GROUP_ROWS_TILE;
}

/* At least one, which writes the offsets. */
static int64_t tile_count(int64_t rows) {
    return rows == 0 ? 1 : (rows + tile_rows(rows) - 1) / tile_rows(rows);
}

static int64_t groups_of(const dw__call *c) { return c->outputs[2].shape[0] - 1; }

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (groups_of(c) > DW_GROUP_ROWS_MOST)
        return dw__fail(DW_UNSUPPORTED, "%s: %lld groups; expected at most %d", kernel->name,
                        (long long)groups_of(c), DW_GROUP_ROWS_MOST);
    return DW_OK;
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    (void)kernel;
    (void)context;
    *bytes = (size_t)(tile_count(c->inputs[0].shape[0]) * groups_of(c)) * sizeof(int32_t);
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    return dw__variant_of(context, kernel, c->inputs[0].dtype == DW_I64, variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const dw__tensor *index = &c->call.inputs[0];
    const int64_t rows = index->shape[0];
    dw_group_rows_params p = {.index = index->data,
                              .index_step = index->stride[0],
                              .order = c->call.outputs[0].data,
                              .place = c->call.outputs[1].data,
                              .offsets = c->call.outputs[2].data,
                              .counts = c->workspace,
                              .rows = (int)rows,
                              .groups = (int)groups_of(&c->call),
                              .tiles = (int)tile_count(rows),
                              .tile = (int)tile_rows(rows),
                              .error = c->error};
    for (int entry = COUNT; entry <= PLACE; entry++)
        DW_RETURN_IF_FAILED(dw__gpu_launch(c, context, entries[entry], variant->functions[entry],
                                           p.tiles, DW_GROUP_ROWS_THREADS, &p));
    return DW_OK;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    for (int i = 0; i < (int)DW_COUNT(entries); i++) {
        points[i].code = (dw__jit_variant){.source = "common/group_rows.cu",
                                           .entry = entries[i],
                                           .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "WIDE", (int)params);
    }
    return DW_OK;
}

/* Indexes are from 0 to 2 (operation_first_use.c): groups with many rows, and groups without any. */
static void example(uint64_t params, int index, dw__call *c) {
    static const int64_t groups[] = {3, 70};
    static const dw_attr size[] = {{.key = DW_ATTR_KEY_SIZE, .count = 1, .list = &groups[0]},
                                   {.key = DW_ATTR_KEY_SIZE, .count = 1, .list = &groups[1]}};
    const int64_t rows = index ? 2 * DW_GROUP_ROWS_TILE + 77 : 61;
    *c = (dw__call){
        .op = DW_OP_GROUP_ROWS,
        .attr_count = 1,
        .attrs = &size[index != 0],
        .input_count = 1,
        .output_count = 3,
        .inputs = {{.dtype = params ? DW_I64 : DW_I32, .rank = 1, .shape = {rows}, .stride = {1}}},
        .outputs = {
            {.dtype = DW_I32, .rank = 1, .shape = {rows}, .stride = {1}},
            {.dtype = DW_I32, .rank = 1, .shape = {rows}, .stride = {1}},
            {.dtype = DW_I32, .rank = 1, .shape = {groups[index != 0] + 1}, .stride = {1}}}};
}

const dw__kernel dw__gpu_group_rows = {
    .name = "group_rows",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .op = DW_OP_GROUP_ROWS,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "group_rows",
    .source = "cuda/common/group_rows.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "indexes I32 or I64",
    .needs = "at most 1024 groups",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance = "exact",
    .example = example,
    .tolerance_factor = 0.0,
};
