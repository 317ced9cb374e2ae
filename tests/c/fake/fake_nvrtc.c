/* A compiler that compiles nothing: its "cubin" is ELF's first bytes, then the options, one per line. The
 * environment sets its duration (FAKE_NVRTC_MS) and its failure (FAKE_NVRTC_FAIL=1: with a log, 2: an empty
 * cubin). */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef struct program {
    char *source, *cubin;
    size_t cubin_bytes;
    const char *log;
} program;

static const char failed_log[] = "file.cu(3): warning: this is nothing\n"
                                 "file.cu(7): error: identifier \"nonsense\" is undefined\n"
                                 "1 error detected\n";

static int setting(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }

API int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
API const char *nvrtcGetErrorString(int result) {
    return result == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_FAKE";
}
API int nvrtcCreateProgram(void **made, const char *source, const char *name, int header_count,
                           const char *const *headers, const char *const *header_names) {
    (void)name, (void)header_count, (void)headers, (void)header_names;
    program *p = calloc(1, sizeof *p);
    p->source = strdup(source);
    p->log = "";
    *made = p;
    return 0;
}
API int nvrtcDestroyProgram(void **made) {
    program *p = *made;
    free(p->source);
    free(p->cubin);
    free(p);
    *made = NULL;
    return 0;
}
API int nvrtcCompileProgram(void *made, int option_count, const char *const *options) {
    program *p = made;
    size_t bytes = 64;
    usleep((useconds_t)setting("FAKE_NVRTC_MS") * 1000);
    if (setting("FAKE_NVRTC_FAIL") == 1) {
        p->log = failed_log;
        return 6;
    }
    if (setting("FAKE_NVRTC_FAIL") == 2) return 0;
    for (int i = 0; i < option_count; i++) bytes += strlen(options[i]) + 1;
    p->cubin = calloc(1, bytes);
    strcpy(p->cubin, "\177ELF\n");
    for (int i = 0; i < option_count; i++) {
        strcat(p->cubin, options[i]);
        strcat(p->cubin, "\n");
    }
    p->cubin_bytes = bytes;
    return 0;
}
API int nvrtcGetProgramLogSize(void *made, size_t *bytes) {
    *bytes = strlen(((program *)made)->log) + 1;
    return 0;
}
API int nvrtcGetProgramLog(void *made, char *log) {
    strcpy(log, ((program *)made)->log);
    return 0;
}
API int nvrtcGetPTXSize(void *made, size_t *bytes) { /* of text, with its NUL */
    const program *p = made;
    *bytes = p->cubin ? strlen(p->cubin) + 2 : 0;
    return 0;
}
API int nvrtcGetPTX(void *made, char *ptx) {
    sprintf(ptx, "//PTX%s", ((program *)made)->cubin + 4);
    return 0;
}
API int nvrtcGetCUBINSize(void *made, size_t *bytes) {
    *bytes = ((program *)made)->cubin_bytes;
    return 0;
}
API int nvrtcGetCUBIN(void *made, char *cubin) {
    program *p = made;
    memcpy(cubin, p->cubin, p->cubin_bytes);
    return 0;
}
