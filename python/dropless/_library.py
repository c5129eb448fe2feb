"""Loads the shared libraries, checks that they fit the running jaxlib, registers the XLA targets.

All of it happens when this module is imported. No JAX backend is initialised by it, so
``jax.distributed.initialize`` still works afterwards.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import re
import warnings

import jax

# One target an op: the first column of the table in docs/architecture.md.
OPS = (
    "route",
    "route_backward",
    "router_terms",
    "route_of_terms",
    "route_backward_to_terms",
    "plan",
    "permute",
    "combine",
    "combine_backward",
    "group_sum",
    "expert_up",
    "grouped_gemm",
    "expert_down_backward",
    "expert_up_backward",
    "grouped_wgrad",
    "quantize_rows",
    "quantize_weight",
)

# The number in every target's name (ffi/contract.h); this Python code makes calls of this contract.
CONTRACT = 5

_PACKAGE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Libraries:
    """The loaded libraries."""

    cpu: ctypes.CDLL
    cuda: ctypes.CDLL | None
    cuda_absent_because: str  # empty when ``cuda`` is loaded
    ffi_api: tuple[int, int]  # of the build
    runtime_ffi_api: tuple[int, int] | None  # of the running jaxlib; None if it ships no headers
    version: str


def target(op: str) -> str:
    """Name of the XLA target of ``op``, the same on every platform."""
    return f"dropless_{op}_c{CONTRACT}"


def find(name: str, package: pathlib.Path = _PACKAGE) -> pathlib.Path | None:
    """Path of a library: beside this module, as installed, or in a source tree's build folder."""
    in_tree = package.parent.parent
    candidates = [package / name]
    if (in_tree / "CMakeLists.txt").is_file():
        candidates.append(in_tree / "build" / name)
    return next((path for path in candidates if path.is_file()), None)


def runtime_ffi_api(include_dir: str | pathlib.Path) -> tuple[int, int] | None:
    """FFI API (major, minor) of a jaxlib by its headers in ``include_dir``; None without them."""
    header = pathlib.Path(include_dir) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    text = header.read_text()
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in numbers:
        return None
    return int(numbers[0][1]), int(numbers[1][1])


def check_ffi_api(build: tuple[int, int], runtime: tuple[int, int] | None, jaxlib: str) -> None:
    """Raises ImportError when a jaxlib would refuse handlers of this build.

    A runtime accepts handlers of its own FFI API and of older ones. It refuses newer ones, on CUDA
    as late as the first call, with "No FFI handler registered"; hence this check.
    """
    if runtime is None or build <= runtime:
        return
    raise ImportError(
        f"Dropless was built for XLA FFI API {build[0]}.{build[1]}, but jaxlib {jaxlib} has XLA "
        f"FFI API {runtime[0]}.{runtime[1]}, which is older. Install a newer jax (pip install -U "
        f"jax jaxlib), or build Dropless from source against this jaxlib's headers."
    )


def check_contract(build: int, path: pathlib.Path) -> None:
    """Raises ImportError when a library was built from another version of the binding."""
    if build != CONTRACT:
        raise ImportError(
            f"{path} implements contract {build} of Dropless' XLA targets, but this Python code "
            f"calls contract {CONTRACT}. They come from different versions: reinstall dropless, or "
            f"rebuild the library (make build)."
        )


def check_driver(build: int, driver: int) -> str:
    """Why a CUDA driver cannot serve the CUDA library; empty if it can.

    Args:
      build: CUDA release of the library, 1000 * major + 10 * minor.
      driver: newest CUDA release that the driver supports, as ``cuDriverGetVersion`` counts it.
    """
    # Within one major release, machine code of a newer minor runs on an older driver.
    if driver // 1000 >= build // 1000:
        return ""
    build_text, driver_text = (f"{v // 1000}.{v % 1000 // 10}" for v in (build, driver))
    return (
        f"the installed NVIDIA driver supports CUDA {driver_text} at most, but Dropless was built "
        f"with CUDA {build_text}; install a newer driver (CUDA 13 needs 580 or newer)"
    )


def _open(path: pathlib.Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.dropless_version.restype = ctypes.c_char_p
    return library


def _register(library: ctypes.CDLL, path: pathlib.Path, platform: str) -> None:
    for op in OPS:
        try:
            handler = getattr(library, target(op))
        except AttributeError:
            raise ImportError(
                f"{path} has no handler {target(op)}: rebuild it (make build)."
            ) from None
        jax.ffi.register_ffi_target(target(op), jax.ffi.pycapsule(handler), platform=platform)


def _open_cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _load_cuda() -> tuple[pathlib.Path | None, ctypes.CDLL | None, str]:
    """Path, library, and why there is no library (empty if there is one)."""
    path = find("libdropless_cuda.so")
    if path is None:
        return None, None, "this build of Dropless has no CUDA library"
    driver = _open_cuda_driver()
    if driver is None:
        return path, None, "no NVIDIA driver (libcuda.so.1) is installed"
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return path, None, "the NVIDIA driver does not tell its version"
    library = _open(path)
    problem = check_driver(library.dropless_cuda_release(), version.value)
    if problem:
        warnings.warn(f"Dropless cannot use the GPU: {problem}.", RuntimeWarning, stacklevel=2)
        return path, None, problem
    return path, library, ""


def load() -> Libraries:
    """Loads the libraries and registers their targets.

    Returns:
      The loaded libraries.

    Raises:
      ImportError: no CPU library is found, it does not fit this jaxlib, or it belongs to another
        version of this Python code.
    """
    cpu_path = find("libdropless_cpu.so")
    if cpu_path is None:
        raise ImportError(
            f"libdropless_cpu.so is neither in {_PACKAGE} nor in a build folder beside it. Install "
            f"the dropless wheel, or run `make build` in the source tree."
        )
    cpu = _open(cpu_path)
    cuda_path, cuda, cuda_absent_because = _load_cuda()

    runtime = runtime_ffi_api(jax.ffi.include_dir())
    ffi_api = (cpu.dropless_ffi_api_major(), cpu.dropless_ffi_api_minor())
    for library, path, platform in ((cpu, cpu_path, "cpu"), (cuda, cuda_path, "CUDA")):
        if library is None:
            continue
        build = (library.dropless_ffi_api_major(), library.dropless_ffi_api_minor())
        check_ffi_api(build, runtime, jax.lib.__version__)
        check_contract(library.dropless_contract(), path)
        _register(library, path, platform)
    return Libraries(
        cpu=cpu,
        cuda=cuda,
        cuda_absent_because=cuda_absent_because,
        ffi_api=ffi_api,
        runtime_ffi_api=runtime,
        version=cpu.dropless_version().decode(),
    )


def workspace_bytes(op: str, *sizes: int) -> int:
    """Bytes of the workspace result of ``op``; sizes as ``dropless_<op>_workspace_bytes`` takes.

    They are the same on every device: the CPU library knows what the CUDA backend needs.
    """
    function = getattr(libraries.cpu, f"dropless_{op}_workspace_bytes")
    function.restype = ctypes.c_int64
    return function(*(ctypes.c_int64(size) for size in sizes))


def cpu_kernel() -> str:
    """GEMM micro-kernel in use on this CPU, for example ``"avx512_bf16"``."""
    function = libraries.cpu.dropless_cpu_kernel
    function.restype = ctypes.c_char_p
    return function().decode()


def cpu_kernel_tile(*, bf16: bool) -> tuple[str, tuple[int, int, int]]:
    """GEMM micro-kernel for bfloat16 or float32, and its tile: rows, columns, and packed depth."""
    function = libraries.cpu.dropless_cpu_kernel_tile
    function.restype = ctypes.c_char_p
    tile = (ctypes.c_int64 * 3)()
    name = function(ctypes.c_int(bf16), tile).decode()
    return name, tuple(tile)


# Registering twice is an error on some runtimes, so a reload of this module keeps what is loaded.
libraries: Libraries = globals().get("libraries") or load()
