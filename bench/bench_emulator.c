/* `bench_emulator` measures the emulator's own speed and memory: runs one kernel and prints a line of JSON.
 *
 * bench_emulator gemm | forward | backward | definition  [--no-check] [--threads N] [--size N]
 *
 * gemm: BF16, 512 x 512 x 512 (or --size, a multiple of 256), on sm_100a by pairs of blocks. The others: attention on
 * sm_90a, 2 heads of 512 rows (or --size; by definition: 64), head dimension 128, causal. Lane-instructions are those
 * that the launches executed. Seconds are CPU time, the minimum of three runs, because the machine may have other work.
 */
#include "common/attention_backward_layout.h"
#include "deepwell/emulator.h"
#include "deepwell/threads.h"
#include "jit/jit_internal.h"
#include "kernel/cuda/gpu_attention.h"
#include "number/half.h"
#include "sm100/gemm_params.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static dw_emulator *emulator;
static int given_size; /* 0: not given */
static size_t tensor_bytes;
static uint64_t instructions;

static void must(dw_status status) {
    if (status == DW_OK) return;
    fprintf(stderr, "bench_emulator: %s\n", dw_last_error());
    exit(2);
}

/* The memory limit of the process, so that its peak can be measured. */
static long resident_kib(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}
static double processor_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- memory and modules ---------------------------------------------------------------------- */

static void *space(size_t bytes) {
    void *made;
    must(dw_emulator_allocate(emulator, bytes, &made));
    tensor_bytes += bytes;
    return made;
}

/* Makes numbers between -1 and 1 that differ. */
static void *numbers(size_t count) {
    static uint64_t state = 1;
    void *made = space(2 * count);
    uint16_t *host = malloc(2 * count);
    if (!host) exit(2);
    for (size_t i = 0; i < count; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        host[i] = dw__f32_to_bf16((float)(int32_t)(state >> 32) * 0x1p-31f);
    }
    must(dw_emulator_copy_in(emulator, made, host, 2 * count));
    free(host);
    return made;
}

/* Reads the PTX that the library carries; else compiles it. */
static dw_emulator_module *module_of(const dw__jit_variant *variant) {
    dw__text name = {0};
    dw_emulator_module *module;
    const dw__jit_file *file = dw__jit_ptx;
    void *image = NULL;
    size_t bytes;
    must(dw__jit_variant_name(variant, &name));
    while (file->name && strcmp(file->name, name.text) != 0) file++;
    if (!file->name) must(dw__jit_image(variant, DW__JIT_PTX, &image, &bytes));
    const char *text = file->name ? (const char *)file->begin : image;
    must(dw_emulator_load(emulator, text, strlen(text), name.text, &module));
    dw__free(image);
    dw__text_free(&name);
    return module;
}

static void launch(dw_emulator_module *module, const char *kernel, unsigned blocks,
                   unsigned threads, unsigned shared_bytes, void **arguments) {
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    uint64_t executed = 0;
    options.grid[0] = blocks, options.block[0] = threads, options.shared_bytes = shared_bytes;
    must(dw_emulator_launch(module, kernel, &options, arguments, &executed));
    instructions += executed;
}

static void map_of(void *address, int rank, const uint64_t *size, const uint64_t *stride,
                   const uint32_t *box, void *map) {
    dw_emulator_tensor_shape shape = {
        .struct_size = sizeof shape, .element = 9, .rank = rank, .address = address, .swizzle = 3};
    for (int axis = 0; axis < rank; axis++) {
        shape.size[axis] = size[axis], shape.box[axis] = box[axis], shape.step[axis] = 1;
        if (axis) shape.stride[axis - 1] = stride[axis - 1];
    }
    must(dw_emulator_tensor_map(&shape, map));
}

/* ---- GEMM -------------------------------------------------------------------------------------- */

enum { CTAS = 2, TILE_N = 256, STAGES = 6 };

static void run_gemm(void) {
    const int n = given_size ? given_size : 512;
    const size_t count = (size_t)n * (size_t)n;
    static dw_emulator_module *module;
    static _Alignas(64) unsigned char maps[3][128];
    if (!module) {
        dw__jit_variant v = {.source = "sm100/gemm.cu", .entry = "sm100_gemm", .arch = "sm_100f"};
        dw__jit_add_define(&v, "CTAS", CTAS), dw__jit_add_define(&v, "TILE_N", TILE_N);
        dw__jit_add_define(&v, "STAGES", STAGES), dw__jit_add_define(&v, "ELEMENT", 0);
        dw__jit_add_define(&v, "OUTPUT", 0), dw__jit_add_define(&v, "ACTIVATION", 0);
        dw__jit_add_define(&v, "BIAS", 0), dw__jit_add_define(&v, "RESIDUAL", 0);
        module = module_of(&v);
        const uint64_t size[] = {(uint64_t)n, (uint64_t)n}, stride[] = {2 * (uint64_t)n};
        map_of(numbers(count), 2, size, stride, (uint32_t[]){64, 128}, maps[0]);
        map_of(numbers(count), 2, size, stride, (uint32_t[]){64, TILE_N / CTAS}, maps[1]);
        map_of(space(2 * count), 2, size, stride, (uint32_t[]){64, 32}, maps[2]);
    }
    const int rows = n / (CTAS * DW_GEMM_ROWS), columns = n / TILE_N;
    dw_gemm_params params = {
        .groups = 1, .m = n, .n = n, .k = n, .tiles_m = rows, .tiles_n = columns, .alpha = 1};
    launch(module, "sm100_gemm", (unsigned)(rows * columns * CTAS), DW_GEMM_THREADS,
           DW_GEMM_SHARED_BYTES(CTAS, TILE_N, STAGES),
           (void *[]){maps[0], maps[1], maps[2], maps[2], &params});
}

/* ---- attention --------------------------------------------------------------------------------- */

enum { HEADS = 2, HEAD_DIM = 128 };
static int rows;
static dw_attention call;

static dw_attention_tensor tensor(bool filled) {
    const size_t count = (size_t)HEADS * (size_t)rows * HEAD_DIM;
    return (dw_attention_tensor){.data = filled ? numbers(count) : space(2 * count),
                                 .batch = (int64_t)count,
                                 .head = (int64_t)rows * HEAD_DIM,
                                 .row = HEAD_DIM};
}

static void prepare(int of_rows) {
    if (rows) return;
    rows = given_size ? given_size : of_rows;
    call = (dw_attention){.struct_size = sizeof call,
                          .dtype = DW_BF16,
                          .batch = 1,
                          .heads_q = HEADS,
                          .heads_kv = HEADS,
                          .seq_len_q = rows,
                          .seq_len_kv = rows,
                          .head_dim = HEAD_DIM,
                          .scale = 0.0883883461f,
                          .window_left = -1};
    call.q = tensor(true), call.k = tensor(true), call.v = tensor(true), call.d_o = tensor(true);
    call.o = tensor(false), call.dq = tensor(false), call.dk = tensor(false),
    call.dv = tensor(false);
    call.lse = space((size_t)HEADS * (size_t)rows * sizeof(float));
}

static void map_attention(const dw_attention_tensor *t, int box_rows, void *map) {
    const uint64_t size[] = {HEAD_DIM, (uint64_t)rows, HEADS, 1};
    const uint64_t stride[] = {2 * (uint64_t)t->row, 2 * (uint64_t)t->head, 2 * (uint64_t)t->batch};
    map_of(t->data, 4, size, stride, (uint32_t[]){64, (uint32_t)box_rows, 1, 1}, map);
}

static int tiles(int of) { return (rows + of - 1) / of * HEADS; }

static void run_forward(void) {
    static dw_emulator_module *module;
    static _Alignas(64) unsigned char maps[3][128];
    prepare(512);
    const dw__attention_shape shape = dw__attention_shape_of(&call, DW__ATTENTION_FORWARD, 132);
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, DW__ATTENTION_FORWARD);
    if (!module) {
        const dw__jit_variant v =
            dw__attention_variant(&shape, DW__ATTENTION_FORWARD, "", "sm_90a");
        module = module_of(&v);
        map_attention(&call.q, tile->m, maps[0]);
        map_attention(&call.k, tile->n, maps[1]), map_attention(&call.v, tile->n, maps[2]);
    }
    dw_attention_params params;
    dw__attention_set_params(&call, &params);
    params.tiles = tiles(tile->m);
    launch(module, "sm90_attention_forward", (unsigned)params.tiles,
           128u * (1u + (unsigned)tile->consumers), tile->shared_bytes,
           (void *[]){maps[0], maps[1], maps[2], &params});
}

static void run_backward(void) {
    static dw_emulator_module *module;
    static _Alignas(64) unsigned char maps[4][128];
    static char *workspace;
    static dw__attention_workspace places;
    prepare(512);
    const dw__attention_shape shape = dw__attention_shape_of(&call, DW__ATTENTION_BACKWARD, 132);
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, DW__ATTENTION_BACKWARD);
    if (!module) {
        const uint64_t before = instructions;
        run_forward(); /* writes O and LSE for backward */
        instructions = before;
        const dw__jit_variant v =
            dw__attention_variant(&shape, DW__ATTENTION_BACKWARD, "", "sm_90a");
        module = module_of(&v);
        map_attention(&call.q, tile->m, maps[0]), map_attention(&call.k, tile->n, maps[1]);
        map_attention(&call.v, tile->n, maps[2]), map_attention(&call.d_o, tile->m, maps[3]);
        must(dw__attention_workspace_of(&call, &shape, 132, &places));
        workspace = space(places.bytes);
        /* The kernels do not write the padding of their statistics, but copy it. */
        must(dw_emulator_fill(emulator, workspace, 0xFF, places.bytes));
    }
    dw_attention_params params;
    dw__attention_set_params(&call, &params);
    params.dq_sum = (float *)(void *)(workspace + places.dq_sum);
    params.delta = (float *)(void *)(workspace + places.delta);
    params.tiles = tiles(tile->n);
    void *arguments[] = {maps[0], maps[1], maps[2], maps[3], &params}, *own[] = {&params};
    launch(module, "sm90_attention_backward_prepare", (unsigned)tiles(tile->m), 256, 0, own);
    launch(module, "sm90_attention_backward", (unsigned)params.tiles,
           128u * (1u + (unsigned)tile->consumers), tile->shared_bytes, arguments);
    launch(module, "sm90_attention_backward_finish", (unsigned)tiles(tile->m), 256, 0, own);
}

static void run_definition(void) {
    static dw_emulator_module *module;
    prepare(64);
    if (!module) {
        const dw__jit_variant v =
            dw__attention_reference_variant(false, DW__ATTENTION_FORWARD, "sm_90a");
        module = module_of(&v);
    }
    dw_attention_params params;
    dw__attention_set_params(&call, &params);
    launch(module, "reference_attention_forward", 32, 128, 0, (void *[]){&params});
}

/* ---- the program ------------------------------------------------------------------------------- */

static const struct {
    const char *name, *architecture;
    void (*run)(void);
} kernels[] = {
    {"gemm", "sm_100a", run_gemm},
    {"forward", "sm_90a", run_forward},
    {"backward", "sm_90a", run_backward},
    {"definition", "sm_90a", run_definition},
};

int main(int count, char **arguments) {
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    size_t which = DW_COUNT(kernels);
    int threads = 1;
    for (int i = 1; i < count; i++) {
        if (strcmp(arguments[i], "--no-check") == 0)
            options.check = false;
        else if (strcmp(arguments[i], "--threads") == 0 && i + 1 < count)
            threads = atoi(arguments[++i]);
        else if (strcmp(arguments[i], "--size") == 0 && i + 1 < count)
            given_size = atoi(arguments[++i]);
        else
            for (size_t k = 0; k < DW_COUNT(kernels); k++)
                if (strcmp(arguments[i], kernels[k].name) == 0) which = k;
    }
    if (which == DW_COUNT(kernels) || threads < 1 || given_size % 256 || given_size < 0) {
        fprintf(stderr, "usage: bench_emulator gemm|forward|backward|definition [--no-check] "
                        "[--threads N] [--size N]\n");
        return 2;
    }
    must(dw_set_threads(threads));
    must(dw_emulator_create(kernels[which].architecture, &options, &emulator));
    kernels[which].run(); /* compiles, loads, touches memory */
    double least = 0, least_wall = 0;
    for (int i = 0; i < 3; i++) {
        const double begun = processor_seconds(), begun_wall = dw__seconds();
        instructions = 0;
        kernels[which].run();
        const double seconds = processor_seconds() - begun, wall = dw__seconds() - begun_wall;
        if (i == 0 || seconds < least) least = seconds;
        if (i == 0 || wall < least_wall) least_wall = wall;
    }
    dw_finding finding;
    char text[1200];
    if (dw_emulator_finding(emulator, 0, &finding) == DW_OK) {
        dw_finding_text(&finding, text, sizeof text);
        return fprintf(stderr, "bench_emulator: %s\n", text), 1;
    }
    printf("{\"kernel\": \"%s\", \"check\": %s, \"threads\": %d, \"lane_instructions\": %llu, "
           "\"processor_seconds\": %.4f, \"wall_seconds\": %.4f, \"per_core_second\": %.4g, "
           "\"tensor_mib\": %.1f, \"peak_mib\": %.1f}\n",
           kernels[which].name, options.check ? "true" : "false", threads,
           (unsigned long long)instructions, least, least_wall, (double)instructions / least,
           (double)tensor_bytes / 1048576, (double)resident_kib() / 1024);
    dw_emulator_destroy(emulator);
    return 0;
}
