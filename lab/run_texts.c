/* Interprets the texts of published tables: framework, sharding, precision and network. Each rule looks for a word that
 * decides; docs/planner.md lists the rules. */
#include "runs.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *find(const char *text, const char *word) {
    size_t length = strlen(word);
    for (; *text; text++)
        if (strncasecmp(text, word, length) == 0) return text;
    return NULL;
}

bool lab_says(const char *text, const char *word) { return find(text, word) != NULL; }

bool lab_number_after(const char *text, const char *word, double *value) {
    for (const char *at = find(text, word); at; at = find(at + 1, word)) {
        const char *from = at + strlen(word);
        char *end;
        while (*from == ' ') from++;
        if (!isdigit((unsigned char)*from)) continue;
        double number = strtod(from, &end);
        if (number > 1 << 26) continue;
        *value = number;
        return true;
    }
    return false;
}

/* Reads the number that ends just before `at`: "1600 Gbps", "8x". */
static bool number_ending(const char *text, const char *at, double *value) {
    while (at > text && (at[-1] == ' ' || at[-1] == '-')) at--;
    const char *from = at;
    while (from > text && (isdigit((unsigned char)from[-1]) || from[-1] == '.')) from--;
    if (from == at) return false;
    *value = strtod(from, NULL);
    return *value <= 1 << 26;
}

bool lab_number_before(const char *text, const char *word, double *value) {
    for (const char *at = find(text, word); at; at = find(at + 1, word))
        if (number_ending(text, at, value)) return true;
    return false;
}

/* "8x200 Gb/s", "4x Omni-Path 100 Gb/s per node", "400 Gb/s per GPU", "1600 Gbps/node". A rate is the node's, with or
 * without a count of adapters, unless the text says "per GPU". If there are several networks, the fastest carries the
 * collectives; the others are for storage and management. */
double lab_network_rate(const char *text, int gpus_per_node) {
    double most = 0;
    for (const char *at = strpbrk(text, "GT"); at; at = strpbrk(at + 1, "GT")) {
        double rate, adapters = 0;
        if (at[1] != 'b' || !number_ending(text, at, &rate) || rate <= 0 || rate > 1e5) continue;
        if (*at == 'T') rate *= 1000;
        const char *begin = at;
        while (begin > text && begin[-1] != ';' && begin[-1] != '|' && begin[-1] != ',') begin--;
        const char *last = NULL;
        for (const char *x = begin; x < at; x++)
            if (*x == 'x' && x > begin && isdigit((unsigned char)x[-1])) last = x;
        if (last) number_ending(text, last, &adapters);
        const char *end = at + strcspn(at, ";|,");
        bool each = false;
        for (const char *x = at; x < end; x++)
            if (strncasecmp(x, "per GPU", 7) == 0) each = true;
        double node = each ? rate * gpus_per_node : adapters >= 1 ? rate * adapters : rate;
        bool other = false;
        for (const char *x = begin; x < at; x++)
            if (strncasecmp(x, "Storage", 7) == 0 || strncasecmp(x, "Management", 10) == 0)
                other = true;
        if (!other && node > most) most = node;
    }
    return most * 1e9 / 8 / gpus_per_node;
}

dw_framework lab_framework_of(const char *source, const char *notes, const char *sharding, int year,
                              int tp, int pp) {
    static const struct {
        const char *word;
        dw_framework framework;
    } words[] = {
        {"MaxText", DW_FRAMEWORK_JAX},
        {"Paxml", DW_FRAMEWORK_JAX},
        {"JAX", DW_FRAMEWORK_JAX},
        {"Levanter", DW_FRAMEWORK_JAX},
        {"Alpa ", DW_FRAMEWORK_JAX},
        {"EasyLM", DW_FRAMEWORK_JAX},
        {"T5X", DW_FRAMEWORK_JAX},
        {"GSPMD", DW_FRAMEWORK_JAX},
        {"nanotron", DW_FRAMEWORK_NANOTRON},
        {"torchtitan", DW_FRAMEWORK_TORCHTITAN},
        {"FSDP2", DW_FRAMEWORK_TORCHTITAN},
        {"torchtune", DW_FRAMEWORK_TORCHTITAN},
        {"Megatron-DeepSpeed", DW_FRAMEWORK_MEGATRON_LM},
        {"GPT-NeoX", DW_FRAMEWORK_MEGATRON_LM},
        {"metaseq", DW_FRAMEWORK_FSDP},
        {"Gigatron", DW_FRAMEWORK_MEGATRON},
        {"HAI-LLM", DW_FRAMEWORK_MEGATRON},
        {"llm-foundry", DW_FRAMEWORK_FSDP},
        {"InternEvo", DW_FRAMEWORK_PYTORCH},
        {"NeMo", DW_FRAMEWORK_MEGATRON},
        {"MLPerf", DW_FRAMEWORK_MEGATRON},
        {"Megatron", DW_FRAMEWORK_MEGATRON},
        {"FSDP", DW_FRAMEWORK_FSDP},
        {"DeepSpeed", DW_FRAMEWORK_DEEPSPEED},
        {"fully shard", DW_FRAMEWORK_FSDP},
        {"full shard", DW_FRAMEWORK_FSDP},
        {"FULL_SHARD", DW_FRAMEWORK_FSDP},
        {"HYBRID_SHARD", DW_FRAMEWORK_FSDP},
        {"HSDP", DW_FRAMEWORK_FSDP},
        {"MosaicML", DW_FRAMEWORK_FSDP},
        {"ds_z", DW_FRAMEWORK_DEEPSPEED},
        {"ZeRO-3", DW_FRAMEWORK_DEEPSPEED},
        {"ZeRO3", DW_FRAMEWORK_DEEPSPEED},
        {"stage 3", DW_FRAMEWORK_DEEPSPEED},
    };
    const char *texts[] = {notes, source, sharding};
    dw_framework found = tp > 1 || pp > 1 ? DW_FRAMEWORK_MEGATRON : DW_FRAMEWORK_PYTORCH;
    for (size_t at = 0; at < LAB_COUNT(words); at++) {
        bool says = false;
        for (size_t text = 0; text < LAB_COUNT(texts); text++)
            says = says || lab_says(texts[text], words[at].word);
        if (!says) continue;
        found = words[at].framework;
        break;
    }
    /* FSDP2 under Transformer Engine's kernels is Megatron's layer; adapters run on Hugging Face's. */
    if (found == DW_FRAMEWORK_TORCHTITAN && lab_says(notes, "kernels TE") &&
        !lab_says(notes, "LoRA"))
        found = DW_FRAMEWORK_MEGATRON;
    /* Megatron-LM had no fused attention of its own until 2024; NVIDIA's recipes used Transformer Engine's from 2023
     * on. */
    bool recipe = lab_says(source, "NeMo") || lab_says(notes, "NeMo") ||
                  lab_says(source, "MLPerf") || lab_says(notes, "MLPerf");
    if (found == DW_FRAMEWORK_MEGATRON && year > 0 && year < (recipe ? 2023 : 2024))
        found = DW_FRAMEWORK_MEGATRON_LM;
    return found;
}

dw_scheme lab_precision_of(const char *text) {
    static const struct {
        const char *word;
        dw_scheme precision;
    } words[] = {
        {"NVFP4", DW_SCHEME_NVFP4},
        {"FP4", DW_SCHEME_NVFP4},
        {"MXFP8", DW_SCHEME_MXFP8},
        {"FP8-MX", DW_SCHEME_MXFP8},
        {"rowwise", DW_SCHEME_FP8_ROW},
        {"row-wise", DW_SCHEME_FP8_ROW},
        {"per-row", DW_SCHEME_FP8_ROW},
        {"axiswise", DW_SCHEME_FP8_ROW},
        {"FP8-SC", DW_SCHEME_FP8_BLOCK},
        {"subchannel", DW_SCHEME_FP8_BLOCK},
        {"sub-channel", DW_SCHEME_FP8_BLOCK},
        {"blockwise", DW_SCHEME_FP8_BLOCK},
        {"block-wise", DW_SCHEME_FP8_BLOCK},
        {"block scal", DW_SCHEME_FP8_BLOCK},
        {"128x128", DW_SCHEME_FP8_BLOCK},
        {"1x128", DW_SCHEME_FP8_BLOCK},
        {"FP8", DW_SCHEME_FP8_TENSOR},
        {"float8", DW_SCHEME_FP8_TENSOR},
        {"E4M3", DW_SCHEME_FP8_TENSOR},
        {"BF16", DW_SCHEME_BF16},
        {"FP16", DW_SCHEME_BF16},
        {"FP32", DW_SCHEME_FP32},
        {"TF32", DW_SCHEME_FP32},
    };
    /* In "BF16, FP8 for stored activations" FP8 describes storage or communication, not the GEMMs. */
    bool half = strncasecmp(text, "bf16", 4) == 0 || strncasecmp(text, "fp16", 4) == 0;
    if (half &&
        (lab_says(text, "storage") || lab_says(text, "stored") || lab_says(text, "dispatch")))
        return DW_SCHEME_BF16;
    for (size_t at = 0; at < LAB_COUNT(words); at++)
        if (lab_says(text, words[at].word)) return words[at].precision;
    return DW_SCHEME_BF16;
}

/* Returns whether the text contains one of `words`, which end with NULL. */
static bool says_one(const char *text, const char *const *words) {
    for (; *words; words++)
        if (lab_says(text, *words)) return true;
    return false;
}

/* Returns whether the whole text equals one of the words, ignoring case. */
static bool is_one(const char *text, const char *const *words) {
    for (; *words; words++)
        if (strcasecmp(text, *words) == 0) return true;
    return false;
}

/* Reads "every 2nd", "1 of 4 layers", "50% of layers" or "5 layers/stage" as layers of a stage; 0 if no number is
 * stated. */
static double layers_of_stage(const char *text, double each) {
    double number, of;
    if (lab_number_after(text, "full:", &number)) return number;
    if (lab_number_after(text, "every ", &number) && number >= 1) return each / number;
    if (lab_number_before(text, " of ", &number) && lab_number_after(text, " of ", &of) &&
        of >= 1 && number <= of)
        return each * number / of;
    if (lab_number_before(text, "%", &number) && number <= 100) return each * number / 100;
    if (lab_says(text, "block") && lab_number_before(text, "layer", &number)) return number;
    return 0;
}

void lab_recompute_of(const char *text, double layers, dw_layout *layout) {
    static const char *const unsaid[] = {"", "-", "n/a", "na", "?", "unknown", "auto", NULL};
    static const char *const off[] = {"no", "off", "false", "0", "disabled", NULL};
    static const char *const none[] = {"none",
                                       "no recompute",
                                       "no activation",
                                       "no checkpoint",
                                       "no gradient",
                                       "no AC",
                                       "without",
                                       "=false",
                                       ": false",
                                       "=off",
                                       "=none",
                                       "not used",
                                       "everything_saveable",
                                       NULL};
    static const char *const parts[] = {
        "selective",    "gelu",    "norm",     "attn",    "act_fn", "moe_act",
        "mlp",          "mla",     "core",     "dots",    "save_",  "except",
        "fine-grained", "minimal", "op-level", "modules", "swiglu", NULL};
    double each = layers / layout->pp, some;
    layout->recompute = DW_RECOMPUTE_AUTO;
    layout->recompute_layers = 0;
    if (is_one(text, unsaid) || lab_says(text, "not stated") || lab_says(text, "not said")) return;
    if (lab_says(text, "selective layer")) { /* every second one */
        layout->recompute = DW_RECOMPUTE_FULL;
        layout->recompute_layers = (int)(each / 2 + 0.5);
    } else if (is_one(text, off) || (says_one(text, none) && !lab_says(text, "selective"))) {
        layout->recompute = DW_RECOMPUTE_NONE;
    } else if (says_one(text, parts) && !(lab_says(text, "full") && !lab_says(text, "selective"))) {
        layout->recompute = DW_RECOMPUTE_SELECTIVE;
    } else {
        /* "full", "yes", and checkpoints of activations, gradients, blocks or layers */
        layout->recompute = DW_RECOMPUTE_FULL;
        some = layers_of_stage(text, each);
        if (some >= 0.5 && some < each) layout->recompute_layers = (int)(some + 0.5);
        if (lab_says(text, "partial")) layout->recompute = DW_RECOMPUTE_AUTO;
    }
}

/* Reads "ZeRO-2", "zero stage: 1", "ds_z3", "stage2" or "zero_2" as a ZeRO stage; -1 if none is stated. */
static int zero_stage_of(const char *text) {
    static const char *const words[] = {"zero", "stage", "_z", "-z", " z", NULL};
    for (const char *const *word = words; *word; word++)
        for (const char *at = find(text, *word); at; at = find(at + 1, *word)) {
            const char *digit = at + strlen(*word);
            while (*digit && strchr(" -_:=", *digit)) digit++;
            if (strncasecmp(digit, "stage", 5) == 0)
                for (digit += 5; *digit && strchr(" -_:=", *digit);) digit++;
            if (*digit >= '0' && *digit <= '3' && !isdigit((unsigned char)digit[1]) &&
                digit[1] != '.')
                return *digit - '0';
        }
    return -1;
}

void lab_sharding_of(const char *text, int gpus_per_node, dw_layout *layout) {
    static const char *const whole[] = {
        "FSDP",          "HSDP",          "FULL_SHARD",  "full shard",
        "fully sharded", "fully-sharded", "fully_shard", "SHARD_GRAD_OP",
        "HYBRID_SHARD",  "Gemini",        NULL};
    static const char *const no[] = {"replicated",  "none",      "no shard", "NO_SHARD",
                                     "not sharded", "unsharded", NULL};
    static const char *const optimizer[] = {"dist",
                                            "sharded optimizer",
                                            "optimizer shard",
                                            "optimizer state shard",
                                            "optimizer-state shard",
                                            "ZeRO",
                                            "P_os",
                                            NULL};
    static const char *const group[] = {"shard=",
                                        "FSDP=",
                                        "FSDP-",
                                        "zero1=",
                                        "groups of",
                                        "shard group size",
                                        "shard degree",
                                        "shard_degree=",
                                        "shard size",
                                        "shard groups",
                                        NULL};
    double number;
    switch (layout->framework) { /* texts that state nothing mean the framework's default */
    case DW_FRAMEWORK_MEGATRON:
    case DW_FRAMEWORK_NANOTRON:
    case DW_FRAMEWORK_PYTORCH: layout->zero_stage = 1; break;
    case DW_FRAMEWORK_MEGATRON_LM: layout->zero_stage = 0; break;
    default: layout->zero_stage = 3; break;
    }
    if (layout->framework != DW_FRAMEWORK_MEGATRON && (layout->pp > 1 || layout->tp > 1) &&
        layout->zero_stage == 3 && layout->framework != DW_FRAMEWORK_JAX)
        layout->zero_stage = lab_says(text, "FSDP") ? 3 : 1;
    const int stage = zero_stage_of(text);
    const bool of_optimizer = says_one(text, optimizer),
               replicated = lab_says(text, "DDP") || lab_says(text, "data parallel") ||
                            lab_says(text, "data-parallel");
    if (says_one(text, whole) || (stage < 0 && lab_says(text, "os+g+p")))
        layout->zero_stage = 3;
    else if (stage >= 0)
        layout->zero_stage = stage;
    else if (lab_says(text, "os+g"))
        layout->zero_stage = 2;
    else if (says_one(text, no) || strcasecmp(text, "no") == 0 || (replicated && !of_optimizer))
        layout->zero_stage = 0;
    else if (of_optimizer)
        layout->zero_stage = 1;
    if (lab_says(text, "SHARD_GRAD_OP") || lab_says(text, "no reshard") ||
        lab_says(text, "reshard_after_forward=False") || lab_says(text, "reshard=0"))
        layout->reshard = 0;
    if (lab_says(text, "offload") && !lab_says(text, "no offload")) layout->offload_optimizer = 1;
    int64_t ranks = (int64_t)layout->dp * layout->cp;
    double shard = 0;
    for (const char *const *word = group; *word && shard == 0; word++)
        if (lab_number_after(text, *word, &number)) shard = number;
    if (shard == 0 && lab_says(text, "HSDP") && lab_number_after(text, "x", &number))
        shard = number; /* replicas x shards */
    if (shard == 0 && (lab_says(text, "HSDP") || lab_says(text, "HYBRID"))) shard = gpus_per_node;
    if (shard >= 1 && shard < ranks && ranks % (int)shard == 0) layout->shard = (int)shard;
}

dw_pipeline_schedule lab_schedule_of(const char *text, int virtual_stages) {
    if (lab_says(text, "dualpipe")) return DW_SCHEDULE_DUALPIPE;
    if (lab_says(text, "zb-2p") || lab_says(text, "zb-h2")) return DW_SCHEDULE_ZB_H2;
    if (lab_says(text, "zb-v")) return DW_SCHEDULE_ZB_V;
    if (lab_says(text, "zb")) return DW_SCHEDULE_ZB_H1;
    if (lab_says(text, "gpipe") || lab_says(text, "afab")) return DW_SCHEDULE_GPIPE;
    return virtual_stages > 1 ? DW_SCHEDULE_INTERLEAVED : DW_SCHEDULE_1F1B;
}

/* scripts/performance of Megatron-Bridge, tags v0.1.0rc4 (25.09), v0.2.0 (25.11), v0.3.0 (26.02) and v0.4.0 (26.04). */
void lab_bridge_mixture(const char *notes, const char *model, const char *gpu, dw_layout *layout) {
    double release = 0;
    if (!lab_number_after(notes, "NeMo container ", &release)) return;
    const bool deepseek = lab_says(model, "DeepSeek"), qwen = lab_says(model, "Qwen3"),
               hopper = lab_says(gpu, "H100"),
               rack = lab_says(gpu, "GB200") || lab_says(gpu, "GB300");
    if (release < 25.10) {
        /* Experts are padded to a capacity of 1.0, except DeepSeek-V3's on H100. Qwen3's layers are captured whole on
         * GB200, and on B200 those of 30B. */
        const bool padded = lab_says(notes, "token-drop");
        layout->padded_experts = padded;
        layout->cuda_graphs =
            padded && qwen && (rack || (lab_says(gpu, "B200") && lab_says(model, "30B")));
    } else if (rack || (deepseek && release >= 26.02)) {
        layout->dispatch_once = 1; /* HybridEP */
    }
    if (deepseek && hopper) layout->dispatch_once = layout->overlap_expert = 1; /* DeepEP */
    if (qwen && hopper && release > 25.10) layout->overlap_expert = 1;
}
