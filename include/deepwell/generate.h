/* Generation: runs an artifact's model token by token, on a CPU or a GPU.
 *
 *     dw_session *session;
 *     dw_session_create(artifact, NULL, &session);
 *     dw_generate_options options = DW_GENERATE_OPTIONS_DEFAULT;
 *     options.max_tokens = 100, options.on_token = print, options.context = artifact;
 *     dw_session_generate(session, ids, count, &options, &generated);
 *     dw_session_destroy(session);
 *
 * A session is one sequence. It keeps keys and values of its tokens (a KV cache), so that a new token costs one step of
 * the model. One thread may use a session at a time. Sessions of one artifact do not share weights.
 */
#ifndef DEEPWELL_GENERATE_H
#define DEEPWELL_GENERATE_H

#include "deepwell/artifact.h"
#include "deepwell/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_session dw_session;

typedef struct dw_session_options {
    size_t struct_size;      /* sizeof(dw_session_options) */
    const dw_device *device; /* NULL: the CPU */
    /* Element type of weights, activations and cache: "f32", or "bf16" if the artifact's weights are BF16. NULL: "f32"
     * on a CPU; on a GPU "bf16" where it is possible. */
    const char *dtype;
} dw_session_options;
#define DW_SESSION_OPTIONS_DEFAULT                                                                 \
    { sizeof(dw_session_options), NULL, NULL }

/* Reads and checks the weights. `options` NULL: the defaults. DW_PARSE: a weight does not have its hash.
 * DW_INVALID_ARGUMENT: an option is not valid. DW_UNSUPPORTED: the device cannot run the model. */
DW_API dw_status dw_session_create(const dw_artifact *artifact, const dw_session_options *options,
                                   dw_session **session);
DW_API void dw_session_destroy(dw_session *session); /* may be NULL */

/* Forgets all tokens. */
DW_API void dw_session_reset(dw_session *session);
/* Appends tokens to the sequence. `logits` (may be NULL) receives those of the next token: [vocabulary], or with `all`
 * 1 those behind each of these tokens: [count, vocabulary]. DW_INDEX: an id is not in the vocabulary. DW_SHAPE: the
 * sequence would be longer than the model's table of positions. After a failure the sequence has its old length. */
DW_API dw_status dw_session_append(dw_session *session, const int64_t *ids, size_t count, int all,
                                   float *logits);

/* ---- sampling ------------------------------------------------------------------------------ */

/* As transformers applies them: temperature, then top_k, then top_p. */
typedef struct dw_sampling {
    double
        temperature; /* divides the logits; 0: the most likely token (greedy), and the others are not read */
    int64_t top_k; /* keeps the k most likely tokens; 0: all */
    double top_p;  /* keeps the fewest most likely tokens whose probabilities reach this; 1: all */
    uint64_t seed;
} dw_sampling;

/* Chooses a token. The random number depends on `seed` and `step` only (Philox). Of equal logits the lowest id is taken
 * first. DW_INVALID_ARGUMENT: an option is out of range, or the logits have NaN or no finite value. */
DW_API dw_status dw_sample(const float *logits, int64_t count, const dw_sampling *sampling,
                           uint64_t step, int64_t *id);

typedef struct dw_generate_options {
    size_t struct_size; /* sizeof(dw_generate_options) */
    int64_t max_tokens; /* most new tokens */
    dw_sampling sampling;
    int ignore_end; /* 1: goes on behind the artifact's end tokens */
    /* Called with each new token, an end token too. Generation ends if it returns nonzero. May be NULL. */
    int (*on_token)(void *context, int64_t id);
    void *context;
} dw_generate_options;
#define DW_GENERATE_OPTIONS_DEFAULT                                                                \
    { sizeof(dw_generate_options), 128, {0.0, 0, 1.0, 0}, 0, NULL, NULL }

/* Appends `prompt` (at least one token) and then new tokens, until one is an end token, max_tokens are there, the
 * model's table of positions is full, or on_token ends it. *generated (may be NULL): number of new tokens. Step n of
 * sampling is the n-th new token of the call. Fails as dw_session_append and dw_sample do. */
DW_API dw_status dw_session_generate(dw_session *session, const int64_t *prompt, size_t count,
                                     const dw_generate_options *options, size_t *generated);

#ifdef __cplusplus
}
#endif
#endif
