/* Where Deepwell's log lines go: nowhere, until a sink is set. */
#ifndef DEEPWELL_LOG_H
#define DEEPWELL_LOG_H

#include "deepwell/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `level`: 0 debug, 1 info, 2 warning. `line` has no newline and is valid during the call only.
 * May be called from any thread. */
typedef void (*dw_log_sink)(void *context, int level, const char *line);
/* `sink` NULL: silence. Lines below `minimum_level` are dropped. */
DW_API void dw_log_set_sink(dw_log_sink sink, void *context, int minimum_level);

#ifdef __cplusplus
}
#endif
#endif
