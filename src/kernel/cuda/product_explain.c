/* Who would compute a matrix product, said as JSON. Ours has been run on the emulator alone: nobody is sent there who
 * does not ask, and what is said of its time is counted, not measured. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_target.h"
#include "kernel/cuda/product.h"
#include "kernel/library/cutlass.h"
#include <math.h>
#include <stdio.h>

static const char asking[] = "dw_product_run, or optimize(model, target=\"sm_100a\") on such a GPU";

typedef struct work {
    double flops, bytes;
} work;

static work work_of(const dw_product *c) {
    const dw__product_kind kind = dw__product_kind_of(c);
    const double m = (double)c->m, n = (double)c->n, k = (double)c->k,
                 rows_b = (double)dw__product_rows_b(c), width = (double)dw_dtype_bytes(c->dtype);
    const double row = kind ? (double)dw__product_row_units(c) +
                                  ceil(k / DW_SCALED_BLOCK(dw__product_scheme(kind)))
                            : width * k,
                 of_d = m * (c->quantized_d ? n + ceil(n / 32.0)
                                            : n * (double)dw_dtype_bytes(c->output));
    return (work){2.0 * m * rows_b * k, row * (m + rows_b) + (c->bias ? width * rows_b : 0.0) +
                                            of_d * (c->residual.data ? 2.0 : 1.0)};
}

/* The tile that the call gets, and the least time by the static account or by memory. */
static json_t *describe_tile(const dw_product *call, const dw__gpu_target *target, const work *w) {
    const dw__product_shape shape = dw__product_shape_of(call, target->sm_count);
    const dw__product_tile *t = &dw__product_tiles[shape.tile];
    const dw__product_account a = dw__product_account_of(call, &shape, target->sm_count);
    const double clock = target->flops / (8192.0 * target->sm_count);
    return json_pack("{s:i, s:i, s:i, s:I, s:I, s:I, s:i, s:f}", "ctas", t->ctas, "tile_n", t->n,
                     "stages", t->stages, "tiles", (json_int_t)a.tiles, "rounds",
                     (json_int_t)a.rounds, "steps", (json_int_t)a.steps, "step_clocks",
                     a.step_clocks, "least_seconds",
                     fmax(a.clocks / clock, w->bytes / target->bytes));
}

/* CUTLASS's kernel for the call, or NULL and why there is none. */
static const dw_cutlass_kernel *cutlass_for(const dw_product *call, const dw__gpu_target *target,
                                            char *reason, size_t bytes) {
    static const dw_cutlass_type types[] = {[DW__PRODUCT_DENSE] = DW_CUTLASS_BF16,
                                            [DW__PRODUCT_MXFP8] = DW_CUTLASS_MXFP8,
                                            [DW__PRODUCT_NVFP4] = DW_CUTLASS_NVFP4};
    const dw__cutlass *library;
    const dw_cutlass_kernel *kernel = NULL;
    const dw__product_kind kind = dw__product_kind_of(call);
    if (dw__cutlass_load(&library) != DW_OK) {
        snprintf(reason, bytes, "%s", dw_last_error());
        return NULL;
    }
    if (kind != DW__PRODUCT_MXFP4)
        kernel = dw__cutlass_find(library, DW_CUTLASS_PRODUCT, types[kind], target->capability);
    if (!kernel)
        snprintf(reason, bytes, "none of its kernels is for such operands on %s", target->name);
    else if (dw__product_cutlass_supports(call, kernel) != DW_OK)
        snprintf(reason, bytes, "%s", dw_last_error());
    return reason[0] ? NULL : kernel;
}

static json_t *describe_cutlass(const dw_product *call, const dw__gpu_target *target) {
    char reason[1024] = "", how[256] = "taken only where a call names it";
    const dw_cutlass_kernel *kernel = cutlass_for(call, target, reason, sizeof reason);
    if (kernel)
        snprintf(how, sizeof how, "taken only where a call names it: dw_product.kernel = \"%s\"",
                 kernel->name);
    return json_pack("{s:s, s:s, s:b, s:s?, s:s, s:s?, s:n, s:s, s:n}", "name", "cutlass", "source",
                     kernel ? kernel->name : "CUTLASS, an optional library", "runs", kernel != NULL,
                     "reason", kernel ? NULL : reason, "tolerance",
                     "sums in F32, then D's rounding, against FP64", "proof",
                     kernel ? kernel->shown : NULL, "expected_seconds", "expected_from", how,
                     "measured_seconds");
}

/* PyTorch's. */
static json_t *describe_cublas(bool dense) {
    return json_pack("{s:s, s:s, s:b, s:s?, s:s, s:n, s:n, s:s, s:n}", "name", "cublas", "source",
                     "PyTorch: cuBLAS, the epilogue apart", "runs", (int)dense, "reason",
                     dense ? NULL : "nothing in the library brings codes and block scales to it",
                     "tolerance", "sums in F32, each operation rounded", "proof",
                     "expected_seconds", "expected_from",
                     dense ? "takes it; not measured" : "not asked", "measured_seconds");
}

static dw_status describe(const dw_product *call, const dw__gpu_target *target, const char *gpu,
                          const char *gpu_error, json_t **root) {
    char shape[256], reason[1024] = "", because[512];
    const work w = work_of(call);
    const bool checked = dw__product_check(call, false) == DW_OK;
    if (!checked) snprintf(reason, sizeof reason, "%s", dw_last_error());
    if (checked && target->capability != 100 && target->capability != 103)
        snprintf(reason, sizeof reason, "its kernels are for sm_100f (B200, B300), not for %s",
                 target->name);
    const bool runs = !reason[0], dense = !call->quantized && !call->quantized_d;
    const char *chosen = dense ? "cublas" : runs ? "deepwell" : NULL;
    json_t *tile = runs && !dw__product_is_empty(call) ? describe_tile(call, target, &w) : NULL;
    if (runs)
        snprintf(because, sizeof because,
                 "Deepwell's is %s: it is taken only where it is asked for (%s)",
                 dw__gpu_proof_emulator, dense ? asking : "dw_product_run");
    else
        snprintf(because, sizeof because, "Deepwell does not take it");
    *root = json_pack(
        "{s:s, s:s, s:s, s:s, s:s?, s:s?, s:s?, s:s, s:f, s:f, s:["
        "{s:s, s:s, s:b, s:s?, s:s, s:s, s:o, s:s, s:n, s:o?}, o, o]}",
        "operation", "product", "shape", dw__product_describe(call, shape, sizeof shape), "target",
        target->name, "target_source", target->source, "gpu", gpu, "gpu_error", gpu_error, "chosen",
        chosen, "because", because, "flops", w.flops, "bytes", w.bytes, "candidates", "name",
        "deepwell", "source", "ours, CUDA C for sm_100f", "runs", runs, "reason",
        runs ? NULL : reason, "tolerance", "sums in F32, then D's rounding, against FP64", "proof",
        dw__gpu_proof_emulator, "expected_seconds",
        tile ? json_incref(json_object_get(tile, "least_seconds")) : json_null(), "expected_from",
        "the least by counted work, nothing measured", "measured_seconds", "tile", tile,
        describe_cublas(dense), describe_cutlass(call, target));
    return *root ? DW_OK : dw__fail_memory("an explanation", 0);
}

dw_status dw_product_explain(const dw_product *given, const char *target, char **json) {
    dw__gpu_subject at;
    json_t *root = NULL;
    dw_product call;
    DW_RETURN_IF_FAILED(dw__product_read(given, &call));
    dw_status status = dw__product_check(&call, false);
    if (status != DW_OK && status != DW_UNSUPPORTED) return status;
    DW_RETURN_IF_FAILED(dw__gpu_subject_find(target, "sm_100a", &at));
    DW_TRY(describe(&call, &at.target, at.gpu, at.missing, &root));
    DW_TRY(dw__json_string(root, json));

cleanup:
    json_decref(root);
    return status;
}
