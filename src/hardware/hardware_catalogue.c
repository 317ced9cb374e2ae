/* Profiles by name: published figures, each with its source document.
 *
 * Vendors print GEMM rates with 2:4 sparsity beside dense ones, or alone. All rates here are dense (half of a sparse
 * figure) and with FP32 accumulation. Vendors print link bandwidths as the sum of both directions; here they are per
 * direction. `memory` is the total that nvidia-smi reports and programs see, which is above or below the round figure
 * of the name. A clock is the one at which the SMs reach the printed GEMM rate. Where the vendor prints none, it
 * follows from that rate, the number of SMs and the operations of an SM per clock. */
#include "hardware/hardware_internal.h"
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define P(number, from)                                                                            \
    { .value = (number), .kind = DW_FIGURE_PUBLISHED, .source = from }
#define E(number, from)                                                                            \
    { .value = (number), .kind = DW_FIGURE_ESTIMATED, .source = from }
/* Figures whose document was not consulted. docs/hardware.md lists these documents. */
#define U(number, from) E(number, from ", not consulted")
#define NONE                                                                                       \
    { .source = "" }
#define T 1e12
#define GB 1e9
#define MIB 1048576.0
#define GIB 1073741824.0

#define LATENCIES(link)                                                                            \
    .link_latency = E(link, DW_LATENCY_SOURCE),                                                    \
    .network_latency = E(DW_LATENCY_NETWORK, DW_LATENCY_SOURCE)
#define OVER_NVLINK LATENCIES(DW_LATENCY_NVLINK)
#define OVER_PCIE LATENCIES(DW_LATENCY_PCIE)

/* 16 lanes of 16 or 32 GT/s; 128 of 130 bits carry data. */
#define PCIE4 P(31.5 * GB, "PCI Express 4.0, 16 lanes")
#define PCIE5 P(63.0 * GB, "PCI Express 5.0, 16 lanes")

#define V100_SHEET "NVIDIA V100 data sheet"
#define DGX2_SHEET "NVIDIA DGX-2 data sheet"
#define A100_SHEET "NVIDIA A100 data sheet"
#define A100_PAPER "NVIDIA A100 architecture white paper"
#define DGX_A100_GUIDE "NVIDIA DGX A100 user guide"
#define H100_SHEET "NVIDIA H100 data sheet"
#define H100_PAPER "NVIDIA H100 architecture white paper"
#define DGX_H100_GUIDE "NVIDIA DGX H100/H200 user guide"
#define H200_SHEET "NVIDIA H200 data sheet"
#define GH200_SHEET "NVIDIA GH200 data sheet"
#define TITAN_PAPER "TorchTitan paper, arXiv:2410.06511"
#define TITAN_LOG "TorchTitan's logs: 94.99 GiB"
#define HGX_SHEET "NVIDIA HGX platform page: an eighth of the board"
#define DGX_B200_GUIDE "NVIDIA DGX B200 user guide"
#define DGX_B300_GUIDE "NVIDIA DGX B300 user guide"
#define GB200_SHEET "NVIDIA GB200 NVL72 data sheet: a 72nd of the rack"
#define GB300_SHEET "NVIDIA GB300 NVL72 data sheet: a 72nd of the rack"
#define GRACE_SHEET "NVIDIA Grace CPU data sheet: half of a CPU that serves two GPUs"
/* Bandwidth of the host's memory per GPU: channels of a CPU x 8 bytes x transfers per second. */
#define DGX2_HOST E(16 * GB, "two Xeon 8168, six channels of DDR4-2666 each, for 16 GPUs")
#define DGX_A100_HOST E(51.2 * GB, "two EPYC 7742, eight channels of DDR4-3200 each, for 8 GPUs")
#define DGX_H100_HOST E(76.8 * GB, "two Xeon 8480C, eight channels of DDR5-4800 each, for 8 GPUs")
#define DGX_B200_HOST E(89.6 * GB, "two Xeon 8570, eight channels of DDR5-5600 each, for 8 GPUs")
#define DGX_B300_HOST E(102.4 * GB, "two Xeon 6776P, eight channels of DDR5-6400 each, for 8 GPUs")
#define GRACE_480 "NVIDIA Grace CPU Superchip data sheet: 768 GB/s for 960 GB"
#define RTX_PAPER "NVIDIA RTX Blackwell architecture white paper"
#define L40S_SHEET "NVIDIA L40S data sheet"
#define ADA_PAPER "NVIDIA Ada architecture white paper"
#define MI300X_SHEET "AMD Instinct MI300X data sheet"
#define MI325X_SHEET "AMD Instinct MI325X data sheet"
#define CDNA3_PAPER "AMD CDNA 3 white paper"
#define DRIVER_SAYS "the driver on such a GPU"
#define SMI "nvidia-smi on such a GPU"
#define FROM_RATE "from the BF16 rate: 8,192 operations per SM and clock"
#define USUAL_NODE "usual for a node of eight"

/* SM rates of H100, H200 and GH200. */
#define HOPPER_RATES(F, sheet)                                                                     \
    .rate = {[DW_RATE_FP32] = F(66.9 * T, sheet),                                                  \
             [DW_RATE_TF32] = F(494.7 * T, sheet),                                                 \
             [DW_RATE_BF16] = F(989.4 * T, sheet),                                                 \
             [DW_RATE_FP8] = F(1978.9 * T, sheet),                                                 \
             [DW_RATE_MXFP8] = NONE,                                                               \
             [DW_RATE_FP4] = NONE},                                                                \
    .architecture = "sm_90a", .capability = 90, .sm_count = P(132, H100_PAPER),                    \
    .clock = P(1.83e9, H100_PAPER)
#define HOPPER_NODE                                                                                \
    .gpus = 8, .gpus_per_node = 8, .gpus_per_domain = 8, .link_version = 4, .rails = 8,            \
    .network = "InfiniBand NDR, 400 Gb/s for each GPU", .link_bandwidth = P(450 * GB, H100_SHEET), \
    .network_bandwidth = P(50 * GB, DGX_H100_GUIDE), .host_bandwidth = PCIE5,                      \
    .host_memory = P(256 * GIB, DGX_H100_GUIDE), .host_memory_bandwidth = DGX_H100_HOST,           \
    OVER_NVLINK

#define AMPERE_RATES                                                                               \
    .rate = {[DW_RATE_FP32] = P(19.5 * T, A100_SHEET),                                             \
             [DW_RATE_TF32] = P(156 * T, A100_SHEET),                                              \
             [DW_RATE_BF16] = P(312 * T, A100_SHEET),                                              \
             [DW_RATE_FP8] = NONE,                                                                 \
             [DW_RATE_MXFP8] = NONE,                                                               \
             [DW_RATE_FP4] = NONE},                                                                \
    .architecture = "sm_80", .capability = 80, .sm_count = P(108, A100_PAPER),                     \
    .clock = P(1.41e9, A100_PAPER), .power = P(400, A100_SHEET), .cache = P(40 * MIB, A100_PAPER)
#define AMPERE_NODE(host)                                                                          \
    .gpus = 8, .gpus_per_node = 8, .gpus_per_domain = 8, .link_version = 3, .rails = 8,            \
    .network = "InfiniBand HDR, 200 Gb/s for each GPU", .link_bandwidth = P(300 * GB, A100_SHEET), \
    .network_bandwidth = U(25 * GB, DGX_A100_GUIDE), .host_bandwidth = PCIE4,                      \
    .host_memory = U(host, DGX_A100_GUIDE), .host_memory_bandwidth = DGX_A100_HOST, OVER_NVLINK

#define BLACKWELL_RATES(sheet, fp32, tf32, bf16, fp8, fp4)                                         \
    .rate = {[DW_RATE_FP32] = P((fp32)*T, sheet), [DW_RATE_TF32] = P((tf32)*T, sheet),             \
             [DW_RATE_BF16] = P((bf16)*T, sheet), [DW_RATE_FP8] = P((fp8)*T, sheet),               \
             [DW_RATE_MXFP8] = P((fp8)*T, sheet), [DW_RATE_FP4] = P((fp4)*T, sheet)},              \
    .cache = P(126.5 * MIB, DRIVER_SAYS)
#define HGX_NODE .gpus = 8, .gpus_per_node = 8, .gpus_per_domain = 8, .link_version = 5, .rails = 8
#define NVL72 .gpus = 72, .gpus_per_node = 4, .gpus_per_domain = 72, .link_version = 5, .rails = 4
/* A Grace CPU has 480 GB, and 450 GB/s in each direction to its two GPUs together. */
#define GRACE_HOST                                                                                 \
    .host_bandwidth = P(225 * GB, GRACE_SHEET), .host_memory = P(240 * GB, GRACE_SHEET),           \
    .host_memory_bandwidth = P(192 * GB, GRACE_480 ", half of a CPU")

#define CDNA3(sheet)                                                                               \
    .rate = {[DW_RATE_FP32] = U(163.4 * T, sheet),                                                 \
             [DW_RATE_TF32] = U(653.7 * T, sheet),                                                 \
             [DW_RATE_BF16] = U(1307.4 * T, sheet),                                                \
             [DW_RATE_FP8] = U(2614.9 * T, sheet),                                                 \
             [DW_RATE_MXFP8] = NONE,                                                               \
             [DW_RATE_FP4] = NONE},                                                                \
    .architecture = "gfx942", .sm_count = P(304, sheet), .clock = U(2.1e9, sheet),                 \
    .cache = P(256 * MIB, CDNA3_PAPER), .gpus = 8, .gpus_per_node = 8, .gpus_per_domain = 8,       \
    .rails = 8, .network = "RoCE, 400 Gb/s for each GPU",                                          \
    .link_bandwidth = U(448 * GB, CDNA3_PAPER ": seven links of 64 GB/s"),                         \
    .network_bandwidth = E(50 * GB, USUAL_NODE), .host_bandwidth = PCIE5, .host_memory = NONE,     \
    .host_memory_bandwidth = NONE, OVER_NVLINK

/* `gpus` is the number that the name without a count means: a node, or an NVLink rack. */
static const dw_hardware catalogue[] = {
    {
        .name = "v100", /* 32 GB, in a DGX-2; FP16 is its only half precision */
        .architecture = "sm_70",
        .capability = 70,
        .gpus = 16,
        .gpus_per_node = 16,
        .gpus_per_domain = 16,
        .link_version = 2,
        .rails = 8,
        .network = "InfiniBand EDR, 100 Gb/s for each two GPUs",
        .rate = {[DW_RATE_FP32] = U(15.7 * T, V100_SHEET),
                 [DW_RATE_TF32] = NONE,
                 [DW_RATE_BF16] = U(125 * T, V100_SHEET ": FP16"),
                 [DW_RATE_FP8] = NONE,
                 [DW_RATE_MXFP8] = NONE,
                 [DW_RATE_FP4] = NONE},
        .sm_count = U(80, "NVIDIA V100 architecture white paper"),
        .clock = U(1.53e9, "NVIDIA V100 architecture white paper"),
        .power = U(350, DGX2_SHEET),
        .memory = P(32510 * MIB, SMI),
        .memory_bandwidth = U(900 * GB, V100_SHEET),
        .cache = U(6 * MIB, "NVIDIA V100 architecture white paper"),
        .host_bandwidth = P(15.75 * GB, "PCI Express 3.0, 16 lanes"),
        .host_memory = U(96 * GIB, DGX2_SHEET),
        .host_memory_bandwidth = DGX2_HOST,
        .link_bandwidth = U(150 * GB, V100_SHEET),
        .network_bandwidth = U(6.25 * GB, DGX2_SHEET),
        OVER_NVLINK,
    },
    {
        .name = "a100-40",
        AMPERE_RATES,
        AMPERE_NODE(128 * GIB),
        .memory = P(40960 * MIB, SMI),
        .memory_bandwidth = P(1555 * GB, A100_SHEET),
    },
    {
        .name = "a100-80",
        AMPERE_RATES,
        AMPERE_NODE(256 * GIB),
        .memory = P(81920 * MIB, SMI),
        .memory_bandwidth = P(2039 * GB, A100_SHEET),
    },
    {
        .name = "h100",
        HOPPER_RATES(P, H100_SHEET),
        HOPPER_NODE,
        .power = P(700, H100_SHEET),
        .memory = P(81559 * MIB, SMI),
        .memory_bandwidth = P(3350 * GB, H100_SHEET),
        .cache = P(50 * MIB, H100_PAPER),
    },
    {
        .name = "h100-96", /* HBM2e, limited to 500 W: Meta's version */
        HOPPER_RATES(P, H100_SHEET),
        HOPPER_NODE,
        .power = P(500, TITAN_PAPER),
        .memory = P(94.99 * GIB, TITAN_LOG),
        .memory_bandwidth = P(2400 * GB, TITAN_PAPER),
        .cache = P(50 * MIB, H100_PAPER),
    },
    {
        .name = "h200",
        HOPPER_RATES(P, H200_SHEET),
        HOPPER_NODE,
        .power = P(700, H200_SHEET),
        .memory = P(143771 * MIB, SMI),
        .memory_bandwidth = P(4800 * GB, H200_SHEET),
        .cache = P(60 * MIB, DRIVER_SAYS),
    },
    {
        .name = "gh200", /* 96 GB; each operating system has one GPU and one Grace CPU */
        HOPPER_RATES(U, GH200_SHEET),
        .gpus = 1,
        .gpus_per_node = 1,
        .gpus_per_domain = 1,
        .link_version = 4,
        .rails = 1,
        .network = "InfiniBand NDR, 400 Gb/s for each GPU",
        .power = U(1000, GH200_SHEET ": the module's, CPU and memory included"),
        .memory = P(97871 * MIB, SMI),
        .memory_bandwidth = U(4000 * GB, GH200_SHEET),
        .cache = P(60 * MIB, DRIVER_SAYS),
        .host_bandwidth = U(450 * GB, GH200_SHEET),
        .host_memory = U(480 * GB, GH200_SHEET),
        .host_memory_bandwidth = U(384 * GB, GRACE_480),
        .link_bandwidth = NONE,
        .network_bandwidth = E(50 * GB, "usual for such a node"),
        OVER_NVLINK,
    },
    {
        .name = "b200",
        .architecture = "sm_100a",
        .capability = 100,
        HGX_NODE,
        .network = "InfiniBand NDR, 400 Gb/s for each GPU",
        BLACKWELL_RATES(HGX_SHEET, 75, 1125, 2250, 4500, 9000),
        .sm_count = P(148, DRIVER_SAYS),
        .clock = E(1.856e9, FROM_RATE),
        .power = P(1000, HGX_SHEET),
        .memory = P(183359 * MIB, SMI),
        .memory_bandwidth = P(7700 * GB, HGX_SHEET),
        .host_bandwidth = PCIE5,
        .host_memory = U(256 * GIB, DGX_B200_GUIDE),
        .host_memory_bandwidth = DGX_B200_HOST,
        .link_bandwidth = P(900 * GB, HGX_SHEET),
        .network_bandwidth = U(50 * GB, DGX_B200_GUIDE),
        OVER_NVLINK,
    },
    {
        .name = "b300",
        .architecture = "sm_103a",
        .capability = 103,
        HGX_NODE,
        .network = "InfiniBand XDR, 800 Gb/s for each GPU",
        BLACKWELL_RATES(HGX_SHEET, 75, 1125, 2250, 4500, 13500),
        .sm_count = P(148, DRIVER_SAYS),
        .clock = E(1.856e9, FROM_RATE),
        .power = P(1100, SMI),
        .memory = P(275040 * MIB, SMI),
        .memory_bandwidth = P(7700 * GB, HGX_SHEET),
        .host_bandwidth = PCIE5,
        .host_memory = U(256 * GIB, DGX_B300_GUIDE),
        .host_memory_bandwidth = DGX_B300_HOST,
        .link_bandwidth = P(900 * GB, HGX_SHEET),
        .network_bandwidth = U(100 * GB, DGX_B300_GUIDE),
        OVER_NVLINK,
    },
    {
        .name = "gb200",
        .architecture = "sm_100a",
        .capability = 100,
        NVL72,
        .network = "InfiniBand NDR, 400 Gb/s for each GPU",
        BLACKWELL_RATES(GB200_SHEET, 80, 1250, 2500, 5000, 10000),
        .sm_count = P(152, DRIVER_SAYS),
        .clock = E(2.008e9, FROM_RATE),
        .power = P(1200, SMI),
        .memory = P(189471 * MIB, SMI),
        .memory_bandwidth = P(8000 * GB, GB200_SHEET),
        GRACE_HOST,
        .link_bandwidth = P(900 * GB, GB200_SHEET),
        .network_bandwidth = P(50 * GB, "NVIDIA DGX GB200 user guide: four ConnectX-7 in a tray"),
        OVER_NVLINK,
    },
    {
        .name = "gb300",
        .architecture = "sm_103a",
        .capability = 103,
        NVL72,
        .network = "InfiniBand XDR, 800 Gb/s for each GPU",
        BLACKWELL_RATES(GB300_SHEET, 80, 1250, 2500, 5000, 15000),
        .sm_count = P(152, DRIVER_SAYS),
        .clock = E(2.008e9, FROM_RATE),
        .power = P(1400, SMI),
        .memory = P(284208 * MIB, SMI),
        .memory_bandwidth = P(8000 * GB, GB300_SHEET),
        GRACE_HOST,
        .link_bandwidth = P(900 * GB, GB300_SHEET),
        .network_bandwidth = U(100 * GB, "NVIDIA NVL72 reference architecture: four ConnectX-8 in "
                                         "a tray"),
        OVER_NVLINK,
    },
    {
        .name = "rtx5090",
        .architecture = "sm_120a",
        .capability = 120,
        .gpus = 1,
        .gpus_per_node = 8,
        .gpus_per_domain = 1,
        .rails = 1,
        .network = "Ethernet, 10 Gb/s",
        .rate = {[DW_RATE_FP32] = U(104.8 * T, RTX_PAPER),
                 [DW_RATE_TF32] = U(104.8 * T, RTX_PAPER),
                 [DW_RATE_BF16] = U(209.5 * T, RTX_PAPER),
                 [DW_RATE_FP8] = U(419 * T, RTX_PAPER),
                 [DW_RATE_MXFP8] = U(419 * T, RTX_PAPER),
                 [DW_RATE_FP4] = U(1676 * T, RTX_PAPER)},
        .sm_count = U(170, RTX_PAPER),
        .clock = U(2.407e9, RTX_PAPER),
        .power = U(575, RTX_PAPER),
        .memory = P(32607 * MIB, SMI),
        .memory_bandwidth = U(1792 * GB, RTX_PAPER),
        .cache = U(96 * MIB, RTX_PAPER),
        .host_bandwidth = PCIE5,
        .host_memory = NONE,
        .host_memory_bandwidth = NONE,
        .link_bandwidth = E(
            31.5 * GB, "half of PCI Express 5.0: without peer access data passes through the host"),
        .network_bandwidth = E(0.15625 * GB, "one port of 10 Gb/s for up to eight GPUs"),
        OVER_PCIE,
    },
    {
        .name = "l40s",
        .architecture = "sm_89",
        .capability = 89,
        .gpus = 8,
        .gpus_per_node = 8,
        .gpus_per_domain = 1,
        .rails = 2,
        .network = "RoCE, two ports of 400 Gb/s for eight GPUs",
        .rate = {[DW_RATE_FP32] = U(91.6 * T, L40S_SHEET),
                 [DW_RATE_TF32] = U(183 * T, L40S_SHEET),
                 [DW_RATE_BF16] = U(362.05 * T, L40S_SHEET),
                 [DW_RATE_FP8] = U(733 * T, L40S_SHEET),
                 [DW_RATE_MXFP8] = NONE,
                 [DW_RATE_FP4] = NONE},
        .sm_count = U(142, L40S_SHEET),
        .clock = U(2.52e9, ADA_PAPER),
        .power = U(350, L40S_SHEET),
        .memory = P(46068 * MIB, SMI),
        .memory_bandwidth = U(864 * GB, L40S_SHEET),
        .cache = U(96 * MIB, ADA_PAPER),
        .host_bandwidth = PCIE4,
        .host_memory = NONE,
        .host_memory_bandwidth = NONE,
        .link_bandwidth = PCIE4,
        .network_bandwidth = E(12.5 * GB, "NVIDIA's MLPerf Training 4.0 system of such GPUs"),
        OVER_PCIE,
    },
    {
        .name = "mi300x",
        CDNA3(MI300X_SHEET),
        .power = U(750, MI300X_SHEET),
        .memory = P(206141652992.0, "rocm-smi on such a GPU"),
        .memory_bandwidth = U(5300 * GB, MI300X_SHEET),
    },
    {
        .name = "mi325x",
        CDNA3(MI325X_SHEET),
        .power = U(1000, MI325X_SHEET),
        .memory = P(256 * GIB, MI325X_SHEET),
        .memory_bandwidth = U(6000 * GB, MI325X_SHEET),
    },
};

uint32_t dw_hardware_catalogue_count(void) { return DW_COUNT(catalogue); }

const char *dw_hardware_catalogue_name(uint32_t index) {
    return index < DW_COUNT(catalogue) ? catalogue[index].name : NULL;
}

static const dw_hardware *find(const char *name, size_t length) {
    for (size_t i = 0; i < DW_COUNT(catalogue); i++)
        if (strlen(catalogue[i].name) == length &&
            strncasecmp(catalogue[i].name, name, length) == 0)
            return &catalogue[i];
    return NULL;
}

const dw_hardware *dw__hardware_profile(const char *name) { return find(name, strlen(name)); }

static dw_status fail_name(const char *name, size_t length) {
    dw_status status = DW_OK;
    dw__text names = {0};
    for (size_t i = 0; i < DW_COUNT(catalogue); i++)
        DW_TRY(dw__text_printf(&names, "%s%s", i ? ", " : "", catalogue[i].name));
    status = dw__fail(DW_NOT_FOUND,
                      "there is no hardware \"%.*s\" in the catalogue; it has %s; or give the path "
                      "of a file that describes it",
                      length < 64 ? (int)length : 64, name, names.text);
cleanup:
    dw__text_free(&names);
    return status;
}

dw_status dw__hardware_no_profile(const char *name) { return fail_name(name, strlen(name)); }

/* Accepts digits only; strtol would accept spaces and signs. */
static dw_status read_count(const char *text, const char *count, int *gpus) {
    long value = 0;
    size_t digits = strspn(count, "0123456789");
    if (digits > 0 && digits < 9 && count[digits] == '\0') value = strtol(count, NULL, 10);
    if (value < 1 || value > DW_HARDWARE_MOST_GPUS)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "hardware \"%.64s\" asks for \"%.32s\" GPUs; expected NAME:COUNT with a "
                        "COUNT from 1 to %d",
                        text, count, DW_HARDWARE_MOST_GPUS);
    *gpus = (int)value;
    return DW_OK;
}

dw_status dw_hardware_named(const char *text, dw_hardware **hardware) {
    if (!text || !hardware)
        return dw__fail(DW_INVALID_ARGUMENT, "the hardware's name or `hardware` is NULL");
    *hardware = NULL;
    const char *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : strlen(text);
    const dw_hardware *profile = find(text, length);
    if (!profile) return fail_name(text, length);
    int gpus = profile->gpus;
    if (colon) DW_RETURN_IF_FAILED(read_count(text, colon + 1, &gpus));
    dw_status status = dw_hardware_with_gpus(profile, gpus, hardware);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "hardware \"%.64s\"", text);
}
