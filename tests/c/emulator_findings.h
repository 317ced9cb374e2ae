/* Collects an emulator's findings for tests. */
#ifndef DW_EMULATOR_FINDINGS_H
#define DW_EMULATOR_FINDINGS_H

#include "deepwell/emulator.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static inline void print_findings(const dw_emulator *emulator) {
    for (size_t i = 0; i < dw_emulator_finding_count(emulator); i++) {
        dw_finding finding;
        char text[2000];
        assert_int_equal(dw_emulator_finding(emulator, i, &finding), DW_OK);
        dw_finding_text(&finding, text, sizeof text);
        print_message("%s\n", text);
    }
}

#endif
