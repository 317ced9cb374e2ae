#!/bin/bash
# Builds, checks and measures what runs on an H100 or H200. The steps take some forty minutes together, of which
# whole models (step) take eight:
#
#     bench/gpu.sh [--out DIR] [--prebuilt DIR] [--only STEP[,STEP]...]
#
# --out        where logs and figures go (default: build/gpu-results)
# --prebuilt   a folder with libdeepwell.so, _deepwell.abi3.so, test_engine_gpu and the program deepwell made elsewhere;
#              otherwise they are built here
# --only       of: build smoke tests names sanitize attention gemm loss memory codes experts mixtures train step command
#
# Wants python3 with PyTorch for CUDA (2.9 or later), transformers, pytest and hypothesis. Every step is tried;
# the table at the end says how each went, and the exit status is 1 if one failed.
set -u
cd "$(dirname "$0")/.."
out=build/gpu-results prebuilt= only=build,smoke,tests,names,sanitize,attention,gemm,loss,memory,codes,experts,mixtures,train,step,command
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$2; shift 2 ;;
        --prebuilt) prebuilt=$2; shift 2 ;;
        --only) only=$2; shift 2 ;;
        *) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done
mkdir -p "$out"
lib=build/gpu/lib

# step NAME SECONDS COMMAND...: runs it with that much time, its output in DIR/NAME.log, how it went in DIR/NAME.row
step() {
    local name=$1 limit=$2 begin=$SECONDS status
    shift 2
    case ",$only," in *",$name,"*) ;; *) return ;; esac
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    case $status in 0) status=passed ;; 124 | 137) status="stopped after $limit s" ;; *) status="failed ($status)" ;; esac
    printf '%-10s %-24s %4d s   %s\n' "$name" "$status" $((SECONDS - begin)) "$(tail -1 "$out/$name.log")" >"$out/$name.row"
    echo "$name: $status"
}

build() {
    if [ -n "$prebuilt" ]; then
        mkdir -p "$lib" && cp "$prebuilt"/*.so* "$lib"/
    else
        cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$(command -v python3)" &&
            cmake --build build/gpu --target deepwell deepwell_python deepwell_program test_engine_gpu
    fi && ln -sfn "$PWD/$lib/_deepwell.abi3.so" python/deepwell/_deepwell.abi3.so
    # where the tests of documents look for the program
    [ -e build/release/bin/deepwell ] || { mkdir -p build/release/bin &&
        ln -sfn "$(realpath "${prebuilt:-build/gpu/bin}")/deepwell" build/release/bin/deepwell; }
}

# racecheck does not understand mbarriers that are waited for by parity. bench/NOTES.md explains its reports, which are
# shown but not counted as failures.
sanitize() {
    local tool cases found=0
    for tool in memcheck synccheck initcheck racecheck; do
        for cases in d64-b2-h4-s65x129 d128-b2-h4-s65x129 d256-b2-h4-s65x129; do
            [ $tool$cases = racecheckd64-b2-h4-s65x129 ] || [ $tool != racecheck ] || continue
            echo "== $tool $cases"
            compute-sanitizer --tool $tool --error-exitcode 9 python3 tests/gpu/attention_smoke.py \
                --lib "$lib/libdeepwell.so" -k $cases && continue
            echo "$tool $cases: findings"
            [ $tool = racecheck ] || found=$((found + 1))
        done
    done
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck synccheck initcheck racecheck; do
        for cases in engine_sanitize.py "engine_sanitize.py gpt2 llama" hopper_gemm_smoke.py; do
            epilogues=all
            [ "$cases" != engine_sanitize.py ] || epilogues=
            echo "== $tool, $cases, DEEPWELL_EPILOGUES=$epilogues"
            DEEPWELL_EPILOGUES=$epilogues compute-sanitizer --tool $tool --error-exitcode 9 \
                python3 tests/gpu/$cases && continue
            echo "$tool, $cases: findings"
            [ $tool = racecheck ] || found=$((found + 1))
        done
    done
    echo "$found runs of memcheck, synccheck and initcheck with findings"
    [ $found = 0 ]
}

codes() {
    python3 bench/hopper_tensor_codes.py --json "$out/codes.json" &&
        python3 bench/hopper_fp8_product.py --json "$out/fp8-product.json"
}

export -f build sanitize codes
export out lib prebuilt
[ ! -x "$prebuilt/test_engine_gpu" ] || export DEEPWELL_TEST_ENGINE=$prebuilt/test_engine_gpu
export LD_LIBRARY_PATH=$PWD/$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
rm -f "$out"/*.row
step build 180 bash -c build
# Correctness checks run in parallel; measurements have the machine to themselves.
step sanitize 600 bash -c sanitize &
step smoke 200 bash -c "python3 tests/gpu/hopper_gemm_smoke.py && python3 tests/gpu/attention_smoke.py --lib $lib/libdeepwell.so"
step names 300 python3 -m pytest -q -p no:cacheprovider tests/python/test_promised_names.py tests/python/test_tutorial.py
step tests 400 python3 -m pytest -q -p no:cacheprovider tests/gpu
wait
step attention 250 python3 bench/hopper_attention.py --lib $lib/libdeepwell.so --out "$out/attention.json"
step gemm 250 python3 bench/hopper_gemm.py --epilogues --out "$out/gemm.json"
step loss 200 python3 bench/hopper_loss.py --out "$out/loss.json"
step memory 300 python3 bench/hopper_memory.py --out "$out/memory.json"
step codes 160 bash -c codes
step experts 150 python3 bench/hopper_experts.py --json "$out/experts.json"
step mixtures 400 python3 bench/hopper_step.py olmoe-4 mixtral-1 qwen3-moe-4 --ways adamw,programs-off,released,grouped-compile --profile \
    --out "$out/mixtures.json"
step train 150 python3 bench/hopper_train.py --out "$out/train.json"
step step 500 python3 bench/hopper_step.py --profile --out "$out/step.json"
step command 300 python3 bench/hopper_train_command.py --program "${prebuilt:-build/gpu/bin}/deepwell" --out "$out/command.json"
printf '\n'
cat "$out"/*.row
! grep -qvE '^[a-z]+ +passed ' "$out"/*.row
