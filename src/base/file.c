/* Whole files in and out. */
#include "base/base.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static dw_status fail_io(const char *action, const char *path, int error) {
    const char *next_step = "check the path";
    if (error == EACCES || error == EPERM || error == EROFS) next_step = "check its permissions";
    if (error == ENOSPC || error == EDQUOT || error == EFBIG) next_step = "free space on its disk";
    if (error == EISDIR) next_step = "name a file inside that folder";
    char reason[128];
    return dw__fail(DW_IO, "%s \"%s\": %s; %s", action, path,
                    strerror_r(error, reason, sizeof reason), next_step);
}

dw_status dw__file_read(const char *path, char **bytes, size_t *count) {
    enum { STEP = 1 << 16 };
    dw_status status = DW_OK;
    char *buffer = NULL;
    size_t used = 0, capacity = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return fail_io("cannot open", path, errno);

    /* The size is a hint only: pipes have none, and a file may grow while it is read. */
    struct stat info;
    size_t expected = fstat(file, &info) == 0 && info.st_size > 0 ? (size_t)info.st_size : STEP;
    DW_TRY(dw__grow((void **)&buffer, &capacity, expected + 2, 1));
    for (;;) {
        if (used + 1 == capacity) {
            DW_TRY(dw__grow((void **)&buffer, &capacity, capacity + STEP, 1));
        }
        ssize_t got = read(file, buffer + used, capacity - used - 1);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) DW_TRY(fail_io("cannot read", path, errno));
        if (got == 0) break;
        used += (size_t)got;
    }
    buffer[used] = '\0';
    *bytes = buffer;
    *count = used;
    buffer = NULL;

cleanup:
    dw__free(buffer);
    close(file);
    return status;
}

static dw_status write_all(int file, const char *path, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t put = write(file, bytes, count);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return fail_io("cannot write", path, errno);
        bytes += put;
        count -= (size_t)put;
    }
    return DW_OK;
}

/* A terminal, a pipe, /dev/full: nothing to replace, so the bytes go straight in. */
static dw_status write_in_place(const char *path, const char *bytes, size_t count) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0) return fail_io("cannot open", path, errno);
    dw_status status = write_all(file, path, bytes, count);
    if (close(file) != 0 && status == DW_OK) status = fail_io("cannot close", path, errno);
    return status;
}

static dw_status sync_folder_of(const char *path) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    if (!slash) {
        strcpy(folder, ".");
    } else {
        size_t length = slash == path ? 1 : (size_t)(slash - path);
        memcpy(folder, path, length);
        folder[length] = '\0';
    }
    int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return fail_io("cannot open folder", folder, errno);
    dw_status status = DW_OK;
    /* Some file systems cannot sync a folder and say EINVAL; there is nothing more to do there. */
    if (fsync(file) != 0 && errno != EINVAL) status = fail_io("cannot sync", folder, errno);
    close(file);
    return status;
}

/* `mode` is what the file that is replaced has, or 0. */
static dw_status write_and_rename(const char *path, const char *bytes, size_t count, mode_t mode) {
    static _Atomic unsigned serial;
    char temporary[PATH_MAX];
    int length = snprintf(temporary, sizeof temporary, "%s.%ld-%u.tmp", path, (long)getpid(),
                          atomic_fetch_add(&serial, 1));
    if (length >= (int)sizeof temporary) return fail_io("cannot write", path, ENAMETOOLONG);
    int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) return fail_io("cannot create", temporary, errno);

    dw_status status = DW_OK;
    if (mode != 0 && fchmod(file, mode & 07777) != 0) {
        DW_TRY(fail_io("cannot set the mode of", temporary, errno));
    }
    DW_TRY(write_all(file, temporary, bytes, count));
    if (fsync(file) != 0) DW_TRY(fail_io("cannot sync", temporary, errno));
    int closed = close(file);
    file = -1;
    if (closed != 0) DW_TRY(fail_io("cannot close", temporary, errno));
    if (rename(temporary, path) != 0) DW_TRY(fail_io("cannot replace", path, errno));
    return sync_folder_of(path);

cleanup:
    if (file >= 0) close(file);
    unlink(temporary);
    return status;
}

dw_status dw__file_write(const char *path, const void *bytes, size_t count) {
    /* Through a symbolic link to the file it names, so that the link survives. */
    char target[PATH_MAX];
    struct stat info;
    bool exists = stat(path, &info) == 0;
    if (exists && S_ISDIR(info.st_mode)) return fail_io("cannot write", path, EISDIR);
    if (exists && !S_ISREG(info.st_mode)) return write_in_place(path, bytes, count);
    if (exists && realpath(path, target)) path = target;
    return write_and_rename(path, bytes, count, exists ? info.st_mode : 0);
}
