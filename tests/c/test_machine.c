/* The probe, on simulated machines: a fake driver, a fake NVML and a fake /sys. */
#include "deepwell/graph.h"
#include "deepwell/machine.h"
#include "fake/fake_gpu.h"
#include "fake/fake_nvml.h"
#include "hardware/machine_internal.h"
#include <math.h>
#include <sys/stat.h>

static fake_nvml *nvml;

static void load_fake_nvml(void) {
    void *library = dlopen(FAKE_NVML, RTLD_NOW | RTLD_GLOBAL);
    fake_nvml *(*state)(void) = NULL;
    assert_non_null(library);
    *(void **)&state = dlsym(library, "fake_nvml_state");
    assert_non_null(state);
    nvml = state();
}

#define NEAR(value, expected) (fabs((value) - (expected)) <= 1e-9 * fabs(expected))

/* ---- a simulated /sys ------------------------------------------------------------------------- */

static char root[64];

static void make_root(void) {
    snprintf(root, sizeof root, "/tmp/deepwell-machine-XXXXXX");
    assert_non_null(mkdtemp(root));
}

static void in_root(const char *path, const char *text) {
    char whole[1024];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    if (dw__folder_make_above(whole) != DW_OK || dw__file_write(whole, text, strlen(text)) != DW_OK)
        abort();
}

static void link_in_root(const char *path, const char *to) {
    char whole[1024], target[1024];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    snprintf(target, sizeof target, "%s%s", root, to);
    if (dw__folder_make_above(whole) != DW_OK || symlink(target, whole) != 0) abort();
}

/* A PCI device at `place` below /sys/devices, on a NUMA node. */
static void pci_device(const char *place, const char *numa) {
    char path[640], folder[512];
    snprintf(folder, sizeof folder, "/sys/devices/%s", place);
    snprintf(path, sizeof path, "%s/numa_node", folder);
    in_root(path, numa);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s", strrchr(place, '/') + 1);
    link_in_root(path, folder);
}

static void infiniband(const char *name, const char *place, const char *rate, const char *state,
                       const char *layer) {
    char path[640], folder[512];
    snprintf(folder, sizeof folder, "/sys/devices/%s", place);
    snprintf(path, sizeof path, "/sys/class/infiniband/%s/device", name);
    link_in_root(path, folder);
    snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/rate", name);
    in_root(path, rate);
    snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/state", name);
    in_root(path, state);
    snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/link_layer", name);
    in_root(path, layer);
}

static void cpus_and_memory(void) {
    char path[128];
    in_root("/proc/cpuinfo", "processor\t: 0\nmodel name\t: A CPU \xFF of tests\n");
    in_root("/proc/meminfo", "MemFree:  1 kB\nMemTotal:       2097152000 kB\n");
    for (int i = 0; i < 8; i++) { /* two packages, two cores each, two threads each */
        static const char *const cores[] = {"0,4", "1,5", "2,6", "3,7"};
        static const char *const packages[] = {"0-1,4-5", "2-3,6-7"};
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                 i);
        in_root(path, cores[i % 4]);
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/core_siblings_list", i);
        in_root(path, packages[i % 4 / 2]);
    }
    in_root("/sys/devices/system/node/node0/cpulist", "0-1,4-5\n");
    in_root("/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:  1048576000 kB\n");
    in_root("/sys/devices/system/node/node1/cpulist", "2-3,6-7\n");
}

/* Two GPUs and a port below one switch, a third GPU below the same host bridge, a fourth at the other CPU. */
#define SWITCH "pci0000:0f/0000:0f:01.0/0000:01:00.0/"
static void four_gpus_in_sys(void) {
    pci_device(SWITCH "0000:02:00.0/0000:10:00.0", "0");
    pci_device(SWITCH "0000:02:01.0/0000:11:00.0", "0");
    pci_device(SWITCH "0000:02:02.0/0000:03:00.0", "0");
    pci_device("pci0000:0f/0000:0f:03.0/0000:12:00.0", "0");
    pci_device("pci0000:80/0000:80:01.0/0000:13:00.0", "1");
    pci_device("pci0000:80/0000:80:02.0/0000:81:00.0", "1");
    /* A storage device, and a port that is down. */
    infiniband("mlx5_1", "pci0000:80/0000:80:02.0/0000:81:00.0", "200 Gb/sec (4X HDR)\n",
               "4: ACTIVE\n", "Ethernet\n");
    infiniband("mlx5_2", "pci0000:80/0000:80:02.0/0000:81:00.1", "400 Gb/sec (4X NDR)\n",
               "1: DOWN\n", "InfiniBand\n");
    infiniband("mlx5_0", SWITCH "0000:02:02.0/0000:03:00.0", "400 Gb/sec (4X NDR)\n", "4: ACTIVE\n",
               "InfiniBand\n");
}

static const dw_machine *probe(void) {
    static dw__machine_options options;
    dw_machine *machine = NULL;
    options = (dw__machine_options){.root = root};
    if (dw__machine_probe(&options, &machine) != DW_OK) {
        fprintf(stderr, "probe: %s\n", dw_last_error());
        _exit(1);
    }
    return machine;
}

static bool has_remark(const dw_machine *m, const char *part) {
    for (int i = 0; i < m->remark_count; i++)
        if (strstr(m->remarks[i], part)) return true;
    return false;
}

/* Writes the report to a file, and reads back the part for plans. */
static void check_file(const dw_machine *m) {
    char *text = NULL, *one = NULL, *other = NULL;
    dw_hardware *direct = NULL, *read = NULL;
    CHILD_REQUIRE(dw_machine_json(m, &text) == DW_OK);
    CHILD_REQUIRE(dw_machine_hardware(m, &direct) == DW_OK);
    CHILD_REQUIRE(dw_hardware_parse(text, strlen(text), &read) == DW_OK);
    CHILD_REQUIRE(dw_hardware_json(direct, &one) == DW_OK);
    CHILD_REQUIRE(dw_hardware_json(read, &other) == DW_OK);
    CHILD_REQUIRE(strcmp(one, other) == 0);
    dw_text_free(text);
    dw_text_free(one);
    dw_text_free(other);
    dw_hardware_destroy(direct);
    dw_hardware_destroy(read);
}

static void finish(const dw_machine *m) {
    check_file(m);
    dw_machine_destroy((dw_machine *)m);
}

/* ---- machines --------------------------------------------------------------------------------- */

static void no_gpu(void *unused) {
    (void)unused;
    if (dlopen("libcuda.so.1", RTLD_NOW)) _exit(0); /* this machine has hwloc */
    cpus_and_memory();
    in_root("/sys/class/net/eth0/type", "1\n");
    in_root("/sys/class/net/eth0/speed", "25000\n");
    in_root("/sys/class/net/eth0/operstate", "up\n");
    in_root("/sys/devices/virtio0/x", "");
    link_in_root("/sys/class/net/eth0/device", "/sys/devices/virtio0");
    in_root("/sys/class/net/lo/type", "772\n");
    in_root("/sys/class/net/br0/type", "1\n");
    const dw_machine *m = probe();
    CHILD_REQUIRE(m->gpu_count == 0 && m->link_count == 0);
    CHILD_REQUIRE(has_remark(m, "no GPU: there is no NVIDIA driver"));
    CHILD_REQUIRE(strcmp(m->cpu.model, "A CPU ? of tests") == 0);
    CHILD_REQUIRE(m->cpu.packages == 2 && m->cpu.cores == 4 && m->cpu.threads == 8);
    CHILD_REQUIRE(m->cpu.usable >= 1 && m->cpu.memory.value == 2097152000.0 * 1024);
    CHILD_REQUIRE(m->numa_count == 2 && strcmp(m->numa[1].cpus, "2-3,6-7") == 0);
    CHILD_REQUIRE(m->numa[0].memory.value == 1048576000.0 * 1024);
    CHILD_REQUIRE(m->numa[1].memory.kind == DW_FIGURE_UNKNOWN);
    CHILD_REQUIRE(m->nic_count == 1 && strcmp(m->nics[0].name, "eth0") == 0);
    CHILD_REQUIRE(m->nics[0].bandwidth.value == 25e9 / 8 && m->nics[0].up);
    dw_hardware *h = NULL;
    CHILD_REQUIRE(dw_machine_hardware(m, &h) == DW_OK && h->gpus == 0);
    dw_hardware_destroy(h);
    finish(m);
}

/* Describes this machine. */
static void here(void *unused) {
    (void)unused;
    dw_machine *m = NULL;
    CHILD_REQUIRE(dw_machine_probe(0, &m) == DW_OK);
    CHILD_REQUIRE(m->cpu.usable >= 1 && m->cpu.memory.value > 1e8);
    CHILD_REQUIRE(m->gpu_count > 0 || m->remark_count > 0);
    finish(m);
    dw_hardware *h = NULL;
    CHILD_REQUIRE(dw_hardware_open("auto", &h) == DW_OK);
    CHILD_REQUIRE(h->gpus >= 0 && h->name[0]);
    dw_hardware_destroy(h);
}

static void nothing_at_all(void *unused) {
    (void)unused;
    const dw_machine *m = probe();
    CHILD_REQUIRE(m->cpu.cores == -1 && m->numa_count == 0 && m->nic_count == 0);
    CHILD_REQUIRE(m->cpu.memory.kind == DW_FIGURE_UNKNOWN);
    finish(m);
}

static void switched(int gpus, unsigned version, unsigned switches) {
    for (int gpu = 0; gpu < gpus; gpu++)
        for (unsigned link = 0; link < FAKE_NVML_LINKS; link++)
            nvml->links[gpu][link] = (fake_nvml_link){
                .active = 1, .type = 2, .version = version, .bus = 5 + link % switches};
}

static void eight_h200(void *unused) {
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    cpus_and_memory();
    fake->devices = 8;
    nvml->gpus = 8;
    fake->name = "NVIDIA H200";
    switched(8, 7, 4); /* some drivers call Hopper's links 5.0 */
    four_gpus_in_sys();
    const dw_machine *m = probe();
    CHILD_REQUIRE(m->gpu_count == 8 && m->link_count == 144 && m->switches == 4);
    const dw_machine_gpu *gpu = &m->gpus[7];
    CHILD_REQUIRE(strcmp(gpu->bus, "0000:17:00.0") == 0 && gpu->links == 18);
    CHILD_REQUIRE(gpu->link_version == 4 && NEAR(gpu->link_bandwidth.value, 450e9));
    CHILD_REQUIRE(strcmp(gpu->architecture, "sm_90a") == 0 && !*gpu->blackwell);
    CHILD_REQUIRE(strcmp(gpu->profile, "h200") == 0 && gpu->rate[DW_RATE_BF16].value == 989.4e12);
    CHILD_REQUIRE(gpu->memory.value == 151523426304.0 && gpu->power.value == 700);
    CHILD_REQUIRE(gpu->clock.value == 1980e6 && gpu->pcie_generation == 5 && gpu->pcie_lanes == 16);
    CHILD_REQUIRE(NEAR(gpu->memory_bandwidth.value, 2 * 3201e6 * 6144 / 8));
    CHILD_REQUIRE(fabs(gpu->host_bandwidth.value - 63.0e9) < 0.1e9);
    CHILD_REQUIRE(gpu->numa_node == -1 && m->gpus[3].numa_node == 1);
    CHILD_REQUIRE(m->nic_count == 3 && strcmp(m->nics[1].kind, "RoCE") == 0 && !m->nics[2].up);
    CHILD_REQUIRE(m->nics[1].bandwidth.value == 25e9 && m->nics[1].numa_node == 1);
    CHILD_REQUIRE(strcmp(m->driver, "580.95.05") == 0 && strcmp(m->cuda, "13.0") == 0);
    dw_hardware *h = NULL;
    CHILD_REQUIRE(dw_machine_hardware(m, &h) == DW_OK);
    CHILD_REQUIRE(h->gpus == 8 && h->gpus_per_node == 8 && h->gpus_per_domain == 8);
    CHILD_REQUIRE(h->link_version == 4 && NEAR(h->link_bandwidth.value, 450e9));
    CHILD_REQUIRE(NEAR(h->network_bandwidth.value, 50e9 / 8) && h->rails == 1);
    CHILD_REQUIRE(strcmp(h->network, "InfiniBand") == 0);
    CHILD_REQUIRE(NEAR(h->host_memory.value, 2097152000.0 * 1024 / 8));
    CHILD_REQUIRE(strcmp(h->name, "h200") == 0 && h->memory_bandwidth.value == 4.8e12);
    dw_hardware_destroy(h);
    finish(m);
}

static const dw_machine_path *path_between(const dw_machine *m, int gpu, int peer, int nic) {
    for (int i = 0; i < m->path_count; i++)
        if (m->paths[i].gpu == gpu && m->paths[i].peer == peer && m->paths[i].nic == nic)
            return &m->paths[i];
    return NULL;
}

static void paths(void *unused) {
    static const struct {
        int gpu, peer, nic;
        const char *level;
        int hops;
    } expected[] = {
        {0, 1, -1, "PIX", 4}, {0, -1, 0, "PIX", 4}, {0, 2, -1, "PHB", 6},
        {2, -1, 0, "PHB", 6}, {0, 3, -1, "SYS", 8}, {3, -1, 0, "SYS", 8},
    };
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    fake->devices = 4;
    nvml->gpus = 4;
    four_gpus_in_sys();
    const dw_machine *m = probe();
    CHILD_REQUIRE(m->path_count == 6 + 8); /* only ports that are up have a place in the tree */
    for (size_t i = 0; i < DW_COUNT(expected); i++) {
        const dw_machine_path *path =
            path_between(m, expected[i].gpu, expected[i].peer, expected[i].nic);
        CHILD_REQUIRE(path);
        if (strcmp(path->level, expected[i].level) != 0 || path->hops != expected[i].hops)
            fprintf(stderr, "path %zu is %s, %d hops\n", i, path->level, path->hops);
        CHILD_REQUIRE(strcmp(path->level, expected[i].level) == 0);
        CHILD_REQUIRE(path->hops == expected[i].hops);
    }
    finish(m);
}

static void tray_of_nvl72(void *unused) {
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    cpus_and_memory();
    fake->devices = 4;
    fake->capability = 100;
    fake->sm_count = 152;
    fake->name = "NVIDIA GB200";
    nvml->gpus = 4;
    nvml->fabric_state = 3;
    switched(4, 7, 1);
    const dw_machine *m = probe();
    CHILD_REQUIRE(strcmp(m->gpus[0].blackwell, "sm_100") == 0);
    CHILD_REQUIRE(strcmp(m->gpus[0].architecture, "sm_100a") == 0);
    CHILD_REQUIRE(strcmp(m->fabric, "completed") == 0 && has_remark(m, "clique 7"));
    CHILD_REQUIRE(m->gpus[0].link_version == 5 && NEAR(m->gpus[0].link_bandwidth.value, 900e9));
    CHILD_REQUIRE(m->gpus[0].host_bandwidth.value == 225e9); /* joined by NVLink-C2C */
    dw_hardware *h = NULL;
    CHILD_REQUIRE(dw_machine_hardware(m, &h) == DW_OK);
    CHILD_REQUIRE(h->gpus == 4 && h->gpus_per_node == 4 && h->gpus_per_domain == 72);
    dw_hardware_destroy(h);
    finish(m);
}

static void two_by_pcie(void *unused) {
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    cpus_and_memory();
    fake->devices = 2;
    fake->capability = 89;
    fake->sm_count = 142;
    fake->name = "NVIDIA L40S";
    nvml->gpus = 4;
    nvml->pcie_generation = 4;
    const dw_machine *m = probe();
    CHILD_REQUIRE(m->link_count == 0 && m->switches == 0 && m->gpus[0].links == 0);
    CHILD_REQUIRE(has_remark(m, "2 of the machine's 4 GPUs"));
    dw_hardware *h = NULL;
    CHILD_REQUIRE(dw_machine_hardware(m, &h) == DW_OK);
    CHILD_REQUIRE(h->gpus == 2 && h->gpus_per_domain == 1 && h->link_version == 0);
    CHILD_REQUIRE(fabs(h->link_bandwidth.value - 31.5e9) < 0.1e9);
    CHILD_REQUIRE(h->link_bandwidth.kind == DW_FIGURE_ESTIMATED);
    CHILD_REQUIRE(h->link_latency.value > 2e-6);
    dw_hardware_destroy(h);
    finish(m);
}

/* A bridge joins pairs of GPUs: the domains have two. */
static void bridged_pairs(void *unused) {
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    fake->devices = 4;
    fake->capability = 80;
    fake->name = "NVIDIA RTX A6000";
    nvml->gpus = 4;
    for (int gpu = 0; gpu < 4; gpu++)
        for (int link = 0; link < 4; link++)
            nvml->links[gpu][link] =
                (fake_nvml_link){.active = 1, .version = 5, .bus = 0x10 + (unsigned)(gpu ^ 1)};
    const dw_machine *m = probe();
    CHILD_REQUIRE(m->link_count == 16 && m->switches == 0);
    CHILD_REQUIRE(m->links[0].peer == 1 && strcmp(m->links[0].to, "gpu") == 0);
    dw_hardware *h = NULL;
    CHILD_REQUIRE(dw_machine_hardware(m, &h) == DW_OK);
    CHILD_REQUIRE(h->gpus == 4 && h->gpus_per_domain == 2 && h->link_version == 3);
    CHILD_REQUIRE(NEAR(h->link_bandwidth.value, 100e9));
    dw_hardware_destroy(h);
    finish(m);
}

/* For a GPU that is not in the catalogue, the rates follow from SMs and clock, and are marked as estimates. */
static void unknown_gpu(void *unused) {
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    fake->name = "NVIDIA H100 PCIe";
    fake->sm_count = 114;
    const dw_machine *m = probe();
    CHILD_REQUIRE(!*m->gpus[0].profile);
    CHILD_REQUIRE(NEAR(m->gpus[0].rate[DW_RATE_BF16].value, 114 * 1980e6 * 4096));
    CHILD_REQUIRE(m->gpus[0].rate[DW_RATE_BF16].kind == DW_FIGURE_ESTIMATED);
    CHILD_REQUIRE(m->gpus[0].rate[DW_RATE_FP4].value == 0);
    finish(m);
}

static void without_nvml(void *unused) {
    (void)unused;
    load_fake_driver();
    if (dlopen("libnvidia-ml.so.1", RTLD_NOW)) _exit(0);
    fake->devices = 2;
    fake->name = "NVIDIA RTX A6000";
    const dw_machine *m = probe();
    CHILD_REQUIRE(m->gpu_count == 2 && has_remark(m, "NVML (libnvidia-ml.so.1) was not found"));
    CHILD_REQUIRE(m->gpus[0].power.kind == DW_FIGURE_UNKNOWN && m->gpus[0].pcie_lanes == -1);
    dw_hardware *h = NULL;
    CHILD_REQUIRE(dw_machine_hardware(m, &h) == DW_OK);
    CHILD_REQUIRE(h->gpus == 2 && h->gpus_per_domain == 1);
    CHILD_REQUIRE(h->link_bandwidth.kind == DW_FIGURE_ESTIMATED);
    dw_hardware_destroy(h);
    finish(m);
}

static void known_without_nvml(void *unused) {
    (void)unused;
    load_fake_driver();
    if (dlopen("libnvidia-ml.so.1", RTLD_NOW)) _exit(0);
    fake->devices = 8;
    fake->name = "NVIDIA H200";
    const dw_machine *m = probe();
    dw_hardware *h = NULL;
    CHILD_REQUIRE(dw_machine_hardware(m, &h) == DW_OK);
    CHILD_REQUIRE(h->gpus == 8 && h->gpus_per_domain == 8 && h->link_version == 4);
    CHILD_REQUIRE(h->link_bandwidth.value == 450e9);
    CHILD_REQUIRE(h->link_bandwidth.kind == DW_FIGURE_ESTIMATED);
    dw_hardware_destroy(h);
    finish(m);
}

/* GPUs with names of their own: the first one of the most frequent kind is described. */
static void several_kinds(void *unused) {
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    fake->devices = 3;
    nvml->gpus = 3;
    const dw_machine *m = probe();
    dw_hardware *h = NULL;
    CHILD_REQUIRE(has_remark(m, "of several kinds"));
    CHILD_REQUIRE(dw_machine_hardware(m, &h) == DW_OK);
    CHILD_REQUIRE(h->gpus == 1 && strcmp(h->name, "Fake GPU 0") == 0);
    dw_hardware_destroy(h);
    finish(m);
}

static void nvml_that_refuses(void *unused) {
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    nvml->refuse = 1;
    const dw_machine *m = probe();
    CHILD_REQUIRE(m->gpu_count == 1 && has_remark(m, "NVML (libnvidia-ml.so.1) was not found"));
    finish(m);
}

static void with_hwloc(void *unused) {
    (void)unused;
    dw__hwloc_counts counts = {0};
    CHILD_REQUIRE(dlopen(FAKE_HWLOC, RTLD_NOW | RTLD_GLOBAL));
    CHILD_REQUIRE(dw__hwloc_count(&counts));
    CHILD_REQUIRE(counts.packages == 2 && counts.cores == 112 && counts.threads == 224);
    CHILD_REQUIRE(counts.cache == 2 * 105.0 * (1 << 20));
    CHILD_REQUIRE(strcmp(counts.version, "hwloc 2.9.0") == 0);
    dw_machine *m = NULL;
    CHILD_REQUIRE(dw_machine_probe(0, &m) == DW_OK);
    CHILD_REQUIRE(m->cpu.packages == 2 && m->cpu.cores == 112);
    CHILD_REQUIRE(strcmp(m->cpu.source, "hwloc 2.9.0") == 0);
    dw_machine_destroy(m);
}

static void each_allocation_fails(void *unused) {
    dw__machine_options options = {.root = root};
    (void)unused;
    load_fake_driver();
    load_fake_nvml();
    fake->devices = 2;
    nvml->gpus = 2;
    switched(2, 6, 2);
    cpus_and_memory();
    four_gpus_in_sys();
    for (int64_t left = 0;; left++) {
        dw_machine *m = NULL;
        dw_hardware *h = NULL;
        char *text = NULL;
        int64_t live = dw__memory_live();
        dw__memory_fail_once(left);
        dw_status status = dw__machine_probe(&options, &m);
        if (status == DW_OK) status = dw_machine_json(m, &text);
        if (status == DW_OK) status = dw_machine_hardware(m, &h);
        int64_t failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        dw_text_free(text);
        dw_hardware_destroy(h);
        dw_machine_destroy(m);
        CHILD_REQUIRE(dw__memory_live() == live);
        CHILD_REQUIRE(status == (failures ? DW_OUT_OF_MEMORY : DW_OK));
        if (failures == 0) break;
    }
}

/* ---- measuring -------------------------------------------------------------------------------- */

enum { COPY_BYTES = 1 << 20, MATRIX = 32 };
/* Sets the times that the fake driver's events report for every series. */
#define SERIES_SECONDS 1.5e-3

static int asked_of(const char *path, const char *name, int argument) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return -1;
    int (*ask)(int) = NULL;
    *(void **)&ask = dlsym(library, name);
    return ask ? ask(argument) : -1;
}

static dw_machine *measure(void) {
    static dw__machine_options options;
    dw_machine *machine = NULL;
    options = (dw__machine_options){
        .root = root, .measure = 1, .copy_bytes = COPY_BYTES, .matrix_size = MATRIX};
    if (dw__machine_probe(&options, &machine) != DW_OK) {
        fprintf(stderr, "probe: %s\n", dw_last_error());
        _exit(1);
    }
    return machine;
}

static bool is_measured(const dw_figure *figure, double value) {
    if (figure->kind == DW_FIGURE_MEASURED && fabs(figure->value - value) <= 1e-6 * value)
        return true;
    fprintf(stderr, "%g of kind %d; expected %g\n", figure->value, figure->kind, value);
    return false;
}

static void measured(void *unused) {
    (void)unused;
    setenv("DEEPWELL_CUBLASLT", FAKE_CUBLASLT, 1);
    setenv("DEEPWELL_NCCL", FAKE_NCCL, 1);
    load_fake_driver();
    load_fake_nvml();
    fake->devices = 3;
    fake->name = "NVIDIA H200";
    fake->current = 77; /* the caller's context */
    nvml->gpus = 3;
    switched(3, 6, 4);
    dw_machine *m = measure();
    for (int i = 0; i < m->remark_count; i++) fprintf(stderr, "%s\n", m->remarks[i]);
    CHILD_REQUIRE(m->remark_count == 0);
    double product = 2.0 * MATRIX * MATRIX * MATRIX;
    for (int i = 0; i < 3; i++) {
        const dw_machine_gpu *gpu = &m->gpus[i];
        CHILD_REQUIRE(is_measured(&gpu->copy_bandwidth, 2.0 * COPY_BYTES * 8 / SERIES_SECONDS));
        CHILD_REQUIRE(is_measured(&gpu->host_bandwidth, COPY_BYTES / 4 * 2 / SERIES_SECONDS));
        CHILD_REQUIRE(is_measured(&gpu->rate[DW_RATE_FP32], product * 2 / SERIES_SECONDS));
        CHILD_REQUIRE(is_measured(&gpu->rate[DW_RATE_TF32], product * 8 / SERIES_SECONDS));
        CHILD_REQUIRE(is_measured(&gpu->rate[DW_RATE_BF16], product * 16 / SERIES_SECONDS));
        CHILD_REQUIRE(is_measured(&gpu->rate[DW_RATE_FP8], product * 16 / SERIES_SECONDS));
        CHILD_REQUIRE(gpu->rate[DW_RATE_MXFP8].kind == DW_FIGURE_UNKNOWN);
    }
    CHILD_REQUIRE(m->bus_bandwidth.kind == DW_FIGURE_MEASURED && m->bus_bandwidth.value > 0);
    /* All memory is freed, and the caller's context is unchanged. */
    CHILD_REQUIRE(fake->memory == 0 && fake->current == 77);
    CHILD_REQUIRE(asked_of(FAKE_CUBLASLT, "fake_cublaslt_live", 0) == 0);
    CHILD_REQUIRE(asked_of(FAKE_CUBLASLT, "fake_cublaslt_multiplied", 14) == 3 * 6 * 16);
    CHILD_REQUIRE(asked_of(FAKE_NCCL, "fake_nccl_live", 0) == 0);
    CHILD_REQUIRE(asked_of(FAKE_NCCL, "fake_nccl_reduced", 0) == 6 * 8);
    dw_machine_destroy(m);
}

/* Formats that only Blackwell's tensor cores support. */
static void measured_on_blackwell(void *unused) {
    (void)unused;
    setenv("DEEPWELL_CUBLASLT", FAKE_CUBLASLT, 1);
    load_fake_driver();
    load_fake_nvml();
    fake->capability = 100;
    dw_machine *m = measure();
    double product = 2.0 * MATRIX * MATRIX * MATRIX;
    for (int i = 0; i < m->remark_count; i++) fprintf(stderr, "%s\n", m->remarks[i]);
    CHILD_REQUIRE(m->remark_count == 0);
    CHILD_REQUIRE(is_measured(&m->gpus[0].rate[DW_RATE_FP8], product * 16 / SERIES_SECONDS));
    CHILD_REQUIRE(is_measured(&m->gpus[0].rate[DW_RATE_MXFP8], product * 16 / SERIES_SECONDS));
    CHILD_REQUIRE(is_measured(&m->gpus[0].rate[DW_RATE_FP4], product * 32 / SERIES_SECONDS));
    CHILD_REQUIRE(asked_of(FAKE_CUBLASLT, "fake_cublaslt_multiplied", 28) == 2 * 6 * 16);
    CHILD_REQUIRE(asked_of(FAKE_CUBLASLT, "fake_cublaslt_multiplied", 33) == 6 * 32);
    CHILD_REQUIRE(asked_of(FAKE_CUBLASLT, "fake_cublaslt_live", 0) == 0 && fake->memory == 0);
    dw_machine_destroy(m);
}

/* Each failure is a remark; the rest is measured, and earlier values stay. */
static void some_not_measured(void *unused) {
    static const char *const failing[] = {"cuMemAlloc_v2", "cuMemAllocHost_v2",
                                          "cuEventElapsedTime", "cuStreamCreate",
                                          "cuMemcpyHtoDAsync_v2"};
    (void)unused;
    setenv("DEEPWELL_CUBLASLT", FAKE_CUBLASLT, 1);
    load_fake_driver();
    load_fake_nvml();
    fake->name = "NVIDIA H200";
    for (size_t i = 0; i < DW_COUNT(failing); i++) {
        fake->failing = failing[i];
        fake->result = 2;
        dw_machine *m = measure();
        CHILD_REQUIRE(has_remark(m, "not measured: ") && has_remark(m, "out of memory"));
        CHILD_REQUIRE(m->gpus[0].copy_bandwidth.kind == DW_FIGURE_UNKNOWN);
        CHILD_REQUIRE(m->gpus[0].rate[DW_RATE_FP4].kind == DW_FIGURE_UNKNOWN);
        /* The CPU has no tensor cores, so only memory is measured. */
        bool products = strcmp(failing[i], "cuMemAllocHost_v2") == 0;
        CHILD_REQUIRE((m->gpus[0].rate[DW_RATE_BF16].kind == DW_FIGURE_MEASURED) == products);
        CHILD_REQUIRE(m->gpus[0].rate[DW_RATE_BF16].value > 0);
        CHILD_REQUIRE(fake->memory == 0);
        dw_machine_destroy(m);
    }
}

static void libraries_missing(void *unused) {
    (void)unused;
    setenv("DEEPWELL_CUBLASLT", "/nowhere/libcublasLt.so", 1);
    setenv("DEEPWELL_NCCL", "/nowhere/libnccl.so", 1);
    load_fake_driver();
    load_fake_nvml();
    fake->devices = 2;
    nvml->gpus = 2;
    dw_machine *m = measure();
    CHILD_REQUIRE(has_remark(m, "GEMMs of GPU 1: cuBLASLt (libcublasLt.so.13 or .12) was not "
                                "found"));
    CHILD_REQUIRE(has_remark(m, "the all-reduce: NCCL (libnccl.so.2) was not found"));
    CHILD_REQUIRE(m->gpus[1].copy_bandwidth.kind == DW_FIGURE_MEASURED);
    CHILD_REQUIRE(m->bus_bandwidth.kind == DW_FIGURE_UNKNOWN);
    dw_machine_destroy(m);
}

static void nothing_to_measure(void *unused) {
    (void)unused;
    if (dlopen("libcuda.so.1", RTLD_NOW)) _exit(0);
    dw_machine *m = measure();
    CHILD_REQUIRE(has_remark(m, "nothing was measured: there is no GPU"));
    dw_machine_destroy(m);
}

static void run(void (*check)(void *)) {
    make_root();
    expect_child(start_child(check, NULL));
    remove_folder(root);
}

#define MACHINE(name)                                                                              \
    static void test_##name(void **state) {                                                        \
        (void)state;                                                                               \
        run(name);                                                                                 \
    }
#define MACHINES(X)                                                                                \
    X(no_gpu)                                                                                      \
    X(here)                                                                                        \
    X(nothing_at_all)                                                                              \
    X(eight_h200)                                                                                  \
    X(paths)                                                                                       \
    X(tray_of_nvl72)                                                                               \
    X(two_by_pcie)                                                                                 \
    X(bridged_pairs)                                                                               \
    X(unknown_gpu)                                                                                 \
    X(without_nvml)                                                                                \
    X(known_without_nvml)                                                                          \
    X(several_kinds)                                                                               \
    X(nvml_that_refuses)                                                                           \
    X(with_hwloc)                                                                                  \
    X(each_allocation_fails)                                                                       \
    X(measured)                                                                                    \
    X(measured_on_blackwell)                                                                       \
    X(some_not_measured)                                                                           \
    X(libraries_missing)                                                                           \
    X(nothing_to_measure)
MACHINES(MACHINE)

int main(void) {
#define TEST(name) cmocka_unit_test(test_##name),
    const struct CMUnitTest tests[] = {MACHINES(TEST)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
