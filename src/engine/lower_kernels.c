/* Lowering: the kernel of a step, and what it prepares.
 *
 * On a CPU there is always a kernel, the reference if no other. On a GPU there may be none. The plan then fails with a
 * message that names the node, and each kernel with its reason.
 *
 * A CPU's kernel may parse attributes once, such as the body of a fused program. The result depends on attributes and
 * element types alone; it belongs to the engine, and all layers and plans that agree in those share it.
 */
#include "engine/lowering.h"
#include <stdio.h>

static bool on_gpu(const dw__lowering *l) { return l->plan->target.context != NULL; }

static const dw__gpu_target *gpu_of(const dw__lowering *l) {
    return on_gpu(l) ? &l->plan->target.gpu : NULL;
}

/* On a GPU the caller's tensors and every storage are aligned; where in a storage an operand lies is known. */
static void *aligned_address(const dw__operand *operand) {
    const int64_t bytes = operand->offset * (int64_t)dw_dtype_bytes(operand->view.dtype);
    return operand->storage == DW_NONE ? NULL : (char *)0 + DW__GPU_ALIGNMENT + bytes;
}

static void set_addresses(const dw__step *step, dw__call *call) {
    for (uint32_t i = 0; i < step->input_count; i++)
        call->inputs[i].data = aligned_address(&step->inputs[i]);
    for (uint32_t o = 0; o < step->output_count; o++)
        call->outputs[o].data = aligned_address(&step->outputs[o]);
    if (step->accumulates == DW__ADDS_TO_ADDEND) call->addend.data = aligned_address(&step->addend);
}

/* Results of an epilogue get their places after its kernel is chosen. Those that have readers will lie in whole
 * storages, which are aligned. */
static void set_later_addresses(const dw__lowering *l, const dw__step *epilogue, dw__call *call) {
    const dw__node_record *record = record_of(l, epilogue->node);
    for (uint32_t o = 0; o < record->output_count; o++) {
        const dw_value value = record->outputs[o];
        if (epilogue->outputs[o].storage == DW_NONE &&
            use_count(l, value) + l->engine->output_uses[value] > 0)
            call->outputs[o].data = (char *)0 + DW__GPU_ALIGNMENT;
    }
}

void dw__lower_call(dw__lowering *l, const dw__step *step, const dw__step *epilogue) {
    dw__call *call = &l->first.call;
    dw__step_shape(step, call);
    if (epilogue) {
        dw__step_shape(epilogue, &l->second);
        dw__step_attach(epilogue, &l->second, call);
    }
    if (!on_gpu(l)) return;
    set_addresses(step, call);
    if (!epilogue) return;
    set_addresses(epilogue, &l->second);
    set_later_addresses(l, epilogue, &l->second);
}

/* ---- choice ---------------------------------------------------------------------------------- */

void dw__lower_select(dw__lowering *l, dw__step *step, const dw__step *epilogue) {
    dw__lower_call(l, step, epilogue);
    step->kernel = dw__kernel_for(&l->first, gpu_of(l), NULL);
}

bool dw__lower_has_kernel(const dw__lowering *l) {
    const dw__kernel *kernel = dw__kernel_for(&l->first, gpu_of(l), NULL);
    return kernel && !dw__kernel_is_reference(kernel);
}

bool dw__step_is_fast(const dw__step *step) {
    return step->kernel && !dw__kernel_is_reference(step->kernel);
}

bool dw__lower_has_epilogues(const dw__lowering *l, dw_op op) {
    return dw__kernel_has_epilogues(op, on_gpu(l));
}

bool dw__lower_accumulates(const dw__lowering *l, dw_op op) {
    return dw__kernel_accumulates(op, on_gpu(l));
}

bool dw__lower_sums_operands(const dw__lowering *l, dw_op op) {
    return dw__kernel_sums_operands(op, on_gpu(l));
}

dw__result_layout dw__lower_results(const dw__lowering *l, dw_op op) {
    return dw__kernel_results(op, on_gpu(l));
}

/* ---- preparation ----------------------------------------------------------------------------- */

/* Steps with the same key share what their kernel parses: kernel, element types and attributes. */
static dw_status key_of(const dw__step *step, dw__text *key) {
    DW_RETURN_IF_FAILED(dw__text_printf(key, "%s %d:", step->kernel->name, (int)step->op));
    for (uint32_t i = 0; i < step->input_count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d", (int)step->inputs[i].view.dtype));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(key, " ->"));
    for (uint32_t o = 0; o < step->output_count; o++) {
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d", (int)step->outputs[o].view.dtype));
    }
    for (uint32_t a = 0; a < step->attr_count; a++) {
        const dw_attr *attr = &step->attrs[a];
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d=%lld %.17g \"%s\"", (int)attr->key,
                                            (long long)attr->integer, attr->number,
                                            attr->string ? attr->string : ""));
        for (uint32_t i = 0; i < attr->count; i++) {
            DW_RETURN_IF_FAILED(dw__text_printf(key, ",%lld", (long long)attr->list[i]));
        }
    }
    return DW_OK;
}

static dw_status parse_new(dw__lowering *l, const dw__step *step, const char *key,
                           uint32_t *index) {
    dw_engine *engine = l->plan->engine;
    void *prepared = NULL;
    dw__step_shape(step, &l->first.call);
    DW_RETURN_IF_FAILED(step->kernel->parse(&l->first.call, &prepared));
    *index = (uint32_t)engine->prepared.count;
    dw_status status = DW_PUSH(&engine->prepared, prepared);
    if (status != DW_OK) {
        dw__free(prepared);
        return status;
    }
    return dw__map_set(engine->prepared_index, key, *index);
}

static dw_status parse(dw__lowering *l, dw__step *step) {
    dw_status status = DW_OK;
    dw__text key = {0};
    uint32_t index = 0;
    DW_TRY(key_of(step, &key));
    if (!dw__map_get(l->engine->prepared_index, key.text, &index))
        DW_TRY(parse_new(l, step, key.text, &index));
    step->prepared = l->engine->prepared.items[index];
cleanup:
    dw__text_free(&key);
    return status;
}

/* Finds the variant that the kernel's launches use; it is compiled, loaded and checked if it is the first of its kind.
 * A variant that the first-use check refused, or that the GPU has no room for, leaves the call to the next kernel. */
static dw_status find_variant(dw__lowering *l, dw__step *step, const dw__step *epilogue) {
    const dw__kernel *kernel = step->kernel;
    char reason[1024]; /* why not the first */
    dw__lower_call(l, step, epilogue);
    for (;;) {
        dw_status status =
            kernel->prepare(kernel, &l->first, l->plan->target.context, &step->variant);
        if (status == DW_OK) status = dw__variant_status(step->variant);
        if (status == DW_OK) step->kernel = kernel;
        if (status != DW_UNSUPPORTED) return status;
        if (kernel == step->kernel) snprintf(reason, sizeof reason, "%s", dw_last_error());
        kernel = dw__kernel_for(&l->first, gpu_of(l), kernel);
        if (!kernel)
            return dw__fail(DW_UNSUPPORTED,
                            "%s; no other kernel supports this call; run it on the CPU", reason);
    }
}

dw_status dw__lower_prepare(dw__lowering *l, dw__step *step) {
    if (!step->kernel) {
        dw__lower_call(l, step, NULL);
        return dw__kernel_fail_none(&l->first, gpu_of(l));
    }
    if (step->kernel->prepare) return find_variant(l, step, NULL);
    return step->kernel->parse ? parse(l, step) : DW_OK;
}

dw_status dw__lower_prepare_both(dw__lowering *l, dw__step *step, dw__step *epilogue) {
    if (on_gpu(l)) return find_variant(l, step, epilogue);
    return dw__lower_prepare(l, epilogue);
}
