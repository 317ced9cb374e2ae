/* The runtime's memory: allocation, copies, symbols. */
#include "runtime.h"
#include <string.h>

static address of(const void *pointer) { return (address)(uintptr_t)pointer; }

/* ---- allocation ---------------------------------------------------------------------------- */

API int cudaMalloc(void **memory, size_t bytes) {
    address made = 0;
    int result = bytes == 0 ? SUCCESS : cuMemAlloc_v2(&made, bytes);
    *memory = (void *)(uintptr_t)made;
    return keep(result);
}
API int cudaMallocAsync(void **memory, size_t bytes, void *stream) {
    (void)stream;
    return cudaMalloc(memory, bytes);
}
ALSO(cudaMallocAsync, _ptsz, void **, size_t, void *);
/* Rows start at multiples of 512 bytes. */
API int cudaMallocPitch(void **memory, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) / 512 * 512;
    if (height > 0 && *pitch > SIZE_MAX / height) return keep(OUT_OF_MEMORY);
    return cudaMalloc(memory, *pitch * height);
}
API int cudaFree(void *memory) { return keep(memory ? cuMemFree_v2(of(memory)) : cuInit(0)); }
API int cudaFreeAsync(void *memory, void *stream) {
    (void)stream;
    return cudaFree(memory);
}
ALSO(cudaFreeAsync, _ptsz, void *, void *);
API int cudaMallocHost(void **memory, size_t bytes) {
    return keep(cuMemAllocHost_v2(memory, bytes));
}
API int cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
    (void)flags;
    return cudaMallocHost(memory, bytes);
}
API int cudaMallocManaged(void **memory, size_t bytes, unsigned flags) {
    (void)flags;
    return cudaMallocHost(memory, bytes);
}
API int cudaFreeHost(void *memory) { return keep(memory ? cuMemFreeHost(memory) : SUCCESS); }
API int cudaHostRegister(void *memory, size_t bytes, unsigned flags) {
    return keep(cuMemHostRegister_v2(memory, bytes, flags));
}
API int cudaHostUnregister(void *memory) { return keep(cuMemHostUnregister(memory)); }
API int cudaHostGetDevicePointer(void **memory, void *host, unsigned flags) {
    (void)flags;
    *memory = host;
    return SUCCESS;
}
API int cudaMemGetInfo(size_t *available, size_t *total) {
    return keep(cuMemGetInfo_v2(available, total));
}

/* Host and device share one memory. */
API int cudaMemPrefetchAsync(const void *memory) {
    (void)memory;
    return SUCCESS;
}
ALSO(cudaMemPrefetchAsync, _ptsz, const void *);
API int cudaMemAdvise(const void *memory) {
    (void)memory;
    return SUCCESS;
}
#if CUDART_MAJOR == 12
ALSO(cudaMemPrefetchAsync, _v2, const void *);
ALSO(cudaMemAdvise, _v2, const void *);
#endif

typedef struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
#if CUDART_MAJOR == 13
    long reserved[8];
#endif
} pointer_attributes;
API int cudaPointerGetAttributes(pointer_attributes *made, const void *pointer) {
    enum { UNREGISTERED = 0, DEVICE = 2 };
    int type;
    *made = (pointer_attributes){.type = UNREGISTERED, .device = -2};
    if (cuInit(0) != SUCCESS) return keep(NO_DEVICE);
    if (cuPointerGetAttribute(&type, 2, of(pointer)) != SUCCESS) return SUCCESS;
    made->type = DEVICE, made->device = 0;
    made->device_pointer = (void *)(uintptr_t)pointer;
    return SUCCESS;
}

/* ---- copies -------------------------------------------------------------------------------- */

static int copy(address to, address from, size_t bytes, int kind) {
    enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };
    if (bytes == 0) return SUCCESS;
    switch (kind) {
    case HOST_TO_DEVICE: return cuMemcpyHtoD_v2(to, (const void *)(uintptr_t)from, bytes);
    case DEVICE_TO_HOST: return cuMemcpyDtoH_v2((void *)(uintptr_t)to, from, bytes);
    case DEVICE_TO_DEVICE: return cuMemcpyDtoD_v2(to, from, bytes);
    case HOST_TO_HOST:
    case BY_ADDRESS: return cuMemcpy(to, from, bytes);
    default: return 21; /* cudaErrorInvalidMemcpyDirection */
    }
}
API int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    return keep(copy(of(to), of(from), bytes, kind));
}
ALSO(cudaMemcpy, _ptds, void *, const void *, size_t, int);
API int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    (void)stream;
    return cudaMemcpy(to, from, bytes, kind);
}
ALSO(cudaMemcpyAsync, _ptsz, void *, const void *, size_t, int, void *);
API int cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
    (void)to_device, (void)from_device;
    return cudaMemcpy(to, from, bytes, 3);
}
API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                            size_t bytes, void *stream) {
    (void)stream;
    return cudaMemcpyPeer(to, to_device, from, from_device, bytes);
}
API int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                     size_t height, int kind) {
    int result = width > to_pitch || width > from_pitch ? 12 /* cudaErrorInvalidPitchValue */
                                                        : SUCCESS;
    for (size_t row = 0; row < height && result == SUCCESS; row++)
        result = copy(of(to) + row * to_pitch, of(from) + row * from_pitch, width, kind);
    return keep(result);
}
ALSO(cudaMemcpy2D, _ptds, void *, size_t, const void *, size_t, size_t, size_t, int);
API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                          size_t width, size_t height, int kind, void *stream) {
    (void)stream;
    return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}
ALSO(cudaMemcpy2DAsync, _ptsz, void *, size_t, const void *, size_t, size_t, size_t, int, void *);

API int cudaMemset(void *memory, int byte, size_t bytes) {
    return keep(bytes ? cuMemsetD8_v2(of(memory), (unsigned char)byte, bytes) : SUCCESS);
}
ALSO(cudaMemset, _ptds, void *, int, size_t);
API int cudaMemsetAsync(void *memory, int byte, size_t bytes, void *stream) {
    (void)stream;
    return cudaMemset(memory, byte, bytes);
}
ALSO(cudaMemsetAsync, _ptsz, void *, int, size_t, void *);
API int cudaMemset2D(void *memory, size_t pitch, int byte, size_t width, size_t height) {
    int result = SUCCESS;
    for (size_t row = 0; row < height && result == SUCCESS; row++)
        result = cudaMemset((char *)memory + row * pitch, byte, width);
    return result;
}
ALSO(cudaMemset2D, _ptds, void *, size_t, int, size_t, size_t);
API int cudaMemset2DAsync(void *memory, size_t pitch, int byte, size_t width, size_t height,
                          void *stream) {
    (void)stream;
    return cudaMemset2D(memory, pitch, byte, width, height);
}
ALSO(cudaMemset2DAsync, _ptsz, void *, size_t, int, size_t, size_t, void *);

/* ---- symbols ------------------------------------------------------------------------------- */

API int cudaGetSymbolAddress(void **memory, const void *symbol) {
    address at = 0;
    int result = find_symbol(symbol, &at, NULL);
    *memory = (void *)(uintptr_t)at;
    return keep(result);
}
API int cudaGetSymbolSize(size_t *bytes, const void *symbol) {
    address at;
    return keep(find_symbol(symbol, &at, bytes));
}
static int within(const void *symbol, size_t bytes, size_t offset, address *at) {
    size_t size = 0;
    int result = find_symbol(symbol, at, &size);
    if (result == SUCCESS && (offset > size || bytes > size - offset)) result = INVALID_VALUE;
    *at += offset;
    return result;
}
API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                           int kind) {
    address at;
    int result = within(symbol, bytes, offset, &at);
    return keep(result == SUCCESS ? copy(at, of(from), bytes, kind) : result);
}
ALSO(cudaMemcpyToSymbol, _ptds, const void *, const void *, size_t, size_t, int);
API int cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t bytes, size_t offset,
                                int kind, void *stream) {
    (void)stream;
    return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}
ALSO(cudaMemcpyToSymbolAsync, _ptsz, const void *, const void *, size_t, size_t, int, void *);
API int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset, int kind) {
    address at;
    int result = within(symbol, bytes, offset, &at);
    return keep(result == SUCCESS ? copy(of(to), at, bytes, kind) : result);
}
ALSO(cudaMemcpyFromSymbol, _ptds, void *, const void *, size_t, size_t, int);
API int cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t bytes, size_t offset,
                                  int kind, void *stream) {
    (void)stream;
    return cudaMemcpyFromSymbol(to, symbol, bytes, offset, kind);
}
ALSO(cudaMemcpyFromSymbolAsync, _ptsz, void *, const void *, size_t, size_t, int, void *);
