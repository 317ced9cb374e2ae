/* The emulated machine while it runs: a grid's clusters, their blocks (CTAs), their warps, and the memory they share.
 *
 * A warp executes one operation for all lanes of its current group at once. Lanes that diverge form groups, each with
 * its own program counter. The group with the least program counter runs, so that groups meet again where their paths
 * do, and any group may wait without blocking the others (independent thread scheduling, as since Volta). One host
 * thread runs a cluster and gives its warps turns of random length. The bargain: a cluster is serial, which makes it
 * deterministic for a seed and free of locks; parallelism comes from running several clusters.
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

/* Generic addresses: an address outside of these windows is global and equals the host's address. */
#define DW__SHARED_WINDOW ((uint64_t)1 << 56) /* | rank << 24 | offset */
#define DW__LOCAL_WINDOW ((uint64_t)2 << 56)
#define DW__PARAM_WINDOW ((uint64_t)3 << 56)
#define DW__WINDOW_MASK ((uint64_t)0xFF << 56)
/* The first KiB of a block's shared memory is reserved for the system. */
#define DW__SHARED_FIRST 1024u
#define DW__RANK_SHIFT 24
#define DW__OFFSET_MASK (((uint32_t)1 << DW__RANK_SHIFT) - 1)

/* ---- warps --------------------------------------------------------------------------------- */

typedef enum dw__emu_wait {
    DW__WAIT_NONE,
    DW__WAIT_LANES,    /* at an operation that needs all lanes of the warp */
    DW__WAIT_BARRIER,  /* bar.sync */
    DW__WAIT_MBARRIER, /* mbarrier.try_wait */
    DW__WAIT_CLUSTER,  /* barrier.cluster.wait */
    DW__WAIT_ASYNC,    /* wait_group, tcgen05.wait */
    DW__WAIT_TENSOR,   /* tcgen05.alloc, until other warps free columns */
} dw__emu_wait;

/* Lanes at the same operation. An operation that returns DW__AGAIN has set `wait` and runs again in the warp's next
 * turn; `inside` then says that it has already begun. The operation clears `inside` when it completes. */
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
    dw__emu_group now;               /* the running lanes */
    dw__emu_group others[DW__LANES]; /* groups of lanes that are not running */
    int other_count;
    /* Least pc of the other groups that could run; UINT32_MAX if there are none. */
    uint32_t soonest;
    uint32_t live;  /* lanes that have not exited */
    uint32_t index; /* within the block */
    dw__emu_cta *cta;
    unsigned char *local;   /* DW__LANES times the kernel's local bytes */
    uint8_t *local_defined; /* one bit for each byte of `local`: it was written */
    uint64_t executed;      /* lane instructions */
    uint64_t operations;    /* instructions, including those that had to wait */
    struct {
        uintptr_t first, last;
        uint8_t *defined;
    } recent;            /* the global allocation that the warp accessed last */
    const void *storing; /* the value that the current store writes; NULL: not known */
    bool gave_way;       /* the warp yielded at the end of its last turn */
    /* The warp has arrived at the cluster's barrier and has not waited yet. */
    bool cluster_arrived;
    uint32_t cluster_phase;
    struct dw__emu_wgmma *wgmma;     /* issued MMAs; NULL: none ever */
    struct dw__emu_bulk *bulk;       /* bulk-group copies of its lanes; NULL: none ever */
    struct dw__emu_spin *spin;       /* the state in which the warp seemed to spin; NULL: none */
    struct dw__emu_clock *clock;     /* vector clock, see race.h; NULL without the checker */
    struct dw__emu_pending *pending; /* NULL: none ever */
};

/* Registers that asynchronous work has yet to write: for each place of 64 bytes, the group to wait for; 0: none. */
typedef struct dw__emu_pending {
    uint32_t live;       /* number of places with a group to wait for */
    uint32_t first, end; /* all of them lie in this range */
    /* An early read was reported, and the warp waits for the value. */
    bool reported;
    uint32_t until[]; /* kind << 24 | group */
} dw__emu_pending;
enum { DW__PENDING_WGMMA = 1, DW__PENDING_TENSOR_LOAD = 2 };
/* Returns false if memory is out. */
bool dw__emu_set_pending(dw__emu_warp *w, uint32_t place, uint32_t bytes, uint32_t kind,
                         uint32_t group);
/* Clears what waits for work of `kind` in groups up to this one. */
void dw__emu_clear_pending(dw__emu_warp *w, uint32_t kind, uint32_t group);

#define DW__REGISTER(w, T, offset) ((T *)(void *)((w)->registers + (offset)))

/* ---- blocks -------------------------------------------------------------------------------- */

#define DW__BARRIERS 16
typedef struct dw__emu_barrier {
    uint32_t arrived, expected, phase;
    uint32_t gathered_and, gathered_or,
        gathered_count; /* of bar.red; results of the last phase are in result_* */
    uint32_t result_and, result_or, result_count;
} dw__emu_barrier;

struct dw__emu_cta {
    dw__emu_cluster *cluster;
    uint32_t rank;         /* within the cluster */
    uint32_t id[3];        /* %ctaid */
    unsigned char *shared; /* starts at offset 0 and includes the system's KiB */
    uint32_t shared_bytes;
    uint8_t *defined; /* one bit for each byte of shared memory: it was written */
    dw__emu_barrier barriers[DW__BARRIERS];
    dw__emu_warp *warps;
    uint32_t warp_count, threads;
    /* Access history of shared memory; NULL without the checker. */
    struct dw__emu_race *race;
    struct dw__emu_tensor *tensor; /* tensor memory; NULL before its first use */
};

/* ---- clusters ------------------------------------------------------------------------------ */

/* Asynchronous work of a unit beside the warps: copies, MMAs. The emulator performs it some turns after its issue, in
 * a random order where the architecture does not define one. */
typedef struct dw__emu_async dw__emu_async;
struct dw__emu_async {
    dw__emu_async *next;
    uint64_t due;   /* first turn of the cluster in which it may be performed */
    uint32_t queue; /* work of the same nonzero queue is performed in order */
    bool (*done)(dw__emu_cluster *cluster,
                 dw__emu_async *work);    /* performs the work; false: a fault was reported */
    void (*release)(dw__emu_async *work); /* NULL: dw__free */
    dw__emu_cta *cta;                     /* of the warp that issued it */
    uint32_t warp, lane, pc;              /* for messages */
    /* Copy of the issuer's clock, see race.h; freed with the work. */
    struct dw__emu_clock *clock;
    uint32_t time; /* its own */
    /* A race of this work was reported; one report is enough. */
    bool reported;
};

struct dw__emu_cluster {
    dw__emu_grid *grid;
    uint32_t id[3];
    dw__emu_cta *ctas;
    uint32_t cta_count;
    uint64_t turn;
    uint64_t progress; /* grows with every event that a waiting warp may be waiting for */
    uint32_t loops,
        /* Number of runs without progress, and the run at which the cluster is next checked for spinning. */
        next_look;
    bool spins; /* result of the last check: its warps spin */
    uint64_t random;
    dw__emu_async *work, **work_end;
    struct {
        uint32_t arrived, phase;
    } barrier;
    unsigned char *block; /* the memory of all of the above */
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
    bool cooperative; /* all blocks are resident at once */
    /* For cooperative_groups: bytes, arrivals; NULL if the grid is not cooperative. */
    void *workspace;
    int sm_count, threads; /* threads 0: all threads of the pool */
    /* A warp that executes this many operations without progress is in an endless loop. */
    uint64_t endless;
    uint64_t id;
    void (*print)(void *context, const char *text, size_t bytes); /* NULL: output is discarded */
    void *print_context;
    /* The next cluster that has not begun; cluster launch control takes clusters from here as well. */
    uint64_t next_cluster, cluster_total;
};

/* Takes the next cluster that has not begun. Returns false if there is none left. */
bool dw__emu_take_cluster(dw__emu_grid *grid, uint64_t *index);

static inline uint32_t dw__emu_random(dw__emu_cluster *cluster) { /* xorshift64*: Vigna 2016 */
    uint64_t x = cluster->random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    cluster->random = x;
    return (uint32_t)((x * 0x2545F4914F6CDD1Du) >> 32);
}

/* Runs every cluster of the grid. See emulator.h for the status that a fault causes. */
dw_status dw__emu_run_grid(dw__emu_grid *grid, uint64_t *executed);
/* Runs a warp for at most `turns` operations, until it ends, waits or yields. Returns false if a fault was reported. */
bool dw__emu_run_warp(dw__emu_warp *w, uint32_t turns);
/* Call when a warp has ended; completes barriers that waited only for its threads. */
void dw__emu_barriers_after_exit(dw__emu_cta *cta);
void dw__emu_cluster_after_exit(dw__emu_cluster *cluster);
/* Sets the initial state of a warp. */
void dw__emu_start_warp(dw__emu_warp *w, uint32_t live);

/* Splits these lanes off the running group; they wait at its operation for other lanes of the warp. */
void dw__emu_leave_behind(dw__emu_warp *w, uint32_t lanes);
/* Advances groups of these lanes past the operation at which they wait for other lanes of the warp. */
void dw__emu_let_pass(dw__emu_warp *w, uint32_t lanes);

void dw__emu_free_wgmma(dw__emu_warp *w);
/* Returns whether MMAs of a wgmma group of the warp are pending. */
bool dw__emu_wgmma_in_flight(const dw__emu_warp *w, uint32_t group);

/* Enqueues work, to be performed some turns later. Accepts NULL, a failed allocation: reports it and returns false. */
bool dw__emu_later(dw__emu_cluster *cluster, dw__emu_async *work);

/* ---- memory -------------------------------------------------------------------------------- */

/* DW__STRONG: relaxed, volatile, acquire and release. DW__ORDERS: all of them but relaxed; they order other
 * accesses. */
typedef enum dw__emu_access {
    DW__READ = 1,
    DW__WRITE = 2,
    DW__STRONG = 4,
    DW__ATOMIC = 7,
    DW__ORDERS = 8,
    DW__SAME = 16, /* a write that does not change the value */
} dw__emu_access;

/* Returns the host's address of `bytes` at `address` for a lane. The address is generic (`space` is DW__PTX_REG) or
 * relative to the space; 32-bit shared addresses are relative. Returns NULL after reporting a finding if the range is
 * outside of every allocation or not aligned to `align`. Reads of bytes that were never written are reported and
 * continue. */
void *dw__emu_reach(dw__emu_warp *w, dw__ptx_space space, int lane, uint64_t address,
                    uint32_t bytes, uint32_t align, dw__emu_access access);
/* Returns the block whose shared memory contains all of `bytes` at a shared::cluster address, and the offset in it;
 * NULL if there is none. */
dw__emu_cta *dw__emu_block_at(const dw__emu_cluster *cluster, uint32_t address, uint64_t bytes,
                              uint32_t *offset);
/* Like dw__emu_block_at for a warp's access; returns NULL after reporting a finding. */
unsigned char *dw__emu_shared(dw__emu_warp *w, int lane, uint32_t address, uint32_t bytes,
                              dw__emu_cta **owner);

/* Allocations of global memory. */
dw_status dw__emu_memory_create(dw__emu_memory **memory);
void dw__emu_memory_destroy(dw__emu_memory *memory);
dw_status dw__emu_memory_allocate(dw__emu_memory *memory, size_t bytes, void **address);
/* Returns DW_INVALID_ARGUMENT if nothing was allocated there. */
dw_status dw__emu_memory_release(dw__emu_memory *memory, void *address);
/* Like release, for a kernel's free(). Warps may still cache the allocation, so dw__emu_memory_collect frees the
 * host's memory after the launch. */
dw_status dw__emu_memory_retire(dw__emu_memory *memory, void *address);
void dw__emu_memory_collect(dw__emu_memory *memory);
/* Registers host memory that kernels may use. All of it counts as written. */
dw_status dw__emu_memory_register(dw__emu_memory *memory, void *address, size_t bytes);
/* Marks a range as written by the host, or as undefined again. */
void dw__emu_memory_mark(dw__emu_memory *memory, const void *address, size_t bytes, bool defined);
/* Copies the written marks of `from` to `to`. */
void dw__emu_memory_copy_marks(dw__emu_memory *memory, const void *to, const void *from,
                               size_t bytes);
/* Returns whether the range lies within one allocation. */
bool dw__emu_memory_holds(const dw__emu_memory *memory, const void *address, size_t bytes);
/* Global memory access of the emulator's own units (copies). Returns true if the range may be accessed; *undefined is
 * the number of its bytes that were never written. */
bool dw__emu_memory_touch(dw__emu_memory *memory, uint64_t address, uint32_t bytes, bool write,
                          uint32_t *undefined);
/* Writes a text such as "12 bytes past the end of the allocation of 4096 bytes at 0x...", for messages. */
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
    DW__FOUND_INVALID, /* an operand that the instruction does not support */
} dw__emu_finding;

/* Reports a finding; `lane` -1: of the whole warp. Only the first finding of a kind at a line is kept; all are
 * counted. */
void dw__emu_found(dw__emu_warp *w, int lane, dw__emu_finding kind, const char *format, ...)
    DW_PRINTF(4, 5);
/* Reports that the host is out of memory; returns DW__FAULT. */
dw__emu_next dw__emu_no_memory(dw__emu_warp *w, int lane);
void dw__emu_found_at(dw__emu_cta *cta, uint32_t warp, int lane, uint32_t pc, dw__emu_finding kind,
                      const char *format, ...) DW_PRINTF(6, 7);

#endif
