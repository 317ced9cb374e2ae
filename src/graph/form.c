/* Code that the text form and the JSON form share: numbers and described nodes. */
#include "graph/internal.h"
#include <ctype.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- numbers ------------------------------------------------------------------------------- */

/* The host program's locale may write decimal commas. The C locale always exists; libc does not allocate it,
 * so it need not be freed. */
static locale_t c_locale(void) { return newlocale(LC_ALL_MASK, "C", (locale_t)0); }

void dw__number_text(double number, char text[DW__NUMBER_BYTES]) {
    enum { FEWEST_DIGITS = 15, ENOUGH_DIGITS = 17 };
    if (isnan(number)) {
        snprintf(text, DW__NUMBER_BYTES, "nan"); /* without the sign that printf would show */
        return;
    }
    locale_t before = uselocale(c_locale());
    for (int digits = FEWEST_DIGITS; digits <= ENOUGH_DIGITS; digits++) {
        snprintf(text, DW__NUMBER_BYTES, "%.*g", digits, number);
        if (strtod(text, NULL) == number) break;
    }
    uselocale(before);
}

/* strtod would also accept hexadecimal, "infinity" and leading spaces. */
const char *dw__number_parse(const char *text, double *number) {
    const char *digits = text + (*text == '-');
    char *end;
    if (strncmp(digits, "inf", 3) == 0) {
        *number = digits > text ? -INFINITY : INFINITY;
        return digits + 3;
    }
    if (strncmp(text, "nan", 3) == 0) {
        *number = NAN;
        return text + 3;
    }
    if (!isdigit((unsigned char)digits[0]) || (digits[0] == '0' && tolower(digits[1]) == 'x'))
        return NULL;
    *number = strtod_l(text, &end, c_locale());
    return isfinite(*number) ? end : NULL;
}

dw_status dw__parse_known_dim(dw_graph *graph, const char *text, dw_dim *dim) {
    uint32_t known = dw_graph_symbol_count(graph);
    DW_RETURN_IF_FAILED(dw_dim_parse(graph, text, dim));
    if (dw_graph_symbol_count(graph) != known)
        return dw__fail(
            DW_PARSE,
            "dim \"%.200s\" uses the symbol %s, which the graph does not list: add it to "
            "the graph's symbols",
            text, dw_graph_symbol_name(graph, known));
    if (dw__dim_is_negative(graph, *dim))
        return dw__fail(DW_SHAPE, "dim \"%.200s\" is negative; expected 0 or more", text);
    return DW_OK;
}

/* A dim as a number or, between two of `quote`, as a polynomial (of letters, digits and " +-*"). */
static dw_status write_dim(dw__text *out, const dw_graph *graph, dw_dim dim, const char *quote) {
    char text[256];
    if (dim >= 0) return dw__text_printf(out, "%lld", (long long)dim);
    size_t length = dw_dim_text(graph, dim, text, sizeof text);
    if (length < sizeof text) return dw__text_printf(out, "%s%s%s", quote, text, quote);
    char *longer = dw__malloc(length + 1); /* a polynomial of many terms */
    if (!longer) return dw__fail_memory("the text of a dim", length + 1);
    dw_dim_text(graph, dim, longer, length + 1);
    dw_status status = dw__text_printf(out, "%s%s%s", quote, longer, quote);
    dw__free(longer);
    return status;
}

dw_status dw__write_list(dw__text *out, const dw_graph *dims_of, uint32_t count,
                         const int64_t *list, const char *quote) {
    DW_RETURN_IF_FAILED(dw__text_append(out, "[", 1));
    for (uint32_t i = 0; i < count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ", ", 2));
        if (dims_of)
            DW_RETURN_IF_FAILED(write_dim(out, dims_of, list[i], quote));
        else
            DW_RETURN_IF_FAILED(dw__text_printf(out, "%lld", (long long)list[i]));
    }
    return dw__text_append(out, "]", 1);
}

/* ---- nodes --------------------------------------------------------------------------------- */

dw_status dw__form_status(dw_status status) {
    bool misuse = status == DW_INVALID_ARGUMENT || status == DW_NOT_FOUND;
    return misuse ? DW_PARSE : status;
}

static dw_status check_type(const dw_graph *graph, const dw__description *node, dw_node made,
                            uint32_t index) {
    dw_value value = dw_node_output(graph, made, index);
    const dw__value_record *record = &graph->values.items[value];
    bool same =
        record->dtype == node->types[index].dtype && record->rank == node->types[index].rank;
    for (int k = 0; same && k < record->rank; k++)
        same = record->shape[k] == node->types[index].shape[k];
    if (same) return DW_OK;
    return dw__fail(DW_SHAPE, "output %u (\"%s\") is declared %s%s, but %s gives %s%s", index,
                    record->name, dw_dtype_name(node->types[index].dtype),
                    dw__shape_words(graph, node->types[index].rank, node->types[index].shape).text,
                    dw_op_name(node->op), dw_dtype_name(record->dtype),
                    dw__shape_words(graph, record->rank, record->shape).text);
}

dw_status dw__append_described(dw_graph *graph, const dw__description *node) {
    dw_node made;
    dw_graph_set_backward(graph, node->backward);
    DW_RETURN_IF_FAILED(dw_graph_set_origin(graph, node->region, node->layer, node->module));
    DW_RETURN_IF_FAILED(dw__append_named(graph, node->op, node->input_count, node->inputs,
                                         node->attr_count, node->attrs, node->output_count,
                                         node->names, &made));
    if (dw_node_output_count(graph, made) != node->output_count)
        return dw__fail(DW_PARSE, "%u outputs are given; %s has %u", node->output_count,
                        dw_op_name(node->op), dw_node_output_count(graph, made));
    for (uint32_t i = 0; i < node->output_count; i++)
        if (node->types[i].given) DW_RETURN_IF_FAILED(check_type(graph, node, made, i));
    return DW_OK;
}
