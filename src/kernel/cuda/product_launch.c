/* From a checked call and a loaded kernel to a launch: tensor maps, parameters, grid. Nothing is allocated. */
#include "common/product_params.h"
#include "kernel/cuda/product.h"

enum { REFERENCE_THREADS = 256, MOST_BLOCKS = 4096 };

/* A map of `rows` x `columns` in boxes of 128 bytes x `box_rows`. */
static dw_status make_map(const dw__context *context, const dw_matrix *x, const char *name,
                          int64_t rows, int64_t columns, dw_dtype type, int box_rows,
                          dw__tensor_map *map) {
    const int64_t width = (int64_t)dw_dtype_bytes(type), row = columns * width;
    /* The stride of a single row may be anything in the caller's matrix, but not in the map. */
    const int64_t stride = rows > 1 ? x->stride * width : (row + 15) / 16 * 16;
    const dw__tensor_map_shape shape = {
        .element = type == DW_F32   ? DW__MAP_F32
                   : type == DW_F16 ? DW__MAP_F16
                                    : DW__MAP_BF16,
        .rank = 2,
        .address = x->data,
        .size = {(uint64_t)columns, (uint64_t)rows},
        .stride = {(uint64_t)stride},
        .box = {(uint32_t)(DW_GEMM_ROW_BYTES / width), (uint32_t)box_rows},
        .swizzle_bytes = 128,
    };
    dw_status status = context->device->tensor_map(&shape, map);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "the tensor map of %s", name);
}

dw_status dw__product_launch(const dw_product *c, const dw__context *context, int sm_count,
                             const dw__product_kernel *kernel) {
    enum { BOX_ROWS = 32 }; /* of D, a warp's */
    const dw__product_shape *shape = &kernel->shape;
    const dw__product_tile *tile = &dw__product_tiles[shape->tile];
    const bool halves = tile->ctas == 2 || c->activation == DW_ACTIVATION_SWIGLU;
    const int tile_rows = dw__product_tile_rows(shape),
              tile_columns = dw__product_tile_columns(shape);
    dw__tensor_map a, b, d, residual;
    dw_gemm_params params = {
        .m = (int)c->m,
        .n = (int)c->n,
        .k = (int)c->k,
        .tiles_m = (int)((c->m + tile_rows - 1) / tile_rows),
        .tiles_n = (int)((c->n + tile_columns - 1) / tile_columns),
        .alpha = c->alpha,
        .bias = c->bias,
    };
    DW_RETURN_IF_FAILED(make_map(context, &c->d, "D", c->m, c->n, c->output, BOX_ROWS, &d));
    a = b = residual = d; /* where they are not read */
    if (c->k > 0) {
        DW_RETURN_IF_FAILED(make_map(context, &c->a, "A", c->m, c->k, c->dtype, DW_GEMM_ROWS, &a));
        DW_RETURN_IF_FAILED(make_map(context, &c->b, "B", dw__product_rows_b(c), c->k, c->dtype,
                                     halves ? tile->n / 2 : tile->n, &b));
    }
    if (c->residual.data)
        DW_RETURN_IF_FAILED(make_map(context, &c->residual, "the residual", c->m, c->n, c->output,
                                     BOX_ROWS, &residual));
    /* Blocks, or pairs, stay and take tile after tile. */
    int64_t clusters = sm_count / tile->ctas > 0 ? sm_count / tile->ctas : 1,
            tiles = (int64_t)params.tiles_m * params.tiles_n;
    if (clusters > tiles) clusters = tiles;
    void *arguments[] = {&a, &b, &d, &residual, &params};
    return context->device->launch(&(dw__launch){
        .name = "sm100_gemm",
        .function = kernel->function,
        .grid = {(unsigned)(clusters * tile->ctas), 1, 1},
        .block = {DW_GEMM_THREADS, 1, 1},
        .cluster = {tile->ctas > 1 ? (unsigned)tile->ctas : 0, 1, 1},
        .shared_bytes = tile->shared_bytes,
        .stream = c->stream,
        .arguments = arguments,
    });
}

dw_status dw__product_launch_reference(const dw_product *c, const dw__context *context,
                                       void *function) {
    dw_product_params params = {
        .m = c->m,
        .n = c->n,
        .k = c->k,
        .stride_a = c->a.stride,
        .stride_b = c->b.stride,
        .stride_d = c->d.stride,
        .stride_residual = c->residual.stride,
        .a = c->a.data,
        .b = c->b.data,
        .bias = c->bias,
        .residual = c->residual.data,
        .d = c->d.data,
        .alpha = c->alpha,
        .activation = (int)c->activation,
    };
    int64_t blocks = (c->m * c->n + REFERENCE_THREADS - 1) / REFERENCE_THREADS;
    void *arguments[] = {&params};
    return context->device->launch(&(dw__launch){
        .name = "reference_product",
        .function = function,
        .grid = {(unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), 1, 1},
        .block = {REFERENCE_THREADS, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    });
}
