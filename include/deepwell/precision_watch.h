/* The guard of a training run (docs/precision.md, "Guards"): judges samples of the rounding of linear layers, and says
 * which policy each step has. deepwell.Trainer and dw_trainer obey guards by these functions.
 *
 *     dw_precision_watch *watch;
 *     dw_precision_watch_create(policy, &watch);
 *     for (int64_t step = 1; step <= steps; step++) {
 *         if (dw_precision_watch_phase(watch, step, steps) != phase) ...   // dw_precision_watch_policy: plan again
 *         ... forward and backward; with statistics if dw_precision_watch_samples(watch, step, steps)
 *         dw_precision_operands_json(layers, count, statistics, &operands);
 *         dw_precision_watch_judge(watch, step, operands, &changes);
 *     }
 *     dw_precision_watch_destroy(watch);
 *
 * A layer that falls back because of step N is BF16 from step N + 2 on, also if the sample is known earlier, so that a
 * run does not depend on when it is read. Texts that a function returns are JSON; free them with dw_text_free. */
#ifndef DEEPWELL_PRECISION_WATCH_H
#define DEEPWELL_PRECISION_WATCH_H

#include "deepwell/precision.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_precision_watch dw_precision_watch;

/* Copies the policy, whose guard is obeyed. DW_INVALID_ARGUMENT: the policy is invalid, or has no guard. */
DW_API dw_status dw_precision_watch_create(const dw_precision_policy *policy,
                                           dw_precision_watch **watch);
DW_API void dw_precision_watch_destroy(dw_precision_watch *watch); /* may be NULL */

/* ---- steps ------------------------------------------------------------------------------------- */

/* Returns the first step of a run of `steps` that is repaired; steps + 1 if none is. */
DW_API int64_t dw_precision_watch_repair_begins(const dw_precision_watch *watch, int64_t steps);
/* Returns 1 if the step is sampled. */
DW_API int dw_precision_watch_samples(const dw_precision_watch *watch, int64_t step, int64_t steps);
/* Returns a number that is the same for steps with the same policy: how many fallbacks apply to the step, or -1 in the
 * repair. `steps` 0: as if there were no repair. */
DW_API int64_t dw_precision_watch_phase(const dw_precision_watch *watch, int64_t step,
                                        int64_t steps);
/* Returns the text of the step's policy: the run's with the layers that have fallen back, or in the repair
 * dw_precision_policy_in_bf16 of it. `steps` 0: as if there were no repair. */
DW_API dw_status dw_precision_watch_policy(const dw_precision_watch *watch, int64_t step,
                                           int64_t steps, char **json);

/* ---- samples ----------------------------------------------------------------------------------- */

/* Describes a sample: [{"layer": "h.0.mlp.c_fc", "operand": "forward_w", "scheme": "mxfp8", "snr_db": 31.2, "bound_db":
 * 25.6, "elements": 4096, "underflow": 3, "saturated": 0}, ...]. "snr_db" is null if nothing was lost. `layers`: JSON
 * of `count` layers as dw_precision_layers_json describes those with bounds. `statistics`: the gradients of their
 * leaves of role DW_ROLE_STATISTICS, [count, DW_LAYER_STATISTICS]. Operands without a bound, and those that no GEMM
 * read, are left out. DW_PARSE, DW_INVALID_ARGUMENT: `layers` is not that. */
DW_API dw_status dw_precision_operands_json(const char *layers, uint32_t count,
                                            const double *statistics, char **json);
/* Judges a sample, `operands` of dw_precision_operands_json. `changes` receives the layers that fall back because of
 * it: [{"from_step": 6, "layer": ..., "sampled_step": 4, "operand": ..., "scheme": ..., "snr_db": ..., "bound_db": ...,
 * "underflow": 0.99, "reason": "99.9% of its elements became 0, bound 90%"}], for the worst operand of each. */
DW_API dw_status dw_precision_watch_judge(dw_precision_watch *watch, int64_t step,
                                          const char *operands, char **changes);
/* Records that the repair begins with a step, and returns the change: {"from_step": 951, "repair": true}. */
DW_API dw_status dw_precision_watch_repair(dw_precision_watch *watch, int64_t step, char **change);
/* Describes a change in a line for the user; not JSON. */
DW_API dw_status dw_precision_change_text(const char *change, char **text);

/* ---- checkpoints ------------------------------------------------------------------------------- */

/* Returns what a checkpoint's manifest keeps: {"precision_changes": [...], "precision_failed": {"h.0.mlp.c_fc": 1}},
 * the changes of the run and the samples in a row that a layer has failed. Empty members are left out. */
DW_API dw_status dw_precision_watch_state(const dw_precision_watch *watch, char **json);
/* Restores the members of an object that has them, such as a manifest. DW_PARSE: they are not of this form. */
DW_API dw_status dw_precision_watch_restore(dw_precision_watch *watch, const char *json);

#ifdef __cplusplus
}
#endif
#endif
