/* Precisions of a linear layer's operands: as attributes, and what is allowed. */
#ifndef DW_GRAPH_LAYER_PRECISION_H
#define DW_GRAPH_LAYER_PRECISION_H

#include "deepwell/precision.h"
#include "graph/internal.h"
#include "number/scheme_sets.h"

/* The attribute of an operand. */
static inline dw_attr_key dw__operand_key(dw_linear_operand operand) {
    return (dw_attr_key)(DW_ATTR_KEY_FORWARD_X + (int)operand);
}

/* Schemes that `quantize` computes. */
#define DW__QUANTIZED_SCHEMES (DW__SCHEME(BF16) | dw__fp8_tensor_schemes | dw__exact_in_bf16)
/* Schemes that an operand of a layer may have. fp8-block's values do not fit BF16, so its operands are codes from the
 * beginning, on every target. */
#define DW__LAYER_SCHEMES (DW__QUANTIZED_SCHEMES | DW__SCHEME(FP8_BLOCK))

/* Returns "floor" or "ceil", and NULL for the other rules, which no text names: they are the default ones. */
const char *dw__rule_word(dw_scale_rule rule);
/* Reads "rceil", "floor" or "ceil". DW_INVALID_ARGUMENT: the message begins with `what`. */
dw_status dw__rule_find(const char *what, const char *name, dw_scale_rule *rule);

/* The attribute's text. */
typedef struct dw__operand_words {
    char text[64];
} dw__operand_words;
dw__operand_words dw__operand_text(const dw_operand_precision *precision);
/* DW_INVALID_ARGUMENT: the text is malformed. It may still break a rule. */
dw_status dw__operand_read(const char *text, dw_operand_precision *precision);

/* Checks the rules of deepwell/precision.h for a quantized layer. The message begins with an attribute's name. */
dw_status dw__layer_check(const dw_layer_precision *layer);
bool dw__layer_is_quantized(const dw_layer_precision *layer);
bool dw__layer_is_stochastic(const dw_layer_precision *layer);
/* Returns whether the operand is shorter than BF16, so that guards observe its rounding; whether a layer has one. */
bool dw__operand_is_observed(const dw_operand_precision *operand);
bool dw__layer_is_observed(const dw_layer_precision *layer);
/* The row "bf16" of the table of policies. */
const dw_layer_precision *dw__bf16_layer(void);
/* Returns the name of the policy that gives a layer these precisions, or NULL. */
const char *dw__layer_name(const dw_layer_precision *layer);
/* Returns whether dw_precision_policy_load reads a file of this name. */
bool dw__policy_is_file(const char *name);
/* Checks the members of a policy. The message says what is wrong with it. */
dw_status dw__policy_check(const dw_precision_policy *policy);

/* Why a layer has its precision. */
typedef enum dw__layer_reason {
    DW__NO_LAYER, /* not a linear layer */
    DW__BY_DEFAULT,
    DW__BY_REGION,
    DW__BY_EXCEPTION,
    DW__BY_SHARE,
    DW__KEPT_F64,
    DW__KEPT_BF16,
    DW__BY_GUARD
} dw__layer_reason;
typedef struct dw__layer_choice {
    const dw_layer_precision *layer; /* of the policy, or static; NULL: the model's precision */
    dw__layer_reason reason;
    uint32_t exception; /* DW__BY_EXCEPTION */
} dw__layer_choice;
/* Whether an operation multiplies rows by the matrix of their expert. Guards do not observe such layers. */
bool dw__is_experts(dw_op op);
/* Chooses the precision of each node of a checked policy's graph. Free *choices with dw__free. */
dw_status dw__choose_layers(const dw_graph *graph, const dw_precision_policy *policy,
                            dw__layer_choice **choices);

bool dw__layer_equal(const dw_layer_precision *a, const dw_layer_precision *b);

#endif
