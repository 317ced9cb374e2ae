/* Writes a plan as text for people. */
#include "plan/plan_text.h"
#include "plan/plan_fields.h"
#include "plan/planner_internal.h"
#include <math.h>
#include <stdlib.h>

static const double GIB = 1024.0 * 1024.0 * 1024.0;

/* An explanation omits differences below this part of a step. */
static const double PART_LEAST = 0.001;
enum { PARTS_MOST = 4 };

dw_status dw__layout_words(const dw_layout *l, dw__text *text) {
    const struct {
        const char *name;
        int value, plain;
    } sizes[] = {
        {"tp", l->tp, 1}, {"cp", l->cp, 1}, {"pp", l->pp, 1}, {"dp", l->dp, 0}, {"ep", l->ep, 1}};
    const char *between = "";
    for (size_t at = 0; at < DW_COUNT(sizes); at++) {
        if (sizes[at].value == sizes[at].plain) continue;
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, "%s%s %d", between, sizes[at].name, sizes[at].value));
        between = ", ";
    }
    if (l->attention_tp && l->attention_tp != l->tp)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", attention's tp %d", l->attention_tp));
    if (l->ep > 1 && l->etp > 1) DW_RETURN_IF_FAILED(dw__text_printf(text, ", etp %d", l->etp));
    if (l->zero_stage) DW_RETURN_IF_FAILED(dw__text_printf(text, ", ZeRO-%d", l->zero_stage));
    if (l->zero_stage && l->shard) DW_RETURN_IF_FAILED(dw__text_printf(text, " over %d", l->shard));
    if (l->zero_stage == 3 && !l->reshard) DW_RETURN_IF_FAILED(dw__text_printf(text, " kept"));
    DW_RETURN_IF_FAILED(dw__text_printf(text, ", micro-batch %d", l->micro_batch));
    if (l->pp > 1)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", %s", dw_pipeline_schedule_name(l->schedule)));
    if (l->virtual_stages > 1)
        DW_RETURN_IF_FAILED(dw__text_printf(text, " x%d", l->virtual_stages));
    if (l->pp > 1 && l->first_stage_layers > 0)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", %g layers first", l->first_stage_layers));
    if (l->pp > 1 && l->last_stage_layers > 0)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", %g last", l->last_stage_layers));
    if (l->recompute != DW_RECOMPUTE_NONE)
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, ", recompute %s", dw_recompute_name(l->recompute)));
    if (l->recompute == DW_RECOMPUTE_FULL && l->recompute_layers)
        DW_RETURN_IF_FAILED(dw__text_printf(text, " %d layers", l->recompute_layers));
    if (l->offload_layers)
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, ", activations of %d layers on the host", l->offload_layers));
    if (l->offload_optimizer) DW_RETURN_IF_FAILED(dw__text_printf(text, ", optimizer on the host"));
    return dw__text_printf(text, ", %s", dw_scheme_name(l->precision));
}

/* Writes 124000000 as "124 million". */
static dw_status put_count(double value, dw__text *text) {
    static const char *const names[] = {"", " thousand", " million", " billion", " trillion"};
    size_t at = 0;
    while (value >= 999.5 && at + 1 < DW_COUNT(names)) value /= 1000, at++;
    return dw__text_printf(text, "%.*f%s", at > 0 && value < 99.95 ? 1 : 0, value, names[at]);
}

/* Writes 16384 as "16,384". */
static dw_status put_integer(int value, dw__text *text) {
    if (value < 1000) return dw__text_printf(text, "%d", value);
    DW_RETURN_IF_FAILED(put_integer(value / 1000, text));
    return dw__text_printf(text, ",%03d", value % 1000);
}

dw_status dw__remark_words(const dw_autoplan *plan, dw__remark remark, dw__text *text) {
    const dw_layout *l = &plan->layout;
    if (remark == DW__REMARK_FRAMEWORK && l->framework == DW_FRAMEWORK_OWN)
        return dw__text_printf(
            text,
            "framework deepwell: training on %s is not built yet, so it cannot run this layout; "
            "plan for one that can with framework=megatron, torchtitan, fsdp or deepspeed",
            l->gpus > 1 ? "several GPUs" : "a GPU");
    if (remark == DW__REMARK_POSITIONS && plan->model.positions > 0 &&
        l->seq_len > plan->model.positions) {
        DW_RETURN_IF_FAILED(dw__text_printf(text, "the model has "));
        DW_RETURN_IF_FAILED(put_integer(plan->model.positions, text));
        DW_RETURN_IF_FAILED(dw__text_printf(text, " positions, fewer than the "));
        DW_RETURN_IF_FAILED(put_integer(l->seq_len, text));
        return dw__text_printf(text,
                               " tokens of a sequence; to run it, give the model a longer table");
    }
    return DW_OK;
}

static dw_status put_remarks(const dw_autoplan *plan, dw__text *text) {
    for (int at = 0; at < DW__REMARKS; at++) {
        dw__text words = {0};
        dw_status status = dw__remark_words(plan, (dw__remark)at, &words);
        if (status == DW_OK && words.length)
            status = dw__text_printf(text, "%-12s%s\n", "Note", words.text);
        dw__text_free(&words);
        if (status != DW_OK) return status;
    }
    return DW_OK;
}

typedef struct part {
    const char *name;
    double value;
} part;

static int by_size(const void *left, const void *right) {
    const part *a = left, *b = right;
    double x = fabs(a->value), y = fabs(b->value);
    return x > y ? -1 : x < y;
}

/* Lists the parts of a structure, largest first. */
static size_t parts_of(const dw__field_list list, const void *structure, const void *less,
                       part *parts) {
    for (size_t at = 0; at < list.count; at++) {
        parts[at].name = list.fields[at].name;
        parts[at].value = dw__field_real(structure, &list.fields[at]) -
                          (less ? dw__field_real(less, &list.fields[at]) : 0);
    }
    qsort(parts, list.count, sizeof *parts, by_size);
    return list.count;
}

enum { FIELDS_MOST = sizeof(dw_time_parts) / sizeof(double) };

dw_status dw__loss_words(const dw_prediction *from, const dw_prediction *other, dw__text *text) {
    part parts[FIELDS_MOST];
    size_t count = parts_of(dw__time_fields, &other->time, &from->time, parts), said = 0;
    for (size_t at = 0; at < count && said < PARTS_MOST; at++) {
        double change = parts[at].value / from->seconds;
        if (!(fabs(change) >= PART_LEAST)) continue;
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, "%s%+.1f%% %s", said ? ", " : "", 100 * change, parts[at].name));
        said++;
    }
    return said ? DW_OK : dw__text_printf(text, "as fast");
}

/* Memory that the allocator cannot give back. */
static double needed(const dw_prediction *p) { return p->used - (p->reserved - p->allocated); }

dw_status dw__tightest_words(const dw_layout *layout, const dw_prediction *prediction,
                             dw__text *text) {
    part parts[FIELDS_MOST];
    /* the GPU has enough memory, so the host lacks it */
    if (needed(prediction) <= prediction->capacity)
        return dw__text_printf(text,
                               "the host's memory: %.1f GiB for each GPU, with %.1f for "
                               "activations and %.1f for the optimizer; it has %.1f GiB",
                               (prediction->host_activations + prediction->host_optimizer) / GIB,
                               prediction->host_activations / GIB, prediction->host_optimizer / GIB,
                               prediction->host_capacity / GIB);
    parts_of(dw__memory_fields, &prediction->memory, NULL, parts);
    DW_RETURN_IF_FAILED(dw__text_printf(text, "%s: %.1f of the %.1f GiB that each GPU",
                                        parts[0].name, parts[0].value / GIB,
                                        needed(prediction) / GIB));
    if (layout->pp > 1)
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, " of stage %d (of %d)", prediction->heaviest_stage, layout->pp));
    return dw__text_printf(text, " would need; it has %.1f GiB", prediction->capacity / GIB);
}

/* ---- the plan ------------------------------------------------------------------------------- */

static dw_status put_label(const char *label, dw__text *text) {
    return dw__text_printf(text, "%-12s", label);
}

static dw_status put_seconds(double seconds, dw__text *text) {
    return seconds < 1 ? dw__text_printf(text, "%.1f ms", 1e3 * seconds)
                       : dw__text_printf(text, "%.2f s", seconds);
}

static dw_status put_time(const dw_prediction *p, dw__text *text) {
    part parts[FIELDS_MOST];
    size_t count = parts_of(dw__time_fields, &p->time, NULL, parts);
    const char *between = "";
    DW_RETURN_IF_FAILED(put_label("Time", text));
    for (size_t at = 0; at < count; at++) {
        if (parts[at].value < PART_LEAST * p->seconds) continue;
        DW_RETURN_IF_FAILED(dw__text_printf(text, "%s%s %.1f%%", between, parts[at].name,
                                            100 * parts[at].value / p->seconds));
        between = ", ";
    }
    return dw__text_printf(text, "\n");
}

static dw_status put_memory(const dw_autoplan *plan, dw__text *text) {
    const dw_layout *layout = &plan->layout;
    const dw_prediction *p = &plan->prediction;
    part parts[FIELDS_MOST];
    dw_memory_parts memory = p->memory;
    memory.overhead -= p->used - needed(p);
    size_t count = parts_of(dw__memory_fields, &memory, NULL, parts);
    DW_RETURN_IF_FAILED(put_label("Memory", text));
    DW_RETURN_IF_FAILED(
        dw__text_printf(text, "%.1f of %.1f GiB", needed(p) / GIB, p->capacity / GIB));
    if (layout->pp > 1)
        DW_RETURN_IF_FAILED(dw__text_printf(text, " on a GPU of stage %d", p->heaviest_stage));
    if (plan->reserve > 0)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", %.1f more left free", plan->reserve / GIB));
    const char *between = ": ";
    for (size_t at = 0; at < count; at++) {
        if (parts[at].value < 0.005 * GIB) continue;
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, "%s%s %.1f", between, parts[at].name, parts[at].value / GIB));
        between = ", ";
    }
    return dw__text_printf(text, "\n");
}

static dw_status put_host(const dw_prediction *p, dw__text *text) {
    double sum = p->host_optimizer + p->host_activations;
    if (sum <= 0) return DW_OK;
    DW_RETURN_IF_FAILED(put_label("Host", text));
    DW_RETURN_IF_FAILED(
        p->host_capacity > 0
            ? dw__text_printf(text, "%.1f of %.1f GiB of each GPU's share:", sum / GIB,
                              p->host_capacity / GIB)
            : dw__text_printf(
                  text, "%.1f GiB for each GPU; the hardware states no host_memory:", sum / GIB));
    return dw__text_printf(text, " activations %.1f, optimizer %.1f\n", p->host_activations / GIB,
                           p->host_optimizer / GIB);
}

/* Returns the links that join `size` ranks `stride` apart. */
static const char *fabric_of(const dw_autoplan *plan, int64_t size, int64_t stride) {
    int domain = dw__domain_of(plan->hardware, plan->layout.gpus);
    int64_t span = size * stride;
    int linked = plan->hardware->gpus_per_domain > 1;
    if (stride >= domain) return "across the network";
    if (span <= domain && (plan->layout.gpus <= domain || domain % span == 0))
        return linked ? "within NVLink" : "within a node";
    return linked ? "across NVLink and network" : "across nodes";
}

/* Neighbouring ranks have the fastest links and serve the axis with the most traffic. Expert groups lie across the
 * tensor, context and data axes. */
static dw_status put_ranks(const dw_autoplan *plan, dw__text *text) {
    const dw_layout *l = &plan->layout;
    int etp = l->etp ? l->etp : 1;
    const struct {
        const char *name;
        int64_t size, stride;
    } axes[] = {{"tensor", l->tp, 1},
                {"context", l->cp, l->tp},
                {"expert", l->ep, etp},
                {"data", l->dp, (int64_t)l->tp * l->cp},
                {"pipeline", l->pp, (int64_t)l->tp * l->cp * l->dp}};
    const char *innermost = NULL, *between = "";
    if (l->gpus == 1) return DW_OK;
    DW_RETURN_IF_FAILED(put_label("Ranks", text));
    for (size_t at = 0; at < DW_COUNT(axes); at++) {
        if (axes[at].size == 1) continue;
        DW_RETURN_IF_FAILED(dw__text_printf(text, "%s%d %s %s", between, (int)axes[at].size,
                                            axes[at].name,
                                            fabric_of(plan, axes[at].size, axes[at].stride)));
        between = ", ";
        if (!innermost && at != 2) innermost = axes[at].name;
    }
    DW_RETURN_IF_FAILED(dw__text_printf(text, "; %s innermost", innermost));
    int domain = dw__domain_of(plan->hardware, l->gpus);
    if (l->gpus > domain && plan->hardware->gpus_per_domain > 1)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", %d GPUs of each domain of %d", domain,
                                            plan->hardware->gpus_per_domain));
    if (l->gpus > domain && plan->hardware->rails > 0)
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, ", %d rails of each node", plan->hardware->rails));
    return dw__text_printf(text, "\n");
}

static dw_status put_others(const char *title, const dw_autoplan_other *others, uint32_t count,
                            dw__text *text) {
    if (!count) return DW_OK;
    DW_RETURN_IF_FAILED(dw__text_printf(text, "\n%s\n", title));
    for (uint32_t at = 0; at < count; at++) {
        const dw_autoplan_other *other = &others[at];
        if (other->found)
            DW_RETURN_IF_FAILED(dw__text_printf(text, "  %+6.1f%%  %s\n           %s\n",
                                                100 * other->loss, other->name, other->why));
        else
            DW_RETURN_IF_FAILED(
                dw__text_printf(text, "     none  %s\n           %s\n", other->name, other->why));
    }
    return DW_OK;
}

static dw_status put_kernels(const dw_autoplan *plan, dw__text *text) {
    if (!plan->kernel_count) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__text_printf(text, "\nKernels: predicted rate in this plan, and measured rate alone\n"));
    for (uint32_t at = 0; at < plan->kernel_count; at++) {
        const dw_autoplan_kernel *kernel = &plan->kernels[at];
        DW_RETURN_IF_FAILED(dw__text_printf(text, "  %-18s %6.0f TFLOP/s  %s\n", kernel->operation,
                                            kernel->predicted / 1e12, kernel->kernel));
        if (kernel->measured > 0)
            DW_RETURN_IF_FAILED(dw__text_printf(text, "%36s alone %.0f TFLOP/s, measured on %s\n",
                                                "", kernel->measured / 1e12, kernel->source));
    }
    return DW_OK;
}

static dw_status put_step(const dw_autoplan *plan, dw__text *text) {
    const dw_prediction *p = &plan->prediction;
    const dw_rate rate = dw__rate_of(plan->layout.precision);
    const double peak = plan->hardware->rate[rate].value,
                 bf16 = plan->hardware->rate[DW_RATE_BF16].value;
    const double tflops = p->model_flops / 1e12;
    DW_RETURN_IF_FAILED(put_label("Step", text));
    DW_RETURN_IF_FAILED(put_seconds(p->seconds, text));
    DW_RETURN_IF_FAILED(
        dw__text_printf(text, ", %.0f tokens/s on each GPU, %.*f TFLOP/s, MFU %.1f%%",
                        p->tokens_per_second, tflops < 10 ? 2 : 0, tflops, 100 * p->mfu));
    /* MFU refers to the BF16 rate, which lower precisions exceed */
    if (rate != DW_RATE_BF16 && peak > 0)
        DW_RETURN_IF_FAILED(dw__text_printf(text, " of the BF16 peak, %.1f%% of the %s peak",
                                            100 * p->mfu * bf16 / peak, dw_rate_name(rate)));
    return dw__text_printf(text, "\n");
}

/* Lists layouts that are predicted to be faster but have unmeasured features. */
static dw_status put_bolder(const dw_autoplan *plan, dw__text *text) {
    if (!plan->bolder_count) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__text_printf(text, "\nBolder: predicted to be faster, with features that have no "
                              "measurements (--bold takes the first)\n"));
    for (uint32_t at = 0; at < plan->bolder_count; at++)
        DW_RETURN_IF_FAILED(dw__text_printf(text, "  %+6.1f%%  %s\n           not measured: %s\n",
                                            100 * plan->bolder[at].loss, plan->bolder[at].name,
                                            plan->bolder[at].unmeasured));
    return DW_OK;
}

static dw_status put_head(const dw_autoplan *plan, dw__text *text) {
    const dw_layout *l = &plan->layout;
    DW_RETURN_IF_FAILED(put_label("Model", text));
    DW_RETURN_IF_FAILED(
        dw__text_printf(text, "%s, ", *plan->model_name ? plan->model_name : "unnamed"));
    DW_RETURN_IF_FAILED(put_count(dw_model_sizes_parameters(&plan->model), text));
    DW_RETURN_IF_FAILED(dw__text_printf(text, " parameters; a step is "));
    DW_RETURN_IF_FAILED(put_integer(l->global_batch, text));
    DW_RETURN_IF_FAILED(dw__text_printf(text, " sequences of "));
    DW_RETURN_IF_FAILED(put_integer(l->seq_len, text));
    DW_RETURN_IF_FAILED(dw__text_printf(text, " tokens\n"));
    DW_RETURN_IF_FAILED(put_label("Hardware", text));
    DW_RETURN_IF_FAILED(put_integer(l->gpus, text));
    DW_RETURN_IF_FAILED(dw__text_printf(text, " x %s", plan->hardware->name));
    int joined = plan->hardware->gpus_per_domain;
    if (l->gpus > 1 && joined <= 1)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", none joined by NVLink"));
    else if (l->gpus > 1 && joined < l->gpus)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", joined by NVLink in groups of %d", joined));
    else if (l->gpus > 1)
        DW_RETURN_IF_FAILED(dw__text_printf(text, ", all joined by NVLink"));
    DW_RETURN_IF_FAILED(dw__text_printf(text, "\n"));
    DW_RETURN_IF_FAILED(put_label(plan->prediction.fits ? "Layout" : "Nearest", text));
    DW_RETURN_IF_FAILED(dw__layout_words(l, text));
    DW_RETURN_IF_FAILED(dw__text_printf(text, "\n"));
    if (*plan->unmeasured)
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, "%-12snot measured: %s\n", "Bold", plan->unmeasured));
    return put_remarks(plan, text);
}

static dw_status put_no_fit(const dw_autoplan *plan, dw__text *text) {
    DW_RETURN_IF_FAILED(put_label("Fits", text));
    if (!*plan->tightest) return dw__text_printf(text, "no\n");
    DW_RETURN_IF_FAILED(
        dw__text_printf(text, "no layout does. The largest need is %s\n", plan->tightest));
    DW_RETURN_IF_FAILED(put_label("Needed", text));
    if (!plan->gpus_needed)
        return dw__text_printf(text, "no number of these GPUs up to %d suffices\n",
                               DW_HARDWARE_MOST_GPUS);
    return dw__text_printf(text, "%d of these GPUs, on which a layout fits\n", plan->gpus_needed);
}

static dw_status put_plan(const dw_autoplan *plan, int explain, dw__text *text) {
    const dw_prediction *p = &plan->prediction;
    DW_RETURN_IF_FAILED(put_head(plan, text));
    if (!p->fits) {
        DW_RETURN_IF_FAILED(put_no_fit(plan, text));
        DW_RETURN_IF_FAILED(put_memory(plan, text));
        return put_host(p, text);
    }
    DW_RETURN_IF_FAILED(put_step(plan, text));
    DW_RETURN_IF_FAILED(put_time(p, text));
    if (plan->layout.pp > 1) {
        DW_RETURN_IF_FAILED(put_label("Bubble", text));
        DW_RETURN_IF_FAILED(
            dw__text_printf(text, "%.1f%% of the pipeline's time\n", 100 * p->bubble_fraction));
    }
    DW_RETURN_IF_FAILED(put_memory(plan, text));
    DW_RETURN_IF_FAILED(put_host(p, text));
    DW_RETURN_IF_FAILED(put_ranks(plan, text));
    if (plan->statistics.meshes > 0) {
        DW_RETURN_IF_FAILED(put_label("Searched", text));
        DW_RETURN_IF_FAILED(dw__text_printf(
            text,
            "%.0f choices of sizes: %.0f cannot fit, %.0f cannot be faster; %.0f layouts "
            "predicted",
            plan->statistics.meshes, plan->statistics.meshes_large, plan->statistics.meshes_slow,
            plan->statistics.predicted));
        if (plan->statistics.seconds > 0)
            DW_RETURN_IF_FAILED(dw__text_printf(text, ", %.2f s", plan->statistics.seconds));
        DW_RETURN_IF_FAILED(dw__text_printf(text, "\n"));
    }
    DW_RETURN_IF_FAILED(put_bolder(plan, text));
    if (!explain) return DW_OK;
    DW_RETURN_IF_FAILED(put_others("Runners-up: additional time per step, and where it is spent",
                                   plan->runners_up, plan->runner_up_count, text));
    DW_RETURN_IF_FAILED(put_others("What if: one setting changed, the others searched again",
                                   plan->what_ifs, plan->what_if_count, text));
    return put_kernels(plan, text);
}

dw_status dw_autoplan_text(const dw_autoplan *plan, int explain, char **text) {
    dw__text written = {0};
    if (!plan || !text) return dw__fail(DW_INVALID_ARGUMENT, "the plan or `text` is NULL");
    *text = NULL;
    dw_status status = put_plan(plan, explain, &written);
    if (status != DW_OK) {
        dw__text_free(&written);
        return status;
    }
    *text = written.text;
    return DW_OK;
}
