/* The registry: merges all lists of kernels, per operation, in order of preference. */
#include "kernel/kernel.h"
#include <assert.h>
#include <pthread.h>

enum { MAX_CANDIDATES = 15 };

static const dw__kernel *const *const lists[] = {
    dw__kernels_cpu_matmul,    dw__kernels_cpu_grouped,
    dw__kernels_cpu_attention, dw__kernels_cpu_elementwise,
    dw__kernels_cpu_norm,      dw__kernels_cpu_data,
    dw__kernels_cpu_loss,      dw__kernels_cpu_quantize,
    dw__kernels_reference, /* last, because it supports every call */
};

static const dw__kernel *candidates[DW_OP_COUNT][MAX_CANDIDATES + 1]; /* NULL-terminated */
static pthread_once_t merged = PTHREAD_ONCE_INIT;

/* Checks the contracts of every list, once. */
static void merge_lists(void) {
    uint8_t counts[DW_OP_COUNT] = {0};
    for (size_t i = 0; i < DW_COUNT(lists); i++) {
        for (const dw__kernel *const *kernel = lists[i]; *kernel; kernel++) {
            dw_op op = (*kernel)->op;
            assert((*kernel)->name && (*kernel)->source && (*kernel)->supports && (*kernel)->run);
            assert((*kernel)->tolerance_factor > 0.0);
            assert(counts[op] < MAX_CANDIDATES);
            candidates[op][counts[op]++] = *kernel;
        }
    }
}

const dw__kernel *const *dw__kernel_candidates(dw_op op) {
    pthread_once(&merged, merge_lists);
    return candidates[op];
}

const dw__kernel *dw__kernel_select(const dw__call *call) {
    const dw__kernel *const *kernel = dw__kernel_candidates(call->op);
    while (*kernel && !(*kernel)->supports(call)) kernel++;
    return *kernel;
}

bool dw__kernel_is_reference(const dw__kernel *kernel) {
    const dw__kernel *const *last = dw__kernel_candidates(kernel->op);
    while (last[1]) last++;
    return kernel == *last;
}

bool dw__kernel_lays_out_results(dw_op op) {
    const dw__kernel *const *kernel = dw__kernel_candidates(op);
    while (*kernel && !(*kernel)->strided_results) kernel++;
    return *kernel != NULL;
}

const dw__epilogue_kernel *dw__kernel_with_epilogue(dw_op op) {
    const dw__epilogue_kernel *const *kernel = dw__kernels_cpu_epilogue;
    while (*kernel && (*kernel)->op != op) kernel++;
    return *kernel;
}

const dw__kernel *dw__kernel_accumulating(dw_op op) {
    const dw__kernel *const *kernel = dw__kernels_cpu_accumulating;
    while (*kernel && (*kernel)->op != op) kernel++;
    return *kernel;
}

/* A permute that leaves the axes where they are. */
dw_op dw__kernel_copy_op(int rank, dw_attr *attr) {
    static const int64_t in_order[DW_MAX_RANK] = {0, 1, 2, 3, 4, 5, 6, 7};
    *attr = dw_attr_list(DW_ATTR_KEY_PERM, (uint32_t)rank, in_order);
    return DW_OP_PERMUTE;
}

/* ---- helpers for kernels --------------------------------------------------------------------- */

const dw_attr *dw__call_attr(const dw__call *call, dw_attr_key key) {
    for (uint32_t i = 0; i < call->attr_count; i++)
        if (call->attrs[i].key == key) return &call->attrs[i];
    return NULL;
}

int64_t dw__call_int(const dw__call *call, dw_attr_key key, int64_t absent) {
    const dw_attr *attr = dw__call_attr(call, key);
    return attr ? attr->integer : absent;
}

double dw__call_float(const dw__call *call, dw_attr_key key, double absent) {
    const dw_attr *attr = dw__call_attr(call, key);
    return attr ? attr->number : absent;
}

int64_t dw__tensor_count(const dw__tensor *tensor) {
    int64_t count = 1;
    for (int axis = 0; axis < tensor->rank; axis++) count *= tensor->shape[axis];
    return count;
}

size_t dw__tensor_bytes(const dw__tensor *tensor) {
    return (size_t)dw_tensor_bytes(tensor->dtype, tensor->rank, tensor->shape);
}

/* The elements from one index of `axis` to the next, where the axes behind it take `stride`. */
static int64_t next_stride(const dw__tensor *tensor, int axis, int64_t stride) {
    stride *= tensor->shape[axis];
    return axis == tensor->rank - 1 ? dw__dtype_row(tensor->dtype, stride) : stride;
}

/* An axis of one element may have any stride. In a tensor without elements all axes may. */
bool dw__tensor_is_contiguous(const dw__tensor *tensor) {
    int64_t expected = 1;
    if (dw__tensor_count(tensor) == 0) return true;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] != 1 && tensor->stride[axis] != expected) return false;
        expected = next_stride(tensor, axis, expected);
    }
    return true;
}

void dw__tensor_set_contiguous(dw__tensor *tensor) {
    int64_t stride = 1;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        tensor->stride[axis] = stride;
        stride = next_stride(tensor, axis, stride);
    }
}

bool dw__tensor_row_stride(const dw__tensor *tensor, int64_t *stride) {
    const int last = tensor->rank - 1;
    int64_t rows = 1;
    *stride = tensor->shape[last];
    if (tensor->shape[last] > 1 && tensor->stride[last] != 1) return false;
    for (int axis = last - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] == 1) continue;
        if (rows == 1) *stride = tensor->stride[axis];
        if (tensor->stride[axis] != *stride * rows) return false;
        rows *= tensor->shape[axis];
    }
    return true;
}
