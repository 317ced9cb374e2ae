/* The parts that all GPU kernels share: the registry's rules, the cache of variants, and the first-use check. A small
 * kernel of the test itself, whose source is a text, runs on a fake GPU. */
#include "deepwell/attention.h"
#include "deepwell/gemm.h"
#include "deepwell/log.h"
#include "deepwell/quantize.h"
#include "fake/fake_gpu.h"
#include "kernel/cuda/gpu_kernels.h"
#include <pthread.h>

/* ---- the registry -------------------------------------------------------------------------------- */

/* Entries that make the calls of other entries leave code and checks to them. */
static bool calls_another(const dw__kernel *k) {
    return k == &dw__graph_attention || k == &dw__graph_attention_backward ||
           k == &dw__graph_gemm || k == &dw__graph_gemm_turned || k == &dw__graph_gemm_hopper ||
           k == &dw__graph_gemm_scaled;
}

static void check_entry(const dw__kernel *k) {
    assert_non_null(k->name);
    assert_non_null(k->backend);
    assert_non_null(k->supports);
    assert_non_null(k->tolerance);
    /* A kernel that no hardware has run is used only on request. */
    if (k->proof == DW__PROVEN_ON_EMULATOR) {
        assert_true(k->asked_for || k->kind == DW__CALL_OPERATION);
        assert_string_equal(dw__gpu_kernel_proof(k), dw__gpu_proof_emulator);
    }
    bool computes = k->kind != DW__CALL_OPERATION;
    for (int op = 0; op < DW_OP_COUNT; op++)
        for (const dw__kernel *const *of = dw__kernel_candidates((dw_op)op, true); *of; of++)
            computes |= *of == k;
    assert_true(computes);
    if (!k->enqueue) return; /* PyTorch's kernels end here */
    assert_non_null(k->prepare);
    assert_true(k->entry_points || k->proof == DW__PROOF_OF_PROVIDER || calls_another(k));
    assert_non_null(k->operation);
    assert_non_null(k->source);
    assert_non_null(k->architectures);
    assert_non_null(k->elements);
    assert_non_null(k->needs);
    assert_non_null(dw__gpu_kernel_proof(k));
    /* Every kernel is checked on a GPU that is new to it, but for programs made from a user's own operations. */
    if (k == &dw__gpu_elementwise || k == &dw__gpu_program_codes || calls_another(k)) return;
    assert_non_null(k->first_use);
    assert_true(k->first_use->count > 0);
}

static void test_registry(void **state) {
    (void)state;
    for (unsigned i = 0; i < dw__gpu_kernel_count; i++) {
        const dw__kernel *k = dw__gpu_kernels[i];
        check_entry(k);
        for (unsigned j = 0; j < i; j++) {
            const bool same = strcmp(k->name, dw__gpu_kernels[j]->name) == 0;
            assert_false(same && k->kind == dw__gpu_kernels[j]->kind);
        }
    }
}

/* Makes a small call of each operation, and checks on which targets which of our kernels supports it. */
static void test_supported_calls(void **state) {
    (void)state;
    const dw_attention_tensor tensor = {.batch = 64 * 64, .head = 64 * 64, .row = 64};
    dw_attention attention = {.struct_size = sizeof attention,
                              .dtype = DW_BF16,
                              .batch = 1,
                              .heads_q = 1,
                              .heads_kv = 1,
                              .seq_len_q = 64,
                              .seq_len_kv = 64,
                              .head_dim = 64,
                              .scale = 0.125f,
                              .window_left = -1,
                              .window_right = -1,
                              .q = tensor,
                              .k = tensor,
                              .v = tensor,
                              .o = tensor};
    attention.d_o = attention.dq = attention.dk = attention.dv = tensor;
    dw_gemm dense = {.struct_size = sizeof dense,
                     .dtype = DW_BF16,
                     .output = DW_BF16,
                     .m = 64,
                     .n = 64,
                     .k = 64,
                     .alpha = 1,
                     .a = {NULL, 64},
                     .b = {NULL, 64},
                     .d = {NULL, 64}},
            codes = dense;
    codes.quantized = 1;
    codes.scheme_a = codes.scheme_b = DW_SCHEME_MXFP8;
    dw_quantize quantize = {.struct_size = sizeof quantize,
                            .dtype = DW_BF16,
                            .scheme = DW_SCHEME_MXFP8,
                            .rows = 64,
                            .cols = 64,
                            .row_stride = 64,
                            .along_rows = {.wanted = 1, .stride = 64}};
    const struct {
        const char *kernel;
        const void *call;
        const char *targets; /* the targets that support it */
    } cases[] = {
        {"sm90_attention_forward", &attention, "sm_90a"},
        {"sm90_attention_backward", &attention, "sm_90a"},
        {"sm100_attention_forward", &attention, "sm_100a sm_103a"},
        {"sm100_gemm", &dense, "sm_100a sm_103a"},
        {"sm100_gemm", &codes, ""},
        {"sm100_gemm_scaled", &codes, "sm_100a sm_103a"},
        {"sm100_gemm_scaled", &dense, ""},
        {"quantize_blocks", &quantize, "sm_90a sm_100a sm_103a"},
    };
    static const char *const targets[] = {"sm_90a", "sm_100a", "sm_103a"};
    setenv("DEEPWELL_BLACKWELL", "try", 1);
    for (size_t i = 0; i < DW_COUNT(cases); i++)
        for (size_t t = 0; t < DW_COUNT(targets); t++) {
            const dw__kernel *kernel = NULL;
            dw__gpu_target target;
            assert_int_equal(dw__gpu_target_named(targets[t], &target), DW_OK);
            for (unsigned k = 0; k < dw__gpu_kernel_count; k++)
                if (strcmp(dw__gpu_kernels[k]->name, cases[i].kernel) == 0)
                    kernel = dw__gpu_kernels[k];
            assert_non_null(kernel);
            const dw_status status = kernel->supports(kernel, cases[i].call, &target);
            const bool expected = strstr(cases[i].targets, targets[t]) != NULL;
            if ((status == DW_OK) != expected)
                fail_msg("%s on %s: %s", kernel->name, targets[t], dw_last_error());
        }
    unsetenv("DEEPWELL_BLACKWELL");
}

/* ---- a family of kernels ----------------------------------------------------------------------------- */

/* Stores `params` into a word. */
typedef struct call {
    uint32_t *to;
    void *stream;
} call;

static int wrong_by; /* the amount that the fake kernel adds */
static void run_kernel(const fake_launch *launch) {
    call c;
    memcpy(&c, launch->params, sizeof c);
    uint32_t value;
    memcpy(&value, launch->params + sizeof c, sizeof value);
    *c.to = value + (uint32_t)wrong_by;
}
static int maps_of(const char *name) {
    (void)name;
    fake->params_bytes = sizeof(call) + sizeof(uint32_t);
    return 0;
}

static int points_listed;
static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point points[DW__ENTRY_POINTS]) {
    static const char text[] = "extern \"C\" __global__ void store(unsigned *to) { *to = VALUE; }";
    (void)kernel, (void)capability;
    points_listed++;
    points[0].code =
        (dw__jit_variant){.source = "store", .text = text, .entry = "store", .arch = "sm_90a"};
    dw__jit_add_define(&points[0].code, "VALUE", (int)params);
    return DW_OK;
}

static dw_status enqueue(const void *given, const dw__context *context,
                         const dw__variant *variant) {
    struct {
        call call;
        uint32_t value;
    } params = {*(const call *)given, (uint32_t)variant->params};
    void *arguments[] = {&params};
    return context->device->launch(&(dw__launch){.name = "store",
                                                 .function = variant->functions[0],
                                                 .grid = {1, 1, 1},
                                                 .block = {1, 1, 1},
                                                 .stream = params.call.stream,
                                                 .arguments = arguments});
}

typedef struct trial_state {
    call call;
    dw__trial_part *word, *scratch;
} trial_state;

static int trials;
static dw_status prepare(dw__trial *t) {
    trial_state *s = t->state;
    CHILD_REQUIRE(!s->call.stream && !s->word && !s->scratch);
    DW_RETURN_IF_FAILED(dw__trial_add(t, sizeof(uint32_t), &s->word));
    DW_RETURN_IF_FAILED(dw__trial_scratch(t, 0, &s->scratch));
    CHILD_REQUIRE(s->word->padded == 256 && s->scratch->padded == 0 && !s->scratch->device);
    for (size_t i = 0; i < s->word->padded; i++)
        CHILD_REQUIRE(((unsigned char *)s->word->host)[i] == 0xff);
    t->consequence = ", its calls are refused";
    s->call = (call){s->word->device, t->stream};
    t->call = &s->call;
    trials++;
    return DW_OK;
}
static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    const trial_state *s = t->state;
    uint32_t value;
    memcpy(&value, s->word->host, sizeof value);
    if (value == t->variant->params) return true;
    snprintf(text, bytes, "the word is %u", (unsigned)value);
    return false;
}
static const dw__first_use first_use = {.against = "the test",
                                        .count = 2,
                                        .failure_refuses = true,
                                        .state_bytes = sizeof(trial_state),
                                        .prepare = prepare,
                                        .agrees = agrees};
static const dw__kernel store = {
    .name = "store", .enqueue = enqueue, .entry_points = entry_points, .first_use = &first_use};
static const dw__kernel unchecked = {
    .name = "unchecked", .enqueue = enqueue, .entry_points = entry_points};

static const dw__context *current(void) {
    const dw__context *context = NULL;
    CHILD_REQUIRE(dw__device_cuda.context(&context) == DW_OK);
    return context;
}
static void begin(void) {
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
    fake->kernel = run_kernel;
    fake->maps_of = maps_of;
    fake->relaxed = 0;
}

/* ---- the cache ----------------------------------------------------------------------------------- */

/* Variants differ by kernel, parameters and context. Each is loaded and compared once. */
static void finds_variants(void *unused) {
    enum { COUNT = 250 }; /* enough that some share a bucket */
    static const dw__variant *found[2][COUNT];
    const dw__kernel *const kernels[] = {&unchecked, &store};
    const dw__context *context = current();
    dw__context other = *context;
    const dw__variant *again;
    (void)unused;
    begin();
    other.index++;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < COUNT; i++)
            if (k == 0 || i < 5)
                CHILD_REQUIRE(dw__variant_of(context, kernels[k], (uint64_t)i, &found[k][i]) ==
                              DW_OK);
    CHILD_REQUIRE(trials == 2 * 5 && fake->memory == 0 && fake->relaxed > 0);
    const int listed = points_listed;
    for (int i = 0; i < COUNT; i++) {
        CHILD_REQUIRE(found[0][i]->params == (uint64_t)i && found[0][i]->kernel == &unchecked);
        CHILD_REQUIRE(dw__variant_of(context, &unchecked, (uint64_t)i, &again) == DW_OK);
        CHILD_REQUIRE(again == found[0][i] && again != found[1][i]);
    }
    CHILD_REQUIRE(points_listed == listed); /* nothing was loaded again */
    CHILD_REQUIRE(dw__variant_of(&other, &unchecked, 0, &again) == DW_OK && again != found[0][0]);
    CHILD_REQUIRE(again->context == other.index);
}

static void *find_often(void *failed) {
    const dw__context *context = current();
    const dw__variant *variant;
    for (uint64_t i = 0; i < 4096; i++)
        if (dw__variant_of(context, &store, i % 64, &variant) != DW_OK || variant->disabled)
            return failed;
    return NULL;
}
static void threads_find(void *unused) {
    pthread_t threads[4];
    (void)unused;
    begin();
    for (int i = 0; i < 4; i++)
        CHILD_REQUIRE(pthread_create(&threads[i], NULL, find_often, &threads) == 0);
    for (int i = 0; i < 4; i++) {
        void *failed = NULL;
        CHILD_REQUIRE(pthread_join(threads[i], &failed) == 0 && !failed);
    }
    CHILD_REQUIRE(trials == 2 * 64);
}

/* ---- the first-use check ---------------------------------------------------------------------------- */

static void refuses(void *unused) {
    const dw__variant *variant;
    (void)unused;
    begin();
    wrong_by = 1;
    for (int i = 0; i < 2; i++) { /* the result is kept */
        CHILD_REQUIRE(dw__variant_of(current(), &store, 7, &variant) == DW_OK);
        CHILD_REQUIRE(variant->disabled && trials == 1 && fake->memory == 0);
        CHILD_REQUIRE(dw__variant_status(variant) == DW_UNSUPPORTED);
        CHILD_REQUIRE(strstr(dw_last_error(), "kernel store.") == dw_last_error());
        CHILD_REQUIRE(strstr(dw_last_error(), ".sm_90a.VALUE=7 disagrees with the test on Fake GPU "
                                              "0: the word is 8; it is not used in this process, "
                                              "its calls are refused; please report this line"));
        wrong_by = 0;
    }
    CHILD_REQUIRE(dw__variant_of(current(), &store, 8, &variant) == DW_OK);
    CHILD_REQUIRE(dw__variant_status(variant) == DW_OK);
}

/* A kernel that fails is rejected. If the check itself could not run, the next call repeats it. */
static void fails(void *unused) {
    const dw__variant *variant;
    (void)unused;
    begin();
    fake->failing = "cuLaunchKernelEx";
    fake->result = 700;
    CHILD_REQUIRE(dw__variant_of(current(), &store, 1, &variant) == DW_OK && variant->disabled);
    CHILD_REQUIRE(strstr(variant->reason, "failed on Fake GPU 0"));
    fake->result = 2;
    CHILD_REQUIRE(dw__variant_of(current(), &store, 2, &variant) == DW_OUT_OF_MEMORY);
    CHILD_REQUIRE(strstr(dw_last_error(), "comparing the kernel with the test"));
    fake->failing = NULL;
    CHILD_REQUIRE(dw__variant_of(current(), &store, 2, &variant) == DW_OK && !variant->disabled);
    int failed = 0;
    for (int64_t after = 0;; after++) {
        dw__memory_fail_once(after);
        const dw_status status = dw__variant_of(current(), &store, 3, &variant);
        const int64_t failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        CHILD_REQUIRE(fake->memory == 0);
        if (status != DW_OK) CHILD_REQUIRE(status == DW_OUT_OF_MEMORY);
        failed += status != DW_OK;
        if (failures == 0) break;
    }
    CHILD_REQUIRE(failed > 3 && !variant->disabled);
}

typedef void (*check)(void *);
static void in_child(void **state) { expect_child(start_child(*(check *)*state, NULL)); }

/* clang-format off */
#define CHECK(function) {#function, in_child, NULL, NULL, &(check){function}}
/* clang-format on */

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_registry),
        cmocka_unit_test(test_supported_calls),
        CHECK(finds_variants),
        CHECK(threads_find),
        CHECK(refuses),
        CHECK(fails),
    };
    return cmocka_run_group_tests(tests, begin_on_fake_gpu, end_on_fake_gpu);
}
