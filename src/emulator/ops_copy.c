/* Asynchronous copies: cp.async, cp.async.bulk, cp.async.bulk.tensor and their reductions (PTX ISA, "Data Movement
 * and Conversion Instructions: Asynchronous copy"). The source is read and the destination written some turns after
 * the issue, so that a kernel that does not wait sees stale data, as it may on a GPU.
 */
#include "emulator/barrier.h"
#include "emulator/lanes.h"
#include "emulator/race.h"
#include "emulator/reduction.h"
#include "emulator/tensor_map.h"
#include "emulator/written.h"
#include <string.h>

/* ---- groups -------------------------------------------------------------------------------- */

/* The groups of copies of each lane, in the order of their commits. A group is complete when none of its copies is
 * pending. `reading` counts the copies that have not read their source yet. */
#define GROUPS 64
typedef struct lane_groups {
    uint32_t open; /* number of the group to which new copies belong */
    uint16_t reading[GROUPS], writing[GROUPS];
    uint32_t time[GROUPS]; /* time of the group's youngest copy, for the checker */
} lane_groups;
struct dw__emu_bulk {
    lane_groups bulk[DW__LANES], small[DW__LANES]; /* cp.async.bulk, cp.async */
};

static lane_groups *groups_of(dw__emu_warp *w, uint32_t lane, bool small) {
    if (!w->bulk) w->bulk = dw__calloc(1, sizeof *w->bulk);
    if (!w->bulk) return NULL;
    return small ? &w->bulk->small[lane] : &w->bulk->bulk[lane];
}

/* ---- one copy ------------------------------------------------------------------------------ */

enum { TO_SHARED, FROM_SHARED, SHARED_TO_SHARED };

typedef struct copy {
    dw__emu_async work;
    int direction;
    uint32_t shared;       /* shared::cluster address */
    uint32_t other_shared; /* destination of SHARED_TO_SHARED */
    uint64_t global;
    uint32_t bytes, zero_bytes; /* of cp.async: `bytes` are copied, the rest is zero-filled */
    /* Blocks that a multicast writes to; 0: the block of the address. */
    uint32_t targets;
    bool has_barrier;
    uint32_t barrier;
    bool pair; /* .cta_group::2 */
    dw__emu_reduction reduce;
    dw__emu_type type;
    lane_groups *groups;
    uint32_t group;
    dw__emu_side side; /* of the issuer, for copies without a barrier */
    uint32_t phase;    /* phase of the barrier at the issue; 0 if there are several barriers */
    bool tensor;
    dw__tensor_shape map;
    int64_t at[DW__TENSOR_AXES];
    bool gathers;        /* four independent rows, at[1] to at[4] */
    unsigned char *data; /* the bytes between reading and writing */
} copy;

static void release_copy(dw__emu_async *work) {
    copy *c = (copy *)(void *)work;
    dw__free(c->data);
    dw__free(c);
}

static bool blame(const copy *c, dw__emu_finding kind, const char *what, uint64_t where) {
    dw__emu_found_at(c->work.cta, c->work.warp, (int)c->work.lane, c->work.pc, kind, "%s 0x%llx",
                     what, (unsigned long long)where);
    return false;
}

/* Returns the block's shared memory that a copy accesses. A swizzle exchanges pieces within a span, so whole spans
 * must lie within the block. */
static unsigned char *shared_bytes(dw__emu_cluster *cluster, const copy *c, uint32_t address,
                                   uint64_t bytes, dw__emu_cta **owner) {
    const uint32_t span = c->tensor ? dw__swizzle_span(c->map.swizzle) : 1;
    uint32_t offset;
    *owner = dw__emu_block_at(cluster, address, (bytes + span - 1) / span * span, &offset);
    if (!*owner) {
        blame(c, DW__FOUND_BOUNDS, "a copy's shared memory extends beyond the block's, at",
              address);
        return NULL;
    }
    return (*owner)->shared + offset;
}

/* ---- tensors ------------------------------------------------------------------------------- */

static uint32_t box_count(const dw__tensor_shape *m, int axis) {
    return (m->box[axis] + m->step[axis] - 1u) / m->step[axis];
}

/* Bytes of a box's row in shared memory (stored_row) and in global memory (memory_row). */
static uint32_t stored_row(const dw__tensor_shape *m) {
    return m->element >= DW__TENSOR_U4_ALIGN16
               ? box_count(m, 0)
               : box_count(m, 0) * (uint32_t)dw__tensor_element_bits(m->element) / 8;
}
static uint64_t box_rows(const dw__tensor_shape *m) {
    uint64_t rows = 1;
    for (int axis = 1; axis < m->rank; axis++) rows *= box_count(m, axis);
    return rows;
}
static uint32_t memory_row(const dw__tensor_shape *m) {
    return box_count(m, 0) * (uint32_t)dw__tensor_element_bits(m->element) / 8;
}

/* Sets *address to the address of row `row` of the box; returns false if the row lies outside of the tensor. */
static bool row_address(const copy *c, uint32_t row, uint64_t *address) {
    const dw__tensor_shape *m = &c->map;
    *address = m->address;
    if (c->gathers) {
        const int64_t at = c->at[1 + row];
        *address += (uint64_t)at * m->stride[0];
        return at >= 0 && at <= m->last[1];
    }
    for (int axis = 1; axis < m->rank; axis++) {
        int64_t at = c->at[axis] + (int64_t)(row % box_count(m, axis)) * m->step[axis];
        row /= box_count(m, axis);
        if (at < 0 || at > m->last[axis]) return false;
        *address += (uint64_t)at * m->stride[axis - 1];
    }
    return true;
}

/* Sets the range of a row's elements that lie within the tensor: `count` elements from `first` on (step 1). */
static void row_extent(const copy *c, int64_t *first, int64_t *count) {
    int64_t begin = c->at[0] < 0 ? 0 : c->at[0], end = c->at[0] + c->map.box[0],
            size = (int64_t)c->map.last[0] + 1;
    if (end > size) end = size;
    *first = begin - c->at[0];
    *count = end > begin ? end - begin : 0;
}

static uint32_t fill_of(const dw__tensor_shape *m) { return m->fill_nan ? 0xFF : 0; }

static bool touch(const copy *c, uint64_t address, uint32_t bytes, bool write) {
    uint32_t undefined;
    dw__emu_grid *grid = c->work.cta->cluster->grid;
    if (!dw__emu_memory_touch(grid->memory, address, bytes, write, &undefined)) {
        char where[160];
        dw__emu_memory_describe(grid->memory, address, where, sizeof where);
        dw__emu_found_at(c->work.cta, c->work.warp, (int)c->work.lane, c->work.pc, DW__FOUND_BOUNDS,
                         "a copy %s %u bytes of global memory at 0x%llx: %s",
                         write ? "writes" : "reads", bytes, (unsigned long long)address, where);
        return false;
    }
    if (undefined && grid->check)
        dw__emu_found_at(
            c->work.cta, c->work.warp, (int)c->work.lane, c->work.pc, DW__FOUND_UNDEFINED,
            "a copy reads %u bytes of global memory at 0x%llx, of which %u were never written",
            bytes, (unsigned long long)address, undefined);
    return true;
}

/* Reads a box from global memory into `data`: rows one after another, in their shared-memory format. */
static bool read_box(copy *c) {
    const dw__tensor_shape *m = &c->map;
    const uint32_t rows = (uint32_t)box_rows(m), row_bytes = stored_row(m),
                   bits = (uint32_t)dw__tensor_element_bits(m->element);
    int64_t first, count;
    row_extent(c, &first, &count);
    const uint32_t bytes = (uint32_t)((uint64_t)count * bits + 7) / 8;
    for (uint32_t row = 0; row < rows; row++) {
        uint64_t address;
        unsigned char *to = c->data + (size_t)row * row_bytes;
        const bool inside = count > 0 && row_address(c, row, &address);
        if (!inside || bytes < row_bytes || m->step[0] != 1) memset(to, (int)fill_of(m), row_bytes);
        if (!inside) continue;
        address += (uint64_t)(c->at[0] + first) * bits / 8;
        if (!touch(c, address, bytes, false)) return false;
        const unsigned char *from = (const unsigned char *)(uintptr_t)address;
        if (m->element < DW__TENSOR_U4_ALIGN16) {
            if (m->step[0] == 1) {
                memcpy(to + (uint64_t)first * bits / 8, from, bytes);
            } else {
                for (int64_t i = 0; i < count; i++)
                    if ((first + i) % m->step[0] == 0)
                        memcpy(to + (uint64_t)((first + i) / m->step[0]) * bits / 8,
                               from + (uint64_t)i * bits / 8, bits / 8);
            }
        } else { /* sixteen elements to each sixteen bytes */
            const uint32_t packed = 16 * bits / 8;
            for (uint32_t at = 0; at < bytes; at += packed)
                memcpy(to + (uint64_t)first + (uint64_t)at / packed * 16, from + at,
                       bytes - at < packed ? bytes - at : packed);
        }
    }
    return true;
}

static void reduce_into(const copy *c, unsigned char *to, const unsigned char *from,
                        uint32_t bytes);

static bool write_box(copy *c) {
    const dw__tensor_shape *m = &c->map;
    const uint32_t rows = (uint32_t)box_rows(m), row_bytes = stored_row(m),
                   bits = (uint32_t)dw__tensor_element_bits(m->element);
    int64_t first, count;
    row_extent(c, &first, &count);
    if (m->element >= DW__TENSOR_U4_ALIGN16 || m->step[0] != 1)
        return blame(
            c, DW__FOUND_INVALID,
            "a store through a tensor map of this element type or step is not supported: map at",
            m->address);
    for (uint32_t row = 0; row < rows; row++) {
        uint64_t address;
        if (count == 0 || !row_address(c, row, &address)) continue;
        address += (uint64_t)(c->at[0] + first) * bits / 8;
        const uint32_t bytes = (uint32_t)((uint64_t)count * bits / 8);
        if (!touch(c, address, bytes, true)) return false;
        reduce_into(c, (unsigned char *)(uintptr_t)address,
                    c->data + (size_t)row * row_bytes + (uint64_t)first * bits / 8, bytes);
    }
    return true;
}

/* ---- reading and writing ------------------------------------------------------------------- */

static void reduce_into(const copy *c, unsigned char *to, const unsigned char *from,
                        uint32_t bytes) {
    if (c->reduce == DW__REDUCE_NONE) {
        memcpy(to, from, bytes);
        return;
    }
    const uint32_t size = (uint32_t)dw__emu_type_bytes(c->type);
    for (uint32_t i = 0; i + size <= bytes; i += size) {
        uint64_t y = 0;
        memcpy(&y, from + i, size);
        dw__emu_reduce(c->reduce, c->type, c->direction == FROM_SHARED, to + i, y, 0);
    }
}

static uint64_t copy_bytes(const copy *c) {
    return c->tensor ? box_rows(&c->map) * stored_row(&c->map) : c->bytes;
}

static void note_access(copy *c, dw__emu_cta *owner, uint32_t offset, uint32_t bytes, bool write,
                        uint32_t barrier) {
    if (c->has_barrier)
        dw__emu_race_copied(&c->work, barrier, owner, offset, bytes, write);
    else
        dw__emu_race_work(&c->work, c->work.warp, c->side, owner, offset, bytes, write);
}

static bool read_source(dw__emu_cluster *cluster, copy *c) {
    dw__emu_cta *owner;
    /* Checks the block's shared memory before allocating as many bytes. */
    const unsigned char *from = shared_bytes(cluster, c, c->shared, copy_bytes(c), &owner);
    if (!from) return false;
    const uint32_t bytes = (uint32_t)copy_bytes(c);
    c->data = dw__malloc(bytes ? bytes : 1);
    if (!c->data)
        return blame(c, DW__FOUND_INVALID, "the host is out of memory for a copy at", c->global);
    if (c->direction == TO_SHARED) {
        if (c->tensor) return read_box(c);
        const uint32_t given = bytes - c->zero_bytes;
        if (given && !touch(c, c->global, given, false)) return false;
        if (given) memcpy(c->data, (const void *)(uintptr_t)c->global, given);
        memset(c->data + given, 0, c->zero_bytes);
        return true;
    }
    note_access(c, owner, (uint32_t)(from - owner->shared), bytes, false, c->barrier);
    const int swizzle = c->tensor ? c->map.swizzle : 0;
    const uint32_t offset = (uint32_t)(from - owner->shared);
    uint32_t undefined = 0;
    for (uint32_t i = 0; i < bytes; i += 16) {
        const uint32_t at = dw__swizzled(offset + i, swizzle),
                       here = bytes - i < 16 ? bytes - i : 16;
        memcpy(c->data + i, owner->shared + at, here);
        undefined += dw__count_unwritten(owner->defined, at, here);
    }
    if (undefined && cluster->grid->check)
        dw__emu_found_at(
            c->work.cta, c->work.warp, (int)c->work.lane, c->work.pc, DW__FOUND_UNDEFINED,
            "a copy reads %u bytes of shared memory at 0x%x, of which %u were never written", bytes,
            c->shared, undefined);
    return true;
}

/* Writes into a block's shared memory, then completes the bytes on its barrier. */
static bool deliver(dw__emu_cluster *cluster, copy *c, uint32_t address, uint32_t barrier) {
    dw__emu_cta *owner;
    unsigned char *to = shared_bytes(cluster, c, address, copy_bytes(c), &owner);
    if (!to) return false;
    const uint32_t bytes = (uint32_t)copy_bytes(c);
    const int swizzle = c->tensor ? c->map.swizzle : 0;
    const uint32_t offset = (uint32_t)(to - owner->shared);
    note_access(c, owner, offset, bytes, true, barrier);
    if (c->reduce != DW__REDUCE_NONE) reduce_into(c, to, c->data, bytes);
    /* Swizzles stay within 128 bytes. */
    const bool lines = (offset | bytes) % 128 == 0;
    if (lines) dw__set_written(owner->defined, offset, bytes, true);
    for (uint32_t i = 0; i < bytes; i += 16) {
        const uint32_t at = dw__swizzled(offset + i, swizzle),
                       here = bytes - i < 16 ? bytes - i : 16;
        if (c->reduce == DW__REDUCE_NONE) memcpy(owner->shared + at, c->data + i, here);
        if (!lines) dw__set_written(owner->defined, at, here, true);
    }
    if (!c->has_barrier) return true;
    dw__emu_race_mbarrier_bytes(&c->work, barrier, c->phase);
    /* Unpacked elements count with their size in global memory. */
    const uint32_t counted = c->tensor ? (uint32_t)box_rows(&c->map) * memory_row(&c->map) : bytes;
    return dw__emu_mbarrier_complete(c->work.cta, c->work.warp, (int)c->work.lane, c->work.pc,
                                     barrier, counted);
}

static bool write_target(dw__emu_cluster *cluster, copy *c) {
    if (c->direction == FROM_SHARED) {
        if (c->tensor) return write_box(c);
        if (!touch(c, c->global, c->bytes, true)) return false;
        reduce_into(c, (unsigned char *)(uintptr_t)c->global, c->data, c->bytes);
        return true;
    }
    if (c->direction == SHARED_TO_SHARED) return deliver(cluster, c, c->other_shared, c->barrier);
    if (!c->targets) return deliver(cluster, c, c->shared, c->barrier);
    const uint32_t parity = c->barrier >> DW__RANK_SHIFT & 1;
    for (uint32_t rank = 0; rank < 16; rank++) {
        if (!(c->targets >> rank & 1)) continue;
        /* In a pair, the barrier of the block with the parity of the barrier's address is signalled. */
        const uint32_t signalled = c->pair ? (rank & ~1u) | parity : rank;
        if (!deliver(cluster, c, (c->shared & DW__OFFSET_MASK) | rank << DW__RANK_SHIFT,
                     (c->barrier & DW__OFFSET_MASK) | signalled << DW__RANK_SHIFT))
            return false;
    }
    return true;
}

static bool copy_done(dw__emu_cluster *cluster, dw__emu_async *work) {
    copy *c = (copy *)(void *)work;
    if (!read_source(cluster, c)) return false;
    if (c->groups) c->groups->reading[c->group % GROUPS]--;
    if (!write_target(cluster, c)) return false;
    if (c->groups) c->groups->writing[c->group % GROUPS]--;
    return true;
}

/* ---- issuing ------------------------------------------------------------------------------- */

typedef struct copy_op {
    int direction;
    bool tensor, gathers, small, barrier, multicast, pair;
    int rank;
    dw__emu_reduction reduce;
    dw__emu_type type;
    dw__emu_address to, from, mbarrier, map;
    uint32_t at[DW__TENSOR_AXES], size, mask, ignore_size;
    bool has_size, has_ignore;
    uint32_t bytes;
} copy_op;

static uint64_t without_window(uint64_t address) { return address & ~DW__WINDOW_MASK; }

static int coordinates_of(const copy_op *k) { return k->gathers ? 5 : k->rank; }

static bool fill_tensor(dw__emu_warp *w, const copy_op *k, uint32_t lane, copy *c) {
    uint64_t address = dw__emu_lane_address(w, &k->map, (int)lane);
    const void *bytes =
        dw__emu_reach(w, DW__PTX_REG, (int)lane, address, DW__TENSOR_MAP_BYTES, 64, DW__READ);
    if (!bytes) return false;
    if (!dw__tensor_map_decode(bytes, &c->map) || c->map.rank != k->rank) {
        dw__emu_found(
            w, (int)lane, DW__FOUND_INVALID,
            "a copy of %d axes by the tensor map at 0x%llx, which has %d (or is no tensor map)",
            k->rank, (unsigned long long)address, c->map.rank);
        return false;
    }
    c->gathers = k->gathers;
    for (int axis = 0; axis < coordinates_of(k); axis++)
        c->at[axis] = (int32_t)DW__REGISTER(w, uint32_t, k->at[axis])[lane];
    if (k->gathers) {
        if (c->map.box[1] != 1) {
            dw__emu_found(w, (int)lane, DW__FOUND_INVALID,
                          "a copy of four rows by a tensor map whose box has %d rows: must be 1",
                          c->map.box[1]);
            return false;
        }
        c->map.box[1] = 4, c->map.step[1] = 1;
    }
    static const dw__emu_type types[DW__TENSOR_ELEMENTS] = {
        [DW__TENSOR_U32] = DW__T_U32,     [DW__TENSOR_S32] = DW__T_S32,
        [DW__TENSOR_U64] = DW__T_U64,     [DW__TENSOR_S64] = DW__T_S64,
        [DW__TENSOR_F16] = DW__T_F16,     [DW__TENSOR_F32] = DW__T_F32,
        [DW__TENSOR_F64] = DW__T_F64,     [DW__TENSOR_BF16] = DW__T_BF16,
        [DW__TENSOR_F32_FTZ] = DW__T_F32,
    };
    c->tensor = true;
    c->type = types[c->map.element];
    if (c->reduce != DW__REDUCE_NONE && !dw__emu_reduces(c->reduce, c->type)) {
        dw__emu_found(w, (int)lane, DW__FOUND_INVALID,
                      "a reduction through a tensor map of element type %d", c->map.element);
        return false;
    }
    const uint32_t shared_align = c->map.swizzle == DW__SWIZZLE_NONE ? 16 : 128;
    if ((c->shared & (shared_align - 1)) != 0) {
        dw__emu_found(w, (int)lane, DW__FOUND_ALIGNMENT,
                      "a copy's shared memory at 0x%x: must be a multiple of %u", c->shared,
                      shared_align);
        return false;
    }
    return true;
}

static bool fill_copy(dw__emu_warp *w, const copy_op *k, uint32_t lane, copy *c) {
    const uint64_t to = dw__emu_lane_address(w, &k->to, (int)lane),
                   from = dw__emu_lane_address(w, &k->from, (int)lane);
    c->work = (dw__emu_async){.done = copy_done,
                              .release = release_copy,
                              .cta = w->cta,
                              .warp = w->index,
                              .lane = lane,
                              .pc = w->now.pc};
    c->direction = k->direction;
    c->reduce = k->reduce, c->type = k->type, c->pair = k->pair;
    c->shared = (uint32_t)without_window(k->direction == TO_SHARED ? to : from);
    c->other_shared = (uint32_t)without_window(to);
    c->global = k->direction == TO_SHARED ? from : to;
    c->bytes = k->has_size ? DW__REGISTER(w, uint32_t, k->size)[lane] : k->bytes;
    c->has_barrier = k->barrier;
    if (k->barrier)
        c->barrier = (uint32_t)without_window(dw__emu_lane_address(w, &k->mbarrier, (int)lane));
    if (k->multicast) c->targets = DW__REGISTER(w, uint32_t, k->mask)[lane] & 0xFFFF;
    if (k->small) {
        uint32_t given = k->has_ignore ? DW__REGISTER(w, uint32_t, k->ignore_size)[lane] : k->bytes;
        c->bytes = k->bytes;
        c->zero_bytes = given < k->bytes ? k->bytes - given : 0;
    } else if (!k->tensor && (c->bytes % 16 || c->shared % 16 ||
                              (k->direction != SHARED_TO_SHARED && c->global % 16))) {
        dw__emu_found(w, (int)lane, DW__FOUND_ALIGNMENT,
                      "a copy of %u bytes between 0x%x and 0x%llx: all must be multiples of 16",
                      c->bytes, c->shared, (unsigned long long)c->global);
        return false;
    }
    return !k->tensor || fill_tensor(w, k, lane, c);
}

static dw__emu_next copy_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const copy_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        copy *c = dw__calloc(1, sizeof *c);
        if (!c) return dw__emu_no_memory(w, (int)lane);
        if (!fill_copy(w, k, lane, c)) {
            dw__free(c);
            return DW__FAULT;
        }
        if (!dw__emu_race_issue(w, &c->work)) {
            dw__free(c);
            return dw__emu_no_memory(w, (int)lane);
        }
        if (k->barrier && !c->targets)
            c->phase = dw__emu_race_mbarrier_phase(w->cta->cluster, c->barrier);
        if (!k->barrier) {
            c->groups = groups_of(w, lane, k->small);
            if (!c->groups) {
                dw__free(c->work.clock);
                dw__free(c);
                return dw__emu_no_memory(w, (int)lane);
            }
            c->group = c->groups->open;
            c->groups->reading[c->group % GROUPS]++, c->groups->writing[c->group % GROUPS]++;
            c->side = k->small ? DW__SIDE_COPY : DW__SIDE_BULK;
            dw__emu_race_next_time(&c->work, w->index, c->side);
            c->groups->time[c->group % GROUPS] = c->work.time;
        }
        dw__emu_later(w->cta->cluster, &c->work);
    }
    return DW__NEXT;
}

static dw__emu_next commit_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    DW__EACH_LANE(lane, mask) {
        lane_groups *g = groups_of(w, lane, op->immediate);
        if (!g) return dw__emu_no_memory(w, (int)lane);
        if (g->writing[(g->open + 1) % GROUPS]) { /* as many groups in flight as are counted */
            w->now.wait = DW__WAIT_ASYNC;
            return DW__AGAIN;
        }
    }
    DW__EACH_LANE(lane, mask) {
        lane_groups *g = groups_of(w, lane, op->immediate);
        g->time[(g->open + 1) % GROUPS] = g->time[g->open % GROUPS];
        g->open++;
    }
    return DW__NEXT;
}

/* Waits until at most the `a` youngest groups are pending. */
static dw__emu_next wait_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const bool small = op->immediate & 1, reads = op->immediate & 2, with_open = op->immediate & 4;
    if (!w->bulk) return DW__NEXT;
    DW__EACH_LANE(lane, mask) {
        const lane_groups *g = groups_of(w, lane, small);
        const uint32_t keep = with_open ? 0 : DW__REGISTER(w, uint32_t, op->a)[lane],
                       open = g->open;
        const uint32_t last = with_open ? open + 1 : open - (keep < open ? keep : open);
        for (uint32_t group = open > GROUPS - 1 ? open - (GROUPS - 1) : 0; group < last; group++) {
            if ((reads ? g->reading : g->writing)[group % GROUPS] == 0) continue;
            w->now.wait = DW__WAIT_ASYNC;
            return DW__AGAIN;
        }
        if (last > 0)
            dw__emu_race_waited(w, w->index, small ? DW__SIDE_COPY : DW__SIDE_BULK,
                                g->time[(last - 1) % GROUPS]);
    }
    return DW__NEXT;
}

/* ---- translators --------------------------------------------------------------------------- */

static dw_status emit_wait(dw__emu_translator *t, bool small, bool all) {
    uint32_t a = 0;
    bool reads = dw__emu_take(t, "read");
    if (!all) {
        const dw__ptx_operand *count;
        DW_RETURN_IF_FAILED(dw__emu_take_operand(t, 0, &count));
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, count, DW__T_B32, &a));
    }
    DW_RETURN_IF_FAILED(dw__emu_emit(t, wait_run));
    t->op->a = a;
    t->op->immediate = small + 2 * reads + 4 * all;
    return DW_OK;
}
static dw_status emit_commit(dw__emu_translator *t, bool small) {
    DW_RETURN_IF_FAILED(dw__emu_emit(t, commit_run));
    t->op->immediate = small;
    return DW_OK;
}

static dw_status take_coordinates(dw__emu_translator *t, const dw__ptx_operand *o, copy_op *k) {
    if (o->kind != DW__PTX_ADDRESS || o->count != 2 || o->items[1].kind != DW__PTX_VECTOR ||
        o->items[1].count != coordinates_of(k))
        return dw__emu_malformed(
            t, "an operand must be a tensor map with coordinates, such as [%rd1, {%r1, %r2}]");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, o, &k->map));
    for (int axis = 0; axis < coordinates_of(k); axis++)
        DW_RETURN_IF_FAILED(
            dw__emu_take_source(t, &o->items[1].items[axis], DW__T_B32, &k->at[axis]));
    return DW_OK;
}

static bool take_pair(dw__emu_translator *t, copy_op *k) {
    if (dw__emu_take(t, "cta_group::1")) return true;
    return k->pair = dw__emu_take(t, "cta_group::2");
}

/* Translates the instruction after "cp.async.bulk" or "cp.reduce.async.bulk". */
static dw_status translate_bulk(dw__emu_translator *t, copy_op *k, bool reduces) {
    static const char *const ranks[] = {"1d", "2d", "3d", "4d", "5d", NULL};
    if (dw__emu_take(t, "commit_group")) return emit_commit(t, false);
    if (dw__emu_take(t, "wait_group")) return emit_wait(t, false, false);
    if (dw__emu_take(t, "prefetch")) {
        t->cursor = t->in->modifier_count;
        return dw__emu_emit(t, dw__emu_nothing);
    }
    if (dw__emu_take(t, "tensor")) {
        k->tensor = true;
        k->rank = dw__emu_take_one_of(t, ranks) + 1;
        if (k->rank == 0) return dw__emu_unsupported(t);
    }
    bool pair_given = k->tensor && take_pair(t, k);
    bool to_cluster = dw__emu_take(t, "shared::cluster") || dw__emu_take(t, "shared::cta");
    if (!to_cluster && !dw__emu_take(t, "global")) return dw__emu_unsupported(t);
    bool from_global = to_cluster && dw__emu_take(t, "global");
    if (!from_global && !dw__emu_take(t, "shared::cta")) return dw__emu_unsupported(t);
    k->direction = !to_cluster ? FROM_SHARED : from_global ? TO_SHARED : SHARED_TO_SHARED;
    if (reduces && k->tensor && !dw__emu_take_reduction(t, false, &k->reduce))
        return dw__emu_unsupported(t);
    if (!dw__emu_take(t, "tile") && k->tensor && !reduces)
        k->gathers =
            dw__emu_take(t, k->direction == TO_SHARED ? "tile::gather4" : "tile::scatter4");
    if (k->gathers && k->rank != 2) return dw__emu_unsupported(t);
    k->barrier = dw__emu_take(t, "mbarrier::complete_tx::bytes");
    if (!k->barrier && !dw__emu_take(t, "bulk_group")) return dw__emu_unsupported(t);
    if (k->barrier != (k->direction != FROM_SHARED)) return dw__emu_unsupported(t);
    k->multicast = dw__emu_take(t, "multicast::cluster");
    if (!pair_given) (void)take_pair(t, k);
    bool hint = dw__emu_take(t, "L2::cache_hint");
    if (reduces && !k->tensor) {
        if (!dw__emu_take_reduction(t, false, &k->reduce)) return dw__emu_unsupported(t);
        (void)dw__emu_take(t, "noftz");
        if (!dw__emu_take_type(t, &k->type) || !dw__emu_reduces(k->reduce, k->type))
            return dw__emu_unsupported(t);
    }
    const dw__ptx_operand *o = t->in->operands;
    const int wanted = 2 + !k->tensor + k->barrier + k->multicast + hint;
    if (t->in->operand_count != wanted) return dw__emu_malformed(t, "wrong number of operands");
    int at = 2;
    if (k->tensor && k->direction == FROM_SHARED) {
        DW_RETURN_IF_FAILED(take_coordinates(t, &o[0], k));
        DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[1], &k->from));
        k->to = k->from;
    } else {
        DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[0], &k->to));
        if (k->tensor) {
            DW_RETURN_IF_FAILED(take_coordinates(t, &o[1], k));
            k->from = k->to;
        } else {
            DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[1], &k->from));
        }
    }
    k->has_size = !k->tensor;
    if (k->has_size) DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_B32, &k->size));
    if (k->barrier) DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[at++], &k->mbarrier));
    if (k->multicast) DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_B16, &k->mask));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, copy_run));
    t->op->detail = k;
    return DW_OK;
}

/* cp.async.mbarrier.arrive: arrives on the barrier when the lane's copies so far are complete. Later copies of the
 * lane may delay the arrival; hardware promises no time either. */
typedef struct copies_arrival {
    dw__emu_async work;
    dw__emu_warp *warp;
    uint32_t barrier;
} copies_arrival;

static bool copies_arrival_done(dw__emu_cluster *cluster, dw__emu_async *work) {
    copies_arrival *n = (copies_arrival *)(void *)work;
    const lane_groups *g = n->warp->bulk ? &n->warp->bulk->small[work->lane] : NULL;
    uint32_t outstanding = 0;
    for (int i = 0; g && i < GROUPS; i++) outstanding += g->writing[i];
    if (outstanding == 0) return dw__emu_mbarrier_arrive(work, DW__SIDE_COPY, n->barrier, 1);
    copies_arrival *again = dw__malloc(sizeof *again);
    if (!again) {
        dw__emu_found_at(work->cta, work->warp, (int)work->lane, work->pc, DW__FOUND_INVALID,
                         "the host is out of memory");
        return false;
    }
    *again = *n;
    work->clock = NULL; /* the clock belongs to the new work */
    return dw__emu_later(cluster, &again->work);
}

static dw__emu_next copies_arrival_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const copy_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        const uint32_t address =
            (uint32_t)without_window(dw__emu_lane_address(w, &k->mbarrier, (int)lane));
        if (op->immediate &&
            !dw__emu_mbarrier_expect_arrival(w->cta, w->index, (int)lane, w->now.pc, address))
            return DW__FAULT;
        copies_arrival *n = dw__malloc(sizeof *n);
        if (!n) return dw__emu_no_memory(w, (int)lane);
        *n = (copies_arrival){.work = {.done = copies_arrival_done,
                                       .cta = w->cta,
                                       .warp = w->index,
                                       .lane = lane,
                                       .pc = w->now.pc},
                              .warp = w,
                              .barrier = address};
        if (!dw__emu_race_issue(w, &n->work)) {
            dw__free(n);
            return dw__emu_no_memory(w, (int)lane);
        }
        dw__emu_race_last_time(&n->work, DW__SIDE_COPY);
        dw__emu_later(w->cta->cluster, &n->work);
    }
    return DW__NEXT;
}
static dw_status translate_copies_arrival(dw__emu_translator *t, copy_op *k) {
    const dw__ptx_operand *address;
    const bool counted = !dw__emu_take(t, "noinc");
    (void)(dw__emu_take(t, "shared") || dw__emu_take(t, "shared::cta"));
    if (!dw__emu_take(t, "b64")) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_operand(t, 0, &address));
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, address, &k->mbarrier));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, copies_arrival_run));
    t->op->detail = k;
    t->op->immediate = counted;
    return DW_OK;
}

static dw_status translate_small(dw__emu_translator *t, copy_op *k) {
    if (dw__emu_take(t, "commit_group")) return emit_commit(t, true);
    if (dw__emu_take(t, "wait_group")) return emit_wait(t, true, false);
    if (dw__emu_take(t, "wait_all")) return emit_wait(t, true, true);
    if (dw__emu_take(t, "mbarrier")) {
        if (!dw__emu_take(t, "arrive")) return dw__emu_unsupported(t);
        return translate_copies_arrival(t, k);
    }
    if (!dw__emu_take(t, "ca") && !dw__emu_take(t, "cg")) return dw__emu_unsupported(t);
    if (!dw__emu_take(t, "shared") && !dw__emu_take(t, "shared::cta"))
        return dw__emu_unsupported(t);
    if (!dw__emu_take(t, "global")) return dw__emu_unsupported(t);
    static const char *const hints[] = {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", NULL};
    bool hint = false;
    for (int which; (which = dw__emu_take_one_of(t, hints)) >= 0;) hint = hint || which == 0;
    const dw__ptx_operand *o = t->in->operands;
    if (t->in->operand_count < 3 || o[2].kind != DW__PTX_INTEGER ||
        (o[2].integer != 4 && o[2].integer != 8 && o[2].integer != 16))
        return dw__emu_malformed(t, "the size must be 4, 8 or 16 bytes");
    k->small = true;
    k->direction = TO_SHARED;
    k->bytes = (uint32_t)o[2].integer;
    k->has_ignore = t->in->operand_count - hint == 4;
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[0], &k->to));
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[1], &k->from));
    if (k->has_ignore)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[3], DW__T_B32, &k->ignore_size));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, copy_run));
    t->op->detail = k;
    return DW_OK;
}

static dw_status translate_cp(dw__emu_translator *t) {
    copy_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    k->reduce = DW__REDUCE_NONE;
    bool reduces = dw__emu_take(t, "reduce");
    if (!dw__emu_take(t, "async")) return dw__emu_unsupported(t);
    if (dw__emu_take(t, "bulk")) return translate_bulk(t, k, reduces);
    return reduces ? dw__emu_unsupported(t) : translate_small(t, k);
}

const dw__emu_opcode dw__emu_opcodes_copy[] = {{"cp", translate_cp}, {NULL, NULL}};
