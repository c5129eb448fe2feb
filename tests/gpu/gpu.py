"""The GPU that tests run on, and the mark that skips them where there is none."""

import jax
import pytest

try:
    GPU = jax.devices("gpu")[0]
except RuntimeError:
    GPU = None
needs_gpu = pytest.mark.skipif(GPU is None, reason="no GPU")
