/* The log of a run. A resumed run truncates it to the step that it resumes from and appends to it, so that the log
 * reads as if the run had never been interrupted. */
#include "train.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void complain(const char *action, const char *path) {
    fprintf(stderr, "deepwell: cannot %s the log \"%s\": %s\n", action, path, strerror(errno));
}

/* Returns whether the line is complete and about a step that the run has done. */
static int belongs(const char *line, int64_t step) {
    json_t *object = json_loads(line, 0, NULL);
    const json_t *number = json_object_get(object, "step");
    int keep = json_is_integer(number) && json_integer_value(number) <= step;
    json_decref(object);
    return keep && line[strlen(line) - 1] == '\n';
}

/* Truncates the log after the last line that belongs to the run. Returns 0 on failure. Steps only rise in a log, so all
 * other lines are at its end. Truncating needs no second file that a killed process would leave behind. */
static int cut_back(const char *path, int64_t step) {
    FILE *log = fopen(path, "r+e");
    if (!log) return 0;
    char *line = NULL;
    size_t capacity = 0;
    off_t at = 0, end = 0;
    for (ssize_t got; (got = getline(&line, &capacity, log)) > 0;) {
        at += got;
        if (belongs(line, step)) end = at;
    }
    free(line);
    int fine = feof(log) && !ferror(log) && (end == at || ftruncate(fileno(log), end) == 0) &&
               fsync(fileno(log)) == 0;
    return fclose(log) == 0 && fine;
}

FILE *train_log_open(const char *path, int64_t step, int resume) {
    struct stat info;
    int exists = stat(path, &info) == 0, regular = exists && S_ISREG(info.st_mode);
    if (regular && info.st_size > 0 && !resume) {
        fprintf(stderr,
                "deepwell: the log \"%s\" holds lines of an earlier run; name another file, remove "
                "it, or "
                "resume that run\n",
                path);
        return NULL;
    }
    if (regular && info.st_size > 0 && !cut_back(path, step)) {
        complain("truncate", path);
        return NULL;
    }
    FILE *log = fopen(path, "ae");
    if (!log) complain("open", path);
    return log;
}

int train_log_write(FILE *log, const char *path, const json_t *line) {
    char *text = line ? json_dumps(line, JSON_COMPACT) : NULL;
    if (!text) errno = ENOMEM;
    int fine = text && fprintf(log, "%s\n", text) > 0 && fflush(log) == 0;
    if (!fine) complain("write", path);
    free(text);
    return fine;
}

int train_log_sync(FILE *log, const char *path) {
    /* EINVAL: a device or a pipe, which has nothing to sync. */
    if (fsync(fileno(log)) == 0 || errno == EINVAL || errno == EROFS) return 1;
    complain("sync", path);
    return 0;
}
