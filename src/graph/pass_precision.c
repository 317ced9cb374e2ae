/* Replaces linear layers by quantized_linear according to a policy (deepwell/precision.h). */
#include "deepwell/precision.h"
#include "graph/passes.h"
#include <math.h>
#include <string.h>

/* ---- recipes by name ------------------------------------------------------------------------- */

static const char *const recipe_names[DW_RECIPE_COUNT] = {"fp32", "bf16", "mxfp8", "nvfp4"};

const char *dw_recipe_name(dw_recipe recipe) {
    return (unsigned)recipe < DW_RECIPE_COUNT ? recipe_names[recipe] : "?";
}

dw_status dw_recipe_find(const char *name, dw_recipe *recipe) {
    for (int i = 0; name && i < DW_RECIPE_COUNT; i++) {
        if (strcmp(name, recipe_names[i]) != 0) continue;
        *recipe = (dw_recipe)i;
        return DW_OK;
    }
    bool known = name && strcmp(name, "fp8") == 0;
    return dw__fail(known ? DW_UNSUPPORTED : DW_INVALID_ARGUMENT,
                    "precision \"%.64s\" is %s: use fp32, bf16, mxfp8 or nvfp4",
                    name ? name : "(null)", known ? "not supported" : "not a precision");
}

int dw_recipe_needs_seed(dw_recipe recipe) { return recipe == DW_RECIPE_NVFP4; }

/* ---- policies -------------------------------------------------------------------------------- */

void dw_precision_policy_init(dw_precision_policy *policy, dw_recipe recipe) {
    *policy = (dw_precision_policy){
        .struct_size = sizeof *policy,
        .recipe = recipe,
        .high_regions = 1u << DW_REGION_EMBED | 1u << DW_REGION_NORM | 1u << DW_REGION_ROUTER |
                        1u << DW_REGION_HEAD | 1u << DW_REGION_LOSS,
        .bf16_share = recipe == DW_RECIPE_NVFP4 ? 0.15 : 0.0,
    };
}

static dw_status check_recipe(dw_recipe recipe, const char *what) {
    if ((unsigned)recipe < DW_RECIPE_COUNT) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "%s of the precision policy is %d; there are %d recipes",
                    what, (int)recipe, DW_RECIPE_COUNT);
}

static dw_status check_policy(const dw_precision_policy *policy, bool *needs_seed) {
    static const dw__struct known = {"dw_precision_policy", sizeof *policy, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, policy, NULL));
    DW_RETURN_IF_FAILED(check_recipe(policy->recipe, "recipe"));
    if (!(policy->bf16_share >= 0.0 && policy->bf16_share <= 1.0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "bf16_share of the precision policy is %g; expected a share from 0 to 1",
                        policy->bf16_share);
    *needs_seed = dw_recipe_needs_seed(policy->recipe);
    for (uint32_t i = 0; i < policy->exception_count; i++) {
        const dw_precision_exception *exception = &policy->exceptions[i];
        DW_RETURN_IF_FAILED(check_recipe(exception->recipe, "an exception"));
        if (!exception->module)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "exception %u of the precision policy names no module", i);
        *needs_seed |= dw_recipe_needs_seed(exception->recipe);
    }
    return DW_OK;
}

static bool is_inside(const char *module, const char *outer) {
    size_t length = strlen(outer);
    return strncmp(module, outer, length) == 0 &&
           (length == 0 || module[length] == '\0' || module[length] == '.');
}

/* ---- which layer has which recipe ------------------------------------------------------------ */

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

static dw_recipe recipe_of(const dw_precision_policy *policy, const dw__node_record *node) {
    for (uint32_t i = policy->exception_count; i-- > 0;)
        if (is_inside(node->module, policy->exceptions[i].module))
            return policy->exceptions[i].recipe;
    return policy->high_regions >> node->region & 1 ? DW_RECIPE_NONE : policy->recipe;
}

/* Finds the recipe of each node; DW_RECIPE_NONE leaves the node unchanged. */
static dw_status assign(const dw_graph *graph, const dw_precision_policy *policy,
                        dw_recipe **assigned) {
    dw_status status = DW_OK;
    bool *activations = NULL;
    size_t count = 0, nodes = graph->nodes.count;
    dw_recipe *recipes = dw__calloc(nodes + 1, sizeof *recipes);
    if (!recipes) return dw__fail_memory("recipes of layers", nodes * sizeof *recipes);
    DW_TRY(find_activations(graph, &activations));
    for (size_t n = 0; n < nodes; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        if (node->op != DW_OP_LINEAR || node->backward || activations[node->inputs[1]]) continue;
        if (graph->values.items[node->outputs[0]].dtype == DW_F64) continue;
        recipes[n] = recipe_of(policy, node);
        count += recipes[n] != DW_RECIPE_NONE && recipes[n] == policy->recipe;
    }
    size_t last = (size_t)floor(policy->bf16_share * (double)count + 0.5);
    for (size_t n = nodes; n-- > 0 && last > 0;) {
        if (recipes[n] == DW_RECIPE_NONE || recipes[n] != policy->recipe) continue;
        recipes[n] = DW_RECIPE_BF16;
        last--;
    }
    *assigned = recipes;
    recipes = NULL;
cleanup:
    dw__free(activations);
    dw__free(recipes);
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

/* Emits the quantized layer in the new graph under its old name. */
static dw_status quantize_layer(dw__rewriter *rewriter, dw_node n, dw_recipe recipe, dw_value seed,
                                int64_t stream) {
    const dw__node_record *node = &rewriter->from->nodes.items[n];
    dw_value inputs[4];
    for (uint32_t i = 0; i < 3; i++) {
        bool there = i < node->input_count && node->inputs[i] != DW_NONE;
        inputs[i] = there ? rewriter->map[node->inputs[i]] : DW_NONE;
    }
    bool random = dw_recipe_needs_seed(recipe);
    inputs[3] = random ? rewriter->map[seed] : DW_NONE;
    dw_attr attrs[3];
    uint32_t count = 0;
    attrs[count++] = dw_attr_string(DW_ATTR_KEY_RECIPE, dw_recipe_name(recipe));
    attrs[count++] = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W,
                                 dw_node_int(rewriter->from, n, DW_ATTR_KEY_TRANSPOSE_W, 1));
    if (random) attrs[count++] = dw_attr_int(DW_ATTR_KEY_STREAM, stream);
    const char *name = rewriter->from->values.items[node->outputs[0]].name;
    if (dw__is_automatic_name(name)) name = NULL;
    dw_node made = DW_NONE;
    DW_RETURN_IF_FAILED(dw__copy_origin(rewriter->to, rewriter->from, n));
    DW_RETURN_IF_FAILED(dw__append_named(rewriter->to, DW_OP_QUANTIZED_LINEAR, 4, inputs, count,
                                         attrs, 1, &name, &made));
    rewriter->map[node->outputs[0]] = dw_node_output(rewriter->to, made, 0);
    return DW_OK;
}

dw_status dw_graph_apply_precision(dw_graph **graph, const dw_precision_policy *policy,
                                   uint32_t *count) {
    dw_status status = DW_OK;
    const dw_graph *from = *graph;
    dw_recipe *recipes = NULL;
    dw__rewriter rewriter = {0};
    bool needs_seed = false;
    uint32_t changed = 0;
    DW_TRY(check_policy(policy, &needs_seed));
    dw_value seed = find_seed(from);
    if (needs_seed && seed == DW_NONE)
        DW_TRY(dw__fail(DW_INVALID_ARGUMENT,
                        "%s rounds gradients at random, and the graph has no seed: add a "
                        "leaf of role DW_ROLE_SEED, i64[2], and bind a new one at each step",
                        dw_recipe_name(policy->recipe)));
    DW_TRY(assign(from, policy, &recipes));
    DW_TRY(dw__rewriter_begin(&rewriter, from));
    int64_t stream = first_free_stream(from);
    for (dw_node n = 0; n < dw_graph_node_count(from); n++) {
        if (recipes[n] == DW_RECIPE_NONE) {
            DW_TRY(dw__rewriter_copy(&rewriter, n));
        } else {
            DW_TRY(quantize_layer(&rewriter, n, recipes[n], seed, stream));
            stream += dw_recipe_needs_seed(recipes[n]) ? 2 : 0;
            changed++;
        }
    }
    DW_TRY(dw__rewriter_end(&rewriter, graph));
    if (count) *count = changed;
cleanup:
    dw__rewriter_abort(&rewriter);
    dw__free(recipes);
    return status == DW_OK ? status : dw__fail_prefix(status, "precision");
}

dw_status dw__expand_quantized(dw_graph **graph, bool *changed) {
    *changed = false;
    for (size_t n = 0; n < (*graph)->nodes.count && !*changed; n++)
        *changed = (*graph)->nodes.items[n].op == DW_OP_QUANTIZED_LINEAR;
    return *changed ? dw__expand_op(graph, DW_OP_QUANTIZED_LINEAR) : DW_OK;
}
