/* Device code: turns the sources inside the library into functions that can be launched.
 *
 * A variant is a source (a file inside the library, or a text made at run time), an entry point and the defines that
 * make its shapes compile-time constants. Its image comes from the first of these that has it: the modules built into
 * the library, the PTX built into the library (which the driver compiles), the disk cache, NVRTC. Loaded modules are
 * never unloaded.
 */
#ifndef DW_JIT_INTERNAL_H
#define DW_JIT_INTERNAL_H

#include "base/base.h"
#include "deepwell/jit.h"
#include "device/device_table.h"
#include <stdatomic.h>

#define DW__JIT_DEFINES 24

typedef struct dw__jit_define {
    const char *name;
    int value;
} dw__jit_define;

typedef struct dw__jit_variant {
    const char
        /* Path below cuda/, such as "sm90/attention_forward.cu"; for a text, its own name. */
        *source;
    const char *
        /* A program made at run time, which may include files of cuda/. It must live as long as the calls that receive
         * it. NULL: the file `source`. */
        text;
    const char *entry; /* "sm90_attention_forward" */
    const char *arch;  /* "sm_90a" */
    uint32_t define_count;
    /* In any order; they are sorted by name where the order matters. */
    dw__jit_define defines[DW__JIT_DEFINES];
} dw__jit_variant;

void dw__jit_add_define(dw__jit_variant *variant, const char *name, int value);
/* "attention_forward.sm_90a.DROPOUT=0.ELEMENT=0....": equal for equal variants of a source, whatever their entry point.
 * A text's content is part of its name: "fused.0123456789abcdef0123456789abcdef.sm_90a". */
dw_status dw__jit_variant_name(const dw__jit_variant *variant, dw__text *name);

/* ---- steps, for the loader below and for tools ---------------------------------------------------- */

/* Expands a source: replaces each include by the file, once per file, with #line directives for the compiler's
 * messages. An include is looked for in the including file's folder, in cuda/ and in cuda/common/. */
dw_status dw__jit_expand(const char *source, dw__text *expanded);
/* Expands a variant's file or text. */
dw_status dw__jit_expand_variant(const dw__jit_variant *variant, dw__text *expanded);

typedef enum dw__jit_form { DW__JIT_CUBIN, DW__JIT_PTX } dw__jit_form;

/* Compiles the variant with NVRTC. `log` receives the compiler's output; may be NULL. `options`, NULL-terminated, are
 * appended to our own; may be NULL. PTX is text, without source lines. The message of a failure contains the first
 * error. */
dw_status dw__jit_compile(const dw__jit_variant *variant, const dw__text *expanded,
                          dw__jit_form form, const char *const *options, void **image,
                          size_t *bytes, dw__text *log);

/* A hash of 128 bits over source, flags, defines and compiler version. */
typedef struct dw__jit_key {
    unsigned char bytes[16];
} dw__jit_key;
/* A hash of 128 bits over a text: 32 hexadecimal digits and a NUL. */
typedef struct dw__jit_digest {
    char text[33];
} dw__jit_digest;
dw__jit_digest dw__jit_digest_of(const char *text);
dw_status dw__jit_key_of(const dw__jit_variant *variant, const dw__text *expanded,
                         const char *compiler, dw__jit_key *key);

/* The disk cache. Reading returns DW_NOT_FOUND if there is no valid entry; an invalid entry is removed and counted. */
dw_status dw__jit_cache_read(const dw__jit_key *key, void **image, size_t *bytes);
dw_status dw__jit_cache_write(const dw__jit_key *key, const void *image, size_t bytes);
/* Opens the folder `part` of the cache. DW_NOT_FOUND: it does not exist, or there is no HOME. DW_IO: others can write
 * to it. */
dw_status dw__cache_open(const char *part, bool create, dw__private *folder);
/* Returns the cache's path. DW_NOT_FOUND: there is no folder for it, because there is no HOME. */
dw_status dw__jit_cache_folder(dw__text *folder);

/* Reads the image from the disk cache, or else compiles it. Release it with dw__free. */
dw_status dw__jit_image(const dw__jit_variant *variant, dw__jit_form form, void **image,
                        size_t *bytes);

/* ---- loading --------------------------------------------------------------------------------------- */

/* Returns the variant's entry point in the current context, which must be `context`; compiles and loads it if
 * necessary. It may ask for `shared_bytes` of dynamic shared memory. Takes a lock, so callers keep the result, which is
 * valid while the context lives. */
dw_status dw__jit_load(const dw__context *context, const dw__jit_variant *variant,
                       unsigned shared_bytes, void **function);

/* ---- counters -------------------------------------------------------------------------------------- */

typedef struct dw__jit_statistics {
    _Atomic uint32_t embedded, translated, cached, compiled, corrupt, unwritten;
    _Atomic uint64_t compile_nanoseconds;
} dw__jit_statistics;
extern dw__jit_statistics dw__jit_statistics_now;

/* ---- files inside the library ----------------------------------------------------------------------- */

typedef struct dw__jit_file {
    const char *name; /* sources: path below cuda/; modules and PTX: name of the variant */
    const unsigned char *begin, *end; /* *end is 0 */
} dw__jit_file;
/* Each ends with a NULL name. */
extern const dw__jit_file dw__jit_sources[], dw__jit_modules[], dw__jit_ptx[];

/* The modules and PTX among which variants are looked for. Tests replace them. */
typedef struct dw__jit_carried {
    const dw__jit_file *modules, *ptx;
} dw__jit_carried;
extern dw__jit_carried dw__jit_carried_now;

#endif
