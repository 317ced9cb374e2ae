#include "plan/evidence.h"
#include "base/base.h"

/* Host links above this bandwidth are NVLink-C2C (450 GB/s in each direction on GB200 and GB300), not PCI Express. */
static const double COHERENT_LINK = 2e11;

static int offloads_optimizer(const dw_hardware *hardware, const dw_layout *layout) {
    (void)hardware;
    return layout->offload_optimizer;
}
static int offloads_layers(const dw_hardware *hardware, const dw_layout *layout) {
    return layout->offload_layers > 0 && hardware->host_bandwidth.value < COHERENT_LINK;
}
static int splits_attention(const dw_hardware *hardware, const dw_layout *layout) {
    (void)hardware;
    return layout->attention_tp && layout->attention_tp != layout->tp;
}
static int is_zb_v(const dw_hardware *hardware, const dw_layout *layout) {
    (void)hardware;
    return layout->pp > 1 && layout->schedule == DW_SCHEDULE_ZB_V;
}
static int is_dualpipe(const dw_hardware *hardware, const dw_layout *layout) {
    (void)hardware;
    return layout->pp > 1 && layout->schedule == DW_SCHEDULE_DUALPIPE;
}

/* The unmeasured parts. All others are measured; docs/autoplan.md counts the runs of each. */
static const struct {
    const char *name, *evidence;
    int (*has)(const dw_hardware *hardware, const dw_layout *layout);
} unmeasured[] = {
    {"activations on the host over PCI Express", "published runs only with NVLink-C2C",
     offloads_layers},
    {"optimizer on the host", "no published run in the table", offloads_optimizer},
    {"attention on fewer tensor parallel ranks", "no published run", splits_attention},
    {"zb-v", "no published run in the table", is_zb_v},
    {"dualpipe", "one published training run; the prediction is 1% slower", is_dualpipe},
};

dw_status dw__evidence_words(const dw_hardware *hardware, const dw_layout *layout, dw__text *text) {
    DW_RETURN_IF_FAILED(dw__text_printf(text, "%s", ""));
    for (size_t at = 0, said = 0; at < DW_COUNT(unmeasured); at++) {
        if (!unmeasured[at].has(hardware, layout)) continue;
        DW_RETURN_IF_FAILED(dw__text_printf(text, "%s%s (%s)", said++ ? ", " : "",
                                            unmeasured[at].name, unmeasured[at].evidence));
    }
    return DW_OK;
}

/* dw__evidence_limit allows the schedules up to ZB-H2, so ZB-V and DualPipe must be the last ones. */
_Static_assert(DW_SCHEDULE_ZB_V == DW_SCHEDULE_ZB_H2 + 1 &&
                   DW_SCHEDULE_DUALPIPE == DW_SCHEDULE_ZB_V + 1 &&
                   DW_SCHEDULES == DW_SCHEDULE_DUALPIPE + 1,
               "the measured schedules are one range");

void dw__evidence_limit(const dw_hardware *hardware, dw__limits *limits) {
    const dw_layout *set = &limits->set;
    if (!set->offload_optimizer) limits->high.offload_optimizer = 0;
    if (!set->offload_layers && hardware->host_bandwidth.value < COHERENT_LINK)
        limits->high.offload_layers = 0;
    if (!set->schedule) limits->high.schedule = DW_SCHEDULE_ZB_H2;
    limits->whole_attention = !set->attention_tp;
}
