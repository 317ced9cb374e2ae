/* Descriptions of hardware: the catalogue and its names. */
#include "base/base.h"
#include "deepwell/hardware.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define assert_ok(call)                                                                            \
    do {                                                                                           \
        dw_status status_ = (call);                                                                \
        if (status_ != DW_OK) print_error("%s: %s\n", #call, dw_last_error());                     \
        assert_int_equal(status_, DW_OK);                                                          \
    } while (0)

static void assert_near(const char *what, double value, double expected, double tolerance) {
    if (fabs(value - expected) > tolerance * fabs(expected))
        print_error("%s is %g; expected %g\n", what, value, expected);
    assert_true(fabs(value - expected) <= tolerance * fabs(expected));
}

/* ---- the catalogue's figures ---------------------------------------------------------------- */

/* Half-precision products of one processor in one clock, a multiplication and an addition counted as two: from the
 * architectures' white papers. */
static double operations_per_clock(const dw_hardware *h) {
    if (strcmp(h->architecture, "gfx942") == 0) return 2048;
    switch (h->capability) {
    case 70: return 1024;
    case 80: return 2048;
    case 89: return 1024;
    case 90: return 4096;
    case 100:
    case 103: return 8192;
    case 120: return 512;
    default: return 0;
    }
}

/* A figure of products with sparsity in place of a dense one is off by two. */
static void rates_follow_from_processors(void **state) {
    (void)state;
    for (uint32_t i = 0; i < dw_hardware_catalogue_count(); i++) {
        dw_hardware *h = NULL;
        const char *name = dw_hardware_catalogue_name(i);
        assert_ok(dw_hardware_named(name, &h));
        double bf16 = h->rate[DW_RATE_BF16].value, fp8 = h->rate[DW_RATE_FP8].value;
        assert_near(name, bf16, h->sm_count.value * h->clock.value * operations_per_clock(h), 0.02);
        if (h->rate[DW_RATE_TF32].value > 0)
            assert_near(name, h->rate[DW_RATE_TF32].value, bf16 / 2, 0.02);
        assert_true((fp8 > 0) == (h->capability >= 89 || h->capability == 0));
        if (fp8 > 0) assert_near(name, fp8, 2 * bf16, 0.02);
        assert_true((h->rate[DW_RATE_MXFP8].value > 0) == (h->capability >= 100));
        assert_true((h->rate[DW_RATE_FP4].value > 0) == (h->capability >= 100));
        if (h->rate[DW_RATE_FP4].value > 0) assert_true(h->rate[DW_RATE_FP4].value >= 2 * fp8);
        dw_hardware_destroy(h);
    }
}

static void links_follow_from_their_version(void **state) {
    static const double links[] = {0, 0, 6 * 25e9, 12 * 25e9, 18 * 25e9, 18 * 50e9};
    (void)state;
    for (uint32_t i = 0; i < dw_hardware_catalogue_count(); i++) {
        dw_hardware *h = NULL;
        assert_ok(dw_hardware_named(dw_hardware_catalogue_name(i), &h));
        if (h->link_version > 0 && h->gpus_per_domain > 1)
            assert_near(h->name, h->link_bandwidth.value, links[h->link_version], 1e-9);
        assert_true(h->network_bandwidth.value < h->link_bandwidth.value || h->gpus_per_node == 1);
        assert_true(h->link_latency.value < h->network_latency.value);
        dw_hardware_destroy(h);
    }
}

static void check_source(const char *name, const char *field, const dw_figure *figure) {
    if (figure->value == 0.0) {
        assert_int_equal(figure->kind, DW_FIGURE_UNKNOWN);
        return;
    }
    if (figure->source[0] == '\0') print_error("%s of %s has no source\n", field, name);
    assert_true(figure->source[0] != '\0');
    assert_true(figure->kind == DW_FIGURE_PUBLISHED || figure->kind == DW_FIGURE_ESTIMATED);
}

static void every_figure_has_a_source(void **state) {
    (void)state;
    for (uint32_t i = 0; i < dw_hardware_catalogue_count(); i++) {
        dw_hardware *h = NULL;
        assert_ok(dw_hardware_named(dw_hardware_catalogue_name(i), &h));
        for (int rate = 0; rate < DW_RATES; rate++)
            check_source(h->name, dw_rate_name((dw_rate)rate), &h->rate[rate]);
#define CHECK(figure) check_source(h->name, #figure, &h->figure);
        DW_HARDWARE_FIGURES(CHECK)
#undef CHECK
        dw_hardware_destroy(h);
    }
    assert_null(dw_hardware_catalogue_name(dw_hardware_catalogue_count()));
}

/* ---- names ---------------------------------------------------------------------------------- */

static void names_and_counts(void **state) {
    static const struct {
        const char *text;
        int gpus, per_node, per_domain;
    } cases[] = {
        {"h100", 8, 8, 8},      {"h100:16384", 16384, 8, 8}, {"H100:3", 3, 8, 8},
        {"gb200", 72, 4, 72},   {"gb200:4", 4, 4, 72},       {"gb300:1152", 1152, 4, 72},
        {"rtx5090", 1, 8, 1},   {"v100", 16, 16, 16},        {"b200:1048576", 1048576, 8, 8},
        {"gh200:17", 17, 1, 1},
    };
    (void)state;
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_hardware *h = NULL;
        assert_ok(dw_hardware_named(cases[i].text, &h));
        assert_int_equal(h->gpus, cases[i].gpus);
        assert_int_equal(h->gpus_per_node, cases[i].per_node);
        assert_int_equal(h->gpus_per_domain, cases[i].per_domain);
        dw_hardware_destroy(h);
    }
}

static void names_that_mean_nothing(void **state) {
    static const struct {
        const char *text;
        dw_status status;
        const char *part;
    } cases[] = {
        {"", DW_NOT_FOUND, "there is no hardware \"\""},
        {"h1000", DW_NOT_FOUND,
         "there is no hardware \"h1000\" in the catalogue; it has v100, a100-40"},
        {"h10", DW_NOT_FOUND, "\"h10\""},
        {":8", DW_NOT_FOUND, "\"\""},
        {"h100:", DW_INVALID_ARGUMENT, "\"h100:\" asks for \"\" GPUs; expected NAME:COUNT"},
        {"h100:0", DW_INVALID_ARGUMENT, "asks for \"0\" GPUs"},
        {"h100:10000000", DW_INVALID_ARGUMENT, "asks for \"10000000\" GPUs"},
        {"h100:1048577", DW_INVALID_ARGUMENT, "COUNT from 1 to 1048576"},
        {"h100:-8", DW_INVALID_ARGUMENT, "asks for \"-8\""},
        {"h100: 8", DW_INVALID_ARGUMENT, "asks for \" 8\""},
        {"h100:8:8", DW_INVALID_ARGUMENT, "asks for \"8:8\""},
        {"h100:8x", DW_INVALID_ARGUMENT, "asks for \"8x\""},
        {"h100:99999999999999999999", DW_INVALID_ARGUMENT, "from 1 to"},
        {"h100:12", DW_INVALID_ARGUMENT, "\"h100:12\": gpus is 12 and gpus_per_node is 8"},
        {"gb200:5", DW_INVALID_ARGUMENT, "multiple of 4"},
    };
    (void)state;
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_hardware *h = NULL;
        int64_t live = dw__memory_live();
        assert_int_equal(dw_hardware_named(cases[i].text, &h), cases[i].status);
        if (!strstr(dw_last_error(), cases[i].part))
            print_error("\"%s\" does not have \"%s\"\n", dw_last_error(), cases[i].part);
        assert_non_null(strstr(dw_last_error(), cases[i].part));
        assert_null(h);
        assert_int_equal(dw__memory_live(), live);
    }
}

static void another_number_of_gpus(void **state) {
    dw_hardware *h = NULL, *more = NULL;
    (void)state;
    assert_ok(dw_hardware_named("h100:4", &h));
    assert_ok(dw_hardware_with_gpus(h, 64, &more));
    dw_hardware_destroy(h);
    assert_int_equal(more->gpus, 64);
    assert_string_equal(more->name, "h100");
    assert_string_equal(more->memory.source, "nvidia-smi on such a GPU");
    assert_int_equal(dw_hardware_with_gpus(more, 0, &h), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_hardware_with_gpus(more, 12, &h), DW_INVALID_ARGUMENT);
    assert_null(h);
    dw_hardware_destroy(more);
    dw_hardware_destroy(NULL);
}

static void each_allocation_fails(void **state) {
    (void)state;
    for (int64_t left = 0;; left++) {
        dw_hardware *h = NULL;
        int64_t live = dw__memory_live();
        dw__memory_fail_after(left);
        dw_status status = dw_hardware_named("gb300:144", &h);
        int64_t failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        dw_hardware_destroy(h);
        assert_int_equal(dw__memory_live(), live);
        if (failures == 0) {
            assert_int_equal(status, DW_OK);
            assert_true(left > 0);
            break;
        }
        assert_int_equal(status, DW_OUT_OF_MEMORY);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_follow_from_processors),
        cmocka_unit_test(links_follow_from_their_version),
        cmocka_unit_test(every_figure_has_a_source),
        cmocka_unit_test(names_and_counts),
        cmocka_unit_test(names_that_mean_nothing),
        cmocka_unit_test(another_number_of_gpus),
        cmocka_unit_test(each_allocation_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
