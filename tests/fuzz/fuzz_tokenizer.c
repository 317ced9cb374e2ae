/* Any bytes are rejected with a message, or are a tokenizer, which encodes any bytes and decodes them again. The input
 * is a tokenizer.json, a NUL, and the text. */
#include "base/base.h"
#include "deepwell/graph.h"
#include "deepwell/tokenizer.h"
#include "fuzz.h"
#include <string.h>

static void check(const dw_tokenizer *tokenizer, const char *text, size_t bytes) {
    int64_t *ids = NULL;
    size_t count = 0, length = 0;
    char *again = NULL;
    fuzz_require(dw_tokenizer_encode(tokenizer, text, bytes, 0, &ids, &count) == DW_OK, "encode");
    for (size_t i = 0; i < count; i++)
        fuzz_require(ids[i] >= 0 && ids[i] < dw_tokenizer_size(tokenizer), "an id");
    fuzz_require(dw_tokenizer_decode(tokenizer, ids, count, 0, &again, &length) == DW_OK, "decode");
    fuzz_require(again && again[length] == '\0', "the end of the text");
    dw_tokens_free(ids);
    dw_text_free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const char *json = (const char *)data;
    size_t length = bytes ? (size_t)((const uint8_t *)memchr(data, 0, bytes) - data) : 0;
    dw_tokenizer *tokenizer = NULL;
    int64_t live = dw__memory_live();
    if (!bytes || !memchr(data, 0, bytes)) length = bytes;
    if (dw_tokenizer_parse(bytes ? json : "", length, &tokenizer) == DW_OK)
        check(tokenizer, json + length, bytes - length);
    else
        fuzz_require(dw_last_error()[0] != '\0', "message");
    dw_tokenizer_destroy(tokenizer);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
