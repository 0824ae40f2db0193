#!/usr/bin/env bash
# Train a small stock MindFormers Llama in FP16 with adaptive loss scaling, on a CPU, from nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/environment/make_venv.sh
python scripts/demo/prepare_corpus.py output/corpus 2>/dev/null
python scripts/demo/demo.py --corpus output/corpus --output_dir output
