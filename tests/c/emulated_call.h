/* Helpers for tests of the library's own calls on emulated GPUs: operands in device memory, PTX that replaces
 * the library's, and first uses in child processes, because a process keeps the result of a first use. */
#ifndef DW_EMULATED_CALL_H
#define DW_EMULATED_CALL_H

#include "deepwell/gemm.h"
#include "deepwell/log.h"
#include "device/device_table.h"
#include "emulated_kernel.h"
#include <sys/wait.h>
#include <unistd.h>

/* ---- operands ------------------------------------------------------------------------------------ */

static inline const dw_device *device_named(const char *name) {
    const dw_device *device;
    if (dw_device_find(name, &device) != DW_OK) fail_msg("%s", dw_last_error());
    return device;
}

static inline void send(const matrix *x, const dw_device *device) {
    if (x->bytes > 0) assert_int_equal(device->copy_in(x->device, x->host, x->bytes, NULL), DW_OK);
}
static inline void fetch(const matrix *x, const dw_device *device) {
    if (x->bytes > 0) assert_int_equal(device->copy_out(x->host, x->device, x->bytes, NULL), DW_OK);
}

/* Rows of 0xFF in host memory; not copied to the device. */
static inline void place(matrix *x, const dw_device *device, int rows, int columns,
                         matrix_type type) {
    *x = (matrix){.rows = rows, .columns = columns, .type = type};
    x->pitch = (row_bytes(x) + PAD_BYTES + 15) / 16 * 16;
    x->bytes = (size_t)rows * x->pitch;
    x->host = malloc(x->bytes + 1);
    assert_non_null(x->host);
    memset(x->host, 0xFF, x->bytes);
    assert_int_equal(dw_device_allocate(device, x->bytes, &x->device), DW_OK);
}
static inline void place_random(matrix *x, const dw_device *device, int rows, int columns,
                                matrix_type type, uint64_t *state, bool integers) {
    place(x, device, rows, columns, type);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) set(x, i, j, random_value(state, integers));
    send(x, device);
}
static inline void take_away(matrix *x, const dw_device *device) {
    dw_device_release(device, x->device, x->bytes);
    free(x->host);
}
static inline dw_matrix matrix_of(const matrix *x) {
    const int bits = bits_of(x->type); /* strides of codes are in bytes */
    return (dw_matrix){x->device, (int64_t)x->pitch * 8 / (bits < 8 ? 8 : bits)};
}

/* ---- PTX ----------------------------------------------------------------------------------------- */

/* Replaces PTX of the library for the rest of the process. If a name is replaced twice, the first replacement
 * counts. */
static dw__jit_file carried[64];
static size_t carried_count;
static inline void carry(const char *name, const char *text) {
    assert_true(carried_count + 1 < DW_COUNT(carried));
    carried[carried_count++] = (dw__jit_file){
        .name = name,
        .begin = (const unsigned char *)text,
        .end = (const unsigned char *)text + strlen(text),
    };
    dw__jit_carried_now.ptx = carried;
}
static inline char *name_of(const dw__jit_variant *variant) {
    dw__text name = {0};
    assert_int_equal(dw__jit_variant_name(variant, &name), DW_OK);
    return name.text;
}
static inline void carry_variant(const dw__jit_variant *variant) {
    char *text;
    size_t bytes;
    assert_true(read_ptx(variant, &text, &bytes));
    carry(name_of(variant), text);
}

/* ---- children ------------------------------------------------------------------------------------ */

static char logged[4096];
static int lines;
static inline void keep_line(void *context, int level, const char *line) {
    (void)context;
    if (level < 2) return;
    snprintf(logged, sizeof logged, "%s", line);
    lines++;
}

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s; logged: %s; last error: %s\n", __FILE__, __LINE__,         \
                    #condition, logged, dw_last_error());                                          \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* Enables the first-use check, which tests with their own comparison disable, and records the log. */
static inline void in_child(void (*check_it)(void)) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        unsetenv("DEEPWELL_FIRST_USE_CHECK");
        dw_log_set_sink(keep_line, NULL, 2);
        check_it();
        fflush(NULL);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#endif
