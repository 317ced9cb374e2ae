/* A configuration of a model that Deepwell builds: its sizes, and every other field that its function depends on. */
#ifndef DW_MODEL_H
#define DW_MODEL_H

#include "base/base.h"
#include "base/json.h"
#include "deepwell/model.h"
#include <limits.h>

typedef enum dw__built_kind {
    DW__BUILT_GPT2,
    DW__BUILT_LLAMA,
    DW__BUILT_QWEN3,
    DW__BUILT_MISTRAL,
    DW__BUILT_COUNT
} dw__built_kind;

typedef enum dw__activation {
    DW__ACTIVATION_GELU,
    DW__ACTIVATION_GELU_TANH,
    DW__ACTIVATION_RELU,
    DW__ACTIVATION_SILU,
    DW__ACTIVATION_TANH
} dw__activation;

typedef enum dw__rope_type { DW__ROPE_DEFAULT, DW__ROPE_LINEAR, DW__ROPE_LLAMA3 } dw__rope_type;

typedef struct dw__rope {
    dw__rope_type type;
    double theta, factor;                 /* factor: for linear and llama3 */
    double low_frequency, high_frequency; /* for llama3 */
    double original_positions;            /* for llama3 */
} dw__rope;

/* Initialisation of a parameter. */
typedef enum dw__initial {
    DW__INITIAL_NORMAL,   /* normal(0, initializer_range) */
    DW__INITIAL_RESIDUAL, /* the same / sqrt(2 layers): GPT-2's projections into the residual */
    DW__INITIAL_ZEROS,
    DW__INITIAL_ONES
} dw__initial;

typedef struct dw__parameter {
    const char *name;
    int rank;
    int64_t shape[2];
    dw__initial initial;
} dw__parameter;

struct dw_model_config {
    dw__arena *arena; /* memory of parameter names */
    json_t *json;     /* the file as it was read */
    dw__built_kind family;
    dw_model_sizes sizes;
    int64_t positions;     /* longest sequence */
    int64_t padding_index; /* row of the embedding without gradient; -1: none */
    int64_t window;        /* window of sliding layers; 0: none */
    bool *sliding;         /* one entry per layer */
    double eps, initializer_range;
    double embedding_dropout, residual_dropout, attention_dropout;
    bool attention_bias, mlp_bias;
    bool scale_by_width, scale_by_layer; /* attention scales: 1/sqrt(head_dim), 1/(layer + 1) */
    dw__activation activation;
    dw__rope rope;
    struct {
        dw__parameter *items;
        size_t count, capacity;
    } parameters;
};

typedef struct dw__built_family {
    const char *name,
        *architecture;             /* model_type; transformers' class with a language-model head */
    const char *base_architecture; /* transformers' class without a head */
    const char *prefix;            /* prefix of the base model's parameters */
    const char *ignored[2];        /* buffers in old files: names that end so are ignored */
} dw__built_family;
extern const dw__built_family dw__built_families[DW__BUILT_COUNT];

/* In model_parameters.c: fills config->parameters from the other fields. */
dw_status dw__model_list_parameters(dw_model_config *config);

/* Reads the text of a config.json (release with dw__free). `file` receives its path: `path` itself, or the
 * file in that folder. */
dw_status dw__model_config_read(const char *path, char file[PATH_MAX], char **text, size_t *bytes);

#endif
