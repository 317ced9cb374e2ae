/* See fake_nvml.h. Signatures and structures are NVML's, from its documentation; a real one is never linked. */
#include "fake_nvml.h"
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, VERSION_MISMATCH = 25 };

static fake_nvml state = {.gpus = 1,
                          .pcie_generation = 5,
                          .pcie_lanes = 16,
                          .milliwatts = 700000,
                          .memory = 151523426304ull};

API fake_nvml *fake_nvml_state(void);
API fake_nvml *fake_nvml_state(void) { return &state; }

static unsigned index_of(const void *device) { return (unsigned)(uintptr_t)device - 1; }

API int nvmlInit_v2(void) { return state.refuse ? 9 : OK; }
API int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = state.gpus;
    return OK;
}
API int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
    snprintf(text, bytes, "580.95.05");
    return OK;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    unsigned domain, bus, slot;
    if (sscanf(address, "%x:%x:%x.0", &domain, &bus, &slot) != 3) return INVALID;
    if (domain != 0 || slot != 0 || bus < 0x10 || bus >= 0x10 + state.gpus) return NOT_FOUND;
    *device = (void *)(uintptr_t)(bus - 0x10 + 1);
    return OK;
}
API int nvmlDeviceGetUUID(void *device, char *text, unsigned bytes) {
    snprintf(text, bytes, "GPU-%08x-0000-0000-0000-000000000000", index_of(device));
    return OK;
}
API int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    (void)device;
    memory[0] = state.memory;
    memory[1] = memory[2] = state.memory / 2;
    return OK;
}
API int nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned *megahertz) {
    (void)device;
    *megahertz = type == 1 ? 1980 : 3201;
    return type == 1 || type == 2 ? OK : INVALID;
}
API int nvmlDeviceGetMemoryBusWidth(void *device, unsigned *bits) {
    (void)device;
    *bits = 6144;
    return OK;
}
API int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *milliwatts) {
    (void)device;
    *milliwatts = state.milliwatts;
    return OK;
}
API int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *generation) {
    (void)device;
    *generation = state.pcie_generation;
    return state.pcie_generation ? OK : NOT_SUPPORTED;
}
API int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) {
    (void)device;
    *lanes = state.pcie_lanes;
    return OK;
}

static const fake_nvml_link *link_of(const void *device, unsigned link) {
    return link < FAKE_NVML_LINKS ? &state.links[index_of(device)][link] : NULL;
}
API int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active) {
    if (!link_of(device, link)) return INVALID;
    *active = link_of(device, link)->active;
    return OK;
}
API int nvmlDeviceGetNvLinkVersion(void *device, unsigned link, unsigned *version) {
    if (!link_of(device, link)) return INVALID;
    *version = link_of(device, link)->version;
    return OK;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) {
    if (!link_of(device, link)) return INVALID;
    *type = link_of(device, link)->type;
    return OK;
}
typedef struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char address[32];
} pci_info;
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_info *pci) {
    const fake_nvml_link *of = link_of(device, link);
    if (!of) return INVALID;
    memset(pci, 0, sizeof *pci);
    pci->domain = of->domain;
    pci->bus = of->bus;
    snprintf(pci->address, sizeof pci->address, "%08X:%02X:00.0", of->domain, of->bus);
    return OK;
}

typedef struct fabric_info { /* nvmlGpuFabricInfo_v2_t */
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
} fabric_info;
API int nvmlDeviceGetGpuFabricInfoV(void *device, fabric_info *fabric) {
    (void)device;
    if (fabric->version != (36u | 2u << 24)) return VERSION_MISMATCH;
    memset(fabric->cluster, state.fabric_state == 3 ? 0xAB : 0, sizeof fabric->cluster);
    fabric->status = OK;
    fabric->clique = 7;
    fabric->state = (unsigned char)state.fabric_state;
    fabric->health = 0;
    return state.fabric_state ? OK : NOT_SUPPORTED;
}
