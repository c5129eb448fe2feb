# Sets XLA_FFI_INCLUDE_DIR, the folder that holds xla/ffi/api/ffi.h.
#
# A handler carries the FFI API version of the headers it was compiled with, and a runtime refuses a newer
# one; so the headers must be those of the oldest jaxlib that is served: 0.10.2, FFI API 0.3.
set(XLA_FFI_INCLUDE_DIR "" CACHE PATH "Folder that holds xla/ffi/api/ffi.h")

if(NOT XLA_FFI_INCLUDE_DIR)
  set(python_candidates ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  find_package(Python3 COMPONENTS Interpreter QUIET)
  list(APPEND python_candidates ${Python_EXECUTABLE} ${Python3_EXECUTABLE})
  foreach(python IN LISTS python_candidates)
    execute_process(
      COMMAND ${python} -c "import jaxlib, pathlib; print(pathlib.Path(jaxlib.__file__).parent / 'include')"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed AND EXISTS ${found}/xla/ffi/api/ffi.h)
      set(XLA_FFI_INCLUDE_DIR ${found} CACHE PATH "Folder that holds xla/ffi/api/ffi.h" FORCE)
      break()
    endif()
  endforeach()
endif()

if(NOT EXISTS ${XLA_FFI_INCLUDE_DIR}/xla/ffi/api/ffi.h)
  message(FATAL_ERROR "No XLA FFI headers. Install jaxlib==0.10.2 in .venv (`make build` does), pass "
    "-DXLA_FFI_INCLUDE_DIR=<folder that holds xla/ffi/api/ffi.h>, or build without the binding: "
    "-DDROPLESS_FFI=OFF.")
endif()

file(STRINGS ${XLA_FFI_INCLUDE_DIR}/xla/ffi/api/c_api.h version_lines
  REGEX "#define XLA_FFI_API_(MAJOR|MINOR) [0-9]+")
string(REGEX REPLACE "[^0-9]+" "." version ".${version_lines}")
string(REGEX MATCH "[0-9]+\\.[0-9]+" XLA_FFI_API_VERSION "${version}")
message(STATUS "XLA FFI API ${XLA_FFI_API_VERSION} from ${XLA_FFI_INCLUDE_DIR}")
if(XLA_FFI_API_VERSION VERSION_GREATER 0.3)
  message(WARNING "These headers are newer than jaxlib 0.10.2's (FFI API 0.3): the libraries will not load "
    "on the older jaxlib releases that Dropless serves.")
endif()
