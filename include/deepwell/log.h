/* Deepwell's log lines. They are dropped until a sink is set.
 *
 *     static void print(void *context, int level, const char *line) { fprintf(context, "%d %s\n", level, line); }
 *     dw_log_set_sink(print, stderr, 1);
 */
#ifndef DEEPWELL_LOG_H
#define DEEPWELL_LOG_H

#include "deepwell/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `level`: 0 debug, 1 info, 2 warning. `line` has no newline and is valid during the call only. The sink may be called
 * from any thread. */
typedef void (*dw_log_sink)(void *context, int level, const char *line);
/* `sink` NULL turns logging off. Lines below `minimum_level` are dropped. */
DW_API void dw_log_set_sink(dw_log_sink sink, void *context, int minimum_level);

#ifdef __cplusplus
}
#endif
#endif
