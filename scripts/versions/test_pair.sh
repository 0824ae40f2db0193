#!/usr/bin/env bash
# Run the tests with another pair of versions, in a .venv of its own: scripts/versions/test_pair.sh 2.7.0 1.6.0 [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."

mindspore_version=$1 mindformers_version=$2
shift 2
source scripts/versions/pair_venv.sh
python -m pytest "$@"
