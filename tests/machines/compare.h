/* Runs the project's GPU kernels on seeded inputs on whatever machine is found, a GPU or the emulator, and
 * compares what two machines make of the same inputs: all words, or a hash of them and some of the words.
 *
 * A family is a kernel or several with their cases. To add one: a file with a `compare_family`, and its row in
 * main.c.
 */
#ifndef COMPARE_H
#define COMPARE_H

#include "deepwell/status.h"
#include "device/device.h"
#include "jit/jit.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the words of an output are; COMPARE_BITS: 32 bits that are no numbers. */
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
    const void *words;   /* what the machine gave */
    const double *exact; /* by definition */
    /* How far two machines may be apart, of each word, and each from the definition by twice as much. NULL: every
     * machine must give the definition's number, rounded to the type. */
    const double *bound;
} compare_output;

typedef struct compare_sink compare_sink;
/* Takes an output of the case that runs. */
dw_status compare_emit(compare_sink *sink, const compare_output *output);

typedef struct compare_family {
    size_t (*count)(void);
    /* Of case `index`: its name, one word for a person; whether it belongs to the short run, whose kernels the library
     * carries. */
    void (*describe)(size_t index, char *name, size_t bytes, bool *quick);
    /* What its kernel is compiled from. */
    dw__jit_variant (*variant)(size_t index);
    /* Runs it in `context` and hands every output to the sink. */
    dw_status (*run)(size_t index, const dw__context *context, compare_sink *sink);
} compare_family;

extern const compare_family compare_attention, compare_quantize;

/* ---- for families ---------------------------------------------------------------------------- */

size_t compare_width(compare_type type); /* bytes of a word */
double compare_value(compare_type type, const void *words, size_t index);
/* Distance of the numbers of the type around x. */
double compare_ulp(compare_type type, double x);

/* Numbers that depend on the seed alone. */
typedef struct compare_random {
    uint64_t state;
} compare_random;
compare_random compare_seed(const char *text);
uint32_t compare_bits(compare_random *random);
double compare_uniform(compare_random *random); /* [0, 1) */
double compare_bell(compare_random *random);    /* mean 0, variance 1, at most 6 */

/* Device memory, filled from the host or with a byte; given back all at once, and fetched to memory of the host that is
 * given back with it. */
typedef struct compare_memory {
    struct compare_block *blocks;
} compare_memory;
dw_status compare_place(compare_memory *memory, const void *host, size_t bytes, void **device);
dw_status compare_empty(compare_memory *memory, size_t bytes, void **device);
dw_status compare_fetch(compare_memory *memory, const void *device, size_t bytes, void **host);
/* Memory of the host, zeros. */
dw_status compare_host(compare_memory *memory, size_t bytes, void **host);
void compare_release(compare_memory *memory);

#endif
