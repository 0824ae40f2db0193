#!/usr/bin/env bash
# Install the wheel beside a pair of versions, away from this checkout, and train the demo's YAML file with both cells:
#
#   bash scripts/versions/check_pair.sh 2.10.0 2.1.0
#
# Each cell trains 60 steps, and once more from the checkpoint of step 30: the records of steps 31 to 60 must be equal.
set -euo pipefail
cd "$(dirname "$0")/../.."

mindspore_version=$1 mindformers_version=$2
source scripts/versions/pair_venv.sh
project=$PWD work=$PWD/output/check_pair/${mindspore_version}_$mindformers_version
rm -rf "$work"
mkdir -p "$work"
# By way of the source distribution, which no former build can get into.
python -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' "$work" > "$work/build.log" 2>&1
pip=(python -m pip --quiet --quiet --disable-pip-version-check)
"${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$work" "$work"/*.tar.gz
"${pip[@]}" install --no-deps --target "$work/installed" "$work"/*.whl
python scripts/demo/prepare_corpus.py "$work/corpus" --samples 480 2> /dev/null

cd "$work"
export PYTHONPATH=$work/installed
program=installed/bin/adaptive-loss-scale
"$program" --version

# train OUTPUT TYPE [arguments]
train() {
    "$program" train --config "$project/configs/tiny_llama_cpu_fp16.yaml" --train-dataset-dir corpus --num-samples 480 \
        --output-dir "$1" "${@:3}" \
        --options callbacks.1.save_checkpoint_steps=30 "runner_wrapper.scale_sense=$2" > "$1.log" 2>&1 || {
        tail -n 30 "$1.log"
        exit 1
    }
}

start="loss_scale_value: 4294967296"
for section in \
    "{type: AdaptiveLossScale, $start, scale_factor: 2, scale_window: 20}" \
    "{type: GradientGuidedLossScaleUpdateCell, $start}"; do
    cell=$(grep -oE '[A-Z]\w+' <<< "$section")
    train "$cell" "$section"
    train "$cell-resumed" "$section" --load-checkpoint "$cell/checkpoint" \
        --resume-training tiny_llama_rank_0-1_30.ckpt
    python - "$cell" <<'END'
import sys
from pathlib import Path

from mindformers_adaptive.monitor import read_record

whole, resumed = (read_record(Path(sys.argv[1] + end, "loss_scale_record.jsonl")) for end in ("", "-resumed"))
steps = [entry["step"] for entry in whole]
if steps != [*range(1, 61)] or resumed != whole[30:]:
    sys.exit(f"{sys.argv[1]}: the resumed run did not take the steps of the whole one, see {Path.cwd()}")
skipped = sum(entry["overflow"] for entry in whole)
print(f"{sys.argv[1]}: 60 steps, {skipped} skipped, loss {whole[0]['loss']:.2f} to {whole[-1]['loss']:.2f}; resumed alike")
END
done
