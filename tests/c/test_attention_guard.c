/* Blackwell's attention by the library's own launcher and guard, on an emulated GPU: a correct kernel passes, a wrong one
 * is refused. Results by all shapes are in test_emulator_attention. */
#include "emulated_kernel.h"
#include "kernel/cuda/attention.h"
#include <sys/wait.h>
#include <unistd.h>

enum { HEAD_DIM = 64 };

static const dw__attention_shape shape = {.head_dim = HEAD_DIM, .window = true, .blackwell = true};

static dw__jit_variant fast_variant(void) {
    return dw__attention_variant(&shape, DW__ATTENTION_FORWARD, "", dw__attention_arch(true));
}

static dw__jit_file carried[3]; /* ends with none */
static void carry(const dw__jit_variant *variant, size_t at, char **text) {
    dw__text name = {0};
    size_t bytes;
    assert_true(read_ptx(variant, text, &bytes));
    assert_int_equal(dw__jit_variant_name(variant, &name), DW_OK);
    carried[at] = (dw__jit_file){name.text, (const unsigned char *)*text,
                                 (const unsigned char *)*text + bytes};
    dw__jit_carried_now.ptx = carried;
}

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition,         \
                    dw_last_error());                                                              \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static const dw__attention_kernels *first_use(bool wrong) {
    const dw__jit_variant fast = fast_variant(),
                          reference = dw__attention_reference_variant(false, DW__ATTENTION_FORWARD,
                                                                      dw__attention_arch(true));
    const dw_device *device;
    const dw__context *context;
    const dw__attention_kernels *kernels = NULL;
    char *text = NULL, *other = NULL, was[16], now[16];
    carry(&fast, 0, &text);
    carry(&reference, 1, &other);
    if (wrong) { /* the factors of Q K^T taken for F16: one constant, nothing that a checker sees */
        const unsigned f16 = 1u << 4 | 128u >> 3 << 17 | 128u >> 4 << 24, bf16 = 1u << 7 | 1u << 10;
        snprintf(was, sizeof was, " %u;", f16 | bf16);
        snprintf(now, sizeof now, " %u;", f16);
        char *at = strstr(text, was);
        REQUIRE(at != NULL);
        memset(at, ' ', strlen(was));
        memcpy(at, now, strlen(now));
    }
    REQUIRE(dw_device_find("emulator:sm_100a", &device) == DW_OK);
    REQUIRE(device->context(&context) == DW_OK);
    REQUIRE(dw__attention_kernels_of(context, &shape, DW__ATTENTION_FORWARD, &kernels) == DW_OK);
    return kernels;
}

static void correct(void) { REQUIRE(!first_use(false)->disabled); }
static void wrong(void) {
    const dw__attention_kernels *kernels = first_use(true);
    REQUIRE(kernels->disabled);
    fprintf(stderr, "%s\n", kernels->reason);
    REQUIRE(
        strstr(kernels->reason, "attention_forward.sm_100f.") &&
        strstr(kernels->reason, "disagrees with the reference on Deepwell emulator of sm_100a"));
    REQUIRE(first_use(false)->disabled); /* once and for all */
}

/* In a child: a process keeps what was found. */
static void in_child(void (*check)(void)) {
    const dw__jit_variant fast = fast_variant();
    int status = 0;
    need_ptx(&fast);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        unsetenv("DEEPWELL_GUARD");
        check();
        fflush(NULL);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void correct_kernel_passes(void **state) {
    (void)state;
    in_child(correct);
}
static void wrong_kernel_is_refused(void **state) {
    (void)state;
    in_child(wrong);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernel_passes),
        cmocka_unit_test(wrong_kernel_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
