/* Declarations shared by the files that read the sizes of a model from config.json; docs/planner-models.md has the
 * rules.
 *
 * A family whose class Deepwell builds is read as that class reads it (model_classes.c). Any other family is read by
 * the usual names of fields (model_reader.c; model_mixers.c: layers without attention), and its row in model_families.c
 * adds what its class in transformers builds. model_elements.c counts the parameters of both. */
#ifndef DW_MODEL_READER_H
#define DW_MODEL_READER_H

#include "base/json.h"
#include "deepwell/model.h"
#include <assert.h>

typedef enum dw__family_has {
    DW__HAS_GATE = 1 << 0,            /* MLPs have gate, up and down matrices */
    DW__HAS_NORM_BIAS = 1 << 1,       /* norms have a weight and a bias */
    DW__HAS_POSITIONS = 1 << 2,       /* learned position embeddings */
    DW__HAS_TIED_HEAD = 1 << 3,       /* the head is tied if tie_word_embeddings is absent */
    DW__HAS_WIDE_MLP = 1 << 4,        /* MLP width is 4 * hidden if none is given */
    DW__HAS_HEAD_NORMS = 1 << 5,      /* norms of queries and keys, with head_dim weights */
    DW__HAS_WIDE_NORMS = 1 << 6,      /* norms of queries and keys, with heads * head_dim weights */
    DW__HAS_CHOICE_OF_NORMS = 1 << 7, /* those norms exist only if use_qk_norm is true */
    DW__HAS_WINDOW = 1 << 8,         /* sliding_window applies unless use_sliding_window is false */
    DW__HAS_WINDOW_IF_USED = 1 << 9, /* sliding_window applies if use_sliding_window is true */
    DW__HAS_SINKS = 1 << 10,         /* attention sinks: one learned logit per head */
    DW__HAS_EXPERT_BIAS = 1 << 11,   /* experts and router have biases */
    DW__HAS_SHARED_GATE = 1 << 12,   /* a gate of one column scales the shared expert */
    DW__HAS_HEAD_BIAS = 1 << 13,
    DW__HAS_EMBEDDING_NORM = 1 << 14,
    DW__HAS_MULTI_QUERY = 1 << 15,   /* one key-value head unless multi_query is false */
    DW__HAS_NO_NORMS = 1 << 16,      /* norms without parameters */
    DW__HAS_SHARED_EXPERT = 1 << 17, /* one shared expert, as wide as the others */
    /* BERT: token types; the head has a linear layer and a norm of its own */
    DW__IS_ENCODER = 1 << 18,
    DW__IS_BLOCKS = 1 << 19, /* Nemotron-H: a layer is attention, an MLP, experts or Mamba-2 */
    DW__IS_FALCON = 1 << 20, /* norms and heads depend on the generation of Falcon */
    DW__IS_OPT = 1 << 21,    /* the position table has two rows more than max_position_embeddings */
    /* attention's result is multiplied by a projection of the layer's input */
    DW__HAS_OUTPUT_GATE = 1 << 22,
    /* norms before the last projection of attention and of the MLP */
    DW__HAS_SUB_NORMS = 1 << 23,
    DW__HAS_HALF_MLP = 1 << 24, /* intermediate_size counts gate and up together */
    /* shared_intermediate_size is the MLP width of models without experts */
    DW__HAS_SHARED_MLP = 1 << 25,
    /* MLP width is two thirds of intermediate_size, rounded up (LFM2) */
    DW__HAS_ADJUSTED_MLP = 1 << 26,
    DW__HAS_ROUTER_BIAS = 1 << 27, /* the router has a learned bias for each expert */
    DW__HAS_POST_NORMS = 1 << 28,  /* two more norms if use_post_norm is true */
} dw__family_has;

/* The sequence mixer that some layers have in place of attention, or beside it. */
typedef enum dw__mixer {
    DW__MIXER_NONE,
    DW__MIXER_MAMBA2,        /* Dao and Gu 2024 */
    DW__MIXER_MAMBA2_BESIDE, /* Mamba-2 beside attention in each layer (Falcon-H1) */
    DW__MIXER_MAMBA,         /* Gu and Dao 2023, with norms of its three inputs (Jamba) */
    DW__MIXER_DELTA,         /* gated delta rule, one decay for a head (Qwen3-Next) */
    DW__MIXER_DELTA_WIDE,    /* one decay for each element of a head (Kimi Linear) */
    DW__MIXER_CONVOLUTION,   /* a short convolution between two gates (LFM2) */
    DW__MIXER_LIGHTNING,     /* linear attention with a norm and a gate (MiniMax-01) */
    DW__MIXER_RECURRENT,     /* RG-LRU (De et al. 2024, Griffin) */
} dw__mixer;

/* Rules for biases: NULL never; "+" always; "field" if that flag is true; "+field" unless that flag is false. */
typedef struct dw__model_family {
    const char *names; /* model_type; several names are separated by spaces */
    int norms;         /* norms of the hidden width in one layer */
    /* every n-th layer has full attention and the others the window; 0: all have the window */
    int full_every;
    /* query_bias: queries, keys and values; output_bias: attention's output; mlp_bias: MLPs */
    const char *query_bias, *output_bias, *mlp_bias;
    unsigned has; /* flags of dw__family_has */
    dw__mixer mixer;
    const struct dw__built_family *built; /* NULL: Deepwell does not build the family */
} dw__model_family;

/* Returns NULL if the table has no such family. */
const dw__model_family *dw__model_family_named(const char *model_type);
extern const dw__model_family dw__model_family_unknown;
/* Returns the reason why models of this type cannot be planned, or NULL. */
const char *dw__model_family_refused(const char *model_type);

/* ---- reading ---------------------------------------------------------------------------------------------------- */

enum {
    DW__LAYERS_MOST = 1 << 13,
    DW__SIZE_MOST = 1 << 24, /* of a width or a number of heads */
    DW__VOCABULARY_MOST = 1 << 28,
    DW__NAMES_MOST = 8, /* names of one size */
};

typedef struct dw__reading {
    const json_t *json;
    const dw__model_family *family;
    dw_model_sizes *model;
    int norms; /* norms of the hidden width in one layer */
    bool query_bias, output_bias, mlp_bias;
    double total, active; /* elements counted so far */
    /* Only of families that are built. */
    int64_t positions;            /* longest sequence that the class states */
    int64_t window, first_window; /* as in the file; model->window is clamped */
} dw__reading;

/* Parses the text of a config.json, which must be an object. */
dw_status dw__config_parse(const char *text, size_t bytes, json_t **root);
/* Reads the sizes of r->json into r->model. Fails as dw_model_sizes_parse does. */
dw_status dw__read_sizes(dw__reading *r);

static inline bool dw__reading_has(const dw__reading *r, unsigned what) {
    assert(r->family);
    return (r->family->has & what) != 0;
}
/* Reads the first field of `names` that is present, since families name a size differently. If none is present, the
 * value is `absent`; a negative `absent` makes the field required. A list with one number per layer counts as that
 * number if all are equal. */
dw_status dw__read_size(const dw__reading *r, const char *const *names, int64_t low, int64_t high,
                        int64_t absent, int *value);
#define DW__NAMES(...) ((const char *const[DW__NAMES_MOST + 1]){__VA_ARGS__})
dw_status dw__read_flag(const dw__reading *r, const char *name, bool absent, bool *value);
/* Returns an array of strings with one entry per layer, or NULL if the field is absent. */
dw_status dw__read_list(const dw__reading *r, const char *name, const json_t **list);

/* Sets a window beyond any sequence length to the largest that sizes have. */
void dw__set_window(dw_model_sizes *model, int64_t window);
dw_status dw__check_heads(const dw_model_sizes *model);

/* Reads a family that is built. */
dw_status dw__read_class(dw__reading *r);
/* Whether a layer of a family that is built has the window; after dw__read_sizes it does not fail. */
dw_status dw__layer_slides(const dw__reading *r, int layer, bool *sliding);

dw_status dw__read_heads(dw__reading *r);
dw_status dw__read_experts(dw__reading *r, int *mixtures);

/* Counts the layers with another mixer than attention (all layers if the mixer is beside attention) and the elements
 * of one such mixer. Sets attention_layers. */
dw_status dw__read_mixers(dw__reading *r, int *others, double *elements);
/* Reads the widths of Nemotron-H and counts the parameters of its layers. */
dw_status dw__read_blocks(dw__reading *r);

dw_status dw__attention_elements(const dw__reading *r, double *elements);
dw_status dw__count_layers(dw__reading *r, int mixtures);
dw_status dw__count_ends(dw__reading *r);

#endif
