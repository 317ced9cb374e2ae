/* Translates queries about a call of attention, described by its sizes, to libdeepwell, which decides which backend
 * runs it (dw_attention_decide, dw_attention_has_alternative). A table stores the decided classes of calls. */
#include "attention_module.h"
#include "deepwell/explain.h"
#include <string.h>

/* Reads the last arguments of a function: dtype, batch, heads_q, heads_kv, seq_len_q, seq_len_kv, head_dim, packed,
 * softcap, window_left, window_right, bottom_right, dropout, backward, deterministic. Returns false with an exception
 * set. */
static bool read_sizes(PyObject *args, Py_ssize_t first, dw_attention *call, bool *backward) {
    const char *dtype = NULL;
    int batch, heads_q, heads_kv, seq_len_q, seq_len_kv, dim, packed, left, right, bottom_right,
        backwards, deterministic;
    double softcap, dropout;
    PyObject *sizes = PyTuple_GetSlice(args, first, PyTuple_Size(args));
    if (sizes == NULL) return false;
    int parsed = PyArg_ParseTuple(sizes, "siiiiiipdiipdpp", &dtype, &batch, &heads_q, &heads_kv,
                                  &seq_len_q, &seq_len_kv, &dim, &packed, &softcap, &left, &right,
                                  &bottom_right, &dropout, &backwards, &deterministic);
    bool f16 = parsed && dtype[0] == 'f';
    Py_DECREF(sizes);
    if (!parsed) return false;
    *call = (dw_attention){.struct_size = sizeof *call, .dtype = f16 ? DW_F16 : DW_BF16};
    call->batch = batch, call->heads_q = heads_q, call->heads_kv = heads_kv;
    call->seq_len_q = seq_len_q, call->seq_len_kv = seq_len_kv, call->head_dim = dim;
    call->scale = 1.0f, call->softcap = (float)softcap, call->dropout = (float)dropout;
    call->window_left = left, call->window_right = right, call->bottom_right = bottom_right;
    call->deterministic = deterministic;
    /* No memory is read, so any aligned address other than NULL stands for a tensor. */
    void *address = (void *)(uintptr_t)256;
    dw_attention_tensor query = {address, (int64_t)heads_q * seq_len_q * dim,
                                 (int64_t)seq_len_q * dim, dim};
    dw_attention_tensor key = {address, (int64_t)heads_kv * seq_len_kv * dim,
                               (int64_t)seq_len_kv * dim, dim};
    if (packed) {
        call->offsets_q = call->offsets_k = address;
        call->total_q = (int64_t)batch * seq_len_q, call->total_k = (int64_t)batch * seq_len_kv;
        query.head = key.head = dim;
        query.row = (int64_t)heads_q * dim, key.row = (int64_t)heads_kv * dim;
    }
    call->q = call->o = call->d_o = call->dq = query;
    call->k = call->v = call->dk = call->dv = key;
    call->lse = address;
    if (dropout > 0) call->seed_memory = address;
    *backward = backwards;
    return true;
}

/* ---- measurements ---------------------------------------------------------------------------------------------- */

static PyObject *fail(void) {
    PyErr_SetString(PyExc_RuntimeError, dw_last_error());
    return NULL;
}

/* attention_decide(prepare, with or None, *sizes) -> (verdict, name or None, because, refusal); verdict is "ours",
 * "others" or "unmeasured". A call that is not consistent is refused with the message. */
static PyObject *attention_decide(PyObject *self, PyObject *args) {
    (void)self;
    static const char *const verdicts[] = {[DW_ATTENTION_OURS] = "ours",
                                           [DW_ATTENTION_OTHERS] = "others",
                                           [DW_ATTENTION_UNMEASURED] = "unmeasured"};
    dw_attention_decision made = {.struct_size = sizeof made};
    dw_attention call;
    bool gradients;
    if (PyTuple_Size(args) < 2) {
        PyErr_SetString(PyExc_TypeError, "attention_decide takes prepare (bool), with and sizes");
        return NULL;
    }
    int prepare = PyObject_IsTrue(PyTuple_GetItem(args, 0));
    PyObject *with = PyTuple_GetItem(args, 1);
    const char *versions = with == Py_None ? NULL : PyUnicode_AsUTF8AndSize(with, NULL);
    if (PyErr_Occurred() || !read_sizes(args, 2, &call, &gradients)) return NULL;
    if (dw_attention_decide(&call, gradients, versions, prepare, &made) == DW_OK)
        return Py_BuildValue("(szss)", verdicts[made.verdict], made.name, made.because,
                             made.refusal);
    return Py_BuildValue("(szss)", verdicts[DW_ATTENTION_OTHERS], NULL, "", dw_last_error());
}

/* attention_class(*sizes) -> the class of shapes, of backward if requested */
static PyObject *attention_class(PyObject *self, PyObject *args) {
    (void)self;
    dw_attention call;
    bool backward;
    char text[256];
    if (!read_sizes(args, 0, &call, &backward)) return NULL;
    if (dw_attention_class(&call, backward, text, sizeof text) != DW_OK) return fail();
    return PyUnicode_FromString(text);
}

/* tune_publish(class, with, [(name, seconds, error, failure or None), ...]) */
static PyObject *tune_publish(PyObject *self, PyObject *args) {
    (void)self;
    enum { MOST = 16 };
    dw_tune_time times[MOST];
    const char *shape_class = NULL, *with = NULL;
    PyObject *list = NULL;
    if (!PyArg_ParseTuple(args, "ssO:tune_publish", &shape_class, &with, &list)) return NULL;
    Py_ssize_t count = PyList_Size(list);
    if (count > MOST) PyErr_Format(PyExc_ValueError, "tune_publish: at most %d times", MOST);
    if (count < 0 || count > MOST) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        times[i] = (dw_tune_time){0};
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "sddz", &times[i].name, &times[i].seconds,
                              &times[i].error, &times[i].failure))
            return NULL;
    }
    if (dw_tune_publish(shape_class, with, times, (size_t)count) != DW_OK) return fail();
    Py_RETURN_NONE;
}

/* ---- decisions --------------------------------------------------------------------------------------------------- */

/* Decisions by class and device. Read and written with the GIL held. */
enum { SLOTS = 1024, MOST_SETTLED = SLOTS / 2 };
static struct {
    uint64_t key; /* 0: free */
    bool ours;
} settled[SLOTS];
static int settled_count;
static bool watched, alternatives;

static uint64_t key_of(const dw_attention *call, bool gradients, int32_t device) {
    uint64_t number = dw_attention_class_number(call, gradients);
    return number == 0 || device < 0 || device > 4095 ? 0 : number << 12 | (uint64_t)device;
}

/* Returns the slot of `key`, or the free slot for it. */
static size_t slot_of(uint64_t key) {
    size_t slot = (size_t)(key * 0x9e3779b97f4a7c15u >> 54);
    while (settled[slot].key != 0 && settled[slot].key != key) slot = (slot + 1) % SLOTS;
    return slot;
}

bool attention_is_settled(const dw_attention *call, bool gradients, int32_t device) {
    if (!watched || !dw_attention_has_alternative(call)) return true;
    uint64_t key = key_of(call, gradients, device);
    if (key == 0) return true;
    size_t slot = slot_of(key);
    return settled[slot].key == 0 ? settled_count == MOST_SETTLED : settled[slot].ours;
}

bool attention_has_alternatives(void) { return alternatives; }

/* attention_watch(on): whether calls are measured before Deepwell runs them. Clears the table. */
static PyObject *attention_watch(PyObject *self, PyObject *on) {
    (void)self;
    int wanted = PyObject_IsTrue(on);
    if (wanted < 0) return NULL;
    watched = wanted, alternatives = false;
    settled_count = 0;
    memset(settled, 0, sizeof settled);
    Py_RETURN_NONE;
}

/* attention_settle(ours, device, *sizes) stores a decision. If the table is full, Deepwell runs classes outside of
 * it. */
static PyObject *attention_settle(PyObject *self, PyObject *args) {
    (void)self;
    dw_attention call;
    bool gradients;
    if (PyTuple_Size(args) < 2) {
        PyErr_SetString(PyExc_TypeError, "attention_settle takes ours (bool), a device and sizes");
        return NULL;
    }
    int ours = PyObject_IsTrue(PyTuple_GetItem(args, 0));
    long device = PyLong_AsLong(PyTuple_GetItem(args, 1));
    if (PyErr_Occurred() || !read_sizes(args, 2, &call, &gradients)) return NULL;
    uint64_t key = key_of(&call, gradients, device < 0 || device > 4095 ? -1 : (int32_t)device);
    if (key == 0) Py_RETURN_NONE;
    size_t slot = slot_of(key);
    if (settled[slot].key == 0) {
        if (settled_count == MOST_SETTLED) Py_RETURN_NONE;
        settled_count++;
    }
    settled[slot].key = key;
    settled[slot].ours = ours;
    alternatives = alternatives || !ours;
    Py_RETURN_NONE;
}

/* attention_settled(device, *sizes): for tests of the table */
static PyObject *attention_settled(PyObject *self, PyObject *args) {
    (void)self;
    dw_attention call;
    bool gradients;
    long device = PyTuple_Size(args) > 0 ? PyLong_AsLong(PyTuple_GetItem(args, 0)) : 0;
    if (PyErr_Occurred() || !read_sizes(args, 1, &call, &gradients)) return NULL;
    return PyBool_FromLong(attention_is_settled(&call, gradients, (int32_t)device));
}

PyMethodDef attention_decision_functions[] = {
    {"attention_decide", attention_decide, METH_VARARGS, "which backend runs such a call, and why"},
    {"attention_class", attention_class, METH_VARARGS, "the class of shapes of such a call"},
    {"tune_publish", tune_publish, METH_VARARGS, "stores the times of candidates"},
    {"attention_watch", attention_watch, METH_O, "sets whether calls are measured first"},
    {"attention_settle", attention_settle, METH_VARARGS,
     "stores which backend runs the calls of a class"},
    {"attention_settled", attention_settled, METH_VARARGS, "whether Deepwell is known to run it"},
    {0}};
