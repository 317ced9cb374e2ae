/* From a checked call and a loaded kernel to a launch: tensor maps, parameters, grid. Nothing is allocated. */
#include "common/product_params.h"
#include "kernel/cuda/product.h"

enum { REFERENCE_THREADS = 256, MOST_BLOCKS = 4096 };

static dw__map_element element_of(dw_dtype type, bool codes) {
    if (codes) return DW__MAP_U8;
    return type == DW_F32 ? DW__MAP_F32 : type == DW_F16 ? DW__MAP_F16 : DW__MAP_BF16;
}

static dw_status encode(const dw__context *context, const dw__tensor_map_shape *shape,
                        const char *name, dw__tensor_map *map) {
    dw_status status = context->device->tensor_map(shape, map);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "the tensor map of %s", name);
}

/* A map of `rows` x `columns` in boxes of 128 bytes x `box_rows`. */
static dw_status make_map(const dw__context *context, const dw_matrix *x, const char *name,
                          int64_t rows, int64_t columns, dw__map_element element, int box_rows,
                          dw__tensor_map *map) {
    static const int64_t widths[] = {
        [DW__MAP_F16] = 2, [DW__MAP_BF16] = 2, [DW__MAP_F32] = 4, [DW__MAP_U8] = 1};
    const int64_t width = widths[element], row = columns * width;
    /* The stride of a single row may be anything in the caller's matrix, but not in the map. */
    const int64_t stride = rows > 1 ? x->stride * width : (row + 15) / 16 * 16;
    const dw__tensor_map_shape shape = {
        .element = element,
        .rank = 2,
        .address = x->data,
        .size = {(uint64_t)columns, (uint64_t)rows},
        .stride = {(uint64_t)stride},
        .box = {(uint32_t)(DW_GEMM_ROW_BYTES / width), (uint32_t)box_rows},
        .swizzle_bytes = 128,
    };
    return encode(context, &shape, name, map);
}

/* A map of the scales of `parts` times `rows` rows: their tiles beside each other as words of 64 bits, in boxes of a
 * step's. */
static dw_status make_scale_map(const dw__context *context, const void *scales, const char *name,
                                int64_t rows, int parts, int64_t k, int scheme,
                                dw__tensor_map *map) {
    enum { WORDS = DW_SCALE_TILE_BYTES / 8 };
    const int64_t block = DW_SCALED_BLOCK(scheme),
                  wide = DW_SCALE_TILES_WIDE((k + block - 1) / block);
    const dw__tensor_map_shape shape = {
        .element = DW__MAP_U64,
        .rank = 2,
        .address = (void *)(uintptr_t)scales,
        .size = {(uint64_t)(WORDS * wide), (uint64_t)(parts * DW_SCALE_TILES_HIGH(rows))},
        .stride = {(uint64_t)(DW_SCALE_TILE_BYTES * wide)},
        .box = {(uint32_t)(WORDS * DW_SCALED_STEP_TILES(scheme)), 1},
    };
    return encode(context, &shape, name, map);
}

/* Maps of what is multiplied: A, B, then where they are codes their scales'. */
static dw_status make_operand_maps(const dw_product *c, const dw__context *context,
                                   const dw__product_shape *shape, dw__tensor_map *maps) {
    const dw__product_tile *tile = &dw__product_tiles[shape->tile];
    const int scheme = dw__product_scheme(shape->kind),
              parts = c->activation == DW_ACTIVATION_SWIGLU ? 2 : 1;
    const bool halves = tile->ctas == 2 || parts == 2;
    const int64_t units = dw__product_row_units(c);
    const dw__map_element element = element_of(c->dtype, c->quantized);
    DW_RETURN_IF_FAILED(
        make_map(context, &c->a, "A", c->m, units, element, DW_GEMM_ROWS, &maps[0]));
    DW_RETURN_IF_FAILED(make_map(context, &c->b, "B", dw__product_rows_b(c), units, element,
                                 halves ? tile->n / 2 : tile->n, &maps[1]));
    if (!c->quantized) return DW_OK;
    DW_RETURN_IF_FAILED(
        make_scale_map(context, c->scales_a, "A's scales", c->m, 1, c->k, scheme, &maps[2]));
    return make_scale_map(context, c->scales_b, "B's scales", c->n, parts, c->k, scheme, &maps[3]);
}

dw_status dw__product_launch(const dw_product *c, const dw__context *context, int sm_count,
                             const dw__product_kernel *kernel) {
    enum { BOX_ROWS = 32 }; /* of D, a warp's */
    const dw__product_shape *shape = &kernel->shape;
    const dw__product_tile *tile = &dw__product_tiles[shape->tile];
    const int operands = shape->kind ? 4 : 2; /* maps of them; then D's and the residual's */
    const dw__map_element element_d = element_of(c->output, c->quantized_d);
    const int tile_rows = dw__product_tile_rows(shape),
              tile_columns = dw__product_tile_columns(shape);
    dw__tensor_map maps[6], *d = &maps[operands], *residual = d + 1;
    dw_gemm_params params = {
        .m = (int)c->m,
        .n = (int)c->n,
        .k = (int)c->k,
        .tiles_m = (int)((c->m + tile_rows - 1) / tile_rows),
        .tiles_n = (int)((c->n + tile_columns - 1) / tile_columns),
        .alpha = c->alpha,
        .bias = c->bias,
        .factor_a = c->quantized ? c->factor_a : NULL,
        .factor_b = c->quantized ? c->factor_b : NULL,
        .scales_d = c->quantized_d ? c->scales_d : NULL,
    };
    DW_RETURN_IF_FAILED(make_map(context, &c->d, "D", c->m, c->n, element_d, BOX_ROWS, d));
    *residual = *d; /* where they are not read */
    for (int i = 0; i < operands; i++) maps[i] = *d;
    if (c->k > 0) DW_RETURN_IF_FAILED(make_operand_maps(c, context, shape, maps));
    if (c->residual.data)
        DW_RETURN_IF_FAILED(make_map(context, &c->residual, "the residual", c->m, c->n, element_d,
                                     BOX_ROWS, residual));
    /* Blocks, or pairs, stay and take tile after tile. */
    int64_t clusters = sm_count / tile->ctas > 0 ? sm_count / tile->ctas : 1,
            tiles = (int64_t)params.tiles_m * params.tiles_n;
    if (clusters > tiles) clusters = tiles;
    void *arguments[7];
    for (int i = 0; i < operands + 2; i++) arguments[i] = &maps[i];
    arguments[operands + 2] = &params;
    return context->device->launch(&(dw__launch){
        .name = shape->kind ? "sm100_gemm_scaled" : "sm100_gemm",
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
