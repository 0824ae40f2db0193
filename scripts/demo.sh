#!/usr/bin/env bash
# Train a small stock MindFormers Llama in FP16 alone, with adaptive and with gradient-guided scaling, on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/environment/make_venv.sh
mkdir -p output
# MindSpore warns of features that nothing here uses. Show what it printed only if the script fails.
python scripts/demo/prepare_corpus.py output/corpus 2> output/prepare_corpus.log || { cat output/prepare_corpus.log >&2; exit 1; }
python scripts/demo/demo.py --corpus output/corpus --output_dir output
