/* Helpers for tests of a kernel on the emulator: its compiled PTX, matrices with NaNs after their rows,
 * expected findings, and removal of instructions. */
#ifndef DW_EMULATED_KERNEL_H
#define DW_EMULATED_KERNEL_H

#include "emulator_findings.h"
#include "jit/jit_internal.h"
#include "number/format.h"
#include "number/half.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- PTX ----------------------------------------------------------------------------------------- */

/* Reads the PTX of a variant from the build, or from the folder DEEPWELL_TEST_PTX (deepwell-kernels --ptx). Returns
 * false if the build had no compiler. The caller frees `text`. */
static inline bool read_ptx(const dw__jit_variant *variant, char **text, size_t *bytes) {
    const char *folder = getenv("DEEPWELL_TEST_PTX");
    dw__text name = {0};
    char path[4096];
#ifdef EMULATED_PTX
    if (!folder) folder = EMULATED_PTX;
#endif
    if (!folder) return false;
    assert_int_equal(dw__jit_variant_name(variant, &name), DW_OK);
    snprintf(path, sizeof path, "%s/%s.ptx", folder, name.text);
    dw__text_free(&name);
    if (dw__file_read(path, text, bytes) != DW_OK) fail_msg("%s", dw_last_error());
    return true;
}

static inline void need_ptx(const dw__jit_variant *variant) {
    char *text;
    size_t bytes;
    if (!read_ptx(variant, &text, &bytes)) {
        print_message("neither nvcc nor NVRTC of CUDA 13 made PTX of sm_100f\n");
        skip();
    }
    free(text);
}

/* Removes every instruction that begins with `opcode` from the PTX. With '<' before the opcode, the wait
 * before the first such instruction passes at once instead; with "<<" the wait before that one, and so on. */
static inline void take_out(char *text, const char *opcode) {
    static const char wait[] = "mbarrier.try_wait", passed[] = "setp.eq.u32 p, 0, 0";
    const size_t waits = strspn(opcode, "<");
    size_t count = 0;
    char *at = text;
    if (waits == 0) {
        for (; (at = strstr(at, opcode)) != NULL; count++) memset(at, ' ', strcspn(at, ";") + 1);
        assert_true(count > 0);
        return;
    }
    at = strstr(text, opcode + waits);
    assert_non_null(at);
    while (count < waits) {
        assert_true(--at >= text);
        count += strncmp(at, wait, sizeof wait - 1) == 0;
    }
    assert_true(strcspn(at, ";") >= sizeof passed - 1);
    memset(at, ' ', strcspn(at, ";"));
    memcpy(at, passed, sizeof passed - 1);
}

/* Replaces the first constant operand `from` of the PTX by `to`, which has no more digits. */
static inline void replace_constant(char *text, unsigned from, unsigned to) {
    char was[16], now[16];
    snprintf(was, sizeof was, " %u;", from);
    snprintf(now, sizeof now, " %u;", to);
    char *at = strstr(text, was);
    assert_non_null(at);
    assert_true(strlen(now) <= strlen(was));
    memset(at, ' ', strlen(was));
    memcpy(at, now, strlen(now));
}

/* Loads the variant's module without the instructions `without` (see take_out); NULL: unchanged. */
static inline dw_emulator_module *
load_variant(dw_emulator *emulator, const dw__jit_variant *variant, const char *without) {
    dw_emulator_module *module;
    char *text = NULL;
    size_t bytes = 0;
    assert_true(read_ptx(variant, &text, &bytes));
    if (without) take_out(text, without);
    if (dw_emulator_load(emulator, text, bytes, "kernel.ptx", &module) != DW_OK)
        fail_msg("%s", dw_last_error());
    free(text);
    return module;
}

/* ---- findings ------------------------------------------------------------------------------------ */

static inline void expect_no_finding(const dw_emulator *emulator) {
    print_findings(emulator);
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
}

/* An instruction to remove from a kernel (take_out), and the finding that must result: its kind and words of
 * its text. */
typedef struct mistake {
    const char *opcode, *kind, *words;
} mistake;

static inline void expect_found(const dw_emulator *emulator, const mistake *m) {
    const size_t count = dw_emulator_finding_count(emulator);
    dw_finding finding;
    char text[2000];
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(dw_emulator_finding(emulator, i, &finding), DW_OK);
        dw_finding_text(&finding, text, sizeof text);
        if (strcmp(finding.kind, m->kind) == 0 && strstr(text, m->words)) return;
        print_message("%s\n", text);
    }
    fail_msg("without %s: no finding \"%s\" with \"%s\", of %zu", m->opcode, m->kind, m->words,
             count);
}

/* ---- matrices ------------------------------------------------------------------------------------ */

enum { PAD_BYTES = 16 }; /* smallest padding of a row in bytes; nothing may read or write it */

typedef enum matrix_type {
    MATRIX_BF16,
    MATRIX_F16,
    MATRIX_F32,
    MATRIX_E4M3,
    MATRIX_E5M2,
    MATRIX_E2M1 /* two to a byte, the first in the lower half */
} matrix_type;

typedef struct matrix {
    int rows, columns;
    size_t pitch; /* bytes from row to row; a multiple of 16 */
    matrix_type type;
    size_t bytes;
    void *host, *device;
} matrix;

static inline int bits_of(matrix_type type) {
    static const int bits[] = {16, 16, 32, 8, 8, 4};
    return bits[type];
}
static inline size_t row_bytes(const matrix *x) {
    return ((size_t)x->columns * (size_t)bits_of(x->type) + 7) / 8;
}
static inline dw_dtype narrow_format(matrix_type type) {
    return type == MATRIX_E4M3 ? DW_E4M3 : type == MATRIX_E5M2 ? DW_E5M2 : DW_E2M1;
}

static inline float get(const matrix *x, int row, int column) {
    const unsigned char *at = (const unsigned char *)x->host + (size_t)row * x->pitch;
    uint16_t half;
    float value;
    switch (x->type) {
    case MATRIX_F32: memcpy(&value, at + 4 * column, 4); return value;
    case MATRIX_BF16: memcpy(&half, at + 2 * column, 2); return dw__bf16_to_f32(half);
    case MATRIX_F16: memcpy(&half, at + 2 * column, 2); return dw__f16_to_f32(half);
    case MATRIX_E2M1: return dw__decode_one(DW_E2M1, at[column / 2] >> column % 2 * 4 & 15);
    default: return dw__decode_one(narrow_format(x->type), at[column]);
    }
}
/* Rounds the value to the nearest number. */
static inline void set(const matrix *x, int row, int column, float value) {
    unsigned char *at = (unsigned char *)x->host + (size_t)row * x->pitch;
    uint16_t half;
    switch (x->type) {
    case MATRIX_F32: memcpy(at + 4 * column, &value, 4); break;
    case MATRIX_BF16: half = dw__f32_to_bf16(value), memcpy(at + 2 * column, &half, 2); break;
    case MATRIX_F16: half = dw__f32_to_f16(value), memcpy(at + 2 * column, &half, 2); break;
    default: {
        uint32_t code = dw__encode_one(narrow_format(x->type), value, DW_OVERFLOW_SATURATE,
                                       DW_ROUND_NEAREST, 0);
        if (x->type == MATRIX_E2M1)
            at[column / 2] = (unsigned char)((at[column / 2] & (column % 2 ? 0x0F : 0xF0)) |
                                             code << column % 2 * 4);
        else
            at[column] = (unsigned char)code;
    }
    }
}

static inline uint64_t random_word(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
/* Returns a number from -1 to 1, or an integer from -4 to 4. */
static inline float random_value(uint64_t *state, bool integers) {
    uint64_t word = random_word(state);
    if (integers) return (float)(word % 9) - 4;
    return (float)(word >> 40) * 0x1p-23f - 1;
}

/* Makes rows of 0xFF, which is a NaN in every type except E2M1, each followed by as many bytes of padding of 0xFF. */
static inline void make_matrix(matrix *x, dw_emulator *emulator, int rows, int columns,
                               matrix_type type) {
    *x = (matrix){.rows = rows, .columns = columns, .type = type};
    x->pitch = (row_bytes(x) + PAD_BYTES + 15) / 16 * 16;
    x->bytes = (size_t)rows * x->pitch;
    x->host = malloc(x->bytes);
    assert_non_null(x->host);
    memset(x->host, 0xFF, x->bytes);
    assert_int_equal(dw_emulator_allocate(emulator, x->bytes, &x->device), DW_OK);
}
static inline void copy_in(const matrix *x, dw_emulator *emulator) {
    assert_int_equal(dw_emulator_copy_in(emulator, x->device, x->host, x->bytes), DW_OK);
}
static inline void copy_out(const matrix *x, dw_emulator *emulator) {
    assert_int_equal(dw_emulator_copy_out(emulator, x->host, x->device, x->bytes), DW_OK);
}
static inline void make_random(matrix *x, dw_emulator *emulator, int rows, int columns,
                               matrix_type type, uint64_t *state, bool integers) {
    make_matrix(x, emulator, rows, columns, type);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) set(x, i, j, random_value(state, integers));
    copy_in(x, emulator);
}

/* Checks that the bytes after row `row` are unchanged. */
static inline void expect_untouched(const matrix *x, int row) {
    const unsigned char *at = (const unsigned char *)x->host + (size_t)row * x->pitch;
    for (size_t i = row_bytes(x); i < x->pitch; i++) assert_int_equal(at[i], 0xFF);
}

/* Makes a map with boxes of the given rows and columns and 128-byte swizzle. Types narrower than 16 bits are treated as
 * bytes. */
static inline void make_map(const matrix *x, uint32_t box_columns, uint32_t box_rows, void *map) {
    static const int elements[] = {9, 6, 7, 0, 0, 0}; /* the driver's numbers */
    dw_emulator_tensor_shape shape = {
        .struct_size = sizeof shape,
        .element = elements[x->type],
        .rank = 2,
        .address = x->device,
        .size = {x->type == MATRIX_E2M1 ? row_bytes(x) : (uint64_t)x->columns, (uint64_t)x->rows},
        .stride = {x->pitch},
        .box = {x->type == MATRIX_E2M1 ? box_columns / 2 : box_columns, box_rows},
        .step = {1, 1},
        .swizzle = 3,
    };
    assert_int_equal(dw_emulator_tensor_map(&shape, map), DW_OK);
}

#endif
