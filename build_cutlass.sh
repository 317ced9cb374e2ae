#!/bin/sh
# Builds CUTLASS's kernels as an optional library: `make cutlass` under another name (docs/cutlass.md).
cd "$(dirname "$0")" || exit 1
[ $# -eq 0 ] || exec bash scripts/cutlass.sh "$@"
exec make cutlass
