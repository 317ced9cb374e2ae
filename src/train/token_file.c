/* Detects the format of a token file. */
#include "train/token_file.h"
#include <string.h>

size_t dw__token_store_bytes(dw__token_store store) {
    switch (store) {
    case DW_TOKEN_STORE_U16: return 2;
    case DW_TOKEN_STORE_U32:
    case DW_TOKEN_STORE_I32: return 4;
    case DW_TOKEN_STORE_I64: return 8;
    }
    return 1;
}

void dw__token_widen(dw__token_store store, const void *stored, int64_t count, int64_t *tokens) {
    /* memcpy, because the address may be unaligned. x86 and ARM are little-endian, like the files. */
    const char *at = stored;
    for (int64_t i = 0; i < count; i++) {
        uint16_t u16 = 0;
        uint32_t u32 = 0;
        int32_t i32 = 0;
        switch (store) {
        case DW_TOKEN_STORE_U16: memcpy(&u16, at + 2 * i, 2), tokens[i] = u16; break;
        case DW_TOKEN_STORE_U32: memcpy(&u32, at + 4 * i, 4), tokens[i] = u32; break;
        case DW_TOKEN_STORE_I32: memcpy(&i32, at + 4 * i, 4), tokens[i] = i32; break;
        case DW_TOKEN_STORE_I64: memcpy(&tokens[i], at + 8 * i, 8); break;
        }
    }
}

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

static uint32_t word_at(const void *bytes, size_t index) {
    uint32_t word;
    memcpy(&word, (const char *)bytes + 4 * index, sizeof word);
    return word;
}

static dw_status whole_file(const char *path, uint64_t file_bytes, dw__token_layout *layout) {
    uint64_t element = dw__token_store_bytes(layout->store);
    uint64_t room = file_bytes - layout->offset;
    if (room % element == 0) {
        layout->count = (int64_t)(room / element);
        return DW_OK;
    }
    return dw__fail(DW_PARSE,
                    "\"%s\" has %llu bytes, which is not a whole number of uint%d tokens; it is "
                    "truncated, or of "
                    "another element type: give the type of .bin files",
                    path, (unsigned long long)file_bytes, 8 * (int)element);
}

/* If identifiers below 65536 are stored in 32 bits, every second 16-bit word is zero. */
static dw_status refuse_wide(const char *path, const void *head, size_t head_bytes) {
    enum { LEAST = 64 };
    size_t words = head_bytes / 4, nonzero = 0;
    for (size_t i = 0; i < words; i++) {
        uint32_t word = word_at(head, i);
        if (word > UINT16_MAX) return DW_OK;
        nonzero += word != 0;
    }
    if (words < LEAST || nonzero < words / 2) return DW_OK;
    return dw__fail(
        DW_PARSE,
        "\"%s\" looks like uint32 tokens (every second uint16 is 0), but is to be read as "
        "uint16; give the type of .bin files: uint32",
        path);
}

/* The header that llm.c's data scripts write: 256 32-bit words: magic, version, number of tokens, zeros
 * (https://github.com/karpathy/llm.c, dev/data/data_common.py). */
static dw_status bin_layout(const char *path, const void *head, size_t head_bytes,
                            uint64_t file_bytes, dw__token_store raw, dw__token_layout *layout) {
    enum { HEADER_WORDS = 256, HEADER_BYTES = 4 * HEADER_WORDS };
    static const struct {
        uint32_t magic, version;
        dw__token_store store;
    } kinds[] = {{20240520, 1, DW_TOKEN_STORE_U16}, {20240801, 7, DW_TOKEN_STORE_U32}};
    *layout = (dw__token_layout){.store = raw};
    for (size_t i = 0; head_bytes >= HEADER_BYTES && i < DW_COUNT(kinds); i++) {
        if (word_at(head, 0) != kinds[i].magic || word_at(head, 1) != kinds[i].version) continue;
        *layout = (dw__token_layout){.store = kinds[i].store, .offset = HEADER_BYTES};
        DW_RETURN_IF_FAILED(whole_file(path, file_bytes, layout));
        uint32_t said = word_at(head, 2);
        if ((uint64_t)layout->count == said) return DW_OK;
        return dw__fail(
            DW_PARSE,
            "\"%s\": its header (of llm.c) says %u tokens, but %lld follow it; the file is "
            "truncated or was written over",
            path, said, (long long)layout->count);
    }
    DW_RETURN_IF_FAILED(whole_file(path, file_bytes, layout));
    return raw == DW_TOKEN_STORE_U16 ? refuse_wide(path, head, head_bytes) : DW_OK;
}

dw_status dw__token_check_name(const char *path) {
    if (ends_with(path, ".npy") || ends_with(path, ".bin")) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "\"%s\" is not a token file (.bin or .npy); make one of text with: python -m "
                    "deepwell.tokenize --model FOLDER \"%s\" -o tokens.bin",
                    path, path);
}

dw_status dw__token_layout_of(const char *path, const void *head, size_t head_bytes,
                              uint64_t file_bytes, dw__token_store raw, dw__token_layout *layout) {
    DW_RETURN_IF_FAILED(dw__token_check_name(path));
    if (ends_with(path, ".npy")) return dw__npy_layout(path, head, head_bytes, file_bytes, layout);
    return bin_layout(path, head, head_bytes, file_bytes, raw, layout);
}
