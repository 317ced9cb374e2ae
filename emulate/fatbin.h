/* Fat binaries, the container of a program's device code that nvcc writes. The layout is not documented; this is the
 * one of nvcc 12 and 13. A header of 16 bytes (mark, version, size of the header, size of the rest) precedes entries,
 * each of which has a header and one image: PTX text or machine code for one architecture.
 */
#ifndef DW_EMULATE_FATBIN_H
#define DW_EMULATE_FATBIN_H

#include <stdbool.h>
#include <stddef.h>

typedef enum fatbin_result {
    FATBIN_FOUND,
    FATBIN_NO_PTX,     /* only machine code */
    FATBIN_COMPRESSED, /* there is PTX, but it is compressed */
    FATBIN_OTHER,      /* there is PTX, but only for other architectures */
    FATBIN_BROKEN,
} fatbin_result;

/* Returns whether the image is a fat binary, or nvcc's wrapper of one (FATBINC_MAGIC). */
bool fatbin_is(const void *image);
/* Finds the PTX that fits a GPU of `capability` (90, 100) best: that of the architecture itself ("sm_90a"), then of
 * its family ("sm_100f"), then of the newest earlier one. The text lies in the image and is not terminated. `others`
 * lists the images that do not fit, for messages. */
fatbin_result fatbin_find(const void *image, int capability, const char **text, size_t *bytes,
                          char *others, size_t others_bytes);
/* Returns how well PTX with this .target fits the GPU; 0 if it does not. */
int fatbin_rank(const char *target, int capability);

#endif
