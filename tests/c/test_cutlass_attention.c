/* CUTLASS's attention kernel behind dw_attention, up to the library: the calls that reach it and their form,
 * those that are rejected and their messages, and the result of its first-use check. Driver and library are fakes;
 * tests/python/test_cutlass.py has the real library. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "fake/fake_attention.h"
#include "fake/fake_cutlass.h"
#include <math.h>

static const char name[] = "cutlass.sm100.attention";

static dw_attention named_call(void) {
    dw_attention call = plain_call();
    call.kernel = name;
    call.workspace = NULL;
    call.workspace_bytes = 0;
    return call;
}

/* Starts the tests of a child process: a Blackwell GPU, without first-use checks. */
static void on_blackwell(void) {
    fake->current = 1001;
    fake->capability = 100;
    fake->launch_count = provider->launches = 0;
}

#define SAID(words) (strstr(dw_last_error(), words) != NULL)

/* ---- supported calls ---------------------------------------------------------------------------------------- */

static void launches(void *unused) {
    (void)unused;
    on_blackwell();
    dw_attention call = named_call();
    const dw_cutlass_attention *got = &provider->call.attention;
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_OK);
    CHILD_REQUIRE(provider->launches == 0);
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK);
    CHILD_REQUIRE(provider->launches == 1 && strcmp(provider->last->name, name) == 0);
    CHILD_REQUIRE(fake->launch_count == 0 && fake->loads == 0);
    CHILD_REQUIRE(provider->stream == call.stream);
    CHILD_REQUIRE(got->batch == 3 && got->heads == 4 && got->heads_kv == 2);
    CHILD_REQUIRE(got->queries == 1000 && got->keys == 900 && got->head_dim == 128);
    CHILD_REQUIRE(!got->causal && got->scale == 0.125f);
    CHILD_REQUIRE(got->q == call.q.data && got->k == call.k.data && got->v == call.v.data);
    CHILD_REQUIRE(got->o == call.o.data && got->lse == call.lse);
    CHILD_REQUIRE(got->q_stride == 512 && got->kv_stride == 256 && got->o_stride == 512);
    CHILD_REQUIRE(got->q_batch_stride == 512000 && got->kv_batch_stride == 230400);
    CHILD_REQUIRE(got->o_batch_stride == 512000 && got->processors == fake->sm_count);

    /* A mask that hides nothing counts as no mask; lse may be absent. */
    call.window_left = 5000, call.window_right = 2000, call.lse = NULL;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && !got->causal && !got->lse);
    call = named_call();
    call.seq_len_q = call.seq_len_kv, call.window_right = 0;
    for (int corner = 0; corner < 2; corner++) {
        call.bottom_right = corner;
        CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && got->causal);
    }

    /* PyTorch gives axes of length 1 any stride; the launcher passes other strides. */
    call = named_call();
    call.batch = call.heads_q = call.heads_kv = call.seq_len_q = call.seq_len_kv = 1;
    dw_attention_tensor *const all[] = {&call.q, &call.k, &call.v, &call.o};
    for (size_t i = 0; i < DW_COUNT(all); i++)
        all[i]->batch = 3 + (int64_t)i, all[i]->head = -1, all[i]->row = 0;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK);
    const int64_t strides[] = {got->q_stride,       got->kv_stride,       got->o_stride,
                               got->q_batch_stride, got->kv_batch_stride, got->o_batch_stride};
    for (size_t i = 0; i < DW_COUNT(strides); i++) CHILD_REQUIRE(strides[i] == 128);

    /* A call without queries or keys has the same result as without a kernel's name. */
    const int before = provider->launches;
    call = named_call();
    call.seq_len_q = 0;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && fake->launch_count == 0);
    call = named_call();
    call.seq_len_kv = 0;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && fake->launch_count == 1);
    CHILD_REQUIRE(strcmp(fake->launches[0].name, "reference_attention_forward") == 0);
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_OK);
    CHILD_REQUIRE(provider->launches == before);
}

/* No kernel needs workspace yet, but one of a future library may. */
static void workspace(void *unused) {
    (void)unused;
    on_blackwell();
    dw_attention call = named_call();
    provider->workspace_bytes = 4096;
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_OK);
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_INVALID_ARGUMENT && SAID("needs 4096"));
    call.workspace = (void *)((uintptr_t)10 << 32), call.workspace_bytes = 4095;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_INVALID_ARGUMENT && SAID("has 4095 bytes"));
    CHILD_REQUIRE(provider->launches == 0);
    call.workspace_bytes = 4096;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && provider->workspace == call.workspace);
}

/* Programs compiled before calls had the last members still work. */
static void shorter_structure(void *unused) {
    (void)unused;
    on_blackwell();
    dw_attention call = named_call();
    size_t bytes;
    char text[256];
    call.struct_size = offsetof(dw_attention, kernel);
    call.kernel = "not read";
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED && SAID("DEEPWELL_BLACKWELL=try"));
    fake->current = 1000;
    fake->capability = 90;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && provider->launches == 0);
    CHILD_REQUIRE(strcmp(fake->launches[0].name, "sm90_attention_forward") == 0);
    CHILD_REQUIRE(dw_attention_supported(&call, true) == DW_OK);
    CHILD_REQUIRE(dw_attention_backward_workspace(&call, &bytes) == DW_OK && bytes > 0);
    CHILD_REQUIRE(dw_attention_class(&call, true, text, sizeof text) == DW_OK);
    call.struct_size--;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_INVALID_ARGUMENT && SAID("struct_size is"));
    CHILD_REQUIRE(dw_attention_class(&call, true, text, sizeof text) == DW_INVALID_ARGUMENT);
    /* A structure that ends before the stream of dropout has the named kernel. */
    dw_attention read;
    call.struct_size = offsetof(dw_attention, dropout_stream);
    call.dropout_stream = 3;
    CHILD_REQUIRE(dw__attention_read(&call, &read) == DW_OK);
    CHILD_REQUIRE(read.kernel == call.kernel && read.dropout_stream == 0);
    call.struct_size = sizeof call;
    CHILD_REQUIRE(dw__attention_read(&call, &read) == DW_OK && read.dropout_stream == 3);
}

/* ---- rejected calls ----------------------------------------------------------------------------------------- */

static void refused(const dw_attention *call, dw_status status, const char *words) {
    CHILD_REQUIRE(dw_attention_forward(call) == status);
    if (!SAID(words)) fprintf(stderr, "expected \"%s\"\n", words);
    CHILD_REQUIRE(SAID(words) && SAID("attention"));
    CHILD_REQUIRE(dw_attention_supported(call, false) == status && SAID(words));
    CHILD_REQUIRE(provider->launches == 0 && fake->launch_count == 0 && fake->loads == 0);
}

static void refusals(void *unused) {
    (void)unused;
    on_blackwell();
#define REFUSE(change, words)                                                                      \
    do {                                                                                           \
        dw_attention call = named_call();                                                          \
        change;                                                                                    \
        refused(&call, DW_UNSUPPORTED, words);                                                     \
    } while (0)
    REFUSE(call.dtype = DW_F16,
           "cutlass.sm100.attention does not support elements other than bf16");
    REFUSE(call.softcap = 3.0f, "does not support a soft cap");
    REFUSE(call.dropout = 0.5f, "does not support dropout");
    REFUSE((call.offsets_q = call.offsets_k = (int32_t *)16, call.total_q = call.total_k = 1000),
           "does not support packed sequences");
    REFUSE((call.window_left = 70, call.window_right = 0),
           "does not support a window other than the causal");
    REFUSE(call.window_right = 3, "does not support a window other than the causal");
    REFUSE(call.q = tensor(1, 4, 1000, 64), "the head stride of q is 64 elements; expected 128");
    REFUSE((call.v.head = 900 * 128, call.v.row = 128), "the head stride of v is 115200 elements");
    REFUSE(call.v.row = 512, "the row stride of k is 256 elements and that of v 512");
    REFUSE(call.k.batch += 8, "the batch stride of k is 230408 elements and that of v 230400");
#undef REFUSE
    /* The library itself rejects these calls. */
    dw_attention call = named_call();
    provider->refused = "head dimension 128: another one";
    refused(&call, DW_UNSUPPORTED,
            "attention (batch 3, 4 query heads on 2, seq_len 1000 x 900, head_dim 128, bf16): "
            "cutlass.sm100.attention: head dimension 128: another one");
    provider->refused = NULL;
    /* These calls are invalid for every backend. */
    call.scale = NAN;
    refused(&call, DW_INVALID_ARGUMENT, "scale is nan");
    /* The kernel has no backward. */
    call = named_call();
    size_t bytes;
    CHILD_REQUIRE(dw_attention_supported(&call, true) == DW_UNSUPPORTED);
    CHILD_REQUIRE(SAID("kernels are named for forward alone"));
    CHILD_REQUIRE(dw_attention_backward(&call) == DW_UNSUPPORTED && SAID("expected NULL"));
    CHILD_REQUIRE(dw_attention_backward_workspace(&call, &bytes) == DW_UNSUPPORTED);
}

static void names(void *unused) {
    (void)unused;
    on_blackwell();
    dw_attention call = named_call();
    call.kernel = "cutlass.sm100.attention.fp4";
    refused(&call, DW_INVALID_ARGUMENT,
            "kernel \"cutlass.sm100.attention.fp4\" is not known for this; expected one of "
            "sm90_attention_forward, sm100_attention_forward, sm120_attention_forward, "
            "cutlass.sm100.attention");
    call.kernel = "";
    refused(&call, DW_INVALID_ARGUMENT, "kernel \"\" is not known");
    /* Deepwell's kernel runs on its own GPU, and on Blackwell on request. */
    call.kernel = "sm90_attention_forward";
    refused(
        &call, DW_UNSUPPORTED,
        "kernel is \"sm90_attention_forward\"; expected sm100_attention_forward, which GPU 1 has");
    call.kernel = "sm100_attention_forward";
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && fake->launch_count == 1);
    CHILD_REQUIRE(strcmp(fake->launches[0].name, "sm100_attention_forward") == 0);
    call.kernel = NULL;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED && SAID("or by its name"));
    /* The kernel does not support this GPU. */
    fake->launch_count = fake->loads = 0;
    fake->current = 1000;
    fake->capability = 90;
    call.kernel = name;
    refused(&call, DW_UNSUPPORTED, "is for compute capability 10.0; GPU 0 is a Fake GPU 0 (9.0)");
    call.kernel = "sm90_attention_forward";
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && provider->launches == 0);
}

static void not_built(void *unused) {
    (void)unused;
    on_blackwell();
    setenv("DEEPWELL_CUTLASS", "/nowhere/libnone.so", 1);
    dw_attention call = named_call();
    refused(&call, DW_UNSUPPORTED, "`make cutlass` builds them");
    call.kernel = "anything";
    refused(&call, DW_INVALID_ARGUMENT, "there is sm90_attention_forward, sm100_attention_forward");
}

/* ---- the first-use check ------------------------------------------------------------------------------------ */

/* Replaces both kernels: every element holds its position in the tensor. */
static bool wrong;
static _Atomic int computed;

static uint16_t element(int batch, int head, int row) {
    return (uint16_t)(0x3f80 + (batch * 7 + head * 3 + row) % 32);
}

static void compute_by_definition(const fake_launch *launch) {
    const dw_attention_params p = params_of(launch);
    if ((uintptr_t)p.q.data % ((uintptr_t)1 << 32) == 0) return; /* a call of the test itself */
    computed++;
    for (int b = 0; b < p.batch; b++)
        for (int h = 0; h < p.heads_q; h++)
            for (int r = 0; r < p.rows_q; r++) {
                uint16_t *o = p.o.data;
                for (int d = 0; d < p.head_dim; d++)
                    o[b * p.o.batch + h * p.o.head + r * p.o.row + d] = element(b, h, r);
                p.lse[(b * p.heads_q + h) * p.rows_q + r] = 0.5f;
            }
}

static void compute_as_cutlass(const dw_cutlass_kernel *kernel, const void *given) {
    const dw_cutlass_attention *c = given;
    CHILD_REQUIRE(strcmp(kernel->name, name) == 0 && c->size_of == sizeof *c);
    if ((uintptr_t)c->q % ((uintptr_t)1 << 32) == 0) return;
    computed++;
    for (int b = 0; b < c->batch; b++)
        for (int h = 0; h < c->heads; h++)
            for (int r = 0; r < c->queries; r++) {
                uint16_t *o = c->o;
                for (int d = 0; d < c->head_dim; d++)
                    o[b * c->o_batch_stride + r * c->o_stride + h * c->head_dim + d] =
                        wrong && r == 200 ? 0 : element(b, h, r);
                c->lse[(b * c->heads + h) * c->queries + r] = 0.5f;
            }
}

static void check_first_uses(void) {
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
    on_blackwell();
    fake->kernel = compute_by_definition;
    provider->kernel = compute_as_cutlass;
    computed = 0;
}

static void correct_kernel_passes(void *unused) {
    (void)unused;
    check_first_uses();
    dw_attention call = named_call();
    provider->workspace_bytes = 512; /* the first-use check allocates the workspace */
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_OK);
    CHILD_REQUIRE(computed == 4); /* two trials, each with two kernels */
    CHILD_REQUIRE(provider->call.attention.processors == 3);
    CHILD_REQUIRE(provider->call.attention.queries > 256 && !provider->call.attention.causal);
    CHILD_REQUIRE(fake->memory == 0 && fake->relaxed > 0);
    provider->workspace_bytes = 0;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && computed == 4);
    /* Another head dimension, and a mask, each need another kernel. */
    for (int kernel = 1; kernel < 4; kernel++) {
        call = named_call();
        if (kernel & 1) call.seq_len_q = call.seq_len_kv, call.window_right = 0;
        if (kernel & 2) {
            call.head_dim = 64;
            call.q.head = call.k.head = call.v.head = call.o.head = 64;
        }
        computed = 0;
        for (int again = 0; again < 2; again++)
            CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && computed == 4);
    }
    CHILD_REQUIRE(fake->memory == 0);
}

static void wrong_kernel_is_rejected(void *unused) {
    (void)unused;
    check_first_uses();
    dw_attention call = named_call();
    wrong = true;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(SAID("kernel cutlass.sm100.attention, head_dim 128 disagrees with the "
                       "reference on Fake GPU 1: element "));
    CHILD_REQUIRE(fake->memory == 0);
    wrong = false; /* the result is kept */
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_UNSUPPORTED && SAID("disagrees"));
    call.seq_len_q = call.seq_len_kv, call.window_right = 0; /* another kernel */
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK);
}

/* A failure that prevents the first-use check is an error, not a verdict. */
static void failed_check_is_an_error(void *unused) {
    (void)unused;
    check_first_uses();
    dw_attention call = named_call();
    provider->result = DW_CUTLASS_FAILED, provider->error = "no more of anything";
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_STATE);
    CHILD_REQUIRE(SAID("comparing the kernel with the reference") && SAID("no more of anything"));
    CHILD_REQUIRE(fake->memory == 0);
    provider->result = DW_CUTLASS_OK;
    int64_t after = 0;
    for (int64_t failures = 1; failures > 0; after++) {
        dw__memory_fail_once(after);
        const dw_status status = dw_attention_supported(&call, false);
        failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        CHILD_REQUIRE(status == (failures ? DW_OUT_OF_MEMORY : DW_OK) && fake->memory == 0);
    }
    CHILD_REQUIRE(after > 3);
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK);
    /* The launch fails. */
    provider->result = DW_CUTLASS_FAILED, provider->error = "gone";
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_STATE && SAID("batch 3") &&
                  SAID("attention: gone"));
}

/* ---- explanations -------------------------------------------------------------------------------------------- */

static const char *member(const json_t *row, const char *key) {
    const char *text = json_string_value(json_object_get(row, key));
    return text ? text : "";
}

/* Returns CUTLASS's row, or NULL. The caller releases *root. */
static json_t *row_of(const dw_attention *call, bool backward, const char *target, json_t **root) {
    char *text = NULL;
    json_t *row;
    size_t index;
    CHILD_REQUIRE(dw_attention_explain(call, backward, target, &text) == DW_OK);
    *root = json_loads(text, 0, NULL);
    dw_text_free(text);
    CHILD_REQUIRE(strcmp(member(*root, "chosen"), "cutlass") != 0);
    json_array_foreach(json_object_get(*root, "candidates"), index, row) {
        if (strcmp(json_string_value(json_object_get(row, "name")), "cutlass") == 0) return row;
    }
    return NULL;
}

static void explained(void *unused) {
    (void)unused;
    dw_attention call = named_call();
    json_t *root, *row = row_of(&call, false, "sm_100a", &root);
    CHILD_REQUIRE(json_is_true(json_object_get(row, "runs")));
    CHILD_REQUIRE(strcmp(member(row, "source"), name) == 0);
    CHILD_REQUIRE(strcmp(member(row, "proof"), "nowhere") == 0);
    json_decref(root);
    call.softcap = 2.0f;
    row = row_of(&call, false, "sm_100a", &root);
    CHILD_REQUIRE(!json_is_true(json_object_get(row, "runs")));
    CHILD_REQUIRE(strstr(member(row, "reason"), "does not support a soft cap"));
    json_decref(root);
    call.softcap = 0.0f;
    call.kernel = NULL;
    row = row_of(&call, true, "sm_100a", &root);
    CHILD_REQUIRE(strstr(member(row, "reason"), "is of forward"));
    json_decref(root);
    CHILD_REQUIRE(!row_of(&call, false, "sm_90a", &root));
    json_decref(root);
    CHILD_REQUIRE(!row_of(&call, false, "sm_103a", &root));
    json_decref(root);
}

/* Each test runs in its own process, because a process keeps what it has loaded. */
typedef void (*check)(void *);
static void in_child(void **state) { expect_child(start_child(*(check *)*state, NULL)); }

static int setup(void **state) {
    begin_attention(state);
    load_fake_provider();
    return 0;
}

/* clang-format off */
#define CHECK(function) {#function, in_child, NULL, NULL, &(check){function}}
/* clang-format on */

int main(void) {
    const struct CMUnitTest tests[] = {
        CHECK(launches),
        CHECK(workspace),
        CHECK(shorter_structure),
        CHECK(refusals),
        CHECK(names),
        CHECK(not_built),
        CHECK(correct_kernel_passes),
        CHECK(wrong_kernel_is_rejected),
        CHECK(failed_check_is_an_error),
        CHECK(explained),
    };
    return cmocka_run_group_tests(tests, setup, end_on_fake_gpu);
}
