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
# Each worker has a core, see tests/conftest.py, which also brings the tests into order. With one more, MindSpore's
# threads would wait for each other in many short turns, and everything would take longer.
export OMP_NUM_THREADS=1
trap 'echo "Everything took $SECONDS seconds."' EXIT
python -m pytest --durations=10 --numprocesses 2 --dist loadgroup --no-loadscope-reorder
