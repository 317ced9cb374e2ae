/* What the checker found, collected over the launches of a device. */
#ifndef DW_EMULATOR_FINDING_H
#define DW_EMULATOR_FINDING_H

#include "deepwell/emulator.h"
#include "emulator/machine.h"

dw_status dw__emu_findings_create(dw__emu_findings **findings);
void dw__emu_findings_destroy(dw__emu_findings *findings);
size_t dw__emu_findings_count(const dw__emu_findings *findings);
bool dw__emu_findings_at(const dw__emu_findings *findings, size_t index, dw_finding *finding);
void dw__emu_findings_clear(dw__emu_findings *findings);

#endif
