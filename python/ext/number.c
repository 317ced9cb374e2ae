/* Number formats for Python (deepwell/number.h). Arguments are addresses and sizes; deepwell/numbers.py wraps them. */
#include "ext.h"

static PyObject *finish(dw_status status) {
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

/* Addresses are passed as integers. */
static int to_address(PyObject *object, void *address) {
    void *value = PyLong_AsVoidPtr(object);
    if (value == NULL && PyErr_Occurred()) return 0;
    *(void **)address = value;
    return 1;
}

/* Sets names[name] = number. Returns 0 with an exception if it fails. */
static int add_name(PyObject *names, const char *name, int number) {
    PyObject *value = PyLong_FromLong(number);
    int set = value ? PyDict_SetItemString(names, name, value) : -1;
    Py_XDECREF(value);
    return set == 0;
}

/* number_names() -> ({name: enumerator} of the types that encode supports, {name: enumerator} of the schemes that
 * block_quantize supports) */
static PyObject *number_names(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *formats = PyDict_New(), *schemes = PyDict_New();
    if (formats == NULL || schemes == NULL) goto failed;
    for (int i = 0; i < DW_DTYPE_COUNT; i++)
        if (dw_dtype_max((dw_dtype)i) != 0.0f && !add_name(formats, dw_dtype_name((dw_dtype)i), i))
            goto failed;
    for (int i = 0; i < DW_SCHEME_COUNT; i++)
        if (dw_scheme_describe((dw_scheme)i)->block > 0 &&
            !add_name(schemes, dw_scheme_name((dw_scheme)i), i))
            goto failed;
    return Py_BuildValue("(NN)", formats, schemes);
failed:
    Py_XDECREF(formats);
    Py_XDECREF(schemes);
    return NULL;
}

/* encode(dtype, count, values, overflow, rounding, seed, offset, stream, codes) */
static PyObject *number_encode(PyObject *self, PyObject *args) {
    (void)self;
    int dtype = 0, overflow = 0, rounding = 0;
    long long count = 0, seed = 0, offset = 0, stream = 0;
    const float *values = NULL;
    void *codes = NULL;
    if (!PyArg_ParseTuple(args, "iLO&iiLLLO&:encode", &dtype, &count, to_address, &values,
                          &overflow, &rounding, &seed, &offset, &stream, to_address, &codes))
        return NULL;
    dw_encode_options options = DW_ENCODE_OPTIONS_DEFAULT;
    options.overflow = (dw_overflow)overflow;
    options.rounding = (dw_rounding)rounding;
    options.random = (dw_random){seed, offset, stream};
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_encode((dw_dtype)dtype, count, values, &options, codes);
    Py_END_ALLOW_THREADS;
    return finish(status);
}

/* decode(dtype, count, codes, values) */
static PyObject *number_decode(PyObject *self, PyObject *args) {
    (void)self;
    int dtype = 0;
    long long count = 0;
    const void *codes = NULL;
    float *values = NULL;
    if (!PyArg_ParseTuple(args, "iLO&O&:decode", &dtype, &count, to_address, &codes, to_address,
                          &values))
        return NULL;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_decode((dw_dtype)dtype, count, codes, values);
    Py_END_ALLOW_THREADS;
    return finish(status);
}

static PyObject *repack(PyObject *args, dw_status (*run)(int64_t, const uint8_t *, uint8_t *)) {
    long long count = 0;
    const uint8_t *from = NULL;
    uint8_t *to = NULL;
    if (!PyArg_ParseTuple(args, "LO&O&", &count, to_address, &from, to_address, &to)) return NULL;
    return finish(run(count, from, to));
}
static PyObject *number_fp6_pack(PyObject *self, PyObject *args) {
    (void)self;
    return repack(args, dw_fp6_pack);
}
static PyObject *number_fp6_unpack(PyObject *self, PyObject *args) {
    (void)self;
    return repack(args, dw_fp6_unpack);
}

/* Reads the options, a tuple: scheme, scale_rule, square, axis, rounding, seed, offset, stream, tensor_scale. */
static int to_options(PyObject *object, void *address) {
    dw_block_options *options = address;
    int scheme = 0, rule = 0, rounding = 0;
    long long seed = 0, offset = 0, stream = 0;
    *options = (dw_block_options)DW_BLOCK_OPTIONS_DEFAULT;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "block options are a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(object, "iiiiiLLLf:block options", &scheme, &rule, &options->square,
                          &options->axis, &rounding, &seed, &offset, &stream,
                          &options->tensor_scale))
        return 0;
    options->scheme = (dw_scheme)scheme;
    options->scale_rule = (dw_scale_rule)rule;
    options->rounding = (dw_rounding)rounding;
    options->random = (dw_random){seed, offset, stream};
    return 1;
}

/* block_layout(options, rows, cols) -> (outer, inner, row_bytes, scale_rows, scale_cols, name of element, name of
 * scale) */
static PyObject *number_block_layout(PyObject *self, PyObject *args) {
    (void)self;
    dw_block_options options;
    long long rows = 0, cols = 0;
    if (!PyArg_ParseTuple(args, "O&LL:block_layout", to_options, &options, &rows, &cols))
        return NULL;
    dw_block_layout layout;
    dw_status status = dw_block_layout_of(&options, rows, cols, &layout);
    if (status != DW_OK) return extension_fail(status);
    return Py_BuildValue("(LLLLLss)", (long long)layout.outer, (long long)layout.inner,
                         (long long)layout.row_bytes, (long long)layout.scale_rows,
                         (long long)layout.scale_cols, dw_dtype_name(layout.element),
                         dw_dtype_name(layout.scale));
}

/* block_quantize(options, rows, cols, source, row_stride, codes, code_stride, scales) */
static PyObject *number_block_quantize(PyObject *self, PyObject *args) {
    (void)self;
    dw_block_options options;
    long long rows = 0, cols = 0, row_stride = 0, code_stride = 0;
    const float *source = NULL;
    void *codes = NULL, *scales = NULL;
    if (!PyArg_ParseTuple(args, "O&LLO&LO&LO&:block_quantize", to_options, &options, &rows, &cols,
                          to_address, &source, &row_stride, to_address, &codes, &code_stride,
                          to_address, &scales))
        return NULL;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status =
        dw_block_quantize(&options, rows, cols, source, row_stride, codes, code_stride, scales);
    Py_END_ALLOW_THREADS;
    return finish(status);
}

/* block_dequantize(options, rows, cols, codes, code_stride, scales, result, row_stride) */
static PyObject *number_block_dequantize(PyObject *self, PyObject *args) {
    (void)self;
    dw_block_options options;
    long long rows = 0, cols = 0, row_stride = 0, code_stride = 0;
    const void *codes = NULL, *scales = NULL;
    float *result = NULL;
    if (!PyArg_ParseTuple(args, "O&LLO&LO&O&L:block_dequantize", to_options, &options, &rows, &cols,
                          to_address, &codes, &code_stride, to_address, &scales, to_address,
                          &result, &row_stride))
        return NULL;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status =
        dw_block_dequantize(&options, rows, cols, codes, code_stride, scales, result, row_stride);
    Py_END_ALLOW_THREADS;
    return finish(status);
}

/* nvfp4_tensor_scale(rows, cols, source, row_stride) -> (scale, amax) */
static PyObject *number_nvfp4_tensor_scale(PyObject *self, PyObject *args) {
    (void)self;
    long long rows = 0, cols = 0, row_stride = 0;
    const float *source = NULL;
    if (!PyArg_ParseTuple(args, "LLO&L:nvfp4_tensor_scale", &rows, &cols, to_address, &source,
                          &row_stride))
        return NULL;
    float amax = 0.0f;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_amax(rows, cols, source, row_stride, &amax);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) return extension_fail(status);
    return Py_BuildValue("(dd)", (double)dw_nvfp4_tensor_scale(amax), (double)amax);
}

/* hadamard(size, axis, inverse, random_signs, seed, offset, stream, rows, cols, source, row_stride, result,
 * result_stride) */
static PyObject *number_hadamard(PyObject *self, PyObject *args) {
    (void)self;
    dw_hadamard_options options = DW_HADAMARD_OPTIONS_DEFAULT;
    long long seed = 0, offset = 0, stream = 0, rows = 0, cols = 0;
    long long row_stride = 0, result_stride = 0;
    const float *source = NULL;
    float *result = NULL;
    if (!PyArg_ParseTuple(args, "iippLLLLLO&LO&L:hadamard", &options.size, &options.axis,
                          &options.inverse, &options.random_signs, &seed, &offset, &stream, &rows,
                          &cols, to_address, &source, &row_stride, to_address, &result,
                          &result_stride))
        return NULL;
    options.random = (dw_random){seed, offset, stream};
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_hadamard(&options, rows, cols, source, row_stride, result, result_stride);
    Py_END_ALLOW_THREADS;
    return finish(status);
}

/* scales_swizzled_bytes(rows, cols) -> bytes, or -1 */
static PyObject *number_swizzled_bytes(PyObject *self, PyObject *args) {
    (void)self;
    long long rows = 0, cols = 0;
    if (!PyArg_ParseTuple(args, "LL:scales_swizzled_bytes", &rows, &cols)) return NULL;
    return PyLong_FromLongLong(dw_scales_swizzled_bytes(rows, cols));
}

static PyObject *reorder(PyObject *args,
                         dw_status (*run)(int64_t, int64_t, int64_t, const uint8_t *, uint8_t *)) {
    long long rows = 0, cols = 0, repeat = 0;
    const uint8_t *from = NULL;
    uint8_t *to = NULL;
    if (!PyArg_ParseTuple(args, "LLLO&O&", &rows, &cols, &repeat, to_address, &from, to_address,
                          &to))
        return NULL;
    return finish(run(rows, cols, repeat, from, to));
}
static PyObject *number_swizzle(PyObject *self, PyObject *args) {
    (void)self;
    return reorder(args, dw_scales_swizzle);
}
static PyObject *number_unswizzle(PyObject *self, PyObject *args) {
    (void)self;
    return reorder(args, dw_scales_unswizzle);
}

PyMethodDef number_functions[] = {
    {"number_names", number_names, METH_NOARGS, "numbers of formats and of schemes"},
    {"encode", number_encode, METH_VARARGS, "F32 to codes"},
    {"decode", number_decode, METH_VARARGS, "codes to F32"},
    {"fp6_pack", number_fp6_pack, METH_VARARGS, "fp6_pack(count, codes, packed)"},
    {"fp6_unpack", number_fp6_unpack, METH_VARARGS, "fp6_unpack(count, packed, codes)"},
    {"block_layout", number_block_layout, METH_VARARGS, "sizes of codes and scales"},
    {"block_quantize", number_block_quantize, METH_VARARGS, "F32 to codes and scales"},
    {"block_dequantize", number_block_dequantize, METH_VARARGS, "codes and scales to F32"},
    {"nvfp4_tensor_scale", number_nvfp4_tensor_scale, METH_VARARGS, "-> (scale, amax)"},
    {"hadamard", number_hadamard, METH_VARARGS, "random Hadamard transform"},
    {"scales_swizzled_bytes", number_swizzled_bytes, METH_VARARGS, "size of swizzled scales"},
    {"scales_swizzle", number_swizzle, METH_VARARGS, "to the order of tensor cores"},
    {"scales_unswizzle", number_unswizzle, METH_VARARGS, "and back"},
    {0}};
