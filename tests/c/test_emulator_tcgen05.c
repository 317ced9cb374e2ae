/* The emulator's Blackwell tensor cores: tensor memory, data movement to and from it, matmuls. Most tests
 * share one kernel as a frame: it fills shared memory and tensor memory from images, runs the instructions
 * under test, and returns tensor memory. The tests compute layouts and numbers separately, from the figures
 * of the PTX ISA. */
#include "emulator_findings.h"
#include "ptx_file.h"
#include <math.h>

#define LANES 128
#define COLUMNS 512

/* ---- the frame ----------------------------------------------------------------------------- */

typedef struct frame {
    dw_emulator *emulator;
    int blocks; /* 1, or 2 for a pair */
    /* Columns of tensor memory that are filled before the instructions run. */
    int filled;
    uint32_t shared_bytes;  /* bytes of a block's image, a multiple of 4 */
    unsigned char *shared;  /* [blocks][shared_bytes] */
    uint32_t *tensor, *out; /* [blocks][LANES][COLUMNS] */
} frame;

static frame open_frame(int blocks, uint32_t shared_bytes) {
    frame f = {.blocks = blocks, .shared_bytes = shared_bytes};
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    options.seed = (uint64_t)rand();
    assert_int_equal(dw_emulator_create("sm_100a", &options, &f.emulator), DW_OK);
    f.shared = calloc((size_t)blocks, shared_bytes);
    f.tensor = calloc((size_t)blocks, LANES * COLUMNS * 4);
    f.out = calloc((size_t)blocks, LANES * COLUMNS * 4);
    assert_true(f.shared && f.tensor && f.out);
    return f;
}
static void close_frame(frame *f) {
    dw_emulator_destroy(f->emulator);
    free(f->shared), free(f->tensor), free(f->out);
}
static uint32_t *cell(uint32_t *image, int block, int lane, int column) {
    return &image[((size_t)block * LANES + (size_t)lane) * COLUMNS + (size_t)column];
}

/* Runs tests/ptx/tensor_core_frame.ptx. One thread executes `body`; every warp then executes `after` (NULL: reads
 * everything back to f->out). */
static dw_status run_frame(frame *f, const char *body, const char *after) {
    const bool pair = f->blocks == 2;
    const char *group = pair ? "2" : "1";
    char *read_back = read_ptx("tensor_core_read_back.ptx");
    dw_emulator_module *module;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    void *memory[3];
    char *text = read_ptx("tensor_core_frame.ptx");
    text = replace_in_ptx(text, "@LAUNCH@",
                          pair ? ".reqntid 128 .reqnctapercluster 2" : ".reqntid 128");
    for (int i = 0; i < 3; i++) text = replace_in_ptx(text, "@GROUP@", group);
    text = replace_in_ptx(text, "@COMMIT@",
                          pair ? "tcgen05.commit.cta_group::2.mbarrier::arrive::one."
                                 "shared::cluster.multicast::cluster.b64 [%r19], %h1;"
                               : "tcgen05.commit.cta_group::1.mbarrier::arrive::one."
                                 "shared::cluster.b64 [%r19];");
    text = replace_in_ptx(text, "@BODY@", body);
    text = replace_in_ptx(text, "@AFTER@", after ? after : read_back);
    free(read_back);
    const char *folder = getenv("DW_TEST_KEEP_PTX"); /* the PTX, for an assembler to check */
    if (folder) {
        static int number;
        char name[300];
        snprintf(name, sizeof name, "%s/%04d.ptx", folder, number++);
        FILE *file = fopen(name, "w");
        assert_non_null(file);
        fputs(text, file);
        fclose(file);
    }
    if (dw_emulator_load(f->emulator, text, strlen(text), "test.ptx", &module) != DW_OK)
        fail_msg("%s", dw_last_error());
    free(text);
    const size_t sizes[3] = {(size_t)f->blocks * f->shared_bytes,
                             (size_t)f->blocks * LANES * COLUMNS * 4,
                             (size_t)f->blocks * LANES * COLUMNS * 4};
    const void *sources[2] = {f->shared, f->tensor};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(dw_emulator_allocate(f->emulator, sizes[i], &memory[i]), DW_OK);
        if (i < 2)
            assert_int_equal(dw_emulator_copy_in(f->emulator, memory[i], sources[i], sizes[i]),
                             DW_OK);
    }
    assert_int_equal(dw_emulator_fill(f->emulator, memory[2], 0xEE, sizes[2]), DW_OK);
    options.grid[0] = (uint32_t)f->blocks, options.block[0] = 128;
    options.shared_bytes = f->shared_bytes;
    uint32_t words = f->shared_bytes / 4, filled = (uint32_t)f->filled;
    dw_status status =
        dw_emulator_launch(module, "f", &options,
                           (void *[]){&memory[0], &memory[1], &memory[2], &words, &filled}, NULL);
    assert_int_equal(dw_emulator_copy_out(f->emulator, f->out, memory[2], sizes[2]), DW_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(dw_emulator_release(f->emulator, memory[i]), DW_OK);
    dw_emulator_unload(module);
    return status;
}
static void run_well(frame *f, const char *body, const char *after) {
    if (run_frame(f, body, after) != DW_OK || dw_emulator_finding_count(f->emulator) != 0) {
        print_findings(f->emulator);
        fail_msg("%s\n%s", dw_last_error(), body);
    }
}

/* ---- numbers ------------------------------------------------------------------------------- */

typedef enum format { F16, BF16, TF32, U8, S8, E4M3, E5M2, E2M3, E3M2, E2M1, UE8M0, UE4M3 } format;
static const struct {
    int bits, exponent, fraction, bias, code; /* its code in an instruction descriptor */
} formats[] = {
    [F16] = {16, 5, 10, 15, 0}, [BF16] = {16, 8, 7, 127, 1}, [TF32] = {32, 8, 10, 127, 2},
    [U8] = {8, 0, 0, 0, 0},     [S8] = {8, 0, 0, 0, 1},      [E4M3] = {8, 4, 3, 7, 0},
    [E5M2] = {8, 5, 2, 15, 1},  [E2M3] = {6, 2, 3, 1, 3},    [E3M2] = {6, 3, 2, 3, 4},
    [E2M1] = {4, 2, 1, 1, 5},   [UE8M0] = {8, 8, 0, 127, 1}, [UE4M3] = {8, 4, 3, 7, 0},
};

static double value_of(format f, uint32_t code) {
    if (f == U8) return code;
    if (f == S8) return (int8_t)code;
    if (f == UE8M0) return ldexp(1, (int)code - 127);
    if (f == TF32) code >>= 13;
    const int fraction = formats[f].fraction, bias = formats[f].bias;
    const uint32_t exponent = code >> fraction & ((1u << formats[f].exponent) - 1),
                   rest = code & ((1u << fraction) - 1);
    const double size = exponent ? ldexp(1 + ldexp(rest, -fraction), (int)exponent - bias)
                                 : ldexp(rest, 1 - bias - fraction);
    const int sign = fraction + formats[f].exponent;
    return f != UE4M3 && code >> sign & 1 ? -size : size;
}

/* Returns a code of a finite number, near 1 for types with a wide range. */
static uint32_t random_code(format f) {
    const uint32_t word = (uint32_t)rand() << 8 ^ (uint32_t)rand();
    switch (f) {
    case F16: return (word & 0x83FF) | (11 + word / 0x10000 % 8) << 10;
    case BF16: return (word & 0x807F) | (123 + word / 0x10000 % 8) << 7;
    case TF32: return (word & 0x807FFFFF) | (123 + (word >> 24 & 7)) << 23;
    case E4M3: return (word & 0x7F) == 0x7F ? 0 : word & 0xFF;
    case E5M2: return (word & 0x7C) == 0x7C ? 0 : word & 0xFF;
    case UE8M0: return 122 + word % 10;
    case UE4M3: return word % 0x7F;
    default: return word & ((1u << formats[f].bits) - 1);
    }
}

/* ---- matrices in shared memory ------------------------------------------------------------- */

enum { PLAIN, SWIZZLE_32, SWIZZLE_64, SWIZZLE_128, SWIZZLE_128_BY_32 };
typedef struct matrix {
    format f;
    int rows, k; /* rows or columns of one block's share */
    bool packed; /* elements of 4 bits are packed */
    bool mn_major;
    int swizzle;
    uint32_t first;    /* offset in the image, a multiple of 1,024 */
    uint32_t lbo, sbo; /* bytes */
} matrix;

static const uint32_t spans[] = {16, 32, 64, 128, 128};

/* Returns the offset in the image of (row, byte along K), or of (row, k) if rows are contiguous: the canonical layouts
 * of PTX ISA 9.7.16.5. */
static uint32_t place_of(const matrix *m, uint32_t row, uint32_t k) {
    const uint32_t span = spans[m->swizzle];
    uint32_t at;
    if (!m->mn_major) {
        at = row / 8 * m->sbo + row % 8 * span;
        at += m->swizzle == PLAIN ? k / 16 * m->lbo + k % 16 : k;
    } else {
        const uint32_t size = (uint32_t)formats[m->f].bits / 8, wide = span / size;
        const uint32_t deep = m->swizzle == SWIZZLE_128_BY_32 ? 4 : 8;
        const uint32_t along = m->swizzle == PLAIN ? m->sbo : m->lbo,
                       down = m->swizzle == PLAIN ? m->lbo : m->sbo;
        at = row / wide * along + row % wide * size + k / deep * down + k % deep * span;
    }
    static const uint32_t masks[] = {0, 0x10, 0x30, 0x70, 0x60}, shifts[] = {3, 3, 3, 3, 2};
    at += m->first;
    return at ^ (at >> shifts[m->swizzle] & masks[m->swizzle]);
}

static void put_bits(unsigned char *image, uint32_t byte, int first, int bits, uint32_t value) {
    for (int i = 0; i < bits; i++) {
        unsigned char *at = &image[byte + (uint32_t)(first + i) / 8];
        const int bit = (first + i) % 8;
        *at = (unsigned char)((*at & ~(1u << bit)) | (value >> i & 1) << bit);
    }
}
static void put(const matrix *m, unsigned char *image, int row, int k, uint32_t code) {
    const int bits = formats[m->f].bits;
    if (m->mn_major)
        put_bits(image, place_of(m, (uint32_t)row, (uint32_t)k), 0, bits, code);
    else if (bits >= 8 || m->packed)
        put_bits(image, place_of(m, (uint32_t)row, (uint32_t)(k * bits / 8)), k * bits % 8, bits,
                 code);
    else /* sixteen elements in each sixteen bytes, packed from the first byte on */
        put_bits(image, place_of(m, (uint32_t)row, (uint32_t)(k / 16 * 16)), k % 16 * bits, bits,
                 code);
}

/* Returns the bytes between the K ranges of consecutive instructions, each of `k` elements. */
static uint32_t step_of(const matrix *m, int k) {
    if (m->mn_major)
        return (uint32_t)k / (m->swizzle == SWIZZLE_128_BY_32 ? 4 : 8) *
               (m->swizzle == PLAIN ? m->lbo : m->sbo);
    return m->swizzle == PLAIN ? 2 * m->lbo : 32;
}

/* Writes text that sets %rd<number> to the descriptor of the matrix, with its start moved by `bytes`. */
static int make_descriptor(char *text, int number, const matrix *m, uint32_t bytes) {
    static const uint64_t modes[] = {0, 6, 4, 2, 1};
    const uint64_t rest = modes[m->swizzle] << 61 | (uint64_t)1 << 46 |
                          (uint64_t)(m->sbo >> 4) << 32 | (uint64_t)(m->lbo >> 4) << 16;
    return sprintf(text,
                   "add.u32 %%r30, %%r1, %u; shr.u32 %%r30, %%r30, 4; cvt.u64.u32 %%rd30, %%r30; "
                   "or.b64 %%rd%d, %%rd30, 0x%llx;\n",
                   m->first + bytes, number, (unsigned long long)rest);
}

/* Sets the offsets of a compact layout with rows of 32 * steps bytes. */
static matrix make_matrix(format f, int rows, int k, bool packed, bool mn_major, int swizzle,
                          uint32_t first) {
    matrix m = {f, rows, k, packed, mn_major, swizzle, first, 0, 0};
    const uint32_t span = spans[swizzle], bits = (uint32_t)formats[f].bits;
    if (!mn_major) {
        if (swizzle == PLAIN)
            m.lbo = 128 + 16, m.sbo = 2048; /* the ranges are not contiguous */
        else
            m.sbo = 8 * span;
    } else {
        const uint32_t deep = swizzle == SWIZZLE_128_BY_32 ? 4 : 8, atom = deep * span;
        const uint32_t atoms = ((uint32_t)rows * bits / 8 + span - 1) / span;
        if (swizzle == PLAIN)
            m.sbo = atom, m.lbo = atoms * atom;
        else
            m.lbo = atom, m.sbo = atoms * atom;
    }
    return m;
}

/* ---- MMAs ---------------------------------------------------------------------------------- */

typedef enum kind { KIND_F16, KIND_TF32, KIND_F8F6F4, KIND_I8, MXF8F6F4, MXF4, NVF4 } kind;
static const struct {
    const char *name;
    int k;
} kinds[] = {{"f16", 16},      {"tf32", 8},  {"f8f6f4", 32},  {"i8", 32},
             {"mxf8f6f4", 32}, {"mxf4", 64}, {"mxf4nvf4", 64}};
enum { SUM_F16, SUM_F32, SUM_S32 };

typedef struct product {
    kind kind;
    format a, b;
    int sum;
    int m, n, steps, group;
    int a_swizzle, b_swizzle;
    bool a_mn_major, b_mn_major;
    bool a_in_tensor, overwrite, a_negated, b_negated, stationary, saturate, a_shifted;
    int shift;        /* scale-input-d */
    uint32_t disable; /* row of each 32 lanes */
    int scales;       /* factors for the K of one instruction */
    format scale;
    const char *modifiers;
    int lane; /* types of D and A */
} product;

#define D_COLUMN 0
#define A_COLUMN 256
#define A_SCALES 320
#define B_SCALES 400
#define A_FIRST 0u
#define B_FIRST 65536u
#define SHARED_BYTES (2u * 65536u)
#define MOST_K 256

/* Returns the position of D(row, column) of an MMA: block, lane, column. */
static void place_of_d(const product *p, int row, int column, int *block, int *lane, int *at) {
    const int rows = p->m / p->group;
    *block = row / rows;
    row %= rows;
    *at = D_COLUMN + column;
    *lane = row;
    if (rows == 64 && p->group == 1 && !p->stationary)
        *lane = row / 16 * 32 + row % 16;
    else if (rows == 64)
        *lane = row + column / (p->n / 2) * 64, *at = D_COLUMN + column % (p->n / 2);
    else if (rows == 32)
        *lane = row + column / (p->n / 4) * 32, *at = D_COLUMN + column % (p->n / 4);
    *lane += p->lane;
}

static uint32_t descriptor_of(const product *p) {
    const bool fp4 = p->kind == MXF4 || p->kind == NVF4;
    const uint32_t a = fp4 ? 1 : (uint32_t)formats[p->a].code,
                   b = fp4 ? 1 : (uint32_t)formats[p->b].code;
    uint32_t d = a << 7 | b << 10 | (uint32_t)p->a_negated << 13 | (uint32_t)p->b_negated << 14 |
                 (uint32_t)p->a_mn_major << 15 | (uint32_t)p->b_mn_major << 16 |
                 (uint32_t)p->n / 8 << 17 | (uint32_t)p->m / 16 << 24;
    if (p->scales)
        d |= (uint32_t)(p->scale == UE8M0) << 23;
    else
        d |= (uint32_t)p->sum << 4 | (uint32_t)p->saturate << 3;
    return d;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static double single(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

typedef struct numbers {
    double a[256][MOST_K], b[256][MOST_K];
} numbers;

/* Fills the frame's images with random operands. `x` receives their values, scaled. */
static void fill_operands(frame *f, const product *p, matrix *a, matrix *b, numbers *x) {
    const int k = kinds[p->kind].k, depth = k * p->steps, rows = p->m / p->group,
              columns = p->n / p->group;
    const bool packed = k == 64;
    *a = make_matrix(p->a, rows, depth, packed, p->a_mn_major, p->a_swizzle, A_FIRST);
    *b = make_matrix(p->b, columns, depth, packed, p->b_mn_major, p->b_swizzle, B_FIRST);
    for (size_t i = 0; i < (size_t)p->group * f->shared_bytes; i++)
        f->shared[i] = (unsigned char)rand();
    for (int block = 0; block < p->group; block++)
        for (int lane = 0; lane < LANES; lane++)
            for (int i = 0; i < COLUMNS; i++)
                *cell(f->tensor, block, lane, i) =
                    p->sum == SUM_S32   ? (uint32_t)(rand() % 200000 - 100000)
                    : p->sum == SUM_F16 ? (0x5A5A0000 | random_code(F16))
                                        : bits_of((float)(rand() % 2001 - 1000) / 64);
    const int bits = formats[p->a].bits;
    for (int row = 0; row < p->m; row++) {
        const int block = row / rows, within = row % rows;
        for (int i = 0; i < depth; i++) {
            const uint32_t code = random_code(p->a);
            x->a[row][i] = value_of(p->a, code) * (p->a_negated ? -1 : 1);
            if (!p->a_in_tensor) {
                put(a, f->shared + (size_t)block * f->shared_bytes, within, i, code);
                continue;
            }
            /* A's rows have the positions of D's rows. If D is folded, they are stored twice. */
            product whole = *p;
            for (int fold = 0; fold < (rows == 64 && p->group == 2 ? 2 : 1); fold++) {
                int to, lane, column;
                place_of_d(&whole, row, fold * p->n / 2, &to, &lane, &column);
                /* A 4-bit element is in bits 2 to 5 of a byte, a 6-bit element in bits 1 to 6. */
                const int first = bits < 8 && !packed ? 8 * i + (bits == 4 ? 2 : 1) : i * bits;
                put_bits((unsigned char *)cell(f->tensor, to, lane, A_COLUMN), 0, first, bits,
                         code);
            }
        }
    }
    for (int column = 0; column < p->n; column++)
        for (int i = 0; i < depth; i++) {
            const uint32_t code = random_code(p->b);
            x->b[column][i] = value_of(p->b, code) * (p->b_negated ? -1 : 1);
            put(b, f->shared + (size_t)(column / columns) * f->shared_bytes, column % columns, i,
                code);
        }
}

/* Scale factors of 32 rows are a column of bytes in 32 lanes, repeated in all four ranges of lanes. The
 * factors of one instruction are adjacent bytes. If there are fewer than four, the next instruction's factors follow,
 * and IDs select among them. `at` is the column of the first instruction. */
static void fill_scales(frame *f, const product *p, numbers *x) {
    const int k = kinds[p->kind].k, chunk = k / p->scales, rows = p->m / p->group;
    for (int which = 0; which < 2; which++) {
        const int count = which ? p->n : p->m, base = which ? B_SCALES : A_SCALES;
        const bool folded = which && rows == 64;
        const int half = folded ? p->n / 2 : which ? p->n : rows, wide = (half + 31) / 32;
        for (int row = 0; row < count; row++) {
            for (int i = 0; i < p->steps * p->scales; i++) {
                const uint32_t code = random_code(p->scale);
                double *values = which ? x->b[row] : x->a[row];
                for (int j = 0; j < chunk; j++) values[i * chunk + j] *= value_of(p->scale, code);
                const int within = row % half, column = base + i / 4 * wide + within / 32;
                for (int block = 0; block < p->group; block++) {
                    if (!which && block != row / rows) continue;
                    for (int copy = 0; copy < (folded ? 2 : 4); copy++) {
                        const int lane = within % 32 + 32 * copy + (folded ? row / half * 64 : 0);
                        put_bits((unsigned char *)cell(f->tensor, block, lane, column), 0,
                                 i % 4 * 8, 8, code);
                    }
                }
            }
        }
    }
}

static void write_body(char *text, const product *p, const matrix *a, const matrix *b) {
    const int k = kinds[p->kind].k, rows = p->m / p->group;
    char *at = text;
    for (int step = 0; step < p->steps; step++) {
        uint32_t descriptor = descriptor_of(p);
        const int factor = step * p->scales, half_b = rows == 64 ? p->n / 2 : p->n;
        const int a_scales = A_SCALES + factor / 4 * ((rows + 31) / 32),
                  b_scales = B_SCALES + factor / 4 * ((half_b + 31) / 32);
        if (p->scales) descriptor |= (uint32_t)(factor % 4) << 29 | (uint32_t)(factor % 4) << 4;
        at += make_descriptor(at, 20, a, (uint32_t)step * step_of(a, k));
        at += make_descriptor(at, 21, b, (uint32_t)step * step_of(b, k));
        at += sprintf(at,
                      "add.u32 %%r31, %%r14, 0x%x; add.u32 %%r32, %%r14, 0x%x; mov.u32 %%r33, "
                      "0x%x; setp.eq.u32 %%p5, 0, %d; mov.u32 %%r34, 0x%x;\n",
                      D_COLUMN | p->lane << 16, (A_COLUMN + 8 * step) | p->lane << 16, descriptor,
                      p->overwrite && step == 0 ? 1 : 0, p->disable);
        if (p->scales)
            at += sprintf(at, "add.u32 %%r35, %%r14, %d; add.u32 %%r36, %%r14, %d;\n", a_scales,
                          b_scales);
        at += sprintf(at, "tcgen05.mma%s.cta_group::%d.kind::%s%s [%%r31], %s, %%rd21, %%r33%s",
                      p->stationary ? ".ws" : "", p->group, kinds[p->kind].name,
                      p->modifiers ? p->modifiers : "", p->a_in_tensor ? "[%r32]" : "%rd20",
                      p->scales ? ", [%r35], [%r36]" : "");
        if (p->disable)
            at +=
                sprintf(at, p->group == 1 ? ", {%%r34,%%r34,%%r34,%%r34}"
                                          : ", {%%r34,%%r34,%%r34,%%r34,%%r34,%%r34,%%r34,%%r34}");
        at += sprintf(at, ", %%p5");
        if (p->shift && step == 0) at += sprintf(at, ", %d", p->shift);
        at += sprintf(at, ";\n");
    }
}

static double sum_value(int sum, uint32_t bits) {
    return sum == SUM_S32   ? (double)(int32_t)bits
           : sum == SUM_F16 ? value_of(F16, bits & 0xFFFF)
                            : single(bits);
}

/* Checks that every sum is within the roundings to its type, one per instruction, and that cells outside of D are
 * unchanged. */
static void check_product(const product *p) {
    frame f = open_frame(p->group, SHARED_BYTES);
    numbers *x = malloc(sizeof *x);
    char *text = malloc(20000);
    unsigned char *is_d = calloc((size_t)p->group, LANES * COLUMNS);
    matrix a, b;
    assert_true(x && text && is_d);
    f.filled = COLUMNS;
    fill_operands(&f, p, &a, &b, x);
    if (p->scales) fill_scales(&f, p, x);
    write_body(text, p, &a, &b);
    run_well(&f, text, NULL);
    const int depth = kinds[p->kind].k * p->steps;
    const double unit = p->sum == SUM_F16 ? 0x1p-11 : 0x1p-24;
    for (int row = 0; row < p->m; row++) {
        for (int column = 0; column < p->n; column++) {
            int block, lane, at;
            place_of_d(p, row, column, &block, &lane, &at);
            const uint32_t before = *cell(f.tensor, block, lane, at),
                           after = *cell(f.out, block, lane, at);
            is_d[((size_t)block * LANES + (size_t)lane) * COLUMNS + (size_t)at] = 1;
            if (p->disable >> lane % 32 & 1) {
                assert_int_equal(before, after);
                continue;
            }
            double wanted = p->overwrite ? 0 : ldexp(sum_value(p->sum, before), -p->shift),
                   size = fabs(wanted);
            for (int i = 0; i < depth; i++) {
                wanted += x->a[row][i] * x->b[column][i];
                size += fabs(x->a[row][i] * x->b[column][i]);
            }
            double got = sum_value(p->sum, after), most;
            if (p->sum == SUM_S32) {
                if (p->saturate && wanted > INT32_MAX) wanted = INT32_MAX;
                most = 0;
            } else {
                /* Bounds the error: each instruction rounds its sum once, and no sum is larger than `size`. The
                 * expected sums in double round too. */
                most = p->steps * (unit * (p->steps == 1 ? fabs(wanted) : size) +
                                   (p->sum == SUM_F16 ? 0x1p-25 : 0)) +
                       0x1p-44 * size;
            }
            if (!(fabs(got - wanted) <= most))
                fail_msg("kind %s, M %d, N %d, row %d, column %d: %.10g, expected %.10g +- %g",
                         kinds[p->kind].name, p->m, p->n, row, column, got, wanted, most);
            if (p->sum == SUM_F16) assert_int_equal(after >> 16, before >> 16);
        }
    }
    for (int i = 0; i < p->group * LANES * COLUMNS; i++) {
        const int lane = i / COLUMNS % LANES, column = i % COLUMNS;
        const bool moved = p->a_shifted && lane % 32 != 31 && column >= A_COLUMN &&
                           column < A_COLUMN + 8 * p->steps;
        if (!is_d[i] && f.out[i] != f.tensor[moved ? i + COLUMNS : i])
            fail_msg("lane %d, column %d was written", lane, column);
    }
    free(x), free(text), free(is_d);
    close_frame(&f);
}

static void check_all(const product *products, size_t count) {
    for (size_t i = 0; i < count; i++) check_product(&products[i]);
}
#define CHECK_ALL(products) check_all(products, sizeof(products) / sizeof *(products))

static void f16_mma(void **state) {
    static const product products[] = {
        {KIND_F16, F16, F16, SUM_F32, 128, 64, 4, 1, .a_swizzle = SWIZZLE_128,
         .b_swizzle = SWIZZLE_128},
        {KIND_F16, BF16, BF16, SUM_F32, 128, 256, 4, 1, .a_swizzle = SWIZZLE_128,
         .b_swizzle = SWIZZLE_128, .overwrite = true},
        {KIND_F16, BF16, F16, SUM_F32, 64, 24, 1, 1, .a_swizzle = SWIZZLE_64,
         .b_swizzle = SWIZZLE_32, .overwrite = true},
        {KIND_F16, F16, F16, SUM_F16, 64, 8, 1, 1, .lane = 16},
        {KIND_F16, F16, F16, SUM_F16, 128, 48, 4, 1, .b_swizzle = SWIZZLE_128, .a_negated = true},
    };
    (void)state;
    srand(1);
    CHECK_ALL(products);
}

#define BOTH(mode) .a_swizzle = mode, .b_swizzle = mode

static void mma_of_every_layout(void **state) {
    static const product products[] = {
        {KIND_F16, F16, F16, SUM_F32, 128, 64, 4, 1, BOTH(PLAIN)},
        {KIND_F16, F16, F16, SUM_F32, 128, 64, 1, 1, BOTH(SWIZZLE_32)},
        {KIND_F16, F16, F16, SUM_F32, 128, 64, 2, 1, BOTH(SWIZZLE_64)},
        {KIND_F16, F16, F16, SUM_F32, 128, 64, 3, 1, BOTH(PLAIN), .a_mn_major = true,
         .b_mn_major = true},
        {KIND_F16, F16, F16, SUM_F32, 128, 128, 4, 1, BOTH(SWIZZLE_32), .a_mn_major = true,
         .b_mn_major = true},
        {KIND_F16, F16, F16, SUM_F32, 128, 96, 2, 1, BOTH(SWIZZLE_64), .b_mn_major = true},
        {KIND_F16, BF16, BF16, SUM_F32, 128, 192, 4, 1, BOTH(SWIZZLE_128), .b_mn_major = true},
        {KIND_F16, BF16, BF16, SUM_F32, 64, 64, 4, 1, BOTH(SWIZZLE_128), .a_mn_major = true},
        {KIND_TF32, TF32, TF32, SUM_F32, 128, 64, 4, 1, BOTH(SWIZZLE_128)},
        {KIND_TF32, TF32, TF32, SUM_F32, 128, 64, 2, 1, BOTH(SWIZZLE_128_BY_32), .a_mn_major = true,
         .b_mn_major = true},
        {KIND_F8F6F4, E4M3, E5M2, SUM_F32, 128, 128, 2, 1, BOTH(SWIZZLE_128), .a_mn_major = true,
         .b_mn_major = true},
        {KIND_I8, S8, U8, SUM_S32, 128, 64, 2, 1, BOTH(SWIZZLE_64), .b_mn_major = true},
    };
    (void)state;
    srand(2);
    CHECK_ALL(products);
}

static void mma_of_every_kind(void **state) {
    static const product products[] = {
        {KIND_TF32, TF32, TF32, SUM_F32, 64, 40, 3, 1, BOTH(SWIZZLE_128), .b_negated = true},
        {KIND_I8, S8, S8, SUM_S32, 128, 256, 4, 1, BOTH(SWIZZLE_128)},
        {KIND_I8, U8, S8, SUM_S32, 64, 16, 4, 1, BOTH(SWIZZLE_128), .saturate = true},
        {KIND_F8F6F4, E4M3, E4M3, SUM_F32, 128, 112, 4, 1, BOTH(SWIZZLE_128)},
        {KIND_F8F6F4, E3M2, E4M3, SUM_F16, 64, 64, 1, 1, BOTH(SWIZZLE_32), .overwrite = true},
        {KIND_F8F6F4, E2M1, E3M2, SUM_F32, 128, 32, 4, 1, BOTH(SWIZZLE_128)},
        {KIND_F8F6F4, E2M3, E2M1, SUM_F16, 128, 32, 2, 1, BOTH(SWIZZLE_64)},
        {KIND_F8F6F4, E3M2, E5M2, SUM_F32, 64, 8, 4, 1, BOTH(PLAIN), .a_negated = true,
         .b_negated = true},
        {KIND_F16, F16, F16, SUM_F32, 128, 64, 4, 1, BOTH(SWIZZLE_128), .a_in_tensor = true},
        {KIND_F16, BF16, BF16, SUM_F32, 64, 64, 4, 1, BOTH(SWIZZLE_128), .a_in_tensor = true,
         .lane = 16},
        {KIND_I8, S8, S8, SUM_S32, 128, 64, 4, 1, BOTH(SWIZZLE_128), .a_in_tensor = true},
        {KIND_TF32, TF32, TF32, SUM_F32, 128, 64, 2, 1, BOTH(SWIZZLE_128), .a_in_tensor = true},
        {KIND_F8F6F4, E4M3, E2M1, SUM_F32, 128, 64, 2, 1, BOTH(SWIZZLE_128), .a_in_tensor = true},
        {KIND_F8F6F4, E2M1, E4M3, SUM_F32, 128, 64, 2, 1, BOTH(SWIZZLE_128), .a_in_tensor = true},
        {KIND_F8F6F4, E2M3, E5M2, SUM_F32, 64, 64, 3, 1, BOTH(SWIZZLE_128), .a_in_tensor = true},
        {KIND_F16, BF16, BF16, SUM_F32, 128, 64, 2, 1, BOTH(SWIZZLE_128), .a_in_tensor = true,
         .a_shifted = true, .modifiers = ".ashift.collector::a::discard"},
        {KIND_F16, F16, F16, SUM_F32, 128, 32, 2, 1, BOTH(SWIZZLE_128), .shift = 5},
        {KIND_F16, F16, F16, SUM_F32, 64, 32, 2, 1, BOTH(SWIZZLE_128), .disable = 0x0F00A001},
        {KIND_F16, F16, F16, SUM_F32, 128, 32, 2, 1, BOTH(SWIZZLE_128),
         .modifiers = ".collector::a::fill", .disable = 0x80000001, .shift = 1},
        {KIND_F16, F16, F16, SUM_F32, 32, 256, 2, 1, BOTH(SWIZZLE_128), .stationary = true},
        {KIND_F8F6F4, E4M3, E4M3, SUM_F32, 64, 128, 2, 1, BOTH(SWIZZLE_128), .stationary = true,
         .modifiers = ".collector::b1::use"},
        {KIND_F16, F16, F16, SUM_F16, 128, 64, 2, 1, BOTH(SWIZZLE_128), .stationary = true,
         .a_in_tensor = true},
    };
    (void)state;
    srand(3);
    CHECK_ALL(products);
}

static void block_scaled_mma(void **state) {
    static const product products[] = {
        {MXF8F6F4, E4M3, E4M3, SUM_F32, 128, 128, 4, 1, BOTH(SWIZZLE_128), .scales = 1,
         .scale = UE8M0, .modifiers = ".block_scale"},
        {MXF8F6F4, E5M2, E2M1, SUM_F32, 128, 72, 2, 1, BOTH(SWIZZLE_64), .scales = 1,
         .scale = UE8M0, .modifiers = ".block_scale.scale_vec::1X", .overwrite = true},
        {MXF8F6F4, E4M3, E3M2, SUM_F32, 128, 192, 4, 1, BOTH(SWIZZLE_128), .scales = 1,
         .scale = UE8M0, .modifiers = ".block_scale.block32", .a_in_tensor = true,
         .b_negated = true},
        {MXF8F6F4, E3M2, E4M3, SUM_F32, 128, 32, 4, 1, BOTH(SWIZZLE_128), .scales = 1,
         .scale = UE8M0, .modifiers = ".block_scale", .a_in_tensor = true},
        {MXF4, E2M1, E2M1, SUM_F32, 128, 256, 4, 1, BOTH(SWIZZLE_128), .scales = 2, .scale = UE8M0,
         .modifiers = ".block_scale"},
        {MXF4, E2M1, E2M1, SUM_F32, 128, 64, 2, 1, BOTH(SWIZZLE_128), .scales = 2, .scale = UE8M0,
         .modifiers = ".block_scale.scale_vec::2X", .a_in_tensor = true},
        {NVF4, E2M1, E2M1, SUM_F32, 128, 96, 4, 1, BOTH(SWIZZLE_128), .scales = 4, .scale = UE4M3,
         .modifiers = ".block_scale.scale_vec::4X"},
        {NVF4, E2M1, E2M1, SUM_F32, 128, 64, 4, 1, BOTH(SWIZZLE_128), .scales = 4, .scale = UE4M3,
         .modifiers = ".block_scale.block16.collector::a::lastuse", .a_negated = true},
        {NVF4, E2M1, E2M1, SUM_F32, 128, 64, 4, 1, BOTH(SWIZZLE_128), .scales = 2, .scale = UE8M0,
         .modifiers = ".block_scale.scale_vec::2X"},
        {MXF8F6F4, E4M3, E4M3, SUM_F32, 256, 256, 4, 2, BOTH(SWIZZLE_128), .scales = 1,
         .scale = UE8M0, .modifiers = ".block_scale"},
        {MXF8F6F4, E4M3, E5M2, SUM_F32, 128, 128, 2, 2, BOTH(SWIZZLE_128), .scales = 1,
         .scale = UE8M0, .modifiers = ".block_scale"},
        {NVF4, E2M1, E2M1, SUM_F32, 256, 192, 2, 2, BOTH(SWIZZLE_128), .scales = 4, .scale = UE4M3,
         .modifiers = ".block_scale.block16"},
    };
    (void)state;
    srand(4);
    CHECK_ALL(products);
}

static void mma_of_block_pairs(void **state) {
    static const product products[] = {
        {KIND_F16, BF16, BF16, SUM_F32, 256, 256, 4, 2, BOTH(SWIZZLE_128)},
        {KIND_F16, F16, F16, SUM_F32, 128, 128, 4, 2, BOTH(SWIZZLE_128)},
        {KIND_F16, F16, F16, SUM_F16, 128, 64, 2, 2, BOTH(SWIZZLE_64), .overwrite = true},
        {KIND_F16, F16, F16, SUM_F32, 256, 128, 2, 2, BOTH(SWIZZLE_128), .a_mn_major = true,
         .b_mn_major = true},
        {KIND_F16, F16, F16, SUM_F32, 128, 64, 2, 2, BOTH(SWIZZLE_128), .a_in_tensor = true},
        {KIND_F16, F16, F16, SUM_F32, 256, 64, 2, 2, BOTH(SWIZZLE_128), .a_in_tensor = true,
         .disable = 0x10000010, .shift = 2},
        {KIND_I8, S8, S8, SUM_S32, 256, 96, 4, 2, BOTH(SWIZZLE_128)},
        {KIND_F8F6F4, E5M2, E2M3, SUM_F32, 256, 32, 4, 2, BOTH(SWIZZLE_128)},
        {KIND_TF32, TF32, TF32, SUM_F32, 128, 32, 4, 2, BOTH(SWIZZLE_128)},
    };
    (void)state;
    srand(5);
    CHECK_ALL(products);
}

/* ---- loads and stores ---------------------------------------------------------------------- */

static const struct {
    const char *name;
    int registers, columns, lanes; /* registers of .x1 */
} shapes[] = {{"32x32b", 1, 1, 32},
              {"16x64b", 1, 2, 16},
              {"16x128b", 2, 4, 16},
              {"16x256b", 4, 8, 16},
              {"16x32bx2", 1, 1, 16}};

/* Returns register and thread of a cell, as in the figures of 9.7.16.2.3.1. `column` counts pairs of columns if they
 * are packed; `half` is the second half of .16x32bx2. */
static void holder_of(int shape, int lane, int column, int half, int *thread, int *at) {
    const int upper = lane / 8, row = lane % 8;
    switch (shape) {
    case 0: *thread = lane, *at = column; break;
    case 1: *thread = 4 * row + 2 * (column % 2) + upper, *at = column / 2; break;
    case 2: *thread = 4 * row + column % 4, *at = 2 * (column / 4) + upper; break;
    case 3:
        *thread = 4 * row + column % 8 / 2, *at = 4 * (column / 8) + 2 * upper + column % 2;
        break;
    default: *thread = lane + 16 * half, *at = column;
    }
}

typedef struct transfer {
    int shape, times, lane, split;
    bool packed;
} transfer;

/* Writes the instruction for registers %r100 and up, at column 8 of the warp's lanes. */
static int write_transfer(char *text, const transfer *t, bool store) {
    const int count = t->times * shapes[t->shape].registers;
    char vector[1600], *at = vector, split[16] = "";
    for (int i = 0; i < count; i++) at += sprintf(at, "%s%%r%d", i ? "," : "", 100 + i);
    if (t->split) sprintf(split, ", %d", t->split);
    at = text;
    at += sprintf(at, "add.u32 %%r90, %%r13, 0x%x;\n", t->lane << 16 | 8);
    if (store)
        at += sprintf(at,
                      "tcgen05.st.sync.aligned.%s.x%d%s.b32 [%%r90]%s, {%s};\n"
                      "tcgen05.wait::st.sync.aligned;\n",
                      shapes[t->shape].name, t->times, t->packed ? ".unpack::16b" : "", split,
                      vector);
    else
        at +=
            sprintf(at,
                    "tcgen05.ld.sync.aligned.%s.x%d%s.b32 {%s}, [%%r90]%s;\n"
                    "tcgen05.wait::ld.sync.aligned;\n",
                    shapes[t->shape].name, t->times, t->packed ? ".pack::16b" : "", vector, split);
    return (int)(at - text);
}

static uint32_t stored_value(int thread, int i) {
    return (uint32_t)thread * 0x01010003u + (uint32_t)i * 0x00070101u;
}

static void check_transfer(const transfer *t) {
    frame f = open_frame(1, 4);
    const int count = t->times * shapes[t->shape].registers,
              columns = t->times * shapes[t->shape].columns, halves = t->split ? 2 : 1;
    char *text = malloc(60000), *at = text;
    assert_non_null(text);
    f.filled = COLUMNS;
    for (int i = 0; i < LANES * COLUMNS; i++) f.tensor[i] = (uint32_t)rand();
    at += write_transfer(at, t, false);
    for (int i = 0; i < count; i++)
        at += sprintf(at, "st.global.u32 [%%rd3+%d], %%r%d;\n", 4 * i, 100 + i);
    run_well(&f, "", text);
    for (int cells = 0; cells < 128 / 32 * shapes[t->shape].lanes * columns * halves; cells++) {
        const int half = cells % halves, column = cells / halves % columns,
                  lane = cells / halves / columns % shapes[t->shape].lanes,
                  warp = cells / halves / columns / shapes[t->shape].lanes;
        int thread, i;
        holder_of(t->shape, lane, column, half, &thread, &i);
        const int tensor_lane = 32 * warp + t->lane + lane,
                  tensor_column = 8 + half * t->split + column * (t->packed ? 2 : 1);
        uint32_t wanted = *cell(f.tensor, 0, tensor_lane, tensor_column);
        if (t->packed)
            wanted = (wanted & 0xFFFF) | *cell(f.tensor, 0, tensor_lane, tensor_column + 1) << 16;
        const uint32_t got = *cell(f.out, 0, 32 * warp + thread, i);
        if (got != wanted)
            fail_msg("ld.%s.x%d%s: thread %d, register %d: 0x%x, expected 0x%x",
                     shapes[t->shape].name, t->times, t->packed ? ".pack" : "", thread, i, got,
                     wanted);
    }

    at = text;
    for (int i = 0; i < count; i++)
        at += sprintf(at, "mul.lo.u32 %%r%d, %%r2, 0x01010003; add.u32 %%r%d, %%r%d, 0x%x;\n",
                      100 + i, 100 + i, 100 + i, stored_value(0, i));
    at += write_transfer(at, t, true);
    char *read_back = read_ptx("tensor_core_read_back.ptx");
    strcpy(at, read_back);
    free(read_back);
    run_well(&f, "", text);
    unsigned char *written = calloc(LANES, COLUMNS);
    assert_non_null(written);
    for (int cells = 0; cells < 128 / 32 * shapes[t->shape].lanes * columns * halves; cells++) {
        const int half = cells % halves, column = cells / halves % columns,
                  lane = cells / halves / columns % shapes[t->shape].lanes,
                  warp = cells / halves / columns / shapes[t->shape].lanes;
        int thread, i;
        holder_of(t->shape, lane, column, half, &thread, &i);
        for (int part = 0; part <= t->packed; part++) {
            const int to = 32 * warp + t->lane + lane,
                      to_column = 8 + half * t->split + column * (t->packed ? 2 : 1) + part;
            uint32_t wanted = stored_value(32 * warp + thread, i),
                     got = *cell(f.out, 0, to, to_column);
            if (t->packed) wanted = wanted >> 16 * part & 0xFFFF, got &= 0xFFFF;
            if (got != wanted)
                fail_msg("st.%s.x%d%s: lane %d, column %d: 0x%x, expected 0x%x",
                         shapes[t->shape].name, t->times, t->packed ? ".unpack" : "", to, to_column,
                         got, wanted);
            written[to * COLUMNS + to_column] = 1;
        }
    }
    for (int i = 0; i < LANES * COLUMNS; i++)
        if (!written[i]) assert_int_equal(f.out[i], f.tensor[i]);
    free(text), free(written);
    close_frame(&f);
}

static void loads_and_stores_of_every_shape(void **state) {
    (void)state;
    srand(6);
    for (int shape = 0; shape < 5; shape++) {
        for (int times = 1; times * shapes[shape].registers <= 128; times *= 2) {
            for (int form = 0; form < 3; form++) {
                transfer t = {shape, times, 0, 0, form == 1};
                if (form == 2 && shapes[shape].lanes == 16) t.lane = 16;
                if (form == 2 && shape == 0) continue;
                if (shape == 4) t.split = times * (t.packed ? 2 : 1) + 16;
                if (times * shapes[shape].columns * (t.packed ? 2 : 1) + t.split > COLUMNS - 8)
                    continue;
                check_transfer(&t);
            }
        }
    }
}

/* ---- copies -------------------------------------------------------------------------------- */

static int row_of_copy(int shape, int lane) {
    switch (shape) {
    case 0:
    case 1: return lane;
    case 2: return lane % 64;                  /* warps 0 and 2, 1 and 3 */
    case 3: return lane / 64 * 32 + lane % 32; /* warps 0 and 1, 2 and 3 */
    default: return lane % 32;
    }
}

static void copies_of_every_shape(void **state) {
    static const struct {
        const char *name;
        int rows, columns;
    } copies[] = {{"128x256b", 128, 8},
                  {"128x128b", 128, 4},
                  {"64x128b.warpx2::02_13", 64, 4},
                  {"64x128b.warpx2::01_23", 64, 4},
                  {"32x128b.warpx4", 32, 4}};
    (void)state;
    srand(7);
    for (int shape = 0; shape < 5; shape++) {
        for (int form = 0; form < 4; form++) {
            const int blocks = 1 + form / 2, swizzle = form % 2 ? SWIZZLE_128 : PLAIN;
            frame f = open_frame(blocks, 65536);
            matrix m = make_matrix(U8, copies[shape].rows, 32, true, false, swizzle, 2048);
            char text[2000], *at = text;
            f.filled = 16;
            for (size_t i = 0; i < (size_t)blocks * f.shared_bytes; i++)
                f.shared[i] = (unsigned char)rand();
            for (int i = 0; i < blocks * LANES * COLUMNS; i++) f.tensor[i] = (uint32_t)rand();
            at += make_descriptor(at, 20, &m, 0);
            sprintf(at, "add.u32 %%r31, %%r14, 4; tcgen05.cp.cta_group::%d.%s [%%r31], %%rd20;\n",
                    blocks, copies[shape].name);
            run_well(&f, text, NULL);
            for (int i = 0; i < blocks * LANES * 16; i++) {
                const int block = i / LANES / 16, lane = i / 16 % LANES, column = i % 16;
                uint32_t wanted = *cell(f.tensor, block, lane, column);
                if (column >= 4 && column < 4 + copies[shape].columns)
                    memcpy(&wanted,
                           f.shared + (size_t)block * f.shared_bytes +
                               place_of(&m, (uint32_t)row_of_copy(shape, lane),
                                        (uint32_t)(column - 4) * 4),
                           4);
                if (*cell(f.out, block, lane, column) != wanted)
                    fail_msg("cp.%s: block %d, lane %d, column %d", copies[shape].name, block, lane,
                             column);
            }
            close_frame(&f);
        }
    }
}

/* Shifts columns 8 to 15 twice: in one warp's lanes, all but the last receive the next lane's value. */
static void rows_are_shifted(void **state) {
    (void)state;
    srand(11);
    for (int blocks = 1; blocks <= 2; blocks++) {
        frame f = open_frame(blocks, 1024);
        char text[400];
        f.filled = 24;
        for (int i = 0; i < blocks * LANES * COLUMNS; i++) f.tensor[i] = (uint32_t)rand();
        sprintf(text,
                "add.u32 %%r31, %%r14, 0x00400008; tcgen05.shift.cta_group::%d.down [%%r31]; "
                "tcgen05.shift.cta_group::%d.down [%%r31];\n",
                blocks, blocks);
        run_well(&f, text, NULL);
        for (int i = 0; i < blocks * LANES * 24; i++) {
            const int block = i / LANES / 24, lane = i / 24 % LANES, column = i % 24;
            int from = lane;
            if (lane / 32 == 2 && column / 8 == 1)
                for (int times = 0; times < 2; times++) from += from % 32 != 31;
            if (*cell(f.out, block, lane, column) != *cell(f.tensor, block, from, column))
                fail_msg("block %d, lane %d, column %d", block, lane, column);
        }
        close_frame(&f);
    }
}

/* Sixteen elements of 4 or 6 bits in sixteen bytes become one byte each, with the element in the middle. */
static void copies_expand_elements_to_bytes(void **state) {
    static const char *const names[] = {"128x256b.b8x16.b4x16_p64", "128x128b.b8x16.b6x16_p32",
                                        "64x128b.warpx2::01_23.b8x16.b6x16_p32",
                                        "32x128b.warpx4.b8x16.b4x16_p64"};
    static const int bits[] = {4, 6, 6, 4}, columns[] = {8, 4, 4, 4}, shape[] = {0, 1, 3, 4};
    (void)state;
    srand(10);
    for (int i = 0; i < 4; i++) {
        frame f = open_frame(1, 65536);
        matrix m = make_matrix(U8, 128, 32, true, false, PLAIN, 1024);
        char text[2000], *at = text;
        f.filled = 16;
        for (size_t k = 0; k < f.shared_bytes; k++) f.shared[k] = (unsigned char)rand();
        at += make_descriptor(at, 20, &m, 0);
        sprintf(at, "tcgen05.cp.cta_group::1.%s [%%r14], %%rd20;\n", names[i]);
        run_well(&f, text, NULL);
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t row = (uint32_t)row_of_copy(shape[i], lane);
            for (int k = 0; k < 4 * columns[i]; k++) {
                const unsigned char *from = f.shared + place_of(&m, row, (uint32_t)(k / 16 * 16));
                unsigned code = 0;
                for (int bit = 0; bit < bits[i]; bit++) {
                    const int where = k % 16 * bits[i] + bit;
                    code |= (from[where / 8] >> where % 8 & 1u) << bit;
                }
                const unsigned got = *cell(f.out, 0, lane, k / 4) >> 8 * (k % 4) & 0xFF;
                assert_int_equal(got, bits[i] == 4 ? code << 2 : code << 1);
            }
        }
        close_frame(&f);
    }
}

/* ---- allocation ---------------------------------------------------------------------------- */

/* Runs a body in a separate kernel, on one block of `threads` threads. %r1 is the thread, %rd1 the thread's word of the
 * output. */
static dw_status run_alone(dw_emulator *emulator, const char *body, uint32_t threads,
                           uint32_t *out) {
    char *text = replace_in_ptx(read_ptx("tensor_memory_frame.ptx"), "@BODY@", body);
    dw_emulator_module *module;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    void *memory;
    dw_emulator_clear_findings(emulator);
    if (dw_emulator_load(emulator, text, strlen(text), "test.ptx", &module) != DW_OK)
        fail_msg("%s", dw_last_error());
    free(text);
    options.block[0] = threads;
    assert_int_equal(dw_emulator_allocate(emulator, 4 * threads, &memory), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, memory, 0xEE, 4 * threads), DW_OK);
    dw_status status = dw_emulator_launch(module, "f", &options, (void *[]){&memory}, NULL);
    if (out) assert_int_equal(dw_emulator_copy_out(emulator, out, memory, 4 * threads), DW_OK);
    assert_int_equal(dw_emulator_release(emulator, memory), DW_OK);
    dw_emulator_unload(module);
    return status;
}

#define ALLOC(where, columns)                                                                      \
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+" where "], " columns ";\n"
#define FREE(where, columns)                                                                       \
    "ld.shared.u32 %r9, [%r2+" where                                                               \
    "]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, " columns ";\n"

/* Eight warps request 128 columns each: four at a time get them, and no two get the same ones. */
static void columns_are_allocated_to_one_warp_each(void **state) {
    uint32_t out[256], seen[4] = {0};
    dw_emulator *emulator;
    (void)state;
    assert_int_equal(dw_emulator_create("sm_100a", NULL, &emulator), DW_OK);
    static const char body[] = "shl.b32 %r4, %r3, 2; add.u32 %r2, %r2, %r4;\n" ALLOC(
        "0", "128") "ld.shared.u32 %r5, [%r2]; st.global.u32 [%rd1], %r5;\n" FREE("0", "128");
    assert_int_equal(run_alone(emulator, body, 256, out), DW_OK);
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    for (int warp = 0; warp < 8; warp++) {
        assert_true(out[32 * warp] % 128 == 0 && out[32 * warp] < COLUMNS);
        seen[out[32 * warp] / 128]++;
    }
    static const char all[] = "shl.b32 %r4, %r3, 2; add.u32 %r2, %r2, %r4;\n" ALLOC(
        "0",
        "128") "bar.sync 0; ld.shared.u32 %r5, [%r2]; st.global.u32 [%rd1], %r5;\n" FREE("0",
                                                                                         "128");
    assert_int_equal(run_alone(emulator, all, 128, out), DW_OK);
    for (int warp = 0; warp < 4; warp++)
        for (int other = 0; other < warp; other++)
            assert_int_not_equal(out[32 * warp], out[32 * other]);
    dw_emulator_destroy(emulator);
}

/* ---- mistakes ------------------------------------------------------------------------------ */

static void expect_found(dw_emulator *emulator, const char *what, const char *kind,
                         const char *words) {
    dw_finding finding;
    char text[2000];
    if (dw_emulator_finding_count(emulator) == 0) fail_msg("nothing was found: %s", what);
    assert_int_equal(dw_emulator_finding(emulator, 0, &finding), DW_OK);
    dw_finding_text(&finding, text, sizeof text);
    if (strcmp(finding.kind, kind) != 0 || !strstr(text, words)) fail_msg("%s\n%s", what, text);
    assert_true(finding.ptx_line > 0);
}
static void expect_alone(const char *body, const char *kind, const char *words) {
    dw_emulator *emulator;
    assert_int_equal(dw_emulator_create("sm_100a", NULL, &emulator), DW_OK);
    run_alone(emulator, body, 64, NULL);
    expect_found(emulator, body, kind, words);
    dw_emulator_destroy(emulator);
}
static void expect_framed(int filled, const char *body, const char *after, const char *kind,
                          const char *words) {
    frame f = open_frame(1, 65536);
    f.filled = filled;
    run_frame(&f, body, after);
    expect_found(f.emulator, after ? after : body, kind, words);
    close_frame(&f);
}

#define LOAD "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r90}, [%r13];\n"
#define WAIT_LOAD "tcgen05.wait::ld.sync.aligned;\n"

/* The reader waits until the value is there, in every order of execution. */
static void early_readers_wait_for_the_value(void **state) {
    (void)state;
    srand(9);
    for (int round = 0; round < 10; round++) {
        frame f = open_frame(1, 65536);
        f.filled = 8;
        for (size_t i = 0; i < (size_t)LANES * COLUMNS; i++) f.tensor[i] = (uint32_t)rand();
        run_frame(&f, "",
                  LOAD "st.global.u32 [%rd3], %r90;\n" WAIT_LOAD
                       "add.u32 %r13, %r13, 1; add.s64 %rd3, %rd3, 4;\n" LOAD
                       "xor.b32 %r91, %r90, 1; st.global.u32 [%rd3], %r91;\n"
                       "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {%r91};\n"
                       "add.s64 %rd3, %rd3, 4;\n" LOAD WAIT_LOAD "st.global.u32 [%rd3], %r90;\n"
                       "tcgen05.wait::st.sync.aligned;\n");
        assert_int_equal(dw_emulator_finding_count(f.emulator), 3);
        for (int lane = 0; lane < LANES; lane++) {
            assert_int_equal(*cell(f.out, 0, lane, 0), *cell(f.tensor, 0, lane, 0));
            assert_int_equal(*cell(f.out, 0, lane, 1), *cell(f.tensor, 0, lane, 1) ^ 1);
            assert_int_equal(*cell(f.out, 0, lane, 2), *cell(f.tensor, 0, lane, 1) ^ 1);
        }
        close_frame(&f);
    }
}

static void mistakes_are_found(void **state) {
    (void)state;
    srand(8);
    expect_framed(8, "", LOAD "st.global.u32 [%rd3], %r90;\n" WAIT_LOAD, "too early",
                  "before the wait");
    expect_framed(8, "",
                  "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {%r2};\n" LOAD WAIT_LOAD
                  "tcgen05.wait::st.sync.aligned;\n",
                  "too early", "a tcgen05.wait::st is missing in between");
    expect_framed(0, "", LOAD WAIT_LOAD, "undefined", "32 cells were never written");
    expect_framed(8, "", "xor.b32 %r13, %r13, 0x600000;\n" LOAD WAIT_LOAD, "tensor memory",
                  "can access lanes"); /* lanes of another warp */
    expect_framed(8, "", "add.u32 %r13, %r13, 512;\n" LOAD WAIT_LOAD, "tensor memory",
                  "do not exist");
    expect_framed(8, "",
                  "setp.ge.u32 %p5, %r2, 32; @%p5 bra $no; tcgen05.dealloc.cta_group::1.sync."
                  "aligned.b32 %r14, 512; $no: bar.sync 0;\n" LOAD WAIT_LOAD,
                  "tensor memory", "are not allocated");
    expect_framed(8, "",
                  "setp.ge.u32 %p5, %r2, 32; @%p5 bra $no; tcgen05.dealloc.cta_group::1.sync."
                  "aligned.b32 %r14, 512; $no: bar.sync 0;\n",
                  "tensor memory", "were already freed");
    expect_framed(8, "",
                  "setp.ge.u32 %p5, %r2, 32; @%p5 bra $no; tcgen05.dealloc.cta_group::1.sync."
                  "aligned.b32 %r14, 256; $no: bar.sync 0;\n",
                  "tensor memory", "a different number of columns");
    expect_alone(
        "setp.ne.u32 %p1, %r3, 0; @%p1 bra $end;\n" ALLOC("0", "64") "$end:", "tensor memory",
        "64 columns of tensor memory at column 0, allocated here, were not freed");
    expect_alone("setp.ne.u32 %p1, %r3, 0; @%p1 bra $end;\n" ALLOC("0", "48") "$end:", "invalid",
                 "a power of two");
    expect_alone(
        "setp.ne.u32 %p1, %r3, 0; @%p1 bra $end;\n"
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n" ALLOC("0", "32") "$end:",
        "tensor memory", "relinquished its permit");
    expect_alone("setp.ne.u32 %p1, %r3, 0; @%p1 bra $end;\n" ALLOC("0", "512")
                     ALLOC("4", "32") "$end:",
                 "deadlock", "waiting for 32 columns of tensor memory");
    expect_alone("setp.ne.u32 %p1, %r3, 0; @%p1 bra $end;\n"
                 "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], 32; $end:",
                 "invalid", "no peer");
    expect_framed(8, "tcgen05.cp.cta_group::2.32x128b.warpx4 [%r14], 0x4000000000000000;", NULL,
                  "invalid", ".cta_group::2 in a kernel that uses .cta_group::1");
}

/* Runs a correct MMA, and checks the findings when one part of it is changed. */
static void mistakes_in_mma_are_found(void **state) {
    static const product halves = {KIND_F16, F16, F16, SUM_F32, 128, 64, 1, 1, BOTH(SWIZZLE_128)};
    static const product scaled = {MXF8F6F4,
                                   E4M3,
                                   E4M3,
                                   SUM_F32,
                                   128,
                                   64,
                                   1,
                                   1,
                                   BOTH(SWIZZLE_128),
                                   .scales = 1,
                                   .scale = UE8M0,
                                   .modifiers = ".block_scale"};
    enum { RIGHT, NO_D, NO_VERSION, BAD_N, TOO_FAR, SPARSE, NOT_COPIED, CASES };
    static const char *const found[CASES][2] = {
        [NO_D] = {"undefined", "an MMA adds to D"},
        [NO_VERSION] = {"invalid", "bits 46 to 48"},
        [BAD_N] = {"invalid", "N must be a multiple of 16"},
        [TOO_FAR] = {"out of bounds", "beyond the block's shared memory"},
        [SPARSE] = {"invalid", "sparse matrices are not supported"},
        [NOT_COPIED] = {"tensor memory", "differ between the ranges"},
    };
    (void)state;
    srand(9);
    for (int wrong = 0; wrong < CASES; wrong++) {
        const product *p = wrong == NOT_COPIED ? &scaled : &halves;
        frame f = open_frame(1, SHARED_BYTES);
        numbers *x = malloc(sizeof *x);
        char text[4000], *at;
        matrix a, b;
        assert_non_null(x);
        f.filled = wrong == NO_D ? 0 : COLUMNS;
        fill_operands(&f, p, &a, &b, x);
        if (p->scales) fill_scales(&f, p, x);
        if (wrong == NOT_COPIED) *cell(f.tensor, 0, 32 + 7, A_SCALES + 1) ^= 1;
        if (wrong == TOO_FAR) b.sbo = 32768;
        write_body(text, p, &a, &b);
        if (wrong == NO_VERSION) {
            at = strstr(text, "0x40004");
            assert_non_null(at);
            memcpy(at, "0x40000", 7);
        }
        if (wrong == BAD_N || wrong == SPARSE) {
            at = strstr(text, "%r33, 0x");
            assert_non_null(at);
            uint32_t descriptor = (uint32_t)strtoul(at + 6, NULL, 16);
            descriptor ^= wrong == BAD_N ? 1u << 17 : 1u << 2;
            char digits[16];
            snprintf(digits, sizeof digits, "0x%x", descriptor);
            memcpy(at + 6, digits, strlen(digits));
        }
        const dw_status status = run_frame(&f, text, wrong == NO_D ? "" : NULL);
        if (wrong == RIGHT) {
            assert_int_equal(status, DW_OK);
            assert_int_equal(dw_emulator_finding_count(f.emulator), 0);
        } else {
            expect_found(f.emulator, text, found[wrong][0], found[wrong][1]);
        }
        free(x);
        close_frame(&f);
    }
}

static void unsupported_instructions_are_rejected(void **state) {
    static const char *const refused[] = {
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd3, %rd4, [%r2], %r3, %p1;",
        "tcgen05.cp.cta_group::1.128x128b.b8x16 [%r1], %rd3;",
        "tcgen05.cp.cta_group::1.4x256b [%r1], %rd3;",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.max.u32 {%r4,%r5}, %r6, [%r1];",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd3, %rd4, %r3, %p1, %rd5;",
    };
    static const char *const without[] = {"sm_90a", "sm_120a"};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        char *text = one_instruction_ptx("sm_100a", "tcgen05.wait::ld.sync.aligned;");
        dw_emulator *emulator;
        dw_emulator_module *module;
        assert_int_equal(dw_emulator_create(without[i], NULL, &emulator), DW_OK);
        dw_status status = dw_emulator_load(emulator, text, strlen(text), "test.ptx", &module);
        if (status == DW_OK) status = dw_emulator_has_kernel(module, "f");
        assert_int_equal(status, DW_UNSUPPORTED);
        free(text);
        dw_emulator_destroy(emulator);
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char *text = one_instruction_ptx("sm_100a", refused[i]);
        dw_emulator *emulator;
        dw_emulator_module *module;
        assert_int_equal(dw_emulator_create("sm_100a", NULL, &emulator), DW_OK);
        assert_int_equal(dw_emulator_load(emulator, text, strlen(text), "test.ptx", &module),
                         DW_OK);
        assert_int_equal(dw_emulator_has_kernel(module, "f"), DW_UNSUPPORTED);
        assert_non_null(strstr(dw_last_error(), "tcgen05."));
        free(text);
        dw_emulator_destroy(emulator);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f16_mma),
        cmocka_unit_test(mma_of_every_layout),
        cmocka_unit_test(mma_of_every_kind),
        cmocka_unit_test(block_scaled_mma),
        cmocka_unit_test(mma_of_block_pairs),
        cmocka_unit_test(loads_and_stores_of_every_shape),
        cmocka_unit_test(copies_of_every_shape),
        cmocka_unit_test(copies_expand_elements_to_bytes),
        cmocka_unit_test(rows_are_shifted),
        cmocka_unit_test(columns_are_allocated_to_one_warp_each),
        cmocka_unit_test(mistakes_are_found),
        cmocka_unit_test(early_readers_wait_for_the_value),
        cmocka_unit_test(mistakes_in_mma_are_found),
        cmocka_unit_test(unsupported_instructions_are_rejected),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
