#!/usr/bin/env bash
# Run everything that is checked: lint, format, types, tests. Arguments go to pytest: scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/environment/make_venv.sh
ruff check .
ruff format --check .
mypy
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
# The workers have two cores between them.
export OMP_NUM_THREADS=1
# One worker more than cores, so that both are busy while a test waits for another process. tests/conftest.py brings the
# tests into order.
trap 'echo "Everything took $SECONDS seconds."' EXIT
python -m pytest --durations=10 --numprocesses 3 --dist loadgroup --no-loadscope-reorder
