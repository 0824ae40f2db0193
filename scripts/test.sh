#!/usr/bin/env bash
# Run everything that is checked: lint, format, types, tests. Arguments go to pytest: scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/make_venv.sh
ruff check .
ruff format --check .
mypy
if [ $# -gt 0 ]; then
    python -m pytest "$@"
else
    status=0
    python -m pytest -m alone || status=$?
    python -m pytest -m "not alone" --numprocesses 2 --dist worksteal || status=$?
    exit $status
fi
