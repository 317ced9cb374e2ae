/* Splits text into pieces as the regular expressions of three families of tokenizers do:
 *
 *  GPT-2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *  Llama 3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
 *           \s*[\r\n]+|\s+(?!\S)|\s+
 *  Qwen     as Llama 3, with \p{N} for \p{N}{1,3}
 *
 * Alternatives are tried in order at each position, and each is greedy. */
#include "tokenizer/tokenizer_internal.h"
#include "tokenizer/unicode.h"

typedef struct reader {
    const char *text;
    size_t bytes;
} reader;

typedef struct character {
    uint32_t code;
    size_t length; /* 0: the end of the text */
    dw__unicode_class class;
} character;

static character read_at(const reader *r, size_t at) {
    character c = {0, 0, DW__UNICODE_OTHER};
    if (at >= r->bytes) return c;
    c.length = dw__utf8_read(r->text + at, r->bytes - at, &c.code);
    c.class = dw__unicode_class_of(c.code);
    return c;
}

static bool is_newline(character c) { return c.length != 0 && (c.code == '\n' || c.code == '\r'); }

/* Returns the end of the run of `class` characters from `at`, of at most `most`. */
static size_t run_end(const reader *r, size_t at, dw__unicode_class class, size_t most) {
    for (size_t count = 0; count < most; count++) {
        character c = read_at(r, at);
        if (c.length == 0 || c.class != class) break;
        at += c.length;
    }
    return at;
}

/* 's 't 're 've 'm 'll 'd; returns the length, or 0. */
static size_t contraction(const reader *r, bool any_case) {
    char letters[2] = {0};
    size_t ends[2] = {0}, at = 1;
    if (r->bytes < 2 || r->text[0] != '\'') return 0;
    for (int i = 0; i < 2; i++) {
        character c = read_at(r, at);
        if (c.length == 0) break;
        at += c.length;
        ends[i] = at;
        if (c.code < 0x80) letters[i] = (char)c.code;
        if (any_case && c.code >= 'A' && c.code <= 'Z') letters[i] = (char)(c.code - 'A' + 'a');
        if (any_case && c.code == 0x17F) letters[i] = 's'; /* the long s folds to s */
    }
    switch (letters[0]) {
    case 's':
    case 't':
    case 'm':
    case 'd': return ends[0];
    case 'r':
    case 'v': return letters[1] == 'e' ? ends[1] : 0;
    case 'l': return letters[1] == 'l' ? ends[1] : 0;
    default: return 0;
    }
}

/* \s+(?!\S)|\s+: white space before a character leaves the last one to it, if there are two or more. */
static size_t spaces(const reader *r) {
    size_t at = 0, last = 0;
    for (;;) {
        character c = read_at(r, at);
        if (c.length == 0) return at;
        if (c.class != DW__UNICODE_SPACE) return last ? last : at;
        last = at;
        at += c.length;
    }
}

/* \s*[\r\n]+: white space up to its last line break; 0 if there is none. */
static size_t lines(const reader *r) {
    size_t at = 0, end = 0;
    for (;;) {
        character c = read_at(r, at);
        if (c.length == 0 || c.class != DW__UNICODE_SPACE) return end;
        at += c.length;
        if (is_newline(c)) end = at;
    }
}

static size_t first_gpt2(const reader *r) {
    size_t length = contraction(r, false);
    if (length) return length;
    size_t start = r->text[0] == ' ';
    character c = read_at(r, start);
    if (c.length != 0 && c.class != DW__UNICODE_SPACE) return run_end(r, start, c.class, SIZE_MAX);
    return spaces(r);
}

static size_t first_llama3(const reader *r, size_t most_digits) {
    size_t length = contraction(r, true);
    if (length) return length;
    character first = read_at(r, 0), second = read_at(r, first.length);
    if (first.class == DW__UNICODE_LETTER) return run_end(r, 0, DW__UNICODE_LETTER, SIZE_MAX);
    if (first.class == DW__UNICODE_NUMBER) return run_end(r, 0, DW__UNICODE_NUMBER, most_digits);
    if (!is_newline(first) && second.length != 0 && second.class == DW__UNICODE_LETTER)
        return run_end(r, first.length, DW__UNICODE_LETTER, SIZE_MAX);
    size_t start = first.code == ' ' ? first.length : 0;
    character other = start ? second : first;
    if (other.length != 0 && other.class == DW__UNICODE_OTHER) {
        size_t end = run_end(r, start, DW__UNICODE_OTHER, SIZE_MAX);
        for (character c = read_at(r, end); is_newline(c); c = read_at(r, end)) end += c.length;
        return end;
    }
    length = lines(r);
    return length ? length : spaces(r);
}

size_t dw__split_first(dw__split split, const char *text, size_t bytes) {
    reader r = {text, bytes};
    if (bytes == 0) return 0;
    switch (split) {
    case DW__SPLIT_GPT2: return first_gpt2(&r);
    case DW__SPLIT_LLAMA3: return first_llama3(&r, 3);
    case DW__SPLIT_QWEN: return first_llama3(&r, 1);
    case DW__SPLIT_NONE: break;
    }
    return bytes;
}
