/* Trains a language model from a Hugging Face folder, and saves it for transformers.
 *
 *     cc train_folder.c $(pkg-config --cflags --libs deepwell) -o train_folder
 *     ./train_folder MODEL tokens.bin OUTPUT [STEPS]
 *
 * MODEL is a folder with config.json and weights, or a name of the catalogue, which begins with random weights. The
 * tokens are uint16 or uint32 numbers; `python -m deepwell.tokenize` makes such files from text.
 */
#include <deepwell/deepwell.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

static void print_line(void *context, int level, const char *line) {
    (void)context;
    fprintf(stderr, "%s: %s\n", level >= 2 ? "warning" : "note", line);
}

static int usage(void) {
    fprintf(stderr,
            "usage: train_folder MODEL TOKENS OUTPUT [STEPS]\nMODEL is a folder, or a name of a "
            "model that Deepwell builds, one of");
    for (uint32_t at = 0; at < dw_model_catalogue_count(); at++) {
        const char *name = dw_model_catalogue_name(at);
        dw_model_config *config = NULL;
        if (dw_model_config_named(name, &config) == DW_OK) fprintf(stderr, " %s", name);
        dw_model_config_destroy(config);
    }
    fprintf(stderr, "\n");
    return 2;
}

int main(int argc, char **argv) {
    struct stat about;
    if (argc < 4) return usage();
    dw_log_set_sink(print_line, NULL, 1);

    dw_trainer_options options = DW_TRAINER_OPTIONS_DEFAULT;
    const char *const data[] = {argv[2]};
    options.model = argv[1];
    options.init = stat(argv[1], &about) != 0; /* a name of the catalogue */
    options.data = data;
    options.data_count = 1;
    options.sequence = 64;
    options.batch = 4;
    options.steps = argc > 4 ? atol(argv[4]) : 20;

    /* The plan is made first, so that the memory is known before any is allocated. */
    dw_trainer *trainer = NULL;
    dw_status status = dw_trainer_create(&options, &trainer);
    if (status != DW_OK) goto failed;
    dw_trainer_info info;
    dw_trainer_describe(trainer, &info);
    printf("%s, %lld parameters, at most %.0f MB\n", info.family, (long long)info.parameters,
           (double)info.predicted_bytes / 1e6);

    status = dw_trainer_begin(trainer, 0);
    while (status == DW_OK && dw_trainer_steps_done(trainer) < options.steps) {
        dw_train_report report;
        status = dw_trainer_step(trainer, &report);
        if (status == DW_OK)
            printf("step %lld  loss %.4f  %.2f s\n", (long long)report.step, report.loss,
                   report.seconds);
    }
    if (status == DW_OK) status = dw_trainer_save(trainer, argv[3]);
    if (status == DW_OK) printf("saved to %s\n", argv[3]);
failed:
    if (status != DW_OK)
        fprintf(stderr, "train_folder: %s: %s\n", dw_status_text(status), dw_last_error());
    dw_trainer_destroy(trainer);
    return status == DW_OK ? 0 : 1;
}
