/* Probes of the CPU, the matrix-product library and the GPU. */
#include "deepwell/deepwell.h"
#include "doctor.h"
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- CPU ----------------------------------------------------------------------------------- */

/* Value of the first line "key<spaces>: value" of a file in /proc; 0 when there is none. */
static int read_field(const char *path, const char *key, char *value, size_t value_bytes) {
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    char line[512];
    int found = 0;
    while (!found && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (!colon || strncmp(line, key, strlen(key)) != 0) continue;
        snprintf(value, value_bytes, "%s", colon + 1 + strspn(colon + 1, " \t"));
        value[strcspn(value, "\n")] = '\0';
        found = 1;
    }
    fclose(file);
    return found;
}

static json_int_t read_memory_bytes(const char *key) {
    char value[64];
    long long kibibytes = 0;
    if (!read_field("/proc/meminfo", key, value, sizeof value)) return 0;
    return sscanf(value, "%lld", &kibibytes) == 1 ? kibibytes * 1024 : 0;
}

/* The widest instruction set that Deepwell's kernels are compiled for and this CPU has. */
static const char *widest_isa(void) {
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2) return avx512 ? "AVX-512" : "AVX2";
    return "x86-64 baseline";
#else
    return "baseline";
#endif
}

json_t *doctor_probe_cpu(json_t *advice) {
    char model[256] = "";
    read_field("/proc/cpuinfo", "model name", model, sizeof model);
    cpu_set_t set;
    int usable = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
    if (strstr(widest_isa(), "baseline")) {
        doctor_advise(advice, "This CPU has no AVX2", "everything works, several times slower");
    }
    if (usable > 0 && dw_get_threads() > usable) {
        doctor_advise(advice, "More threads are asked for than CPUs may be used",
                      "lower DEEPWELL_THREADS or unset it");
    }
    return json_pack(
        "{s:s?, s:s, s:i, s:I, s:I, s:I}", "model", *model ? model : NULL, "isa", widest_isa(),
        "usable", usable, "online", (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "memory_bytes",
        read_memory_bytes("MemTotal"), "memory_available_bytes", read_memory_bytes("MemAvailable"));
}

/* ---- matrix products ----------------------------------------------------------------------- */

json_t *doctor_probe_matrix_products(json_t *advice) {
    /* When libdeepwell was built with oneDNN, loading it has loaded oneDNN into this process. */
    typedef struct onednn_version {
        int major, minor, patch; /* its first fields */
    } onednn_version;
    const onednn_version *(*get_version)(void);
    *(void **)&get_version = dlsym(RTLD_DEFAULT, "dnnl_version");
    if (!get_version) {
        doctor_advise(advice, "Built without oneDNN, matrix products are slower",
                      "install libdnnl-dev and build again");
        return json_string("portable C");
    }
    const onednn_version *version = get_version();
    return json_sprintf("oneDNN %d.%d.%d", version->major, version->minor, version->patch);
}

/* ---- GPU ----------------------------------------------------------------------------------- */

/* The part of the CUDA driver API that is used here; all return 0 on success. */
typedef struct cuda_driver {
    int (*init)(unsigned flags);
    int (*driver_version)(int *version);
    int (*device_count)(int *count);
    int (*device_name)(char *name, int bytes, int device);
    int (*device_memory)(size_t *bytes, int device);
    int (*device_attribute)(int *value, int attribute, int device);
} cuda_driver;
enum { COMPUTE_CAPABILITY_MAJOR = 75, COMPUTE_CAPABILITY_MINOR = 76 }; /* CUdevice_attribute */

static int load_driver(void *library, cuda_driver *driver) {
    const struct {
        const char *name;
        void *entry;
    } entries[] = {
        {"cuInit", &driver->init},
        {"cuDriverGetVersion", &driver->driver_version},
        {"cuDeviceGetCount", &driver->device_count},
        {"cuDeviceGetName", &driver->device_name},
        {"cuDeviceTotalMem_v2", &driver->device_memory},
        {"cuDeviceGetAttribute", &driver->device_attribute},
    };
    for (size_t at = 0; at < sizeof entries / sizeof entries[0]; at++) {
        void *symbol = dlsym(library, entries[at].name);
        if (!symbol) return 0;
        memcpy(entries[at].entry, &symbol, sizeof symbol);
    }
    return 1;
}

static json_t *describe_device(const cuda_driver *driver, int device) {
    char name[256] = "";
    size_t bytes = 0;
    int major = 0, minor = 0;
    driver->device_name(name, sizeof name, device);
    driver->device_memory(&bytes, device);
    driver->device_attribute(&major, COMPUTE_CAPABILITY_MAJOR, device);
    driver->device_attribute(&minor, COMPUTE_CAPABILITY_MINOR, device);
    return json_pack("{s:s, s:o, s:I}", "name", name, "compute_capability",
                     json_sprintf("%d.%d", major, minor), "memory_bytes", (json_int_t)bytes);
}

/* What Deepwell does on these GPUs, and NVRTC, which makes most kernels; null where there is none. */
static json_t *probe_compiler(const json_t *devices, json_t *advice) {
    const char *description = NULL;
    size_t index;
    const json_t *device;
    int hopper = 0;
    json_array_foreach(devices, index, device) {
        hopper |=
            strcmp(json_string_value(json_object_get(device, "compute_capability")), "9.0") == 0;
    }
    if (json_array_size(devices) == 0) return json_null();
    if (hopper)
        doctor_advise(advice, "On this GPU attention is Deepwell's",
                      "what else a model does there keeps running as plain PyTorch");
    else
        doctor_advise(advice, "This version has no kernels for this GPU",
                      "models on it keep running as plain PyTorch");
    if (dw_jit_compiler(&description) == DW_OK) return json_string(description);
    if (hopper) doctor_advise(advice, "Kernels cannot be compiled here", dw_last_error());
    return json_null();
}

json_t *doctor_probe_gpu(json_t *advice) {
    json_t *devices = json_array();
    json_t *driver_version = json_null();
    cuda_driver driver;
    int version = 0, count = 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library && load_driver(library, &driver)) {
        if (driver.driver_version(&version) == 0) {
            driver_version = json_sprintf("CUDA %d.%d", version / 1000, version % 1000 / 10);
        }
        if (driver.init(0) == 0 && driver.device_count(&count) == 0) {
            for (int device = 0; device < count; device++) {
                json_array_append_new(devices, describe_device(&driver, device));
            }
        }
    }
    json_t *compiler = probe_compiler(devices, advice);
    /* The driver stays loaded: it does not support being unloaded. */
    return json_pack("{s:o, s:o, s:o}", "driver", driver_version, "devices", devices, "compiler",
                     compiler);
}
