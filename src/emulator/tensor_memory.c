/* Allocation of tensor memory, and the checker's findings about it. */
#include "emulator/tensor_memory.h"
#include <string.h>

struct dw__emu_tensor *dw__emu_tensor_of(dw__emu_cta *cta, const dw__tensor_user *user) {
    if (!cta->tensor) {
        cta->tensor = dw__calloc(1, sizeof *cta->tensor);
        if (!cta->tensor)
            dw__emu_found_at(user->cta, user->warp, user->lane, user->pc, DW__FOUND_INVALID,
                             "the host is out of memory");
    }
    return cta->tensor;
}

void dw__emu_free_tensor(dw__emu_cta *cta) {
    dw__free(cta->tensor);
    cta->tensor = NULL;
}

static bool has_column(const uint64_t *columns, uint32_t column) {
    return columns[column / 64] >> column % 64 & 1;
}

void dw__emu_tensor_stores(struct dw__emu_tensor *tensor, uint32_t warp, uint32_t pc,
                           uint32_t first, uint32_t count) {
    for (uint32_t column = first; column < first + count && column < DW__TENSOR_COLUMNS; column++)
        tensor->unsettled[warp].columns[column / 64] |= (uint64_t)1 << column % 64;
    tensor->unsettled[warp].pc = pc;
}

void dw__emu_tensor_unsettled(const struct dw__emu_tensor *tensor, const dw__tensor_user *user,
                              uint32_t first, uint32_t count) {
    const dw__emu_kernel *kernel = user->cta->cluster->grid->kernel;
    for (uint32_t warp = user->warp % 4; warp < user->cta->warp_count; warp += 4) {
        const uint64_t *columns = tensor->unsettled[warp].columns;
        uint32_t column = first;
        while (column < first + count && column < DW__TENSOR_COLUMNS &&
               !has_column(columns, column))
            column++;
        if (column >= first + count || column >= DW__TENSOR_COLUMNS) continue;
        dw__emu_found_at(
            user->cta, user->warp, user->lane, user->pc, DW__FOUND_EARLY,
            "column %u of tensor memory: warp %u stored there at PTX line %d, and a "
            "tcgen05.wait::st is missing in between",
            column, warp,
            kernel->function->code.items[kernel->from[tensor->unsettled[warp].pc]].line);
        return;
    }
}

void dw__emu_tensor_after_exit(dw__emu_cta *cta) {
    if (!cta->tensor) return;
    for (uint32_t unit = 0; unit < DW__TENSOR_UNITS; unit++) {
        const uint32_t columns = cta->tensor->allocations[unit].columns;
        if (columns)
            dw__emu_found_at(cta, cta->tensor->allocations[unit].warp, -1,
                             cta->tensor->allocations[unit].pc, DW__FOUND_TENSOR_MEMORY,
                             "%u columns of tensor memory at column %u, allocated here, were "
                             "not freed when the block exited",
                             columns, unit * DW__TENSOR_UNIT);
    }
}

/* Returns the bits of `taken` for columns from a unit on. */
static uint32_t unit_bits(uint32_t unit, uint32_t columns) {
    return (((uint32_t)1 << columns / DW__TENSOR_UNIT) - 1) << unit;
}

uint32_t dw__emu_tensor_allocate(struct dw__emu_tensor *tensor, uint32_t columns, uint32_t warp,
                                 uint32_t pc) {
    const uint32_t units = columns / DW__TENSOR_UNIT;
    for (uint32_t unit = 0; unit + units <= DW__TENSOR_UNITS; unit += units) {
        if (tensor->taken & unit_bits(unit, columns)) continue;
        tensor->taken |= unit_bits(unit, columns);
        tensor->allocations[unit].columns = columns;
        tensor->allocations[unit].warp = warp;
        tensor->allocations[unit].pc = pc;
        const uint32_t first = unit * DW__TENSOR_UNIT;
        for (uint32_t lane = 0; lane < DW__TENSOR_LANES; lane++) {
            memset(&tensor->defined[lane][first / 8], 0, columns / 8);
            for (uint32_t i = first; i < first + columns; i++)
                tensor->cells[lane][i] = DW__TENSOR_POISON;
        }
        return first;
    }
    return DW__TENSOR_COLUMNS;
}

const char *dw__emu_tensor_free(struct dw__emu_tensor *tensor, uint32_t first, uint32_t columns) {
    if (first >= DW__TENSOR_COLUMNS || first % DW__TENSOR_UNIT) return "no allocation starts there";
    const uint32_t unit = first / DW__TENSOR_UNIT;
    if (tensor->allocations[unit].columns == 0)
        return tensor->taken >> unit & 1 ? "the allocation starts before it"
                                         : "they are not allocated, or were already freed";
    if (tensor->allocations[unit].columns != columns)
        return "a different number of columns was allocated there";
    tensor->allocations[unit].columns = 0;
    tensor->taken &= ~unit_bits(unit, columns);
    return NULL;
}

bool dw__emu_tensor_holds(dw__emu_cta *cta, const dw__tensor_user *user, const char *what,
                          uint32_t first_lane, uint32_t lanes, uint32_t first, uint32_t columns) {
    bool exists = first_lane < DW__TENSOR_LANES && first_lane + lanes <= DW__TENSOR_LANES &&
                  first < DW__TENSOR_COLUMNS && first + columns <= DW__TENSOR_COLUMNS;
    bool allocated = exists;
    for (uint32_t column = first; allocated && column < first + columns; column++)
        allocated = cta->tensor && cta->tensor->taken >> column / DW__TENSOR_UNIT & 1;
    if (allocated) return true;
    dw__emu_found_at(user->cta, user->warp, user->lane, user->pc, DW__FOUND_TENSOR_MEMORY,
                     "%s in tensor memory of block %u: lanes %u to %u of columns %u to %u, which "
                     "%s",
                     what, cta->rank, first_lane, first_lane + lanes - 1, first,
                     first + columns - 1, exists ? "are not allocated" : "do not exist");
    return false;
}

void dw__emu_tensor_undefined(const dw__tensor_user *user, const char *what, uint32_t address,
                              uint32_t undefined) {
    if (undefined == 0 || !user->cta->cluster->grid->check) return;
    dw__emu_found_at(user->cta, user->warp, user->lane, user->pc, DW__FOUND_UNDEFINED,
                     "%s tensor memory at 0x%08x, of which %u cells were never written", what,
                     address, undefined);
}

void dw__emu_tensor_move_up(struct dw__emu_tensor *tensor, uint32_t first, uint32_t column,
                            uint32_t columns) {
    for (uint32_t lane = first; lane < first + DW__LANES - 1; lane++) {
        for (uint32_t i = column; i < column + columns; i++) {
            tensor->cells[lane][i] = tensor->cells[lane + 1][i];
            dw__set_written(tensor->defined[lane], i, 1,
                            dw__emu_tensor_defined(tensor, lane + 1, i));
        }
    }
}
