#!/bin/bash
# One node of eight GPUs: vLLM on six of them, one server each, and a trainer of two ranks on the others.
#   MODEL=/models/base NANO_HOME=/data/nano ./one_node.sh first tasks.jsonl
set -euo pipefail
: "${MODEL:?folder of the base model}" "${NANO_HOME:?folder of trainings, which the servers read too}"
here=$(dirname "$(readlink -f "$0")") name=$1 tasks=$2
export NANO_HOME VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
engines=
for gpu in 0 1 2 3 4 5; do
    CUDA_VISIBLE_DEVICES=$gpu vllm serve "$MODEL" --host 127.0.0.1 --port $((8000 + gpu)) --dtype bfloat16 \
        --enable-lora --max-lora-rank 16 --max-loras 2 --max-cpu-loras 8 >"vllm-$gpu.log" 2>&1 &
    engines+=http://127.0.0.1:$((8000 + gpu))/v1,
done
for gpu in 0 1 2 3 4 5; do
    until curl -sf "http://127.0.0.1:$((8000 + gpu))/health"; do sleep 5; done
done
CUDA_VISIBLE_DEVICES=6,7 torchrun --standalone --nproc-per-node 2 -m nano_rl train --name "$name" --model "$MODEL" \
    --tasks "$tasks" --config "$here/train.toml" --engine "${engines%,}"
