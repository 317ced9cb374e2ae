#include "runs.h"
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MOST_SIZE = 1 << 26 }; /* bound of any number in a row */

static double number(const lab_csv *table, size_t row, const char *name) {
    double value = strtod(lab_csv_cell(table, row, name), NULL);
    return isfinite(value) ? value : 0;
}

static int whole(const lab_csv *table, size_t row, const char *name, int missing) {
    double value = number(table, row, name);
    return value >= 1 && value <= MOST_SIZE ? (int)(value + 0.5) : missing;
}

/* Fills in the options that a recipe leaves unstated. */
static void habits(const lab_csv *table, size_t row, lab_run *run) {
    const char *notes = lab_csv_cell(table, row, "notes"),
               *source = lab_csv_cell(table, row, "source");
    dw_layout *layout = &run->layout;
    double count;
    int old = layout->framework == DW_FRAMEWORK_MEGATRON_LM;
    /* Fused attention exists in PyTorch since 2.0 (March 2023) and in XLA on GPUs since 2024 (cuDNN's). No GPU before
     * Ampere has it. */
    int year = whole(table, row, "year", 0), capability = run->hardware->capability;
    bool jax = layout->framework == DW_FRAMEWORK_JAX;
    bool early =
        (year > 0 && year < (jax ? 2024 : 2023) && layout->framework != DW_FRAMEWORK_MEGATRON) ||
        (capability > 0 && capability < 80);
    layout->unfused_attention = (old || early) && !lab_says(notes, "FlashAttention") &&
                                !lab_says(notes, "flash-att") && !lab_says(notes, "flash att") &&
                                !lab_says(notes, "flash_att") && !lab_says(notes, "xformers");
    /* Transformer Engine has fused attention for latent attention's keys, wider than 128, on Blackwell since 2.5, with
     * cuDNN 9.11 (its fused_attn.cpp). The recipes of May 2025 are for NeMo 25.04, with version 2.3. */
    double release;
    if (capability >= 100 && run->model.kv_rank && layout->framework == DW_FRAMEWORK_MEGATRON &&
        lab_number_after(notes, "recipe v", &release) && release < 25.07)
        layout->unfused_attention = 1;
    layout->sequence_parallel = !old && layout->framework != DW_FRAMEWORK_PYTORCH;
    layout->overlap_tensor =
        layout->framework == DW_FRAMEWORK_MEGATRON || layout->framework == DW_FRAMEWORK_JAX;
    layout->overlap_data = !old && layout->framework != DW_FRAMEWORK_NANOTRON;
    layout->compiled = (lab_says(source, "torchtitan") && !lab_says(notes, "eager")) ||
                       lab_says(notes, "torch.compile") || lab_says(notes, "compile=True");
    /* CUDA graphs of a mixture's router alone leave most launches to the host. */
    bool graphs = lab_says(notes, "cuda_graph_scope=full") ||
                  (lab_says(notes, "cuda_graph_scope") && lab_says(notes, "'attn'"));
    layout->cuda_graphs =
        (graphs && !lab_says(notes, "cuda_graph_impl=none")) || lab_says(notes, "cuda graphs");
    /* Recipes of NeMo and Megatron-Bridge reduce gradients in BF16 and store them in BF16. */
    if (layout->framework == DW_FRAMEWORK_MEGATRON &&
        (lab_says(notes, "NeMo") || lab_says(source, "NeMo")))
        layout->gradient_bytes = 2;
    if (lab_says(notes, "BF16 moments") || lab_says(notes, "exp-avg-dtype=bf16"))
        layout->optimizer_bytes = 8;   /* with the FP32 copy of the parameters */
    if (lab_says(source, "AutoModel")) /* all gradients in BF16 */
        layout->parameter_bytes = layout->gradient_bytes = 2, layout->optimizer_bytes = 4;
    /* Llama recipes with FSDP checkpoint as many blocks as the memory requires, and call this selective. */
    if (layout->framework == DW_FRAMEWORK_FSDP && layout->recompute == DW_RECOMPUTE_SELECTIVE)
        layout->recompute = DW_RECOMPUTE_AUTO;
    if (lab_number_after(notes, "cpu_offloading_num_layers=", &count) ||
        lab_number_after(notes, "activation offload ", &count))
        layout->offload_layers = (int)count;
    if (lab_number_after(notes, "expert_tensor_parallel_size=", &count) ||
        lab_number_after(notes, "ETP=", &count))
        layout->etp = (int)count;
    layout->overlap_expert = lab_says(notes, "overlap_moe_expert_parallel_comm") ||
                             lab_says(notes, "moe_a2a_overlap=True") ||
                             lab_says(notes, "DualPipe") ||
                             layout->schedule == DW_SCHEDULE_DUALPIPE;
    if (lab_says(lab_csv_cell(table, row, "precision"), "BF16 optimizer")) {
        layout->gradient_bytes = 6; /* a micro-batch's gradients in BF16, and their sum in FP32 */
    } else if (layout->zero_stage > 0 &&
               (lab_says(notes, "Megatron-DeepSpeed") || lab_says(source, "Megatron-DeepSpeed"))) {
        /* DeepSpeed's ZeRO has gradients in half precision, and for the step also the rank's shard of them, flat, in
         * FP32. */
        layout->gradient_bytes = 2;
        layout->optimizer_bytes = 18;
    }
    /* torchtitan compiles the loss like its layers from April 2025 on. Liger's loss and chunked losses store no copies
     * of the logits either. */
    layout->fused_loss =
        (layout->framework == DW_FRAMEWORK_TORCHTITAN && layout->compiled && year >= 2025) ||
        lab_says(notes, "Liger") || lab_says(notes, "fused cross") ||
        lab_says(notes, "cut cross-entropy") || lab_says(notes, "chunked");
    layout->dispatch_once =
        lab_says(notes, "DeepEP") || lab_says(notes, "hybridep") || lab_says(notes, "hybrid-ep");
    if (run->mixture && lab_says(source, "Megatron-Bridge") &&
        !lab_says(notes, "recompute from recipe"))
        lab_bridge_mixture(notes, run->model_name, run->gpu, layout);
    /* Megatron-LM's own default is 0.1, if its arguments are given and none of them says otherwise. */
    layout->dropout = layout->framework == DW_FRAMEWORK_MEGATRON && lab_says(notes, "args:") &&
                      !lab_says(notes, "hidden-dropout") && !run->model.gated;
    if (lab_number_after(notes, "capacity factor", &count) ||
        lab_number_after(notes, "capacity_factor=", &count) ||
        lab_number_after(notes, "capacity-factor=", &count))
        layout->expert_load = count > 0 && count <= 64 ? (int)(100 * count + 0.5) : 0;
}

/* Chooses the largest micro-batch that fits, of at most 16,384 tokens; in a pipeline, one sequence, because a small
 * micro-batch is faster there. */
static int guess_micro_batch(const lab_run *run, int year) {
    dw_layout layout = run->layout;
    int each = layout.global_batch / layout.dp, best = 1;
    if (layout.pp > 1) {
        /* torchtitan used as many micro-batches as stages until April 2025, when it got a setting for their number. */
        bool stages = layout.framework == DW_FRAMEWORK_TORCHTITAN && year > 0 && year < 2025;
        return stages && each % layout.pp == 0 ? each / layout.pp : 1;
    }
    for (int size = 1; size <= each && (double)size * layout.seq_len / layout.cp <= 16384;
         size *= 2) {
        if (each % size) continue;
        dw_prediction prediction;
        layout.micro_batch = size;
        dw_predict_unchecked(&run->model, run->hardware, &layout, &prediction);
        if (size == 1 || prediction.fits) best = size;
    }
    return best;
}

/* NVIDIA's own recipes, which its teams tune. */
static bool is_recipe(const lab_csv *table, size_t row) {
    static const char *const words[] = {"NeMo", "Megatron-Bridge", "MLPerf", "NVIDIA"};
    for (size_t at = 0; at < LAB_COUNT(words); at++)
        if (lab_says(lab_csv_cell(table, row, "source"), words[at]) ||
            lab_says(lab_csv_cell(table, row, "notes"), words[at]))
            return true;
    return false;
}

/* Recipes of Megatron that do not state it interleave, with chunks of two layers or of one. */
static int guess_chunks(const lab_run *run, bool recipe) {
    int layers = run->model.layers, stages = run->layout.pp;
    if (run->layout.framework != DW_FRAMEWORK_MEGATRON || !recipe || layers % stages) return 1;
    int each = layers / stages;
    return each % 2 == 0 ? each / 2 : each;
}

static int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

static dw_status layout_of(lab_runs *runs, size_t row, lab_run *run) {
    const lab_csv *table = &runs->table;
    dw_layout *layout = &run->layout;
    dw_layout_default(layout);
    layout->tp = whole(table, row, "tp", 1);
    layout->pp = whole(table, row, "pp", 1);
    layout->cp = whole(table, row, "cp", 0);
    layout->ep = whole(table, row, "ep", 1);
    layout->dp = whole(table, row, "dp", 0);
    layout->gpus = whole(table, row, "gpus", 0);
    if (!layout->gpus && !layout->dp) {
        run->reason = "gpus and dp are missing";
        return DW_OK;
    }
    layout->seq_len = whole(table, row, "seq_len", 0);
    if (!layout->seq_len) {
        run->reason = "seq_len is missing";
        return DW_OK;
    }
    if (!layout->cp) {
        double ranks = (double)layout->tp * layout->pp * layout->dp;
        layout->cp = ranks > 0 && layout->gpus > ranks && fmod(layout->gpus, ranks) == 0
                         ? (int)(layout->gpus / ranks)
                         : 1;
    }
    /* If the parallel sizes contradict the number of GPUs, the number of GPUs counts: some tables print the ranks that
     * share a copy. */
    double model_ranks = (double)layout->tp * layout->pp * layout->cp;
    if (layout->gpus >= model_ranks) layout->dp = (int)(layout->gpus / model_ranks);
    if (!layout->dp) layout->dp = 1;
    if (!layout->gpus && model_ranks * layout->dp <= MOST_SIZE)
        layout->gpus = (int)(model_ranks * layout->dp);
    if (model_ranks * layout->dp != layout->gpus) {
        run->reason =
            lab_arena_printf(runs->arena, "tp %d x pp %d x cp %d x dp %d are not its %d GPUs",
                             layout->tp, layout->pp, layout->cp, layout->dp, layout->gpus);
        return run->reason ? DW_OK : lab_fail_memory("a reason", 100);
    }
    const char *notes = lab_csv_cell(table, row, "notes");
    layout->framework = lab_framework_of(lab_csv_cell(table, row, "source"), notes,
                                         lab_csv_cell(table, row, "zero_or_fsdp"),
                                         whole(table, row, "year", 0), layout->tp, layout->pp);
    layout->precision = lab_precision_of(lab_csv_cell(table, row, "precision"));
    /* If a GPU does not support GEMMs of this precision, it runs the recipe with the precision that it supports. */
    if (layout->precision == DW_SCHEME_MXFP8 && run->hardware->rate[DW_RATE_MXFP8].value <= 0)
        layout->precision = DW_SCHEME_FP8_TENSOR;
    layout->virtual_stages =
        layout->pp > 1 ? whole(table, row, "vpp", guess_chunks(run, is_recipe(table, row))) : 1;
    const char *schedule = lab_csv_cell(table, row, "schedule");
    layout->schedule = lab_schedule_of(*schedule                        ? schedule
                                       : lab_says(notes, "engine=afab") ? "afab"
                                                                        : "",
                                       layout->virtual_stages);
    lab_sharding_of(lab_csv_cell(table, row, "zero_or_fsdp"), run->hardware->gpus_per_node, layout);
    lab_recompute_of(lab_csv_cell(table, row, "recompute"), run->model.layers, layout);
    habits(table, row, run);
    if (lab_says(notes, "args:") && !lab_says(notes, "sequence-parallel"))
        layout->sequence_parallel = 0;
    if ((int64_t)layout->pp * layout->virtual_stages > run->model.layers + 2)
        layout->virtual_stages =
            run->model.layers / layout->pp > 0 ? run->model.layers / layout->pp : 1;
    /* If the notes name a dispatcher between nodes but no number of expert ranks, the experts use all ranks that
     * divide. */
    int node = run->hardware->gpus_per_node;
    if (run->model.experts && !*lab_csv_cell(table, row, "ep") && lab_says(notes, "DeepEP") &&
        (int64_t)layout->dp * layout->cp % node == 0)
        layout->ep = common_divisor(run->model.experts, layout->dp * layout->cp);
    if (run->model.experts && run->model.experts % layout->ep) layout->ep = 1;
    if (!run->model.experts) layout->ep = 1;
    /* More expert ranks than ranks of a stage are a misprint, or the stages have different sizes. */
    int ranks = layout->gpus / layout->pp / (layout->etp > 1 ? layout->etp : 1);
    while (layout->ep > 1 && ranks % layout->ep) layout->ep /= 2;
    /* Megatron splits experts like other layers unless told otherwise, as Megatron-Bridge's recipes do. Models whose
     * experts are narrower than the model never split them. */
    if (layout->framework == DW_FRAMEWORK_MEGATRON && layout->ep > 1 && layout->tp > 1 &&
        !layout->etp && run->model.expert_ffn >= run->model.hidden &&
        ranks % ((int64_t)layout->ep * layout->tp) == 0 &&
        !lab_says(lab_csv_cell(table, row, "source"), "Bridge"))
        layout->etp = layout->tp;
    layout->micro_batch = whole(table, row, "micro_batch", 0);
    layout->global_batch = whole(table, row, "global_batch_seqs", 0);
    if (!layout->global_batch) layout->global_batch = layout->dp;
    if (!layout->micro_batch)
        layout->micro_batch = guess_micro_batch(run, whole(table, row, "year", 0));
    /* A batch that does not divide is rounded to the nearest whole number of micro-batches. */
    int64_t sequences = (int64_t)layout->dp * layout->micro_batch;
    int64_t times = (layout->global_batch + sequences / 2) / sequences;
    sequences *= times > 0 ? times : 1;
    if (sequences > MOST_SIZE) {
        run->reason = "dp x micro_batch exceeds the largest batch";
        return DW_OK;
    }
    layout->global_batch = (int)sequences;
    if (run->model.heads % layout->tp)
        run->model.heads += layout->tp - run->model.heads % layout->tp;
    if (run->model.heads % run->model.kv_heads) run->model.kv_heads = run->model.heads;
    if (dw_layout_check(&run->model, run->hardware, layout) != DW_OK) {
        run->reason = lab_arena_strdup(runs->arena, dw_last_error());
        return run->reason ? DW_OK : lab_fail_memory("a reason", 100);
    }
    return DW_OK;
}

static lab_memory_meaning meaning_of(const char *notes, const char *source) {
    if (lab_says(notes, "LAST global rank") || lab_says(notes, "last rank"))
        return LAB_MEMORY_ALLOCATED_LAST;
    if (lab_says(notes, "reserved") || lab_says(notes, "torchtitan") ||
        lab_says(source, "torchtitan"))
        return LAB_MEMORY_RESERVED;
    if (lab_says(notes, "nvidia-smi")) return LAB_MEMORY_USED;
    if (lab_says(notes, "max_memory_allocated") || lab_says(notes, "allocated"))
        return LAB_MEMORY_ALLOCATED;
    return LAB_MEMORY_UNSTATED;
}

/* Reads "bubble rate (profiled times)=0.26". */
static double bubble_of(const char *notes) {
    const char *at = strstr(notes, "bubble rate");
    if (!at || !(at = strchr(at, '='))) return -1;
    char *end;
    double value = strtod(at + 1, &end);
    return end > at + 1 && value >= 0 && value < 1 ? value : -1;
}

static dw_status read_row(lab_runs *runs, size_t row) {
    const lab_csv *table = &runs->table;
    lab_run *run = &runs->rows[row];
    const char *notes = lab_csv_cell(table, row, "notes"),
               *group = lab_csv_cell(table, row, "group");
    const char *source = lab_csv_cell(table, row, "source");
    double speed = number(table, row, "tokens_per_s_per_gpu_any");
    if (speed <= 0) speed = number(table, row, "tokens_per_s_per_gpu");
    *run = (lab_run){
        .id = lab_csv_cell(table, row, "id"),
        .group = *group ? group : source,
        .gpu = lab_csv_cell(table, row, "gpu_type"),
        .model_name = lab_csv_cell(table, row, "model"),
        .precision = lab_csv_cell(table, row, "precision"),
        .tokens_per_second = speed > 0 ? speed : 0,
        .memory = fmax(0, number(table, row, "peak_mem_gb")) * 1024 * 1024 * 1024,
        .memory_meaning = meaning_of(notes, source),
        .bubble = bubble_of(notes),
    };
    const char *tier = lab_csv_cell(table, row, "tier");
    bool printed =
        number(table, row, "tokens_per_s_per_gpu") > 0 || number(table, row, "step_time_s") > 0;
    run->scored = printed && (*tier == 'A' || *tier == 'B' || !*tier) &&
                  number(table, row, "superseded") != 1 && number(table, row, "proxy_model") != 1;
    run->layout_known = *tier != 'C';
    const char *reason = lab_run_model(table, row, &run->model);
    if (reason) {
        run->reason = lab_arena_strdup(runs->arena, reason);
        return run->reason ? DW_OK : lab_fail_memory("a reason", 100);
    }
    run->mixture = run->model.experts > 0;
    LAB_RETURN_IF_FAILED(lab_run_machine(runs, row, &run->reason, &run->hardware));
    if (run->reason) return DW_OK;
    LAB_RETURN_IF_FAILED(layout_of(runs, row, run));
    double step = number(table, row, "step_time_s");
    if (!run->reason && run->tokens_per_second <= 0 && step > 0)
        run->tokens_per_second =
            (double)run->layout.global_batch * run->layout.seq_len / step / run->layout.gpus;
    return DW_OK;
}

static bool has_column(const lab_csv *table, const char *name) {
    for (size_t at = 0; at < table->columns; at++)
        if (strcmp(table->names[at], name) == 0) return true;
    return false;
}

/* No row can be predicted without these columns, so a file without them is not a table of runs. */
static dw_status check_columns(const lab_csv *table) {
    static const char *const needed[] = {"layers", "hidden", "gpu_type", "seq_len", "gpus"};
    for (size_t at = 0; at < LAB_COUNT(needed); at++) {
        if (has_column(table, needed[at])) continue;
        if (strcmp(needed[at], "gpus") == 0 && has_column(table, "dp")) continue;
        return lab_fail(DW_PARSE,
                        "the header has no column \"%s\"; a table of runs needs layers, hidden, "
                        "gpu_type, seq_len, and gpus or dp (docs/planner.md lists all columns)",
                        needed[at]);
    }
    return DW_OK;
}

dw_status lab_runs_parse(const char *text, size_t bytes, lab_runs **runs) {
    dw_status status = DW_OK;
    lab_runs *made = lab_calloc(1, sizeof *made);
    *runs = NULL;
    if (!made) return lab_fail_memory("runs", sizeof *made);
    LAB_TRY(lab_csv_parse(text, bytes, &made->table));
    LAB_TRY(check_columns(&made->table));
    made->arena = lab_arena_create();
    made->rows = lab_calloc(made->table.rows + 1, sizeof *made->rows);
    if (!made->arena || !made->rows) {
        status = lab_fail_memory("runs", made->table.rows * sizeof *made->rows);
        goto cleanup;
    }
    for (size_t row = 0; row < made->table.rows; row++) LAB_TRY(read_row(made, row));
    *runs = made;
    made = NULL;
cleanup:
    lab_runs_destroy(made);
    return status;
}

dw_status lab_runs_load(const char *path, lab_runs **runs) {
    enum { MOST = 256 << 20 };
    char *text = NULL;
    size_t bytes = 0;
    *runs = NULL;
    LAB_RETURN_IF_FAILED(lab_file_read(path, MOST, &text, &bytes));
    dw_status status = lab_runs_parse(text, bytes, runs);
    lab_free(text);
    return status == DW_OK ? DW_OK : lab_fail_prefix(status, "\"%s\"", path);
}

void lab_runs_destroy(lab_runs *runs) {
    if (!runs) return;
    for (size_t at = 0; at < runs->machines.count; at++)
        dw_hardware_destroy(runs->machines.items[at].hardware);
    lab_free(runs->machines.items);
    lab_arena_destroy(runs->arena);
    lab_csv_free(&runs->table);
    lab_free(runs->rows);
    lab_free(runs);
}

size_t lab_runs_count(const lab_runs *runs) { return runs->table.rows; }
void lab_run_at(const lab_runs *runs, size_t index, lab_run *run) { *run = runs->rows[index]; }
