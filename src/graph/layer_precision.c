/* The table of policies, and the precisions of a linear layer's operands (deepwell/precision.h). */
#include "graph/layer_precision.h"
#include "number/format.h"
#include <stdio.h>
#include <string.h>

/* ---- policies by name ------------------------------------------------------------------------ */

#define ALL(key)                                                                                   \
    {                                                                                              \
        {                                                                                          \
            [DW_FORWARD_X] = {.scheme = DW_SCHEME_##key},                                          \
            [DW_FORWARD_W] = {.scheme = DW_SCHEME_##key},                                          \
            [DW_DGRAD_DY] = {.scheme = DW_SCHEME_##key},                                           \
            [DW_DGRAD_W] = {.scheme = DW_SCHEME_##key},                                            \
            [DW_WGRAD_DY] = {.scheme = DW_SCHEME_##key},                                           \
            [DW_WGRAD_X] = {.scheme = DW_SCHEME_##key},                                            \
        }                                                                                          \
    }

static const struct policy_row {
    const char *name;
    double bf16_share; /* of the published recipe */
    dw_layer_precision layer;
} policies[] = {
    {"fp32", 0.0, ALL(FP32)},
    {"bf16", 0.0, ALL(BF16)},
    {"fp8",
     0.0,
     {{[DW_FORWARD_X] = {.scheme = DW_SCHEME_FP8_TENSOR},
       [DW_FORWARD_W] = {.scheme = DW_SCHEME_FP8_TENSOR},
       [DW_DGRAD_DY] = {.scheme = DW_SCHEME_FP8_TENSOR_E5M2},
       [DW_DGRAD_W] = {.scheme = DW_SCHEME_FP8_TENSOR},
       [DW_WGRAD_DY] = {.scheme = DW_SCHEME_FP8_TENSOR_E5M2},
       [DW_WGRAD_X] = {.scheme = DW_SCHEME_FP8_TENSOR}}}},
    {"fp8-block",
     0.0,
     {{[DW_FORWARD_X] = {.scheme = DW_SCHEME_FP8_BLOCK},
       [DW_FORWARD_W] = {.scheme = DW_SCHEME_FP8_BLOCK, .square = 1},
       [DW_DGRAD_DY] = {.scheme = DW_SCHEME_FP8_BLOCK},
       [DW_DGRAD_W] = {.scheme = DW_SCHEME_FP8_BLOCK, .square = 1},
       [DW_WGRAD_DY] = {.scheme = DW_SCHEME_FP8_BLOCK},
       [DW_WGRAD_X] = {.scheme = DW_SCHEME_FP8_BLOCK}}}},
    {"mxfp8", 0.0, ALL(MXFP8)},
    {"mxfp6", 0.0, ALL(MXFP6)},
    {"mxfp4",
     0.0,
     {{[DW_FORWARD_X] = {.scheme = DW_SCHEME_MXFP4},
       [DW_FORWARD_W] = {.scheme = DW_SCHEME_MXFP4},
       [DW_DGRAD_DY] = {.scheme = DW_SCHEME_MXFP4, .hadamard = 1, .stochastic = 1},
       [DW_DGRAD_W] = {.scheme = DW_SCHEME_MXFP4, .hadamard = 1},
       [DW_WGRAD_DY] = {.scheme = DW_SCHEME_MXFP4, .hadamard = 1, .stochastic = 1},
       [DW_WGRAD_X] = {.scheme = DW_SCHEME_MXFP4, .hadamard = 1}}}},
    {"nvfp4",
     0.15,
     {{[DW_FORWARD_X] = {.scheme = DW_SCHEME_NVFP4},
       [DW_FORWARD_W] = {.scheme = DW_SCHEME_NVFP4, .square = 1},
       [DW_DGRAD_DY] = {.scheme = DW_SCHEME_NVFP4, .stochastic = 1},
       [DW_DGRAD_W] = {.scheme = DW_SCHEME_NVFP4, .square = 1},
       [DW_WGRAD_DY] = {.scheme = DW_SCHEME_NVFP4, .hadamard = 1, .stochastic = 1},
       [DW_WGRAD_X] = {.scheme = DW_SCHEME_NVFP4, .hadamard = 1}}}},
};

/* Writes "fp32, bf16 or nvfp4". */
static void list_names(char *text, size_t bytes) {
    size_t length = 0;
    for (size_t i = 0; i < DW_COUNT(policies) && length < bytes; i++)
        length += (size_t)snprintf(text + length, bytes - length, "%s%s",
                                   i == 0                        ? ""
                                   : i + 1 == DW_COUNT(policies) ? " or "
                                                                 : ", ",
                                   policies[i].name);
}

static dw_status find_row(const char *name, const struct policy_row **row) {
    char names[128];
    for (size_t i = 0; name && i < DW_COUNT(policies); i++) {
        if (strcmp(name, policies[i].name) != 0) continue;
        *row = &policies[i];
        return DW_OK;
    }
    bool known = false;
    for (int i = 0; name && i < DW_SCHEME_COUNT; i++)
        known |= strcmp(name, dw_scheme_name((dw_scheme)i)) == 0;
    list_names(names, sizeof names);
    return dw__fail(known ? DW_UNSUPPORTED : DW_INVALID_ARGUMENT,
                    "precision \"%.64s\" is %s: use %s", name ? name : "(null)",
                    known ? "not supported" : "not a precision", names);
}

const dw_layer_precision *dw__bf16_layer(void) {
    static const dw_layer_precision bf16 = ALL(BF16);
    return &bf16;
}

const char *dw__layer_name(const dw_layer_precision *layer) {
    for (size_t i = 0; i < DW_COUNT(policies); i++)
        if (dw__layer_equal(layer, &policies[i].layer)) return policies[i].name;
    return NULL;
}

dw_status dw_layer_precision_named(const char *name, dw_layer_precision *layer) {
    const struct policy_row *row;
    DW_RETURN_IF_FAILED(find_row(name, &row));
    *layer = row->layer;
    return DW_OK;
}

dw_status dw_precision_policy_init(dw_precision_policy *policy, const char *name) {
    const struct policy_row *row;
    DW_RETURN_IF_FAILED(find_row(name, &row));
    *policy = (dw_precision_policy){
        .struct_size = sizeof *policy,
        .layer = row->layer,
        .high_regions = 1u << DW_REGION_EMBED | 1u << DW_REGION_NORM | 1u << DW_REGION_ROUTER |
                        1u << DW_REGION_HEAD | 1u << DW_REGION_LOSS,
        .bf16_share = row->bf16_share,
    };
    return DW_OK;
}

int dw_precision_policy_needs_seed(const dw_precision_policy *policy) {
    bool needs = dw__layer_is_stochastic(&policy->layer);
    for (uint32_t i = 0; i < policy->exception_count; i++)
        needs |= dw__layer_is_stochastic(&policy->exceptions[i].layer);
    return needs;
}

/* ---- operands as text ------------------------------------------------------------------------ */

enum { FLAGS = 3 };
static const char *const flag_names[FLAGS] = {"square", "hadamard", "stochastic"};
/* RCEIL is what an operand without a rule has. */
static const char *const rule_names[] = {
    [DW_SCALE_RCEIL] = "rceil", [DW_SCALE_FLOOR] = "floor", [DW_SCALE_CEIL] = "ceil"};

const char *dw__rule_word(dw_scale_rule rule) {
    return rule == DW_SCALE_FLOOR || rule == DW_SCALE_CEIL ? rule_names[rule] : NULL;
}

dw_status dw__rule_find(const char *what, const char *name, dw_scale_rule *rule) {
    for (int i = DW_SCALE_RCEIL; i < (int)DW_COUNT(rule_names); i++) {
        if (strcmp(name, rule_names[i]) != 0) continue;
        *rule = (dw_scale_rule)i;
        return DW_OK;
    }
    return dw__fail(DW_INVALID_ARGUMENT, "%s is \"%.64s\"; expected rceil, floor or ceil", what,
                    name);
}

dw__operand_words dw__operand_text(const dw_operand_precision *precision) {
    dw__operand_words words;
    const char *rule = dw__rule_word(precision->scale_rule);
    snprintf(words.text, sizeof words.text, "%s%s%s%s%s%s", dw_scheme_name(precision->scheme),
             precision->square ? "+square" : "", precision->hadamard ? "+hadamard" : "",
             precision->stochastic ? "+stochastic" : "", rule ? "+" : "", rule ? rule : "");
    return words;
}

void dw_operand_precision_text(const dw_operand_precision *precision, char *text, size_t bytes) {
    snprintf(text, bytes, "%s", dw__operand_text(precision).text);
}

dw_status dw__operand_read(const char *text, dw_operand_precision *precision) {
    size_t length = strcspn(text, "+");
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name), text);
    *precision = (dw_operand_precision){0};
    DW_RETURN_IF_FAILED(dw_scheme_find(name, &precision->scheme));
    int *const flags[FLAGS] = {&precision->square, &precision->hadamard, &precision->stochastic};
    for (const char *at = text + length; *at; at += 1 + length) {
        length = strcspn(at + 1, "+");
        snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name),
                 at + 1);
        bool known = false;
        for (int flag = 0; flag < FLAGS; flag++) {
            if (strcmp(name, flag_names[flag]) != 0) continue;
            *flags[flag] = 1;
            known = true;
        }
        if (!known && dw__rule_find("scale rule", name, &precision->scale_rule) != DW_OK)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "\"%.64s\": expected a scheme, then +square, +hadamard, +stochastic, "
                            "+rceil, +floor or +ceil",
                            text);
    }
    return DW_OK;
}

/* ---- rules ----------------------------------------------------------------------------------- */

static bool is_gradient(int operand) { return operand == DW_DGRAD_DY || operand == DW_WGRAD_DY; }

/* The codes of fp8-block are multiplied with one another alone. */
static dw_status check_fp8_block(const char *name, const dw_operand_precision *operand,
                                 const dw_operand_precision *other) {
    if (operand->scheme != DW_SCHEME_FP8_BLOCK) return DW_OK;
    if (other->scheme != DW_SCHEME_FP8_BLOCK)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "%s is fp8-block and the other operand of its GEMM is %s; expected fp8-block "
            "for both or neither",
            name, dw_scheme_name(other->scheme));
    if (operand->hadamard || operand->stochastic)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: fp8-block takes no %s; expected fp8-block or fp8-block+square", name,
                        operand->hadamard ? "hadamard" : "stochastic");
    if (operand->square && other->square)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "%s and the other operand of its GEMM are fp8-block+square; expected square "
            "blocks for one of them at most, the weight",
            name);
    return DW_OK;
}

static dw_status check_operand(const dw_layer_precision *layer, int i) {
    const dw_operand_precision *operand = &layer->operand[i], *other = &layer->operand[i ^ 1];
    const char *name = dw_attr_name(dw__operand_key((dw_linear_operand)i));
    DW_RETURN_IF_FAILED(dw__scheme_check(name, operand->scheme, DW__LAYER_SCHEMES));
    const int flags[FLAGS] = {operand->square, operand->hadamard, operand->stochastic};
    for (int flag = 0; flag < FLAGS; flag++) {
        if (flags[flag] != 0 && flags[flag] != 1)
            return dw__fail(DW_INVALID_ARGUMENT, "%s: %s is %d; expected 0 or 1", name,
                            flag_names[flag], flags[flag]);
        if (flags[flag] && !dw__scheme_in(operand->scheme, dw__block_schemes))
            return dw__fail(DW_INVALID_ARGUMENT, "%s: %s has no blocks and takes no %s", name,
                            dw_scheme_name(operand->scheme), flag_names[flag]);
    }
    DW_RETURN_IF_FAILED(check_fp8_block(name, operand, other));
    if (operand->scale_rule != DW_SCALE_DEFAULT && operand->scale_rule != DW_SCALE_RCEIL &&
        !dw__rule_word(operand->scale_rule))
        return dw__fail(DW_INVALID_ARGUMENT, "%s: the scale rule is %d; expected one of MX", name,
                        (int)operand->scale_rule);
    if (operand->scale_rule != DW_SCALE_DEFAULT && !dw__scheme_in(operand->scheme, dw__mx_schemes))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: %s has no scale rule %s, which is for %s: leave the rule out", name,
                        dw_scheme_name(operand->scheme), rule_names[operand->scale_rule],
                        dw__scheme_list(dw__mx_schemes).text);
    if (operand->stochastic && !is_gradient(i))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s is rounded stochastically; only dgrad_dy and wgrad_dy can be", name);
    if (operand->square && operand->hadamard)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s has square blocks and a Hadamard transform, which is for blocks along "
                        "one axis: expected one of them",
                        name);
    if (operand->hadamard != other->hadamard)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s and the other operand of its GEMM differ in hadamard; expected it for "
                        "both or neither, which keeps the product",
                        name);
    return DW_OK;
}

dw_status dw__layer_check(const dw_layer_precision *layer) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) DW_RETURN_IF_FAILED(check_operand(layer, i));
    return DW_OK;
}

bool dw__layer_is_quantized(const dw_layer_precision *layer) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
        if (layer->operand[i].scheme != DW_SCHEME_FP32) return true;
    return false;
}

bool dw__layer_is_stochastic(const dw_layer_precision *layer) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
        if (layer->operand[i].stochastic) return true;
    return false;
}

bool dw__operand_is_observed(const dw_operand_precision *operand) {
    return dw__scheme_in(operand->scheme, DW__LAYER_SCHEMES & ~DW__SCHEME(BF16));
}

bool dw__layer_is_observed(const dw_layer_precision *layer) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
        if (dw__operand_is_observed(&layer->operand[i])) return true;
    return false;
}

/* A number x is rounded in steps of s = 2^(floor(log2 |x|) - f), which gives errors with the variance s^2 / 12. The
 * ratio is 12 4^f E[x^2] / E[4^floor(log2 |x|)], of which all but 4^f is 13.5 dB for a normal distribution. Stochastic
 * rounding has errors of twice the variance, s^2 / 6. */
double dw_operand_snr_bound_db(const dw_operand_precision *precision) {
    const double gaussian = 13.5, per_bit = 6.02, stochastic = 3.01, margin = 6.0;
    if (!dw__operand_is_observed(precision)) return 0.0;
    const dw_dtype element = dw_scheme_describe(precision->scheme)->element;
    return gaussian + per_bit * dw__formats[element].fraction_bits -
           (precision->stochastic ? stochastic : 0.0) - margin;
}

static bool same_rule(dw_scale_rule a, dw_scale_rule b) {
    return a == b || (!dw__rule_word(a) && !dw__rule_word(b));
}

bool dw__layer_equal(const dw_layer_precision *a, const dw_layer_precision *b) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        const dw_operand_precision *x = &a->operand[i], *y = &b->operand[i];
        if (x->scheme != y->scheme || x->square != y->square || x->hadamard != y->hadamard ||
            x->stochastic != y->stochastic || !same_rule(x->scale_rule, y->scale_rule))
            return false;
    }
    return true;
}
