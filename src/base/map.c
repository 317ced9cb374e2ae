/* Map from strings to uint32: open addressing with linear probing. The table's size is a power of two, and it
 * is at most three quarters full. Hash: 64-bit FNV-1a (Fowler, Noll, Vo; RFC 9923). Entries are never
 * removed. */
#include "base/base.h"
#include <string.h>

enum { FIRST_SLOTS = 16 };

typedef struct slot {
    char *key; /* NULL: free */
    uint64_t hash;
    uint32_t value;
} slot;

struct dw__map {
    slot *slots;
    size_t slot_count, used;
};

static uint64_t hash_of(const char *key) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *key; key++) hash = (hash ^ (unsigned char)*key) * 0x100000001b3u;
    return hash;
}

/* Returns the slot that holds `key`, or the free slot where it belongs. */
static slot *find(slot *slots, size_t slot_count, const char *key, uint64_t hash) {
    for (size_t at = hash & (slot_count - 1);; at = (at + 1) & (slot_count - 1)) {
        slot *here = &slots[at];
        if (!here->key || (here->hash == hash && strcmp(here->key, key) == 0)) return here;
    }
}

dw__map *dw__map_create(void) {
    dw__map *map = dw__calloc(1, sizeof *map);
    if (!map) return NULL;
    map->slots = dw__calloc(FIRST_SLOTS, sizeof(slot));
    if (!map->slots) {
        dw__free(map);
        return NULL;
    }
    map->slot_count = FIRST_SLOTS;
    return map;
}

void dw__map_destroy(dw__map *map) {
    if (!map) return;
    for (size_t at = 0; at < map->slot_count; at++) dw__free(map->slots[at].key);
    dw__free(map->slots);
    dw__free(map);
}

bool dw__map_get(const dw__map *map, const char *key, uint32_t *value) {
    const slot *here = find(map->slots, map->slot_count, key, hash_of(key));
    if (!here->key) return false;
    *value = here->value;
    return true;
}

static dw_status double_slots(dw__map *map) {
    size_t slot_count = 2 * map->slot_count;
    slot *slots = dw__calloc(slot_count, sizeof(slot));
    if (!slots) return dw__fail_memory("a name table", slot_count * sizeof(slot));
    for (size_t at = 0; at < map->slot_count; at++) {
        slot *old = &map->slots[at];
        if (old->key) *find(slots, slot_count, old->key, old->hash) = *old;
    }
    dw__free(map->slots);
    map->slots = slots;
    map->slot_count = slot_count;
    return DW_OK;
}

dw_status dw__map_set(dw__map *map, const char *key, uint32_t value) {
    uint64_t hash = hash_of(key);
    slot *here = find(map->slots, map->slot_count, key, hash);
    if (here->key) {
        here->value = value;
        return DW_OK;
    }
    if (4 * (map->used + 1) > 3 * map->slot_count) {
        DW_RETURN_IF_FAILED(double_slots(map));
        here = find(map->slots, map->slot_count, key, hash);
    }
    size_t bytes = strlen(key) + 1;
    char *copy = dw__malloc(bytes);
    if (!copy) return dw__fail_memory("a name", bytes);
    memcpy(copy, key, bytes);
    *here = (slot){.key = copy, .hash = hash, .value = value};
    map->used++;
    return DW_OK;
}
