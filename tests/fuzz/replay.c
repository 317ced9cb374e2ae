/* Drives a fuzz target without a fuzzer: one file, or all files of a corpus folder and then random
 * mutations of them, which also insert tokens of a dictionary (libFuzzer's format).
 *
 *     fuzz_graph_text FILE
 *     fuzz_graph_text CORPUS [MUTATIONS [SEED [DICTIONARY]]]
 *
 * The same seed gives the same inputs. If FUZZ_KEEP is set in the environment, each mutation is written to crash.bin in
 * the working folder before it is run, so that the one that crashes remains. A target fails if it does not free all
 * memory of the library.
 */
#include "base/base.h"
#include "fuzz.h"
#include <ctype.h>
#include <dirent.h>
#include <string.h>

enum {
    MAX_FILES = 256,
    MAX_BYTES = 1 << 16,
    MAX_TOKENS = 256,
    MAX_TOKEN_BYTES = 256,
    MOST_EDITS = 6
};

typedef struct sample {
    uint8_t *bytes;
    size_t count;
} sample;

static sample corpus[MAX_FILES];
static size_t corpus_count;
static sample tokens[MAX_TOKENS];
static size_t token_count;
static uint64_t random_state;

/* SplitMix64 (Steele, Lea and Flood 2014) */
static uint64_t next_random(void) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t below(size_t limit) { return limit ? (size_t)(next_random() % limit) : 0; }

/* ---- corpus -------------------------------------------------------------------------------- */

static int read_sample(const char *path, sample *out) {
    FILE *file = fopen(path, "rb");
    if (!file) return 0;
    out->bytes = malloc(MAX_BYTES);
    out->count = out->bytes ? fread(out->bytes, 1, MAX_BYTES, file) : 0;
    fclose(file);
    return out->bytes != NULL;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Lists a file, or the files of a folder in the order of their names, so that a seed means the same everywhere. */
static int read_corpus(const char *folder) {
    static char paths[MAX_FILES][1024];
    static char *sorted[MAX_FILES];
    size_t count = 0;
    DIR *opened = opendir(folder);
    if (!opened) return (int)(corpus_count = (size_t)read_sample(folder, &corpus[0]));
    for (struct dirent *entry; (entry = readdir(opened)) && count < MAX_FILES;) {
        if (entry->d_name[0] == '.') continue;
        snprintf(paths[count], sizeof paths[count], "%s/%s", folder, entry->d_name);
        sorted[count] = paths[count];
        count++;
    }
    closedir(opened);
    qsort(sorted, count, sizeof *sorted, by_name);
    for (size_t i = 0; i < count; i++)
        if (read_sample(sorted[i], &corpus[corpus_count])) corpus_count++;
    return corpus_count > 0;
}

/* ---- dictionary ---------------------------------------------------------------------------- */

/* The bytes of a line `name="..."` or `"..."`, in which \\, \" and \xAB are escapes. */
static void read_token(char *line) {
    char *open = strchr(line, '"'), *close = strrchr(line, '"');
    if (line[0] == '#' || !open || close <= open || token_count == MAX_TOKENS) return;
    sample *token = &tokens[token_count];
    token->bytes = malloc(MAX_TOKEN_BYTES);
    if (!token->bytes) return;
    for (char *at = open + 1; at < close && token->count < MAX_TOKEN_BYTES; at++) {
        char digits[3] = {0};
        if (at[0] == '\\' && at[1] == 'x' && isxdigit((unsigned char)at[2]) &&
            isxdigit((unsigned char)at[3])) {
            memcpy(digits, at + 2, 2);
            token->bytes[token->count++] = (uint8_t)strtoul(digits, NULL, 16);
            at += 3;
            continue;
        }
        if (*at == '\\') at++;
        token->bytes[token->count++] = (uint8_t)*at;
    }
    token_count++;
}

static int read_dictionary(const char *path) {
    char line[4 * MAX_TOKEN_BYTES];
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) read_token(line);
    fclose(file);
    return token_count > 0;
}

/* ---- mutation ------------------------------------------------------------------------------ */

static void erase(sample *s, size_t at, size_t count) {
    memmove(s->bytes + at, s->bytes + at + count, s->count - at - count);
    s->count -= count;
}

static void insert(sample *s, size_t at, const uint8_t *bytes, size_t count) {
    if (s->count + count > MAX_BYTES) return;
    memmove(s->bytes + at + count, s->bytes + at, s->count - at);
    memcpy(s->bytes + at, bytes, count);
    s->count += count;
}

/* Inserts a piece of some file of the corpus, which may be a unit of its grammar. */
static void splice(sample *s) {
    const sample *from = &corpus[below(corpus_count)];
    size_t start = below(from->count), most = from->count - start;
    insert(s, below(s->count + 1), from->bytes + start, below(most < 64 ? most + 1 : 64));
}

static void insert_token(sample *s) {
    if (token_count == 0) return;
    const sample *token = &tokens[below(token_count)];
    insert(s, below(s->count + 1), token->bytes, token->count);
}

/* Overwrites eight bytes with a 64-bit number near a limit, such as binary headers have for sizes and offsets. */
static void overwrite_number(sample *s) {
    static const uint64_t numbers[] = {0,          1,         8,          INT32_MAX,
                                       UINT32_MAX, INT64_MAX, UINT64_MAX, UINT64_C(1) << 40};
    uint64_t number = numbers[below(sizeof numbers / sizeof *numbers)] + below(3) - 1;
    if (s->count < sizeof number) return;
    memcpy(s->bytes + below(s->count - sizeof number + 1), &number, sizeof number);
}

static void mutate_once(sample *s) {
    uint8_t byte = (uint8_t)next_random();
    size_t at = below(s->count), piece = 1 + below(16);
    if (s->count == 0) {
        insert(s, 0, &byte, 1);
        return;
    }
    if (piece > s->count - at) piece = s->count - at;
    switch (below(7)) {
    case 0: s->bytes[at] ^= (uint8_t)(1u << below(8)); break;
    case 1: s->bytes[at] = byte; break;
    case 2: erase(s, at, piece); break;
    case 3: insert(s, below(s->count + 1), &byte, 1); break;
    case 4: insert_token(s); break;
    case 5: overwrite_number(s); break;
    default: splice(s); break;
    }
}

/* ---- running ------------------------------------------------------------------------------- */

static void run(const sample *s) {
    int64_t live = dw__memory_live();
    /* Copies the input to a block of its exact size, so that AddressSanitizer detects a read past the end. */
    uint8_t *bytes = malloc(s->count ? s->count : 1);
    if (!bytes) return;
    memcpy(bytes, s->bytes, s->count);
    LLVMFuzzerTestOneInput(bytes, s->count);
    free(bytes);
    fuzz_require(dw__memory_live() == live, "all memory given back");
}

static void run_mutation(sample *scratch) {
    const sample *from = &corpus[below(corpus_count)];
    memcpy(scratch->bytes, from->bytes, from->count);
    scratch->count = from->count;
    for (size_t edits = 1 + below(MOST_EDITS); edits > 0; edits--) mutate_once(scratch);
    if (getenv("FUZZ_KEEP")) {
        FILE *file = fopen("crash.bin", "wb");
        if (file) {
            fwrite(scratch->bytes, 1, scratch->count, file);
            fclose(file);
        }
    }
    run(scratch);
}

int main(int argc, char **argv) {
    static uint8_t room[MAX_BYTES];
    sample scratch = {room, 0};
    size_t mutations = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    random_state = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    if (argc < 2 || !read_corpus(argv[1])) {
        fprintf(stderr,
                "usage: %s FILE, or %s CORPUS [MUTATIONS [SEED [DICTIONARY]]]; CORPUS is a folder\n"
                "with files\n",
                argv[0], argv[0]);
        return 2;
    }
    if (argc > 4 && *argv[4] && !read_dictionary(argv[4])) {
        fprintf(stderr, "%s: no tokens could be read from %s\n", argv[0], argv[4]);
        return 2;
    }
    for (size_t i = 0; i < corpus_count; i++) run(&corpus[i]);
    for (size_t i = 0; i < mutations; i++) run_mutation(&scratch);
    printf("%zu files, %zu tokens, %zu mutations\n", corpus_count, token_count, mutations);
    for (size_t i = 0; i < corpus_count; i++) free(corpus[i].bytes);
    for (size_t i = 0; i < token_count; i++) free(tokens[i].bytes);
    return 0;
}
