/* The first check of every structure that a caller fills: which version of it this is. */
#include "base/base.h"
#include <string.h>

dw_status dw__struct_read(const dw__struct *known, const void *given, void *copy) {
    size_t size;
    if (!given)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s is NULL; expected a structure with struct_size = sizeof(%s)",
                        known->name, known->name);
    memcpy(&size, given, sizeof size);
    bool accepted = size == known->bytes;
    for (size_t i = 0; i < DW_COUNT(known->older); i++)
        accepted |= size != 0 && size == known->older[i];
    if (!accepted)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s.struct_size is %zu; expected %zu: set it to sizeof(%s), and build "
                        "against the headers of this version",
                        known->name, size, known->bytes, known->name);
    if (!copy) return DW_OK;
    memcpy(copy, given, size);
    memset((char *)copy + size, 0, known->bytes - size);
    return DW_OK;
}
