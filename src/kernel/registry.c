/* The registry: lists the kernels of every device, for each operation in order of preference. */
#include "kernel/cuda/gpu_adamw.h"
#include "kernel/cuda/gpu_attention.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_quantize.h"
#include <assert.h>
#include <pthread.h>
#include <stdio.h>

static const dw__kernel *const *const cpu_lists[] = {
    dw__kernels_cpu_matmul,      dw__kernels_cpu_groups,   dw__kernels_cpu_attention,
    dw__kernels_cpu_elementwise, dw__kernels_cpu_norm,     dw__kernels_cpu_data,
    dw__kernels_cpu_loss,        dw__kernels_cpu_quantize, dw__kernels_cpu_fp8_block,
    dw__kernels_reference, /* last, because it supports every call */
};

const dw__kernel *const dw__gpu_kernels[] = {
    &dw__sm90_attention_forward,
    &dw__sm90_attention_backward,
    &dw__sm90_gemm,
    &dw__sm100_gemm,
    &dw__sm100_attention_forward,
    &dw__sm120_attention_forward,
    &dw__sm120_attention_backward,
    &dw__sm100_gemm_scaled,
    &dw__sm120_gemm,
    &dw__sm120_gemm_scaled,
    &dw__quantize_blocks,
    &dw__gpu_adamw_update,
    &dw__softmax,
    &dw__gpu_norm,
    &dw__gpu_cross_entropy,
    &dw__sm90_linear_cross_entropy, /* before linear_cross_entropy, which computes all calls */
    &dw__gpu_linear_cross_entropy,
    &dw__graph_attention,
    &dw__graph_attention_backward,
    &dw__graph_gemm,
    &dw__graph_gemm_scaled,
    &dw__sm90_codes_fast, /* before cublaslt: calls that it was measured faster at */
    &dw__graph_cublaslt,
    &dw__graph_cublaslt_scaled,
    &dw__graph_cublaslt_fp8_block,
    &dw__graph_gemm_turned,
    &dw__graph_gemm_hopper,
    &dw__sm90_linear_program,
    &dw__sm90_linear_pair,
    &dw__gpu_program_codes,
    &dw__gpu_elementwise,
    &dw__gpu_move,
    &dw__gpu_reduce,
    &dw__gpu_scatter, /* before gather: large calls of put_along_add */
    &dw__gpu_gather,
    &dw__gpu_matmul,
    &dw__gpu_scan,
    &dw__gpu_sort,
    &dw__graph_quantize,
    &dw__quantization_error,
    &dw__gpu_rope,
    &dw__gpu_rotated_attention,
    &dw__gpu_group_rows,
    &dw__sm90_segment,
    &dw__sm90_segment_program,
    &dw__sm100_segment,
    &dw__gpu_segment_linear,
    &dw__gpu_spread_rows,
    &dw__gpu_quantize_tensor,
    &dw__gpu_fp8_block_codes,
    &dw__gpu_quantize_tiles,
    &dw__sm90_codes,
    &dw__gpu_fp8_block_gemm,
    &dw__gpu_multiply_codes,
    /* PyTorch's, which explanations know */
    &dw__torch_attention[DW__ATTENTION_FORWARD][0],
    &dw__torch_attention[DW__ATTENTION_FORWARD][1],
    &dw__torch_attention[DW__ATTENTION_FORWARD][2],
    &dw__torch_attention[DW__ATTENTION_FORWARD][3],
    &dw__torch_attention[DW__ATTENTION_BACKWARD][0],
    &dw__torch_attention[DW__ATTENTION_BACKWARD][1],
    &dw__torch_attention[DW__ATTENTION_BACKWARD][2],
    &dw__torch_attention[DW__ATTENTION_BACKWARD][3],
    &dw__torch_gemm,
};
const unsigned dw__gpu_kernel_count = DW_COUNT(dw__gpu_kernels);

/* ---- kernels of an operation ----------------------------------------------------------------------- */

enum { MAX_CANDIDATES = 15 };
static const dw__kernel *candidates[2][DW_OP_COUNT][MAX_CANDIDATES + 1]; /* NULL-terminated */
static pthread_once_t merged = PTHREAD_ONCE_INIT;

static void add(const dw__kernel *kernel, bool on_gpu) {
    for (int op = 0; op < DW_OP_COUNT; op++) {
        if (kernel->computes ? !kernel->computes((dw_op)op) : kernel->op != (dw_op)op) continue;
        const dw__kernel **end = candidates[on_gpu][op];
        while (*end) end++;
        assert(end < &candidates[on_gpu][op][MAX_CANDIDATES]);
        *end = kernel;
    }
}

/* Checks the contracts of every list, once. */
static void merge_lists(void) {
    for (size_t i = 0; i < DW_COUNT(cpu_lists); i++)
        for (const dw__kernel *const *kernel = cpu_lists[i]; *kernel; kernel++) {
            assert((*kernel)->name && (*kernel)->source && (*kernel)->supports && (*kernel)->run);
            assert((*kernel)->tolerance_factor > 0.0);
            add(*kernel, false);
        }
    for (size_t i = 0; i < DW_COUNT(dw__gpu_kernels); i++)
        if (dw__gpu_kernels[i]->kind == DW__CALL_OPERATION) add(dw__gpu_kernels[i], true);
}

const dw__kernel *const *dw__kernel_candidates(dw_op op, bool on_gpu) {
    pthread_once(&merged, merge_lists);
    return candidates[on_gpu][op];
}

/* The layout of a call's results; those of its epilogue are for the kernel to look at. */
static dw__result_layout layout_of(const dw__call *call) {
    dw__result_layout most = DW__RESULTS_CONTIGUOUS;
    for (uint32_t o = 0; o < call->output_count; o++) {
        const dw__tensor *y = &call->outputs[o];
        if (y->rank < 1 || dw__tensor_is_contiguous(y)) continue;
        if (y->shape[y->rank - 1] != 1 && y->stride[y->rank - 1] != 1) return DW__RESULTS_SCATTERED;
        most = DW__RESULTS_IN_ROWS;
    }
    return most;
}

/* True if the kernel does as much as the call asks for beyond its operation. */
static bool does_all(const dw__kernel *kernel, const dw__call *call) {
    return kernel->with_epilogue == (call->epilogue != NULL) &&
           kernel->results >= layout_of(call) && kernel->accumulates >= call->accumulates &&
           (kernel->sums_operands || call->sums == DW__SUMS_NOTHING) &&
           (kernel->magnitude_parts || call->magnitudes == 0) &&
           kernel->makes_codes == (call->codes != 0) && call->summed == 0;
}

const dw__kernel *dw__kernel_for(const dw__operation_call *call, const dw__gpu_target *gpu,
                                 const dw__kernel *after) {
    const dw__kernel *const *kernel = dw__kernel_candidates(call->call.op, gpu != NULL);
    if (after)
        while (*kernel++ != after) {
        }
    for (; *kernel; kernel++)
        if (does_all(*kernel, &call->call) && (*kernel)->supports(*kernel, call, gpu) == DW_OK)
            return *kernel;
    return NULL;
}

dw_status dw__kernel_fail_none(const dw__operation_call *call, const dw__gpu_target *gpu) {
    const dw_op op = call->call.op;
    char reasons[1536] = "";
    size_t used = 0;
    for (const dw__kernel *const *kernel = dw__kernel_candidates(op, gpu != NULL); *kernel;
         kernel++) {
        if (!does_all(*kernel, &call->call)) continue;
        if ((*kernel)->supports(*kernel, call, gpu) == DW_OK) continue;
        const int more = snprintf(reasons + used, sizeof reasons - used, "; %s", dw_last_error());
        used += (size_t)more < sizeof reasons - used ? (size_t)more : sizeof reasons - used - 1;
    }
    if (used == 0)
        return dw__fail(DW_UNSUPPORTED, "there is no kernel of %s for %s; run it on the CPU",
                        dw_op_name(op), gpu ? gpu->name : "the CPU");
    return dw__fail(DW_UNSUPPORTED,
                    "no kernel for %s supports this call of %s%s; run it on the CPU",
                    gpu ? gpu->name : "the CPU", dw_op_name(op), reasons);
}

dw_status dw__kernel_refuse(const dw__kernel *kernel) {
    return dw__fail_join(DW_UNSUPPORTED, kernel->name, ": expected ", kernel->needs);
}

bool dw__kernel_is_reference(const dw__kernel *kernel) {
    const dw__kernel *const *last = dw__kernel_candidates(kernel->op, false);
    while (last[1]) last++;
    return kernel == *last;
}

dw__result_layout dw__kernel_results(dw_op op, bool on_gpu) {
    dw__result_layout most = DW__RESULTS_CONTIGUOUS;
    for (const dw__kernel *const *kernel = dw__kernel_candidates(op, on_gpu); *kernel; kernel++)
        if ((*kernel)->results > most) most = (*kernel)->results;
    return most;
}

bool dw__kernel_has_epilogues(dw_op op, bool on_gpu) {
    const dw__kernel *const *kernel = dw__kernel_candidates(op, on_gpu);
    while (*kernel && !(*kernel)->with_epilogue) kernel++;
    return *kernel != NULL;
}

bool dw__kernel_accumulates(dw_op op, bool on_gpu) {
    const dw__kernel *const *kernel = dw__kernel_candidates(op, on_gpu);
    while (*kernel && !(*kernel)->accumulates) kernel++;
    return *kernel != NULL;
}

bool dw__kernel_sums_operands(dw_op op, bool on_gpu) {
    const dw__kernel *const *kernel = dw__kernel_candidates(op, on_gpu);
    while (*kernel && !(*kernel)->sums_operands) kernel++;
    return *kernel != NULL;
}

bool dw__kernel_reads_magnitudes(dw_op op, bool on_gpu) {
    const dw__kernel *const *kernel = dw__kernel_candidates(op, on_gpu);
    while (*kernel && !(*kernel)->reads_magnitudes) kernel++;
    return *kernel != NULL;
}

bool dw__kernel_makes_codes(dw_op op, bool on_gpu) {
    const dw__kernel *const *kernel = dw__kernel_candidates(op, on_gpu);
    while (*kernel && !(*kernel)->makes_codes) kernel++;
    return *kernel != NULL;
}

uint32_t dw__call_own_outputs(const dw__call *call) {
    uint32_t count = call->output_count;
    for (uint64_t left = call->codes; left; left &= left - 1) count -= DW__CODE_OUTPUTS;
    for (uint64_t left = call->magnitudes; left; left &= left - 1) count--;
    for (uint64_t left = call->summed; left; left &= left - 1) count--;
    return count;
}

/* A permute that leaves the axes where they are. */
dw_op dw__kernel_copy_op(int rank, dw_attr *attr) {
    static const int64_t in_order[DW_MAX_RANK] = {0, 1, 2, 3, 4, 5, 6, 7};
    *attr = dw_attr_list(DW_ATTR_KEY_PERM, (uint32_t)rank, in_order);
    return DW_OP_PERMUTE;
}

/* ---- helpers for kernels --------------------------------------------------------------------- */

const dw_attr *dw__call_attr(const dw__call *call, dw_attr_key key) {
    for (uint32_t i = 0; i < call->attr_count; i++)
        if (call->attrs[i].key == key) return &call->attrs[i];
    return NULL;
}

int64_t dw__call_int(const dw__call *call, dw_attr_key key, int64_t absent) {
    const dw_attr *attr = dw__call_attr(call, key);
    return attr ? attr->integer : absent;
}

double dw__call_float(const dw__call *call, dw_attr_key key, double absent) {
    const dw_attr *attr = dw__call_attr(call, key);
    return attr ? attr->number : absent;
}

const dw__tensor *dw__call_optional(const dw__call *call, uint32_t input) {
    return call->input_count > input && call->inputs[input].rank >= 0 ? &call->inputs[input] : NULL;
}

bool dw__call_gathers(const dw__call *call) {
    return call->op == DW_OP_SEGMENT_LINEAR
               ? dw__call_optional(call, 4) || dw__call_optional(call, 5) ||
                     dw__call_optional(call, 6)
               : call->op == DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT &&
                     (dw__call_optional(call, 3) || dw__call_optional(call, 4));
}

const dw__tensor *dw__call_addend(const dw__call *call) {
    if (call->accumulates == DW__ADDS_NOTHING) return NULL;
    return call->accumulates == DW__ADDS_TO_OUTPUT ? &call->outputs[0] : &call->addend;
}

bool dw__call_has_tiles(const dw__call *call) {
    enum { TILES_A = 4 };
    return call->op == DW_OP_MULTIPLY_CODES && call->input_count > TILES_A &&
           call->inputs[TILES_A].rank >= 0;
}

bool dw__call_has_row_scales(const dw__call *call) {
    enum { SCALE_A = 2 };
    return call->op == DW_OP_MULTIPLY_CODES && call->inputs[SCALE_A].rank == 1;
}

bool dw__call_has_few_kernels(const dw__call *call) {
    return dw__call_has_tiles(call) || call->op == DW_OP_SEGMENT_MULTIPLY_CODES;
}

bool dw__call_has_f32_scales(const dw__call *call) {
    enum { TILES_A = 4 };
    return dw__call_has_tiles(call) && dw__dtype_is_float(call->inputs[TILES_A].dtype);
}

const dw__tensor *dw__call_bias(const dw__call *call) {
    const uint32_t bias = call->op == DW_OP_LINEAR ? 2 : call->op == DW_OP_MULTIPLY_CODES ? 6 : 0;
    return bias && call->input_count > bias && call->inputs[bias].rank >= 0 ? &call->inputs[bias]
                                                                            : NULL;
}

bool dw__call_decides_product(const dw__call *call) {
    if (call->op != DW_OP_MULTIPLY_CODES) return call->op == DW_OP_QUANTIZE_TILES;
    return dw__call_has_tiles(call) && !dw__call_bias(call) && call->outputs[0].dtype == DW_F32;
}

const dw__kernel *const *dw__kernels_of_fp8_blocks(void) {
    static const dw__kernel *const kernels[] = {&dw__graph_cublaslt_fp8_block, &dw__sm90_codes,
                                                NULL};
    return kernels;
}

int64_t dw__tensor_count(const dw__tensor *tensor) {
    int64_t count = 1;
    for (int axis = 0; axis < tensor->rank; axis++) count *= tensor->shape[axis];
    return count;
}

size_t dw__tensor_bytes(const dw__tensor *tensor) {
    return (size_t)dw_tensor_bytes(tensor->dtype, tensor->rank, tensor->shape);
}

/* The elements from one index of `axis` to the next, where the axes behind it take `stride`. */
static int64_t next_stride(const dw__tensor *tensor, int axis, int64_t stride) {
    stride *= tensor->shape[axis];
    return axis == tensor->rank - 1 ? dw__dtype_row(tensor->dtype, stride) : stride;
}

/* An axis of one element may have any stride. In a tensor without elements all axes may. */
bool dw__tensor_is_contiguous(const dw__tensor *tensor) {
    int64_t expected = 1;
    if (dw__tensor_count(tensor) == 0) return true;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] != 1 && tensor->stride[axis] != expected) return false;
        expected = next_stride(tensor, axis, expected);
    }
    return true;
}

int64_t dw__tensor_run(const dw__tensor *tensor) {
    int64_t run = 1;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] == 1) continue;
        if (tensor->stride[axis] != run) break;
        run *= tensor->shape[axis];
    }
    return run;
}

void dw__tensor_set_contiguous(dw__tensor *tensor) {
    int64_t stride = 1;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        tensor->stride[axis] = stride;
        stride = next_stride(tensor, axis, stride);
    }
}

bool dw__tensor_row_stride(const dw__tensor *tensor, int64_t *stride) {
    const int last = tensor->rank - 1;
    int64_t rows = 1;
    *stride = tensor->shape[last];
    if (tensor->shape[last] > 1 && tensor->stride[last] != 1) return false;
    for (int axis = last - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] == 1) continue;
        if (rows == 1) *stride = tensor->stride[axis];
        if (tensor->stride[axis] != *stride * rows) return false;
        rows *= tensor->shape[axis];
    }
    return true;
}
