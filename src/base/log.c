/* Log lines to the caller's sink. The sink runs outside the lock, because it may itself call
 * Deepwell, or wait for a lock (Python's) whose owner is about to set the sink. */
#include "deepwell/log.h"
#include "base/base.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

enum { LINE_BYTES = 1024, SILENCE = 1 << 30 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dw_log_sink current_sink;
static void *current_context;
static _Atomic int threshold = SILENCE; /* read without the lock: a dropped line costs one load */

void dw_log_set_sink(dw_log_sink sink, void *context, int minimum_level) {
    pthread_mutex_lock(&lock);
    current_sink = sink;
    current_context = context;
    atomic_store(&threshold, sink ? minimum_level : SILENCE);
    pthread_mutex_unlock(&lock);
}

void dw__log(dw__log_level level, const char *format, ...) {
    if ((int)level < atomic_load_explicit(&threshold, memory_order_relaxed)) return;
    char line[LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);

    pthread_mutex_lock(&lock);
    dw_log_sink sink = current_sink;
    void *context = current_context;
    pthread_mutex_unlock(&lock);
    if (sink) sink(context, (int)level, line);
}
