#!/usr/bin/env bash
# Builds everything, runs the C++ tests, the Python tests on the oldest supported jax, and those that jax's version may
# matter to on the newest.
# Every part runs, whatever fails before it; the exit status is 0 only if all passed. `make test` calls it.
set -u -o pipefail
cd "$(dirname "$0")/.."

jobs="${JOBS:-$(nproc)}"
summary=()
failed=0

# note NAME STATUS LINE: remembers how a part ended.
note() {
  summary+=("$1: $3")
  if [ "$2" -ne 0 ]; then failed=1; fi
}

# python_tests NAME ENVIRONMENT [FLAG...]
python_tests() {
  local log="build/pytest-$1.log"
  PYTHONPATH=python "$2/bin/python" -m pytest -n "$jobs" "${@:3}" 2>&1 | tee "$log"
  note "$1 jax, $("$2/bin/python" -c 'import jax, platform; print(jax.__version__, "Python", platform.python_version())')" \
    "${PIPESTATUS[0]}" "$(tail -n 1 "$log" | tr -d '=' | xargs)"
}

${CONFIGURE:-cmake --preset default} -DDROPLESS_TESTS=ON -DDROPLESS_CUDA="${CUDA:-OFF}" \
  -DDROPLESS_CUDA_ARCHITECTURES=native || exit 1
cmake --build build -j "$jobs" || exit 1

ctest --preset default -j "$jobs" 2>&1 | tee build/ctest.log
note "C++" "${PIPESTATUS[0]}" "$(grep 'tests passed' build/ctest.log)"

python_tests oldest .venv

"${PYTHON:-python3}" tools/environment.py .venv-newest requirements/newest.txt
case $? in
  0) python_tests newest .venv-newest -m "not any_jax" ;;  # CONTRIBUTING.md says what that leaves out
  3) note "newest jax" 0 "not tested, no Python 3.12 or newer on this machine" ;;
  *) note "newest jax" 1 "its environment could not be installed" ;;
esac

printf '\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
