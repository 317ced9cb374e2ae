#include "train/loss_spikes.h"
#include <math.h>
#include <string.h>

dw_status dw__recent_losses_create(dw__arena *memory, double factor, int64_t window,
                                   dw__recent_losses *recent) {
    const size_t room = (size_t)window + 1;
    *recent = (dw__recent_losses){.factor = factor, .window = window};
    if (factor == 0.0) return DW_OK;
    recent->steps = dw__arena_alloc(memory, room * sizeof *recent->steps);
    recent->losses = dw__arena_alloc(memory, room * sizeof *recent->losses);
    if (recent->steps && recent->losses) return DW_OK;
    return dw__fail_memory("the losses of the last steps", room * sizeof *recent->losses);
}

void dw__recent_losses_add(dw__recent_losses *recent, int64_t step, double loss) {
    if (recent->factor == 0.0) return;
    if (recent->count > recent->window) {
        const size_t kept = (size_t)recent->window;
        memmove(recent->steps, recent->steps + 1, kept * sizeof *recent->steps);
        memmove(recent->losses, recent->losses + 1, kept * sizeof *recent->losses);
        recent->count--;
    }
    recent->steps[recent->count] = step;
    recent->losses[recent->count++] = loss;
}

double dw__recent_losses_limit(const dw__recent_losses *recent, int64_t step) {
    const int64_t enough = 8, least = recent->window < enough ? recent->window : enough;
    int64_t end = recent->count, first;
    double sum = 0.0;
    if (recent->factor == 0.0) return INFINITY;
    while (end > 0 && recent->steps[end - 1] >= step - 1) end--;
    first = end > recent->window ? end - recent->window : 0;
    if (end - first < least) return INFINITY;
    for (int64_t i = first; i < end; i++) sum += recent->losses[i];
    const double mean = sum / (double)(end - first);
    return mean > 0.0 ? recent->factor * mean : INFINITY;
}
