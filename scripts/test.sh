#!/usr/bin/env bash
# Run everything that is checked: lint, format, types, tests. Arguments go to pytest: scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/make_venv.sh
ruff check .
ruff format --check .
mypy
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
# The workers have two cores between them.
export OMP_NUM_THREADS=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
# Only the files that have such tests, because to collect the others takes longer.
mapfile -t alone < <(grep --recursive --files-with-matches --include="test_*.py" pytest.mark.alone tests)
python -m pytest -m alone --durations=10 "${alone[@]}" | tee "$log" || status=$?
# One worker more than cores, so that both are busy while a test waits for another process. tests/conftest.py brings the
# tests into order.
python -m pytest -m "not alone" --durations=10 --numprocesses 3 --dist loadgroup --no-loadscope-reorder |
    tee --append "$log" || status=$?
echo "The ten slowest:"
grep -E '^[0-9.]+s (call|setup|teardown) ' "$log" | sort -rn | sed -n 1,10p
echo "Everything took $SECONDS seconds."
exit $status
