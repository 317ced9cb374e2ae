/* Tensor memory of a block: 128 lanes of 512 columns of 32 bits, allocated by columns, addressed by lane << 16 |
 * column (PTX ISA, "Tensor Memory" and "Tensor Memory Allocation and Management Instructions"). Each cell records
 * whether it was written since its columns were allocated.
 */
#ifndef DW_EMULATOR_TENSOR_MEMORY_H
#define DW_EMULATOR_TENSOR_MEMORY_H

#include "emulator/running_grid.h"
#include "emulator/written.h"

#define DW__TENSOR_LANES 128u
#define DW__TENSOR_COLUMNS 512u
#define DW__TENSOR_UNIT 32u /* columns are allocated in multiples of this */
#define DW__TENSOR_UNITS (DW__TENSOR_COLUMNS / DW__TENSOR_UNIT)
/* Value of a cell that was never written: a NaN as F32 and as a pair of F16 or BF16. */
#define DW__TENSOR_POISON 0x7FFF7FFFu

struct dw__emu_tensor {
    uint32_t cells[DW__TENSOR_LANES][DW__TENSOR_COLUMNS];
    uint8_t defined[DW__TENSOR_LANES][DW__TENSOR_COLUMNS / 8];
    uint32_t taken; /* one bit for each unit of columns */
    struct {
        uint32_t columns; /* 0: no allocation begins here */
        uint32_t warp, pc;
    } allocations[DW__TENSOR_UNITS]; /* indexed by the first unit of the allocation */
    bool relinquished;               /* the block has given up its right to allocate */
    int cta_group;                   /* set by the first instruction that names one; 0 before */
    /* Pending loads and stores of each warp. */
    uint32_t loading[DW__LANES], storing[DW__LANES];
    /* For each warp: the columns that it stored to since its last tcgen05.wait::st (one bit each), and the pc of the
     * last store. */
    struct {
        uint64_t columns[DW__TENSOR_COLUMNS / 64];
        uint32_t pc;
    } unsettled[DW__LANES];
};

/* The agent that accesses tensor memory, for messages. */
typedef struct dw__tensor_user {
    dw__emu_cta *cta;
    uint32_t warp, pc;
    int lane;
} dw__tensor_user;

/* Returns the block's tensor memory, created on first use. Returns NULL after reporting a finding if memory is out. */
struct dw__emu_tensor *dw__emu_tensor_of(dw__emu_cta *cta, const dw__tensor_user *user);
void dw__emu_free_tensor(dw__emu_cta *cta);
/* Reports columns that are still allocated when the block's threads have ended. */
void dw__emu_tensor_after_exit(dw__emu_cta *cta);

/* Returns the first of `columns` contiguous free columns, or DW__TENSOR_COLUMNS if there are none. */
uint32_t dw__emu_tensor_allocate(struct dw__emu_tensor *tensor, uint32_t columns, uint32_t warp,
                                 uint32_t pc);
/* Returns NULL, or the reason why these columns cannot be freed. */
const char *dw__emu_tensor_free(struct dw__emu_tensor *tensor, uint32_t first, uint32_t columns);

/* Returns true if lanes first_lane .. + lanes and columns first .. + columns exist and are allocated in the block's
 * tensor memory. Otherwise reports a finding that names `what` as the operation. */
bool dw__emu_tensor_holds(dw__emu_cta *cta, const dw__tensor_user *user, const char *what,
                          uint32_t first_lane, uint32_t lanes, uint32_t first, uint32_t columns);
/* Records a warp's store to columns first .. + count. */
void dw__emu_tensor_stores(struct dw__emu_tensor *tensor, uint32_t warp, uint32_t pc,
                           uint32_t first, uint32_t count);
/* Reports a finding if a warp of the user's quarter stored to one of the columns and has not waited for that store. */
void dw__emu_tensor_unsettled(const struct dw__emu_tensor *tensor, const dw__tensor_user *user,
                              uint32_t first, uint32_t count);
/* Reports that `what` read `undefined` cells, never written, of the matrix at this address. */
void dw__emu_tensor_undefined(const dw__tensor_user *user, const char *what, uint32_t address,
                              uint32_t undefined);

/* In these columns, copies each of the 32 lanes from `first` on from its successor; the last lane keeps its value. */
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
