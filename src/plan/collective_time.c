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

/* Part of `copies` of a token that go to different ones of `places`, if experts are chosen at random. */
static double distinct_part(double places, double copies) {
    return places * (1 - pow(1 - 1 / places, copies)) / copies;
}

/* Every rank sends `bytes` in all, evenly spread over the ranks. `copies` is the number of experts that receive each
 * token. NCCL's all-to-all sends each copy to its rank. DeepEP and HybridEP (dispatch_once) send a token once to each
 * domain and there once to each rank, even if several of its experts are there. */
double dw__exchange_seconds(const dw__planned *planned, double bytes, int ranks, int stride,
                            double copies) {
    if (ranks <= 1 || bytes <= 0) return 0;
    const dw__constants *c = planned->constants;
    const int together = near(planned, ranks, stride), once = planned->layout->dispatch_once;
    const double link = link_rate(planned) * (once ? c->dispatch_link : c->expert_link),
                 network = network_rate(planned) * (once ? c->dispatch_network : c->expert_network),
                 latency = planned->hardware->link_latency.value;
    const double inside = bytes * (once ? distinct_part(ranks, copies) : 1);
    if (together == ranks) return inside * (ranks - 1) / ranks / link + latency * log2(2.0 * ranks);
    const double
        domains = (double)ranks / together,
        outside =
            bytes * (once ? distinct_part(domains, copies) : 1) * (domains - 1) / domains / network,
        /* Tokens that cross the network are forwarded within the domain; the others are sent there directly. */
        forwarded = inside * (together - 1) / together / link;
    return fmax(forwarded, outside) + planned->hardware->network_latency.value * log2(2.0 * ranks);
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
