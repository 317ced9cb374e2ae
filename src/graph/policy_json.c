/* Precision policies as JSON (deepwell/precision.h).
 *
 *     {"format": "deepwell.precision", "version": 1,
 *      "default": "mxfp8", "bf16_share": 0.0, "block_size": 32, "scale_rule": "rceil",
 *      "sensitive_layers": ["embedding", "final_linear", "model.layers.0.*"],
 *      "layers": [{"module": "*.mlp.*", "precision": "fp8"},
 *                 {"module": "*.attn.*", "precision": {"recipe": "mxfp8", "dgrad_dy": "mxfp8-e5m2"}}],
 *      "fallback": "safe", "fast_accumulation": false,
 *      "guard": {"every": 100, "snr_db": 20.0, "underflow": 0.9, "samples": 2, "repair": 0.05},
 *      "fallen_back": ["model.layers.3.mlp.down_proj"]}
 *
 * A precision is the name of a policy, or an object that changes operands of a policy. Layers become exceptions in
 * their order, then sensitive layers that are not words for regions, with the precision of the model. The writer's text
 * reads back as the same policy, and is the same text for policies that mean the same. */
#include "base/json.h"
#include "graph/layer_precision.h"
#include <math.h>
#include <string.h>

#define FORMAT "deepwell.precision"
enum { VERSION = 1, MOST_NAME = 512, DEFAULT_SAMPLES = 2 };
static const double DEFAULT_UNDERFLOW = 0.9;

/* ---- words ----------------------------------------------------------------------------------- */

/* The writer uses the first word of a region. */
static const struct region_word {
    const char *word;
    dw_region region;
} region_words[] = {
    {"embedding", DW_REGION_EMBED},   {"norm", DW_REGION_NORM},       {"router", DW_REGION_ROUTER},
    {"final_linear", DW_REGION_HEAD}, {"loss", DW_REGION_LOSS},       {"attention", DW_REGION_ATTN},
    {"mlp", DW_REGION_MLP},           {"experts", DW_REGION_EXPERTS}, {"embed", DW_REGION_EMBED},
    {"embeddings", DW_REGION_EMBED},  {"norms", DW_REGION_NORM},      {"lm_head", DW_REGION_HEAD},
    {"head", DW_REGION_HEAD},         {"logits", DW_REGION_HEAD},     {"attn", DW_REGION_ATTN},
};

static const struct region_word *find_word(const char *word) {
    for (size_t i = 0; i < DW_COUNT(region_words); i++)
        if (strcmp(region_words[i].word, word) == 0) return &region_words[i];
    return NULL;
}

static const char *operand_name(int operand) {
    return dw_attr_name(dw__operand_key((dw_linear_operand)operand));
}

static bool is_mx(const dw_operand_precision *operand) {
    return dw__scheme_in(operand->scheme, dw__mx_schemes);
}

static int block_of(const dw_operand_precision *operand) {
    const int block = dw_scheme_describe(operand->scheme)->block;
    return block > 0 ? block : 0;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* A typing error would otherwise change nothing. */
static dw_status check_members(const char *what, const json_t *object, size_t count,
                               const char *const *names) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value) {
        size_t i = 0;
        while (i < count && strcmp(key, names[i]) != 0) i++;
        if (i < count) continue;
        char list[256];
        size_t length = 0;
        for (i = 0; i < count && length < sizeof list; i++)
            length += (size_t)snprintf(list + length, sizeof list - length, "%s%s", i ? ", " : "",
                                       names[i]);
        return dw__fail(DW_PARSE, "%s has an unknown member \"%.64s\"; expected %s", what,
                        dw__json_is_plain(key) ? key : "?", list);
    }
    return DW_OK;
}

static dw_status read_operand(const json_t *json, int operand, dw_operand_precision *precision) {
    const char *name = operand_name(operand);
    if (!json_is_string(json))
        return dw__json_wrong_kind(name, json, "the name of a scheme, as in \"mxfp8-e5m2\"");
    const char *text = json_string_value(json);
    if (!dw__json_is_plain(text))
        return dw__fail(DW_PARSE, "%s has control characters; expected the name of a scheme", name);
    if (strcmp(text, "fp8") == 0) { /* not a scheme: its element depends on the operand */
        dw_layer_precision fp8;
        DW_RETURN_IF_FAILED(dw_layer_precision_named(text, &fp8));
        *precision = fp8.operand[operand];
        return DW_OK;
    }
    dw_status status = dw__operand_read(text, precision);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "%s", name);
}

/* `base`: the precision of operands that an object does not name; NULL: it must name all or a recipe. */
static dw_status read_precision(const json_t *json, const dw_layer_precision *base,
                                dw_layer_precision *layer) {
    static const char *const members[] = {"recipe",  "forward_x", "forward_w", "dgrad_dy",
                                          "dgrad_w", "wgrad_dy",  "wgrad_x"};
    const char *name = NULL;
    if (json_is_string(json)) {
        name = json_string_value(json);
        if (!dw__json_is_plain(name))
            return dw__fail(DW_PARSE, "precision has control characters; expected a name");
        return dw_layer_precision_named(name, layer);
    }
    if (!json_is_object(json))
        return dw__json_wrong_kind("precision", json, "a name, or an object of operands");
    DW_RETURN_IF_FAILED(check_members("precision", json, DW_COUNT(members), members));
    DW_RETURN_IF_FAILED(dw__json_text(json, "recipe", &name));
    if (name) DW_RETURN_IF_FAILED(dw_layer_precision_named(name, layer));
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        const json_t *operand = dw__json_member(json, operand_name(i));
        if (operand)
            DW_RETURN_IF_FAILED(read_operand(operand, i, &layer->operand[i]));
        else if (!name && !base)
            return dw__fail(DW_PARSE,
                            "%s is missing; expected it, or a \"recipe\" whose operand it has",
                            operand_name(i));
        else if (!name)
            layer->operand[i] = base->operand[i];
    }
    return DW_OK;
}

/* A policy that owns its exceptions and their names, in one block. */
typedef struct owned_policy {
    dw_precision_policy policy;
    dw_precision_exception exceptions[];
} owned_policy;

static dw_status read_name(const char *what, size_t index, const json_t *json, const char **name) {
    const char *text = json_string_value(json);
    if (!text)
        return dw__fail(DW_PARSE, "%s[%zu] is %s; expected the name or pattern of a module", what,
                        index, dw__json_kind(json));
    if (!dw__json_is_plain(text) || strlen(text) > MOST_NAME)
        return dw__fail(
            DW_PARSE,
            "%s[%zu] has control characters or more than %d bytes; expected the name or "
            "pattern of a module",
            what, index, (int)MOST_NAME);
    *name = text;
    return DW_OK;
}

static dw_status allocate_policy(const json_t *layers, const json_t *sensitive,
                                 const json_t *fallen, owned_policy **policy, char **names) {
    const size_t count = json_array_size(layers) + json_array_size(sensitive);
    size_t bytes = sizeof(owned_policy) + count * sizeof(dw_precision_exception) +
                   json_array_size(fallen) * sizeof(char *),
           index;
    const size_t fixed = bytes;
    const char *name;
    json_t *entry;
    json_array_foreach((json_t *)layers, index, entry) {
        static const char *const members[] = {"module", "precision"};
        if (!json_is_object(entry))
            return dw__fail(DW_PARSE, "layers[%zu] is %s; expected an object", index,
                            dw__json_kind(entry));
        DW_RETURN_IF_FAILED(check_members("an entry of layers", entry, DW_COUNT(members), members));
        DW_RETURN_IF_FAILED(
            read_name("the module of layers", index, json_object_get(entry, "module"), &name));
        bytes += strlen(name) + 1;
    }
    json_array_foreach((json_t *)sensitive, index, entry) {
        DW_RETURN_IF_FAILED(read_name("sensitive_layers", index, entry, &name));
        bytes += strlen(name) + 1;
    }
    json_array_foreach((json_t *)fallen, index, entry) {
        DW_RETURN_IF_FAILED(read_name("fallen_back", index, entry, &name));
        bytes += strlen(name) + 1;
    }
    *policy = dw__calloc(1, bytes);
    if (!*policy) return dw__fail_memory("a precision policy", bytes);
    (*policy)->policy.exceptions = (*policy)->exceptions;
    *names = (char *)*policy + fixed;
    return DW_OK;
}

/* Copies the names of layers that have fallen back. Their list lies behind the exceptions. */
static void add_fallen_back(owned_policy *own, const json_t *fallen, uint32_t exceptions,
                            char **names) {
    const char **list = (const char **)(own->exceptions + exceptions);
    size_t index;
    json_t *entry;
    json_array_foreach((json_t *)fallen, index, entry) {
        const size_t bytes = strlen(json_string_value(entry)) + 1;
        list[index] = memcpy(*names, json_string_value(entry), bytes);
        *names += bytes;
    }
    own->policy.fallen_back = list;
    own->policy.fallen_back_count = (uint32_t)json_array_size(fallen);
}

static void add_exception(owned_policy *own, char **names, const char *name,
                          const dw_layer_precision *layer) {
    const size_t bytes = strlen(name) + 1;
    memcpy(*names, name, bytes);
    own->exceptions[own->policy.exception_count++] =
        (dw_precision_exception){.module = *names, .layer = *layer};
    *names += bytes;
}

static dw_status read_layers(const json_t *layers, const json_t *sensitive, owned_policy *own,
                             char *names) {
    dw_layer_precision layer, kept;
    size_t index;
    json_t *entry;
    json_array_foreach((json_t *)layers, index, entry) {
        const char *name = json_string_value(json_object_get(entry, "module"));
        dw_status status =
            read_precision(json_object_get(entry, "precision"), &own->policy.layer, &layer);
        if (status != DW_OK)
            return dw__fail_prefix(status, "layers[%zu], module \"%.64s\"", index, name);
        add_exception(own, &names, name, &layer);
    }
    DW_RETURN_IF_FAILED(dw_layer_precision_named("fp32", &kept));
    json_array_foreach((json_t *)sensitive, index, entry) {
        const char *name = json_string_value(entry);
        const struct region_word *word = find_word(name);
        if (word)
            own->policy.high_regions |= 1u << word->region;
        else
            add_exception(own, &names, name, &kept);
    }
    return DW_OK;
}

static void apply_rule(dw_layer_precision *layer, dw_scale_rule rule, int *count) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        if (!is_mx(&layer->operand[i])) continue;
        if (layer->operand[i].scale_rule == DW_SCALE_DEFAULT) layer->operand[i].scale_rule = rule;
        ++*count;
    }
}

/* Gives operands without a rule the document's, and checks its block size. */
static dw_status read_blocks(const json_t *root, owned_policy *own) {
    dw_precision_policy *policy = &own->policy;
    dw_scale_rule rule = DW_SCALE_DEFAULT;
    const char *name;
    int64_t block;
    int count = 0, found = 0;
    DW_RETURN_IF_FAILED(dw__json_text(root, "scale_rule", &name));
    if (name) DW_RETURN_IF_FAILED(dw__rule_find("scale_rule", name, &rule));
    apply_rule(&policy->layer, rule, &count);
    for (uint32_t i = 0; i < policy->exception_count; i++)
        apply_rule(&own->exceptions[i].layer, rule, &count);
    if (!count && dw__rule_word(rule))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "scale_rule is %s, and no layer has a scheme of MX (%s), which alone have "
                        "rules: leave it out",
                        name, dw__scheme_list(dw__mx_schemes).text);
    DW_RETURN_IF_FAILED(dw__json_integer(root, "block_size", 1, 1 << 20, 0, &block));
    if (!block) return DW_OK;
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        const int own_block = block_of(&policy->layer.operand[i]);
        if (!own_block) continue;
        if (own_block != block)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "block_size is %d, and %s of the default, %s, has blocks of %d: use "
                            "block_size %d, or leave it out",
                            (int)block, operand_name(i),
                            dw_scheme_name(policy->layer.operand[i].scheme), own_block, own_block);
        found++;
    }
    for (uint32_t e = 0; e < policy->exception_count; e++)
        for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
            found += block_of(&policy->exceptions[e].layer.operand[i]) == block;
    if (found) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "block_size is %d, and no operand has blocks of that size: leave it out",
                    (int)block);
}

static dw_status want_array(const json_t *root, const char *name, const json_t **array) {
    *array = dw__json_member(root, name);
    return !*array || json_is_array(*array) ? DW_OK : dw__json_wrong_kind(name, *array, "an array");
}

/* Everything but layers, of which the default precision is needed first. */
static dw_status read_default(const json_t *root, dw_precision_policy *policy) {
    const json_t *precision = dw__json_member(root, "default");
    const char *name = json_string_value(precision), *fallback;
    dw_precision_policy recipe;
    if (json_is_object(precision)) name = json_string_value(json_object_get(precision, "recipe"));
    dw_status status = read_precision(precision, NULL, &policy->layer);
    if (status != DW_OK) return dw__fail_prefix(status, "default");
    DW_RETURN_IF_FAILED(dw_precision_policy_init(&recipe, name ? name : "fp32"));
    policy->struct_size = sizeof *policy;
    policy->high_regions = dw__json_member(root, "sensitive_layers") ? 0 : recipe.high_regions;
    DW_RETURN_IF_FAILED(
        dw__json_number(root, "bf16_share", 0.0, 1.0, recipe.bf16_share, &policy->bf16_share));
    DW_RETURN_IF_FAILED(dw__json_text(root, "fallback", &fallback));
    policy->strict = fallback && strcmp(fallback, "strict") == 0;
    if (fallback && !policy->strict && strcmp(fallback, "safe") != 0)
        return dw__fail(DW_INVALID_ARGUMENT, "fallback is \"%.64s\"; expected safe or strict",
                        fallback);
    const json_t *fast = dw__json_member(root, "fast_accumulation");
    if (fast && !json_is_boolean(fast))
        return dw__json_wrong_kind("fast_accumulation", fast, "true or false");
    policy->fast_accumulation = json_is_true(fast);
    return DW_OK;
}

static dw_status read_guard(const json_t *root, dw_precision_guard *guard) {
    static const char *const members[] = {"every", "snr_db", "underflow", "samples", "repair"};
    const json_t *json = dw__json_member(root, "guard");
    int64_t samples;
    *guard = (dw_precision_guard){0};
    if (!json) return DW_OK;
    if (!json_is_object(json)) return dw__json_wrong_kind("guard", json, "an object");
    DW_RETURN_IF_FAILED(check_members("guard", json, DW_COUNT(members), members));
    DW_RETURN_IF_FAILED(dw__json_integer(json, "every", 0, INT64_MAX, 100, &guard->every));
    DW_RETURN_IF_FAILED(dw__json_number(json, "snr_db", 0.0, 200.0, 0.0, &guard->snr_db));
    DW_RETURN_IF_FAILED(
        dw__json_number(json, "underflow", 1e-6, 1.0, DEFAULT_UNDERFLOW, &guard->underflow));
    DW_RETURN_IF_FAILED(dw__json_integer(json, "samples", 1, 1 << 20, DEFAULT_SAMPLES, &samples));
    guard->samples = (int)samples;
    return dw__json_number(json, "repair", 0.0, 1.0, 0.0, &guard->repair);
}

static dw_status read_root(const json_t *root, owned_policy **own) {
    static const char *const members[] = {
        "format",     "version",           "default",  "bf16_share", "block_size",
        "scale_rule", "fast_accumulation", "fallback", "layers",     "sensitive_layers",
        "guard",      "fallen_back"};
    dw_precision_policy policy = {0};
    const json_t *layers, *sensitive, *fallen;
    const char *format;
    char *names;
    int64_t version;
    if (!json_is_object(root)) return dw__json_wrong_kind("the policy", root, "an object");
    DW_RETURN_IF_FAILED(check_members("the policy", root, DW_COUNT(members), members));
    DW_RETURN_IF_FAILED(dw__json_text(root, "format", &format));
    if (!format || strcmp(format, FORMAT) != 0)
        return dw__fail(DW_PARSE, "format is \"%.64s\"; expected \"" FORMAT "\"",
                        format ? format : "");
    DW_RETURN_IF_FAILED(dw__json_integer(root, "version", 0, INT64_MAX, -1, &version));
    if (version != VERSION)
        return dw__fail(DW_PARSE, "version is %lld; expected %d: it is of another Deepwell",
                        (long long)version, (int)VERSION);
    DW_RETURN_IF_FAILED(read_default(root, &policy));
    DW_RETURN_IF_FAILED(want_array(root, "layers", &layers));
    DW_RETURN_IF_FAILED(want_array(root, "sensitive_layers", &sensitive));
    DW_RETURN_IF_FAILED(want_array(root, "fallen_back", &fallen));
    DW_RETURN_IF_FAILED(read_guard(root, &policy.guard));
    DW_RETURN_IF_FAILED(allocate_policy(layers, sensitive, fallen, own, &names));
    policy.exceptions = (*own)->exceptions;
    (*own)->policy = policy;
    add_fallen_back(*own, fallen, (uint32_t)(json_array_size(layers) + json_array_size(sensitive)),
                    &names);
    DW_RETURN_IF_FAILED(read_layers(layers, sensitive, *own, names));
    DW_RETURN_IF_FAILED(read_blocks(root, *own));
    return dw__policy_check(&(*own)->policy);
}

dw_status dw_precision_policy_parse(const char *json, size_t bytes, dw_precision_policy **policy) {
    static const dw__json_limits limits = {.depth = 4, .values = 1 << 16};
    json_t *root = NULL;
    owned_policy *own = NULL;
    if (!json || !policy)
        return dw__fail(DW_INVALID_ARGUMENT, "the text of a precision policy is NULL");
    *policy = NULL;
    DW_RETURN_IF_FAILED(dw__json_parse("precision policy", json, bytes, limits, &root));
    dw_status status = read_root(root, &own);
    json_decref(root);
    if (status != DW_OK) {
        dw__free(own);
        return dw__fail_prefix(status, "precision policy");
    }
    *policy = &own->policy;
    return DW_OK;
}

bool dw__policy_is_file(const char *name) {
    const size_t length = strlen(name);
    return length > 5 && strcmp(name + length - 5, ".json") == 0;
}

dw_status dw_precision_policy_load(const char *name, dw_precision_policy **policy) {
    enum { MOST_BYTES = 16 << 20 };
    char *text = NULL;
    size_t bytes = 0;
    if (!name || !policy)
        return dw__fail(DW_INVALID_ARGUMENT, "the name of a precision policy is NULL");
    *policy = NULL;
    if (dw__policy_is_file(name)) {
        DW_RETURN_IF_FAILED(dw__file_read_at_most(name, MOST_BYTES, &text, &bytes));
        dw_status status = dw_precision_policy_parse(text, bytes, policy);
        dw__free(text);
        return status == DW_OK ? DW_OK : dw__fail_prefix(status, "%.256s", name);
    }
    dw_precision_policy recipe;
    DW_RETURN_IF_FAILED(dw_precision_policy_init(&recipe, name));
    owned_policy *own = dw__calloc(1, sizeof *own);
    if (!own) return dw__fail_memory("a precision policy", sizeof *own);
    own->policy = recipe;
    *policy = &own->policy;
    return DW_OK;
}

void dw_precision_policy_destroy(dw_precision_policy *policy) { dw__free(policy); }

/* ---- writing --------------------------------------------------------------------------------- */

/* Sets the entry, or fails and releases nothing: a NULL value is a failed allocation. */
static dw_status set(json_t *object, const char *name, json_t *value) {
    return value && json_object_set_new(object, name, value) == 0
               ? DW_OK
               : dw__fail_memory("a precision policy's text", 0);
}

static dw_status append(json_t *array, json_t *value) {
    return value && json_array_append_new(array, value) == 0
               ? DW_OK
               : dw__fail_memory("a precision policy's text", 0);
}

static dw_scale_rule rule_of(const dw_operand_precision *operand) {
    return dw__rule_word(operand->scale_rule) ? operand->scale_rule : DW_SCALE_RCEIL;
}

/* The rule of the first operand of MX, which others then need not name. */
static dw_scale_rule common_rule(const dw_precision_policy *policy) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
        if (is_mx(&policy->layer.operand[i])) return rule_of(&policy->layer.operand[i]);
    for (uint32_t e = 0; e < policy->exception_count; e++)
        for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
            if (is_mx(&policy->exceptions[e].layer.operand[i]))
                return rule_of(&policy->exceptions[e].layer.operand[i]);
    return DW_SCALE_DEFAULT;
}

static dw_status write_operands(json_t *object, const dw_layer_precision *layer,
                                dw_scale_rule common) {
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        dw_operand_precision operand = layer->operand[i];
        const bool named = is_mx(&operand) && rule_of(&operand) != common,
                   nearest = named && rule_of(&operand) == DW_SCALE_RCEIL;
        if (!named) operand.scale_rule = DW_SCALE_DEFAULT;
        json_t *text =
            json_sprintf("%s%s", dw__operand_text(&operand).text, nearest ? "+rceil" : "");
        DW_RETURN_IF_FAILED(set(object, operand_name(i), text));
    }
    return DW_OK;
}

static dw_status write_precision(json_t *object, const char *member,
                                 const dw_layer_precision *layer, dw_scale_rule common) {
    dw_layer_precision plain = *layer;
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
        if (is_mx(&plain.operand[i]) && rule_of(&plain.operand[i]) == common)
            plain.operand[i].scale_rule = DW_SCALE_DEFAULT;
    /* With another common rule, RCEIL must be named, which only operands do. */
    bool nameable = true;
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++)
        nameable &= !is_mx(&layer->operand[i]) || rule_of(&layer->operand[i]) == common;
    const char *name = nameable ? dw__layer_name(&plain) : NULL;
    if (name) return set(object, member, json_string(name));
    json_t *operands = json_object();
    DW_RETURN_IF_FAILED(set(object, member, operands));
    return write_operands(operands, layer, common);
}

static dw_status write_sensitive(json_t *root, const dw_precision_policy *policy, uint32_t from) {
    json_t *list = json_array();
    DW_RETURN_IF_FAILED(set(root, "sensitive_layers", list));
    uint32_t written = 0;
    for (size_t i = 0; i < DW_COUNT(region_words); i++) {
        const uint32_t bit = 1u << region_words[i].region;
        if (!(policy->high_regions & ~written & bit)) continue;
        written |= bit;
        DW_RETURN_IF_FAILED(append(list, json_string(region_words[i].word)));
    }
    for (uint32_t i = from; i < policy->exception_count; i++)
        DW_RETURN_IF_FAILED(append(list, json_string(policy->exceptions[i].module)));
    return DW_OK;
}

static dw_status write_layers(json_t *root, const dw_precision_policy *policy, uint32_t count,
                              dw_scale_rule common) {
    json_t *list = json_array();
    DW_RETURN_IF_FAILED(set(root, "layers", list));
    for (uint32_t i = 0; i < count; i++) {
        json_t *entry = json_object();
        DW_RETURN_IF_FAILED(append(list, entry));
        DW_RETURN_IF_FAILED(set(entry, "module", json_string(policy->exceptions[i].module)));
        DW_RETURN_IF_FAILED(
            write_precision(entry, "precision", &policy->exceptions[i].layer, common));
    }
    return DW_OK;
}

static int common_block(const dw_precision_policy *policy) {
    int block = 0;
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        const int own = block_of(&policy->layer.operand[i]);
        if (own && block && own != block) return 0;
        if (own) block = own;
    }
    return block;
}

/* Members with the value of a policy without a guard are left out, so that its text is what it always was. */
static dw_status write_guard(json_t *root, const dw_precision_policy *policy) {
    const dw_precision_guard *guard = &policy->guard;
    if (guard->every || guard->repair > 0.0) {
        json_t *json = json_object();
        DW_RETURN_IF_FAILED(set(root, "guard", json));
        DW_RETURN_IF_FAILED(set(json, "every", json_integer(guard->every)));
        if (guard->snr_db > 0.0) DW_RETURN_IF_FAILED(set(json, "snr_db", json_real(guard->snr_db)));
        DW_RETURN_IF_FAILED(
            set(json, "underflow",
                json_real(guard->underflow > 0.0 ? guard->underflow : DEFAULT_UNDERFLOW)));
        DW_RETURN_IF_FAILED(
            set(json, "samples", json_integer(guard->samples ? guard->samples : DEFAULT_SAMPLES)));
        DW_RETURN_IF_FAILED(set(json, "repair", json_real(guard->repair)));
    }
    if (!policy->fallen_back_count) return DW_OK;
    json_t *list = json_array();
    DW_RETURN_IF_FAILED(set(root, "fallen_back", list));
    for (uint32_t i = 0; i < policy->fallen_back_count; i++)
        DW_RETURN_IF_FAILED(append(list, json_string(policy->fallen_back[i])));
    return DW_OK;
}

static dw_status write_root(json_t *root, const dw_precision_policy *policy) {
    const dw_scale_rule common = common_rule(policy);
    const int block = common_block(policy);
    /* The last exceptions that keep the model's precision are sensitive layers. Their names must not be words. */
    uint32_t layers = policy->exception_count;
    while (layers > 0 && !dw__layer_is_quantized(&policy->exceptions[layers - 1].layer) &&
           !find_word(policy->exceptions[layers - 1].module))
        layers--;
    DW_RETURN_IF_FAILED(set(root, "format", json_string(FORMAT)));
    DW_RETURN_IF_FAILED(set(root, "version", json_integer(VERSION)));
    DW_RETURN_IF_FAILED(write_precision(root, "default", &policy->layer, common));
    DW_RETURN_IF_FAILED(set(root, "bf16_share", json_real(policy->bf16_share)));
    if (block) DW_RETURN_IF_FAILED(set(root, "block_size", json_integer(block)));
    if (common != DW_SCALE_DEFAULT) {
        const char *word = dw__rule_word(common);
        DW_RETURN_IF_FAILED(set(root, "scale_rule", json_string(word ? word : "rceil")));
    }
    DW_RETURN_IF_FAILED(write_sensitive(root, policy, layers));
    DW_RETURN_IF_FAILED(write_layers(root, policy, layers, common));
    if (policy->fast_accumulation) DW_RETURN_IF_FAILED(set(root, "fast_accumulation", json_true()));
    DW_RETURN_IF_FAILED(set(root, "fallback", json_string(policy->strict ? "strict" : "safe")));
    return write_guard(root, policy);
}

dw_status dw_precision_policy_json(const dw_precision_policy *policy, char **json) {
    if (!json) return dw__fail(DW_INVALID_ARGUMENT, "no place for a precision policy's text");
    *json = NULL;
    DW_RETURN_IF_FAILED(dw__policy_check(policy));
    json_t *root = json_object();
    if (!root) return dw__fail_memory("a precision policy's text", 0);
    dw_status status = write_root(root, policy);
    if (status == DW_OK) status = dw__json_string(root, json);
    json_decref(root);
    return status;
}

/* ---- policies made of others ------------------------------------------------------------------ */

/* Copies a policy by its text, so that the copy owns what the given one points to. */
static dw_status copy_policy(const dw_precision_policy *policy, dw_precision_policy **copy) {
    char *text = NULL;
    *copy = NULL;
    DW_RETURN_IF_FAILED(dw_precision_policy_json(policy, &text));
    dw_status status = dw_precision_policy_parse(text, strlen(text), copy);
    dw_text_free(text);
    return status;
}

static bool is_listed(const char *const *names, uint32_t count, const char *name) {
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0) return true;
    return false;
}

dw_status dw_precision_policy_with_fallen_back(const dw_precision_policy *policy, uint32_t count,
                                               const char *const *modules,
                                               dw_precision_policy **made) {
    *made = NULL;
    DW_RETURN_IF_FAILED(dw__policy_check(policy));
    const size_t most = (size_t)policy->fallen_back_count + count;
    dw_precision_policy more = *policy;
    const char **names = dw__malloc((most + 1) * sizeof *names);
    if (!names) return dw__fail_memory("the layers that have fallen back", most * sizeof *names);
    uint32_t listed = 0;
    for (size_t i = 0; i < most; i++) {
        const char *name = i < policy->fallen_back_count ? policy->fallen_back[i]
                                                         : modules[i - policy->fallen_back_count];
        if (!is_listed(names, listed, name)) names[listed++] = name;
    }
    more.fallen_back = names;
    more.fallen_back_count = listed;
    dw_status status = copy_policy(&more, made);
    dw__free(names);
    return status;
}

dw_status dw_precision_policy_in_bf16(const dw_precision_policy *policy,
                                      dw_precision_policy **made) {
    *made = NULL;
    DW_RETURN_IF_FAILED(dw__policy_check(policy));
    const size_t bytes = (policy->exception_count + 1) * sizeof(dw_precision_exception);
    dw_precision_policy all = *policy;
    dw_precision_exception *exceptions = dw__malloc(bytes);
    if (!exceptions) return dw__fail_memory("a precision policy", bytes);
    if (dw__layer_is_quantized(&all.layer)) all.layer = *dw__bf16_layer();
    for (uint32_t i = 0; i < policy->exception_count; i++) {
        exceptions[i] = policy->exceptions[i];
        if (dw__layer_is_quantized(&exceptions[i].layer)) exceptions[i].layer = *dw__bf16_layer();
    }
    all.exceptions = exceptions;
    all.bf16_share = 0.0;
    all.guard = (dw_precision_guard){0};
    all.fallen_back_count = 0;
    all.fast_accumulation = 0;
    dw_status status = copy_policy(&all, made);
    dw__free(exceptions);
    return status;
}

/* ---- the layers of a graph -------------------------------------------------------------------- */

static dw_status write_bounds(json_t *entry, const dw_precision_policy *policy,
                              const dw_layer_precision *layer) {
    json_t *bounds = json_object();
    DW_RETURN_IF_FAILED(set(entry, "bounds", bounds));
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        if (!dw__operand_is_observed(&layer->operand[i])) continue;
        const double own = dw_operand_snr_bound_db(&layer->operand[i]);
        DW_RETURN_IF_FAILED(
            set(bounds, operand_name(i),
                json_real(policy->guard.snr_db > 0.0 ? policy->guard.snr_db : own)));
    }
    return DW_OK;
}

static dw_status write_layer(json_t *list, const dw_graph *graph, const dw_precision_policy *policy,
                             dw_node n, const dw__layer_choice *choice) {
    static const char *const words[] = {
        [DW__BY_DEFAULT] = "default", [DW__BY_REGION] = "region", [DW__BY_EXCEPTION] = "module",
        [DW__BY_SHARE] = "share",     [DW__KEPT_F64] = "f64",     [DW__KEPT_BF16] = "bf16",
        [DW__BY_GUARD] = "guard"};
    const dw__node_record *node = &graph->nodes.items[n];
    json_t *entry = json_object();
    DW_RETURN_IF_FAILED(append(list, entry));
    DW_RETURN_IF_FAILED(set(entry, "module", json_string(node->module)));
    DW_RETURN_IF_FAILED(set(entry, "region", json_string(dw_region_name(node->region))));
    const dw_dtype dtype = graph->values.items[node->outputs[0]].dtype;
    DW_RETURN_IF_FAILED(set(entry, "dtype", json_string(dw_dtype_name(dtype))));
    DW_RETURN_IF_FAILED(set(entry, "reason", json_string(words[choice->reason])));
    if (choice->reason == DW__BY_EXCEPTION)
        DW_RETURN_IF_FAILED(
            set(entry, "pattern", json_string(policy->exceptions[choice->exception].module)));
    if (!choice->layer) return DW_OK;
    const char *name = dw__layer_name(choice->layer);
    if (name) DW_RETURN_IF_FAILED(set(entry, "name", json_string(name)));
    json_t *operands = json_object();
    DW_RETURN_IF_FAILED(set(entry, "operands", operands));
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        if (dw__is_experts(node->op) && (i == DW_WGRAD_DY || i == DW_WGRAD_X)) continue;
        const dw__operand_words text = dw__operand_text(&choice->layer->operand[i]);
        DW_RETURN_IF_FAILED(set(operands, operand_name(i), json_string(text.text)));
    }
    return policy->guard.every && dw__layer_is_observed(choice->layer) && !dw__is_experts(node->op)
               ? write_bounds(entry, policy, choice->layer)
               : DW_OK;
}

dw_status dw_precision_layers_json(const dw_graph *graph, const dw_precision_policy *policy,
                                   char **json) {
    dw_status status = DW_OK;
    dw_graph *own = NULL;
    dw__layer_choice *choices = NULL;
    json_t *list = json_array();
    if (!json || !graph) {
        json_decref(list);
        return dw__fail(DW_INVALID_ARGUMENT, "the graph, or the place for the text, is NULL");
    }
    *json = NULL;
    if (!list) return dw__fail_memory("the text of layers", 0);
    DW_TRY(dw__policy_check(policy));
    DW_TRY(dw_graph_clone(graph, &own));
    DW_TRY(dw__simplify_graph(&own));
    DW_TRY(dw__choose_layers(own, policy, &choices));
    for (dw_node n = 0; n < dw_graph_node_count(own); n++)
        if (choices[n].reason != DW__NO_LAYER)
            DW_TRY(write_layer(list, own, policy, n, &choices[n]));
    DW_TRY(dw__json_string(list, json));
cleanup:
    json_decref(list);
    dw__free(choices);
    if (own) dw_graph_destroy(own);
    return status;
}
