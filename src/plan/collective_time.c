/* Seconds of collectives by the ring algorithm's volume: the bytes that leave a rank, divided by its bandwidth. */
#include "plan/planner_internal.h"
#include <math.h>

/* Returns the number of GPUs that reach each other without the network. A job that does not fill its domains is spread
 * evenly: 256 GPUs in racks of 72 use 64 of each of four racks. */
int dw__domain_of(const dw_hardware *hardware, int gpus) {
    int domain = hardware->gpus_per_domain;
    if (domain <= 1) domain = hardware->gpus_per_node > 0 ? hardware->gpus_per_node : 1;
    if (gpus <= domain) return domain;
    while (gpus % domain) domain--;
    return domain;
}

static int common_divisor(int a, int b) {
    while (b) {
        int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static double link_rate(const dw__planned *planned) {
    return dw__reached(&planned->hardware->link_bandwidth, planned->constants->link_efficiency);
}
static double network_rate(const dw__planned *planned) {
    return dw__reached(&planned->hardware->network_bandwidth,
                       planned->constants->network_efficiency);
}

/* Returns how many of `ranks`, `stride` apart, are in one domain. If groups do not divide the domain, some cross its
 * border, and the others wait for them. */
static int near(const dw__planned *planned, int ranks, int stride) {
    int domain = planned->domain, count = domain / stride, span = ranks * stride;
    if (count < 1) return 1;
    if (count < ranks) return count;
    if (planned->layout->gpus <= domain || domain % span == 0) return ranks;
    int together = common_divisor(domain, span) / stride;
    return together < 1 ? 1 : together;
}

double dw__gather_seconds(const dw__planned *planned, double bytes, int ranks, int stride,
                          double messages) {
    if (ranks <= 1 || bytes <= 0) return 0;
    int together = near(planned, ranks, stride);
    double rate = link_rate(planned), nodes = (double)ranks / together;
    if (together < ranks) {
        /* Rings enter and leave a node through the adapters of all its members, so every rail carries a share. */
        double rails = together * network_rate(planned);
        if (together == 1 || rails < rate) rate = rails;
    }
    /* Each message has the latency of a ring of its own. Over the network, small messages stay far below the
     * bandwidth. */
    const dw__constants *c = planned->constants;
    double around = (ranks - nodes) * planned->hardware->link_latency.value * c->ring_latency;
    if (nodes > 1)
        around +=
            nodes * planned->hardware->network_latency.value * c->ring_latency + c->network_startup;
    return bytes * (ranks - 1) / ranks / rate + messages * around;
}

/* Every rank sends `bytes` in all, evenly spread over the ranks. `copies` is the number of ranks that receive each
 * token. Copies for one domain cross the network once. */
double dw__exchange_seconds(const dw__planned *planned, double bytes, int ranks, int stride,
                            double copies) {
    if (ranks <= 1 || bytes <= 0) return 0;
    int together = near(planned, ranks, stride);
    /* With dispatch_once, a token is sent once to each rank, even if several of its experts are there. */
    double once =
        planned->layout->dispatch_once ? ranks * (1 - pow(1 - 1.0 / ranks, copies)) / copies : 1;
    double inside =
        bytes * once * (ranks - 1) / ranks / (link_rate(planned) * planned->constants->expert_link);
    double latency = planned->hardware->link_latency.value;
    if (together == ranks) return inside + latency * log2(2.0 * ranks);
    double domains = (double)ranks / together;
    double distinct = domains * (1 - pow(1 - 1 / domains, copies)) / copies;
    double outside = bytes * distinct * (domains - 1) / domains /
                     (network_rate(planned) * planned->constants->expert_network);
    return (inside > outside ? inside : outside) +
           planned->hardware->network_latency.value * log2(2.0 * ranks);
}

double dw__host_link_share(const dw__planned *planned, int span) {
    const dw_hardware *hardware = planned->hardware;
    double host = dw__reached(&hardware->host_bandwidth, planned->constants->host_link);
    if (host <= 0) return 0;
    if (span > planned->domain) return fmin(1, network_rate(planned) / host);
    return hardware->gpus_per_domain > 1 ? 0 : fmin(1, link_rate(planned) / host);
}

double dw__send_seconds(const dw__planned *planned, double bytes, int stride) {
    const dw_hardware *hardware = planned->hardware;
    const dw__constants *c = planned->constants;
    int within = 2 * stride <= planned->domain;
    double rate = within ? link_rate(planned) : network_rate(planned);
    double latency = within ? hardware->link_latency.value : hardware->network_latency.value;
    return bytes / (rate * c->send_part) + latency + c->send_startup;
}
