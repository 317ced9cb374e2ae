#include "plan/tile_cost.h"
#include "sm90/sm90_gemm_params.h"
#include <math.h>

static double ceiling(double value, double step) { return ceil(value / step); }

/* Rows of tiles. The last tile of each group has on average half of its rows; a warpgroup without rows leaves the tensor
 * cores to the other one. */
static double tiles_high(const dw__tile_work *w, int tile_m, bool together) {
    if (w->groups_kind != DW_GROUPS_ROWS) return w->groups * ceiling(w->m, tile_m);
    const bool halves = together || (w->promote && tile_m > 64);
    return w->m / tile_m + w->groups * (halves ? 0.25 : 0.5);
}

/* Clocks between the products of one tile that is computed together and those of the next: the last products end, and
 * sums are rounded, as on an H200; activations by their instructions, four for each clock of an SM's 128 lanes. */
static double clocks_between(const dw__tile_work *w, double elements) {
    static const int instructions[] = {[DW_ACTIVATION_NONE] = 0,
                                       [DW_ACTIVATION_GELU] = 20,
                                       [DW_ACTIVATION_GELU_TANH] = 12,
                                       [DW_ACTIVATION_SWIGLU] = 12};
    return 600 + elements / 40 + elements * instructions[w->activation] / 128;
}

bool dw__sm90_tile_exists(const dw__tile_work *w, int tile_n, bool together) {
    if (w->codes && tile_n != 128 && tile_n != 256) return false;
    if (w->cluster > 0) {
        const int columns = w->activation == DW_ACTIVATION_SWIGLU ? tile_n / 2 : tile_n;
        return w->groups_kind == DW_GROUPS_BATCH && !w->codes && !w->split &&
               columns % (w->activation == DW_ACTIVATION_SWIGLU ? 32 * w->cluster : 32) == 0;
    }
    if (w->split) return together || tile_n == 128; /* the tiles of 128 rows */
    return !together || w->promote || w->element_bytes < 4;
}

/* As on an H200: at each level of the tree a block leaves its sums, and another one finds and adds them. */
enum { LEVEL_CLOCKS = 6000, SUM_BYTES_PER_CLOCK = 64 };

/* Blocks that share tiles have equal shares. If each tile has a number of blocks of its own, no block has parts of two
 * tiles; numbers that are powers of 2 are tried, the largest, and all blocks together. */
static void count_split(const dw__tile_work *w, double elements, double sums, double sm_count,
                        double slower, dw__tile_count *made) {
    /* Where blocks have parts of two tiles: levels that it takes more, and longer products, because blocks read different
     * parts of the contraction at the same time; behind whole rounds of tiles 1.1 to 2.1 times as long as counted. */
    const double more_levels = 1.5, apart_reads = 1.12, apart_behind_rounds = 1.6;
    const double sms = fmax(floor(sm_count), 1), shared = fmod(made->tiles, sms),
                 level = LEVEL_CLOCKS + 2 * sums * 4 / SUM_BYTES_PER_CLOCK,
                 rounds = (made->tiles - shared) / sms;
    made->alone = made->tiles - shared;
    made->clocks = INFINITY;
    if (shared == 0 || made->steps == 0) return;
    const double most = fmin(sms, shared * made->steps), each = floor(most / shared);
    for (double parts = 2; parts < 4 * each; parts *= 2) {
        const bool all = parts >= 2 * each;
        const double blocks = all ? most : shared * fmin(parts, each);
        const bool even = fmod(blocks, shared) == 0;
        const double levels = even ? ceil(log2(blocks / shared))
                                   : ceil(log2(ceil(blocks / shared) + 1)) + more_levels,
                     apart = even         ? 1
                             : rounds > 0 ? apart_behind_rounds
                                          : apart_reads,
                     steps = rounds * made->steps + ceiling(shared * made->steps, blocks) * apart,
                     clocks = steps * made->step_clocks * slower +
                              (rounds + 1) * clocks_between(w, elements) + levels * level;
        if (clocks >= made->clocks) continue;
        made->clocks = clocks;
        made->blocks = blocks;
    }
}

/* Clocks of one round of tiles that clusters compute, as measured on an H200. Where tiles are small, the loads of a stage
 * take longer than its products. Rows that do not exist take as long as others. */
static double cluster_clocks(const dw__tile_work *w, int tile_m, int tile_n, double elements,
                             const dw__tile_count *made) {
    enum { EXCHANGE_CLOCKS = 3200, BYTES_SENT_PER_CLOCK = 40, BYTES_LOADED_PER_CLOCK = 60 };
    const double others = w->cluster - 1, loads = (tile_m + tile_n) * DW_SM90_GEMM_STEP * 2,
                 step = fmax(made->step_clocks, loads / BYTES_LOADED_PER_CLOCK),
                 sent = (double)tile_m * tile_n * 4 * others / w->cluster;
    return ceiling(made->steps, w->cluster) * step + clocks_between(w, elements / w->cluster) +
           (others > 0 ? EXCHANGE_CLOCKS + sent / BYTES_SENT_PER_CLOCK : 0);
}

/* Clusters that run at the same time: those of more than two blocks do not fill all of a GPU's parts (GPC). An H200 has
 * room for 66 of two blocks, 39 of three, 30 of four, 22 of five and 15 of eight. */
static double clusters_at_once(double sm_count, int cluster) {
    const double most = cluster > 2 ? 0.9 * sm_count : sm_count;
    return fmax(floor(most / cluster), 1);
}

dw__tile_count dw__sm90_tile_count(const dw__tile_work *w, int tile_m, int tile_n, bool together,
                                   double sm_count) {
    const int columns = w->activation == DW_ACTIVATION_SWIGLU ? tile_n / 2 : tile_n; /* of D */
    const double tiles = tiles_high(w, tile_m, together) * ceiling(w->n, columns),
                 elements = (double)tile_m * columns;
    const int step = w->codes ? DW_SM90_CODES_STEP : DW_SM90_GEMM_STEP,
              rate = w->codes ? DW__SM90_CODES_FLOPS_PER_CLOCK : DW__SM90_FLOPS_PER_CLOCK;
    double k = w->k;
    if (w->groups_kind == DW_GROUPS_CONTRACTION && w->groups > 0)
        k = ceil(k / w->groups) + step / 2;
    dw__tile_count made = {
        .tiles = ceil(tiles),
        .rounds = ceiling(tiles, sm_count > 0 ? sm_count : 1),
        .steps = ceiling(k, step),
        .step_clocks = 2 * tile_m * tile_n * step / rate,
    };
    if (w->cluster > 0) {
        enum { NEXT_BLOCK = 1500 }; /* its first stage is loaded while the tensor cores wait */
        made.rounds = ceiling(tiles, clusters_at_once(sm_count, w->cluster));
        made.clocks =
            made.rounds * (cluster_clocks(w, tile_m, tile_n, elements, &made) + NEXT_BLOCK) -
            NEXT_BLOCK;
        return made;
    }
    enum { OUT_BYTES_PER_CLOCK = 20 }; /* what an SM gets of the memory */
    const double multiply = made.steps * made.step_clocks,
                 store = elements * (w->residual ? 2 : 1) * w->element_bytes / OUT_BYTES_PER_CLOCK;
    /* Smaller tiles read more: on an H200 their products took 8 % longer than those of 128 x 256. */
    const double slower = tile_m * tile_n < 128 * 256 ? 1.08 : 1;
    if (w->split) {
        count_split(w, elements, (double)tile_m * tile_n, sm_count, slower, &made);
        return made;
    }
    if (w->promote)
        /* Both warpgroups multiply, and then both round D in 16 bits, which is copied meanwhile, or store it in F32. */
        made.clocks =
            multiply * slower + (w->element_bytes < 4 ? clocks_between(w, elements) : store);
    else if (together)
        made.clocks = multiply + clocks_between(w, elements);
    else {
        /* While one warpgroup multiplies, the other stores. A change of turns took 600 clocks. */
        enum { CHANGE = 600 };
        made.clocks = fmax(multiply, (multiply + store) / 2) * slower + CHANGE;
        /* Nothing hides the stores of a block's only tile. */
        if (w->groups_kind == DW_GROUPS_BATCH && made.rounds <= 1) made.clocks += store;
    }
    made.clocks *= made.rounds;
    return made;
}

dw__tile_count dw__sm90_tile_choice(const dw__tile_work *work, double sm_count) {
    static const struct {
        int m, n;
        bool together;
        int cluster;
    } tiles[] = {
#define TILE(rows, columns, stages, both, blocks) {rows, columns, both, blocks},
        DW_SM90_GEMM_TILES(TILE)
#undef TILE
    };
    dw__tile_count best = {.clocks = INFINITY};
    for (int at = 0; at < (int)(sizeof tiles / sizeof *tiles); at++) {
        if (tiles[at].cluster > 0 || !dw__sm90_tile_exists(work, tiles[at].n, tiles[at].together))
            continue;
        const dw__tile_count trial =
            dw__sm90_tile_count(work, tiles[at].m, tiles[at].n, tiles[at].together, sm_count);
        if (trial.clocks * DW__SM90_CLOSE_CLOCKS < best.clocks) best = trial;
    }
    return best;
}
