/* Byte pair encoding of one piece: its bytes become symbols, and the pair with the lowest rank merges, the leftmost
 * first, until no pair merges. A heap of pairs keeps a piece of n bytes at n log n steps. */
#include "tokenizer/tokenizer_internal.h"
#include "tokenizer/unicode.h"

#define NOWHERE UINT32_MAX

/* ---- printable form of bytes --------------------------------------------------------------- */

static bool is_itself(uint32_t byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
}

/* Bytes that are not printable become the characters from 256 on, in order. */
size_t dw__printable_write(uint8_t byte, char text[4]) {
    uint32_t code = byte;
    if (!is_itself(byte)) code = 256u + (byte <= 32 ? byte : byte <= 160 ? byte - 94u : 67u);
    return dw__utf8_write(code, text);
}

int dw__printable_byte(uint32_t code) {
    if (code < 256) return is_itself(code) ? (int)code : -1;
    code -= 256;
    if (code <= 32) return (int)code;
    if (code <= 66) return (int)code + 94;
    return code == 67 ? 173 : -1;
}

/* ---- table of merges ----------------------------------------------------------------------- */

static size_t slot_of(const dw_tokenizer *t, uint64_t pair) {
    uint64_t hash = pair * 0x9E3779B97F4A7C15u;
    size_t at = (size_t)(hash ^ hash >> 32) & (t->merge_slots - 1);
    while (t->merges[at].pair != pair && t->merges[at].pair != DW__NO_PAIR)
        at = (at + 1) & (t->merge_slots - 1);
    return at;
}

const dw__merge *dw__find_merge(const dw_tokenizer *tokenizer, uint32_t left, uint32_t right) {
    const dw__merge *found = &tokenizer->merges[slot_of(tokenizer, (uint64_t)left << 32 | right)];
    return found->pair == DW__NO_PAIR ? NULL : found;
}

void dw__add_merge(dw_tokenizer *tokenizer, dw__merge merge) {
    tokenizer->merges[slot_of(tokenizer, merge.pair)] = merge;
}

/* ---- heap ---------------------------------------------------------------------------------- */

static bool precedes(dw__candidate a, dw__candidate b) {
    return a.rank != b.rank ? a.rank < b.rank : a.place < b.place;
}

static dw_status push(dw__merger *m, dw__candidate candidate) {
    DW_RETURN_IF_FAILED(DW_PUSH(&m->queue, candidate));
    dw__candidate *items = m->queue.items;
    size_t at = m->queue.count - 1;
    while (at > 0 && precedes(candidate, items[(at - 1) / 2])) {
        items[at] = items[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    items[at] = candidate;
    return DW_OK;
}

static dw__candidate pop(dw__merger *m) {
    dw__candidate *items = m->queue.items, first = items[0];
    size_t count = --m->queue.count, at = 0;
    dw__candidate last = items[count];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && precedes(items[child + 1], items[child])) child++;
        if (!precedes(items[child], last)) break;
        items[at] = items[child];
        at = child;
    }
    items[at] = last;
    return first;
}

/* ---- a piece ------------------------------------------------------------------------------- */

void dw__merger_free(dw__merger *merger) {
    dw__free(merger->symbols);
    dw__free(merger->queue.items);
    dw__text_free(&merger->printable);
}

static dw_status push_pair(const dw_tokenizer *t, dw__merger *m, uint32_t left) {
    if (left == NOWHERE || m->symbols[left].next == NOWHERE) return DW_OK;
    const dw__merge *found =
        dw__find_merge(t, m->symbols[left].id, m->symbols[m->symbols[left].next].id);
    return found ? push(m, (dw__candidate){found->rank, left, found->id}) : DW_OK;
}

static dw_status merge_pair(const dw_tokenizer *t, dw__merger *m, dw__candidate best) {
    dw__symbol *left = &m->symbols[best.place];
    if (left->gone || left->next == NOWHERE) return DW_OK;
    dw__symbol *right = &m->symbols[left->next];
    const dw__merge *found = dw__find_merge(t, left->id, right->id);
    if (!found || found->id != best.id) return DW_OK; /* the pair has changed since it was pushed */
    left->id = found->id;
    left->next = right->next;
    right->gone = true;
    if (right->next != NOWHERE) m->symbols[right->next].previous = best.place;
    DW_RETURN_IF_FAILED(push_pair(t, m, left->previous));
    return push_pair(t, m, best.place);
}

static dw_status find_whole(const dw_tokenizer *t, dw__merger *m, const char *piece, size_t bytes,
                            uint32_t *id, bool *found) {
    m->printable.length = 0;
    for (size_t i = 0; i < bytes; i++) {
        char text[4];
        DW_RETURN_IF_FAILED(
            dw__text_append(&m->printable, text, dw__printable_write((uint8_t)piece[i], text)));
    }
    *found = dw__map_get(t->vocabulary, m->printable.text, id);
    return DW_OK;
}

dw_status dw__merge_piece(const dw_tokenizer *tokenizer, dw__merger *merger, const char *piece,
                          size_t bytes, dw__ids *ids) {
    if (bytes >= NOWHERE)
        return dw__fail(DW_UNSUPPORTED,
                        "a piece of the text has %zu bytes; expected less than 4 GiB", bytes);
    if (tokenizer->ignores_merges) {
        uint32_t id = 0;
        bool found;
        DW_RETURN_IF_FAILED(find_whole(tokenizer, merger, piece, bytes, &id, &found));
        if (found) return DW_PUSH(ids, id);
    }
    DW_RETURN_IF_FAILED(dw__grow((void **)&merger->symbols, &merger->symbol_capacity, bytes,
                                 sizeof *merger->symbols));
    for (uint32_t i = 0; i < bytes; i++)
        merger->symbols[i] = (dw__symbol){tokenizer->byte_ids[(uint8_t)piece[i]], false,
                                          i ? i - 1 : NOWHERE, i + 1 < bytes ? i + 1 : NOWHERE};
    merger->queue.count = 0;
    for (uint32_t i = 0; i + 1 < bytes; i++) DW_RETURN_IF_FAILED(push_pair(tokenizer, merger, i));
    while (merger->queue.count > 0) DW_RETURN_IF_FAILED(merge_pair(tokenizer, merger, pop(merger)));
    for (uint32_t i = 0; i != NOWHERE; i = merger->symbols[i].next)
        DW_RETURN_IF_FAILED(DW_PUSH(ids, merger->symbols[i].id));
    return DW_OK;
}
