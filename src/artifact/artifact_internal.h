/* An artifact: a safetensors file with the parameters of a model and, as tensors of bytes,
 *
 *     deepwell.config       config.json
 *     deepwell.tokenizer    tokenizer.json; may be absent
 *     deepwell.graph.f32    the graph of a step of generation (dw_model_graph with `cached`), in its JSON form
 *     deepwell.graph.bf16   the same in BF16, if the weights are BF16
 *     deepwell.manifest     {"format": "deepwell artifact", "version": 1, "deepwell": DW_VERSION, "dtype": "bf16",
 *                            "precision": "fp32", "end_tokens": [2], "plan": {"chunk": 256, "capacity": 64},
 *                            "xxh3": {NAME: "0123456789abcdef", ...}}
 *
 * The manifest is the last tensor, since it has the hash of every other one. */
#ifndef DW_ARTIFACT_H
#define DW_ARTIFACT_H

#include "base/json.h"
#include "deepwell/artifact.h"
#include "deepwell/precision.h"
#include "deepwell/safetensors.h"

#define DW__ARTIFACT_FORMAT "deepwell artifact"
enum {
    DW__ARTIFACT_VERSION = 1,
    DW__ARTIFACT_CHUNK = 256,   /* most tokens of one run of the graph */
    DW__ARTIFACT_CAPACITY = 64, /* smallest capacity of the cache; larger ones are twice the last */
    DW__HASH_DIGITS = 16
};

typedef enum dw__artifact_text {
    DW__TEXT_CONFIG,
    DW__TEXT_TOKENIZER,
    DW__TEXT_GRAPH_F32,
    DW__TEXT_GRAPH_BF16,
    DW__TEXT_MANIFEST,
    DW__TEXT_COUNT
} dw__artifact_text;
extern const char *const dw__artifact_text_names[DW__TEXT_COUNT];

/* The element types of weights: "f32", "bf16", "f16". Returns -1 for another name. */
int dw__artifact_dtype_find(const char *name);
const char *dw__artifact_dtype_name(dw_stored_dtype dtype);
/* The policy called `name`, without what only backward does. */
dw_status dw__artifact_policy(const char *name, dw_precision_policy *policy);
dw_status dw__artifact_hash(const char *bytes, size_t count, uint64_t *hash);
/* The graph of a step of generation. */
dw_status dw__artifact_graph(const dw_model_config *config, dw_dtype dtype, dw_graph **graph);
/* Reads eos_token_id of a configuration: an id, a list of them, or absent. Ids outside of the vocabulary are left
 * out. */
typedef struct dw__end_tokens {
    int64_t *items;
    size_t count, capacity;
} dw__end_tokens;
dw_status dw__read_end_tokens(const json_t *json, int vocabulary, dw__end_tokens *ends);

struct dw_artifact {
    dw_safetensors *file;
    dw_model_config *config;
    dw_tokenizer *tokenizer; /* NULL: none */
    dw_graph *graphs[2];     /* F32, BF16; the second may be NULL */
    char *texts[DW__TEXT_COUNT];
    size_t text_bytes[DW__TEXT_COUNT];
    json_t *manifest;
    dw__end_tokens ends;
    dw_stored_dtype dtype;
    const char *precision; /* the manifest's */
    uint32_t *parameters;  /* numbers of the parameters in the file */
    int64_t chunk, capacity;
};

/* Compares the hash of bytes of a tensor with the manifest's. DW_PARSE. */
dw_status dw__artifact_check_hash(const dw_artifact *artifact, const char *name, uint64_t hash);
/* Receives the next elements of a weight, in the type that was asked for. */
typedef dw_status (*dw__weight_sink)(void *context, const void *elements, size_t bytes);
/* Reads parameter `index` piece by piece as F32, or as stored if `dtype` is the file's, and checks its hash. */
dw_status dw__artifact_read_weight(const dw_artifact *artifact, uint32_t index, dw_dtype dtype,
                                   dw__weight_sink sink, void *context);

#endif
