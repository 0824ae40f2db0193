#!/usr/bin/env bash
# Run the tests with another pair of versions, in a .venv of its own: scripts/test_pair.sh 2.7.0 1.6.0 [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

mindspore_version=$1 mindformers_version=$2
shift 2
source scripts/python.sh
venv=.venv_${mindspore_version}_$mindformers_version
if [ ! -e "$venv/complete" ]; then
    "$(find_python)" -m venv --clear "$venv"
    pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    # MindFormers first, with the MindSpore that it asks for: 1.9.0 runs with 2.10.0 too, but does not say so.
    "${pip[@]}" "mindformers==$mindformers_version" $(grep -v '^mind' requirements.txt | grep '==')
    "${pip[@]}" "mindspore==$mindspore_version" 'numpy<2'
    "${pip[@]}" --no-deps --no-build-isolation --editable .
    touch "$venv/complete"
fi
PATH="$PWD/$venv/bin:$PATH" python -m pytest "$@"
