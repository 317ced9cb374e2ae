#!/usr/bin/env bash
# `make cutlass`: see usage below.
set -euo pipefail
cd "$(dirname "$0")/.."

version=4.2.0.0
usage() {
    cat <<'END'
Usage: scripts/cutlass.sh [-h | --help]

Builds the optional library build/release/lib/libdeepwell_cutlass.so (docs/cutlass.md): puts CUTLASS's headers into
.venv, then compiles five sources with nvcc, minutes and up to 6 GB of memory for each. `make cutlass` runs this.

Environment:
  NVCC             the compiler of CUDA's toolkit, 12.8 or later (else the one on PATH, in CUDA_HOME or /usr/local/cuda)
  CUTLASS_SOURCE   a folder with CUTLASS's include/ and examples/; nothing is fetched then
  CUTLASS_JOBS     sources compiled at once (1)
END
}
if [ $# -gt 0 ]; then
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    *)
        echo "scripts/cutlass.sh: unknown argument '$1'; settings are environment variables, see --help" >&2
        exit 2
        ;;
    esac
fi
fail() {
    echo "make cutlass: $1" >&2
    exit 1
}

nvcc=${NVCC:-$(command -v nvcc || true)}
for folder in "${CUDA_HOME:-}" /usr/local/cuda; do
    [ -n "$nvcc" ] || [ ! -x "$folder/bin/nvcc" ] || nvcc=$folder/bin/nvcc
done
[ -n "$nvcc" ] || fail "there is no nvcc: install CUDA's toolkit 12.8 or later (it needs no GPU), and put nvcc on PATH or set CUDA_HOME. Nothing else of Deepwell needs it."
"$nvcc" --list-gpu-arch | grep -qx compute_100 ||
    fail "$nvcc does not support compute_100: it must be that of CUDA's toolkit 12.8 or later"

source=${CUTLASS_SOURCE:-}
if [ -z "$source" ]; then
    package() {
        .venv/bin/python -c 'import importlib.util as u; s = u.find_spec("cutlass_library"); print(s.submodule_search_locations[0] if s else "")'
    }
    installed=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("nvidia-cutlass"))' 2>/dev/null || true)
    if [ "$installed" != "$version" ]; then
        # Only its headers are used, hence --no-deps.
        .venv/bin/python -m pip install --quiet --no-deps "nvidia-cutlass==$version" ||
            fail "nvidia-cutlass $version could not be installed. Without a network: 'pip download --no-deps nvidia-cutlass==$version' elsewhere, then PIP_NO_INDEX=1 PIP_FIND_LINKS=that folder; or CUTLASS_SOURCE=a checkout of CUTLASS v4.2.0."
    fi
    source=$(package)/source
fi
[ -f "$source/include/cutlass/cutlass.h" ] || fail "$source has no include/cutlass/cutlass.h"
[ -d "$source/examples/77_blackwell_fmha" ] || fail "$source has no examples/77_blackwell_fmha, of which the attention kernel is made"

make --no-print-directory -C cuda/cutlass -j "${CUTLASS_JOBS:-1}" NVCC="$nvcc" CUTLASS="$source" \
    OBJECTS="$PWD/build/cutlass" LIBRARY="$PWD/build/release/lib/libdeepwell_cutlass.so"
echo "build/release/lib/libdeepwell_cutlass.so: its kernels are in 'deepwell explain kernels'"
