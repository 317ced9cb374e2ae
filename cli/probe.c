/* `deepwell probe` describes this machine as text, and as a file for plans. */
#include "cli.h"
#include "deepwell/deepwell.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

typedef struct request {
    int json, measure;
    const char *output;
} request;

static void print_help(void) {
    printf("Usage: deepwell probe [--json] [--measure] [-o FILE]\n"
           "       deepwell probe --hardware NAME[:COUNT]|FILE|auto [--json] [-o FILE]\n"
           "\n"
           "Describes this machine: its GPUs, the links between them, CPU and network. You can\n"
           "write the description to a file, edit it, and pass it to\n"
           "'deepwell plan --hardware FILE'.\n"
           "\n"
           "Options:\n"
           "  --measure        also time copies, GEMMs and NCCL between GPUs. Takes some seconds\n"
           "                   per GPU, which should be idle\n"
           "  --hardware H     describe a published profile (h100, gb200:144) or a file instead;\n"
           "                   '--hardware list' lists the profiles\n"
           "  --json           print the description as JSON\n"
           "  -o, --output F   write the JSON to a file\n");
}

/* ---- text ------------------------------------------------------------------------------------ */

static void print_label(const char *label) {
    int room = 17 - (int)strlen(label);
    cli_print_bold(label);
    printf("%*s", room > 1 ? room : 1, "");
}

/* Prints "3.35 TB/s", followed by "(estimated)" or "(measured)". Prints nothing for an unknown figure. */
static void print_figure(const char *before, const dw_figure *figure, double unit,
                         const char *text) {
    if (figure->value == 0.0) return;
    printf("%s%.5g%s%s%s", before, figure->value / unit, *text ? " " : "", text,
           figure->kind == DW_FIGURE_ESTIMATED  ? " (estimated)"
           : figure->kind == DW_FIGURE_MEASURED ? " (measured)"
                                                : "");
}

static void print_rates(const dw_figure *rates) {
    const char *between = "";
    print_label("  GEMM");
    for (int i = 0; i < DW_RATES; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s%s ", between, dw_rate_name((dw_rate)i));
        print_figure(name, &rates[i], 1e12, "TFLOP/s");
        if (rates[i].value > 0.0) between = ", ";
    }
    printf("\n");
}

static void print_gpu(const dw_machine *m, int index) {
    const dw_machine_gpu *gpu = &m->gpus[index];
    char label[32];
    snprintf(label, sizeof label, "GPU %d", index);
    print_label(label);
    printf("%s, %s", gpu->name, gpu->architecture);
    if (*gpu->bus) printf(", %s", gpu->bus);
    if (gpu->numa_node >= 0) printf(", NUMA node %d", gpu->numa_node);
    printf("\n%17s%.0f SMs", "", gpu->sm_count.value);
    print_figure(", ", &gpu->clock, 1e6, "MHz");
    print_figure(", ", &gpu->memory, 1073741824.0, "GiB");
    print_figure(", ", &gpu->memory_bandwidth, 1e12, "TB/s");
    print_figure(", ", &gpu->power, 1, "W");
    printf("\n");
    if (gpu->copy_bandwidth.value > 0) {
        printf("%17scopies", "");
        print_figure(" ", &gpu->copy_bandwidth, 1e12, "TB/s");
        printf("\n");
    }
    print_rates(gpu->rate);
    if (gpu->links > 0) {
        print_label("  NVLink");
        printf("version %d, %d links up", gpu->link_version, gpu->links);
        print_figure(", ", &gpu->link_bandwidth, 1e9, "GB/s each way");
        printf("\n");
    }
    if (gpu->host_bandwidth.value > 0) {
        print_label("  Host");
        if (gpu->pcie_generation > 0)
            printf("PCI Express %d, %d lanes", gpu->pcie_generation, gpu->pcie_lanes);
        print_figure(gpu->pcie_generation > 0 ? ", " : "", &gpu->host_bandwidth, 1e9,
                     "GB/s each way");
        printf("\n");
    }
}

/* Prints consecutive GPUs of one name once. */
static void print_gpus(const dw_machine *m) {
    for (int i = 0; i < m->gpu_count; i++) {
        int first = i == 0 || strcmp(m->gpus[i].name, m->gpus[i - 1].name) != 0;
        if (first)
            print_gpu(m, i);
        else
            printf("%17s%d: the same%s%s\n", "", i, *m->gpus[i].bus ? ", " : "", m->gpus[i].bus);
    }
    if (m->switches > 0) {
        print_label("NVSwitch");
        printf("%d\n", m->switches);
    }
    if (m->bus_bandwidth.value > 0) {
        print_label("NCCL");
        print_figure("all-reduce ", &m->bus_bandwidth, 1e9, "GB/s of bus bandwidth");
        printf("\n");
    }
    if (*m->driver || *m->cuda) {
        print_label("Driver");
        printf("%s%sCUDA %s\n", m->driver, *m->driver ? ", " : "", m->cuda);
    }
}

static void print_paths(const dw_machine *m) {
    const char *label = "Paths";
    for (int i = 0; i < m->path_count; i++) {
        const dw_machine_path *path = &m->paths[i];
        if (path->nic < 0) continue; /* only the paths to network ports are printed */
        if (strcmp(path->level, "PIX") != 0 && strcmp(path->level, "PXB") != 0) continue;
        print_label(label);
        printf("GPU %d to %s: %s\n", path->gpu, m->nics[path->nic].name, path->level);
        label = "";
    }
}

static void print_host(const dw_machine *m) {
    const dw_machine_cpu *cpu = &m->cpu;
    print_label("CPU");
    printf("%s, %s\n", *cpu->model ? cpu->model : "unknown model", cpu->architecture);
    printf("%17s", "");
    if (cpu->packages > 0) printf("%d packages, %d cores, ", cpu->packages, cpu->cores);
    printf("%d threads, %d usable", cpu->threads, cpu->usable);
    print_figure(", ", &cpu->memory, 1073741824.0, "GiB");
    print_figure(", cache ", &cpu->cache, 1048576.0, "MiB");
    printf("\n");
    for (int i = 0; i < m->numa_count && m->numa_count > 1; i++) {
        printf("%17sNUMA node %d: CPUs %s", "", m->numa[i].node, m->numa[i].cpus);
        print_figure(", ", &m->numa[i].memory, 1073741824.0, "GiB");
        printf("\n");
    }
    for (int i = 0; i < m->nic_count; i++) {
        print_label(i == 0 ? "Network" : "");
        printf("%s, %s%s", m->nics[i].name, m->nics[i].kind, m->nics[i].up ? "" : ", down");
        print_figure(", ", &m->nics[i].bandwidth, 1e9 / 8, "Gb/s");
        printf("\n");
    }
}

static void print_machine(const dw_machine *m) {
    print_gpus(m);
    print_host(m);
    print_paths(m);
    for (int i = 0; i < m->remark_count; i++) {
        print_label(i == 0 ? "Notes" : "");
        printf("%s\n", m->remarks[i]);
    }
}

static void print_row(const char *label, const dw_figure *figure, double unit, const char *text) {
    if (figure->value == 0.0) return;
    print_label(label);
    print_figure("", figure, unit, text);
    printf("%s%s\n", *figure->source ? ": " : "", figure->source);
}

static void print_hardware(const dw_hardware *h) {
    print_label("Hardware");
    printf("%s, %s\n", *h->name ? h->name : "unnamed", h->architecture);
    print_label("GPUs");
    printf("%d; %d in a node, ", h->gpus, h->gpus_per_node);
    if (h->gpus_per_domain > 1)
        printf("%d joined by NVLink\n", h->gpus_per_domain);
    else
        printf("none joined by NVLink\n");
    for (int i = 0; i < DW_RATES; i++)
        print_row(dw_rate_name((dw_rate)i), &h->rate[i], 1e12, "TFLOP/s");
    print_row("SMs", &h->sm_count, 1, "");
    print_row("Clock", &h->clock, 1e6, "MHz");
    print_row("Power", &h->power, 1, "W");
    print_row("Memory", &h->memory, 1073741824.0, "GiB");
    print_row("", &h->memory_bandwidth, 1e12, "TB/s");
    print_row("Cache", &h->cache, 1048576.0, "MiB");
    print_row("Host", &h->host_bandwidth, 1e9, "GB/s each way");
    print_row("", &h->host_memory, 1073741824.0, "GiB per GPU");
    print_row("Links", &h->link_bandwidth, 1e9, "GB/s each way");
    print_row("", &h->link_latency, 1e-6, "us");
    print_label("Network");
    printf("%s\n", *h->network ? h->network : "unknown");
    print_row("", &h->network_bandwidth, 1e9, "GB/s each way, per GPU");
    print_row("", &h->network_latency, 1e-6, "us");
}

/* ---- the command ----------------------------------------------------------------------------- */

/* Writes a temporary file and renames it, so that readers of `path` see the old file or the whole new one. */
static int write_output(const char *path, const char *text) {
    char beside[4096];
    if (snprintf(beside, sizeof beside, "%s.tmp", path) >= (int)sizeof beside)
        return cli_usage_error("the path of the output is too long");
    FILE *file = fopen(beside, "we");
    int written = file && fputs(text, file) >= 0;
    if (file && fclose(file) != 0) written = 0;
    if (written && rename(beside, path) == 0) return CLI_DONE;
    fprintf(stderr, "deepwell: cannot write \"%s\": %s\n", path, strerror(errno));
    if (file) remove(beside);
    return CLI_FAILED;
}

/* Writes the JSON to the output file or to stdout, if requested, and releases it. Returns 1 if text is to be
 * printed. */
static int put_json(const request *r, char *json, int *result) {
    *result = r->output ? write_output(r->output, json) : CLI_DONE;
    if (r->json && *result == CLI_DONE && !r->output) fputs(json, stdout);
    dw_text_free(json);
    return *result == CLI_DONE && !r->json && !r->output;
}

static int show_machine(const request *r) {
    dw_machine *machine = NULL;
    char *json = NULL;
    int result = CLI_FAILED;
    if (dw_machine_probe(r->measure, &machine) != DW_OK) return cli_fail();
    if (dw_machine_json(machine, &json) != DW_OK)
        result = cli_fail();
    else if (put_json(r, json, &result))
        print_machine(machine);
    dw_machine_destroy(machine);
    return result;
}

static int list_profiles(void) {
    for (uint32_t i = 0; i < dw_hardware_catalogue_count(); i++)
        printf("%s\n", dw_hardware_catalogue_name(i));
    return CLI_DONE;
}

static int show_hardware(const request *r, const char *text) {
    dw_hardware *hardware = NULL;
    char *json = NULL;
    int result = CLI_FAILED;
    if (strcmp(text, "list") == 0) return list_profiles();
    if (dw_hardware_open(text, &hardware) != DW_OK) return cli_fail();
    if (dw_hardware_json(hardware, &json) != DW_OK)
        result = cli_fail();
    else if (put_json(r, json, &result))
        print_hardware(hardware);
    dw_hardware_destroy(hardware);
    return result;
}

int cli_probe(int argc, char **argv) {
    request r = {0};
    const char *hardware = NULL;
    for (int at = 1; at < argc; at++) {
        const char *word = argv[at];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            print_help();
            return CLI_DONE;
        }
        const char **value = strcmp(word, "-o") == 0 || strcmp(word, "--output") == 0 ? &r.output
                             : strcmp(word, "--hardware") == 0                        ? &hardware
                                                                                      : NULL;
        if (value) {
            if (++at == argc) return cli_usage_error("%s needs a value", word);
            *value = argv[at];
        } else if (strcmp(word, "--json") == 0) {
            r.json = 1;
        } else if (strcmp(word, "--measure") == 0) {
            r.measure = 1;
        } else {
            return cli_usage_error("probe: unknown argument '%s'", word);
        }
    }
    if (hardware && r.measure)
        return cli_usage_error("--measure times this machine; it does not go with --hardware");
    return hardware ? show_hardware(&r, hardware) : show_machine(&r);
}
