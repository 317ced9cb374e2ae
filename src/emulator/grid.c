/* Runs grids. Clusters start one after another on the host's threads, run, and are freed when they end. A cluster
 * that can only wait is set aside for others, up to the number of clusters that would be resident on the GPU at once.
 * The bargain: only resident clusters take memory, and a grid that would deadlock on the GPU for lack of residency
 * also deadlocks here.
 */
#include "base/pool.h"
#include "emulator/barrier.h"
#include "emulator/deadlock.h"
#include "emulator/race.h"
#include "emulator/spin.h"
#include "emulator/tensor_memory.h"
#include "emulator/translate.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* Operations that a cluster's warps may run without progress before another cluster gets its thread. */
#define PATIENCE 12500
/* Runs without progress before the warps are checked for spinning. Kernels may compute for long without an effect
 * that other warps could see. */
#define FIRST_LOOK 8
/* A grid's loops count as endless only if each running warp has had at least this share of the limit. */
#define ENDLESS_SHARE 64
/* A warp that has executed this many times the limit of operations is in an endless loop even if it makes progress. */
#define BUSY_SHARE 8
/* Number of times each cluster may be found waiting before the grid is deadlocked. It is large because a try_wait
 * that fails, as it may, can be followed by other work. */
#define HOPELESS 64
/* A warp's turn has a random length of 1 to this many operations. */
#define LONGEST_TURN 256

/* ---- a cluster's life ---------------------------------------------------------------------- */

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static void release(dw__emu_async *work) {
    dw__free(work->clock);
    if (work->release)
        work->release(work);
    else
        dw__free(work);
}
static void release_work(dw__emu_cluster *cluster) {
    while (cluster->work) {
        dw__emu_async *work = cluster->work;
        cluster->work = work->next;
        release(work);
    }
}

static void end_cluster(dw__emu_cluster *cluster) {
    if (!cluster) return;
    release_work(cluster);
    for (uint32_t i = 0; i < cluster->cta_count; i++) {
        for (uint32_t k = 0; k < cluster->ctas[i].warp_count; k++) {
            dw__free(cluster->ctas[i].warps[k].bulk);
            dw__free(cluster->ctas[i].warps[k].pending);
            dw__emu_free_spin(&cluster->ctas[i].warps[k]);
            dw__emu_free_wgmma(&cluster->ctas[i].warps[k]);
        }
        dw__emu_free_tensor(&cluster->ctas[i]);
    }
    dw__emu_race_end(cluster);
    dw__free_aligned(cluster->block);
    dw__free(cluster);
}

/* Allocates one block of memory for everything that a cluster contains. */
static dw_status begin_cluster(dw__emu_grid *grid, uint64_t index, dw__emu_cluster **made) {
    const dw__emu_kernel *kernel = grid->kernel;
    const uint32_t ctas = grid->cluster[0] * grid->cluster[1] * grid->cluster[2];
    const uint32_t threads = grid->block[0] * grid->block[1] * grid->block[2],
                   warps = (threads + DW__LANES - 1) / DW__LANES;
    const uint32_t shared =
        grid->dynamic_shared ? kernel->dynamic_first + grid->dynamic_shared : kernel->shared_bytes;
    const size_t registers = rounded(kernel->register_bytes),
                 local = rounded((size_t)kernel->local_bytes * DW__LANES);
    const size_t per_warp = registers + local + rounded(local / 8) + rounded(sizeof(dw__emu_warp));
    const size_t per_cta = rounded(shared) + rounded(shared / 8 + 1) + warps * per_warp;
    const size_t bytes = rounded(ctas * sizeof(dw__emu_cta)) + ctas * per_cta;

    dw__emu_cluster *cluster = dw__calloc(1, sizeof *cluster);
    if (!cluster) return dw__fail_memory("an emulated cluster", sizeof *cluster);
    *cluster = (dw__emu_cluster){.grid = grid,
                                 .cta_count = ctas,
                                 .next_look = FIRST_LOOK,
                                 .random = (grid->seed + index) * 0x9E3779B97F4A7C15u + 1};
    cluster->work_end = &cluster->work;
    cluster->block = dw__malloc_aligned(bytes);
    if (!cluster->block) {
        dw__free(cluster);
        return dw__fail_memory("an emulated cluster", bytes);
    }
    memset(cluster->block, 0, bytes);
    uint32_t extent[3];
    for (int axis = 0; axis < 3; axis++) extent[axis] = grid->grid[axis] / grid->cluster[axis];
    cluster->id[0] = (uint32_t)(index % extent[0]);
    cluster->id[1] = (uint32_t)(index / extent[0] % extent[1]);
    cluster->id[2] = (uint32_t)(index / extent[0] / extent[1]);

    unsigned char *at = cluster->block;
    cluster->ctas = (dw__emu_cta *)(void *)at;
    at += rounded(ctas * sizeof(dw__emu_cta));
    for (uint32_t rank = 0; rank < ctas; rank++) {
        dw__emu_cta *cta = &cluster->ctas[rank];
        const uint32_t within[3] = {rank % grid->cluster[0],
                                    rank / grid->cluster[0] % grid->cluster[1],
                                    rank / grid->cluster[0] / grid->cluster[1]};
        *cta = (dw__emu_cta){.cluster = cluster,
                             .rank = rank,
                             .shared_bytes = shared,
                             .warp_count = warps,
                             .threads = threads};
        for (int axis = 0; axis < 3; axis++)
            cta->id[axis] = cluster->id[axis] * grid->cluster[axis] + within[axis];
        cta->shared = at, at += rounded(shared);
        cta->defined = at, at += rounded(shared / 8 + 1);
        cta->warps = (dw__emu_warp *)(void *)at, at += warps * rounded(sizeof(dw__emu_warp));
        for (uint32_t i = 0; i < warps; i++) {
            dw__emu_warp *w = &cta->warps[i];
            w->cta = cta;
            w->index = i;
            w->registers = at, at += registers;
            w->local = at, at += local;
            w->local_defined = at, at += rounded(local / 8);
            uint32_t left = threads - i * DW__LANES;
            dw__emu_start_warp(w, left >= DW__LANES ? DW__ALL_LANES : ((uint32_t)1 << left) - 1);
        }
    }
    if (!dw__emu_race_begin(cluster)) {
        end_cluster(cluster);
        return dw__fail_memory("the checker of an emulated cluster", 0);
    }
    *made = cluster;
    return DW_OK;
}

/* ---- work beside the warps ----------------------------------------------------------------- */

bool dw__emu_later(dw__emu_cluster *cluster, dw__emu_async *work) {
    work->due = cluster->turn + dw__emu_random(cluster) % 64;
    work->next = NULL;
    *cluster->work_end = work;
    cluster->work_end = &work->next;
    return true;
}

/* Returns whether an earlier work of the queue is pending. */
static bool is_behind(const dw__emu_cluster *cluster, const dw__emu_async *work) {
    if (work->queue == 0) return false;
    for (const dw__emu_async *other = cluster->work; other != work; other = other->next)
        if (other->queue == work->queue) return true;
    return false;
}

/* Performs the work that is due or, with `any`, the first in the list. Returns false after a fault. */
static bool do_work(dw__emu_cluster *cluster, bool any) {
    for (dw__emu_async **link = &cluster->work; *link;) {
        dw__emu_async *work = *link;
        if ((!any && work->due > cluster->turn) || is_behind(cluster, work)) {
            link = &work->next;
            continue;
        }
        *link = work->next;
        if (cluster->work_end == &work->next) cluster->work_end = link;
        cluster->progress++;
        bool good = work->done(cluster, work);
        release(work);
        if (!good) return false;
        any = false;
    }
    return true;
}

/* ---- running ------------------------------------------------------------------------------- */

typedef enum outcome { FINISHED, WAITING, LOOPING, FAULTED } outcome;

/* Called when warps have run for long without progress. Checks for spinning, at growing intervals if the loops end. */
static outcome run_without_progress(dw__emu_cluster *cluster) {
    if (++cluster->loops < cluster->next_look) return LOOPING;
    const dw__emu_spinning how = dw__emu_spins(cluster);
    if (how == DW__SPINS_FAULT) return FAULTED;
    cluster->spins = how == DW__SPINS;
    if (cluster->spins) return WAITING;
    cluster->next_look = 2 * cluster->loops;
    return LOOPING;
}

/* Loops with a barrier, an atomic addition or a store that changes a value look like progress. */
static bool is_busy_for_ever(const dw__emu_warp *w) {
    return w->operations / BUSY_SHARE > w->cta->cluster->grid->endless;
}

static void report_busy(dw__emu_warp *w) {
    char why[256];
    snprintf(why, sizeof why,
             "warp %u of block %u has executed %llu operations: it is in an endless loop, or "
             "the kernel needs a larger --endless",
             w->index, w->cta->rank, (unsigned long long)w->operations);
    dw__emu_report_deadlock(w->cta->cluster, why);
}

/* Runs until every warp has ended, or there has been no progress for long. */
static outcome run_cluster(dw__emu_cluster *cluster, const bool *stop) {
    uint64_t progress = cluster->progress, idle = 0;
    const uint32_t total = cluster->cta_count * cluster->ctas[0].warp_count;
    while (!__atomic_load_n(stop, __ATOMIC_RELAXED)) {
        bool alive = false, ran = false;
        const uint32_t first = dw__emu_random(cluster) % total;
        for (uint32_t i = 0; i < total; i++) {
            const uint32_t at = (first + i) % total;
            dw__emu_cta *cta = &cluster->ctas[at / cluster->ctas[0].warp_count];
            dw__emu_warp *w = &cta->warps[at % cta->warp_count];
            if (!w->live) continue;
            alive = true;
            const uint32_t turns = 1 + dw__emu_random(cluster) % LONGEST_TURN;
            if (!dw__emu_run_warp(w, turns)) return FAULTED;
            if (is_busy_for_ever(w)) {
                report_busy(w);
                return FAULTED;
            }
            const bool runs = w->now.mask && w->now.wait == DW__WAIT_NONE;
            ran = ran || runs;
            /* A waiting warp has tried one operation. */
            idle += runs && !w->gave_way ? turns : 1;
            cluster->turn++;
            if (cluster->work && !do_work(cluster, false)) return FAULTED;
        }
        if (!alive) {
            while (cluster->work)
                if (!do_work(cluster, true)) return FAULTED;
            for (uint32_t i = 0; i < cluster->cta_count; i++)
                dw__emu_tensor_after_exit(&cluster->ctas[i]);
            return FINISHED;
        }
        if (cluster->progress != progress) {
            progress = cluster->progress, idle = 0;
            cluster->spins = false;
            continue;
        }
        if (cluster->work) {
            if (!ran && !do_work(cluster, true)) return FAULTED;
            if (idle < PATIENCE * 8u) continue;
            if (!do_work(cluster, true)) return FAULTED;
            continue;
        }
        if (!ran) return WAITING;
        if (idle > (cluster->spins ? PATIENCE / 16 : PATIENCE))
            return run_without_progress(cluster);
    }
    return FAULTED;
}

typedef struct running {
    dw__emu_grid *grid;
    pthread_mutex_t lock;
    struct {
        dw__emu_cluster **items;
        size_t count, capacity;
    } aside; /* clusters that could only wait in their last run */
    /* `stuck`: clusters set aside since the last progress of any cluster. */
    uint64_t alive, most_alive, stuck;
    uint64_t looped; /* operations of clusters set aside while running, since the last progress */
    uint64_t executed;
    bool stop;
    dw_status status;
    char message[512];
} running;

static void fail(running *r, dw_status status) {
    if (r->status == DW_OK) {
        r->status = status;
        snprintf(r->message, sizeof r->message, "%s", dw_last_error());
    }
    __atomic_store_n(&r->stop, true, __ATOMIC_RELAXED);
}

/* Atomic, because warps take clusters as well (cluster launch control). */
static uint64_t begun(const dw__emu_grid *grid) {
    return __atomic_load_n(&grid->next_cluster, __ATOMIC_RELAXED);
}
bool dw__emu_take_cluster(dw__emu_grid *grid, uint64_t *index) {
    *index = begun(grid);
    while (*index < grid->cluster_total)
        if (__atomic_compare_exchange_n(&grid->next_cluster, index, *index + 1, false,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return true;
    return false;
}

/* Returns the next cluster to run: a new one while there is room, else the one that was set aside first. */
static dw__emu_cluster *next_cluster(running *r) {
    dw__emu_cluster *cluster = NULL;
    pthread_mutex_lock(&r->lock);
    dw__emu_grid *grid = r->grid;
    uint64_t index;
    if (!r->stop && r->alive < r->most_alive && dw__emu_take_cluster(grid, &index)) {
        r->alive++;
        r->stuck = 0;
        pthread_mutex_unlock(&r->lock);
        dw_status status = begin_cluster(grid, index, &cluster);
        if (status == DW_OK) return cluster;
        pthread_mutex_lock(&r->lock);
        r->alive--;
        fail(r, status);
    } else if (!r->stop && r->aside.count > 0) {
        cluster = r->aside.items[0];
        memmove(r->aside.items, r->aside.items + 1, --r->aside.count * sizeof *r->aside.items);
    }
    pthread_mutex_unlock(&r->lock);
    return cluster;
}

static uint64_t executed_by(const dw__emu_cluster *cluster) {
    uint64_t executed = 0;
    for (uint32_t i = 0; i < cluster->cta_count; i++)
        for (uint32_t k = 0; k < cluster->ctas[i].warp_count; k++)
            executed += cluster->ctas[i].warps[k].executed;
    return executed;
}

/* Returns the number of warps that are not waiting. */
static uint64_t running_warps(const dw__emu_cluster *cluster) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < cluster->cta_count; i++)
        for (uint32_t k = 0; k < cluster->ctas[i].warp_count; k++) {
            const dw__emu_warp *w = &cluster->ctas[i].warps[k];
            count += w->live && w->now.mask && w->now.wait == DW__WAIT_NONE;
        }
    return count;
}

/* Returns whether the operations executed without progress exceed the limit. */
static bool is_endless(const running *r, const dw__emu_cluster *cluster) {
    const uint64_t most = r->grid->endless, warps = r->alive * running_warps(cluster);
    return r->looped > most && r->looped / (warps ? warps : 1) > most / ENDLESS_SHARE;
}

static void work(void *context, int64_t index, int worker) {
    running *r = context;
    (void)index, (void)worker;
    for (dw__emu_cluster *cluster; (cluster = next_cluster(r));) {
        const uint64_t progress = cluster->progress;
        outcome how = run_cluster(cluster, &r->stop);
        bool rest = false;
        pthread_mutex_lock(&r->lock);
        if (how == WAITING || how == LOOPING) {
            if (cluster->progress != progress) r->stuck = r->looped = 0;
            if (how == LOOPING)
                r->looped += PATIENCE, r->stuck = 0;
            else
                r->stuck++;
            const bool alone =
                r->alive == r->aside.count + 1; /* no other cluster runs that could release it */
            const bool no_more =
                begun(r->grid) == r->grid->cluster_total || r->alive == r->most_alive;
            const bool endless = is_endless(r, cluster);
            bool hopeless = alone && no_more && (r->stuck > HOPELESS * r->alive || endless);
            rest = !alone && (r->stuck > r->alive || endless);
            if (hopeless && !r->stop) {
                dw__emu_report_deadlock(cluster, "no warp can continue");
                fail(r, dw__fail(DW_INTERNAL, "kernel %s deadlocked", r->grid->kernel->name));
            } else if (DW_PUSH(&r->aside, cluster) == DW_OK) {
                cluster = NULL;
            } else {
                fail(r, dw__fail_memory("an emulated grid", 0));
            }
        } else {
            r->stuck = r->looped = 0;
            if (how == FAULTED && !r->stop)
                fail(r, dw__fail(DW_INTERNAL, "kernel %s was stopped", r->grid->kernel->name));
        }
        if (cluster) {
            r->alive--;
            r->executed += executed_by(cluster);
        }
        pthread_mutex_unlock(&r->lock);
        end_cluster(cluster);
        if (rest) nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

dw_status dw__emu_run_grid(dw__emu_grid *grid, uint64_t *executed) {
    running r = {.grid = grid, .lock = PTHREAD_MUTEX_INITIALIZER};
    const uint32_t ctas = grid->cluster[0] * grid->cluster[1] * grid->cluster[2];
    grid->cluster_total = (uint64_t)grid->grid[0] * grid->grid[1] * grid->grid[2] / ctas;
    grid->next_cluster = 0;
    int threads = dw__pool_threads();
    if (grid->threads > 0 && grid->threads < threads) threads = grid->threads;
    const int limit = dw__pool_limit(threads);
    r.most_alive = (uint64_t)grid->sm_count / ctas;
    if (grid->cooperative) r.most_alive = grid->cluster_total;
    if (r.most_alive < (uint64_t)threads) r.most_alive = (uint64_t)threads;
    dw__pool_run(threads, work, &r);
    dw__pool_limit(limit);
    for (size_t i = 0; i < r.aside.count; i++) end_cluster(r.aside.items[i]);
    dw__free(r.aside.items);
    pthread_mutex_destroy(&r.lock);
    if (executed) *executed = r.executed;
    return r.status == DW_OK ? DW_OK : dw__fail(r.status, "%s", r.message);
}
