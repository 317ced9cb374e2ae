/* A temporary folder for targets whose parser opens files by name. It is in memory if possible, and removed when the
 * program ends. */
#ifndef DW_SCRATCH_FOLDER_H
#define DW_SCRATCH_FOLDER_H

#include "base/base.h"
#include "fuzz.h"
#include <string.h>
#include <unistd.h>

static char scratch_folder[64];

static inline void scratch_remove(void) { dw__folder_remove(scratch_folder); }

static inline void scratch_make(void) {
    snprintf(scratch_folder, sizeof scratch_folder, "%s/deepwell-fuzz-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    fuzz_require(mkdtemp(scratch_folder) != NULL, "a folder");
    atexit(scratch_remove);
}

/* Writes a file of the folder. `path`, of 256 bytes, receives its path. */
static inline void scratch_write(const char *name, const void *bytes, size_t count, char *path) {
    snprintf(path, 256, "%s/%s", scratch_folder, name);
    FILE *file = fopen(path, "wb");
    fuzz_require(file && fwrite(bytes, 1, count, file) == count && fclose(file) == 0, "a file");
}

#endif
