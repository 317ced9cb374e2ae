#!/bin/bash
# Runs the tests: `quick` (within 28 minutes on two cores) or `long` (what quick leaves out).
# Every stage runs even when an earlier one fails; the script fails when any did.
set -uo pipefail

kind=${1:?quick or long}
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

# sanitized PRESET [options of ctest]. CMake keeps a configured folder up to date by itself.
sanitized() {
    local preset=$1
    shift
    [ -f "build/$preset/build.ninja" ] ||
        cmake --preset "$preset" -DPython3_EXECUTABLE="$PWD/$python" >/dev/null || return 1
    cmake --build "build/$preset" && ctest --preset "$preset" -j 2 "$@"
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
    stage "C" ctest --preset release -j 2
    stage "C under AddressSanitizer and UndefinedBehaviorSanitizer" sanitized asan -E "$SEARCHES"
    stage "C under ThreadSanitizer" sanitized tsan -E "$WITHOUT_THREADS"
    stage "fuzzing" fuzz_briefly
    stage "operations" "$release/bin/deepwell-ops" test --quick
    stage "gradients of operations" "$release/bin/deepwell-ops" grad --quick
    stage "GPU kernels' resources" kernels --quick
    stage "examples" examples
    stage "Python" python_tests "not gpu and not slow"
    ;;
long)
    stage "operations" "$release/bin/deepwell-ops" test
    stage "gradients of operations" "$release/bin/deepwell-ops" grad
    stage "GPU kernels' resources" kernels
    for preset in asan tsan; do
        stage "C under $preset" sanitized "$preset"
        stage "operations under $preset" "build/$preset/bin/deepwell-ops" test --quick
    done
    stage "every allocation failing" env DEEPWELL_TEST_LONG=1 "$release/bin/test_out_of_memory"
    stage "fuzzing" scripts/fuzz.sh 600
    stage "Python, slow" slow_python_tests
    ;;
*)
    echo "usage: scripts/test.sh quick|long" >&2
    exit 2
    ;;
esac

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
