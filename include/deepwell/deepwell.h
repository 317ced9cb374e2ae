/* Deepwell's whole public interface: programs include this file and link with -ldeepwell.
 *
 *     #include <deepwell/deepwell.h>
 *     int main(void) { puts(dw_version()); }
 */
#ifndef DEEPWELL_DEEPWELL_H
#define DEEPWELL_DEEPWELL_H

#include "deepwell/attention.h"
#include "deepwell/autoplan.h"
#include "deepwell/device.h"
#include "deepwell/engine.h"
#include "deepwell/explain.h"
#include "deepwell/gemm.h"
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
#include "deepwell/quantize.h"
#include "deepwell/safetensors.h"
#include "deepwell/simulate.h"
#include "deepwell/status.h"
#include "deepwell/step_memory.h"
#include "deepwell/threads.h"
#include "deepwell/trainer.h"
#include "deepwell/version.h"

#endif
