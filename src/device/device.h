/* The table of functions that a device is. New members go to the end, optional ones may be NULL and are
 * marked; `version` says how many there are. */
#ifndef DW_DEVICE_H
#define DW_DEVICE_H

#include "base/base.h"
#include "deepwell/device.h"

#define DW_DEVICE_VERSION 1

struct dw_device {
    uint32_t version;
    const char *name;
    dw_status (*allocate)(size_t bytes, void **memory);
    void (*release)(void *memory, size_t bytes);
    dw_status (*copy)(void *to, const void *from, size_t bytes);
    dw_status (*fill)(void *memory, int byte, size_t bytes);
};

extern const dw_device dw__device_cpu;

#endif
