/* Choices that the user makes by environment variables, each of which holds one of a few words. */
#include "kernel/kernel.h"
#include <stdlib.h>
#include <string.h>

typedef struct choice {
    const char *name, *words[2];
} choice;

static const choice logits = {"DEEPWELL_LOGITS", {"kept", "blocks"}},
                    epilogues = {"DEEPWELL_EPILOGUES", {"off", "all"}};

/* Returns the number of the variable's word, 0 if it is unset or empty, and -1 if it has another value. */
static int chosen(const choice *c) {
    const char *text = getenv(c->name);
    if (!text || !*text) return 0;
    for (int i = 0; i < (int)DW_COUNT(c->words); i++)
        if (strcmp(text, c->words[i]) == 0) return i + 1;
    return -1;
}

static dw_status check(const choice *c) {
    if (chosen(c) >= 0) return DW_OK;
    return dw__fail(
        DW_INVALID_ARGUMENT,
        "the environment variable %s is \"%s\"; expected \"%s\" or \"%s\"; unset it for "
        "the default",
        c->name, getenv(c->name), c->words[0], c->words[1]);
}

dw_status dw__check_choices(void) {
    DW_RETURN_IF_FAILED(check(&logits));
    return check(&epilogues);
}

dw__logits dw__logits_wanted(void) {
    static const dw__logits wanted[] = {DW__LOGITS_BY_MEMORY, DW__LOGITS_KEPT,
                                        DW__LOGITS_IN_BLOCKS};
    const int word = chosen(&logits);
    return wanted[word < 0 ? 0 : word];
}

dw__epilogues dw__epilogues_wanted(void) {
    static const dw__epilogues wanted[] = {DW__EPILOGUES_WORTH_IT, DW__EPILOGUES_OFF,
                                           DW__EPILOGUES_ALL};
    const int word = chosen(&epilogues);
    return wanted[word < 0 ? 0 : word];
}
