/* Encodes, decodes and packs arrays of single numbers. */
#include "base/base.h"
#include "number/number_loops.h"
#include "number/number_run.h"

DW_ISA_TABLE(dw__number_loops)

/* Elements of a task, and of a pass over buffers on the stack. Both are even, for pairs of codes. */
enum { TASK = 1 << 15, PASS = 1024 };

typedef struct array_call {
    const dw__number_loops *loops;
    dw_dtype dtype;
    int64_t count;
    float *values;
    uint8_t *codes;
    dw_encode_options options;
} array_call;

static int64_t pass_end(int64_t start, int64_t end) {
    return start + PASS < end ? start + PASS : end;
}

static int64_t task_count(int64_t count) { return count / TASK + (count % TASK != 0); }

/* ---- encoding ------------------------------------------------------------------------------ */

static void encode_nearest_wide(const array_call *call, int64_t start, int64_t count) {
    const bool bf16 = call->dtype == DW_BF16;
    const uint16_t infinity = bf16 ? 0x7F80 : 0x7C00;
    const bool saturate = call->options.overflow == DW_OVERFLOW_SATURATE;
    for (int64_t i = start; i < start + count; i++) {
        uint16_t code = bf16 ? dw__f32_to_bf16(call->values[i]) : dw__f32_to_f16(call->values[i]);
        if (saturate && (code & 0x7FFF) == infinity) code--; /* to the largest finite number */
        memcpy(call->codes + 2 * i, &code, sizeof code);
    }
}

static void encode_wide(const array_call *call, int64_t start, int64_t count,
                        const uint32_t *words) {
    if (words == NULL) {
        encode_nearest_wide(call, start, count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint16_t code =
            (uint16_t)dw__encode_one(call->dtype, call->values[start + i], call->options.overflow,
                                     DW_ROUND_STOCHASTIC, words[i]);
        memcpy(call->codes + 2 * (start + i), &code, sizeof code);
    }
}

static void encode_bytes(const array_call *call, int64_t start, int64_t count,
                         const uint32_t *words) {
    if (call->loops->encode[call->dtype] == NULL) {
        for (int64_t i = 0; i < count; i++)
            call->codes[start + i] = (uint8_t)dw__encode_one(
                call->dtype, call->values[start + i], call->options.overflow,
                call->options.rounding, words ? words[i] : 0);
        return;
    }
    if (call->dtype != DW_E2M1) {
        call->loops->encode[call->dtype](call->values + start, count, call->options.overflow, words,
                                         call->codes + start);
        return;
    }
    uint8_t unpacked[PASS + 1] = {0}; /* a zero follows a last odd code */
    call->loops->encode[call->dtype](call->values + start, count, call->options.overflow, words,
                                     unpacked);
    call->loops->pack_pairs(unpacked, (count + 1) / 2, call->codes + start / 2);
}

static void encode_task(void *context, int64_t index, int worker) {
    (void)worker;
    const array_call *call = context;
    int64_t end = (index + 1) * TASK < call->count ? (index + 1) * TASK : call->count;
    for (int64_t start = index * TASK; start < end; start = pass_end(start, end)) {
        int64_t count = pass_end(start, end) - start;
        uint32_t buffer[PASS];
        const uint32_t *words = NULL;
        if (call->options.rounding == DW_ROUND_STOCHASTIC) {
            call->loops->words(&call->options.random, (uint64_t)start, count, buffer);
            words = buffer;
        }
        if (dw__format_is_byte(call->dtype))
            encode_bytes(call, start, count, words);
        else
            encode_wide(call, start, count, words);
    }
}

static dw_status check_dtype(const char *function, dw_dtype dtype, int64_t count) {
    if (!dw__dtype_is_format(dtype))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: dtype is %d (%s): expected a floating-point type of 16 bits or fewer",
                        function, (int)dtype, dw_dtype_name(dtype));
    if (dw_tensor_bytes(dtype, 1, &count) < 0)
        return dw__fail(DW_INVALID_ARGUMENT, "%s: count is %lld: expected 0 to 2^60", function,
                        (long long)count);
    return DW_OK;
}

dw_status dw_encode(dw_dtype dtype, int64_t count, const float *values,
                    const dw_encode_options *options, void *codes) {
    static const dw__struct known = {"dw_encode_options", sizeof *options, {0}};
    const dw_encode_options defaults = DW_ENCODE_OPTIONS_DEFAULT;
    if (options == NULL) options = &defaults;
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, NULL));
    DW_RETURN_IF_FAILED(check_dtype("dw_encode", dtype, count));
    if ((unsigned)options->overflow > DW_OVERFLOW_NONFINITE)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_encode: overflow is %d: expected %d or %d",
                        (int)options->overflow, DW_OVERFLOW_SATURATE, DW_OVERFLOW_NONFINITE);
    if ((unsigned)options->rounding > DW_ROUND_STOCHASTIC)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_encode: rounding is %d: expected %d or %d",
                        (int)options->rounding, DW_ROUND_NEAREST, DW_ROUND_STOCHASTIC);
    if (dtype == DW_E8M0 && options->rounding == DW_ROUND_STOCHASTIC)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_encode: e8m0 has no stochastic rounding: its scales "
                        "are rounded to nearest, or by a scale rule");
    array_call call = {.loops = dw__number_loops_now(),
                       .dtype = dtype,
                       .count = count,
                       .values = (float *)values,
                       .codes = codes,
                       .options = *options};
    dw__number_run(task_count(count), encode_task, &call);
    return DW_OK;
}

/* ---- decoding ------------------------------------------------------------------------------ */

static void decode_bytes(const array_call *call, int64_t start, int64_t count) {
    const uint8_t *codes = call->codes + start;
    float *values = call->values + start;
    const float one = 1.0f;
    if (call->loops->decode[call->dtype] == NULL) {
        for (int64_t i = 0; i < count; i++) values[i] = dw__decode_one(call->dtype, codes[i]);
        return;
    }
    if (call->dtype != DW_E2M1) {
        call->loops->decode[call->dtype](codes, count, PASS, &one, 1.0f, values);
        return;
    }
    uint8_t unpacked[PASS + 1];
    call->loops->unpack_pairs(call->codes + start / 2, (count + 1) / 2, unpacked);
    call->loops->decode[call->dtype](unpacked, count, PASS, &one, 1.0f, values);
}

static void decode_task(void *context, int64_t index, int worker) {
    (void)worker;
    const array_call *call = context;
    int64_t end = (index + 1) * TASK < call->count ? (index + 1) * TASK : call->count;
    for (int64_t start = index * TASK; start < end; start = pass_end(start, end)) {
        int64_t count = pass_end(start, end) - start;
        if (dw__format_is_byte(call->dtype)) {
            decode_bytes(call, start, count);
            continue;
        }
        for (int64_t i = start; i < start + count; i++) {
            uint16_t code;
            memcpy(&code, call->codes + 2 * i, sizeof code);
            call->values[i] = dw__decode_one(call->dtype, code);
        }
    }
}

dw_status dw_decode(dw_dtype dtype, int64_t count, const void *codes, float *values) {
    DW_RETURN_IF_FAILED(check_dtype("dw_decode", dtype, count));
    array_call call = {.loops = dw__number_loops_now(),
                       .dtype = dtype,
                       .count = count,
                       .values = values,
                       .codes = (uint8_t *)codes};
    dw__number_run(task_count(count), decode_task, &call);
    return DW_OK;
}

/* ---- six-bit codes --------------------------------------------------------------------------- */

static dw_status check_count(const char *function, int64_t count) {
    if (count >= 0 && count <= INT64_MAX / 8) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "%s: count is %lld: expected 0 to 2^60", function,
                    (long long)count);
}

dw_status dw_fp6_pack(int64_t count, const uint8_t *codes, uint8_t *packed) {
    DW_RETURN_IF_FAILED(check_count("dw_fp6_pack", count));
    for (int64_t i = 0; i < count; i += 4) {
        uint32_t stream = 0;
        int64_t left = count - i < 4 ? count - i : 4;
        for (int64_t j = 0; j < left; j++) stream |= (uint32_t)(codes[i + j] & 0x3F) << 6 * j;
        for (int64_t byte = 0; byte < (6 * left + 7) / 8; byte++)
            *packed++ = (uint8_t)(stream >> 8 * byte);
    }
    return DW_OK;
}

dw_status dw_fp6_unpack(int64_t count, const uint8_t *packed, uint8_t *codes) {
    DW_RETURN_IF_FAILED(check_count("dw_fp6_unpack", count));
    for (int64_t i = 0; i < count; i += 4) {
        uint32_t stream = 0;
        int64_t left = count - i < 4 ? count - i : 4;
        for (int64_t byte = 0; byte < (6 * left + 7) / 8; byte++)
            stream |= (uint32_t)*packed++ << 8 * byte;
        for (int64_t j = 0; j < left; j++) codes[i + j] = (uint8_t)(stream >> 6 * j & 0x3F);
    }
    return DW_OK;
}
