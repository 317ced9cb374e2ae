/* `deepwell explain gemm` and `deepwell explain kernels`. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include "explain_command.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int is_help(const char *word) {
    return strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

static const char *text_of(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static double number_of(const json_t *object, const char *key) {
    return json_number_value(json_object_get(object, key));
}

/* ---- GEMM ------------------------------------------------------------------------------------------ */

static void print_help(void) {
    printf(
        "Usage: deepwell explain gemm M,N,K[,WORD...] [OPTION...]\n"
        "\n"
        "Shows which backend computes the GEMM D (M x N) = f(A (M x K) B^T), with B N x K, on a\n"
        "Blackwell GPU, and with which tiles. Deepwell's kernel has been tested on the emulator,\n"
        "but not on hardware.\n"
        "\n"
        "Words:\n"
        "  f16               FP16 instead of BF16\n"
        "  mxfp8 nvfp4 mxfp4 A and B are codes with block scales\n"
        "  f32               D is FP32\n"
        "  to-mxfp8          D is codes with block scales\n"
        "  bias  residual    added before and after f\n"
        "  gelu  gelu-tanh  swiglu\n"
        "                    the function f\n"
        "\n"
        "Options:\n"
        "  --target ARCH     use this architecture (sm_100a, sm_120a), not this machine's GPU\n"
        "  --json            print one JSON object\n");
}

/* Reads one word after the three numbers. Returns 0 if it is unknown. */
static int read_word(const char *word, dw_gemm *call, int *f32) {
    static const char *const activations[] = {"", "gelu", "gelu-tanh", "swiglu"};
    static const struct {
        const char *word;
        dw_scheme scheme;
    } schemes[] = {
        {"mxfp8", DW_SCHEME_MXFP8}, {"nvfp4", DW_SCHEME_NVFP4}, {"mxfp4", DW_SCHEME_MXFP4}};
    static char place[16] __attribute__((aligned(16))); /* a non-NULL address; never read */
    for (int i = 1; i < DW_ACTIVATION_COUNT; i++)
        if (strcmp(word, activations[i]) == 0) return call->activation = (dw_activation)i, 1;
    if (strcmp(word, "bf16") == 0) return call->dtype = DW_BF16, 1;
    if (strcmp(word, "f16") == 0) return call->dtype = DW_F16, 1;
    if (strcmp(word, "f32") == 0) return *f32 = 1;
    if (strcmp(word, "to-mxfp8") == 0) return call->quantized_d = 1;
    for (size_t i = 0; i < sizeof schemes / sizeof schemes[0]; i++)
        if (strcmp(word, schemes[i].word) == 0) {
            call->scheme_a = call->scheme_b = schemes[i].scheme;
            return call->quantized = 1;
        }
    if (strcmp(word, "bias") == 0) return call->bias = place, 1;
    if (strcmp(word, "residual") == 0) return call->residual.data = place, 1;
    return 0;
}

static int64_t padded(int64_t columns, int64_t chunk) {
    return (columns + chunk - 1) / chunk * chunk;
}

static int read_shape(char *text, dw_gemm *call) {
    int32_t numbers[3];
    int count = 0, f32 = 0;
    *call = (dw_gemm){.struct_size = sizeof *call, .dtype = DW_BF16, .alpha = 1.0f};
    for (char *word = text, *next; word; word = next, count++) {
        next = strchr(word, ',');
        if (next) *next++ = '\0';
        if (count < 3 ? !explain_read_integer(word, &numbers[count]) : !read_word(word, call, &f32))
            return cli_usage_error(
                "'%s' is not what explain expects as word %d of a shape M,N,K[,WORD...]", word,
                count + 1);
    }
    if (count < 3) return cli_usage_error("the shape of a GEMM needs at least M,N,K");
    call->m = numbers[0], call->n = numbers[1], call->k = numbers[2];
    call->output = f32 ? DW_F32 : call->dtype;
    call->a.stride = call->b.stride = padded(call->k, 16); /* elements, or bytes of codes */
    call->d.stride = call->residual.stride = padded(call->n, 16);
    return CLI_DONE;
}

int explain_gemm(int argc, char **argv) {
    dw_gemm call;
    const char *target = NULL;
    int as_json = 0, has_shape = 0;
    for (int at = 1; at < argc; at++) {
        if (is_help(argv[at])) {
            print_help();
            return CLI_DONE;
        } else if (strcmp(argv[at], "--json") == 0) {
            as_json = 1;
        } else if (strcmp(argv[at], "--target") == 0) {
            if (++at == argc) return cli_usage_error("--target needs a value");
            target = argv[at];
        } else if (argv[at][0] == '-' || has_shape) {
            return cli_usage_error("explain gemm: unknown argument '%s'", argv[at]);
        } else {
            int result = read_shape(argv[at], &call);
            if (result != CLI_DONE) return result;
            has_shape = 1;
        }
    }
    if (!has_shape) return cli_usage_error("explain gemm needs a shape, M,N,K");
    const dw_device *gpu;
    if (!target && dw_device_find("cuda", &gpu) != DW_OK) target = "sm_100a";
    char *json = NULL;
    if (dw_gemm_explain(&call, target, &json) != DW_OK) return cli_fail();
    explain_show(json, as_json);
    return CLI_DONE;
}

/* ---- kernels ----------------------------------------------------------------------------------------- */

static int by_gain(const void *one, const void *other) {
    double gain[2];
    for (int i = 0; i < 2; i++) {
        const json_t *row = *(json_t *const *)(i == 0 ? one : other);
        gain[i] = number_of(row, "cublaslt_seconds") / number_of(row, "deepwell_seconds");
    }
    return (gain[0] < gain[1]) - (gain[0] > gain[1]);
}

/* Prints a line for each product that the kernel was measured to compute faster than cuBLASLt, the largest gain first. */
static void print_measured(const json_t *measured) {
    const json_t *list = json_object_get(measured, "faster");
    const size_t count = json_array_size(list);
    const json_t **rows = calloc(count + 1, sizeof *rows);
    for (size_t i = 0; rows && i < count; i++) rows[i] = json_array_get(list, i);
    if (rows) qsort(rows, count, sizeof *rows, by_gain);
    for (size_t i = 0; rows && i < count; i++) {
        const json_t *row = rows[i];
        const int a = json_is_true(json_object_get(row, "a_across")),
                  b = json_is_true(json_object_get(row, "b_across"));
        const double library = number_of(row, "cublaslt_seconds"),
                     ours = number_of(row, "deepwell_seconds");
        printf(
            "  %.0f x %.0f x %.0f, %s%s%s: %.1f us, cuBLASLt %.1f us: %.2f times as fast on %s\n",
            number_of(row, "m"), number_of(row, "n"), number_of(row, "k"), text_of(row, "dtype"),
            a && b ? ", A and B across k"
            : a    ? ", A across k"
            : b    ? ", B across k"
                   : "",
            json_is_true(json_object_get(row, "bias")) ? ", bias" : "", 1e6 * ours, 1e6 * library,
            library / ours, text_of(measured, "gpu"));
    }
    free(rows);
}

/* Returns dw_gemm_measured's object, or NULL. */
static json_t *read_measured(void) {
    char *json = NULL;
    if (dw_gemm_measured(&json) != DW_OK) return NULL;
    json_t *measured = json_loads(json, 0, NULL);
    dw_text_free(json);
    return measured;
}

int explain_kernels(int argc, char **argv) {
    char *json = NULL;
    size_t index;
    json_t *kernel;
    if (argc > 1 && is_help(argv[1])) {
        printf("Usage: deepwell explain kernels [--json]\n"
               "\n"
               "Lists Deepwell's GPU kernels: what each supports, where it has been shown to be\n"
               "right, and when it is used. On an H100 or H200 it also lists the products of\n"
               "linear layers that were measured to be faster than cuBLASLt's.\n");
        return CLI_DONE;
    }
    int as_json = argc > 1 && strcmp(argv[1], "--json") == 0;
    if (argc > 1 + as_json)
        return cli_usage_error("explain kernels: unknown argument '%s'", argv[1 + as_json]);
    if (dw_gpu_kernels(&json) != DW_OK) return cli_fail();
    json_t *list = json_loads(json, 0, NULL), *measured = read_measured();
    dw_text_free(json);
    json_array_foreach(list, index, kernel) {
        const int is_product = strcmp(text_of(kernel, "name"), "sm90_linear") == 0;
        if (as_json && is_product) (void)json_object_set(kernel, "measured", measured);
        if (as_json) continue;
        cli_print_bold(text_of(kernel, "name"));
        printf(": %s\n  %s\n  for %s; %s; %s\n  %s; %s\n", text_of(kernel, "operation"),
               text_of(kernel, "source"), text_of(kernel, "architectures"),
               text_of(kernel, "elements"), text_of(kernel, "needs"), text_of(kernel, "proof"),
               text_of(kernel, "use"));
        if (is_product) print_measured(measured);
    }
    if (as_json) json_dumpf(list, stdout, 0), putchar('\n');
    json_decref(list);
    json_decref(measured);
    return CLI_DONE;
}
