/* The output of `deepwell train`: one updating line on a terminal, plain lines elsewhere, or JSON. */
#include "cli.h"
#include "deepwell/device.h"
#include "deepwell/precision_watch.h"
#include "train.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static const double GIB = 1024.0 * 1024.0 * 1024.0, MIB = 1024.0 * 1024.0;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* "1.25 GiB" */
static const char *size_text(double bytes, char text[32]) {
    if (bytes >= GIB)
        snprintf(text, 32, "%.2f GiB", bytes / GIB);
    else
        snprintf(text, 32, "%.1f MiB", bytes / MIB);
    return text;
}

static int on_gpu(const train_reporter *r) { return strcmp(r->info.device, "cpu") != 0; }

/* Returns the largest resident set so far in bytes, 0 if the system does not report it; on a GPU the most of its
 * memory. */
static double peak_bytes(const train_reporter *r) {
    const dw_device *device;
    size_t most = 0;
    double kilobytes = 0.0;
    if (on_gpu(r)) {
        if (dw_device_find(r->info.device, &device) == DW_OK) dw_device_memory(device, NULL, &most);
        return (double)most;
    }
    char line[256];
    FILE *file = fopen("/proc/self/status", "re");
    if (!file) return 0.0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "VmHWM: %lf", &kilobytes) == 1) break;
    fclose(file);
    return 1024.0 * kilobytes;
}

static void print_json(json_t *object) {
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    puts(text ? text : "{\"event\":\"out of memory\"}");
    fflush(stdout);
    free(text);
    json_decref(object);
}

/* JSON has no NaN and no infinity; they become null. */
static json_t *finite_json(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

static double ratio_of(const json_t *operand) {
    const json_t *ratio = json_object_get(operand, "snr_db");
    return json_is_number(ratio) ? json_number_value(ratio) : INFINITY;
}

/* Adds the operand with the lowest signal-to-noise ratio, and how many elements of all operands became 0 or were too
 * large. The members are those of deepwell.Trainer's log. */
static void add_operands(json_t *object, const json_t *operands) {
    const json_t *worst = json_array_get(operands, 0);
    json_int_t underflow = 0, saturated = 0;
    size_t i;
    json_t *each;
    if (!worst) return;
    json_array_foreach((json_t *)operands, i, each) {
        underflow += json_integer_value(json_object_get(each, "underflow"));
        saturated += json_integer_value(json_object_get(each, "saturated"));
        if (ratio_of(each) < ratio_of(worst)) worst = each;
    }
    json_object_set_new(object, "snr_db", finite_json(ratio_of(worst)));
    json_object_set(object, "snr_layer", json_object_get(worst, "layer"));
    json_object_set(object, "snr_operand", json_object_get(worst, "operand"));
    json_object_set_new(object, "underflow", json_integer(underflow));
    json_object_set_new(object, "saturated", json_integer(saturated));
}

json_t *train_step_json(const dw_train_report *step, int64_t tokens, const json_t *operands) {
    json_t *object = json_pack(
        "{s:I, s:o, s:o, s:f, s:f, s:b}", "step", (json_int_t)step->step, "loss",
        finite_json(step->loss), "gradient_norm", finite_json(step->gradient_norm), "lr", step->lr,
        "tokens_per_second", (double)tokens / fmax(step->seconds, 1e-9), "applied", step->applied);
    if (object && !step->applied && *step->culprit)
        json_object_set_new(object, "not_finite", json_string(step->culprit));
    else if (object && !step->applied)
        json_object_set_new(object, "spike_limit", finite_json(step->spike_limit));
    if (object) add_operands(object, operands);
    return object;
}

/* The step is the one whose sample made the change, or that the repair begins with. */
json_t *train_change_json(json_t *change) {
    json_t *step = json_object_get(change, "sampled_step");
    if (!step) step = json_object_get(change, "from_step");
    return json_pack("{s:O, s:O}", "step", step, "precision_change", change);
}

json_t *train_validation_json(int64_t step, double loss) {
    return json_pack("{s:I, s:o}", "step", (json_int_t)step, "validation_loss", finite_json(loss));
}

/* Returns `object` with the event's name in front and releases `object`. */
static json_t *event_json(const char *event, json_t *object) {
    json_t *whole = json_pack("{s:s}", "event", event);
    if (whole && object) json_object_update(whole, object);
    json_decref(object);
    return whole;
}

void train_report_begin(train_reporter *r, const train_request *request,
                        const dw_trainer_info *info) {
    *r = (train_reporter){.request = request, .info = *info};
    r->terminal = !request->json && isatty(STDOUT_FILENO);
}

static void close_line(train_reporter *r) {
    if (r->line_open) putchar('\n');
    r->line_open = 0;
}

/* ---- plan ------------------------------------------------------------------------------------ */

static void print_plan_json(const dw_trainer_info *i, int64_t steps) {
    print_json(json_pack(
        "{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:{s:I, s:I, s:I, s:I, s:I, s:I, "
        "s:I}}",
        "event", "plan", "family", i->family, "device", i->device, "precision", i->precision,
        "parameters", (json_int_t)i->parameters, "steps", (json_int_t)steps, "tokens_per_step",
        (json_int_t)i->tokens_per_step, "data_tokens", (json_int_t)i->data_tokens, "data_sequences",
        (json_int_t)i->data_sequences, "validation_tokens", (json_int_t)i->validation_tokens,
        "validation_sequences", (json_int_t)i->validation_sequences, "memory", "parameters",
        (json_int_t)i->parameter_bytes, "gradients", (json_int_t)i->gradient_bytes, "optimizer",
        (json_int_t)i->optimizer_bytes, "arena", (json_int_t)i->arena_bytes, "accumulation",
        (json_int_t)i->accumulation_bytes, "batch", (json_int_t)i->batch_bytes, "predicted_peak",
        (json_int_t)i->predicted_bytes));
}

void train_report_plan(train_reporter *r) {
    const dw_trainer_info *i = &r->info;
    const dw_trainer_options *o = &r->request->options;
    char a[32], b[32], c[32], d[32];
    if (r->request->json) {
        print_plan_json(i, o->steps);
        return;
    }
    double epochs = (double)o->steps * (double)o->batch / (double)i->data_sequences;
    cli_print_bold("model   ");
    printf("%s, %" PRId64 " parameters\n", i->family, i->parameters);
    cli_print_bold("data    ");
    printf("%" PRId64 " tokens in %u file%s, %" PRId64 " sequences of %" PRId64 "\n",
           i->data_tokens, i->data_files, i->data_files == 1 ? "" : "s", i->data_sequences,
           o->sequence);
    cli_print_bold("run     ");
    printf("%" PRId64 " steps of %" PRId64 " tokens, %.2f epochs\n", o->steps, i->tokens_per_step,
           epochs);
    cli_print_bold("memory  ");
    printf("about %s: parameters %s, gradients and optimizer %s, activations %s\n",
           size_text((double)i->predicted_bytes, a), size_text((double)i->parameter_bytes, b),
           size_text((double)(i->gradient_bytes + i->accumulation_bytes + i->optimizer_bytes), c),
           size_text((double)i->arena_bytes, d));
    if (on_gpu(r)) {
        cli_print_bold("device  ");
        printf("%s, precision %s; the memory is its own\n", i->device, i->precision);
    }
    fflush(stdout);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* "1:02:03" */
static const char *time_text(double seconds, char text[32]) {
    int64_t whole = (int64_t)(seconds + 0.5);
    snprintf(text, 32, "%" PRId64 ":%02" PRId64 ":%02" PRId64, whole / 3600, whole / 60 % 60,
             whole % 60);
    return text;
}

static int step_line(const train_reporter *r, const dw_train_report *s, char *line, size_t bytes) {
    char used[32], predicted[32], left[32];
    int64_t steps = r->request->options.steps;
    double tokens = (double)r->info.tokens_per_step / fmax(r->step_seconds, 1e-9);
    return snprintf(
        line, bytes,
        "step %" PRId64 "/%" PRId64 "  loss %.4f  norm %.3g  lr %.3g  %.0f tokens/s  memory "
        "%s (predicted %s)  left %s",
        s->step, steps, s->loss, s->gradient_norm, s->lr, tokens, size_text(peak_bytes(r), used),
        size_text((double)r->info.predicted_bytes, predicted),
        time_text((double)(steps - s->step) * r->step_seconds, left));
}

static void draw_line(train_reporter *r, const dw_train_report *s) {
    enum { WIDEST = 512 };
    char line[WIDEST];
    struct winsize window = {0};
    int columns = ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 ? window.ws_col : 0;
    int length = step_line(r, s, line, sizeof line);
    if (columns > 1 && length > columns - 1) line[columns - 1] = '\0';
    printf("\r\033[K%s", line);
    fflush(stdout);
    r->line_open = 1;
    r->last_drawn = now();
}

static void print_bad_step(train_reporter *r, const dw_train_report *s) {
    close_line(r);
    int loss = !isfinite(s->loss);
    if (!*s->culprit) {
        printf("step %" PRId64
               " was not applied: its loss is a spike, above %g (loss %g, gradient norm %g)\n",
               s->step, s->spike_limit, s->loss, s->gradient_norm);
        fflush(stdout);
        return;
    }
    printf("step %" PRId64 " was not applied: %s%s%s is not finite (loss %g, gradient norm %g)\n",
           s->step, loss ? "" : "the gradient of \"", s->culprit, loss ? "" : "\"", s->loss,
           s->gradient_norm);
    fflush(stdout);
}

void train_report_step(train_reporter *r, const dw_train_report *s, const json_t *operands) {
    static const double redraw_seconds = 0.1, memory = 0.9;
    int64_t steps = r->request->options.steps, every = r->request->report_every;
    r->step_seconds =
        r->step_seconds > 0.0 ? memory * r->step_seconds + (1.0 - memory) * s->seconds : s->seconds;
    if (r->request->json) {
        json_t *object = train_step_json(s, r->info.tokens_per_step, operands);
        if (object)
            json_object_set_new(object, "memory_peak", json_integer((json_int_t)peak_bytes(r)));
        print_json(event_json("step", object));
    } else if (!s->applied) {
        print_bad_step(r, s);
    } else if (r->terminal) {
        if (s->step == steps || now() - r->last_drawn >= redraw_seconds) draw_line(r, s);
    } else if (s->step == 1 || s->step == steps || (every > 0 && s->step % every == 0)) {
        char line[512];
        step_line(r, s, line, sizeof line);
        puts(line);
        fflush(stdout);
    }
}

int train_report_change(train_reporter *r, json_t *change) {
    char *json = NULL, *text = NULL;
    if (r->request->json) {
        print_json(event_json("precision_change", train_change_json(change)));
        return 1;
    }
    json = json_dumps(change, JSON_COMPACT);
    const int fine = json && dw_precision_change_text(json, &text) == DW_OK;
    close_line(r);
    if (fine)
        puts(text);
    else
        fprintf(stderr, "deepwell: %s\n", json ? dw_last_error() : "memory is exhausted");
    fflush(stdout);
    dw_text_free(text);
    free(json);
    return fine;
}

void train_report_validation(train_reporter *r, int64_t step, double loss) {
    if (r->request->json) {
        print_json(event_json("validation", train_validation_json(step, loss)));
        return;
    }
    close_line(r);
    printf("step %" PRId64 "  validation loss %.4f\n", step, loss);
    fflush(stdout);
}

void train_report_event(train_reporter *r, const char *event, int64_t step, const char *path,
                        const char *text) {
    if (r->request->json) {
        print_json(
            json_pack("{s:s, s:I, s:s}", "event", event, "step", (json_int_t)step, "path", path));
        return;
    }
    close_line(r);
    printf("step %" PRId64 "  %s %s\n", step, text, path);
    fflush(stdout);
}

void train_report_schedule(train_reporter *r, int64_t step, int64_t schedule_steps) {
    const dw_trainer_options *o = &r->request->options;
    if (schedule_steps == o->steps || strcmp(o->schedule, "constant") == 0) return;
    if (r->request->json) {
        print_json(json_pack("{s:s, s:I, s:I}", "event", "schedule", "step", (json_int_t)step,
                             "schedule_steps", (json_int_t)schedule_steps));
        return;
    }
    close_line(r);
    if (schedule_steps < o->steps)
        printf("step %" PRId64 "  the learning rate's schedule ends at step %" PRId64
               "; the steps after it, up to %" PRId64 ", keep %g\n",
               step, schedule_steps, o->steps, o->lr * o->min_lr_ratio);
    else
        printf("step %" PRId64 "  the learning rate's schedule ends at step %" PRId64
               ", after this run's last step %" PRId64 "\n",
               step, schedule_steps, o->steps);
    fflush(stdout);
}

void train_report_end(train_reporter *r) { close_line(r); }
