/* Files that are read whole, and files that are written so that they appear whole. */
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

dw_status(dw__fail_io)(const char *action, const char *path, int error) {
    const char *next_step = "check the path";
    if (error == EACCES || error == EPERM || error == EROFS) next_step = "check its permissions";
    if (error == ENOSPC || error == EDQUOT || error == EFBIG) next_step = "free space on its disk";
    if (error == EISDIR) next_step = "name a file inside that folder";
    char reason[128];
    return dw__fail(DW_IO, "%s \"%s\": %s; %s", action, path,
                    strerror_r(error, reason, sizeof reason), next_step);
}

/* The size is only a hint: pipes have none, and a file may grow while it is read. */
dw_status dw__read_all(int file, const char *path, size_t most, char **bytes, size_t *count) {
    enum { STEP = 1 << 16 };
    dw_status status = DW_OK;
    char *buffer = NULL;
    size_t used = 0, capacity = 0;
    struct stat info;
    size_t expected = fstat(file, &info) == 0 && info.st_size > 0 ? (size_t)info.st_size : STEP;
    if (expected > most) expected = most;
    DW_TRY(dw__grow((void **)&buffer, &capacity, expected + 2, 1));
    for (;;) {
        if (used + 1 == capacity) {
            DW_TRY(dw__grow((void **)&buffer, &capacity, capacity + STEP, 1));
        }
        ssize_t got = read(file, buffer + used, capacity - used - 1);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) DW_TRY(dw__fail_io("cannot read", path, errno));
        if (got == 0) break;
        used += (size_t)got;
        if (used > most)
            DW_TRY(dw__fail(DW_PARSE,
                            "\"%s\" has more than %zu bytes, the most that is expected in a "
                            "file of its kind; check the path",
                            path, most));
    }
    buffer[used] = '\0';
    *bytes = buffer;
    *count = used;
    buffer = NULL;

cleanup:
    dw__free(buffer);
    return status;
}

dw_status dw__file_read(const char *path, char **bytes, size_t *count) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return dw__fail_io("cannot open", path, errno);
    dw_status status = dw__read_all(file, path, SIZE_MAX / 2, bytes, count);
    close(file);
    return status;
}

dw_status dw__file_open(const char *path, int *file, uint64_t *bytes) {
    struct stat info;
    int opened = open(path, O_RDONLY | O_CLOEXEC |
                                O_NONBLOCK); /* opening a pipe would block until it has a writer */
    if (opened < 0) return dw__fail_io("cannot open", path, errno);
    dw_status status = DW_OK;
    if (fstat(opened, &info) != 0)
        status = dw__fail_io("cannot read", path, errno);
    else if (S_ISDIR(info.st_mode))
        status = dw__fail_io("cannot read", path, EISDIR);
    else if (!S_ISREG(info.st_mode))
        status =
            dw__fail(DW_IO, "\"%s\" is a device or a pipe; expected a file; check the path", path);
    if (status != DW_OK) {
        close(opened);
        return status;
    }
    *file = opened;
    *bytes = (uint64_t)info.st_size;
    return DW_OK;
}

dw_status dw__file_read_at_most(const char *path, size_t most, char **bytes, size_t *count) {
    int file;
    uint64_t size;
    DW_RETURN_IF_FAILED(dw__file_open(path, &file, &size));
    dw_status status = dw__read_all(file, path, most, bytes, count);
    close(file);
    return status;
}

dw_status dw__write_all(int file, const char *path, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t put = write(file, bytes, count);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return dw__fail_io("cannot write", path, errno);
        bytes += put;
        count -= (size_t)put;
    }
    return DW_OK;
}

dw_status dw__folder_sync(const char *folder) {
    int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return dw__fail_io("cannot open folder", folder, errno);
    dw_status status = DW_OK;
    /* Some file systems cannot sync a folder and return EINVAL. Nothing more can be done there. */
    if (fsync(file) != 0 && errno != EINVAL) status = dw__fail_io("cannot sync", folder, errno);
    close(file);
    return status;
}

dw_status dw__folder_sync_of(const char *path) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    if (!slash) {
        strcpy(folder, ".");
    } else {
        size_t length = slash == path ? 1 : (size_t)(slash - path);
        memcpy(folder, path, length);
        folder[length] = '\0';
    }
    return dw__folder_sync(folder);
}

/* ---- writing ------------------------------------------------------------------------------- */

/* A terminal, a pipe or /dev/full cannot be replaced. `temporary` is then empty, and bytes go straight into
 * the file. */
struct dw__file_writer {
    int file; /* -1 when closed */
    char path[PATH_MAX], temporary[PATH_MAX];
};

static void remove_temporary(dw__file_writer *writer) {
    if (writer->file >= 0) close(writer->file);
    if (writer->temporary[0] != '\0') unlink(writer->temporary);
    writer->file = -1;
    writer->temporary[0] = '\0';
}

/* `mode` is the mode of the replaced file, or 0. */
static dw_status create_temporary(dw__file_writer *writer, mode_t mode) {
    static _Atomic unsigned serial;
    char temporary[PATH_MAX];
    int length = snprintf(temporary, sizeof temporary, "%s.%ld-%u.tmp", writer->path,
                          (long)getpid(), atomic_fetch_add(&serial, 1));
    if (length >= (int)sizeof temporary)
        return dw__fail_io("cannot write", writer->path, ENAMETOOLONG);
    writer->file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (writer->file < 0) return dw__fail_io("cannot create", temporary, errno);
    memcpy(writer->temporary, temporary, (size_t)length + 1);
    if (mode == 0 || fchmod(writer->file, mode & 07777) == 0) return DW_OK;
    dw_status status = dw__fail_io("cannot set the mode of", temporary, errno);
    remove_temporary(writer);
    return status;
}

static dw_status start_writing(dw__file_writer *writer, const char *path) {
    struct stat info;
    writer->file = -1;
    writer->temporary[0] = '\0';
    size_t size = strlen(path) + 1;
    if (size > sizeof writer->path) return dw__fail_io("cannot write", path, ENAMETOOLONG);
    bool exists = stat(path, &info) == 0;
    if (exists && S_ISDIR(info.st_mode)) return dw__fail_io("cannot write", path, EISDIR);
    /* A symbolic link is resolved, so that the link itself survives. */
    if (!exists || !S_ISREG(info.st_mode) || !realpath(path, writer->path))
        memcpy(writer->path, path, size);
    if (!exists || S_ISREG(info.st_mode))
        return create_temporary(writer, exists ? info.st_mode : 0);
    writer->file = open(path, O_WRONLY | O_CLOEXEC);
    return writer->file < 0 ? dw__fail_io("cannot open", path, errno) : DW_OK;
}

static const char *name_of(const dw__file_writer *writer) {
    return writer->temporary[0] != '\0' ? writer->temporary : writer->path;
}

dw_status dw__file_writer_put(dw__file_writer *writer, const void *bytes, size_t count) {
    return dw__write_all(writer->file, name_of(writer), bytes, count);
}

dw_status dw__file_writer_commit(dw__file_writer *writer) {
    dw_status status = DW_OK;
    bool replaces = writer->temporary[0] != '\0';
    if (replaces && fsync(writer->file) != 0)
        DW_TRY(dw__fail_io("cannot sync", writer->temporary, errno));
    int closed = close(writer->file);
    writer->file = -1;
    if (closed != 0) DW_TRY(dw__fail_io("cannot close", name_of(writer), errno));
    if (!replaces) return DW_OK;
    if (rename(writer->temporary, writer->path) != 0)
        DW_TRY(dw__fail_io("cannot replace", writer->path, errno));
    writer->temporary[0] = '\0';
    return dw__folder_sync_of(writer->path);

cleanup:
    remove_temporary(writer);
    return status;
}

dw_status dw__file_writer_create(const char *path, dw__file_writer **writer) {
    dw__file_writer *made = dw__malloc(sizeof *made);
    if (!made) return dw__fail_memory("a writer of files", sizeof *made);
    dw_status status = start_writing(made, path);
    if (status == DW_OK)
        *writer = made;
    else
        dw__free(made);
    return status;
}

void dw__file_writer_destroy(dw__file_writer *writer) {
    if (!writer) return;
    remove_temporary(writer);
    dw__free(writer);
}

dw_status dw__file_write(const char *path, const void *bytes, size_t count) {
    dw__file_writer writer;
    DW_RETURN_IF_FAILED(start_writing(&writer, path));
    dw_status status = dw__file_writer_put(&writer, bytes, count);
    if (status == DW_OK) status = dw__file_writer_commit(&writer);
    remove_temporary(&writer);
    return status;
}
