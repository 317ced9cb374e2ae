/* `deepwell run` generates text from an artifact. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include <errno.h>
#include <jansson.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct request {
    const char *model, *prompt, *tokens, *device;
    int json;
    dw_session_options session;
    dw_generate_options options;
} request;

/* A run, and the new tokens so far. */
typedef struct run {
    const request *request;
    dw_artifact *artifact;
    dw_session *session;
    const dw_tokenizer *tokenizer; /* NULL: prints ids */
    int64_t *prompt, *ids;
    size_t prompt_count, count, capacity;
    double seconds, first_seconds; /* of the whole run, and to the first token */
    double started;
} run;

static void print_help(void) {
    printf(
        "Usage: deepwell run FILE [--prompt TEXT | --tokens IDS] [OPTION...]\n"
        "\n"
        "Generates text from a file that 'deepwell export' made. The prompt is read from standard\n"
        "input if it is not given.\n"
        "\n"
        "  --prompt TEXT      text to continue\n"
        "  --tokens IDS       token ids to continue (1,2,3); new ids are then printed, not text\n"
        "  --max-tokens N     most new tokens (default 128)\n"
        "  --temperature T    0: always the most likely token (default); higher: more random\n"
        "  --top-k K          choose among the K most likely tokens (default 0: all)\n"
        "  --top-p P          choose among the fewest tokens whose probabilities reach P\n"
        "                     (default 1: all)\n"
        "  --seed N           of the random choice (default 0)\n"
        "  --ignore-end       go on behind the model's end-of-text token\n"
        "  --device NAME      cpu (default), cuda, or an emulated GPU such as emulator:sm_90a\n"
        "  --dtype TYPE       f32 or bf16 (default: bf16 on a GPU if the file has it, else f32)\n"
        "  --json             print the result as one JSON object at the end\n");
}

/* ---- arguments ----------------------------------------------------------------------------- */

static int read_count(const char *name, const char *text, int64_t *count) {
    char *end = NULL;
    errno = 0;
    *count = strtoll(text, &end, 10);
    if (end != text && *end == '\0' && !errno && *count >= 0) return CLI_DONE;
    return cli_usage_error("%s needs a whole number of 0 or more, not '%s'", name, text);
}

static int read_number(const char *name, const char *text, double low, double high, double *value) {
    char *end = NULL;
    *value = strtod(text, &end);
    if (end != text && *end == '\0' && *value >= low && *value <= high) return CLI_DONE;
    return cli_usage_error("%s needs a number from %g to %g, not '%s'", name, low, high, text);
}

static int read_value(const char *name, const char *value, request *r) {
    dw_sampling *s = &r->options.sampling;
    int64_t seed = 0;
    int result;
    if (strcmp(name, "--prompt") == 0) return r->prompt = value, CLI_DONE;
    if (strcmp(name, "--tokens") == 0) return r->tokens = value, CLI_DONE;
    if (strcmp(name, "--device") == 0) return r->device = value, CLI_DONE;
    if (strcmp(name, "--max-tokens") == 0) return read_count(name, value, &r->options.max_tokens);
    if (strcmp(name, "--top-k") == 0) return read_count(name, value, &s->top_k);
    if (strcmp(name, "--temperature") == 0)
        return read_number(name, value, 0.0, 1e6, &s->temperature);
    if (strcmp(name, "--top-p") == 0) return read_number(name, value, 1e-9, 1.0, &s->top_p);
    if (strcmp(name, "--seed") == 0) {
        result = read_count(name, value, &seed);
        s->seed = (uint64_t)seed;
        return result;
    }
    r->session.dtype = value; /* --dtype */
    if (strcmp(value, "f32") == 0 || strcmp(value, "bf16") == 0) return CLI_DONE;
    return cli_usage_error("--dtype must be f32 or bf16, not '%s'", value);
}

static int takes_value(const char *name) {
    static const char *const names[] = {"--prompt",      "--tokens", "--device",
                                        "--max-tokens",  "--top-k",  "--top-p",
                                        "--temperature", "--seed",   "--dtype"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(names[i], name) == 0) return 1;
    return 0;
}

static int read_arguments(int argc, char **argv, request *r) {
    for (int at = 1; at < argc; at++) {
        const char *argument = argv[at];
        if (takes_value(argument)) {
            if (at + 1 == argc) return cli_usage_error("%s needs a value", argument);
            int result = read_value(argument, argv[++at], r);
            if (result != CLI_DONE) return result;
        } else if (strcmp(argument, "--json") == 0) {
            r->json = 1;
        } else if (strcmp(argument, "--ignore-end") == 0) {
            r->options.ignore_end = 1;
        } else if (argument[0] == '-' || r->model) {
            return cli_usage_error("run: unknown argument '%s'", argument);
        } else {
            r->model = argument;
        }
    }
    if (!r->model) return cli_usage_error("run needs a file that 'deepwell export' made");
    if (r->prompt && r->tokens) return cli_usage_error("give --prompt or --tokens, not both");
    if (r->device && dw_device_find(r->device, &r->session.device) == DW_NOT_FOUND)
        return cli_usage_error("%s", dw_last_error());
    return CLI_DONE;
}

/* ---- prompt -------------------------------------------------------------------------------- */

static int out_of_memory(void) {
    fprintf(stderr, "deepwell: out of memory\n");
    return CLI_FAILED;
}

/* Reads standard input; a line break at its end is left out. Release *text with free. */
static int read_input(char **text, size_t *bytes) {
    enum { BLOCK = 1 << 16, MOST = 1 << 28 };
    size_t used = 0, capacity = 0;
    *text = NULL;
    for (;;) {
        if (capacity - used < BLOCK) {
            capacity = 2 * capacity + BLOCK;
            char *larger = capacity > MOST ? NULL : realloc(*text, capacity);
            if (!larger) return out_of_memory();
            *text = larger;
        }
        size_t got = fread(*text + used, 1, BLOCK, stdin);
        used += got;
        if (got > 0) continue;
        if (!ferror(stdin)) break;
        fprintf(stderr, "deepwell: cannot read standard input: %s\n", strerror(errno));
        return CLI_FAILED;
    }
    if (used && (*text)[used - 1] == '\n') used--;
    *bytes = used;
    return CLI_DONE;
}

static int read_tokens(const char *text, run *g) {
    g->prompt = calloc(strlen(text) + 1, sizeof *g->prompt);
    if (!g->prompt) return out_of_memory();
    for (const char *at = text; *at;) {
        char *end = NULL;
        errno = 0;
        g->prompt[g->prompt_count] = strtoll(at, &end, 10);
        if (end == at || errno || (*end && !strchr(", \t\n", *end)))
            return cli_usage_error("--tokens needs ids separated by commas, not '%s'", at);
        g->prompt_count++;
        at = end + strspn(end, ", \t\n");
    }
    return CLI_DONE;
}

/* Encodes the text; the ids become the caller's own memory. */
static int encode(run *g, const char *text, size_t bytes) {
    int64_t *ids = NULL;
    if (dw_tokenizer_encode(g->tokenizer, text, bytes, 1, &ids, &g->prompt_count) != DW_OK)
        return cli_fail();
    g->prompt = calloc(g->prompt_count + 1, sizeof *g->prompt);
    if (g->prompt) memcpy(g->prompt, ids, g->prompt_count * sizeof *ids);
    dw_tokens_free(ids);
    return g->prompt ? CLI_DONE : out_of_memory();
}

static int read_prompt(run *g) {
    const request *r = g->request;
    char *text = NULL;
    size_t bytes = 0;
    int result;
    if (r->tokens) {
        g->tokenizer = NULL;
        result = read_tokens(r->tokens, g);
    } else if (!g->tokenizer) {
        result = cli_usage_error("%s has no tokenizer; give --tokens", r->model);
    } else if (r->prompt) {
        result = encode(g, r->prompt, strlen(r->prompt));
    } else {
        result = read_input(&text, &bytes);
        if (result == CLI_DONE) result = encode(g, text, bytes);
        free(text);
    }
    if (result == CLI_DONE && g->prompt_count == 0)
        return cli_usage_error("the prompt is empty; expected at least one token");
    return result;
}

/* ---- output -------------------------------------------------------------------------------- */

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int print_token(const run *g, int64_t id) {
    char *text = NULL;
    size_t bytes = 0;
    if (!g->tokenizer) {
        printf(g->count > 1 ? " %lld" : "%lld", (long long)id);
    } else if (dw_tokenizer_decode(g->tokenizer, &id, 1, 1, &text, &bytes) == DW_OK) {
        fwrite(text, 1, bytes, stdout);
        dw_text_free(text);
    }
    return fflush(stdout) != 0;
}

static int on_token(void *context, int64_t id) {
    run *g = context;
    if (g->count == g->capacity) {
        size_t capacity = 2 * g->capacity + 64;
        int64_t *larger = realloc(g->ids, capacity * sizeof *larger);
        if (!larger) return 1;
        g->ids = larger;
        g->capacity = capacity;
    }
    if (g->count == 0) g->first_seconds = seconds() - g->started;
    g->ids[g->count++] = id;
    return g->request->json ? 0 : print_token(g, id);
}

static json_t *list(const int64_t *ids, size_t count) {
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++) json_array_append_new(array, json_integer(ids[i]));
    return array;
}

/* Returns the length of the character that the bytes begin with, or of the longest beginning of one if it is not `whole`:
 * 1 for a byte that begins none (Unicode 15.0, tables 3-7 and 3-8). */
static size_t character_at(const unsigned char *text, size_t left, bool *whole) {
    const unsigned char lead = text[0];
    const size_t length = lead < 0x80                    ? 1
                          : lead >= 0xC2 && lead <= 0xDF ? 2
                          : lead >= 0xE0 && lead <= 0xEF ? 3
                          : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                         : 0;
    /* The second byte has a narrower range behind some leads: no overlong forms, no surrogates, nothing above U+10FFFF. */
    const unsigned char least = lead == 0xE0   ? 0xA0
                                : lead == 0xF0 ? 0x90
                                               : 0x80,
                        most = lead == 0xED   ? 0x9F
                               : lead == 0xF4 ? 0x8F
                                              : 0xBF;
    size_t known = 1;
    if (length > 1 && left > 1 && text[1] >= least && text[1] <= most) known = 2;
    while (known > 1 && known < length && known < left && (text[known] & 0xC0) == 0x80) known++;
    *whole = known == length;
    return known;
}

/* The text as a JSON string, in which U+FFFD stands for each beginning of a character that is not whole, as in Python's
 * bytes.decode(errors="replace"). */
static json_t *text_of(const run *g) {
    char *text = NULL, *clean = NULL;
    size_t bytes = 0, used = 0;
    if (!g->tokenizer ||
        dw_tokenizer_decode(g->tokenizer, g->ids, g->count, 1, &text, &bytes) != DW_OK)
        return json_null();
    clean = malloc(3 * bytes + 1);
    for (size_t at = 0; clean && at < bytes;) {
        bool whole;
        const size_t length = character_at((const unsigned char *)text + at, bytes - at, &whole);
        memcpy(clean + used, whole ? text + at : "\xEF\xBF\xBD", whole ? length : 3);
        used += whole ? length : 3;
        at += length;
    }
    json_t *result = clean ? json_stringn(clean, used) : NULL;
    free(clean);
    dw_text_free(text);
    return result;
}

static int print_json(const run *g) {
    double rest = g->seconds - g->first_seconds;
    double rate = g->count > 1 && rest > 0.0 ? (double)(g->count - 1) / rest : 0.0;
    json_t *json = json_pack("{s:o, s:o, s:o, s:f, s:f, s:f}", "prompt_tokens",
                             list(g->prompt, g->prompt_count), "tokens", list(g->ids, g->count),
                             "text", text_of(g), "seconds", g->seconds, "first_token_seconds",
                             g->first_seconds, "tokens_per_second", rate);
    char *text = json ? json_dumps(json, 0) : NULL;
    json_decref(json);
    if (!text) return out_of_memory();
    puts(text);
    free(text);
    return CLI_DONE;
}

/* ---- run ----------------------------------------------------------------------------------- */

static int generate(run *g) {
    const request *r = g->request;
    dw_generate_options options = r->options;
    options.on_token = on_token;
    options.context = g;
    g->started = seconds();
    dw_status status = dw_session_generate(g->session, g->prompt, g->prompt_count, &options, NULL);
    g->seconds = seconds() - g->started;
    if (!r->json && g->count) putchar('\n');
    if (status != DW_OK) return cli_fail();
    return r->json ? print_json(g) : CLI_DONE;
}

int cli_run(int argc, char **argv) {
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        print_help();
        return CLI_DONE;
    }
    request r = {.session = DW_SESSION_OPTIONS_DEFAULT, .options = DW_GENERATE_OPTIONS_DEFAULT};
    run g = {.request = &r};
    int result = read_arguments(argc, argv, &r);
    if (result != CLI_DONE) return result;
    if (r.device && !r.session.device) return cli_fail(), CLI_UNSUPPORTED;
    dw_status status = dw_artifact_open(r.model, &g.artifact);
    if (status == DW_OK) {
        g.tokenizer = dw_artifact_tokenizer(g.artifact);
        result = read_prompt(&g);
    }
    if (status == DW_OK && result == CLI_DONE) {
        status = dw_session_create(g.artifact, &r.session, &g.session);
        if (status == DW_OK) result = generate(&g);
    }
    if (status != DW_OK)
        result = (cli_fail(), status == DW_UNSUPPORTED ? CLI_UNSUPPORTED : CLI_FAILED);
    dw_session_destroy(g.session);
    dw_artifact_close(g.artifact);
    free(g.prompt);
    free(g.ids);
    return result;
}
