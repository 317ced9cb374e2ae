#include "attention_module.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char complaint[512];

const char *attention_complaint(void) { return complaint; }

__attribute__((format(printf, 2, 3))) static dw_status refuse(dw_status status, const char *format,
                                                              ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(complaint, sizeof complaint, format, arguments);
    va_end(arguments);
    return status;
}

static int64_t bytes_of(const tensor_view *tensor) {
    return tensor->dtype < 0 ? 1 : (int64_t)dw_dtype_bytes((dw_dtype)tensor->dtype);
}

bool attention_lies_well(const tensor_view *tensor) {
    int64_t last = tensor->rank - 1, per_vector = 16 / bytes_of(tensor);
    if ((uintptr_t)tensor->data % 16 != 0) return false;
    if (tensor->strides[last] != 1 && tensor->sizes[last] != 1) return false;
    for (int64_t axis = 0; axis < last; axis++) {
        if (tensor->sizes[axis] == 1) continue;
        if (tensor->strides[axis] % per_vector != 0 || tensor->strides[axis] == 0) return false;
    }
    return true;
}

void attention_strides_like(const tensor_view *like, int64_t strides[ATTENTION_RANK]) {
    const int64_t *n = like->sizes;
    if (like->rank == 3) {
        strides[0] = n[1] * n[2], strides[1] = n[2], strides[2] = 1;
        return;
    }
    /* Batch, heads and rows from the outermost inwards. An axis of size 1 keeps its place, whatever its stride; what is
     * expanded has no order. */
    int order[3] = {0, 1, 2}, places[3], axes[3], count = 0;
    bool ordered = true;
    for (int axis = 0; axis < 3; axis++) {
        if (n[axis] == 1) continue;
        ordered = ordered && like->strides[axis] > 0;
        int at = count;
        for (; at > 0 && like->strides[axes[at - 1]] < like->strides[axis]; at--)
            axes[at] = axes[at - 1];
        axes[at] = axis, places[count++] = axis;
    }
    for (int i = 0; ordered && i < count; i++) order[places[i]] = axes[i];
    int64_t stride = n[3];
    strides[3] = 1;
    for (int i = 2; i >= 0; i--) strides[order[i]] = stride, stride *= n[order[i]];
}

static dw_attention_tensor placed(const tensor_view *tensor) {
    dw_attention_tensor made = {.data = tensor->data};
    if (tensor->data == NULL) return made;
    if (tensor->rank == 3) {
        made.row = tensor->strides[0], made.head = tensor->strides[1];
        return made;
    }
    made.batch = tensor->strides[0], made.head = tensor->strides[1], made.row = tensor->strides[2];
    /* An axis of size 1 may have any stride, but libdeepwell requires multiples of 16 bytes. */
    if (tensor->sizes[0] == 1) made.batch = 0;
    if (tensor->sizes[1] == 1) made.head = 0;
    if (tensor->sizes[2] == 1) made.row = tensor->sizes[3];
    return made;
}

static dw_status like(const char *name, const tensor_view *tensor, const char *other_name,
                      const tensor_view *other) {
    if (tensor->dtype != other->dtype)
        return refuse(DW_TYPE, "attention: %s and %s differ in dtype", name, other_name);
    if (tensor->device != other->device)
        return refuse(DW_INVALID_ARGUMENT, "attention: %s is on device %d and %s on device %d",
                      name, (int)tensor->device, other_name, (int)other->device);
    if (tensor->rank != other->rank)
        return refuse(DW_SHAPE, "attention: %s has %d axes and %s %d", name, (int)tensor->rank,
                      other_name, (int)other->rank);
    return DW_OK;
}

static dw_status same_shape(const char *name, const tensor_view *tensor, const char *other_name,
                            const tensor_view *other) {
    dw_status status = like(name, tensor, other_name, other);
    if (status != DW_OK) return status;
    for (int64_t axis = 0; axis < tensor->rank; axis++) {
        if (tensor->sizes[axis] != other->sizes[axis])
            return refuse(DW_SHAPE, "attention: axis %d of %s is %lld and of %s %lld", (int)axis,
                          name, (long long)tensor->sizes[axis], other_name,
                          (long long)other->sizes[axis]);
    }
    if (!attention_lies_well(tensor))
        return refuse(
            DW_INVALID_ARGUMENT,
            "attention: the layout of %s is not supported (rows must be contiguous, other "
            "strides and the address multiples of 16 bytes): make it contiguous",
            name);
    return DW_OK;
}

static dw_status fits_i32(const char *name, int64_t value) {
    if (value >= 0 && value <= INT32_MAX) return DW_OK;
    return refuse(DW_SHAPE, "attention: %s is %lld, expected 0 to %d", name, (long long)value,
                  INT32_MAX);
}

/* Checks an offset vector, a seed or lse: an exact number of contiguous elements. */
static dw_status counted(const char *name, const tensor_view *tensor, dw_dtype dtype, int64_t count,
                         const tensor_view *q) {
    int64_t elements = tensor->sizes == NULL ? 0 : 1;
    bool dense = true;
    for (int64_t axis = tensor->rank - 1; tensor->sizes != NULL && axis >= 0; axis--) {
        if (tensor->sizes[axis] != 1 && tensor->strides[axis] != elements) dense = false;
        elements *= tensor->sizes[axis];
    }
    if (tensor->dtype != (int)dtype)
        return refuse(DW_TYPE, "attention: %s must have the dtype %s", name, dw_dtype_name(dtype));
    if (tensor->device != q->device)
        return refuse(DW_INVALID_ARGUMENT, "attention: %s is on device %d and q on device %d", name,
                      (int)tensor->device, (int)q->device);
    if (elements != count || !dense)
        return refuse(DW_SHAPE, "attention: %s must be %lld contiguous elements, and is %lld%s",
                      name, (long long)count, (long long)elements, dense ? "" : " with gaps");
    return DW_OK;
}

dw_status attention_describe(const attention_tensors *t, const attention_options *options,
                             bool backward, dw_attention *call) {
    const tensor_view *q = &t->q, *k = &t->k, *v = &t->v;
    bool packed = t->offsets_q.sizes != NULL;
    int64_t rank = packed ? 3 : 4;
    if (q->dtype != DW_BF16 && q->dtype != DW_F16)
        return refuse(DW_TYPE, "attention: q must be bfloat16 or float16 on a GPU");
    if (q->rank != rank)
        return refuse(
            DW_SHAPE, "attention: q has %d axes, expected %d: %s", (int)q->rank, (int)rank,
            packed ? "[rows, heads, head_dim], packed" : "[batch, heads, rows, head_dim]");
    if (packed != (t->offsets_k.sizes != NULL))
        return refuse(DW_INVALID_ARGUMENT,
                      "attention: offsets of q without offsets of k, or the reverse");
    dw_status status = like("k", k, "q", q);
    if (status == DW_OK) status = same_shape("v", v, "k", k);
    if (status == DW_OK) status = same_shape("k", k, "k", k); /* checks the layout */
    if (status == DW_OK) status = same_shape("q", q, "q", q);
    if (status == DW_OK) status = same_shape("o", &t->o, "q", q);
    if (status == DW_OK && backward) status = same_shape("the output's gradient", &t->d_o, "q", q);
    if (status == DW_OK && backward) status = same_shape("q's gradient", &t->dq, "q", q);
    if (status == DW_OK && backward) status = same_shape("k's gradient", &t->dk, "k", k);
    if (status == DW_OK && backward) status = same_shape("v's gradient", &t->dv, "v", v);
    if (status != DW_OK) return status;

    int64_t rows = packed ? 0 : 2;
    int64_t heads_q = q->sizes[1], heads_kv = k->sizes[1], dim = q->sizes[rank - 1];
    if (k->sizes[rank - 1] != dim)
        return refuse(DW_SHAPE, "attention: head_dim is %lld in q and %lld in k", (long long)dim,
                      (long long)k->sizes[rank - 1]);
    if (!packed && k->sizes[0] != q->sizes[0])
        return refuse(DW_SHAPE, "attention: the batch is %lld in q and %lld in k",
                      (long long)q->sizes[0], (long long)k->sizes[0]);
    if (heads_kv == 0 || heads_q % heads_kv != 0)
        return refuse(DW_SHAPE,
                      "attention: %lld query heads over %lld key heads: expected a multiple",
                      (long long)heads_q, (long long)heads_kv);
    int64_t batch = q->sizes[0], seq_len_q = q->sizes[rows], seq_len_kv = k->sizes[rows];
    *call = (dw_attention){.struct_size = sizeof *call, .dtype = (dw_dtype)q->dtype};
    if (packed) {
        batch = t->offsets_q.sizes[0] - 1;
        status = counted("offsets of q", &t->offsets_q, DW_I32, batch + 1, q);
        if (status == DW_OK) status = counted("offsets of k", &t->offsets_k, DW_I32, batch + 1, q);
        if (status != DW_OK) return status;
        call->offsets_q = t->offsets_q.data, call->offsets_k = t->offsets_k.data;
        call->total_q = seq_len_q, call->total_k = seq_len_kv;
        seq_len_q = options->longest_q, seq_len_kv = options->longest_k;
    }
    if (t->seed.sizes != NULL) {
        status = counted("the seed", &t->seed, DW_I64, 2, q);
        if (status != DW_OK) return status;
        call->seed_memory = t->seed.data;
    } else if (options->dropout > 0) {
        return refuse(DW_INVALID_ARGUMENT, "attention: dropout without a seed");
    }
    int64_t of_lse = heads_q * (packed ? call->total_q : batch * seq_len_q);
    status = DW_OK;
    if (backward || t->lse.sizes != NULL) /* forward: wanted */
        status = counted("lse", &t->lse, DW_F32, of_lse, q);
    if (status == DW_OK) status = fits_i32("the batch", batch);
    if (status == DW_OK) status = fits_i32("the number of heads", heads_q);
    if (status == DW_OK) status = fits_i32("the number of query rows", seq_len_q);
    if (status == DW_OK) status = fits_i32("the number of key rows", seq_len_kv);
    if (status == DW_OK) status = fits_i32("head_dim", dim);
    if (status != DW_OK) return status;

    call->batch = (int32_t)batch, call->heads_q = (int32_t)heads_q,
    call->heads_kv = (int32_t)heads_kv;
    call->seq_len_q = (int32_t)seq_len_q, call->seq_len_kv = (int32_t)seq_len_kv,
    call->head_dim = (int32_t)dim;
    call->scale = (float)options->scale, call->softcap = (float)options->softcap;
    /* A window wider than any sequence has no effect. */
    int64_t left = options->window_left, right = options->window_right;
    call->window_left = left < 0 || left > INT32_MAX / 4 ? -1 : (int32_t)left;
    call->window_right = right < 0 || right > INT32_MAX / 4 ? -1 : (int32_t)right;
    call->bottom_right = options->bottom_right;
    call->dropout = (float)options->dropout;
    call->q = placed(q), call->k = placed(k), call->v = placed(v), call->o = placed(&t->o);
    call->lse = t->lse.data;
    if (backward) {
        call->d_o = placed(&t->d_o), call->dq = placed(&t->dq);
        call->dk = placed(&t->dk), call->dv = placed(&t->dv);
        call->deterministic = options->deterministic;
    }
    return DW_OK;
}
