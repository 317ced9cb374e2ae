/* Replaces libnvidia-ml.so.1: a management library without GPUs. Its GPUs are the fake driver's, at 0000:10:00.0,
 * 0000:11:00.0, ... */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

enum { FAKE_NVML_GPUS = 16, FAKE_NVML_LINKS = 18 };

typedef struct fake_nvml_link {
    int active, type;     /* type: 0 a GPU, 2 a switch, 255 unknown */
    unsigned version;     /* NVML's enumeration: 6 is 4.0, 7 is 5.0 */
    unsigned domain, bus; /* of the other end */
} fake_nvml_link;

typedef struct fake_nvml {
    int refuse; /* nvmlInit fails */
    unsigned gpus, pcie_generation, pcie_lanes, milliwatts;
    unsigned long long memory;
    int fabric_state; /* 3: completed */
    fake_nvml_link links[FAKE_NVML_GPUS][FAKE_NVML_LINKS];
} fake_nvml;

/* fake_nvml *fake_nvml_state(void): exported by the library. */
#endif
