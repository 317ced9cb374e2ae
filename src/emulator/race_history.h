/* Access histories of the race checker. A history holds the last writes of four bytes (or of a tensor-memory column)
 * and the reads since then, as many as there are slots for. Most places share their history with many others, so each
 * distinct history is stored once and places hold its number.
 */
#ifndef DW_EMULATOR_RACE_HISTORY_H
#define DW_EMULATOR_RACE_HISTORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DW__HISTORY_SLOTS = 3 };
/* `parts` holds, for each slot: four bits that say which bytes the slot covers; one bit that says whether it is a
 * write; one bit that says whether it is one of several writes of the same value. Knowing one of those writes is
 * enough to know the value. */
typedef struct dw__history {
    uint64_t slots[DW__HISTORY_SLOTS]; /* 0: the slot is empty */
    uint32_t parts;
    uint32_t next; /* in the table */
} dw__history;
/* In `parts`: a live mbarrier occupies the place, so data must not be written here. */
#define DW__HISTORY_LIVE_MBARRIER 0x80000000u

/* Number 0 is the history of an untouched place. */
typedef struct dw__histories {
    dw__history *items;
    uint32_t *first; /* of each hash */
    uint32_t count, capacity, unused;
} dw__histories;
#define DW__NO_HISTORY UINT32_MAX

bool dw__histories_create(dw__histories *h);
void dw__histories_free(dw__histories *h);
/* Returns the number of this history, adding it if necessary. Slots that cover no bytes are ignored. Returns
 * DW__NO_HISTORY if there is no room. */
uint32_t dw__history_number(dw__histories *h, const dw__history *of);
/* Makes room for more histories: drops those that none of these places has, and grows. Returns false if memory is
 * out. */
bool dw__histories_make_room(dw__histories *h, const uint32_t *places, size_t count);

#endif
