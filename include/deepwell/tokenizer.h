/* Tokenizers: text to token ids and back, from the tokenizer.json of a Hugging Face folder.
 *
 *     dw_tokenizer *tokenizer;
 *     int64_t *ids;
 *     size_t count;
 *     dw_tokenizer_load("gpt2", &tokenizer);                  // a folder with tokenizer.json, or the file
 *     dw_tokenizer_encode(tokenizer, text, strlen(text), 1, &ids, &count);
 *     dw_tokenizer_decode(tokenizer, ids, count, 1, &again, &bytes);
 *     dw_tokens_free(ids);
 *     dw_tokenizer_destroy(tokenizer);
 *
 * Supported are tokenizers of byte-level BPE with the split patterns of GPT-2, Llama 3 and Qwen, and NFC as their
 * normalizer or none. The ids are those of Hugging Face's `tokenizers`. Every other kind of tokenizer is refused by
 * name when it is read. docs/export.md lists the fields. A tokenizer does not change, so several threads may use it.
 */
#ifndef DEEPWELL_TOKENIZER_H
#define DEEPWELL_TOKENIZER_H

#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_tokenizer dw_tokenizer;

/* `path`: a tokenizer.json, or a folder that holds one. DW_IO. DW_PARSE: not JSON, or a field is wrong. DW_UNSUPPORTED:
 * the tokenizer is of another kind. */
DW_API dw_status dw_tokenizer_load(const char *path, dw_tokenizer **tokenizer);
/* Reads the text of a tokenizer.json. */
DW_API dw_status dw_tokenizer_parse(const char *json, size_t bytes, dw_tokenizer **tokenizer);
DW_API void dw_tokenizer_destroy(dw_tokenizer *tokenizer); /* may be NULL */

/* Number of ids: the largest id plus one. */
DW_API uint32_t dw_tokenizer_size(const dw_tokenizer *tokenizer);

/* Encodes `bytes` bytes of UTF-8. `special` 1: also adds the tokens that the tokenizer puts around every text, such as
 * Llama 3's <|begin_of_text|>. A byte that is not part of valid UTF-8 is encoded as that byte, so that it decodes to
 * itself. Free *ids with dw_tokens_free; it is never NULL. */
DW_API dw_status dw_tokenizer_encode(const dw_tokenizer *tokenizer, const char *text, size_t bytes,
                                     int special, int64_t **ids, size_t *count);
DW_API void dw_tokens_free(int64_t *ids);
/* Decodes ids to *bytes bytes, with a NUL after them. `skip_special` 1: leaves out special tokens. Ids without a token
 * decode to nothing. The bytes of some ids may end within a UTF-8 character. Free *text with dw_text_free. */
DW_API dw_status dw_tokenizer_decode(const dw_tokenizer *tokenizer, const int64_t *ids,
                                     size_t count, int skip_special, char **text, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
