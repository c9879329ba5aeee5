#!/usr/bin/env bash
# What someone does who has no checkout: builds the wheel, installs it into an empty environment
# (its dependencies come from the package index), and runs a night from an empty folder.
# PYTHON=/path/to/python chooses the Python. Leaves nothing behind.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tree=$folder/tree wheels=$folder/wheels own=$folder/own
mkdir "$tree" "$own"

# A copy, because a build leaves files where it is done, and packs what an earlier one left there.
cp -R pyproject.toml README.md LICENSE src engines perf_tests "$tree"
rm -rf "$tree"/src/*.egg-info
"${PYTHON:-python3}" -m pip wheel --no-deps --wheel-dir "$wheels" "$tree"
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install "$wheels"/headway-*.whl

cd "$own"
export HEADWAY_HOME=$folder/home
headway=$folder/venv/bin/headway
"$headway" init
"$headway" run smoke --level c4
"$headway" gate reports/*-smoke-*
"$headway" run mine
"$headway" gate reports/*-mine-*
