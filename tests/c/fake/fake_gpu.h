/* Set-up for tests of the GPU's host side: the fake driver and the fake compiler, a separate cache, and child
 * processes, because a process loads a driver only once. */
#ifndef FAKE_GPU_H
#define FAKE_GPU_H

#include "base/base.h"
#include "fake_cuda.h"
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static fake_cuda *fake; /* of this process, once it is loaded */

static inline void load_fake_driver(void) {
    void *library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_GLOBAL);
    if (!library) fprintf(stderr, "%s\n", dlerror());
    assert_non_null(library);
    fake_cuda *(*state)(void) = NULL;
    *(void **)&state = dlsym(library, "fake_cuda_state");
    assert_non_null(state);
    fake = state();
}

/* Makes a new folder, which is also the cache. */
static inline void use_fake_compiler(char *made, size_t bytes) {
    snprintf(made, bytes, "%s/deepwell_test_XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    assert_non_null(mkdtemp(made));
    setenv("DEEPWELL_NVRTC", FAKE_NVRTC, 1);
    setenv("DEEPWELL_CACHE", made, 1);
    unsetenv("FAKE_NVRTC_MS");
    unsetenv("FAKE_NVRTC_FAIL");
}

static inline void remove_folder(const char *path) { (void)dw__folder_remove(path); }

/* Set-up and tear-down for groups of kernel tests: on a fake GPU, with first uses not checked. */
static char folder[256];
static inline int begin_on_fake_gpu(void **state) {
    (void)state;
    load_fake_driver();
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    use_fake_compiler(folder, sizeof folder);
    return 0;
}
static inline int end_on_fake_gpu(void **state) {
    (void)state;
    remove_folder(folder);
    return 0;
}

#define CHILD_REQUIRE(condition)                                                                   \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition,         \
                    dw_last_error());                                                              \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* `check` uses CHILD_REQUIRE. */
static inline pid_t start_child(void (*check)(void *), void *context) {
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        check(context);
        _exit(0);
    }
    return child;
}

static inline void expect_child(pid_t child) {
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#endif
