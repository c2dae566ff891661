#!/usr/bin/env bash
# The way of a local model on one device, by the command line: a tiny policy imitates, is trained by an adapter over
# its base in 4 or 8 bits, from fresh rollouts and from the log alone, evaluated and exported; plain PEFT says the same.
#
#   bash integration/one_gpu.sh [DEVICE] [FOLDER] [BITS]     # needs the extras rl and quantised; cuda, ./one-gpu and 4
set -euo pipefail
device=${1:-cuda}
mkdir -p "${2:-one-gpu}"
cd "${2:-one-gpu}"
export NANO_HOME=$PWD/home

python - <<'PYTHON'
from pathlib import Path

import nano_rl
from integration.tiny_model import build_tiny

sources = sorted(Path(nano_rl.__file__).parent.rglob("*.py"))[:60]
build_tiny("tiny", [path.read_text() for path in sources], hidden=256, max_positions=2048)
PYTHON

quantised=(--model warm --device "$device" --lora-rank 8 --set "quantise=${3:-4}bit")
nano-rl tasks make --suite functions --level 0 --view copy,emit -n 160 --out tasks.jsonl
nano-rl sft --model ./tiny --tasks tasks.jsonl --name warm --device "$device" --lora-rank 0 --learning-rate 2e-3 --epochs 12
nano-rl plan --model warm --device "$device" --set "quantise=${3:-4}bit"
nano-rl train "${quantised[@]}" --tasks tasks.jsonl --name fresh --steps 3 --group-size 8 --set temperature=1.0
nano-rl train "${quantised[@]}" --from-logs --fresh 0 --name logs --steps 2
nano-rl eval --model fresh --against warm --tasks tasks.jsonl --device "$device"
nano-rl checkpoints export fresh --to adapter --adapter
nano-rl checkpoints export fresh --to merged

python - "$device" <<'PYTHON'
import sys

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("adapter/base").to(sys.argv[1])
adapted = PeftModel.from_pretrained(base, "adapter/adapter")
merged = AutoModelForCausalLM.from_pretrained("merged").to(sys.argv[1])
prompt = AutoTokenizer.from_pretrained("merged")("def add(a, b):", return_tensors="pt").to(sys.argv[1])
said = [model.generate(prompt.input_ids, max_new_tokens=40, do_sample=False) for model in (adapted, merged)]
assert said[0].equal(said[1]), "plain PEFT and the merged export differ"
print("plain PEFT says what the merged export says")
PYTHON
