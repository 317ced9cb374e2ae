/* A temporary folder for a group of tests. */
#ifndef DW_TEST_FOLDER_H
#define DW_TEST_FOLDER_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[64];

/* Set-up of the group. */
static inline int make_folder(void **state) {
    (void)state;
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.40s/deepwell-XXXXXX", parent && *parent ? parent : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

/* Teardown of the group; fails if a test, or the library, left a file behind. */
static inline int remove_folder(void **state) {
    (void)state;
    return rmdir(folder);
}

/* Returns the path of a file in the folder. The next three calls leave it as it is. */
static inline const char *in_folder(const char *name) {
    static char paths[4][128];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

#endif
