/* Programs on the emulator: calls in PTX, and the functions of libcudart and libcuda that nvcc's host code uses, with a
 * hand-made fat binary. */
#include "deepwell/emulator.h"
#include "ptx_file.h"
#include <dlfcn.h>

#define HEAD(target) ".version 8.7\n.target " target "\n.address_size 64\n"

/* ---- calls --------------------------------------------------------------------------------- */

static char printed[4096];
static void print(void *context, const char *text, size_t bytes) {
    (void)context;
    size_t used = strlen(printed);
    assert_true(used + bytes < sizeof printed);
    memcpy(printed + used, text, bytes);
    printed[used + bytes] = '\0';
}

static dw_emulator *open_emulator(void) {
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    dw_emulator *emulator;
    options.print = print;
    printed[0] = '\0';
    assert_int_equal(dw_emulator_create("sm_90a", &options, &emulator), DW_OK);
    return emulator;
}

/* Runs kernel f of the module in one block. Its parameter is memory with one word per thread. */
static dw_status run(dw_emulator *emulator, const char *ptx, uint32_t threads, uint32_t *out) {
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    dw_emulator_module *module;
    void *memory;
    if (dw_emulator_load(emulator, ptx, strlen(ptx), "test.ptx", &module) != DW_OK)
        fail_msg("%s", dw_last_error());
    assert_int_equal(dw_emulator_allocate(emulator, 4 * threads, &memory), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, memory, 0xEE, 4 * threads), DW_OK);
    options.block[0] = threads;
    dw_status status = dw_emulator_launch(module, "f", &options, (void *[]){&memory}, NULL);
    assert_int_equal(dw_emulator_copy_out(emulator, out, memory, 4 * threads), DW_OK);
    assert_int_equal(dw_emulator_release(emulator, memory), DW_OK);
    return status;
}

static dw_status run_file(dw_emulator *emulator, const char *file, uint32_t threads,
                          uint32_t *out) {
    char *ptx = read_ptx(file);
    const dw_status status = run(emulator, ptx, threads, out);
    free(ptx);
    return status;
}

#define KERNEL                                                                                     \
    ".visible .entry f(.param .u64 out)\n{ .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>;" \
    "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4;\n"                  \
    "add.s64 %rd1, %rd1, %rd2;\n"

/* square(x) in one branch, and twice within cube(x) in the other: odd lanes get x^3 + x, even lanes x^2. */
static void functions_are_called(void **state) {
    uint32_t out[64];
    (void)state;
    dw_emulator *emulator = open_emulator();
    if (run_file(emulator, "call_functions.ptx", 64, out) != DW_OK) fail_msg("%s", dw_last_error());
    for (uint32_t i = 0; i < 64; i++) assert_int_equal(out[i], i % 2 ? i * i * i + i : i * i);
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    dw_emulator_destroy(emulator);
}

/* A table of functions, as of a class with virtual functions. Kernels that call none of them run. */
static void functions_have_addresses(void **state) {
    uint32_t out[32];
    (void)state;
    dw_emulator *emulator = open_emulator();
    if (run_file(emulator, "function_table.ptx", 32, out) != DW_OK) fail_msg("%s", dw_last_error());
    for (uint32_t i = 0; i < 32; i++) assert_int_equal(out[i], 15);
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    static const char nothing[] = HEAD("sm_90") ".global .u64 table[1] = {nothing};\n";
    dw_emulator_module *module;
    assert_int_equal(
        dw_emulator_load(emulator, nothing, sizeof nothing - 1, "nothing.ptx", &module),
        DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "neither a variable nor"));
    dw_emulator_destroy(emulator);
}

static void unsupported_calls_are_rejected(void **state) {
    static const struct {
        const char *functions, *call, *message;
    } cases[] = {
        {".func g();\n.func h() { call.uni g; ret; }\n.func g() { call.uni h; ret; }\n",
         "call.uni g;", "recursion"},
        {".extern .func g();\n", "call.uni g;", "\"g\" is not defined in this module"},
        {"", "mov.u64 %rd3, 0; $p: .callprototype ()_ (); call %rd3, $p;", "through an address"},
        {"", "mov.u64 %rd3, 0; $p : .callprototype ()_ (); call %rd3, $p;", "through an address"},
        {".func g() { ret; }\n.global .align 8 .u64 table[1] = {g};\n",
         "mov.u64 %rd3, table; ld.global.u64 %rd3, [%rd3]; $p: .callprototype ()_ (); call %rd3, "
         "$p;",
         "through an address"},
        {".func g(.param .b32 x) { .reg .b64 %q; mov.b64 %q, x; ret; }\n",
         "{ .param .b32 a; st.param.b32 [a], 1; call g, (a); }", "address of a parameter"},
    };
    (void)state;
    dw_emulator *emulator = open_emulator();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char ptx[2000];
        uint32_t out[32];
        snprintf(ptx, sizeof ptx, "%s%s%s%s\nret; }\n", HEAD("sm_90"), cases[i].functions, KERNEL,
                 cases[i].call);
        assert_int_equal(run(emulator, ptx, 32, out), DW_UNSUPPORTED);
        if (!strstr(dw_last_error(), cases[i].message)) fail_msg("%s", dw_last_error());
    }
    dw_emulator_destroy(emulator);
}

static void kernels_print(void **state) {
    uint32_t out[32];
    (void)state;
    dw_emulator *emulator = open_emulator();
    if (run_file(emulator, "print_values.ptx", 32, out) != DW_OK) fail_msg("%s", dw_last_error());
    assert_string_equal(printed, "  -42|7   |hi|z|0003.142|123456789abcdef|-1|%\n");
    assert_int_equal(out[1], 7);
    dw_emulator_destroy(emulator);
}

static void assertions_are_findings(void **state) {
    uint32_t out[32];
    dw_finding finding;
    (void)state;
    dw_emulator *emulator = open_emulator();
    assert_int_equal(run_file(emulator, "assert_in_kernel.ptx", 32, out), DW_INTERNAL);
    assert_int_equal(dw_emulator_finding(emulator, 0, &finding), DW_OK);
    assert_string_equal(finding.kind, "assertion");
    assert_int_equal(finding.lane, 9);
    assert_string_equal(finding.what, "a.cu:77: g: assertion \"x>0\" failed");
    dw_emulator_destroy(emulator);
}

/* A kernel allocates and frees memory; a use after the free is a finding. */
static void kernels_allocate(void **state) {
    char *ptx;
    uint32_t out[32];
    dw_finding finding;
    (void)state;
    dw_emulator *emulator = open_emulator();
    if (run_file(emulator, "allocate_in_kernel.ptx", 32, out) != DW_OK)
        fail_msg("%s", dw_last_error());
    for (uint32_t i = 0; i < 32; i++) assert_int_equal(out[i], i);
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    ptx = read_ptx("allocate_in_kernel.ptx");
    ptx = replace_in_ptx(ptx, "st.global.u32 [%rd1], %r2;", "st.u32 [%rd3], %r2;");
    assert_int_equal(run(emulator, ptx, 32, out), DW_INTERNAL);
    free(ptx);
    assert_int_equal(dw_emulator_finding(emulator, 0, &finding), DW_OK);
    assert_string_equal(finding.kind, "out of bounds");
    dw_emulator_destroy(emulator);
}

/* ---- the runtime --------------------------------------------------------------------------- */

typedef struct extent {
    unsigned x, y, z;
} extent;

/* Makes a container with one PTX image for each target. `flags` are those of the entries. */
static size_t add_image(unsigned char *at, int kind, uint64_t flags, const char *text) {
    const size_t bytes = (strlen(text) + 8) / 8 * 8;
    const uint16_t numbers[2] = {(uint16_t)kind, 0x101};
    const uint32_t head_bytes = 64;
    memset(at, 0, head_bytes + bytes);
    memcpy(at, numbers, sizeof numbers);
    memcpy(at + 4, &head_bytes, sizeof head_bytes);
    memcpy(at + 8, &(uint64_t){bytes}, 8);
    memcpy(at + 40, &flags, sizeof flags);
    memcpy(at + head_bytes, text, strlen(text));
    return head_bytes + bytes;
}
static void close_container(unsigned char *container, size_t bytes) {
    memcpy(container, &(uint32_t){0xBA55ED50u}, 4);
    memcpy(container + 4, &(uint16_t){1}, 2);
    memcpy(container + 6, &(uint16_t){16}, 2);
    memcpy(container + 8, &(uint64_t){bytes}, 8);
}
typedef struct wrapper {
    uint32_t mark, version;
    const void *data;
    void *more;
} wrapper;

/* Names of templates run to thousands of characters. */
#define TEN(X) X X X X X X X X X X
#define LONG_NAME "g" TEN(TEN(TEN("abc")))
/* A module for `target`. Its kernel LONG_NAME stores the sum of 1000, `number` and the thread's index. */
static size_t add_kernel(unsigned char *at, const char *target, const char *number) {
    char addition[64];
    snprintf(addition, sizeof addition, "add.u32 %%r3, %%r3, %s;", number);
    char *ptx = replace_in_ptx(read_ptx("add_offset.ptx"), "sm_90", target);
    ptx = replace_in_ptx(replace_in_ptx(ptx, "long_name", LONG_NAME), "add.u32 %r3, %r3, 0;",
                         addition);
    const size_t bytes = add_image(at, 1, 0x11, ptx);
    free(ptx);
    return bytes;
}

static void *library;
static void *entry(const char *name) {
    void *found = dlvsym(library, name, "libcudart.so.13");
    if (!found) fail_msg("%s: %s", name, dlerror());
    return found;
}
#define ENTRY(name, result, ...) result (*name)(__VA_ARGS__) = entry(#name)

static int open_runtime(void **state) {
    (void)state;
    setenv("DEEPWELL_EMULATE_ARCH", "sm_100a", 1);
    library = dlopen(EMULATED_RUNTIME, RTLD_NOW | RTLD_LOCAL);
    if (!library) print_message("%s\n", dlerror());
    return library ? 0 : -1;
}

static char a_function, a_variable, another; /* their addresses represent the host's functions */

static void program_runs(void **state) {
    static unsigned char container[1 << 15];
    enum { N = 50 };
    uint32_t out[N + 2], n = N, offset = 3000, got = 0;
    size_t at = 16;
    (void)state;
    at += add_kernel(container + at, "sm_90", "1");
    at += add_kernel(container + at, "sm_90a", "2");
    at += add_image(container + at, 2, 0x11, "\177ELF is no PTX");
    at += add_kernel(container + at, "sm_100f", "3");
    at += add_kernel(container + at, "sm_80", "4");
    close_container(container, at - 16);
    wrapper image = {0x466243B1, 1, container, NULL};

    ENTRY(__cudaRegisterFatBinary, void **, void *);
    ENTRY(__cudaRegisterFatBinaryEnd, void, void **);
    ENTRY(__cudaUnregisterFatBinary, void, void **);
    ENTRY(__cudaRegisterFunction, void, void **, const void *, char *, const char *, int, void *,
          void *, void *, void *, int *);
    ENTRY(__cudaRegisterVar, void, void **, void *, char *, const char *, int, size_t, int, int);
    ENTRY(__cudaPushCallConfiguration, unsigned, extent, extent, size_t, void *);
    ENTRY(__cudaPopCallConfiguration, int, extent *, extent *, size_t *, void *);
    ENTRY(cudaLaunchKernel, int, const void *, extent, extent, void **, size_t, void *);
    ENTRY(cudaMalloc, int, void **, size_t);
    ENTRY(cudaFree, int, void *);
    ENTRY(cudaMemcpy, int, void *, const void *, size_t, int);
    ENTRY(cudaMemset, int, void *, int, size_t);
    ENTRY(cudaMemcpyToSymbol, int, const void *, const void *, size_t, size_t, int);
    ENTRY(cudaMemcpyFromSymbol, int, void *, const void *, size_t, size_t, int);
    ENTRY(cudaGetLastError, int, void);
    ENTRY(cudaPeekAtLastError, int, void);
    ENTRY(cudaGetErrorName, const char *, int);
    ENTRY(cudaDeviceGetAttribute, int, int *, int, int);
    ENTRY(cudaGetDriverEntryPointByVersion, int, const char *, void **, unsigned,
          unsigned long long, int *);
    ENTRY(cudaGraphCreate, int, void **, unsigned);

    void **binary = __cudaRegisterFatBinary(&image), *memory = NULL, *stream = &stream;
    __cudaRegisterFunction(binary, &a_function, LONG_NAME, LONG_NAME, -1, NULL, NULL, NULL, NULL,
                           NULL);
    __cudaRegisterVar(binary, &a_variable, "offset", "offset", 0, 4, 0, 0);
    __cudaRegisterFatBinaryEnd(binary);
    assert_int_equal(cudaMalloc(&memory, sizeof out), 0);
    assert_int_equal(cudaMemset(memory, 0, sizeof out), 0);
    assert_int_equal(cudaMemcpyFromSymbol(&got, &a_variable, 4, 0, 2), 0);
    assert_int_equal(got, 1000);
    assert_int_equal(cudaMemcpyToSymbol(&a_variable, &offset, 4, 0, 1), 0);
    assert_int_equal(cudaMemcpyToSymbol(&a_variable, &offset, 4, 1, 1), 1);
    assert_int_equal(cudaMemcpyToSymbol(&another, &offset, 4, 0, 1), 13);
    assert_int_equal(cudaGetLastError(), 13);

    extent grid = {0}, block = {0};
    size_t shared_bytes = 0;
    assert_int_equal(__cudaPopCallConfiguration(&grid, &block, &shared_bytes, &stream), 52);
    assert_int_equal(__cudaPushCallConfiguration((extent){1, 1, 1}, (extent){64, 1, 1}, 128, NULL),
                     0);
    assert_int_equal(__cudaPopCallConfiguration(&grid, &block, &shared_bytes, &stream), 0);
    assert_int_equal(block.x, 64);
    assert_int_equal(shared_bytes, 128);
    assert_null(stream);
    void *arguments[] = {&memory, &n};
    assert_int_equal(cudaLaunchKernel(&a_function, grid, block, arguments, shared_bytes, stream),
                     0);
    assert_int_equal(cudaMemcpy(out, memory, sizeof out, 4), 0);
    /* Selects the PTX of the family, not of an earlier architecture. */
    for (uint32_t i = 0; i < N + 2; i++) assert_int_equal(out[i], i < N ? 3003 + i : 0);

    (void)cudaGetLastError();
    block.x = 1025;
    assert_int_equal(cudaLaunchKernel(&a_function, grid, block, arguments, 0, NULL), 9);
    assert_int_equal(cudaPeekAtLastError(), 9);
    assert_int_equal(cudaGetLastError(), 9);
    assert_int_equal(cudaGetLastError(), 0);
    assert_int_equal(cudaLaunchKernel(&another, grid, block, arguments, 0, NULL), 98);
    assert_string_equal(cudaGetErrorName(98), "cudaErrorInvalidDeviceFunction");
    void *graph;
    assert_int_equal(cudaGraphCreate(&graph, 0), 801);

    int value = 0, status = 0;
    void *function = NULL;
    assert_int_equal(cudaDeviceGetAttribute(&value, 75, 0), 0);
    assert_int_equal(value, 10);
    assert_int_equal(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, 0, &status),
        0);
    assert_non_null(function);
    assert_int_equal(status, 0);
    assert_int_equal(cudaGetDriverEntryPointByVersion("cuNothing", &function, 12000, 0, &status),
                     0);
    assert_int_equal(status, 1);
    assert_null(function);
    /* NVRTC calls these functions of a driver without checking that they exist. */
    assert_int_equal(
        cudaGetDriverEntryPointByVersion("cuGetExportTable", &function, 12000, 0, &status), 0);
    int (*export_table)(const void **, const void *);
    const void *table = &function;
    *(void **)&export_table = function;
    assert_int_equal(export_table(&table, "sixteen bytes..."), 500); /* CUDA_ERROR_NOT_FOUND */
    assert_null(table);
    assert_int_equal(cudaFree(memory), 0);
    __cudaUnregisterFatBinary(binary);
}

/* Blocks are grouped as the kernel prefers or as the launch requests, in one launch of each kind. */
static void preferred_cluster_sizes_are_used(void **state) {
    static unsigned char container[1 << 13];
    typedef struct attribute {
        int id, pad;
        unsigned value[16];
    } attribute;
    struct {
        extent grid, block;
        size_t shared_bytes;
        void *stream;
        attribute *attributes;
        unsigned count;
    } config = {{8, 1, 1}, {1, 1, 1}, 0, NULL, NULL, 2};
    attribute attributes[2] = {{.id = 4, .value = {2, 1, 1}}, {.id = 11, .value = {4, 1, 1}}};
    void *memory = NULL;
    uint32_t out[8], seen = 0;
    (void)state;
    ENTRY(__cudaRegisterFatBinary, void **, void *);
    ENTRY(__cudaUnregisterFatBinary, void, void **);
    ENTRY(__cudaRegisterFunction, void, void **, const void *, char *, const char *, int, void *,
          void *, void *, void *, int *);
    ENTRY(cudaLaunchKernelExC, int, const void *, const void *, void **);
    ENTRY(cudaMalloc, int, void **, size_t);
    ENTRY(cudaFree, int, void *);
    ENTRY(cudaMemcpy, int, void *, const void *, size_t, int);
    char *ptx = read_ptx("cluster_size.ptx");
    const size_t bytes = add_image(container + 16, 1, 0x11, ptx);
    free(ptx);
    close_container(container, bytes);
    wrapper image = {0x466243B1, 1, container, NULL};
    void **binary = __cudaRegisterFatBinary(&image);
    __cudaRegisterFunction(binary, &a_function, "g", "g", -1, NULL, NULL, NULL, NULL, NULL);
    assert_int_equal(cudaMalloc(&memory, sizeof out), 0);
    config.attributes = attributes;
    for (int launch = 0; launch < 2; launch++) {
        assert_int_equal(cudaLaunchKernelExC(&config, &a_function, (void *[]){&memory}), 0);
        assert_int_equal(cudaMemcpy(out, memory, sizeof out, 2), 0);
        for (int i = 0; i < 8; i++) assert_int_equal(out[i], out[0]);
        seen |= out[0];
    }
    assert_int_equal(seen, 2 | 4);
    static const unsigned wrong[][3] = {{3, 1, 1}, {6, 1, 1}, {2, 1, 2}, {0, 1, 1}, {32, 1, 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        memcpy(attributes[1].value, wrong[i], sizeof wrong[i]);
        assert_int_equal(cudaLaunchKernelExC(&config, &a_function, (void *[]){&memory}), 9);
    }
    assert_int_equal(cudaFree(memory), 0);
    __cudaUnregisterFatBinary(binary);
}

/* A module without suitable PTX gives one error, at the first use. */
static void programs_without_ptx(void **state) {
    static const struct {
        int kind;
        uint64_t flags;
        const char *text; /* sm_...: the target of the kernel */
        size_t cut;       /* number of bytes by which the container overstates its size */
        int result;
    } cases[] = {
        {2, 0x11, "\177ELF", 0, 209},    {1, 0x8011, "packed", 0, 209},
        {1, 0x11, "sm_90a", 0, 209},     {1, 0x11, HEAD("sm_100a") "no PTX at all", 0, 218},
        {1, 0x11, "sm_100a", 1000, 200},
    };
    (void)state;
    ENTRY(__cudaRegisterFatBinary, void **, void *);
    ENTRY(__cudaUnregisterFatBinary, void, void **);
    ENTRY(__cudaRegisterFunction, void, void **, const void *, char *, const char *, int, void *,
          void *, void *, void *, int *);
    ENTRY(cudaLaunchKernel, int, const void *, extent, extent, void **, size_t, void *);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static unsigned char container[1 << 13];
        void *memory = NULL;
        uint32_t n = 0;
        size_t bytes =
            strncmp(cases[i].text, "sm_", 3) == 0
                ? add_kernel(container + 16, cases[i].text, "1")
                : add_image(container + 16, cases[i].kind, cases[i].flags, cases[i].text);
        close_container(container, bytes + cases[i].cut);
        if (cases[i].cut) memset(container + 16 + bytes, 0xFF, cases[i].cut);
        wrapper image = {0x466243B1, 1, container, NULL};
        void **binary = __cudaRegisterFatBinary(&image);
        __cudaRegisterFunction(binary, &a_function, LONG_NAME, LONG_NAME, -1, NULL, NULL, NULL,
                               NULL, NULL);
        for (int again = 0; again < 2; again++)
            assert_int_equal(cudaLaunchKernel(&a_function, (extent){1, 1, 1}, (extent){1, 1, 1},
                                              (void *[]){&memory, &n}, 0, NULL),
                             cases[i].result);
        __cudaUnregisterFatBinary(binary);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(functions_are_called),
        cmocka_unit_test(functions_have_addresses),
        cmocka_unit_test(unsupported_calls_are_rejected),
        cmocka_unit_test(kernels_print),
        cmocka_unit_test(assertions_are_findings),
        cmocka_unit_test(kernels_allocate),
        cmocka_unit_test(program_runs),
        cmocka_unit_test(preferred_cluster_sizes_are_used),
        cmocka_unit_test(programs_without_ptx),
    };
    return cmocka_run_group_tests(tests, open_runtime, NULL);
}
