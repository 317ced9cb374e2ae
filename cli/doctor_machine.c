/* Probes of the CPU, the GEMM library and the GPU. */
#include "deepwell/deepwell.h"
#include "doctor.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- CPU ----------------------------------------------------------------------------------- */

/* Returns the memory that programs can still allocate, from "MemAvailable:   123 kB". */
static json_int_t available_bytes(void) {
    FILE *file = fopen("/proc/meminfo", "re");
    long long kibibytes = 0;
    char line[256];
    while (file && kibibytes == 0 && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lld", &kibibytes) != 1) kibibytes = 0;
    if (file) fclose(file);
    return kibibytes * 1024;
}

/* Returns the library's description of its kernels, or NULL if that fails. */
static json_t *describe_kernels(void) {
    char *text = NULL;
    if (dw_machine_describe(&text) != DW_OK) return NULL;
    json_t *description = json_loads(text, 0, NULL);
    dw_text_free(text);
    return description;
}

json_t *doctor_probe_cpu(const dw_machine *machine, json_t *advice) {
    const dw_machine_cpu *cpu = &machine->cpu;
    json_t *kernels = describe_kernels();
    const char *isa = json_string_value(json_object_get(kernels, "isa"));
    if (!isa) isa = "unknown";
    if (strcmp(isa, "baseline") == 0) {
        doctor_advise(advice,
                      "The kernels run without AVX2: the CPU lacks it or DEEPWELL_ISA excludes it",
                      "everything works, but several times slower");
    }
    if (cpu->usable > 0 && dw_get_threads() > cpu->usable) {
        doctor_advise(advice, "DEEPWELL_THREADS is larger than the number of usable CPUs",
                      "lower it or unset it");
    }
    json_t *found = json_pack(
        "{s:s?, s:s, s:i, s:I, s:I, s:I}", "model", *cpu->model ? cpu->model : NULL, "isa", isa,
        "usable", cpu->usable, "online", (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "memory_bytes",
        (json_int_t)cpu->memory.value, "memory_available_bytes", available_bytes());
    json_decref(kernels);
    return found;
}

/* ---- GEMM ---------------------------------------------------------------------------------- */

json_t *doctor_probe_gemm(json_t *advice) {
    json_t *kernels = describe_kernels();
    const char *amx = json_is_true(json_object_get(kernels, "amx")) ? "AMX, " : "";
    const char *version = json_string_value(json_object_get(kernels, "onednn"));
    const char *isa = json_string_value(json_object_get(kernels, "onednn_isa"));
    json_t *found = NULL;
    if (version && isa) {
        found = json_sprintf("%soneDNN %s (%s)", amx, version, isa);
    } else {
        doctor_advise(advice, "Deepwell was built without oneDNN, and GEMMs are slower",
                      "install libdnnl-dev and build again");
        found = json_sprintf("%sportable C", amx);
    }
    json_decref(kernels);
    return found;
}

/* ---- GPU ----------------------------------------------------------------------------------- */

static json_t *describe_device(const dw_machine_gpu *gpu) {
    return json_pack("{s:s, s:o, s:I}", "name", gpu->name, "compute_capability",
                     json_sprintf("%d.%d", gpu->capability / 10, gpu->capability % 10),
                     "memory_bytes", (json_int_t)gpu->memory.value);
}

/* Adds advice on what Deepwell does on these GPUs. Returns the description of NVRTC, which compiles most kernels, or
 * null if there is none. */
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
        doctor_advise(advice, "Deepwell computes attention on this GPU",
                      "all other operations of a model run as plain PyTorch there");
    else
        doctor_advise(advice, "This version has no kernels for this GPU",
                      "models on it run as plain PyTorch");
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
