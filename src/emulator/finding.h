/* The checker's findings, collected over all launches on a device. */
#ifndef DW_EMULATOR_FINDING_H
#define DW_EMULATOR_FINDING_H

#include "deepwell/emulator.h"
#include "emulator/running_grid.h"

dw_status dw__emu_findings_create(dw__emu_findings **findings);
void dw__emu_findings_destroy(dw__emu_findings *findings);
size_t dw__emu_findings_count(const dw__emu_findings *findings);
bool dw__emu_findings_at(const dw__emu_findings *findings, size_t index, dw_finding *finding);
void dw__emu_findings_clear(dw__emu_findings *findings);
/* Writes "ring.cu:16 called at ring.cu:39": the source line and, for inlined functions, the lines of the calls. The
 * text is truncated to `bytes`. */
void dw__emu_describe_location(const dw__ptx_module *module, uint32_t location, char *text,
                               size_t bytes);

#endif
