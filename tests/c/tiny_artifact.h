/* A tiny model's configuration, weights and tokenizer for tests of artifacts. */
#ifndef DW_TINY_ARTIFACT_H
#define DW_TINY_ARTIFACT_H

#include "deepwell/artifact.h"
#include <stdlib.h>
#include <string.h>

#define TINY_CONFIG                                                                                \
    "{\"model_type\": \"llama\", \"vocab_size\": 11, \"hidden_size\": 8, \"intermediate_size\": "  \
    "12, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, "       \
    "\"max_position_embeddings\": 64, \"initializer_range\": 0.5, \"eos_token_id\": 3}"

/* Writes the artifact to `path`. */
static inline dw_status tiny_artifact_write(const char *path, const char *dtype) {
    dw_model_config *config = NULL;
    dw_artifact_options options = DW_ARTIFACT_OPTIONS_DEFAULT;
    options.dtype = dtype;
    dw_status status = dw_model_config_parse(TINY_CONFIG, strlen(TINY_CONFIG), &config);
    if (status != DW_OK) return status;
    uint32_t count = dw_model_parameter_count(config);
    float **weights = calloc(count, sizeof *weights);
    for (uint32_t i = 0; weights && i < count; i++) {
        dw_model_parameter parameter;
        dw_model_parameter_at(config, i, &parameter);
        weights[i] = calloc((size_t)parameter.count, sizeof(float));
    }
    status = dw_model_init(config, 1, weights);
    if (status == DW_OK)
        status = dw_artifact_write(config, path, &options, (const float *const *)weights);
    for (uint32_t i = 0; i < count; i++) free(weights[i]);
    free(weights);
    dw_model_config_destroy(config);
    return status;
}

#endif
