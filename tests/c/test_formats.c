/* Number formats in C: every instruction set and number of threads gives the definition's bits, nothing is written past
 * the end of a row, and invalid arguments are rejected. Python tests compare the rules with other implementations. */
#include "base/base.h"
#include "base/isa.h"
#include "deepwell/deepwell.h"
#include "number/format.h"
#include "number/scheme_sets.h"
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static uint64_t random_state;
static uint32_t random_word(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}
/* Mostly medium magnitudes, with every other pattern mixed in. */
static float random_float(void) {
    uint32_t word = random_word();
    if (word % 16 == 0) return dw__f32_from_bits(random_word());
    float fraction = (float)(int32_t)random_word() * 0x1p-31f;
    return ldexpf(fraction, (int)(word >> 8) % 32 - 16);
}

/* ---- the definition -------------------------------------------------------------------------- */

static uint32_t code_at(dw_dtype format, const uint8_t *codes, int64_t i) {
    if (!dw__format_is_byte(format)) return codes[2 * i] | (uint32_t)codes[2 * i + 1] << 8;
    if (format == DW_E2M1) return i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 0xFu;
    return codes[i];
}

/* Lengths around a group, a pass and a task, with a canary after the output. */
static void arrays_agree_with_the_definition(void **state) {
    enum { MOST = 33000 };
    static const int64_t counts[] = {0, 1, 15, 16, 17, 1023, 1025, MOST};
    (void)state;
    random_state = 1;
    float *x = malloc(MOST * sizeof *x), *back = malloc((MOST + 1) * sizeof *back);
    uint8_t *codes = malloc(2 * MOST + 1);
    assert_true(x && back && codes);
    for (int i = 0; i < MOST; i++) x[i] = random_float();
    for (int format = 0; format < DW_DTYPE_COUNT; format++) {
        if (!dw__dtype_is_format((dw_dtype)format)) continue;
        for (size_t c = 0; c < DW_COUNT(counts); c++) {
            int64_t count = counts[c], bytes = dw_tensor_bytes((dw_dtype)format, 1, &count);
            dw_encode_options options = DW_ENCODE_OPTIONS_DEFAULT;
            options.overflow = c % 2 ? DW_OVERFLOW_NONFINITE : DW_OVERFLOW_SATURATE;
            codes[bytes] = 0xA5;
            back[count] = 42.0f;
            assert_int_equal(dw_encode((dw_dtype)format, count, x, &options, codes), DW_OK);
            assert_int_equal(dw_decode((dw_dtype)format, count, codes, back), DW_OK);
            assert_int_equal(codes[bytes], 0xA5);
            assert_true(back[count] == 42.0f);
            for (int64_t i = 0; i < count; i++) {
                uint32_t code =
                    dw__encode_one((dw_dtype)format, x[i], options.overflow, DW_ROUND_NEAREST, 0);
                assert_int_equal(code_at((dw_dtype)format, codes, i), code);
                assert_int_equal(dw__f32_bits(back[i]),
                                 dw__f32_bits(dw__decode_one((dw_dtype)format, code)));
            }
        }
    }
    free(x);
    free(back);
    free(codes);
}

/* Compares the loops with the definition for 2^32 / STEP patterns of F32 in each format. */
static void bit_patterns_across_the_range_agree(void **state) {
    enum { STEP = 4099, AT_ONCE = 1 << 14 };
    (void)state;
    static float x[AT_ONCE];
    static uint8_t codes[AT_ONCE];
    uint64_t pattern = 0;
    while (pattern < UINT64_C(1) << 32) {
        int count = 0;
        for (; count < AT_ONCE && pattern < UINT64_C(1) << 32; pattern += STEP)
            x[count++] = dw__f32_from_bits((uint32_t)pattern);
        for (int format = DW_E4M3; format <= DW_E2M3; format++) {
            assert_int_equal(dw_encode((dw_dtype)format, count, x, NULL, codes), DW_OK);
            for (int i = 0; i < count; i++)
                if (codes[i] != dw__encode_one((dw_dtype)format, x[i], DW_OVERFLOW_SATURATE,
                                               DW_ROUND_NEAREST, 0))
                    fail_msg("%s of %a is 0x%X", dw_dtype_name((dw_dtype)format), (double)x[i],
                             codes[i]);
        }
    }
}

/* ---- equal bits everywhere -------------------------------------------------------------------- */

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    const uint8_t *b = bytes; /* FNV-1a */
    for (size_t i = 0; i < count; i++) hash = (hash ^ b[i]) * 0x100000001b3u;
    return hash;
}

enum { ROWS = 67, COLS = 397 };

static uint64_t hash_blocks(uint64_t hash, const float *matrix) {
    static uint8_t codes[ROWS * COLS];
    static float scales[ROWS * COLS], back[ROWS * COLS];
    for (int which = 0; which < DW_SCHEME_COUNT * 16; which++) {
        dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
        options.scheme = (dw_scheme)(which / 16);
        if (!dw__scheme_in(options.scheme, dw__block_schemes)) continue;
        options.axis = which & 1;
        options.square = which >> 1 & 1;
        options.rounding = which >> 2 & 1 ? DW_ROUND_STOCHASTIC : DW_ROUND_NEAREST;
        if (which >> 3 & 1)
            options.scale_rule = options.scheme == DW_SCHEME_NVFP4 ? DW_SCALE_AMAX : DW_SCALE_FLOOR;
        options.random = (dw_random){77, -5, 9};
        options.tensor_scale = 0.0123f;
        dw_block_layout layout;
        assert_int_equal(dw_block_layout_of(&options, ROWS, COLS, &layout), DW_OK);
        assert_int_equal(dw_block_quantize(&options, ROWS, COLS, matrix, COLS, codes, 0, scales),
                         DW_OK);
        assert_int_equal(dw_block_dequantize(&options, ROWS, COLS, codes, 0, scales, back, COLS),
                         DW_OK);
        hash = hash_bytes(hash, codes, layout.code_bytes);
        hash = hash_bytes(hash, scales, layout.scale_bytes);
        hash = hash_bytes(hash, back, sizeof back);
    }
    return hash;
}

static uint64_t hash_arrays(uint64_t hash, const float *x, int64_t count) {
    static uint8_t codes[2 * ROWS * COLS];
    static float back[ROWS * COLS];
    for (int which = 0; which < DW_DTYPE_COUNT * 4; which++) {
        dw_dtype format = (dw_dtype)(which / 4);
        if (!dw__dtype_is_format(format)) continue;
        dw_encode_options options = DW_ENCODE_OPTIONS_DEFAULT;
        options.overflow = which & 1 ? DW_OVERFLOW_NONFINITE : DW_OVERFLOW_SATURATE;
        options.rounding = which & 2 ? DW_ROUND_STOCHASTIC : DW_ROUND_NEAREST;
        options.random = (dw_random){-1, 1, 1};
        if (format == DW_E8M0) options.rounding = DW_ROUND_NEAREST;
        assert_int_equal(dw_encode(format, count, x, &options, codes), DW_OK);
        assert_int_equal(dw_decode(format, count, codes, back), DW_OK);
        hash = hash_bytes(hash, codes, (size_t)dw_tensor_bytes(format, 1, &count));
        hash = hash_bytes(hash, back, (size_t)count * sizeof *back);
    }
    return hash;
}

static uint64_t hash_everything(int mode) {
    static float difficult[ROWS * COLS], matrix[ROWS * COLS], turned[ROWS * COLS];
    random_state = 2;
    for (int i = 0; i < ROWS * COLS; i++) {
        difficult[i] = random_float();
        matrix[i] = (float)(int32_t)random_word() * 0x1p-31f;
    }
    fesetround(mode);
    uint64_t hash = hash_arrays(0xcbf29ce484222325u, difficult, ROWS * COLS);
    hash = hash_blocks(hash, difficult);
    for (int size = 2; size <= 128; size *= 2) {
        for (int axis = 0; axis < 2; axis++) {
            dw_hadamard_options options = DW_HADAMARD_OPTIONS_DEFAULT;
            options.size = size;
            options.axis = axis;
            int64_t rows = axis ? ROWS : 128, cols = axis ? 384 : 101;
            assert_int_equal(dw_hadamard(&options, rows, cols, matrix, cols, turned, cols), DW_OK);
            hash = hash_bytes(hash, turned, (size_t)(rows * cols) * sizeof *turned);
        }
    }
    float amax = 0.0f;
    assert_int_equal(dw_amax(ROWS, 300, matrix, COLS, &amax), DW_OK);
    amax = dw_nvfp4_tensor_scale(amax / 4.0f);
    return hash_bytes(hash, &amax, sizeof amax);
}

/* Runs in a child, before anything has selected the instruction set. */
static uint64_t hash_in_child(const char *isa, const char *threads, int mode) {
    int channel[2];
    uint64_t hash = 0;
    assert_int_equal(pipe(channel), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        setenv("DEEPWELL_ISA", isa, 1);
        setenv("DEEPWELL_THREADS", threads, 1);
        hash = hash_everything(mode);
        _exit(write(channel[1], &hash, sizeof hash) == sizeof hash ? 0 : 1);
    }
    close(channel[1]);
    assert_int_equal(read(channel[0], &hash, sizeof hash), sizeof hash);
    close(channel[0]);
    int status = 0;
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
    return hash;
}

/* Must run first, while the process has not selected its instruction set. */
static void instruction_sets_and_threads_agree(void **state) {
    (void)state;
    uint64_t expected = hash_in_child("baseline", "1", FE_TONEAREST);
    assert_true(hash_in_child("avx2", "2", FE_TONEAREST) == expected);
    assert_true(hash_in_child("avx512", "3", FE_TONEAREST) == expected);
    assert_true(hash_in_child("avx512", "2", FE_UPWARD) == expected);
    assert_true(hash_in_child("baseline", "2", FE_TOWARDZERO) == expected);
}

/* ---- rows and their ends ------------------------------------------------------------------------- */

static void nothing_is_written_past_a_row(void **state) {
    enum { CODE_STRIDE = 80, INNER = 37 };
    (void)state;
    random_state = 3;
    for (int scheme = 0; scheme < DW_SCHEME_COUNT; scheme++) {
        float x[3 * INNER];
        uint8_t codes[3 * CODE_STRIDE], tight[3 * INNER];
        float scales[16], same[16];
        for (int i = 0; i < 3 * INNER; i++) x[i] = (float)(int32_t)random_word() * 0x1p-31f;
        dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
        options.scheme = (dw_scheme)scheme;
        if (!dw__scheme_in(options.scheme, dw__block_schemes)) continue;
        dw_block_layout layout;
        assert_int_equal(dw_block_layout_of(&options, 3, INNER, &layout), DW_OK);
        memset(codes, 0xEE, sizeof codes);
        assert_int_equal(
            dw_block_quantize(&options, 3, INNER, x, INNER, codes, CODE_STRIDE, scales), DW_OK);
        assert_int_equal(dw_block_quantize(&options, 3, INNER, x, INNER, tight, 0, same), DW_OK);
        assert_memory_equal(scales, same, layout.scale_bytes);
        int64_t padded = layout.scale_cols * layout.block;
        int64_t whole = dw_tensor_bytes(layout.element, 1, &padded);
        if (whole > CODE_STRIDE) whole = CODE_STRIDE;
        for (int row = 0; row < 3; row++) {
            assert_memory_equal(codes + row * CODE_STRIDE, tight + row * layout.row_bytes,
                                (size_t)layout.row_bytes);
            for (int64_t i = layout.row_bytes; i < CODE_STRIDE; i++)
                assert_int_equal(codes[row * CODE_STRIDE + i], i < whole ? 0 : 0xEE);
        }
        float back[3 * INNER], other[3 * INNER];
        assert_int_equal(
            dw_block_dequantize(&options, 3, INNER, codes, CODE_STRIDE, scales, back, INNER),
            DW_OK);
        assert_int_equal(dw_block_dequantize(&options, 3, INNER, tight, 0, same, other, INNER),
                         DW_OK);
        assert_memory_equal(back, other, sizeof back);
    }
}

/* Larger than a task in both directions; compared with rows quantized one at a time. */
static void task_boundaries_do_not_show(void **state) {
    enum { TALL = 70, WIDE = 40000 };
    (void)state;
    random_state = 4;
    float *x = malloc((size_t)TALL * WIDE * sizeof *x);
    uint8_t *codes = malloc((size_t)TALL * WIDE), *own = malloc(WIDE);
    uint8_t *scales = malloc((size_t)TALL * WIDE / 16), *own_scales = malloc(WIDE / 16);
    assert_true(x && codes && own && scales && own_scales);
    for (int i = 0; i < TALL * WIDE; i++) x[i] = (float)(int32_t)random_word() * 0x1p-29f;
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    assert_int_equal(dw_block_quantize(&options, TALL, WIDE, x, WIDE, codes, 0, scales), DW_OK);
    for (int row = 0; row < TALL; row++) {
        assert_int_equal(
            dw_block_quantize(&options, 1, WIDE, x + (size_t)row * WIDE, WIDE, own, 0, own_scales),
            DW_OK);
        assert_memory_equal(own, codes + (size_t)row * WIDE, WIDE);
        assert_memory_equal(own_scales, scales + (size_t)row * WIDE / 32, WIDE / 32);
    }
    free(x);
    free(codes);
    free(own);
    free(scales);
    free(own_scales);
}

/* ---- refusals -------------------------------------------------------------------------------------- */

#define REFUSED(call, words)                                                                       \
    do {                                                                                           \
        assert_int_equal(call, DW_INVALID_ARGUMENT);                                               \
        if (!strstr(dw_last_error(), words)) fail_msg("\"%s\" in %s", words, dw_last_error());     \
    } while (0)

static void wrong_arguments_are_rejected(void **state) {
    (void)state;
    float x[64] = {0};
    uint8_t codes[64], scales[64];
    REFUSED(dw_encode((dw_dtype)99, 1, x, NULL, codes), "dtype is 99");
    REFUSED(dw_encode(DW_F32, 1, x, NULL, codes), "(f32): expected a floating-point type of 16");
    REFUSED(dw_encode(DW_E4M3, -1, x, NULL, codes), "count is -1");
    REFUSED(dw_decode(DW_DTYPE_COUNT, 1, codes, x), "dtype");
    REFUSED(dw_decode(DW_E4M3, INT64_MAX, codes, x), "count");
    dw_encode_options encode = {0};
    REFUSED(dw_encode(DW_E4M3, 1, x, &encode, codes), "struct_size");
    encode = (dw_encode_options)DW_ENCODE_OPTIONS_DEFAULT;
    encode.overflow = (dw_overflow)2;
    REFUSED(dw_encode(DW_E4M3, 1, x, &encode, codes), "overflow is 2");
    encode = (dw_encode_options)DW_ENCODE_OPTIONS_DEFAULT;
    encode.rounding = (dw_rounding)7;
    REFUSED(dw_encode(DW_E4M3, 1, x, &encode, codes), "rounding is 7");
    REFUSED(dw_fp6_pack(-1, codes, scales), "count is -1");
    REFUSED(dw_fp6_unpack(INT64_MAX, codes, scales), "count");

    dw_block_options block = DW_BLOCK_OPTIONS_DEFAULT;
    REFUSED(dw_block_quantize(NULL, 1, 1, x, 1, codes, 0, scales),
            "dw_block_quantize: dw_block_options is NULL");
    REFUSED(dw_block_quantize(&block, 2, 32, x, 31, codes, 0, scales), "row_stride is 31");
    REFUSED(dw_block_quantize(&block, 2, 32, x, 32, codes, 31, scales), "code_stride is 31");
    REFUSED(dw_block_quantize(&block, -1, 32, x, 32, codes, 0, scales), "[-1, 32]");
    REFUSED(dw_block_quantize(&block, INT64_MAX, INT64_MAX, x, INT64_MAX, codes, 0, scales),
            "fit into memory");
    block.axis = 2;
    REFUSED(dw_block_dequantize(&block, 1, 1, codes, 0, scales, x, 1), "axis is 2");
    block = (dw_block_options)DW_BLOCK_OPTIONS_DEFAULT;
    block.scheme = DW_SCHEME_COUNT;
    REFUSED(dw_block_layout_of(&block, 1, 1, &(dw_block_layout){0}), "scheme is");
    block = (dw_block_options)DW_BLOCK_OPTIONS_DEFAULT;
    block.scale_rule = DW_SCALE_AMAX;
    REFUSED(dw_block_layout_of(&block, 1, 1, &(dw_block_layout){0}), "mxfp8 does not have");
    block = (dw_block_options)DW_BLOCK_OPTIONS_DEFAULT;
    block.scheme = DW_SCHEME_NVFP4;
    block.tensor_scale = FLT_MIN / 2;
    REFUSED(dw_block_layout_of(&block, 1, 1, &(dw_block_layout){0}), "tensor_scale");

    float amax;
    REFUSED(dw_amax(1, 4, x, 3, &amax), "row_stride 3");
    dw_hadamard_options hadamard = DW_HADAMARD_OPTIONS_DEFAULT;
    REFUSED(dw_hadamard(&hadamard, 1, 24, x, 24, x, 24), "24 columns");
    hadamard.size = 256;
    REFUSED(dw_hadamard(&hadamard, 1, 256, x, 256, x, 256), "size is 256");
    REFUSED(dw_scales_swizzle(-1, 4, 1, scales, codes), "[-1, 4]");
    REFUSED(dw_scales_swizzle(INT64_MAX, INT64_MAX, 1, scales, codes), "int64");
    REFUSED(dw_scales_unswizzle(4, 4, 0, scales, codes), "repeat is 0");
    assert_true(dw_scales_swizzled_bytes(129, 5) == 2 * 2 * 512);
    assert_true(dw_scales_swizzled_bytes(-1, 5) == -1);
    assert_string_equal(dw_scheme_name((dw_scheme)-1), "unknown");
    assert_true(dw_dtype_max(DW_E4M3) == 448.0f && dw_dtype_max(DW_F32) == 0.0f);
}

/* The names are those of files, graphs and options. */
static void schemes_by_name(void **state) {
    static const struct {
        const char *name;
        dw_dtype element;
        int block;
        dw_dtype scale;
        dw_scale_layout layout;
        int tensor_scale;
    } rows[] = {{"bf16", DW_BF16, DW_BLOCK_NONE, DW_F32, DW_SCALES_ROWS, 0},
                {"fp32", DW_F32, DW_BLOCK_NONE, DW_F32, DW_SCALES_ROWS, 0},
                {"fp16", DW_F16, DW_BLOCK_NONE, DW_F32, DW_SCALES_ROWS, 0},
                {"fp8-tensor", DW_E4M3, DW_BLOCK_TENSOR, DW_F32, DW_SCALES_ROWS, 0},
                {"fp8-row", DW_E4M3, DW_BLOCK_ROW, DW_F32, DW_SCALES_ROWS, 0},
                {"fp8-block", DW_E4M3, 128, DW_F32, DW_SCALES_ROWS, 0},
                {"mxfp8", DW_E4M3, 32, DW_E8M0, DW_SCALES_TILES, 0},
                {"mxfp8-e5m2", DW_E5M2, 32, DW_E8M0, DW_SCALES_TILES, 0},
                {"mxfp6", DW_E3M2, 32, DW_E8M0, DW_SCALES_TILES, 0},
                {"mxfp6-e2m3", DW_E2M3, 32, DW_E8M0, DW_SCALES_TILES, 0},
                {"mxfp4", DW_E2M1, 32, DW_E8M0, DW_SCALES_TILES, 0},
                {"nvfp4", DW_E2M1, 16, DW_UE4M3, DW_SCALES_TILES, 1},
                {"fp8-tensor-e5m2", DW_E5M2, DW_BLOCK_TENSOR, DW_F32, DW_SCALES_ROWS, 0}};
    (void)state;
    dw_scheme scheme;
    assert_int_equal(DW_COUNT(rows), DW_SCHEME_COUNT);
    for (size_t i = 0; i < DW_COUNT(rows); i++) {
        assert_int_equal(dw_scheme_find(rows[i].name, &scheme), DW_OK);
        assert_int_equal(scheme, i);
        const dw_scheme_info *info = dw_scheme_describe(scheme);
        assert_string_equal(dw_scheme_name(scheme), rows[i].name);
        assert_int_equal(info->element, rows[i].element);
        assert_int_equal(info->block, rows[i].block);
        assert_int_equal(info->scale, rows[i].scale);
        assert_int_equal(info->scale_layout, rows[i].layout);
        assert_int_equal(info->tensor_scale, rows[i].tensor_scale);
        assert_int_equal(info->block > 0, dw__scheme_in(scheme, dw__block_schemes));
    }
    assert_null(dw_scheme_describe(DW_SCHEME_COUNT));
    REFUSED(dw_scheme_find("fp8", &scheme), "expected bf16, fp32, fp16, fp8-tensor");
    REFUSED(dw_scheme_find(NULL, &scheme), "nvfp4 or fp8-tensor-e5m2");
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    options.scheme = DW_SCHEME_FP8_ROW;
    assert_int_equal(dw_block_layout_of(&options, 1, 1, &(dw_block_layout){0}), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "the scheme fp8-row is not supported: expected "
                                            "fp8-block, mxfp8, mxfp8-e5m2, mxfp6, mxfp6-e2m3, "
                                            "mxfp4 or nvfp4"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schemes_by_name),
        cmocka_unit_test(instruction_sets_and_threads_agree),
        cmocka_unit_test(arrays_agree_with_the_definition),
        cmocka_unit_test(bit_patterns_across_the_range_agree),
        cmocka_unit_test(nothing_is_written_past_a_row),
        cmocka_unit_test(task_boundaries_do_not_show),
        cmocka_unit_test(wrong_arguments_are_rejected),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
