/* What a call of attention costs the host, on a GPU: printed, not judged. */
#ifndef LAUNCH_COST_H
#define LAUNCH_COST_H

int print_launch_cost(void);

#endif
