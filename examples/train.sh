#!/bin/bash
# From text to a trained model without writing Python:
#
#     bash examples/train.sh [FOLDER]
#
# 1. a tokenizer and a configuration (here a small Llama for bytes; usually: any Hugging Face folder)
# 2. text to tokens
# 3. training, interrupted after a few steps and resumed
# 4. the result, loaded by transformers
#
# Everything runs on this machine, in FOLDER (default: a temporary one), within half a minute.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH=$root/.venv/bin:$PATH
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"

python - "$folder/model" <<'PYTHON'
import sys
import tokenizers
import transformers

transformers.logging.set_verbosity_error()
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
vocabulary = {"<end>": 0, **{symbol: i + 1 for i, symbol in enumerate(alphabet)}}
bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = tokenizers.decoders.ByteLevel()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>")
tokenizer.save_pretrained(sys.argv[1])
config = transformers.LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=256,
    bos_token_id=0, eos_token_id=0,
)
config.save_pretrained(sys.argv[1])
PYTHON

echo "== tokens"
python -m deepwell.tokenize --model "$folder/model" "$root"/docs/*.md -o "$folder/train.bin"
python -m deepwell.tokenize --model "$folder/model" "$root"/README.md -o "$folder/val.bin"

train=(
    deepwell train --init --model "$folder/model" --data "$folder/train.bin"
    --val "$folder/val.bin" --val-every 20 --sequence 64 --batch 16 --micro-batch 8
    --steps 60 --lr 3e-3 --warmup 5 --log "$folder/log.jsonl"
    --checkpoint "$folder/checkpoints" --save-every 20 --output "$folder/trained"
)

echo "== what it would take"
"${train[@]}" --dry-run

echo "== the run, interrupted"
"${train[@]}" --json >"$folder/events.jsonl" &
run=$!
until grep -q '"event":"step","step":5,' "$folder/events.jsonl" 2>/dev/null; do sleep 0.05; done
kill -TERM "$run"
wait "$run" || echo "status $?"
ls "$folder/checkpoints"

echo "== the run, resumed"
"${train[@]}" --resume

echo "== the result"
python - "$folder/trained" <<'PYTHON'
import sys
import transformers

transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer("The engine ", return_tensors="pt")
made = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
print(repr(tokenizer.decode(made[0])))
PYTHON
echo "$folder"
