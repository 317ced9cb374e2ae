#include "emulator/deadlock.h"
#include "emulator/barrier.h"
#include "emulator/finding.h"
#include <stdio.h>
#include <string.h>

#define MOST_STATES 32 /* a finding's text holds no more */

/* Consecutive warps of a block whose lanes wait for the same object at the same operation. */
typedef struct alike {
    const dw__emu_cta *cta;
    uint32_t first, last, mask, object, pc;
    int state; /* a dw__emu_wait, or ENDED */
} alike;

enum { ENDED = DW__WAIT_TENSOR + 1 };

static const char *const states[] = {
    [DW__WAIT_NONE] = "in an endless loop",
    [DW__WAIT_LANES] = "waiting for other lanes of the warp",
    [DW__WAIT_BARRIER] = "waiting at barrier",
    [DW__WAIT_MBARRIER] = "waiting for",
    [DW__WAIT_CLUSTER] = "waiting for the cluster's barrier",
    [DW__WAIT_ASYNC] = "waiting for asynchronous work",
    [DW__WAIT_TENSOR] = "waiting for",
    [ENDED] = "ended",
};

/* Names the variable at a block's shared address, or the offset in dynamic shared memory. */
static void name_shared(const dw__emu_cta *cta, uint32_t offset, char *text, size_t bytes) {
    const dw__emu_kernel *kernel = cta->cluster->grid->kernel;
    for (uint32_t i = 0; i < kernel->shared_variable_count; i++) {
        const struct dw__emu_shared_variable *v = &kernel->shared_variables[i];
        if (offset >= v->first && offset - v->first < v->bytes) {
            snprintf(text, bytes, "%.64s + %u", v->name, offset - v->first);
            return;
        }
    }
    if (offset >= kernel->dynamic_first)
        snprintf(text, bytes, "dynamic shared memory + %u", offset - kernel->dynamic_first);
    else
        snprintf(text, bytes, "no variable");
}

static void describe_object(const alike *a, char *text, size_t bytes) {
    text[0] = '\0';
    if (a->state == DW__WAIT_BARRIER) {
        const dw__emu_barrier *b = &a->cta->barriers[a->object];
        snprintf(text, bytes, " %u (%u of %u threads arrived)", a->object, b->arrived,
                 b->expected ? b->expected : a->cta->threads);
    } else if (a->state == DW__WAIT_MBARRIER) {
        char name[128], state[160];
        name_shared(a->cta, a->object & ((1u << DW__RANK_SHIFT) - 1), name, sizeof name);
        dw__emu_mbarrier_describe(a->cta->cluster, a->object, state, sizeof state);
        snprintf(text, bytes, " %s (%s)", state, name);
    } else if (a->state == DW__WAIT_TENSOR) {
        snprintf(text, bytes, " %u columns of tensor memory", a->object);
    }
}

static void describe(const alike *a, dw__text *out) {
    char object[320], source[300];
    dw__text_printf(out, "; block %u, warp%s %u", a->cta->rank, a->first == a->last ? "" : "s",
                    a->first);
    if (a->first != a->last) dw__text_printf(out, " to %u", a->last);
    if (a->mask != UINT32_MAX) dw__text_printf(out, ", lanes 0x%08x", a->mask);
    describe_object(a, object, sizeof object);
    dw__text_printf(out, ": %s%s", states[a->state], object);
    if (a->state == ENDED) return;
    const dw__emu_kernel *kernel = a->cta->cluster->grid->kernel;
    const dw__ptx_instruction *in = &kernel->function->code.items[kernel->from[a->pc]];
    dw__text_printf(out, ", PTX line %d", in->line);
    dw__emu_describe_location(kernel->module, in->location, source, sizeof source);
    if (source[0]) dw__text_printf(out, " (%s)", source);
}

static bool same(const alike *a, const alike *b) {
    return a->cta == b->cta && a->mask == b->mask && a->state == b->state &&
           a->object == b->object && a->pc == b->pc && b->first == a->last + 1;
}

/* Returns false if there is no room for another state. */
static bool add(alike *list, int *count, const alike *one) {
    for (int i = 0; i < *count; i++) {
        if (!same(&list[i], one)) continue;
        list[i].last = one->last;
        return true;
    }
    if (*count == MOST_STATES) return false;
    list[(*count)++] = *one;
    return true;
}

static bool add_group(alike *list, int *count, const dw__emu_warp *w, const dw__emu_group *g) {
    return add(list, count,
               &(alike){w->cta, w->index, w->index, g->mask, g->object, g->pc, (int)g->wait});
}

void dw__emu_report_deadlock(dw__emu_cluster *cluster, const char *why) {
    alike states_seen[MOST_STATES];
    int count = 0, more = 0;
    dw__text text = {0};
    dw__emu_warp *first = NULL;
    for (uint32_t i = 0; i < cluster->cta_count; i++) {
        for (uint32_t k = 0; k < cluster->ctas[i].warp_count; k++) {
            dw__emu_warp *w = &cluster->ctas[i].warps[k];
            if (!w->live) {
                more += !add(states_seen, &count, &(alike){w->cta, k, k, UINT32_MAX, 0, 0, ENDED});
                continue;
            }
            if (!first) first = w;
            if (w->now.mask) more += !add_group(states_seen, &count, w, &w->now);
            for (int g = 0; g < w->other_count; g++)
                more += !add_group(states_seen, &count, w, &w->others[g]);
        }
    }
    for (int i = 0; i < count; i++) describe(&states_seen[i], &text);
    if (more) dw__text_printf(&text, "; and %d more", more);
    if (first)
        dw__emu_found(first, -1, DW__FOUND_DEADLOCK, "%s%s", why, text.text ? text.text : "");
    dw__text_free(&text);
}
