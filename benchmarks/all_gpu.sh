#!/usr/bin/env bash
# Everything that needs a GPU, one after another on one card, each with a time limit of its own:
#
#   bash benchmarks/all_gpu.sh OUT [NAME...]
#
# OUT/NAME.txt is what each printed, OUT/summary.txt one line per part as it ends, with its figures; they are
# shown again at the end. Without names all run. Where a time is given, no part begins that would end after it:
#   DEADLINE=900    seconds from the start of this script
# SGLANG_PATH, VLLM_PATH, TE_PATH and TRL_PATH name folders of packages (with colons between several); MODEL a folder of
# SmolLM2-135M-Instruct (tools/convert_gguf_to_hf.py). What needs one that is not given is left out.
#
# warm and tests take no times. Begin with them on a fresh machine: SGLang, vLLM and Triton compile for minutes at their first use.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
OUT=${1:?"which folder for the results? bash benchmarks/all_gpu.sh OUT [NAME...]"}
shift
WANTED=("$@")
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$OUT"

wanted() { [[ ${#WANTED[@]} -eq 0 || " ${WANTED[*]} " == *" $1 "* ]]; }

card_is_free() {  # until less than 2 GiB are in use, at most 20 s: an engine that was killed gives memory back late
    command -v nvidia-smi >/dev/null || return 0
    for _ in {1..20}; do
        (($(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1) < 2048)) && return 0
        sleep 1
    done
    echo "memory of the GPU is still in use: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader)"
}

measure() {  # name, seconds it takes, limit in seconds, command
    local name=$1 needs=$2 limit=$3 status=0 start=$SECONDS
    shift 3
    wanted "$name" || return 0
    if ((SECONDS + needs > ${DEADLINE:-1000000})); then
        echo "$name left out: it takes about $needs s" | tee -a "$OUT/summary.txt"
        return 0
    fi
    { date -u '+%Y-%m-%d %H:%M UTC'; card_is_free; echo "\$ $*"; } >"$OUT/$name.txt"
    timeout -k 10 "$limit" "$@" >>"$OUT/$name.txt" 2>&1 || status=$?
    {
        printf '%-14s status %-3s %4d s\n' "$name" "$status" $((SECONDS - start))
        grep -hE '^RATIO|^FAILED|median|MFU|ms \(checksums|^(train|decode|update|largest)_|s per step| passed| failed|error' "$OUT/$name.txt" |
            cut -c1-190 | tail -n 14 | sed 's/^/    /'
    } | tee -a "$OUT/summary.txt"
}

engine() { "$PYTHON" benchmarks/engine_gpu.py --start-limit 150 "$@"; }
trainer() { "$PYTHON" benchmarks/train_gpu.py "$@"; }
tests() { OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 "$PYTHON" -m pytest -q -p no:cacheprovider --durations 5 "$@"; }

warm() {  # everything that compiles at its first use, at the same time
    [[ -z $("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("fla") or "")') ]] || "$PYTHON" benchmarks/warm_kernels.py --workers 8 &
    if [[ -n ${SGLANG_PATH:-} ]]; then
        engine --warm --sglang-path "$SGLANG_PATH" --shape 4b --layers 4 --start-limit 350 &
        engine --warm --sglang-path "$SGLANG_PATH" --shape qwen3.5-27b --layers 4 --load long --start-limit 350 &
        engine --warm --sglang-path "$SGLANG_PATH" --shape qwen3-next --layers 4 --start-limit 350 &
        engine --warm --sglang-path "$SGLANG_PATH" --shape qwen3-vl-2b --layers 4 --load images --start-limit 350 &
    fi
    [[ -z ${VLLM_PATH:-} ]] || engine --warm --vllm-path "$VLLM_PATH" --shape 4b --rounds 0 &
    wait
}

gpu_tests() {  # lists of files in tests/gpu: each list in a process of its own, at the same time
    local list child children=() status=0
    for list in "$@"; do
        # shellcheck disable=SC2046 # a list of words
        tests $(printf 'tests/gpu/test_%s.py ' $list) &
        children+=($!)
    done
    for child in "${children[@]}"; do wait "$child" || status=1; done
    return $status
}

pair() {  # both start at the same time and are measured in turn
    local meet
    meet=$(mktemp -d)
    engine --meet "$meet" 2 --together --shape qwen3.5-27b --layers 24 --load long --rounds 1 "$@" >"$OUT/engine_27b.log" 2>&1 &
    engine --meet "$meet" 2 --together --shape qwen3-vl-2b --load images --rounds 3 "$@" >"$OUT/engine_vl.log" 2>&1 &
    wait
    cat "$OUT/engine_27b.log" "$OUT/engine_vl.log"
}

export -f engine trainer tests warm gpu_tests pair
export PYTHON OUT
SGLANG=(${SGLANG_PATH:+--sglang-path "$SGLANG_PATH"})
VLLM=(${VLLM_PATH:+--vllm-path "$VLLM_PATH"})
WITH_TE=(env PYTHONPATH="$PYTHONPATH${TE_PATH:+:$TE_PATH}")

measure warm 200 420 bash -c warm
# Each list of files in a process of its own; then Megatron's again without TransformerEngine, and the engine's memory test with room
TESTS=("delta_rule_kernels" "delta_net_cuda" "engine_delta_kernels" "engine_vision_cuda" "engine_lora_cuda" "engine_lora_kernels"
    "engine_kernels checksum_kernel" "engine_experts" "fsdp_cuda" "fsdp_expert_parallel" "sleeping_cuda colocated_cuda"
    "megatron_cuda" "megatron_moe_cuda" "megatron_lora_cuda" ${TE_PATH:+"megatron_te" "megatron_te_precision"})
measure tests 210 420 "${WITH_TE[@]}" bash -c 'gpu_tests "$@"' _ "${TESTS[@]}"
measure tests_local 90 200 bash -c 'gpu_tests "$@"' _ "megatron_cuda" "megatron_moe_cuda" "engine_cuda"

# Hybrids and images beside SGLang
measure engine_pair 190 330 bash -c 'pair "$@"' _ "${SGLANG[@]}"
measure engine_next 125 270 bash -c 'engine "$@"' _ --shape qwen3-next --layers 12 --rounds 2 --together "${SGLANG[@]}"
measure train_hybrid 110 330 bash -c 'trainer "$@"' _ --shapes Qwen3.5-4B Qwen3.5-9B-16L --backends fsdp --tokens 8192 --steps 2
# Kernels that long samples may use
measure attention 30 90 "$PYTHON" benchmarks/attention_gpu.py
# LoRA
measure lora_train 120 470 "$PYTHON" benchmarks/lora_gpu.py --only train update
measure lora_decode 140 330 "$PYTHON" benchmarks/lora_gpu.py --only decode --rounds 1 "${SGLANG[@]}"
measure lora_largest 90 220 "$PYTHON" benchmarks/lora_gpu.py --only largest-32b
# TransformerEngine beside our layers and FSDP; FP8 holds more, so it has fewer tokens
TE_BACKENDS=(${TE_PATH:+megatron-te megatron-te-fp8 megatron-te-fp8-blocks})
measure train_4b 170 330 "${WITH_TE[@]}" bash -c 'trainer "$@"' _ --shapes 4B --backends fsdp megatron-local "${TE_BACKENDS[@]}" --fp8-tokens 12288 --steps 2
# Engine beside SGLang and vLLM
measure engine_4b 190 420 bash -c 'engine "$@"' _ --shape 4b --rounds 1 --together "${SGLANG[@]}" "${VLLM[@]}"
# As recorded before
measure weight_sync 60 120 "$PYTHON" benchmarks/weight_sync_gpu.py --shapes 4B 0.6B --buffer-size 536870912 2147483648
measure step 140 400 "$PYTHON" benchmarks/step_gpu.py --lengths 128-512 --steps 3 --trl-micro-batches 32 16 ${VLLM_PATH:+--only-vllm} ${TRL_PATH:+--trl-path "$TRL_PATH"} "${VLLM[@]}"
measure train_0.6b 60 150 bash -c 'trainer "$@"' _ --shapes 0.6B --steps 2
measure engine 150 330 bash -c 'engine "$@"' _ --shape 0.6b --rounds 2 --together "${SGLANG[@]}" "${VLLM[@]}"
measure engine_moe 160 330 bash -c 'engine "$@"' _ --shape 30b-a3b --layers 12 --rounds 2 --together "${SGLANG[@]}" "${VLLM[@]}"
measure train_hybrid_megatron 110 330 bash -c 'trainer "$@"' _ --shapes Qwen3.5-4B Qwen3.5-9B-16L --backends megatron --tokens 8192 --steps 2
measure engine_27b 280 400 bash -c 'engine "$@"' _ --shape qwen3.5-27b --load long --rounds 1 "${SGLANG[@]}"
measure train_moe 90 150 bash -c 'trainer "$@"' _ --shapes 30B-A3B-4L
[[ -z ${TE_PATH:-} ]] || measure te_runs 220 400 "${WITH_TE[@]}" "$PYTHON" benchmarks/te_runs_gpu.py
[[ -z ${MODEL:-} ]] || measure smollm2 330 600 env BASE_DIR="$OUT" RUN_DIR="$OUT/run" bash scripts/run-smollm2-135M.sh
measure colocate 150 200 "$PYTHON" benchmarks/colocate_gpu.py ${MODEL:+--model "$MODEL"}
measure plan 110 150 "$PYTHON" benchmarks/plan_gpu.py
printf '\n'
cat "$OUT/summary.txt"
