/* Finds the nearest layout, and the number of GPUs that suffices, if nothing fits. */
#include "base/pool.h"
#include "plan/search.h"

enum { ROUND = 256, STEPS_MOST = 64 };

typedef struct round_work {
    const dw__problem *problem;
    dw__mesh *meshes;
    dw__found *found;
} round_work;

static void smallest_one(void *context, int64_t index, int worker) {
    const round_work *work = context;
    (void)worker;
    dw__mesh_smallest(work->problem, &work->meshes[index], &work->found[index]);
}

static int needs_less(const dw__found *a, const dw__found *b) {
    if (!a->found || !b->found) return a->found > b->found;
    return dw__needs_less(&a->prediction, &b->prediction);
}

/* Stops after the round in which a layout fits. */
dw_status dw__fit_smallest(const dw__problem *problem, int gpus, dw__found *best) {
    dw_status status = DW_OK;
    dw__meshes meshes = {0};
    dw__found *found = dw__malloc(ROUND * sizeof *found);
    *best = (dw__found){0};
    if (!found) return dw__fail_memory("the search for a plan", ROUND * sizeof *found);
    DW_TRY(dw__space_meshes(problem, gpus, 1, &meshes));
    for (size_t at = 0; at < meshes.count; at += ROUND) {
        size_t count = meshes.count - at < ROUND ? meshes.count - at : ROUND;
        round_work work = {problem, meshes.items + at, found};
        dw__pool_run((int64_t)count, smallest_one, &work);
        for (size_t i = 0; i < count; i++)
            if (needs_less(&found[i], best)) *best = found[i];
        if (best->found && best->prediction.fits) break;
    }
cleanup:
    dw__free(meshes.items);
    dw__free(found);
    return status;
}

static dw_status fits_on(const dw__problem *problem, int gpus, int *fits) {
    dw__found found;
    DW_RETURN_IF_FAILED(dw__fit_smallest(problem, gpus, &found));
    *fits = found.found && found.prediction.fits;
    return DW_OK;
}

/* Doubles the number of GPUs until a layout fits. Then searches the last interval upwards in at most STEPS_MOST steps
 * of whole nodes, and again within the step below the first fit, until a step is one node (one GPU below a node).
 * Fitting is not monotonic: 24 GPUs may suffice where no layout divides 25. Numbers between two coarse steps are
 * tried only if the lower step does not fit and the upper one does. */
dw_status dw__fit_gpus(const dw__problem *problem, int *gpus) {
    int node = problem->hardware->gpus_per_node > 0 ? problem->hardware->gpus_per_node : 1;
    int64_t low = problem->hardware->gpus, high = low;
    int fits = 0;
    *gpus = 0;
    while (!fits) {
        low = high;
        high *= 2;
        if (high > node) high = (high + node - 1) / node * node;
        if (high > DW_HARDWARE_MOST_GPUS) return DW_OK;
        DW_RETURN_IF_FAILED(fits_on(problem, (int)high, &fits));
    }
    *gpus = (int)high;
    int64_t unit = low < node ? 1 : node, step;
    do {
        for (step = unit; (high - low) / step > STEPS_MOST;) step *= 2;
        int64_t at = low + step;
        for (; at < high; at += step) {
            if (at > node && at % node) continue;
            DW_RETURN_IF_FAILED(fits_on(problem, (int)at, &fits));
            if (fits) break;
        }
        if (at < high) high = at;
        if (high - step > low) low = high - step; /* the last number tried is not lower */
        *gpus = (int)high;
    } while (step > unit);
    return DW_OK;
}
