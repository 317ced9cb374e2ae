/* Block quantization (cuda/common/quantize.cu) for Hopper and Blackwell on the emulator, with the checker on. Results
 * must equal those of dw_block_quantize and dw_scales_swizzle bit for bit. */
#include "common/quantize_params.h"
#include "deepwell/emulator.h"
#include "deepwell/hardware.h"
#include "deepwell/number.h"
#include "emulated_kernel.h"
#include "emulated_quantize.h"
#include "kernel/cuda/quantize_numbers.h"

_Static_assert(DW_CODES_MXFP8 == (int)DW_SCHEME_MXFP8 &&
                   DW_CODES_MXFP8_E5M2 == (int)DW_SCHEME_MXFP8_E5M2 &&
                   DW_CODES_MXFP4 == (int)DW_SCHEME_MXFP4 && DW_CODES_NVFP4 == (int)DW_SCHEME_NVFP4,
               "schemes are numbered alike");
_Static_assert(DW_RULE_RCEIL == (int)DW_SCALE_RCEIL && DW_RULE_FLOOR == (int)DW_SCALE_FLOOR &&
                   DW_RULE_CEIL == (int)DW_SCALE_CEIL,
               "rules are numbered alike");

typedef struct variant {
    int input, scheme, rule, rows, columns, square;
} variant;
#define ROW(...) {__VA_ARGS__},
static const variant variants[] = {EMULATED_QUANTIZE(ROW)};

typedef struct architecture {
    const char *compiled_for, *run_on;
} architecture;
static const architecture architectures[] = {{"sm_90a", "sm_90a"}, {"sm_100f", "sm_100a"}};

static dw__jit_variant jit_variant(const variant *v, const char *arch) {
    dw__jit_variant jit = {.source = "common/quantize.cu", .arch = arch};
    dw__jit_add_define(&jit, "INPUT", v->input);
    dw__jit_add_define(&jit, "SCHEME", v->scheme);
    dw__jit_add_define(&jit, "RULE", v->rule);
    dw__jit_add_define(&jit, "ROWS", v->rows);
    dw__jit_add_define(&jit, "COLUMNS", v->columns);
    dw__jit_add_define(&jit, "SQUARE", v->square);
    return jit;
}

/* ---- numbers --------------------------------------------------------------------------------------- */

static void fill(const matrix *x, uint64_t seed, bool ordinary) {
    uint64_t state = seed;
    for (int i = 0; i < x->rows; i++)
        for (int j = 0; j < x->columns; j++) {
            uint64_t region = seed + (uint64_t)(i / 32 * 1000 + j / 32);
            const int kind = quantize_kind(random_word(&region), ordinary);
            uint32_t bits = quantize_number(random_word(&state), kind);
            const bool any = kind == QUANTIZE_ANY_BITS; /* numbers of which BF16 and F16 have all */
            if (x->type == MATRIX_BF16 && any) bits <<= 16;
            set(x, i, j, dw__f32_from_bits(bits));
            if (x->type == MATRIX_F16 && any)
                ((uint16_t *)x->host)[(size_t)i * (x->pitch / 2) + (size_t)j] = (uint16_t)bits;
        }
}

/* ---- one matrix ------------------------------------------------------------------------------------ */

typedef struct problem {
    variant v;
    architecture arch;
    int rows, columns;
    int odd; /* elements by which rows miss multiples of 16 bytes */
    bool ordinary, given;
    uint64_t seed;
    const char *without;
} problem;

/* Codes and scales of one direction, filled with 0xFF before the run. */
typedef struct result {
    dw_block_layout layout;
    size_t stride, code_bytes, scale_bytes;
    uint8_t *codes, *scales; /* memory of the host */
    void *device_codes, *device_scales;
} result;

static dw_block_options options_of(const variant *v, int axis, float tensor_scale) {
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    options.scheme = (dw_scheme)v->scheme;
    options.scale_rule = v->scheme == DW_CODES_NVFP4 ? DW_SCALE_AMAX : (dw_scale_rule)v->rule;
    options.square = v->square;
    options.axis = axis;
    options.tensor_scale = tensor_scale;
    return options;
}

static void open_result(result *r, dw_emulator *emulator, const problem *p, int axis) {
    dw_block_options options = options_of(&p->v, axis, 1);
    assert_int_equal(dw_block_layout_of(&options, p->rows, p->columns, &r->layout), DW_OK);
    r->stride = ((size_t)r->layout.row_bytes + 15) / 16 * 16 + (p->seed % 3) * 16;
    r->code_bytes = (size_t)r->layout.outer * r->stride;
    r->scale_bytes = (size_t)dw_scales_swizzled_bytes(r->layout.outer, r->layout.scale_cols);
    r->codes = malloc(r->code_bytes);
    r->scales = malloc(r->scale_bytes);
    assert_non_null(r->codes);
    assert_non_null(r->scales);
    assert_int_equal(dw_emulator_allocate(emulator, r->code_bytes, &r->device_codes), DW_OK);
    assert_int_equal(dw_emulator_allocate(emulator, r->scale_bytes, &r->device_scales), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, r->device_codes, 0xFF, r->code_bytes), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, r->device_scales, 0xFF, r->scale_bytes), DW_OK);
}
static void close_result(result *r) {
    free(r->codes);
    free(r->scales);
}

static void compare(const problem *p, const char *what, const uint8_t *is, const uint8_t *should,
                    size_t bytes, size_t pitch) {
    for (size_t i = 0; i < bytes; i++)
        if (is[i] != should[i])
            fail_msg("%s of %d x %d, input %d, scheme %d, rule %d, square %d, %s: byte %zu of line "
                     "%zu is %02x, not %02x",
                     what, p->rows, p->columns, p->v.input, p->v.scheme, p->v.rule, p->v.square,
                     p->arch.run_on, i % pitch, i / pitch, is[i], should[i]);
}

static void check_result(const problem *p, result *r, dw_emulator *emulator, int axis,
                         const float *numbers, float tensor_scale) {
    dw_block_options options = options_of(&p->v, axis, tensor_scale);
    uint8_t *codes = malloc(r->code_bytes), *scales = malloc(r->layout.scale_bytes),
            *ordered = malloc(r->scale_bytes);
    assert_non_null(codes);
    assert_non_null(scales);
    assert_non_null(ordered);
    memset(codes, 0xFF, r->code_bytes);
    assert_int_equal(dw_block_quantize(&options, p->rows, p->columns, numbers, p->columns, codes,
                                       (int64_t)r->stride, scales),
                     DW_OK);
    assert_int_equal(dw_scales_swizzle(r->layout.outer, r->layout.scale_cols,
                                       p->v.square ? r->layout.block : 1, scales, ordered),
                     DW_OK);
    assert_int_equal(dw_emulator_copy_out(emulator, r->codes, r->device_codes, r->code_bytes),
                     DW_OK);
    assert_int_equal(dw_emulator_copy_out(emulator, r->scales, r->device_scales, r->scale_bytes),
                     DW_OK);
    compare(p, axis ? "codes" : "codes along columns", r->codes, codes, r->code_bytes, r->stride);
    compare(p, axis ? "scales" : "scales along columns", r->scales, ordered, r->scale_bytes, 512);
    free(codes);
    free(scales);
    free(ordered);
}

typedef struct run {
    dw_emulator *emulator;
    matrix source;
    result results[2]; /* by axis */
    void *amax, *tensor_scale;
    dw_status status;
    uint64_t instructions;
} run;

static void open_run(const problem *p, run *r) {
    static const matrix_type types[] = {MATRIX_BF16, MATRIX_F16, MATRIX_F32};
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    options.seed = p->seed;
    *r = (run){0};
    assert_int_equal(dw_emulator_create(p->arch.run_on, &options, &r->emulator), DW_OK);
    matrix *x = &r->source;
    *x = (matrix){.rows = p->rows, .columns = p->columns, .type = types[p->v.input]};
    const size_t width = (size_t)bits_of(x->type) / 8;
    x->pitch = (row_bytes(x) + PAD_BYTES + 15) / 16 * 16 + (size_t)p->odd * width;
    x->bytes = (size_t)x->rows * x->pitch;
    x->host = malloc(x->bytes);
    assert_non_null(x->host);
    memset(x->host, 0xFF, x->bytes); /* NaNs after the rows */
    fill(x, p->seed, p->ordinary);
    /* The last row ends at the end of the memory. */
    x->bytes -= x->pitch - row_bytes(x);
    assert_int_equal(dw_emulator_allocate(r->emulator, x->bytes, &x->device), DW_OK);
    copy_in(x, r->emulator);
    for (int axis = 0; axis < 2; axis++) open_result(&r->results[axis], r->emulator, p, axis);
    const float zero = 0, given = 0.0123f;
    assert_int_equal(dw_emulator_allocate(r->emulator, 4, &r->amax), DW_OK);
    assert_int_equal(dw_emulator_copy_in(r->emulator, r->amax, &zero, 4), DW_OK);
    assert_int_equal(dw_emulator_allocate(r->emulator, 4, &r->tensor_scale), DW_OK);
    assert_int_equal(dw_emulator_copy_in(r->emulator, r->tensor_scale, &given, 4), DW_OK);
}

static void launch(const problem *p, run *r) {
    const dw__jit_variant jit = jit_variant(&p->v, p->arch.compiled_for);
    dw_emulator_module *module = load_variant(r->emulator, &jit, p->without);
    dw_quantize_params params = {
        .source = r->source.device,
        .row_stride = (long long)(r->source.pitch / ((size_t)bits_of(r->source.type) / 8)),
        .rows = p->rows,
        .columns = p->columns,
        .along_rows = {r->results[1].device_codes, (long long)r->results[1].stride,
                       r->results[1].device_scales},
        .along_columns = {r->results[0].device_codes, (long long)r->results[0].stride,
                          r->results[0].device_scales},
        .amax = p->given ? NULL : r->amax,
        .tensor_scale = r->tensor_scale,
    };
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    options.grid[0] = (uint32_t)(DW_QUANTIZE_TILES(p->rows) * DW_QUANTIZE_TILES(p->columns));
    options.block[0] = DW_QUANTIZE_THREADS;
    if (!p->given && p->v.scheme == DW_CODES_NVFP4) {
        r->status =
            dw_emulator_launch(module, "quantize_amax", &options, (void *[]){&params}, NULL);
        expect_no_finding(r->emulator);
        assert_int_equal(r->status, DW_OK);
    }
    r->status = dw_emulator_launch(module, "quantize_blocks", &options, (void *[]){&params},
                                   &r->instructions);
    dw_emulator_unload(module);
}

static void close_run(run *r) {
    dw_emulator_destroy(r->emulator);
    free(r->source.host);
    for (int axis = 0; axis < 2; axis++) close_result(&r->results[axis]);
}

static void expect_exact(const problem *p) {
    run r;
    open_run(p, &r);
    launch(p, &r);
    expect_no_finding(r.emulator);
    if (r.status != DW_OK) fail_msg("%s", dw_last_error());
    float *numbers = malloc(sizeof(float) * (size_t)p->rows * (size_t)p->columns);
    assert_non_null(numbers);
    for (int i = 0; i < p->rows; i++)
        for (int j = 0; j < p->columns; j++)
            numbers[(size_t)i * (size_t)p->columns + (size_t)j] = get(&r.source, i, j);
    float tensor_scale;
    assert_int_equal(dw_emulator_copy_out(r.emulator, &tensor_scale, r.tensor_scale, 4), DW_OK);
    if (p->v.scheme == DW_CODES_NVFP4 && !p->given) {
        float amax, found;
        assert_int_equal(dw_amax(p->rows, p->columns, numbers, p->columns, &amax), DW_OK);
        assert_int_equal(dw_emulator_copy_out(r.emulator, &found, r.amax, 4), DW_OK);
        assert_memory_equal(&found, &amax, 4);
        amax = dw_nvfp4_tensor_scale(amax);
        assert_memory_equal(&tensor_scale, &amax, 4);
    }
    if (p->v.rows) check_result(p, &r.results[1], r.emulator, 1, numbers, tensor_scale);
    if (p->v.columns) check_result(p, &r.results[0], r.emulator, 0, numbers, tensor_scale);
    free(numbers);
    close_run(&r);
}

/* ---- tests ----------------------------------------------------------------------------------------- */

static void need_variants(void) {
    const dw__jit_variant jit = jit_variant(&variants[0], "sm_100f");
    need_ptx(&jit);
}

/* Shapes: one element, primes, one past a tile, no multiples of a block, lines shorter than a chunk of codes; rows that
 * do not start at multiples of 16 bytes. */
static void codes_and_scales_are_exact(void **state) {
    static const struct {
        int rows, columns, odd;
    } shapes[] = {{1, 1, 0}, {129, 257, 0}, {67, 131, 1}, {256, 128, 0}, {17, 48, 0}, {3, 391, 0}};
    (void)state;
    need_variants();
    for (size_t a = 0; a < DW_COUNT(architectures); a++)
        for (size_t i = 0; i < DW_COUNT(variants); i++)
            for (size_t s = 0; s < DW_COUNT(shapes); s++)
                for (int ordinary = 0; ordinary < 2; ordinary++) {
                    problem p = {.v = variants[i],
                                 .arch = architectures[a],
                                 .rows = shapes[s].rows,
                                 .columns = shapes[s].columns,
                                 .odd = shapes[s].odd,
                                 .ordinary = ordinary,
                                 .given = s % 2,
                                 .seed = 1 + i + 100 * s + 1000 * (size_t)ordinary};
                    expect_exact(&p);
                }
}

/* If there are only zeros, or only NaNs, the tensor scale is 1. */
static void tensor_scale_of_zeros_is_one(void **state) {
    (void)state;
    need_variants();
    run r;
    problem p = {
        .v = {0, DW_CODES_NVFP4, 1, 1, 1, 0}, .arch = architectures[1], .rows = 40, .columns = 40};
    for (int nan = 0; nan < 2; nan++) {
        float found;
        open_run(&p, &r);
        memset(r.source.host, nan ? 0xFF : 0, r.source.bytes);
        copy_in(&r.source, r.emulator);
        launch(&p, &r);
        expect_no_finding(r.emulator);
        assert_int_equal(dw_emulator_copy_out(r.emulator, &found, r.tensor_scale, 4), DW_OK);
        assert_true(found == 1);
        assert_int_equal(
            dw_emulator_copy_out(r.emulator, r.results[1].scales, r.results[1].device_scales, 1),
            DW_OK);
        assert_int_equal(r.results[1].scales[0], nan ? 0x7F : 0);
        close_run(&r);
    }
}

static void mistakes_are_found(void **state) {
    static const mistake mistakes[] = {
        {"bar.sync", "race", "nothing orders the two"},
        {"st.shared.v2", "undefined", "never written"},
        {"st.shared.u8", "undefined", "never written"},
    };
    (void)state;
    need_variants();
    for (size_t i = 0; i < DW_COUNT(mistakes); i++) {
        problem p = {.v = variants[0],
                     .arch = architectures[1],
                     .rows = 100, /* a single block has the same first finding each time */
                     .columns = 120,
                     .seed = 5,
                     .without = mistakes[i].opcode};
        run r;
        open_run(&p, &r);
        launch(&p, &r);
        expect_found(r.emulator, &mistakes[i]);
        close_run(&r);
    }
}

/* ---- cost model ------------------------------------------------------------------------------------ */

static double least_microseconds(const char *gpu, double bytes) {
    dw_hardware *hardware;
    assert_int_equal(dw_hardware_named(gpu, &hardware), DW_OK);
    double seconds = bytes / hardware->memory_bandwidth.value;
    dw_hardware_destroy(hardware);
    return seconds * 1e6;
}

/* Bytes that must be moved for 8192 x 8192 elements: they are read once, and codes and scales are written once. */
static void traffic_is_bounded(void **state) {
    enum { SIZE = 8192 };
    static const char *const inputs[] = {"BF16", "F16", "F32"};
    (void)state;
    print_message(
        "input  scheme      directions  bytes/element  B200    H200 (least us of 8192 x 8192)\n");
    for (size_t i = 0; i < DW_COUNT(variants); i++) {
        const variant *v = &variants[i];
        const double width = v->input == DW_QUANTIZE_F32 ? 4 : 2,
                     code = v->scheme >= DW_CODES_MXFP4 ? 0.5 : 1,
                     scale = v->scheme == DW_CODES_NVFP4 ? 1.0 / 16 : 1.0 / 32;
        double bytes = width * SIZE * SIZE;
        for (int axis = 0; axis < 2; axis++) {
            dw_block_options options = options_of(v, axis, 1);
            dw_block_layout layout;
            options.square = 0; /* scales are repeated for each line */
            assert_int_equal(dw_block_layout_of(&options, SIZE, SIZE, &layout), DW_OK);
            if (axis ? v->rows : v->columns)
                bytes += (double)layout.code_bytes +
                         (double)dw_scales_swizzled_bytes(layout.outer, layout.scale_cols);
        }
        const double each = bytes / SIZE / SIZE;
        assert_true(each == width + (v->rows + v->columns) * (code + scale));
        print_message("%-5s  %-10s  %10d  %13.4f  %4.0f  %6.0f\n", inputs[v->input],
                      dw_scheme_name((dw_scheme)v->scheme), v->rows + v->columns, each,
                      least_microseconds("b200", bytes), least_microseconds("h200", bytes));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(traffic_is_bounded),
        cmocka_unit_test(codes_and_scales_are_exact),
        cmocka_unit_test(tensor_scale_of_zeros_is_one),
        cmocka_unit_test(mistakes_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
