#!/bin/bash
# Runs the tests: `quick` (within 28 minutes on two cores) or `long` (what quick leaves out); `builds` makes what quick
# needs beside the release.
# Every stage runs even when an earlier one fails; the script fails when any did.
set -uo pipefail

kind=${1:?quick, long or builds}
python=.venv/bin/python
release=build/release
failed=()

stage() {
    local name=$1 begin=$SECONDS
    shift
    echo "== $name"
    "$@" || failed+=("$name")
    echo "== $name: $((SECONDS - begin)) s"
}

# doctor LABEL: what the library says of its kernels under this label.
doctor() { "$release/bin/deepwell" doctor | sed -n "s/^$1 *//p"; }

say_instruction_sets() {
    echo "== instruction sets: Deepwell $(doctor Instructions), matrix products $(doctor "Matrix products")"
}

# Those that this machine has, each as "DEEPWELL_ISA ONEDNN_MAX_CPU_ISA".
instruction_sets() {
    local isa onednn
    while read -r isa onednn; do
        export DEEPWELL_ISA=$isa
        case $isa in
        amx) [[ $(doctor "Matrix products") == AMX* ]] ;;
        *) [ "$(doctor Instructions)" = "$isa" ] ;;
        esac && echo "$isa $onednn"
    done <<<$'baseline SSE41\navx2 AVX2\navx512 AVX512_CORE\namx ALL' 2>/dev/null
}

# The C tests, the operations and whole models with one instruction set.
with_instruction_set() {
    local -x DEEPWELL_ISA=$1 ONEDNN_MAX_CPU_ISA=$2 OMP_NUM_THREADS=1
    local result=0
    say_instruction_sets
    ctest --preset release -j 2 || result=1
    "$release/bin/deepwell-ops" test --quick || result=1
    "$release/bin/deepwell-ops" grad --quick || result=1
    "$python" -m pytest -q -n 2 -m "not gpu and not slow" tests/python/test_model_folder.py \
        tests/python/test_same_function.py tests/python/test_step_memory.py \
        tests/python/test_train_command.py || result=1
    return $result
}

# build_sanitized PRESET: what ctest runs. CMake keeps a configured folder up to date by itself.
build_sanitized() {
    [ -f "build/$1/build.ninja" ] ||
        cmake --preset "$1" -DPython3_EXECUTABLE="$PWD/$python" >/dev/null || return 1
    cmake --build "build/$1" --target c_tests fuzz_targets
}

# sanitized PRESET [options of ctest]
sanitized() {
    local preset=$1
    shift
    build_sanitized "$preset" && ctest --preset "$preset" -j 2 "$@"
}

# The sanitizers' builds begin while other stages leave a core idle, and take no time from these. What fails in a build
# is said by the stage that needs it, which builds it again.
builds_log=build/sanitizers.log
start_builds() {
    mkdir -p build
    set -m # a group of processes, to be ended with this script
    nice -n 19 bash "$0" builds >"$builds_log" 2>&1 &
    builds=$!
    set +m
    trap 'kill -- "-$builds" 2>/dev/null' EXIT
}

finish_builds() {
    wait "$builds"
    local result=$?
    trap - EXIT
    [ $result -eq 0 ] || echo "a build failed (all it said: $builds_log); the stage that needs it says why"
    return $result
}

# Long tests of what has no threads, or of threads that shorter tests have as well, which ThreadSanitizer makes four times
# longer: all of it has its turn in `long`.
WITHOUT_THREADS='^(test_amx|test_cuda_explain|test_graph|test_hostile_graphs|test_gradient|test_model_config|test_out_of_memory|'
WITHOUT_THREADS+='test_pipeline_time|test_planner.*|test_runs|test_simulate|test_autoplan|test_(quantized_)?product|test_attention_guard|'
WITHOUT_THREADS+='test_emulator_(tcgen05|instructions|attention|gemm_scaled)|fuzz_.*)$'

# Long tests of the search for plans, which fuzz_autoplan and fuzz_planner_graph run under AddressSanitizer as well.
SEARCHES='^(test_autoplan|test_pipeline_time)$'

# The same inputs each time, starting from what is committed.
fuzz_briefly() { FUZZ_SEED=1 scripts/fuzz.sh 3; }

operations_under() {
    cmake --build "build/$1" --target deepwell-ops && "build/$1/bin/deepwell-ops" test --quick
}

# What the compiler makes of the GPU kernels; no GPU is needed. The compiler comes with the tests' packages.
kernels() { VIRTUAL_ENV="$PWD/.venv" "$release/bin/deepwell-kernels" "$@"; }

examples() {
    local folder result
    "$python" examples/demo.py --quick --steps 5 || return 1
    folder=$(mktemp -d) && bash examples/train.sh "$folder"
    result=$?
    rm -rf "$folder"
    return $result
}

# Two files at a time, PyTorch with one thread in each: more threads than cores would spin against each other.
python_tests() { OMP_NUM_THREADS=1 "$python" -m pytest -q -n 2 --dist loadfile -m "$1"; }

# pytest says 5 when no test is marked slow, which is no failure.
slow_python_tests() { python_tests "slow and not gpu" || [ $? -eq 5 ]; }

case $kind in
quick)
    say_instruction_sets
    start_builds
    stage "C" ctest --preset release -j 2
    stage "operations" "$release/bin/deepwell-ops" test --quick
    stage "gradients of operations" "$release/bin/deepwell-ops" grad --quick
    stage "GPU kernels' resources" kernels --quick
    stage "examples" examples
    stage "builds with sanitizers" finish_builds
    stage "C under AddressSanitizer and UndefinedBehaviorSanitizer" sanitized asan -E "$SEARCHES"
    stage "C under ThreadSanitizer" sanitized tsan -E "$WITHOUT_THREADS"
    stage "fuzzing" fuzz_briefly
    stage "Python" python_tests "not gpu and not slow"
    ;;
long)
    mapfile -t sets < <(instruction_sets)
    for set in "${sets[@]}"; do
        stage "instruction set ${set% *}" with_instruction_set ${set}
    done
    stage "operations" "$release/bin/deepwell-ops" test
    stage "gradients of operations" "$release/bin/deepwell-ops" grad
    stage "GPU kernels' resources" kernels
    for preset in asan tsan; do
        stage "C under $preset" sanitized "$preset"
        stage "operations under $preset" operations_under "$preset"
    done
    stage "every allocation failing" env DEEPWELL_TEST_LONG=1 "$release/bin/test_out_of_memory"
    stage "fuzzing" scripts/fuzz.sh 600
    stage "Python, slow" slow_python_tests
    ;;
builds)
    for preset in asan tsan; do
        stage "$preset" build_sanitized "$preset"
    done
    stage "fuzz targets" scripts/fuzz.sh build
    ;;
*)
    echo "usage: scripts/test.sh quick|long|builds" >&2
    exit 2
    ;;
esac

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
