/* A tokenizer of byte-level BPE. Text passes through: added tokens, normalizer, split pattern, merges.
 *
 * Byte-level BPE writes each byte as a printable character (GPT-2's table), and vocabulary and merges are in these
 * characters. Pieces are kept as bytes here; only look-ups in the vocabulary use the characters. */
#ifndef DW_TOKENIZER_H
#define DW_TOKENIZER_H

#include "base/base.h"
#include "deepwell/tokenizer.h"

/* The rule that cuts text into the pieces within which BPE merges. */
typedef enum dw__split {
    DW__SPLIT_NONE, /* text is one piece */
    DW__SPLIT_GPT2,
    DW__SPLIT_LLAMA3, /* numbers in pieces of at most three digits */
    DW__SPLIT_QWEN    /* numbers digit by digit */
} dw__split;

typedef struct dw__token {
    const char *bytes; /* NULL: the id has no token */
    size_t length;
    bool special;
} dw__token;

typedef struct dw__added_token {
    const char *text; /* normalized if `normalized` */
    size_t length;
    int64_t id;
    bool strips_left, strips_right; /* takes the white space beside it */
    bool normalized;                /* is looked for in normalized text */
} dw__added_token;

typedef struct dw__merge {
    uint64_t pair; /* left id << 32 | right id */
    uint32_t rank; /* lower ranks merge first */
    uint32_t id;   /* of the result */
} dw__merge;
#define DW__NO_PAIR UINT64_MAX

struct dw_tokenizer {
    dw__arena *arena;
    dw__map *vocabulary; /* printable form -> id */
    dw__token *tokens;
    uint32_t token_count;
    uint32_t byte_ids[256];
    dw__merge *merges; /* open addressing; DW__NO_PAIR: a free slot */
    size_t merge_slots;
    dw__split split;
    bool adds_space;     /* before text that does not begin with one */
    bool composes;       /* the normalizer is NFC */
    bool ignores_merges; /* a piece that is in the vocabulary is that token */
    struct {
        dw__added_token *items;
        size_t count, capacity;
    } added;
    bool added_begins[256]; /* bytes with which added tokens begin */
    struct {
        int64_t *items;
        size_t count, capacity;
    } before, after; /* special tokens around every text */
};

/* Returns the length of the first piece of a text; at least 1 if the text is not empty. */
size_t dw__split_first(dw__split split, const char *text, size_t bytes);

/* Returns NULL if the two do not merge. */
const dw__merge *dw__find_merge(const dw_tokenizer *tokenizer, uint32_t left, uint32_t right);
/* Adds a merge; the first of two for one pair holds. The table must have a free slot. */
void dw__add_merge(dw_tokenizer *tokenizer, dw__merge merge);

typedef struct dw__ids {
    int64_t *items;
    size_t count, capacity;
} dw__ids;
typedef struct dw__symbol {
    uint32_t id;
    bool gone; /* merged into the symbol at its left */
    uint32_t previous, next;
} dw__symbol;
typedef struct dw__candidate {
    uint32_t rank, place, id;
} dw__candidate;
/* Memory that pieces of one text share. */
typedef struct dw__merger {
    dw__symbol *symbols;
    size_t symbol_capacity;
    struct {
        dw__candidate *items; /* a heap: the lowest rank first, then the leftmost */
        size_t count, capacity;
    } queue;
    dw__text printable;
} dw__merger;
void dw__merger_free(dw__merger *merger);
/* Appends the ids of one piece. */
dw_status dw__merge_piece(const dw_tokenizer *tokenizer, dw__merger *merger, const char *piece,
                          size_t bytes, dw__ids *ids);

/* Writes the character of a byte (at most 2 bytes) and returns its length. */
size_t dw__printable_write(uint8_t byte, char text[4]);
/* Returns the byte of a character, or -1 if it stands for none. */
int dw__printable_byte(uint32_t code);

#endif
