/* Models, by name or from Hugging Face folders. For any family: its sizes. For the families that Deepwell builds: the
 * graph of a config.json, and its weights, read from and written to safetensors.
 *
 *     dw_model_config *config;
 *     dw_graph *graph;
 *     dw_model_config_load("gpt2", &config);             // a folder with config.json
 *     dw_model_graph(config, NULL, &graph);              // the forward pass: logits, or the loss
 *     dw_model_load(config, "gpt2", NULL, weights);      // or dw_model_init for random weights
 *     dw_model_save(config, "trained", NULL, weights);   // a folder that transformers loads
 *     dw_model_config_destroy(config);
 *
 * dw_model_sizes describes a model of any family; predictions use it (planner.h). dw_model_config is a model that
 * Deepwell builds: gpt2, llama, qwen3, mistral. The graph computes the same function as transformers. Every field of
 * config.json that changes this function is implemented, or refused by name and value. docs/models-in-c.md lists the
 * fields.
 *
 * Parameters have the names and shapes of transformers' state_dict. A tied head is not a separate parameter. Parameters
 * are the graph's first leaves, in the order of dw_model_parameter_at.
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

/* ---- catalogue ------------------------------------------------------------------------------ */

/* Published models by name: "gpt2", "llama3-70b", "deepseek-v3", ... (docs/planner-models.md). Case, separators and
 * publisher are ignored: "Llama-3-70B", "meta-llama/Meta-Llama-3-70B". Wherever a name is not found, DW_NOT_FOUND lists
 * similar ones. */
DW_API uint32_t dw_model_catalogue_count(void);
DW_API const char *dw_model_catalogue_name(uint32_t index);   /* NULL after the last */
DW_API const char *dw_model_catalogue_source(uint32_t index); /* where its sizes are published */

/* ---- sizes ---------------------------------------------------------------------------------- */

/* Sizes of a model of any family. A plain structure: predictions read it, and it may be filled by hand. */
typedef struct dw_model_sizes {
    int layers, hidden, heads, kv_heads, head_dim;
    int ffn;        /* width of a dense block's MLP */
    int gated;      /* 1: gate, up and down matrices (SwiGLU); 0: up and down */
    int vocabulary; /* rows of the embedding */
    int tied;       /* 1: the head shares the embedding's weight */
    int positions;  /* rows of a learned table of positions; 0: none */
    int experts;    /* 0: dense */
    int top_k;
    int expert_ffn;   /* width of one expert */
    int shared_ffn;   /* total width of the experts that every token uses */
    int expert_bias;  /* 1: the experts' matrices have biases (gpt-oss) */
    int dense_layers; /* number of leading dense layers in a mixture */
    int moe_every;    /* every n-th of the other layers is a mixture; 1: all of them */
    /* Latent attention (MLA). kv_rank 0: ordinary attention. q_rank 0: no query compression. */
    int q_rank, kv_rank;
    int rope_dim;         /* MLA: shared rotary part of the keys; head_dim is the rest */
    int value_dim;        /* 0: head_dim */
    int window;           /* sliding window of attention, tokens; 0: none */
    int window_every;     /* 2: every other layer has the window; 1: all */
    int window_layers;    /* number of layers with the window; 0: given by window_every */
    int attention_layers; /* in a hybrid with state-space blocks; 0: all layers */
    int lora_rank;        /* above 0: the weights are frozen, and adapters of this rank train */
    double parameters;    /* total, as published; 0: computed from the widths */
    double active;        /* parameters used per token, as published; 0: computed */
} dw_model_sizes;

/* DW_INVALID_ARGUMENT: a width is missing or impossible. */
DW_API dw_status dw_model_sizes_check(const dw_model_sizes *model);

/* Sizes of a model of the catalogue. */
DW_API dw_status dw_model_sizes_named(const char *name, dw_model_sizes *model);
/* Reads a Hugging Face config.json of any family with the usual fields. `path`: the file or its folder. Assumptions
 * about absent fields are logged at level 2. DW_IO. DW_PARSE: not JSON, or a field is missing or wrong. DW_UNSUPPORTED:
 * layers other than attention, MLPs, experts and Mamba's, or an encoder with a decoder. */
DW_API dw_status dw_model_sizes_load(const char *path, dw_model_sizes *model);
DW_API dw_status dw_model_sizes_parse(const char *json, size_t bytes, dw_model_sizes *model);
/* `path_or_name`: an existing file or folder, else a name of the catalogue. */
DW_API dw_status dw_model_sizes_find(const char *path_or_name, dw_model_sizes *model);
/* Derives a model from a forward graph, captured or made by dw_model_graph: widths from its tables, GEMMs and
 * attention, parameters from its leaves. DW_UNSUPPORTED says what was not recognized. */
DW_API dw_status dw_model_sizes_of_graph(const dw_graph *graph, dw_model_sizes *model);

/* Elements of all parameters, and of those that one token uses: top_k of the experts; not the embedding table, unless
 * it is also the head, since a table lookup is no computation. */
DW_API double dw_model_sizes_parameters(const dw_model_sizes *model);
DW_API double dw_model_sizes_active(const dw_model_sizes *model);

/* ---- configuration ------------------------------------------------------------------------- */

typedef struct dw_model_config dw_model_config;

/* `path`: a folder with config.json, or such a file. DW_IO. DW_PARSE: not JSON, or a field is of the wrong kind or out
 * of range. DW_UNSUPPORTED: Deepwell does not implement the family or a field's value. */
DW_API dw_status dw_model_config_load(const char *path, dw_model_config **config);
/* Reads the text of a config.json. */
DW_API dw_status dw_model_config_parse(const char *json, size_t bytes, dw_model_config **config);
/* A configuration of the catalogue. DW_UNSUPPORTED: Deepwell does not build its family. */
DW_API dw_status dw_model_config_named(const char *name, dw_model_config **config);
/* `path_or_name`: an existing file or folder, else a name of the catalogue. */
DW_API dw_status dw_model_config_find(const char *path_or_name, dw_model_config **config);
DW_API void dw_model_config_destroy(dw_model_config *config); /* may be NULL */
/* Writes the fields of config.json, as they were read, to *text. Free with dw_text_free. */
DW_API dw_status dw_model_config_json(const dw_model_config *config, char **text);

typedef struct dw_model_info {
    const char *family; /* model_type; belongs to the config */
    dw_model_sizes sizes;
    /* Longest sequence. GPT-2's table of positions ends there. With rotary positions longer sequences work too. */
    int64_t positions;
    int positions_are_limit; /* 1: running a longer sequence fails */
    int dropout;             /* 1: the configuration has a dropout probability above 0 */
} dw_model_info;
DW_API void dw_model_describe(const dw_model_config *config, dw_model_info *info);

typedef struct dw_model_parameter {
    const char *name; /* "transformer.wte.weight" */
    int rank;         /* 1 or 2 */
    int64_t shape[DW_MAX_RANK];
    int64_t count; /* elements */
    int decay; /* 1: a matrix (rank 2); 0: a norm's weight or a bias, which AdamW usually does not decay */
} dw_model_parameter;
DW_API uint32_t dw_model_parameter_count(const dw_model_config *config);
/* The name in *parameter belongs to the config. */
DW_API void dw_model_parameter_at(const dw_model_config *config, uint32_t index,
                                  dw_model_parameter *parameter);

/* ---- graph --------------------------------------------------------------------------------- */

typedef enum dw_model_output {
    DW_MODEL_LOGITS, /* [B,S,V] */
    DW_MODEL_LOSS /* scalar: mean cross-entropy over labels other than -100; never stores all logits */
} dw_model_output;

typedef struct dw_model_graph_options {
    size_t struct_size; /* sizeof(dw_model_graph_options) */
    dw_model_output output;
    int dropout; /* 1: training, with the configuration's dropout; 0: none */
    dw_dtype
        dtype; /* of parameters, activations and logits: DW_F32, DW_F64 or DW_BF16, whose loss is F32 */
    /* DW_MODEL_LOSS only. 0: position t is scored on label t + 1, so that labels may be the input_ids, as in
     * transformers. 1: position t is scored on label t, because the caller has shifted the labels. */
    int labels_moved;
    /* 1: a step of generation, whose queries also attend to keys and values of earlier tokens (see below). Needs
     * DW_MODEL_LOGITS and dropout 0. `struct_size` may end before this member, which means 0. */
    int cached;
} dw_model_graph_options;
#define DW_MODEL_GRAPH_OPTIONS_DEFAULT                                                             \
    { sizeof(dw_model_graph_options), DW_MODEL_LOGITS, 0, DW_F32, 0, 0 }

/* The forward pass over the symbols B (index 0) and S (index 1), with one output. Leaves: the parameters; input_ids
 * [B,S] i64; with DW_MODEL_LOSS, labels [B,S] i64; with a dropout probability above 0, "seed", i64[2] of DW_ROLE_SEED.
 * `options` NULL: the defaults.
 *
 * With `cached` the symbols are B, S, C (capacity of the cache) and R. Leaves behind input_ids: position, i64[1], the
 * number of tokens before; rows, i64[R], the tokens of input_ids whose logits are wanted; and for each layer N
 * "cache.N.key" and "cache.N.value" [C,B,kv_heads,head_dim], of which the first `position` entries are read (the others
 * must be finite). Outputs: for each layer its new keys and values [S,B,kv_heads,head_dim], which belong into the cache
 * at `position` and may be bound there directly; then the logits [B,R,V]. */
DW_API dw_status dw_model_graph(const dw_model_config *config,
                                const dw_model_graph_options *options, dw_graph **graph);

/* ---- weights: `weights[i]` points to the elements of parameter i, owned by the caller ------ */

typedef struct dw_model_load_options {
    size_t struct_size; /* sizeof(dw_model_load_options) */
    int allow_not_finite; /* 1: weights with NaN or infinity are loaded; 0: they are refused by name */
} dw_model_load_options;
#define DW_MODEL_LOAD_OPTIONS_DEFAULT                                                              \
    { sizeof(dw_model_load_options), 0 }

/* Reads the safetensors of `folder` as F32 (dw_safetensors_read_f32). The files must hold the parameters and no other
 * tensors, except buffers that transformers ignores too. Names may lack the base model's prefix ("wte.weight").
 * DW_SHAPE: the message names all tensors that are missing, extra or of another shape. `options` NULL: the defaults.
 * After a failure the contents of `weights` are unspecified. */
DW_API dw_status dw_model_load(const dw_model_config *config, const char *folder,
                               const dw_model_load_options *options, float *const *weights);
/* Writes random weights, initialised as transformers does: matrices normal(0, initializer_range), with GPT-2's two
 * projections into the residual stream divided by sqrt(2 * layers); biases 0, norms 1. A weight depends on seed,
 * parameter and element only (Philox), so it is the same on any number of threads. */
DW_API dw_status dw_model_init(const dw_model_config *config, uint64_t seed, float *const *weights);

typedef struct dw_model_save_options {
    size_t struct_size; /* sizeof(dw_model_save_options) */
    /* The model's original folder; its tokenizer and generation files are copied. NULL: none. */
    const char *source;
    dw_dtype dtype;      /* of the file: DW_F32, DW_BF16 or DW_F16 */
    int64_t shard_bytes; /* most bytes of data per file, unless one tensor alone is larger */
} dw_model_save_options;
#define DW_MODEL_SAVE_OPTIONS_DEFAULT                                                              \
    { sizeof(dw_model_save_options), NULL, DW_F32, INT64_C(5000000000) }

/* Writes config.json (the fields as read, with architectures and dtype set), model.safetensors (or shards and an
 * index), and the files copied from the source. They go to a temporary folder beside `folder`, which is synced and then
 * replaces it. A process that is killed leaves the old folder or the new one. Where the file system cannot exchange two
 * names, the old one is FOLDER.old for an instant. DW_STATE: `folder` has files of other kinds, which would be lost.
 * `options` NULL: the defaults. */
DW_API dw_status dw_model_save(const dw_model_config *config, const char *folder,
                               const dw_model_save_options *options, const float *const *weights);
/* Reports what dw_model_save would refuse, so that the mistake is known before training: files of other kinds in
 * `folder` (NULL: not checked), and in options->source (options NULL: not checked) files to copy that are not regular
 * files, or links that lead out of the source. Links into the blobs of the Hugging Face hub's cache are allowed. Also
 * removes temporary folders that killed processes left beside `folder`. */
DW_API dw_status dw_model_check_save(const char *folder, const dw_model_save_options *options);
/* Writes the same files into an existing folder that the caller publishes, such as a checkpoint. */
DW_API dw_status dw_model_save_into(const dw_model_config *config, const char *folder,
                                    const dw_model_save_options *options,
                                    const float *const *weights);
#ifdef __cplusplus
}
#endif
#endif
