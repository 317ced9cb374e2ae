/* A plan while it is being made: types and functions that the files of lowering share.
 *
 *     lower.c             the walk over the schedule
 *     lower_storages.c    storages, and where values lie in them
 *     lower_steps.c       a node becomes a step, a step with its kernel an instruction
 *     lower_kernels.c     the kernel of a step, and what it prepares
 *     lower_views.c       views without an instruction
 *     lower_copies.c      operands that are copied for a faster kernel
 *     lower_layouts.c     results in the layout that later nodes read
 *     lower_concats.c     operands of a concatenation that are computed in its result
 *     lower_logits.c      whether forward keeps logits for backward
 *     lower_in_place.c    results that overwrite an operand
 *     lower_epilogues.c   a step and the elementwise program or rope behind it as one
 *     lower_sums.c        a product and the sums of its operand's rows as one
 *     lower_result_sums.c a program behind a product and the sums of its results' rows as one
 *     lower_magnitudes.c  the largest magnitude of a tensor, found by the kernel that makes the tensor
 *     lower_codes.c       an elementwise program and the nodes that quantize its results as one
 *     lower_outputs.c     outputs and gradients in the caller's buffers
 */
#ifndef DW_LOWERING_H
#define DW_LOWERING_H

#include "engine/engine_internal.h"
#include "graph/body.h"

/* Longest chain of views that is followed; bounds recursion depth and time. */
enum { DW__LOWER_MOST_VIEWS = 16 };

typedef struct dw__lowering {
    dw_plan *plan;
    const dw_engine *engine;
    const dw_graph *graph;
    /* By value: where it lies. Storage DW_NONE: not lowered yet, unread or, with rank -1, left out. */
    dw__operand *values;
    dw__operand *magnitudes; /* by value: its vector of them (dw__call); storage DW_NONE: none */
    dw__operand *requests;   /* by value: where later nodes want it; storage DW_NONE: anywhere */
    dw__operand *concats;    /* by concatenation: its memory; storage DW_NONE: not chosen yet */
    int nested_concats;      /* concatenations whose memory is being chosen */
    uint32_t *first_slot;    /* by value: the first output that is this value, or DW_NONE */
    uint32_t *next_slot;     /* by output: the next output that is the same value */
    bool *claimed;           /* by output: its buffer holds a value already */
    dw_node *waiting;        /* nodes that read a sum which waits for a product, in order */
    uint32_t waiting_count;
    dw__body *body;           /* scratch */
    dw__operation_call first; /* scratch */
    dw__call second;          /* scratch */
} dw__lowering;

static inline const dw__node_record *record_of(const dw__lowering *l, dw_node node) {
    return &l->graph->nodes.items[node];
}
static inline const dw__op_row *row_of(const dw__lowering *l, dw_node node) {
    return &dw__op_table[record_of(l, node)->op];
}
static inline const dw__value_record *value_of(const dw__lowering *l, dw_value value) {
    return &l->graph->values.items[value];
}
static inline dw__storage *storage_of(const dw__lowering *l, uint32_t storage) {
    return &l->plan->storages.items[storage];
}
static inline uint32_t use_count(const dw__lowering *l, dw_value value) {
    return l->engine->use_start[value + 1] - l->engine->use_start[value];
}
/* Index of a slot among the caller's outputs or gradients. */
static inline uint32_t output_position(const dw__lowering *l, uint32_t slot) {
    uint32_t outputs = l->engine->output_count;
    return slot < outputs ? slot : l->engine->wrt_of[slot - outputs];
}
/* Memory that lives as long as the plan. */
static inline void *allocate(dw__lowering *l, size_t bytes) {
    return dw__arena_alloc(l->plan->memory, bytes);
}
/* Returns dtype and shape of a value at the plan's sizes, with contiguous strides. */
static inline dw_status dw__lower_type(const dw__lowering *l, dw_value value, dw__tensor *tensor) {
    return dw__value_tensor_at(l->graph, value, l->plan->sizes, tensor);
}
static inline dw_status dw__lower_attrs(dw__lowering *l, dw_node node, const dw_attr **attrs) {
    return dw__node_attrs_at(l->plan->memory, l->graph, node, l->plan->sizes, attrs);
}

/* ---- lower.c --------------------------------------------------------------------------------- */

/* Lowers a node in one of the ways that lower.c lists, unless it is lowered. */
dw_status dw__lower_node(dw__lowering *l, dw_node node);
/* Lowers a node to an instruction of its own. */
dw_status dw__lower_plain(dw__lowering *l, dw_node node);

/* ---- lower_storages.c ------------------------------------------------------------------------ */

dw_status dw__lower_add_storage(dw__lowering *l, dw__home home, uint32_t index, size_t bytes,
                                uint32_t *storage);
/* Makes a contiguous storage for a value: the buffer of the output that it is, or the arena. */
dw_status dw__lower_place_value(dw__lowering *l, dw_value value, const dw__tensor *type,
                                dw__operand *operand);
/* Says where the value lies. Its readers become readers of that storage. */
void dw__lower_define(dw__lowering *l, dw_value value, const dw__operand *operand);
/* Counts one read of the value as done. */
void dw__lower_read_once(dw__lowering *l, dw_value value);
/* True if the operand is its whole storage, in order. */
bool dw__lower_is_whole(const dw__lowering *l, const dw__operand *operand);

/* ---- lower_steps.c --------------------------------------------------------------------------- */

/* The step of a node: operands where they lie, results contiguous and without a storage. */
dw_status dw__lower_make_step(dw__lowering *l, dw_node node, dw__step *step);
/* Makes a storage for each result that has a reader and no storage yet. */
dw_status dw__lower_place_outputs(dw__lowering *l, dw__step *step);
/* Appends the step as an instruction, unless its results have no elements. */
dw_status dw__lower_add_step(dw__lowering *l, dw__step *step);
/* Appends a step whose kernel is prepared. `epilogue` may be NULL. */
dw_status dw__lower_add_instruction(dw__lowering *l, const dw__step *step,
                                    const dw__step *epilogue);
/* Counts the reads of a node that has been lowered, and defines its results. */
void dw__lower_finish(dw__lowering *l, const dw__step *step);

/* ---- lower_kernels.c ------------------------------------------------------------------------- */

/* Makes the scratch call l->first of a step and its epilogue (NULL: none). The epilogue is l->second. On a GPU, where
 * kernels look at alignment, tensors have addresses: those that lie in a storage, and results of the epilogue that will
 * lie in one. */
void dw__lower_call(dw__lowering *l, const dw__step *step, const dw__step *epilogue);
/* Sets the kernel of the step and its epilogue: the first that supports both, or NULL. A CPU has one for every step
 * without an epilogue. */
void dw__lower_select(dw__lowering *l, dw__step *step, const dw__step *epilogue);
/* True if a kernel other than the CPU's reference supports the scratch call l->first. */
bool dw__lower_has_kernel(const dw__lowering *l);
/* True if the step has a kernel other than the CPU's reference. */
bool dw__step_is_fast(const dw__step *step);
/* Makes the step's kernel ready to run: parses its attributes, or finds its variant. If the kernel turns out to be
 * unusable on this GPU, the step gets the next one that supports it. */
dw_status dw__lower_prepare(dw__lowering *l, dw__step *step);
/* The same for a step and its epilogue, which one kernel computes. On a GPU that kernel's code is made from both, and
 * the epilogue has no variant of its own. */
dw_status dw__lower_prepare_both(dw__lowering *l, dw__step *step, dw__step *epilogue);
/* True if some kernel of the target computes this operation with an epilogue, adds its result to what the output holds,
 * or also sums an operand. */
bool dw__lower_has_epilogues(const dw__lowering *l, dw_op op);
bool dw__lower_accumulates(const dw__lowering *l, dw_op op);
bool dw__lower_sums_operands(const dw__lowering *l, dw_op op);
/* The most that a kernel of the target can do about the layout of the operation's results. */
dw__result_layout dw__lower_results(const dw__lowering *l, dw_op op);

/* ---- lower_views.c, lower_copies.c ----------------------------------------------------------- */

dw_status dw__lower_view(dw__lowering *l, dw_node node);
/* Appends an instruction that copies `from` to `to` (same shape) on behalf of `node`. */
dw_status dw__lower_add_copy(dw__lowering *l, dw_node node, const dw__operand *from,
                             const dw__operand *to);
/* Chooses the step's kernel; copies operands if only the reference supports them as they lie. */
dw_status dw__lower_choose_kernel(dw__lowering *l, dw__step *step);

/* ---- lower_layouts.c ------------------------------------------------------------------------- */

/* Lays out the step's results as later nodes want them, if a kernel supports that. `first`: a step that runs before it
 * in the same instruction, or NULL. */
dw_status dw__lower_lay_out_results(dw__lowering *l, dw__step *step, const dw__step *first);
/* Requests the layout in which a permute of the value is contiguous, if a permute reads it. */
dw_status dw__lower_request_by_permutes(dw__lowering *l, dw_value value);
/* On a GPU, places the result of a matrix multiplication in 16 bits so that its rows begin at multiples of 16 bytes, if
 * it has no place yet and all its readers read rows at any distance. */
dw_status dw__lower_pad_rows(dw__lowering *l, dw__step *step);
/* Places a result in the arena, its rows at multiples of 16 bytes if they are long. */
dw_status dw__lower_pad(dw__lowering *l, dw__operand *result);

/* ---- lower_concats.c ------------------------------------------------------------------------- */

/* True for a view that shows each element of its operand once. */
bool dw__lower_rearranges(const dw__lowering *l, dw_node node);
/* Returns where the operand of a reshape or permute must lie so that its result lies at `result`; false if strides
 * cannot express it. */
bool dw__lower_operand_layout(dw__lowering *l, dw_node node, const dw__operand *result,
                              dw__operand *operand);
/* Requests the value in the slice of a concatenation that reads it or a rearranging view of it, if it may lie there. */
dw_status dw__lower_request_by_concats(dw__lowering *l, dw_value value);
/* True for a concatenation that only a permute reads which leaves the last axis in its place. */
bool dw__lower_is_permuted_concat(const dw__lowering *l, dw_node node);
/* Copies the operands that do not lie in place. */
dw_status dw__lower_concat(dw__lowering *l, dw_node node);

/* ---- lower_logits.c -------------------------------------------------------------------------- */

/* Places the logits of linear_cross_entropy for backward, or leaves them out: the result's rank is then -1. Other steps
 * stay as they are. */
dw_status dw__lower_logits(dw__lowering *l, dw__step *step);

/* ---- lower_in_place.c ------------------------------------------------------------------------ */

/* Marks the operands that lie in the arena and that nothing reads after the step (dw__call.disposable). */
void dw__lower_find_disposable(const dw__lowering *l, dw__step *step);

/* How many of the step's inputs lie in the storage. */
uint32_t dw__lower_reads_in(const dw__step *step, uint32_t storage);
/* Lets result `o` of the pointwise step take over the storage of input `i`, if it may. `first`: a step
 * that runs before it in the same instruction, or NULL. */
bool dw__lower_take_over(dw__lowering *l, dw__step *step, const dw__step *first, uint32_t i,
                         uint32_t o);
/* Lets the results of a pointwise step that fill a concatenation be written over an operand that lies in the same
 * slices, if nothing reads it later: the concatenation gets the operand's storage. */
void dw__lower_take_over_concat(dw__lowering *l, dw__step *step, const dw__step *first);
/* Lets results of a pointwise step take over the storages of inputs. Call it before
 * dw__lower_place_outputs. */
void dw__lower_reuse_inputs(dw__lowering *l, dw__step *step, const dw__step *first);

/* ---- lower_epilogues.c ----------------------------------------------------------------------- */

/* True if the node may wait for the program or the rope that reads its result. */
bool dw__lower_may_wait(dw__lowering *l, dw_node node);
/* Lets the node wait. Its result gets a storage, which stays unused if an epilogue consumes it. */
dw_status dw__lower_defer(dw__lowering *l, dw_node node);
/* True if a deferred node will fill the operand's storage. */
bool dw__lower_waits(const dw__lowering *l, const dw__operand *operand);
/* Lowers the deferred node of the storage by itself. */
dw_status dw__lower_deferred(dw__lowering *l, uint32_t storage);
/* Lowers the deferred nodes that `node` reads, but not that of the storage `except`. */
dw_status dw__lower_deferred_inputs(dw__lowering *l, dw_node node, uint32_t except);
dw_status dw__lower_program(dw__lowering *l, dw_node node);
/* Lowers rotary position embedding: as one instruction with the product in front of it, if a kernel computes both. */
dw_status dw__lower_rope(dw__lowering *l, dw_node node);
/* Lowers attention: as one instruction with the rope of its queries, if a kernel computes both. */
dw_status dw__lower_attention(dw__lowering *l, dw_node node);

/* ---- lower_sums.c ---------------------------------------------------------------------------- */

/* Lowers a product and the sum of an operand's rows as one instruction, if `node` is one of the two and a kernel
 * computes both. `done`: the node needs no instruction of its own, now or when its turn comes. */
dw_status dw__lower_product_and_sum(dw__lowering *l, dw_node node, bool *done);
/* True if the node reads a value that waits for a product. It is then lowered behind that product, and delivered. */
bool dw__lower_waits_for_sum(dw__lowering *l, dw_node node);

/* True if the node sums a tensor of floating point over all axes but the last. */
bool dw__lower_sums_rows(const dw__lowering *l, dw_node node);
/* Lowers the reshapes between the value and the first source that is lowered. */
dw_status dw__lower_reshapes(dw__lowering *l, dw_value value);

/* The value whose elements a chain of reshapes shows. */
dw_value dw__lower_source(const dw__lowering *l, dw_value value);

/* ---- lower_result_sums.c ---------------------------------------------------------------------- */

/* Adds outputs to the step of a program behind a product: the sums of its results' rows that nodes ask for. They have
 * no storage yet. */
dw_status dw__lower_want_sums(dw__lowering *l, dw__step *program);
/* Takes them away. */
void dw__lower_forget_sums(dw__step *program);
/* Places them. */
dw_status dw__lower_place_sums(dw__lowering *l, dw__step *program);
/* Makes them the results of the nodes that ask for them. The program's own results are defined. */
dw_status dw__lower_finish_sums(dw__lowering *l, const dw__step *program);

/* ---- lower_magnitudes.c ---------------------------------------------------------------------- */

/* Lets the step find the magnitudes of results that later nodes quantize, if its kernel can. Its results have their
 * storages. */
dw_status dw__lower_find_magnitudes(dw__lowering *l, dw__step *step);
/* True if dw__lower_find_magnitudes may find some for the step. */
bool dw__lower_may_find_magnitudes(const dw__lowering *l, const dw__step *step);
/* Gives the step the magnitudes of its first operand, if it quantizes that and the step that made it has found them. */
dw_status dw__lower_use_magnitudes(dw__lowering *l, dw__step *step);

/* ---- lower_codes.c --------------------------------------------------------------------------- */

/* Lowers an elementwise program and the nodes that make codes of its results as one instruction, if a kernel computes
 * them together. `done`: none of these nodes needs an instruction of its own, now or when its turn comes. */
dw_status dw__lower_program_codes(dw__lowering *l, dw_node node, bool *done);

/* ---- lower_outputs.c ------------------------------------------------------------------------- */

/* Copies the node's results into the output buffers of its region that they were not computed in. A result that is not
 * lowered yet stays out: what lowers it delivers it. */
dw_status dw__lower_deliver_node(dw__lowering *l, dw_node node);
/* The same for outputs that no node of the region computes: leaves, and gradients known in forward. */
dw_status dw__lower_deliver_given(dw__lowering *l, bool backward);

#endif
