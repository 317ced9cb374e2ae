#!/bin/bash
# Checks format, clang-tidy, warnings as errors, and ruff. Every check runs, and any finding fails the script.
set -uo pipefail

failed=0
check() { "$@" || failed=1; }

mapfile -t c_files < <(git ls-files '*.c' '*.h')
mapfile -t c_sources < <(git ls-files 'src/*.c' 'cli/*.c' 'lab/*.c' 'emulate/*.c' 'python/ext/*.c')

# clang-format does not change comments, so this checks their width. Tables may be a little wider, and a word that
# fills a line cannot be broken.
narrow_enough() { ! awk 'function longest(i, most) {
                        for (i = 1; i <= NF; i++) if (length($i) > most) most = length($i)
                        return most
                    }
                    length > 120 && longest() < 80 {print FILENAME ":" FNR ": wider than 120 columns"; found = 1}
                    END {exit !found}' "$@"; }
check narrow_enough "${c_files[@]}"

# A file's name identifies it in messages and searches. Files whose names are fixed by tools, and files of a corpus, are
# excepted.
unique_names() {
    local repeated
    repeated=$(git ls-files --cached --others --exclude-standard | grep -v '^tests/fuzz/corpus/' | sed 's|.*/||' |
        sort | uniq -d | grep -vxE 'CMakeLists\.txt|README\.md|Makefile|__init__\.py|conftest\.py')
    [ -z "$repeated" ] || { echo "names of more than one file:" $repeated >&2 && return 1; }
}
check unique_names

if command -v clang-format >/dev/null; then
    check clang-format --dry-run -Werror "${c_files[@]}"
else
    echo "clang-format is missing: install it (Debian and Ubuntu: clang-format)" >&2
    failed=1
fi
if command -v clang-tidy >/dev/null; then
    # The analyzer needs the facts that assertions state; release builds omit assertions.
    check clang-tidy -p build/release --extra-arg=-UNDEBUG --quiet --warnings-as-errors='*' "${c_sources[@]}"
else
    echo "clang-tidy is missing: install it (Debian and Ubuntu: clang-tidy)" >&2
    failed=1
fi
check cmake -S . -B build/lint -G Ninja -DCMAKE_BUILD_TYPE=Release -DDEEPWELL_WERROR=ON -DDEEPWELL_CUBINS=OFF
check cmake --build build/lint
check .venv/bin/ruff check python tests examples bench benchmarks scripts
check .venv/bin/ruff format --check python tests examples bench benchmarks scripts
exit $failed
