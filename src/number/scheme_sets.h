/* Sets of schemes, for code that supports some of them. */
#ifndef DW_NUMBER_SCHEME_SETS_H
#define DW_NUMBER_SCHEME_SETS_H

#include "deepwell/scheme.h"
#include <stdbool.h>

/* Bit 1 << scheme for each scheme of a set. */
typedef uint32_t dw__scheme_set;
#define DW__SCHEME(key) ((dw__scheme_set)1 << DW_SCHEME_##key)

static inline bool dw__scheme_in(dw_scheme scheme, dw__scheme_set set) {
    return (unsigned)scheme < DW_SCHEME_COUNT && (set >> scheme & 1);
}
/* Schemes whose blocks have a length. */
extern const dw__scheme_set dw__block_schemes;

/* The schemes of OCP MX, with E8M0 scales. */
extern const dw__scheme_set dw__mx_schemes;

/* FP8 with one F32 scale for the tensor. */
extern const dw__scheme_set dw__fp8_tensor_schemes;

/* Block schemes whose values, before the tensor's scale, BF16 represents exactly, except for numbers below 2^-126. */
extern const dw__scheme_set dw__exact_in_bf16;

/* Block schemes whose codes tensor cores multiply with their scales in tiles (common/scale_layout.h). */
extern const dw__scheme_set dw__tile_schemes;

/* "fp8-block, mxfp8 or nvfp4" */
typedef struct dw__scheme_words {
    char text[192];
} dw__scheme_words;
dw__scheme_words dw__scheme_list(dw__scheme_set set);

/* DW_OK if the set has the scheme. Otherwise the message begins with `what` and lists the set. DW_INVALID_ARGUMENT: no
 * such scheme; DW_UNSUPPORTED: not in the set. */
dw_status dw__scheme_check(const char *what, dw_scheme scheme, dw__scheme_set set);

#endif
