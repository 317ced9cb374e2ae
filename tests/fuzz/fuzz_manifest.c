/* Any manifest beside a checkpoint's files is rejected with a message, or belongs to a run that can continue: its
 * updates are no more than its steps, and files and data agree with it. */
#include "deepwell/graph.h"
#include "deepwell/precision_watch.h"
#include "scratch_folder.h"
#include "train/manifest.h"

enum { TOKENS = 40, VOCABULARY = 11, STEPS = 30 };

static dw_trainer_options options = DW_TRAINER_OPTIONS_DEFAULT;
static char tokens_path[256];
static char run[4096];

static dw__dataset *open_data(void) {
    const char *path = tokens_path;
    dw__dataset *data = NULL;
    fuzz_require(dw__dataset_open(1, &path, DW_TOKEN_STORE_U16, options.sequence, &data) == DW_OK &&
                     dw__dataset_check(data, VOCABULARY) == DW_OK,
                 "data");
    return data;
}

/* Room for the losses of a window of two steps. */
static dw__recent_losses no_losses(void) {
    static int64_t steps[3];
    static double losses[3];
    return (dw__recent_losses){.factor = 1.5, .window = 2, .steps = steps, .losses = losses};
}

static dw_precision_watch *guard(void) {
    static const char policy[] =
        "{\"format\": \"deepwell.precision\", \"version\": 1, \"default\": "
        "\"fp8\", \"guard\": {\"every\": 2}}";
    dw_precision_policy *parsed = NULL;
    dw_precision_watch *watch = NULL;
    fuzz_require(dw_precision_policy_parse(policy, sizeof policy - 1, &parsed) == DW_OK &&
                     dw_precision_watch_create(parsed, &watch) == DW_OK,
                 "a guard");
    dw_precision_policy_destroy(parsed);
    return watch;
}

/* The corpus has a valid manifest. This check shows that the program still writes manifests like it. */
static void make_checkpoint(void) {
    char path[256];
    uint16_t tokens[TOKENS];
    dw__recent_losses recent = no_losses();
    dw_precision_watch *watch = guard();
    char *change = NULL;
    fuzz_require(dw_precision_watch_repair(watch, 18, &change) == DW_OK, "a repair");
    dw_text_free(change);
    dw__progress progress = {
        .step = 20, .updates = 19, .schedule_steps = STEPS, .losses = &recent, .watch = watch};
    dw__recent_losses_add(&recent, 19, 2.0);
    dw__recent_losses_add(&recent, 20, 1.25);
    scratch_make();
    scratch_write("config.json", "{}\n", 3, path);
    scratch_write("optimizer.safetensors", "\2\0\0\0\0\0\0\0{}", 10, path);
    for (int i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)(i * 7 % VOCABULARY);
    options.sequence = 8, options.batch = 2, options.steps = STEPS, options.seed = 1;
    options.precision = "fp32";
    scratch_write(".tokens.bin", tokens, sizeof tokens, tokens_path);
    dw__dataset *data = open_data();
    char *described = NULL;
    fuzz_require(dw__manifest_run(&options, data, &described) == DW_OK, "describe");
    fuzz_require((size_t)snprintf(run, sizeof run, "%s", described) < sizeof run, "a description");
    dw_text_free(described);
    fuzz_require(dw__manifest_write(scratch_folder, run, &progress) == DW_OK, "write");
    recent = no_losses();
    dw_precision_watch_destroy(watch);
    watch = guard();
    progress = (dw__progress){.losses = &recent, .watch = watch};
    char *state = NULL;
    fuzz_require(
        dw__manifest_read(scratch_folder, run, &progress, NULL) == DW_OK && progress.step == 20 &&
            progress.updates == 19 && progress.schedule_steps == STEPS && recent.count == 2 &&
            recent.steps[1] == 20 && recent.losses[1] == 1.25 &&
            dw_precision_watch_state(watch, &state) == DW_OK && strstr(state, "\"repair\": true"),
        "read what was written");
    dw_text_free(state);
    dw_precision_watch_destroy(watch);
    dw__dataset_close(data);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static int made;
    char path[256];
    dw__recent_losses recent = no_losses();
    dw__progress progress = {.step = -1, .updates = -1, .schedule_steps = -1, .losses = &recent};
    if (!made++) make_checkpoint();
    int64_t live = dw__memory_live();
    progress.watch = guard();
    scratch_write("manifest.json", bytes, count, path);
    if (dw__manifest_read(scratch_folder, run, &progress, NULL) == DW_OK) {
        fuzz_require(progress.updates >= 0 && progress.updates <= progress.step &&
                         progress.schedule_steps >= 0,
                     "a step and its updates");
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    /* Any state that was read serves a run. */
    char *policy = NULL;
    fuzz_require(dw_precision_watch_policy(progress.watch, 7, STEPS, &policy) == DW_OK ||
                     dw_last_error()[0] != '\0',
                 "a policy, or a message");
    dw_text_free(policy);
    dw_precision_watch_destroy(progress.watch);
    fuzz_require(recent.count >= 0 && recent.count <= 3, "losses within their room");
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
