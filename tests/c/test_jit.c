/* Run-time compilation up to the compiler, which is a fake: assembly of sources, keys, the disk cache and its failures,
 * several threads and processes at once. */
#include "deepwell/log.h"
#include "fake/fake_gpu.h"
#include "jit/jit_internal.h"
#include "jit/nvrtc.h"
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <pthread.h>
#include <sys/stat.h>

static dw__jit_variant variant_of(int value) {
    dw__jit_variant variant = {.source = "common/attention_reference.cu",
                               .entry = "reference_attention_forward",
                               .arch = "sm_90a"};
    dw__jit_add_define(&variant, "ZEBRA", 7);
    dw__jit_add_define(&variant, "ANT", value);
    return variant;
}

/* ---- sources -------------------------------------------------------------------------------------- */

static void test_expansion(void **state) {
    (void)state;
    dw__text text = {0};
    int kernels = 0;
    for (const dw__jit_file *file = dw__jit_sources; file->name; file++) {
        size_t length = strlen(file->name);
        if (length < 3 || strcmp(file->name + length - 3, ".cu") != 0) continue;
        kernels++;
        text.length = 0;
        assert_int_equal(dw__jit_expand(file->name, &text), DW_OK);
        /* No include directive is left, so that a compiler without headers can compile it. */
        for (const char *at = text.text; (at = strstr(at, "include")); at++) {
            const char *line = at;
            while (line > text.text && line[-1] != '\n') line--;
            assert_false(line[strspn(line, " \t")] == '#');
        }
        /* Each file is included once, and the lines after it keep their numbers. */
        int files = 0;
        for (const char *at = text.text; (at = strstr(at, "#line 1 \"")); at++, files++) {
            char mark[128];
            snprintf(mark, sizeof mark, "%.*s", (int)strcspn(at, "\n"), at);
            assert_null(strstr(at + 1, mark));
        }
        assert_true(files >= 2);
    }
    assert_true(kernels >= 2);
    assert_int_equal(dw__jit_expand("common/none.cu", &text), DW_UNSUPPORTED);
    dw__text_free(&text);
}

/* The line after an include is announced with its number in its file. */
static void test_line_numbers(void **state) {
    (void)state;
    dw__text text = {0};
    const dw__jit_file *file = dw__jit_sources;
    while (strcmp(file->name, "common/attention_reference.cu") != 0) file++;
    assert_int_equal(dw__jit_expand(file->name, &text), DW_OK);
    int number = 1, checked = 0;
    for (const char *at = (const char *)file->begin; at < (const char *)file->end; number++) {
        const char *end = memchr(at, '\n', (size_t)((const char *)file->end - at));
        if (strncmp(at, "#include", 8) == 0) {
            char wanted[512];
            const char *next_end = strchr(end + 1, '\n');
            snprintf(wanted, sizeof wanted, "#line %d \"common/attention_reference.cu\"\n%.*s",
                     number + 1,
                     strncmp(end + 1, "#include", 8) == 0 ? 0 : (int)(next_end - end - 1), end + 1);
            assert_non_null(strstr(text.text, wanted));
            checked++;
        }
        at = end + 1;
    }
    assert_true(checked > 0);
    dw__text_free(&text);
}

static void test_names_and_keys(void **state) {
    (void)state;
    dw__jit_variant a = variant_of(3), b = a;
    dw__text name = {0}, source = {0}, other = {0};
    dw__jit_key key, same, different;
    b.defines[0] = a.defines[1], b.defines[1] = a.defines[0];
    assert_int_equal(dw__jit_variant_name(&b, &name), DW_OK);
    assert_string_equal(name.text, "attention_reference.sm_90a.ANT=3.ZEBRA=7");
    assert_int_equal(dw__text_printf(&source, "int x;"), DW_OK);
    assert_int_equal(dw__text_printf(&other, "int y;"), DW_OK);
    assert_int_equal(dw__jit_key_of(&a, &source, "one", &key), DW_OK);
    assert_int_equal(dw__jit_key_of(&b, &source, "one", &same), DW_OK);
    assert_memory_equal(&key, &same, sizeof key);
    /* A different source, compiler, define or architecture gives a different key. */
    assert_int_equal(dw__jit_key_of(&a, &other, "one", &different), DW_OK);
    assert_memory_not_equal(&key, &different, sizeof key);
    assert_int_equal(dw__jit_key_of(&a, &source, "two", &different), DW_OK);
    assert_memory_not_equal(&key, &different, sizeof key);
    b.arch = "sm_100a";
    assert_int_equal(dw__jit_key_of(&b, &source, "one", &different), DW_OK);
    assert_memory_not_equal(&key, &different, sizeof key);
    b = variant_of(4);
    assert_int_equal(dw__jit_key_of(&b, &source, "one", &different), DW_OK);
    assert_memory_not_equal(&key, &different, sizeof key);
    dw__text_free(&name);
    dw__text_free(&source);
    dw__text_free(&other);
}

/* ---- texts made at run time ------------------------------------------------------------------------- */

static dw__jit_variant text_variant(const char *text) {
    dw__jit_variant variant = {
        .source = "generated", .text = text, .entry = "generated_kernel", .arch = "sm_90a"};
    dw__jit_add_define(&variant, "WIDTH", 4);
    return variant;
}

/* A text is a source like a file: its includes are expanded, and messages name it. */
static void test_text_expansion(void **state) {
    (void)state;
    dw__text expanded = {0};
    const dw__jit_variant variant = text_variant("#include \"attention_params.h\"\nint behind;\n");
    assert_int_equal(dw__jit_expand_variant(&variant, &expanded), DW_OK);
    assert_non_null(strstr(expanded.text, "#line 1 \"generated\"\n"));
    assert_non_null(strstr(expanded.text, "#line 1 \"common/attention_params.h\"\n"));
    assert_non_null(strstr(expanded.text, "#line 2 \"generated\"\nint behind;\n"));
    dw__text_free(&expanded);
    const dw__jit_variant wrong = text_variant("#include \"none.h\"\n");
    assert_int_equal(dw__jit_expand_variant(&wrong, &expanded), DW_INTERNAL);
    assert_non_null(strstr(dw_last_error(), "generated:1 includes \"none.h\""));
    dw__text_free(&expanded);
}

/* Texts of one name are distinguished by their contents; equal texts are one variant. */
static void test_text_names_and_keys(void **state) {
    (void)state;
    static const char one[] = "int x;", copy[] = "int x;", other[] = "int y;";
    const dw__jit_variant variants[] = {text_variant(one), text_variant(copy), text_variant(other)};
    dw__text names[3] = {{0}}, expanded[3] = {{0}};
    dw__jit_key keys[3];
    for (int i = 0; i < 3; i++) {
        assert_int_equal(dw__jit_variant_name(&variants[i], &names[i]), DW_OK);
        assert_int_equal(dw__jit_expand_variant(&variants[i], &expanded[i]), DW_OK);
        assert_int_equal(dw__jit_key_of(&variants[i], &expanded[i], "one", &keys[i]), DW_OK);
    }
    assert_int_equal(strncmp(names[0].text, "generated.", 10), 0);
    assert_string_equal(names[0].text + 10 + 32, ".sm_90a.WIDTH=4");
    assert_string_equal(names[0].text, names[1].text);
    assert_string_not_equal(names[0].text, names[2].text);
    assert_memory_equal(&keys[0], &keys[1], sizeof keys[0]);
    assert_memory_not_equal(&keys[0], &keys[2], sizeof keys[0]);
    for (int i = 0; i < 3; i++) {
        dw__text_free(&names[i]);
        dw__text_free(&expanded[i]);
    }
}

/* ---- the cache -------------------------------------------------------------------------------------- */

static char *image_of(const dw__jit_variant *variant, size_t *bytes) {
    void *image = NULL;
    assert_int_equal(dw__jit_image(variant, DW__JIT_CUBIN, &image, bytes), DW_OK);
    return image;
}

/* The cache returns what was compiled, and it is compiled once. */
static void test_cache(void **state) {
    (void)state;
    dw__jit_variant variant = variant_of(10);
    dw__jit_statistics before = dw__jit_statistics_now;
    size_t bytes = 0, again_bytes = 0;
    char *image = image_of(&variant, &bytes);
    assert_non_null(strstr(image, "--gpu-architecture=sm_90a\n"));
    assert_non_null(strstr(image, "-DANT=10\n-DZEBRA=7\n"));
    char *again = image_of(&variant, &again_bytes);
    assert_int_equal(bytes, again_bytes);
    assert_memory_equal(image, again, bytes);
    dw__jit_statistics after = dw__jit_statistics_now;
    assert_int_equal(after.compiled - before.compiled, 1);
    assert_int_equal(after.cached - before.cached, 1);
    assert_true(after.compile_nanoseconds >= before.compile_nanoseconds);
    dw__free(image);
    dw__free(again);
}

/* A text is compiled once for each content. */
static void test_text_cache(void **state) {
    (void)state;
    const dw__jit_variant one = text_variant("int cached;"), other = text_variant("int cached2;");
    const dw__jit_variant *const order[] = {&one, &one, &other, &one, &other};
    dw__jit_statistics before = dw__jit_statistics_now;
    for (size_t i = 0; i < DW_COUNT(order); i++) {
        size_t bytes = 0;
        dw__free(image_of(order[i], &bytes));
    }
    dw__jit_statistics after = dw__jit_statistics_now;
    assert_int_equal(after.compiled - before.compiled, 2);
    assert_int_equal(after.cached - before.cached, 3);
}

/* Returns the path of the cache's only entry. */
static void entry_path(char *path, size_t bytes) {
    char pattern[PATH_MAX];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/kernels/*.cubin", getenv("DEEPWELL_CACHE"));
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    assert_int_equal(found.gl_pathc, 1);
    snprintf(path, bytes, "%s", found.gl_pathv[0]);
    globfree(&found);
}

/* A damaged entry is never loaded: it is removed, counted and compiled again. */
static void test_damaged_entries(void **state) {
    (void)state;
    char own[PATH_MAX], path[PATH_MAX], *whole = NULL;
    dw__jit_variant variant = variant_of(20);
    size_t bytes = 0, whole_bytes = 0;
    snprintf(own, sizeof own, "%s/damage", folder);
    setenv("DEEPWELL_CACHE", own, 1);
    char *image = image_of(&variant, &bytes);
    entry_path(path, sizeof path);
    assert_int_equal(dw__file_read(path, &whole, &whole_bytes), DW_OK);
    assert_true(whole_bytes > bytes);
    for (size_t at = 0; at < whole_bytes + 4; at++) {
        size_t left = whole_bytes;
        unsigned char flip = (unsigned char)(1 << at % 8);
        if (at < whole_bytes)
            whole[at] = (char)(whole[at] ^ flip); /* each byte, header and image */
        if (at == whole_bytes) left = 0;
        if (at == whole_bytes + 1) left = 20;
        if (at == whole_bytes + 2) left = whole_bytes - 1;
        FILE *file = fopen(path, "wb");
        assert_non_null(file);
        assert_int_equal(fwrite(whole, 1, left, file), left);
        if (at == whole_bytes + 3) fputc(0, file); /* one byte too many */
        fclose(file);
        if (at < whole_bytes) whole[at] = (char)(whole[at] ^ flip);
        dw__jit_statistics before = dw__jit_statistics_now;
        size_t again_bytes = 0;
        char *again = image_of(&variant, &again_bytes);
        dw__jit_statistics after = dw__jit_statistics_now;
        assert_int_equal(after.corrupt - before.corrupt, 1);
        assert_int_equal(after.compiled - before.compiled, 1);
        assert_int_equal(again_bytes, bytes);
        assert_memory_equal(again, image, bytes);
        dw__free(again);
    }
    /* The file holds an entry for another key. */
    dw__jit_key other = {{1}};
    void *none = NULL;
    assert_int_equal(dw__jit_cache_write(&other, image, bytes), DW_OK);
    char other_path[PATH_MAX + 64];
    snprintf(other_path, sizeof other_path, "%s/kernels/01000000000000000000000000000000.cubin",
             own);
    assert_int_equal(rename(other_path, path), 0);
    dw__jit_statistics before = dw__jit_statistics_now;
    char *again = image_of(&variant, &bytes);
    assert_int_equal(dw__jit_statistics_now.corrupt - before.corrupt, 1);
    assert_int_equal(dw__jit_cache_read(&other, &none, &bytes), DW_NOT_FOUND);
    dw__free(again);
    dw__free(image);
    dw__free(whole);
    setenv("DEEPWELL_CACHE", folder, 1);
}

/* A folder that cannot be written costs only time. (A file takes its place, because root may write anywhere.) */
static void test_unwritable_folder(void **state) {
    (void)state;
    char file[PATH_MAX];
    dw__jit_variant variant = variant_of(30);
    snprintf(file, sizeof file, "%s/a_file", folder);
    assert_int_equal(dw__file_write(file, "x", 1), DW_OK);
    const char *const homes[] = {file, "/dev/null/no", "/proc/no/such"};
    for (size_t i = 0; i < DW_COUNT(homes); i++) {
        setenv("DEEPWELL_CACHE", homes[i], 1);
        dw__jit_statistics before = dw__jit_statistics_now;
        size_t bytes = 0;
        char *image = image_of(&variant, &bytes);
        dw__jit_statistics after = dw__jit_statistics_now;
        assert_int_equal(after.compiled - before.compiled, 1);
        assert_int_equal(after.unwritten - before.unwritten, 1);
        assert_true(bytes > 0);
        dw__free(image);
    }
    setenv("DEEPWELL_CACHE", folder, 1);
}

static char last_warning[1024];
static void keep_warning(void *context, int level, const char *text) {
    (void)context;
    (void)level;
    snprintf(last_warning, sizeof last_warning, "%s", text);
}

/* Compiles or reads the variant, and checks how often each happened. */
static void expect_image(const dw__jit_variant *variant, unsigned compiled, unsigned cached,
                         unsigned corrupt, unsigned unwritten) {
    dw__jit_statistics before = dw__jit_statistics_now;
    size_t bytes = 0;
    dw__free(image_of(variant, &bytes));
    dw__jit_statistics after = dw__jit_statistics_now;
    assert_int_equal(after.compiled - before.compiled, compiled);
    assert_int_equal(after.cached - before.cached, cached);
    assert_int_equal(after.corrupt - before.corrupt, corrupt);
    assert_int_equal(after.unwritten - before.unwritten, unwritten);
}

/* Entries are machine code, so an entry in a folder that others own or can write to is neither read nor written. */
static void test_folder_writable_by_others(void **state) {
    (void)state;
    char own[PATH_MAX], inner[PATH_MAX + 16];
    dw__jit_variant variant = variant_of(31);
    struct stat info;
    snprintf(own, sizeof own, "%s/others/deepwell/", folder);
    snprintf(inner, sizeof inner, "%skernels", own);
    setenv("DEEPWELL_CACHE", own, 1);
    mode_t mask = umask(0);
    expect_image(&variant, 1, 0, 0, 0);
    umask(mask);
    const char *const folders[] = {own, inner};
    for (size_t i = 0; i < DW_COUNT(folders); i++) {
        assert_int_equal(stat(folders[i], &info), 0);
        assert_int_equal(info.st_mode & 07777, 0700);
    }
    expect_image(&variant, 0, 1, 0, 0);
    dw_log_set_sink(keep_warning, NULL, 0);
    static const mode_t modes[] = {0777, 0770, 0702, 01777};
    for (size_t i = 0; i < DW_COUNT(folders); i++) {
        for (size_t m = 0; m < DW_COUNT(modes); m++) {
            last_warning[0] = '\0';
            assert_int_equal(chmod(folders[i], modes[m]), 0);
            expect_image(&variant, 1, 0, 0, 1);
            assert_non_null(strstr(last_warning, "other users can write to it"));
            assert_non_null(strstr(last_warning, "others/deepwell"));
        }
        assert_int_equal(chmod(folders[i], 0755), 0);
        expect_image(&variant, 0, 1, 0, 0);
        if (geteuid() != 0) continue; /* only root can give a folder away */
        assert_int_equal(chown(folders[i], 12345, 12345), 0);
        expect_image(&variant, 1, 0, 0, 1);
        assert_non_null(strstr(last_warning, "belongs to user 12345"));
        assert_int_equal(chown(folders[i], 0, 0), 0);
    }
    dw_log_set_sink(NULL, NULL, 0);
    setenv("DEEPWELL_CACHE", folder, 1);
}

/* An entry that others can write to, or that is a link, is compiled again; the link's target is unchanged. */
static void test_entry_writable_by_others(void **state) {
    (void)state;
    char own[PATH_MAX], path[PATH_MAX], victim[PATH_MAX + 16], *now = NULL;
    dw__jit_variant variant = variant_of(32);
    struct stat info;
    size_t bytes = 0;
    snprintf(own, sizeof own, "%s/entries", folder);
    setenv("DEEPWELL_CACHE", own, 1);
    expect_image(&variant, 1, 0, 0, 0);
    entry_path(path, sizeof path);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0600);
    assert_int_equal(chmod(path, 0666), 0);
    expect_image(&variant, 1, 0, 1, 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(path, 12345, 12345), 0);
        expect_image(&variant, 1, 0, 1, 0);
    }
    /* a valid entry elsewhere, and a file of the user's */
    const char *const texts[] = {NULL, "of the user"};
    for (size_t i = 0; i < DW_COUNT(texts); i++) {
        snprintf(victim, sizeof victim, "%s/victim%d", own, (int)i);
        assert_int_equal(rename(path, victim), 0);
        if (texts[i]) assert_int_equal(dw__file_write(victim, texts[i], strlen(texts[i])), DW_OK);
        assert_int_equal(stat(victim, &info), 0);
        const off_t size = info.st_size;
        assert_int_equal(symlink(victim, path), 0);
        expect_image(&variant, 1, 0, 1, 0);
        assert_int_equal(lstat(path, &info), 0);
        assert_true(S_ISREG(info.st_mode));
        assert_int_equal(dw__file_read(victim, &now, &bytes), DW_OK);
        assert_int_equal(bytes, size);
        if (texts[i]) assert_string_equal(now, texts[i]);
        dw__free(now);
        expect_image(&variant, 0, 1, 0, 0);
    }
    setenv("DEEPWELL_CACHE", folder, 1);
}

static void test_folder(void **state) {
    (void)state;
    dw__text path = {0};
    const char *const before[] = {getenv("XDG_CACHE_HOME"), getenv("HOME")};
    char *xdg = before[0] ? strdup(before[0]) : NULL, *home = before[1] ? strdup(before[1]) : NULL;
    unsetenv("DEEPWELL_CACHE");
    setenv("XDG_CACHE_HOME", "/x", 1);
    setenv("HOME", "/h", 1);
    assert_int_equal(dw__jit_cache_folder(&path), DW_OK);
    assert_string_equal(path.text, "/x/deepwell");
    /* Relative paths, which the specification tells programs to ignore. */
    setenv("XDG_CACHE_HOME", "relative", 1);
    path.length = 0;
    assert_int_equal(dw__jit_cache_folder(&path), DW_OK);
    assert_string_equal(path.text, "/h/.cache/deepwell");
    unsetenv("HOME");
    assert_int_equal(dw__jit_cache_folder(&path), DW_NOT_FOUND);
    if (xdg)
        setenv("XDG_CACHE_HOME", xdg, 1);
    else
        unsetenv("XDG_CACHE_HOME");
    if (home) setenv("HOME", home, 1);
    free(xdg);
    free(home);
    setenv("DEEPWELL_CACHE", folder, 1);
    dw__text_free(&path);
}

/* ---- failures ----------------------------------------------------------------------------------------- */

static void test_compiler_failures(void **state) {
    (void)state;
    dw__jit_variant variant = variant_of(40);
    void *image = NULL;
    size_t bytes;
    setenv("FAKE_NVRTC_FAIL", "1", 1);
    assert_int_equal(dw__jit_image(&variant, DW__JIT_CUBIN, &image, &bytes), DW_INTERNAL);
    assert_non_null(
        strstr(dw_last_error(),
               "attention_reference.sm_90a.ANT=40.ZEBRA=7 did not compile with NVRTC 13.0"));
    assert_non_null(strstr(dw_last_error(), "file.cu(7): error: identifier"));
    setenv("FAKE_NVRTC_FAIL", "2", 1);
    assert_int_equal(dw__jit_image(&variant, DW__JIT_CUBIN, &image, &bytes), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "no machine code for sm_90a"));
    unsetenv("FAKE_NVRTC_FAIL");
    char *made = image_of(&variant, &bytes); /* nothing of the failed compilation was kept */
    dw__free(made);
}

static void no_compiler(void *unused) {
    const char *description = NULL;
    (void)unused;
    setenv("DEEPWELL_NVRTC", "/no/such/libnvrtc.so.13", 1);
    CHILD_REQUIRE(dw_jit_compiler(&description) == DW_UNSUPPORTED);
    CHILD_REQUIRE(
        strstr(dw_last_error(), "DEEPWELL_NVRTC=/no/such/libnvrtc.so.13 cannot be loaded"));
    setenv("DEEPWELL_NVRTC", "/dev/null", 1);
    CHILD_REQUIRE(dw_jit_compiler(&description) == DW_UNSUPPORTED);
    /* A library without NVRTC's functions. */
    setenv("DEEPWELL_NVRTC", FAKE_CUDA, 1);
    CHILD_REQUIRE(dw_jit_compiler(&description) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "has no function nvrtcVersion"));
    CHILD_REQUIRE(dw_jit_search("") == DW_INVALID_ARGUMENT);
    /* NVRTC is found in the given folder, also in the layout of a site-packages. */
    unsetenv("DEEPWELL_NVRTC");
    char path[PATH_MAX], *slash;
    snprintf(path, sizeof path, "%s", FAKE_NVRTC);
    slash = strrchr(path, '/');
    *slash = '\0';
    CHILD_REQUIRE(dw_jit_search(path) == DW_OK && dw_jit_search(path) == DW_OK);
    CHILD_REQUIRE(dw_jit_compiler(&description) == DW_OK);
    CHILD_REQUIRE(strstr(description, "libnvrtc.so.13"));
    CHILD_REQUIRE(strstr(description, path));
    for (int i = 0; i < 31; i++) {
        snprintf(path, sizeof path, "/folder/%d", i);
        CHILD_REQUIRE(dw_jit_search(path) == DW_OK);
    }
    CHILD_REQUIRE(dw_jit_search("/one/more") == DW_UNSUPPORTED);
}

static void in_site_packages(void *unused) {
    char inside[PATH_MAX], link_path[PATH_MAX + 64], command[2 * PATH_MAX];
    const char *description = NULL;
    (void)unused;
    unsetenv("DEEPWELL_NVRTC");
    snprintf(inside, sizeof inside, "%s/site-packages/nvidia/cu13/lib", folder);
    snprintf(command, sizeof command, "mkdir -p %s", inside);
    CHILD_REQUIRE(system(command) == 0);
    snprintf(link_path, sizeof link_path, "%s/libnvrtc.so.13", inside);
    CHILD_REQUIRE(symlink(FAKE_NVRTC, link_path) == 0);
    snprintf(inside, sizeof inside, "%s/site-packages", folder);
    CHILD_REQUIRE(dw_jit_search(inside) == DW_OK && dw_jit_compiler(&description) == DW_OK);
    CHILD_REQUIRE(strstr(description, inside));
}

static void test_nvrtc_is_found(void **state) {
    (void)state;
    expect_child(start_child(no_compiler, NULL));
    expect_child(start_child(in_site_packages, NULL));
}

/* ---- several threads and processes ----------------------------------------------------------------------- */

static void compile_slowly(void *unused) {
    (void)unused;
    setenv("FAKE_NVRTC_MS", "200", 1);
    dw__jit_variant variant = variant_of(50);
    dw__jit_statistics before = dw__jit_statistics_now; /* the parent's */
    void *image = NULL;
    size_t bytes = 0;
    CHILD_REQUIRE(dw__jit_image(&variant, DW__JIT_CUBIN, &image, &bytes) == DW_OK);
    CHILD_REQUIRE(memcmp(image, "\177ELF", 4) == 0 && strstr(image, "-DANT=50\n"));
    CHILD_REQUIRE(dw__jit_statistics_now.corrupt == before.corrupt &&
                  dw__jit_statistics_now.unwritten == before.unwritten);
}

/* Processes that find no entry all compile, and one valid entry remains. */
static void test_processes(void **state) {
    (void)state;
    char own[PATH_MAX], path[PATH_MAX];
    pid_t children[4];
    snprintf(own, sizeof own, "%s/processes", folder);
    setenv("DEEPWELL_CACHE", own, 1);
    for (size_t i = 0; i < DW_COUNT(children); i++) children[i] = start_child(compile_slowly, NULL);
    for (size_t i = 0; i < DW_COUNT(children); i++) expect_child(children[i]);
    entry_path(path, sizeof path); /* and no temporary file beside it */
    dw__jit_statistics before = dw__jit_statistics_now;
    dw__jit_variant variant = variant_of(50);
    size_t bytes = 0;
    char *image = image_of(&variant, &bytes);
    assert_int_equal(dw__jit_statistics_now.cached - before.cached, 1);
    dw__free(image);
    setenv("DEEPWELL_CACHE", folder, 1);
}

static void *load_often(void *failed) {
    const dw__context *context = NULL;
    for (int i = 0; i < 20; i++) {
        dw__jit_variant variant = variant_of(60 + i % 4);
        void *function = NULL;
        if (dw__device_cuda.context(&context) != DW_OK) return failed;
        if (dw__jit_load(context, &variant, 0, &function) != DW_OK || !function) return failed;
    }
    return NULL;
}

static void threads_load(void *unused) {
    pthread_t threads[4];
    (void)unused;
    load_fake_driver();
    for (int i = 0; i < 4; i++)
        CHILD_REQUIRE(pthread_create(&threads[i], NULL, load_often, &threads) == 0);
    for (int i = 0; i < 4; i++) {
        void *failed = NULL;
        CHILD_REQUIRE(pthread_join(threads[i], &failed) == 0 && !failed);
    }
    CHILD_REQUIRE(fake->loads == 4); /* each module once */
    fake->current = 1001;            /* another context has none of them */
    CHILD_REQUIRE(!load_often(&threads) && fake->loads == 8);
}

static void test_threads(void **state) {
    (void)state;
    expect_child(start_child(threads_load, NULL));
}

/* ---- modules that the library carries ----------------------------------------------------------------------- */

static const char cubin_text[64] =
    "\177ELF and more", /* as if another compiler than the fake one had made it */
    ptx_text[64] = ".version 9.0\n.target sm_90a";

static dw__jit_file carried(const char *name, const char *text) {
    const unsigned char *bytes = (const unsigned char *)text;
    return (dw__jit_file){name, bytes, bytes + strlen(text)};
}

/* Tries cubin, PTX, cache and compiler in this order, depending on which exist and which the driver accepts. */
static void loading_order(void *unused) {
    (void)unused;
    static const struct {
        bool cubin, ptx, refuse_cubin, refuse_ptx;
        const char *image; /* first bytes of the loaded image */
        unsigned embedded, translated, compiled, cached;
    } cases[] = {
        {true, true, false, false, "\177ELF and", 1, 0, 0, 0},
        {true, true, true, false, ".version", 0, 1, 0, 0},
        {false, true, false, false, ".version", 0, 1, 0, 0},
        {true, true, true, true, "\177ELF\n", 0, 0, 1, 0},
        {true, true, true, true, "\177ELF\n", 0, 0, 0, 1}, /* compiled by the previous case */
        {false, false, false, false, "\177ELF\n", 0, 0, 0, 1},
        {true, false, true, false, "\177ELF\n", 0, 0, 0, 1},
        {false, true, false, true, "\177ELF\n", 0, 0, 0, 1},
    };
    const dw__context *context = NULL;
    dw__text name = {0};
    dw__jit_variant variant = variant_of(80);
    load_fake_driver();
    CHILD_REQUIRE(dw__jit_variant_name(&variant, &name) == DW_OK);
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        const dw__jit_file other = carried("another", "nothing"), none = {0};
        const dw__jit_file modules[] = {
            other, cases[i].cubin ? carried(name.text, cubin_text) : none, none};
        const dw__jit_file ptx[] = {other, cases[i].ptx ? carried(name.text, ptx_text) : none,
                                    none};
        dw__jit_carried_now = (dw__jit_carried){modules, ptx};
        fake->refuse_real = cases[i].refuse_cubin, fake->refuse_ptx = cases[i].refuse_ptx;
        fake->current = 1000 + i; /* where nothing is loaded */
        dw__jit_statistics before = dw__jit_statistics_now;
        void *function = NULL;
        CHILD_REQUIRE(dw__device_cuda.context(&context) == DW_OK);
        CHILD_REQUIRE(dw__jit_load(context, &variant, 0, &function) == DW_OK);
        dw__jit_statistics after = dw__jit_statistics_now;
        CHILD_REQUIRE(after.embedded - before.embedded == cases[i].embedded);
        CHILD_REQUIRE(after.translated - before.translated == cases[i].translated);
        CHILD_REQUIRE(after.compiled - before.compiled == cases[i].compiled);
        CHILD_REQUIRE(after.cached - before.cached == cases[i].cached);
        CHILD_REQUIRE(strncmp(fake->loaded, cases[i].image, strlen(cases[i].image)) == 0);
    }
    dw__text_free(&name);
}

static void test_loading_order(void **state) {
    (void)state;
    expect_child(start_child(loading_order, NULL));
}

/* PTX is compiled for the virtual architecture. */
static void test_ptx(void **state) {
    (void)state;
    dw__jit_variant variant = variant_of(90);
    dw__text source = {0};
    void *image = NULL;
    size_t bytes = 0;
    assert_int_equal(dw__jit_expand(variant.source, &source), DW_OK);
    assert_int_equal(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL),
                     DW_OK);
    assert_int_equal(bytes, strlen(image) + 1);
    assert_non_null(strstr(image, "--gpu-architecture=compute_90a\n"));
    assert_non_null(strstr(image, "-DANT=90\n"));
    assert_null(strstr(image, "-lineinfo"));
    dw__free(image);
    setenv("FAKE_NVRTC_FAIL", "2", 1);
    assert_int_equal(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL),
                     DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "no PTX for sm_90a"));
    unsetenv("FAKE_NVRTC_FAIL");
    dw__text_free(&source);
}

/* ---- memory ----------------------------------------------------------------------------------------------- */

/* Each allocation fails in turn: the call fails or returns the right image, and nothing leaks. */
static void test_memory(void **state) {
    (void)state;
    for (int round = 0; round < 2; round++) {
        dw__jit_variant variant = variant_of(70);
        int64_t live = dw__memory_live();
        for (int64_t after = 0;; after++) {
            void *image = NULL;
            size_t bytes = 0;
            dw__memory_fail_once(after);
            dw_status status = dw__jit_image(&variant, DW__JIT_CUBIN, &image, &bytes);
            int64_t failures = dw__memory_failures();
            dw__memory_fail_after(-1);
            if (status != DW_OK)
                assert_int_equal(status, DW_OUT_OF_MEMORY);
            else
                assert_non_null(strstr(image, "-DANT=70\n"));
            if (status == DW_OK) dw__free(image);
            assert_int_equal(dw__memory_live(), live);
            if (failures == 0) break;
        }
    }
}

static int setup(void **state) {
    (void)state;
    use_fake_compiler(folder, sizeof folder);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        /* First, because children start without a loaded compiler. */
        cmocka_unit_test(test_nvrtc_is_found),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_loading_order),
        cmocka_unit_test(test_expansion),
        cmocka_unit_test(test_line_numbers),
        cmocka_unit_test(test_names_and_keys),
        cmocka_unit_test(test_text_expansion),
        cmocka_unit_test(test_text_names_and_keys),
        cmocka_unit_test(test_cache),
        cmocka_unit_test(test_text_cache),
        cmocka_unit_test(test_damaged_entries),
        cmocka_unit_test(test_unwritable_folder),
        cmocka_unit_test(test_folder_writable_by_others),
        cmocka_unit_test(test_entry_writable_by_others),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_compiler_failures),
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_ptx),
    };
    return cmocka_run_group_tests(tests, setup, end_on_fake_gpu);
}
