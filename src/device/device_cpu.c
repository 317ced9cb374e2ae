/* The CPU as a device.
 *
 * Large blocks are mapped separately, so that they return to the system when released. They are aligned for
 * huge pages, with the advice to use them: every step walks an arena from end to end, and with 4 KB pages the
 * first walk faults every 4 KB and every later one misses the TLB. */
#include "device/device_table.h"
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

static size_t mapped_bytes(size_t bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }

/* Maps a multiple of HUGE_PAGE, aligned to HUGE_PAGE. Returns NULL if memory is exhausted. */
static void *map_aligned(size_t bytes) {
    if (!dw__memory_allowed()) return NULL;
    char *raw =
        mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    size_t skip = (HUGE_PAGE - (uintptr_t)raw % HUGE_PAGE) % HUGE_PAGE;
    if (skip > 0) munmap(raw, skip);
    munmap(raw + skip + bytes, HUGE_PAGE - skip);
    madvise(raw + skip, bytes, MADV_HUGEPAGE); /* only advice: without it only speed differs */
    return raw + skip;
}

static dw_status cpu_allocate(size_t bytes, void **memory) {
    if (bytes > SIZE_MAX - 2 * HUGE_PAGE) /* rounding up would overflow */
        *memory = NULL;
    else
        *memory = bytes >= HUGE_PAGE ? map_aligned(mapped_bytes(bytes)) : dw__malloc_aligned(bytes);
    return *memory ? DW_OK : dw__fail_memory("a block of the CPU device", bytes);
}

static void cpu_release(void *memory, size_t bytes) {
    if (bytes >= HUGE_PAGE) {
        munmap(memory, mapped_bytes(bytes));
    } else {
        dw__free_aligned(memory);
    }
}

static dw_status cpu_copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    return DW_OK;
}

static dw_status cpu_fill(void *memory, int byte, size_t bytes) {
    memset(memory, byte, bytes);
    return DW_OK;
}

const dw_device dw__device_cpu = {
    .version = DW_DEVICE_VERSION,
    .name = "cpu",
    .allocate = cpu_allocate,
    .release = cpu_release,
    .copy = cpu_copy,
    .fill = cpu_fill,
};
