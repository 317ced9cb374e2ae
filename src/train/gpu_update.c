#include "train/gpu_update.h"
#include "kernel/cuda/gpu_adamw.h"
#include "kernel/cuda/gpu_kernels.h"
#include <math.h>

enum { LOSS, ADD, ROUND, KERNELS };
enum { DECAYED, PLAIN, GROUPS };
static const char *const names[KERNELS] = {"train_loss", "train_add", "train_round"};

struct dw__gpu_update {
    dw__gpu_update_options options;
    const dw__variant *variant; /* of the kernels above */
    dw__gpu_blocks blocks;
    /* One block: the step's numbers, the counts of updates, AdamW's workspace. */
    char *memory;
    size_t memory_bytes, steps_at, workspace_at, workspace_bytes;
    dw_train_numbers *sent, *received; /* page-locked memory of the host */
};

/* ---- AdamW ----------------------------------------------------------------------------------- */

typedef struct adamw {
    dw_adamw_gpu call;
    dw_adamw_gpu_group groups[GROUPS];
    dw_adamw_gpu_tensor tensors[GROUPS];
} adamw;

static void *element_at(void *block, int64_t index, dw_dtype type) {
    return block ? (char *)block + (size_t)index * dw_dtype_bytes(type) : NULL;
}

/* The type of the gradients that AdamW reads. */
static dw_dtype summed_type(const dw__gpu_update *u) {
    return u->options.adds ? DW_F32 : u->options.model;
}

static void make_group(const dw__gpu_update *u, int group, adamw *a) {
    const dw__gpu_update_options *o = &u->options;
    const dw__gpu_blocks *b = &u->blocks;
    const int64_t from = group == DECAYED ? 0 : o->decayed;
    void *gradients = o->adds ? b->sum : b->gradients;
    a->tensors[group] = (dw_adamw_gpu_tensor){
        .param = element_at(b->weights, from, DW_F32),
        .grad = element_at(gradients, from, summed_type(u)),
        .exp_avg = element_at(b->exp_avg, from, DW_F32),
        .exp_avg_sq = element_at(b->exp_avg_sq, from, DW_F32),
        .step = (float *)(u->memory + u->steps_at) + group,
        .count = (group == DECAYED ? o->decayed : o->updated) - from,
        .copy = element_at(b->rounded, from, o->model),
    };
    a->groups[group] = (dw_adamw_gpu_group){
        .param_dtype = DW_F32,
        .state_dtype = DW_F32,
        .grad_dtype = summed_type(u),
        .copy_dtype = o->model == DW_F32 ? (dw_dtype)0 : o->model,
        .tensors = &a->tensors[group],
        .count = 1,
        .beta1 = o->beta1,
        .beta2 = o->beta2,
        .eps = o->eps,
        .weight_decay = group == DECAYED ? o->weight_decay : 0.0,
        .lr_at = &((dw_train_numbers *)u->memory)->lr,
    };
}

/* The norm is computed in any case: a step is judged by it. */
static void make_adamw(const dw__gpu_update *u, void *stream, adamw *a) {
    dw_train_numbers *numbers = (dw_train_numbers *)u->memory;
    for (int group = 0; group < GROUPS; group++) make_group(u, group, a);
    a->call = (dw_adamw_gpu){
        .struct_size = sizeof a->call,
        .device = u->options.device,
        .groups = a->groups,
        .group_count = GROUPS,
        .max_norm = u->options.clip > 0.0 ? u->options.clip : INFINITY,
        .found_inf = &numbers->found_inf,
        .finite_only = 1,
        .outcome = (dw_adamw_gpu_outcome *)&numbers->told,
        .workspace = u->memory + u->workspace_at,
        .workspace_bytes = u->workspace_bytes,
        .stream = stream,
    };
}

/* ---- create ---------------------------------------------------------------------------------- */

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    for (int i = 0; i < KERNELS; i++) {
        points[i].code = (dw__jit_variant){
            .source = "common/train_step.cu", .entry = names[i], .arch = dw__gpu_arch(capability)};
        dw__jit_add_define(&points[i].code, "ELEMENT", (int)params);
    }
    return DW_OK;
}

/* No call chooses this kernel, so it is not in the registry. */
static const dw__kernel kernels = {.name = "train_step", .entry_points = entry_points};

static size_t reserve(size_t *total, size_t bytes) {
    enum { ALIGNMENT = 256 };
    const size_t at = *total;
    *total += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return at;
}

/* Lays out the memory. AdamW's workspace depends on counts alone, so its query gets addresses that are made up. */
static dw_status plan(dw__gpu_update *u) {
    static _Alignas(16) char somewhere[sizeof(dw_train_numbers)];
    adamw a;
    u->memory = somewhere;
    make_adamw(u, NULL, &a);
    for (int group = 0; group < GROUPS; group++) {
        dw_adamw_gpu_tensor *t = &a.tensors[group];
        t->param = t->grad = t->exp_avg = t->exp_avg_sq = t->copy = somewhere;
    }
    const dw_status status = dw_adamw_gpu_workspace(&a.call, &u->workspace_bytes);
    u->memory = NULL;
    DW_RETURN_IF_FAILED(status);
    (void)reserve(&u->memory_bytes, sizeof(dw_train_numbers));
    u->steps_at = reserve(&u->memory_bytes, GROUPS * sizeof(float));
    u->workspace_at = reserve(&u->memory_bytes, u->workspace_bytes);
    return dw__adamw_prepare(u->options.device, &a.groups[DECAYED]);
}

static dw_status create(dw__gpu_update *u) {
    const dw_device *device = u->options.device;
    void *sent = NULL, *received = NULL;
    const dw__context *context;
    const uint64_t params = (uint64_t)dw__gpu_element(u->options.model);
    DW_RETURN_IF_FAILED(dw__gpu_context(device, "training", &context));
    DW_RETURN_IF_FAILED(dw__variant_of(context, &kernels, params, &u->variant));
    DW_RETURN_IF_FAILED(plan(u));
    DW_RETURN_IF_FAILED(device->host_allocate(sizeof *u->sent, &sent));
    u->sent = sent;
    DW_RETURN_IF_FAILED(device->host_allocate(sizeof *u->received, &received));
    u->received = received;
    return DW_OK;
}

dw_status dw__gpu_update_create(const dw__gpu_update_options *options, dw__gpu_update **update) {
    dw__gpu_update *u = dw__calloc(1, sizeof *u);
    if (!u) return dw__fail_memory("the optimizer's state on a GPU", sizeof *u);
    u->options = *options;
    const dw_status status = create(u);
    if (status == DW_OK)
        *update = u;
    else
        dw__gpu_update_destroy(u);
    return status;
}

void dw__gpu_update_destroy(dw__gpu_update *u) {
    if (!u) return;
    const dw_device *device = u->options.device;
    if (u->memory) dw_device_release(device, u->memory, u->memory_bytes);
    if (u->sent) device->host_release(u->sent);
    if (u->received) device->host_release(u->received);
    dw__free(u);
}

size_t dw__gpu_update_bytes(const dw__gpu_update *u) { return u->memory_bytes; }

dw_status dw__gpu_update_begin(dw__gpu_update *u, const dw__gpu_blocks *blocks) {
    void *memory = NULL;
    DW_RETURN_IF_FAILED(dw_device_allocate(u->options.device, u->memory_bytes, &memory));
    u->memory = memory;
    u->blocks = *blocks;
    return DW_OK;
}

/* ---- work ------------------------------------------------------------------------------------ */

static dw_status launch(const dw__gpu_update *u, int which, int64_t elements, void *params,
                        void *stream) {
    const int64_t of_block = DW_TRAIN_THREADS * DW_TRAIN_VECTOR;
    const bool one = which == LOSS;
    return u->options.device->launch(&(dw__launch){
        .name = names[which],
        .function = u->variant->functions[which],
        .grid = {one ? 1 : (unsigned)((elements + of_block - 1) / of_block), 1, 1},
        .block = {one ? 1 : DW_TRAIN_THREADS, 1, 1},
        .stream = stream,
        .arguments = (void *[]){params},
    });
}

dw_status dw__gpu_update_restart(dw__gpu_update *u, int64_t updates, void *stream) {
    const dw_device *device = u->options.device;
    float steps[GROUPS];
    for (int group = 0; group < GROUPS; group++) steps[group] = (float)updates;
    DW_RETURN_IF_FAILED(dw_device_copy_in(device, u->memory + u->steps_at, steps, sizeof steps));
    if (!u->blocks.rounded) return DW_OK;
    dw_train_round_params params = {u->blocks.weights, u->blocks.rounded, u->options.elements};
    DW_RETURN_IF_FAILED(launch(u, ROUND, u->options.elements, &params, stream));
    return device->stream_synchronize(stream);
}

dw_status dw__gpu_update_send(dw__gpu_update *u, double lr, double limit, void *stream) {
    *u->sent = (dw_train_numbers){.lr = (float)lr, .limit = limit};
    return u->options.device->copy_in(u->memory, u->sent, sizeof *u->sent, stream);
}

dw_status dw__gpu_update_add_loss(dw__gpu_update *u, const float *loss, const unsigned *data_error,
                                  double batches, void *stream) {
    dw_train_loss_params params = {(dw_train_numbers *)u->memory, loss, data_error, batches};
    return launch(u, LOSS, 1, &params, stream);
}

dw_status dw__gpu_update_add(dw__gpu_update *u, const float *loss, const unsigned *data_error,
                             double batches, void *stream) {
    if (u->options.adds) {
        dw_train_add_params params = {(const dw_train_numbers *)u->memory, u->blocks.gradients,
                                      u->blocks.sum, u->options.elements};
        DW_RETURN_IF_FAILED(launch(u, ADD, u->options.elements, &params, stream));
    }
    return dw__gpu_update_add_loss(u, loss, data_error, batches, stream);
}

dw_status dw__gpu_update_run(dw__gpu_update *u, void *stream) {
    adamw a;
    make_adamw(u, stream, &a);
    return dw_adamw_gpu_run(&a.call);
}

dw_status dw__gpu_update_receive(dw__gpu_update *u, void *stream,
                                 const dw_train_numbers **numbers) {
    *numbers = u->received;
    return u->options.device->copy_out(u->received, u->memory, sizeof *u->received, stream);
}
