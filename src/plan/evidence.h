/* Decides which parts of a layout are measured: those that occur in the published runs with which predictions are
 * compared (docs/planner.md). */
#ifndef DW_EVIDENCE_H
#define DW_EVIDENCE_H

#include "plan/search.h"

/* Limits the search to measured parts, except for parts that the request fixes. */
void dw__evidence_limit(const dw_hardware *hardware, dw__limits *limits);
/* Writes the layout's unmeasured parts with the evidence that exists; "" if all are measured. Free the text with
 * dw__text_free. */
dw_status dw__evidence_words(const dw_hardware *hardware, const dw_layout *layout, dw__text *text);

#endif
