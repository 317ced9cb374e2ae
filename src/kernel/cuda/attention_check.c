/* Checks the members of an gpu_attention call before anything is launched. */
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_kernels.h"
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Device code counts rows in 32 bits and adds a window's reach of up to 2^30 to them. */
enum { MOST_ROWS = 1 << 29 };
static const int64_t most_stride =
    ((int64_t)1 << 40) / 2 - 8; /* in elements: the hardware's limit in bytes is 2^40 */

const char *dw__attention_describe(const void *given, char *text, size_t bytes) {
    const dw_attention *call = given;
    snprintf(text, bytes,
             "batch %d, %d query heads on %d, seq_len %d x %d, head_dim %d, %s%s%s%s%s%s",
             (int)call->batch, (int)call->heads_q, (int)call->heads_kv, (int)call->seq_len_q,
             (int)call->seq_len_kv, (int)call->head_dim, call->dtype == DW_F16 ? "f16" : "bf16",
             call->offsets_q ? ", packed" : "",
             call->window_right == 0 && call->window_left < 0    ? ", causal"
             : call->window_right >= 0 || call->window_left >= 0 ? ", window"
                                                                 : "",
             call->softcap > 0.0f ? ", soft cap" : "", call->dropout > 0.0f ? ", dropout" : "",
             call->bias_kind != DW_ATTENTION_NO_BIAS ? ", bias" : "");
    return text;
}

static dw_status check_sizes(const dw_attention *c) {
    const dw__size_range sizes[] = {
        {"batch", c->batch, 0, 1 << 24},
        {"heads_q", c->heads_q, 1, 1 << 16},
        {"heads_kv", c->heads_kv, 1, 1 << 16},
        {"seq_len_q", c->seq_len_q, 0, MOST_ROWS},
        {"seq_len_kv", c->seq_len_kv, 0, MOST_ROWS},
    };
    DW_RETURN_IF_FAILED(dw__check_sizes("attention", sizes, DW_COUNT(sizes)));
    if (c->heads_q % c->heads_kv != 0)
        return dw__fail(DW_SHAPE,
                        "attention: heads_q is %d and heads_kv is %d; expected a whole number of "
                        "query heads for each head of keys",
                        (int)c->heads_q, (int)c->heads_kv);
    if (c->head_dim < 8 || c->head_dim > 256 || c->head_dim % 8 != 0)
        return dw__fail(c->head_dim > 0 ? DW_UNSUPPORTED : DW_SHAPE,
                        "attention: head_dim is %d; expected a multiple of 8 up to 256; pad the "
                        "heads with zeros, or use another implementation",
                        (int)c->head_dim);
    return DW_OK;
}

static dw_status check_packed(const dw_attention *c) {
    if (!c->offsets_q != !c->offsets_k)
        return dw__fail(
            DW_INVALID_ARGUMENT, "attention: %s is given and %s is NULL; a packed batch needs both",
            c->offsets_q ? "offsets_q" : "offsets_k", c->offsets_q ? "offsets_k" : "offsets_q");
    if (!c->offsets_q) return DW_OK;
    const struct {
        dw__size_range total;
        const char *longest;
        int64_t rows;
    } sides[] = {{{"total_q", c->total_q, 0, MOST_ROWS}, "seq_len_q", c->seq_len_q},
                 {{"total_k", c->total_k, 0, MOST_ROWS}, "seq_len_kv", c->seq_len_kv}};
    for (size_t i = 0; i < DW_COUNT(sides); i++) {
        const dw__size_range *total = &sides[i].total;
        DW_RETURN_IF_FAILED(dw__check_sizes("attention", total, 1));
        if (sides[i].rows > total->value || sides[i].rows * c->batch < total->value)
            return dw__fail(DW_SHAPE,
                            "attention: %s is %lld and %s is %lld in a packed batch of %d; %s is "
                            "the length of the longest sequence, and no sequence is longer",
                            total->name, (long long)total->value, sides[i].longest,
                            (long long)sides[i].rows, (int)c->batch, sides[i].longest);
    }
    return DW_OK;
}

static dw_status check_numbers(const dw_attention *c) {
    if (!isfinite(c->scale))
        return dw__fail(DW_INVALID_ARGUMENT, "attention: scale is %g; expected a finite number",
                        (double)c->scale);
    if (c->scale < 0.0f)
        return dw__fail(
            DW_UNSUPPORTED,
            "attention: scale is %g; a negative scale is not supported: negate q instead",
            (double)c->scale);
    if (!isfinite(c->softcap) || c->softcap < 0.0f)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "attention: softcap is %g; expected a positive number, or 0 for none",
                        (double)c->softcap);
    if (!(c->dropout >= 0.0f && c->dropout < 1.0f))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "attention: dropout is %g; expected a probability from 0 to below 1",
                        (double)c->dropout);
    return DW_OK;
}

/* ---- tensors ---------------------------------------------------------------------------------- */

static dw_status check_stride(const char *tensor, const char *axis, int64_t length, int64_t stride,
                              bool written, int head_dim) {
    if (length <= 1) return DW_OK;
    if (stride == 0)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: the %s stride of %s is 0 (an expanded tensor); make %s "
                        "contiguous, or keep its one head and lower heads_kv",
                        axis, tensor, tensor);
    if (stride < 0 || stride % 8 != 0 || stride > most_stride)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: the %s stride of %s is %lld elements; expected a multiple of 8 "
                        "(16 bytes) from 8 to %lld; make %s contiguous",
                        axis, tensor, (long long)stride, (long long)most_stride, tensor);
    if (written && stride < head_dim)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "attention: the %s stride of %s is %lld elements, less than head_dim (%d): "
                        "its rows overlap and it is written to",
                        axis, tensor, (long long)stride, head_dim);
    return DW_OK;
}

static dw_status check_tensor(const dw_attention *c, dw__attention_operand which, bool written,
                              bool launching) {
    const dw_attention_tensor *t = dw__attention_tensor(c, which);
    const dw__attention_extent x = dw__attention_extent_of(c, which);
    const char *name = dw__attention_operands[which].name;
    if (x.batch == 0 || x.rows == 0) return DW_OK; /* a tensor without elements needs no address */
    DW_RETURN_IF_FAILED(dw__check_tensor("attention", name, t->data, launching));
    DW_RETURN_IF_FAILED(check_stride(name, "batch", x.batch, t->batch, written, c->head_dim));
    DW_RETURN_IF_FAILED(check_stride(name, "head", x.heads, t->head, written, c->head_dim));
    return check_stride(name, "row", x.rows, t->row, written, c->head_dim);
}

static dw_status check_tensors(const dw_attention *c, dw__attention_pass pass, bool launching) {
    const bool backward = pass == DW__ATTENTION_BACKWARD;
    for (int which = 0; which < DW__ATTENTION_OPERANDS; which++) {
        const dw__attention_operand_kind *kind = &dw__attention_operands[which];
        if (kind->backward && !backward) continue;
        DW_RETURN_IF_FAILED(
            check_tensor(c, which, kind->written && kind->backward == backward, launching));
    }
    const dw__address addresses[] = {{"lse", c->lse, sizeof(float), false},
                                     {"seed_memory", c->seed_memory, sizeof(int64_t), false},
                                     {"offsets_q", c->offsets_q, sizeof(int32_t), false},
                                     {"offsets_k", c->offsets_k, sizeof(int32_t), false}};
    DW_RETURN_IF_FAILED(dw__check_addresses("attention", addresses, DW_COUNT(addresses)));
    if (backward && launching && !c->lse && !dw__attention_has_no_queries(c))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "attention: lse is NULL; backward needs the one that forward wrote");
    return DW_OK;
}

static bool is_stride(int64_t stride) { return stride >= 0 && stride <= most_stride; }

static dw_status check_bias(const dw_attention *c, dw__attention_pass pass, bool launching) {
    const bool summed = pass == DW__ATTENTION_BACKWARD && c->d_bias.data;
    const bool added = c->bias_kind == DW_ATTENTION_ADDED;
    const dw_attention_bias *b = &c->bias, *d = &c->d_bias;
    if (c->bias_kind == DW_ATTENTION_NO_BIAS) return DW_OK;
    if (!added && c->bias_kind != DW_ATTENTION_VISIBLE)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "attention: bias_kind is %d; expected one of dw_attention_bias_kind",
                        (int)c->bias_kind);
    if (c->offsets_q || c->softcap > 0.0f)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: a bias with %s is not supported; use another implementation",
                        c->offsets_q ? "packed sequences" : "a soft cap");
    if (!is_stride(b->batch) || !is_stride(b->head) || !is_stride(b->row) || !is_stride(b->key))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "attention: the strides of bias are %lld, %lld, %lld and %lld; expected "
                        "numbers from 0 to %lld",
                        (long long)b->batch, (long long)b->head, (long long)b->row,
                        (long long)b->key, (long long)most_stride);
    const dw__address addresses[] = {{"bias", b->data, added ? 2 : 1, launching},
                                     {"d_bias", d->data, 2, false}};
    DW_RETURN_IF_FAILED(dw__check_addresses("attention", addresses, DW_COUNT(addresses)));
    if (!summed) return DW_OK;
    if (!added || (c->seq_len_q > 1 && b->row == 0) || (c->seq_len_kv > 1 && b->key == 0))
        return dw__fail(DW_UNSUPPORTED,
                        "attention: d_bias is given for a bias %s; expected numbers with queries "
                        "and keys of their own",
                        added ? "that repeats along queries or keys" : "of bytes");
    if (!is_stride(d->batch) || !is_stride(d->head) || !is_stride(d->row))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "attention: the strides of d_bias are %lld, %lld and %lld; expected "
                        "numbers from 0 to %lld",
                        (long long)d->batch, (long long)d->head, (long long)d->row,
                        (long long)most_stride);
    return DW_OK;
}

dw_status dw__attention_read(const dw_attention *given, dw_attention *call) {
    static const dw__struct known = {"dw_attention",
                                     sizeof *call,
                                     {offsetof(dw_attention, kernel),
                                      offsetof(dw_attention, dropout_stream),
                                      offsetof(dw_attention, bias_kind)}};
    return dw__struct_read(&known, given, call);
}

dw_status dw__attention_check(const dw_attention *call, dw__attention_pass pass, bool launching) {
    if (call->kernel && pass == DW__ATTENTION_BACKWARD)
        return dw__fail(DW_UNSUPPORTED,
                        "attention: kernel is \"%.64s\", and kernels are named for forward alone; "
                        "expected NULL for backward",
                        call->kernel);
    DW_RETURN_IF_FAILED(dw__check_half("attention", call->dtype));
    DW_RETURN_IF_FAILED(check_sizes(call));
    DW_RETURN_IF_FAILED(check_packed(call));
    DW_RETURN_IF_FAILED(check_numbers(call));
    DW_RETURN_IF_FAILED(check_bias(call, pass, launching));
    return check_tensors(call, pass, launching);
}

/* ---- GPUs -------------------------------------------------------------------------------------- */

static bool blackwell_is_asked_for(const dw_attention *call) {
    const char *setting = getenv("DEEPWELL_BLACKWELL");
    return call->kernel || (setting && strcmp(setting, "try") == 0);
}

/* Names what the kernels of a GPU do not support of a pass, or returns NULL. */
static const char *lacking(const dw_attention *c, dw__attention_pass pass, bool rtx) {
    const bool backward = pass == DW__ATTENTION_BACKWARD;
    if (backward && !rtx) return "backward";
    if (rtx && !backward) return c->head_dim > 128 ? "head dimensions above 128" : NULL;
    return c->softcap > 0.0f           ? (backward ? "a soft cap in backward" : "a soft cap")
           : c->dropout > 0.0f && !rtx ? "dropout"
           : c->offsets_q      ? (backward ? "packed sequences in backward" : "packed sequences")
           : c->bias_kind      ? (backward ? "a bias in backward" : "a bias")
           : c->head_dim > 128 ? "head dimensions above 128"
                               : NULL;
}

dw_status dw__attention_check_kernel(const dw_attention *c, dw__attention_pass pass,
                                     int capability) {
    const bool rtx = dw__gpu_is_rtx_blackwell(capability);
    if (capability == 90) return DW_OK;
    if (!rtx && !dw__gpu_is_blackwell(capability))
        return dw__fail(DW_UNSUPPORTED, "this version's kernels run on 9.0 (H100, H200); use "
                                        "PyTorch's own attention on this GPU");
    const char *lacks = lacking(c, pass, rtx);
    if (!lacks) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "there is no kernel for %s on %s; use PyTorch's own attention on this GPU",
                    lacks, rtx ? "12.0 (RTX 50, RTX PRO)" : "10.0 and 10.3 (B200, B300)");
}

dw_status dw__attention_check_capability(const dw_attention *c, dw__attention_pass pass,
                                         int capability) {
    DW_RETURN_IF_FAILED(dw__attention_check_kernel(c, pass, capability));
    if (capability == 90 || blackwell_is_asked_for(c)) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "the kernel for %s is %s: it is used only with DEEPWELL_BLACKWELL=try in the "
                    "environment or by its name, and checked at first use",
                    dw__gpu_is_rtx_blackwell(capability) ? "12.0 (RTX 50, RTX PRO)"
                                                         : "10.0 and 10.3 (B200, B300)",
                    dw__gpu_proof_emulator);
}
