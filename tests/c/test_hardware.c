/* Descriptions of hardware: the catalogue, its names, files. */
#include "base/base.h"
#include "deepwell/graph.h"
#include "deepwell/hardware.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* Half-precision flops of one SM in one clock (a multiply-add counts as two), from the architectures' white
 * papers. */
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

/* A figure with sparsity instead of the dense one is wrong by a factor of two. */
static void rates_follow_from_sms(void **state) {
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

static void figures_from_memory_are_estimates(void **state) {
    static const char *const names[] = {"v100", "gh200", "rtx5090", "l40s", "mi300x", "mi325x"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        dw_hardware *h = NULL;
        assert_ok(dw_hardware_named(names[i], &h));
        const dw_figure *figures[] = {&h->rate[DW_RATE_BF16], &h->memory_bandwidth, &h->power};
        for (int k = 0; k < 3; k++) {
            assert_int_equal(figures[k]->kind, DW_FIGURE_ESTIMATED);
            assert_non_null(strstr(figures[k]->source, "not consulted"));
        }
        dw_hardware_destroy(h);
    }
    dw_hardware *h = NULL;
    assert_ok(dw_hardware_named("h100", &h));
    assert_int_equal(h->rate[DW_RATE_BF16].kind, DW_FIGURE_PUBLISHED);
    dw_hardware_destroy(h);
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

static void unknown_names_are_rejected(void **state) {
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

static void profiles_scale_to_another_number_of_gpus(void **state) {
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

/* ---- files ---------------------------------------------------------------------------------- */

static void assert_same_figure(const dw_figure *a, const dw_figure *b) {
    assert_memory_equal(&a->value, &b->value, sizeof a->value);
    assert_int_equal(a->kind, b->kind);
    assert_string_equal(a->source, b->source);
}

static void assert_same(const dw_hardware *a, const dw_hardware *b) {
    assert_string_equal(a->name, b->name);
    assert_string_equal(a->architecture, b->architecture);
    assert_string_equal(a->network, b->network);
    assert_int_equal(a->capability, b->capability);
    assert_int_equal(a->gpus, b->gpus);
    assert_int_equal(a->gpus_per_node, b->gpus_per_node);
    assert_int_equal(a->gpus_per_domain, b->gpus_per_domain);
    assert_int_equal(a->link_version, b->link_version);
    assert_int_equal(a->rails, b->rails);
    for (int i = 0; i < DW_RATES; i++) assert_same_figure(&a->rate[i], &b->rate[i]);
#define SAME(figure) assert_same_figure(&a->figure, &b->figure);
    DW_HARDWARE_FIGURES(SAME)
#undef SAME
}

/* Every field comes back unchanged, and writing it again gives the same text. */
static void expect_round_trip(const dw_hardware *h) {
    char *text = NULL, *again = NULL;
    dw_hardware *back = NULL;
    assert_ok(dw_hardware_json(h, &text));
    assert_ok(dw_hardware_parse(text, strlen(text), &back));
    assert_same(h, back);
    assert_ok(dw_hardware_json(back, &again));
    assert_string_equal(text, again);
    dw_text_free(text);
    dw_text_free(again);
    dw_hardware_destroy(back);
}

static void files_keep_everything(void **state) {
    (void)state;
    for (uint32_t i = 0; i < dw_hardware_catalogue_count(); i++) {
        dw_hardware *h = NULL;
        assert_ok(dw_hardware_named(dw_hardware_catalogue_name(i), &h));
        expect_round_trip(h);
        dw_hardware_destroy(h);
    }
}

/* Random bits within the bounds, of any kind. */
static void vary(dw_figure *figure, uint64_t *random) {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    figure->value *= 0.75 + 0.5 * (double)(*random >> 11) / 9007199254740992.0;
    figure->kind = (dw_figure_kind)(DW_FIGURE_PUBLISHED + *random % 5);
}

static void files_keep_every_bit(void **state) {
    uint64_t random = 88172645463325252u;
    (void)state;
    for (int round = 0; round < 200; round++) {
        dw_hardware *h = NULL;
        assert_ok(dw_hardware_named("gb300:144", &h));
        for (int i = 0; i < DW_RATES; i++) vary(&h->rate[i], &random);
        vary(&h->clock, &random);
        vary(&h->memory, &random);
        vary(&h->memory_bandwidth, &random);
        vary(&h->link_latency, &random);
        vary(&h->network_bandwidth, &random);
        h->power.source = "a \"quoted\" text, \\ and \xC3\xA9";
        expect_round_trip(h);
        dw_hardware_destroy(h);
    }
}

static void a_profile_with_changes(void **state) {
    static const char text[] =
        "{\"profile\": \"h100\", \"gpus\": 256, \"network\": \"EFA\", \"host_memory\": null,"
        " \"network_bandwidth\": {\"value\": 4e10, \"kind\": \"measured\", \"source\": "
        "\"nccl-tests\"},"
        " \"rates\": {\"bf16\": 8e14}, \"machine\": {\"anything\": [1, 2]}}";
    dw_hardware *h = NULL, *profile = NULL;
    (void)state;
    assert_ok(dw_hardware_parse(text, strlen(text), &h));
    assert_ok(dw_hardware_named("h100:256", &profile));
    assert_int_equal(h->gpus, 256);
    assert_string_equal(h->network, "EFA");
    assert_string_equal(h->name, "h100");
    assert_true(h->network_bandwidth.value == 4e10);
    assert_int_equal(h->network_bandwidth.kind, DW_FIGURE_MEASURED);
    assert_string_equal(h->network_bandwidth.source, "nccl-tests");
    assert_true(h->rate[DW_RATE_BF16].value == 8e14);
    assert_int_equal(h->rate[DW_RATE_BF16].kind, DW_FIGURE_GIVEN);
    assert_same_figure(&h->rate[DW_RATE_FP8], &profile->rate[DW_RATE_FP8]);
    assert_same_figure(&h->host_memory, &profile->host_memory);
    dw_hardware_destroy(h);
    dw_hardware_destroy(profile);
}

#define ONE "\"gpus\": 1, \"rates\": {\"bf16\": 1e14}, \"memory\": 8e10, \"memory_bandwidth\": 2e12"
#define MANY                                                                                       \
    "\"gpus\": 16, \"gpus_per_node\": 8, \"gpus_per_domain\": 8, \"rates\": {\"bf16\": 1e14}, "    \
    "\"memory\": 8e10, \"memory_bandwidth\": 2e12"

static void complete_description_without_profile(void **state) {
    dw_hardware *h = NULL;
    (void)state;
    assert_ok(dw_hardware_parse("{" ONE "}", strlen("{" ONE "}"), &h));
    assert_int_equal(h->gpus_per_node, 1);
    assert_int_equal(h->gpus_per_domain, 1);
    expect_round_trip(h);
    dw_hardware_destroy(h);
    assert_ok(dw_hardware_parse("{\"gpus\": 0}", 11, &h));
    assert_int_equal(h->gpus, 0);
    expect_round_trip(h);
    dw_hardware_destroy(h);
}

static void impossible_descriptions_are_rejected(void **state) {
    static const struct {
        const char *text;
        dw_status status;
        const char *part;
    } cases[] = {
        {"", DW_PARSE, "hardware description: line 1"},
        {"{", DW_PARSE, "hardware description: line 1"},
        {"[]", DW_PARSE, "it is an array; expected an object"},
        {"{}", DW_PARSE, "gpus is missing; expected an integer"},
        {"{\"gpus\": 4}", DW_PARSE, "gpus_per_node is missing"},
        {"{\"gpus\": \"8\"}", DW_PARSE, "gpus is a string; expected an integer"},
        {"{\"gpus\": 8.0}", DW_PARSE, "gpus is a real number; expected an integer"},
        {"{\"profile\": \"h100\", \"gpus\": 0}", DW_INVALID_ARGUMENT,
         "gpus is 0 in a description of GPUs; expected 1 to 1048576"},
        {"{\"profile\": \"h100\", \"gpus\": 10000000}", DW_INVALID_ARGUMENT,
         "gpus is 10000000; expected 0 to 1048576"},
        {"{\"profile\": \"h100\", \"gpus\": -8}", DW_INVALID_ARGUMENT, "gpus is -8; expected"},
        {"{\"profile\": \"h100\", \"gpus\": 100000000000000}", DW_INVALID_ARGUMENT,
         "gpus is 100000000000000; expected"},
        {"{\"profile\": \"h100\", \"gpus\": 12}", DW_INVALID_ARGUMENT,
         "gpus is 12 and gpus_per_node is 8; expected a part of one node, or a multiple of 8"},
        {"{\"profile\": \"h100\", \"gpus_per_node\": 0}", DW_INVALID_ARGUMENT,
         "gpus_per_node is 0; expected 1 to 4096"},
        {"{\"profile\": \"h100\", \"gpus_per_domain\": 3}", DW_INVALID_ARGUMENT,
         "gpus_per_node is 8 and gpus_per_domain is 3; expected one to be a multiple"},
        {"{\"profile\": \"h1\"}", DW_NOT_FOUND, "profile: there is no hardware \"h1\""},
        {"{\"profile\": 100}", DW_PARSE, "profile is an integer; expected a string"},
        {"{\"profile\": \"h100\", \"nodes\": 4}", DW_PARSE,
         "it has a field \"nodes\"; expected profile, rates, name"},
        {"{\"profile\": \"h100\", \"memory\": 80}", DW_INVALID_ARGUMENT,
         "memory is 80; expected 1e+08 to 1e+14 bytes (8e10, not 80)"},
        {"{\"profile\": \"h100\", \"memory\": \"80GB\"}", DW_PARSE,
         "memory is a string; expected a number, or an object with \"value\""},
        {"{\"profile\": \"h100\", \"memory\": 0}", DW_INVALID_ARGUMENT, "memory is missing"},
        {"{\"profile\": \"h100\", \"memory\": -1}", DW_INVALID_ARGUMENT, "memory is -1"},
        {"{\"profile\": \"h100\", \"memory\": {}}", DW_PARSE, "memory: value is missing"},
        {"{\"profile\": \"h100\", \"memory\": {\"value\": 8e10, \"unit\": \"B\"}}", DW_PARSE,
         "memory has a field \"unit\"; expected value, kind or source"},
        {"{\"profile\": \"h100\", \"memory\": {\"value\": 8e10, \"kind\": \"guess\"}}", DW_PARSE,
         "kind is \"guess\"; expected published, read, measured, estimated or given"},
        {"{\"profile\": \"h100\", \"rates\": {\"bf16\": 989}}", DW_INVALID_ARGUMENT,
         "rates.bf16 is 989; expected 1e+11 to 1e+18 operations per second (9.89e14, not 989)"},
        {"{\"profile\": \"h100\", \"rates\": {\"int8\": 1e15}}", DW_PARSE,
         "rates has a field \"int8\""},
        {"{\"profile\": \"h100\", \"rates\": [1]}", DW_PARSE, "rates is an array"},
        {"{\"profile\": \"h100\", \"rates\": {\"fp8\": true}}", DW_PARSE,
         "rates: fp8 is a boolean; expected a number"},
        {"{\"profile\": \"h100\", \"rates\": {\"bf16\": 0}}", DW_INVALID_ARGUMENT,
         "rates.bf16 is missing"},
        {"{\"profile\": \"h100\", \"sm_count\": 131.5}", DW_INVALID_ARGUMENT,
         "sm_count is 131.5; expected a whole number"},
        {"{\"profile\": \"h100\", \"cache\": 9e11}", DW_INVALID_ARGUMENT, "cache is 9e+11"},
        {"{\"profile\": \"h100\", \"capability\": 100}", DW_INVALID_ARGUMENT,
         "architecture is \"sm_90a\" and capability is 100"},
        {"{\"profile\": \"h100\", \"name\": \"a\\u0007\"}", DW_PARSE,
         "name has control characters"},
        {"{\"profile\": \"h100\", \"machine\": 3}", DW_PARSE, "machine is an integer"},
        {"{\"profile\": \"h100\", \"gpus\": 16, \"network_bandwidth\": 0}", DW_INVALID_ARGUMENT,
         "network_bandwidth is missing; expected bytes per second of each GPU between nodes"},
        {"{\"profile\": \"h100\", \"network_bandwidth\": 400e12}", DW_INVALID_ARGUMENT,
         "network_bandwidth is 400000000000000"},
        {"{\"profile\": \"h100\", \"link_latency\": 2}", DW_INVALID_ARGUMENT,
         "link_latency is 2; expected 1e-09 to 1 seconds"},
        {"{" MANY "}", DW_INVALID_ARGUMENT, "link_bandwidth is missing"},
        {"{" MANY ", \"link_bandwidth\": 1e11}", DW_INVALID_ARGUMENT,
         "network_bandwidth is missing"},
        {"{\"gpus\": 0, \"memory\": 8e10}", DW_INVALID_ARGUMENT,
         "gpus is 0 in a description of GPUs"},
    };
    (void)state;
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_hardware *h = NULL;
        int64_t live = dw__memory_live();
        dw_status status = dw_hardware_parse(cases[i].text, strlen(cases[i].text), &h);
        if (status != cases[i].status || !strstr(dw_last_error(), cases[i].part))
            print_error("%s: \"%s\" does not have \"%s\"\n", cases[i].text, dw_last_error(),
                        cases[i].part);
        assert_int_equal(status, cases[i].status);
        assert_non_null(strstr(dw_last_error(), cases[i].part));
        assert_null(h);
        assert_int_equal(dw__memory_live(), live);
    }
}

static void files_by_path(void **state) {
    char folder[] = "/tmp/deepwell-hardware-XXXXXX", path[64];
    dw_hardware *h = NULL;
    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/h.json", folder);
    assert_int_equal(dw_hardware_load(path, &h), DW_IO);
    assert_ok(dw__file_write(path, "{\"profile\": \"b200\", \"gpus\": 7}", 30));
    assert_ok(dw_hardware_load(path, &h));
    assert_int_equal(h->gpus, 7);
    dw_hardware_destroy(h);
    assert_ok(dw__file_write(path, "{\"profile\": \"b200\", \"gpus\": 9}", 30));
    assert_int_equal(dw_hardware_load(path, &h), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "h.json\": gpus is 9"));
    assert_int_equal(dw_hardware_load(folder, &h), DW_IO);
    assert_int_equal(dw_hardware_open(path, &h), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_hardware_open(folder, &h), DW_IO);
    assert_int_equal(dw_hardware_open("nowhere.json", &h), DW_NOT_FOUND);
    assert_non_null(strstr(dw_last_error(), "or give the path of a file"));
    assert_ok(dw_hardware_open("h200:24", &h));
    assert_int_equal(h->gpus, 24);
    dw_hardware_destroy(h);
    unlink(path);
    rmdir(folder);
}

static void each_allocation_of_files_fails(void **state) {
    static const char text[] = "{\"profile\": \"h100\", \"memory\": {\"value\": 8e10}}";
    (void)state;
    for (int64_t left = 0;; left++) {
        dw_hardware *h = NULL;
        char *written = NULL;
        int64_t live = dw__memory_live();
        dw__memory_fail_once(left);
        dw_status status = dw_hardware_parse(text, strlen(text), &h);
        if (status == DW_OK) status = dw_hardware_json(h, &written);
        int64_t failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        dw_text_free(written);
        dw_hardware_destroy(h);
        assert_int_equal(dw__memory_live(), live);
        assert_int_equal(status, failures ? DW_OUT_OF_MEMORY : DW_OK);
        if (failures == 0) break;
    }
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
        cmocka_unit_test(rates_follow_from_sms),
        cmocka_unit_test(links_follow_from_their_version),
        cmocka_unit_test(every_figure_has_a_source),
        cmocka_unit_test(figures_from_memory_are_estimates),
        cmocka_unit_test(names_and_counts),
        cmocka_unit_test(unknown_names_are_rejected),
        cmocka_unit_test(profiles_scale_to_another_number_of_gpus),
        cmocka_unit_test(each_allocation_fails),
        cmocka_unit_test(files_keep_everything),
        cmocka_unit_test(files_keep_every_bit),
        cmocka_unit_test(a_profile_with_changes),
        cmocka_unit_test(complete_description_without_profile),
        cmocka_unit_test(impossible_descriptions_are_rejected),
        cmocka_unit_test(files_by_path),
        cmocka_unit_test(each_allocation_of_files_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
