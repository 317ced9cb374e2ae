/* Finds or compiles a variant's image, and keeps the loaded modules. */
#include "jit/jit_internal.h"
#include "jit/nvrtc.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

dw__jit_statistics dw__jit_statistics_now;

/* ---- images -------------------------------------------------------------------------------------- */

/* The version alone does not distinguish patch releases, so the size of the library counts too. */
static void identify_compiler(const dw__nvrtc *nvrtc, dw__jit_form form, char *text, size_t bytes) {
    struct stat info;
    long long size = stat(nvrtc->path, &info) == 0 ? (long long)info.st_size : 0;
    snprintf(text, bytes, "NVRTC %d.%d %lld%s", nvrtc->major, nvrtc->minor, size,
             form == DW__JIT_PTX ? " PTX" : "");
}

static dw_status compile_and_keep(const dw__jit_variant *variant, dw__jit_form form,
                                  const dw__text *expanded, const dw__jit_key *key, void **image,
                                  size_t *bytes) {
    dw__jit_statistics *now = &dw__jit_statistics_now;
    double begun = dw__seconds();
    DW_RETURN_IF_FAILED(dw__jit_compile(variant, expanded, form, NULL, image, bytes, NULL));
    atomic_fetch_add(&now->compiled, 1);
    atomic_fetch_add(&now->compile_nanoseconds, (uint64_t)(1e9 * (dw__seconds() - begun)));
    /* Without an entry, the next process compiles again, which is slower but correct. */
    if (dw__jit_cache_write(key, *image, *bytes) != DW_OK) {
        atomic_fetch_add(&now->unwritten, 1);
        dw__log(DW_LOG_WARNING, "a compiled kernel is not kept for later processes: %s",
                dw_last_error());
    }
    return DW_OK;
}

dw_status dw__jit_image(const dw__jit_variant *variant, dw__jit_form form, void **image,
                        size_t *bytes) {
    dw_status status = DW_OK;
    const dw__nvrtc *nvrtc;
    dw__text expanded = {0};
    dw__jit_key key;
    char compiler[64];
    DW_TRY(dw__nvrtc_load(&nvrtc));
    identify_compiler(nvrtc, form, compiler, sizeof compiler);
    DW_TRY(dw__jit_expand_variant(variant, &expanded));
    DW_TRY(dw__jit_key_of(variant, &expanded, compiler, &key));
    status = dw__jit_cache_read(&key, image, bytes);
    if (status == DW_OK)
        atomic_fetch_add(&dw__jit_statistics_now.cached, 1);
    else if (status != DW_OUT_OF_MEMORY)
        status = compile_and_keep(variant, form, &expanded, &key, image, bytes);

cleanup:
    dw__text_free(&expanded);
    return status;
}

/* ---- modules -------------------------------------------------------------------------------------- */

/* A module stays loaded for the life of its context. Entry points of one variant share a module. */
typedef struct loaded_module {
    struct loaded_module *next;
    uint64_t context;
    void *module;
    char name[];
} loaded_module;

static pthread_mutex_t modules_lock = PTHREAD_MUTEX_INITIALIZER;
static loaded_module *modules;

/* The first use may happen during a graph capture. */
static dw_status load_image(const dw_device *device, const void *image, const dw__text *name,
                            void **module) {
    int before = 0;
    DW_RETURN_IF_FAILED(device->capture_relax(&before));
    dw_status status = device->module_load(image, name->text, module);
    device->capture_restore(before);
    return status;
}

dw__jit_carried dw__jit_carried_now = {dw__jit_modules, dw__jit_ptx};

/* Returns whether the variant is among `files` and the driver accepts it. */
static bool load_carried(const dw_device *device, const dw__jit_file *files, const dw__text *name,
                         void **module) {
    while (files->name && strcmp(files->name, name->text) != 0) files++;
    return files->name && load_image(device, files->begin, name, module) == DW_OK;
}

/* A driver older than the build's compiler accepts none of the modules that were built; then a compiler on this machine
 * may help. The built PTX is tried first, because it needs no compiler. A driver that is too old for it rejects it
 * quickly, at its first line. */
static dw_status load_variant(const dw__jit_variant *variant, const dw__context *context,
                              const dw__text *name, void **module) {
    dw__jit_statistics *now = &dw__jit_statistics_now;
    const dw_device *device = context->device;
    void *image = NULL;
    size_t bytes = 0;
    if (!context->ptx_only && load_carried(device, dw__jit_carried_now.modules, name, module)) {
        atomic_fetch_add(&now->embedded, 1);
        return DW_OK;
    }
    if (load_carried(device, dw__jit_carried_now.ptx, name, module)) {
        atomic_fetch_add(&now->translated, 1);
        return DW_OK;
    }
    const dw__jit_form form = context->ptx_only ? DW__JIT_PTX : DW__JIT_CUBIN;
    DW_RETURN_IF_FAILED(dw__jit_image(variant, form, &image, &bytes));
    dw_status status = load_image(device, image, name, module);
    dw__free(image);
    return status;
}

static dw_status add_module(const dw__jit_variant *variant, const dw__context *context,
                            const dw__text *name, void **module) {
    dw_status status = DW_OK;
    loaded_module *entry = dw__malloc(sizeof *entry + name->length + 1);
    if (!entry) return dw__fail_memory("a loaded module", sizeof *entry + name->length + 1);
    DW_TRY(load_variant(variant, context, name, module));
    entry->context = context->id;
    entry->module = *module;
    memcpy(entry->name, name->text, name->length + 1);
    entry->next = modules;
    modules = entry;
    entry = NULL;

cleanup:
    dw__free(entry);
    return status;
}

static dw_status find_module(const dw__jit_variant *variant, const dw__context *context,
                             void **module) {
    dw_status status = DW_OK;
    dw__text name = {0};
    loaded_module *at = modules;
    DW_TRY(dw__jit_variant_name(variant, &name));
    while (at && (at->context != context->id || strcmp(at->name, name.text) != 0)) at = at->next;
    if (at)
        *module = at->module;
    else
        DW_TRY(add_module(variant, context, &name, module));

cleanup:
    dw__text_free(&name);
    return status;
}

dw_status dw__jit_load(const dw__context *context, const dw__jit_variant *variant,
                       unsigned shared_bytes, void **function) {
    const dw_device *device = context->device;
    dw_status status = DW_OK;
    void *module, *made = NULL;
    pthread_mutex_lock(&modules_lock);
    DW_TRY(find_module(variant, context, &module));
    DW_TRY(device->module_function(module, variant->entry, &made));
    if (shared_bytes > 48 * 1024)
        DW_TRY(device->function_shared(made, variant->entry, shared_bytes));
    *function = made;

cleanup:
    pthread_mutex_unlock(&modules_lock);
    return status;
}
