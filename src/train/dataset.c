#include "train/dataset.h"
#include "train/file_hash.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct dw__dataset {
    dw__arena *memory; /* memory of paths */
    struct {
        dw__dataset_file *items;
        size_t count, capacity;
    } files;
    int64_t sequence, sequences, tokens;
    void *stored; /* buffer of one sequence as stored */
};

/* ---- opening --------------------------------------------------------------------------------- */

dw__token_store dw__token_store_of(dw_token_type type, int64_t vocabulary) {
    if (type == DW_TOKEN_U16) return DW_TOKEN_STORE_U16;
    if (type == DW_TOKEN_U32) return DW_TOKEN_STORE_U32;
    return vocabulary <= 65536 ? DW_TOKEN_STORE_U16 : DW_TOKEN_STORE_U32;
}

static dw_status read_layout(dw__dataset *d, dw__dataset_file *f, dw__token_store raw) {
    dw_status status = DW_OK;
    size_t head_bytes = f->bytes < DW_TOKEN_HEAD_BYTES ? (size_t)f->bytes : DW_TOKEN_HEAD_BYTES;
    char *head = dw__malloc(head_bytes);
    if (!head) return dw__fail_memory("the head of a token file", head_bytes);
    DW_TRY(dw__read_at(f->file, f->path, 0, head, head_bytes));
    DW_TRY(dw__token_layout_of(f->path, head, head_bytes, f->bytes, raw, &f->layout));
    f->first_sequence = d->sequences;
    d->tokens += f->layout.count;
    if (f->layout.count > 0) d->sequences += (f->layout.count - 1) / d->sequence;
cleanup:
    dw__free(head);
    return status;
}

static dw_status add_file(dw__dataset *d, const char *path, dw__token_store raw) {
    dw__dataset_file f = {.path = dw__arena_strdup(d->memory, path)};
    if (!f.path) return dw__fail_memory("a path", strlen(path));
    DW_RETURN_IF_FAILED(dw__file_open(path, &f.file, &f.bytes));
    dw_status status = dw__token_check_name(path);
    if (status == DW_OK) status = DW_PUSH(&d->files, f);
    if (status != DW_OK) {
        close(f.file);
        return status;
    }
    return read_layout(d, &d->files.items[d->files.count - 1], raw);
}

static int is_token_file(const struct dirent *entry) {
    size_t length = strlen(entry->d_name);
    return entry->d_name[0] != '.' && length > 4 &&
           (strcmp(entry->d_name + length - 4, ".bin") == 0 ||
            strcmp(entry->d_name + length - 4, ".npy") == 0);
}

/* Sorts by bytes, so that the order is the same in every locale. */
static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static dw_status add_folder(dw__dataset *d, const char *folder, dw__token_store raw) {
    dw_status status = DW_OK;
    struct dirent **entries = NULL;
    int count = scandir(folder, &entries, is_token_file, by_name);
    if (count < 0) return dw__fail_io("cannot list folder", folder, errno);
    if (count == 0)
        status =
            dw__fail(DW_NOT_FOUND,
                     "folder \"%s\" holds no .bin or .npy file; make one of text with: python -m "
                     "deepwell.tokenize --model FOLDER TEXT... -o \"%s/tokens.bin\"",
                     folder, folder);
    for (int i = 0; i < count && status == DW_OK; i++) {
        char *path = dw__arena_printf(d->memory, "%s/%s", folder, entries[i]->d_name);
        status =
            path ? add_file(d, path, raw) : dw__fail_memory("a path", strlen(entries[i]->d_name));
    }
    for (int i = 0; i < count; i++) free(entries[i]);
    free(entries);
    return status;
}

dw_status dw__dataset_open(uint32_t path_count, const char *const *paths, dw__token_store raw,
                           int64_t sequence, dw__dataset **dataset) {
    dw_status status = DW_OK;
    dw__dataset *d = dw__calloc(1, sizeof *d);
    if (!d) return dw__fail_memory("a data set", sizeof *d);
    d->sequence = sequence;
    size_t room = ((size_t)sequence + 1) * sizeof(int64_t);
    d->memory = dw__arena_create();
    d->stored = dw__malloc(room);
    if (!d->memory || !d->stored) DW_TRY(dw__fail_memory("a data set", room));
    for (uint32_t i = 0; i < path_count; i++) {
        struct stat info;
        bool folder = stat(paths[i], &info) == 0 && S_ISDIR(info.st_mode);
        DW_TRY(folder ? add_folder(d, paths[i], raw) : add_file(d, paths[i], raw));
    }
    if (d->sequences == 0)
        DW_TRY(
            dw__fail(DW_INVALID_ARGUMENT,
                     "\"%s\"%s: %lld tokens in all, but one sequence needs %lld in one file; use a "
                     "smaller sequence, or more data",
                     paths[0], path_count > 1 ? " and the others" : "", (long long)d->tokens,
                     (long long)sequence + 1));
    *dataset = d;
    d = NULL;
cleanup:
    dw__dataset_close(d);
    return status;
}

void dw__dataset_close(dw__dataset *d) {
    if (!d) return;
    for (size_t i = 0; i < d->files.count; i++) close(d->files.items[i].file);
    dw__free(d->files.items);
    if (d->memory) dw__arena_destroy(d->memory);
    dw__free(d->stored);
    dw__free(d);
}

uint32_t dw__dataset_file_count(const dw__dataset *d) { return (uint32_t)d->files.count; }
const dw__dataset_file *dw__dataset_file_at(const dw__dataset *d, uint32_t index) {
    return &d->files.items[index];
}
int64_t dw__dataset_tokens(const dw__dataset *d) { return d->tokens; }
int64_t dw__dataset_sequences(const dw__dataset *d) { return d->sequences; }

/* ---- reading --------------------------------------------------------------------------------- */

/* `first` is the position of tokens[0] in the file. */
static dw_status check_tokens(const dw__dataset_file *f, int64_t first, const int64_t *tokens,
                              int64_t count, int64_t vocabulary) {
    int outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= (uint64_t)tokens[i] >= (uint64_t)vocabulary;
    if (!outside) return DW_OK;
    int64_t i = 0;
    while ((uint64_t)tokens[i] < (uint64_t)vocabulary) i++;
    return dw__fail(
        DW_INVALID_ARGUMENT,
        "\"%s\": token %lld (counted from 0) is %lld, but the model's vocabulary has %lld "
        "entries; tokenise with this model's tokenizer, or give the type of .bin files",
        f->path, (long long)(first + i), (long long)tokens[i], (long long)vocabulary);
}

/* Reads the file in blocks of whole tokens. The hash also covers the bytes before the tokens. */
static dw_status check_file(dw__dataset_file *f, dw__hasher *hasher, char *block, int64_t *tokens,
                            int64_t vocabulary) {
    size_t element = dw__token_store_bytes(f->layout.store);
    uint64_t at = 0, first_token = f->layout.offset;
    for (; at < first_token;) {
        size_t piece =
            first_token - at < DW_HASH_BLOCK ? (size_t)(first_token - at) : DW_HASH_BLOCK;
        DW_RETURN_IF_FAILED(dw__read_at(f->file, f->path, at, block, piece));
        dw__hasher_update(hasher, block, piece);
        at += piece;
    }
    int64_t most = (int64_t)(DW_HASH_BLOCK / element);
    for (int64_t done = 0; done < f->layout.count;) {
        int64_t count = f->layout.count - done < most ? f->layout.count - done : most;
        size_t piece = (size_t)count * element;
        DW_RETURN_IF_FAILED(dw__read_at(f->file, f->path, at, block, piece));
        dw__hasher_update(hasher, block, piece);
        dw__token_widen(f->layout.store, block, count, tokens);
        DW_RETURN_IF_FAILED(check_tokens(f, done, tokens, count, vocabulary));
        done += count;
        at += piece;
    }
    f->hash = dw__hasher_value(hasher);
    return DW_OK;
}

dw_status dw__dataset_check(dw__dataset *d, int64_t vocabulary) {
    enum { WIDE = DW_HASH_BLOCK / 2 * sizeof(int64_t) };
    dw_status status = DW_OK;
    char *block = dw__malloc(DW_HASH_BLOCK);
    int64_t *tokens = dw__malloc(WIDE);
    if (!block || !tokens) status = dw__fail_memory("reading token files", WIDE);
    for (size_t i = 0; i < d->files.count && status == DW_OK; i++) {
        dw__hasher *hasher = dw__hasher_create();
        status = hasher ? check_file(&d->files.items[i], hasher, block, tokens, vocabulary)
                        : dw__fail_memory("a hash", DW_HASH_BLOCK);
        dw__hasher_destroy(hasher);
    }
    dw__free(block);
    dw__free(tokens);
    return status;
}

/* Returns the last file that starts at or before `index` and has sequences. */
static const dw__dataset_file *file_of(const dw__dataset *d, int64_t index) {
    size_t low = 0, high = d->files.count - 1;
    while (low < high) {
        size_t middle = low + (high - low + 1) / 2;
        if (d->files.items[middle].first_sequence <= index)
            low = middle;
        else
            high = middle - 1;
    }
    return &d->files.items[low];
}

dw_status dw__dataset_read(const dw__dataset *d, int64_t index, int64_t vocabulary,
                           int64_t *tokens) {
    const dw__dataset_file *f = file_of(d, index);
    size_t element = dw__token_store_bytes(f->layout.store);
    int64_t first = (index - f->first_sequence) * d->sequence, count = d->sequence + 1;
    DW_RETURN_IF_FAILED(dw__read_at(f->file, f->path, f->layout.offset + (uint64_t)first * element,
                                    d->stored, (size_t)count * element));
    dw__token_widen(f->layout.store, d->stored, count, tokens);
    return check_tokens(f, first, tokens, count, vocabulary);
}
