#include "emulator/report.h"
#include "base/json.h"

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

dw_status dw__emu_report(const dw_emulator *emulator, const char *architecture, uint64_t seed,
                         uint64_t launches, uint64_t instructions, const char *const *refused,
                         size_t refused_count, const char *path) {
    dw_status status = DW_OK;
    dw__text text = {0};
    json_t *root =
        json_pack("{s:s, s:I, s:I, s:I, s:[], s:[]}", "architecture", architecture, "seed",
                  (json_int_t)seed, "launches", (json_int_t)launches, "lane_instructions",
                  (json_int_t)instructions, "unsupported", "findings");
    json_t *findings = json_object_get(root, "findings"),
           *unsupported = json_object_get(root, "unsupported");
    bool lost = !findings || !unsupported;
    for (size_t i = 0; i < refused_count && !lost; i++)
        lost = json_array_append_new(unsupported, json_string(refused[i])) != 0;
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
