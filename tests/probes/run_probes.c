/* Runs the probes of a PTX file with the first libcuda.so.1 that the loader finds, and prints the words that they
 * write: on a GPU to make hopper_h200.txt, on the emulator to compare with it. Plain C, without a toolkit's headers.
 *
 *     cc -o run_probes run_probes.c -ldl && ./run_probes hopper.ptx [rounding]
 *
 * `rounding`: MMAs whose sums are not exact.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t address;
static struct {
    int (*init)(unsigned);
    int (*device)(int *, int);
    int (*name)(char *, int, int);
    int (*retain)(void **, int);
    int (*current)(void *);
    int (*load)(void **, const void *);
    int (*function)(void **, void *, const char *);
    int (*attribute)(void *, int, int);
    int (*allocate)(address *, size_t);
    int (*in)(address, const void *, size_t, void *);
    int (*out)(void *, address, size_t, void *);
    int (*fill)(address, unsigned char, size_t, void *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void *, void **, void **);
    int (*synchronize)(void);
    int (*map)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
               const uint32_t *, int, int, int, int);
} cu;

static void *found(void *library, const char *name) {
    void *function = dlsym(library, name);
    if (!function) fprintf(stderr, "run_probes: the driver has no %s\n", name), exit(2);
    return function;
}
#define FIND(member, name) *(void **)&cu.member = found(library, name)
static void open_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) fprintf(stderr, "run_probes: %s\n", dlerror()), exit(2);
    FIND(init, "cuInit");
    FIND(device, "cuDeviceGet");
    FIND(name, "cuDeviceGetName");
    FIND(retain, "cuDevicePrimaryCtxRetain");
    FIND(current, "cuCtxSetCurrent");
    FIND(load, "cuModuleLoadData");
    FIND(function, "cuModuleGetFunction");
    FIND(attribute, "cuFuncSetAttribute");
    FIND(allocate, "cuMemAlloc_v2");
    FIND(in, "cuMemcpyHtoDAsync_v2");
    FIND(out, "cuMemcpyDtoHAsync_v2");
    FIND(fill, "cuMemsetD8Async");
    FIND(launch, "cuLaunchKernel");
    FIND(synchronize, "cuCtxSynchronize");
    FIND(map, "cuTensorMapEncodeTiled");
}

static void check(int result, const char *what) {
    if (result) fprintf(stderr, "run_probes: %s: result %d\n", what, result), exit(2);
}

static void *module;
#define OUT_WORDS 65536
static address out_memory, in_memory;
static uint32_t words[OUT_WORDS];

static void run(const char *name, unsigned blocks, unsigned threads, unsigned shared,
                void **arguments, size_t count) {
    void *function;
    check(cu.fill(out_memory, 0, sizeof words, NULL), "memory");
    check(cu.function(&function, module, name), name);
    if (shared) check(cu.attribute(function, 8, (int)shared), name);
    check(cu.launch(function, blocks, 1, 1, threads, 1, 1, shared, NULL, arguments, NULL), name);
    check(cu.synchronize(), name);
    check(cu.out(words, out_memory, 4 * count, NULL), name);
    check(cu.synchronize(), name);
}

static void print(const char *name, size_t count, size_t width) {
    printf("%s\n", name);
    for (size_t i = 0; i < count; i++)
        printf("%08x%s", words[i], i % width == width - 1 || i + 1 == count ? "\n" : " ");
}

/* ---- inputs -------------------------------------------------------------------------------- */

static uint64_t state = 12345;
static uint32_t next_random(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}
static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

#define PAIRS 128
static void numbers(uint32_t *in, int ordinary) {
    static const uint32_t awkward[] = {
        0,          0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1,
        0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F800000, 0xBF800000, 0x477FE000,
        0x477FF000, 0x33800000, 0x43E00000, 0x43E80000, 0x47600000, 0x4F000000, 0xCF000000,
        0x4F800000, 0x3F000000, 0xBFC00000, 0x38800000, 0x387FC000, 0x42FE0000, 0xC2FE0000,
        0x3F7FFFFF, 0x3F800001, 0x40490FDB, 0xC0490FDB};
    for (int i = 0; i < 2 * PAIRS; i++) {
        if (ordinary)
            in[i] = bits_of(((float)(next_random() >> 8) / 16777216.0f - 0.5f) *
                            (i % 4 < 2 ? 8.0f : 250.0f));
        else if (i < PAIRS)
            in[i] = awkward[(unsigned)(i % 2 ? i / 2 * 7 + i / 64 : i / 2) %
                            (sizeof awkward / sizeof *awkward)];
        else
            in[i] = next_random();
    }
}

/* ---- probes -------------------------------------------------------------------------------- */

static void probe_swizzles(void) {
    static const char *const names[] = {"swizzle none", "swizzle 32", "swizzle 64", "swizzle 128"};
    for (int swizzle = 0; swizzle < 4; swizzle++) {
        /* 8 rows of 128 bytes for the widest swizzle; narrower boxes have correspondingly more rows. Word 4 k + i of
         * the tensor is k. */
        static uint32_t tensor[256];
        const uint32_t row = swizzle == 0 ? 128 : 16u << swizzle;
        unsigned char map[192], *aligned = (unsigned char *)(((uintptr_t)map + 63) / 64 * 64);
        uint64_t sizes[2] = {row / 4, 1024 / row}, strides[1] = {row};
        uint32_t box[2] = {row / 4, 1024 / row}, steps[2] = {1, 1};
        for (uint32_t i = 0; i < 256; i++) tensor[i] = i / 4;
        check(cu.in(in_memory, tensor, sizeof tensor, NULL), "memory");
        check(cu.map(aligned, 2, 2, (void *)(uintptr_t)in_memory, sizes, strides, box, steps, 0,
                     swizzle, 0, 0),
              names[swizzle]);
        void *arguments[] = {&out_memory, aligned};
        run("probe_swizzle", 1, 64, 4096, arguments, 512);
        print(names[swizzle], 512, 16);
    }
}

/* Elements of each kind: small integers, whose sums are exact, or any numbers of a range of exponents around 1. */
static const struct kind {
    const char *name, *probe;
    int bits, exponent_bits, fraction_bits;
} kinds[] = {{"bf16", "probe_bf16", 16, 8, 7},
             {"f16", "probe_f16", 16, 5, 10},
             {"tf32", "probe_tf32", 32, 8, 10},
             {"e4m3", "probe_e4m3", 8, 4, 3},
             {"e5m2", "probe_e5m2", 8, 5, 2}};

static uint32_t element(const struct kind *k, int whole, int spread) {
    const uint32_t bias = (1u << (k->exponent_bits - 1)) - 1, sign = next_random() & 1;
    uint32_t exponent = bias, fraction = 0;
    if (whole) { /* -4 to 4 */
        uint32_t value = next_random() % 5;
        if (value == 0) return 0;
        exponent = bias + (value >= 4 ? 2 : value >= 2 ? 1 : 0);
        fraction = value == 3 ? 1u << (k->fraction_bits - 1) : 0;
    } else {
        exponent = bias + next_random() % (2 * (uint32_t)spread + 1) - (uint32_t)spread;
        fraction = next_random() >> (32 - k->fraction_bits);
    }
    uint32_t code = (sign << k->exponent_bits | exponent) << k->fraction_bits | fraction;
    return k->bits == 32 ? code << 13 : code;
}

static void probe_product(const struct kind *k, int whole, int spread, int d_spread) {
    static uint32_t in[576 + 512];
    char name[64];
    for (int i = 0; i < 576; i++) {
        in[i] = 0;
        for (int at = 0; at < 32; at += k->bits) in[i] |= element(k, whole, spread) << at;
    }
    for (int i = 0; i < 512; i++) {
        uint32_t exponent = 127 + next_random() % (2 * (uint32_t)d_spread + 1) - (uint32_t)d_spread;
        in[576 + i] = whole ? bits_of((float)(next_random() % 2001) - 1000.0f)
                            : (next_random() & 0x80000000) | exponent << 23 | next_random() >> 9;
    }
    check(cu.in(in_memory, in, sizeof in, NULL), "memory");
    void *arguments[] = {&out_memory, &in_memory};
    run(k->probe, 1, 128, 4096, arguments, 512);
    if (whole)
        snprintf(name, sizeof name, "%s of integers", k->name);
    else
        snprintf(name, sizeof name, "%s of exponents to %d, from %d", k->name, spread, d_spread);
    print(name, 512, 16);
}

int main(int count, char **arguments) {
    static char ptx[1 << 20];
    char gpu[128];
    void *context;
    int device;
    if (count < 2) return fprintf(stderr, "usage: run_probes FILE.ptx [rounding]\n"), 2;
    FILE *file = fopen(arguments[1], "rb");
    if (!file || fread(ptx, 1, sizeof ptx - 1, file) == 0)
        return fprintf(stderr, "run_probes: cannot read %s\n", arguments[1]), 2;
    fclose(file);
    open_driver();
    check(cu.init(0), "cuInit");
    check(cu.device(&device, 0), "device");
    check(cu.name(gpu, sizeof gpu, device), "device");
    check(cu.retain(&context, device), "context");
    check(cu.current(context), "context");
    check(cu.load(&module, ptx), arguments[1]);
    check(cu.allocate(&out_memory, sizeof words), "memory");
    check(cu.allocate(&in_memory, 1 << 16), "memory");
    fprintf(stderr, "run_probes: %s\n", gpu);
    if (count > 2 && strcmp(arguments[2], "rounding") == 0) {
        static const int spreads[][2] = {{1, 1}, {3, 3}, {6, 12}, {3, 20}};
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            for (int s = 0; s < 4; s++) probe_product(&kinds[i], 0, spreads[s][0], spreads[s][1]);
        return 0;
    }

    uint32_t in[2 * PAIRS], pairs = PAIRS;
    void *plain[] = {&out_memory}, *numbered[] = {&out_memory, &in_memory, &pairs};
    run("probe_addresses", 4, 32, 2048, plain, 64);
    print("addresses", 64, 16);
    probe_swizzles();
    run("probe_barrier", 1, 32, 0, plain, 16);
    print("barrier", 16, 16);
    run("probe_exit", 1, 128, 0, plain, 2);
    print("exit", 2, 16);
    numbers(in, 0);
    check(cu.in(in_memory, in, sizeof in, NULL), "memory");
    run("probe_numbers", 1, 128, 0, numbered, 24 * PAIRS);
    print("numbers", 24 * PAIRS, 24);
    numbers(in, 1);
    check(cu.in(in_memory, in, sizeof in, NULL), "memory");
    run("probe_functions", 1, 128, 0, numbered, 8 * PAIRS);
    print("functions", 8 * PAIRS, 8);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) probe_product(&kinds[i], 1, 0, 0);
    return 0;
}
