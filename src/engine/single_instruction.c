/* An instruction of a plan by itself: its kernel on operands of its own. Operands that share a storage in the plan
 * share memory here, so that views overlap and results overwrite operands as they do there. */
#include "base/pool.h"
#include "engine/engine_internal.h"
#include <math.h>
#include <string.h>

enum { PATTERN_BYTES = 1 << 20 };

struct dw_instruction {
    dw_plan *plan;
    const dw__instruction *instruction;
    struct {
        struct block {
            uint32_t storage;
            void *memory;
        } * items;
        size_t count, capacity;
    } blocks;
    dw__operation_call call;
    dw__call epilogue;
    void *scratch;
};

/* ---- contents -------------------------------------------------------------------------------------- */

static uint64_t mixed(uint64_t x) { /* splitmix64 */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The kinds of numbers that an operand holds. */
typedef struct contents {
    dw_dtype dtype;
    int64_t limit; /* integers are below it */
    bool
        magnitudes; /* numbers without a sign, which there says that one is not finite (cuda/common/magnitude.cuh) */
} contents;

/* Writes one period of an operand's contents. */
static void fill_pattern(char *pattern, contents of) {
    const dw_dtype dtype = of.dtype;
    const size_t bytes = (size_t)(dw_dtype_bits(dtype) + 7) / 8;
    for (size_t i = 0; i < PATTERN_BYTES / bytes; i++) {
        const uint64_t random = mixed(i);
        const float both_signs = (float)(random >> 40) * 0x1p-23f - 1.0f;
        const float number = of.magnitudes ? fabsf(both_signs) : both_signs;
        uint32_t bits;
        double wide = number;
        int64_t whole = (int64_t)(random % (uint64_t)of.limit);
        memcpy(&bits, &number, sizeof bits);
        uint16_t half = (uint16_t)(bits >> 16); /* BF16 */
        if (dtype == DW_F16) half = (uint16_t)((random >> 63 << 15) | (random % 0x3C00u));
        int32_t narrow = (int32_t)whole;
        uint8_t byte = dtype == DW_BOOL ? 1 : (uint8_t)(0x30 | (random & 7)); /* a small code */
        const void *element = bytes == 1        ? (const void *)&byte
                              : bytes == 2      ? (const void *)&half
                              : dtype == DW_I64 ? (const void *)&whole
                              : dtype == DW_I32 ? (const void *)&narrow
                              : bytes == 8      ? (const void *)&wide
                                                : (const void *)&number;
        memcpy(pattern + i * bytes, element, bytes);
    }
}

static dw_status fill(const dw_device *device, void *memory, size_t bytes, contents of) {
    char *pattern = dw__malloc(PATTERN_BYTES);
    dw_status status = DW_OK;
    if (!pattern) return dw__fail_memory("random numbers", PATTERN_BYTES);
    fill_pattern(pattern, of);
    for (size_t at = 0; at < bytes; at += PATTERN_BYTES) {
        const size_t left = bytes - at;
        DW_TRY(dw_device_copy_in(device, (char *)memory + at, pattern,
                                 left < PATTERN_BYTES ? left : PATTERN_BYTES));
    }
cleanup:
    dw__free(pattern);
    return status;
}

/* Lowers *limit to the shortest axis of a floating-point operand: an index below it lies in every axis. */
static void limit_to(const dw__operand *operand, int64_t *limit) {
    const dw__tensor *view = &operand->view;
    if (view->rank < 0 || !dw__dtype_is_float(view->dtype)) return;
    for (int axis = 0; axis < view->rank; axis++)
        if (view->shape[axis] > 1 && view->shape[axis] < *limit) *limit = view->shape[axis];
}

static int64_t index_limit(const dw__step *step) {
    int64_t limit = INT32_MAX;
    for (uint32_t i = 0; i < step->input_count; i++) limit_to(&step->inputs[i], &limit);
    for (uint32_t o = 0; o < step->output_count; o++) limit_to(&step->outputs[o], &limit);
    return limit == INT32_MAX ? 1 : limit;
}

/* ---- memory ---------------------------------------------------------------------------------------- */

static void *memory_of(const dw_instruction *made, uint32_t storage) {
    for (size_t i = 0; i < made->blocks.count; i++)
        if (made->blocks.items[i].storage == storage) return made->blocks.items[i].memory;
    return NULL;
}

/* Allocates the storage if it has no memory yet, and fills it. */
static dw_status hold(dw_instruction *made, uint32_t storage, contents of) {
    const dw_device *device = made->plan->target.device;
    if (storage == DW_NONE || memory_of(made, storage)) return DW_OK;
    const size_t bytes = made->plan->storages.items[storage].bytes;
    struct block block = {storage, NULL};
    DW_RETURN_IF_FAILED(dw_device_allocate(device, bytes ? bytes : 1, &block.memory));
    dw_status status = DW_PUSH(&made->blocks, block);
    if (status != DW_OK) {
        dw_device_release(device, block.memory, bytes ? bytes : 1);
        return dw__fail_memory("an instruction's operands", made->blocks.count);
    }
    return fill(device, block.memory, bytes, of);
}

static void *address_of(const dw_instruction *made, const dw__operand *operand) {
    if (operand->storage == DW_NONE) return NULL;
    return (char *)memory_of(made, operand->storage) +
           operand->offset * dw_dtype_bits(operand->view.dtype) / 8;
}

/* The magnitudes that another kernel has found come behind the operation's own operands (lower_magnitudes.c). */
static bool is_magnitudes(const dw_instruction *made, const dw__step *step, uint32_t input) {
    const dw_graph *graph = made->plan->engine->graph;
    return step->kernel && step->kernel->reads_magnitudes &&
           input >= dw_node_input_count(graph, step->node);
}

static dw_status bind(dw_instruction *made, const dw__step *step, dw__call *call) {
    const int64_t limit = index_limit(step);
    dw__step_shape(step, call);
    for (uint32_t i = 0; i < step->input_count; i++) {
        const contents of = {step->inputs[i].view.dtype, limit, is_magnitudes(made, step, i)};
        if (step->inputs[i].view.rank < 0) continue;
        DW_RETURN_IF_FAILED(hold(made, step->inputs[i].storage, of));
        call->inputs[i].data = address_of(made, &step->inputs[i]);
    }
    for (uint32_t o = 0; o < step->output_count; o++) {
        const contents of = {step->outputs[o].view.dtype, limit, false};
        DW_RETURN_IF_FAILED(hold(made, step->outputs[o].storage, of));
        call->outputs[o].data = address_of(made, &step->outputs[o]);
    }
    if (step->accumulates == DW__ADDS_TO_ADDEND) {
        const contents of = {step->addend.view.dtype, limit, false};
        DW_RETURN_IF_FAILED(hold(made, step->addend.storage, of));
        call->addend.data = address_of(made, &step->addend);
    }
    return DW_OK;
}

/* ---- lifecycle ------------------------------------------------------------------------------------- */

dw_status dw_instruction_create(dw_plan *plan, uint32_t index, dw_instruction **out) {
    dw_status status = DW_OK;
    if (index >= plan->code.count)
        return dw__fail(DW_NOT_FOUND, "there is no instruction %u: the plan has %zu", index,
                        plan->code.count);
    if (plan->target.context && plan->target.context->plans_only)
        return dw__fail(DW_UNSUPPORTED,
                        "the plan is for %s, which is not here: make the plan on that device",
                        plan->target.gpu_name);
    dw_instruction *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("an instruction", sizeof *made);
    made->plan = plan;
    made->instruction = &plan->code.items[index];
    DW_TRY(bind(made, &made->instruction->step, &made->call.call));
    if (made->instruction->epilogue) {
        DW_TRY(bind(made, made->instruction->epilogue, &made->epilogue));
        dw__step_attach(made->instruction->epilogue, &made->epilogue, &made->call.call);
    }
    DW_TRY(hold(made, made->instruction->scratch, (contents){DW_F32, 1, false}));
    made->scratch = memory_of(made, made->instruction->scratch);
    *out = made;
    made = NULL;
cleanup:
    dw_instruction_destroy(made);
    return status;
}

const dw__call *dw__instruction_call(const dw_instruction *made) { return &made->call.call; }

dw_status dw_instruction_run(dw_instruction *made, void *stream) {
    const dw__step *step = &made->instruction->step;
    const dw__target *target = &made->plan->target;
    dw_status status;
    if (target->context) {
        made->call.stream = stream;
        made->call.workspace = made->scratch;
        status = step->kernel->enqueue(&made->call, target->context, step->variant);
    } else {
        const int limit = dw__pool_limit(target->threads);
        status = step->kernel->run(&made->call.call, made->scratch);
        dw__pool_limit(limit);
    }
    if (status == DW_OK) return DW_OK;
    char label[160];
    dw__node_label(made->plan->engine->graph, step->node, label, sizeof label);
    return dw__fail_prefix(status, "%s, %s", label, step->kernel->name);
}

void dw_instruction_destroy(dw_instruction *made) {
    if (!made) return;
    for (size_t i = 0; i < made->blocks.count; i++) {
        const struct block *block = &made->blocks.items[i];
        const size_t bytes = made->plan->storages.items[block->storage].bytes;
        dw_device_release(made->plan->target.device, block->memory, bytes ? bytes : 1);
    }
    dw__free(made->blocks.items);
    dw__free(made);
}
