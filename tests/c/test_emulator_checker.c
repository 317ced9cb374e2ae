/* The checker of shared memory: small kernels that are right, over many orders of execution, and each with one
 * mistake planted, which must be found and named whatever the order.
 */
#include "deepwell/emulator.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SEEDS 50       /* orders of execution of a kernel that is right */
#define FEWER_SEEDS 10 /* of one with a mistake */
#define WORDS 1024     /* of input and output each */

/* A kernel f(in, out); `words` of its output are compared. Every instruction has a line of its own. */
typedef struct kernel {
    const char *name, *body;
    uint32_t threads, cluster, words;
    uint32_t (*expected)(const uint32_t *in, uint32_t index);
    const char *architecture; /* NULL: sm_90a */
} kernel;

/* `from` becomes `to`; every finding is then of `kind` (or one of two), or of `also`; one of `kind` names the
 * lines that have `line` and `other` (NULL: only that). */
typedef struct mistake {
    const char *what, *from, *to, *kind, *also, *line, *other;
} mistake;

#define HEAD                                                                                       \
    ".address_size 64\n"                                                                           \
    ".extern .shared .align 128 .b8 dynamic[];\n.shared .align 8 .b8 barriers[64];\n"              \
    ".visible .entry f(.param .u64 in, .param .u64 out)\n{\n.reg .pred %p<20>;\n"                  \
    ".reg .b32 %r<60>;\n.reg .f32 %f<20>;\n.reg .b64 %rd<20>;\n"                                   \
    "ld.param.u64 %rd1, [in];\nld.param.u64 %rd2, [out];\nmov.u32 %r1, %tid.x;\n"                  \
    "shr.u32 %r2, %r1, 5;\nand.b32 %r3, %r1, 31;\nmov.u32 %r4, barriers;\n"                        \
    "mov.u32 %r5, dynamic;\nmul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd1, %rd3;\n"               \
    "add.s64 %rd5, %rd2, %rd3;\n"

#define VERSION ".version 9.0\n.target %s\n"
static const char *architecture_of(const kernel *k) {
    return k->architecture ? k->architecture : "sm_90a";
}

static char *with_mistake(const kernel *k, const mistake *m) {
    const size_t room = sizeof HEAD + strlen(k->body) + 100 + (m ? strlen(m->to) : 0);
    char *text = malloc(room);
    assert_non_null(text);
    if (!m) {
        snprintf(text, room, VERSION "%s%sret;\n}\n", architecture_of(k), HEAD, k->body);
        return text;
    }
    const char *at = strstr(k->body, m->from);
    if (!at) fail_msg("%s, %s: the kernel has no \"%s\"", k->name, m->what, m->from);
    snprintf(text, room, VERSION "%s%.*s%s%sret;\n}\n", architecture_of(k), HEAD,
             (int)(at - k->body), k->body, m->to, at + strlen(m->from));
    return text;
}

static int line_of(const char *text, const char *words) {
    const char *at = strstr(text, words);
    int line = 1;
    if (!at) fail_msg("no line has \"%s\"", words);
    for (const char *c = text; c < at; c++) line += *c == '\n';
    return line;
}

static bool names(const dw_finding *finding, const char *text, const mistake *m) {
    const int lines[2] = {line_of(text, m->line), m->other ? line_of(text, m->other) : 0};
    char other[32];
    for (int i = 0; i < (m->other ? 2 : 1); i++) {
        if (finding->ptx_line != lines[i]) continue;
        if (!m->other) return true;
        snprintf(other, sizeof other, "PTX line %d ", lines[1 - i]);
        if (strstr(finding->what, other)) return true;
    }
    return false;
}

static void check_findings(const dw_emulator *emulator, const kernel *k, const mistake *m,
                           const char *text, uint64_t seed) {
    const size_t count = dw_emulator_finding_count(emulator);
    bool named = false;
    char all[6000] = "";
    for (size_t i = 0; i < count; i++) {
        dw_finding finding;
        char one[2000];
        assert_int_equal(dw_emulator_finding(emulator, i, &finding), DW_OK);
        dw_finding_text(&finding, one, sizeof one);
        snprintf(all + strlen(all), sizeof all - strlen(all), "\n%s", one);
        const bool of_kind = m && strstr(m->kind, finding.kind);
        if (!of_kind && !(m && m->also && strstr(m->also, finding.kind)))
            fail_msg("%s, %s, seed %llu: %s\n%s", k->name, m ? m->what : "right",
                     (unsigned long long)seed, one, text);
        named = named || (of_kind && names(&finding, text, m));
    }
    if (m && !named)
        fail_msg("%s, %s, seed %llu: not found:%s\n%s", k->name, m->what, (unsigned long long)seed,
                 all, text);
}

static void run(const kernel *k, const mistake *m, uint64_t seed) {
    static uint32_t in[WORDS], out[WORDS];
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    dw_emulator_launch_options launch = DW_EMULATOR_LAUNCH_DEFAULT;
    dw_emulator *emulator;
    dw_emulator_module *module;
    void *memory[2];
    char *text = with_mistake(k, m);
    options.seed = seed;
    for (int i = 0; i < WORDS; i++) in[i] = (uint32_t)rand() | 1;
    assert_int_equal(dw_emulator_create(architecture_of(k), &options, &emulator), DW_OK);
    if (dw_emulator_load(emulator, text, strlen(text), "test.ptx", &module) != DW_OK)
        fail_msg("%s: %s", k->name, dw_last_error());
    for (int i = 0; i < 2; i++)
        assert_int_equal(dw_emulator_allocate(emulator, sizeof in, &memory[i]), DW_OK);
    assert_int_equal(dw_emulator_copy_in(emulator, memory[0], in, sizeof in), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, memory[1], 0xEE, sizeof out), DW_OK);
    launch.block[0] = k->threads;
    launch.grid[0] = launch.cluster[0] = k->cluster;
    launch.cluster[1] = launch.cluster[2] = 1;
    launch.shared_bytes = 8192;
    const dw_status status =
        dw_emulator_launch(module, "f", &launch, (void *[]){&memory[0], &memory[1]}, NULL);
    check_findings(emulator, k, m, text, seed);
    if (!m) {
        if (status != DW_OK) fail_msg("%s: %s", k->name, dw_last_error());
        assert_int_equal(dw_emulator_copy_out(emulator, out, memory[1], sizeof out), DW_OK);
        for (uint32_t i = 0; i < k->words; i++)
            if (out[i] != k->expected(in, i))
                fail_msg("%s, seed %llu: word %u is 0x%08x, expected 0x%08x", k->name,
                         (unsigned long long)seed, i, out[i], k->expected(in, i));
    }
    dw_emulator_destroy(emulator);
    free(text);
}

static void run_all(const kernel *k, const mistake *mistakes, size_t count) {
    for (uint64_t seed = 1; seed <= SEEDS; seed++) run(k, NULL, seed);
    for (size_t i = 0; i < count; i++)
        for (uint64_t seed = 1; seed <= FEWER_SEEDS; seed++) run(k, &mistakes[i], seed);
}
#define COUNT(list) (sizeof(list) / sizeof *(list))

/* ---- copies through two stages ------------------------------------------------------------- */

/* Warp 0 fetches six blocks of 512 bytes, warps 1 and 2 add up half of each. */
#define INIT_FULL "mbarrier.init.shared.b64 [%r4], 1;\n"
#define FREES "setp.eq.u32 %p5, "
#define NOT_FIRST "@%p1 bra $ready;\n"
#define INIT_EMPTY(n)                                                                              \
    "mbarrier.init.shared.b64 [%r4+16], " n ";\nmbarrier.init.shared.b64 [%r4+24], " n ";\n"
#define WAIT_FULL                                                                                  \
    "$full:\nmbarrier.try_wait.parity.shared.b64 %p6, [%r9], %r10;\n@!%p6 bra $full;\n"
#define WAIT_EMPTY                                                                                 \
    "$empty:\nmbarrier.try_wait.parity.shared.b64 %p3, [%r9+16], %r10;\n@!%p3 bra $empty;\n"
#define EXPECT "mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 512;\n"
#define COPY                                                                                       \
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12], [%rd7], 512, "      \
    "[%r9];\n"
#define FREE "@%p5 mbarrier.arrive.shared.b64 _, [%r9+16];\n"
#define ADD "add.u32 %r20, %r20, %r15;\nadd.u32 %r20, %r20, %r16;\n"
#define LOAD "ld.shared.v2.u32 {%r15, %r16}, [%r12];\n"

static uint32_t sum_of_blocks(const uint32_t *in, uint32_t thread) {
    uint32_t sum = 0;
    for (uint32_t block = 0; block < 6; block++)
        sum += in[block * 128 + 2 * thread] + in[block * 128 + 2 * thread + 1];
    return sum;
}

static const kernel pipeline = {
    "pipeline",
    "setp.ne.u32 %p1, %r1, 0;\n" FREES "%r3, 0;\n" NOT_FIRST INIT_EMPTY("2") INIT_FULL
    "mbarrier.init.shared.b64 [%r4+8], 1;\nfence.mbarrier_init.release.cluster;\n"
    "$ready:\nbar.sync 0;\n"
    "mov.u32 %r6, 0;\nmov.u32 %r20, 0;\nsetp.ne.u32 %p2, %r2, 0;\n@%p2 bra $consume;\n"
    "@%p1 bra $end;\n"
    "$produce:\nand.b32 %r7, %r6, 1;\nshl.b32 %r8, %r7, 3;\nadd.u32 %r9, %r4, %r8;\n"
    "shr.u32 %r10, %r6, 1;\nxor.b32 %r10, %r10, 1;\nand.b32 %r10, %r10, 1;\n" WAIT_EMPTY EXPECT
    "shl.b32 %r11, %r7, 9;\nadd.u32 %r12, %r5, %r11;\nmul.wide.u32 %rd6, %r6, 512;\n"
    "add.s64 %rd7, %rd1, %rd6;\n" COPY
    "add.u32 %r6, %r6, 1;\nsetp.lt.u32 %p4, %r6, 6;\n@%p4 bra $produce;\nbra $end;\n"
    "$consume:\nand.b32 %r7, %r6, 1;\nshl.b32 %r8, %r7, 3;\nadd.u32 %r9, %r4, %r8;\n"
    "shr.u32 %r10, %r6, 1;\nand.b32 %r10, %r10, 1;\n" WAIT_FULL
    "shl.b32 %r11, %r7, 9;\nadd.u32 %r12, %r5, %r11;\nshl.b32 %r13, %r1, 3;\n"
    "add.u32 %r12, %r12, %r13;\nsub.u32 %r12, %r12, 256;\n" LOAD ADD "bar.warp.sync -1;\n" FREE
    "add.u32 %r6, %r6, 1;\nsetp.lt.u32 %p4, %r6, 6;\n@%p4 bra $consume;\n"
    "st.global.u32 [%rd5-128], %r20;\n$end:\n",
    96,
    1,
    64,
    sum_of_blocks,
    NULL};

static void copies_are_waited_for(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"waits for the stage before's copy, not for its readers", "%p3, [%r9+16]", "%p3, [%r9]",
         "race", NULL, "cp.async.bulk", "ld.shared.v2"},
        {"one of two readers frees the stage", FREES "%r3, 0;\n" NOT_FIRST INIT_EMPTY("2"),
         FREES "%r1, 32;\n" NOT_FIRST INIT_EMPTY("1"), "race", NULL, "cp.async.bulk",
         "ld.shared.v2"},
        {"frees the stage before it reads", LOAD ADD "bar.warp.sync -1;\n" FREE, FREE LOAD ADD,
         "race", NULL, "cp.async.bulk", "ld.shared.v2"},
        {"no fence after mbarrier.init", "fence.mbarrier_init.release.cluster;\n", "",
         "missing fence", NULL, "cp.async.bulk", INIT_FULL},
        {"no barrier after mbarrier.init", "$ready:\nbar.sync 0;\n", "$ready:\n", "race mbarrier",
         NULL, "mbarrier.try_wait.parity.shared.b64 %p6", NULL},
        {"no bytes are expected", EXPECT, "mbarrier.arrive.shared.b64 _, [%r9];\n", "mbarrier",
         "race undefined deadlock", "cp.async.bulk", NULL},
        {"the mbarrier is initialised twice", INIT_FULL,
         INIT_FULL "mbarrier.init.shared.b64 [%r4+0], 1;\n", "mbarrier", NULL,
         "mbarrier.init.shared.b64 [%r4+0]", INIT_FULL},
        {"data over an mbarrier", LOAD, "@%p5 st.shared.u32 [%r9+20], %r3;\n" LOAD, "mbarrier",
         "race deadlock", "st.shared.u32 [%r9+20]", NULL},
    };
    run_all(&pipeline, mistakes, COUNT(mistakes));
}

/* One copy for all. */
static uint32_t copied(const uint32_t *in, uint32_t i) { return in[i]; }
static const kernel fetch = {
    "fetch",
    "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra $ready;\n" INIT_FULL "fence.proxy.async;\n"
    "$ready:\nbar.sync 0;\n@%p1 bra $full;\nmov.u32 %r9, %r4;\n" EXPECT
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd1], 512, "
    "[%r4];\n"
    "$full:\nmbarrier.try_wait.parity.shared.b64 %p6, [%r4], 0;\n@!%p6 bra $full;\n"
    "shl.b32 %r6, %r1, 2;\nadd.u32 %r8, %r5, %r6;\nld.shared.u32 %r10, [%r8];\n"
    "st.global.u32 [%rd5], %r10;\n",
    128,
    1,
    128,
    copied,
    NULL};

static void a_copy_is_waited_for(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"nobody waits", "mbarrier.try_wait.parity.shared.b64 %p6, [%r4], 0;\n@!%p6 bra $full;\n",
         "", "race", "undefined", "ld.shared", "cp.async.bulk"},
        {"waits for the phase before", "%p6, [%r4], 0", "%p6, [%r4], 1", "race", "undefined",
         "ld.shared", "cp.async.bulk"},
        {"no fence after mbarrier.init", "fence.proxy.async;\n", "", "missing fence", NULL,
         "cp.async.bulk", INIT_FULL},
    };
    run_all(&fetch, mistakes, COUNT(mistakes));
}

/* ---- an epilogue that stores through the asynchronous proxy ---------------------------------- */

/* Four warps write 512 bytes, one thread has them copied to memory; twice. */
#define WRITE(i) "st.shared.u32 [%r8], %r1" #i ";\n"
#define STORE(i)                                                                                   \
    "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2+" #i "], [%r5], 512;\n"                \
    "@%p1 cp.async.bulk.commit_group;\n"

static uint32_t stored(const uint32_t *in, uint32_t i) {
    const uint32_t x = in[i % 128 ^ 64];
    return i < 128 ? x : ~x;
}

static const kernel epilogue = {
    "epilogue",
    "setp.eq.u32 %p1, %r1, 0;\nxor.b32 %r7, %r1, 64;\nshl.b32 %r7, "
    "%r7, 2;\n"
    "add.u32 %r8, %r5, %r7;\nld.global.u32 %r11, [%rd4];\nnot.b32 "
    "%r12, %r11;\n" WRITE(
        1) "fence.proxy.async.shared::cta;\nbar.sync "
           "0;\n" STORE(0) "@%p1 "
                           "cp.async.bulk.wait_group."
                           "read 0;\nbar.sync "
                           "1;\n" WRITE(2) "fence."
                                           "proxy."
                                           "async."
                                           "shared::"
                                           "cta;"
                                           "\nbar."
                                           "sync "
                                           "2;"
                                           "\n" STORE(512) "@%p1 cp.async.bulk.wait_group 0;\n",
    128,
    1,
    256,
    stored,
    NULL};

static void stores_through_the_other_proxy_are_fenced(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no proxy fence", WRITE(1) "fence.proxy.async.shared::cta;\n", WRITE(1), "missing fence",
         NULL, "[%rd2+0]", "[%r8], %r11"},
        {"a fence of global memory only", WRITE(2) "fence.proxy.async.shared::cta;\n",
         WRITE(2) "fence.proxy.async.global;\n", "missing fence", NULL, "[%rd2+512]",
         "[%r8], %r12"},
        {"the fence comes before the write", WRITE(2) "fence.proxy.async.shared::cta;\n",
         "fence.proxy.async.shared::cta;\n" WRITE(2), "missing fence", NULL, "[%rd2+512]",
         "[%r8], %r12"},
        {"no barrier before the copy", "bar.sync 0;\n", "", "race", "undefined", "[%rd2+0]",
         "[%r8], %r11"},
        {"the copy may still read", "@%p1 cp.async.bulk.wait_group.read 0;\n", "", "race", NULL,
         "[%rd2+0]", "[%r8], %r12"},
        {"waits for all but one copy", "wait_group.read 0", "wait_group.read 1", "race", NULL,
         "[%rd2+0]", "[%r8], %r12"},
        {"no barrier after the wait", "bar.sync 1;\n", "", "race", "missing fence", "[%rd2+0]",
         "[%r8], %r12"},
    };
    run_all(&epilogue, mistakes, COUNT(mistakes));
}

/* ---- named barriers ------------------------------------------------------------------------ */

/* Warps 0 and 1 give words to warps 2 and 3, three times. */
static uint32_t handed(const uint32_t *in, uint32_t i) { return 3 * in[i ^ 1] + 3; }

static const kernel handover = {
    "handover",
    "mov.u32 %r6, 0;\nmov.u32 %r9, 0;\nand.b32 %r7, %r1, 63;\nsetp.ge.u32 %p1, %r1, 64;\n"
    "@%p1 bra $take;\nshl.b32 %r7, %r7, 2;\nadd.u32 %r8, %r5, %r7;\nld.global.u32 %r11, [%rd4];\n"
    "$give:\nadd.u32 %r12, %r11, %r6;\nst.shared.u32 [%r8], %r12;\nbar.arrive 1, 128;\n"
    "bar.sync 2, 128;\nadd.u32 %r6, %r6, 1;\nsetp.lt.u32 %p2, %r6, 3;\n@%p2 bra $give;\n"
    "bra $end;\n"
    "$take:\nxor.b32 %r7, %r7, 1;\nshl.b32 %r7, %r7, 2;\nadd.u32 %r8, %r5, %r7;\n"
    "$next:\nbar.sync 1, 128;\nld.shared.u32 %r13, [%r8];\nadd.u32 %r9, %r9, %r13;\n"
    "bar.arrive 2, 128;\nadd.u32 %r6, %r6, 1;\nsetp.lt.u32 %p2, %r6, 3;\n@%p2 bra $next;\n"
    "st.global.u32 [%rd5-256], %r9;\n$end:\n",
    128,
    1,
    64,
    handed,
    NULL};

static void barriers_order(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"reads before the barrier", "bar.sync 1, 128;\nld.shared.u32 %r13, [%r8];\n",
         "ld.shared.u32 %r13, [%r8];\nbar.sync 1, 128;\n", "race", "undefined", "ld.shared",
         "st.shared"},
        {"arrives before it has read",
         "ld.shared.u32 %r13, [%r8];\nadd.u32 %r9, %r9, %r13;\nbar.arrive 2, 128;\n",
         "bar.arrive 2, 128;\nld.shared.u32 %r13, [%r8];\nadd.u32 %r9, %r9, %r13;\n", "race", NULL,
         "ld.shared", "st.shared"},
        {"arrives before it has written", "st.shared.u32 [%r8], %r12;\nbar.arrive 1, 128;\n",
         "bar.arrive 1, 128;\nst.shared.u32 [%r8], %r12;\n", "race", "undefined", "ld.shared",
         "st.shared"},
        {"the same bytes of two warps", "and.b32 %r7, %r1, 63;\n", "and.b32 %r7, %r1, 31;\n",
         "race", "undefined", "st.shared", "st.shared"},
    };
    run_all(&handover, mistakes, COUNT(mistakes));
}

/* Neighbouring halves and bytes of a word belong to different warps. */
static uint32_t halves(const uint32_t *in, uint32_t i) {
    return (in[2 * i] & 0xFFFF) | in[2 * i + 1] << 16;
}
static const kernel parts = {
    "parts",
    "and.b32 %r6, %r1, 31;\nshl.b32 %r6, %r6, 2;\nshl.b32 %r7, %r2, 1;\nadd.u32 %r6, %r6, %r7;\n"
    "add.u32 %r8, %r5, %r6;\nmul.wide.u32 %rd6, %r6, 2;\nadd.s64 %rd7, %rd1, %rd6;\n"
    "ld.global.u32 %r9, [%rd7];\nst.shared.u16 [%r8], %r9;\nbar.sync 0;\nshl.b32 %r10, %r1, 2;\n"
    "add.u32 %r10, %r5, %r10;\nsetp.ge.u32 %p1, %r1, 32;\n@%p1 bra $end;\n"
    "ld.shared.u32 %r11, [%r10];\nst.global.u32 [%rd5], %r11;\n$end:\n",
    64,
    1,
    32,
    halves,
    NULL};

static void parts_of_words_differ(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no barrier", "bar.sync 0;\n", "", "race", "undefined", "ld.shared", "st.shared"},
        {"the same half", "add.u32 %r6, %r6, %r7;\nadd.u32 %r8, %r5, %r6;\n",
         "add.u32 %r8, %r5, %r6;\nadd.u32 %r6, %r6, %r7;\n", "race", "undefined", "st.shared",
         "st.shared"},
    };
    run_all(&parts, mistakes, COUNT(mistakes));
}

/* ---- products ------------------------------------------------------------------------------ */

/* A of 64 x 16, row i of 1 + i % 4, by B of 16 x 8 twos; then A again, doubled. */
#define WRITE_A(f, address)                                                                        \
    "cvt.rn.bf16x2.f32 %r7, " f ", " f ";\nst.shared.v4.u32 [" address "], {%r7, %r7, %r7, "       \
    "%r7};\n"
#define PRODUCT(d)                                                                                 \
    "wgmma.fence.sync.aligned;\n"                                                                  \
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" d "}, %rd10, %rd11, %p9, 1, 1, 0, "    \
    "0;\nwgmma.commit_group.sync.aligned;\n"
#define WAIT "wgmma.wait_group.sync.aligned 0;\n"

static uint32_t word_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static uint32_t product_word(const uint32_t *in, uint32_t i) {
    const float d = 32.0f * (float)(1 + i % 32 / 4 % 4) * 3;
    (void)in;
    return word_of(d);
}

static const kernel product = {
    "product",
    "setp.ne.u32 %p9, %r5, %r5;\nand.b32 %r6, %r1, 3;\nadd.u32 %r6, %r6, 1;\n"
    "cvt.rn.f32.u32 %f1, %r6;\nadd.f32 %f2, %f1, %f1;\nshl.b32 %r6, %r1, 4;\n"
    "add.u32 %r8, %r5, %r6;\nshr.u32 %r9, %r5, 4;\ncvt.u64.u32 %rd9, %r9;\n"
    "or.b64 %rd10, %rd9, 0x1000080000;\nadd.s64 %rd11, %rd10, 128;\n"
    "setp.ge.u32 %p1, %r1, 16;\nmov.u32 %r10, 0x40004000;\n"
    "@!%p1 st.shared.v4.u32 [%r8+2048], {%r10, %r10, %r10, %r10};\n" WRITE_A(
        "%f1", "%r8") "fence.proxy.async;\nbar.sync 0;\n" PRODUCT("%f3, %f4, %f5, %f6") WAIT
    "bar.sync 1;\n" WRITE_A("%f2", "%r8+0") "fence.proxy.async;\nbar.sync 2;\n" PRODUCT(
        "%f7, %f8, %f9, %f10") "wgmma.wait_group.sync.aligned 0x0;\nadd.f32 %f3, %f3, "
                               "%f7;\nst.global.f32 [%rd5], %f3;\n",
    128,
    1,
    128,
    product_word,
    NULL};

static void products_are_waited_for(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no proxy fence", "fence.proxy.async;\nbar.sync 0;\n", "bar.sync 0;\n", "missing fence",
         NULL, "{%f3", "[%r8+2048]"},
        {"no barrier", "bar.sync 0;\n", "", "race", "undefined", "{%f3", "[%r8+2048]"},
        {"written while a product reads", WAIT, "", "race", NULL, "{%f3", "[%r8+0]"},
    };
    run_all(&product, mistakes, COUNT(mistakes));
}

/* A sum that is read before the wait is a finding, and it is the right sum. */
static void sums_read_early_are_right(void **state) {
    (void)state;
    static const mistake early = {"the wait comes later",
                                  "wgmma.wait_group.sync.aligned 0x0;\nadd.f32 %f3, %f3, %f7;\n",
                                  "add.f32 %f3, %f3, %f7;\nwgmma.wait_group.sync.aligned 0x0;\n",
                                  "too early",
                                  NULL,
                                  "add.f32 %f3, %f3, %f7",
                                  NULL};
    char *text = with_mistake(&product, &early);
    for (uint64_t seed = 1; seed <= FEWER_SEEDS; seed++) {
        dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
        dw_emulator_launch_options launch = DW_EMULATOR_LAUNCH_DEFAULT;
        uint32_t out[128];
        dw_emulator *emulator;
        dw_emulator_module *module;
        void *memory;
        options.seed = seed;
        assert_int_equal(dw_emulator_create("sm_90a", &options, &emulator), DW_OK);
        assert_int_equal(dw_emulator_load(emulator, text, strlen(text), "test.ptx", &module),
                         DW_OK);
        assert_int_equal(dw_emulator_allocate(emulator, sizeof out, &memory), DW_OK);
        launch.block[0] = 128;
        launch.shared_bytes = 8192;
        assert_int_equal(
            dw_emulator_launch(module, "f", &launch, (void *[]){&memory, &memory}, NULL), DW_OK);
        check_findings(emulator, &product, &early, text, seed);
        assert_int_equal(dw_emulator_copy_out(emulator, out, memory, sizeof out), DW_OK);
        for (uint32_t i = 0; i < 128; i++) assert_int_equal(out[i], product_word(NULL, i));
        dw_emulator_destroy(emulator);
    }
    free(text);
}

/* The same of a tensor pipe: A of 128 x 16, B of 16 x 16. */
#define ROW(address)                                                                               \
    "st.shared.v4.u32 [" address "], {%r7, %r7, %r7, %r7};\n"                                      \
    "st.shared.v4.u32 [" address "+128], {%r7, %r7, %r7, %r7};\n"
#define DONE "$wait:\nmbarrier.try_wait.parity.shared.b64 %p3, [%r4], 0;\n@!%p3 bra $wait;\n"

static uint32_t tensor_word(const uint32_t *in, uint32_t i) {
    const float d = 32.0f * (float)(1 + i % 4);
    (void)in;
    return word_of(d);
}

#define TENSOR_BEGIN                                                                               \
    "setp.ne.u32 %p9, %r5, %r5;\nsetp.eq.u32 %p8, %r5, %r5;\nsetp.ne.u32 %p1, %r2, 0;\n"           \
    "@%p1 bra $begun;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4+32], 32;\n"    \
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"                                 \
    "shl.b32 %r6, %r3, 4;\nadd.u32 %r6, %r5, %r6;\nmov.u32 %r10, 0x40004000;\n"                    \
    "st.shared.v4.u32 [%r6+4096], {%r10, %r10, %r10, %r10};\n"                                     \
    "setp.ne.u32 %p2, %r1, 0;\n@%p2 bra $begun;\n" INIT_FULL                                       \
    "fence.mbarrier_init.release.cluster;\n$begun:\n"                                              \
    "and.b32 %r6, %r1, 3;\nadd.u32 %r6, %r6, 1;\ncvt.rn.f32.u32 %f1, %r6;\n"                       \
    "cvt.rn.bf16x2.f32 %r7, %f1, %f1;\nshr.u32 %r8, %r1, 3;\nshl.b32 %r8, %r8, 8;\n"               \
    "and.b32 %r9, %r1, 7;\nshl.b32 %r9, %r9, 4;\nadd.u32 %r8, %r8, %r9;\n"                         \
    "add.u32 %r8, %r5, %r8;\n" ROW("%r8") "fence.proxy.async.shared::cta;\n" AFTER_BARRIER(        \
        "0") "ld.shared.u32 %r14, [%r4+32];\nand.b32 %r21, %r1, 96;\n"                             \
             "shl.b32 %r21, %r21, 16;\nadd.u32 %r21, %r21, %r14;\nshr.u32 %r9, %r5, 4;\n"          \
             "cvt.u64.u32 %rd9, %r9;\nor.b64 %rd10, %rd9, 0x401000080000;\nadd.s64 %rd11, %rd10, " \
             "256;\n"                                                                              \
             "mov.u32 %r20, 0x08040490;\nsetp.ne.u32 %p2, %r1, 0;\n"
#define AFTER_BARRIER(n)                                                                           \
    "tcgen05.fence::before_thread_sync;\nbar.sync " n ";\ntcgen05.fence::after_thread_sync;\n"
#define TENSOR_PRODUCT(adds)                                                                       \
    "tcgen05.mma.cta_group::1.kind::f16 [%r14], %rd10, %rd11, %r20, " adds                         \
    ";\ntcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];\n"
#define TENSOR_LOAD(to) "tcgen05.ld.sync.aligned.32x32b.x1.b32 {" to "}, [%r21];\n"
#define LOADED "tcgen05.wait::ld.sync.aligned;\n"
#define TENSOR_END                                                                                 \
    "tcgen05.fence::before_thread_sync;\nbar.sync 5;\n@%p1 bra $end;\n"                            \
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r14, 32;\n$end:\n"

static const kernel tensor_product = {
    "tensor product",
    TENSOR_BEGIN "@%p2 bra $wait;\n" TENSOR_PRODUCT("%p9") DONE
    "tcgen05.fence::after_thread_sync;\nadd.u32 %r7, %r7, 1;\nmov.u32 %r12, %r8;\n" ROW("%r12")
        TENSOR_LOAD("%r22") LOADED "st.global.u32 [%rd5], %r22;\n" TENSOR_END,
    128,
    1,
    128,
    tensor_word,
    "sm_100a"};

static void tensor_products_are_waited_for(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no proxy fence", "fence.proxy.async.shared::cta;\n", "", "missing fence", NULL,
         "tcgen05.mma", "[%r6+4096]"},
        {"the fence comes before the write", ROW("%r8") "fence.proxy.async.shared::cta;\n",
         "fence.proxy.async.shared::cta;\n" ROW("%r8"), "missing fence", NULL, "tcgen05.mma",
         "[%r8]"},
        {"nobody waits", DONE, "$wait:\n", "race", "undefined tensor memory", "tcgen05.mma",
         "[%r12]"},
        {"waits for the phase before", "%p3, [%r4], 0", "%p3, [%r4], 1", "race",
         "undefined tensor memory", "tcgen05.mma", "[%r12]"},
    };
    run_all(&tensor_product, mistakes, COUNT(mistakes));
}

/* Four warps store to tensor memory, four others load what they have stored, and the first store again. */
static uint32_t same_word(const uint32_t *in, uint32_t i) { return in[i]; }

static const kernel tensor_memory = {
    "tensor memory",
    "setp.ge.u32 %p4, %r1, 128;\nsetp.ne.u32 %p1, %r2, 0;\n@%p1 bra $allocated;\n"
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4+32], 32;\n"
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n$allocated:\n"
    "bar.sync 0;\nld.shared.u32 %r6, [%r4+32];\nand.b32 %r7, %r1, 96;\nshl.b32 %r7, %r7, 16;\n"
    "add.u32 %r6, %r6, %r7;\n@%p4 bra $load;\nld.global.u32 %r8, [%rd4];\n"
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r8};\n"
    "tcgen05.wait::st.sync.aligned; // first\ntcgen05.fence::before_thread_sync;\nbar.sync 1, "
    "256;\n"
    "bar.sync 2, 256;\nadd.u32 %r9, %r8, 1;\ntcgen05.fence::after_thread_sync;\n"
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r9};\ntcgen05.wait::st.sync.aligned;\n"
    "bra.uni $free;\n$load:\nbar.sync 1, 256;\n"
    "tcgen05.fence::after_thread_sync;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r6];\n"
    "tcgen05.wait::ld.sync.aligned;\nst.global.u32 [%rd5+-512], %r10;\n"
    "tcgen05.fence::before_thread_sync;\nbar.sync 2, 256; // read\n$free:\nbar.sync 3;\n"
    "@%p1 bra $end;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;\n$end:\n",
    256,
    1,
    128,
    same_word,
    "sm_100a"};

static void tensor_memory_is_waited_for(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"a store is not waited for", "tcgen05.wait::st.sync.aligned; // first\n", "", "too early",
         NULL, "{%r10}", NULL},
        {"loaded without a barrier", "$load:\nbar.sync 1, 256;\n", "$load:\nbar.arrive 1, 256;\n",
         "race", "undefined, too early", "{%r8}", "{%r10}"},
        {"stored again without a barrier", "bar.sync 2, 256;\nadd", "bar.arrive 2, 256;\nadd",
         "race", "too early", "{%r10}", "{%r9}"},
        {"a load is not waited for", "tcgen05.wait::ld.sync.aligned;\n", "", "too early", NULL,
         "st.global.u32 [%rd5", NULL},
    };
    run_all(&tensor_memory, mistakes, COUNT(mistakes));
}

/* Sums in tensor memory: 7 is stored, a product added, what that makes loaded, and a product put in its place. */
#define SEVENS "%r23, %r23, %r23, %r23, %r23, %r23, %r23, %r23"
#define STORED "tcgen05.wait::st.sync.aligned;\n"
#define DONE_FIRST                                                                                 \
    "$first:\nmbarrier.try_wait.parity.shared.b64 %p3, [%r4], 0;\n@!%p3 bra $first;\n"             \
    "tcgen05.fence::after_thread_sync;\n"
#define DONE_SECOND                                                                                \
    "$second:\nmbarrier.try_wait.parity.shared.b64 %p3, [%r4], 1;\n@!%p3 bra $second;\n"           \
    "tcgen05.fence::after_thread_sync;\n"

static uint32_t sum_word(const uint32_t *in, uint32_t i) {
    (void)in;
    return word_of(7.0f + 2 * 32.0f * (float)(1 + i % 4));
}

static const kernel tensor_sums = {
    "sums in tensor memory",
    TENSOR_BEGIN "mov.u32 %r23, 0x40E00000;\ntcgen05.st.sync.aligned.32x32b.x16.b32 [%r21], "
                 "{" SEVENS ", " SEVENS
                 "};\n" STORED AFTER_BARRIER("1") "@%p2 bra $first;\n" TENSOR_PRODUCT("%p8")
                     DONE_FIRST TENSOR_LOAD("%r22")
                         LOADED AFTER_BARRIER("2") "@%p2 bra $second;\n" TENSOR_PRODUCT("%p9")
                             DONE_SECOND TENSOR_LOAD("%r24") LOADED
    "mov.b32 %f3, %r22;\nmov.b32 %f4, %r24;\nadd.f32 %f3, %f3, %f4;\n"
    "st.global.f32 [%rd5], %f3;\n" TENSOR_END,
    128,
    1,
    128,
    sum_word,
    "sm_100a"};

static void tensor_memory_is_ordered(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"a product before the stores are there", STORED, "", "race", "too early undefined",
         "%p8;\ntcgen05.commit", "tcgen05.st."},
        {"a product before other warps' stores", "bar.sync 1;\n", "", "race", "undefined",
         "%p8;\ntcgen05.commit", "tcgen05.st."},
        {"a load before the product is done", DONE_FIRST, "$first:\n", "race", "mbarrier",
         "%p8;\ntcgen05.commit", "{%r22}"},
        {"a product in place of what is being loaded", LOADED AFTER_BARRIER("2"),
         AFTER_BARRIER("2") LOADED, "race", NULL, "%p9;\ntcgen05.commit", "{%r22}"},
        {"a product in place of what others load", "bar.sync 2;\n", "", "race", NULL,
         "%p9;\ntcgen05.commit", "{%r22}"},
        {"a load before the second product is done", DONE_SECOND TENSOR_LOAD("%r24"),
         "$second:\n" TENSOR_LOAD("%r24") "$later:\nmbarrier.try_wait.parity.shared.b64 %p3, "
                                          "[%r4], 1;\n@!%p3 bra $later;\n",
         "race", NULL, "%p9;\ntcgen05.commit", "{%r24}"},
    };
    run_all(&tensor_sums, mistakes, COUNT(mistakes));
}

/* ---- clusters ------------------------------------------------------------------------------ */

/* Each block writes into the other's shared memory. */
static uint32_t exchanged(const uint32_t *in, uint32_t i) { return in[i % 32] + (i < 32 ? 1 : 0); }

static const kernel exchange = {
    "exchange",
    "mov.u32 %r6, %cluster_ctarank;\nxor.b32 %r7, %r6, 1;\nshl.b32 %r8, %r1, 2;\n"
    "add.u32 %r8, %r5, %r8;\nmapa.shared::cluster.u32 %r9, %r8, %r7;\n"
    "ld.global.u32 %r10, [%rd4];\nadd.u32 %r10, %r10, %r6;\n"
    "st.shared::cluster.u32 [%r9], %r10;\nbarrier.cluster.arrive.aligned;\n"
    "barrier.cluster.wait.aligned;\nld.shared.u32 %r11, [%r8];\nmul.wide.u32 %rd6, %r6, 128;\n"
    "add.s64 %rd7, %rd5, %rd6;\nst.global.u32 [%rd7], %r11;\n",
    32,
    2,
    64,
    exchanged,
    NULL};

static void clusters_are_ordered(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no barrier", "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n", "",
         "race", "undefined", "ld.shared", "st.shared"},
        {"a relaxed arrival", "barrier.cluster.arrive.aligned",
         "barrier.cluster.arrive.relaxed.aligned", "race", NULL, "ld.shared", "st.shared"},
        {"a barrier of the block",
         "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n", "bar.sync 0;\n",
         "race", "undefined", "ld.shared", "st.shared"},
    };
    run_all(&exchange, mistakes, COUNT(mistakes));
}

/* Block 1 tells block 0's mbarrier that it has written there. */
static uint32_t told(const uint32_t *in, uint32_t i) { return in[i]; }

static const kernel telling = {
    "telling",
    "mov.u32 %r6, %cluster_ctarank;\nmov.u32 %r7, 0;\nsetp.ne.u32 %p1, %r6, 0;\n"
    "setp.ne.or.u32 %p2, %r1, 0, %p1;\n@%p2 bra $ready;\nmbarrier.init.shared.b64 [%r4], 32;\n"
    "fence.mbarrier_init.release.cluster;\n"
    "$ready:\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n"
    "shl.b32 %r8, %r1, 2;\nadd.u32 %r8, %r5, %r8;\n@!%p1 bra $wait;\n"
    "mapa.shared::cluster.u32 %r9, %r8, %r7;\nmapa.shared::cluster.u32 %r11, %r4, %r7;\n"
    "ld.global.u32 %r10, [%rd4];\nst.shared::cluster.u32 [%r9], %r10;\n"
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];\nbra $end;\n"
    "$wait:\nmbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [%r4], 0;\n@!%p3 bra $wait;\n"
    "ld.shared.u32 %r12, [%r8];\nst.global.u32 [%rd5], %r12;\n"
    "$end:\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n",
    32,
    2,
    32,
    told,
    NULL};

/* Each block reads the words of the other where they are. */
static const kernel reader = {
    "reader",
    "mov.u32 %r6, %cluster_ctarank;\nxor.b32 %r7, %r6, 1;\nshl.b32 %r8, %r1, 2;\n"
    "add.u32 %r8, %r5, %r8;\nmapa.shared::cluster.u32 %r9, %r8, %r7;\nmul.wide.u32 %rd6, %r6, "
    "256;\n"
    "add.s64 %rd7, %rd4, %rd6;\nld.global.u32 %r10, [%rd7];\nst.shared.u32 [%r8], %r10;\n"
    "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    "setp.eq.u32 %p1, %r6, 0;\n@%p1 bra $end;\n" /* the second block only */
    "ld.shared::cluster.u32 %r11, [%r9];\nst.global.u32 [%rd5], %r11;\n"
    "$end:\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n",
    64,
    2,
    64,
    copied,
    NULL};

static void blocks_outlive_their_readers(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no barrier at the end",
         "$end:\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n",
         "$end:\n", "race", NULL, "ld.shared::cluster", NULL},
        {"a barrier of the block at the end",
         "$end:\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n",
         "$end:\nbar.sync 0;\n", "race", NULL, "ld.shared::cluster", NULL},
    };
    run_all(&reader, mistakes, COUNT(mistakes));
}

static void mbarriers_reach_the_cluster(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no fence after mbarrier.init", "fence.mbarrier_init.release.cluster;\n", "", "race", NULL,
         "mbarrier.arrive", "mbarrier.init"},
        {"told before it is written",
         "st.shared::cluster.u32 [%r9], %r10;\n"
         "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];\n",
         "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];\n"
         "st.shared::cluster.u32 [%r9], %r10;\n",
         "race", "undefined", "ld.shared", "st.shared"},
    };
    run_all(&telling, mistakes, COUNT(mistakes));
}

/* The same by stores that the barrier hears of. */
static const kernel remote = {
    "remote",
    "mov.u32 %r6, %cluster_ctarank;\nmov.u32 %r7, 0;\nsetp.ne.u32 %p1, %r6, 0;\n"
    "setp.ne.or.u32 %p2, %r1, 0, %p1;\n@%p2 bra $ready;\n" INIT_FULL
    "fence.mbarrier_init.release.cluster;\nmbarrier.arrive.expect_tx.shared.b64 _, [%r4], 128;\n"
    "$ready:\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    "shl.b32 %r8, %r1, 2;\nadd.u32 %r8, %r5, %r8;\n@!%p1 bra $wait;\n"
    "mapa.shared::cluster.u32 %r9, %r8, %r7;\nmapa.shared::cluster.u32 %r11, %r4, %r7;\n"
    "ld.global.u32 %r10, [%rd4];\n"
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r9], %r10, [%r11];\n"
    "bra $end;\n"
    "$wait:\nmbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [%r4], 0;\n@!%p3 bra $wait;\n"
    "ld.shared.u32 %r12, [%r8];\nst.global.u32 [%rd5], %r12;\n"
    "$end:\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n",
    32,
    2,
    32,
    told,
    NULL};

static void remote_stores_are_waited_for(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"nobody waits",
         "mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [%r4], 0;\n@!%p3 bra $wait;\n",
         "", "race", "undefined", "ld.shared", "st.async"},
        {"waits for the phase before", "%p3, [%r4], 0", "%p3, [%r4], 1", "race", "undefined",
         "ld.shared", "st.async"},
    };
    run_all(&remote, mistakes, COUNT(mistakes));
}

/* A phase that is waited for ends, and no other before it is seen to. */
static uint32_t waited_for(const uint32_t *in, uint32_t i) { return in[i + 32]; }
static const kernel turn = {
    "turn",
    "setp.ne.u32 %p1, %r2, 0;\nsetp.ne.u32 %p2, %r1, 0;\n@%p2 bra $ready;\n"
    "mbarrier.init.shared.b64 [%r4], 32;\n$ready:\nbar.sync 0;\nshl.b32 %r6, %r3, 2;\n"
    "add.u32 %r8, %r5, %r6;\n@!%p1 bra $wait;\nld.global.u32 %r9, [%rd4];\n"
    "st.shared.u32 [%r8], %r9;\nmbarrier.arrive.shared.b64 _, [%r4];\nbra $end;\n"
    "$wait:\nmbarrier.try_wait.parity.shared.b64 %p3, [%r4], 0;\n@!%p3 bra $wait;\n"
    "ld.shared.u32 %r9, [%r8];\nst.global.u32 [%rd5], %r9;\n$end:\n",
    64,
    1,
    32,
    waited_for,
    NULL};

static void phases_are_not_missed(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"two phases", "mbarrier.arrive.shared.b64 _, [%r4];\n",
         "mbarrier.arrive.shared.b64 _, [%r4];\nmbarrier.arrive.shared.b64 _, [%r4];\n",
         "mbarrier deadlock", NULL, "mbarrier.try_wait", NULL},
        {"a phase that never ends", "mbarrier.init.shared.b64 [%r4], 32",
         "mbarrier.init.shared.b64 [%r4], 33", "deadlock", NULL, "mbarrier.try_wait", NULL},
        {"nothing is left of it", "ld.shared.u32 %r9",
         "@!%p2 mbarrier.inval.shared.b64 [%r4];\nmbarrier.arrive.shared.b64 _, [%r4+0];\n"
         "ld.shared.u32 %r9",
         "mbarrier", NULL, "[%r4+0]", NULL},
    };
    run_all(&turn, mistakes, COUNT(mistakes));
}

/* ---- without the checker -------------------------------------------------------------------- */

static void it_can_be_left_out(void **state) {
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    dw_emulator_launch_options launch = DW_EMULATOR_LAUNCH_DEFAULT;
    static const mistake racing = {"no barrier", "bar.sync 0;\n", "", "", NULL, "", NULL};
    dw_emulator *emulator;
    dw_emulator_module *module;
    void *memory;
    (void)state;
    char *text = with_mistake(&parts, &racing);
    options.check = false;
    assert_int_equal(dw_emulator_create("sm_90a", &options, &emulator), DW_OK);
    assert_int_equal(dw_emulator_load(emulator, text, strlen(text), "test.ptx", &module), DW_OK);
    assert_int_equal(dw_emulator_allocate(emulator, 4 * WORDS, &memory), DW_OK);
    launch.block[0] = 64;
    launch.shared_bytes = 8192;
    assert_int_equal(dw_emulator_launch(module, "f", &launch, (void *[]){&memory, &memory}, NULL),
                     DW_OK);
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    dw_emulator_destroy(emulator);
    free(text);
}

/* ---- cp.async and atomic operations ---------------------------------------------------------- */

static uint32_t fetched(const uint32_t *in, uint32_t i) { return in[i ^ 32]; }
static const kernel fetching = {
    "fetching",
    "shl.b32 %r7, %r1, 2;\nadd.u32 %r8, %r5, %r7;\nxor.b32 %r9, %r7, 128;\n"
    "add.u32 %r9, %r5, %r9;\ncp.async.ca.shared.global [%r8], [%rd4], 4;\n"
    "cp.async.commit_group;\ncp.async.wait_group 0;\nbar.sync 0;\nld.shared.u32 %r10, [%r9];\n"
    "st.global.u32 [%rd5], %r10;\n",
    64,
    1,
    64,
    fetched,
    NULL};

static void small_copies_are_waited_for(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no wait", "cp.async.wait_group 0;\n", "", "race", "undefined", "ld.shared",
         "cp.async.ca"},
        {"waits for all but one", "wait_group 0", "wait_group 1", "race", "undefined", "ld.shared",
         "cp.async.ca"},
        {"no barrier", "bar.sync 0;\n", "", "race", "undefined", "ld.shared", "cp.async.ca"},
    };
    run_all(&fetching, mistakes, COUNT(mistakes));
}

static uint32_t summed(const uint32_t *in, uint32_t i) {
    uint32_t sum = 0;
    (void)i;
    for (int k = 0; k < 64; k++) sum += in[k];
    return sum;
}
static const kernel summing = {
    "summing",
    "setp.ne.u32 %p1, %r1, 0;\nmov.u32 %r6, 0;\n@!%p1 st.shared.u32 [%r5], %r6;\nbar.sync 0;\n"
    "ld.global.u32 %r7, [%rd4];\natom.shared.add.u32 %r8, [%r5], %r7;\nbar.sync 1;\n"
    "ld.shared.u32 %r9, [%r5];\nst.global.u32 [%rd5], %r9;\n",
    64,
    1,
    64,
    summed,
    NULL};

static void atomic_operations_are_no_races(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"not atomic", "atom.shared.add.u32 %r8, [%r5], %r7;\n",
         "ld.shared.u32 %r8, [%r5];\nadd.u32 %r8, %r8, %r7;\nst.shared.u32 [%r5], %r8;\n", "race",
         NULL, "ld.shared.u32 %r8", "st.shared.u32 [%r5], %r8"},
        {"no barrier after zero", "bar.sync 0;\n", "", "race", "undefined", "atom.shared",
         "st.shared"},
        {"no barrier before the sum is read", "bar.sync 1;\n", "", "race", NULL, "ld.shared",
         "atom.shared"},
    };
    run_all(&summing, mistakes, COUNT(mistakes));
}

/* ---- writes of the same --------------------------------------------------------------------- */

/* Three warps clear the same words, each for itself, and read what others of the warp have cleared. */
static uint32_t unchanged(const uint32_t *in, uint32_t i) { return in[i]; }
static const kernel clearing = {
    "clearing",
    "ld.global.u32 %r10, [%rd4];\nshl.b32 %r6, %r3, 2;\nadd.u32 %r8, %r5, %r6;\n"
    "xor.b32 %r7, %r6, 28;\nadd.u32 %r9, %r5, %r7;\nmov.u32 %r12, 0;\n"
    "setp.eq.u32 %p1, %r2, 1;\nst.shared.u32 [%r8], %r12;\nbar.warp.sync -1;\n"
    "ld.shared.u32 %r11, [%r9];\nadd.u32 %r10, %r10, %r11;\nst.global.u32 [%rd5], %r10;\n",
    96,
    1,
    96,
    unchanged,
    NULL};

static void the_same_may_be_written_twice(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"not the same", "mov.u32 %r12, 0;", "mov.u32 %r12, %r2;", "race", NULL, "st.shared", NULL},
        {"one of them alone", "st.shared.u32 [%r8]", "@%p1 st.shared.u32 [%r8]", "race",
         "undefined", "ld.shared", "@%p1 st.shared"},
    };
    run_all(&clearing, mistakes, COUNT(mistakes));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_may_be_written_twice),
        cmocka_unit_test(a_copy_is_waited_for),
        cmocka_unit_test(copies_are_waited_for),
        cmocka_unit_test(stores_through_the_other_proxy_are_fenced),
        cmocka_unit_test(barriers_order),
        cmocka_unit_test(parts_of_words_differ),
        cmocka_unit_test(products_are_waited_for),
        cmocka_unit_test(sums_read_early_are_right),
        cmocka_unit_test(tensor_products_are_waited_for),
        cmocka_unit_test(tensor_memory_is_waited_for),
        cmocka_unit_test(tensor_memory_is_ordered),
        cmocka_unit_test(clusters_are_ordered),
        cmocka_unit_test(blocks_outlive_their_readers),
        cmocka_unit_test(mbarriers_reach_the_cluster),
        cmocka_unit_test(remote_stores_are_waited_for),
        cmocka_unit_test(phases_are_not_missed),
        cmocka_unit_test(it_can_be_left_out),
        cmocka_unit_test(small_copies_are_waited_for),
        cmocka_unit_test(atomic_operations_are_no_races),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
