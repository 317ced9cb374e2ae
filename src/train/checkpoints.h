/* A folder of checkpoints, each in a folder of its own:
 *
 *     DIR/.lock                       locked while a trainer uses DIR
 *     DIR/.writing-000000000020       being written; removed at the next start
 *     DIR/step-000000000010/          complete: it was synced before it got this name
 *         config.json model.safetensors ...     the model as transformers reads it
 *         optimizer.safetensors                 exp_avg.NAME and exp_avg_sq.NAME of each parameter
 *         manifest.json                         see manifest.h
 *     DIR/.removing-000000000005      being removed; a leftover is removed at the next start
 *
 * A checkpoint appears by a rename and disappears by a rename. A process that is killed at any moment leaves
 * only complete checkpoints and leftovers that their names show. */
#ifndef DW_CHECKPOINTS_H
#define DW_CHECKPOINTS_H

#include "base/base.h"

typedef struct dw__checkpoints dw__checkpoints;

/* Makes `folder` if it is missing, locks it (DW_STATE if another process has locked it) and removes
 * leftovers. DW_STATE also for a folder step-N without a manifest or with the manifest of another step,
 * because the checkpoint of step N needs that name. */
dw_status dw__checkpoints_open(const char *folder, dw__checkpoints **checkpoints);
void dw__checkpoints_close(dw__checkpoints *checkpoints); /* NULL is allowed; unlocks */

/* Step of the newest complete checkpoint and its folder; -1 and "" if there is none. */
int64_t dw__checkpoints_newest(const dw__checkpoints *checkpoints);
const char *dw__checkpoints_newest_path(const dw__checkpoints *checkpoints);

/* Makes an empty folder for the checkpoint of `step`. */
dw_status dw__checkpoints_begin(dw__checkpoints *checkpoints, int64_t step, const char **folder);
/* Syncs the folder and gives it its name. */
dw_status dw__checkpoints_commit(dw__checkpoints *checkpoints);
/* Removes all checkpoints but the newest `keep`. Checkpoints of steps after the newest one known here stay:
 * they appeared while this process held the folder, so another process made them. */
dw_status dw__checkpoints_prune(dw__checkpoints *checkpoints, int64_t keep);
/* Removes the folder of the checkpoint that was begun. */
void dw__checkpoints_abort(dw__checkpoints *checkpoints);

#endif
