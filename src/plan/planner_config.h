/* What the families of Hugging Face's models have, beyond the sizes that config.json gives. */
#ifndef DW_PLANNER_CONFIG_H
#define DW_PLANNER_CONFIG_H

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
    DW__IS_HYBRID = 1 << 19, /* Nemotron-H: a layer is attention, an MLP, experts or Mamba-2 */
    DW__IS_FALCON = 1 << 20, /* norms and heads depend on what kind of Falcon it is */
    DW__IS_OPT = 1 << 21,    /* two rows of positions more than it says */
} dw__family_has;

/* Biases: NULL none; "+" always; "field" where that flag is true; "+field" unless it is false. */
typedef struct dw__planner_family {
    const char *name; /* model_type */
    int norms;        /* of the hidden width in one layer */
    int full_every;   /* layers with a window: all but every n-th; 0: all */
    const char *query_bias, *output_bias,
        *mlp_bias; /* queries, keys and values; attention's end; MLPs */
    unsigned has;  /* dw__family_has */
} dw__planner_family;

/* NULL: not in the table. */
const dw__planner_family *dw__planner_family_named(const char *model_type);
extern const dw__planner_family dw__planner_family_unknown;

#endif
