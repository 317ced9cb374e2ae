/* Any token file is rejected with a message, or its layout lies within the file.
 *
 * The input is one byte that selects the name, the element type and the number of bytes that follow the given ones, and
 * then the file's first bytes. */
#include "fuzz.h"
#include "train/token_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static const char *const names[] = {"tokens.npy", "tokens.bin", "tokens.npy", "tokens.txt"};
    if (bytes == 0) return 0;
    uint8_t choice = data[0];
    const uint8_t *head = data + 1;
    size_t head_bytes = bytes - 1;
    uint64_t file_bytes = head_bytes + (choice & 8 ? (uint64_t)1 << (choice >> 4) * 4 : 0);
    dw__token_store raw = choice & 4 ? DW_TOKEN_STORE_U32 : DW_TOKEN_STORE_U16;
    dw__token_layout layout;
    dw_status status =
        dw__token_layout_of(names[choice & 3], head, head_bytes, file_bytes, raw, &layout);
    if (status != DW_OK) {
        fuzz_require(dw_last_error()[0] != '\0', "message");
        return 0;
    }
    uint64_t element = dw__token_store_bytes(layout.store);
    fuzz_require(layout.count >= 0 && layout.offset <= file_bytes, "begin within the file");
    fuzz_require((uint64_t)layout.count == (file_bytes - layout.offset) / element,
                 "end at the file's");
    fuzz_require((file_bytes - layout.offset) % element == 0, "a whole number of tokens");
    if (layout.offset + element <= head_bytes && layout.count > 0) {
        int64_t token = 0;
        dw__token_widen(layout.store, head + layout.offset, 1, &token);
    }
    return 0;
}
