/* Loads libcuda.so.1 once. If that fails, reports the cause in one line. */
#include "device/cuda_driver.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static dw__cuda loaded;
static dw_status outcome;
static char failure[1024]; /* message of the first attempt, for every later caller */

static dw_status load_functions(void *library) {
#define LOAD(member, name, parameters)                                                             \
    *(void **)&loaded.member = dlsym(library, #name);                                              \
    if (!loaded.member)                                                                            \
        return dw__fail(DW_UNSUPPORTED,                                                            \
                        "the NVIDIA driver (libcuda.so.1) has no function " #name                  \
                        ": it is older than CUDA %d.0; install driver 525 or later",               \
                        DW_CUDA_OLDEST_DRIVER / 1000);
    DW_CUDA_FUNCTIONS(LOAD)
#undef LOAD
    return DW_OK;
}

/* Checks the version before looking up functions that only later drivers have. */
static dw_status check_version(void *library) {
    int (*version_of)(int *) = NULL;
    *(void **)&version_of = dlsym(library, "cuDriverGetVersion");
    if (!version_of || version_of(&loaded.version) != 0)
        return dw__fail(DW_UNSUPPORTED, "libcuda.so.1 does not say which version it is; reinstall "
                                        "the NVIDIA driver (525 or later)");
    if (loaded.version < DW_CUDA_OLDEST_DRIVER)
        return dw__fail(DW_UNSUPPORTED,
                        "the NVIDIA driver is too old: it supports CUDA %d.%d, Deepwell needs CUDA "
                        "%d.0 (driver 525) or later; update the driver",
                        loaded.version / 1000, loaded.version % 1000 / 10,
                        DW_CUDA_OLDEST_DRIVER / 1000);
    return DW_OK;
}

static dw_status load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return dw__fail(DW_UNSUPPORTED,
                        "there is no NVIDIA driver on this machine (%s): install driver 525 or "
                        "later to use a GPU, or use the device \"cpu\"",
                        reason ? reason : "libcuda.so.1 cannot be loaded");
    }
    /* The library is never closed, because a driver does not survive that. */
    DW_RETURN_IF_FAILED(check_version(library));
    DW_RETURN_IF_FAILED(load_functions(library));
    int result = loaded.init(0);
    if (result == 0) result = loaded.device_count(&loaded.devices);
    if (result == DW_CU_NO_DEVICE || (result == 0 && loaded.devices == 0))
        return dw__fail(DW_UNSUPPORTED,
                        "the NVIDIA driver is installed but shows no GPU: check nvidia-smi, "
                        "CUDA_VISIBLE_DEVICES, and that the container was started with its GPUs");
    return result == 0 ? DW_OK : dw__cuda_fail(result, "cuInit");
}

static void load_once(void) {
    outcome = load();
    if (outcome != DW_OK) snprintf(failure, sizeof failure, "%s", dw_last_error());
}

dw_status dw__cuda_driver(const dw__cuda **driver) {
    pthread_once(&once, load_once);
    if (outcome != DW_OK) return dw__fail(outcome, "%s", failure);
    *driver = &loaded;
    return DW_OK;
}

/* A kernel that ran before has failed. Every later call in the context returns the same. */
static bool is_lost(int result) {
    return result >= DW_CU_ILLEGAL_ADDRESS && result <= DW_CU_LAUNCH_FAILED &&
           result != DW_CU_LAUNCH_OUT_OF_RESOURCES;
}

static dw_status status_of(int result) {
    if (result == DW_CU_OUT_OF_MEMORY) return DW_OUT_OF_MEMORY;
    if (is_lost(result)) return DW_DEVICE;
    switch (result) {
    case DW_CU_STUB_LIBRARY:
    case DW_CU_NO_DEVICE:
    case DW_CU_NO_BINARY_FOR_GPU:
    case DW_CU_UNSUPPORTED_PTX_VERSION:
    case DW_CU_NOT_SUPPORTED:
    case DW_CU_DRIVER_MISMATCH: return DW_UNSUPPORTED;
    case DW_CU_INVALID_IMAGE:
    case DW_CU_LAUNCH_OUT_OF_RESOURCES: return DW_INTERNAL;
    }
    return DW_STATE;
}

static const char *next_step(int result) {
    if (result >= DW_CU_CAPTURE_UNSUPPORTED && result <= DW_CU_CAPTURE_LAST)
        return "; the stream is in a CUDA graph capture that this call does not fit: capture on "
               "one "
               "stream, after a first run outside of the capture";
    if (is_lost(result))
        return "; a kernel that ran before has failed, ours or another's, and the context is lost: "
               "run under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1, to see which";
    switch (result) {
    case DW_CU_OUT_OF_MEMORY: return "; free GPU memory, or use a smaller batch or sequence";
    case DW_CU_NOT_INITIALIZED:
        return "; CUDA does not survive fork(): start worker processes with \"spawn\"";
    case DW_CU_STUB_LIBRARY:
        return "; the libcuda.so.1 that was found is the toolkit's stub: take its folder out of "
               "LD_LIBRARY_PATH";
    case DW_CU_INVALID_CONTEXT:
    case DW_CU_INVALID_HANDLE:
        return "; the stream, event or memory belongs to another GPU's context than the calling "
               "thread's current one";
    case DW_CU_INVALID_IMAGE:
    case DW_CU_NO_BINARY_FOR_GPU:
    case DW_CU_UNSUPPORTED_PTX_VERSION:
        return "; the driver is older than the compiler that made the kernel: update the driver, "
               "or "
               "name an older NVRTC in DEEPWELL_NVRTC";
    case DW_CU_DRIVER_MISMATCH:
        return "; libcuda and the kernel module differ: restart after updating the driver";
    }
    return "";
}

dw_status(dw__cuda_fail)(int result, const char *format, ...) {
    char what[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    const char *name = NULL, *text = NULL;
    if (loaded.error_name && loaded.error_name(result, &name) != 0) name = NULL;
    if (loaded.error_text && loaded.error_text(result, &text) != 0) text = NULL;
    return dw__fail(status_of(result), "%s: %s (%d)%s%s%s", what, name ? name : "CUDA error",
                    result, text ? ": " : "", text ? text : "", next_step(result));
}
