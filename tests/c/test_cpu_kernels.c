/* The CPU's elementwise, norm, data-movement and loss kernels against naive loops in double, on awkward
 * shapes and strides, on every instruction set that this CPU has.
 *
 * Every run goes through run_call(): the kernel must claim the call, is given exactly the scratch that it
 * asked for, and runs on 1, 2 and 3 threads; the bits must agree, and the guard bytes around outputs and
 * scratch must survive. */
#include "base/base.h"
#include "deepwell/engine.h"
#include "deepwell/threads.h"
#include "kernel/cpu/cpu.h"
#include "kernel/kernel.h"
#include "number/half.h"
#include "number/philox.h"
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- data --------------------------------------------------------------------------------------- */

static uint64_t random_state = 88172645463325252u;

static uint64_t random_bits(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}
static double uniform(double low, double high) {
    return low + (high - low) * (double)(random_bits() >> 11) * 0x1p-53;
}

enum { GUARD = 64, GUARD_BYTE = 0xA5 };

static void *blocks[256];
static size_t block_count;

/* `bytes` between two guards; all blocks are checked and freed by release_blocks(). */
static void *guarded(size_t bytes) {
    uint8_t *block = malloc(bytes + 2 * GUARD + sizeof(size_t));
    assert_non_null(block);
    memcpy(block, &bytes, sizeof bytes);
    memset(block + sizeof(size_t), GUARD_BYTE, bytes + 2 * GUARD);
    assert_true(block_count < DW_COUNT(blocks));
    blocks[block_count++] = block;
    return block + sizeof(size_t) + GUARD;
}

static void check_guards(const uint8_t *block) {
    size_t bytes;
    memcpy(&bytes, block, sizeof bytes);
    const uint8_t *start = block + sizeof(size_t);
    for (int i = 0; i < GUARD; i++) {
        assert_int_equal(start[i], GUARD_BYTE);
        assert_int_equal(start[GUARD + bytes + (size_t)i], GUARD_BYTE);
    }
}

static void release_blocks(void) {
    for (size_t i = 0; i < block_count; i++) {
        check_guards(blocks[i]);
        free(blocks[i]);
    }
    block_count = 0;
}

static dw__tensor make_tensor(dw_dtype dtype, int rank, const int64_t *shape) {
    dw__tensor t = {.dtype = dtype, .rank = rank};
    for (int i = 0; i < rank; i++) t.shape[i] = shape[i];
    dw__tensor_set_contiguous(&t);
    t.data = guarded((size_t)dw__tensor_count(&t) * dw_dtype_bytes(dtype));
    return t;
}
#define SHAPE(...)                                                                                 \
    (int)DW_COUNT(((const int64_t[]){__VA_ARGS__})), (const int64_t[]) { __VA_ARGS__ }

static double get(const dw__tensor *t, int64_t offset) {
    switch (t->dtype) {
    case DW_BOOL: return ((const uint8_t *)t->data)[offset];
    case DW_I32: return ((const int32_t *)t->data)[offset];
    case DW_I64: return (double)((const int64_t *)t->data)[offset];
    case DW_BF16: return (double)dw__bf16_to_f32(((const uint16_t *)t->data)[offset]);
    case DW_F16: return (double)dw__f16_to_f32(((const uint16_t *)t->data)[offset]);
    case DW_F32: return (double)((const float *)t->data)[offset];
    default: return ((const double *)t->data)[offset];
    }
}

static void put(const dw__tensor *t, int64_t offset, double value) {
    switch (t->dtype) {
    case DW_BOOL: ((uint8_t *)t->data)[offset] = value != 0.0; break;
    case DW_I32: ((int32_t *)t->data)[offset] = (int32_t)value; break;
    case DW_I64: ((int64_t *)t->data)[offset] = (int64_t)value; break;
    case DW_BF16: ((uint16_t *)t->data)[offset] = dw__f32_to_bf16((float)value); break;
    case DW_F16: ((uint16_t *)t->data)[offset] = dw__f32_to_f16((float)value); break;
    case DW_F32: ((float *)t->data)[offset] = (float)value; break;
    default: ((double *)t->data)[offset] = value; break;
    }
}

static dw__tensor random_tensor(dw_dtype dtype, double low, double high, int rank,
                                const int64_t *shape) {
    dw__tensor t = make_tensor(dtype, rank, shape);
    for (int64_t i = 0; i < dw__tensor_count(&t); i++) {
        double value = uniform(low, high);
        put(&t, i, dtype == DW_BOOL ? value > (low + high) / 2 : value);
    }
    return t;
}

/* Axes a and b exchanged: a strided view. */
static dw__tensor transposed(dw__tensor t, int a, int b) {
    int64_t shape = t.shape[a], stride = t.stride[a];
    t.shape[a] = t.shape[b];
    t.stride[a] = t.stride[b];
    t.shape[b] = shape;
    t.stride[b] = stride;
    return t;
}

/* Offset of the row-major element `index` of `shape` in t, which broadcasts to it. */
static int64_t offset_of(const dw__tensor *t, const dw__tensor *shape, int64_t index) {
    int64_t offset = 0;
    for (int axis = shape->rank - 1; axis >= 0; axis--) {
        int own = axis - (shape->rank - t->rank);
        int64_t at = index % shape->shape[axis];
        index /= shape->shape[axis];
        if (own >= 0 && t->shape[own] != 1) offset += at * t->stride[own];
    }
    return offset;
}
static double at(const dw__tensor *t, const dw__tensor *shape, int64_t index) {
    return get(t, offset_of(t, shape, index));
}

/* ---- running ------------------------------------------------------------------------------------- */

static const dw__kernel *find_kernel(const dw__call *call) {
    static const dw__kernel *const *const lists[] = {dw__kernels_cpu_elementwise,
                                                     dw__kernels_cpu_norm, dw__kernels_cpu_data,
                                                     dw__kernels_cpu_loss};
    for (size_t i = 0; i < DW_COUNT(lists); i++)
        for (const dw__kernel *const *k = lists[i]; *k; k++)
            if ((*k)->op == call->op && (*k)->fits(call)) return *k;
    return NULL;
}

static dw_status run_once(const dw__kernel *kernel, dw__call *call) {
    void *prepared = NULL;
    if (kernel->prepare) {
        dw_status status = kernel->prepare(call, &prepared);
        if (status != DW_OK) return status;
    }
    call->prepared = prepared;
    size_t bytes = kernel->scratch_bytes ? kernel->scratch_bytes(call) : 0;
    /* 64-byte alignment, as the engine gives; guards on both sides */
    uint8_t *scratch = dw__malloc_aligned(bytes + 2 * GUARD);
    assert_non_null(scratch);
    memset(scratch, GUARD_BYTE, bytes + 2 * GUARD);
    dw_status status = kernel->run(call, scratch + GUARD);
    for (int i = 0; i < GUARD; i++) {
        assert_int_equal(scratch[i], GUARD_BYTE);
        assert_int_equal(scratch[GUARD + bytes + (size_t)i], GUARD_BYTE);
    }
    dw__free_aligned(scratch);
    dw__free(prepared);
    call->prepared = NULL;
    return status;
}

static void run_call(dw__call *call) {
    const dw__kernel *kernel = find_kernel(call);
    if (!kernel) fail_msg("no CPU kernel takes this %s", dw_op_name(call->op));
    static uint8_t *first[DW_MAX_OUTPUTS];
    for (int threads = 1; threads <= 3; threads++) {
        assert_int_equal(dw_set_threads(threads), DW_OK);
        dw_status status = run_once(kernel, call);
        if (status != DW_OK) fail_msg("%s: %s", kernel->name, dw_last_error());
        for (uint32_t i = 0; i < call->output_count; i++) {
            dw__tensor *out = &call->outputs[i];
            if (!out->data) continue;
            size_t bytes = (size_t)dw__tensor_count(out) * dw_dtype_bytes(out->dtype);
            if (threads == 1) {
                first[i] = malloc(bytes ? bytes : 1);
                memcpy(first[i], out->data, bytes);
                memset(out->data, 0xEE, bytes);
                continue;
            }
            if (memcmp(first[i], out->data, bytes) != 0)
                fail_msg("%s: %d threads give other bits", kernel->name, threads);
            if (threads == 2) memset(out->data, 0xEE, bytes);
            else free(first[i]);
        }
    }
}

static dw__call make_call(dw_op op, uint32_t attr_count, const dw_attr *attrs) {
    return (dw__call){.op = op, .attr_count = attr_count, .attrs = attrs};
}
static void add_input(dw__call *call, dw__tensor t) { call->inputs[call->input_count++] = t; }
static void add_output(dw__call *call, dw__tensor t) { call->outputs[call->output_count++] = t; }
static const dw__tensor no_tensor = {.rank = -1};

static double largest(const dw__tensor *t) {
    double max = 0.0;
    for (int64_t i = 0; i < dw__tensor_count(t); i++)
        if (isfinite(get(t, i)) && fabs(get(t, i)) > max) max = fabs(get(t, i));
    return max;
}

static void expect_near(const char *what, int64_t index, double got, double expected,
                        double bound) {
    if (isnan(expected) && isnan(got)) return;
    if (expected == got) return;
    if (!(fabs(got - expected) <= bound))
        fail_msg("%s: element %" PRId64 " is %.9g, expected %.9g, off by %.3g, bound %.3g", what,
                 index, got, expected, fabs(got - expected), bound);
}

static const double EPS = 0x1p-24; /* unit roundoff of F32 */

/* ---- elementwise --------------------------------------------------------------------------------- */

/* A body with a constant, a reused result, two outputs, in one pass; inputs broadcast in every way. */
static void check_fused(int rank, const int64_t *shape, dw__tensor a, dw__tensor b, dw__tensor c) {
    dw_attr body = dw_attr_string(DW_ATTR_KEY_BODY,
                                  "t0=mul(i0,i1);t1=add(t0,i2);t2=tanh(t1);t3=mul(t2,c0.5);"
                                  "t4=add(t3,c0.5);t5=lt(t1,i0);t6=select(t5,t4,t0);out(t6,t1)");
    dw__call call = make_call(DW_OP_FUSED, 1, &body);
    add_input(&call, a);
    add_input(&call, b);
    add_input(&call, c);
    add_output(&call, make_tensor(DW_F32, rank, shape));
    add_output(&call, make_tensor(DW_F32, rank, shape));
    run_call(&call);
    const dw__tensor *y = call.outputs;
    for (int64_t i = 0; i < dw__tensor_count(&y[0]); i++) {
        double x0 = at(&a, &y[0], i), x1 = at(&b, &y[0], i), x2 = at(&c, &y[0], i);
        double t0 = x0 * x1, t1 = t0 + x2, t4 = tanh(t1) * 0.5 + 0.5;
        double scale = fabs(t0) + fabs(x2) + 1.0;
        expect_near("fused, output 1", i, get(&y[1], i), t1, 2.0 * EPS * scale);
        if (fabs(t1 - x0) < 1e-6) continue; /* the comparison may round either way */
        expect_near("fused, output 0", i, get(&y[0], i), t1 < x0 ? t4 : t0, 4.0 * EPS * scale);
    }
    release_blocks();
}

static void test_fused_shapes(void **state) {
    (void)state;
    dw_dtype f = DW_F32;
#define R(...) random_tensor(f, -2.0, 2.0, SHAPE(__VA_ARGS__))
    check_fused(SHAPE(1), R(1), R(1), R(1));
    check_fused(SHAPE(17), R(17), R(1), R(17));
    check_fused(SHAPE(3, 1025), R(3, 1025), R(1025), R(3, 1));
    check_fused(SHAPE(41, 997), R(41, 997), R(1, 997), R(41, 1));
    check_fused(SHAPE(5, 7, 3), R(5, 7, 3), R(3), R(5, 1, 3));
    check_fused(SHAPE(257, 1), R(257, 1), R(1, 1), R(257, 1));
    check_fused(SHAPE(2, 3, 4, 130), R(2, 1, 4, 130), R(2, 3, 1, 130), R(130));
    check_fused(SHAPE(33, 65), transposed(R(65, 33), 0, 1), R(33, 65), R(33, 1));
    check_fused(SHAPE(7, 5, 300), transposed(R(5, 7, 300), 0, 1), R(300), R(7, 5, 1));
    check_fused(SHAPE(64, 1024), R(64, 1024), R(64, 1024), R(64, 1024));
    check_fused(SHAPE(0, 5), R(0, 5), R(5), R(0, 5));
    f = DW_F32;
#undef R
}

/* Every one-operand operation by itself, strided, on every float type. */
static void test_single_operations(void **state) {
    (void)state;
    static const struct {
        dw_op op;
        double (*f)(double);
    } unary[] = {{DW_OP_EXP, exp},   {DW_OP_TANH, tanh}, {DW_OP_SIN, sin},  {DW_OP_COS, cos},
                 {DW_OP_ERF, erf},   {DW_OP_ABS, fabs},  {DW_OP_FLOOR, floor},
                 {DW_OP_CEIL, ceil}, {DW_OP_LOG1P, log1p}};
    static const dw_dtype types[] = {DW_F32, DW_BF16, DW_F16, DW_F64};
    static const double roundoff[] = {0x1p-24, 0x1p-9, 0x1p-12, 0x1p-53};
    for (size_t k = 0; k < DW_COUNT(unary); k++) {
        for (size_t t = 0; t < DW_COUNT(types); t++) {
            dw__call call = make_call(unary[k].op, 0, NULL);
            dw__tensor x = random_tensor(types[t], -0.9, 2.0, SHAPE(31, 19));
            add_input(&call, transposed(x, 0, 1));
            add_output(&call, make_tensor(types[t], SHAPE(19, 31)));
            run_call(&call);
            for (int64_t i = 0; i < 19 * 31; i++) {
                double expected = unary[k].f(at(&call.inputs[0], &call.outputs[0], i));
                expect_near(dw_op_name(unary[k].op), i, get(&call.outputs[0], i), expected,
                            4.0 * roundoff[t] * fabs(expected));
            }
            release_blocks();
        }
    }
}

static int64_t floor_div(int64_t x, int64_t y) {
    int64_t q = x / y;
    return x % y != 0 && (x < 0) != (y < 0) ? q - 1 : q;
}

static void test_integers(void **state) {
    (void)state;
    static const dw_op ops[] = {DW_OP_ADD, DW_OP_SUB, DW_OP_MUL, DW_OP_DIV, DW_OP_REM,
                                DW_OP_MAX, DW_OP_LT,  DW_OP_EQ};
    for (int t = 0; t < 2; t++) {
        dw_dtype dtype = t ? DW_I64 : DW_I32;
        for (size_t k = 0; k < DW_COUNT(ops); k++) {
            bool compares = ops[k] == DW_OP_LT || ops[k] == DW_OP_EQ;
            dw__call call = make_call(ops[k], 0, NULL);
            add_input(&call, random_tensor(dtype, -50, 50, SHAPE(1031)));
            dw__tensor y = random_tensor(dtype, 1, 9, SHAPE(1031));
            for (int64_t i = 0; i < 1031; i += 3) put(&y, i, -get(&y, i));
            add_input(&call, y);
            add_output(&call, make_tensor(compares ? DW_BOOL : dtype, SHAPE(1031)));
            run_call(&call);
            for (int64_t i = 0; i < 1031; i++) {
                int64_t a = (int64_t)get(&call.inputs[0], i), b = (int64_t)get(&y, i);
                int64_t expected[] = {a + b,           a - b,
                                      a * b,           floor_div(a, b),
                                      a - b * floor_div(a, b), a > b ? a : b,
                                      a < b,           a == b};
                assert_int_equal((int64_t)get(&call.outputs[0], i), expected[k]);
            }
            release_blocks();
        }
    }
}

/* A division by zero anywhere is an error that says so, on any number of threads. */
static void test_integer_division_by_zero(void **state) {
    (void)state;
    dw__call call = make_call(DW_OP_DIV, 0, NULL);
    add_input(&call, random_tensor(DW_I32, 1, 50, SHAPE(100000)));
    dw__tensor y = random_tensor(DW_I32, 1, 50, SHAPE(100000));
    put(&y, 70001, 0.0);
    add_input(&call, y);
    add_output(&call, make_tensor(DW_I32, SHAPE(100000)));
    assert_int_equal(run_once(find_kernel(&call), &call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "zero"));
    release_blocks();
}

/* bool and half types inside a body, and every cast between two types. */
static void test_casts(void **state) {
    (void)state;
    for (int from = 0; from < DW_DTYPE_COUNT; from++) {
        for (int to = 0; to < DW_DTYPE_COUNT; to++) {
            dw_attr attr = {.key = DW_ATTR_KEY_DTYPE, .integer = to};
            dw__call call = make_call(DW_OP_CAST, 1, &attr);
            add_input(&call, random_tensor((dw_dtype)from, -100, 100, SHAPE(1, 133)));
            add_output(&call, make_tensor((dw_dtype)to, SHAPE(1, 133)));
            run_call(&call);
            dw__tensor expected = make_tensor((dw_dtype)to, SHAPE(133));
            for (int64_t i = 0; i < 133; i++) {
                put(&expected, i, get(&call.inputs[0], i));
                expect_near("cast", i, get(&call.outputs[0], i), get(&expected, i), 0.0);
            }
            release_blocks();
        }
    }
    dw_attr body = dw_attr_string(
        DW_ATTR_KEY_BODY, "t0=cast_f32(i0);t1=gt(t0,c0);t2=and(t1,i1);t3=logical_not(t2);"
                          "t4=select(t3,t0,c-1);t5=cast_bf16(t4);out(t5,t2)");
    dw__call call = make_call(DW_OP_FUSED, 1, &body);
    add_input(&call, random_tensor(DW_BF16, -3, 3, SHAPE(9, 201)));
    add_input(&call, random_tensor(DW_BOOL, 0, 1, SHAPE(9, 1)));
    add_output(&call, make_tensor(DW_BF16, SHAPE(9, 201)));
    add_output(&call, make_tensor(DW_BOOL, SHAPE(9, 201)));
    run_call(&call);
    for (int64_t i = 0; i < 9 * 201; i++) {
        double x = at(&call.inputs[0], &call.outputs[0], i);
        bool both = x > 0.0 && at(&call.inputs[1], &call.outputs[0], i) != 0.0;
        expect_near("body, bool", i, get(&call.outputs[1], i), both, 0.0);
        expect_near("body, bf16", i, get(&call.outputs[0], i), both ? -1.0 : x, 0.0);
    }
    release_blocks();
}

/* Dropout keeps exactly the elements that the generator says, at any cut of the shape. */
static void test_dropout(void **state) {
    (void)state;
    static const double ps[] = {0.0, 0.1, 0.5, 1.0};
    for (size_t k = 0; k < DW_COUNT(ps); k++) {
        dw_attr attrs[] = {dw_attr_float(DW_ATTR_KEY_P, ps[k]), dw_attr_int(DW_ATTR_KEY_STREAM, 5)};
        dw__call call = make_call(DW_OP_DROPOUT, 2, attrs);
        add_input(&call, transposed(random_tensor(DW_F32, 1, 2, SHAPE(333, 7, 31)), 0, 1));
        dw__tensor seed = make_tensor(DW_I64, SHAPE(2));
        ((int64_t *)seed.data)[0] = INT64_C(0x123456789ABCDEF);
        ((int64_t *)seed.data)[1] = 42;
        add_input(&call, seed);
        add_output(&call, make_tensor(DW_F32, SHAPE(7, 333, 31)));
        run_call(&call);
        for (int64_t i = 0; i < 7 * 333 * 31; i++) {
            double u = (double)dw__philox_uniform(INT64_C(0x123456789ABCDEF), 42, 5, (uint64_t)i);
            double x = at(&call.inputs[0], &call.outputs[0], i);
            double expected = u >= ps[k] ? x / (1.0 - ps[k]) : 0.0;
            expect_near("dropout", i, get(&call.outputs[0], i), expected, 2 * EPS * fabs(expected));
        }
        release_blocks();
    }
}

/* A tile of a product goes through a body, with bias, residual and a saved second result. */
static void test_tile(void **state) {
    (void)state;
    enum { ROWS = 37, COLUMNS = 1301 };
    dw_attr body = dw_attr_string(
        DW_ATTR_KEY_BODY, "t0=add(i0,i1);t1=gelu_tanh(t0);t2=add(t1,i2);out(t2,t0)");
    dw__call call = make_call(DW_OP_FUSED, 1, &body);
    dw__tensor product = random_tensor(DW_F32, -3, 3, SHAPE(ROWS, COLUMNS));
    dw__tensor hidden = product;
    hidden.data = NULL;
    add_input(&call, hidden);
    add_input(&call, random_tensor(DW_F32, -1, 1, SHAPE(COLUMNS)));
    add_input(&call, random_tensor(DW_F32, -1, 1, SHAPE(ROWS, COLUMNS)));
    add_output(&call, make_tensor(DW_F32, SHAPE(ROWS, COLUMNS)));
    add_output(&call, make_tensor(DW_F32, SHAPE(ROWS, COLUMNS)));
    assert_true(dw__fused_fits_tile(&call, 0));
    void *prepared = NULL;
    assert_int_equal(find_kernel(&call)->prepare(&call, &prepared), DW_OK);
    call.prepared = prepared;
    static const int64_t rows[] = {0, 5, 36, ROWS}, columns[] = {0, 64, 1200, COLUMNS};
    for (int r = 0; r < 3; r++)
        for (int c = 0; c < 3; c++)
            assert_int_equal(
                dw__fused_run_tile(&call, rows[r], rows[r + 1] - rows[r], columns[c],
                                   columns[c + 1] - columns[c], 0,
                                   (float *)product.data + rows[r] * COLUMNS + columns[c], COLUMNS),
                DW_OK);
    for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
        double t0 = get(&product, i) + at(&call.inputs[1], &product, i);
        double u = sqrt(2.0 / M_PI) * (t0 + 0.044715 * t0 * t0 * t0);
        double y = 0.5 * t0 * (1.0 + tanh(u)) + get(&call.inputs[2], i);
        expect_near("tile", i, get(&call.outputs[0], i), y, 8 * EPS * 4.0);
        expect_near("tile, saved", i, get(&call.outputs[1], i), t0, EPS * 4.0);
    }
    dw__free(prepared);
    release_blocks();
}

/* ---- norms --------------------------------------------------------------------------------------- */

/* `offset` makes the mean large beside the deviation: what a one-pass variance loses. */
static void check_norm(bool centred, bool weighted, int64_t rows, int64_t n, double offset) {
    dw_attr eps = dw_attr_float(DW_ATTR_KEY_EPS, 1e-5);
    dw__tensor x = transposed(random_tensor(DW_F32, offset - 1, offset + 1, SHAPE(3, rows, n)), 0, 1);
    dw__tensor w = random_tensor(DW_F32, 0.5, 1.5, SHAPE(n));
    dw__tensor b = random_tensor(DW_F32, -1, 1, SHAPE(n));
    dw__call call = make_call(centred ? DW_OP_LAYER_NORM : DW_OP_RMS_NORM, 1, &eps);
    add_input(&call, x);
    add_input(&call, weighted ? w : no_tensor);
    if (centred) add_input(&call, weighted ? b : no_tensor);
    add_output(&call, make_tensor(DW_F32, SHAPE(rows, 3, n)));
    dw__tensor mean = make_tensor(DW_F32, SHAPE(rows, 3));
    if (centred) add_output(&call, mean);
    dw__tensor rstd = make_tensor(DW_F32, SHAPE(rows, 3));
    add_output(&call, rstd);
    run_call(&call);

    dw__tensor dy = random_tensor(DW_F32, -1, 1, SHAPE(rows, 3, n));
    dw__call back = make_call(centred ? DW_OP_LAYER_NORM_BACKWARD : DW_OP_RMS_NORM_BACKWARD, 0, NULL);
    add_input(&back, dy);
    add_input(&back, x);
    add_input(&back, weighted ? w : no_tensor);
    if (centred) add_input(&back, mean);
    add_input(&back, rstd);
    add_output(&back, make_tensor(DW_F32, SHAPE(rows, 3, n)));
    add_output(&back, make_tensor(DW_F32, SHAPE(n)));
    if (centred) add_output(&back, make_tensor(DW_F32, SHAPE(n)));
    run_call(&back);

    const dw__tensor *y = &call.outputs[0], *dx = &back.outputs[0];
    double *dw = calloc((size_t)n, sizeof *dw), *db = calloc((size_t)n, sizeof *db);
    for (int64_t row = 0; row < rows * 3; row++) {
        double m = 0.0, variance = 0.0, mean_g = 0.0, mean_gh = 0.0;
        for (int64_t i = 0; i < n; i++) m += at(&x, y, row * n + i) / (double)n;
        if (!centred) m = 0.0;
        for (int64_t i = 0; i < n; i++) variance += pow(at(&x, y, row * n + i) - m, 2) / (double)n;
        double r = 1.0 / sqrt(variance + 1e-5);
        /* the mean's own rounding, EPS * |m|, is a shift of every centred element */
        double slack = 16 * EPS * (1.0 + fabs(m) * r + r);
        if (centred) expect_near("mean", row, get(&mean, row), m, 8 * EPS * (fabs(m) + 1.0));
        expect_near("rstd", row, get(&rstd, row), r, slack * r);
        /* backward takes the statistics that forward wrote */
        double mb = centred ? get(&mean, row) : 0.0, rb = get(&rstd, row);
        for (int64_t i = 0; i < n; i++) {
            double v = at(&x, y, row * n + i), h = (v - m) * r;
            double weight = weighted ? get(&w, i) : 1.0;
            double expected = h * weight + (weighted && centred ? get(&b, i) : 0.0);
            expect_near("norm", row * n + i, get(y, row * n + i), expected,
                        slack * (fabs(h) + 1.0) * 2.0);
            double g = get(&dy, row * n + i), hb = (v - mb) * rb;
            mean_g += g * weight / (double)n;
            mean_gh += g * weight * hb / (double)n;
            dw[i] += g * hb;
            db[i] += g;
        }
        if (!centred) mean_g = 0.0;
        for (int64_t i = 0; i < n; i++) {
            double hb = (at(&x, y, row * n + i) - mb) * rb;
            double g = get(&dy, row * n + i) * (weighted ? get(&w, i) : 1.0);
            double expected = rb * (g - mean_g - hb * mean_gh);
            expect_near("norm backward, dx", row * n + i, get(dx, row * n + i), expected,
                        16 * EPS * rb * (2.0 + fabs(hb) * (1.0 + fabs(offset) * rb)));
        }
    }
    double bound = 8 * EPS * sqrt((double)rows * 3) * (1.0 + largest(&back.outputs[1]));
    for (int64_t i = 0; i < n; i++) {
        expect_near("norm backward, dw", i, get(&back.outputs[1], i), dw[i], bound);
        if (centred) expect_near("norm backward, db", i, get(&back.outputs[2], i), db[i], bound);
    }
    free(dw);
    free(db);
    release_blocks();
}

static void test_norms(void **state) {
    (void)state;
    static const int64_t shapes[][2] = {{1, 1},  {1, 7},   {5, 16},   {3, 17},   {2, 64},
                                        {40, 65}, {67, 129}, {11, 768}, {300, 33}, {2, 4099}};
    for (size_t i = 0; i < DW_COUNT(shapes); i++)
        for (int k = 0; k < 4; k++)
            check_norm(k & 1, k & 2, shapes[i][0], shapes[i][1], i % 2 ? 0.0 : 3.0);
    check_norm(true, true, 5, 1000, 1000.0);
    check_norm(true, true, 0, 12, 0.0);
}

/* Without the outputs that nobody reads. */
static void test_norm_backward_in_part(void **state) {
    (void)state;
    for (int wanted = 0; wanted < 3; wanted++) {
        dw__call call = make_call(DW_OP_LAYER_NORM_BACKWARD, 0, NULL);
        add_input(&call, random_tensor(DW_F32, -1, 1, SHAPE(20, 37)));
        add_input(&call, random_tensor(DW_F32, -1, 1, SHAPE(20, 37)));
        add_input(&call, no_tensor);
        add_input(&call, random_tensor(DW_F32, 0, 0, SHAPE(20)));
        add_input(&call, random_tensor(DW_F32, 1, 1, SHAPE(20)));
        add_output(&call, make_tensor(DW_F32, SHAPE(20, 37)));
        add_output(&call, make_tensor(DW_F32, SHAPE(37)));
        add_output(&call, make_tensor(DW_F32, SHAPE(37)));
        for (int i = 0; i < 3; i++)
            if (i != wanted) call.outputs[i].data = NULL;
        run_call(&call);
        if (wanted == 2) {
            for (int64_t i = 0; i < 37; i++) {
                double sum = 0.0;
                for (int64_t r = 0; r < 20; r++) sum += get(&call.inputs[0], r * 37 + i);
                expect_near("db alone", i, get(&call.outputs[2], i), sum, 32 * EPS);
            }
        }
        release_blocks();
    }
}

static void check_softmax(bool logarithm, int64_t rows, int64_t n, double spread) {
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 2);
    dw__tensor x = transposed(random_tensor(DW_F32, -spread, spread, SHAPE(2, rows, n)), 0, 1);
    for (int64_t i = 0; i < n; i++) put(&x, i, -INFINITY);                   /* a row of it */
    if (n > 2 && rows > 1) put(&x, 2 * n - 1, -INFINITY);                    /* one of it */
    dw__call call = make_call(logarithm ? DW_OP_LOG_SOFTMAX : DW_OP_SOFTMAX, 1, &axis);
    add_input(&call, x);
    add_output(&call, make_tensor(DW_F32, SHAPE(rows, 2, n)));
    run_call(&call);
    dw__call back =
        make_call(logarithm ? DW_OP_LOG_SOFTMAX_BACKWARD : DW_OP_SOFTMAX_BACKWARD, 1, &axis);
    dw__tensor y = call.outputs[0], dy = random_tensor(DW_F32, -1, 1, SHAPE(rows, 2, n));
    add_input(&back, y);
    add_input(&back, dy);
    add_output(&back, make_tensor(DW_F32, SHAPE(rows, 2, n)));
    run_call(&back);
    for (int64_t row = 0; row < rows * 2; row++) {
        double max = -INFINITY, sum = 0.0, dot = 0.0;
        for (int64_t i = 0; i < n; i++) max = fmax(max, at(&x, &y, row * n + i));
        for (int64_t i = 0; i < n; i++) sum += exp(at(&x, &y, row * n + i) - max);
        for (int64_t i = 0; i < n; i++) {
            double v = at(&x, &y, row * n + i), p = exp(v - max) / sum;
            double expected = logarithm ? v - max - log(sum) : max == -INFINITY ? 0.0 : p;
            double bound = logarithm ? 4 * EPS * (fabs(v - max) + log((double)n) + 1.0)
                                     : 8 * EPS * p * (1.0 + fabs(v - max)) + 0x1p-126;
            expect_near("softmax", row * n + i, get(&y, row * n + i), expected, bound);
            double saved = get(&y, row * n + i);
            dot += get(&dy, row * n + i) * (logarithm ? 1.0 : saved);
        }
        for (int64_t i = 0; i < n; i++) {
            double saved = get(&y, row * n + i), g = get(&dy, row * n + i);
            double expected = logarithm ? g - exp(saved) * dot : saved * (g - dot);
            double scale = logarithm ? 1.0 + sqrt((double)n) * exp(saved) : saved * 2.0;
            expect_near("softmax backward", row * n + i, get(&back.outputs[0], row * n + i),
                        expected, 16 * EPS * scale * (1.0 + fabs(isfinite(saved) ? saved : 0)) + 0x1p-126);
        }
    }
    release_blocks();
}

static void test_softmax(void **state) {
    (void)state;
    static const int64_t lengths[] = {1, 3, 16, 17, 31, 64, 65, 200, 1031, 50257};
    for (size_t i = 0; i < DW_COUNT(lengths); i++) {
        int64_t rows = lengths[i] > 10000 ? 2 : 19;
        check_softmax(false, rows, lengths[i], 4.0);
        check_softmax(true, rows, lengths[i], 4.0);
        check_softmax(false, rows, lengths[i], 200.0);
    }
}

/* ---- all ------------------------------------------------------------------------------------------ */

static int run_all(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fused_shapes),
        cmocka_unit_test(test_single_operations),
        cmocka_unit_test(test_integers),
        cmocka_unit_test(test_integer_division_by_zero),
        cmocka_unit_test(test_casts),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_tile),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_norm_backward_in_part),
        cmocka_unit_test(test_softmax),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Once per instruction set, each in a process of its own: the choice is made once a process. */
int main(void) {
    int failed = 0;
    for (int isa = 0; isa < DW_ISA_COUNT; isa++) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            setenv("DEEPWELL_ISA", dw__isa_name((dw__isa)isa), 1);
            if ((int)dw__cpu_isa() != isa) exit(0); /* this CPU lacks it */
            exit(run_all());
        }
        int status = 1;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) failed = 1;
    }
    return failed;
}
