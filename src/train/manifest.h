/* manifest.json: the run that made a checkpoint, and the files of the checkpoint. A run resumes only if it
 * continues bit for bit.
 *
 *     {"format": "deepwell checkpoint", "version": 1, "deepwell": DW_VERSION,
 *      "step": 20, "updates": 20, "schedule_steps": 1000,
 *      "random": {"generator": "philox4x32-10", "seed": 1},
 *      "options": {"sequence": 256, "batch": 8, ...},
 *      "data": [{"path": "tokens.bin", "bytes": 2000, "xxh3": "0123456789abcdef", "tokens": 1000}],
 *      "files": [{"name": "model.safetensors", "bytes": 4096, "xxh3": "..."}]}
 *
 * With a limit for loss spikes "losses" has the losses that the next limits are made of. With a guard
 * "precision_changes" and "precision_failed" have its state (deepwell/precision_watch.h).
 * "updates" counts the steps that were applied (AdamW's count). A step with a loss or gradient that was not
 * finite counts only as a step. Every random number is a function of seed, step and place, so the seed is the
 * generator's whole state. */
#ifndef DW_MANIFEST_H
#define DW_MANIFEST_H

#include "deepwell/precision_watch.h"
#include "deepwell/trainer.h"
#include "train/dataset.h"
#include "train/loss_spikes.h"

typedef struct dw__progress {
    int64_t step, updates;
    int64_t schedule_steps; /* step at which the schedule of the learning rate ends */
    /* Losses of the last applied steps, "losses": [[step, loss], ...]; NULL: not written, or not read. */
    dw__recent_losses *losses;
    /* The guard, whose state has the members of dw_precision_watch_state; NULL: not written, or not read. */
    dw_precision_watch *watch;
} dw__progress;

/* Returns what identifies a run, as JSON text: {"random": {...}, "options": {...}, "data": [...]}. `data` was checked,
 * or is NULL: "data" is then empty. Release the text with dw__free. */
dw_status dw__manifest_run(const dw_trainer_options *options, const dw__dataset *data, char **run);
/* Hashes the files of `folder` and writes its manifest.json, which is the last file of a checkpoint. `run`: JSON text
 * of an object, whose members become members of the manifest. */
dw_status dw__manifest_write(const char *folder, const char *run, const dw__progress *progress);
/* Reads the step that the manifest of `folder` names. Fails like dw__manifest_read if the manifest cannot be read. */
dw_status dw__manifest_step(const char *folder, int64_t *step);
/* Reads the manifest of `folder`, checks the size and hash of the files that it lists, and compares "random", "options"
 * and "data" of `run` with it: DW_STATE lists every difference. A member that `run` lacks is not compared.
 * DW_INVALID_ARGUMENT: `run` is not JSON of an object. DW_PARSE: the manifest is malformed. DW_IO: files are missing or
 * changed; the message says how to continue without this checkpoint. `text` receives the manifest's JSON, for dw__free,
 * unless it is NULL. */
dw_status dw__manifest_read(const char *folder, const char *run, dw__progress *progress,
                            char **text);

#endif
