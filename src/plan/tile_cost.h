/* Work of the project's Hopper GEMM, counted by tiles. The registry's entries of the kernel and the planner's terms for
 * mixtures of experts use the same count, so that a plan and the engine agree about grouped GEMMs. */
#ifndef DW_PLAN_TILE_COST_H
#define DW_PLAN_TILE_COST_H

#include "deepwell/gemm.h"
#include <stdbool.h>

/* Rate of an SM of Hopper, by the data sheet: 989.4 TFLOP/s on 132 SMs at 1.83 GHz. */
enum { DW__SM90_FLOPS_PER_CLOCK = 4096, DW__SM90_CODES_FLOPS_PER_CLOCK = 8192 };

/* One launch of one or more GEMMs. `groups_kind` is a GROUPS of common/gemm_groups.h; m and k count all groups together
 * where these divide them. */
typedef struct dw__tile_work {
    int groups_kind;
    double m, n, k, groups;
    double element_bytes; /* of the result */
    dw_activation activation;
    bool residual; /* the result's elements are read as well */
    bool codes;    /* operands are codes of FP8 */
    bool promote;  /* codes: sums have two levels */
    bool split;    /* blocks share the contraction of tiles (sm90_split.cuh) */
    int cluster;   /* so many blocks compute a tile (sm90_cluster.cuh); 0: of tiles for any call */
} dw__tile_work;

typedef struct dw__tile_count {
    double tiles, rounds; /* rounds: of tiles over all SMs */
    double steps;         /* of the contraction, for each tile */
    int step_clocks;
    double clocks; /* of the SM with the most tiles, at the rate of the data sheet */
    /* With `split`: the tiles that have a block each, in whole rounds, and the blocks that share all others. */
    double alone, blocks;
} dw__tile_count;

/* Elements of D wait in registers while the next tile is computed together: there is no room for F32. With two levels of
 * sums warpgroups share every tile, and elements of 16 bits wait in shared memory. Tiles of 128 rows whose contraction
 * blocks share are always computed together; they exist for one product that fills no whole number of rounds. */
bool dw__sm90_tile_exists(const dw__tile_work *work, int tile_n, bool together);

/* Counts the work in tiles of `tile_m` rows by `tile_n` columns of B, which two warpgroups compute together or each
 * every other one. Groups are taken for equally long. */
dw__tile_count dw__sm90_tile_count(const dw__tile_work *work, int tile_m, int tile_n, bool together,
                                   double sm_count);

/* Counts the work with the tile that the kernel chooses: the one with the fewest clocks, the first of nearly equal
 * ones. */
dw__tile_count dw__sm90_tile_choice(const dw__tile_work *work, double sm_count);

/* Clocks that differ by less than this factor are nearly equal: counted clocks are no closer to measured ones. */
#define DW__SM90_CLOSE_CLOCKS 1.02

#endif
