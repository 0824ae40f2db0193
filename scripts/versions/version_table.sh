#!/usr/bin/env bash
# Run the tests with other pairs of MindSpore and MindFormers, and print a table of what passed:
#
#   bash scripts/versions/version_table.sh                  # all tested pairs beside the reference
#   bash scripts/versions/version_table.sh 2.7.0+1.6.0
#
# Each pair is installed into a .venv of its own, as scripts/versions/test_pair.sh does. The output of the tests goes to
# output/version_table. Where they do not come to an end, the table says so.
set -euo pipefail
cd "$(dirname "$0")/../.."

logs=output/version_table
mkdir -p "$logs"
# MindFormers' trainers leave settings in their process that change how later graphs compile; see tests/conftest.py.
trainers=(tests/gradients tests/mindformers)

# The counts in the last line of pytest's output, as it has them: run PAIR COLUMN [pytest arguments]
run() {
    local log="$logs/$1 $2.log"
    bash scripts/versions/test_pair.sh "${1%+*}" "${1#*+}" --numprocesses "$(nproc)" --dist loadgroup --no-loadscope-reorder "${@:3}" > "$log" 2>&1 || true
    grep -E '[0-9]+ [a-z]+.* in [0-9.]+s' "$log" | tail -n 1 | grep -oE '[0-9]+ (failed|passed|skipped|error)' ||
        echo "1 not run to the end"
}

# Counts of the same outcome added up, in one line.
add_up() {
    awk '{ outcome = substr($0, length($1) + 2); if (!(outcome in sum)) names[++n] = outcome; sum[outcome] += $1 }
        END { for (i = 1; i <= n; i++) printf "%s%d %s", (i > 1 ? ", " : ""), sum[names[i]], names[i] }'
}

[ $# -gt 0 ] || set -- 2.7.0+1.6.0 2.10.0+1.9.0 2.10.0+2.0.0 2.10.0+2.1.0
echo "| MindSpore | MindFormers | not slow | resume |"
echo "|---|---|---|---|"
for pair in "$@"; do
    fast=$({
        run "$pair" "not slow" -m "not slow" "${trainers[@]/#/--ignore=}"
        run "$pair" "not slow, trainers" -m "not slow" "${trainers[@]}"
    } | add_up)
    echo "| ${pair%+*} | ${pair#*+} | $fast | $(run "$pair" resume tests/mindformers/test_resume.py | add_up) |"
done
