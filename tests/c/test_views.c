/* Tests views against indices: each element of a view has the address that the operation's definition gives. */
#include "engine/views.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static dw__tensor make(int rank, const int64_t *shape) {
    dw__tensor tensor = {.dtype = DW_F32, .rank = rank};
    for (int axis = 0; axis < rank; axis++) tensor.shape[axis] = shape[axis];
    dw__tensor_set_contiguous(&tensor);
    return tensor;
}

/* Returns the offset of the element at row-major position `at`. */
static int64_t offset_at(const dw__tensor *view, int64_t at) {
    int64_t offset = 0;
    for (int axis = view->rank - 1; axis >= 0; axis--) {
        offset += at % view->shape[axis] * view->stride[axis];
        at /= view->shape[axis];
    }
    return offset;
}

static void expect_same_order(const dw__tensor *a, const dw__tensor *b) {
    assert_int_equal(dw__tensor_count(a), dw__tensor_count(b));
    for (int64_t at = 0; at < dw__tensor_count(a); at++) {
        assert_int_equal(offset_at(a, at), offset_at(b, at));
    }
}

static void reshapes_keep_the_order(void **state) {
    (void)state;
    dw__tensor x = make(3, (int64_t[]){4, 1, 15}), y, z;
    assert_true(dw__view_reshape(&x, 4, (int64_t[]){2, 10, 1, 3}, &y));
    expect_same_order(&x, &y);
    assert_true(dw__tensor_is_contiguous(&y));
    assert_true(dw__view_reshape(&x, 1, (int64_t[]){60}, &y));
    expect_same_order(&x, &y);
    /* Splitting an axis of a permuted tensor is a view; merging across the permutation is not. */
    dw__view_permute(&x, (int64_t[]){2, 1, 0}, &y);
    assert_true(dw__view_reshape(&y, 4, (int64_t[]){3, 5, 2, 2}, &z));
    expect_same_order(&y, &z);
    assert_false(dw__view_reshape(&y, 1, (int64_t[]){60}, &z));
    assert_false(dw__view_reshape(&y, 2, (int64_t[]){5, 12}, &z));
}

static void reshapes_of_slices_and_broadcasts(void **state) {
    (void)state;
    dw__tensor x = make(2, (int64_t[]){6, 8}), part, y;
    int64_t offset = 0;
    dw__view_slice(&x, (int64_t[]){1, 2}, (int64_t[]){5, 6}, NULL, &part, &offset);
    assert_int_equal(offset, 10);
    assert_true(dw__view_reshape(&part, 4, (int64_t[]){2, 2, 2, 2}, &y));
    expect_same_order(&part, &y);
    assert_false(dw__view_reshape(&part, 1, (int64_t[]){16}, &y));
    dw__tensor row = make(1, (int64_t[]){3}), spread;
    dw__view_broadcast(&row, 3, (int64_t[]){2, 2, 3}, &spread);
    assert_true(dw__view_reshape(&spread, 2, (int64_t[]){4, 3}, &y));
    expect_same_order(&spread, &y);
    assert_false(dw__view_reshape(&spread, 1, (int64_t[]){12}, &y));
}

static void scalars_and_empty_tensors(void **state) {
    (void)state;
    dw__tensor scalar = make(0, NULL), y;
    assert_true(dw__view_reshape(&scalar, 3, (int64_t[]){1, 1, 1}, &y));
    assert_true(dw__tensor_is_contiguous(&y));
    assert_true(dw__view_reshape(&y, 0, NULL, &scalar));
    dw__tensor empty = make(3, (int64_t[]){2, 0, 3});
    assert_true(dw__view_reshape(&empty, 2, (int64_t[]){0, 7}, &y));
    assert_int_equal(dw__tensor_count(&y), 0);
}

static void slices_step(void **state) {
    (void)state;
    dw__tensor x = make(2, (int64_t[]){7, 5}), y;
    int64_t offset = 0;
    dw__view_slice(&x, (int64_t[]){1, 0}, (int64_t[]){7, 5}, (int64_t[]){3, 2}, &y, &offset);
    assert_int_equal(y.shape[0], 2); /* rows 1 and 4 */
    assert_int_equal(y.shape[1], 3); /* columns 0, 2, 4 */
    assert_int_equal(offset + offset_at(&y, 5), 4 * 5 + 4);
}

static void unpermute_undoes_permute(void **state) {
    (void)state;
    dw__tensor x = make(4, (int64_t[]){2, 3, 1, 5}), y, z;
    const int64_t perm[4] = {3, 0, 2, 1};
    dw__view_permute(&x, perm, &y);
    assert_int_equal(offset_at(&y, 1), 5); /* last axis of y is axis 1 of x */
    dw__view_unpermute(&y, perm, &z);
    assert_true(dw__view_same(&x, &z));
    assert_false(dw__view_same(&x, &y));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reshapes_keep_the_order),
        cmocka_unit_test(reshapes_of_slices_and_broadcasts),
        cmocka_unit_test(scalars_and_empty_tensors),
        cmocka_unit_test(slices_step),
        cmocka_unit_test(unpermute_undoes_permute),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
