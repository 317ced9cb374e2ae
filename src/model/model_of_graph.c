/* Reads a forward graph into a dw_model_sizes: the widths follow from the shapes of its tables, GEMMs and
 * attention.
 *
 * Layers are the layer numbers of the nodes. Where these number the parts of an nn.Sequential, layers are the members
 * of a module list inside it. A layer has one attention and one MLP or mixture of experts. Layers of one kind must be
 * alike, because a plan has one width for each. */
#include "model/model_reader.h"
#include "model/model_sizes.h"
#include <math.h>
#include <string.h>

enum { GEMMS_MOST = 8 };

typedef struct gemm {
    int64_t in, out;
} gemm;
typedef struct layer {
    gemm attention[GEMMS_MOST], mlp[GEMMS_MOST];
    int attentions, mlps; /* numbers of GEMMs */
    int cores;            /* numbers of attention operations */
    /* counts for an attention that is written as GEMMs and a softmax, of the nodes seen so far */
    int scores, softmaxes;
    int64_t heads, kv_heads, head_dim, value_dim, window;
    int64_t experts, expert_ffn, top_k;
    double expert_elements; /* in the matrices of all experts */
    bool expert_bias;
    /* Module path of a listed layer, `path_length` characters. */
    const char *path;
    size_t path_length;
    int number; /* the layer number of its nodes */
    /* Weight of the GEMM with as many columns as the table has rows. */
    dw_value head;
} layer;
typedef struct walk {
    const dw_graph *graph;
    int64_t *ones; /* sets every symbol to 1, to read sizes that depend on none */
    struct {
        layer *items;
        size_t count, capacity;
    } layers;
    dw_value table, head; /* parameters */
    int64_t positions;
    double position_elements, routed_elements, active_routed;
    /* some attention is written as GEMMs and a softmax (sinks, alibi) */
    bool spelled_out;
    bool listed; /* layers are members of module lists, found by the nodes' module paths */
} walk;

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

/* Returns a size for one sequence of one token. */
static int64_t size_at(const walk *w, dw_value value, int axis) {
    int64_t size = 0;
    if (axis >= dw_value_rank(w->graph, value)) return 0;
    if (dw_dim_eval(w->graph, dw_value_shape(w->graph, value)[axis], w->ones, &size) != DW_OK)
        return 0;
    return size;
}

dw_value dw__parameter_behind(const dw_graph *graph, dw_value value) {
    for (dw_node node; value != DW_NONE; value = dw_node_input(graph, node, 0)) {
        node = dw_value_node(graph, value);
        if (node == DW_NONE)
            return dw_value_role(graph, value) == DW_ROLE_PARAMETER ? value : DW_NONE;
        switch (dw_node_op(graph, node)) {
        case DW_OP_RESHAPE:
        case DW_OP_PERMUTE:
        case DW_OP_SLICE:
        case DW_OP_CAST: break;
        default: return DW_NONE;
        }
    }
    return DW_NONE;
}

static double elements_of(const walk *w, dw_value value) {
    double elements = 1;
    for (int axis = 0; axis < dw_value_rank(w->graph, value); axis++)
        elements *= (double)size_at(w, value, axis);
    return elements;
}

/* Returns the length of the path of a listed layer: "1.layers.0.self_attn" gives the length of "1.layers.0", which
 * ends with the first number after a name. */
static size_t listed_layer(const char *path) {
    bool named = false;
    for (const char *part = path; *part;) {
        size_t length = strcspn(part, ".");
        bool number = length > 0 && strspn(part, "0123456789") == length;
        if (number && named) return (size_t)(part - path) + length;
        named = !number;
        part += length + (part[length] == '.');
    }
    return 0;
}

static dw_status listed_layer_of(walk *w, dw_node node, layer **found) {
    const char *path = dw_node_module(w->graph, node);
    size_t length = path ? listed_layer(path) : 0;
    *found = NULL;
    if (!length) return DW_OK;
    for (size_t at = w->layers.count; at-- > 0;) { /* searches backwards: usually the last layer */
        layer *now = &w->layers.items[at];
        if (now->path_length != length || memcmp(now->path, path, length) != 0) continue;
        *found = now;
        return DW_OK;
    }
    if (w->layers.count == DW__LAYERS_MOST)
        return dw__fail(DW_UNSUPPORTED, "the graph has more than %d layers", DW__LAYERS_MOST);
    const layer made = {
        .path = path, .path_length = length, .number = (int)w->layers.count, .head = DW_NONE};
    DW_RETURN_IF_FAILED(DW_PUSH(&w->layers, made));
    *found = &w->layers.items[w->layers.count - 1];
    return DW_OK;
}

static dw_status layer_of(walk *w, dw_node node, layer **found) {
    if (w->listed) return listed_layer_of(w, node, found);
    int index = dw_node_layer(w->graph, node);
    *found = NULL;
    if (index < 0) return DW_OK;
    if (index >= DW__LAYERS_MOST)
        return dw__fail(DW_UNSUPPORTED, "the graph has layer %d; expected fewer than %d", index,
                        DW__LAYERS_MOST);
    while (w->layers.count <= (size_t)index) {
        const layer made = {.number = (int)w->layers.count, .head = DW_NONE};
        DW_RETURN_IF_FAILED(DW_PUSH(&w->layers, made));
    }
    *found = &w->layers.items[index];
    return DW_OK;
}

static dw_status fail_gemms(int index, const char *what) {
    return dw__fail(DW_UNSUPPORTED, "layer %d of the graph has more than %d GEMMs in its %s", index,
                    GEMMS_MOST, what);
}

static dw_status see_table(walk *w, dw_node node) {
    dw_value table = dw__parameter_behind(w->graph, dw_node_input(w->graph, node, 0));
    dw_value rows = dw_node_input(w->graph, node, 1);
    if (table == DW_NONE) return DW_OK;
    if (w->table == DW_NONE && dw_value_node(w->graph, rows) == DW_NONE) {
        w->table = table; /* indexed by an input of the graph */
        return DW_OK;
    }
    int64_t count = size_at(w, table, 0);
    if (count > w->positions && count > 2) w->positions = count;
    w->position_elements += elements_of(w, table);
    return DW_OK;
}

static dw_status see_gemm(walk *w, dw_node node) {
    dw_value weight = dw_node_input(w->graph, node, 1);
    int across = dw_node_int(w->graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    gemm seen = {size_at(w, weight, across), size_at(w, weight, !across)};
    dw_region region = dw_node_region(w->graph, node);
    layer *at;
    DW_RETURN_IF_FAILED(layer_of(w, node, &at));
    if (!at) { /* outside of layers: the last GEMM as wide as the table has rows is the head */
        if (w->table != DW_NONE && seen.out == size_at(w, w->table, 0))
            w->head = dw__parameter_behind(w->graph, weight);
        return DW_OK;
    }
    if (w->table != DW_NONE && seen.out == size_at(w, w->table, 0))
        at->head = dw__parameter_behind(w->graph, weight);
    if (region == DW_REGION_ATTN) {
        if (at->attentions == GEMMS_MOST)
            return fail_gemms(dw_node_layer(w->graph, node), "attention");
        at->attention[at->attentions++] = seen;
    } else if (region == DW_REGION_MLP || region == DW_REGION_EXPERTS || region == DW_REGION_NONE) {
        if (at->mlps == GEMMS_MOST) return fail_gemms(dw_node_layer(w->graph, node), "MLP");
        at->mlp[at->mlps++] = seen;
    }
    return DW_OK;
}

static dw_status see_experts(walk *w, dw_node node) {
    dw_value weight = dw_node_input(w->graph, node, 1);
    int across = dw_node_int(w->graph, node, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    layer *at;
    DW_RETURN_IF_FAILED(layer_of(w, node, &at));
    if (!at) return dw__fail(DW_UNSUPPORTED, "the graph has experts outside of its layers");
    at->experts = size_at(w, weight, 0);
    at->expert_ffn = size_at(w, weight, 1 + across); /* the last weight is the down projection */
    at->top_k = size_at(w, dw_node_input(w->graph, node, 0), 0);
    at->expert_elements += elements_of(w, weight);
    double leaves = elements_of(w, weight);
    dw_value bias =
        dw_node_input_count(w->graph, node) > 3 ? dw_node_input(w->graph, node, 3) : DW_NONE;
    if (bias != DW_NONE) leaves += elements_of(w, bias), at->expert_bias = true;
    w->routed_elements += leaves;
    if (at->experts) w->active_routed += leaves * (double)at->top_k / (double)at->experts;
    return DW_OK;
}

static dw_status see_attention(walk *w, dw_node node) {
    layer *at;
    DW_RETURN_IF_FAILED(layer_of(w, node, &at));
    if (!at) return dw__fail(DW_UNSUPPORTED, "the graph has attention outside of its layers");
    dw_value q = dw_node_input(w->graph, node, 0), k = dw_node_input(w->graph, node, 1),
             v = dw_node_input(w->graph, node, 2);
    at->cores++;
    at->heads = size_at(w, q, 1), at->kv_heads = size_at(w, k, 1);
    at->head_dim = size_at(w, q, 3), at->value_dim = size_at(w, v, 3);
    int64_t window = dw_node_int(w->graph, node, DW_ATTR_KEY_WINDOW, -1);
    at->window = window > 0 ? window : 0;
    return DW_OK;
}

/* Returns the key-value heads before they are repeated for the queries: the smallest number on the way back from the
 * GEMM. */
static int64_t heads_behind(const walk *w, dw_value value) {
    int64_t heads = size_at(w, value, 1);
    for (;;) {
        dw_node node = dw_value_node(w->graph, value);
        if (node == DW_NONE) return heads;
        dw_op op = dw_node_op(w->graph, node);
        if (op != DW_OP_RESHAPE && op != DW_OP_BROADCAST && op != DW_OP_PERMUTE) return heads;
        value = dw_node_input(w->graph, node, 0);
        int rank = dw_value_rank(w->graph, value);
        if (rank < 4) return heads;
        int64_t size = size_at(w, value, 1);
        /* the heads are on another axis before this */
        if (op == DW_OP_PERMUTE && rank == 4) return heads;
        if (size > 0 && size < heads) heads = size;
    }
}

/* Recognizes q k^T, a softmax and p v as attention, which models with sinks or position biases write like this. */
static dw_status see_pairs(walk *w, dw_node node) {
    dw_value a = dw_node_input(w->graph, node, 0), b = dw_node_input(w->graph, node, 1);
    layer *at;
    DW_RETURN_IF_FAILED(layer_of(w, node, &at));
    if (!at || dw_value_rank(w->graph, a) != 4 || dw_value_rank(w->graph, b) != 4) return DW_OK;
    if (dw__parameter_behind(w->graph, b) != DW_NONE) return DW_OK;
    dw_value result = dw_node_output(w->graph, node, 0);
    if (at->softmaxes == 0) {
        at->scores++;
        at->heads = size_at(w, a, 1), at->kv_heads = heads_behind(w, b);
        at->head_dim =
            size_at(w, a, dw_node_int(w->graph, node, DW_ATTR_KEY_TRANSPOSE_A, 0) ? 2 : 3);
        return DW_OK;
    }
    if (at->scores == 0) return DW_OK;
    at->cores++, at->scores = at->softmaxes = 0;
    at->value_dim = size_at(w, result, 3);
    w->spelled_out = true;
    return DW_OK;
}

static dw_status see_softmax(walk *w, dw_node node) {
    layer *at;
    DW_RETURN_IF_FAILED(layer_of(w, node, &at));
    if (at && at->scores) at->softmaxes++;
    return DW_OK;
}

static dw_status see(walk *w, dw_node node) {
    if (dw_node_is_backward(w->graph, node)) return DW_OK;
    switch (dw_node_op(w->graph, node)) {
    case DW_OP_EMBEDDING: return see_table(w, node);
    case DW_OP_LINEAR:
    case DW_OP_QUANTIZED_LINEAR:
    case DW_OP_LINEAR_CROSS_ENTROPY: return see_gemm(w, node);
    case DW_OP_GROUPED_LINEAR: return see_experts(w, node);
    case DW_OP_ATTENTION: return see_attention(w, node);
    case DW_OP_MATMUL: return see_pairs(w, node);
    case DW_OP_SOFTMAX: return see_softmax(w, node);
    default: return DW_OK;
    }
}

/* ---- layers ---------------------------------------------------------------------------------------------------- */

static double sum_of(const gemm *gemms, int count) {
    double sum = 0;
    for (int at = 0; at < count; at++) sum += (double)gemms[at].in * (double)gemms[at].out;
    return sum;
}

/* Drops numbered modules that are not layers: the embedding, the last norm and the head of an nn.Sequential. */
static void drop_others(walk *w) {
    size_t kept = 0;
    for (size_t at = 0; at < w->layers.count; at++) {
        const layer *now = &w->layers.items[at];
        int head = now->head != DW_NONE;
        if (now->cores || now->attentions || now->experts || now->scores || now->mlps > head) {
            w->layers.items[kept++] = *now;
            continue;
        }
        if (head) w->head = now->head;
    }
    w->layers.count = kept;
}

static dw_status check_alike(const walk *w) {
    const layer *first[2] = {NULL, NULL}; /* dense, mixture */
    for (size_t at = 0; at < w->layers.count; at++) {
        const layer *now = &w->layers.items[at], **kind = &first[now->experts > 0];
        if (now->cores != 1)
            return dw__fail(DW_UNSUPPORTED,
                            "layer %d of the graph has %d recognized attentions; expected one: "
                            "plan by config.json or by name",
                            now->number, now->cores);
        if (!*kind) *kind = now;
        const layer *then = *kind;
        if (now->heads != then->heads || now->kv_heads != then->kv_heads ||
            now->head_dim != then->head_dim ||
            sum_of(now->attention, now->attentions) != sum_of(then->attention, then->attentions) ||
            sum_of(now->mlp, now->mlps) != sum_of(then->mlp, then->mlps) ||
            now->expert_elements != then->expert_elements)
            return dw__fail(DW_UNSUPPORTED,
                            "layer %d of the graph is not like layer %d; expected the same widths "
                            "in all layers of one kind",
                            now->number, then->number);
    }
    return DW_OK;
}

/* Reads ordinary attention, or latent attention (MLA), whose keys and values come from two GEMMs in sequence. */
static dw_status read_attention(const layer *from, dw_model_sizes *model) {
    model->heads = (int)from->heads, model->kv_heads = (int)from->kv_heads;
    model->head_dim = (int)from->head_dim;
    if (from->value_dim != from->head_dim) model->value_dim = (int)from->value_dim;
    double whole = sum_of(from->attention, from->attentions);
    if (whole == dw__attention_parameters(model)) return DW_OK;
    if (from->attentions >= 4) {
        gemm up = from->attention[from->attentions - 2],
             down = from->attention[from->attentions - 3];
        model->kv_heads = model->heads;
        model->value_dim = (int)from->value_dim;
        model->kv_rank = (int)up.in;
        model->rope_dim = (int)(down.out - up.in);
        model->head_dim = (int)(from->head_dim - model->rope_dim);
        model->q_rank = from->attentions == 5 ? (int)from->attention[0].out : 0;
        if (model->rope_dim >= 0 && model->head_dim > 0 && whole == dw__attention_parameters(model))
            return DW_OK;
    }
    return dw__fail(DW_UNSUPPORTED,
                    "attention's weights have %.0f elements; expected queries, keys, values and an "
                    "output of %lld heads, or latent attention",
                    whole, (long long)from->heads);
}

static dw_status read_gate(double matrices, const char *what, int *gated) {
    if (matrices != 2 && matrices != 3)
        return dw__fail(DW_UNSUPPORTED, "%s has %.3g matrices of its width; expected 2 or 3", what,
                        matrices);
    *gated = matrices == 3;
    return DW_OK;
}

/* Reads the GEMMs of an MLP. A GEMM of one column is the gate of a shared expert. */
static dw_status read_mlp(const layer *from, const char *what, dw_model_sizes *model, int *width) {
    double whole = 0;
    for (int at = 0; at < from->mlps; at++) {
        if (from->mlp[at].out == 1) continue;
        whole += (double)from->mlp[at].in * (double)from->mlp[at].out;
        if (from->mlp[at].out == model->hidden) *width = (int)from->mlp[at].in;
    }
    if (!*width)
        return dw__fail(DW_UNSUPPORTED, "%s has no linear layer back to the hidden width", what);
    return read_gate(whole / ((double)model->hidden * *width), what, &model->gated);
}

static dw_status read_layers(const walk *w, dw_model_sizes *model) {
    const layer *dense = NULL, *mixture = NULL;
    int mixtures = 0, leading = 0, windows = 0;
    model->layers = (int)w->layers.count;
    for (size_t at = 0; at < w->layers.count; at++) {
        const layer *now = &w->layers.items[at];
        if (now->experts)
            mixture = now, mixtures++;
        else
            dense = now, leading += mixtures == 0;
        if (now->window)
            model->window = (int)(now->window < 1 << 28 ? now->window : 1 << 28), windows++;
    }
    if (model->window) model->window_every = 1, model->window_layers = windows;
    DW_RETURN_IF_FAILED(read_attention(&w->layers.items[0], model));
    if (dense) DW_RETURN_IF_FAILED(read_mlp(dense, "the MLP", model, &model->ffn));
    if (!mixture) return DW_OK;
    model->experts = (int)mixture->experts, model->top_k = (int)mixture->top_k;
    model->expert_ffn = (int)mixture->expert_ffn;
    model->expert_bias = mixture->expert_bias;
    if (mixture->mlps)
        DW_RETURN_IF_FAILED(read_mlp(mixture, "the shared expert", model, &model->shared_ffn));
    double one = mixture->expert_elements / (double)mixture->experts;
    DW_RETURN_IF_FAILED(
        read_gate(one / ((double)model->hidden * model->expert_ffn), "an expert", &model->gated));
    if (!dense) model->ffn = model->expert_ffn;
    int rest = model->layers - leading;
    model->dense_layers = leading, model->moe_every = 1;
    if (mixtures < rest) { /* every n-th layer, or dense layers first */
        model->moe_every = model->layers / mixtures;
        model->dense_layers = 0;
        if (model->layers / model->moe_every != mixtures)
            model->moe_every = 1, model->dense_layers = model->layers - mixtures;
    }
    return DW_OK;
}

static dw_status read_ends(const walk *w, dw_model_sizes *model) {
    double parameters = 0;
    for (uint32_t at = 0; at < dw_graph_leaf_count(w->graph); at++) {
        dw_value leaf = dw_graph_leaf_at(w->graph, at);
        if (dw_value_role(w->graph, leaf) == DW_ROLE_PARAMETER) parameters += elements_of(w, leaf);
    }
    model->positions = (int)w->positions;
    model->tied = w->head == w->table || w->head == DW_NONE;
    model->parameters = parameters;
    model->active = parameters - w->position_elements - w->routed_elements + w->active_routed -
                    (model->tied ? 0 : elements_of(w, w->table));
    if (w->head == DW_NONE)
        dw__log(DW_LOG_WARNING,
                "the graph has no language-model head; the embedding is planned as its head");
    return DW_OK;
}

static dw_status walk_layers(walk *w, bool listed) {
    w->listed = listed;
    w->layers.count = 0;
    w->table = w->head = DW_NONE;
    w->positions = 0;
    w->position_elements = w->routed_elements = w->active_routed = 0;
    w->spelled_out = false;
    for (dw_node node = 0; node < dw_graph_node_count(w->graph); node++)
        DW_RETURN_IF_FAILED(see(w, node));
    if (w->table == DW_NONE)
        return dw__fail(DW_UNSUPPORTED,
                        "the graph has no embedding of its inputs; expected a language model");
    drop_others(w);
    if (!w->layers.count)
        return dw__fail(DW_UNSUPPORTED, "no node of the graph has a layer number; capture the "
                                        "whole model, with its layers in a ModuleList");
    return check_alike(w);
}

static dw_status walk_graph(walk *w, dw_model_sizes *model) {
    dw_status status = walk_layers(w, false);
    if (status == DW_UNSUPPORTED && walk_layers(w, true) != DW_OK)
        /* runs again for its message, which names the layers of the capture */
        status = walk_layers(w, false);
    else if (status == DW_UNSUPPORTED)
        status = DW_OK;
    DW_RETURN_IF_FAILED(status);
    model->vocabulary = (int)size_at(w, w->table, 0);
    model->hidden = (int)size_at(w, w->table, 1);
    DW_RETURN_IF_FAILED(read_layers(w, model));
    DW_RETURN_IF_FAILED(read_ends(w, model));
    if (w->spelled_out)
        dw__log(DW_LOG_WARNING, "attention written as GEMMs and a softmax (sinks, alibi) is "
                                "planned without windows; plan by config.json for these");
    return dw_model_sizes_check(model);
}

dw_status dw__graph_recognized(const dw_graph *graph, dw_graph **recognized) {
    static const dw_pass passes[] = {DW_PASS_COMMON, DW_PASS_FOLD, DW_PASS_RECOGNIZE};
    dw_status status = DW_OK;
    dw_graph *copy = NULL;
    *recognized = NULL;
    DW_TRY(dw_graph_clone(graph, &copy));
    for (size_t at = 0; at < DW_COUNT(passes); at++) DW_TRY(dw_graph_run_pass(&copy, passes[at]));
    *recognized = copy;
    return DW_OK;
cleanup:
    dw_graph_destroy(copy);
    return status;
}

dw_status dw_model_sizes_of_graph(const dw_graph *graph, dw_model_sizes *model) {
    dw_status status = DW_OK;
    dw_graph *copy = NULL;
    dw_model_sizes made = {0};
    walk w = {.table = DW_NONE, .head = DW_NONE};
    if (!graph || !model) return dw__fail(DW_INVALID_ARGUMENT, "the graph or the model is NULL");
    DW_TRY(dw__graph_recognized(graph, &copy));
    uint32_t symbols = dw_graph_symbol_count(copy);
    w.graph = copy;
    w.ones = dw__malloc((symbols + 1) * sizeof *w.ones);
    if (!w.ones) DW_TRY(dw__fail_memory("sizes", (symbols + 1) * sizeof *w.ones));
    for (uint32_t at = 0; at < symbols; at++) w.ones[at] = 1;
    DW_TRY(walk_graph(&w, &made));
    *model = made;
cleanup:
    dw_graph_destroy(copy);
    dw__free(w.ones);
    dw__free(w.layers.items);
    return status;
}
