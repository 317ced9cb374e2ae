/* Internal declarations of the hardware layer. */
#ifndef DW_HARDWARE_INTERNAL_H
#define DW_HARDWARE_INTERNAL_H

#include "base/json.h"
#include "deepwell/hardware.h"

/* The integers and texts of a description, with the range of each integer. A description of a machine without GPUs
 * has zeros. */
#define DW_HARDWARE_COUNTS(X)                                                                      \
    X(capability, 0, 999)                                                                          \
    X(gpus, 0, DW_HARDWARE_MOST_GPUS)                                                              \
    X(gpus_per_node, 0, 4096)                                                                      \
    X(gpus_per_domain, 0, 4096)                                                                    \
    X(link_version, 0, 99)                                                                         \
    X(rails, 0, 4096)
#define DW_HARDWARE_TEXTS(X) X(name) X(architecture) X(network)

/* No vendor publishes latencies. These, in seconds, are the ones of NCCL's own cost model (src/graph/tuning.cc, ring,
 * LL128), which NCCL uses to choose its algorithms. */
#define DW_LATENCY_SOURCE "NCCL's cost model, ring, LL128"
#define DW_LATENCY_NVLINK 1.9e-6
#define DW_LATENCY_PCIE 2.5e-6
#define DW_LATENCY_NETWORK 4.0e-6

/* Returns a name such as "published". Returns NULL for DW_FIGURE_UNKNOWN, which no file contains. */
const char *dw__figure_kind_name(dw_figure_kind kind);

/* Returns the catalogue's own entry, or NULL. */
const dw_hardware *dw__hardware_profile(const char *name);
/* Fails with DW_NOT_FOUND and lists the names of the catalogue. */
dw_status dw__hardware_no_profile(const char *name);

/* Makes a checked description with its own copies of the texts. */
dw_status dw__hardware_copy(const dw_hardware *hardware, dw_hardware **copy);

/* Checks that plans can be made for the hardware. DW_INVALID_ARGUMENT names the field, its value and what was
 * expected. */
dw_status dw__hardware_check(const dw_hardware *hardware);
dw_status dw__hardware_check_count(const char *name, int64_t value, int64_t low, int64_t high);

/* Writing JSON. _put_json adds a member and takes ownership of `value`; NULL means out of memory. _put_figure adds a
 * figure unless it is absent, and _put all fields of the file. _text writes the text; free it with dw__text_free. */
dw_status dw__hardware_put_json(json_t *object, const char *key, json_t *value);
dw_status dw__hardware_put_figure(json_t *object, const char *key, const dw_figure *figure);
dw_status dw__hardware_text(const json_t *root, char **text);
dw_status dw__hardware_put(json_t *root, const dw_hardware *hardware);

#endif
