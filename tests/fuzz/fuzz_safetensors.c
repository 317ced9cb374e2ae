/* Any bytes are rejected with a message, or are a tensor file. Every tensor lies within the file, and writing and
 * reading the file gives the same tensors. */
#include "base/base.h"
#include "deepwell/safetensors.h"
#include "fuzz.h"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_READ = 1 << 16 };

/* Reads a whole tensor, unless it is too large, as bytes and as numbers. */
static void read_tensor(const dw_safetensors *file, uint32_t index) {
    static uint64_t bytes[MOST_READ / sizeof(uint64_t)];
    static float numbers[MOST_READ];
    const dw_stored_tensor *tensor = dw_safetensors_at(file, index);
    size_t size = (size_t)tensor->count * dw_stored_dtype_bytes(tensor->dtype);
    uint32_t found = UINT32_MAX;
    fuzz_require(dw_safetensors_find(file, tensor->name, &found) == DW_OK && found == index,
                 "found by its name");
    fuzz_require(size <= MOST_READ, "no larger than the file");
    fuzz_require(dw_safetensors_read_bytes(file, index, 0, bytes, size) == DW_OK, "read");
    fuzz_require(dw_safetensors_read_bytes(file, index, 1, bytes, size) != DW_OK,
                 "nothing behind its end");
    dw_status status = dw_safetensors_read_f32(file, index, numbers);
    fuzz_require(status == DW_OK || status == DW_TYPE, "numbers, or a type that has none");
}

static void write_again(const dw_safetensors *file) {
    enum { MOST_TENSORS = 64 };
    static uint8_t bytes[MOST_READ];
    char path[64];
    dw_stored_tensor tensors[MOST_TENSORS];
    dw_safetensors_writer *writer = NULL;
    dw_safetensors *again = NULL;
    uint32_t count = dw_safetensors_count(file);
    if (count > MOST_TENSORS || access("/dev/shm", W_OK) != 0) return;
    snprintf(path, sizeof path, "/dev/shm/deepwell-fuzz-%ld", (long)getpid());
    for (uint32_t i = 0; i < count; i++) tensors[i] = *dw_safetensors_at(file, i);
    fuzz_require(dw_safetensors_writer_create(path, count, tensors, 0, NULL, &writer) == DW_OK,
                 "write");
    for (uint32_t i = 0; i < count; i++) {
        size_t size = (size_t)tensors[i].count * dw_stored_dtype_bytes(tensors[i].dtype);
        fuzz_require(dw_safetensors_read_bytes(file, i, 0, bytes, size) == DW_OK, "read");
        fuzz_require(dw_safetensors_writer_put(writer, bytes, size) == DW_OK, "put");
    }
    fuzz_require(dw_safetensors_writer_commit(writer) == DW_OK, "commit");
    dw_safetensors_writer_destroy(writer);
    fuzz_require(dw_safetensors_open(path, &again) == DW_OK, "read what was written");
    fuzz_require(dw_safetensors_count(again) == count, "as many tensors");
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = UINT32_MAX;
        fuzz_require(dw_safetensors_find(again, tensors[i].name, &at) == DW_OK, "same names");
        fuzz_require(dw_safetensors_at(again, at)->count == tensors[i].count, "same sizes");
    }
    dw_safetensors_close(again);
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char path[64];
    dw_safetensors *file = NULL;
    int64_t live = dw__memory_live();
    if (bytes > MOST_READ) return 0;
    int memory = memfd_create("tensors", MFD_CLOEXEC);
    if (memory < 0) return 0;
    for (size_t at = 0; at < bytes;) {
        ssize_t put = write(memory, data + at, bytes - at);
        fuzz_require(put > 0, "a file in memory");
        at += (size_t)put;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
    if (dw_safetensors_open(path, &file) == DW_OK) {
        for (uint32_t i = 0; i < dw_safetensors_count(file); i++) read_tensor(file, i);
        write_again(file);
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    dw_safetensors_close(file);
    close(memory);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
