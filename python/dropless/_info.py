"""What is installed, what was found, and what it runs on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform

import jax

from dropless import _library

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")


@dataclasses.dataclass(frozen=True)
class Info:
    """The state of an installation; ``print`` shows it line by line.

    Attributes:
      dropless: version of this library.
      python: version of Python.
      packages: versions by name; ``"not installed"`` for a package that is missing.
      ffi_api: XLA FFI API (major, minor) that the libraries were built for.
      runtime_ffi_api: that of the jaxlib in use; None if it ships no headers to read it from.
      contract: number in the names of the XLA targets.
      cpu_library: path.
      cpu_kernels: GEMM micro-kernel by element type, with its tile (rows, columns, depth).
      cuda_library: path, or None if it is not loaded.
      cuda_absent_because: why it is not; empty if it is.
      backend: JAX's default backend.
      devices: its devices, as ``platform: kind``, with the compute capability of a GPU.
    """

    dropless: str
    python: str
    packages: dict[str, str]
    ffi_api: tuple[int, int]
    runtime_ffi_api: tuple[int, int] | None
    contract: int
    cpu_library: str
    cpu_kernels: dict[str, tuple[str, tuple[int, ...]]]
    cuda_library: str | None
    cuda_absent_because: str
    backend: str
    devices: tuple[str, ...]

    def __str__(self) -> str:
        runtime = self.runtime_ffi_api
        kernels = [
            f"{name} for {dtype}, tile {'x'.join(map(str, tile))}"
            for dtype, (name, tile) in self.cpu_kernels.items()
        ]
        rows = {
            "dropless": f"{self.dropless}, contract {self.contract}",
            "python": self.python,
            **self.packages,
            "XLA FFI API": f"built for {_dotted(self.ffi_api)}, running "
            + ("unknown" if runtime is None else _dotted(runtime)),
            "CPU library": self.cpu_library,
            "CPU kernels": "; ".join(kernels),
            "CUDA library": self.cuda_library or f"not loaded: {self.cuda_absent_because}",
            "JAX backend": self.backend,
            "devices": "; ".join(self.devices),
        }
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items())


def info() -> Info:
    """Versions, libraries, kernels and devices. Initialises JAX's default backend.

    Returns:
      An ``Info``; print it, and put it in bug reports.
    """
    libraries = _library.libraries
    return Info(
        dropless=libraries.version,
        python=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
        ffi_api=libraries.ffi_api,
        runtime_ffi_api=libraries.runtime_ffi_api,
        contract=_library.CONTRACT,
        cpu_library=libraries.cpu._name,
        cpu_kernels={
            "float32": _library.cpu_kernel_tile(bf16=False),
            "bfloat16": _library.cpu_kernel_tile(bf16=True),
        },
        cuda_library=None if libraries.cuda is None else libraries.cuda._name,
        cuda_absent_because=libraries.cuda_absent_because,
        backend=jax.default_backend(),
        devices=tuple(_describe(device) for device in jax.devices()),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    suffix = f", compute capability {capability}" if capability else ""
    return f"{device.platform}: {device.device_kind}{suffix}"


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
