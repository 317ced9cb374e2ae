/* manifest.json: what a checkpoint was made with, so that a run goes on from it only where it goes on bit for
 * bit, and what its files must be.
 *
 *     {"format": "deepwell checkpoint", "version": 1, "deepwell": "0.1.0",
 *      "step": 20, "updates": 20, "schedule_steps": 1000,
 *      "random": {"generator": "philox4x32-10", "seed": 1},
 *      "options": {"sequence": 256, "batch": 8, ...},
 *      "data": [{"path": "tokens.bin", "bytes": 2000, "xxh3": "0123456789abcdef", "tokens": 1000}],
 *      "files": [{"name": "model.safetensors", "bytes": 4096, "xxh3": "..."}]}
 *
 * updates: steps that were applied (AdamW's count); a step that was not finite counts as a step alone. Every random
 * number is a function of seed, step and place, so the seed is all of the generator's state.
 */
#ifndef DW_MANIFEST_H
#define DW_MANIFEST_H

#include "deepwell/trainer.h"
#include "train/dataset.h"

typedef struct dw__progress {
    int64_t step, updates;
    int64_t schedule_steps; /* at which the cosine of the learning rate ends */
} dw__progress;

/* Hashes the files of `folder` and writes its manifest.json, the last file of a checkpoint. */
dw_status dw__manifest_write(const char *folder, const dw_trainer_options *options,
                             const dw__dataset *data, const dw__progress *progress);
/* The step that the manifest of `folder` names. Fails as dw__manifest_read does where that cannot be read. */
dw_status dw__manifest_step(const char *folder, int64_t *step);
/* Reads the manifest of `folder`, checks the files that it lists (size and hash), and that options and data are
 * those that it names: DW_STATE lists every difference. DW_PARSE for a manifest that is malformed, DW_IO for
 * files that are missing or not what they were: their messages say how to go on without this checkpoint. */
dw_status dw__manifest_read(const char *folder, const dw_trainer_options *options,
                            const dw__dataset *data, dw__progress *progress);

#endif
