/* The checker of shared memory: small correct kernels in many orders of execution, and the same kernels with one
 * planted mistake each, which the checker must find and name in every order. */
#include "deepwell/emulator.h"
#include "ptx_file.h"

#define SEEDS 50       /* orders of execution of a correct kernel */
#define FEWER_SEEDS 10 /* orders of execution of a kernel with a mistake */
#define WORDS 1024     /* bytes of input, and of output */

/* The kernel f(in, out) of a file in tests/ptx; `words` of its output are compared. Every instruction is on a separate
 * line. */
typedef struct kernel {
    const char *file;
    uint32_t threads, cluster, words;
    uint32_t (*expected)(const uint32_t *in, uint32_t index);
    const char *architecture; /* NULL: sm_90a */
} kernel;

/* A mistake: replaces `from` by `to`. Every finding must then be of `kind` (or one of two), or of `also`. A finding of
 * `kind` must name the lines that contain `line` and `other` (NULL: only the first). */
typedef struct mistake {
    const char *what, *from, *to, *kind, *also, *line, *other;
} mistake;

static const char *architecture_of(const kernel *k) {
    return k->architecture ? k->architecture : "sm_90a";
}

/* The kernel's text, without its indentation, so that a mistake may replace several lines. */
static char *with_mistake(const kernel *k, const mistake *m) {
    char *text = read_ptx(k->file), *to = text;
    bool line_begins = true;
    for (const char *from = text; *from != '\0'; from++) {
        if (line_begins && *from == ' ') continue;
        line_begins = *from == '\n';
        *to++ = *from;
    }
    *to = '\0';
    return m ? replace_in_ptx(text, m->from, m->to) : text;
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
            fail_msg("%s, %s, seed %llu: %s\n%s", k->file, m ? m->what : "right",
                     (unsigned long long)seed, one, text);
        named = named || (of_kind && names(&finding, text, m));
    }
    if (m && !named)
        fail_msg("%s, %s, seed %llu: not found:%s\n%s", k->file, m->what, (unsigned long long)seed,
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
        fail_msg("%s: %s", k->file, dw_last_error());
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
        if (status != DW_OK) fail_msg("%s: %s", k->file, dw_last_error());
        assert_int_equal(dw_emulator_copy_out(emulator, out, memory[1], sizeof out), DW_OK);
        for (uint32_t i = 0; i < k->words; i++)
            if (out[i] != k->expected(in, i))
                fail_msg("%s, seed %llu: word %u is 0x%08x, expected 0x%08x", k->file,
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

/* Warp 0 fetches six blocks of 512 bytes; warps 1 and 2 each add up half of each block. */
#define INIT_FULL "mbarrier.init.shared.b64 [%r4], 1;\n"
#define FREES "setp.eq.u32 %p5, "
#define NOT_FIRST "@%p1 bra $ready;\n"
#define INIT_EMPTY(n)                                                                              \
    "mbarrier.init.shared.b64 [%r4+16], " n ";\nmbarrier.init.shared.b64 [%r4+24], " n ";\n"
#define EXPECT "mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 512;\n"
#define FREE "@%p5 mbarrier.arrive.shared.b64 _, [%r9+16];\n"
#define ADD "add.u32 %r20, %r20, %r15;\nadd.u32 %r20, %r20, %r16;\n"
#define LOAD "ld.shared.v2.u32 {%r15, %r16}, [%r12];\n"

static uint32_t sum_of_blocks(const uint32_t *in, uint32_t thread) {
    uint32_t sum = 0;
    for (uint32_t block = 0; block < 6; block++)
        sum += in[block * 128 + 2 * thread] + in[block * 128 + 2 * thread + 1];
    return sum;
}

static const kernel pipeline = {"checker_pipeline.ptx", 96, 1, 64, sum_of_blocks, NULL};

static void missing_waits_for_staged_copies_are_found(void **state) {
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

/* One copy serves all warps. */
static uint32_t copied(const uint32_t *in, uint32_t i) { return in[i]; }
static const kernel fetch = {"checker_fetch.ptx", 128, 1, 128, copied, NULL};

static void missing_wait_for_a_copy_is_found(void **state) {
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

/* Four warps write 512 bytes, and one thread starts their copy to memory; twice. */
#define WRITE(i) "st.shared.u32 [%r8], %r1" #i ";\n"

static uint32_t stored(const uint32_t *in, uint32_t i) {
    const uint32_t x = in[i % 128 ^ 64];
    return i < 128 ? x : ~x;
}

static const kernel epilogue = {"checker_epilogue.ptx", 128, 1, 256, stored, NULL};

static void missing_proxy_fence_is_found(void **state) {
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

/* Warps 0 and 1 pass words to warps 2 and 3, three times. */
static uint32_t handed(const uint32_t *in, uint32_t i) { return 3 * in[i ^ 1] + 3; }

static const kernel handover = {"checker_handover.ptx", 128, 1, 64, handed, NULL};

static void named_barriers_order_accesses(void **state) {
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
static const kernel parts = {"checker_parts.ptx", 64, 1, 32, halves, NULL};

static void neighbouring_bytes_are_separate(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no barrier", "bar.sync 0;\n", "", "race", "undefined", "ld.shared", "st.shared"},
        {"the same half", "add.u32 %r6, %r6, %r7;\nadd.u32 %r8, %r5, %r6;\n",
         "add.u32 %r8, %r5, %r6;\nadd.u32 %r6, %r6, %r7;\n", "race", "undefined", "st.shared",
         "st.shared"},
    };
    run_all(&parts, mistakes, COUNT(mistakes));
}

/* ---- MMAs ---------------------------------------------------------------------------------- */

/* Multiplies A of 64 x 16, whose row i is 1 + i % 4, by B of 16 x 8 twos; then A again, doubled. */
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

static const kernel product = {"checker_product.ptx", 128, 1, 128, product_word, NULL};

static void missing_wait_for_wgmma_is_found(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no proxy fence", "fence.proxy.async;\nbar.sync 0;\n", "bar.sync 0;\n", "missing fence",
         NULL, "{%f3", "[%r8+2048]"},
        {"no barrier", "bar.sync 0;\n", "", "race", "undefined", "{%f3", "[%r8+2048]"},
        {"written while a product reads", WAIT, "", "race", NULL, "{%f3", "[%r8+0]"},
    };
    run_all(&product, mistakes, COUNT(mistakes));
}

/* Reading an accumulator before the wait is a finding, although the value is right. */
static void accumulators_read_early_have_the_right_value(void **state) {
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

/* The same for tcgen05: A of 128 x 16, B of 16 x 16. */
#define ROW(address)                                                                               \
    "st.shared.v4.u32 [" address "], {%r7, %r7, %r7, %r7};\n"                                      \
    "st.shared.v4.u32 [" address "+128], {%r7, %r7, %r7, %r7};\n"
#define DONE "$wait:\nmbarrier.try_wait.parity.shared.b64 %p3, [%r4], 0;\n@!%p3 bra $wait;\n"

static uint32_t tensor_word(const uint32_t *in, uint32_t i) {
    const float d = 32.0f * (float)(1 + i % 4);
    (void)in;
    return word_of(d);
}

#define AFTER_BARRIER(n)                                                                           \
    "tcgen05.fence::before_thread_sync;\nbar.sync " n ";\ntcgen05.fence::after_thread_sync;\n"
#define TENSOR_LOAD(to) "tcgen05.ld.sync.aligned.32x32b.x1.b32 {" to "}, [%r21];\n"
#define LOADED "tcgen05.wait::ld.sync.aligned;\n"

static const kernel tensor_product = {
    "checker_tensor_product.ptx", 128, 1, 128, tensor_word, "sm_100a"};

static void missing_wait_for_tcgen05_mma_is_found(void **state) {
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

/* Four warps store to tensor memory; four others load the values; then the first ones store again. */
static uint32_t same_word(const uint32_t *in, uint32_t i) { return in[i]; }

#define STORED "tcgen05.wait::st.sync.aligned;\n"

static const kernel tensor_memory = {
    "checker_tensor_memory.ptx", 256, 1, 128, same_word, "sm_100a"};

static void missing_wait_for_tensor_memory_is_found(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"a store is not waited for", "{%r8};\n" STORED, "{%r8};\n", "too early", NULL, "{%r10}",
         NULL},
        {"loaded without a barrier", "$load:\nbar.sync 1, 256;\n", "$load:\nbar.arrive 1, 256;\n",
         "race", "undefined, too early", "{%r8}", "{%r10}"},
        {"stored again without a barrier", "bar.sync 2, 256;\nadd", "bar.arrive 2, 256;\nadd",
         "race", "too early", "{%r10}", "{%r9}"},
        {"a load is not waited for", "tcgen05.wait::ld.sync.aligned;\n", "", "too early", NULL,
         "st.global.u32 [%rd5", NULL},
    };
    run_all(&tensor_memory, mistakes, COUNT(mistakes));
}

/* Accumulators in tensor memory: stores 7, accumulates an MMA, loads the result, and overwrites it with an MMA. */
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

static const kernel tensor_sums = {"checker_tensor_sums.ptx", 128, 1, 128, sum_word, "sm_100a"};

static void tensor_memory_accesses_must_be_ordered(void **state) {
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

static const kernel exchange = {"checker_exchange.ptx", 32, 2, 64, exchanged, NULL};

static void cluster_barriers_order_accesses(void **state) {
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

/* Block 1 signals block 0's mbarrier after writing there. */
static const kernel signal_after_write = {"checker_signal.ptx", 32, 2, 32, copied, NULL};

/* Each block reads the other block's words in place. */
static const kernel reader = {"checker_reader.ptx", 64, 2, 64, copied, NULL};

static void block_that_exits_before_its_readers_is_found(void **state) {
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

static void mbarriers_order_accesses_of_other_blocks(void **state) {
    (void)state;
    static const mistake mistakes[] = {
        {"no fence after mbarrier.init", "fence.mbarrier_init.release.cluster;\n", "", "race", NULL,
         "mbarrier.arrive", "mbarrier.init"},
        {"signalled before it is written",
         "st.shared::cluster.u32 [%r9], %r10;\n"
         "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];\n",
         "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];\n"
         "st.shared::cluster.u32 [%r9], %r10;\n",
         "race", "undefined", "ld.shared", "st.shared"},
    };
    run_all(&signal_after_write, mistakes, COUNT(mistakes));
}

/* The same with stores that complete on an mbarrier. */
static const kernel remote = {"checker_remote.ptx", 32, 2, 32, copied, NULL};

static void missing_wait_for_remote_stores_is_found(void **state) {
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

/* One warp waits for the end of the mbarrier's first phase. */
static uint32_t waited_for(const uint32_t *in, uint32_t i) { return in[i + 32]; }
static const kernel turn = {"checker_turn.ptx", 64, 1, 32, waited_for, NULL};

static void missed_mbarrier_phases_are_found(void **state) {
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

static void checker_can_be_disabled(void **state) {
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
static const kernel fetching = {"checker_fetching.ptx", 64, 1, 64, fetched, NULL};

static void missing_wait_for_cp_async_is_found(void **state) {
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
static const kernel summing = {"checker_summing.ptx", 64, 1, 64, summed, NULL};

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

/* ---- writes of the same value --------------------------------------------------------------- */

/* Three warps each clear the same words and read words that other lanes of their warp have cleared. */
static uint32_t unchanged(const uint32_t *in, uint32_t i) { return in[i]; }
static const kernel clearing = {"checker_clearing.ptx", 96, 1, 96, unchanged, NULL};

static void same_value_may_be_written_twice(void **state) {
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
        cmocka_unit_test(same_value_may_be_written_twice),
        cmocka_unit_test(missing_wait_for_a_copy_is_found),
        cmocka_unit_test(missing_waits_for_staged_copies_are_found),
        cmocka_unit_test(missing_proxy_fence_is_found),
        cmocka_unit_test(named_barriers_order_accesses),
        cmocka_unit_test(neighbouring_bytes_are_separate),
        cmocka_unit_test(missing_wait_for_wgmma_is_found),
        cmocka_unit_test(accumulators_read_early_have_the_right_value),
        cmocka_unit_test(missing_wait_for_tcgen05_mma_is_found),
        cmocka_unit_test(missing_wait_for_tensor_memory_is_found),
        cmocka_unit_test(tensor_memory_accesses_must_be_ordered),
        cmocka_unit_test(cluster_barriers_order_accesses),
        cmocka_unit_test(block_that_exits_before_its_readers_is_found),
        cmocka_unit_test(mbarriers_order_accesses_of_other_blocks),
        cmocka_unit_test(missing_wait_for_remote_stores_is_found),
        cmocka_unit_test(missed_mbarrier_phases_are_found),
        cmocka_unit_test(checker_can_be_disabled),
        cmocka_unit_test(missing_wait_for_cp_async_is_found),
        cmocka_unit_test(atomic_operations_are_no_races),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
