/* Artifacts: round trip, damage of every kind with one message, memory that runs out, sessions in pieces.
 * tests/python/test_export.py compares tokens and logits with transformers. */
#include "base/base.h"
#include "deepwell/generate.h"
#include "test_folder.h"
#include "tiny_artifact.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>

#include <cmocka.h>

enum { VOCABULARY = 11 };

#define assert_ok(call)                                                                            \
    do {                                                                                           \
        dw_status status_ = (call);                                                                \
        if (status_ != DW_OK) print_error("%s: %s\n", #call, dw_last_error());                     \
        assert_int_equal(status_, DW_OK);                                                          \
    } while (0)

static const int64_t ids[] = {1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7};
enum { IDS = DW_COUNT(ids) };

/* Any division of a text into pieces gives the same logits, up to the order of sums. */
static void pieces_give_the_same_logits(void **state) {
    (void)state;
    static const size_t pieces[][4] = {{1, 12}, {12, 1}, {4, 4, 5}, {2, 3, 1, 7}};
    dw_artifact *artifact = NULL;
    dw_session *session = NULL;
    float whole[IDS][VOCABULARY], last[VOCABULARY], most = 0.0f;
    assert_ok(tiny_artifact_write(in_folder("a"), "f32"));
    assert_ok(dw_artifact_open(in_folder("a"), &artifact));
    assert_ok(dw_session_create(artifact, NULL, &session));
    assert_ok(dw_session_append(session, ids, IDS, 1, whole[0]));
    for (int i = 0; i < IDS; i++)
        for (int v = 0; v < VOCABULARY; v++) most = fmaxf(most, fabsf(whole[i][v]));
    for (size_t i = 0; i < DW_COUNT(pieces); i++) {
        size_t at = 0;
        dw_session_reset(session);
        for (int p = 0; p < 4; p++) {
            assert_ok(dw_session_append(session, ids + at, pieces[i][p], 0, last));
            at += pieces[i][p];
        }
        for (int v = 0; v < VOCABULARY; v++)
            assert_true(fabsf(last[v] - whole[IDS - 1][v]) <= 1e-5f * most);
    }
    /* A failure leaves the sequence as it was. */
    dw_session_reset(session);
    assert_ok(dw_session_append(session, ids, IDS - 1, 0, NULL));
    assert_int_equal(dw_session_append(session, (int64_t[]){1, 11}, 2, 0, NULL), DW_INDEX);
    assert_ok(dw_session_append(session, ids + IDS - 1, 1, 0, last));
    for (int v = 0; v < VOCABULARY; v++)
        assert_true(fabsf(last[v] - whole[IDS - 1][v]) <= 1e-5f * most);
    dw_session_destroy(session);
    dw_artifact_close(artifact);
    remove(in_folder("a"));
}

static void description(void **state) {
    (void)state;
    dw_artifact *artifact = NULL;
    dw_artifact_info info;
    assert_ok(tiny_artifact_write(in_folder("a"), "bf16"));
    assert_ok(dw_artifact_open(in_folder("a"), &artifact));
    dw_artifact_describe(artifact, &info);
    assert_string_equal(info.model.family, "llama");
    assert_string_equal(info.dtype, "bf16");
    assert_non_null(strstr(info.config, "\"hidden_size\": 8"));
    assert_int_equal(info.end_count, 1);
    assert_int_equal(info.end_tokens[0], 3);
    assert_null(dw_artifact_tokenizer(artifact));
    dw_artifact_close(artifact);
    remove(in_folder("a"));
}

/* ---- damage -------------------------------------------------------------------------------- */

/* Opens the file and reads its weights. */
static dw_status load(const char *path) {
    dw_artifact *artifact = NULL;
    dw_session *session = NULL;
    dw_status status = dw_artifact_open(path, &artifact);
    if (status == DW_OK) status = dw_session_create(artifact, NULL, &session);
    dw_session_destroy(session);
    dw_artifact_close(artifact);
    return status;
}

static void write_bytes(const char *path, const char *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

static void damage_is_reported(void **state) {
    (void)state;
    char *bytes = NULL;
    size_t count = 0;
    assert_ok(tiny_artifact_write(in_folder("a"), "f32"));
    assert_ok(dw__file_read(in_folder("a"), &bytes, &count));
    int64_t live = dw__memory_live();
    for (size_t at = 0; at < count; at += 1 + count / 400) { /* cut short */
        write_bytes(in_folder("b"), bytes, at);
        assert_int_not_equal(load(in_folder("b")), DW_OK);
        assert_non_null(strstr(dw_last_error(), "/b\""));
    }
    /* One bit changed. All data but the manifest's have a hash. */
    uint64_t header;
    memcpy(&header, bytes, sizeof header);
    const char *manifest = memmem(bytes, count, "{\n  \"format\"", 12);
    assert_non_null(manifest);
    for (size_t at = 0; at < count; at += 1 + count / 400) {
        bytes[at] ^= 1;
        write_bytes(in_folder("b"), bytes, count);
        bytes[at] ^= 1;
        dw_status status = load(in_folder("b"));
        if (at >= sizeof header + header && bytes + at < manifest)
            assert_int_equal(status, DW_PARSE);
    }
    assert_int_equal(dw__memory_live(), live);
    /* The last weight is in front of the texts, of which config.json is the first. */
    char *config = memmem(bytes + 64, count - 64, "{\n  \"model_type\"", 16);
    assert_non_null(config);
    config[-1] ^= 1;
    write_bytes(in_folder("b"), bytes, count);
    assert_int_equal(load(in_folder("b")), DW_PARSE);
    assert_non_null(strstr(dw_last_error(), "was changed or damaged"));
    dw__free(bytes);
    remove(in_folder("a"));
    remove(in_folder("b"));
}

static void other_files_are_refused(void **state) {
    (void)state;
    static const char empty[] = "\2\0\0\0\0\0\0\0{}";
    write_bytes(in_folder("b"), empty, sizeof empty - 1);
    assert_int_equal(load(in_folder("b")), DW_PARSE);
    assert_non_null(strstr(dw_last_error(), "it is not an artifact"));
    assert_int_equal(load(in_folder("absent")), DW_IO);
    assert_int_equal(tiny_artifact_write(in_folder("a"), "f8"), DW_INVALID_ARGUMENT);
    assert_int_equal(tiny_artifact_write("/dev/full/a", "f32"), DW_IO);
    remove(in_folder("b"));
}

static void memory_may_run_out(void **state) {
    (void)state;
    int64_t live = dw__memory_live();
    for (int64_t allowed = 0;; allowed += 1 + allowed / 8) {
        dw__memory_fail_after(allowed);
        dw_status written = tiny_artifact_write(in_folder("a"), "f32");
        dw_status status = written == DW_OK ? load(in_folder("a")) : written;
        bool failed = dw__memory_failures() > 0;
        dw__memory_fail_after(-1);
        remove(in_folder("a"));
        if (failed) assert_int_equal(status, DW_OUT_OF_MEMORY);
        if (!failed) {
            assert_ok(status);
            break;
        }
    }
    assert_true(dw__memory_live() >= live);
}

/* Callers that were built before `cached` existed, and what it cannot be combined with. */
static void options_of_the_graph(void **state) {
    (void)state;
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    dw_model_config *config = NULL;
    dw_graph *graph = NULL;
    assert_ok(dw_model_config_parse(TINY_CONFIG, strlen(TINY_CONFIG), &config));
    options.cached = 1;
    options.struct_size = offsetof(dw_model_graph_options, cached);
    assert_ok(dw_model_graph(config, &options, &graph));
    assert_int_equal(dw_graph_symbol_count(graph), 2);
    dw_graph_destroy(graph);
    options.struct_size = sizeof options;
    assert_ok(dw_model_graph(config, &options, &graph));
    assert_int_equal(dw_graph_symbol_count(graph), 4);
    assert_int_equal(dw_graph_output_count(graph), 3);
    dw_graph_destroy(graph);
    options.output = DW_MODEL_LOSS;
    assert_int_equal(dw_model_graph(config, &options, &graph), DW_INVALID_ARGUMENT);
    options.output = DW_MODEL_LOGITS, options.dropout = 1;
    assert_int_equal(dw_model_graph(config, &options, &graph), DW_INVALID_ARGUMENT);
    dw_model_config_destroy(config);
}

/* ---- sampling ------------------------------------------------------------------------------ */

static void sampling(void **state) {
    (void)state;
    static const float logits[] = {1.0f, 3.0f, 3.0f, -INFINITY, 2.0f};
    static const struct {
        dw_sampling sampling;
        dw_status status;
    } cases[] = {
        {{0.0, 0, 1.0, 0}, DW_OK},
        {{1.0, 1, 1.0, 0}, DW_OK},
        {{1.0, 0, 1e-9, 0}, DW_OK}, /* the most likely token alone */
        {{-1.0, 0, 1.0, 0}, DW_INVALID_ARGUMENT},
        {{NAN, 0, 1.0, 0}, DW_INVALID_ARGUMENT},
        {{1.0, -1, 1.0, 0}, DW_INVALID_ARGUMENT},
        {{1.0, 0, 0.0, 0}, DW_INVALID_ARGUMENT},
        {{1.0, 0, 1.5, 0}, DW_INVALID_ARGUMENT},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        int64_t id = -1;
        assert_int_equal(dw_sample(logits, 5, &cases[i].sampling, i, &id), cases[i].status);
        if (cases[i].status == DW_OK) assert_int_equal(id, 1);
    }
    const dw_sampling hot = {1e6, 0, 1.0, 7};
    int64_t id;
    for (uint64_t step = 0; step < 200; step++) {
        assert_ok(dw_sample(logits, 5, &hot, step, &id));
        assert_true(id >= 0 && id < 5 && id != 3); /* a token of probability 0 is never taken */
    }
    assert_int_equal(dw_sample((float[]){NAN, 1.0f}, 2, &hot, 0, &id), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_sample((float[]){-INFINITY}, 1, &hot, 0, &id), DW_INVALID_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_give_the_same_logits),
        cmocka_unit_test(description),
        cmocka_unit_test(damage_is_reported),
        cmocka_unit_test(other_files_are_refused),
        cmocka_unit_test(options_of_the_graph),
        cmocka_unit_test(memory_may_run_out),
        cmocka_unit_test(sampling),
    };
    return cmocka_run_group_tests_name("artifact", tests, make_folder, remove_folder);
}
