/* Modules, kernels and launches of the driver API. */
#include "driver.h"
#include "fatbin.h"
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- modules ------------------------------------------------------------------------------- */

typedef struct function {
    dw_emulator_module *module;
    int dynamic_shared; /* the opt-in limit; 0: none was set, so 48 KiB in all are allowed */
    int large_clusters; /* clusters of more than 8 blocks are allowed */
    struct module *owner;
    struct function *next;
    char name[]; /* the name of a template can have thousands of characters */
} function;
typedef struct module {
    dw_emulator_module *module;
    function *functions;
} module;

static int refuse(int result, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int refuse(int result, const char *format, ...) {
    char why[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    fprintf(stderr, "deepwell emulate: %s\n", why);
    dw_emulator_report_unsupported(gpu.emulator, why);
    write_report();
    return result;
}

/* Loads PTX text, or a fat binary of nvcc's. */
static int load(module *m, const char *text, size_t bytes, const char *name) {
    const dw_status status = dw_emulator_load(gpu.emulator, text, bytes, name, &m->module);
    if (status == DW_PARSE) return refuse(INVALID_PTX, "%s", dw_last_error());
    if (status == DW_UNSUPPORTED) return refuse(NOT_SUPPORTED, "%s", dw_last_error());
    return result_of(status);
}

static int load_fatbin(module *m, const void *image) {
    const char *text;
    char others[200];
    size_t bytes;
    const int to = gpu.capability;
    switch (fatbin_find(image, to, &text, &bytes, others, sizeof others)) {
    case FATBIN_FOUND: return load(m, text, bytes, "the program's PTX");
    case FATBIN_COMPRESSED:
        return refuse(NO_BINARY_FOR_GPU,
                      "the program's PTX is compressed: build it with nvcc --compress-mode=none "
                      "(CUDA 12.8 and later) or --no-compress");
    case FATBIN_NO_PTX:
        return refuse(NO_BINARY_FOR_GPU,
                      "the program has no PTX in it: build it with nvcc "
                      "-gencode arch=compute_%da,code=compute_%da, without -rdc=true",
                      to, to);
    case FATBIN_OTHER:
        return refuse(NO_BINARY_FOR_GPU,
                      "the program has PTX for %s, none of which sm_%d can run: build it with nvcc "
                      "-gencode arch=compute_%da,code=compute_%da, or emulate another GPU "
                      "(deepwell emulate --arch)",
                      others, to, to, to);
    default:
        return refuse(INVALID_IMAGE,
                      "the program's device code is not a readable fat binary: the file may be "
                      "damaged");
    }
}

API int cuModuleLoadData(void **made, const void *image) {
    GO();
    /* Machine code: libraries try it first and also contain PTX. The error's text names what the emulator supports. */
    if (memcmp(image, "\177ELF", 4) == 0) return NO_BINARY_FOR_GPU;
    int result = handle(made, sizeof(module));
    if (result != SUCCESS) return result;
    result =
        fatbin_is(image) ? load_fatbin(*made, image) : load(*made, image, strlen(image), "module");
    if (result != SUCCESS) {
        free(*made);
        *made = NULL;
    }
    return result;
}
API int cuModuleLoadDataEx(void **made, const void *image, unsigned count, int *options,
                           void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(made, image);
}
API int cuModuleLoadFatBinary(void **made, const void *image) {
    return cuModuleLoadData(made, image);
}
API int cuModuleGetGlobal_v2(address *memory, size_t *bytes, void *in, const char *name) {
    void *at;
    size_t size;
    if (dw_emulator_variable(((module *)in)->module, name, &at, &size) != DW_OK) return NOT_FOUND;
    if (memory) *memory = (address)(uintptr_t)at;
    if (bytes) *bytes = size;
    return SUCCESS;
}
API int cuModuleUnload(void *of) {
    module *m = of;
    while (m->functions) {
        function *f = m->functions;
        m->functions = f->next;
        free(f);
    }
    dw_emulator_unload(m->module);
    free(m);
    return SUCCESS;
}
API int cuModuleGetFunction(void **made, void *in, const char *name) {
    module *m = in;
    GO();
    for (function *f = m->functions; f; f = f->next)
        if (strcmp(f->name, name) == 0) {
            *made = f;
            return SUCCESS;
        }
    dw_status status = dw_emulator_has_kernel(m->module, name);
    if (status == DW_NOT_FOUND) return NOT_FOUND;
    if (status != DW_OK) return result_of(status);
    const size_t bytes = strlen(name) + 1;
    int result = handle(made, sizeof(function) + bytes);
    if (result != SUCCESS) return result;
    function *f = *made;
    f->module = m->module;
    f->owner = m;
    memcpy(f->name, name, bytes);
    f->next = m->functions;
    m->functions = f;
    return SUCCESS;
}
API int cuModuleGetLoadingMode(int *mode) {
    *mode = 1; /* eager loading */
    return SUCCESS;
}

/* Libraries are modules under another name, and their kernels are functions. */
API int cuLibraryLoadData(void **made, const void *image, int *jit, void **jit_values,
                          unsigned jit_count, int *options, void **values, unsigned count) {
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    return cuModuleLoadData(made, image);
}
API int cuLibraryUnload(void *of) { return cuModuleUnload(of); }
API int cuLibraryGetModule(void **made, void *of) {
    *made = of;
    return SUCCESS;
}
API int cuLibraryGetKernel(void **made, void *in, const char *name) {
    return cuModuleGetFunction(made, in, name);
}
API int cuLibraryGetGlobal(address *memory, size_t *bytes, void *in, const char *name) {
    return cuModuleGetGlobal_v2(memory, bytes, in, name);
}
API int cuKernelGetFunction(void **made, void *kernel) {
    *made = kernel;
    return SUCCESS;
}

/* ---- kernels ------------------------------------------------------------------------------- */

API int cuFuncGetAttribute(int *value, int attribute, void *of) {
    const function *f = of;
    uint32_t shared, local, threads, cluster[3];
    dw_status status = dw_emulator_kernel_memory(f->module, f->name, &shared, &local);
    if (status == DW_OK) status = dw_emulator_kernel_bounds(f->module, f->name, &threads, cluster);
    if (status != DW_OK) return result_of(status);
    *value = attribute == 0   ? (int)threads
             : attribute == 1 ? (int)shared - 1024
             : attribute == 3 ? (int)local
             /* attribute: registers, which are not known here */
             : attribute == 4                    ? 64
             : attribute == 5 || attribute == 6  ? gpu.capability
             : attribute == 8                    ? f->dynamic_shared
             : attribute == 10                   ? cluster[0] != 0
             : attribute >= 11 && attribute < 14 ? (int)cluster[attribute - 11]
             : attribute == 14                   ? f->large_clusters
                                                 : 0;
    return SUCCESS;
}
API int cuFuncSetAttribute(void *of, int attribute, int value) {
    if (attribute == 8) ((function *)of)->dynamic_shared = value;
    if (attribute == 14) ((function *)of)->large_clusters = value;
    return SUCCESS;
}
API int cuKernelGetAttribute(int *value, int attribute, void *of, int device) {
    (void)device;
    return cuFuncGetAttribute(value, attribute, of);
}
API int cuKernelSetAttribute(int attribute, int value, void *of, int device) {
    (void)device;
    return cuFuncSetAttribute(of, attribute, value);
}
API int cuFuncSetCacheConfig(void *of, int config) {
    (void)of, (void)config;
    return SUCCESS;
}
API int cuFuncGetName(const char **name, void *of) {
    *name = ((function *)of)->name;
    return SUCCESS;
}
API int cuKernelGetName(const char **name, void *of) { return cuFuncGetName(name, of); }
API int cuFuncGetModule(void **made, void *of) {
    *made = ((function *)of)->owner;
    return SUCCESS;
}
API int cuFuncGetParamInfo(void *of, size_t index, size_t *offset, size_t *bytes) {
    const function *f = of;
    uint32_t at, size;
    if (dw_emulator_kernel_parameter(f->module, f->name, (uint32_t)index, &at, &size) != DW_OK)
        return INVALID_VALUE;
    *offset = at;
    if (bytes) *bytes = size;
    return SUCCESS;
}
API int cuKernelGetParamInfo(void *of, size_t index, size_t *offset, size_t *bytes) {
    return cuFuncGetParamInfo(of, index, offset, bytes);
}

/* Considers threads and shared memory; registers are not known here. */
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *of, int threads,
                                                    size_t dynamic) {
    int most_shared = 0, own = 0, most_threads = 0, most_blocks = 0;
    if (threads <= 0) return INVALID_VALUE;
    int result = cuFuncGetAttribute(&own, 1, of);
    if (result != SUCCESS) return result;
    cuDeviceGetAttribute(&most_threads, 39, 0);
    cuDeviceGetAttribute(&most_shared, 81, 0);
    cuDeviceGetAttribute(&most_blocks, 106, 0);
    const size_t each = (size_t)own + dynamic + 1024, warps = ((size_t)threads + 31) / 32;
    size_t fit = (size_t)most_threads / (32 * warps);
    if ((size_t)most_shared / each < fit) fit = (size_t)most_shared / each;
    if ((size_t)most_blocks < fit) fit = (size_t)most_blocks;
    *blocks = threads > 1024 ? 0 : (int)fit;
    return SUCCESS;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, void *of, int threads,
                                                             size_t dynamic, unsigned flags) {
    (void)flags;
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, of, threads, dynamic);
}
API int cuOccupancyMaxActiveClusters(int *clusters, void *of, const launch_config *config) {
    unsigned size = 1;
    int blocks, multiprocessors;
    for (unsigned i = 0; i < config->attribute_count; i++)
        if (config->attributes[i].id == ATTRIBUTE_CLUSTER)
            size = config->attributes[i].value.cluster[0] * config->attributes[i].value.cluster[1] *
                   config->attributes[i].value.cluster[2];
    int result = cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, of, (int)(config->block[0] * config->block[1] * config->block[2]),
        config->shared_bytes);
    if (result != SUCCESS) return result;
    cuDeviceGetAttribute(&multiprocessors, 16, 0);
    *clusters = size > 0 && size <= 16 ? blocks * multiprocessors / (int)size : 0;
    return SUCCESS;
}
API int cuOccupancyMaxPotentialClusterSize(int *size, void *of, const launch_config *config) {
    (void)config;
    *size = ((const function *)of)->large_clusters ? 16 : 8;
    return SUCCESS;
}

/* ---- launches ------------------------------------------------------------------------------ */

/* Computes the address of each argument in one block of memory that is laid out like the kernel's parameters. */
enum { EXTRA_END = 0, EXTRA_POINTER = 1, EXTRA_SIZE = 2, MOST_PARAMETERS = 4096 };
static int unpack(const function *f, void **extra, void ***arguments) {
    char *block = NULL;
    size_t bytes = 0;
    for (; *extra != (void *)EXTRA_END; extra += 2) {
        if (*extra == (void *)EXTRA_POINTER)
            block = extra[1];
        else if (*extra == (void *)EXTRA_SIZE)
            bytes = *(size_t *)extra[1];
        else
            return INVALID_VALUE;
    }
    *arguments = calloc(MOST_PARAMETERS, sizeof **arguments);
    if (!*arguments) return OUT_OF_MEMORY;
    for (uint32_t i = 0, at, size; i < MOST_PARAMETERS; i++) {
        if (dw_emulator_kernel_parameter(f->module, f->name, i, &at, &size) != DW_OK) break;
        if (!block || at + size > bytes) return INVALID_VALUE;
        (*arguments)[i] = block + at;
    }
    return SUCCESS;
}

/* Returns whether all blocks of a cooperative launch can be resident at once, as blocks that wait for one another
 * must be. */
static bool fits_at_once(const launch_config *config, void *of) {
    int multiprocessors = 0, each = 0;
    cuDeviceGetAttribute(&multiprocessors, 16, 0);
    const int result = cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &each, of, (int)(config->block[0] * config->block[1] * config->block[2]),
        config->shared_bytes);
    if (result != SUCCESS) return true; /* the launch reports the error */
    const uint64_t blocks = (uint64_t)config->grid[0] * config->grid[1] * config->grid[2],
                   most = (uint64_t)multiprocessors * (uint64_t)each;
    if (blocks <= most) return true;
    fprintf(stderr,
            "deepwell emulate: a cooperative launch of %llu blocks: the GPU holds at most %llu of "
            "them at once, %d on each of %d multiprocessors\n",
            (unsigned long long)blocks, (unsigned long long)most, each, multiprocessors);
    return false;
}

/* Rejects what a GPU rejects without an opt-in by an attribute of the kernel. */
enum { CLUSTER_UNASKED = 8 };
static int check_asked(void *of, const launch_config *config, const uint32_t cluster[3]) {
    const function *f = of;
    int own = 0;
    if (cuFuncGetAttribute(&own, 1, of) == SUCCESS &&
        config->shared_bytes > (unsigned)f->dynamic_shared &&
        (uint64_t)own + config->shared_bytes > SHARED_UNASKED) {
        fprintf(stderr,
                "deepwell emulate: kernel %s: %u bytes of dynamic shared memory and %d static "
                "ones: without "
                "setting cudaFuncAttributeMaxDynamicSharedMemorySize a GPU allows %d in all\n",
                f->name, config->shared_bytes, own, SHARED_UNASKED);
        return INVALID_VALUE;
    }
    const uint64_t blocks = (uint64_t)cluster[0] * cluster[1] * cluster[2];
    if (blocks > CLUSTER_UNASKED && !f->large_clusters) {
        fprintf(stderr,
                "deepwell emulate: kernel %s: clusters of %llu blocks: more than %d need "
                "cudaFuncAttributeNonPortableClusterSizeAllowed\n",
                f->name, (unsigned long long)blocks, CLUSTER_UNASKED);
        return INVALID_CLUSTER_SIZE;
    }
    return SUCCESS;
}

/* Chooses between the preferred cluster size and the regular one. A GPU uses the preferred size where it has room;
 * here launches alternate, and all clusters of a launch have the same size. Returns false if the two sizes are not
 * compatible. */
static bool prefer(dw_emulator_launch_options *options, const unsigned preferred[3]) {
    static _Atomic uint64_t launches;
    uint64_t blocks = 1;
    for (int axis = 0; axis < 3; axis++) {
        const uint32_t regular = options->cluster[axis] ? options->cluster[axis] : 1;
        if (preferred[axis] == 0 || preferred[axis] % regular ||
            options->grid[axis] % preferred[axis] || (axis == 2 && preferred[axis] != regular))
            return false;
        blocks *= preferred[axis];
    }
    if (blocks > 16) return false;
    if ((launches++ + gpu.seed) % 2 == 0) return true;
    for (int axis = 0; axis < 3; axis++) options->cluster[axis] = preferred[axis];
    return true;
}

API int cuLaunchKernelEx(const launch_config *config, void *of, void **arguments, void **extra) {
    const function *f = of;
    void **unpacked = NULL;
    const unsigned *preferred = NULL;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    GO();
    if (extra) {
        int result = unpack(f, extra, &unpacked);
        if (result != SUCCESS) {
            free(unpacked);
            return result;
        }
        arguments = unpacked;
    }
    for (int axis = 0; axis < 3; axis++)
        options.grid[axis] = config->grid[axis], options.block[axis] = config->block[axis];
    options.shared_bytes = config->shared_bytes;
    /* Other attributes do not change results, because grids run one after another. */
    for (unsigned i = 0; i < config->attribute_count; i++) {
        const launch_attribute *a = &config->attributes[i];
        if (a->id == ATTRIBUTE_CLUSTER)
            for (int axis = 0; axis < 3; axis++) options.cluster[axis] = a->value.cluster[axis];
        if (a->id == ATTRIBUTE_COOPERATIVE && a->value.cooperative) {
            if (!fits_at_once(config, of)) return free(unpacked), COOPERATIVE_TOO_LARGE;
            options.cooperative = true;
        }
        if (a->id == ATTRIBUTE_PREFERRED_CLUSTER) preferred = a->value.cluster;
    }
    if (preferred && !prefer(&options, preferred)) return free(unpacked), INVALID_VALUE;
    int result = check_asked(of, config, options.cluster);
    if (result != SUCCESS) return free(unpacked), result;
    dw_status status = dw_emulator_launch(f->module, f->name, &options, arguments, NULL);
    free(unpacked);
    result = result_of(status);
    print_findings();
    if (status == DW_INTERNAL)
        gpu.failed = result; /* as on a GPU, the context is unusable from here on */
    return result;
}
API int cuLaunchCooperativeKernel(void *of, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                  unsigned by, unsigned bz, unsigned shared_bytes, void *stream,
                                  void **arguments) {
    launch_attribute cooperative = {.id = ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
    launch_config config = {{gx, gy, gz}, {bx, by, bz}, shared_bytes, stream, &cooperative, 1};
    return cuLaunchKernelEx(&config, of, arguments, NULL);
}
API int cuLaunchKernel(void *of, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared_bytes, void *stream, void **arguments,
                       void **extra) {
    launch_config config = {{gx, gy, gz}, {bx, by, bz}, shared_bytes, stream, NULL, 0};
    return cuLaunchKernelEx(&config, of, arguments, extra);
}

API int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *memory,
                               const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                               const uint32_t *steps, int interleave, int swizzle, int promotion,
                               int fill) {
    dw_emulator_tensor_shape shape = {.struct_size = sizeof shape,
                                      .element = type,
                                      .rank = (int)rank,
                                      .address = memory,
                                      .interleave = interleave,
                                      .swizzle = swizzle,
                                      .fill_nan = fill};
    (void)promotion;
    if (rank < 1 || rank > 5) return INVALID_VALUE;
    for (uint32_t axis = 0; axis < rank; axis++) {
        shape.size[axis] = sizes[axis], shape.box[axis] = box[axis], shape.step[axis] = steps[axis];
        if (axis > 0) shape.stride[axis - 1] = strides[axis - 1];
    }
    return result_of(dw_emulator_tensor_map(&shape, map));
}

/* ---- entry points -------------------------------------------------------------------------- */

/* A name means its newest form in this library: "cuMemAlloc" is cuMemAlloc_v2. */
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                            int *status) {
    static const char *const forms[] = {"_v2", ""};
    (void)version, (void)flags;
    Dl_info own;
    void *library =
        dladdr((void *)cuInit, &own) ? dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    *function = NULL;
    for (size_t i = 0; i < sizeof forms / sizeof *forms && library && !*function; i++) {
        char full[128];
        Dl_info found;
        snprintf(full, sizeof full, "%s%s", name, forms[i]);
        *function = dlsym(library, full);
        if (*function && (!dladdr(*function, &found) || found.dli_fbase != own.dli_fbase))
            *function = NULL; /* it belongs to another library, which this one depends on */
    }
    if (library) dlclose(library);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
API int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
