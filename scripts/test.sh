#!/usr/bin/env bash
# Run everything that is checked: lint, format, types, tests. Arguments go to pytest: scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/make_venv.sh
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
