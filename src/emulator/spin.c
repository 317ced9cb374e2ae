#include "emulator/spin.h"
#include <string.h>

/* Longest loop that is recognised, in operations. */
#define LONGEST_LOOP 512

struct dw__emu_spin {
    dw__emu_group now, others[DW__LANES];
    int other_count;
    uint32_t differs; /* where registers differed in the last comparison */
    unsigned char registers[];
};

static bool can_run(const dw__emu_warp *w) {
    if (w->now.mask && w->now.wait == DW__WAIT_NONE) return true;
    for (int i = 0; i < w->other_count; i++)
        if (w->others[i].wait == DW__WAIT_NONE) return true;
    return false;
}

static uint32_t register_bytes(const dw__emu_warp *w) {
    return w->cta->cluster->grid->kernel->register_bytes;
}

static bool remember(dw__emu_warp *w) {
    if (!w->spin) w->spin = dw__malloc(sizeof *w->spin + register_bytes(w));
    if (!w->spin) return false;
    w->spin->now = w->now;
    w->spin->other_count = w->other_count;
    w->spin->differs = 0;
    memcpy(w->spin->others, w->others, (size_t)w->other_count * sizeof *w->others);
    memcpy(w->spin->registers, w->registers, register_bytes(w));
    return true;
}

static bool same_group(const dw__emu_group *a, const dw__emu_group *b) {
    return a->pc == b->pc && a->mask == b->mask && a->inside == b->inside;
}

static bool same_registers(dw__emu_warp *w) {
    struct dw__emu_spin *s = w->spin;
    if (w->registers[s->differs] != s->registers[s->differs]) return false;
    if (memcmp(w->registers, s->registers, register_bytes(w)) == 0) return true;
    for (s->differs = 0; w->registers[s->differs] == s->registers[s->differs];) s->differs++;
    return false;
}

static bool is_as_before(dw__emu_warp *w) {
    const struct dw__emu_spin *s = w->spin;
    if (w->other_count != s->other_count || !same_group(&w->now, &s->now)) return false;
    for (int i = 0; i < w->other_count; i++) {
        bool found = false;
        for (int k = 0; k < s->other_count; k++)
            found = found || same_group(&w->others[i], &s->others[k]);
        if (!found) return false;
    }
    return same_registers(w);
}

/* On DW__SPINS_NOT, the warp's current state is kept for the next comparison. */
static dw__emu_spinning spins(dw__emu_warp *w) {
    const bool known = w->spin != NULL;
    if (known && is_as_before(w)) return DW__SPINS;
    if (!known && !remember(w)) return DW__SPINS_NOT;
    for (int i = 0; i < LONGEST_LOOP; i++) {
        if (!dw__emu_run_warp(w, 1)) return DW__SPINS_FAULT;
        if (!w->live) return DW__SPINS_NOT;
        if (is_as_before(w)) return DW__SPINS;
    }
    (void)remember(w);
    return DW__SPINS_NOT;
}

dw__emu_spinning dw__emu_spins(dw__emu_cluster *cluster) {
    const uint64_t progress = cluster->progress;
    bool all = true;
    for (uint32_t i = 0; i < cluster->cta_count; i++) {
        for (uint32_t k = 0; k < cluster->ctas[i].warp_count; k++) {
            dw__emu_warp *w = &cluster->ctas[i].warps[k];
            if (!w->live || !can_run(w)) continue;
            const dw__emu_spinning how = spins(w);
            if (how == DW__SPINS_FAULT) return how;
            all = all && how == DW__SPINS;
        }
    }
    return all && !cluster->work && cluster->progress == progress ? DW__SPINS : DW__SPINS_NOT;
}

void dw__emu_free_spin(dw__emu_warp *w) { dw__free(w->spin); }
