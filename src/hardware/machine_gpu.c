/* GPUs: those that CUDA shows to this process, with NVML's information on each. */
#include "device/cuda_driver.h"
#include "hardware/machine_internal.h"
#include "hardware/nvml.h"
#include <stdio.h>
#include <string.h>

#define READ(number, from) ((dw_figure){(number), DW_FIGURE_READ, from})
#define ESTIMATE(number, from) ((dw_figure){(number), DW_FIGURE_ESTIMATED, from})
#define NOTHING ((dw_figure){.source = ""})

/* ---- figures known for a kind of GPU --------------------------------------------------------- */

/* Driver names of GPUs whose published figures are in the catalogue. */
static const struct {
    const char *name, *profile;
} known[] = {
    {"Tesla V100-SXM3-32GB", "v100"},  {"NVIDIA A100-SXM4-40GB", "a100-40"},
    {"A100-SXM4-40GB", "a100-40"},     {"NVIDIA A100-SXM4-80GB", "a100-80"},
    {"NVIDIA H100 80GB HBM3", "h100"}, {"NVIDIA H200", "h200"},
    {"NVIDIA GH200 480GB", "gh200"},   {"NVIDIA B200", "b200"},
    {"NVIDIA B300 SXM6 AC", "b300"},   {"NVIDIA GB200", "gb200"},
    {"NVIDIA GB300", "gb300"},         {"NVIDIA GeForce RTX 5090", "rtx5090"},
    {"NVIDIA L40S", "l40s"},
};

static const char *profile_of(const char *name) {
    for (size_t i = 0; i < DW_COUNT(known); i++)
        if (strcmp(known[i].name, name) == 0) return known[i].profile;
    return "";
}

/* Dense FLOP per SM and clock, from the architectures' white papers. GeForce reaches half of the rates between TF32
 * and FP8 if it accumulates in FP32. */
static const struct {
    int capability, rate[DW_RATES];
} sm_rates[] = {
    {70, {[DW_RATE_FP32] = 128, [DW_RATE_BF16] = 1024}},
    {75, {[DW_RATE_FP32] = 128, [DW_RATE_BF16] = 1024}},
    {80, {[DW_RATE_FP32] = 128, [DW_RATE_TF32] = 1024, [DW_RATE_BF16] = 2048}},
    {86, {[DW_RATE_FP32] = 256, [DW_RATE_TF32] = 512, [DW_RATE_BF16] = 1024}},
    {89, {[DW_RATE_FP32] = 256, [DW_RATE_TF32] = 512, [DW_RATE_BF16] = 1024, [DW_RATE_FP8] = 2048}},
    {90,
     {[DW_RATE_FP32] = 256, [DW_RATE_TF32] = 2048, [DW_RATE_BF16] = 4096, [DW_RATE_FP8] = 8192}},
    {100,
     {[DW_RATE_FP32] = 256,
      [DW_RATE_TF32] = 4096,
      [DW_RATE_BF16] = 8192,
      [DW_RATE_FP8] = 16384,
      [DW_RATE_MXFP8] = 16384,
      [DW_RATE_FP4] = 32768}},
    {103,
     {[DW_RATE_FP32] = 256,
      [DW_RATE_TF32] = 4096,
      [DW_RATE_BF16] = 8192,
      [DW_RATE_FP8] = 16384,
      [DW_RATE_MXFP8] = 16384,
      [DW_RATE_FP4] = 49152}},
    {120,
     {[DW_RATE_FP32] = 256,
      [DW_RATE_TF32] = 512,
      [DW_RATE_BF16] = 1024,
      [DW_RATE_FP8] = 2048,
      [DW_RATE_MXFP8] = 2048,
      [DW_RATE_FP4] = 4096}},
};
static const int plain_processor[DW_RATES] = {[DW_RATE_FP32] = 128, [DW_RATE_BF16] = 128};

static const int *processor_of(int capability) {
    if (capability == 121) capability = 120;
    if (capability == 87) capability = 86;
    for (size_t i = 0; i < DW_COUNT(sm_rates); i++)
        if (sm_rates[i].capability == capability) return sm_rates[i].rate;
    return plain_processor;
}

static void estimate_rates(dw_machine_gpu *gpu) {
    const int *per_clock = processor_of(gpu->capability);
    bool halved = strstr(gpu->name, "GeForce") != NULL;
    for (int i = 0; i < DW_RATES; i++) {
        double rate = per_clock[i] * gpu->sm_count.value * gpu->clock.value;
        if (halved && i > DW_RATE_FP32 && i < DW_RATE_FP4) rate /= 2;
        gpu->rate[i] =
            rate > 0
                ? ESTIMATE(rate, "SMs, their highest clock and the operations of an SM per clock")
                : NOTHING;
    }
}

static void use_profile(dw_machine_gpu *gpu) {
    const dw_hardware *profile = dw__hardware_profile(gpu->profile);
    if (!profile) {
        gpu->profile = "";
        estimate_rates(gpu);
        return;
    }
    memcpy(gpu->rate, profile->rate, sizeof gpu->rate);
    if (gpu->memory_bandwidth.value == 0) gpu->memory_bandwidth = profile->memory_bandwidth;
    /* Beside a Grace CPU the link to the host is NVLink-C2C, not PCI Express. */
    if (profile->host_bandwidth.value > 2e11) gpu->host_bandwidth = profile->host_bandwidth;
}

/* Bytes per second of a lane in one direction: 8b/10b encoding, then 128b/130b, then flits with FEC. */
static double lane_bandwidth(int generation) {
    static const double lanes[] = {
        0, 0.25e9, 0.5e9, 8e9 / 8 * 128 / 130, 2e9 * 128 / 130, 4e9 * 128 / 130, 8e9 * 242 / 256};
    return generation > 0 && generation < (int)DW_COUNT(lanes) ? lanes[generation] : 0;
}

/* Writes a name such as "sm_90a": the architecture-specific form, if it exists. */
static dw_status name_architecture(dw__machine *m, dw_machine_gpu *gpu) {
    char text[32];
    int capability = gpu->capability;
    snprintf(text, sizeof text, "sm_%d%s", capability, capability >= 90 ? "a" : "");
    DW_RETURN_IF_FAILED(dw__machine_text(m, text, &gpu->architecture));
    gpu->blackwell = "";
    if (capability < 100 || capability >= 130) return DW_OK;
    snprintf(text, sizeof text, "sm_%d", capability);
    return dw__machine_text(m, text, &gpu->blackwell);
}

/* ---- the driver ------------------------------------------------------------------------------ */

static int attribute(const dw__cuda *cuda, int which, int device) {
    int value = 0;
    return cuda->device_attribute(&value, which, device) == 0 ? value : 0;
}

static dw_figure read_or_nothing(double value, const char *source) {
    return value > 0 ? READ(value, source) : NOTHING;
}

static dw_status read_device(dw__machine *m, const dw__cuda *cuda, int device,
                             dw_machine_gpu *gpu) {
    static const char driver[] = "the CUDA driver";
    char name[256] = "", bus[32] = "";
    size_t bytes = 0;
    int pci_domain, pci_bus, pci_device;
    if (cuda->device_name(name, sizeof name, device) != 0) name[0] = '\0';
    if (cuda->device_memory(&bytes, device) != 0) bytes = 0;
    if (cuda->device_attribute(&pci_domain, DW_CU_DEVICE_PCI_DOMAIN, device) == 0 &&
        cuda->device_attribute(&pci_bus, DW_CU_DEVICE_PCI_BUS, device) == 0 &&
        cuda->device_attribute(&pci_device, DW_CU_DEVICE_PCI_DEVICE, device) == 0)
        snprintf(bus, sizeof bus, "%04x:%02x:%02x.0", (unsigned)pci_domain, (unsigned)pci_bus,
                 (unsigned)pci_device);
    *gpu = (dw_machine_gpu){
        .uuid = "",
        .profile = profile_of(name),
        .capability = 10 * attribute(cuda, DW_CU_DEVICE_CAPABILITY_MAJOR, device) +
                      attribute(cuda, DW_CU_DEVICE_CAPABILITY_MINOR, device),
        .memory_bus_bits = attribute(cuda, DW_CU_DEVICE_MEMORY_BUS_WIDTH, device),
        .pcie_generation = -1,
        .pcie_lanes = -1,
        .numa_node = dw__machine_numa_of(m, bus),
        .sm_count = read_or_nothing(attribute(cuda, DW_CU_DEVICE_SM_COUNT, device), driver),
        .clock = read_or_nothing(1e3 * attribute(cuda, DW_CU_DEVICE_CLOCK_RATE, device), driver),
        .memory_clock =
            read_or_nothing(1e3 * attribute(cuda, DW_CU_DEVICE_MEMORY_CLOCK_RATE, device), driver),
        .memory = read_or_nothing((double)bytes, driver),
        .cache = read_or_nothing(attribute(cuda, DW_CU_DEVICE_L2_BYTES, device), driver),
        .memory_bandwidth = NOTHING,
        .power = NOTHING,
        .link_bandwidth = NOTHING,
        .host_bandwidth = NOTHING,
        .copy_bandwidth = NOTHING,
    };
    DW_RETURN_IF_FAILED(dw__machine_text(m, name, &gpu->name));
    DW_RETURN_IF_FAILED(dw__machine_text(m, bus, &gpu->bus));
    return name_architecture(m, gpu);
}

/* ---- NVML ------------------------------------------------------------------------------------ */

static double number_of(int (*read)(dw__nvml_device device, unsigned *value),
                        dw__nvml_device device) {
    unsigned value = 0;
    return read && read(device, &value) == 0 ? value : 0;
}

static double clock_of(const dw__nvml *nvml, dw__nvml_device device, int type) {
    unsigned megahertz = 0;
    if (!nvml->most_clock || nvml->most_clock(device, type, &megahertz) != 0) return 0;
    return 1e6 * megahertz;
}

/* Adds what CUDA does not report, or no longer reports in later versions. */
static dw_status add_nvml(dw__machine *m, const dw__nvml *nvml, dw_machine_gpu *gpu) {
    dw__nvml_device device;
    dw__nvml_memory memory;
    char uuid[96] = "";
    if (!nvml || !*gpu->bus || nvml->by_address(gpu->bus, &device) != 0) return DW_OK;
    if (nvml->uuid && nvml->uuid(device, uuid, sizeof uuid) == 0)
        DW_RETURN_IF_FAILED(dw__machine_text(m, uuid, &gpu->uuid));
    /* NVML and nvidia-smi report the larger total, since the driver reserves a part. In a MIG slice CUDA reports the
     * slice. */
    if (nvml->memory && nvml->memory(device, &memory) == 0 && gpu->memory.value > 0 &&
        (double)memory.total < 1.05 * gpu->memory.value)
        gpu->memory = READ((double)memory.total, "NVML");
    gpu->power = read_or_nothing(number_of(nvml->power_limit, device) / 1e3, "NVML: its limit");
    if (gpu->clock.value == 0)
        gpu->clock = read_or_nothing(clock_of(nvml, device, DW__NVML_CLOCK_SM), "NVML");
    if (gpu->memory_clock.value == 0)
        gpu->memory_clock = read_or_nothing(clock_of(nvml, device, DW__NVML_CLOCK_MEMORY), "NVML");
    if (gpu->memory_bus_bits == 0) gpu->memory_bus_bits = (int)number_of(nvml->bus_bits, device);
    double generation = number_of(nvml->pcie_generation, device);
    double lanes = number_of(nvml->pcie_lanes, device);
    if (generation > 0) gpu->pcie_generation = (int)generation;
    if (lanes > 0) gpu->pcie_lanes = (int)lanes;
    gpu->host_bandwidth =
        read_or_nothing(lane_bandwidth((int)generation) * lanes, "NVML: PCI Express, its lanes");
    return DW_OK;
}

/* A GPU of a rack reports that it belongs to one, but not the number of GPUs. */
static dw_status read_fabric(dw__machine *m, const dw__nvml *nvml) {
    static const unsigned char none[16];
    for (size_t i = 0; nvml && nvml->fabric && i < m->gpus.count; i++) {
        dw__nvml_device device;
        dw__nvml_fabric fabric = {.version = DW__NVML_FABRIC_VERSION};
        if (nvml->by_address(m->gpus.items[i].bus, &device) != 0 ||
            nvml->fabric(device, &fabric) != 0 || fabric.state != DW__NVML_FABRIC_COMPLETED ||
            memcmp(fabric.cluster, none, sizeof none) == 0)
            continue;
        m->public.fabric = "completed";
        return dw__machine_remark(m,
                                  "NVLink joins this machine to others of its rack (clique %u); "
                                  "their number of GPUs cannot be read here",
                                  fabric.clique);
    }
    return DW_OK;
}

static dw_status read_versions(dw__machine *m, const dw__cuda *cuda, const dw__nvml *nvml) {
    char text[96];
    snprintf(text, sizeof text, "%d.%d", cuda->version / 1000, cuda->version % 1000 / 10);
    DW_RETURN_IF_FAILED(dw__machine_text(m, text, &m->public.cuda));
    if (!nvml)
        return dw__machine_remark(
            m,
            "NVML (libnvidia-ml.so.1) was not found: NVLinks, PCI Express and power are unknown");
    if (nvml->driver_version && nvml->driver_version(text, sizeof text) == 0)
        DW_RETURN_IF_FAILED(dw__machine_text(m, text, &m->public.driver));
    unsigned all = 0;
    if (nvml->count && nvml->count(&all) == 0 && (int)all > cuda->devices)
        return dw__machine_remark(m,
                                  "%d of the machine's %u GPUs are shown to this process: see "
                                  "CUDA_VISIBLE_DEVICES",
                                  cuda->devices, all);
    return DW_OK;
}

dw_status dw__machine_read_gpus(dw__machine *m) {
    const dw__cuda *cuda = NULL;
    if (dw__cuda_driver(&cuda) != DW_OK)
        return dw__machine_remark(m, "no GPU: %s", dw_last_error());
    const dw__nvml *nvml = dw__nvml_library();
    for (int i = 0; i < cuda->devices; i++) {
        dw_machine_gpu gpu;
        int device;
        if (cuda->device_get(&device, i) != 0) continue;
        DW_RETURN_IF_FAILED(read_device(m, cuda, device, &gpu));
        DW_RETURN_IF_FAILED(add_nvml(m, nvml, &gpu));
        if (gpu.memory_clock.value > 0 && gpu.memory_bus_bits > 0)
            gpu.memory_bandwidth = READ(2 * gpu.memory_clock.value * gpu.memory_bus_bits / 8,
                                        "twice the memory's clock, times the width of its bus");
        use_profile(&gpu);
        DW_RETURN_IF_FAILED(DW_PUSH(&m->gpus, gpu));
    }
    DW_RETURN_IF_FAILED(read_versions(m, cuda, nvml));
    for (size_t i = 1; i < m->gpus.count; i++)
        if (strcmp(m->gpus.items[i].name, m->gpus.items[0].name) != 0) {
            DW_RETURN_IF_FAILED(dw__machine_remark(
                m, "the GPUs are of several kinds; plans use only the most frequent kind"));
            break;
        }
    return read_fabric(m, nvml);
}

/* ---- NVLink ---------------------------------------------------------------------------------- */

/* NVML numbers the versions 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0 in this order. Some drivers report 5.0 for an H100, so
 * the version is limited to the architecture's. */
static int version_of(unsigned number, int capability) {
    static const int versions[] = {0, 1, 2, 2, 3, 3, 4, 5};
    int most = capability >= 100 ? 5 : capability >= 90 ? 4 : capability >= 80 ? 3 : 2;
    int version = number < DW_COUNT(versions) ? versions[number] : most;
    return version < most ? version : most;
}

/* Bytes per second of one link in one direction, by NVIDIA's figure for each version. */
static double link_bandwidth(int version) {
    static const double links[] = {0, 20e9, 25e9, 25e9, 25e9, 50e9};
    return version > 0 && version < (int)DW_COUNT(links) ? links[version] : 0;
}

static int gpu_at(const dw__machine *m, const char *bus) {
    for (size_t i = 0; i < m->gpus.count; i++)
        if (*bus && strcmp(m->gpus.items[i].bus, bus) == 0) return (int)i;
    return -1;
}

/* NVML writes "00000000:1B:00.0" for "0000:1b:00.0" in /sys. */
static void plain_address(const dw__nvml_pci *pci, char bus[32]) {
    snprintf(bus, 32, "%04x:%02x:%02x.0", pci->domain, pci->bus, pci->device);
}

static const char *end_of(const dw__nvml *nvml, dw__nvml_device device, unsigned link, int peer) {
    int type = -1;
    if (peer >= 0) return "gpu";
    if (!nvml->link_remote_type || nvml->link_remote_type(device, link, &type) != 0)
        return "unknown";
    return type == DW__NVML_REMOTE_SWITCH ? "switch"
           : type == DW__NVML_REMOTE_CPU  ? "cpu"
           : type == DW__NVML_REMOTE_GPU  ? "gpu"
                                          : "unknown";
}

static dw_status add_link(dw__machine *m, const dw__nvml *nvml, dw__nvml_device device, int gpu,
                          unsigned number) {
    dw__nvml_pci pci = {0};
    dw_machine_link link = {.gpu = gpu, .link = (int)number, .peer = -1, .to_bus = ""};
    unsigned version = 0;
    char bus[32] = "";
    if (nvml->link_version && nvml->link_version(device, number, &version) != 0) version = 0;
    link.version = version_of(version, m->gpus.items[gpu].capability);
    if (nvml->link_remote && nvml->link_remote(device, number, &pci) == 0) {
        plain_address(&pci, bus);
        link.peer = gpu_at(m, bus);
        DW_RETURN_IF_FAILED(dw__machine_text(m, bus, &link.to_bus));
    }
    link.to = end_of(nvml, device, number, link.peer);
    double bandwidth = link_bandwidth(link.version);
    link.bandwidth = bandwidth > 0 ? (dw_figure){bandwidth, DW_FIGURE_PUBLISHED,
                                                 "NVIDIA's figure for the version of the link"}
                                   : NOTHING;
    return DW_PUSH(&m->links, link);
}

static void count_links(dw__machine *m) {
    for (size_t i = 0; i < m->links.count; i++) {
        const dw_machine_link *link = &m->links.items[i];
        dw_machine_gpu *gpu = &m->gpus.items[link->gpu];
        gpu->links++;
        if (link->version > gpu->link_version) gpu->link_version = link->version;
        if (strcmp(link->to, "cpu") == 0) continue;
        gpu->link_bandwidth =
            (dw_figure){gpu->link_bandwidth.value + link->bandwidth.value, DW_FIGURE_PUBLISHED,
                        "the links that are up, by NVIDIA's figure for each"};
    }
}

/* Counts distinct switches. Those of a rack may share one address, or have none. */
static void count_switches(dw__machine *m) {
    for (size_t i = 0; i < m->links.count; i++) {
        const dw_machine_link *link = &m->links.items[i];
        bool seen = strcmp(link->to, "switch") != 0;
        for (size_t j = 0; j < i && !seen; j++)
            seen = strcmp(m->links.items[j].to, "switch") == 0 &&
                   strcmp(m->links.items[j].to_bus, link->to_bus) == 0;
        m->public.switches += !seen;
    }
}

dw_status dw__machine_read_links(dw__machine *m) {
    const dw__nvml *nvml = m->gpus.count > 0 ? dw__nvml_library() : NULL;
    for (size_t i = 0; nvml && nvml->link_state && i < m->gpus.count; i++) {
        dw__nvml_device device;
        if (!*m->gpus.items[i].bus || nvml->by_address(m->gpus.items[i].bus, &device) != 0)
            continue;
        for (unsigned number = 0; number < DW__NVML_MOST_LINKS; number++) {
            int active = 0;
            if (nvml->link_state(device, number, &active) != 0 || !active) continue;
            DW_RETURN_IF_FAILED(add_link(m, nvml, device, (int)i, number));
        }
    }
    count_links(m);
    count_switches(m);
    return DW_OK;
}
