/* Build tool: compiles a variant of a device source with NVRTC, as at first use, to files whose names end in .cubin or
 * .ptx. `compile_variant ARCH SOURCE OUTPUT... [NAME=VALUE...]`. */
#include "jit/jit_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Returns whether `text` ends with `ending`. */
static bool ends_with(const char *text, const char *ending) {
    const size_t length = strlen(text), end = strlen(ending);
    return length > end && strcmp(text + length - end, ending) == 0;
}

static bool is_output(const char *argument) {
    return ends_with(argument, ".ptx") || ends_with(argument, ".cubin");
}

static dw_status write_output(const dw__jit_variant *variant, const dw__text *source,
                              const char *path) {
    dw_status status = DW_OK;
    const dw__jit_form form = ends_with(path, ".ptx") ? DW__JIT_PTX : DW__JIT_CUBIN;
    void *image = NULL;
    size_t bytes = 0;
    DW_TRY(dw__jit_compile(variant, source, form, NULL, &image, &bytes, NULL));
    if (form == DW__JIT_PTX) bytes = strlen(image);
    DW_TRY(dw__file_write(path, image, bytes));

cleanup:
    dw__free(image);
    return status;
}

int main(int argc, char **argv) {
    dw_status status = DW_OK;
    dw__text source = {0};
    int first = 3; /* the first NAME=VALUE */
    while (first < argc && is_output(argv[first])) first++;
    if (first == 3 || argc > first + DW__JIT_DEFINES) {
        fprintf(stderr, "usage: compile_variant ARCH SOURCE OUTPUT... [NAME=VALUE...]\n");
        return 2;
    }
    dw__jit_variant variant = {.source = argv[2], .entry = "", .arch = argv[1]};
    for (int i = first; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        if (!equals) DW_TRY(dw__fail(DW_INVALID_ARGUMENT, "\"%s\" is not NAME=VALUE", argv[i]));
        *equals = '\0';
        dw__jit_add_define(&variant, argv[i], atoi(equals + 1));
    }
    DW_TRY(dw__jit_expand(variant.source, &source));
    for (int i = 3; i < first; i++) DW_TRY(write_output(&variant, &source, argv[i]));

cleanup:
    if (status != DW_OK) fprintf(stderr, "compile_variant: %s\n", dw_last_error());
    dw__text_free(&source);
    return status == DW_OK ? 0 : 1;
}
