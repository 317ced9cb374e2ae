/* Comparison of the sizes of models. A structure has padding between its integers and its counts, so its bytes are not
 * compared as a whole. */
#ifndef DW_TEST_MODEL_SIZES_H
#define DW_TEST_MODEL_SIZES_H

#include "deepwell/model.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static inline void expect_same_sizes(const dw_model_sizes *a, const dw_model_sizes *b) {
    assert_memory_equal(a, b, offsetof(dw_model_sizes, lora_rank) + sizeof a->lora_rank);
    assert_true(a->parameters == b->parameters);
    assert_true(a->active == b->active);
}

#endif
