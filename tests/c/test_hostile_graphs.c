/* Graphs that no real model has: as deep, as wide and as large as a file can describe. Each is rejected with one
 * message or processed, in time proportional to its length, on the small stack of a thread. */
#include "base/base.h"
#include "deepwell/deepwell.h"
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

static dw_graph *read_text(const char *text) {
    dw_graph *graph = NULL;
    OK(dw_graph_from_text(text, &graph));
    return graph;
}

/* ---- long chains ----------------------------------------------------------------------------- */

/* A chain of links; each reads the previous one. */
typedef struct chain {
    const char *head; /* makes %v0 */
    const char *link; /* makes %vN: the pieces of it between N, N-1, N-1 and N-1 */
    const char *tail; /* from the last; printed with its number */
    int count;
    bool gradient;
} chain;

#define SQUARE "parameter %x: f32[4, 4]\n"
#define SUM "%%r = reduce_sum(%%v%d) {axes=[0, 1], keep=0}\nreturn %%r\n"
#define ATTEND                                                                                     \
    "%%m = reshape(%%v%d) {shape=[1, 1, 4, 4]}\n"                                                  \
    "%%o, %%l = attention(%%q, %%q, %%q, %%m) {scale=1}\nreturn %%o\n"

/* A recursion of this depth does not fit on the stack below, however small its frames. The choice of what is
 * saved for backward takes more time, so it gets fewer links. */
enum { LONG = 8000, LONG_SAVED = 2000 };

static const chain chains[] = {
    {SQUARE "%v0 = neg(%x)\n", "sin(%v#)", SUM, LONG_SAVED, true},
    {SQUARE "%v0 = neg(%x)\n", "add(%v#, %x)", SUM, LONG, true},
    {SQUARE "%v0 = neg(%x)\n", "add(%x, %v#)", SUM, LONG, true},
    {SQUARE "%v0 = neg(%x)\n", "mul(%v#, %x)", SUM, LONG_SAVED, true},
    {SQUARE "%v0 = neg(%x)\n", "add(%v#, %v#)", SUM, LONG, true},
    {SQUARE "%v0 = neg(%x)\n", "permute(%v#) {perm=[1, 0]}", SUM, LONG, true},
    {SQUARE "%v0 = neg(%x)\n", "stop_gradient(%v#)", SUM, LONG, false},
    {"parameter %y: f32[4, 2]\n%p = pad(%y) {low=[0, 2], high=[0, 0]}\n"
     "%v0 = pad(%y) {low=[0, 0], high=[0, 2]}\n",
     "add(%v#, %p)", SUM, LONG, true},
    {SQUARE "%v0 = constant() {dtype=f32, shape=[4, 4], value=2}\n", "permute(%v#) {perm=[1, 0]}",
     "%%w = mul(%%x, %%v%d)\n%%r = reduce_sum(%%w) {axes=[0, 1], keep=0}\nreturn %%r\n", LONG,
     true},
    {"input %q: f32[1, 1, 4, 4]\ninput %c: bool[4, 4]\ninput %v0: bool[4, 4]\n", "and(%v#, %c)",
     ATTEND, LONG, false},
    {"input %q: f32[1, 1, 4, 4]\n%one = constant() {dtype=i64, shape=[4, 4], value=1}\n"
     "%y = iota() {dtype=i64, shape=[4, 4], axis=1}\n%v0 = iota() {dtype=i64, shape=[4, 4], "
     "axis=0}\n",
     "add(%v#, %one)",
     "%%c = le(%%y, %%v%d)\n"
     "%%m = reshape(%%c) {shape=[1, 1, 4, 4]}\n"
     "%%o, %%l = attention(%%q, %%q, %%q, %%m) {scale=1}\nreturn %%o\n",
     LONG, false},
    /* Recomputed in backward and read twice by the next link: following every path would never end. */
    {SQUARE "%v0 = neg(%x)\n", "rms_norm(%v#) {eps=0.00001}", SUM, 60, true},
};

static char *chain_text(const chain *c) {
    dw__text text = {0};
    OK(dw__text_printf(&text, "deepwell graph 1\n%s", c->head));
    for (int i = 1; i <= c->count; i++) {
        bool norm = strncmp(c->link, "rms_norm", 8) == 0;
        if (norm)
            OK(dw__text_printf(&text,
                               "%%p%d = permute(%%v%d) {perm=[1, 0]}\n"
                               "%%a%d = add(%%v%d, %%p%d)\n",
                               i, i - 1, i, i - 1, i));
        OK(dw__text_printf(&text, norm ? "%%v%d, %%s%d = " : "%%v%d = ", i, i));
        for (const char *at = c->link; *at; at++) {
            if (at[0] == '#')
                OK(dw__text_printf(&text, "%d", norm ? i : i - 1));
            else
                OK(dw__text_append(&text, norm && *at == 'v' ? "a" : at, 1));
        }
        OK(dw__text_append(&text, "\n", 1));
    }
    OK(dw__text_printf(&text, c->tail, c->count));
    return text.text;
}

/* Every pass; the engine, with a gradient; a plan. */
static void *run_chain(void *argument) {
    const chain *c = argument;
    char *text = chain_text(c);
    dw_graph *graph = read_text(text);
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    uint32_t output = 0, count = c->gradient ? 1 : 0;
    dw_value x = dw_graph_leaf_at(graph, 0);
    OK(dw_engine_create(graph, count, &output, count, &x, NULL, &engine));
    OK(dw_engine_plan(engine, NULL, &plan));
    for (int pass = 0; pass < DW_PASS_COUNT; pass++) OK(dw_graph_run_pass(&graph, (dw_pass)pass));
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
    dw_text_free(text);
    return NULL;
}

static void long_chains_fit_on_a_small_stack(void **state) {
    (void)state;
    enum { STACK = 384 << 10 }; /* a frame of a pass takes a few KB of it */
    for (size_t i = 0; i < DW_COUNT(chains); i++) {
        pthread_attr_t attributes;
        pthread_t thread;
        double start = dw__seconds();
        pthread_attr_init(&attributes);
        assert_int_equal(pthread_attr_setstacksize(&attributes, STACK), 0);
        assert_int_equal(pthread_create(&thread, &attributes, run_chain, (void *)&chains[i]), 0);
        pthread_join(thread, NULL);
        pthread_attr_destroy(&attributes);
        print_message("%d times %s: %.2f s\n", chains[i].count, chains[i].link,
                      dw__seconds() - start);
    }
}

/* ---- sizes ----------------------------------------------------------------------------------- */

/* Tries to plan `text` at B = size. Returns the message of the failure, or NULL. */
static const char *refusal(const char *text, int64_t size) {
    static char message[2048];
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    dw_status status = dw_graph_from_text(text, &graph);
    if (status == DW_OK) status = dw_engine_create(graph, 0, NULL, 0, NULL, NULL, &engine);
    if (status == DW_OK) status = dw_engine_plan(engine, &size, &plan);
    snprintf(message, sizeof message, "%s", status == DW_OK ? "" : dw_last_error());
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
    return status == DW_OK ? NULL : message;
}

static void expect_refusal(const char *text, int64_t size, const char *part) {
    const char *message = refusal(text, size);
    if (!message) fail_msg("planned at B = %lld: %s", (long long)size, text);
    if (!strstr(message, part)) fail_msg("\"%s\" does not say \"%s\"", message, part);
}

#define B_TEXT "deepwell graph 1\nsymbols B\n"

static void sizes_beyond_all_memory_are_rejected(void **state) {
    (void)state;
    const char *cube = B_TEXT "input %x: f32[B, B, B]\n%y = neg(%x)\nreturn %y\n";
    assert_null(
        refusal(cube, 100000)); /* 4 PB: making a plan only computes, and allocates no arena */
    expect_refusal(cube, 3000000, "more than 2^61 bytes");
    expect_refusal(cube, INT64_MAX, "expected 0 to 2^62");
    expect_refusal(cube, -1, "negative");
    const char *huge = "deepwell graph 1\nsymbols B\n"
                       "input %x: f32[4611686018427387904, 4611686018427387904]\n"
                       "%y = neg(%x)\nreturn %y\n";
    expect_refusal(huge, 1, "more than 2^61 bytes");
    /* A dim of 0 makes a tensor empty, whatever its other dims are. */
    expect_refusal(B_TEXT "input %x: f32[B, 4611686018427387904, 4]\n%y = neg(%x)\nreturn %y\n", 0,
                   "more than 2^61 bytes");
    expect_refusal("deepwell graph 1\ninput %x: f32[1,1,1,1,1,1,1,1,1]\nreturn %x\n", 1, "8");
    expect_refusal("deepwell graph 1\ninput %x: f32[99999999999999999999]\nreturn %x\n", 1,
                   "line 2");
}

/* Each size fits into a number, but the sum does not: it must not wrap to a small arena. */
static void sums_of_sizes_do_not_wrap(void **state) {
    (void)state;
    enum { MATMULS = 24 };
    dw__text text = {0};
    OK(dw__text_printf(&text, B_TEXT "input %%x: f32[B, 4]\ninput %%w: f32[4, 4]\n"
                                     "%%m0 = matmul(%%x, %%w)\n"));
    for (int i = 1; i < MATMULS; i++)
        OK(dw__text_printf(&text, "%%m%d = matmul(%%m%d, %%w)\n", i, i - 1));
    /* Read from the last to the first, so all are alive at once. */
    for (int i = 1; i < MATMULS; i++)
        OK(dw__text_printf(&text, "%%c%d = matmul(%%m%d, %%m%d) {transpose_a=1}\n", i, MATMULS - i,
                           MATMULS - 1 - i));
    OK(dw__text_printf(&text, "return %%c1"));
    for (int i = 2; i < MATMULS; i++) OK(dw__text_printf(&text, ", %%c%d", i));
    OK(dw__text_printf(&text, "\n"));
    assert_null(refusal(text.text, 1000));
    for (int shift = 55; shift < 58; shift++)
        expect_refusal(text.text, INT64_C(1) << shift, "more than 2^6");
    dw__text_free(&text);
}

/* ---- memory that does not exist -------------------------------------------------------------- */

static void arena_beyond_memory_gives_one_message(void **state) {
    (void)state;
    const dw_device *device;
    void *memory = NULL;
    OK(dw_device_find("cpu", &device));
    static const size_t sizes[] = {SIZE_MAX,        SIZE_MAX - 1,         SIZE_MAX / 2,
                                   (size_t)1 << 62, SIZE_MAX - (2 << 20), (size_t)1 << 48};
    for (size_t i = 0; i < DW_COUNT(sizes); i++) {
        char digits[32];
        snprintf(digits, sizeof digits, "%zu bytes", sizes[i]);
        assert_int_equal(dw_device_allocate(device, sizes[i], &memory), DW_OUT_OF_MEMORY);
        assert_non_null(strstr(dw_last_error(), digits));
    }
}

/* ---- data ------------------------------------------------------------------------------------ */

static dw_status run(const char *text, void *first, void *second, float *result) {
    dw_graph *graph = read_text(text);
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    float more[64];
    OK(dw_engine_create(graph, 0, NULL, 0, NULL, NULL, &engine));
    OK(dw_engine_plan(engine, NULL, &plan));
    void *arena = aligned_alloc(64, (dw_plan_arena_bytes(plan) + 127) / 64 * 64);
    dw_binding leaves[] = {{.data = first}, {.data = second}},
               outputs[] = {{.data = result}, {.data = more}};
    dw_status status = dw_plan_forward(plan, arena, leaves, outputs, NULL);
    free(arena);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
    return status;
}

static void indices_outside_are_named(void **state) {
    (void)state;
    float numbers[12] = {0}, result[64];
    static const int64_t bad[] = {4, -1, INT64_MAX, INT64_MIN, 1000};
    for (size_t i = 0; i < DW_COUNT(bad); i++) {
        int64_t index[3] = {0, bad[i], 1};
        char digits[32];
        snprintf(digits, sizeof digits, "%lld", (long long)bad[i]);
        static const char *const texts[] = {
            "deepwell graph 1\ninput %w: f32[4, 3]\ninput %i: i64[3]\n"
            "%y = embedding(%w, %i)\nreturn %y\n",
            "deepwell graph 1\ninput %w: f32[4, 3]\ninput %i: i64[3]\n"
            "%y = take(%w, %i) {axis=0}\nreturn %y\n",
            "deepwell graph 1\ninput %x: f32[3, 4]\ninput %i: i64[3]\n"
            "%y, %l = cross_entropy(%x, %i) {reduction=\"mean\"}\nreturn %y, %l\n",
        };
        for (size_t k = 0; k < DW_COUNT(texts); k++) {
            assert_int_equal(run(texts[k], numbers, index, result), DW_INDEX);
            if (!strstr(dw_last_error(), digits))
                fail_msg("\"%s\" does not name %s", dw_last_error(), digits);
        }
    }
}

/* NaN is an ordinary number to the engine: it propagates from its input and affects nothing else. */
static void nan_propagates_without_failure(void **state) {
    (void)state;
    float x[12], y[64];
    for (int i = 0; i < 12; i++) x[i] = (float)NAN;
    int64_t target[3] = {0, 1, 2};
    OK(run("deepwell graph 1\ninput %x: f32[3, 4]\ninput %i: i64[3]\n"
           "%y, %l = cross_entropy(%x, %i) {reduction=\"mean\"}\nreturn %y, %l\n",
           x, target, y));
    assert_true(y[0] != y[0]);
    OK(run("deepwell graph 1\ninput %x: f32[3, 4]\ninput %i: i64[3]\n"
           "%v, %s = sort(%x) {axis=1}\n%y = softmax(%v) {axis=1}\n%z, %k = top_k(%x) {axis=1, "
           "size=[2]}\n"
           "return %y\n",
           x, target, y));
    assert_true(y[0] != y[0]);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void messages_are_plain_text(void **state) {
    (void)state;
    static const char *const texts[] = {
        "\033[2Jdeepwell", "deepwell graph 1\ninput \x1b]0;owned\x07",
        "deepwell graph 1\n\xff\xfe%", "deepwell graph 1\ninput %\xc3: f32[2]\n",
        "deepwell graph 1\r\n\tx\x7f"};
    for (size_t i = 0; i < DW_COUNT(texts); i++) {
        dw_graph *graph = NULL;
        assert_int_not_equal(dw_graph_from_text(texts[i], &graph), DW_OK);
        for (const char *at = dw_last_error(); *at;) {
            int length = dw__utf8_length(at);
            if (length == 0) fail_msg("byte 0x%02x in \"%s\"", (unsigned char)*at, dw_last_error());
            at += length;
        }
    }
    /* A sequence that the end of the buffer truncates. */
    char name[4000];
    for (size_t i = 0; i + 2 < sizeof name; i += 2) memcpy(name + i, "\xc3\xa9", 3);
    for (int shift = 0; shift < 2; shift++) {
        dw__fail(DW_PARSE, "%s%s", shift ? "x" : "", name);
        for (const char *at = dw_last_error(); *at; at += dw__utf8_length(at))
            assert_true(dw__utf8_length(at) > 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(long_chains_fit_on_a_small_stack),
        cmocka_unit_test(sizes_beyond_all_memory_are_rejected),
        cmocka_unit_test(sums_of_sizes_do_not_wrap),
        cmocka_unit_test(arena_beyond_memory_gives_one_message),
        cmocka_unit_test(indices_outside_are_named),
        cmocka_unit_test(nan_propagates_without_failure),
        cmocka_unit_test(messages_are_plain_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
