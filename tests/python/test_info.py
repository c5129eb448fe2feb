"""`info` against the running installation."""

from __future__ import annotations

import pathlib
import platform

import flax
import jax
import jaxlib

import dropless
from dropless import _library


def test_info_tells_what_is_in_use():
    told = dropless.info()
    assert told.dropless == dropless.__version__
    assert told.python == platform.python_version()
    assert told.packages["jax"] == jax.__version__
    assert told.packages["jaxlib"] == jaxlib.__version__
    assert told.packages["flax"] == flax.__version__
    assert told.ffi_api == _library.libraries.ffi_api
    assert told.runtime_ffi_api is None or told.runtime_ffi_api >= told.ffi_api
    assert pathlib.Path(told.cpu_library).is_file()
    assert (told.cuda_library is None) == bool(told.cuda_absent_because)
    assert told.cpu_kernels["bfloat16"][0] == _library.cpu_kernel()
    assert all(min(tile) > 0 for _, tile in told.cpu_kernels.values())
    assert told.backend == jax.default_backend()
    assert len(told.devices) == jax.device_count()
    assert jax.devices()[0].device_kind in told.devices[0]


def test_info_prints_every_fact_on_a_line():
    told = dropless.info()
    text = str(told)
    assert len(text.splitlines()) == 8 + len(told.packages)
    for fact in (jax.__version__, told.cpu_library, told.cpu_kernels["float32"][0], told.backend):
        assert fact in text
    assert f"{told.ffi_api[0]}.{told.ffi_api[1]}" in text
    assert told.cuda_library is not None or told.cuda_absent_because in text
