/* See fake_cutlass.h. */
#include "fake_cutlass.h"
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

static fake_cutlass state = {.error = "as requested"};

API fake_cutlass *fake_cutlass_state(void) { return &state; }

static dw_cutlass_result workspace_bytes(const void *call, size_t *bytes) {
    (void)call;
    *bytes = state.workspace_bytes;
    return state.refused ? DW_CUTLASS_REFUSED : DW_CUTLASS_OK;
}

static dw_cutlass_result launch(const dw_cutlass_kernel *kernel, size_t bytes, const void *call,
                                void *workspace, void *stream) {
    state.launches++;
    state.last = kernel;
    memcpy(&state.call, call, bytes);
    state.workspace = workspace;
    state.stream = stream;
    if (state.result == DW_CUTLASS_OK && state.kernel) state.kernel(kernel, call);
    return state.result;
}

/* name, kind, structure, scheme, capability */
#define KERNELS(X)                                                                                 \
    X(0, "cutlass.sm90.bf16", GEMM, gemm, BF16, 90)                                                \
    X(1, "cutlass.sm90.bf16.other", GEMM, gemm, BF16, 90)                                          \
    X(2, "cutlass.sm100.bf16", GEMM, gemm, BF16, 100)                                              \
    X(3, "cutlass.sm100.mxfp8", GEMM, gemm, MXFP8, 100)                                            \
    X(4, "cutlass.sm100.nvfp4", GEMM, gemm, NVFP4, 100)                                            \
    X(5, "cutlass.sm100.grouped", GROUPED, grouped, BF16, 100)                                     \
    X(6, "cutlass.sm100.attention", ATTENTION, attention, BF16, 100)

static const dw_cutlass_kernel kernels[7];
#define LAUNCH(index, name, kind, structure, scheme, capability)                                   \
    static dw_cutlass_result launch_##index(const void *call, void *workspace, void *stream) {     \
        return launch(&kernels[index], sizeof(dw_cutlass_##structure), call, workspace, stream);   \
    }
#define ROW(index, name, kind, structure, scheme, capability)                                      \
    {name,     DW_CUTLASS_##kind, DW_SCHEME_##scheme, capability,                                  \
     "a fake", "nowhere",         workspace_bytes,    launch_##index},
KERNELS(LAUNCH)
static const dw_cutlass_kernel kernels[7] = {KERNELS(ROW)};

API const dw_cutlass_kernel *deepwell_cutlass_kernels(int version, size_t *count) {
    const char *mine = getenv("FAKE_CUTLASS_VERSION");
    const bool same = version == (mine ? atoi(mine) : DW_CUTLASS_VERSION);
    *count = same ? sizeof kernels / sizeof kernels[0] : 0;
    return same ? kernels : NULL;
}
API const char *deepwell_cutlass_error(void) { return state.refused ? state.refused : state.error; }
API const char *deepwell_cutlass_version(void) { return "0.0.0"; }
