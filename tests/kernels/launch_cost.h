/* Measures the host's cost of an attention call on a GPU. The figures are printed, not checked. */
#ifndef LAUNCH_COST_H
#define LAUNCH_COST_H

int print_launch_cost(void);

#endif
