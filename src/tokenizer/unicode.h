/* Unicode as tokenizers need it: UTF-8, classes of characters, and canonical composition. */
#ifndef DW_UNICODE_H
#define DW_UNICODE_H

#include "base/base.h"

typedef enum dw__unicode_class {
    DW__UNICODE_OTHER,
    DW__UNICODE_LETTER, /* general category L */
    DW__UNICODE_NUMBER, /* general category N */
    DW__UNICODE_SPACE   /* property White_Space */
} dw__unicode_class;

/* A byte that is not part of valid UTF-8 is a character of its own: this code plus the byte. */
#define DW__UNICODE_INVALID 0x110000u

/* Decodes the character at `text`, of which `bytes` (at least 1) are left. Returns its length. */
size_t dw__utf8_read(const char *text, size_t bytes, uint32_t *code);
/* Writes the character and returns its length. */
size_t dw__utf8_write(uint32_t code, char text[4]);
dw__unicode_class dw__unicode_class_of(uint32_t code);
/* Appends the text in Normalization Form C (Unicode Standard Annex #15). Invalid bytes stay as they are. */
dw_status dw__unicode_compose(const char *text, size_t bytes, dw__text *out);

/* ---- unicode_tables.c ---------------------------------------------------------------------- */

typedef struct dw__unicode_range {
    uint32_t first, last;
    uint8_t value;
} dw__unicode_range;
extern const dw__unicode_range dw__unicode_classes[], dw__unicode_combining[];
extern const size_t dw__unicode_classes_count, dw__unicode_combining_count;

typedef struct dw__decomposition {
    uint32_t code, first, second; /* second 0: one character */
} dw__decomposition;
extern const dw__decomposition dw__unicode_decompositions[];
extern const size_t dw__unicode_decompositions_count;
extern const uint16_t dw__unicode_compositions[];
extern const size_t dw__unicode_compositions_count;

#endif
