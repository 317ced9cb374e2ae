/* Finds the emulated libraries of `deepwell emulate`, and checks a program's ELF file before it runs. */
#include "emulate_program.h"
#include "cli.h"
#include <elf.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- our libraries ------------------------------------------------------------------------- */

int program_find_libraries(char *folder, size_t bytes) {
    /* Beside the program: in a build tree, as installed, in a Python environment. */
    static const char *const places[] = {"../lib/emulate", "../lib*/deepwell/emulate",
                                         "../lib/*/deepwell/emulate",
                                         "../lib/python3*/site-packages/deepwell/emulate"};
    char own[PATH_MAX], tried[PATH_MAX + 96];
    const char *given = getenv("DEEPWELL_EMULATE_LIB");
    if (given && *given) {
        snprintf(folder, bytes, "%s", given);
        return CLI_DONE;
    }
    ssize_t length = readlink("/proc/self/exe", own, sizeof own - 1);
    if (length < 0) {
        perror("deepwell: cannot find the folder of this program");
        return CLI_FAILED;
    }
    own[length] = '\0';
    char *slash = strrchr(own, '/');
    if (slash) *slash = '\0';
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        glob_t found = {0};
        snprintf(tried, sizeof tried, "%s/%s/libcuda.so.1", own, places[i]);
        char *real = glob(tried, 0, NULL, &found) == 0 ? realpath(found.gl_pathv[0], NULL) : NULL;
        globfree(&found);
        if (!real) continue;
        *strrchr(real, '/') = '\0';
        snprintf(folder, bytes, "%s", real);
        free(real);
        return CLI_DONE;
    }
    fprintf(stderr,
            "deepwell: the emulated libcuda.so.1 is not in %s/../lib/emulate: name its folder in "
            "DEEPWELL_EMULATE_LIB\n",
            own);
    return CLI_UNSUPPORTED;
}

/* ---- the program's file -------------------------------------------------------------------- */

/* Finds the program as execvp does. Returns 0 if there is none; execvp reports that later. */
static int find_file(const char *name, char *path, size_t bytes) {
    const char *folders = getenv("PATH");
    if (strchr(name, '/')) return snprintf(path, bytes, "%s", name), access(path, X_OK) == 0;
    while (folders && *folders) {
        size_t length = strcspn(folders, ":");
        snprintf(path, bytes, "%.*s/%s", (int)length, folders, name);
        if (access(path, X_OK) == 0) return 1;
        folders += length + (folders[length] == ':');
    }
    return 0;
}

typedef struct image {
    const unsigned char *bytes;
    size_t count;
} image;

static int map(const char *name, image *i) {
    char path[PATH_MAX];
    struct stat about;
    *i = (image){0};
    if (!find_file(name, path, sizeof path)) return 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    if (fstat(file, &about) == 0 && about.st_size > (off_t)sizeof(Elf64_Ehdr)) {
        void *mapped = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (mapped != MAP_FAILED) *i = (image){mapped, (size_t)about.st_size};
    }
    close(file);
    if (i->bytes && memcmp(i->bytes, ELFMAG, SELFMAG) == 0 && i->bytes[EI_CLASS] == ELFCLASS64)
        return 1;
    if (i->bytes) munmap((void *)i->bytes, i->count);
    return 0;
}

/* Returns a section by name; count 0 if there is none. */
static image section(const image *i, const char *name) {
    Elf64_Ehdr head;
    Elf64_Shdr names, s;
    memcpy(&head, i->bytes, sizeof head);
    const image none = {0};
    const uint64_t end = head.e_shoff + (uint64_t)head.e_shnum * sizeof s;
    if (head.e_shentsize != sizeof s || end > i->count || end < head.e_shoff ||
        head.e_shstrndx >= head.e_shnum)
        return none;
    memcpy(&names, i->bytes + head.e_shoff + head.e_shstrndx * sizeof s, sizeof names);
    if (names.sh_offset > i->count || names.sh_size > i->count - names.sh_offset) return none;
    for (unsigned at = 0; at < head.e_shnum; at++) {
        memcpy(&s, i->bytes + head.e_shoff + at * sizeof s, sizeof s);
        const size_t length = strlen(name) + 1;
        if (s.sh_name > names.sh_size || length > names.sh_size - s.sh_name ||
            memcmp(i->bytes + names.sh_offset + s.sh_name, name, length) != 0)
            continue;
        if (s.sh_type == SHT_NOBITS || s.sh_offset > i->count || s.sh_size > i->count - s.sh_offset)
            return none;
        return (image){i->bytes + s.sh_offset, s.sh_size};
    }
    return none;
}

static int has(image where, const char *text) {
    return where.count > 0 && memmem(where.bytes, where.count, text, strlen(text)) != NULL;
}

int program_check(const char *name, const char *architecture) {
    image i;
    if (!map(name, &i)) return CLI_DONE;
    const image code = section(&i, ".nv_fatbin"), names = section(&i, ".dynstr");
    int result = CLI_DONE;
    if (code.count > 0 && !has(names, "libcudart.so")) {
        fprintf(stderr,
                "deepwell: '%s' has the CUDA runtime linked in statically: build it with nvcc "
                "-cudart shared\n",
                name);
        result = CLI_UNSUPPORTED;
    } else if (has(names, "libcudart.so") && !has(names, "libcudart.so.12") &&
               !has(names, "libcudart.so.13")) {
        fprintf(stderr, "deepwell: '%s' is linked to a CUDA runtime that is neither 12 nor 13\n",
                name);
        result = CLI_UNSUPPORTED;
    } else if (code.count > 0 && !has(code, ".target")) {
        fprintf(
            stderr,
            "deepwell: '%s' has no PTX that can be read: build it with nvcc --compress-mode=none "
            "-gencode arch=compute_%s,code=compute_%s, and without -rdc=true\n",
            name, architecture + 3, architecture + 3);
        result = CLI_UNSUPPORTED;
    }
    munmap((void *)i.bytes, i.count);
    return result;
}
