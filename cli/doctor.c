/* `deepwell doctor` reports what this machine can do, what is missing, and what to do next. */
#include "doctor.h"
#include "cli.h"
#include "deepwell/deepwell.h"
#include <stdio.h>
#include <string.h>

static void print_help(void) {
    printf("Usage: deepwell doctor [--json]\n"
           "\n"
           "Reports what Deepwell can do on this machine, what is missing, and what to do next.\n"
           "\n"
           "  --json    print the report as one JSON object\n");
}

void doctor_advise(json_t *advice, const char *what, const char *next) {
    json_array_append_new(advice, json_pack("{s:s, s:s}", "what", what, "next", next));
}

/* Returns NULL if the machine cannot be described. */
static json_t *examine(void) {
    dw_machine *machine = NULL;
    if (dw_machine_probe(0, &machine) != DW_OK) return NULL;
    json_t *advice = json_array();
    json_t *report = json_object();
    json_object_set_new(report, "deepwell", json_string(dw_version()));
    json_object_set_new(report, "cpu", doctor_probe_cpu(machine, advice));
    json_object_set_new(report, "threads", json_integer(dw_get_threads()));
    json_object_set_new(report, "gemm", doctor_probe_gemm(advice));
    json_object_set_new(report, "gpu", doctor_probe_gpu(machine, advice));
    json_object_set_new(report, "python", doctor_probe_python(advice));
    json_object_set_new(report, "advice", advice);
    dw_machine_destroy(machine);
    return report;
}

/* ---- text ---------------------------------------------------------------------------------- */

static const char *text_of(const json_t *object, const char *key, const char *otherwise) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : otherwise;
}

static double gib_of(const json_t *object, const char *key) {
    return json_number_value(json_object_get(object, key)) / (1024.0 * 1024.0 * 1024.0);
}

static void print_label(const char *label) {
    cli_print_bold(label);
    printf("%*s", (int)(17 - strlen(label)), "");
}

static void print_cpu(const json_t *cpu) {
    print_label("CPU");
    printf("%s\n", text_of(cpu, "model", "unknown model"));
    print_label("Instructions");
    printf("%s\n", text_of(cpu, "isa", "unknown"));
    print_label("CPUs");
    printf("%lld usable of %lld online\n",
           (long long)json_integer_value(json_object_get(cpu, "usable")),
           (long long)json_integer_value(json_object_get(cpu, "online")));
    print_label("Memory");
    printf("%.1f GiB, %.1f GiB available\n", gib_of(cpu, "memory_bytes"),
           gib_of(cpu, "memory_available_bytes"));
}

static void print_gpu(const json_t *gpu) {
    const json_t *devices = json_object_get(gpu, "devices");
    print_label("GPU");
    if (json_array_size(devices) == 0) {
        printf("%s\n", text_of(gpu, "none", "none"));
        return;
    }
    for (size_t at = 0; at < json_array_size(devices); at++) {
        const json_t *device = json_array_get(devices, at);
        printf("%*s%s, compute capability %s, %.0f GiB\n", at == 0 ? 0 : 17, "",
               text_of(device, "name", "unnamed"), text_of(device, "compute_capability", "unknown"),
               gib_of(device, "memory_bytes"));
    }
    print_label("GPU compiler");
    printf("%s\n", text_of(gpu, "compiler", "none"));
}

static void print_python(const json_t *python) {
    print_label("Python");
    if (!json_is_object(python)) {
        printf("not found\n");
        return;
    }
    printf("%s (%s)\n", text_of(python, "version", "unknown"),
           text_of(python, "executable", "unknown"));
    print_label("PyTorch");
    printf("%s\n", text_of(python, "torch", "not installed there"));
    print_label("Python package");
    printf("%s\n", json_is_true(json_object_get(python, "deepwell")) ? "installed there"
                                                                     : "not installed there");
}

static void print_report(const json_t *report) {
    print_label("Deepwell");
    printf("%s\n", text_of(report, "deepwell", ""));
    print_cpu(json_object_get(report, "cpu"));
    print_label("Threads");
    printf("%lld\n", (long long)json_integer_value(json_object_get(report, "threads")));
    print_label("GEMM");
    printf("%s\n", text_of(report, "gemm", "unknown"));
    print_gpu(json_object_get(report, "gpu"));
    print_python(json_object_get(report, "python"));

    const json_t *advice = json_object_get(report, "advice");
    printf(json_array_size(advice) ? "\n" : "\nNothing is missing.\n");
    for (size_t at = 0; at < json_array_size(advice); at++) {
        const json_t *entry = json_array_get(advice, at);
        printf("- %s: %s.\n", text_of(entry, "what", ""), text_of(entry, "next", ""));
    }
}

int cli_doctor(int argc, char **argv) {
    int as_json = 0;
    for (int at = 1; at < argc; at++) {
        if (strcmp(argv[at], "--json") == 0) {
            as_json = 1;
        } else if (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0) {
            print_help();
            return CLI_DONE;
        } else {
            return cli_usage_error("doctor: unknown argument '%s'", argv[at]);
        }
    }
    json_t *report = examine();
    int result = CLI_DONE;
    if (!report) {
        fprintf(stderr, "deepwell: %s\n", dw_last_error());
        return CLI_FAILED;
    }
    if (!as_json) {
        print_report(report);
    } else if (json_dumpf(report, stdout, JSON_INDENT(2)) == 0) {
        printf("\n");
    } else {
        result = CLI_FAILED;
    }
    json_decref(report);
    return result;
}
