/* Writes the machine to a file: the fields that plans need, and everything else under "machine". */
#include "hardware/machine_internal.h"
#include <stdio.h>

static dw_status put_text(json_t *object, const char *key, const char *text) {
    return dw__hardware_put_json(object, key, *text ? json_string(text) : json_null());
}

/* -1 means unknown and is omitted. */
static dw_status put_number(json_t *object, const char *key, int value) {
    return dw__hardware_put_json(object, key, value >= 0 ? json_integer(value) : json_null());
}

static dw_status put_flag(json_t *object, const char *key, bool value) {
    return dw__hardware_put_json(object, key, json_boolean(value));
}

static dw_status add_object(json_t *array, json_t **object) {
    *object = json_object();
    if (*object && json_array_append_new(array, *object) == 0) return DW_OK;
    return dw__fail_memory("the description of this machine", sizeof **object);
}

static dw_status put_array(json_t *object, const char *key, json_t **array) {
    *array = json_array();
    return dw__hardware_put_json(object, key, *array);
}

/* Writes 90 as "9.0". */
static dw_status put_capability(json_t *object, int capability) {
    char text[16];
    snprintf(text, sizeof text, "%d.%d", capability / 10, capability % 10);
    return put_text(object, "compute_capability", text);
}

static dw_status put_formats(json_t *object, const dw_machine_gpu *gpu) {
    json_t *formats;
    DW_RETURN_IF_FAILED(put_array(object, "formats", &formats));
    for (int i = 0; i < DW_RATES; i++) {
        /* Before Ampere the only half precision is FP16. */
        const char *name =
            i == DW_RATE_BF16 && gpu->capability < 80 ? "fp16" : dw_rate_name((dw_rate)i);
        if (gpu->rate[i].value > 0 && json_array_append_new(formats, json_string(name)) != 0)
            return dw__fail_memory("the description of this machine", sizeof *gpu);
    }
    return DW_OK;
}

static dw_status put_gpu(json_t *array, int index, const dw_machine_gpu *gpu) {
    json_t *object, *rates;
    DW_RETURN_IF_FAILED(add_object(array, &object));
    DW_RETURN_IF_FAILED(put_number(object, "index", index));
    DW_RETURN_IF_FAILED(put_text(object, "name", gpu->name));
    DW_RETURN_IF_FAILED(put_text(object, "uuid", gpu->uuid));
    DW_RETURN_IF_FAILED(put_text(object, "bus", gpu->bus));
    DW_RETURN_IF_FAILED(put_text(object, "profile", gpu->profile));
    DW_RETURN_IF_FAILED(put_capability(object, gpu->capability));
    DW_RETURN_IF_FAILED(put_text(object, "sm_version", gpu->architecture));
    DW_RETURN_IF_FAILED(put_flag(object, "is_blackwell", *gpu->blackwell != '\0'));
    DW_RETURN_IF_FAILED(put_text(object, "blackwell_variant", gpu->blackwell));
    DW_RETURN_IF_FAILED(put_formats(object, gpu));
    DW_RETURN_IF_FAILED(dw__hardware_put_json(object, "rates", rates = json_object()));
    for (int i = 0; i < DW_RATES; i++)
        DW_RETURN_IF_FAILED(
            dw__hardware_put_figure(rates, dw_rate_name((dw_rate)i), &gpu->rate[i]));
#define PUT(member) DW_RETURN_IF_FAILED(dw__hardware_put_figure(object, #member, &gpu->member));
    PUT(sm_count)
    PUT(clock)
    PUT(memory_clock)
    PUT(memory)
    PUT(memory_bandwidth)
    PUT(copy_bandwidth)
    PUT(cache)
    PUT(power)
    PUT(link_bandwidth)
    PUT(host_bandwidth)
#undef PUT
    DW_RETURN_IF_FAILED(put_number(object, "memory_bus_bits", gpu->memory_bus_bits));
    DW_RETURN_IF_FAILED(put_number(object, "link_version", gpu->link_version));
    DW_RETURN_IF_FAILED(put_number(object, "links", gpu->links));
    DW_RETURN_IF_FAILED(put_number(object, "pcie_generation", gpu->pcie_generation));
    DW_RETURN_IF_FAILED(put_number(object, "pcie_lanes", gpu->pcie_lanes));
    return put_number(object, "numa_node", gpu->numa_node);
}

static dw_status put_link(json_t *array, const dw_machine_link *link) {
    json_t *object;
    DW_RETURN_IF_FAILED(add_object(array, &object));
    DW_RETURN_IF_FAILED(put_number(object, "gpu", link->gpu));
    DW_RETURN_IF_FAILED(put_number(object, "link", link->link));
    DW_RETURN_IF_FAILED(put_number(object, "version", link->version));
    DW_RETURN_IF_FAILED(put_text(object, "to", link->to));
    DW_RETURN_IF_FAILED(put_number(object, "peer", link->peer));
    DW_RETURN_IF_FAILED(put_text(object, "to_bus", link->to_bus));
    return dw__hardware_put_figure(object, "bandwidth", &link->bandwidth);
}

static dw_status put_path(json_t *array, const dw_machine *m, const dw_machine_path *path) {
    json_t *object;
    DW_RETURN_IF_FAILED(add_object(array, &object));
    DW_RETURN_IF_FAILED(put_number(object, "gpu", path->gpu));
    if (path->peer >= 0) DW_RETURN_IF_FAILED(put_number(object, "peer", path->peer));
    if (path->nic >= 0) DW_RETURN_IF_FAILED(put_text(object, "nic", m->nics[path->nic].name));
    DW_RETURN_IF_FAILED(put_text(object, "level", path->level));
    return put_number(object, "hops", path->hops);
}

static dw_status put_nic(json_t *array, const dw_machine_nic *nic) {
    json_t *object;
    DW_RETURN_IF_FAILED(add_object(array, &object));
    DW_RETURN_IF_FAILED(put_text(object, "name", nic->name));
    DW_RETURN_IF_FAILED(put_text(object, "kind", nic->kind));
    DW_RETURN_IF_FAILED(put_text(object, "bus", nic->bus));
    DW_RETURN_IF_FAILED(put_flag(object, "up", nic->up));
    DW_RETURN_IF_FAILED(put_number(object, "numa_node", nic->numa_node));
    return dw__hardware_put_figure(object, "bandwidth", &nic->bandwidth);
}

static dw_status put_numa(json_t *array, const dw_machine_numa *numa) {
    json_t *object;
    DW_RETURN_IF_FAILED(add_object(array, &object));
    DW_RETURN_IF_FAILED(put_number(object, "node", numa->node));
    DW_RETURN_IF_FAILED(put_text(object, "cpus", numa->cpus));
    return dw__hardware_put_figure(object, "memory", &numa->memory);
}

static dw_status put_cpu(json_t *object, const dw_machine *m) {
    const dw_machine_cpu *cpu = &m->cpu;
    json_t *numa;
    DW_RETURN_IF_FAILED(put_text(object, "model", cpu->model));
    DW_RETURN_IF_FAILED(put_text(object, "architecture", cpu->architecture));
    DW_RETURN_IF_FAILED(put_text(object, "source", cpu->source));
    DW_RETURN_IF_FAILED(put_number(object, "packages", cpu->packages));
    DW_RETURN_IF_FAILED(put_number(object, "cores", cpu->cores));
    DW_RETURN_IF_FAILED(put_number(object, "threads", cpu->threads));
    DW_RETURN_IF_FAILED(put_number(object, "usable", cpu->usable));
    DW_RETURN_IF_FAILED(dw__hardware_put_figure(object, "memory", &cpu->memory));
    DW_RETURN_IF_FAILED(dw__hardware_put_figure(object, "cache", &cpu->cache));
    DW_RETURN_IF_FAILED(put_array(object, "numa", &numa));
    for (int i = 0; i < m->numa_count; i++) DW_RETURN_IF_FAILED(put_numa(numa, &m->numa[i]));
    return DW_OK;
}

static dw_status put_lists(json_t *object, const dw_machine *m) {
    json_t *array;
    DW_RETURN_IF_FAILED(put_array(object, "gpus", &array));
    for (int i = 0; i < m->gpu_count; i++) DW_RETURN_IF_FAILED(put_gpu(array, i, &m->gpus[i]));
    DW_RETURN_IF_FAILED(put_array(object, "links", &array));
    for (int i = 0; i < m->link_count; i++) DW_RETURN_IF_FAILED(put_link(array, &m->links[i]));
    DW_RETURN_IF_FAILED(put_array(object, "paths", &array));
    for (int i = 0; i < m->path_count; i++) DW_RETURN_IF_FAILED(put_path(array, m, &m->paths[i]));
    DW_RETURN_IF_FAILED(put_array(object, "nics", &array));
    for (int i = 0; i < m->nic_count; i++) DW_RETURN_IF_FAILED(put_nic(array, &m->nics[i]));
    DW_RETURN_IF_FAILED(put_array(object, "remarks", &array));
    for (int i = 0; i < m->remark_count; i++)
        if (json_array_append_new(array, json_string(m->remarks[i])) != 0)
            return dw__fail_memory("the description of this machine", sizeof *m);
    return DW_OK;
}

static dw_status put_machine(json_t *root, const dw_machine *m) {
    json_t *object, *cpu;
    DW_RETURN_IF_FAILED(dw__hardware_put_json(root, "machine", object = json_object()));
    DW_RETURN_IF_FAILED(put_text(object, "driver", m->driver));
    DW_RETURN_IF_FAILED(put_text(object, "cuda", m->cuda));
    DW_RETURN_IF_FAILED(put_text(object, "fabric", m->fabric));
    DW_RETURN_IF_FAILED(put_number(object, "switches", m->switches));
    DW_RETURN_IF_FAILED(dw__hardware_put_figure(object, "bus_bandwidth", &m->bus_bandwidth));
    DW_RETURN_IF_FAILED(dw__hardware_put_json(object, "cpu", cpu = json_object()));
    DW_RETURN_IF_FAILED(put_cpu(cpu, m));
    return put_lists(object, m);
}

dw_status dw_machine_json(const dw_machine *machine, char **text) {
    dw_status status = DW_OK;
    dw_hardware summary;
    if (!machine || !text) return dw__fail(DW_INVALID_ARGUMENT, "the machine or `text` is NULL");
    *text = NULL;
    dw__machine_summary(machine, &summary);
    json_t *root = json_object();
    if (!root) return dw__fail_memory("the description of this machine", sizeof summary);
    DW_TRY(dw__hardware_put(root, &summary));
    DW_TRY(put_machine(root, machine));
    DW_TRY(dw__hardware_text(root, text));
cleanup:
    json_decref(root);
    return status;
}
