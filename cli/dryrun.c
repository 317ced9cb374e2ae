/* `deepwell dryrun`: simulates one step of a plan: when each stage computes, sends and waits, and what it holds. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include <stdio.h>
#include <string.h>

typedef struct request {
    const char *plan, *trace, *report;
    int json;
} request;

static void print_help(void) {
    printf(
        "Usage: deepwell dryrun --plan PLAN.json [OPTION...]\n"
        "\n"
        "Simulates one training step of a plan (from 'deepwell plan -o PLAN.json') event by\n"
        "event, on any machine. Prints step time, bubble, overlap, MFU and the memory of each\n"
        "stage.\n"
        "\n"
        "Options:\n"
        "  --plan FILE     the plan\n"
        "  --trace FILE    write the timeline for ui.perfetto.dev or chrome://tracing\n"
        "  --report FILE   write one HTML page: timeline, memory, breakdown of time and memory,\n"
        "                  roofline, the plan in words\n"
        "  --html FILE     the same as --report\n"
        "  --json          print all figures as JSON\n"
        "\n"
        "Exit status: 1 if the step does not fit into the memory of the GPUs or their hosts.\n");
}

static int read_request(int argc, char **argv, request *r) {
    for (int at = 1; at < argc; at++) {
        const char **value = NULL;
        if (strcmp(argv[at], "--json") == 0)
            r->json = 1;
        else if (strcmp(argv[at], "--plan") == 0)
            value = &r->plan;
        else if (strcmp(argv[at], "--trace") == 0)
            value = &r->trace;
        else if (strcmp(argv[at], "--report") == 0 || strcmp(argv[at], "--html") == 0)
            value = &r->report;
        else
            return cli_usage_error("dryrun has no option '%s'", argv[at]);
        if (!value) continue;
        if (at + 1 >= argc) return cli_usage_error("%s needs a file", argv[at]);
        *value = argv[++at];
    }
    if (!r->plan) return cli_usage_error("dryrun needs --plan FILE");
    return CLI_DONE;
}

/* "184 us", "26.2 ms", "52.3 s". */
static const char *time_text(double seconds, char text[32]) {
    if (seconds >= 1)
        snprintf(text, 32, "%.2f s", seconds);
    else if (seconds >= 1e-3 || seconds <= 0)
        snprintf(text, 32, "%.1f ms", 1e3 * seconds);
    else
        snprintf(text, 32, "%.0f us", 1e6 * seconds);
    return text;
}

static void print_label(const char *label) { printf("  %-10s", label); }

static void print_speedups(const dw_autoplan *plan, const dw_simulation_figures *f) {
    if (plan->layout.precision != DW_SCHEME_BF16) {
        print_label("Speed");
        if (f->speedup_bf16 > 0)
            printf("%.2f times as fast as the same layout in BF16 (predicted)\n", f->speedup_bf16);
        else
            printf("not compared with BF16: %s\n", f->speedup_bf16_reason);
    }
    print_label("Speed");
    if (f->speedup <= 0) {
        printf("not compared with a usual layout: %s\n", f->speedup_reason);
        return;
    }
    printf("%.2f times as fast as the fastest usual layout (predicted):\n", f->speedup);
    print_label("");
    printf("%s\n", f->baseline);
}

static void print_figures(const dw_autoplan *plan, const dw_simulation *simulation,
                          const dw_simulation_figures *f) {
    char title[200], time[2][32];
    snprintf(title, sizeof title, "%s on %d x %s",
             *plan->model_name ? plan->model_name : "the model", plan->layout.gpus,
             plan->hardware->name);
    cli_print_bold(title);
    printf("\n");
    print_label("Step");
    printf("%s simulated, %s by formula\n", time_text(f->seconds, time[0]),
           time_text(f->prediction.seconds, time[1]));
    print_label("Rate");
    printf("%.0f tokens/s per GPU, MFU %.1f%%", f->tokens_per_second, 100 * f->mfu);
    if (f->peak_rate != DW_RATE_BF16)
        printf(" of the BF16 peak, %.1f%% of the %s peak", 100 * f->peak_utilization,
               dw_rate_name(f->peak_rate));
    printf("\n");
    if (f->ranks > 1) {
        print_label("Bubble");
        printf("%.1f%% simulated, %.1f%% by formula\n", 100 * f->bubble_fraction,
               100 * f->prediction.bubble_fraction);
        print_label("Idle");
        printf("%.1f%% of the step, mean of %d stages\n", 100 * f->idle_fraction, f->ranks);
    }
    if (plan->layout.gpus > 1) {
        print_label("Overlap");
        printf("%.1f%% of communication runs beside computation\n", 100 * f->overlap);
    }
    print_label("Memory");
    printf("%.2f GB of %.2f\n", f->peak_bytes / 1e9, f->capacity / 1e9);
    print_label("");
    printf("peak on stage %d, %s after the start: %s\n", f->peak_rank,
           time_text(f->peak_time, time[0]), f->fits ? "fits" : "does not fit");
    const dw_prediction *p = &f->prediction;
    if (p->host_optimizer + p->host_activations > 0) {
        print_label("Host");
        printf("%.2f GB", (p->host_optimizer + p->host_activations) / 1e9);
        if (p->host_capacity > 0) printf(" of %.2f", p->host_capacity / 1e9);
        printf(" per GPU\n");
    }
    print_speedups(plan, f);
    if (f->ranks < 2) return;
    cli_print_bold("Stages");
    printf("\n  %5s %9s %7s %10s %12s %10s\n", "", "computes", "waits", "data waits", "memory, GB",
           "in flight");
    for (int rank = 0; rank < f->ranks; rank++) {
        const dw_simulated_rank *r = dw_simulation_rank(simulation, rank);
        printf("  %5d %8.1f%% %6.1f%% %9.1f%% %12.2f %10d\n", rank, 100 * r->compute / f->seconds,
               100 * r->wait / f->seconds, 100 * r->exposed[DW_STREAM_DATA] / f->seconds,
               r->peak_bytes / 1e9, r->peak_in_flight);
    }
}

static int write_files(const request *r, const dw_autoplan *plan, const dw_simulation *simulation) {
    if (r->trace && dw_simulation_trace(simulation, r->trace) != DW_OK) return cli_fail();
    if (r->report && dw_simulation_report(simulation, plan->model_name, r->report) != DW_OK)
        return cli_fail();
    return CLI_DONE;
}

static int print_json(const dw_simulation *simulation) {
    char *text = NULL;
    if (dw_simulation_json(simulation, &text) != DW_OK) return cli_fail();
    fputs(text, stdout);
    dw_text_free(text);
    return CLI_DONE;
}

int cli_dryrun(int argc, char **argv) {
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        print_help();
        return CLI_DONE;
    }
    request r = {0};
    int result = read_request(argc, argv, &r);
    if (result != CLI_DONE) return result;
    dw_autoplan *plan = NULL;
    dw_simulation *simulation = NULL;
    if (dw_autoplan_load(r.plan, &plan) != DW_OK ||
        dw_simulate(&plan->model, plan->hardware, &plan->layout, &simulation) != DW_OK) {
        result = cli_fail();
    } else {
        dw_simulation_figures figures;
        dw_simulation_figures_of(simulation, &figures);
        result = write_files(&r, plan, simulation);
        if (result == CLI_DONE && r.json)
            result = print_json(simulation);
        else if (result == CLI_DONE)
            print_figures(plan, simulation, &figures);
        if (result == CLI_DONE && !figures.fits) result = CLI_FAILED;
    }
    dw_simulation_destroy(simulation);
    dw_autoplan_destroy(plan);
    return result;
}
