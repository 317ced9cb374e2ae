/* Inlines device functions. The registers and variables of a function exist once per kernel, however often it is
 * called: without recursion, no lane is in it twice. Its parameters and results are the .param variables of the
 * caller, and "ret" becomes a branch to the instruction after the call.
 */
#include "emulator/inline.h"
#include "emulator/ptx_parse.h"
#include <stdio.h>
#include <string.h>

#define MOST_INSTRUCTIONS ((size_t)1 << 20) /* of a kernel with all functions that it calls */
#define MOST_CALLS 64                       /* depth of nested calls */

/* A called function and the index of its first register in the kernel. */
typedef struct part {
    const dw__ptx_function *function;
    uint32_t first_register;
} part;

typedef struct inliner {
    const dw__ptx_module *module;
    const dw__ptx_function *kernel;
    dw__ptx_function *made;
    struct {
        part *items;
        size_t count, capacity;
    } parts;
    const dw__ptx_function *stack[MOST_CALLS]; /* functions whose bodies are being inlined */
    int depth;
} inliner;

/* One call: the variables that replace the function's parameters and results. */
typedef struct frame {
    const dw__ptx_function *function;
    uint32_t first_register;
    const dw__ptx_operand *arguments, *results; /* NULL for the kernel itself */
} frame;

static bool is_call(const dw__ptx_instruction *in) { return strcmp(in->opcode, "call") == 0; }

static dw_status fail_at(const inliner *p, const dw__ptx_instruction *in, dw_status status,
                         const char *format, const char *name) {
    char what[400];
    snprintf(what, sizeof what, format, name);
    return dw__fail(status, "%s, kernel %s, PTX line %d: %s: %s", p->module->name, p->kernel->name,
                    in->line, in->spelling, what);
}

/* Returns the definition if the module has one, else a declaration. */
static const dw__ptx_function *find_function(const dw__ptx_module *module, const char *name) {
    const dw__ptx_function *found = NULL;
    for (size_t i = 0; i < module->functions.count; i++) {
        const dw__ptx_function *f = module->functions.items[i];
        if (strcmp(f->name, name) == 0 && (!found || found->declared_only)) found = f;
    }
    return found;
}

/* ---- calls --------------------------------------------------------------------------------- */

/* Reads "call (results), function, (arguments)"; each list is optional. */
static const dw__ptx_operand no_operands = {.kind = DW__PTX_VECTOR};
static dw_status read_call(const inliner *p, const dw__ptx_instruction *in,
                           const dw__ptx_operand **results, const dw__ptx_operand **callee,
                           const dw__ptx_operand **arguments) {
    int at = 0;
    *results = *arguments = &no_operands;
    if (at < in->operand_count && in->operands[at].kind == DW__PTX_VECTOR)
        *results = &in->operands[at++];
    if (at >= in->operand_count)
        return fail_at(p, in, DW_PARSE, "the call names no function%s", "");
    *callee = &in->operands[at++];
    if (at < in->operand_count && in->operands[at].kind == DW__PTX_VECTOR)
        *arguments = &in->operands[at++];
    if ((*callee)->kind != DW__PTX_FUNCTION || at < in->operand_count)
        return fail_at(p, in, DW_UNSUPPORTED,
                       "the emulator does not support calls through an address%s", "");
    return DW_OK;
}

/* Checks that a call passes as many values as the function has, each a .param variable of sufficient size. */
static dw_status check_list(const inliner *p, const dw__ptx_instruction *in,
                            const dw__ptx_operand *list, dw__ptx_variable *const *wanted,
                            size_t count, const char *name) {
    if ((size_t)list->count != count)
        return fail_at(p, in, DW_PARSE,
                       "wrong number of arguments or results for function \"%.300s\"", name);
    for (size_t i = 0; i < count; i++) {
        const dw__ptx_operand *given = &list->items[i];
        if (given->kind != DW__PTX_VARIABLE || given->variable->space != DW__PTX_PARAM ||
            given->integer != 0)
            return fail_at(p, in, DW_UNSUPPORTED,
                           "an argument of function \"%.300s\" is no .param variable: not "
                           "supported by the emulator",
                           name);
        if (given->variable->bytes < wanted[i]->bytes)
            return fail_at(p, in, DW_PARSE, "an argument of function \"%.300s\" is too narrow",
                           name);
    }
    return DW_OK;
}

/* ---- operands ------------------------------------------------------------------------------ */

static const dw__ptx_variable *replacement_of(const frame *f, const dw__ptx_variable *variable) {
    if (!f->arguments) return variable;
    for (size_t i = 0; i < f->function->parameters.count; i++)
        if (f->function->parameters.items[i] == variable) return f->arguments->items[i].variable;
    for (size_t i = 0; i < f->function->results.count; i++)
        if (f->function->results.items[i] == variable) return f->results->items[i].variable;
    return variable;
}

static dw_status copy_operand(inliner *p, const frame *f, const dw__ptx_operand *from,
                              dw__ptx_operand *to) {
    *to = *from;
    if (from->kind == DW__PTX_REGISTER) to->number += f->first_register;
    if (from->kind == DW__PTX_VARIABLE) to->variable = replacement_of(f, from->variable);
    if (from->count > 0) {
        dw__ptx_operand *items =
            dw__arena_alloc(p->module->arena, (size_t)from->count * sizeof *items);
        if (!items) return dw__fail_memory("operands of a PTX module", 0);
        for (int i = 0; i < from->count; i++)
            DW_RETURN_IF_FAILED(copy_operand(p, f, &from->items[i], &items[i]));
        to->items = items;
    }
    if (from->also) {
        dw__ptx_operand *also = dw__arena_alloc(p->module->arena, sizeof *also);
        if (!also) return dw__fail_memory("operands of a PTX module", 0);
        DW_RETURN_IF_FAILED(copy_operand(p, f, from->also, also));
        to->also = also;
    }
    return DW_OK;
}

/* Resolves a function's own labels, after its instructions have their new positions. */
static void aim(dw__ptx_operand *operand, const uint32_t *places) {
    if (operand->kind == DW__PTX_LABEL) operand->number = places[operand->number];
    for (int i = 0; i < operand->count; i++) aim(&operand->items[i], places);
}

static dw_status push_branch(inliner *p, const dw__ptx_instruction *as, uint32_t guard,
                             bool negated, uint32_t **target) {
    dw__ptx_instruction made = *as;
    dw__ptx_operand *label = dw__arena_alloc(p->module->arena, sizeof *label);
    if (!label) return dw__fail_memory("a call", sizeof *label);
    *label = (dw__ptx_operand){.kind = DW__PTX_LABEL, .name = "the end of a call"};
    made.opcode = "bra";
    made.modifiers = NULL, made.modifier_count = 0;
    made.operands = label, made.operand_count = 1;
    made.guard = guard, made.guard_negated = negated;
    *target = &label->number;
    return DW_PUSH(&p->made->code, made);
}

/* ---- bodies -------------------------------------------------------------------------------- */

/* Adds the registers and variables of a function at its first call. */
static dw_status add_part(inliner *p, const dw__ptx_function *function, uint32_t *first_register) {
    for (size_t i = 0; i < p->parts.count; i++) {
        if (p->parts.items[i].function != function) continue;
        *first_register = p->parts.items[i].first_register;
        return DW_OK;
    }
    part made = {function, (uint32_t)p->made->registers.count};
    *first_register = made.first_register;
    DW_RETURN_IF_FAILED(DW_PUSH(&p->parts, made));
    for (size_t i = 0; i < function->registers.count; i++)
        DW_RETURN_IF_FAILED(DW_PUSH(&p->made->registers, function->registers.items[i]));
    for (size_t i = 0; i < function->variables.count; i++)
        DW_RETURN_IF_FAILED(DW_PUSH(&p->made->variables, function->variables.items[i]));
    return DW_OK;
}

static dw_status put_body(inliner *p, const frame *f);

static dw_status put_call(inliner *p, const frame *f, const dw__ptx_instruction *in) {
    const dw__ptx_operand *results, *callee, *arguments;
    dw__ptx_operand given[2] = {{0}, {0}};
    uint32_t *past = NULL;
    frame inner = {0};
    DW_RETURN_IF_FAILED(read_call(p, in, &results, &callee, &arguments));
    inner.function = find_function(p->module, callee->name);
    if (!inner.function || inner.function->declared_only || inner.function->entry)
        return fail_at(p, in, DW_UNSUPPORTED,
                       "function \"%.300s\" is not defined in this module, and the "
                       "emulator does not provide it",
                       callee->name);
    for (int i = 0; i < p->depth; i++)
        if (p->stack[i] == inner.function)
            return fail_at(p, in, DW_UNSUPPORTED,
                           "function \"%.300s\" calls itself: recursion is not supported by the "
                           "emulator",
                           callee->name);
    if (p->depth == MOST_CALLS)
        return fail_at(p, in, DW_UNSUPPORTED, "function \"%.300s\": calls too deep", callee->name);
    DW_RETURN_IF_FAILED(check_list(p, in, results, inner.function->results.items,
                                   inner.function->results.count, callee->name));
    DW_RETURN_IF_FAILED(check_list(p, in, arguments, inner.function->parameters.items,
                                   inner.function->parameters.count, callee->name));
    DW_RETURN_IF_FAILED(copy_operand(p, f, results, &given[0]));
    DW_RETURN_IF_FAILED(copy_operand(p, f, arguments, &given[1]));
    inner.results = &given[0], inner.arguments = &given[1];
    DW_RETURN_IF_FAILED(add_part(p, inner.function, &inner.first_register));
    if (in->guard != DW__PTX_NO_GUARD)
        DW_RETURN_IF_FAILED(
            push_branch(p, in, in->guard + f->first_register, !in->guard_negated, &past));
    p->stack[p->depth++] = inner.function;
    DW_RETURN_IF_FAILED(put_body(p, &inner));
    p->depth--;
    if (past) *past = (uint32_t)p->made->code.count;
    return DW_OK;
}

/* Calls of system functions remain instructions. */
static bool is_system_call(const inliner *p, const dw__ptx_instruction *in) {
    static const char *const names[] = {"vprintf", "__assertfail", "malloc", "free"};
    for (int i = 0; i < in->operand_count && is_call(in); i++) {
        if (in->operands[i].kind != DW__PTX_FUNCTION) continue;
        const dw__ptx_function *f = find_function(p->module, in->operands[i].name);
        for (size_t k = 0; k < DW_COUNT(names) && (!f || f->declared_only); k++)
            if (strcmp(names[k], in->operands[i].name) == 0) return true;
    }
    return false;
}

static bool is_kernels(const inliner *p, const dw__ptx_variable *variable) {
    for (size_t i = 0; i < p->kernel->parameters.count; i++)
        if (p->kernel->parameters.items[i] == variable) return true;
    return false;
}

/* Rejects accesses to parameters by address: they would reach the kernel's own parameters. */
static dw_status check_parameters(const inliner *p, const frame *f, const dw__ptx_instruction *in) {
    bool param = false;
    for (int i = 0; i < in->modifier_count; i++)
        param = param || strncmp(in->modifiers[i], "param", 5) == 0;
    for (int i = 0; i < in->operand_count; i++) {
        const dw__ptx_operand *o = &in->operands[i];
        const bool address = o->kind == DW__PTX_ADDRESS;
        const bool by_register = address && param && o->items[0].kind != DW__PTX_VARIABLE;
        const bool taken = o->kind == DW__PTX_VARIABLE && o->variable->space == DW__PTX_PARAM;
        if ((f->arguments && by_register) || (taken && !is_kernels(p, o->variable)))
            return fail_at(p, in, DW_UNSUPPORTED,
                           "the address of a parameter of function \"%.300s\" is not supported by "
                           "the emulator",
                           f->function->name);
    }
    return DW_OK;
}

static dw_status put_body(inliner *p, const frame *f) {
    const size_t count = f->function->code.count;
    dw_status status = DW_OK;
    struct {
        uint32_t **items;
        size_t count, capacity;
    } ends = {0};
    /* New positions of the function's instructions. */
    uint32_t *places = dw__malloc((count + 1) * sizeof *places);
    struct {
        uint32_t *items;
        size_t count, capacity;
    } own = {0}; /* instructions whose labels belong to the function */
    if (!places) DW_TRY(dw__fail_memory("a call", count * sizeof *places));
    for (size_t i = 0; i < count; i++) {
        const dw__ptx_instruction *in = &f->function->code.items[i];
        places[i] = (uint32_t)p->made->code.count;
        if (p->made->code.count > MOST_INSTRUCTIONS)
            DW_TRY(fail_at(p, in, DW_UNSUPPORTED,
                           "too much code after inlining all calls: more than a million "
                           "instructions%s",
                           ""));
        if (is_call(in) && !is_system_call(p, in)) {
            DW_TRY(put_call(p, f, in));
            continue;
        }
        if (f->arguments && strcmp(in->opcode, "ret") == 0) {
            uint32_t *target = NULL;
            uint32_t guard =
                in->guard == DW__PTX_NO_GUARD ? in->guard : in->guard + f->first_register;
            DW_TRY(push_branch(p, in, guard, in->guard_negated, &target));
            DW_TRY(DW_PUSH(&ends, target));
            continue;
        }
        if (!is_call(in)) DW_TRY(check_parameters(p, f, in));
        dw__ptx_instruction made = *in;
        if (made.guard != DW__PTX_NO_GUARD) made.guard += f->first_register;
        made.operands = dw__arena_alloc(p->module->arena,
                                        (size_t)(in->operand_count + 1) * sizeof *made.operands);
        if (!made.operands) DW_TRY(dw__fail_memory("a call", 0));
        for (int k = 0; k < in->operand_count; k++)
            DW_TRY(copy_operand(p, f, &in->operands[k], &made.operands[k]));
        DW_TRY(DW_PUSH(&own, (uint32_t)p->made->code.count));
        DW_TRY(DW_PUSH(&p->made->code, made));
    }
    places[count] = (uint32_t)p->made->code.count;
    for (size_t i = 0; i < own.count; i++) {
        dw__ptx_instruction *in = &p->made->code.items[own.items[i]];
        for (int k = 0; k < in->operand_count; k++) aim(&in->operands[k], places);
    }
    for (size_t i = 0; i < ends.count; i++) *ends.items[i] = places[count];
cleanup:
    dw__free(places);
    dw__free(own.items);
    dw__free(ends.items);
    return status;
}

/* ---- kernels ------------------------------------------------------------------------------- */

static bool calls_functions(const inliner *p) {
    for (size_t i = 0; i < p->kernel->code.count; i++)
        if (is_call(&p->kernel->code.items[i]) && !is_system_call(p, &p->kernel->code.items[i]))
            return true;
    return false;
}

dw_status dw__emu_inline(const dw__ptx_module *module, const dw__ptx_function *kernel,
                         const dw__ptx_function **out) {
    inliner p = {.module = module, .kernel = kernel};
    dw_status status = DW_OK;
    *out = kernel;
    if (!calls_functions(&p)) return DW_OK;
    dw__ptx_function made = *kernel;
    memset(&made.variables, 0, sizeof made.variables);
    memset(&made.registers, 0, sizeof made.registers);
    memset(&made.code, 0, sizeof made.code);
    p.made = &made;
    frame f = {.function = kernel};
    DW_TRY(add_part(&p, kernel, &f.first_register));
    DW_TRY(put_body(&p, &f));
    dw__ptx_function *kept = dw__ptx_copy(module->arena, &made, sizeof made);
    if (!kept) DW_TRY(dw__fail_memory("a kernel", sizeof made));
    kept->registers.items = dw__ptx_copy(module->arena, made.registers.items,
                                         made.registers.count * sizeof *made.registers.items);
    kept->variables.items = dw__ptx_copy(module->arena, made.variables.items,
                                         made.variables.count * sizeof *made.variables.items);
    kept->code.items =
        dw__ptx_copy(module->arena, made.code.items, made.code.count * sizeof *made.code.items);
    if (!kept->registers.items || !kept->variables.items || !kept->code.items)
        DW_TRY(dw__fail_memory("a kernel", made.code.count * sizeof *made.code.items));
    *out = kept;
cleanup:
    dw__free(made.registers.items);
    dw__free(made.variables.items);
    dw__free(made.code.items);
    dw__free(p.parts.items);
    return status;
}
