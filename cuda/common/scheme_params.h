/* Numbers of schemes and of scale rules in defines of device code: those of dw_scheme (deepwell/scheme.h) and
 * dw_scale_rule (deepwell/number.h), which src/kernel/cuda/quantize.c asserts. Plain C, read by the host and by device
 * code. */
#ifndef DW_SCHEME_PARAMS_H
#define DW_SCHEME_PARAMS_H

#define DW_CODES_MXFP8 6      /* E4M3, an E8M0 scale for 32 elements */
#define DW_CODES_MXFP8_E5M2 7 /* E5M2, an E8M0 scale for 32 elements */
#define DW_CODES_MXFP4 10     /* E2M1, an E8M0 scale for 32 elements */
#define DW_CODES_NVFP4 11     /* E2M1, an E4M3 scale for 16 elements, an F32 scale for the tensor */

#define DW_CODES_ARE_MXFP8(scheme) ((scheme) == DW_CODES_MXFP8 || (scheme) == DW_CODES_MXFP8_E5M2)

#define DW_RULE_RCEIL 1
#define DW_RULE_FLOOR 2
#define DW_RULE_CEIL 3

#endif
