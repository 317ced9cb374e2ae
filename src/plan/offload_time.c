/* Seconds of work in the host's memory: activations that leave and return, and the optimizer's step. */
#include "plan/planner_internal.h"
#include <math.h>

/* Each GPU's share of the host memory's bandwidth. If it is unknown, the link's bandwidth stands in for it. */
static double host_memory_rate(const dw_hardware *hardware) {
    return hardware->host_memory_bandwidth.value > 0 ? hardware->host_memory_bandwidth.value
                                                     : hardware->host_bandwidth.value;
}

/* Bytes per second in one direction. All GPUs of a node copy at once, so either the link or the memory limits them. */
static double copy_rate(const dw__planned *planned) {
    double part = planned->constants->host_link;
    return fmin(dw__reached(&planned->hardware->host_bandwidth, part),
                part * host_memory_rate(planned->hardware));
}

/* Seconds during which gradients and parameters on their way to the network occupy the same link. */
static void link_busy(const dw__planned *planned, int stage, double busy[2]) {
    const dw_layout *layout = planned->layout;
    double share = dw__host_link_share(planned, layout->gpus / layout->pp);
    busy[0] = busy[1] = 0;
    if (share <= 0) return;
    dw__data_traffic traffic;
    dw__data_traffic_of(planned, stage, &traffic);
    double times = traffic.each ? 1 : planned->micro_batches;
    busy[0] = share * traffic.gather / times;
    busy[1] = share * (traffic.again + traffic.reduce) / times +
              share * traffic.across / planned->micro_batches;
}

double dw__host_copy_seconds(const dw__planned *planned, double bytes) {
    return bytes > 0 ? bytes / copy_rate(planned) : 0;
}

void dw__offload_seconds(const dw__planned *planned, int stage, double bytes, double forward,
                         double backward, double exposed[2]) {
    double busy[2], room[2] = {forward, backward};
    double seconds = dw__host_copy_seconds(planned, bytes);
    link_busy(planned, stage, busy);
    for (int at = 0; at < 2; at++) {
        double free = fmax(0, room[at] - busy[at]);
        /* A hidden copy still takes bandwidth of the GPU's memory from the kernels beside it. */
        exposed[at] = fmax(0, seconds - free) + dw__traffic_seconds(planned, bytes);
    }
}

/* Gradients go out, the host updates the FP32 parameter and two averages, and parameters come back. The three run in
 * turn, or with overlap bucket by bucket at the same time. */
double dw__optimizer_host_seconds(const dw__planned *planned, int stage) {
    double elements = dw__optimizer_elements(planned, stage);
    if (!planned->layout->offload_optimizer) return 0;
    dw__element_bytes bytes = dw__element_bytes_of(planned->layout);
    double rate = copy_rate(planned);
    double out = elements * bytes.gradient / rate, back = elements * bytes.parameter / rate;
    double traffic = elements * (2 * 12 + 2 * bytes.gradient + 2 * bytes.parameter);
    double step = traffic / (planned->constants->host_adam * host_memory_rate(planned->hardware));
    return planned->layout->overlap_data ? fmax(step, fmax(out, back)) : out + step + back;
}
