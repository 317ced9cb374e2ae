/* The CPU, its memory and its NUMA nodes. */
#include "hardware/machine_internal.h"
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

/* ---- hwloc ----------------------------------------------------------------------------------- */

/* The fields of struct hwloc_obj and its cache attributes that are read here. They are the same in all 2.x
 * versions. */
typedef struct hwloc_object {
    int type;
    char *subtype;
    unsigned os_index;
    char *name;
    uint64_t total_memory;
    const struct { uint64_t size; } * cache;
} hwloc_object;
enum { HWLOC_PACKAGE = 1, HWLOC_CORE = 2, HWLOC_PU = 3, HWLOC_L2 = 5, HWLOC_L3 = 6 };

#define HWLOC_FUNCTIONS(X)                                                                         \
    X(unsigned, api_version, hwloc_get_api_version, (void))                                        \
    X(int, init, hwloc_topology_init, (void **topology))                                           \
    X(int, load, hwloc_topology_load, (void *topology))                                            \
    X(void, destroy, hwloc_topology_destroy, (void *topology))                                     \
    X(int, depth_of, hwloc_get_type_depth, (void *topology, int type))                             \
    X(unsigned, count_at, hwloc_get_nbobjs_by_depth, (void *topology, int depth))                  \
    X(hwloc_object *, object_at, hwloc_get_obj_by_depth,                                           \
      (void *topology, int depth, unsigned index))

typedef struct hwloc {
#define MEMBER(result, member, name, parameters) result(*member) parameters;
    HWLOC_FUNCTIONS(MEMBER)
#undef MEMBER
} hwloc;

static bool load_hwloc(void *library, hwloc *h) {
#define LOAD(result, member, name, parameters)                                                     \
    *(void **)&h->member = dlsym(library, #name);                                                  \
    if (!h->member) return false;
    HWLOC_FUNCTIONS(LOAD)
#undef LOAD
    return h->api_version() >> 16 == 2;
}

static int count_of(const hwloc *h, void *topology, int type) {
    int depth = h->depth_of(topology, type);
    return depth >= 0 ? (int)h->count_at(topology, depth) : 0;
}

static double cache_of(const hwloc *h, void *topology, int type) {
    double bytes = 0;
    int depth = h->depth_of(topology, type);
    for (int i = 0; depth >= 0 && i < count_of(h, topology, type); i++) {
        const hwloc_object *object = h->object_at(topology, depth, (unsigned)i);
        if (object && object->cache) bytes += (double)object->cache->size;
    }
    return bytes;
}

static bool count_loaded(const hwloc *h, dw__hwloc_counts *counts) {
    void *topology = NULL;
    if (h->init(&topology) != 0) return false;
    bool counted = h->load(topology) == 0;
    if (counted) {
        unsigned version = h->api_version();
        counts->packages = count_of(h, topology, HWLOC_PACKAGE);
        counts->cores = count_of(h, topology, HWLOC_CORE);
        counts->threads = count_of(h, topology, HWLOC_PU);
        counts->cache = cache_of(h, topology, HWLOC_L3);
        if (counts->cache == 0) counts->cache = cache_of(h, topology, HWLOC_L2);
        snprintf(counts->version, sizeof counts->version, "hwloc %u.%u.%u", version >> 16,
                 version >> 8 & 255, version & 255);
    }
    h->destroy(topology);
    return counted;
}

bool dw__hwloc_count(dw__hwloc_counts *counts) {
    hwloc h;
    void *library = dlopen("libhwloc.so.15", RTLD_NOW | RTLD_LOCAL);
    bool counted = library && load_hwloc(library, &h) && count_loaded(&h, counts);
    if (library) dlclose(library);
    return counted;
}

/* ---- /proc and /sys -------------------------------------------------------------------------- */

/* Reads the value of the first line "key<spaces>: value". */
static bool read_field(const dw__machine *m, const char *file, const char *key, char *value,
                       size_t bytes) {
    char path[512], line[512];
    bool found = false;
    value[0] = '\0';
    if (snprintf(path, sizeof path, "%s%s", m->options->root, file) >= (int)sizeof path)
        return false;
    FILE *from = fopen(path, "re");
    while (from && !found && fgets(line, sizeof line, from)) {
        char *colon = strchr(line, ':');
        if (!colon || strncmp(line, key, strlen(key)) != 0) continue;
        snprintf(value, bytes, "%s", colon + 1 + strspn(colon + 1, " \t"));
        value[strcspn(value, "\n")] = '\0';
        found = true;
    }
    if (from) fclose(from);
    return found;
}

static dw_figure kibibytes(const char *text) {
    double value = strtod(text, NULL) * 1024.0;
    return value > 0 ? (dw_figure){value, DW_FIGURE_READ, "/proc/meminfo"}
                     : (dw_figure){.source = ""};
}

/* Counts the machine's threads, and the cores and packages that they name. */
static void count_in_sys(const dw__machine *m, dw_machine_cpu *cpu) {
    enum { MOST = 4096 };
    char line[64];
    int packages = 0, cores = 0, threads = 0;
    for (int i = 0; i < MOST; i++) {
        if (!dw__machine_read(m, line, sizeof line,
                              "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", i))
            continue;
        threads++;
        cores += (int)strtol(line, NULL, 10) == i; /* the first thread of its core */
        if (dw__machine_read(m, line, sizeof line,
                             "/sys/devices/system/cpu/cpu%d/topology/core_siblings_list", i))
            packages += (int)strtol(line, NULL, 10) == i;
    }
    cpu->packages = packages ? packages : -1;
    cpu->cores = cores ? cores : -1;
    cpu->threads = threads ? threads : -1;
}

static int usable_threads(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : -1;
}

static dw_status read_numa(dw__machine *m) {
    enum { MOST = 256 };
    char line[256];
    for (int node = 0; node < MOST; node++) {
        dw_machine_numa found = {.node = node, .memory = {.source = ""}};
        if (!dw__machine_read(m, line, sizeof line, "/sys/devices/system/node/node%d/cpulist",
                              node))
            continue;
        DW_RETURN_IF_FAILED(dw__machine_text(m, line, &found.cpus));
        /* "Node 0 MemTotal:  528072136 kB" */
        if (dw__machine_read(m, line, sizeof line, "/sys/devices/system/node/node%d/meminfo",
                             node)) {
            const char *colon = strchr(line, ':');
            if (colon && strstr(line, "MemTotal")) found.memory = kibibytes(colon + 1);
            if (found.memory.value > 0) found.memory.source = "/sys/devices/system/node";
        }
        DW_RETURN_IF_FAILED(DW_PUSH(&m->numa, found));
    }
    return DW_OK;
}

dw_status dw__machine_read_cpu(dw__machine *m) {
    dw_machine_cpu *cpu = &m->public.cpu;
    dw__hwloc_counts counts = {0};
    struct utsname system;
    char text[256];
    *cpu = (dw_machine_cpu){.memory = {.source = ""}, .cache = {.source = ""}};
    read_field(m, "/proc/cpuinfo", "model name", text, sizeof text);
    DW_RETURN_IF_FAILED(dw__machine_text(m, text, &cpu->model));
    DW_RETURN_IF_FAILED(
        dw__machine_text(m, uname(&system) == 0 ? system.machine : "", &cpu->architecture));
    if (read_field(m, "/proc/meminfo", "MemTotal", text, sizeof text))
        cpu->memory = kibibytes(text);
    count_in_sys(m, cpu);
    cpu->usable = usable_threads();
    cpu->source = "/sys";
    /* hwloc describes only the real root. */
    if (m->options->root[0] == '\0' && dw__hwloc_count(&counts) && counts.threads > 0) {
        DW_RETURN_IF_FAILED(dw__machine_text(m, counts.version, &cpu->source));
        if (counts.packages > 0) cpu->packages = counts.packages;
        if (counts.cores > 0) cpu->cores = counts.cores;
        cpu->threads = counts.threads;
        if (counts.cache > 0) cpu->cache = (dw_figure){counts.cache, DW_FIGURE_READ, cpu->source};
    }
    return read_numa(m);
}
