/* Artifacts: a trained model in one file, ready to generate text without Python.
 *
 *     dw_artifact *artifact;
 *     dw_artifact_export("trained", "model.engine", NULL);    // from a Hugging Face folder
 *     dw_artifact_open("model.engine", &artifact);
 *     const dw_tokenizer *tokenizer = dw_artifact_tokenizer(artifact);
 *     ...                                                     // deepwell/generate.h runs it
 *     dw_artifact_close(artifact);
 *
 * The file is a safetensors file. Beside the model's parameters it holds, as tensors of bytes, config.json, the graph
 * of a step of generation, tokenizer.json, and a manifest with a hash of every other tensor. It holds no code. Files
 * are not trusted: everything but the weights is checked when the file is opened, and each weight when it is read.
 * docs/export.md describes the format.
 */
#ifndef DEEPWELL_ARTIFACT_H
#define DEEPWELL_ARTIFACT_H

#include "deepwell/model.h"
#include "deepwell/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- writing ------------------------------------------------------------------------------- */

typedef struct dw_artifact_options {
    size_t struct_size; /* sizeof(dw_artifact_options) */
    /* Element type of the weights in the file: "f32", "bf16" or "f16". NULL: that of all the folder's weights if it is
     * one of these, else "f32"; dw_artifact_write: "f32". */
    const char *dtype;
    /* Text of a tokenizer.json; "" with 0 bytes: none. NULL: that of the folder, if it has one; dw_artifact_write:
     * none. */
    const char *tokenizer;
    size_t tokenizer_bytes;
    /* Text of a generation_config.json, whose eos_token_id ends a text. NULL: that of the folder; without one, the
     * field of config.json. */
    const char *generation;
    size_t generation_bytes;
    /* How operands of linear layers are rounded when the artifact runs: a policy of dw_precision_policy_init. NULL:
     * "fp32", not at all. */
    const char *precision;
} dw_artifact_options;
#define DW_ARTIFACT_OPTIONS_DEFAULT                                                                \
    { sizeof(dw_artifact_options), NULL, NULL, 0, NULL, 0, NULL }

/* Writes the artifact of a model: a Hugging Face folder (model.h), or a folder of checkpoints (trainer.h), of which the
 * newest is taken. The file is written beside `path`, synced and renamed. `options` NULL: the defaults.
 * DW_INVALID_ARGUMENT: an option is not valid. DW_UNSUPPORTED: Deepwell does not build the model, or does not support
 * its tokenizer. Fails also as dw_model_load does. */
DW_API dw_status dw_artifact_export(const char *folder, const char *path,
                                    const dw_artifact_options *options);
/* Writes the artifact of a configuration and weights in memory (dw_model_load). */
DW_API dw_status dw_artifact_write(const dw_model_config *config, const char *path,
                                   const dw_artifact_options *options, const float *const *weights);

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct dw_artifact dw_artifact;

/* Opens a file and checks everything but the weights. DW_IO. DW_PARSE: the file is no artifact, or it is damaged or
 * truncated. DW_SHAPE: its weights do not fit its configuration. DW_UNSUPPORTED: a later version made it. */
DW_API dw_status dw_artifact_open(const char *path, dw_artifact **artifact);
/* Sessions of the artifact must be destroyed first. May be NULL. */
DW_API void dw_artifact_close(dw_artifact *artifact);

typedef struct dw_artifact_info {
    dw_model_info model;
    const char *dtype;         /* of the weights in the file: "f32", "bf16" or "f16" */
    const char *precision;     /* the policy of linear layers: "fp32", "mxfp8", ... */
    const char *config;        /* text of config.json */
    const int64_t *end_tokens; /* ids after which a text ends; may be none */
    size_t end_count;
} dw_artifact_info;
/* The pointers in *info belong to the artifact. */
DW_API void dw_artifact_describe(const dw_artifact *artifact, dw_artifact_info *info);
/* The tokenizer, which belongs to the artifact, or NULL if it has none. */
DW_API const dw_tokenizer *dw_artifact_tokenizer(const dw_artifact *artifact);

#ifdef __cplusplus
}
#endif
#endif
