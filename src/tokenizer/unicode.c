#include "tokenizer/unicode.h"
#include <string.h>

/* ---- UTF-8 --------------------------------------------------------------------------------- */

size_t dw__utf8_read(const char *text, size_t bytes, uint32_t *code) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *at = (const unsigned char *)text;
    size_t length = at[0] < 0x80 ? 1 : at[0] < 0xC0 ? 0 : at[0] < 0xE0 ? 2 : at[0] < 0xF0 ? 3 : 4;
    *code = at[0];
    if (length == 1) return 1;
    uint32_t value = length ? at[0] & (0x7Fu >> length) : 0;
    bool valid = length != 0 && length <= bytes && at[0] < 0xF8;
    for (size_t i = 1; valid && i < length; i++) {
        valid = (at[i] & 0xC0) == 0x80;
        value = value << 6 | (at[i] & 0x3Fu);
    }
    valid = valid && value >= least[length] && value < 0x110000 && value >> 11 != 0x1B;
    *code = valid ? value : DW__UNICODE_INVALID + at[0];
    return valid ? length : 1;
}

size_t dw__utf8_write(uint32_t code, char text[4]) {
    if (code >= DW__UNICODE_INVALID) {
        text[0] = (char)(code - DW__UNICODE_INVALID);
        return 1;
    }
    if (code < 0x80) {
        text[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        text[i] = (char)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    text[0] = (char)((0xF00u >> length & 0xFF) | code);
    return length;
}

/* ---- properties ---------------------------------------------------------------------------- */

static uint8_t value_of(const dw__unicode_range *ranges, size_t count, uint32_t code) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code > ranges[middle].last)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && code >= ranges[low].first ? ranges[low].value : 0;
}

dw__unicode_class dw__unicode_class_of(uint32_t code) {
    return (dw__unicode_class)value_of(dw__unicode_classes, dw__unicode_classes_count, code);
}

static uint8_t combining_class(uint32_t code) {
    if (code < 0x300) return 0;
    return value_of(dw__unicode_combining, dw__unicode_combining_count, code);
}

/* ---- composition --------------------------------------------------------------------------- */

/* Hangul syllables are computed (The Unicode Standard, section 3.12). */
enum {
    SYLLABLES = 0xAC00,
    SYLLABLE_COUNT = 11172,
    LEADING = 0x1100,
    LEADING_COUNT = 19,
    VOWELS = 0x1161,
    VOWEL_COUNT = 21,
    TRAILING = 0x11A7, /* the first trailing consonant is the next code */
    TRAILING_COUNT = 28
};

typedef struct sequence {
    uint32_t *items;
    size_t count, capacity;
} sequence;

static dw_status decompose(sequence *codes, uint32_t code) {
    size_t low = 0, high = dw__unicode_decompositions_count;
    if (code >= SYLLABLES && code < SYLLABLES + SYLLABLE_COUNT) {
        uint32_t index = code - SYLLABLES, trailing = index % TRAILING_COUNT;
        index /= TRAILING_COUNT;
        DW_RETURN_IF_FAILED(DW_PUSH(codes, LEADING + index / VOWEL_COUNT));
        DW_RETURN_IF_FAILED(DW_PUSH(codes, VOWELS + index % VOWEL_COUNT));
        return trailing ? DW_PUSH(codes, TRAILING + trailing) : DW_OK;
    }
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code > dw__unicode_decompositions[middle].code)
            low = middle + 1;
        else
            high = middle;
    }
    const dw__decomposition *found = &dw__unicode_decompositions[low];
    if (code < 0xC0 || low == dw__unicode_decompositions_count || found->code != code)
        return DW_PUSH(codes, code);
    DW_RETURN_IF_FAILED(decompose(codes, found->first)); /* the table's chains are finite */
    return found->second ? decompose(codes, found->second) : DW_OK;
}

/* Sorts each run of combining characters by class; equal classes keep their order. */
static dw_status reorder(sequence *codes) {
    sequence sorted = {0};
    for (size_t from = 0; from < codes->count;) {
        size_t to = from;
        bool in_order = true;
        uint8_t last = 0;
        for (; to < codes->count; to++) {
            uint8_t class = combining_class(codes->items[to]);
            if (class == 0) break;
            in_order = in_order && class >= last;
            last = class;
        }
        if (!in_order) {
            /* By counting, since a hostile run may be long. */
            size_t places[257] = {0};
            dw_status status =
                dw__grow((void **)&sorted.items, &sorted.capacity, to - from, sizeof *sorted.items);
            if (status != DW_OK) {
                dw__free(sorted.items);
                return status;
            }
            for (size_t i = from; i < to; i++) places[combining_class(codes->items[i]) + 1]++;
            for (size_t i = 0; i < 256; i++) places[i + 1] += places[i];
            for (size_t i = from; i < to; i++)
                sorted.items[places[combining_class(codes->items[i])]++] = codes->items[i];
            memcpy(codes->items + from, sorted.items, (to - from) * sizeof *sorted.items);
        }
        from = to + 1;
    }
    dw__free(sorted.items);
    return DW_OK;
}

/* Returns 0 if the two do not compose. */
static uint32_t composition(uint32_t first, uint32_t second) {
    size_t low = 0, high = dw__unicode_compositions_count;
    if (first - LEADING < LEADING_COUNT && second - VOWELS < VOWEL_COUNT)
        return SYLLABLES + ((first - LEADING) * VOWEL_COUNT + second - VOWELS) * TRAILING_COUNT;
    if (first - SYLLABLES < SYLLABLE_COUNT && (first - SYLLABLES) % TRAILING_COUNT == 0 &&
        second > TRAILING && second - TRAILING < TRAILING_COUNT)
        return first + second - TRAILING;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const dw__decomposition *at = &dw__unicode_decompositions[dw__unicode_compositions[middle]];
        if (at->first == first && at->second == second) return at->code;
        if (at->first < first || (at->first == first && at->second < second))
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

/* Replaces a starter and a following character that no other one blocks by their composition. */
static void compose(sequence *codes) {
    size_t count = 0, starter = 0;
    bool has_starter = false;
    uint8_t last = 0; /* combining class of the last character kept after the starter */
    for (size_t i = 0; i < codes->count; i++) {
        uint32_t code = codes->items[i], composed = 0;
        uint8_t class = combining_class(code);
        bool adjacent = has_starter && count == starter + 1;
        if (has_starter && (adjacent || (last != 0 && last < class)))
            composed = composition(codes->items[starter], code);
        if (composed) {
            codes->items[starter] = composed;
            continue;
        }
        if (class == 0) {
            starter = count;
            has_starter = true;
        }
        last = class;
        codes->items[count++] = code;
    }
    codes->count = count;
}

dw_status dw__unicode_compose(const char *text, size_t bytes, dw__text *out) {
    dw_status status = DW_OK;
    sequence codes = {0};
    size_t at = 0;
    while (at < bytes && (unsigned char)text[at] < 0x80) at++;
    if (at == bytes) return dw__text_append(out, text, bytes);
    for (at = 0; at < bytes;) {
        uint32_t code;
        at += dw__utf8_read(text + at, bytes - at, &code);
        DW_TRY(decompose(&codes, code));
    }
    DW_TRY(reorder(&codes));
    compose(&codes);
    for (size_t i = 0; i < codes.count; i++) {
        char character[4];
        DW_TRY(dw__text_append(out, character, dw__utf8_write(codes.items[i], character)));
    }
cleanup:
    dw__free(codes.items);
    return status;
}
