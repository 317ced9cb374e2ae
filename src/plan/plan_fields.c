#include "plan/plan_fields.h"
#include "plan/planner_internal.h"
#include <string.h>

/* dw__field_get reads every enumeration as an int. */
_Static_assert(sizeof(dw_pipeline_schedule) == sizeof(int) && sizeof(dw_recompute) == sizeof(int) &&
                   sizeof(dw_scheme) == sizeof(int) && sizeof(dw_framework) == sizeof(int),
               "enumerations are read and written as integers");

#define FIELD(structure, member, kind)                                                             \
    { #member, offsetof(structure, member), DW__FIELD_##kind }
#define LIST(name, table) const dw__field_list name = {table, DW_COUNT(table)}

#define INT(member) FIELD(dw_model_sizes, member, INTEGER)
static const dw__field model[] = {
    INT(layers),
    INT(hidden),
    INT(heads),
    INT(kv_heads),
    INT(head_dim),
    INT(ffn),
    FIELD(dw_model_sizes, gated, FLAG),
    INT(vocabulary),
    FIELD(dw_model_sizes, tied, FLAG),
    INT(positions),
    INT(experts),
    INT(top_k),
    INT(expert_ffn),
    INT(shared_ffn),
    FIELD(dw_model_sizes, expert_bias, FLAG),
    INT(dense_layers),
    INT(moe_every),
    INT(q_rank),
    INT(kv_rank),
    INT(rope_dim),
    INT(value_dim),
    INT(window),
    INT(window_every),
    INT(window_layers),
    INT(attention_layers),
    INT(lora_rank),
    FIELD(dw_model_sizes, parameters, REAL),
    FIELD(dw_model_sizes, active, REAL),
};
LIST(dw__model_fields, model);
/* If you add a member to a structure, add it to its list. */
_Static_assert(sizeof(dw_model_sizes) ==
                   (DW_COUNT(model) - 2 + 1) / 2 * 2 * sizeof(int) + 2 * sizeof(double),
               "the model has a member that its fields lack");
#undef INT

#define INT(member) FIELD(dw_layout, member, INTEGER)
#define FLAG(member) FIELD(dw_layout, member, FLAG)
static const dw__field layout[] = {
    INT(gpus),
    INT(tp),
    INT(cp),
    INT(pp),
    INT(dp),
    INT(ep),
    INT(etp),
    INT(attention_tp),
    INT(virtual_stages),
    FLAG(sequence_parallel),
    INT(zero_stage),
    INT(shard),
    FLAG(reshard),
    INT(micro_batch),
    INT(global_batch),
    INT(seq_len),
    FIELD(dw_layout, schedule, SCHEDULE),
    FIELD(dw_layout, recompute, RECOMPUTE),
    INT(recompute_layers),
    FIELD(dw_layout, precision, PRECISION),
    FIELD(dw_layout, framework, FRAMEWORK),
    FLAG(unfused_attention),
    FLAG(overlap_tensor),
    FLAG(overlap_data),
    FLAG(overlap_expert),
    FLAG(cuda_graphs),
    FLAG(compiled),
    FLAG(dispatch_once),
    FLAG(fused_loss),
    FLAG(dropout),
    INT(expert_load),
    FLAG(padded_experts),
    INT(offload_layers),
    FLAG(offload_optimizer),
    INT(parameter_bytes),
    INT(gradient_bytes),
    INT(optimizer_bytes),
    FIELD(dw_layout, last_stage_layers, REAL),
    FIELD(dw_layout, first_stage_layers, REAL),
};
LIST(dw__layout_fields, layout);
_Static_assert(sizeof(dw_layout) ==
                   (DW_COUNT(layout) - 2 + 1) / 2 * 2 * sizeof(int) + 2 * sizeof(double),
               "the layout has a member that its fields lack");
#undef INT
#undef FLAG

#define REAL(member) FIELD(dw_prediction, member, REAL)
static const dw__field prediction[] = {
    REAL(seconds),
    REAL(tokens_per_second),
    REAL(model_flops),
    REAL(mfu),
    REAL(bubble_fraction),
    REAL(overhead_fraction),
    REAL(allocated),
    REAL(reserved),
    REAL(used),
    REAL(capacity),
    REAL(host_optimizer),
    REAL(host_activations),
    REAL(host_capacity),
    FIELD(dw_prediction, fits, FLAG),
    FIELD(dw_prediction, recompute, RECOMPUTE),
    FIELD(dw_prediction, recompute_layers, INTEGER),
    FIELD(dw_prediction, heaviest_stage, INTEGER),
};
LIST(dw__prediction_fields, prediction);
#undef REAL

#define REAL(member) FIELD(dw_time_parts, member, REAL)
static const dw__field time_parts[] = {
    REAL(gemm),    REAL(attention), REAL(elementwise), REAL(quantize),  REAL(launch),
    REAL(tensor),  REAL(context),   REAL(expert),      REAL(data),      REAL(pipeline),
    REAL(offload), REAL(bubble),    REAL(imbalance),   REAL(optimizer), REAL(other),
};
LIST(dw__time_fields, time_parts);
_Static_assert(sizeof(dw_time_parts) == DW_COUNT(time_parts) * sizeof(double),
               "the time has a part that its fields lack");
#undef REAL

#define REAL(member) FIELD(dw_memory_parts, member, REAL)
static const dw__field memory_parts[] = {
    REAL(parameters),  REAL(gradients), REAL(optimizer),
    REAL(activations), REAL(workspace), REAL(overhead),
};
LIST(dw__memory_fields, memory_parts);
_Static_assert(sizeof(dw_memory_parts) == DW_COUNT(memory_parts) * sizeof(double),
               "the memory has a part that its fields lack");
#undef REAL

#define REAL(member) FIELD(dw_autoplan_statistics, member, REAL)
static const dw__field statistics[] = {
    REAL(meshes),
    REAL(meshes_slow),
    REAL(meshes_large),
    REAL(predicted),
};
LIST(dw__statistics_fields, statistics);
#undef REAL

const dw__field *dw__field_named(dw__field_list list, const char *name, size_t length) {
    for (size_t at = 0; at < list.count; at++)
        if (strlen(list.fields[at].name) == length &&
            strncmp(list.fields[at].name, name, length) == 0)
            return &list.fields[at];
    return NULL;
}

int dw__field_value_count(dw__field_kind kind) {
    switch (kind) {
    case DW__FIELD_SCHEDULE: return DW_SCHEDULES;
    case DW__FIELD_RECOMPUTE: return DW_RECOMPUTES;
    case DW__FIELD_PRECISION: return DW_SCHEME_COUNT;
    case DW__FIELD_FRAMEWORK: return DW_FRAMEWORKS;
    default: return 0;
    }
}

const char *dw__field_value_name(dw__field_kind kind, int value) {
    if (value < 0 || value >= dw__field_value_count(kind)) return NULL;
    switch (kind) {
    case DW__FIELD_SCHEDULE: return dw_pipeline_schedule_name((dw_pipeline_schedule)value);
    case DW__FIELD_RECOMPUTE: return dw_recompute_name((dw_recompute)value);
    case DW__FIELD_PRECISION:
        return dw__scheme_in((dw_scheme)value, dw__planned_schemes)
                   ? dw_scheme_name((dw_scheme)value)
                   : NULL;
    case DW__FIELD_FRAMEWORK: return dw_framework_name((dw_framework)value);
    default: return NULL;
    }
}

int dw__field_get(const void *structure, const dw__field *field) {
    int value;
    memcpy(&value, (const char *)structure + field->offset, sizeof value);
    return value;
}

void dw__field_set(void *structure, const dw__field *field, int value) {
    memcpy((char *)structure + field->offset, &value, sizeof value);
}

double dw__field_real(const void *structure, const dw__field *field) {
    double value;
    memcpy(&value, (const char *)structure + field->offset, sizeof value);
    return value;
}
