#!/usr/bin/env bash
# Installs dist/dropless-*.whl in an environment of its own and uses it as a stranger would: with no compiler,
# no source tree and no GPU.
set -eu
cd "$(dirname "$0")/.."

root="$PWD"
wheel="$(ls "$root"/dist/dropless-*.whl)"
size=$(stat -c %s "$wheel")
if [ "$size" -ge 30000000 ]; then
  echo "$wheel has $size bytes; the limit is 30 MB" >&2
  exit 1
fi

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"$root/.venv/bin/python" -m venv "$folder/venv"
cd "$folder"

# Only what Python itself is on PATH: no compiler, no CUDA toolkit.
run() { env -i HOME="$folder" PATH="$folder/venv/bin" JAX_PLATFORMS=cpu "$@"; }

run pip install --quiet --disable-pip-version-check "$wheel"
run python - <<'PYTHON'
import jax
import jax.numpy as jnp
from flax import nnx

import dropless

layer = dropless.MoELayer(num_experts=8, experts_per_token=2, model_dim=48, rngs=nnx.Rngs(0))
x, target = jax.random.normal(jax.random.key(1), (2, 51, 48))


@nnx.jit
def step(layer):
    loss, gradients = nnx.value_and_grad(lambda layer: jnp.mean((layer(x) - target) ** 2))(layer)
    parameters = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda p, g: p - 3.0 * g, parameters, gradients))
    return loss


losses = [float(step(layer)) for _ in range(20)]
print("losses", losses[0], "...", losses[-1])
assert losses[-1] < 0.9 * losses[0]
print(dropless.info())
PYTHON

run pip install --quiet --disable-pip-version-check "$wheel[train]"
run dropless-train --preset tiny --steps 3 --out "$folder/run"
test -s "$folder/run/metrics.jsonl"

# The symbols of the libraries as they are shipped; this needs nm and readelf.
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pytest pytest-timeout
"$folder/venv/bin/python" -m pytest -q -p no:cacheprovider "$root/tests/python/test_library.py" -k "m1 or m3"
