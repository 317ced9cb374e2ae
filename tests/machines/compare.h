/* Runs the project's GPU kernels on seeded inputs on this machine, a GPU or the emulator, and compares the results of
 * two machines for the same inputs: all words, or a hash and some of the words.
 *
 * A family is one or more kernels with their cases. To add a family, write a file with a `compare_family` and add it to
 * the list in compare_machines.c.
 */
#ifndef COMPARE_H
#define COMPARE_H

#include "deepwell/status.h"
#include "device/device_table.h"
#include "jit/jit_internal.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The type of an output's words. COMPARE_BITS: 32 bits that are not a number. */
typedef enum compare_type {
    COMPARE_BF16,
    COMPARE_F16,
    COMPARE_F32,
    COMPARE_BITS,
    COMPARE_BYTES
} compare_type;

/* One output of a case. */
typedef struct compare_output {
    const char *name;
    compare_type type;
    size_t count;
    const void *words;   /* the machine's result */
    const double *exact; /* the definition's result */
    /* The largest permitted difference of two machines, for each word; the difference from the definition may be twice
     * as large. NULL: every machine must give the definition's number, rounded to the type. */
    const double *bound;
} compare_output;

typedef struct compare_sink compare_sink;
/* Passes an output of the running case to the sink. */
dw_status compare_emit(compare_sink *sink, const compare_output *output);

typedef struct compare_family {
    size_t (*count)(void);
    /* Describes case `index`: its name, in one word; and whether the library carries its kernels, so that it belongs to
     * the short run. */
    void (*describe)(size_t index, char *name, size_t bytes, bool *quick);
    /* Returns the variant that the case's kernel is compiled from. */
    dw__jit_variant (*variant)(size_t index);
    /* Runs the case in `context` and passes every output to the sink. */
    dw_status (*run)(size_t index, const dw__context *context, compare_sink *sink);
} compare_family;

extern const compare_family compare_attention, compare_quantize;

/* ---- helpers for families -------------------------------------------------------------------- */

size_t compare_width(compare_type type); /* bytes of a word */
double compare_value(compare_type type, const void *words, size_t index);
/* Returns the distance of neighbouring numbers of the type at x. */
double compare_ulp(compare_type type, double x);

/* Random numbers that depend only on the seed. */
typedef struct compare_random {
    uint64_t state;
} compare_random;
compare_random compare_seed(const char *text);
uint32_t compare_bits(compare_random *random);
double compare_uniform(compare_random *random); /* [0, 1) */
double compare_bell(compare_random *random);    /* mean 0, variance 1, at most 6 */

/* Allocates device memory, filled from the host or with one byte. All of it is freed together, including the host
 * memory that it was fetched to. */
typedef struct compare_memory {
    struct compare_block *blocks;
} compare_memory;
dw_status compare_place(compare_memory *memory, const void *host, size_t bytes, void **device);
dw_status compare_empty(compare_memory *memory, size_t bytes, void **device);
dw_status compare_fetch(compare_memory *memory, const void *device, size_t bytes, void **host);
/* Allocates zeroed host memory. */
dw_status compare_host(compare_memory *memory, size_t bytes, void **host);
void compare_release(compare_memory *memory);

#endif
