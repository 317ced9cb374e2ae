/* Growing text buffer. */
#include "base/base.h"
#include <stdio.h>
#include <string.h>

int dw__utf8_length(const char *characters) {
    const unsigned char *text = (const unsigned char *)characters;
    if (text[0] < 0x80) return text[0] >= 0x20 && text[0] != 0x7f;
    int length = text[0] >= 0xf0 ? 4 : text[0] >= 0xe0 ? 3 : 2;
    if (text[0] < 0xc2 || text[0] > 0xf4) return 0;
    for (int i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    bool overlong = (text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xf0 && text[1] < 0x90);
    bool surrogate = text[0] == 0xed && text[1] >= 0xa0;
    bool beyond = text[0] == 0xf4 && text[1] >= 0x90;
    return overlong || surrogate || beyond ? 0 : length;
}

void dw__make_plain(char *text) {
    for (char *at = text; *at;) {
        int length = dw__utf8_length(at);
        if (length == 0) *at = '?';
        at += length > 0 ? length : 1;
    }
}

static dw_status reserve(dw__text *out, size_t more) {
    if (more > SIZE_MAX - out->length - 1) return dw__fail_memory("a text buffer", SIZE_MAX);
    return dw__grow((void **)&out->text, &out->capacity, out->length + more + 1, 1);
}

dw_status dw__text_append(dw__text *out, const char *bytes, size_t count) {
    DW_RETURN_IF_FAILED(reserve(out, count));
    if (count) memcpy(out->text + out->length, bytes, count);
    out->length += count;
    out->text[out->length] = '\0';
    return DW_OK;
}

dw_status dw__text_printf(dw__text *out, const char *format, ...) {
    dw_status status = DW_OK;
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) {
        status = dw__fail(DW_INTERNAL, "format \"%s\" could not be printed", format);
        goto cleanup;
    }
    DW_TRY(reserve(out, (size_t)length));
    vsnprintf(out->text + out->length, (size_t)length + 1, format, again);
    out->length += (size_t)length;
cleanup:
    va_end(again);
    return status;
}

void dw__text_free(dw__text *out) {
    dw__free(out->text);
    *out = (dw__text){0};
}
