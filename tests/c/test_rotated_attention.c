/* Attention whose queries are rotated as they are loaded, on an emulated Hopper GPU with the checker on: the bits of rope and
 * attention apart. Kernels are compiled when they are first used. */
#include "emulated_call.h"
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_kernels.h"
#include "run_time_compiler.h"
#include <math.h>

static const char gpu[] = "emulator:sm_90a";

/* x, k, v and o are [batch, tokens, heads, columns], as projections lie; rotated rows are [batch, heads, tokens, columns]. */
typedef struct problem {
    int batch, tokens, heads, heads_kv, columns;
    bool causal, f16;
    bool keeps_q;    /* stores the rotated rows */
    bool each_batch; /* a batch has tables of its own */
    int sms;
} problem;

/* With and without the fused kernel. */
enum { FUSED, APART, WAYS };

typedef struct run {
    const problem *problem;
    const dw_device *device;
    dw__context context;
    matrix x, k, v, cosines, sines, rotated[WAYS], o[WAYS];
    void *lse[WAYS];
    dw_attr attrs[2];
} run;

static size_t lse_bytes(const problem *p) {
    return sizeof(float) * (size_t)(p->batch * p->heads * p->tokens);
}

static void open_run(const problem *p, run *r) {
    const matrix_type type = p->f16 ? MATRIX_F16 : MATRIX_BF16;
    const int rows = p->batch * p->tokens, tables = (p->each_batch ? p->batch : 1) * p->tokens;
    const dw__context *context;
    uint64_t state = (uint64_t)(rows * 31 + p->heads * 7 + p->columns);
    *r = (run){.problem = p,
               .device = device_named(gpu),
               .attrs = {dw_attr_float(DW_ATTR_KEY_SCALE, 1.0 / sqrt(p->columns)),
                         dw_attr_int(DW_ATTR_KEY_CAUSAL, p->causal)}};
    assert_int_equal(r->device->context(&context), DW_OK);
    r->context = *context;
    r->context.sm_count = p->sms;
    place_random(&r->x, r->device, rows, p->heads * p->columns, type, &state, false);
    place_random(&r->k, r->device, rows, p->heads_kv * p->columns, type, &state, false);
    place_random(&r->v, r->device, rows, p->heads_kv * p->columns, type, &state, false);
    place_random(&r->cosines, r->device, tables, p->columns, type, &state, false);
    place_random(&r->sines, r->device, tables, p->columns, type, &state, false);
    for (int way = 0; way < WAYS; way++) {
        place(&r->rotated[way], r->device, rows * p->heads, p->columns, type);
        place(&r->o[way], r->device, rows, p->heads * p->columns, type);
        send(&r->rotated[way], r->device);
        send(&r->o[way], r->device);
        assert_int_equal(dw_device_allocate(r->device, lse_bytes(p), &r->lse[way]), DW_OK);
    }
}

static void close_run(run *r) {
    matrix *const own[] = {&r->x,          &r->k,          &r->v,    &r->cosines, &r->sines,
                           &r->rotated[0], &r->rotated[1], &r->o[0], &r->o[1]};
    for (size_t i = 0; i < DW_COUNT(own); i++) take_away(own[i], r->device);
    for (int way = 0; way < WAYS; way++)
        dw_device_release(r->device, r->lse[way], lse_bytes(r->problem));
}

/* [batch, heads, tokens, columns] of rows that are tokens, or else those of heads. */
static dw__tensor heads_of(const run *r, const matrix *m, int heads) {
    const problem *p = r->problem;
    const int64_t row = matrix_of(m).stride;
    dw__tensor t = {.data = m->device,
                    .dtype = p->f16 ? DW_F16 : DW_BF16,
                    .rank = 4,
                    .shape = {p->batch, heads, p->tokens, p->columns},
                    .stride = {p->tokens * row, p->columns, row, 1}};
    if (m->rows == p->batch * p->tokens) return t;
    t.stride[0] = heads * p->tokens * row;
    t.stride[1] = p->tokens * row;
    return t;
}

static dw__tensor table_of(const run *r, const matrix *m) {
    dw__tensor t = heads_of(r, m, 1);
    const int64_t row = matrix_of(m).stride;
    t.shape[0] = r->problem->each_batch ? r->problem->batch : 1;
    t.stride[0] = t.stride[1] = r->problem->tokens * row;
    t.stride[2] = row;
    return t;
}

static dw__call rope_of(const run *r, int way) {
    return (dw__call){
        .op = DW_OP_ROPE,
        .input_count = 3,
        .output_count = 1,
        .inputs = {heads_of(r, &r->x, r->problem->heads), table_of(r, &r->cosines),
                   table_of(r, &r->sines)},
        .outputs = {heads_of(r, &r->rotated[way], r->problem->heads)},
        .replaced = -1,
        .replaced_half = -1,
    };
}

static dw__call attention_of(const run *r, int way) {
    const problem *p = r->problem;
    dw__tensor lse = {
        .data = r->lse[way], .dtype = DW_F32, .rank = 3, .shape = {p->batch, p->heads, p->tokens}};
    dw__tensor_set_contiguous(&lse);
    return (dw__call){
        .op = DW_OP_ATTENTION,
        .attr_count = 2,
        .attrs = r->attrs,
        .input_count = 5,
        .output_count = 2,
        .inputs = {heads_of(r, &r->rotated[way], p->heads),
                   heads_of(r, &r->k, p->heads_kv),
                   heads_of(r, &r->v, p->heads_kv),
                   {.rank = -1},
                   {.rank = -1}},
        .outputs = {heads_of(r, &r->o[way], p->heads), lse},
        .replaced = -1,
        .replaced_half = -1,
    };
}

static void enqueue(const run *r, const dw__kernel *kernel, const dw__operation_call *call) {
    const dw__variant *variant;
    if (kernel->prepare(kernel, call, &r->context, &variant) != DW_OK ||
        dw__variant_status(variant) != DW_OK ||
        kernel->enqueue(call, &r->context, variant) != DW_OK)
        fail_msg("%s", dw_last_error());
}

static void expect_same_rows(run *r, matrix *m) {
    for (int way = 0; way < WAYS; way++) fetch(&m[way], r->device);
    for (int row = 0; row < m[FUSED].rows; row++) {
        const size_t at = (size_t)row * m[FUSED].pitch;
        expect_untouched(&m[FUSED], row);
        assert_memory_equal((char *)m[FUSED].host + at, (char *)m[APART].host + at,
                            row_bytes(&m[FUSED]));
    }
}

static void expect_same_lse(const run *r) {
    const size_t bytes = lse_bytes(r->problem);
    void *host[WAYS];
    for (int way = 0; way < WAYS; way++) {
        host[way] = malloc(bytes);
        assert_non_null(host[way]);
        assert_int_equal(r->device->copy_out(host[way], r->lse[way], bytes, NULL), DW_OK);
    }
    assert_memory_equal(host[FUSED], host[APART], bytes);
    for (int way = 0; way < WAYS; way++) free(host[way]);
}

/* Rows of the rotated queries stay untouched where they are not wanted. */
static void expect_right(const problem *p) {
    run r;
    open_run(p, &r);
    const dw__call attention = attention_of(&r, FUSED);
    dw__operation_call call = {.call = rope_of(&r, FUSED)};
    call.call.epilogue = &attention;
    call.call.replaced = 0;
    if (!p->keeps_q) call.call.outputs[0].data = NULL;
    enqueue(&r, &dw__gpu_rotated_attention, &call);
    call.call = rope_of(&r, APART);
    enqueue(&r, &dw__gpu_rope, &call);
    call.call = attention_of(&r, APART);
    enqueue(&r, &dw__graph_attention, &call);
    expect_same_rows(&r, r.o);
    expect_same_lse(&r);
    if (p->keeps_q) expect_same_rows(&r, r.rotated);
    close_run(&r);
}

/* Tiles of 128 and of 192 rows (many keys), of which the last has fewer; blocks with one tile, and with several. */
static const problem problems[] = {
    {.batch = 2,
     .tokens = 333,
     .heads = 2,
     .heads_kv = 1,
     .columns = 64,
     .causal = true,
     .keeps_q = true,
     .sms = 2},
    {.batch = 1,
     .tokens = 1600,
     .heads = 1,
     .heads_kv = 1,
     .columns = 64,
     .causal = true,
     .keeps_q = true,
     .sms = 3},
    {.batch = 2,
     .tokens = 200,
     .heads = 3,
     .heads_kv = 3,
     .columns = 128,
     .causal = true,
     .f16 = true,
     .keeps_q = true,
     .each_batch = true,
     .sms = 1},
    {.batch = 1, .tokens = 100, .heads = 3, .heads_kv = 1, .columns = 64, .causal = true, .sms = 9},
};

static void queries_are_rotated(void **state) {
    (void)state;
    for (size_t i = 0; i < DW_COUNT(problems); i++) expect_right(&problems[i]);
}

static void other_calls_are_refused(void **state) {
    static const problem right = {.batch = 1,
                                  .tokens = 1024,
                                  .heads = 2,
                                  .heads_kv = 1,
                                  .columns = 64,
                                  .causal = true,
                                  .sms = 1};
    const dw__kernel *kernel = &dw__gpu_rotated_attention;
    dw_attr interleaved = dw_attr_int(DW_ATTR_KEY_INTERLEAVED, 1);
    run r;
    (void)state;
    setenv("DEEPWELL_EPILOGUES", "all", 1);
    open_run(&right, &r);
    dw__gpu_target target = {.capability = 90, .sm_count = 132, .name = "an H100"};
    dw__call attention = attention_of(&r, FUSED);
    dw__operation_call call = {.call = rope_of(&r, FUSED)};
    const dw__call rope = call.call;
#define EXPECT(status, change, back)                                                               \
    do {                                                                                           \
        call.call = rope;                                                                          \
        call.call.epilogue = &attention;                                                           \
        call.call.replaced = 0;                                                                    \
        change;                                                                                    \
        if (kernel->supports(kernel, &call, &target) != (status))                                  \
            fail_msg("%s: %s", #change, dw_last_error());                                          \
        back;                                                                                      \
    } while (0)
    EXPECT(DW_OK, (void)0, (void)0);
    EXPECT(DW_UNSUPPORTED, call.call.replaced = 1, (void)0); /* keys */
    EXPECT(DW_UNSUPPORTED, (call.call.attrs = &interleaved, call.call.attr_count = 1), (void)0);
    EXPECT(DW_UNSUPPORTED, call.call.inputs[1].shape[3] = 32, (void)0);  /* half of a head */
    EXPECT(DW_UNSUPPORTED, call.call.inputs[2].stride[2] += 4, (void)0); /* no whole vectors */
    EXPECT(DW_UNSUPPORTED, call.call.inputs[1].shape[1] = 2,
           (void)0); /* heads have tables of their own */
    EXPECT(DW_UNSUPPORTED, call.call.outputs[0].stride[2] += 4, (void)0);
    EXPECT(DW_UNSUPPORTED, call.call.inputs[0].shape[2] = 1023, (void)0);
    EXPECT(DW_UNSUPPORTED, attention.inputs[1].shape[2] = 1023,
           attention = attention_of(&r, FUSED));
    EXPECT(DW_UNSUPPORTED, r.attrs[1] = dw_attr_int(DW_ATTR_KEY_CAUSAL, 0),
           r.attrs[1] = dw_attr_int(DW_ATTR_KEY_CAUSAL, 1));
    EXPECT(DW_UNSUPPORTED, unsetenv("DEEPWELL_EPILOGUES"), setenv("DEEPWELL_EPILOGUES", "all", 1));
    EXPECT(DW_TYPE, target.capability = 100, target.capability = 90);
#undef EXPECT
    unsetenv("DEEPWELL_EPILOGUES");
    close_run(&r);
}

static void check_first_use(void) {
    expect_right(&problems[3]);
    REQUIRE(lines == 0);
}
static void the_first_use_check_passes(void **state) {
    (void)state;
    in_child(check_first_use);
}

int main(void) {
    /* Children come first, because a process keeps variants that were loaded without a check. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_use_check_passes),
        cmocka_unit_test(queries_are_rotated),
        cmocka_unit_test(other_calls_are_refused),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
