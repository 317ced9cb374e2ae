/* Tensor memory of a block: 128 lanes of 512 columns of 32 bits, allocated by columns, addressed by
 * lane << 16 | column. PTX ISA 9.7.16.1 and 9.7.16.7. Every cell knows whether it was written since its columns
 * were allocated.
 */
#ifndef DW_EMULATOR_TENSOR_MEMORY_H
#define DW_EMULATOR_TENSOR_MEMORY_H

#include "emulator/machine.h"
#include "emulator/written.h"

#define DW__TENSOR_LANES 128u
#define DW__TENSOR_COLUMNS 512u
#define DW__TENSOR_UNIT 32u /* columns are allocated by so many */
#define DW__TENSOR_UNITS (DW__TENSOR_COLUMNS / DW__TENSOR_UNIT)
/* What nobody wrote: a NaN as F32 and as pairs of F16 or BF16. */
#define DW__TENSOR_POISON 0x7FFF7FFFu

struct dw__emu_tensor {
    uint32_t cells[DW__TENSOR_LANES][DW__TENSOR_COLUMNS];
    uint8_t defined[DW__TENSOR_LANES][DW__TENSOR_COLUMNS / 8];
    uint32_t taken; /* a bit for each unit of columns */
    struct {
        uint32_t columns; /* 0: no allocation begins here */
        uint32_t warp, pc;
    } allocations[DW__TENSOR_UNITS]; /* by the unit that they begin at */
    bool relinquished;               /* no more may be allocated */
    int cta_group;                   /* of the first instruction that named one; 0: none has */
    /* Of each warp, loads and stores that are still to be done. */
    uint32_t loading[DW__LANES], storing[DW__LANES];
    /* Of each warp, a bit for each column that it stored to since its last tcgen05.wait::st, and where the last did. */
    struct {
        uint64_t columns[DW__TENSOR_COLUMNS / 64];
        uint32_t pc;
    } unsettled[DW__LANES];
};

/* Who works on tensor memory, for messages. */
typedef struct dw__tensor_user {
    dw__emu_cta *cta;
    uint32_t warp, pc;
    int lane;
} dw__tensor_user;

/* The block's tensor memory, made when it is first asked for; NULL after a finding: the host has no memory. */
struct dw__emu_tensor *dw__emu_tensor_of(dw__emu_cta *cta, const dw__tensor_user *user);
void dw__emu_free_tensor(dw__emu_cta *cta);
/* The block's threads have ended: what was not freed is a finding. */
void dw__emu_tensor_after_exit(dw__emu_cta *cta);

/* Columns in a row that nobody has, or DW__TENSOR_COLUMNS: there are none. */
uint32_t dw__emu_tensor_allocate(struct dw__emu_tensor *tensor, uint32_t columns, uint32_t warp,
                                 uint32_t pc);
/* NULL, or why these columns cannot be freed. */
const char *dw__emu_tensor_free(struct dw__emu_tensor *tensor, uint32_t first, uint32_t columns);

/* True where lanes first_lane .. + lanes and columns first .. + columns exist and are allocated in the block's
 * tensor memory; else a finding that says what `what` wanted. */
bool dw__emu_tensor_holds(dw__emu_cta *cta, const dw__tensor_user *user, const char *what,
                          uint32_t first_lane, uint32_t lanes, uint32_t first, uint32_t columns);
/* Notes a warp's store to columns first .. + count. */
void dw__emu_tensor_stores(struct dw__emu_tensor *tensor, uint32_t warp, uint32_t pc,
                           uint32_t first, uint32_t count);
/* A finding where a warp of the user's quarter stored to one of the columns and has not waited for that. */
void dw__emu_tensor_unsettled(const struct dw__emu_tensor *tensor, const dw__tensor_user *user,
                              uint32_t first, uint32_t count);
/* A finding: `what` read `undefined` cells that nobody wrote, of the matrix at this address. */
void dw__emu_tensor_undefined(const dw__tensor_user *user, const char *what, uint32_t address,
                              uint32_t undefined);

/* Of 32 lanes from `first` on all but the last take what the next one has, in these columns. */
void dw__emu_tensor_move_up(struct dw__emu_tensor *tensor, uint32_t first, uint32_t column,
                            uint32_t columns);

static inline bool dw__emu_tensor_defined(const struct dw__emu_tensor *tensor, uint32_t lane,
                                          uint32_t column) {
    return dw__count_unwritten(tensor->defined[lane], column, 1) == 0;
}
static inline void dw__emu_tensor_write(struct dw__emu_tensor *tensor, uint32_t lane,
                                        uint32_t column, uint32_t value) {
    tensor->cells[lane][column] = value;
    dw__set_written(tensor->defined[lane], column, 1, true);
}
#endif
