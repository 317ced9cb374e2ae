#include "graph/attention_work.h"
#include <math.h>

/* Sum over queries i of (i + shift) clamped to [0, keys]. */
static double clamped_sum(double queries, double shift, double keys) {
    double first = fmin(fmax(-shift, 0), queries);          /* earlier terms are 0 */
    double last = fmin(fmax(keys - shift, first), queries); /* terms from here on equal `keys` */
    double count = last - first;
    return count * (first + shift) + count * (count - 1) / 2 + (queries - last) * keys;
}

double dw__attention_pairs(double queries, double keys, double shift, double left, double right) {
    double pairs = isinf(right) ? queries * keys : clamped_sum(queries, shift + right + 1, keys);
    return isinf(left) ? pairs : pairs - clamped_sum(queries, shift - left, keys);
}

double dw__attention_keys_seen(double queries, double window) {
    if (window <= 0 || window >= queries) return queries / 2;
    return window - window * window / (2 * queries);
}

double dw__attention_flops(double pairs, double head_dim, double value_dim, bool backward) {
    return 2 * pairs * (backward ? 3 * head_dim + 2 * value_dim : head_dim + value_dim);
}

double dw__attention_traffic(double query_rows, double key_rows, double head_dim, double value_dim,
                             bool backward) {
    return (backward ? 2 : 1) * (query_rows + key_rows) * (head_dim + value_dim);
}
