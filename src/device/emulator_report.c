/* Reports an emulator's findings as text and as a file for programs. */
#include "base/json.h"
#include "device/emulator_library.h"
#include <stdio.h>

void dw_finding_text(const dw_finding *f, char *text, size_t bytes) {
    char source[600] = "", lane[32] = "", times[40] = "";
    if (f->source_line)
        snprintf(source, sizeof source, " (%s:%d%s%s)", f->source, f->source_line,
                 f->inlined_at[0] ? " called at " : "", f->inlined_at);
    if (f->lane >= 0) snprintf(lane, sizeof lane, ", lane %d", f->lane);
    if (f->count > 1) snprintf(times, sizeof times, " (%llu times)", (unsigned long long)f->count);
    snprintf(text, bytes, "%s: kernel %s, PTX line %d%s, block (%u, %u, %u), warp %d%s, %s: %s%s",
             f->kind, f->kernel, f->ptx_line, source, f->block[0], f->block[1], f->block[2],
             f->warp, lane, f->instruction, f->what, times);
}

static json_t *finding_json(const dw_finding *f) {
    char text[3000];
    dw_finding_text(f, text, sizeof text);
    return json_pack("{s:s, s:s, s:s, s:i, s:s, s:i, s:s, s:[I,I,I], s:i, s:i, s:I, s:s, s:s}",
                     "kind", f->kind, "kernel", f->kernel, "instruction", f->instruction,
                     "ptx_line", f->ptx_line, "source", f->source, "source_line", f->source_line,
                     "inlined_at", f->inlined_at, "block", (json_int_t)f->block[0],
                     (json_int_t)f->block[1], (json_int_t)f->block[2], "warp", f->warp, "lane",
                     f->lane, "count", (json_int_t)f->count, "what", f->what, "text", text);
}

dw_status dw_emulator_report(const dw_emulator *emulator, const char *path) {
    const dw__emulator_interface *functions;
    DW_RETURN_IF_FAILED(dw__emulator_library(&functions));
    const dw__emulator_summary about = functions->summary(emulator);
    dw_status status = DW_OK;
    dw__text text = {0};
    json_t *root =
        json_pack("{s:s, s:I, s:I, s:I, s:[], s:[]}", "architecture", about.architecture, "seed",
                  (json_int_t)about.seed, "launches", (json_int_t)about.launches,
                  "lane_instructions", (json_int_t)about.instructions, "unsupported", "findings");
    json_t *findings = json_object_get(root, "findings"),
           *unsupported = json_object_get(root, "unsupported");
    bool lost = !findings || !unsupported;
    for (size_t i = 0; i < about.refused_count && !lost; i++)
        lost = json_array_append_new(unsupported, json_string(about.refused[i])) != 0;
    for (size_t i = 0; i < dw_emulator_finding_count(emulator) && !lost; i++) {
        dw_finding finding;
        if (dw_emulator_finding(emulator, i, &finding) != DW_OK) break;
        lost = json_array_append_new(findings, finding_json(&finding)) != 0;
    }
    if (lost) DW_TRY(dw__fail_memory("a report of findings", 0));
    DW_TRY(dw__json_write(root, &text));
    DW_TRY(dw__text_append(&text, "\n", 1));
    DW_TRY(dw__file_write(path, text.text, text.length));
cleanup:
    json_decref(root);
    dw__text_free(&text);
    return status;
}
