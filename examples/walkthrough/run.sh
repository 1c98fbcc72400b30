#!/usr/bin/env bash
# A model's life on two CPU cores, in about five minutes:
#   pretrain on code → go on with other data → fine-tune on questions and answers → export → generate → evaluate
#
#   make setup
#   bash examples/walkthrough/run.sh              # what follows run.sh goes to every `nanotron train`:
#   bash examples/walkthrough/run.sh --override tokens.train_steps=4
#
# Each part trains on a layout of its own; checkpoints do not mind. It writes into data/ and runs/ of the folder that it
# is started in, and each part goes on where it was stopped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PATH=$(cd "$here/../.." && pwd)/.venv/bin:$PATH
say() { printf '\n== %s\n' "$*"; }

say "1. pretrain on the standard library's sources: two replicas"
nanotron tokenize --stdlib
nanotron train "$here/pretrain.yaml" --plain "$@"

say "2. go on with other data, the pages of this project: two tensor-parallel ranks"
nanotron tokenize "$here/../../docs" --tokenizer data/python-bpe4096 --output data/walkthrough/prose --workers 1
nanotron train "$here/continue.yaml" --plain "$@"

say "3. fine-tune on a hundred sums: two pipeline stages"
python "$here/sums.py" write data/walkthrough
nanotron train "$here/sft.yaml" --plain "$@"

say "4. export: a folder that transformers opens"
rm -rf runs/walkthrough/exported
nanotron export-hf runs/walkthrough/sft runs/walkthrough/exported

say "5. generate, from the exported folder"
nanotron generate runs/walkthrough/exported --prompt $'Q: 3 + 4\nA:' --max-new-tokens 8

say "6. evaluate: how many of the hundred sums are right, before and after fine-tuning"
for model in continue sft; do
  nanotron generate runs/walkthrough/$model --batch-file data/walkthrough/questions.jsonl --json \
    --max-new-tokens 8 --batch-size 50 > data/walkthrough/$model.jsonl
  python "$here/sums.py" mark data/walkthrough/$model.jsonl
done
if command -v lm_eval > /dev/null; then # pip install -e '.[eval]'
  (cd "$here/../.." && lm_eval --model hf --model_args "pretrained=$OLDPWD/runs/walkthrough/exported,dtype=float32" \
    --device cpu --include_path examples/lm_eval --tasks python_next)
fi
