/* The list of kernels, and errors. */
#include "launch.cuh"

#include "cutlass/version.h"

#include <cstdarg>
#include <cstdio>

namespace deepwell {
namespace {

thread_local char why[512];

constexpr size_t MOST = 64;
struct list {
    dw_cutlass_kernel rows[MOST];
    size_t count = 0;
    list() {
        for (const dw_cutlass_kernel *from :
             {sm90_dense, sm100_dense, sm100_scaled, sm100_grouped, sm100_attention})
            for (; from->name && count < MOST; from++) rows[count++] = *from;
    }
};

} // namespace

dw_cutlass_result refuse(dw_cutlass_result result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    return result;
}

} // namespace deepwell

#define API extern "C" __attribute__((visibility("default")))

API const dw_cutlass_kernel *deepwell_cutlass_kernels(int version, size_t *count) {
    static const deepwell::list all;
    *count = version == DW_CUTLASS_VERSION ? all.count : 0;
    return version == DW_CUTLASS_VERSION ? all.rows : nullptr;
}
API const char *deepwell_cutlass_error() { return deepwell::why; }
#define TEXT(x) #x
#define VERSION(a, b, c) TEXT(a) "." TEXT(b) "." TEXT(c)
API const char *deepwell_cutlass_version() {
    return VERSION(CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH);
}
