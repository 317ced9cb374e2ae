/* `deepwell train --plan`: takes sequence, batch, micro-batch, precision and device from a plan for one device. Options
 * of the command line stay as they are. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include "train.h"
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

/* The members of a plan that set options of a run. */
typedef struct planned {
    int64_t sequence, batch, micro_batch;
    const char *precision; /* a name of the library: it outlives the plan */
    const char *device;
} planned;

static int refuse(int result, const char *path, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static int refuse(int result, const char *path, const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "deepwell: the plan \"%s\" ", path);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputs("\n", stderr);
    return result;
}

/* The name of a plan's precision among those of `train`; NULL: `train` does not have it. */
static const char *precision_named(const char *name) {
    static const char *const names[] = {"fp32",  "bf16",  "fp8",   "fp8-block",
                                        "mxfp8", "mxfp6", "mxfp4", "nvfp4"};
    if (strcmp(name, dw_scheme_name(DW_SCHEME_FP8_TENSOR)) == 0) name = "fp8";
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        if (strcmp(name, names[at]) == 0) return names[at];
    return NULL;
}

/* Prints a message and returns a cli_exit if the plan's model is not the one to train. */
static int check_model(const char *path, const char *model, const dw_autoplan *plan) {
    dw_model_sizes here;
    const dw_model_sizes *there = &plan->model;
    if (dw_model_sizes_find(model, &here) != DW_OK) return cli_fail();
    if (here.layers == there->layers && here.hidden == there->hidden && here.ffn == there->ffn &&
        here.heads == there->heads && here.vocabulary == there->vocabulary)
        return CLI_DONE;
    return refuse(CLI_FAILED, path,
                  "is for %s with %d layers of width %d, and --model has %d of width %d; plan for "
                  "this model",
                  plan->model_name[0] ? plan->model_name : "a model", there->layers, there->hidden,
                  here.layers, here.hidden);
}

/* Prints a message and returns a cli_exit if `train` does not do what the layout asks for. */
static int check_layout(const char *path, const dw_layout *l) {
    if (l->gpus > 1)
        return refuse(CLI_UNSUPPORTED, path,
                      "is for %d GPUs, and train uses one: plan with --hardware NAME:1, or train "
                      "by a framework that can run the layout",
                      l->gpus);
    if (l->recompute != DW_RECOMPUTE_NONE || l->offload_layers > 0 || l->offload_optimizer > 0)
        return refuse(CLI_UNSUPPORTED, path,
                      "recomputes or offloads (recompute %s, %d layers and %s optimizer on the "
                      "host), which train does not: plan with --set recompute=none offload=none",
                      dw_recompute_name(l->recompute), l->offload_layers,
                      l->offload_optimizer ? "the" : "no");
    return CLI_DONE;
}

/* Prints a message and returns a cli_exit. `most`: what is too large, and by how much; may be empty. */
static int refuse_unfit(const char *path, const char *most, const planned *found) {
    return refuse(CLI_FAILED, path,
                  "is for a run that does not fit the memory%s%s: plan with a smaller --seq-len or "
                  "a device with more memory; to train all the same, give its options instead of "
                  "--plan: --sequence %lld --batch %lld --micro-batch %lld --precision %s --device "
                  "%s",
                  *most ? ": " : "", most, (long long)found->sequence, (long long)found->batch,
                  (long long)found->micro_batch, found->precision, found->device);
}

static int read_gpu_plan(const char *path, const char *model, planned *found) {
    dw_autoplan *plan = NULL;
    if (dw_autoplan_load(path, &plan) != DW_OK) return cli_fail();
    const dw_layout *l = &plan->layout;
    int result = check_layout(path, l);
    if (result == CLI_DONE) result = check_model(path, model, plan);
    if (result == CLI_DONE && !precision_named(dw_scheme_name(l->precision)))
        result = refuse(CLI_UNSUPPORTED, path, "has the precision %s, which train does not have",
                        dw_scheme_name(l->precision));
    if (result == CLI_DONE)
        *found = (planned){l->seq_len, l->global_batch, l->micro_batch,
                           precision_named(dw_scheme_name(l->precision)), "cuda"};
    if (result == CLI_DONE && !plan->prediction.fits)
        result = refuse_unfit(path, plan->tightest ? plan->tightest : "", found);
    dw_autoplan_destroy(plan);
    return result;
}

/* Reads what `deepwell plan -o` or Python's HostPlan.to_json() writes for a machine without GPUs. */
static int read_host_plan(const char *path, const json_t *root, planned *found) {
    const json_t *layout = json_object_get(root, "layout");
    if (!layout) layout = root;
    const char *precision = json_string_value(json_object_get(layout, "precision"));
    *found = (planned){json_integer_value(json_object_get(layout, "seq_len")),
                       json_integer_value(json_object_get(layout, "global_batch")),
                       json_integer_value(json_object_get(layout, "micro_batch")),
                       precision ? precision_named(precision) : NULL, "cpu"};
    if (found->sequence > 0 && found->batch > 0 && found->micro_batch > 0 && found->precision)
        return json_is_false(json_object_get(root, "fits")) ? refuse_unfit(path, "", found)
                                                            : CLI_DONE;
    return refuse(CLI_FAILED, path,
                  "lacks seq_len, global_batch, micro_batch or a precision of train; expected the "
                  "output of 'deepwell plan -o'");
}

static int read_plan(const char *path, const char *model, planned *found) {
    json_error_t error;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return refuse(CLI_FAILED, path, "cannot be read: %s (line %d)", error.text, error.line);
    int result = json_object_get(root, "version") ? read_gpu_plan(path, model, found)
                                                  : read_host_plan(path, root, found);
    json_decref(root);
    return result;
}

static int given(int argc, char **argv, const char *option) {
    for (int at = 1; at < argc; at++)
        if (strcmp(argv[at], option) == 0) return 1;
    return 0;
}

int train_apply_plan(int argc, char **argv, train_request *r) {
    planned found = {0};
    int result = read_plan(r->plan, r->options.model, &found);
    if (result != CLI_DONE) return result;
    if (!given(argc, argv, "--sequence")) r->options.sequence = found.sequence;
    if (!given(argc, argv, "--batch")) r->options.batch = found.batch;
    if (!given(argc, argv, "--micro-batch")) r->options.micro_batch = found.micro_batch;
    if (!given(argc, argv, "--precision")) r->options.precision = found.precision;
    if (!given(argc, argv, "--device")) r->options.device = found.device;
    return CLI_DONE;
}
