/* Selects the kernels of a plan's operations: ours if the GPU has one, else the framework's library. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_kernels.h"
#include "plan/plan_file.h"
#include "plan/planner_internal.h"
#include <math.h>
#include <string.h>

enum { TEXT_MOST = 192 };
static const dw__json_limits limits = {.depth = 8, .values = 1 << 12};

/* Origin of the planner's rate for such kernels. */
static const char *origin_of(const char *constant) {
    for (size_t at = 0; at < DW__CONSTANT_COUNT; at++)
        if (strcmp(dw__constant_table[at].name, constant) == 0)
            return dw__constant_table[at].origin;
    return "";
}

static const char *constant_of(const char *kind, int capability, char *name, size_t bytes) {
    const char *generation = capability == 80                        ? "sm80"
                             : capability == 90                      ? "sm90"
                             : capability >= 100 && capability < 120 ? "sm100"
                             : capability == 0                       ? "amd"
                                                                     : "other";
    snprintf(name, bytes, "%s_%s", kind, generation);
    return origin_of(name);
}

/* ---- attention ------------------------------------------------------------------------------ */

/* The attention call of one rank. If context parallelism cuts the sequence, it consists of squares of a
 * piece's length. */
static dw_attention call_of(const dw_autoplan *plan) {
    const dw_model_sizes *model = &plan->model;
    const dw_layout *layout = &plan->layout;
    int tp = layout->attention_tp ? layout->attention_tp : layout->tp;
    int heads = model->heads / tp, groups = model->heads / model->kv_heads;
    dw_attention call = {.struct_size = sizeof call,
                         .dtype = DW_BF16,
                         .batch = layout->micro_batch * tp / layout->tp,
                         .heads_q = heads,
                         .heads_kv = heads % groups ? heads : heads / groups,
                         .seq_len_q = layout->seq_len / layout->cp,
                         .seq_len_kv = layout->seq_len / layout->cp,
                         .head_dim = model->head_dim + model->rope_dim,
                         .window_left = -1,
                         .bottom_right = true};
    if (heads % groups && groups % heads == 0) call.heads_kv = 1;
    call.scale = (float)(1 / sqrt(call.head_dim));
    for (int which = 0; which < DW__ATTENTION_OPERANDS; which++)
        (void)dw__attention_lay_out(&call, which, false);
    return call;
}

/* The candidate of explain.h that a framework uses; NULL if it uses the candidate that explain.h chooses. */
static const char *habit_of(const dw_layout *layout) {
    if (layout->unfused_attention) return "math";
    if (layout->framework == DW_FRAMEWORK_OWN) return NULL;
    return dw__attends_as_ampere(layout) ? "flash" : "cudnn";
}

static void name_tiles(const dw_attention *call, dw__attention_pass pass, const char *arch,
                       char *text, size_t bytes) {
    dw__attention_shape shape = dw__attention_shape_of(call, pass, 0);
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, pass);
    if (!tile) return;
    snprintf(text, bytes, "deepwell, %s: tiles of %d queries x %d keys, %d stages, %d consumers",
             arch, tile->m, tile->n, tile->stages, tile->consumers);
}

typedef struct taken {
    char kernel[TEXT_MOST], source[TEXT_MOST];
    double rate; /* measured in isolation */
} taken;

static dw_status take_candidate(const json_t *report, const char *habit, taken *t) {
    const char *chosen = habit;
    const json_t *list = dw__json_member(report, "candidates");
    size_t at;
    json_t *json;
    if (!chosen) chosen = json_string_value(json_object_get(report, "chosen"));
    if (!chosen) return DW_OK;
    json_array_foreach((json_t *)list, at, json) {
        const char *name = json_string_value(json_object_get(json, "name"));
        const char *source = json_string_value(json_object_get(json, "source"));
        const char *from = json_string_value(json_object_get(json, "expected_from"));
        double seconds = json_number_value(json_object_get(json, "expected_seconds"));
        if (!name || strcmp(name, chosen) != 0) continue;
        snprintf(t->kernel, sizeof t->kernel, "%s",
                 strcmp(name, "deepwell") != 0 && source ? source : name);
        if (!(seconds > 0) || strcmp(name, "math") == 0) continue; /* not a measurement */
        t->rate = json_number_value(json_object_get(report, "flops")) / seconds;
        snprintf(t->source, sizeof t->source, "%s", from ? from : "");
    }
    return DW_OK;
}

/* Mentions kernels that exist but are not selected. */
static const char *unproven_for(const dw_hardware *hardware, bool backward) {
    return dw__gpu_is_rtx_blackwell(hardware->capability) ||
                   (dw__gpu_is_blackwell(hardware->capability) && !backward)
               ? " but one that is proven on the emulator, not run on hardware"
               : "";
}

/* The registry covers only sm_90a. On other GPUs, and for calls that it does not support, the framework's
 * library runs. */
static dw_status take_attention(const dw_autoplan *plan, int backward, taken *t) {
    static const char arch[] = "sm_90a";
    dw_attention call = call_of(plan);
    const char *habit = habit_of(&plan->layout);
    char *text = NULL, constant[32];
    json_t *report = NULL;
    dw_status status = DW_OK;
    const char *other = !habit || strcmp(habit, "cudnn") == 0 ? "cuDNN"
                        : strcmp(habit, "flash") == 0         ? "FlashAttention-2"
                                                              : "unfused matmuls";
    *t = (taken){0};
    snprintf(t->kernel, sizeof t->kernel,
             "the framework's library (%s); no kernel registered for %s%s", other,
             plan->hardware->architecture, unproven_for(plan->hardware, backward));
    snprintf(t->source, sizeof t->source, "%s",
             constant_of("attention", plan->hardware->capability, constant, sizeof constant));
    if (strcmp(plan->hardware->architecture, arch) != 0) return DW_OK;
    status = dw_attention_explain(&call, backward, arch, &text);
    if (status == DW_INVALID_ARGUMENT || status == DW_SHAPE || status == DW_UNSUPPORTED)
        return DW_OK;
    DW_RETURN_IF_FAILED(status);
    DW_TRY(dw__json_parse("explanation", text, strlen(text), limits, &report));
    DW_TRY(take_candidate(report, habit, t));
    if (strcmp(t->kernel, "deepwell") == 0)
        name_tiles(&call, backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD, arch,
                   t->kernel, sizeof t->kernel);
cleanup:
    json_decref(report);
    dw_text_free(text);
    return status;
}

/* ---- GEMMs ---------------------------------------------------------------------------------- */

static void take_product(const dw_autoplan *plan, const dw_operation_cost *cost, taken *t) {
    char constant[32], recipe[32] = "bf16";
    int grouped = strncmp(cost->name, "experts", 7) == 0;
    *t = (taken){0};
    if (grouped && plan->layout.framework == DW_FRAMEWORK_OWN && plan->hardware->capability == 90) {
        snprintf(t->kernel, sizeof t->kernel, "deepwell, sm_90a: %s (grouped GEMM, %s)",
                 dw__sm90_segment.name, recipe);
        snprintf(t->source, sizeof t->source, "%s", origin_of("gemm_own"));
        return;
    }
    if (cost->low) snprintf(recipe, sizeof recipe, "%s", dw_scheme_name(plan->layout.precision));
    snprintf(t->kernel, sizeof t->kernel, "the framework's library (%s, %s); none registered%s",
             grouped ? "grouped GEMM" : "cuBLASLt", recipe,
             grouped ? "" : unproven_for(plan->hardware, false));
    snprintf(t->source, sizeof t->source, "%s",
             grouped ? origin_of("gemm_grouped")
             : cost->low
                 ? origin_of(plan->layout.precision == DW_SCHEME_NVFP4 ? "gemm_fp4" : "gemm_fp8")
                 : constant_of("gemm", plan->hardware->capability, constant, sizeof constant));
}

/* ---- rows ----------------------------------------------------------------------------------- */

static int is_product(const dw_operation_cost *cost) {
    return cost->operations > 1.001 * cost->bytes / 2 || strcmp(cost->name, "attention") == 0;
}

/* True for the same operation in another layer or pass. The passes of attention are different kernels. */
static int is_same(const dw_operation_cost *a, const dw_operation_cost *b) {
    if (strcmp(a->name, b->name) != 0 || a->low != b->low) return 0;
    return strcmp(a->name, "attention") != 0 || strcmp(a->pass, b->pass) == 0;
}

static dw_status put_kernel(dw__autoplan *own, const dw_operation_cost *costs, int at, int count,
                            dw_autoplan_kernel *row) {
    const dw_operation_cost *cost = &costs[at];
    int attention = strcmp(cost->name, "attention") == 0;
    double operations = 0, seconds = 0;
    char name[TEXT_MOST];
    taken t;
    for (int other = at; other < count; other++) {
        if (!is_same(cost, &costs[other])) continue;
        operations += costs[other].operations * costs[other].times;
        seconds += costs[other].seconds * costs[other].times;
    }
    if (attention)
        DW_RETURN_IF_FAILED(take_attention(&own->plan, strcmp(cost->pass, "backward") == 0, &t));
    else
        take_product(&own->plan, cost, &t);
    snprintf(name, sizeof name, "%s%s%s", cost->name, attention ? " " : "",
             attention ? cost->pass : "");
    row->predicted = seconds > 0 ? operations / seconds : 0;
    row->measured = t.rate;
    DW_RETURN_IF_FAILED(dw__autoplan_text(own, name, &row->operation));
    DW_RETURN_IF_FAILED(dw__autoplan_text(own, t.kernel, &row->kernel));
    return dw__autoplan_text(own, t.source, &row->source);
}

dw_status dw_autoplan_bind(dw_autoplan *plan) {
    dw__autoplan *own = (dw__autoplan *)plan;
    dw_operation_cost costs[DW_OPERATIONS_MOST];
    dw_autoplan_kernel *rows;
    uint32_t used = 0;
    if (!plan) return dw__fail(DW_INVALID_ARGUMENT, "the plan is NULL");
    int count = dw_predict_operations(&plan->model, plan->hardware, &plan->layout, costs);
    DW_RETURN_IF_FAILED(dw__autoplan_kernels(own, (size_t)count, &rows));
    for (int at = 0; at < count; at++) {
        int seen = 0;
        for (int before = 0; before < at; before++) seen |= is_same(&costs[before], &costs[at]);
        if (seen || !is_product(&costs[at])) continue;
        DW_RETURN_IF_FAILED(put_kernel(own, costs, at, count, &rows[used]));
        used++;
    }
    plan->kernels = rows;
    plan->kernel_count = used;
    return DW_OK;
}
