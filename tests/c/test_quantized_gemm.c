/* Block quantization, and GEMMs of its results, through the library's own calls on emulated GPUs with the checker on.
 * Codes must equal src/number's bit for bit, and GEMMs are compared with sums in double. Also rejected calls and
 * results of first-use checks. */
#include "deepwell/engine.h"
#include "emulated_gemm_scaled.h"
#include "emulated_quantize.h"
#include "emulated_quantized_gemm.h"
#include "library_quantized_gemm.h"

/* ---- kernels --------------------------------------------------------------------------------------- */

typedef struct scaled_row {
    int scheme_a, scheme_b, ctas, tile_n, stages, element, output, activation, bias, residual,
        schedule;
} scaled_row;
typedef struct quantize_row {
    int input, scheme, rule, rows, columns, square;
} quantize_row;
#define ROW(...) {__VA_ARGS__},
static const scaled_row gemms[] = {EMULATED_QUANTIZED_GEMM(ROW) EMULATED_GEMM_SCALED(ROW)};
static const quantize_row quantizations[] = {EMULATED_QUANTIZE(ROW)};

static dw__gemm_shape shape_of(const scaled_row *r) {
    dw__gemm_shape s = {.scheme_a = (uint64_t)r->scheme_a,
                        .scheme_b = (uint64_t)r->scheme_b,
                        .output = r->output,
                        .f16 = r->element,
                        .bias = r->bias,
                        .residual = r->residual,
                        .activation = (dw_activation)r->activation};
    for (s.tile = 0; s.tile < DW__GEMM_TILES; s.tile++) {
        const dw__gemm_tile *t = &dw__gemm_tiles[s.tile];
        if (dw__gemm_exists(&s) && t->ctas == r->ctas && t->n == r->tile_n &&
            t->stages == r->stages)
            return s;
    }
    fail();
    return s;
}
static dw__jit_variant gemm_variant(const scaled_row *r) {
    const dw__gemm_shape shape = shape_of(r);
    return dw__gemm_variant(&shape);
}

static const dw_dtype inputs[] = {DW_BF16, DW_F16, DW_F32};
static dw__quantize_shape quantize_shape(const quantize_row *r) {
    return (dw__quantize_shape){
        .dtype = inputs[r->input],
        .scheme = (dw_scheme)r->scheme,
        .rule = r->scheme == DW_SCHEME_NVFP4 ? DW_SCALE_AMAX : (dw_scale_rule)r->rule,
        .along_rows = r->rows,
        .along_cols = r->columns,
        .square = r->square,
    };
}
static dw__jit_variant quantize_variant(const quantize_row *r, const char *arch) {
    const dw__quantize_shape shape = quantize_shape(r);
    return dw__quantize_variant(&shape, "quantize_blocks", arch);
}

static void need_kernels(void) {
    const dw__jit_variant variant = gemm_variant(&gemms[0]);
    need_ptx(&variant);
}

/* D as MXFP8, from a GEMM of unquantized operands. */
static const dw__gemm_shape dense_shape = {
    .tile = 1, .output = DW_GEMM_OUTPUT_MXFP8, .bias = true, .activation = DW_ACTIVATION_GELU};

static void carry_all(void) {
    static bool done;
    if (done) return;
    done = true;
    const dw__jit_variant dense = dw__gemm_variant(&dense_shape);
    carry_variant(&dense);
    for (size_t i = 0; i < DW_COUNT(gemms); i++) {
        const dw__jit_variant variant = gemm_variant(&gemms[i]);
        if (!gemms[i].schedule) carry_variant(&variant);
    }
    for (size_t i = 0; i < DW_COUNT(quantizations); i++)
        for (int hopper = 0; hopper < 2; hopper++) {
            const dw__jit_variant variant =
                quantize_variant(&quantizations[i], hopper ? "sm_90a" : "sm_100f");
            carry_variant(&variant);
        }
}

/* ---- quantization ---------------------------------------------------------------------------------- */

/* Compares the kernel with src/number for every compiled scheme and architecture: 1, primes, one past a tile; rows at
 * any address. */
static void codes_and_scales_are_exact(void **state) {
    static const char *const devices[] = {"emulator:sm_90a", "emulator:sm_100a",
                                          "emulator:sm_103a"};
    static const int shapes[][2] = {{1, 1}, {67, 131}, {129, 257}, {0, 5}, {5, 0}};
    (void)state;
    need_kernels();
    carry_all();
    for (size_t i = 0; i < DW_COUNT(quantizations); i++) {
        const quantize_row *q = &quantizations[i];
        const dw_device *device = device_named(devices[i % DW_COUNT(devices)]);
        const recipe how = {(dw_scheme)q->scheme, inputs[q->input],
                            q->scheme == DW_SCHEME_NVFP4 ? DW_SCALE_DEFAULT
                                                         : (dw_scale_rule)q->rule,
                            q->square, !q->columns};
        uint64_t seed = i;
        if (!q->rows) continue; /* of one direction the other way, operands here have rows */
        for (size_t s = 0; s < DW_COUNT(shapes); s++) {
            operand o;
            open_operand(&o, device, &how, shapes[s][0], shapes[s][1], 1, &seed);
            close_operand(&o, device);
        }
    }
}

/* ---- GEMMs ----------------------------------------------------------------------------------------- */

static void open_run(const problem *p, run *r, uint64_t seed) {
    open_run_on("emulator:sm_100a", p, r, seed);
}
static void expect_right(const problem *p, uint64_t seed) {
    expect_right_on("emulator:sm_100a", p, seed);
}

/* Quantizes and then multiplies: each scheme, one element, primes, one past a tile, no multiples of a block, K of 0. */
static void quantized_operands_give_the_right_gemm(void **state) {
    static const problem problems[] = {
        {MXFP8, MXFP8, 1, 1, 1, 0, false, false, false},
        {MXFP8, MXFP8, 131, 67, 367, 0, false, false, false},
        {MXFP8, MXFP8, 3, 70, 0, 0, false, false, false},
        {MXFP8, MXFP8, 0, 9, 5, 0, false, false, false},
        {MXFP8, MXFP8_E5M2, 129, 257, 65, 0, false, false, false},
        {MXFP8, MXFP8, 67, 131, 130, DW_ACTIVATION_GELU, true, false, true},
        {NVFP4, NVFP4, 67, 129, 367, 0, false, false, false},
        {NVFP4, NVFP4, 1, 1, 1, 0, false, false, false},
        {NVFP4_ROWS, NVFP4_SQUARES, 201, 100, 81, DW_ACTIVATION_SWIGLU, false, true, false},
        {MXFP4, MXFP4, 67, 300, 131, DW_ACTIVATION_GELU, false, false, false},
    };
    (void)state;
    need_kernels();
    carry_all();
    for (size_t i = 0; i < DW_COUNT(problems); i++) expect_right(&problems[i], 10 + i);
}

/* D of one GEMM, with its codes and scales unchanged, is A of the next GEMM. */
static void quantized_output_is_the_next_input(void **state) {
    static const problem first = {MXFP8, MXFP8, 67,  131, 130, DW_ACTIVATION_GELU,
                                  true,  false, true},
                         second = {MXFP8, MXFP8, 67, 70, 131, 0, false, false, false};
    run one, two;
    (void)state;
    need_kernels();
    carry_all();
    open_run(&first, &one, 3);
    open_run(&second, &two, 4);
    two.call.a = one.call.d;
    two.call.scales_a = one.call.scales_d;
    assert_int_equal(dw_gemm_run(&one.call), DW_OK);
    if (dw_gemm_run(&two.call) != DW_OK) fail_msg("%s", dw_last_error());
    check(&one);
    find_values(&one.d, DW_SCHEME_MXFP8, 1, two.a.values);
    check(&two);
    close_run(&one);
    close_run(&two);
}

/* A GEMM of unquantized operands, with codes and scales as its result. */
static void unquantized_gemm_with_quantized_output(void **state) {
    static const problem p = {MXFP8, MXFP8, 67, 131, 45, DW_ACTIVATION_GELU, true, false, true};
    run r;
    (void)state;
    need_kernels();
    carry_all();
    open_run(&p, &r, 8);
    r.call.quantized = 0;
    r.call.a = matrix_of(&r.a.source);
    r.call.b = matrix_of(&r.b.source);
    for (int i = 0; i < p.m; i++)
        for (int j = 0; j < p.k; j++) r.a.values[i * p.k + j] = (double)get(&r.a.source, i, j);
    for (int i = 0; i < p.n; i++)
        for (int j = 0; j < p.k; j++) r.b.values[i * p.k + j] = (double)get(&r.b.source, i, j);
    if (dw_gemm_run(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    check(&r);
    close_run(&r);
}

/* ---- first use --------------------------------------------------------------------------------------- */

static const problem tiny = {MXFP8, MXFP8, 5, 7, 33, 0, false, false, false};

static char *text_of(const dw__jit_variant *variant) {
    static char *text;
    size_t bytes;
    assert_true(read_ptx(variant, &text, &bytes));
    return text;
}
static void replace(char *text, const char *was, const char *now) {
    char *at = strstr(text, was);
    assert_int_equal(strlen(was), strlen(now));
    assert_non_null(at);
    for (; at; at = strstr(at, was)) memcpy(at, now, strlen(now));
}

static void keep_correct(void) {
    run r;
    carry_all();
    open_run(&tiny, &r, 1); /* quantizes */
    REQUIRE(dw_gemm_supported(&r.call) == DW_OK);
    REQUIRE(dw_gemm_run(&r.call) == DW_OK && lines == 0);
    check(&r);
}

/* Every compiled kernel passes, for every use. */
static void keep_all(void) {
    static const char *const devices[] = {"emulator:sm_90a", "emulator:sm_100a"};
    const dw__context *context;
    const dw__variant *gemm;
    const dw__variant *quantize;
    carry_all();
    for (size_t d = 0; d < DW_COUNT(devices); d++) {
        REQUIRE(device_named(devices[d])->context(&context) == DW_OK);
        for (size_t i = 0; i < DW_COUNT(quantizations); i++) {
            const dw__quantize_shape shape = quantize_shape(&quantizations[i]);
            REQUIRE(dw__variant_of(context, &dw__quantize_blocks, shape.params, &quantize) ==
                    DW_OK);
            REQUIRE(!quantize->disabled);
        }
    }
    REQUIRE(dw__variant_of(context, &dw__sm100_gemm, dense_shape.params, &gemm) == DW_OK);
    REQUIRE(!gemm->disabled);
    for (size_t i = 0; i < DW_COUNT(gemms); i++) {
        const dw__gemm_shape shape = shape_of(&gemms[i]);
        /* The launcher never selects variants with cluster launch control. */
        if (gemms[i].schedule) continue;
        REQUIRE(dw__variant_of(context, &dw__sm100_gemm_scaled, shape.params, &gemm) == DW_OK);
        REQUIRE(!gemm->disabled);
    }
    REQUIRE(lines == 0);
}
static void correct_kernels_pass(void **state) {
    (void)state;
    need_kernels();
    in_child(keep_correct);
    in_child(keep_all);
}

/* A GEMM whose kernel `text` is rejected with `words`: the log reports it once, the kernel stays rejected, and nothing
 * is computed. */
static void refuse_gemm(char *text, const char *words) {
    const dw__jit_variant variant = gemm_variant(&gemms[0]);
    run r;
    carry(name_of(&variant), text);
    carry_all(); /* the second call */
    open_run(&tiny, &r, 1);
    REQUIRE(dw_gemm_supported(&r.call) == DW_UNSUPPORTED);
    REQUIRE(strstr(dw_last_error(), words) && strstr(dw_last_error(), "GEMMs are refused"));
    for (int i = 0; i < 2; i++)
        REQUIRE(dw_gemm_run(&r.call) == DW_UNSUPPORTED && strstr(dw_last_error(), words));
    REQUIRE(lines == 1 && strstr(logged, words));
}

static void keep_other_format(void) { /* reads B as E5M2, which the checker cannot see */
    const dw__jit_variant other = gemm_variant(&gemms[1]);
    refuse_gemm(text_of(&other),
                "disagrees with the reference on Deepwell emulator of sm_100a: D[0][0]");
}
static void keep_without_scales(void) {
    const dw__jit_variant variant = gemm_variant(&gemms[0]);
    char *text = text_of(&variant);
    take_out(text, "tcgen05.cp");
    refuse_gemm(text, "scale factors");
}
static void keep_wrong_quantized_d(void) { /* codes of E5M2 */
    static const problem p = {MXFP8, MXFP8, 5, 7, 33, DW_ACTIVATION_GELU, true, false, true};
    const dw__jit_variant variant = gemm_variant(&gemms[2]);
    char *text = text_of(&variant);
    run r;
    replace(text, "satfinite.e4m3x2", "satfinite.e5m2x2");
    carry(name_of(&variant), text);
    carry_all();
    open_run(&p, &r, 1);
    REQUIRE(dw_gemm_run(&r.call) == DW_UNSUPPORTED && lines == 1);
    REQUIRE(strstr(dw_last_error(), "disagrees with the reference"));
    REQUIRE(strstr(dw_last_error(), "before rounding"));
}
/* Creates an engine of a layer that is quantized to MXFP8, for batches of any size. */
static void layer_engine(dw_engine **engine) {
    static const char text[] = "deepwell graph 1\nsymbols B\ninput %x: bf16[B, 96]\n"
                               "parameter %w: bf16[40, 96]\n%y = linear(%x, %w)\nreturn %y\n";
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_graph *graph = NULL;
    dw_precision_policy *policy = NULL;
    options.device = device_named("emulator:sm_100a");
    REQUIRE(dw_graph_from_text(text, &graph) == DW_OK);
    REQUIRE(dw_precision_policy_load("mxfp8", &policy) == DW_OK);
    options.precision = policy;
    REQUIRE(dw_engine_create(graph, 0, NULL, 0, NULL, &options, engine) == DW_OK);
    dw_precision_policy_destroy(policy);
    dw_graph_destroy(graph);
}
/* An engine simulates the products of a GEMM that is rejected, and says so. */
static void keep_simulated(void) {
    const dw__context *context;
    const dw_gemm call = {.dtype = DW_BF16,
                          .output = DW_F32,
                          .m = 127, /* as the engine asks, which does not know the batch */
                          .n = 40,
                          .k = 96,
                          .quantized = 1,
                          .scheme_a = DW_SCHEME_MXFP8,
                          .scheme_b = DW_SCHEME_MXFP8};
    uint32_t multiplied, simulated;
    dw_engine *engine = NULL;
    REQUIRE(device_named("emulator:sm_100a")->context(&context) == DW_OK);
    const dw__gemm_shape shape = dw__gemm_shape_of(&call, context->sm_count);
    const dw__jit_variant variant = dw__gemm_variant(&shape), other = gemm_variant(&gemms[1]);
    carry(name_of(&variant), text_of(&other));
    layer_engine(&engine);
    const char *reason = dw_engine_code_products(engine, &multiplied, &simulated);
    REQUIRE(multiplied == 0 && simulated == 1);
    REQUIRE(strstr(reason, "it is not used in this process") && lines == 1);
    dw_engine_destroy(engine);
}
static void wrong_gemms_are_rejected(void **state) {
    (void)state;
    need_kernels();
    in_child(keep_other_format);
    in_child(keep_without_scales);
    in_child(keep_wrong_quantized_d);
    in_child(keep_simulated);
}

/* The same for quantization. */
static void refuse_quantization(char *text, const char *words) {
    const dw__jit_variant variant = quantize_variant(&quantizations[0], "sm_100f");
    static char memory[16] __attribute__((aligned(16)));
    const dw_quantized_matrix to = {1, memory, 16, memory};
    const dw_quantize call = {.struct_size = sizeof call,
                              .device = device_named("emulator:sm_100a"),
                              .dtype = DW_BF16,
                              .scheme = DW_SCHEME_MXFP8,
                              .rows = 1,
                              .cols = 1,
                              .source = memory,
                              .along_rows = to,
                              .along_cols = to};
    carry(name_of(&variant), text);
    for (int i = 0; i < 2; i++) {
        REQUIRE(dw_quantize_run(&call) == DW_UNSUPPORTED);
        REQUIRE(strstr(dw_last_error(), words) && strstr(dw_last_error(), "is not used"));
    }
    REQUIRE(dw_quantize_supported(&call) == DW_UNSUPPORTED);
    REQUIRE(lines == 1 && strstr(logged, words));
}
static char *text_of_quantization(void) {
    const dw__jit_variant variant = quantize_variant(&quantizations[0], "sm_100f");
    return text_of(&variant);
}
static void keep_wrong_codes(void) {
    char *text = text_of_quantization();
    replace(text, "satfinite.e4m3x2", "satfinite.e5m2x2");
    refuse_quantization(text,
                        "disagrees with the definition on Deepwell emulator of sm_100a: byte ");
}
static void keep_without_barrier(void) {
    char *text = text_of_quantization();
    take_out(text, "bar.sync");
    refuse_quantization(text, "failed on Deepwell emulator of sm_100a");
}
static void wrong_quantizations_are_rejected(void **state) {
    (void)state;
    need_kernels();
    in_child(keep_wrong_codes);
    in_child(keep_without_barrier);
}

/* ---- rejected calls ------------------------------------------------------------------------------------ */

#define REFUSED(run, status, words, change)                                                        \
    do {                                                                                           \
        c = good;                                                                                  \
        change;                                                                                    \
        assert_int_equal(run(&c), status);                                                         \
        if (!strstr(dw_last_error(), words)) fail_msg("%s: %s", #change, dw_last_error());         \
    } while (0)

static char memory[4096] __attribute__((aligned(16)));

static void wrong_quantizations_give_one_error(void **state) {
    const dw_quantized_matrix to = {1, memory, 16, memory};
    dw_quantize good = {.struct_size = sizeof good,
                        .device = device_named("emulator:sm_100a"),
                        .dtype = DW_BF16,
                        .scheme = DW_SCHEME_NVFP4,
                        .rows = 3,
                        .cols = 5,
                        .source = memory,
                        .row_stride = 5,
                        .along_rows = to,
                        .tensor_scale = (float *)(void *)memory},
                c = good;
    (void)state;
    assert_int_equal(dw__quantize_check(&good, true), DW_OK);
    assert_int_equal(dw_quantize_run(NULL), DW_INVALID_ARGUMENT);
#define BAD(...) REFUSED(dw_quantize_run, __VA_ARGS__)
    BAD(DW_INVALID_ARGUMENT, "struct_size is 8", c.struct_size = 8);
    BAD(DW_TYPE, "the element type is", c.dtype = DW_I64);
    BAD(DW_UNSUPPORTED, "the scheme fp8-block is not supported: expected mxfp8",
        c.scheme = DW_SCHEME_FP8_BLOCK);
    BAD(DW_INVALID_ARGUMENT, "nvfp4 takes DW_SCALE_DEFAULT, _AMAX", c.scale_rule = DW_SCALE_FLOOR);
    BAD(DW_INVALID_ARGUMENT, "mxfp4 takes DW_SCALE_DEFAULT, _RCEIL",
        (c.scheme = DW_SCHEME_MXFP4, c.scale_rule = DW_SCALE_AMAX));
    BAD(DW_INVALID_ARGUMENT, "neither along_rows nor along_cols", c.along_rows.wanted = 0);
    BAD(DW_SHAPE, "rows is -1; expected 0 to 1073741824", c.rows = -1);
    BAD(DW_SHAPE, "cols is 4294967296", c.cols = (int64_t)1 << 32);
    BAD(DW_UNSUPPORTED, "split the rows", c.rows = c.cols = 1 << 30);
    BAD(DW_INVALID_ARGUMENT, "source is NULL", c.source = NULL);
    BAD(DW_INVALID_ARGUMENT, "expected a multiple of 2 bytes", c.source = memory + 1);
    BAD(DW_INVALID_ARGUMENT, "rows of the source are 4 elements apart", c.row_stride = 4);
    BAD(DW_INVALID_ARGUMENT, "along_rows.codes is NULL", c.along_rows.codes = NULL);
    BAD(DW_INVALID_ARGUMENT, "along_cols.scales lies at",
        (c.along_cols = to, c.along_cols.scales = memory + 8));
    BAD(DW_INVALID_ARGUMENT, "along_rows.stride is 24; expected a multiple of 16 bytes from 16",
        c.along_rows.stride = 24);
    BAD(DW_INVALID_ARGUMENT, "tensor_scale is NULL", c.tensor_scale = NULL);
    BAD(DW_INVALID_ARGUMENT, "amax lies at", c.amax = (float *)(void *)(memory + 2));
    BAD(DW_UNSUPPORTED, "\"cpu\" runs no kernels", c.device = device_named("cpu"));
#undef BAD
}

static void wrong_gemms_give_one_error(void **state) {
    dw_gemm good = {.struct_size = sizeof good,
                    .device = device_named("emulator:sm_100a"),
                    .dtype = DW_BF16,
                    .output = DW_BF16,
                    .m = 3,
                    .n = 4,
                    .k = 5,
                    .alpha = 1,
                    .a = {memory, 16},
                    .b = {memory, 16},
                    .d = {memory, 16},
                    .quantized = 1,
                    .scheme_a = DW_SCHEME_NVFP4,
                    .scheme_b = DW_SCHEME_NVFP4,
                    .scales_a = memory,
                    .scales_b = memory},
            c = good;
    (void)state;
    assert_int_equal(dw__gemm_check(&good, true), DW_OK);
#define BAD(...) REFUSED(dw_gemm_run, __VA_ARGS__)
    BAD(DW_UNSUPPORTED, "A is nvfp4 and B is mxfp4; expected", c.scheme_b = DW_SCHEME_MXFP4);
    BAD(DW_UNSUPPORTED, "A is mxfp6-e2m3 and B is mxfp6-e2m3",
        c.scheme_a = c.scheme_b = DW_SCHEME_MXFP6_E2M3);
    BAD(DW_INVALID_ARGUMENT, "scales_a is NULL", c.scales_a = NULL);
    BAD(DW_INVALID_ARGUMENT, "scales_b lies at", c.scales_b = memory + 8);
    BAD(DW_INVALID_ARGUMENT, "scales_d is NULL", c.quantized_d = 1);
    BAD(DW_INVALID_ARGUMENT, "factor_b lies at", c.factor_b = (float *)(void *)(memory + 2));
    BAD(DW_UNSUPPORTED, "D is quantized, and there is a residual",
        (c.quantized_d = 1, c.scales_d = memory, c.residual = c.d));
    BAD(DW_UNSUPPORTED, "the rows of A are 8 bytes apart; expected a multiple of 16",
        c.a.stride = 8);
    BAD(DW_INVALID_ARGUMENT, "the rows of B are 16 bytes apart and 17 long",
        (c.k = 33, c.a.stride = 32));
    BAD(DW_UNSUPPORTED, "sm_90a has no tensor cores for scales of blocks",
        c.device = device_named("emulator:sm_90a"));
#undef BAD
    c = good; /* if k is 0, scales are not read */
    c.k = 0, c.scales_a = c.scales_b = NULL;
    assert_int_equal(dw__gemm_check(&c, true), DW_OK);
    /* The older structure describes a GEMM of unquantized operands. */
    c = good;
    c.struct_size = offsetof(dw_gemm, quantized);
    dw_gemm read;
    assert_int_equal(dw__gemm_read(&c, &read), DW_OK);
    assert_true(!read.quantized && !read.quantized_d && !read.scales_a);
}

/* ---- selection ----------------------------------------------------------------------------------------- */

static void cheapest_tile_is_chosen(void **state) {
    static const struct {
        dw_scheme scheme;
        int64_t m, n, k;
        dw_activation activation;
        bool quantized_d;
        int ctas, tile_n;
    } cases[] = {
        /* A single block waits for shared memory. */
        {DW_SCHEME_MXFP8, 128, 128, 128, 0, false, 2, 128},
        {DW_SCHEME_MXFP8, 8192, 8192, 8192, 0, false, 2, 256},
        {DW_SCHEME_MXFP8, 128, 128, 128, DW_ACTIVATION_SWIGLU, true, 1, 256},
        {DW_SCHEME_NVFP4, 128, 128, 128, 0, false, 1, 128},
        {DW_SCHEME_NVFP4, 201, 100, 81, DW_ACTIVATION_SWIGLU, false, 2, 256},
        {DW_SCHEME_MXFP4, 67, 300, 131, 0, false, 1, 256},
    };
    (void)state;
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        const dw_gemm call = {.dtype = DW_BF16,
                              .output = DW_BF16,
                              .m = cases[i].m,
                              .n = cases[i].n,
                              .k = cases[i].k,
                              .activation = cases[i].activation,
                              .quantized = 1,
                              .quantized_d = cases[i].quantized_d,
                              .scheme_a = cases[i].scheme,
                              .scheme_b = cases[i].scheme};
        dw__gemm_shape shape = dw__gemm_shape_of(&call, 148), other = shape;
        const dw__gemm_tile *t = &dw__gemm_tiles[shape.tile];
        if (t->ctas != cases[i].ctas || t->n != cases[i].tile_n)
            fail_msg("case %zu has CTAS %d, TILE_N %d", i, t->ctas, t->n);
        const double chosen = dw__gemm_cost_of(&call, &shape, 148).clocks;
        for (other.tile = 0; other.tile < DW__GEMM_TILES; other.tile++)
            if (dw__gemm_exists(&other))
                assert_true(chosen <= dw__gemm_cost_of(&call, &other, 148).clocks);
    }
    static const dw_scheme schemes[] = {DW_SCHEME_BF16, DW_SCHEME_MXFP8, DW_SCHEME_MXFP8_E5M2,
                                        DW_SCHEME_NVFP4, DW_SCHEME_MXFP4};
    /* Every scheme has a kernel for every call that is checked. */
    for (size_t k = 0; k < DW_COUNT(schemes); k++)
        for (int output = 0; output < DW__GEMM_OUTPUTS; output++)
            for (int activation = 0; activation < DW_ACTIVATION_COUNT; activation++) {
                dw__gemm_shape s = {.scheme_a = schemes[k],
                                    .scheme_b = schemes[k],
                                    .output = output,
                                    .activation = (dw_activation)activation};
                int count = 0;
                for (s.tile = 0; s.tile < DW__GEMM_TILES; s.tile++) count += dw__gemm_exists(&s);
                assert_true(count > 0);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernels_pass),
        cmocka_unit_test(wrong_gemms_are_rejected),
        cmocka_unit_test(wrong_quantizations_are_rejected),
        cmocka_unit_test(codes_and_scales_are_exact),
        cmocka_unit_test(quantized_operands_give_the_right_gemm),
        cmocka_unit_test(quantized_output_is_the_next_input),
        cmocka_unit_test(unquantized_gemm_with_quantized_output),
        cmocka_unit_test(wrong_quantizations_give_one_error),
        cmocka_unit_test(wrong_gemms_give_one_error),
        cmocka_unit_test(cheapest_tile_is_chosen),
    };
    /* Except in the children, because the tests compare results themselves. */
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
