/* Hardware descriptions as objects: copies, their texts, names of figures. */
#include "hardware/hardware_internal.h"

typedef struct owned {
    dw_hardware public; /* first, so a pointer to it is a pointer to the whole */
    dw__arena *arena;   /* holds its texts */
} owned;

const char *dw_rate_name(dw_rate rate) {
    static const char *const names[DW_RATES] = {
        [DW_RATE_FP32] = "fp32", [DW_RATE_TF32] = "tf32",   [DW_RATE_BF16] = "bf16",
        [DW_RATE_FP8] = "fp8",   [DW_RATE_MXFP8] = "mxfp8", [DW_RATE_FP4] = "fp4",
    };
    return rate >= 0 && rate < DW_RATES ? names[rate] : NULL;
}

const char *dw__figure_kind_name(dw_figure_kind kind) {
    switch (kind) {
    case DW_FIGURE_PUBLISHED: return "published";
    case DW_FIGURE_READ: return "read";
    case DW_FIGURE_MEASURED: return "measured";
    case DW_FIGURE_ESTIMATED: return "estimated";
    case DW_FIGURE_GIVEN: return "given";
    case DW_FIGURE_UNKNOWN: break;
    }
    return NULL;
}

static dw_status copy_text(dw__arena *arena, const char **text) {
    *text = dw__arena_strdup(arena, *text ? *text : "");
    return *text ? DW_OK : dw__fail_memory("a hardware description", 1);
}

static dw_status copy_texts(dw__arena *arena, dw_hardware *hardware) {
#define COPY(text) DW_RETURN_IF_FAILED(copy_text(arena, &hardware->text));
    DW_HARDWARE_TEXTS(COPY)
#undef COPY
    for (int i = 0; i < DW_RATES; i++)
        DW_RETURN_IF_FAILED(copy_text(arena, &hardware->rate[i].source));
#define COPY(figure) DW_RETURN_IF_FAILED(copy_text(arena, &hardware->figure.source));
    DW_HARDWARE_FIGURES(COPY)
#undef COPY
    return DW_OK;
}

dw_status dw__hardware_copy(const dw_hardware *hardware, dw_hardware **copy) {
    dw_status status = DW_OK;
    *copy = NULL;
    owned *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a hardware description", sizeof *made);
    made->public = *hardware;
    made->arena = dw__arena_create();
    if (!made->arena) DW_TRY(dw__fail_memory("a hardware description", sizeof *made));
    DW_TRY(copy_texts(made->arena, &made->public));
    DW_TRY(dw__hardware_check(&made->public));
    *copy = &made->public;
    made = NULL;
cleanup:
    if (made) dw_hardware_destroy(&made->public);
    return status;
}

dw_status dw_hardware_with_gpus(const dw_hardware *hardware, int gpus, dw_hardware **copy) {
    dw_hardware changed = *hardware;
    changed.gpus = gpus;
    return dw__hardware_copy(&changed, copy);
}

void dw_hardware_destroy(dw_hardware *hardware) {
    owned *made = (owned *)hardware;
    if (!made) return;
    dw__arena_destroy(made->arena);
    dw__free(made);
}
