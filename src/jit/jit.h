/* Device code: from the sources inside the library to a function that can be launched.
 *
 * A variant is a source (a file inside the library, or a text made at run time), an entry point and the defines that
 * make its shapes compile-time constants. It comes,
 * in this order, from the modules built into the library, from PTX built into it, which the driver compiles,
 * from the disk cache, from NVRTC. What is loaded stays loaded.
 */
#ifndef DW_JIT_H
#define DW_JIT_H

#include "base/base.h"
#include "deepwell/jit.h"
#include "device/device.h"
#include <stdatomic.h>

#define DW__JIT_DEFINES 16

typedef struct dw__jit_define {
    const char *name;
    int value;
} dw__jit_define;

typedef struct dw__jit_variant {
    const char
        *source; /* path below cuda/: "sm90/attention_forward.cu"; of a text a name of its own */
    const char *
        text; /* a program made at run time, which may include files of cuda/; NULL: the file `source`. It
                           must live as long as the calls that get it. */
    const char *entry; /* "sm90_attention_forward" */
    const char *arch;  /* "sm_90a" */
    uint32_t define_count;
    dw__jit_define defines[DW__JIT_DEFINES]; /* any order: sorted by name where it matters */
} dw__jit_variant;

void dw__jit_add_define(dw__jit_variant *variant, const char *name, int value);
/* "attention_forward.sm_90a.DROPOUT=0.ELEMENT=0....": the same for equal variants of a source, whatever their
 * entry. A text's content is part of its name: "fused.0123456789abcdef0123456789abcdef.sm_90a". */
dw_status dw__jit_variant_name(const dw__jit_variant *variant, dw__text *name);

/* ---- steps, for the loader below and for tools ---------------------------------------------------- */

/* The source with its includes in place of the lines that name them, each file once, with #line for the compiler's
 * messages. An include is looked for beside the file that has it, in cuda/ and in cuda/common/. */
dw_status dw__jit_expand(const char *source, dw__text *expanded);
/* The same for a variant's file or text. */
dw_status dw__jit_expand_variant(const dw__jit_variant *variant, dw__text *expanded);

typedef enum dw__jit_form { DW__JIT_CUBIN, DW__JIT_PTX } dw__jit_form;

/* The variant, by NVRTC. `log` (may be NULL) receives the compiler's output, with `options`, NULL-terminated,
 * behind our own (may be NULL). PTX is text, without lines of the source. The message of a failure carries the
 * first error. */
dw_status dw__jit_compile(const dw__jit_variant *variant, const dw__text *expanded,
                          dw__jit_form form, const char *const *options, void **image,
                          size_t *bytes, dw__text *log);

/* 128 bits over source, flags, defines and compiler version. */
typedef struct dw__jit_key {
    unsigned char bytes[16];
} dw__jit_key;
/* 32 hexadecimal digits and a NUL: 128 bits over a text. */
typedef struct dw__jit_digest {
    char text[33];
} dw__jit_digest;
dw__jit_digest dw__jit_digest_of(const char *text);
dw_status dw__jit_key_of(const dw__jit_variant *variant, const dw__text *expanded,
                         const char *compiler, dw__jit_key *key);

/* The disk cache. Reading: DW_NOT_FOUND where there is no sound entry; a broken one is removed and counted. */
dw_status dw__jit_cache_read(const dw__jit_key *key, void **image, size_t *bytes);
dw_status dw__jit_cache_write(const dw__jit_key *key, const void *image, size_t bytes);
/* The cache's folder `part`. DW_NOT_FOUND: there is none (and no HOME either). DW_IO: others can write there. */
dw_status dw__cache_open(const char *part, bool create, dw__private *folder);
/* DW_NOT_FOUND: there is no folder for it (no HOME either). */
dw_status dw__jit_cache_folder(dw__text *folder);

/* From the disk cache or else from the compiler; release it with dw__free. */
dw_status dw__jit_image(const dw__jit_variant *variant, dw__jit_form form, void **image,
                        size_t *bytes);

/* ---- loading --------------------------------------------------------------------------------------- */

/* The variant's entry point, compiled and loaded if need be, in the current context, which is `context`; it may
 * ask for `shared_bytes` of dynamic shared memory. Takes a lock: callers keep what they get. Valid while the
 * context lives. */
dw_status dw__jit_load(const dw__context *context, const dw__jit_variant *variant,
                       unsigned shared_bytes, void **function);

/* ---- counters -------------------------------------------------------------------------------------- */

typedef struct dw__jit_statistics {
    _Atomic uint32_t embedded, translated, cached, compiled, corrupt, unwritten;
    _Atomic uint64_t compile_nanoseconds;
} dw__jit_statistics;
extern dw__jit_statistics dw__jit_statistics_now;

/* ---- what the library carries ----------------------------------------------------------------------- */

typedef struct dw__jit_file {
    const char *name; /* sources: path below cuda/; modules and PTX: name of the variant */
    const unsigned char *begin, *end; /* *end is 0 */
} dw__jit_file;
/* Each ends with a NULL name. */
extern const dw__jit_file dw__jit_sources[], dw__jit_modules[], dw__jit_ptx[];

/* Where variants are looked for: the last two. Tests put others in their place. */
typedef struct dw__jit_carried {
    const dw__jit_file *modules, *ptx;
} dw__jit_carried;
extern dw__jit_carried dw__jit_carried_now;

#endif
