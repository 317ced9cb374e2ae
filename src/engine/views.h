/* Views: a tensor's elements with another shape or in another order, without moving them.
 *
 * Each function fills `to` from `from` (to may not be from). Strides are in elements. An axis of
 * size 1 gets the stride that a contiguous tensor would have there, so that equal layouts compare
 * equal. data and dtype are copied.
 */
#ifndef DW_VIEWS_H
#define DW_VIEWS_H

#include "graph/internal.h"
#include "kernel/kernel.h"

/* The result of a view operation as a view of its operand. `type` has the result's shape, `attrs` the
 * node's attributes with dims made numbers. `offset` receives the position of the first element, in
 * elements. Returns false for a reshape that needs a copy. */
bool dw__view_apply(dw__view_kind kind, const dw__tensor *from, const dw__tensor *type,
                    uint32_t attr_count, const dw_attr *attrs, dw__tensor *to, int64_t *offset);

/* Returns false if strides cannot express the shape, so that a copy is needed. */
bool dw__view_reshape(const dw__tensor *from, int rank, const int64_t *shape, dw__tensor *to);
void dw__view_permute(const dw__tensor *from, const int64_t *perm, dw__tensor *to);
void dw__view_broadcast(const dw__tensor *from, int rank, const int64_t *shape, dw__tensor *to);
/* `step` NULL: 1 on every axis. `offset` receives the position of the first element, in elements. */
void dw__view_slice(const dw__tensor *from, const int64_t *start, const int64_t *limit,
                    const int64_t *step, dw__tensor *to, int64_t *offset);
/* Returns the layout of x such that dw__view_permute(x, perm) is `permuted`. */
void dw__view_unpermute(const dw__tensor *permuted, const int64_t *perm, dw__tensor *to);
bool dw__view_same(const dw__tensor *a, const dw__tensor *b);

#endif
