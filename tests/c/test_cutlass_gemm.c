/* GEMMs by CUTLASS's kernels up to the provider, which is a fake like the driver: the calls that reach each
 * kernel and their form, those that are rejected, and the first-use check's result for kernels that are right, wrong,
 * or fail. */
#include "common/gemm_reference_params.h"
#include "common/scale_layout.h"
#include "fake/fake_cutlass.h"
#include "fake/fake_gpu.h"
#include "kernel/cuda/gpu_gemm.h"
#include "number/format.h"
#include "number/half.h"
#include <math.h>

static const dw_device *device_named(const char *name) {
    const dw_device *device;
    CHILD_REQUIRE(dw_device_find(name, &device) == DW_OK);
    return device;
}

/* ---- calls ----------------------------------------------------------------------------------------- */

enum { M = 3, N = 8, K = 16, PITCH = 24 };
static uint16_t a[M * PITCH] __attribute__((aligned(16))),
    b[N * PITCH] __attribute__((aligned(16))), c[M * PITCH] __attribute__((aligned(16))),
    d[M * PITCH] __attribute__((aligned(16)));
static char workspace[512] __attribute__((aligned(256)));

static float a_at(int i, int k) { return (float)((PITCH * i + k) % 7) - 3; }
static float b_at(int j, int k) { return (float)((PITCH * j + k) % 5) - 2; }
static float c_at(int i, int j) { return (float)(8 * i + j); }

/* Operands are small whole numbers, so that D is exact. */
static dw_gemm tiny_call(const char *kernel) {
    memset(d, 0xff, sizeof d);
    for (int k = 0; k < K; k++) {
        for (int i = 0; i < M; i++) a[PITCH * i + k] = dw__f32_to_bf16(a_at(i, k));
        for (int j = 0; j < N; j++) b[PITCH * j + k] = dw__f32_to_bf16(b_at(j, k));
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) c[PITCH * i + j] = dw__f32_to_bf16(c_at(i, j));
    return (dw_gemm){.struct_size = sizeof(dw_gemm),
                     .dtype = DW_BF16,
                     .output = DW_BF16,
                     .m = M,
                     .n = N,
                     .k = K,
                     .alpha = 2,
                     .a = {a, PITCH},
                     .b = {b, PITCH},
                     .d = {d, PITCH},
                     .stream = folder,
                     .kernel = kernel,
                     .workspace = workspace,
                     .workspace_bytes = sizeof workspace};
}
static void require_right(bool residual) {
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            float sum = 0;
            for (int k = 0; k < K; k++) sum += a_at(i, k) * b_at(j, k);
            CHILD_REQUIRE(dw__bf16_to_f32(d[PITCH * i + j]) ==
                          2 * sum + (residual ? c_at(i, j) : 0));
        }
}

/* An NVFP4 call with addresses that are never read. */
static dw_gemm codes_call(void) {
    dw_gemm call = {.struct_size = sizeof(dw_gemm),
                    .dtype = DW_BF16,
                    .output = DW_BF16,
                    .m = 9000,
                    .n = 3000,
                    .k = 704,
                    .alpha = 0.5f,
                    .a = {(void *)((uintptr_t)1 << 32), 352},
                    .b = {(void *)((uintptr_t)2 << 32), 368},
                    .d = {(void *)((uintptr_t)3 << 32), 3008},
                    .residual = {(void *)((uintptr_t)4 << 32), 3016},
                    .stream = folder,
                    .quantized = 1,
                    .scheme_a = DW_SCHEME_NVFP4,
                    .scheme_b = DW_SCHEME_NVFP4,
                    .scales_a = (void *)((uintptr_t)5 << 32),
                    .scales_b = (void *)((uintptr_t)6 << 32),
                    .factor_a = (void *)((uintptr_t)7 << 32),
                    .factor_b = (void *)((uintptr_t)8 << 32),
                    .kernel = "cutlass.sm100.nvfp4",
                    .workspace = workspace,
                    .workspace_bytes = sizeof workspace};
    return call;
}

static void named_kernels_compute(void *unused) {
    (void)unused;
    size_t bytes = 1;
    dw_gemm call = codes_call();
    fake->capability = 100;
    provider->workspace_bytes = 300;
    CHILD_REQUIRE(dw_gemm_workspace(&call, &bytes) == DW_OK && bytes == 300);
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_OK && provider->launches == 0);
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && provider->launches == 1);
    CHILD_REQUIRE(strcmp(provider->last->name, "cutlass.sm100.nvfp4") == 0);
    CHILD_REQUIRE(provider->workspace == workspace && provider->stream == folder);
    dw_cutlass_gemm p = provider->call.gemm;
    CHILD_REQUIRE(p.size_of == sizeof p && p.m == 9000 && p.n == 3000 && p.k == 704);
    CHILD_REQUIRE(p.a == call.a.data && p.b == call.b.data && p.d == call.d.data);
    CHILD_REQUIRE(p.a_stride == 704 && p.b_stride == 736 && p.d_stride == 3008);
    CHILD_REQUIRE(p.c == call.residual.data && p.c_stride == 3016);
    CHILD_REQUIRE(p.alpha == 0.5f && p.beta == 1);
    CHILD_REQUIRE(p.processors == fake->sm_count);
    CHILD_REQUIRE(p.a_scales == call.scales_a && p.b_scales == call.scales_b);
    CHILD_REQUIRE(p.a_factor == call.factor_a && p.b_factor == call.factor_b);
    CHILD_REQUIRE(p.cluster[0] == 0 && p.cluster[1] == 0);

    /* With one row the strides do not matter. Without a residual there is no C. Unquantized operands have no scales,
     * whatever the members contain. */
    call.kernel = "cutlass.sm100.bf16";
    call.quantized = 0, call.m = 1, call.a.stride = -5, call.b.stride = 720, call.d.stride = -6;
    call.residual.data = NULL;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK);
    p = provider->call.gemm;
    CHILD_REQUIRE(p.a_stride == 704 && p.b_stride == 720 && p.d_stride == 3000);
    CHILD_REQUIRE(p.c == NULL && p.beta == 0 && !p.a_scales && !p.b_scales && !p.a_factor);

    call.m = 0, bytes = 1; /* nothing to compute */
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && provider->launches == 2);
    CHILD_REQUIRE(dw_gemm_workspace(&call, &bytes) == DW_OK && bytes == 0);
    CHILD_REQUIRE(fake->launch_count == 0);
}

/* Deepwell's own kernel runs if the call names it or no kernel; callers with the older structure get it too. */
static void own(void *unused) {
    (void)unused;
    const char *const names[] = {NULL, "sm100_gemm"};
    fake->capability = 100;
    fake->sm_count = 148;
    for (int i = 0; i < 2; i++) {
        size_t bytes = 1;
        dw_gemm call = tiny_call(names[i]);
        CHILD_REQUIRE(dw_gemm_workspace(&call, &bytes) == DW_OK && bytes == 0);
        CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && fake->launch_count == i + 1);
    }
    dw_gemm before = tiny_call("cutlass.sm100.bf16");
    before.struct_size = offsetof(dw_gemm, kernel);
    CHILD_REQUIRE(dw_gemm_run(&before) == DW_OK && fake->launch_count == 3);
    CHILD_REQUIRE(provider->launches == 0);
}

/* ---- rejected calls -------------------------------------------------------------------------------- */

static void require_refused(const dw_gemm *call, dw_status status, const char *words) {
    const int before = provider ? provider->launches : 0;
    CHILD_REQUIRE(dw_gemm_run(call) == status && strstr(dw_last_error(), words));
    CHILD_REQUIRE(!provider || provider->launches == before);
}

static void refusals(void *unused) {
    (void)unused;
    static const char kernel[] = "cutlass.sm90.bf16";
    dw_gemm call = tiny_call("cutlass.sm90.bf17");
    require_refused(&call, DW_INVALID_ARGUMENT,
                    "GEMM (m 3, n 8, k 16, bf16): kernel \"cutlass.sm90.bf17\" is not known for "
                    "this; expected one of sm90_gemm, sm100_gemm, sm100_gemm_scaled, "
                    "sm120_gemm, "
                    "sm120_gemm_scaled, cutlass.sm90.bf16, "
                    "cutlass.sm90.bf16.other, "
                    "cutlass.sm100.bf16, cutlass.sm100.mxfp8, cutlass.sm100.nvfp4");
    call = tiny_call("cutlass.sm100.grouped");
    require_refused(&call, DW_INVALID_ARGUMENT, "is not known for this");
    call = tiny_call("sm100_gemm_scaled"); /* of other operands, and not for this GPU */
    require_refused(&call, DW_UNSUPPORTED,
                    "kernel is \"sm100_gemm_scaled\"; expected sm90_gemm, which GPU 0 has");
    call = tiny_call("cutlass.sm100.bf16");
    require_refused(&call, DW_UNSUPPORTED,
                    "is for compute capability 10.0; GPU 0 is a Fake GPU 0 (9.0)");
    call = tiny_call("cutlass.sm100.nvfp4");
    require_refused(&call, DW_UNSUPPORTED, "makes bf16 of nvfp4");
    call = codes_call(), call.kernel = "cutlass.sm100.mxfp8";
    require_refused(&call, DW_UNSUPPORTED, "makes bf16 of mxfp8");
    call = codes_call(), call.k = 672 + 16;
    require_refused(&call, DW_UNSUPPORTED,
                    "k is 688; cutlass.sm100.nvfp4 expects a multiple of 32");
    call = tiny_call(kernel), call.dtype = call.output = DW_F16;
    require_refused(&call, DW_UNSUPPORTED, "makes bf16 of bf16");
    call = tiny_call(kernel), call.output = DW_F32;
    require_refused(&call, DW_UNSUPPORTED, "makes bf16 of bf16");
    call = tiny_call(kernel), call.bias = a;
    require_refused(&call, DW_UNSUPPORTED, "no bias and no activation");
    call = tiny_call(kernel), call.activation = DW_ACTIVATION_GELU;
    require_refused(&call, DW_UNSUPPORTED, "no bias and no activation");
    call = tiny_call(kernel), call.n = 7;
    require_refused(&call, DW_UNSUPPORTED, "n is 7; cutlass.sm90.bf16 expects a multiple of 8");
    call = tiny_call(kernel), call.k = 0;
    require_refused(&call, DW_UNSUPPORTED, "k is 0; cutlass.sm90.bf16 expects a multiple of 8");
    call = tiny_call(kernel), call.a.data = (char *)a + 8; /* as for Deepwell's own kernel */
    require_refused(&call, DW_UNSUPPORTED, "expected a multiple of 16 bytes");
    call = tiny_call(kernel), call.device = device_named("emulator:sm_90a");
    require_refused(&call, DW_UNSUPPORTED,
                    "is launched by the CUDA runtime, which has no device \"emulator:sm_90a\"; "
                    "expected \"cuda\"");
    CHILD_REQUIRE(dw_gemm_workspace(&call, &call.workspace_bytes) == DW_UNSUPPORTED);
    CHILD_REQUIRE(dw_gemm_workspace(&call, NULL) == DW_INVALID_ARGUMENT);

    provider->workspace_bytes = 300;
    call = tiny_call(kernel), call.workspace_bytes = 299;
    require_refused(&call, DW_INVALID_ARGUMENT,
                    "the workspace has 299 bytes; cutlass.sm90.bf16 needs 300");
    call = tiny_call(kernel), call.workspace = NULL;
    require_refused(&call, DW_INVALID_ARGUMENT, "the workspace has 0 bytes");
    call = tiny_call(kernel), call.workspace = workspace + 16;
    require_refused(&call, DW_INVALID_ARGUMENT, "expects a multiple of 256 bytes");
    call = tiny_call(kernel), call.struct_size = sizeof call - 1;
    require_refused(&call, DW_INVALID_ARGUMENT, "set it to sizeof(dw_gemm)");

    /* The kernel itself rejects these calls, before the launch and at the launch. */
    call = tiny_call(kernel);
    provider->refused = "too odd";
    require_refused(&call, DW_UNSUPPORTED, "k 16, bf16): cutlass.sm90.bf16: too odd");
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "too odd"));
    provider->refused = NULL;
    provider->result = DW_CUTLASS_REFUSED;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "k 16, bf16): cutlass.sm90.bf16: as requested"));
    provider->result = DW_CUTLASS_FAILED;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_STATE);
}

static void without_library(void *unused) {
    (void)unused;
    dw_gemm call = tiny_call("cutlass.sm90.bf16");
    provider = NULL;
    setenv("DEEPWELL_CUTLASS", "/nowhere/libnone.so", 1);
    require_refused(
        &call, DW_UNSUPPORTED,
        "there is sm90_gemm, sm100_gemm, sm100_gemm_scaled, sm120_gemm, sm120_gemm_scaled; "
        "CUTLASS's kernels are not there");
    require_refused(&call, DW_UNSUPPORTED, "`make cutlass` builds them");
    call.kernel = "mine";
    require_refused(&call, DW_INVALID_ARGUMENT, "kernel \"mine\" is not known for this");
}

static void other_version(void *unused) {
    (void)unused;
    dw_gemm call = tiny_call("cutlass.sm90.bf16");
    setenv("FAKE_CUTLASS_VERSION", "1", 1);
    require_refused(&call, DW_UNSUPPORTED, "is of another version than this library");
}

/* ---- kernels that compute the definition ------------------------------------------------------------ */

static float wrong_by;   /* the amount that a kernel adds to D[0][0] */
static bool forget_c;    /* the kernel does not add C */
static int wrong_factor; /* 1: the kernel ignores A's factor, 2: B's */
static bool swap_scales; /* the kernel reads scales as if rows were not swizzled */

/* The values that A or B represents, row by row. */
static double *read_operand(dw_scheme scheme, const void *data, const unsigned char *scales,
                            int64_t rows, int64_t k, int64_t stride) {
    const int block = scheme == DW_SCHEME_NVFP4 ? 16 : 32;
    const int wide = DW_SCALE_TILES_WIDE((k + block - 1) / block);
    double *values = malloc((size_t)(rows * k) * sizeof *values);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < k; j++) {
            const int64_t at = i * stride + j;
            const unsigned char *codes = data;
            double value = 0;
            int scale = 0;
            if (scheme != DW_SCHEME_BF16)
                scale = scales[swap_scales ? i * (k / block) + j / block
                                           : DW_SCALE_OFFSET((int)i, (int)j / block, wide)];
            if (scheme == DW_SCHEME_BF16)
                value = (double)dw__bf16_to_f32(((const uint16_t *)data)[at]);
            else if (scheme == DW_SCHEME_MXFP8)
                value = ldexp((double)dw__decode_one(DW_E4M3, codes[at]), scale - 127);
            else
                value = (double)dw__decode_one(DW_E2M1, codes[at / 2] >> at % 2 * 4 & 15) *
                        (double)dw__decode_one(DW_E4M3, (unsigned)scale);
            values[i * k + j] = value;
        }
    return values;
}

static void multiply(dw_scheme scheme, const dw_cutlass_gemm *p) {
    double *x = read_operand(scheme, p->a, p->a_scales, p->m, p->k, p->a_stride),
           *y = read_operand(scheme, p->b, p->b_scales, p->n, p->k, p->b_stride);
    const double alpha = (double)p->alpha * (p->a_factor && wrong_factor != 1 ? *p->a_factor : 1) *
                         (p->b_factor && wrong_factor != 2 ? *p->b_factor : 1);
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++) {
            double sum = 0;
            for (int64_t k = 0; k < p->k; k++) sum += x[i * p->k + k] * y[j * p->k + k];
            sum *= alpha;
            if (p->c && !forget_c)
                sum += (double)p->beta *
                       (double)dw__bf16_to_f32(((const uint16_t *)p->c)[i * p->c_stride + j]);
            if (i == 0 && j == 0) sum += (double)wrong_by;
            ((uint16_t *)p->d)[i * p->d_stride + j] = dw__f32_to_bf16((float)sum);
        }
    free(x);
    free(y);
}

static bool wrong_group; /* the kernel multiplies every group with the first group's B */

static void run_provided(const dw_cutlass_kernel *kernel, const void *call) {
    if (kernel->kind == DW_CUTLASS_GEMM) {
        multiply(kernel->scheme, call);
        return;
    }
    const dw_cutlass_grouped *g = call;
    for (int i = 0; i < g->groups; i++)
        if (g->m[i] > 0)
            multiply(DW_SCHEME_BF16, &(dw_cutlass_gemm){.m = g->m[i],
                                                        .n = g->n,
                                                        .k = g->k,
                                                        .a = g->a[i],
                                                        .b = g->b[wrong_group ? 0 : i],
                                                        .d = g->d[i],
                                                        .a_stride = g->a_stride,
                                                        .b_stride = g->b_stride,
                                                        .d_stride = g->d_stride,
                                                        .alpha = g->alpha});
}

/* Replaces cuda/common/gemm_reference.cu for BF16 without activation. */
static void run_reference(const fake_launch *launch) {
    dw_gemm_reference_params p;
    memcpy(&p, launch->params, sizeof p);
    multiply(DW_SCHEME_BF16, &(dw_cutlass_gemm){.m = p.m,
                                                .n = p.n,
                                                .k = p.k,
                                                .a = p.a,
                                                .b = p.b,
                                                .c = p.residual,
                                                .d = p.d,
                                                .a_stride = p.stride_a,
                                                .b_stride = p.stride_b,
                                                .c_stride = p.stride_residual,
                                                .d_stride = p.stride_d,
                                                .alpha = p.alpha,
                                                .beta = 1});
}

static void check_first_uses(int capability) {
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
    fake->capability = capability;
    fake->kernel = run_reference;
    provider->kernel = run_provided;
    provider->workspace_bytes = 512;
}

/* ---- the first-use check --------------------------------------------------------------------------- */

/* Each specialization is checked once, with and without a residual. */
static void correct_kernel_passes(void *unused) {
    (void)unused;
    check_first_uses(90);
    dw_gemm call = tiny_call("cutlass.sm90.bf16");
    wrong_by = 1e-6f; /* far smaller than BF16's rounding */
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_OK && provider->launches == 1);
    const dw_cutlass_gemm *tried = &provider->call.gemm;
    CHILD_REQUIRE(tried->processors > 0 && tried->m > 512 && tried->m % 128 && tried->n % 128);
    CHILD_REQUIRE(!tried->c && provider->workspace && provider->workspace != workspace);
    CHILD_REQUIRE(fake->memory == 0 && fake->relaxed > 0);
    wrong_by = 0;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && provider->launches == 2);
    require_right(false);
    call.residual = (dw_matrix){c, PITCH};
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && provider->launches == 4);
    require_right(true);
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && provider->launches == 5);
    CHILD_REQUIRE(fake->launch_count == 0 && fake->memory == 0);
}

/* The kernel is not used, and the reference computes the call. Other kernels, and this kernel's other epilogue, are
 * unaffected. */
static void wrong_kernel_is_rejected(void *unused) {
    (void)unused;
    check_first_uses(90);
    forget_c = true;
    dw_gemm call = tiny_call("cutlass.sm90.bf16");
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && provider->launches == 2);
    require_right(false);
    call.residual = (dw_matrix){c, PITCH};
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(
        strstr(dw_last_error(),
               "kernel cutlass.sm90.bf16 disagrees with the reference on Fake GPU 0: D[0][0] "
               "of 557 x 296 x 160 is"));
    CHILD_REQUIRE(strstr(dw_last_error(), "computed by definition"));
    forget_c = false;
    const int before = provider->launches;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK); /* the result is kept */
    CHILD_REQUIRE(provider->launches == before && fake->launch_count == 1);
    CHILD_REQUIRE(strcmp(fake->launches[0].name, "reference_gemm") == 0);
    CHILD_REQUIRE(fake->launches[0].stream == folder);
    require_right(true);
    call.kernel = "cutlass.sm90.bf16.other";
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && provider->launches == before + 2);
    require_right(true);
}

static void kernel_fails(void *unused) {
    (void)unused;
    check_first_uses(90);
    dw_gemm call = tiny_call("cutlass.sm90.bf16");
    provider->result = DW_CUTLASS_FAILED;
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "failed on Fake GPU 0: cutlass.sm90.bf16: as requested"));
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK);
    require_right(false);
}

static void codes(const char *kernel, dw_scheme scheme) {
    dw_gemm call = codes_call();
    call.kernel = kernel;
    call.scheme_a = call.scheme_b = scheme;
    call.a.stride = call.b.stride = 704;
    if (dw_gemm_supported(&call) == DW_OK) return;
    CHILD_REQUIRE(strstr(dw_last_error(), "its GEMMs are refused"));
    provider->kernel = NULL;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_UNSUPPORTED && strstr(dw_last_error(), "disagrees"));
    _exit(3);
}
static void codes_of_fp8(void *unused) {
    (void)unused;
    check_first_uses(100);
    codes("cutlass.sm100.mxfp8", DW_SCHEME_MXFP8);
}
static void codes_of_fp4(void *unused) {
    (void)unused;
    check_first_uses(100);
    codes("cutlass.sm100.nvfp4", DW_SCHEME_NVFP4);
}

static void expect_codes(void (*check)(void *), int expected) {
    int status = 0;
    pid_t child = start_child(check, NULL);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), expected);
}

/* A failure that prevents the first-use check is an error, not a verdict. */
static void failed_check_is_an_error(void *unused) {
    static const char *const calls[] = {"cuMemAlloc_v2", "cuStreamCreate", "cuMemcpyHtoDAsync_v2",
                                        "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"};
    (void)unused;
    check_first_uses(90);
    dw_gemm call = tiny_call("cutlass.sm90.bf16");
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        fake->failing = calls[i];
        fake->result = 2;
        CHILD_REQUIRE(dw_gemm_run(&call) == DW_OUT_OF_MEMORY);
        fake->failing = NULL;
        CHILD_REQUIRE(fake->memory == 0);
    }
    int refused = 0;
    for (int64_t after = 0;; after++) {
        dw__memory_fail_once(after);
        dw_status status = dw_gemm_supported(&call);
        int64_t failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        CHILD_REQUIRE(fake->memory == 0);
        if (status != DW_OK) CHILD_REQUIRE(status == DW_OUT_OF_MEMORY);
        refused += status != DW_OK;
        if (failures == 0) break;
    }
    CHILD_REQUIRE(refused >= 3);
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK);
    require_right(false);
}

/* ---- groups ---------------------------------------------------------------------------------------- */

enum { GROUPS = 3 };
static const int64_t group_rows[GROUPS] = {2, 0, 1};
static void *group_a[GROUPS] = {a, NULL, a + 2 * PITCH}, *group_b[GROUPS] = {b, NULL, b},
            *group_d[GROUPS] = {d, NULL, d + 2 * PITCH};

/* The tiny call's rows as groups, which give the same D. */
static dw_grouped_gemm tiny_groups(const char *kernel) {
    (void)tiny_call(NULL);
    return (dw_grouped_gemm){.struct_size = sizeof(dw_grouped_gemm),
                             .dtype = DW_BF16,
                             .alpha = 2,
                             .groups = GROUPS,
                             .n = N,
                             .k = K,
                             .m = group_rows,
                             .a = group_a,
                             .b = group_b,
                             .d = group_d,
                             .stride_a = PITCH,
                             .stride_b = PITCH,
                             .stride_d = PITCH,
                             .stream = folder,
                             .kernel = kernel,
                             .workspace = workspace,
                             .workspace_bytes = sizeof workspace};
}

static void groups_pass(void *unused) {
    (void)unused;
    size_t bytes = 0;
    check_first_uses(100);
    dw_grouped_gemm call = tiny_groups("cutlass.sm100.grouped");
    CHILD_REQUIRE(dw_grouped_gemm_workspace(&call, &bytes) == DW_OK && bytes == 512);
    CHILD_REQUIRE(dw_grouped_gemm_supported(&call) == DW_OK && provider->launches == 1);
    CHILD_REQUIRE(provider->call.grouped.groups == 4 && provider->call.grouped.processors > 0);
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_OK && provider->launches == 2);
    const dw_cutlass_grouped *g = &provider->call.grouped;
    CHILD_REQUIRE(g->groups == GROUPS && g->n == N && g->k == K && g->alpha == 2);
    CHILD_REQUIRE(provider->workspace == workspace && provider->stream == folder);
    require_right(false);
}

static void groups_refuse(void *unused) {
    (void)unused;
    check_first_uses(100);
    dw_grouped_gemm call = tiny_groups("cutlass.sm100.grouped");
    wrong_group = true;
    CHILD_REQUIRE(dw_grouped_gemm_supported(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(
        strstr(dw_last_error(), "disagrees with the reference on Fake GPU 0: D[200][0] of"));
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_OK && provider->launches == 1);
    CHILD_REQUIRE(fake->launch_count == 2); /* groups that have rows */
    require_right(false);
}

static void groups_own(void *unused) {
    (void)unused;
    size_t bytes = 1;
    fake->capability = 100;
    fake->sm_count = 148;
    dw_grouped_gemm call = tiny_groups(NULL);
    CHILD_REQUIRE(dw_grouped_gemm_workspace(&call, &bytes) == DW_OK && bytes == 0);
    CHILD_REQUIRE(dw_grouped_gemm_supported(&call) == DW_OK && fake->launch_count == 0);
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_OK && fake->launch_count == 2);
    for (int i = 0; i < 2; i++) CHILD_REQUIRE(strcmp(fake->launches[i].name, "sm100_gemm") == 0);
    call.kernel = "sm100_gemm";
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_OK && fake->launch_count == 4);
    call.groups = 0, call.m = NULL;
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_OK && fake->launch_count == 4);

    /* The last group is invalid, so nothing is launched. */
    static const struct {
        int64_t m, n;
        dw_dtype dtype;
        int groups;
        const char *words;
    } wrong[] = {
        {-1, N, DW_BF16, GROUPS, "bf16): group 2: GEMM: m is -1"},
        {1, -1, DW_BF16, GROUPS, "group 0: GEMM: n is -1"},
        {1, N, DW_F32, GROUPS, "the element type is f32"},
        {1, N, DW_BF16, -1, "groups is -1"},
    };
    for (size_t i = 0; i < DW_COUNT(wrong); i++) {
        int64_t rows[GROUPS] = {2, 0, wrong[i].m};
        call = tiny_groups(NULL);
        call.m = rows, call.n = wrong[i].n, call.dtype = wrong[i].dtype;
        call.groups = wrong[i].groups;
        CHILD_REQUIRE(dw_grouped_gemm_run(&call) != DW_OK);
        CHILD_REQUIRE(strstr(dw_last_error(), wrong[i].words));
    }
    call = tiny_groups(NULL), call.d = NULL;
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_INVALID_ARGUMENT);
    CHILD_REQUIRE(strstr(dw_last_error(), "d is NULL; expected an array of 3"));
    call = tiny_groups("cutlass.sm100.bf16");
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_INVALID_ARGUMENT);
    CHILD_REQUIRE(strstr(dw_last_error(), "expected one of sm100_gemm, cutlass.sm100.grouped"));
    call = tiny_groups("cutlass.sm100.grouped"), call.dtype = DW_F16;
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_UNSUPPORTED);
    call = tiny_groups("cutlass.sm100.grouped"), call.n = 4;
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "n is 4; cutlass.sm100.grouped expects a multiple of 8"));
    call = tiny_groups("cutlass.sm100.grouped"), call.struct_size--;
    CHILD_REQUIRE(dw_grouped_gemm_run(&call) == DW_INVALID_ARGUMENT);
    CHILD_REQUIRE(dw_grouped_gemm_run(NULL) == DW_INVALID_ARGUMENT);
    CHILD_REQUIRE(fake->launch_count == 4 && provider->launches == 0);
}

/* ---- list of tests --------------------------------------------------------------------------------- */

static void test_calls(void **state) {
    (void)state;
    expect_child(start_child(named_kernels_compute, NULL));
    expect_child(start_child(own, NULL));
    expect_child(start_child(refusals, NULL));
    expect_child(start_child(without_library, NULL));
    expect_child(start_child(other_version, NULL));
}

static void test_first_use(void **state) {
    (void)state;
    expect_child(start_child(correct_kernel_passes, NULL));
    expect_child(start_child(wrong_kernel_is_rejected, NULL));
    expect_child(start_child(kernel_fails, NULL));
    expect_child(start_child(failed_check_is_an_error, NULL));
}

static void test_first_use_of_codes(void **state) {
    (void)state;
    expect_codes(codes_of_fp8, 0);
    expect_codes(codes_of_fp4, 0);
    for (wrong_factor = 1; wrong_factor < 3; wrong_factor++) expect_codes(codes_of_fp4, 3);
    wrong_factor = 0, swap_scales = true;
    expect_codes(codes_of_fp8, 3);
    swap_scales = false;
}

static void test_groups(void **state) {
    (void)state;
    expect_child(start_child(groups_pass, NULL));
    expect_child(start_child(groups_refuse, NULL));
    expect_child(start_child(groups_own, NULL));
}

static int maps_of(const char *name) {
    const bool ours = strcmp(name, "sm100_gemm") == 0;
    fake->params_bytes = ours ? sizeof(dw_gemm_params) : sizeof(dw_gemm_reference_params);
    return ours ? 4 : 0;
}

static int setup(void **state) {
    begin_on_fake_gpu(state);
    fake->capability = 90;
    fake->maps_of = maps_of;
    load_fake_provider();
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_first_use),
        cmocka_unit_test(test_first_use_of_codes),
        cmocka_unit_test(test_groups),
    };
    return cmocka_run_group_tests(tests, setup, end_on_fake_gpu);
}
