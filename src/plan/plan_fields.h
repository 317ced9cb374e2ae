/* The members of the planner's structures by name, in one list: for plan files, constraints and explanations. */
#ifndef DW_PLAN_FIELDS_H
#define DW_PLAN_FIELDS_H

#include "base/base.h"
#include "deepwell/autoplan.h"

typedef enum dw__field_kind {
    DW__FIELD_INTEGER,
    DW__FIELD_REAL,
    DW__FIELD_FLAG, /* an int, 0 or 1 */
    DW__FIELD_SCHEDULE,
    DW__FIELD_RECOMPUTE,
    DW__FIELD_PRECISION,
    DW__FIELD_FRAMEWORK
} dw__field_kind;

typedef struct dw__field {
    const char *name;
    size_t offset;
    dw__field_kind kind;
} dw__field;

typedef struct dw__field_list {
    const dw__field *fields;
    size_t count;
} dw__field_list;
extern const dw__field_list dw__model_fields, dw__layout_fields, dw__prediction_fields,
    dw__time_fields, dw__memory_fields, dw__statistics_fields;

const dw__field *dw__field_named(dw__field_list list, const char *name, size_t length);
/* Returns the name of an enumeration's value, or NULL if the kind is no enumeration, `value` is out of range, or no
 * plan has it. */
const char *dw__field_value_name(dw__field_kind kind, int value);
int dw__field_value_count(dw__field_kind kind);
int dw__field_get(const void *structure, const dw__field *field); /* every kind but REAL */
void dw__field_set(void *structure, const dw__field *field, int value);
double dw__field_real(const void *structure, const dw__field *field); /* REAL */

#endif
