/* Models from Hugging Face folders: config.json -> graph, safetensors -> weights, and back.
 *
 *     dw_model_config_load    a folder's config.json, or dw_model_config_named("gpt2")
 *     dw_model_graph          the forward pass: logits, or the loss from labels
 *     dw_model_load / _init   weights from the folder, or random ones
 *     dw_model_save           a folder that transformers loads
 *
 * Families: gpt2, llama, qwen3, mistral. The graph is the function that transformers computes: a field of
 * config.json that changes it is honoured, or refused by name and value. docs/models-in-c.md has the fields.
 *
 * A model's parameters have transformers' state_dict names and shapes; a tied head is no parameter of its
 * own. They are the graph's first leaves, in the order of dw_model_parameter_at.
 */
#ifndef DEEPWELL_MODEL_H
#define DEEPWELL_MODEL_H

#include "deepwell/graph.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- configuration ------------------------------------------------------------------------- */

typedef struct dw_model_config dw_model_config;

/* `path`: a folder with config.json, or such a file. DW_IO; DW_PARSE: no JSON, or a field of the wrong kind
 * or outside its range; DW_UNSUPPORTED: a family, or a field's value, that Deepwell does not build. */
DW_API dw_status dw_model_config_load(const char *path, dw_model_config **config);
/* The text of a config.json. */
DW_API dw_status dw_model_config_parse(const char *json, size_t bytes, dw_model_config **config);
/* A configuration of the catalogue: "gpt2", "llama3-8b", ... DW_NOT_FOUND lists them. */
DW_API dw_status dw_model_config_named(const char *name, dw_model_config **config);
DW_API void dw_model_config_destroy(dw_model_config *config); /* NULL allowed */

DW_API uint32_t dw_model_catalogue_count(void);
DW_API const char *dw_model_catalogue_name(uint32_t index);

typedef struct dw_model_info {
    const char *family; /* model_type */
    int64_t vocabulary, width, layers, heads, key_value_heads, head_width, mlp_width;
    int64_t
        positions; /* longest sequence: GPT-2's table of positions ends there; for rotary positions it is
                                what the model was made for, and longer ones work */
    int positions_are_limit; /* 1: a longer sequence fails when it is run */
    int tied;                /* the head is the embedding */
    int dropout;             /* some probability of dropout is above 0 */
    int64_t parameter_elements;
} dw_model_info;
DW_API void dw_model_describe(const dw_model_config *config, dw_model_info *info);

typedef struct dw_model_parameter {
    const char *name; /* "transformer.wte.weight" */
    int rank;         /* 1 or 2 */
    int64_t shape[DW_MAX_RANK];
    int64_t count; /* elements */
    int decay; /* 1: a matrix (rank 2); 0: a norm's weight or a bias, which AdamW usually leaves undecayed */
} dw_model_parameter;
DW_API uint32_t dw_model_parameter_count(const dw_model_config *config);
/* *parameter's name belongs to the config. */
DW_API void dw_model_parameter_at(const dw_model_config *config, uint32_t index,
                                  dw_model_parameter *parameter);

/* ---- graph --------------------------------------------------------------------------------- */

typedef enum dw_model_output {
    DW_MODEL_LOGITS, /* [B,S,V] */
    DW_MODEL_LOSS /* scalar: mean cross-entropy of position t's logits and label t + 1, over labels that are not
                        -100. The logits never exist whole */
} dw_model_output;

typedef struct dw_model_graph_options {
    size_t struct_size; /* sizeof(dw_model_graph_options) */
    dw_model_output output;
    int dropout;    /* 1: training, with the configuration's dropout; 0: none */
    dw_dtype dtype; /* of parameters and logits: DW_F32 or DW_F64 */
    /* Of DW_MODEL_LOSS. 0: position t is scored on label t + 1, as transformers does with labels that are the
     * input_ids. 1: on label t: the caller has moved them, and every position counts. */
    int labels_moved;
} dw_model_graph_options;
#define DW_MODEL_GRAPH_OPTIONS_DEFAULT                                                             \
    { sizeof(dw_model_graph_options), DW_MODEL_LOGITS, 0, DW_F32, 0 }

/* The forward pass over the symbols B (0) and S (1). Leaves: the parameters; input_ids [B,S] i64;
 * with DW_MODEL_LOSS labels [B,S] i64; with dropout, where a probability is above 0, "seed", i64[2] of
 * DW_ROLE_SEED. One output. options NULL: defaults. */
DW_API dw_status dw_model_graph(const dw_model_config *config,
                                const dw_model_graph_options *options, dw_graph **graph);

/* ---- weights: `weights` has one pointer for each parameter, in order, to its elements ------ */

typedef struct dw_model_load_options {
    size_t struct_size;
    int allow_not_finite; /* 1: weights with NaN or infinity are loaded as they are; 0: refused by name */
} dw_model_load_options;
#define DW_MODEL_LOAD_OPTIONS_DEFAULT                                                              \
    { sizeof(dw_model_load_options), 0 }

/* From the safetensors of `folder`, as F32 (dw_safetensors_read_f32). The file must have the parameters and no
 * other tensors, save buffers that transformers ignores too; names may lack the base model's prefix
 * ("wte.weight"). Missing, extra and misshapen tensors are all named in one message (DW_SHAPE). options NULL:
 * defaults. After a failure the contents of `weights` are unspecified. */
DW_API dw_status dw_model_load(const dw_model_config *config, const char *folder,
                               const dw_model_load_options *options, float *const *weights);
/* Random weights as transformers initialises them: normal(0, initializer_range) for matrices, GPT-2's two
 * projections into the residual stream divided by sqrt(2 * layers); biases 0, norms 1. A function of seed,
 * parameter and element (Philox): the same on any number of threads. */
DW_API dw_status dw_model_init(const dw_model_config *config, uint64_t seed, float *const *weights);

typedef struct dw_model_save_options {
    size_t struct_size;
    const char
        *source;    /* the folder that the model came from: its tokenizer and generation files are
                                  copied. NULL: none */
    dw_dtype dtype; /* of the file: DW_F32, DW_BF16 or DW_F16 */
    int64_t
        shard_bytes; /* a file holds at most this many bytes of data, if no tensor alone is larger */
} dw_model_save_options;
#define DW_MODEL_SAVE_OPTIONS_DEFAULT                                                              \
    { sizeof(dw_model_save_options), NULL, DW_F32, INT64_C(5000000000) }

/* config.json (the fields as they were read, with architectures and dtype set), model.safetensors (or shards and
 * an index), and what is copied from the source: into a temporary folder beside `folder`, synced, and put in
 * its place. Killed at any moment it leaves the old folder or the new one (where the file system cannot exchange
 * two names, for an instant the old one as FOLDER.old). DW_STATE: the folder has files of other kinds, which
 * would be lost. options NULL: defaults. */
DW_API dw_status dw_model_save(const dw_model_config *config, const char *folder,
                               const dw_model_save_options *options, const float *const *weights);
/* Reports what dw_model_save would refuse before it writes, so that it is known before training: files of other
 * kinds in `folder` (NULL: not looked at), and in options->source (options NULL: not looked at) files to copy that
 * are no regular files, or links that lead out of the source (the blobs of the Hugging Face hub's cache may be
 * linked to). Also removes what killed processes left beside `folder`. */
DW_API dw_status dw_model_check_save(const char *folder, const dw_model_save_options *options);
/* The same as dw_model_save, into a folder that exists and which the caller publishes (a checkpoint that holds
 * more). */
DW_API dw_status dw_model_save_into(const dw_model_config *config, const char *folder,
                                    const dw_model_save_options *options,
                                    const float *const *weights);

#ifdef __cplusplus
}
#endif
#endif
