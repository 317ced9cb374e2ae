/* Fat binaries: the container that nvcc puts a program's device code in. Its layout is not documented; it is as
 * nvcc 12 and 13 write it. A header of 16 bytes (mark, version, header's bytes, bytes that follow) stands before
 * entries, each a header of its own and one image: PTX text or machine code for one architecture.
 */
#ifndef DW_EMULATE_FATBIN_H
#define DW_EMULATE_FATBIN_H

#include <stdbool.h>
#include <stddef.h>

typedef enum fatbin_result {
    FATBIN_FOUND,
    FATBIN_NO_PTX,     /* machine code alone */
    FATBIN_COMPRESSED, /* there is PTX, but it is packed */
    FATBIN_OTHER,      /* PTX, but for other architectures */
    FATBIN_BROKEN,
} fatbin_result;

/* Whether it is a fat binary, or what nvcc puts around one (FATBINC_MAGIC). */
bool fatbin_is(const void *image);
/* The PTX that fits a GPU of `capability` (90, 100) best: of that architecture itself ("sm_90a"), of its family
 * ("sm_100f"), then the newest that came before. The text lies in the image and is not terminated. `others` lists
 * what else there is, for messages. */
fatbin_result fatbin_find(const void *image, int capability, const char **text, size_t *bytes,
                          char *others, size_t others_bytes);
/* How well PTX with this .target suits the GPU: 0 not at all. */
int fatbin_rank(const char *target, int capability);

#endif
