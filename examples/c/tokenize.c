/* Shows the tokens of a text, as the tokenizer of a Hugging Face folder makes them.
 *
 *     cc tokenize.c $(pkg-config --cflags --libs deepwell) -o tokenize
 *     ./tokenize gpt2 "Hello, world"
 */
#include <deepwell/deepwell.h>
#include <stdio.h>
#include <string.h>

static int fail(void) {
    fprintf(stderr, "tokenize: %s\n", dw_last_error());
    return 1;
}

/* Prints one line for each token: its id and its bytes, of which a character may need several. */
static int print_tokens(const dw_tokenizer *tokenizer, const int64_t *ids, size_t count) {
    for (size_t i = 0; i < count; i++) {
        char *text;
        size_t bytes;
        if (dw_tokenizer_decode(tokenizer, &ids[i], 1, 0, &text, &bytes) != DW_OK) return fail();
        printf("%lld\t", (long long)ids[i]);
        for (size_t at = 0; at < bytes; at++) {
            unsigned char byte = (unsigned char)text[at];
            printf(byte > ' ' && byte < 0x7F ? "%c" : "\\x%02X", byte);
        }
        printf("\n");
        dw_text_free(text);
    }
    printf("%zu tokens; the tokenizer has %u\n", count, (unsigned)dw_tokenizer_size(tokenizer));
    return 0;
}

int main(int argc, char **argv) {
    dw_tokenizer *tokenizer;
    int64_t *ids;
    size_t count;
    if (argc != 3) {
        fprintf(stderr, "usage: tokenize FOLDER TEXT\n");
        return 2;
    }
    if (dw_tokenizer_load(argv[1], &tokenizer) != DW_OK) return fail();
    int result = 1;
    if (dw_tokenizer_encode(tokenizer, argv[2], strlen(argv[2]), 1, &ids, &count) == DW_OK) {
        result = print_tokens(tokenizer, ids, count);
        dw_tokens_free(ids);
    } else {
        fail();
    }
    dw_tokenizer_destroy(tokenizer);
    return result;
}
