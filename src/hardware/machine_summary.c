/* The summary of a machine for plans: one kind of GPU with its figures. */
#include "hardware/machine_internal.h"
#include <string.h>

#define NOTHING ((dw_figure){.source = ""})
#define ESTIMATE(number, from) ((dw_figure){(number), DW_FIGURE_ESTIMATED, from})

/* Among GPUs of several kinds, the most frequent kind counts. */
static int count_like(const dw_machine *m, int gpu) {
    int count = 0;
    for (int i = 0; i < m->gpu_count; i++) count += strcmp(m->gpus[i].name, m->gpus[gpu].name) == 0;
    return count;
}

static int commonest(const dw_machine *m) {
    int best = 0;
    for (int i = 1; i < m->gpu_count; i++)
        if (count_like(m, i) > count_like(m, best)) best = i;
    return best;
}

static bool is_switched(const dw_machine *m, int gpu) {
    for (int i = 0; i < m->link_count; i++)
        if (m->links[i].gpu == gpu && strcmp(m->links[i].to, "switch") == 0) return true;
    return false;
}

/* Returns whether a link joins two GPUs directly, or both through switches. */
static bool joins(const dw_machine *m, const dw_machine_link *link, int gpu) {
    return link->peer == gpu || (strcmp(link->to, "switch") == 0 && is_switched(m, gpu));
}

/* Returns the number of GPUs that NVLink connects to this one, directly or through others. */
static int domain_of(const dw_machine *m, int from) {
    enum { MOST = 64 };
    bool reached[MOST] = {false};
    int count = 1, before = 0;
    if (m->gpu_count > MOST) return 1;
    reached[from] = true;
    while (count > before) {
        before = count;
        for (int i = 0; i < m->link_count; i++)
            for (int gpu = 0; gpu < m->gpu_count && reached[m->links[i].gpu]; gpu++)
                if (!reached[gpu] && joins(m, &m->links[i], gpu)) reached[gpu] = true, count++;
    }
    return count;
}

/* Returns whether a port and a GPU are below the same PCI Express switch. */
static bool is_near(const dw_machine *m, int nic) {
    for (int i = 0; i < m->path_count; i++)
        if (m->paths[i].nic == nic &&
            (strcmp(m->paths[i].level, "PIX") == 0 || strcmp(m->paths[i].level, "PXB") == 0))
            return true;
    return false;
}

static bool is_rail(const dw_machine_nic *nic) {
    return nic->up && strcmp(nic->kind, "Ethernet") != 0;
}

/* Counts RDMA ports that are up. If some are beside a GPU, only those count, because the others are for storage.
 * Without RDMA the fastest Ethernet port counts. */
static void summarize_network(const dw_machine *m, const dw_hardware *profile, dw_hardware *h) {
    double all = 0, fastest = 0;
    int rails = 0;
    const char *kind = "";
    bool near = false;
    for (int i = 0; i < m->nic_count; i++) near |= is_rail(&m->nics[i]) && is_near(m, i);
    for (int i = 0; i < m->nic_count; i++) {
        const dw_machine_nic *nic = &m->nics[i];
        if (!nic->up) continue;
        if (is_rail(nic)) {
            if (near && !is_near(m, i)) continue;
            all += nic->bandwidth.value;
            kind = nic->kind;
            rails++;
        } else if (nic->bandwidth.value > fastest) {
            fastest = nic->bandwidth.value;
        }
    }
    h->network = rails ? kind : fastest > 0 ? "Ethernet" : "";
    h->rails = rails ? rails : fastest > 0;
    h->network_bandwidth = NOTHING;
    if (all > 0)
        h->network_bandwidth = ESTIMATE(all / h->gpus, "RDMA ports that are up, shared evenly");
    else if (fastest > 0)
        h->network_bandwidth = ESTIMATE(fastest / h->gpus, "the fastest Ethernet port, shared");
    else if (profile)
        h->network_bandwidth = ESTIMATE(profile->network_bandwidth.value,
                                        "usual beside such GPUs; no port is seen here");
    if (h->network_bandwidth.value > 0)
        h->network_latency = ESTIMATE(DW_LATENCY_NETWORK, DW_LATENCY_SOURCE);
}

static void summarize_links(const dw_machine *m, const dw_machine_gpu *gpu,
                            const dw_hardware *profile, dw_hardware *h) {
    int domain = gpu->links > 0 ? domain_of(m, (int)(gpu - m->gpus)) : 1;
    /* Falls back to single GPUs if some are of another kind or the domain does not divide their number. */
    if (domain > h->gpus || h->gpus % domain != 0) domain = 1;
    h->gpus_per_domain = domain;
    h->link_version = gpu->link_version;
    if (domain > 1) {
        h->link_bandwidth = gpu->link_bandwidth;
    } else if (gpu->host_bandwidth.value > 0) {
        h->link_bandwidth = ESTIMATE(gpu->host_bandwidth.value, "PCI Express, as to the host");
    } else if (profile && profile->link_bandwidth.value > 0 && m->gpu_count > 1) {
        /* Without NVML: the usual links of such GPUs. */
        h->link_bandwidth = ESTIMATE(profile->link_bandwidth.value, "usual between such GPUs");
        h->link_version = profile->link_version;
        if (profile->gpus_per_domain > 1) h->gpus_per_domain = domain = h->gpus;
    } else if (m->gpu_count > 1) {
        h->link_bandwidth = ESTIMATE(31.5e9, "not read; as PCI Express 4.0 with 16 lanes");
    }
    if (m->bus_bandwidth.value > 0) h->link_bandwidth = m->bus_bandwidth;
    if (h->link_bandwidth.value > 0)
        h->link_latency =
            ESTIMATE(domain > 1 ? DW_LATENCY_NVLINK : DW_LATENCY_PCIE, DW_LATENCY_SOURCE);
}

/* A machine sees only its own part of a rack, so the published size applies. */
static void summarize_rack(const dw_machine *m, const dw_hardware *profile, dw_hardware *h) {
    if (*m->fabric && profile && profile->gpus_per_domain > profile->gpus_per_node &&
        profile->gpus_per_domain % h->gpus_per_node == 0)
        h->gpus_per_domain = profile->gpus_per_domain;
}

void dw__machine_summary(const dw_machine *m, dw_hardware *h) {
    *h = (dw_hardware){.name = "", .architecture = "", .network = ""};
    for (int i = 0; i < DW_RATES; i++) h->rate[i] = NOTHING;
#define CLEAR(figure) h->figure = NOTHING;
    DW_HARDWARE_FIGURES(CLEAR)
#undef CLEAR
    if (m->gpu_count == 0) {
        h->name = m->cpu.model;
        h->architecture = m->cpu.architecture;
        h->host_memory = m->cpu.memory;
        return;
    }
    const dw_machine_gpu *gpu = &m->gpus[commonest(m)];
    const dw_hardware *profile = dw__hardware_profile(gpu->profile);
    h->name = *gpu->profile ? gpu->profile : gpu->name;
    h->architecture = gpu->architecture;
    h->capability = gpu->capability;
    h->gpus = h->gpus_per_node = count_like(m, (int)(gpu - m->gpus));
    memcpy(h->rate, gpu->rate, sizeof h->rate);
    h->sm_count = gpu->sm_count;
    h->clock = profile ? profile->clock : gpu->clock;
    h->power = gpu->power;
    h->memory = gpu->memory;
    h->memory_bandwidth = profile ? profile->memory_bandwidth : gpu->memory_bandwidth;
    if (gpu->copy_bandwidth.value > 0) h->memory_bandwidth = gpu->copy_bandwidth;
    h->cache = gpu->cache;
    h->host_bandwidth = gpu->host_bandwidth;
    h->host_memory = m->cpu.memory;
    h->host_memory.value /= h->gpus;
    if (profile) { /* figures of the node in which such GPUs are sold */
        h->host_memory_bandwidth = profile->host_memory_bandwidth;
        if (h->host_memory_bandwidth.value > 0) h->host_memory_bandwidth.kind = DW_FIGURE_ESTIMATED;
    }
    summarize_links(m, gpu, profile, h);
    summarize_network(m, profile, h);
    summarize_rack(m, profile, h);
}
