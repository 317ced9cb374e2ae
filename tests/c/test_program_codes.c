/* Elementwise programs whose results become codes of fp8-block as they are computed, on an emulated Hopper GPU with the
 * checker on: every byte beside that of a plan in which programs and codes are apart. DEEPWELL_TEST_DEVICE=cuda runs the
 * same on a Hopper GPU. */
#include "deepwell/engine.h"
#include "random_numbers.h"
#include "run_time_compiler.h"
#include <string.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        if ((call) != DW_OK) fail_msg("%s", dw_last_error());                                      \
    } while (0)

enum { MOST_LEAVES = 4, MOST_OUTPUTS = 10 };

typedef struct bytes {
    unsigned char *at;
    size_t count;
} bytes;

/* A plan's listing and the bytes of its outputs. */
typedef struct ran {
    char *listing;
    bytes outputs[MOST_OUTPUTS];
    uint32_t output_count;
} ran;

typedef struct problem {
    const char *graph;
    int leaves;
    int64_t elements; /* of each leaf */
    bool f16, special, no_zeros;
    int together; /* instructions of program_codes */
    int apart;    /* instructions of fp8_block_codes beside them */
} problem;

/* Numbers of many magnitudes; if they are special, with an infinity and a NaN, and small numbers in between. */
static uint16_t number_of(const problem *p, int64_t i) {
    const uint32_t random = next_random();
    const uint16_t sign = (uint16_t)(random & 0x8000u);
    if (p->special && i % 7919 == 4000) return sign | (p->f16 ? 0x7c00 : 0x7f80);
    if (p->special && i % 9973 == 6000) return sign | (p->f16 ? 0x7e00 : 0x7fc0);
    if (p->no_zeros || random >> 16 & 7) /* 2^-3 to 2^1 */
        return sign | (p->f16 ? 0x3000 + (random & 0x0fff) : 0x3e00 + (random & 0x01ff));
    return p->special && !p->f16 ? sign | (uint16_t)(0x1000 + (random & 0x01ff)) : sign;
}

static void count_of(const char *text, const char *word, int expected) {
    int count = 0;
    for (const char *at = text; (at = strstr(at, word)); at++) count++;
    if (count != expected)
        fail_msg("%d times \"%s\", expected %d, in\n%s", count, word, expected, text);
}

static void run_plan(const problem *p, const char *epilogues, ran *r) {
    const char *device = getenv("DEEPWELL_TEST_DEVICE");
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_binding leaves[MOST_LEAVES] = {{0}}, outputs[MOST_OUTPUTS] = {{0}};
    const size_t leaf_bytes = (size_t)p->elements * sizeof(uint16_t);
    uint16_t *numbers = malloc(leaf_bytes);
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    void *arena = NULL;
    if (epilogues)
        setenv("DEEPWELL_EPILOGUES", epilogues, 1);
    else
        unsetenv("DEEPWELL_EPILOGUES");
    OK(dw_device_find(device ? device : "emulator:sm_90a", &options.device));
    OK(dw_graph_from_text(p->graph, &graph));
    OK(dw_engine_create(graph, 0, NULL, 0, NULL, &options, &engine));
    OK(dw_engine_plan(engine, NULL, &plan));
    OK(dw_plan_describe(plan, &r->listing));
    random_state = 5;
    for (int i = 0; i < p->leaves; i++) {
        for (int64_t j = 0; j < p->elements; j++) numbers[j] = number_of(p, j);
        OK(dw_device_allocate(options.device, leaf_bytes, &leaves[i].data));
        OK(dw_device_copy_in(options.device, leaves[i].data, numbers, leaf_bytes));
    }
    r->output_count = dw_plan_output_count(plan);
    for (uint32_t o = 0; o < r->output_count; o++) {
        bytes *own = &r->outputs[o];
        int64_t shape[DW_MAX_RANK];
        const int rank = dw_plan_output_shape(plan, o, shape);
        own->count = dw_tensor_bytes(dw_plan_output_dtype(plan, o), rank, shape);
        own->at = malloc(own->count);
        OK(dw_device_allocate(options.device, own->count, &outputs[o].data));
    }
    const size_t arena_bytes = dw_plan_arena_bytes(plan);
    OK(dw_device_allocate(options.device, arena_bytes + 1, &arena));
    OK(dw_plan_forward(plan, arena, leaves, outputs, NULL));
    OK(dw_plan_synchronize(plan, NULL));
    for (uint32_t o = 0; o < r->output_count; o++) {
        OK(dw_device_copy_out(options.device, r->outputs[o].at, outputs[o].data,
                              r->outputs[o].count));
        dw_device_release(options.device, outputs[o].data, r->outputs[o].count);
    }
    for (int i = 0; i < p->leaves; i++)
        dw_device_release(options.device, leaves[i].data, leaf_bytes);
    dw_device_release(options.device, arena, arena_bytes + 1);
    free(numbers);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

static void end(ran *r) {
    for (uint32_t o = 0; o < r->output_count; o++) free(r->outputs[o].at);
    dw_text_free(r->listing);
}

static void compare(const problem *p) {
    ran together = {0}, apart = {0};
    run_plan(p, NULL, &together);
    run_plan(p, "off", &apart);
    count_of(together.listing, "program_codes", p->together);
    count_of(together.listing, "fp8_block_codes", p->apart);
    count_of(apart.listing, "program_codes", 0);
    assert_int_equal(together.output_count, apart.output_count);
    for (uint32_t o = 0; o < together.output_count; o++) {
        const bytes *a = &together.outputs[o], *b = &apart.outputs[o];
        assert_int_equal(a->count, b->count);
        for (size_t i = 0; i < a->count; i++)
            if (a->at[i] != b->at[i])
                fail_msg("output %u, byte %zu of %zu: %02x, expected %02x, in\n%s", o, i, a->count,
                         a->at[i], b->at[i], p->graph);
    }
    end(&together);
    end(&apart);
}

#define CODES(prefix, x)                                                                           \
    "%" prefix "0, %" prefix "1, %" prefix "2, %" prefix "3 = quantize_tiles(%" x                  \
    ") {scheme=\"fp8-block\"}\n"
#define ALL(prefix) "%" prefix "0, %" prefix "1, %" prefix "2, %" prefix "3"

static void results_have_the_bits_of_two_launches(void **state) {
    static const problem problems[] = {
        /* SwiGLU of three axes behind a reshape: edges both ways, several tiles of a block */
        {.graph = "deepwell graph 1\ninput %g: bf16[2, 100, 264]\ninput %u: bf16[2, 100, 264]\n"
                  "%h = fused(%g, %u) {body=\"t0=silu(i0);t1=mul(t0,i1);out(t1)\"}\n"
                  "%r = reshape(%h) {shape=[200, 264]}\n" CODES("c", "r") "return " ALL("c") "\n",
         .leaves = 2,
         .elements = 2 * 100 * 264,
         .together = 1},
        /* its gradient: two results of three operands, of which a row is not staged */
        {.graph = "deepwell graph 1\ninput %g: bf16[260, 136]\ninput %u: bf16[260, 136]\n"
                  "input %d: bf16[260, 136]\n"
                  "%a, %b = fused(%g, %u, %d) {body=\"t0=silu(i0);t1=mul(i2,t0);t2=mul(i2,i1);"
                  "t3=silu_backward(i0,t2);out(t3,t1)\"}\n" CODES("c", "a")
                      CODES("e", "b") "return " ALL("c") ", " ALL("e") "\n",
         .leaves = 3,
         .elements = 260 * 136,
         .special = true,
         .together = 1},
        /* the second result becomes codes, and both are stored */
        {.graph = "deepwell graph 1\ninput %x: f16[133, 72]\n"
                  "%a, %b = fused(%x) {body=\"t0=tanh(i0);t1=mul(i0,c0.7);out(t0,t1)\"}\n" CODES(
                      "c", "b") "return %a, %b, " ALL("c") "\n",
         .leaves = 1,
         .elements = 133 * 72,
         .f16 = true,
         .special = true,
         .together = 1},
        /* as many operands and results as there may be, of which three become codes */
        {.graph = "deepwell graph 1\ninput %x: bf16[150, 136]\ninput %y: bf16[150, 136]\n"
                  "input %z: bf16[150, 136]\ninput %w: bf16[150, 136]\n"
                  "%a, %b, %d, %e = fused(%x, %y, %z, %w) {body=\"t0=mul(i0,i1);t1=add(t0,i2);"
                  "t2=mul(t1,i3);t3=tanh(t2);out(t3,t0,t1,t2)\"}\n" CODES("c", "a") CODES("f", "d")
                      CODES("g", "e") "return %b, %c0, %c1, %c2, %c3, %f2, %f3, %g0, %g2, %g3\n",
         .leaves = 4,
         .elements = 150 * 136,
         .together = 1},
        /* both results of one operand */
        {.graph = "deepwell graph 1\ninput %x: f16[40, 264]\n"
                  "%a, %b = fused(%x) {body=\"t0=tanh(i0);t1=mul(i0,c0.7);out(t0,t1)\"}\n" CODES(
                      "c", "a") CODES("e", "b") "return " ALL("c") ", " ALL("e") "\n",
         .leaves = 1,
         .elements = 40 * 264,
         .f16 = true,
         .together = 1},
        /* the program of 0 is larger than any result: beyond the edges there are zeros; one orientation alone */
        {.graph = "deepwell graph 1\ninput %x: bf16[70, 136]\n"
                  "%h = fused(%x) {body=\"t0=abs(i0);t1=neg(t0);t2=exp(t1);out(t2)\"}\n" CODES(
                      "c", "h") "return %c2, %c3\n",
         .leaves = 1,
         .elements = 70 * 136,
         .no_zeros = true,
         .together = 1},
        /* rows of no whole vectors, and square blocks, are left to two launches */
        {.graph = "deepwell graph 1\ninput %x: bf16[40, 132]\n"
                  "%h = fused(%x) {body=\"t0=tanh(i0);out(t0)\"}\n" CODES("c", "h") "return " ALL(
                      "c") "\n",
         .leaves = 1,
         .elements = 40 * 132,
         .apart = 1},
        {.graph = "deepwell graph 1\ninput %x: bf16[40, 136]\n"
                  "%h = fused(%x) {body=\"t0=tanh(i0);out(t0)\"}\n"
                  "%c0, %c1, %c2, %c3 = quantize_tiles(%h) {scheme=\"fp8-block\", square=1}\n"
                  "return " ALL("c") "\n",
         .leaves = 1,
         .elements = 40 * 136,
         .apart = 1},
    };
    (void)state;
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(problems); i++) compare(&problems[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_have_the_bits_of_two_launches),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
