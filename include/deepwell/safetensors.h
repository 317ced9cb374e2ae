/* Reads and writes files of tensors in the safetensors format.
 *
 *     dw_safetensors *file;
 *     uint32_t index;
 *     dw_safetensors_open("model.safetensors", &file);
 *     dw_safetensors_find(file, "wte.weight", &index);
 *     dw_safetensors_read_f32(file, index, elements);
 *     dw_safetensors_close(file);
 *
 * The format (https://github.com/huggingface/safetensors, "Format"):
 *
 *     8 bytes: n, little-endian | n bytes of JSON | data
 *     {"__metadata__": {"format": "pt"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
 *
 * Files are not trusted: the whole header is checked before any of it is returned. The error message names the file,
 * the tensor, the value and what was expected. Data are read, not mapped, so a file that shrinks while it is open
 * causes an error and not a signal.
 */
#ifndef DEEPWELL_SAFETENSORS_H
#define DEEPWELL_SAFETENSORS_H

#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* enumerator, name in files, bytes of one element */
#define DW_STORED_DTYPE_MAP(X)                                                                     \
    X(BOOL, "BOOL", 1)                                                                             \
    X(U8, "U8", 1)                                                                                 \
    X(I8, "I8", 1)                                                                                 \
    X(I16, "I16", 2)                                                                               \
    X(I32, "I32", 4)                                                                               \
    X(I64, "I64", 8)                                                                               \
    X(F8_E4M3, "F8_E4M3", 1)                                                                       \
    X(F8_E5M2, "F8_E5M2", 1)                                                                       \
    X(BF16, "BF16", 2)                                                                             \
    X(F16, "F16", 2)                                                                               \
    X(F32, "F32", 4)                                                                               \
    X(F64, "F64", 8)

/* Element types in files. Not all of them are types of a graph (deepwell/dtype.h). */
typedef enum dw_stored_dtype {
#define DW_STORED_DTYPE_ENUM(key, name, bytes) DW_STORED_##key,
    DW_STORED_DTYPE_MAP(DW_STORED_DTYPE_ENUM)
#undef DW_STORED_DTYPE_ENUM
        DW_STORED_DTYPE_COUNT
} dw_stored_dtype;
DW_API const char *dw_stored_dtype_name(dw_stored_dtype dtype);
DW_API size_t dw_stored_dtype_bytes(dw_stored_dtype dtype);

#define DW_STORED_MAX_RANK 8

/* One tensor of a file. The strings and the shape belong to the file that returned them, or to the caller. */
typedef struct dw_stored_tensor {
    const char *name;
    dw_stored_dtype dtype;
    int rank;             /* 0 to DW_STORED_MAX_RANK */
    const int64_t *shape; /* `rank` dims, each 0 or more */
    int64_t count;        /* elements: the product of the dims */
} dw_stored_tensor;

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct dw_safetensors dw_safetensors;

/* `path`: a .safetensors file; an index of shards (.json: {"weight_map": {tensor: file}}); or a folder with
 * model.safetensors or model.safetensors.index.json. Shards are plain file names in the index's folder. Only headers
 * are read. DW_IO, DW_PARSE, DW_NOT_FOUND, DW_UNSUPPORTED (an element type). */
DW_API dw_status dw_safetensors_open(const char *path, dw_safetensors **file);
DW_API void dw_safetensors_close(dw_safetensors *file); /* may be NULL */

/* Tensors are in the order of their data, shard by shard. */
DW_API uint32_t dw_safetensors_count(const dw_safetensors *file);
DW_API const dw_stored_tensor *dw_safetensors_at(const dw_safetensors *file, uint32_t index);
/* Finds a tensor by name. DW_NOT_FOUND. */
DW_API dw_status dw_safetensors_find(const dw_safetensors *file, const char *name, uint32_t *index);

/* Reads `bytes` of the tensor's data as stored (little-endian, row-major), starting at byte `from` of the tensor. Any
 * number of threads may read one file. DW_INVALID_ARGUMENT: the range is not within the tensor. DW_IO. */
DW_API dw_status dw_safetensors_read_bytes(const dw_safetensors *file, uint32_t index,
                                           uint64_t from, void *to, size_t bytes);
/* Reads the whole tensor as F32. F32, BF16, F16, F8_E4M3 and F8_E5M2 are exact, F64 is rounded to nearest. DW_TYPE: any
 * other type. */
DW_API dw_status dw_safetensors_read_f32(const dw_safetensors *file, uint32_t index, float *to);

/* ---- writing ------------------------------------------------------------------------------- */

typedef struct dw_safetensors_writer dw_safetensors_writer;

/* Starts a temporary file beside `path` and writes the header: `count` tensors with different names, in the order in
 * which their data will follow (name, dtype, rank and shape are read). `metadata`: 2 * metadata_count strings, keys and
 * values in turn; {"format": "pt"} is always added. DW_INVALID_ARGUMENT: a name, an element type or metadata are not
 * valid, or a name occurs twice. DW_SHAPE. DW_UNSUPPORTED: the header would be too large. DW_IO. */
DW_API dw_status dw_safetensors_writer_create(const char *path, uint32_t count,
                                              const dw_stored_tensor *tensors,
                                              uint32_t metadata_count, const char *const *metadata,
                                              dw_safetensors_writer **writer);
/* Appends data, in pieces of any size, tensor after tensor. DW_STATE: the declared tensors are full. DW_IO. */
DW_API dw_status dw_safetensors_writer_put(dw_safetensors_writer *writer, const void *bytes,
                                           size_t count);
/* Appends `count` elements of a tensor declared as F32, BF16 or F16, rounded from F32 to nearest even. Fails as
 * dw_safetensors_writer_put does, and with DW_TYPE for another element type. */
DW_API dw_status dw_safetensors_writer_put_f32(dw_safetensors_writer *writer, const float *elements,
                                               int64_t count);
/* Syncs the file and renames it to `path`, so that readers see the old file or the new one. DW_STATE: data are missing.
 * After a failure `path` is unchanged. */
DW_API dw_status dw_safetensors_writer_commit(dw_safetensors_writer *writer);
/* Removes the temporary file if it was not committed. `writer` may be NULL. */
DW_API void dw_safetensors_writer_destroy(dw_safetensors_writer *writer);

#ifdef __cplusplus
}
#endif
#endif
