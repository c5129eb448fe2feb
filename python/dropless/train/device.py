"""Which device a run uses, and why, in words."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

import jax

from dropless.train.config import RunConfig
from dropless.train.errors import UserError

# A healthy nvidia-smi answers in a second or two; a wedged driver never does.
_QUERY_SECONDS = 20


@dataclasses.dataclass(frozen=True)
class Device:
    """What the run's figures were measured on."""

    platform: str  # "cpu" or "gpu"
    kind: str  # as jax names it, or the processor's model
    count: int  # devices in use
    driver: str | None  # NVIDIA's driver, where there is one
    reason: str  # a sentence


def choose_device(config: RunConfig) -> Device:
    """The device that jax will use, with the reason.

    Raises:
      UserError: the mesh asks for more devices than there are, or jax finds none at all.
    """
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise UserError(f"jax finds no device to train on: {error}.") from error
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    if config.data_parallel > len(devices):
        hint = " (set JAX_NUM_CPU_DEVICES to split the processor)" if platform == "cpu" else ""
        raise UserError(
            f"--mesh data={config.data_parallel} needs {config.data_parallel} devices, "
            f"but jax has {len(devices)} {platform} device(s){hint}."
        )
    kind = _processor() if platform == "cpu" else devices[0].device_kind
    driver = driver_version()
    return Device(platform, kind, config.data_parallel, driver, _reason(platform, driver))


def _reason(platform: str, driver: str | None) -> str:
    if platform != "cpu":
        return f"jax offers it (driver {driver})" if driver else "jax offers it"
    forced = os.environ.get("JAX_PLATFORMS")
    if forced:
        return f"JAX_PLATFORMS={forced} asks for it"
    if driver is None:
        return "no NVIDIA GPU is visible"
    if not _has_cuda_plugin():
        return (
            f"a GPU is visible (driver {driver}), BUT IT IS NOT USED: jax has no CUDA plugin; "
            f'pip install "jax[cuda13]" adds it'
        )
    return (
        f"a GPU is visible (driver {driver}), BUT IT IS NOT USED: jax's CUDA plugin did not start; "
        f"JAX_PLATFORMS=cuda shows why"
    )


def _has_cuda_plugin() -> bool:
    return any(
        importlib.util.find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13)
    )


def driver_version() -> str | None:
    """The version of NVIDIA's driver if a GPU of its is visible to this process."""
    if not any(pathlib.Path("/dev").glob("nvidia[0-9]*")) and shutil.which("nvidia-smi") is None:
        return None
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_QUERY_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return _driver_version_from_kernel()
    return answer.split("\n")[0].strip() or None


def _driver_version_from_kernel() -> str | None:
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else None


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    model = match.group(1).strip() if match else "processor"
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def make_mesh(config: RunConfig) -> jax.sharding.Mesh | None:
    """The mesh of a data-parallel run, axes left to the compiler; ``None`` on one device."""
    if config.data_parallel == 1:
        return None
    return jax.make_mesh(
        (config.data_parallel,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[: config.data_parallel],
    )
