/* The table of schemes. */
#include "base/base.h"
#include "number/scheme_sets.h"
#include <stdio.h>
#include <string.h>

static const dw_scheme_info schemes[DW_SCHEME_COUNT] = {
#define ROW(key, name, element, block, scale, layout, tensor_scale)                                \
    [DW_SCHEME_##key] = {name, DW_##element, block, DW_##scale, DW_SCALES_##layout, tensor_scale},
    DW_SCHEME_MAP(ROW)
#undef ROW
};

const dw__scheme_set dw__block_schemes =
    DW__SCHEME(FP8_BLOCK) | DW__SCHEME(MXFP8) | DW__SCHEME(MXFP8_E5M2) | DW__SCHEME(MXFP6) |
    DW__SCHEME(MXFP6_E2M3) | DW__SCHEME(MXFP4) | DW__SCHEME(NVFP4);

const dw__scheme_set dw__mx_schemes = DW__SCHEME(MXFP8) | DW__SCHEME(MXFP8_E5M2) |
                                      DW__SCHEME(MXFP6) | DW__SCHEME(MXFP6_E2M3) |
                                      DW__SCHEME(MXFP4);

const dw__scheme_set dw__fp8_tensor_schemes = DW__SCHEME(FP8_TENSOR) | DW__SCHEME(FP8_TENSOR_E5M2);

const dw__scheme_set dw__tile_schemes =
    DW__SCHEME(MXFP8) | DW__SCHEME(MXFP8_E5M2) | DW__SCHEME(MXFP4) | DW__SCHEME(NVFP4);

/* BF16 has 8 significant bits. An element code has at most 4, which a scale that is a power of two does not change. In
 * NVFP4 the product of E2M1 (2 bits) and UE4M3 (4 bits) has at most 6. The F32 scales of fp8-block have 24. */
const dw__scheme_set dw__exact_in_bf16 = DW__SCHEME(MXFP8) | DW__SCHEME(MXFP8_E5M2) |
                                         DW__SCHEME(MXFP6) | DW__SCHEME(MXFP6_E2M3) |
                                         DW__SCHEME(MXFP4) | DW__SCHEME(NVFP4);

const dw_scheme_info *dw_scheme_describe(dw_scheme scheme) {
    return (unsigned)scheme < DW_SCHEME_COUNT ? &schemes[scheme] : NULL;
}

const char *dw_scheme_name(dw_scheme scheme) {
    return (unsigned)scheme < DW_SCHEME_COUNT ? schemes[scheme].name : "unknown";
}

dw__scheme_words dw__scheme_list(dw__scheme_set set) {
    dw__scheme_words words = {""};
    size_t length = 0;
    for (int i = 0; i < DW_SCHEME_COUNT; i++) {
        if (!(set >> i & 1)) continue;
        const bool last = set >> i == 1, first = length == 0;
        length += (size_t)snprintf(words.text + length, sizeof words.text - length, "%s%s",
                                   first  ? ""
                                   : last ? " or "
                                          : ", ",
                                   schemes[i].name);
    }
    return words;
}

dw_status dw_scheme_find(const char *name, dw_scheme *scheme) {
    for (int i = 0; name && i < DW_SCHEME_COUNT; i++) {
        if (strcmp(name, schemes[i].name) != 0) continue;
        *scheme = (dw_scheme)i;
        return DW_OK;
    }
    return dw__fail(DW_INVALID_ARGUMENT, "there is no scheme \"%.64s\": expected %s",
                    name ? name : "(null)",
                    dw__scheme_list(((dw__scheme_set)1 << DW_SCHEME_COUNT) - 1).text);
}

dw_status dw__scheme_check(const char *what, dw_scheme scheme, dw__scheme_set set) {
    if (dw__scheme_in(scheme, set)) return DW_OK;
    if ((unsigned)scheme >= DW_SCHEME_COUNT)
        return dw__fail(DW_INVALID_ARGUMENT, "%s: scheme is %d, which is not a dw_scheme", what,
                        (int)scheme);
    return dw__fail(DW_UNSUPPORTED, "%s: the scheme %s is not supported: expected %s", what,
                    schemes[scheme].name, dw__scheme_list(set).text);
}
