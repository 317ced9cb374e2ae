/* Best-first search. Every choice of sizes has a lower bound of its seconds. Choices are searched in the order of
 * their bounds until the bound exceeds the best result. Each round has a fixed size and uses the results of the
 * rounds before it, so the answer is the same on any number of threads. */
#include "plan/search.h"
#include "base/pool.h"
#include "plan/evidence.h"
#include "plan/plan_fields.h"
#include "plan/plan_file.h"
#include "plan/plan_text.h"
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEPT_MOST = 33, ROUND_FIRST = 8, ROUND_MOST = 256, WHAT_IFS_MOST = 48 };

/* Part of the host's memory left to the system and the data loader. */
static const double HOST_RESERVE = 0.1;
/* Layouts within this part of the fastest count as equally fast; the simplest of them is chosen. */
static const double TIE = 0.005;
/* Drops alternatives slower than this multiple of the plan. */
static const double WHAT_IF_MOST = 3;

typedef struct result {
    int count; /* kept layouts, fastest first; no two have the same axis sizes */
    dw__found kept[KEPT_MOST];
    dw_autoplan_statistics statistics;
} result;

/* ---- one search ----------------------------------------------------------------------------- */

typedef struct round_work {
    const dw__problem *problem;
    const dw__meshes *all;
    const dw__mesh *meshes; /* meshes of this round */
    const size_t *places;   /* their places in `all` */
    double most;
    int simplest;
    dw__found *found;
} round_work;

static void search_one(void *context, int64_t index, int worker) {
    const round_work *work = context;
    (void)worker;
    size_t place = work->places[index];
    dw__stage_memo *stages = place < DW__REMEMBERED ? &work->all->stages[place] : NULL;
    dw__mesh_best(work->problem, &work->meshes[index], work->most, work->simplest, stages,
                  &work->found[index]);
}

enum { BOUND_MOST = 1024 }; /* meshes per task */

static void bound_some(void *context, int64_t index, int worker) {
    const dw__meshes *meshes = ((const round_work *)context)->all;
    size_t first = (size_t)index * BOUND_MOST, count = meshes->count - first;
    (void)worker;
    dw__meshes_bound(((const round_work *)context)->problem, meshes->items + first,
                     count < BOUND_MOST ? count : BOUND_MOST);
}

static int sizes_order(const dw__mesh *a, const dw__mesh *b) {
    const int one[9] = {a->tp,  a->cp,          a->pp,        a->dp, a->ep,
                        a->etp, a->micro_batch, a->precision, a->atp};
    const int two[9] = {b->tp,  b->cp,          b->pp,        b->dp, b->ep,
                        b->etp, b->micro_batch, b->precision, b->atp};
    for (int at = 0; at < 9; at++)
        if (one[at] != two[at]) return one[at] < two[at] ? -1 : 1;
    return 0;
}

static int by_bound(const void *left, const void *right) {
    const dw__mesh *a = left, *b = right;
    if (a->bound != b->bound) return a->bound < b->bound ? -1 : 1;
    return sizes_order(a, b);
}

static void exchange(dw__mesh *a, dw__mesh *b) {
    dw__mesh held = *a;
    *a = *b;
    *b = held;
}

/* Moves the `count` least of items[low, high) to the front (Hoare's selection). */
static void select_least(dw__mesh *items, size_t low, size_t high, size_t count) {
    size_t wanted = low + count;
    while (high - low > 1 && wanted > low && wanted < high) {
        exchange(&items[low + (high - low) / 2], &items[high - 1]);
        size_t at = low;
        for (size_t i = low; i < high - 1; i++)
            if (by_bound(&items[i], &items[high - 1]) < 0) exchange(&items[i], &items[at++]);
        exchange(&items[at], &items[high - 1]);
        if (wanted <= at)
            high = at;
        else
            low = at + 1;
    }
}

/* Returns the mesh with rank `at`. Few meshes are ever searched, so they are sorted on demand, twice as many each
 * time. */
static const dw__mesh *mesh_at(dw__meshes *meshes, size_t at) {
    enum { LEAST = 1024 };
    while (at >= meshes->sorted) {
        size_t left = meshes->count - meshes->sorted,
               more = meshes->sorted < LEAST ? LEAST : meshes->sorted;
        if (more > left) more = left;
        dw__mesh *first = meshes->items + meshes->sorted;
        select_least(meshes->items, meshes->sorted, meshes->count, more);
        qsort(first, more, sizeof *first, by_bound);
        meshes->sorted += more;
    }
    return &meshes->items[at];
}

static void bound_meshes(const dw__problem *problem, dw__meshes *meshes,
                         dw_autoplan_statistics *statistics) {
    round_work work = {.problem = problem, .all = meshes};
    dw__pool_run((int64_t)((meshes->count + BOUND_MOST - 1) / BOUND_MOST), bound_some, &work);
    statistics->meshes = (double)meshes->count;
    statistics->meshes_large = 0;
    statistics->predicted = (double)meshes->count;
}

static int same_axes(const dw_layout *a, const dw_layout *b) {
    return a->tp == b->tp && a->cp == b->cp && a->pp == b->pp && a->ep == b->ep &&
           a->etp == b->etp && a->attention_tp == b->attention_tp;
}

static void keep(result *r, int most, const dw__found *found) {
    int at = 0;
    while (at < r->count && !same_axes(&r->kept[at].layout, &found->layout)) at++;
    if (at < r->count) {
        if (found->prediction.seconds >= r->kept[at].prediction.seconds) return;
        memmove(&r->kept[at], &r->kept[at + 1], (size_t)(r->count - at - 1) * sizeof *found);
        r->count--;
    }
    at = r->count;
    while (at > 0 && r->kept[at - 1].prediction.seconds > found->prediction.seconds) at--;
    if (at >= most) return;
    if (r->count == most) r->count--;
    memmove(&r->kept[at + 1], &r->kept[at], (size_t)(r->count - at) * sizeof *found);
    r->kept[at] = *found;
    r->count++;
}

/* Meshes of one round: those from index *at on that the limits allow and whose bound is at most `limit`. */
typedef struct round_meshes {
    dw__mesh meshes[ROUND_MOST];
    size_t places[ROUND_MOST], count;
    dw__found found[ROUND_MOST];
} round_meshes;

static int allows_mesh(const dw__limits *l, const dw__mesh *mesh) {
    return DW__ALLOWS(l, tp, mesh->tp) && DW__ALLOWS(l, cp, mesh->cp) &&
           DW__ALLOWS(l, pp, mesh->pp) && DW__ALLOWS(l, ep, mesh->ep) &&
           DW__ALLOWS(l, micro_batch, mesh->micro_batch) && DW__ALLOWS(l, attention_tp, mesh->atp);
}

static void fill(const dw__problem *problem, dw__meshes *meshes, double limit, size_t most,
                 size_t *at, round_meshes *round) {
    round->count = 0;
    for (; *at < meshes->count && round->count < most; ++*at) {
        const dw__mesh *mesh = mesh_at(meshes, *at);
        if (mesh->bound > limit) return;
        if (!allows_mesh(&problem->limits, mesh)) continue;
        round->places[round->count] = *at;
        round->meshes[round->count++] = *mesh;
    }
}

/* Finds the `most` fastest layouts with different axes, none slower than `limit` seconds. */
static dw_status search(const dw__problem *problem, dw__meshes *meshes, int most, double limit,
                        result *r) {
    round_meshes *round = dw__malloc(sizeof *round);
    size_t at = 0, size = ROUND_FIRST;
    if (!round) return dw__fail_memory("the search for a plan", sizeof *round);
    r->count = 0;
    for (;;) {
        double cutoff = r->count == most ? r->kept[most - 1].prediction.seconds : limit;
        fill(problem, meshes, cutoff, size, &at, round);
        if (!round->count) break;
        round_work work = {problem, meshes, round->meshes, round->places, cutoff, 0, round->found};
        dw__pool_run((int64_t)round->count, search_one, &work);
        for (size_t i = 0; i < round->count; i++) {
            const dw__found *found = &round->found[i];
            r->statistics.predicted += found->predicted;
            r->statistics.meshes_large += found->too_large;
            /* without a limit, too large here means too large for every what-if */
            if (limit == HUGE_VAL) meshes->items[round->places[i]].too_large = found->too_large;
            if (found->found) keep(r, most, found);
        }
        if (size < ROUND_MOST) size *= 2;
    }
    r->statistics.meshes_slow += (double)(meshes->count - at);
    dw__free(round);
    return DW_OK;
}

/* Finds the simplest of all layouts that are as fast as the fastest. */
static dw_status simplify(const dw__problem *problem, dw__meshes *meshes, const dw__found *fastest,
                          dw_autoplan_statistics *statistics, dw__found *best) {
    double limit = fastest->prediction.seconds * (1 + TIE);
    round_meshes *round = dw__malloc(sizeof *round);
    size_t at = 0;
    if (!round) return dw__fail_memory("the search for a plan", sizeof *round);
    best->found = 0;
    for (;;) {
        fill(problem, meshes, limit, ROUND_MOST, &at, round);
        if (!round->count) break;
        round_work work = {problem, meshes, round->meshes, round->places, limit, 1, round->found};
        dw__pool_run((int64_t)round->count, search_one, &work);
        for (size_t i = 0; i < round->count; i++) {
            const dw__found *found = &round->found[i];
            statistics->predicted += found->predicted;
            if (!found->found) continue;
            int better =
                !best->found || found->rank < best->rank ||
                (found->rank == best->rank && found->prediction.seconds < best->prediction.seconds);
            if (better) *best = *found;
        }
    }
    dw__free(round);
    return DW_OK;
}

/* ---- requests ------------------------------------------------------------------------------- */

void dw_autoplan_request_default(dw_autoplan_request *request) {
    *request = (dw_autoplan_request){.struct_size = sizeof *request,
                                     .precision = DW_SCHEME_BF16,
                                     .reserve = -1,
                                     .runners_up = 5};
}

static dw_status check_request(const dw_autoplan_request *request) {
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"seq_len", request->seq_len}, {"global_batch", request->global_batch}};
    if (!request->model || !request->hardware)
        return dw__fail(DW_INVALID_ARGUMENT, "the request's model or hardware is NULL");
    for (size_t at = 0; at < DW_COUNT(sizes); at++)
        if (sizes[at].value < 1 || sizes[at].value > 1 << 28)
            return dw__fail(DW_INVALID_ARGUMENT, "%s is %lld; expected 1 to %d", sizes[at].name,
                            (long long)sizes[at].value, 1 << 28);
    DW_RETURN_IF_FAILED(dw_model_sizes_check(request->model));
    if (request->hardware->gpus < 1 || request->hardware->gpus > DW_HARDWARE_MOST_GPUS)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the hardware \"%s\" has %d GPUs; a plan needs 1 to %d: give their number, "
                        "as in h100:64",
                        request->hardware->name, request->hardware->gpus, DW_HARDWARE_MOST_GPUS);
    if (request->precision != DW_SCHEME_COUNT)
        DW_RETURN_IF_FAILED(dw__scheme_check("precision", request->precision, dw__planned_schemes));
    if (!(request->reserve < request->hardware->memory.value))
        return dw__fail(DW_INVALID_ARGUMENT, "reserve is %g bytes; expected less than the GPU's %g",
                        request->reserve, request->hardware->memory.value);
    return DW_OK;
}

/* Collects the constraints except the one with index `without`; -1 keeps all. */
static dw_status limits_of(const dw_autoplan_request *request, int64_t without,
                           dw__limits *limits) {
    dw__limits_begin(limits);
    for (size_t at = 0; at < request->constraint_count; at++)
        if ((int64_t)at != without)
            DW_RETURN_IF_FAILED(dw__limits_add(limits, request->constraints[at]));
    if (request->precision < DW_SCHEME_COUNT) {
        char text[48];
        snprintf(text, sizeof text, "precision=%s", dw_scheme_name(request->precision));
        DW_RETURN_IF_FAILED(dw__limits_add(limits, text));
    }
    dw__limits_finish(limits);
    return DW_OK;
}

/* Checks that the hardware has the figures a plan needs, and supports one of the allowed precisions. */
static dw_status check_hardware(const dw__problem *problem) {
    dw_layout layout = problem->limits.base;
    layout.gpus = layout.dp = layout.global_batch = problem->hardware->gpus;
    dw_status status = DW_OK;
    for (int at = 0; at < DW_SCHEME_COUNT; at++) {
        if (!DW__ALLOWS(&problem->limits, precision, at) ||
            !dw__scheme_in((dw_scheme)at, dw__planned_schemes))
            continue;
        layout.precision = (dw_scheme)at;
        status = dw_layout_check(problem->model, problem->hardware, &layout);
        if (status != DW_UNSUPPORTED) return status;
    }
    return status;
}

/* Reports why no sizes divide: the constraint that must go, or the batch. */
static dw_status fail_empty(const dw_autoplan_request *request, dw__problem *problem) {
    dw_status status = DW_OK;
    dw__meshes meshes = {0};
    int gpus = request->hardware->gpus;
    for (size_t at = 0; at < request->constraint_count; at++) {
        DW_TRY(limits_of(request, (int64_t)at, &problem->limits));
        DW_TRY(dw__space_meshes(problem, gpus, 1, &meshes));
        if (meshes.count)
            DW_TRY(dw__fail(DW_INVALID_ARGUMENT,
                            "no layout of %d GPUs and a batch of %d satisfies \"%s\" and the rest "
                            "of the request; without it some do: choose a value that divides",
                            gpus, problem->global_batch, request->constraints[at]));
    }
    DW_TRY(limits_of(request, -1, &problem->limits));
    int batch = problem->global_batch, nearest = 0;
    problem->global_batch = gpus; /* every number of replicas divides it */
    DW_TRY(dw__space_meshes(problem, gpus, 1, &meshes));
    for (size_t at = 0; at < meshes.count; at++) {
        int64_t dp = meshes.items[at].dp, next = (batch + dp - 1) / dp * dp;
        if (next <= 1 << 28 && (!nearest || next < nearest)) nearest = (int)next;
    }
    status =
        nearest
            ? dw__fail(DW_INVALID_ARGUMENT,
                       "no layout divides a batch of %d sequences evenly over %d GPUs; the next "
                       "larger batch that divides is %d",
                       batch, gpus, nearest)
            : dw__fail(DW_INVALID_ARGUMENT,
                       "no layout of %d GPUs divides the model's %d layers, %d heads, widths "
                       "and sequences of %d tokens under the constraints; change the constraints",
                       gpus, problem->model->layers, problem->model->heads, problem->seq_len);
cleanup:
    dw__free(meshes.items);
    return status;
}

/* ---- results -------------------------------------------------------------------------------- */

static dw_status put_words(dw__autoplan *own, dw__text *text, const char **copy) {
    dw_status status = dw__autoplan_text(own, text->text ? text->text : "", copy);
    dw__text_free(text);
    return status;
}

static dw_status put_other(dw__autoplan *own, const dw__found *found, dw_autoplan_other *other) {
    const dw_prediction *best = &own->plan.prediction;
    dw__text text = {0};
    dw_status status = DW_OK;
    other->found = 1;
    other->layout = found->layout;
    other->prediction = found->prediction;
    other->loss = found->prediction.seconds / best->seconds - 1;
    DW_TRY(dw__evidence_words(own->plan.hardware, &found->layout, &text));
    DW_TRY(put_words(own, &text, &other->unmeasured));
    DW_TRY(dw__loss_words(best, &found->prediction, &text));
    return put_words(own, &text, &other->why);
cleanup:
    dw__text_free(&text);
    return status;
}

/* With `bolder` the layouts may have the plan's axes, and only those with unmeasured parts are listed. */
static dw_status put_runners(dw__autoplan *own, const result *r, int bolder) {
    dw_autoplan_other *others;
    uint32_t count = 0;
    DW_RETURN_IF_FAILED(dw__autoplan_others(own, (size_t)r->count, &others));
    for (int at = 0; at < r->count; at++) {
        dw__text text = {0};
        if (!bolder && same_axes(&r->kept[at].layout, &own->plan.layout)) continue;
        DW_RETURN_IF_FAILED(put_other(own, &r->kept[at], &others[count]));
        dw_status status = dw__layout_words(&r->kept[at].layout, &text);
        if (status == DW_OK) status = dw__autoplan_text(own, text.text, &others[count].name);
        dw__text_free(&text);
        if (status != DW_OK) return status;
        if (!bolder || *others[count].unmeasured) count++;
    }
    if (bolder)
        own->plan.bolder = others, own->plan.bolder_count = count;
    else
        own->plan.runners_up = others, own->plan.runner_up_count = count;
    return DW_OK;
}

/* ---- what if -------------------------------------------------------------------------------- */

typedef struct what_if_list {
    char text[WHAT_IFS_MOST][40];
    int count;
} what_if_list;

static void add_what_if(what_if_list *q, const char *field, int value, const char *name) {
    if (q->count == WHAT_IFS_MOST) return;
    if (name)
        snprintf(q->text[q->count++], sizeof q->text[0], "%s=%s", field, name);
    else
        snprintf(q->text[q->count++], sizeof q->text[0], "%s=%d", field, value);
}

static void add_half_and_double(what_if_list *q, const char *field, int value, int fixed,
                                int most) {
    if (fixed) return;
    if (value > 1 && value % 2 == 0) add_what_if(q, field, value / 2, NULL);
    if (value * 2 <= most) add_what_if(q, field, value * 2, NULL);
}

static void list_what_ifs(const dw__problem *problem, const dw_layout *best, what_if_list *q) {
    const dw_layout *set = &problem->limits.set;
    q->count = 0;
    add_half_and_double(q, "tp", best->tp, set->tp, best->gpus);
    if (best->attention_tp) add_what_if(q, "attention_tp", best->tp, NULL);
    add_half_and_double(q, "pp", best->pp, set->pp, best->gpus);
    add_half_and_double(q, "cp", best->cp, set->cp, best->gpus);
    if (problem->model->experts)
        add_half_and_double(q, "ep", best->ep, set->ep, problem->model->experts);
    add_half_and_double(q, "micro_batch", best->micro_batch, set->micro_batch, best->global_batch);
    for (int at = 0; at <= 3 && !set->zero_stage; at++)
        if (at != best->zero_stage && best->dp * best->cp > 1)
            add_what_if(q, "zero_stage", at, NULL);
    for (int at = 0; at < DW_RECOMPUTE_AUTO && !set->recompute; at++)
        if (at != (int)best->recompute)
            add_what_if(q, "recompute", 0, dw_recompute_name((dw_recompute)at));
    if (!set->offload_layers && !set->offload_optimizer) {
        int layers = best->offload_layers > 0, optimizer = best->offload_optimizer;
        if (layers || optimizer) add_what_if(q, "offload", 0, "none");
        for (int at = 0; at < DW_RECOMPUTE_AUTO && !layers; at++) {
            if (!dw__space_offloads_layers(problem, (dw_recompute)at)) continue;
            add_what_if(q, "offload", 0, optimizer ? "all" : "activations");
            break;
        }
        if (!optimizer && dw__space_offloads_optimizer(problem))
            add_what_if(q, "offload", 0, layers ? "all" : "optimizer");
    }
    if (best->last_stage_layers > 0 && dw__space_may_be_uneven(problem))
        add_what_if(q, "last_stage_layers", 0, NULL);
    for (int at = 0; at < DW_SCHEDULES && !set->schedule && best->pp > 1; at++)
        if (at != (int)best->schedule && at != DW_SCHEDULE_GPIPE)
            add_what_if(q, "schedule", 0, dw_pipeline_schedule_name((dw_pipeline_schedule)at));
}

static dw__mesh mesh_of(const dw_layout *layout) {
    return (dw__mesh){.tp = layout->tp,
                      .cp = layout->cp,
                      .pp = layout->pp,
                      .dp = layout->dp,
                      .ep = layout->ep,
                      .etp = layout->etp,
                      .micro_batch = layout->micro_batch,
                      .precision = (int)layout->precision,
                      .atp = layout->attention_tp ? layout->attention_tp : layout->tp};
}

/* Returns an upper bound of a what-if's seconds, from earlier what-ifs and the sizes of the runners-up. Returns
 * `limit` if neither applies. */
static double known_bound(const dw__problem *changed, const dw__found *kept, int kept_count,
                          const dw_autoplan_other *others, int count, double limit) {
    for (int at = 0; at < count; at++)
        if (others[at].found && others[at].prediction.seconds < limit &&
            dw__limits_allow(&changed->limits, &others[at].layout))
            limit = others[at].prediction.seconds;
    for (int at = 0; at < kept_count; at++) {
        dw__found found;
        dw__mesh mesh = mesh_of(&kept[at].layout);
        if (!allows_mesh(&changed->limits, &mesh)) continue;
        dw__mesh_best(changed, &mesh, limit, 0, NULL, &found);
        if (found.found) limit = found.prediction.seconds;
    }
    return limit;
}

/* Allows unmeasured features if the what-if is about them. */
static void allow_unmeasured(dw__limits *limits, const char *constraint) {
    if (strncmp(constraint, "offload=", 8) == 0) {
        if (!limits->set.offload_layers) limits->high.offload_layers = INT_MAX;
        if (!limits->set.offload_optimizer) limits->high.offload_optimizer = INT_MAX;
    } else if (strncmp(constraint, "schedule=", 9) == 0) {
        limits->high.schedule = (dw_pipeline_schedule)DW_SCHEDULES;
    }
}

static dw_status search_what_if(const dw__problem *problem, dw__meshes *meshes,
                                const char *constraint, const result *plain, int index,
                                dw__autoplan *own, dw_autoplan_other *others) {
    dw_status status = DW_OK;
    dw__problem changed = *problem;
    dw_autoplan_other *other = &others[index];
    result *r = dw__calloc(1, sizeof *r);
    if (!r) return dw__fail_memory("the search for a plan", sizeof *r);
    DW_TRY(dw__autoplan_text(own, constraint, &other->name));
    allow_unmeasured(&changed.limits, constraint);
    DW_TRY(dw__limits_add(&changed.limits, constraint));
    double limit = known_bound(&changed, plain->kept, plain->count, others, index,
                               own->plan.prediction.seconds * WHAT_IF_MOST);
    DW_TRY(search(&changed, meshes, 1, limit, r));
    if (r->count) {
        DW_TRY(put_other(own, &r->kept[0], other));
        goto cleanup;
    }
    int divides = 0;
    for (size_t at = 0; at < meshes->count && !divides; at++)
        divides = allows_mesh(&changed.limits, &meshes->items[at]);
    DW_TRY(dw__autoplan_text(own,
                             divides ? "does not fit, or takes three times as long"
                                     : "does not divide, or does not fit",
                             &other->why));
cleanup:
    dw__free(r);
    return status;
}

static dw_status put_what_ifs(const dw__problem *problem, dw__meshes *meshes, const result *plain,
                              dw__autoplan *own) {
    what_if_list q;
    dw_autoplan_other *others;
    list_what_ifs(problem, &own->plan.layout, &q);
    DW_RETURN_IF_FAILED(dw__autoplan_others(own, (size_t)q.count, &others));
    for (int at = 0; at < q.count; at++)
        DW_RETURN_IF_FAILED(search_what_if(problem, meshes, q.text[at], plain, at, own, others));
    own->plan.what_ifs = others;
    own->plan.what_if_count = (uint32_t)q.count;
    return DW_OK;
}

/* ---- the search ----------------------------------------------------------------------------- */

static dw_status put_best(dw__autoplan *own, const dw__found *best) {
    dw__text text = {0};
    own->plan.layout = best->layout;
    own->plan.prediction = best->prediction;
    dw_status status = dw__evidence_words(own->plan.hardware, &best->layout, &text);
    if (status == DW_OK) return put_words(own, &text, &own->plan.unmeasured);
    dw__text_free(&text);
    return status;
}

/* Reports the constraint without which there is a schedule and a sharding. */
static dw_status fail_no_schedule(const dw_autoplan_request *request, const dw__problem *problem) {
    dw__problem other = *problem;
    for (size_t at = 0; at < request->constraint_count; at++) {
        dw__found found;
        DW_RETURN_IF_FAILED(limits_of(request, (int64_t)at, &other.limits));
        DW_RETURN_IF_FAILED(dw__fit_smallest(&other, problem->hardware->gpus, &found));
        if (!found.found) continue;
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "no schedule and sharding satisfy \"%.64s\" and the rest of the request; leave it out",
            request->constraints[at]);
    }
    return dw__fail(DW_INVALID_ARGUMENT,
                    "no sharding and schedule of framework %s satisfies the constraints; leave "
                    "some of them out",
                    dw_framework_name(problem->limits.base.framework));
}

static dw_status put_no_fit(const dw_autoplan_request *request, const dw__problem *problem,
                            dw__autoplan *own) {
    dw__found smallest;
    dw__text text = {0};
    dw_status status = DW_OK;
    DW_RETURN_IF_FAILED(dw__fit_smallest(problem, problem->hardware->gpus, &smallest));
    if (!smallest.found) return fail_no_schedule(request, problem);
    DW_RETURN_IF_FAILED(put_best(own, &smallest));
    own->plan.prediction.fits = 0;
    DW_TRY(dw__tightest_words(&smallest.layout, &smallest.prediction, &text));
    DW_TRY(dw__autoplan_text(own, text.text, &own->plan.tightest));
    DW_TRY(dw__fit_gpus(problem, &own->plan.gpus_needed));
cleanup:
    dw__text_free(&text);
    return status;
}

/* Lists all meshes of the problem and allocates the memos of their stages. */
static dw_status meshes_of(const dw__problem *problem, dw__meshes *meshes,
                           dw_autoplan_statistics *statistics) {
    DW_RETURN_IF_FAILED(dw__space_meshes(problem, problem->hardware->gpus, 0, meshes));
    if (!meshes->count) return DW_OK;
    size_t remembered = meshes->count < DW__REMEMBERED ? meshes->count : DW__REMEMBERED;
    meshes->stages = dw__calloc(remembered, sizeof *meshes->stages);
    if (!meshes->stages)
        return dw__fail_memory("the search for a plan", remembered * sizeof *meshes->stages);
    bound_meshes(problem, meshes, statistics);
    return DW_OK;
}

static void meshes_free(dw__meshes *meshes) {
    dw__free(meshes->stages);
    dw__free(meshes->items);
    *meshes = (dw__meshes){0};
}

/* Lists layouts that are faster than the plan but have parts that are not measured. */
static dw_status put_bolder(const dw__problem *problem, dw__autoplan *own) {
    enum { BOLDER_MOST = 3 };
    dw_status status = DW_OK;
    dw__meshes meshes = {0};
    result *r = dw__calloc(1, sizeof *r);
    if (!r) return dw__fail_memory("the search for a plan", sizeof *r);
    DW_TRY(meshes_of(problem, &meshes, &r->statistics));
    DW_TRY(search(problem, &meshes, BOLDER_MOST, own->plan.prediction.seconds * (1 - TIE), r));
    DW_TRY(put_runners(own, r, 1));
    own->plan.statistics.predicted += r->statistics.predicted;
cleanup:
    meshes_free(&meshes);
    dw__free(r);
    return status;
}

static dw_status find(const dw_autoplan_request *request, const dw__problem *given,
                      dw__autoplan *own) {
    dw_status status = DW_OK;
    dw__meshes meshes = {0};
    dw__problem problem = *given;
    result *r = dw__calloc(1, sizeof *r);
    dw__found best;
    int kept = request->runners_up + 1;
    if (kept < 1) kept = 1;
    if (kept > KEPT_MOST) kept = KEPT_MOST;
    if (!r) return dw__fail_memory("the search for a plan", sizeof *r);
    if (!request->bold) {
        dw__evidence_limit(own->plan.hardware, &problem.limits);
        DW_TRY(meshes_of(&problem, &meshes, &r->statistics));
        if (meshes.count) DW_TRY(search(&problem, &meshes, kept, HUGE_VAL, r));
    }
    int measured = r->count > 0;
    if (!measured) { /* requested, or nothing measured fits */
        meshes_free(&meshes);
        problem = *given;
        DW_TRY(meshes_of(&problem, &meshes, &r->statistics));
        if (!meshes.count) DW_TRY(fail_empty(request, &problem));
        DW_TRY(search(&problem, &meshes, kept, HUGE_VAL, r));
    }
    if (!r->count) {
        DW_TRY(put_no_fit(request, &problem, own));
    } else {
        DW_TRY(simplify(&problem, &meshes, &r->kept[0], &r->statistics, &best));
        DW_TRY(put_best(own, best.found ? &best : &r->kept[0]));
        DW_TRY(put_runners(own, r, 0));
        if (request->what_ifs) DW_TRY(put_what_ifs(&problem, &meshes, r, own));
    }
    own->plan.statistics = r->statistics;
    if (measured) DW_TRY(put_bolder(given, own));
cleanup:
    meshes_free(&meshes);
    dw__free(r);
    return status;
}

dw_status dw_autoplan_search(const dw_autoplan_request *request, dw_autoplan **plan) {
    dw_status status = DW_OK;
    dw__autoplan *own = NULL;
    double began = dw__seconds();
    static const dw__struct known = {"dw_autoplan_request", sizeof *request, {0}};
    if (!plan) return dw__fail(DW_INVALID_ARGUMENT, "dw_autoplan_search: plan is NULL");
    DW_RETURN_IF_FAILED(dw__struct_read(&known, request, NULL));
    *plan = NULL;
    DW_RETURN_IF_FAILED(check_request(request));
    dw_hardware hardware = *request->hardware;
    double reserve =
        request->reserve < 0 ? DW__PLAN_RESERVE * hardware.memory.value : request->reserve;
    hardware.memory.value -= reserve;
    hardware.host_memory.value *= 1 - HOST_RESERVE;
    dw__problem problem = {.model = request->model,
                           .hardware = &hardware,
                           .seq_len = (int)request->seq_len,
                           .global_batch = (int)request->global_batch};
    DW_RETURN_IF_FAILED(limits_of(request, -1, &problem.limits));
    DW_RETURN_IF_FAILED(dw__space_check(&problem));
    DW_RETURN_IF_FAILED(check_hardware(&problem));
    DW_TRY(dw__autoplan_create(request->model_name, request->model, request->hardware, &own));
    own->plan.reserve = reserve;
    DW_TRY(find(request, &problem, own));
    DW_TRY(dw__prediction_check(&own->plan.prediction));
    own->plan.statistics.seconds = dw__seconds() - began;
    *plan = &own->plan;
    return DW_OK;
cleanup:
    dw_autoplan_destroy(own ? &own->plan : NULL);
    return status;
}
