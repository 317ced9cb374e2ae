/* The probe: the order in which its sources are read, and the summary for plans. */
#include "hardware/machine_internal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- shared by the probe's files -------------------------------------------------------------- */

dw_status dw__machine_text(dw__machine *m, const char *text, const char **copy) {
    size_t bytes = strlen(text);
    char *made = dw__arena_alloc(m->arena, bytes + 1);
    if (!made) return dw__fail_memory("the description of this machine", bytes);
    size_t at = 0;
    for (const char *from = text; *from;) {
        int length = dw__utf8_length(from);
        if (length > 0) memcpy(made + at, from, (size_t)length);
        if (length == 0) made[at] = '?';
        at += length > 0 ? (size_t)length : 1;
        from += length > 0 ? length : 1;
    }
    *copy = made;
    return DW_OK;
}

dw_status dw__machine_remark(dw__machine *m, const char *format, ...) {
    char text[1024];
    const char *copy;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    DW_RETURN_IF_FAILED(dw__machine_text(m, text, &copy));
    return DW_PUSH(&m->remarks, copy);
}

static bool read_line(const dw__machine *m, char *line, size_t bytes, const char *format,
                      va_list arguments) {
    char path[512];
    int length = snprintf(path, sizeof path, "%s", m->options->root);
    line[0] = '\0';
    if (length < 0 || (size_t)length >= sizeof path) return false;
    int more = vsnprintf(path + length, sizeof path - (size_t)length, format, arguments);
    if (more < 0 || (size_t)length + (size_t)more >= sizeof path) return false;
    FILE *file = fopen(path, "re");
    if (!file) return false;
    /* the speed of a link that is down reads as EINVAL */
    bool read = fgets(line, (int)bytes, file) != NULL;
    fclose(file);
    if (!read) line[0] = '\0';
    line[strcspn(line, "\n")] = '\0';
    return read;
}

bool dw__machine_read(const dw__machine *m, char *line, size_t bytes, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    bool read = read_line(m, line, bytes, format, arguments);
    va_end(arguments);
    return read;
}

int64_t dw__machine_read_number(const dw__machine *m, int64_t absent, const char *format, ...) {
    char line[64], *end = NULL;
    va_list arguments;
    va_start(arguments, format);
    bool read = read_line(m, line, sizeof line, format, arguments);
    va_end(arguments);
    if (!read) return absent;
    errno = 0;
    long long value = strtoll(line, &end, 10);
    return end == line || errno ? absent : value;
}

/* ---- the probe ------------------------------------------------------------------------------- */

/* Points the public structure at the lists. */
static void publish(dw__machine *m) {
    dw_machine *p = &m->public;
    p->gpus = m->gpus.items;
    p->gpu_count = (int)m->gpus.count;
    p->links = m->links.items;
    p->link_count = (int)m->links.count;
    p->paths = m->paths.items;
    p->path_count = (int)m->paths.count;
    p->nics = m->nics.items;
    p->nic_count = (int)m->nics.count;
    p->numa = m->numa.items;
    p->numa_count = (int)m->numa.count;
    p->remarks = m->remarks.items;
    p->remark_count = (int)m->remarks.count;
}

dw_status dw__machine_probe(const dw__machine_options *options, dw_machine **machine) {
    dw_status status = DW_OK;
    *machine = NULL;
    dw__machine *m = dw__calloc(1, sizeof *m);
    if (!m) return dw__fail_memory("the description of this machine", sizeof *m);
    m->options = options;
    m->arena = dw__arena_create();
    if (!m->arena) DW_TRY(dw__fail_memory("the description of this machine", sizeof *m));
    m->public.driver = m->public.cuda = m->public.fabric = "";
    m->public.bus_bandwidth.source = "";
    DW_TRY(dw__machine_read_cpu(m));
    DW_TRY(dw__machine_read_gpus(m));
    DW_TRY(dw__machine_read_links(m));
    DW_TRY(dw__machine_read_nics(m));
    DW_TRY(dw__machine_read_paths(m));
    if (options->measure) DW_TRY(dw__machine_measure(m));
    publish(m);
    m->options = NULL; /* it belongs to the caller */
    *machine = &m->public;
    m = NULL;
cleanup:
    if (m) dw_machine_destroy(&m->public);
    return status;
}

dw_status dw_machine_probe(int measure, dw_machine **machine) {
    static const dw__machine_options asked = {
        .root = "", .copy_bytes = (size_t)1 << 30, .matrix_size = 8192};
    dw__machine_options options = asked;
    options.measure = measure;
    if (!machine) return dw__fail(DW_INVALID_ARGUMENT, "dw_machine_probe: machine is NULL");
    return dw__machine_probe(&options, machine);
}

void dw_machine_destroy(dw_machine *machine) {
    dw__machine *m = (dw__machine *)machine;
    if (!m) return;
    dw__free(m->gpus.items);
    dw__free(m->links.items);
    dw__free(m->paths.items);
    dw__free(m->nics.items);
    dw__free(m->numa.items);
    dw__free(m->remarks.items);
    dw__arena_destroy(m->arena);
    dw__free(m);
}

dw_status dw_machine_hardware(const dw_machine *machine, dw_hardware **hardware) {
    dw_hardware summary;
    if (!machine || !hardware)
        return dw__fail(DW_INVALID_ARGUMENT, "the machine or `hardware` is NULL");
    dw__machine_summary(machine, &summary);
    dw_status status = dw__hardware_copy(&summary, hardware);
    return status == DW_INVALID_ARGUMENT ? dw__fail_prefix(status, "this machine") : status;
}

dw_status dw_hardware_open(const char *text, dw_hardware **hardware) {
    struct stat found;
    if (text && strcmp(text, "auto") == 0) return dw_hardware_probe(0, hardware);
    if (text && stat(text, &found) == 0) return dw_hardware_load(text, hardware);
    return dw_hardware_named(text, hardware);
}

dw_status dw_hardware_probe(int measure, dw_hardware **hardware) {
    dw_machine *machine = NULL;
    if (!hardware) return dw__fail(DW_INVALID_ARGUMENT, "dw_hardware_probe: hardware is NULL");
    *hardware = NULL;
    DW_RETURN_IF_FAILED(dw_machine_probe(measure, &machine));
    dw_status status = dw_machine_hardware(machine, hardware);
    dw_machine_destroy(machine);
    return status;
}
