/* Probe of the Python that would use Deepwell: runs the interpreter once on a short script, which imports neither torch
 * nor Deepwell. */
#include "doctor.h"
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static const char script[] =
    "import importlib.metadata as m, importlib.util as u, json, platform, sys\n"
    "def version(name):\n"
    "    try: return m.version(name)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps({'executable': sys.executable, 'version': platform.python_version(),\n"
    "    'deepwell': u.find_spec('deepwell') is not None, 'torch': version('torch')}))\n";

/* Finds the interpreter beside this program (a virtual environment), else the one on PATH. */
static void find_interpreter(char *path, size_t path_bytes) {
    char program[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length > 0) {
        program[length] = '\0';
        char *slash = strrchr(program, '/');
        if (slash) *slash = '\0';
        int needed = snprintf(path, path_bytes, "%s/python3", program);
        if (needed < (int)path_bytes && access(path, X_OK) == 0) return;
    }
    snprintf(path, path_bytes, "python3");
}

/* Starts the script. Its standard output can be read from *output. Returns 0 if it cannot be started. */
static int start_script(const char *interpreter, int *output, pid_t *child) {
    int pipe_ends[2];
    if (pipe2(pipe_ends, O_CLOEXEC) != 0) return 0;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    char *arguments[] = {(char *)interpreter, "-c", (char *)script, NULL};
    int error = posix_spawnp(child, interpreter, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(pipe_ends[1]);
    if (error != 0) {
        close(pipe_ends[0]);
        return 0;
    }
    *output = pipe_ends[0];
    return 1;
}

json_t *doctor_probe_python(json_t *advice) {
    char interpreter[PATH_MAX];
    find_interpreter(interpreter, sizeof interpreter);
    int output = -1;
    pid_t child = -1;
    json_t *answer = NULL;
    if (start_script(interpreter, &output, &child)) {
        answer = json_loadfd(output, JSON_DISABLE_EOF_CHECK, NULL);
        close(output);
        waitpid(child, NULL, 0);
    }
    if (!answer) {
        doctor_advise(advice, "No Python was found", "install Python 3.10 or later to use PyTorch");
        return json_null();
    }
    if (!json_is_true(json_object_get(answer, "deepwell"))) {
        doctor_advise(advice, "This Python does not find the package deepwell",
                      "activate the environment that has it, or install it for this Python");
    }
    if (!json_is_string(json_object_get(answer, "torch"))) {
        doctor_advise(advice, "This Python has no PyTorch",
                      "install torch for it to use deepwell.optimize");
    }
    return answer;
}
