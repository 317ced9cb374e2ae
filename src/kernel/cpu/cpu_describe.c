/* Describes the CPU, its libraries and the registered kernels as JSON. */
#include "base/pool.h"
#include "deepwell/engine.h"
#include "kernel/cpu/amx.h"
#include "kernel/cpu/cpu.h"
#include "kernel/library/onednn.h"

static dw_status list_kernels(dw__text *out) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, "{"));
    for (int op = 0; op < DW_OP_COUNT; op++) {
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, "%s\"%s\": [", op ? ", " : "", dw_op_name((dw_op)op)));
        const dw__kernel *const *kernels = dw__kernel_candidates((dw_op)op, false);
        for (size_t i = 0; kernels[i]; i++) {
            DW_RETURN_IF_FAILED(dw__text_printf(out, "%s{\"name\": \"%s\", \"source\": \"%s\"}",
                                                i ? ", " : "", kernels[i]->name,
                                                kernels[i]->source));
        }
        DW_RETURN_IF_FAILED(dw__text_printf(out, "]"));
    }
    return dw__text_printf(out, "}");
}

dw_status dw_machine_describe(char **json) {
    dw_status status = DW_OK;
    dw__text out = {0};
    const char *onednn = dw__onednn_version(), *quote = onednn ? "\"" : "";
    DW_TRY(dw__text_printf(&out, "{\"isa\": \"%s\", \"amx\": %s, \"threads\": %d, ",
                           dw__isa_name(dw__cpu_isa()), dw__amx_available() ? "true" : "false",
                           dw__pool_threads()));
    DW_TRY(dw__text_printf(&out, "\"onednn\": %s%s%s, \"onednn_isa\": %s%s%s, ", quote,
                           onednn ? onednn : "null", quote, quote,
                           onednn ? dw__onednn_isa() : "null", quote));
    DW_TRY(dw__text_printf(&out, "\"onednn_memory_known\": %s, ",
                           dw__onednn_memory_known() ? "true" : "false"));
    DW_TRY(dw__text_printf(&out, "\"kernels\": "));
    DW_TRY(list_kernels(&out));
    DW_TRY(dw__text_printf(&out, "}"));
    *json = out.text;
    out.text = NULL;
cleanup:
    dw__text_free(&out);
    return status;
}
