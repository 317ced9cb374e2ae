/* Helpers shared by the families: memory, random numbers, conversion of words to numbers. */
#include "compare.h"
#include "number/half.h"
#include <math.h>
#include <string.h>

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct compare_block {
    struct compare_block *next;
    void *memory;
    size_t bytes;
    bool on_device;
} compare_block;

static dw_status keep(compare_memory *memory, void *made, size_t bytes, bool on_device) {
    compare_block *block = dw__malloc(sizeof *block);
    if (!block) return dw__fail_memory("a block of memory", sizeof *block);
    *block = (compare_block){memory->blocks, made, bytes, on_device};
    memory->blocks = block;
    return DW_OK;
}

dw_status compare_empty(compare_memory *memory, size_t bytes, void **device) {
    const dw_device *d = &dw__device_cuda;
    if (bytes == 0) bytes = 1;
    DW_RETURN_IF_FAILED(d->allocate(bytes, device));
    dw_status status = keep(memory, *device, bytes, true);
    if (status != DW_OK) d->release(*device, bytes);
    /* A NaN in every type, so that elements that the kernel does not write are detected. */
    return status == DW_OK ? d->fill(*device, 0xFF, bytes) : status;
}

dw_status compare_place(compare_memory *memory, const void *host, size_t bytes, void **device) {
    const dw_device *d = &dw__device_cuda;
    DW_RETURN_IF_FAILED(compare_empty(memory, bytes, device));
    if (bytes == 0) return DW_OK;
    DW_RETURN_IF_FAILED(d->copy_in(*device, host, bytes, NULL));
    return d->stream_synchronize(NULL);
}

dw_status compare_host(compare_memory *memory, size_t bytes, void **host) {
    *host = dw__calloc(bytes + 1, 1);
    if (!*host) return dw__fail_memory("a tensor", bytes);
    dw_status status = keep(memory, *host, bytes, false);
    if (status != DW_OK) dw__free(*host);
    return status;
}

dw_status compare_fetch(compare_memory *memory, const void *device, size_t bytes, void **host) {
    const dw_device *d = &dw__device_cuda;
    DW_RETURN_IF_FAILED(compare_host(memory, bytes, host));
    if (bytes == 0) return DW_OK;
    DW_RETURN_IF_FAILED(d->stream_synchronize(NULL));
    DW_RETURN_IF_FAILED(d->copy_out(*host, device, bytes, NULL));
    return d->stream_synchronize(NULL);
}

void compare_release(compare_memory *memory) {
    while (memory->blocks) {
        compare_block *block = memory->blocks;
        memory->blocks = block->next;
        if (block->on_device)
            dw__device_cuda.release(block->memory, block->bytes);
        else
            dw__free(block->memory);
        dw__free(block);
    }
}

/* ---- numbers --------------------------------------------------------------------------------- */

size_t compare_width(compare_type type) {
    return type == COMPARE_BYTES ? 1 : type == COMPARE_BF16 || type == COMPARE_F16 ? 2 : 4;
}

double compare_value(compare_type type, const void *words, size_t index) {
    switch (type) {
    case COMPARE_BF16: return (double)dw__bf16_to_f32(((const uint16_t *)words)[index]);
    case COMPARE_F16: return (double)dw__f16_to_f32(((const uint16_t *)words)[index]);
    case COMPARE_F32: return (double)((const float *)words)[index];
    case COMPARE_BITS: return ((const uint32_t *)words)[index];
    case COMPARE_BYTES: return ((const uint8_t *)words)[index];
    }
    return 0;
}

double compare_ulp(compare_type type, double x) {
    const int digits = type == COMPARE_BF16 ? 8 : type == COMPARE_F16 ? 11 : 24;
    const int least = type == COMPARE_BF16 ? -133 : type == COMPARE_F16 ? -24 : -149;
    int exponent;
    if (x == 0 || !isfinite(x)) return ldexp(1.0, least);
    frexp(x, &exponent);
    return ldexp(1.0, exponent - digits > least ? exponent - digits : least);
}

/* ---- random ---------------------------------------------------------------------------------- */

compare_random compare_seed(const char *text) {
    compare_random made = {0xCBF29CE484222325u};
    for (; *text; text++) made.state = (made.state ^ (unsigned char)*text) * 0x100000001B3u;
    return made;
}

uint32_t compare_bits(compare_random *random) {
    random->state = random->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random->state >> 32);
}

double compare_uniform(compare_random *random) { return compare_bits(random) * 0x1p-32; }

double compare_bell(compare_random *random) {
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += compare_uniform(random);
    return sum;
}
