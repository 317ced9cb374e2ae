/* PCI Express from /sys: the position of devices, their distances, and network ports.
 *
 * The path of a device's folder gives its position in the tree:
 *     /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0
 *                  host bridge  root port    switch: up   and down     the device */
#include "hardware/machine_internal.h"
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dw__machine_numa_of(const dw__machine *m, const char *bus) {
    if (!*bus) return -1;
    return (int)dw__machine_read_number(m, -1, "/sys/bus/pci/devices/%s/numa_node", bus);
}

/* Returns the part of a device's real path that starts at its host bridge; "" if there is none. */
static void place_of(const dw__machine *m, const char *bus, char place[PATH_MAX]) {
    char path[512], real[PATH_MAX];
    unsigned domain, number;
    place[0] = '\0';
    if (!*bus) return;
    if (snprintf(path, sizeof path, "%s/sys/bus/pci/devices/%s", m->options->root, bus) >=
        (int)sizeof path)
        return;
    const char *from = realpath(path, real) ? strstr(real, "/pci") : NULL;
    while (from && sscanf(from, "/pci%x:%x", &domain, &number) != 2)
        from = strstr(from + 1, "/pci");
    if (from) snprintf(place, PATH_MAX, "%s", from + 1);
}

static int parts_in(const char *place) {
    int parts = *place != '\0';
    for (; *place; place++) parts += *place == '/';
    return parts;
}

/* Counts the leading parts that two places share. */
static int common_parts(const char *one, const char *other) {
    int parts = 0;
    size_t at = 0;
    for (;; at++) {
        bool end_one = one[at] == '/' || one[at] == '\0',
             end_other = other[at] == '/' || other[at] == '\0';
        if (end_one && end_other) parts++;
        if (one[at] != other[at] || one[at] == '\0') return parts;
    }
}

static dw_status add_path(dw__machine *m, dw_machine_path path, const char *bus,
                          const char *other) {
    char one[PATH_MAX], two[PATH_MAX];
    place_of(m, bus, one);
    place_of(m, other, two);
    if (!*one || !*two) return DW_OK;
    int common = common_parts(one, two);
    int numa = dw__machine_numa_of(m, bus);
    path.hops = parts_in(one) + parts_in(two) - 2 * common;
    if (common == 0)
        path.level = numa >= 0 && numa == dw__machine_numa_of(m, other) ? "NODE" : "SYS";
    else if (common == 1)
        path.level = "PHB";
    else /* devices below one switch are at most four hops apart: port, switch, port, device */
        path.level = path.hops <= 4 ? "PIX" : "PXB";
    return DW_PUSH(&m->paths, path);
}

dw_status dw__machine_read_paths(dw__machine *m) {
    int gpus = (int)m->gpus.count, nics = (int)m->nics.count;
    for (int i = 0; i < gpus; i++) {
        for (int j = i + 1; j < gpus; j++)
            DW_RETURN_IF_FAILED(add_path(m, (dw_machine_path){.gpu = i, .peer = j, .nic = -1},
                                         m->gpus.items[i].bus, m->gpus.items[j].bus));
        for (int j = 0; j < nics; j++)
            DW_RETURN_IF_FAILED(add_path(m, (dw_machine_path){.gpu = i, .peer = -1, .nic = j},
                                         m->gpus.items[i].bus, m->nics.items[j].bus));
    }
    return DW_OK;
}

/* ---- network ports --------------------------------------------------------------------------- */

/* Returns the PCI address behind `class`/NAME/device; "" if that is no PCI device. */
static dw_status bus_of(dw__machine *m, const char *class, const char *name, const char **bus) {
    char path[512], real[PATH_MAX];
    unsigned parts[4];
    char rest;
    *bus = "";
    if (snprintf(path, sizeof path, "%s/sys/class/%s/%s/device", m->options->root, class, name) >=
            (int)sizeof path ||
        !realpath(path, real))
        return DW_OK;
    const char *last = strrchr(real, '/') + 1;
    if (sscanf(last, "%x:%x:%x.%x%c", &parts[0], &parts[1], &parts[2], &parts[3], &rest) != 4)
        return DW_OK;
    return dw__machine_text(m, last, bus);
}

static dw_status add_nic(dw__machine *m, const char *class, const char *name, dw_machine_nic nic) {
    DW_RETURN_IF_FAILED(dw__machine_text(m, name, &nic.name));
    DW_RETURN_IF_FAILED(bus_of(m, class, name, &nic.bus));
    nic.numa_node = dw__machine_numa_of(m, nic.bus);
    return DW_PUSH(&m->nics, nic);
}

static dw_figure speed(double bytes_per_second, const char *source) {
    if (bytes_per_second <= 0) return (dw_figure){.source = ""};
    return (dw_figure){bytes_per_second, DW_FIGURE_READ, source};
}

/* Adds the ports of RDMA devices: "400 Gb/sec (4X NDR)", "4: ACTIVE". */
static dw_status add_infiniband(dw__machine *m, const char *name) {
    char rate[64], state[64], layer[64];
    if (!dw__machine_read(m, rate, sizeof rate, "/sys/class/infiniband/%s/ports/1/rate", name))
        return DW_OK;
    dw__machine_read(m, state, sizeof state, "/sys/class/infiniband/%s/ports/1/state", name);
    dw__machine_read(m, layer, sizeof layer, "/sys/class/infiniband/%s/ports/1/link_layer", name);
    return add_nic(m, "infiniband", name,
                   (dw_machine_nic){
                       .kind = strcmp(layer, "Ethernet") == 0 ? "RoCE" : "InfiniBand",
                       .up = strstr(state, "ACTIVE") != NULL,
                       .bandwidth = speed(strtod(rate, NULL) * 1e9 / 8, "/sys/class/infiniband")});
}

/* Adds an Ethernet device, unless it is listed as an RDMA port. */
static dw_status add_ethernet(dw__machine *m, const char *name) {
    enum { ETHERNET = 1 };
    char state[32];
    const char *bus;
    if (dw__machine_read_number(m, 0, "/sys/class/net/%s/type", name) != ETHERNET) return DW_OK;
    char path[512];
    if (snprintf(path, sizeof path, "%s/sys/class/net/%s/device", m->options->root, name) >=
            (int)sizeof path ||
        !realpath(path, (char[PATH_MAX]){0}))
        return DW_OK; /* bridges and other virtual devices */
    DW_RETURN_IF_FAILED(bus_of(m, "net", name, &bus));
    for (size_t i = 0; i < m->nics.count; i++)
        if (*bus && strcmp(m->nics.items[i].bus, bus) == 0) return DW_OK;
    int64_t megabits = dw__machine_read_number(m, -1, "/sys/class/net/%s/speed", name);
    dw__machine_read(m, state, sizeof state, "/sys/class/net/%s/operstate", name);
    return add_nic(
        m, "net", name,
        (dw_machine_nic){.kind = "Ethernet",
                         .up = strcmp(state, "up") == 0,
                         .bandwidth = speed((double)megabits * 1e6 / 8, "/sys/class/net")});
}

static int is_name(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static dw_status each_in(dw__machine *m, const char *class,
                         dw_status (*add)(dw__machine *m, const char *name)) {
    char path[512];
    struct dirent **entries = NULL;
    dw_status status = DW_OK;
    if (snprintf(path, sizeof path, "%s/sys/class/%s", m->options->root, class) >= (int)sizeof path)
        return DW_OK;
    int count = scandir(path, &entries, is_name, versionsort);
    for (int i = 0; i < count; i++) {
        if (status == DW_OK) status = add(m, entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
    return status;
}

dw_status dw__machine_read_nics(dw__machine *m) {
    DW_RETURN_IF_FAILED(each_in(m, "infiniband", add_infiniband));
    return each_in(m, "net", add_ethernet);
}
