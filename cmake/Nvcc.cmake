# Compiles .cu files with nvcc, found on PATH or in pip's nvidia-cuda-* wheels, by plain custom commands:
# CMake's own CUDA language does not know the wheels' layout, and its flags cannot differ by file.
#
# Sets DROPLESS_NVCC (empty if there is none), and defines
#   dropless_cuda_objects(<variable> <file.cu>...)   object files of the given sources
#   dropless_cuda_runtime                            usage requirements: headers, static cudart

find_program(DROPLESS_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda/bin DOC "The CUDA compiler")
if(NOT DROPLESS_NVCC)
  file(GLOB wheel_nvcc ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
  if(wheel_nvcc)
    set(DROPLESS_NVCC ${wheel_nvcc} CACHE FILEPATH "The CUDA compiler" FORCE)
  else()
    set(DROPLESS_NVCC "")
    return()
  endif()
endif()

file(REAL_PATH ${DROPLESS_NVCC} nvcc)
cmake_path(SET cuda_root NORMALIZE ${nvcc}/../..)
find_path(DROPLESS_CUDA_INCLUDE_DIR cuda_runtime.h
  HINTS ${cuda_root}/include ${cuda_root}/targets/x86_64-linux/include REQUIRED)
find_library(DROPLESS_CUDART_STATIC libcudart_static.a
  HINTS ${cuda_root}/lib64 ${cuda_root}/lib ${cuda_root}/targets/x86_64-linux/lib REQUIRED)

# "all": Hopper's own features (sm_90a is not forward compatible), Ampere and its successors of the same
# generation, and PTX for GPUs to come. "native": the GPU of this machine alone. "90a" or "80": that one.
set(DROPLESS_CUDA_ARCHITECTURES all CACHE STRING "GPU architectures: all, native, 90a or 80")
set(cuda_architectures ${DROPLESS_CUDA_ARCHITECTURES})
if(cuda_architectures STREQUAL native)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    set(cuda_architectures all)
  elseif(capabilities MATCHES "^9\\.0")
    set(cuda_architectures 90a)
  else()
    set(cuda_architectures 80)
  endif()
endif()

set(gencode_90a -gencode=arch=compute_90a,code=sm_90a)
set(gencode_80 -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_80,code=compute_80)
if(cuda_architectures STREQUAL all)
  set(gencode ${gencode_90a} ${gencode_80})
elseif(cuda_architectures MATCHES "^(90a|80)$")
  set(gencode ${gencode_${cuda_architectures}})
else()
  message(FATAL_ERROR "DROPLESS_CUDA_ARCHITECTURES must be all, native, 90a or 80, but is "
    "'${DROPLESS_CUDA_ARCHITECTURES}'.")
endif()

set(nvcc_flags
  -std=c++20 -O3
  -lineinfo  # source lines for profilers and the sanitizer; costs nothing at run time
  --expt-relaxed-constexpr  # std::min and our constexpr helpers in device code
  -diag-suppress=2810  # nvcc takes assigning a [[nodiscard]] type for dropping it
  -Xptxas=-warn-spills  # a spilled register is a bug in a tile policy
  -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-ffp-contract=off)
if(DROPLESS_WERROR)
  # Spill warnings stay warnings: what spills differs between releases of ptxas.
  list(APPEND nvcc_flags -Werror=cross-execution-space-call,reorder -Xcompiler=-Werror)
endif()

function(dropless_cuda_objects variable)
  set(objects)
  foreach(source IN LISTS ARGN)
    cmake_path(GET source STEM name)
    set(object ${PROJECT_BINARY_DIR}/cuda/${name}.o)
    set(architectures ${gencode})
    # A file with sm90 in its name holds what only Hopper can run.
    if(name MATCHES "_sm90(_|$)")
      set(architectures ${gencode_90a})
    endif()
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${DROPLESS_NVCC} ${nvcc_flags} ${architectures}
        -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}
        -MD -MT ${object} -MF ${object}.d -c ${source} -o ${object}
      DEPENDS ${source}
      DEPFILE ${object}.d
      COMMENT "Building CUDA object ${name}.o"
      VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  set(${variable} ${objects} PARENT_SCOPE)
endfunction()

file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuda)
add_library(dropless_cuda_runtime INTERFACE)
target_include_directories(dropless_cuda_runtime SYSTEM INTERFACE ${DROPLESS_CUDA_INCLUDE_DIR})
# cudart is static, so that one library works beside any CUDA installation or none: it opens the driver
# when first used.
target_link_libraries(dropless_cuda_runtime INTERFACE
  ${DROPLESS_CUDART_STATIC} Threads::Threads ${CMAKE_DL_LIBS} rt)
