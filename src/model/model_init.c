/* Random weights, as transformers initialises them. */
#include "base/pool.h"
#include "model/model_internal.h"
#include "number/philox.h"
#include <math.h>
#include <string.h>

enum { PIECE = 1 << 16 }; /* elements of one task; a multiple of 4 */

typedef struct filling {
    float *elements;
    int64_t count;
    uint64_t seed;
    uint32_t parameter; /* the parameter's number is the stream */
    double deviation;
} filling;

/* Converts four uniforms in [0,1) to four normals (Box and Muller 1958). 1 - u keeps the logarithm finite. */
static void normal4(const filling *f, uint64_t block, float normal[4]) {
    float uniform[4];
    dw__philox_uniform4((int64_t)f->seed, 0, f->parameter, block, uniform);
    for (int i = 0; i < 4; i += 2) {
        double radius = f->deviation * sqrt(-2.0 * log(1.0 - (double)uniform[i]));
        double angle = 2.0 * M_PI * (double)uniform[i + 1];
        normal[i] = (float)(radius * cos(angle));
        normal[i + 1] = (float)(radius * sin(angle));
    }
}

static void fill_piece(void *context, int64_t index, int worker) {
    const filling *f = context;
    int64_t first = index * PIECE, last = first + PIECE < f->count ? first + PIECE : f->count;
    (void)worker;
    for (int64_t at = first; at < last; at += 4) {
        float normal[4];
        normal4(f, (uint64_t)at / 4, normal);
        size_t here = last - at < 4 ? (size_t)(last - at) : 4;
        memcpy(f->elements + at, normal, here * sizeof *normal);
    }
}

dw_status dw_model_init(const dw_model_config *config, uint64_t seed, float *const *weights) {
    double deviation = config->initializer_range;
    if (!weights) return dw__fail(DW_INVALID_ARGUMENT, "the weights of a model are NULL");
    for (uint32_t i = 0; i < dw_model_parameter_count(config); i++) {
        dw_model_parameter parameter;
        dw__initial initial = config->parameters.items[i].initial;
        dw_model_parameter_at(config, i, &parameter);
        filling f = {weights[i], parameter.count, seed, i, deviation};
        if (initial == DW__INITIAL_RESIDUAL)
            f.deviation /= sqrt(2.0 * (double)config->sizes.layers);
        if (initial == DW__INITIAL_ONES || initial == DW__INITIAL_ZEROS)
            for (int64_t at = 0; at < f.count; at++)
                f.elements[at] = initial == DW__INITIAL_ONES ? 1.0f : 0.0f;
        else
            dw__pool_run((f.count + PIECE - 1) / PIECE, fill_piece, &f);
    }
    /* The embedding is the first parameter. Its row without gradient starts as zeros. */
    if (config->padding_index >= 0)
        memset(weights[0] + config->padding_index * config->sizes.hidden, 0,
               (size_t)config->sizes.hidden * sizeof(float));
    return DW_OK;
}
