/* Interval placement: two buffers that live at the same time share no byte, for any input. */
#include "engine/placement.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static uint64_t random_state;
static size_t alignment = 64;

static uint32_t random_below(uint32_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % limit;
}

/* Checks every rule of the header, pair by pair. */
static void check(uint32_t count, const dw__interval *items, uint32_t segments,
                  const dw__extent *extents) {
    dw__extent seen[DW_PLACEMENT_SEGMENTS] = {{0}};
    for (uint32_t i = 0; i < count; i++) {
        const dw__interval *a = &items[i];
        if (a->bytes == 0) continue;
        assert_int_equal(a->offset % alignment, 0);
        assert_true(a->pinned ? a->segment == a->most
                              : a->segment <= a->most || (a->late && a->segment == a->late));
        dw__extent *in = &seen[a->segment];
        if (a->offset + a->bytes > in->bytes) in->bytes = a->offset + a->bytes;
        if (a->pinned && a->offset + a->bytes > in->pinned_bytes)
            in->pinned_bytes = a->offset + a->bytes;
        for (uint32_t j = 0; j < i; j++) {
            const dw__interval *b = &items[j];
            bool together =
                (a->first <= b->last && b->first <= a->last) || (a->pinned && b->pinned);
            if (b->bytes == 0 || b->segment != a->segment || !together) continue;
            assert_true(a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset);
        }
    }
    for (uint32_t s = 0; s < segments; s++) {
        assert_int_equal(seen[s].bytes, extents[s].bytes);
        assert_int_equal(seen[s].pinned_bytes, extents[s].pinned_bytes);
    }
}

static void place_and_check(uint32_t count, dw__interval *items, size_t *peak) {
    size_t bound = 0;
    dw__extent extent;
    assert_int_equal(dw__place(count, items, alignment, 1, &extent), DW_OK);
    check(count, items, 1, &extent);
    *peak = extent.bytes;
    assert_int_equal(dw__placement_bound(count, items, alignment, &bound), DW_OK);
    if (extent.pinned_bytes == 0) assert_true(*peak + alignment > bound);
}

static void no_buffers_need_no_memory(void **state) {
    (void)state;
    size_t peak = 1;
    dw__extent extent = {1, 1};
    assert_int_equal(dw__place(0, NULL, alignment, 1, &extent), DW_OK);
    assert_int_equal(extent.bytes, 0);
    assert_int_equal(extent.pinned_bytes, 0);
    dw__interval empty[2] = {{.bytes = 0, .first = 0, .last = 3}, {.bytes = 0, .pinned = true}};
    place_and_check(2, empty, &peak);
    assert_int_equal(peak, 0);
}

static void the_peak_is_exact(void **state) {
    (void)state;
    size_t peak = 0;
    dw__interval one[1] = {{.bytes = 7, .first = 2, .last = 2}};
    place_and_check(1, one, &peak);
    assert_int_equal(peak, 7);
    dw__interval together[2] = {{.bytes = 7, .first = 0, .last = 1},
                                {.bytes = 5, .first = 1, .last = 1}};
    place_and_check(2, together, &peak);
    assert_int_equal(peak, 64 + 5);
    dw__interval apart[2] = {{.bytes = 7, .first = 0, .last = 0},
                             {.bytes = 5, .first = 1, .last = 1}};
    place_and_check(2, apart, &peak);
    assert_int_equal(peak, 7);
}

static void tightest_hole_is_used(void **state) {
    (void)state;
    /* Long-lived blocks with a hole of 256 and one of 128 between them; 100 bytes fit both. */
    dw__interval items[6] = {
        {.bytes = 2000, .first = 0, .last = 9}, {.bytes = 256, .first = 0, .last = 1},
        {.bytes = 250, .first = 0, .last = 9},  {.bytes = 128, .first = 0, .last = 1},
        {.bytes = 120, .first = 0, .last = 9},  {.bytes = 100, .first = 5, .last = 6},
    };
    size_t peak = 0;
    place_and_check(6, items, &peak);
    assert_int_equal(items[5].offset, items[3].offset);
}

static void pinned_buffers_are_a_prefix(void **state) {
    (void)state;
    dw__interval items[3] = {
        {.bytes = 64, .first = 0, .last = 9, .pinned = true},
        {.bytes = 640, .first = 1, .last = 1},
        {.bytes = 100, .first = 3, .last = 8, .pinned = true},
    };
    dw__extent extent;
    assert_int_equal(dw__place(3, items, alignment, 1, &extent), DW_OK);
    check(3, items, 1, &extent);
    assert_int_equal(extent.pinned_bytes, 164);
    /* The other buffer ends before the second pinned one is written, and may overlap it. */
    assert_int_equal(items[1].offset, 64);
}

static void random_lives_never_collide(void **state) {
    (void)state;
    enum { MOST = 300 };
    static dw__interval items[MOST];
    for (uint32_t round = 0; round < 200; round++) {
        random_state = round;
        uint32_t count = random_below(MOST) + 1, steps = random_below(200) + 1;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t first = random_below(steps), length = random_below(round % 2 ? 4 : steps);
            items[i] = (dw__interval){.bytes = random_below(round % 3 ? 1000 : 65),
                                      .first = first,
                                      .last = first + length,
                                      .pinned = round % 4 == 0 && random_below(4) == 0};
        }
        size_t peak = 0;
        alignment = round % 5 == 0 ? 256 : 64;
        place_and_check(count, items, &peak);
    }
    alignment = 64;
}

/* Segment 0 has to hold the first two. The third fits above one of them there, where nothing meets it, and the last,
 * which meets all of them, lies where a segment grows least. */
static void segments_are_separate(void **state) {
    (void)state;
    dw__interval items[4] = {
        {.bytes = 640, .first = 0, .last = 9, .pinned = true},
        {.bytes = 320, .first = 6, .last = 9},
        {.bytes = 300, .first = 0, .last = 4, .most = 1},
        {.bytes = 100, .first = 0, .last = 9, .most = 1},
    };
    dw__extent extents[2];
    assert_int_equal(dw__place(4, items, alignment, 2, extents), DW_OK);
    check(4, items, 2, extents);
    assert_int_equal(items[2].segment, 0);
    assert_int_equal(items[2].offset, 640);
    assert_int_equal(items[3].segment, 1);
    assert_int_equal(extents[0].bytes, 960);
    assert_int_equal(extents[1].bytes, 100);
}

static void random_lives_in_segments_never_collide(void **state) {
    (void)state;
    enum { MOST = 200 };
    static dw__interval items[MOST];
    for (uint32_t round = 0; round < 200; round++) {
        random_state = 1000 + round;
        uint32_t count = random_below(MOST) + 1, steps = random_below(200) + 1;
        uint32_t segments = random_below(DW_PLACEMENT_SEGMENTS) + 1,
                 early = random_below(segments) + 1; /* those behind are late */
        for (uint32_t i = 0; i < count; i++) {
            uint32_t first = random_below(steps);
            items[i] = (dw__interval){.bytes = random_below(1000),
                                      .first = first,
                                      .last = first + random_below(round % 2 ? 4 : steps),
                                      .pinned = random_below(4) == 0,
                                      .most = random_below(early)};
            if (early < segments && random_below(2))
                items[i].late = early + random_below(segments - early);
        }
        dw__extent extents[DW_PLACEMENT_SEGMENTS];
        assert_int_equal(dw__place(count, items, alignment, segments, extents), DW_OK);
        check(count, items, segments, extents);
    }
}

/* The second buffer fits the hole that the first leaves; the third would make segment 0 grow. */
static void buffers_without_a_hole_go_to_the_late_segment(void **state) {
    (void)state;
    dw__interval items[4] = {
        {.bytes = 640, .first = 0, .last = 9, .pinned = true},
        {.bytes = 256, .first = 0, .last = 2},
        {.bytes = 256, .first = 4, .last = 8, .late = 1},
        {.bytes = 192, .first = 5, .last = 7, .late = 1},
    };
    dw__extent extents[2];
    assert_int_equal(dw__place(4, items, alignment, 2, extents), DW_OK);
    check(4, items, 2, extents);
    assert_int_equal(items[2].segment, 0);
    assert_int_equal(items[2].offset, 640);
    assert_int_equal(items[3].segment, 1);
    assert_int_equal(extents[0].bytes, 640 + 256);
    assert_int_equal(extents[1].bytes, 192);
}

static void failure_of_memory_is_reported(void **state) {
    (void)state;
    dw__interval items[2] = {{.bytes = 1}, {.bytes = 2}};
    size_t peak = 0;
    dw__extent extent;
    dw__memory_fail_after(0);
    assert_int_equal(dw__place(2, items, alignment, 1, &extent), DW_OUT_OF_MEMORY);
    assert_int_equal(dw__placement_bound(2, items, alignment, &peak), DW_OUT_OF_MEMORY);
    dw__memory_fail_after(-1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_buffers_need_no_memory),
        cmocka_unit_test(the_peak_is_exact),
        cmocka_unit_test(tightest_hole_is_used),
        cmocka_unit_test(pinned_buffers_are_a_prefix),
        cmocka_unit_test(random_lives_never_collide),
        cmocka_unit_test(segments_are_separate),
        cmocka_unit_test(random_lives_in_segments_never_collide),
        cmocka_unit_test(buffers_without_a_hole_go_to_the_late_segment),
        cmocka_unit_test(failure_of_memory_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
