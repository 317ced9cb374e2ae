#include "kernel/cuda/gpu_kernels.h"
#include "base/json.h"
#include "deepwell/explain.h"

const char dw__gpu_proof_emulator[] = "proven on the emulator, not run on hardware";
static const char on_h200[] = "tested and measured on an H200",
                  always[] = "taken where it takes the call and has not been measured slower",
                  nobody[] = "nothing in the library calls it yet",
                  asked[] = "taken only where it is asked for, and compared at first use";

const dw__gpu_kernel dw__gpu_kernels[] = {
    {"sm90_attention_forward", "attention forward", "cuda/sm90/attention_forward.cu",
     "sm_90a (H100, H200)", "BF16, F16", "head dimension up to 256, a multiple of 8; 16-byte rows",
     on_h200, always},
    {"sm90_attention_backward", "attention backward", "cuda/sm90/attention_backward.cu",
     "sm_90a (H100, H200)", "BF16, F16", "head dimension up to 256, a multiple of 8; 16-byte rows",
     on_h200, always},
    {"sm100_gemm", "product with bias, GELU, SwiGLU, residual", "cuda/sm100/gemm.cu",
     "sm_100f (B200, B300)", "BF16, F16; D also F32", "16-byte rows", dw__gpu_proof_emulator,
     asked},
    {"sm100_attention_forward", "attention forward", "cuda/sm100/attention_forward.cu",
     "sm_100f (B200, B300)", "BF16, F16",
     "head dimension up to 128, a multiple of 8; no soft cap, dropout or packed sequences",
     dw__gpu_proof_emulator, nobody},
    {"sm100_gemm_scaled", "product of MXFP8, NVFP4 or MXFP4 operands, with the same epilogue",
     "cuda/sm100/gemm_scaled.cu", "sm_100f (B200, B300)", "E4M3, E5M2, E2M1; D BF16, F16, F32",
     "rows of codes from multiples of 16 bytes; scales in tiles of 128 x 4", dw__gpu_proof_emulator,
     nobody},
    {"quantize_blocks", "quantization to MXFP8, MXFP4, NVFP4", "cuda/common/quantize.cu",
     "sm_90a (H100, H200), sm_100f (B200, B300)", "BF16, F16, F32",
     "any size; rows of codes from multiples of 16 bytes", dw__gpu_proof_emulator, nobody},
};
const unsigned dw__gpu_kernel_count = DW_COUNT(dw__gpu_kernels);

dw_status dw_gpu_kernels(char **json) {
    dw__text text = {0};
    dw_status status = DW_OK;
    json_t *rows = json_array();
    bool lost = !rows;
    for (size_t i = 0; i < DW_COUNT(dw__gpu_kernels) && !lost; i++) {
        const dw__gpu_kernel *k = &dw__gpu_kernels[i];
        lost = json_array_append_new(
                   rows, json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "name", k->name,
                                   "operation", k->operation, "source", k->source, "architectures",
                                   k->architectures, "elements", k->elements, "needs", k->needs,
                                   "proof", k->proof, "use", k->use)) != 0;
    }
    if (lost) DW_TRY(dw__fail_memory("the list of kernels", 0));
    DW_TRY(dw__json_write(rows, &text));
    *json = text.text;
    text.text = NULL;

cleanup:
    json_decref(rows);
    dw__text_free(&text);
    return status;
}
