/* Loads, stores and atomic operations: PTX ISA, "ld", "ld.global.nc", "ldu", "st", "st.bulk", "atom", "red". */
#include "emulator/lanes.h"
#include "emulator/race.h"
#include "emulator/reduction.h"
#include <string.h>

typedef struct access {
    dw__emu_address address;
    dw__ptx_space space; /* DW__PTX_REG: generic */
    dw__emu_type type;
    int bytes, count; /* bytes of an element; number of elements */
    bool extend;      /* signed, into wider registers */
    int strong;       /* DW__STRONG, DW__ORDERS */
    int place_bytes[8], register_bytes[8];
    uint32_t places[8];
    dw__emu_reduction kind; /* only for atomic operations */
} access;

/* ---- qualifiers ---------------------------------------------------------------------------- */

/* Takes a qualifier of order, cache or prefetch. The emulator's memory is sequentially consistent and has no caches. */
static bool take_qualifier(dw__emu_translator *t, access *k) {
    static const char *const orders[] = {"relaxed", "acquire",  "release", "acq_rel",
                                         "sc",      "volatile", "mmio",    NULL};
    static const char *const plain[] = {"weak",
                                        "cta",
                                        "cluster",
                                        "gpu",
                                        "sys",
                                        "ca",
                                        "cg",
                                        "cs",
                                        "lu",
                                        "cv",
                                        "wb",
                                        "wt",
                                        "nc",
                                        "L1::evict_normal",
                                        "L1::evict_unchanged",
                                        "L1::evict_first",
                                        "L1::evict_last",
                                        "L1::no_allocate",
                                        "L2::cache_hint",
                                        "L2::64B",
                                        "L2::128B",
                                        "L2::256B",
                                        "L2::evict_first",
                                        "L2::evict_last",
                                        "L2::evict_normal",
                                        "noftz",
                                        "L1",
                                        "L2",
                                        NULL};
    const int order = dw__emu_take_one_of(t, orders);
    if (order >= 0) k->strong = DW__STRONG;
    if (order > 0) k->strong |= DW__ORDERS;
    return order >= 0 || dw__emu_take_one_of(t, plain) >= 0;
}

static bool take_space(dw__emu_translator *t, dw__ptx_space *space) {
    static const char *const names[] = {"global",      "shared", "shared::cta", "shared::cluster",
                                        "local",       "const",  "param",       "param::entry",
                                        "param::func", NULL};
    static const dw__ptx_space spaces[] = {DW__PTX_GLOBAL, DW__PTX_SHARED, DW__PTX_SHARED,
                                           DW__PTX_SHARED, DW__PTX_LOCAL,  DW__PTX_CONST,
                                           DW__PTX_PARAM,  DW__PTX_PARAM,  DW__PTX_PARAM};
    int index = dw__emu_take_one_of(t, names);
    if (index >= 0) *space = spaces[index];
    return index >= 0;
}

static void take_all(dw__emu_translator *t, access *k) {
    static const char *const vectors[] = {"v2", "v4", "v8", NULL};
    k->space = DW__PTX_REG;
    k->count = 1;
    for (bool more = true; more;) {
        more = take_qualifier(t, k) || take_space(t, &k->space);
        int vector = dw__emu_take_one_of(t, vectors);
        if (vector >= 0) k->count = 2 << vector, more = true;
    }
}

/* Takes the address. Constants lie in global memory, arguments of calls in local memory. */
static dw_status take_address(dw__emu_translator *t, const dw__ptx_operand *operand, access *k) {
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, operand, &k->address));
    if (k->space == DW__PTX_CONST) k->space = DW__PTX_GLOBAL;
    if (k->space == DW__PTX_PARAM && operand->items[0].kind == DW__PTX_VARIABLE) {
        bool own = false;
        for (size_t i = 0; i < t->function->parameters.count; i++)
            own = own || t->function->parameters.items[i] == operand->items[0].variable;
        if (!own) k->space = DW__PTX_LOCAL;
    }
    return DW_OK;
}

static dw_status take_values(dw__emu_translator *t, const dw__ptx_operand *operand, access *k,
                             bool results) {
    static const dw__emu_type by_bytes[] = {
        [1] = DW__T_B8, [2] = DW__T_B16, [4] = DW__T_B32, [8] = DW__T_B64, [16] = DW__T_B128};
    const dw__ptx_operand *items = operand->kind == DW__PTX_VECTOR ? operand->items : operand;
    const int given = operand->kind == DW__PTX_VECTOR ? operand->count : 1;
    if (given != k->count) return dw__emu_malformed(t, "the vector has the wrong length");
    for (int i = 0; i < k->count; i++) {
        int has = dw__emu_operand_bytes(t, &items[i]);
        if (has == 0 || (has > 0 && has < k->bytes))
            return dw__emu_malformed(t, "a register is narrower than the element");
        k->register_bytes[i] = has > 0 ? has : k->bytes;
        k->place_bytes[i] = dw__emu_place_bytes(k->register_bytes[i]);
        dw__emu_type type = has > 0 ? by_bytes[has] : k->type;
        DW_RETURN_IF_FAILED(results ? dw__emu_take_result(t, &items[i], type, &k->places[i])
                                    : dw__emu_take_source(t, &items[i], type, &k->places[i]));
    }
    return DW_OK;
}

/* ---- loads and stores ---------------------------------------------------------------------- */

/* Elements are read atomically, because other clusters run on other threads of the host. */
static void read_element(void *to, const void *from, int bytes) {
    switch (bytes) {
    case 1: *(uint8_t *)to = __atomic_load_n((const uint8_t *)from, __ATOMIC_ACQUIRE); break;
    case 2: *(uint16_t *)to = __atomic_load_n((const uint16_t *)from, __ATOMIC_ACQUIRE); break;
    case 4: *(uint32_t *)to = __atomic_load_n((const uint32_t *)from, __ATOMIC_ACQUIRE); break;
    case 8: *(uint64_t *)to = __atomic_load_n((const uint64_t *)from, __ATOMIC_ACQUIRE); break;
    default: memcpy(to, from, (size_t)bytes);
    }
}
static void write_element(void *to, const void *from, int bytes) {
    switch (bytes) {
    case 1: __atomic_store_n((uint8_t *)to, *(const uint8_t *)from, __ATOMIC_RELEASE); break;
    case 2: __atomic_store_n((uint16_t *)to, *(const uint16_t *)from, __ATOMIC_RELEASE); break;
    case 4: __atomic_store_n((uint32_t *)to, *(const uint32_t *)from, __ATOMIC_RELEASE); break;
    case 8: __atomic_store_n((uint64_t *)to, *(const uint64_t *)from, __ATOMIC_RELEASE); break;
    default: memcpy(to, from, (size_t)bytes);
    }
}

static dw__emu_next load_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const access *k = op->detail;
    const uint32_t total = (uint32_t)(k->bytes * k->count);
    DW__EACH_LANE(lane, mask) {
        const unsigned char *from =
            dw__emu_reach(w, k->space, (int)lane, dw__emu_lane_address(w, &k->address, (int)lane),
                          total, total, (dw__emu_access)(DW__READ | k->strong));
        if (!from) return DW__FAULT;
        for (int i = 0; i < k->count; i++) {
            _Alignas(16) unsigned char value[16] = {0};
            read_element(value, from + i * k->bytes, k->bytes);
            if (k->extend && value[k->bytes - 1] & 0x80)
                memset(value + k->bytes, 0xFF, (size_t)(k->register_bytes[i] - k->bytes));
            memcpy(w->registers + k->places[i] + lane * (uint32_t)k->place_bytes[i], value,
                   (size_t)k->place_bytes[i]);
        }
    }
    if (k->strong && k->space != DW__PTX_SHARED)
        dw__emu_race_strong(w, true, false, k->strong & DW__ORDERS);
    return DW__NEXT;
}

static dw__emu_next store_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const access *k = op->detail;
    const uint32_t total = (uint32_t)(k->bytes * k->count);
    bool changed = false;
    DW__EACH_LANE(lane, mask) {
        _Alignas(16) unsigned char value[32];
        for (int i = 0; i < k->count; i++)
            write_element(value + i * k->bytes,
                          w->registers + k->places[i] + lane * (uint32_t)k->place_bytes[i],
                          k->bytes);
        w->storing = value;
        unsigned char *to =
            dw__emu_reach(w, k->space, (int)lane, dw__emu_lane_address(w, &k->address, (int)lane),
                          total, total, (dw__emu_access)(DW__WRITE | k->strong));
        w->storing = NULL;
        if (!to) return DW__FAULT;
        for (int i = 0; i < k->count; i++) {
            _Alignas(16) unsigned char before[16];
            read_element(before, to + i * k->bytes, k->bytes);
            changed = changed || memcmp(before, value + i * k->bytes, (size_t)k->bytes) != 0;
            write_element(to + i * k->bytes, value + i * k->bytes, k->bytes);
        }
    }
    if (k->strong && k->space != DW__PTX_SHARED)
        dw__emu_race_strong(w, false, true, k->strong & DW__ORDERS);
    w->cta->cluster->progress += changed && k->space != DW__PTX_LOCAL;
    return DW__NEXT;
}

static dw_status translate_access(dw__emu_translator *t, bool load) {
    access *k = dw__emu_detail(t, sizeof *k);
    const dw__ptx_operand *address, *value;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    take_all(t, k);
    if (!dw__emu_take_type(t, &k->type)) return dw__emu_unsupported(t);
    k->bytes = dw__emu_type_bytes(k->type);
    k->extend = dw__emu_type_signed(k->type);
    if (k->bytes * k->count > 32 || k->bytes == 0) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_operand(t, load ? 1 : 0, &address));
    DW_RETURN_IF_FAILED(dw__emu_take_operand(t, load ? 0 : 1, &value));
    DW_RETURN_IF_FAILED(take_address(t, address, k));
    if (!load && k->space == DW__PTX_PARAM)
        return dw__emu_malformed(t, "a store to the kernel's parameters");
    DW_RETURN_IF_FAILED(take_values(t, value, k, load));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, load ? load_run : store_run));
    t->op->detail = k;
    return DW_OK;
}
static dw_status translate_ld(dw__emu_translator *t) { return translate_access(t, true); }

/* st.bulk stores zeros. */
static dw__emu_next bulk_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const access *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        const uint64_t bytes = DW__REGISTER(w, uint64_t, op->a)[lane];
        if (bytes == 0) continue;
        if (bytes % 8 || bytes > UINT32_MAX) {
            dw__emu_found(w, (int)lane, DW__FOUND_ALIGNMENT,
                          "stores %llu zeros: must be a multiple of 8 below 2^32",
                          (unsigned long long)bytes);
            return DW__FAULT;
        }
        void *to =
            dw__emu_reach(w, k->space, (int)lane, dw__emu_lane_address(w, &k->address, (int)lane),
                          (uint32_t)bytes, 8, DW__WRITE);
        if (!to) return DW__FAULT;
        memset(to, 0, bytes);
    }
    w->cta->cluster->progress++;
    return DW__NEXT;
}
static dw_status translate_bulk(dw__emu_translator *t) {
    access *k = dw__emu_detail(t, sizeof *k);
    uint32_t size;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    (void)dw__emu_take(t, "weak");
    k->space = dw__emu_take(t, "shared::cta") ? DW__PTX_SHARED : DW__PTX_REG;
    if (t->in->operand_count != 3 || t->in->operands[2].kind != DW__PTX_INTEGER ||
        t->in->operands[2].integer != 0)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B64, &size));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, bulk_run));
    t->op->detail = k;
    t->op->a = size;
    return DW_OK;
}

/* Another table translates st.async. */
static dw_status translate_st(dw__emu_translator *t) {
    if (dw__emu_take(t, "async")) return t->cursor = 0, dw__emu_unsupported(t);
    return dw__emu_take(t, "bulk") ? translate_bulk(t) : translate_access(t, false);
}

/* ---- atomic operations --------------------------------------------------------------------- */

typedef struct atomic {
    access access;
    bool returns;
    uint32_t results[8];
    uint32_t third;
} atomic;

static uint64_t lane_value(const dw__emu_warp *w, uint32_t place, int place_bytes, uint32_t lane) {
    return place_bytes == 8 ? DW__REGISTER(w, uint64_t, place)[lane]
                            : DW__REGISTER(w, uint32_t, place)[lane];
}

static dw__emu_next atomic_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const atomic *m = op->detail;
    const access *k = &m->access;
    const uint32_t total = (uint32_t)(k->bytes * k->count);
    const uint64_t low = k->bytes == 8 ? UINT64_MAX : ((uint64_t)1 << 8 * k->bytes) - 1;
    bool changed = false;
    DW__EACH_LANE(lane, mask) {
        const uint64_t address = dw__emu_lane_address(w, &k->address, (int)lane);
        unsigned char *at = dw__emu_reach(w, k->space, (int)lane, address, total, total,
                                          (dw__emu_access)(DW__ATOMIC | k->strong));
        if (!at) return DW__FAULT;
        const bool in_global =
            k->space == DW__PTX_GLOBAL ||
            (k->space == DW__PTX_REG && (address & DW__WINDOW_MASK) != DW__SHARED_WINDOW);
        for (int i = 0; i < k->count; i++) {
            uint64_t y = lane_value(w, k->places[i], k->place_bytes[i], lane) & low;
            uint64_t z = k->kind == DW__REDUCE_COMPARE
                             ? lane_value(w, m->third, k->place_bytes[0], lane) & low
                             : 0;
            uint64_t before = dw__emu_reduce(k->kind, k->type, in_global, at + i * k->bytes, y, z);
            uint64_t after = 0;
            read_element(&after, at + i * k->bytes, k->bytes);
            changed = changed || after != before;
            if (!m->returns) continue;
            if (k->bytes == 8)
                DW__REGISTER(w, uint64_t, m->results[i])[lane] = before;
            else
                DW__REGISTER(w, uint32_t, m->results[i])[lane] = (uint32_t)before;
        }
    }
    if (k->space != DW__PTX_SHARED)
        dw__emu_race_strong(w, m->returns, true, k->strong & DW__ORDERS);
    w->cta->cluster->progress += changed;
    return DW__NEXT;
}

static dw_status translate_atomic(dw__emu_translator *t, bool returns) {
    atomic *m = dw__emu_detail(t, sizeof *m);
    if (!m) return dw__fail_memory("an operation", sizeof *m);
    access *k = &m->access;
    if (dw__emu_take(t, "async")) return t->cursor = 0, dw__emu_unsupported(t);
    take_all(t, k);
    /* The ISA has forms with the type and vector before the operation and after it. */
    const bool typed = dw__emu_take_type(t, &k->type);
    if (!dw__emu_take_reduction(t, returns, &k->kind)) return dw__emu_unsupported(t);
    access again = *k;
    take_all(t, &again);
    if (again.count > 1) k->count = again.count;
    if ((!typed && !dw__emu_take_type(t, &k->type)) || !dw__emu_reduces(k->kind, k->type))
        return dw__emu_unsupported(t);
    k->bytes = dw__emu_type_bytes(k->type);
    const int first = returns ? 1 : 0;
    const dw__ptx_operand *address, *value, *third, *result;
    DW_RETURN_IF_FAILED(dw__emu_take_operand(t, first, &address));
    DW_RETURN_IF_FAILED(dw__emu_take_operand(t, first + 1, &value));
    DW_RETURN_IF_FAILED(take_address(t, address, k));
    if (k->space == DW__PTX_PARAM || k->space == DW__PTX_LOCAL)
        return dw__emu_malformed(t, "atomic operations do not support this space");
    DW_RETURN_IF_FAILED(take_values(t, value, k, false));
    if (k->kind == DW__REDUCE_COMPARE) {
        DW_RETURN_IF_FAILED(dw__emu_take_operand(t, first + 2, &third));
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, third, k->type, &m->third));
    }
    m->returns = returns;
    if (returns) {
        DW_RETURN_IF_FAILED(dw__emu_take_operand(t, 0, &result));
        const dw__ptx_operand *items = result->kind == DW__PTX_VECTOR ? result->items : result;
        if ((result->kind == DW__PTX_VECTOR ? result->count : 1) != k->count)
            return dw__emu_malformed(t, "the vector has the wrong length");
        for (int i = 0; i < k->count; i++)
            DW_RETURN_IF_FAILED(dw__emu_take_result(t, &items[i], k->type, &m->results[i]));
    }
    DW_RETURN_IF_FAILED(dw__emu_emit(t, atomic_run));
    t->op->detail = m;
    return DW_OK;
}
static dw_status translate_atom(dw__emu_translator *t) { return translate_atomic(t, true); }
static dw_status translate_red(dw__emu_translator *t) { return translate_atomic(t, false); }

/* ---- cache operations ---------------------------------------------------------------------- */

static dw_status translate_nothing(dw__emu_translator *t) {
    t->cursor = t->in->modifier_count;
    return dw__emu_emit(t, dw__emu_nothing);
}

/* createpolicy: the policy has no effect. */
static dw_status translate_createpolicy(dw__emu_translator *t) {
    uint32_t d;
    if (t->in->operand_count < 1) return dw__emu_malformed(t, "an operand is missing");
    t->cursor = t->in->modifier_count;
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], DW__T_B64, &d));
    return dw__emu_emit(t, dw__emu_nothing);
}

const dw__emu_opcode dw__emu_opcodes_memory[] = {
    {"ld", translate_ld},
    {"ldu", translate_ld},
    {"st", translate_st},
    {"atom", translate_atom},
    {"red", translate_red},
    {"prefetch", translate_nothing},
    {"prefetchu", translate_nothing},
    {"discard", translate_nothing},
    {"applypriority", translate_nothing},
    {"createpolicy", translate_createpolicy},
    {NULL, NULL},
};
