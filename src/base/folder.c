/* Folders that appear whole: they are written under another name, synced, and renamed. */
#include "base/base.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- removing ------------------------------------------------------------------------------ */

static dw_status remove_entries(int folder, const char *path, int depth);

/* Removes `name` in the open folder `parent`. `path` is for messages. */
static dw_status remove_entry(int parent, const char *name, const char *path, int depth) {
    enum { MOST_DEPTH = 64 };
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT) return DW_OK;
    if (errno != EISDIR && errno != EPERM) return dw__fail_io("cannot remove", path, errno);
    if (depth == MOST_DEPTH)
        return dw__fail(DW_IO,
                        "cannot remove \"%s\": it has folders nested more than %d deep; "
                        "remove it by hand",
                        path, MOST_DEPTH);
    int folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0) return dw__fail_io("cannot remove", path, errno);
    DW_RETURN_IF_FAILED(remove_entries(folder, path, depth + 1));
    if (unlinkat(parent, name, AT_REMOVEDIR) != 0 && errno != ENOENT)
        return dw__fail_io("cannot remove", path, errno);
    return DW_OK;
}

/* Removes the entries of `folder` and closes it. */
static dw_status remove_entries(int folder, const char *path, int depth) {
    dw_status status = DW_OK;
    DIR *entries = fdopendir(folder);
    if (!entries) {
        status = dw__fail_io("cannot read folder", path, errno);
        close(folder);
        return status;
    }
    for (struct dirent *entry; status == DW_OK && (entry = readdir(entries));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = remove_entry(folder, entry->d_name, path, depth);
    closedir(entries);
    return status;
}

dw_status dw__folder_remove(const char *path) { return remove_entry(AT_FDCWD, path, path, 0); }

/* ---- making -------------------------------------------------------------------------------- */

dw_status dw__folder_make_above(char *path) {
    dw_status status = DW_OK;
    for (char *at = *path ? strchr(path + 1, '/') : NULL; at && status == DW_OK;
         at = strchr(at + 1, '/')) {
        *at = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            status = dw__fail_io("cannot create folder", path, errno);
        *at = '/';
    }
    return status;
}

/* ---- appearing ----------------------------------------------------------------------------- */

/* Returns `path` with `suffix`, in the same parent folder. Drops slashes at the end and resolves a symbolic
 * link, so that the link survives. */
static dw_status beside(const char *path, const char *suffix, char **made) {
    char resolved[PATH_MAX];
    struct stat info;
    size_t length = strlen(path), more = strlen(suffix);
    while (length > 1 && path[length - 1] == '/') length--;
    if (length == 0 || length + more >= PATH_MAX)
        return dw__fail_io("cannot write", path, length == 0 ? ENOENT : ENAMETOOLONG);
    memcpy(resolved, path, length);
    resolved[length] = '\0';
    if (lstat(resolved, &info) == 0 && S_ISLNK(info.st_mode)) {
        if (!realpath(path, resolved)) return dw__fail_io("cannot write", path, errno);
        length = strlen(resolved);
    }
    char *text = dw__malloc(length + more + 1);
    if (!text) return dw__fail_memory("the name of a folder", length + more + 1);
    memcpy(text, resolved, length);
    memcpy(text + length, suffix, more + 1);
    *made = text;
    return DW_OK;
}

typedef enum lock_result { LOCKED, IN_USE, NO_LOCKS } lock_result;

/* NO_LOCKS: the file system has no locks. IN_USE: another process holds the folder, or has just removed it. */
static lock_result lock_folder(const char *path, int *lock) {
    struct stat opened, named;
    int file = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0) return IN_USE;
    lock_result result = LOCKED;
    if (flock(file, LOCK_EX | LOCK_NB) != 0)
        result = errno == EWOULDBLOCK ? IN_USE : NO_LOCKS;
    else if (fstat(file, &opened) != 0 || lstat(path, &named) != 0 ||
             opened.st_ino != named.st_ino || opened.st_dev != named.st_dev)
        result = IN_USE; /* another folder got this name before the lock was taken */
    if (result == LOCKED)
        *lock = file;
    else
        close(file);
    return result;
}

/* "PID-SERIAL.tmp" */
static bool is_temporary_suffix(const char *text) {
    size_t pid = strspn(text, "0123456789");
    if (pid == 0 || text[pid] != '-') return false;
    size_t serial = strspn(text + pid + 1, "0123456789");
    return serial > 0 && strcmp(text + pid + 1 + serial, ".tmp") == 0;
}

/* Removes the temporaries NAME.PID-SERIAL.tmp that no process has locked. `prefix` ends in "NAME.". The
 * process number alone does not show a live owner, because another machine may write to the same folder. */
static void remove_unlocked(char *prefix) {
    char path[PATH_MAX];
    char *slash = strrchr(prefix, '/');
    const char *name = slash ? slash + 1 : prefix;
    size_t length = strlen(name);
    if (slash) *slash = '\0';
    DIR *entries = opendir(!slash ? "." : slash == prefix ? "/" : prefix);
    if (slash) *slash = '/';
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        int lock = -1;
        if (strncmp(entry->d_name, name, length) != 0 ||
            !is_temporary_suffix(entry->d_name + length) ||
            snprintf(path, sizeof path, "%.*s%s", (int)(name - prefix), prefix, entry->d_name) >=
                PATH_MAX ||
            lock_folder(path, &lock) != LOCKED)
            continue;
        (void)dw__folder_remove(path);
        close(lock);
    }
    if (entries) closedir(entries);
}

void dw__folder_remove_stale(const char *path) {
    char *prefix = NULL;
    if (beside(path, ".", &prefix) == DW_OK) remove_unlocked(prefix);
    dw__free(prefix);
}

dw_status dw__folder_begin(const char *path, dw__folder_writer *writer) {
    static _Atomic unsigned serial;
    enum { MOST_TRIES = 64 };
    struct stat info;
    char suffix[64];
    char *made = NULL;
    *writer = (dw__folder_writer){.lock = -1};
    if (stat(path, &info) == 0 && !S_ISDIR(info.st_mode))
        return dw__fail_io("cannot replace by a folder", path, ENOTDIR);
    dw__folder_remove_stale(path);
    /* Retry if the name is in use, or if another process removed the new folder as stale before it was locked. */
    for (int tries = 0; tries < MOST_TRIES; tries++) {
        snprintf(suffix, sizeof suffix, ".%ld-%u.tmp", (long)getpid(),
                 atomic_fetch_add(&serial, 1));
        DW_RETURN_IF_FAILED(beside(path, suffix, &made));
        int error = mkdir(made, 0777) == 0 ? 0 : errno;
        if (error == 0 && lock_folder(made, &writer->lock) != IN_USE) {
            writer->temporary = made;
            return DW_OK;
        }
        dw_status status = error == 0 || error == EEXIST
                               ? DW_OK
                               : dw__fail_io("cannot create folder", made, error);
        dw__free(made);
        if (status != DW_OK) return status;
    }
    return dw__fail_io("cannot create a temporary folder beside", path, EEXIST);
}

void dw__folder_end(dw__folder_writer *writer) {
    if (writer->temporary) (void)dw__folder_remove(writer->temporary);
    if (writer->lock >= 0) close(writer->lock);
    dw__free(writer->temporary);
    *writer = (dw__folder_writer){.lock = -1};
}

/* For file systems that cannot exchange two names: renames the old folder out of the way first. */
static dw_status replace_in_steps(const char *temporary, const char *path) {
    char *aside = NULL;
    DW_RETURN_IF_FAILED(beside(path, ".old", &aside));
    dw_status status = dw__folder_remove(aside);
    if (status == DW_OK && rename(path, aside) != 0)
        status = dw__fail_io("cannot replace", path, errno);
    else if (status == DW_OK && rename(temporary, path) != 0) {
        status = dw__fail_io("cannot replace", path, errno);
        rename(aside, path);
    }
    if (status == DW_OK) status = dw__folder_sync_of(path);
    if (status == DW_OK) status = dw__folder_remove(aside);
    dw__free(aside);
    return status;
}

static dw_status put_in_place(const char *temporary, const char *path) {
    char *target = NULL;
    struct stat info;
    DW_RETURN_IF_FAILED(dw__folder_sync(temporary));
    DW_RETURN_IF_FAILED(beside(path, "", &target));
    dw_status status = DW_OK;
    if (lstat(target, &info) != 0) {
        if (rename(temporary, target) != 0)
            status = dw__fail_io("cannot create folder", target, errno);
        else
            status = dw__folder_sync_of(target);
    } else if (renameat2(AT_FDCWD, temporary, AT_FDCWD, target, RENAME_EXCHANGE) == 0) {
        status = dw__folder_sync_of(target);
        if (status == DW_OK) status = dw__folder_remove(temporary); /* now the old folder */
    } else if (errno == EINVAL || errno == ENOSYS) {
        status = replace_in_steps(temporary, target);
    } else {
        status = dw__fail_io("cannot replace", target, errno);
    }
    dw__free(target);
    return status;
}

dw_status dw__folder_commit(dw__folder_writer *writer, const char *path) {
    DW_RETURN_IF_FAILED(put_in_place(writer->temporary, path));
    dw__free(writer->temporary);
    writer->temporary = NULL;
    return DW_OK;
}
