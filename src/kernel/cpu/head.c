/* Code shared by the kernels of linear_cross_entropy and of its backward (head.h). */
#include "kernel/cpu/head.h"
#include "kernel/cpu/logit_gradient.h"
#include <math.h>
#include <string.h>

DW_ISA_TABLE(dw__logit_gradient_loops)

static bool is_f32(const dw__tensor *t, int rank) { return t->dtype == DW_F32 && t->rank == rank; }

bool dw__head_read(const dw__call *call, dw__head *out) {
    enum { X, W, B, TARGET = 3, LOGITS = 3, BACKWARD_TARGET, LSE, DLOSS };
    const dw_attr *reduction = dw__call_attr(call, DW_ATTR_KEY_REDUCTION);
    const dw__tensor *inputs = call->inputs;
    bool backward = call->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD;
    *out = (dw__head){
        .x = &inputs[X],
        .w = &inputs[W],
        .b = inputs[B].rank >= 0 ? &inputs[B] : NULL,
        .target = &inputs[backward ? BACKWARD_TARGET : TARGET],
        .transpose_w = dw__call_int(call, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0,
        .is_mean = !reduction || strcmp(reduction->string, "mean") == 0,
        .is_none = reduction && strcmp(reduction->string, "none") == 0,
        .ignore_index = dw__call_int(call, DW_ATTR_KEY_IGNORE_INDEX, -100),
        .label_smoothing = (float)dw__call_float(call, DW_ATTR_KEY_LABEL_SMOOTHING, 0.0),
    };
    if (!is_f32(out->x, 2) || !is_f32(out->w, 2) || (out->b && !is_f32(out->b, 1))) return false;
    if (out->target->rank != 1 || out->target->dtype != DW_I64) return false;
    out->tokens = out->x->shape[0];
    out->size = out->x->shape[1];
    out->vocabulary = out->w->shape[out->transpose_w ? 0 : 1];
    if (!backward) out->made = call->outputs[2].data;
    if (!backward) return true;
    out->logits = inputs[LOGITS].rank >= 0 ? &inputs[LOGITS] : NULL;
    out->lse = &inputs[LSE];
    out->dloss = &inputs[DLOSS];
    out->dx = call->outputs[0].data;
    out->dw = call->outputs[1].data;
    out->db = call->outputs[2].data;
    if (!is_f32(out->lse, 1) || !is_f32(out->dloss, out->is_none ? 1 : 0)) return false;
    if (!out->logits) return true;
    return is_f32(out->logits, 2) && (out->vocabulary <= 1 || out->logits->stride[1] == 1);
}

dw_status dw__head_begin(dw__head *g) {
    int64_t counted = 0;
    for (int64_t token = 0; token < g->tokens; token++) {
        int64_t target = dw__head_target(g, token);
        if (target == g->ignore_index) continue;
        if (target < 0 || target >= g->vocabulary) {
            return dw__fail(DW_INDEX,
                            "cross_entropy: target %lld at row %lld is outside [0, %lld): use "
                            "ignore_index (%lld) for tokens that do not count",
                            (long long)target, (long long)token, (long long)g->vocabulary,
                            (long long)g->ignore_index);
        }
        counted++;
    }
    g->normalizer = g->is_mean ? (double)counted : 1.0;
    return DW_OK;
}

int64_t dw__head_target(const dw__head *g, int64_t token) {
    return ((const int64_t *)g->target->data)[token * g->target->stride[0]];
}

void dw__head_gradient_row(const dw__head *g, int64_t token, int64_t column, int64_t columns,
                           const float *logits, float *out) {
    int64_t target = dw__head_target(g, token);
    if (target == g->ignore_index) {
        memset(out, 0, (size_t)columns * sizeof(float));
        return;
    }
    const float *dloss = g->dloss->data;
    float grad = g->is_none ? dloss[token * g->dloss->stride[0]] : dloss[0];
    float factor = (float)(grad / g->normalizer);
    float smooth = g->label_smoothing / (float)g->vocabulary;
    float lse = ((const float *)g->lse->data)[token * g->lse->stride[0]];
    bool hit = target >= column && target < column + columns;
    float p = hit ? expf(logits[target - column] - lse) : 0.0f; /* before `out` overwrites it */
    dw__logit_gradient_loops_now()->row(columns, logits, lse, factor, smooth, out);
    if (hit) out[target - column] = factor * (p - (1.0f - g->label_smoothing) - smooth);
}
