#!/usr/bin/env bash
# Builds dist/dropless-*.whl with both libraries and gives it the manylinux tag its symbols allow.
# `make wheel` calls it.
set -eu
cd "$(dirname "$0")/.."

export PATH="$PWD/.venv/bin:$PATH"
rm -rf dist
python -m build --wheel --no-isolation --outdir dist/raw \
  --config-setting=cmake.define.DROPLESS_CUDA="$CUDA" \
  --config-setting=build.tool-args="-j$JOBS"
auditwheel repair --wheel-dir dist dist/raw/*.whl
rm -r dist/raw
ls -l dist
