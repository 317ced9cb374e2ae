/* Selects the instruction set of the inner loops on this machine. */
#include "base/isa.h"
#include "base/base.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char *const names[DW_ISA_COUNT] = {"baseline", "avx2", "avx512"};

const char *dw__isa_name(dw__isa isa) {
    return isa >= 0 && isa < DW_ISA_COUNT ? names[isa] : "unknown";
}

#if defined(__x86_64__)
/* Some compilers' __builtin_cpu_supports lacks F16C. It uses AVX's registers. */
static bool has_f16c(void) {
    unsigned eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

/* Checks the CPU features that the build's flags for each set name. The OS must save the registers too;
 * __builtin_cpu_supports checks both. */
static dw__isa detect(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx512 ? DW_ISA_AVX512 : avx2 ? DW_ISA_AVX2 : DW_ISA_BASELINE;
#else
    return DW_ISA_BASELINE;
#endif
}

static dw__isa decide(void) {
    dw__isa best = detect();
    const char *wanted = getenv("DEEPWELL_ISA");
    if (!wanted || !*wanted) return best;
    if (strcmp(wanted, "amx") == 0) wanted = names[DW_ISA_AVX512];
    for (int isa = 0; isa < DW_ISA_COUNT; isa++) {
        if (strcmp(wanted, names[isa]) != 0) continue;
        if (isa <= (int)best) return (dw__isa)isa;
        dw__log(DW_LOG_WARNING, "DEEPWELL_ISA asks for %s, which this CPU lacks: using %s", wanted,
                names[best]);
        return best;
    }
    dw__log(DW_LOG_WARNING, "DEEPWELL_ISA is \"%s\", not baseline, avx2, avx512 or amx: using %s",
            wanted, names[best]);
    return best;
}

dw__isa dw__cpu_isa(void) {
    static _Atomic int decided = -1;
    int isa = atomic_load_explicit(&decided, memory_order_relaxed);
    if (isa < 0) {
        isa = (int)decide();
        atomic_store_explicit(&decided, isa, memory_order_relaxed);
    }
    return (dw__isa)isa;
}

bool dw__isa_allows_amx(void) {
    const char *wanted = getenv("DEEPWELL_ISA");
    return dw__cpu_isa() == DW_ISA_AVX512 && !(wanted && strcmp(wanted, names[DW_ISA_AVX512]) == 0);
}
