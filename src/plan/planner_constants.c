#include "plan/planner_constants.h"

const dw_planner_constant dw__constant_table[DW__CONSTANT_COUNT] = {
#define DW__CONSTANT(name, value, prior, spread, origin) {#name, value, prior, spread, origin},
    DW__PLANNER_CONSTANTS(DW__CONSTANT)
#undef DW__CONSTANT
};

const dw__constants dw__constants_default = {
#define DW__CONSTANT(name, value, prior, spread, origin) .name = value,
    DW__PLANNER_CONSTANTS(DW__CONSTANT)
#undef DW__CONSTANT
};

int dw_planner_constants(const dw_planner_constant **table) {
    *table = dw__constant_table;
    return DW__CONSTANT_COUNT;
}
