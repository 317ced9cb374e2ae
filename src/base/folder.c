/* Folders that appear whole: written under another name, synced, and put in place. */
#include "base/base.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- removing ------------------------------------------------------------------------------ */

static dw_status remove_entries(int folder, const char *path, int depth);

/* `name` in the open folder `parent`; `path` is for messages. */
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

/* Closes `folder`. */
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

/* `path` with `suffix`, in the folder that holds it: without slashes at its end, and through a symbolic link to
 * the folder that it names, so that the link survives. */
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

dw_status dw__folder_begin(const char *path, char **temporary) {
    static _Atomic unsigned serial;
    struct stat info;
    char suffix[64];
    char *made = NULL;
    if (stat(path, &info) == 0 && !S_ISDIR(info.st_mode))
        return dw__fail_io("cannot replace by a folder", path, ENOTDIR);
    snprintf(suffix, sizeof suffix, ".%ld-%u.tmp", (long)getpid(), atomic_fetch_add(&serial, 1));
    DW_RETURN_IF_FAILED(beside(path, suffix, &made));
    /* Of a process that had this number before and was killed. */
    dw_status status = dw__folder_remove(made);
    if (status == DW_OK && mkdir(made, 0777) != 0)
        status = dw__fail_io("cannot create folder", made, errno);
    if (status == DW_OK)
        *temporary = made;
    else
        dw__free(made);
    return status;
}

/* Where two names cannot be exchanged: the old folder steps aside first. */
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

dw_status dw__folder_commit(const char *temporary, const char *path) {
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
        if (status == DW_OK) status = dw__folder_remove(temporary); /* which is the old one now */
    } else if (errno == EINVAL || errno == ENOSYS) {
        status = replace_in_steps(temporary, target);
    } else {
        status = dw__fail_io("cannot replace", target, errno);
    }
    dw__free(target);
    return status;
}
