/* Status codes, and the message of the last failure.
 *
 *     if (dw_graph_create(&graph) != DW_OK) fprintf(stderr, "%s\n", dw_last_error());
 *
 * Every function of Deepwell that can fail returns a dw_status and writes its results through pointers. After a failure
 * the calling thread's message names what was wrong, the value, what was expected and what to do next. The library
 * never prints, aborts or exits.
 */
#ifndef DEEPWELL_STATUS_H
#define DEEPWELL_STATUS_H

#if defined(_WIN32)
#error "Deepwell runs on Linux"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define DW_API __attribute__((visibility("default")))

/* code, value, one-line meaning */
#define DW_STATUS_MAP(X)                                                                           \
    X(OK, 0, "success")                                                                            \
    X(INVALID_ARGUMENT, 1, "an argument is outside what the function accepts")                     \
    X(SHAPE, 2, "shapes disagree")                                                                 \
    X(TYPE, 3, "element types disagree or are not supported by the operation")                     \
    X(UNSUPPORTED, 4, "not supported on this machine or in this version")                          \
    X(OUT_OF_MEMORY, 5, "memory could not be allocated")                                           \
    X(IO, 6, "a file could not be read or written")                                                \
    X(PARSE, 7, "text or a file is malformed")                                                     \
    X(NOT_FOUND, 8, "a named thing does not exist")                                                \
    X(STATE, 9, "the call is not valid in the object's present state")                             \
    X(INTERNAL, 10, "a defect in Deepwell: please report it with the message")                     \
    X(INDEX, 11, "an index lies outside of what it selects from")                                  \
    X(DEVICE, 12, "a device failed while it worked; its context is lost, so start a new process")

typedef enum dw_status {
#define DW_STATUS_ENUM(name, value, text) DW_##name = value,
    DW_STATUS_MAP(DW_STATUS_ENUM)
#undef DW_STATUS_ENUM
} dw_status;

/* "INVALID_ARGUMENT" for DW_INVALID_ARGUMENT; "UNKNOWN" for an unknown status. */
DW_API const char *dw_status_name(dw_status status);
/* The one-line meaning in the table above. */
DW_API const char *dw_status_text(dw_status status);
/* Message of the last failure on this thread, "" if there was none. Valid until the next failing call. */
DW_API const char *dw_last_error(void);
/* The library's version: DW_VERSION of the headers that it was built with (deepwell/version.h). */
DW_API const char *dw_version(void);

#ifdef __cplusplus
}
#endif
#endif
