/* Runs one kernel on one case, with guard zones around all memory. */
#ifndef DW_OPS_CALL_H
#define DW_OPS_CALL_H

#include "kernel_call.h"
#include "ops_data.h"

enum { OPS_MAX_OUTPUTS = 8 };

typedef struct ops_call {
    dw__call call;
    dw__arena *arena; /* attributes */
    ops_block outputs[OPS_MAX_OUTPUTS];
    ops_block scratch;
    void *prepared;
} ops_call;

/* Makes the call that computes the only node of `graph` from `operands`, with outputs in new guarded blocks. The
 * operands' data may be NULL, for calls of supports(). */
dw_status ops_call_create(const dw_graph *graph, const ops_operands *operands, ops_call **out);
void ops_call_destroy(ops_call *c);
/* Allocates guarded scratch and calls the kernel's parse(). After this run() may be called any number of times. */
dw_status ops_call_bind(ops_call *c, const dw__kernel *kernel);
/* Fills every output with NaNs again. */
void ops_call_clear(ops_call *c);
/* Returns NULL, or a description of the block that was overrun. */
const char *ops_call_damage(const ops_call *c);

#endif
