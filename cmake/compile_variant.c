/* Build tool: compiles a variant of a device source to OUTPUT.cubin and OUTPUT.ptx with NVRTC, as at first use.
 * `compile_variant ARCH SOURCE OUTPUT [NAME=VALUE...]`. */
#include "jit/jit_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PATH = 4096 };

static dw_status write_form(const dw__jit_variant *variant, const dw__text *source,
                            dw__jit_form form, const char *output) {
    dw_status status = DW_OK;
    char path[MOST_PATH];
    void *image = NULL;
    size_t bytes = 0;
    DW_TRY(dw__jit_compile(variant, source, form, NULL, &image, &bytes, NULL));
    bool ptx = form == DW__JIT_PTX;
    if (ptx) bytes = strlen(image);
    if (snprintf(path, sizeof path, "%s.%s", output, ptx ? "ptx" : "cubin") >= (int)sizeof path)
        DW_TRY(dw__fail(DW_INVALID_ARGUMENT, "the path %s is too long", output));
    DW_TRY(dw__file_write(path, image, bytes));

cleanup:
    dw__free(image);
    return status;
}

int main(int argc, char **argv) {
    dw_status status = DW_OK;
    dw__text source = {0};
    if (argc < 4 || argc > 4 + DW__JIT_DEFINES) {
        fprintf(stderr, "usage: compile_variant ARCH SOURCE OUTPUT [NAME=VALUE...]\n");
        return 2;
    }
    dw__jit_variant variant = {.source = argv[2], .entry = "", .arch = argv[1]};
    for (int i = 4; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        if (!equals) DW_TRY(dw__fail(DW_INVALID_ARGUMENT, "\"%s\" is not NAME=VALUE", argv[i]));
        *equals = '\0';
        dw__jit_add_define(&variant, argv[i], atoi(equals + 1));
    }
    DW_TRY(dw__jit_expand(variant.source, &source));
    DW_TRY(write_form(&variant, &source, DW__JIT_CUBIN, argv[3]));
    DW_TRY(write_form(&variant, &source, DW__JIT_PTX, argv[3]));

cleanup:
    if (status != DW_OK) fprintf(stderr, "compile_variant: %s\n", dw_last_error());
    dw__text_free(&source);
    return status == DW_OK ? 0 : 1;
}
