"""Makes a virtual environment of this repository from pinned requirements; standard library only.

    python3 tools/environment.py .venv requirements/oldest.txt [more.txt ...]

Finds a Python that is new enough, leaves the machine's own alone, and does nothing when the
environment already holds these requirements. Exit status 3: no Python is new enough.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Newest release that the pinned jaxlib wheels exist for.
NEWEST_MINOR = 14

# As CMakeLists.txt asks.
OLDEST_CMAKE = (3, 24)


def python_version(python: str) -> tuple[int, int] | None:
    """(major, minor) of an interpreter; None if it does not run, as an empty pyenv shim."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def candidate_pythons() -> list[str]:
    """Interpreters that may be on this machine, the preferred ones first."""
    found = [sys.executable, "python3"]
    found += [f"python3.{minor}" for minor in range(11, NEWEST_MINOR + 1)]
    home = pathlib.Path.home()
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", home / ".pyenv"))
    uv = pathlib.Path(os.environ.get("XDG_DATA_HOME", home / ".local" / "share")) / "uv" / "python"
    for folder in (pyenv / "versions", uv):
        found += sorted(str(p) for p in folder.glob("*3.*/bin/python3"))
    return found


def find_python(oldest_minor: int) -> str | None:
    """The first interpreter from 3.oldest_minor to 3.NEWEST_MINOR."""
    for python in candidate_pythons():
        version = python_version(python)
        if version and (3, oldest_minor) <= version <= (3, NEWEST_MINOR):
            return python
    return None


def oldest_python_minor(requirements: list[pathlib.Path]) -> int:
    """The largest "Python 3.N+" that the requirement files name."""
    texts = [path.read_text() for path in requirements]
    return max(int(n) for text in texts for n in re.findall(r"Python 3\.(\d+)\+", text) or [11])


def driver_cuda_release() -> int:
    """CUDA release of this machine's NVIDIA driver, 1000 * major + 10 * minor; 0 without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    release = ctypes.c_int(0)
    return release.value if driver.cuDriverGetVersion(ctypes.byref(release)) == 0 else 0


def gpu_requirements(requirements: list[pathlib.Path]) -> list[str]:
    """jax's CUDA plugin, of the pinned version, where the driver serves it."""
    if driver_cuda_release() < 13000:
        return []
    pins = [line for path in requirements for line in path.read_text().splitlines()]
    return [pin.replace("jax==", "jax[cuda13]==") for pin in pins if pin.startswith("jax==")]


def build_requirements(environment: pathlib.Path) -> list[str]:
    """CMake and Ninja as wheels, where the machine has none or an old one."""
    own = str((environment / "bin").resolve())
    path = [p for p in os.environ.get("PATH", "").split(os.pathsep) if p != own]
    search = os.pathsep.join(path)
    missing = []
    cmake = shutil.which("cmake", path=search)
    text = cmake and subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"version (\d+)\.(\d+)", text or "")
    if version is None or (int(version[1]), int(version[2])) < OLDEST_CMAKE:
        missing.append("cmake==4.4.5")
    if shutil.which("ninja", path=search) is None:
        missing.append("ninja==1.13.2")
    return missing


def fingerprint(requirements: list[pathlib.Path], extra: list[str]) -> str:
    """Changes whenever the environment has to be installed again."""
    digest = hashlib.sha256()
    for path in sorted({*requirements, ROOT / "requirements" / "common.txt"}):
        digest.update(path.read_bytes())
    digest.update("\n".join(extra).encode())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("requirements", type=pathlib.Path, nargs="+")
    args = parser.parse_args()

    extra = gpu_requirements(args.requirements) + build_requirements(args.folder)
    wanted = fingerprint(args.requirements, extra)
    stamp = args.folder / ".requirements"
    python = args.folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted and python_version(str(python)):
        return 0

    minor = oldest_python_minor(args.requirements)
    have = python_version(str(python))
    if have is None or have < (3, minor):
        base = find_python(minor)
        if base is None:
            print(f"{args.folder}: no Python 3.{minor} to 3.{NEWEST_MINOR} found.", file=sys.stderr)
            return 3
        print(f"{args.folder}: new environment of {base}", file=sys.stderr)
        if subprocess.run([base, "-m", "venv", "--clear", str(args.folder)]).returncode:
            print("Is the venv module installed (Debian, Ubuntu: python3-venv)?", file=sys.stderr)
            return 1

    names = ", ".join(str(path) for path in args.requirements)
    print(f"{args.folder}: installing {names}", file=sys.stderr)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for path in args.requirements:
        install += ["-r", str(path)]
    if subprocess.run([*install, *extra]).returncode:
        return 1
    stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
