/* Numbers of element types in defines and parameters of kernels, equal to dw_dtype (deepwell/dtype.h). Plain C, read by
 * the host and by device code alike. */
#ifndef DW_ELEMENT_TYPES_H
#define DW_ELEMENT_TYPES_H

#define DW_ELEMENT_BOOL 0
#define DW_ELEMENT_I32 1
#define DW_ELEMENT_I64 2
#define DW_ELEMENT_BF16 3
#define DW_ELEMENT_F16 4
#define DW_ELEMENT_F32 5
#define DW_ELEMENT_F64 6

#endif
