/* The calling thread's last failure. Each thread has one fixed buffer, so reporting a failure (out of memory
 * above all) needs no memory. */
#include "base/base.h"
#include "deepwell/version.h"
#include <stdio.h>
#include <string.h>

enum { MESSAGE_BYTES = 2048 };

static _Thread_local char last_message[MESSAGE_BYTES];

dw_status(dw__fail)(dw_status status, const char *format, ...) {
    /* The arguments may point into the old message, so the new one is built in a separate buffer. */
    char message[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    dw__make_plain(message);
    memcpy(last_message, message, sizeof message);
    return status;
}

/* `end` is where the text goes on; one byte is left for its end. */
static char *append(char *end, const char *text) {
    const size_t room = (size_t)(last_message + MESSAGE_BYTES - 1 - end), bytes = strlen(text);
    const size_t taken = bytes < room ? bytes : room;
    memcpy(end, text, taken);
    return end + taken;
}

dw_status(dw__fail_join)(dw_status status, const char *first, const char *second,
                         const char *third) {
    *append(append(append(last_message, first), second), third) = '\0';
    return status;
}

dw_status(dw__fail_prefix)(dw_status status, const char *format, ...) {
    char prefix[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(prefix, sizeof prefix, format, arguments);
    va_end(arguments);

    size_t used = strlen(prefix);
    size_t separator = used + 2 < sizeof prefix ? 2 : 0;
    memcpy(prefix + used, ": ", separator);
    used += separator;
    size_t rest = strlen(last_message);
    if (rest > sizeof prefix - 1 - used) rest = sizeof prefix - 1 - used;
    memcpy(prefix + used, last_message, rest);
    prefix[used + rest] = '\0';
    dw__make_plain(prefix);
    memcpy(last_message, prefix, used + rest + 1);
    return status;
}

dw_status(dw__fail_memory)(const char *what, size_t bytes) {
    return dw__fail(DW_OUT_OF_MEMORY,
                    "%zu bytes for %s could not be allocated; free memory on this machine, or use "
                    "a smaller batch or sequence",
                    bytes, what);
}

const char *dw_last_error(void) { return last_message; }

const char *dw_status_name(dw_status status) {
    switch (status) {
#define NAME(name, value, text)                                                                    \
    case DW_##name: return #name;
        DW_STATUS_MAP(NAME)
#undef NAME
    }
    return "UNKNOWN";
}

const char *dw_status_text(dw_status status) {
    switch (status) {
#define TEXT(name, value, text)                                                                    \
    case DW_##name: return text;
        DW_STATUS_MAP(TEXT)
#undef TEXT
    }
    return "unknown status";
}

const char *dw_version(void) { return DW_VERSION; }
