/* Deepwell's whole public interface: programs include this file and link with -ldeepwell.
 *
 *     #include <deepwell/deepwell.h>
 *     int main(void) { puts(dw_version()); }
 *
 * Each header has its purpose and an example at the top, then types, lifecycle, calls and queries. These rules hold in
 * all of them:
 *
 * - A structure of options, and one that describes a call, begins with `size_t struct_size`. Set it to sizeof the
 *   structure; the macro or function that sets the defaults does so. New versions only append members. The shorter
 *   structure of an older version is accepted where a comment says so; any other size is DW_INVALID_ARGUMENT.
 * - A call that runs on a GPU has a `device` (NULL: "cuda") and a `stream` (a CUstream).
 * - The caller owns the memory that it passes. The library copies what it keeps, unless a comment says otherwise.
 *   An object that a function makes is released by the _destroy or _close function of its type.
 * - A pointer may be NULL only where a comment says so.
 * - Every dw_status that a caller should tell apart is named at the function. DW_OUT_OF_MEMORY may come from
 *   any function.
 */
#ifndef DEEPWELL_DEEPWELL_H
#define DEEPWELL_DEEPWELL_H

#include "deepwell/adamw.h"
#include "deepwell/artifact.h"
#include "deepwell/attention.h"
#include "deepwell/autoplan.h"
#include "deepwell/checkpoints.h"
#include "deepwell/device.h"
#include "deepwell/dtype.h"
#include "deepwell/engine.h"
#include "deepwell/explain.h"
#include "deepwell/gemm.h"
#include "deepwell/generate.h"
#include "deepwell/graph.h"
#include "deepwell/hardware.h"
#include "deepwell/jit.h"
#include "deepwell/log.h"
#include "deepwell/machine.h"
#include "deepwell/model.h"
#include "deepwell/number.h"
#include "deepwell/ops.h"
#include "deepwell/planner.h"
#include "deepwell/precision.h"
#include "deepwell/precision_watch.h"
#include "deepwell/quantize.h"
#include "deepwell/safetensors.h"
#include "deepwell/scheme.h"
#include "deepwell/simulate.h"
#include "deepwell/status.h"
#include "deepwell/step_memory.h"
#include "deepwell/threads.h"
#include "deepwell/tokenizer.h"
#include "deepwell/trainer.h"
#include "deepwell/training.h"
#include "deepwell/version.h"

#endif
