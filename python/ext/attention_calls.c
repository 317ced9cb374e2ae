/* Attention called from Python directly. What libdeepwell takes is asked here too. */
#include "attention.h"

/* attention_supported(dtype, batch, heads_q, heads_kv, rows_q, rows_k, head_dim, packed, softcap, window_left,
 * window_right, bottom_right, dropout, backward, deterministic) -> "" or the reason why not */
static PyObject *attention_supported(PyObject *self, PyObject *args) {
    (void)self;
    const char *dtype = NULL;
    int batch, heads_q, heads_kv, rows_q, rows_k, dim, packed, left, right, bottom_right, backward,
        deterministic;
    double softcap, dropout;
    if (!PyArg_ParseTuple(args, "siiiiiipdiipdpp:attention_supported", &dtype, &batch, &heads_q,
                          &heads_kv, &rows_q, &rows_k, &dim, &packed, &softcap, &left, &right,
                          &bottom_right, &dropout, &backward, &deterministic))
        return NULL;
    dw_attention call = {.size = sizeof call, .dtype = dtype[0] == 'b' ? DW_BF16 : DW_F16};
    call.batch = batch, call.heads_q = heads_q, call.heads_kv = heads_kv;
    call.rows_q = rows_q, call.rows_k = rows_k, call.head_dim = dim;
    call.scale = 1.0f, call.softcap = (float)softcap, call.dropout = (float)dropout;
    call.window_left = left, call.window_right = right, call.bottom_right = bottom_right;
    call.deterministic = deterministic;
    /* No memory is read: any address that is not NULL and lies well stands for a tensor. */
    void *address = (void *)(uintptr_t)256;
    dw_attention_tensor query = {address, (int64_t)heads_q * rows_q * dim, (int64_t)rows_q * dim,
                                 dim};
    dw_attention_tensor key = {address, (int64_t)heads_kv * rows_k * dim, (int64_t)rows_k * dim,
                               dim};
    if (packed) {
        call.offsets_q = call.offsets_k = address;
        call.total_q = (int64_t)batch * rows_q, call.total_k = (int64_t)batch * rows_k;
        query.head = key.head = dim;
        query.row = (int64_t)heads_q * dim, key.row = (int64_t)heads_kv * dim;
    }
    call.q = call.o = call.d_o = call.dq = query;
    call.k = call.v = call.dk = call.dv = key;
    call.lse = address;
    if (dropout > 0) call.seed_memory = address;
    dw_status status = dw_attention_supported(&call, backward);
    return PyUnicode_FromString(status == DW_OK ? "" : dw_last_error());
}

PyMethodDef attention_functions[] = {{"attention_supported", attention_supported, METH_VARARGS,
                                      "\"\" or why libdeepwell does not take such a call"},
                                     {0}};
