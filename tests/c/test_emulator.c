/* The emulator: what instructions do, how lanes part and meet, what the checker says. */
#include "base/base.h"
#include "deepwell/emulator.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define HEAD ".version 8.7\n.target sm_90a\n.address_size 64\n"

static dw_emulator *open_emulator(const char *architecture) {
    dw_emulator *emulator;
    assert_int_equal(dw_emulator_create(architecture, NULL, &emulator), DW_OK);
    return emulator;
}
static dw_emulator_module *load(dw_emulator *emulator, const char *ptx) {
    dw_emulator_module *module;
    if (dw_emulator_load(emulator, ptx, strlen(ptx), "test.ptx", &module) != DW_OK) fail_msg("%s", dw_last_error());
    return module;
}
static void print_findings(const dw_emulator *emulator) {
    for (size_t i = 0; i < dw_emulator_finding_count(emulator); i++) {
        dw_finding finding;
        char text[2000];
        assert_int_equal(dw_emulator_finding(emulator, i, &finding), DW_OK);
        dw_finding_text(&finding, text, sizeof text);
        print_message("%s\n", text);
    }
}
static void launch(dw_emulator *emulator, dw_emulator_module *module, const char *kernel, uint32_t grid, uint32_t block, void **arguments) {
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    options.grid[0] = grid, options.block[0] = block;
    if (dw_emulator_launch(module, kernel, &options, arguments, NULL) != DW_OK) {
        print_findings(emulator);
        fail_msg("%s", dw_last_error());
    }
}

static const char scale_and_add[] = HEAD
    ".visible .entry f(.param .u64 x, .param .u64 y, .param .u32 n, .param .f32 s)\n"
    "{ .reg .pred %p<2>; .reg .b32 %r<6>; .reg .f32 %f<5>; .reg .b64 %rd<8>;\n"
    "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [n]; ld.param.f32 %f1, [s];\n"
    "mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r5, %r2, %r3, %r4;\n"
    "setp.ge.s32 %p1, %r5, %r1; @%p1 bra $end;\n"
    "cvta.to.global.u64 %rd3, %rd1; cvta.to.global.u64 %rd4, %rd2; mul.wide.s32 %rd5, %r5, 4;\n"
    "add.s64 %rd6, %rd3, %rd5; add.s64 %rd7, %rd4, %rd5;\n"
    "ld.global.f32 %f2, [%rd6]; ld.global.f32 %f3, [%rd7]; fma.rn.f32 %f4, %f2, %f1, %f3; st.global.f32 [%rd7], %f4;\n"
    "$end: ret; }\n";

static void kernels_run(void **state) {
    enum { N = 1000 };
    (void)state;
    dw_emulator *emulator = open_emulator("sm_90a");
    dw_emulator_module *module = load(emulator, scale_and_add);
    float host[2][N], out[N], s = 1.7f;
    uint32_t n = N;
    void *x, *y;
    for (int i = 0; i < N; i++) host[0][i] = (float)rand() / 1e6f, host[1][i] = (float)rand() / 1e7f;
    assert_int_equal(dw_emulator_allocate(emulator, sizeof out, &x), DW_OK);
    assert_int_equal(dw_emulator_allocate(emulator, sizeof out, &y), DW_OK);
    assert_int_equal(dw_emulator_copy_in(emulator, x, host[0], sizeof out), DW_OK);
    assert_int_equal(dw_emulator_copy_in(emulator, y, host[1], sizeof out), DW_OK);
    launch(emulator, module, "f", 8, 128, (void *[]){&x, &y, &n, &s});
    assert_int_equal(dw_emulator_copy_out(emulator, out, y, sizeof out), DW_OK);
    for (int i = 0; i < N; i++) assert_true(out[i] == fmaf(host[0][i], s, host[1][i]));
    assert_int_equal(dw_emulator_finding_count(emulator), 0);
    /* One past the end. */
    n = N + 1;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    options.grid[0] = 8, options.block[0] = 128;
    assert_int_equal(dw_emulator_launch(module, "f", &options, (void *[]){&x, &y, &n, &s}, NULL), DW_INTERNAL);
    dw_finding finding;
    assert_int_equal(dw_emulator_finding(emulator, 0, &finding), DW_OK);
    assert_string_equal(finding.kind, "out of bounds");
    assert_int_equal(finding.lane, N % 32);
    dw_emulator_destroy(emulator);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
