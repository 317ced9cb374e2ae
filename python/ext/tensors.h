/* PyTorch's tensors as this extension sees them without PyTorch's headers. */
#ifndef DW_PYTHON_TENSORS_H
#define DW_PYTHON_TENSORS_H

#include "ext.h"
#include <stdbool.h>

/* DLPack 1.3, dlpack.h: the members that are used, at their offsets. */
typedef struct exchanged_tensor {
    void *data;
    int32_t device_type, device;
    int32_t rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *sizes, *strides; /* the tensor's own */
    uint64_t byte_offset;
} exchanged_tensor;

typedef struct exchange_api {
    uint32_t major, minor;
    struct exchange_api *previous;
    int (*allocate)(void);    /* not used: PyTorch's record_stream does not know such memory */
    int (*from_object)(void); /* not used: it takes a reference */
    int (*to_object)(void);   /* not used */
    int (*view)(void *object, exchanged_tensor *out);
    int (*stream)(int32_t device_type, int32_t device, void **stream);
} exchange_api;

/* Called once, before the functions below. Returns false with an exception. */
bool tensors_begin(void);

/* Returns the interface in a capsule of PyTorch's, or NULL with or without an exception. */
const exchange_api *exchange_of(PyObject *capsule);

/* Describes a plain tensor or parameter. Returns false, without an exception, for everything else, and if this PyTorch
 * cannot describe tensors in this way. */
bool tensor_view_of(PyObject *object, exchanged_tensor *view);
/* Reads the address of a tensor. Returns false with an exception. */
bool tensor_address(PyObject *object, void **address);

extern PyMethodDef tensors_functions[];

#endif
