#include "kernel/cuda/gpu_kernels.h"
#include "base/json.h"
#include "deepwell/explain.h"
#include "kernel/cuda/quantize.h"
#include "kernel/library/cutlass.h"
#include <stdio.h>

#define ON_EMULATOR "proven on the emulator, not run on hardware"
const char dw__gpu_proof_emulator[] = ON_EMULATOR;
#define ON_H200 "tested and measured on an H200"
#define ALWAYS "taken where it takes the call and has not been measured slower"
#define ASKED "taken only where it is asked for, and compared at first use"

/* ---- entries of families that have no file of their own yet ---------------------------------------- */

#define ROW(symbol, entry, which, does, file, runs_on, types, limits, where, taken)                \
    static const dw__gpu_kernel symbol = {.name = entry,                                           \
                                          .backend = "deepwell",                                   \
                                          .op = which,                                             \
                                          .operation = does,                                       \
                                          .source = file,                                          \
                                          .architectures = runs_on,                                \
                                          .elements = types,                                       \
                                          .needs = limits,                                         \
                                          .shown = where,                                          \
                                          .use = taken}
ROW(sm90_forward, "sm90_attention_forward", DW__GPU_ATTENTION_FORWARD, "attention forward",
    "cuda/sm90/attention_forward.cu", "sm_90a (H100, H200)", "BF16, F16",
    "head dimension up to 256, a multiple of 8; 16-byte rows", ON_H200, ALWAYS);
ROW(sm90_backward, "sm90_attention_backward", DW__GPU_ATTENTION_BACKWARD, "attention backward",
    "cuda/sm90/attention_backward.cu", "sm_90a (H100, H200)", "BF16, F16",
    "head dimension up to 256, a multiple of 8; 16-byte rows", ON_H200, ALWAYS);
ROW(sm100_gemm, "sm100_gemm", DW__GPU_GEMM, "product with bias, GELU, SwiGLU, residual",
    "cuda/sm100/gemm.cu", "sm_100f (B200, B300)", "BF16, F16; D also F32, MXFP8", "16-byte rows",
    ON_EMULATOR, ASKED);
ROW(sm100_forward, "sm100_attention_forward", DW__GPU_ATTENTION_FORWARD, "attention forward",
    "cuda/sm100/attention_forward.cu", "sm_100f (B200, B300)", "BF16, F16",
    "head dimension up to 128, a multiple of 8; no soft cap, dropout or packed sequences",
    ON_EMULATOR, ASKED);
ROW(sm100_gemm_scaled, "sm100_gemm_scaled", DW__GPU_GEMM,
    "product of MXFP8, NVFP4 or MXFP4 operands, with the same epilogue",
    "cuda/sm100/gemm_scaled.cu", "sm_100f (B200, B300)",
    "E4M3, E5M2, E2M1; D BF16, F16, F32, MXFP8",
    "rows of codes from multiples of 16 bytes; scales in tiles of 128 x 4", ON_EMULATOR, ASKED);

/* ---- the registry ------------------------------------------------------------------------------------ */

const dw__gpu_kernel *const dw__gpu_kernels[] = {
    &sm90_forward,  &sm90_backward,     &sm100_gemm,
    &sm100_forward, &sm100_gemm_scaled, &dw__quantize_blocks,
};
const unsigned dw__gpu_kernel_count = DW_COUNT(dw__gpu_kernels);

static json_t *row_of(const dw__gpu_kernel *k) {
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "name", k->name, "operation",
                     k->operation, "source", k->source, "architectures", k->architectures,
                     "elements", k->elements, "needs", k->needs, "proof", k->shown, "use", k->use);
}

/* Of the optional library. */
static json_t *row_of_cutlass(const dw__cutlass *library, const dw_cutlass_kernel *k) {
    static const char *const operations[] = {"product", "products of groups", "attention forward"},
                             *const elements[] = {"BF16", "MXFP8 (E4M3, E8M0 for 32); D BF16",
                                                  "NVFP4 (E2M1, E4M3 for 16); D BF16"};
    char source[256];
    snprintf(source, sizeof source, "CUTLASS %s (make cutlass): %s", library->version, k->what);
    return row_of(&(dw__gpu_kernel){
        .name = k->name,
        .operation = operations[k->kind],
        .source = source,
        .architectures = k->capability == 100 ? "sm_100a (B200)" : "sm_90a (H100, H200)",
        .elements = elements[k->type],
        .needs = k->kind == DW_CUTLASS_ATTENTION ? "head dimension 64 or 128; 16-byte rows"
                                                 : "16-byte rows",
        .shown = k->shown,
        .use = ASKED});
}

dw_status dw_gpu_kernels(char **json) {
    dw_status status = DW_OK;
    const dw__cutlass *cutlass = NULL;
    json_t *rows = json_array();
    bool lost = !rows;
    for (size_t i = 0; i < DW_COUNT(dw__gpu_kernels) && !lost; i++)
        lost = json_array_append_new(rows, row_of(dw__gpu_kernels[i])) != 0;
    if (dw__cutlass_load(&cutlass) != DW_OK) cutlass = NULL; /* an optional library */
    for (size_t i = 0; cutlass && i < cutlass->count && !lost; i++)
        lost = json_array_append_new(rows, row_of_cutlass(cutlass, &cutlass->kernels[i])) != 0;
    if (lost) DW_TRY(dw__fail_memory("the list of kernels", 0));
    DW_TRY(dw__json_string(rows, json));

cleanup:
    json_decref(rows);
    return status;
}
