#include "device/cublaslt.h"
#include "device/cuda_driver.h"
#include "device/cuda_library.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char variable[] = "DEEPWELL_CUBLASLT";

static pthread_once_t once = PTHREAD_ONCE_INIT;
static dw__cublaslt loaded;
static dw_status outcome;
static char failure[1024]; /* message of the first attempt, for every later caller */

dw_status dw__cublaslt_wanted(void) {
    const char *named = getenv(variable);
    if (!named || strcmp(named, "off") != 0) return DW_OK;
    return dw__fail(DW_UNSUPPORTED, "cuBLASLt is off (%s=off)", variable);
}

static dw_status load(void) {
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", NULL};
    const dw__cuda *cuda = NULL;
    void *library = NULL;
    DW_RETURN_IF_FAILED(dw__cublaslt_wanted());
    /* A driver older than 13 cannot run the later library. */
    const bool old = dw__cuda_driver(&cuda) == DW_OK && cuda->version < 13000;
    DW_RETURN_IF_FAILED(dw__library_open("cuBLASLt (libcublasLt.so.13 or .12)", variable,
                                         names + (old ? 1 : 0), &library));
#define LOAD(member, name, ...)                                                                    \
    *(void **)&loaded.member = dlsym(library, #name);                                              \
    if (!loaded.member)                                                                            \
        return dw__fail(DW_UNSUPPORTED,                                                            \
                        "cuBLASLt has no function " #name                                          \
                        "; name a libcublasLt.so.13 or .12 in %s",                                 \
                        variable);
    DW_CUBLASLT_FUNCTIONS(LOAD)
    LOAD(version, cublasLtGetVersion)
#undef LOAD
    return DW_OK;
}

static void load_once(void) {
    outcome = load();
    if (outcome != DW_OK) snprintf(failure, sizeof failure, "%s", dw_last_error());
}

dw_status dw__cublaslt_load(const dw__cublaslt **library) {
    pthread_once(&once, load_once);
    if (outcome != DW_OK) return dw__fail(outcome, "%s", failure);
    *library = &loaded;
    return DW_OK;
}

dw_status dw__cublaslt_handle(const dw__cublaslt *library, const dw__context *context,
                              void **handle) {
    static _Atomic(void *) handles[DW__CONTEXTS]; /* by context->index */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    dw_status status = DW_OK;
    *handle = atomic_load_explicit(&handles[context->index], memory_order_acquire);
    if (*handle) return DW_OK;
    pthread_mutex_lock(&lock);
    *handle = atomic_load_explicit(&handles[context->index], memory_order_relaxed);
    if (!*handle) status = dw__cublaslt_check(library->create(handle), "cublasLtCreate");
    if (status == DW_OK)
        atomic_store_explicit(&handles[context->index], *handle, memory_order_release);
    pthread_mutex_unlock(&lock);
    return status;
}

dw_status dw__cublaslt_check(int result, const char *call) {
    dw_status status = DW_INTERNAL;
    switch (result) {
    case 0: return DW_OK;
    case DW_LT_ALLOC_FAILED: status = DW_OUT_OF_MEMORY; break;
    case DW_LT_EXECUTION_FAILED: status = DW_DEVICE; break;
    case DW_LT_NOT_INITIALIZED:
    case DW_LT_ARCH_MISMATCH:
    case DW_LT_NOT_SUPPORTED: status = DW_UNSUPPORTED; break;
    }
    return dw__fail(status, "%s: cuBLASLt's status is %d; set %s=off to compute without it", call,
                    result, variable);
}
