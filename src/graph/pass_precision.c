/* Replaces linear layers by quantized_linear according to a policy (deepwell/precision.h). */
#include "graph/layer_precision.h"
#include "graph/passes.h"
#include <math.h>
#include <string.h>

/* ---- policies -------------------------------------------------------------------------------- */

static dw_status check_layer(const dw_layer_precision *layer, const char *whose, uint32_t index) {
    dw_status status = dw__layer_is_quantized(layer) ? dw__layer_check(layer) : DW_OK;
    if (status == DW_OK) return DW_OK;
    return whose ? dw__fail_prefix(status, "%s %u of the precision policy", whose, index)
                 : dw__fail_prefix(status, "the precision policy");
}

static dw_status check_guard(const dw_precision_guard *guard) {
    if (guard->every < 0)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "guard: every is %lld; expected 0 or more steps from one sample to the next",
            (long long)guard->every);
    if (!(guard->snr_db >= 0.0 && guard->snr_db <= 200.0))
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "guard: snr_db is %g; expected a bound from 0 to 200 dB, where 0 stands for "
            "the bound that follows from the format",
            guard->snr_db);
    /* A file of a policy can hold these values (policy_json.c). */
    if (!(guard->underflow == 0.0 || (guard->underflow >= 1e-6 && guard->underflow <= 1.0)))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "guard: underflow is %g; expected a share from 1e-6 to 1, or 0 for 0.9",
                        guard->underflow);
    if (guard->samples < 0 || guard->samples > 1 << 20)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "guard: samples is %d; expected how many in a row a layer must fail, 1 to "
                        "2^20, or 0 for 2",
                        guard->samples);
    if (!(guard->repair >= 0.0 && guard->repair <= 1.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "guard: repair is %g; expected a share of the steps from 0 to 1",
                        guard->repair);
    return DW_OK;
}

dw_status dw__policy_check(const dw_precision_policy *policy) {
    static const dw__struct known = {"dw_precision_policy", sizeof *policy, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, policy, NULL));
    DW_RETURN_IF_FAILED(check_layer(&policy->layer, NULL, 0));
    if (!(policy->bf16_share >= 0.0 && policy->bf16_share <= 1.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "bf16_share of the precision policy is %g; expected a share from 0 to 1",
                        policy->bf16_share);
    DW_RETURN_IF_FAILED(check_guard(&policy->guard));
    for (uint32_t i = 0; i < policy->fallen_back_count; i++)
        if (!policy->fallen_back[i])
            return dw__fail(DW_INVALID_ARGUMENT,
                            "layer %u of those that have fallen back has no name", i);
    for (uint32_t i = 0; i < policy->exception_count; i++) {
        DW_RETURN_IF_FAILED(check_layer(&policy->exceptions[i].layer, "exception", i));
        if (!policy->exceptions[i].module)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "exception %u of the precision policy names no module", i);
    }
    return DW_OK;
}

static bool quantizes(const dw_precision_policy *policy) {
    bool any = dw__layer_is_quantized(&policy->layer);
    for (uint32_t i = 0; i < policy->exception_count; i++)
        any |= dw__layer_is_quantized(&policy->exceptions[i].layer);
    return any;
}

/* Returns the end of a set "[...]" in a pattern, or NULL if it has none: the bracket is then a character. The first
 * character of a set may be "]". */
static const char *set_end(const char *set) {
    const char *at = set + 1;
    if (*at == '!') at++;
    if (*at == ']') at++;
    while (*at && *at != ']') at++;
    return *at ? at + 1 : NULL;
}

/* Returns whether one character matches the pattern's first element, and where the next element begins. */
static bool matches_one(const char *pattern, char c, const char **next) {
    const char *end = *pattern == '[' ? set_end(pattern) : NULL;
    if (!end) return *next = pattern + 1, *pattern == '?' || *pattern == c;
    const char *at = pattern + 1;
    bool inverted = *at == '!', found = false;
    if (inverted) at++;
    for (; at < end - 1; at++) {
        char last = *at;
        const char *first = at;
        if (at[1] == '-' && at + 2 < end - 1) last = at[2], at += 2;
        found |= *first <= c && c <= last;
    }
    return *next = end, found != inverted;
}

/* Matches the first `length` characters of `name`. After a mismatch the last `*` covers one more character, so that the
 * time is at most the product of the lengths. */
static bool matches(const char *pattern, const char *name, size_t length) {
    const char *end = name + length, *star = NULL, *covered = NULL, *next;
    while (name < end) {
        if (*pattern == '*') {
            star = ++pattern;
            covered = name;
        } else if (*pattern && matches_one(pattern, *name, &next)) {
            pattern = next;
            name++;
        } else if (star) {
            pattern = star;
            name = ++covered;
        } else {
            return false;
        }
    }
    while (*pattern == '*') pattern++;
    return !*pattern;
}

/* Returns whether the pattern matches the module or one around it. The empty name is the root's, around all. */
static bool covers(const char *pattern, const char *module) {
    if (matches(pattern, module, 0)) return true;
    for (size_t length = 1; length <= strlen(module); length++)
        if ((module[length] == '.' || !module[length]) && matches(pattern, module, length))
            return true;
    return false;
}

/* ---- which layer has which precision --------------------------------------------------------- */

/* Sets activations[value] for every value that depends on an input of the call. */
static dw_status find_activations(const dw_graph *graph, bool **activations) {
    bool *depends = dw__calloc(graph->values.count + 1, sizeof *depends);
    if (!depends) return dw__fail_memory("values that are activations", graph->values.count);
    for (size_t i = 0; i < graph->leaves.count; i++) {
        dw_value leaf = graph->leaves.items[i];
        dw_role role = graph->values.items[leaf].role;
        depends[leaf] = role != DW_ROLE_PARAMETER && role != DW_ROLE_CONSTANT;
    }
    for (size_t n = 0; n < graph->nodes.count; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        bool any = false;
        for (uint32_t i = 0; i < node->input_count; i++)
            any |= node->inputs[i] != DW_NONE && depends[node->inputs[i]];
        for (uint32_t o = 0; o < node->output_count; o++) depends[node->outputs[o]] = any;
    }
    *activations = depends;
    return DW_OK;
}

static dw__layer_choice choice_of(const dw_precision_policy *policy, const dw__node_record *node) {
    dw__layer_choice choice = {&policy->layer, DW__BY_DEFAULT, 0};
    if (policy->high_regions >> node->region & 1)
        choice = (dw__layer_choice){NULL, DW__BY_REGION, 0};
    for (uint32_t i = policy->exception_count; i-- > 0;) {
        if (!covers(policy->exceptions[i].module, node->module)) continue;
        choice = (dw__layer_choice){&policy->exceptions[i].layer, DW__BY_EXCEPTION, i};
        break;
    }
    if (choice.layer && !dw__layer_is_quantized(choice.layer)) choice.layer = NULL;
    return choice;
}

static bool has_fallen_back(const dw_precision_policy *policy, const char *module) {
    for (uint32_t i = 0; i < policy->fallen_back_count; i++)
        if (strcmp(policy->fallen_back[i], module) == 0) return true;
    return false;
}

bool dw__is_experts(dw_op op) { return op == DW_OP_GROUPED_LINEAR || op == DW_OP_SEGMENT_LINEAR; }

/* Returns whether experts can have this precision: FP8 with a scale for each tensor. Their third matmul, of the
 * weight's gradient, is not rounded. */
static bool serves_experts(const dw_layer_precision *layer) {
    static const dw_linear_operand rounded[] = {DW_FORWARD_X, DW_FORWARD_W, DW_DGRAD_DY,
                                                DW_DGRAD_W};
    bool all = true;
    for (size_t i = 0; i < DW_COUNT(rounded); i++)
        all &= dw__scheme_in(layer->operand[rounded[i]].scheme, dw__fp8_tensor_schemes);
    return all;
}

/* Whether a segment_linear reads or stores rows by an index, or weighs them. */
static bool has_indexes(const dw__node_record *node) {
    enum { FIRST = 4 };
    for (uint32_t i = FIRST; i < node->input_count; i++)
        if (node->inputs[i] != DW_NONE) return true;
    return false;
}

dw_status dw__choose_layers(const dw_graph *graph, const dw_precision_policy *policy,
                            dw__layer_choice **chosen) {
    dw_status status = DW_OK;
    bool *activations = NULL;
    size_t count = 0, nodes = graph->nodes.count;
    dw__layer_choice *choices = dw__calloc(nodes + 1, sizeof *choices);
    if (!choices) return dw__fail_memory("precisions of layers", nodes * sizeof *choices);
    DW_TRY(find_activations(graph, &activations));
    for (size_t n = 0; n < nodes; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        /* Rows by an index are for kernels of 16-bit elements. */
        const bool experts = dw__is_experts(node->op) && !has_indexes(node);
        if ((node->op != DW_OP_LINEAR && !experts) || node->backward ||
            activations[node->inputs[1]])
            continue;
        choices[n] = choice_of(policy, node);
        if (experts && (!choices[n].layer || !serves_experts(choices[n].layer))) {
            /* They are listed where FP8 would have had them. */
            const bool listed = !choices[n].layer && serves_experts(&policy->layer);
            if (!listed) choices[n] = (dw__layer_choice){NULL, DW__NO_LAYER, 0};
            continue;
        }
        if (choices[n].layer && graph->values.items[node->outputs[0]].dtype == DW_F64) {
            if (policy->strict)
                DW_TRY(
                    dw__fail(DW_UNSUPPORTED,
                             "the layer in module '%s' computes in f64, and the policy is strict: "
                             "use fallback \"safe\", or give the module the precision fp32",
                             node->module));
            choices[n] = (dw__layer_choice){NULL, DW__KEPT_F64, 0};
        }
        count += choices[n].layer && !experts && dw__layer_equal(choices[n].layer, &policy->layer);
    }
    size_t last = (size_t)floor(policy->bf16_share * (double)count + 0.5);
    for (size_t n = nodes; n-- > 0 && last > 0;) {
        if (!choices[n].layer || dw__is_experts(graph->nodes.items[n].op) ||
            !dw__layer_equal(choices[n].layer, &policy->layer))
            continue;
        choices[n] = (dw__layer_choice){dw__bf16_layer(), DW__BY_SHARE, 0};
        last--;
    }
    for (size_t n = 0; n < nodes; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        const bool is_bf16 = graph->values.items[node->outputs[0]].dtype == DW_BF16;
        if (choices[n].layer && has_fallen_back(policy, node->module) &&
            dw__layer_is_observed(choices[n].layer))
            choices[n] = (dw__layer_choice){
                is_bf16 || dw__is_experts(node->op) ? NULL : dw__bf16_layer(), DW__BY_GUARD, 0};
        else if (choices[n].layer && is_bf16 && dw__layer_equal(choices[n].layer, dw__bf16_layer()))
            choices[n] = (dw__layer_choice){NULL, DW__KEPT_BF16, 0};
    }
    *chosen = choices;
    choices = NULL;
cleanup:
    dw__free(activations);
    dw__free(choices);
    return status;
}

/* ---- the pass -------------------------------------------------------------------------------- */

static int64_t first_free_stream(const dw_graph *graph) {
    int64_t next = 0;
    for (dw_node n = 0; n < graph->nodes.count; n++) {
        int64_t stream = dw_node_int(graph, n, DW_ATTR_KEY_STREAM, -1);
        /* A quantized layer uses two streams. */
        if (stream >= next && stream < INT64_MAX - 2) next = stream + 2;
    }
    return next;
}

static dw_value find_seed(const dw_graph *graph) {
    for (size_t i = 0; i < graph->leaves.count; i++) {
        dw_value leaf = graph->leaves.items[i];
        if (graph->values.items[leaf].role == DW_ROLE_SEED) return leaf;
    }
    return DW_NONE;
}

/* Returns the next leaf for statistics from the position *at on, or DW_NONE. */
static dw_value next_statistics(const dw_graph *graph, size_t *at) {
    while (*at < graph->leaves.count) {
        dw_value leaf = graph->leaves.items[(*at)++];
        if (graph->values.items[leaf].role == DW_ROLE_STATISTICS) return leaf;
    }
    return DW_NONE;
}

/* Emits the quantized layer in the new graph under its old name. `statistics`: a leaf of the old graph, or DW_NONE. */
static dw_status quantize_layer(dw__rewriter *rewriter, dw_node n, const dw_layer_precision *layer,
                                dw_value seed, int64_t stream, dw_value statistics) {
    const dw__node_record *node = &rewriter->from->nodes.items[n];
    dw_value inputs[5];
    for (uint32_t i = 0; i < 3; i++) {
        bool there = i < node->input_count && node->inputs[i] != DW_NONE;
        inputs[i] = there ? rewriter->map[node->inputs[i]] : DW_NONE;
    }
    bool random = dw__layer_is_stochastic(layer);
    inputs[3] = random ? rewriter->map[seed] : DW_NONE;
    inputs[4] = statistics == DW_NONE ? DW_NONE : rewriter->map[statistics];
    dw__operand_words words[DW_LINEAR_OPERANDS];
    dw_attr attrs[DW_LINEAR_OPERANDS + 2];
    uint32_t count = 0;
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        words[i] = dw__operand_text(&layer->operand[i]);
        attrs[count++] = dw_attr_string(dw__operand_key((dw_linear_operand)i), words[i].text);
    }
    attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W,
                                 dw_node_int(rewriter->from, n, DW_ATTR_KEY_TRANSPOSE_W, 1));
    if (random) attrs[count++] = dw_attr_int(DW_ATTR_KEY_STREAM, stream);
    const char *name = rewriter->from->values.items[node->outputs[0]].name;
    if (dw__is_automatic_name(name)) name = NULL;
    dw_node made = DW_NONE;
    DW_RETURN_IF_FAILED(dw__copy_origin(rewriter->to, rewriter->from, n));
    DW_RETURN_IF_FAILED(dw__append_named(rewriter->to, DW_OP_QUANTIZED_LINEAR, 5, inputs, count,
                                         attrs, 1, &name, &made));
    rewriter->map[node->outputs[0]] = dw_node_output(rewriter->to, made, 0);
    return DW_OK;
}

/* Emits the quantized form of experts in the new graph under their old name. */
static dw_status quantize_experts(dw__rewriter *rewriter, dw_node n,
                                  const dw_layer_precision *layer) {
    static const dw_linear_operand rounded[] = {DW_FORWARD_X, DW_FORWARD_W, DW_DGRAD_DY,
                                                DW_DGRAD_W};
    enum { ROUNDED = DW_COUNT(rounded), INPUTS = 4 };
    const dw__node_record *node = &rewriter->from->nodes.items[n];
    dw_value inputs[INPUTS];
    dw_attr attrs[ROUNDED + 1];
    for (uint32_t i = 0; i < INPUTS; i++) {
        const bool there = i < node->input_count && node->inputs[i] != DW_NONE;
        inputs[i] = there ? rewriter->map[node->inputs[i]] : DW_NONE;
    }
    for (int i = 0; i < ROUNDED; i++)
        attrs[i] = dw_attr_string(dw__operand_key(rounded[i]),
                                  dw_scheme_name(layer->operand[rounded[i]].scheme));
    attrs[ROUNDED] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W,
                                 dw_node_int(rewriter->from, n, DW_ATTR_KEY_TRANSPOSE_W, 1));
    const char *name = rewriter->from->values.items[node->outputs[0]].name;
    if (dw__is_automatic_name(name)) name = NULL;
    dw_node made = DW_NONE;
    DW_RETURN_IF_FAILED(dw__copy_origin(rewriter->to, rewriter->from, n));
    DW_RETURN_IF_FAILED(dw__append_named(rewriter->to, DW_OP_QUANTIZED_SEGMENT_LINEAR, INPUTS,
                                         inputs, ROUNDED + 1, attrs, 1, &name, &made));
    rewriter->map[node->outputs[0]] = dw_node_output(rewriter->to, made, 0);
    return DW_OK;
}

/* Experts are quantized in sorted rows: makes a graph that has them, and its choices, if any are quantized. */
static dw_status sort_quantized_experts(const dw_graph *graph, const dw_precision_policy *policy,
                                        dw__layer_choice **choices, dw_graph **sorted) {
    bool any = false;
    for (dw_node n = 0; n < dw_graph_node_count(graph); n++)
        any |= dw_node_op(graph, n) == DW_OP_GROUPED_LINEAR && (*choices)[n].layer;
    if (!any) return DW_OK;
    dw__free(*choices);
    *choices = NULL;
    DW_RETURN_IF_FAILED(dw_graph_clone(graph, sorted));
    DW_RETURN_IF_FAILED(dw__sort_rows(sorted));
    return dw__choose_layers(*sorted, policy, choices);
}

dw_status dw_graph_apply_precision(dw_graph **graph, const dw_precision_policy *policy,
                                   uint32_t *count) {
    dw_status status = DW_OK;
    const dw_graph *from = *graph;
    dw_graph *sorted = NULL;
    dw__layer_choice *choices = NULL;
    dw__rewriter rewriter = {0};
    uint32_t changed = 0;
    DW_TRY(dw__policy_check(policy));
    if (count) *count = 0;
    if (!quantizes(policy)) return DW_OK;
    DW_TRY(dw__choose_layers(from, policy, &choices));
    DW_TRY(sort_quantized_experts(from, policy, &choices, &sorted));
    if (sorted) from = sorted;
    dw_value seed = find_seed(from);
    if (dw_precision_policy_needs_seed(policy) && seed == DW_NONE)
        DW_TRY(
            dw__fail(DW_INVALID_ARGUMENT,
                     "the policy rounds gradients stochastically, and the graph has no seed: "
                     "add a leaf of role DW_ROLE_SEED, i64[2], and bind a new one at each step"));
    DW_TRY(dw__rewriter_begin(&rewriter, from));
    int64_t stream = first_free_stream(from);
    size_t leaves = 0, missing = 0;
    const bool leaves_exist = next_statistics(from, &leaves) != DW_NONE;
    leaves = 0;
    for (dw_node n = 0; n < dw_graph_node_count(from); n++) {
        if (!choices[n].layer) {
            DW_TRY(dw__rewriter_copy(&rewriter, n));
        } else if (dw__is_experts(dw_node_op(from, n))) {
            DW_TRY(quantize_experts(&rewriter, n, choices[n].layer));
            changed++;
        } else {
            const bool observed = dw__layer_is_observed(choices[n].layer);
            const dw_value leaf = observed ? next_statistics(from, &leaves) : DW_NONE;
            DW_TRY(quantize_layer(&rewriter, n, choices[n].layer, seed, stream, leaf));
            missing += observed && leaf == DW_NONE && leaves_exist;
            stream += dw__layer_is_stochastic(choices[n].layer) ? 2 : 0;
            changed++;
        }
    }
    if (missing || next_statistics(from, &leaves) != DW_NONE)
        DW_TRY(dw__fail(DW_INVALID_ARGUMENT,
                        "the graph has %s leaves of role DW_ROLE_STATISTICS than layers that the "
                        "policy quantizes: add one for each layer that dw_precision_layers_json "
                        "gives bounds, in that order",
                        missing ? "fewer" : "more"));
    DW_TRY(dw__rewriter_end(&rewriter, graph));
    if (count) *count = changed;
cleanup:
    dw__rewriter_abort(&rewriter);
    dw_graph_destroy(sorted);
    dw__free(choices);
    return status == DW_OK ? status : dw__fail_prefix(status, "precision");
}

static bool has_op(const dw_graph *graph, dw_op op) {
    for (size_t n = 0; n < graph->nodes.count; n++)
        if (graph->nodes.items[n].op == op) return true;
    return false;
}

dw_status dw__expand_quantized(dw_graph **graph, bool *changed) {
    static const dw_op ops[] = {DW_OP_QUANTIZED_LINEAR, DW_OP_QUANTIZED_SEGMENT_LINEAR};
    *changed = false;
    for (size_t i = 0; i < DW_COUNT(ops); i++) {
        if (!has_op(*graph, ops[i])) continue;
        *changed = true;
        DW_RETURN_IF_FAILED(dw__expand_op(graph, ops[i]));
    }
    return DW_OK;
}
