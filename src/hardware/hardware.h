/* Inside the hardware layer. */
#ifndef DW_HARDWARE_INTERNAL_H
#define DW_HARDWARE_INTERNAL_H

#include "base/base.h"
#include "deepwell/hardware.h"

/* The catalogue's own entry; NULL. */
const dw_hardware *dw__hardware_profile(const char *name);
/* DW_NOT_FOUND with the names that there are. */
dw_status dw__hardware_no_profile(const char *name);

/* A description with its own copies of the texts, checked. */
dw_status dw__hardware_copy(const dw_hardware *hardware, dw_hardware **copy);

/* Whether a plan can be made for it: DW_INVALID_ARGUMENT names the field, its value, and what was expected. */
dw_status dw__hardware_check(const dw_hardware *hardware);

#endif
