/* The emulator: results of instructions, divergence and reconvergence of lanes, findings of the checker. */
#include "emulator_findings.h"
#include "jit/jit_internal.h"
#include "ptx_file.h"
#include <math.h>

#define HEAD ".version 8.7\n.target sm_90a\n.address_size 64\n"

static dw_emulator *open_emulator(const char *architecture) {
    dw_emulator *emulator;
    assert_int_equal(dw_emulator_create(architecture, NULL, &emulator), DW_OK);
    return emulator;
}
static dw_emulator_module *load(dw_emulator *emulator, const char *ptx) {
    dw_emulator_module *module;
    if (dw_emulator_load(emulator, ptx, strlen(ptx), "test.ptx", &module) != DW_OK)
        fail_msg("%s", dw_last_error());
    return module;
}
static void launch(dw_emulator *emulator, dw_emulator_module *module, const char *kernel,
                   uint32_t grid, uint32_t block, void **arguments) {
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    options.grid[0] = grid, options.block[0] = block;
    if (dw_emulator_launch(module, kernel, &options, arguments, NULL) != DW_OK) {
        print_findings(emulator);
        fail_msg("%s", dw_last_error());
    }
}

static void kernels_run(void **state) {
    enum { N = 1000 };
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    char *ptx = read_ptx("scale_and_add.ptx");
    dw_emulator_module *module = load(emulator, ptx);
    free(ptx);
    float host[2][N], out[N], s = 1.7f;
    uint32_t n = N;
    void *x, *y;
    for (int i = 0; i < N; i++)
        host[0][i] = (float)rand() / 1e6f, host[1][i] = (float)rand() / 1e7f;
    assert_int_equal(dw_emulator_allocate(emulator, sizeof out, &x), DW_OK);
    assert_int_equal(dw_emulator_allocate(emulator, sizeof out, &y), DW_OK);
    assert_int_equal(dw_emulator_copy_in(emulator, x, host[0], sizeof out), DW_OK);
    assert_int_equal(dw_emulator_copy_in(emulator, y, host[1], sizeof out), DW_OK);
    launch(emulator, module, "f", 8, 128, (void *[]){&x, &y, &n, &s});
    assert_int_equal(dw_emulator_copy_out(emulator, out, y, sizeof out), DW_OK);
    for (int i = 0; i < N; i++) assert_true(out[i] == fmaf(host[0][i], s, host[1][i]));
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    /* One byte past the end. */
    n = N + 1;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    options.grid[0] = 8, options.block[0] = 128;
    assert_int_equal(dw_emulator_launch(module, "f", &options, (void *[]){&x, &y, &n, &s}, NULL),
                     DW_INTERNAL);
    dw_finding finding;
    assert_int_equal(dw_emulator_finding(emulator, 0, &finding), DW_OK);
    assert_string_equal(finding.kind, "out of bounds");
    assert_int_equal(finding.lane, N % 32);
    dw_emulator_destroy(emulator);
}

/* Runs a kernel of `ptx` in one block. Its parameter is memory with one word per thread, which is copied to `out`. */
static dw_status run_text(dw_emulator *emulator, const char *ptx, const char *kernel,
                          uint32_t threads, uint32_t shared, uint32_t *out) {
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    void *memory;
    dw_emulator_clear_findings(emulator);
    dw_emulator_module *module = load(emulator, ptx);
    options.block[0] = threads;
    options.shared_bytes = shared;
    assert_int_equal(dw_emulator_allocate(emulator, 4 * threads, &memory), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, memory, 0xEE, 4 * threads), DW_OK);
    dw_status status = dw_emulator_launch(module, kernel, &options, (void *[]){&memory}, NULL);
    assert_int_equal(dw_emulator_copy_out(emulator, out, memory, 4 * threads), DW_OK);
    assert_int_equal(dw_emulator_release(emulator, memory), DW_OK);
    dw_emulator_unload(module);
    return status;
}

/* Runs a kernel of tests/ptx/warps.ptx. */
static dw_status run_kernel(dw_emulator *emulator, const char *kernel, uint32_t threads,
                            uint32_t shared, uint32_t *out) {
    char *ptx = read_ptx("warps.ptx");
    const dw_status status = run_text(emulator, ptx, kernel, threads, shared, out);
    free(ptx);
    return status;
}

/* Runs instructions within a frame that declares registers p, h, r, f, rd; %rd1 is the address of the thread's word,
 * %r1 the thread. */
static dw_status run_body(dw_emulator *emulator, const char *body, uint32_t threads,
                          uint32_t shared, uint32_t *out) {
    static const char head[] =
        HEAD ".extern .shared .align 16 .b8 dynamic[];\n.shared .align 8 .b8 fixed[256];\n"
             ".visible .entry f(.param .u64 out)\n{ .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 "
             "%r<40>; .reg .f32 %f<20>; .reg .b64 %rd<20>;\n"
             "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 "
             "%rd1, %rd1, %rd2;\n";
    char *text = malloc(sizeof head + strlen(body) + 32);
    assert_non_null(text);
    sprintf(text, "%s%s\nret; }\n", head, body);
    const dw_status status = run_text(emulator, text, "f", threads, shared, out);
    free(text);
    return status;
}

/* Lanes leave loops at different times; an operation of the whole warp then finds them reconverged. */
static void lanes_diverge_and_reconverge(void **state) {
    uint32_t out[64];
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    assert_int_equal(run_kernel(emulator, "lanes_diverge_and_reconverge", 64, 0, out), DW_OK);
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t lane = i % 32 ^ 1, sum = lane * (lane - 1) / 2;
        if (lane == 0) sum = 0;
        assert_int_equal(out[i], lane % 2 ? 3 * sum : 1000 + sum);
    }
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    dw_emulator_destroy(emulator);
}

/* A lane may wait for another lane of its warp: each lane has its program counter. */
static void lanes_wait_for_each_other(void **state) {
    uint32_t out[32];
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    assert_int_equal(run_kernel(emulator, "lanes_wait_for_each_other", 32, 0, out), DW_OK);
    for (int i = 0; i < 32; i++) assert_int_equal(out[i], 7);
    dw_emulator_destroy(emulator);
}

/* Operations of subgroups of a warp: each lane's mask is its subgroup. A complete subgroup continues even if lanes of
 * the other subgroup are missing. A warp's barrier is one barrier, whichever instruction its lanes arrive at. */
static void subgroups_of_a_warp_are_independent(void **state) {
    uint32_t out[32];
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
        dw_emulator *emulator;
        options.seed = seed;
        assert_int_equal(dw_emulator_create("sm_90a", &options, &emulator), DW_OK);
        assert_int_equal(run_kernel(emulator, "subgroups_of_a_warp_are_independent", 32, 0, out),
                         DW_OK);
        assert_int_equal(dw_emulator_finding_count(emulator), 0);
        /* 120 and 376 are the sums of the two halves' lanes. */
        for (uint32_t lane = 0; lane < 32; lane++)
            assert_int_equal(out[lane], 100000 * (lane < 16 ? 376 : 120) + 16000 + (lane ^ 3));
        dw_emulator_destroy(emulator);
    }
}

static void barriers_wait_for_all_threads(void **state) {
    uint32_t out[256];
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    assert_int_equal(run_kernel(emulator, "barriers_wait_for_all_threads", 256, 1024, out), DW_OK);
    for (uint32_t i = 0; i < 256; i++) assert_int_equal(out[i], 19000 + (i ^ 0xE0));
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    /* All threads vote, and each counts the votes. */
    assert_int_equal(run_kernel(emulator, "a_count_and_none", 256, 1024, out), DW_OK);
    for (uint32_t i = 0; i < 256; i++) assert_int_equal(out[i], i);
    dw_emulator_destroy(emulator);
}

static void expect_finding(dw_emulator *emulator, const char *body, uint32_t threads,
                           const char *kind, const char *words) {
    uint32_t out[256];
    dw_finding finding;
    char text[2000];
    run_body(emulator, body, threads, 1024, out);
    assert_true(dw_emulator_finding_count(emulator) >= 1);
    assert_int_equal(dw_emulator_finding(emulator, 0, &finding), DW_OK);
    dw_finding_text(&finding, text, sizeof text);
    if (strcmp(finding.kind, kind) != 0 || !strstr(text, words)) fail_msg("%s", text);
    assert_true(finding.ptx_line > 0);
    assert_string_equal(finding.kernel, "f");
}

static void mistakes_are_found(void **state) {
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    expect_finding(emulator,
                   "mov.u32 %r2, dynamic; ld.shared.u32 %r3, [%r2+64]; st.global.u32 [%rd1], %r3;",
                   32, "undefined", "4 were never written");
    /* Each thread has written other bytes; thread 3 wrote all that it reads except for the last one. */
    expect_finding(emulator,
                   ".local .align 8 .b8 own[16]; mov.u64 %rd3, own; cvta.local.u64 %rd4, %rd3; "
                   "mov.u32 %r3, 0; st.local.u32 [%rd3+8], %r1; setp.ne.u32 %p1, %r1, 3; "
                   "@%p1 st.local.u32 [own+12], %r1; @!%p1 st.local.v2.u8 [own+12], {%r3, %r3}; "
                   "@!%p1 st.u8 [%rd4+14], %r3; ld.local.u64 %rd5, [own+8]; add.u64 %rd5, %rd5, 1; "
                   "st.global.u32 [%rd1], %r3;",
                   32, "undefined",
                   "8 bytes of local memory at 0x8, of which 1 were never written");
    expect_finding(emulator,
                   ".local .align 4 .b8 own[8]; st.local.u32 [own], %r1; ld.local.u32 %r2, "
                   "[own+4]; st.global.u32 [%rd1], %r2;",
                   32, "undefined", "4 bytes of local memory at 0x4");
    expect_finding(emulator, "mov.u32 %r2, dynamic; st.shared.u32 [%r2+1024], %r1;", 32,
                   "out of bounds", "shared memory");
    expect_finding(emulator, "st.global.u32 [%rd1+2], %r1;", 32, "not aligned",
                   "not a multiple of 4");
    expect_finding(emulator, "st.global.u32 [%rd1+128], %r1;", 32, "out of bounds",
                   "0 bytes past the end");
    expect_finding(emulator, "setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 1, 64;", 64, "deadlock",
                   "block 0, warp 0: waiting at barrier 1 (32 of 64 threads arrived)");
    /* The size is so large that a 32-bit address wraps around. */
    expect_finding(emulator,
                   "mov.u32 %r2, dynamic; mov.u32 %r3, 0xFFFFFFF0; "
                   "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], %r3; "
                   "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
                   1, "out of bounds", "extends beyond");
    expect_finding(emulator,
                   "mov.u32 %r2, dynamic; mov.u32 %r3, fixed; mov.u32 %r4, 0xFFFFFFF0; "
                   "mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster; "
                   "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], "
                   "[%rd1], %r4, [%r3];",
                   1, "out of bounds", "extends beyond");
    expect_finding(emulator, "trap;", 32, "trap", "lane 0");
    expect_finding(emulator,
                   "setp.lt.u32 %p1, %r1, 5; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xff; @!%p1 "
                   "bra $end; $end:",
                   32, "divergence", "wait");
    expect_finding(emulator,
                   "mov.u32 %r2, fixed; mbarrier.init.shared.b64 [%r2], 1; "
                   "mbarrier.arrive.shared.b64 %rd3, [%r2], 2;",
                   1, "mbarrier", "2 arrivals");
    expect_finding(emulator, "mov.u32 %r2, fixed; mbarrier.arrive.shared.b64 %rd3, [%r2];", 1,
                   "mbarrier", "no mbarrier at");
    expect_finding(emulator,
                   "mov.u32 %r2, fixed; mbarrier.init.shared.b64 [%r2], 1; $w: "
                   "mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra $w;",
                   1, "deadlock", "1 of 1 arrivals pending");
    /* The finding lists warps in the same state together, and also the warps that have ended. */
    static const char four_of_five_wait[] =
        "mov.u32 %r2, fixed; add.u32 %r2, %r2, 8; setp.eq.u32 %p2, %r1, 0; "
        "@%p2 mbarrier.init.shared.b64 [%r2], 129; bar.sync 0; setp.ge.u32 %p3, %r1, 128; "
        "@%p3 bra $end; mbarrier.arrive.shared.b64 %rd3, [%r2]; $w: "
        "mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra $w; $end:";
    static const char *const words[] = {"block 0, warps 0 to 3: waiting for mbarrier",
                                        "1 of 129 arrivals pending", "(fixed + 8)",
                                        "block 0, warp 4: ended"};
    for (size_t i = 0; i < DW_COUNT(words); i++)
        expect_finding(emulator, four_of_five_wait, 160, "deadlock", words[i]);
    dw_emulator_destroy(emulator);
}

/* The report has the source line and the lines of the calls that inlined it. */
static void findings_name_the_source(void **state) {
    char *text = read_ptx("inlined_lines.ptx");
    dw_finding finding;
    char sentence[3000];
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    dw_emulator_module *module = load(emulator, text);
    free(text);
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    assert_int_equal(dw_emulator_launch(module, "f", &options, NULL, NULL), DW_INTERNAL);
    assert_int_equal(dw_emulator_finding(emulator, 0, &finding), DW_OK);
    assert_string_equal(finding.source, "other/tools.h");
    assert_int_equal(finding.source_line, 8);
    assert_string_equal(finding.inlined_at, "tools.h:21 called at ring.cu:57");
    dw_finding_text(&finding, sentence, sizeof sentence);
    if (!strstr(sentence, "(other/tools.h:8 called at tools.h:21 called at ring.cu:57)"))
        fail_msg("%s", sentence);
    dw_emulator_destroy(emulator);
}

/* A structure is copied with its padding, as compilers do. */
static void padding_may_be_copied(void **state) {
    uint32_t out[32];
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    assert_int_equal(run_kernel(emulator, "padding_is_copied", 32, 0, out), DW_OK);
    for (uint32_t i = 0; i < 32; i++) assert_int_equal(out[i], i);
    print_findings(emulator);
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    dw_emulator_destroy(emulator);
}

/* Compares results with C's own arithmetic. */
static void instructions_give_the_right_results(void **state) {
    uint32_t out[32];
    float real;
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    static const struct {
        const char *body;
        uint32_t expected; /* of lane 3 */
    } cases[] = {
        {"mul.hi.s32 %r2, %r1, -2; st.global.u32 [%rd1], %r2;", 0xFFFFFFFF},
        {"shr.s32 %r2, -64, %r1; st.global.u32 [%rd1], %r2;", 0xFFFFFFF8},
        {"shl.b32 %r2, %r1, 32; st.global.u32 [%rd1], %r2;", 0},
        {"bfe.s32 %r2, 0x00000F30, 4, 8; st.global.u32 [%rd1], %r2;", 0xFFFFFFF3},
        {"bfi.b32 %r2, 0xAB, 0x11111111, 8, 8; st.global.u32 [%rd1], %r2;", 0x1111AB11},
        {"prmt.b32 %r2, 0x03020100, 0x07060504, 0x7531; st.global.u32 [%rd1], %r2;", 0x07050301},
        {"lop3.b32 %r2, 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA, 0x96; st.global.u32 [%rd1], %r2;",
         0x96969696},
        {"cvt.rn.f32.u32 %f1, 16777219; st.global.f32 [%rd1], %f1;", 0x4B800002},
        {"cvt.rzi.s32.f32 %r2, 0fC0700000; st.global.u32 [%rd1], %r2;", 0xFFFFFFFD},
        {"cvt.rn.bf16x2.f32 %r2, 0f3F808000, 0f3F818000; st.global.u32 [%rd1], %r2;", 0x3F803F82},
        {"cvt.rn.satfinite.e4m3x2.f32 %h1, 0f43E80000, 0fBF800000; cvt.u32.u16 %r2, %h1; "
         "st.global.u32 [%rd1], %r2;",
         0x7EB8},
        {"min.f32 %f1, 0f7FC00000, 0f40000000; st.global.f32 [%rd1], %f1;", 0x40000000},
        {"add.rz.f32 %f1, 0f3F800000, 0f337FFFFF; st.global.f32 [%rd1], %f1;", 0x3F800000},
        {"add.rp.f32 %f1, 0f3F800000, 0f00800000; st.global.f32 [%rd1], %f1;", 0x3F800001},
        {"mul.ftz.f32 %f1, 0f00800000, 0f3F000000; st.global.f32 [%rd1], %f1;", 0},
        {"mul.f32 %f1, 0f00800000, 0f3F000000; st.global.f32 [%rd1], %f1;", 0x00400000},
        {"popc.b32 %r2, 0xF0F0000F; clz.b32 %r3, 0x00010000; shl.b32 %r3, %r3, 8; or.b32 %r2, %r2, "
         "%r3; st.global.u32 [%rd1], %r2;",
         0xF0C},
        {"setp.lt.and.s32 %p1|%p2, %r1, 5, 1; selp.b32 %r2, 10, 20, %p1; selp.b32 %r3, 1, 2, %p2; "
         "add.s32 %r2, %r2, %r3; st.global.u32 [%rd1], %r2;",
         12},
        {"vote.sync.ballot.b32 %r2, 1, -1; st.global.u32 [%rd1], %r2;", 0xFFFFFFFF},
        {"redux.sync.add.s32 %r2, %r1, -1; st.global.u32 [%rd1], %r2;", 496},
        {"elect.sync %r2|%p1, -1; selp.b32 %r3, 1, 0, %p1; mad.lo.s32 %r2, %r2, 16, %r3; "
         "st.global.u32 [%rd1], %r2;",
         0},
        {"match.any.sync.b32 %r2, 5, -1; st.global.u32 [%rd1], %r2;", 0xFFFFFFFF},
        {"atom.global.add.u32 %r2, [%rd1], 5; ld.global.u32 %r3, [%rd1]; sub.s32 %r2, %r3, %r2; "
         "st.global.u32 [%rd1], %r2;",
         5},
        {"mov.b64 {%r2, %r3}, 0x123456789ABCDEF0; xor.b32 %r2, %r2, %r3; st.global.u32 [%rd1], "
         "%r2;",
         0x12345678 ^ 0x9ABCDEF0},
        /* One lane needs the whole warp, but the other lanes have ended. */
        {"setp.ne.u32 %p1, %r1, 3; @%p1 bra $end; setmaxnreg.dec.sync.aligned.u32 40;\n"
         "bar.warp.sync 8; mov.u32 %r2, 77; st.global.u32 [%rd1], %r2; $end: ret;",
         77},
        /* Vectors of registers. */
        {".reg .v4 .b32 v; .reg .v2 .u32 w<3>; .local .align 16 .b8 at[16]; mov.u32 v.x, 0x1000;\n"
         "mov.u32 v.y, 0x200; mov.u32 v.b, 0x30; mov.u32 v.a, %r1; st.local.v4.u32 [at], v;\n"
         "ld.local.v2.u32 w0, [at]; ld.local.v2.u32 w2, [at+8]; add.u32 w0.x, w0.x, w0.g;\n"
         "mov.b64 %rd3, w2; mov.b64 {%r2, %r3}, %rd3; add.u32 %r2, %r2, %r3;\n"
         "add.u32 %r2, %r2, w0.x; st.global.u32 [%rd1], %r2;",
         0x1233},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (run_body(emulator, cases[i].body, 32, 0, out) != DW_OK)
            fail_msg("%s: %s", cases[i].body, dw_last_error());
        if (out[3] != cases[i].expected)
            fail_msg("%s: 0x%08x, expected 0x%08x", cases[i].body, out[3], cases[i].expected);
    }
    assert_int_equal(run_body(emulator,
                              "ex2.approx.ftz.f32 %f1, 0f3F000000; st.global.f32 [%rd1], %f1;", 32,
                              0, out),
                     DW_OK);
    memcpy(&real, out, sizeof real);
    assert_true(fabs((double)real - sqrt(2)) < 1e-7);
    dw_emulator_destroy(emulator);
}

static void expect_refusal(const char *ptx, dw_status status, const char *words) {
    dw_emulator *emulator = open_emulator("sm_90a");
    dw_emulator_module *module = NULL;
    dw_status got = dw_emulator_load(emulator, ptx, strlen(ptx), "bad.ptx", &module);
    if (got == DW_OK) got = dw_emulator_has_kernel(module, "f");
    if (got != status || !strstr(dw_last_error(), words)) fail_msg("%d: %s", got, dw_last_error());
    dw_emulator_destroy(emulator);
}

static void malformed_ptx_is_rejected(void **state) {
    (void)state;
    expect_refusal("", DW_PARSE, "no PTX");
    expect_refusal(".version 8.7\n.target sm_90a\n.visible .entry f() {\n  add.s32 %r1, %r2;\n}",
                   DW_PARSE, "PTX line 4");
    expect_refusal(HEAD ".visible .entry f() { .reg .b32 %r<3>;\n add.s32 %r1, %r2; }", DW_PARSE,
                   "PTX line 5");
    expect_refusal(HEAD ".visible .entry f() { .reg .b32 %r<3>;\n add.s64 %r1, %r2, %r2; }",
                   DW_PARSE, "s64");
    expect_refusal(HEAD ".visible .entry f() { bra $nowhere; }", DW_PARSE, "$nowhere");
    expect_refusal(HEAD ".visible .entry f() { frobnicate.b32; }", DW_UNSUPPORTED,
                   "frobnicate.b32");
    expect_refusal(HEAD ".visible .entry f() {", DW_PARSE, "a block without");
    expect_refusal(HEAD ".visible .entry f() { .reg .v2 .b32 v; mov.u32 v.z, 1; }", DW_PARSE,
                   "a component of v, a vector of 2");
    expect_refusal(HEAD ".visible .entry f() { .reg .v2 .b32 v; mov.u32 v, 1; }", DW_PARSE,
                   "do not add up to the whole");
    expect_refusal(HEAD ".visible .entry f() { .reg .v2 .pred v; }", DW_PARSE, "a vector of 2");
    expect_refusal(HEAD ".visible .entry f() { .reg .v4 .f64 v; }", DW_PARSE, "16 bytes");
    expect_refusal(HEAD ".visible .entry f() { .reg .v2 .b32 v; @v ret; }", DW_PARSE,
                   "must be a predicate");
    expect_refusal(HEAD ".visible .entry f() { .reg .b32 %r<99999999999999999999>; }", DW_PARSE,
                   "64 bits");
    expect_refusal(".version 8.7\n.target sm_100a\n.visible .entry f() { ret; }", DW_UNSUPPORTED,
                   "sm_100a");
}

/* The emulator supports every instruction of every kernel that the library carries. */
static void library_kernels_are_supported(void **state) {
    size_t kernels = 0;
    (void)state;
    for (const dw__jit_file *file = dw__jit_ptx; file->name; file++) {
        /* NAME.ARCHITECTURE.CONSTANTS */
        dw_emulator *emulator = open_emulator(strstr(file->name, ".sm_100") ? "sm_100a" : "sm_90a");
        dw_emulator_module *module;
        const char *text = (const char *)file->begin;
        size_t bytes = (size_t)(file->end - file->begin);
        if (dw_emulator_load(emulator, text, bytes, file->name, &module) != DW_OK)
            fail_msg("%s", dw_last_error());
        for (const char *at = text;
             (at = memmem(at, (size_t)((const char *)file->end - at), ".entry ", 7)); kernels++) {
            char name[200];
            at += 7;
            assert_int_equal(sscanf(at, "%199[^( \n]", name), 1);
            if (dw_emulator_has_kernel(module, name) != DW_OK) fail_msg("%s", dw_last_error());
        }
        dw_emulator_destroy(emulator);
    }
    if (kernels == 0) skip(); /* built without nvcc and NVRTC */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_run),
        cmocka_unit_test(lanes_diverge_and_reconverge),
        cmocka_unit_test(lanes_wait_for_each_other),
        cmocka_unit_test(subgroups_of_a_warp_are_independent),
        cmocka_unit_test(barriers_wait_for_all_threads),
        cmocka_unit_test(mistakes_are_found),
        cmocka_unit_test(padding_may_be_copied),
        cmocka_unit_test(findings_name_the_source),
        cmocka_unit_test(instructions_give_the_right_results),
        cmocka_unit_test(malformed_ptx_is_rejected),
        cmocka_unit_test(library_kernels_are_supported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
