/* Rewrites products of quantized values as products of their codes, for targets that multiply codes.
 *
 *     a, s = quantize(x) {fp8-tensor}     b, t = quantize(w) {fp8-tensor}
 *     y = matmul(a, b) * (s * t)
 *
 * becomes quantize_tensor of x and of w, and multiply_codes of the orientations in which the axis that is summed over is
 * the last one. With scales of blocks (mxfp8, mxfp4, nvfp4) it is quantize_tiles: one node for both orientations, so
 * that a tensor that is read both ways is read once, unless it is rotated or rounded stochastically, which each
 * orientation is by itself. Likewise a segment_linear of quantized rows and matrices becomes segment_multiply_codes,
 * where the target computes that. MX has no scales of tensors. A cast of y becomes the product's own rounding. Products
 * of fp8-block are products of codes before this pass, on every target; here they only take in their casts, where
 * tensor cores multiply them. */
#include "graph/passes.h"
#include "number/scheme_sets.h"
#include <stdio.h>
#include <string.h>

typedef struct pass {
    dw__expand_rule computed;
    void *context;
    bool fast_forward; /* GEMMs of forward may sum in fewer bits */
    bool changed;
} pass;

static dw_scheme scheme_of(const dw_graph *graph, dw_node quantize) {
    dw_scheme scheme = DW_SCHEME_BF16;
    (void)dw_scheme_find(dw_node_attr(graph, quantize, DW_ATTR_KEY_SCHEME)->string, &scheme);
    return scheme;
}

static bool is_whole(const dw_graph *graph, dw_node quantize) {
    return dw__scheme_in(scheme_of(graph, quantize), dw__fp8_tensor_schemes);
}

/* An operand of a product: the node that quantizes it to codes. */
static dw_node quantized_by(const dw_graph *graph, dw_value value) {
    const dw_node node = dw__made_by(graph, value, DW_OP_QUANTIZE);
    return node == DW_NONE || scheme_of(graph, node) == DW_SCHEME_BF16 ? DW_NONE : node;
}

static dw_value look_through(const dw_graph *graph, dw_value value, dw_op op) {
    const dw_node node = dw__made_by(graph, value, op);
    return node == DW_NONE ? value : dw_node_input(graph, node, 0);
}

/* A matmul of two matrices that are quantized to codes. Turned: the axis that is summed over is the first one. */
typedef struct product {
    dw_node a, b; /* quantize */
    bool a_turned, b_turned, backward;
} product;

static bool product_of(const dw_graph *graph, dw_node matmul, product *p) {
    if (matmul == DW_NONE) return false;
    *p = (product){
        .a = quantized_by(graph, dw_node_input(graph, matmul, 0)),
        .b = quantized_by(graph, dw_node_input(graph, matmul, 1)),
        .a_turned = dw_node_int(graph, matmul, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0,
        .b_turned = !dw_node_int(graph, matmul, DW_ATTR_KEY_TRANSPOSE_B, 0),
        .backward = graph->nodes.items[matmul].backward,
    };
    return p->a != DW_NONE && p->b != DW_NONE;
}

static bool has_tensor_scale(const dw_graph *graph, dw_node quantize) {
    return is_whole(graph, quantize) ||
           dw_scheme_describe(scheme_of(graph, quantize))->tensor_scale;
}

/* Returns whether `scale` is the product of the scales of two quantize nodes, in either order. */
static bool is_scale_of(const dw_graph *graph, dw_value scale, dw_node a, dw_node b) {
    scale = look_through(graph, scale, DW_OP_BROADCAST);
    scale = look_through(graph, scale, DW_OP_RESHAPE);
    const dw_node node = dw__made_by(graph, scale, DW_OP_MUL);
    if (node == DW_NONE) return false;
    const dw_value s = dw_node_output(graph, a, 1), t = dw_node_output(graph, b, 1),
                   first = dw_node_input(graph, node, 0), second = dw_node_input(graph, node, 1);
    return (first == s && second == t) || (first == t && second == s);
}

/* ---- operands ---------------------------------------------------------------------------------------- */

typedef struct factor {
    dw_node node;                 /* that makes the codes */
    dw_value codes, scale, tiles; /* the axis that is summed over is the last one of the codes */
} factor;

/* Fails if blocks do not lie along the axis that is summed over. */
static bool blocks_fit(const dw_graph *graph, dw_node quantize, bool turned) {
    return dw_node_int(graph, quantize, DW_ATTR_KEY_SQUARE, 0) ||
           dw_node_int(graph, quantize, DW_ATTR_KEY_AXIS, 1) == !turned;
}

static factor tiles_of(dw__emitter *e, dw_node quantize, bool turned) {
    static const dw_attr_key kept[] = {DW_ATTR_KEY_SCHEME,   DW_ATTR_KEY_SQUARE,
                                       DW_ATTR_KEY_HADAMARD, DW_ATTR_KEY_STOCHASTIC,
                                       DW_ATTR_KEY_STREAM,   DW_ATTR_KEY_SCALE_RULE};
    dw_attr attrs[DW_COUNT(kept) + 1];
    uint32_t count = 0;
    const bool one_way = dw_node_int(e->graph, quantize, DW_ATTR_KEY_HADAMARD, 0) ||
                         dw_node_int(e->graph, quantize, DW_ATTR_KEY_STOCHASTIC, 0);
    for (size_t i = 0; i < DW_COUNT(kept); i++) {
        const dw_attr *attr = dw_node_attr(e->graph, quantize, kept[i]);
        if (attr) attrs[count++] = *attr;
    }
    if (one_way) attrs[count++] = dw_attr_int(DW_ATTR_KEY_AXIS, !turned);
    const dw_value inputs[] = {dw_node_input(e->graph, quantize, 0),
                               dw_node_input_count(e->graph, quantize) > 1
                                   ? dw_node_input(e->graph, quantize, 1)
                                   : DW_NONE};
    const uint32_t first = turned && !one_way ? 2 : 0, last = one_way ? 2 : 4;
    const bool scaled = has_tensor_scale(e->graph, quantize);
    const dw_node node = dw__emit_node(e, DW_OP_QUANTIZE_TILES, 2, inputs, count, attrs);
    if (e->status != DW_OK) return (factor){DW_NONE, DW_NONE, DW_NONE, DW_NONE};
    return (factor){node, dw_node_output(e->graph, node, first),
                    scaled ? dw_node_output(e->graph, node, last) : DW_NONE,
                    dw_node_output(e->graph, node, first + 1)};
}

static factor codes_of(dw__emitter *e, dw_node quantize, bool turned) {
    if (!is_whole(e->graph, quantize)) return tiles_of(e, quantize, turned);
    const dw_attr scheme = dw_attr_string(
        DW_ATTR_KEY_SCHEME, dw_node_attr(e->graph, quantize, DW_ATTR_KEY_SCHEME)->string);
    const dw_value x = dw_node_input(e->graph, quantize, 0);
    const dw_node node = dw__emit_node(e, DW_OP_QUANTIZE_TENSOR, 1, &x, 1, &scheme);
    if (e->status != DW_OK) return (factor){DW_NONE, DW_NONE, DW_NONE, DW_NONE};
    return (factor){node, dw_node_output(e->graph, node, turned), dw_node_output(e->graph, node, 2),
                    DW_NONE};
}

static dw_node multiply(dw__emitter *e, factor a, factor b, dw_value bias, dw_dtype dtype,
                        bool fast) {
    const dw_attr attrs[] = {{.key = DW_ATTR_KEY_DTYPE, .integer = dtype},
                             dw_attr_int(DW_ATTR_KEY_FAST_ACCUMULATION, 1)};
    return dw__emit_node(e, DW_OP_MULTIPLY_CODES, 7,
                         (dw_value[]){a.codes, b.codes, a.scale, b.scale, a.tiles, b.tiles, bias},
                         fast ? 2 : 1, attrs);
}

/* ---- products ---------------------------------------------------------------------------------------- */

/* Codes of these schemes can be multiplied with one another. Others stay simulated on every target. */
static bool schemes_match(const dw_graph *graph, const product *p) {
    const dw_scheme a = scheme_of(graph, p->a), b = scheme_of(graph, p->b);
    const dw__scheme_set fp8 = DW__SCHEME(MXFP8) | DW__SCHEME(MXFP8_E5M2);
    if (is_whole(graph, p->a) || is_whole(graph, p->b))
        return is_whole(graph, p->a) && is_whole(graph, p->b);
    if (!dw__scheme_in(a, dw__tile_schemes) || !dw__scheme_in(b, dw__tile_schemes)) return false;
    return (dw__scheme_in(a, fp8) && dw__scheme_in(b, fp8)) || a == b;
}

static bool is_computed(const pass *p, const dw_graph *graph, dw_node node) {
    return p->computed(graph, node, p->context);
}

/* Returns the product in F32, or DW_NONE if the target cannot compute it. The nodes emitted so far are then dead. */
static dw_value product_of_codes(pass *run, dw__emitter *e, const product *p) {
    if (!schemes_match(e->graph, p) ||
        (!is_whole(e->graph, p->a) &&
         (!blocks_fit(e->graph, p->a, p->a_turned) || !blocks_fit(e->graph, p->b, p->b_turned))))
        return DW_NONE;
    const factor a = codes_of(e, p->a, p->a_turned), b = codes_of(e, p->b, p->b_turned);
    const dw_node node = multiply(e, a, b, DW_NONE, DW_F32,
                                  run->fast_forward && is_whole(e->graph, p->a) && !p->backward);
    if (e->status != DW_OK || !is_computed(run, e->graph, a.node) ||
        !is_computed(run, e->graph, b.node) || !is_computed(run, e->graph, node))
        return DW_NONE;
    return dw_node_output(e->graph, node, 0);
}

/* y = reshape(matmul) * scale, where both operands have scales of tensors */
static dw_status rewrite_scaled(pass *run, dw_graph *graph, dw_node node, dw_value *replacement) {
    for (int side = 0; side < 2; side++) {
        const dw_value scaled = dw_node_input(graph, node, side);
        product p;
        if (!product_of(
                graph, dw__made_by(graph, look_through(graph, scaled, DW_OP_RESHAPE), DW_OP_MATMUL),
                &p) ||
            !has_tensor_scale(graph, p.a) || !has_tensor_scale(graph, p.b) ||
            !is_scale_of(graph, dw_node_input(graph, node, 1 - side), p.a, p.b))
            continue;
        dw__emitter e = {graph, DW_OK};
        const dw__type like = dw__type_of(graph, scaled);
        const dw_value y = product_of_codes(run, &e, &p);
        if (y != DW_NONE) *replacement = dw__emit_reshape(&e, y, like.rank, like.shape);
        return e.status;
    }
    return DW_OK;
}

/* Returns the node that quantizes the matrices w [E,M,N] as one matrix [E*M,N], or DW_NONE. */
static dw_node matrices_quantized_by(const dw_graph *graph, dw_value w) {
    const dw__type type = dw__type_of(graph, w);
    w = look_through(graph, look_through(graph, w, DW_OP_RESHAPE), DW_OP_CAST);
    const dw_node node = quantized_by(graph, look_through(graph, w, DW_OP_RESHAPE));
    if (node == DW_NONE) return DW_NONE;
    const dw__type matrix = dw__type_of(graph, dw_node_output(graph, node, 0));
    return matrix.shape[1] == type.shape[2] ? node : DW_NONE;
}

static dw_value multiply_segments(dw__emitter *e, const dw_value in[5], dw_dtype dtype, bool fast,
                                  dw_node *node) {
    const dw_attr attrs[] = {{.key = DW_ATTR_KEY_DTYPE, .integer = dtype},
                             dw_attr_int(DW_ATTR_KEY_FAST_ACCUMULATION, 1)};
    *node = dw__emit_node(e, DW_OP_SEGMENT_MULTIPLY_CODES, 5, in, fast ? 2 : 1, attrs);
    return e->status == DW_OK ? dw_node_output(e->graph, *node, 0) : DW_NONE;
}

/* y = segment_linear * scale, of rows and matrices with scales of tensors. Where the sum's axis is the first one of a
 * matrix, the codes that are read are the turned ones, in which the matrices lie side by side. */
static dw_status rewrite_segments(pass *run, dw_graph *graph, dw_node node, dw_value *replacement) {
    for (int side = 0; side < 2; side++) {
        const dw_value scaled = dw_node_input(graph, node, side);
        const dw_node linear = dw__made_by(graph, scaled, DW_OP_SEGMENT_LINEAR);
        if (linear == DW_NONE || dw_value_dtype(graph, scaled) != DW_F32 ||
            (dw_node_input_count(graph, linear) > 3 && dw_node_input(graph, linear, 3) != DW_NONE))
            continue;
        const dw_node x = quantized_by(
                          graph, look_through(graph, dw_node_input(graph, linear, 0), DW_OP_CAST)),
                      w = matrices_quantized_by(graph, dw_node_input(graph, linear, 1));
        if (x == DW_NONE || w == DW_NONE || !is_whole(graph, x) || !is_whole(graph, w) ||
            !is_scale_of(graph, dw_node_input(graph, node, 1 - side), x, w))
            continue;
        dw__emitter e = {graph, DW_OK};
        const factor a = codes_of(&e, x, false),
                     b = codes_of(&e, w, !dw_node_int(graph, linear, DW_ATTR_KEY_TRANSPOSE_W, 1));
        const bool fast = run->fast_forward && !graph->nodes.items[linear].backward;
        dw_node made = DW_NONE;
        const dw_value y = multiply_segments(
            &e, (dw_value[]){a.codes, b.codes, dw_node_input(graph, linear, 2), a.scale, b.scale},
            DW_F32, fast, &made);
        if (e.status == DW_OK && is_computed(run, graph, a.node) &&
            is_computed(run, graph, b.node) && is_computed(run, graph, made))
            *replacement = y;
        return e.status;
    }
    return DW_OK;
}

/* y = matmul without scales of tensors */
static dw_status rewrite_plain(pass *run, dw_graph *graph, dw_node node, dw_value *replacement) {
    product p;
    if (!product_of(graph, node, &p) || has_tensor_scale(graph, p.a) ||
        has_tensor_scale(graph, p.b) ||
        dw_value_dtype(graph, dw_node_output(graph, node, 0)) != DW_F32)
        return DW_OK;
    dw__emitter e = {graph, DW_OK};
    const dw_value y = product_of_codes(run, &e, &p);
    if (y != DW_NONE) *replacement = y;
    return e.status;
}

/* Returns the bias of a sum in F32 as a vector [N] of type `dtype`, or DW_NONE: cast, and broadcast over the other axes. */
static dw_value bias_of(const dw_graph *graph, dw_value added, dw_dtype dtype, dw_dim n) {
    added = look_through(graph, look_through(graph, added, DW_OP_BROADCAST), DW_OP_RESHAPE);
    const dw_value bias = look_through(graph, added, DW_OP_CAST);
    const dw__type type = dw__type_of(graph, bias);
    return type.rank == 1 && type.dtype == dtype && type.shape[0] == n ? bias : DW_NONE;
}

/* The product behind a value in F32, and the bias that is added to it, which may be DW_NONE. */
static dw_node product_behind(const dw_graph *graph, dw_value x, dw_dtype dtype, dw_value *bias) {
    const dw_node sum = dw__made_by(graph, x, DW_OP_ADD);
    *bias = DW_NONE;
    for (int side = 0; sum != DW_NONE && side < 2; side++) {
        const dw_node wide =
            dw__made_by(graph, look_through(graph, dw_node_input(graph, sum, side), DW_OP_RESHAPE),
                        DW_OP_MULTIPLY_CODES);
        const dw__type type = dw__type_of(graph, x);
        if (wide == DW_NONE || type.rank == 0) continue;
        *bias =
            bias_of(graph, dw_node_input(graph, sum, 1 - side), dtype, type.shape[type.rank - 1]);
        if (*bias != DW_NONE) return wide;
    }
    return dw__made_by(graph, look_through(graph, x, DW_OP_RESHAPE), DW_OP_MULTIPLY_CODES);
}

/* The product of rows in groups is made again in the cast's type. */
static dw_status round_segments(pass *run, dw_graph *graph, dw_node wide, dw_dtype dtype,
                                dw_value *replacement) {
    dw__emitter e = {graph, DW_OK};
    dw_value in[5];
    dw_node made = DW_NONE;
    for (uint32_t i = 0; i < DW_COUNT(in); i++) in[i] = dw_node_input(graph, wide, i);
    const dw_value y = multiply_segments(
        &e, in, dtype, dw_node_int(graph, wide, DW_ATTR_KEY_FAST_ACCUMULATION, 0) != 0, &made);
    if (e.status == DW_OK && is_computed(run, graph, made)) *replacement = y;
    return e.status;
}

/* The product is made again in the cast's type, with its bias, unless the target has no kernel for that; if something
 * else reads the one in F32, both stay. */
static dw_status rewrite_cast(pass *run, dw_graph *graph, dw_node node, dw_value *replacement) {
    enum { SCALES = 2, TILES = 4, INPUTS = 6 };
    const dw_dtype dtype = dw_value_dtype(graph, dw_node_output(graph, node, 0));
    const dw_value x = dw_node_input(graph, node, 0);
    dw_value bias, in[INPUTS];
    if (dtype != DW_BF16 && dtype != DW_F16) return DW_OK;
    const dw_node segments = dw__made_by(graph, x, DW_OP_SEGMENT_MULTIPLY_CODES);
    if (segments != DW_NONE) return round_segments(run, graph, segments, dtype, replacement);
    const dw_node wide = product_behind(graph, x, dtype, &bias);
    if (wide == DW_NONE) return DW_OK;
    dw__emitter e = {graph, DW_OK};
    const dw__type like = dw__type_of(graph, x);
    for (uint32_t i = 0; i < INPUTS; i++)
        in[i] = i < dw_node_input_count(graph, wide) ? dw_node_input(graph, wide, i) : DW_NONE;
    const factor a = {DW_NONE, in[0], in[SCALES], in[TILES]},
                 b = {DW_NONE, in[1], in[SCALES + 1], in[TILES + 1]};
    const dw_node made = multiply(&e, a, b, bias, dtype,
                                  dw_node_int(graph, wide, DW_ATTR_KEY_FAST_ACCUMULATION, 0) != 0);
    if (e.status == DW_OK && is_computed(run, graph, made))
        *replacement = dw__emit_reshape(&e, dw_node_output(graph, made, 0), like.rank, like.shape);
    return e.status;
}

static dw_status rule(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    pass *run = rewrite->context;
    const dw_value before = replacements[0];
    dw_status status = DW_OK;
    switch (dw_node_op(rewrite->graph, node)) {
    case DW_OP_MUL:
        status = rewrite_scaled(run, rewrite->graph, node, &replacements[0]);
        if (status == DW_OK && replacements[0] == before)
            status = rewrite_segments(run, rewrite->graph, node, &replacements[0]);
        break;
    case DW_OP_MATMUL: status = rewrite_plain(run, rewrite->graph, node, &replacements[0]); break;
    case DW_OP_CAST: status = rewrite_cast(run, rewrite->graph, node, &replacements[0]); break;
    default: break;
    }
    run->changed |= replacements[0] != before;
    return status;
}

static bool is_in_blocks(const dw_graph *graph, dw_node quantize) {
    return quantize != DW_NONE && !is_whole(graph, quantize);
}

enum { TILES_A = 4 }; /* an operand of multiply_codes */

static bool has_tiles(const dw_graph *graph, dw_node product) {
    return dw_node_input_count(graph, product) > TILES_A &&
           dw_node_input(graph, product, TILES_A) != DW_NONE;
}

/* Products of which an operand has blocks. Those of fp8-block, with scales in F32, count as simulated where no FP8
 * tensor cores multiply them. */
static void count_products(const pass *run, const dw_graph *graph, dw__code_products *products) {
    products->multiplied = products->simulated = 0;
    for (dw_node n = 0; n < dw_graph_node_count(graph); n++) {
        const dw_op op = dw_node_op(graph, n);
        if (op == DW_OP_MATMUL)
            products->simulated +=
                is_in_blocks(graph, quantized_by(graph, dw_node_input(graph, n, 0))) ||
                is_in_blocks(graph, quantized_by(graph, dw_node_input(graph, n, 1)));
        if (op != DW_OP_MULTIPLY_CODES || !has_tiles(graph, n)) continue;
        const bool in_f32 = dw_value_dtype(graph, dw_node_input(graph, n, TILES_A)) == DW_F32;
        if (!in_f32 || is_computed(run, graph, n))
            products->multiplied++;
        else
            products->simulated++;
    }
}

dw_status dw__multiply_codes(dw_graph **graph, dw__expand_rule computed, void *context,
                             bool fast_accumulation, dw__code_products *products, bool *changed) {
    pass run = {.computed = computed, .context = context, .fast_forward = fast_accumulation};
    *changed = false;
    DW_RETURN_IF_FAILED(dw__rewrite_each(graph, rule, &run));
    count_products(&run, *graph, products);
    *changed = run.changed;
    return DW_OK;
}
