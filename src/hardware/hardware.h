/* Inside the hardware layer. */
#ifndef DW_HARDWARE_INTERNAL_H
#define DW_HARDWARE_INTERNAL_H

#include "base/json.h"
#include "deepwell/hardware.h"

/* The integers and the texts of a description: member, what it may be. A description of a machine without GPUs has
 * zeros. */
#define DW_HARDWARE_COUNTS(X)                                                                      \
    X(capability, 0, 999)                                                                          \
    X(gpus, 0, DW_HARDWARE_MOST_GPUS)                                                              \
    X(gpus_per_node, 0, 4096)                                                                      \
    X(gpus_per_domain, 0, 4096)                                                                    \
    X(link_version, 0, 99)                                                                         \
    X(rails, 0, 4096)
#define DW_HARDWARE_TEXTS(X) X(name) X(architecture) X(network)

/* "published"; NULL for DW_FIGURE_UNKNOWN, which no file says. */
const char *dw__figure_kind_name(dw_figure_kind kind);

/* The catalogue's own entry; NULL. */
const dw_hardware *dw__hardware_profile(const char *name);
/* DW_NOT_FOUND with the names that there are. */
dw_status dw__hardware_no_profile(const char *name);

/* A description with its own copies of the texts, checked. */
dw_status dw__hardware_copy(const dw_hardware *hardware, dw_hardware **copy);

/* Whether a plan can be made for it: DW_INVALID_ARGUMENT names the field, its value, and what was expected. */
dw_status dw__hardware_check(const dw_hardware *hardware);
dw_status dw__hardware_check_count(const char *name, int64_t value, int64_t low, int64_t high);

/* Adds the fields of the file's form. */
dw_status dw__hardware_put(json_t *root, const dw_hardware *hardware);

#endif
