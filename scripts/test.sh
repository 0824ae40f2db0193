#!/usr/bin/env bash
# Run everything that is checked: lint, format, types, tests. With --quick, leave out the tests marked slow. Other
# arguments go to pytest: scripts/test.sh tests/rules
set -euo pipefail
cd "$(dirname "$0")/.."

selection=()
if [ "${1:-}" = --quick ]; then
    selection=(-m "not slow")
    shift
fi
source scripts/environment/make_venv.sh
ruff check .
ruff format --check .
if [ $# -gt 0 ]; then
    mypy
    exec python -m pytest "${selection[@]}" "$@"
fi
# MindSpore's threads spin while they wait for each other, so more workers or threads than cores take longer.
export OMP_NUM_THREADS=1
# Compiling a graph allocates many small objects. It takes less time with jemalloc and huge pages, or else with a larger
# cache of freed memory per thread in glibc.
allocator=$(python -c "from ctypes.util import find_library; print(find_library('jemalloc') or '')")
if [ -n "$allocator" ]; then
    export LD_PRELOAD=$allocator MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1,metadata_thp:always,thp:always
else
    export GLIBC_TUNABLES=glibc.malloc.tcache_count=60000
fi
trap 'echo "Everything took $SECONDS seconds."' EXIT
# mypy uses one core, so check the types beside the tests.
found=$(mktemp)
mypy > "$found" 2>&1 &
types=$!
status=0
python -m pytest --durations=10 --numprocesses 2 --dist loadgroup --no-loadscope-reorder "${selection[@]}" || status=$?
wait "$types" || status=$?
cat "$found"
rm "$found"
exit "$status"
