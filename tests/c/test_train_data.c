/* Tests the parts of a trainer that do not need a model: token files, order, learning rate, norm, checkpoint
 * folders. */
#include "base/pool.h"
#include "deepwell/checkpoints.h"
#include "deepwell/training.h"
#include "train/dataset.h"
#include "train/gradient_norm.h"
#include "train/learning_rate.h"
#include "train/permutation.h"
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)
#define FAILS(call, wanted, part)                                                                  \
    do {                                                                                           \
        assert_int_equal(call, wanted);                                                            \
        if (!strstr(dw_last_error(), part))                                                        \
            fail_msg("\"%s\" lacks \"%s\"", dw_last_error(), part);                                \
    } while (0)

static char folder[64];

static int make_folder(void **state) {
    (void)state;
    strcpy(folder, "/tmp/deepwell-test-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    return dw__folder_remove(folder) == DW_OK ? 0 : -1;
}

static const char *in_folder(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static const char *write_file(const char *name, const void *bytes, size_t count) {
    const char *path = in_folder(name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    fclose(file);
    return path;
}

/* ---- order ----------------------------------------------------------------------------------- */

static void permutation_is_a_bijection(void **state) {
    (void)state;
    static const int64_t counts[] = {1,  2,  3,  4,    5,    7,    16,   17,
                                     63, 64, 65, 1000, 1021, 4096, 4097, 70001};
    for (size_t c = 0; c < DW_COUNT(counts); c++) {
        int64_t count = counts[c];
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            uint8_t *seen = calloc((size_t)count, 1);
            for (int64_t i = 0; i < count; i++) {
                int64_t to = dw__permute_index(i, count, 17, epoch);
                assert_true(to >= 0 && to < count);
                assert_int_equal(seen[to]++, 0);
            }
            free(seen);
        }
    }
}

/* Correlates index and place. Sums over disjoint lags would be large for any order that is not shuffled. */
static void permutation_mixes(void **state) {
    (void)state;
    enum { COUNT = 10007 };
    double products[3] = {0}, squares = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        double x = (double)i - (COUNT - 1) / 2.0;
        double a = (double)dw__permute_index(i, COUNT, 1, 0) - (COUNT - 1) / 2.0;
        double b = (double)dw__permute_index(i, COUNT, 1, 1) - (COUNT - 1) / 2.0;
        double c = (double)dw__permute_index(i, COUNT, 2, 0) - (COUNT - 1) / 2.0;
        products[0] += x * a;
        products[1] += a * b; /* epochs differ */
        products[2] += a * c; /* seeds differ */
        squares += x * x;
    }
    /* The correlation of random orders has standard deviation 1 / sqrt(COUNT - 1) = 0.01. */
    for (int i = 0; i < 3; i++) assert_true(fabs(products[i] / squares) < 0.06);
}

static void permutation_of_huge_counts(void **state) {
    (void)state;
    int64_t count = (INT64_C(1) << 62) - 3;
    for (int64_t i = 0; i < 1000; i++) {
        int64_t to = dw__permute_index(count - 1 - i, count, UINT64_MAX, UINT64_MAX);
        assert_true(to >= 0 && to < count);
    }
}

/* ---- learning rate --------------------------------------------------------------------------- */

static void learning_rate_has_the_documented_points(void **state) {
    (void)state;
    dw_trainer_options o = DW_TRAINER_OPTIONS_DEFAULT;
    o.lr = 0.5;
    o.min_lr_ratio = 0.2;
    o.schedule_steps = 110;
    o.warmup_steps = 10;
    assert_true(fabs(dw__learning_rate(&o, 1) - 0.05) < 1e-15);
    assert_true(fabs(dw__learning_rate(&o, 10) - 0.5) < 1e-15);
    /* halfway, at the middle of 1 and 0.2 */
    assert_true(fabs(dw__learning_rate(&o, 60) - 0.5 * 0.6) < 1e-15);
    assert_true(fabs(dw__learning_rate(&o, 110) - 0.1) < 1e-15);
    for (int64_t step = 11; step <= 110; step++)
        assert_true(dw__learning_rate(&o, step) < dw__learning_rate(&o, step - 1));
    assert_true(dw__learning_rate(&o, 111) == 0.5 * 0.2);
    assert_true(dw__learning_rate(&o, INT64_C(1) << 40) == 0.5 * 0.2);
    o.warmup_steps = 0;
    assert_true(dw__learning_rate(&o, 1) < 0.5);
    o.warmup_steps = o.schedule_steps; /* warm-up alone must not divide by zero */
    assert_true(fabs(dw__learning_rate(&o, 110) - 0.5) < 1e-15);
    assert_true(fabs(dw__learning_rate(&o, 55) - 0.25) < 1e-15);
}

static void other_schedules(void **state) {
    (void)state;
    dw_trainer_options o = DW_TRAINER_OPTIONS_DEFAULT;
    o.lr = 0.5, o.min_lr_ratio = 0.2, o.schedule_steps = 110, o.warmup_steps = 10;
    o.schedule = "linear";
    assert_true(fabs(dw__learning_rate(&o, 5) - 0.25) < 1e-15);
    assert_true(fabs(dw__learning_rate(&o, 10) - 0.5) < 1e-15);
    assert_true(fabs(dw__learning_rate(&o, 35) - 0.4) < 1e-15); /* a quarter of the way to 0.1 */
    assert_true(dw__learning_rate(&o, 110) == 0.5 * 0.2);
    o.schedule = "constant";
    assert_true(fabs(dw__learning_rate(&o, 5) - 0.25) < 1e-15);
    assert_true(dw__learning_rate(&o, 11) == 0.5 && dw__learning_rate(&o, 1000) == 0.5);
    double lr = 0.0;
    FAILS(dw_training_rate(&o, 0, &lr), DW_INVALID_ARGUMENT, "steps count from 1");
    OK(dw_training_rate(&o, 1, &lr));
    assert_true(fabs(lr - 0.05) < 1e-15);
    o.schedule = "sine";
    FAILS(dw_training_rate(&o, 1, &lr), DW_INVALID_ARGUMENT, "schedule is \"sine\"");
}

/* ---- norm ------------------------------------------------------------------------------------ */

static float *random_elements(int64_t count) {
    float *elements = dw__malloc((size_t)count * sizeof *elements);
    uint64_t bits = 1;
    for (int64_t i = 0; i < count; i++) {
        bits = bits * 6364136223846793005u + 1442695040888963407u;
        elements[i] = (float)((double)(int32_t)(bits >> 32) * 0x1p-31);
    }
    return elements;
}

static void norm_is_that_of_long_double(void **state) {
    (void)state;
    static const int64_t counts[] = {0, 1, 7, 8, 9, 65535, 65536, 65537, 200003};
    for (size_t c = 0; c < DW_COUNT(counts); c++) {
        int64_t count = counts[c];
        float *elements = random_elements(count);
        double *scratch = dw__malloc(dw__norm_scratch(count));
        long double sum = 0;
        for (int64_t i = 0; i < count; i++) sum += (long double)elements[i] * elements[i];
        double norm = dw__norm(elements, count, scratch);
        /* Squares are exact in F64. Each of at most 200003 additions rounds by 2^-53, and a root halves the error. */
        assert_true(fabs(norm - (double)sqrtl(sum)) <= 1e-11 * norm);
        OK(dw_set_threads(1));
        assert_true(dw__norm(elements, count, scratch) == norm);
        OK(dw_set_threads(3));
        assert_true(dw__norm(elements, count, scratch) == norm);
        if (count > 8) {
            elements[count / 2] = 3e38f;
            assert_true(isfinite(dw__norm(elements, count, scratch)));
            elements[count - 1] = INFINITY;
            assert_false(isfinite(dw__norm(elements, count, scratch)));
            elements[0] = NAN;
            assert_false(isfinite(dw__norm(elements, count, scratch)));
        }
        dw__free(elements);
        dw__free(scratch);
    }
}

static void accumulate_adds(void **state) {
    (void)state;
    enum { COUNT = 65536 + 5 };
    float *to = random_elements(COUNT), *from = random_elements(COUNT);
    for (int64_t i = 0; i < COUNT; i++) from[i] += (float)i;
    float last = to[COUNT - 1] + from[COUNT - 1], first = to[0] + from[0];
    dw__accumulate(to, from, COUNT);
    assert_true(to[0] == first && to[COUNT - 1] == last);
    dw__free(to);
    dw__free(from);
}

/* ---- token files ----------------------------------------------------------------------------- */

/* An .npy file with the dictionary `text` and `data_bytes` zero bytes of data. */
static dw_status npy(int version, const char *text, size_t data_bytes, dw__token_layout *layout) {
    unsigned char bytes[1024] = {0x93, 'N', 'U', 'M', 'P', 'Y', (unsigned char)version, 0};
    size_t length = strlen(text), prefix = version == 1 ? 10 : 12;
    bytes[8] = (unsigned char)length;
    bytes[9] = (unsigned char)(length >> 8);
    memcpy(bytes + prefix, text, length);
    return dw__npy_layout("t.npy", bytes, prefix + length, prefix + length + data_bytes, layout);
}

static void npy_headers(void **state) {
    (void)state;
    dw__token_layout l;
    OK(npy(1, "{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }   \n", 6, &l));
    assert_int_equal(l.store, DW_TOKEN_STORE_U16);
    assert_int_equal(l.count, 3);
    OK(npy(2, "{\"shape\": (2,), \"descr\": \"<i8\", \"fortran_order\": True}", 16, &l));
    assert_int_equal(l.store, DW_TOKEN_STORE_I64);
    OK(npy(3, "{'descr': '<i4', 'fortran_order': False, 'shape': (0,)}", 0, &l));
    assert_int_equal(l.count, 0);

    static const struct {
        const char *text;
        size_t data;
        dw_status status;
        const char *message;
    } bad[] = {
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }", 4, DW_PARSE, "3 tokens"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }", 8, DW_PARSE,
         "8 bytes follow"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (9223372036854775807,), }", 8, DW_PARSE,
         "63"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (4611686018427387904,), }", 0, DW_PARSE,
         "tokens"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", 12, DW_UNSUPPORTED, "<f4"},
        {"{'descr': '>u2', 'fortran_order': False, 'shape': (3,), }", 6, DW_UNSUPPORTED, ">u2"},
        {"{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (3,), }", 6, DW_PARSE,
         "descr"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (3, 1), }", 6, DW_SHAPE,
         "2 dimensions"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (), }", 2, DW_SHAPE, "0 dimensions"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (-3,), }", 6, DW_PARSE, "shape"},
        {"{'descr': '<u2', 'fortran_order': False, }", 6, DW_PARSE, "keys"},
        {"{'descr': '<u2', 'descr': '<u2', 'shape': (3,)}", 6, DW_PARSE, "once"},
        {"{'descr': '<u2', 'fortran_order': 0, 'shape': (3,)}", 6, DW_PARSE, "True or False"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (3,)} x", 6, DW_PARSE, "nothing after"},
        {"{'descr': '<u2', 'fortran_order': False, 'shape': (3,", 6, DW_PARSE, "shape"},
        {"{'descr': '<u2", 6, DW_PARSE, "descr"},
        {"", 6, DW_PARSE, "'{'"},
    };
    for (size_t i = 0; i < DW_COUNT(bad); i++)
        FAILS(npy(1, bad[i].text, bad[i].data, &l), bad[i].status, bad[i].message);
    FAILS(npy(4, "{}", 0, &l), DW_UNSUPPORTED, "version 4.0");
    FAILS(dw__npy_layout("t.npy", "\x93NUMPY\x01\x00\xff\xff{", 11, 11, &l), DW_PARSE, "65535");
    FAILS(dw__npy_layout("t.npy", "PK", 2, 2, &l), DW_PARSE, "does not begin");
}

static void bin_headers(void **state) {
    (void)state;
    dw__token_layout l;
    int32_t words[256 + 2] = {20240520, 1, 4};
    OK(dw__token_layout_of("a.bin", words, sizeof words, sizeof words, DW_TOKEN_STORE_U32, &l));
    assert_true(l.store == DW_TOKEN_STORE_U16 && l.offset == 1024 && l.count == 4);
    words[2] = 5;
    FAILS(dw__token_layout_of("a.bin", words, sizeof words, sizeof words, DW_TOKEN_STORE_U16, &l),
          DW_PARSE, "5 tokens");
    words[0] = 20240801, words[1] = 7, words[2] = 2;
    OK(dw__token_layout_of("a.bin", words, sizeof words, sizeof words, DW_TOKEN_STORE_U16, &l));
    assert_true(l.store == DW_TOKEN_STORE_U32 && l.count == 2);
    OK(dw__token_layout_of("a.bin", "abcdef", 6, 6, DW_TOKEN_STORE_U16, &l));
    assert_true(l.offset == 0 && l.count == 3);
    FAILS(dw__token_layout_of("a.bin", "abcdefg", 7, 7, DW_TOKEN_STORE_U16, &l), DW_PARSE,
          "7 bytes");
    for (int i = 0; i < 258; i++) words[i] = i + 1;
    FAILS(dw__token_layout_of("a.bin", words, sizeof words, sizeof words, DW_TOKEN_STORE_U16, &l),
          DW_PARSE, "uint32");
    FAILS(dw__token_layout_of("a.txt", "abc", 3, 3, DW_TOKEN_STORE_U16, &l), DW_UNSUPPORTED,
          "deepwell.tokenize");
}

/* ---- data sets ------------------------------------------------------------------------------- */

static void sequences_overlap_by_one_token(void **state) {
    (void)state;
    uint16_t first[10], second[4], third[9];
    for (int i = 0; i < 10; i++) first[i] = (uint16_t)i;
    for (int i = 0; i < 4; i++) second[i] = (uint16_t)(100 + i);
    for (int i = 0; i < 9; i++) third[i] = (uint16_t)(200 + i);
    write_file("b.bin", second, sizeof second); /* too short for a sequence of 4 + 1 */
    write_file("c.bin", third, sizeof third);
    write_file("a.bin", first, sizeof first);
    write_file("notes.txt", "no tokens", 9);
    const char *path = folder;
    dw__dataset *d = NULL;
    OK(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, 4, &d));
    assert_int_equal(dw__dataset_file_count(d), 3);
    assert_int_equal(dw__dataset_tokens(d), 23);
    assert_int_equal(dw__dataset_sequences(d), 4); /* 2 + 0 + 2 */
    OK(dw__dataset_check(d, 300));
    static const int64_t starts[] = {0, 4, 200, 204};
    for (int64_t i = 0; i < 4; i++) {
        int64_t tokens[5];
        OK(dw__dataset_read(d, i, 300, tokens));
        for (int64_t k = 0; k < 5; k++) assert_int_equal(tokens[k], starts[i] + k);
    }
    FAILS(dw__dataset_check(d, 208), DW_INVALID_ARGUMENT, "token 8 (counted from 0) is 208");
    int64_t tokens[5];
    FAILS(dw__dataset_read(d, 3, 205, tokens), DW_INVALID_ARGUMENT, "c.bin\": token 5");
    uint64_t hash = dw__dataset_file_at(d, 0)->hash;
    dw__dataset_close(d);

    first[9]++; /* the hash detects a change of one token */
    path = write_file("a.bin", first, sizeof first);
    OK(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, 4, &d));
    OK(dw__dataset_check(d, 300));
    assert_true(dw__dataset_file_at(d, 0)->hash != hash);
    /* A file that shrinks during use. */
    assert_int_equal(truncate(path, 12), 0);
    FAILS(dw__dataset_read(d, 1, 300, tokens), DW_IO, "ends at byte 12");
    dw__dataset_close(d);
}

static void invalid_data_are_rejected(void **state) {
    (void)state;
    dw__dataset *d = NULL;
    const char *path = in_folder("absent.bin");
    FAILS(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, 4, &d), DW_IO, "absent.bin");
    path = folder;
    FAILS(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, 4, &d), DW_NOT_FOUND, "no .bin or .npy");
    path = write_file("a.bin", "12345678", 8);
    FAILS(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, 4, &d), DW_INVALID_ARGUMENT,
          "4 tokens in all");
    path = write_file("empty.bin", "", 0);
    FAILS(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, 1, &d), DW_INVALID_ARGUMENT, "0 tokens");
    path = write_file("t.txt", "words", 5);
    FAILS(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, 1, &d), DW_UNSUPPORTED, "tokenize");
    path = in_folder("pipe.bin");
    assert_int_equal(mkfifo(path, 0600), 0);
    FAILS(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, 1, &d), DW_IO, "pipe");
}

/* ---- checkpoint folders ---------------------------------------------------------------------- */

static void add_checkpoint(dw_checkpoints *c, int64_t step, int64_t keep) {
    const char *path = NULL;
    char manifest[512], text[128];
    OK(dw_checkpoints_begin(c, step, &path));
    snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
    int length =
        snprintf(text, sizeof text,
                 "{\"format\": \"deepwell checkpoint\", \"version\": 1, \"step\": %d}", (int)step);
    OK(dw__file_write(manifest, text, (size_t)length));
    OK(dw_checkpoints_commit(c));
    OK(dw_checkpoints_prune(c, keep));
}

static void checkpoints_come_and_go(void **state) {
    (void)state;
    char path[256];
    strcpy(path, in_folder("deep/er"));
    dw_checkpoints *c = NULL, *other = NULL;
    OK(dw_checkpoints_open(path, &c));
    assert_int_equal(dw_checkpoints_newest(c), -1);
    FAILS(dw_checkpoints_open(path, &other), DW_STATE, "another process");
    for (int64_t step = 5; step <= 20; step += 5) add_checkpoint(c, step, 2);
    assert_int_equal(dw_checkpoints_newest(c), 20);
    assert_int_equal(access(in_folder("deep/er/step-000000000010"), F_OK), -1);
    assert_int_equal(access(in_folder("deep/er/step-000000000015/manifest.json"), F_OK), 0);

    /* A killed process may leave a half-written folder and a half-removed one. */
    const char *begun = NULL;
    OK(dw_checkpoints_begin(c, 25, &begun));
    dw_checkpoints_abort(c);
    dw_checkpoints_close(c);
    assert_int_equal(mkdir(in_folder("deep/er/.writing-000000000025"), 0777), 0);
    write_file("deep/er/.writing-000000000025/model.safetensors", "x", 1);
    assert_int_equal(mkdir(in_folder("deep/er/.removing-000000000005"), 0777), 0);
    assert_int_equal(mkdir(in_folder("deep/er/step-mine"), 0777), 0);
    assert_int_equal(mkdir(in_folder("deep/er/step-0000000000030"), 0777), 0);
    OK(dw_checkpoints_open(path, &c));
    assert_int_equal(dw_checkpoints_newest(c), 20);
    assert_int_equal(access(in_folder("deep/er/.writing-000000000025"), F_OK), -1);
    assert_int_equal(access(in_folder("deep/er/.removing-000000000005"), F_OK), -1);
    /* Not a checkpoint of ours. */
    assert_int_equal(access(in_folder("deep/er/step-mine"), F_OK), 0);
    dw_checkpoints_close(c);
}

static void rename_in_folder(const char *from, const char *to) {
    char path[256];
    strcpy(path, in_folder(from));
    assert_int_equal(rename(path, in_folder(to)), 0);
}

/* Folders that block a checkpoint's name, or hide written ones, are rejected by name. */
static void checkpoints_with_wrong_names(void **state) {
    (void)state;
    char path[256];
    strcpy(path, in_folder("ck"));
    dw_checkpoints *c = NULL;
    OK(dw_checkpoints_open(path, &c));
    add_checkpoint(c, 10, 9);
    add_checkpoint(c, 15, 9);
    dw_checkpoints_close(c);

    assert_int_equal(mkdir(in_folder("ck/step-000000000030"), 0777), 0);
    write_file("ck/step-000000000030/model.safetensors", "x", 1);
    FAILS(dw_checkpoints_open(path, &c), DW_STATE, "ck/step-000000000030\" is not a complete");
    OK(dw__folder_remove(in_folder("ck/step-000000000030")));

    assert_int_equal(symlink("step-000000000010", in_folder("ck/step-000000000020")), 0);
    FAILS(dw_checkpoints_open(path, &c), DW_STATE, "step-000000000020\" holds the checkpoint");
    assert_non_null(strstr(dw_last_error(), "of step 10"));
    OK(dw__folder_remove(in_folder("ck/step-000000000020")));

    rename_in_folder("ck/step-000000000015", "ck/step-999999999999");
    FAILS(dw_checkpoints_open(path, &c), DW_STATE, "of step 15");
    rename_in_folder("ck/step-999999999999", "ck/step-000000000015");

    write_file("ck/step-000000000010/manifest.json", "{", 1);
    FAILS(dw_checkpoints_open(path, &c), DW_PARSE, "remove that folder");
    OK(dw__folder_remove(in_folder("ck/step-000000000010")));

    /* During a run, its checkpoints stay, and checkpoints of later steps are not removed. */
    OK(dw_checkpoints_open(path, &c));
    rename_in_folder("ck/step-000000000015", "ck/step-999999999999");
    add_checkpoint(c, 16, 1);
    add_checkpoint(c, 17, 1);
    assert_int_equal(access(in_folder("ck/step-000000000016"), F_OK), -1);
    assert_int_equal(access(in_folder("ck/step-000000000017"), F_OK), 0);
    assert_int_equal(access(in_folder("ck/step-999999999999"), F_OK), 0);
    dw_checkpoints_close(c);
}

static void unusable_checkpoint_folders_are_rejected(void **state) {
    (void)state;
    dw_checkpoints *c = NULL;
    char path[256];
    strcpy(path, write_file("file", "x", 1));
    FAILS(dw_checkpoints_open(path, &c), DW_IO, "file");
    strcat(path, "/below");
    FAILS(dw_checkpoints_open(path, &c), DW_IO, "file");
    FAILS(dw_checkpoints_open("", &c), DW_INVALID_ARGUMENT, "0 characters");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(permutation_is_a_bijection),
        cmocka_unit_test(permutation_mixes),
        cmocka_unit_test(permutation_of_huge_counts),
        cmocka_unit_test(learning_rate_has_the_documented_points),
        cmocka_unit_test(other_schedules),
        cmocka_unit_test(norm_is_that_of_long_double),
        cmocka_unit_test(accumulate_adds),
        cmocka_unit_test(npy_headers),
        cmocka_unit_test(bin_headers),
        cmocka_unit_test_setup_teardown(sequences_overlap_by_one_token, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(invalid_data_are_rejected, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(checkpoints_come_and_go, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(checkpoints_with_wrong_names, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(unusable_checkpoint_folders_are_rejected, make_folder,
                                        remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
