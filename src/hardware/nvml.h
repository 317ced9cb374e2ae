/* NVIDIA's management library, libnvidia-ml.so.1, which comes with the driver and is loaded at first use.
 *
 * Prototypes and structures are the part of NVML's binary interface that is called here. NVML reports what CUDA does
 * not: NVLinks and their ends, PCIe generations, power, the fabric of a rack. Every function except the first two may
 * be missing in an older library. */
#ifndef DW_NVML_H
#define DW_NVML_H

#include <stdint.h>

typedef void *dw__nvml_device;

enum { DW__NVML_CLOCK_SM = 1, DW__NVML_CLOCK_MEMORY = 2 };
enum { /* nvmlIntNvLinkDeviceType_t */
       DW__NVML_REMOTE_GPU = 0,
       DW__NVML_REMOTE_CPU = 1,
       DW__NVML_REMOTE_SWITCH = 2,
};
enum { DW__NVML_MOST_LINKS = 36, DW__NVML_FABRIC_COMPLETED = 3 };

typedef struct dw__nvml_pci { /* nvmlPciInfo_t */
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char address[32];
} dw__nvml_pci;

typedef struct dw__nvml_memory { /* nvmlMemory_t */
    unsigned long long total, free, used;
} dw__nvml_memory;

typedef struct dw__nvml_fabric { /* nvmlGpuFabricInfo_v2_t */
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
} dw__nvml_fabric;
#define DW__NVML_FABRIC_VERSION ((unsigned)sizeof(dw__nvml_fabric) | 2u << 24)

/* member, name in the library, parameters; all return 0 on success */
#define DW_NVML_FUNCTIONS(X)                                                                       \
    X(init, nvmlInit_v2, (void))                                                                   \
    X(by_address, nvmlDeviceGetHandleByPciBusId_v2,                                                \
      (const char *address, dw__nvml_device *device))                                              \
    X(count, nvmlDeviceGetCount_v2, (unsigned *count))                                             \
    X(driver_version, nvmlSystemGetDriverVersion, (char *text, unsigned bytes))                    \
    X(uuid, nvmlDeviceGetUUID, (dw__nvml_device device, char *text, unsigned bytes))               \
    X(memory, nvmlDeviceGetMemoryInfo, (dw__nvml_device device, dw__nvml_memory * memory))         \
    X(most_clock, nvmlDeviceGetMaxClockInfo,                                                       \
      (dw__nvml_device device, int type, unsigned *megahertz))                                     \
    X(bus_bits, nvmlDeviceGetMemoryBusWidth, (dw__nvml_device device, unsigned *bits))             \
    X(power_limit, nvmlDeviceGetPowerManagementLimit,                                              \
      (dw__nvml_device device, unsigned *milliwatts))                                              \
    X(pcie_generation, nvmlDeviceGetMaxPcieLinkGeneration,                                         \
      (dw__nvml_device device, unsigned *generation))                                              \
    X(pcie_lanes, nvmlDeviceGetMaxPcieLinkWidth, (dw__nvml_device device, unsigned *lanes))        \
    X(link_state, nvmlDeviceGetNvLinkState, (dw__nvml_device device, unsigned link, int *active))  \
    X(link_version, nvmlDeviceGetNvLinkVersion,                                                    \
      (dw__nvml_device device, unsigned link, unsigned *version))                                  \
    X(link_remote, nvmlDeviceGetNvLinkRemotePciInfo_v2,                                            \
      (dw__nvml_device device, unsigned link, dw__nvml_pci *pci))                                  \
    X(link_remote_type, nvmlDeviceGetNvLinkRemoteDeviceType,                                       \
      (dw__nvml_device device, unsigned link, int *type))                                          \
    X(fabric, nvmlDeviceGetGpuFabricInfoV, (dw__nvml_device device, dw__nvml_fabric * fabric))

typedef struct dw__nvml {
#define DW_NVML_MEMBER(member, name, parameters) int(*member) parameters;
    DW_NVML_FUNCTIONS(DW_NVML_MEMBER)
#undef DW_NVML_MEMBER
} dw__nvml;

/* Returns NULL if the library is missing or does not start. The answer does not change while the process runs. */
const dw__nvml *dw__nvml_library(void);

#endif
