/* Finds the machine of a row: the catalogue's profile for the GPU's name in the table, or a similar profile with the
 * figures of the GPU's data sheet, adjusted by the row's statements on memory and network. */
#include "runs.h"
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Differences from a profile; 0: as the profile. Rates are dense, in TFLOP/s with FP32 accumulation; FP8, where
 * supported, has twice the BF16 rate. Memory is in GiB, bandwidth in GB/s, links per direction. Export versions are
 * their originals with fewer links or SMs. Cards have only PCI Express. GeForce cards reach other GPUs only through
 * the host. */
typedef struct variant {
    const char *gpu, *profile;
    double bf16, memory, bandwidth, sms, clock, power, link, network;
    int capability; /* compute capability, if it differs */
    int fp8;
} variant;

static const variant variants[] = {
    /* name          profile     BF16  memory bandw. SMs  GHz   W   link  network */
    {.gpu = "a800", .profile = "a100-80", .link = 200},
    {.gpu = "h800", .profile = "h100", .link = 200},
    {"h20", "h100", 148, 95.6, 4000, 78, 1.98, 0, 450, 0, 0, 1},
    {"h100-pcie", "h100", 756.5, 79.6, 2000, 114, 1.62, 350, 63, 0, 0, 1},
    {"h100-nvl", "h100", 835.5, 93.6, 3938, 132, 1.545, 400, 300, 0, 0, 1},
    {"a100-pcie", "a100-80", 312, 80, 1935, 108, 1.41, 300, 31.5, 0, 0, 0},
    {"l40", "l40s", 181, 45, 864, 142, 2.49, 300, 31.5, 0, 89, 1},
    {"l4", "l40s", 121, 22.5, 300, 58, 2.04, 72, 31.5, 0, 89, 1},
    {"rtx-6000-ada", "l40s", 364, 48, 960, 142, 2.505, 300, 31.5, 0, 89, 1},
    {"rtx-4090", "l40s", 165.2, 24, 1008, 128, 2.52, 450, 15.75, 1.25, 89, 1},
    {"rtx-3090", "l40s", 71.2, 24, 936, 82, 1.695, 350, 15.75, 1.25, 86, 0},
    {"rtx-a6000", "l40s", 154.8, 48, 768, 84, 1.8, 300, 31.5, 1.25, 86, 0},
    {"a40", "l40s", 149.7, 45, 696, 84, 1.74, 300, 31.5, 0, 86, 0},
    {"a10g", "l40s", 70, 22.5, 600, 80, 1.71, 300, 31.5, 6.25, 86, 0},
    {"a10", "l40s", 125, 22.5, 600, 72, 1.695, 150, 31.5, 0, 86, 0},
    {"t4", "l40s", 65, 15, 320, 40, 1.59, 70, 15.75, 3, 75, 0},
    {.gpu = "rtx-5090", .profile = "rtx5090"},
    /* One of the two dies: programs see each die as a GPU. */
    {"mi250x", "mi300x", 191.5, 64, 1638, 110, 1.7, 280, 100, 12.5, 0, 0},
    {"mi250", "mi300x", 181, 64, 1638, 104, 1.7, 280, 100, 12.5, 0, 0},
    {"mi300a", "mi300x", 980.6, 128, 5300, 228, 2.1, 550, 128, 25, 0, 1},
    {"mi350x", "mi300x", 2306, 288, 8000, 256, 2.2, 1000, 537, 0, 0, 1},
    {"mi355x", "mi300x", 2516, 288, 8000, 256, 2.4, 1400, 537, 0, 0, 1},
    {.gpu = "a100", .profile = "a100-80"},
};

/* Normalizes a name: lower case, hyphens between words, no vendor, brand or number of GPUs. "NVIDIA A100-SXM4-80GB"
 * becomes "a100-sxm4-80gb", "8x H100 80GB HBM3" becomes "h100-80gb-hbm3". */
static void plain_name(const char *gpu, char *plain, size_t size) {
    static const char *const brands[] = {"nvidia-",  "amd-",   "instinct-",
                                         "geforce-", "tesla-", "gpu-"};
    size_t length = 0;
    for (; *gpu && length + 1 < size; gpu++) {
        char c = (char)tolower((unsigned char)*gpu);
        if (!isalnum((unsigned char)c)) c = '-';
        if (c == '-' && (length == 0 || plain[length - 1] == '-')) continue;
        plain[length++] = c;
    }
    plain[length] = 0;
    for (size_t at = 0; at < LAB_COUNT(brands); at++) {
        size_t brand = strlen(brands[at]);
        if (strncmp(plain, brands[at], brand) != 0) continue;
        memmove(plain, plain + brand, strlen(plain + brand) + 1);
        at = (size_t)-1; /* starts again with the first brand */
    }
    size_t digits = strspn(plain, "0123456789");
    if (digits > 0 && plain[digits] == 'x') {
        size_t skip = digits + 1 + (plain[digits + 1] == '-');
        memmove(plain, plain + skip, strlen(plain + skip) + 1);
    }
}

/* Returns whether `plain` begins with `name` and does not continue as another GPU's name. It may continue with a
 * hyphen, or with a unit after a number. */
static bool begins(const char *plain, const char *name) {
    size_t length = strlen(name);
    if (strncmp(plain, name, length) != 0) return false;
    char next = plain[length];
    if (!next || next == '-') return true;
    return isdigit((unsigned char)name[length - 1]) &&
           (strncmp(plain + length, "gb", 2) == 0 || strncmp(plain + length, "g-", 2) == 0 ||
            strncmp(plain + length, "sxm", 3) == 0 || strcmp(plain + length, "g") == 0);
}

/* Returns the GB in a name such as "a100-sxm4-40gb", or 0 if it has none. */
static double named_memory(const char *plain) {
    for (const char *at = strchr(plain, '-'); at; at = strchr(at + 1, '-')) {
        char *end;
        double value = strtod(at + 1, &end);
        if (end > at + 1 && *end == 'g' && value >= 8 && value <= 1024) return value;
    }
    return 0;
}

static void apply(const variant *v, dw_hardware *h) {
    /* These figures were not checked against the data sheet. */
    static const char sheet[] = "the maker's data sheet, not consulted";
    const double gib = 1024.0 * 1024.0 * 1024.0;
    if (v->bf16 > 0 || v->link > 0) h->name = v->gpu;
    if (v->bf16 > 0) {
        double rates[DW_RATES] = {[DW_RATE_FP32] = v->bf16 / 8,
                                  [DW_RATE_TF32] = v->bf16 / 2,
                                  [DW_RATE_BF16] = v->bf16,
                                  [DW_RATE_FP8] = v->fp8 ? 2 * v->bf16 : 0};
        for (int at = 0; at < DW_RATES; at++)
            h->rate[at] = (dw_figure){
                rates[at] * 1e12, rates[at] > 0 ? DW_FIGURE_ESTIMATED : DW_FIGURE_UNKNOWN, sheet};
    }
    struct {
        dw_figure *figure;
        double value;
    } figures[] = {{&h->memory, v->memory * gib},
                   {&h->memory_bandwidth, v->bandwidth * 1e9},
                   {&h->sm_count, v->sms},
                   {&h->clock, v->clock * 1e9},
                   {&h->power, v->power},
                   {&h->link_bandwidth, v->link * 1e9},
                   {&h->network_bandwidth, v->network * 1e9}};
    for (size_t at = 0; at < LAB_COUNT(figures); at++)
        if (figures[at].value > 0)
            *figures[at].figure = (dw_figure){figures[at].value, DW_FIGURE_ESTIMATED, sheet};
    if (v->capability) h->capability = v->capability;
    /* the card limits its rate by power, not by clock */
    if (strcmp(v->gpu, "h20") == 0) h->power.value = 0;
    if (strstr(v->gpu, "pcie")) h->gpus_per_domain = 1;
    if (strstr(v->gpu, "nvl")) h->gpus_per_domain = 2;
}

static dw_status named(const char *gpu, dw_hardware **made) {
    char plain[64];
    plain_name(gpu, plain, sizeof plain);
    const char *profile = NULL;
    size_t longest = 0;
    for (uint32_t at = 0; at < dw_hardware_catalogue_count(); at++) {
        const char *name = dw_hardware_catalogue_name(at);
        if (strlen(name) > longest && begins(plain, name)) profile = name, longest = strlen(name);
    }
    double memory = named_memory(plain);
    bool card = strstr(plain, "pcie") != NULL;
    const variant *found = NULL;
    for (size_t at = 0; at < LAB_COUNT(variants); at++) {
        const variant *v = &variants[at];
        char stem[16];
        size_t bare = strcspn(v->gpu, "-");
        snprintf(stem, sizeof stem, "%.*s", (int)bare, v->gpu);
        /* Matches "A100 80GB PCIe" with "A100-PCIe-80GB". */
        bool pcie = card && strcmp(v->gpu + bare, "-pcie") == 0 && begins(plain, stem);
        size_t length = pcie ? sizeof plain : strlen(v->gpu);
        /* Matches "4090" with "rtx-4090". */
        const char *short_name = strncmp(v->gpu, "rtx-", 4) == 0 ? v->gpu + 4 : v->gpu;
        if (length > longest && (pcie || begins(plain, v->gpu) || begins(plain, short_name)))
            found = v, longest = length;
    }
    *made = NULL;
    if (found) profile = found->profile;
    if (!profile) return DW_OK;
    if (found && strcmp(found->gpu, "a100") == 0 && memory > 0 && memory < 60) profile = "a100-40";
    const dw_status status = dw_hardware_named(profile, made);
    if (status != DW_OK) return lab_fail_library(status);
    if (found) apply(found, *made);
    double bytes = memory * 1024 * 1024 * 1024;
    if (memory > 0 && fabs(bytes / (*made)->memory.value - 1) > 0.12) (*made)->memory.value = bytes;
    return DW_OK;
}

dw_status lab_run_machine(lab_runs *runs, size_t row, const char **reason,
                          const dw_hardware **found) {
    const lab_csv *table = &runs->table;
    const char *gpu = lab_csv_cell(table, row, "gpu_type"),
               *interconnect = lab_csv_cell(table, row, "interconnect");
    dw_hardware *made = NULL;
    LAB_RETURN_IF_FAILED(named(gpu, &made));
    if (!made) {
        *reason = lab_arena_printf(runs->arena, "there is no profile of the GPU \"%.40s\"", gpu);
        return *reason ? DW_OK : lab_fail_memory("a reason", 80);
    }
    double rate = lab_network_rate(interconnect, made->gpus_per_node > 0 ? made->gpus_per_node : 1);
    if (rate > 0) made->network_bandwidth.value = rate;
    /* GPUs without links communicate over the network. */
    if (made->link_bandwidth.value <= 0) made->link_bandwidth = made->network_bandwidth;
    double memory = strtod(lab_csv_cell(table, row, "gpu_mem_gb"), NULL) * 1024 * 1024 * 1024;
    if (isfinite(memory) && memory > 0 && fabs(memory / made->memory.value - 1) > 0.12)
        made->memory.value = memory;
    for (size_t at = 0; at < runs->machines.count; at++) {
        dw_hardware *old = runs->machines.items[at].hardware;
        if (strcmp(old->name, made->name) != 0 ||
            old->network_bandwidth.value != made->network_bandwidth.value ||
            old->memory.value != made->memory.value)
            continue;
        dw_hardware_destroy(made);
        *found = old;
        return DW_OK;
    }
    dw_status status = LAB_PUSH(&runs->machines, (lab_machine){made});
    if (status != DW_OK) dw_hardware_destroy(made);
    *found = made;
    return status;
}
