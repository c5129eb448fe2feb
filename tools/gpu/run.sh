#!/bin/bash
# On a machine with an NVIDIA GPU: the GPU tests, compute-sanitizer on small shapes, the benchmarks.
# See README.md beside this. Ends with a non-zero status if anything failed; every part runs anyway.
set -u
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build}
OUT=${OUT:-out/gpu}
PYTHON=${PYTHON:-python3}
# Which parts to run, in this order.
PARTS=${PARTS:-"info cpp python sanitizer bench"}
mkdir -p "$OUT"
failed=()

# step NAME SECONDS COMMAND...: runs a command with a limit, its output in $OUT/NAME.log.
step() {
  local name=$1 limit=$2
  shift 2
  local begin=$SECONDS
  if timeout "$limit" "$@" >"$OUT/$name.log" 2>&1; then
    echo "ok      $name ($((SECONDS - begin)) s)"
  else
    echo "FAILED  $name (status $?, $((SECONDS - begin)) s): the end of $OUT/$name.log:"
    tail -n 25 "$OUT/$name.log"
    failed+=("$name")
  fi
}

info() {
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit --format=csv,noheader |
    tee "$OUT/gpu.txt"
}

cpp() {
  for test in "$BUILD"/cuda_*_test; do
    step "cpp_$(basename "$test")" 300 "$test" --gtest_brief=1
  done
}

python() {
  export PYTHONPATH=python XLA_PYTHON_CLIENT_PREALLOCATE=false
  # Captured into CUDA graphs from the first op on, and never captured: the results must agree.
  XLA_FLAGS="--xla_gpu_graph_min_graph_size=1" \
    step python_graphs_on 300 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu
  XLA_FLAGS="--xla_gpu_enable_command_buffer=" \
    step python_graphs_off 300 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu
  # The kernels for every GPU, and float32 against the vectors of published models.
  DROPLESS_GPU_PATH=sm80 \
    step python_sm80 300 "$PYTHON" -m pytest -q -p no:cacheprovider \
    tests/gpu/test_gpu_layer.py tests/gpu/test_gpu_widths.py
  step python_golden_f32 300 "$PYTHON" -m pytest -q -p no:cacheprovider -k f32 \
    tests/python/test_golden.py
}

sanitizer() {
  # A checked kernel runs some hundred times slower: small shapes, one of each kind. The programs
  # run side by side, since most of a checked program's time is the host's.
  local filter=${SANITIZER_FILTER:-"*/0:*/12:*bfloat16_h7:*bfloat16_h64:*J9_*:*I1_*:*A10_*:*ZeroSized*-*Big*"}
  export DROPLESS_TEST_RAW_WORKSPACE=1  # for initcheck
  local -A programs=()
  local tool test name
  for tool in memcheck racecheck initcheck; do
    for test in "$BUILD"/cuda_*_test "$BUILD"/gemm_check; do
      name=sanitizer_${tool}_$(basename "$test")
      local arguments=(--gtest_brief=1 --gtest_filter="$filter")
      [[ $test == */gemm_check ]] && arguments=(small)
      timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 1 "$test" "${arguments[@]}" \
        >"$OUT/$name.log" 2>&1 &
      programs[$name]=$!
    done
  done
  for name in "${!programs[@]}"; do
    if wait "${programs[$name]}"; then
      echo "ok      $name"
    else
      echo "FAILED  $name (status $?): the end of $OUT/$name.log:"
      tail -n 25 "$OUT/$name.log"
      failed+=("$name")
    fi
  done
}

bench() {
  for program in "$BUILD"/bench_cuda_*; do
    local name
    name=$(basename "$program")
    step "$name" 300 "$program" --benchmark_out="$OUT/$name.json" --benchmark_out_format=json
    grep -E "_median" "$OUT/$name.log"
  done
  export PYTHONPATH=python
  step bench_layer_device 300 "$PYTHON" bench/bench_layer_device.py \
    --out "$OUT/gpu_layer_facts.json"
  "$PYTHON" tools/gpu/peers_grouped.py >"$OUT/peers.jsonl" 2>&1 || : >"$OUT/peers.jsonl"  # needs torch
  step bench_products_device 300 "$PYTHON" bench/bench_products_device.py \
    --peers "$OUT/peers.jsonl" --out "$OUT/gpu_products.json"
  # What is compiled lies in a folder: a second run spares minutes of autotuning the peers.
  JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$OUT/compiled} \
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
    step bench_layer 900 "$PYTHON" bench/bench_layer.py --device gpu --precisions bf16 \
    --also zipf float32_params --prepared --rounds 8 --seconds 3 --out "$OUT/layer_gpu.json"
  grep -E "uniform" "$OUT/bench_layer.log"
}

for part in $PARTS; do
  "$part"
done
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
