/* Tensor files: a written file reads back, and a malformed one gives one message. */
#include "base/base.h"
#include "deepwell/safetensors.h"
#include "number/half.h"
#include "test_folder.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define assert_ok(call)                                                                            \
    do {                                                                                           \
        dw_status status_ = (call);                                                                \
        if (status_ != DW_OK) print_error("%s: %s\n", #call, dw_last_error());                     \
        assert_int_equal(status_, DW_OK);                                                          \
    } while (0)

static void write_file(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

/* A file with this header and `data_bytes` bytes 0, 1, 2, ... of data. */
static void write_with_header(const char *path, const char *header, size_t data_bytes) {
    uint64_t length = strlen(header);
    char bytes[4096];
    assert_true(8 + length + data_bytes <= sizeof bytes);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < data_bytes; i++) bytes[8 + length + i] = (char)i;
    write_file(path, bytes, 8 + length + data_bytes);
}

static void expect_failure(dw_status got, dw_status expected, const char *part) {
    assert_int_equal(got, expected);
    if (!strstr(dw_last_error(), part))
        print_error("\"%s\" does not have \"%s\"\n", dw_last_error(), part);
    assert_non_null(strstr(dw_last_error(), part));
}

static void expect_refused(const char *path, dw_status expected, const char *part) {
    dw_safetensors *file = NULL;
    int64_t live = dw__memory_live();
    expect_failure(dw_safetensors_open(path, &file), expected, part);
    assert_null(file);
    assert_int_equal(dw__memory_live(), live);
}

/* ---- round trip ---------------------------------------------------------------------------- */

static const int64_t shape_a[] = {2, 3}, shape_b[] = {4}, shape_none[] = {3, 0, 5};
static const float values[] = {1.0f, -2.5f, 3.25f, 1e-3f, 65504.0f, -0.0f};

static void put(dw_safetensors_writer *writer, const void *bytes, size_t count) {
    const char *at = bytes; /* written in uneven pieces */
    for (size_t piece = 1; count > 0; piece = 3 * piece % 7 + 1) {
        size_t here = piece < count ? piece : count;
        assert_ok(dw_safetensors_writer_put(writer, at, here));
        at += here;
        count -= here;
    }
}

static void written_files_read_back(void **state) {
    (void)state;
    static const int64_t numbers[] = {1, -2, INT64_MAX, INT64_MIN};
    static const uint8_t flag = 1;
    static const char *const metadata[] = {"step", "12", "what \"is\"", "a\\b"};
    const dw_stored_tensor tensors[] = {
        {.name = "f32", .dtype = DW_STORED_F32, .rank = 2, .shape = shape_a},
        {.name = "nothing", .dtype = DW_STORED_F16, .rank = 3, .shape = shape_none},
        {.name = "i64", .dtype = DW_STORED_I64, .rank = 1, .shape = shape_b},
        {.name = "flag \"x\" \\", .dtype = DW_STORED_BOOL, .rank = 0},
        {.name = "bf16", .dtype = DW_STORED_BF16, .rank = 2, .shape = shape_a},
        {.name = "f16", .dtype = DW_STORED_F16, .rank = 2, .shape = shape_a},
    };
    const char *path = in_folder("tensors.safetensors");
    dw_safetensors_writer *writer = NULL;
    assert_ok(dw_safetensors_writer_create(path, DW_COUNT(tensors), tensors, 2, metadata, &writer));
    put(writer, values, sizeof values);
    put(writer, numbers, sizeof numbers);
    put(writer, &flag, 1);
    assert_ok(dw_safetensors_writer_put_f32(writer, values, 2));
    assert_ok(dw_safetensors_writer_put_f32(writer, values + 2, 4));
    assert_ok(dw_safetensors_writer_put_f32(writer, values, 6));
    assert_ok(dw_safetensors_writer_commit(writer));
    dw_safetensors_writer_destroy(writer);

    dw_safetensors *file = NULL;
    assert_ok(dw_safetensors_open(path, &file));
    assert_int_equal(dw_safetensors_count(file), DW_COUNT(tensors));
    for (uint32_t i = 0; i < DW_COUNT(tensors); i++) {
        uint32_t index = UINT32_MAX;
        assert_ok(dw_safetensors_find(file, tensors[i].name, &index));
        const dw_stored_tensor *found = dw_safetensors_at(file, index);
        assert_string_equal(found->name, tensors[i].name);
        assert_int_equal(found->dtype, tensors[i].dtype);
        assert_int_equal(found->rank, tensors[i].rank);
        for (int axis = 0; axis < found->rank; axis++)
            assert_int_equal(found->shape[axis], tensors[i].shape[axis]);
    }
    char *bytes;
    size_t count;
    assert_ok(dw__file_read(path, &bytes, &count));
    const char *written = "{\"__metadata__\":{\"format\":\"pt\",\"step\":\"12\","
                          "\"what \\\"is\\\"\":\"a\\\\b\"}";
    assert_memory_equal(bytes + 8, written, strlen(written)); /* after the header's length */
    dw__free(bytes);

    uint32_t index;
    float back[6];
    assert_ok(dw_safetensors_find(file, "f32", &index));
    assert_ok(dw_safetensors_read_f32(file, index, back));
    assert_memory_equal(back, values, sizeof back);
    assert_ok(dw_safetensors_read_bytes(file, index, 4, back, 8));
    assert_memory_equal(back, values + 1, 8);
    expect_failure(dw_safetensors_read_bytes(file, index, 20, back, 8), DW_INVALID_ARGUMENT,
                   "24 bytes");
    assert_ok(dw_safetensors_find(file, "bf16", &index));
    assert_ok(dw_safetensors_read_f32(file, index, back));
    for (int i = 0; i < 6; i++) assert_true(back[i] == dw__bf16_to_f32(dw__f32_to_bf16(values[i])));
    assert_ok(dw_safetensors_find(file, "f16", &index));
    assert_ok(dw_safetensors_read_f32(file, index, back));
    for (int i = 0; i < 6; i++) assert_true(back[i] == dw__f16_to_f32(dw__f32_to_f16(values[i])));
    assert_ok(dw_safetensors_find(file, "nothing", &index));
    assert_int_equal(dw_safetensors_at(file, index)->count, 0);
    assert_ok(dw_safetensors_read_f32(file, index, back));
    assert_ok(dw_safetensors_find(file, "i64", &index));
    int64_t read[4];
    assert_ok(dw_safetensors_read_bytes(file, index, 0, read, sizeof read));
    assert_memory_equal(read, numbers, sizeof read);
    expect_failure(dw_safetensors_read_f32(file, index, back), DW_TYPE, "\"i64\" has the type I64");
    expect_failure(dw_safetensors_find(file, "absent", &index), DW_NOT_FOUND, "\"absent\"");
    dw_safetensors_close(file);
    unlink(path);
}

/* Name of each type, and bytes of these numbers, computed by hand. */
static void every_floating_type_reads_as_f32(void **state) {
    (void)state;
    static const struct {
        const char *dtype;
        size_t bytes;
        uint8_t data[16];
        float expected[2];
    } cases[] = {
        {"F32", 8, {0, 0, 0xC0, 0x3F, 0, 0, 0x80, 0xFF}, {1.5f, -INFINITY}},
        {"F64", 16, {0, 0, 0, 0, 0, 0, 0xF8, 0x3F, 0, 0, 0, 0, 0, 0, 0xE0, 0xBF}, {1.5f, -0.5f}},
        {"BF16", 4, {0xC0, 0x3F, 0x80, 0x7F}, {1.5f, INFINITY}},
        {"F16", 4, {0x00, 0x3E, 0x01, 0x00}, {1.5f, 0x1p-24f}},
        {"F8_E4M3", 2, {0x3C, 0x01}, {1.5f, 0x1p-9f}},
        {"F8_E4M3", 2, {0xFE, 0x08}, {-448.0f, 0x1p-6f}},
        {"F8_E5M2", 2, {0x3E, 0x01}, {1.5f, 0x1p-16f}},
        {"F8_E5M2", 2, {0xFB, 0x7C}, {-57344.0f, INFINITY}},
    };
    const char *path = in_folder("types");
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        char bytes[256];
        uint64_t length =
            (uint64_t)snprintf(bytes + 8, sizeof bytes - 8,
                               "{\"x\":{\"dtype\":\"%s\",\"shape\":[2],\"data_offsets\":[0,%zu]}}",
                               cases[i].dtype, cases[i].bytes);
        memcpy(bytes, &length, 8);
        memcpy(bytes + 8 + length, cases[i].data, cases[i].bytes);
        write_file(path, bytes, 8 + length + cases[i].bytes);
        dw_safetensors *file = NULL;
        float back[2];
        assert_ok(dw_safetensors_open(path, &file));
        assert_ok(dw_safetensors_read_f32(file, 0, back));
        assert_memory_equal(back, cases[i].expected, sizeof back);
        dw_safetensors_close(file);
    }
    unlink(path);
}

/* ---- malformed headers --------------------------------------------------------------------- */

static void malformed_headers_are_rejected(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        dw_status status;
        const char *part;
    } cases[] = {
        {"", 0, DW_PARSE, "does not begin with"},
        {" {}", 0, DW_PARSE, "does not begin with"},
        {"[]", 0, DW_PARSE, "does not begin with"},
        {"{", 0, DW_PARSE, "its header: line 1"},
        {"{}x", 0, DW_PARSE, "its header: line 1"},
        {"{}", 3, DW_PARSE, "0 bytes and the file has 3 bytes of data"},
        {"{\"\xFF\":1}", 0, DW_PARSE, "its header: line 1"},
        {"{\"a\":1}", 0, DW_PARSE, "tensor \"a\": it is an integer; expected an object"},
        {"{\"\":{}}", 0, DW_PARSE, "name of a tensor has 0 bytes"},
        {"{\"a\\u001b[2J\":{}}", 0, DW_PARSE, "without control characters"},
        {"{\"a\":{}}", 0, DW_PARSE, "dtype is missing"},
        {"{\"a\":{\"dtype\":7}}", 0, DW_PARSE, "dtype is an integer; expected a string"},
        {"{\"a\":{\"dtype\":\"F99\"}}", 0, DW_UNSUPPORTED, "dtype is \"F99\""},
        {"{\"a\":{\"dtype\":\"F32\"}}", 0, DW_PARSE, "shape is missing"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":4}}", 0, DW_PARSE, "shape is an integer"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5]}}", 0, DW_PARSE, "entry of shape is a real"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1]}}", 0, DW_UNSUPPORTED, "9 dims"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 0, DW_PARSE, "data_offsets is missing"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0]}}", 0, DW_PARSE,
         "data_offsets has 1 entries"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4,8]}}", 4, DW_PARSE,
         "data_offsets has 3 entries"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[-4,0]}}", 4, DW_PARSE,
         "data_offsets has -4"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[\"0\",4]}}", 4, DW_PARSE,
         "entry of data_offsets is a string"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,99999999999999999999]}}", 4,
         DW_PARSE, "too big integer"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, DW_PARSE,
         "dim 0 is -1"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 3, DW_PARSE,
         "cut short"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[4,0]}}", 4, DW_PARSE,
         "data_offsets are 4 and 0"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[8,12]}}", 4, DW_PARSE,
         "data_offsets are 8 and 12"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, DW_PARSE,
         "span 4 bytes; its shape and dtype need 8"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         DW_PARSE, "2^63 elements"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
         DW_PARSE, "2^63 bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,0],\"data_offsets\":[0,4]}}",
         4, DW_PARSE, "need 0"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4],\"x\":1}}", 4, DW_PARSE,
         "it has 4 members"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
         6, DW_PARSE, "tensor \"b\": its data begin at byte 2; expected byte 4"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
         4, DW_PARSE, "tensor \"b\": its data begin at byte 0; expected byte 4"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[6,10]}}",
         10, DW_PARSE, "tensor \"b\": its data begin at byte 6; expected byte 4"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", 6, DW_PARSE,
         "tensor \"a\": its data begin at byte 2; expected byte 0"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 6, DW_PARSE,
         "4 bytes and the file has 6"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
         4, DW_PARSE, "tensor \"a\": its data begin at byte 1; expected byte 4"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
         0, DW_PARSE, "duplicate object key"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 0, DW_PARSE, "duplicate object key"},
        {"{\"__metadata__\":[]}", 0, DW_PARSE, "__metadata__ is an array; expected an object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, DW_PARSE, "value of __metadata__ is an integer"},
        {"{\"a\":[[[[]]]]}", 0, DW_PARSE, "within one another; expected at most 4"},
    };
    const char *path = in_folder("malformed");
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        write_with_header(path, cases[i].header, cases[i].data);
        expect_refused(path, cases[i].status, cases[i].part);
        assert_non_null(strstr(dw_last_error(), path)); /* and the message names the file */
    }
    unlink(path);
}

static void odd_headers_are_read(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        uint32_t count;
    } cases[] = {
        {"{}", 0, 0},
        {"{}   \n ", 0, 0},
        {"{\"__metadata__\":{}}", 0, 0},
        {"{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,4]},"
         "\"a\":{\"shape\":[2,1],\"data_offsets\":[0,2],\"dtype\":\"I8\"}}",
         4, 2},
        {"{\"e\":{\"dtype\":\"I16\",\"shape\":[0],\"data_offsets\":[2,2]},"
         "\"a\":{\"dtype\":\"I16\",\"shape\":[],\"data_offsets\":[0,2]},"
         "\"f\":{\"dtype\":\"I32\",\"shape\":[4294967296,4294967296,0],\"data_offsets\":[0,0]}}",
         2, 3},
    };
    const char *path = in_folder("odd");
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_safetensors *file = NULL;
        write_with_header(path, cases[i].header, cases[i].data);
        assert_ok(dw_safetensors_open(path, &file));
        assert_int_equal(dw_safetensors_count(file), cases[i].count);
        dw_safetensors_close(file);
    }
    unlink(path);
}

static void implausible_header_lengths_are_rejected(void **state) {
    (void)state;
    const char *path = in_folder("length");
    static const uint64_t lengths[] = {
        3, 100, 100000000, 100000001, UINT64_MAX, UINT64_MAX - 7, UINT64_C(1) << 40};
    for (size_t i = 0; i < DW_COUNT(lengths); i++) {
        char bytes[10] = "........{}";
        memcpy(bytes, &lengths[i], 8);
        write_file(path, bytes, sizeof bytes);
        expect_refused(path, DW_PARSE, "its header has");
    }
    /* A sparse file of a gigabyte: its header exceeds the format's limit, whatever the file's size. */
    uint64_t length = 1 << 30;
    write_file(path, &length, 8);
    assert_int_equal(truncate(path, (off_t)(length + 8)), 0);
    expect_refused(path, DW_PARSE, "expected at most 100000000");
    unlink(path);
}

/* A header that would become gigabytes of JSON nodes. */
static void costly_headers_are_rejected(void **state) {
    (void)state;
    enum { BYTES = 20000000 };
    const char *path = in_folder("costly");
    char *bytes = malloc(8 + BYTES);
    uint64_t length = BYTES;
    memcpy(bytes, &length, 8);
    memset(bytes + 8, '[', BYTES);
    memcpy(bytes + 8, "{\"a\":", 5);
    write_file(path, bytes, 8 + BYTES);
    expect_refused(path, DW_PARSE, "within one another");
    for (size_t i = 14; i < BYTES; i++) bytes[8 + i] = i % 2 ? ',' : '0';
    memcpy(bytes + 8, "{\"a\":[        ", 14);
    write_file(path, bytes, 8 + BYTES);
    expect_refused(path, DW_PARSE, "values; expected fewer");
    free(bytes);
    unlink(path);
}

/* ---- paths --------------------------------------------------------------------------------- */

static void paths_that_are_no_tensors_are_rejected(void **state) {
    (void)state;
    const char *path = in_folder("path.safetensors");
    dw_safetensors *file = NULL;
    expect_refused(path, DW_IO, "No such file");
    expect_failure(dw_safetensors_open(NULL, &file), DW_INVALID_ARGUMENT, "NULL");
    expect_refused(folder, DW_NOT_FOUND, "has neither model.safetensors nor");
    write_file(path, "", 0);
    expect_refused(path, DW_PARSE, "it has 0 bytes");
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_refused(path, DW_IO, "a device or a pipe");
    unlink(path);
    assert_int_equal(symlink("path.safetensors", path), 0);
    expect_refused(path, DW_IO, "symbolic links");
    unlink(path);
    expect_refused("/dev/zero", DW_IO, "a device or a pipe");
    if (geteuid() != 0) {
        write_file(path, "", 0);
        assert_int_equal(chmod(path, 0), 0);
        expect_refused(path, DW_IO, "Permission denied");
        unlink(path);
    }
    /* In a folder: model.safetensors is a folder, or a link to itself. */
    const char *model = in_folder("model.safetensors");
    assert_int_equal(mkdir(model, 0700), 0);
    expect_refused(folder, DW_IO, "directory");
    rmdir(model);
    assert_int_equal(symlink("model.safetensors", model), 0);
    expect_refused(folder, DW_IO, "symbolic links");
    unlink(model);
}

static const char small_header[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
    "\"b\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[24,40]}}";

static void truncated_files_are_rejected(void **state) {
    (void)state;
    const char *path = in_folder("cut");
    off_t whole = 8 + (off_t)strlen(small_header) + 40;
    for (off_t bytes = 0; bytes < whole; bytes++) {
        write_with_header(path, small_header, 40);
        assert_int_equal(truncate(path, bytes), 0);
        expect_refused(path, DW_PARSE, "cut");
    }
    unlink(path);
}

/* The file is truncated while it is open: reading gives a message, where a mapped file would raise a signal. */
static void file_truncated_while_open_is_an_error(void **state) {
    (void)state;
    const char *path = in_folder("shrinks");
    write_with_header(path, small_header, 40);
    dw_safetensors *file = NULL;
    float back[6];
    assert_ok(dw_safetensors_open(path, &file));
    assert_int_equal(truncate(path, 8 + (off_t)strlen(small_header) + 3), 0);
    expect_failure(dw_safetensors_read_f32(file, 0, back), DW_IO, "earlier than when");
    dw_safetensors_close(file);
    unlink(path);
}

/* ---- shards -------------------------------------------------------------------------------- */

#define TENSOR(name) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}"

static void shards_are_one_file(void **state) {
    (void)state;
    const char *index = in_folder("model.safetensors.index.json");
    const char *one = in_folder("one.safetensors"), *two = in_folder("two.safetensors");
    static const char text[] = "{\"metadata\": {\"total_size\": 4}, \"weight_map\": {"
                               "\"b\": \"two.safetensors\", \"a\": \"one.safetensors\"}}";
    write_file(index, text, strlen(text));
    write_with_header(one, TENSOR("a"), 2);
    write_with_header(two, TENSOR("b"), 2);
    for (int by_folder = 0; by_folder < 2; by_folder++) {
        dw_safetensors *file = NULL;
        assert_ok(dw_safetensors_open(by_folder ? folder : index, &file));
        assert_int_equal(dw_safetensors_count(file), 2);
        uint32_t a, b;
        uint8_t bytes[2];
        assert_ok(dw_safetensors_find(file, "a", &a));
        assert_ok(dw_safetensors_find(file, "b", &b));
        assert_ok(dw_safetensors_read_bytes(file, b, 0, bytes, 2));
        assert_int_equal(bytes[1], 1);
        dw_safetensors_close(file);
    }
    write_with_header(two, TENSOR("a"), 2);
    expect_refused(index, DW_PARSE, "is in \"");
    write_with_header(two, TENSOR("c"), 2);
    expect_refused(index, DW_PARSE, "puts tensor \"b\" into \"two.safetensors\"");
    write_with_header(two, "{}", 0);
    expect_refused(index, DW_PARSE, "puts tensor \"b\" into \"two.safetensors\"");
    unlink(two);
    expect_refused(index, DW_IO, "two.safetensors\": No such file");
    unlink(one);
    unlink(index);
}

static void malformed_indexes_are_rejected(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "index: line 1"},
        {"[]", "index is an array"},
        {"{}", "weight_map is missing"},
        {"{\"weight_map\": 3}", "weight_map is an integer"},
        {"{\"weight_map\": {}}", "weight_map is empty"},
        {"{\"weight_map\": {\"a\": 1}}", "value of weight_map is an integer"},
        {"{\"weight_map\": {\"a\": \"\"}}", "expected a plain file name"},
        {"{\"weight_map\": {\"a\": \".\"}}", "expected a plain file name"},
        {"{\"weight_map\": {\"a\": \"..\"}}", "expected a plain file name"},
        {"{\"weight_map\": {\"a\": \"../one.safetensors\"}}", "expected a plain file name"},
        {"{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "expected a plain file name"},
        {"{\"weight_map\": {\"a\": \"x/one.safetensors\"}}", "expected a plain file name"},
        {"{\"weight_map\": {\"a\": \"\\u0007\"}}", "expected a plain file name"},
        {"{\"weight_map\": {\"a\": \"one.safetensors\", \"a\": \"one.safetensors\"}}",
         "duplicate object key"},
        {"{\"weight_map\": {\"b\": \"one.safetensors\"}}", "puts tensor \"b\""},
        {"[[[[[[[[[[[[[[[[[[[[", "within one another"},
        {"{\"weight_map\": {\"x\": {\"y\": \"one.safetensors\"}}}",
         "value of weight_map is an obj"},
        {"{\"weight_map\": {\"a\": \"index.json\"}}", "index.json\": its header has"},
    };
    const char *index = in_folder("index.json"), *one = in_folder("one.safetensors");
    write_with_header(one, TENSOR("a"), 2);
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        write_file(index, cases[i].text, strlen(cases[i].text));
        expect_refused(index, DW_PARSE, cases[i].part);
    }
    static const char text[] = "{\"weight_map\": {\"a\": \"one.safetensors\"}}";
    static const char more[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
                               "\"extra\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,2]}}";
    write_file(index, text, strlen(text));
    write_with_header(one, more, 2);
    expect_refused(index, DW_PARSE, "tensor \"extra\", which weight_map does not name");
    unlink(one);
    assert_int_equal(mkdir(one, 0700), 0);
    expect_refused(index, DW_IO, "directory");
    rmdir(one);
    unlink(index);
}

/* ---- the writer ---------------------------------------------------------------------------- */

static void writers_reject_tensors_that_cannot_be_read_back(void **state) {
    (void)state;
    static const int64_t negative[] = {-1}, large[] = {INT64_MAX, INT64_MAX};
    static const char *const taken[] = {"format", "np"};
    const char *path = in_folder("refused");
    dw_safetensors_writer *writer = NULL;
    const struct {
        dw_stored_tensor tensors[2];
        const char *part;
    } cases[] = {
        {{{.name = "", .dtype = DW_STORED_F32}}, "has the name \"\""},
        {{{.name = "\n", .dtype = DW_STORED_F32}}, "has the name \"\""},
        {{{.name = "__metadata__", .dtype = DW_STORED_F32}}, "not __metadata__"},
        {{{.name = "a", .dtype = DW_STORED_DTYPE_COUNT}}, "no element type"},
        {{{.name = "a", .dtype = DW_STORED_F32, .rank = 1, .shape = negative}}, "dim 0 is -1"},
        {{{.name = "a", .dtype = DW_STORED_F32, .rank = 2, .shape = large}}, "2^63 elements"},
        {{{.name = "a", .dtype = DW_STORED_F32}, {.name = "a", .dtype = DW_STORED_F32}},
         "two tensors have the name \"a\""},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        uint32_t count = cases[i].tensors[1].name ? 2 : 1;
        assert_int_not_equal(
            dw_safetensors_writer_create(path, count, cases[i].tensors, 0, NULL, &writer), DW_OK);
        assert_non_null(strstr(dw_last_error(), cases[i].part));
    }
    expect_failure(dw_safetensors_writer_create(path, 0, NULL, 1, taken, &writer),
                   DW_INVALID_ARGUMENT, "metadata 0");

    const dw_stored_tensor tensors[] = {
        {.name = "a", .dtype = DW_STORED_F16, .rank = 1, .shape = shape_b},
        {.name = "b", .dtype = DW_STORED_I32, .rank = 1, .shape = shape_b}};
    assert_ok(dw_safetensors_writer_create(path, 2, tensors, 0, NULL, &writer));
    expect_failure(dw_safetensors_writer_put_f32(writer, values, 5), DW_STATE, "room for 4");
    expect_failure(dw_safetensors_writer_commit(writer), DW_STATE, "0 of the file's 24 bytes");
    assert_ok(dw_safetensors_writer_put_f32(writer, values, 4));
    expect_failure(dw_safetensors_writer_put_f32(writer, values, 4), DW_TYPE, "type I32");
    expect_failure(dw_safetensors_writer_put(writer, values, 17), DW_STATE, "room for 16");
    assert_ok(dw_safetensors_writer_put(writer, values, 16));
    expect_failure(dw_safetensors_writer_put_f32(writer, values, 1), DW_STATE, "data already");
    dw_safetensors_writer_destroy(writer); /* uncommitted */
    assert_int_not_equal(access(path, F_OK), 0);
}

/* Returns the status of writing a tensor of 40,000 bytes. */
static dw_status write_large(const char *path) {
    static const float large[10000] = {1.0f};
    static const int64_t shape[] = {10000};
    const dw_stored_tensor tensor = {
        .name = "a", .dtype = DW_STORED_F32, .rank = 1, .shape = shape};
    dw_safetensors_writer *writer = NULL;
    dw_status status = dw_safetensors_writer_create(path, 1, &tensor, 0, NULL, &writer);
    if (status == DW_OK) status = dw_safetensors_writer_put_f32(writer, large, 10000);
    if (status == DW_OK) status = dw_safetensors_writer_commit(writer);
    dw_safetensors_writer_destroy(writer);
    return status;
}

static void a_full_disk_leaves_the_old_file(void **state) {
    (void)state;
    const char *path = in_folder("full");
    write_with_header(path, small_header, 40);
    struct rlimit before, tight;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    /* In the header, or in the data. */
    for (rlim_t limit = 16; limit < 40000; limit = limit * 3 + 5) {
        tight = before;
        tight.rlim_cur = limit;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
        dw_status status = write_large(path);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        expect_failure(status, DW_IO, "File too large");
        dw_safetensors *file = NULL;
        assert_ok(dw_safetensors_open(path, &file));
        assert_int_equal(dw_safetensors_count(file), 2);
        dw_safetensors_close(file);
    }
    signal(SIGXFSZ, SIG_DFL);
    assert_ok(write_large(path));
    dw_safetensors *file = NULL;
    assert_ok(dw_safetensors_open(path, &file));
    assert_int_equal(dw_safetensors_at(file, 0)->count, 10000);
    dw_safetensors_close(file);
    unlink(path);
}

/* ---- memory -------------------------------------------------------------------------------- */

static bool write_and_read(const char *path, const char *index) {
    static const char *const metadata[] = {"key", "value"};
    const dw_stored_tensor tensors[] = {
        {.name = "a", .dtype = DW_STORED_BF16, .rank = 2, .shape = shape_a},
        {.name = "b", .dtype = DW_STORED_F32, .rank = 1, .shape = shape_b}};
    dw_safetensors_writer *writer = NULL;
    dw_safetensors *file = NULL, *sharded = NULL;
    float back[6];
    dw_status status = DW_OK;
    DW_TRY(dw_safetensors_writer_create(path, 2, tensors, 1, metadata, &writer));
    DW_TRY(dw_safetensors_writer_put_f32(writer, values, 6));
    DW_TRY(dw_safetensors_writer_put_f32(writer, values, 4));
    DW_TRY(dw_safetensors_writer_commit(writer));
    DW_TRY(dw_safetensors_open(path, &file));
    DW_TRY(dw_safetensors_read_f32(file, 0, back));
    DW_TRY(dw_safetensors_open(index, &sharded));
cleanup:
    dw__memory_fail_after(-1);
    if (status != DW_OK) assert_int_equal(status, DW_OUT_OF_MEMORY);
    if (status != DW_OK) assert_true(dw_last_error()[0] != '\0');
    dw_safetensors_writer_destroy(writer);
    dw_safetensors_close(file);
    dw_safetensors_close(sharded);
    return status == DW_OK;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    enum { ENOUGH = 10000 };
    static const char text[] = "{\"weight_map\": {\"a\": \"one\", \"b\": \"one\"}}";
    const char *index = in_folder("index.json"), *path = in_folder("one");
    write_file(index, text, strlen(text));
    int64_t live = dw__memory_live(), count = 0;
    for (bool done = false; !done; count++) {
        assert_true(count < ENOUGH);
        dw__memory_fail_after(count);
        done = write_and_read(path, index);
        assert_int_equal(dw__memory_live(), live);
    }
    assert_true(count > 50);
    unlink(path);
    unlink(index);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_files_read_back),
        cmocka_unit_test(every_floating_type_reads_as_f32),
        cmocka_unit_test(malformed_headers_are_rejected),
        cmocka_unit_test(odd_headers_are_read),
        cmocka_unit_test(implausible_header_lengths_are_rejected),
        cmocka_unit_test(costly_headers_are_rejected),
        cmocka_unit_test(paths_that_are_no_tensors_are_rejected),
        cmocka_unit_test(truncated_files_are_rejected),
        cmocka_unit_test(file_truncated_while_open_is_an_error),
        cmocka_unit_test(shards_are_one_file),
        cmocka_unit_test(malformed_indexes_are_rejected),
        cmocka_unit_test(writers_reject_tensors_that_cannot_be_read_back),
        cmocka_unit_test(a_full_disk_leaves_the_old_file),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
