/* Probes of the CPU, the matrix-product library and the GPU. */
#include "deepwell/deepwell.h"
#include "doctor.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- CPU ----------------------------------------------------------------------------------- */

/* What programs may still take: "MemAvailable:   123 kB". */
static json_int_t available_bytes(void) {
    FILE *file = fopen("/proc/meminfo", "re");
    long long kibibytes = 0;
    char line[256];
    while (file && kibibytes == 0 && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lld", &kibibytes) != 1) kibibytes = 0;
    if (file) fclose(file);
    return kibibytes * 1024;
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

json_t *doctor_probe_cpu(const dw_machine *machine, json_t *advice) {
    const dw_machine_cpu *cpu = &machine->cpu;
    if (strstr(widest_isa(), "baseline")) {
        doctor_advise(advice, "This CPU has no AVX2", "everything works, several times slower");
    }
    if (cpu->usable > 0 && dw_get_threads() > cpu->usable) {
        doctor_advise(advice, "More threads are asked for than CPUs may be used",
                      "lower DEEPWELL_THREADS or unset it");
    }
    return json_pack("{s:s?, s:s, s:i, s:I, s:I, s:I}", "model", *cpu->model ? cpu->model : NULL,
                     "isa", widest_isa(), "usable", cpu->usable, "online",
                     (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "memory_bytes",
                     (json_int_t)cpu->memory.value, "memory_available_bytes", available_bytes());
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

static json_t *describe_device(const dw_machine_gpu *gpu) {
    return json_pack("{s:s, s:o, s:I}", "name", gpu->name, "compute_capability",
                     json_sprintf("%d.%d", gpu->capability / 10, gpu->capability % 10),
                     "memory_bytes", (json_int_t)gpu->memory.value);
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

json_t *doctor_probe_gpu(const dw_machine *machine, json_t *advice) {
    json_t *devices = json_array();
    for (int i = 0; i < machine->gpu_count; i++)
        json_array_append_new(devices, describe_device(&machine->gpus[i]));
    json_t *compiler = probe_compiler(devices, advice);
    json_t *driver = *machine->cuda ? json_sprintf("CUDA %s", machine->cuda) : json_null();
    /* Without a GPU the first remark says why. */
    json_t *reason = machine->gpu_count == 0 && machine->remark_count > 0
                         ? json_string(machine->remarks[0])
                         : json_null();
    return json_pack("{s:o, s:o, s:o, s:o}", "driver", driver, "devices", devices, "compiler",
                     compiler, "none", reason);
}
