#include "deepwell/checkpoints.h"
#include "base/base.h"
#include "train/manifest.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define COMPLETE "step-"
#define WRITING ".writing-"
#define REMOVING ".removing-"

struct dw_checkpoints {
    char folder[PATH_MAX];
    int lock;
    int64_t newest;
    char newest_path[PATH_MAX];
    int64_t writing; /* step of the checkpoint being written; -1: none */
    char writing_path[PATH_MAX];
};

/* Writes folder/prefix000000000020. The length of the folder's path was checked when it was opened. */
static void path_of(const dw_checkpoints *c, const char *prefix, int64_t step,
                    char path[PATH_MAX]) {
    int length = snprintf(path, PATH_MAX, "%s/%s%012" PRId64, c->folder, prefix, step);
    if (length >= PATH_MAX) path[0] = '\0';
}

/* Returns the step of prefix000000000020, or -1 for another name. Each step has exactly one name. */
static int64_t step_of(const char *name, const char *prefix) {
    size_t length = strlen(prefix);
    char canonical[64];
    if (strncmp(name, prefix, length) != 0) return -1;
    int64_t step = strtoll(name + length, NULL, 10);
    snprintf(canonical, sizeof canonical, "%s%012" PRId64, prefix, step);
    return step >= 0 && strcmp(name, canonical) == 0 ? step : -1;
}

/* ---- existing checkpoints -------------------------------------------------------------------- */

typedef struct listing {
    int64_t *items;
    size_t count, capacity;
} listing;

static int later_first(const void *a, const void *b) {
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left < right) - (left > right);
}

/* A checkpoint gets its name after its manifest, so a folder with that name but without a manifest is foreign. */
static dw_status check_checkpoint(const dw_checkpoints *c, int64_t step) {
    char folder[PATH_MAX], manifest[PATH_MAX + 16];
    int64_t said = 0;
    path_of(c, COMPLETE, step, folder);
    snprintf(manifest, sizeof manifest, "%s/manifest.json", folder);
    if (access(manifest, F_OK) != 0 && errno == ENOENT)
        return dw__fail(DW_STATE,
                        "\"%s\" is not a complete checkpoint: it has no manifest.json; remove that "
                        "folder, or give it another name",
                        folder);
    DW_RETURN_IF_FAILED(dw__manifest_step(folder, &said));
    if (said == step) return DW_OK;
    return dw__fail(DW_STATE,
                    "\"%s\" holds the checkpoint of step %" PRId64
                    ", as its manifest.json says, not of the step in its name; remove that folder, "
                    "or give it its name back",
                    folder, said);
}

/* Lists the steps of the checkpoints, newest first. If `clean` is set, removes leftovers on the way. */
static dw_status list(const dw_checkpoints *c, bool clean, listing *found) {
    dw_status status = DW_OK;
    char path[PATH_MAX];
    DIR *opened = opendir(c->folder);
    if (!opened) return dw__fail_io("cannot list folder", c->folder, errno);
    for (struct dirent *entry; (entry = readdir(opened));) {
        const char *name = entry->d_name;
        int64_t step = step_of(name, COMPLETE);
        if (step >= 0) DW_TRY(DW_PUSH(found, step));
        if (!clean || (step_of(name, WRITING) < 0 && step_of(name, REMOVING) < 0)) continue;
        if (snprintf(path, sizeof path, "%s/%s", c->folder, name) < PATH_MAX)
            DW_TRY(dw__folder_remove(path));
    }
    if (found->count > 1) qsort(found->items, found->count, sizeof *found->items, later_first);
cleanup:
    closedir(opened);
    return status;
}

static void set_newest(dw_checkpoints *c, int64_t step) {
    c->newest = step;
    c->newest_path[0] = '\0';
    if (step >= 0) path_of(c, COMPLETE, step, c->newest_path);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* mkdir -p */
static dw_status make_folder(const char *folder) {
    char path[PATH_MAX];
    size_t length = strlen(folder);
    memcpy(path, folder, length + 1);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') continue;
        char kept = path[i];
        path[i] = '\0';
        struct stat info;
        int error = mkdir(path, 0777) == 0 ? 0 : errno;
        if (error != 0 && !(stat(path, &info) == 0 && S_ISDIR(info.st_mode)))
            return dw__fail_io("cannot make folder", path, error == EEXIST ? ENOTDIR : error);
        path[i] = kept;
    }
    return DW_OK;
}

static dw_status lock(dw_checkpoints *c) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s/.lock", PATH_MAX - 16, c->folder);
    c->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (c->lock < 0) return dw__fail_io("cannot write", path, errno);
    if (flock(c->lock, LOCK_EX | LOCK_NB) == 0) return DW_OK;
    if (errno == EWOULDBLOCK)
        return dw__fail(
            DW_STATE,
            "another process is writing checkpoints to \"%s\"; end it, or name another folder",
            c->folder);
    return dw__fail_io("cannot lock", path, errno);
}

dw_status dw_checkpoints_open(const char *folder, dw_checkpoints **checkpoints) {
    enum { ROOM_FOR_NAMES = 256 };
    dw_status status = DW_OK;
    listing found = {0};
    size_t length = strlen(folder);
    if (length == 0 || length > PATH_MAX - ROOM_FOR_NAMES)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the checkpoint folder's path has %zu characters; use between 1 and %d",
                        length, PATH_MAX - ROOM_FOR_NAMES);
    dw_checkpoints *c = dw__calloc(1, sizeof *c);
    if (!c) return dw__fail_memory("a folder of checkpoints", sizeof *c);
    memcpy(c->folder, folder, length + 1);
    c->lock = -1;
    c->writing = -1;
    DW_TRY(make_folder(c->folder));
    DW_TRY(lock(c));
    DW_TRY(list(c, true, &found));
    for (size_t i = 0; i < found.count; i++) DW_TRY(check_checkpoint(c, found.items[i]));
    set_newest(c, found.count > 0 ? found.items[0] : -1);
    *checkpoints = c;
    c = NULL;
cleanup:
    dw_checkpoints_close(c);
    dw__free(found.items);
    return status;
}

void dw_checkpoints_close(dw_checkpoints *c) {
    if (!c) return;
    dw_checkpoints_abort(c);
    if (c->lock >= 0) close(c->lock);
    dw__free(c);
}

int64_t dw_checkpoints_newest(const dw_checkpoints *c) { return c->newest; }
const char *dw_checkpoints_newest_path(const dw_checkpoints *c) { return c->newest_path; }

/* ---- writing --------------------------------------------------------------------------------- */

dw_status dw_checkpoints_begin(dw_checkpoints *c, int64_t step, const char **folder) {
    path_of(c, WRITING, step, c->writing_path);
    DW_RETURN_IF_FAILED(dw__folder_remove(c->writing_path));
    if (mkdir(c->writing_path, 0777) != 0)
        return dw__fail_io("cannot make folder", c->writing_path, errno);
    c->writing = step;
    *folder = c->writing_path;
    return DW_OK;
}

void dw_checkpoints_abort(dw_checkpoints *c) {
    if (c->writing < 0) return;
    c->writing = -1;
    (void)dw__folder_remove(c->writing_path); /* a leftover is removed at the next start */
}

/* Renames the checkpoint first, so that nobody sees it half removed. */
static dw_status remove_checkpoint(dw_checkpoints *c, int64_t step) {
    char path[PATH_MAX], removing[PATH_MAX];
    path_of(c, COMPLETE, step, path);
    path_of(c, REMOVING, step, removing);
    DW_RETURN_IF_FAILED(dw__folder_remove(removing));
    if (rename(path, removing) != 0) return dw__fail_io("cannot rename", path, errno);
    return dw__folder_remove(removing);
}

dw_status dw_checkpoints_prune(dw_checkpoints *c, int64_t keep) {
    dw_status status = DW_OK;
    listing found = {0};
    DW_TRY(list(c, false, &found));
    for (size_t i = 0; i < found.count; i++)
        if (found.items[i] <= c->newest && keep-- <= 0)
            DW_TRY(remove_checkpoint(c, found.items[i]));
cleanup:
    dw__free(found.items);
    return status;
}

dw_status dw_checkpoints_commit(dw_checkpoints *c) {
    char path[PATH_MAX];
    path_of(c, COMPLETE, c->writing, path);
    /* Its files are on disk already, because every writer syncs its file. */
    DW_RETURN_IF_FAILED(dw__folder_sync(c->writing_path));
    if (rename(c->writing_path, path) != 0)
        return dw__fail_io("cannot rename", c->writing_path, errno);
    set_newest(c, c->writing);
    c->writing = -1;
    return dw__folder_sync(c->folder);
}

/* ---- a checkpoint of its own ----------------------------------------------------------------- */

struct dw_checkpoint_writer {
    dw__folder_writer folder;
    char path[PATH_MAX];
};

/* A folder with other files is the user's. */
static dw_status check_replaced(const char *path) {
    char manifest[PATH_MAX + 16];
    DIR *opened = opendir(path);
    if (!opened) return DW_OK; /* dw__folder_begin names what is wrong */
    bool empty = true;
    for (struct dirent *entry; (entry = readdir(opened));)
        empty &= strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    closedir(opened);
    snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
    if (empty || access(manifest, F_OK) == 0) return DW_OK;
    return dw__fail(
        DW_STATE,
        "the folder \"%s\" holds files, but no checkpoint (manifest.json), and would be "
        "replaced; name another folder",
        path);
}

dw_status dw_checkpoint_writer_create(const char *path, dw_checkpoint_writer **writer) {
    dw_checkpoint_writer *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a checkpoint", sizeof *made);
    made->folder.lock = -1;
    dw_status status = DW_OK;
    if (*path == '\0' || snprintf(made->path, PATH_MAX, "%s", path) >= PATH_MAX)
        status = dw__fail(DW_INVALID_ARGUMENT, "the checkpoint's path is empty or too long");
    if (status == DW_OK) status = check_replaced(path);
    if (status == DW_OK) status = dw__folder_make_above(made->path);
    if (status == DW_OK) status = dw__folder_begin(made->path, &made->folder);
    if (status == DW_OK) {
        *writer = made;
    } else {
        dw_checkpoint_writer_destroy(made);
    }
    return status;
}

const char *dw_checkpoint_writer_folder(const dw_checkpoint_writer *writer) {
    return writer->folder.temporary;
}

dw_status dw_checkpoint_writer_commit(dw_checkpoint_writer *writer) {
    return dw__folder_commit(&writer->folder, writer->path);
}

void dw_checkpoint_writer_destroy(dw_checkpoint_writer *writer) {
    if (!writer) return;
    dw__folder_end(&writer->folder);
    dw__free(writer);
}
