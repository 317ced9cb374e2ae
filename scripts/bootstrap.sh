#!/bin/bash
# Checks that this machine has what the build needs. As root, installs what is missing with apt-get and names it;
# otherwise prints the command to run and fails.
#
#   PYTHON   the interpreter that .venv is made from (default: python3)
#   CC       the C compiler (default: cc)
set -euo pipefail

python=${PYTHON:-python3}
cc=${CC:-cc}
required=()
optional=()

has_command() { command -v "$1" >/dev/null 2>&1; }
has_header() {
    has_command "$cc" && echo "#include <$1>" | "$cc" -E -x c - >/dev/null 2>&1
}
# cmocka's header requires these four before it.
has_cmocka() {
    has_command "$cc" && printf '#include <%s>\n' stdarg.h stddef.h stdint.h setjmp.h cmocka.h |
        "$cc" -E -x c - >/dev/null 2>&1
}
has_fuzzer() {
    has_command clang && echo 'int LLVMFuzzerTestOneInput() { return 0; }' |
        clang -w -fsanitize=fuzzer -x c - -o /dev/null >/dev/null 2>&1
}
# For tests that open reports in a browser; tests/python/browser.py says which browsers work.
has_browser() { has_command chromium-headless-shell || has_command chromium || has_command google-chrome; }
# If the distribution has no such package, PyPI has one (Makefile), which needs these.
qt_libraries=(libegl1 libgl1 libnss3 libasound2 libasound2t64 libfontconfig1 libdbus-1-3 libxkbcommon0 libxcomposite1
    libxdamage1 libxrandr2 libxtst6 libxkbfile1 libxcb-dri3-0 libgbm1 fonts-dejavu-core)
has_qt_libraries() { ldconfig -p | grep -q libxkbfile.so.1 && ldconfig -p | grep -q libEGL.so.1; }
python_can() { has_command "$python" && "$python" -c "$1" >/dev/null 2>&1; }

find_missing() {
    required=()
    optional=()
    has_command "$cc" || required+=(gcc)
    # Not for Deepwell itself: the demo and the benchmarks compare with torch.compile, which compiles C++.
    has_command g++ || has_command c++ || required+=(g++)
    has_header stdio.h || required+=(libc6-dev)
    # These two may also come from .venv, where the Makefile installs them if needed.
    if [ "$(id -u)" = 0 ]; then
        has_command cmake || required+=(cmake)
        has_command ninja || required+=(ninja-build)
    fi
    has_header jansson.h || required+=(libjansson-dev)
    has_header xxhash.h || required+=(libxxhash-dev)
    has_cmocka || required+=(libcmocka-dev)
    has_command "$python" || required+=(python3)
    python_can 'import venv, ensurepip' || required+=(python3-venv)
    python_can 'import os, sysconfig
os.stat(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' || required+=(python3-dev)
    has_header oneapi/dnnl/dnnl.h || optional+=(libdnnl-dev)
    # For the fuzz targets: libFuzzer is part of clang's run time.
    has_fuzzer || optional+=(clang libclang-rt-dev)
    has_browser || has_qt_libraries || optional+=(chromium-headless-shell)
}

install_missing() {
    export DEBIAN_FRONTEND=noninteractive
    echo "Installing system packages: ${required[*]} ${optional[*]}"
    apt-get update -qq
    if [ ${#required[@]} -gt 0 ]; then
        apt-get install -y -qq --no-install-recommends "${required[@]}"
    fi
    # Some releases lack these; without them Deepwell is slower but complete.
    local package
    for package in "${optional[@]}"; do
        apt-get install -y -qq --no-install-recommends "$package" ||
            echo "$package could not be installed: Deepwell does without it"
    done
    if ! has_browser && ! has_qt_libraries; then
        for package in "${qt_libraries[@]}"; do
            apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 || true
        done
    fi
}

check_python_version() {
    python_can 'import sys; sys.exit(sys.version_info < (3, 10))' && return
    echo "Python 3.10 or later is needed; $python is" \
         "$("$python" -V 2>&1 || echo missing). Set PYTHON to a later one: make PYTHON=..." >&2
    exit 1
}

find_missing
if [ ${#required[@]} -gt 0 ] || [ ${#optional[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && has_command apt-get; then
        install_missing
        find_missing
        if [ ${#required[@]} -gt 0 ]; then
            echo "Still missing after the installation: ${required[*]}" >&2
            exit 1
        fi
    elif [ ${#required[@]} -gt 0 ]; then
        echo "System packages are missing. Install them, then run make again:" >&2
        echo "  sudo apt-get install ${required[*]} ${optional[*]}" >&2
        exit 1
    else
        echo "For faster GEMMs, fuzzing and tests of reports: sudo apt-get install ${optional[*]}"
    fi
fi
check_python_version
