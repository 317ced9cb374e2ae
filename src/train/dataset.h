/* Token files as one row of sequences.
 *
 * Sequence k of a file is its tokens k*S .. k*S + S, both included: S to read and, one further, S to predict, so
 * that every token but a file's first is predicted once and sequences do not cross from one file into the next.
 * What remains at a file's end, less than S + 1 tokens, is not used.
 *
 * Files are read, not mapped: a file that shrinks while it is in use is a message and not a signal, its pages do
 * not count as memory of the process, and a batch is a few kilobytes.
 */
#ifndef DW_DATASET_H
#define DW_DATASET_H

#include "train/token_file.h"

typedef struct dw__dataset dw__dataset;

typedef struct dw__dataset_file {
    const char *path;
    int file; /* descriptor */
    dw__token_layout layout;
    uint64_t bytes, hash;   /* hash: after dw__dataset_check */
    int64_t first_sequence; /* number of this file's first one in the whole row */
} dw__dataset_file;

/* Opens each path, a folder's .bin and .npy files in order of their names. A sequence has `sequence` + 1
 * tokens; files of fewer tokens add none, and no sequence at all is DW_INVALID_ARGUMENT. */
dw_status dw__dataset_open(uint32_t path_count, const char *const *paths, dw__token_store raw,
                           int64_t sequence, dw__dataset **dataset);
void dw__dataset_close(dw__dataset *dataset);

uint32_t dw__dataset_file_count(const dw__dataset *dataset);
const dw__dataset_file *dw__dataset_file_at(const dw__dataset *dataset, uint32_t index);
int64_t dw__dataset_tokens(const dw__dataset *dataset);
int64_t dw__dataset_sequences(const dw__dataset *dataset);

/* Reads everything once: every token must lie in [0, vocabulary); hashes the files. */
dw_status dw__dataset_check(dw__dataset *dataset, int64_t vocabulary);
/* The S + 1 tokens of sequence `index`. */
dw_status dw__dataset_read(const dw__dataset *dataset, int64_t index, int64_t vocabulary,
                           int64_t *tokens);

#endif
