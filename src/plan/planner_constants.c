#include "plan/planner_constants.h"

const dw__constant_row dw__constant_table[DW__CONSTANT_COUNT] = {
#define DW__CONSTANT(name, value, prior, spread, origin) {#name, value, prior, spread, origin},
    DW__PLANNER_CONSTANTS(DW__CONSTANT)
#undef DW__CONSTANT
};

const dw__constants dw__constants_default = {
#define DW__CONSTANT(name, value, prior, spread, origin) .name = value,
    DW__PLANNER_CONSTANTS(DW__CONSTANT)
#undef DW__CONSTANT
};
