#!/usr/bin/env bash
# Build the documentation as a site in both languages into output/site. A warning is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/make_venv.sh
python scripts/build_site.py output/site
