/* Layouts and their differences in words. */
#ifndef DW_PLAN_TEXT_H
#define DW_PLAN_TEXT_H

#include "base/base.h"
#include "deepwell/autoplan.h"

/* "tp 8, pp 16, dp 128, ZeRO-1, interleaved 4": what is not off. */
dw_status dw__layout_words(const dw_layout *layout, dw__text *text);
/* Writes the remarks that a reader must know before the plan is used, if there are any. */
typedef enum dw__remark {
    DW__REMARK_FRAMEWORK, /* its training is not built */
    DW__REMARK_POSITIONS, /* sequences are longer than the model's table */
    DW__REMARKS
} dw__remark;
dw_status dw__remark_words(const dw_autoplan *plan, dw__remark remark, dw__text *text);
/* "+4.1% tensor, +1.0% bubble, -0.8% data": the parts of `other` that differ most, of the seconds of `from`. */
dw_status dw__loss_words(const dw_prediction *from, const dw_prediction *other, dw__text *text);
/* "optimizer: 61.2 of 120.4 GB on each GPU of stage 3 of 16, which has 85.0 GB" */
dw_status dw__tightest_words(const dw_layout *layout, const dw_prediction *prediction,
                             dw__text *text);

#endif
