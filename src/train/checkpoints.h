/* A folder of checkpoints, each a folder of its own:
 *
 *     DIR/.lock                       held while a trainer uses DIR
 *     DIR/.writing-000000000020       being written; removed at the next start
 *     DIR/step-000000000010/          complete: whatever has this name was synced before it got it
 *         config.json model.safetensors ...     the model as transformers reads it
 *         optimizer.safetensors                 exp_avg.NAME and exp_avg_sq.NAME of each parameter
 *         manifest.json                         see manifest.h
 *     DIR/.removing-000000000005      being removed; so is one found at the next start
 *
 * A checkpoint appears by a rename and disappears by one, so a process that is killed at any moment leaves complete
 * ones and such as are recognised by their names.
 */
#ifndef DW_CHECKPOINTS_H
#define DW_CHECKPOINTS_H

#include "base/base.h"

typedef struct dw__checkpoints dw__checkpoints;

/* Makes `folder` when it is missing, locks it (DW_STATE when another process has), removes leftovers. DW_STATE for a
 * folder step-N that has no manifest, or one of another step: it would stand in the way of the checkpoint of step N. */
dw_status dw__checkpoints_open(const char *folder, dw__checkpoints **checkpoints);
void dw__checkpoints_close(dw__checkpoints *checkpoints); /* NULL allowed; unlocks */

/* Step of the newest complete checkpoint, -1 when there is none, and its folder ("" then). */
int64_t dw__checkpoints_newest(const dw__checkpoints *checkpoints);
const char *dw__checkpoints_newest_path(const dw__checkpoints *checkpoints);

/* An empty folder to write the checkpoint of `step` into. */
dw_status dw__checkpoints_begin(dw__checkpoints *checkpoints, int64_t step, const char **folder);
/* Syncs what was written and gives it its name. */
dw_status dw__checkpoints_commit(dw__checkpoints *checkpoints);
/* Removes all but the newest `keep`. Checkpoints of steps after the newest one known here are left alone: they appeared
 * while this process held the folder, so they are none of its own. */
dw_status dw__checkpoints_prune(dw__checkpoints *checkpoints, int64_t keep);
/* Removes what was begun. */
void dw__checkpoints_abort(dw__checkpoints *checkpoints);

#endif
