/* Kernels that modify tensor maps: PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy". */
#include "emulator/lanes.h"
#include "emulator/tensor_map.h"
#include <string.h>

typedef enum field {
    ADDRESS,
    RANK,
    BOX,
    SIZE,
    STRIDE,
    STEP,
    ELEMENT,
    INTERLEAVE,
    SWIZZLE,
    ATOMICITY,
    FILL,
} field;

typedef struct replace_op {
    dw__emu_address address;
    dw__ptx_space space;
    field what;
    uint32_t axis, value;
    bool in_sixteens; /* strides in units of 16 bytes, before ISA 8.5 */
} replace_op;

/* Element types have other numbers than in CUtensorMapDataType: F32.FTZ comes before F64. */
static const uint8_t elements[] = {
    DW__TENSOR_U8,       DW__TENSOR_U16,       DW__TENSOR_U32,        DW__TENSOR_S32,
    DW__TENSOR_U64,      DW__TENSOR_S64,       DW__TENSOR_F16,        DW__TENSOR_F32,
    DW__TENSOR_F32_FTZ,  DW__TENSOR_F64,       DW__TENSOR_BF16,       DW__TENSOR_TF32,
    DW__TENSOR_TF32_FTZ, DW__TENSOR_U4_ALIGN8, DW__TENSOR_U4_ALIGN16, DW__TENSOR_U6_ALIGN16};

static uint8_t with_atomicity(uint8_t swizzle, uint64_t value) {
    return swizzle < DW__SWIZZLE_128 ? swizzle : value ? DW__SWIZZLE_128_ATOM_32 : DW__SWIZZLE_128;
}

/* Returns false if the field cannot have this value. */
static bool replace(dw__tensor_shape *m, const replace_op *k, uint64_t value) {
    const uint32_t axis = k->axis;
    switch (k->what) {
    case ADDRESS: m->address = value; return value % 16 == 0;
    case RANK: m->rank = (uint8_t)(value + 1); return value < DW__TENSOR_AXES;
    case BOX: m->box[axis] = (uint16_t)value; return value >= 1 && value <= 256;
    case SIZE: m->last[axis] = (uint32_t)value - 1; return true;
    case STRIDE:
        m->stride[axis] = k->in_sixteens ? value << 4 : value;
        return m->stride[axis] % 16 == 0 && m->stride[axis] < (uint64_t)1 << 40;
    case STEP: m->step[axis] = (uint8_t)value; return value >= 1 && value <= 8;
    case ELEMENT:
        if (value >= DW_COUNT(elements)) return false;
        m->element = elements[value];
        return true;
    case INTERLEAVE: return value == 0;
    case SWIZZLE: m->swizzle = (uint8_t)value; return value <= DW__SWIZZLE_128;
    case ATOMICITY:
        if (value > 1) return false; /* not supported: see tensor_map.h */
        m->swizzle = with_atomicity(m->swizzle, value);
        return true;
    default: m->fill_nan = (uint8_t)value; return value <= 1;
    }
}

static dw__emu_next replace_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const replace_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        const uint64_t address = dw__emu_lane_address(w, &k->address, (int)lane);
        const uint64_t value = op->immediate == 8 ? DW__REGISTER(w, uint64_t, k->value)[lane]
                                                  : DW__REGISTER(w, uint32_t, k->value)[lane];
        void *at =
            dw__emu_reach(w, k->space, (int)lane, address, DW__TENSOR_MAP_BYTES, 64, DW__READ);
        dw__tensor_shape map;
        if (!at) return DW__FAULT;
        if (!dw__tensor_map_decode(at, &map)) {
            dw__emu_found(
                w, (int)lane, DW__FOUND_INVALID,
                "replaces a field of the tensor map at 0x%llx, but there is no tensor map",
                (unsigned long long)address);
            return DW__FAULT;
        }
        if (!replace(&map, k, value)) {
            dw__emu_found(w, (int)lane, DW__FOUND_INVALID,
                          "replaces a field of a tensor map by 0x%llx, which is invalid or not "
                          "supported by the emulator",
                          (unsigned long long)value);
            return DW__FAULT;
        }
        if (!dw__emu_reach(w, k->space, (int)lane, address, DW__TENSOR_MAP_BYTES, 64, DW__WRITE))
            return DW__FAULT;
        memcpy(at, &map, sizeof map);
    }
    w->cta->cluster->progress++;
    return DW__NEXT;
}

static dw_status translate_replace(dw__emu_translator *t) {
    static const char *const fields[] = {
        "global_address", "rank",     "box_dim",           "global_dim",   "global_stride",
        "element_stride", "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity",
        "fill_mode",      NULL};
    replace_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "tile")) return dw__emu_unsupported(t);
    const int which = dw__emu_take_one_of(t, fields);
    k->what = (field)which;
    k->space = dw__emu_take(t, "global")                                     ? DW__PTX_GLOBAL
               : dw__emu_take(t, "shared::cta") || dw__emu_take(t, "shared") ? DW__PTX_SHARED
                                                                             : DW__PTX_REG;
    const bool wide = which == ADDRESS || which == STRIDE;
    if (which < 0 || !dw__emu_take(t, "b1024") || !dw__emu_take(t, wide ? "b64" : "b32"))
        return dw__emu_unsupported(t);
    const bool has_axis = which == BOX || which == SIZE || which == STRIDE || which == STEP;
    if (t->in->operand_count != 2 + has_axis)
        return dw__emu_malformed(t, "wrong number of operands");
    if (has_axis) {
        const dw__ptx_operand *axis = &t->in->operands[1];
        if (axis->kind != DW__PTX_INTEGER || axis->integer < 0 ||
            axis->integer >= DW__TENSOR_AXES - (which == STRIDE))
            return dw__emu_malformed(t, "the axis is out of range");
        k->axis = (uint32_t)axis->integer;
    }
    k->in_sixteens = t->program->module->version < 85;
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1 + has_axis],
                                            wide ? DW__T_B64 : DW__T_B32, &k->value));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, replace_run));
    t->op->detail = k;
    t->op->immediate = wide ? 8 : 4;
    return DW_OK;
}

/* Copies 128 bytes from shared to global memory; the whole warp executes it. The emulator needs no fence here. */
typedef struct publish_op {
    dw__emu_address to, from;
} publish_op;
static dw__emu_next publish_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const publish_op *k = op->detail;
    const int lane = __builtin_ctz(mask);
    const void *from =
        dw__emu_reach(w, DW__PTX_SHARED, lane, dw__emu_lane_address(w, &k->from, lane),
                      DW__TENSOR_MAP_BYTES, 64, DW__READ);
    if (!from) return DW__FAULT;
    void *to = dw__emu_reach(w, DW__PTX_GLOBAL, lane, dw__emu_lane_address(w, &k->to, lane),
                             DW__TENSOR_MAP_BYTES, 64, DW__WRITE);
    if (!to) return DW__FAULT;
    memcpy(to, from, DW__TENSOR_MAP_BYTES);
    w->cta->cluster->progress++;
    return DW__NEXT;
}
static dw_status translate_publish(dw__emu_translator *t) {
    static const char *const scopes[] = {"cta", "cluster", "gpu", "sys", NULL};
    publish_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "global") ||
        !(dw__emu_take(t, "shared::cta") || dw__emu_take(t, "shared")) ||
        !dw__emu_take(t, "tensormap::generic") || !dw__emu_take(t, "release") ||
        dw__emu_take_one_of(t, scopes) < 0 || !dw__emu_take(t, "sync") ||
        !dw__emu_take(t, "aligned") || t->in->operand_count != 3 ||
        t->in->operands[2].kind != DW__PTX_INTEGER ||
        t->in->operands[2].integer != DW__TENSOR_MAP_BYTES)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->to));
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[1], &k->from));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, publish_run));
    t->op->detail = k;
    t->op->aligned = true;
    return DW_OK;
}

static dw_status translate_tensormap(dw__emu_translator *t) {
    if (dw__emu_take(t, "replace")) return translate_replace(t);
    if (dw__emu_take(t, "cp_fenceproxy")) return translate_publish(t);
    return dw__emu_unsupported(t);
}

const dw__emu_opcode dw__emu_opcodes_tensormap[] = {{"tensormap", translate_tensormap},
                                                    {NULL, NULL}};
