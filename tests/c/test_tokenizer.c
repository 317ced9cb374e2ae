/* Tokenizers: one message for each kind that is not supported, bytes that are not UTF-8, and memory that runs out.
 * tests/python/test_tokenizer.py compares ids with those of `tokenizers`. */
#include "base/base.h"
#include "deepwell/graph.h"
#include "deepwell/tokenizer.h"
#include "tokenizer/tokenizer_internal.h"
#include "tokenizer/unicode.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* A tokenizer with one token for each byte, with id 255 - byte, and "ab". */
typedef struct parts {
    const char *model, *pre, *normalizer, *decoder, *post, *added, *merges;
} parts;
#define BYTE_LEVEL "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}"
static const parts plain = {"\"type\": \"BPE\"", BYTE_LEVEL, "null", BYTE_LEVEL, "null", "[]",
                            "[\"a b\"]"};

static void write_json(const parts *p, dw__text *out) {
    assert_int_equal(dw__text_printf(out,
                                     "{\"model\": {%s, \"merges\": %s, \"vocab\": {\"ab\": 256",
                                     p->model, p->merges),
                     DW_OK);
    for (int byte = 0; byte < 256; byte++) {
        char key[5] = {0};
        dw__printable_write((uint8_t)byte, key);
        const char *escape = byte == '"' || byte == '\\' ? "\\" : "";
        assert_int_equal(dw__text_printf(out, ", \"%s%s\": %d", escape, key, 255 - byte), DW_OK);
    }
    assert_int_equal(
        dw__text_printf(out,
                        "}}, \"pre_tokenizer\": %s, \"normalizer\": %s, \"decoder\": %s, "
                        "\"post_processor\": %s, \"added_tokens\": %s}",
                        p->pre, p->normalizer, p->decoder, p->post, p->added),
        DW_OK);
}

static void other_tokenizers_are_refused(void **state) {
    (void)state;
    static const struct {
        parts with;
        dw_status status;
        const char *part;
    } cases[] = {
        {{.model = "\"type\": \"WordPiece\""}, DW_UNSUPPORTED, "model is WordPiece"},
        {{.model = "\"type\": \"BPE\", \"byte_fallback\": true"}, DW_UNSUPPORTED, "byte_fallback"},
        {{.model = "\"type\": \"BPE\", \"dropout\": 0.1"}, DW_UNSUPPORTED, "model.dropout"},
        {{.merges = "[\"a c\"]"}, DW_PARSE, "makes a token that is not in model.vocab"},
        {{.merges = "[\"a xx\"]"}, DW_PARSE, "has a token that is not in model.vocab"},
        {{.merges = "[\"ab\"]"}, DW_PARSE, "not two tokens"},
        {{.merges = "[3]"}, DW_PARSE, "neither a string nor two"},
        {{.merges = "3"}, DW_PARSE, "model.merges is an integer; expected an array"},
        {{.pre = "null"}, DW_UNSUPPORTED, "pre_tokenizer is missing"},
        {{.pre = "{\"type\": \"Metaspace\"}"}, DW_UNSUPPORTED, "pre_tokenizer is Metaspace"},
        {{.pre = "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": "
                 "{\"Regex\": \"a+\"}, \"behavior\": \"Isolated\"}, " BYTE_LEVEL "]}"},
         DW_UNSUPPORTED,
         "pre_tokenizer.pattern is \"a+\""},
        {{.normalizer = "{\"type\": \"NFKC\"}"}, DW_UNSUPPORTED, "normalizer is NFKC"},
        {{.decoder = "null"}, DW_UNSUPPORTED, "decoder is missing"},
        {{.post = "{\"type\": \"BertProcessing\"}"}, DW_UNSUPPORTED, "post_processor is Bert"},
        {{.added = "[{\"id\": 257, \"content\": \"x\", \"single_word\": true}]"},
         DW_UNSUPPORTED,
         "single_word"},
        {{.added = "[{\"id\": -1, \"content\": \"x\"}]"}, DW_PARSE, "is -1; expected 0 to"},
        {{.added = "[{\"id\": 1}]"}, DW_PARSE, "has no content"},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        parts p = plain;
        const char *const *with = (const char *const *)&cases[i].with;
        for (size_t at = 0; at < sizeof p / sizeof(char *); at++)
            if (with[at]) ((const char **)&p)[at] = with[at];
        dw__text json = {0};
        dw_tokenizer *tokenizer = NULL;
        write_json(&p, &json);
        dw_status status = dw_tokenizer_parse(json.text, json.length, &tokenizer);
        if (status != cases[i].status || !strstr(dw_last_error(), cases[i].part))
            print_error("%s: %s\n", cases[i].part, dw_last_error());
        assert_int_equal(status, cases[i].status);
        assert_non_null(strstr(dw_last_error(), cases[i].part));
        assert_null(tokenizer);
        dw__text_free(&json);
    }
    dw_tokenizer *tokenizer = NULL;
    static const char few[] =
        "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": []}}";
    assert_int_equal(dw_tokenizer_parse(few, sizeof few - 1, &tokenizer), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "no token for the byte 0x00"));
    assert_int_equal(dw_tokenizer_load("/nonexistent", &tokenizer), DW_IO);
}

static dw_status round_trip(const char *json, size_t bytes) {
    static const char text[] = "xab\xFF\xC3( \xE2\x82\xF0\x9F\x98\x80\xED\xA0\x80\xC0\x80\0ab";
    dw_tokenizer *tokenizer = NULL;
    int64_t *ids = NULL;
    char *again = NULL;
    size_t count, length;
    dw_status status = DW_OK;
    DW_TRY(dw_tokenizer_parse(json, bytes, &tokenizer));
    DW_TRY(dw_tokenizer_encode(tokenizer, text, sizeof text, 1, &ids, &count));
    DW_TRY(dw_tokenizer_decode(tokenizer, ids, count, 0, &again, &length));
    assert_int_equal(count, sizeof text - 2); /* "ab" is one token, twice */
    assert_int_equal(ids[1], 256);
    assert_int_equal(length, sizeof text);
    assert_memory_equal(again, text, sizeof text);
cleanup:
    dw_text_free(again);
    dw_tokens_free(ids);
    dw_tokenizer_destroy(tokenizer);
    return status;
}

static void any_bytes_decode_to_themselves(void **state) {
    (void)state;
    dw__text json = {0};
    parts p = plain;
    p.normalizer = "{\"type\": \"NFC\"}";
    write_json(&p, &json);
    assert_int_equal(round_trip(json.text, json.length), DW_OK);
    dw__text_free(&json);
}

static void memory_may_run_out(void **state) {
    (void)state;
    dw__text json = {0};
    parts p = plain;
    p.added = "[{\"id\": 300, \"content\": \"<e>\", \"special\": true}]";
    write_json(&p, &json);
    int64_t live = dw__memory_live();
    for (int64_t count = 0;; count += count < 20 ? 1 : 37) {
        dw__memory_fail_after(count);
        dw_status status = round_trip(json.text, json.length);
        bool failed = dw__memory_failures() > 0;
        dw__memory_fail_after(-1);
        assert_int_equal(dw__memory_live(), live);
        assert_int_equal(status, failed ? DW_OUT_OF_MEMORY : DW_OK);
        if (!failed) break;
    }
    dw__text_free(&json);
}

static void compositions(void **state) {
    (void)state;
    static const struct {
        const char *from, *to;
    } cases[] = {
        {"e\u0301", "\u00E9"},
        {"a\u0302\u0301", "\u1EA5"},
        {"q\u0323\u0307", "q\u0323\u0307"},
        {"q\u0307\u0323", "q\u0323\u0307"}, /* reordered by combining class */
        {"\u1100\u1161\u11A8", "\uAC01"},   /* Hangul */
        {"\u212B", "\u00C5"},               /* one character for another */
        {"\u0958", "\u0915\u093C"},         /* excluded from composition */
        {"a\u0301\xFF\u0301", "\u00E1\xFF"
                              "\u0301"}, /* an invalid byte composes with nothing */
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw__text out = {0};
        assert_int_equal(dw__unicode_compose(cases[i].from, strlen(cases[i].from), &out), DW_OK);
        assert_string_equal(out.text, cases[i].to);
        dw__text_free(&out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(other_tokenizers_are_refused),
        cmocka_unit_test(any_bytes_decode_to_themselves),
        cmocka_unit_test(memory_may_run_out),
        cmocka_unit_test(compositions),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
