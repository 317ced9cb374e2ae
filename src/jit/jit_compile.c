/* Compiles a variant to a cubin or to PTX. */
#include "jit/jit_internal.h"
#include "jit/nvrtc.h"
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Options for every kernel: without a host compiler, plain C functions are device functions. */
static const char *const common_options[] = {"--std=c++17", "-default-device"};

void dw__jit_add_define(dw__jit_variant *variant, const char *name, int value) {
    assert(variant->define_count < DW__JIT_DEFINES);
    variant->defines[variant->define_count++] = (dw__jit_define){name, value};
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const dw__jit_define *)a)->name, ((const dw__jit_define *)b)->name);
}

static dw__jit_variant sorted(const dw__jit_variant *variant) {
    dw__jit_variant copy = *variant;
    qsort(copy.defines, copy.define_count, sizeof copy.defines[0], by_name);
    return copy;
}

dw_status dw__jit_variant_name(const dw__jit_variant *variant, dw__text *name) {
    dw__jit_variant v = sorted(variant);
    const char *slash = strrchr(v.source, '/');
    const char *file = slash ? slash + 1 : v.source;
    DW_RETURN_IF_FAILED(dw__text_printf(name, "%.*s", (int)strcspn(file, "."), file));
    if (v.text) DW_RETURN_IF_FAILED(dw__text_printf(name, ".%s", dw__jit_digest_of(v.text).text));
    DW_RETURN_IF_FAILED(dw__text_printf(name, ".%s", v.arch));
    for (uint32_t i = 0; i < v.define_count; i++)
        DW_RETURN_IF_FAILED(dw__text_printf(name, ".%s=%d", v.defines[i].name, v.defines[i].value));
    return DW_OK;
}

/* ---- compiling ----------------------------------------------------------------------------------- */

typedef struct option_list {
    const char *items[8 + DW__JIT_DEFINES + 16];
    size_t count;
    char arch[64], defines[DW__JIT_DEFINES][64];
} option_list;

static void list_options(const dw__jit_variant *variant, dw__jit_form form, const char *const *more,
                         option_list *list) {
    dw__jit_variant v = sorted(variant);
    bool ptx = form == DW__JIT_PTX;
    list->count = 0;
    /* "compute_90a": NVRTC makes no machine code. */
    snprintf(list->arch, sizeof list->arch, "--gpu-architecture=%s%s", ptx ? "compute_" : "",
             ptx ? v.arch + strcspn(v.arch, "0123456789") : v.arch);
    list->items[list->count++] = list->arch;
    /* Keeps source lines for profilers and compute-sanitizer; the code does not change. */
    if (!ptx) list->items[list->count++] = "-lineinfo";
    for (size_t i = 0; i < DW_COUNT(common_options); i++)
        list->items[list->count++] = common_options[i];
    for (uint32_t i = 0; i < v.define_count; i++) {
        snprintf(list->defines[i], sizeof list->defines[i], "-D%s=%d", v.defines[i].name,
                 v.defines[i].value);
        list->items[list->count++] = list->defines[i];
    }
    for (; more && *more && list->count < DW_COUNT(list->items); more++)
        list->items[list->count++] = *more;
}

/* Returns a line of the compiler's output: the first one with an error, else the last one that is not empty. */
static void first_error(const char *log, char *line, size_t bytes) {
    const char *at = strstr(log, "error");
    const char *begin = at ? at : log + strlen(log);
    if (!at)
        while (begin > log && begin[-1] == '\n') begin--;
    while (begin > log && begin[-1] != '\n') begin--;
    snprintf(line, bytes, "%.*s", (int)strcspn(begin, "\n"), begin);
}

static dw_status read_log(const dw__nvrtc *nvrtc, void *program, char **log) {
    size_t bytes = 0;
    if (nvrtc->log_size(program, &bytes) != 0 || bytes == 0) bytes = 1;
    *log = dw__calloc(bytes + 1, 1);
    if (!*log) return dw__fail_memory("the compiler's output", bytes + 1);
    if (bytes > 1) nvrtc->log(program, *log);
    return DW_OK;
}

static dw_status compile_program(const dw__nvrtc *nvrtc, void *program,
                                 const dw__jit_variant *variant, dw__jit_form form,
                                 const char *const *more, void **image, size_t *bytes,
                                 dw__text *log) {
    dw_status status = DW_OK;
    option_list options;
    char *output = NULL, line[512];
    void *made = NULL;
    dw__text name = {0};
    list_options(variant, form, more, &options);
    int result = nvrtc->compile(program, (int)options.count, options.items);
    DW_TRY(read_log(nvrtc, program, &output));
    if (log) DW_TRY(dw__text_append(log, output, strlen(output)));
    if (result != 0) {
        first_error(output, line, sizeof line);
        DW_TRY(dw__jit_variant_name(variant, &name));
        DW_TRY(dw__fail(DW_INTERNAL, "%s did not compile with %s: %s: %s", name.text,
                        nvrtc->description, nvrtc->error_text(result), line));
    }
    bool ptx = form == DW__JIT_PTX;
    result = ptx ? nvrtc->ptx_size(program, bytes) : nvrtc->cubin_size(program, bytes);
    if (result == 0 && *bytes == 0) result = -1;
    if (result == 0) {
        made = dw__malloc(*bytes);
        if (!made) DW_TRY(dw__fail_memory("a compiled kernel", *bytes));
        result = ptx ? nvrtc->ptx(program, made) : nvrtc->cubin(program, made);
    }
    if (result != 0)
        DW_TRY(dw__fail(DW_UNSUPPORTED, "%s gives no %s for %s (%s); a later one is needed",
                        nvrtc->description, ptx ? "PTX" : "machine code", variant->arch,
                        result > 0 ? nvrtc->error_text(result) : "it is empty"));
    *image = made;
    made = NULL;

cleanup:
    dw__free(made);
    dw__free(output);
    dw__text_free(&name);
    return status;
}

/* Compilers support families of architectures ("sm_100f") from 12.9 on. "sm_120a" needs the same version here. */
static dw_status check_arch(const dw__nvrtc *nvrtc, const char *arch) {
    const bool knows = nvrtc->major > 12 || (nvrtc->major == 12 && nvrtc->minor >= 9);
    if (knows || (arch[strlen(arch) - 1] != 'f' && strcmp(arch, "sm_120a") != 0)) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "%s does not know %s; 12.9 or later is needed: name its libnvrtc in "
                    "DEEPWELL_NVRTC",
                    nvrtc->description, arch);
}

dw_status dw__jit_compile(const dw__jit_variant *variant, const dw__text *expanded,
                          dw__jit_form form, const char *const *options, void **image,
                          size_t *bytes, dw__text *log) {
    const dw__nvrtc *nvrtc;
    void *program = NULL;
    DW_RETURN_IF_FAILED(dw__nvrtc_load(&nvrtc));
    DW_RETURN_IF_FAILED(check_arch(nvrtc, variant->arch));
    int result = nvrtc->create(&program, expanded->text, variant->source, 0, NULL, NULL);
    if (result != 0)
        return dw__fail(DW_INTERNAL, "%s takes no program: %s", nvrtc->description,
                        nvrtc->error_text(result));
    dw_status status = compile_program(nvrtc, program, variant, form, options, image, bytes, log);
    nvrtc->destroy(&program);
    return status;
}
