/* The table of policies, and the precisions of a linear layer's operands (deepwell/precision.h). */
#include "graph/layer_precision.h"
#include <stdio.h>
#include <string.h>

/* ---- policies by name ------------------------------------------------------------------------ */

#define ALL(scheme)                                                                                \
    {                                                                                              \
        {                                                                                          \
            {DW_SCHEME_##scheme, 0, 0, 0}, {DW_SCHEME_##scheme, 0, 0, 0},                          \
                {DW_SCHEME_##scheme, 0, 0, 0}, {DW_SCHEME_##scheme, 0, 0, 0},                      \
                {DW_SCHEME_##scheme, 0, 0, 0}, {                                                   \
                DW_SCHEME_##scheme, 0, 0, 0                                                        \
            }                                                                                      \
        }                                                                                          \
    }

static const struct policy_row {
    const char *name;
    double bf16_share; /* of the published recipe */
    dw_layer_precision layer;
} policies[] = {
    {"fp32", 0.0, ALL(FP32)},
    {"bf16", 0.0, ALL(BF16)},
    {"mxfp8", 0.0, ALL(MXFP8)},
    {"nvfp4",
     0.15,
     {{[DW_FORWARD_X] = {.scheme = DW_SCHEME_NVFP4},
       [DW_FORWARD_W] = {.scheme = DW_SCHEME_NVFP4, .square = 1},
       [DW_DGRAD_DY] = {.scheme = DW_SCHEME_NVFP4, .stochastic = 1},
       [DW_DGRAD_W] = {.scheme = DW_SCHEME_NVFP4, .square = 1},
       [DW_WGRAD_DY] = {.scheme = DW_SCHEME_NVFP4, .hadamard = 1, .stochastic = 1},
       [DW_WGRAD_X] = {.scheme = DW_SCHEME_NVFP4, .hadamard = 1}}}},
};

static dw_status find_row(const char *name, const struct policy_row **row) {
    for (size_t i = 0; name && i < DW_COUNT(policies); i++) {
        if (strcmp(name, policies[i].name) != 0) continue;
        *row = &policies[i];
        return DW_OK;
    }
    bool known = name && strcmp(name, "fp8") == 0;
    for (int i = 0; name && i < DW_SCHEME_COUNT; i++)
        known |= strcmp(name, dw_scheme_name((dw_scheme)i)) == 0;
    return dw__fail(known ? DW_UNSUPPORTED : DW_INVALID_ARGUMENT,
                    "precision \"%.64s\" is %s: use fp32, bf16, mxfp8 or nvfp4",
                    name ? name : "(null)", known ? "not supported" : "not a precision");
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

dw__operand_words dw__operand_text(const dw_operand_precision *precision) {
    dw__operand_words words;
    snprintf(words.text, sizeof words.text, "%s%s%s%s", dw_scheme_name(precision->scheme),
             precision->square ? "+square" : "", precision->hadamard ? "+hadamard" : "",
             precision->stochastic ? "+stochastic" : "");
    return words;
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
        int flag = 0;
        while (flag < FLAGS && (strlen(flag_names[flag]) != length ||
                                strncmp(flag_names[flag], at + 1, length) != 0))
            flag++;
        if (flag == FLAGS)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "\"%.64s\": expected a scheme, then +square, +hadamard or +stochastic",
                            text);
        *flags[flag] = 1;
    }
    return DW_OK;
}

/* ---- rules ----------------------------------------------------------------------------------- */

static bool is_gradient(int operand) { return operand == DW_DGRAD_DY || operand == DW_WGRAD_DY; }

static dw_status check_operand(const dw_layer_precision *layer, int i) {
    const dw_operand_precision *operand = &layer->operand[i], *other = &layer->operand[i ^ 1];
    const char *name = dw_attr_name(dw__operand_key((dw_linear_operand)i));
    DW_RETURN_IF_FAILED(dw__scheme_check(name, operand->scheme, DW__QUANTIZED_SCHEMES));
    const int flags[FLAGS] = {operand->square, operand->hadamard, operand->stochastic};
    for (int flag = 0; flag < FLAGS; flag++) {
        if (flags[flag] != 0 && flags[flag] != 1)
            return dw__fail(DW_INVALID_ARGUMENT, "%s: %s is %d; expected 0 or 1", name,
                            flag_names[flag], flags[flag]);
        if (flags[flag] && operand->scheme == DW_SCHEME_BF16)
            return dw__fail(DW_INVALID_ARGUMENT, "%s: bf16 has no blocks and takes no %s", name,
                            flag_names[flag]);
    }
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

bool dw__layer_equal(const dw_layer_precision *a, const dw_layer_precision *b) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        const dw_operand_precision *x = &a->operand[i], *y = &b->operand[i];
        if (x->scheme != y->scheme || x->square != y->square || x->hadamard != y->hadamard ||
            x->stochastic != y->stochastic)
            return false;
    }
    return true;
}
