/* Counts the memory of tensors, whoever allocates it; test_step_memory.py preloads it. PyTorch and Deepwell allocate
 * tensors with posix_memalign and aligned_alloc. Python's objects come from malloc and are not counted. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *pointer);
extern void *__libc_realloc(void *pointer, size_t bytes);

enum { SLOTS = 1 << 20, LEAST_ALIGNMENT = 64 };
static struct {
    uintptr_t address; /* 0: never used; 1: used before and free now */
    size_t bytes;
} slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t now, most;

static size_t slot_of(uintptr_t address) { return (address >> 6) * 2654435761u % SLOTS; }

static void *counted(void *pointer, size_t bytes) {
    if (!pointer) return NULL;
    pthread_mutex_lock(&lock);
    size_t at = slot_of((uintptr_t)pointer);
    while (slots[at].address > 1) at = (at + 1) % SLOTS;
    slots[at].address = (uintptr_t)pointer;
    slots[at].bytes = bytes;
    now += bytes;
    if (now > most) most = now;
    pthread_mutex_unlock(&lock);
    return pointer;
}

static void forget(void *pointer) {
    if (!pointer || (uintptr_t)pointer % LEAST_ALIGNMENT) return;
    pthread_mutex_lock(&lock);
    for (size_t at = slot_of((uintptr_t)pointer); slots[at].address; at = (at + 1) % SLOTS) {
        if (slots[at].address != (uintptr_t)pointer) continue;
        slots[at].address = 1;
        now -= slots[at].bytes;
        break;
    }
    pthread_mutex_unlock(&lock);
}

int posix_memalign(void **pointer, size_t alignment, size_t bytes) {
    void *made = __libc_memalign(alignment, bytes);
    if (!made) return ENOMEM;
    *pointer = alignment >= LEAST_ALIGNMENT ? counted(made, bytes) : made;
    return 0;
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    void *made = __libc_memalign(alignment, bytes);
    return alignment >= LEAST_ALIGNMENT ? counted(made, bytes) : made;
}

void free(void *pointer) {
    forget(pointer);
    __libc_free(pointer);
}

void *realloc(void *pointer, size_t bytes) {
    forget(pointer);
    return __libc_realloc(pointer, bytes);
}

size_t counted_now(void) { return now; }
size_t counted_most(void) { return most; }
void counted_restart(void) { most = now; }
