/* The emulated machine while it runs: a grid's clusters, their blocks (CTAs), their warps, and the memory they
 * share.
 *
 * A warp executes one operation for all lanes of its current group at once. Lanes that branch apart become
 * groups, each with its program counter; the group furthest behind runs, so that they meet again where their
 * paths do, and any group may wait without holding up the others (independent thread scheduling, as since
 * Volta). A cluster belongs to one host thread, which takes its warps in turns of random length.
 */
#ifndef DW_EMULATOR_MACHINE_H
#define DW_EMULATOR_MACHINE_H

#include "emulator/program.h"

#define DW__LANES 32
#define DW__ALL_LANES UINT32_MAX

typedef struct dw__emu_memory dw__emu_memory;
typedef struct dw__emu_findings dw__emu_findings;
typedef struct dw__emu_grid dw__emu_grid;
typedef struct dw__emu_cluster dw__emu_cluster;
typedef struct dw__emu_cta dw__emu_cta;

/* Generic addresses: what lies in no window is global, and is the host's own address. */
#define DW__SHARED_WINDOW ((uint64_t)1 << 56) /* | rank << 24 | offset */
#define DW__LOCAL_WINDOW ((uint64_t)2 << 56)
#define DW__PARAM_WINDOW ((uint64_t)3 << 56)
#define DW__WINDOW_MASK ((uint64_t)0xFF << 56)
/* The first KiB of a block's shared memory is the system's. */
#define DW__SHARED_FIRST 1024u
#define DW__RANK_SHIFT 24
#define DW__OFFSET_MASK (((uint32_t)1 << DW__RANK_SHIFT) - 1)

/* ---- warps --------------------------------------------------------------------------------- */

typedef enum dw__emu_wait {
    DW__WAIT_NONE,
    DW__WAIT_LANES, /* for the other lanes of the warp, at an operation that wants them together */
    DW__WAIT_BARRIER,  /* bar.sync */
    DW__WAIT_MBARRIER, /* mbarrier.try_wait */
    DW__WAIT_CLUSTER,  /* barrier.cluster.wait */
    DW__WAIT_ASYNC,    /* groups of asynchronous work: wait_group, tcgen05.wait */
    DW__WAIT_TENSOR,   /* tcgen05.alloc: for columns that others free */
} dw__emu_wait;

/* Lanes that are at the same operation. An operation that gives DW__AGAIN has said in `wait` what for, and is
 * run once more in the warp's next turn; `inside` tells it then that it has begun. It clears `inside` when it
 * is done. */
typedef struct dw__emu_group {
    uint32_t pc, mask;
    dw__emu_wait wait;
    bool inside;
    uint32_t object; /* number of the barrier, or address */
    uint32_t phase;
    uint32_t tries;
} dw__emu_group;

struct dw__emu_warp {
    unsigned char *registers;
    dw__emu_group now;               /* the lanes that run */
    dw__emu_group others[DW__LANES]; /* the lanes that do not */
    int other_count;
    uint32_t soonest; /* least pc of the others that could run; UINT32_MAX: none */
    uint32_t live;    /* lanes that have not exited */
    uint32_t index;   /* within the block */
    dw__emu_cta *cta;
    unsigned char *local;   /* DW__LANES times the kernel's local bytes */
    uint8_t *local_defined; /* a bit for each of them that has been written */
    uint64_t executed;      /* lane instructions */
    uint64_t operations;    /* instructions, also such as had to wait */
    struct {
        uintptr_t first, last;
        uint8_t *defined;
    } recent; /* the allocation of global memory that it touched last */
    const void *
        storing; /* the value that is about to be written where it asks to reach; NULL: not known */
    bool gave_way;        /* the last turn ended at its own wish */
    bool cluster_arrived; /* at the cluster's barrier, and has not waited yet */
    uint32_t cluster_phase;
    struct dw__emu_wgmma *wgmma; /* products that have been issued; NULL: none ever */
    struct dw__emu_bulk *bulk;   /* bulk-group copies of its lanes; NULL: none ever */
    struct dw__emu_spin *spin;   /* where it was when it seemed to do nothing; NULL: never */
    struct dw__emu_clock
        *clock; /* what it has seen of the others: see race.h; NULL without the checker */
    struct dw__emu_pending *pending; /* NULL: none ever */
};

/* Registers whose value is still on its way: of each place (of 64 bytes) what must be waited for, 0: nothing. */
typedef struct dw__emu_pending {
    uint32_t live;       /* places that something is to be waited for */
    uint32_t first, end; /* they lie between these */
    bool told;           /* that the warp reads early: it waits for loads of tensor memory */
    uint32_t until[];    /* kind << 24 | group */
} dw__emu_pending;
enum { DW__PENDING_WGMMA = 1, DW__PENDING_TENSOR_LOAD = 2 };
/* False: no memory. */
bool dw__emu_set_pending(dw__emu_warp *w, uint32_t place, uint32_t bytes, uint32_t kind,
                         uint32_t group);
/* What of `kind` belongs to groups up to this one has arrived. */
void dw__emu_clear_pending(dw__emu_warp *w, uint32_t kind, uint32_t group);

#define DW__REGISTER(w, T, offset) ((T *)(void *)((w)->registers + (offset)))

/* ---- blocks -------------------------------------------------------------------------------- */

#define DW__BARRIERS 16
typedef struct dw__emu_barrier {
    uint32_t arrived, expected, phase;
    uint32_t gathered_and, gathered_or,
        gathered_count; /* of bar.red; results of the last phase below */
    uint32_t result_and, result_or, result_count;
} dw__emu_barrier;

struct dw__emu_cta {
    dw__emu_cluster *cluster;
    uint32_t rank;         /* within the cluster */
    uint32_t id[3];        /* %ctaid */
    unsigned char *shared; /* from offset 0, the system's KiB included */
    uint32_t shared_bytes;
    uint8_t *defined; /* a bit for each byte of shared memory that has been written */
    dw__emu_barrier barriers[DW__BARRIERS];
    dw__emu_warp *warps;
    uint32_t warp_count, threads;
    struct dw__emu_race *race;     /* who touched shared memory when; NULL without the checker */
    struct dw__emu_tensor *tensor; /* tensor memory; NULL before it is first used */
};

/* ---- clusters ------------------------------------------------------------------------------ */

/* Work that a unit beside the warps does later: copies, products. It is done, not when it is issued, but some turns
 * later, in an order of its own where the architecture promises none. */
typedef struct dw__emu_async dw__emu_async;
struct dw__emu_async {
    dw__emu_async *next;
    uint64_t due;   /* turn of the cluster from which on it may be done */
    uint32_t queue; /* works of the same queue (not 0) are done in order */
    bool (*done)(dw__emu_cluster *cluster,
                 dw__emu_async *work);    /* false: a fault has been reported */
    void (*release)(dw__emu_async *work); /* NULL: dw__free */
    dw__emu_cta *cta;                     /* of the warp that issued it */
    uint32_t warp, lane, pc;              /* for messages */
    struct dw__emu_clock *clock;          /* of its issuer, see race.h; freed with it */
    uint32_t time;                        /* its own */
    bool told;                            /* of a race; one is enough */
};

struct dw__emu_cluster {
    dw__emu_grid *grid;
    uint32_t id[3];
    dw__emu_cta *ctas;
    uint32_t cta_count;
    uint64_t turn;
    uint64_t progress; /* grows whenever anything happens that a waiting warp may wait for */
    uint32_t loops,
        next_look; /* times that it ran without progress; at which of them loops are looked into */
    bool spins;    /* its warps went round in loops when that was last looked into */
    uint64_t random;
    dw__emu_async *work, **work_end;
    struct {
        uint32_t arrived, phase;
    } barrier;
    unsigned char *block; /* memory of all of the above */
};

/* ---- grids --------------------------------------------------------------------------------- */

struct dw__emu_grid {
    const dw__emu_kernel *kernel;
    dw__emu_memory *memory;
    dw__emu_findings *findings;
    const unsigned char *parameters;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t dynamic_shared;
    uint64_t seed;
    bool check;       /* races, undefined reads */
    bool cooperative; /* all blocks live at once */
    void *
        workspace; /* of a cooperative grid, as cooperative_groups wants it: bytes, arrivals; else NULL */
    int sm_count, threads; /* threads 0: the pool's */
    uint64_t endless;      /* operations without anything happening after which loops are */
    uint64_t id;
    void (*print)(void *context, const char *text, size_t bytes); /* NULL: nobody listens */
    void *print_context;
    /* Cluster launch control: the next cluster that nobody has begun. */
    uint64_t next_cluster, cluster_total;
};

/* The number of a cluster that nobody has begun, which is then the caller's; false: there is none left. */
bool dw__emu_take_cluster(dw__emu_grid *grid, uint64_t *index);

static inline uint32_t dw__emu_random(dw__emu_cluster *cluster) { /* xorshift64*: Vigna 2016 */
    uint64_t x = cluster->random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    cluster->random = x;
    return (uint32_t)((x * 0x2545F4914F6CDD1Du) >> 32);
}

/* Runs every cluster of the grid. DW_INTERNAL... see emulator.h for what a fault becomes. */
dw_status dw__emu_run_grid(dw__emu_grid *grid, uint64_t *executed);
/* Runs a warp for `turns` operations at most, until it ends, waits, or gives way. False: a fault has been
 * reported. */
bool dw__emu_run_warp(dw__emu_warp *w, uint32_t turns);
/* A warp has ended: what waited for its threads need not any more. */
void dw__emu_barriers_after_exit(dw__emu_cta *cta);
void dw__emu_cluster_after_exit(dw__emu_cluster *cluster);
/* Where a warp begins. */
void dw__emu_start_warp(dw__emu_warp *w, uint32_t live);

/* These lanes of the running group stay at its operation and wait there for others of the warp. */
void dw__emu_leave_behind(dw__emu_warp *w, uint32_t lanes);
/* Groups of these lanes, which wait for others of the warp, go on behind the operations that they wait at. */
void dw__emu_let_pass(dw__emu_warp *w, uint32_t lanes);

void dw__emu_free_wgmma(dw__emu_warp *w);
/* Whether products of a group of the warp's are still to be done. */
bool dw__emu_wgmma_in_flight(const dw__emu_warp *w, uint32_t group);

/* Adds work, to be done in some turns. NULL is a failure to allocate, which is reported here: the result is false. */
bool dw__emu_later(dw__emu_cluster *cluster, dw__emu_async *work);

/* ---- memory -------------------------------------------------------------------------------- */

/* Strong: relaxed, volatile, acquire, release; the last three order what comes before and after. */
typedef enum dw__emu_access {
    DW__READ = 1,
    DW__WRITE = 2,
    DW__STRONG = 4,
    DW__ATOMIC = 7,
    DW__ORDERS = 8,
    DW__SAME = 16, /* a write that leaves what is there */
} dw__emu_access;

/* The host's address of `bytes` at `address` (generic, or of the space: 32-bit shared addresses count as such), for a
 * lane; NULL after a finding was reported: outside of every allocation, not aligned to `align`. `space` is
 * DW__PTX_REG for generic addresses. Reads of what was never written are reported, and go on. */
void *dw__emu_reach(dw__emu_warp *w, dw__ptx_space space, int lane, uint64_t address,
                    uint32_t bytes, uint32_t align, dw__emu_access access);
/* The block whose shared memory has all of `bytes` at a shared::cluster address, and where in it; NULL: none has. */
dw__emu_cta *dw__emu_block_at(const dw__emu_cluster *cluster, uint32_t address, uint64_t bytes,
                              uint32_t *offset);
/* The same for a warp; NULL after a finding. */
unsigned char *dw__emu_shared(dw__emu_warp *w, int lane, uint32_t address, uint32_t bytes,
                              dw__emu_cta **owner);

/* Allocations of global memory. */
dw_status dw__emu_memory_create(dw__emu_memory **memory);
void dw__emu_memory_destroy(dw__emu_memory *memory);
dw_status dw__emu_memory_allocate(dw__emu_memory *memory, size_t bytes, void **address);
/* DW_INVALID_ARGUMENT: nothing was allocated there. */
dw_status dw__emu_memory_release(dw__emu_memory *memory, void *address);
/* The same by a kernel, whose warps may still have it in mind: the host's memory is freed by `collect`, when the
 * launch has ended. */
dw_status dw__emu_memory_retire(dw__emu_memory *memory, void *address);
void dw__emu_memory_collect(dw__emu_memory *memory);
/* Memory of the host's that kernels may use: all of it counts as written. */
dw_status dw__emu_memory_register(dw__emu_memory *memory, void *address, size_t bytes);
/* Marks as written by the host, or as undefined again. */
void dw__emu_memory_mark(dw__emu_memory *memory, const void *address, size_t bytes, bool defined);
/* As far written as the other range. */
void dw__emu_memory_copy_marks(dw__emu_memory *memory, const void *to, const void *from,
                               size_t bytes);
/* Whether the range lies within one allocation. */
bool dw__emu_memory_holds(const dw__emu_memory *memory, const void *address, size_t bytes);
/* Global memory for the emulator's own units (copies): true where the range may be touched; *undefined counts its
 * bytes that nobody wrote. */
bool dw__emu_memory_touch(dw__emu_memory *memory, uint64_t address, uint32_t bytes, bool write,
                          uint32_t *undefined);
/* "12 bytes past the end of the allocation of 4096 bytes at 0x...", for messages. */
void dw__emu_memory_describe(const dw__emu_memory *memory, uint64_t address, char *text,
                             size_t bytes);

/* ---- findings ------------------------------------------------------------------------------ */

typedef enum dw__emu_finding {
    DW__FOUND_BOUNDS,
    DW__FOUND_ALIGNMENT,
    DW__FOUND_UNDEFINED,
    DW__FOUND_EARLY, /* read before the wait that makes it valid */
    DW__FOUND_PROXY, /* no fence between generic and asynchronous accesses */
    DW__FOUND_RACE,
    DW__FOUND_MBARRIER,
    DW__FOUND_TENSOR_MEMORY,
    DW__FOUND_DIVERGENCE,
    DW__FOUND_DEADLOCK,
    DW__FOUND_TRAP,
    DW__FOUND_ASSERT,
    DW__FOUND_INVALID, /* an operand that the instruction does not take */
} dw__emu_finding;

/* `lane` -1: the warp. Only the first finding of a kind at a line is kept; all are counted. */
void dw__emu_found(dw__emu_warp *w, int lane, dw__emu_finding kind, const char *format, ...)
    DW_PRINTF(4, 5);
/* The host has no memory left: a finding, and DW__FAULT. */
dw__emu_next dw__emu_no_memory(dw__emu_warp *w, int lane);
void dw__emu_found_at(dw__emu_cta *cta, uint32_t warp, int lane, uint32_t pc, dw__emu_finding kind,
                      const char *format, ...) DW_PRINTF(6, 7);

#endif
