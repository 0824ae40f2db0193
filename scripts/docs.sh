#!/usr/bin/env bash
# Build the documentation as a site in both languages into output/site. A warning is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/environment/make_venv.sh
python -m scripts.site.build_site output/site
