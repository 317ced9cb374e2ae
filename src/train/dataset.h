/* Token files as one row of sequences.
 *
 * Sequence k of a file is its tokens k*S .. k*S + S inclusive: S tokens to read and, shifted by one, S tokens
 * to predict. Every token except a file's first is then predicted once, and no sequence spans two files.
 * Fewer than S + 1 tokens at a file's end are not used.
 *
 * Files are read, not mapped. A file that shrinks during use then gives a message instead of a signal, its
 * pages do not count as memory of the process, and a batch is only a few kilobytes. */
#ifndef DW_DATASET_H
#define DW_DATASET_H

#include "deepwell/trainer.h"
#include "train/token_file.h"

typedef struct dw__dataset dw__dataset;

typedef struct dw__dataset_file {
    const char *path;
    int file; /* file descriptor */
    dw__token_layout layout;
    uint64_t bytes, hash;   /* hash: valid after dw__dataset_check */
    int64_t first_sequence; /* number of this file's first sequence in the whole row */
} dw__dataset_file;

/* The type of .bin files without a header. */
dw__token_store dw__token_store_of(dw_token_type type, int64_t vocabulary);

/* Opens each path. For a folder it opens the .bin and .npy files in order of their names. A sequence has
 * `sequence` + 1 tokens. A file with fewer tokens adds no sequence; DW_INVALID_ARGUMENT if there is no
 * sequence at all. */
dw_status dw__dataset_open(uint32_t path_count, const char *const *paths, dw__token_store raw,
                           int64_t sequence, dw__dataset **dataset);
void dw__dataset_close(dw__dataset *dataset);

uint32_t dw__dataset_file_count(const dw__dataset *dataset);
const dw__dataset_file *dw__dataset_file_at(const dw__dataset *dataset, uint32_t index);
int64_t dw__dataset_tokens(const dw__dataset *dataset);
int64_t dw__dataset_sequences(const dw__dataset *dataset);

/* Reads all files once, checks that every token is in [0, vocabulary), and computes the hashes. */
dw_status dw__dataset_check(dw__dataset *dataset, int64_t vocabulary);
/* Reads the S + 1 tokens of sequence `index`. */
dw_status dw__dataset_read(const dw__dataset *dataset, int64_t index, int64_t vocabulary,
                           int64_t *tokens);

#endif
