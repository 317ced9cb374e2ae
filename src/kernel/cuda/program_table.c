#include "kernel/cuda/program_table.h"
#include <pthread.h>
#include <string.h>

static struct {
    dw__program **items;
    size_t count, capacity;
} programs;
static dw__map *numbers; /* by source */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const dw__program *dw__program_at(uint64_t number) {
    pthread_mutex_lock(&lock);
    const dw__program *found = programs.items[number];
    pthread_mutex_unlock(&lock);
    return found;
}

static dw_status add_program(char *source, const void *form, size_t form_bytes, uint32_t *number) {
    dw__program *made = dw__malloc(sizeof *made + form_bytes);
    if (!made) return dw__fail_memory("a program's source", sizeof *made + form_bytes);
    *made = (dw__program){.source = source, .form = memcpy(made + 1, form, form_bytes)};
    *number = (uint32_t)programs.count;
    dw_status status = DW_PUSH(&programs, made);
    if (status == DW_OK) status = dw__map_set(numbers, source, *number);
    if (status != DW_OK) {
        if (programs.count > *number) programs.count--;
        dw__free(made);
    }
    return status;
}

static dw_status number_of(dw__text *source, const void *form, size_t form_bytes,
                           uint32_t *number) {
    dw_status status = DW_OK;
    pthread_mutex_lock(&lock);
    if (!numbers) numbers = dw__map_create();
    if (!numbers) DW_TRY(dw__fail_memory("the table of programs", 0));
    if (!dw__map_get(numbers, source->text, number)) {
        DW_TRY(add_program(source->text, form, form_bytes, number));
        *source = (dw__text){0};
    }
cleanup:
    pthread_mutex_unlock(&lock);
    dw__text_free(source);
    return status;
}

dw_status dw__program_variant(const dw__context *context, const dw__kernel *kernel,
                              dw__text *source, const void *form, size_t form_bytes,
                              const dw__variant **variant) {
    uint32_t number = 0;
    DW_RETURN_IF_FAILED(number_of(source, form, form_bytes, &number));
    return dw__variant_of(context, kernel, number, variant);
}
