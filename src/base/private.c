/* Folders of trusted files: only the user of this process can write them.
 *
 * All accesses go through the folder's descriptor, so that the checked folder is the one that is used, even
 * if its name changes. Files are regular, owned by the user, and never reached through a symbolic link. */
#include "base/base.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static dw_status fail_at(const dw__private *folder, const char *name, const char *action,
                         int error) {
    char path[PATH_MAX + NAME_MAX + 2];
    snprintf(path, sizeof path, "%s/%s", folder->path, name);
    return dw__fail_io(action, path, error);
}

/* Returns DW_IO if another user can write to `file`. */
static dw_status check_owner(int file, const char *path) {
    struct stat info;
    if (fstat(file, &info) != 0) return dw__fail_io("cannot read", path, errno);
    if (info.st_uid != geteuid())
        return dw__fail(
            DW_IO,
            "\"%s\" is not used, because it belongs to user %u and this process to user %u; "
            "name a folder of this user",
            path, (unsigned)info.st_uid, (unsigned)geteuid());
    if (info.st_mode & (S_IWGRP | S_IWOTH))
        return dw__fail(
            DW_IO,
            "\"%s\" is not used, because other users can write to it (mode %03o); remove the "
            "files that are not yours, then run: chmod -R go-w \"%s\"",
            path, (unsigned)info.st_mode & 07777, path);
    return DW_OK;
}

/* ---- folders ------------------------------------------------------------------------------- */

/* Opens the folder `name` in `parent` and checks it. Makes it first if it is missing and `create` is set.
 * `path` is for messages. */
static dw_status enter(int parent, const char *name, int flags, const char *path, bool create,
                       int *folder) {
    if (create && mkdirat(parent, name, 0700) != 0 && errno != EEXIST)
        return dw__fail_io("cannot create folder", path, errno);
    int opened = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
    if (opened < 0 && errno == ENOENT && !create)
        return dw__fail(DW_NOT_FOUND, "there is no folder \"%s\"", path);
    if (opened < 0) return dw__fail_io("cannot open folder", path, errno);
    dw_status status = check_owner(opened, path);
    if (status != DW_OK)
        close(opened);
    else
        *folder = opened;
    return status;
}

dw_status dw__private_open(const char *path, const char *part, bool create, dw__private *folder) {
    dw_status status = DW_OK;
    int outer = -1;
    size_t length = strlen(path);
    folder->file = -1;
    while (length > 1 && path[length - 1] == '/') length--;
    if (length + strlen(part) + 2 > sizeof folder->path)
        return dw__fail_io("cannot open folder", path, ENAMETOOLONG);
    memcpy(folder->path, path, length);
    folder->path[length] = '\0';
    if (create) DW_TRY(dw__folder_make_above(folder->path));
    DW_TRY(enter(AT_FDCWD, folder->path, 0, folder->path, create, &outer));
    snprintf(folder->path + length, sizeof folder->path - length, "/%s", part);
    DW_TRY(enter(outer, part, O_NOFOLLOW, folder->path, create, &folder->file));

cleanup:
    if (outer >= 0) close(outer);
    return status;
}

void dw__private_close(dw__private *folder) {
    if (folder->file >= 0) close(folder->file);
    folder->file = -1;
}

/* ---- files --------------------------------------------------------------------------------- */

dw_status dw__private_read(const dw__private *folder, const char *name, size_t most, char **bytes,
                           size_t *count) {
    char path[PATH_MAX + NAME_MAX + 2];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", folder->path, name);
    /* O_NONBLOCK, because opening a pipe would block until it has a writer. */
    int file = openat(folder->file, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) return dw__fail(DW_NOT_FOUND, "\"%s\" does not exist", path);
    if (file < 0) return dw__fail_io("cannot open", path, errno);
    dw_status status = check_owner(file, path);
    if (status == DW_OK && (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)))
        status = dw__fail(DW_IO, "\"%s\" is not a regular file; remove it", path);
    if (status == DW_OK) status = dw__read_all(file, path, most, bytes, count);
    close(file);
    return status;
}

static dw_status publish(const dw__private *folder, int file, const char *temporary,
                         const char *name, const void *bytes, size_t count) {
    dw_status status = dw__write_all(file, folder->path, bytes, count);
    if (status == DW_OK && fsync(file) != 0)
        status = fail_at(folder, temporary, "cannot sync", errno);
    if (close(file) != 0 && status == DW_OK)
        status = fail_at(folder, temporary, "cannot close", errno);
    DW_RETURN_IF_FAILED(status);
    if (renameat(folder->file, temporary, folder->file, name) != 0)
        return fail_at(folder, name, "cannot replace", errno);
    /* Some file systems cannot sync a folder and say EINVAL. */
    if (fsync(folder->file) != 0 && errno != EINVAL)
        return dw__fail_io("cannot sync", folder->path, errno);
    return DW_OK;
}

dw_status dw__private_write(const dw__private *folder, const char *name, const void *bytes,
                            size_t count) {
    static _Atomic unsigned serial;
    char temporary[NAME_MAX + 1];
    if (snprintf(temporary, sizeof temporary, "%s.%ld-%u.tmp", name, (long)getpid(),
                 atomic_fetch_add(&serial, 1)) >= (int)sizeof temporary)
        return fail_at(folder, name, "cannot write", ENAMETOOLONG);
    int file = openat(folder->file, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return fail_at(folder, temporary, "cannot create", errno);
    dw_status status = publish(folder, file, temporary, name, bytes, count);
    if (status != DW_OK) unlinkat(folder->file, temporary, 0);
    return status;
}

void dw__private_remove(const dw__private *folder, const char *name) {
    unlinkat(folder->file, name, 0);
}

dw_status dw__private_lock(const dw__private *folder, const char *name, int *lock) {
    int file =
        openat(folder->file, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (file < 0) return fail_at(folder, name, "cannot lock", errno);
    int result;
    do result = flock(file, LOCK_EX);
    while (result != 0 && errno == EINTR);
    if (result != 0) {
        dw_status status = fail_at(folder, name, "cannot lock", errno);
        close(file);
        return status;
    }
    *lock = file;
    return DW_OK;
}
