/* Any index beside two shards is rejected with a message, or names exactly the tensors of the shards. */
#include "deepwell/safetensors.h"
#include "scratch_folder.h"

static void write_shard(const char *name, const char *header) {
    char bytes[256], path[256];
    uint64_t length = strlen(header);
    memcpy(bytes, &length, sizeof length);
    memcpy(bytes + 8, header, length);
    memcpy(bytes + 8 + length, "\1\2", 2);
    scratch_write(name, bytes, 8 + length + 2, path);
}

static void make_folder(void) {
    scratch_make();
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
    scratch_write("index.json", data, bytes, path);
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
