#include "emulator/targets.h"
#include "base/base.h"
#include <string.h>

enum { ON_90 = 1, ON_100 = 2, ON_103 = 4, ON_120 = 8 };
enum { DATACENTRE = ON_100 | ON_103, BLACKWELL = ON_100 | ON_103 | ON_120 };

/* Instructions that are missing on some architectures, from the "Target ISA Notes" of the PTX ISA 9.0. Each row was
 * checked with ptxas 13.0. Only the GPUs in `on` have an instruction with the opcode and modifiers. */
static const struct {
    const char *opcode, *modifier, *also; /* NULL: any */
    int on;
} rows[] = {
    {"wgmma", NULL, NULL, ON_90},
    {"tcgen05", NULL, NULL, DATACENTRE},
    {"clusterlaunchcontrol", NULL, NULL, BLACKWELL},
    {"cp", "cta_group::1", NULL, DATACENTRE},
    {"cp", "cta_group::2", NULL, DATACENTRE},
    {"cp", "tile::scatter4", NULL, DATACENTRE},
    {"cp", "tile::gather4", "shared::cluster", DATACENTRE},
    {"cp", "tile::gather4", NULL, BLACKWELL},
    {"cp", "cp_mask", NULL, BLACKWELL},
    {"mma", "kind::f8f6f4", NULL, ON_120},
    {"mma", "kind::mxf8f6f4", NULL, ON_120},
    {"mma", "kind::mxf4", NULL, ON_120},
    {"mma", "kind::mxf4nvf4", NULL, ON_120},
    {"cvt", "rs", NULL, DATACENTRE},
    {"cvt", "e2m3x2", NULL, BLACKWELL},
    {"cvt", "e3m2x2", NULL, BLACKWELL},
    {"cvt", "e2m1x2", NULL, BLACKWELL},
    {"cvt", "ue8m0x2", NULL, BLACKWELL},
    {"add", "f32x2", NULL, BLACKWELL},
    {"sub", "f32x2", NULL, BLACKWELL},
    {"mul", "f32x2", NULL, BLACKWELL},
    {"fma", "f32x2", NULL, BLACKWELL},
    {"add", "f32", "bf16", BLACKWELL},
    {"add", "f32", "f16", BLACKWELL},
    {"sub", "f32", "bf16", BLACKWELL},
    {"sub", "f32", "f16", BLACKWELL},
    {"fma", "f32", "bf16", BLACKWELL},
    {"fma", "f32", "f16", BLACKWELL},
    {"redux", "f32", NULL, DATACENTRE},
    {"ldmatrix", "m16n16", NULL, BLACKWELL},
    {"ldmatrix", "m8n16", NULL, BLACKWELL},
    {"stmatrix", "m16n8", NULL, BLACKWELL},
    {"ld", "v8", NULL, BLACKWELL},
    {"st", "v8", NULL, BLACKWELL},
    {"st", "bulk", NULL, BLACKWELL},
};

static bool has(const dw__ptx_instruction *in, const char *modifier) {
    if (!modifier) return true;
    for (int i = 0; i < in->modifier_count; i++)
        if (strcmp(in->modifiers[i], modifier) == 0) return true;
    return false;
}

const char *dw__emu_only_on(const dw__ptx_instruction *in, int architecture) {
    const int here = architecture == 90    ? ON_90
                     : architecture == 100 ? ON_100
                     : architecture == 103 ? ON_103
                                           : ON_120;
    for (size_t i = 0; i < DW_COUNT(rows); i++) {
        if (rows[i].on & here || strcmp(rows[i].opcode, in->opcode) != 0 ||
            !has(in, rows[i].modifier) || !has(in, rows[i].also))
            continue;
        return rows[i].on == ON_90        ? "sm_90a"
               : rows[i].on == ON_120     ? "sm_120a"
               : rows[i].on == DATACENTRE ? "sm_100a and sm_103a"
                                          : "sm_100a, sm_103a and sm_120a";
    }
    return NULL;
}
