/* Any index beside two shards is refused with a message, or names exactly what they hold. */
#include "base/base.h"
#include "deepwell/safetensors.h"
#include "fuzz.h"
#include <string.h>
#include <unistd.h>

static char folder[64];

static void write_in_folder(const char *name, const void *bytes, size_t count) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    fuzz_require(file && fwrite(bytes, 1, count, file) == count && fclose(file) == 0, "a file");
}

static void write_shard(const char *name, const char *header) {
    char bytes[256];
    uint64_t length = strlen(header);
    memcpy(bytes, &length, sizeof length);
    memcpy(bytes + 8, header, length);
    memcpy(bytes + 8 + length, "\1\2", 2);
    write_in_folder(name, bytes, 8 + length + 2);
}

static void remove_folder(void) { dw__folder_remove(folder); }

static void make_folder(void) {
    snprintf(folder, sizeof folder, "%s/deepwell-fuzz-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    fuzz_require(mkdtemp(folder) != NULL, "a folder");
    atexit(remove_folder);
    write_shard("one.safetensors",
                "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}");
    write_shard("two.safetensors",
                "{\"b\":{\"dtype\":\"I8\",\"shape\":[2],\"data_offsets\":[0,2]}}");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static int made;
    char path[256];
    dw_safetensors *file = NULL;
    if (!made++) make_folder();
    int64_t live = dw__memory_live();
    write_in_folder("index.json", data, bytes);
    snprintf(path, sizeof path, "%s/index.json", folder);
    if (dw_safetensors_open(path, &file) == DW_OK) {
        uint32_t count = dw_safetensors_count(file), index;
        uint8_t byte = 0;
        fuzz_require(count == 1 || count == 2, "the shards' tensors and no others");
        fuzz_require(dw_safetensors_find(file, "a", &index) == DW_OK ||
                         dw_safetensors_find(file, "b", &index) == DW_OK,
                     "by their names");
        fuzz_require(dw_safetensors_read_bytes(file, index, 1, &byte, 1) == DW_OK && byte == 2,
                     "and their data");
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    dw_safetensors_close(file);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
