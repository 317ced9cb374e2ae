/* Dimensions: numbers, and polynomials with integer coefficients over the graph's symbols and over quotients
 * ceil(polynomial / number).
 *
 * A polynomial is a list of terms with nonzero coefficients in graded lexicographic order (higher degree
 * first, then earlier symbols first). This order is canonical: equal polynomials have equal lists. Each
 * distinct list is stored once, so equal dims have equal handles:
 *
 *     dim >= 0    the number itself
 *     dim <  0    polynomial number -1 - dim; negative constants are stored this way too
 *
 * A quotient is a factor of a term, like a symbol. Its dividend has no term that the divisor divides, and no common
 * factor with it, so that equal quotients mostly are one: ceil((32*B + S) / 64) is a quotient, ceil((64*B + 2) / 64) is
 * B + 1, and ceil(ceil(B / 32) / 4) is ceil(B / 128).
 *
 * Arithmetic runs in a fixed buffer, and every step is checked for overflow. */
#include "graph/internal.h"
#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_DEGREE = 16,
    MAX_TERMS = 64,
    MAX_SYMBOLS = 1024,
    FIRST_QUOTIENT = MAX_SYMBOLS, /* factors of a term from here on are quotients */
    MAX_QUOTIENTS = 1 << 14,
    MAX_NESTING = 8, /* of quotients; bounds recursion */
    /* Factors of a dim, with those of its quotients' dividends: what evaluating, copying and writing it takes. Nested
     * products of quotients would otherwise take 1024^8 steps. */
    MAX_FACTORS = 1 << 12,
    FIRST_SLOTS = 64,
    TEXT_BYTES = 256 /* of a dim in a message */
};

typedef struct term {
    int64_t coefficient;
    uint16_t degree;
    uint16_t symbols[MAX_DEGREE]; /* ascending, repeated for powers; zero beyond degree */
} term;

/* ceil(dividend / divisor) */
typedef struct quotient {
    dw_dim dividend;
    int64_t divisor;
    int nesting;      /* 1: the dividend has no quotients */
    uint32_t factors; /* of the dividend, with those of its quotients */
} quotient;

typedef struct polynomial {
    uint32_t count;
    term terms[MAX_TERMS];
} polynomial;

typedef struct stored {
    uint64_t hash;
    uint32_t count;
    term terms[];
} stored;

struct dw__dims {
    dw__arena *arena;
    struct {
        const char **items;
        size_t count, capacity;
    } symbols;
    struct {
        stored **items;
        size_t count, capacity;
    } polynomials;
    struct {
        quotient *items;
        size_t count, capacity;
    } quotients;
    uint32_t *slots; /* 1 + index of a polynomial; 0 if the slot is free */
    size_t slot_count;
};

/* ---- lifecycle ----------------------------------------------------------------------------- */

dw_status dw__dims_create(struct dw__dims **out) {
    dw_status status = DW_OK;
    struct dw__dims *dims = dw__calloc(1, sizeof *dims);
    if (!dims) return dw__fail_memory("the dimensions of a graph", sizeof *dims);
    dims->arena = dw__arena_create();
    dims->slots = dw__calloc(FIRST_SLOTS, sizeof *dims->slots);
    dims->slot_count = FIRST_SLOTS;
    if (!dims->arena || !dims->slots) {
        status = dw__fail_memory("the dimensions of a graph", FIRST_SLOTS * sizeof *dims->slots);
        goto cleanup;
    }
    *out = dims;
cleanup:
    if (status != DW_OK) dw__dims_destroy(dims);
    return status;
}

void dw__dims_destroy(struct dw__dims *dims) {
    if (!dims) return;
    dw__arena_destroy(dims->arena);
    dw__free(dims->symbols.items);
    dw__free(dims->polynomials.items);
    dw__free(dims->quotients.items);
    dw__free(dims->slots);
    dw__free(dims);
}

bool dw__dim_exists(const dw_graph *graph, dw_dim dim) {
    return dim >= 0 || (uint64_t)(-1 - dim) < graph->dims->polynomials.count;
}

bool dw__dim_is_negative(const dw_graph *graph, dw_dim dim) {
    if (dim >= 0) return false;
    const stored *entry = graph->dims->polynomials.items[-1 - dim];
    return entry->count == 1 && entry->terms[0].degree == 0;
}

/* ---- symbols ------------------------------------------------------------------------------- */

static bool is_symbol_start(char c) { return isalpha((unsigned char)c) || c == '_'; }
static bool is_symbol_part(char c) { return isalnum((unsigned char)c) || c == '_'; }

static size_t symbol_length(const char *text) {
    size_t length = 0;
    if (!is_symbol_start(text[0])) return 0;
    while (is_symbol_part(text[length])) length++;
    return length;
}

static dw_status find_or_add_symbol(struct dw__dims *dims, const char *name, size_t length,
                                    uint16_t *index) {
    for (size_t i = 0; i < dims->symbols.count; i++) {
        const char *known = dims->symbols.items[i];
        if (strncmp(known, name, length) == 0 && known[length] == '\0') {
            *index = (uint16_t)i;
            return DW_OK;
        }
    }
    if (dims->symbols.count == MAX_SYMBOLS)
        return dw__fail(DW_UNSUPPORTED,
                        "symbol \"%.*s\" would be symbol number %d; a graph has at "
                        "most %d: use numbers for dims that do not change",
                        (int)(length > 64 ? 64 : length), name, MAX_SYMBOLS + 1, MAX_SYMBOLS);
    char *copy = dw__arena_alloc(dims->arena, length + 1);
    if (!copy) return dw__fail_memory("a symbol", length + 1);
    memcpy(copy, name, length);
    DW_RETURN_IF_FAILED(DW_PUSH(&dims->symbols, copy));
    *index = (uint16_t)(dims->symbols.count - 1);
    return DW_OK;
}

uint32_t dw_graph_symbol_count(const dw_graph *graph) {
    return (uint32_t)graph->dims->symbols.count;
}

const char *dw_graph_symbol_name(const dw_graph *graph, uint32_t index) {
    return index < graph->dims->symbols.count ? graph->dims->symbols.items[index] : "?";
}

/* ---- polynomials in a buffer --------------------------------------------------------------- */

static dw_status overflow(void) {
    return dw__fail(DW_SHAPE, "a dimension exceeds 2^63: make the sizes or their factors smaller");
}

/* Order of monomials: the result is negative if `a` comes first. */
static int compare_monomials(const term *a, const term *b) {
    if (a->degree != b->degree) return a->degree > b->degree ? -1 : 1;
    for (int i = 0; i < a->degree; i++)
        if (a->symbols[i] != b->symbols[i]) return a->symbols[i] < b->symbols[i] ? -1 : 1;
    return 0;
}

static dw_status add_term(polynomial *sum, const term *added) {
    if (added->coefficient == 0) return DW_OK;
    uint32_t at = 0;
    while (at < sum->count && compare_monomials(&sum->terms[at], added) < 0) at++;
    if (at < sum->count && compare_monomials(&sum->terms[at], added) == 0) {
        int64_t *coefficient = &sum->terms[at].coefficient;
        if (__builtin_add_overflow(*coefficient, added->coefficient, coefficient) ||
            *coefficient == INT64_MIN)
            return overflow();
        if (*coefficient == 0) {
            sum->count--;
            memmove(&sum->terms[at], &sum->terms[at + 1], (sum->count - at) * sizeof(term));
        }
        return DW_OK;
    }
    if (sum->count == MAX_TERMS)
        return dw__fail(DW_UNSUPPORTED,
                        "a dimension has more than %d terms: use fewer symbols or numbers",
                        MAX_TERMS);
    memmove(&sum->terms[at + 1], &sum->terms[at], (sum->count - at) * sizeof(term));
    sum->terms[at] = *added;
    sum->count++;
    return DW_OK;
}

static dw_status multiply_terms(const term *a, const term *b, term *product) {
    if (a->degree + b->degree > MAX_DEGREE)
        return dw__fail(DW_UNSUPPORTED,
                        "a dimension is a product of more than %d symbols: use numbers for some",
                        MAX_DEGREE);
    *product = (term){.degree = (uint16_t)(a->degree + b->degree)};
    if (__builtin_mul_overflow(a->coefficient, b->coefficient, &product->coefficient) ||
        product->coefficient == INT64_MIN)
        return overflow();
    for (int i = 0, from_a = 0, from_b = 0; i < product->degree; i++) {
        bool take_a =
            from_b == b->degree || (from_a < a->degree && a->symbols[from_a] <= b->symbols[from_b]);
        product->symbols[i] = take_a ? a->symbols[from_a++] : b->symbols[from_b++];
    }
    return DW_OK;
}

/* sum += scale * added */
static dw_status add_scaled(polynomial *sum, const term *scale, const term *added, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        term product;
        DW_RETURN_IF_FAILED(multiply_terms(scale, &added[i], &product));
        DW_RETURN_IF_FAILED(add_term(sum, &product));
    }
    return DW_OK;
}

/* Returns the terms of `dim`. For a number the single term is stored in `number`. */
static const term *terms_of(const struct dw__dims *dims, dw_dim dim, term *number,
                            uint32_t *count) {
    if (dim < 0) {
        const stored *entry = dims->polynomials.items[-1 - dim];
        *count = entry->count;
        return entry->terms;
    }
    *number = (term){.coefficient = dim};
    *count = dim != 0;
    return number;
}

/* ---- interning ----------------------------------------------------------------------------- */

static uint64_t hash_terms(const term *terms, uint32_t count) {
    uint64_t hash = count;
    for (uint32_t i = 0; i < count; i++) {
        hash = (hash ^ (uint64_t)terms[i].coefficient) * 0x9e3779b97f4a7c15u;
        for (int k = 0; k < terms[i].degree; k++)
            hash = (hash ^ (terms[i].symbols[k] + 1u)) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

static bool same_terms(const stored *entry, const term *terms, uint32_t count) {
    if (entry->count != count) return false;
    for (uint32_t i = 0; i < count; i++)
        if (entry->terms[i].coefficient != terms[i].coefficient ||
            compare_monomials(&entry->terms[i], &terms[i]) != 0)
            return false;
    return true;
}

static void place(struct dw__dims *dims, uint32_t index) {
    size_t mask = dims->slot_count - 1;
    size_t at = dims->polynomials.items[index]->hash & mask;
    while (dims->slots[at] != 0) at = (at + 1) & mask;
    dims->slots[at] = index + 1;
}

static dw_status double_slots(struct dw__dims *dims) {
    uint32_t *slots = dw__calloc(2 * dims->slot_count, sizeof *slots);
    if (!slots) return dw__fail_memory("dimensions", 2 * dims->slot_count * sizeof *slots);
    dw__free(dims->slots);
    dims->slots = slots;
    dims->slot_count *= 2;
    for (uint32_t i = 0; i < dims->polynomials.count; i++) place(dims, i);
    return DW_OK;
}

/* Returns at most MAX_FACTORS + 1. */
static uint32_t count_factors(const struct dw__dims *dims, const term *terms, uint32_t count) {
    uint32_t factors = 0;
    for (uint32_t i = 0; i < count; i++)
        for (int k = 0; k < terms[i].degree && factors <= MAX_FACTORS; k++) {
            const int at = terms[i].symbols[k] - FIRST_QUOTIENT;
            factors += 1 + (at < 0 ? 0 : dims->quotients.items[at].factors);
        }
    return factors;
}

static dw_status intern(struct dw__dims *dims, const term *terms, uint32_t count, dw_dim *dim) {
    if (count == 0 || (count == 1 && terms[0].degree == 0 && terms[0].coefficient > 0)) {
        *dim = count == 0 ? 0 : terms[0].coefficient;
        return DW_OK;
    }
    uint64_t hash = hash_terms(terms, count);
    size_t mask = dims->slot_count - 1;
    for (size_t at = hash & mask; dims->slots[at] != 0; at = (at + 1) & mask) {
        uint32_t index = dims->slots[at] - 1;
        const stored *entry = dims->polynomials.items[index];
        if (entry->hash == hash && same_terms(entry, terms, count)) {
            *dim = -1 - (dw_dim)index;
            return DW_OK;
        }
    }
    if (count_factors(dims, terms, count) > MAX_FACTORS)
        return dw__fail(DW_UNSUPPORTED,
                        "a dimension has more than %d factors, with those inside its quotients: "
                        "use numbers for some symbols",
                        MAX_FACTORS);
    if (2 * (dims->polynomials.count + 1) > dims->slot_count)
        DW_RETURN_IF_FAILED(double_slots(dims));
    size_t bytes = sizeof(stored) + count * sizeof(term);
    stored *entry = dw__arena_alloc(dims->arena, bytes);
    if (!entry) return dw__fail_memory("a dimension", bytes);
    entry->hash = hash;
    entry->count = count;
    memcpy(entry->terms, terms, count * sizeof(term));
    DW_RETURN_IF_FAILED(DW_PUSH(&dims->polynomials, entry));
    place(dims, (uint32_t)dims->polynomials.count - 1);
    *dim = -(dw_dim)dims->polynomials.count;
    return DW_OK;
}

dw_status dw__dims_clone(const struct dw__dims *from, struct dw__dims **out) {
    dw_status status = DW_OK;
    struct dw__dims *copy = NULL;
    DW_RETURN_IF_FAILED(dw__dims_create(&copy));
    for (size_t i = 0; i < from->symbols.count; i++) {
        uint16_t index;
        const char *name = from->symbols.items[i];
        DW_TRY(find_or_add_symbol(copy, name, strlen(name), &index));
    }
    for (size_t i = 0; i < from->quotients.count; i++)
        DW_TRY(DW_PUSH(&copy->quotients, from->quotients.items[i]));
    for (size_t i = 0; i < from->polynomials.count; i++) {
        dw_dim dim; /* the copy gets the same handle: the order is the same */
        const stored *entry = from->polynomials.items[i];
        DW_TRY(intern(copy, entry->terms, entry->count, &dim));
    }
    *out = copy;
cleanup:
    if (status != DW_OK) dw__dims_destroy(copy);
    return status;
}

/* ---- public arithmetic --------------------------------------------------------------------- */

dw_status dw_graph_symbol(dw_graph *graph, const char *name, dw_dim *dim) {
    size_t length = name ? symbol_length(name) : 0;
    if (length == 0 || name[length] != '\0')
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "\"%s\" is not a symbol name: use letters, digits and _, not starting with a "
            "digit",
            name ? name : "(null)");
    term symbol = {.coefficient = 1, .degree = 1};
    DW_RETURN_IF_FAILED(find_or_add_symbol(graph->dims, name, length, &symbol.symbols[0]));
    return intern(graph->dims, &symbol, 1, dim);
}

static dw_status check_operands(const dw_graph *graph, dw_dim a, dw_dim b) {
    if (dw__dim_exists(graph, a) && dw__dim_exists(graph, b)) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "a dim handle (%lld or %lld) is not of this graph",
                    (long long)a, (long long)b);
}

static dw_status add_multiple(dw_graph *graph, dw_dim a, int sign, dw_dim b, dw_dim *out) {
    DW_RETURN_IF_FAILED(check_operands(graph, a, b));
    polynomial sum;
    sum.count = 0;
    term number, scale = {.coefficient = 1}, signed_scale = {.coefficient = sign};
    uint32_t count;
    const term *terms = terms_of(graph->dims, a, &number, &count);
    DW_RETURN_IF_FAILED(add_scaled(&sum, &scale, terms, count));
    terms = terms_of(graph->dims, b, &number, &count);
    DW_RETURN_IF_FAILED(add_scaled(&sum, &signed_scale, terms, count));
    return intern(graph->dims, sum.terms, sum.count, out);
}

dw_status dw_dim_add(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *sum) {
    if (a >= 0 && b >= 0) return __builtin_add_overflow(a, b, sum) ? overflow() : DW_OK;
    return add_multiple(graph, a, 1, b, sum);
}

dw_status dw_dim_sub(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *difference) {
    if (a >= b && b >= 0) {
        *difference = a - b;
        return DW_OK;
    }
    return add_multiple(graph, a, -1, b, difference);
}

dw_status dw_dim_mul(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *out) {
    if (a >= 0 && b >= 0) return __builtin_mul_overflow(a, b, out) ? overflow() : DW_OK;
    DW_RETURN_IF_FAILED(check_operands(graph, a, b));
    polynomial product;
    product.count = 0;
    term number_a, number_b;
    uint32_t count_a, count_b;
    const term *terms_a = terms_of(graph->dims, a, &number_a, &count_a);
    const term *terms_b = terms_of(graph->dims, b, &number_b, &count_b);
    for (uint32_t i = 0; i < count_a; i++)
        DW_RETURN_IF_FAILED(add_scaled(&product, &terms_a[i], terms_b, count_b));
    return intern(graph->dims, product.terms, product.count, out);
}

/* quotient = dividend / divisor for single terms. Returns false if the quotient is not a term. */
static bool divide_terms(const term *dividend, const term *divisor, term *quotient) {
    if (dividend->coefficient % divisor->coefficient != 0) return false;
    *quotient = (term){.coefficient = dividend->coefficient / divisor->coefficient};
    int at = 0;
    for (int i = 0; i < dividend->degree; i++) {
        if (at < divisor->degree && divisor->symbols[at] == dividend->symbols[i])
            at++;
        else
            quotient->symbols[quotient->degree++] = dividend->symbols[i];
    }
    return at == divisor->degree;
}

/* Long division by leading terms. It ends because the monomial order is a well-order. */
dw_status dw_dim_div(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *out) {
    DW_RETURN_IF_FAILED(check_operands(graph, a, b));
    if (b == 0)
        return dw__fail(DW_SHAPE, "the dim %s is divided by 0", dw__dim_words(graph, a).text);
    term number_a, number_b;
    uint32_t count_a, count_b;
    const term *terms_a = terms_of(graph->dims, a, &number_a, &count_a);
    const term *terms_b = terms_of(graph->dims, b, &number_b, &count_b);
    polynomial rest, quotient;
    rest.count = count_a;
    quotient.count = 0;
    memcpy(rest.terms, terms_a, count_a * sizeof(term));
    while (rest.count > 0) {
        term step;
        if (!divide_terms(&rest.terms[0], &terms_b[0], &step))
            return dw__fail(DW_SHAPE, "the dim %s is not divisible by %s",
                            dw__dim_words(graph, a).text, dw__dim_words(graph, b).text);
        DW_RETURN_IF_FAILED(add_term(&quotient, &step));
        step.coefficient = -step.coefficient;
        DW_RETURN_IF_FAILED(add_scaled(&rest, &step, terms_b, count_b));
    }
    return intern(graph->dims, quotient.terms, quotient.count, out);
}

/* Returns the factor that stands for the quotient. The dividend is as ceil_divide leaves it. */
static dw_status find_or_add_quotient(struct dw__dims *dims, dw_dim dividend, int64_t divisor,
                                      uint16_t *factor) {
    for (size_t i = 0; i < dims->quotients.count; i++) {
        const quotient *known = &dims->quotients.items[i];
        if (known->dividend != dividend || known->divisor != divisor) continue;
        *factor = (uint16_t)(FIRST_QUOTIENT + i);
        return DW_OK;
    }
    const stored *entry = dims->polynomials.items[-1 - dividend];
    quotient made = {dividend, divisor, 1, count_factors(dims, entry->terms, entry->count)};
    for (uint32_t i = 0; i < entry->count; i++)
        for (int k = 0; k < entry->terms[i].degree; k++) {
            if (entry->terms[i].symbols[k] < FIRST_QUOTIENT) continue;
            const int inner =
                dims->quotients.items[entry->terms[i].symbols[k] - FIRST_QUOTIENT].nesting;
            if (made.nesting <= inner) made.nesting = inner + 1;
        }
    if (made.nesting > MAX_NESTING || dims->quotients.count == MAX_QUOTIENTS)
        return dw__fail(DW_UNSUPPORTED,
                        "a dimension has quotients nested %d deep, or is quotient number %zu: use "
                        "numbers for some symbols",
                        made.nesting, dims->quotients.count + 1);
    DW_RETURN_IF_FAILED(DW_PUSH(&dims->quotients, made));
    *factor = (uint16_t)(FIRST_QUOTIENT + dims->quotients.count - 1);
    return DW_OK;
}

static int64_t common_divisor(int64_t a, int64_t b) {
    while (b != 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a < 0 ? -a : a;
}

/* ceil(a / divisor) for divisor > 0; a may be negative */
static int64_t ceil_of(int64_t a, int64_t divisor) { return a / divisor + (a % divisor > 0); }

/* Divides the terms and the divisor by their greatest common factor. */
static void cancel_factor(polynomial *dividend, int64_t *divisor) {
    int64_t factor = *divisor;
    for (uint32_t i = 0; i < dividend->count; i++)
        factor = common_divisor(factor, dividend->terms[i].coefficient);
    for (uint32_t i = 0; i < dividend->count; i++) dividend->terms[i].coefficient /= factor;
    *divisor /= factor;
}

static bool is_quotient(const polynomial *p) {
    const term *only = &p->terms[0];
    return p->count == 1 && only->degree == 1 && only->coefficient == 1 &&
           only->symbols[0] >= FIRST_QUOTIENT;
}

static dw_status ceil_divide(struct dw__dims *dims, const term *terms, uint32_t count,
                             int64_t divisor, dw_dim *out) {
    polynomial whole, rest; /* the result is whole + ceil(rest / divisor) */
    whole.count = rest.count = 0;
    for (uint32_t i = 0; i < count; i++) {
        term t = terms[i];
        if (t.coefficient % divisor == 0) {
            t.coefficient /= divisor;
            DW_RETURN_IF_FAILED(add_term(&whole, &t));
        } else {
            rest.terms[rest.count++] = t; /* in order already */
        }
    }
    cancel_factor(&rest, &divisor);
    while (is_quotient(&rest)) { /* ceil(ceil(3*B/2)/3) is ceil(3*B/6), which is ceil(B/2) */
        const quotient inner = dims->quotients.items[rest.terms[0].symbols[0] - FIRST_QUOTIENT];
        const stored *entry = dims->polynomials.items[-1 - inner.dividend];
        if (__builtin_mul_overflow(divisor, inner.divisor, &divisor)) return overflow();
        rest.count = entry->count;
        memcpy(rest.terms, entry->terms, entry->count * sizeof(term));
        cancel_factor(&rest, &divisor);
    }
    term last = {.coefficient = 0};
    if (rest.count == 1 && rest.terms[0].degree == 0) {
        last.coefficient = ceil_of(rest.terms[0].coefficient, divisor);
    } else if (rest.count > 0) {
        dw_dim dividend;
        DW_RETURN_IF_FAILED(intern(dims, rest.terms, rest.count, &dividend));
        last.coefficient = last.degree = 1;
        DW_RETURN_IF_FAILED(find_or_add_quotient(dims, dividend, divisor, &last.symbols[0]));
    }
    DW_RETURN_IF_FAILED(add_term(&whole, &last));
    return intern(dims, whole.terms, whole.count, out);
}

dw_status dw__dim_ceil_div(dw_graph *graph, dw_dim a, int64_t divisor, dw_dim *out) {
    DW_RETURN_IF_FAILED(check_operands(graph, a, a));
    if (divisor <= 0)
        return dw__fail(DW_SHAPE, "the dim %s is divided by %lld; expected a positive number",
                        dw__dim_words(graph, a).text, (long long)divisor);
    term number;
    uint32_t count;
    const term *terms = terms_of(graph->dims, a, &number, &count);
    return ceil_divide(graph->dims, terms, count, divisor, out);
}

/* Returns false if a number exceeds 63 bits. */
static bool evaluate(const struct dw__dims *dims, dw_dim dim, const int64_t *sizes, int64_t *sum) {
    term number;
    uint32_t count;
    const term *terms = terms_of(dims, dim, &number, &count);
    bool over = false;
    *sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t product = terms[i].coefficient;
        for (int k = 0; k < terms[i].degree; k++) {
            const int at = terms[i].symbols[k];
            int64_t factor;
            if (at < FIRST_QUOTIENT) {
                factor = sizes[at];
            } else {
                const quotient *q = &dims->quotients.items[at - FIRST_QUOTIENT];
                over |= !evaluate(dims, q->dividend, sizes, &factor);
                factor = ceil_of(factor, q->divisor);
            }
            over |= __builtin_mul_overflow(product, factor, &product);
        }
        over |= __builtin_add_overflow(*sum, product, sum);
    }
    return !over;
}

dw_status dw_dim_eval(const dw_graph *graph, dw_dim dim, const int64_t *sizes, int64_t *value) {
    const int64_t largest = INT64_C(1) << 62;
    DW_RETURN_IF_FAILED(check_operands(graph, dim, dim));
    if (dim < 0 && !sizes)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the dim %s has symbols, but the symbol sizes are NULL",
                        dw__dim_words(graph, dim).text);
    int64_t sum;
    const bool over = !evaluate(graph->dims, dim, sizes, &sum);
    if (over || sum < 0 || sum > largest)
        return dw__fail(DW_SHAPE, "at these symbol sizes the dim %s is %s; expected 0 to 2^62",
                        dw__dim_words(graph, dim).text, over || sum > 0 ? "larger" : "negative");
    *value = sum;
    return DW_OK;
}

/* ---- text ---------------------------------------------------------------------------------- */

typedef struct writer {
    char *buffer;
    size_t bytes, length;
} writer;

DW_PRINTF(2, 3) static void write_text(writer *out, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    bool room = out->length < out->bytes;
    int length = vsnprintf(room ? out->buffer + out->length : NULL,
                           room ? out->bytes - out->length : 0, format, arguments);
    va_end(arguments);
    if (length > 0) out->length += (size_t)length;
}

static void write_terms(writer *out, const struct dw__dims *dims, const stored *entry);

static void write_factor(writer *out, const struct dw__dims *dims, uint16_t factor) {
    if (factor < FIRST_QUOTIENT) {
        write_text(out, "%s", dims->symbols.items[factor]);
        return;
    }
    const quotient *q = &dims->quotients.items[factor - FIRST_QUOTIENT];
    const stored *dividend = dims->polynomials.items[-1 - q->dividend];
    const bool several = dividend->count > 1;
    write_text(out, "ceil(%s", several ? "(" : "");
    write_terms(out, dims, dividend);
    write_text(out, "%s/%lld)", several ? ")" : "", (long long)q->divisor);
}

static void write_term(writer *out, const struct dw__dims *dims, const term *written, bool first) {
    uint64_t magnitude =
        written->coefficient < 0 ? -(uint64_t)written->coefficient : (uint64_t)written->coefficient;
    bool negative = written->coefficient < 0;
    write_text(out, "%s", first ? (negative ? "-" : "") : (negative ? " - " : " + "));
    bool show_number = magnitude != 1 || written->degree == 0;
    if (show_number) write_text(out, "%llu", (unsigned long long)magnitude);
    for (int k = 0; k < written->degree; k++) {
        write_text(out, "%s", k > 0 || show_number ? "*" : "");
        write_factor(out, dims, written->symbols[k]);
    }
}

static void write_terms(writer *out, const struct dw__dims *dims, const stored *entry) {
    for (uint32_t i = 0; i < entry->count; i++) write_term(out, dims, &entry->terms[i], i == 0);
}

size_t dw_dim_text(const dw_graph *graph, dw_dim dim, char *buffer, size_t bytes) {
    writer out = {buffer, bytes, 0};
    if (bytes > 0) buffer[0] = '\0';
    if (dim >= 0) {
        write_text(&out, "%lld", (long long)dim);
    } else if (!dw__dim_exists(graph, dim)) {
        write_text(&out, "?");
    } else {
        write_terms(&out, graph->dims, graph->dims->polynomials.items[-1 - dim]);
    }
    return out.length;
}

dw__words dw__dim_words(const dw_graph *graph, dw_dim dim) {
    dw__words words;
    dw_dim_text(graph, dim, words.text, sizeof words.text);
    return words;
}

dw__words dw__shape_words(const dw_graph *graph, int rank, const dw_dim *shape) {
    dw__words words;
    writer out = {words.text, sizeof words.text, 0};
    write_text(&out, "[");
    for (int i = 0; i < rank; i++) {
        char text[TEXT_BYTES];
        dw_dim_text(graph, shape[i], text, sizeof text);
        write_text(&out, "%s%s", i > 0 ? ", " : "", text);
    }
    write_text(&out, "]");
    return words;
}

/* ---- parsing ------------------------------------------------------------------------------- */

typedef struct reader {
    struct dw__dims *dims;
    const char *text, *at;
    int nesting; /* of quotients around `at` */
} reader;

static void skip_spaces(reader *in) {
    while (*in->at == ' ') in->at++;
}

static dw_status malformed(const reader *in, const char *expected) {
    return dw__fail(DW_PARSE, "dim \"%.200s\": expected %s at byte %zu, as in \"B*S + 1\"",
                    in->text, expected, (size_t)(in->at - in->text) + 1);
}

static dw_status read_number(reader *in, int64_t *number) {
    *number = 0;
    for (; isdigit((unsigned char)*in->at); in->at++)
        if (__builtin_mul_overflow(*number, 10, number) ||
            __builtin_add_overflow(*number, *in->at - '0', number))
            return overflow();
    return DW_OK;
}

static dw_status read_sum(reader *in, polynomial *sum);

/* "ceil(B*S/32)", "ceil((B + S)/32)" */
static dw_status read_quotient(reader *in, polynomial *made) {
    polynomial dividend;
    int64_t divisor = 0;
    dw_dim dim;
    term number;
    dividend.count = 0;
    in->at += strlen("ceil(");
    if (++in->nesting > MAX_NESTING)
        return dw__fail(DW_UNSUPPORTED, "dim \"%.200s\": quotients are nested more than %d deep",
                        in->text, MAX_NESTING);
    skip_spaces(in);
    const bool several = *in->at == '(';
    if (several) in->at++;
    DW_RETURN_IF_FAILED(read_sum(in, &dividend));
    if (several && *in->at != ')') return malformed(in, ")");
    if (several) in->at++;
    skip_spaces(in);
    if (*in->at != '/') return malformed(in, "/");
    in->at++;
    skip_spaces(in);
    DW_RETURN_IF_FAILED(read_number(in, &divisor));
    if (divisor == 0) return malformed(in, "a positive number");
    skip_spaces(in);
    if (*in->at != ')') return malformed(in, ")");
    in->at++;
    in->nesting--;
    DW_RETURN_IF_FAILED(ceil_divide(in->dims, dividend.terms, dividend.count, divisor, &dim));
    const term *terms = terms_of(in->dims, dim, &number, &made->count);
    memcpy(made->terms, terms, made->count * sizeof(term));
    return DW_OK;
}

static dw_status read_factor(reader *in, polynomial *factor) {
    skip_spaces(in);
    term single = {.coefficient = 1};
    size_t length = symbol_length(in->at);
    if (strncmp(in->at, "ceil(", 5) == 0) return read_quotient(in, factor);
    factor->count = 0;
    if (length > 0) {
        single.degree = 1;
        DW_RETURN_IF_FAILED(find_or_add_symbol(in->dims, in->at, length, &single.symbols[0]));
        in->at += length;
    } else if (isdigit((unsigned char)*in->at)) {
        DW_RETURN_IF_FAILED(read_number(in, &single.coefficient));
    } else {
        return malformed(in, "a number or a symbol");
    }
    return add_term(factor, &single);
}

/* Reads a product and adds it to the sum. */
static dw_status read_product(reader *in, int sign, polynomial *sum) {
    polynomial product = {.count = 1}, factor, left;
    product.terms[0] = (term){.coefficient = sign};
    do {
        DW_RETURN_IF_FAILED(read_factor(in, &factor));
        left = product;
        product.count = 0;
        for (uint32_t i = 0; i < left.count; i++)
            DW_RETURN_IF_FAILED(add_scaled(&product, &left.terms[i], factor.terms, factor.count));
        skip_spaces(in);
    } while (*in->at == '*' && in->at++);
    for (uint32_t i = 0; i < product.count; i++)
        DW_RETURN_IF_FAILED(add_term(sum, &product.terms[i]));
    return DW_OK;
}

/* Ends at the first character that does not go on with the sum. */
static dw_status read_sum(reader *in, polynomial *sum) {
    skip_spaces(in);
    bool negative = *in->at == '-';
    if (negative) in->at++;
    for (;;) {
        DW_RETURN_IF_FAILED(read_product(in, negative ? -1 : 1, sum));
        if (*in->at != '+' && *in->at != '-') return DW_OK;
        negative = *in->at++ == '-';
    }
}

dw_status dw_dim_parse(dw_graph *graph, const char *text, dw_dim *dim) {
    struct dw__dims *dims = graph->dims;
    if (!text) return dw__fail(DW_INVALID_ARGUMENT, "the text of a dim is NULL");
    size_t symbols_before = dims->symbols.count;
    reader in = {dims, text, text, 0};
    polynomial sum;
    sum.count = 0;
    dw_status status = read_sum(&in, &sum);
    if (status == DW_OK && *in.at != '\0') status = malformed(&in, "+, - or *");
    if (status == DW_OK) status = intern(dims, sum.terms, sum.count, dim);
    if (status != DW_OK)
        dims->symbols.count = symbols_before; /* no dim of the caller refers to them */
    return status;
}

/* ---- from graph to graph ------------------------------------------------------------------- */

dw_status dw__import_symbols(dw_graph *to, const dw_graph *from) {
    for (size_t i = 0; i < from->dims->symbols.count; i++) {
        uint16_t index;
        const char *name = from->dims->symbols.items[i];
        DW_RETURN_IF_FAILED(find_or_add_symbol(to->dims, name, strlen(name), &index));
    }
    return DW_OK;
}

static dw_status import_factor(dw_graph *to, const dw_graph *from, uint16_t factor, dw_dim *out) {
    if (factor < FIRST_QUOTIENT) {
        const char *name = from->dims->symbols.items[factor];
        term symbol = {.coefficient = 1, .degree = 1};
        DW_RETURN_IF_FAILED(find_or_add_symbol(to->dims, name, strlen(name), &symbol.symbols[0]));
        return intern(to->dims, &symbol, 1, out);
    }
    const quotient q = from->dims->quotients.items[factor - FIRST_QUOTIENT];
    dw_dim dividend;
    DW_RETURN_IF_FAILED(dw__import_dim(to, from, q.dividend, &dividend));
    return dw__dim_ceil_div(to, dividend, q.divisor, out);
}

dw_status dw__import_dim(dw_graph *to, const dw_graph *from, dw_dim dim, dw_dim *out) {
    if (dim >= 0) {
        *out = dim;
        return DW_OK;
    }
    DW_RETURN_IF_FAILED(check_operands(from, dim, dim));
    const stored *entry = from->dims->polynomials.items[-1 - dim];
    polynomial sum;
    sum.count = 0;
    for (uint32_t i = 0; i < entry->count; i++) {
        polynomial product = {.count = 1}, left;
        product.terms[0] = (term){.coefficient = entry->terms[i].coefficient};
        for (int k = 0; k < entry->terms[i].degree; k++) {
            dw_dim factor;
            term number;
            uint32_t count;
            DW_RETURN_IF_FAILED(import_factor(to, from, entry->terms[i].symbols[k], &factor));
            const term *terms = terms_of(to->dims, factor, &number, &count);
            left = product;
            product.count = 0;
            for (uint32_t j = 0; j < left.count; j++)
                DW_RETURN_IF_FAILED(add_scaled(&product, &left.terms[j], terms, count));
        }
        for (uint32_t j = 0; j < product.count; j++)
            DW_RETURN_IF_FAILED(add_term(&sum, &product.terms[j]));
    }
    return intern(to->dims, sum.terms, sum.count, out);
}
