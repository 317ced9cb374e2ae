/* dw_attention on a device that the call names: emulated GPUs of Hopper and Blackwell, with the checker on, against
 * softmax in double; and devices that do not fit. */
#include "deepwell/attention.h"
#include "deepwell/explain.h"
#include "emulated_call.h"
#include <math.h>

enum { SEQ_LEN_Q = 70, SEQ_LEN_KV = 90, HEADS = 2, HEAD_DIM = 64 };

typedef struct operands {
    matrix q, k, v, o, lse;
    dw_attention call;
} operands;

/* Heads lie beside each other: a row of a matrix holds one position of all heads. */
static dw_attention_tensor tensor_of(const matrix *x) {
    return (dw_attention_tensor){x->device, 0, HEAD_DIM, (int64_t)x->pitch / 2};
}

static void open_operands(operands *r, const dw_device *device, bool causal) {
    uint64_t state = 77;
    place_random(&r->q, device, SEQ_LEN_Q, HEADS * HEAD_DIM, MATRIX_BF16, &state, false);
    place_random(&r->k, device, SEQ_LEN_KV, HEADS * HEAD_DIM, MATRIX_BF16, &state, false);
    place_random(&r->v, device, SEQ_LEN_KV, HEADS * HEAD_DIM, MATRIX_BF16, &state, false);
    place(&r->o, device, SEQ_LEN_Q, HEADS * HEAD_DIM, MATRIX_BF16);
    place(&r->lse, device, 1, HEADS * SEQ_LEN_Q, MATRIX_F32);
    send(&r->o, device);
    send(&r->lse, device);
    r->call = (dw_attention){.struct_size = sizeof r->call,
                             .device = device,
                             .dtype = DW_BF16,
                             .batch = 1,
                             .heads_q = HEADS,
                             .heads_kv = HEADS,
                             .seq_len_q = SEQ_LEN_Q,
                             .seq_len_kv = SEQ_LEN_KV,
                             .head_dim = HEAD_DIM,
                             .scale = 0.125f,
                             .window_left = -1,
                             .window_right = causal ? 0 : -1,
                             .q = tensor_of(&r->q),
                             .k = tensor_of(&r->k),
                             .v = tensor_of(&r->v),
                             .o = tensor_of(&r->o),
                             .lse = r->lse.device,
                             .d_o = tensor_of(&r->o),
                             .dq = tensor_of(&r->q),
                             .dk = tensor_of(&r->k),
                             .dv = tensor_of(&r->v)};
}

static void close_operands(operands *r, const dw_device *device) {
    matrix *all[] = {&r->q, &r->k, &r->v, &r->o, &r->lse};
    for (size_t i = 0; i < DW_COUNT(all); i++) take_away(all[i], device);
}

static void expect_row(const operands *r, int head, int row) {
    const int keys = r->call.window_right == 0 ? row + 1 : SEQ_LEN_KV, first = head * HEAD_DIM;
    double p[SEQ_LEN_KV], sum = 0;
    for (int j = 0; j < keys; j++) {
        double score = 0;
        for (int d = 0; d < HEAD_DIM; d++)
            score += (double)get(&r->q, row, first + d) * get(&r->k, j, first + d);
        p[j] = exp(0.125 * score), sum += p[j];
    }
    const double lse = get(&r->lse, 0, head * SEQ_LEN_Q + row);
    if (!(fabs(lse - log(sum)) <= 1e-4))
        fail_msg("head %d, row %d: lse is %g; expected %g", head, row, lse, log(sum));
    for (int d = 0; d < HEAD_DIM; d++) {
        double o = 0, size = 0;
        for (int j = 0; j < keys; j++) {
            const double term = p[j] / sum * get(&r->v, j, first + d);
            o += term, size += fabs(term);
        }
        /* P and O are rounded to BF16. */
        const double got = get(&r->o, row, first + d);
        if (!(fabs(got - o) <= 0x1p-8 * (size + fabs(o))))
            fail_msg("head %d, row %d, column %d: o is %g; expected %g", head, row, d, got, o);
    }
}

static void runs_on(const char *name) {
    const dw_device *device = device_named(name);
    for (int causal = 0; causal < 2; causal++) {
        operands r;
        open_operands(&r, device, causal != 0);
        if (dw_attention_supported(&r.call, false) != DW_OK) fail_msg("%s", dw_last_error());
        if (dw_attention_forward(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
        fetch(&r.o, device);
        fetch(&r.lse, device);
        for (int head = 0; head < HEADS; head++)
            for (int row = 0; row < SEQ_LEN_Q; row++) expect_row(&r, head, row);
        close_operands(&r, device);
    }
}

static void needs_ptx(void) {
    if (!dw__jit_ptx[0].name) skip(); /* the build had no compiler of device code */
}

static void hopper_runs(void **state) {
    (void)state;
    needs_ptx();
    runs_on("emulator:sm_90a");
}

static void unfit_devices_are_refused(void **state) {
    static const struct {
        const char *device;
        bool backward;
        const char *words;
    } cases[] = {
        {"cpu", false, "attention: device \"cpu\" runs no kernels; expected \"cuda\""},
        {"cpu", true, "device \"cpu\" runs no kernels"},
        {"emulator:sm_120a", false,
         "(compute capability 12.0): the kernel for 12.0 (RTX 50, RTX PRO) is proven on the"},
        {"emulator:sm_100a", true, "there is no kernel for backward on 10.0"},
        {"emulator:sm_100a", false, "only with DEEPWELL_BLACKWELL=try"},
    };
    const dw_device *gpu = device_named("emulator:sm_90a");
    operands r;
    (void)state;
    open_operands(&r, gpu, false);
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        r.call.device = device_named(cases[i].device);
        assert_int_equal(dw_attention_supported(&r.call, cases[i].backward), DW_UNSUPPORTED);
        if (!strstr(dw_last_error(), cases[i].words)) fail_msg("%s", dw_last_error());
    }
    close_operands(&r, gpu);
}

/* The workspace and the measurement ask the same device. */
static void other_calls_ask_the_device(void **state) {
    operands r;
    size_t hopper, any;
    double seconds;
    const dw_device *cpu = device_named("cpu"), *gpu = device_named("emulator:sm_90a");
    (void)state;
    open_operands(&r, gpu, false);
    assert_int_equal(dw_attention_backward_workspace(&r.call, &hopper), DW_OK);
    assert_int_equal(dw_attention_measure(&r.call, false, &seconds), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "\"emulator:sm_90a\""));
    r.call.device = cpu;
    assert_int_equal(dw_attention_backward_workspace(&r.call, &any), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "runs no kernels"));
    r.call.device = NULL;
    assert_int_equal(dw_attention_backward_workspace(&r.call, &any), DW_OK);
    assert_true(hopper > 0 && any >= hopper);
    close_operands(&r, gpu);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hopper_runs),
        cmocka_unit_test(unfit_devices_are_refused),
        cmocka_unit_test(other_calls_ask_the_device),
    };
    unsetenv("DEEPWELL_BLACKWELL");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
