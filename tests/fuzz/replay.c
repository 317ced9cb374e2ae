/* Drives a fuzz target without a fuzzer: all files of a corpus folder, then random mutations of them.
 *
 *     fuzz_graph_text CORPUS [MUTATIONS [SEED]]
 *
 * The same seed gives the same inputs. With FUZZ_KEEP set in the environment each mutation is written
 * to crash.bin in the working folder before it is run, so that the one that crashes remains.
 */
#include "fuzz.h"
#include <dirent.h>
#include <string.h>

enum { MAX_FILES = 256, MAX_BYTES = 1 << 16, MOST_EDITS = 6 };

typedef struct sample {
    uint8_t *bytes;
    size_t count;
} sample;

static sample corpus[MAX_FILES];
static size_t corpus_count;
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

/* In the order of names, so that a seed means the same everywhere. */
static int read_corpus(const char *folder) {
    static char paths[MAX_FILES][1024];
    static char *sorted[MAX_FILES];
    size_t count = 0;
    DIR *opened = opendir(folder);
    if (!opened) return 0;
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

/* A piece of some file of the corpus: what grammars are made of. */
static void splice(sample *s) {
    const sample *from = &corpus[below(corpus_count)];
    size_t start = below(from->count), most = from->count - start;
    insert(s, below(s->count + 1), from->bytes + start, below(most < 64 ? most + 1 : 64));
}

static void insert_token(sample *s) {
    static const char *const tokens[] = {"0",     "-1",   "1",    "2",    "9223372036854775807",
                                         "1e308", "nan",  "-inf", "%",    "\"",
                                         "[",     "]",    "{",    "}",    ",",
                                         "null",  "true", "B*S",  " + 1", "_",
                                         "\\",    "\n",   "#",    "body", "t0=exp(i0);out(t0)",
                                         "f32",   "bool", "i64",  "axis", "shape"};
    const char *token = tokens[below(sizeof tokens / sizeof *tokens)];
    insert(s, below(s->count + 1), (const uint8_t *)token, strlen(token));
}

static void mutate_once(sample *s) {
    uint8_t byte = (uint8_t)next_random();
    size_t at = below(s->count), piece = 1 + below(16);
    if (s->count == 0) {
        insert(s, 0, &byte, 1);
        return;
    }
    if (piece > s->count - at) piece = s->count - at;
    switch (below(6)) {
    case 0: s->bytes[at] ^= (uint8_t)(1u << below(8)); break;
    case 1: s->bytes[at] = byte; break;
    case 2: erase(s, at, piece); break;
    case 3: insert(s, below(s->count + 1), &byte, 1); break;
    case 4: insert_token(s); break;
    default: splice(s); break;
    }
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
    LLVMFuzzerTestOneInput(scratch->bytes, scratch->count);
}

int main(int argc, char **argv) {
    static uint8_t room[MAX_BYTES];
    sample scratch = {room, 0};
    size_t mutations = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    random_state = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    if (argc < 2 || !read_corpus(argv[1])) {
        fprintf(stderr, "usage: %s CORPUS [MUTATIONS [SEED]]; CORPUS is a folder with files\n",
                argv[0]);
        return 2;
    }
    for (size_t i = 0; i < corpus_count; i++)
        LLVMFuzzerTestOneInput(corpus[i].bytes, corpus[i].count);
    for (size_t i = 0; i < mutations; i++) run_mutation(&scratch);
    printf("%zu files, %zu mutations\n", corpus_count, mutations);
    for (size_t i = 0; i < corpus_count; i++) free(corpus[i].bytes);
    return 0;
}
