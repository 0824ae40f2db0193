#!/usr/bin/env bash
# Check whether the checkout could be released, or make a release:
#
#   bash scripts/release.sh --check                  # builds the wheel; --wheel FILE takes one that is there
#   bash scripts/release.sh 2.1.0                    # sets the version and the date, checks, and writes to dist/
set -euo pipefail
cd "$(dirname "$0")/.."

exec python -m scripts.release.release "$@"
