/* What the checker remembers of four bytes, or of a column of tensor memory: its last writes and the reads since, as
 * many as there is room for. Most places have had the same happen to them as many others: each such history is kept
 * once, and places have its number.
 */
#ifndef DW_EMULATOR_RACE_HISTORY_H
#define DW_EMULATOR_RACE_HISTORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DW__HISTORY_SLOTS = 3 };
/* `parts` has four bits for each slot, which bytes it is of, then a bit for each, whether it is a write, and a bit for
 * each, whether it is one of several that wrote the same: who knows one of these knows what is there. */
typedef struct dw__history {
    uint64_t slots[DW__HISTORY_SLOTS]; /* of nothing: 0 */
    uint32_t parts;
    uint32_t next; /* in the table */
} dw__history;
#define DW__HISTORY_LIVE_MBARRIER 0x80000000u /* in `parts`: data must not be written here */

/* Number 0 is the history of what nobody touched. */
typedef struct dw__histories {
    dw__history *items;
    uint32_t *first; /* of each hash */
    uint32_t count, capacity, unused;
} dw__histories;
#define DW__NO_HISTORY UINT32_MAX

bool dw__histories_create(dw__histories *h);
void dw__histories_free(dw__histories *h);
/* The number of this history; slots of no bytes do not count. DW__NO_HISTORY: there is no room. */
uint32_t dw__history_number(dw__histories *h, const dw__history *of);
/* Room for more than those that these places have; what no place has is gone. False: no memory. */
bool dw__histories_make_room(dw__histories *h, const uint32_t *places, size_t count);

#endif
