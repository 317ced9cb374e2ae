/* Layouts and their differences as text. */
#ifndef DW_PLAN_TEXT_H
#define DW_PLAN_TEXT_H

#include "base/base.h"
#include "deepwell/autoplan.h"

/* Lists the features that are in use: "tp 8, pp 16, dp 128, ZeRO-1, interleaved x4". */
dw_status dw__layout_words(const dw_layout *layout, dw__text *text);
/* Writes a remark that the reader must know before using the plan, or nothing if it does not apply. */
typedef enum dw__remark {
    DW__REMARK_FRAMEWORK, /* the framework's training is not built */
    DW__REMARK_POSITIONS, /* sequences are longer than the model's position table */
    DW__REMARKS
} dw__remark;
dw_status dw__remark_words(const dw_autoplan *plan, dw__remark remark, dw__text *text);
/* Lists the parts of time that differ most, relative to the seconds of `from`: "+4.1% tensor, +1.0% bubble, -0.8%
 * data". */
dw_status dw__loss_words(const dw_prediction *from, const dw_prediction *other, dw__text *text);
/* Names the largest part of the memory that is short: "optimizer: 61.2 of the 120.4 GiB that each GPU of stage 3 (of
 * 16) would need; it has 85.0 GiB". */
dw_status dw__tightest_words(const dw_layout *layout, const dw_prediction *prediction,
                             dw__text *text);

#endif
