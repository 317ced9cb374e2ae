/* tokenizer.json -> dw_tokenizer. Every field that changes the ids is read, or refused with its value. Padding and
 * truncation are settings of batches and are not read. */
#include "base/json.h"
#include "tokenizer/tokenizer_internal.h"
#include "tokenizer/unicode.h"
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { FILE_MOST = 1 << 28, DEPTH_MOST = 64, VALUES_MOST = 1 << 24, SPARE_IDS = 1 << 16 };

/* ---- the normalizer and the split pattern --------------------------------------------------- */

static const struct {
    const char *pattern;
    dw__split split;
} patterns[] = {
    {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     DW__SPLIT_GPT2},
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
     "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     DW__SPLIT_LLAMA3},
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
     "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     DW__SPLIT_QWEN},
};

/* Returns the type of a component, "?" if it has none that can be shown. */
static const char *type_of(const json_t *component) {
    const char *type = json_string_value(json_object_get(component, "type"));
    return type && dw__json_is_plain(type) ? type : "?";
}

static dw_status refuse(const char *what, const json_t *component, const char *supported) {
    return dw__fail(
        DW_UNSUPPORTED, "%s is %.64s; Deepwell supports %s, as byte-level BPE tokenizers have it",
        what, json_is_object(component) ? type_of(component) : dw__json_kind(component), supported);
}
#define refuse(...) dw__not_ok((refuse)(__VA_ARGS__))

static bool is_type(const json_t *component, const char *type) {
    return strcmp(type_of(component), type) == 0;
}

static dw_status read_normalizer(dw_tokenizer *t, const json_t *normalizer) {
    size_t index;
    json_t *part;
    if (!normalizer) return DW_OK;
    if (is_type(normalizer, "NFC")) {
        t->composes = true;
        return DW_OK;
    }
    if (!is_type(normalizer, "Sequence")) return refuse("normalizer", normalizer, "NFC or none");
    json_array_foreach(json_object_get(normalizer, "normalizers"), index, part) {
        if (!is_type(part, "NFC")) return refuse("normalizer", part, "NFC or none");
        t->composes = true;
    }
    return DW_OK;
}

static dw_status read_split(dw_tokenizer *t, const json_t *split) {
    const char *pattern =
        json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
    const char *behavior = json_string_value(json_object_get(split, "behavior"));
    bool inverted;
    DW_RETURN_IF_FAILED(dw__json_flag(split, "invert", false, &inverted));
    if (!pattern) return dw__fail(DW_UNSUPPORTED, "pre_tokenizer.pattern has no Regex");
    /* The patterns match every character, so these two mean the same. */
    bool isolated = behavior && strcmp(behavior, "Isolated") == 0 && !inverted;
    bool removed = behavior && strcmp(behavior, "Removed") == 0 && inverted;
    if (!isolated && !removed)
        return dw__fail(DW_UNSUPPORTED,
                        "pre_tokenizer.behavior is %.32s with invert %s; Deepwell supports "
                        "Isolated without, and Removed with it",
                        behavior && dw__json_is_plain(behavior) ? behavior : "?",
                        inverted ? "true" : "false");
    for (size_t i = 0; i < DW_COUNT(patterns); i++)
        if (strcmp(patterns[i].pattern, pattern) == 0) {
            t->split = patterns[i].split;
            return DW_OK;
        }
    return dw__fail(DW_UNSUPPORTED,
                    "pre_tokenizer.pattern is \"%.200s\"; Deepwell supports the patterns of GPT-2, "
                    "Llama 3 and Qwen",
                    pattern);
}

static dw_status read_byte_level(dw_tokenizer *t, const json_t *level, bool alone) {
    bool adds, splits;
    DW_RETURN_IF_FAILED(dw__json_flag(level, "add_prefix_space", true, &adds));
    DW_RETURN_IF_FAILED(dw__json_flag(level, "use_regex", true, &splits));
    if (!alone && (adds || splits))
        return dw__fail(DW_UNSUPPORTED,
                        "pre_tokenizer.%s is true behind a Split; Deepwell supports false",
                        adds ? "add_prefix_space" : "use_regex");
    if (!alone) return DW_OK;
    t->adds_space = adds;
    t->split = splits ? DW__SPLIT_GPT2 : DW__SPLIT_NONE;
    return DW_OK;
}

static dw_status read_pre_tokenizer(dw_tokenizer *t, const json_t *pre) {
    const json_t *parts = json_object_get(pre, "pretokenizers");
    static const char supported[] = "ByteLevel, or a Split followed by ByteLevel";
    if (is_type(pre, "ByteLevel")) return read_byte_level(t, pre, true);
    if (!is_type(pre, "Sequence")) return refuse("pre_tokenizer", pre, supported);
    const json_t *first = json_array_get(parts, 0), *second = json_array_get(parts, 1);
    if (json_array_size(parts) == 1 && is_type(first, "ByteLevel"))
        return read_byte_level(t, first, true);
    if (json_array_size(parts) != 2 || !is_type(first, "Split") || !is_type(second, "ByteLevel"))
        return refuse("pre_tokenizer", pre, supported);
    DW_RETURN_IF_FAILED(read_split(t, first));
    return read_byte_level(t, second, false);
}

static dw_status check_decoder(const json_t *decoder) {
    if (is_type(decoder, "Sequence") && json_array_size(json_object_get(decoder, "decoders")) == 1)
        decoder = json_array_get(json_object_get(decoder, "decoders"), 0);
    return is_type(decoder, "ByteLevel") ? DW_OK : refuse("decoder", decoder, "ByteLevel");
}

/* ---- tokens around a text -------------------------------------------------------------------- */

static dw_status read_special(dw_tokenizer *t, const json_t *template, const json_t *piece,
                              bool before) {
    const char *name = json_string_value(json_object_get(piece, "id"));
    const json_t *tokens = json_object_get(template, "special_tokens"), *id;
    const json_t *ids = name ? json_object_get(json_object_get(tokens, name), "ids") : NULL;
    size_t index;
    if (json_array_size(ids) == 0)
        return dw__fail(DW_PARSE, "post_processor.single has a special token without ids");
    json_array_foreach((json_t *)ids, index, id) {
        int64_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value >= INT32_MAX)
            return dw__fail(DW_PARSE, "post_processor.special_tokens has an id that is %s",
                            json_is_integer(id) ? "out of range" : dw__json_kind(id));
        DW_RETURN_IF_FAILED(before ? DW_PUSH(&t->before, value) : DW_PUSH(&t->after, value));
    }
    return DW_OK;
}

static dw_status read_template(dw_tokenizer *t, const json_t *template) {
    size_t index;
    json_t *piece;
    bool before = true;
    json_array_foreach(json_object_get(template, "single"), index, piece) {
        const json_t *special = json_object_get(piece, "SpecialToken");
        if (!special && !(json_object_get(piece, "Sequence") && before))
            return dw__fail(DW_UNSUPPORTED,
                            "post_processor.single has another entry than special tokens around "
                            "one Sequence");
        if (special)
            DW_RETURN_IF_FAILED(read_special(t, template, special, before));
        else
            before = false;
    }
    if (!before) return DW_OK;
    return dw__fail(DW_PARSE, "post_processor.single has no Sequence");
}

static dw_status read_post_processor(dw_tokenizer *t, const json_t *post) {
    static const char supported[] = "ByteLevel, one TemplateProcessing, or none";
    size_t index;
    json_t *part;
    bool templated = false;
    if (!post || is_type(post, "ByteLevel")) return DW_OK;
    if (is_type(post, "TemplateProcessing")) return read_template(t, post);
    if (!is_type(post, "Sequence")) return refuse("post_processor", post, supported);
    json_array_foreach(json_object_get(post, "processors"), index, part) {
        if (is_type(part, "ByteLevel")) continue;
        if (templated || !is_type(part, "TemplateProcessing"))
            return refuse("post_processor", part, supported);
        DW_RETURN_IF_FAILED(read_template(t, part));
        templated = true;
    }
    return DW_OK;
}

/* ---- vocabulary and merges -------------------------------------------------------------------- */

/* Converts a token's printable form to bytes. A token with other characters stands for itself. */
static dw_status read_bytes(dw_tokenizer *t, const char *text, dw__token *token) {
    size_t length = strlen(text), count = 0;
    char *bytes = dw__arena_alloc(t->arena, length + 1);
    if (!bytes) return dw__fail_memory("a token", length + 1);
    *token = (dw__token){bytes, length, token->special};
    for (size_t at = 0; at < length;) {
        uint32_t code;
        at += dw__utf8_read(text + at, length - at, &code);
        int byte = dw__printable_byte(code);
        if (byte < 0) {
            memcpy(bytes, text, length);
            return DW_OK;
        }
        bytes[count++] = (char)byte;
    }
    bytes[count] = '\0';
    token->length = count;
    return DW_OK;
}

static dw_status check_id(const char *what, const json_t *id, size_t most) {
    if (!json_is_integer(id)) return dw__json_wrong_kind(what, id, "an integer");
    if (json_integer_value(id) >= 0 && (uint64_t)json_integer_value(id) < most) return DW_OK;
    return dw__fail(DW_PARSE, "%s is %lld; expected 0 to %zu", what,
                    (long long)json_integer_value(id), most - 1);
}

static dw_status add_token(dw_tokenizer *t, const char *text, uint32_t id) {
    if (id >= t->token_count) t->token_count = id + 1;
    return read_bytes(t, text, &t->tokens[id]);
}

static dw_status read_vocabulary(dw_tokenizer *t, json_t *vocabulary, const json_t *added) {
    const char *text;
    json_t *id;
    if (!json_is_object(vocabulary))
        return dw__json_wrong_kind("model.vocab", vocabulary, "an object");
    size_t most = 2 * (json_object_size(vocabulary) + json_array_size(added)) + SPARE_IDS;
    t->tokens = dw__calloc(most, sizeof *t->tokens);
    if (!t->tokens) return dw__fail_memory("a vocabulary", most * sizeof *t->tokens);
    json_object_foreach(vocabulary, text, id) {
        DW_RETURN_IF_FAILED(check_id("an id of model.vocab", id, most));
        uint32_t value = (uint32_t)json_integer_value(id);
        if (t->tokens[value].bytes)
            return dw__fail(DW_PARSE, "model.vocab has the id %u twice", value);
        DW_RETURN_IF_FAILED(dw__map_set(t->vocabulary, text, value));
        DW_RETURN_IF_FAILED(add_token(t, text, value));
    }
    for (int byte = 0; byte < 256; byte++) {
        char key[5] = {0};
        dw__printable_write((uint8_t)byte, key);
        if (!dw__map_get(t->vocabulary, key, &t->byte_ids[byte]))
            return dw__fail(DW_UNSUPPORTED,
                            "model.vocab has no token for the byte 0x%02X; expected one for each "
                            "of the 256, as byte-level BPE has",
                            (unsigned)byte);
    }
    return DW_OK;
}

/* Sets *left and *right to the two tokens of a merge: "a b", or ["a", "b"]. */
static dw_status read_pair(dw_tokenizer *t, const json_t *entry, dw__text *scratch, uint32_t ids[2],
                           uint32_t *result) {
    const char *whole = json_string_value(entry), *parts[2];
    scratch->length = 0;
    if (whole) {
        const char *space = strchr(whole, ' ');
        if (!space || strchr(space + 1, ' '))
            return dw__fail(DW_PARSE, "an entry of model.merges is not two tokens with a space "
                                      "between them");
        DW_RETURN_IF_FAILED(dw__text_append(scratch, whole, strlen(whole)));
        scratch->text[space - whole] = '\0';
        parts[0] = scratch->text;
        parts[1] = scratch->text + (space - whole) + 1;
    } else {
        parts[0] = json_string_value(json_array_get(entry, 0));
        parts[1] = json_string_value(json_array_get(entry, 1));
        if (json_array_size(entry) != 2 || !parts[0] || !parts[1])
            return dw__fail(DW_PARSE, "an entry of model.merges is neither a string nor two");
    }
    if (!dw__map_get(t->vocabulary, parts[0], &ids[0]) ||
        !dw__map_get(t->vocabulary, parts[1], &ids[1]))
        return dw__fail(DW_PARSE, "model.merges has a token that is not in model.vocab");
    size_t first = strlen(parts[0]), second = strlen(parts[1]);
    if (whole) {
        memmove(scratch->text + first, scratch->text + first + 1, second + 1);
    } else {
        DW_RETURN_IF_FAILED(dw__text_append(scratch, parts[0], first));
        DW_RETURN_IF_FAILED(dw__text_append(scratch, parts[1], second));
    }
    if (dw__map_get(t->vocabulary, scratch->text, result)) return DW_OK;
    return dw__fail(DW_PARSE, "model.merges makes a token that is not in model.vocab");
}

static dw_status read_merges(dw_tokenizer *t, json_t *merges) {
    dw_status status = DW_OK;
    dw__text scratch = {0};
    size_t index;
    json_t *entry;
    if (!json_is_array(merges)) return dw__json_wrong_kind("model.merges", merges, "an array");
    for (t->merge_slots = 16; 3 * t->merge_slots < 4 * (json_array_size(merges) + 1);)
        t->merge_slots *= 2;
    t->merges = dw__malloc(t->merge_slots * sizeof *t->merges);
    if (!t->merges) return dw__fail_memory("merges", t->merge_slots * sizeof *t->merges);
    for (size_t i = 0; i < t->merge_slots; i++) t->merges[i].pair = DW__NO_PAIR;
    json_array_foreach(merges, index, entry) {
        uint32_t ids[2], result;
        DW_TRY(read_pair(t, entry, &scratch, ids, &result));
        dw__add_merge(t, (dw__merge){(uint64_t)ids[0] << 32 | ids[1], (uint32_t)index, result});
    }
cleanup:
    dw__text_free(&scratch);
    return status;
}

static dw_status read_model(dw_tokenizer *t, const json_t *root) {
    /* Fields whose other values are other algorithms. */
    static const char *const absent[] = {"dropout", "unk_token", "continuing_subword_prefix",
                                         "end_of_word_suffix"};
    const json_t *model = json_object_get(root, "model");
    bool flag;
    const char *type = json_string_value(json_object_get(model, "type"));
    if (!json_is_object(model)) return dw__json_wrong_kind("model", model, "an object");
    /* Old files have no type; BPE alone has merges. */
    if (type ? strcmp(type, "BPE") != 0 : !json_object_get(model, "merges"))
        return refuse("model", model, "BPE");
    for (size_t i = 0; i < DW_COUNT(absent); i++) {
        const json_t *value = dw__json_member(model, absent[i]);
        const char *text = json_string_value(value);
        bool unused = !value || (text && *text == '\0') ||
                      (json_is_number(value) && json_number_value(value) == 0.0) ||
                      strcmp(absent[i], "unk_token") == 0; /* every byte has a token */
        if (!unused)
            return dw__fail(DW_UNSUPPORTED, "model.%s is %s; Deepwell supports none", absent[i],
                            dw__json_kind(value));
    }
    DW_RETURN_IF_FAILED(dw__json_flag(model, "byte_fallback", false, &flag));
    if (flag)
        return dw__fail(DW_UNSUPPORTED, "model.byte_fallback is true: this is SentencePiece's BPE; "
                                        "Deepwell supports byte-level BPE");
    DW_RETURN_IF_FAILED(dw__json_flag(model, "ignore_merges", false, &t->ignores_merges));
    DW_RETURN_IF_FAILED(
        read_vocabulary(t, json_object_get(model, "vocab"), json_object_get(root, "added_tokens")));
    return read_merges(t, json_object_get(model, "merges"));
}

/* ---- added tokens ------------------------------------------------------------------------------ */

static dw_status read_added(dw_tokenizer *t, const json_t *entry, size_t most) {
    dw__added_token token = {0};
    dw__text text = {0};
    const char *content = json_string_value(json_object_get(entry, "content"));
    bool whole_word, special;
    if (!content || *content == '\0')
        return dw__fail(DW_PARSE, "an entry of added_tokens has no content");
    DW_RETURN_IF_FAILED(check_id("an id of added_tokens", json_object_get(entry, "id"), most));
    DW_RETURN_IF_FAILED(dw__json_flag(entry, "lstrip", false, &token.strips_left));
    DW_RETURN_IF_FAILED(dw__json_flag(entry, "rstrip", false, &token.strips_right));
    DW_RETURN_IF_FAILED(dw__json_flag(entry, "normalized", false, &token.normalized));
    DW_RETURN_IF_FAILED(dw__json_flag(entry, "special", false, &special));
    DW_RETURN_IF_FAILED(dw__json_flag(entry, "single_word", false, &whole_word));
    if (whole_word)
        return dw__fail(DW_UNSUPPORTED,
                        "an entry of added_tokens has single_word true; Deepwell supports false");
    token.id = json_integer_value(json_object_get(entry, "id"));
    t->tokens[token.id].special = special;
    DW_RETURN_IF_FAILED(add_token(t, content, (uint32_t)token.id));
    dw_status status = token.normalized && t->composes
                           ? dw__unicode_compose(content, strlen(content), &text)
                           : dw__text_append(&text, content, strlen(content));
    if (status == DW_OK) {
        token.length = text.length;
        token.text = dw__arena_strdup(t->arena, text.text);
        status = token.text ? DW_PUSH(&t->added, token) : dw__fail_memory("a token", text.length);
        t->added_begins[(uint8_t)text.text[0]] = true;
    }
    dw__text_free(&text);
    return status;
}

static dw_status read_all(dw_tokenizer *t, const json_t *root) {
    const json_t *added = json_object_get(root, "added_tokens");
    size_t index;
    json_t *entry;
    DW_RETURN_IF_FAILED(read_normalizer(t, dw__json_member(root, "normalizer")));
    DW_RETURN_IF_FAILED(read_model(t, root));
    DW_RETURN_IF_FAILED(read_pre_tokenizer(t, dw__json_member(root, "pre_tokenizer")));
    DW_RETURN_IF_FAILED(check_decoder(dw__json_member(root, "decoder")));
    DW_RETURN_IF_FAILED(read_post_processor(t, dw__json_member(root, "post_processor")));
    size_t most = 2 * (json_object_size(json_object_get(json_object_get(root, "model"), "vocab")) +
                       json_array_size(added)) +
                  SPARE_IDS;
    json_array_foreach((json_t *)added, index, entry)
        DW_RETURN_IF_FAILED(read_added(t, entry, most));
    return DW_OK;
}

/* ---- lifecycle ----------------------------------------------------------------------------- */

dw_status dw_tokenizer_parse(const char *json, size_t bytes, dw_tokenizer **tokenizer) {
    static const dw__json_limits limits = {DEPTH_MOST, VALUES_MOST};
    dw_status status = DW_OK;
    json_t *root = NULL;
    if (!json || !tokenizer) return dw__fail(DW_INVALID_ARGUMENT, "a tokenizer is NULL");
    dw_tokenizer *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a tokenizer", sizeof *made);
    made->arena = dw__arena_create();
    made->vocabulary = dw__map_create();
    if (!made->arena || !made->vocabulary) DW_TRY(dw__fail_memory("a tokenizer", sizeof *made));
    DW_TRY(dw__json_parse("tokenizer.json", json, bytes, limits, &root));
    status = read_all(made, root);
    if (status == DW_PARSE || status == DW_UNSUPPORTED)
        status = dw__fail_prefix(status, "tokenizer.json");
    if (status != DW_OK) goto cleanup;
    *tokenizer = made;
    made = NULL;
cleanup:
    json_decref(root);
    dw_tokenizer_destroy(made);
    return status;
}

dw_status dw_tokenizer_load(const char *path, dw_tokenizer **tokenizer) {
    char file[PATH_MAX], *text = NULL;
    size_t bytes = 0;
    struct stat info;
    if (!path || !tokenizer)
        return dw__fail(DW_INVALID_ARGUMENT, "the path of a tokenizer is NULL");
    bool folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    if (snprintf(file, PATH_MAX, folder ? "%s/tokenizer.json" : "%s", path) >= PATH_MAX)
        return dw__fail(DW_IO, "cannot open \"%.80s\": its name is too long", path);
    DW_RETURN_IF_FAILED(dw__file_read_at_most(file, FILE_MOST, &text, &bytes));
    dw_status status = dw_tokenizer_parse(text, bytes, tokenizer);
    dw__free(text);
    if (status == DW_PARSE || status == DW_UNSUPPORTED)
        status = dw__fail_prefix(status, "\"%s\"", file);
    return status;
}

void dw_tokenizer_destroy(dw_tokenizer *tokenizer) {
    if (!tokenizer) return;
    dw__map_destroy(tokenizer->vocabulary);
    dw__free(tokenizer->tokens);
    dw__free(tokenizer->merges);
    dw__free(tokenizer->added.items);
    dw__free(tokenizer->before.items);
    dw__free(tokenizer->after.items);
    dw__arena_destroy(tokenizer->arena);
    dw__free(tokenizer);
}
