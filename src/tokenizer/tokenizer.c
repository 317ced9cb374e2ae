/* Text to ids and back. */
#include "tokenizer/tokenizer_internal.h"
#include "tokenizer/unicode.h"
#include <string.h>

typedef struct encoder {
    const dw_tokenizer *tokenizer;
    dw__merger merger;
    dw__ids ids;
} encoder;

/* ---- encoding ------------------------------------------------------------------------------ */

/* Splits and merges text that holds no added token. */
static dw_status encode_pieces(encoder *e, const char *text, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        size_t length = dw__split_first(e->tokenizer->split, text + at, bytes - at);
        DW_RETURN_IF_FAILED(dw__merge_piece(e->tokenizer, &e->merger, text + at, length, &e->ids));
        at += length;
    }
    return DW_OK;
}

static dw_status encode_plain(encoder *e, const char *text, size_t bytes) {
    dw__text spaced = {0};
    if (bytes == 0) return DW_OK;
    if (!e->tokenizer->adds_space || text[0] == ' ') return encode_pieces(e, text, bytes);
    dw_status status = dw__text_append(&spaced, " ", 1);
    if (status == DW_OK) status = dw__text_append(&spaced, text, bytes);
    if (status == DW_OK) status = encode_pieces(e, spaced.text, spaced.length);
    dw__text_free(&spaced);
    return status;
}

/* Returns the longest added token at the text's beginning, or NULL. */
static const dw__added_token *added_at(const dw_tokenizer *t, bool normalized, const char *text,
                                       size_t bytes) {
    const dw__added_token *best = NULL;
    if (!t->added_begins[(uint8_t)text[0]]) return NULL;
    for (size_t i = 0; i < t->added.count; i++) {
        const dw__added_token *token = &t->added.items[i];
        if (token->normalized == normalized && token->length <= bytes &&
            (!best || token->length > best->length) &&
            memcmp(token->text, text, token->length) == 0)
            best = token;
    }
    return best;
}

static size_t spaces_after(const char *text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        uint32_t code;
        size_t length = dw__utf8_read(text + at, bytes - at, &code);
        if (dw__unicode_class_of(code) != DW__UNICODE_SPACE) break;
        at += length;
    }
    return at;
}

/* Returns the start of the white space that ends at `end`, not before `from`. */
static size_t spaces_before(const char *text, size_t from, size_t end) {
    while (end > from) {
        size_t start = end - 1;
        uint32_t code;
        while (start > from && ((uint8_t)text[start] & 0xC0) == 0x80) start--;
        if (dw__utf8_read(text + start, end - start, &code) != end - start ||
            dw__unicode_class_of(code) != DW__UNICODE_SPACE)
            break;
        end = start;
    }
    return end;
}

typedef dw_status (*encode_part)(encoder *e, const char *text, size_t bytes);

/* Cuts the text at added tokens and passes what is between them to `rest`. */
static dw_status encode_around(encoder *e, bool normalized, const char *text, size_t bytes,
                               encode_part rest) {
    size_t from = 0;
    for (size_t at = 0; at < bytes;) {
        const dw__added_token *found = added_at(e->tokenizer, normalized, text + at, bytes - at);
        if (!found) {
            at++;
            continue;
        }
        size_t start = found->strips_left ? spaces_before(text, from, at) : at;
        DW_RETURN_IF_FAILED(rest(e, text + from, start - from));
        DW_RETURN_IF_FAILED(DW_PUSH(&e->ids, found->id));
        at += found->length;
        if (found->strips_right) at += spaces_after(text + at, bytes - at);
        from = at;
    }
    return rest(e, text + from, bytes - from);
}

static dw_status encode_normalized(encoder *e, const char *text, size_t bytes) {
    dw__text composed = {0};
    if (bytes == 0) return DW_OK;
    if (!e->tokenizer->composes) return encode_around(e, true, text, bytes, encode_plain);
    dw_status status = dw__unicode_compose(text, bytes, &composed);
    if (status == DW_OK)
        status = encode_around(e, true, composed.text, composed.length, encode_plain);
    dw__text_free(&composed);
    return status;
}

dw_status dw_tokenizer_encode(const dw_tokenizer *tokenizer, const char *text, size_t bytes,
                              int special, int64_t **ids, size_t *count) {
    dw_status status = DW_OK;
    encoder e = {.tokenizer = tokenizer};
    if (!tokenizer || (!text && bytes) || !ids || !count)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_tokenizer_encode: an argument is NULL");
    DW_TRY(dw__grow((void **)&e.ids.items, &e.ids.capacity, 1, sizeof *e.ids.items));
    for (size_t i = 0; special && i < tokenizer->before.count; i++)
        DW_TRY(DW_PUSH(&e.ids, tokenizer->before.items[i]));
    if (bytes) DW_TRY(encode_around(&e, false, text, bytes, encode_normalized));
    for (size_t i = 0; special && i < tokenizer->after.count; i++)
        DW_TRY(DW_PUSH(&e.ids, tokenizer->after.items[i]));
    *ids = e.ids.items;
    *count = e.ids.count;
    e.ids.items = NULL;
cleanup:
    dw__merger_free(&e.merger);
    dw__free(e.ids.items);
    return status;
}

void dw_tokens_free(int64_t *ids) { dw__free(ids); }

/* ---- decoding ------------------------------------------------------------------------------ */

uint32_t dw_tokenizer_size(const dw_tokenizer *tokenizer) { return tokenizer->token_count; }

dw_status dw_tokenizer_decode(const dw_tokenizer *tokenizer, const int64_t *ids, size_t count,
                              int skip_special, char **text, size_t *bytes) {
    dw__text out = {0};
    if (!tokenizer || (!ids && count) || !text || !bytes)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_tokenizer_decode: an argument is NULL");
    dw_status status = dw__text_append(&out, "", 0);
    for (size_t i = 0; status == DW_OK && i < count; i++) {
        if (ids[i] < 0 || ids[i] >= tokenizer->token_count) continue;
        const dw__token *token = &tokenizer->tokens[ids[i]];
        if (token->bytes && !(skip_special && token->special))
            status = dw__text_append(&out, token->bytes, token->length);
    }
    if (status != DW_OK) {
        dw__text_free(&out);
        return status;
    }
    *text = out.text;
    *bytes = out.length;
    return DW_OK;
}
