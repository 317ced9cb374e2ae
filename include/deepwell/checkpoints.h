/* A folder of checkpoints, each in a folder of its own:
 *
 *     DIR/.lock                       locked while a trainer uses DIR
 *     DIR/.writing-000000000020       being written; removed at the next start
 *     DIR/step-000000000010/          complete: it was synced before it got this name
 *         config.json model.safetensors ...     the model as transformers reads it
 *         optimizer.safetensors                 exp_avg.NAME and exp_avg_sq.NAME of each parameter
 *         manifest.json                         step, options, data, hashes of the files
 *     DIR/.removing-000000000005      being removed; a leftover is removed at the next start
 *
 * A checkpoint appears by a rename and disappears by a rename. A process that is killed at any moment leaves
 * only complete checkpoints and leftovers that their names show.
 *
 * A folder with the files of torch.distributed.checkpoint (.metadata, *.distcp) in place of the two files of tensors is
 * a checkpoint for dw_checkpoint_seal and dw_checkpoint_verify. deepwell.Trainer resumes from it.
 *
 * dw_trainer writes them by itself. A program that computes the steps in another way writes the files of a checkpoint
 * between dw_checkpoints_begin and dw_checkpoints_commit, the manifest last, and syncs each of them. */
#ifndef DEEPWELL_CHECKPOINTS_H
#define DEEPWELL_CHECKPOINTS_H

#include "deepwell/status.h"
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_checkpoints dw_checkpoints;

/* Makes `folder` if it is missing, locks it (DW_STATE if another process has locked it) and removes leftovers. DW_STATE
 * also for a folder step-N without a manifest or with the manifest of another step, because the checkpoint of step N
 * needs that name. DW_IO. */
DW_API dw_status dw_checkpoints_open(const char *folder, dw_checkpoints **checkpoints);
DW_API void dw_checkpoints_close(dw_checkpoints *checkpoints); /* may be NULL; unlocks */

/* Step of the newest complete checkpoint and its folder; -1 and "" if there is none. */
DW_API int64_t dw_checkpoints_newest(const dw_checkpoints *checkpoints);
DW_API const char *dw_checkpoints_newest_path(const dw_checkpoints *checkpoints);

/* Makes an empty folder for the checkpoint of `step`; its path belongs to `checkpoints`. DW_IO. */
DW_API dw_status dw_checkpoints_begin(dw_checkpoints *checkpoints, int64_t step,
                                      const char **folder);
/* Syncs the folder and gives it its name. DW_IO. */
DW_API dw_status dw_checkpoints_commit(dw_checkpoints *checkpoints);
/* Removes all checkpoints but the newest `keep`. Checkpoints of steps after the newest one known here stay: they
 * appeared while this process held the folder, so another process made them. DW_IO. */
DW_API dw_status dw_checkpoints_prune(dw_checkpoints *checkpoints, int64_t keep);
/* Removes the folder of the checkpoint that was begun. */
DW_API void dw_checkpoints_abort(dw_checkpoints *checkpoints);

/* ---- a checkpoint of its own ------------------------------------------------------------------- */

/* A folder of any name that appears whole, with the files of a checkpoint. */
typedef struct dw_checkpoint_writer dw_checkpoint_writer;

/* Makes a temporary folder beside `path`, and removes those of processes that ended. DW_STATE: `path` is a folder with
 * files but without a manifest.json, and would be replaced. DW_IO. */
DW_API dw_status dw_checkpoint_writer_create(const char *path, dw_checkpoint_writer **writer);
DW_API const char *dw_checkpoint_writer_folder(const dw_checkpoint_writer *writer);
/* Syncs the folder and puts it in the place of `path`. DW_IO. */
DW_API dw_status dw_checkpoint_writer_commit(dw_checkpoint_writer *writer);
/* Removes the temporary folder if it was not committed. `writer` may be NULL. */
DW_API void dw_checkpoint_writer_destroy(dw_checkpoint_writer *writer);

/* ---- manifests --------------------------------------------------------------------------------- */

/* Hashes the files of `folder` and writes its manifest.json. `run`: JSON text of an object that identifies the run,
 * whose members become members of the manifest (dw_training_describe makes one). A run {"converted": true} is another
 * program's: dw_checkpoint_verify compares no options and no data with it. DW_INVALID_ARGUMENT: `run` is not that, or
 * there are more updates than steps. DW_IO. */
DW_API dw_status dw_checkpoint_seal(const char *folder, const char *run, int64_t step,
                                    int64_t updates, int64_t schedule_steps);
/* Checks the size and hash of each file that the manifest of `folder` lists, and compares the members "random",
 * "options" and "data" of `run` with it. DW_STATE lists every difference. DW_PARSE or DW_IO: the checkpoint is damaged.
 * `manifest` receives the JSON text; release it with dw_text_free. */
DW_API dw_status dw_checkpoint_verify(const char *folder, const char *run, char **manifest);

#ifdef __cplusplus
}
#endif
#endif
