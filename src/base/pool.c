/* The thread pool.
 *
 * One 32-bit word holds the protocol's state, and idle workers sleep on it (futex):
 *
 *     state:  [ generation, 22 bits | open, 1 bit | workers inside, 9 bits ]
 *
 * The caller writes the job's fields, then opens a new generation. A worker enters by adding one to the word
 * while it is open, takes indexes until they run out, and leaves by subtracting one. When the indexes have
 * run out, the caller closes the word and waits until no worker is inside; only then may the job's fields
 * change. A worker that wakes too late finds the word closed and does nothing, and the caller never waits for
 * a thread that the kernel has not scheduled. A worker may enter a later generation than the one that it saw:
 * it reads the fields only after it has entered. */
#include "base/pool.h"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    INSIDE_MASK = 0x1ff, /* up to DW_POOL_MAX_THREADS - 1 workers */
    OPEN = 0x200,
    GENERATION = 0x400,
    CACHE_LINE = 64,
};
_Static_assert(DW_POOL_MAX_THREADS - 1 <= INSIDE_MASK, "the count of workers inside must fit");

/* Longer than the gap between two operations of a training step, much shorter than a time slice. */
static const double SPIN_SECONDS = 50e-6;

static struct {
    pthread_mutex_t turn; /* held by the caller whose loop is running; guards the plain fields */

    /* Job fields: the caller writes them while no worker is inside; workers inside read them. */
    dw__task task;
    void *context;
    int64_t count;
    int helpers; /* workers with numbers up to this may take part */

    int workers; /* started, besides the caller */
    pthread_t threads[DW_POOL_MAX_THREADS];

    _Atomic int wanted; /* threads including the caller; 0: not decided yet */
    _Atomic bool stop;
    _Atomic bool spin;          /* no more threads than CPUs; may change while workers run */
    _Atomic uint32_t sleepers;  /* workers that sleep, or are about to sleep, on `state` */
    _Atomic bool caller_sleeps; /* the caller sleeps on `emptied` */

    /* The contended words have a cache line each. */
    _Alignas(CACHE_LINE) _Atomic uint32_t state;
    _Alignas(CACHE_LINE) _Atomic int64_t next;
    _Alignas(CACHE_LINE) _Atomic uint32_t emptied; /* times that the last worker left */
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local bool inside_task;
static _Thread_local int own_worker;
static _Thread_local int limit; /* most threads for the loops of this caller; 0: no limit */

/* ---- waiting ------------------------------------------------------------------------------- */

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int threads) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins until (state & mask) differs from `value`. Returns false on timeout. */
static bool spin_while(uint32_t mask, uint32_t value) {
    enum { LOOKS_PER_CLOCK = 16 };
    if (!atomic_load_explicit(&pool.spin, memory_order_relaxed))
        return (atomic_load(&pool.state) & mask) != value;
    double deadline = dw__seconds() + SPIN_SECONDS;
    do {
        for (int look = 0; look < LOOKS_PER_CLOCK; look++) {
            if ((atomic_load(&pool.state) & mask) != value) return true;
            pause_briefly();
        }
    } while (dw__seconds() < deadline);
    return false;
}

/* ---- workers ------------------------------------------------------------------------------- */

static void take_indexes(int worker) {
    if (worker > pool.helpers) return;
    for (;;) {
        int64_t index = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (index >= pool.count) return;
        pool.task(pool.context, index, worker);
    }
}

/* Returns true once inside an open generation. Otherwise `seen` is the state that was closed. */
static bool enter(uint32_t *seen) {
    uint32_t state = atomic_load(&pool.state);
    while (state & OPEN) {
        if (atomic_compare_exchange_weak(&pool.state, &state, state + 1)) {
            *seen = state;
            return true;
        }
    }
    *seen = state;
    return false;
}

static void leave(void) {
    uint32_t before = atomic_fetch_sub(&pool.state, 1);
    if ((before & INSIDE_MASK) != 1 || (before & OPEN)) return;
    atomic_fetch_add(&pool.emptied, 1);
    if (atomic_load(&pool.caller_sleeps)) wake(&pool.emptied, 1);
}

/* Returns when the generation differs from the one in `seen`, or spuriously. */
static void await_generation(uint32_t seen) {
    const uint32_t generation_mask = ~(uint32_t)(GENERATION - 1);
    if (spin_while(generation_mask, seen & generation_mask)) return;
    /* The worker counts itself before its last look at the state, and the caller reads the count after
     * publishing. One of the two sees the other, so no wake-up is lost. */
    atomic_fetch_add(&pool.sleepers, 1);
    uint32_t state = atomic_load(&pool.state);
    if ((state & generation_mask) == (seen & generation_mask)) sleep_while(&pool.state, state);
    atomic_fetch_sub(&pool.sleepers, 1);
}

static void *work(void *argument) {
    inside_task = true;
    own_worker = (int)(intptr_t)argument;
    uint32_t seen = 0;
    for (;;) {
        if (enter(&seen)) {
            take_indexes(own_worker);
            leave();
        }
        /* The caller sets `stop` before it begins the generation that wakes the workers, so that a worker whose `seen`
         * is of that generation, which it would wait to end, finds `stop` set here. */
        if (atomic_load(&pool.stop)) return NULL;
        await_generation(seen);
    }
}

/* ---- starting and stopping; `turn` is held --------------------------------------------------- */

static int usable_cpus(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN); /* a cpu_set_t cannot hold so many CPUs */
    return online > 0 ? (int)(online < INT_MAX ? online : INT_MAX) : 1;
}

static int default_threads(void) {
    int cpus = usable_cpus();
    if (cpus > DW_POOL_MAX_THREADS) cpus = DW_POOL_MAX_THREADS;
    const char *text = getenv("DEEPWELL_THREADS");
    if (!text || !*text) return cpus;
    char *end = NULL;
    long threads = strtol(text, &end, 10);
    if (*end == '\0' && threads >= 1 && threads <= DW_POOL_MAX_THREADS) return (int)threads;
    dw__log(DW_LOG_WARNING, "DEEPWELL_THREADS is \"%s\", not a number from 1 to %d: using %d", text,
            DW_POOL_MAX_THREADS, cpus);
    return cpus;
}

/* A forked child has only the calling thread, and the other fields are in an arbitrary state. */
static void forget_workers(void) {
    pthread_mutex_init(&pool.turn, NULL);
    pool.workers = 0;
    atomic_store(&pool.stop, false);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.caller_sleeps, false);
    atomic_store(&pool.state, 0);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void start_workers(int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    atomic_store(&pool.spin, threads <= usable_cpus());

    /* Workers block all signals: they belong to the program's own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.workers < threads - 1) {
        int worker = pool.workers + 1;
        int error = EAGAIN; /* the error of a system that has no memory for a stack */
        if (dw__memory_allowed())
            error =
                pthread_create(&pool.threads[pool.workers], NULL, work, (void *)(intptr_t)worker);
        if (error != 0) {
            /* With fewer threads the results are the same, but slower. */
            char reason[128];
            dw__log(DW_LOG_WARNING, "thread %d of %d did not start: %s; continuing with %d", worker,
                    threads, strerror_r(error, reason, sizeof reason), worker);
            atomic_store(&pool.wanted, worker);
            break;
        }
        char name[32]; /* the kernel allows 15 letters, enough for 256 workers */
        snprintf(name, sizeof name, "deepwell-%d", worker);
        pthread_setname_np(pool.threads[pool.workers], name);
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void stop_workers(void) {
    atomic_store(&pool.stop, true);
    atomic_fetch_add(&pool.state, GENERATION);
    wake(&pool.state, INT_MAX);
    while (pool.workers > 0) pthread_join(pool.threads[--pool.workers], NULL);
    atomic_store(&pool.stop, false);
}

static int decide_threads(void) {
    int threads = atomic_load(&pool.wanted);
    if (threads != 0) return threads;
    int decided = default_threads();
    return atomic_compare_exchange_strong(&pool.wanted, &threads, decided) ? decided : threads;
}

/* ---- the loop ------------------------------------------------------------------------------ */

static void open_generation(int64_t count, int helpers, dw__task task, void *context) {
    pool.task = task;
    pool.context = context;
    pool.count = count;
    pool.helpers = helpers;
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    /* The word is closed and nobody is inside, so no other thread changes it now. */
    atomic_store(&pool.state, (atomic_load(&pool.state) + GENERATION) | OPEN);
    if (atomic_load(&pool.sleepers) > 0) {
        /* If only some workers may help, all are woken, so that the helpers are among them. */
        int64_t sleepers = pool.workers;
        if (helpers >= pool.workers && count - 1 < sleepers) sleepers = count - 1;
        wake(&pool.state, (int)sleepers);
    }
}

static void close_generation(void) {
    atomic_fetch_and(&pool.state, ~(uint32_t)OPEN);
    if (!(atomic_load(&pool.state) & INSIDE_MASK)) return;
    for (;;) {
        uint32_t emptied = atomic_load(&pool.emptied);
        uint32_t inside = atomic_load(&pool.state) & INSIDE_MASK;
        if (inside == 0) return;
        if (spin_while(INSIDE_MASK, inside)) continue;
        atomic_store(&pool.caller_sleeps, true);
        sleep_while(&pool.emptied, emptied);
        atomic_store(&pool.caller_sleeps, false);
    }
}

static void run_serially(int64_t count, dw__task task, void *context) {
    for (int64_t index = 0; index < count; index++) task(context, index, own_worker);
}

void dw__pool_run(int64_t count, dw__task task, void *context) {
    if (inside_task) {
        run_serially(count, task, context);
        return;
    }
    /* Serial loops wait for their turn too: worker 0's scratch belongs to one caller at a time. */
    pthread_mutex_lock(&pool.turn);
    inside_task = true;
    int threads = decide_threads();
    if (limit > 0 && limit < threads) threads = limit;
    if (count > 1 && pool.workers < threads - 1) start_workers(threads);
    if (count > 1 && pool.workers > 0 && threads > 1) {
        open_generation(count, threads - 1, task, context);
        take_indexes(0);
        close_generation();
    } else {
        run_serially(count, task, context);
    }
    inside_task = false;
    pthread_mutex_unlock(&pool.turn);
}

int dw__pool_threads(void) { return limit > 0 ? limit : decide_threads(); }

int dw__pool_limit(int threads) {
    int before = limit;
    limit = threads;
    return before;
}

dw_status dw__pool_set_threads(int threads) {
    if (threads < 1 || threads > DW_POOL_MAX_THREADS) {
        return dw__fail(DW_INVALID_ARGUMENT, "threads is %d: expected 1 to %d", threads,
                        DW_POOL_MAX_THREADS);
    }
    if (inside_task) {
        return dw__fail(DW_STATE,
                        "threads cannot be set to %d from inside a parallel loop; set it "
                        "before the work starts",
                        threads);
    }
    pthread_mutex_lock(&pool.turn);
    if (threads - 1 != pool.workers) stop_workers();
    atomic_store(&pool.wanted, threads);
    pthread_mutex_unlock(&pool.turn);
    return DW_OK;
}

dw_status dw_set_threads(int threads) { return dw__pool_set_threads(threads); }

int dw_get_threads(void) { return decide_threads(); }
