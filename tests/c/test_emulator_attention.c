/* Attention forward of sm_100 (cuda/sm100/sm100_attention_forward.cu) on the emulator, against FP64: its PTX as the
 * compiler makes it, with the checker on. */
#include "common/attention_params.h"
#include "deepwell/hardware.h"
#include "emulated_attention.h"
#include "emulated_kernel.h"
#include "sm100/attention_forward_tiles.h"
#include <math.h>

typedef struct variant {
    int head_dim, window, tile_m, tile_n, stages, consumers, element, polynomial;
} variant;
#define ROW(...) {__VA_ARGS__},
static const variant variants[] = {EMULATED_ATTENTION_FORWARD(ROW)};

/* Distribution of the scores. */
typedef enum content {
    RANDOM,
    /* The maximum grows much with every block of keys, in the order from the last block to the first. */
    GROWS,
    CREEPS,  /* the maximum grows, but exceeds the kernel's threshold only over several blocks */
    SHRINKS, /* the first block processed has the maximum */
    /* Probabilities are powers of 2 and values small integers: every sum is exact in F32. */
    INTEGERS,
} content;

enum { NO_LIMIT = 1 << 30 };

typedef struct problem {
    variant v;
    content content;
    int batch, heads_q, heads_kv, rows_q, rows_k, head_dim; /* number of columns in memory */
    int left, right;                                        /* -1: no limit */
    /* Heads lie between rows; otherwise a head's rows are contiguous. */
    bool bottom_right, interleaved;
    int blocks; /* largest number of blocks in the grid */
    float scale;
    uint64_t seed;
    const char *without; /* opcode that is removed, which makes the kernel wrong; or NULL */
} problem;

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }

/* ---- tensors ------------------------------------------------------------------------------------- */

/* [batch, heads, rows, head_dim], or with heads and rows exchanged. `m` has one row for each row of a head. */
typedef struct tensor {
    matrix m;
    int batch, heads, rows;
    bool interleaved;
} tensor;

static int line_of(const tensor *t, int batch, int head, int row) {
    return t->interleaved ? (batch * t->rows + row) * t->heads + head
                          : (batch * t->heads + head) * t->rows + row;
}

static void make_tensor(tensor *t, dw_emulator *emulator, const problem *p, int heads, int rows) {
    *t = (tensor){.batch = p->batch, .heads = heads, .rows = rows, .interleaved = p->interleaved};
    make_matrix(&t->m, emulator, p->batch * heads * rows, p->head_dim,
                p->v.element ? MATRIX_F16 : MATRIX_BF16);
}

static dw_strided strided(const tensor *t) {
    const long long line = (long long)(t->m.pitch / 2);
    return (dw_strided){.data = t->m.device,
                        .batch = line * t->heads * t->rows,
                        .head = t->interleaved ? line : line * t->rows,
                        .row = t->interleaved ? line * t->heads : line};
}

/* Sets the same parameters as src/kernel/cuda/attention.c. */
static void make_tensor_map(const tensor *t, uint32_t box_rows, void *map) {
    const dw_strided s = strided(t);
    dw_emulator_tensor_shape shape = {
        .struct_size = sizeof shape,
        .element = t->m.type == MATRIX_F16 ? 6 : 9,
        .rank = 4,
        .address = t->m.device,
        .size = {(uint64_t)t->m.columns, (uint64_t)t->rows, (uint64_t)t->heads, (uint64_t)t->batch},
        .stride = {2 * (uint64_t)s.row, 2 * (uint64_t)s.head, 2 * (uint64_t)s.batch},
        .box = {64, box_rows, 1, 1},
        .step = {1, 1, 1, 1},
        .swizzle = 3,
    };
    assert_int_equal(dw_emulator_tensor_map(&shape, map), DW_OK);
}

/* ---- the kernel ---------------------------------------------------------------------------------- */

static dw__jit_variant jit_of(const variant *v) {
    dw__jit_variant jit = {.source = "sm100/sm100_attention_forward.cu", .arch = "sm_100f"};
    dw__jit_add_define(&jit, "HEAD_DIM", v->head_dim);
    dw__jit_add_define(&jit, "ELEMENT", v->element);
    dw__jit_add_define(&jit, "SOFTCAP", 0);
    dw__jit_add_define(&jit, "DROPOUT", 0);
    dw__jit_add_define(&jit, "PACKED", 0);
    dw__jit_add_define(&jit, "WINDOW", v->window);
    dw__jit_add_define(&jit, "TILE_M", v->tile_m);
    dw__jit_add_define(&jit, "TILE_N", v->tile_n);
    dw__jit_add_define(&jit, "CONSUMERS", v->consumers);
    dw__jit_add_define(&jit, "STAGES", v->stages);
    if (v->polynomial) dw__jit_add_define(&jit, "POLYNOMIAL", v->polynomial);
    return jit;
}

typedef struct run {
    dw_emulator *emulator;
    tensor q, k, v, o;
    matrix lse;
    uint64_t instructions;
} run;

/* Scale of scores as exponents of 2; it is 1 if scores are integers, so that they are exact. */
static float scale_log2(const problem *p) {
    return p->content == INTEGERS ? 1.0f : (float)((double)p->scale * 1.4426950408889634);
}

static dw_status launch(const problem *p, run *r) {
    const variant *v = &p->v;
    const dw__jit_variant jit = jit_of(v);
    dw_emulator_module *module = load_variant(r->emulator, &jit, p->without);
    _Alignas(64) unsigned char map_q[128], map_k[128], map_v[128], map_o[128];
    make_tensor_map(&r->q, DW_SM100_FORWARD_ROWS, map_q);
    make_tensor_map(&r->k, (uint32_t)v->tile_n, map_k);
    make_tensor_map(&r->v, (uint32_t)v->tile_n, map_v);
    make_tensor_map(&r->o, DW_SM100_FORWARD_BOX_ROWS, map_o);
    dw_attention_params params = {
        .batch = p->batch,
        .heads_q = p->heads_q,
        .heads_kv = p->heads_kv,
        .group = p->heads_q / p->heads_kv,
        .rows_q = p->rows_q,
        .rows_k = p->rows_k,
        .head_dim = p->head_dim,
        .scale = p->scale,
        .scale_log2 = scale_log2(p),
        .window_left = p->left < 0 ? NO_LIMIT : p->left,
        .window_right = p->right < 0 ? NO_LIMIT : p->right,
        .bottom_right = p->bottom_right,
        .keep_scale = 1,
        .q = strided(&r->q),
        .k = strided(&r->k),
        .v = strided(&r->v),
        .o = strided(&r->o),
        .lse = r->lse.device,
        .tiles = (p->rows_q + v->tile_m - 1) / v->tile_m * p->heads_q * p->batch,
    };
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    options.grid[0] = (uint32_t)least(params.tiles, p->blocks);
    options.block[0] = DW_SM100_FORWARD_THREADS;
    options.shared_bytes =
        DW_SM100_FORWARD_SHARED_BYTES(v->head_dim, v->tile_m, v->tile_n, v->stages);
    dw_status status =
        dw_emulator_launch(module, "sm100_attention_forward", &options,
                           (void *[]){map_q, map_k, map_v, map_o, &params}, &r->instructions);
    dw_emulator_unload(module);
    copy_out(&r->o.m, r->emulator);
    copy_out(&r->lse, r->emulator);
    return status;
}

/* ---- data ----------------------------------------------------------------------------------------- */

/* Returns the amount that a key adds to its scores, in log2: column 0 is 1 for queries and this amount for keys. */
static float offset_of(const problem *p, int key, uint64_t *state) {
    const int block = key / p->v.tile_n, last = (p->rows_k - 1) / p->v.tile_n;
    switch (p->content) {
    case GROWS: return 24.0f * (float)(last - block);
    case CREEPS: return 3.0f * (float)(last - block);
    case SHRINKS: return 12.0f * (float)block;
    case INTEGERS: return (float)(random_word(state) % 4) + (block < last ? 9.0f : 0.0f);
    default: return 0;
    }
}

static void fill(const problem *p, run *r) {
    uint64_t state = p->seed;
    const bool integers = p->content == INTEGERS;
    for (int i = 0; i < r->q.m.rows; i++)
        for (int j = 0; j < p->head_dim; j++)
            set(&r->q.m, i, j, integers ? 0 : random_value(&state, false));
    for (int i = 0; i < r->k.m.rows; i++)
        for (int j = 0; j < p->head_dim; j++) {
            set(&r->k.m, i, j, random_value(&state, integers));
            set(&r->v.m, i, j, random_value(&state, integers));
        }
    if (p->content == RANDOM) return;
    for (int i = 0; i < r->q.m.rows; i++) {
        set(&r->q.m, i, 0, 1);
        if (integers) set(&r->q.m, i, 1, (float)(random_word(&state) % 2));
    }
    for (int b = 0; b < p->batch; b++)
        for (int h = 0; h < p->heads_kv; h++)
            for (int j = 0; j < p->rows_k; j++) {
                const int line = line_of(&r->k, b, h, j);
                set(&r->k.m, line, 0, offset_of(p, j, &state) / scale_log2(p));
                if (integers) set(&r->k.m, line, 1, (float)(random_word(&state) % 2));
            }
}

static void open_run(const problem *p, run *r) {
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    options.seed = p->seed;
    *r = (run){0};
    assert_int_equal(dw_emulator_create("sm_100a", &options, &r->emulator), DW_OK);
    make_tensor(&r->q, r->emulator, p, p->heads_q, p->rows_q);
    make_tensor(&r->k, r->emulator, p, p->heads_kv, p->rows_k);
    make_tensor(&r->v, r->emulator, p, p->heads_kv, p->rows_k);
    make_tensor(&r->o, r->emulator, p, p->heads_q, p->rows_q);
    make_matrix(&r->lse, r->emulator, 1, p->batch * p->heads_q * p->rows_q, MATRIX_F32);
    fill(p, r);
    matrix *all[] = {&r->q.m, &r->k.m, &r->v.m, &r->o.m, &r->lse};
    for (size_t i = 0; i < DW_COUNT(all); i++) copy_in(all[i], r->emulator);
}
static void close_run(run *r) {
    dw_emulator_destroy(r->emulator);
    matrix *all[] = {&r->q.m, &r->k.m, &r->v.m, &r->o.m, &r->lse};
    for (size_t i = 0; i < DW_COUNT(all); i++) free(all[i]->host);
}

/* ---- expected results ----------------------------------------------------------------------------- */

/* One row of queries: its keys first .. last - 1, their probabilities, and bounds of the probabilities' relative errors
 * from a kernel's F32 arithmetic:
 * - a score is a sum of head_dim products, off by at most head_dim 2^-23 of the sum of their magnitudes (each
 *   addition truncated);
 * - its exponent, in base 2, is a fused multiply-add whose addend is rounded as well, and a factor log2(e) that was
 *   rounded: 2^-24 of each, which are at most twice the largest score; ex2.approx is off by 2^-22, the polynomial by
 * 2^-18;
 * - for every block of keys the same again, where the maximum grows. */
typedef struct row {
    int first, last;
    double *probability, *off;
    double lse, largest; /* the largest magnitude of the scores, scaled */
    /* Relative error of the sum of probabilities: that of its terms, and the roundings of its additions. */
    double off_sum;
} row;

static void find_row(const problem *p, const run *r, int b, int h, int i, row *x) {
    const int head_kv = h / (p->heads_q / p->heads_kv),
              center = i + (p->bottom_right ? p->rows_k - p->rows_q : 0);
    const int line = line_of(&r->q, b, h, i);
    const double scale = p->content == INTEGERS ? log(2) : p->scale;
    double greatest = -INFINITY, sum = 0;
    x->first = p->left < 0 ? 0 : most(0, center - p->left);
    x->last = p->right < 0 ? p->rows_k : least(p->rows_k, center + p->right + 1);
    x->largest = 0;
    for (int j = x->first; j < x->last; j++) {
        double score = 0, magnitude = 0;
        for (int d = 0; d < p->head_dim; d++) {
            double product =
                (double)get(&r->q.m, line, d) * get(&r->k.m, line_of(&r->k, b, head_kv, j), d);
            score += product;
            magnitude += fabs(product);
        }
        x->probability[j] = scale * score;
        x->off[j] = p->head_dim * 0x1p-23 * scale * magnitude;
        if (scale * score > greatest) greatest = scale * score;
        if (fabs(scale * score) > x->largest) x->largest = fabs(scale * score);
    }
    const int blocks = (x->last - x->first) / p->v.tile_n + 2;
    for (int j = x->first; j < x->last; j++) {
        sum += x->probability[j] = exp(x->probability[j] - greatest);
        x->off[j] +=
            (1 + blocks) * (5 * 0x1p-24 * x->largest + 0x1p-22) + (p->v.polynomial ? 0x1p-18 : 0);
    }
    x->lse = greatest + log(sum);
    x->off_sum = (p->v.tile_n + blocks) * 0x1p-24;
    for (int j = x->first; j < x->last; j++) {
        x->probability[j] /= sum;
        x->off_sum += x->probability[j] * x->off[j];
    }
}

/* Returns half a unit in the last place of the number; 2^-25 for F16's smallest numbers. */
static const double half_unit[] = {0x1p-8, 0x1p-11};

/* Probabilities are rounded to elements; each error is up to half a unit and is random in effect. The error of their
 * sum with the values is bounded by six standard deviations; a number uniform in an interval has a standard deviation
 * of 1/sqrt(3) of half its length. The sum has as many additions as keys, and is then divided and rounded. */
static void check_row(const problem *p, const run *r, int b, int h, int i, const row *x) {
    const int head_kv = h / (p->heads_q / p->heads_kv), element = p->v.element;
    const int line = line_of(&r->o, b, h, i);
    const bool none = x->first >= x->last;
    for (int d = 0; d < p->head_dim; d++) {
        const double got = get(&r->o.m, line, d);
        double exact = 0, magnitude = 0, variance = 0, off = 0, values = 0;
        for (int j = x->first; j < x->last; j++) {
            double value = get(&r->v.m, line_of(&r->v, b, head_kv, j), d);
            double part = x->probability[j] * value;
            exact += part;
            magnitude += fabs(part);
            values += fabs(value);
            variance += part * part * half_unit[element] * half_unit[element] / 3;
            off += fabs(part) * x->off[j];
        }
        double allowed = 6 * sqrt(variance) + off + fabs(exact) * (x->off_sum + 0x1p-22) +
                         (none ? 0 : x->last - x->first) * 0x1p-23 * magnitude;
        allowed += half_unit[element] * (fabs(exact) + allowed);
        if (element)
            allowed +=
                0x1p-25 * (1 + values); /* bound for O; probabilities are relative to at least 1 */
        if (none) allowed = 0;
        if (!(fabs(got - exact) <= allowed))
            fail_msg("O[%d][%d][%d][%d] is %.9g, not %.9g within %.3g (head_dim %d, window %d, %d "
                     "x %d rows, content %d)",
                     b, h, i, d, got, exact, allowed, p->v.head_dim, p->v.window, p->rows_q,
                     p->rows_k, p->content);
    }
    const double lse = get(&r->lse, 0, (b * p->heads_q + h) * p->rows_q + i);
    const double allowed = x->off_sum + 0x1p-21 + 0x1p-22 * (fabs(x->lse) + x->largest);
    if (none ? lse != -INFINITY : !(fabs(lse - x->lse) <= allowed))
        fail_msg("LSE[%d][%d][%d] is %.9g, not %.9g within %.3g", b, h, i, lse,
                 none ? -INFINITY : x->lse, allowed);
    expect_untouched(&r->o.m, line);
}

/* Sums of powers of 2, and of their products with integers, are exact for every reference maximum. Only the reciprocal
 * of the sum, its product, and O are rounded. */
static void check_integers(const problem *p, const run *r, int b, int h, int i, const row *x) {
    const int head_kv = h / (p->heads_q / p->heads_kv);
    const int line = line_of(&r->q, b, h, i);
    for (int d = 0; d < p->head_dim; d++) {
        double sum = 0, product = 0;
        for (int j = x->first; j < x->last; j++) {
            const int key = line_of(&r->k, b, head_kv, j);
            double power = ldexp(
                1, (int)(get(&r->k.m, key, 0) + get(&r->q.m, line, 1) * get(&r->k.m, key, 1)));
            sum += power;
            product += power * get(&r->v.m, key, d);
        }
        matrix one = {.type = r->o.m.type, .host = &(float){0}};
        set(&one, 0, 0, 1.0f / (float)sum * (float)product);
        const float expected = get(&one, 0, 0), got = get(&r->o.m, line, d);
        if (got != expected)
            fail_msg("O[%d][%d][%d][%d] is %.9g, not %.9g exactly (%d x %d rows)", b, h, i, d, got,
                     expected, p->rows_q, p->rows_k);
    }
}

static void check(const problem *p, const run *r) {
    row x = {.probability = malloc(sizeof(double) * (size_t)p->rows_k),
             .off = malloc(sizeof(double) * (size_t)p->rows_k)};
    assert_true(x.probability && x.off);
    for (int b = 0; b < p->batch; b++)
        for (int h = 0; h < p->heads_q; h++)
            for (int i = 0; i < p->rows_q; i++) {
                find_row(p, r, b, h, i, &x);
                check_row(p, r, b, h, i, &x);
                if (p->content == INTEGERS && x.first < x.last) check_integers(p, r, b, h, i, &x);
            }
    expect_untouched(&r->lse, 0);
    free(x.probability);
    free(x.off);
}

static void expect_right(const problem *p) {
    run r;
    open_run(p, &r);
    dw_status status = launch(p, &r);
    expect_no_finding(r.emulator);
    if (status != DW_OK) fail_msg("%s", dw_last_error());
    check(p, &r);
    close_run(&r);
}

/* ---- tests ---------------------------------------------------------------------------------------- */

static void need_kernels(void) {
    const dw__jit_variant jit = jit_of(&variants[0]);
    need_ptx(&jit);
}

static problem basic(size_t variant_index) {
    const variant *v = &variants[variant_index];
    return (problem){.v = *v,
                     .batch = 1,
                     .heads_q = 1,
                     .heads_kv = 1,
                     .rows_q = 256,
                     .rows_k = 256,
                     .head_dim = v->head_dim,
                     .left = -1,
                     .right = v->window ? 0 : -1,
                     .bottom_right = true,
                     .blocks = 148,
                     .scale = 0.3f,
                     .seed = 1 + variant_index};
}

/* Shapes: one row; one before and one past a half and a tile; one key, primes, a block and one past it; fewer keys than
 * queries, so that some rows see none. */
static void shapes_are_right(void **state) {
    static const int shapes[][2] = {{1, 1},     {127, 61},  {129, 128}, {255, 131},
                                    {257, 257}, {257, 100}, {300, 389}};
    (void)state;
    need_kernels();
    for (size_t i = 0; i < DW_COUNT(variants); i++)
        for (size_t j = i % 2; j < DW_COUNT(shapes); j += 2) {
            problem p = basic(i);
            p.rows_q = shapes[j][0], p.rows_k = shapes[j][1];
            p.seed += 100 * j;
            expect_right(&p);
        }
}

/* Shapes: batches, groups of heads, narrower heads than the kernel's, heads between rows, windows on either side, and a
 * diagonal at the first key. */
static void calls_are_right(void **state) {
    static const struct {
        int variant, batch, heads_q, heads_kv, rows_q, rows_k, head_dim, left, right;
        bool bottom_right, interleaved;
    } calls[] = {
        {0, 2, 4, 1, 61, 67, 128, -1, -1, false, true},
        {0, 1, 3, 3, 130, 37, 72, -1, -1, false, false},
        {2, 2, 2, 2, 67, 131, 40, -1, -1, false, true},
        {1, 1, 7, 1, 131, 131, 128, -1, 0, true, true},
        {1, 2, 2, 1, 67, 259, 104, -1, 0, false, false},
        {3, 1, 1, 1, 509, 509, 64, 100, 0, true, false},
        {3, 1, 2, 2, 263, 383, 8, 20, 30, false, true},
        {4, 1, 1, 1, 263, 131, 128, 17, 0, true, false},
        {5, 1, 2, 1, 263, 263, 80, -1, 5, true, true},
    };
    (void)state;
    need_kernels();
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        problem p = basic((size_t)calls[i].variant);
        p.batch = calls[i].batch, p.heads_q = calls[i].heads_q, p.heads_kv = calls[i].heads_kv;
        p.rows_q = calls[i].rows_q, p.rows_k = calls[i].rows_k, p.head_dim = calls[i].head_dim;
        p.left = calls[i].left, p.right = calls[i].right;
        p.bottom_right = calls[i].bottom_right, p.interleaved = calls[i].interleaved;
        p.seed += 1000 + i;
        expect_right(&p);
    }
}

/* Each block computes several tiles, in pairs if there is a mask, with an odd number of heads; rings continue across
 * tiles. */
static void persistent_blocks_process_several_tiles(void **state) {
    (void)state;
    need_kernels();
    for (size_t i = 0; i < 4; i++) {
        problem p = basic(i);
        p.heads_q = 3;
        p.rows_q = 389, p.rows_k = 389;
        p.blocks = 2;
        p.seed += 2000;
        expect_right(&p);
    }
}

/* Maxima grow with every block, grow little, or never grow: O is rescaled, or stays relative to an old maximum. */
static void maxima_may_grow(void **state) {
    static const content contents[] = {GROWS, CREEPS, SHRINKS};
    (void)state;
    need_kernels();
    for (size_t i = 0; i < DW_COUNT(contents); i++)
        for (size_t v = i % 2; v < DW_COUNT(variants); v += 2) {
            problem p = basic(v);
            p.content = contents[i];
            p.rows_q = 150, p.rows_k = 600;
            p.seed += 3000 + i;
            expect_right(&p);
        }
}

static void integers_are_exact(void **state) {
    (void)state;
    need_kernels();
    for (size_t v = 0; v < DW_COUNT(variants); v++) {
        problem p = basic(v);
        p.content = INTEGERS;
        p.scale = 0.69314718f;
        p.rows_q = 200, p.rows_k = 293;
        p.seed += 4000;
        expect_right(&p);
    }
}

/* Removing a required instruction makes the kernel wrong, and the checker reports it. */
static void mistakes_are_found(void **state) {
    static const mistake mistakes[] = {
        {"tcgen05.wait::ld", "too early", "before the wait that makes its value valid"},
        {"tcgen05.wait::st", "race", "a store of block (0, 0, 0) warp"},
        {"tcgen05.dealloc", "tensor memory", "were not freed"},
        {"tcgen05.alloc", "undefined", "never written"},
        {"tcgen05.mma", "undefined", "never written"},
        {"tcgen05.commit", "deadlock", "1 of 1 arrivals pending"},
        {"mbarrier.arrive.expect_tx", "deadlock", "1 of 1 arrivals pending"},
        {"mbarrier.arrive.shared", "deadlock", "arrivals pending"},
        {"mbarrier.init", "mbarrier", "not initialised"},
        {"fence.proxy.async", "missing fence", "a fence.proxy.async between"},
        {"fence.mbarrier_init", "missing fence", "a copy completes on the mbarrier"},
        {"tcgen05.fence::after_thread_sync", "missing fence",
         "tcgen05.fence::after_thread_sync is missing"},
        {"tcgen05.fence::before_thread_sync", "missing fence",
         "tcgen05.fence::before_thread_sync is missing"},
        {"cp.async.bulk.wait_group.read", "race", "nothing orders the two"},
    };
    (void)state;
    need_kernels();
    for (size_t i = 0; i < DW_COUNT(mistakes); i++) {
        problem p = basic(0);
        run r;
        p.content = GROWS;
        p.heads_q = 2;
        p.rows_q = 256, p.rows_k = 300;
        p.blocks = 1;
        p.seed += 5000 + i;
        p.without = mistakes[i].opcode;
        open_run(&p, &r);
        (void)launch(&p, &r);
        expect_found(r.emulator, &mistakes[i]);
        close_run(&r);
    }
}

/* ---- cost model ----------------------------------------------------------------------------------- */

typedef struct tile_cost {
    int head_dim, windowed, keys, tile_m, tile_n, stages, consumers;
} tile_cost;
static const tile_cost costs[] = {DW_SM100_FORWARD_TILES(ROW)};

/* The cost of a tile on an SM: for each block of keys the time of the tensor cores, of the exponentials (16 per clock)
 * and of reading operands from shared memory (Q and K for the scores, V for each half; P is in tensor memory). 128
 * bytes per clock are Hopper's rate and are assumed here. The largest of them bounds the time of a long sequence. */
static void tiles_fit(void **state) {
    (void)state;
    dw_hardware *b200;
    assert_int_equal(dw_hardware_named("b200", &b200), DW_OK);
    const double clock = b200->clock.value,
                 rate = b200->rate[DW_RATE_BF16].value / b200->sm_count.value / clock;
    print_message(
        "head_dim window STAGES  columns  shared bytes  bytes/block  MFLOP/block  clocks: "
        "tensor, exponentials, shared   bound on B200\n");
    for (size_t i = 0; i < DW_COUNT(costs); i++) {
        const tile_cost *t = &costs[i];
        const int columns = DW_SM100_FORWARD_COLUMNS_USED(t->head_dim, t->tile_n);
        const int shared =
            DW_SM100_FORWARD_SHARED_BYTES(t->head_dim, t->tile_m, t->tile_n, t->stages);
        const int q_bytes = DW_SM100_FORWARD_Q_BYTES(t->head_dim, t->tile_m),
                  kv_bytes = DW_SM100_FORWARD_KV_BYTES(t->head_dim, t->tile_n);
        assert_true(columns <= DW_SM100_FORWARD_COLUMNS);
        assert_true(shared <= DW_SM100_FORWARD_MOST_SHARED);
        assert_int_equal(t->tile_m, t->consumers * DW_SM100_FORWARD_ROWS);
        assert_int_equal(kv_bytes % 1024, 0); /* the pattern of the swizzle */
        const double flops = 4.0 * t->tile_m * t->tile_n * t->head_dim, tensor = flops / rate,
                     exponentials = t->tile_m * t->tile_n / 16.0,
                     reads = (q_bytes + t->consumers * 2.0 * kv_bytes) / 128;
        const double longest = fmax(tensor, fmax(exponentials, reads));
        print_message("%8d %6d %6d %8d %13d %12d %12.2f %15.0f, %12.0f, %6.0f   %.0f TFLOP/s\n",
                      t->head_dim, t->windowed, t->stages, columns, shared, 2 * kv_bytes,
                      flops / 1e6, tensor, exponentials, reads,
                      flops / longest * clock * b200->sm_count.value / 1e12);
    }
    dw_hardware_destroy(b200);
    for (size_t i = 0; i < DW_COUNT(variants); i++) { /* every listed variant is tested */
        const variant *v = &variants[i];
        bool listed = false;
        for (size_t j = 0; j < DW_COUNT(costs); j++)
            listed |= costs[j].head_dim == v->head_dim && costs[j].windowed == v->window &&
                      costs[j].tile_m == v->tile_m && costs[j].tile_n == v->tile_n &&
                      costs[j].stages == v->stages && costs[j].consumers == v->consumers;
        assert_true(listed);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_fit),
        cmocka_unit_test(shapes_are_right),
        cmocka_unit_test(calls_are_right),
        cmocka_unit_test(persistent_blocks_process_several_tiles),
        cmocka_unit_test(maxima_may_grow),
        cmocka_unit_test(integers_are_exact),
        cmocka_unit_test(mistakes_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
