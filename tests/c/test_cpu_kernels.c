/* The CPU's elementwise, norm, data-movement and loss kernels against naive loops in double, on awkward
 * shapes and strides, on every instruction set that this CPU supports.
 *
 * Every run goes through run_call(): the kernel must support the call, gets exactly the scratch that it
 * requested, and runs on 1, 2 and 3 threads. The bits must agree, and the guard bytes around outputs and
 * scratch must be unchanged. */
#include "../ops/kernel_call.h"
#include "base/base.h"
#include "deepwell/engine.h"
#include "deepwell/threads.h"
#include "kernel/cpu/cpu.h"
#include "kernel/kernel.h"
#include "kernel/reference/primitives.h"
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

/* ---- data ------------------------------------------------------------------------------------ */

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

/* Allocates `bytes` between two guards. release_blocks() checks and frees all blocks. */
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
    while (block_count > 0) {
        uint8_t *block = blocks[--block_count];
        check_guards(block);
        free(block);
    }
}

static dw__tensor make_tensor(dw_dtype dtype, int rank, const int64_t *shape) {
    dw__tensor t = {.dtype = dtype, .rank = rank};
    for (int i = 0; i < rank; i++) t.shape[i] = shape[i];
    dw__tensor_set_contiguous(&t);
    t.data = guarded(dw__tensor_bytes(&t));
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

/* Swaps axes a and b: a strided view. */
static dw__tensor transposed(dw__tensor t, int a, int b) {
    int64_t shape = t.shape[a], stride = t.stride[a];
    t.shape[a] = t.shape[b];
    t.stride[a] = t.stride[b];
    t.shape[b] = shape;
    t.stride[b] = stride;
    return t;
}

/* Offset in t, which broadcasts to `shape`, of the row-major element `index` of `shape`. */
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

/* ---- running --------------------------------------------------------------------------------- */

static const dw__kernel *find_kernel(const dw__call *call) {
    const dw__kernel *const *k = dw__kernel_candidates(call->op, false);
    while (!kernel_supports(*k, call)) k++; /* the reference supports every call */
    return dw__kernel_is_reference(*k) ? NULL : *k;
}

static dw_status run_once(const dw__kernel *kernel, dw__call *call) {
    void *prepared = NULL;
    if (kernel->parse) {
        dw_status status = kernel->parse(call, &prepared);
        if (status != DW_OK) return status;
    }
    call->prepared = prepared;
    size_t bytes = kernel_workspace(kernel, call);
    /* aligned to 64 bytes, as by the engine; guards on both sides */
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
            size_t bytes = dw__tensor_bytes(out);
            if (threads == 1) {
                first[i] = malloc(bytes ? bytes : 1);
                memcpy(first[i], out->data, bytes);
                memset(out->data, 0xEE, bytes);
                continue;
            }
            if (memcmp(first[i], out->data, bytes) != 0)
                fail_msg("%s: %d threads give other bits", kernel->name, threads);
            if (threads == 2)
                memset(out->data, 0xEE, bytes);
            else
                free(first[i]);
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

/* ---- elementwise ----------------------------------------------------------------------------- */

/* Runs a body with a constant, a reused result and two outputs in one pass, with every kind of broadcast. */
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

/* Every operation with one operand, strided, on every float type. */
static void test_single_operations(void **state) {
    (void)state;
    static const struct {
        dw_op op;
        double (*f)(double);
    } unary[] = {{DW_OP_EXP, exp},     {DW_OP_TANH, tanh}, {DW_OP_SIN, sin},
                 {DW_OP_COS, cos},     {DW_OP_ERF, erf},   {DW_OP_ABS, fabs},
                 {DW_OP_FLOOR, floor}, {DW_OP_CEIL, ceil}, {DW_OP_LOG1P, log1p}};
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
    static const dw_op ops[] = {DW_OP_ADD, DW_OP_SUB, DW_OP_MUL, DW_OP_DIV,
                                DW_OP_REM, DW_OP_MAX, DW_OP_LT,  DW_OP_EQ};
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
                int64_t expected[] = {
                    a + b,         a - b, a * b, floor_div(a, b), a - b * floor_div(a, b),
                    a > b ? a : b, a < b, a == b};
                assert_int_equal((int64_t)get(&call.outputs[0], i), expected[k]);
            }
            release_blocks();
        }
    }
}

/* A division by zero anywhere is reported as an error, on any number of threads. */
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
    for (int from = 0; from <= DW_F64; from++) {
        for (int to = 0; to <= DW_F64; to++) {
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
    dw_attr body = dw_attr_string(DW_ATTR_KEY_BODY,
                                  "t0=cast_f32(i0);t1=gt(t0,c0);t2=and(t1,i1);t3=logical_not(t2);"
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

/* Runs one instruction alone, from memory to memory. */
static dw__tensor run_instruction(const char *instruction, dw_dtype dtype, int operands,
                                  const dw__tensor *inputs) {
    char text[80];
    snprintf(text, sizeof text, "t0=%s;out(t0)", instruction);
    dw_attr body = dw_attr_string(DW_ATTR_KEY_BODY, text);
    dw__call call = make_call(DW_OP_FUSED, 1, &body);
    for (int i = 0; i < operands; i++) add_input(&call, inputs[i]);
    add_output(&call, make_tensor(dtype, inputs[0].rank, inputs[0].shape));
    run_call(&call);
    return call.outputs[0];
}

/* A random chain in BF16 or F16 has the bits of its instructions run one by one, and the reference's bits
 * where an instruction is correctly rounded. Numbers range from ties to overflow. */
static void test_half_chains(void **state) {
    (void)state;
    enum { LENGTH = 12 };
    static const char *const forms[] = {
        "add(X,Y)",  "sub(X,Y)", "mul(X,Y)", "div(X,Y)",   "max(X,Y)",      "min(X,Y)",
        "add(X,C)",  "mul(X,C)", "sub(C,X)", "abs(X)",     "neg(X)",        "sqrt(X)",
        "pow(X,c2)", "floor(X)", "exp(X)",   "sigmoid(X)", "select(i2,X,Y)"};
    enum { CORRECTLY_ROUNDED = 14 };
    static const double constants[] = {256, 0.1, 1.0 / 3.0, 100, 3e4, 1e-6, -2.5};
    static const dw_dtype types[] = {DW_BF16, DW_F16};
    for (int round = 0; round < 24; round++) {
        dw_dtype dtype = types[round % 2];
        dw__tensor values[2 + LENGTH], flag = random_tensor(DW_BOOL, 0, 1, SHAPE(3, 131));
        for (int i = 0; i < 2; i++) values[i] = random_tensor(dtype, -300, 300, SHAPE(3, 131));
        char text[1024];
        int used = 0;
        bool exact = round % 4 < 2; /* correctly rounded instructions only */
        for (int t = 0; t < LENGTH; t++) {
            const char *form = forms[random_bits() % (exact ? CORRECTLY_ROUNDED : DW_COUNT(forms))];
            double constant = constants[random_bits() % DW_COUNT(constants)];
            char chain[64] = "", single[64] = "";
            dw__tensor operands[3] = {[2] = flag};
            for (const char *c = form; *c; c++) {
                size_t at = strlen(chain), by = strlen(single);
                if (*c == 'X' || *c == 'Y') {
                    /* X is usually the previous result, so that chains are long. */
                    int any = (int)(random_bits() % (uint64_t)(t + 2));
                    int from = *c == 'X' && t > 0 ? t + 1 : any;
                    operands[*c - 'X'] = values[from];
                    if (*c == 'X') operands[1] = values[from];
                    snprintf(chain + at, sizeof chain - at, "%c%d", from < 2 ? 'i' : 't',
                             from < 2 ? from : from - 2);
                    snprintf(single + by, sizeof single - by, "i%d", *c - 'X');
                } else if (*c == 'C') {
                    snprintf(chain + at, sizeof chain - at, "c%.17g", constant);
                    snprintf(single + by, sizeof single - by, "c%.17g", constant);
                } else {
                    snprintf(chain + at, sizeof chain - at, "%c", *c);
                    snprintf(single + by, sizeof single - by, "%c", *c);
                }
            }
            used += snprintf(text + used, sizeof text - (size_t)used, "t%d=%s;", t, chain);
            values[2 + t] = run_instruction(single, dtype, 3, operands);
        }
        snprintf(text + used, sizeof text - (size_t)used, "out(t%d)", LENGTH - 1);
        dw_attr body = dw_attr_string(DW_ATTR_KEY_BODY, text);
        dw__call call = make_call(DW_OP_FUSED, 1, &body);
        add_input(&call, values[0]);
        add_input(&call, values[1]);
        add_input(&call, flag);
        add_output(&call, make_tensor(dtype, SHAPE(3, 131)));
        run_call(&call);
        for (int64_t i = 0; i < 3 * 131; i++)
            expect_near(text, i, get(&call.outputs[0], i), get(&values[LENGTH + 1], i), 0.0);
        if (exact) {
            assert_int_equal(dw__reference_fused(&call, NULL), DW_OK);
            for (int64_t i = 0; i < 3 * 131; i++)
                expect_near(text, i, get(&call.outputs[0], i), get(&values[LENGTH + 1], i), 0.0);
        }
        release_blocks();
    }
}

/* Dropout keeps exactly the elements that the generator selects, for every division of the shape. */
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

/* A tile of a GEMM goes through a body with bias, residual and a saved second result. */
static void test_tile(void **state) {
    (void)state;
    enum { ROWS = 37, COLUMNS = 1301 };
    dw_attr body =
        dw_attr_string(DW_ATTR_KEY_BODY, "t0=add(i0,i1);t1=gelu_tanh(t0);t2=add(t1,i2);out(t2,t0)");
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
    assert_int_equal(find_kernel(&call)->parse(&call, &prepared), DW_OK);
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

/* ---- norms ----------------------------------------------------------------------------------- */

/* `offset` makes the mean large compared with the deviation, which breaks a one-pass variance. */
static void check_norm(bool centred, bool weighted, int64_t rows, int64_t n, double offset) {
    dw_attr eps = dw_attr_float(DW_ATTR_KEY_EPS, 1e-5);
    dw__tensor x =
        transposed(random_tensor(DW_F32, offset - 1, offset + 1, SHAPE(3, rows, n)), 0, 1);
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
    dw__call back =
        make_call(centred ? DW_OP_LAYER_NORM_BACKWARD : DW_OP_RMS_NORM_BACKWARD, 0, NULL);
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
        /* backward reads the statistics that forward wrote */
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
    static const int64_t shapes[][2] = {{1, 1},   {1, 7},    {5, 16},   {3, 17},   {2, 64},
                                        {40, 65}, {67, 129}, {11, 768}, {300, 33}, {2, 4099}};
    for (size_t i = 0; i < DW_COUNT(shapes); i++)
        for (int k = 0; k < 4; k++)
            check_norm(k & 1, k & 2, shapes[i][0], shapes[i][1], i % 2 ? 0.0 : 3.0);
    check_norm(true, true, 5, 1000, 1000.0);
    check_norm(true, true, 0, 12, 0.0);
}

/* Rows of 768 numbers whose squares, or whose mean's square, overflow F32: every kernel and the reference
 * give PyTorch's results. */
static void test_norms_of_huge_rows(void **state) {
    (void)state;
    enum { N = 768, ROWS = 4 };
    static const double low[ROWS] = {-1e15, -3e18, 2e19, 0.5e25},
                        high[ROWS] = {1e15, 3e18, 2e19, 1e25};
    dw_attr eps = dw_attr_float(DW_ATTR_KEY_EPS, 1e-5);
    for (int centred = 0; centred < 2; centred++) {
        dw_op op = centred ? DW_OP_LAYER_NORM : DW_OP_RMS_NORM;
        dw__tensor x = make_tensor(DW_F32, SHAPE(ROWS, N));
        for (int64_t i = 0; i < ROWS * N; i++) put(&x, i, uniform(low[i / N], high[i / N]));
        dw__call call = make_call(op, 1, &eps);
        add_input(&call, x);
        add_input(&call, no_tensor);
        if (centred) add_input(&call, no_tensor);
        add_output(&call, make_tensor(DW_F32, SHAPE(ROWS, N)));
        if (centred) add_output(&call, make_tensor(DW_F32, SHAPE(ROWS)));
        add_output(&call, make_tensor(DW_F32, SHAPE(ROWS)));
        const dw__tensor *y = &call.outputs[0], *rstd = &call.outputs[centred ? 2 : 1];
        const dw__kernel *const *kernels = dw__kernel_candidates(op, false);
        for (; *kernels; kernels++) {
            if ((*kernels)->supports && !kernel_supports(*kernels, &call)) continue;
            assert_int_equal(run_once(*kernels, &call), DW_OK);
            assert_true(get(rstd, 0) > 1e-16 && fabs(get(y, 0)) > 0.0);
            assert_true(get(rstd, 1) == 0.0 && get(y, N) == 0.0);
            for (int row = 2; row < ROWS; row++) {
                assert_true(centred ? isnan(get(rstd, row)) : get(rstd, row) == 0.0);
                assert_true(centred ? isnan(get(y, row * N)) : get(y, row * N) == 0.0);
            }
        }
        release_blocks();
    }
}

/* The outputs that nobody reads are absent. */
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
    for (int64_t i = 0; i < n; i++) put(&x, i, -INFINITY); /* a row of logits */
    if (n > 2 && rows > 1) put(&x, 2 * n - 1, -INFINITY);  /* one number per row */
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
            double bound =
                logarithm ? 4 * EPS * (fabs(v - max) + log((double)n) + 1.0)
                          : 8 * EPS * p * (1.0 + fabs(v - max) + sqrt((double)n) / 16) + 0x1p-126;
            expect_near("softmax", row * n + i, get(&y, row * n + i), expected, bound);
            double saved = get(&y, row * n + i);
            dot += get(&dy, row * n + i) * (logarithm ? 1.0 : saved);
        }
        for (int64_t i = 0; i < n; i++) {
            double saved = get(&y, row * n + i), g = get(&dy, row * n + i);
            double expected = logarithm ? g - exp(saved) * dot : saved * (g - dot);
            double scale = logarithm ? 1.0 + sqrt((double)n) * exp(saved) : saved * 2.0;
            expect_near("softmax backward", row * n + i, get(&back.outputs[0], row * n + i),
                        expected,
                        16 * EPS * scale * (1.0 + fabs(isfinite(saved) ? saved : 0)) + 0x1p-126);
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

/* ---- data movement --------------------------------------------------------------------------- */

static dw_attr list_attr(dw_attr_key key, int count, const int64_t *list) {
    return dw_attr_list(key, (uint32_t)count, list);
}

static void expect_same(const char *what, const dw__tensor *got, int64_t i, double expected) {
    expect_near(what, i, get(got, i), expected, 0.0);
}

static void check_permute(dw_dtype dtype, int rank, const int64_t *shape, const int64_t *perm) {
    dw_attr attr = list_attr(DW_ATTR_KEY_PERM, rank, perm);
    dw__call call = make_call(DW_OP_PERMUTE, 1, &attr);
    dw__tensor x = random_tensor(dtype, -100, 100, rank, shape), view = x;
    int64_t out[DW_MAX_RANK];
    for (int i = 0; i < rank; i++) {
        out[i] = view.shape[i] = shape[perm[i]];
        view.stride[i] = x.stride[perm[i]];
    }
    add_input(&call, x);
    add_output(&call, make_tensor(dtype, rank, out));
    run_call(&call);
    for (int64_t i = 0; i < dw__tensor_count(&x); i++)
        expect_same("permute", &call.outputs[0], i, at(&view, &call.outputs[0], i));
    release_blocks();
}

static void test_permute(void **state) {
    (void)state;
    static const dw_dtype types[] = {DW_BOOL, DW_BF16, DW_F32, DW_I64};
    for (size_t t = 0; t < DW_COUNT(types); t++) {
        check_permute(types[t], SHAPE(1, 1), (const int64_t[]){1, 0});
        check_permute(types[t], SHAPE(16, 16), (const int64_t[]){1, 0});
        check_permute(types[t], SHAPE(37, 129), (const int64_t[]){1, 0});
        check_permute(types[t], SHAPE(300, 5), (const int64_t[]){1, 0});
        check_permute(types[t], SHAPE(3, 65, 7, 33), (const int64_t[]){0, 2, 1, 3});
        check_permute(types[t], SHAPE(3, 65, 7, 33), (const int64_t[]){0, 2, 3, 1});
        check_permute(types[t], SHAPE(5, 9, 17, 2), (const int64_t[]){3, 1, 2, 0});
        check_permute(types[t], SHAPE(2, 20000), (const int64_t[]){1, 0});
        check_permute(types[t], SHAPE(0, 3), (const int64_t[]){1, 0});
    }
}

/* All operands are strided: x is a transposed view. */
static void test_slice_pad_concat(void **state) {
    (void)state;
    static const dw_dtype types[] = {DW_BOOL, DW_F16, DW_I32, DW_F64};
    for (size_t k = 0; k < DW_COUNT(types); k++) {
        dw__tensor x = transposed(random_tensor(types[k], -100, 100, SHAPE(31, 4, 19)), 0, 2);
        /* slice: [19, 4, 31] -> [3.., 1.., 30 down by 4] */
        static const int64_t start[] = {2, 1, 3}, limit[] = {19, 4, 30}, step[] = {3, 1, 4};
        dw_attr attrs[] = {list_attr(DW_ATTR_KEY_START, 3, start),
                           list_attr(DW_ATTR_KEY_LIMIT, 3, limit),
                           list_attr(DW_ATTR_KEY_STEP, 3, step)};
        dw__call call = make_call(DW_OP_SLICE, 3, attrs);
        add_input(&call, x);
        add_output(&call, make_tensor(types[k], SHAPE(6, 3, 7)));
        run_call(&call);
        for (int64_t i = 0; i < 6 * 3 * 7; i++) {
            int64_t a = i / 21, b = i / 7 % 3, c = i % 7;
            int64_t from = ((2 + 3 * a) * 4 + 1 + b) * 31 + 3 + 4 * c;
            expect_same("slice", &call.outputs[0], i, at(&x, &x, from));
        }
        /* pad */
        static const int64_t low[] = {2, 0, 1}, high[] = {0, 3, 5};
        dw_attr pads[] = {list_attr(DW_ATTR_KEY_LOW, 3, low), list_attr(DW_ATTR_KEY_HIGH, 3, high),
                          dw_attr_float(DW_ATTR_KEY_VALUE, 1.0)};
        dw__call padded = make_call(DW_OP_PAD, 3, pads);
        add_input(&padded, x);
        add_output(&padded, make_tensor(types[k], SHAPE(21, 7, 37)));
        run_call(&padded);
        for (int64_t i = 0; i < 21 * 7 * 37; i++) {
            int64_t a = i / (7 * 37) - 2, b = i / 37 % 7, c = i % 37 - 1;
            bool inside = a >= 0 && a < 19 && b < 4 && c >= 0 && c < 31;
            expect_same("pad", &padded.outputs[0], i,
                        inside ? at(&x, &x, (a * 4 + b) * 31 + c) : 1.0);
        }
        /* concat along the middle axis, one operand empty */
        dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 1);
        dw__call joined = make_call(DW_OP_CONCAT, 1, &axis);
        dw__tensor y = random_tensor(types[k], -100, 100, SHAPE(19, 2, 31));
        add_input(&joined, x);
        add_input(&joined, make_tensor(types[k], SHAPE(19, 0, 31)));
        add_input(&joined, y);
        add_output(&joined, make_tensor(types[k], SHAPE(19, 6, 31)));
        run_call(&joined);
        for (int64_t i = 0; i < 19 * 6 * 31; i++) {
            int64_t a = i / (6 * 31), b = i / 31 % 6, c = i % 31;
            expect_same("concat", &joined.outputs[0], i,
                        b < 4 ? at(&x, &x, (a * 4 + b) * 31 + c)
                              : get(&y, (a * 2 + b - 4) * 31 + c));
        }
        release_blocks();
    }
}

static void test_broadcast_reshape_iota(void **state) {
    (void)state;
    dw__call call = make_call(DW_OP_BROADCAST, 0, NULL);
    add_input(&call, random_tensor(DW_F32, -1, 1, SHAPE(7, 1, 33)));
    add_output(&call, make_tensor(DW_F32, SHAPE(3, 7, 5, 33)));
    run_call(&call);
    for (int64_t i = 0; i < 3 * 7 * 5 * 33; i++)
        expect_same("broadcast", &call.outputs[0], i, at(&call.inputs[0], &call.outputs[0], i));
    dw__call flat = make_call(DW_OP_RESHAPE, 0, NULL);
    dw__tensor x = transposed(random_tensor(DW_F32, -1, 1, SHAPE(40, 50)), 0, 1);
    add_input(&flat, x);
    add_output(&flat, make_tensor(DW_F32, SHAPE(2000)));
    run_call(&flat);
    for (int64_t i = 0; i < 2000; i++) expect_same("reshape", &flat.outputs[0], i, at(&x, &x, i));
    release_blocks();
    for (int axis = 0; axis < 3; axis++) {
        static const int64_t sizes[] = {5, 7, 11};
        for (int t = 0; t <= DW_F64; t++) {
            if (t == DW_BOOL) continue;
            dw_attr attr = dw_attr_int(DW_ATTR_KEY_AXIS, axis);
            dw__call iota = make_call(DW_OP_IOTA, 1, &attr);
            add_output(&iota, make_tensor((dw_dtype)t, 3, sizes));
            run_call(&iota);
            for (int64_t i = 0; i < 5 * 7 * 11; i++) {
                int64_t index[] = {i / 77, i / 11 % 7, i % 11};
                expect_same("iota", &iota.outputs[0], i, (double)index[axis]);
            }
            dw_attr value = dw_attr_float(DW_ATTR_KEY_VALUE, 3.0);
            dw__call constant = make_call(DW_OP_CONSTANT, 1, &value);
            add_output(&constant, make_tensor((dw_dtype)t, SHAPE(3, 77)));
            run_call(&constant);
            for (int64_t i = 0; i < 3 * 77; i++)
                expect_same("constant", &constant.outputs[0], i, 3.0);
            release_blocks();
        }
    }
}

/* ---- indices --------------------------------------------------------------------------------- */

static dw__tensor random_indices(dw_dtype dtype, int64_t bound, int rank, const int64_t *shape) {
    dw__tensor t = make_tensor(dtype, rank, shape);
    for (int64_t i = 0; i < dw__tensor_count(&t); i++)
        put(&t, i, (double)(random_bits() % (uint64_t)bound));
    return t;
}

static void check_take(dw_dtype dtype, int64_t before, int64_t bound, int64_t after) {
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 1);
    dw__call call = make_call(DW_OP_TAKE, 1, &axis);
    dw__tensor x = random_tensor(dtype, -100, 100, SHAPE(before, bound, after));
    dw__tensor index = transposed(random_indices(DW_I64, bound, SHAPE(9, 13)), 0, 1);
    add_input(&call, x);
    add_input(&call, index);
    add_output(&call, make_tensor(dtype, SHAPE(before, 13, 9, after)));
    run_call(&call);
    for (int64_t i = 0; i < before * 117 * after; i++) {
        int64_t b = i / (117 * after), t = i / after % 117, c = i % after;
        int64_t row = (int64_t)at(&index, &index, t);
        expect_same("take", &call.outputs[0], i, get(&x, (b * bound + row) * after + c));
    }
    release_blocks();
}

static void test_take(void **state) {
    (void)state;
    check_take(DW_F32, 1, 50, 33);
    check_take(DW_BF16, 3, 7, 1);
    check_take(DW_BOOL, 2, 100, 17);
    check_take(DW_I64, 1, 1, 300);
}

/* Many updates of few rows, in index order; padding_index excludes one row. */
static void check_scatter(int64_t before, int64_t bound, int64_t after, bool embedding) {
    int64_t padding = bound / 2;
    dw_attr attrs[] = {embedding ? dw_attr_int(DW_ATTR_KEY_PADDING_INDEX, padding)
                                 : dw_attr_int(DW_ATTR_KEY_AXIS, 1),
                       list_attr(DW_ATTR_KEY_SIZE, 1, &bound)};
    dw__call call = make_call(embedding ? DW_OP_EMBEDDING_BACKWARD : DW_OP_SCATTER_ADD, 2, attrs);
    dw__tensor index = random_indices(DW_I64, bound, SHAPE(7, 29));
    dw__tensor u = embedding ? random_tensor(DW_F32, -1, 1, SHAPE(7, 29, after))
                             : random_tensor(DW_F32, -1, 1, SHAPE(before, 7, 29, after));
    add_input(&call, index);
    add_input(&call, u);
    add_output(&call, embedding ? make_tensor(DW_F32, SHAPE(bound, after))
                                : make_tensor(DW_F32, SHAPE(before, bound, after)));
    run_call(&call);
    for (int64_t i = 0; i < before * bound * after; i++) {
        int64_t b = i / (bound * after), row = i / after % bound, c = i % after;
        double sum = 0.0, size = 0.0;
        for (int64_t t = 0; t < 7 * 29; t++) {
            if ((int64_t)get(&index, t) != row || (embedding && row == padding)) continue;
            sum += get(&u, (b * 7 * 29 + t) * after + c);
            size += 1.0;
        }
        expect_near("scatter", i, get(&call.outputs[0], i), sum, EPS * size * size);
    }
    release_blocks();
}

static void test_scatter(void **state) {
    (void)state;
    check_scatter(1, 50, 33, true);
    check_scatter(1, 3, 700, true);
    check_scatter(2, 17, 5, false);
    check_scatter(1, 1000, 1, false);
}

static void test_index_outside(void **state) {
    (void)state;
    dw__call call = make_call(DW_OP_EMBEDDING, 0, NULL);
    add_input(&call, random_tensor(DW_F32, -1, 1, SHAPE(10, 4)));
    dw__tensor index = random_indices(DW_I64, 10, SHAPE(6));
    put(&index, 4, 10.0);
    add_input(&call, index);
    add_output(&call, random_tensor(DW_F32, 7, 7, SHAPE(6, 4)));
    assert_int_equal(run_once(find_kernel(&call), &call), DW_INDEX);
    assert_non_null(strstr(dw_last_error(), "10"));
    for (int64_t i = 0; i < 24; i++) expect_same("untouched", &call.outputs[0], i, 7.0);
    release_blocks();
}

/* ---- reductions ------------------------------------------------------------------------------ */

static void check_reduce(dw_op op, dw__tensor x, int axis_count, const int64_t *axes) {
    dw_attr attrs[] = {list_attr(DW_ATTR_KEY_AXES, axis_count, axes),
                       dw_attr_int(DW_ATTR_KEY_KEEP, 1)};
    dw__call call = make_call(op, 2, attrs);
    int64_t shape[DW_MAX_RANK], n = 1;
    memcpy(shape, x.shape, sizeof shape);
    for (int i = 0; i < axis_count; i++) {
        n *= shape[axes[i]];
        shape[axes[i]] = 1;
    }
    add_input(&call, x);
    add_output(&call, make_tensor(DW_F32, x.rank, shape));
    run_call(&call);
    const dw__tensor *y = &call.outputs[0];
    int64_t count = dw__tensor_count(y);
    double *expected = malloc((size_t)count * sizeof *expected);
    for (int64_t i = 0; i < count; i++)
        expected[i] = op == DW_OP_REDUCE_MAX ? -INFINITY : op == DW_OP_REDUCE_MIN ? INFINITY : 0.0;
    for (int64_t i = 0; i < dw__tensor_count(&x); i++) {
        double value = at(&x, &x, i), *e = &expected[offset_of(y, &x, i)];
        if (op == DW_OP_REDUCE_MAX)
            *e = value > *e || isnan(value) ? value : *e;
        else if (op == DW_OP_REDUCE_MIN)
            *e = value < *e || isnan(value) ? value : *e;
        else
            *e += value;
    }
    for (int64_t i = 0; i < count; i++) {
        double e = op == DW_OP_MEAN ? expected[i] / (double)n : expected[i];
        bool exact = op == DW_OP_REDUCE_MAX || op == DW_OP_REDUCE_MIN;
        /* |x| <= 1, so partial sums are about sqrt(n); at most 32 + 4 + 64 additions in turn */
        double bound = 16.0 * EPS * (sqrt((double)n) + fabs(expected[i]));
        expect_near(dw_op_name(op), i, get(y, i), e,
                    exact              ? 0.0
                    : op == DW_OP_MEAN ? bound / (double)n
                                       : bound);
    }
    free(expected);
    release_blocks();
}

static void test_reduce(void **state) {
    (void)state;
    static const dw_op ops[] = {DW_OP_REDUCE_SUM, DW_OP_REDUCE_MAX, DW_OP_REDUCE_MIN, DW_OP_MEAN};
#define R(...) random_tensor(DW_F32, -1, 1, SHAPE(__VA_ARGS__))
#define AXES(...)                                                                                  \
    (int)DW_COUNT(((const int64_t[]){__VA_ARGS__})), (const int64_t[]) { __VA_ARGS__ }
    for (size_t k = 0; k < DW_COUNT(ops); k++) {
        check_reduce(ops[k], R(37, 129), AXES(1));
        check_reduce(ops[k], R(37, 129), AXES(0));
        check_reduce(ops[k], R(1000, 1), AXES(0));
        check_reduce(ops[k], R(1, 5), AXES(0));
        check_reduce(ops[k], R(2051, 67), AXES(0));
        check_reduce(ops[k], R(3, 700, 519), AXES(0, 1));
        check_reduce(ops[k], R(300001), AXES(0));
        check_reduce(ops[k], R(4, 9, 33, 5), AXES(0, 2));
        check_reduce(ops[k], R(4, 9, 33, 5), AXES(1, 3));
        check_reduce(ops[k], R(4, 9, 33, 5), AXES(0, 1, 2, 3));
        check_reduce(ops[k], R(2, 9, 20000), AXES(0, 2));
        check_reduce(ops[k], transposed(R(65, 33, 7), 0, 2), AXES(0));
        check_reduce(ops[k], transposed(R(65, 33, 7), 0, 2), AXES(1, 2));
        check_reduce(ops[k], transposed(R(65, 333), 0, 1), AXES(1));
        if (ops[k] != DW_OP_MEAN) check_reduce(ops[k], R(0, 33), AXES(0));
        dw__tensor x = R(40, 70);
        put(&x, 99, NAN);
        check_reduce(ops[k], x, AXES(0));
        x = R(40, 70);
        put(&x, 99, NAN);
        check_reduce(ops[k], x, AXES(1));
    }
}

static void test_cumsum(void **state) {
    (void)state;
    static const dw_dtype types[] = {DW_F32, DW_I32, DW_I64};
    for (int k = 0; k < 12; k++) {
        int axis = k & 1, reverse = k >> 1 & 1;
        dw_dtype dtype = types[k / 4];
        dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_AXIS, axis),
                           dw_attr_int(DW_ATTR_KEY_REVERSE, reverse)};
        dw__call call = make_call(DW_OP_CUMSUM, 2, attrs);
        dw__tensor x = transposed(random_tensor(dtype, -9, 9, SHAPE(71, 43)), 0, 1);
        add_input(&call, x);
        add_output(&call, make_tensor(dtype, SHAPE(43, 71)));
        run_call(&call);
        for (int64_t i = 0; i < 43 * 71; i++) {
            int64_t index[2] = {i / 71, i % 71}, size[2] = {43, 71};
            double sum = 0.0;
            for (int64_t j = 0; j < size[axis]; j++) {
                if (reverse ? j < index[axis] : j > index[axis]) continue;
                int64_t from[2] = {index[0], index[1]};
                from[axis] = j;
                sum += at(&x, &x, from[0] * 71 + from[1]);
            }
            expect_near("cumsum", i, get(&call.outputs[0], i), sum,
                        dtype == DW_F32 ? EPS * 700.0 : 0.0);
        }
        release_blocks();
    }
}

/* ---- rotary embedding ------------------------------------------------------------------------ */

static void check_rope(int64_t d, int64_t turned, bool interleaved, bool adjoint, bool per_batch) {
    dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_INTERLEAVED, interleaved),
                       dw_attr_int(DW_ATTR_KEY_TRANSPOSED, adjoint)};
    dw__call call = make_call(DW_OP_ROPE, 2, attrs);
    dw__tensor x = transposed(random_tensor(DW_F32, -1, 1, SHAPE(3, 11, 5, d)), 1, 2);
    int64_t batch = per_batch ? 3 : 1;
    dw__tensor c = random_tensor(DW_F32, -1, 1, SHAPE(batch, 1, 11, turned));
    dw__tensor s = random_tensor(DW_F32, -1, 1, SHAPE(batch, 1, 11, turned));
    add_input(&call, x);
    add_input(&call, c);
    add_input(&call, s);
    add_output(&call, make_tensor(DW_F32, SHAPE(3, 5, 11, d)));
    run_call(&call);
    const dw__tensor *y = &call.outputs[0];
    for (int64_t row = 0; row < 3 * 5 * 11; row++) {
        int64_t table = (per_batch ? row / 55 * 11 : 0) * turned + row % 11 * turned;
        for (int64_t i = 0; i < d; i++) {
            double v = at(&x, y, row * d + i), expected = v;
            if (i < turned) {
                int64_t half = turned / 2;
                bool first = interleaved ? i % 2 == 0 : i < half;
                int64_t other = interleaved ? i ^ 1 : first ? i + half : i - half;
                double w = at(&x, y, row * d + other);
                double sine = get(&s, table + (adjoint ? other : i));
                double sign = first == adjoint ? 1.0 : -1.0;
                expected = v * get(&c, table + i) + sign * w * sine;
            }
            expect_near("rope", row * d + i, get(y, row * d + i), expected, 3.0 * EPS);
        }
    }
    release_blocks();
}

static void test_rope(void **state) {
    (void)state;
    for (int k = 0; k < 8; k++) {
        check_rope(64, 64, k & 1, k & 2, k & 4);
        check_rope(80, 18, k & 1, k & 2, k & 4);
        check_rope(2, 2, k & 1, k & 2, k & 4);
        check_rope(131, 130, k & 1, k & 2, k & 4);
    }
}

/* ---- losses ---------------------------------------------------------------------------------- */

static void check_cross_entropy(const char *reduction, int64_t rows, int64_t classes,
                                double smoothing, bool all_ignored) {
    bool none = strcmp(reduction, "none") == 0, mean = strcmp(reduction, "mean") == 0;
    dw_attr attrs[] = {dw_attr_string(DW_ATTR_KEY_REDUCTION, reduction),
                       dw_attr_int(DW_ATTR_KEY_IGNORE_INDEX, -7),
                       dw_attr_float(DW_ATTR_KEY_LABEL_SMOOTHING, smoothing)};
    dw__tensor x = random_tensor(DW_F32, -8, 8, SHAPE(rows, classes + 3));
    x.shape[1] = classes; /* rows lie further apart than they are long */
    dw__tensor target = random_indices(DW_I64, classes, SHAPE(rows));
    double counted = 0.0;
    for (int64_t i = 0; i < rows; i++) {
        if (i % 5 == 3 || all_ignored)
            put(&target, i, -7.0);
        else
            counted += 1.0;
    }
    dw__call call = make_call(DW_OP_CROSS_ENTROPY, 3, attrs);
    add_input(&call, x);
    add_input(&call, target);
    add_output(&call, none ? make_tensor(DW_F32, SHAPE(rows)) : make_tensor(DW_F32, 0, NULL));
    add_output(&call, make_tensor(DW_F32, SHAPE(rows)));
    run_call(&call);
    dw__tensor lse = call.outputs[1], dloss = none ? random_tensor(DW_F32, -1, 1, SHAPE(rows))
                                                   : random_tensor(DW_F32, -1, 1, 0, NULL);
    dw__call back = make_call(DW_OP_CROSS_ENTROPY_BACKWARD, 3, attrs);
    add_input(&back, x);
    add_input(&back, target);
    add_input(&back, lse);
    add_input(&back, dloss);
    add_output(&back, make_tensor(DW_F32, SHAPE(rows, classes)));
    run_call(&back);
    double total = 0.0;
    for (int64_t row = 0; row < rows; row++) {
        double max = -INFINITY, sum = 0.0, plain = 0.0;
        for (int64_t i = 0; i < classes; i++) max = fmax(max, at(&x, &x, row * classes + i));
        for (int64_t i = 0; i < classes; i++) {
            sum += exp(at(&x, &x, row * classes + i) - max);
            plain += at(&x, &x, row * classes + i);
        }
        double reference = max + log(sum);
        expect_near("lse", row, get(&lse, row), reference, 4.0 * EPS * (fabs(reference) + 1.0));
        int64_t label = (int64_t)get(&target, row);
        double loss = 0.0;
        if (label >= 0)
            loss = (1.0 - smoothing) * (reference - at(&x, &x, row * classes + label)) +
                   smoothing * (reference - plain / (double)classes);
        total += loss;
        if (none) expect_near("loss", row, get(&call.outputs[0], row), loss, 4.0 * EPS * 24.0);
        double weight = get(&dloss, none ? row : 0) / (mean ? counted : 1.0);
        for (int64_t i = 0; i < classes; i++) {
            double p = exp(at(&x, &x, row * classes + i) - get(&lse, row)), expected = 0.0;
            if (label >= 0)
                expected =
                    (p - smoothing / (double)classes - (i == label ? 1.0 - smoothing : 0.0)) *
                    weight;
            /* the argument of exp, up to 16 or so, is rounded once */
            expect_near("cross_entropy_backward", row * classes + i,
                        get(&back.outputs[0], row * classes + i), expected,
                        fabs(weight) * EPS * (32.0 * p + 4.0 * smoothing) +
                            2.0 * EPS * fabs(expected));
        }
    }
    double expected = mean ? total / counted : total;
    if (!none)
        expect_near("loss", 0, get(&call.outputs[0], 0), expected,
                    4.0 * EPS * (mean ? 24.0 : 24.0 * (double)rows));
    release_blocks();
}

static void test_cross_entropy(void **state) {
    (void)state;
    static const char *const reductions[] = {"mean", "sum", "none"};
    for (int k = 0; k < 3; k++) {
        for (int s = 0; s < 2; s++) {
            double smoothing = s ? 0.1 : 0.0;
            check_cross_entropy(reductions[k], 1, 1, smoothing, false);
            check_cross_entropy(reductions[k], 9, 17, smoothing, false);
            check_cross_entropy(reductions[k], 301, 65, smoothing, false);
            check_cross_entropy(reductions[k], 5, 50257, smoothing, false);
            check_cross_entropy(reductions[k], 6, 2049, smoothing, true);
        }
    }
}

static void test_target_outside(void **state) {
    (void)state;
    dw__call call = make_call(DW_OP_CROSS_ENTROPY, 0, NULL);
    add_input(&call, random_tensor(DW_F32, -1, 1, SHAPE(6, 10)));
    dw__tensor target = random_indices(DW_I64, 10, SHAPE(6));
    put(&target, 3, 10.0);
    add_input(&call, target);
    add_output(&call, random_tensor(DW_F32, 7, 7, 0, NULL));
    add_output(&call, random_tensor(DW_F32, 7, 7, SHAPE(6)));
    assert_int_equal(run_once(find_kernel(&call), &call), DW_INDEX);
    assert_non_null(strstr(dw_last_error(), "row 3 is 10"));
    expect_same("untouched", &call.outputs[0], 0, 7.0);
    for (int64_t i = 0; i < 6; i++) expect_same("untouched", &call.outputs[1], i, 7.0);
    release_blocks();
}

/* ---- AdamW ----------------------------------------------------------------------------------- */

typedef struct adamw_reference {
    double p, m, v;
} adamw_reference;

static adamw_reference adamw(adamw_reference s, double g, const dw_adamw_options *o) {
    g *= o->maximize ? -o->grad_scale : o->grad_scale;
    s.p *= 1.0 - o->lr * o->weight_decay;
    s.m = o->beta1 * s.m + (1.0 - o->beta1) * g;
    s.v = o->beta2 * s.v + (1.0 - o->beta2) * g * g;
    double m_hat = s.m / (1.0 - pow(o->beta1, (double)o->step));
    double v_hat = s.v / (1.0 - pow(o->beta2, (double)o->step));
    s.p -= o->lr * m_hat / (sqrt(v_hat) + o->eps);
    return s;
}

/* Many tensors, some empty, some longer than a task; three steps; the same bits on any number of threads. */
static void test_adamw_step(void **state) {
    (void)state;
    enum { TENSORS = 7 };
    static const int64_t counts[TENSORS] = {1, 0, 17, 40000, 3, 16384, 100};
    static float *first[TENSORS];
    for (int threads = 1; threads <= 3; threads++) {
        assert_int_equal(dw_set_threads(threads), DW_OK);
        random_state = 12345;
        dw_adamw_tensor tensors[TENSORS];
        adamw_reference *references[TENSORS];
        for (int t = 0; t < TENSORS; t++) {
            int64_t n = counts[t];
            float *p = guarded((size_t)n * 4), *m = guarded((size_t)n * 4);
            float *v = guarded((size_t)n * 4), *g = guarded((size_t)n * 4);
            references[t] = malloc((size_t)(n + 1) * sizeof **references);
            for (int64_t i = 0; i < n; i++) {
                p[i] = (float)uniform(-1, 1);
                m[i] = v[i] = 0.0f;
                references[t][i] = (adamw_reference){(double)p[i], 0.0, 0.0};
            }
            tensors[t] = (dw_adamw_tensor){p, g, m, v, n};
        }
        for (int step = 1; step <= 3; step++) {
            dw_adamw_options options = {sizeof options, 1e-2,     0.9, 0.999, 1e-8, 0.1, 0.5,
                                        step,           step == 2};
            for (int t = 0; t < TENSORS; t++)
                for (int64_t i = 0; i < counts[t]; i++) {
                    float g = (float)uniform(-1, 1);
                    ((float *)tensors[t].grad)[i] = g;
                    references[t][i] = adamw(references[t][i], (double)g, &options);
                }
            assert_int_equal(dw_adamw_step(tensors, TENSORS, &options), DW_OK);
        }
        for (int t = 0; t < TENSORS; t++) {
            for (int64_t i = 0; i < counts[t]; i++) {
                adamw_reference r = references[t][i];
                /* m is the difference of values up to 1, so its error is absolute, and the step divides it by
                 * sqrt(v). */
                double relative = 16.0 * EPS * (1.0 + 1.0 / (fabs(r.m) + 1e-3));
                expect_near("adamw, m", i, (double)tensors[t].exp_avg[i], r.m, 4.0 * EPS);
                expect_near("adamw, v", i, (double)tensors[t].exp_avg_sq[i], r.v, 8.0 * EPS * r.v);
                expect_near("adamw, p", i, (double)tensors[t].param[i], r.p,
                            4.0 * EPS + 3e-2 * relative);
            }
            size_t bytes = (size_t)counts[t] * 4;
            if (threads == 1) {
                first[t] = malloc(bytes + 1);
                memcpy(first[t], tensors[t].param, bytes);
            } else {
                assert_memory_equal(first[t], tensors[t].param, bytes);
            }
            if (threads == 3) free(first[t]);
            free(references[t]);
        }
        release_blocks();
    }
}

static void test_adamw_operation(void **state) {
    (void)state;
    dw_attr attrs[] = {dw_attr_float(DW_ATTR_KEY_LR, 1e-2), dw_attr_float(DW_ATTR_KEY_BETA1, 0.9),
                       dw_attr_float(DW_ATTR_KEY_BETA2, 0.99), dw_attr_float(DW_ATTR_KEY_EPS, 1e-6),
                       dw_attr_float(DW_ATTR_KEY_WEIGHT_DECAY, 0.1)};
    dw__call call = make_call(DW_OP_ADAMW, 5, attrs);
    for (int i = 0; i < 4; i++)
        add_input(&call, random_tensor(DW_F32, i == 3 ? 0.1 : -1, 1, SHAPE(51, 413)));
    dw__tensor step = make_tensor(DW_I64, 0, NULL);
    put(&step, 0, 4.0);
    add_input(&call, step);
    for (int i = 0; i < 3; i++) add_output(&call, make_tensor(DW_F32, SHAPE(51, 413)));
    run_call(&call);
    dw_adamw_options options = {sizeof options, 1e-2, 0.9, 0.99, 1e-6, 0.1, 1.0, 4, 0};
    for (int64_t i = 0; i < 51 * 413; i++) {
        adamw_reference s = {get(&call.inputs[0], i), get(&call.inputs[2], i),
                             get(&call.inputs[3], i)};
        s = adamw(s, get(&call.inputs[1], i), &options);
        expect_near("adamw op, p", i, get(&call.outputs[0], i), s.p, 8.0 * EPS);
        expect_near("adamw op, m", i, get(&call.outputs[1], i), s.m, 4.0 * EPS);
        expect_near("adamw op, v", i, get(&call.outputs[2], i), s.v, 4.0 * EPS);
    }
    release_blocks();
}

static void test_adamw_errors(void **state) {
    (void)state;
    float x[4] = {0};
    dw_adamw_tensor good = {x, x, x, x, 4}, bad = {x, NULL, x, x, 4};
    dw_adamw_options options = {sizeof options, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 1, 0};
    assert_int_equal(dw_adamw_step(NULL, 0, &options), DW_OK);
    assert_int_equal(dw_adamw_step(&bad, 1, &options), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_adamw_step(NULL, 1, &options), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_adamw_step(&good, 1, NULL), DW_INVALID_ARGUMENT);
    options.step = 0;
    assert_int_equal(dw_adamw_step(&good, 1, &options), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "step"));
    options.step = 1;
    options.beta2 = 1.0;
    assert_int_equal(dw_adamw_step(&good, 1, &options), DW_INVALID_ARGUMENT);
}

/* ---- the tests ------------------------------------------------------------------------------- */

static int run_all(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fused_shapes),
        cmocka_unit_test(test_single_operations),
        cmocka_unit_test(test_integers),
        cmocka_unit_test(test_integer_division_by_zero),
        cmocka_unit_test(test_casts),
        cmocka_unit_test(test_half_chains),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_tile),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_norms_of_huge_rows),
        cmocka_unit_test(test_norm_backward_in_part),
        cmocka_unit_test(test_softmax),
        cmocka_unit_test(test_permute),
        cmocka_unit_test(test_slice_pad_concat),
        cmocka_unit_test(test_broadcast_reshape_iota),
        cmocka_unit_test(test_take),
        cmocka_unit_test(test_scatter),
        cmocka_unit_test(test_index_outside),
        cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_cumsum),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_target_outside),
        cmocka_unit_test(test_adamw_step),
        cmocka_unit_test(test_adamw_operation),
        cmocka_unit_test(test_adamw_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Runs once per instruction set, each in its own process, because a process chooses its instruction set once.
 * ThreadSanitizer checks how threads share the work, which does not depend on the instruction set. */
int main(void) {
#if defined(__SANITIZE_THREAD__)
    return run_all();
#endif
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
