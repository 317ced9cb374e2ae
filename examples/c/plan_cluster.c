/* Plans a training run on a cluster, without having it: finds the fastest layout that fits, and simulates one step.
 *
 *     cc plan_cluster.c $(pkg-config --cflags --libs deepwell) -o plan_cluster
 *     ./plan_cluster [MODEL [HARDWARE]]        default: llama3-70b h100:64
 *
 * MODEL is a name of the catalogue or a Hugging Face folder; HARDWARE is a profile and a number of GPUs, or a file of
 * `deepwell probe`.
 */
#include <deepwell/deepwell.h>
#include <stdio.h>

/* The memory of each stage of the pipeline over the step, eight samples. */
static void print_memory(const dw_simulation *simulation, const dw_simulation_figures *figures) {
    printf("memory in GB over the step\n");
    for (int rank = 0; rank < figures->ranks; rank++) {
        size_t count, at = 0;
        const dw_memory_point *points = dw_simulation_memory(simulation, rank, &count);
        printf("  stage %d:", rank);
        for (int sample = 0; sample < 8; sample++) {
            while (at + 1 < count && points[at + 1].time <= figures->seconds * sample / 8) at++;
            printf(" %5.1f", points[at].bytes / 1e9);
        }
        printf("  most %5.1f\n", dw_simulation_rank(simulation, rank)->peak_bytes / 1e9);
    }
}

/* The share of the step that the first stage's forward passes take. */
static double forward_seconds(const dw_simulation *simulation) {
    size_t count;
    double seconds = 0;
    const dw_event *events = dw_simulation_events(simulation, &count);
    for (size_t at = 0; at < count; at++)
        if (events[at].rank == 0 && events[at].kind == DW_EVENT_FORWARD)
            seconds += events[at].end - events[at].start;
    return seconds;
}

/* A plan can also be made for a given layout: here all GPUs share the parameters (FSDP), without a pipeline. */
static dw_status print_fsdp(const dw_autoplan *best) {
    dw_layout layout;
    dw_autoplan *own = NULL;
    dw_layout_default(&layout);
    layout.gpus = layout.dp = best->hardware->gpus;
    layout.zero_stage = 3;
    layout.seq_len = best->layout.seq_len;
    layout.global_batch = best->layout.global_batch;
    dw_status status =
        dw_autoplan_of(best->model_name, &best->model, best->hardware, &layout, &own);
    if (status == DW_OK)
        printf("FSDP alone: %.2f s a step, %s\n", own->prediction.seconds,
               own->prediction.fits ? "fits" : "does not fit");
    dw_autoplan_destroy(own);
    return status;
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "llama3-70b";
    dw_model_sizes model;
    dw_hardware *hardware = NULL;
    dw_autoplan *plan = NULL;
    dw_simulation *simulation = NULL;
    char *text = NULL;

    dw_autoplan_request request;
    dw_autoplan_request_default(&request);
    dw_status status = dw_model_sizes_find(name, &model);
    if (status == DW_OK) status = dw_hardware_open(argc > 2 ? argv[2] : "h100:64", &hardware);
    if (status == DW_OK) {
        request.model_name = name;
        request.model = &model;
        request.hardware = hardware;
        request.seq_len = 8192;
        request.global_batch = 512;
        status = dw_autoplan_search(&request, &plan);
    }
    if (status == DW_OK) status = dw_autoplan_text(plan, 0, &text);
    if (status == DW_OK) printf("%s\n", text);
    if (status == DW_OK) status = print_fsdp(plan);
    if (status == DW_OK)
        status = dw_simulate(&plan->model, plan->hardware, &plan->layout, &simulation);
    if (status == DW_OK) {
        dw_simulation_figures figures;
        dw_simulation_figures_of(simulation, &figures);
        printf("simulated: %.2f s a step, %.1f%% of it idle, %.2f s forward on stage 0\n",
               figures.seconds, 100 * figures.idle_fraction, forward_seconds(simulation));
        print_memory(simulation, &figures);
    } else {
        fprintf(stderr, "plan_cluster: %s: %s\n", dw_status_text(status), dw_last_error());
    }
    dw_text_free(text);
    dw_simulation_destroy(simulation);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(hardware);
    return status == DW_OK ? 0 : 1;
}
