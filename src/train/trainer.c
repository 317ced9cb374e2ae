/* The life of a trainer: create, begin, describe, destroy. trainer_step.c has the steps, trainer_checkpoint.c
 * the checkpoints. */
#include "deepwell/step_memory.h"
#include "kernel/library/onednn.h"
#include "train/gradient_norm.h"
#include "train/trainer_internal.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- memory ---------------------------------------------------------------------------------- */

dw_status dw__trainer_allocate(const dw_trainer *t, size_t bytes, dw__block *block) {
    DW_RETURN_IF_FAILED(dw_device_allocate(t->device, bytes, &block->data));
    block->bytes = bytes;
    return DW_OK;
}

void dw__trainer_release(const dw_trainer *t, dw__block *block) {
    if (block->data) dw_device_release(t->device, block->data, block->bytes);
    *block = (dw__block){0};
}

/* Bytes of this process that are resident now; 0 if the system does not report it. */
static size_t resident_bytes(void) {
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (!file) return 0;
    if (fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    fclose(file);
    return (size_t)resident * (size_t)sysconf(_SC_PAGESIZE);
}

/* ---- the model ------------------------------------------------------------------------------- */

static dw_status read_config(dw_trainer *t) {
    const char *model = t->options.model;
    return t->options.init ? dw_model_config_find(model, &t->config)
                           : dw_model_config_load(model, &t->config);
}

static dw_status list_parameters(dw_trainer *t) {
    t->count = dw_model_parameter_count(t->config);
    t->parameters = dw__arena_alloc(t->memory, t->count * sizeof *t->parameters);
    t->offsets = dw__arena_alloc(t->memory, t->count * sizeof *t->offsets);
    t->weight_pointers = dw__arena_alloc(t->memory, t->count * sizeof *t->weight_pointers);
    t->tensors = dw__arena_alloc(t->memory, t->count * sizeof *t->tensors);
    if (!t->parameters || !t->offsets || !t->weight_pointers || !t->tensors)
        return dw__fail_memory("a trainer's parameters", t->count * sizeof *t->parameters);
    for (uint32_t i = 0; i < t->count; i++) dw_model_parameter_at(t->config, i, &t->parameters[i]);
    return DW_OK;
}

static bool decays(const dw_trainer *t, uint32_t i) {
    return t->options.decay_all || t->parameters[i].decay;
}

/* 0: weight decay; 1: none; 2: not updated. */
static int update_group(const dw_trainer *t, uint32_t i) {
    if (!dw_engine_has_grad(t->train.engine, i)) return 2;
    return decays(t, i) ? 0 : 1;
}

/* On a GPU parameters begin at multiples of 256 bytes in 16 bits too, which the fastest GEMMs may ask for. */
static void place_parameter(dw_trainer *t, uint32_t i) {
    const int64_t alignment =
        t->gpu ? DW__GPU_ALIGNMENT / 2 : (int64_t)(DW__CPU_ALIGNMENT / sizeof(float));
    t->offsets[i] = t->elements;
    t->elements += (t->parameters[i].count + alignment - 1) / alignment * alignment;
}

/* Computes the offset of each parameter in the flat blocks: in their order, but on a GPU, which updates the blocks as a
 * whole, by groups. */
static void place_parameters(dw_trainer *t) {
    if (!t->gpu) {
        for (uint32_t i = 0; i < t->count; i++) place_parameter(t, i);
        return;
    }
    int64_t ends[3];
    for (int group = 0; group < 3; group++) {
        for (uint32_t i = 0; i < t->count; i++)
            if (update_group(t, i) == group) place_parameter(t, i);
        ends[group] = t->elements;
    }
    t->gpu->decayed = ends[0];
    t->gpu->updated = ends[1];
}

/* ---- programs -------------------------------------------------------------------------------- */

void dw__trainer_release_program(dw__program *p) {
    if (p->plan) dw_plan_release(p->plan);
    dw_engine_destroy(p->engine);
    dw_graph_destroy(p->graph);
    dw_text_free(p->layers);
    *p = (dw__program){0};
}

/* A policy may round stochastically even if the model itself needs no random numbers. */
static dw_status add_seed(const dw_trainer *t, dw_graph *graph) {
    const dw_dim two = 2;
    dw_value seed;
    if (!dw_precision_policy_needs_seed(t->policy) || dw_graph_find(graph, "seed") != DW_NONE)
        return DW_OK;
    return dw_graph_leaf(graph, DW_ROLE_SEED, "seed", DW_I64, 1, &two, &seed);
}

/* Stores the JSON of the layers whose operands are observed, and how many there are. */
static dw_status find_observed(const dw_trainer *t, dw__program *p) {
    static const dw__json_limits limits = {.depth = 8, .values = 1 << 22};
    dw_status status = DW_OK;
    char *text = NULL;
    json_t *layers = NULL, *observed = json_array();
    DW_TRY(dw_precision_layers_json(p->graph, t->policy, &text));
    DW_TRY(dw__json_parse("the layers of the model", text, strlen(text), limits, &layers));
    for (size_t i = 0; observed && i < json_array_size(layers); i++) {
        json_t *layer = json_array_get(layers, i);
        if (json_object_get(layer, "bounds") && json_array_append(observed, layer) != 0)
            DW_TRY(dw__fail_memory("the observed layers", strlen(text)));
    }
    if (!observed) DW_TRY(dw__fail_memory("the observed layers", strlen(text)));
    p->observed = (uint32_t)json_array_size(observed);
    DW_TRY(dw__json_string(observed, &p->layers));
cleanup:
    dw_text_free(text);
    json_decref(layers);
    json_decref(observed);
    return status;
}

/* Adds a leaf of statistics for each observed layer, behind all others. */
static dw_status add_statistics(const dw_trainer *t, dw__program *p) {
    const dw_dim numbers = DW_LAYER_STATISTICS;
    DW_RETURN_IF_FAILED(find_observed(t, p));
    for (uint32_t i = 0; i < p->observed; i++) {
        char name[32];
        dw_value leaf;
        snprintf(name, sizeof name, "statistics.%" PRIu32, i);
        DW_RETURN_IF_FAILED(
            dw_graph_leaf(p->graph, DW_ROLE_STATISTICS, name, DW_F64, 1, &numbers, &leaf));
    }
    return DW_OK;
}

/* On the CPU gradients of a micro-batch need memory until they are added. Those of statistics have a place of their
 * own. */
static dw_status place_accumulation(dw_trainer *t, dw__program *p) {
    dw__extent extent;
    if (t->gpu || t->options.micro_batch == t->options.batch) return DW_OK;
    p->lives = dw__arena_alloc(t->memory, t->count * sizeof *p->lives);
    if (!p->lives) return dw__fail_memory("lives of gradients", t->count * sizeof *p->lives);
    for (uint32_t i = 0; i < t->count; i++) {
        if (!dw_engine_has_grad(p->engine, i)) continue;
        p->lives[i].bytes = (size_t)t->parameters[i].count * sizeof(float);
        dw_plan_grad_parts(p->plan, i, &p->lives[i].first, &p->lives[i].last);
    }
    DW_RETURN_IF_FAILED(dw__place(t->count, p->lives, DW__CPU_ALIGNMENT, 1, &extent));
    p->accumulation_bytes = extent.bytes;
    return DW_OK;
}

/* Builds the graph of a micro-batch's loss and, unless it validates, its gradients with respect to all parameters. */
dw_status dw__trainer_make_program(dw_trainer *t, dw__program_kind kind, dw__program *p) {
    dw_status status = DW_OK;
    const bool trains = kind != DW__VALIDATES;
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    options.output = DW_MODEL_LOSS;
    options.dropout = trains && t->options.dropout;
    options.labels_moved = 1;
    if (t->gpu) options.dtype = t->gpu->model;
    dw_engine_options engine = DW_ENGINE_OPTIONS_DEFAULT;
    engine.precision = t->policy;
    engine.device = t->device;
    /* The micro-batches of a step have the same weights. Sampled steps are rare. */
    engine.keep_values = kind == DW__TRAINS && t->options.micro_batch < t->options.batch;
    const uint32_t loss = 0;
    int64_t sizes[2] = {t->options.micro_batch, t->options.sequence};
    dw_value *wrt = NULL;
    DW_TRY(dw_model_graph(t->config, &options, &p->graph));
    DW_TRY(add_seed(t, p->graph));
    if (kind == DW__SAMPLES) DW_TRY(add_statistics(t, p));
    const uint32_t leaf_count = dw_graph_leaf_count(p->graph), wrt_count = t->count + p->observed;
    wrt = dw__malloc(wrt_count * sizeof *wrt);
    if (!wrt) DW_TRY(dw__fail_memory("a list of parameters", wrt_count * sizeof *wrt));
    for (uint32_t i = 0; i < wrt_count; i++)
        wrt[i] = dw_graph_leaf_at(p->graph, i < t->count ? i : leaf_count - wrt_count + i);
    DW_TRY(dw_engine_create(p->graph, trains ? 1 : 0, &loss, trains ? wrt_count : 0, wrt, &engine,
                            &p->engine));
    DW_TRY(dw_engine_plan(p->engine, sizes, &p->plan));
    size_t bytes = leaf_count * sizeof *p->leaves;
    p->leaves = dw__arena_alloc(t->memory, bytes);
    if (!p->leaves) DW_TRY(dw__fail_memory("a trainer's bindings", bytes));
    if (trains) DW_TRY(place_accumulation(t, p));
cleanup:
    dw__free(wrt);
    return status;
}

dw_status dw__trainer_bind_leaves(dw_trainer *t, dw__program *p) {
    uint32_t leaf_count = dw_graph_leaf_count(p->graph);
    for (uint32_t i = 0; i < leaf_count; i++) {
        const dw_value leaf = dw_graph_leaf_at(p->graph, i);
        const char *name = dw_value_name(p->graph, leaf);
        if (i < t->count)
            p->leaves[i].data = t->weight_pointers[i];
        else if (strcmp(name, "input_ids") == 0)
            p->leaves[i].data = t->gpu ? t->gpu->input : t->input;
        else if (strcmp(name, "labels") == 0)
            p->leaves[i].data = t->gpu ? t->gpu->labels : t->labels;
        else if (strcmp(name, "seed") == 0)
            p->leaves[i].data = t->gpu ? t->gpu->seed : t->random_seed;
        else if (i >= leaf_count - p->observed)
            p->leaves[i].data = t->guard.zeros;
        else
            return dw__fail(DW_INTERNAL, "the model's graph has a leaf \"%s\"", name);
    }
    return DW_OK;
}

void dw__trainer_raise(const dw__program *p, dw__needs *needs) {
    if (!p->plan) return;
    const dw__needs own = {dw_plan_arena_bytes(p->plan), p->accumulation_bytes,
                           dw_plan_library_bytes(p->plan)};
    if (own.arena > needs->arena) needs->arena = own.arena;
    if (own.accumulation > needs->accumulation) needs->accumulation = own.accumulation;
    if (own.library > needs->library) needs->library = own.library;
}

/* ---- create ---------------------------------------------------------------------------------- */

static dw_status check_sequence(const dw_trainer *t) {
    if (!t->model.positions_are_limit || t->options.sequence <= t->model.positions) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "sequence is %" PRId64 ", but the model (%s) has %" PRId64
                    " positions; use at most that",
                    t->options.sequence, t->model.family, t->model.positions);
}

static dw_status open_data(dw_trainer *t) {
    const dw_trainer_options *o = &t->options;
    const dw__token_store raw = dw__token_store_of(o->token_type, t->model.sizes.vocabulary);
    DW_RETURN_IF_FAILED(dw__dataset_open(o->data_count, o->data, raw, o->sequence, &t->data));
    if (o->validation_count == 0) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__dataset_open(o->validation_count, o->validation, raw, o->sequence, &t->validation));
    if (dw__dataset_sequences(t->validation) >= o->micro_batch) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "\"%s\": the validation data have %" PRId64
                    " sequences, but a micro-batch needs %" PRId64
                    "; use more data, or a smaller micro-batch or sequence",
                    o->validation[0], dw__dataset_sequences(t->validation), o->micro_batch);
}

/* Computes the sizes of the blocks that programs share. */
static dw_status find_memory(dw_trainer *t) {
    dw__needs needs = {0};
    dw__trainer_raise(&t->train, &needs);
    dw__trainer_raise(&t->validate, &needs);
    DW_RETURN_IF_FAILED(dw__trainer_guard_create(t, &needs));
    const size_t entries = t->count + t->guard.most, bytes = entries * sizeof(dw_binding);
    t->gradients_bound = dw__arena_alloc(t->memory, bytes);
    t->part_bound = dw__arena_alloc(t->memory, bytes);
    if (!t->gradients_bound || !t->part_bound)
        return dw__fail_memory("a trainer's bindings", bytes);
    const bool adds = t->options.micro_batch != t->options.batch;
    if (t->gpu && adds) needs.accumulation = (size_t)t->elements * dw_dtype_bytes(t->gpu->model);
    t->accumulation.bytes = needs.accumulation;
    t->arena.bytes = needs.arena;
    t->library_bytes = needs.library;
    t->norm_bytes = dw__norm_scratch(t->elements);
    return DW_OK;
}

static dw_status create(dw_trainer *t, const dw_trainer_options *options) {
    DW_RETURN_IF_FAILED(dw__trainer_take_options(t, options));
    DW_RETURN_IF_FAILED(dw__recent_losses_create(t->memory, t->options.spike_factor,
                                                 t->options.spike_window, &t->recent));
    DW_RETURN_IF_FAILED(dw__trainer_find_device(t));
    DW_RETURN_IF_FAILED(read_config(t));
    dw_model_describe(t->config, &t->model);
    DW_RETURN_IF_FAILED(check_sequence(t));
    DW_RETURN_IF_FAILED(list_parameters(t));
    DW_RETURN_IF_FAILED(open_data(t));
    DW_RETURN_IF_FAILED(dw__trainer_make_program(t, DW__TRAINS, &t->train));
    if (t->validation)
        DW_RETURN_IF_FAILED(dw__trainer_make_program(t, DW__VALIDATES, &t->validate));
    place_parameters(t);
    DW_RETURN_IF_FAILED(find_memory(t));
    if (t->gpu) return dw__trainer_gpu_create(t);
    /* Prepares oneDNN for small GEMMs, which use it even if no plan reserves memory for it. */
    DW_RETURN_IF_FAILED(dw__onednn_prepare());
    t->baseline_bytes = resident_bytes(); /* with graphs, plans and code, before the first block */
    return DW_OK;
}

dw_status dw_trainer_create(const dw_trainer_options *options, dw_trainer **trainer) {
    dw_trainer *t = dw__calloc(1, sizeof *t);
    if (!t) return dw__fail_memory("a trainer", sizeof *t);
    t->memory = dw__arena_create();
    dw_status status = t->memory ? create(t, options) : dw__fail_memory("a trainer", sizeof *t);
    if (status == DW_OK) {
        *trainer = t;
    } else {
        dw_trainer_destroy(t);
    }
    return status;
}

/* The message of a failure must survive the cleanup, so no call below may record a failure of its own. */
void dw_trainer_destroy(dw_trainer *t) {
    if (!t) return;
    dw_checkpoints_close(t->checkpoints);
    dw__trainer_gpu_destroy(t);
    dw__trainer_guard_destroy(t);
    dw__trainer_release_program(&t->train);
    dw__trainer_release_program(&t->validate);
    dw__dataset_close(t->data);
    dw__dataset_close(t->validation);
    dw_model_config_destroy(t->config);
    dw_precision_policy_destroy(t->policy);
    dw__block *blocks[] = {&t->weights,    &t->gradients, &t->exp_avg,
                           &t->exp_avg_sq, &t->arena,     &t->accumulation};
    for (size_t i = 0; i < DW_COUNT(blocks); i++) dw__trainer_release(t, blocks[i]);
    dw__free(t->norm_scratch);
    dw__free(t->input);
    if (t->memory) dw__arena_destroy(t->memory);
    dw__free(t);
}

/* Returns the size of the gradients that AdamW reads. A sum over micro-batches is F32. */
static size_t gradient_bytes(const dw_trainer *t) {
    const bool rounded = t->gpu && t->accumulation.bytes == 0;
    return (size_t)t->elements * dw_dtype_bytes(rounded ? t->gpu->model : DW_F32);
}

static size_t rounded_bytes(const dw_trainer *t) {
    return t->gpu->model == DW_F32 ? 0 : (size_t)t->elements * dw_dtype_bytes(t->gpu->model);
}

void dw_trainer_describe(const dw_trainer *t, dw_trainer_info *info) {
    const dw_trainer_options *o = &t->options;
    size_t flat = (size_t)t->elements * sizeof(float);
    *info = (dw_trainer_info){
        .family = t->model.family,
        .device = dw_device_name(t->device),
        .precision = t->precision,
        .parameters = (int64_t)t->model.sizes.parameters,
        .tokens_per_step = o->batch * o->sequence,
        .data_tokens = dw__dataset_tokens(t->data),
        .data_sequences = dw__dataset_sequences(t->data),
        .data_files = dw__dataset_file_count(t->data),
        .parameter_bytes = flat,
        .gradient_bytes = flat,
        .optimizer_bytes = 2 * flat,
        .arena_bytes = t->arena.bytes,
        .accumulation_bytes = t->accumulation.bytes,
        .batch_bytes =
            (size_t)(2 * o->micro_batch * o->sequence + o->sequence + 1) * sizeof(int64_t),
        .library_bytes = t->library_bytes,
        .update_bytes = t->norm_bytes + dw__trainer_guard_bytes(t),
    };
    if (t->gpu) {
        info->parameter_bytes += rounded_bytes(t);
        info->gradient_bytes = gradient_bytes(t);
        info->batch_bytes = t->gpu->batch.bytes;
        info->update_bytes = dw__gpu_update_bytes(t->gpu->update) + dw__trainer_guard_bytes(t);
    }
    if (t->validation) {
        info->validation_tokens = dw__dataset_tokens(t->validation);
        info->validation_sequences = dw__dataset_sequences(t->validation);
    }
    info->predicted_bytes = t->baseline_bytes + info->parameter_bytes + info->gradient_bytes +
                            info->optimizer_bytes + info->arena_bytes + info->accumulation_bytes +
                            info->batch_bytes + info->library_bytes + info->update_bytes;
}

/* ---- begin ----------------------------------------------------------------------------------- */

/* The blocks are zeroed, so that the gaps between parameters add nothing to a norm. */
static dw_status allocate_zeros(dw_trainer *t, size_t bytes, dw__block *block) {
    DW_RETURN_IF_FAILED(dw__trainer_allocate(t, bytes, block));
    return dw_device_fill(t->device, block->data, 0, block->bytes);
}

static dw_status allocate_batch(dw_trainer *t) {
    int64_t tokens = t->options.micro_batch * t->options.sequence;
    size_t bytes = (size_t)(2 * tokens + t->options.sequence + 1) * sizeof(int64_t);
    t->input = dw__malloc(bytes);
    t->norm_scratch = dw__malloc(t->norm_bytes);
    if (!t->input || !t->norm_scratch) return dw__fail_memory("a batch of tokens", bytes);
    t->labels = t->input + tokens;
    t->sequence = t->labels + tokens;
    return DW_OK;
}

static dw_status allocate_all(dw_trainer *t) {
    const size_t flat = (size_t)t->elements * sizeof(float);
    DW_RETURN_IF_FAILED(allocate_zeros(t, flat, &t->weights));
    DW_RETURN_IF_FAILED(allocate_zeros(t, gradient_bytes(t), &t->gradients));
    DW_RETURN_IF_FAILED(allocate_zeros(t, flat, &t->exp_avg));
    DW_RETURN_IF_FAILED(allocate_zeros(t, flat, &t->exp_avg_sq));
    DW_RETURN_IF_FAILED(dw__trainer_allocate(t, t->arena.bytes, &t->arena));
    const bool zeros = t->gpu && t->accumulation.bytes > 0;
    DW_RETURN_IF_FAILED(zeros ? allocate_zeros(t, t->accumulation.bytes, &t->accumulation)
                              : dw__trainer_allocate(t, t->accumulation.bytes, &t->accumulation));
    if (t->gpu) DW_RETURN_IF_FAILED(dw__trainer_gpu_begin(t));
    DW_RETURN_IF_FAILED(dw__trainer_guard_begin(t));
    return allocate_batch(t);
}

/* AdamW's tensors; those with weight decay come first. */
static void list_tensors(dw_trainer *t) {
    for (int group = 0; group < 2; group++) {
        for (uint32_t i = 0; i < t->count; i++) {
            if (update_group(t, i) != group) continue;
            t->tensors[t->updated++] = (dw_adamw_tensor){
                .param = dw__trainer_tensor(&t->weights, t, i),
                .grad = dw__trainer_tensor(&t->gradients, t, i),
                .exp_avg = dw__trainer_tensor(&t->exp_avg, t, i),
                .exp_avg_sq = dw__trainer_tensor(&t->exp_avg_sq, t, i),
                .count = t->parameters[i].count,
            };
        }
        if (group == 0) t->decayed = t->updated;
    }
}

static void *tensor_at(const dw_trainer *t, const dw__block *block, uint32_t i, dw_dtype type) {
    return (char *)block->data + (size_t)t->offsets[i] * dw_dtype_bytes(type);
}

/* On a GPU with several micro-batches each writes its gradients to the same block. */
static dw_status bind_all(dw_trainer *t) {
    const dw_dtype type = t->gpu ? t->gpu->model : DW_F32;
    const bool rounded = type != DW_F32, adds = t->gpu && t->accumulation.bytes > 0;
    for (uint32_t i = 0; i < t->count; i++) {
        t->weight_pointers[i] = tensor_at(t, rounded ? &t->gpu->rounded : &t->weights, i, type);
        if (!dw_engine_has_grad(t->train.engine, i)) continue;
        t->gradients_bound[i].data = tensor_at(t, adds ? &t->accumulation : &t->gradients, i, type);
    }
    if (!t->gpu) list_tensors(t);
    for (uint32_t i = 0; i < t->guard.most; i++) {
        const dw_binding statistics = {t->guard.statistics + (size_t)i * DW__STATISTICS_STRIDE,
                                       NULL};
        t->gradients_bound[t->count + i] = t->part_bound[t->count + i] = statistics;
    }
    DW_RETURN_IF_FAILED(dw__trainer_bind_leaves(t, &t->train));
    if (t->guard.samples.plan) DW_RETURN_IF_FAILED(dw__trainer_bind_leaves(t, &t->guard.samples));
    return t->validation ? dw__trainer_bind_leaves(t, &t->validate) : DW_OK;
}

static dw_status open_checkpoints(dw_trainer *t, bool resume) {
    if (!t->options.checkpoint) return DW_OK;
    DW_RETURN_IF_FAILED(dw_checkpoints_open(t->options.checkpoint, &t->checkpoints));
    int64_t newest = dw_checkpoints_newest(t->checkpoints);
    if (resume || newest < 0) return DW_OK;
    return dw__fail(DW_STATE,
                    "\"%s\" holds checkpoints of an earlier run, up to step %" PRId64
                    "; resume it, or name another folder",
                    t->options.checkpoint, newest);
}

dw_status dw__trainer_load_weights(dw_trainer *t, const char *folder) {
    dw_status status = DW_OK;
    float *weights = NULL, **list = NULL;
    DW_TRY(dw__trainer_host_block(t, &t->weights, &weights));
    DW_TRY(dw__trainer_host_list(t, weights, &list));
    DW_TRY(folder ? dw_model_load(t->config, folder, NULL, list)
                  : dw_model_init(t->config, t->options.seed, list));
    DW_TRY(dw__trainer_put_block(t, &t->weights, weights));
cleanup:
    dw__free(list);
    dw__trainer_release_host(t, weights);
    return status;
}

static dw_status load_state(dw_trainer *t, bool resume) {
    if (resume && dw_checkpoints_newest(t->checkpoints) >= 0) return dw__trainer_resume(t);
    return dw__trainer_load_weights(t, t->options.init ? NULL : t->options.model);
}

dw_status dw_trainer_begin(dw_trainer *t, int resume) {
    if (t->begun || t->input)
        return dw__fail(DW_STATE, "dw_trainer_begin was called before; make a new trainer");
    if (resume && !t->options.checkpoint)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "there is nothing to resume from: name the folder of checkpoints");
    /* A checkpoint copies the companion files of the model. */
    if (t->options.checkpoint) DW_RETURN_IF_FAILED(dw_trainer_check_save(t, NULL));
    DW_RETURN_IF_FAILED(open_checkpoints(t, resume));
    DW_RETURN_IF_FAILED(dw__dataset_check(t->data, t->model.sizes.vocabulary));
    if (t->validation)
        DW_RETURN_IF_FAILED(dw__dataset_check(t->validation, t->model.sizes.vocabulary));
    DW_RETURN_IF_FAILED(allocate_all(t));
    DW_RETURN_IF_FAILED(bind_all(t));
    DW_RETURN_IF_FAILED(load_state(t, resume));
    if (t->gpu) DW_RETURN_IF_FAILED(dw__trainer_gpu_restart(t));
    t->begun = true;
    return DW_OK;
}

int64_t dw_trainer_steps_done(const dw_trainer *t) { return t->step; }
int64_t dw_trainer_schedule_steps(const dw_trainer *t) { return t->options.schedule_steps; }

const char *dw_trainer_checkpoint_path(const dw_trainer *t) {
    return t->checkpoints ? dw_checkpoints_newest_path(t->checkpoints) : "";
}
