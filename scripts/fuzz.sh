#!/bin/bash
# Runs the fuzz targets of tests/fuzz under libFuzzer with ASan and UBSan, one per core at a time:
#
#     scripts/fuzz.sh SECONDS [NAME...]      NAME: graph_json, ...; default: all
#     scripts/fuzz.sh build                  only builds them
#
# Inputs that reach new code are kept in build/fuzz/corpus, and the next run continues from there. If FUZZ_SEED is set,
# a run starts from the committed corpus alone with that seed, and keeps nothing. An input that breaks a target is
# stored in build/fuzz/findings; the script then prints the command that runs it again, and fails.
set -uo pipefail

seconds=${1:?how many seconds for each target?}
shift
build=build/fuzz

if ! command -v clang >/dev/null ||
    ! echo 'int LLVMFuzzerTestOneInput() { return 0; }' |
        clang -w -fsanitize=fuzzer -x c - -o /dev/null 2>/dev/null; then
    echo "skipped: there is no clang with libFuzzer here (Debian and Ubuntu: clang libclang-rt-dev);" \
         "ctest has run the corpora and mutations of them all the same"
    exit 0
fi

# CMake updates a configured folder by itself.
[ -f $build/build.ninja ] || cmake --preset fuzz >/dev/null || exit 1
cmake --build --preset fuzz || exit 1
[ "$seconds" != build ] || exit 0

# Runs one target. Its output goes to a file, and one line is printed here.
fuzz() {
    local name=$1
    local corpus=$build/corpus/$name log=$build/log/$name.txt options=(-seed="${FUZZ_SEED:-0}")
    if [ -n "${FUZZ_SEED:-}" ]; then
        corpus=$build/scratch/$name
        rm -rf "$corpus"
    fi
    mkdir -p "$corpus" $build/log $build/findings
    [ -f "tests/fuzz/$name.dict" ] && options+=(-dict="tests/fuzz/$name.dict")
    # libFuzzer stores new inputs in the first folder.
    if "$build/bin/fuzz_$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -max_len=65536 -print_final_stats=1 -artifact_prefix=$build/findings/"$name"- \
        "${options[@]}" "$corpus" "tests/fuzz/corpus/$name" >"$log" 2>&1; then
        awk -v name="$name" '/number_of_executed_units/ {runs = $2} / cov: / {branches = $4}
                             END {printf "%s: %d inputs, %d branches\n", name, runs, branches}' "$log"
        return
    fi
    grep -v '^#' "$log" | tail -n 60
    echo "$name: FAILED; the whole output is in $log. Run the input again:"
    sed -n "s|.*Test unit written to \(.*\)|    $build/bin/fuzz_$name \1|p" "$log"
    echo "    (or build/asan/bin/fuzz_$name FILE, built with the project's own compiler)"
    return 1
}
export -f fuzz
export build seconds

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
    for source in tests/fuzz/fuzz_*.c; do
        name=${source##*/fuzz_}
        names+=("${name%.c}")
    done
fi
printf '%s\n' "${names[@]}" | xargs -P "$(nproc)" -I{} bash -c 'fuzz "$1"' fuzz {}
