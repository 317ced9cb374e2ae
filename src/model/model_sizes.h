/* Counts of elements by a model's sizes, and what reading a graph shares with counting its operations. */
#ifndef DW_MODEL_SIZES_H
#define DW_MODEL_SIZES_H

#include "base/base.h"
#include "deepwell/model.h"

double dw__value_dim(const dw_model_sizes *model); /* width of a head's values */
double dw__attention_parameters(const dw_model_sizes *model);
double dw__dense_mlp_parameters(const dw_model_sizes *model);
double dw__expert_parameters(const dw_model_sizes *model); /* of one expert */
double dw__shared_parameters(const dw_model_sizes *model);
double dw__router_parameters(const dw_model_sizes *model);
double dw__embedding_parameters(const dw_model_sizes *model); /* of one table */
int dw__moe_layers(const dw_model_sizes *model);
/* active parameters counted from the widths; ignores model->active */
double dw__counted_active(const dw_model_sizes *model);

/* Makes a copy of the graph in which composites are recognized. */
dw_status dw__graph_recognized(const dw_graph *graph, dw_graph **recognized);
/* Returns the parameter that `value` is, or is a view or a cast of. Returns DW_NONE if `value` is computed. */
dw_value dw__parameter_behind(const dw_graph *graph, dw_value value);

#endif
