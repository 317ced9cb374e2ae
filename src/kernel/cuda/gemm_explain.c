/* The cost of a GEMM, and the choice of its kernel. Deepwell's kernel has run on the emulator only, so a call uses it
 * only on request, and its time is an estimate, not a measurement. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "plan/planner_internal.h"
#include <math.h>
#include <stdio.h>

typedef struct work {
    double flops, bytes;
} work;

/* Codes of fp8-block and their scales, in either direction, and D itself, for each of D's rows. */
static double bytes_of_blocks(const dw_gemm *c, double m, double n) {
    return n + 4.0 * ceil(n / 128.0) +
           (c->turned_d.data ? n + 4.0 * n * ceil(m / 128.0) / m : 0.0) +
           (c->plain_d.data ? n * (double)dw_dtype_bytes(c->dtype) : 0.0);
}

static work work_of(const dw_gemm *c) {
    const double m = (double)c->m, n = (double)c->n, k = (double)c->k,
                 rows_b = (double)dw__gemm_rows_b(c), width = (double)dw_dtype_bytes(c->dtype);
    const double row = c->quantized ? (double)dw__gemm_row_units(c) +
                                          ceil(k / dw_scheme_describe(c->scheme_a)->block)
                                    : width * k,
                 of_d = m * (dw__gemm_has_blocks_d(c) ? bytes_of_blocks(c, m, n)
                             : c->quantized_d         ? n + ceil(n / 32.0)
                                                      : n * (double)dw_dtype_bytes(c->output));
    return (work){2.0 * m * rows_b * k, row * (m + rows_b) + (c->bias ? width * rows_b : 0.0) +
                                            of_d * (c->residual.data ? 2.0 : 1.0)};
}

double dw__gemm_least_seconds(const dw_gemm *call, const dw__gpu_target *gpu,
                              const dw__gemm_cost *cost, double flops_per_clock) {
    const double clock = gpu->flops / (flops_per_clock * gpu->sm_count);
    return fmax(cost->clocks / clock, work_of(call).bytes / gpu->bytes);
}

static double least_seconds(const dw_gemm *call, const dw__gpu_target *gpu,
                            const dw__gemm_cost *a) {
    return dw__gemm_least_seconds(call, gpu, a, DW__SM100_FLOPS_PER_CLOCK);
}

static dw__gemm_cost cost_of(const dw_gemm *call, const dw__gpu_target *gpu,
                             dw__gemm_shape *shape) {
    *shape = dw__gemm_shape_of(call, gpu->sm_count);
    return dw__gemm_cost_of(call, shape, gpu->sm_count);
}

void dw__gemm_kernel_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                             dw__kernel_seconds *result) {
    dw__gemm_shape shape;
    (void)kernel;
    snprintf(result->from, sizeof result->from, "the least by counted work, nothing measured");
    if (dw__gemm_is_empty(call)) return;
    const dw__gemm_cost a = cost_of(call, gpu, &shape);
    result->seconds = least_seconds(call, gpu, &a);
}

json_t *dw__gemm_describe_tile(const dw__kernel *kernel, const void *call,
                               const dw__gpu_target *gpu) {
    dw__gemm_shape shape;
    (void)kernel;
    if (dw__gemm_is_empty(call)) return json_null();
    const dw__gemm_cost a = cost_of(call, gpu, &shape);
    const dw__gemm_tile *t = &dw__gemm_tiles[shape.tile];
    return json_pack("{s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:i, s:f}", "ctas", t->ctas, "tile_m",
                     dw__gemm_tile_rows(&shape), "tile_n", t->n, "stages", t->stages, "tiles",
                     (json_int_t)a.tiles, "rounds", (json_int_t)a.rounds, "steps",
                     (json_int_t)a.steps, "step_clocks", a.step_clocks, "least_seconds",
                     least_seconds(call, gpu, &a));
}

/* ---- PyTorch's kernel -------------------------------------------------------------------------------- */

static bool is_dense(const dw_gemm *c) { return !c->quantized && !c->quantized_d; }

static dw_status cublas_supports(const dw__kernel *kernel, const void *call,
                                 const dw__gpu_target *gpu) {
    (void)kernel, (void)gpu;
    if (is_dense(call)) return dw__gemm_refuse_sm90(call);
    return dw__fail(DW_UNSUPPORTED, "nothing in the library brings codes and block scales to it");
}

const char dw__gemm_library_source[] = "the planner's model of the library's GEMMs";

double dw__gemm_library_seconds(const dw__gpu_target *gpu, double m, double n, double k,
                                double groups, double bytes, double part) {
    const dw__constants *constants = &dw__constants_default;
    const dw__gemm_machine machine = {.capability = gpu->capability,
                                      .sm_count = gpu->sm_count,
                                      .rate = gpu->flops * part *
                                              dw__gemm_part(constants, gpu->capability),
                                      .bandwidth = gpu->bytes * constants->memory_efficiency,
                                      .depth = constants->gemm_depth};
    if (m == 0 || n == 0 || k == 0 || groups == 0) return 0.0;
    return dw__gemm_model(constants, &machine, m, n, k, groups, bytes);
}

static void cublas_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                           dw__kernel_seconds *result) {
    const dw_gemm *c = call;
    (void)kernel;
    snprintf(result->from, sizeof result->from, "%s", dw__gemm_library_source);
    result->seconds = dw__gemm_library_seconds(gpu, (double)c->m, (double)dw__gemm_rows_b(c),
                                               (double)c->k, 1.0, work_of(c).bytes, 1.0);
}

const dw__kernel dw__torch_gemm = {
    .name = "torch.cublas",
    .backend = "cublas",
    .label = "cuBLAS",
    .kind = DW__CALL_GEMM,
    .described = "PyTorch: cuBLAS, the epilogue apart",
    .supports = cublas_supports,
    .seconds = cublas_seconds,
    .tolerance = "sums in F32, each operation rounded",
};

/* ---- explanation --------------------------------------------------------------------------------------- */

dw_status dw_gemm_explain(const dw_gemm *given, const char *target, char **json) {
    char asking[128], shape[256], because[512] = "Deepwell does not support it";
    dw__gpu_candidates candidates;
    dw__gpu_subject at;
    dw_gemm call;
    DW_RETURN_IF_FAILED(dw__gemm_read(given, &call));
    const dw_status status = dw__gemm_check(&call, false);
    if (status != DW_OK && status != DW_UNSUPPORTED) return status;
    DW_RETURN_IF_FAILED(dw__gpu_subject_find(target, call.device, "sm_100a", &at));
    dw__gpu_candidates_of(DW__CALL_GEMM, &call, &at.target, &candidates);
    const dw__kernel *own = candidates.kernels[0];
    const bool runs = own->supports(own, &call, &at.target) == DW_OK, dense = is_dense(&call);
    snprintf(asking, sizeof asking, "dw_gemm_run, or optimize(model, target=\"%s\") on such a GPU",
             at.target.name);
    if (runs)
        snprintf(because, sizeof because, "Deepwell's is %s: it is used only on request (%s)",
                 dw__gpu_kernel_proof(own), dense ? asking : "dw_gemm_run");
    const work w = work_of(&call);
    return dw__gpu_explain(
        &(dw__gpu_query){.call = &call, .passes = 1, .kind = {DW__CALL_GEMM}, .target = &at.target},
        &(dw__gpu_explanation){.operation = "gemm",
                               .shape = dw__gemm_describe(&call, shape, sizeof shape),
                               .flops = w.flops,
                               .bytes = w.bytes,
                               .because = because,
                               .chosen = dense  ? &dw__torch_gemm
                                         : runs ? own
                                                : NULL,
                               .provided = &dw__cutlass_gemm,
                               .operands = "such operands"},
        &at, json);
}
