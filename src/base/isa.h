/* Inner loops that are compiled once per instruction set.
 *
 * Every file in a folder called isa/ is compiled three times (DW_ISA = avx512, avx2, baseline) and defines
 * one table named with DW_ISA_NAME(x): `const dw__norm_loops DW_ISA_NAME(dw__norm_loops) = {...}`. The file
 * that uses the loops selects a table at run time with DW_ISA_TABLE. */
#ifndef DW_ISA_H
#define DW_ISA_H

#include <stdbool.h>

typedef enum dw__isa { DW_ISA_BASELINE, DW_ISA_AVX2, DW_ISA_AVX512, DW_ISA_COUNT } dw__isa;
/* The best set that this CPU supports. DEEPWELL_ISA=baseline|avx2|avx512|amx lowers it, for tests. */
dw__isa dw__cpu_isa(void);
/* False if DEEPWELL_ISA names a set below AMX. kernel/cpu/amx.h checks whether the CPU has AMX. */
bool dw__isa_allows_amx(void);
const char *dw__isa_name(dw__isa isa);

#define DW_ISA_CONCAT_(name, isa) name##_##isa
#define DW_ISA_CONCAT(name, isa) DW_ISA_CONCAT_(name, isa)
#ifdef DW_ISA
#define DW_ISA_NAME(name) DW_ISA_CONCAT(name, DW_ISA)
#endif
/* In the file that uses the loops: DW_ISA_TABLE(dw__norm_loops) declares the three tables and defines `static
 * const dw__norm_loops *dw__norm_loops_now(void)`. */
#if defined(__x86_64__)
#define DW_ISA_TABLE(type)                                                                         \
    extern const type type##_avx512, type##_avx2, type##_baseline;                                 \
    static const type *type##_now(void) {                                                          \
        switch (dw__cpu_isa()) {                                                                   \
        case DW_ISA_AVX512: return &type##_avx512;                                                 \
        case DW_ISA_AVX2: return &type##_avx2;                                                     \
        default: return &type##_baseline;                                                          \
        }                                                                                          \
    }
#else
#define DW_ISA_TABLE(type)                                                                         \
    extern const type type##_baseline;                                                             \
    static const type *type##_now(void) { return &type##_baseline; }
#endif

#endif
