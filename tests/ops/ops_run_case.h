/* Running one kernel on one case, inside guards. */
#ifndef DW_OPS_CALL_H
#define DW_OPS_CALL_H

#include "ops_data.h"

enum { OPS_MAX_OUTPUTS = 8 };

typedef struct ops_call {
    dw__call call;
    dw__arena *arena; /* attributes */
    ops_block outputs[OPS_MAX_OUTPUTS];
    ops_block scratch;
    void *prepared;
} ops_call;

/* The call that computes the only node of `graph` from `operands`, outputs in fresh guarded blocks.
 * Operands' data may be NULL (for fits). */
dw_status ops_call_create(const dw_graph *graph, const ops_operands *operands, ops_call **out);
void ops_call_destroy(ops_call *c);
/* Scratch (guarded) and preparation as the kernel asks for them; after this run() may be called
 * any number of times. */
dw_status ops_call_bind(ops_call *c, const dw__kernel *kernel);
/* Makes every output read as NaN again. */
void ops_call_clear(ops_call *c);
/* NULL, or which block was overrun, in words. */
const char *ops_call_damage(const ops_call *c);

#endif
