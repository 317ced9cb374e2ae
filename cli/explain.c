/* `deepwell explain` shows which backend computes an operation on a GPU, why others do not, and how long each takes. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include "explain_command.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct request {
    dw_attention call;
    const char *target;
    int backward, measure, json, has_shape;
} request;

static void print_help(void) {
    printf("Usage: deepwell explain attention B,H,S,D[,WORD...] [OPTION...]\n"
           "       deepwell explain gemm M,N,K[,WORD...] [OPTION...]    (has its own --help)\n"
           "       deepwell explain kernels [--json]    list Deepwell's kernels\n"
           "\n"
           "Shows which backend computes attention of batch B, H heads, seq_len S and head\n"
           "dimension D, why others do not, and how long each should take.\n"
           "\n"
           "Words:\n"
           "  causal            causal mask; the last query sees the last key\n"
           "  top-left          aligns masks with the first query and the first key instead\n"
           "  f16               FP16 instead of BF16\n"
           "  kv=HEADS          heads of keys and values, if fewer than H\n"
           "  k=ROWS            seq_len of keys and values, if not S\n"
           "  window=LEFT:RIGHT keys that a query sees on either side; -1: no limit\n"
           "  softcap=X  dropout=P  deterministic\n"
           "\n"
           "Options:\n"
           "  --backward        explain the gradients\n"
           "  --target ARCH     use this architecture (sm_90a, sm_100a, sm_120a), not this "
           "machine's GPU\n"
           "  --measure         time Deepwell's kernels on this GPU first and store the times\n"
           "                    (PyTorch's too: python -m deepwell.attention SHAPE)\n"
           "  --json            print one JSON object\n");
}

/* ---- arguments ----------------------------------------------------------------------------------- */

int explain_read_integer(const char *text, int32_t *value) {
    char *end = NULL;
    long number = strtol(text, &end, 10);
    if (end == text || *end || number < INT32_MIN || number > INT32_MAX) return 0;
    *value = (int32_t)number;
    return 1;
}

static int read_number(const char *text, float *value) {
    char *end = NULL;
    *value = strtof(text, &end);
    return end != text && !*end;
}

static int read_window(const char *text, dw_attention *call) {
    char left[16];
    size_t length = strcspn(text, ":");
    if (length == 0 || length >= sizeof left || text[length] != ':') return 0;
    memcpy(left, text, length);
    left[length] = '\0';
    return explain_read_integer(left, &call->window_left) &&
           explain_read_integer(text + length + 1, &call->window_right);
}

/* Reads one word after the four numbers. Returns 0 if it is unknown. */
static int read_word(const char *word, dw_attention *call) {
    if (strcmp(word, "causal") == 0) return call->window_right = 0, 1;
    if (strcmp(word, "top-left") == 0) return call->bottom_right = false, 1;
    if (strcmp(word, "bf16") == 0) return call->dtype = DW_BF16, 1;
    if (strcmp(word, "f16") == 0) return call->dtype = DW_F16, 1;
    if (strcmp(word, "deterministic") == 0) return call->deterministic = true, 1;
    if (strncmp(word, "kv=", 3) == 0) return explain_read_integer(word + 3, &call->heads_kv);
    if (strncmp(word, "k=", 2) == 0) return explain_read_integer(word + 2, &call->seq_len_kv);
    if (strncmp(word, "window=", 7) == 0) return read_window(word + 7, call);
    if (strncmp(word, "softcap=", 8) == 0) return read_number(word + 8, &call->softcap);
    if (strncmp(word, "dropout=", 8) == 0) return read_number(word + 8, &call->dropout);
    return 0;
}

/* Strides of a contiguous [batch, rows, heads, head_dim], the output of a projection. */
static dw_attention_tensor contiguous(int64_t heads, int64_t rows, int64_t head_dim) {
    return (dw_attention_tensor){
        .batch = heads * rows * head_dim, .head = head_dim, .row = heads * head_dim};
}

static int read_shape(char *text, dw_attention *call) {
    int32_t *const numbers[] = {&call->batch, &call->heads_q, &call->seq_len_q, &call->head_dim};
    int count = 0;
    *call = (dw_attention){.struct_size = sizeof *call,
                           .dtype = DW_BF16,
                           .heads_kv = -1,
                           .seq_len_kv = -1,
                           .window_left = -1,
                           .window_right = -1,
                           .bottom_right = true};
    for (char *word = text, *next; word; word = next, count++) {
        next = strchr(word, ',');
        if (next) *next++ = '\0';
        if (count < 4 ? !explain_read_integer(word, numbers[count]) : !read_word(word, call))
            return cli_usage_error(
                "'%s' is not what explain expects as word %d of a shape B,H,S,D[,WORD...]", word,
                count + 1);
    }
    if (count < 4) return cli_usage_error("a shape needs at least B,H,S,D");
    if (call->heads_kv < 0) call->heads_kv = call->heads_q;
    if (call->seq_len_kv < 0) call->seq_len_kv = call->seq_len_q;
    call->scale = call->head_dim > 0 ? (float)(1.0 / sqrt((double)call->head_dim)) : 0.0f;
    call->q = call->o = call->d_o = call->dq =
        contiguous(call->heads_q, call->seq_len_q, call->head_dim);
    call->k = call->v = call->dk = call->dv =
        contiguous(call->heads_kv, call->seq_len_kv, call->head_dim);
    return CLI_DONE;
}

static int read_arguments(int argc, char **argv, request *r) {
    if (argc < 2 || strcmp(argv[1], "attention") != 0)
        return cli_usage_error("explain supports attention, gemm and kernels%s%s",
                               argc > 1 ? ", not " : "", argc > 1 ? argv[1] : "");
    for (int at = 2; at < argc; at++) {
        if (strcmp(argv[at], "--backward") == 0) {
            r->backward = 1;
        } else if (strcmp(argv[at], "--measure") == 0) {
            r->measure = 1;
        } else if (strcmp(argv[at], "--json") == 0) {
            r->json = 1;
        } else if (strcmp(argv[at], "--target") == 0) {
            if (++at == argc) return cli_usage_error("--target needs a value");
            r->target = argv[at];
        } else if (argv[at][0] == '-' || r->has_shape) {
            return cli_usage_error("explain: unknown argument '%s'", argv[at]);
        } else {
            int result = read_shape(argv[at], &r->call);
            if (result != CLI_DONE) return result;
            r->has_shape = 1;
        }
    }
    return r->has_shape ? CLI_DONE : cli_usage_error("explain attention needs a shape, B,H,S,D");
}

/* 1.2e10: "12.0 G". */
static const char *scaled_text(double value, char text[32]) {
    static const char *const units[] = {"", "k", "M", "G", "T", "P", "E"};
    size_t unit = 0;
    while (value >= 1000 && unit + 1 < sizeof units / sizeof units[0]) value /= 1000, unit++;
    snprintf(text, 32, "%.*f %s", value < 100 && unit > 0 ? 1 : 0, value, units[unit]);
    return text;
}

/* ---- output --------------------------------------------------------------------------------------- */

static const char *text_of(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

/* `mark`: "~" before an estimate. */
static void print_time(const json_t *seconds, const char *mark) {
    char text[40] = "-";
    if (json_is_number(seconds))
        snprintf(text, sizeof text, "%s%.1f us", mark, 1e6 * json_number_value(seconds));
    printf("  %10s", text);
}

static void print_tile(const json_t *tile) {
    if (!json_is_object(tile)) return;
    const json_int_t ctas = json_integer_value(json_object_get(tile, "ctas"));
    printf("; tiles of %lld x %lld (%s), %lld of them in %lld rounds of %lld steps",
           (long long)json_integer_value(json_object_get(tile, "tile_m")),
           (long long)json_integer_value(json_object_get(tile, "tile_n")),
           ctas == 2 ? "a pair of blocks each" : "a block each",
           (long long)json_integer_value(json_object_get(tile, "tiles")),
           (long long)json_integer_value(json_object_get(tile, "rounds")),
           (long long)json_integer_value(json_object_get(tile, "steps")));
}

static void print_report(const json_t *report) {
    size_t index;
    const json_t *candidate;
    const char *gpu = text_of(report, "gpu"), *error = text_of(report, "gpu_error");
    char work[2][32];
    cli_print_bold(text_of(report, "operation"));
    printf(": %s\n", text_of(report, "shape"));
    if (*error) printf("No GPU here: %s\n", error);
    printf("Target: %s%s%s (%s)\n", text_of(report, "target"), *gpu ? ", " : "", gpu,
           text_of(report, "target_source"));
    printf("Work: %sFLOP, %sB\n\n",
           scaled_text(json_number_value(json_object_get(report, "flops")), work[0]),
           scaled_text(json_number_value(json_object_get(report, "bytes")), work[1]));
    printf("%-10s  %10s  %10s\n", "", "expected", "measured");
    json_array_foreach(json_object_get(report, "candidates"), index, candidate) {
        printf("%-10s", text_of(candidate, "name"));
        int measured = strcmp(text_of(candidate, "expected_kind"), "measured") == 0;
        print_time(json_object_get(candidate, "expected_seconds"), measured ? "" : "~");
        print_time(json_object_get(candidate, "measured_seconds"), "");
        printf("  %s\n", json_is_true(json_object_get(candidate, "runs"))
                             ? text_of(candidate, "expected_from")
                             : text_of(candidate, "reason"));
    }
    json_array_foreach(json_object_get(report, "candidates"), index, candidate) {
        if (*text_of(candidate, "proof"))
            printf("\n%s: %s", text_of(candidate, "name"), text_of(candidate, "proof"));
        print_tile(json_object_get(candidate, "tile"));
    }
    const char *chosen = text_of(report, "chosen");
    printf("\n%s%s: %s\n", *chosen ? "Chosen: " : "No backend", chosen, text_of(report, "because"));
}

void explain_show(char *json, int as_json) {
    if (as_json) {
        printf("%s\n", json);
    } else {
        json_t *report = json_loads(json, 0, NULL);
        if (report) print_report(report);
        json_decref(report);
    }
    dw_text_free(json);
}

static int show(const request *r, const char *target) {
    char *json = NULL;
    if (dw_attention_explain(&r->call, r->backward, target, &json) != DW_OK) return cli_fail();
    explain_show(json, r->json);
    return CLI_DONE;
}

int cli_explain(int argc, char **argv) {
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        print_help();
        return CLI_DONE;
    }
    if (argc > 1 && strcmp(argv[1], "gemm") == 0) return explain_gemm(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "kernels") == 0) return explain_kernels(argc - 1, argv + 1);
    request r = {0};
    int result = read_arguments(argc, argv, &r);
    if (result != CLI_DONE) return result;
    const dw_device *gpu;
    dw_status found = dw_device_find("cuda", &gpu);
    if (r.measure) {
        double seconds;
        if (found != DW_OK) return cli_fail(), CLI_UNSUPPORTED;
        if (dw_attention_measure(&r.call, r.backward, &seconds) != DW_OK) return cli_fail();
    }
    /* Without a GPU, explain the architecture that Deepwell has kernels for. */
    return show(&r, r.target ? r.target : found == DW_OK ? NULL : "sm_90a");
}
