#!/usr/bin/env bash
# Formatters and linters over the whole tree; any finding is an error. `make lint` calls it.
set -u
cd "$(dirname "$0")/.."

failed=0
bin=.venv/bin

"$bin/ruff" check . || failed=1
"$bin/ruff" format --check . || failed=1

# The README's table must be what the result files say.
"$bin/python" bench/report.py --check || failed=1

git ls-files '*.cc' '*.h' '*.cu' '*.cuh' |
  xargs "$bin/clang-format" --dry-run --Werror || failed=1

# clang-tidy reads build/compile_commands.json. Headers are checked through the files that include them.
# Left out: the micro-kernels, made of intrinsics, and device code.
if command -v clang-tidy >/dev/null; then
  git ls-files 'src/core/*.cc' 'src/reference/*.cc' 'src/cpu/*.cc' 'ffi/abi.cc' 'ffi/*_cpu.cc' 'examples/*.cc' |
    grep -vE '_(avx2|avx512|avx512bf16|amx)\.cc$' |
    xargs -P "$(nproc)" -n 4 clang-tidy -p build --quiet || failed=1
else
  echo "clang-tidy is not installed (Debian, Ubuntu: clang-tidy)" >&2
  failed=1
fi
exit "$failed"
