"""Every Python test runs on the CPU, split into 8 virtual devices."""

import os

# Before jax is imported: both are read when a backend is first used.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
