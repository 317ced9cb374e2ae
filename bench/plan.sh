#!/usr/bin/env bash
# Compares the planner with published training runs: errors of time with each source left out of the fit, and the
# baseline; and, with the built-in constants, memory, choice, and which runs fit. DEEPWELL_DATA is the folder of
# runs.csv and oom.csv.
set -euo pipefail
cd "$(dirname "$0")/.."

data=${DEEPWELL_DATA:-}
program=build/release/bin/deepwell-lab
if [[ -z $data ]]; then
    echo "bench-plan: DEEPWELL_DATA is not set; set it to the folder of runs.csv and oom.csv, the published runs" >&2
    exit 1
fi
if [[ ! -f $data/runs.csv ]]; then
    echo "bench-plan: DEEPWELL_DATA is $data, which has no runs.csv; set it to the folder of published runs" >&2
    exit 1
fi

echo "== Constants fitted without each source =="
"$program" calibrate "$data/runs.csv"
echo
echo "== Built-in constants =="
failures=()
[[ -f $data/oom.csv ]] && failures=(--failures "$data/oom.csv")
"$program" evaluate "$data/runs.csv" "${failures[@]}"
