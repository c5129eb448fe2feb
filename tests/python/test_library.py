"""Loading: versions, exported and imported symbols, and what an import must not do."""

import importlib
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from dropless import _library

ROOT = pathlib.Path(__file__).resolve().parents[2]


def built_libraries():
    names = ("libdropless_cpu.so", "libdropless_cuda.so")
    return [path for path in map(_library.find, names) if path is not None]


def run_python(code: str) -> str:
    """Output of a fresh interpreter that finds the same dropless as this one."""
    package_parent = pathlib.Path(_library.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package_parent)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- versions -----------------------------------------------------------------------------------


def test_m1_newer_build_than_runtime_is_refused_with_both_numbers():
    with pytest.raises(ImportError, match=r"API 0\.3.*jaxlib 0\.8\.1 has XLA FFI API 0\.2"):
        _library.check_ffi_api((0, 3), (0, 2), "0.8.1")
    with pytest.raises(ImportError, match=r"API 1\.0.*API 0\.9"):
        _library.check_ffi_api((1, 0), (0, 9), "1.0")


def test_m1_same_or_older_build_is_accepted():
    for build, runtime in [((0, 3), (0, 3)), ((0, 3), (0, 5)), ((0, 9), (1, 0)), ((0, 3), None)]:
        _library.check_ffi_api(build, runtime, "9.9")


def test_runtime_ffi_api_is_read_from_headers(tmp_path):
    assert _library.runtime_ffi_api(tmp_path) is None
    folder = tmp_path / "xla" / "ffi" / "api"
    folder.mkdir(parents=True)
    (folder / "c_api.h").write_text(
        "#define XLA_FFI_API_MAJOR 3\n// words\n#define XLA_FFI_API_MINOR 14\n"
    )
    assert _library.runtime_ffi_api(tmp_path) == (3, 14)
    (folder / "c_api.h").write_text("nothing of use")
    assert _library.runtime_ffi_api(tmp_path) is None


def test_build_is_for_the_oldest_api_served():
    # jax 0.10.2 has FFI API 0.3 and refuses handlers of anything newer.
    assert _library.libraries.ffi_api == (0, 3)
    assert _library.libraries.runtime_ffi_api >= (0, 3)


def test_another_contract_is_refused_with_both_numbers():
    path, ours = pathlib.Path("/lib/x.so"), _library.CONTRACT
    words = rf"/lib/x\.so implements contract {ours + 6} .* contract {ours}\."
    with pytest.raises(ImportError, match=words):
        _library.check_contract(ours + 6, path)
    _library.check_contract(_library.CONTRACT, path)


def test_an_old_driver_is_named_with_both_cuda_versions():
    problem = _library.check_driver(build=13000, driver=12080)
    assert "CUDA 12.8" in problem
    assert "CUDA 13.0" in problem
    assert "580" in problem
    assert _library.check_driver(build=13000, driver=13000) == ""
    assert _library.check_driver(build=13020, driver=13000) == ""
    assert _library.check_driver(build=13000, driver=14010) == ""


def test_the_package_version_is_the_libraries_version():
    text = (ROOT / "pyproject.toml").read_text()
    assert _library.libraries.version == re.search(r'^version = "(.*)"', text, re.M)[1]


def test_target_names_carry_the_contract_number_of_the_header():
    header = (ROOT / "ffi" / "contract.h").read_text()
    number = int(re.search(r"#define DROPLESS_CONTRACT (\d+)", header)[1])
    assert number == _library.CONTRACT
    for op in _library.OPS:
        assert _library.target(op) == f"dropless_{op}_c{number}"


def test_ops_are_those_of_the_documented_table():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| .*\|$", page.split("## Python modules")[0], re.M)
    assert sorted(table) == sorted(_library.OPS)


# ---- finding ------------------------------------------------------------------------------------


def test_an_installed_library_goes_before_one_in_a_build_folder(tmp_path):
    package = tmp_path / "python" / "dropless"
    package.mkdir(parents=True)
    (tmp_path / "build").mkdir()
    in_tree = tmp_path / "build" / "libx.so"
    in_tree.touch()
    assert _library.find("libx.so", package) is None  # not a source tree
    (tmp_path / "CMakeLists.txt").touch()
    assert _library.find("libx.so", package) == in_tree
    installed = package / "libx.so"
    installed.touch()
    assert _library.find("libx.so", package) == installed


def test_no_library_at_all_says_what_to_do(monkeypatch):
    monkeypatch.setattr(_library, "find", lambda name: None)
    with pytest.raises(ImportError, match=r"libdropless_cpu\.so is neither.*make build"):
        _library.load()


def test_no_driver_means_no_cuda_and_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(_library, "find", lambda name: tmp_path / name)
    monkeypatch.setattr(_library, "_open_cuda_driver", lambda: None)
    _, library, reason = _library._load_cuda()
    assert library is None
    assert "libcuda.so.1" in reason


# ---- symbols ------------------------------------------------------------------------------------

# What a library may import: the C and C++ run times and nothing else.
ALLOWED_NEEDED = re.compile(
    r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-(x86-64|aarch64)\.so\.\d+"
)


def tool_output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", built_libraries(), ids=lambda path: path.name)
def test_m3_only_dropless_symbols_are_exported(path):
    lines = tool_output("nm", "-D", "--defined-only", str(path)).splitlines()
    exported = {line.split()[-1] for line in lines}
    assert all(name.startswith("dropless_") for name in exported), exported
    assert {_library.target(op) for op in _library.OPS} <= exported
    assert {"dropless_ffi_api_minor", "dropless_contract", "dropless_version"} <= exported


@pytest.mark.parametrize("path", built_libraries(), ids=lambda path: path.name)
def test_m3_nothing_beyond_the_language_run_times_is_imported(path):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", tool_output("readelf", "-d", str(path)))
    assert needed
    assert [name for name in needed if not ALLOWED_NEEDED.fullmatch(name)] == []
    # Each import names the run time it comes from: an undefined symbol without a version would be
    # looked for in whatever happens to be loaded.
    undefined = tool_output("nm", "-D", "--undefined-only", str(path)).splitlines()
    versions = ("GLIBC_", "GLIBCXX_", "CXXABI_", "GCC_")
    strays = [
        line
        for line in undefined
        if not line.split()[-1].partition("@")[2].lstrip("@").startswith(versions)
        and line.split()[0] != "w"  # weak: may stay undefined
    ]
    assert strays == []


def test_files_of_one_instruction_set_define_no_inline_function():
    # The linker keeps one copy of an inline function for the whole library. Taken from a file
    # compiled for AVX-512, it would be an illegal instruction on every other CPU.
    folder = ROOT / "build" / "CMakeFiles" / "dropless_core.dir" / "src" / "cpu"
    objects = [
        path
        for isa in ("avx2", "avx512", "avx512bf16", "amx")
        for path in folder.glob(f"*_{isa}.cc.o")
    ]
    if not objects:
        pytest.skip("no object files of special instruction sets in build/")
    for path in objects:
        lines = tool_output("nm", "-C", "--defined-only", str(path)).splitlines()
        assert [line for line in lines if line.split()[1] in "WVu"] == [], path.name


# ---- import -------------------------------------------------------------------------------------


def test_m_import_initialises_no_backend():
    # jax.distributed.initialize refuses to run once a backend exists.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    out = run_python(
        "import dropless, jax\n"
        f"jax.distributed.initialize({address!r}, num_processes=1, process_id=0)\n"
        "print('ok', len(jax.devices()) > 0)"
    )
    assert "ok True" in out


def test_m_import_takes_less_than_1500_ms_beyond_jax():
    code = (
        "import time, jax, flax.nnx, flax.linen\n"
        "start = time.perf_counter()\n"
        "import dropless\n"
        "print(time.perf_counter() - start)"
    )
    # The best of three: another process may hold the cores.
    assert min(float(run_python(code)) for _ in range(3)) < 1.5


def test_reload_keeps_the_registered_targets():
    before = _library.libraries
    module = importlib.reload(_library)
    assert module.libraries is before
    assert permuted_ones().tolist() == [[1.0]]


def test_fresh_import_in_the_same_process_registers_again():
    out = run_python(
        "import sys, dropless._library\n"
        "del sys.modules['dropless._library']\n"
        "import dropless._library\n"
        "print(len(dropless._library.OPS))"
    )
    assert int(out) == len(_library.OPS)


def permuted_ones() -> jax.Array:
    call = jax.ffi.ffi_call(
        _library.target("permute"), jax.ShapeDtypeStruct((1, 1), jax.numpy.float32)
    )
    ones = jax.numpy.ones((1, 1), jax.numpy.float32)
    rows = jax.numpy.zeros((1,), jax.numpy.int32)
    no_inverse = jax.numpy.zeros((0,), jax.numpy.int32)
    return call(ones, rows, no_inverse, experts_per_token=np.int64(1))


# ---- handlers -----------------------------------------------------------------------------------


def test_handler_errors_name_op_argument_and_what_came():
    call = jax.ffi.ffi_call(
        _library.target("permute"), jax.ShapeDtypeStruct((4, 3), jax.numpy.float16)
    )
    x = jax.numpy.zeros((2, 3), jax.numpy.float16)
    rows = jax.numpy.zeros((4,), jax.numpy.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"permute: x must be float32, bfloat16"):
        call(x, rows, rows[:0], experts_per_token=np.int64(2)).block_until_ready()


def test_unknown_enum_value_is_an_error():
    call = jax.ffi.ffi_call(
        _library.target("quantize_rows"),
        [
            jax.ShapeDtypeStruct((2, 3), jax.numpy.float8_e4m3fn),
            jax.ShapeDtypeStruct((2, 1), jax.numpy.float32),
        ],
    )
    x = jax.numpy.zeros((2, 3), jax.numpy.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"'scale_rounding' must be 0 .*, got 5"):
        call(x, scale_rounding=np.int32(5))[0].block_until_ready()


def test_absent_row_map_of_no_rows_is_still_a_map():
    # M = 0 gives slot_of_row the shape (0,) that otherwise means "absent".
    call = jax.ffi.ffi_call(
        _library.target("grouped_wgrad"),
        [
            jax.ShapeDtypeStruct((2, 3, 5), jax.numpy.float32),
            jax.ShapeDtypeStruct((0,), jax.numpy.float32),
            jax.ShapeDtypeStruct(
                (_library.workspace_bytes("grouped_wgrad", 0, 3, 1, 5, 2, 1, 0, 4),),
                jax.numpy.uint8,
            ),
        ],
    )
    empty = jax.numpy.zeros((0,), jax.numpy.float32)
    dw, *_ = call(
        jax.numpy.ones((0, 3)),
        empty,
        jax.numpy.ones((0, 1, 5)),
        empty,
        jax.numpy.zeros((0,), jax.numpy.int32),
        jax.numpy.zeros((3,), jax.numpy.int32),
        empty,
        empty,
        gather=np.int32(1),
        num_sms=np.int32(0),
        experts_per_token=np.int64(2),
        fp8=np.int32(0),
        scale_rounding=np.int32(0),
    )
    np.testing.assert_array_equal(dw, np.zeros((2, 3, 5)))


def test_kernel_name_is_a_documented_one():
    names = {"amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"}
    assert _library.cpu_kernel() in names


@pytest.mark.parametrize("name", ["portable", "abacus"])
def test_the_environment_names_the_cpu_kernels(monkeypatch, name):
    """A name this processor has is used; any other is an error of the first operation."""
    monkeypatch.setenv("DROPLESS_CPU_KERNELS", name)
    told = run_python("""
import jax, jax.numpy as jnp, dropless
from dropless import _library
try:
    y = dropless.ragged_dot(jnp.ones((3, 5)), jnp.ones((2, 5, 4)), jnp.array([1, 2]))
    print(_library.cpu_kernel(), _library.cpu_kernel_tile(bf16=False)[0], float(y.sum()))
except jax.errors.JaxRuntimeError as error:
    print(error)
""")
    if name == "portable":
        assert told.split() == ["portable", "portable", "60.0"]
    else:
        assert "DROPLESS_CPU_KERNELS must be one of auto" in told
        assert "portable on this processor, got 'abacus'" in told
