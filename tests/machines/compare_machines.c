/* `compare_machines` compares the results of the project's GPU kernels on this machine with those of another machine.
 *
 *     compare_machines list
 *     compare_machines ptx DIR [--quick] [-k TEXT]
 *     compare_machines record FILE [--raw FILE] [--kernels DIR] [--quick] [-k TEXT]
 *     compare_machines check FILE [--raw FILE] [--kernels DIR] [--quick] [-k TEXT]
 *
 * The machine is the first GPU of the driver that the loader finds. To run on the emulator, set
 * DEEPWELL_EMULATE_ARCH=sm_90a LD_LIBRARY_PATH=lib/emulate. FILE is text: a hash and some of the words of each output.
 * The raw file has all words. `ptx` compiles the kernels of the cases. --kernels: a folder with these, and with machine
 * code made from them, so that no compiler is needed (ptxas -arch=sm_90a NAME.ptx -o NAME.cubin). --quick: only cases
 * whose kernels the library carries. -k: only cases whose name contains this text.
 *
 * Exit status: 0 if all differences are within their bounds, 1 if not, 2 if the comparison failed.
 */
#include "base/base.h"
#include "compare.h"
#include "jit/jit_internal.h"
#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const compare_family *const families[] = {&compare_attention, &compare_quantize};

/* ---- results of another machine -------------------------------------------------------------- */

enum { SAMPLES = 64, MOST_ANSWERS = 2048 };
static const char *const type_names[] = {"bf16", "f16", "f32", "bits", "bytes"};

typedef struct answer {
    char name[192]; /* case and output */
    size_t count, offset;
    uint64_t hash;
    uint32_t samples[SAMPLES];
    uint32_t sample_count;
} answer;

struct compare_sink {
    const char *case_name;
    FILE *text, *raw;
    bool recording;
    answer *answers; /* words of the other machine */
    size_t answer_count;
    int outputs, equal, apart, wrong;
};

static uint64_t hash_of(const void *words, size_t bytes) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)words)[i]) * 0x100000001B3u;
    return hash;
}

static uint32_t word_of(const compare_output *o, const void *words, size_t index) {
    switch (compare_width(o->type)) {
    case 1: return ((const uint8_t *)words)[index];
    case 2: return ((const uint16_t *)words)[index];
    default: return ((const uint32_t *)words)[index];
    }
}

/* Chooses the words that are recorded: they are spread over the output, at irregular places. */
static uint32_t samples_of(const compare_output *o) {
    return o->count < SAMPLES ? (uint32_t)o->count : SAMPLES;
}
static size_t sample_place(const compare_output *o, uint32_t sample) {
    const size_t from = o->count * sample / samples_of(o),
                 to = o->count * (sample + 1) / samples_of(o);
    return from + (size_t)(sample * 2654435761u) % (to - from);
}

static void record(compare_sink *s, const compare_output *o) {
    const size_t width = compare_width(o->type), samples = samples_of(o);
    fprintf(s->text, "%s %s %s %zu %016" PRIx64 "\n", s->case_name, o->name, type_names[o->type],
            o->count, hash_of(o->words, o->count * width));
    for (uint32_t i = 0; i < samples; i++)
        fprintf(s->text, "%0*x%s", (int)(2 * width),
                (unsigned)word_of(o, o->words, sample_place(o, i)),
                i % 32 == 31 || i + 1 == samples ? "\n" : " ");
    if (s->raw) fwrite(o->words, width, o->count, s->raw);
}

static dw_status read_answers(compare_sink *s, const char *path) {
    FILE *file = fopen(path, "r");
    char line[512], name[128], output[32], type[16];
    size_t offset = 0;
    answer *a = NULL;
    s->answers = dw__calloc(MOST_ANSWERS, sizeof *s->answers);
    if (!file || !s->answers) {
        if (file) fclose(file);
        return dw__fail(DW_IO, "\"%s\" cannot be read", path);
    }
    while (fgets(line, sizeof line, file)) {
        size_t count;
        uint64_t hash;
        if (line[0] == '#') continue;
        if (sscanf(line, "%127s %31s %15s %zu %16" SCNx64, name, output, type, &count, &hash) ==
                5 &&
            strchr(name, '-') && s->answer_count < MOST_ANSWERS) {
            a = &s->answers[s->answer_count++];
            snprintf(a->name, sizeof a->name, "%s %s", name, output);
            a->count = count, a->hash = hash, a->offset = offset;
            offset += count * (strcmp(type, "bytes") == 0 ? 1 : strchr(type, '1') ? 2 : 4);
            continue;
        }
        for (char *at = strtok(line, " \n"); a && at && a->sample_count < SAMPLES;
             at = strtok(NULL, " \n"))
            a->samples[a->sample_count++] = (uint32_t)strtoul(at, NULL, 16);
    }
    fclose(file);
    return DW_OK;
}

/* ---- comparing ------------------------------------------------------------------------------- */

typedef struct difference {
    size_t seen, words; /* number of words compared, and of words that differ */
    /* Largest difference, as a share of the bound and in steps of the type. */
    double most, most_ulps;
    size_t where;
} difference;

static void add_word(const compare_output *o, size_t index, uint32_t other, difference *d) {
    unsigned char bytes[4];
    const uint32_t ours = word_of(o, o->words, index);
    d->seen++;
    if (ours == other) return;
    memcpy(bytes, &other, sizeof bytes);
    const double x = compare_value(o->type, o->words, index), y = compare_value(o->type, bytes, 0);
    const double off = x == y ? 0 : fabs(x - y), bound = o->bound ? o->bound[index] : 0;
    double share = off == 0 && o->bound ? 0 : off / bound;
    if (isnan(share)) share = INFINITY; /* the bound may be 0 */
    d->words++;
    d->most_ulps = fmax(d->most_ulps, off / compare_ulp(o->type, fmax(fabs(x), fabs(y))));
    if (share > d->most || d->words == 1) d->most = fmax(share, d->most), d->where = index;
}

static dw_status add_raw(compare_sink *s, const compare_output *o, const answer *a, difference *d) {
    dw_status status = DW_OK;
    const size_t width = compare_width(o->type);
    char *words = dw__malloc(o->count * width + 1);
    if (!words) return dw__fail_memory("an output", o->count * width);
    if (fseek(s->raw, (long)a->offset, SEEK_SET) != 0 ||
        fread(words, width, o->count, s->raw) != o->count)
        DW_TRY(dw__fail(DW_IO, "%s: the raw file ends before its words", a->name));
    for (size_t i = 0; i < o->count; i++) add_word(o, i, word_of(o, words, i), d);

cleanup:
    dw__free(words);
    return status;
}

static dw_status compare(compare_sink *s, const compare_output *o) {
    difference d = {0};
    char name[192];
    const answer *a = NULL;
    snprintf(name, sizeof name, "%s %s", s->case_name, o->name);
    for (size_t i = 0; i < s->answer_count; i++)
        if (strcmp(s->answers[i].name, name) == 0) a = &s->answers[i];
    if (!a) return dw__fail(DW_NOT_FOUND, "the file has no answer of %s: record it anew", name);
    if (a->count != o->count || a->sample_count != samples_of(o))
        return dw__fail(DW_SHAPE, "%s has %zu words, in the file %zu: record it anew", name,
                        o->count, a->count);
    s->outputs++;
    if (hash_of(o->words, o->count * compare_width(o->type)) == a->hash) {
        s->equal++;
        printf("equal  %s: %zu words\n", name, o->count);
        return DW_OK;
    }
    if (s->raw)
        DW_RETURN_IF_FAILED(add_raw(s, o, a, &d));
    else
        for (uint32_t i = 0; i < a->sample_count; i++)
            add_word(o, sample_place(o, i), a->samples[i], &d);
    const bool wrong = d.most > 1 || !o->bound;
    s->apart++, s->wrong += wrong;
    printf("%s %s: %zu of %zu words%s differ, at most by %.3g of the bound, %.3g steps of the "
           "type; word %zu\n",
           wrong ? "WRONG " : "within", name, d.words, d.seen, s->raw ? "" : " seen", d.most,
           d.most_ulps, d.where);
    return DW_OK;
}

/* Returns whether the word is the definition's number, rounded, or is within the bound of it. */
static bool is_right(const compare_output *o, size_t index) {
    const double x = compare_value(o->type, o->words, index), exact = o->exact[index];
    if (o->bound) return x == exact || fabs(x - exact) <= 2 * o->bound[index];
    const double step = compare_ulp(o->type, exact);
    return x == nearbyint(exact / step) * step;
}

/* Compares this machine with the definition, because two machines with the same mistake would agree. */
static void check_right(compare_sink *s, const compare_output *o) {
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < o->count; i++)
        if (!is_right(o, i) && wrong++ == 0) first = i;
    if (wrong == 0) return;
    s->wrong++;
    printf("WRONG  %s %s: %zu of %zu words, first %zu: %.9g for %.9g\n", s->case_name, o->name,
           wrong, o->count, first, compare_value(o->type, o->words, first), o->exact[first]);
}

dw_status compare_emit(compare_sink *s, const compare_output *o) {
    check_right(s, o);
    if (!s->recording) return compare(s, o);
    record(s, o);
    return DW_OK;
}

/* ---- kernels from a folder ------------------------------------------------------------------- */

enum { MOST_FILES = 1024 };
static dw__jit_file carried[2][MOST_FILES + 1]; /* machine code; PTX */

static dw_status carry(const char *folder) {
    DIR *list = opendir(folder);
    if (!list) return dw__fail(DW_IO, "\"%s\" is no folder that can be read", folder);
    dw_status status = DW_OK;
    size_t counts[2] = {0};
    for (struct dirent *entry; (entry = readdir(list));) {
        char path[1024], *bytes = NULL;
        size_t length = strlen(entry->d_name), count = 0;
        const bool ptx = length > 4 && strcmp(entry->d_name + length - 4, ".ptx") == 0;
        const bool code = length > 6 && strcmp(entry->d_name + length - 6, ".cubin") == 0;
        if ((!ptx && !code) || counts[ptx] == MOST_FILES) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        DW_TRY(dw__file_read_at_most(path, 1 << 26, &bytes, &count));
        char *name = strndup(entry->d_name, length - (ptx ? 4 : 6));
        if (!name) DW_TRY(dw__fail_memory("a name", length));
        /* Kept for the life of the process; the bytes are followed by a NUL. */
        carried[ptx][counts[ptx]++] =
            (dw__jit_file){name, (unsigned char *)bytes, (unsigned char *)bytes + count};
    }
    dw__jit_carried_now = (dw__jit_carried){carried[0], carried[1]};

cleanup:
    closedir(list);
    return status;
}

static dw_status write_ptx(const compare_family *family, size_t index, const char *folder) {
    dw_status status = DW_OK;
    const dw__jit_variant variant = family->variant(index);
    dw__text path = {0}, source = {0};
    void *image = NULL;
    size_t bytes = 0;
    DW_TRY(dw__text_printf(&path, "%s/", folder));
    DW_TRY(dw__jit_variant_name(&variant, &path));
    DW_TRY(dw__text_printf(&path, ".ptx"));
    if (access(path.text, F_OK) == 0) goto cleanup; /* the word belongs to another case */
    DW_TRY(dw__folder_make_above(path.text));
    DW_TRY(dw__jit_expand(variant.source, &source));
    DW_TRY(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL));
    DW_TRY(dw__file_write(path.text, image, strlen(image)));

cleanup:
    dw__free(image);
    dw__text_free(&source);
    dw__text_free(&path);
    return status;
}

/* ---- the program ----------------------------------------------------------------------------- */

typedef struct options {
    const char *command, *file, *raw, *kernels, *text;
    bool quick;
} options;

static int usage(void) {
    fprintf(stderr,
            "usage: compare_machines list | ptx DIR | record FILE | check FILE  [--raw FILE] "
            "[--kernels DIR] [--quick] "
            "[-k TEXT]\n");
    return 2;
}

static bool parse(int count, char **arguments, options *o) {
    if (count < 2) return false;
    o->command = arguments[1];
    for (int i = 2; i < count; i++) {
        const char **value = strcmp(arguments[i], "--raw") == 0       ? &o->raw
                             : strcmp(arguments[i], "--kernels") == 0 ? &o->kernels
                             : strcmp(arguments[i], "-k") == 0        ? &o->text
                                                                      : NULL;
        if (strcmp(arguments[i], "--quick") == 0)
            o->quick = true;
        else if (value && i + 1 < count)
            *value = arguments[++i];
        else if (!value && arguments[i][0] != '-' && !o->file)
            o->file = arguments[i];
        else
            return false;
    }
    return strcmp(o->command, "list") == 0 ||
           (o->file && (strcmp(o->command, "ptx") == 0 || strcmp(o->command, "record") == 0 ||
                        strcmp(o->command, "check") == 0));
}

static dw_status open_files(const options *o, compare_sink *sink) {
    sink->recording = strcmp(o->command, "record") == 0;
    if (o->raw && !(sink->raw = fopen(o->raw, sink->recording ? "wb" : "rb")))
        return dw__fail(DW_IO, "\"%s\" cannot be opened", o->raw);
    if (!sink->recording) return read_answers(sink, o->file);
    if (!(sink->text = fopen(o->file, "w")))
        return dw__fail(DW_IO, "\"%s\" cannot be written", o->file);
    return DW_OK;
}

static dw_status run_cases(const options *o, compare_sink *sink, int *ran) {
    const bool listing = strcmp(o->command, "list") == 0, writing = strcmp(o->command, "ptx") == 0;
    const dw__context *context = NULL;
    if (!listing && !writing) {
        DW_RETURN_IF_FAILED(dw__device_cuda.open());
        DW_RETURN_IF_FAILED(dw__device_cuda.context(&context));
        printf("%s, driver %d\n", context->name, context->driver_version);
        if (sink->text)
            fprintf(sink->text, "# %s, driver %d\n", context->name, context->driver_version);
    }
    for (size_t f = 0; f < DW_COUNT(families); f++)
        for (size_t i = 0, count = families[f]->count(); i < count; i++) {
            char name[128];
            bool quick;
            families[f]->describe(i, name, sizeof name, &quick);
            if ((o->quick && !quick) || (o->text && !strstr(name, o->text))) continue;
            ++*ran;
            if (writing) {
                DW_RETURN_IF_FAILED(write_ptx(families[f], i, o->file));
                continue;
            }
            if (listing) {
                printf("%s%s\n", name, quick ? " (quick)" : "");
                continue;
            }
            sink->case_name = name;
            dw_status status = families[f]->run(i, context, sink);
            if (status != DW_OK) return dw__fail_prefix(status, "%s", name);
            fflush(stdout);
        }
    return DW_OK;
}

int main(int count, char **arguments) {
    options o = {0};
    compare_sink sink = {0};
    int ran = 0;
    if (!parse(count, arguments, &o)) return usage();
    setenv("DEEPWELL_FIRST_USE_CHECK", "off",
           1); /* the first-use check would compare each kernel with its reference first */
    dw_status status = o.kernels ? carry(o.kernels) : DW_OK;
    const bool comparing = strcmp(o.command, "list") != 0 && strcmp(o.command, "ptx") != 0;
    if (status == DW_OK && comparing) status = open_files(&o, &sink);
    if (status == DW_OK) status = run_cases(&o, &sink, &ran);
    if (status == DW_OK && ran == 0) status = dw__fail(DW_NOT_FOUND, "no case is chosen");
    if (sink.text && fclose(sink.text) != 0)
        status = dw__fail(DW_IO, "\"%s\" could not be written", o.file);
    if (sink.raw) fclose(sink.raw);
    dw__free(sink.answers);
    if (status != DW_OK) return fprintf(stderr, "compare_machines: %s\n", dw_last_error()), 2;
    if (comparing)
        printf("compare_machines: %d cases; %d outputs compared, %d equal to the bit, %d apart, %d "
               "wrong\n",
               ran, sink.outputs, sink.equal, sink.apart, sink.wrong);
    return sink.wrong ? 1 : 0;
}
