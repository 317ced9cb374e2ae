/* Precision policies: the scheme of each layer, rejected policies, and engines with quantized layers against
 * the reference, with and without recomputation and when memory runs out. Python tests check the policies'
 * rounding against separately written rules. */
#include "deepwell/deepwell.h"
#include "engine/engine_internal.h"
#include "graph/layer_precision.h"
#include "kernel/reference/interpret.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        if ((call) != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                           \
    } while (0)

static const char *const layers =
    "deepwell graph 1\n"
    "symbols B\n"
    "\n"
    "input %x: f32[B, 35]\n"
    "seed %seed: i64[2]\n"
    "parameter %w0: f32[51, 35]\n"
    "parameter %b0: f32[51]\n"
    "parameter %w1: f32[51, 35]\n"
    "parameter %w2: f32[35, 35]\n"
    "parameter %wide: f64[35, 35]\n"
    "parameter %head: f32[17, 35]\n"
    "\n"
    "%d: f32[B, 35] = dropout(%x, %seed) {p=0.1, stream=3}\n"
    "%h0: f32[B, 51] = linear(%d, %w0, %b0)  # mlp 0 h.0.mlp.c_fc\n"
    "%g: f32[B, 51] = gelu(%h0) {approximate=\"tanh\"}  # mlp 0 h.0.mlp\n"
    "%h1: f32[B, 35] = linear(%g, %w1, _) {transpose_w=0}  # mlp 0 h.0.mlp.c_proj\n"
    "%h2: f32[B, 35] = linear(%h1, %w2, _) {transpose_w=1}  # none - h.00\n"
    "%scores: f32[B, B] = linear(%h0, %h0, _)  # attn 0 h.0.attn\n"
    "%f: f64[B, 35] = cast(%h1) {dtype=f64}\n"
    "%f1: f64[B, 35] = linear(%f, %wide, _)  # mlp 1 h.1.mlp\n"
    "%logits: f32[B, 17] = linear(%h2, %head, _)  # head - lm_head\n"
    "\n"
    "return %logits, %scores, %f1\n";

static dw_graph *make_graph(void) {
    dw_graph *graph;
    OK(dw_graph_from_text(layers, &graph));
    return graph;
}

/* Returns the scheme of x in forward of the linear layer that makes `name`. */
static const char *scheme_at(const dw_graph *graph, const char *name) {
    dw_value value = dw_graph_find(graph, name);
    assert_int_not_equal(value, DW_NONE);
    dw_node node = dw_value_node(graph, value);
    if (dw_node_op(graph, node) == DW_OP_LINEAR) return "fp32";
    assert_int_equal(dw_node_op(graph, node), DW_OP_QUANTIZED_LINEAR);
    return dw_node_attr(graph, node, DW_ATTR_KEY_FORWARD_X)->string;
}

static void default_policy_leaves_heads_and_matmuls_of_activations(void **state) {
    (void)state;
    dw_graph *graph = make_graph();
    dw_precision_policy policy;
    uint32_t count = 0;
    OK(dw_precision_policy_init(&policy, "mxfp8"));
    OK(dw_graph_apply_precision(&graph, &policy, &count));
    assert_int_equal(count, 3);
    assert_string_equal(scheme_at(graph, "h0"), "mxfp8");
    assert_string_equal(scheme_at(graph, "h1"), "mxfp8");
    assert_string_equal(scheme_at(graph, "h2"), "mxfp8");
    assert_string_equal(scheme_at(graph, "scores"), "fp32");
    assert_string_equal(scheme_at(graph, "f1"), "fp32");
    assert_string_equal(scheme_at(graph, "logits"), "fp32");
    dw_node h1 = dw_value_node(graph, dw_graph_find(graph, "h1"));
    assert_int_equal(dw_node_int(graph, h1, DW_ATTR_KEY_TRANSPOSE_W, 1), 0);
    assert_int_equal(dw_node_region(graph, h1), DW_REGION_MLP);
    assert_string_equal(dw_node_module(graph, h1), "h.0.mlp.c_proj");
    dw_graph_destroy(graph);
}

static dw_layer_precision layer_named(const char *name) {
    dw_layer_precision layer;
    OK(dw_layer_precision_named(name, &layer));
    return layer;
}

static void shares_and_exceptions(void **state) {
    (void)state;
    dw_precision_policy policy;
    OK(dw_precision_policy_init(&policy, "nvfp4"));
    assert_true(policy.bf16_share == 0.15);
    dw_graph *graph = make_graph(); /* 0.15 of 3 layers is none */
    OK(dw_graph_apply_precision(&graph, &policy, NULL));
    assert_string_equal(scheme_at(graph, "h2"), "nvfp4");
    /* Each node has two streams, after dropout's. */
    dw_node h0 = dw_value_node(graph, dw_graph_find(graph, "h0"));
    dw_node h1 = dw_value_node(graph, dw_graph_find(graph, "h1"));
    assert_int_equal(dw_node_int(graph, h0, DW_ATTR_KEY_STREAM, -1), 5);
    assert_int_equal(dw_node_int(graph, h1, DW_ATTR_KEY_STREAM, -1), 7);
    dw_graph_destroy(graph);

    graph = make_graph();
    policy.bf16_share = 0.6; /* 1.8 layers, which is two */
    OK(dw_graph_apply_precision(&graph, &policy, NULL));
    assert_string_equal(scheme_at(graph, "h0"), "nvfp4");
    assert_string_equal(scheme_at(graph, "h1"), "bf16");
    assert_string_equal(scheme_at(graph, "h2"), "bf16");
    dw_graph_destroy(graph);

    /* By module: "h.0" does not match "h.00". The last match decides, and regions do not count then. */
    const dw_precision_exception exceptions[] = {{"h.0", layer_named("fp32")},
                                                 {"h.0.mlp.c_proj", layer_named("mxfp8")},
                                                 {"lm_head", layer_named("bf16")}};
    graph = make_graph();
    OK(dw_precision_policy_init(&policy, "nvfp4"));
    policy.exceptions = exceptions;
    policy.exception_count = DW_COUNT(exceptions);
    OK(dw_graph_apply_precision(&graph, &policy, NULL));
    assert_string_equal(scheme_at(graph, "h0"), "fp32");
    assert_string_equal(scheme_at(graph, "h1"), "mxfp8");
    assert_string_equal(scheme_at(graph, "h2"), "nvfp4");
    assert_string_equal(scheme_at(graph, "logits"), "bf16");
    dw_graph_destroy(graph);
}

/* Returns the scheme of layer h0, whose module is h.0.mlp.c_fc, under an exception for `pattern`. */
static const char *scheme_under(const char *pattern) {
    const dw_precision_exception exception = {pattern, layer_named("mxfp4")};
    dw_precision_policy policy;
    dw_graph *graph;
    OK(dw_graph_from_text("deepwell graph 1\n\ninput %x: f32[2, 3]\nseed %s: i64[2]\n"
                          "parameter %w: f32[5, 3]\n\n"
                          "%h0 = linear(%x, %w)  # mlp 0 h.0.mlp.c_fc\n\nreturn %h0\n",
                          &graph));
    OK(dw_precision_policy_init(&policy, "mxfp8"));
    policy.exceptions = &exception;
    policy.exception_count = 1;
    OK(dw_graph_apply_precision(&graph, &policy, NULL));
    const bool covered = strcmp(scheme_at(graph, "h0"), "mxfp4") == 0;
    dw_graph_destroy(graph);
    return covered ? "covered" : "not covered";
}

static void patterns_cover_modules_and_what_is_inside(void **state) {
    (void)state;
    static const char *const covering[] = {
        "",       "h",       "h.0.mlp",    "h.0.mlp.c_fc", "*",         "h.*.mlp",
        "*.mlp",  "*mlp.*",  "h.?",        "*_fc",         "h.[0-3].*", "h.[!1-9]",
        "h.[02]", "**.c_f?", "*.c_[a-f]*", "h.0.*.*",      "h.[]0].*"};
    static const char *const others[] = {
        "h.1",      "h.00",        "mlp",      "h.0.ml", "h.0.mlp.c", "h.?.?",        "h.[1-3]",
        "h.[!0-3]", "h.0.mlp.*.x", "*.attn.*", "h.[0",   "H",         "h.0.mlp.c_fc."};
    for (size_t i = 0; i < DW_COUNT(covering); i++)
        if (strcmp(scheme_under(covering[i]), "covered") != 0)
            fail_msg("\"%s\" does not cover h.0.mlp.c_fc", covering[i]);
    for (size_t i = 0; i < DW_COUNT(others); i++)
        if (strcmp(scheme_under(others[i]), "covered") == 0)
            fail_msg("\"%s\" covers h.0.mlp.c_fc", others[i]);
    /* The name is not that long, and a pattern of many stars takes no longer than the product of the lengths. */
    assert_string_equal(scheme_under("*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b"),
                        "not covered");
}

static void layers_in_the_policys_precision_are_left(void **state) {
    (void)state;
    dw_graph *graph;
    dw_precision_policy policy;
    uint32_t count = 9;
    static const char *const text =
        "deepwell graph 1\n\ninput %x: bf16[2, 3]\nparameter %w: bf16[3, 3]\n\n"
        "%y = linear(%x, %w)\n%z = linear(%y, %w)\n\nreturn %z\n";
    OK(dw_graph_from_text(text, &graph));
    OK(dw_precision_policy_init(&policy, "bf16"));
    OK(dw_graph_apply_precision(&graph, &policy, &count));
    assert_int_equal(count, 0);
    OK(dw_precision_policy_init(&policy, "mxfp8"));
    policy.bf16_share = 0.5;
    OK(dw_graph_apply_precision(&graph, &policy, &count));
    assert_int_equal(count, 1);
    assert_string_equal(scheme_at(graph, "y"), "mxfp8");
    assert_string_equal(scheme_at(graph, "z"), "fp32");
    dw_graph_destroy(graph);
}

static void policies_have_names(void **state) {
    (void)state;
    static const struct {
        const char *name;
        dw_scheme scheme;
        double share;
        int seed;
    } rows[] = {{"fp32", DW_SCHEME_FP32, 0, 0},           {"bf16", DW_SCHEME_BF16, 0, 0},
                {"fp8-block", DW_SCHEME_FP8_BLOCK, 0, 0}, {"mxfp8", DW_SCHEME_MXFP8, 0, 0},
                {"mxfp6", DW_SCHEME_MXFP6, 0, 0},         {"mxfp4", DW_SCHEME_MXFP4, 0, 1},
                {"nvfp4", DW_SCHEME_NVFP4, 0.15, 1}};
    dw_precision_policy policy;
    dw_layer_precision layer;
    for (size_t i = 0; i < DW_COUNT(rows); i++) {
        OK(dw_precision_policy_init(&policy, rows[i].name));
        assert_true(policy.bf16_share == rows[i].share);
        assert_int_equal(dw_precision_policy_needs_seed(&policy), rows[i].seed);
        for (int j = 0; j < DW_LINEAR_OPERANDS; j++)
            assert_int_equal(policy.layer.operand[j].scheme, rows[i].scheme);
    }
    /* NVFP4's recipe, operand by operand; policy is the last row's. */
    static const char *const text[] = {"nvfp4",
                                       "nvfp4+square",
                                       "nvfp4+stochastic",
                                       "nvfp4+square",
                                       "nvfp4+hadamard+stochastic",
                                       "nvfp4+hadamard"};
    for (int j = 0; j < DW_LINEAR_OPERANDS; j++)
        assert_string_equal(dw__operand_text(&policy.layer.operand[j]).text, text[j]);
    static const char *const fp8_block[] = {"fp8-block",        "fp8-block+square", "fp8-block",
                                            "fp8-block+square", "fp8-block",        "fp8-block"};
    OK(dw_layer_precision_named("fp8-block", &layer));
    for (int j = 0; j < DW_LINEAR_OPERANDS; j++)
        assert_string_equal(dw__operand_text(&layer.operand[j]).text, fp8_block[j]);
    OK(dw_layer_precision_named("fp8", &layer));
    assert_int_equal(layer.operand[DW_WGRAD_X].scheme, DW_SCHEME_FP8_TENSOR);
    assert_int_equal(layer.operand[DW_WGRAD_DY].scheme, DW_SCHEME_FP8_TENSOR_E5M2);
    assert_int_equal(dw_layer_precision_named("fp8-row", &layer), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "\"fp8-row\" is not supported: use fp32, bf16, fp8"));
    assert_int_equal(dw_precision_policy_init(&policy, "fp8-row"), DW_UNSUPPORTED);
    assert_int_equal(dw_precision_policy_init(&policy, "int4"), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_precision_policy_init(&policy, NULL), DW_INVALID_ARGUMENT);
}

/* ---- files ----------------------------------------------------------------------------------- */

#define HEADER "{\"format\": \"deepwell.precision\", \"version\": 1, "

static dw_precision_policy *parse(const char *text) {
    dw_precision_policy *policy;
    OK(dw_precision_policy_parse(text, strlen(text), &policy));
    return policy;
}

/* A policy's text reads back as the same text. */
static void reads_back(const char *text, const char *const *parts, size_t count) {
    dw_precision_policy *policy = parse(text), *again;
    char *written, *twice;
    OK(dw_precision_policy_json(policy, &written));
    OK(dw_precision_policy_parse(written, strlen(written), &again));
    OK(dw_precision_policy_json(again, &twice));
    assert_string_equal(written, twice);
    for (size_t i = 0; i < count; i++)
        if (!strstr(written, parts[i])) fail_msg("%s lacks: %s", written, parts[i]);
    dw_text_free(written);
    dw_text_free(twice);
    dw_precision_policy_destroy(policy);
    dw_precision_policy_destroy(again);
}

static void policies_are_read_and_written(void **state) {
    (void)state;
    static const char *const plain[] = {
        "\"default\": \"nvfp4\"",
        "\"bf16_share\": 0.15",
        "\"block_size\": 16",
        "\"sensitive_layers\": [\n    \"embedding\",\n    \"norm\",\n    "
        "\"router\",\n    \"final_linear\",\n    \"loss\"\n  ]",
        "\"layers\": []",
        "\"fallback\": \"safe\""};
    reads_back(HEADER "\"default\": \"nvfp4\"}", plain, DW_COUNT(plain));
    static const char *const full[] = {"\"scale_rule\": \"floor\"",
                                       "\"forward_x\": \"mxfp8-e5m2\"",
                                       "\"forward_x\": \"mxfp8+rceil\"",
                                       "\"dgrad_dy\": \"fp8-tensor-e5m2\"",
                                       "\"precision\": \"fp8\"",
                                       "\"norm\",\n    \"final_linear\",\n    \"model.layers.0\"",
                                       "\"fallback\": \"strict\"",
                                       "\"fast_accumulation\": true"};
    const char *text =
        HEADER "\"default\": {\"recipe\": \"mxfp8\", \"forward_x\": \"mxfp8-e5m2\"}, "
               "\"sensitive_layers\": [\"lm_head\", \"model.layers.0\", \"norms\"], \"layers\": ["
               "{\"module\": \"*.mlp\", \"precision\": {\"forward_x\": \"mxfp8+rceil\"}}, "
               "{\"module\": \"a\\\"b\", \"precision\": {\"dgrad_dy\": \"fp8\"}}, "
               "{\"module\": \"x\", \"precision\": \"fp32\"}, "
               "{\"module\": \"y\", \"precision\": \"fp8\"}], "
               "\"scale_rule\": \"floor\", \"block_size\": 32, \"fallback\": \"strict\", "
               "\"fast_accumulation\": true}";
    reads_back(text, full, DW_COUNT(full));
    dw_precision_policy *policy = parse(text);
    assert_int_equal(policy->high_regions, 1u << DW_REGION_HEAD | 1u << DW_REGION_NORM);
    assert_int_equal(policy->exception_count, 5);
    assert_string_equal(policy->exceptions[1].module, "a\"b");
    assert_string_equal(policy->exceptions[4].module, "model.layers.0");
    assert_false(dw__layer_is_quantized(&policy->exceptions[4].layer));
    assert_int_equal(policy->exceptions[0].layer.operand[DW_FORWARD_X].scale_rule, DW_SCALE_RCEIL);
    assert_int_equal(policy->exceptions[0].layer.operand[DW_FORWARD_W].scale_rule, DW_SCALE_FLOOR);
    assert_int_equal(policy->strict, 1);
    assert_int_equal(policy->fast_accumulation, 1);
    dw_precision_policy_destroy(policy);

    OK(dw_precision_policy_load("mxfp6", &policy));
    assert_int_equal(policy->layer.operand[DW_FORWARD_X].scheme, DW_SCHEME_MXFP6);
    dw_precision_policy_destroy(policy);
    dw_precision_policy_destroy(NULL);
    assert_int_equal(dw_precision_policy_load("/none/policy.json", &policy), DW_IO);
    assert_null(policy);
    assert_int_equal(dw_precision_policy_load("int4", &policy), DW_INVALID_ARGUMENT);
}

static void fast_accumulation_is_for_forward_alone(void **state) {
    (void)state;
    for (int fast = 0; fast < 2; fast++) {
        dw_graph *graph = NULL;
        dw_precision_policy policy;
        const uint32_t outputs[] = {0};
        dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
        dw_engine *engine = NULL;
        uint32_t count[2] = {0};
        OK(dw_graph_from_text("deepwell graph 1\nsymbols B\ninput %x: bf16[B, 48]\n"
                              "parameter %w: bf16[32, 48]\nparameter %v: bf16[16, 32]\n"
                              "%h: bf16[B, 32] = linear(%x, %w, _)\n"
                              "%y: bf16[B, 16] = linear(%h, %v, _)\nreturn %y\n",
                              &graph));
        const dw_value wrt[] = {dw_graph_find(graph, "x"), dw_graph_find(graph, "w"),
                                dw_graph_find(graph, "v")};
        OK(dw_precision_policy_init(&policy, "fp8"));
        /* Codes do not tell the passes apart then. */
        policy.layer.operand[DW_DGRAD_DY].scheme = policy.layer.operand[DW_WGRAD_DY].scheme =
            DW_SCHEME_FP8_TENSOR;
        policy.fast_accumulation = fast;
        options.precision = &policy;
        OK(dw_device_find("plan:sm_90a", &options.device));
        OK(dw_engine_create(graph, 1, outputs, 3, wrt, &options, &engine));
        for (dw_node n = 0; n < dw_graph_node_count(engine->graph); n++) {
            if (dw_node_op(engine->graph, n) != DW_OP_MULTIPLY_CODES) continue;
            const bool backward = engine->graph->nodes.items[n].backward;
            count[backward]++;
            assert_int_equal(dw_node_int(engine->graph, n, DW_ATTR_KEY_FAST_ACCUMULATION, 0),
                             fast && !backward);
        }
        assert_int_equal(count[0], 2);
        assert_int_equal(count[1], 4);
        dw_engine_destroy(engine);
        dw_graph_destroy(graph);
    }
}

static void wrong_files_are_rejected(void **state) {
    (void)state;
    static const struct {
        dw_status status;
        const char *text, *message;
    } rows[] = {
        {DW_PARSE, "[]", "the policy is an array; expected an object"},
        {DW_PARSE, "{}", "format is \"\"; expected \"deepwell.precision\""},
        {DW_PARSE, "{\"format\": \"deepwell.precision\", \"version\": 2}",
         "version is 2; expected 1"},
        {DW_PARSE, HEADER "\"defaults\": 1}", "unknown member \"defaults\"; expected format, "},
        {DW_PARSE, HEADER "\"layers\": []}", "default: precision is missing; expected a name"},
        {DW_INVALID_ARGUMENT, HEADER "\"default\": \"int8\"}",
         "default: precision \"int8\" is not a precision: use fp32, bf16, fp8, fp8-block, mxfp8, "
         "mxfp6, mxfp4 or nvfp4"},
        {DW_PARSE, HEADER "\"default\": {\"forward_x\": \"bf16\"}}",
         "default: forward_w is missing; expected it, or a \"recipe\""},
        {DW_INVALID_ARGUMENT, HEADER "\"default\": {\"recipe\": \"mxfp8\", \"dgrad_w\": \"e4m3\"}}",
         "default: dgrad_w: there is no scheme \"e4m3\""},
        {DW_UNSUPPORTED, HEADER "\"default\": {\"recipe\": \"mxfp8\", \"dgrad_w\": \"fp8-row\"}}",
         "the precision policy: dgrad_w: the scheme fp8-row is not supported"},
        {DW_PARSE, HEADER "\"default\": \"bf16\", \"layers\": [{\"modul\": \"x\"}]}",
         "an entry of layers has an unknown member \"modul\""},
        {DW_PARSE, HEADER "\"default\": \"bf16\", \"layers\": [{\"precision\": \"fp8\"}]}",
         "the module of layers[0] is missing"},
        {DW_INVALID_ARGUMENT,
         HEADER "\"default\": \"bf16\", \"layers\": [{\"module\": \"h\", \"precision\": \"f\"}]}",
         "layers[0], module \"h\": precision \"f\" is not a precision"},
        {DW_PARSE, HEADER "\"default\": \"bf16\", \"sensitive_layers\": [3]}",
         "sensitive_layers[0] is an integer; expected the name or pattern"},
        {DW_PARSE, HEADER "\"default\": \"bf16\", \"sensitive_layers\": \"head\"}",
         "sensitive_layers is a string; expected an array"},
        {DW_INVALID_ARGUMENT, HEADER "\"default\": \"nvfp4\", \"block_size\": 32}",
         "block_size is 32, and forward_x of the default, nvfp4, has blocks of 16: use block_size "
         "16"},
        {DW_INVALID_ARGUMENT, HEADER "\"default\": \"bf16\", \"block_size\": 32}",
         "block_size is 32, and no operand has blocks of that size"},
        {DW_INVALID_ARGUMENT, HEADER "\"default\": \"fp8\", \"scale_rule\": \"floor\"}",
         "scale_rule is floor, and no layer has a scheme of MX (mxfp8, "},
        {DW_INVALID_ARGUMENT, HEADER "\"default\": \"mxfp8\", \"scale_rule\": \"amax\"}",
         "scale_rule is \"amax\"; expected rceil, floor or ceil"},
        {DW_PARSE, HEADER "\"default\": \"mxfp8\", \"bf16_share\": 2}", "bf16_share"},
        {DW_INVALID_ARGUMENT, HEADER "\"default\": \"mxfp8\", \"fallback\": \"maybe\"}",
         "fallback is \"maybe\"; expected safe or strict"},
        {DW_PARSE, HEADER "\"default\": \"fp8\", \"fast_accumulation\": 1}",
         "fast_accumulation is an integer; expected true or false"},
    };
    for (size_t i = 0; i < DW_COUNT(rows); i++) {
        dw_precision_policy *policy;
        dw_status found = dw_precision_policy_parse(rows[i].text, strlen(rows[i].text), &policy);
        if (found != rows[i].status || !strstr(dw_last_error(), rows[i].message))
            fail_msg("%s: status %d: %s lacks: %s", rows[i].text, (int)found, dw_last_error(),
                     rows[i].message);
        assert_null(policy);
    }
}

static void layers_are_listed_with_their_reasons(void **state) {
    (void)state;
    static const char *const parts[] = {
        "\"module\": \"h.0.mlp.c_fc\",\n    \"region\": \"mlp\",\n    \"dtype\": \"f32\",\n    "
        "\"reason\": \"default\",\n    \"name\": \"mxfp8\"",
        "\"module\": \"h.00\",\n    \"region\": \"none\",\n    \"dtype\": \"f32\",\n    "
        "\"reason\": \"share\",\n    \"name\": \"bf16\"",
        "\"reason\": \"module\",\n    \"pattern\": \"*.c_proj\"", "\"reason\": \"f64\"",
        "\"module\": \"lm_head\",\n    \"region\": \"head\",\n    \"dtype\": \"f32\",\n    "
        "\"reason\": \"region\"\n  }"};
    dw_graph *graph = make_graph();
    dw_precision_policy *policy =
        parse(HEADER "\"default\": \"mxfp8\", \"bf16_share\": 0.5, \"layers\": [{\"module\": "
                     "\"*.c_proj\", \"precision\": {\"forward_x\": \"mxfp4\"}}]}");
    char *json;
    OK(dw_precision_layers_json(graph, policy, &json));
    for (size_t i = 0; i < DW_COUNT(parts); i++)
        if (!strstr(json, parts[i])) fail_msg("%s lacks: %s", json, parts[i]);
    assert_null(strstr(json, "attn")); /* a matmul of activations is no layer */
    dw_text_free(json);
    dw_precision_policy_destroy(policy);
    dw_graph_destroy(graph);
}

static void refuse_with(dw_status status, dw_graph **graph, const dw_precision_policy *policy,
                        const char *message) {
    dw_graph *before = *graph;
    assert_int_equal(dw_graph_apply_precision(graph, policy, NULL), status);
    if (!strstr(dw_last_error(), message)) fail_msg("%s lacks: %s", dw_last_error(), message);
    assert_ptr_equal(*graph, before);
}
static void refuse(dw_graph **graph, const dw_precision_policy *policy, const char *message) {
    refuse_with(DW_INVALID_ARGUMENT, graph, policy, message);
}

static void wrong_policies_are_rejected(void **state) {
    (void)state;
    dw_graph *graph = make_graph();
    dw_precision_policy good, policy;
    OK(dw_precision_policy_init(&good, "mxfp8"));
    policy = good, policy.struct_size--;
    refuse(&graph, &policy, "struct_size");
    dw_operand_precision *dy = &policy.layer.operand[DW_DGRAD_DY];
    policy = good, dy->scheme = DW_SCHEME_COUNT;
    refuse(&graph, &policy, "the precision policy: dgrad_dy: scheme is 13");
    policy = good, dy->scheme = DW_SCHEME_FP8_ROW;
    refuse_with(DW_UNSUPPORTED, &graph, &policy, "the scheme fp8-row is not supported: expected");
    policy = good, dy->scheme = DW_SCHEME_FP8_BLOCK;
    refuse(&graph, &policy, "dgrad_dy is fp8-block and the other operand of its GEMM is mxfp8");
    OK(dw_precision_policy_init(&policy, "fp8-block"));
    dy->square = 1;
    refuse(&graph, &policy, "dgrad_dy and the other operand of its GEMM are fp8-block+square");
    dy->square = 0, dy->stochastic = 1;
    refuse(&graph, &policy, "dgrad_dy: fp8-block takes no stochastic");
    dy->stochastic = 0, dy->scale_rule = DW_SCALE_RCEIL;
    refuse(&graph, &policy, "dgrad_dy: fp8-block has no scale rule rceil");
    policy = good, dy->scheme = DW_SCHEME_FP32; /* one operand alone */
    refuse_with(DW_UNSUPPORTED, &graph, &policy, "dgrad_dy: the scheme fp32 is not supported");
    policy = good, dy->square = 2;
    refuse(&graph, &policy, "dgrad_dy: square is 2; expected 0 or 1");
    policy = good, dy->hadamard = 1;
    refuse(&graph, &policy, "dgrad_dy and the other operand of its GEMM differ in hadamard");
    policy = good, dy->square = dy->hadamard = 1;
    refuse(&graph, &policy, "dgrad_dy has square blocks and a Hadamard transform");
    policy = good, policy.layer.operand[DW_WGRAD_X].stochastic = 1;
    refuse(&graph, &policy, "wgrad_x is rounded stochastically; only");
    policy = good, dy->scheme = DW_SCHEME_FP8_TENSOR, dy->square = 1;
    refuse(&graph, &policy, "dgrad_dy: fp8-tensor has no blocks and takes no square");
    policy = good, dy->scheme = DW_SCHEME_BF16, dy->stochastic = 1;
    refuse(&graph, &policy, "dgrad_dy: bf16 has no blocks and takes no stochastic");
    policy = good, dy->scale_rule = DW_SCALE_FLOOR; /* accepted by itself; the share is not */
    policy.bf16_share = -1;
    refuse(&graph, &policy, "bf16_share");
    policy = good, dy->scale_rule = DW_SCALE_AMAX;
    refuse(&graph, &policy, "dgrad_dy: the scale rule is 4; expected one of MX");
    policy = good, dy->scheme = DW_SCHEME_NVFP4, dy->scale_rule = DW_SCALE_CEIL;
    refuse(&graph, &policy, "dgrad_dy: nvfp4 has no scale rule ceil, which is for mxfp8");
    policy = good, policy.strict = 1;
    refuse_with(DW_UNSUPPORTED, &graph, &policy, "the layer in module 'h.1.mlp' computes in f64");
    policy = good, policy.bf16_share = NAN;
    refuse(&graph, &policy, "bf16_share of the precision policy is nan");
    policy = good, policy.bf16_share = 1.5;
    refuse(&graph, &policy, "expected a share from 0 to 1");
    dw_precision_exception wrong = {"h.0", good.layer};
    wrong.layer.operand[DW_FORWARD_W].scheme = DW_SCHEME_FP16;
    policy = good, policy.exceptions = &wrong, policy.exception_count = 1;
    refuse_with(DW_UNSUPPORTED, &graph, &policy, "exception 0 of the precision policy: forward_w");
    const dw_precision_exception nameless = {NULL, layer_named("bf16")};
    policy = good, policy.exceptions = &nameless, policy.exception_count = 1;
    refuse(&graph, &policy, "exception 0 of the precision policy names no module");
    dw_graph_destroy(graph);

    OK(dw_graph_from_text("deepwell graph 1\n\ninput %x: f32[2, 3]\nparameter %w: f32[5, 3]\n\n"
                          "%y = linear(%x, %w)\n\nreturn %y\n",
                          &graph));
    OK(dw_precision_policy_init(&policy, "nvfp4"));
    refuse(&graph, &policy, "the graph has no seed: add a leaf of role DW_ROLE_SEED");
    dw_graph_destroy(graph);
}

/* ---- engines --------------------------------------------------------------------------------- */

enum { ROWS = 37, LEAVES = 8 };
static const int64_t sizes[] = {ROWS};

typedef struct problem {
    dw_graph *graph;
    dw__tensor leaves[LEAVES];
    dw_value wrt[LEAVES];
    uint32_t wrt_count;
} problem;

static uint64_t random_state = 99;
static float random_float(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(random_state >> 40) * 0x1p-23f - 1.0f;
}

static void fill(dw__tensor *tensor) {
    int64_t count = dw__tensor_count(tensor);
    tensor->data = dw__malloc_aligned((size_t)count * dw_dtype_bytes(tensor->dtype));
    assert_non_null(tensor->data);
    for (int64_t i = 0; i < count; i++) {
        switch (tensor->dtype) {
        case DW_F32: ((float *)tensor->data)[i] = random_float(); break;
        case DW_F64: ((double *)tensor->data)[i] = random_float(); break;
        default: ((int64_t *)tensor->data)[i] = 1234567 + i; break;
        }
    }
}

static void problem_begin(problem *p) {
    memset(p, 0, sizeof *p);
    p->graph = make_graph();
    assert_int_equal(dw_graph_leaf_count(p->graph), LEAVES);
    for (uint32_t i = 0; i < LEAVES; i++) {
        dw_value leaf = dw_graph_leaf_at(p->graph, i);
        OK(dw__value_tensor_at(p->graph, leaf, sizes, &p->leaves[i]));
        fill(&p->leaves[i]);
        if (p->leaves[i].dtype == DW_F32) p->wrt[p->wrt_count++] = leaf;
    }
}

static void problem_end(problem *p) {
    for (int i = 0; i < LEAVES; i++) dw__free_aligned(p->leaves[i].data);
    dw_graph_destroy(p->graph);
}

enum { OUTPUTS = 3 };

/* Runs the engine: outputs, then the gradients of output 0 for its gradient `seeds`. */
static void run_engine(const problem *p, const dw_engine_options *options, const dw__tensor *seeds,
                       dw__tensor *results) {
    dw_engine *engine;
    dw_plan *plan;
    OK(dw_engine_create(p->graph, 1, (uint32_t[]){0}, p->wrt_count, p->wrt, options, &engine));
    OK(dw_engine_plan(engine, sizes, &plan));
    dw_binding leaves[LEAVES] = {{0}}, outputs[OUTPUTS] = {{0}}, grads[LEAVES] = {{0}};
    for (int i = 0; i < LEAVES; i++) leaves[i].data = p->leaves[i].data;
    for (uint32_t i = 0; i < OUTPUTS; i++) {
        OK(dw__value_tensor_at(p->graph, dw_graph_output(p->graph, i), sizes, &results[i]));
        fill(&results[i]);
        outputs[i].data = results[i].data;
    }
    for (uint32_t i = 0; i < p->wrt_count; i++) {
        dw__tensor *grad = &results[OUTPUTS + i];
        OK(dw__value_tensor_at(p->graph, p->wrt[i], sizes, grad));
        fill(grad);
        if (dw_engine_has_grad(engine, i)) grads[i].data = grad->data;
    }
    void *arena = dw__malloc_aligned(dw_plan_arena_bytes(plan) + 64);
    dw_binding output_grads = {seeds->data, NULL};
    OK(dw_plan_forward(plan, arena, leaves, outputs, NULL));
    OK(dw_plan_backward(plan, arena, leaves, outputs, &output_grads, grads, NULL));
    for (uint32_t i = 0; i < p->wrt_count; i++)
        if (!dw_engine_has_grad(engine, i))
            dw__free_aligned(results[OUTPUTS + i].data), results[OUTPUTS + i].data = NULL;
    dw__free_aligned(arena);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
}

/* The same with the interpreter, on the graph with its gradient, with only reference kernels. */
static void run_reference(const problem *p, const dw_precision_policy *policy,
                          const dw__tensor *seeds, dw__tensor *results, bool *has) {
    dw_graph *graph;
    dw_value gradient, grads[LEAVES], wrt[LEAVES];
    dw__tensor leaves[LEAVES + 1], found[OUTPUTS + LEAVES];
    dw_dim shape[2];
    OK(dw_graph_clone(p->graph, &graph));
    OK(dw_graph_apply_precision(&graph, policy, NULL));
    dw_value logits = dw_graph_output(graph, 0);
    memcpy(shape, dw_value_shape(graph, logits), sizeof shape);
    OK(dw_graph_leaf(graph, DW_ROLE_GRADIENT, "gradient", DW_F32, 2, shape, &gradient));
    for (uint32_t i = 0; i < p->wrt_count; i++)
        wrt[i] = dw_graph_find(graph, dw_value_name(p->graph, p->wrt[i]));
    OK(dw_graph_gradient(graph, 1, &logits, &gradient, p->wrt_count, wrt, grads));
    for (uint32_t i = 0; i < p->wrt_count; i++) {
        has[i] = grads[i] != DW_NONE;
        if (has[i]) OK(dw_graph_add_output(graph, grads[i]));
    }
    memcpy(leaves, p->leaves, sizeof p->leaves);
    leaves[LEAVES] = *seeds;
    OK(dw__interpret(graph, sizes, leaves, found, NULL));
    uint32_t at = OUTPUTS;
    for (uint32_t i = 0; i < OUTPUTS + p->wrt_count; i++) {
        if (i < OUTPUTS)
            results[i] = found[i];
        else if (has[i - OUTPUTS])
            results[i] = found[at++];
        else
            results[i].data = NULL;
    }
    dw_graph_destroy(graph);
}

/* The error is at most F32's rounding in several layers: small beside the largest element. */
static double apart(const dw__tensor *a, const dw__tensor *b) {
    double most = 0, largest = 1e-30;
    for (int64_t i = 0; i < dw__tensor_count(a); i++) {
        bool wide = a->dtype == DW_F64;
        double x = wide ? ((double *)a->data)[i] : (double)((float *)a->data)[i];
        double y = wide ? ((double *)b->data)[i] : (double)((float *)b->data)[i];
        assert_true(isfinite(x));
        most = fmax(most, fabs(x - y)), largest = fmax(largest, fabs(y));
    }
    return most / largest;
}

/* A code at a boundary changes if the F32 sums before it differ. A few such codes move a result by one code's
 * step in a sum of dozens: 2^-8 / 35 (BF16), 2^-4 / 35 (E4M3), 2^-3 / 35 (E5M2) or 2^-2 / 35 (E2M1) of the largest
 * element, and gradients pass through three layers. A wrong operand moves all elements by a code's step. */
static void engines_agree_with_the_reference(void **state) {
    (void)state;
    static const struct {
        const char *name;
        double bound;
    } rows[] = {{"fp32", 1e-5}, {"bf16", 1e-3}, {"fp8", 2e-2}, {"mxfp8", 1e-2}, {"nvfp4", 4e-2}};
    problem p;
    problem_begin(&p);
    dw__tensor seeds;
    OK(dw__value_tensor_at(p.graph, dw_graph_output(p.graph, 0), sizes, &seeds));
    fill(&seeds);
    for (size_t row = 0; row < DW_COUNT(rows); row++) {
        dw_precision_policy policy;
        OK(dw_precision_policy_init(&policy, rows[row].name));
        dw__tensor wanted[OUTPUTS + LEAVES], first[OUTPUTS + LEAVES], got[OUTPUTS + LEAVES];
        bool has[LEAVES];
        run_reference(&p, &policy, &seeds, wanted, has);
        for (int variant = 0; variant < 4; variant++) {
            dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
            options.precision = &policy;
            options.recompute = variant & 1;
            options.fuse = variant >> 1;
            dw__tensor *results = variant == 0 ? first : got;
            run_engine(&p, &options, &seeds, results);
            for (uint32_t i = 0; i < OUTPUTS + p.wrt_count; i++) {
                assert_int_equal(results[i].data != NULL, wanted[i].data != NULL);
                if (!results[i].data) continue;
                double error = apart(&results[i], &wanted[i]);
                if (error > rows[row].bound)
                    fail_msg("%s, variant %d, result %u: %.3g apart", rows[row].name, variant, i,
                             error);
            }
            for (uint32_t i = 0; variant && i < OUTPUTS + p.wrt_count; i++)
                dw__free_aligned(results[i].data);
        }
        for (uint32_t i = 0; i < OUTPUTS + p.wrt_count; i++) {
            dw__free_aligned(wanted[i].data);
            dw__free_aligned(first[i].data);
        }
    }
    dw__free_aligned(seeds.data);
    problem_end(&p);
}

static void options_of_the_first_version_are_accepted(void **state) {
    (void)state;
    problem p;
    problem_begin(&p);
    dw_engine *engine;
    dw_precision_policy wrong = {.struct_size = 1}; /* not read */
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.precision = &wrong;
    options.struct_size = offsetof(dw_engine_options, precision);
    OK(dw_engine_create(p.graph, 0, NULL, 0, NULL, &options, &engine));
    assert_int_equal(dw_engine_quantized_count(engine), 0);
    dw_engine_destroy(engine);
    options.struct_size = sizeof options;
    assert_int_equal(dw_engine_create(p.graph, 0, NULL, 0, NULL, &options, &engine),
                     DW_INVALID_ARGUMENT);
    options.struct_size = sizeof options + 8;
    assert_int_equal(dw_engine_create(p.graph, 0, NULL, 0, NULL, &options, &engine),
                     DW_INVALID_ARGUMENT);
    problem_end(&p);
}

static void every_failing_allocation_is_survived(void **state) {
    (void)state;
    problem p;
    problem_begin(&p);
    dw_precision_policy policy;
    OK(dw_precision_policy_init(&policy, "nvfp4"));
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.precision = &policy;
    int64_t live = dw__memory_live();
    bool done = false;
    for (int64_t allowed = 0; !done; allowed += 1 + allowed / 64) {
        dw_engine *engine = NULL;
        dw_plan *plan = NULL;
        dw__memory_fail_after(allowed);
        dw_status status =
            dw_engine_create(p.graph, 1, (uint32_t[]){0}, p.wrt_count, p.wrt, &options, &engine);
        if (status == DW_OK) status = dw_engine_plan(engine, sizes, &plan);
        dw__memory_fail_after(-1);
        done = status == DW_OK;
        if (!done) assert_int_equal(status, DW_OUT_OF_MEMORY);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        assert_int_equal(dw__memory_live(), live);
    }
    done = false;
    for (int64_t allowed = 0; !done; allowed++) {
        dw_graph *before = p.graph;
        dw__memory_fail_after(allowed);
        dw_status status = dw_graph_apply_precision(&p.graph, &policy, NULL);
        dw__memory_fail_after(-1);
        done = status == DW_OK;
        if (done) break;
        assert_int_equal(status, DW_OUT_OF_MEMORY);
        assert_ptr_equal(p.graph, before);
        assert_int_equal(dw__memory_live(), live);
    }
    problem_end(&p);
}

static void files_survive_failing_allocations(void **state) {
    (void)state;
    const char *text = HEADER "\"default\": {\"recipe\": \"nvfp4\", \"dgrad_w\": \"bf16\"}, "
                              "\"sensitive_layers\": [\"a\"], \"layers\": [{\"module\": \"b\", "
                              "\"precision\": {\"forward_x\": \"mxfp8+floor\"}}], "
                              "\"guard\": {}, \"fallen_back\": [\"h.00\", \"c\"]}";
    dw_graph *graph = make_graph();
    int64_t live = dw__memory_live();
    bool done = false;
    for (int64_t allowed = 0; !done; allowed++) {
        dw_precision_policy *policy = NULL;
        char *json = NULL, *layers_json = NULL;
        dw__memory_fail_after(allowed);
        dw_status status = dw_precision_policy_parse(text, strlen(text), &policy);
        if (status == DW_OK) status = dw_precision_policy_json(policy, &json);
        if (status == DW_OK) status = dw_precision_layers_json(graph, policy, &layers_json);
        dw__memory_fail_after(-1);
        done = status == DW_OK;
        if (!done && status != DW_OUT_OF_MEMORY)
            fail_msg("after %d allocations: %s", (int)allowed, dw_last_error());
        dw_text_free(json);
        dw_text_free(layers_json);
        dw_precision_policy_destroy(policy);
        assert_int_equal(dw__memory_live(), live);
    }
    dw_graph_destroy(graph);
}

/* ---- guards ------------------------------------------------------------------------------------ */

static void guards_are_read_and_written(void **state) {
    (void)state;
    static const char *const full[] = {
        "\"every\": 7",        "\"snr_db\": 20.5",
        "\"underflow\": 0.25", "\"samples\": 3",
        "\"repair\": 0.05",    "\"fallen_back\": [\n    \"h.0.mlp.c_fc\",\n    \"h.00\"\n  ]"};
    const char *text = HEADER
        "\"default\": \"mxfp8\", \"guard\": {\"every\": 7, \"snr_db\": 20.5, \"underflow\": 0.25, "
        "\"samples\": 3, \"repair\": 0.05}, \"fallen_back\": [\"h.0.mlp.c_fc\", \"h.00\"]}";
    reads_back(text, full, DW_COUNT(full));
    static const char *const defaults[] = {"\"every\": 100", "\"underflow\": 0.9", "\"samples\": 2",
                                           "\"repair\": 0.0"};
    reads_back(HEADER "\"default\": \"fp8\", \"guard\": {}}", defaults, DW_COUNT(defaults));
    dw_precision_policy *policy = parse(HEADER "\"default\": \"fp8\", \"guard\": {\"every\": 0}}");
    char *json;
    OK(dw_precision_policy_json(policy, &json)); /* it does nothing, as no guard does */
    assert_null(strstr(json, "guard"));
    dw_text_free(json);
    dw_precision_policy_destroy(policy);
    policy = parse(text);
    assert_int_equal(policy->guard.every, 7);
    assert_int_equal(policy->fallen_back_count, 2);
    assert_string_equal(policy->fallen_back[1], "h.00");

    /* The first and the third layer have fallen back; names are exact, so those inside of h.0 have not. */
    dw_graph *graph = make_graph();
    OK(dw_precision_layers_json(graph, policy, &json));
    OK(dw_graph_apply_precision(&graph, policy, NULL));
    assert_string_equal(scheme_at(graph, "h0"), "bf16");
    assert_string_equal(scheme_at(graph, "h1"), "mxfp8");
    assert_string_equal(scheme_at(graph, "h2"), "bf16");
    assert_non_null(strstr(json, "\"reason\": \"guard\""));
    const char *bounds = strstr(json, "\"bounds\": {\n      \"forward_x\": 20.5");
    assert_non_null(bounds);
    assert_null(strstr(bounds + 1, "\"bounds\"")); /* only h1 is observed */
    dw_text_free(json);
    dw_graph_destroy(graph);
    dw_precision_policy_destroy(policy);
}

static void wrong_guards_are_rejected(void **state) {
    (void)state;
    dw_graph *graph = make_graph();
    dw_precision_policy good, policy;
    OK(dw_precision_policy_init(&good, "mxfp8"));
    policy = good, policy.guard.every = -1;
    refuse(&graph, &policy, "guard: every is -1; expected 0 or more steps");
    policy = good, policy.guard.snr_db = NAN;
    refuse(&graph, &policy, "guard: snr_db is nan; expected a bound from 0 to 200 dB");
    policy = good, policy.guard.underflow = 1.5;
    refuse(&graph, &policy, "guard: underflow is 1.5; expected a share");
    policy = good, policy.guard.samples = -2;
    refuse(&graph, &policy, "guard: samples is -2; expected how many");
    policy = good, policy.guard.repair = 2.0;
    refuse(&graph, &policy, "guard: repair is 2; expected a share of the steps");
    const char *const nameless[] = {NULL};
    policy = good, policy.fallen_back = nameless, policy.fallen_back_count = 1;
    refuse(&graph, &policy, "layer 0 of those that have fallen back has no name");
    dw_graph_destroy(graph);
    dw_precision_policy *read = NULL;
    const char *text = HEADER "\"default\": \"fp8\", \"guard\": {\"ever\": 1}}";
    assert_int_equal(dw_precision_policy_parse(text, strlen(text), &read), DW_PARSE);
    assert_non_null(
        strstr(dw_last_error(), "guard has an unknown member \"ever\"; expected every"));
}

static dw_graph *graph_with_statistics(int count) {
    dw_graph *graph = make_graph();
    const dw_dim numbers = DW_LAYER_STATISTICS;
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "statistics.%d", i);
        OK(dw_graph_leaf(graph, DW_ROLE_STATISTICS, name, DW_F64, 1, &numbers, NULL));
    }
    return graph;
}

static uint32_t count_of(const dw_graph *graph, dw_op op) {
    uint32_t count = 0;
    for (dw_node n = 0; n < dw_graph_node_count(graph); n++) count += dw_node_op(graph, n) == op;
    return count;
}

/* An engine has the statistics' nodes only where their gradients are asked for. */
static void statistics_are_gradients(void **state) {
    (void)state;
    dw_precision_policy policy;
    OK(dw_precision_policy_init(&policy, "mxfp8"));
    dw_graph *graph = graph_with_statistics(2); /* of three layers */
    refuse(&graph, &policy, "the graph has fewer leaves of role DW_ROLE_STATISTICS than layers");
    dw_graph_destroy(graph);
    graph = graph_with_statistics(4);
    refuse(&graph, &policy, "the graph has more leaves of role DW_ROLE_STATISTICS than layers");
    dw_graph_destroy(graph);
    graph = graph_with_statistics(3);
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.precision = &policy;
    const dw_value w1 = dw_graph_find(graph, "w1");
    const dw_value wrt[] = {w1, dw_graph_find(graph, "statistics.0"),
                            dw_graph_find(graph, "statistics.2")};
    dw_engine *plain, *observed;
    OK(dw_engine_create(graph, 1, (uint32_t[]){0}, 1, wrt, &options, &plain));
    OK(dw_engine_create(graph, 1, (uint32_t[]){0}, 3, wrt, &options, &observed));
    assert_int_equal(count_of(dw_engine_graph(plain), DW_OP_QUANTIZATION_ERROR), 0);
    /* h0: x and w of forward alone, because nothing differentiates by its operands. h2: also dy and w of the gradient
     * of its input; its weight has none. */
    assert_int_equal(count_of(dw_engine_graph(observed), DW_OP_QUANTIZATION_ERROR), 2 + 4);
    for (uint32_t i = 0; i < 3; i++) assert_true(dw_engine_has_grad(observed, i));
    dw_engine_destroy(plain);
    dw_engine_destroy(observed);
    const dw_dim few = 29;
    assert_int_equal(dw_graph_leaf(graph, DW_ROLE_STATISTICS, "short", DW_F64, 1, &few, NULL),
                     DW_SHAPE);
    dw_graph_destroy(graph);
}

/* 6.02 f + 13.5 - 6 dB, and 3.01 less for stochastic rounding. */
static void bounds_follow_from_the_element(void **state) {
    (void)state;
    const struct {
        dw_operand_precision operand;
        double bound;
    } cases[] = {{{.scheme = DW_SCHEME_FP8_TENSOR}, 25.56},
                 {{.scheme = DW_SCHEME_FP8_TENSOR_E5M2}, 19.54},
                 {{.scheme = DW_SCHEME_MXFP6_E2M3}, 25.56},
                 {{.scheme = DW_SCHEME_MXFP4}, 13.52},
                 {{.scheme = DW_SCHEME_NVFP4, .stochastic = 1}, 10.51},
                 {{.scheme = DW_SCHEME_BF16}, 0.0},
                 {{.scheme = DW_SCHEME_FP32}, 0.0}};
    for (size_t i = 0; i < DW_COUNT(cases); i++)
        assert_true(fabs(dw_operand_snr_bound_db(&cases[i].operand) - cases[i].bound) < 1e-9);
}

/* ---- guards of runs ---------------------------------------------------------------------------- */

static const char watched[] = HEADER "\"default\": \"fp8\", \"guard\": {\"every\": 2}}";

/* Judges two samples in which "b" loses too much, and returns the state as text. */
static dw_status watch_two_samples(char **kept) {
    static const char layers[] =
        "[{\"module\": \"a\", \"operands\": {\"forward_x\": \"fp8-tensor\"}, "
        "\"bounds\": {\"forward_x\": 25.0}}, {\"module\": \"b\", \"operands\": {\"forward_x\": "
        "\"fp8-tensor\"}, \"bounds\": {\"forward_x\": 25.0}}]";
    const double statistics[2][DW_LAYER_STATISTICS] = {{1000.0, 1.0, 64.0, 3.0, 0.0},
                                                       {100.0, 1.0, 64.0, 0.0, 0.0}};
    dw_status status = DW_OK;
    dw_precision_policy *policy = NULL;
    dw_precision_watch *watch = NULL;
    char *operands = NULL, *changes = NULL, *text = NULL;
    DW_TRY(dw_precision_policy_parse(watched, strlen(watched), &policy));
    DW_TRY(dw_precision_watch_create(policy, &watch));
    DW_TRY(dw_precision_operands_json(layers, 2, &statistics[0][0], &operands));
    for (int64_t step = 2; step <= 4; step += 2) {
        dw_text_free(changes);
        changes = NULL;
        DW_TRY(dw_precision_watch_judge(watch, step, operands, &changes));
    }
    DW_TRY(dw_precision_watch_state(watch, kept));
    DW_TRY(dw_precision_watch_restore(watch, *kept));
    DW_TRY(dw_precision_watch_policy(watch, 6, 20, &text));
cleanup:
    dw_text_free(text);
    dw_text_free(changes);
    dw_text_free(operands);
    dw_precision_watch_destroy(watch);
    dw_precision_policy_destroy(policy);
    return status;
}

static void watches_survive_failing_allocations(void **state) {
    (void)state;
    int64_t live = dw__memory_live();
    dw_status status = DW_OUT_OF_MEMORY;
    for (int64_t allowed = 0; status != DW_OK; allowed++) {
        char *kept = NULL;
        dw__memory_fail_after(allowed);
        status = watch_two_samples(&kept);
        dw__memory_fail_after(-1);
        if (status != DW_OK && status != DW_OUT_OF_MEMORY)
            fail_msg("after %d allocations: %s", (int)allowed, dw_last_error());
        if (status == DW_OK) {
            /* 20 dB are below the bound, 30 dB are not. */
            assert_non_null(strstr(kept, "\"layer\": \"b\""));
            assert_non_null(strstr(kept, "\"from_step\": 6"));
            assert_non_null(strstr(kept, "\"reason\": \"SNR 20.0 dB, bound 25.0 dB\""));
            assert_null(strstr(kept, "\"a\""));
        }
        dw_text_free(kept);
        assert_int_equal(dw__memory_live(), live);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_policy_leaves_heads_and_matmuls_of_activations),
        cmocka_unit_test(shares_and_exceptions),
        cmocka_unit_test(patterns_cover_modules_and_what_is_inside),
        cmocka_unit_test(layers_in_the_policys_precision_are_left),
        cmocka_unit_test(policies_have_names),
        cmocka_unit_test(policies_are_read_and_written),
        cmocka_unit_test(wrong_files_are_rejected),
        cmocka_unit_test(fast_accumulation_is_for_forward_alone),
        cmocka_unit_test(layers_are_listed_with_their_reasons),
        cmocka_unit_test(wrong_policies_are_rejected),
        cmocka_unit_test(engines_agree_with_the_reference),
        cmocka_unit_test(options_of_the_first_version_are_accepted),
        cmocka_unit_test(every_failing_allocation_is_survived),
        cmocka_unit_test(files_survive_failing_allocations),
        cmocka_unit_test(watches_survive_failing_allocations),
        cmocka_unit_test(guards_are_read_and_written),
        cmocka_unit_test(wrong_guards_are_rejected),
        cmocka_unit_test(statistics_are_gradients),
        cmocka_unit_test(bounds_follow_from_the_element),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
