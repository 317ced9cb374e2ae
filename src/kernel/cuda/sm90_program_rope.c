/* Rotary position embedding behind a product on Hopper (sm90/sm90_program_rope.cuh): how a call of rope lies over the
 * product's rows, which are tokens, and its columns, which are heads.
 */
#include "kernel/cuda/elementwise.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/iteration.h"
#include "kernel/cuda/rope.h"

enum { VECTOR = 8 }; /* elements of 16 bytes */

enum { BATCH, TOKEN }; /* strides of dw_sm90_rope */

/* True if tensor `tensor` of the iteration, `t`, has rows of whole vectors, at distances of 32 bits. */
static bool has_vectors(const dw__tensor *t, const dw__iteration *it, int tensor) {
    int64_t together = 0;
    const int last = t->rank - 1;
    for (int axis = 0; axis < it->rank; axis++) {
        const int64_t stride = it->stride[tensor][axis];
        if (stride < 0 || stride > INT32_MAX) return false;
        together |= stride;
    }
    return (t->shape[last] == 1 || t->stride[last] == 1) && together % VECTOR == 0 &&
           (uintptr_t)t->data % 16 == 0;
}

/* Sets the strides along the axis whose index in a row's number is `at`, BATCH or TOKEN. */
static void set_strides(const dw__iteration *it, int axis, int at, dw_sm90_rope *r) {
    r->cosine_strides[at] = (int)it->stride[DW_ROPE_COS][axis];
    r->sine_strides[at] = (int)it->stride[DW_ROPE_SIN][axis];
    r->y_strides[at] = (int)it->stride[DW_ROPE_Y][axis];
}

/* Finds heads and tokens by the strides of x: heads are neighbours in a row of D, and at most two axes lead from row to
 * row. False: x shows D otherwise. */
static bool find_axes(const dw__iteration *it, const dw_gemm *g, int64_t columns, dw_sm90_rope *r) {
    const int64_t heads = g->n / columns;
    int64_t tokens = 1, stride = g->d.stride;
    int head_axis = -1, token_axes = 0;
    for (int axis = it->rank - 1; axis >= 0; axis--) {
        const int64_t of_x = it->stride[DW_ROPE_X][axis];
        if (it->shape[axis] == 1) continue;
        if (head_axis < 0 && heads > 1 && of_x == columns) {
            if (it->shape[axis] != heads || it->stride[DW_ROPE_COS][axis] != 0 ||
                it->stride[DW_ROPE_SIN][axis] != 0)
                return false;
            head_axis = axis;
            r->y_head_stride = (int)it->stride[DW_ROPE_Y][axis];
            continue;
        }
        if (of_x != stride || token_axes == 2) return false;
        tokens *= it->shape[axis];
        stride *= it->shape[axis];
        if (token_axes == 0) r->tokens = (int)it->shape[axis];
        set_strides(it, axis, token_axes++ == 0 ? TOKEN : BATCH, r);
    }
    r->inverse_tokens = dw__elementwise_inverse(r->tokens);
    return tokens == g->m && (head_axis >= 0) == (heads > 1);
}

bool dw__sm90_rope_of(const dw__call *c, const dw_gemm *g, dw__sm90_rope_form *form,
                      dw_sm90_rope *r) {
    const dw__tensor *x = &c->inputs[DW_ROPE_X], *y = &c->outputs[0];
    const int64_t columns = y->shape[y->rank - 1],
                  turned = c->inputs[DW_ROPE_COS].shape[c->inputs[DW_ROPE_COS].rank - 1];
    dw__iteration it;
    *form = (dw__sm90_rope_form){
        .columns = (int)columns,
        .turned = (int)turned,
        .interleaved = dw__call_int(c, DW_ATTR_KEY_INTERLEAVED, 0) != 0,
    };
    *r = (dw_sm90_rope){.cosine = c->inputs[DW_ROPE_COS].data,
                        .sine = c->inputs[DW_ROPE_SIN].data,
                        .y = y->data,
                        .tokens = 1};
    if (dw__call_int(c, DW_ATTR_KEY_TRANSPOSED, 0) != 0 || y->dtype != g->dtype ||
        columns % VECTOR != 0 || columns > g->n || g->n % columns != 0 ||
        dw__tensor_count(y) != g->m * g->n || x->stride[x->rank - 1] != 1 ||
        turned % (form->interleaved ? VECTOR : 2 * VECTOR) != 0)
        return false;
    dw__rope_axes(c, &it);
    for (int t = DW_ROPE_COS; t < DW_ROPE_TENSORS; t++)
        if (!has_vectors(t == DW_ROPE_Y ? y : &c->inputs[t], &it, t)) return false;
    return find_axes(&it, g, columns, r);
}

bool dw__sm90_rope_fits(const dw__sm90_rope_form *form, int columns) {
    return form->columns == 0 || form->interleaved || columns % form->columns == 0;
}

dw_status dw__sm90_rope_source(const dw__sm90_rope_form *form, dw_dtype dtype, dw__text *source) {
    return dw__text_printf(
        source,
        "#define VECTOR 8\n#define INDEX int\n#include \"elementwise.cuh\"\n"
        "#define PROGRAM 1\n#define PROGRAM_OPERANDS 2\n#define PROGRAM_RESULTS 1\n"
        "#define PROGRAM_VECTORS 0\n#define PROGRAM_HALVES 0\n#define PROGRAM_WHOLE 1\n"
        "#define PROGRAM_SUMS 0\n"
        "#define PROGRAM_ROPE 1\n#define ROPE_COLUMNS %d\n#define ROPE_TURNED %d\n"
        "#define ROPE_INTERLEAVED %d\ntypedef %s program_element;\n#include "
        "\"sm90/sm90_gemm.cu\"\n",
        form->columns, form->turned, form->interleaved, dw__elementwise_element(dtype));
}
