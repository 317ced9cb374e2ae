#!/bin/bash
# Runs the tests:
#
#     scripts/test.sh quick         C, operations, GPU kernels' resources, examples, Python  (make test)
#     scripts/test.sh sanitizers    C under ASan + UBSan and TSan, fuzzing                   (make test-sanitizers)
#     scripts/test.sh long          the tests that both leave out                            (make test-long)
#
# Every stage runs even when an earlier one fails; the script fails when any did. docs/testing.md has the times.
set -uo pipefail

kind=${1:?quick, sanitizers or long}
python=.venv/bin/python
release=build/release
failed=()
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Kernels that are compiled at run time serve all stages.
export DEEPWELL_CACHE=$PWD/build/test-cache

# Sets cpu_seconds to the CPU time, user and system, of all processes that have ended so far. The last line of `times` is
# "0m1.234s 0m0.567s"; in a subshell it would be that of the subshell, so it goes through a file.
count_cpu() {
    times >"$scratch/times"
    cpu_seconds=$(awk -F '[ms ]+' 'END { printf "%d", 60 * ($1 + $3) + $2 + $4 }' "$scratch/times")
}

stage() {
    local name=$1 begin=$SECONDS cpu
    shift
    count_cpu
    cpu=$cpu_seconds
    echo "== $name"
    "$@" || failed+=("$name")
    count_cpu
    echo "== $name: $((SECONDS - begin)) s, $((cpu_seconds - cpu)) s of CPU time"
}

# slowest_c_tests PRESET: the 15 slowest of ctest's last run, from its log. pytest prints its own (tests/python/conftest.py).
slowest_c_tests() {
    local log=build/$1/Testing/Temporary/LastTest.log
    [ -f "$log" ] || return
    echo "slowest C tests (s):"
    awk '/^[0-9]+\/[0-9]+ Test: / { name = $3 } /^Test time = / { print $4, name }' "$log" | sort -rn | head -n 15 |
        awk '{ line = line (line == "" ? "  " : ", ") sprintf("%s %.1f", $2, $1) }
             length(line) > 90 { print line; line = "" }
             END { if (line != "") print line }'
}

# doctor LABEL: prints the value that `deepwell doctor` shows under this label.
doctor() { "$release/bin/deepwell" doctor | sed -n "s/^$1 *//p"; }

say_instruction_sets() {
    echo "== instruction sets: Deepwell $(doctor Instructions), GEMM $(doctor GEMM)"
}

# The sets that this machine has, each as "DEEPWELL_ISA ONEDNN_MAX_CPU_ISA".
instruction_sets() {
    local isa onednn
    while read -r isa onednn; do
        export DEEPWELL_ISA=$isa
        case $isa in
        amx) [[ $(doctor GEMM) == AMX* ]] ;;
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

# build_sanitized PRESET LEFT_OUT: builds the tests but those whose names match. CMake updates a configured folder by
# itself.
build_sanitized() {
    [ -f "build/$1/build.ninja" ] ||
        cmake --preset "$1" -DPython3_EXECUTABLE="$PWD/$python" >/dev/null || return 1
    local targets
    mapfile -t targets < <(ctest --preset "$1" -N -E "$2|^exported_symbols" | sed -n 's/^ *Test *#[0-9]*: //p')
    cmake --build "build/$1" --target deepwell deepwell_emulator "${targets[@]}"
}

# sanitized PRESET LEFT_OUT: runs the tests but those whose names match
sanitized() { build_sanitized "$1" "$2" && ctest --preset "$1" -j 2 -E "$2"; }

# Tests that ThreadSanitizer makes four times longer and that have no threads, or only threads that shorter tests have as
# well. `long` runs all of them.
WITHOUT_THREADS='^(test_amx|test_cuda_explain|test_cublaslt|test_cutlass_gemm|test_adamw_gpu|test_op_flags|test_graph|'
WITHOUT_THREADS+='test_hostile_graphs|test_gradient|test_model_config|test_out_of_memory|test_pipeline_time|test_planner.*|'
WITHOUT_THREADS+='test_runs|test_simulate|test_autoplan|test_(quantized_)?gemm|test_attention_(first_use|bias)|'
WITHOUT_THREADS+='test_(engine|operations|trainer)_gpu|test_emulator_(tcgen05|instructions|attention|gemm_scaled|memory)|'
WITHOUT_THREADS+='test_sm(90|100|120)_.*|test_segment_gemm|fuzz_.*)$'

# Long tests that AddressSanitizer leaves out, because others run the same code under it: fuzz_autoplan and
# fuzz_planner_graph the search for plans, test_engine_gpu and test_attention_device attention on an emulated GPU,
# test_sm120_gemm and test_quantized_gemm the calls and checks of GEMMs, test_engine_gpu also Hopper's GEMM, test_trainer
# most of a run on a GPU.
COVERED='^(test_autoplan|test_pipeline_time|test_attention_bias|test_segment_gemm|test_sm90_(codes|gemm|loss|program)|'
COVERED+='test_sm120_first_use|test_sm120_gemm_scaled|test_trainer_gpu)$'

# A build's output goes to a log. If the build fails, the stage that needs it builds again and prints the errors.
sanitized_builds() {
    local result=0
    mkdir -p build
    build_sanitized asan "$COVERED" >build/sanitizers.log 2>&1 || result=1
    build_sanitized tsan "$WITHOUT_THREADS" >>build/sanitizers.log 2>&1 || result=1
    scripts/fuzz.sh build >>build/sanitizers.log 2>&1 || result=1
    [ $result -eq 0 ] || echo "a build failed; its output is in build/sanitizers.log"
    return $result
}

# The inputs are the same each time, starting from the committed corpus.
fuzz_briefly() { FUZZ_SEED=1 scripts/fuzz.sh 3; }

# The operations' kernels, and beside them what else works in one thread most of the time.
operations() {
    local beside result=0
    beside_operations >"$scratch/beside" 2>&1 &
    beside=$!
    "$release/bin/deepwell-ops" test --quick || result=1
    wait "$beside" || result=1
    cat "$scratch/beside"
    return $result
}

beside_operations() {
    local result=0
    "$release/bin/deepwell-ops" grad --quick || result=1
    echo "== GPU kernels' resources"
    kernels --quick || result=1
    echo "== examples"
    examples || result=1
    return $result
}

operations_under() {
    cmake --build "build/$1" --target deepwell-ops && "build/$1/bin/deepwell-ops" test --quick
}

# Checks the compiler's figures for the GPU kernels; no GPU is needed. The compiler comes with the tests' packages.
kernels() { VIRTUAL_ENV="$PWD/.venv" "$release/bin/deepwell-kernels" "$@"; }

examples() {
    local folder result
    "$python" examples/demo.py --quick --steps 5 || return 1
    folder=$(mktemp -d) && bash examples/train.sh "$folder"
    result=$?
    rm -rf "$folder"
    return $result
}

# Two processes, PyTorch with one thread in each: more threads than cores would spin against each other. A process that
# has run its half takes tests over from the other.
python_tests() { OMP_NUM_THREADS=1 "$python" -m pytest -q -n 2 --dist worksteal -m "$1"; }

# pytest exits with 5 if no test is marked slow, which is no failure.
slow_python_tests() { python_tests "slow and not gpu" || [ $? -eq 5 ]; }

case $kind in
quick)
    say_instruction_sets
    stage "C" ctest --preset release -j 2
    stage "operations, GPU kernels' resources, examples" operations
    stage "Python" python_tests "not gpu and not slow"
    slowest_c_tests release
    ;;
sanitizers)
    say_instruction_sets
    stage "builds with sanitizers" sanitized_builds
    stage "C under AddressSanitizer and UndefinedBehaviorSanitizer" sanitized asan "$COVERED"
    stage "C under ThreadSanitizer" sanitized tsan "$WITHOUT_THREADS"
    stage "fuzzing" fuzz_briefly
    slowest_c_tests asan
    ;;
long)
    export DEEPWELL_TEST_EVERY_CASE=1
    mapfile -t sets < <(instruction_sets)
    for set in "${sets[@]}"; do
        stage "instruction set ${set% *}" with_instruction_set ${set}
    done
    stage "operations" "$release/bin/deepwell-ops" test
    stage "gradients of operations" "$release/bin/deepwell-ops" grad
    stage "GPU kernels' resources" kernels
    for preset in asan tsan; do
        stage "C under $preset" sanitized "$preset" '^$'
        stage "operations under $preset" operations_under "$preset"
    done
    stage "every allocation failing" env DEEPWELL_TEST_LONG=1 "$release/bin/test_out_of_memory"
    stage "fuzzing" scripts/fuzz.sh 600
    stage "Python, slow" slow_python_tests
    ;;
*)
    echo "usage: scripts/test.sh quick|sanitizers|long" >&2
    exit 2
    ;;
esac

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
