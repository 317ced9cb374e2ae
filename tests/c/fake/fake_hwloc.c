/* Replaces libhwloc.so.15: hwloc of a machine with two packages of 56 cores, two threads per core, and a
 * last-level cache of 105 MiB per package. The parts of its structures that are read are the same in every version
 * 2. */
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

typedef struct object {
    int type;
    char *subtype;
    unsigned os_index;
    char *name;
    uint64_t total_memory;
    void *attributes;
} object;

static uint64_t cache_attributes[8] = {105u << 20};
static int topology;

API unsigned hwloc_get_api_version(void) { return 0x00020900; }
API int hwloc_topology_init(void **made) {
    *made = &topology;
    return 0;
}
API int hwloc_topology_load(void *of) { return of == &topology ? 0 : -1; }
API void hwloc_topology_destroy(void *of) { (void)of; }
API int hwloc_get_type_depth(void *of, int type) {
    (void)of;
    switch (type) {
    case 1: return 10; /* package */
    case 2: return 20; /* core */
    case 3: return 30; /* thread */
    case 6: return 15; /* third-level cache */
    default: return -1;
    }
}
API unsigned hwloc_get_nbobjs_by_depth(void *of, int depth) {
    (void)of;
    return depth == 10 || depth == 15 ? 2 : depth == 20 ? 112 : depth == 30 ? 224 : 0;
}
API object *hwloc_get_obj_by_depth(void *of, int depth, unsigned index) {
    static object cache = {.type = 6, .attributes = cache_attributes};
    (void)of;
    return depth == 15 && index < 2 ? &cache : NULL;
}
