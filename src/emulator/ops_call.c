/* Calls that the system handles: printf, assert, malloc and free of device code (CUDA C++ Programming Guide,
 * "Formatted Output", "Assertion", "Dynamic Global Memory Allocation"). All other functions have been inlined: see
 * inline.h.
 */
#include "emulator/translate.h"
#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define MOST_ARGUMENTS 5
#define LONGEST_TEXT 65536 /* of a format, or of a string argument */

typedef struct call {
    uint32_t arguments[MOST_ARGUMENTS]; /* places of the arguments' local addresses */
    uint32_t result;
    bool has_result;
} call;

/* ---- what is passed ------------------------------------------------------------------------ */

static bool argument(dw__emu_warp *w, const call *k, int index, uint32_t lane, uint32_t bytes,
                     uint64_t *value) {
    const uint64_t address = DW__REGISTER(w, uint64_t, k->arguments[index])[lane];
    const void *at = dw__emu_reach(w, DW__PTX_LOCAL, (int)lane, address, bytes, bytes, DW__READ);
    *value = 0;
    if (at) memcpy(value, at, bytes);
    return at != NULL;
}

static bool answer(dw__emu_warp *w, const call *k, uint32_t lane, uint32_t bytes, uint64_t value) {
    if (!k->has_result) return true;
    const uint64_t address = DW__REGISTER(w, uint64_t, k->result)[lane];
    void *at = dw__emu_reach(w, DW__PTX_LOCAL, (int)lane, address, bytes, bytes, DW__WRITE);
    if (at) memcpy(at, &value, bytes);
    return at != NULL;
}

/* Appends the string at a generic address. Returns false after a finding, or if memory is out. */
static bool read_text(dw__emu_warp *w, uint32_t lane, uint64_t address, dw__text *text) {
    for (size_t i = 0; i < LONGEST_TEXT; i++) {
        const char *at = dw__emu_reach(w, DW__PTX_REG, (int)lane, address + i, 1, 1, DW__READ);
        if (!at) return false;
        if (*at == '\0') return dw__text_append(text, "", 0) == DW_OK;
        if (dw__text_append(text, at, 1) != DW_OK) return false;
    }
    dw__emu_found(w, (int)lane, DW__FOUND_INVALID, "a string of more than %d characters",
                  LONGEST_TEXT);
    return false;
}

/* ---- printf -------------------------------------------------------------------------------- */

/* One printf by one lane. */
typedef struct printing {
    dw__emu_warp *w;
    uint32_t lane;
    /* Address of the next value; a value has 4 or 8 bytes and is aligned to its size. */
    uint64_t next;
    int values;
    dw__text out;
} printing;

static bool next_value(printing *p, uint32_t bytes, uint64_t *value) {
    p->next = (p->next + bytes - 1) / bytes * bytes;
    const void *at =
        dw__emu_reach(p->w, DW__PTX_REG, (int)p->lane, p->next, bytes, bytes, DW__READ);
    *value = 0;
    if (!at) return false;
    memcpy(value, at, bytes);
    p->next += bytes;
    p->values++;
    return true;
}

/* A conversion specification: "%-8.3lf" becomes a host format for a value of known type. */
typedef struct specification {
    char flags[8];
    int width, precision; /* -1: none */
    bool wide;            /* 8 bytes: l, ll, j, z, t */
    int narrow;           /* hh: 1, h: 2, else 0 */
    char conversion;
} specification;

static bool take_number(printing *p, const char **at, int *number) {
    uint64_t value;
    if (**at == '*') {
        if (!next_value(p, 4, &value)) return false;
        *number = (int)(uint32_t)value;
        ++*at;
        return true;
    }
    for (*number = 0; isdigit((unsigned char)**at); ++*at)
        *number = *number < 10000 ? 10 * *number + (**at - '0') : *number;
    return true;
}

static bool take_specification(printing *p, const char **at, specification *s) {
    *s = (specification){.width = -1, .precision = -1};
    for (size_t n = 0; **at && strchr("-+ #0", **at); ++*at)
        if (n + 1 < sizeof s->flags && !strchr(s->flags, **at)) s->flags[n++] = **at;
    if ((isdigit((unsigned char)**at) || **at == '*') && !take_number(p, at, &s->width))
        return false;
    if (s->width < -1) { /* a negative "*" width aligns to the left */
        s->width = -(s->width + 1) < 10000 ? -s->width : 10000;
        if (!strchr(s->flags, '-')) s->flags[strlen(s->flags)] = '-';
    }
    if (**at == '.') {
        ++*at;
        if (!take_number(p, at, &s->precision)) return false;
    }
    if (s->width > 10000) s->width = 10000;
    if (s->precision > 10000) s->precision = 10000;
    for (; **at && strchr("hljztL", **at); ++*at) {
        if (**at == 'h') s->narrow = s->narrow ? 1 : 2;
        if (strchr("ljzt", **at)) s->wide = true;
    }
    s->conversion = **at;
    if (**at) ++*at;
    return true;
}

static bool print_specification(printing *p, const specification *s) {
    char format[64], width[16] = "", precision[16] = "";
    uint64_t bits;
    double real;
    dw__text text = {0};
    if (s->width >= 0) snprintf(width, sizeof width, "%d", s->width);
    if (s->precision >= 0) snprintf(precision, sizeof precision, ".%d", s->precision);
    const bool whole = s->conversion && strchr("diouxX", s->conversion);
    snprintf(format, sizeof format, "%%%s%s%s%s%c", s->flags, width, precision, whole ? "ll" : "",
             s->conversion ? s->conversion : '%');
    switch (s->conversion) {
    case 'd':
    case 'i':
        if (!next_value(p, s->wide ? 8 : 4, &bits)) return false;
        const int spare = s->wide ? 0 : s->narrow ? 64 - 8 * s->narrow : 32;
        return dw__text_printf(&p->out, format, (long long)((int64_t)(bits << spare) >> spare)) ==
               DW_OK;
    case 'o':
    case 'u':
    case 'x':
    case 'X':
        if (!next_value(p, s->wide ? 8 : 4, &bits)) return false;
        if (s->narrow) bits &= ((uint64_t)1 << 8 * s->narrow) - 1;
        return dw__text_printf(&p->out, format, (unsigned long long)bits) == DW_OK;
    case 'c':
        if (!next_value(p, 4, &bits)) return false;
        return dw__text_printf(&p->out, format, (int)(uint32_t)bits) == DW_OK;
    case 'p':
        if (!next_value(p, 8, &bits)) return false;
        return dw__text_printf(&p->out, format, (void *)(uintptr_t)bits) == DW_OK;
    case 'a':
    case 'A':
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G':
        if (!next_value(p, 8, &bits)) return false;
        memcpy(&real, &bits, sizeof real);
        return dw__text_printf(&p->out, format, real) == DW_OK;
    case 's': {
        if (!next_value(p, 8, &bits)) return false;
        bool good = bits == 0 ? dw__text_printf(&text, "(null)") == DW_OK
                              : read_text(p->w, p->lane, bits, &text);
        good = good && dw__text_printf(&p->out, format, text.text) == DW_OK;
        dw__text_free(&text);
        return good;
    }
    case '%': return dw__text_append(&p->out, "%", 1) == DW_OK;
    default:
        dw__emu_found(p->w, (int)p->lane, DW__FOUND_INVALID,
                      "printf with the conversion \"%%%c\", which device code does not "
                      "support",
                      isprint((unsigned char)s->conversion) ? s->conversion : '?');
        return false;
    }
}

static bool print_format(printing *p, const char *format) {
    while (*format) {
        const char *plain = format;
        while (*format && *format != '%') format++;
        if (dw__text_append(&p->out, plain, (size_t)(format - plain)) != DW_OK) return false;
        if (!*format) break;
        format++;
        specification s;
        if (!take_specification(p, &format, &s) || !print_specification(p, &s)) return false;
    }
    return true;
}

static dw__emu_next vprintf_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
    const call *k = op->detail;
    const dw__emu_grid *grid = w->cta->cluster->grid;
    dw__emu_next next = DW__NEXT;
    DW__EACH_LANE(lane, mask) {
        printing p = {.w = w, .lane = lane};
        dw__text format = {0};
        uint64_t address;
        bool good = argument(w, k, 0, lane, 8, &address) && argument(w, k, 1, lane, 8, &p.next);
        good = good && read_text(w, lane, address, &format) && print_format(&p, format.text);
        good = good && answer(w, k, lane, 4, (uint64_t)p.values);
        if (good && p.out.length > 0 && grid->print) {
            pthread_mutex_lock(&turn);
            grid->print(grid->print_context, p.out.text, p.out.length);
            pthread_mutex_unlock(&turn);
        }
        dw__text_free(&format);
        dw__text_free(&p.out);
        if (!good) next = DW__FAULT;
    }
    w->cta->cluster->progress++;
    return next;
}

/* ---- assert -------------------------------------------------------------------------------- */

/* __assertfail(assertion, file, line, function, size of a character) */
static dw__emu_next assert_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const call *k = op->detail;
    const uint32_t lane = (uint32_t)__builtin_ctz(mask);
    dw__text texts[3] = {{0}, {0}, {0}};
    static const int places[3] = {0, 1, 3};
    uint64_t address, line;
    bool good = argument(w, k, 2, lane, 4, &line);
    for (int i = 0; i < 3 && good; i++)
        good = argument(w, k, places[i], lane, 8, &address) &&
               (address == 0 ? dw__text_printf(&texts[i], "?") == DW_OK
                             : read_text(w, lane, address, &texts[i]));
    if (good)
        dw__emu_found(w, (int)lane, DW__FOUND_ASSERT, "%s:%u: %s: assertion \"%s\" failed",
                      texts[1].text, (unsigned)line, texts[2].text, texts[0].text);
    for (int i = 0; i < 3; i++) dw__text_free(&texts[i]);
    return DW__FAULT;
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Returns NULL to the kernel if memory is out, as on a GPU. */
static dw__emu_next malloc_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const call *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        uint64_t bytes;
        void *memory = NULL;
        if (!argument(w, k, 0, lane, 8, &bytes)) return DW__FAULT;
        if (bytes > 0 && bytes < (uint64_t)1 << 40 &&
            dw__emu_memory_allocate(w->cta->cluster->grid->memory, bytes, &memory) != DW_OK)
            memory = NULL;
        if (!answer(w, k, lane, 8, (uint64_t)(uintptr_t)memory)) return DW__FAULT;
    }
    w->cta->cluster->progress++;
    return DW__NEXT;
}

static dw__emu_next free_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const call *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        uint64_t address;
        if (!argument(w, k, 0, lane, 8, &address)) return DW__FAULT;
        if (!address) continue;
        if (dw__emu_memory_retire(w->cta->cluster->grid->memory, (void *)(uintptr_t)address) !=
            DW_OK) {
            dw__emu_found(w, (int)lane, DW__FOUND_INVALID, "frees %s", dw_last_error());
            return DW__FAULT;
        }
        if (w->recent.first == address) w->recent.first = w->recent.last = 0;
    }
    w->cta->cluster->progress++;
    return DW__NEXT;
}

/* ---- which is called ----------------------------------------------------------------------- */

static const struct {
    const char *name;
    dw__emu_next (*run)(dw__emu_warp *, const dw__emu_op *, uint32_t);
    int arguments, results;
    int sizes[MOST_ARGUMENTS], result_bytes;
} system_functions[] = {
    {"vprintf", vprintf_run, 2, 1, {8, 8}, 4},
    {"__assertfail", assert_run, 5, 0, {8, 8, 4, 8, 8}, 0},
    {"malloc", malloc_run, 1, 1, {8}, 8},
    {"free", free_run, 1, 0, {8}, 0},
};

static dw_status take_local(dw__emu_translator *t, const dw__ptx_operand *operand, int bytes,
                            uint32_t *place) {
    if (operand->kind != DW__PTX_VARIABLE || operand->variable->space != DW__PTX_PARAM)
        return dw__emu_malformed(t, "an argument is no .param variable");
    if (operand->variable->bytes != (uint64_t)bytes)
        return dw__emu_malformed(t, "an argument has the wrong size");
    for (size_t i = 0; i < t->function->parameters.count; i++)
        if (t->function->parameters.items[i] == operand->variable)
            return dw__emu_malformed(t, "a kernel parameter is passed without a copy");
    return dw__emu_take_source(t, operand, DW__T_B64, place);
}

static dw_status translate_call(dw__emu_translator *t) {
    const dw__ptx_instruction *in = t->in;
    const dw__ptx_operand none = {0}, *results = &none, *arguments = &none;
    call *k = dw__emu_detail(t, sizeof *k);
    int at = 0;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    (void)dw__emu_take(t, "uni");
    if (at < in->operand_count && in->operands[at].kind == DW__PTX_VECTOR)
        results = &in->operands[at++];
    if (at >= in->operand_count || in->operands[at].kind != DW__PTX_FUNCTION)
        return dw__emu_unsupported(t);
    const char *name = in->operands[at++].name;
    if (at < in->operand_count && in->operands[at].kind == DW__PTX_VECTOR)
        arguments = &in->operands[at++];
    if (at != in->operand_count) return dw__emu_unsupported(t);
    for (size_t i = 0; i < DW_COUNT(system_functions); i++) {
        if (strcmp(system_functions[i].name, name) != 0) continue;
        if (arguments->count != system_functions[i].arguments ||
            results->count > system_functions[i].results)
            return dw__emu_malformed(t, "wrong number of arguments or results");
        for (int n = 0; n < arguments->count; n++)
            DW_RETURN_IF_FAILED(take_local(t, &arguments->items[n], system_functions[i].sizes[n],
                                           &k->arguments[n]));
        k->has_result = results->count > 0;
        if (k->has_result)
            DW_RETURN_IF_FAILED(
                take_local(t, &results->items[0], system_functions[i].result_bytes, &k->result));
        DW_RETURN_IF_FAILED(dw__emu_emit(t, system_functions[i].run));
        t->op->detail = k;
        return DW_OK;
    }
    return dw__emu_unsupported(t);
}

const dw__emu_opcode dw__emu_opcodes_call[] = {
    {"call", translate_call},
    {NULL, NULL},
};
