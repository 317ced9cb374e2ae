#include "emulator/finding.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define MOST_KEPT 1000

struct dw__emu_findings {
    pthread_mutex_t lock;
    struct {
        dw_finding *items;
        size_t count, capacity;
    } list;
    uint64_t lost; /* findings dropped because of MOST_KEPT or because memory was out */
};

dw_status dw__emu_findings_create(dw__emu_findings **out) {
    dw__emu_findings *findings = dw__calloc(1, sizeof *findings);
    if (!findings) return dw__fail_memory("an emulated device", sizeof *findings);
    pthread_mutex_init(&findings->lock, NULL);
    *out = findings;
    return DW_OK;
}

void dw__emu_findings_destroy(dw__emu_findings *findings) {
    if (!findings) return;
    dw__free(findings->list.items);
    pthread_mutex_destroy(&findings->lock);
    dw__free(findings);
}

size_t dw__emu_findings_count(const dw__emu_findings *findings) {
    dw__emu_findings *locked = (dw__emu_findings *)findings;
    pthread_mutex_lock(&locked->lock);
    size_t count = findings->list.count;
    pthread_mutex_unlock(&locked->lock);
    return count;
}

bool dw__emu_findings_at(const dw__emu_findings *findings, size_t index, dw_finding *finding) {
    dw__emu_findings *locked = (dw__emu_findings *)findings;
    pthread_mutex_lock(&locked->lock);
    bool here = index < findings->list.count;
    if (here) *finding = findings->list.items[index];
    pthread_mutex_unlock(&locked->lock);
    return here;
}

void dw__emu_findings_clear(dw__emu_findings *findings) {
    pthread_mutex_lock(&findings->lock);
    findings->list.count = 0;
    findings->lost = 0;
    pthread_mutex_unlock(&findings->lock);
}

static const char *const kinds[] = {
    [DW__FOUND_BOUNDS] = "out of bounds",
    [DW__FOUND_ALIGNMENT] = "not aligned",
    [DW__FOUND_UNDEFINED] = "undefined",
    [DW__FOUND_EARLY] = "too early",
    [DW__FOUND_PROXY] = "missing fence",
    [DW__FOUND_RACE] = "race",
    [DW__FOUND_MBARRIER] = "mbarrier",
    [DW__FOUND_TENSOR_MEMORY] = "tensor memory",
    [DW__FOUND_DIVERGENCE] = "divergence",
    [DW__FOUND_DEADLOCK] = "deadlock",
    [DW__FOUND_TRAP] = "trap",
    [DW__FOUND_ASSERT] = "assertion",
    [DW__FOUND_INVALID] = "invalid",
};

static void keep(dw__emu_findings *findings, const dw_finding *made) {
    pthread_mutex_lock(&findings->lock);
    for (size_t i = 0; i < findings->list.count; i++) {
        dw_finding *old = &findings->list.items[i];
        if (old->kind != made->kind || old->ptx_line != made->ptx_line ||
            strcmp(old->kernel, made->kernel) != 0)
            continue;
        old->count++;
        pthread_mutex_unlock(&findings->lock);
        return;
    }
    if (findings->list.count >= MOST_KEPT || DW_PUSH(&findings->list, *made) != DW_OK)
        findings->lost++;
    pthread_mutex_unlock(&findings->lock);
}

static const char *source_file(const dw__ptx_module *module, uint32_t index) {
    const size_t file = (size_t)module->locations.items[index].file;
    return file < module->files.count ? module->files.items[file] : NULL;
}

void dw__emu_describe_location(const dw__ptx_module *module, uint32_t index, char *text,
                               size_t bytes) {
    text[0] = '\0';
    for (size_t length = 0; index && length < bytes;
         index = module->locations.items[index].caller) {
        const char *file = source_file(module, index);
        if (!file) return;
        const char *slash = strrchr(file, '/');
        const int more =
            snprintf(text + length, bytes - length, "%s%s:%d", length ? " called at " : "",
                     slash ? slash + 1 : file, module->locations.items[index].line);
        if (more < 0) return;
        length += (size_t)more;
    }
}

static void report(dw__emu_cta *cta, uint32_t warp, int lane, uint32_t pc, dw__emu_finding kind,
                   const char *format, va_list arguments) {
    const dw__emu_grid *grid = cta->cluster->grid;
    const dw__emu_kernel *kernel = grid->kernel;
    const dw__ptx_instruction *in =
        &kernel->function->code.items[kernel->from[pc < kernel->code_count ? pc : 0]];
    dw_finding made = {
        .kind = kinds[kind], .ptx_line = in->line, .warp = (int)warp, .lane = lane, .count = 1};
    snprintf(made.kernel, sizeof made.kernel, "%s", kernel->name);
    snprintf(made.instruction, sizeof made.instruction, "%s", in->spelling);
    for (int axis = 0; axis < 3; axis++) made.block[axis] = cta->id[axis];
    const dw__ptx_module *module = kernel->module;
    const char *file = in->location ? source_file(module, in->location) : NULL;
    if (file) {
        const dw__ptx_location *location = &module->locations.items[in->location];
        snprintf(made.source, sizeof made.source, "%s", file);
        made.source_line = location->line;
        dw__emu_describe_location(module, location->caller, made.inlined_at,
                                  sizeof made.inlined_at);
    }
    vsnprintf(made.what, sizeof made.what, format, arguments);
    dw__make_plain(made.source);
    dw__make_plain(made.inlined_at);
    dw__make_plain(made.what); /* the text contains names and strings of the program */
    keep(grid->findings, &made);
}

void dw__emu_found(dw__emu_warp *w, int lane, dw__emu_finding kind, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(w->cta, w->index, lane, w->now.pc, kind, format, arguments);
    va_end(arguments);
}

dw__emu_next dw__emu_no_memory(dw__emu_warp *w, int lane) {
    dw__emu_found(w, lane, DW__FOUND_INVALID, "the host is out of memory");
    return DW__FAULT;
}

void dw__emu_found_at(dw__emu_cta *cta, uint32_t warp, int lane, uint32_t pc, dw__emu_finding kind,
                      const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(cta, warp, lane, pc, kind, format, arguments);
    va_end(arguments);
}
