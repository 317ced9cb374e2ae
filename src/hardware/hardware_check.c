/* Checks a hardware description.
 *
 * The bounds are a decade or more beyond existing hardware. They catch the commonest mistake in a file, a wrong unit:
 * 989 (TFLOP/s) instead of 9.89e14, 80 (GB) instead of 8e10. */
#include "hardware/hardware_internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct bounds {
    double low, high;
    const char *unit;
} bounds;

static const bounds rate_bounds = {1e11, 1e18, "operations per second (9.89e14, not 989)"};

/* In the order of DW_HARDWARE_FIGURES. */
static const struct {
    const char *name;
    bounds bounds;
    size_t offset;
} figures[] = {
#define BOUNDS_sm_count                                                                            \
    { 1, 1e5, "SMs" }
#define BOUNDS_clock                                                                               \
    { 1e8, 1e11, "hertz (1.83e9, not 1830)" }
#define BOUNDS_power                                                                               \
    { 1, 1e5, "watts" }
#define BOUNDS_memory                                                                              \
    { 1e8, 1e14, "bytes (8e10, not 80)" }
#define BOUNDS_memory_bandwidth                                                                    \
    { 1e9, 1e15, "bytes per second (3.35e12, not 3350)" }
#define BOUNDS_cache                                                                               \
    { 1e3, 1e12, "bytes" }
#define BOUNDS_host_bandwidth                                                                      \
    { 1e7, 1e14, "bytes per second and direction" }
#define BOUNDS_host_memory                                                                         \
    { 1e7, 1e15, "bytes for each GPU" }
#define BOUNDS_host_memory_bandwidth                                                               \
    { 1e7, 1e14, "bytes per second for each GPU" }
#define BOUNDS_link_bandwidth                                                                      \
    { 1e7, 1e14, "bytes per second, GPU and direction (4.5e11, not 450)" }
#define BOUNDS_link_latency                                                                        \
    { 1e-9, 1, "seconds" }
#define BOUNDS_network_bandwidth                                                                   \
    { 1e6, 1e13, "bytes per second, GPU and direction (5e10, not 400)" }
#define BOUNDS_network_latency                                                                     \
    { 1e-9, 1, "seconds" }
#define FIGURE(name) {#name, BOUNDS_##name, offsetof(dw_hardware, name)},
    DW_HARDWARE_FIGURES(FIGURE)
#undef FIGURE
};

static dw_status check_figure(const char *group, const char *name, const dw_figure *figure,
                              const bounds *within) {
    if (figure->value == 0.0) return DW_OK; /* absent; check_complete requires what a plan needs */
    if (figure->value >= within->low && figure->value <= within->high) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "%s%s is %.17g; expected %g to %g %s", group, name,
                    figure->value, within->low, within->high, within->unit);
}

dw_status dw__hardware_check_count(const char *name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "%s is %lld; expected %lld to %lld", name,
                    (long long)value, (long long)low, (long long)high);
}

static dw_status check_architecture(const dw_hardware *hardware) {
    const char *name = hardware->architecture;
    if (strncmp(name, "sm_", 3) != 0 || hardware->capability == 0) return DW_OK;
    if (strtol(name + 3, NULL, 10) == hardware->capability) return DW_OK;
    return dw__fail(
        DW_INVALID_ARGUMENT,
        "architecture is \"%.64s\" and capability is %d; expected the same number in both", name,
        hardware->capability);
}

/* Checks the number of GPUs, and that nodes and domains divide it. */
static dw_status check_layout(const dw_hardware *h) {
#define AT_LEAST_ONE(member, low, high)                                                            \
    if (strncmp(#member, "gpus", 4) == 0)                                                          \
        DW_RETURN_IF_FAILED(dw__hardware_check_count(#member, h->member, 1, high));
    DW_HARDWARE_COUNTS(AT_LEAST_ONE)
#undef AT_LEAST_ONE
    int small = h->gpus_per_node, large = h->gpus_per_domain;
    if (small > large) small = h->gpus_per_domain, large = h->gpus_per_node;
    if (large % small != 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "gpus_per_node is %d and gpus_per_domain is %d; expected one to be a "
                        "multiple of the other: domains are parts of a node, or made of nodes",
                        h->gpus_per_node, h->gpus_per_domain);
    if (h->gpus > h->gpus_per_node && h->gpus % h->gpus_per_node != 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "gpus is %d and gpus_per_node is %d; expected a part of one node, or a "
                        "multiple of %d (or another gpus_per_node, in a file)",
                        h->gpus, h->gpus_per_node, h->gpus_per_node);
    return DW_OK;
}

static dw_status require(const char *name, const dw_figure *figure, const char *reason) {
    if (figure->value > 0.0) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "%s is missing; expected %s; set it, or name a \"profile\" that has it", name,
                    reason);
}

/* Requires the figures that every plan needs. */
static dw_status check_complete(const dw_hardware *h) {
    int joined = h->gpus_per_node > h->gpus_per_domain ? h->gpus_per_node : h->gpus_per_domain;
    DW_RETURN_IF_FAILED(require("rates.bf16", &h->rate[DW_RATE_BF16],
                                "the rate of dense GEMMs, in operations per second"));
    DW_RETURN_IF_FAILED(require("memory", &h->memory, "the bytes of each GPU's memory"));
    DW_RETURN_IF_FAILED(
        require("memory_bandwidth", &h->memory_bandwidth, "bytes per second of the GPU's memory"));
    if (h->gpus > 1 && joined > 1)
        DW_RETURN_IF_FAILED(
            require("link_bandwidth", &h->link_bandwidth,
                    "bytes per second and direction between the GPUs of a node or domain"));
    if (h->gpus > joined)
        DW_RETURN_IF_FAILED(require("network_bandwidth", &h->network_bandwidth,
                                    "bytes per second of each GPU between nodes"));
    return DW_OK;
}

/* A machine without GPUs has no GPU figures. */
static dw_status check_none(const dw_hardware *h) {
    bool said = h->capability != 0 || h->memory.value != 0.0;
    for (int i = 0; i < DW_RATES; i++) said |= h->rate[i].value != 0.0;
    if (!said) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "gpus is 0 in a description of GPUs; expected 1 to %d",
                    DW_HARDWARE_MOST_GPUS);
}

dw_status dw__hardware_check(const dw_hardware *hardware) {
#define CHECK(member, low, high)                                                                   \
    DW_RETURN_IF_FAILED(dw__hardware_check_count(#member, hardware->member, low, high));
    DW_HARDWARE_COUNTS(CHECK)
#undef CHECK
    if (hardware->gpus == 0) return check_none(hardware);
    DW_RETURN_IF_FAILED(check_layout(hardware));
    DW_RETURN_IF_FAILED(check_architecture(hardware));
    for (int i = 0; i < DW_RATES; i++)
        DW_RETURN_IF_FAILED(
            check_figure("rates.", dw_rate_name((dw_rate)i), &hardware->rate[i], &rate_bounds));
    for (size_t i = 0; i < DW_COUNT(figures); i++)
        DW_RETURN_IF_FAILED(check_figure(
            "", figures[i].name,
            (const dw_figure *)(const void *)((const char *)hardware + figures[i].offset),
            &figures[i].bounds));
    double count = hardware->sm_count.value;
    if (count != floor(count))
        return dw__fail(DW_INVALID_ARGUMENT, "sm_count is %.17g; expected a whole number", count);
    DW_RETURN_IF_FAILED(check_complete(hardware));
    if (hardware->cache.value > hardware->memory.value)
        return dw__fail(DW_INVALID_ARGUMENT, "cache is %g and memory is %g bytes; expected less",
                        hardware->cache.value, hardware->memory.value);
    return DW_OK;
}
