/* `deepwell-kernels`: compiles the GPU kernels' variants without a GPU and compares the compiler's figures for each
 * (registers, spilled bytes, shared memory, warnings) with the committed table. This detects changes that make a kernel
 * spill, or that serialize its GEMMs.
 *
 *   deepwell-kernels [--quick] [--renew] [--list] [-p TEXT] [--threads N]
 *   deepwell-kernels --ptx DIR [--quick] [-p TEXT] [--threads N]     their PTX, a file each
 *   deepwell-kernels --launch     on a GPU: what a call of attention costs the host
 *
 * --renew writes the compiled variants' figures into the table and leaves its other rows. Exit status: 0 if the figures
 * agree with the table, 1 if not, 2 for wrong usage, 3 without a compiler.
 */
#include "base/json.h"
#include "common/adamw_params.h"
#include "common/quantize_params.h"
#include "jit/jit_internal.h"
#include "jit/nvrtc.h"
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_gemm.h"
#include "launch_cost.h"
#include "sm100/attention_forward_tiles.h"
#include "sm100/gemm_params.h"
#include "sm100/gemm_scaled_params.h"
#include "sm100/gemm_tiles.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_VARIANTS = 1024, MOST_ENTRIES = 4, MOST_THREADS = 64 };

typedef struct resources {
    char entry[64];
    int registers, stack, spill_stores, spill_loads, shared;
} resources;

typedef struct job {
    dw__jit_variant variant;
    char name[512];
    bool quick;
    dw_status status;
    char message[1024]; /* why compilation failed */
    resources entries[MOST_ENTRIES];
    int entry_count;
    char warning[512]; /* the first warning */
    double seconds;
} job;

static job jobs[MOST_VARIANTS];
static size_t job_count;

/* Blackwell's data-centre GPUs; compilers support it from 12.9 on. */
static const char family_arch[] = "sm_100f";

/* ---- variants -------------------------------------------------------------------------------------- */

static void add_job(dw__jit_variant variant, bool quick) {
    dw__text name = {0};
    if (dw__jit_variant_name(&variant, &name) != DW_OK) abort();
    for (size_t i = 0; i < job_count; i++)
        if (strcmp(jobs[i].name, name.text) == 0) goto cleanup; /* two shapes have the same tiles */
    if (job_count == MOST_VARIANTS) abort();
    job *made = &jobs[job_count++];
    made->variant = variant;
    made->quick = quick;
    snprintf(made->name, sizeof made->name, "%s", name.text);

cleanup:
    dw__text_free(&name);
}

/* Each head dimension, type and tile; each feature alone, with a mask and without if the mask changes the kernel, and
 * all of them together. */
static void list_attention(dw__attention_pass pass) {
    static const int head_dims[] = {64, 96, 128, 192, 256};
    static const struct {
        bool window, packed, softcap, dropout, deterministic, serial, quick;
        dw_attention_bias_kind bias;
    } features[] = {
        {.quick = true},
        {.window = true, .quick = true},
        {.packed = true},
        {.window = true, .packed = true},
        {.window = true, .softcap = true},
        {.window = true, .dropout = true},
        {.window = true, .deterministic = true},
        {.window = true,
         .packed = true,
         .softcap = true,
         .dropout = true,
         .deterministic = true,
         .quick = true},
        {.serial = true, .quick = true},
        {.window = true, .serial = true},
        {.window = true, .packed = true, .softcap = true, .dropout = true, .serial = true},
        {.deterministic = true, .bias = DW_ATTENTION_ADDED, .quick = true},
        {.window = true, .deterministic = true, .bias = DW_ATTENTION_ADDED},
        {.window = true, .deterministic = true, .dropout = true, .bias = DW_ATTENTION_ADDED},
        {.deterministic = true, .bias = DW_ATTENTION_VISIBLE},
        {.window = true, .serial = true, .bias = DW_ATTENTION_ADDED},
    };
    for (size_t d = 0; d < DW_COUNT(head_dims); d++)
        for (int f16 = 0; f16 < 2; f16++)
            for (size_t f = 0; f < DW_COUNT(features); f++)
                for (int many = 0; many < 2; many++) {
                    if (features[f].serial && pass == DW__ATTENTION_FORWARD) continue;
                    dw__attention_shape shape = {
                        .head_dim = head_dims[d],
                        .f16 = f16,
                        .softcap = features[f].softcap,
                        .dropout = features[f].dropout,
                        .packed = features[f].packed,
                        .window = features[f].window,
                        .deterministic =
                            pass == DW__ATTENTION_BACKWARD && features[f].deterministic,
                        .many_keys = many,
                        .serial = features[f].serial,
                        .bias = features[f].bias,
                    };
                    bool quick = features[f].quick && !f16 && !many && head_dims[d] % 128 == 0;
                    add_job(dw__attention_variant(&shape, pass, "", "sm_90a"), quick);
                }
}

/* Each tile of Blackwell's GEMM by itself, with cluster launch control, and with each activation and a complete
 * epilogue. SwiGLU uses half of the tile's columns, which are at least one box of D's. */
static void list_gemm(void) {
#define TILE(...) {__VA_ARGS__},
    static const struct { int ctas, tile_n, stages; } tiles[] = {DW_SM100_GEMM_TILES(TILE)};
#undef TILE
    for (size_t t = 0; t < DW_COUNT(tiles); t++)
        for (int f32 = 0; f32 < 2; f32++)
            for (int activation = -1; activation <= DW_GEMM_SWIGLU; activation++) {
                if (activation == DW_GEMM_SWIGLU && !f32 && tiles[t].tile_n < 128) continue;
                const int extras = activation >= 0;
                dw__jit_variant v = {.source = "sm100/gemm.cu", .entry = "", .arch = family_arch};
                dw__jit_add_define(&v, "CTAS", tiles[t].ctas);
                dw__jit_add_define(&v, "TILE_N", tiles[t].tile_n);
                dw__jit_add_define(&v, "STAGES", tiles[t].stages);
                dw__jit_add_define(&v, "ELEMENT", 0);
                dw__jit_add_define(&v, "OUTPUT", f32);
                dw__jit_add_define(&v, "ACTIVATION", extras ? activation : DW_GEMM_LINEAR);
                dw__jit_add_define(&v, "BIAS", extras);
                dw__jit_add_define(&v, "RESIDUAL", extras);
                add_job(v, tiles[t].tile_n == 256 && activation == DW_GEMM_SWIGLU && !f32);
                if (extras) continue;
                dw__jit_add_define(&v, "SCHEDULE", DW_GEMM_LAUNCH_CONTROL);
                add_job(v, false);
            }
}

/* Groups of rows and of the contraction, and operands across it: each tile, without an epilogue and with a complete
 * one. */
static void list_gemm_groups(void) {
    static const struct {
        int groups, turned_b, output, bias, residual, turned_a;
    } forms[] = {{DW_GROUPS_ROWS, 0, DW_GEMM_OUTPUT_ELEMENT, 0, 0, 0},
                 {DW_GROUPS_ROWS, 0, DW_GEMM_OUTPUT_ELEMENT, 1, 1, 0},
                 {DW_GROUPS_ROWS, 1, DW_GEMM_OUTPUT_ELEMENT, 0, 1, 0},
                 {DW_GROUPS_ROWS, 0, DW_GEMM_OUTPUT_F32, 1, 1, 0},
                 {DW_GROUPS_CONTRACTION, 1, DW_GEMM_OUTPUT_ELEMENT, 0, 0, 1},
                 {DW_GROUPS_CONTRACTION, 1, DW_GEMM_OUTPUT_ELEMENT, 0, 1, 1},
                 {DW_GROUPS_CONTRACTION, 1, DW_GEMM_OUTPUT_F32, 0, 1, 1},
                 {DW_GROUPS_BATCH, 1, DW_GEMM_OUTPUT_ELEMENT, 1, 1, 0},
                 {DW_GROUPS_BATCH, 1, DW_GEMM_OUTPUT_F32, 0, 1, 1}};
    for (int tile = 0; tile < DW__GEMM_TILES; tile++)
        for (size_t f = 0; f < DW_COUNT(forms); f++) {
            const dw__gemm_shape s = {.tile = (uint64_t)tile,
                                      .scheme_a = DW_SCHEME_BF16,
                                      .scheme_b = DW_SCHEME_BF16,
                                      .groups = (uint64_t)forms[f].groups,
                                      .turned_a = forms[f].turned_a,
                                      .turned_b = forms[f].turned_b,
                                      .output = (uint64_t)forms[f].output,
                                      .bias = forms[f].bias,
                                      .residual = forms[f].residual};
            if (!dw__gemm_exists(&s)) continue;
            dw__jit_variant v = dw__gemm_variant(&s);
            v.entry = "";
            add_job(v, dw__gemm_tiles[tile].n == 256 && (f == 1 || f == 5));
        }
}

/* With D as MXFP8, which requires tiles of at least 128 columns of D: without an epilogue, and with each activation and
 * a bias. */
static void list_quantized_gemm(void) {
#define TILE(...) {__VA_ARGS__},
    static const struct { int ctas, tile_n, stages; } tiles[] = {DW_SM100_GEMM_TILES(TILE)};
#undef TILE
    for (size_t t = 0; t < DW_COUNT(tiles); t++)
        for (int activation = DW_GEMM_LINEAR; activation <= DW_GEMM_SWIGLU; activation++) {
            if (tiles[t].tile_n < (activation == DW_GEMM_SWIGLU ? 256 : 128)) continue;
            dw__jit_variant v = {.source = "sm100/gemm.cu", .entry = "", .arch = family_arch};
            dw__jit_add_define(&v, "CTAS", tiles[t].ctas);
            dw__jit_add_define(&v, "TILE_N", tiles[t].tile_n);
            dw__jit_add_define(&v, "STAGES", tiles[t].stages);
            dw__jit_add_define(&v, "ELEMENT", 0);
            dw__jit_add_define(&v, "OUTPUT", DW_GEMM_OUTPUT_MXFP8);
            dw__jit_add_define(&v, "ACTIVATION", activation);
            dw__jit_add_define(&v, "BIAS", activation != DW_GEMM_LINEAR);
            dw__jit_add_define(&v, "RESIDUAL", 0);
            add_job(v, tiles[t].ctas == 2 && activation == DW_GEMM_SWIGLU);
        }
}

/* Each tile of the block-scaled GEMMs by itself, with cluster launch control, and with a complete epilogue. */
static void list_gemm_scaled(void) {
#define TILE(...) {__VA_ARGS__},
    static const struct {
        int scheme, ctas, tile_n, stages;
    } tiles[] = {DW_SM100_SCALED_TILES(TILE)};
#undef TILE
    static const struct {
        int output, activation, bias, residual, schedule;
    } forms[] = {{0, DW_GEMM_LINEAR, 0, 0, DW_GEMM_STATIC},
                 {0, DW_GEMM_LINEAR, 0, 0, DW_GEMM_LAUNCH_CONTROL},
                 {1, DW_GEMM_LINEAR, 0, 0, DW_GEMM_STATIC},
                 {0, DW_GEMM_GELU, 1, 1, DW_GEMM_STATIC},
                 {0, DW_GEMM_SWIGLU, 1, 1, DW_GEMM_STATIC},
                 {1, DW_GEMM_SWIGLU, 1, 1, DW_GEMM_LAUNCH_CONTROL},
                 {DW_GEMM_OUTPUT_MXFP8, DW_GEMM_GELU, 1, 0, DW_GEMM_STATIC},
                 {DW_GEMM_OUTPUT_MXFP8, DW_GEMM_SWIGLU, 1, 0, DW_GEMM_STATIC}};
    for (size_t t = 0; t < DW_COUNT(tiles); t++)
        for (size_t f = 0; f < DW_COUNT(forms); f++) {
            const bool swiglu = forms[f].activation == DW_GEMM_SWIGLU;
            if (swiglu && tiles[t].tile_n != 256) continue;
            if (forms[f].output == DW_GEMM_OUTPUT_MXFP8 && tiles[t].tile_n % 128 != 0) continue;
            dw__jit_variant v = {
                .source = "sm100/gemm_scaled.cu", .entry = "", .arch = family_arch};
            dw__jit_add_define(&v, "SCHEME_A", tiles[t].scheme);
            dw__jit_add_define(&v, "SCHEME_B", tiles[t].scheme);
            dw__jit_add_define(&v, "CTAS", tiles[t].ctas);
            dw__jit_add_define(&v, "TILE_N", tiles[t].tile_n);
            dw__jit_add_define(&v, "STAGES", tiles[t].stages);
            dw__jit_add_define(&v, "ELEMENT", 0);
            dw__jit_add_define(&v, "OUTPUT", forms[f].output);
            dw__jit_add_define(&v, "ACTIVATION", forms[f].activation);
            dw__jit_add_define(&v, "BIAS", forms[f].bias);
            dw__jit_add_define(&v, "RESIDUAL", forms[f].residual);
            dw__jit_add_define(&v, "SCHEDULE", forms[f].schedule);
            add_job(v, swiglu && tiles[t].ctas == 2);
        }
}

/* Blackwell's attention: each tile, in both types, with as many polynomials as registers allow. */
static void list_attention_sm100(void) {
#define TILE(...) {__VA_ARGS__},
    static const struct {
        int head_dim, window, keys, m, n, stages, consumers;
    } tiles[] = {DW_SM100_FORWARD_TILES(TILE)};
#undef TILE
    for (size_t t = 0; t < DW_COUNT(tiles); t++)
        for (int i = 0; i < 4; i++) {
            const int f16 = i & 1, polynomial = i & 2 ? 3 : 0;
            if (polynomial && tiles[t].head_dim != 128) continue;
            dw__jit_variant v = {
                .source = "sm100/sm100_attention_forward.cu", .entry = "", .arch = family_arch};
            dw__jit_add_define(&v, "HEAD_DIM", tiles[t].head_dim);
            dw__jit_add_define(&v, "ELEMENT", f16);
            dw__jit_add_define(&v, "SOFTCAP", 0);
            dw__jit_add_define(&v, "DROPOUT", 0);
            dw__jit_add_define(&v, "PACKED", 0);
            dw__jit_add_define(&v, "WINDOW", tiles[t].window);
            dw__jit_add_define(&v, "TILE_M", tiles[t].m);
            dw__jit_add_define(&v, "TILE_N", tiles[t].n);
            dw__jit_add_define(&v, "CONSUMERS", tiles[t].consumers);
            dw__jit_add_define(&v, "STAGES", tiles[t].stages);
            if (polynomial) dw__jit_add_define(&v, "POLYNOMIAL", polynomial);
            add_job(v, tiles[t].head_dim == 128 && tiles[t].window && i == 0);
        }
}

/* Quantization of each type to each format, along both directions and along one; squares. The rule does not change the
 * figures. */
static void list_quantize(const char *arch) {
    static const int schemes[] = {DW_CODES_MXFP8, DW_CODES_MXFP8_E5M2, DW_CODES_MXFP4,
                                  DW_CODES_NVFP4};
    for (int input = DW_QUANTIZE_BF16; input <= DW_QUANTIZE_F32; input++)
        for (size_t s = 0; s < DW_COUNT(schemes); s++)
            for (int form = 0; form < 4; form++) {
                dw__jit_variant v = {.source = "common/quantize.cu", .entry = "", .arch = arch};
                dw__jit_add_define(&v, "INPUT", input);
                dw__jit_add_define(&v, "SCHEME", schemes[s]);
                dw__jit_add_define(&v, "RULE", DW_RULE_RCEIL);
                dw__jit_add_define(&v, "ROWS", form != 2);
                dw__jit_add_define(&v, "COLUMNS", form != 1);
                dw__jit_add_define(&v, "SQUARE", form == 3);
                const bool common = schemes[s] == DW_CODES_MXFP8 || schemes[s] == DW_CODES_NVFP4;
                add_job(v, form == 0 && input == DW_QUANTIZE_BF16 && common);
            }
}

/* AdamW of the types that training uses, with each size of its table. */
static void list_adamw(const char *arch) {
    static const struct {
        dw_dtype param, grad, state, copy;
        int stochastic;
    } types[] = {{DW_BF16, DW_BF16, DW_BF16, 0, 0},     {DW_BF16, DW_BF16, DW_F32, 0, 0},
                 {DW_F32, DW_F32, DW_F32, 0, 0},        {DW_F32, DW_BF16, DW_F32, DW_BF16, 0},
                 {DW_F32, DW_F32, DW_F32, DW_BF16, 0},  {DW_BF16, DW_BF16, DW_BF16, 0, 1},
                 {DW_BF16, DW_BF16, DW_E4M3, 0, 1},     {DW_F32, DW_F32, DW_BF16, 0, 1},
                 {DW_F32, DW_F32, DW_E4M3, 0, 1},       {DW_F32, DW_BF16, DW_E4M3, DW_BF16, 1},
                 {DW_BF16, DW_BF16, (dw_dtype)0, 0, 1}, {DW_F32, DW_BF16, (dw_dtype)0, 0, 0}};
    for (size_t i = 0; i < DW_COUNT(types); i++)
        for (int many = 0; many < 2; many++) {
            const bool extra = types[i].copy || types[i].state == DW_E4M3;
            dw__jit_variant v = {.source = "common/adamw.cu", .entry = "", .arch = arch};
            dw__jit_add_define(&v, "PARAM", types[i].param);
            dw__jit_add_define(&v, "GRAD", types[i].grad);
            dw__jit_add_define(&v, "STATE", types[i].state);
            dw__jit_add_define(&v, "COPY", (int)types[i].copy);
            dw__jit_add_define(&v, "STOCHASTIC", types[i].stochastic);
            if (extra)
                dw__jit_add_define(&v, "TENSORS", many ? DW_ADAMW_MANY_EXTRA : DW_ADAMW_FEW_EXTRA);
            else
                dw__jit_add_define(&v, "TENSORS", many ? DW_ADAMW_MANY : DW_ADAMW_FEW);
            add_job(v, (i == 0 || i == 6) && many);
        }
}

static void list_train_step(const char *arch) {
    static const int elements[] = {DW_BF16, DW_F32};
    for (size_t i = 0; i < DW_COUNT(elements); i++) {
        dw__jit_variant v = {.source = "common/train_step.cu", .entry = "", .arch = arch};
        dw__jit_add_define(&v, "ELEMENT", elements[i]);
        add_job(v, i == 0);
    }
}

/* The GEMMs of consumer and workstation GPUs: each tile and each form of its operands, without an epilogue and with a
 * complete one. */
static void list_gemm_sm120(void) {
    static const struct {
        int output, activation, extras, turned_a, turned_b;
    } forms[] = {{0, DW_GEMM_LINEAR, 0, 0, 0},
                 {1, DW_GEMM_LINEAR, 1, 0, 0},
                 {0, DW_GEMM_GELU, 1, 0, 0},
                 {0, DW_GEMM_GELU_TANH, 1, 0, 0},
                 {0, DW_GEMM_SWIGLU, 1, 0, 0},
                 {1, DW_GEMM_SWIGLU, 1, 0, 0},
                 {DW_GEMM_OUTPUT_MXFP8, DW_GEMM_GELU, 1, 0, 0},
                 {DW_GEMM_OUTPUT_MXFP8, DW_GEMM_SWIGLU, 1, 0, 0},
                 {0, DW_GEMM_LINEAR, 0, 0, 1},
                 {1, DW_GEMM_LINEAR, 0, 1, 1},
                 {0, DW_GEMM_LINEAR, 1, 1, 1}};
    static const dw_scheme schemes[] = {DW_SCHEME_BF16, DW_SCHEME_MXFP8, DW_SCHEME_MXFP8_E5M2,
                                        DW_SCHEME_MXFP4, DW_SCHEME_NVFP4};
    for (int tile = 0; tile < DW__SM120_TILES; tile++)
        for (size_t i = 0; i < DW_COUNT(schemes); i++)
            for (size_t f = 0; f < DW_COUNT(forms); f++) {
                const bool scaled = schemes[i] != DW_SCHEME_BF16,
                           quantized = forms[f].output == DW_GEMM_OUTPUT_MXFP8;
                const dw__gemm_shape s = {.tile = (uint64_t)tile,
                                          .scheme_a = schemes[i],
                                          .scheme_b = schemes[i],
                                          .output = (uint64_t)forms[f].output,
                                          .activation = (uint64_t)forms[f].activation,
                                          .bias = forms[f].extras,
                                          .residual = forms[f].extras && !quantized,
                                          .turned_a = forms[f].turned_a,
                                          .turned_b = forms[f].turned_b};
                if (!dw__sm120_exists(&s) || (scaled && (s.turned_a || s.turned_b))) continue;
                dw__jit_variant v = dw__sm120_variant(&s);
                v.entry = "";
                add_job(v, dw__sm120_tiles[tile].m == 128 && f == 5 && i != 2);
            }
}

/* Attention of consumer and workstation GPUs: each head dimension and type, forward with each feature. */
static void list_attention_sm120(void) {
    static const int head_dims[] = {64, 96, 128};
    static const struct {
        bool window, packed, softcap, dropout;
        dw_attention_bias_kind bias;
    } features[] = {{.window = false},
                    {.window = true},
                    {.window = true, .dropout = true},
                    {.window = true, .packed = true, .softcap = true, .dropout = true},
                    {.window = true, .dropout = true, .bias = DW_ATTENTION_ADDED},
                    {.window = true, .bias = DW_ATTENTION_VISIBLE}};
    for (size_t d = 0; d < DW_COUNT(head_dims); d++)
        for (int f16 = 0; f16 < 2; f16++)
            for (size_t f = 0; f < DW_COUNT(features); f++) {
                const dw__attention_shape shape = {.head_dim = (uint64_t)head_dims[d],
                                                   .f16 = f16,
                                                   .softcap = features[f].softcap,
                                                   .dropout = features[f].dropout,
                                                   .packed = features[f].packed,
                                                   .window = features[f].window,
                                                   .rtx = true,
                                                   .bias = features[f].bias};
                const bool quick = head_dims[d] == 128 && !f16 && f == 1;
                add_job(dw__attention_variant(&shape, DW__ATTENTION_FORWARD, "", "sm_120a"), quick);
                if (f < 3)
                    add_job(dw__attention_variant(&shape, DW__ATTENTION_BACKWARD, "", "sm_120a"),
                            quick);
            }
}

static void list_jobs(void) {
    for (int f16 = 0; f16 < 2; f16++)
        add_job(dw__attention_reference_variant(f16, DW__ATTENTION_FORWARD, "sm_90a"), !f16);
    for (int i = 0; i < 4; i++) add_job(dw__gemm_reference_variant(100, i & 1, i & 2), i == 0);
    add_job(dw__gemm_reference_variant(90, false, false), true);
    list_attention(DW__ATTENTION_FORWARD);
    list_attention(DW__ATTENTION_BACKWARD);
    list_attention_sm100();
    list_gemm();
    list_gemm_groups();
    list_quantized_gemm();
    list_gemm_scaled();
    list_gemm_sm120();
    list_attention_sm120();
    list_quantize("sm_90a");
    list_quantize(family_arch);
    list_adamw("sm_90a");
    list_adamw(family_arch);
    list_train_step("sm_90a");
    list_train_step(family_arch);
}

/* ---- the compiler's output -------------------------------------------------------------------------- */

/* Returns the number in front of `word` in `line`; `absent` if the line does not contain the word. */
static int number_before(const char *line, const char *word, int absent) {
    const char *at = strstr(line, word);
    if (!at) return absent;
    while (at > line && at[-1] == ' ') at--;
    while (at > line && at[-1] >= '0' && at[-1] <= '9') at--;
    return atoi(at);
}

static void read_line(job *j, const char *line) {
    static const char compiling[] = "Compiling entry function '";
    const char *at = strstr(line, compiling);
    if (at && j->entry_count < MOST_ENTRIES) {
        at += sizeof compiling - 1;
        resources *entry = &j->entries[j->entry_count++];
        snprintf(entry->entry, sizeof entry->entry, "%.*s", (int)strcspn(at, "'"), at);
        return;
    }
    if (j->entry_count > 0) {
        resources *entry = &j->entries[j->entry_count - 1];
        entry->stack = number_before(line, "bytes stack frame", entry->stack);
        entry->spill_stores = number_before(line, "bytes spill stores", entry->spill_stores);
        entry->spill_loads = number_before(line, "bytes spill loads", entry->spill_loads);
        entry->registers = number_before(line, "registers", entry->registers);
        entry->shared = number_before(line, "bytes smem", entry->shared);
    }
    /* These include C7510: the compiler serializes wgmma. */
    bool is_warning = strstr(line, "warning") || strstr(line, "Potential Performance Loss") ||
                      strstr(line, "serialized");
    if (is_warning && j->warning[0] == '\0') snprintf(j->warning, sizeof j->warning, "%s", line);
}

/* DIR/NAME.ptx */
static dw_status write_ptx(const job *j, const char *folder) {
    dw_status status = DW_OK;
    dw__text expanded = {0}, path = {0};
    void *image = NULL;
    size_t bytes;
    DW_TRY(dw__jit_expand(j->variant.source, &expanded));
    DW_TRY(dw__jit_compile(&j->variant, &expanded, DW__JIT_PTX, NULL, &image, &bytes, NULL));
    DW_TRY(dw__text_printf(&path, "%s/%s.ptx", folder, j->name));
    DW_TRY(dw__folder_make_above(path.text));
    DW_TRY(dw__file_write(path.text, image, strlen(image)));

cleanup:
    dw__free(image);
    dw__text_free(&expanded);
    dw__text_free(&path);
    return status;
}

static void compile(job *j) {
    static const char *const options[] = {"--ptxas-options=-v", NULL};
    dw__text expanded = {0}, log = {0};
    void *image = NULL;
    size_t bytes;
    double begun = dw__seconds();
    j->status = dw__jit_expand(j->variant.source, &expanded);
    if (j->status == DW_OK)
        j->status =
            dw__jit_compile(&j->variant, &expanded, DW__JIT_CUBIN, options, &image, &bytes, &log);
    j->seconds = dw__seconds() - begun;
    for (char *line = log.text, *end; line && *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = '\0';
        read_line(j, line);
    }
    dw__free(image);
    dw__text_free(&expanded);
    dw__text_free(&log);
}

typedef struct selection {
    bool quick;
    const char *part, *ptx; /* folder for the PTX; NULL: none is written */
    bool old;               /* the compiler does not support Blackwell's architectures */
} selection;

static bool selected(const selection *s, const job *j) {
    if (s->old && strcmp(j->variant.arch, "sm_90a") != 0) return false;
    return (!s->quick || j->quick) && (!s->part || strstr(j->name, s->part));
}

static _Atomic size_t next_job;

static void *compile_jobs(void *context) {
    const selection *s = context;
    for (size_t i; (i = atomic_fetch_add(&next_job, 1)) < job_count;) {
        job *j = &jobs[i];
        if (!selected(s, j)) continue;
        if (s->ptx)
            j->status = write_ptx(j, s->ptx);
        else
            compile(j);
        if (j->status != DW_OK) snprintf(j->message, sizeof j->message, "%s", dw_last_error());
    }
    return NULL;
}

static void compile_all(selection *s, int threads) {
    pthread_t started[MOST_THREADS];
    int count = 0;
    while (count < threads - 1 && pthread_create(&started[count], NULL, compile_jobs, s) == 0)
        count++;
    compile_jobs(s);
    for (int i = 0; i < count; i++) pthread_join(started[i], NULL);
}

/* ---- the table --------------------------------------------------------------------------------------- */

static const struct {
    const char *key;
    size_t offset;
} members[] = {
    {"registers", offsetof(resources, registers)},
    {"stack_bytes", offsetof(resources, stack)},
    {"spill_store_bytes", offsetof(resources, spill_stores)},
    {"spill_load_bytes", offsetof(resources, spill_loads)},
    {"shared_bytes", offsetof(resources, shared)},
};

static int member_of(const resources *r, size_t member) {
    return *(const int *)(const void *)((const char *)r + members[member].offset);
}

static json_t *describe(const job *j) {
    json_t *entries = json_object();
    for (int e = 0; e < j->entry_count; e++) {
        json_t *numbers = json_array();
        for (size_t m = 0; m < DW_COUNT(members); m++)
            json_array_append_new(numbers, json_integer(member_of(&j->entries[e], m)));
        json_object_set_new(entries, j->entries[e].entry, numbers);
    }
    return entries;
}

/* Figures that may only fall. Registers are not compared, because each compiler version chooses them within the
 * kernel's limit. */
static int compare_entry(const job *j, const resources *r, const json_t *numbers,
                         bool same_compiler) {
    int worse = 0;
    for (size_t m = 0; m < DW_COUNT(members); m++) {
        int now = member_of(r, m), before = (int)json_integer_value(json_array_get(numbers, m));
        if (m == 0 && !same_compiler) continue;
        if (now <= before) continue;
        printf("%s: %s: %s is %d, the table has %d\n", j->name, r->entry, members[m].key, now,
               before);
        worse++;
    }
    return worse;
}

static int compare(const job *j, const json_t *table, bool same_compiler) {
    int worse = 0;
    const json_t *entries = json_object_get(json_object_get(table, "kernels"), j->name);
    if (j->status != DW_OK) return printf("%s: %s\n", j->name, j->message), 1;
    if (j->warning[0]) worse += (printf("%s: %s\n", j->name, j->warning), 1);
    if (j->entry_count == 0) worse += (printf("%s: the compiler reports no kernel\n", j->name), 1);
    if (!entries)
        return printf("%s: is not in the table; deepwell-kernels --renew puts it in\n", j->name),
               worse + 1;
    for (int e = 0; e < j->entry_count; e++) {
        const json_t *numbers = json_object_get(entries, j->entries[e].entry);
        if (!json_is_array(numbers))
            worse += (printf("%s: %s is not in the table\n", j->name, j->entries[e].entry), 1);
        else
            worse += compare_entry(j, &j->entries[e], numbers, same_compiler);
    }
    return worse;
}

/* Returns the figures of a variant, as compiled now or from the table. The caller owns a new reference. */
static json_t *known(const selection *s, const job *j, const json_t *table) {
    if (selected(s, j)) return describe(j);
    return json_incref(json_object_get(json_object_get(table, "kernels"), j->name));
}

/* Writes one variant per line, so that a change of a few variants is a small diff. */
static int write_table(const selection *s, const char *compiler) {
    json_t *table = json_load_file(DW_RESOURCES, 0, NULL);
    dw__text text = {0};
    const char *comma = "";
    dw_status status =
        dw__text_printf(&text, "{\n  \"compiler\": \"%s\",\n  \"numbers\": [", compiler);
    for (size_t m = 0; m < DW_COUNT(members) && status == DW_OK; m++)
        status = dw__text_printf(&text, "%s\"%s\"", m > 0 ? ", " : "", members[m].key);
    if (status == DW_OK) status = dw__text_printf(&text, "],\n  \"kernels\": {");
    for (size_t i = 0; i < job_count && status == DW_OK; i++) {
        json_t *entries = known(s, &jobs[i], table);
        if (!entries) continue;
        char *line = json_dumps(entries, 0);
        status = dw__text_printf(&text, "%s\n    \"%s\":\n      %s", comma, jobs[i].name, line);
        comma = ",";
        free(line);
        json_decref(entries);
    }
    if (status == DW_OK) status = dw__text_printf(&text, "\n  }\n}\n");
    if (status == DW_OK) status = dw__file_write(DW_RESOURCES, text.text, text.length);
    dw__text_free(&text);
    json_decref(table);
    if (status != DW_OK) fprintf(stderr, "deepwell-kernels: %s\n", dw_last_error());
    return status == DW_OK ? 0 : 1;
}

static int check_all(const selection *s, const char *compiler) {
    json_error_t error;
    json_t *table = json_load_file(DW_RESOURCES, 0, &error);
    if (!table) return fprintf(stderr, "deepwell-kernels: %s: %s\n", DW_RESOURCES, error.text), 1;
    const char *of = json_string_value(json_object_get(table, "compiler"));
    bool same_compiler = of && strcmp(of, compiler) == 0;
    int passed = 0, failed = 0;
    for (size_t i = 0; i < job_count; i++) {
        if (!selected(s, &jobs[i])) continue;
        if (compare(&jobs[i], table, same_compiler) > 0)
            failed++;
        else
            passed++;
    }
    json_decref(table);
    printf("deepwell-kernels: %d passed, %d failed (%s%s)\n", passed, failed, compiler,
           same_compiler ? "" : "; the table is another compiler's: registers not compared");
    return failed > 0 || passed == 0 ? 1 : 0;
}

/* Prints the result of --ptx. */
static int say_ptx(const selection *s) {
    int written = 0, failed = 0;
    for (size_t i = 0; i < job_count; i++) {
        if (!selected(s, &jobs[i])) continue;
        if (jobs[i].status == DW_OK)
            printf("%s/%s.ptx\n", s->ptx, jobs[i].name), written++;
        else
            fprintf(stderr, "%s: %s\n", jobs[i].name, jobs[i].message), failed++;
    }
    return failed > 0 || written == 0 ? 1 : 0;
}

/* ---- program -------------------------------------------------------------------------------------------- */

static int usage(void) {
    fprintf(stderr, "usage: deepwell-kernels [--quick] [--renew] [--list] [-p TEXT] [--threads N]\n"
                    "       deepwell-kernels --ptx DIR [--quick] [-p TEXT] [--threads N]\n"
                    "       deepwell-kernels --launch\n");
    return 2;
}

int main(int argc, char **argv) {
    selection s = {0};
    bool renew = false, list = false;
    int threads = 2;
    const dw__nvrtc *nvrtc;
    char compiler[64];
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--quick") == 0)
            s.quick = true;
        else if (strcmp(argv[i], "--renew") == 0)
            renew = true;
        else if (strcmp(argv[i], "--list") == 0)
            list = true;
        else if (strcmp(argv[i], "--launch") == 0)
            return print_launch_cost();
        else if (strcmp(argv[i], "-p") == 0 && value)
            s.part = argv[++i];
        else if (strcmp(argv[i], "--ptx") == 0 && value)
            s.ptx = argv[++i];
        else if (strcmp(argv[i], "--threads") == 0 && value)
            threads = atoi(argv[++i]);
        else
            return usage();
    }
    if (threads < 1 || threads > MOST_THREADS) return usage();
    list_jobs();
    for (size_t i = 0; list && i < job_count; i++)
        if (selected(&s, &jobs[i])) printf("%s\n", jobs[i].name);
    if (list) return 0;
    if (dw__nvrtc_load(&nvrtc) != DW_OK)
        return fprintf(stderr, "deepwell-kernels: %s\n", dw_last_error()), 3;
    snprintf(compiler, sizeof compiler, "NVRTC %d.%d", nvrtc->major, nvrtc->minor);
    s.old = nvrtc->major < 12 || (nvrtc->major == 12 && nvrtc->minor < 9);
    if (s.old) printf("%s is too old for %s: left out\n", compiler, family_arch);
    double begun = dw__seconds();
    compile_all(&s, threads);
    double took = dw__seconds() - begun, work = 0.0;
    for (size_t i = 0; i < job_count; i++) work += jobs[i].seconds;
    if (s.ptx) return say_ptx(&s);
    printf("%.0f s for %.0f s of compiling\n", took, work);
    if (!renew) return check_all(&s, compiler);
    for (size_t i = 0; i < job_count; i++)
        if (selected(&s, &jobs[i]) && jobs[i].status != DW_OK)
            return fprintf(stderr, "%s: %s\n", jobs[i].name, jobs[i].message), 1;
    int result = write_table(&s, compiler);
    return result == 0 ? check_all(&s, compiler) : result;
}
