/* GEMM of logits on Hopper with the statistics or the gradient of cross-entropy behind each tile (sm90/sm90_loss.cuh), for
 * linear_cross_entropy.c. */
#include "kernel/cuda/gpu_loss.h"
#include <assert.h>
#include <math.h>

static dw__sm90_shape shape_of(dw__loss_variant v) {
    dw__sm90_shape s = {.output = DW_GEMM_OUTPUT_ELEMENT,
                        .f16 = v.type == DW_F16,
                        .bias = v.bias,
                        .turned_a = v.given,
                        .turned_b = v.turned || v.given};
    while (dw__sm90_tiles[s.tile].m != DW__SM90_LOSS_ROWS ||
           dw__sm90_tiles[s.tile].n != DW__SM90_LOSS_COLUMNS || !dw__sm90_tiles[s.tile].together) {
        s.tile++;
        assert(s.tile < DW__SM90_TILES);
    }
    return s;
}

static unsigned shared_bytes(dw__loss_variant v) {
    const dw__sm90_tile *t = &dw__sm90_tiles[shape_of(v).tile];
    return DW_SM90_GEMM_SHARED_BYTES(t->m, t->n, t->stages) +
           (v.given ? DW_SM90_BESIDE_SHARED_BYTES : DW_SM90_LOSS_SHARED_BYTES);
}

dw_status dw__sm90_loss_supports(const dw__gemm_groups_call *call, const dw__gpu_target *gpu) {
    if (dw__gemm_is_empty(&call->gemm) || call->gemm.k == 0 || !dw__dtype_is_half(call->gemm.dtype))
        return dw__fail(DW_UNSUPPORTED, "expected logits of BF16 or F16, and sizes above 0");
    return dw__sm90_supports(&call->gemm, call->turned, gpu);
}

void dw__sm90_loss_point(dw__loss_variant v, dw__entry_point *point) {
    const dw__sm90_shape s = shape_of(v);
    point->code = dw__sm90_variant(&s);
    point->shared_bytes = shared_bytes(v);
    if (v.given)
        dw__jit_add_define(&point->code, "BESIDE", 1);
    else
        dw__jit_add_define(&point->code, "LOSS",
                           v.backward ? DW_SM90_LOSS_GRADIENT : DW_SM90_LOSS_STATISTICS);
}

dw_status dw__sm90_loss_map(const dw_gemm *g, const dw__context *context, dw__tensor_map *map) {
    const int64_t stride = g->m > 1 ? g->d.stride : (g->n + 7) / 8 * 8; /* of one row: any */
    const dw__tensor_map_shape shape = {
        .element = dw__gemm_map_element(g->dtype, false),
        .rank = 2,
        .address = g->d.data,
        .size = {(uint64_t)g->n, (uint64_t)g->m},
        .stride = {(uint64_t)stride * 2},
        .box = {DW_SM90_LOSS_STRIP_COLUMNS, DW_SM90_LOSS_STRIP_ROWS},
        .swizzle_bytes = 64,
    };
    return dw__gpu_map(context, &shape, "D", map);
}

dw_status dw__sm90_loss_enqueue(const dw__gemm_groups_call *call, const dw_sm90_loss *loss,
                                const dw__context *context, const dw__variant *variant) {
    const dw__loss_variant v = dw__loss_unpack(variant->params);
    const dw__sm90_program program = {.loss = loss, .shared_bytes = shared_bytes(v)};
    return dw__sm90_launch(call, &program, shape_of(v), context, variant);
}

/* No group of products: nothing reads the operands. */
dw_status dw__sm90_loss_alone(const dw_sm90_loss *loss, void *stream, const dw__context *context,
                              const dw__variant *variant) {
    const dw__gemm_groups_call none = {.gemm = {.m = 1, .n = 1, .stream = stream}};
    return loss->count > 0 ? dw__sm90_loss_enqueue(&none, loss, context, variant) : DW_OK;
}

/* Blocks of fewer classes let less of the work begin late, and more launches begin and end: with 768 features and blocks of
 * one round dw took 2.16 ms on an H200, of two 2.03; with 2048 features two and four rounds took the same. The loss by SMs
 * without a tile is below 3 % if any number of rounds up to MOST_ROUNDS has so little. */
int64_t dw__sm90_loss_classes(int64_t size, bool transposed, int sm_count) {
    enum { LEAST_ROUNDS = 2, MOST_ROUNDS = 4 };
    const int64_t unit = transposed ? DW__SM90_LOSS_COLUMNS : DW__SM90_LOSS_ROWS,
                  side = transposed ? DW__SM90_LOSS_ROWS : DW__SM90_LOSS_COLUMNS,
                  across = (size + side - 1) / side;
    double best = 0.0;
    int64_t classes = unit;
    for (int rounds = LEAST_ROUNDS; rounds <= MOST_ROUNDS && best < 0.97; rounds++) {
        const int64_t places = (int64_t)rounds * sm_count, high = places / across;
        const double busy = (double)(high * across) / (double)places;
        if (busy <= best) continue;
        best = busy;
        classes = high * unit;
    }
    return classes;
}

static double rounds_of(int64_t m, int64_t n, int sm_count) {
    const int64_t high = (m + DW__SM90_LOSS_ROWS - 1) / DW__SM90_LOSS_ROWS,
                  wide = (n + DW__SM90_LOSS_COLUMNS - 1) / DW__SM90_LOSS_COLUMNS;
    return ceil((double)(high * wide) / sm_count);
}

/* Clocks of the products that make logits, dw and dx of a block of classes. The last is added to sums in F32. */
static double clocks_of_block(int64_t rows, int64_t size, int64_t classes, int sm_count) {
    const double bytes_per_clock = 1700.0, start = 20000.0, /* three launches */
        step = 2.0 * DW__SM90_LOSS_ROWS * DW__SM90_LOSS_COLUMNS / DW__SM90_FLOPS_PER_CLOCK,
                 steps = rounds_of(rows, classes, sm_count) * (double)size +
                         rounds_of(classes, size, sm_count) * (double)rows +
                         rounds_of(rows, size, sm_count) * (double)classes;
    if (classes == 0) return 0.0;
    return start + step * steps + 2.0 * sizeof(float) * (double)(rows * size) / bytes_per_clock;
}

int64_t dw__sm90_loss_block(int64_t rows, int64_t size, int64_t classes, int64_t most,
                            int sm_count) {
    double least = INFINITY;
    int64_t best = most;
    for (int64_t block = DW__SM90_LOSS_COLUMNS; block <= most; block += DW__SM90_LOSS_COLUMNS) {
        const double clocks =
            (double)(classes / block) * clocks_of_block(rows, size, block, sm_count) +
            clocks_of_block(rows, size, classes % block, sm_count);
        if (clocks >= least) continue;
        least = clocks;
        best = block;
    }
    return best;
}

double dw__sm90_loss_seconds(const dw__gemm_groups_call *call, const dw__gpu_target *gpu) {
    const dw__sm90_shape s = shape_of((dw__loss_variant){
        .type = call->gemm.dtype, .bias = call->gemm.bias != NULL, .turned = call->turned.b});
    const dw__gemm_cost cost = dw__sm90_cost_of(call, &s, gpu->sm_count);
    return dw__gemm_least_seconds(&call->gemm, gpu, &cost, DW__SM90_FLOPS_PER_CLOCK);
}
