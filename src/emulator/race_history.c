#include "emulator/race_history.h"
#include "base/base.h"
#include <string.h>

#define FIRST_CAPACITY 512u /* all capacities are powers of two */
#define WRITE_BITS 0x9000u  /* the write bit and the same-value bit of the first slot */
#define MARK 0x40000000u    /* in `parts`: a place has this history */
#define SAME(a, b)                                                                                 \
    ((a)->slots[0] == (b)->slots[0] && (a)->slots[1] == (b)->slots[1] &&                           \
     (a)->slots[2] == (b)->slots[2] && (a)->parts == (b)->parts)

static uint32_t hash_of(const dw__history *x) {
    uint64_t hash = x->parts * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < DW__HISTORY_SLOTS; i++)
        hash = (hash ^ x->slots[i]) * 0xD6E8FEB86659FD93u, hash ^= hash >> 32;
    return (uint32_t)hash;
}
static uint32_t *chain_of(dw__histories *h, const dw__history *x) {
    return &h->first[hash_of(x) & (h->capacity - 1)];
}

bool dw__histories_create(dw__histories *h) {
    *h = (dw__histories){.count = 1, .capacity = FIRST_CAPACITY};
    h->items = dw__malloc(FIRST_CAPACITY * sizeof *h->items);
    h->first = dw__calloc(FIRST_CAPACITY, sizeof *h->first);
    if (!h->items || !h->first) return false;
    h->items[0] = (dw__history){0};
    return true;
}
void dw__histories_free(dw__histories *h) {
    dw__free(h->items);
    dw__free(h->first);
    *h = (dw__histories){0};
}

uint32_t dw__history_number(dw__histories *h, const dw__history *of) {
    dw__history x = *of;
    for (int i = 0; i < DW__HISTORY_SLOTS; i++)
        if (!(x.parts >> 4 * i & 15)) x.slots[i] = 0, x.parts &= ~(WRITE_BITS << i);
    if (SAME(&x, &h->items[0])) return 0;
    uint32_t *chain = chain_of(h, &x), number = *chain;
    while (number && !SAME(&x, &h->items[number])) number = h->items[number].next;
    if (number) return number;
    if (h->unused) {
        number = h->unused;
        h->unused = h->items[number].next;
    } else {
        if (h->count == h->capacity) return DW__NO_HISTORY;
        number = h->count++;
    }
    x.next = *chain;
    h->items[number] = x;
    *chain = number;
    return number;
}

bool dw__histories_make_room(dw__histories *h, const uint32_t *places, size_t count) {
    uint32_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        dw__history *x = &h->items[places[i]];
        kept += !(x->parts & MARK);
        x->parts |= MARK;
    }
    if (kept > h->capacity / 4) {
        const uint32_t wanted = 2 * h->capacity;
        dw__history *items = dw__realloc(h->items, wanted * sizeof *items);
        if (items) h->items = items;
        uint32_t *first = items ? dw__realloc(h->first, wanted * sizeof *first) : NULL;
        if (!first) return false;
        h->first = first, h->capacity = wanted;
    }
    memset(h->first, 0, h->capacity * sizeof *h->first);
    h->unused = 0;
    h->items[0].parts &= ~MARK;
    for (uint32_t number = 1; number < h->count; number++) {
        dw__history *x = &h->items[number];
        const bool marked = x->parts & MARK;
        x->parts &= ~MARK;
        uint32_t *chain = marked ? chain_of(h, x) : &h->unused;
        x->next = *chain;
        *chain = number;
    }
    return true;
}
