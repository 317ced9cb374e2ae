/* What the families of Hugging Face's models have, beyond the sizes that config.json gives, and how a config.json is
 * read. planner_config.c reads the widths, planner_mixers.c the layers that are no attention, planner_elements.c
 * counts parameters. */
#ifndef DW_PLANNER_CONFIG_H
#define DW_PLANNER_CONFIG_H

#include "base/json.h"
#include "deepwell/planner.h"
#include <assert.h>

typedef enum dw__family_has {
    DW__HAS_GATE = 1 << 0,       /* gate, up and down */
    DW__HAS_NORM_BIAS = 1 << 1,  /* norms have a weight and a bias */
    DW__HAS_POSITIONS = 1 << 2,  /* a learned table of positions */
    DW__HAS_TIED_HEAD = 1 << 3,  /* where tie_word_embeddings is absent */
    DW__HAS_WIDE_MLP = 1 << 4,   /* 4 * hidden, where no width is given */
    DW__HAS_HEAD_NORMS = 1 << 5, /* of queries and keys, one weight for an element of a head */
    DW__HAS_WIDE_NORMS = 1 << 6, /* of queries and keys, one weight for an element of all heads */
    DW__HAS_CHOICE_OF_NORMS = 1 << 7, /* those only where use_qk_norm is true */
    DW__HAS_WINDOW = 1 << 8,         /* sliding_window counts, unless use_sliding_window is false */
    DW__HAS_WINDOW_IF_USED = 1 << 9, /* sliding_window counts where use_sliding_window is true */
    DW__HAS_SINKS = 1 << 10,         /* a logit for each head that no key has */
    DW__HAS_EXPERT_BIAS = 1 << 11,   /* of experts and router */
    DW__HAS_SHARED_GATE = 1 << 12,   /* the shared expert's share, a product of one column */
    DW__HAS_HEAD_BIAS = 1 << 13,
    DW__HAS_EMBEDDING_NORM = 1 << 14,
    DW__HAS_MULTI_QUERY = 1 << 15,   /* one key-value head, unless multi_query is false */
    DW__HAS_NO_NORMS = 1 << 16,      /* norms without parameters */
    DW__HAS_SHARED_EXPERT = 1 << 17, /* one as wide as the others */
    DW__IS_ENCODER =
        1 << 18, /* BERT: types of tokens, a head with a product and a norm of its own */
    DW__IS_BLOCKS = 1 << 19, /* Nemotron-H: a layer is attention, an MLP, experts or Mamba-2 */
    DW__IS_FALCON = 1 << 20, /* norms and heads depend on what kind of Falcon it is */
    DW__IS_OPT = 1 << 21,    /* two rows of positions more than it says */
    DW__HAS_OUTPUT_GATE = 1 << 22,  /* attention's result times a product of the layer's input */
    DW__HAS_SUB_NORMS = 1 << 23,    /* before the last product of attention and of the MLP */
    DW__HAS_HALF_MLP = 1 << 24,     /* intermediate_size is of gate and up together */
    DW__HAS_SHARED_MLP = 1 << 25,   /* shared_intermediate_size is the MLP where no experts are */
    DW__HAS_ADJUSTED_MLP = 1 << 26, /* two thirds of intermediate_size, rounded up (LFM2) */
    DW__HAS_ROUTER_BIAS = 1 << 27,  /* one for each expert, and a parameter */
    DW__HAS_POST_NORMS = 1 << 28,   /* two norms more where use_post_norm is true */
} dw__family_has;

/* What stands in place of attention in some layers, or beside it. */
typedef enum dw__mixer {
    DW__MIXER_NONE,
    DW__MIXER_MAMBA2,        /* Dao and Gu 2024 */
    DW__MIXER_MAMBA2_BESIDE, /* the same, in each layer beside attention (Falcon-H1) */
    DW__MIXER_MAMBA,         /* Gu and Dao 2023, with norms of its three inputs (Jamba) */
    DW__MIXER_DELTA,         /* gated delta rule, one decay for a head (Qwen3-Next) */
    DW__MIXER_DELTA_WIDE,    /* one decay for each element of a head (Kimi Linear) */
    DW__MIXER_CONVOLUTION,   /* a short convolution between two gates (LFM2) */
    DW__MIXER_LIGHTNING,     /* linear attention with a norm and a gate (MiniMax-01) */
    DW__MIXER_RECURRENT,     /* RG-LRU (De et al. 2024, Griffin) */
} dw__mixer;

/* Biases: NULL none; "+" always; "field" where that flag is true; "+field" unless it is false. */
typedef struct dw__planner_family {
    const char *names; /* model_type; several, with spaces between */
    int norms;         /* of the hidden width in one layer */
    int full_every;    /* layers with a window: all but every n-th; 0: all */
    const char *query_bias, *output_bias,
        *mlp_bias; /* queries, keys and values; attention's end; MLPs */
    unsigned has;  /* dw__family_has */
    dw__mixer mixer;
} dw__planner_family;

/* NULL: not in the table. */
const dw__planner_family *dw__planner_family_named(const char *model_type);
extern const dw__planner_family dw__planner_family_unknown;
/* Why models of this type are not planned; NULL: they may be. */
const char *dw__planner_family_refused(const char *model_type);

/* ---- reading ---------------------------------------------------------------------------------------------------- */

enum {
    DW__LAYERS_MOST = 1 << 16,
    DW__SIZE_MOST = 1 << 24,
    DW__VOCABULARY_MOST = 1 << 28,
    DW__NAMES_MOST = 8, /* of one size */
};

typedef struct dw__reading {
    const json_t *json;
    const dw__planner_family *family;
    dw_planner_model *model;
    int norms; /* of the hidden width, in a layer */
    bool query_bias, output_bias, mlp_bias;
    double total, active; /* elements, as far as they have been counted */
} dw__reading;

static inline bool dw__reading_has(const dw__reading *r, unsigned what) {
    assert(r->family);
    return (r->family->has & what) != 0;
}
/* Families have several names for one size: the first that is there. `absent` negative: one must be. A list of numbers
 * that are all the same, one for a layer, is that number. */
dw_status dw__read_size(const dw__reading *r, const char *const *names, int64_t low, int64_t high,
                        int64_t absent, int *value);
#define DW__NAMES(...) ((const char *const[DW__NAMES_MOST + 1]){__VA_ARGS__})
dw_status dw__read_flag(const dw__reading *r, const char *name, bool absent, bool *value);
/* The entries of an array that are strings, one for a layer; NULL where the field is absent. */
dw_status dw__read_list(const dw__reading *r, const char *name, const json_t **list);

dw_status dw__read_heads(dw__reading *r);
dw_status dw__read_experts(dw__reading *r, int *mixtures);

/* Layers whose mixer is another one than attention (beside attention: all), and the elements of one. Sets
 * attention_layers. */
dw_status dw__read_mixers(dw__reading *r, int *others, double *elements);
/* Nemotron-H, widths and parameters of its layers. */
dw_status dw__read_blocks(dw__reading *r);

dw_status dw__attention_elements(const dw__reading *r, double *elements);
dw_status dw__count_layers(dw__reading *r, int mixtures);
dw_status dw__count_ends(dw__reading *r);

#endif
