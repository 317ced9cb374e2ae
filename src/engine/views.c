#include "engine/views.h"

static void normalize(dw__tensor *view) {
    int64_t natural = 1;
    for (int axis = view->rank - 1; axis >= 0; axis--) {
        if (view->shape[axis] == 1) view->stride[axis] = natural;
        natural = view->stride[axis] * (view->shape[axis] ? view->shape[axis] : 1);
    }
}

static void copy_type(const dw__tensor *from, int rank, dw__tensor *to) {
    to->data = from->data;
    to->dtype = from->dtype;
    to->rank = rank;
}

/* Axes merged as far as one stride reaches all of their elements, outermost first, without axes of size 1. */
typedef struct runs {
    int count;
    int64_t size[DW_MAX_RANK], stride[DW_MAX_RANK];
} runs;

static runs find_runs(const dw__tensor *view) {
    runs found = {0};
    for (int axis = 0; axis < view->rank; axis++) {
        int64_t size = view->shape[axis], stride = view->stride[axis];
        if (size == 1) continue;
        int last = found.count - 1;
        if (last >= 0 && found.stride[last] == size * stride) {
            found.size[last] *= size;
            found.stride[last] = stride;
        } else {
            found.size[found.count] = size;
            found.stride[found.count++] = stride;
        }
    }
    return found;
}

bool dw__view_reshape(const dw__tensor *from, int rank, const int64_t *shape, dw__tensor *to) {
    copy_type(from, rank, to);
    for (int axis = 0; axis < rank; axis++) to->shape[axis] = shape[axis];
    if (dw__tensor_count(from) == 0) {
        dw__tensor_set_contiguous(to);
        return true;
    }
    runs left = find_runs(from);
    int at = left.count - 1;
    for (int axis = rank - 1; axis >= 0; axis--) {
        if (shape[axis] == 1) continue;
        if (at < 0 || left.size[at] % shape[axis]) return false;
        to->stride[axis] = left.stride[at];
        left.stride[at] *= shape[axis];
        left.size[at] /= shape[axis];
        if (left.size[at] == 1) at--;
    }
    normalize(to);
    return true;
}

void dw__view_permute(const dw__tensor *from, const int64_t *perm, dw__tensor *to) {
    copy_type(from, from->rank, to);
    for (int axis = 0; axis < from->rank; axis++) {
        to->shape[axis] = from->shape[perm[axis]];
        to->stride[axis] = from->stride[perm[axis]];
    }
    normalize(to);
}

void dw__view_unpermute(const dw__tensor *permuted, const int64_t *perm, dw__tensor *to) {
    copy_type(permuted, permuted->rank, to);
    for (int axis = 0; axis < permuted->rank; axis++) {
        to->shape[perm[axis]] = permuted->shape[axis];
        to->stride[perm[axis]] = permuted->stride[axis];
    }
    normalize(to);
}

void dw__view_broadcast(const dw__tensor *from, int rank, const int64_t *shape, dw__tensor *to) {
    copy_type(from, rank, to);
    int missing = rank - from->rank;
    for (int axis = 0; axis < rank; axis++) {
        bool spread = axis < missing || from->shape[axis - missing] != shape[axis];
        to->shape[axis] = shape[axis];
        to->stride[axis] = spread ? 0 : from->stride[axis - missing];
    }
    normalize(to);
}

void dw__view_slice(const dw__tensor *from, const int64_t *start, const int64_t *limit,
                    const int64_t *step, dw__tensor *to, int64_t *offset) {
    copy_type(from, from->rank, to);
    *offset = 0;
    for (int axis = 0; axis < from->rank; axis++) {
        int64_t each = step ? step[axis] : 1;
        to->shape[axis] = (limit[axis] - start[axis] + each - 1) / each;
        to->stride[axis] = from->stride[axis] * each;
        *offset += start[axis] * from->stride[axis];
    }
    if (dw__tensor_count(to) == 0) *offset = 0;
    normalize(to);
}

bool dw__view_same(const dw__tensor *a, const dw__tensor *b) {
    if (a->rank != b->rank) return false;
    for (int axis = 0; axis < a->rank; axis++) {
        if (a->shape[axis] != b->shape[axis]) return false;
        if (a->shape[axis] != 1 && a->stride[axis] != b->stride[axis]) return false;
    }
    return true;
}

static const int64_t *list_of(uint32_t attr_count, const dw_attr *attrs, dw_attr_key key) {
    const dw_attr *attr = dw__find_attr(attr_count, attrs, key);
    return attr ? attr->list : NULL;
}

bool dw__view_apply(dw__view_kind kind, const dw__tensor *from, const dw__tensor *type,
                    uint32_t attr_count, const dw_attr *attrs, dw__tensor *to, int64_t *offset) {
    *offset = 0;
    switch (kind) {
    case DW__NO_VIEW:
    case DW__VIEW_SAME: *to = *from; break;
    case DW__VIEW_RESHAPE: return dw__view_reshape(from, type->rank, type->shape, to);
    case DW__VIEW_PERMUTE:
        dw__view_permute(from, list_of(attr_count, attrs, DW_ATTR_KEY_PERM), to);
        break;
    case DW__VIEW_BROADCAST: dw__view_broadcast(from, type->rank, type->shape, to); break;
    case DW__VIEW_SLICE:
        dw__view_slice(from, list_of(attr_count, attrs, DW_ATTR_KEY_START),
                       list_of(attr_count, attrs, DW_ATTR_KEY_LIMIT),
                       list_of(attr_count, attrs, DW_ATTR_KEY_STEP), to, offset);
        break;
    }
    return true;
}
