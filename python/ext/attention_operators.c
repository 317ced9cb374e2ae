/* deepwell::attention_forward and deepwell::attention_backward for CUDA tensors, registered with PyTorch's dispatcher
 * from C, so that a call runs no Python.
 *
 * PyTorch's stable shim is a set of C functions in libtorch_cpu.so. They are found by dlsym; their prototypes here are
 * our own. A kernel gets its arguments as 64-bit words (StableIValue): a tensor is a handle that the kernel must
 * release, an optional is NULL or a word allocated by operator new, a double is its bits. An error leaves as a C++
 * exception that PyTorch itself throws (aoti_torch_check), after everything has been released.
 */
#include "attention_module.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef struct opaque_tensor *tensor_handle;
typedef struct opaque_library *library_handle;
typedef struct opaque_guard *guard_handle;
typedef uint64_t word;

/* name, return type, parameters */
#define SHIM_MAP(X)                                                                                \
    X(aoti_torch_library_init_impl, int32_t,                                                       \
      (const char *, const char *, const char *, uint32_t, library_handle *))                      \
    X(aoti_torch_library_impl, int32_t,                                                            \
      (library_handle, const char *, void (*)(word *, uint64_t, uint64_t)))                        \
    X(aoti_torch_delete_tensor_object, int32_t, (tensor_handle))                                   \
    X(aoti_torch_get_data_ptr, int32_t, (tensor_handle, void **))                                  \
    X(aoti_torch_get_dim, int32_t, (tensor_handle, int64_t *))                                     \
    X(aoti_torch_get_sizes, int32_t, (tensor_handle, int64_t **))                                  \
    X(aoti_torch_get_strides, int32_t, (tensor_handle, int64_t **))                                \
    X(aoti_torch_get_dtype, int32_t, (tensor_handle, int32_t *))                                   \
    X(aoti_torch_get_device_type, int32_t, (tensor_handle, int32_t *))                             \
    X(aoti_torch_get_device_index, int32_t, (tensor_handle, int32_t *))                            \
    X(aoti_torch_empty_strided, int32_t,                                                           \
      (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor_handle *))     \
    X(aoti_torch_copy_, int32_t, (tensor_handle, tensor_handle, int32_t))                          \
    X(aoti_torch_get_current_device_index, int32_t, (int32_t *))                                   \
    X(aoti_torch_create_device_guard, int32_t, (int32_t, guard_handle *))                          \
    X(aoti_torch_delete_device_guard, int32_t, (guard_handle))                                     \
    X(aoti_torch_device_type_cuda, int32_t, (void))                                                \
    X(aoti_torch_dtype_bfloat16, int32_t, (void))                                                  \
    X(aoti_torch_dtype_float16, int32_t, (void))                                                   \
    X(aoti_torch_dtype_float32, int32_t, (void))                                                   \
    X(aoti_torch_dtype_int32, int32_t, (void))                                                     \
    X(aoti_torch_dtype_int64, int32_t, (void))                                                     \
    X(aoti_torch_dtype_uint8, int32_t, (void))                                                     \
    X(aoti_torch_check, void, (bool, const char *, const char *, uint32_t, const char *))

static struct {
#define SHIM_MEMBER(name, result, parameters) result(*name) parameters;
    SHIM_MAP(SHIM_MEMBER)
#undef SHIM_MEMBER
    int32_t (*aoti_torch_get_current_cuda_stream)(
        int32_t, void **);       /* in libtorch_cuda.so; NULL if that is absent */
    void (*delete_word)(void *); /* C++'s operator delete */
    /* THPVariable_Wrap(const at::TensorBase &) in libtorch_python.so, or NULL. Not of the stable interface:
     * without it direct calls go through the operator. */
    PyObject *(*wrap)(tensor_handle);
    int32_t cuda, bf16, f16, f32, i32, i64, u8;
} shim;

enum { MAX_HANDLES = 24 };

/* One call of an operator, with every handle that it must release. */
typedef struct operator_call {
    tensor_handle handles[MAX_HANDLES];
    int count;
    guard_handle guard;
    int32_t device_type, device;
    char message[640]; /* "": no error so far */
} operator_call;

static long long copies; /* number of tensors that were made contiguous */

static void complain(operator_call *call, const char *message) {
    if (call->message[0] != '\0') return;
    strncpy(call->message, message, sizeof call->message - 1);
}

static bool failed(const operator_call *call) { return call->message[0] != '\0'; }

static bool keep(operator_call *call, tensor_handle handle) {
    if (call->count == MAX_HANDLES) return false;
    call->handles[call->count++] = handle;
    return true;
}

/* Removes a handle from the list of things to release, because the caller returns it. */
static word hand_out(operator_call *call, tensor_handle handle) {
    for (int i = 0; i < call->count; i++) {
        if (call->handles[i] == handle) call->handles[i] = NULL;
    }
    return (word)(uintptr_t)handle;
}

static void finish(operator_call *call) {
    for (int i = 0; i < call->count; i++) {
        if (call->handles[i] != NULL) shim.aoti_torch_delete_tensor_object(call->handles[i]);
    }
    if (call->guard != NULL) shim.aoti_torch_delete_device_guard(call->guard);
}

static int dtype_of(int32_t torch_dtype) {
    if (torch_dtype == shim.bf16) return DW_BF16;
    if (torch_dtype == shim.f16) return DW_F16;
    if (torch_dtype == shim.f32) return DW_F32;
    if (torch_dtype == shim.i32) return DW_I32;
    if (torch_dtype == shim.i64) return DW_I64;
    return -1;
}

static tensor_view view_of(operator_call *call, tensor_handle handle) {
    tensor_view view = {0};
    int64_t *sizes = NULL, *strides = NULL;
    int32_t dtype = 0;
    int32_t wrong =
        shim.aoti_torch_get_data_ptr(handle, &view.data) |
        shim.aoti_torch_get_dim(handle, &view.rank) | shim.aoti_torch_get_sizes(handle, &sizes) |
        shim.aoti_torch_get_strides(handle, &strides) | shim.aoti_torch_get_dtype(handle, &dtype) |
        shim.aoti_torch_get_device_index(handle, &view.device);
    if (wrong) complain(call, "attention: PyTorch could not describe an argument");
    view.sizes = sizes, view.strides = strides, view.dtype = dtype_of(dtype);
    return view;
}

static tensor_handle argument(operator_call *call, word value) {
    tensor_handle handle = (tensor_handle)(uintptr_t)value;
    keep(call, handle);
    return handle;
}

static tensor_handle optional_argument(operator_call *call, word value) {
    if (value == 0) return NULL;
    word *inner = (word *)(uintptr_t)value;
    tensor_handle handle = argument(call, *inner);
    shim.delete_word(inner);
    return handle;
}

static tensor_handle allocate(operator_call *call, int64_t rank, const int64_t *sizes,
                              const int64_t *strides, int32_t dtype) {
    tensor_handle made = NULL;
    if (failed(call)) return NULL;
    if (shim.aoti_torch_empty_strided(rank, sizes, strides, dtype, call->device_type, call->device,
                                      &made) != 0) {
        complain(call, "CUDA out of memory: no room for a result of attention; use a smaller batch "
                       "or sequence");
        return NULL;
    }
    keep(call, made);
    return made;
}

static int32_t torch_dtype_of(const tensor_view *view) {
    return view->dtype == DW_BF16 ? shim.bf16 : shim.f16;
}

static tensor_handle result_like(operator_call *call, const tensor_view *like, tensor_view *view) {
    int64_t strides[ATTENTION_RANK] = {0};
    if (failed(call)) return NULL;
    attention_strides_like(like, strides);
    tensor_handle made = allocate(call, like->rank, like->sizes, strides, torch_dtype_of(like));
    if (made != NULL) *view = view_of(call, made);
    return made;
}

/* Returns the argument if a kernel can read it in place, else a contiguous copy. */
static tensor_view readable(operator_call *call, word value) {
    tensor_handle handle = argument(call, value);
    tensor_view view = view_of(call, handle);
    bool ours =
        (view.dtype == DW_BF16 || view.dtype == DW_F16) && (view.rank == 4 || view.rank == 3);
    if (failed(call) || !ours || attention_lies_well(&view)) return view;
    tensor_view copy = {0};
    tensor_handle made = result_like(call, &view, &copy);
    if (made == NULL) return view;
    if (shim.aoti_torch_copy_(made, handle, 0) != 0)
        complain(call, "attention: an argument could not be copied");
    __atomic_fetch_add(&copies, 1, __ATOMIC_RELAXED);
    return copy;
}

static void enter(operator_call *call, word first) {
    tensor_handle handle = (tensor_handle)(uintptr_t)first;
    int32_t now = -1;
    if (shim.aoti_torch_get_device_type(handle, &call->device_type) != 0 ||
        shim.aoti_torch_get_device_index(handle, &call->device) != 0) {
        complain(call, "attention: PyTorch could not report an argument's device");
        return;
    }
    if (call->device_type != shim.cuda) return;
    if (shim.aoti_torch_get_current_device_index(&now) != 0 || now == call->device) return;
    if (shim.aoti_torch_create_device_guard(call->device, &call->guard) != 0)
        complain(call, "attention: the device of the arguments could not be made current");
}

bool attention_device_is_current(int32_t device) {
    int32_t now = -1;
    return shim.aoti_torch_get_current_device_index != NULL &&
           shim.aoti_torch_get_current_device_index(&now) == 0 && now == device;
}

static PyObject *new_tensor(int64_t rank, const int64_t *sizes, const int64_t *strides,
                            int32_t dtype, int32_t device, tensor_view *view) {
    tensor_handle handle = NULL;
    int64_t *own_sizes = NULL, *own_strides = NULL;
    if (shim.aoti_torch_empty_strided(rank, sizes, strides, dtype, shim.cuda, device, &handle) !=
        0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "CUDA out of memory: no room for a result of attention; use a smaller "
                        "batch or sequence");
        return NULL;
    }
    PyObject *made = NULL;
    if (shim.aoti_torch_get_data_ptr(handle, &view->data) == 0 &&
        shim.aoti_torch_get_sizes(handle, &own_sizes) == 0 &&
        shim.aoti_torch_get_strides(handle, &own_strides) == 0)
        made = shim.wrap(handle); /* holds the tensor, and with it the memory of the view */
    shim.aoti_torch_delete_tensor_object(handle);
    view->rank = rank, view->sizes = own_sizes, view->strides = own_strides;
    view->dtype = dtype_of(dtype), view->device = device;
    if (made == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "attention: PyTorch did not give a new tensor");
    return made;
}

PyObject *attention_new_like(const tensor_view *like, tensor_view *view) {
    int64_t strides[ATTENTION_RANK] = {0};
    attention_strides_like(like, strides);
    return new_tensor(like->rank, like->sizes, strides, torch_dtype_of(like), like->device, view);
}

PyObject *attention_new_lse(const tensor_view *q, bool wanted, tensor_view *view) {
    const int64_t *n = q->sizes;
    bool packed = q->rank == 3;
    int64_t sizes[3] = {packed ? n[1] : n[0], packed ? n[0] : n[1], packed ? 1 : n[2]};
    int64_t strides[3] = {sizes[1] * sizes[2], sizes[2], 1};
    if (packed) strides[0] = sizes[1], strides[1] = 1;
    if (wanted) return new_tensor(packed ? 2 : 3, sizes, strides, shim.f32, q->device, view);
    *view = (tensor_view){0};
    return Py_NewRef(Py_None);
}

PyObject *attention_new_bytes(int64_t bytes, int32_t device, tensor_view *view) {
    int64_t one = 1;
    return new_tensor(1, &bytes, &one, shim.u8, device, view);
}

static double real(word value) {
    double result;
    memcpy(&result, &value, sizeof result);
    return result;
}

static void set_stream(operator_call *call, dw_attention *made) {
    if (failed(call) || call->device_type != shim.cuda) return;
    if (shim.aoti_torch_get_current_cuda_stream == NULL ||
        shim.aoti_torch_get_current_cuda_stream(call->device, &made->stream) != 0)
        complain(call, "attention: PyTorch did not report its current CUDA stream");
}

/* Both schemas end with: scale, softcap, window_left, window_right, bottom_right, dropout, seed, offsets_q, offsets_k,
 * longest_q, longest_k. */
static attention_options read_options(operator_call *call, const word *from,
                                      attention_tensors *tensors) {
    attention_options options = {.scale = real(from[0]), .softcap = real(from[1])};
    options.window_left = (int64_t)from[2], options.window_right = (int64_t)from[3];
    options.bottom_right = (from[4] & 0xFF) != 0, options.dropout = real(from[5]);
    tensor_handle seed = optional_argument(call, from[6]);
    tensor_handle offsets_q = optional_argument(call, from[7]),
                  offsets_k = optional_argument(call, from[8]);
    if (seed != NULL) tensors->seed = view_of(call, seed);
    if (offsets_q != NULL) tensors->offsets_q = view_of(call, offsets_q);
    if (offsets_k != NULL) tensors->offsets_k = view_of(call, offsets_k);
    options.longest_q = (int64_t)from[9], options.longest_k = (int64_t)from[10];
    return options;
}

static tensor_handle allocate_lse(operator_call *call, attention_tensors *tensors) {
    if (failed(call)) return NULL;
    const int64_t *n = tensors->q.sizes;
    bool packed = tensors->q.rank == 3;
    int64_t sizes[3] = {packed ? n[1] : n[0], packed ? n[0] : n[1], packed ? 1 : n[2]};
    int64_t strides[3] = {sizes[1] * sizes[2], sizes[2], 1};
    if (packed) strides[0] = sizes[1], strides[1] = 1;
    tensor_handle lse = allocate(call, packed ? 2 : 3, sizes, strides, shim.f32);
    if (lse != NULL) tensors->lse = view_of(call, lse);
    return lse;
}

static bool has_rank(operator_call *call, const tensor_view *q) {
    if (!failed(call) && q->rank != 3 && q->rank != 4)
        complain(call, "attention: q must be [batch, heads, rows, head_dim], or packed [rows, "
                       "heads, head_dim]");
    return !failed(call);
}

static void run_forward(word *stack, uint64_t arguments, uint64_t outputs) {
    (void)arguments, (void)outputs;
    operator_call call = {.guard = NULL};
    attention_tensors tensors = {.q = {0}};
    dw_attention made = {0};
    enter(&call, stack[0]);
    tensors.q = readable(&call, stack[0]);
    tensors.k = readable(&call, stack[1]);
    tensors.v = readable(&call, stack[2]);
    attention_options options = read_options(&call, stack + 3, &tensors);
    tensor_handle o = NULL, lse = NULL;
    if (has_rank(&call, &tensors.q)) {
        o = result_like(&call, &tensors.q, &tensors.o);
        lse = allocate_lse(&call, &tensors);
    }
    if (!failed(&call) && attention_describe(&tensors, &options, false, &made) != DW_OK)
        complain(&call, attention_complaint());
    set_stream(&call, &made);
    if (!failed(&call) && dw_attention_forward(&made) != DW_OK) complain(&call, dw_last_error());
    if (!failed(&call)) stack[0] = hand_out(&call, o), stack[1] = hand_out(&call, lse);
    finish(&call);
    if (failed(&call))
        shim.aoti_torch_check(false, "attention_forward", "deepwell", 0, call.message);
}

static void run_backward(word *stack, uint64_t arguments, uint64_t outputs) {
    (void)arguments, (void)outputs;
    operator_call call = {.guard = NULL};
    attention_tensors tensors = {.q = {0}};
    dw_attention made = {0};
    enter(&call, stack[0]);
    tensors.d_o = readable(&call, stack[0]);
    tensors.q = readable(&call, stack[1]);
    tensors.k = readable(&call, stack[2]);
    tensors.v = readable(&call, stack[3]);
    tensors.o = readable(&call, stack[4]);
    tensors.lse = view_of(&call, argument(&call, stack[5]));
    attention_options options = read_options(&call, stack + 6, &tensors);
    options.deterministic = (stack[17] & 0xFF) != 0;
    tensor_handle dq = NULL, dk = NULL, dv = NULL;
    if (has_rank(&call, &tensors.q) && has_rank(&call, &tensors.k) && has_rank(&call, &tensors.v)) {
        dq = result_like(&call, &tensors.q, &tensors.dq);
        dk = result_like(&call, &tensors.k, &tensors.dk);
        dv = result_like(&call, &tensors.v, &tensors.dv);
    }
    if (!failed(&call) && attention_describe(&tensors, &options, true, &made) != DW_OK)
        complain(&call, attention_complaint());
    set_stream(&call, &made);
    if (!failed(&call) && dw_attention_backward_workspace(&made, &made.workspace_bytes) != DW_OK)
        complain(&call, dw_last_error());
    if (!failed(&call) && made.workspace_bytes > 0) {
        int64_t size = (int64_t)made.workspace_bytes, one = 1;
        tensor_handle workspace = allocate(&call, 1, &size, &one, shim.u8);
        if (workspace != NULL) made.workspace = view_of(&call, workspace).data;
    }
    if (!failed(&call) && dw_attention_backward(&made) != DW_OK) complain(&call, dw_last_error());
    if (!failed(&call)) {
        stack[0] = hand_out(&call, dq), stack[1] = hand_out(&call, dk),
        stack[2] = hand_out(&call, dv);
    }
    finish(&call);
    if (failed(&call))
        shim.aoti_torch_check(false, "attention_backward", "deepwell", 0, call.message);
}

/* attention_wrapping(libtorch_python): whether results can be created without the dispatcher. */
static PyObject *attention_wrapping(PyObject *self, PyObject *path) {
    (void)self;
    PyObject *bytes = PyUnicode_AsUTF8String(path);
    if (bytes == NULL) return NULL;
    void *library = dlopen(PyBytes_AsString(bytes), RTLD_LAZY | RTLD_NOLOAD);
    Py_DECREF(bytes);
    if (library != NULL)
        *(void **)&shim.wrap = dlsym(library, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
    return PyBool_FromLong(shim.wrap != NULL);
}

/* attention_register(libtorch_cpu, libtorch_cuda or None, dispatch key): returns False and registers nothing if PyTorch
 * lacks a function that is needed. */
static PyObject *attention_register(PyObject *self, PyObject *args) {
    (void)self;
    const char *cpu_path = NULL, *cuda_path = NULL, *key = NULL;
    if (!PyArg_ParseTuple(args, "szs:attention_register", &cpu_path, &cuda_path, &key)) return NULL;
    void *cpu = dlopen(cpu_path, RTLD_LAZY | RTLD_NOLOAD);
    if (cpu == NULL) Py_RETURN_FALSE;
#define SHIM_RESOLVE(name, result, parameters)                                                     \
    *(void **)&shim.name = dlsym(cpu, #name);                                                      \
    if (shim.name == NULL) Py_RETURN_FALSE;
    SHIM_MAP(SHIM_RESOLVE)
#undef SHIM_RESOLVE
    *(void **)&shim.delete_word =
        dlsym(cpu, "_ZdlPv"); /* in libstdc++, which libtorch_cpu.so loads */
    if (shim.delete_word == NULL) Py_RETURN_FALSE;
    void *cuda = cuda_path == NULL ? NULL : dlopen(cuda_path, RTLD_LAZY | RTLD_NOLOAD);
    if (cuda != NULL)
        *(void **)&shim.aoti_torch_get_current_cuda_stream =
            dlsym(cuda, "aoti_torch_get_current_cuda_stream");
    if (cuda_path != NULL && shim.aoti_torch_get_current_cuda_stream == NULL) Py_RETURN_FALSE;
    shim.cuda = shim.aoti_torch_device_type_cuda();
    shim.bf16 = shim.aoti_torch_dtype_bfloat16(), shim.f16 = shim.aoti_torch_dtype_float16();
    shim.f32 = shim.aoti_torch_dtype_float32(), shim.u8 = shim.aoti_torch_dtype_uint8();
    shim.i32 = shim.aoti_torch_dtype_int32(), shim.i64 = shim.aoti_torch_dtype_int64();
    library_handle library = NULL; /* lives as long as the process */
    if (shim.aoti_torch_library_init_impl("deepwell", key, "deepwell", 0, &library) != 0 ||
        shim.aoti_torch_library_impl(library, "attention_forward", run_forward) != 0 ||
        shim.aoti_torch_library_impl(library, "attention_backward", run_backward) != 0) {
        PyErr_SetString(PyExc_RuntimeError, "PyTorch refused the attention operators");
        return NULL;
    }
    Py_RETURN_TRUE;
}

static PyObject *attention_copies(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromLongLong(__atomic_load_n(&copies, __ATOMIC_RELAXED));
}

PyMethodDef attention_operator_functions[] = {
    {"attention_register", attention_register, METH_VARARGS,
     "kernels of deepwell::attention_* for a dispatch key"},
    {"attention_wrapping", attention_wrapping, METH_O, "prepares attention_call"},
    {"attention_copies", attention_copies, METH_NOARGS,
     "arguments that were made contiguous so far"},
    {0}};
