/* The GPU kernels of public calls and of the optional library, and the support table. */
#include "kernel/cuda/gpu_kernels.h"
#include "base/json.h"
#include "deepwell/explain.h"
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_quantize.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

const char dw__gpu_proof_emulator[] = "proven on the emulator, not run on hardware";

const char *dw__gpu_kernel_proof(const dw__kernel *k) {
    if (k->shown) return k->shown;
    return k->proof == DW__MEASURED_ON_HARDWARE ? "tested and measured on an H200"
           : k->proof == DW__RUN_ON_HOPPER
               ? "on sm_90a run on an H200 in the training of whole models; on sm_100f and "
                 "sm_120a proven on the emulator, not run on hardware"
           : k->proof == DW__PROVEN_ON_EMULATOR ? dw__gpu_proof_emulator
                                                : NULL;
}

/* ---- candidates for a public call --------------------------------------------------------------------- */

void dw__gpu_candidates_of(dw__call_kind kind, const void *call, const dw__gpu_target *target,
                           dw__gpu_candidates *candidates) {
    const dw__kernel *own = NULL;
    bool supported = false;
    candidates->count = 0;
    for (size_t i = 0; i < dw__gpu_kernel_count; i++) {
        const dw__kernel *k = dw__gpu_kernels[i];
        if (k->kind != kind) continue;
        if (k->enqueue && supported) continue;
        /* Deepwell's kernel: the first that supports the call, or the first of all */
        if (k->enqueue) {
            supported = k->supports(k, call, target) == DW_OK;
            if (!own) candidates->count++;
            if (!own || supported) candidates->kernels[0] = own = k;
            continue;
        }
        candidates->kernels[candidates->count++] = k;
    }
}

/* ---- kernels of the optional library ----------------------------------------------------------------- */

static dw__kernel provided[DW__CUTLASS_KERNELS];
static char provided_sources[DW__CUTLASS_KERNELS][256];
static pthread_once_t provided_once = PTHREAD_ONCE_INIT;

/* Entries of the optional library's kernels: copies of the family's entry with the library's names. */
static void make_provided(void) {
    static const dw__kernel *const families[] = {
        [DW_CUTLASS_GEMM] = &dw__cutlass_gemm,
        [DW_CUTLASS_GROUPED] = &dw__cutlass_grouped_gemm,
        [DW_CUTLASS_ATTENTION] = &dw__cutlass_attention,
    };
    static const char *const elements[DW_SCHEME_COUNT] = {
        [DW_SCHEME_BF16] = "BF16",
        [DW_SCHEME_MXFP8] = "MXFP8 (E4M3, E8M0 for 32); D BF16",
        [DW_SCHEME_NVFP4] = "NVFP4 (E2M1, E4M3 for 16); D BF16"};
    const dw__cutlass *library;
    if (dw__cutlass_load(&library) != DW_OK) return;
    for (size_t i = 0; i < library->count; i++) {
        const dw_cutlass_kernel *k = &library->kernels[i];
        snprintf(provided_sources[i], sizeof provided_sources[i], "CUTLASS %s (make cutlass): %s",
                 library->version, k->what);
        provided[i] = *families[k->kind];
        provided[i].name = k->name;
        provided[i].described = k->name;
        provided[i].source = provided_sources[i];
        provided[i].architectures = k->capability == 100 ? "sm_100a (B200)" : "sm_90a (H100, H200)";
        provided[i].elements = elements[k->scheme];
        provided[i].shown = k->shown;
        provided[i].provided = k;
    }
}

dw_status dw__gpu_kernels_provided(const dw__kernel **kernels, size_t *count) {
    const dw__cutlass *library;
    DW_RETURN_IF_FAILED(dw__cutlass_load(&library));
    pthread_once(&provided_once, make_provided);
    *kernels = provided;
    *count = library->count;
    return DW_OK;
}

static dw_status fail_unknown(dw__call_kind kind, const char *name,
                              const dw__kernel *const own[DW__OWN_KERNELS], dw_status found,
                              size_t count) {
    dw_status status = DW_OK;
    dw__text names = {0};
    char why[1024];
    snprintf(why, sizeof why, "%s", dw_last_error());
    for (size_t i = 0; i < DW__OWN_KERNELS && own[i]; i++)
        DW_TRY(dw__text_printf(&names, "%s%s", i > 0 ? ", " : "", own[i]->name));
    if (found != DW_OK)
        DW_TRY(dw__fail(strncmp(name, "cutlass.", 8) == 0 ? DW_UNSUPPORTED : DW_INVALID_ARGUMENT,
                        "kernel \"%s\" is not known for this; there is %s; %s", name, names.text,
                        why));
    for (size_t i = 0; i < count; i++)
        if (provided[i].kind == kind) DW_TRY(dw__text_printf(&names, ", %s", provided[i].name));
    DW_TRY(dw__fail(DW_INVALID_ARGUMENT, "kernel \"%s\" is not known for this; expected one of %s",
                    name, names.text));

cleanup:
    dw__text_free(&names);
    return status;
}

dw_status dw__gpu_kernel_provided(dw__call_kind kind, const char *name,
                                  const dw__kernel *const own[DW__OWN_KERNELS],
                                  const dw__kernel **kernel) {
    const dw__kernel *all;
    size_t count = 0;
    const dw_status status = dw__gpu_kernels_provided(&all, &count);
    for (size_t i = 0; status == DW_OK && i < count; i++) {
        if (all[i].kind != kind || strcmp(all[i].name, name) != 0) continue;
        *kernel = &all[i];
        return DW_OK;
    }
    return fail_unknown(kind, name, own, status, count);
}

/* ---- the support table ----------------------------------------------------------------------------------- */

static json_t *row_of(const dw__kernel *k) {
    const char *use = k->kind == DW__CALL_OPERATION ? "used by the engine on a GPU"
                      : k->asked_for ? "used only on request, and checked at first use"
                                     : "used by default unless measured slower";
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "name", k->name, "operation",
                     k->operation, "source", k->source, "architectures", k->architectures,
                     "elements", k->elements, "needs", k->needs, "proof", dw__gpu_kernel_proof(k),
                     "use", use);
}

dw_status dw_gpu_kernels(char **json) {
    dw_status status = DW_OK;
    const dw__kernel *more;
    size_t count;
    json_t *rows = json_array();
    bool lost = !rows;
    for (size_t i = 0; i < dw__gpu_kernel_count && !lost; i++)
        if (dw__gpu_kernels[i]->enqueue)
            lost = json_array_append_new(rows, row_of(dw__gpu_kernels[i])) != 0;
    if (dw__gpu_kernels_provided(&more, &count) != DW_OK) count = 0;
    for (size_t i = 0; i < count && !lost; i++)
        lost = json_array_append_new(rows, row_of(&more[i])) != 0;
    if (lost) DW_TRY(dw__fail_memory("the list of kernels", 0));
    DW_TRY(dw__json_string(rows, json));

cleanup:
    json_decref(rows);
    return status;
}
