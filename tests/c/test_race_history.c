/* Tests the checker's histories: each has one number, is kept while a place uses it, and is freed when no place
 * does. */
#include "base/base.h"
#include "emulator/race_history.h"
#include "random_numbers.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static dw__history random_history(void) {
    dw__history x = {.parts = next_random() & 0x3FFFFu};
    for (int i = 0; i < DW__HISTORY_SLOTS; i++) {
        x.slots[i] = (uint64_t)next_random() << 32 | next_random();
        if (next_random() % 3 == 0) x.parts &= ~(15u << 4 * i);
    }
    if (next_random() % 8 == 0) x.parts |= DW__HISTORY_LIVE_MBARRIER;
    return x;
}
/* Contents of its slots that describe bytes. */
static void expect_same(const dw__history *x, const dw__history *y) {
    assert_int_equal(x->parts & 0x80000FFFu, y->parts & 0x80000FFFu);
    for (int i = 0; i < DW__HISTORY_SLOTS; i++) {
        if (!(x->parts >> 4 * i & 15)) continue;
        assert_true(x->slots[i] == y->slots[i]);
        assert_int_equal(x->parts >> (12 + i) & 9, y->parts >> (12 + i) & 9);
    }
}

enum { PLACES = 3000 };
static uint32_t places[PLACES];
static dw__history wanted[PLACES];

/* Gives a place a history, like the checker. */
static bool put(dw__histories *h, uint32_t place, const dw__history *x) {
    uint32_t number = dw__history_number(h, x);
    if (number == DW__NO_HISTORY) {
        if (!dw__histories_make_room(h, places, PLACES)) return false;
        number = dw__history_number(h, x);
    }
    assert_true(number != DW__NO_HISTORY);
    assert_int_equal(dw__history_number(h, x), number); /* stored only once */
    places[place] = number, wanted[place] = *x;
    return true;
}

static void places_keep_their_histories(void **unused) {
    dw__histories h;
    (void)unused;
    memset(places, 0, sizeof places), memset(wanted, 0, sizeof wanted);
    assert_true(dw__histories_create(&h));
    for (int i = 0; i < 40000; i++) {
        const dw__history x = random_history();
        assert_true(put(&h, next_random() % PLACES, &x));
        if (i % 1000 == 0)
            for (uint32_t k = 0; k < PLACES; k++) expect_same(&wanted[k], &h.items[places[k]]);
    }
    assert_true(h.capacity <= 8 * PLACES); /* histories that no place has were dropped */
    for (uint32_t k = 0; k < PLACES; k++) expect_same(&wanted[k], &h.items[places[k]]);
    dw__histories_free(&h);
}

static void slots_of_no_bytes_do_not_count(void **unused) {
    dw__histories h;
    dw__history x = {.slots = {1, 2, 3}, .parts = 15u << 4 | 7u << 12}, y = x;
    (void)unused;
    assert_true(dw__histories_create(&h));
    y.slots[0] = 9, y.slots[2] = 0, y.parts &= ~(5u << 12);
    assert_int_equal(dw__history_number(&h, &x), dw__history_number(&h, &y));
    y.slots[1] = 8;
    assert_int_not_equal(dw__history_number(&h, &x), dw__history_number(&h, &y));
    x.parts = 7u << 12;
    assert_int_equal(dw__history_number(&h, &x), 0); /* the place was never accessed */
    dw__histories_free(&h);
}

static void lack_of_memory_is_reported(void **unused) {
    const int64_t live = dw__memory_live();
    bool failed = true;
    (void)unused;
    for (int after = 0; failed; after++) {
        dw__histories h;
        memset(places, 0, sizeof places);
        dw__memory_fail_once(after);
        bool good = dw__histories_create(&h);
        for (uint32_t i = 0; good && i < PLACES; i++) {
            const dw__history x = random_history();
            good = put(&h, i, &x);
        }
        failed = dw__memory_failures() > 0;
        dw__memory_fail_after(-1);
        dw__histories_free(&h);
        assert_int_equal(good, !failed);
        assert_true(dw__memory_live() == live);
        if (!failed) assert_true(after > 4); /* the table has grown */
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places_keep_their_histories),
        cmocka_unit_test(slots_of_no_bytes_do_not_count),
        cmocka_unit_test(lack_of_memory_is_reported),
    };
    random_state = 9;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
